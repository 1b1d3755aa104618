"""Draw the random arrays of a trial (a small test run of Metal kernels), as MLX arrays and as input of the float64
oracle.

A `Problem` describes a call without its arrays; T, B, H, P, D, G: its steps, batch items, units, width of h,
directions, gates. A `Case` is a call with its numbers, which the oracle computes in float64. A kink is a point where
the derivative of an activation jumps. parts: a dict of random arrays by the names of a call's arguments, and `steer`, a
constant offset for each preactivation, which keeps the preactivation away from the kinks.
"""

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..engines.cells import PointwiseCell
from ..engines.ops.packed import matrix_for_oracle
from ..engines.packing import is_packed
from ..engines.problem import Problem
from ..oracle import kink_distance
from ..oracle.arithmetic import ACTIVATIONS, Array, Rounding, Tensors
from ..oracle.closeness import float_of
from ..oracle.judge import Case
from ..oracle.verdict import largest
from ._arguments import weight_shapes
from ._trial import STEER, dtype_word

WIDTH = 3
"""The number of input features of x in a trial with float weights."""

LARGEST = 100.0
"""Limit on the absolute values of all results of a trial, far below 65,504, where float16 overflows."""

HALVINGS = 30
"""The largest number of times that `draw` halves the random terms of the preactivations. If a preactivation is then
still near a jump of its activation's slope, the trial does not compare its gradients with the oracle."""


class Drawn(NamedTuple):
    """The random inputs of a trial. case: the inputs as a case for the float64 oracle, without cotangents. arrays: the
    same arrays for MLX, quantized weights included. smooth: all results are small, and no preactivation is near a kink
    of its activation (a jump of the slope). Only then are the gradients compared with the oracle."""

    case: Case
    arrays: dict[str, mx.array]
    smooth: bool


def draw(problem: Problem, rng: np.random.Generator) -> Drawn:
    """Draw random inputs for a trial such that all results are small and no preactivation is near a kink of its
    activation (a jump of the slope), where rounding could change a gradient. If no attempt succeeds, return the last
    one with smooth=False."""
    is_own = isinstance(problem.cell, PointwiseCell)
    parts = {} if is_own else draw_parts(problem, rng)
    # A user's cell gets positive numbers in every second attempt, so it gets twice as many attempts.
    for n in range(2 * HALVINGS if is_own else HALVINGS):
        values = values_for_own_cell(problem, rng, n) if is_own else scaled(problem, parts, 0.5**n)
        case, arrays = case_of(problem, values)
        if is_smooth(case):
            return Drawn(case, arrays, smooth=True)
    return Drawn(case, arrays, smooth=False)


def is_smooth(case: Case) -> bool:
    """Return whether all outputs are smaller than LARGEST, and no argument of an activation or comparison is within 16
    eps of a point where the result or its slope jumps, across which rounding could move it. For a user's cell the
    gradients must be small, too, because it may be steep, as a logarithm near 0."""
    with np.errstate(all="ignore"):  # unbounded activations may overflow float64
        results = case.results(Rounding(np.float64))
        if case.op == "pointwise":  # with cotangents the results contain the gradients, too
            ones = {name: np.ones_like(array) for name, array in results.items()}
            results = case._replace(cotangents=ones).results(Rounding(np.float64))
        is_small = all(largest(array) < LARGEST for array in results.values())
        return is_small and kink_distance(**case.call) > 16 * float_of(case.dtype).eps


def values_for_own_cell(problem: Problem, rng: np.random.Generator, attempt: int) -> Tensors:
    """Return random arrays for a cell written by the user, smaller ones in each attempt. Every second attempt has
    positive states, inputs and parameters, because the cell may compute their logarithms or roots. The array "inputs"
    has what the cell itself reads at each step besides the preactivations."""
    # 0.7: the standard deviation in the first attempt; 0.9: its factor in each later attempt; 0.5: the smallest
    # positive number.
    shapes = shapes_of(problem)
    values = {name: rng.normal(0, 0.7 * 0.9**attempt, shape) for name, shape in shapes.items()}
    for name in {"Wx", "Wh"} & values.keys():
        values[name] /= np.sqrt(shapes[name][-1])
    if attempt % 2:
        values |= {name: np.abs(values[name]) + 0.5 for name in {"h0", "c0", "inputs", "params"} & values.keys()}
    return values


def draw_parts(problem: Problem, rng: np.random.Generator) -> Tensors:
    """Return random arrays for all names of the problem, and `steer` [D G H]: one offset for each preactivation. D, G,
    H: directions, gates, hidden units.

    Every preactivation is the sum of its offset and of random terms. At the offset no activation has a kink (a jump of
    its slope). `draw` halves the random terms until two conditions hold: rounding cannot move a preactivation across a
    kink, and the states stay small over all steps, also with unbounded activations.

    An offset has a size of 0.5 to 0.7. Its sign is chosen as follows:

    - The candidate's offset (gate g of an LSTM, n of a GRU, the only gate of a plain RNN) has a random sign for each
      unit, so that h takes both signs.
    - The offsets of all other gates are positive, so that no gate with relu is 0.
    - An LSTM's c0 has the sign of the candidate's offset, so that c stays away from 0, where relu has a kink.
    - In an LSTM the candidate's offset is positive, too, if the candidate's activation is never negative, such as relu:
      c then grows from a positive c0. It is also positive if clips stop gradients and the output's activation is never
      negative: rows of Wp have the signs of the offsets, and positive numbers of h times both signs would cancel.
    """
    _, B, H, _ = problem[:4]
    cell, D, G = problem.cell, problem.directions, problem.cell.gates
    shapes = shapes_of(problem)
    parts = {name: rng.normal(0, 0.7, shape) for name, shape in shapes.items()}
    for name in {"Wx", "Wh", "Wp"} & parts.keys():
        parts[name] /= np.sqrt(shapes[name][-1])
    for name in {"norm_scale", "norm_c_scale"} & parts.keys():
        parts[name] = 1 + 0.5 * parts[name]
    steer = rng.uniform(0.5, 0.7, (D, G * H))
    assert not isinstance(cell, PointwiseCell)
    candidate = {"lstm": "g", "gru": "n", "rnn": "h"}[cell.op]
    act = cell.activations[0 if cell.op == "rnn" else 2]
    signs = np.sign(rng.normal(size=(D, H)))
    clipped = cell.clip_gradient == "zero" and is_never_negative(cell.activations[-1])
    if cell.op == "lstm" and (is_never_negative(act) or clipped):
        signs = np.ones_like(signs)
    steer[:, cell.block(candidate, H)] *= signs
    if "c0" in parts:
        parts["c0"] = rng.uniform(0.5, 0.7, (B, D * H)) * signs.reshape(-1)
    if cell.clip_gradient == "zero":
        parts, steer = away_from_limits(problem, parts, np.sign(steer), rng)
    return parts | {"steer": steer.reshape(-1)}


def is_never_negative(activation: str) -> bool:
    """Return whether an activation has no negative values. No activation decreases, so its value at -100 decides."""
    return float(ACTIVATIONS[activation](np.array(-100.0), Rounding(np.float64))) >= 0


def away_from_limits(problem: Problem, parts: Tensors, signs: Array, rng: np.random.Generator) -> tuple[Tensors, Array]:
    """Change the arrays `parts` for clips that stop gradients, such that some values are clipped and none comes near a
    limit, where the gradient jumps. Return (parts, steer); steer: the offsets of the preactivations. signs [D, G H]:
    the signs of the offsets. D, G, H: directions, gates, hidden units.

    `without_numbers` in `_trial` chooses the limits: 0.297 for |h|; for |c| the geometric mean of |c| after one step
    from c0 = 0 and of |c| after two steps without a clip. Here c begins near 0, and the factors `keep` are near 1. So
    |c| is below its limit after the first step and above it later. All preactivations are about 0.6 (STEER) times
    `signs`. The numbers of each row of Wp have the candidate's signs, so each number of the projected h is a mean of
    positive numbers times 0.1 or, for every second row, times 3. A mean of 0.2, for example, gives 0.02 and 0.6, of
    which the second is clipped to 0.297.
    """
    cell, D, H = problem.cell, problem.directions, problem.H
    steer = signs * rng.uniform(STEER - 0.02, STEER + 0.02, signs.shape)
    of_c = signs[:, cell.block("g", H)]
    changed = {}
    if "c0" in parts:
        changed["c0"] = rng.uniform(0.005, 0.02, parts["c0"].shape) * of_c.reshape(-1)
    if "keep" in parts:
        changed["keep"] = rng.uniform(0.9, 1.1, parts["keep"].shape)
    if "Wp" in parts:
        sizes = np.where(np.arange(problem.P) % 2, 3.0, 0.1)[:, None] / H
        rows = rng.uniform(0.8, 1.2, (D, problem.P, H)) * sizes * of_c[:, None]
        changed["Wp"] = rows.reshape(parts["Wp"].shape)
    return parts | changed, steer


def shapes_of(problem: Problem) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of the float arrays for a test run of kernels, in the order of the problem's names. A weight
    that will be quantized has the shape of its float matrix. T, B, H, P, D, G: steps, batch items, units, width of h,
    directions, gates. cell.carried: the number of states besides h. masks_differ: each step has its own mask. "inputs":
    what a user's cell reads at each step besides the preactivations."""
    (T, B, H, P), cell, D, G = problem[:4], problem.cell, problem.directions, problem.cell.gates
    # width: the features of x. A row of a quantized Wx has at least one group of weights, so it needs more than WIDTH.
    width = problem.packing.group_size if problem.packing and is_packed("Wx", problem.names) else WIDTH
    inputs, params = (cell.graph.inputs, cell.graph.params) if isinstance(cell, PointwiseCell) else (0, 0)
    shapes: dict[str, Any] = {
        **weight_shapes(G, (width, H, P), D, params),
        "x": (T, B, width if "Wx" in problem.names else D * G * H),
        "h0": (B, D * P),
        "c0": (B, D * cell.carried * H),
        "mask": (T, B, D * P) if problem.masks_differ else (B, D * P),
        "keep": (T, B, D),
        "inputs": (T, B, D * inputs * H),
    }
    return {name: tuple(shapes[name]) for name in problem.names if name in shapes}


def output_shapes(problem: Problem) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of the outputs of a trial, a test run of kernels. T, B, H, P, D: steps, batch items, units,
    width of h, directions. cell.carried: the number of states besides h. cell.kept: how many numbers per unit the
    forward pass saves at each step."""
    (T, B, H, P), D, cell = problem[:4], problem.directions, problem.cell
    c = D * cell.carried * H
    shapes = {"h": (T, B, D * P), "c": (T, B, c), "gates": (T, B, D * cell.kept * H), "hT": (B, D * P), "cT": (B, c)}
    return {name: shapes[name] for name in problem.cell.outputs}


def zeros(problem: Problem) -> dict[str, mx.array]:
    """Return the arrays of a trial, a test run of kernels, with zeros and with lengths T. They are enough to list its
    kernels, which only shapes and dtypes decide."""
    arrays = {name: mx.zeros(shape, problem.dtype) for name, shape in shapes_of(problem).items()}
    lengths = {"lengths": mx.full((problem.B,), problem.T, mx.int32)} if "lengths" in problem.names else {}
    return quantized(problem, arrays) | lengths


def quantized(problem: Problem, arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return the arrays for MLX: each quantized weight becomes its packed integers, scales and biases."""
    if problem.packing is not None:
        for name in [name for name in arrays if is_packed(name, problem.names)]:
            arrays = arrays | problem.packing.quantize(arrays[name]).arrays(name)
    return arrays


def scaled(problem: Problem, parts: Tensors, scale: float) -> Tensors:
    """Return the arrays of a trial, a test run of kernels, from the random arrays `parts`. scale: a factor on the
    random terms of the preactivations. parts["steer"], [D G H], is an offset of each preactivation that is not scaled:
    it keeps it away from the kinks of its activation (jumps of the slope). D, G, H: directions, gates, hidden units."""
    values = {name: parts[name].copy() for name in problem.names if name in parts}
    for name in {"Wx", "Wh", "b", "bhn", "peephole"} & values.keys():
        values[name] *= scale
    if "Wx" in values:  # set feature 0 of x to 1, so that column 0 of Wx is an offset of the preactivations
        values["x"][..., 0], values["Wx"][:, 0] = 1.0, parts["steer"]
    else:
        values["x"] = scale * values["x"] + parts["steer"]
    return values


def case_of(problem: Problem, values: Tensors) -> tuple[Case, dict[str, mx.array]]:
    """Return (case, arrays): the case for the float64 oracle, and the MLX arrays, rounded to the problem's dtype.
    values: {name: NumPy array} of the float inputs and weights."""
    cell, arrays = problem.cell, {name: to_mlx(value, problem.dtype) for name, value in values.items()}
    call: dict[str, Any] = {name: float64(array) for name, array in arrays.items()}
    if problem.packing:  # the oracle gets the dequantized matrices, with the bounds of their rounding errors
        arrays = quantized(problem, arrays)
        call |= {name: matrix_for_oracle(problem.packing, arrays, name) for name in call if is_packed(name, arrays)}
    if "lengths" in problem.names:  # the lengths of the items are T, T - 1, ... 0, T, T - 1, ...
        call["lengths"] = np.array([problem.T - n % (problem.T + 1) for n in range(problem.B)])
    if isinstance(cell, PointwiseCell):
        options = {"op": "pointwise", "graph": cell.graph, "norm": cell.norm}
    else:  # the fields of a cell have the names of the oracle's options, except for the activation of a plain RNN
        options = {"activation": cell.activations[-1], "norm": cell.norm} if cell.op == "rnn" else cell._asdict()
        options |= {"op": cell.op, "bidirectional": problem.bidirectional}
    return Case(call | options | {"reverse": problem.reverse}, dtype=dtype_word(problem)), arrays


def to_mlx(array: Array, dtype: mx.Dtype) -> mx.array:
    return mx.array(array.astype(np.float32)).astype(dtype)


def rounded(array: Array, dtype: mx.Dtype) -> Array:
    """Round a NumPy array to the dtype. Return the result in float64."""
    return float64(to_mlx(array, dtype))


def float64(array: mx.array) -> Array:
    return np.array(array.astype(mx.float32)).astype(np.float64)
