"""Tests of the benchmark command `python -m mlx_lstm.bench`: how it checks results, computes statistics, prints
tables and writes CSV files."""

import argparse
import csv
import importlib.util
import io
import os
import platform
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import mlx.core as mx
import numpy as np
import pytest

from mlx_lstm.bench import __main__ as command
from mlx_lstm.bench.__main__ import main
from mlx_lstm.lab.progress import ERASE, Progress
from mlx_lstm.lab.report import machine_card
from mlx_lstm.lab.timing import judge as judging
from mlx_lstm.lab.timing import rounds, short
from mlx_lstm.lab.timing.cases import CASES, find_contender, is_installed, streaming
from mlx_lstm.lab.timing.cases import stack as judge_stack
from mlx_lstm.lab.timing.cases.lstm import CONTENDERS, draw
from mlx_lstm.lab.timing.cases.stack import from_buffer, to_buffer
from mlx_lstm.lab.timing.judge import evaluate_lstm, judge_layer
from mlx_lstm.lab.timing.report import PAUSE_HINT, THREADS_HINT, group_text, plot
from mlx_lstm.lab.timing.rounds import Measurement, Plan, peak_ratio, plan, ratio, take_turn
from mlx_lstm.lab.timing.short import time_line
from mlx_lstm.lab.timing.tasks import PASSES, Size, Task, needed_bytes, parse_size
from mlx_lstm.lab.timing.worker import PeakMemory, Worker
from mlx_lstm.oracle.arithmetic import Rounding

TINY = Size(5, 3, 4, 8)
DOUBLE = Rounding(np.float64)
FEW = ["--seconds", "0.02", "--rounds", "2", "--patience", "0", "--device", "cpu"]

PLANTED = """
import os, sys
from mlx_lstm.lab.timing.cases.lstm import prepare_ours
from mlx_lstm.lab.timing.tasks import Contender, Work

def off_by(factor):
    def prepare(numbers, task):
        right = prepare_ours(numbers, task._replace(engine="ops"))

        def tensors(results):
            named = right.tensors(results)
            return named | {"dWh": factor * named["dWh"]}

        return Work(right.run, tensors)

    return prepare

def broken(numbers, task):
    raise NotImplementedError("no such dtype")

WRONG = Contender("wrong", "mlx", off_by(1.001))
BROKEN = Contender("broken", "mlx", broken)
ENDS = Contender("ends", "mlx", lambda numbers, task: os._exit(3))
RIGHT = Contender("right", "numpy", off_by(1))

ERRORS = "Unable to build metal library from source\\n" + "\\n".join(
    f"program_source:{n}:9: error: no such function\\n  now();\\n  ^" for n in range(900)
)

def no_pipeline(numbers, task):
    raise RuntimeError(ERRORS)

def abort(numbers, task):
    print(ERRORS, file=sys.stderr, flush=True)
    os.abort()

NO_PIPELINE = Contender("no pipeline", "mlx", no_pipeline)
ABORTS = Contender("aborts", "mlx", abort)
"""


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Write a Python module `planted` that defines contenders (implementations to time), most of them wrong or
    failing. This process and its worker processes can import the module."""
    Path(tmp_path, "planted.py").write_text(PLANTED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)


def task(contender="ours", engine="ops", size=TINY, which="backward"):
    return Task(contender, engine, size, which)


def timed(contender, *rounds, **found):
    return Measurement(task(contender, "ops" if contender == "ours" else "-"), "timed", rounds=rounds, **found)


def test_judge_evaluates_an_lstm_and_its_gradient():
    """The judge (float64 reference) computes the right gradient of sum(h * dh): it agrees with difference quotients
    of the judge's forward pass along a random direction of every array."""
    rng = np.random.default_rng(1)
    numbers = {name: array.astype(np.float64) for name, array in draw(TINY, "float32").items()}
    exact = evaluate_lstm(numbers, DOUBLE, backward=True)
    for name in ("x", "Wx", "Wh", "b"):
        direction = rng.standard_normal(numbers[name].shape)
        ends = [
            (evaluate_lstm(numbers | {name: numbers[name] + step * direction}, DOUBLE, backward=False)["h"]).ravel()
            @ numbers["dh"].ravel()
            for step in (1e-5, -1e-5)
        ]
        # The difference quotient's error is step^2 = 1e-10 times the third derivative, plus the rounding 1e-16 / step.
        assert (ends[0] - ends[1]) / 2e-5 == pytest.approx((exact[f"d{name}"] * direction).sum(), rel=1e-7, abs=1e-8)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_contender_agrees_and_the_bound_is_tight(dtype):
    numbers = draw(TINY, dtype)
    judge = judge_layer(numbers, dtype, backward=True)
    for name in filter(lambda name: is_installed(CONTENDERS[name]), CONTENDERS):
        work = find_contender(name).prepare(numbers, task(name)._replace(dtype=dtype))
        verdict = judge.judge(work.tensors(work.run()), PASSES["backward"])
        assert not verdict.refusal, f"{name}: {verdict}"
    unit = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}[dtype]
    assert all(judge.bounds[name] < 500 * unit * np.abs(judge.exact[name]).max() for name in judge.exact)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_judge_of_a_stack_evaluates_it_and_its_gradient(cell):
    """The judge (float64 reference) computes the right gradients of two bidirectional layers: they agree with
    difference quotients of the judge's forward pass along a random direction of every array."""
    rng = np.random.default_rng(1)
    numbers = CASES[f"cudnn_{cell}"].draw(Size(3, 2, 3, 2), "float32")
    numbers = {name: array.astype(np.float64) for name, array in numbers.items()}
    exact = judge_stack.evaluate(cell, numbers, DOUBLE, backward=True)
    for name in set(numbers) - {"dh"}:
        direction = rng.standard_normal(numbers[name].shape)
        ends = [
            (judge_stack.evaluate(cell, numbers | {name: array}, DOUBLE, backward=False)["h"] * numbers["dh"]).sum()
            for array in (numbers[name] + 1e-5 * direction, numbers[name] - 1e-5 * direction)
        ]
        assert (ends[0] - ends[1]) / 2e-5 == pytest.approx((exact[f"d{name}"] * direction).sum(), rel=1e-7, abs=1e-8)


@pytest.mark.parametrize("case", CASES)
def test_every_case_agrees_is_judged_tightly_and_uses_every_tensor(case):
    """The judge (float64 reference with error bounds) accepts the results of all contenders (implementations to
    time) on the same numbers. After any result tensor is multiplied by 1.001, the judge refuses the results."""
    size, passes = TINY, CASES[case].passes
    numbers = CASES[case].draw(size, "float32")
    judge = CASES[case].judge(numbers, "float32", backward="backward" in passes)
    for name, contender in CASES[case].contenders.items():
        for which in passes:
            given = Task(name, "numpy" if name == "ours" else "-", size, which, case=case)
            work = contender.prepare(numbers, given)
            results = work.tensors(work.run())
            assert results.keys() == set(passes[which]) and work.threads != 0
            assert not judge.judge(results, passes[which]).refusal, name
    for name in passes[which]:
        wrong = results | {name: np.asarray(results[name]) * np.float32(1.001)}
        assert judge.judge(wrong, passes[which]).tensor == name


def test_parameter_buffer_is_packed_and_unpacked():
    numbers = CASES["cudnn_gru"].draw(TINY, "float32")
    buffer = to_buffer(numbers)
    for name, array in from_buffer(buffer, numbers).items():
        np.testing.assert_array_equal(array, numbers[name], err_msg=name)
    assert buffer.size == sum(array.size for name, array in numbers.items() if name not in ("x", "dh"))


def test_the_judge_of_a_long_sequence(monkeypatch):
    """The judge (float64 reference with error bounds) may evaluate a long sequence in parts. The reference then
    stays the same up to rounding, and the error bounds change by less than a factor of 3. The judge still refuses an
    error of 0.1 %."""
    size = Size(50, 3, 4, 8)
    numbers = draw(size, "float32")
    monkeypatch.setattr(judging, "PART", size.T)
    whole = judge_layer(numbers, "float32", backward=True)
    monkeypatch.setattr(judging, "PART", 16)
    parts = judge_layer(numbers, "float32", backward=True)
    for name, exact in whole.exact.items():
        np.testing.assert_allclose(parts.exact[name], exact, rtol=0, atol=1e-13 * np.abs(exact).max(), err_msg=name)
        ratio = parts.bounds[name] / whole.bounds[name]
        assert 1 < ratio < 3 if name.startswith("dW") or name == "db" else 0.5 < ratio < 1.5, name
    assert judge_layer(numbers, "float32", backward=False).exact["h"].tobytes() == parts.exact["h"].tobytes()
    for every in (None, 16):
        work = find_contender("ours").prepare(numbers, Task("ours", "numpy", size, "backward", every=every))
        results = work.tensors(work.run())
        assert not parts.judge(results, PASSES["backward"]).refusal
    for name in results:
        wrong = results | {name: results[name] * np.float32(1.001)}
        assert parts.judge(wrong, PASSES["backward"]).tensor == name


def test_judge_refuses():
    judge = judge_layer(draw(TINY, "float32"), "float32", backward=True)
    right = {name: array.copy() for name, array in judge.exact.items()}
    swapped = np.roll(right["dWh"], TINY.H, axis=0)
    for name, wrong, said in [
        ("dWh", right["dWh"] * (1 + 1e-4), "dWh: error"),
        ("dWh", swapped, "dWh: error"),
        ("h", np.where(right["h"] == right["h"].max(), np.nan, right["h"]), "h: NaN"),
        ("db", right["db"][:-1], "db: shape [31], expected [32]"),
        ("dx", None, "dx: missing"),
    ]:
        verdict = judge.judge(right | {name: wrong}, PASSES["backward"])
        assert verdict.tensor == name and said in verdict.refusal
    assert "accept zeros" in judge._replace(bounds=judge.bounds | {"h": 1.0}).judge(right, ["h"]).refusal


def test_a_disagreement_is_not_timed(planted, capsys, tmp_path):
    """The benchmark does not time a contender (an implementation) that is wrong by 0.1 %, raises an error, or ends
    its process. It times the correct contender."""
    file = tmp_path / "figures.csv"
    others = [f"planted:{name}" for name in ("WRONG", "BROKEN", "ENDS")]
    arguments = ["--sizes", str(TINY), "--passes", "backward", "--engine", "ops", "--csv", str(file), *FEW]
    assert main([*arguments, "--contenders", "ours", *others]) == 1
    said = capsys.readouterr().err
    assert "wrong (-) at 5,3,4,8 backward: refused: dWh: error " in said and " > bound " in said
    assert "broken (-) at 5,3,4,8 backward: failed: NotImplementedError: no such dtype" in said
    assert "ends (-) at 5,3,4,8 backward: failed: the process ended with exit code 3" in said
    rows = {row["contender"]: row for row in csv.DictReader(file.open())}
    assert rows["wrong"]["runs"] == "0" and rows["wrong"]["median_s"] == ""
    assert float(rows["wrong"]["error"]) > float(rows["wrong"]["bound"])
    assert rows["mlx_lstm.lstm"]["status"] == "timed"


@pytest.mark.parametrize("missing", ["h", "dWh"])
def test_a_contender_without_a_result_is_refused(missing, tmp_path):
    """A contender must return all results of its pass: it would else be faster because it computes less."""
    numbers = draw(TINY, "float32")
    judge = judge_layer(numbers, "float32", backward=True)

    def answer(limit, do, file):
        np.savez(file, **{name: array for name, array in judge.exact.items() if name != missing})
        return {"once": 0.0, "peak": None, "mlx_peak": None, "threads": None}

    row, _ = rounds.check(task(), SimpleNamespace(ask=answer), judge, str(tmp_path / "results.npz"))
    assert row.status == f"refused: {missing}: missing" and row.failed


def test_what_only_a_mac_measures_is_asked_for_as_measure_takes_it(monkeypatch):
    asked = create_autospec(short.measure, return_value=[])
    monkeypatch.setattr(short, "measure", asked)
    monkeypatch.setattr(short, "judge_layer", lambda *_, **options: None)
    monkeypatch.setattr(short, "draw", lambda *_: None)
    assert len(list(short.settle(["fused", "stepwise"], Progress(io.StringIO())))) == asked.call_count > 1
    engines = {task.engine for call in asked.call_args_list for task in call.args[0]}
    assert engines == {"fused", "stepwise"} and {call.args[0][0].device for call in asked.call_args_list} == {"gpu"}


def test_a_compilers_errors_are_printed_and_the_others_measured(planted, capfd):
    """The benchmark prints a long compiler error only once per contender, cut at a length, and one line of it while it
    runs. This holds even if the error ends the worker process. The other contenders are still measured."""
    contenders = [f"planted:{name}" for name in ("NO_PIPELINE", "ABORTS", "RIGHT")]
    assert main(["--memory", "--sizes", "2,1,1,1", str(TINY), *FEW[4:], "--contenders", *contenders]) == 1
    said = capfd.readouterr()
    lines = (said.out + said.err).splitlines()
    assert sum("Unable to build metal library" in line for line in lines) == 5 and "aborts (-) not timed" in said.out
    assert sum("program_source:0:9: error: no such function" in line for line in lines) == 4
    assert len(said.out) < 6000 and sum("(as above)" in line for line in lines) == 2
    assert "the process ended by SIGABRT" in said.err and sum(line.startswith("right") for line in lines) == 2
    assert sum("error" in line.lower() or "pipeline" in line or "aborts" in line for line in lines) <= 2 * 25


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_a_line_of_a_terminal(capsys, monkeypatch):
    """The progress line is erased before other text is printed and at the end. An output that is not a terminal, or
    one that cannot erase a line, gets no progress line."""
    monkeypatch.setenv("TERM", "xterm")
    with Progress(Terminal()) as progress:
        progress.title = "1 of 8"
        progress.say("torch: round 2")
        progress.print("table")
    assert progress.out.getvalue() == f"{ERASE}0:00  1 of 8  torch: round 2{ERASE}{ERASE}"
    with Progress(io.StringIO()) as silent:
        silent.say("ours")
        silent.print("table")
    monkeypatch.setenv("TERM", "dumb")  # a terminal that cannot erase a line
    with Progress(Terminal()) as dumb:
        dumb.say("ours")
        dumb.print("table")
    assert silent.out.getvalue() == dumb.out.getvalue() == "" and capsys.readouterr().out == "table\n" * 3


def test_ratio():
    """The ratio of two contenders (timed implementations) uses only rounds in which both were timed: here the
    medians 2, 6, 5 divided by 1, 2, 5. A round in which the machine is slower for both does not change the ratio."""
    row, reference = timed("ours", (2.0, 1.0, 9.0), (6.0,), (5.0,)), timed("torch", (1.0,), (2.0,), (5.0,), (2.0,))
    assert ratio(row, reference) == (2.0, 1.0, 3.0)
    assert ratio(row, timed("torch")) is None


def test_plan_keeps_to_the_budget():
    assert plan(10, 5, once=0.01) == Plan(5, 1, 2.0)
    assert plan(10, 5, once=2.5) == Plan(4, 0, 0.0)
    assert plan(10, 5, once=17) == Plan(2, 0, 0.0)
    assert plan(1, 1, once=17) == Plan(1, 0, 0.0)


def test_needed_bytes():
    """The needed memory of a pass is the size of x and of all arrays that the pass computes. The weights do not
    count. The forward pass has 780 numbers: x 60, gates 480, h 120, c 120. The backward pass adds 476: dx 60, dWx
    128, dWh 256, db 32."""
    assert needed_bytes(TINY, "forward", "float32") == 4 * 780
    assert needed_bytes(TINY, "backward", "float16") == 2 * (780 + 476)
    assert peak_ratio(timed("ours", peak=3 * 4 * 1256 - 240)) == pytest.approx(3)


@pytest.mark.parametrize(("others", "disturbed"), [(0.0, 0), (100.0, 1)])
def test_a_turn_notes_what_other_processes_used(others, disturbed, monkeypatch):
    class Answer:
        def ask(self, limit, **request):
            return {"samples": [0.1], "cpu": 5.0, "idle_cpu": 0.0}

    readings = iter([10.0, 15.0 + others])  # CPU seconds that all programs have used, before and after the timing
    monkeypatch.setattr(rounds, "busy_seconds", lambda: next(readings))
    row = take_turn(timed("ours"), Answer(), Plan(1, 0, 0.0), patience=0)
    assert (row.rounds, row.disturbed) == (((0.1,),), disturbed)


@pytest.mark.parametrize(("used", "waits"), [(0.0, False), (0.1, True)])
def test_a_turn_waits_for_other_processes(used, waits, monkeypatch):
    readings, clock = iter(np.arange(100) * used), [0.0]
    monkeypatch.setattr(rounds, "busy_seconds", lambda: next(readings))
    sleep = SimpleNamespace(sleep=lambda seconds: clock.append(clock[-1] + seconds), perf_counter=lambda: clock[-1])
    monkeypatch.setattr(rounds, "time", sleep)
    rounds.wait_until_quiet(0.25)
    assert (clock[-1] >= 0.25) == waits


@pytest.mark.not_on_a_mac("the mark of peak memory can be reset on Linux only")
def test_peak_memory_sees_what_is_freed_again():
    memory = PeakMemory()
    size = 64 * 2**20
    np.ones(size, np.uint8)
    assert 0.9 * size < memory.above_start()[0] < 1.5 * size


@pytest.mark.parametrize("text", ["1,2,3", "1,2,3,4,5", "1,2,3,x", "1,0,3,4", ""])
def test_parse_size_refuses(text):
    with pytest.raises(argparse.ArgumentTypeError, match="size"):
        parse_size(text)


def test_machine_card():
    card = machine_card("python -m mlx_lstm.bench", "cpu")
    assert {"chip", "cores", "system", "python", "mlx", "numpy", "blas", "torch", "threads"} <= card.keys()
    assert all(card.values()) and card["numpy"] == np.__version__ and card["python"] == platform.python_version()


def test_the_card_names_the_kernel_of_the_blas(monkeypatch):
    """The machine card (a description of this machine) names the BLAS kernel if the package `threadpoolctl` is
    installed. It also names the environment variables that select a BLAS kernel."""
    found = [{"internal_api": "openblas", "architecture": "SkylakeX"}, {"internal_api": "openmp"}]
    monkeypatch.setitem(sys.modules, "threadpoolctl", SimpleNamespace(threadpool_info=lambda: found))
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    card = machine_card("", "cpu")
    assert card["blas"].endswith(", kernel SkylakeX") and "OPENBLAS_CORETYPE=Haswell" in card["threads"]
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    assert machine_card("", "cpu")["blas"].endswith("unknown without threadpoolctl")


def test_group_text():
    """The printed table shows times, engines, and the ratios of our times to those of both reference
    implementations. The lines below the table report disturbances and say why a row was not timed."""
    rows = [
        timed("ours", (0.002,), (0.004,), peak=2**20, idle_cpu=0.5),
        timed("mlx", (0.01,), (0.03,)),
        timed("torch", (0.001,), (0.001,), disturbed=1),
        Measurement(task("ours", "numpy"), "refused: db: error 1 > bound 0.1"),
    ]
    lines = group_text(rows).splitlines()
    assert lines[0].split() == ["lstm", "T,B,I,H", "=", "5,3,4,8", "backward", "float32"]
    assert "x torch.nn.LSTM" in lines[1] and "x mlx.nn.LSTM" in lines[1]
    assert lines[2].split()[:10] == ["mlx_lstm.lstm", "ops", "3", "2", "2.4", "3.6", "2", "3", "(2-4)", "0.167"]
    assert f"mlx_lstm.lstm (ops) used 50% of a core while others were timed: {THREADS_HINT}" in lines
    assert f"torch.nn.LSTM (-) was disturbed by other processes in 1 of 2 rounds: {PAUSE_HINT}" in lines
    assert lines[-1] == "mlx_lstm.lstm (numpy) not timed: refused: db: error 1 > bound 0.1"


def test_a_checkpointed_row_is_compared_with_saving_every_step():
    """The report compares two runs of the same engine: one with `checkpoint_every`, one that saves every time step
    for the gradient. It compares the memory, and the time if both times were measured."""
    few = task("ours")._replace(every="auto")
    rows = [
        timed("ours", (0.002,), (0.004,), peak=1000),
        timed("ours", (0.003,), (0.005,), peak=250)._replace(task=few),
        Measurement(few._replace(engine="numpy"), "memory only", peak=1),
    ]
    said = "mlx_lstm.lstm, every auto (ops): 0.250 of the memory and 1.38 (1.25-1.5) of the time of saving every step"
    assert group_text(rows).splitlines()[-1] == said
    without_times = [row._replace(rounds=()) for row in rows]
    assert group_text(without_times).splitlines()[-1] == said.replace(" and 1.38 (1.25-1.5) of the time", "")


def test_a_line_of_times_compares_with_mlx():
    """The line that `check` prints for a size divides each time by that of `mlx.nn.LSTM`: "1/4 of that" if it is
    shorter, "2 times that" if it is longer."""
    rows = [timed("mlx", (0.002,)), timed("ours", (0.0005,)), timed("torch", (0.004,))]
    said = time_line(rows).partition(": ")[2]
    assert said == "mlx.nn.LSTM 2 ms; ops 0.5 ms, 1/4 of that; torch.nn.LSTM 4 ms, 2 times that"


def test_plot(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    file = tmp_path / "ratios.png"
    rows = [timed("ours", (0.002,)), timed("torch", (0.001,)), Measurement(task("mlx", "-"), "failed: x")]
    plot(str(file), [rows], machine_card("python -m mlx_lstm.bench", "cpu"))
    assert file.stat().st_size > 1000
    (axis,) = pyplot.gcf().axes
    bars = [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in axis.patches]
    np.testing.assert_allclose(bars, [(0, 2), (0.8 / 3, 1)])  # the contenders of a size side by side


def test_command(tmp_path, capsys):
    """The command times all installed contenders (implementations) at a tiny size. It prints the machine card (a
    description of the machine) and a table. It writes a CSV file with one row per contender. Each row includes the
    machine card."""
    file = tmp_path / "figures.csv"
    assert main(["--sizes", str(TINY), "--passes", "backward", "--engine", "numpy", "--csv", str(file), *FEW]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("chip") and "T,B,I,H = 5,3,4,8" in printed
    rows = {row["contender"]: row for row in csv.DictReader(file.open())}
    assert rows.keys() == {contender.label for contender in CONTENDERS.values() if is_installed(contender)}
    ours, mlx = rows["mlx_lstm.lstm"], rows["mlx.nn.LSTM"]
    assert (ours["engine"], mlx["engine"], ours["rounds"], ours["chip"]) == ("numpy", "-", "2", mlx["chip"])
    assert mlx["ratio_mlx"] == "1.0" and float(ours["ratio_mlx"]) > 0
    assert 0 < float(ours["min_s"]) <= float(ours["p20_s"]) <= float(ours["median_s"]) <= float(ours["p80_s"])
    assert int(mlx["mlx_peak_bytes"]) > 0 and float(ours["error"]) <= float(ours["bound"])


def test_command_of_another_case(tmp_path, capsys):
    file = tmp_path / "figures.csv"
    case = ["--case", "cudnn_gru", "--contenders", "ours", "--engine", "ops", "--csv", str(file)]
    assert main([*case, "--sizes", str(TINY), *FEW]) == 0
    assert "cudnn_gru   T,B,I,H = 5,3,4,8   backward" in capsys.readouterr().out
    (row,) = csv.DictReader(file.open())
    assert (row["case"], row["contender"], row["status"]) == ("cudnn_gru", "mlx_lstm.cudnn gru", "timed")


def test_host_command(tmp_path, capsys):
    """The option --host measures how long the CPU takes to build the graph of a call, for the forward and backward
    pass of every layer that supports the size. The test checks only the order of magnitude of the times."""
    path = tmp_path / "host.csv"
    assert main(["--host", "--sizes", "16,2,8,8", "16,2,8,300", "--csv", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.count("stepwise") == 4 and text.count("fused") == 2
    rows = list(csv.DictReader(path.open()))
    assert len(rows) == 10 and all(0 < float(row["step"]) < float(row["call"]) < 1 for row in rows)
    assert {float(row["over"]) for row in rows if row["layer"] == "mlx.nn.LSTM"} == {1.0}


def test_memory_command(tmp_path, capsys):
    """The option --memory measures peak memory. Our layer needs less memory with `--checkpoint-every auto` than
    without it."""
    file = tmp_path / "figures.csv"
    arguments = ["--memory", "--contenders", "ours", "--engine", "ops", "--checkpoint-every", "auto", *FEW[4:]]
    assert main([*arguments, "--sizes", "300,2,16,16", "--csv", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "x needed" in printed and "median ms" not in printed and "mlx_lstm.lstm, every auto  ops" in printed
    all_of_it, few = csv.DictReader(file.open())
    assert int(few["mlx_peak_bytes"]) < 0.7 * int(all_of_it["mlx_peak_bytes"])


def test_times_of_gradients_that_compute_steps_again(tmp_path):
    """The command times our gradient with and without `--checkpoint-every`. Our forward pass has only one table row,
    because the option changes only what is saved for a gradient."""
    pytest.importorskip("matplotlib")
    file, bars = tmp_path / "figures.csv", tmp_path / "bars.png"
    arguments = ["--sizes", str(TINY), "--engine", "numpy", "--contenders", "ours", "mlx", "--checkpoint-every", "2"]
    assert main([*arguments, "--csv", str(file), "--plot", str(bars), *FEW]) == 0
    rows = [(row["pass"], row["contender"], float(row["ratio_mlx"]) > 0) for row in csv.DictReader(file.open())]
    names = ["mlx_lstm.lstm", "mlx_lstm.lstm, every 2", "mlx.nn.LSTM"]
    assert rows[:2] == [("forward", name, True) for name in names[::2]]
    assert rows[2:] == [("backward", name, True) for name in names]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sizes", "1,2,3"], "a size is four numbers"),
        (["--sizes", "99999999999,1,1,1"], "must fit into this machine's memory but got '99999999999,1,1,1'"),
        (["--contenders", "tensorflow"], "a contender is one of ours, mlx, torch"),
        (["--contenders", "nowhere:X"], "No module named 'nowhere'"),
        (["--engine", "fastest"], "invalid choice: 'fastest'"),
        (["--device", "gpu", "--engine", "numpy"], "engine='numpy' cannot run"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--rounds", "1" + 400 * "0"], "both at most 86400"),
        (["--seconds", "inf"], "both at most 86400"),
        (["--patience", "-1"], "--patience must be at least 0"),
        (["--patience", "inf"], "at most 86400"),
        (["--contenders", "math:pi"], "math:pi must be a Contender but is of type float"),
        (["--memory", "--plot", "a.png", "--quick"], "--quick, --plot: of no use with --memory"),
        (["--memory", "--host"], "one of --memory and --host at a time"),
        (["--host", "--engine", "ops"], "--engine: of no use with --host"),
        (["--tune-file", "a.json"], "--tune-file: of no use without --tune"),
        (["--engine", "ops", "--contenders", "torch"], "--engine is about the contender ours"),
        (["--checkpoint-every", "0"], "K must be a number of at least 1 or auto but got '0'"),
        (["--checkpoint-every", "sqrt"], "K must be a number of at least 1 or auto but got 'sqrt'"),
        (["--checkpoint-every", "2", "--contenders", "mlx"], "--checkpoint-every is about the contender ours"),
        (["--checkpoint-every", "2", "--passes", "forward"], "about the case lstm and its backward pass"),
        (["--checkpoint-every", "2", "--case", "block_lstm"], "about the case lstm and its backward pass"),
        (["--checkpoint-every", "2", "--host"], "--checkpoint-every: of no use with --host"),
        (["--csv", "no/such/folder.csv"], "--csv: no folder no/such"),
        (["--csv", ""], "--csv: . is a folder"),
        (["--plot", "a.picture"], "--plot: the ending of a.picture must be one of"),
        (["--plot", "a.png", "--contenders", "ours"], "--plot draws ratios: add one of torch, mlx"),
        (["--case", "conv"], "invalid choice: 'conv'"),
        (["--case", "block_lstm", "--contenders", "torch"], "a contender is one of ours, tensorflow or module"),
        (["--case", "streaming", "--passes", "backward"], "--passes: the case streaming has no backward"),
        (["--case", "block_lstm", "--memory"], "--memory is about the case lstm but got --case block_lstm"),
    ],
)
def test_wrong_options(arguments, said, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    printed = capsys.readouterr().err
    assert end.value.code == 2 and said in printed and printed.count("\n") == 1


@pytest.mark.parametrize("option", ["--host", "--tune"])
def test_ctrl_c(option, monkeypatch, capsys):
    """The runs that write a file at their end say so."""

    def interrupted(options):
        raise KeyboardInterrupt

    for name in ("show_host", "tune"):
        monkeypatch.setattr(command, name, interrupted)
    assert command.main([option]) == 130
    assert capsys.readouterr().err == "\ninterrupted: nothing is kept, because the file is written at the end\n"


def test_a_device_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(mx, "is_available", lambda device: device == mx.cpu)
    with pytest.raises(SystemExit) as end:
        main(["--device", "gpu"])
    assert end.value.code == 2 and "--device gpu: MLX has no GPU on this machine" in capsys.readouterr().err


def test_a_pipe_in_place_of_a_file(tmp_path, capsys):
    """The command refuses a pipe before it measures anything. If it did not, it would wait after the measurement until
    another program reads the pipe."""
    os.mkfifo(tmp_path / "a.csv")
    with pytest.raises(SystemExit):
        main(["--csv", str(tmp_path / "a.csv")])
    assert "a.csv is a pipe" in capsys.readouterr().err


def test_a_file_that_may_not_be_written(tmp_path, monkeypatch, capsys):
    """The command says so before it measures anything. root may write anywhere, so the answer is replaced."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(SystemExit):
        main(["--csv", str(tmp_path / "a.csv")])
    assert "--csv: no permission to write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "arguments", "said"),
    [
        ("torch", ["--contenders", "torch"], "torch needs the package torch"),
        ("matplotlib", ["--plot", "a.png"], "needs matplotlib"),
    ],
)
def test_what_is_not_installed(missing, arguments, said, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    with pytest.raises(SystemExit):
        main(arguments)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("which", "slept"), [("forward", 0), ("paced", 4 * streaming.PAUSE)])
def test_pauses_before_frames_are_told_apart_from_the_steps(which, slept, monkeypatch):
    """A paced run waits for each frame. It returns the seconds for which it waited, so that they can be subtracted from
    its time. Each run counts only its own waiting."""
    clock = [0.0]
    sleep = SimpleNamespace(sleep=lambda seconds: clock.append(clock[-1] + seconds), perf_counter=lambda: clock[-1])
    monkeypatch.setattr(streaming, "time", sleep)
    # A step takes a second, which is no part of the pauses. task: what `streamed` reads of a task.
    step, task = lambda frame, state: (sleep.sleep(1), state + frame), SimpleNamespace(which=which)
    work = streaming.streamed([1, 2, 3, 4], step, 0, np.asarray, task)
    for run in (1, 2):
        work.run()
        assert work.slept() == pytest.approx(slept) and clock[-1] == pytest.approx(run * (4 + slept))


def test_a_turn_runs_the_task_until_its_time_is_over():
    """A turn repeats a short task, and runs a long one once, each after the untimed runs."""
    for seconds, long in ((0.02, False), (0.0, True)):
        runs = []
        run = lambda runs=runs: runs.append(1) or (0.001, None, None)  # noqa: E731
        worker = SimpleNamespace(resume=int, pause=int, run=run, idle_cpu=0.0, idle_wall=1.0)
        answer = Worker.time(worker, seconds, 2)
        assert len(answer["samples"]) == len(runs) - 2 and (len(answer["samples"]) == 1) == long
