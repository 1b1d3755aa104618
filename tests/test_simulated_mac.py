"""Test on Linux how the test suite runs on a Mac with a GPU. The pytest plugin `simulated_mac` simulates the Mac."""

import os
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from on_metal import logged_metal

ROOT = Path(__file__).parents[1]
FILES = ("test_kernels.py", "test_kernel_launches.py", "test_kernel_mutations.py", "test_guard.py", "metal_emulator")
SAMPLE = (
    "few_and_many_items and peephole or hardly_more or barrier_is or log_and_counters or few_trials or other_outputs"
    " or one_child or (any_kernel and lstm_stepwise_forward)"
)

pytestmark = pytest.mark.not_on_a_mac("there is a real one")


def test_kernels_run_on_the_gpu_and_what_is_left_out_is_named():
    """On a simulated Mac the kernel tests pass and none is skipped. Tests that need the emulator are left out, and
    the output names the reason."""
    command = [sys.executable, "-m", "pytest", "-p", "simulated_mac", "-p", "no:cacheprovider", "-q", "-k", SAMPLE]
    command += ["--no-skips", "--shader-coverage", *(f"tests/{name}" for name in FILES)]
    paths = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=paths)
    assert done.returncode == 0, done.stdout + done.stderr
    for reason in ("the emulator's own tests", "bytes: the emulator counts them", "damaged kernels: a GPU may hang"):
        assert re.search(rf"^left out here: [1-9]\d*, {reason}", done.stdout, re.MULTILINE)
    assert "lines of metal/ that ran: not counted on a Mac" in done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 5 and "skipped" not in done.stdout


PROGRAM = """
import simulated_mac
simulated_mac.install()
import json, warnings
import mlx.core as mx
from mlx_lstm.engines import verdicts
from mlx_lstm.nn import LSTM
from mlx_lstm.recurrence import _child

_child.SECONDS = 600  # the emulator's compiler is slower than Apple's

warnings.simplefilter("error")
layer, x = LSTM(3, 9), mx.ones((2, 4, 3))
mx.eval(mx.grad(lambda x: layer(x)[0].sum())(x))
mx.eval(layer.eval()(x))
(kept,) = json.loads(verdicts.file().read_text()).values()
print(layer.engine_used.engine, list(kept.values()))
"""


def test_kernels_are_tried_in_a_child_before_their_first_use(tmp_path):
    """On a simulated Mac a layer trains and evaluates on our Metal kernels. Before their first use, the library has
    run the kernels for training and for evaluation in a child process and has found both right."""
    paths = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "HOME": str(tmp_path)}
    # HOME is empty, but the emulator may keep using its cache of compiled kernels.
    paths |= {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))}
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, env=paths)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "fused ['', '']\n"


@pytest.mark.parametrize(("dtype", "start"), [(mx.float32, "nan"), (mx.uint16, "65535")])
def test_outputs_start_as_nan_on_a_gpu_too(dtype, start, monkeypatch):
    calls = []
    monkeypatch.setattr(mx.fast, "metal_kernel", lambda **definition: lambda **call: calls.append(call))
    with logged_metal() as log:
        kernel = mx.fast.metal_kernel(name="one", input_names=["x"], output_names=["y"], source="y[0] = 1;", header="")
        shape = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(1,)], "output_dtypes": [dtype]}
        kernel(inputs=[mx.zeros(9)], **shape)
    assert str(calls[0]["init_value"]) == start
    assert log[0].name == "one" and log[0].grid == (1, 1, 1) and "y[0] = 1;" in log[0].source
