"""Tests of README.md and docs/: each Python block runs on its own and prints the output shown below it, and the
commands and links are valid."""

import contextlib
import importlib
import io
import re
import runpy
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHER_PAGES = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "metal/README.md")]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced code block of a Markdown page. `output` is the content of the text block that directly follows it, or
    None."""

    page: str
    line: int
    language: str
    text: str
    output: str | None


def blocks_of(path: Path) -> list[Block]:
    text, found = path.read_text(), []
    fences = list(FENCE.finditer(text))
    for n, fence in enumerate(fences, 1):
        after = fences[n] if n < len(fences) else None
        behind = after and after[1] == "text" and not text[fence.end() : after.start()].strip()
        line = text.count("\n", 0, fence.start()) + 1
        page = str(path.relative_to(ROOT))
        found.append(Block(page, line, fence[1], fence[2], after[2] if behind else None))
    return found


BLOCKS = [block for path in PAGES for block in blocks_of(path)]
PYTHON = [block for block in BLOCKS if block.language == "python"]


def number(blocks):
    """Return pytest ids for code blocks. Each id contains the block's number, the number of all blocks, the page and
    the line."""
    return [f"{n}of{len(blocks)}-{block.page}-line{block.line}" for n, block in enumerate(blocks, 1)]


@pytest.mark.parametrize("block", PYTHON, ids=number(PYTHON))
def test_python_block(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some blocks write files into the working folder
    if "import keras" in block.text:  # one process can use only one Keras backend, and the other tests use jax
        monkeypatch.setenv("KERAS_BACKEND", "jax")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block.text, f"{block.page}, line {block.line}", "exec"), {"__name__": "block"})
    assert printed.getvalue() == (block.output or "")


UNCHECKED = ("git", "cd", "apt-get", "python3", "source", "mlx.distributed_config")
INLINE = re.compile(r"`((?:PYTHONPATH=tests (?=python)|)(?:python -m|make|\S*bin/python) [^`]+)`")
COMMANDS = [line for block in BLOCKS if block.language == "sh" for line in block.text.splitlines()]
COMMANDS += [line for page in PAGES + OTHER_PAGES for line in INLINE.findall(page.read_text())]


@pytest.mark.parametrize("line", dict.fromkeys(COMMANDS))
def test_command(line):
    """The make targets, pip extras, files and options of each command in the docs exist. The test does not run the
    command itself."""
    for part in line.split("&&"):
        words = [word for word in shlex.split(part, comments=True) if not re.fullmatch(r"[A-Z_]+=\S+", word)]
        if words and Path(words[0]).name not in UNCHECKED:
            check_command(Path(words[0]).name, *words[1:])


def check_command(program, *words):
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words) <= set(targets)
    elif program == "pip":
        declared = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
        assert words[0] == "install" and words[1].startswith(".")
        assert set(re.findall(r"\w+", words[1])) <= set(re.findall(r"^(\w+) = \[", declared, re.MULTILINE))
    elif program == "mlx.launch":
        launched = words[words.index("--") + 1 :]
        check_command(Path(launched[0]).name, *launched[1:])
    elif program == "mlx-lstm":
        check_command("python", "-m", f"mlx_lstm.{words[0]}", *words[1:])
    elif words[0] == "-m" and words[1] != "pytest":
        module = f"{words[1]}.__main__" if words[1].startswith(("mlx_lstm", "machine_code")) else words[1]
        importlib.import_module(module).make_parser().parse_args(words[2:])
    else:
        assert program == "python"
        file, *options = words[2:] if words[:2] == ("-m", "pytest") else words
        text = (ROOT / file).read_text()
        options = [option.removeprefix("--").replace("-", "_") for option in options if option.startswith("--")]
        assert all(f"{option}: " in text or f'"--{option}"' in text for option in options if option != "help")


def test_options_in_prose():
    """Every command-line option in backticks in the docs is an option of a command or of an example."""
    commands = [*ROOT.glob("mlx_lstm/*/__main__.py"), *ROOT.glob("tests/*/__main__.py"), *ROOT.glob("examples/*.py")]
    known = "".join(path.read_text() for path in [*commands, ROOT / "docs/figures.py"])
    for page in PAGES:
        for option in re.findall(r"`(--[a-z-]+)", page.read_text()):
            # The examples declare an option as a field of their settings class, e.g. `    batch_size: `.
            field = f"    {option[2:].replace('-', '_')}: "
            assert option == "--help" or f'"{option}"' in known or field in known, f"{page}: {option}"


def anchors(path: Path) -> set[str]:
    """Return the link anchors that GitHub makes for the headings of a Markdown page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES + OTHER_PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        path, _, anchor = target.partition("#")
        if not target.startswith("https:"):
            assert (page.parent / path).exists(), f"{page}: {target}"
            assert not anchor or anchor in anchors(page.parent / path if path else page), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES + OTHER_PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_row_of_a_table_is_one_line_with_the_cells_of_the_row_above(page):
    lines = re.sub(r"`[^`\n]*`|\\\|", "", FENCE.sub("", page.read_text())).splitlines()  # | may stand in code
    for line, above in zip(lines, ["", *lines], strict=False):
        if line.startswith("|"):
            assert line.endswith("|"), line
            assert line.count("|") == above.count("|") or not above.startswith("|"), line
        else:
            assert " | " not in line, line


def test_places_in_contributing_exist():
    """Every path in backticks in CONTRIBUTING.md exists in the repository or in the package mlx_lstm."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"`((?:\.?\w+/)+\w*(?:\.\w+)?|\w+\.(?:py|md))`", page)
    assert len(paths) > 80
    for path in paths:
        assert (ROOT / path).exists() or (ROOT / "mlx_lstm" / path).exists(), path


def test_security_names_every_program_that_is_started():
    """Every system program in the library's code is in docs/security.md, and every program there is in the code."""
    code = "".join(path.read_text() for path in (ROOT / "mlx_lstm").rglob("*.py"))
    page = (ROOT / "docs/security.md").read_text()
    assert set(re.findall(r'"(/usr/s?bin/\w+)"', code)) == set(re.findall(r"`(/usr/s?bin/\w+)`", page))


def test_the_readme_stays_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_names_in_prose_exist():
    """Every name in backticks in the docs that begins with `mlx_lstm.` is an existing module or object. An example
    is `mlx_lstm.tf.block_lstm`."""
    for page in PAGES:
        for name in re.findall(r"`(mlx_lstm(?:\.\w+)+)", page.read_text()):
            found, *rest = name.split(".")
            found = importlib.import_module(found)
            for word in rest:
                if not hasattr(found, word):
                    importlib.import_module(f"{found.__name__}.{word}")
                found = getattr(found, word)


PUBLIC = ["mlx_lstm"]
PUBLIC += [f"mlx_lstm.{name}" for name in ("nn", "cells", "torch", "keras", "convert", "tf", "cudnn", "mpsgraph")]
PUBLIC += ["mlx_lstm.engines", "mlx_lstm.oracle"]
ENTRY = re.compile(r"\.\. (?:autoclass|autofunction|py:data):: (\S+)\n(?:   :module: (\S+)\n)?")


def test_every_public_name_has_one_entry():
    """docs/api has exactly one entry for each public class and function. The entry has the full name under which
    Sphinx indexes it."""
    pages = (ROOT / "docs" / "api").glob("*.md")
    entries = [".".join(filter(None, entry[::-1])) for page in pages for entry in ENTRY.findall(page.read_text())]
    assert len(entries) == len(set(entries))
    modules = [importlib.import_module(name) for name in PUBLIC]
    public = {f"{module.__name__}.{name}" for module in modules for name in module.__all__ if name != "__version__"}
    inner = {name for name in public if name in PUBLIC}  # public modules, which have a page instead of an entry
    assert public - inner <= set(entries), sorted(public - inner - set(entries))
    assert {name.rpartition(".")[0] for name in entries} == set(PUBLIC)


@pytest.mark.parametrize("name", ["speed", "predictions"])
def test_a_chart_shows_the_numbers_of_its_page(name):
    """`docs/charts.py` would draw the same picture again, with every number of the page's table."""
    charts = runpy.run_path(str(ROOT / "docs/charts.py"))["CHARTS"]
    picture = (ROOT / f"docs/pictures/{name}.svg").read_text()
    assert picture == charts[name]((ROOT / f"docs/{name}.md").read_text())
    for number in {"speed": ("1.6-2.2", "1/38"), "predictions": ("0.625 ms", "2,742 launches")}[name]:
        assert number in picture
