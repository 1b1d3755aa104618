"""Time series forecast: an LSTM learns to predict the next value of a chaotic series.

    python examples/forecast.py  # writes runs/forecast.png; needs `pip install matplotlib`

After training, the LSTM continues the series from its own predictions. The series follows the Mackey-Glass equation,
dx/dt = 0.2 x(t - 17) / (1 + x(t - 17)^10) - x(t) / 10. The last line shows the errors of three forecasts of 50 values
not used for training: by the LSTM, by a linear model of 20 values, and by the guess "no change".
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # set before NumPy is imported: more threads would be slower

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from matplotlib.figure import Figure
from support.command import numbers, run_main

from mlx_lstm.nn import LSTM

WINDOW, AHEAD, LAGS = 100, 50, 20


def series(length):
    """Return values of the Mackey-Glass equation every 2 time units, scaled to mean 0 and standard deviation 1."""
    x = np.full(length * 20 + 1170, 1.2)
    for n in range(170, len(x)):
        x[n] = x[n - 1] + 0.1 * (0.2 * x[n - 170] / (1 + x[n - 170] ** 10) - 0.1 * x[n - 1])
    return ((x[1170::20] - x.mean()) / x.std()).astype(np.float32)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = LSTM(1, 32), nn.Linear(32, 1)

    def __call__(self, x, state=(None, None)):
        hidden, cell = self.lstm(x[..., None], *state)
        return x + self.head(hidden)[..., 0], (hidden[:, -1], cell[:, -1])


def train(values, steps):
    model, rng, optimizer = Forecaster(), np.random.default_rng(0), optim.Adam(optim.cosine_decay(1e-2, steps))
    step = nn.value_and_grad(model, lambda x, y: ((model(x)[0] - y)[:, LAGS:] ** 2).mean())  # skip the first LAGS steps
    for n in range(1, steps + 1):
        x = mx.array(values[rng.integers(0, len(values) - WINDOW, (24, 1)) + np.arange(WINDOW + 1)])
        loss, gradients = step(x[:, :-1] + 0.01 * mx.random.normal((24, WINDOW)), x[:, 1:])  # noise, as in forecasts
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        if n % 50 == 0:
            print(f"step {n:3}: error of the next value {loss.item() ** 0.5:.4f}")
    return model.eval()


def forecast(model, past):
    """Return the AHEAD values after `past` [B, T]; each forecast value is the next input."""
    values, state = model(mx.array(past))
    for _ in range(AHEAD - 1):
        value, state = model(values[:, -1:], state)
        values = mx.concatenate([values, value], axis=1)
    return np.array(values[:, -AHEAD:])


def linear(values, past):
    """Return the AHEAD values after `past`, forecast by a linear model that reads the LAGS values before each."""
    rows = np.lib.stride_tricks.sliding_window_view(values, LAGS + 1)
    weights = np.linalg.lstsq(rows[:, :-1], rows[:, -1], rcond=None)[0]
    for _ in range(AHEAD):
        past = np.concatenate([past, past[:, -LAGS:] @ weights[:, None]], axis=1)
    return past[:, -AHEAD:]


def plot(past, truth, forecasts):
    time = 2 * np.arange(WINDOW + AHEAD)
    axes = (figure := Figure(figsize=(9, 3.5), layout="constrained")).subplots()
    axes.plot(time, np.concatenate([past, truth]), color="0.6", lw=4, label="the series")
    for name, values in forecasts.items():
        axes.plot(time[WINDOW:], values, label=name)
    axes.set(xlabel="time", ylabel="x", title="Mackey-Glass: 100 values given, the 50 after them forecast")
    axes.legend(loc="lower left")
    os.makedirs("runs", exist_ok=True)
    figure.savefig("runs/forecast.png", dpi=120)


def main(steps=300):
    """Train the model, forecast, plot, and compare the errors."""
    mx.random.seed(0)
    values = series(4000)
    pieces = np.lib.stride_tricks.sliding_window_view(values[3000:], WINDOW + AHEAD)[::25]  # test data
    past, truth = pieces[:, :WINDOW], pieces[:, WINDOW:]
    ours, lines = forecast(train(values[:3000], steps), past), linear(values[:3000], past)
    plot(past[0], truth[0], {"LSTM": ours[0], "linear": lines[0]})
    errors = [np.sqrt(((each - truth) ** 2).mean()) for each in (ours, lines, past[:, -1:])]
    print("error, of deviation 1, over 50 values: LSTM {:.3f}, linear {:.3f}, no change {:.3f}".format(*errors))


if __name__ == "__main__":
    run_main(lambda: main(*numbers(__doc__)))
