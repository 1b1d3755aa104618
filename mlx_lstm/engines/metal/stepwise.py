"""Engine `stepwise`: run the recurrence on the GPU, with one launch of a Metal shader per time step.

One launch computes the recurrent product and the cell of a step, for both directions if both run. Some calls need more
launches per step: one for a projection; one for a norm; one for a GRU whose reset comes before the candidate's product.
A launch of MLX cannot write to an existing array. So each launch writes a new one, a row, and the next launch reads it.
One more launch at the end of a pass copies all rows into sequences in the order of time. Dtypes, laziness and quantized
weights are as in the module `fused`. Words and names:

- kernel, launch: compiled Metal code; one run of it
- row: first float32 numbers (c, or gradients in the backward pass), then blocks of H numbers in the dtype of the call.
  Its elements have the dtype `row_type`: float32, or in a call of 16 bits uint16, of which a float32 number takes two.
  An array that is not collected and has no float32 numbers may have the dtype of the call instead
- `rows`: a `Rows`, which collects the rows of a pass. Some launches also join several earlier rows into one array
- `inputs`: the arrays that kernels read, by name; None means absent. `present`: the names of those that are there
- `step`, `dh`, ...: what `each_step` returns. `step(n, row)` launches step n, reads `row` and returns the new row
- `before`, `after`: the input of a kernel with the row of the launch before; its output, the new row. `h_before`: with
  a projection, the row with h of the step before
- `sizes`: an input with the sizes of a launch. `weights`: the matrix of a backward product
- `layout`: for each kind of rows the number of rows in each array, the elements of a row, and H or P
- saved, cotangents: the outputs of the forward pass; the gradients that the caller gives for some of them
- carry: the gradient of a state before a step, without the part through the recurrent product
- z: the input's part of the preactivations. q: a GRU's candidate's recurrent product. m: in a projection h = m Wp^T
- tile: the rows (batch items) and columns (one per unit and gate) of a product that one threadgroup computes
- lane: one of the 32 threads of a simdgroup, which run together

T steps, B items, D directions, H units, P the width of h, K the terms of each sum of a product, G gates. All functions
`..._kernel` have the parameters that `each_step` passes: problem, dtype of the arrays, `present`, and has_rows: whether
the rows of these launches are collected. Only `dh_kernel` reads has_rows; for others it is _has_rows.
"""

from collections.abc import Callable, Collection
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from ..cells import AnyCell, PointwiseCell, norm_blocks
from ..directions import half, part
from ..ops.packed import scales_of
from ..ops.sweep import gradients_after_sweep, through_projection_clip
from ..packing import is_packed
from ..problem import Arrays, Cut, Problem
from . import norms
from .kernel import (
    STRUCTS,
    Inputs,
    Launch,
    Outputs,
    Source,
    Template,
    cached,
    cell_number,
    constant,
    contiguous,
    fields_of,
    number_of_norm,
    numbers_of,
    prepare,
    struct_of,
    whole_mask,
)
from .pointwise import gradients_after as own_gradients
from .pointwise import name_of, norm_text, struct_text
from .products import candidates, gradients_in_few_launches, is_plain, project, recurrent_input, takes_product
from .rows import LEFT, Join, Rows, joined_beside, starts_of

# --- The forward and the backward pass ---


def forward(problem: Problem, arrays: Arrays) -> dict[str, Any]:
    """Run the forward pass. Return h [T, B, D P] and hT [B, D P]; with C > 0 states besides h also c [T, B, D C H]
    and cT [B, D C H], both in float32. In training, or if the caller asks for them, also return gates [T, B, D N H]:
    the N numbers per unit that the backward pass reads, mostly the gates.

    If only the backward pass will read the gates (`keeps_rows`), they are not copied into a sequence. Then the result
    `ROWS` replaces them: a list of the arrays that contain the rows of the pass, and in them the gates.
    """
    T, H, P, cell, Wp = problem.T, problem.H, problem.P, problem.cell, arrays.get("Wp")
    mask, z = whole_mask(problem, arrays) if cell.recurrent else None, project(problem, arrays)
    # row: stands for the row of a step before the first one. before, reset_row: here only to say that the kernels have
    # these inputs. Each launch gets its own.
    row = no_row(row_type(z.dtype))
    inputs = options(problem, arrays, ("Wh", "Wp", "peephole", "bhn", "inputs", "params"))
    inputs |= {"z": z, "mask": mask, "sizes": sizes(problem, mask, width=H, terms=P), "before": row, "reset_row": row}
    inputs["numbers"] = numbers_of(cell)
    if problem.packing is not None:
        inputs |= quantized_parts(arrays, z.dtype)
    rows, projected = rows_of(problem, Wp is not None)
    if cell.norm is not None:
        normed_steps(problem, arrays, inputs, row, rows, projected)
    elif resets_before(problem):
        reset = each_step(gru_reset_kernel, problem, inputs)
        candidate = each_step(gru_candidate_kernel, problem, inputs, rows)
        for n in range(T):
            row = candidate(n, row, reset(n, row))
    elif Wp is None:
        step = each_step(forward_kernel, problem, inputs, rows)
        for n in range(T):
            row = step(n, row)
    else:
        step, h = each_step(forward_kernel, problem, inputs | {"h_before": row}, rows), row
        project_row = each_step(
            project_kernel, problem, inputs | {"sizes": sizes(problem, mask, width=P, terms=H)}, projected
        )
        for n in range(T):
            row = step(n, row, h)
            h = project_row(n, row)
    # After the steps one launch copies the outputs from the rows: those of the cells, and those of a projection.
    kinds = [(rows, H)] if Wp is None else [(rows, H), (projected, P)]
    keeps = keeps_rows(problem, arrays)
    with_gates = (problem.training or problem.return_gates) and not keeps and cell.kept > 0
    names = frozenset(name for name in cell.outputs if name != "gates" or with_gates)
    results = after_sweep(outputs_launch, problem, inputs, kinds, names)
    if cell.kept == 0:
        results["gates"] = mx.zeros((T, problem.B, 0), z.dtype)
    return results | {ROWS: rows.pieces} if keeps else results


def normed_steps(problem: Problem, arrays: Arrays, inputs: Inputs, row: mx.array, rows: Rows, projected: Rows) -> None:
    """Launch the forward steps of a cell with a norm, and collect their rows in `rows`. Each step has two launches:
    one computes the products of all units, the next one their norm and the cell. With a projection a third one
    computes h, whose rows `projected` collects. inputs: what the kernels read, apart from the norms' arrays. row:
    what the first step gets in place of the row of the step before."""
    T, H, P, mask, h = problem.T, problem.H, problem.P, inputs["mask"], row
    # before, h_before, product: here only to say that the kernels have these inputs. Each launch gets its own.
    inputs = inputs | norms.inputs_of(problem, arrays)
    before = {"before": row} if "Wp" not in arrays else {"before": row, "h_before": row}
    product = each_step(norm_product_kernel, problem, inputs | before)
    step = each_step(norm_forward_kernel, problem, inputs | {"product": row}, rows)
    if "Wp" not in arrays:
        for n in range(T):
            row = step(n, row, product(n, row))
        return
    project_row = each_step(
        project_kernel, problem, inputs | {"sizes": sizes(problem, mask, width=P, terms=H)}, projected
    )
    for n in range(T):
        row = step(n, row, product(n, row, h))
        h = project_row(n, row)


def backward(problem: Problem, arrays: Arrays, saved: dict[str, Any], cotangents: Arrays) -> Arrays:
    """Run the backward pass. Return the gradients of all arrays, by name.

    saved: the outputs of the forward pass. cotangents: the gradients of some outputs. If the gates were not saved, or
    if their rows were already used (see `taken_rows`), the forward pass runs again to compute them.

    First the launches of the steps compute the gradients that pass from step to step (`sweep_backward`, with a norm
    `normed_backward`). The gradients of the weights follow: in few products if `is_plain` allows it, else as in the
    other engines. operand: what the recurrent product multiplied with Wh at each step (h_in). product: whether the
    steps read q, a GRU's candidate's recurrent product, which is computed from it. m: what a projection multiplies,
    whose gradient of Wp is one of the few products.
    """
    cell = problem.cell
    if saved.get("gates") is None and cell.reads_kept and not saved.get(ROWS):
        saved = forward(problem._replace(training=True), arrays)
    mask = whole_mask(problem, arrays) if cell.recurrent else None
    if isinstance(cell, PointwiseCell) and cell.norm is None:
        results = sweep_backward(problem, arrays, saved, cotangents, mask, q=None, wants_m=False)
        return own_gradients(problem, arrays, {name: saved[name] for name in saved if name != ROWS}, results)
    few, product = is_plain(problem, arrays), takes_product(cell)
    operand: Arrays = {}
    if few or product or norms.of_product(cell):
        operand = recurrent_input(problem, arrays, saved["h"], mask)
    if cell.norm is not None:
        results = normed_backward(problem, arrays, saved, cotangents, mask, operand.get("h_in"))
        if isinstance(cell, PointwiseCell):
            return own_gradients(problem, arrays, saved, results)
        return gradients_after_sweep(problem, arrays, saved, results)
    q = candidates(problem, arrays, operand["h_in"]) if product else None
    results = sweep_backward(problem, arrays, saved, cotangents, mask, q, wants_m=few and "Wp" in arrays)
    if few:
        return gradients_in_few_launches(problem, arrays, results | operand)
    outputs = {name: saved[name] for name in saved if name != ROWS}
    return gradients_after_sweep(problem, arrays, outputs, results)


def sweep_backward(
    problem: Problem,
    arrays: Arrays,
    saved: dict[str, Any],
    cotangents: Arrays,
    mask: mx.array | None,
    q: mx.array | None,
    *,
    wants_m: bool,
) -> Arrays:
    """Run the backward steps of a cell without norms. Return the results by name. The letters count numbers per
    unit: C states besides h, M stored gradients of preactivations; in a user's cell also U inputs and V parameters.

    - dz [T, B, D M H]: the gradients of the preactivations
    - du [T, B, D U H]: the gradients of the inputs
    - dh0 [B, D P], dc0 [B, D C H]: the gradients of h0 and c0, each if the call has this array
    - dw [B, D V H]: the gradients of the parameters, not yet summed over the batch
    - carry [T, B, D N H] in float32, if the call has `keep`: the carries of the N states that have one, before their
      multiplication by keep. A carry is the gradient of a state without the part through the recurrent product; h has
      none in a cell that reads h only in this product
    - dh [T, B, D P], with a projection: the gradient of h
    - m [D, T, B, H], with a projection and if `wants_m`: the vector that the projection multiplies with Wp
    - d_out [T, B, D 3H], for a GRU whose reset comes after the product: the gradient of the recurrent product

    saved, cotangents: as in `backward`. mask: the factor on h in the recurrent product, with `keep` in it, or None. q:
    the recurrent product of a GRU's candidate at all steps, or None.
    """
    T, B, H, P = problem[:4]
    D, cell = problem.directions, problem.cell
    resets_first, projects = resets_before(problem), "Wp" in arrays
    # K: the terms of the product dz Wh; with the reset before it, the candidate has a product of its own.
    row, K = no_row(row_type(saved["h"].dtype)), (2 if resets_first else cell.gates) * H
    inputs = backward_inputs(problem, arrays, saved, cotangents) | {"mask": mask, "q": q, "before": row}
    # Without a sequence of gates each step reads them from a row of the forward pass. `rows` and `row` only say here
    # that the kernel has these inputs: each launch gets its own.
    forward_rows = taken_rows(problem, saved)
    inputs |= {"rows": row, "row": step_number(0)} if forward_rows else {}
    inputs |= {
        "weights": transposed(arrays["Wh"]) if cell.recurrent else None,
        "sizes": sizes(problem, mask, width=H, terms=K),
    }
    # The kernel of dh computes P numbers per item, the one of the cell H units.
    of_dh = inputs | {"sizes": sizes(problem, mask, width=P, terms=K)}
    if cell.stops_c:
        inputs["numbers"] = numbers_of(cell)
    rows, dh_rows = rows_of(problem, projects)
    if resets_first:
        gates = {gate: arrays["Wh"][..., cell.block(gate, H), :] for gate in "rzn"}
        inputs["weights"] = of_dh["weights"] = transposed(mx.concatenate([gates["r"], gates["z"]], axis=-2))
        of_reset = inputs | {
            "weights": transposed(gates["n"]),
            "sizes": sizes(problem, mask, width=H, terms=H),
            "now_row": row,
        }
        step = each_step(backward_kernel, problem, inputs)
        reset = each_step(gru_reset_backward_kernel, problem, of_reset, rows)
        for n in reversed(range(T)):
            row = reset(n, step(n, row))
    elif projects:
        # The product is dm = dh Wp here. The mask and the cotangents of h are already in dh.
        of_m = {"weights": transposed(arrays["Wp"]), "sizes": sizes(problem, mask, width=H, terms=P), "dh_now": row}
        of_m |= dict.fromkeys(("mask", "dh", "dhT"))
        dh = each_step(dh_kernel, problem, of_dh | {"unclipped": unclipped(problem, arrays, saved)}, dh_rows)
        step = each_step(backward_kernel, problem, inputs | of_m, rows)
        for n in reversed(range(T)):
            row = step(n, row, dh(n, row))
    else:
        step = each_step(backward_kernel, problem, inputs, rows)
        for n in reversed(range(T)):
            row = step(n, row, *(forward_rows.pop() if forward_rows else ()))
    wanted = {"dc0": "c0" in arrays, "d_out": takes_product(cell), "m": wants_m, "carry": "keep" in inputs}
    wanted |= {"du": cell.inputs > 0, "dw": cell.summed > 0}
    kinds = [(rows, H), (dh_rows, P)] if projects else [(rows, H)]
    results = after_sweep(gradients_launch, problem, inputs, kinds, frozenset(n for n in wanted if wanted[n]))
    if "h0" in arrays:
        # Step -1 is the one before the first: its dh, without a cotangent, is dh0. Padding behind it is cut off.
        last = each_step(dh_kernel, problem, of_dh | {"dh": None})
        results["dh0"] = last(-1, row)[: B * D * P].reshape(B, D * P)
    return results


def normed_backward(
    problem: Problem,
    arrays: Arrays,
    saved: dict[str, Any],
    cotangents: Arrays,
    mask: mx.array | None,
    h_in: mx.array | None,
) -> Arrays:
    """Run the backward steps of a cell with a norm. Each has two launches: one computes dh, the gradient of h, the
    next one the gradients in the cell and the norms. With a projection one between them computes dm = dh Wp. Return
    what `gradients_after_sweep` takes or, for a cell written by the user, what `pointwise.gradients_after` takes.

    saved, cotangents: as in `backward`. mask: the factor on h in the recurrent product, or None. h_in: what this
    product multiplied with Wh at each step, for the numbers that the norms need (`norms.numbers_before_sweep`).
    """
    T, B, H, P = problem[:4]
    D, cell, projects = problem.directions, problem.cell, "Wp" in arrays
    row, K = no_row(row_type(arrays["Wh"].dtype)), cell.gates * H
    numbers = norms.numbers_before_sweep(problem, arrays, saved, h_in)
    inputs = backward_inputs(problem, arrays, saved, cotangents) | norms.inputs_of(problem, arrays)
    inputs |= {"mask": mask, "before": row, "q": numbers.get("q")}
    inputs |= {name: contiguous(array) for name, array in norms.joined(problem, arrays, numbers).items()}
    inputs |= {"weights": transposed(arrays["Wh"]), "sizes": sizes(problem, mask, width=P, terms=K)}
    # The kernel of dh computes P numbers per item, the one of the cell H units. dh_now: the row of this dh (or dm), for
    # which `row` stands here. numbers: the limit of a clip of c that stops gradients.
    of_cell = inputs | {"sizes": sizes(problem, mask, width=H, terms=K), "dh_now": row}
    if cell.stops_c:
        of_cell["numbers"] = numbers_of(cell)
    rows, dh_rows = rows_of(problem, projects)
    unchanged = unclipped(problem, arrays, saved) if projects else None
    dh = each_step(norm_dh_kernel, problem, inputs | {"unclipped": unchanged}, dh_rows if projects else None)
    of_step = norm_own_backward_kernel if isinstance(cell, PointwiseCell) else norm_backward_kernel
    step = each_step(of_step, problem, of_cell, rows)
    if projects:
        of_m = {"weights": transposed(arrays["Wp"]), "sizes": sizes(problem, mask, width=H, terms=P)}
        dm = each_step(norm_dm_kernel, problem, of_cell | of_m)
    for n in reversed(range(T)):
        now = dh(n, row)
        row = step(n, row, dm(n, now) if projects else now)
    wanted = {"dc0": "c0" in arrays, "carry": "keep" in inputs, "du": cell.inputs > 0, "dw": cell.summed > 0}
    kinds = [(rows, H), (dh_rows, P)] if projects else [(rows, H)]
    results = after_sweep(norm_gradients_launch, problem, inputs, kinds, frozenset(n for n in wanted if wanted[n]))
    if "h0" in arrays:
        # Step -1 is the one before the first: its dh, without a cotangent, is dh0. Padding behind it is cut off.
        last = each_step(norm_dh0_kernel, problem, inputs | {"dh": None})
        results["dh0"] = last(-1, row)[: B * D * P].reshape(B, D * P)
    return norms.for_gradients(problem, results, numbers, saved.get("gates"))


def backward_inputs(problem: Problem, arrays: Arrays, saved: dict[str, Any], cotangents: Arrays) -> Inputs:
    """Return the arrays of the caller and of the forward pass (`saved`) that the launches of backward steps read, apart
    from the mask, the weights and what norms read. A cotangent has the name of its output with a d before it. None: the
    cell has no such array, or its backward steps do not read it."""
    cell = problem.cell
    inputs = options(problem, arrays, ("peephole", "inputs", "params"))
    inputs |= {name: contiguous(saved.get(name)) for name in (("h", "c") if cell.reads_h else ("c",))}
    # With a norm the steps need no h0 either: h_in, from which `numbers_before_sweep` computes, contains it.
    if not cell.reads_h:
        inputs.pop("h0", None)
    inputs |= {f"d{name}": contiguous(cotangents[name]) for name in cotangents}
    inputs["gates"] = contiguous(saved["gates"]) if "gates" in saved and cell.reads_kept and cell.kept else None
    return inputs


def unclipped(problem: Problem, arrays: Arrays, saved: Arrays) -> mx.array | None:
    """Return an array [T, B, D P] with 1 where a projected h was not changed by its clip, else 0. Return None if the
    clip does not stop gradients. `through_projection_clip` sets a gradient of h to 0 where the clip changed h; here
    this gradient is all ones."""
    cell = problem.cell
    if not cell.stops_h:
        return None
    ones = mx.ones_like(saved["h"])
    if not problem.bidirectional:
        return contiguous(through_projection_clip(cell, arrays, saved, ones))
    after = {name: saved[name] for name in ("h", "c", "gates")}
    each = [through_projection_clip(cell, {"Wp": arrays["Wp"][d]}, part(after, d), half(ones, d)) for d in range(2)]
    return mx.concatenate(each, axis=-1)


ROWS = "rows"
"""The name under which the forward pass returns its rows (the arrays that its launches wrote) for the backward pass."""


def keeps_rows(problem: Problem, names: Collection[str]) -> bool:
    """Return whether the forward pass keeps its rows for the backward pass, instead of copying the gates from the
    rows into a sequence. names: the arrays that the call has.

    Only cells written by the user and an LSTM keep them, without a projection and without a norm, and if the caller
    does not ask for the gates. Other backward passes cannot read rows: a GRU's steps need the gates of two steps at a
    time, and a projection needs the gates of all steps in one launch.
    """
    cell = problem.cell
    reads_rows = cell.kept > 0 and cell.op in ("lstm", "pointwise") and "Wp" not in names
    return problem.training and not problem.return_gates and reads_rows and cell.norm is None


def taken_rows(problem: Problem, saved: dict[str, Any]) -> list[tuple[mx.array, mx.array]]:
    """Return, for each step of the forward pass, (the array that contains the step's row, the number of this row in
    it), as inputs of a launch. Return an empty list if the forward pass kept no rows.

    The list of arrays in `saved` becomes empty. So only the returned list holds these arrays, and an array's memory is
    freed when the caller has removed its last row from the returned list. piece: an array of one or more rows of
    `length` elements.
    """
    pieces: list[mx.array] = saved.get(ROWS, [])
    length = sum([piece.size for piece in pieces]) // problem.T
    taken = [(piece, step_number(n)) for piece in pieces for n in range(piece.size // length)]
    pieces.clear()
    return taken


def options(problem: Problem, arrays: Arrays, more: tuple[str, ...]) -> Inputs:
    """Return the inputs that all launches of a pass read unchanged: lengths, h0, c0, keep and the arrays named in
    `more`, if the call has them. They are contiguous, so that no launch copies them. A plain RNN does not read
    `keep`, because its mask already includes `keep`. The input `step` is 0 here; each launch replaces it by the
    number of its step. The kernels declare h0, Wh and Wp as `device` arrays, so smaller ones are padded
    (`in_device_memory`)."""
    names = ("h0", "c0", *more) if problem.cell.op == "rnn" else ("h0", "c0", "keep", *more)
    inputs: Inputs = {"step": step_number(0), "lengths": arrays.get("lengths")}
    for name in names:
        if name in arrays:
            inputs[name] = contiguous(arrays[name])
    return inputs | {name: in_device_memory(inputs[name]) for name in ("h0", "Wh", "Wp") if name in inputs}


def rows_of(problem: Problem, projects: bool) -> tuple[Rows, Rows]:
    """Return two empty `Rows`: one for the rows of the cells, one for those of the projection, if there is one
    (`projects`). The last launch can read `rows_left` arrays in all; with a projection each kind gets half of them."""
    left = problem.limits.rows_left // 2 if projects else problem.limits.rows_left
    return Rows(problem.T, left), Rows(problem.T, left)


def quantized_parts(arrays: Arrays, dtype: mx.Dtype) -> Inputs:
    """Return the scales and biases of the quantized weights that the steps read, under the names that kernels have
    for them."""
    parts: Inputs = {}
    for name in ("Wh", "Wp"):
        if is_packed(name, arrays):
            scales, biases = scales_of(arrays, name, dtype)
            parts |= {f"{name}_scales": contiguous(scales), f"{name}_biases": contiguous(biases)}
    return parts


def sizes(problem: Problem, mask: mx.array | None, *, width: int, terms: int) -> mx.array:
    """Return the array of sizes that a launch reads; metal/stepwise.metal lists them. width: the units or numbers of
    h that the launch computes. terms: how many each sum of its product has. The array has fewer than 8 elements, so
    that MLX binds it in constant memory."""
    differ = mask is not None and mask.shape[0] > 1
    return constant((problem.T, problem.B, width, terms, problem.directions, problem.reverse, differ), mx.int32)


def no_row(dtype: mx.Dtype) -> mx.array:
    """Return an array to pass to the first step's launch in place of the row of the launch before, because each
    launch needs this input. The kernels do not read its 8 zeros. With fewer elements MLX would bind it in another
    address space than a row."""
    return constant((0,) * 8, dtype)


def in_device_memory(array: mx.array | None) -> mx.array | None:
    """Return the array, padded to 8 numbers if it is smaller. MLX binds arrays of fewer than 8 numbers in another
    address space (`constant`), and the kernels can read weights and h0 only in the address space `device`."""
    return array if array is None or array.size >= 8 else mx.pad(array.reshape(-1), (0, 8 - array.size))


def transposed(weights: mx.array) -> mx.array | None:
    """Return the transpose [.., m, n] of matrices [.., n, m], in row-major order, as a kernel reads it."""
    return in_device_memory(contiguous(mx.swapaxes(weights, -1, -2)))


# --- Sizes ---

UNITS = {1: 32, 2: 16}
"""How many hidden units a threadgroup computes in the forward pass, by the number of gates. For more gates it is 8, so
that the product of a built-in cell has 24 or 32 columns."""

SLICES = {8: 4, 16: 2}
"""How many simdgroups share the work on eight columns of the product in tiles, by the number of columns of a
threadgroup. For other numbers it is one. It is also one with quantized weights, because several simdgroups would read
the same words."""

TILES = {8: ((8, 32), (8, 16), (8, 8)), 32: ((32, 32), (16, 32), (16, 16))}
"""The tiles (rows, columns) from which `tile_of` chooses, largest first, for products of 8 x 8 matrices with one column
per unit. The key is the result of `stepwise_rows`."""


def stepwise_rows(B: int, cut: Cut | None = None) -> int:
    """Return how many batch items a threadgroup computes: at most `cut.rows`, a measured choice. With fewer than 8
    the product is computed in lanes, else with 8 x 8 matrices."""
    rows = 1 if B == 1 else 4 if B < 8 else 8 if B < 32 else 32
    return min(rows, cut.rows) if cut else rows


def forward_tile(problem: Problem) -> tuple[int, int, int]:
    """Return how a forward step is divided among threadgroups: (the batch items of a threadgroup, the columns of its
    product, its units). A column is one gate of one unit. Without a product each of 256 threads computes one unit."""
    cell, rows = problem.cell, stepwise_rows(problem.B, problem.cut)
    if not cell.recurrent:
        return 1, 256, 256
    units = UNITS.get(cell.gates, 8)
    # With 4 batch items a thread has one sum per gate and item, so many gates need too many registers. 8 x 8 matrices
    # replace these sums from 8 items on; but a `cut` of fewer rows forbids matrices, so then a thread gets one item.
    # With 32 items the sums of many gates exceed the 32 KB of a threadgroup.
    if rows == 4 and cell.gates > 8:
        rows = 1 if problem.cut else 8
    if rows == 32 and cell.gates > 15:
        rows = 16
    return rows, units * cell.gates, units


def tile_of(problem: Problem, width: int) -> tuple[int, int]:
    """Return (rows, columns): how many batch items and how many columns of a product one threadgroup computes.
    width: the number of columns of the whole product, one per unit. A cell without a product has a thread per unit.

    For fewer than 8 batch items the lanes of a threadgroup compute 8 columns by matrix-vector products. For more items
    it multiplies 8 x 8 matrices; then it gets the largest tile for which there are still enough threadgroups for all
    GPU cores.
    """
    rows = stepwise_rows(problem.B, problem.cut)
    if not problem.cell.recurrent:
        return 1, 256
    if rows < 8:
        return rows, 8
    # Smaller tiles give more threadgroups, but read operands and weights more often. We assume, but have not measured,
    # that idle cores cost more time than these reads. So the largest tile that occupies all cores is chosen.
    tiles = TILES[rows]
    groups = [-(-problem.B // high) * -(-width // wide) * problem.directions for high, wide in tiles]
    return next((tile for tile, count in zip(tiles, groups, strict=True) if count >= problem.cores), tiles[-1])


def memory_of(tile: tuple[int, int], slices: int) -> int:
    """Return the bytes of threadgroup memory of a product. tile: its rows and columns. slices: how many simdgroups
    share each eight columns of a product of matrices.

    A product of matrices has its operands, rows of 132 floats (PITCH in metal/stepwise_tiles.metal: 528 bytes), and
    later its sums in the same memory. A product in lanes, for fewer than 8 rows, stores only its sums. The memory is
    declared as vectors of 16 bytes, so it is rounded up to whole ones.
    """
    rows, columns = tile
    sums = 4 * slices * rows * columns
    return -(-sums // 16) * 16 if rows < 8 else max(528 * rows, sums)


def index_bits(problem: Problem) -> int:
    """Return the number of bits of the integers that index arrays in the kernels: 32, or 64 if an array may have too
    many elements. 64 bits are avoided because a step then needs twice as many instructions besides the multiply-adds
    of the recurrent product."""
    # `blocks` is the most elements that an array holds for one unit of one batch item. The array that a launch writes
    # (a row) holds the unit's gates, h before a projection, and c in float32. In a row of 16-bit elements c takes two
    # elements, so these are gates + 1 + 2. `width` stands beside T * B for the weights: Wh has D G H * P elements.
    width, cell, blocks = max(problem.H, problem.P), problem.cell, problem.cell.gates + 3
    # A user's cell, at most: two gradients per gate, float32 gradients of the states (with `keep` twice) and of the
    # parameters, the gradients of the inputs, and the saved values.
    if isinstance(cell, PointwiseCell):
        blocks += 2 * cell.gates + 4 * cell.graph.states + 2 * cell.graph.params + cell.graph.inputs + cell.kept
    largest = problem.directions * blocks * width * max(problem.T * problem.B, width)
    return 32 if largest < problem.limits.index else 64


def index_type(problem: Problem) -> str:
    """Return the name of the Metal type that kernels use for array indices."""
    return "int" if index_bits(problem) == 32 else "long"


def named(name: str, problem: Problem) -> str:
    """Return the kernel's name, with a suffix if its array indices have 64 bits: MLX caches compiled code by the
    name, so another source needs another name."""
    return name if index_bits(problem) == 32 else f"{name}__64"


def row_type(dtype: mx.Dtype) -> mx.Dtype:
    """Return the dtype of a row's elements. A row holds both float32 values and values in `dtype`, that of the
    arrays. If these have 16 bits, its elements are uint16, and a float32 value takes two of them."""
    return mx.float32 if dtype == mx.float32 else mx.uint16


def row_length(problem: Problem, width: int, blocks: int, floats: int, dtype: mx.Dtype) -> int:
    """Return the number of elements of a row. It contains `blocks` arrays [B, D width] in the dtype of the call, and
    `floats` arrays of the same shape in float32, such as c or the gradient of c. The number is at least 8, because
    MLX binds smaller arrays in another address space."""
    words = floats * (4 // dtype.size)
    return max(8, problem.B * problem.directions * width * (blocks + words))


def resets_before(problem: Problem) -> bool:
    """Return whether the cell is a GRU whose reset comes before the candidate's product. Its steps have one more
    launch than others, because this product needs the gate r of all units."""
    return problem.cell.reset == "before"


# --- The launches of a step ---


class StepShader(NamedTuple):
    """What a kernel of one step is built from. name: the shader, a function in metal/. fields: the names of all
    arrays that it can read, separated by spaces, in the order in which a launch gets them. saves: whether the row
    that it writes includes the gates, or None if the shader has no such choice. cell: whether the shader has the
    cell's struct as template argument."""

    name: str
    fields: str
    saves: bool | None = None
    cell: bool = True


class StepKernel:
    """The kernel of one launch of a step. It has two variants: `launch` runs the step only; `joining` returns
    launches with additional threadgroups, which also copy the rows of earlier steps into one array.

    present: the names of the arrays that the call has. step: the shader. tile: how many rows and columns of the product
    a threadgroup computes. units: (the number of columns or units in all, that of one threadgroup); their quotient is
    the number of threadgroups. output: the number of elements and the dtype of the row that a launch writes.
    """

    def __init__(
        self,
        problem: Problem,
        dtype: mx.Dtype,
        present: Collection[str],
        step: StepShader,
        *,
        tile: tuple[int, int],
        units: tuple[int, int],
        output: tuple[int, mx.Dtype],
    ):
        """Build the source of the kernel and its first launch. The class's docstring describes the parameters."""
        shader, fields, saves, cell = step
        rows, columns = tile
        self.problem: Problem = problem
        # own: the generated source of a user's cell, "" for a built-in one. The kernel's name names the cell, too,
        # unless the shader does: kernels with different sources need different names.
        own = struct_text(problem.cell) + norm_text(problem.cell) if isinstance(problem.cell, PointwiseCell) else ""
        self.own: str = own
        self.name: str = shader if "gru" in shader else f"{name_of(own) if own else problem.cell.op}_{shader}"
        self.output: tuple[int, mx.Dtype] = output
        self.inputs: dict[str, bool] = {field: field in present for field in fields.split()}
        self.names: list[str] = [field for field, is_there in self.inputs.items() if is_there]
        quantized, lanes = any(is_packed(field, present) for field in self.names), rows < 8
        # slices: how many simdgroups share eight columns of 8 x 8 matrices, each computing a part of the sum; see
        # SLICES. The threads are as many as the constant THREADS of the shaders' products says: 64 or 256 if lanes
        # multiply; with 8 x 8 matrices 32 for eight columns, 4 per column.
        slices = 1 if lanes or quantized else SLICES.get(columns, 1)
        self.threads: int = (64 if quantized else 256) if lanes else 4 * columns * slices
        self.groups: tuple[int, ...] = -(-units[0] // units[1]), -(-problem.B // rows), problem.directions
        # The template arguments of the shader, such as <LSTMCell<OPTIONS>, ByLanes<ROWS, COLUMNS>, SAVES, S>. The names
        # in them are declared from `template`.
        product = "QuantizedByLanes" if lanes and quantized else "ByLanes" if lanes else "ByTiles"
        if not problem.cell.recurrent:
            product = "NoProduct"
        product += "<ROWS, COLUMNS>" if lanes else "<ROWS, COLUMNS, SLICES>"
        arguments = (["Own" if own else STRUCTS[problem.cell.op]] if cell else []) + [product]
        arguments += ["S"] if saves is None else ["SAVES", "S"]
        self.template: Template = {"ROWS": rows, "COLUMNS": columns, "S": dtype, "X": row_type(dtype)}
        if not lanes:
            self.template["SLICES"] = slices
        if cell and not own:
            self.template["OPTIONS"] = cell_number(problem.cell, "peephole" in self.names)
        if saves is not None:
            self.template["SAVES"] = saves
        if quantized and problem.packing:
            self.template |= {"BITS": problem.packing.bits, "GROUP": problem.packing.group_size}
        self.files: tuple[str, ...] = (*cell_files(problem), "quantized", "stepwise")
        self.files += ("stepwise_lanes", "stepwise_tiles", *(("stepwise_quantized",) if quantized else ()))
        self.files += (*SHADERS[shader], "stepwise_rows")
        # The statements of the kernel: the struct `a` of its arrays, threadgroup memory, and one call of the shader.
        self.arrays: str = struct_of(fields_of((*self.inputs, "after"), {*self.names, "after"}))
        self.arrays += f"threadgroup vec<float, 4> vectors[{memory_of(tile, slices) // 16}];\n"
        self.arrays += "threadgroup float* sums = (threadgroup float*)vectors;\n"
        self.arrays += "uint3 group = threadgroup_position_in_grid;\n"
        self.call: str = f"{shader}<{', '.join(arguments)}>(a, sums, group, {LANE});\n"
        self.launch: Launch = self.prepare(self.name, self.arrays + self.call)
        # How many arrays of earlier steps a launch can join into one. Metal binds at most 31 arrays to a launch. A
        # launch that joins binds 4 others besides its inputs: `after`, `joined`, `starts` and `first`.
        self.most: int = joined_beside(len(self.names) + 4)
        self.joins: dict[tuple[int, ...], tuple[Launch, list[mx.array]]] = {}

    def prepare(
        self, name: str, body: str, joined: int = 0, more_groups: int = 0, pieces: tuple[str, ...] = ()
    ) -> Launch:
        """Return a launch of the shader, named `name`, with the statements `body`. Some launches also join the rows
        of earlier steps into one new array: then `pieces` are the names of the inputs with these rows, `joined` is
        the number of elements of the new array, and `more_groups` are the additional threadgroups that copy. The
        defaults are for a launch that joins nothing."""
        outputs: Outputs = {"after": ((self.output[0],), self.output[1])}
        if joined:
            outputs["joined"] = (joined,), self.output[1]
        inputs = self.inputs | dict.fromkeys(pieces, True)  # True: a launch has them all
        groups = self.groups[0] + more_groups, *self.groups[1:]
        index, name = index_type(self.problem), named(name, self.problem)  # `named`: "__64" for 64-bit indices
        source = Source(name, self.files, body, index, self.own)
        return prepare(source, self.template, inputs, outputs, groups, self.threads)

    def joining(self, steps: tuple[int, ...]) -> tuple[Launch, list[mx.array]]:
        """Return a launch of the step that also copies several arrays of rows into one array, and two small arrays
        that it reads: where each copied array begins in the new one, and which threadgroups copy. It is built once
        for each `steps`: for each array to be copied, how many rows it contains."""
        if steps not in self.joins:
            self.joins[steps] = self.prepare_join(steps)
        return self.joins[steps]

    def prepare_join(self, steps: tuple[int, ...]) -> tuple[Launch, list[mx.array]]:
        """Build what `joining` returns. more: how many threadgroups copy, from 1 to 64. first: the number of the first
        of them, their threads, and all threads that copy. The kernel always has `self.most` inputs for pieces, so that
        one kernel serves for all numbers of copied arrays. Its body declares the arrays (`self.arrays`). Then the
        threadgroups of the step call its shader (`self.call`), and the `more` threadgroups after them copy. X: the type
        of a row's elements."""
        length, total = self.output[0], sum(steps)
        more = max(1, min(64, length * total // (8 * self.threads)))  # threadgroups that copy: 8 elements per thread
        pieces = tuple(f"p{n}" for n in range(self.most))
        starts = constant(tuple(length * start for start in starts_of(steps, self.most)), mx.int64)
        first = constant((self.groups[0], self.threads, more * self.threads), mx.uint32)
        join = struct_of({name: name for name in ("starts", "first", "joined")}, "Join", "join")
        body = f"""{self.arrays}{join}if (group.x < first[0]) {self.call}else {{
const Pieces<{self.most}, X> pieces = {{{{{", ".join(pieces)}}}}};
stepwise_join(pieces, join, group, thread_index_in_threadgroup);
}}"""
        launch = self.prepare(f"{self.name}_joining", body, total * length, more, (*pieces, "starts", "first"))
        return launch, [starts, first]


STEP_NORM_FILES = ("norm", "stepwise_forward", "stepwise_backward", "stepwise_norm")
"""The files in metal/ that the kernels of a step with layer normalisation need besides those of all kernels."""

SHADERS = {
    "stepwise_forward": ("stepwise_forward",),
    "stepwise_project": ("stepwise_forward",),
    "stepwise_gru_reset": ("stepwise_forward", "stepwise_gru"),
    "stepwise_gru_candidate": ("stepwise_forward", "stepwise_gru"),
    "stepwise_backward": ("stepwise_backward",),
    "stepwise_gru_reset_backward": ("stepwise_backward", "stepwise_gru"),
    "stepwise_dh": ("stepwise_backward",),
    **{f"stepwise_norm_{name}": STEP_NORM_FILES for name in ("product", "forward", "dh", "dm", "backward", "dh0")},
    "stepwise_norm_own_backward": (*STEP_NORM_FILES, "stepwise_norm_own"),
}
"""The files in metal/ that each shader of a step needs besides those that all of them need, by its name."""


def cell_files(problem: Problem) -> tuple[str, ...]:
    """Return the names of the shader files that the source of a kernel begins with: helpers for its arrays, and the
    problem's cell or, for a cell written by the user, what its generated struct needs."""
    return "arrays", "cell", "pointwise" if problem.cell.op == "pointwise" else f"cell_{problem.cell.op}"


LANE = "simdgroup_index_in_threadgroup, thread_index_in_simdgroup"
"""The last two arguments of the shaders of a step: the number of the simdgroup, and of the lane in it."""


CHANGING = frozenset(("step", "before", "h_before", "reset_row", "now_row", "dh_now", "rows", "row", "product"))
"""The names of the inputs that differ from step to step: its number, and rows that earlier launches wrote. They come
first among the fields of a shader."""


class StepLaunch:
    """A callable that launches a kernel at each step of a pass. kernel: the kernel. inputs: its arrays by name;
    those in `CHANGING` are given at each call instead. rows: a `Rows` that collects the written rows, or None. It
    also plans at which steps the launch copies several earlier arrays into one (a join)."""

    def __init__(self, kernel: StepKernel, inputs: Arrays, rows: Rows | None = None):
        """Prepare the launches of a pass. `fixed` are the inputs that all steps share, in the order of the kernel's
        fields. rows: collects the written rows. Its plan depends on how many arrays this kernel can join at once."""
        self.kernel: StepKernel = kernel
        self.launch: Launch = kernel.launch
        self.rows: Rows | None = rows
        self.fixed: list[mx.array] = [inputs[name] for name in kernel.names if name not in CHANGING]
        if rows is not None:
            rows.plan(kernel.most)

    def __call__(self, n: int, *changed: mx.array) -> mx.array:
        """Launch step n and return the row that it writes. changed: the inputs of this step that are named in
        `CHANGING`, without its number, in the order of the kernel's fields."""
        inputs, rows = [step_number(n), *changed, *self.fixed], self.rows
        if rows is None:
            return self.launch(inputs)[0]
        join = next(rows.joins)
        row = self.launch(inputs)[0] if join is None else self.join(inputs, rows.pieces, join)
        rows.pieces.append(row)
        return row

    def join(self, inputs: list[mx.array], pieces: list[mx.array], join: Join) -> mx.array:
        """Launch a step that also copies some of the arrays `pieces`, which earlier steps wrote, into one array;
        `join` says which. In the list, replace the copied arrays by the new one, so that the last launch of the pass
        has fewer arrays to read. Return the row that the step itself writes."""
        due = slice(join.first, join.first + len(join.steps))
        # The kernel reads a fixed number of arrays. Unused places get the last one again; no thread reads it there.
        arrays = pieces[due] + pieces[due.stop - 1 : due.stop] * (self.kernel.most - len(join.steps))
        launch, sizes = self.kernel.joining(join.steps)
        row, *pieces[due] = launch(inputs + arrays + sizes)
        return row


@cache
def step_number(n: int) -> mx.array:
    """Return the number of a step as an array, which a launch reads as its input `step`. Each is made once."""
    return mx.array(n, mx.int32)


def without_absent(inputs: Inputs) -> Arrays:
    """Return a dict of the inputs that are not None."""
    return {name: array for name, array in inputs.items() if array is not None}


KernelMaker = Callable[[Problem, mx.Dtype, tuple[str, ...], bool], StepKernel]
"""The type of the functions `..._kernel` below. Their arguments are the problem, the dtype of the arrays, the names of
the arrays that are there, and whether the rows of the launches are collected."""


def each_step(make: KernelMaker, problem: Problem, inputs: Inputs, rows: Rows | None = None) -> StepLaunch:
    """Return a callable that launches, at each step, the kernel that `make` builds for these inputs: called with the
    step's number and the rows that it reads, it returns the row that it writes. rows: collects the written rows, if
    the last launch of the pass shall read them."""
    present = without_absent(inputs)
    return StepLaunch(make(problem, problem.dtype, tuple(present), rows is not None), present, rows)


@cached
def forward_kernel(problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], _has_rows: bool) -> StepKernel:
    """Return the kernel of a forward step. metal/stepwise_forward.metal describes its inputs and the row that it
    writes: c, h and, if the backward pass or the caller needs them, the gates."""
    H, cell, (rows, columns, units) = problem.H, problem.cell, forward_tile(problem)
    saves = problem.training or problem.return_gates
    length = row_length(problem, H, blocks=1 + cell.kept if saves else 1, floats=cell.carried, dtype=dtype)
    fields = (
        "step before h_before z Wh Wh_scales Wh_biases h0 c0 peephole bhn inputs params mask keep lengths sizes numbers"
    )
    shader = StepShader("stepwise_forward", fields, saves=saves)
    output = (length, row_type(dtype))
    return StepKernel(problem, dtype, present, shader, tile=(rows, columns), units=(H, units), output=output)


@cached
def gru_reset_kernel(problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], _has_rows: bool) -> StepKernel:
    """Return the first kernel of a step of a GRU whose reset comes before the product. It writes a row [3, B, D H]
    with r * mask * h (of the step before), r and z. Only the second kernel reads this row, so it has the dtype of the
    call. The product has the columns of two gates, r and z: 32 for 16 units. The shader is in
    metal/stepwise_gru.metal."""
    fields = "step before z Wh Wh_scales Wh_biases h0 mask lengths sizes"
    shader = StepShader("stepwise_gru_reset", fields)
    output = (row_length(problem, problem.H, blocks=3, floats=0, dtype=dtype), dtype)
    tile = stepwise_rows(problem.B, problem.cut), 32
    return StepKernel(problem, dtype, present, shader, tile=tile, units=(problem.H, 16), output=output)


@cached
def gru_candidate_kernel(problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], _has_rows: bool) -> StepKernel:
    """Return the second kernel of a step of a GRU whose reset comes before the candidate's product. It reads the row
    of the first kernel (`gru_reset_kernel`). It computes the candidate n and the new h, and writes a row with h and, if
    the backward pass or the caller needs them, the three gates. These rows are collected, so they have the dtype
    `row_type`. The shader is in metal/stepwise_gru.metal."""
    saves = problem.training or problem.return_gates
    fields = "step before reset_row z Wh Wh_scales Wh_biases h0 keep lengths sizes"
    shader = StepShader("stepwise_gru_candidate", fields, saves=saves)
    output = (row_length(problem, problem.H, blocks=4 if saves else 1, floats=0, dtype=dtype), row_type(dtype))
    tile = stepwise_rows(problem.B, problem.cut), 32
    return StepKernel(problem, dtype, present, shader, tile=tile, units=(problem.H, 32), output=output)


@cached
def project_kernel(problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], _has_rows: bool) -> StepKernel:
    """Return the kernel that computes the projection of a step, h = m Wp^T, and writes a row with h [B, D P]. Of
    `numbers` it reads the limit of h: without a clip of h the array is left out. The shader is in
    metal/stepwise_forward.metal."""
    clips = problem.cell.projection_clip is not None
    present = present if clips else tuple(name for name in present if name != "numbers")
    shader = StepShader("stepwise_project", "step before Wp Wp_scales Wp_biases sizes numbers", cell=False)
    return product_kernel(problem, dtype, present, shader, problem.P, row_type(dtype))


def product_kernel(
    problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], shader: StepShader, width: int, written: mx.Dtype
) -> StepKernel:
    """Return a kernel that computes a matrix product and writes it as a row [B, D width]. width: the number of columns
    for each direction. written: the dtype of the row's elements, dtype or row_type(dtype), which have the same size."""
    tile = tile_of(problem, width)
    output = row_length(problem, width, blocks=1, floats=0, dtype=dtype), written
    return StepKernel(problem, dtype, present, shader, tile=tile, units=(width, tile[1]), output=output)


@cached
def backward_kernel(problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], _has_rows: bool) -> StepKernel:
    """Return the kernel of a backward step, which writes a row with the gradients of this step.
    metal/stepwise_backward.metal describes its inputs and the row. Among the inputs: dh_now, the row with the gradient
    of a projected h; rows and row, the array and the number in it of the forward pass's row with the gates. A
    threadgroup computes a tile of the product: some batch items, and one column per unit."""
    tile = tile_of(problem, problem.H)
    fields = (
        "step before dh_now rows row weights gates h c h0 c0 q peephole bhn inputs params mask keep lengths "
        "dh dc dgates dhT dcT sizes numbers"
    )
    shader = StepShader("stepwise_backward", fields)
    output = (backward_length(problem, present, dtype), row_type(dtype))
    return StepKernel(problem, dtype, present, shader, tile=tile, units=(problem.H, tile[1]), output=output)


def backward_length(problem: Problem, present: Collection[str], dtype: mx.Dtype) -> int:
    """Return the number of elements of the row that a backward step writes. floats: a carry for each state besides h,
    and for h if a step reads it outside of the recurrent product; with `keep` a second time, before their
    multiplication by keep; and the gradients of the parameters (`summed`), which the steps sum up."""
    cell = problem.cell
    floats = (cell.carried + cell.passes_h) * (2 if "keep" in present else 1) + cell.summed
    return row_length(problem, problem.H, blocks=cell.gradients + cell.inputs, floats=floats, dtype=dtype)


@cached
def gru_reset_backward_kernel(
    problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], _has_rows: bool
) -> StepKernel:
    """Return the second kernel of a backward step of a GRU whose reset comes before the candidate's product. It
    multiplies the candidate's gradient with Wh, and computes the gradient of the gate r and a part of the gradient
    of h. It reads the row that the first kernel (`backward_kernel`) wrote, and writes a copy that includes both
    gradients. The shader is in metal/stepwise_gru.metal."""
    tile = tile_of(problem, problem.H)
    fields = "step now_row weights gates h h0 mask keep lengths sizes"
    shader = StepShader("stepwise_gru_reset_backward", fields)
    output = (backward_length(problem, present, dtype), row_type(dtype))
    return StepKernel(problem, dtype, present, shader, tile=tile, units=(problem.H, tile[1]), output=output)


DH_INPUTS = "step before weights gates mask keep lengths dh dhT unclipped sizes"
"""The fields of the shaders that compute the gradient of h from the gradients of the products of the next step."""


@cached
def dh_kernel(problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], has_rows: bool) -> StepKernel:
    """Return the kernel that computes the gradient of h, [B, D P]. With a projection it runs at each step and writes
    a row that is collected (`has_rows`). For all cells it runs once after all steps, for dh0: then it writes the dtype
    of the call, as dh0 is a result and no row. The shader is in metal/stepwise_backward.metal."""
    shader, written = StepShader("stepwise_dh", DH_INPUTS), row_type(dtype) if has_rows else dtype
    return product_kernel(problem, dtype, present, shader, problem.P, written)


# --- The launches of a step with layer normalisation ---


def item_tile(cell: AnyCell) -> tuple[int, int]:
    """Return the tile (1, columns) of kernels in which each threadgroup of 256 threads computes all units of one
    batch item. They have no product; `columns` is the size of the threadgroup memory in which simdgroups exchange
    sums, in floats: 3 numbers of 8 simdgroups for each norm of the gates, at least 128, which also has room for a
    norm of c. metal/stepwise_norm.metal describes it."""
    return 1, max(128, 24 * norm_blocks(cell))


@cached
def norm_product_kernel(problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], _has_rows: bool) -> StepKernel:
    """Return the first kernel of a forward step of a cell with a norm. It writes a row with the recurrent products
    of all gates, [B, D G H], as float32 numbers (floats=1). A norm needs the products of all units of an item, so it is
    a launch of its own. The shader is in metal/stepwise_norm.metal."""
    width = problem.cell.gates * problem.H
    tile = tile_of(problem, width)
    fields = "step before h_before Wh Wh_scales Wh_biases h0 mask lengths sizes"
    shader = StepShader("stepwise_norm_product", fields)
    output = (row_length(problem, width, blocks=0, floats=1, dtype=dtype), row_type(dtype))
    return StepKernel(problem, dtype, present, shader, tile=tile, units=(width, tile[1]), output=output)


@cached
def norm_forward_kernel(problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], _has_rows: bool) -> StepKernel:
    """Return the second kernel of a forward step of a cell with a norm. It reads the products that
    `norm_product_kernel` wrote, computes norms and cell, and writes the same row as `forward_kernel`. A threadgroup
    has all units of one batch item, so there is one along the units: units=(1, 1)."""
    cell, saves = problem.cell, problem.training or problem.return_gates
    length = row_length(problem, problem.H, blocks=1 + cell.kept if saves else 1, floats=cell.carried, dtype=dtype)
    fields = "step before product z h0 c0 peephole bhn inputs params keep lengths sizes numbers " + " ".join(
        norms.READ["forward"]
    )
    shader = StepShader("stepwise_norm_forward", fields, saves=saves)
    output = (length, row_type(dtype))
    return StepKernel(problem, dtype, present, shader, tile=item_tile(cell), units=(1, 1), output=output)


@cached
def norm_dh_kernel(problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], _has_rows: bool) -> StepKernel:
    """Return the first kernel of a backward step of a cell with a norm. It writes a row with the gradient of h [B, D
    P], without the part that bypasses the products. The cell's kernel needs this gradient of all units of an item at
    once, for the norms, so it is a launch of its own."""
    return dh_of_norm("stepwise_norm_dh", problem, dtype, present, row_type(dtype))


@cached
def norm_dh0_kernel(problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], _has_rows: bool) -> StepKernel:
    """Return the kernel that computes dh0 [B, D P] once after the backward steps of a cell with a norm. It writes
    the dtype of the call, as dh0 is a result."""
    return dh_of_norm("stepwise_norm_dh0", problem, dtype, present, dtype)


def dh_of_norm(name: str, problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], written: mx.Dtype) -> StepKernel:
    """Return a kernel that computes a gradient of h [B, D P] from the gradients of the products, for a cell with a
    norm. name: its shader. written: the dtype of what it writes. The kernel does not get the gates: in these rows
    the gradients of a GRU's products are already multiplied by r."""
    present = tuple(field for field in present if field != "gates")
    return product_kernel(problem, dtype, present, StepShader(name, DH_INPUTS), problem.P, written)


@cached
def norm_dm_kernel(problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], _has_rows: bool) -> StepKernel:
    """Return the kernel between the two of a backward step, for a cell with a norm and a projection h = m Wp^T. It
    multiplies the gradient of this step's h with Wp, and writes a row with the product [B, D H]: the gradient of m."""
    shader = StepShader("stepwise_norm_dm", "step dh_now weights sizes", cell=False)
    return product_kernel(problem, dtype, present, shader, problem.H, row_type(dtype))


@cached
def norm_backward_kernel(problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], _has_rows: bool) -> StepKernel:
    """Return the last kernel of a backward step of a built-in cell with a norm. It writes a row with the gradients of
    this step: `floats` carries per unit, and `blocks` numbers in the dtype of the call. These are, per gate, the
    gradient of the recurrent product, if that is normalised, and of the preactivation; and that of the result of a norm
    of c."""
    cell = problem.cell
    blocks = cell.gates * (2 if norms.of_product(cell) else 1) + norms.of_state(cell)
    # Each carry and, for the gradient of `keep`, the same before its multiplication by keep.
    floats = (cell.carried + cell.passes_h) * (2 if "keep" in present else 1)
    fields = (
        "step before dh_now gates h c h0 c0 q peephole bhn keep lengths dc dgates dcT sizes numbers "
        "norm_scale norm_c norm_y norm_r norm_c_y"
    )
    shader = StepShader("stepwise_norm_backward", fields)
    output = (row_length(problem, problem.H, blocks, floats, dtype), row_type(dtype))
    return StepKernel(problem, dtype, present, shader, tile=item_tile(cell), units=(1, 1), output=output)


@cached
def norm_own_backward_kernel(
    problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], _has_rows: bool
) -> StepKernel:
    """Return the last kernel of a backward step of a cell written by the user, with a norm. It writes a row: as floats
    the carries (with `keep` also before their multiplication by it) and the gradients of the parameters; then those of
    the products, of the inputs and of the preactivations. rows, row: the array and the number in it of the forward
    pass's row with the saved values. q: absent, but the shader's code for all cells names it."""
    cell = problem.cell
    floats = (cell.carried + cell.passes_h) * (2 if "keep" in present else 1) + cell.summed
    blocks = cell.gates + cell.inputs + cell.gradients
    fields = (
        "step before dh_now rows row gates h c h0 c0 q inputs params keep lengths dc dcT sizes norm_scale norm_y norm_r"
    )
    shader = StepShader("stepwise_norm_own_backward", fields)
    output = (row_length(problem, problem.H, blocks, floats, dtype), row_type(dtype))
    return StepKernel(problem, dtype, present, shader, tile=item_tile(cell), units=(1, 1), output=output)


# --- The launch after all steps ---

Kind = tuple[Rows, int]
"""All rows of one kind (of the cells or of the projection), and the numbers per item and direction of their arrays: H
or P."""

Layout = tuple[tuple[tuple[int, ...], int, int], ...]
"""For each kind of rows: (the number of rows in each array, the number of elements of a row, H or P)."""


class Sequences(NamedTuple):
    """The launch after all steps, which copies the rows of a pass into sequences such as h [T, B, H]: the launch,
    the names of its inputs and outputs, and two small arrays that it reads: where each array of rows begins, counted
    in rows, and the sizes of each kind of rows."""

    launch: Launch
    inputs: list[str]
    outputs: list[str]
    sizes: list[mx.array]


def after_sweep(
    make: Callable[[Problem, mx.Dtype, tuple[str, ...], Layout, frozenset[str]], Sequences],
    problem: Problem,
    inputs: Inputs,
    kinds: list[Kind],
    names: frozenset[str],
) -> Arrays:
    """After the last step of a pass, launch one more kernel, which `make` builds (`outputs_launch` or one like it).
    It reads the rows of all steps and writes the results named in `names`, which are returned. inputs: the pass's
    inputs. kinds: the rows to read, each kind with its width, H or P. The kernel has inputs for LEFT arrays of rows:
    if there are fewer, the last one is passed again."""
    left: list[mx.array] = []
    for rows, _ in kinds:
        left += rows.pieces
    # The last piece is the row of the last launch, which no launch has joined: its size is that of one row.
    layout = tuple([(rows.steps, rows.pieces[-1].size, width) for rows, width in kinds])
    present = without_absent(inputs)
    sequences = make(problem, problem.dtype, tuple(present), layout, names)
    arrays = [present[name] for name in sequences.inputs] + left + left[-1:] * (LEFT - len(left)) + sequences.sizes
    return dict(zip(sequences.outputs, sequences.launch(inputs=arrays), strict=True))


def prepare_sequences(
    problem: Problem,
    dtype: mx.Dtype,
    layout: Layout,
    source: Source,
    template: Template,
    inputs: dict[str, bool],
    outputs: Outputs,
) -> Sequences:
    """Return the launch that copies the rows of a pass into sequences. It has one thread per batch item, unit, step
    and direction, in threadgroups of 256.

    layout: for each kind of rows the number of rows in each array, the elements of a row, and H or P. source: the
    kernel's name, the files that it needs besides those that every such launch needs, and the Metal statements that
    call the shader. inputs: the name of each array that it can read besides the rows, and whether the call has it.
    outputs: the shape and dtype of each result, or None.
    """
    # starts: the index of the first row of each array, for LEFT arrays; those that the pass does not have are empty.
    starts = starts_of(sum((steps for steps, _, _ in layout), ()), LEFT)
    # For each kind: the size of a row, H or P, and the index of its first row. X: the type of a row's elements.
    numbers = [number for n, (_, size, width) in enumerate(layout) for number in (size, width, n * problem.T)]
    sizes = {"starts": mx.array(starts, mx.int32), "kinds": mx.array(numbers, mx.int32)}
    pieces = [f"piece{n}" for n in range(LEFT)]
    body = f"const Rows<X> rows = {{{{{', '.join(pieces)}}}}};\n{source.body}"
    template = template | {"S": dtype, "X": row_type(dtype)}
    groups = -(-problem.B * max(width for _, _, width in layout) // 256), problem.T, problem.directions
    files = (*cell_files(problem), "stepwise", "stepwise_rows", *source.files)
    every = inputs | dict.fromkeys((*pieces, *sizes), True)
    source = Source(named(source.shader, problem), files, body, index_type(problem))
    launch = prepare(source, template, every, outputs, groups, 256)
    written = [name for name, output in outputs.items() if output is not None]
    given = [name for name, is_there in inputs.items() if is_there]
    return Sequences(launch, given, written, list(sizes.values()))


@cached
def outputs_launch(
    problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], layout: Layout, names: frozenset[str]
) -> Sequences:
    """Return the launch that copies the outputs in `names` (some of h, c, gates, hT, cT) from the rows of a forward
    pass: the rows that the cells wrote and, with a projection, the rows with h."""
    (T, B, H, P), D, gates, c = problem[:4], problem.directions, problem.cell.kept, problem.cell.carried
    shapes = {
        "c": ((T, B, D * c * H), mx.float32),
        "cT": ((B, D * c * H), mx.float32),
        "h": ((T, B, D * P), dtype),
        "hT": ((B, D * P), dtype),
        "gates": ((T, B, D * gates * H), dtype),
    }
    outputs: Outputs = {name: shape if name in names else None for name, shape in shapes.items()}
    template: Template = {"GATES": gates if "gates" in names else 0, "CARRIES": c if "c" in names else 0}
    inputs = {name: name in present for name in ("h0", "c0", "lengths", "sizes")}
    fields = fields_of((*inputs, "starts", "kinds", *outputs), {*present, *names, "starts", "kinds"})
    end = "thread_position_in_grid);\n"
    if len(layout) == 1:
        body = struct_of(fields) + f"stepwise_outputs<GATES, CARRIES, S>(rows, kinds, a, {end}"
    else:
        # With a projection the cells' launches write c and the gates, and separate launches write h. So the kernel
        # calls the shader twice: once to copy c and the gates, with h marked as absent; once to copy h, with the
        # others absent. These rows have no gates and no floats (0, 0); kinds + 3 are the three numbers of their kind.
        body = struct_of(fields | dict.fromkeys(("h0", "h", "hT"), "absent"))
        body += struct_of(fields | dict.fromkeys(("c0", "c", "cT", "gates"), "absent"), "Projected", "projected")
        body += f"stepwise_outputs<GATES, CARRIES, S>(rows, kinds, a, {end}"
        body += f"stepwise_outputs<0, 0, S>(rows, kinds + 3, projected, {end}"
    name = f"{problem.cell.op}_stepwise_outputs" + "_projected" * (len(layout) > 1)
    return prepare_sequences(problem, dtype, layout, Source(name, (), body), template, inputs, outputs)


@cached
def gradients_launch(
    problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], layout: Layout, names: frozenset[str]
) -> Sequences:
    """Return the launch that copies the results of a backward pass from its rows into sequences.

    It always writes dz, the gradients of the preactivations, and with a projection dh, the gradient of h. If `names`
    contains them, it also writes

    - dc0, the gradient of the initial state c0
    - du and dw, the gradients of the inputs and of the parameters of a user's cell
    - d_out, the gradient of a GRU's recurrent products: dz, but the candidate's part times the gate r
    - carry, the gradients of the states before each step, without the parts through the recurrent product: a block for
      each state besides h, and for h if a step reads it outside of the product
    - m, the vector that a projection multiplies with Wp, which this launch computes from the gates and c
    """
    (T, B, H, P), D, cell, projects = problem[:4], problem.directions, problem.cell, len(layout) > 1
    carries = cell.carried + cell.passes_h
    # dc0: in a user's cell float32 until `gradients_after` casts all gradients, as on the engine `fused`.
    shapes = {
        "dz": ((T, B, D * cell.gradients * H), dtype),
        "du": ((T, B, D * cell.inputs * H), dtype),
        "dc0": ((B, D * cell.carried * H), mx.float32 if cell.op == "pointwise" else dtype),
        "dw": ((B, D * cell.summed * H), mx.float32),
        "d_out": ((T, B, D * cell.gates * H), dtype),
        "carry": ((T, B, D * carries * H), mx.float32),
        "dh": ((T, B, D * P), dtype),
        "m": ((D, T, B, H), dtype),
    }
    names = names | {"dz"} | ({"dh"} if projects else frozenset())
    if carries == 0:
        names = names - {"carry"}
    outputs: Outputs = {name: shape if name in names else None for name, shape in shapes.items()}
    read = {"lengths", "sizes"} | ({"gates"} if names & {"d_out", "m"} else set()) | ({"c"} if "m" in names else set())
    inputs = {name: name in read and name in present for name in ("gates", "c", "lengths", "sizes")}
    candidate, reset = (cell.gate_order.index(gate) for gate in "nr") if "d_out" in names else (0, 0)
    template: Template = {"GRADIENTS": cell.gradients, "CANDIDATE": candidate, "RESET": reset, "INPUTS": cell.inputs}
    template |= {"CARRIED": cell.carried, "PASSES_H": int(cell.passes_h), "SUMMED": cell.summed}
    existing = {*names, "starts", "kinds", *(name for name in inputs if inputs[name])}
    fields = fields_of((*inputs, "starts", "kinds", *outputs), existing)
    start, end = "stepwise_gradients<{}>(rows, kinds", "thread_position_in_grid);\n"
    body = struct_of(fields) + f"{start.format(', '.join([*template, 'S']))}, a, {end}"
    if projects:
        # Separate launches wrote dh. Their rows have the layout of the dz of a cell with one gate (the template
        # arguments 1, 0, ...: one block, no others), so a second call of the shader copies dh under the name dz. The
        # other outputs are marked as absent, so this call writes nothing else. kinds + 3: the three numbers of the
        # second kind of rows.
        of_dh = fields | dict.fromkeys(("gates", "dc0", "d_out", "carry", "m"), "absent") | {"dz": "dh"}
        body += struct_of(of_dh, "Projected", "projected")
        body += f"{start.format('1, 0, 0, 0, 0, 0, 0, S')} + 3, projected, {end}"
    if "m" in names:
        template |= {"OPTIONS": cell_number(cell)}
        body += f"stepwise_projected<{STRUCTS[cell.op]}, S>(a, {end}"
    source = Source(f"{cell.op}_stepwise_gradients", (), body)
    return prepare_sequences(problem, dtype, layout, source, template, inputs, outputs)


@cached
def norm_gradients_launch(
    problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], layout: Layout, names: frozenset[str]
) -> Sequences:
    """Return the launch that copies the results of a backward pass with a norm from its rows into sequences. It writes

    - d_product, the gradients of the recurrent products, and dz, those of the preactivations; without a norm of the
      products only dz
    - d_norm_c, with a norm of c: the gradient of its result
    - dh, with a projection: the gradient of h
    - dc0, carry, du and dw, if `names` contains them, as `gradients_launch` does

    Letters: G gates, C states besides h, U inputs, V parameters, M gradients of preactivations. A row has first
    `floats` floats per unit (carries, and gradients of parameters), then the G gradients of the products, where a row
    without a norm has dz. So the shader for rows without a norm, `stepwise_gradients`, copies them.
    """
    (T, B, H, P), D, cell, projects = problem[:4], problem.directions, problem.cell, len(layout) > 1
    products, states, G, carry = norms.of_product(cell), norms.of_state(cell), cell.gates, "carry" in names
    C, U, V, M, carries = cell.carried, cell.inputs, cell.summed, cell.gradients, cell.carried + cell.passes_h
    wide, all_gates = ((T, B, D * H), dtype), ((T, B, D * G * H), dtype)
    outputs: Outputs = {
        "dz": ((T, B, D * M * H), dtype),
        "d_product": all_gates if products else None,
        "d_norm_c": wide if states else None,
        "dh": ((T, B, D * P), dtype) if projects else None,
        "dc0": ((B, D * C * H), mx.float32 if cell.op == "pointwise" else dtype) if "dc0" in names else None,
        "carry": ((T, B, D * carries * H), mx.float32) if carry and carries else None,
        "du": ((T, B, D * U * H), dtype) if "du" in names else None,
        "dw": ((B, D * V * H), mx.float32) if "dw" in names else None,
    }
    inputs = {name: name in present for name in ("lengths", "sizes")}
    written = [name for name, output in outputs.items() if output is not None]
    read = [name for name in inputs if inputs[name]]
    fields = fields_of((*inputs, "starts", "kinds", *outputs), {*read, *written, "starts", "kinds"})
    fields |= dict.fromkeys(("gates", "d_out"), "absent")
    first, floats = ("d_product" if products else "dz"), carries * (1 + carry) + V
    body = struct_of(fields | {"dz": first})
    end = "thread_position_in_grid);\n"
    body += f"stepwise_gradients<{G}, 0, 0, {U}, {C}, {int(cell.passes_h)}, {V}, S>(rows, kinds, a, {end}"
    if products:
        body += f"stepwise_norm_gradients<{M}, {G + U}, {floats}, S>(rows, kinds, a, dz, {end}"
    if states:
        body += f"stepwise_norm_gradients<1, {G * (1 + products)}, {floats}, S>(rows, kinds, a, d_norm_c, {end}"
    if projects:
        only_dh = fields | dict.fromkeys(("dc0", "carry", "du", "dw"), "absent") | {"dz": "dh"}
        body += struct_of(only_dh, "Projected", "projected")
        body += f"stepwise_gradients<1, 0, 0, 0, 0, 0, 0, S>(rows, kinds + 3, projected, {end}"
    template: Template = {"OPTIONS": number_of_norm(cell)}
    if cell.op == "pointwise":  # kernels with other numbers of blocks need other names
        template |= {"GATES": G, "GRADIENTS": M, "INPUTS": U, "CARRIED": C, "PASSES_H": int(cell.passes_h), "SUMMED": V}
    files = STEP_NORM_FILES
    source = Source(f"{cell.op}_stepwise_norm_gradients", files, body)
    return prepare_sequences(problem, dtype, layout, source, template, inputs, outputs)
