"""Tests of what a user sees of each fault that Metal reports, and how long the library obeys it. Each fault is an error
text of MLX. It is raised in a trial (a small test run of kernels), and a child process answers with the result."""

import pytest
from test_guard import (  # noqa: F401
    COUNTED,
    REASON,
    assert_kept,
    assert_refused,
    in_a_new_process,
    in_python,
    own_cache,
    problem,
    said,
)

from mlx_lstm.engines import verdicts
from mlx_lstm.ground.child import shortened
from mlx_lstm.lab.report import one_line, without_names
from mlx_lstm.recurrence import _guard, _judge
from mlx_lstm.recurrence._trial import trial_of

BUILD = "[metal::Device] Unable to build metal library from source\n"
LOAD = "[metal::Device] Unable to load kernel custom_kernel_lstm_fused_forward_float\n"
RUN = "[METAL] Command buffer execution failed: "
IOGPU = "kIOGPUCommandBufferCallbackError"
WARNINGS = "".join(f"program_source:{n}:1: warning: unused variable 'v{n}'\n  int v{n};\n      ^\n" for n in range(200))

# {fault: (MLX's error text, the cause, which the user has to see, how long the fault counts)}
FAULTS = {
    # The compiler refuses the source.
    "an undeclared name": (f"{BUILD}program_source:12:5: error: undeclared identifier 'x'\n  x = 1;\n  ^", "'x'", 1),
    "a line of our own": (f"{BUILD}lstm_fused_forward__1:3:9: error: no function 'f'", "no function 'f'", 1),
    "a line after many warnings": (f"{BUILD}{WARNINGS}program_source:9:9: error: ambiguous{WARNINGS}", "ambiguous", 1),
    "a missing file": (f"{BUILD}program_source:1:10: fatal error: 'metal_x' file not found", "'metal_x' file not", 1),
    # The kernel needs more than the GPU has.
    "threadgroup memory": (
        f"{LOAD}Threadgroup memory size (40000) exceeds the maximum threadgroup memory allowed (32768)",
        "size (40000) exceeds",
        1,
    ),
    "registers": (f"{LOAD}Compute function exceeds available temporary registers", "temporary registers", 1),
    "the stack": (f"{LOAD}Compute function exceeds available stack space", "available stack space", 1),
    "threads": ("[metal_kernel] Thread group size (1024) is greater than the maximum allowed (896).", "(896)", 1),
    # All others may not come again.
    "interactivity": (f"{RUN}Impacting Interactivity (0000000e:{IOGPU}ImpactingInteractivity)", "(0000000e:", 0),
    "submissions": (
        f"{RUN}Ignored (for causing prior/excessive GPU errors) (00000004:{IOGPU}SubmissionsIgnored)",
        "SubmissionsIgnored",
        0,
    ),
    "a hang of the GPU": (f"{RUN}Caused GPU Hang Error (00000003:{IOGPU}Hang)", "GPU Hang", 0),
    "a timeout of the GPU": (f"{RUN}Caused GPU Timeout Error (00000002:{IOGPU}Timeout)", "GPU Timeout", 0),
    "an internal error": (f"{RUN}Internal Error (0000000e:Internal Error)", "Internal Error", 0),
    "background": (
        f"{RUN}Insufficient Permission (to submit GPU work from background) (00000006:{IOGPU}BackgroundExecution"
        "NotPermitted)",
        "BackgroundExecutionNotPermitted",
        0,
    ),
    "memory of the GPU": (f"{RUN}Insufficient Memory (00000008:{IOGPU}OutOfMemory)", "Insufficient Memory", 0),
    "a victim": (f"{RUN}Discarded (victim of GPU error/recovery) (00000005:{IOGPU}InnocentVictim)", "Discarded", 0),
    "a page fault": (f"{RUN}Caused GPU Address Fault Error (0000000b:{IOGPU}PageFault)", "Address Fault", 0),
    "no GPU": ("[metal::load_device] No Metal device available.", "No Metal device", 0),
    "a lost compiler": (
        f"{LOAD}Compiler encountered XPC_ERROR_CONNECTION_INTERRUPTED (is the OS shutting down?)",
        "XPC_ERROR_CONNECTION_INTERRUPTED",
        0,
    ),
    "no compiler": (f"{BUILD}Unable to reach MTLCompilerService. The process is unavailable.", "MTLCompilerService", 0),
    "an ill compiler": (f"{LOAD}Compiler encountered an internal error", "an internal error", 0),
    "memory on line 2": (f"{LOAD}insufficient memory to create the pipeline", "insufficient memory", 0),
    "no memory": ("[metal::malloc] Unable to allocate 1073741824 bytes.", "Unable to allocate", 0),
    "too many buffers": ("[metal::malloc] Resource limit (499000) exceeded.", "limit (499000)", 0),
    "a buffer that is too large": (
        "[metal::malloc] Attempting to allocate 9 bytes which is greater than the maximum allowed buffer size of 8.",
        "Attempting to allocate 9 bytes",
        0,
    ),
    "a full disk": ("[Errno 28] No space left on device: 'x'\nerror while writing", "No space left", 0),
    "no text": ("", "RuntimeError:", 0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_cause_of_a_fault_is_seen_and_weighed(fault, monkeypatch, said, own_cache):  # noqa: F811
    """The warning contains the cause of a fault, on whatever line of the text it stands. A fault that comes again
    counts always. Another one counts for a week after three processes have met it."""
    text, cause, lasts = FAULTS[fault]
    trial = trial_of("fused", problem())

    def fails(*given):
        raise RuntimeError(text)

    monkeypatch.setattr(_judge, "results", fails)
    in_python(f"{COUNTED}; {REASON % _judge.verdict(trial)}", monkeypatch)
    reason = assert_refused(cause, said)
    assert len(reason) < 700 and "\n" not in reason
    assert_kept(trial.text(), reason, "always" if lasts else "process", said[0], own_cache)


def test_a_fault_of_three_processes_counts_for_a_week(monkeypatch, own_cache):  # noqa: F811
    """A fault that may not come again is tried again by the second and the third process. Then a week passes before the
    next trial. A trial that passes ends this."""
    now, trials = [1e9], []
    monkeypatch.setattr(verdicts.time, "time", lambda: now[0])
    monkeypatch.setattr(_guard, "is_real", lambda: True)
    verdict = [_guard.verdict_of("Caused GPU Hang Error")]
    monkeypatch.setattr(_guard, "try_out", lambda given: (trials.append(1), verdict)[1])

    def tries():
        before = len(trials)
        for T in (3, 4):  # both calls have the same trial
            assert _guard.refusal("fused", problem(T=T)) == verdict[0].reason
        in_a_new_process()
        return len(trials) - before

    assert [tries() for _ in range(5)] == [1, 1, 1, 0, 0]
    now[0] += verdicts.WEEK + 1
    assert [tries() for _ in range(2)] == [1, 0]
    now[0] -= 2 * verdicts.WEEK  # the clock was put back, so the stored time is too far away
    verdict[0] = _guard.verdict_of("")
    assert [tries() for _ in range(2)] == [1, 0]
    now[0] += 9 * verdicts.WEEK
    assert tries() == 0


def test_equal_faults_of_other_kernels_are_one_group():
    texts = [f"{LOAD.replace('forward', name)}insufficient memory" for name in ("forward", "backward")]
    assert len({without_names(text) for text in texts}) == 1
    texts = [f"{BUILD}lstm_{name}:{n}:1: error: no" for n, name in enumerate(("forward", "backward"))]
    assert len({without_names(text) for text in texts}) == 1


def test_a_long_text_keeps_its_cause():
    text = "begin " + 3000 * "a " + "\nprogram_source:1:2: error: the cause\n" + 3000 * "b " + "end"
    assert len(shortened(text)) <= 1010 and len(one_line(text)) <= 420
    for short in (shortened(text), one_line(text)):
        assert short.startswith("begin") and "program_source:1:2: error: the cause" in short and short.endswith("end")
