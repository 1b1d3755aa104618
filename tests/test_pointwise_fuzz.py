"""Tests of random pointwise cells (functions of random operations), with random numbers of gates, states, inputs and
parameters, and random options. `--fuzz N` runs N / 4 cells; `--fuzz-seed` gives the seed."""

import mlx.core as mx
import numpy as np
import pytest
from on_metal import on_metal
from pointwise_cases import Form, by_pointwise, by_recurrent, draw, is_smooth, judged, run

from mlx_lstm.engines import METAL_ENGINES
from mlx_lstm.engines.choice import FUSED_NUMBERS
from mlx_lstm.oracle.closeness import assert_within

UNARY = (
    *(mx.tanh, mx.sigmoid, mx.sin, mx.abs, mx.negative, mx.square, mx.arctan, lambda x: mx.exp(mx.minimum(x, 1.0))),
    *(lambda x: mx.log1p(x * x), lambda x: mx.rsqrt(1 + x * x), lambda x: mx.maximum(x, 0.0), lambda x: 1 - x),
    *(lambda x: mx.clip(x, -1.0, 1.0), lambda x: mx.logaddexp(x, 0.0), mx.stop_gradient, lambda x: 0.5 * x),
)
BINARY = (
    *(mx.add, mx.subtract, mx.multiply, mx.maximum, mx.minimum, mx.logaddexp, lambda x, y: x / (1 + y * y)),
    *(lambda x, y: mx.where(x > y, x, y * y), lambda x, y: mx.where((x > 0) & (y < 1), x, mx.tanh(y)), mx.arctan2),
)


def random_form(rng):
    """Return a random cell. Its function applies random operations to random values, and ends with tanh to keep the
    states small."""
    gates, states = int(rng.integers(1, 7)), int(rng.integers(1, 6))
    inputs, params = int(rng.integers(0, 3)), int(rng.integers(0, 3))
    recurrent = bool(rng.random() < 0.8)
    apart = recurrent and bool(rng.random() < 0.3)
    steps = [
        (int(rng.integers(1 << 30)), int(rng.integers(1 << 30)), int(rng.integers(1 << 30)))
        for _ in range(rng.integers(1, 12))
    ]
    ends = [int(rng.integers(1 << 30)) for _ in range(states)]

    def cell(a, state, *more):
        values = [part for gate in a for part in (gate if apart else (gate,))] + [*state, *more]
        for op, one, other in steps:
            x, y = values[one % len(values)], values[other % len(values)]
            which = op % (len(UNARY) + 2 * len(BINARY))
            result = UNARY[which](x) if which < len(UNARY) else BINARY[(which - len(UNARY)) % len(BINARY)](x, y)
            values.append(result)
        latest = values[::-1]
        return tuple(mx.tanh(latest[end % min(len(latest), 6)]) for end in ends)

    return Form(cell, gates, states, inputs, params, apart, recurrent)


def random_options(rng):
    names = ("mask", "keep", "lengths", "reverse")
    options = {name: True for name in names if rng.random() < 0.3}
    return options | ({"checkpoint_every": int(rng.integers(1, 4))} if rng.random() < 0.2 else {})


def check(seed):
    """Check a random cell against the float64 oracle on `numpy`, on `ops` and, if the seed is a multiple of 25, on
    the Metal engines. Return the names of the engines that ran the cell. Exception: return () without a check if
    rounding could change the result of a comparison in the cell, or if a derivative is not finite."""
    rng = np.random.default_rng(seed)
    form, options = random_form(rng), random_options(rng)
    sizes = tuple(int(n) for n in rng.integers(1, 6, 4))
    case, cotangents = draw(rng, form, options, sizes)
    if not is_smooth(form, case, 1e-4):
        return ()
    exact, bounds = judged(form, case, cotangents)
    if not all(np.isfinite(value).all() for value in (*exact.values(), *bounds.values())):
        return ()  # such as the derivative of arctan2 at (0, 0)
    every = {name: options[name] for name in ("checkpoint_every",) if name in options}
    runs = {engine: by_pointwise(engine, **every) for engine in ("numpy", "ops")}
    # `recurrent` replaces padding by zeros, where the derivative of a random cell may be infinite. So run it only
    # if there is no padding.
    if "lengths" not in case:
        runs["recurrent"] = by_recurrent
    fits = form.gates + form.states + form.inputs + form.params <= FUSED_NUMBERS
    found = {}
    if seed % 25 == 0:
        for engine in METAL_ENGINES if fits else ("stepwise",):
            with on_metal():
                found[engine] = run(form, case, cotangents, by_pointwise(engine, **every))
    found |= {name: run(form, case, cotangents, call) for name, call in runs.items()}
    for engine, got in found.items():
        for name in exact:
            assert_within(f"seed {seed}, {engine} {name}", got[name], exact[name], bounds[name])
    return tuple(found)


def seeds(seed, count):
    return range(seed * 100_000, seed * 100_000 + count)


def test_some_random_cells_are_right():
    """A few random cells have right outputs and right gradients of all arrays on each engine and with `recurrent`,
    which loops over plain MLX operations."""
    assert len([ran for seed in seeds(1, 40) if (ran := check(seed))]) > 20


@pytest.mark.slow
def test_random_cells_are_right(request):
    """Many random cells have right outputs and right gradients of all arrays on each engine and with `recurrent`,
    which loops over plain MLX operations."""
    tried = [
        check(seed) for seed in seeds(request.config.getoption("--fuzz-seed"), request.config.getoption("--fuzz") // 4)
    ]
    assert len([ran for ran in tried if ran]) > len(tried) / 2
    assert len(tried) < 100 or any("fused" in ran for ran in tried)
