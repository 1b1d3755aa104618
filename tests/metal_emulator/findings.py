"""What a check reports, and the error that carries it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One defect of a kernel.

    kind: "out-of-bounds", "uninitialised", "unwritten", "race", "divergence", "simdgroup", "threadgroup-memory",
        "thread-limit", "misaligned", "arithmetic", "read-only", "wild-pointer", "stack" or "compile".
    line, other_line: lines of the kernel text, 0 if unknown.  name: buffer or variable.  offset: bytes into it.
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

    def __str__(self) -> str:
        parts = [f"[{self.kind}] {self.text}"]
        if self.name:
            parts.append(f"{self.name} at byte {self.offset}")
        if self.line:
            parts.append(f"line {self.line}" + (f" against line {self.other_line}" if self.other_line else ""))
        if self.thread >= 0:
            other = f" against thread {self.other_thread}" if self.other_thread >= 0 else ""
            parts.append(f"thread {self.thread}{other} of threadgroup {self.threadgroup}")
        return ", ".join(parts)


class KernelError(Exception):
    """A kernel that does not compile or has findings; `findings` lists them."""

    def __init__(self, name: str, findings: list[Finding]):
        super().__init__(f"kernel {name}:\n  " + "\n  ".join(map(str, findings)))
        self.findings = findings


def compile_error(text: str, line: int = 0) -> Finding:
    """Returns the finding for a kernel text that is not valid MSL."""
    return Finding("compile", text, line=line)
