"""Check the arguments of public functions before any work is done; an error text has the form "[op] rule but got
value." Show each warning once, at the caller's line.

op: the name of the function or layer that the user called. name: the name of the argument. why: a reason or advice that
is added to the rule.
"""

import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Integral, Real
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, NoReturn

import mlx.core as mx
import numpy as np

NO_UNITS = ", as weights are drawn from +-1/sqrt(hidden_size),"
"""A part of error texts: the reason why a layer must have at least one unit (1/sqrt(0) is infinite)."""

LARGEST_SIZE = 2**31 - 1
"""The largest size of an axis of an MLX array."""

FLOATS = (mx.float32, mx.float16, mx.bfloat16, mx.float64)
"""The dtypes that the arrays of a call may have."""

ARRAYS = ((np.ndarray, np), (mx.array, mx))
"""The two classes of arrays, each with its module."""


class ArraySpec(NamedTuple):
    """The shape and dtype of an array. The checks accept it in place of an array that does not exist yet."""

    shape: tuple[int, ...]
    dtype: mx.Dtype


def fail(op: str, rule: str, value: object) -> NoReturn:
    """Raise a ValueError for a wrong argument. Its text has the form that all functions of this package use: "[op] rule
    but got value."."""
    raise ValueError(f"[{op}] {rule} but got {value}.")


@contextmanager
def in_the_name_of(op: str, other: str) -> Iterator[None]:
    """Let an error text of the code inside the context begin with [op], the function that the user called, instead of
    [other], a function that `op` calls."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        if not text.startswith(f"[{other}] "):
            raise
        raise type(error)(text.replace(other, op, 1)) from error


PACKAGE = str(Path(__file__).parents[1])
"""The folder of this package."""

_said: set[str] = set()
"""The texts of the warnings that this process has shown."""

_lock = Lock()
"""Protects `_said`."""


_quiet = ContextVar("quiet", default=False)
"""Whether `warn_once` shows nothing at the moment."""


@contextmanager
def without_warnings() -> Iterator[None]:
    """Let `warn_once` show nothing inside the context. A warning that was not shown here can still be shown later."""
    before = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(before)


def warn_once(text: str) -> None:
    """Show a warning, but each text only once per process. Python shows it with the line of the user's code that called
    this package."""
    if _quiet.get():
        return
    with _lock:
        known = text in _said
        _said.add(text)
    if known:
        return
    # Go up the call stack to the first frame outside of this package. level: the `stacklevel` of this frame for
    # `warnings.warn`; 2 is the caller of this function.
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def forget_warnings() -> None:
    """Forget which warnings `warn_once` has shown, so that it shows them again."""
    _said.clear()


def check_array(
    op: str, name: str, array: object, shape: Sequence[int | str] | None, dtype: mx.Dtype | None = None, why: str = ""
) -> None:
    """Raise ValueError unless `array` is an MLX array, or an `ArraySpec`, of this shape and dtype. shape: sizes, or
    letters where any size is allowed; None for any shape. dtype: None for any float dtype. why: the reason for the
    shape, for the error text."""
    if not isinstance(array, (mx.array, ArraySpec)):
        fail(op, f"{name} must be an mlx.core.array{instead_of(array, name)}", type(array).__name__)
    sizes = array.shape
    shape = sizes if shape is None else shape
    # pairs: (required, actual) for each axis where they differ. A letter differs from every size, but is allowed.
    pairs = [pair for pair in zip(shape, sizes, strict=False) if pair[0] != pair[1]]
    if len(sizes) != len(shape) or not all([isinstance(want, str) for want, _ in pairs]):
        fail(op, f"{name} must have shape [{', '.join(map(str, shape))}]{why}", f"shape {list(sizes)}")
    if dtype is None and array.dtype not in FLOATS:
        fail(op, f"{name} must be float32, float16, bfloat16 or float64", array.dtype)
    if dtype is not None and array.dtype != dtype:
        fail(op, f"{name} must have the dtype of the other arrays, {dtype},", array.dtype)


def instead_of(value: object, name: str = "") -> str:
    """Return advice for an error text: what to pass in place of a value that is not an MLX array. name: the name of the
    argument."""
    if type(value).__name__ == "PackedSequence":  # PyTorch's class is a subclass of tuple, so it is tested first
        return ": pad it and use lengths,"
    first = value[0] if isinstance(value, (list, tuple)) and value else None
    # mx.quantize returns a tuple, whose first array holds packed integers of 32 bits.
    if isinstance(first, mx.array) and first.dtype == mx.uint32:
        return ": of what mx.quantize returns make an mlx_lstm.Quantized(*..., group_size=..., bits=...),"
    if isinstance(value, tuple) and name in ("x", "input"):  # an LSTM's result, as in nn.Sequential(LSTM, LSTM)
        return ": of what an LSTM returns pass h, or run all layers by mlx_lstm.nn.stack,"
    if isinstance(value, tuple):
        return ": pass the tuple's arrays one by one,"
    return ": make one by mx.array(...)," if isinstance(value, list) or hasattr(value, "__array__") else ""


def for_mlx(value: Any) -> np.ndarray[Any, Any]:
    """Return an array of NumPy, or a list, as a NumPy array that MLX accepts: without a reversed axis and in the byte
    order of this machine. It is copied only if that changes something. Raise NumPy's ValueError for a list of rows of
    different lengths."""
    array = np.asarray(value)
    # np.ascontiguousarray leaves the negative stride of a reversed axis of size 1; `copy` does not.
    array = array.copy() if min(array.strides, default=0) < 0 else array
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def check_sizes(op: str, name: str, array: mx.array | ArraySpec) -> None:
    """Raise ValueError if an axis of `array` has the size 0."""
    if 0 in array.shape:
        fail(op, f"{name} must have no empty axis, with which nothing is computed,", f"shape {list(array.shape)}")


def check_option(op: str, name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    for one in allowed:
        # Compare types first: `value == one` raises if one of them is an array or a dtype of MLX and the other is not.
        if isinstance(value, type(one)) and value == one:
            return
    fail(op, f"{name} must be one of {', '.join(map(repr, allowed))}", repr(value))


def check_flag(op: str, name: str, value: object, why: str = "") -> None:
    """Raise ValueError unless `value` is True or False; other truthy values are refused. why: advice, for the error
    text."""
    if not isinstance(value, bool):
        fail(op, f"{name} must be True or False{why}", repr(value))


def check_integer(
    op: str, name: str, value: object, *, least: int | None = None, most: int | None = LARGEST_SIZE, why: str = ""
) -> int:
    """Check an integer of any type and return it as Python's int. Raise ValueError if it is no integer, is below
    `least`, or is above `most`. least, most: None for no limit; without `least` there is no upper limit either. why:
    the reason, for the error text."""
    if not isinstance(value, Integral) or isinstance(value, bool) or (least is not None and value < least):
        fail(op, f"{name} must be an integer{'' if least is None else f' of at least {least}'}{why}", repr(value))
    if least is not None and most is not None and int(value) > most:
        fail(op, f"{name} must be at most {most}, the largest size in MLX", repr(value))
    return int(value)


def check_every(op: str, every: Any) -> int | str | None:
    """Check the option `checkpoint_every`, which must be a number of steps, "auto" or None. Return it; a number becomes
    Python's int."""
    if every is None or (isinstance(every, str) and every == "auto"):
        return every
    if not isinstance(every, Integral) or isinstance(every, bool) or every < 1:
        fail(op, "checkpoint_every must be a number of steps of at least 1, 'auto' or None", repr(every))
    return int(every)


def chosen_options(layer: Any) -> str:
    """Return the part of a layer's repr that shows its options `checkpoint_every` and `engine`, without those that are
    None."""
    values = {name: getattr(layer, name, None) for name in ("checkpoint_every", "engine")}
    return "".join(f", {name}={value!r}" for name, value in values.items() if value is not None)


def check_number(op: str, name: str, value: object) -> float:
    """Check a finite number of any type and return it as Python's float. Raise ValueError for anything else."""
    number = as_float(value)
    if number is None or not math.isfinite(number):
        fail(op, f"{name} must be a finite number", repr(value))
    return number


def check_probability(op: str, name: str, value: object) -> float:
    """Check a number of any type in [0, 1] and return it as Python's float. Raise ValueError for anything else."""
    number = check_number(op, name, value)
    if not 0 <= number <= 1:
        fail(op, f"{name} must lie in [0, 1]", value)
    return number


def check_limit(op: str, name: str, limit: object) -> float | None:
    """Check the limit of a clip, a number or None. Return it as Python's float, or None if there is no limit: None, 0
    or a negative number."""
    number = 0.0 if limit is None else check_number(op, name, limit)
    return number if number > 0 else None


def as_float(value: object) -> float | None:
    """Return a number of any type as Python's float, infinite if it is too large. Return None if the value is no
    number."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return -math.inf if value < 0 else math.inf


def check_lengths(
    op: str, lengths: Any, batch: int, longest: int, *, traced: bool, name: str = "lengths", shortest: int = 0
) -> mx.array:
    """Check that each length is in shortest..longest, and return `lengths` as int32 [batch]. batch: the number of
    lengths. longest: the number of steps of the input. traced: whether the array is a placeholder of mx.compile,
    mx.vmap or an export, whose values cannot be checked. name: the argument's name, for error texts. shortest: the
    smallest allowed length."""
    if isinstance(lengths, (list, tuple)):
        if not all(isinstance(n, Integral) and not isinstance(n, bool) for n in lengths):
            fail(op, f"{name} must be integers", lengths)
        # The dtype `object` stores Python's integers. So a huge length is reported below, while int64 would overflow.
        lengths = np.array([int(n) for n in lengths], object)
    # kind, of: a class of arrays and its module. np and mx both have `issubdtype` and `integer`.
    elif not any(isinstance(lengths, kind) and of.issubdtype(lengths.dtype, of.integer) for kind, of in ARRAYS):
        kind = lengths.dtype if isinstance(lengths, (np.ndarray, mx.array)) else type(lengths).__name__
        fail(op, f"{name} must be integers, in a list or an array of MLX or NumPy,", kind)
    if lengths.shape != (batch,):
        hint = ""
        if lengths.shape == (longest,):  # a common mistake: batch and time of the input are exchanged
            remedy = "change batch_first" if op.startswith("torch.") else "exchange batch and time of the input"
            hint = f", as many as the input has steps: {remedy}"
        fail(op, f"{name} must have shape [{batch}], one per batch item,", f"shape {list(lengths.shape)}{hint}")
    if isinstance(lengths, mx.array) and traced:
        return lengths.astype(mx.int32)
    values = np.array(lengths)
    outside = (values < shortest) | (values > longest)
    if outside.any():
        item = int(outside.argmax())
        fail(op, f"{name} must lie in {shortest}..{longest}", f"{name}[{item}] = {values[item]}")
    return mx.array(values.astype(np.int32))
