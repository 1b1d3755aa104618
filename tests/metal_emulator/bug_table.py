"""The table of planted bugs. Each entry is a kernel with exactly one bug, and the kind of finding that must report
the bug."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .sample_kernels import Sample

X = np.arange(1, 65, dtype=np.float32)
NO_FLAGS = "threadgroup_barrier(mem_flags::mem_none);"
DEVICE_ONLY = "threadgroup_barrier(mem_flags::mem_device);"


@dataclass(frozen=True)
class Bug:
    """A planted bug: a kernel with one mistake. category: the sort of mistake. kind: the kind of the expected
    finding, or None if no check can find the bug. skew: number of elements by which inputs are moved from a 16-byte
    boundary."""

    name: str
    category: str
    kind: str | None
    build: Callable[[], Sample]
    skew: int = 0


BUGS: list[Bug] = []


def replace_nth(text: str, old: str, new: str, nth: int = 0) -> str:
    """Return `text` with one occurrence of `old` replaced by `new`: the first for nth = 0, the second for nth = 1,
    and so on."""
    parts = text.split(old)
    if len(parts) < nth + 2:
        raise ValueError(f"occurrence {nth} of {old!r} is not in the text")
    return old.join(parts[: nth + 1]) + new + old.join(parts[nth + 1 :])


def changed(name, category, kind, make, old, new, nth=0, where="source", **sizes) -> None:
    """Add a bug to the table. The bug is made from a correct kernel of sample_kernels.py: one part of its text is
    replaced. name, category, kind: see `Bug`. make(**sizes): returns the kernel. old, new: the text that is replaced,
    and its replacement. nth: which occurrence of `old` (see `replace_nth`). where: the text that is changed, "source"
    or "header"."""

    def build() -> Sample:
        sample = make(**sizes)
        setattr(sample, where, replace_nth(getattr(sample, where), old, new, nth))
        return sample

    BUGS.append(Bug(name, category, kind, build))


def written(name, category, kind, source, shapes=((64,),), threads=64, group=32, arrays=(X,), skew=0, **more) -> None:
    """Add a bug to the table: a small kernel written for this bug. In its source, `i` is the thread's position in the
    grid and `l` is its lane. shapes: the shapes of the outputs o0, o1, ... arrays: the inputs a0, a1, ... threads,
    group: the threads of the grid and of a threadgroup. name, category, kind, skew: see `Bug`. more: other fields of
    `Sample`."""
    start = "const uint i = thread_position_in_grid.x, l = thread_index_in_simdgroup;\n"

    def build() -> Sample:
        return Sample(start + source, list(arrays), [tuple(s) for s in shapes], (threads, 1, 1), (group, 1, 1), **more)

    BUGS.append(Bug(name, category, kind, build, skew))
