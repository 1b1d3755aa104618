"""Layer normalisation inside the step: the argument `norm` of the functions, its checks, and the part of it that is
computed before the steps run."""

from typing import Any, NamedTuple, TypeVar

import mlx.core as mx

from ..engines.cells import AnyCell, GRUCell, LSTMCell, NormOptions, PointwiseCell, norm_blocks
from ..engines.definitions import normalised
from ..engines.ops.packed import times_input
from ..engines.packing import Packing, is_packed
from ..engines.problem import Arrays
from ..ground.checks import check_number, check_option, fail

SomeCell = TypeVar("SomeCell", bound=AnyCell)

HALVES = (mx.float16, mx.bfloat16)


class Norm(NamedTuple):
    """Layer normalisation inside the steps of `lstm`, `gru`, `rnn` and `pointwise`.

    LN(a) = scale (a - mean) / sqrt(variance + eps) + shift, with the mean and the variance (of all numbers, as in
    torch) over the units of one item and one step. The preactivations of a step are, instead of x Wx^T + h Wh^T + b:

        of="products"   LN(x Wx^T) + LN(h Wh^T) + b, each with arrays of its own
        of="recurrent"  x Wx^T + LN(h Wh^T) + b
        of="sum"        LN(x Wx^T + h Wh^T + b)

    Peephole terms, `forget_bias` and a GRU's `bhn` are added after the norm. The published layers are

        Ba et al. (2016), haste's LayerNormLSTM     Norm(c="output"), with shifts or without
        haste's LayerNormGRU                        Norm(), gru(..., b=, bhn=)
        LayerNormLSTMCell of PyTorch's benchmarks   Norm(c="state")
        TFLite's LSTM with layer normalisation      Norm("sum", gates="each"), without peepholes
        TF1's LayerNormBasicLSTMCell                Norm("sum", gates="each", c="state", eps=1e-12)
        Dreamer's GRU                               Norm("sum", eps=1e-3) of a `pointwise` cell

    of (str, optional): what is normalised, see above; None for c alone. Default: `"products"`. scale, shift [G H]: of
    the recurrent product or of the sum. input_scale, input_shift [G H]: of x Wx^T, with `"products"`. c (str,
    optional): for an LSTM, normalise c after its clip: for `"output"` only where h is computed from it, h = o
    tanh(LN(c)); with `"state"` the normalised c is the state that the next step reads, and the output c. Default:
    `None`, c is not normalised. c_scale, c_shift [H]: of c. gates (str): `"together"` takes the mean over all G H
    numbers, `"each"` over the H numbers of each gate. eps (float): added to each variance. Default: 1e-5.

    An array that is None is 1 (a scale) or 0 (a shift). With both directions the arrays are [2, G H] and [2, H]. They
    have the dtype of x. To get their gradient, make the `Norm` inside of the function that MLX differentiates.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import Norm, lstm
        >>> x, Wx, Wh, scale = mx.ones((10, 2, 3)), mx.ones((16, 3)), mx.ones((16, 4)), mx.ones(16)
        >>> lstm(x, Wx, Wh, norm=Norm(scale=scale, c="output")).h.shape
        (10, 2, 4)
        >>> mx.grad(lambda scale: lstm(x, Wx, Wh, norm=Norm("sum", scale)).h.sum())(scale).shape
        (16,)
    """

    of: str | None = "products"
    scale: mx.array | None = None
    shift: mx.array | None = None
    input_scale: mx.array | None = None
    input_shift: mx.array | None = None
    c: str | None = None
    c_scale: mx.array | None = None
    c_shift: mx.array | None = None
    gates: str = "together"
    eps: float = 1e-5


NAMES = {
    "scale": "norm_scale",
    "shift": "norm_shift",
    "input_scale": "norm_input_scale",
    "input_shift": "norm_input_shift",
    "c_scale": "norm_c_scale",
    "c_shift": "norm_c_shift",
}
"""The arrays of `Norm`, and their names in a call."""

OF = {"products": "products", "recurrent": "product", "sum": "sum", None: None}
"""The values of `Norm.of`, and those of `NormOptions.of`."""


def with_norm(op: str, cell: SomeCell, norm: Any, arrays: dict[str, Any]) -> tuple[SomeCell, dict[str, Any]]:
    """Check the argument `norm`. Return the cell and the arrays of the call with it."""
    if norm is None:
        return cell, arrays
    options = options_of(op, cell, norm)
    for name in NAMES:
        used = options.c if name[:2] == "c_" else options.of if name[:5] != "input" else options.of == "products"
        if getattr(norm, name) is not None and not used:
            fail(op, f"norm.{name} must be None where nothing is normalised that it belongs to", "an array")
    given = {argument: getattr(norm, name) for name, argument in NAMES.items() if getattr(norm, name) is not None}
    return cell._replace(norm=options), arrays | given


def options_of(op: str, cell: AnyCell, norm: Any) -> NormOptions:
    """Check the options of a `Norm` for this cell. Return them as engines take them."""
    if not isinstance(norm, Norm):
        fail(op, "norm must be a mlx_lstm.Norm", type(norm).__name__)
    check_option(op, "norm.of", norm.of, tuple(OF))
    check_option(op, "norm.c", norm.c, (None, "output", "state"))
    check_option(op, "norm.gates", norm.gates, ("together", "each"))
    eps = check_number(op, "norm.eps", norm.eps)
    if eps <= 0:
        fail(op, "norm.eps must be above 0", norm.eps)
    if norm.of is norm.c is None:
        fail(op, "norm must normalise something: norm.of or norm.c", "None for both")
    if norm.c is not None and not isinstance(cell, LSTMCell):
        fail(op, "norm.c must be None, as only an LSTM has a c that is normalised,", repr(norm.c))
    if isinstance(cell, GRUCell) and (norm.of == "sum" or cell.reset == "before"):
        rule = "norm.of must be 'products' or 'recurrent' and reset 'after', as the candidate's parts are apart,"
        fail(op, rule, f"{norm.of!r} and {cell.reset!r}")
    if isinstance(cell, PointwiseCell) and not cell.recurrent:
        fail(op, "norm must be None where Wh is None", "a Norm")
    if norm.of == "sum" and cell.apart:
        fail(op, "norm.of must be 'products' or 'recurrent' with apart=True", "'sum'")
    return NormOptions(OF[norm.of], norm.gates, norm.c, eps)


def before_steps(
    cell: SomeCell, arrays: Arrays, packing: Packing | None, directions: int, batch_first: bool
) -> tuple[SomeCell, Arrays, Packing | None]:
    """Return (cell, arrays, packing) of a call with layer normalisation as an engine takes them.

    If the input's product is normalised, it is computed here, for all steps: x becomes the normalised product, without
    Wx. The shift of the recurrent product becomes a part of the biases, where the cell has them.
    """
    norm = cell.norm
    if norm is None or norm.of not in ("product", "products"):
        return cell, arrays, packing
    if norm.of == "products":
        x = normalised_input(cell, arrays, packing, directions, batch_first)
        arrays = {name: a for name, a in arrays.items() if name[:2] != "Wx" and name[:10] != "norm_input"} | {"x": x}
        cell = cell._replace(norm=norm._replace(of="product"))
        packing = packing if is_packed("Wh", arrays) or is_packed("Wp", arrays) else None
    if "norm_shift" in arrays and not (isinstance(cell, PointwiseCell) and cell.apart):
        arrays = with_shift_in_bias(cell, arrays, directions)
    return cell, arrays, packing


def normalised_input(
    cell: AnyCell, arrays: Arrays, packing: Packing | None, directions: int, batch_first: bool
) -> mx.array:
    """Return the normalised product x Wx^T of all steps. x must be 0 where a batch item has ended: a NaN there would
    spoil the gradient of Wx."""
    x, lengths = arrays["x"], arrays.get("lengths")
    assert cell.norm is not None
    if lengths is not None:
        times, ends = mx.arange(x.shape[1 if batch_first else 0]), lengths
        live = times < ends[:, None] if batch_first else times[:, None] < ends
        x = mx.where(live[..., None], x, mx.array(0, x.dtype))
    z = times_input(packing, arrays, x) if "Wx" in arrays else x
    wide = z.astype(mx.float32) if z.dtype in HALVES else z
    y, _ = normalised(wide, directions * norm_blocks(cell), cell.norm.eps)
    if "norm_input_scale" in arrays:
        y = y * arrays["norm_input_scale"].reshape(-1)
    if "norm_input_shift" in arrays:
        y = y + arrays["norm_input_shift"].reshape(-1)
    return y.astype(x.dtype)


def with_shift_in_bias(cell: AnyCell, arrays: Arrays, directions: int) -> Arrays:
    """Return the arrays with `norm_shift` added to b, or to bhn for the candidate of a GRU."""
    shift = arrays["norm_shift"].reshape(directions, cell.gates, -1)
    found: dict[str, mx.array] = {"b": shift.reshape(-1)}
    if isinstance(cell, GRUCell):
        n = cell.gate_order.index("n")
        parts = mx.split(shift, 3, axis=1)
        found["bhn"] = parts[n].reshape(-1)
        parts[n] = mx.zeros_like(parts[n])
        found["b"] = mx.concatenate(parts, axis=1).reshape(-1)
    arrays = {name: array for name, array in arrays.items() if name != "norm_shift"}
    return arrays | {name: array + arrays[name] if name in arrays else array for name, array in found.items()}
