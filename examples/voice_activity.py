"""Streaming: an LSTM detects voice activity frame by frame; each call passes its states to the next.

    python examples/voice_activity.py  # an optional argument is the number of steps

The sound is synthetic: syllables with three formants (resonances) and hisses, in noise. The last lines compare the LSTM
with the best threshold on the energy, and compare streaming with one call for the whole sequence.
"""

import os
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # set before NumPy is imported: more threads would be slower

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from support.command import numbers, run_main
from support.curves import draw

from mlx_lstm.nn import LSTM

RATE, HOP, SAMPLES, BANDS = 8000, 80, 32_000, 16  # samples in a second, in a frame, in a scene; energies per frame


def syllable(rng, pitch, samples):
    """Return the sound of a vowel; in half of the cases a hiss comes before it."""
    phase = 2 * np.pi * np.cumsum(pitch * (1 + 0.1 * np.linspace(*rng.uniform(-1, 1, 2), samples))) / RATE
    harmonics = np.arange(1, int(3400 / pitch))[:, None]
    away = (harmonics * pitch - rng.uniform((250, 900, 2200), (800, 2000, 3000))) / 80  # distance from three formants
    sound = (1 / (1 + away**2)).sum(axis=1) @ np.sin(harmonics * phase) * np.sin(np.linspace(0, np.pi, samples)) ** 0.5
    hiss = samples // 4 * rng.integers(0, 2)
    return np.append(np.diff(rng.standard_normal(hiss + 1)), sound[hiss:]) / 2


def scene(rng):
    """Return a sound, and for each frame whether somebody speaks; an utterance includes its short pauses."""
    place, sound, active = rng.integers(0, RATE), np.zeros(2 * SAMPLES), np.zeros(2 * SAMPLES, bool)
    while place < SAMPLES:
        start, pitch = place, rng.uniform(90, 220)
        for length in rng.integers(1000, 2200, rng.integers(2, 6)):
            sound[place : place + length] = syllable(rng, pitch, length)
            place += length + rng.integers(0, 500)
        active[start:place], place = True, place + rng.integers(4000, 16000)
    levels = np.interp(np.arange(SAMPLES), range(0, SAMPLES, RATE), rng.uniform(-1.5, 0, SAMPLES // RATE))
    noise = 10**levels * np.convolve(rng.standard_normal(SAMPLES), rng.uniform(0, 0.9) ** np.arange(30), "same")
    return sound[:SAMPLES] + 0.3 * noise, active[:SAMPLES:HOP]


def features(samples):
    """Return log energies [frames, BANDS]. Each row describes 160 samples; the next row starts 80 samples later."""
    frames = np.lib.stride_tricks.sliding_window_view(samples, 2 * HOP)[::HOP] * np.hanning(2 * HOP)
    power = np.abs(np.fft.rfft(frames)[:, 1:]) ** 2
    return np.log10(1e-3 + power.reshape(len(frames), BANDS, -1).mean(axis=-1)).astype(np.float32)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = LSTM(BANDS, 32), nn.Linear(32, 1)

    def __call__(self, frames):
        return self.head(self.lstm(frames)[0])[..., 0]  # scores, above 0 for speech


def stream(model, samples):
    """Return the score of each frame, computed as soon as its samples arrive, and the milliseconds it took."""
    heard, state, scores, times = np.zeros(2 * HOP), (None, None), [], [time.perf_counter()]
    for frame in samples.reshape(-1, HOP):
        state = model.lstm.step(mx.array(features(heard := np.append(heard[HOP:], frame))[0]), *state)
        scores.append(model.head(state[0]).item())
        times.append(time.perf_counter())
    return scores, 1000 * np.diff(times)


def main(steps=80):
    """Train the detector, compare it with a threshold, run it as a stream, and draw its output over time."""
    mx.random.seed(0)
    sounds, active = map(np.stack, zip(*map(scene, [np.random.default_rng(0)] * 40), strict=True))
    frames = np.stack([features(np.pad(sound, (HOP, 0))) for sound in sounds])  # silence before the sound
    x, y, model, optimizer = mx.array(frames[:24]), mx.array(active[:24], mx.float32), Detector(), optim.Adam(1e-2)
    step = nn.value_and_grad(model, lambda: nn.losses.binary_cross_entropy(model(x), y))
    for n in range(1, steps + 1):
        loss, gradients = step()
        optimizer.update(model, gradients)
        print(f"step {n:2}: loss {loss.item():.3f}") if n % 20 == 0 else None
    energy = frames.mean(axis=-1)
    limit = max(np.quantile(energy, np.arange(100) / 100), key=lambda limit: ((energy > limit) == active)[:24].mean())
    whole = np.array(model.eval()(mx.array(frames[24:])))
    ours, threshold = ((whole > 0) == active[24:]).mean(), ((energy > limit) == active)[24:].mean()
    scores, costs = stream(model, sounds[24])
    print(f"right answers, of {whole.size}: {ours:.1%}; by the best threshold on the energy: {threshold:.1%}")
    print(f"streaming and the whole sequence are {np.abs(scores - whole[0]).max():.0e} apart")
    lines = {"speech": active[24].astype(float), "LSTM": 1 / (1 + np.exp(-np.array(scores)))}
    draw("voice_activity", "Is somebody speaking?", lines, 0.01 * np.arange(len(scores)), xlabel="seconds")
    print("a frame of 10 ms took {:.2f} ms, one in a hundred {:.2f} or more".format(*np.quantile(costs, [0.5, 0.99])))


if __name__ == "__main__":
    run_main(lambda: main(*numbers(__doc__)))
