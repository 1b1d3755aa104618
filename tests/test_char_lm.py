"""Tests of the character language model examples/char_lm.py in one process: bit-exact resume, complete checkpoints,
Ctrl-C, the trigram baseline and the command line. tests/test_distributed.py tests it in several processes."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from on_metal import ENGINES, on_metal

from mlx_lstm.oracle.closeness import largest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "char_lm.py"
TEXT = "".join(f"{n} times {n + 1} is {n * (n + 1)}; the quick brown fox jumps over it.\n" for n in range(80))
OPTIONS = {"batch": 4, "window": 8, "embedding": 8, "hidden": 16, "learning_rate": 0.02, "evaluations": 2, "seed": 3}


def load_example():
    spec = importlib.util.spec_from_file_location("char_lm", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["char_lm"] = module
    environment = dict(os.environ)
    with patch.object(sys, "path", [str(SCRIPT.parent), *sys.path]):  # the script imports a module from its own folder
        spec.loader.exec_module(module)
    os.environ.clear()  # undo the example's setting of NumPy's threads
    os.environ.update(environment)
    return module


char_lm = load_example()


@pytest.fixture
def corpus():
    return char_lm.Corpus.of(TEXT)


def new_run(corpus, **options):
    return char_lm.Run(char_lm.Settings(**OPTIONS | {"steps": 20} | options), corpus)


def everything(run) -> dict[str, bytes]:
    """Return {array name: bytes} of all arrays on which the next training step depends."""
    trees = {"model": run.model.parameters(), "optimizer": run.optimizer.state, "state": run.state, "key": run.key}
    return {name: np.array(array).tobytes() for name, array in tree_flatten(trees)}


def quiet():
    return char_lm.Console(file=io.StringIO())


# --- Resuming a run bit for bit --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"window": 200}, {"dtype": "bfloat16"}], ids=["within an epoch", "across epochs", "bfloat16"]
)
def test_resume_is_bit_exact(corpus, tmp_path, options):
    straight, first = new_run(corpus, **options), new_run(corpus, **options)
    for _ in range(20):
        straight.train_step()
    for _ in range(10):
        first.train_step()
    first.save(tmp_path / "c.safetensors")
    mx.random.seed(999)  # must change nothing: the run does not use MLX's global random generator
    second = char_lm.Run.load(tmp_path / "c.safetensors", corpus)
    assert second.settings == straight.settings
    for _ in range(10):
        second.train_step()
    assert everything(second) == everything(straight)
    assert (second.step, second.position, second.losses) == (20, straight.position, straight.losses)


def test_dropout_follows_the_key(corpus):
    """Different random keys give different dropout. Otherwise the test of exact resume could not notice a key that
    is missing in the checkpoint."""
    one, other = new_run(corpus, dropout=0.5), new_run(corpus, dropout=0.5)
    other.key = mx.random.key(12345)
    one.train_step(), other.train_step()
    assert everything(one) != everything(other)


def changed(part, **values):
    """Return a function that damages the metadata of a checkpoint file: it changes the named values in one part of
    the metadata. The value `...` (Ellipsis) removes a name."""

    def damage(path, whole, arrays, about):
        kept = json.loads(about[part]) | values
        kept = {name: value for name, value in kept.items() if value is not Ellipsis}
        mx.save_safetensors(str(path), arrays, about | {part: json.dumps(kept)})

    return damage


def other(**values):
    """Return a function that damages the arrays of a checkpoint file. Each keyword is an array name with _ in place
    of dots. Its value is a function that maps the array to the damaged array, or to None to remove the array."""

    def damage(path, whole, arrays, about):
        named = {name.replace("_", "."): value for name, value in values.items()}
        found = {name: named[name](array) if name in named else array for name, array in arrays.items()}
        mx.save_safetensors(str(path), {name: array for name, array in found.items() if array is not None}, about)

    return damage


DAMAGES = {
    "empty": (lambda path, *_: path.write_bytes(b""), "it is no whole checkpoint"),
    "truncated": (lambda path, whole, *_: path.write_bytes(whole[:-100]), "it is no whole checkpoint"),
    "only the header": (lambda path, whole, *_: path.write_bytes(whole[:100]), "it is no whole checkpoint"),
    "garbage": (lambda path, whole, *_: path.write_bytes(bytes(range(256)) * 20), "it is no whole checkpoint"),
    "a directory": (lambda path, *_: path.mkdir(), "it is no whole checkpoint"),
    "no metadata": (
        lambda path, _, arrays, __: mx.save_safetensors(str(path), arrays),
        "it is no whole checkpoint (KeyError: 'settings')",
    ),
    "no JSON": (
        lambda path, _, arrays, about: mx.save_safetensors(str(path), arrays, about | {"run": "{"}),
        "it is no whole checkpoint (JSONDecodeError: ",
    ),
    "an unknown setting": (changed("settings", width=3), "setting width is unknown"),
    "a setting's type": (changed("settings", hidden="16"), "setting hidden must be int but is str"),
    "a dtype of none": (changed("settings", dtype="float16"), "setting dtype must be one of float32, bfloat16 but is"),
    "a setting's range": (changed("settings", dropout=2.0), "setting dropout must lie in [0, 1) but is 2.0"),
    "a pipe": (lambda path, *_: os.mkfifo(path), "it is no whole checkpoint (ValueError: no regular file)"),
    "sizes that no memory holds": (
        changed("settings", hidden=10**9),
        "array model.lstm.Wh must be mlx.core.float32 [4",
    ),
    "an embedding of such": (changed("settings", embedding=10**12), "array model.embedding.weight must be mlx.core."),
    "rows of such": (changed("settings", batch=10**9), "array state.hidden must be mlx.core.float32 [1000000000, 16]"),
    "a window of such": (changed("settings", window=10**18), "the training text is too short for"),
    "no step": (changed("run", step=...), "number step is missing"),
    "a step before the first": (changed("run", step=-5), "number step must lie in 0..20 but is -5"),
    "a step after the last": (changed("run", step=21), "number step must lie in 0..20 but is 21"),
    "a position outside": (changed("run", position=-1), "number position must lie in 0.."),
    "a loss that is none": (changed("run", losses=[None]), "number losses must be 0 numbers, one for each step"),
    "losses of no number": (changed("run", step=1, losses=["x"]), "number losses must be 1 numbers, one for each step"),
    "a validation": (
        changed("run", validation=[[None, 1.0]]),
        "number validation must be pairs of a step and its bits",
    ),
    "another text": (
        changed("run", text="1 character"),
        "it was trained on another text (another Python?): 1 character",
    ),
    "a shape": (
        other(model_lstm_Wh=lambda Wh: Wh[1:]),
        "array model.lstm.Wh must be mlx.core.float32 [64, 16] but is mlx.core.float32 [63, 16]",
    ),
    "a dtype": (other(key=lambda key: key.astype(mx.float16)), "array key must be mlx.core.uint32 [2] but is mlx.core"),
    "an array less": (other(model_lstm_Wh=lambda Wh: None), "array model.lstm.Wh is missing"),
}


@pytest.mark.parametrize("damage, words", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_ends_in_a_line_that_says_what_to_do(corpus, tmp_path, monkeypatch, capsys, damage, words):
    monkeypatch.setattr(char_lm, "documentation", lambda: TEXT)
    path, good = tmp_path / "checkpoint.safetensors", tmp_path / "good.safetensors"
    new_run(corpus).save(good)
    damage(path, good.read_bytes(), *mx.load(str(good), return_metadata=True))
    assert char_lm.main(["--resume", f"--out={tmp_path}", "--prompt=1"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and f"cannot go on from {path}: {words}" in said.err
    assert said.err.endswith("; start again without --resume, or with another --out.\n")


def test_checkpoints_of_float32_are_those_from_before_there_was_a_choice(corpus, tmp_path):
    new_run(corpus).save(tmp_path / "c.safetensors")
    _, about = mx.load(str(tmp_path / "c.safetensors"), return_metadata=True)
    assert "dtype" not in json.loads(about["settings"])
    assert char_lm.Run.load(tmp_path / "c.safetensors", corpus).settings.dtype == "float32"


def test_the_state_is_carried_and_reset_with_the_epoch(corpus):
    run = new_run(corpus, window=200)
    columns = run.inputs.shape[1]
    run.train_step()
    assert run.position == 200 and mx.abs(run.state[0]).max().item() > 0
    while run.position + 200 <= columns:
        run.train_step()
    seen = []
    gradient = run.gradient
    run.gradient = lambda *inputs: seen.append(inputs[3]) or gradient(*inputs)
    run.train_step()
    assert run.position == 200 and not any(array.any().item() for array in seen[0])


# --- Checkpoints and Ctrl-C ------------------------------------------------------------------------------------------


def test_a_failed_write_leaves_the_old_checkpoint(corpus, tmp_path, monkeypatch):
    path, run = tmp_path / "c.safetensors", new_run(corpus)
    run.save(path)
    whole = path.read_bytes()

    def fail_halfway(file, arrays, metadata):
        Path(file).write_bytes(whole[:100])
        raise OSError("no space left on device")

    run.train_step()
    monkeypatch.setattr(mx, "save_safetensors", fail_halfway)
    with pytest.raises(OSError, match="no space"):
        run.save(path)
    assert path.read_bytes() == whole
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("saved", [0, 2])
def test_a_full_disk_ends_in_a_line(saved, tmp_path, monkeypatch, capsys):
    """On a full disk the command ends with a line that says which step was saved last. That checkpoint is complete."""
    monkeypatch.setattr(char_lm, "documentation", lambda: TEXT)
    save, written = mx.save_safetensors, []

    def until_full(file, arrays, metadata):
        written.append(file)
        if len(written) > saved / 2:
            Path(file).write_bytes(b"a part")
            raise RuntimeError("[write] Unable to write 52348 bytes to file.")
        save(file, arrays, metadata)

    monkeypatch.setattr(mx, "save_safetensors", until_full)
    options = ["--hidden=8", "--batch=2", "--window=8", "--steps=6", "--evaluations=3", "--prompt=1"]
    assert char_lm.main([*options, f"--out={tmp_path}"]) == 1
    said, last = capsys.readouterr().err, f"go on from step {saved} with:  python" if saved else "nothing was saved"
    assert said.count("\n") == 1 and f"error: [write] Unable to write 52348 bytes to file.; {last}" in said
    monkeypatch.undo()
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.safetensors"] * bool(saved)
    if saved:
        assert char_lm.Run.load(tmp_path / "checkpoint.safetensors", char_lm.Corpus.of(TEXT)).saved == saved


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_finishes_the_step_and_saves(corpus, tmp_path, number):
    run, path = new_run(corpus, steps=1000), tmp_path / "c.safetensors"
    step, handler = run.train_step, signal.getsignal(number)

    def interrupted_step():
        if run.step == 4:
            signal.raise_signal(number)
        return step()

    run.train_step = interrupted_step
    assert char_lm.train(run, path, quiet()) is False
    assert signal.getsignal(number) is handler
    assert run.step == 5 and char_lm.Run.load(path, corpus).step == 5
    assert everything(char_lm.Run.load(path, corpus)) == everything(run)


def test_a_second_ctrl_c_interrupts_at_once():
    with pytest.raises(KeyboardInterrupt), char_lm.ctrl_c() as pressed:
        signal.raise_signal(signal.SIGINT)
        assert pressed.is_set()
        signal.raise_signal(signal.SIGINT)


def test_seconds_stops_early(corpus, tmp_path):
    run = new_run(corpus, steps=1000)
    assert char_lm.train(run, tmp_path / "c.safetensors", quiet(), seconds=0) is True
    assert run.step == 1 and (tmp_path / "c.safetensors").exists()


# --- The model and its baseline --------------------------------------------------------------------------------------


def test_the_loss_falls(corpus, tmp_path):
    run = new_run(corpus, steps=40)
    before = run.evaluate()
    assert char_lm.train(run, tmp_path / "c.safetensors", quiet()) is True
    assert np.mean(run.losses[-5:]) < np.mean(run.losses[:5]) - 0.5
    assert run.validation[-1][0] == 40 and run.validation[-1][1] < before - 0.5


def test_validation_scores_every_character(corpus):
    run = new_run(corpus, dropout=0.0)
    zeros = [(name, mx.zeros_like(array)) for name, array in tree_flatten(run.model.parameters())]
    run.model.load_weights(zeros)
    length = len(corpus.codes) - corpus.split
    assert length % char_lm.VALIDATION_ROWS == 0 and 0 <= len(TEXT) // 10 - length < char_lm.VALIDATION_ROWS
    for window in (7, 256):
        bits = char_lm.validation_bits(run.model, corpus, window)
        assert bits == pytest.approx(np.log2(len(corpus.alphabet)), abs=1e-5)


def test_the_vocabulary_layer_and_its_gradient():
    x, weight, scale = mx.random.normal((6, 5)), mx.random.normal((5, 4)), mx.random.normal((6, 4))

    def gradients(multiply):
        return mx.grad(lambda *both: (multiply(*both) * scale).sum(), argnums=(0, 1))(x, weight)

    assert mx.allclose(char_lm.product(x, weight), x @ weight, atol=1e-5)
    for ours, theirs in zip(gradients(char_lm.product), gradients(mx.matmul), strict=True):
        assert mx.allclose(ours, theirs, atol=1e-5)


def test_sampling(corpus):
    model = new_run(corpus).model
    greedy, other_seed = (char_lm.sample(model, corpus, "1 times", 20, 0, seed) for seed in (1, 2))
    assert greedy == other_seed and greedy.startswith("1 times") and len(greedy) == 27
    drawn = [char_lm.sample(model, corpus, "1 times", 40, 1.5, seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(SystemExit, match="€"):
        char_lm.sample(model, corpus, "€", 1, 1.0, 0)


def test_trigram_probabilities(corpus):
    size = len(corpus.alphabet)
    probability = char_lm.trigram(corpus.codes, size)
    assert probability.shape == (size, size, size)
    assert probability.min() > 0 and np.allclose(probability.sum(-1), 1)
    q, u = corpus.encode("qu")
    i = corpus.encode("i")[0]
    assert probability[q, u, i] > 0.95  # in this text the letter after "qu" is always "i"
    assert np.log2(size) > char_lm.trigram_bits(corpus) > 0.2


def test_trigram_of_unseen_contexts_and_of_noise():
    noise = np.random.default_rng(0).integers(0, 4, 20000)
    corpus = char_lm.Corpus("abcd", noise, 16000)
    assert char_lm.trigram_bits(corpus) == pytest.approx(2, abs=0.01)
    probability = char_lm.trigram(np.array([0, 0, 1, 0, 0, 1, 0]), 3)
    assert np.allclose(probability.sum(-1), 1) and probability.min() > 0


# --- The command -----------------------------------------------------------------------------------------------------


TINY = ["--batch=8", "--window=16", "--hidden=8", "--embedding=4", "--length=20"]


def start(*options: str, out: Path) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1", "PYTHONUNBUFFERED": "1"}
    line = [sys.executable, str(SCRIPT), *options, "--out", str(out)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(line, **pipes, text=True, encoding="utf-8", env=environment)


def finish(process: subprocess.Popen, code: int) -> str:
    said, complaint = process.communicate(timeout=300)
    assert process.returncode == code, complaint
    return said


def contents(out: Path) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return (arrays as bytes by name, metadata) of a checkpoint. Files cannot be compared directly, because MLX
    chooses the order of their arrays."""
    arrays, about = mx.load(str(out / "checkpoint.safetensors"), return_metadata=True)
    return {name: np.array(array).tobytes() for name, array in arrays.items()}, about


def test_quantized(tmp_path, monkeypatch, capsys):
    """The option `--quantize` evaluates the trained weights with fewer bits. The checkpoint keeps the full weights.
    A hidden size that cannot be quantized is refused before training."""
    monkeypatch.setattr(char_lm, "documentation", lambda: TEXT)
    sizes = ["--hidden=32", "--embedding=4", "--batch=2", "--window=8", "--seed=1", "--length=5", "--prompt=1"]
    given = [*sizes, "--steps=2", f"--out={tmp_path}", "--quantize", "8", "2"]
    assert char_lm.main(given) == 0
    said = capsys.readouterr().out
    whole, eight, two = map(float, re.findall(r"validation: LSTM +(\S+) bits", said))
    assert abs(eight - whole) < 0.005 and f"{two:.3f} bits per character, its weights in 2 bits" in said
    assert "lstm.Wh_scales" not in "".join(contents(tmp_path)[0])
    assert char_lm.main([*sizes, "--steps=2", "--hidden=40", f"--out={tmp_path}", "--quantize", "8"]) == 2
    assert "the columns of Wh must be a multiple of group_size = 32 but got 40" in capsys.readouterr().err


@pytest.mark.not_on_a_mac("on a GPU MLX adds up the gradient of an embedding in any order")
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to another process")
def test_the_command_after_ctrl_c_and_resume_leaves_what_it_would_have_left(tmp_path):
    """The whole command runs, writes its three files, and after Ctrl-C and `--resume` has the same checkpoint as a run
    without a pause."""
    options, out = [*TINY, "--steps=100", "--evaluations=5"], tmp_path / "straight"
    with start(*options, out=tmp_path / "stopped") as process:
        while "step " not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        said = finish(process, 130)
    assert "stopped at step" in said and "--resume" in said
    assert (tmp_path / "stopped" / "loss.png").exists()
    finish(start("--resume", out=tmp_path / "stopped"), 0)
    said = finish(start(*options, out=out), 0)
    assert contents(tmp_path / "stopped") == contents(out)

    for part in ("trigram baseline 2.", "step    20", "step   100", "validation: LSTM", "validation: trigram 2."):
        assert part in said
    assert sorted(file.name for file in out.iterdir()) == ["checkpoint.safetensors", "loss.png", "sample.txt"]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "sample.txt").read_text(encoding="utf-8").startswith("The ")
    _, about = mx.load(str(out / "checkpoint.safetensors"), return_metadata=True)
    assert json.loads(about["settings"])["hidden"] == 8 and json.loads(about["run"])["step"] == 100


def test_ctrl_c_at_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(char_lm, "documentation", lambda: TEXT)
    out = tmp_path / "run"
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    step = char_lm.Run.train_step

    def interrupted_step(run):
        if run.step == 7:
            signal.raise_signal(signal.SIGINT)
        return step(run)

    monkeypatch.setattr(char_lm.Run, "train_step", interrupted_step)
    assert char_lm.main([*sizes, "--steps=20", f"--out={out}", "--prompt=1"]) == 130
    assert "step 8" in (said := capsys.readouterr().out) and "--resume" in said
    monkeypatch.setattr(char_lm.Run, "train_step", step)
    assert char_lm.main(["--resume", f"--out={out}", "--prompt=1", "--length=5"]) == 0
    resumed = char_lm.Run.load(out / "checkpoint.safetensors", corpus := char_lm.Corpus.of(TEXT))
    straight = new_run(corpus)
    char_lm.train(straight, tmp_path / "c.safetensors", quiet())
    assert everything(resumed) == everything(straight)
    assert resumed.validation == straight.validation


def test_options_that_cannot_work_are_refused(capsys):
    for option, part in (
        ("--batch=0", "--batch must lie in [1, inf) but is 0."),
        (f"--steps={10**20}", f"--steps must lie in [1, 2147483648) but is {10**20}."),
        ("--dropout=1.0", "--dropout must lie in [0, 1) but is 1.0."),
        ("--dropout=-0.1", "--dropout must lie in [0, 1)"),
        ("--temperature=-1", "--temperature must lie in [0, inf) but is -1.0."),
        ("--temperature=nan", "--temperature must lie in [0, inf)"),
        ("--learning-rate=-1", "--learning-rate must lie in [0, inf)"),
        ("--seed=-1", "--seed must lie in [0, 18446744073709551616) but is -1."),
        ("--prompt=", "--prompt must have"),
        ("--dtype=float16", "--dtype must be one of float32, bfloat16 but is float16."),
    ):
        with pytest.raises(SystemExit) as stopped:
            char_lm.arguments([option])
        assert stopped.value.code == 2 and part in capsys.readouterr().err


@pytest.mark.parametrize("engine, part", [("fused", "engine='fused' cannot run"), ("gpu", "must be one of fused,")])
def test_an_engine_that_cannot_run_ends_in_a_line(tmp_path, monkeypatch, capsys, engine, part):
    monkeypatch.setattr(char_lm, "documentation", lambda: TEXT)
    new = [f"--engine={engine}", "--hidden=8", "--batch=2", "--prompt=1", f"--out={tmp_path / 'run'}"]
    new_run(char_lm.Corpus.of(TEXT)).save(tmp_path / "kept" / "checkpoint.safetensors")
    for options in (new, ["--resume", f"--engine={engine}", "--prompt=1", f"--out={tmp_path / 'kept'}"]):
        assert char_lm.main(options) == 2
        said = capsys.readouterr()
        assert said.out == "" and part in said.err and said.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_ends_in_a_line(tmp_path, monkeypatch, capsys):
    """The command ends with a one-line error before the first training step if it cannot create the output folder."""
    monkeypatch.setattr(char_lm, "documentation", lambda: TEXT)
    (tmp_path / "file").touch()
    assert char_lm.main(["--hidden=8", "--batch=2", "--prompt=1", f"--out={tmp_path / 'file' / 'run'}"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "Not a directory" in said.err and said.err.count("\n") == 1


def test_resume_refuses_settings_and_wants_a_checkpoint(tmp_path, capsys):
    for options, part in ((["--hidden=9"], "takes hidden from the checkpoint"), ([], "found no")):
        with pytest.raises(SystemExit) as stopped:
            char_lm.arguments(["--resume", f"--out={tmp_path}", *options])
        assert stopped.value.code == 2 and part in capsys.readouterr().err


# --- Training in bfloat16 --------------------------------------------------------------------------------------------


def test_bfloat16_is_in_the_weights_and_activations_and_nowhere_else(corpus):
    run, seen = new_run(corpus, dtype="bfloat16"), []
    forward = run.model.forward

    def watched(*inputs):
        given = [array for _, array in tree_flatten((run.model.parameters(), inputs[1:])) if array is not None]
        seen.extend(array.dtype for array in given)
        found = forward(*inputs)
        seen.extend(array.dtype for _, array in tree_flatten(found))
        return found

    run.model.forward = watched
    run.train_step(), run.evaluate()
    assert set(seen) == {mx.bfloat16}
    kept = tree_flatten([run.model.parameters(), run.optimizer.state, run.state])
    assert {array.dtype for _, array in kept} == {mx.float32, mx.uint64}  # uint64: the optimizer's step counter


def test_the_loss_of_bfloat16_is_off_by_no_more_than_its_roundings(corpus):
    """The bfloat16 loss differs from the float64 loss with the same rounded weights by at most a derived bound. Four
    values are rounded to bfloat16: the LSTM's outputs, their products with the dropout mask, and the vocabulary
    layer's sums before and after the bias is added. If every logit changes by at most e, the loss changes by at most
    2e."""
    run = new_run(corpus, dtype="bfloat16", dropout=0.3)
    window, dropped = run.settings.window, dropout_of(run)
    codes, targets = run.inputs[:, :window], run.targets[:, :window]
    (loss, _), gradients = run.gradient(run.model, codes, targets, run.state, dropped)

    model, half = run.model, 2.0**-9
    model.dtype = mx.float32  # from here on the model does not round to bfloat16
    for dtype in (mx.bfloat16, mx.float64):
        model.set_dtype(dtype)
    state = tuple(array.astype(mx.float64) for array in run.state)
    dropped = dropped.astype(mx.bfloat16).astype(mx.float64)
    with patch.object(char_lm, "product", mx.matmul):
        exact, logits, outputs = (np.array(array) for array in with_outputs(model, codes, targets, state, dropped))
    sums = np.abs(outputs) @ np.abs(np.array(model.vocabulary.weight))
    # The error bound of the logits allows three roundings to bfloat16 (relative error `half`) for each term of a sum,
    # and one for the sum. The factor 1.01 covers what this formula leaves out: products of two rounding errors, and
    # rounding to float32.
    error = 1.01 * half * (3 * sums + np.abs(logits)).max()
    assert 0 < abs(loss.item() - exact) <= 2 * error
    assert all(mx.isfinite(array).all() and array.dtype == mx.float32 for _, array in tree_flatten(gradients))


def with_outputs(model, codes, targets, state, dropped):
    """Return (loss, logits, input of the vocabulary layer) of the language model for one window of text."""
    outputs = model.lstm(model.embedding(codes), *state)[0] * dropped
    logits = model.vocabulary(outputs.reshape(-1, outputs.shape[-1]))
    return char_lm.window_loss(model, codes, targets, state, dropped)[0], logits, outputs.reshape(-1, outputs.shape[-1])


def test_bfloat16_learns(corpus, tmp_path):
    run = new_run(corpus, steps=40, dtype="bfloat16")
    before = run.evaluate()
    assert char_lm.train(run, tmp_path / "c.safetensors", quiet()) is True
    assert run.validation[-1][1] < before - 0.5


# --- Through the Metal shaders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_a_training_step_on_metal_equals_that_on_the_cpu(engine, corpus):
    """One training step on a Metal engine agrees with float64 in loss, state and parameters. The step has dropout,
    cross entropy, gradient clipping and AdamW.

    The error of a gradient may be twice that of the CPU engine, plus rounding. This gives a largest and a smallest
    allowed gradient. AdamW's results for these two are the limits between which a parameter must lie.
    """
    options = {"batch": 3, "window": 6, "embedding": 5, "hidden": 9, "dropout": 0.3, "weight_decay": 0.1}
    run, cpu, exact = (new_run(corpus, engine=word, **options) for word in (engine, "numpy", "numpy"))
    start = {name: np.array(array, np.float64) for name, array in tree_flatten(run.model.parameters())}
    loss, state, gradients = exact_gradients(exact)
    same = gradients_of(cpu)
    with on_metal() as log:
        got_loss = run.train_step()
    assert log and all(launch.name.startswith((f"lstm_{engine}", "recurrent_input")) for launch in log)
    cpu_loss = cpu.train_step()

    eps = np.finfo(np.float32).eps
    assert abs(got_loss - loss) <= 2 * abs(cpu_loss - loss) + 4 * eps * loss
    for got, of_cpu, ref in zip(run.state, cpu.state, state, strict=True):
        bound = 2 * largest(np.array(of_cpu) - ref) + 4 * eps * largest(ref)
        assert largest(np.array(got) - ref) <= bound
    rate, decay = float(run.optimizer.learning_rate), options["weight_decay"]
    for name, array in tree_flatten(run.model.parameters()):
        error = 2 * largest(same[name] - gradients[name]) + 4 * eps * largest(gradients[name])
        low, high = (
            start[name] * (1 - rate * decay) - rate * g / (np.abs(g) + 1e-8)
            for g in (gradients[name] + error, gradients[name] - error)
        )
        # In its first step AdamW divides by 1 - 0.9 = 0.1 and by sqrt(1 - 0.999). 0.9 and 0.999 have rounding errors of
        # up to eps / 2, which are large relative to the differences 0.1 and 0.001.
        correction = eps / 2 * (1 / 0.1 + 0.5 / 0.001)
        floor = 8 * eps * (np.abs(start[name]) + rate) + correction * rate
        got = np.array(array)
        assert (low - floor <= got).all() and (got <= high + floor).all(), name


def exact_gradients(run):
    """Return (loss in bits, recurrent state, clipped gradients by name) of a run's next training step, computed in
    float64. The cross entropy and its gradient are computed here with NumPy."""
    settings, model = run.settings, run.model
    codes, targets = run.inputs[:, : settings.window], np.array(run.targets[:, : settings.window]).reshape(-1)
    model.set_dtype(mx.float64)
    dropped = dropout_of(run).astype(mx.float64)
    state = tuple(array.astype(mx.float64) for array in run.state)
    with patch.object(char_lm, "product", mx.matmul):  # the example's own `product` computes in float32
        logits, last = model(codes, state, dropped)
        logits = np.array(logits)
        shifted = np.exp(logits - logits.max(1, keepdims=True))
        share = shifted / shifted.sum(1, keepdims=True)
        rows = np.arange(len(targets))
        loss = -np.log(share[rows, targets]).mean()
        share[rows, targets] -= 1
        d = mx.array(share / len(targets), mx.float64)
        gradients = char_lm.nn.value_and_grad(model, lambda m: (m(codes, state, dropped)[0] * d).sum())(model)[1]
    return loss / np.log(2), [np.array(array) for array in last], clipped(gradients, settings.clip)


def gradients_of(run):
    """Return the clipped gradients, by parameter name, of a run's next training step. The run is not changed."""
    window = slice(0, run.settings.window)
    inputs = run.inputs[:, window], run.targets[:, window]
    return clipped(run.gradient(run.model, *inputs, run.state, dropout_of(run))[1], run.settings.clip)


def dropout_of(run):
    """Return the array of dropout factors for a run's next training step."""
    keep, (_, draw) = 1 - run.settings.dropout, mx.random.split(run.key)
    return mx.random.bernoulli(keep, (run.settings.batch, 1, run.settings.hidden), draw) / keep


def clipped(gradients, limit):
    """Return {name: gradient in float64}. If the norm of all gradients together exceeds `limit`, they are scaled so
    that the norm becomes `limit`."""
    named = {name: np.array(array).astype(np.float64) for name, array in tree_flatten(gradients)}
    norm = np.sqrt(sum((array**2).sum() for array in named.values()))
    return {name: array * min(1.0, limit / norm) for name, array in named.items()}
