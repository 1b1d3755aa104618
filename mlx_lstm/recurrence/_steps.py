"""The options `keep` (a factor on the carried state) and `hold` (steps that leave the state unchanged).

No engine implements `hold`. `Steps` gathers the steps of a batch item that are not held to the front, in the order
of time. The engine runs them as a shorter item, and `Steps` scatters the outputs back. Engines implement `keep` as
an array [T, B, D], one factor per direction, which is 1 where an item has ended.

T: time steps, B: batch items, D: directions, d: the index of one direction. arrays: a dict by the names of arguments or
outputs. alive: at this step the batch item has not ended. live: the item has not ended and the step is not held; only
live steps run on an engine. A time index is the position of a step in a sequence. In processing order the first element
belongs to the step that runs first, which has time index T-1 in a reversed direction.
"""

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..engines.directions import half
from ..engines.problem import Array, Arrays, masks_differ
from ..engines.tracing import have_values
from ..ground.checks import ArraySpec, fail, for_mlx, instead_of


def check_keep(op: str, keep: ArraySpec, T: int, B: int, D: int, batch_first: bool) -> None:
    """Check that `keep`, a factor on the states, has a real dtype and the axes [T, B] or [T, B, D] (with `batch_first`
    [B, T] or [B, T, D]), each with its full size or 1. T, B, D: steps, batch items, directions."""
    axes, sizes = ("[B, T", (B, T)) if batch_first else ("[T, B", (T, B))
    if not broadcasts(keep.shape, sizes) and not broadcasts(keep.shape, (*sizes, D)):
        # The text mentions [T, B, 2] only for two directions.
        more = f" or {axes}, 2] = {[*sizes, D]}" if D > 1 else ""
        fail(op, f"keep must broadcast to {axes}] = {list(sizes)}{more}", f"shape {list(keep.shape)}")
    check_keep_dtype(op, keep)


def check_keep_dtype(op: str, keep: ArraySpec | mx.array) -> None:
    if keep.dtype == mx.complex64:
        fail(op, "keep must be real, an integer or bool", keep.dtype)


def check_flags(op: str, name: str, array: mx.array) -> mx.array:
    """Check that an array of integers has only the values 0 and 1. (A usual mistake is `~done` with integers, which has
    the values -1 and -2.) Return it as bool, so that it is not checked again. Return an array of bool or floats
    unchanged, and also an array without values (inside `mx.compile`, `mx.vmap` or an export)."""
    if not mx.issubdtype(array.dtype, mx.integer) or not have_values([array]):
        return array
    if mx.any((array < 0) | (array > 1)).item():
        fail(op, f"{name} of integers must be 0 and 1 (for ~ use a bool array)", f"from {array.min()} to {array.max()}")
    return array != 0


def check_hold(op: str, hold: Any, T: int, B: int, batch_first: bool) -> mx.array:
    """Check the type, dtype and shape of `hold` (steps that leave the state unchanged), which broadcasts to [T, B], or
    to [B, T] with `batch_first`. Return it as bool [T, B]. T, B: steps, batch items."""
    axes, sizes = ("[B, T]", (B, T)) if batch_first else ("[T, B]", (T, B))
    array = whole_steps(op, None, hold, sizes, axes)["hold"] != 0  # as bool
    return array.T if batch_first else array


def hold_array(op: str, hold: Any) -> mx.array:
    """Return the option `hold` (1 or true: a step leaves the state unchanged) as an MLX array of bool or of 0 and 1."""
    if not isinstance(hold, (list, np.ndarray, mx.array)):
        fail(op, f"hold must be an mlx.core.array{instead_of(hold)}", type(hold).__name__)
    if isinstance(hold, mx.array):
        array = hold
    else:
        try:
            array = mx.array(for_mlx(hold))
        except (ValueError, RuntimeError):  # rows of different lengths, text or objects
            fail(op, "hold must be bool or integers, in rows of equal length,", hold)
    if array.dtype != mx.bool_ and not mx.issubdtype(array.dtype, mx.integer):
        fail(op, "hold must be bool or integers", array.dtype)
    return check_flags(op, "hold", array)


def whole_steps(op: str, keep: Any, hold: Any, shape: tuple[int, ...], axes: str) -> dict[str, mx.array]:
    """Check a layer's options `keep` (a factor on the state) and `hold` (steps that leave the state unchanged). Return
    a dict of the options that are not None, broadcast to `shape`: the shape of x without the features. axes: the names
    of these axes in error texts, such as "[T, B]"."""
    if keep is hold is None:
        return {}
    options = {} if hold is None else {"hold": hold_array(op, hold)}
    if keep is not None:
        if not isinstance(keep, mx.array):
            fail(op, f"keep must be an mlx.core.array{instead_of(keep)}", type(keep).__name__)
        check_keep_dtype(op, keep)
        options["keep"] = check_flags(op, "keep", keep)
    for name, value in options.items():
        if not broadcasts(value.shape, shape):
            fail(op, f"{name} must broadcast to {axes} = {list(shape)}", f"shape {list(value.shape)}")
        options[name] = mx.broadcast_to(value, shape)
    return options


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Return whether an array of this shape broadcasts to the shape `to`, which must have the same number of axes."""
    return len(shape) == len(to) and all(size in (1, wanted) for size, wanted in zip(shape, to, strict=True))


class Steps(NamedTuple):
    """The steps of a call with the option `keep` (a factor on the states before each step) or `hold`.

    T, B: the number of time steps and the batch size. backwards: for each direction, whether it runs in reverse.
    batch_first: sequences are [B, T, .]. lengths [B]: the number of steps of each batch item, or None. hold: bool [T,
    B], true at steps that leave the state unchanged, or None.
    """

    T: int
    B: int
    backwards: tuple[bool, ...]
    batch_first: bool
    lengths: mx.array | None
    hold: mx.array | None

    def alive(self) -> Array:
        """Return a bool array [T, B]: whether the batch item has not yet ended. T, B: steps, batch items."""
        times = mx.broadcast_to(mx.arange(self.T)[:, None], (self.T, self.B))
        return times < (self.T if self.lengths is None else self.lengths)

    def live(self) -> Array:
        """Return a bool array [T, B]: whether the step runs, because it is not held and the item has not ended. T, B:
        steps, batch items."""
        # This is not `self.alive() & ~self.hold`, because mx.vmap in MLX 0.32.4 loses the mapped axis of `a & b` if
        # only b is mapped.
        return self.alive() if self.hold is None else mx.where(self.hold, False, self.alive())

    def to_engine(self, arrays: Arrays) -> Arrays:
        """Return the arrays of a call as an engine takes them. `keep` (factors on the states) is broadcast to [T, B,
        D], with D directions. With the option `hold` (steps that leave the state unchanged) the steps that run are
        moved to the front of each sequence, so that the engine skips the held steps. T, B: steps, batch items."""
        inner = dict(arrays)
        if "keep" in arrays:
            inner["keep"] = self.whole_keep(arrays)
        if self.hold is None:
            return inner
        live, (order, ran) = self.live(), self.compact()
        inner["x"] = self.taken(arrays["x"], order, self.batch_first)
        if "inputs" in arrays:  # what a user's cell reads at each step, [T, B, .]
            inner["inputs"] = self.taken(arrays["inputs"], order)
        if "keep" in arrays:
            # The engine does not run held steps, but their factors `keep` still act on the state. So multiply the
            # factor of each running step by the factors of the held steps just before it (which=0). After the last
            # running step, where `ran` is False, the factor is 1.
            inner["keep"] = mx.where(ran, self.taken(self.each_direction(inner["keep"], live, which=0), order), 1)
        if masks_differ(arrays):  # the mask has a time axis
            mask = arrays["mask"]
            inner["mask"] = self.taken(mx.broadcast_to(mask, (self.T, self.B, mask.shape[-1])), order)
        return inner

    def compact(self) -> tuple[Array, Array]:
        """Return (order, ran). order [T, B]: for each item the time indices 0..T-1, the running steps first, then the
        others. ran [T, B, 1]: true where `order` has a running step. T, B: steps, batch items."""
        times, live = mx.arange(self.T)[:, None], self.live()
        # Add T to the time indices of the steps that do not run: so they are sorted after all running steps.
        order = mx.argsort(mx.where(live, times, times + self.T), axis=0)
        return order, (times < live.astype(mx.int32).sum(axis=0))[..., None]  # the sum: how many steps of an item run

    def saved(self, saved: Arrays) -> Arrays:
        """Return the saved outputs of the forward pass as the engine computed them: with `hold` (steps that leave the
        state unchanged) the steps that ran are moved to the front of each sequence, and zeros fill the rest."""
        if self.hold is None:
            return saved
        order, ran = self.compact()
        return {name: mx.where(ran, self.taken(array, order), 0) for name, array in saved.items()}

    def outputs(self, inner: dict[str, Any], arrays: Arrays, wants_last: bool) -> dict[str, Any]:
        """Return the outputs of the call from `inner`, the outputs of the engine (h, c, gates), which with `hold` ran
        only the steps that are not held. arrays: the arguments of the call. wants_last: the caller wants hT and cT."""
        if self.hold is None:
            return inner
        live = self.live()
        ran = mx.cumsum(live.astype(mx.int32), axis=0)  # [T, B]: how many steps have run up to each time index
        # keep [T, B, D]: at each step the product of the factors of the held steps since the last step that ran.
        # which=1 selects this second result of `factors`.
        keep = self.each_direction(self.whole_keep(arrays), live, which=1) if "keep" in arrays else None
        outputs: dict[str, Any] = {}
        for name in ("h", "c"):
            if name not in inner:
                continue
            whole = self.swapped(inner[name])  # [T, B, .]
            parts = []  # the states of each direction at all time indices
            for d, back in enumerate(self.backwards):
                first = arrays.get(f"{name}0")  # h0 or c0
                first = mx.zeros((self.B, whole.shape[-1]), whole.dtype) if first is None else first
                # [None] adds the time axis.
                carried = self.carried(self.part(whole, d), self.part(first, d)[None], live, ran, back)
                parts.append(carried if keep is None else carried * keep[..., d : d + 1])
            if wants_last:
                last = [part[0 if back else -1] for part, back in zip(parts, self.backwards, strict=True)]
                outputs[f"{name}T"] = mx.concatenate(last, axis=-1)
            whole = mx.concatenate(parts, axis=-1)
            # Set the steps after the end of an item to 0. mx.arange: all other steps stay at their time index.
            if self.lengths is not None:
                whole = self.or_zero(whole, mx.arange(self.T)[:, None], self.alive())
            outputs[name] = self.swapped(whole)
        if "gates" in inner:  # [T, B, .]: no call with `batch_first` returns gates
            # The engine's output has the n-th step that ran (n from 1) at index n - 1. Gates of other steps are 0.
            outputs["gates"] = None if inner["gates"] is None else self.or_zero(inner["gates"], ran - 1, live)
        return outputs

    def or_zero(self, sequence: Array, times: Array, selected: Array) -> Array:
        """Return a sequence gathered at the time indices `times` [T, B], and 0 where `selected` [T, B] is false. It
        gathers from an appended row of zeros, because the gradient of mx.where multiplies by 0 and so lets NaN
        through."""
        rows = mx.concatenate([sequence, mx.zeros((1, *sequence.shape[1:]), sequence.dtype)])  # zeros at time index T
        return self.taken(rows, mx.where(selected, times, self.T))

    def carried(self, states: Array, first: Array, live: Array, ran: Array, back: bool) -> Array:
        """Return [T, B, .]: for each time index the latest state of one direction; a held step has the state of the
        step before it. T, B: steps, batch items.

        states: the engine's states [T, B, .]; on the time axis the steps that ran come first. first: the first state.
        live [T, B]: whether a step runs. ran [T, B]: how many steps have run up to each time index. back: whether the
        direction runs in reverse.
        """
        # Forwards: put the first state at index 0. Then the state after n running steps is at index n, and `ran` has
        # this n for each time index.
        if not back:
            return self.taken(mx.concatenate([first, states]), ran)
        # In reverse a held step has the state of the next step in time that runs. `states` contains only steps that
        # ran, sorted by time. So the index of the next running step in `states` is the number of running steps at
        # earlier times, `before`. If no later step runs, the latest state is the first state, appended at index T.
        before = ran - live.astype(mx.int32)
        return self.taken(mx.concatenate([states, first]), mx.where(before == ran[-1], self.T, before))

    def part(self, array: Array, d: int) -> Array:
        """Return direction d's part of an array that has both directions side by side on its last axis."""
        return array if len(self.backwards) == 1 else half(array, d)

    def swapped(self, sequence: Array) -> Array:
        """Return a sequence with its first two axes swapped if `batch_first`: from [B, T, .] to [T, B, .] or back."""
        return mx.swapaxes(sequence, 0, 1) if self.batch_first else sequence

    def whole_keep(self, arrays: Arrays) -> Array:
        """Return `keep` as [T, B, D], with 1 where an item has ended. T, B, D: steps, batch items, directions."""
        keep = arrays["keep"].astype(arrays["x"].dtype)
        keep = keep[..., None] if keep.ndim == 2 else keep
        keep = mx.broadcast_to(self.swapped(keep), (self.T, self.B, len(self.backwards)))
        return keep if self.lengths is None else mx.where(self.alive()[..., None], keep, 1)

    def each_direction(self, keep: Array, live: Array, which: int) -> Array:
        """Return the factors on the states of D directions, [T, B, D]: before each step (which = 0) or after each step
        (which = 1). keep [T, B, D]: the option `keep`. live [T, B]: whether a step runs. A step that does not run still
        multiplies the state by keep; `factors` explains how. T, B: steps, batch items."""
        each = []
        for d, back in enumerate(self.backwards):
            # `factors` takes and returns steps in processing order, so a reversed direction is flipped before and after
            # the call. It returns (the factors before each step, the factors after each step).
            turn = slice(None, None, -1 if back else 1)
            each.append(factors(keep[turn, :, d], live[turn])[which][turn])
        return mx.stack(each, axis=-1)

    def taken(self, sequence: Array, times: Array, batch_first: bool = False) -> Array:
        """Gather the steps of a sequence [T, B, .]. For each batch item `times` [T, B] has the time indices of the
        steps to take. batch_first: the sequence and the result are [B, T, .]. T, B: steps, batch items."""
        # rows: the positions of these steps after the first two axes of the sequence are joined.
        items = mx.arange(self.B)
        rows = times.T + sequence.shape[1] * items[:, None] if batch_first else times * self.B + items
        # Not mx.take_along_axis: MLX has a rule for `jvp` of its gradient, but it copies number by number, not row by
        # row, which takes several times as long.
        return mx.take(sequence.reshape(-1, sequence.shape[-1]), rows, axis=0)


def factors(keep: Array, live: Array) -> tuple[Array, Array]:
    """Return two arrays [T, B]: the factor on the state before each step, and the factor after it. Steps are in
    processing order. keep [T, B]: the user's factor on the state before each step. live [T, B]: False at held steps,
    which leave the state unchanged except for this factor. T, B: steps, batch items.

    An engine skips held steps, so their factors must be applied elsewhere. The factor before a step is the product
    of keep over this step and all held steps just before it. The state after a held step is the state after the last
    step that ran, times the product of keep over the held steps since then: this product is the factor after the held
    step. After a step that ran the factor is 1.
    """
    # This is a parallel scan over time. product [T, B]: at step t the product of keep over the held steps that end at
    # t, back to the step that ran last, but over at most `distance` steps. closed [T, B]: the step that ran last is
    # among these `distance` steps, so the product is complete. At first `distance` is 1, step t alone. Each round
    # doubles it.
    product, closed, distance = mx.where(live, 1, keep), live, 1
    while distance < len(keep):
        product = mx.where(closed, product, product * shifted(product, distance))
        closed = closed | shifted(closed, distance)
        distance *= 2
    # The factor before step t is keep[t] * product[t - 1]; at the first step the product before it is 1. The factor
    # after step t is product[t].
    return keep * shifted(product, steps=1), product


def shifted(array: Array, steps: int) -> Array:
    """Return the array [T, B] moved to later time steps: step t has the value of step t - `steps`. The first steps get
    1 (true). T, B: steps, batch items."""
    return mx.concatenate([mx.ones((steps, array.shape[1]), array.dtype), array[:-steps]])
