"""Predict which Metal engine is faster, from the sizes of a recurrence and the number of GPU cores.

The prediction is a small model of the hardware. It computes how many cycles a time step takes on the core that gets the
most threadgroups (groups of threads that share memory). tests/machine_code has a larger model, which counts every
launch and every instruction. The tests check that both models agree. The numbers below were not measured on a Mac.

The engine `fused` runs all steps in one launch; `stepwise` launches a kernel for each step. B: batch items, H: hidden
units.
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
"""GPU cycles that each launch of `stepwise` takes in addition to the work of its kernel: 3.9 us. The launches run one
after the other, so this time is not hidden."""

BUILDING = {"forward": 3800, "both": 9400}
"""GPU cycles that pass while the host (CPU) builds the launches of one step: 2.7 us for a forward step, 6.7 us for a
forward and a backward step, measured on an AMD EPYC. The GPU waits during this time if a program evaluates each call
before it makes the next call."""

TURN = 370
"""Cycles for which a threadgroup of `stepwise` waits for weights in each turn of the loop that computes a product: 0.27
us."""

TERMS = 128
"""How many terms one turn of the loop that computes a product adds to each sum."""

CYCLES = {1: 0.030, 4: 0.016, 8: 0.017, 16: 0.014, 32: 0.013}
"""{batch items per threadgroup: cycles that a GPU core takes to multiply one weight by one batch item in a step of
`stepwise`}. The numbers come from the machine code that Mesa's compiler generates for the M1."""

WIDEST = 256
"""The largest H for which the instructions and registers of kernels of `fused` were counted. A kernel that was not
counted may spill registers, so it does not run by default."""

NORM_CYCLES = 1.25
"""How much longer a step of `fused` takes with layer normalisation: its machine code has 1.2 to 1.37 times as many
instructions."""

CACHE_BYTES = 9
"""How many bytes per cycle each core loads from the cache that all cores share, while all cores load from it."""


class Choice(NamedTuple):
    """An engine's name and the reason it was chosen, as text for the user."""

    engine: str
    reason: str


@lru_cache(4096)
def predict(
    cell: AnyCell, dtype: mx.Dtype, B: int, H: int, cores: int, directions: int = 1, packing: Packing | None = None
) -> Choice:
    """Return the faster Metal engine for a batch of B items and H hidden units on a GPU with `cores` cores, with the
    reason. The prediction is for a forward and a backward pass or, with quantized weights, for a forward pass alone.
    directions: 1 or 2. packing: the format of quantized weights, or None.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.engines.cells import LSTMCell
        >>> from mlx_lstm.engines.predicted import predict
        >>> [predict(LSTMCell(), mx.float32, 64, 192, cores).engine for cores in (8, 40)]
        ['fused', 'stepwise']
    """
    if H > WIDEST:  # no kernel of `fused` was counted at this H
        return Choice("stepwise", f"H = {H} > {WIDEST}, up to which kernels of fused were counted")
    layer = LayerSize(cell, B, H, dtype.size, directions, cores, packing)
    # Predicted GPU cycles of a step of `fused`, with as many batch items per threadgroup as `fused` would choose.
    fused = step_cycles(layer, rows_for(layer)) * (1 if cell.norm is None else NORM_CYCLES)
    share = fused / stepwise_cycles(cell, dtype, B, H, cores, directions, packing)  # relative to `stepwise`
    weights = f", weights of {packing.bits} bits," if packing else ""
    where = f"in {str(dtype).removeprefix('mlx.core.')}{weights} at B = {B}, H = {H} on {cores} GPU cores"
    where += "" if cell.norm is None else ", with layer normalisation"
    reason = f"fused takes {share:.2g} of the time of stepwise {where}"
    # SIMPLER is 1.05: `fused` runs also if it is predicted to be up to 5 % slower, because predictions are not exact.
    return Choice("fused" if share <= SIMPLER else "stepwise", reason)


def stepwise_cycles(
    cell: AnyCell, dtype: mx.Dtype, B: int, H: int, cores: int, directions: int, packing: Packing | None
) -> float:
    """Return the predicted GPU cycles of one time step of `stepwise`, forward and backward; with quantized weights only
    forward. They include the cycles in which the host builds the launches (BUILDING) and those of the launches
    themselves (LAUNCH)."""
    # `tile_of` needs a `Problem` with the sizes T, B, H and the width of h, which is H here. T, the number of steps,
    # has no effect, so it is any number: 2.
    problem = Problem(2, B, H, H, cell, dtype, bidirectional=directions == 2, limits=LIMITS._replace(cores=cores))
    numbers = directions * cell.gates * H * H  # the recurrent weights
    # size: bytes per weight. A quantized weight counts as 4 or 8 bits, as `fused` stores it. Quantized weights have no
    # gradient, so only the forward pass counts.
    size = field_of(packing) / 8 if packing else dtype.size
    total = BUILDING["forward" if packing else "both"]
    for backward in (False,) if packing else (False, True):
        # rows, units: how many batch items and hidden units a threadgroup computes. UNITS: {gates: hidden units}; 8
        # units if it has no entry for this number of gates.
        rows, units = tile_of(problem, H) if backward else (stepwise_rows(B), UNITS.get(cell.gates, 8))
        down = -(-B // rows)  # the number of parts into which threadgroups divide the batch
        groups = directions * down * -(-H // units)  # threadgroups
        one = CYCLES[rows] * numbers * down * rows / groups  # the cycles of one threadgroup's multiplications
        # waits: the cycles for which a threadgroup waits for weights. A sum of Wh h (forward) has H terms, a sum of
        # Wh^T dz (backward) has gates x H terms.
        waits = TURN * (cell.gates * H if backward else H) / TERMS
        loaded = numbers * down * size / (CACHE_BYTES * cores)  # the cycles to load all weights from the shared cache
        each = -(-groups // cores)  # the threadgroups of the busiest core
        # A step with layer normalisation needs a second launch. The step takes as long as the slowest of four things:
        # the multiplications of the busiest core; the multiplications and waits of one threadgroup; the loads from the
        # shared cache; the loads of the busiest core, `numbers * size / groups` bytes for each of its threadgroups.
        total += LAUNCH if cell.norm is None else 2 * LAUNCH
        total += max(each * one, one + waits, loaded, numbers * size / groups / BYTES_PER_CYCLE * each)
    return total
