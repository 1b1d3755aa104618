"""Predict which Metal engine is faster, from the sizes of a recurrence and the number of GPU cores.

The prediction is a small model of the hardware: how many cycles a time step takes on the core that gets the most
threadgroups (groups of threads that share memory). tests/machine_code has a larger model, which counts every launch and
every instruction. The tests check that both models agree. No Mac has measured the numbers below.

The engine `fused` runs all steps in one launch; `stepwise` launches a kernel for each step. B: batch items, H: hidden
units. From `metal.fused`: `step_cycles` predicts the cycles of a step, `rows_for` how many batch items a threadgroup
computes; SIMPLER (1.05): a prediction must differ by this factor, because predictions are not exact; BYTES_PER_CYCLE:
what one core loads. From `metal.stepwise`: `stepwise_rows` and `tile_of` say how many batch items a threadgroup
computes, and UNITS and `tile_of` how many hidden units.
"""

from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from .cells import AnyCell
from .metal.fused import BYTES_PER_CYCLE, SIMPLER, LayerSize, rows_for, step_cycles
from .metal.stepwise import UNITS, stepwise_rows, tile_of
from .packing import Packing, field_of
from .problem import LIMITS, Problem

LAUNCH = 5500
"""GPU cycles that each launch of `stepwise` takes in addition to the work of its kernel: 3.9 us. Each launch waits for
the launch before."""

BUILDING = {"forward": 3800, "both": 9400}
"""GPU cycles that pass while the host builds the launches of one step: 2.7 us for a forward step, 6.7 us for a forward
and a backward step. The GPU waits meanwhile if a program evaluates each call. Measured on an AMD EPYC."""

TURN = 370
"""Cycles for which a threadgroup waits for weights in each turn of the loop that computes its product, which adds
`TERMS` terms to each sum: 0.27 us."""

TERMS = 128
"""How many terms of each sum one turn of a product's loop adds."""

CYCLES = {1: 0.030, 4: 0.016, 8: 0.017, 16: 0.014, 32: 0.013}
"""How many cycles a GPU core takes per weight and batch item in one step, by the number of batch items of a
threadgroup. The numbers come from machine code that Mesa's compiler generates for the M1."""

WIDEST = 256
"""The largest H for which the instructions and registers of kernels of `fused` were counted. A kernel that was not
counted may spill registers, so it does not run by default."""

NORM_CYCLES = 1.25
"""How much longer a step of `fused` takes with layer normalisation: its machine code has 1.2 to 1.37 times as many
instructions."""

CACHE_BYTES = 9
"""How many bytes per cycle each core loads from the cache that all cores share, while all cores load from it."""


class Prediction(NamedTuple):
    """The engine that is predicted to be the faster one, and the reason as text."""

    engine: str
    reason: str


@lru_cache(4096)
def predict(
    cell: AnyCell, dtype: mx.Dtype, B: int, H: int, cores: int, directions: int = 1, packing: Packing | None = None
) -> Prediction:
    """Return the faster Metal engine for a batch of B items and H hidden units on a GPU with `cores` cores, with the
    reason. The prediction is for a forward and a backward pass; quantized weights have a forward pass only.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.engines.cells import LSTMCell
        >>> from mlx_lstm.engines.predicted import predict
        >>> [predict(LSTMCell(), mx.float32, 64, 192, cores).engine for cores in (8, 40)]
        ['fused', 'stepwise']
    """
    if H > WIDEST:  # no kernel of `fused` was counted at this H
        return Prediction("stepwise", f"H = {H} > {WIDEST}, up to which kernels of fused were counted")
    layer = LayerSize(cell, B, H, dtype.size, directions, cores, packing)
    fused = step_cycles(layer, rows_for(layer)) * (1 if cell.norm is None else NORM_CYCLES)  # a factor, 1.25
    share = fused / stepwise_cycles(cell, dtype, B, H, cores, directions, packing)  # the time of `fused` relative to it
    weights = f", weights of {packing.bits} bits," if packing else ""
    where = f"in {str(dtype).removeprefix('mlx.core.')}{weights} at B = {B}, H = {H} on {cores} GPU cores"
    where += "" if cell.norm is None else ", with layer normalisation"
    reason = f"fused takes {share:.2g} of the time of stepwise {where}"
    return Prediction("fused" if share <= SIMPLER else "stepwise", reason)


def stepwise_cycles(
    cell: AnyCell, dtype: mx.Dtype, B: int, H: int, cores: int, directions: int, packing: Packing | None
) -> float:
    """Return the predicted GPU cycles of one time step of `stepwise`, including those in which the host builds its
    launches (BUILDING) and those of a launch itself (LAUNCH). CYCLES: per weight and batch item. TURN / TERMS: the wait
    for weights, per term of a sum."""
    # A call of two steps; the number of steps does not matter. The second H is the width of h.
    problem = Problem(2, B, H, H, cell, dtype, bidirectional=directions == 2, limits=LIMITS._replace(cores=cores))
    numbers = directions * cell.gates * H * H  # the recurrent weights
    # size: bytes per weight. Quantized weights count as 4 or 8 bits, as in `fused`, so that there are two tables of
    # defaults. They have no gradient, so only the forward pass counts.
    size = field_of(packing) / 8 if packing else dtype.size
    total = BUILDING["forward" if packing else "both"]
    for backward in (False,) if packing else (False, True):
        # rows, units: what a threadgroup computes; 8 units if UNITS has no number for so many gates.
        rows, units = tile_of(problem, H) if backward else (stepwise_rows(B), UNITS.get(cell.gates, 8))
        down = -(-B // rows)  # parts of the batch, of `rows` items each
        groups = directions * down * -(-H // units)  # threadgroups
        one = CYCLES[rows] * numbers * down * rows / groups  # the cycles of one threadgroup's multiplications
        # waits: the cycles for which it waits for weights. A sum of Wh h has H terms, one of Wh^T dz has gates x H.
        waits = TURN * (cell.gates * H if backward else H) / TERMS
        loaded = numbers * down * size / (CACHE_BYTES * cores)  # the cycles to load all weights from the shared cache
        each = -(-groups // cores)  # the threadgroups of the busiest core
        # The slowest of four limits decides: arithmetic, one threadgroup's waits, the shared cache, and a core's loads
        # of `numbers * size / groups` bytes for each of its threadgroups. A step with layer normalisation needs a
        # second launch.
        total += LAUNCH if cell.norm is None else 2 * LAUNCH
        total += max(each * one, one + waits, loaded, numbers * size / groups / BYTES_PER_CYCLE * each)
    return total
