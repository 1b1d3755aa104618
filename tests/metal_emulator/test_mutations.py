"""Test which mutations (small damages to a kernel) are made. Test in small kernels that every damage is noticed: the
emulator reports an error, or the kernel's results are wrong."""

import numpy as np
import pytest

from metal_emulator import KernelError, emulated_metal
from metal_emulator import sample_kernels as samples
from metal_emulator.mutations import mutations


def descriptions(text: str) -> list[str]:
    return [m.description for m in mutations(text)]


def test_barriers_and_flags():
    both = "threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);\n"
    text = both + "simdgroup_barrier(mem_flags::mem_none);\n"
    assert descriptions(text) == [
        "line 1: threadgroup_barrier removed",
        "line 1: threadgroup_barrier weakened to mem_flags::mem_threadgroup",
        "line 1: threadgroup_barrier weakened to mem_flags::mem_device",
        "line 2: simdgroup_barrier removed",
    ]


def test_bounds():
    text = "for (uint k = 0; k < n; ++k) if (k >= static_cast<uint>(m)) y = a < b ? a : b;\n"
    found = [m.text for m in mutations(text)]
    assert "k <= n" in found[0] and "k < -1 + n" in found[1]
    assert "k > static_cast<uint>(m)" in found[2] and "k >= 1 + static_cast<uint>(m)" in found[3]
    assert "a <= b" in found[4]


def test_subscripts():
    text = "threadgroup float tile[8 * H];\nfloat v[4];\ntile[k + 1] = v[0];\n"
    found = descriptions(text)
    assert found == [
        "line 3: + 1 dropped from an index",
        "line 3: index [k + 1] is one more",
        "line 3: index [k + 1] is one less",
        "line 3: index [0] is one more",
    ]


def test_comments_are_left_alone():
    assert descriptions("// if (a < b) x[i]\n/* threadgroup_barrier(mem_flags::mem_device); */\n") == []


@pytest.mark.parametrize("make", [samples.row_sums, samples.elementwise], ids=lambda make: make.__name__)
def test_every_mutation_is_noticed(make):
    original = make()
    with emulated_metal():
        want = original.run()
    survived = set()
    for mutation in mutations(original.source):
        sample = make()
        sample.source = mutation.text
        try:
            with emulated_metal():
                got = sample.run()
        except KernelError:
            continue
        if all(np.array_equal(a, b) for a, b in zip(got, want, strict=True)):
            survived.add(mutation.description)
    assert not survived
