"""Tests of layer normalisation in the Metal kernels, against PyTorch's float64."""

from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from assertions import assert_within
from cases import METAL
from norm_cases import CELLS, ROWS, T, check, drawn
from on_metal import on_metal
from quantized_cases import matrix_of

from mlx_lstm import Norm, Quantized, gru, lstm, rnn
from mlx_lstm.engines.cell_tracer import Counts, traced
from mlx_lstm.engines.cells import GRUCell, NormOptions, PointwiseCell
from mlx_lstm.engines.metal import kernel, norms
from mlx_lstm.engines.metal.stepwise import tile_of
from mlx_lstm.engines.problem import Problem
from mlx_lstm.recurrence import _judge
from mlx_lstm.recurrence._trial import trial_from, trial_of

QUICK = {("fused", "state"), ("fused", "gru each"), ("fused", "output"), ("stepwise", "all")}
"""The rows that are not slow tests. The paths of test_kernel_paths.py have norms, too."""
PARAMS = [pytest.param(*row, id="-".join(row[:2]), marks=[] if row[:2] in QUICK else pytest.mark.slow) for row in ROWS]


@pytest.mark.parametrize("engine, name, sizes, options", PARAMS)
def test_values_and_gradients(engine, name, sizes, options):
    check(engine, CELLS[name], sizes, options)


# The forward kernels of the first two are those of "gru, norm" in test_kernel_paths.py.
USUAL = GRUCell(norm=NormOptions("product"), gate_order="zrn", flip_z=True)
TRIALS = [
    ("fused", USUAL, 0),
    ("stepwise", USUAL, 0),
    pytest.param("stepwise", CELLS["all"], 3, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("engine, cell, P", TRIALS, ids=["fused", "stepwise", "projection"])
def test_trials_accept_the_kernels(engine, cell, P):
    """The trial of kernels, before their first use, accepts those of a cell with a norm."""
    arrays = drawn(
        cell, (3, 3, 12, P), {"keep": True, "mask": True, "lengths": True, "bhn": cell.op == "gru"}, mx.float32
    )
    problem = Problem(T, 3, 12, P or 12, cell, mx.float32, tuple(arrays), masks_differ=True)
    trial = trial_of(engine, problem)
    assert trial_from(trial.text()) == trial
    with on_metal(), mx.stream(METAL):
        assert _judge.verdict(trial) == ""


def test_a_trial_uses_the_tiles_of_the_call():
    """With a norm one product computes the gates of all units. The trial, whose sizes are small, uses the same tile for
    it as the call, and for the products of H columns, too."""
    for B, H in product((1, 8, 9, 17, 64, 128), (9, 33, 40, 64, 128, 512)):
        call = Problem(64, B, H, H, CELLS["product"], mx.float32, ("x", "Wx", "Wh", "h0"))
        small = trial_of("stepwise", call).problem
        assert small.H <= H and [tile_of(small, n * small.H) for n in (1, 4)] == [tile_of(call, n * H) for n in (1, 4)]


OWN = [("fused", NormOptions("sum", "each"), False)]
OWN += [pytest.param("stepwise", NormOptions("product"), True, marks=pytest.mark.slow)]


@pytest.mark.parametrize("engine, norm, apart", OWN)
def test_trials_accept_the_kernels_of_a_cell_of_the_users_own(engine, norm, apart, monkeypatch):
    """So do those of a cell of the user's own; kernels that normalise with another eps are refused."""

    def cell(a, state):
        (r, c, z), (h,) = [sum(pair) for pair in a] if apart else a, state
        return (mx.sigmoid(z) * mx.tanh(r * c) + (1 - mx.sigmoid(z)) * h,)

    graph = traced(cell, Counts(3, 1, 0, 0), apart, (3, 9), mx.float32)
    names = ("x", "Wx", "Wh", "b", "h0", "mask", "keep", "lengths", "norm_scale", "norm_shift")
    trial = trial_of(engine, Problem(T, 3, 9, 9, PointwiseCell(graph, True, norm), mx.float32, names))
    assert trial_from(trial.text()) == trial
    with on_metal(), mx.stream(METAL):
        assert _judge.verdict(trial) == ""
    if engine == "fused":
        monkeypatch.setattr(norms, "constant", lambda numbers, dtype: kernel.constant((0.1,), dtype))
        with on_metal(), mx.stream(METAL):
            assert "error" in _judge.verdict(trial)


def test_a_trial_refuses_a_norm_with_the_wrong_eps(monkeypatch):
    trial = trial_of("fused", Problem(T, 3, 5, 5, CELLS["rnn"], mx.float32, ("x", "Wx", "Wh", "h0")))
    monkeypatch.setattr(norms, "constant", lambda numbers, dtype: kernel.constant((0.1,), dtype))
    with on_metal(), mx.stream(METAL):
        assert "error" in _judge.verdict(trial)


# Calls of the public functions, with options that the engines do not see: (function, norm, options). Sequences in
# chunks are in test_chunks.py.
ENDS = {"lengths": mx.array([6, 0, 3, 1]), "hold": np.arange(24).reshape(6, 4) % 3 == 0}
CALLS = {
    "lengths, hold": (lstm, Norm("sum", gates="each", c="output"), ENDS | {"reverse": True}),
    "quantized": (lstm, Norm("sum", gates="each", c="output"), ENDS | {"quantized": True}),
    "evaluation": (gru, Norm(gates="each"), {"training": False}),
    "evaluation, both directions": (rnn, Norm(), {"training": False, "bidirectional": True}),
    "one step": (rnn, Norm("sum"), {"steps": 1}),
}


@pytest.mark.parametrize("engine", ["fused", pytest.param("stepwise", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CALLS)
def test_calls_of_users(engine, name):
    """A call of a public function gives what engine `ops` gives in float64. The errors are at most four times those of
    `ops` in float32, as a share of the largest number of each array: a kernel's tanh may be 4 units wrong."""
    function, norm, options = CALLS[name]
    gates, H = {lstm: 4, gru: 3, rnn: 1}[function], 16
    rng, options = np.random.default_rng(3), dict(options)
    quantized, steps = options.pop("quantized", False), options.pop("steps", 6)
    own, D = ((2,), 2) if options.get("bidirectional") else ((), 1)  # the first axis of arrays with one per direction
    arrays = {"x": (steps, 4, 3), "Wx": (D * gates * H, 3), "Wh": (*own, gates * H, H), "h0": (4, D * H)}
    arrays |= {"scale": (*own, gates * H)}
    arrays |= {"c_scale": (H,), "c_shift": (H,)} if norm.c else {}
    values = {
        n: (rng.normal(size=shape) * (0.5 if n[0] == "W" else 1)).astype(np.float32) for n, shape in arrays.items()
    }
    with mx.stream(mx.cpu):
        packed = Quantized(*mx.quantize(mx.array(values["Wh"]), 16, 4, "nvfp4"), group_size=16, bits=4, mode="nvfp4")
        if quantized:
            values["Wh"] = np.array(matrix_of(packed))
    names = [n for n in values if not (quantized and n == "Wh")]

    def run(engine, dtype, device):
        def outputs(*given):
            of = dict(zip(names, given, strict=True))
            own = norm._replace(**{n: of.pop(n) for n in ("scale", "c_scale", "c_shift") if n in of})
            if quantized:
                of["Wh"] = packed if dtype == mx.float32 else mx.array(values["Wh"]).astype(dtype)
            return [function(**of, norm=own, **options, engine=engine).h]

        with mx.stream(device):
            primals = [mx.array(values[n]).astype(dtype) for n in names]
            h = outputs(*primals)
            h, d = mx.vjp(outputs, primals, [mx.cos(mx.arange(h[0].size).reshape(h[0].shape)).astype(dtype)])
            return [np.array(array) for array in (*h, *d)]

    with on_metal() as log:
        found = run(engine, mx.float32, METAL)
    assert any("norm" in launch.source for launch in log)
    exact, same = run("ops", mx.float64, mx.cpu), run("ops", mx.float32, mx.cpu)
    sizes = [np.abs(of_exact).max() for of_exact in exact]
    share = max(np.abs(a - b).max() / size for a, b, size in zip(same, exact, sizes, strict=True))
    for n, got, of_exact, size in zip(["h", *names], found, exact, sizes, strict=False):
        assert_within(f"{engine} {n}", got, of_exact, 4 * share * size)
