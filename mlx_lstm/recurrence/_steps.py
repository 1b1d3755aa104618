"""The carried state between steps: what `keep` multiplies it by, and the steps at which `hold` leaves it as it is.

No engine knows `hold`. An item's other steps are gathered in front, in the order of time, and run as a shorter item;
then its outputs are laid out again. An engine's `keep` [T, B, D] is one per direction, and 1 where an item has ended.
"""

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..checks import Form, fail, instead_of
from ..engines.directions import half
from ..engines.problem import Array, Arrays, masks_differ


def check_keep(op: str, keep: Form, T: int, B: int, D: int, batch_first: bool) -> None:
    """`keep` broadcasts to [T, B] or [T, B, D] without enlarging it; of any real dtype."""
    axes, sizes = ("[B, T", (B, T)) if batch_first else ("[T, B", (T, B))
    if not broadcasts(keep.shape, sizes) and not broadcasts(keep.shape, (*sizes, D)):
        more = f" or {axes}, 2] = {[*sizes, D]}" if D > 1 else ""
        fail(op, f"keep must broadcast to {axes}] = {list(sizes)}{more}", f"shape {list(keep.shape)}")
    check_keep_dtype(op, keep)


def check_keep_dtype(op: str, keep: Form | mx.array) -> None:
    """`keep` is of any real dtype."""
    if keep.dtype == mx.complex64:
        fail(op, "keep must be real, an integer or bool", keep.dtype)


def check_hold(op: str, hold: Any, T: int, B: int, batch_first: bool) -> mx.array:
    """`hold` as bool [T, B]: a list or an array of bool or integers that broadcasts to it."""
    found = hold_array(op, hold)
    axes, sizes = ("[B, T]", (B, T)) if batch_first else ("[T, B]", (T, B))
    if not broadcasts(found.shape, sizes):
        fail(op, f"hold must broadcast to {axes} = {list(sizes)}", f"shape {list(found.shape)}")
    found = mx.broadcast_to(found != 0, sizes)
    return found.T if batch_first else found


def hold_array(op: str, hold: Any) -> mx.array:
    """`hold` as an array of bool or integers."""
    if not isinstance(hold, (list, np.ndarray, mx.array)):
        fail(op, f"hold must be an mlx.core.array{instead_of(hold)}", type(hold).__name__)
    if isinstance(hold, mx.array):
        found = hold
    else:
        try:
            found = mx.array(np.asarray(hold))
        except (ValueError, RuntimeError):  # of rows of several lengths, of text and objects
            fail(op, "hold must be bool or integers, each row of as many,", hold)
    if found.dtype != mx.bool_ and not mx.issubdtype(found.dtype, mx.integer):
        fail(op, "hold must be bool or integers", found.dtype)
    return found


def whole_steps(op: str, keep: Any, hold: Any, shape: tuple[int, ...], axes: str) -> dict[str, mx.array]:
    """A layer's keep and hold, those given, at the full shape of its steps: x without its features, of these `axes`."""
    if keep is hold is None:
        return {}
    found = {} if hold is None else {"hold": hold_array(op, hold)}
    if keep is not None:
        if not isinstance(keep, mx.array):
            fail(op, f"keep must be an mlx.core.array{instead_of(keep)}", type(keep).__name__)
        check_keep_dtype(op, keep)
        found["keep"] = keep
    for name, value in found.items():
        if not broadcasts(value.shape, shape):
            fail(op, f"{name} must broadcast to {axes} = {list(shape)}", f"shape {list(value.shape)}")
        found[name] = mx.broadcast_to(value, shape)
    return found


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether an array of as many axes broadcasts to a shape."""
    return len(shape) == len(to) and all(size in (1, wanted) for size, wanted in zip(shape, to, strict=True))


class Steps(NamedTuple):
    """Of a call with `keep` or `hold`: T, B, its directions, forward or reverse each, and how its sequences lie;
    lengths [B], or None; which steps are held, [T, B] bool, or None."""

    T: int
    B: int
    backwards: tuple[bool, ...]
    batch_first: bool
    lengths: mx.array | None
    hold: mx.array | None

    def alive(self) -> Array:
        """[T, B]: where an item has not ended."""
        times = mx.broadcast_to(mx.arange(self.T)[:, None], (self.T, self.B))
        return times < (self.T if self.lengths is None else self.lengths)

    def live(self) -> Array:
        """[T, B]: the steps that run."""
        # Not `&`, of which mx.vmap in MLX 0.32.4 loses the axis where only the second operand is mapped.
        return self.alive() if self.hold is None else mx.where(self.hold, False, self.alive())

    def engine_lengths(self) -> mx.array | None:
        """The lengths of what an engine runs."""
        return self.lengths if self.hold is None else self.live().astype(mx.int32).sum(axis=0)

    def to_engine(self, arrays: Arrays) -> Arrays:
        """The arrays as an engine gets them."""
        found = dict(arrays)
        if "keep" in arrays:
            found["keep"] = self.whole_keep(arrays)
        if self.hold is None:
            return found
        live, (order, ran) = self.live(), self.compact()
        found["x"] = self.taken(arrays["x"], order, self.batch_first)
        if "keep" in arrays:
            found["keep"] = mx.where(ran, self.taken(self.each_direction(found["keep"], live, 0), order), 1)
        if masks_differ(arrays):
            mask = arrays["mask"]
            found["mask"] = self.taken(mx.broadcast_to(mask, (self.T, self.B, mask.shape[-1])), order)
        return found

    def compact(self) -> tuple[Array, Array]:
        """[T, B]: the steps that run, in the order of time, and then the others; [T, B, 1]: where the former are."""
        times, live = mx.arange(self.T)[:, None], self.live()
        order = mx.argsort(mx.where(live, times, times + self.T), axis=0)
        return order, (times < live.astype(mx.int32).sum(axis=0))[..., None]

    def saved(self, saved: Arrays) -> Arrays:
        """Sequences that the call returned as its engine did, where these were its last operations."""
        if self.hold is None:
            return saved
        order, ran = self.compact()
        return {name: mx.where(ran, self.taken(array, order), 0) for name, array in saved.items()}

    def outputs(self, found: dict[str, Any], arrays: Arrays, wants_last: bool) -> dict[str, Any]:
        """The call's outputs, out of those of an engine (h, c, gates) and the call's arrays."""
        if self.hold is None:
            return found
        live = self.live()
        ran = mx.cumsum(live.astype(mx.int32), axis=0)
        keep = self.each_direction(self.whole_keep(arrays), live, 1) if "keep" in arrays else None
        outputs: dict[str, Any] = {}
        for name in ("h", "c"):
            if name not in found:
                continue
            whole = mx.swapaxes(found[name], 0, 1) if self.batch_first else found[name]
            parts = []
            for d, back in enumerate(self.backwards):
                first = arrays.get(f"{name}0")
                first = mx.zeros((self.B, whole.shape[-1]), whole.dtype) if first is None else first
                carried = self.carried(self.part(whole, d), self.part(first, d)[None], live, ran, back)
                parts.append(carried if keep is None else carried * keep[..., d : d + 1])
            if wants_last:
                last = [part[0 if back else -1] for part, back in zip(parts, self.backwards, strict=True)]
                outputs[f"{name}T"] = mx.concatenate(last, axis=-1)
            whole = mx.concatenate(parts, axis=-1)
            if self.lengths is not None:
                whole = self.or_zero(whole, mx.arange(self.T)[:, None], self.alive())
            outputs[name] = self.in_call(whole)
        if "gates" in found:
            outputs["gates"] = None if found["gates"] is None else self.or_zero(found["gates"], ran - 1, live)
        return outputs

    def or_zero(self, sequence: Array, times: Array, those: Array) -> Array:
        """Those [T, B] of the steps that `times` names, else 0. Not by mx.where, whose gradient is a product, so that
        NaN comes through."""
        rows = mx.concatenate([sequence, mx.zeros((1, *sequence.shape[1:]), sequence.dtype)])
        return self.taken(rows, mx.where(those, times, self.T))

    def carried(self, states: Array, first: Array, live: Array, ran: Array, back: bool) -> Array:
        """[T, B, .]: at each step the latest state there was, of one direction; `ran`: steps run until then."""
        if not back:
            return self.taken(mx.concatenate([first, states]), ran)
        before = ran - live.astype(mx.int32)  # where the engine has the step, or the next one that runs
        return self.taken(mx.concatenate([states, first]), mx.where(before == ran[-1], self.T, before))

    def part(self, array: Array, d: int) -> Array:
        """A direction's part of an array that has them side by side."""
        return array if len(self.backwards) == 1 else half(array, d)

    def in_call(self, sequence: Array) -> Array:
        """[T, B, .] as the call's sequences lie."""
        return mx.swapaxes(sequence, 0, 1) if self.batch_first else sequence

    def whole_keep(self, arrays: Arrays) -> Array:
        """[T, B, D]: the factors, 1 where an item has ended."""
        keep = arrays["keep"].astype(arrays["x"].dtype)
        keep = keep[..., None] if keep.ndim == 2 else keep
        keep = mx.broadcast_to(self.in_call(keep), (self.T, self.B, len(self.backwards)))
        return keep if self.lengths is None else mx.where(self.alive()[..., None], keep, 1)

    def each_direction(self, keep: Array, live: Array, which: int) -> Array:
        """`factors`, number `which`, of each direction in its order of processing, [T, B, D]."""
        found = []
        for d, back in enumerate(self.backwards):
            turn = slice(None, None, -1 if back else 1)
            found.append(factors(keep[turn, :, d], live[turn])[which][turn])
        return mx.stack(found, axis=-1)

    def taken(self, sequence: Array, times: Array, batch_first: bool = False) -> Array:
        """The steps of a sequence that `times` [T, B] names for each item."""
        items = mx.arange(self.B)
        rows = times.T + sequence.shape[1] * items[:, None] if batch_first else times * self.B + items
        return mx.take(sequence.reshape(-1, sequence.shape[-1]), rows, axis=0)


def factors(keep: Array, live: Array) -> tuple[Array, Array]:
    """[T, B] each, of steps in their order of processing: the product of keep since the last step that ran, this one
    included, and the same of a held step, else 1: what the state before a step and that after it is multiplied by."""
    product, found, distance = mx.where(live, 1, keep), live, 1
    while distance < len(keep):
        product = mx.where(found, product, product * shifted(product, distance, 1))
        found = found | shifted(found, distance, 1)
        distance *= 2
    return keep * shifted(product, 1, 1), product


def shifted(array: Array, steps: int, first: int) -> Array:
    """[T, B], later by some steps."""
    return mx.concatenate([mx.full((steps, array.shape[1]), first, array.dtype), array[:-steps]])
