"""Layer normalisation inside the step: the argument `norm` of the functions and the option `layer_norm` of layers, with
their checks. `engines.input_norm` computes the part of it that comes before the steps, except for the engine `numpy`,
which computes this part itself.

A `Norm` is what the user writes, with the arrays of scales and shifts. `NormOptions`, a field of the cell, is what
engines read: the options without arrays. The arrays become arrays of the call, such as `norm_scale`. G: gates, H:
units.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import mlx.core as mx

from ..engines.cells import AnyCell, GRUCell, LSTMCell, NormOptions
from ..ground.checks import check_number, check_option, fail

SomeCell = TypeVar("SomeCell", bound=AnyCell)
Function = TypeVar("Function", bound=Callable[..., Any])


class Norm(NamedTuple):
    """Layer normalisation inside the steps of `lstm`, `gru`, `rnn` and `pointwise`.

    LN(a) = scale (a - mean) / sqrt(variance + eps) + shift. The mean and the variance are over the units of one batch
    item at one step; the variance divides by their number, as `torch.nn.LayerNorm` does. Without a norm the
    preactivations of a step are x Wx^T + h Wh^T + b. With it they are:

        of="products"   LN(x Wx^T) + LN(h Wh^T) + b, each LN with its own scale and shift
        of="recurrent"  x Wx^T + LN(h Wh^T) + b
        of="sum"        LN(x Wx^T + h Wh^T + b)

    Peephole terms, `forget_bias` and a GRU's `bhn` are added after the norm. The published layers are

        Ba et al. (2016), haste's LayerNormLSTM     Norm(c="output"), with shifts or without
        haste's LayerNormGRU                        Norm(), gru(..., b=, bhn=)
        LayerNormLSTMCell of PyTorch's benchmarks   Norm(c="state")
        TFLite's LSTM with layer normalisation      Norm("sum", gates="each"), without peepholes
        TF1's LayerNormBasicLSTMCell                Norm("sum", gates="each", c="state", eps=1e-12)
        Dreamer's GRU                               Norm("sum", eps=1e-3) of a `pointwise` cell

    The fields, with G gates and H units:

    - of (str, optional): what is normalised, see above. None: only c. Default: `"products"`.
    - scale, shift [G H]: the scale and shift of LN(h Wh^T) or, with `"sum"`, of the LN of the sum.
    - input_scale, input_shift [G H]: the scale and shift of LN(x Wx^T), with `"products"` only.
    - c (str, optional): whether an LSTM's c is normalised, after its clip. `"output"`: only where h is computed from
      it, h = o tanh(LN(c)). `"state"`: the normalised c is also the output c, and the next step reads it. Default:
      `None`, c is not normalised.
    - c_scale, c_shift [H]: the scale and shift of LN(c).
    - gates (str): which numbers share a mean and a variance. `"together"`: all G H numbers. `"each"`: the H numbers of
      one gate. Default: `"together"`.
    - eps (float): is added to each variance. Default: 1e-5.

    If a scale is None, it is 1; if a shift is None, it is 0. With both directions the arrays are [2, G H] and [2, H].
    They have the dtype of x. To get their gradient, make the `Norm` inside the function that MLX differentiates.

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

    def __repr__(self) -> str:
        # Only the fields that differ from their defaults. Compare texts, because == of arrays returns an array.
        values = {name: repr(getattr(self, name)) for name in self._fields}
        changed = [name for name, usual in self._field_defaults.items() if values[name] != repr(usual)]
        return f"Norm({', '.join(f'{name}={values[name]}' for name in changed)})"


FIELDS = ("scale", "shift", "input_scale", "input_shift", "c_scale", "c_shift")
NAMES = {name: f"norm_{name}" for name in FIELDS}
"""{field of `Norm` that holds an array: the name of this array in a call}."""

OF = {"products": "products", "recurrent": "product", "sum": "sum", None: None}
"""{the user's value of `Norm.of`: the engines' value of `NormOptions.of`}. With "recurrent" only one of the two
products is normalised, so the engines' word is "product"."""


def without_norm(function: Function) -> Function:
    """Decorate a gradient op such as `lstm_gradients`, which has no argument `norm`: a call with `norm` raises an error
    that says what to use instead."""

    @wraps(function)
    def checked(*arguments: Any, **options: Any) -> Any:
        if "norm" in options and (norm := options.pop("norm")) is not None:
            op = function.__name__
            whole = op.removesuffix("_gradients")
            fail(op, f"norm must be None, as MLX's mx.vjp of {whole} has its gradient,", type(norm).__name__)
        return function(*arguments, **options)

    return cast(Function, checked)


def with_norm(op: str, cell: SomeCell, norm: Any, arrays: dict[str, Any]) -> tuple[SomeCell, dict[str, Any]]:
    """Check the argument `norm`. Return (cell, arrays): the cell has the norm's options, and the arrays of the call
    include the norm's arrays."""
    if norm is None:
        return cell, arrays
    options = options_of(op, cell, norm)
    # Refuse an array that scales or shifts something that is not normalised. name: the array's field, such as
    # "input_scale". field: the option of `Norm` on which it depends, "c" or "of". values: the values of this option
    # with which the array is used.
    for name in NAMES:
        field = "c" if name[:2] == "c_" else "of"
        values = ("products",) if name[:5] == "input" else ("products", "recurrent", "sum")
        values = ("output", "state") if field == "c" else values
        if getattr(norm, name) is not None and getattr(norm, field) not in values:
            rule = f"norm.{name} must be None unless norm.{field} is {' or '.join(map(repr, values))}"
            fail(op, rule, f"an array and {getattr(norm, field)!r}")
    given = {argument: getattr(norm, name) for name, argument in NAMES.items() if getattr(norm, name) is not None}
    return cell._replace(norm=options), arrays | given


def options_of(op: str, cell: Any, norm: Any) -> NormOptions:
    """Check the options of a `Norm` for this cell, and return them as engines take them. The cell may be a user's cell
    that is not traced yet. cell.recurrent: h is multiplied by Wh. cell.apart: the cell reads x Wx^T and h Wh^T as two
    values and never their sum, so it cannot have norm.of = "sum"."""
    if not isinstance(norm, Norm):
        fail(op, 'norm must be a mlx_lstm.Norm, such as Norm() or Norm("sum", scale)', type(norm).__name__)
    check_option(op, "norm.of", norm.of, tuple(OF))  # OF: {the user's word: the engines' word}
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
    if not cell.recurrent:
        fail(op, "norm must be None where Wh is None", "a Norm")
    if norm.of == "sum" and cell.apart:
        fail(op, "norm.of must be 'products' or 'recurrent' with apart=True", "'sum'")
    return NormOptions(OF[norm.of], norm.gates, norm.c, eps)


def layer_norm_of(op: str, cell: Any, layer_norm: Any) -> NormOptions | None:
    """Check the option `layer_norm` of a layer: a bool, or a `Norm` without arrays. Return the options for its cell, or
    None without layer normalisation. True means: normalise both products, x Wx^T and h Wh^T, and an LSTM's c."""
    if layer_norm is False:
        return None
    if layer_norm is True:
        layer_norm = Norm(c="output" if isinstance(cell, LSTMCell) else None)
    if not isinstance(layer_norm, Norm):
        fail(op, "layer_norm must be True, False or a mlx_lstm.Norm", repr(layer_norm))
    if any(getattr(layer_norm, name) is not None for name in NAMES):
        fail(op, "layer_norm must be a Norm without arrays, which are parameters of the layer", "an array")
    return options_of(op, cell, layer_norm)


def layer_norm_arrays(norm: NormOptions, gates: int, H: int) -> dict[str, int]:
    """Return {name: width} of the parameters that layer normalisation adds to a layer with a cell of this number of
    gates and H units. A normalised product has no shift, because the bias is added to the same preactivations."""
    found = {"norm_scale": gates * H} if norm.of is not None else {}
    found |= {"norm_input_scale": gates * H} if norm.of == "products" else {}
    found |= {"norm_shift": gates * H} if norm.of == "sum" else {}
    return found | ({"norm_c_scale": H, "norm_c_shift": H} if norm.c is not None else {})


def first_value(name: str, shape: list[int]) -> mx.array:
    """Return the first value of a parameter of layer normalisation: a scale of 1, or a shift of 0."""
    return mx.ones(shape) if name.endswith("scale") else mx.zeros(shape)


def norm_given(norm: NormOptions, arrays: Mapping[str, Any]) -> Norm:
    """Return the `Norm` that a user would write for these options of an engine: the inverse of `options_of`. arrays: by
    a call's names such as "norm_scale"; those of the normalisation become fields of the `Norm`."""
    of = next(users_word for users_word, engines_word in OF.items() if engines_word == norm.of)
    given = {field: arrays[in_call] for field, in_call in NAMES.items() if in_call in arrays}
    return Norm(of, c=norm.c, gates=norm.gates, eps=norm.eps, **given)
