"""Tests of the character language model (examples/char_lm.py) in several processes: together they learn what one
process learns, and a checkpoint remains when a process dies."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from test_char_lm import ROOT, SCRIPT, TEXT, char_lm, quiet

from mlx_lstm.oracle.closeness import largest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="MLX has no ring there")

SIZES = {"batch": 8, "window": 16, "embedding": 8, "hidden": 16, "dropout": 0.3, "clip": 0.5, "evaluations": 5}
SETTINGS = char_lm.Settings(**SIZES, steps=20)
OPTIONS = [f"--{name}={value}" for name, value in SIZES.items()] + ["--steps=20", "--prompt=1", "--length=1"]
CORPUS = char_lm.Corpus.of(TEXT)

# Code of a process that trains the example on a short text and sends itself a signal at one step. The process's
# arguments are the text, the step, the signal's number and the example's own options.
PROCESS = f"""
import os, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import char_lm
char_lm.mx.set_default_device(char_lm.mx.cpu)
text, at, number, *options = sys.argv[1:]
step, char_lm.documentation = char_lm.Run.train_step, lambda: text
def train_step(run):
    if run.step == int(at):
        os.kill(os.getpid(), int(number))
    return step(run)
char_lm.Run.train_step = train_step
raise SystemExit(char_lm.main(options))
"""


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for found in sockets:
            found.bind(("127.0.0.1", 0))
        return [found.getsockname()[1] for found in sockets]


def together(size, folder, *options, texts=None, at=-1, number=0, to=None):
    """Run `size` processes of the example, each with its own output folder. At step `at` the process with rank `to`
    sends itself the signal `number`. Return (exit codes, printed text of each process)."""
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(size)]))
    started = []
    for rank in range(size):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
        environment |= {"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)}
        text, step = texts[rank] if texts else TEXT, at if rank == to else -1
        line = [sys.executable, "-c", PROCESS, text, str(step), str(int(number))]
        line += ["--distributed", f"--out={folder / str(rank)}", *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(line, **pipes, text=True, encoding="utf-8", env=environment))
    said = [process.communicate(timeout=300) for process in started]
    return [process.returncode for process in started], said


def kept(folder):
    """Return (step, training losses, validation losses), read from a checkpoint."""
    _, about = mx.load(str(folder / "checkpoint.safetensors"), return_metadata=True)
    run = json.loads(about["run"])
    return run["step"], np.array(run["losses"]), np.array([bits for _, bits in run["validation"]])


@cache
def curve(dtype, evaluations):
    """Return (training losses, validation losses) of a single process that trains in the given dtype: float32, or
    float64 as the exact reference."""
    run = char_lm.Run(SETTINGS, CORPUS)
    run.model.set_dtype(dtype)
    run.optimizer.init(run.model.trainable_parameters())
    run.state = tuple(array.astype(dtype) for array in run.state)
    exact = contextlib.nullcontext() if dtype == mx.float32 else patch.object(char_lm, "product", mx.matmul)
    with exact, patch.object(run.model, "zero_state", lambda rows: (mx.zeros((rows, SETTINGS.hidden), dtype),) * 2):
        while run.step < SETTINGS.steps:
            run.train_step()
            if run.step % (SETTINGS.steps // evaluations) == 0:
                run.evaluate()
    return np.array(run.losses), np.array([bits for _, bits in run.validation])


def assert_same_curve(losses, validation):
    """Assert that the losses of several processes agree with those of one process. The several processes add in
    another order, so their error may be twice the float32 error of one process, plus a few roundings."""
    exact, one = (curve(dtype, len(validation)) for dtype in (mx.float64, mx.float32))
    for got, alone, ref in zip((losses, validation), one, exact, strict=True):
        assert got.shape == ref.shape
        bound = 2 * largest(alone - ref) + 4 * np.finfo(np.float32).eps * largest(ref)
        assert largest(got - ref) <= bound


def test_three_processes_learn_what_one_learns(tmp_path):
    """Three processes learn what one process learns, although the eight sequences of a batch cannot be divided
    equally among three processes."""
    codes, said = together(3, tmp_path, *OPTIONS)
    assert codes == [0, 0, 0], said
    step, *curves = kept(tmp_path / "0")
    assert step == 20
    assert_same_curve(*curves)
    (first, _), *others = said
    assert "step    20" in first and all(out == error == "" for out, error in others)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "hosts.json"]


@pytest.mark.not_on_a_mac("it runs on the GPU, which adds up the gradient of an embedding in any order")
def test_two_processes_as_a_user_starts_them(tmp_path):
    (port,), script = free_ports(1), tmp_path / "short_text.py"
    script.write_text(PROCESS)
    launch = [Path(sysconfig.get_path("scripts")) / "mlx.launch", "-n", "2", "--starting-port", str(port), "--"]
    line = [*launch, sys.executable, str(script), TEXT, "-1", "0", "--distributed", f"--out={tmp_path}", *OPTIONS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
    with subprocess.Popen(line, **pipes, text=True, encoding="utf-8", env=environment) as process:
        said = process.stdout.read()
    assert said.count("step    20") == said.count("validation: LSTM") == 1, said
    assert_same_curve(*kept(tmp_path)[1:])


def test_killed_processes_leave_a_checkpoint_that_any_number_of_them_resumes(tmp_path):
    """Any number of processes can resume the checkpoint that killed processes leave. One process saves at step 4.
    Three processes resume, and one is killed at step 10. Two processes resume, and one is killed at step 14. One
    process then finishes from the checkpoint that the survivor's error message names."""
    run, path = char_lm.Run(SETTINGS, CORPUS), tmp_path / "0" / "checkpoint.safetensors"
    for _ in range(4):
        run.train_step()
    run.evaluate(), run.save(path)

    resume = ["--resume", "--prompt=1"]
    codes, said = together(3, tmp_path, *resume, at=10, to=1, number=signal.SIGKILL)
    assert codes == [1, -signal.SIGKILL, 1], said
    for rank in (0, 2):
        assert f"char_lm.py: error: process {rank} of 3 has lost another" in said[rank][1]
    assert "go on from step 10 with:  python" in said[0][1] and kept(path.parent)[0] == 10

    codes, said = together(2, tmp_path, *resume, at=14, to=0, number=signal.SIGKILL)
    assert codes == [-signal.SIGKILL, 1] and "process 1 of 2 has lost another" in said[1][1], said
    assert "go on from step 14 with:  python" in said[1][1] and str(tmp_path / "1") in said[1][1]
    assert kept(path.parent)[0] == 12 and kept(tmp_path / "1")[0] == 14
    for folder in (path.parent, tmp_path / "1"):
        assert [file.name for file in folder.iterdir()] == [path.name]
    path = tmp_path / "1" / path.name

    run = char_lm.Run.load(path, CORPUS)
    assert char_lm.train(run, path, quiet()) is True
    assert_same_curve(*kept(path.parent)[1:])


def test_ctrl_c_in_one_process_stops_all_at_the_same_step(tmp_path):
    codes, said = together(2, tmp_path, *OPTIONS, at=7, to=1, number=signal.SIGINT)
    assert codes == [0, 130], said
    assert "stopped at step 8 of 20" in said[0][0] and kept(tmp_path / "0")[0] == 8


def test_processes_with_different_texts_are_refused(tmp_path):
    codes, said = together(2, tmp_path, *OPTIONS, texts=[TEXT, TEXT[:-1]])
    assert codes[1] == 2 and "process 1 cannot do as the first one does: it was trained on another" in said[1][1], said
    assert codes[0] == 1 and "process 0 of 2 has lost another" in said[0][1]


# Code of a process that differentiates the mean loss over the real steps of its share of padded sequences. It joins
# the gradients of all processes in two ways: by the examples' class `Ranks`, and by MLX's `average_gradients`. Its
# argument is the file into which it writes the gradients.
VARIED = f"""
import sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import mlx.core as mx, mlx.nn as nn
from mlx.utils import tree_flatten
from support.ranks import Ranks
from mlx_lstm.nn import LSTM
mx.set_default_device(mx.cpu)
mx.random.seed(0)
model, lengths = LSTM(3, 4), mx.array([9, 1, 2, 1, 3])
x, target = mx.random.normal((5, 9, 3)), mx.random.normal((5, 9, 4))
ranks = Ranks(True)
own, group = ranks.share(5), ranks.group

def loss(count):
    hidden, _ = model(x[own], lengths=lengths[own])
    real = mx.arange(9) < lengths[own][:, None]
    return mx.where(real[..., None], (hidden - target[own]) ** 2, 0).sum() / count

count = lengths[own].sum().item()
value, gradients = nn.value_and_grad(model, loss)(count)
(value, gradients), _ = ranks.join((value, gradients), (), 5, count)
total = mx.distributed.all_sum(mx.array(float(count)), group=group)
same = nn.average_gradients(nn.value_and_grad(model, loss)(total / group.size())[1], group)
arrays = dict(tree_flatten(dict(join=gradients, average=same, loss=value)))
mx.savez(sys.argv[1], **arrays)
"""


def test_two_processes_weigh_padded_rows_by_their_real_steps(tmp_path):
    """Two processes compute the mean loss over all real steps of padded sequences, with 10 real steps in one process
    and 6 in the other. The loss and its gradients equal those of a single process to 1e-6."""
    gradients = {}
    for size in (1, 2):
        hosts = tmp_path / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(size)]))
        processes = []
        for rank in range(size):
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            environment |= {"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)} if size > 1 else {}
            line = [sys.executable, "-c", VARIED, str(tmp_path / f"{size}_{rank}.npz")]
            processes.append(subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=environment))
        said = [process.communicate(timeout=300)[1] for process in processes]
        assert [process.returncode for process in processes] == [0] * size, said
        gradients[size] = [np.load(tmp_path / f"{size}_{rank}.npz") for rank in range(size)]
    (one,), two = gradients[1], gradients[2]
    assert {"join.Wx", "average.Wh", "loss"} <= set(one.files)
    for both in two:
        for name in one.files:
            np.testing.assert_allclose(both[name], one[name], rtol=0, atol=1e-6 * max(1, largest(one[name])))


def test_shares_are_all_rows_in_order():
    for size in range(1, 8):
        for rows in range(12):
            shares = []
            for rank in range(size):
                one = char_lm.Ranks()
                one.rank, one.size = rank, size
                shares += range(rows)[one.share(rows)]
            assert shares == list(range(rows))


def test_a_process_without_terms_changes_no_mean():
    """The mean of no terms is NaN. The other process has the mean 2 of 4 terms, and sends (4, 8)."""
    ranks = char_lm.Ranks()
    ranks.rank, ranks.size = 1, 2
    with patch.object(ranks, "sum", lambda message: message + mx.array([4.0, 8.0])):
        (mean,), _ = ranks.join((mx.array(np.nan),), (), 1, count=0)
    assert mean.item() == 2


def test_more_processes_than_rows_are_refused():
    ranks = char_lm.Ranks()
    ranks.size = 9
    with pytest.raises(ValueError, match="9 processes cannot share 8 rows: start at most 8, or choose a larger"):
        char_lm.Run(SETTINGS, CORPUS, ranks)
