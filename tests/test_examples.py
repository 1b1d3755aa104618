"""Tests of the short examples: each example runs for a few steps and is in the gallery. Slow tests run the examples
in full and compare them with their baselines."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# {example: (regex for our model's figure and the baseline's figure in the output, test whether the model learned)}
FIGURES = {
    "beginner": (r"saw: (\S+) bits per character; a table of pairs: (\S+)", lambda ours, table: ours < table - 0.3),
    "classify": (r"other names: (\S+)%; naive Bayes: (\S+)%", lambda ours, bayes: ours > bayes),
    "forecast": (r"LSTM (\S+), linear (\S+),", lambda ours, linear: ours < linear / 2),
    "own_cell": (r"validation: sLSTM (\S+), LSTM (\S+) bits", lambda own, lstm: own < lstm + 0.1 and own < 2.5),
    "policy": (r"won: (\S+)%; .* step: (\S+)%", lambda ours, wiped: ours > 90 and wiped < 65),
    "voice_activity": (r"right answers.*: (\S+)%; .*: (\S+)%", lambda ours, energy: ours > energy + 10),
}


def figures(name, text):
    """Return [our model's figure, the baseline's figure] from the output of an example. If the
    output says how far two computations are apart, assert that they are at most 2e-5 apart."""
    (result,) = re.findall(FIGURES[name][0], text)
    assert all(float(apart) <= 2e-5 for apart in re.findall(r"(\S+) apart", text))
    assert ("apart" in text) == (name in ("policy", "voice_activity"))
    return [float(figure) for figure in result]


@pytest.mark.parametrize("name", FIGURES)
def test_two_steps(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # if an example changes this, monkeypatch restores it
    monkeypatch.syspath_prepend(ROOT / "examples")  # examples import `support` from this folder
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    spec.loader.exec_module(example := importlib.util.module_from_spec(spec))
    if name == "beginner":
        example.TEST = example.TEST[:1000]
    if name == "classify":
        example.TEST = 20
    monkeypatch.chdir(tmp_path)
    example.main(2)
    figures(name, capsys.readouterr().out)
    assert (tmp_path / "runs" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_it_learns(name, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert FIGURES[name][1](*figures(name, run.stdout)), run.stdout


@pytest.mark.parametrize("words", ["--help", "0", "\N{SUPERSCRIPT TWO}", "1 2"])
def test_help_is_the_first_lines(words):
    command = [sys.executable, str(ROOT / "examples" / "policy.py"), *words.split()]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert run.returncode == 1 and run.stderr.startswith("Reinforcement learning") and not run.stdout


@pytest.mark.parametrize("name", [*FIGURES, "from_torch", "quantized_streaming"])
def test_it_is_short(name):
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) <= 100


def test_quantized_streaming():
    """The example quantized_streaming runs and shows that fewer bits take less memory and have larger errors. It
    measures each number of bits in a separate process."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / "quantized_streaming.py"), "2", "64"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line.split() for line in run.stdout.splitlines()[1:]]
    assert run.returncode == 0 and [line[0] for line in lines] == ["32", "8", "4"], run.stderr
    weights, off = ([float(line[n]) for line in lines] for n in (1, -1))
    assert weights[0] > 2 * weights[1] and off[0] == 0 < off[1] < off[2] < 0.2


def test_the_gallery_has_every_example():
    """docs/gallery.md has a link to every example, and the picture of every example that draws one."""
    page = (ROOT / "docs" / "gallery.md").read_text()
    for path in (ROOT / "examples").glob("*.py"):
        assert f"[examples/{path.name}](../examples/{path.name})" in page
    for name in FIGURES:
        assert f"(pictures/{name}.png)" in page


@pytest.mark.parametrize("full", [False, True], ids=["closed", "full"])
def test_an_output_that_cannot_be_written_ends_an_example_without_a_traceback(full):
    if full and not Path("/dev/full").exists():  # only Linux has this file, which is always full
        return
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(ROOT / "examples" / "quantized_streaming.py"), "1", "32"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with os.fdopen(writer, "w") as closed, open("/dev/full" if full else os.devnull, "w") as file:
        output = file if full else closed
        run = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, env=environment)
    code, text = (1, "the output cannot be written: ") if full else (141, "")
    assert run.returncode == code and run.stderr.startswith(text) and run.stderr.count("\n") == full
