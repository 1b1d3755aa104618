"""Engine `numpy`: run the recurrence on the CPU with NumPy's BLAS, writing directly into the memory of MLX arrays.

The steps compute the equations of `engines.definitions` and write into preallocated buffers. Within a step every array
is feature-major, [GH, B] or [H, B], for two reasons: the large matrix is then the left factor of the recurrent product,
which runs up to twice as fast in BLAS; and every gate is one contiguous block. So gates and c are allocated as [T, D G
H, B] and [T, D H, B], and callers get transposed views of them; h has the memory order of x. Each direction writes its
own part of an array that both directions share. Only float32 and float64 are supported: the caller casts.

T: steps, B: batch items, G: gates, H: hidden units, P: the width of h, D: directions, I: input features. v: NumPy views
of the arrays of the call by name, such as x, Wx, Wh; dv: views of the cotangents (the gradients that the caller gives
for outputs); out: the memory of the results. norms: what the forward pass saves of layer normalisations for the
backward pass. `cell.carried`, `cell.kept`: how many blocks of H numbers c and gates have; `cell.reads_kept`: whether
the backward pass reads gates. A segment is a range of steps with the batch items that have not ended before it
(`ragged`); parts: the list of segments, empty if the call is not divided.
"""

from math import prod

import mlx.core as mx
import numpy as np

from ..cells import AnyCell
from ..directions import by_direction
from ..packing import is_packed
from ..problem import Arrays, Problem, address_of
from .norms import centre_gradients, saved_rows
from .passes import BackwardSweep, sweep_forward
from .products import BATCH_MAJOR, FEATURE_MAJOR, TIME_MAJOR, Array, Order, Views, WeightGradients, factored_names
from .ragged import backward_in_segments, forward_in_segments, segments
from .threads import ALL_THREADS, one_thread
from .weights import with_float_weights

SMALL_WEIGHTS = 2**18
"""The largest number of elements of Wx and Wh together for which a call runs on one thread. So many elements take 1 MiB
in float32, which fits into the cache of one core. Several cores read larger weights faster."""

SMALL_PRODUCT = 2**23
"""The largest number of multiplications in the products of one time step for which a call runs on one thread. On two
cores of an AMD EPYC a second thread made a call with half of this number no faster, and a call with twice this number
1.4 times as fast."""

ALONE = 2**18
"""The largest number of multiplications in a product that OpenBLAS always computes on the calling thread."""

LARGE_SIZE = 2**13
"""The smallest number of elements of a new array that MLX allocates. NumPy allocates smaller arrays, which are then
copied to MLX: waiting for an array that MLX allocates takes 20 to 40 us, as long as a small step, and the copy takes
less."""

Saved = dict[str, mx.array | Array | list[Array] | None]
"""The type of the results of `forward` by name. `gates` that only the backward pass reads are a NumPy array [T, B, D G
H], or a list with an array for each segment (some steps of some batch items, see `ragged`). The same holds for `norms`,
what layer normalisation saves for the backward pass."""

HIDDEN = ("gates", "norms")
"""The results of `forward` that may be for the backward pass only. They are then NumPy arrays, or lists of these."""


def forward(problem: Problem, arrays: Arrays, batch_first: bool = False) -> Saved:
    """Run the forward pass. Return the cell's outputs by name: h [T, B, D P], gates [T, B, D G H], hT [B, D P]; for an
    LSTM also c [T, B, D H] and cT [B, D H]. hT and cT are missing if `problem.wants_last` is false.

    batch_first: x, h, c and gates are [B, T, .] instead. For a single step, x [B, I], the only outputs are hT and cT.

    If the caller does not request the gates, `gates` is for the backward pass only: in training a NumPy array or a list
    of arrays (see `Saved`), otherwise None. It is also None for a plain RNN, whose backward pass reads no gates. In
    training with layer normalisation of the recurrent product h Wh^T, or of its sum with the input's part, there is
    also the result `norms`, which the backward pass reads.
    """
    packing = problem.packing
    v = views(arrays if packing is None else with_float_weights(packing, arrays))
    single = v["x"].ndim == 2
    if single:  # one step without an axis of time
        v["x"] = v["x"][None]
    elif batch_first:
        v["x"] = v["x"].transpose(BATCH_MAJOR)
    dtype, (T, B, H, P), D, cell = v["x"].dtype, problem[:4], problem.directions, problem.cell
    widths = {"h": D * P, "c": D * cell.carried * H} if cell.carried else {"h": D * P}
    last = {f"{name}T": NewArray(dtype, (B, width)) for name, width in widths.items()} if problem.wants_last else {}
    sequences: dict[str, NewArray] = {}
    if not single:
        sequences["h"] = NewSequence(dtype, (T, B, D * P), order_of(v["x"]), batch_first)
        if "c" in widths:
            sequences["c"] = NewSequence(dtype, (T, B, widths["c"]), FEATURE_MAJOR, batch_first)
    # parts: the segments into which a call with lengths is divided, if that saves time. rows: {array that only the
    # backward pass reads: how many numbers it has per step and batch item}.
    parts, rows = segments(problem, v) if "lengths" in v else [], dict[str, int]()
    if problem.return_gates:
        sequences["gates"] = NewSequence(dtype, (T, B, D * cell.kept * H), FEATURE_MAJOR, batch_first)
    elif problem.training and cell.reads_kept:
        rows["gates"] = D * cell.kept * H
    if problem.training and cell.norm is not None and cell.norm.of is not None:
        rows["norms"] = D * saved_rows(problem, v)
    # hidden: a dict of the arrays that only the backward pass reads, for each segment (a range of steps with the items
    # that run in it; without lengths one for the whole call). NumPy allocates them, because MLX would write zeros to
    # their memory first.
    sizes = [segment.sizes(B) for segment in parts] or [(T, B)]
    hidden = [
        {name: np.empty((steps, n, items), dtype).transpose(FEATURE_MAJOR) for name, n in rows.items()}
        for steps, items in sizes
    ]
    out = {name: array.memory for name, array in sequences.items()} | ({} if parts else hidden[0])
    if single:  # h and c have one step and share the memory of hT and cT
        out |= {name: last[f"{name}T"].memory[None] for name in widths}
    else:
        out |= {name: array.memory for name, array in last.items()}
    # Turn off NumPy's warnings, also those that the user asked for by np.seterr: infinity and NaN in padding, overflow
    # of exp in a sigmoid that is 0, and underflow are no errors, as in MLX. The directions run one after the other,
    # because BLAS uses threads itself. Whether a thread per direction would be faster was not measured; the threads
    # would have to wait for each other where both add to the gradients of x and of a shared mask.
    with np.errstate(all="ignore"), one_thread() if are_small(problem, v) else ALL_THREADS:
        for _, one, (own, own_out, *own_hidden) in by_direction(problem, v, out, *hidden):
            if parts:
                forward_in_segments(one, parts, own, own_out, own_hidden)
            else:
                sweep_forward(one, own, own_out)
    saved = {name: [own[name] for own in hidden] if parts else hidden[0][name] for name in rows}
    # The result `gates` is None unless `saved` or `sequences` has it.
    return {"gates": None} | saved | {name: array.to_mlx() for name, array in (sequences | last).items()}


def backward(
    problem: Problem,
    arrays: Arrays,
    saved: Saved,
    cotangents: Arrays,
    as_factors: bool = False,
    left_out: tuple[str, ...] = (),
) -> Arrays:
    """Return the gradients of all arrays except quantized weights and those that are left out.

    saved: what `forward` returned. cotangents: the cotangents of some outputs. as_factors: return some weight
    gradients as two factors, which `multiplied` then multiplies. left_out: the names of gradients that nobody needs,
    () or ("x",).
    """
    # Run the forward pass again if it did not save what this pass reads, as without training.
    if any(saved.get(name) is None for name in reads(problem.cell)):
        saved = forward(problem._replace(training=True), arrays)
    packing = problem.packing
    v, dv = views(arrays if packing is None else with_float_weights(packing, arrays)), views(cotangents)
    parts = segments(problem, v) if "lengths" in v else []
    # outputs: views of the saved arrays of the whole call. by_segment: the results that were saved as lists.
    arrays_saved = {name: a for name, a in saved.items() if isinstance(a, mx.array | np.ndarray)}
    outputs = {name: view(array) for name, array in arrays_saved.items() if name in ("h", "c", *HIDDEN)}
    by_segment = {name: a for name in HIDDEN if isinstance(a := saved.get(name), list)}
    # hidden: for each segment (a range of steps with the items that run in it) a dict of its saved arrays.
    hidden = [{name: a[n] for name, a in by_segment.items()} for n in range(len(parts))]
    # wanted: the names of all gradients except x. factored: those that are returned as two factors. new: the memory of
    # all others.
    wanted = [name for name in v if name not in ("x", "lengths") and not (packing and is_packed(name, arrays))]
    factored = [name for name in factored_names(problem, v) if name in wanted] if as_factors and not parts else []
    new = {name: NewArray(v[name].dtype, v[name].shape) for name in wanted if name not in factored}
    if "x" not in left_out:
        new["x"] = NewSequence(v["x"].dtype, v["x"].shape, order_of(v["x"]))
    # The new memory contains zeros, which three gradients need: each step adds its term to the gradient of the mask,
    # and the gradients of `keep` and `inputs` are written only at steps that run.
    out = {name: array.memory for name, array in new.items()}
    projects = "Wx" in v  # whether the call has a Wx; `out` may lack it, because a quantized Wx has no gradient
    written: set[int] = set()  # the first steps of the chunks of dx that one direction has written already
    factors: Arrays = {}
    every = by_direction(problem, v, outputs, dv, out, *hidden, projects=projects)
    with np.errstate(all="ignore"), one_thread() if are_small(problem, v) else ALL_THREADS:
        for _, one, (own, own_saved, own_dv, own_out, *own_hidden) in every:
            products = WeightGradients(own_out, written, factored)
            if parts:
                backward_in_segments(one, parts, products, own, own_saved, own_hidden, own_dv)
            else:
                BackwardSweep(one, products, own, own_saved, own_dv).run()
            if problem.cell.norm is not None:  # the steps may have left out a part of the norm's gradient
                centre_gradients(one, own_out)
            factors |= in_mlx(arrays, products.factors)
    return factors | {name: array.to_mlx() for name, array in new.items()}


def reads(cell: AnyCell) -> list[str]:
    """Return the names of the results in `HIDDEN` that the backward pass of a cell reads."""
    normalises = cell.norm is not None and cell.norm.of is not None
    return ["gates"] * cell.reads_kept + ["norms"] * normalises


def in_mlx(arrays: Arrays, factors: dict[str, dict[int, tuple[Array, Array]]]) -> Arrays:
    """Return the factors of weight gradients as MLX arrays, which are multiplied later. arrays: the arrays of the call.
    factors: NumPy arrays from `WeightGradients.factors`: {name: {first row of a block: (left, right)}}. The results are
    named "Wh 0" (left factor), "Wh 1" (right factor), "Wh 2" (the left factor of the next block) and so on.

    A factor that occurs twice is copied only once. A right factor that is x or h0 itself is not copied: the result is
    the caller's array.
    """
    callers = [arrays[name] for name in ("x", "h0") if name in arrays] if factors else []
    known = {place_of(view(array)): array for array in callers}  # {key of its memory: MLX array}
    results = {}
    for name, blocks in factors.items():
        # n: the number in the name of the result. It counts left and right factors of all blocks.
        for n, factor in enumerate([factor for row in sorted(blocks) for factor in blocks[row]]):
            place = place_of(factor)
            if place not in known:
                known[place] = mx.array(factor, arrays["x"].dtype)
            results[f"{name} {n}"] = known[place].reshape(factor.shape)
    return results


def place_of(array: Array) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return a key of an array's memory: the address of its first element, and the size and stride of each axis but
    those of size 1. Two arrays with the same key have the same elements, such as x [1, B, I] and its only step [B,
    I]."""
    axes = [axis for axis in zip(array.shape, array.strides, strict=True) if axis[0] > 1]
    return address_of(array), tuple(axes)


def multiplied(gradients: Arrays) -> Arrays:
    """Return the gradients, with each pair of factors from `backward`, such as "Wh 0" and "Wh 1", replaced by a lazy
    MLX product: a left factor [n, rows] and a right factor [n, columns], with n = batch items, whose product left^T
    right is one block of rows of the gradient.

    The products are lazy to save memory: a program that calls a layer at every time step sums the gradients of all
    calls. MLX computes lazy products one by one while it sums them; products that were computed immediately would all
    be in memory at once.
    """
    blocks: dict[str, list[mx.array]] = {}
    factors = iter([name for name in gradients if " " in name])
    for left, right in zip(factors, factors, strict=True):  # the same iterator twice, so each turn takes two names
        blocks.setdefault(left.partition(" ")[0], []).append(gradients[left].T @ gradients[right])
    products = {name: each[0] if len(each) == 1 else mx.concatenate(each) for name, each in blocks.items()}
    return products | {name: gradient for name, gradient in gradients.items() if " " not in name}


def view(array: mx.array | Array) -> Array:
    """Return a NumPy view of the memory of an evaluated MLX array."""
    return np.array(array, copy=False)


def views(arrays: Arrays) -> Views:
    """Evaluate all arrays. Return NumPy views of their memory."""
    mx.eval(list(arrays.values()))
    return {name: np.array(array, copy=False) for name, array in arrays.items()}


class NewArray:
    """A new MLX array that NumPy fills: NumPy writes to `memory`, which contains zeros at first; then `to_mlx` returns
    the array."""

    def __init__(self, dtype: np.dtype, shape: tuple[int, ...]):
        self.dtype: mx.Dtype = mx.float64 if dtype == np.float64 else mx.float32
        # array: the MLX array, of which `memory` is a view. It is None for a small array, which NumPy allocates
        # (LARGE_SIZE).
        self.array: mx.array | None = mx.zeros(shape, self.dtype) if prod(shape) >= LARGE_SIZE else None
        self.memory: Array = np.zeros(shape, dtype) if self.array is None else view(self.array)

    def to_mlx(self) -> mx.array:
        """Return the MLX array with the contents of `memory`."""
        return mx.array(self.memory, self.dtype) if self.array is None else self.array


class NewSequence(NewArray):
    """A new sequence that NumPy fills. `memory` is a NumPy view [T, B, .]. The MLX array is [T, B, .], or [B, T, .]
    with `batch_first`.

    order: the order of the axes in memory, TIME_MAJOR, BATCH_MAJOR or FEATURE_MAJOR.
    """

    def __init__(self, dtype: np.dtype, shape: tuple[int, int, int], order: Order, batch_first: bool = False):
        T, B, _ = shape
        # returned: the order of the axes that the MLX array will have for the caller.
        self.returned: Order = BATCH_MAJOR if batch_first else TIME_MAJOR
        # order: the order of the axes in memory. With B = 1 all three orders are the same layout in memory, and with T
        # = 1 TIME_MAJOR and BATCH_MAJOR are. In these cases take the order `returned`, so that `to_mlx` need not
        # transpose.
        self.order: Order = self.returned if B == 1 or (T == 1 and order != FEATURE_MAJOR) else order
        super().__init__(dtype, (shape[self.order[0]], shape[self.order[1]], shape[self.order[2]]))
        self.as_allocated: Array = self.memory
        self.memory = self.memory.transpose(self.order)  # each of the three orders is its own inverse permutation

    def to_mlx(self) -> mx.array:
        """Return the sequence that NumPy has written as an MLX array: [B, T, .] if this object was made with
        `batch_first`, else [T, B, .]."""
        # None: NumPy allocated the memory; copy it here.
        array = mx.array(self.as_allocated, self.dtype) if self.array is None else self.array
        if self.order == self.returned:
            return array
        # Transpose: find each axis of the result among the axes of `array`, which are in the order `order`.
        first, second, third = self.returned
        return mx.transpose(array, [self.order.index(first), self.order.index(second), self.order.index(third)])


def order_of(sequence: Array) -> Order:
    """Return the memory order of a sequence [T, B, .]: BATCH_MAJOR or TIME_MAJOR. The results for a caller with
    batch-major arrays are written batch-major, too, so that the caller gets contiguous arrays."""
    return BATCH_MAJOR if sequence.strides[0] < sequence.strides[1] else TIME_MAJOR


def are_small(problem: Problem, v: Views) -> bool:
    """Return whether the products of a call are so small that one thread computes them as fast as
    several. Return False if they are so small that OpenBLAS uses one thread in any case."""
    # weights: the elements of the weights of one direction. step: the multiplications in one time step.
    weights = sum([v[name].size for name in ("Wx", "Wh") if name in v]) // problem.directions
    step = weights * problem.B
    return weights <= SMALL_WEIGHTS and step <= SMALL_PRODUCT and step * problem.T > ALONE
