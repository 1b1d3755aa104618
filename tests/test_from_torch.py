"""Tests of `examples/from_torch.py`: weights convert from torch and back bit for bit, and outputs and gradients
agree with torch."""

import importlib.util
import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from assertions import assert_close

torch = pytest.importorskip("torch")

SCRIPT = Path(__file__).parents[1] / "examples" / "from_torch.py"
LAYERS = {
    "projected": lambda: torch.nn.LSTM(3, 5, 2, bidirectional=True, proj_size=2),
    "one layer": lambda: torch.nn.LSTM(3, 4, bias=False),
    "gru": lambda: torch.nn.GRU(4, 3, 3, dropout=0.5).eval(),
    "relu": lambda: torch.nn.RNN(2, 3, 2, bidirectional=True, nonlinearity="relu"),
}


@pytest.fixture(scope="module")
def example():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)  # examples import `support` from this folder
        yield load()


def load():
    spec = importlib.util.spec_from_file_location("from_torch", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", LAYERS)
def test_there_and_back(example, name):
    torch.manual_seed(1)
    layer = LAYERS[name]()
    ours = example.from_torch(layer)
    ours.train(layer.training)
    again = example.to_torch(ours).train(layer.training)
    assert repr(again) == repr(layer)
    for (name, one), two in zip(layer.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
        assert np.array_equal(np.array(ours[name]), one.detach().numpy())
    rng = np.random.default_rng(0)
    x, lengths = rng.standard_normal((6, 3, layer.input_size), np.float32), np.array([2, 6, 1])
    # torch's own rounding error is the difference of its float32 and float64 results. Our error may be twice as large,
    # plus a few roundings.
    exact = example.run_torch(layer.double(), x.astype(np.float64), lengths)
    rounded = example.run_torch(again, x, lengths)
    got = example.run_mlx(ours, x, lengths)
    assert exact.keys() == got.keys() and len(exact) == 3 + len(list(layer.parameters()))
    for name, value in exact.items():
        assert got[name].dtype == np.float32, name
        assert_close(name, got[name], rounded[name], value)


def test_command(example, tmp_path, capsys):
    path = str(tmp_path / "stack.safetensors")
    assert example.main(["--mode", "gru", "--layers", "3", "--save", path]) == 0
    said = capsys.readouterr().out
    assert said.startswith("GRU(24, 32, num_layers=3, bidirectional=True)\n") and "back in torch: the same bits" in said
    assert {float(number) < 1e-4 for number in re.findall(r"difference (\S+)", said)} == {True}
    assert mx.load(path)["weight_hh_l2_reverse"].shape == (96, 32)
    (tmp_path / "folder.safetensors").mkdir()
    for words in (
        ["--layers", "0"],
        ["--save", ""],
        ["--save", str(tmp_path / "a.txt")],
        ["--save", str(tmp_path / "folder.safetensors")],
        ["--save", str(tmp_path / "no" / "a.safetensors")],
    ):
        with pytest.raises(SystemExit):
            example.main(words)
        assert re.search(rf"error: (argument )?{words[0]}", capsys.readouterr().err)
