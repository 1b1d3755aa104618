"""Tests of the package as it is shipped: the contents and metadata of the wheel, public names, and the modules that
an import loads."""

import importlib
import inspect
import os
import pydoc
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import mlx_lstm

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    from hatchling.builders.wheel import WheelBuilder

    return zipfile.ZipFile(next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("wheel")))))


def test_wheel_holds_modules_types_and_shaders(wheel):
    names = set(wheel.namelist())
    assert "mlx_lstm/py.typed" in names and "mlx_lstm/recurrence/_lstm.py" in names
    shaders = {
        f"mlx_lstm/metal/{path.relative_to(ROOT / 'metal')}" for path in (ROOT / "metal").rglob("*") if path.is_file()
    }
    assert shaders and shaders <= names
    assert not any(name.startswith(("tests/", "examples/")) for name in names)


def test_metadata(wheel):
    text = wheel.read(next(name for name in wheel.namelist() if name.endswith("METADATA"))).decode()
    assert f"Name: mlx-lstm\nVersion: {mlx_lstm.__version__}\n" in text
    for requirement in ("mlx>=0.32.4; sys_platform == 'darwin'", "numpy", "mlx[cpu]>=0.32.4; extra == 'cpu'"):
        assert f"Requires-Dist: {requirement}" in text


def test_import_needs_only_mlx_and_numpy():
    heavy = "torch tensorflow jax keras matplotlib rich h5py onnx"
    code = f"import sys, mlx_lstm; print([name for name in {heavy.split()!r} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout == "[]\n"


PUBLIC = [
    "bench",
    "check",
    "compare",
    "convert",
    "cudnn",
    "engines",
    "keras",
    "lab",
    "mpsgraph",
    "mpsgraph.layouts",
    "nn",
    "oracle",
]
PUBLIC += ["recurrence", "tf", "torch"]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_modules_say_what_is_public(name):
    module = importlib.import_module(f"mlx_lstm.{name}")
    assert module.__doc__ and len(set(module.__all__)) == len(module.__all__)
    for public in module.__all__:
        assert hasattr(module, public) and not public.startswith("_")


@pytest.mark.parametrize("name", ["mlx_lstm", "mlx_lstm.tf", "mlx_lstm.cudnn"])
def test_help_begins_with_the_ops(name):
    lines = pydoc.plain(pydoc.render_doc(importlib.import_module(name))).splitlines()
    assert "CLASSES" not in lines and lines.index("FUNCTIONS") < 50


def test_what_ops_return_can_be_imported():
    for op in ("lstm", "gru", "rnn"):
        assert getattr(mlx_lstm, f"{op}_gradients") is getattr(mlx_lstm.recurrence, f"{op}_gradients")
        assert getattr(mlx_lstm, f"{op.upper()}Output") is getattr(mlx_lstm.recurrence, f"{op.upper()}Output")
    for module in (mlx_lstm.tf, mlx_lstm.cudnn):
        for public in module.__all__:
            returned = inspect.signature(getattr(module, public)).return_annotation
            assert not issubclass(returned, tuple) or getattr(module, returned.__name__) is returned


def test_first_guesses_are_answered():
    for kind in ("LSTM", "GRU", "RNN"):
        with pytest.raises(AttributeError, match=rf"mlx_lstm.nn.{kind} is the layer .* mlx_lstm.{kind.lower()} is the"):
            getattr(mlx_lstm, kind)
    with pytest.raises(AttributeError, match="module 'mlx_lstm' has no attribute 'lstmm'"):
        mlx_lstm.lstmm  # noqa: B018
    assert not hasattr(mlx_lstm, "LSTM")
    done = subprocess.run([sys.executable, "-m", "mlx_lstm"], capture_output=True, text=True, cwd=ROOT, check=True)
    for command in ("bench", "check", "compare", "convert"):
        assert f"\n  {command} " in done.stdout
    done = subprocess.run(
        [sys.executable, "-m", "mlx_lstm", "convert", "--help"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0 and done.stdout.startswith("usage: python -m mlx_lstm.convert")
    done = subprocess.run([sys.executable, "-m", "mlx_lstm", "chekc"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stderr == "\nThere is no command 'chekc'.\n"
    description = pydoc.plain(pydoc.render_doc(mlx_lstm)).partition("DESCRIPTION\n")[2].splitlines()[:9]
    for name in ("lstm", "nn", "torch", "convert", "tf", "python -m mlx_lstm"):
        assert any(line.strip().startswith(name) for line in description), name


def test_dir_shows_what_is_public():
    assert dir(mlx_lstm.torch) == sorted(mlx_lstm.torch.__all__) and dir(mlx_lstm.keras) == sorted(
        mlx_lstm.keras.__all__
    )
    assert dir(mlx_lstm) == sorted([*mlx_lstm.__all__, "GRUOutput", "LSTMOutput", "Norm", "Quantized", "RNNOutput"])
    assert {"lstm", "gru", "rnn", "nn", "torch", "keras", "tf", "cudnn", "mpsgraph", "convert"} <= set(dir(mlx_lstm))
    code = "from mlx_lstm import *; from mlx_lstm import nn as layers; assert layers is nn and lstm and gru and rnn"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_sources_are_ascii_where_metal_needs_it():
    for path in (ROOT / "metal").rglob("*"):
        assert not path.is_file() or path.read_bytes().isascii(), path


def test_every_page_has_the_version():
    assert f"\nversion: {mlx_lstm.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {mlx_lstm.__version__} - " in (ROOT / "CHANGELOG.md").read_text()


def test_commands_end_quietly_where_nobody_reads_on():
    """A command ends without a message when the reader of its output closes the pipe, as `head` does. Every command
    uses `machine.run_command` for this purpose."""
    code = "from mlx_lstm.ground.machine import run_command; run_command(lambda: print('a line\\n' * 10**5))"
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout.readline() == b"a line\n"
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 141
    # Without an output, as after `>&-`, the exit code still tells the result.
    code = "from mlx_lstm.ground.machine import run_command; run_command(lambda: print('a line') or 3)"
    words, close = [sys.executable, "-c", code], lambda: os.close(1)
    closed = subprocess.run(words, cwd=ROOT, stderr=subprocess.PIPE, preexec_fn=close)
    assert closed.returncode == 3 and closed.stderr == b""
    if Path("/dev/full").exists():  # on Linux: a file on a full disk
        with open("/dev/full", "w") as full:
            failed = subprocess.run(words, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
        assert failed.returncode == 1
        assert failed.stderr == "the output cannot be written: [Errno 28] No space left on device\n"
    for command in ("bench", "check", "compare", "convert"):
        text = (ROOT / f"mlx_lstm/{command}/__main__.py").read_text()
        assert text.endswith('if __name__ == "__main__":\n    run_command(main)\n')


def test_the_module_of_children_sends_users_to_the_commands(monkeypatch, capsys):
    from mlx_lstm.lab.__main__ import main

    for words in ([], ["--help"], ["engines"], ["other", "default"]):
        monkeypatch.setattr(sys, "argv", ["lab", *words])
        assert main() == 2
        assert capsys.readouterr().err == "mlx_lstm.lab serves the commands of mlx-lstm: run mlx-lstm --help\n"
