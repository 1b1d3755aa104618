"""Find the trial for a call: the smallest problem that runs the same Metal kernels, so that they can be tested
quickly.

A `Problem` describes a call without its arrays: T steps, B batch items, H units, P the width of h, the cell, options.
Three things must be as in the call, because they decide which kernel runs: the tiles of the products, the width of
indices, and whether an array has fewer than SMALL elements. Numbers that kernels read at run time, such as the limit of
a clip, do not matter. So a trial replaces them by fixed numbers.
"""

import json
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..engines import cells
from ..engines.cell_graph import from_json
from ..engines.cells import AnyCell, LSTMCell, PointwiseCell
from ..engines.metal import fused
from ..engines.metal.fused import index_of
from ..engines.metal.stepwise import forward_tile, index_bits, stepwise_rows, tile_of
from ..engines.packing import Packing, is_packed
from ..engines.problem import Chunks, Cut, Limits, Problem
from ..oracle.arithmetic import ACTIVATIONS, Rounding

STEPS = 3
JOINING_STEPS, JOINING_LEFT = 10, 9
"""The number of steps of a trial: STEPS, or JOINING_STEPS for kernels that join the output arrays of several steps into
one array. In such a trial JOINING_LEFT is the limit on separate arrays, so that one launch joins as many arrays as it
can."""

SMALL = 8
"""Metal binds arrays with fewer elements than this in another address space, which makes a different kernel."""

BATCHES = (1, 3, 9, 17, 31, 33, 65, 128, 256, 512, 1024)
"""Batch sizes of trials: one from every range of batch sizes that use the same kernels of `stepwise`, mostly near the
lower end of the range."""

USUAL = ("h",)
"""The outputs that have a cotangent in most losses. The trial of a training call computes the gradients of such a
loss."""

STEER = 0.6
"""The absolute value of the preactivations in trials of clips that stop gradients, before small random terms are added.
"""

EPS = 1e-3
"""The number that is added to each variance in trials of layer normalisation."""

LIMIT_OF_H = 0.296875
"""The limit of a projected h in trials of clips that stop gradients; a multiple of 1/128."""

CELLS = {"lstm": cells.LSTMCell, "gru": cells.GRUCell, "rnn": cells.RNNCell}


class Trial(NamedTuple):
    """A test run of an engine's kernels: the engine and a small problem (sizes and options) that runs the same
    kernels as a user's call. An engine runs other kernels for sizes above certain limits (`Limits`). If the call is
    above such a limit, the small problem has a lower limit, so that its size is above the limit, too."""

    engine: str
    problem: Problem

    def text(self) -> str:
        """Return the trial as one line of JSON, as the child process reads it."""
        problem = self.problem
        cell = problem.cell
        # A built-in cell is a tuple of its options. A user's cell is written as its graph of operations.
        options = [cell.graph.to_json(), cell.recurrent, cell.norm] if isinstance(cell, PointwiseCell) else cell
        fields = problem._asdict() | {"dtype": dtype_word(problem), "cell": [cell.op, *options]}
        return json.dumps({"engine": self.engine, "problem": fields})


def trial_from(text: str) -> Trial:
    """Return the trial that a line of JSON describes; the inverse of `Trial.text`."""
    content = json.loads(text)
    fields = content["problem"]
    op, *options = fields["cell"]
    if op == "pointwise":
        fields["cell"] = PointwiseCell(from_json(options[0]), *options[1:])
    else:
        fields["cell"] = CELLS[op](*(tuple(option) if isinstance(option, list) else option for option in options))
    if fields["cell"].norm is not None:
        fields["cell"] = fields["cell"]._replace(norm=cells.NormOptions(*fields["cell"].norm))
    fields["dtype"] = getattr(mx, fields["dtype"])
    makers: dict[str, Any] = {"names": tuple, "cotangents": tuple, "limits": Limits._make, "cut": Cut._make}
    makers |= {"chunks": Chunks._make, "packing": Packing._make}
    fields |= {name: make(fields[name]) for name, make in makers.items() if fields[name] is not None}
    return Trial(content["engine"], Problem(**fields))


def dtype_word(problem: Problem) -> str:
    """Return the name of the problem's dtype, such as "float32"."""
    return str(problem.dtype).removeprefix("mlx.core.")


def trial_of(engine: str, problem: Problem) -> Trial:
    """Return the smallest trial that runs the same kernels as this engine for this problem. Where the call is above one
    of the limits from which on an engine runs other kernels, the trial's limit is so low that its small size is above
    it, too. The limits are: index, the elements of an array above which indices have 64 bits; launch_steps, the most
    steps in one launch of `fused`; rows_left, the most arrays of steps that `stepwise` leaves separate; cores, the
    number of GPU cores, 0 for this machine's. A `Cut` sets how many batch items (rows) a threadgroup of `fused`
    computes, and how many registers stay free (spare)."""
    if problem.chunks is not None:
        # The call runs in chunks of the sequence, so the trial runs two small chunks. one: the smallest problem that
        # tests a single chunk. If the gradient recomputes the chunks, a sequence of any length is divided into chunks.
        # Otherwise only a sequence longer than the limit `unchunked` is divided; the trial's is short, so its limit is
        # 0.
        one = trial_of(engine, problem._replace(T=problem.chunks.steps, chunks=None)).problem
        limits = one.limits if problem.chunks.recomputes else one.limits._replace(unchunked=0)
        return Trial(engine, one._replace(T=2 * one.T, chunks=problem.chunks._replace(steps=one.T), limits=limits))
    # keep_size: the number of elements of the array `keep` in the call; if it is below SMALL, the trial's must be, too.
    # joins: launches join the arrays of several steps.
    joins, limits, keep_size = False, problem.limits, problem.T * problem.B * problem.directions
    if engine == "fused" and fused.runs_apart(problem):  # each direction runs in separate launches: test one direction
        problem, keep_size = problem._replace(bidirectional=False), problem.T * problem.B
    if engine == "fused":
        wide = index_of(problem) == mx.uint64
        if len(fused.division(problem, problem.masks_differ)) > 1:  # the call has several launches, so the trial, too
            limits = limits._replace(launch_steps=2)
        rows = rows_of(problem)
        # B: more than `rows`, so that there are several threadgroups. `rows` depends on the number of GPU cores; the
        # cut stores it, so the trial needs no number of cores.
        B, H, P = next((B for B in batches(problem) if rows < B), problem.B), problem.H, problem.P
        cut = Cut(rows, problem.cut.spare if problem.cut else 0)
        problem, limits = problem._replace(cut=cut), limits._replace(cores=0)
        if isinstance(problem.cell, PointwiseCell):
            # The float64 reference computes only one direction of such a cell. The kernels are the same, because they
            # read the number of directions at run time.
            problem = problem._replace(bidirectional=False, reverse=False)
    else:
        # left: how many steps may have separate arrays. With a projection each step has two arrays, so it is half.
        wide, left = index_bits(problem) == 64, limits.rows_left // 2 if "Wp" in problem.names else limits.rows_left
        if joins := left < problem.T:
            limits = limits._replace(rows_left=JOINING_LEFT)
        B, H, P, cores = smallest_stepwise(problem)
        limits = limits._replace(cores=cores)
        problem = in_one_direction(problem)
    if wide:
        limits = limits._replace(index=0)
    small = problem.B * min(problem.H, problem.P) < SMALL  # an array of one step has fewer than SMALL elements
    T = JOINING_STEPS if joins else min(problem.T, SMALL) if small else STEPS
    if "keep" in problem.names:
        T = as_small(keep_size, B * problem.directions, T)
    cell, names = without_numbers(problem.cell), tuple(sorted(problem.names))
    return Trial(engine, problem._replace(T=T, B=B, H=H, P=P, cell=cell, names=names, limits=limits))


def without_matrices(engine: str, problem: Problem) -> Problem | None:
    """Return the problem changed such that this engine's kernels multiply no 8 x 8 matrices, which some virtual GPUs
    cannot do; None if they multiply none. A threadgroup multiplies them if it computes 8 batch items (rows) or more.
    `stepwise` has two tiles: one for the gates of a step (`forward_tile`), one for all other products (`tile_of`)."""
    if engine == "stepwise":
        found = max(forward_tile(problem)[0], tile_of(problem, problem.H)[0]) >= 8  # [0]: the rows of a tile
    else:
        # as_read: the problem as the kernels get it, without a packing if they get dequantized weights.
        as_read = fused.readable(problem, problem.names)
        found = fused.tiling_of("forward", as_read).matrices
    spare = problem.cut.spare if problem.cut else 0  # registers that stay free
    # 4: the largest number of rows of a threadgroup that multiplies no 8 x 8 matrices.
    return problem._replace(cut=Cut(rows=4, spare=spare)) if found else None


def following(engine: str, problem: Problem) -> list[Trial]:
    """Return trials for the calls that will probably follow a call of this problem. After a training call this is an
    evaluation; after a single step without first states it is a single step with them. These trials share kernels with
    the trial of the call itself, so testing all in one request takes less time."""
    if problem.cotangents is not None:
        return []
    if problem.training and not problem.plain:
        # Chunks that the gradient recomputes exist for training only, so evaluation has none.
        chunks = problem.chunks if problem.chunks and not problem.chunks.recomputes else None
        return [trial_of(engine, problem._replace(training=False, plain=True, chunks=chunks))]
    states = {"h0", "c0"} if problem.cell.op == "lstm" else {"h0"}
    if problem.T == 1 and not states <= {*problem.names}:
        return [trial_of(engine, problem._replace(names=(*problem.names, *sorted(states - {*problem.names}))))]
    return []


def as_small(size: int, each: int, steps: int) -> int:
    """Return the number of steps, `steps` if possible, with which an array is small (has fewer than SMALL elements) in
    the trial exactly if it is in the call, because Metal runs another kernel for small arrays. size: the array's
    elements in the call. each: its elements per step in the trial."""
    if (size < SMALL) == (steps * each < SMALL):
        return steps
    return max(1, (SMALL - 1) // each) if size < SMALL else SMALL


def without_numbers(cell: AnyCell) -> AnyCell:
    """Return the cell with fixed values for the limits of its clips, the forget bias and eps of a layer normalisation.
    Kernels read them at run time, so the values do not change the kernel."""
    if cell.norm is not None:
        cell = cell._replace(norm=cell.norm._replace(eps=EPS))
    if not isinstance(cell, LSTMCell):
        return cell
    clip, of_h, bias = 0.5, 0.5, -0.25  # any numbers do, as no gradient jumps at these limits
    if cell.clip_gradient == "zero":
        # No number may come near a limit, where the gradient jumps. `_draw` draws preactivations of about STEER, and a
        # c0 of about 0. So without a clip c is i g after the first step, and i g (1 + f) after the second step. The
        # limit is between these two numbers: their geometric mean i g sqrt(1 + f), rounded to a multiple of 1/128,
        # which 16-bit dtypes represent exactly. A positive forget bias makes f larger, so the two are further apart.
        bias = 0.25
        arguments = {"i": STEER, "f": STEER + (bias if cell.forget_bias else 0.0), "g": STEER}
        fl = Rounding(np.float64)
        i, f, g = (float(ACTIVATIONS[cell.activation(k)](np.array(a), fl)) for k, a in arguments.items())
        clip, of_h = round(128 * i * g * (1 + f) ** 0.5) / 128, LIMIT_OF_H
    return cell._replace(
        cell_clip=None if cell.cell_clip is None else clip,
        projection_clip=None if cell.projection_clip is None else of_h,
        forget_bias=bias if cell.forget_bias else 0.0,
    )


def rows_of(problem: Problem) -> int:
    """Return how many batch items a threadgroup of `fused` computes for this problem. The number depends on the batch
    size and on the number of GPU cores. A trial, the test of kernels before their first use, sets this number directly,
    so that its own batch can be small."""
    if problem.cut:
        return problem.cut.rows
    packing = fused.readable(problem, problem.names).packing  # None if kernels get float weights
    return fused.rows_for(fused.layer_size(problem)._replace(packing=packing))


def smallest_stepwise(problem: Problem) -> tuple[int, int, int, int]:
    """Return (B, H, P, cores) for the test run of the stepwise kernels: the smallest sizes, and a number of GPU cores,
    with which the matrix products use the same tiles as in the call."""

    def tiles(some: Problem, H: int, P: int) -> list[tuple[int, int]]:
        """Return the tiles of all products, (rows, columns) that one threadgroup computes. some: the problem with the
        batch size B that is tried. With layer normalisation the gates of all units are one product."""
        widths = [H, P] if some.cell.norm is None else [H, P, some.cell.gates * H]
        return [tile_of(some, width) for width in widths]

    wanted = tiles(problem, problem.H, problem.P)
    problem = in_one_direction(problem)

    def smallest_width(width: int, weight: str) -> int:
        """Return the width (H or P) of the trial: the smallest one that leaves the same remainder modulo 32 as
        `width`, so that the kernels handle their edges in the same way. If the weight is quantized, the width is a
        whole number of groups."""
        group = problem.packing.group_size if problem.packing and is_packed(weight, problem.names) else 1
        # Metal binds an array of few elements in another address space, so fewer than SMALL units would test other code
        # than that of the call.
        least = width % 32 + (32 if width % 32 < SMALL else 0)
        if group > 1 and stepwise_rows(problem.B, problem.cut) < 8:
            # If a threadgroup computes fewer than 8 batch items, a loop in the kernel reads 128 or 256 quantized
            # weights of a row in each iteration. If the call's rows need several iterations, the trial's rows must,
            # too, so that the same code is tested.
            least += 256 if width > 256 else 128 if width > 128 else 0
        return next((w for w in range(least, width, 32) if w % group == 0), width)

    H = smallest_width(problem.H, "Wp" if "Wp" in problem.names else "Wh")  # the weight whose rows are H long
    P = smallest_width(problem.P, "Wh")
    # A product uses the largest tile with which all GPU cores have work. So with fewer cores a small batch uses the
    # tile of a large one. For each B try the call's number of cores, then 1 to 2 B - 1. stepwise_rows: the number of
    # batch items that a threadgroup computes.
    for B in batches(problem):
        for cores in (problem.limits.cores, *range(1, 2 * B)):
            small = problem._replace(B=B, limits=problem.limits._replace(cores=cores))
            same = stepwise_rows(B, problem.cut) == stepwise_rows(problem.B, problem.cut)
            if same and tiles(small, H, P) == wanted:
                return B, H, P, cores
    return problem.B, problem.H, problem.P, problem.limits.cores


def in_one_direction(problem: Problem) -> Problem:
    """If the problem runs both directions of a cell written by the user, return it with one direction. Return any other
    problem unchanged. The oracle computes only one direction of such a cell, and the kernels of `stepwise` are the
    same, as they read the number of directions at run time. A small H is doubled: the arrays are then as wide as those
    of both directions, and Metal binds them in the same address space."""
    if not problem.bidirectional or not isinstance(problem.cell, PointwiseCell):
        return problem
    H = 2 * problem.H if problem.H < SMALL else problem.H
    return problem._replace(bidirectional=False, H=H, P=H)


def batches(problem: Problem) -> list[int]:
    """Return the batch sizes that a trial may use. If the call may have arrays of fewer than SMALL elements, the trial
    must use the call's batch size, so that its arrays are just as small and the same kernels run."""
    if problem.B < SMALL and min(problem.H, problem.P) < SMALL:
        return [problem.B]
    return [B for B in BATCHES if "lengths" not in problem.names or (B < SMALL) == (problem.B < SMALL)]
