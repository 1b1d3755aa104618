"""Compute which lines of a kernel ran. clang's --coverage option provides the lines of each basic block, and
counters of the arcs (jumps between blocks).

clang counts only the arcs outside a spanning tree of the flow graph. The counts of the tree's arcs follow, because
each block is left as often as it is entered. clang adds the counters before any optimisation, so two branches that
the compiler merges later are still counted separately.
"""

import struct
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

_FUNCTION, _BLOCKS, _ARCS, _LINES = 0x01000000, 0x01410000, 0x01430000, 0x01450000
_ON_TREE = 1


@dataclass
class FunctionBlocks:
    """The flow graph of one compiled function. arcs: the jumps between blocks as (from, to, whether the arc is on
    the spanning tree). lines: the lines of each block."""

    identity: int
    blocks: int = 0
    arcs: list[tuple[int, int, bool]] = field(default_factory=list)
    lines: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))

    def executable(self) -> set[int]:
        """Return all lines of the function."""
        return set().union(*self.lines.values())

    def executed(self, counters: list[int]) -> set[int]:
        """Return the lines of the blocks that ran. A block ran if a jump to or from it was counted.

        counters: the counts of the arcs (jumps between blocks) outside the spanning tree. clang counts only these; the
        other counts follow from them.
        """
        values = iter(counters)
        known = {i: next(values) for i, arc in enumerate(self.arcs) if not arc[2]}
        self._solve_tree(known)
        ran: set[int] = set()
        for i, (start, end, _) in enumerate(self.arcs):
            if known.get(i):
                ran |= self.lines.get(start, set()) | self.lines.get(end, set())
        return ran

    def _solve_tree(self, known: dict[int, int]) -> None:
        """Compute the counts of the jumps that clang did not count, and add them to `known`. These jumps form the
        spanning tree of the flow graph.

        A tree always has a block with only one jump of unknown count. A block is left as often as it is entered, so
        this count follows from the other jumps of the block. Then the next block has only one unknown jump, and so
        on.
        """
        at: dict[int, list[int]] = defaultdict(list)
        for i, (start, end, _) in enumerate(self.arcs):
            at[start].append(i)
            at[end].append(i)
        balance = dict.fromkeys(range(self.blocks), 0)
        unknown = {b: {i for i in at[b] if i not in known} for b in balance}
        for i, count in known.items():
            balance[self.arcs[i][0]] -= count
            balance[self.arcs[i][1]] += count
        # Start with the blocks that have only one arc (jump) of unknown count. Leave out block 0 (the entry), which no
        # arc enters, and block 1 (the exit), which no arc leaves.
        todo = [b for b in balance if b > 1 and len(unknown[b]) == 1]
        while todo:
            block = todo.pop()
            if len(unknown[block]) != 1:
                continue
            i = unknown[block].pop()
            start, end, _ = self.arcs[i]
            known[i] = balance[block] if start == block else -balance[block]
            balance[start] -= known[i]
            balance[end] += known[i]
            other = end if start == block else start
            unknown[other].discard(i)
            if other > 1 and len(unknown[other]) == 1:
                todo.append(other)


def read_notes(path: Path, source: str = "kernel.metal") -> list[FunctionBlocks]:
    """Read a .gcno file. Keep only the lines of the file `source`."""
    data = path.read_bytes()
    words = struct.unpack(f"<{len(data) // 4}I", data[: len(data) // 4 * 4])
    functions: list[FunctionBlocks] = []
    position = 5 + words[3]  # skip the header; its folder name takes words[3] words
    while position + 1 < len(words) and words[position]:
        tag, length = words[position], words[position + 1]
        body = words[position + 2 : position + 2 + length]
        if tag == _FUNCTION:
            functions.append(FunctionBlocks(body[0]))
        elif tag == _BLOCKS:
            functions[-1].blocks = body[0]
        elif tag == _ARCS:
            pairs = zip(body[1::2], body[2::2], strict=True)
            functions[-1].arcs += [(body[0], end, bool(flags & _ON_TREE)) for end, flags in pairs]
        elif tag == _LINES:
            functions[-1].lines[body[0]] |= _block_lines(body, source)
        position += 2 + length
    return functions


def _block_lines(body: tuple[int, ...], source: str) -> set[int]:
    lines, wanted, i = set(), False, 1
    while i < len(body):
        if body[i]:
            lines |= {body[i]} if wanted else set()
            i += 1
            continue
        size = body[i + 1]
        wanted = _is_name_of(body[i + 2 : i + 2 + size], source)
        i += 2 + size
    return lines


@cache
def _is_name_of(words: tuple[int, ...], source: str) -> bool:
    return struct.pack(f"<{len(words)}I", *words).rstrip(b"\0").decode().endswith(source)
