"""Test machine_code.csv, the table of the number of instructions in each Metal kernel: the table was made from the
current shaders, the instructions are counted correctly, and each kernel finds its line of the table. No test runs the
compiler."""

import re

import mlx.core as mx
import pytest

from machine_code import cells, instructions
from machine_code.compiler import opencl
from machine_code.count import count
from machine_code.instructions import FILE, Counted, Kernel, counted, kernel_of, products, table, text_hash, work_of
from machine_code.table import Case, cases, defaults, kernels, tool_hash
from machine_code.times import ours
from mlx_lstm.lab.timing.tasks import Size

RENEW = "the table is of other shaders, launches or another tool: `make machine-code` renews it"


def test_the_table_is_not_stale():
    """machine_code.csv has a line for the current source of every kernel, and the current version of the counting
    tool wrote it."""
    named = {Kernel(*(getattr(line, name) for name in Kernel._fields)) for line in table()}
    assert named == set(kernels(cases())), RENEW
    assert tool_hash() in FILE.open().readline(), RENEW


BEFORE = "block0 {\n   1 = phi 2, 3\n} -> \n\n"
FINAL = """\
block0 {
   r0 = mov_imm #0
   r1 = fmul r0, r0
} -> block1  from

block1 {
   local_store r0, r1, #0, x, #0
} -> block1 block2  from block0 block1

block2 {
   r2...r5 = device_load u4:u5, r0, xyzw, #0, slot 0
   wait #0, slot 0
   r6 = ffma r2, r3, r6
   r7 = xor r7, r8
   r8 = bitop r7, #0, #a
   r9 = xor r7, r8
   r1 = exp2 r1
   r1 = imad r1, r2, r3, #0
} -> block3 block4  from block1 block4

block3 {
   stack_store r4, #0, x, #0, slot 0
   r10 = shuffle_xor r1, r0h
} -> block4  from block2

block4 {
   while_icmp r32, u21, #0, n=1
} -> block2 block5  from block2 block3

block5 {
   stop
} ->  from block4

"""
STATISTICS = "SHADER-DB: k: 15 inst, 9 alu, 9 fscib, 4 ic, 99 bytes, 27 regs, 8 uniforms, 16 scratch, 512 threads\n"


def test_counting():
    """`count` reads the third program in the compiler's output, because the first two programs are not final. It
    counts the instructions of the first loop that contains multiply-adds."""
    found = count(STATISTICS + BEFORE * 2 + FINAL + BEFORE * 3)
    assert (found.registers, found.scratch, found.unknown) == (13.5, 16, 0)
    kinds = {"device_loads": 1, "multiply_adds": 1, "moves": 2, "integer": 2, "transcendental": 1, "spills": 1}
    assert found.kinds == kinds | {"shuffles": 1, "control": 2}
    # Of the 11 instructions the shuffle takes 2 cycles and each other one takes 1. exp2 and imad also take 8 cycles
    # in a separate unit, but at the same time.
    assert found.cycles == 12
    assert found.outside == 4


def test_a_loop_within_turns_as_often_as_it_counts():
    """If the number of iterations of an inner loop is known, `count` counts its instructions once per iteration.
    Otherwise it counts them once."""
    lines = "   r12 = iadd r12, #4, #0\n   while_icmp r12, #32, #0, n=1\n} -> block3 block4  from block2"
    nested = FINAL.replace("} -> block4  from block2", lines)
    found = count(STATISTICS.replace("15 inst", "17 inst") + BEFORE * 2 + nested)
    assert found.unknown == 0 and found.kinds["spills"] == found.kinds["shuffles"] == 8
    found = count(STATISTICS.replace("15 inst", "17 inst") + BEFORE * 2 + nested.replace("#32", "r4"))
    assert found.unknown == 1 and found.kinds["spills"] == 1


def test_a_product_within_is_the_loop_that_counts():
    """If the loop over time contains a loop with multiply-adds and an unknown number of iterations, this inner loop
    computes the recurrent product. So `count` counts the instructions of the inner loop only."""
    lines = "   r1 = ffma r2, r3, r1\n   while_icmp r12, r4, #0, n=1\n} -> block3 block4  from block2"
    nested = FINAL.replace("} -> block4  from block2", lines)
    found = count(STATISTICS.replace("15 inst", "17 inst") + BEFORE * 2 + nested)
    assert found.unknown == 0 and found.kinds.total() == 4 and found.kinds["multiply_adds"] == 1


def test_a_program_that_was_not_understood_is_refused():
    """`count` raises ValueError if the compiler's statistics give another number of instructions than the printed
    program has."""
    with pytest.raises(ValueError, match="15 instructions"):
        count(STATISTICS + BEFORE * 3)


def test_what_the_compiler_is_given():
    """The translation to OpenCL turns Metal's attributes into variables. It removes line numbers and redefinitions
    of the word `kernel`."""
    (launch,) = kernels([Case("fused", "lstm", "bfloat16", 2, 8, which="forward")]).values()
    text = opencl(
        f'#line 1 "fused.metal"\n#define kernel kernel,max_total_threads_per_threadgroup(512)\n{launch.text}', 64
    )
    assert "#line" not in text and "max_total" not in text and "[[" not in text
    assert "reqd_work_group_size(64, 1, 1)" in text and "using S = bfloat16_t;" in text
    assert "constexpr int H = 8;" in text and "get_group_id(0)" in text


def test_comments_and_lines_are_not_part_of_a_text():
    """The hash of a kernel depends on its code and its number of threads, not on comments, line numbers or spaces."""
    plain = "float f() {\n  return 1.0f;\n}\n"
    assert text_hash(plain, 64) == text_hash('#line 7 "a.metal"\nfloat f() {  // one\n return 1.0f; }', 64)
    assert text_hash(plain, 64) != text_hash(plain, 32)
    assert text_hash(plain, 64) != text_hash(plain.replace("1", "2"), 64)


def sweep(size, engine="fused", dtype=mx.float32):
    """Return (problem, launch) for the forward pass of training. problem: the layer's cell, sizes and dtype. launch:
    the kernel launch with the recurrent product."""
    problem, graph = ours(size, dtype, engine, "backward", rows=2 if size.B == 32 else 1)
    return problem, next(launch for launch in graph.launches if "forward" in launch.name)


@pytest.fixture
def small(monkeypatch):
    """Replace the table of machine code by a few kernels with invented figures: 100 cycles per step or per iteration
    of a product, 10 cycles outside of the loop, 8 multiply-adds, 2 spills."""
    figures = dict.fromkeys(Counted._fields, 0) | {"cycles": 100, "outside": 10, "multiply_adds": 8, "spills": 2}
    sizes = [(B, 8, "fused", dtype) for B in (1, 32) for dtype in (mx.float32, mx.float16)]
    sizes += [(32, 40, "fused", mx.float32), (1, 8, "stepwise", mx.float32), (32, 8, "stepwise", mx.float32)]
    found = [sweep(Size(3, B, 8, H), engine, dtype) for B, H, engine, dtype in sizes]
    lines = tuple(Counted(**figures | kernel_of(launch, problem)._asdict()) for problem, launch in found)
    monkeypatch.setattr(instructions, "table", lambda: lines)
    return lines


def test_a_kernel_finds_its_own_line(small):
    """A kernel in machine_code.csv, the table of instructions, gets its own line of the table. Its cycles are in
    proportion to its time steps, or to the iterations of its product."""
    problem, launch = sweep(Size(7, 32, 5, 40))
    line, own = counted(launch, problem)
    assert own and (line.B, line.H, line.dtype, line.rows, line.per) == (32, 40, "float32", 2, "step")
    assert work_of(launch, problem, 7) == (10 + 7 * 100, 7 * 2, 7, line, True)
    problem, launch = sweep(Size(7, 32, 3, 300), "stepwise")
    line, own = counted(launch, problem)
    assert own and line.H == 8  # the kernel's source does not depend on H, so the line counted at H = 8 is its own line
    turns = kernel_of(launch, problem).needed / 8
    assert work_of(launch, problem, 1)[:3] == (10 + turns * 100, turns * 2, turns)


def test_another_one_the_nearest_in_proportion(small):
    """A kernel that was not counted gets the cycles of the most similar counted kernel, scaled by the multiply-adds.
    Similarity compares in this order: kernel, 16 or 32 bits, dtype, batch rows per threadgroup, H."""
    for size, dtype, wanted in [
        ((32, 48), mx.float32, (32, 40, "float32")),
        ((32, 12), mx.float32, (32, 8, "float32")),
        ((1, 40), mx.float32, (1, 8, "float32")),
        ((32, 40), mx.bfloat16, (32, 8, "float16")),
    ]:
        problem, launch = sweep(Size(7, size[0], 3, size[1]), dtype=dtype)
        line, own = counted(launch, problem)
        assert not own and (line.B, line.H, line.dtype) == wanted
        share = kernel_of(launch, problem).needed / line.needed
        assert work_of(launch, problem, 7).cycles == pytest.approx(10 + 7 * 100 * share)


def test_instructions_of_every_kind_add_up():
    """In every line of machine_code.csv the instructions of all kinds add up to the column `instructions`."""
    kinds = Counted._fields[Counted._fields.index("multiply_adds") : Counted._fields.index("unknown")]
    for line in table():
        assert sum(getattr(line, kind) for kind in kinds) == line.instructions


def test_kernels_of_default_sizes_stay_within_the_budget():
    """Kernels of `fused` that are the default on a GPU with some number of cores spill no register. From H = 96 on
    they take at most 2.7 instructions per multiply-add. With bfloat16 the limit is 3.7, because conversions from
    bfloat16 are separate instructions."""
    lines = {line.text: line for line in table()}
    for kernel in kernels(defaults()):
        line = lines[kernel.text]
        assert line.spills == line.scratch == 0 and line.unknown == 0, line
        most = 3.7 if line.dtype == "bfloat16" else 2.7
        assert line.H < 96 or line.instructions <= most * line.multiply_adds, line


@pytest.mark.parametrize(("kernel", "most"), [("lstm_fused_forward", 750), ("lstm_fused_backward", 850)])
def test_a_step_of_the_usual_size(kernel, most):
    """A time step of a `fused` LSTM at B = 32, H = 128 in float32 takes at most `most` instructions per lane."""
    (line,) = (one for one in table() if one[:4] == (kernel, "float32", 32, 128))
    assert line.instructions <= most


def test_generated_kernels_spill_nothing_and_cost_as_much_as_written_ones():
    """Generated kernels spill no register. Their instructions are compared with those of the built-in LSTM. On `fused`
    a time step of the LSTM's equations takes at most 1.03 times as many, and one of the sLSTM's equations at most 1.25
    times as many. On `stepwise` the code of the LSTM's equations outside of the product takes at most as many cycles.
    """
    lines = {line[:4]: line for line in table()}
    generated = [line for line in table() if line.kernel.startswith("generated_") and not NORM.search(line.kernel)]
    assert len(generated) == 28 and not any(line.spills or line.scratch for line in generated)
    for sweep in ("forward", "backward"):
        for size in cells.SIZES:
            own, other, written = (
                lines[(f"{word}_fused_{sweep}", "float32", *size)].instructions
                for word in ("generated_lstm", "generated_slstm", "lstm")
            )
            assert own <= 1.03 * written and other <= 1.25 * written
        own, other, written = (
            lines[f"{word}_fused_matrix_{sweep}", "float32", 128, 128].instructions
            for word in ("generated_lstm", "generated_slstm", "lstm")
        )
        assert own <= 1.03 * written and other <= 1.25 * written
        own, written = (lines[f"{word}_stepwise_{sweep}", "float32", 32, 256] for word in ("generated_lstm", "lstm"))
        assert own.outside <= written.outside and own.instructions == written.instructions


@pytest.mark.parametrize("sweep", ["forward", "backward"])
def test_a_product_by_lanes(sweep):
    """At batch size 4 a `stepwise` LSTM spills no register and takes at most 4 instructions per multiply-add."""
    (line,) = (one for one in table() if one[:4] == (f"lstm_stepwise_{sweep}", "float32", 4, 256))
    assert line.instructions <= 4 * line.multiply_adds and not line.spills


def test_packed_weights_take_registers_only():
    """Kernels with quantized weights spill no register, and take few instructions for each weight.

    With one batch row the limit is 4 instructions per weight for an LSTM with integer weights of 2, 4 or 8 bits. It is
    5.5 for other bit widths, for float formats such as mxfp4, and for the other cells. With four batch rows it is 3.5
    per weight and row.
    """
    lines = [line for line in table() if line.kernel.endswith("_bits")]
    assert len({line.kernel for line in lines}) >= 10 and not any(line.spills or line.scratch for line in lines)
    for line in [line for line in lines if line.rows < 8 and line.per == "turn"]:
        fast = "affine" in line.kernel and line.kernel[-6] in "248" and line.kernel.startswith("lstm")
        assert line.instructions <= (3.5 if line.rows == 4 else 4 if fast else 5.5) * products(line)


def test_a_step_of_the_whole_sequence_with_packed_weights():
    """If H is 128 or 256, the weights fill all lanes of `fused`. At these sizes a time step of one batch row takes
    at most 3.7 instructions per quantized weight of 4 or 8 bits, and at most 4.4 in a float format such as mxfp4."""
    lines = [line for line in table() if line.kernel.startswith("lstm_fused") and line.kernel.endswith("_bits")]
    assert {line.H for line in lines} == {64, 96, 128, 160, 192, 224, 256}
    for line in [line for line in lines if line.rows == 1 and line.H in (128, 256)]:
        assert line.instructions <= (3.7 if "affine" in line.kernel else 4.4) * line.needed


NORM = re.compile(r"_norm(_product|_sum)?(_together|_each)(_output|_state)?$")


def test_a_norm_in_fused():
    """At B = 32, H = 128 a step of `fused` with one norm of all gates together takes at most 1.15 times the
    instructions of a step without a norm. With a norm of each gate, or with a second norm, of c, it takes at most 1.45
    times as many. No kernel with a norm spills registers."""
    lines = [line for line in table() if NORM.search(line.kernel)]
    plain = {line[:5]: line for line in table()}
    assert len({line.kernel for line in lines}) >= 40 and not any(line.spills or line.scratch for line in lines)
    for line in lines:
        if "fused" in line.kernel and line[1:4] == ("float32", 32, 128):
            without = plain[(NORM.sub("", line.kernel), *line[1:5])].instructions
            two = line.kernel.endswith(("product_together_output", "product_together_state"))
            assert line.instructions <= (1.45 if "each" in line.kernel or two else 1.15) * without, line
