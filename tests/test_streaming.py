"""Tests of long sequences that are computed in pieces, with states passed from call to call. The results equal those
of the whole sequence, and memory does not grow. On the CPU, a single step evaluates no operation of MLX."""

import io
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from assertions import assert_within
from mlx.utils import tree_flatten

from mlx_lstm import nn
from mlx_lstm import torch as like_torch
from mlx_lstm.oracle import evaluate
from mlx_lstm.oracle.closeness import exact_and_bounds

T, I, H = 24, 5, 6
OPTIONS = {"LSTM": {}, "GRU": {"op": "gru"}, "RNN": {"op": "rnn"}}  # options of the oracle for each layer class


def of_nn(kind, engine, by_step=False):
    """Return (call, layers) for a layer of `mlx_lstm.nn`. `call` maps (x [T, B, I], states) to (h, states); `layers`
    lists the arrays and options of each layer as arguments of the oracle."""
    layer = getattr(nn, kind)(I, H, engine=engine)

    def call(x, states):
        if by_step:
            return each_step(x, [state[0] for state in states])
        found = layer(x.swapaxes(0, 1), *(state[0] for state in states))
        found = found if kind == "LSTM" else [found]
        return found[0].swapaxes(0, 1), [sequence[None, :, -1] for sequence in found]

    def each_step(x, states):
        outputs = []
        for frame in x:
            found = layer.step(frame, *states)
            states = found if kind == "LSTM" else [found]
            outputs.append(states[0])
        return mx.stack(outputs), [state[None] for state in states]

    names = {"Wxh": "Wx", "Whh": "Wh", "bias": "b"} if kind == "RNN" else {"bias": "b"}
    return call, [{names.get(name, name): array for name, array in layer.parameters().items()} | OPTIONS[kind]]


def of_torch(kind, engine, **options):
    """Return (call, layers) for a layer of `mlx_lstm.torch`. `call` maps (x [T, B, I], states) to (h, states);
    `layers` lists the arrays and options of each layer as arguments of the oracle."""
    layer = getattr(like_torch, kind)(I, H, engine=engine, **options)

    def call(x, states):
        h, last = layer(x, (tuple(states) if kind == "LSTM" else states[0]))
        return h, list(last) if kind == "LSTM" else [last]

    return call, [layer.arrays(k) | OPTIONS[kind] for k in range(layer.num_layers)]


FACES = {
    **{f"nn.{kind}": (of_nn, kind, {}) for kind in OPTIONS},
    **{f"nn.{kind} by step": (of_nn, kind, {"by_step": True}) for kind in OPTIONS},
    **{f"torch.{kind}": (of_torch, kind, {}) for kind in OPTIONS},
    "torch.LSTM projected": (of_torch, "LSTM", {"proj_size": 3}),
    "torch.LSTM of two layers": (of_torch, "LSTM", {"proj_size": 3, "num_layers": 2}),
}


def exactly(layers, x, states):
    """Return a function that computes h and the last states of the stack of layers in a given arithmetic.
    `exact_and_bounds` calls the function to get the exact values and the error bounds."""

    def values(fl):
        h, last = x, []
        for k, layer in enumerate(layers):
            first = {f"{word}0": state[k] for word, state in zip("hc", states, strict=False)}
            outputs = evaluate(layer | first | {"x": h}, None, fl)[0]
            h = outputs["h"]
            last.append([outputs[f"{word}T"] for word, _ in zip("hc", states, strict=False)])
        return {"h": h} | {f"state {n}": np.stack(state) for n, state in enumerate(zip(*last, strict=True))}

    return values


def made(face, engine):
    """Return (call, layers) for a name in FACES. Equal names get equal parameters."""
    mx.random.seed(1)
    make, kind, options = FACES[face]
    call, layers = make(kind, engine, **options)
    return call, [{key: np.array(v) if isinstance(v, mx.array) else v for key, v in one.items()} for one in layers]


@pytest.mark.parametrize("face", FACES)
def test_chunks_of_any_lengths_give_what_the_whole_does(face):
    rng = np.random.default_rng(1)
    _, kind, options = FACES[face]
    engines = {engine: made(face, engine) for engine in ("numpy", "ops")}
    layers = engines["numpy"][1]
    widths = [options.get("proj_size", H)] + [H] * (kind == "LSTM")
    for B in (1, 3):
        x = rng.standard_normal((T, B, I)).astype(np.float32)
        first = [rng.uniform(-1, 1, (len(layers), B, width)).astype(np.float32) for width in widths]
        exact, bounds = exact_and_bounds(exactly(layers, x, first), "float32")
        for engine, longest in [("numpy", 3), ("numpy", T), ("ops", 1), ("ops", 8)]:
            call = engines[engine][0]
            states, outputs, start = [mx.array(state) for state in first], [], 0
            while start < T:
                length = T if longest == T else int(rng.integers(1, longest + 1))
                h, states = call(mx.array(x[start : start + length]), states)
                outputs.append(np.array(h))
                start += length
            found = {"h": np.concatenate(outputs)}
            found |= {f"state {n}": np.array(state) for n, state in enumerate(states)}
            assert found.keys() == exact.keys()
            for name, array in found.items():
                assert_within(f"{name}, {engine}, chunks of at most {longest}", array, exact[name], bounds[name])


STEPS = """
import resource, sys
import mlx.core as mx
from mlx_lstm import nn, torch

mx.set_default_device(mx.cpu)
H, frame = 256, mx.random.normal((1, 1, 256))

def step(layer, state):
    if isinstance(layer, torch.Layers):
        h, state = layer(frame, state)
    else:
        h, *_ = state = as_tuple(layer.step(frame[0], *(state or ())))
    mx.eval(h, state)
    return state

def as_tuple(found):
    return found if isinstance(found, tuple) else (found,)

def held():
    mx.clear_cache()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak, mx.get_active_memory()

for face in (nn, torch):
    for kind in ("LSTM", "GRU", "RNN"):
        layer = getattr(face, kind)(H, H)
        state = step(layer, None)
        for _ in range(200):  # Python, BLAS and MLX take what they need for themselves
            state = step(layer, state)
        peak, active = held()
        for _ in range(int(sys.argv[1])):
            state = step(layer, state)
        new_peak, new_active = held()
        print(new_peak - peak, new_active - active)
"""


@pytest.mark.parametrize("steps", [1000, pytest.param(8_000, marks=pytest.mark.slow)])
def test_single_steps_are_flat_in_memory(steps):
    """Memory does not grow over many calls of one time step. A leak of one state (1 KiB) per call would make the
    process grow by at least 1,000 KiB. The memory that MLX counts must not change by a byte."""
    command = [sys.executable, "-c", STEPS, str(steps)]
    printed = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=True).stdout
    growth = [[int(number) for number in line.split()] for line in printed.splitlines()]
    assert len(growth) == 6
    assert all(peak < 1000 * 1024 and active == 0 for peak, active in growth), growth


def steps_of(kind):
    """Return {name: function}. Each function runs one time step, state -> (output, state). The functions cover float
    and quantized layers, cells, and stacks of two layers."""
    lists = [[getattr(nn, kind)(n, 32) for n in (I, 32)], [getattr(nn, kind)(n, 32) for n in (I, 64)]]
    quantized = getattr(nn, f"Quantized{kind}").from_layer(lists[0][0], 32)
    both, cell = {"num_layers": 2, "bidirectional": True}, getattr(like_torch, f"{kind}Cell")(I, 32)
    packed = getattr(like_torch, f"Quantized{kind}")(I, 32, **both, group_size=32)
    options = {}, {"bias": False}, both, {"batch_first": True}
    layers = [getattr(like_torch, kind)(I, 32, **one) for one in options]
    return {
        "step": lambda state: (found := lists[0][0].step(mx_ones(2, I), *as_list(state)), found),
        "item": lambda state: (found := lists[0][0].step(mx_ones(I), *as_list(state)), found),
        "quantized": lambda state: (found := quantized.step(mx_ones(2, I), *as_list(state)), found),
        "stack": lambda state: nn.stack(lists[0], mx_ones(2, 1, I), state),
        "both": lambda state: nn.stack(lists[1], mx_ones(2, 1, I), state, reverse=lists[1]),
        **{
            f"torch {n}": lambda state, layer=layer: layer(mx_ones(2, 1, I), state)
            for n, layer in enumerate([*layers, packed])
        },
        "torch item": lambda state: layers[0](mx_ones(1, I), state),
        "cell": lambda state: (found := cell(mx_ones(2, I), state), found),
        "cell's item": lambda state: (found := cell(mx_ones(I), state), found),
    }


def mx_ones(*shape):
    return mx.array(np.ones(shape, np.float32))


def as_list(state):
    return [] if state is None else state if isinstance(state, tuple) else [state]


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_step_on_the_cpu_waits_for_no_operation_of_mlx(kind, monkeypatch):
    """From the second step on, no operation of MLX runs on the CPU: no array that a step evaluates or returns is the
    result of an MLX operation."""

    def operations(arrays):
        text = io.StringIO()
        mx.export_to_dot(text, *(array for array in arrays))
        return text.getvalue().count("shape=rectangle")

    def watched(*trees):
        for _, array in tree_flatten(trees):
            assert not isinstance(array, mx.array) or not operations([array])
        evaluate(*trees)

    evaluate = mx.eval
    with mx.stream(mx.cpu):
        calls = steps_of(kind)
        states = {name: call(None)[1] for name, call in calls.items()}
        mx.eval(states)
        monkeypatch.setattr(mx, "eval", watched)
        for name, call in calls.items():
            for _ in range(2):
                output, states[name] = call(states[name])
                found = [array for _, array in tree_flatten([output, states[name]])]
                assert not operations(found), name
