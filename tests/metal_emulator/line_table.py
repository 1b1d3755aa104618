"""Read the DWARF 4 line table of a compiled kernel. The table maps addresses to lines of the kernel's source.

Functions of the shim have no debug information. An address in the code of such a function gets the line of its call
in the kernel.
"""

import bisect
import struct
from dataclasses import dataclass, field
from pathlib import Path


class _Reader:
    def __init__(self, data: bytes, position: int = 0):
        self.data, self.position = data, position

    def take(self, layout: str) -> int:
        (value,) = struct.unpack_from("<" + layout, self.data, self.position)
        self.position += struct.calcsize("<" + layout)
        return value

    def string(self) -> str:
        end = self.data.index(b"\0", self.position)
        text = self.data[self.position : end].decode()
        self.position = end + 1
        return text

    def leb(self, signed: bool = False) -> int:
        value = shift = 0
        while True:
            byte = self.take("B")
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value - (1 << shift) if signed and byte & 0x40 else value


def _section(image: bytes, wanted: str) -> bytes:
    sections, entry, count, names = struct.unpack_from("<Q10xHHH", image, 0x28)
    headers = [struct.unpack_from("<IIQQQQ", image, sections + i * entry) for i in range(count)]
    name_table = headers[names][4]
    for name, _, _, _, offset, size in headers:
        if image[name_table + name :].startswith(wanted.encode() + b"\0"):
            return image[offset : offset + size]
    return b""


@dataclass
class _State:
    address: int = 0
    file: int = 1
    line: int = 1


@dataclass
class LineTable:
    """A table of (address, line), sorted by address. The line is 0 for code that belongs to no line of the kernel's
    source."""

    addresses: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)

    def line(self, address: int) -> int:
        """Return the source line of an address. If the compiler gives none, return the line of the nearest address
        before it that has one."""
        i = bisect.bisect_right(self.addresses, address) - 1
        while i > 0 and self.lines[i] == 0:
            i -= 1
        return self.lines[i] if i >= 0 else 0


def read_line_table(path: Path, source: str = "kernel.metal") -> LineTable:
    """Read the line table of a shared library. Keep only the lines of the file `source`."""
    data, rows = _section(path.read_bytes(), ".debug_line"), []
    reader = _Reader(data)
    while reader.position < len(data):
        length = reader.take("I")
        _read_unit(reader, reader.position + length, source, rows)
    rows.sort(key=lambda row: row[0])
    return LineTable([r[0] for r in rows], [r[1] for r in rows])


def _read_unit(reader: _Reader, end: int, source: str, rows: list[tuple[int, int]]) -> None:
    reader.take("H")
    header_end = reader.take("I") + reader.position
    minimum, _, _, line_base, line_range, opcode_base = (reader.take(c) for c in "BBBbBB")
    lengths = [reader.take("B") for _ in range(opcode_base - 1)]
    while reader.string():
        pass
    files = [""]
    while name := reader.string():
        files.append(name)
        for _ in range(3):
            reader.leb()
    reader.position = header_end
    state = _State()

    def row() -> None:
        wanted = state.file < len(files) and files[state.file].endswith(source)
        rows.append((state.address, state.line if wanted else 0))

    while reader.position < end:
        opcode = reader.take("B")
        if opcode >= opcode_base:
            step = opcode - opcode_base
            state.address += step // line_range * minimum
            state.line += line_base + step % line_range
            row()
        elif opcode == 0:
            state = _extended(reader, state)
        elif opcode == 1:
            row()
        elif opcode == 2:
            state.address += reader.leb() * minimum
        elif opcode == 3:
            state.line += reader.leb(signed=True)
        elif opcode == 4:
            state.file = reader.leb()
        elif opcode == 8:
            state.address += (255 - opcode_base) // line_range * minimum
        elif opcode == 9:
            state.address += reader.take("H")
        else:
            for _ in range(lengths[opcode - 1]):
                reader.leb()


def _extended(reader: _Reader, state: _State) -> _State:
    size = reader.leb()
    end = reader.position + size
    opcode = reader.take("B")
    if opcode == 1:
        state = _State()
    elif opcode == 2:
        state.address = reader.take("Q")
    reader.position = end
    return state
