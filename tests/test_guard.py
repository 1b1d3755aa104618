"""Tests of the guard, which runs Metal kernels on small problems (a trial run) before their first use. The tests
plant faults in kernels; most trial runs take place in child processes, as on a Mac."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path

import ml_dtypes
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from assertions import assert_within, bounds
from cases import METAL, draw, draw_cotangents, run
from kernel_texts import noted
from on_metal import EVERY_OPTION, matrices_from, on_metal, on_one_engine
from pointwise_cases import Form
from quantized_cases import packed
from trial_on_metal import FAULTS, MATRICES, fault

import mlx_lstm.nn
import mlx_lstm.torch
from mlx_lstm.engines import Choice, tuning, verdicts
from mlx_lstm.engines.cells import ACTIVATIONS, GRUCell, LSTMCell, PointwiseCell, RNNCell
from mlx_lstm.engines.packing import Packing
from mlx_lstm.engines.problem import Chunks, Cut, Limits, Problem
from mlx_lstm.engines.tuning import Table
from mlx_lstm.oracle import clip_shift, evaluate, forward
from mlx_lstm.oracle.arithmetic import Rounding
from mlx_lstm.oracle.judge import Case
from mlx_lstm.recurrence import _call, _child, _draw, _guard, _judge, unguarded
from mlx_lstm.recurrence._trial import trial_from, trial_of, without_numbers

SCRIPT = str(Path(__file__).with_name("trial_on_metal.py"))
BROKEN = "its trial on this machine failed: RuntimeError: no pipeline"
SECONDS = _child.SECONDS
RIGHT, WRONG = _child.Verdict(""), _child.Verdict(BROKEN)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Use a temporary folder as the user's cache. Yield the path of the file that stores the results of trial runs
    of kernels. Trial runs may take long, because the emulator's compiler is slower than Apple's."""
    monkeypatch.setattr(_child, "SECONDS", 600)
    monkeypatch.setattr(tuning, "cache_file", lambda: tmp_path / "cache" / "engines.json")
    current = tuning.current
    current.cache_clear()
    _guard.forget()
    yield verdicts.file()
    current.cache_clear()
    _guard.forget()


@pytest.fixture
def said(monkeypatch):
    """Record the texts of all warnings and return them as a list. `pytest.warns` is not used, because it could show
    a repeated warning only once."""
    texts = []
    monkeypatch.setattr(warnings, "warn", lambda text, **how: texts.append(str(text)))
    return texts


@pytest.fixture
def tried(monkeypatch):
    """Make the library try its kernels in this process instead of a child process, so that a test can plant a
    fault in them. Return a list that records the engine of each trial run (a small test run of kernels before
    their first use)."""
    engines, verdict = [], _judge.verdict
    monkeypatch.setattr(_guard, "command", lambda: None)
    monkeypatch.setattr(_judge, "verdict", lambda trial: (engines.append(trial.engine), verdict(trial))[1])
    return engines


def prefer(monkeypatch, engine):
    """Make the library choose this engine for every size of layer."""
    table = Table("measured here", {word: {1: ((1000, engine),)} for word in ("float32", "float16", "bfloat16")})
    monkeypatch.setattr(tuning, "current", lambda: table)


def in_a_new_process():
    """Clear the results of trial runs (small test runs of kernels) that this process remembers, as if the process
    had just started."""
    _guard.forget()


def layer_and_data(**options):
    """Return (layer, input, loss weights): an LSTM layer of 9 units, a batch of sequences, and the weights of the
    outputs in a loss."""
    mx.random.seed(1)
    return mlx_lstm.nn.LSTM(3, 9, **options), mx.random.normal((2, 4, 3)), mx.random.normal((2, 4, 9))


def gradients(layer, x, weights):
    """Return the gradients of the layer's parameters. The loss is a weighted sum of the layer's outputs."""
    loss = mlx.nn.value_and_grad(layer, lambda x: (layer(x)[0] * weights).sum())
    return loss(x)[1]


def assert_trained(layer, x, weights):
    """Check that the layer's gradients differ from the oracle's by at most the error bounds."""
    found = gradients(layer, x, weights)
    arrays = {"x": mx.swapaxes(x, 0, 1), "Wx": layer.Wx, "Wh": layer.Wh, "b": layer.bias}
    case = {name: np.array(array) for name, array in arrays.items()}
    cotangents = {"h": np.array(mx.swapaxes(weights, 0, 1))}
    exact, limit = evaluate(case, cotangents, Rounding(np.float64))[1], bounds(case, np.float32, cotangents)
    for name, word in {"Wx": "Wx", "Wh": "Wh", "bias": "b"}.items():
        assert_within(name, np.array(found[name]), exact[word], limit[word])


# --- Faults in kernels -----------------------------------------------------------------------------------------------


def test_a_layer_trains_on_the_next_engine(monkeypatch, own_cache):
    """If a kernel does not compile, the layer gives one warning and trains on the next engine. A caller who requests
    the faulty engine gets the reason as an error. The kernel is not tried again, in this process or another, until
    the kernels change."""
    started, real = [], _guard.by_child
    monkeypatch.setattr(_guard, "by_child", lambda *given: (started.append(given[1][0].engine), real(*given))[1])
    monkeypatch.setattr(_guard, "command", lambda: [sys.executable, SCRIPT, "compile", "lstm_fused_forward"])
    layer, x, weights = layer_and_data()
    forced, _, _ = layer_and_data(engine="fused")
    with on_metal(guarded=True), fault("dies", "lstm_fused_forward"):
        with pytest.warns(UserWarning) as caught:
            assert_trained(layer, x, weights)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_trained(layer, x, weights)
            with pytest.raises(ValueError, match="cannot run: its trial on this machine failed: RuntimeError"):
                forced(x)
        assert started == ["fused", "stepwise"]
        assert layer.engine_used.engine == "stepwise"
        assert "error: use of undeclared identifier 'not_declared'" in layer.engine_used.reason
        in_a_new_process()
        with pytest.warns(UserWarning):
            layer(x)
        assert started == ["fused", "stepwise"]
        in_a_new_process()
        machine = tuning.machine() | {"kernels": "changed"}
        monkeypatch.setattr(tuning, "machine", lambda: machine)
        monkeypatch.setattr(_guard, "try_out", lambda trials: (started.append("again"), [RIGHT])[1])
        monkeypatch.setattr(_call, "run", lambda *given, **how: {"h": x, "c": x})
        layer(x)
        assert started == ["fused", "stepwise", "again"]
    text = str(caught[0].message)
    assert len(caught) == 1 and text.startswith("engine='fused' is not used on ") and "MLX 0." in text
    assert "engine='stepwise' takes over" in text and str(own_cache) in text


def test_who_judges_results_has_no_trial(monkeypatch):
    """Inside the context `unguarded`, a kernel is used although its trial run (small test run before its first use)
    failed."""
    monkeypatch.setattr(_guard, "try_out", lambda trials: [WRONG])
    forced, x, weights = layer_and_data(engine="fused")
    with on_metal(guarded=True):
        for _ in range(2):
            with pytest.raises(ValueError, match="no pipeline"):
                forced(x)
            with unguarded():
                assert_trained(forced, x, weights)


PROJECTED, BATCH, LONG = {"projection": True}, {"B": 65}, {"T": 22}
BEFORE = {"op": "gru", "reset": "before"}
# {kernel: (the engines that use the kernel, options of a call that needs the kernel)}
FAMILIES = {
    "lstm_fused_arrange": ("fused", {}),
    "lstm_fused_forward": ("fused", {}),
    "lstm_fused_backward": ("fused", {}),
    "lstm_fused_matrix_forward": ("fused", BATCH),
    "lstm_fused_matrix_backward": ("fused", BATCH),
    "gru_fused_forward": ("fused", {"op": "gru"}),
    "recurrent_input": ("fused stepwise", {}),
    "lstm_stepwise_forward": ("stepwise", {}),
    "lstm_stepwise_backward": ("stepwise", {}),
    "lstm_stepwise_outputs": ("stepwise", {}),
    "lstm_stepwise_gradients": ("stepwise", {}),
    "lstm_stepwise_forward_joining": ("stepwise", LONG),
    "lstm_stepwise_backward_joining": ("stepwise", LONG),
    "lstm_stepwise_project": ("stepwise", PROJECTED),
    "lstm_stepwise_dh": ("stepwise", PROJECTED),
    "lstm_stepwise_outputs_projected": ("stepwise", PROJECTED),
    "gru_stepwise_backward": ("stepwise", {"op": "gru"}),
    "stepwise_gru_reset": ("stepwise", BEFORE),
    "stepwise_gru_candidate": ("stepwise", BEFORE),
    "stepwise_gru_reset_backward": ("stepwise", BEFORE),
    "rnn_stepwise_forward": ("stepwise", {"op": "rnn"}),
}


def as_in_a_layer(sizes, **options):
    """Return random (case, cotangents) of a call as layers make it in training, without initial states and with a loss
    of h. So its kernels are those of the tests of layers."""
    states = {"c0": None} if options.get("op", "lstm") == "lstm" else {}
    case = draw(np.random.default_rng(1), sizes=sizes, dtype=np.float32, h0=None, **states, **options)
    return case, {"h": draw_cotangents(np.random.default_rng(2), forward(**case), np.float32)["h"]}


def assert_right_without(kernel, monkeypatch, said, kind, hangs=False):
    """Plant a fault in a kernel; `kind` names the fault, e.g. wrong numbers. Check that a call then runs on the next
    engine with right results. Check that there is one warning for each engine that is refused because of the fault.
    Without a kernel that multiplies 8 x 8 matrices, the same engine runs another one. hangs: whether the trial hangs;
    after that no other kernels are tried in the process."""
    (engines, options), lanes = FAMILIES[kernel], "matrix" in kernel
    engines = "fused stepwise" if hangs and engines == "fused" else engines
    options = dict(options)
    case, cotangents = as_in_a_layer((options.pop("T", 3), options.pop("B", 2), 3, 9, 5), **options)
    prefer(monkeypatch, engines.split()[0])
    with on_metal(guarded=True), matrices_from(65), fault(kind, kernel):
        chosen, real = [], _call.guarded
        monkeypatch.setattr(_call, "guarded", lambda *given: (chosen.append(real(*given)), chosen[-1])[1])
        for _ in range(2):
            outputs, found = run(case, None, np.float32, cotangents, device=METAL)
        left = {"fused": "stepwise", "stepwise": "ops", "fused stepwise": "ops"}[engines]
        assert chosen[-1][0].engine == ("fused" if lanes else left)
        with nullcontext() if lanes else pytest.raises(ValueError, match="cannot run: its trial on this machine"):
            run(case, engines.split()[0], np.float32, cotangents, device=METAL)
    exact, limit = evaluate(case, cotangents, Rounding(np.float64)), bounds(case, np.float32, cotangents)
    for name, value in (outputs | found).items():
        assert_within(name, value, (exact[0] | exact[1])[name], limit[name])
    assert [text.split("'")[1] for text in said] == (["fused with 8 x 8 matrices"] if lanes else engines.split())


# {call: (engine, options, batch size) of a call whose kernels multiply 8 x 8 matrices}
WITH_MATRICES = {
    "fused": ("fused", {}, 65),
    "fused gru": ("fused", {"op": "gru"}, 65),
    "stepwise": ("stepwise", {}, 9),
    "stepwise projection": ("stepwise", {"projection": True}, 33),
    "stepwise gru": ("stepwise", {"op": "gru", "reset": "before"}, 9),
}


QUICK = ("stepwise projection",)
"""What a default test tries. Those of `fused` have faults in `test_a_fault_in_any_kernel`."""


@pytest.mark.parametrize(
    "call", [pytest.param(call, marks=[pytest.mark.slow] * (call not in QUICK)) for call in WITH_MATRICES]
)
def test_a_gpu_without_matrices_keeps_the_engine(call, monkeypatch, said, tried):
    """On some virtual GPUs all kernels work but those that multiply 8 x 8 matrices. Then the engine computes its
    products in lanes, with one warning and right results, also if the caller forced it."""
    engine, options, B = WITH_MATRICES[call]
    case, cotangents = as_in_a_layer((3, B, 3, 9, 5), **options)
    prefer(monkeypatch, engine)
    with on_metal(guarded=True) as log, matrices_from(65), fault("zeros", ".*"):
        results = [run(case, engine_, np.float32, cotangents, device=METAL) for engine_ in (None, engine)]
    assert set(tried) == {engine} and len(said) == 1
    assert f"engine='{engine} with 8 x 8 matrices' is not used on" in said[0] and "wrong numbers" in said[0]
    assert f"engine='{engine} without them' takes over" in said[0]
    assert any(re.search(MATRICES, launch.name + launch.source) for launch in log)
    exact, limit = evaluate(case, cotangents, Rounding(np.float64)), bounds(case, np.float32, cotangents)
    for outputs, found in results:
        for name, value in (outputs | found).items():
            assert_within(name, value, (exact[0] | exact[1])[name], limit[name])


IN_PROCESS = ("compile", "refused", "wrong")


@pytest.mark.parametrize("kernel", FAMILIES)
def test_a_fault_in_any_kernel(kernel, monkeypatch, said, tried):
    """A fault in any kernel makes the library use the next engine. Each kernel gets one of three faults: it does not
    compile, its launch raises an error, or it returns wrong numbers."""
    kind = IN_PROCESS[list(FAMILIES).index(kernel) % len(IN_PROCESS)]
    assert_right_without(kernel, monkeypatch, said, kind)
    assert "wrong numbers" in said[0] if kind == "wrong" else "trial on this machine failed" in said[0]
    assert all("tried in this process" in text for text in said)
    assert tried[:1] == [said[0].split("'")[1].split()[0]] and len(tried) <= 3


# Only these kernels get the fault `hangs`: it is slow to test, because the test waits for a timeout.
HANGING = ("lstm_fused_forward", "recurrent_input", "gru_stepwise_backward")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel, kind", [(kernel, kind) for kernel in FAMILIES for kind in FAULTS if kind != "hangs" or kernel in HANGING]
)
def test_any_fault_in_any_kernel(kernel, kind, monkeypatch, said):
    """Whatever fault a kernel has, the library uses the next engine. The trial runs of kernels take place in child
    processes, as on a Mac."""
    monkeypatch.setattr(_child, "SECONDS", 30 if kind == "hangs" else 600)
    monkeypatch.setattr(_child, "KERNEL_SECONDS", 0)
    monkeypatch.setattr(_guard, "command", lambda: [sys.executable, SCRIPT, kind, kernel])
    assert_right_without(kernel, monkeypatch, said, "refused", hangs=kind == "hangs")
    words = {"wrong": "wrong numbers", "hangs": "no answer after", "dies": "ended by SIGABRT: libc++abi"}
    assert words.get(kind, "failed") in said[0]


REASON = """print(json.dumps({"number": 2, "answer": {"reason": %r}}), flush=True)"""
FAILED = "its trial on this machine failed: RuntimeError: "

# {fault: (code that a child process runs instead of a trial run, part of the user's warning, how long the fault counts
# for other processes)}
ENDINGS = {
    "a kernel does not compile": (
        REASON % f"{FAILED}no library\nprogram_source:1:2: error: undeclared",
        "no library program_source:1:2: error: undeclared",
        "always",
    ),
    "wrong numbers": (
        REASON % "its trial on this machine gave wrong numbers: h: error 1 > bound 0",
        "wrong numbers: h: error 1 > bound 0",
        "always",
    ),
    "an abort": ("os.abort()", "ended by SIGABRT: it said nothing", "process"),
    "an abort by the compiler": (
        """print('libc++abi: terminating\\nprogram_source:1:2: error: no', file=sys.stderr, flush=True); os.abort()""",
        "ended by SIGABRT: libc++abi: terminating program_source:1:2: error: no",
        "always",
    ),
    "an exit": ("""sys.exit('[METAL] error')""", "ended with exit code 1: [METAL] error", "process"),
    "an abort after the answer": (REASON % f"{FAILED}no" + "; os.abort()", "failed: RuntimeError: no", "process"),
    "an error in the child": (
        """print('{"number": 2, "error": "ValueError: no"}', flush=True)""",
        "failed: ValueError: no",
        "process",
    ),
    "an answer to an earlier request": (
        """print('{"number": 1, "answer": {"reason": ""}}'); """ + REASON % f"{FAILED}no",
        "failed: RuntimeError: no",
        "process",
    ),
    "bytes that are no text": (
        "os.write(1, bytes([255, 10]))",
        "gave a broken answer: \N{REPLACEMENT CHARACTER}",
        "process",
    ),
    "an error text that is no text": (
        "os.write(2, bytes([255])); os.abort()",
        "ended by SIGABRT: \N{REPLACEMENT CHARACTER}",
        "process",
    ),
    "an exit without an error": ("sys.exit(0)", "ended with exit code 0: it said nothing", "process"),
    "a hang": ("time.sleep(3600)", "gave no answer after 1 seconds", "day"),
    "SIGTERM": ("os.kill(os.getpid(), 15)", "was ended from outside, twice", "process"),
    "SIGKILL": ("os.kill(os.getpid(), 9)", "was ended from outside, twice", "process"),
    "SIGHUP": ("signal.signal(1, signal.SIG_DFL); os.kill(os.getpid(), 1)", "was ended from outside, twice", "process"),
}
COUNTED = """print('{"number": 1, "answer": {"kernels": 1}}', flush=True)"""


def in_python(code, monkeypatch):
    """Replace the child processes in which the library tries its kernels before their first use. The new child
    processes execute the Python source `code`. On a busy machine they may take a minute to begin and to end, but if the
    code sleeps, the library waits for the last answer for one second only."""
    words = [sys.executable, "-c", f"import json, os, signal, sys, time; {code}"]
    sleeps, counts = "sleep" in code, COUNTED in code
    monkeypatch.setattr(_child, "SECONDS", 1 if sleeps and not counts else 60)
    monkeypatch.setattr(_child, "KERNEL_SECONDS", -59 if sleeps and counts else 0)
    monkeypatch.setattr(_guard, "command", lambda: words)
    monkeypatch.setattr(_guard, "is_real", lambda: True)


@pytest.mark.parametrize("fault", ENDINGS)
def test_what_the_user_sees_of_a_fault(fault, monkeypatch, said, own_cache):
    """A child process tests the kernels of an engine before their first use. However the child process fails, the
    user gets one warning, and engine `ops` runs instead. If the kernels are at fault, the result is stored for later
    processes. Any other fault may not happen again, so only this process obeys it."""
    code, words, keeping = ENDINGS[fault]
    in_python(f"{COUNTED}; {code}", monkeypatch)
    reason = assert_refused(words, said)
    assert_kept(trial_of("fused", problem()).text(), reason, keeping, said[0], own_cache)


def assert_refused(words, said):
    """Check that the engine `fused` is refused, with one warning that contains these words. Return the reason."""
    best = lambda refused: Choice("ops", refused["fused"])  # noqa: E731
    for _ in range(2):
        chosen, _ = _guard.guarded(Choice("fused", ""), problem(), best, lambda form, engine: form)
        assert chosen.engine == "ops" and words in chosen.reason
    assert len(said) == 1 and chosen.reason.rstrip(".") in said[0] and "engine='ops' takes over" in said[0]
    return chosen.reason


def assert_kept(trial, reason, keeping, warning, file):
    """Check that the warning says how long a refusal counts, and that a new process obeys it so long."""
    told = {"always": f"{file} keeps this verdict: ", "day": f"{file} keeps this verdict for a day: "}
    assert told.get(keeping, "It counts in this process") in warning
    in_a_new_process()
    assert verdicts.find(trial) == (None if keeping == "process" else reason)


def test_a_child_that_cannot_begin_says_nothing(monkeypatch):
    """Kernels get a small test run in a child process before their first use. If the child fails at its imports,
    CannotBegin is raised, so that the test run can be repeated in the user's process. If a signal ended the child,
    the kernels are refused and never run in the user's process."""
    in_python("import nothing_of_the_kind", monkeypatch)
    with pytest.raises(_child.CannotBegin, match="nothing_of_the_kind"):
        _child.by_child(_guard.command(), [trial_of("fused", problem())])
    in_python("os.abort()", monkeypatch)
    aborted = "its trial on this machine ended by SIGABRT: it said nothing"
    assert _guard.try_out([trial_of("fused", problem())]) == [(aborted, "process")]


def test_a_child_that_does_not_begin(monkeypatch, said, capfd):
    """If the child process does not even count the kernels, no kernel is to blame: the refusal counts in this process
    only. No other trial is made in it, because each of them would wait as long."""
    in_python("time.sleep(3600)", monkeypatch)
    monkeypatch.setattr(_child, "PATIENCE", 0.2)
    monkeypatch.setattr(_judge, "verdict", lambda trial: pytest.fail("a trial in this process"))
    reason = "its trial on this machine did not begin: no answer after 1 seconds"
    assert _guard.refusal("fused", problem()) == reason
    assert "trying the Metal kernels of engine 'fused', once" in capfd.readouterr().err
    monkeypatch.setattr(_guard, "try_out", lambda trials: pytest.fail("another trial"))
    assert _guard.refusal("fused", problem(H=10, P=10)) == reason
    assert "a trial of engine 'fused' hung in this process" in _guard.refusal("stepwise", problem())
    in_a_new_process()
    monkeypatch.setattr(_guard, "try_out", lambda trials: [RIGHT])
    assert _guard.refusal("fused", problem()) == _guard.refusal("stepwise", problem()) == ""


def test_a_hang_counts_for_a_day(monkeypatch, said):
    """After a trial that hung, its process tries no other kernels. Other processes try no new kernels of this engine
    for a day. Kernels that were right before are used all the time."""
    in_python(f"{COUNTED}; time.sleep(3600)", monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(_guard, "try_out", lambda trials: [RIGHT])
        assert _guard.refusal("fused", problem(H=11, P=11)) == ""
    reason = "its trial on this machine gave no answer after 1 seconds"
    assert _guard.refusal("fused", problem()) == reason
    monkeypatch.setattr(_guard, "try_out", lambda trials: pytest.fail("another trial"))
    assert "engine 'fused' hung in this process" in _guard.refusal("stepwise", problem())
    in_a_new_process()
    assert _guard.refusal("fused", problem()) == _guard.refusal("fused", problem(H=10, P=10)) == reason
    monkeypatch.setattr(_guard, "try_out", lambda trials: [RIGHT])
    assert _guard.refusal("fused", problem(H=11, P=11)) == _guard.refusal("stepwise", problem()) == ""
    in_a_new_process()
    tomorrow = time.time() + verdicts.DAY + 1
    monkeypatch.setattr(verdicts.time, "time", lambda: tomorrow)
    assert _guard.refusal("fused", problem()) == _guard.refusal("fused", problem(H=10, P=10)) == ""


def test_the_time_limit_grows_with_the_kernels(monkeypatch):
    """A trial may take 20 seconds, and 2 seconds more for each kernel that the child has to compile."""
    limits, replies = [], iter([{"kernels": 7}, {"reason": ""}, {"kernels": 0}, {"reason": ""}])

    class Answering:
        def __init__(self, command):
            pass

        def serves(self):
            return True

        def ask(self, limit, notice, **request):
            limits.append(limit)
            return next(replies)

        def end(self):
            pass

    monkeypatch.setattr(_child, "Child", Answering)
    monkeypatch.setattr(_child, "SECONDS", SECONDS)
    for _ in range(2):
        assert _child.by_child([], [trial_of("fused", problem())]) == [RIGHT]
    assert limits == [20, 34, 20, 20]


NAMED = """
import random
for line in sys.stdin:
    message = json.loads(line)
    time.sleep(0.005 * random.random())
    given = message["request"]
    reason = "its trial on this machine gave wrong numbers: %d" % json.loads(given["trials"][0])["problem"]["H"]
    answer = {"kernels": 1} if given["do"] == "count" else {"reason": reason}
    print(json.dumps({"number": message["number"], "answer": answer}), flush=True)
"""
"""A child process whose answer names the width of the call, after a random time of at most 5 ms."""


class Interrupted(Exception):
    """The exception that a signal handler raises in the next test."""


def test_an_interrupted_trial_shifts_no_answer(monkeypatch):
    """A signal handler may raise an exception at any moment of a trial. The exception reaches the caller, and each
    later call gets the answer to its own request."""
    in_python(f"exec({NAMED!r})", monkeypatch)
    monkeypatch.setattr(_child, "SECONDS", 60)  # no answer is to be late, also on a busy machine

    def handler(number, frame):
        raise Interrupted

    before, rng, raised = signal.signal(signal.SIGALRM, handler), np.random.default_rng(1), 0
    try:
        for H in range(20, 50):
            begun = bool(_child._children) and _child._children[-1].serves()
            signal.setitimer(signal.ITIMER_REAL, 1e-4 + (0.012 if begun else 0.06) * rng.random())
            try:
                reason = _guard.refusal("fused", problem(H=H, P=H))
                signal.setitimer(signal.ITIMER_REAL, 0)  # inside of `try`, as the signal may come before this line
            except Interrupted:
                raised += 1
                reason = _guard.refusal("fused", problem(H=H, P=H))
            assert reason == f"its trial on this machine gave wrong numbers: {H}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert raised >= 5


def test_one_child_tries_each_kernel_once(tmp_path, monkeypatch):
    """A single child process runs the trial runs of all kernels. It does not launch kernels again that were already
    found right."""
    log = tmp_path / "launches"
    monkeypatch.setattr(_guard, "command", lambda: [sys.executable, SCRIPT, "counted", str(log)])
    first = _guard.try_out([trial_of("fused", problem())])
    launches, child = log.read_text(), _child._children[-1].process.pid
    # A longer and reversed sequence uses kernels with the same source, so nothing is launched again.
    assert first == _guard.try_out([trial_of("fused", problem(T=50, reverse=True))]) == [RIGHT]
    assert log.read_text() == launches and _child._children[-1].process.pid == child
    assert _guard.try_out([trial_of("fused", problem(H=10, P=10))]) == [RIGHT]
    assert len(log.read_text()) > len(launches) and _child._children[-1].process.pid == child


def test_where_no_process_can_be_started(monkeypatch, tried):
    """The trial run takes place in the user's process if no child process can be started. A frozen application does
    not start a child process, because its executable is not a Python interpreter."""
    with on_metal():
        with pytest.raises(_child.CannotBegin, match="No such file"):
            _child.by_child(["/nowhere/python"], [trial_of("fused", problem())])
        assert _guard.try_out([trial_of("fused", problem())]) == [RIGHT]
    monkeypatch.undo()
    assert _guard.command()[0] == sys.executable
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert _guard.command() is None


# --- When the guard runs a trial run ---------------------------------------------------------------------------------


def problem(**options):
    """Return the description (`Problem`) of a small LSTM call, with the fields in `options` changed."""
    usual = {"T": 3, "B": 2, "H": 9, "P": 9, "cell": LSTMCell(), "dtype": mx.float32, "names": ("x", "Wx", "Wh", "b")}
    return Problem(**usual | options)


def test_eight_threads_make_one_trial(monkeypatch, said):
    trials, results = [], []
    monkeypatch.setattr(_guard, "try_out", lambda given: (trials.append(given[0].engine), time_passes(), [WRONG])[2])
    layer, x, _ = layer_and_data()
    mx.eval(layer, x)
    barrier = threading.Barrier(8)

    def work():
        with mx.stream(METAL):
            barrier.wait()
            results.append(np.array(layer(x)[0]))

    with on_metal(guarded=True):
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert trials == ["fused", "stepwise"] and len(said) == 2
    assert len(results) == 8 and all((result == results[0]).all() for result in results)


def time_passes():
    """Wait 0.2 seconds, so that other threads reach the same trial run before it ends."""
    threading.Event().wait(0.2)


RECORDING = """
import sys
from mlx_lstm.engines.cells import LSTMCell
from mlx_lstm.engines.problem import Problem
from mlx_lstm.recurrence import _child, _guard

_guard.is_real, _guard.try_out = lambda: True, lambda trials: [_child.Verdict("")]
which = int(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for width in range(10 + 40 * (which % 2), 50 + 40 * (which % 2)):
    _guard.refusal("fused", Problem(3, 2, width, width, LSTMCell(), names=("x", "Wh"), reverse=which >= 2))
"""


def test_four_processes_lose_no_verdict(tmp_path):
    """Four processes store 40 verdicts (results of trial runs) each at the same time, and none is lost. They begin
    together, after all of them have imported the library."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": os.environ | {"HOME": str(tmp_path)}}
    command = [sys.executable, "-c", RECORDING]
    processes = [subprocess.Popen([*command, str(n)], **pipes) for n in range(4)]
    assert [process.stdout.readline() for process in processes] == [b"ready\n"] * 4
    for process in processes:
        process.stdin.close()
    assert [process.wait() for process in processes] == [0] * 4
    (file,) = tmp_path.rglob("verdicts.json")
    (found,) = json.loads(file.read_text()).values()
    assert len(found) == 4 * 40 and set(found.values()) == {""}


def test_a_forked_process_keeps_no_lock(monkeypatch):
    """The lock on trials is released after a trial even if a process that was forked meanwhile has its file open."""
    fcntl, copies = pytest.importorskip("fcntl"), []
    flock = fcntl.flock
    # A copy of the file's number keeps the file open, as a forked process does.
    monkeypatch.setattr(fcntl, "flock", lambda file, how: (copies.append(os.dup(file.fileno())), flock(file, how))[1])
    with _guard.one_process_at_a_time():
        pass
    with verdicts.file().with_suffix(".lock").open() as another:
        flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises BlockingIOError while the lock is held
    for copy in copies:
        os.close(copy)


def test_a_pipe_in_place_of_the_lock_file_does_not_stop_a_trial(own_cache):
    """If the lock on trials cannot be opened, because its file is a pipe, a trial runs without a lock."""
    own_cache.parent.mkdir()
    os.mkfifo(own_cache.with_suffix(".lock"))
    entered = threading.Event()

    def enter():
        with _guard.one_process_at_a_time():
            entered.set()

    threading.Thread(target=enter, daemon=True).start()  # a daemon: if it hangs, the test still ends
    assert entered.wait(300)


def test_a_verdict_counts_for_one_version_of_everything(monkeypatch):
    """A verdict (the result of a trial run of kernels) is stored together with the chip, the versions of macOS, MLX
    and mlx-lstm, and the kernels' source. If one of these changes, even macOS 26.0 to 26.1, the kernels are tried
    again."""
    trials = counted(monkeypatch)
    machine = {"chip": "M4", "architecture": "g16", "system": "macOS 26.0", "mlx": "0.32.1", "mlx_lstm": "0.1.0"}
    machine["kernels"] = "0123"
    changes = [{}, {"system": "macOS 26.1"}, {"mlx": "0.32.2"}, {"chip": "M5"}, {"architecture": "g17"}]
    changes += [{"mlx_lstm": "0.1.1"}, {"kernels": "4567"}, {}]
    for change in changes:
        monkeypatch.setattr(tuning, "machine", lambda change=change: machine | change)
        in_a_new_process()
        _guard.refusal("fused", problem())
    assert len(trials) == len(changes) - 1  # the last machine is the first one, which has a verdict
    monkeypatch.undo()
    monkeypatch.setattr(tuning.platform, "mac_ver", lambda: ("26.1", ("", "", ""), "arm64"))
    monkeypatch.setattr(tuning.sys, "platform", "darwin")
    monkeypatch.setattr(tuning, "installed_version", lambda name: f"version of {name}")
    found = tuning.machine.__wrapped__()
    assert (found["system"], found["mlx"]) == ("macOS 26.1", "version of mlx")


@contextmanager
def counted_kernels():
    """Count the kernels of trial runs and of calls, but run none. Kernels return zeros, and every trial run passes.

    Yield (goes, tried, used). goes: for each request for trial runs, the number of new kernels. tried: the names,
    sources and argument types of these kernels. used: the names and argument types of the kernels that calls launch.
    """
    goes, used, judge = [], set(), _judge.Trials()

    def metal_kernel(**definition):
        def launch(*, inputs, **call):
            used.add((definition["name"], tuple((array.dtype, array.size < 8) for array in inputs)))
            return [mx.zeros(*each) for each in zip(call["output_shapes"], call["output_dtypes"], strict=True)]

        return launch

    recorder = _judge.Recorder(metal_kernel)
    judge.recorder = recorder

    def try_out(trials):
        if new := judge.count(*trials)["kernels"]:
            goes.append(new)
        judge.right.update(*map(recorder.texts_of, trials))
        return [RIGHT] * len(trials)

    with on_metal(guarded=True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "metal_kernel", recorder.kernel)
        patch.setattr(_guard, "try_out", try_out)
        yield goes, judge.right, used


@pytest.mark.parametrize("H, most, kernels", [(256, 8, 45), (128, 8, 26)])
def test_a_program_makes_few_trials(H, most, kernels):
    """A program that trains, evaluates and streams with several batch sizes, layers and dtypes requests at most
    `most` trial runs, which test at most `kernels` kernels. No kernel runs before its trial run. Building the graphs
    is enough to count the launches."""

    def train(run, B, dtype=mx.float32):
        mx.grad(lambda x: run(x).sum())(mx.zeros((B, 100, H), dtype))

    layers = [mlx_lstm.nn.LSTM(H, H) for _ in range(2)]
    model = mlx.nn.Sequential(*[lambda x, layer=layer: layer(x)[0] for layer in layers])
    with counted_kernels() as (goes, tried, used):
        for B in (32, 17, 5):
            train(model, B)
        for layer in layers:
            layer.eval()
        for B in (64, 32, 10):
            model(mx.zeros((B, 100, H)))
        for layer in layers:
            h, c = layer(mx.zeros((1, 1, H)))
            layer(mx.zeros((1, 1, H)), hidden=h[:, -1], cell=c[:, -1])
            layer.step(mx.zeros((1, H)), *layer.step(mx.zeros((1, H))))
        gru = mlx_lstm.torch.GRU(H, H, bidirectional=True, batch_first=True)
        train(lambda x: gru(x)[0], 32)
        gru.eval()(mx.zeros((32, 100, H)))[0]
        for layer in layers:
            layer.set_dtype(mx.float16)
            layer.train()
        train(model, 32, mx.float16)
        for layer in layers:
            layer.eval()
        model(mx.zeros((32, 100, H), mx.float16))
    assert used <= {(text[0], text[3]) for text in tried}  # no kernel runs before its trial
    assert len(goes) <= most and sum(goes) == len(tried) <= kernels


def test_a_loss_of_other_outputs_has_its_own_trial(monkeypatch, said):
    """Backward kernels get a separate trial run (a small test run before their first use) if a loss depends on
    outputs other than h, here on cT. If this trial run fails, engine `ops` computes the right gradient. A caller who
    requests the refused engine gets the reason as an error."""
    asked = []

    def try_out(trials):
        asked.append(trials[0].problem.cotangents)
        return [WRONG if asked[-1] else RIGHT]

    monkeypatch.setattr(_guard, "try_out", try_out)
    x = mx.random.normal((3, 2, 4), key=mx.random.key(1))
    Wx, Wh = mx.random.normal((36, 4), key=mx.random.key(2)), mx.random.normal((36, 9), key=mx.random.key(3))

    def loss(Wh, engine=None):
        return mlx_lstm.lstm(x, Wx, Wh, engine=engine).cT.sum()

    wanted = mx.grad(loss)(Wh)
    with on_metal(guarded=True):
        found = mx.grad(loss)(Wh)
        assert asked == [None, ("hT", "cT")] and len(said) == 1 and "engine='ops' takes over" in said[0]
        with pytest.raises(ValueError, match="engine='fused' cannot run: its trial on this machine failed"):
            mx.grad(lambda Wh: loss(Wh, "fused"))(Wh)
    assert np.allclose(found, wanted, atol=1e-5)


def test_every_loss_has_a_trial_that_passes(said):
    """Our kernels compute the gradients of a loss of any outputs: in training, in evaluation, and if gates are
    returned. Every kernel that such a call launches had a trial run (a small test run before its first use), and
    these trial runs pass."""
    layer, x, _ = layer_and_data()
    names = ("h", "c", "gates", "hT", "cT")
    losses = [("h",), ("c",), ("h", "gates"), ("hT",), ("cT", "c"), ("gates",), names]
    Wx, Wh, x_first = layer.Wx, layer.Wh, mx.swapaxes(x, 0, 1)

    def loss(wanted, training=True):
        def total(x):
            out = mlx_lstm.lstm(x, Wx, Wh, return_gates="gates" in wanted, training=training)
            return sum(getattr(out, name).sum() for name in wanted)

        return total

    with counted_kernels() as (goes, tried, used):
        for wanted in losses:
            mx.grad(loss(wanted))(x_first)
        assert used <= {(text[0], text[3]) for text in tried}
        before = len(goes)
        mx.grad(loss(("h", "cT"), training=False))(x_first)
        mx.grad(lambda x: layer.eval()(x)[1].sum())(x)
        assert used <= {(text[0], text[3]) for text in tried} and len(goes) == before + 1
    with on_metal():
        for given in [("c",), ("gates", "hT", "cT"), ("hT", "cT")]:
            form = problem(cotangents=given, return_gates="gates" in given)
            assert _judge.verdict(trial_of("fused", form)) == ""
    assert not said


def test_inside_transformations(monkeypatch, said, tmp_path):
    """Kernels get a trial run (a small test run) before their first use. If it fails while MLX traces a call, the
    engine `ops` takes over in the traced graph."""
    monkeypatch.setattr(_guard, "try_out", lambda trials: [WRONG])
    layer, x, _ = layer_and_data()
    plain = layer(x)[0]
    with on_metal(guarded=True):
        compiled = mx.compile(lambda x: layer(x)[0])(x)
        assert layer.engine_used == ("ops", BROKEN) and len(said) == len(set(said)) == 2
        in_a_new_process()
        mapped = mx.vmap(lambda x: layer(x)[0])(x[None])
        assert layer.engine_used == ("ops", BROKEN) and len(said) == 4
        in_a_new_process()
        layer.eval()
        mx.export_function(str(tmp_path / "layer"), lambda x: layer(x)[0], x)
        assert layer.engine_used == ("ops", BROKEN) and len(said) == 6
    exported = mx.import_function(str(tmp_path / "layer"))(x)[0]
    assert np.allclose(exported, plain, atol=1e-5)
    assert np.allclose(compiled, plain, atol=1e-5) and np.allclose(mapped[0], plain, atol=1e-5)


def test_a_trial_in_this_process_inside_of_compile(said, tried):
    """Kernels get a trial run (a small test run) before their first use, even if that use is inside mx.compile.
    There the user's arrays are traced and have no values. The arrays of the trial run are not traced, so its results
    can be checked."""
    layer, x, _ = layer_and_data()
    with on_metal(guarded=True), fault("wrong", ".*fused_forward|.*stepwise_outputs"):
        compiled = mx.compile(lambda x: layer(x)[0])(x)
    assert tried == ["fused", "stepwise"] and all("wrong numbers: " in text and ": error " in text for text in said)
    assert np.allclose(compiled, layer(x)[0], atol=1e-5)


def test_an_emulator_is_no_reason_for_a_trial(monkeypatch):
    monkeypatch.setattr(_guard, "try_out", lambda trials: pytest.fail("a trial"))
    layer, x, weights = layer_and_data()
    with on_metal():
        gradients(layer, x, weights)
    assert layer.engine_used.engine == "fused"


def test_a_gradient_op_is_tried_with_its_gradients(tried):
    """Before `lstm_gradients` runs, its kernels get a trial run (a small test run). The trial run has cotangents for
    the same outputs as the user's call."""
    seen = []
    case = draw(np.random.default_rng(1), sizes=(3, 2, 3, 9, 9), dtype=np.float32)
    arrays = {name: mx.array(case[name]) for name in ("x", "Wx", "Wh", "b")}
    with on_metal(guarded=True), pytest.MonkeyPatch.context() as patch:
        out = mlx_lstm.lstm(**arrays, return_gates=True)
        patch.setattr(_judge, "results", lambda problem, case, given, engine: (seen.append(tuple(given)), 1 / 0))
        with pytest.warns(UserWarning):
            mlx_lstm.recurrence.lstm_gradients(**arrays, gates=out.gates, c=out.c, dhT=out.hT, dgates=out.gates)
    assert seen == [("gates", "hT")] * 2 and tried == ["fused", "fused", "stepwise"]


# --- Stored results of trial runs ------------------------------------------------------------------------------------


def counted(monkeypatch, verdict=""):
    """Replace every trial run of kernels by the fixed result `verdict`. Return a list that records the trial runs
    requested from now on."""
    trials = []
    monkeypatch.setattr(_guard, "is_real", lambda: True)
    monkeypatch.setattr(_guard, "try_out", lambda given: (trials.append(given[0]), [_child.Verdict(verdict)])[1])
    return trials


def test_a_verdict_is_kept_for_this_machine(own_cache, monkeypatch):
    trials = counted(monkeypatch, BROKEN)
    for _ in range(2):
        assert _guard.refusal("fused", problem()) == BROKEN
        in_a_new_process()
    assert len(trials) == 1
    ((machine, kept),) = json.loads(own_cache.read_text()).items()
    assert machine == verdicts.environment() and tuning.kernels_hash() in machine and list(kept.values()) == [BROKEN]
    assert trial_from(next(iter(kept))) == trials[0]


def test_the_verdicts_of_other_environments_stay(own_cache, monkeypatch):
    """The cache file keeps the results of the kernels' trial runs for several environments (machine and versions):
    the ones used last."""
    trials, real = counted(monkeypatch), verdicts.environment()
    for n in range(verdicts.MACHINES + 1):
        monkeypatch.setattr(verdicts, "environment", lambda n=n: f"{real} {n}")
        in_a_new_process()
        _guard.refusal("fused", problem())
    assert len(trials) == verdicts.MACHINES + 1
    assert list(json.loads(own_cache.read_text())) == [f"{real} {n}" for n in range(1, verdicts.MACHINES + 1)]


def test_another_process_may_have_tried_meanwhile(own_cache, monkeypatch):
    trials = counted(monkeypatch)
    _guard.refusal("fused", problem())
    before = own_cache.read_text()
    _guard.refusal("fused", problem(H=10, P=10))
    other = own_cache.read_text()
    # Simulate another process that writes its own result to the file. It read the file before the second trial run
    # here, so it deletes the result of this trial run.
    own_cache.write_text(before)
    verdicts.record("mine", "")
    assert len(trials) == 2 and set(json.loads(own_cache.read_text())[verdicts.environment()]) >= {"mine"}
    own_cache.write_text(other)
    in_a_new_process()
    _guard.refusal("fused", problem(H=10, P=10))
    assert len(trials) == 2


FAR = json.dumps({"here": {"trial": {"reason": "", "until": 10**400}}})


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"here": 1}', '{"here": {"trial": 1}}', b"\xff\xfe", FAR])
def test_a_broken_file_is_named_in_one_warning_and_replaced(own_cache, monkeypatch, said, text):
    trials = counted(monkeypatch)
    own_cache.parent.mkdir()
    own_cache.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert _guard.refusal("fused", problem()) == ""
    assert len(said) == 1 and f"{own_cache} has no verdicts on kernels and is ignored" in said[0]
    in_a_new_process()
    assert _guard.refusal("fused", problem()) == "" and len(trials) == len(said) == 1


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch, said):
    trials = counted(monkeypatch)
    monkeypatch.setattr(tuning, "cache_file", lambda: Path("/proc/mlx-lstm/engines.json"))
    assert _guard.refusal("fused", problem()) == _guard.refusal("fused", problem(T=4)) == ""
    assert len(trials) == 1 and not said


# --- Kernels that the library tests in a trial run before their first use --------------------------------------------


# Calls that together use as many kernels as possible: {name: (engine, (T, B, I, H, P), options)}
CALLS = {
    "fused lanes": ("fused", (5, 16, 3, 20, 20), {}),
    "fused two rows": ("fused", (2, 20, 3, 9, 9), {"lengths": [2, 1] * 10}),
    "fused small": ("fused", (4, 1, 3, 2, 2), {"op": "rnn"}),
    "fused keep": ("fused", (2, 5, 3, 9, 9), {"keep": True, "lengths": [2, 1, 0, 2, 1]}),
    "fused both ways": ("fused", (2, 40, 3, 9, 9), {"bidirectional": True, "peephole": True, "lengths": [2, 1] * 20}),
    "fused 8 bits": ("fused", (3, 2, 32, 32, 32), {"packing": (32, 8, "affine")}),
    "stepwise one item": ("stepwise", (4, 1, 3, 40, 40), {"mask": (4, 1, "P")}),
    "stepwise projection of one_step": ("stepwise", (1, 1, 3, 40, 5), {"projection": True}),
    "stepwise lanes": ("stepwise", (3, 5, 3, 41, 5), {"projection": True}),
    "stepwise small keep": ("stepwise", (2, 2, 3, 9, 9), {"op": "gru", "reset": "before", "keep": True}),
    "stepwise small projection": ("stepwise", (4, 1, 3, 9, 2), {"projection": True}),
    "stepwise small projection of two": ("stepwise", (4, 2, 3, 9, 3), {"projection": True}),
    "stepwise joins": ("stepwise", (22, 9, 3, 9, 9), {"op": "rnn"}),
    "stepwise small joins": ("stepwise", (22, 1, 3, 5, 5), {"op": "rnn"}),
    "stepwise projection joins": ("stepwise", (11, 3, 3, 9, 4), {"projection": True}),
    "stepwise 4 bits": ("stepwise", (3, 5, 32, 192, 192), {"packing": (32, 4, "affine")}),
    "stepwise nvfp4": ("stepwise", (3, 9, 16, 80, 48), {"packing": (16, 4, "nvfp4"), "projection": True}),
}


RUN = ("fused both ways", "fused 8 bits")
"""The calls whose trials run. Of the others, a test compares the sources of the kernels: compiling all of them would
take a minute."""


def texts_of(engine, sizes, dtype, packing=None, **options):
    """Return (problems, sources): the descriptions (`Problem`) of a call with its gradient, and the source of every
    kernel that the call runs."""
    case = draw(np.random.default_rng(1), sizes=sizes, dtype=dtype, **options)
    cotangents = draw_cotangents(np.random.default_rng(2), forward(**case), dtype)
    names = [name for name in ("Wx", "Wh", "Wp") if packing and name in case]
    forms, weights = [], {name: packed(mx.array(case[name]), *packing) for name in names}
    with noted() as texts, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_call, "guarded", lambda found, form, *_: (forms.append(form), (found, form))[1])

        def note(chosen, form, is_forced, names):
            forms.append(form._replace(cotangents=names))
            return ""

        patch.setattr(_call, "gradient_refusal", note)
        for given in (cotangents, {"h": cotangents["h"]}):
            run(case, engine, dtype, given, weights)
    return dict.fromkeys(forms), set(texts)


def assert_tries_the_same(engine, sizes, dtype=np.float32, *, runs=True, **options):
    """Check that the trial runs (small test runs of kernels) use every kernel that the call uses, with the same source.
    With `runs`, check also that they find no wrong result."""
    forms, wanted = texts_of(engine, sizes, dtype, **options)
    trials = [trial_of(engine, form) for form in forms]
    with noted() as texts:
        assert all(_judge.verdict(trial).startswith("its trial on this machine gave wrong numbers") for trial in trials)
    assert wanted <= set(texts)
    if runs:
        with on_metal():
            assert [_judge.verdict(trial) for trial in trials] == [""] * len(trials)


@pytest.mark.parametrize("call", CALLS)
def test_a_trial_runs_the_kernels_of_the_call(call):
    engine, sizes, options = CALLS[call]
    assert_tries_the_same(engine, sizes, runs=call in RUN, **options)


def test_a_trial_is_cut_as_the_call():
    """The trial run of a kernel divides its work into threadgroups in the same way as the user's call, also if
    `--tune` measured a better division for this machine."""
    with tuning.trying(Cut(8, 4)):
        assert_tries_the_same("fused", (2, 5, 3, 9, 9), runs=False)


SHAPES = [(1, 1, 2), (22, 5, 9), (4, 9, 24), (12, 40, 9)]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(0, len(on_one_engine(EVERY_OPTION)), 2))
def test_a_trial_runs_the_kernels_of_most_calls(number):
    """A trial run (a small test run of kernels before their first use) uses the same kernels as the user's call,
    whatever options the call has. Every second option is tested, with one of four shapes and one of three dtypes."""
    engine, option = on_one_engine(EVERY_OPTION)[number]
    T, B, H = SHAPES[number // 4 % len(SHAPES)]
    options = dict(EVERY_OPTION[option])
    if "lengths" in options:
        options["lengths"] = [length % (T + 1) for length in (options["lengths"] * B)[:B]]
    if "mask" in options:
        options["mask"] = tuple({4: T, 2: B}.get(size, size) for size in options["mask"])
    if "hold" in options:
        options["hold"] = np.resize(options["hold"], (T, B))
    dtype = (np.float32, np.float16, ml_dtypes.bfloat16)[number % 3]
    assert_tries_the_same(engine, (T, B, 3, H, 3 if options.get("projection") else H), dtype, **options)


def test_large_calls_have_small_trials():
    """The trial run (small test run of kernels) for a large call has small sizes. A call beyond an index limit or
    the limit of steps per launch uses other kernels. The trial run then gets lower limits, so that it uses the same
    kernels as the call."""
    trial = trial_of("fused", problem(T=100000, B=512, H=128, P=128))
    assert trial.problem[:4] == (3, 9, 128, 128) and trial.problem.limits == Limits(index=0, launch_steps=2)
    forms = [problem(limits=Limits(cores=cores), cut=Cut(1, 0)) for cores in (8, 40)]  # the cut stands for the cores
    assert trial_of("fused", forms[0]) == trial_of("fused", forms[1])
    trial = trial_of("stepwise", problem(T=100000, B=512, H=1024, P=1024))
    assert trial.problem[:4] == (10, 33, 32, 32) and trial.problem.limits == Limits(index=0, rows_left=9, cores=1)
    assert trial_of("stepwise", problem(T=64, B=5, H=1000, P=1000)).problem[:4] == (10, 3, 8, 8)
    packed = {"packing": Packing(64, 4, "affine"), "names": ("x", "Wh", "Wh_scales", "Wh_biases")}
    # A row of more than 256 quantized weights needs a kernel whose lanes read it in several passes. So the trial run
    # also has more than 256 weights per row (H = 320).
    assert trial_of("stepwise", problem(T=64, B=5, H=1024, P=1024, **packed)).problem[:4] == (10, 3, 320, 320)
    assert trial_of("stepwise", problem(T=64, B=5, H=128, P=128, **packed)).problem[:4] == (10, 3, 64, 64)
    # A trial of chunks has two chunks. Those that are not computed again are made only beyond a limit, which it lowers.
    for engine, again, unchunked in product(("fused", "stepwise"), (False, True), (7, 5000)):
        chunked = problem(T=10000, chunks=Chunks(100, again, True), limits=Limits(unchunked=unchunked))
        small = trial_of(engine, chunked).problem
        assert 2 * small.chunks.steps == small.T and small.chunks.recomputes == again
        assert small.limits.unchunked == (unchunked if again else 0)
    assert trial_of("fused", problem(bidirectional=True)).problem.bidirectional
    # Kernels depend neither on numbers such as cell_clip nor on the order of the arrays.
    assert trial_of("fused", problem(names=("x", "Wh"))) == trial_of("fused", problem(names=("Wh", "x")))
    cells = [LSTMCell(cell_clip=clip, forget_bias=1.0 + clip) for clip in (1.0, 2.0)]
    assert len({trial_of("fused", problem(cell=cell)) for cell in cells}) == 1


def test_kernels_of_large_calls_run_in_small_trials():
    """The small trial run for a large call uses kernels with 64-bit indices and several launches per pass over the
    time steps."""
    trial = trial_of("fused", problem(T=2**26, B=3))
    with on_metal() as log:
        assert _judge.verdict(trial) == ""
    assert any("using Index = ulong;" in launch.source for launch in log)
    assert trial.problem.limits.launch_steps == sum("fused_forward" in launch.name for launch in log) == 2


def test_launches_of_one_limit_never_serve_another():
    """Two trial runs (small test runs of kernels) differ only in `limits`, for example the size from which indices
    have 64 bits. So one uses kernels with 64-bit indices, the other kernels with 32-bit indices. Both run in one
    process, but neither gets the other's kernel from a cache, whichever runs first."""
    for engine, word in (("fused", "using Index = ulong"), ("stepwise", "using Index = long")):
        wide = trial_of(engine, problem(T=2**26, B=3))
        narrow = wide._replace(problem=wide.problem._replace(limits=Limits()))
        with noted() as texts:  # no kernel runs, so that none is compiled
            runs = []
            for trial in (narrow, wide, narrow):
                _judge.verdict(trial)
                runs.append([source for source in texts if f"{engine}_forward" in source])
                texts.clear()
        assert [all(word in source for source in run) for run in runs] == [False, True, False]
        assert [any(word in source for source in run) for run in runs] == [False, True, False]


def every_cell():
    """Yield cells that together have every activation function for every gate and output."""
    for name in ACTIVATIONS:
        yield RNNCell(name)
        yield from (GRUCell(activations=gates) for gates in [(name, name, "tanh"), ("sigmoid", "sigmoid", name)])
        yield from (
            LSTMCell(activations=(name,) * 4 + (output,), cell_clip=clip, forget_bias=bias)
            for output in ("tanh", "relu", "hard_sigmoid", "hard_sigmoid_sixth")
            for clip, bias in ((None, 0.0), (1.0, 1.0))
        )


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_a_trial_keeps_off_kinks(dtype):
    """The random arrays of a trial run keep the arguments of activations away from kinks (e.g. 0 for relu). Next to
    a kink a gradient has no error bound and cannot be checked."""
    for cell in every_cell():
        names = ("x", "Wx", "Wh", "b", "h0") + (("c0", "peephole") if cell.op == "lstm" else ())
        drawn = _draw.draw(problem(T=10, B=9, cell=cell, dtype=dtype, names=names), np.random.default_rng(0))
        assert drawn.smooth, cell


@pytest.mark.parametrize("T", [1, 2, 5])
def test_a_trial_has_sequences_of_every_length(T):
    described = problem(T=T, B=2 * T + 3, names=("x", "Wx", "Wh", "b", "lengths"))
    lengths = _draw.draw(described, np.random.default_rng(0)).case.call["lengths"]
    assert len(lengths) == 2 * T + 3 and {*lengths} == {*range(T + 1)}


@pytest.mark.parametrize("clips", [("cell_clip",), ("projection_clip",), ("cell_clip", "projection_clip")])
def test_a_trial_of_clips_that_stop_gradients(clips):
    """In the trial of clips that stop gradients, every clip changes some values and leaves others as they are, and no
    value comes near its limit, where the gradient jumps; not even in bfloat16, which rounds most."""
    names = ("x", "Wx", "Wh", "b", "h0", "c0", "peephole", "mask", "keep", "Wp")
    for cell in every_cell():
        if cell.op == "lstm" and cell.cell_clip:
            limits = {"cell_clip": None, **dict.fromkeys(clips, 3.0)}
            of_call = cell._replace(**limits, clip_gradient="zero")
            cell = without_numbers(of_call)
            for name in ("cell_clip", "projection_clip", "forget_bias"):  # the trial has the options of the call
                assert bool(getattr(cell, name)) == bool(getattr(of_call, name)), name
            for given in (names, names[:5]):
                given = (*given, "Wp") if "projection_clip" in clips else given
                drawn = _draw.draw(problem(B=3, cell=cell, dtype=mx.bfloat16, names=given), np.random.default_rng(0))
                assert drawn.smooth, cell
                rows = drawn.case.call.get("Wp", np.eye(2))
                assert len({float(n) for n in rows[..., 0].flat}) == len(rows[..., 0].flat), cell  # no two are equal
                shifts = clip_shift(**drawn.case.call)
                for name, limit in (("c", cell.cell_clip), ("h", cell.projection_clip)):
                    assert not limit or 0.1 < (shifts[name] != 0).mean() < 0.9, cell


def test_a_trial_of_a_users_cell_keeps_off_steep_places():
    """A trial needs small gradients: a root is steep near 0. In every second attempt the cell gets positive numbers."""
    graph = Form(lambda a, state: (mx.sqrt(a[0]) + state[0],), gates=1, states=1).graph(1, 1)
    call = {"op": "pointwise", "graph": graph, "Wx": np.ones((1, 1)), "Wh": np.zeros((1, 1)), "h0": np.ones((1, 1))}
    for number, is_smooth in ((1.0, True), (1e-12, False)):
        assert _draw.is_smooth(Case(call | {"x": np.full((1, 1, 1), number)})) == is_smooth
    form = problem(cell=PointwiseCell(graph), names=("h0", "x", "Wx", "Wh"))
    for attempt in range(4):
        states = _draw.values_for_own_cell(form, np.random.default_rng(attempt), attempt)["h0"]
        assert (states.min() >= 0.5) == (attempt % 2 == 1)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
def test_the_numbers_of_a_trial_stay_in_range(dtype, T=22):
    """The results of a kernel's trial run do not overflow. A trial run that overflows would refuse correct kernels. The
    numbers grow with the steps, of which a trial has at most 20: two chunks of 10 joined steps."""
    for cell in every_cell():
        drawn = _draw.draw(problem(T=T, B=2, H=4, P=4, cell=cell, dtype=dtype), np.random.default_rng(0))
        outputs, _ = evaluate(drawn.case.call, None, Rounding(np.float64))
        assert drawn.smooth and all(np.abs(array).max() < _draw.LARGEST for array in outputs.values()), cell


def test_a_gradient_that_is_no_number_is_wrong(monkeypatch):
    """The trial run refuses a kernel that returns NaN in a gradient, even next to a kink of an activation, where
    gradients have no error bounds."""
    real_draw, real = _judge.draw, _judge.results
    monkeypatch.setattr(_judge, "draw", lambda *given: real_draw(*given)._replace(smooth=False))
    spoilt = {"dx": np.nan}
    monkeypatch.setattr(
        _judge, "results", lambda *given: {name: a * spoilt.get(name, 1.0) for name, a in real(*given).items()}
    )
    with on_metal():
        assert _judge.verdict(trial_of("fused", problem())) == "its trial on this machine gave wrong numbers: dx: NaN"
        spoilt.clear()
        assert _judge.verdict(trial_of("fused", problem())) == ""


def test_less_precise_products_of_mlx_are_no_fault(monkeypatch):
    """Some GPUs compute float32 products less precisely. The trial run therefore accepts results of an engine that
    are about as far from the oracle as the results of engine `ops`. It refuses results that are much farther away."""
    real, off = _judge.results, {"ops": 1.001, "fused": 1.0015}
    monkeypatch.setattr(_judge, "results", lambda *given: {name: a * off[given[3]] for name, a in real(*given).items()})
    with on_metal():
        assert _judge.verdict(trial_of("fused", problem())) == ""
        off["fused"] = 1.003
        assert "wrong numbers" in _judge.verdict(trial_of("fused", problem()))


# --- Warnings of layers ----------------------------------------------------------------------------------------------


def test_a_layer_says_what_ran():
    layer, x, _ = layer_and_data()
    assert layer.engine_used is None
    layer(x)
    assert layer.engine_used == ("numpy", "the stream's device is the CPU")
    assert repr(layer) == "LSTM(input_dims=3, hidden_size=9, bias=True)" and set(layer.state) == {"Wx", "Wh", "bias"}
    for other in (mlx_lstm.nn.GRU(3, 4), mlx_lstm.nn.RNN(3, 4), mlx_lstm.torch.LSTM(3, 4, engine="ops")):
        other(x)
        assert other.engine_used.engine == ("ops" if isinstance(other, mlx_lstm.torch.LSTM) else "numpy")
    ways = [mlx_lstm.nn.GRU(3, 4) for _ in range(2)]
    mlx_lstm.nn.stack(ways[:1], mx.ones((1, 2, 3)), reverse=ways[1:])
    assert {each.engine_used.engine for each in ways} == {"numpy"}
