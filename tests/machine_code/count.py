"""Count the instructions of one kernel by kind, from the machine code that Mesa's compiler prints. Instructions of
the product loop and of the rest of the kernel are counted separately.

The product loop is the loop that computes the recurrent product. The search for it starts at the first outermost
loop with multiply-adds, such as the loop over time. A loop inside it with multiply-adds and an unknown number of
iterations is a better candidate. If there are several, the one with most multiply-adds is the product loop.
"""

import re
from collections import Counter
from itertools import islice
from math import prod
from typing import NamedTuple

WORDS = {
    "multiply_adds": "ffma fmul fadd hfma hmul hadd",
    "device_loads": "device_load uniform_load",
    "device_stores": "device_store",
    "local_loads": "local_load",
    "local_stores": "local_store",
    "shuffles": "shuffle shuffle_xor shuffle_up shuffle_down quad_shuffle quad_shuffle_xor quad_shuffle_up "
    "quad_shuffle_down simd_reduce quad_reduce simd_prefix quad_prefix",
    "transcendental": "exp2 log2 rcp rsqrt srsqrt sin_pt_1 sin_pt_2",
    "conversions": "convert floor ceil trunc roundeven",
    "integer": "iadd imad intl bfi bfeil extr asr bitop and or not andn1 andn2 orn1 orn2 nand nor xnor bitrev popcount "
    "ffs",
    "selects": "icmpsel fcmpsel",
    "moves": "mov mov_imm get_sr swap",
    "spills": "stack_load stack_store stack_adjust",
}
PRODUCT = {(word, "multiply_adds") for word in WORDS["multiply_adds"].split()}

KINDS = {word: kind for kind, words in WORDS.items() for word in words.split()}
"""The kind of each instruction. An instruction that is missing here has the kind "control": branches, barriers, waits
for loads."""

COMPLEX = {"exp2": 4, "log2": 4, "rcp": 6, "rsqrt": 8, "srsqrt": 8, "convert": 4, "imad": 4, "bfi": 4, "bfeil": 4}
COMPLEX |= {
    "extr": 4,
    "asr": 4,
    "intl": 4,
    "floor": 4,
    "trunc": 4,
    "ceil": 4,
    "roundeven": 4,
    "bitrev": 4,
    "popcount": 4,
}
"""Cycles per SIMD-group of the instructions that a separate unit executes, at the same time as the other instructions.
Each quarter of a GPU core has one such unit. Published for the M1 (philipturner/metal-benchmarks at 936d911)."""

SLOW = {"simd_reduce": 14.5, "quad_reduce": 6, "simd_prefix": 12.6, "quad_prefix": 3.2}
SLOW |= {word: 2 for word in WORDS["shuffles"].split() if "shuffle" in word}
"""Cycles per SIMD-group of the other instructions that take more than one cycle (philipturner/metal-benchmarks)."""


Block = tuple[int, list[str], list[int]]
"""A block of the program: its number, its instructions, and the numbers of the blocks that may run after it."""

Span = tuple[int, int]
"""A loop of the program: the numbers of its first and last block."""


class Count(NamedTuple):
    """The counted figures of one kernel.

    registers: registers of 32 bits per thread. scratch: bytes of memory per thread for registers that did not fit.
    kinds: the number of instructions of each kind in the product loop. unknown: the number of loops inside the
    product loop whose number of iterations is unknown. cycles: the cycles that the product loop takes for one
    SIMD-group (32 threads); a GPU core has four quarters, and one quarter executes a SIMD-group. outside: the cycles
    of the rest of the kernel.

    A quarter executes instructions in two units at the same time, and the slower unit decides. So `cycles` is the
    larger of two sums: all instructions with one cycle each (more for those in SLOW), and the instructions in
    COMPLEX, which a separate unit executes.
    """

    registers: float
    scratch: int
    kinds: Counter
    unknown: int
    cycles: int
    outside: int


def count(printed: str) -> Count:
    """Count the instructions of a kernel and return the figures. printed: all that Mesa's compiler prints for the
    kernel, as `compiler.machine_code` returns it."""
    found = re.search(r"(\d+) inst,.*? (\d+) regs,.*? (\d+) scratch", printed)
    total, halves, scratch = map(int, found.groups())
    blocks = program(printed)
    if sum(len(lines) for _, lines, _ in blocks) != total:
        raise ValueError(f"the statistics say {total} instructions, the program has another number")
    spans = loops(blocks)
    whole = (0, len(blocks))
    loop = product_loop(blocks, spans) or whole
    words = words_of(blocks, loop, spans)
    inner = [span for span in spans if within(span, loop)]
    kinds = Counter()
    for (_, kind), number in words.items():
        kinds[kind] += number
    outside = cycles(words_of(blocks, whole, spans, loop)) - cycles(words)
    return Count(halves / 2, scratch, kinds, sum(not turns(blocks, span) for span in inner), cycles(words), outside)


def program(printed: str) -> list[Block]:
    """Return the blocks of the final program. It is the third program that Mesa's compiler prints: the first two are
    earlier stages, before registers are allocated. If there is a fourth program, it runs only once per launch and is
    left out."""
    starts = [match.start() for match in re.finditer(r"^block0 \{", printed, re.M)]
    text = printed[starts[2] : starts[3] if len(starts) > 3 else None]
    found = []
    for number, lines, after in re.findall(r"^block(\d+) \{\n(.*?)^\}([^\n]*)$", text, re.M | re.S):
        following = re.findall(r"block(\d+)", after.split("from")[0])
        instructions = [line.strip() for line in lines.splitlines() if line.strip()]
        found.append((int(number), instructions, list(map(int, following))))
    return found


def loops(blocks: list[Block]) -> list[Span]:
    """Return all loops of a program, sorted. Each loop is given by the numbers of its first and last block."""
    ends: dict[int, int] = {}  # for each loop: first block -> last block that jumps back to it
    for number, _, following in blocks:
        ends |= {first: max(number, ends.get(first, 0)) for first in following if first <= number}
    return sorted(ends.items())


def product_loop(blocks: list[Block], spans: list[Span]) -> Span | None:
    """Return the loop that computes the recurrent product, or None if no loop has multiply-adds. Start with the
    first outermost loop that has multiply-adds. If it contains other loops with multiply-adds and an unknown number
    of iterations, continue with the one that has most multiply-adds, and so on inwards."""
    often = {span: sum(words_of(blocks, span, spans)[word] for word in PRODUCT) for span in spans}
    products = [span for span in spans if often[span]]
    outer = (span for span in products if not any(within(span, other) for other in spans))
    found, inner = None, list(islice(outer, 1))
    while inner:
        found = max(inner, key=often.__getitem__)
        inner = [span for span in products if within(span, found) and not turns(blocks, span)]
    return found


def within(span: Span, other: Span) -> bool:
    """Return whether the loop `span` lies inside the loop `other`."""
    return span != other and other[0] <= span[0] and span[1] <= other[1]


def turns(blocks: list[Block], span: Span) -> int:
    """Return the number of iterations of a loop, or 0 if it is unknown. The number is known if the loop adds a
    constant step to a counter and compares the counter with a constant end. The counter's start is not read; it must
    be 0 or at least less than one step."""
    lines = [line for number, lines, _ in blocks if span[0] <= number <= span[1] for line in lines]
    end = next(
        (re.match(r"while_icmp (r\d+)[lh]?, #(\d+)", line) for line in reversed(lines) if "while_" in line), None
    )
    step = end and next(
        filter(None, (re.match(rf"{end[1]} = iadd {end[1]}, #(\d+), #0$", line) for line in lines)), None
    )
    return -(-int(end[2]) // int(step[1])) if step else 0


def words_of(blocks: list[Block], span: Span, spans: list[Span], once: Span | None = None) -> Counter:
    """Return how often one iteration of the loop `span` executes each instruction. The keys are (instruction name,
    kind). An instruction of an inner loop counts once per iteration of the inner loop. If the number of iterations
    is unknown, or if the inner loop is `once`, it counts for one iteration only."""
    within_it = [(inner, turns(blocks, inner) or 1) for inner in spans if within(inner, span) and inner != once]
    found = Counter()
    for number, lines, _ in blocks:
        if span[0] <= number <= span[1]:
            times = prod(often for inner, often in within_it if inner[0] <= number <= inner[1])
            for line in lines:
                found[kind_of(line)] += times
    return found


def cycles(words: Counter) -> int:
    """Return the cycles that a quarter of a GPU core needs to execute these instructions for one SIMD-group. words:
    how often each (instruction name, kind) is executed."""
    simple = sum(number * SLOW.get(word, 1) for (word, _), number in words.items())
    return round(max(simple, sum(number * COMPLEX.get(word, 0) for (word, _), number in words.items())))


def kind_of(line: str) -> tuple[str, str]:
    """Return the name and the kind of an instruction. Two patterns count as moves: the compiler copies a register by
    `bitop a`, and swaps two registers by three xor instructions."""
    target, word, operands = re.match(r"(?:(.*?) = )?(\w+)\s*(.*)", line).groups()
    if word == "xor":
        return word, "moves" if target in operands.split(", ") else "integer"
    if word == "bitop" and operands.endswith("#a"):
        return word, "moves"
    return word, KINDS.get(word, "control")
