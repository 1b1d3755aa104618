"""Tests of `python -m mlx_lstm.check`, which compares engines with a reference: its printed lines, JSON file and
exit code, on Linux and on a simulated Mac."""

import importlib
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from kernel_texts import compile_each, family, generated_texts, kernel_texts, write
from on_metal import on_metal

from mlx_lstm.check import __main__ as command
from mlx_lstm.check import further
from mlx_lstm.check.further import Command
from mlx_lstm.engines import ENGINES
from mlx_lstm.lab.cases import run as run_case
from mlx_lstm.lab.engines import comparison
from mlx_lstm.lab.engines import report as report_module
from mlx_lstm.lab.engines.comparison import Finding, compare, findings, prepare
from mlx_lstm.lab.engines.grid import grid
from mlx_lstm.lab.engines.report import Report, engine_lines
from mlx_lstm.lab.report import one_line
from mlx_lstm.lab.timing import short

ROOT = Path(__file__).parents[1]

DAMAGES = {
    "another number": """
from mlx_lstm.engines.metal import kernel
read = kernel.shader_file
changed = "return activate", "return 1.01f * activate"
kernel.shader_file = lambda name: read(name).replace(*changed) if name == "fused_rnn" else read(name)
""",
    "no kernel": """
from mlx_lstm.engines.metal import kernel
read = kernel.shader_file
kernel.shader_file = lambda name: read(name) + "garbage;" * (name == "fused_rnn")
""",
    "a crash": """
import os
from mlx_lstm.engines.autodiff import ENGINE_MODULES
ENGINE_MODULES["stepwise"].backward = lambda *arguments: os.abort()
""",
    "no end": """
import time
from mlx_lstm.engines.autodiff import ENGINE_MODULES
ENGINE_MODULES["ops"].forward = lambda *arguments: time.sleep(100)
""",
}


@pytest.fixture(autouse=True)
def in_haste(monkeypatch):
    """Make all time measurements as short as possible, because times have no meaning in a test."""
    for name, value in {"SECONDS": 0.01, "ROUNDS": 1, "QUIET": 0.0}.items():
        monkeypatch.setattr(short, name, value)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that takes lines of Python code. Each child process that starts later runs these lines
    before anything else."""

    def begin(lines):
        Path(tmp_path, "sitecustomize.py").write_text(lines)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT / 'tests'}:{ROOT}")

    return begin


def run(tmp_path, capsys, *arguments):
    """Run the check command in this process. Return (exit code, printed lines, content of the JSON file)."""
    file = tmp_path / "check.json"
    code = command.main([*arguments, "--file", str(file)])
    return code, capsys.readouterr().out.splitlines(), json.loads(file.read_text())


@pytest.mark.not_on_a_mac("a Mac is simulated, or is to be missing")
def test_on_linux(tmp_path, capsys):
    """On Linux the command checks the engines that can run there, says what a Mac would add, prints times and writes
    the JSON file. It needs no optional package."""
    code, lines, report = run(tmp_path, capsys, "--problems", "gru, 17 items", "--sizes", "3,2,3,4")
    assert code == 0 and lines[0].startswith("mlx_lstm ") and len(lines) == 8
    assert [line[:32] for line in lines[1:3]] == [f"{word:11}1 of 1 problems right" for word in ("numpy", "ops")]
    assert lines[3].startswith("not here   fused, stepwise: ") and "a Mac would add them: 2 comparisons" in lines[3]
    assert re.match(r"3,2,3,4 +forward: mlx.nn.LSTM [\d.]+ ms; numpy [\d.]+ ms, ", lines[4])
    assert re.match(r"3,2,3,4 +forward and gradient: mlx.nn.LSTM [\d.]+ ms; numpy [\d.]+ ms, ", lines[5])
    assert lines[7] == "verdict: RIGHT: all 2 comparisons are within their bounds"
    assert [(row["engine"], row["failure"]) for row in report["comparisons"]] == [("numpy", ""), ("ops", "")]
    assert {"chip", "system", "mlx", "kernels", "command"} <= report["machine"].keys()
    assert [row["status"] for row in report["times"]] == ["timed"] * 4


@pytest.mark.not_on_a_mac("a Mac is simulated, or is to be missing")
def test_as_on_a_mac(tmp_path, capsys, start):
    start("import on_metal; on_metal.pretend()")
    with on_metal():
        # The kernels of these sizes are those of many other tests, so they are compiled once for all.
        code, lines, report = run(tmp_path, capsys, "--problems", "rnn, 17 items", "--sizes", "3,2,3,9")
    assert code == 0 and len(lines) == 9, lines
    assert [line.split()[0] for line in lines[1:5]] == list(ENGINES)
    assert re.match(r"3,2,3,9 +forward: mlx.nn.LSTM [\d.]+ ms; fused [\d.]+ ms, .*; stepwise [\d.]+ ms, ", lines[5])
    assert all(row["failure"] == "" and 0 < row["error"] < row["bound"] for row in report["comparisons"])


@pytest.mark.not_on_a_mac("damaged kernels: a GPU may hang, and the emulator is to notice them")
@pytest.mark.parametrize(
    ("damage", "engine", "said"),
    [
        ("another number", "fused", r"rnn, 17 items, float32: \w+: error [\d.e-]+ > bound [\d.e-]+$"),
        ("no kernel", "fused", r"rnn, 17 items, float32: KernelError: kernel \w+: \[compile\] a type specifier is"),
        ("a crash", "stepwise", r"rnn, 17 items, float32: the process ended by SIGABRT: "),
    ],
)
def test_a_damaged_kernel_is_found(tmp_path, capsys, start, damage, engine, said):
    """If an engine is damaged, the exit code is 1 and a printed line says what is wrong. The other engines are still
    checked. There are three damages: wrong numbers, a kernel that does not compile, and a process that ends."""
    start(f"import on_metal; on_metal.pretend()\n{DAMAGES[damage]}")
    with on_metal():
        code, lines, report = run(tmp_path, capsys, "--problems", "rnn, 17 items", "--sizes")
    number = 1 + ENGINES.index(engine)
    assert code == 1 and len(lines) == 8 and lines[number].endswith("1 FAILED:")
    assert re.match(said, lines[number + 1].strip()), lines
    assert lines[-1] == f"verdict: WRONG: 1 of 4 comparisons failed, of {engine}"
    assert [row["engine"] for row in report["comparisons"] if row["failure"]] == [engine]


def prepared_case(name):
    """Return the case of the check command that has this name and float32 arrays, prepared for a comparison."""
    return prepare(next(case for case in grid() if (case.name, case.dtype) == (name, "float32")))


@pytest.mark.parametrize("array", ["x", "Wx", "Wh", "b", "h0", "bhn"])
def test_every_gradient_is_judged(monkeypatch, array):
    def wrong(*arguments, training=True):
        results = run_case(*arguments, training)
        return results | ({f"d{array}": results[f"d{array}"] + 1} if training else {})

    monkeypatch.setattr(comparison, "run", wrong)
    assert compare(prepared_case("gru, 17 items"), "numpy").failure.startswith(f"d{array}: error ")


def test_a_gradient_that_is_missing_is_a_failure(monkeypatch):
    def incomplete(*arguments, training=True):
        return {name: array for name, array in run_case(*arguments, training).items() if name != "dWh"}

    monkeypatch.setattr(comparison, "run", incomplete)
    assert compare(prepared_case("gru, 17 items"), "numpy").failure == "dWh: missing"


@pytest.mark.parametrize("array", ["h", "hT"])
def test_calls_without_training_are_judged(monkeypatch, array):
    def wrong(*arguments, training=True):
        results = run_case(*arguments, training)
        return results | ({} if training else {array: results[array] + 1})

    monkeypatch.setattr(comparison, "run", wrong)
    assert compare(prepared_case("gru, 17 items"), "numpy").failure.startswith(f"without training, {array}: error ")


@pytest.mark.slow  # slow because it waits for a timeout
def test_a_kernel_that_hangs_costs_a_few_processes_only(start, monkeypatch):
    start(DAMAGES["no end"])
    monkeypatch.setattr(comparison, "LOSSES", 1)
    cases = grid()
    numbers = [n for n, case in enumerate(cases) if case.name == "rnn, 17 items"] * 2
    work = [(n, engine) for n in numbers for engine in ("ops", "numpy")]
    found = list(findings(work, cases, full=False, limit=20))
    assert [(finding.engine, finding.lost) for finding in found if finding.engine == "ops"] == [("ops", True)] * 2
    assert found[0].failure == "no answer after 20 seconds"
    assert [finding.failure for finding in found if finding.engine == "numpy"] == ["", ""]


@pytest.mark.not_on_a_mac("a Mac is simulated, or is to be missing")
def test_an_engine_that_was_asked_for_has_to_run(capsys):
    with pytest.raises(SystemExit) as info:
        command.main(["--engines", "numpy", "fused"])
    assert info.value.code == 2 and "fused cannot run here: Metal shaders run on the GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit) as info:
        command.main(["--problems", "nothing"])
    assert info.value.code == 2 and "no problem has nothing in its name" in capsys.readouterr().err


def test_a_file_that_cannot_be_written(capsys):
    """If the JSON file cannot be written, the command says so before any comparison. The test has one
    folder that is missing and one that is not writable."""
    with pytest.raises(SystemExit) as info:
        command.main(["--file", "/proc/nothing/x.json"])
    assert info.value.code == 2 and "--file: no folder /proc/nothing" in capsys.readouterr().err
    assert command.main(["--problems", "rnn, 17", "--sizes", "--file", "/proc/x.json"]) == 2
    said = capsys.readouterr()
    assert "cannot write /proc/x.json" in said.err and "--file names another place" in said.err and not said.out


def test_a_device_is_not_replaced_by_the_report(tmp_path, capsys):
    """The report replaces an old file. A named pipe, which stands for a device such as /dev/stdout, stays."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SystemExit) as info:
        command.main(["--problems", "rnn, 17", "--sizes", "--file", str(tmp_path / "pipe")])
    said = capsys.readouterr()
    assert info.value.code == 2 and "is a pipe" in said.err and not said.out and (tmp_path / "pipe").is_fifo()


def test_an_interrupted_check_keeps_what_it_found(tmp_path, capsys, monkeypatch):
    """After Ctrl-C during the second comparison, the JSON file contains the result of the first comparison, and the
    exit code is 130."""

    def interrupted(work, cases, full):
        yield Finding("rnn, 17 items", "float32", "numpy", tensor="h", error=0.1, failure=str(Path.home() / "x"))
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "findings", interrupted)
    code, printed, report = run(tmp_path, capsys, "--problems", "rnn, 17 items")
    assert not any("interrupted" in line for line in printed)  # stderr has that line
    assert code == 130 and report["verdict"] == "unfinished" and len(report["comparisons"]) == 1
    assert report["comparisons"][0]["failure"] == "~/x" and str(Path.home()) not in json.dumps(report)


def test_the_file_grows_with_the_findings(tmp_path, monkeypatch):
    report = Report(tmp_path / "check.json", "command", "cpu")
    monkeypatch.setattr(report_module, "EVERY", 0.0)
    for n in range(3):
        report.add(Finding(f"problem {n}", "float32", "ops"))
        assert len(json.loads(report.file.read_text())["comparisons"]) == n + 1
    assert [file.name for file in tmp_path.iterdir()] == ["check.json"]


def test_failures_are_told_once():
    right = Finding("lstm, 1 item", "float32", "fused", tensor="h", error=0.1)
    refused = "RuntimeError: [metal::Device] Unable to build metal library\nfused.metal:3:1: error: no\nmore"
    wrong = [Finding(f"gru, {n} items", "float16", "fused", failure=refused) for n in range(20)]
    wrong += [Finding(f"rnn, {n} items", "float32", "fused", 0.0, "h", n, 0.5, f"h: error {n}") for n in (2, 3)]
    lines = engine_lines("fused", [right, *wrong])
    assert lines == [
        "fused      1 of 23 problems right, in float32, float16; largest error 0.10 of its bound "
        "(h of lstm, 1 item, float32); 22 FAILED:",
        "  gru, 0 items, float16 and 19 more: RuntimeError: [metal::Device] Unable to build metal library "
        "fused.metal:3:1: error: no more",
        "  rnn, 3 items, float32 and 1 more: h: error 3",
    ]
    assert one_line("") == "" and len(one_line("x" * 1000)) < 420
    others = [Finding("a", "float32", "ops", failure=f"error number {n}") for n in range(12)]
    assert engine_lines("ops", others)[-1] == "  and 4 other failures: see the file"


# --- The cases that the command compares -----------------------------------------------------------------------------


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_problem_shows_something(full):
    """The error bounds of every check case (random inputs and options) refuse zeros as results and accept the
    results of engine `ops`. A default test run takes every ninth case."""
    for case in grid(full)[:: 1 if full else 9]:
        finding = compare(prepare(case), "ops")
        assert not finding.failure, finding


def test_a_case_that_shows_nothing_is_drawn_again(monkeypatch):
    case = next(case for case in grid(full=True) if case.name == "option relu_gates, 1 items")
    assert not compare(prepare(case), "ops").failure
    monkeypatch.setattr(comparison, "SEEDS", (1,))
    assert "would accept zeros" in compare(prepare(case), "ops").failure


@cache
def texts_of_the_default_cases():
    return kernel_texts(grid())


def test_the_pages_have_the_numbers_of_comparisons_and_kernels():
    page, costs = ((ROOT / "docs" / name).read_text() for name in ("check.md", "engines.md"))
    mac, linux = {"device": "gpu", "metal": True}, {"device": "cpu", "metal": False}
    counts = [
        sum(not case.hindrance(engine, **machine) for case in grid(full) for engine in ENGINES)
        for machine in (mac, linux)
        for full in (False, True)
    ]
    few = len(texts_of_the_default_cases())
    assert f"| a Mac | {counts[0]} | {counts[1]:,} | {few} | " in page
    assert f"| Linux | {counts[2]} | {counts[3]} | none | none |" in page
    start = f"{counts[2]} comparisons on Linux, {counts[0]} on a Mac; with `--full` {counts[3]} and {counts[1]:,} |"
    assert start in (ROOT / "README.md").read_text()
    assert f"`python -m mlx_lstm.check` | {few} |" in costs


@pytest.mark.slow
def test_the_pages_have_the_number_of_all_kernels():
    page, costs = ((ROOT / "docs" / name).read_text() for name in ("check.md", "engines.md"))
    count = len({*kernel_texts(grid(full=True)), *generated_texts()})
    assert f" | {count:,} |\n" in page and f"check --full` | {count:,} |" in costs


def test_every_file_of_the_shaders_is_compiled():
    """The check command's default cases, together with the cells of `mlx_lstm.cells`, compile code from every Metal
    shader file. Only the cases of --full compile kernels with 64-bit indices."""
    texts = texts_of_the_default_cases()
    named = set(re.findall(r'#line \d+ "(\w+\.metal)"', "".join(texts + generated_texts())))
    assert named == {path.name for path in ROOT.glob("metal/*.metal")}
    assert {family(text).split("_")[0] for text in texts} == {"lstm", "gru", "rnn", "stepwise", "recurrent"}
    few = kernel_texts(case for case in grid(full=True) if case.long and case.name.startswith("rnn"))
    assert any("using Index = long;" in text for text in few) and not any("Index = long;" in text for text in texts)


def test_a_text_that_a_compiler_refuses_is_named(tmp_path, capsys):
    case = next(case for case in grid() if case.name == "rnn, 17 items")
    names = write(tmp_path, kernel_texts([case]))
    assert names.total() == len(list(tmp_path.glob("*.metal"))) > 5
    text = Path(tmp_path, "rnn_fused_forward_1.metal").read_text()
    assert text.startswith('#line 1 "mlx/backend/metal/kernels/') and "[[kernel]] void custom_kernel_rnn_fused" in text
    compiler = "import sys; sys.exit('x.metal:1:2: error: no' if 'rnn_fused_forward' in sys.argv[1] else 0)"
    refused = compile_each([sys.executable, "-c", compiler], tmp_path)
    said = capsys.readouterr()
    assert {file.name.rpartition("_")[0] for file in refused} == {"rnn_fused_forward"}
    assert (
        said.err == f"{len(refused)} kernels: x.metal:1:2: error: no\n" and f" of {names.total()} compiled" in said.out
    )


# --- Commands that the option --full runs in addition ----------------------------------------------------------------


@pytest.mark.not_on_a_mac("a Mac is simulated, or is to be missing")
def test_what_full_adds(capsys, tmp_path, monkeypatch):
    """The option --full runs other commands of the package. If such a command cannot run on this machine, the check
    prints why. Otherwise it reports the command's last line, exit code and output file."""
    for name, line in further.commands(metal=False).items():
        assert further.run(name, line)[0].startswith(f"{name:11}not run: ")
    assert set(further.commands(metal=True)) == {"tune", "cells", "compare", "settle"}
    quick = Command(("compare", "--contenders", "ops", "--cases", "gru: one of everything"), None, "")
    line, found = further.run("compare", quick)
    assert line.startswith("compare    exit code 0: ") and found["printed"].strip().endswith(line[24:])
    assert not found["failed"] and found["written"]["rows"]
    line, found = further.run("compare", quick._replace(line=("compare", "--golden", "nothing")))
    assert found["failed"] and found["exit code"] == 2


def test_the_workflows_call_what_is_there():
    """Every command of this package in .github/workflows is an existing module and uses only options that the module
    accepts."""
    text = "".join(path.read_text() for path in ROOT.glob(".github/workflows/*.yml"))
    lines = re.findall(r"python -m mlx_lstm\.(\w+) ([^|\n]*)", text)
    assert {name for name, _ in lines} == {"check", "bench", "compare"}
    for name, options in lines:
        importlib.import_module(f"mlx_lstm.{name}.__main__").make_parser().parse_args(options.split())


@pytest.mark.parametrize(("platform", "extra"), [("linux", "'.[cpu]'"), ("darwin", ".")])
def test_importing_without_mlx_says_what_to_install(platform, extra):
    code = f"import sys; sys.platform = '{platform}'; sys.modules['mlx.core'] = None; import mlx_lstm"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"ImportError: mlx_lstm needs MLX; in a clone of mlx-lstm: pip install {extra} (")
