"""Check the tool that plants slips (tests/mutation): which slips it plants, which tests it chooses, and that it tells a
noticed slip from one that survives."""

from pathlib import Path

from mutation import choice
from mutation.__main__ import notice, pytest
from mutation.slips import python_slips, slips

ROOT = Path(__file__).parents[1]

TEXT = """Pair = tuple[int, int]


def add(a, b: int = 1) -> int:
    if a < b and not a:
        return sum((a, b), start=2)
    return -a
"""
WHATS = {"1 becomes 2", "< becomes <=", "and becomes or", "not dropped", "a condition is negated", "start=2 dropped"}
WHATS |= {"2 becomes 3", "a dropped", "b dropped", "- dropped"}


def test_slips_of_a_python_text():
    """Each slip changes one line, and the text still compiles. The hints of types stay."""
    found = list(python_slips(TEXT))
    assert {slip.what for slip in found} == WHATS
    for slip in found:
        compile(slip.text, "slip", "exec")
        pairs = zip(TEXT.splitlines(), slip.text.splitlines(), strict=True)
        assert [n for n, (one, other) in enumerate(pairs, 1) if one != other] == [slip.line]


def test_slips_of_a_shader():
    """The damages of the tests of kernels are slips. Those that are known to change no result are left out."""
    found = slips("metal/fused.metal", (ROOT / "metal" / "fused.metal").read_text())
    assert found and all(slip.what for slip in found)


def test_tests_are_chosen_by_their_imports():
    """The tests that import a module come first, and every test of kernels is among those of a shader."""
    assert "tests/test_tf.py" in choice.tests_of(ROOT, "mlx_lstm/tf/_lstm.py")[:4]
    assert "tests/test_kernels.py" in choice.tests_of(ROOT, "metal/fused_gru.metal")
    modules = [f"mlx_lstm/engines/metal/{file.name}" for file in (ROOT / "mlx_lstm/engines/metal").glob("*.py")]
    shaders = {f"metal/{file.name}" for file in (ROOT / "metal").glob("*.metal")}
    assert shaders <= set().union(*(choice.imports(ROOT, module) for module in modules))
    assert "tests/test_torch.py" in choice.tests_of(ROOT, "mlx_lstm/recurrence/_packed.py")


def test_a_noticed_slip_and_a_survivor(tmp_path):
    """In a small repository a slip that a test notices is told from one that no test notices. Afterwards the file is
    as it was. The doctests of the file run first; they alone do not know the options of tests/conftest.py."""
    (tmp_path / "mlx_lstm").mkdir()
    (tmp_path / "tests").mkdir()
    module = tmp_path / "mlx_lstm" / "sums.py"
    module.write_text("def add(a, b):\n    return a + b\n\n\ndef unused(a):\n    return a + 1\n\n\n# >>>\n")
    (tmp_path / "mlx_lstm" / "__init__.py").write_text("")
    (tmp_path / "tests" / "conftest.py").write_text(
        "def pytest_addoption(parser):\n"
        "    for name in ('--fuzz', '--fuzz-seed'):\n        parser.addoption(name, default=1)\n"
    )
    test = "from mlx_lstm.sums import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"
    (tmp_path / "tests" / "test_sums.py").write_text(test)
    right = module.read_text()
    by_line = {slip.line: slip for slip in python_slips(right)}
    assert notice(tmp_path, "mlx_lstm/sums.py", 2, by_line[2].text, 60)[0] == "tests/test_sums.py::test_add"
    assert notice(tmp_path, "mlx_lstm/sums.py", 6, by_line[6].text, 60) == ("", 2, False)
    assert module.read_text() == right


def test_a_slip_that_changes_the_names_of_cases(tmp_path):
    """A slip changes the name of a test's case, so pytest does not know the recorded name. All its cases run."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n"
        "    for name in ('--fuzz', '--fuzz-seed'):\n        parser.addoption(name, default=1)\n"
    )
    test = "import pytest\n\n\n@pytest.mark.parametrize('n', [5])\ndef test_n(n):\n    assert n == 4\n"
    (tmp_path / "tests" / "test_n.py").write_text(test)
    assert pytest(tmp_path, ["tests/test_n.py::test_n[4]"], 60) == "tests/test_n.py::test_n[5]"
