"""Checks of arguments at the public edge: `ValueError("[op] rule but got value")`, before any work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import mlx.core as mx
import numpy as np

FLOATS = (mx.float32, mx.float16, mx.bfloat16, mx.float64)


def fail(op: str, rule: str, value: object) -> NoReturn:
    """Raise the one kind of error this package has for a bad argument."""
    raise ValueError(f"[{op}] {rule} but got {value}.")


def check_array(op: str, name: str, array: object, shape: Sequence[int | str], dtype: mx.Dtype | None = None) -> None:
    """`array` is an MLX array of this shape (a letter stands for any size) and dtype (`None`: any float)."""
    if not isinstance(array, mx.array):
        fail(op, f"{name} must be an mlx.core.array", type(array).__name__)
    expected = "[" + ", ".join(map(str, shape)) + "]"
    fits = array.ndim == len(shape) and all(
        isinstance(want, str) or want == size for want, size in zip(shape, array.shape, strict=True)
    )
    if not fits:
        fail(op, f"{name} must have shape {expected}", f"shape {list(array.shape)}")
    if dtype is None and array.dtype not in FLOATS:
        fail(op, f"{name} must be float32, float16, bfloat16 or float64", array.dtype)
    if dtype is not None and array.dtype != dtype:
        fail(op, f"{name} must have the dtype of the other arrays, {dtype},", array.dtype)


def check_sizes(op: str, name: str, array: mx.array) -> None:
    """No axis of `array` is empty."""
    if 0 in array.shape:
        fail(op, f"{name} must have no empty axis", f"shape {list(array.shape)}")


def check_option(op: str, name: str, value: object, allowed: Sequence[object]) -> None:
    """`value` is one of `allowed`."""
    if value not in allowed:
        fail(op, f"{name} must be one of {', '.join(map(repr, allowed))}", repr(value))


def check_flag(op: str, name: str, value: object) -> None:
    """`value` is True or False, and not merely truthy."""
    if not isinstance(value, bool):
        fail(op, f"{name} must be True or False", repr(value))


def check_number(op: str, name: str, value: object, *, positive: bool = False) -> None:
    """`value` is a finite number, and greater than 0 if `positive`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and np.isfinite(value)
    if not number or (positive and value <= 0):
        fail(op, f"{name} must be a finite number{' greater than 0' if positive else ''}", repr(value))


def check_lengths(
    op: str, lengths: object, batch: int, longest: int, *, traced: bool, name: str = "lengths", shortest: int = 0
) -> mx.array:
    """`lengths` as int32 [batch], each in shortest..longest; a traced array's range is unknown and goes unchecked."""
    if isinstance(lengths, (list, tuple)):
        if not all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in lengths):
            fail(op, f"{name} must be integers", lengths)
        lengths = mx.array([int(n) for n in lengths], mx.int64)
    elif isinstance(lengths, np.ndarray) and np.issubdtype(lengths.dtype, np.integer):
        lengths = mx.array(lengths)
    if not isinstance(lengths, mx.array) or not mx.issubdtype(lengths.dtype, mx.integer):
        fail(op, f"{name} must be integers (a list, or an array)", getattr(lengths, "dtype", type(lengths).__name__))
    if lengths.shape != (batch,):
        fail(op, f"{name} must have shape [{batch}], one per batch item,", f"shape {list(lengths.shape)}")
    if not traced:
        values = np.array(lengths)
        outside = (values < shortest) | (values > longest)
        if outside.any():
            item = int(outside.argmax())
            fail(op, f"{name} must lie in {shortest}..{longest}", f"{name}[{item}] = {values[item]}")
    return lengths.astype(mx.int32)
