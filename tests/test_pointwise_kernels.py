"""Tests of the Metal kernels that the library generates for pointwise cells, which are cells given as a Python
function (`mlx_lstm.pointwise`). On a Mac the GPU runs the kernels. Elsewhere the emulator runs them, and also finds
races and missing writes."""

import json
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from kernel_texts import name_of, noted
from on_metal import on_metal
from pointwise_cases import OPTIONS, ZOO, Form, assert_right, by_pointwise, draw_smooth, judged, run
from slstm_reference import draw_extreme, slstm_by_softmax

from mlx_lstm import cells
from mlx_lstm.check import cells as check_cells
from mlx_lstm.engines import METAL_ENGINES, choose
from mlx_lstm.engines.cell_graph import CellGraph
from mlx_lstm.engines.cells import PointwiseCell
from mlx_lstm.engines.metal import statements
from mlx_lstm.engines.metal.pointwise import lanes_text, struct_text
from mlx_lstm.engines.problem import Problem
from mlx_lstm.recurrence import _draw, _judge
from mlx_lstm.recurrence._trial import trial_from, trial_of

# Every cell on `fused`, and one with four states also on `stepwise`. test_pointwise_paths.py has other cells on both.
CROSSED = [("fused", cell, list(OPTIONS)[n % len(OPTIONS)]) for n, cell in enumerate(ZOO)]
CROSSED += [("stepwise", "slstm", "everything")]
REST = [
    pytest.param(METAL_ENGINES[(n + k) % 2], cell, option, marks=pytest.mark.slow)
    for n, cell in enumerate(ZOO)
    for k, option in enumerate(OPTIONS)
    if (METAL_ENGINES[(n + k) % 2], cell, option) not in CROSSED
]


def check(engine, form, options, sizes, dtype=np.float32, **emulator):
    """Check outputs and gradients of a Metal engine for a random call with this cell (`form`). They must differ from
    the float64 oracle's by at most the error bounds. Return the log of kernel launches."""
    case, cotangents = draw_smooth(np.random.default_rng(3), form, options, sizes)
    if dtype != np.float32:
        case = {n: a if n in ("lengths", "reverse") else a.astype(dtype).astype(float) for n, a in case.items()}
        cotangents = {name: d.astype(dtype) for name, d in cotangents.items()}
    exact, bounds = judged(form, case, cotangents, np.dtype(dtype).name)
    every = {name: options[name] for name in ("checkpoint_every",) if name in options}
    with on_metal(**emulator) as log:
        got = run(form, case, cotangents, by_pointwise(engine, **every), dtype)
    assert_right(got, exact, bounds)
    return log


@pytest.mark.parametrize("engine, cell, option", CROSSED + REST)
def test_every_cell_of_the_zoo_is_right(engine, cell, option):
    """The generated kernels of every cell in `mlx_lstm.cells` give right outputs and right gradients of all arrays,
    with every set of options."""
    check(engine, ZOO[cell], OPTIONS[option], (4, 3, 2, 19), order="random", seed=1)


# test_pointwise_paths.py runs two and four sequences per threadgroup of `fused`, matrices, and tiles of 32 sequences.
@pytest.mark.parametrize(
    "engine, cell, option, sizes",
    [("fused", "indrnn", "lengths_reverse", (2, 1, 1, 1)), ("stepwise", "peephole_lstm", "chunks", (4, 9, 2, 19))],
)
def test_sizes_that_use_other_tilings_are_right(engine, cell, option, sizes):
    """Results are right with one unit, and with products in tiles of 8 sequences."""
    check(engine, ZOO[cell], OPTIONS[option], sizes)


@pytest.mark.parametrize("engine", METAL_ENGINES)
def test_extreme_input_gates_of_slstm(engine):
    """From states of 0 and after a reset by `keep`, outputs and gradients of the sLSTM are right for preactivations of
    the input gate from -1000 to 1000."""
    case, cotangents = draw_extreme(np.random.default_rng(4), (5, 3, 19), lengths=True)
    exact, bounds = slstm_by_softmax(case, cotangents), judged(ZOO["slstm"], case, cotangents)[1]
    with on_metal():
        got = run(ZOO["slstm"], case, cotangents, by_pointwise(engine))
    assert_right({name: got[name] for name in exact}, exact, bounds)


def test_stepwise_runs_cells_with_many_gates():
    """The kernels of `stepwise` are right for a cell with so many gates that a threadgroup computes fewer sequences
    than for other cells. `fused` refuses 17 gates."""
    form = Form(lambda a, state: (mx.tanh(sum(a[1:], a[0]) + state[0]),), 17)
    check("stepwise", form, {"lengths": True}, (3, 33, 2, 11))


@pytest.mark.parametrize("engine", ["fused", pytest.param("stepwise", marks=pytest.mark.slow)])
def test_many_gates_and_states_are_right(engine):
    """The kernels are right for a cell with six gates, five states, two inputs per step and two parameters."""

    def cell(a, state, u, v, p, q):
        i, f, g, o, k, e = a
        _, c, d, n, m = state
        c = mx.sigmoid(f + p * c) * c + mx.sigmoid(i) * mx.tanh(g + u)
        d = mx.where(k > 0, d, mx.tanh(e) * d + q)
        n = mx.minimum(mx.abs(n) * 0.5 + v * v, 3.0)
        m = mx.logaddexp(m, c) * 0.5
        return mx.sigmoid(o) * mx.tanh(c + d) / (1 + n), c, d, n, m

    check(engine, Form(cell, 6, 5, 2, 2), {"lengths": True, "keep": True}, (3, 3, 2, 11))


def problem_of(form, names, **options):
    graph = form.graph(3, 19)
    given = {name for name in ("x", "Wx", "Wh", "b", "h0", "c0", "inputs", "params") if name in names}
    cell = PointwiseCell(graph, form.recurrent)
    return Problem(4, 3, 19, 19, cell, names=tuple(sorted(given | names)), **options)


NAMES = {"x", "Wx", "b", "h0"}


# The kernels of both are those of a cell of the zoo above.
@pytest.mark.parametrize(
    "engine, cell, more", [("fused", "indrnn", set()), ("stepwise", "slstm", {"mask", "lengths", "keep"})]
)
def test_a_trial_gets_the_graph(engine, cell, more):
    """Before a cell's kernels are first used, a child process tries them on a small problem (the trial). The child gets
    the traced graph of the cell as text, without the Python function. The trial accepts right kernels and refuses a
    wrong one."""
    form = ZOO[cell]
    names = NAMES | ({"Wh"} if form.recurrent else set()) | ({"c0"} if form.states > 1 else set())
    names |= ({"inputs"} if form.inputs else set()) | ({"params"} if form.params else set()) | more
    problem = problem_of(form, names, masks_differ=form.recurrent)
    trial = trial_of(engine, problem)
    # The float64 reference computes one direction of a user's cell.
    assert not trial_of(engine, problem._replace(bidirectional=True)).problem.bidirectional
    again = trial_from(trial.text())
    assert again == trial and again.problem.cell.graph.function is None
    assert "function" not in json.loads(trial.text())["problem"]["cell"]
    with on_metal():
        assert _judge.verdict(again) == ""
    broken = {**statements.OPERATIONS, "mul": "{} * {} * 1.01f"}
    with on_metal(), patch.object(statements, "OPERATIONS", broken):
        for text in (struct_text, lanes_text):
            text.cache_clear()
        reason = _judge.verdict(again)
        for text in (struct_text, lanes_text):
            text.cache_clear()
    assert "wrong numbers" in reason


def texts_of(problem, engine):
    """Return the sources of all kernels that a call described by `problem`, and its gradient, would launch. No kernel
    runs."""
    shapes = _draw.output_shapes(problem)
    cotangents = {name: mx.zeros(shapes[name], problem.dtype) for name in _judge.cotangents_of(problem)}
    with noted() as texts:
        _judge.graph(problem, _draw.zeros(problem), cotangents, engine)
    return set(texts)


BOTH = {"bidirectional": True}
CALLS = [
    *(("slstm", sizes, {"lengths", "keep"}, BOTH) for sizes in ((30, 40, 300), (5, 1, 257), (1, 1, 3))),
    ("gru", (64, 128, 1024), {"lengths", "mask"}, {"reverse": True, "masks_differ": True}),
    ("zoneout_lstm", (25, 3, 1030), {"keep"}, {"dtype": mx.bfloat16}),
    *(("indrnn", sizes, {"keep"}, BOTH) for sizes in ((4, 2, 5), (50, 33, 7), (3, 9, 1500))),
    ("cifg", (3, 17, 70), set(), {"training": False, "plain": True}),
]


ON_FUSED = [
    *(("slstm", sizes, {"lengths", "keep"}, BOTH) for sizes in ((30, 40, 100), (5, 1, 255), (1, 1, 3), (4, 2, 8))),
    ("gru", (64, 128, 128), {"lengths", "mask"}, {"reverse": True, "masks_differ": True}),
    ("zoneout_lstm", (25, 3, 103), {"keep"}, {"dtype": mx.bfloat16}),
    *(("indrnn", sizes, {"keep"}, BOTH) for sizes in ((4, 2, 5), (50, 33, 7), (3, 9, 1000))),
    ("cifg", (3, 17, 70), set(), {"training": False, "plain": True}),
]


@pytest.mark.parametrize(
    "engine, cell, sizes, names, options",
    [*(("stepwise", *call) for call in CALLS), *(("fused", *call) for call in ON_FUSED)],
)
def test_a_trial_runs_the_kernels_of_the_call(engine, cell, sizes, names, options):
    """The trial (a small test run) of a call launches every kernel that the call launches, with the same source."""
    form, (T, B, H) = ZOO[cell], sizes
    names = NAMES | names | ({"Wh"} if form.recurrent else set()) | ({"c0"} if form.states > 1 else set())
    names |= ({"inputs"} if form.inputs else set()) | ({"params"} if form.params else set())
    own = PointwiseCell(form.graph(3, 19), form.recurrent)
    problem = Problem(T, B, H, H, own, names=tuple(sorted(names)), **options)
    assert texts_of(problem, engine) <= texts_of(trial_of(engine, problem).problem, engine)


def leaky(rate, order=1):
    return Form(lambda a, state: (rate * state[0] + mx.tanh(a[0]), *state[1:])[::order], 1, 2)


def with_other_gradients(problem):
    """Return the problem with a graph in which two gradients have changed places."""
    graph = problem.cell.graph
    back = graph.back[1], graph.back[0], *graph.back[2:]
    counts = graph.gates, graph.states, graph.inputs, graph.params
    other = CellGraph(graph.nodes, counts, graph.apart, graph.forward, back, graph.saved)
    return problem._replace(cell=PointwiseCell(other, problem.cell.recurrent))


@pytest.mark.parametrize("engine", METAL_ENGINES)
def test_a_name_has_one_text_for_cells_that_differ_in_one_part(engine):
    """MLX caches compiled kernels by name. Kernels of two problems with the same name have the same text, if the
    problems differ in a number of the cell, in the order of its states or gradients, in an array or in an option."""
    names = NAMES | {"Wh", "c0"}
    problem = problem_of(ZOO["lstm"], names)
    problems = [problem, *(problem_of(leaky(*each), names) for each in ((0.5,), (0.25,), (0.5, -1)))]
    problems += [
        with_other_gradients(problem),
        problem._replace(T=5),
        problem._replace(B=2),
        problem._replace(H=20, P=20),
    ]
    problems += [problem_of(ZOO["lstm"], names | {more}) for more in ("keep", "lengths", "mask")]
    options = {"training": False, "reverse": True, "dtype": mx.bfloat16, "bidirectional": True}
    problems += [problem._replace(**{option: value}) for option, value in options.items()]
    problems += [problem._replace(limits=problem.limits._replace(index=2)), problem_of(ZOO["cifg"], names)]
    texts, found = {}, []
    for each in problems:
        found.append(texts_of(each, engine))
        for text in found[-1]:
            assert texts.setdefault(name_of(text), text) == text
    # Each of the first five problems has another cell, so no kernel of one cell is a kernel of another.
    # Only the kernels that arrange the weights depend on the number of gates alone.
    own = [{text for text in each if "struct Own" in text and "arrange" not in name_of(text)} for each in found[:5]]
    assert all(one.isdisjoint(other) for n, one in enumerate(own) for other in own[:n])


def test_a_call_of_a_cell_launches_generated_kernels():
    for engine in METAL_ENGINES:
        texts = texts_of(problem_of(ZOO["cifg"], NAMES | {"Wh", "c0"}), engine)
        assert any(name_of(text).startswith("pointwise") for text in texts)


def test_what_fused_cannot_run_stepwise_runs():
    """The default engine on a GPU is `stepwise` if the layer is too wide for `fused` or the cell has too many numbers
    per unit. A request for `fused` then raises an error with the reason."""
    graph = ZOO["lstm"].graph(3, 19)
    here = {"dtype": mx.float32, "device": "gpu", "metal": True, "traced": False}
    fits = choose(sizes=(5, 3, 2, 256), cell=PointwiseCell(graph), **here)
    assert fits == ("fused", "all steps in one launch")
    assert choose(sizes=(5, 3, 2, 9), cell=PointwiseCell(graph), requested="stepwise", **here).reason == "asked for"
    free = PointwiseCell(ZOO["indrnn"].graph(3, 19), False)
    assert choose(sizes=(5, 3, 2, 1024), cell=free, **here).engine == "fused"
    many = PointwiseCell(Form(lambda a, state: (sum(a[1:], a[0]) + state[0],), 17).graph(2, 3))
    for cell, H, text in (
        (PointwiseCell(graph), 300, "H = 300 > 256"),
        (free, 1025, "H = 1025 > 1024"),
        (many, 8, "18 > 16 numbers per unit"),
    ):
        chosen = choose(sizes=(5, 3, 2, H), cell=cell, **here)
        assert chosen.engine == "stepwise" and text in chosen.reason
        with pytest.raises(ValueError, match=text):
            choose(sizes=(5, 3, 2, H), cell=cell, requested="fused", **here)


def test_what_stepwise_cannot_run_is_refused_with_the_reason():
    """The default engine is `ops` for a cell with so many gates that `stepwise` has too few threads, and a request
    for `stepwise` raises an error with the reason."""
    form = Form(lambda a, state: (sum(a[1:], a[0]) + state[0],), 33)
    here = {"sizes": (5, 3, 2, 8), "dtype": mx.float32, "device": "gpu", "metal": True, "traced": False}
    cell = PointwiseCell(form.graph(2, 3))
    chosen = choose(cell=cell, **here)
    assert chosen.engine == "ops" and "33 gates > 32" in chosen.reason
    with pytest.raises(ValueError, match="33 gates > 32"):
        choose(cell=cell, requested="stepwise", **here)
    assert choose(cell=cell._replace(recurrent=False), **here).engine == "stepwise"


def trying(forms, normed):
    """Make the command that `check --full` runs try these cells only."""
    return patch.multiple(check_cells, FORMS=forms, NORMED=normed)


def test_check_tries_the_zoo(tmp_path, capsys):
    """The command that `check --full` runs tries every cell of `mlx_lstm.cells` on both Metal engines, also
    cells with a norm, and reports each cell that an engine refuses."""
    assert {form.cell.__name__ for form in check_cells.FORMS} == set(cells.__all__)
    assert [tuple(form) for form in check_cells.FORMS] == [tuple(form) for form in ZOO.values()]
    few = [form for form in check_cells.FORMS if form.cell is cells.indrnn]
    with on_metal() as log, trying(tuple(few), ()):
        assert check_cells.main(["--json", str(tmp_path / "cells.json")]) == 0
    for engine in METAL_ENGINES:
        assert any(engine in launch.name and "backward" in launch.name for launch in log), "no gradient was computed"
    found = [f"indrnn, {engine}" for engine in METAL_ENGINES]
    assert json.loads((tmp_path / "cells.json").read_text()) == dict.fromkeys(found, "")
    with patch.object(check_cells, "verdict", lambda form, engine: ""):
        assert check_cells.main(["--json", str(tmp_path / "cells.json")]) == 0
    found = {f"{form.title}, {engine}" for form in check_cells.FORMS + check_cells.NORMED for engine in METAL_ENGINES}
    assert set(json.loads((tmp_path / "cells.json").read_text())) == found
    with trying(check_cells.FORMS[-1:], ()), mx.stream(mx.cpu):
        assert check_cells.main(["--json", str(tmp_path / "cells.json")]) == 1
    assert "minimal_gru_log, stepwise   [pointwise] engine='stepwise' cannot run" in capsys.readouterr().out
    with patch.object(check_cells, "verdict", side_effect=AssertionError), pytest.raises(SystemExit) as stopped:
        check_cells.main(["--jsn"])  # a wrong option is refused before any cell runs
    assert stopped.value.code == 2
