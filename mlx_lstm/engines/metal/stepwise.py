"""Engine `stepwise`: run the recurrence on the GPU, with one launch of a Metal shader per time step.

One launch computes the recurrent product and the cell of a step, for both directions if the call has two. Three kinds
of calls need one more launch per step: those with a projection, those with a norm, and a GRU whose reset comes before
the candidate's product. A launch of MLX cannot write to an existing array. So each launch writes a new array, called a
row, which the next launch reads. At the end of a pass one more launch copies all rows into sequences in the order of
time. Dtypes, laziness and quantized weights are as in the module `fused`. What the names in this file mean:

- row: the array that a launch writes. It has first float32 numbers (c, or gradients in the backward pass), then blocks
  of H numbers in the dtype of the call. Its elements have the dtype `row_type`: float32, or uint16 in a call of 16
  bits, where a float32 number takes two elements. A row without float32 numbers, if no `Rows` collects it, may have the
  dtype of the call instead
- `rows`: a `Rows`, which collects the rows of a pass. Some launches also join several earlier rows into one array
- `inputs`: the arrays that kernels read, by name; None means that the call does not have an array. `present`: the names
  of the arrays that the call has
- `step`, `dh`, ...: launches that `each_step` returns. `step(n, row)` launches step n, which reads `row`, and returns
  the new row
- `before`: the input of a kernel with the row of the launch before. `after`: its output, the new row. `h_before`: with
  a projection, the input with h of the step before
- `weights`: the matrix of a backward product
- saved, cotangents: the outputs of the forward pass; the gradients that the caller gives for some of them
- carry: the gradient of a state before a step, without the part that goes through the recurrent product
- z: the input's part of the preactivations. q: the recurrent product of a GRU's candidate. m: the vector that a
  projection multiplies, h = m Wp^T
- tile: the rows (batch items) and columns (one per unit and gate) of a product that one threadgroup computes
- lane: one of the 32 threads of a simdgroup, which run together

T: steps, B: batch items, D: directions, H: units, P: the width of h, K: the terms of each sum of a product, G: gates.
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
    """Run the forward pass. Return h [T, B, D P] and hT [B, D P]. If the cell has C > 0 states besides h, also return c
    [T, B, D C H] and cT [B, D C H] in float32. In training, or if the caller asks for them, also return gates [T, B, D
    N H]: the N numbers per unit that the backward pass reads, mostly the gates.

    If only the backward pass reads the gates (`keeps_rows`), they are not copied into a sequence. Instead the result
    `ROWS` is returned: a list of the arrays with the rows of the pass, which contain the gates.
    """
    T, H, P, cell, projects = problem.T, problem.H, problem.P, problem.cell, "Wp" in arrays
    mask, z = whole_mask(problem, arrays) if cell.recurrent else None, project(problem, arrays)
    # row: zeros that the first step gets in place of the row of a step before it. The entries with `row` only say that
    # the kernels have these inputs; each launch gets the rows of earlier launches for them.
    row = no_row(problem)
    inputs = options(problem, arrays, ("Wh", "Wp", "peephole", "bhn", "inputs", "params"))
    inputs |= dict.fromkeys(("before", "reset_row", "product", *(["h_before"] if projects else [])), row)
    inputs |= {"z": z, "mask": mask, "sizes": sizes(problem, mask, width=H, terms=P), "numbers": numbers_of(cell)}
    if problem.packing is not None:
        inputs |= quantized_parts(arrays, z.dtype)
    if cell.norm is not None:
        inputs |= norms.inputs_of(problem, arrays)
    rows, projected = rows_of(problem, projects)
    project_row = None
    if projects:
        of_h = {"sizes": sizes(problem, mask, width=P, terms=H)}
        project_row = each_step(project_kernel, problem, inputs | of_h, projected)
    first, second = forward_kernels(cell)
    begin = each_step(first, problem, inputs) if first else None
    step, h = each_step(second, problem, inputs, rows), row
    for n in range(T):
        before = (row, h) if projects else (row,)
        row = step(n, *before) if begin is None else step(n, row, begin(n, *before))
        h = project_row(n, row) if project_row else h
    # After the steps one launch copies the outputs from the rows into sequences. The rows are those of the cells and,
    # with a projection, those of h.
    kinds = [(rows, H), (projected, P)] if projects else [(rows, H)]
    keeps = keeps_rows(problem, arrays)
    with_gates = (problem.training or problem.return_gates) and not keeps and cell.kept > 0
    names = frozenset(name for name in cell.outputs if name != "gates" or with_gates)
    results = after_sweep(outputs_launch, problem, inputs, kinds, names)
    if cell.kept == 0:
        results["gates"] = mx.zeros((T, problem.B, 0), z.dtype)
    return results | {ROWS: rows.pieces} if keeps else results


def forward_kernels(cell: AnyCell) -> tuple["KernelMaker | None", "KernelMaker"]:
    """Return the functions that build the kernels of a forward step: the kernel that writes the row of the step, and
    before it the kernel that writes a row for this kernel, or None. A cell with a norm needs the first kernel because a
    norm needs the products of all units; a GRU that resets before the product, because this product needs the gate r of
    all units."""
    if cell.norm is not None:
        return norm_product_kernel, norm_forward_kernel
    return (gru_reset_kernel, gru_candidate_kernel) if cell.reset == "before" else (None, forward_kernel)


def backward(problem: Problem, arrays: Arrays, saved: dict[str, Any], cotangents: Arrays) -> Arrays:
    """Run the backward pass. Return the gradients of all arrays, by name.

    saved: the outputs of the forward pass. cotangents: the gradients of some outputs. If the gates were not saved, or
    if their rows were already used (see `taken_rows`), the forward pass runs again to compute them.

    First the launches of the steps compute the gradients of the states and preactivations (`sweep_backward`). Then MLX
    computes the gradients of the weights: in few products if `is_plain` allows it, else in `gradients_after_sweep`.
    operand: a dict with h_in, the vectors that were multiplied by Wh at all steps. numbers: the arrays that MLX
    computes from them before the steps: the normalised numbers, and q, the recurrent product of a GRU's candidate.
    """
    cell = problem.cell
    if saved.get("gates") is None and cell.reads_kept and not saved.get(ROWS):
        saved = forward(problem._replace(training=True), arrays)
    mask = whole_mask(problem, arrays) if cell.recurrent else None
    few = is_plain(problem, arrays) and not isinstance(cell, PointwiseCell)
    operand: Arrays = {}
    if few or takes_product(cell) or norms.of_product(cell):
        operand = recurrent_input(problem, arrays, saved["h"], mask)
    numbers: Arrays = {}
    inputs = backward_inputs(problem, arrays, saved, cotangents) | {"mask": mask}
    if cell.norm is not None:
        numbers = norms.numbers_before_sweep(problem, arrays, saved, operand.get("h_in"))
        inputs |= norms.inputs_of(problem, arrays)
        inputs |= {name: contiguous(array) for name, array in norms.joined(problem, arrays, numbers).items()}
    elif takes_product(cell):
        numbers = {"q": candidates(problem, arrays, operand["h_in"])}
    inputs["q"] = numbers.get("q")
    results = sweep_backward(problem, arrays, saved, inputs, wants_m=few and "Wp" in arrays)
    if few:
        return gradients_in_few_launches(problem, arrays, results | operand)
    results = norms.for_gradients(problem, results, numbers, saved.get("gates"))
    outputs = {name: saved[name] for name in saved if name != ROWS}
    after = own_gradients if isinstance(cell, PointwiseCell) else gradients_after_sweep
    return after(problem, arrays, outputs, results)


def sweep_backward(problem: Problem, arrays: Arrays, saved: dict[str, Any], inputs: Inputs, *, wants_m: bool) -> Arrays:
    """Run the backward steps. Return the results by name. The letters C, M, U and V count numbers per unit: states
    besides h, stored gradients of preactivations, and in a user's cell inputs and parameters.

    - dz [T, B, D M H]: the gradients of the preactivations
    - du [T, B, D U H]: the gradients of the inputs
    - dh0 [B, D P], dc0 [B, D C H]: the gradients of h0 and c0, each if the call has this array
    - dw [B, D V H]: the gradients of the parameters, not yet summed over the batch
    - carry [T, B, D N H] in float32, if the call has `keep`: the carries of N states before their multiplication by
      keep. A carry is the gradient of a state without the part that goes through the recurrent product. h has no carry
      in a cell that reads h only in this product
    - dh [T, B, D P], with a projection: the gradient of h
    - m [D, T, B, H], with a projection and if `wants_m`: the vector that the projection multiplies with Wp
    - d_out [T, B, D 3H], for a GRU without a norm whose reset comes after the product: the gradient of the recurrent
      product
    - d_product [T, B, D G H], with a norm of the products: their gradient. d_norm_c [T, B, D H], with a norm of c: the
      gradient of its result

    saved: the outputs of the forward pass. inputs: the arrays that the launches read, without weights and rows.
    """
    (T, B, H, P), D, cell, projects = problem[:4], problem.directions, problem.cell, "Wp" in arrays
    # K: the number of terms in each sum of the product dz Wh. In a GRU whose reset comes before the product, the
    # candidate has a separate product, so only two gates are counted.
    row, mask = no_row(problem), inputs["mask"]
    K, Wh = (2 if cell.reset == "before" else cell.gates) * H, arrays["Wh"] if cell.recurrent else None
    if Wh is not None and cell.reset == "before":
        Wh = mx.concatenate([Wh[..., cell.block(gate, H), :] for gate in "rz"], axis=-2)
    # If the gates were not copied into a sequence, each step reads them from a row of the forward pass.
    forward_rows = taken_rows(problem, saved)
    # Entries with `row`, and the entry `row`, only say that the kernels have these inputs; each launch gets others.
    inputs = inputs | {"before": row, "weights": None if Wh is None else transposed(Wh)}
    inputs |= {"rows": row, "row": step_number(0)} if forward_rows else {}
    inputs |= {"dh_now": row} if projects or cell.norm is not None else {}
    # The kernel that computes dh has P columns, the kernel of the cell H columns.
    of_dh = inputs | {"sizes": sizes(problem, mask, width=P, terms=K)}
    inputs |= {"sizes": sizes(problem, mask, width=H, terms=K), "numbers": numbers_of(cell) if cell.stops_c else None}
    rows, dh_rows = rows_of(problem, projects)
    step = backward_step(problem, arrays, inputs, rows)
    dh = None
    if projects or cell.norm is not None:
        unchanged = unclipped(problem, arrays, saved) if projects else None
        dh = each_step(dh_kernel, problem, of_dh | {"unclipped": unchanged}, dh_rows if projects else None)
    for n in reversed(range(T)):
        row = step(n, row, dh(n, row)) if dh else step(n, row, *(forward_rows.pop() if forward_rows else ()))
    wanted = {"dc0": "c0" in arrays, "m": wants_m, "carry": "keep" in inputs, "du": cell.inputs > 0}
    wanted |= {"d_out": takes_product(cell) and cell.norm is None, "dw": cell.summed > 0}
    kinds = [(rows, H), (dh_rows, P)] if projects else [(rows, H)]
    results = after_sweep(gradients_launch, problem, inputs, kinds, frozenset(n for n in wanted if wanted[n]))
    if "h0" in arrays:
        # dh0 is the dh of step -1, before the first step. The row may be padded, so it is cut to B D P numbers.
        last = each_step(dh0_kernel, problem, of_dh | {"dh": None})
        results["dh0"] = last(-1, row)[: B * D * P].reshape(B, D * P)
    return results


def backward_step(problem: Problem, arrays: Arrays, inputs: Inputs, rows: Rows) -> Callable[..., mx.array]:
    """Return a function that launches a backward step: called with the step's number, the row of the launch before and
    the other rows that its first kernel reads, it returns the step's row. inputs: the arrays that the kernels read,
    with the weights and sizes for the product dz Wh. rows: the object that collects the rows of the steps.

    A GRU whose reset comes before the product needs a second launch, for the candidate's product. With a projection the
    product of the step is dm = dh Wp, and dh already includes the mask and the cotangents of h. With a norm and a
    projection a launch before computes dm."""
    cell, mask, H = problem.cell, inputs["mask"], problem.H
    of_m: Inputs = {}
    if "Wp" in arrays:
        of_m = {"Wp": transposed(arrays["Wp"]), "sizes": sizes(problem, mask, width=H, terms=problem.P)}
    if cell.norm is not None:
        step = each_step(norm_backward_kernel, problem, inputs, rows)
        if not of_m:
            return step
        dm = each_step(norm_dm_kernel, problem, of_m | {"step": inputs["step"], "before": inputs["before"]})
        return lambda n, row, dh: step(n, row, dm(n, dh))
    if cell.reset == "before":
        of_n = transposed(arrays["Wh"][..., cell.block("n", H), :])
        of_reset = inputs | {
            "weights": of_n,
            "sizes": sizes(problem, mask, width=H, terms=H),
            "now_row": inputs["before"],
        }
        step = each_step(backward_kernel, problem, inputs)
        reset = each_step(gru_reset_backward_kernel, problem, of_reset, rows)
        return lambda n, row: reset(n, step(n, row))
    if of_m:
        inputs = inputs | {"weights": of_m["Wp"], "sizes": of_m["sizes"]} | dict.fromkeys(("mask", "dh", "dhT"))
    return each_step(backward_kernel, problem, inputs, rows)


def backward_inputs(problem: Problem, arrays: Arrays, saved: dict[str, Any], cotangents: Arrays) -> Inputs:
    """Return the arrays that the launches of backward steps read, apart from the mask, the weights, and the arrays of
    norms. A cotangent has the name of its output with a d before it. None means that the cell has no such array, or
    that its backward steps do not read it."""
    cell = problem.cell
    inputs = options(problem, arrays, ("peephole", "inputs", "params"))
    inputs |= {name: contiguous(saved.get(name)) for name in (("h", "c") if cell.reads_h else ("c",))}
    # If the steps do not read h, they do not need h0 either. With a norm h0 enters through h_in, from which
    # `numbers_before_sweep` computes the normalised numbers.
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
"""The key under which the forward pass returns the arrays with its rows (the arrays that its launches wrote), so that
the backward pass can read the gates from them."""


def keeps_rows(problem: Problem, names: Collection[str]) -> bool:
    """Return whether the backward pass reads the gates from the rows of the forward pass, so that the forward pass need
    not copy them into a sequence. names: the names of the arrays that the call has.

    This is so for an LSTM and for cells written by the user, without a projection and without a norm, if the caller
    does not ask for the gates. Other backward passes cannot read rows: a step of a GRU needs the gates of two steps,
    and a projection needs the gates of all steps in one launch.
    """
    cell = problem.cell
    reads_rows = cell.kept > 0 and cell.op in ("lstm", "pointwise") and "Wp" not in names
    return problem.training and not problem.return_gates and reads_rows and cell.norm is None


def taken_rows(problem: Problem, saved: dict[str, Any]) -> list[tuple[mx.array, mx.array]]:
    """Return the rows of the forward pass as inputs for the launches of the backward steps: for each step a pair (the
    array that contains the step's row, the index of the row in this array). Return an empty list if the forward pass
    returned no rows.

    The list of arrays in `saved` becomes empty. So only the returned list refers to these arrays, and an array is freed
    as soon as the caller has removed its last row from the returned list. piece: an array of one or more rows of
    `length` elements.
    """
    pieces: list[mx.array] = saved.get(ROWS, [])
    length = sum([piece.size for piece in pieces]) // problem.T
    taken = [(piece, step_number(n)) for piece in pieces for n in range(piece.size // length)]
    pieces.clear()
    return taken


def options(problem: Problem, arrays: Arrays, more: tuple[str, ...]) -> Inputs:
    """Return the inputs that all launches of a pass share: lengths, h0, c0, keep and the arrays named in `more`, if the
    call has them. They are made contiguous, so that no launch copies them. A plain RNN does not read keep, because its
    mask already includes keep. The entry step only says that the kernels have this input; each launch gets the number
    of its step for it. The kernels read h0, Wh and Wp in the address space `device`, so small arrays are padded
    (`in_device_memory`)."""
    names = ("h0", "c0", *more) if problem.cell.op == "rnn" else ("h0", "c0", "keep", *more)
    inputs: Inputs = {"step": step_number(0), "lengths": arrays.get("lengths")}
    for name in names:
        if name in arrays:
            inputs[name] = contiguous(arrays[name])
    return inputs | {name: in_device_memory(inputs[name]) for name in ("h0", "Wh", "Wp") if name in inputs}


def rows_of(problem: Problem, projects: bool) -> tuple[Rows, Rows]:
    """Return two empty `Rows` objects: one for the rows of the cells, one for the rows of the projection. projects:
    whether the call has a projection. The launch after all steps can read `rows_left` arrays of rows; with a projection
    each kind of rows gets half of them."""
    left = problem.limits.rows_left // 2 if projects else problem.limits.rows_left
    return Rows(problem.T, left), Rows(problem.T, left)


def quantized_parts(arrays: Arrays, dtype: mx.Dtype) -> Inputs:
    """Return the scales and biases of the quantized weights Wh and Wp, as inputs of kernels."""
    parts: Inputs = {}
    for name in ("Wh", "Wp"):
        if is_packed(name, arrays):
            scales, biases = scales_of(arrays, name, dtype)
            parts |= {f"{name}_scales": contiguous(scales), f"{name}_biases": contiguous(biases)}
    return parts


def sizes(problem: Problem, mask: mx.array | None, *, width: int, terms: int) -> mx.array:
    """Return the input array `sizes` of a launch; metal/stepwise.metal lists its numbers. width: how many columns the
    launch computes (units, or numbers of h). terms: how many terms each sum of its product has. The array has fewer
    than 8 elements, so that MLX binds it in Metal's address space `constant`."""
    differ = mask is not None and mask.shape[0] > 1
    return constant((problem.T, problem.B, width, terms, problem.directions, problem.reverse, differ), mx.int32)


def no_row(problem: Problem) -> mx.array:
    """Return an array that the launch of the first step gets in place of the row of the launch before. The kernels do
    not read its 8 zeros. With fewer elements MLX would bind it in another address space than a row."""
    return constant((0,) * 8, row_type(problem))


def in_device_memory(array: mx.array | None) -> mx.array | None:
    """Return the array, padded to 8 numbers if it is smaller. MLX binds arrays of fewer than 8 numbers in another
    address space (`constant`), and the kernels can read weights and h0 only in the address space `device`."""
    return array if array is None or array.size >= 8 else mx.pad(array.reshape(-1), (0, 8 - array.size))


def transposed(weights: mx.array) -> mx.array | None:
    """Return the transpose [.., m, n] of matrices [.., n, m], contiguous and in the address space `device`."""
    return in_device_memory(contiguous(mx.swapaxes(weights, -1, -2)))


# --- Sizes ---

UNITS = {1: 32, 2: 16}
"""{gates of a cell: how many hidden units a threadgroup computes in the forward pass}. With more gates it computes 8
units. So the product of a built-in cell has 24 or 32 columns."""

SLICES = {8: 4, 16: 2}
"""{columns of a threadgroup: how many simdgroups share the work on eight columns of a product of 8 x 8 matrices}. For
other numbers of columns it is one. It is also one with quantized weights, because several simdgroups would read the
same words."""

TILES = {8: ((8, 32), (8, 16), (8, 8)), 32: ((32, 32), (16, 32), (16, 16))}
"""{result of `stepwise_rows`: the tiles (rows, columns), largest first, from which `tile_of` chooses}. They are for
products of 8 x 8 matrices with one column per unit."""


def stepwise_rows(B: int, cut: Cut | None = None) -> int:
    """Return how many of B batch items a threadgroup computes. cut: a limit on this number that a measurement has
    chosen, or None. With fewer than 8 items the product is computed in lanes, else with 8 x 8 matrices."""
    rows = 1 if B == 1 else 4 if B < 8 else 8 if B < 32 else 32
    return min(rows, cut.rows) if cut else rows


def forward_tile(problem: Problem) -> tuple[int, int, int]:
    """Return how a forward step is divided among threadgroups: (the batch items of a threadgroup, the columns of its
    product, its units). A column is one gate of one unit. A cell without a recurrent product has one unit per thread,
    256 in all."""
    cell, rows = problem.cell, stepwise_rows(problem.B, problem.cut)
    if not cell.recurrent:
        return 1, 256, 256
    units = UNITS.get(cell.gates, 8)
    # With 4 batch items a thread has one sum per gate and item, so many gates need too many registers. From 8 items on,
    # 8 x 8 matrices are used, which need no such sums. But a `cut` limits the number of items, so then a threadgroup
    # gets one item. With 32 items the sums of many gates need more than the 32 KB of threadgroup memory.
    if rows == 4 and cell.gates > 8:
        rows = 1 if problem.cut else 8
    if rows == 32 and cell.gates > 15:
        rows = 16
    return rows, units * cell.gates, units


def tile_of(problem: Problem, width: int) -> tuple[int, int]:
    """Return (rows, columns): how many batch items and how many columns of a product one threadgroup computes. width:
    the number of columns of the whole product. A cell without a recurrent product has one unit per thread, 256 in all.

    For fewer than 8 batch items a threadgroup computes 8 columns in lanes. For more items it multiplies 8 x 8 matrices.
    Then the result is the largest tile with which there are enough threadgroups for all GPU cores.
    """
    rows = stepwise_rows(problem.B, problem.cut)
    if not problem.cell.recurrent:
        return 1, 256
    if rows < 8:
        return rows, 8
    # With smaller tiles there are more threadgroups, but operands and weights are read more often. We assume, but have
    # not measured, that idle cores cost more time than these reads. So the largest tile is chosen that gives each core
    # work.
    tiles = TILES[rows]
    groups = [-(-problem.B // high) * -(-width // wide) * problem.directions for high, wide in tiles]
    return next((tile for tile, count in zip(tiles, groups, strict=True) if count >= problem.cores), tiles[-1])


def memory_of(tile: tuple[int, int], slices: int) -> int:
    """Return how many bytes of threadgroup memory a product needs. tile: its rows and columns. slices: in a product of
    8 x 8 matrices, how many simdgroups share the work on eight columns.

    A product of matrices stores its operand there, in rows of 132 floats or 528 bytes (PITCH in
    metal/stepwise_tiles.metal), and later its sums in the same memory. A product in lanes, for fewer than 8 rows,
    stores only its sums. The memory is declared as vectors of 16 bytes, so the size is rounded up to a multiple of 16.
    """
    rows, columns = tile
    sums = 4 * slices * rows * columns
    return -(-sums // 16) * 16 if rows < 8 else max(528 * rows, sums)


def index_bits(problem: Problem) -> int:
    """Return the number of bits of the integers that index arrays in the kernels: 32, or 64 if an array may have too
    many elements. With 64 bits a step needs twice as many instructions besides the multiply-adds of the recurrent
    product, so they are used only if necessary."""
    # blocks: how many elements an array has for one unit of one batch item, at most. A row, the array that a launch
    # writes, has the unit's gates (G elements), h before a projection (1) and c in float32 (2, if a row has 16-bit
    # elements). The last factor of `largest` is T * B for sequences, and `width` for weights: Wh has D G H P elements.
    width, cell, blocks = max(problem.H, problem.P), problem.cell, problem.cell.gates + 3
    # In a user's cell a row has at most these further numbers: two gradients per gate, float32 gradients of the states
    # (with `keep` twice) and of the parameters, the gradients of the inputs, and the saved values.
    if isinstance(cell, PointwiseCell):
        blocks += 2 * cell.gates + 4 * cell.graph.states + 2 * cell.graph.params + cell.graph.inputs + cell.kept
    largest = problem.directions * blocks * width * max(problem.T * problem.B, width)
    return 32 if largest < problem.limits.index else 64


def source_of(problem: Problem, name: str, files: tuple[str, ...], body: str, own: str = "") -> Source:
    """Return the source of a kernel from its parts, which the class `Source` describes. If array indices have 64 bits,
    the name gets a suffix: MLX caches compiled code by the name, so another source needs another name."""
    wide = index_bits(problem) == 64
    return Source(f"{name}__64" if wide else name, files, body, "long" if wide else "int", own)


def row_type(problem: Problem) -> mx.Dtype:
    """Return the dtype of the elements of a row, the array that a launch writes. A row has both float32 numbers and
    numbers in the dtype of the call. If that has 16 bits, the elements of the row are uint16, and a float32 number
    takes two of them."""
    return mx.float32 if problem.dtype == mx.float32 else mx.uint16


def row_length(problem: Problem, width: int, blocks: int, floats: int) -> int:
    """Return the number of elements of a row with `blocks` arrays [B, D width] in the dtype of the call, and `floats`
    arrays of the same shape in float32, such as c or the gradient of c. The number is at least 8, because MLX binds
    smaller arrays in another address space."""
    words = floats * (4 // problem.dtype.size)
    return max(8, problem.B * problem.directions * width * (blocks + words))


# --- The launches of a step ---


class StepShader(NamedTuple):
    """A shader for one step, from which a `StepKernel` is built. name: the name of the function in metal/. fields: the
    names of all arrays that it can read, separated by spaces, in the order in which a launch gets them. template: the
    template arguments that only this shader has. cell: whether the cell's struct is a template argument, too."""

    name: str
    fields: str
    template: Template
    cell: bool = True


class StepKernel:
    """The kernel of one launch of a step. It has two variants: `launch` only runs the step; `joining` returns launches
    with additional threadgroups, which also copy several arrays of earlier rows into one array.

    present: the names of the arrays that the call has. step: the shader. tile: how many rows and columns of the product
    a threadgroup computes. units: a pair of numbers of units or columns, (all, those of one threadgroup); their
    quotient, rounded up, is the number of threadgroups. length: the number of elements of the row that a launch writes.
    written: their dtype, or None for `row_type`.
    """

    def __init__(
        self,
        problem: Problem,
        present: Collection[str],
        step: StepShader,
        *,
        tile: tuple[int, int],
        units: tuple[int, int],
        length: int,
        written: mx.Dtype | None = None,
    ):
        """Build the source of the kernel and its first launch. The class's docstring describes the parameters."""
        shader, fields, template, cell = step
        rows, columns = tile
        self.problem: Problem = problem
        # own: the generated source of a user's cell; "" for a built-in cell. Kernels with different sources need
        # different names, so the kernel's name contains the cell, unless the name of the shader does.
        own = struct_text(problem.cell) + norm_text(problem.cell) if isinstance(problem.cell, PointwiseCell) else ""
        self.own: str = own
        self.name: str = shader if "gru" in shader else f"{name_of(own) if own else problem.cell.op}_{shader}"
        self.output: tuple[int, mx.Dtype] = length, written or row_type(problem)
        self.inputs: dict[str, bool] = {field: field in present for field in fields.split()}
        self.names: list[str] = [field for field, is_there in self.inputs.items() if is_there]
        quantized, lanes = any(is_packed(field, present) for field in self.names), rows < 8
        # slices: how many simdgroups share eight columns of a product of 8 x 8 matrices, each computing a part of every
        # sum. threads: the constant THREADS of the struct that computes the product in metal/: 256 in lanes (64 with
        # quantized weights); with 8 x 8 matrices a simdgroup of 32 for eight columns and slice, so 4 per column.
        slices = 1 if lanes or quantized else SLICES.get(columns, 1)
        self.threads: int = (64 if quantized else 256) if lanes else 4 * columns * slices
        self.groups: tuple[int, ...] = -(-units[0] // units[1]), -(-problem.B // rows), problem.directions
        # The template arguments of the shader, such as <LSTMCell<OPTIONS>, ByLanes<ROWS, COLUMNS>, SAVES, S>. The
        # source declares the names in them with the values in `template`.
        product = "QuantizedByLanes" if lanes and quantized else "ByLanes" if lanes else "ByTiles"
        if not problem.cell.recurrent:
            product = "NoProduct"
        product += "<ROWS, COLUMNS>" if lanes else "<ROWS, COLUMNS, SLICES>"
        arguments = (["Own" if own else STRUCTS[problem.cell.op]] if cell else []) + [product]
        arguments += [*template, "S"]
        self.template: Template = {"ROWS": rows, "COLUMNS": columns, "S": problem.dtype, "X": row_type(problem)}
        if not lanes:
            self.template["SLICES"] = slices
        if cell and not own:
            self.template["OPTIONS"] = cell_number(problem.cell, "peephole" in self.names)
        self.template |= template
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
        # most: how many arrays of earlier rows a launch can copy into one. Metal binds at most 31 arrays to a launch. A
        # launch that copies binds 4 arrays besides its inputs and the copied arrays: `after`, `joined`, `starts` and
        # `first`.
        self.most: int = joined_beside(len(self.names) + 4)
        self.joining: Callable[[tuple[int, ...]], tuple[Launch, list[mx.array]]] = cache(self.prepare_join)

    def prepare(
        self, name: str, body: str, joined: int = 0, more_groups: int = 0, pieces: tuple[str, ...] = ()
    ) -> Launch:
        """Return a launch of the shader. body: the statements of its source. For a launch that also copies arrays of
        earlier rows into one new array, pieces are the names of the inputs with these rows, joined is the number of
        elements of the new array, and more_groups is the number of additional threadgroups that copy."""
        outputs: Outputs = {"after": ((self.output[0],), self.output[1])}
        if joined:
            outputs["joined"] = (joined,), self.output[1]
        inputs = self.inputs | dict.fromkeys(pieces, True)  # True: the launch has all of these inputs
        groups = self.groups[0] + more_groups, *self.groups[1:]
        source = source_of(self.problem, name, self.files, body, self.own)
        return prepare(source, self.template, inputs, outputs, groups, self.threads)

    def prepare_join(self, steps: tuple[int, ...]) -> tuple[Launch, list[mx.array]]:
        """Return a launch of the step that also copies several arrays of rows into one array, and two small arrays that
        this launch reads: where each copied array begins in the new array, and which threadgroups copy. steps: for each
        array to be copied, how many rows it contains. `joining` is this function with a cache.

        The kernel always has `self.most` inputs for arrays to copy, so that one kernel serves for all numbers of copied
        arrays. In its body the threadgroups of the step call the step's shader (`self.call`), and the `more`
        threadgroups after them copy. first: the number of the first of these threadgroups, the threads of a
        threadgroup, and the number of all threads that copy."""
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
"""The files in metal/ that the kernels of a step with layer normalisation need, besides the files that all kernels
need."""

SHADERS = {
    "stepwise_forward": ("stepwise_forward",),
    "stepwise_project": ("stepwise_forward",),
    "stepwise_gru_reset": ("stepwise_forward", "stepwise_gru"),
    "stepwise_gru_candidate": ("stepwise_forward", "stepwise_gru"),
    "stepwise_backward": ("stepwise_backward",),
    "stepwise_gru_reset_backward": ("stepwise_backward", "stepwise_gru"),
    "stepwise_dh": ("stepwise_backward",),
    **{f"stepwise_norm_{name}": STEP_NORM_FILES for name in ("product", "forward", "dh", "backward", "dh0")},
}
"""{name of a shader of a step: the files in metal/ that it needs, besides the files that all of these shaders need}."""


def cell_files(problem: Problem) -> tuple[str, ...]:
    """Return the names of the shader files with which the source of a kernel begins."""
    return "arrays", "cell", "pointwise" if problem.cell.op == "pointwise" else f"cell_{problem.cell.op}"


LANE = "simdgroup_index_in_threadgroup, thread_index_in_simdgroup"
"""The last two arguments in a call of a step's shader: the number of the simdgroup in the threadgroup, and that of the
lane in the simdgroup."""


CHANGING = frozenset(("step", "before", "h_before", "reset_row", "now_row", "dh_now", "rows", "row", "product"))
"""The names of the inputs that differ from step to step: the number of the step, and rows that earlier launches wrote.
They are the first fields of each shader."""


class StepLaunch:
    """A callable that launches one kernel at each step of a pass. inputs: the arrays that the kernel reads, by name;
    each call gets new arrays for those named in CHANGING. rows: a `Rows` object that collects the rows and plans at
    which steps a launch copies several earlier arrays into one (a join), or None."""

    def __init__(self, kernel: StepKernel, inputs: Arrays, rows: Rows | None = None):
        """Prepare the launches of a pass. fixed: the inputs that all steps share, in the order of the kernel's fields.
        The plan of `rows` depends on how many arrays this kernel can join at once."""
        self.kernel: StepKernel = kernel
        self.launch: Launch = kernel.launch
        self.rows: Rows | None = rows
        self.fixed: list[mx.array] = [inputs[name] for name in kernel.names if name not in CHANGING]
        if rows is not None:
            rows.plan(kernel.most)

    def __call__(self, n: int, *changed: mx.array) -> mx.array:
        """Launch step n and return the row that it writes. changed: the inputs of this step that are named in CHANGING,
        except for the step's number, in the order of the kernel's fields."""
        inputs, rows = [step_number(n), *changed, *self.fixed], self.rows
        if rows is None:
            return self.launch(inputs)[0]
        join = next(rows.joins)
        row = self.launch(inputs)[0] if join is None else self.join(inputs, rows.pieces, join)
        rows.pieces.append(row)
        return row

    def join(self, inputs: list[mx.array], pieces: list[mx.array], join: Join) -> mx.array:
        """Launch a step that also copies some of the arrays `pieces`, which earlier steps wrote, into one new array.
        join: which arrays these are. In the list `pieces` replace the copied arrays by the new one, so that the last
        launch of the pass has fewer arrays to read. Return the row that the step itself writes."""
        due = slice(join.first, join.first + len(join.steps))
        # The kernel has a fixed number of inputs for arrays to copy. Unused inputs get the last array again; no thread
        # reads them.
        arrays = pieces[due] + pieces[due.stop - 1 : due.stop] * (self.kernel.most - len(join.steps))
        launch, sizes = self.kernel.joining(join.steps)
        row, *pieces[due] = launch(inputs + arrays + sizes)
        return row


@cache
def step_number(n: int) -> mx.array:
    """Return the number of a step as an array, the input `step` of a launch. Each array is made only once and
    cached."""
    return mx.array(n, mx.int32)


def without_absent(inputs: Inputs) -> Arrays:
    """Return the inputs that the call has: those that are not None."""
    return {name: array for name, array in inputs.items() if array is not None}


KernelMaker = Callable[[Problem, tuple[str, ...]], StepKernel]
"""The type of the functions `..._kernel` below. Their arguments are the problem and the names of the call's arrays."""


def each_step(make: KernelMaker, problem: Problem, inputs: Inputs, rows: Rows | None = None) -> StepLaunch:
    """Return a callable that launches one kernel at each step: called with the step's number and the rows that the step
    reads, it returns the row that the step writes. make: a function that builds the kernel for these inputs. rows: the
    object that collects the written rows, if the launch after all steps needs them."""
    present = without_absent(inputs)
    return StepLaunch(make(problem, tuple(present)), present, rows)


@cached
def forward_kernel(problem: Problem, present: tuple[str, ...]) -> StepKernel:
    """Return the kernel of a forward step. metal/stepwise_forward.metal describes its inputs and the row that it
    writes."""
    H, cell, (rows, columns, units) = problem.H, problem.cell, forward_tile(problem)
    saves = problem.training or problem.return_gates
    length = row_length(problem, H, blocks=1 + cell.kept if saves else 1, floats=cell.carried)
    fields = (
        "step before h_before z Wh Wh_scales Wh_biases h0 c0 peephole bhn inputs params mask keep lengths sizes numbers"
    )
    shader = StepShader("stepwise_forward", fields, {"SAVES": saves})
    return StepKernel(problem, present, shader, tile=(rows, columns), units=(H, units), length=length)


@cached
def gru_reset_kernel(problem: Problem, present: tuple[str, ...]) -> StepKernel:
    """Return the first kernel of a forward step of a GRU whose reset comes before the candidate's product. It writes a
    row [3, B, D H] with r * mask * h (h of the step before), r and z. Only the second kernel of the step reads this
    row, so it has the dtype of the call. The product has one column for each of the gates r and z: 32 columns for 16
    units. The shader is in metal/stepwise_gru.metal."""
    fields = "step before z Wh Wh_scales Wh_biases h0 mask lengths sizes"
    shader = StepShader("stepwise_gru_reset", fields, {})
    length, written = row_length(problem, problem.H, blocks=3, floats=0), problem.dtype
    tile = stepwise_rows(problem.B, problem.cut), 32
    return StepKernel(problem, present, shader, tile=tile, units=(problem.H, 16), length=length, written=written)


@cached
def gru_candidate_kernel(problem: Problem, present: tuple[str, ...]) -> StepKernel:
    """Return the second kernel of a forward step of a GRU whose reset comes before the candidate's product. It reads
    the row that `gru_reset_kernel` wrote, and writes a row with h and, if the backward pass or the caller needs them,
    the three gates. The shader is in metal/stepwise_gru.metal."""
    saves = problem.training or problem.return_gates
    fields = "step before reset_row z Wh Wh_scales Wh_biases h0 keep lengths sizes"
    shader = StepShader("stepwise_gru_candidate", fields, {"SAVES": saves})
    length = row_length(problem, problem.H, blocks=4 if saves else 1, floats=0)
    tile = stepwise_rows(problem.B, problem.cut), 32
    return StepKernel(problem, present, shader, tile=tile, units=(problem.H, 32), length=length)


@cached
def project_kernel(problem: Problem, present: tuple[str, ...]) -> StepKernel:
    """Return the kernel that computes the projection of a step, h = m Wp^T, and writes a row with h [B, D P]. If h is
    clipped, the kernel reads the limit from the array numbers; otherwise it does not get this array. The shader is in
    metal/stepwise_forward.metal."""
    clips = problem.cell.projection_clip is not None
    present = present if clips else tuple(name for name in present if name != "numbers")
    shader = StepShader("stepwise_project", PROJECTED, {"FLOATS": problem.cell.carried}, cell=False)
    return product_kernel(problem, present, shader, problem.P)


PROJECTED = "step before Wp Wp_scales Wp_biases sizes numbers"
"""The names of the arrays that the shader `stepwise_project` can read."""


def product_kernel(
    problem: Problem, present: tuple[str, ...], shader: StepShader, width: int, written: mx.Dtype | None = None
) -> StepKernel:
    """Return a kernel that computes a matrix product and writes it as a row [B, D width]. width: the number of columns
    per direction. written: the dtype of the row's elements, or None for `row_type`."""
    tile, length = tile_of(problem, width), row_length(problem, width, blocks=1, floats=0)
    return StepKernel(problem, present, shader, tile=tile, units=(width, tile[1]), length=length, written=written)


@cached
def backward_kernel(problem: Problem, present: tuple[str, ...]) -> StepKernel:
    """Return the kernel of a backward step. metal/stepwise_backward.metal describes its inputs and the row that it
    writes. A threadgroup computes a tile of the product: some batch items, and one column per unit."""
    tile = tile_of(problem, problem.H)
    fields = (
        "step before dh_now rows row weights gates h c h0 c0 q peephole bhn inputs params mask keep lengths "
        "dh dc dgates dhT dcT sizes numbers"
    )
    shader = StepShader("stepwise_backward", fields, {})
    blocks = problem.cell.gradients + problem.cell.inputs
    length = backward_length(problem, present, blocks)
    return StepKernel(problem, present, shader, tile=tile, units=(problem.H, tile[1]), length=length)


def backward_length(problem: Problem, present: Collection[str], blocks: int) -> int:
    """Return the number of elements of the row (the array) that a backward step writes. blocks: how many numbers it has
    per unit in the dtype of the call. floats: how many float32 numbers it has per unit. These are a carry for each
    state besides h, and for h if a step reads h outside the recurrent product; with `keep` each carry twice, also
    before its multiplication by keep; and the gradients of the parameters (`summed`), which are summed from step to
    step."""
    cell = problem.cell
    floats = (cell.carried + cell.passes_h) * (2 if "keep" in present else 1) + cell.summed
    return row_length(problem, problem.H, blocks, floats)


@cached
def gru_reset_backward_kernel(problem: Problem, present: tuple[str, ...]) -> StepKernel:
    """Return the second kernel of a backward step of a GRU whose reset comes before the candidate's product. It reads
    the row that `backward_kernel` wrote, and writes a copy that includes the gradient of the gate r and a further part
    of the gradient of h. The shader is in metal/stepwise_gru.metal."""
    tile = tile_of(problem, problem.H)
    fields = "step now_row weights gates h h0 mask keep lengths sizes"
    shader = StepShader("stepwise_gru_reset_backward", fields, {})
    length = backward_length(problem, present, problem.cell.gradients)
    return StepKernel(problem, present, shader, tile=tile, units=(problem.H, tile[1]), length=length)


@cached
def dh_kernel(problem: Problem, present: tuple[str, ...]) -> StepKernel:
    """Return the kernel that computes the gradient of h, [B, D P], at each step. A cell with a projection needs it
    before the product with Wp, a cell with a norm because the norms need this gradient of all units of an item. With a
    norm it is without the part that does not go through the products."""
    return gradient_of_h(problem, present, "dh", None)


@cached
def dh0_kernel(problem: Problem, present: tuple[str, ...]) -> StepKernel:
    """Return the kernel that computes dh0 [B, D P], once after the backward steps. It writes elements in the dtype of
    the call, because dh0 is a result and not a row."""
    return gradient_of_h(problem, present, "dh0", problem.dtype)


def gradient_of_h(problem: Problem, present: tuple[str, ...], name: str, written: mx.Dtype | None) -> StepKernel:
    """Return a kernel that computes a gradient of h [B, D P] from the gradients of the next step's products. name: "dh"
    or "dh0", the end of its shader's name in metal/stepwise_norm.metal; without a norm metal/stepwise_backward.metal
    has one shader for both. written: as in `product_kernel`. With a norm the kernel does not need the gates, because in
    the rows that it reads the gradients of a GRU's products are already multiplied by r."""
    fields = "step before weights gates mask keep lengths dh dhT unclipped sizes"
    shader = "stepwise_dh"
    if problem.cell.norm is not None:
        shader, present = f"stepwise_norm_{name}", tuple(field for field in present if field != "gates")
    return product_kernel(problem, present, StepShader(shader, fields, {}), problem.P, written)


# --- The launches of a step with layer normalisation ---


def item_tile(cell: AnyCell) -> tuple[int, int]:
    """Return the tile (1, columns) of kernels in which each threadgroup of 256 threads computes all units of one batch
    item. These kernels have no product. Their `columns` is the size, in floats, of the threadgroup memory in which
    simdgroups exchange sums: 3 numbers for each of 8 simdgroups and each norm of the gates. It is at least 128, which
    also leaves room for a norm of c. metal/stepwise_norm.metal describes this memory."""
    return 1, max(128, 24 * norm_blocks(cell))


@cached
def norm_product_kernel(problem: Problem, present: tuple[str, ...]) -> StepKernel:
    """Return the first kernel of a forward step of a cell with a norm. It writes a row with the recurrent products of
    all gates, [B, D G H], as float32 numbers (floats=1). The shader is in metal/stepwise_norm.metal."""
    width = problem.cell.gates * problem.H
    tile = tile_of(problem, width)
    fields = "step before h_before Wh Wh_scales Wh_biases h0 mask lengths sizes"
    shader = StepShader("stepwise_norm_product", fields, {})
    length = row_length(problem, width, blocks=0, floats=1)
    return StepKernel(problem, present, shader, tile=tile, units=(width, tile[1]), length=length)


@cached
def norm_forward_kernel(problem: Problem, present: tuple[str, ...]) -> StepKernel:
    """Return the second kernel of a forward step of a cell with a norm. It reads the row of `norm_product_kernel`, and
    writes the same row as `forward_kernel`. A threadgroup has all units of one batch item: units=(1, 1)."""
    cell, saves = problem.cell, problem.training or problem.return_gates
    length = row_length(problem, problem.H, blocks=1 + cell.kept if saves else 1, floats=cell.carried)
    fields = "step before product z h0 c0 peephole bhn inputs params keep lengths sizes numbers " + " ".join(
        norms.READ["forward"]
    )
    shader = StepShader("stepwise_norm_forward", fields, {"SAVES": saves})
    return StepKernel(problem, present, shader, tile=item_tile(cell), units=(1, 1), length=length)


@cached
def norm_dm_kernel(problem: Problem, present: tuple[str, ...]) -> StepKernel:
    """Return the kernel that computes the gradient of m, [B, D H], for a cell with a norm and a projection h = m Wp^T.
    It multiplies the gradient of this step's h by Wp, with the shader of the projection, between the two kernels of all
    cells with a norm."""
    shader = StepShader("stepwise_project", PROJECTED, {"FLOATS": 0}, cell=False)
    return product_kernel(problem, present, shader, problem.H)


@cached
def norm_backward_kernel(problem: Problem, present: tuple[str, ...]) -> StepKernel:
    """Return the last kernel of a backward step of a cell with a norm. metal/stepwise_norm.metal describes the row that
    it writes. rows and row are in `fields` only because code of the shader that all cells share names them."""
    cell = problem.cell
    blocks = cell.gates + cell.inputs + (cell.gradients if norms.of_product(cell) else 0) + norms.of_state(cell)
    fields = (
        "step before dh_now rows row gates h c h0 c0 q peephole bhn inputs params keep lengths dc dgates dcT sizes "
        "numbers norm_scale norm_c norm_y norm_r norm_c_y"
    )
    shader = StepShader("stepwise_norm_backward", fields, {})
    length = backward_length(problem, present, blocks)
    return StepKernel(problem, present, shader, tile=item_tile(cell), units=(1, 1), length=length)


# --- The launch after all steps ---

Kind = tuple[Rows, int]
"""All rows of one kind (of the cells, or of the projection), and the width of the arrays in them: H or P."""

Layout = tuple[tuple[tuple[int, ...], int, int], ...]
"""For each kind of rows a triple: (the number of rows in each array, the number of elements of a row, the width H or
P)."""


class Sequences(NamedTuple):
    """The launch after all steps, which copies the rows of a pass (the arrays that its steps wrote) into sequences such
    as h [T, B, H]. inputs, outputs: the names of its arrays, without those of rows and sizes. sizes: two small arrays
    that it reads: where each array of rows begins, counted in rows, and the sizes of each kind of rows."""

    launch: Launch
    inputs: list[str]
    outputs: list[str]
    sizes: list[mx.array]


def after_sweep(
    make: Callable[[Problem, tuple[str, ...], Layout, frozenset[str]], Sequences],
    problem: Problem,
    inputs: Inputs,
    kinds: list[Kind],
    names: frozenset[str],
) -> Arrays:
    """After the last step of a pass, launch the kernel that copies the results from the rows (the arrays that the steps
    wrote) into sequences. Return the results by name. make: the function that builds this launch. kinds: the rows to
    read, each kind with its width, H or P. names: the names of the results that the call needs. The kernel has inputs
    for LEFT arrays of rows; if there are fewer, the last one is passed again."""
    left: list[mx.array] = []
    for rows, _ in kinds:
        left += rows.pieces
    # The last array contains only the row of the last launch, so its size is the size of one row.
    layout = tuple([(rows.steps, rows.pieces[-1].size, width) for rows, width in kinds])
    present = without_absent(inputs)
    sequences = make(problem, tuple(present), layout, names)
    arrays = [present[name] for name in sequences.inputs] + left + left[-1:] * (LEFT - len(left)) + sequences.sizes
    return dict(zip(sequences.outputs, sequences.launch(inputs=arrays), strict=True))


def prepare_sequences(
    problem: Problem,
    layout: Layout,
    name: str,
    body: str,
    template: Template,
    inputs: dict[str, bool],
    outputs: Outputs,
) -> Sequences:
    """Return the launch that copies the rows of a pass (the arrays that its steps wrote) into sequences. It has one
    thread per batch item, unit, step and direction, in threadgroups of 256.

    layout: for each kind of rows the number of rows in each array, the elements of a row, and the width H or P. name:
    the kernel's name. body: the Metal statements that call the shader. inputs: {array that it can read besides the
    rows: whether the call has it}. outputs: {result: its shape and dtype, or None if it is not written}.
    """
    # starts: the index of the first row of each of LEFT arrays; the arrays that the pass does not have count as empty.
    starts = starts_of(sum((steps for steps, _, _ in layout), ()), LEFT)
    # kinds: for each kind of rows the elements of a row, the width H or P, and the index of its first row. X: the type
    # of a row's elements.
    numbers = [number for n, (_, size, width) in enumerate(layout) for number in (size, width, n * problem.T)]
    sizes = {"starts": mx.array(starts, mx.int32), "kinds": mx.array(numbers, mx.int32)}
    pieces = [f"piece{n}" for n in range(LEFT)]
    body = f"const Rows<X> rows = {{{{{', '.join(pieces)}}}}};\n{body}"
    template = template | {"S": problem.dtype, "X": row_type(problem)}
    groups = -(-problem.B * max(width for _, _, width in layout) // 256), problem.T, problem.directions
    files = (*cell_files(problem), "stepwise", "stepwise_rows")
    every = inputs | dict.fromkeys((*pieces, *sizes), True)
    source = source_of(problem, name, files, body)
    launch = prepare(source, template, every, outputs, groups, 256)
    written = [name for name, output in outputs.items() if output is not None]
    given = [name for name, is_there in inputs.items() if is_there]
    return Sequences(launch, given, written, list(sizes.values()))


@cached
def outputs_launch(problem: Problem, present: tuple[str, ...], layout: Layout, names: frozenset[str]) -> Sequences:
    """Return the launch that copies the outputs of a forward pass from its rows (the arrays that its launches wrote)
    into sequences. names: the outputs to copy, some of h, c, gates, hT and cT. layout: one kind of rows, or with a
    projection two: those of the cells, and those with h."""
    (T, B, H, P), D, dtype = problem[:4], problem.directions, problem.dtype
    gates, c = problem.cell.kept, problem.cell.carried
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
        # calls the shader twice: once to copy c and the gates, with h marked as absent; once to copy h, with c and the
        # gates marked as absent. The rows with h have no gates and no floats (0, 0). kinds + 3 points to the three
        # numbers of their kind.
        body = struct_of(fields | dict.fromkeys(("h0", "h", "hT"), "absent"))
        body += struct_of(fields | dict.fromkeys(("c0", "c", "cT", "gates"), "absent"), "Projected", "projected")
        body += f"stepwise_outputs<GATES, CARRIES, S>(rows, kinds, a, {end}"
        body += f"stepwise_outputs<0, 0, S>(rows, kinds + 3, projected, {end}"
    name = f"{problem.cell.op}_stepwise_outputs" + "_projected" * (len(layout) > 1)
    return prepare_sequences(problem, layout, name, body, template, inputs, outputs)


@cached
def gradients_launch(problem: Problem, present: tuple[str, ...], layout: Layout, names: frozenset[str]) -> Sequences:
    """Return the launch that copies the results of a backward pass from its rows (the arrays that its launches wrote)
    into sequences.

    It always writes dz, the gradients of the preactivations, and with a projection dh, the gradient of h. If `names`
    contains them, it also writes

    - dc0, the gradient of the initial state c0
    - du and dw, the gradients of the inputs and of the parameters of a user's cell
    - d_out, the gradient of a GRU's recurrent products: dz, with the candidate's part multiplied by the gate r
    - carry, the gradients of the states before each step, without the part that goes through the recurrent product: a
      block for each state besides h, and for h if a step reads h outside the product
    - m, the vector that a projection multiplies by Wp; this launch computes it from the gates and c

    For a cell with a norm it also writes d_product, the gradients of the recurrent products, and d_norm_c, the gradient
    of the result of the norm of c, each if the cell has this norm. A row has first `floats` float32 numbers per unit
    (carries, and gradients of parameters). Without a norm of the products dz follows; with one d_product is in this
    place, so the shader `stepwise_gradients` copies d_product, and `stepwise_norm_gradients` copies dz. d_norm_c is
    last.
    """
    (T, B, H, P), D, dtype, cell = problem[:4], problem.directions, problem.dtype, problem.cell
    projects, products, states = len(layout) > 1, norms.of_product(cell), norms.of_state(cell)
    G, U, carries, wide = cell.gates, cell.inputs, cell.carried + cell.passes_h, (T, B)
    # In a user's cell dc0 is float32, because `gradients_after` casts all gradients later.
    shapes = {
        "dz": ((*wide, D * cell.gradients * H), dtype),
        "du": ((*wide, D * U * H), dtype),
        "dc0": ((B, D * cell.carried * H), mx.float32 if cell.op == "pointwise" else dtype),
        "dw": ((B, D * cell.summed * H), mx.float32),
        "d_out": ((*wide, D * G * H), dtype),
        "carry": ((*wide, D * carries * H), mx.float32),
        "dh": ((*wide, D * P), dtype),
        "m": ((D, T, B, H), dtype),
    }
    if cell.norm is not None:
        shapes |= {"d_product": ((*wide, D * G * H), dtype), "d_norm_c": ((*wide, D * H), dtype)}
    always = {"dz": True, "dh": projects, "d_product": products, "d_norm_c": states}
    names = names.union(name for name in always if always[name])
    if carries == 0:
        names = names - {"carry"}
    outputs: Outputs = {name: shape if name in names else None for name, shape in shapes.items()}
    read = {"lengths", "sizes"} | ({"gates"} if names & {"d_out", "m"} else set()) | ({"c"} if "m" in names else set())
    inputs = {name: name in read and name in present for name in ("gates", "c", "lengths", "sizes")}
    candidate, reset = (cell.gate_order.index(gate) for gate in "nr") if "d_out" in names else (0, 0)
    stored = G if products else cell.gradients
    template: Template = {"GRADIENTS": stored, "CANDIDATE": candidate, "RESET": reset, "INPUTS": U}
    template |= {"CARRIED": cell.carried, "PASSES_H": int(cell.passes_h), "SUMMED": cell.summed}
    existing = {*names, "starts", "kinds", *(name for name in inputs if inputs[name])}
    fields = fields_of((*inputs, "starts", "kinds", *outputs), existing)
    start, end = "stepwise_gradients<{}>(rows, kinds", "thread_position_in_grid);\n"
    body = struct_of(fields | {"dz": "d_product"} if products else fields)
    body += f"{start.format(', '.join([*template, 'S']))}, a, {end}"
    floats = carries * (2 if "carry" in names else 1) + cell.summed
    if products:
        template |= {"NORMED": cell.gradients}
        body += f"stepwise_norm_gradients<NORMED, {G + U}, {floats}, S>(rows, kinds, a, dz, {end}"
    if states:
        body += f"stepwise_norm_gradients<1, {G * (1 + products)}, {floats}, S>(rows, kinds, a, d_norm_c, {end}"
    if projects:
        # Separate launches have written dh. Their rows have the layout of the dz of a cell with one gate (template
        # arguments 1, 0, ...), so a second call of the shader copies dh under the name dz. The other outputs are marked
        # as absent, so this call writes nothing else. kinds + 3 points to the three numbers of the second kind of rows.
        of_dh = fields | dict.fromkeys(("gates", "dc0", "d_out", "carry", "m"), "absent") | {"dz": "dh"}
        body += struct_of(of_dh, "Projected", "projected")
        body += f"{start.format('1, 0, 0, 0, 0, 0, 0, S')} + 3, projected, {end}"
    if "m" in names:
        template |= {"OPTIONS": cell_number(cell)}
        body += f"stepwise_projected<{STRUCTS[cell.op]}, S>(a, {end}"
    name = f"{cell.op}_stepwise_gradients" if cell.norm is None else f"{cell.op}_stepwise_norm_gradients"
    return prepare_sequences(problem, layout, name, body, template, inputs, outputs)
