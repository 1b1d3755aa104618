"""Check the arguments of a recurrence: shapes, dtypes and options. Build the cell that the options describe.

T: time steps, B: batch items, I: input features, H: hidden units, P: the width of h (H, or the width of a projection),
G: gates, D: directions, 1 or 2. arrays: a dict {name of the argument: array}, such as x, Wx, Wh, b, h0, c0, mask. An
array of both directions has them side by side on one axis, such as h0 [B, D P], or has a first axis of 2, such as Wh
[2, G H, P]. op: the name of the public function: an error is a ValueError with the text "[op] rule but got ...", which
`fail(op, rule, got)` raises. In the shape that `check_array` checks, a string such as "H" stands for any size.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from numbers import Integral
from typing import Any, NamedTuple, TypeVar, cast

import mlx.core as mx

from ..engines.cells import ACTIVATIONS, AnyCell, Cell, GRUCell, LSTMCell, PointwiseCell, RNNCell
from ..engines.packing import WEIGHTS, WIDTHS, Packing, Quantized, is_packed
from ..engines.problem import Arrays, Problem
from ..ground.checks import (
    ArraySpec,
    check_array,
    check_flag,
    check_limit,
    check_number,
    check_option,
    check_sizes,
    fail,
)
from ._steps import broadcasts, check_keep

Check = TypeVar("Check", bound=Callable[..., Cell])  # a function such as `check_lstm`
Sizes = tuple[int, int, int, int]
"""The sizes (T, B, H, P): time steps, batch items, hidden units of one direction, width of its h."""

NamedSpec = tuple[str, tuple[int, ...], mx.Dtype]
"""(name, shape, dtype) of an array. Only these matter to `check_shapes`, so its results can be cached."""


def check_call(
    op: str,
    inputs: dict[str, Any],
    cell: AnyCell,
    bidirectional: bool,
    flags: dict[str, bool],
    batch_first: bool = False,
    one_step: bool = False,
) -> tuple[Arrays, Packing | None, Sizes]:
    """Check the arguments of a call. Return (arrays, packing, sizes): its arrays; the group size, bits and mode of its
    quantized weights, or None; and the sizes (T, B, H, P) of one direction. op: the function's name in errors. inputs:
    arrays and `Quantized` weights by argument name; the parts of a `Quantized` weight are returned as separate arrays,
    such as Wh, Wh_scales, Wh_biases. flags: options that must be True or False, by name. batch_first: x is [B, T, I].
    one_step: x is [B, I], without a time axis."""
    # To save time in each call, `check_flag` and `check_array` are called only for a wrong type, to raise the error.
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            check_flag(op, name, flag)
    if not isinstance(bidirectional, bool):
        check_flag(op, "bidirectional", bidirectional)
    if bidirectional and flags.get("reverse"):
        fail(op, "reverse must be False with bidirectional=True, which runs both directions,", "True")
    arrays, packing = unpacked(op, inputs) if Quantized in map(type, inputs.values()) else (inputs, None)
    specs = []  # (name, shape, dtype) of each array; the x of a single step gets a time axis of 1
    for name, array in arrays.items():
        if not isinstance(array, mx.array):
            check_array(op, name, array, shape=None)
        specs.append((name, (1, *array.shape) if one_step and name == "x" else array.shape, array.dtype))
    return arrays, packing, check_shapes(op, cell, bidirectional, batch_first, tuple(specs), packing)


def unpacked(op: str, inputs: dict[str, Any]) -> tuple[Arrays, Packing]:
    """Replace each `Quantized` weight among the arguments `inputs` by its arrays, such as Wh, Wh_scales, Wh_biases.
    Return (arrays, packing); packing: the group size, bits and mode, which must be the same for all quantized weights.
    At least one input is a `Quantized`."""
    quantized = {name: value for name, value in inputs.items() if isinstance(value, Quantized)}
    arrays = {name: value for name, value in inputs.items() if name not in quantized}
    packings: dict[Packing, str] = {}  # {packing: the first weight that has it}; two entries are an error
    for name, value in quantized.items():
        if name not in WEIGHTS:
            fail(op, f"{name} must be an mlx.core.array", "Quantized")
        for part in ("packed", "scales"):
            if not isinstance(array := getattr(value, part), mx.array):
                check_array(op, f"{name}.{part}", array, shape=None)  # raises the error
        try:
            packings.setdefault(value.packing, name)
        except TypeError:  # a field such as a list has no hash, so it is wrong: check_packing raises the error
            check_packing(op, *value.packing)
        arrays |= value.arrays(name)  # such as Wh, Wh_scales, Wh_biases
    packing = next(iter(packings))
    if len(packings) > 1:
        each = ", ".join(f"{name}: {packing}" for packing, name in packings.items())
        fail(op, "all quantized weights must be packed in the same way", each)
    check_packing(op, *packing)
    return arrays, packing


def common_dtype(values: Iterable[Any]) -> mx.Dtype:
    """Return the dtype to which all values promote together: arrays, `Quantized` weights or None. Of a `Quantized`
    weight only the biases count, because its scales may be integer codes. If all weights are quantized without biases,
    as a stepper may have them, the dtype is float32, to which they are dequantized."""
    arrays = [value.biases if isinstance(value, Quantized) else value for value in values]
    arrays = [array for array in arrays if array is not None]
    return mx.result_type(*arrays) if arrays else mx.float32


def in_dtype(values: dict[str, Any], dtype: mx.Dtype) -> dict[str, Any]:
    """Return the dict `values` with every array cast to this dtype. `Quantized` weights stay unchanged."""
    return {name: value if isinstance(value, Quantized) else value.astype(dtype) for name, value in values.items()}


def in_common_dtype(values: dict[str, Any]) -> tuple[dict[str, Any], mx.Dtype]:
    """Cast all arrays in the dict `values` to the dtype to which they promote together. Return (the new dict, this
    dtype). `Quantized` weights stay unchanged."""
    dtype = common_dtype(values.values())
    return in_dtype(values, dtype), dtype


def check_packing(op: str, group_size: object, bits: object, mode: object) -> None:
    """Check that `mx.quantize` supports this mode with this group size and this number of bits."""
    check_option(op, "mode", mode, tuple(WIDTHS))
    groups, widths = WIDTHS[cast(str, mode)]  # the group sizes and the bits per weight that this mode allows
    for name, value, allowed in (("group_size", group_size, groups), ("bits", bits, widths)):
        # 4.0 and True equal integers, but mx.quantize does not take them.
        if not isinstance(value, Integral) or isinstance(value, bool) or value not in allowed:
            fail(op, f"{name} of mode {mode!r} must be one of {', '.join(map(str, allowed))}", repr(value))


@lru_cache(maxsize=1024)
def check_shapes(
    op: str,
    cell: AnyCell,
    bidirectional: bool,
    batch_first: bool,
    specs: tuple[NamedSpec, ...],
    packing: Packing | None = None,
) -> Sizes:
    """Check the shapes and dtypes of a call's arrays, `specs`. Return the sizes (T, B, H, P) of one direction. packing:
    the group size, bits and mode of quantized weights, or None. The result is cached, because the checks take as long
    as one step of a small layer."""
    arrays = {name: ArraySpec(shape, dtype) for name, shape, dtype in specs}
    if packing is not None:
        arrays |= matrices_of(op, arrays, packing)  # a quantized weight is checked as its float matrix
    if isinstance(cell, PointwiseCell):
        return check_pointwise(op, cell, bidirectional, arrays)
    x, Wh, G = arrays["x"], arrays["Wh"], cell.gates
    D = 2 if bidirectional else 1
    GH, DGH = ("H" if n == 1 else f"{n}H" for n in (G, D * G))
    # GH and DGH: the sizes G H and D G H as error texts write them, such as "4H". many: "2" before a size of both
    # directions, as in "2P". own: the first axis of arrays with one entry per direction. If the call has no Wx, its x
    # is already the product x Wx^T, with D G H features.
    own, many = ([2] if bidirectional else []), ("2" if bidirectional else "")
    check_array(op, "x", x, ["T", "B", "I" if "Wx" in arrays else DGH])
    joined = " (join_directions joins the arrays of two directions)" if bidirectional and len(Wh.shape) == 2 else ""
    check_array(op, "Wh", Wh, [*own, GH, "P" if "Wp" in arrays else "H"], x.dtype, joined)
    for name in ("x", "Wh"):
        check_sizes(op, name, arrays[name])
    T, B, I = x.shape
    if batch_first:
        T, B = B, T
    rows, P = Wh.shape[-2:]
    H = rows // G
    # Without a projection Wp the width P of h must be H.
    if rows % G or ("Wp" not in arrays and P != H):
        axis = "2, " if bidirectional else ""
        rule = f"[{axis}{GH}, P] with Wp, else [{axis}{GH}, H]" if G == 4 else f"[{axis}{GH}, H]"
        fail(op, f"Wh must have shape {rule}", f"shape {list(Wh.shape)}")
    if "Wx" not in arrays and I != D * G * H:
        fail(op, f"x must have shape [T, B, {DGH} = {D * G * H}] when Wx is None", f"shape {list(x.shape)}")
    shapes = weight_shapes(G, (I, H, P), D) | {"h0": [B, D * P], "c0": [B, D * H]}
    # reasons: what an error about a wrong shape adds to its rule: where the rule comes from, or the probable mistake.
    # An h0 with the shape of a bias is probably torch's second bias, passed as the argument after b.
    why = f", as x is [{'batch, time' if batch_first else 'time, batch'}, features] = {list(x.shape)},"
    is_bias = arrays.get("h0", x).shape == (D * G * H,)
    first = " (b is one bias, such as the sum of two)" if is_bias else why
    reasons = {"h0": first, "c0": why, "Wx": f", as Wh has shape {list(Wh.shape)} and x {list(x.shape)},"}
    for name in (name for name in shapes if name in arrays):
        check_array(op, name, arrays[name], shapes[name], x.dtype, reasons.get(name, ""))
    if "keep" in arrays:
        check_keep(op, arrays["keep"], T, B, D, batch_first)
    if "mask" in arrays:
        check_mask(op, arrays["mask"], (T, B, D * P), x.dtype, many)
    return T, B, H, P


def weight_shapes(
    G: int, sizes: tuple[int | str, int, int | str], D: int = 1, params: int = 0
) -> dict[str, Sequence[int | str]]:
    """Return {name: shape} of every parameter that a cell of any kind may have. G: the number of gates. sizes: (I, H,
    P), the features of x, the units, the width of h; a string such as "I" stands for any size. D: directions; an array
    of two has the rows of one after those of the other, or a first axis of 2. params: the parameters per unit of a
    user's cell. Layer normalisation has a scale and a shift for h Wh^T or the sum x Wx^T + h Wh^T ("norm_scale",
    "norm_shift"), for x Wx^T ("norm_input_scale", ...) and for c ("norm_c_scale", ...)."""
    (I, H, P), own = sizes, [2] if D == 2 else []
    shapes: dict[str, Sequence[int | str]] = {"Wx": [D * G * H, I], "b": [D * G * H], "bhn": [D * H]}
    shapes |= {"Wh": [*own, G * H, P], "Wp": [*own, P, H], "peephole": [*own, G * H], "params": [D * params * H]}
    norms = {"norm": [*own, G * H], "norm_input": [*own, G * H], "norm_c": [*own, H]}
    return shapes | {f"{name}_{part}": shape for name, shape in norms.items() for part in ("scale", "shift")}


def check_pointwise(op: str, cell: PointwiseCell, bidirectional: bool, arrays: dict[str, ArraySpec]) -> Sizes:
    """Check the shapes and dtypes of a call with a cell written by the user. Return its sizes (T, B, H, P); P is H.
    cell.carried: the number of states besides h. graph.params: the number of parameters per unit."""
    x, D, G, graph = arrays["x"], 2 if bidirectional else 1, cell.gates, cell.graph
    check_sizes(op, "x", x)
    (T, B, I), H = x.shape, arrays["h0"].shape[-1] // D
    shapes = weight_shapes(G, (I, H, H), D, graph.params) | {"h0": [B, D * H], "c0": [B, D * cell.carried * H]}
    names = {"h0": "state[0]", "c0": "state[1:]"}  # names for errors: the user passes all states in one list, `state`
    # The number of features of x needs no separate check. With Wx, the check of Wx compares it with the columns of Wx.
    # Without Wx, the number of gates G was computed from it.
    for name in (name for name in shapes if name in arrays):
        check_array(op, names.get(name, name), arrays[name], shapes[name], x.dtype)
    if "keep" in arrays:
        check_keep(op, arrays["keep"], T, B, D, batch_first=False)
    if "mask" in arrays:
        check_mask(op, arrays["mask"], (T, B, D * H), x.dtype, "2" if bidirectional else "")
    return T, B, H, H


def matrices_of(op: str, arrays: dict[str, ArraySpec], packing: Packing) -> dict[str, ArraySpec]:
    """Check the arrays of all quantized weights. Return for each quantized weight the shape and dtype of its
    dequantized matrix."""
    dtype, matrices = arrays["x"].dtype, {}
    if dtype == mx.float64:
        fail(op, "x must be float32, float16 or bfloat16 where weights are quantized", dtype)
    for name in (name for name in WEIGHTS if is_packed(name, arrays)):
        packed, scales, biases = arrays[name], arrays[f"{name}_scales"], arrays.get(f"{name}_biases")
        # A row of the packed array stores a row of weights as consecutive bits, in 32-bit words. columns: the weights
        # of a row, rounded down; the next test fails if it was rounded. (0,): an array without axes has no weights.
        *rows, words = packed.shape or (0,)
        columns = words * 32 // packing.bits
        if packed.dtype != mx.uint32 or columns * packing.bits != words * 32 or columns % packing.group_size:
            groups = f"groups of {packing.group_size} weights of {packing.bits} bits"
            rule = f"{name}.packed must be uint32, its rows {groups}"
            fail(op, rule, f"{packed.dtype}, shape {[*rows, words]}")
        shape = [*rows, columns // packing.group_size]
        if packing.mode == "affine":
            why = f", as its rows are {columns} weights of {packing.bits} bits in groups of {packing.group_size},"
            check_array(op, f"{name}.scales", scales, shape, why=why)
            check_array(op, f"{name}.biases", biases, shape, scales.dtype)
        else:  # in all other modes a scale is a code of 8 bits, and there are no biases
            check_array(op, f"{name}.scales", scales, shape, mx.uint8)
            if biases is not None:
                fail(op, f"{name}.biases must be None in mode {packing.mode!r}", "an array")
        matrices[name] = ArraySpec((*rows, columns), dtype)
    return matrices


def check_mask(op: str, mask: ArraySpec, shape: tuple[int, int, int], dtype: mx.Dtype, many: str) -> None:
    """Check that the mask broadcasts to `shape`, which is [T, B, D P], without enlarging `shape`. many: the number of
    directions in the error text, "2", or "" for one. T, B, D, P: steps, batch items, directions, width of h."""
    check_array(op, "mask", mask, None, dtype)  # None: its shape is checked below
    sizes = (1,) * (3 - len(mask.shape)) + mask.shape  # with three axes, as broadcasting adds them
    if not broadcasts(sizes, shape):
        T, B, width = shape
        rule = f"mask must broadcast to [B, {many}P] = [{B}, {width}] or [T, B, {many}P] = [{T}, {B}, {width}]"
        fail(op, rule, f"shape {list(mask.shape)}")


def check_sequences(problem: Problem, arrays: Arrays, saved: Arrays, cotangents: Arrays, op: str) -> None:
    """Check the arrays that a gradient op gets besides the arguments of the forward pass: the outputs that the
    forward pass saved, and the gradients of the outputs (cotangents). The saved outputs that the op needs must be
    given, and each array must have the shape of its output."""
    T, B, D, dtype = problem.T, problem.B, problem.directions, arrays["x"].dtype
    G, H, P = problem.cell.gates, problem.H, problem.P
    shapes = {"h": [T, B, D * P], "c": [T, B, D * H], "gates": [T, B, D * G * H], "hT": [B, D * P], "cT": [B, D * H]}
    # The outputs that each gradient op always needs. A plain RNN needs one of h and gates, which is checked at the end.
    for name in {"lstm": ("gates", "c"), "gru": ("gates", "h"), "rnn": ()}[problem.cell.op]:
        check_array(op, name, saved.get(name), shapes[name], dtype)
    for name, array in saved.items():
        check_array(op, name, array, shapes[name], dtype)
    for name, array in cotangents.items():
        check_array(op, f"d{name}", array, shapes[name], dtype)
    if problem.cell.op == "rnn" and not saved:
        fail(op, "h or gates must be given", "None")
    if "Wp" in arrays and "h" not in saved:
        fail(op, "h must be given where there is a projection Wp", "None")


def once(check: Check) -> Check:
    """Decorate a function such as `check_lstm` with a cache of its results, because one check takes as long as a step
    of a small layer."""
    # typed: 1, 1.0 and True are different arguments, because a check may refuse one of them.
    cached = lru_cache(maxsize=256, typed=True)(check)

    def checked(*arguments: Any, **named: Any) -> Any:
        try:
            return cached(*arguments, **named)
        except TypeError:  # the cache cannot store an argument without a hash, such as a list
            return check(*arguments, **named)

    return cast(Check, checked)


class Clips(NamedTuple):
    """The options of an LSTM's clips as the user passed them."""

    cell_clip: float | None  # the limit on |c|
    projection_clip: float | None = None  # the limit on |h|, only of a projected h
    clip_gradient: str = "through"  # the gradient ignores the clips; "zero": it is 0 where a number was clipped
    has_projection: bool = False  # whether there is a Wp


@once
def check_lstm(
    gate_order: str,
    activations: Sequence[str],
    output_peephole: str,
    forget_bias: float,
    clips: Clips,
    op: str = "lstm",
) -> LSTMCell:
    """Check the options of an LSTM. Return the cell that they describe. output_peephole: whether the peephole of gate o
    reads the "current" or the "previous" c. forget_bias: a number that is added to the preactivation of gate f."""
    cell_clip, projection_clip, clip_gradient, has_projection = clips
    check_gate_order(op, gate_order, "ifgo")
    check_activations(op, activations, "five names: those of i, f, g, o and of the output", count=5)
    check_option(op, "output_peephole", output_peephole, ("current", "previous"))
    # The limits on c and on h. `check_limit` turns 0 and negative numbers, which mean no limit, into None.
    clip = check_limit(op, "cell_clip", cell_clip)
    of_h = check_limit(op, "projection_clip", projection_clip)
    if of_h is not None and not has_projection:
        fail(op, "projection_clip must be None without a projection Wp", projection_clip)
    check_option(op, "clip_gradient", clip_gradient, ("through", "zero"))
    bias = check_number(op, "forget_bias", forget_bias)
    i, f, g, o, output = activations
    # Without a clip both values of clip_gradient mean the same. So always store "through": equal cells share kernels.
    rule = clip_gradient if clip is not None or of_h is not None else "through"
    return LSTMCell(gate_order, (i, f, g, o, output), output_peephole, clip, bias, of_h, rule)


@once
def check_gru(
    gate_order: str, activations: Sequence[str], reset: str, flip_z: bool, has_bhn: bool, op: str = "gru"
) -> GRUCell:
    """Check the options of a GRU. Return the cell that they describe. reset: with "before" the reset gate r multiplies
    h before the candidate's recurrent product; with "after" it multiplies the product. flip_z: z is the weight of the
    candidate n, not of h. has_bhn: whether the call has `bhn`, the bias of that product; only "after" allows it."""
    check_gate_order(op, gate_order, "rzn")
    check_activations(op, activations, "three names: those of r, z, n", count=3)
    check_option(op, "reset", reset, ("after", "before"))
    check_flag(op, "flip_z", flip_z)
    if has_bhn and reset == "before":
        fail(op, "bhn must be None with reset='before'", "an array")
    r, z, n = activations
    return GRUCell(gate_order, (r, z, n), reset, flip_z)


def check_rnn(activation: str, op: str = "rnn") -> RNNCell:
    """Check the activation of a plain RNN. Return the cell with this activation."""
    check_option(op, "activation", activation, ACTIVATIONS)
    return RNNCell(activation)


def check_gate_order(op: str, gate_order: object, gates: str) -> None:
    """Check that `gate_order` is a string that has each letter of `gates` exactly once."""
    if not isinstance(gate_order, str) or sorted(gate_order) != sorted(gates):
        fail(op, f"gate_order must be a permutation of {gates!r}", repr(gate_order))


def check_activations(op: str, activations: object, rule: str, count: int) -> None:
    """Check that `activations` is a sequence of `count` names, each a key of `ACTIVATIONS`. rule: a description of a
    valid sequence, for the error text."""
    if isinstance(activations, str) or not isinstance(activations, Sequence) or len(activations) != count:
        fail(op, f"activations must be {rule}", repr(activations))
    for name in activations:
        check_option(op, "activations: each", name, ACTIVATIONS)
