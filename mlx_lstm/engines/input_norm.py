"""Compute the part of layer normalisation that does not depend on h, before an engine runs the steps: the normalised
product x Wx^T of the input, and the shift of the recurrent product, which is added to the bias. The engine `numpy` does
not need this module: it computes this part itself (`numpy.norms.InputNorm`).

    norm(a) = scale (a - mean) / sqrt(variance + eps) + shift

`cell.norm.of` says what is normalised:

    "products"   norm(x Wx^T) + norm(h Wh^T), each with its own scale and shift. The first norm does not depend on h. So
                 it is computed here for all steps, and the engine gets a call with "product"
    "product"    x Wx^T + norm(h Wh^T)
    "sum"        norm(x Wx^T + b + h Wh^T). It depends on h, so the engines compute it in the steps

G: gates, H: hidden units. The arrays of the call are in a dict by name: `norm_input_scale`, `norm_input_shift` belong
to x Wx^T; `norm_scale`, `norm_shift` to h Wh^T; each has G H numbers per direction. packing: the format of quantized
weights, or None.
"""

from typing import TypeVar

import mlx.core as mx

from .cells import AnyCell, GRUCell, PointwiseCell, norm_blocks
from .definitions import ScaledNorm, widened
from .ops.packed import times_input
from .packing import Packing, is_packed
from .problem import Arrays

SomeCell = TypeVar("SomeCell", bound=AnyCell)


def before_steps(
    cell: SomeCell, arrays: Arrays, packing: Packing | None, directions: int, batch_first: bool
) -> tuple[SomeCell, Arrays, Packing | None]:
    """Return (cell, arrays, packing) of a call with layer normalisation as an engine other than `numpy` takes them.

    If the input's product is normalised, it is computed here, for all steps: x becomes the normalised product, without
    Wx. The shift of the recurrent product is added to the bias, except in a user's cell that reads the input's part and
    the recurrent part of a preactivation separately (`cell.apart`): there the bias belongs to the input's part and the
    shift to the recurrent part.
    """
    norm = cell.norm
    if norm is None or norm.of not in ("product", "products"):
        return cell, arrays, packing
    if norm.of == "products":
        x = normalised_input(cell, arrays, packing, directions, batch_first)
        # Remove Wx (with its scales and biases, if it is quantized) and the scale and shift of this norm.
        arrays = {name: a for name, a in arrays.items() if name[:2] != "Wx" and name[:10] != "norm_input"} | {"x": x}
        cell = cell._replace(norm=norm._replace(of="product"))
        packing = packing if is_packed("Wh", arrays) or is_packed("Wp", arrays) else None
    if "norm_shift" in arrays and not (isinstance(cell, PointwiseCell) and cell.apart):
        arrays = with_shift_in_bias(cell, arrays, directions)
    return cell, arrays, packing


def normalised_input(
    cell: AnyCell, arrays: Arrays, packing: Packing | None, directions: int, batch_first: bool
) -> mx.array:
    """Return the normalised product x Wx^T of all steps. At the steps after a batch item's end x is replaced by 0,
    because NaN at such a step would make the gradient of Wx NaN."""
    x, lengths = arrays["x"], arrays.get("lengths")  # lengths [B]: the number of steps of each batch item
    assert cell.norm is not None
    if lengths is not None:  # live: true where an item has not ended, [B, T] with `batch_first`, else [T, B]
        times, ends = mx.arange(x.shape[1 if batch_first else 0]), lengths
        live = times < ends[:, None] if batch_first else times[:, None] < ends
        x = mx.where(live[..., None], x, mx.array(0, x.dtype))
    z = times_input(packing, arrays, x) if "Wx" in arrays else x
    # There is a mean per direction or, if each gate is normalised by itself, one per gate of each direction.
    scale, shift = (
        arrays[name].reshape(-1) if name in arrays else None for name in ("norm_input_scale", "norm_input_shift")
    )
    norm = ScaledNorm(directions * norm_blocks(cell), cell.norm.eps, scale, shift)
    return norm(widened(z)).astype(x.dtype)


def with_shift_in_bias(cell: AnyCell, arrays: Arrays, directions: int) -> Arrays:
    """Return the arrays with `norm_shift` added to the bias b. A GRU's candidate n is an exception: its shift is added
    to bhn, the bias of the candidate's recurrent product. The reset gate multiplies the sum of this product, its shift
    and bhn."""
    shift = arrays["norm_shift"].reshape(directions, cell.gates, -1)  # [directions, gates, H]
    found: dict[str, mx.array] = {"b": shift.reshape(-1)}
    if isinstance(cell, GRUCell):
        n = cell.gate_order.index("n")  # the number of the candidate's gate
        found["bhn"] = shift[:, n].reshape(-1)
        others = mx.arange(3)[None, :, None] != n  # [1, gates, 1]: true for the gates r and z
        found["b"] = mx.where(others, shift, mx.array(0, shift.dtype)).reshape(-1)
    arrays = {name: array for name, array in arrays.items() if name != "norm_shift"}
    return arrays | {name: array + arrays[name] if name in arrays else array for name, array in found.items()}
