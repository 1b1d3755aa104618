"""Tests of the Metal kernels that the library generates for pointwise cells, which are cells given as a Python
function (`mlx_lstm.pointwise`). On a Mac the GPU runs the kernels. Elsewhere the emulator runs them, and also finds
races and missing writes."""

import json
from unittest.mock import patch

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from on_metal import on_metal
from pointwise_cases import OPTIONS, ZOO, Form, assert_right, by_pointwise, draw_smooth, judged, run

from mlx_lstm import cells, pointwise
from mlx_lstm.check import cells as check_cells
from mlx_lstm.engines import choose
from mlx_lstm.engines.cells import PointwiseCell
from mlx_lstm.engines.metal import statements
from mlx_lstm.engines.metal.pointwise import struct_text
from mlx_lstm.engines.problem import Problem, limited
from mlx_lstm.recurrence import _judge
from mlx_lstm.recurrence._trial import trial_from, trial_of

CROSSED = [(cell, list(OPTIONS)[n % len(OPTIONS)]) for n, cell in enumerate(ZOO)]
REST = [
    pytest.param(cell, option, marks=pytest.mark.slow)
    for cell in ZOO
    for option in OPTIONS
    if (cell, option) not in CROSSED
]


def check(form, options, sizes, limits=None, dtype=np.float32, **emulator):
    """Check outputs and gradients of the engine `fused` for a random call with this cell (`form`). They must differ
    from the float64 oracle's by at most the error bounds. Return the log of kernel launches."""
    case, cotangents = draw_smooth(np.random.default_rng(3), form, options, sizes)
    if dtype != np.float32:
        case = {n: a if n in ("lengths", "reverse") else a.astype(dtype).astype(float) for n, a in case.items()}
        cotangents = {name: d.astype(dtype) for name, d in cotangents.items()}
    exact, bounds = judged(form, case, cotangents, np.dtype(dtype).name)
    every = {name: options[name] for name in ("checkpoint_every",) if name in options}
    with on_metal(**emulator) as log, limited(**limits or {}):
        got = run(form, case, cotangents, by_pointwise("fused", **every), dtype)
    assert_right(got, exact, bounds)
    return log


@pytest.mark.parametrize("cell, option", CROSSED + REST)
def test_every_cell_of_the_zoo_is_right(cell, option):
    """The generated kernels of every cell in `mlx_lstm.cells` give right outputs and right gradients of all arrays,
    with every set of options."""
    check(ZOO[cell], OPTIONS[option], (4, 3, 2, 19), order="random", seed=1)


@pytest.mark.parametrize("cell", ["lstm", "slstm", "gru", "indrnn"])
@pytest.mark.parametrize("sizes", [(2, 1, 1, 1), (3, 20, 2, 9), (2, 70, 2, 33)])
def test_sizes_that_use_other_tilings_are_right(cell, sizes):
    """Results are right if a threadgroup computes one, two or four sequences of the batch, and if H is not a
    multiple of the 32 lanes of a SIMD-group."""
    check(ZOO[cell], {"lengths": True}, sizes)


@pytest.mark.parametrize("limits", [{"launch_steps": 2}, {"index": 0}, {"unchunked": 2}])
def test_large_calls_are_right(limits):
    """Results are right if a pass takes several launches, if indices have 64 bits, and if the sequence is computed
    in chunks of time steps. The limits from which this happens are lowered here."""
    for cell in ("zoneout_lstm", "peephole_lstm"):
        check(ZOO[cell], {"lengths": True, "reverse": True, "keep": True, "mask": True}, (5, 3, 2, 19), limits)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bits_are_right(dtype):
    """Results for arrays of 16 bits are within the error bounds of their dtype."""
    check(ZOO["slstm"], {"lengths": True}, (4, 3, 2, 19), dtype=dtype)


def test_many_gates_and_states_are_right():
    """The kernels are right for a cell with six gates, five states, two inputs per step and two parameters."""

    def cell(a, state, u, v, p, q):
        i, f, g, o, k, e = a
        _, c, d, n, m = state
        c = mx.sigmoid(f + p * c) * c + mx.sigmoid(i) * mx.tanh(g + u)
        d = mx.where(k > 0, d, mx.tanh(e) * d + q)
        n = mx.minimum(mx.abs(n) * 0.5 + v * v, 3.0)
        m = mx.logaddexp(m, c) * 0.5
        return mx.sigmoid(o) * mx.tanh(c + d) / (1 + n), c, d, n, m

    check(Form(cell, 6, 5, 2, 2), {"lengths": True, "keep": True}, (3, 3, 2, 11))


def test_functions_that_metal_lacks_are_right():
    """The kernels compute erf and expm1 right for small and for large arguments, which take different formulas."""

    def cell(a, state):
        u, v = a
        return (mx.erf(1.5 * u) + 0.2 * mx.expm1(0.5 * v) + 0.1 * state[0],)

    check(Form(cell, 2), {"lengths": True}, (3, 3, 2, 11))


def problem_of(form, names, **options):
    graph = form.graph(3, 19)
    given = {name for name in ("x", "Wx", "Wh", "b", "h0", "c0", "inputs", "params") if name in names}
    cell = PointwiseCell(graph, form.recurrent)
    return Problem(4, 3, 19, 19, cell, names=tuple(sorted(given | names)), **options)


NAMES = {"x", "Wx", "b", "h0"}


@pytest.mark.parametrize("cell", ["lstm", "zoneout_lstm", "gru", "indrnn"])
def test_a_trial_gets_the_graph(cell):
    """Before a cell's kernels are first used, a child process tries them on a small problem (the trial). It gets the
    traced graph of the cell as text, without the Python function. The trial accepts right kernels and refuses a
    wrong one."""
    form = ZOO[cell]
    names = NAMES | ({"Wh"} if form.recurrent else set()) | ({"c0"} if form.states > 1 else set())
    names |= ({"inputs"} if form.inputs else set()) | ({"params"} if form.params else set()) | {"lengths", "keep"}
    trial = trial_of("fused", problem_of(form, names, masks_differ=True))
    again = trial_from(trial.text())
    assert again == trial and again.problem.cell.graph.function is None
    assert "function" not in json.loads(trial.text())["problem"]["cell"]
    with on_metal():
        assert _judge.verdict(again) == ""
    broken = {**statements.OPERATIONS, "mul": "{} * {} * 1.01f"}
    with on_metal(), patch.object(statements, "OPERATIONS", broken):
        struct_text.cache_clear()
        reason = _judge.verdict(again)
        struct_text.cache_clear()
    assert "wrong numbers" in reason


def test_the_guard_tries_the_kernels_of_a_cell():
    """A call of a pointwise cell launches its generated kernels. On a real GPU the library first tries them in a
    child process."""
    assert any("pointwise" in launch.name for launch in check(ZOO["cifg"], {}, (4, 3, 2, 19)))


def test_what_fused_cannot_run_is_refused_with_the_reason():
    """The default engine is `ops` for a layer that is too wide for `fused`. A request for `fused` raises an error
    with the reason if the layer is too wide or the cell has too many numbers per unit."""
    graph = ZOO["lstm"].graph(3, 19)
    here = {"dtype": mx.float32, "device": "gpu", "metal": True, "traced": False}
    assert choose(sizes=(5, 3, 2, 256), cell=PointwiseCell(graph), **here).engine == "fused"
    wide = choose(sizes=(5, 3, 2, 257), cell=PointwiseCell(graph), **here)
    assert wide.engine == "ops" and "no kernel of a single step" in wide.reason
    free = PointwiseCell(ZOO["indrnn"].graph(3, 19), False)
    assert choose(sizes=(5, 3, 2, 1024), cell=free, **here).engine == "fused"
    for cell, H, text in ((PointwiseCell(graph), 300, "H = 300 > 256"), (free, 1025, "H = 1025 > 1024")):
        with pytest.raises(ValueError, match=text):
            choose(sizes=(5, 3, 2, H), cell=cell, requested="fused", **here)
    many = Form(lambda a, state: (sum(a[1:], a[0]) + state[0],), 17)
    with pytest.raises(ValueError, match="18 > 16 numbers per unit"):
        choose(sizes=(5, 3, 2, 8), cell=PointwiseCell(many.graph(2, 3)), requested="fused", **here)


def test_check_tries_the_zoo(tmp_path, capsys):
    """The command that `check --full` runs tries every cell of `mlx_lstm.cells`, and reports each cell that `fused`
    refuses."""
    assert {form.cell.__name__ for form in check_cells.FORMS} == set(cells.__all__)
    assert [tuple(form) for form in check_cells.FORMS] == [tuple(form) for form in ZOO.values()]
    with on_metal(), patch.object(check_cells, "FORMS", check_cells.FORMS[:1]):
        assert check_cells.main(["--json", str(tmp_path / "cells.json")]) == 0
    assert json.loads((tmp_path / "cells.json").read_text()) == {"lstm": ""}
    with patch.object(check_cells, "FORMS", check_cells.FORMS[-1:]), mx.stream(mx.cpu):
        assert check_cells.main(["--json", str(tmp_path / "cells.json")]) == 1
    assert "minimal_gru_log     [pointwise] engine='fused' cannot run" in capsys.readouterr().out


def test_both_directions_on_metal():
    """A bidirectional call gives the same h on `fused` as on `ops`."""
    rng, H = np.random.default_rng(4), 5
    shapes = [(3, 2, 3), (4 * 2 * H, 3), (2, 4 * H, H), (8 * H,), (2, 2 * H), (2, 2 * H)]
    x, Wx, Wh, b, *state = (mx.array(rng.normal(size=shape).astype(np.float32)) for shape in shapes)
    with on_metal():
        h, _ = pointwise(ZOO["lstm"].cell, x, Wx, Wh, b, state, bidirectional=True, engine="fused")
    other, _ = pointwise(ZOO["lstm"].cell, x, Wx, Wh, b, state, bidirectional=True, engine="ops")
    assert mx.allclose(h, other, atol=1e-5)
