"""Tests of `python -m mlx_lstm.compare` on Linux. Apple's MPSGraph is replaced by a recorder, which notes the calls
and returns the results of the float64 oracle."""

import importlib.util
import json
import platform
import sys
from pathlib import Path

import numpy as np
import pytest
from on_metal import on_metal

from mlx_lstm.compare import __main__ as command
from mlx_lstm.compare.experiments import experiments
from mlx_lstm.lab.mpsgraph import apple, contenders, judge, torch_layer
from mlx_lstm.lab.mpsgraph.cases import GATES, draw, grid
from mlx_lstm.lab.mpsgraph.files import load_case, load_golden, save_case, save_golden
from mlx_lstm.lab.mpsgraph.measure import ComparisonRow, compare, rows_of
from mlx_lstm.lab.mpsgraph.report import bars, pairs_text
from mlx_lstm.oracle.closeness import exact_and_element_bounds

RECORDER = Path(__file__).parent / "mpsgraph_recorder"
MODULES = ("Metal", "MetalPerformanceShadersGraph", "objc")


@pytest.fixture
def on_path(monkeypatch):
    """Make the MPSGraph recorder importable in place of PyObjC, in this process and in child processes."""
    monkeypatch.syspath_prepend(str(RECORDER))
    paths = [str(RECORDER), str(RECORDER.parents[1])]
    monkeypatch.setenv("PYTHONPATH", ":".join(paths))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def recorder(on_path, monkeypatch):
    """Use the MPSGraph recorder in this process, without child processes. Where MPSGraph would end the process, the
    recorder raises RuntimeError."""

    def end_process():
        raise RuntimeError("MPSGraph would end the process")

    import MetalPerformanceShadersGraph as G

    monkeypatch.setattr(G, "end_process", end_process)

    def in_this_process(name, missing, hindrance):
        run = lambda case: contenders.name_lists(case, *apple.run(case))  # noqa: E731
        return contenders.Contender(name, missing, hindrance, run)

    monkeypatch.setattr(contenders, "in_a_child", in_this_process)
    monkeypatch.setattr(G, "FAULTS", {})
    return G


def run(tmp_path, *arguments):
    """Run the compare command in this process. Return (exit code, content of the JSON report)."""
    file = tmp_path / "report.json"
    code = command.main([*arguments, "--json", str(file)])
    return code, json.loads(file.read_text())


def test_selectors_are_those_of_the_header(recorder):
    for selector in [*apple.FORWARD.values(), *apple.BACKWARD.values()]:
        assert selector in recorder.SELECTORS
    assert apple.arguments(apple.FORWARD["gru"]) == (
        ["source", "recurrent_weight", "input_weight", "bias", "init_state", "mask", "secondary_bias"]
    )


@pytest.mark.parametrize("direction", [{}, {"reverse": True}, {"bidirectional": True}], ids=["uni", "reverse", "bi"])
@pytest.mark.parametrize("absent", [(), ("mask", "bias", "input_weight", "init_state", "state_gradient")])
@pytest.mark.parametrize("op", GATES)
def test_mpsgraph_is_called_with_what_the_case_has(recorder, op, absent, direction):
    flags = {"lstm": {"forget_gate_last": True, "cell_gate_activation": "hard_sigmoid"}, "gru": {"reset_after": True}}
    case = draw(np.random.default_rng(0), op, (3, 2, 3, 4), absent=absent, **direction, **flags.get(op, {}))
    forward, backward = apple.run(case)
    outcome = contenders.name_lists(case, forward, backward)
    assert not outcome.problem
    for name, value in judge.expected(case).items():
        np.testing.assert_array_equal(outcome.results[name], value.astype(np.float32))
    for selector, given, descriptor in recorder.CALLS[-2:]:
        present = {name for name, tensor in given.items() if tensor is not None}
        made = {"z_state", "cell_output_fwd", "output_fwd"}
        cotangents = {"source_gradient", "state_gradient", "cell_gradient"}
        expected = set(case.arrays) - (set() if "Gradients" in selector else cotangents)
        assert present - made == expected
        values = {"training": True} | ({"produce_cell": True} if op == "lstm" else {}) | case.descriptor
        assert descriptor.values == values


def test_float16_reaches_mpsgraph_as_such(recorder):
    case = draw(np.random.default_rng(0), "lstm", dtype=np.float16)
    forward, backward = apple.run(case)
    assert {array.dtype for array in [*forward, *backward]} == {np.dtype(np.float16)}


def test_everything_agrees_in_processes_of_their_own(tmp_path, on_path):
    """The compare command works with child processes, which import the MPSGraph recorder in place of Apple's
    framework. (Most tests of this file run everything in one process.) All contenders, the implementations to
    compare, agree with each other and with the oracle."""
    names = ["lstm: uni, mask", "gru: bi, no bias", "single_gate_rnn: one of"]
    code, report = run(tmp_path, "--contenders", "mpsgraph", "ops", "--all", "--cases", *names)
    rows = report["rows"]
    assert code == 0 and not report["failed"]
    assert {row["pair"] for row in rows} == {"mpsgraph - oracle", "ops - oracle", "ops - mpsgraph"}
    assert {row["case"] for row in rows} >= {"lstm: uni, mask", "gru: bi, no bias"}
    assert {"chip", "system", "macOS build", "mlx", "torch", "pyobjc-core"} <= set(report["card"])
    assert report["card"]["python"] == platform.python_version()


def test_a_crash_is_reported_and_the_others_go_on(tmp_path, on_path, monkeypatch, capsys):
    monkeypatch.setenv("RECORDER", json.dumps({"crash": "gru"}))
    names = ["gru: one of everything", "single_gate_rnn: one of everything"]
    code, report = run(tmp_path, "--contenders", "mpsgraph", "ops", "--cases", *names)
    failed = [row for row in report["rows"] if row["verdict"] != "ok"]
    assert code == 1 and len(failed) == 1
    assert failed[0]["pair"] == "mpsgraph" and "ended by SIGABRT" in failed[0]["verdict"]
    assert any(row["pair"] == "mpsgraph - oracle" and "single" in row["case"] for row in report["rows"])
    assert "ended by SIGABRT: it said nothing" in capsys.readouterr().out


@pytest.mark.parametrize("result, index, step", [("h", [3, 1, 2], 3), ("dsource", [2, 0, 1], 2), ("dbias", [5], None)])
def test_a_planted_mismatch_is_found_and_located(tmp_path, recorder, monkeypatch, capsys, result, index, step):
    monkeypatch.setattr(recorder, "FAULTS", {"plant": {"op": "lstm", "result": result, "index": index, "by": 0.01}})
    code, report = run(tmp_path, "--contenders", "mpsgraph", "ops", "--cases", "lstm: uni, no states")
    failed = [row for row in report["rows"] if row["verdict"] != "ok"]
    assert code == 1 and {row["pair"] for row in failed} == {"mpsgraph - oracle", "ops - mpsgraph"}
    for row in failed:
        assert (row["tensor"], row["first"], row["step"]) == (result, index, step)
        assert row["max_abs"] == pytest.approx(0.01, rel=0.01) and row["ulp"] > 100
    assert str(index) in capsys.readouterr().out


def test_leading_axes_of_1_are_noted_and_the_values_compared(tmp_path, recorder, monkeypatch):
    monkeypatch.setattr(recorder, "FAULTS", {"leading_ones": ["dbias"]})
    code, report = run(tmp_path, "--contenders", "mpsgraph", "--cases", "lstm: bi, no states")
    row = next(row for row in report["rows"] if row["tensor"] == "dbias")
    assert code == 0 and row["note"] == "2 leading axes of 1" and row["shape"] == [1, 1, 48]


def test_lists_of_another_length_are_reported(tmp_path, recorder, monkeypatch):
    monkeypatch.setattr(apple, "run", lambda case, run=apple.run: (run(case)[0][:2], run(case)[1]))
    code, report = run(tmp_path, "--contenders", "mpsgraph", "--cases", "lstm: uni, no states")
    assert code == 1 and report["rows"][0]["verdict"].startswith("returned lists of 2 and 4, not [h, c, z_state] and")


FEW = (" mask", "bi, no bias", "uni, peephole", "everything", "m: 64 steps", "float16", "flip z", "m: 2 layers", "PyT")
"""Parts of the names of the cases that a default test compares. They have every op, direction, dtype and array."""


@pytest.mark.parametrize("chosen", [["--cases", *FEW], pytest.param([], marks=pytest.mark.slow)], ids=["few", "all"])
def test_every_case_on_linux(chosen, tmp_path, capsys):
    """On Linux, the CPU engines and torch agree with the float64 oracle in all cases. The report names the
    contenders (implementations to compare) that can run only on a Mac."""
    code, report = run(tmp_path, "--plot", str(tmp_path / "errors.png"), *chosen)
    pairs = {row["pair"] for row in report["rows"]}
    assert code == 0 and {"numpy - oracle", "ops - oracle"} <= pairs
    assert ("torch - oracle" in pairs) == (importlib.util.find_spec("torch") is not None)
    text = capsys.readouterr().out
    assert "not here: mpsgraph" in text and "pip install '.[compare]'" in text
    assert max(len(row["by_time"]) for row in report["rows"]) == 64
    longest = {row["case"] for row in report["rows"] if len(row["by_time"]) == 64}
    picture = (tmp_path / "errors.png").read_bytes()  # its bars, and curves of each of the longest cases
    assert int.from_bytes(picture[20:24], "big") == 450 + 320 * min(4, len(longest))


def test_metal_engines(tmp_path, monkeypatch):
    """Each Metal engine agrees with the oracle in a child process that simulates a Mac. The child skips the trial, a
    small test run of kernels before their first use."""
    trial = "from mlx_lstm.recurrence import _guard; _guard.is_real = lambda: True; _guard.refusal = None"
    (tmp_path / "sitecustomize.py").write_text(f"import on_metal; on_metal.pretend(); {trial}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{RECORDER.parent}:{RECORDER.parents[1]}")
    with on_metal():
        code, report = run(tmp_path, "--contenders", "fused", "stepwise", "--cases", "lstm: one of everything")
    assert code == 0 and {row["pair"] for row in report["rows"]} == {"fused - oracle", "stepwise - oracle"}


def test_json_has_stdout_to_itself(capsys):
    assert command.main(["--contenders", "ops", "--cases", "gru: one of everything", "--json", "-"]) == 0
    written = capsys.readouterr()
    assert not json.loads(written.out)["failed"] and "all agree" in written.err


def test_no_case_of_a_name(capsys):
    assert command.main(["--contenders", "ops", "--cases", "nothing"]) == 2
    assert "no case" in capsys.readouterr().err


@pytest.mark.parametrize(
    "absent, arguments, words",
    [
        (
            "MetalPerformanceShadersGraph",
            ["--contenders", "mpsgraph"],
            "no MetalPerformanceShadersGraph. It needs a Mac",
        ),
        ("torch", ["--contenders", "torch"], "torch cannot run here: no torch"),
        ("torch", ["--contenders", "torch-mps"], "torch-mps cannot run here: no torch"),
        ("matplotlib", ["--plot", "x.png"], "needs matplotlib: pip install"),
    ],
)
def test_a_missing_package_is_named(on_path, monkeypatch, capsys, absent, arguments, words):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == absent else find_spec(name))
    with pytest.raises(SystemExit) as info:
        command.main(arguments)
    assert info.value.code == 2 and words in capsys.readouterr().err


def test_an_unknown_contender(capsys):
    with pytest.raises(SystemExit):
        command.main(["--contenders", "cudnn"])
    assert "no contender 'cudnn': there are mpsgraph, torch-mps" in capsys.readouterr().err


def test_golden_of_the_oracle(tmp_path, capsys):
    file = str(tmp_path / "golden.npz")
    some = ["--contenders", "ops", "--cases", "gru: one of", "float16"]
    assert command.main([*some, "--record", file]) == 0
    code, report = run(tmp_path, "--contenders", "ops", "--golden", file)
    assert code == 0 and report["golden"]["chip"]
    assert {row["pair"] for row in report["rows"]} == {"ops - oracle", "golden - oracle", "ops - golden"}
    assert "computed by oracle" in capsys.readouterr().out


def test_golden_of_mpsgraph_with_a_mismatch(tmp_path, recorder):
    file = str(tmp_path / "golden.npz")
    assert command.main(["--contenders", "mpsgraph", "--cases", "lstm: uni, peephole", "--record", file]) == 0
    golden = load_golden(file)
    assert golden.contender == "mpsgraph" and [case.name for case in golden.cases] == ["lstm: uni, peephole"]
    golden.results["lstm: uni, peephole"]["c"][2, 1, 0] += 1
    save_golden(file, golden)
    code, report = run(tmp_path, "--contenders", "ops", "--golden", file)
    failed = [row for row in report["rows"] if row["verdict"] != "ok"]
    assert code == 1 and {(row["tensor"], tuple(row["first"]), row["step"]) for row in failed} == {("c", (2, 1, 0), 2)}


def test_a_golden_that_was_changed_is_refused(tmp_path, capsys):
    file = str(tmp_path / "golden.npz")
    command.main(["--contenders", "ops", "--cases", "gru: one of", "--record", file])
    with np.load(file) as data:
        arrays = dict(data)
    arrays["0/results/h"] = arrays["0/results/h"] + 1
    np.savez(file, **arrays)
    (tmp_path / "text.npz").write_text("no golden")
    other = [str(tmp_path / name) for name in ("text.npz", "missing.npz")]
    for name, words in ({file: "was changed since it was recorded"} | dict.fromkeys(other, "is no golden")).items():
        with pytest.raises(SystemExit) as info:
            command.main(["--golden", name])
        assert info.value.code == 2 and words in capsys.readouterr().err


def test_settle_confirms_the_defaults(tmp_path, recorder, capsys):
    code, report = run(tmp_path, "--settle")
    assert [finding for finding in report["findings"] if not finding["confirmed"]] == []
    assert code == 0 and "the same" in capsys.readouterr().out
    from mlx_lstm import mpsgraph

    names = {finding["name"] for finding in report["findings"]}
    assert names == {line.split()[0][2:] for line in mpsgraph.__doc__.splitlines() if line.startswith("    E:")}


def test_a_call_without_gradients_has_no_cotangents():
    """The call that shows how many results MPSGraph returns gets no gradients: one of them belongs to a result that the
    call does not ask for."""
    (one,) = (each for each in experiments() if each.name == "output_count")
    assert not [name for name in one.case.arrays if name.endswith("_gradient")]


@pytest.mark.parametrize(
    "faults, name, verdict",
    [
        ({"readings": {"output_peephole": "current"}}, "peephole", "c[t]"),
        ({"readings": {"hard_sigmoid": "x/6"}}, "hard_sigmoid", "1/6"),
        ({"leading_ones": ["dbias"]}, "grads", "two axes of 1 more"),
        ({"results": 2}, "output_count", "h, zState"),
    ],
)
def test_settle_finds_the_other_reading(tmp_path, recorder, monkeypatch, faults, name, verdict):
    monkeypatch.setattr(recorder, "FAULTS", faults)
    wanted = [one for one in experiments() if one.name in (name, "reverse")]
    monkeypatch.setattr(command, "experiments", lambda: wanted)
    code, report = run(tmp_path, "--settle")
    others = {finding["verdict"] for finding in report["findings"] if not finding["confirmed"]}
    assert code == 1 and others == {verdict}


def test_settle_when_no_reading_fits(tmp_path, recorder, monkeypatch):
    monkeypatch.setattr(recorder, "FAULTS", {"plant": {"op": "lstm", "result": "z_state", "index": [0, 0, 0], "by": 1}})
    wanted = [one for one in experiments() if one.name == "zstate_and_cell"]
    monkeypatch.setattr(command, "experiments", lambda: wanted)
    code, report = run(tmp_path, "--settle")
    verdicts = [finding["verdict"] for finding in report["findings"]]
    assert code == 1 and verdicts[0].startswith("none of the readings; ") and verdicts[1] == "c"


def test_settle_after_a_crash(tmp_path, recorder, monkeypatch):
    monkeypatch.setattr(recorder, "FAULTS", {"crash": "gru"})
    wanted = [one for one in experiments() if one.name == "gru_flavours"][:1]
    monkeypatch.setattr(command, "experiments", lambda: wanted)
    code, report = run(tmp_path, "--settle")
    assert code == 1 and report["findings"][0]["verdict"].startswith("no answer: RuntimeError")


def test_settle_without_a_mac(tmp_path, capsys):
    code, report = run(tmp_path, "--settle")
    assert code == 2 and {finding["verdict"] for finding in report["findings"]} == {"not measured"}
    assert "Only a Mac can tell" in capsys.readouterr().out


def test_names_of_cases_are_unique():
    names = [case.name for case in grid(lambda case: True)]
    assert len(names) == len(set(names))
    cases = {id(one.case): one.case.name for one in experiments()}
    assert len(cases) == len(set(cases.values()))


def test_what_makes_a_row_fail():
    case = draw(np.random.default_rng(0), "lstm", (3, 2, 3, 4))
    exact = judge.expected(case)["h"]
    near = exact.astype(np.float32)

    def row(value, bound=1e-6):
        return compare(case, "h", "x - oracle", value, exact, bound, np.dtype(np.float32))

    assert row(near).verdict == "ok" and row(near[None]).note == "1 leading axes of 1"
    assert row(near[:2]).verdict == "shape [2, 2, 4], expected [3, 2, 4]"
    assert row(near.astype(np.float16)).verdict == "dtype float16, expected float32"
    broken = near.copy()
    broken[1, 0, 3] = np.nan
    assert (row(broken).verdict, row(broken).first, row(broken).step) == ("differs", (1, 0, 3), 1)
    late = near.copy()
    late[2] += 1
    assert row(late).first == (2, 0, 0) and row(late).by_time[0] < 1 < 0.9e6 < row(late).by_time[2]


def test_two_results_may_differ_by_two_bounds():
    """Each of two results may have an error of one bound. A larger difference is a failure."""
    case = draw(np.random.default_rng(0), "lstm", (3, 2, 3, 4))
    exact, bounds = exact_and_element_bounds(lambda fl: judge.evaluated(case, fl), np.float32)
    for factor, is_right in ((1.9, True), (2.1, False)):
        results = {"ops": exact["h"] + factor * bounds["h"], "golden": exact["h"].copy()}
        rows = rows_of(case, {name: contenders.Outcome({"h": array}) for name, array in results.items()})
        (row,) = (row for row in rows if row.pair == "ops - golden")
        assert row.failed != is_right


def test_bars_show_the_worst_ratio_of_each_pair():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    rows = [
        ComparisonRow("case", tensor, pair, "ok", over_bound=ratio)
        for pair, ratios in {"ops - oracle": (0.25, 0.5, np.nan), "numpy - oracle": (0.75, 0.125, 0.0625)}.items()
        for tensor, ratio in zip(("h", "h", "c"), ratios, strict=True)
    ]
    figure, axis = pyplot.subplots()
    bars(axis, rows, {"ops - oracle": "red", "numpy - oracle": "blue"})
    heights = {drawn.get_label(): [bar.get_height() for bar in drawn] for drawn in axis.containers}
    pyplot.close(figure)
    assert heights == {"ops - oracle": [0.5], "numpy - oracle": [0.75, 0.0625]}


def test_what_torch_cannot_run():
    rng = np.random.default_rng(0)
    reasons = {
        "no reverse alone": draw(rng, "lstm", reverse=True),
        "no mask, no peephole": draw(rng, "lstm", absent=()),
        "no projected source": draw(rng, "lstm", absent=("input_weight", "mask", "peephole")),
        "another kind of GRU": draw(rng, "gru", flip_z=True),
        "relu and tanh only": draw(rng, "single_gate_rnn", activation="sigmoid"),
        "no other activations or gate orders": draw(rng, "lstm", forget_gate_last=True),
        "float32 only": draw(rng, "lstm", dtype=np.float16),
    }
    assert {torch_layer.hindrance(case) for case in reasons.values()} == set(reasons)
    assert torch_layer.hindrance(draw(rng, "lstm", bidirectional=True)) is None


def test_an_error_of_every_case_is_printed_once(capsys, monkeypatch):
    """A long compiler error is printed only once per engine, although it occurs in every case."""
    compiler = "[metal::Device] Unable to build metal library from source\n" + "\n".join(
        f"program_source:{n}:5: error: no member named 'x'" for n in range(70)
    )

    def refuse(case, engine=None, **options):
        raise RuntimeError(f"{compiler} in {case.name}")

    monkeypatch.setattr(contenders.ours, "run", refuse)
    assert command.main(["--contenders", "ops", "numpy"]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) <= 15 and "calls failed" in printed[0]
    assert sum("Unable to build" in line for line in printed) == 2
    assert sum("program_source:0:5: error: no member" in line for line in printed) == 2


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--json", "no/such/x.json"], "--json: no folder no/such"),
        (["--record", "/"], "--record: / is a folder"),
        (["--plot", "x"], "--plot: the ending of x must be one of"),
        (["--settle", "--plot", "x.png"], "--plot does not go with --settle"),
        (["--golden", "x.npz", "--settle"], "--golden does not go with --settle"),
        (["--nothing"], "unrecognized arguments: --nothing"),
    ],
)
def test_options_that_do_not_apply(capsys, arguments, words):
    with pytest.raises(SystemExit) as info:
        command.main(arguments)
    error = capsys.readouterr().err
    assert info.value.code == 2 and words in error and error.count("\n") == 1


def test_stacks_of_layers(tmp_path, on_path, monkeypatch, capsys):
    """The command compares stacks of layers. In this test torch runs on the CPU instead of the Mac's GPU. The
    command does not call MPSGraph here, because MPSGraph's ops run only one layer."""
    monkeypatch.setattr(contenders, "no_torch_mps", lambda: None)
    handed = []

    def stand_in(name, missing, hindrance):
        def run(case):
            save_case(str(tmp_path / "case.npz"), case)
            handed.append((name, case.name))
            return contenders.Outcome(torch_layer.run(load_case(str(tmp_path / "case.npz")), "cpu"))

        return contenders.Contender(name, missing, hindrance, run)

    monkeypatch.setattr(contenders, "in_a_child", stand_in)
    names = ["lstm: 2 layers, bi", "gru: 3 layers"]
    some = ["--contenders", "torch-mps", "mpsgraph", "ops", "--cases", *names]
    code, report = run(tmp_path, *some, "--record", str(tmp_path / "golden.npz"))
    assert code == 0 and handed == [("torch-mps", name) for name in names]
    tensors = {row["tensor"] for row in report["rows"] if row["pair"] == "ops - torch-mps"}
    assert {"h", "dsource", "drecurrent_weight", "dinput_weight_l1", "dbias_l2", "dsecondary_bias_l1"} <= tensors
    monkeypatch.setattr(contenders.ours, "run_layer", lambda *given, **options: {"h": np.zeros(1)})
    assert run(tmp_path, *some)[0] == 1


def test_the_worst_comparison_of_a_pair_is_shown():
    """A wrong result is worse than any right one; among right ones the largest ratio of error to bound is the worst."""
    right = [ComparisonRow(case, "h", "a - b", "ok", over_bound=ratio) for case, ratio in (("y", 0.1), ("b", 0.9))]
    wrong = ComparisonRow("a", "c", "a - b", "shape (1,), expected (2,)")
    assert "h of b" in pairs_text(right) and "c of a" in pairs_text([*right, wrong])
