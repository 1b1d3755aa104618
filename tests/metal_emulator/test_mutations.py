"""Test which mutations (small damages to a kernel) are made. Test in small kernels that every damage is noticed: the
emulator reports an error, or the kernel's results are wrong."""

import numpy as np
import pytest

from metal_emulator import KernelError, emulated_metal
from metal_emulator import sample_kernels as samples
from metal_emulator.mutations import chosen, mutations, with_choice


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


EVERY_KIND = """
#include <metal_stdlib>
using namespace metal;
inline float exchanged(threadgroup float* shared, uint i, float x) {
  shared[i] = x;
  threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
  return shared[63 - i];
}
inline float counted(float x, int most, uint i) {
  for (int k = 0; k < most; ++k) x += 1.0f;
  if (i >= 3u) x += 10.0f;
  while (x <= 4.0f) x += 1.0f;
  return x > 7.0f ? x : -x;
}
"""


def test_a_chosen_damage_is_the_damage():
    """If a damage is chosen when the kernel runs (`with_choice`), the kernel gives the same results, or the same
    findings, as a kernel whose text contains only this damage."""
    body = "const uint i = thread_position_in_grid.x;\nthreadgroup float shared[64];\n"
    body += "out[i] = counted(exchanged(shared, i, x[i]), 3, i);"
    sample = samples.Sample(body, [np.arange(64) % 9 - 4.0], [(64,)], (64, 1, 1), (64, 1, 1), EVERY_KIND)
    sample.input_names, sample.output_names = ["x"], ["out"]

    def seen(header):
        sample.header = header
        try:
            with emulated_metal():
                return sample.run()[0].tolist()
        except KernelError as error:
            return [finding.kind for finding in error.findings]

    wanted = {m.description: m.text for m in mutations(EVERY_KIND) if "index" not in m.description}
    text, numbers = with_choice(EVERY_KIND, range(EVERY_KIND.count("\n") + 1))
    assert list(numbers.values()) == list(wanted)
    results = {"none": seen(EVERY_KIND)}
    assert seen(text) == results["none"]
    for number, what in numbers.items():
        results[what] = seen(wanted[what])
        with chosen(number):
            assert seen(text) == results[what], what
    # Two damages have the same result as another entry. `weakened to mem_threadgroup` changes nothing, because no
    # thread reads device memory that another one writes. And for integers `>` equals `>= 1 +`.
    assert len({str(result) for result in results.values()}) == len(results) - 2
