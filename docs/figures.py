"""Measure the figures of time and memory in the pages for which `python -m mlx_lstm.bench` has no case.

    python docs/figures.py streaming lengths     # two tables
    python docs/figures.py --threads 1 calls     # one table, with one BLAS thread
    python docs/figures.py --only GRU torch      # only the rows whose text contains "GRU"

Each implementation runs alone in a process, and the processes take turns. The script prints for each implementation the
median time of a run and the shortest time; the CPU time of all threads; both ratios to the last implementation of the
row, with the lowest and the highest ratio of a turn; and the peak memory of a run, as MLX counts it. Results are not
checked here, because the tests check them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

SETTLE = 0.25
"""Seconds to wait before and after a turn, until the threads of BLAS sleep."""

PAUSE = 0.003
"""Seconds before each frame in the rows `paced` of the table `streaming`."""

FRAMES = 50
"""Frames in one run of the table `streaming`."""

Run = Callable[[], float | None]
"""A run of an implementation. It may return the seconds that it slept, which do not belong to its time."""


def layer_of(who: str, kind: str, units: int) -> Any:
    """Return a new layer with as many inputs as units: a layer of `mlx.nn` if `who` is "mlx", else a layer of this
    package, with quantized weights if `who` ends with "4 bits"."""
    import mlx.core as mx
    import mlx.nn

    import mlx_lstm.nn

    mx.set_default_device(mx.cpu)
    mx.random.seed(0)
    module: Any = mlx.nn if who == "mlx" else mlx_lstm.nn
    layer = getattr(module, kind)(units, units, **({"engine": "ops"} if who == "ops" else {}))
    if who.endswith("4 bits"):
        layer = getattr(mlx_lstm.nn, f"Quantized{kind}").from_layer(layer, bits=4)
    mx.eval(layer.parameters())
    return layer


def in_frames(call: Callable[[Any, Any], Any], frames: list[Any], arrival: str) -> Run:
    """Return a run that calls `call(frame, state)` for each frame; it returns the state for the next call."""
    state: Any = ()

    def run() -> float:
        nonlocal state
        slept = 0.0
        for frame in frames:
            if arrival == "paced":
                start = time.perf_counter()
                time.sleep(PAUSE)
                slept += time.perf_counter() - start
            state = call(frame, state)
        return slept

    return run


def streaming(who: str, kind: str, arrival: str, H: int) -> Run:
    """Return a run of single steps of one sequence. The results of each step are evaluated before the next step."""
    import mlx.core as mx
    import numpy as np

    frames: list[Any] = [np.random.default_rng(k).standard_normal((1, H), np.float32) for k in range(FRAMES)]
    if who == "torch":
        import torch

        model: Any = getattr(torch.nn, kind)(H, H).eval()

        def torch_call(frame: Any, state: Any) -> Any:
            with torch.inference_mode():
                return model(frame, *state)[1:]

        return in_frames(torch_call, [torch.from_numpy(frame[None]) for frame in frames], arrival)
    layer = layer_of(who, kind, H).eval()
    frames = [mx.array(frame[:, None] if who == "mlx" else frame) for frame in frames]
    mx.eval(frames)
    if who.startswith("stepper"):
        stepper = layer.stepper(1)
        return in_frames(lambda frame, _: mx.eval(stepper(frame)), frames, arrival)

    def call(frame: Any, state: Any) -> Any:
        out = layer(frame, *state) if who == "mlx" else layer.step(frame, *state)
        state = out if kind == "LSTM" else (out,)
        state = tuple(a[:, -1] for a in state) if who == "mlx" else state
        mx.eval(state)
        return state

    return in_frames(call, frames, arrival)


def training(who: str, kind: str, T: int, B: int, H: int) -> Run:
    """Return a training step of one layer with the sum of h^2 as the loss.

    The step computes the gradients of the parameters. If `who` is "input", it also computes the gradient of the input;
    if `who` is "lengths", the sequences have different lengths; if `who` is "4 bits" or "frozen", it computes the
    gradient of the input only, because quantized weights have no gradient.
    """
    import mlx.core as mx
    import mlx.nn

    if who.startswith("torch"):
        return training_torch(who, kind, T, B, H)
    layer = layer_of(who, kind, H)
    x = mx.random.normal((B, T, H))
    lengths = mx.array(spread(T, B)) if who == "lengths" else None
    mx.eval(x)

    def loss(x: Any) -> Any:
        out = layer(x) if lengths is None else layer(x, lengths=lengths)
        return mx.square(out[0] if kind == "LSTM" else out).sum()

    def loss_of(parameters: Any, x: Any) -> Any:
        layer.update(parameters)
        return loss(x)

    if who == "input":
        step = mx.value_and_grad(loss_of, argnums=(0, 1))
        return lambda: mx.eval(step(layer.trainable_parameters(), x))
    step = mx.value_and_grad(loss) if who in ("4 bits", "frozen") else mlx.nn.value_and_grad(layer, loss)
    return lambda: mx.eval(step(x))


def spread(T: int, B: int) -> list[int]:
    """Return B sequence lengths at equal distances, the shortest 1 and the longest T - 1."""
    return [round(1 + k * (T - 2) / max(B - 1, 1)) for k in range(B)]


def training_torch(who: str, kind: str, T: int, B: int, H: int) -> Run:
    """Return the training step of `training` in torch, with packed sequences if `who` is "torch, packed"."""
    import torch
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    torch.manual_seed(0)
    model: Any = getattr(torch.nn, kind)(H, H, batch_first=True)
    x, lengths = torch.randn(B, T, H), torch.tensor(spread(T, B))

    def run() -> None:
        model.zero_grad()
        if who == "torch, packed":
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            out = pad_packed_sequence(model(packed)[0], batch_first=True)[0]
        else:
            out = model(x)[0]
        out.square().sum().backward()

    return run


def calls(who: str, kind: str, B: int, H: int, T: int) -> Run:
    """Return a training step that calls a layer once for each of T time steps."""
    import mlx.core as mx
    import mlx.nn

    layer = layer_of(who, kind, H)
    x = mx.random.normal((T, B, 1, H))
    mx.eval(x)

    def loss(x: Any) -> Any:
        state, total = (), mx.array(0.0)
        for t in range(T):
            out = layer(x[t], *state)
            state = tuple(a[:, -1] for a in (out if kind == "LSTM" else (out,)))
            total = total + mx.square(state[0]).mean()
        return total

    step = mlx.nn.value_and_grad(layer, loss)
    return lambda: mx.eval(step(x))


def fed(who: str, kind: str, B: int, H: int, T: int, between: int) -> Run:
    """Return a training step that calls a layer once for each of T time steps. The input of a step contains the h of
    the step before, which a concatenation and `between` elementwise operations prepare."""
    import mlx.core as mx
    import mlx.nn

    layer = layer_of(who, kind, H)
    half = H // 2
    x, mask = mx.random.normal((T, B, 1, half)), mx.random.uniform(shape=(T, B, 1, H))
    mx.eval(x, mask)

    def loss(x: Any) -> Any:
        state, total = (mx.zeros((B, H)),) * (2 if kind == "LSTM" else 1), mx.array(0.0)
        for t in range(T):
            step = mx.concatenate([x[t], state[0][:, None, half:]], axis=-1) * mask[t]
            for _ in range(between - 1):
                step = mx.sin(step)
            out = layer(step, *state)
            state = tuple(a[:, -1] for a in (out if kind == "LSTM" else (out,)))
            total = total + mx.square(state[0]).mean()
        return total

    step = mlx.nn.value_and_grad(layer, loss)
    return lambda: mx.eval(step(x))


def larger(who: str, kind: str, T: int, B: int, H: int) -> Run:
    """Return a training step of a dense layer with 128 units, 20 elementwise operations and a small layer."""
    import mlx.core as mx
    import mlx.nn

    first, second = mlx.nn.Linear(128, 128), mlx.nn.Linear(128, H)
    model = mlx.nn.Sequential(first, *[mx.tanh, lambda x: 1.5 * x] * 10, second, layer_of(who, kind, H))
    x = mx.random.normal((B, T, 128))
    mx.eval(x, model.parameters())
    step = mlx.nn.value_and_grad(model, lambda x: mx.square(model(x)).sum())
    return lambda: mx.eval(step(x))


def own_cell(who: str, work: str, T: int, B: int, H: int) -> Run:
    """Return a forward pass of an LSTM, or forward and backward: by `pointwise`, by `recurrent` or by `lstm`."""
    import mlx.core as mx

    from mlx_lstm import cells, lstm, pointwise, recurrent

    mx.set_default_device(mx.cpu)
    mx.random.seed(0)
    x, dh, zeros = mx.random.normal((T, B, H)), mx.random.normal((T, B, H)), mx.zeros((B, H))
    weights = [mx.random.uniform(-(H**-0.5), H**-0.5, shape) for shape in ((4 * H, H), (4 * H, H), (4 * H,))]
    mx.eval(x, dh, zeros, weights)
    trains = work == "training"

    def step(z: Any, state: Any, Wh: Any) -> Any:
        state = cells.lstm(mx.split(z + state[0] @ Wh.T, 4, axis=-1), state)
        return state[0], state

    def forward(x: Any, Wx: Any, Wh: Any, b: Any) -> Any:
        if who == "lstm":
            return lstm(x, Wx, Wh, b, zeros, zeros, training=trains).h
        if who == "pointwise":
            return pointwise(cells.lstm, x, Wx, Wh, b, [zeros, zeros], training=trains)[0]
        every = "auto" if who.endswith("auto") else None
        return recurrent(step, x @ Wx.T + b, (zeros, zeros), parameters=Wh, checkpoint_every=every)[0]

    if trains:
        return lambda: mx.eval(mx.vjp(forward, [x, *weights], [dh]))
    return lambda: mx.eval(forward(x, *weights))


def tables() -> dict[str, tuple[Callable[..., Run], tuple[str, ...], list[tuple[Any, ...]]]]:
    """Return for each table: the function that makes a run, the implementations to compare, and the other arguments of
    the function for each row."""
    kinds, steppers = ("LSTM", "GRU", "RNN"), ("stepper", "stepper, 4 bits", "step", "torch", "mlx")
    frames = [(kind, arrival, H) for kind in kinds for arrival in ("back to back", "paced") for H in (64, 128, 256)]
    long = [(kind, *size) for kind in kinds for size in ((200, 32, 128), (400, 64, 128), (128, 32, 256))]
    plain = [(k, *size) for k in kinds for size in ((64, 32, 128), (128, 32, 256), (100, 1, 512), (64, 64, 512))]
    steps = [(k, *size, 80) for k in kinds for size in ((1, 64), (1, 256), (16, 256), (64, 256))]
    loops = [(k, *size, T, n) for k in kinds for size in ((16, 100), (16, 256)) for T in (50, 1000) for n in (1, 30)]
    cells = [(work, 128, B, 128) for work in ("inference", "training") for B in (1, 32, 64)]
    return {
        "streaming": (streaming, steppers, frames),
        "lengths": (training, ("lengths", "full"), long),
        "packed": (training, ("lengths", "torch, packed"), long),
        "first": (training, ("full", "input"), long),
        "torch": (training, ("full", "torch"), plain),
        "calls": (calls, ("full", "ops", "mlx"), [*steps, ("LSTM", 1, 640, 40), ("GRU", 1, 640, 40)]),
        "fed": (fed, ("full", "ops", "mlx"), loops),
        "larger": (larger, ("full", "ops", "mlx"), [("GRU", 200, 16, 8)]),
        "cells": (own_cell, ("pointwise", "recurrent", "lstm"), cells),
        "memory": (own_cell, ("pointwise", "recurrent, auto", "recurrent", "lstm"), [("training", 1000, 8, 128)]),
        "quantized": (training, ("4 bits", "frozen"), [("LSTM", 100, B, H) for B in (1, 32) for H in (64, 128, 256)]),
    }


def serve(table: str, row: int, who: str) -> None:
    """Time one implementation in this process. Each line of standard input is the number of seconds of a turn."""
    make, _, rows = tables()[table]
    run = make(who, *rows[row])
    import mlx.core as mx

    run()
    mx.clear_cache()
    mx.reset_peak_memory()
    active = mx.get_active_memory()
    run()
    peak = mx.get_peak_memory() - active
    for line in sys.stdin:
        time.sleep(SETTLE)
        run()
        times: list[float] = []
        cpu, end = time.process_time(), time.perf_counter() + float(line)
        while not times or time.perf_counter() < end:
            start = time.perf_counter()
            slept = run() or 0.0
            times.append(time.perf_counter() - start - slept)
        cpu = (time.process_time() - cpu) / len(times)
        time.sleep(SETTLE)
        print(json.dumps({"times": times, "cpu": cpu, "peak": peak}), flush=True)


def measure(table: str, row: int, seconds: float, rounds: int) -> None:
    """Measure and print one row of a table."""
    _, names, rows = tables()[table]
    children: dict[str, Any] = {}
    turns: dict[str, list[Any]] = {who: [] for who in names}
    for who in names:
        command = [sys.executable, __file__, "--child", table, str(row), who]
        children[who] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for number in range(rounds):
        for who in names if number % 2 else reversed(names):
            children[who].stdin.write(f"{seconds / rounds}\n")
            children[who].stdin.flush()
            turns[who].append(json.loads(children[who].stdout.readline()))
    for child in children.values():
        child.communicate()
    print(f"{table}: {', '.join(map(str, rows[row]))}", flush=True)
    scale, unit = (1e6 / FRAMES, "us") if table == "streaming" else (1e3, "ms")
    last = turns[names[-1]]
    for who, own in turns.items():
        times = [scale * seconds for turn in own for seconds in turn["times"]]
        cpu = scale * statistics.median(turn["cpu"] for turn in own)
        pairs = list(zip(own, last, strict=True))
        ratios = [statistics.median(a["times"]) / statistics.median(b["times"]) for a, b in pairs]
        cpus = statistics.median(a["cpu"] / b["cpu"] for a, b in pairs)
        print(
            f"  {who:15} {statistics.median(times):8.2f} {unit}, least {min(times):8.2f}, CPU {cpu:8.2f};"
            f" ratio {statistics.median(ratios):6.3f} ({min(ratios):.3f}-{max(ratios):.3f}), of CPU time {cpus:6.3f};"
            f" peak {own[-1]['peak'] / 1e6:.1f} MB",
            flush=True,
        )


def main() -> None:
    """Measure the tables that the command line names."""
    if sys.argv[1:2] == ["--child"]:
        serve(sys.argv[2], int(sys.argv[3]), sys.argv[4])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", choices=tables())
    parser.add_argument("--threads", help="BLAS threads of NumPy; default: what NumPy chooses")
    parser.add_argument("--seconds", type=float, default=1.5, help="for each implementation and row; default: 1.5")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each implementation; default: 5")
    parser.add_argument("--only", default="", help="measure only rows that contain this text")
    given = parser.parse_args()
    if given.threads:
        os.environ["OPENBLAS_NUM_THREADS"] = given.threads
    for table in given.tables:
        for row, arguments in enumerate(tables()[table][2]):
            if given.only in ", ".join(map(str, arguments)):
                measure(table, row, given.seconds, given.rounds)


if __name__ == "__main__":
    main()
