"""Test the line coverage: which lines of a shader file are statements, and that executed lines of a kernel are assigned
to the shader files from which its source was assembled."""

from contextlib import nullcontext

import numpy as np
import pytest

from metal_emulator import coverage, emulated_metal
from metal_emulator.sample_kernels import Sample
from metal_emulator.source_lines import map_lines, statements

MATH = """// functions of the coverage test
struct Pair { float a, b; };
template <bool FAST>
inline float half_of(float x) {
  if constexpr (FAST)
    return x * 0.5f;
  else
    return x / 2.0f;
}
template <typename T>
inline T never_used(T x) {
  T y = x + T(1);
  return y;
}
"""
BODY = """// body of the coverage test
const uint i = thread_position_in_grid.x;
float v = a0[i];
if (v > 1000.0f) {
  v = half_of<true>(v);  // nobody gets here
  v += 3.25f;
} else {
  v = half_of<true>(v) + 0.125f;
}
o0[i] = v;
"""
FILES = {"math.metal": MATH, "body.metal": BODY}


def line(text: str, part: str, nth: int = 0) -> int:
    return [n for n, s in enumerate(text.split("\n"), start=1) if part in s][nth]


def named(file: str, text: str) -> str:
    return f'#line 1 "{file}"\n{text}'


def run(values: np.ndarray) -> None:
    header, body = named("math.metal", MATH), named("body.metal", BODY)
    with emulated_metal():
        Sample(body, [values], [(32,)], (32, 1, 1), (32, 1, 1), header=header).run()


@pytest.fixture
def ran():
    run(np.arange(32, dtype=np.float32))
    return coverage.report(FILES)


def test_missed_branch_and_templates(ran):
    body, math = ran["body.metal"], ran["math.metal"]
    assert line(BODY, "0.125f") in body.executed and line(BODY, "o0[i]") in body.executed
    assert body.missed >= {line(BODY, "half_of<true>(v);"), line(BODY, "3.25f")}
    assert line(MATH, "x * 0.5f") in math.executed
    assert math.missed == {line(MATH, "x / 2.0f"), line(MATH, "T y ="), line(MATH, "return y")}


def test_union_over_runs_and_processes(ran, tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    coverage.dump(first)
    run(np.full(32, 2000, np.float32))
    coverage.dump(second)
    assert coverage.report(FILES, coverage.merge([first]))["body.metal"].missed
    merged = coverage.report(FILES, coverage.merge([first, second]))
    assert not merged["body.metal"].missed
    assert "body.metal: 8/8 lines (100.0 %), missed: -" in coverage.format_report(merged)


def test_where_no_lines_count(tmp_path, monkeypatch):
    """The report has no executed lines of a kernel that ran after `count_lines(False)`, or inside `set_aside`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    body = named("uncounted.metal", BODY.replace("a0[i]", "a0[i] + 1.0f"))
    sample = Sample(body, [np.ones(32, np.float32)], [(32,)], (32, 1, 1), (32, 1, 1), header=named("math.metal", MATH))
    for counting, aside in ((False, False), (True, True), (True, False)):
        before = coverage.count_lines(counting)
        with coverage.set_aside() if aside else nullcontext(), emulated_metal():
            sample.run()
        coverage.count_lines(before)
        found = coverage.report({"uncounted.metal": BODY})["uncounted.metal"]
        assert bool(found.executed) == (counting and not aside)


def test_lines_count_from_the_last_directive():
    text = 'one\n#line 3 "body.metal"\nchanged text\n\n#line 1 "another.metal"\none'
    assert map_lines(text, FILES) == {3: ("body.metal", 3), 4: ("body.metal", 4)}
    beyond = '#line 12 "body.metal"\nlast\nwhat MLX writes behind it'
    assert map_lines(beyond, {"body.metal": "line\n" * 11 + "last"}) == {2: ("body.metal", 12)}


def test_what_counts_as_a_statement():
    text = """
    constant float TABLE[2] = {1, 2};
    struct S {
      enum { AT_ONCE = 4 };
    };
    inline float f(float x) {
      float y;
      using U = float;
      constexpr int n = 3;
      y = x;
      Pair p = Pair{x, y};
      for (int k = 0; k < n; ++k) {
        y += g(x,
               k);
      }
      return y;
    }
    inline Pair h(float x) {
      Pair built;
      built.x = x;
      return built;
    }"""
    lines = text.split("\n")
    found = [(lines[a - 1].strip(), b - a) for a, b in statements(text)]
    assert found == [
        ("y = x;", 0),
        ("Pair p = Pair{x, y};", 0),
        ("for (int k = 0; k < n; ++k) {", 0),
        ("y += g(x,", 1),
        ("return y;", 0),
        ("built.x = x;", 0),
    ]
