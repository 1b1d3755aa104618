"""Test that the emulator reports every planted bug with the kind of finding that the bug's table entry names."""

import pytest

from metal_emulator import KernelError, emulated_metal, planted_language_bugs, planted_run_bugs
from metal_emulator.bug_table import BUGS

WITH_A_LINE = ("race", "out-of-bounds", "uninitialised", "divergence", "simdgroup", "arithmetic", "misaligned")
if not BUGS:
    planted_run_bugs.add_bugs()
    planted_language_bugs.add_bugs()
MISSED = [bug for bug in BUGS if bug.kind is None]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bug(bug):
    with emulated_metal(skew=bug.skew):
        if bug.kind is None:
            bug.build().run()  # if this raises, the bug is found now: set its kind in the table
            return
        with pytest.raises(KernelError) as caught:
            bug.build().run()
    expected = [finding for finding in caught.value.findings if finding.kind == bug.kind]
    assert expected, str(caught.value)
    if bug.kind in WITH_A_LINE:
        assert expected[0].line > 0, str(caught.value)


def test_enough_bugs_and_few_missed():
    assert len({bug.name for bug in BUGS}) == len(BUGS)
    assert len(BUGS) - len(MISSED) >= 73 and len(MISSED) <= 2
