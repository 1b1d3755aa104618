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
    torch.manual_seed(1)
    (layer, ours), (again, _) = example.pair(*sizes), example.pair(*sizes)
    example.from_torch(layer, ours)
    example.to_torch(ours, again)
    for (name, one), two in zip(layer.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
        assert np.array_equal(np.array(ours[name]), one.detach().numpy())
    rng = np.random.default_rng(0)
    x, lengths = rng.standard_normal((6, 3, layer.input_size), np.float32), np.array([2, 6, 1])
    # How far float32 is from float64 is torch's own error; ours may be twice that, and the last bits of the largest.
    exact = example.run_torch(layer.double(), x.astype(np.float64), lengths)
    rounded = example.run_torch(again, x, lengths)
    got = example.run_mlx(ours, x, lengths)
    assert exact.keys() == got.keys() and len(exact) == 3 + len(list(layer.parameters()))
    for name, value in exact.items():
        assert got[name].dtype == np.float32, name
        assert_close(name, got[name], rounded[name], value)


def test_command(example, tmp_path, capsys):
    path = str(tmp_path / "stack.safetensors")
    command = ["--hidden", "6", "--input", "5", "--projection", "3"]
    assert example.main([*command, "--save", path]) == 0
    assert example.main([*command, "--seed", "1", "--load", path]) == 0  # the seed's weights do not count
    first, second = capsys.readouterr().out.split("LSTM(")[1:]
    assert first == second and "back in torch: the same bits" in first
    assert example.main([*command, "--seed", "1"]) == 0
    assert capsys.readouterr().out != f"LSTM({first}"


def test_what_cannot_work_ends_in_a_line(example, tmp_path, capsys):
    other = str(tmp_path / "other.safetensors")
    mx.save_safetensors(other, {"weight": mx.zeros(3)})
    for options, part in (
        (["--mode=gru", "--projection=4"], "--projection must be 0 with --mode gru but is 4."),
        (["--projection=32"], "proj_size must be less than hidden_size = 32 but got 32."),
        (["--hidden=0"], "hidden_size must be an integer of at least 1 but got 0."),
        (["--load=nofile"], "--load must name a file of these sizes but nofile is none"),
        ([f"--load={tmp_path}/nofile.safetensors"], "nofile.safetensors is none"),
        ([f"--load={other}"], "other.safetensors is none: Received 1 parameters not in model"),
    ):
        with pytest.raises(SystemExit) as stopped:
            example.main(options)
        assert stopped.value.code == 2 and part in capsys.readouterr().err.splitlines()[-1]
