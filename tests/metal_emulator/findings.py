"""Define a finding (a defect that a check of the emulator reports) and the error that contains findings."""

import re
from dataclasses import dataclass, replace

LINE_DIRECTIVE = re.compile(r'^\s*#\s*line\s+(\d+)(?:\s+"([^"]+)")?')


@dataclass(frozen=True)
class Finding:
    """One defect of a kernel.

    kind: "out-of-bounds", "uninitialised", "unwritten", "race", "divergence", "simdgroup", "threadgroup-memory",
        "thread-limit", "misaligned", "arithmetic", "read-only", "wild-pointer", "stack" or "compile".
    line, other_line: lines of the kernel text, 0 if unknown.  name: buffer or variable.  offset: bytes into it.
    place, other_place: the same lines as "file:line" of the shader, or "" if no `#line` in the kernel text names one.
    """

    kind: str
    text: str
    line: int = 0
    other_line: int = 0
    name: str = ""
    offset: int = 0
    thread: int = -1
    other_thread: int = -1
    threadgroup: int = 0
    place: str = ""
    other_place: str = ""

    def __str__(self) -> str:
        parts = [f"[{self.kind}] {self.text}"]
        if self.name:
            parts.append(f"{self.name} at byte {self.offset}")
        if self.line:
            against = f" against {self.other_place or f'line {self.other_line}'}" if self.other_line else ""
            parts.append((self.place or f"line {self.line}") + against)
        if self.thread >= 0:
            other = f" against thread {self.other_thread}" if self.other_thread >= 0 else ""
            parts.append(f"thread {self.thread}{other} of threadgroup {self.threadgroup}")
        return ", ".join(parts)


class KernelError(Exception):
    """Raised for a kernel that does not compile or has findings. `findings` lists them."""

    def __init__(self, name: str, findings: list[Finding]):
        super().__init__(f"kernel {name}:\n  " + "\n  ".join(map(str, findings)))
        self.findings = findings


def place_of(source: str, line: int) -> str:
    """Return "file:line" of the shader for a line of a kernel's source, according to the directives `#line N "file"`
    above the line. Return "" if there is no such directive."""
    number = None
    for distance, above in enumerate(reversed(source.split("\n")[: max(line - 1, 0)])):
        if m := LINE_DIRECTIVE.match(above):
            number = int(m.group(1)) + distance if number is None else number
            if m.group(2):
                return f"{m.group(2)}:{number}"
    return ""


def with_places(finding: Finding, source: str) -> Finding:
    """Return the finding with `place` and `other_place` set to the shader's file and line. "line 12" in the
    finding's text is also replaced by the shader's file and line."""
    text = re.sub(r"\bline (\d+)", lambda m: place_of(source, int(m.group(1))) or m.group(), finding.text)
    places = {"place": place_of(source, finding.line), "other_place": place_of(source, finding.other_line)}
    return replace(finding, text=text, **places)


def compile_error(text: str, line: int = 0) -> Finding:
    """Return the finding for a kernel whose source is not valid MSL."""
    return Finding("compile", text, line=line)
