"""examples/from_torch.py: weights there and back bit for bit, outputs and gradients equal."""

import importlib.util
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_lstm.oracle.closeness import assert_close

torch = pytest.importorskip("torch")

SCRIPT = Path(__file__).parents[1] / "examples" / "from_torch.py"
STACKS = [("lstm", 3, 5, 2, 2, 2), ("lstm", 3, 4, 1, 1, 0), ("gru", 4, 3, 3, 1, 0), ("rnn_relu", 2, 3, 2, 2, 0)]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("from_torch", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("sizes", STACKS, ids=str)
def test_there_and_back(example, sizes):
    stack = example.Stack(*sizes)
    torch.manual_seed(1)
    layer, again = stack.in_torch(), stack.in_torch()
    params = example.from_torch(layer)
    example.to_torch(params, again)
    for one, two in zip(layer.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    assert mx.array_equal(example.from_torch(again), params)
    rng = np.random.default_rng(0)
    x, lengths = rng.standard_normal((6, 3, stack.input), np.float32), np.array([2, 6, 1])
    # How far float32 is from float64 is torch's own error; ours may be twice that, and the last bits of the largest.
    exact = example.run_torch(stack, layer.double(), x.astype(np.float64), lengths)
    rounded = example.run_torch(stack, again, x, lengths)
    got = example.run_mlx(stack, params, x, lengths)
    for name, value in exact.items():
        assert got[name].dtype == np.float32, name
        assert_close(name, got[name], rounded[name], value)


def test_command(example, tmp_path, capsys):
    path = str(tmp_path / "stack.safetensors")
    command = ["--hidden", "6", "--input", "5", "--projection", "3", "--save", path]
    assert example.main(command) == 0 and example.main(["--load", path]) == 0
    first, second = capsys.readouterr().out.split("LSTM ")[1:]
    assert first == second and "back in torch: the same bits" in first


def test_what_cannot_work_ends_in_a_line(example, tmp_path, capsys):
    other = str(tmp_path / "other.safetensors")
    mx.save_safetensors(other, {"weight": mx.zeros(3)})
    for options, part in (
        (["--mode=gru", "--projection=4"], "--projection must be 0 with --mode gru but is 4."),
        (["--projection=32"], "--projection must lie in [0, 32)"),
        (["--hidden=0"], "--hidden must be at least 1 but is 0."),
        (["--load=nofile"], "--load must name a file of --save but nofile is none"),
        ([f"--load={tmp_path}/nofile.safetensors"], "nofile.safetensors is none"),
        ([f"--load={other}"], "other.safetensors is none: 'mode'"),
    ):
        with pytest.raises(SystemExit) as stopped:
            example.main(options)
        assert stopped.value.code == 2 and part in capsys.readouterr().err.splitlines()[-1]
