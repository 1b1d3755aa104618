"""Tests of random cells of `mlx_lstm.pointwise` as users may write them: states that are inputs, parameters, constants
or each other, functions at ties and at 0, and every option. tests/own_cells.py draws and judges them. `--fuzz N` runs
N / 4 cells; `--fuzz-seed` gives the seed."""

import mlx.core as mx
import numpy as np
import pytest
from on_metal import on_metal
from own_cells import Judge, draw_case, filled, library, reference, shapes_of

from mlx_lstm.engines import METAL_ENGINES

REFUSALS = ("NumPy has no erf", "numbers of a unit; use 'stepwise'", "is only for H <= ")
"""The reasons for which an engine may refuse a random cell."""


def check(seed):
    """Check a random cell on `numpy`, on `ops` and, if the seed is a multiple of 25, on the Metal engines. Return the
    verdicts by engine."""
    case = draw_case(seed)
    judge, found = Judge(case), {}
    for engine in ("numpy", "ops", *(METAL_ENGINES if seed % 25 == 0 else ())):
        try:
            if engine in METAL_ENGINES:
                with on_metal():
                    got = library(case, engine)
            else:
                got = library(case, engine)
            found[engine] = judge.verdict(got)
        except ValueError as error:
            assert any(reason in str(error) for reason in REFUSALS), f"seed {seed}, {engine}: {error}\n{case.text}"
            found[engine] = "refused"
        assert found[engine] in ("right", "unjudged", "refused"), f"seed {seed}, {engine} {found[engine]}\n{case.text}"
    return found


def seeds(seed, count):
    return range(seed * 100_000 + 1, seed * 100_000 + 1 + count)


def tried(seeds):
    found = [verdict for seed in seeds for verdict in check(seed).values()]
    assert found.count("right") > 0.9 * len(found)


def test_some_random_cells_are_right():
    """A few random cells have right outputs and right gradients of all arrays on the CPU engines."""
    tried(range(1, 25))


@pytest.mark.slow
def test_random_cells_are_right(request):
    """Many random cells have right outputs and right gradients of all arrays on each engine."""
    tried(seeds(request.config.getoption("--fuzz-seed"), request.config.getoption("--fuzz") // 8))


MIXED = """
def cell(a, s, *more):
    c = mx.tanh(a[0] + s[1] * more[1] - s[2])
    u = mx.maximum(s[3] % 1.5, 0.0) + s[4] // 0.5
    return c, c, more[0], mx.stop_gradient(u) + a[1] * s[3], more[1]
"""
"""A cell that returns one array twice, an input and a parameter, and computes at kinks."""

CROSSINGS = {
    "plain": {},
    "T=1": {"sizes": (1, 3, 2, 4)},
    "B=1": {"sizes": (4, 1, 2, 4)},
    "lengths": {"lengths": [3, 0, 2]},
    "reverse, lengths": {"lengths": [3, 0, 2], "reverse": True},
    "both directions": {"bidirectional": True, "lengths": [4, 1, 2]},
    "mask": {"mask": True},
    "keep": {"keep": True},
    "hold": {"hold": np.arange(12).reshape(4, 3) % 3 == 0, "keep": True, "lengths": [4, 1, 2]},
    "checkpoints": {"checkpoint_every": 2, "lengths": [4, 1, 3], "keep": True},
    "checkpoints, both directions": {"checkpoint_every": 3, "bidirectional": True, "mask": True, "keep": True},
    "float16": {"dtype": mx.float16},
    "bfloat16": {"dtype": mx.bfloat16, "checkpoint_every": 2},
}


def crossing(name):
    """Return a case of the cell `MIXED` with an option. One parameter has the shape [], and two states are one
    array."""
    options = {"apart": False, "bidirectional": False, "reverse": False} | CROSSINGS[name]
    sizes, dtype = options.pop("sizes", (4, 3, 2, 4)), options.pop("dtype", mx.float32)
    counts, both, rng = (2, 5, 1, 2), options["bidirectional"], np.random.default_rng(0)
    shapes = shapes_of(sizes, counts, both) | {"w1": ()}
    if options.pop("mask", False):
        shapes["mask"] = (*sizes[:2], 2 * sizes[3] if both else sizes[3])
    if options.pop("keep", False):
        shapes["keep"] = (*sizes[:2], 2) if both else sizes[:2]
    return filled(rng, MIXED, counts, options, shapes, {place: place for place in shapes} | {"s4": "s1"}, dtype)


@pytest.mark.parametrize("name", CROSSINGS)
def test_states_of_any_kind_are_right_with_every_option(name):
    """A cell whose states are one array twice, inputs and parameters has right results with each option."""
    judge = Judge(crossing(name))
    assert {engine: judge.verdict(library(judge.case, engine)) for engine in ("numpy", "ops")} == {
        "numpy": "right",
        "ops": "right",
    }


@pytest.mark.parametrize("engine", ["fused", pytest.param("stepwise", marks=pytest.mark.slow)])
def test_states_of_any_kind_are_right_in_kernels(engine):
    """The same on the Metal engines, with several options at once."""
    judge = Judge(crossing("hold"))
    with on_metal():
        assert judge.verdict(library(judge.case, engine)) == "right"


GATE_IS_STATE = """
def cell(a, s):
    return mx.sigmoid(a[0]) * mx.tanh(a[1] + 0.5 * s[1]), a[0], mx.sigmoid(a[2] + s[2])
"""
"""A cell whose second state is a preactivation, which besides only a sigmoid reads."""


def test_a_preactivation_that_is_a_state_is_right_in_a_wide_batch():
    """For many rows engine `numpy` computes -z instead of the preactivation z of a gate that only a sigmoid reads. A
    preactivation that is also a state keeps its sign."""
    counts, options = (3, 3, 0, 0), {"apart": False, "bidirectional": False, "reverse": False}
    shapes = shapes_of((20, 32, 2, 3), counts, False)
    case = filled(np.random.default_rng(4), GATE_IS_STATE, counts, options, shapes, {place: place for place in shapes})
    assert Judge(case).verdict(library(case, "numpy")) == "right"


def test_the_reference_has_the_slopes_of_finite_differences():
    """The gradients of the reference are those of central differences of its outputs, along a random direction."""
    judged = 0
    for seed in range(40):
        case = draw_case(seed)
        gradients = reference(case)
        rng, size = np.random.default_rng(seed), 1e-3
        along = {name: rng.normal(size=array.shape) for name, array in case.arrays.items()}
        if case.exact or "stop_gradient" in case.text or case.dtype != mx.float32:
            continue

        def loss(step, case=case, along=along):
            arrays = {name: array + step * along[name] for name, array in case.arrays.items()}
            found = reference(case._replace(arrays=arrays))
            outputs = list(found.values())[: len(case.cotangents)]
            return sum((o * d).sum() for o, d in zip(outputs, case.cotangents, strict=True))

        slope = sum((gradients[f"d{name}"] * along[name]).sum() for name in along)
        near, far = ((loss(k * size) - loss(-k * size)) / (2 * k * size) for k in (1, 2))
        # Two differences agree where the cell is smooth. Near a kink there is no slope to compare with. MLX's exp is as
        # precise as in float32, so each loss has an error of about 1e-7 times the sum of its terms.
        if not abs(near - far) < 1e-2 * (1 + abs(near)):
            continue
        assert abs(slope - near) <= 0.05 * (1 + abs(near)), f"seed {seed}: {slope} for {near}\n{case.text}"
        judged += 1
    assert judged >= 10


def test_the_judge_refuses_wrong_results():
    """The judge of random cells refuses results with NaN, zeros, shifted rows or one wrong item, and accepts right
    ones."""
    case = next(case for case in map(draw_case, range(1, 99)) if not case.exact and case.dtype == mx.float32)
    judge, right = Judge(case), library(case, "numpy")
    assert judge.verdict(right) == "right"
    for name, array in right.items():
        if not np.abs(array).max(initial=0) > 0.01:
            continue
        wrong = {"nan": np.nan * array, "zeros": 0 * array, "scaled": 1.01 * array, "more": np.append(array, 0)}
        wrong["one"] = array + 0.1 * (np.arange(array.size).reshape(array.shape) == array.size - 1)
        for lie, value in wrong.items():
            assert judge.verdict(right | {name: value}) not in ("right", "unjudged"), (name, lie)
