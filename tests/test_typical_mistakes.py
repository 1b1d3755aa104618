"""Tests of the texts that newcomers see: what people type who come from PyTorch, Keras or MLX, and what to use
instead."""

import copy as copying
import inspect
import io
import pickle
import subprocess
import sys
import time
import warnings

import mlx.core as mx
import numpy as np  # noqa: F401 (the mistakes are evaluated)
import pytest
import torch as real
from mlx.utils import tree_flatten

import mlx_lstm
import mlx_lstm.__main__ as command
from mlx_lstm import cells, convert, cudnn, engines, keras, lstm, mpsgraph, nn, pointwise, tf, torch  # noqa: F401
from mlx_lstm.ground import checks
from mlx_lstm.lab import progress as progress_module
from mlx_lstm.lab.progress import Progress

x = mx.ones((2, 5, 3))  # [batch, steps, features]
state = mx.zeros((2, 4))
weights = mx.ones((12, 3)), mx.ones((12, 4)), mx.zeros(12)
layer_of_torch = real.nn.LSTM(3, 4)
packed = real.nn.utils.rnn.pack_padded_sequence(real.ones(5, 2, 3), [5, 3])
state_dict = {"emb.weight": mx.ones((9, 3))}
state_dict |= {f"enc.{name}": mx.array(value.detach().numpy()) for name, value in layer_of_torch.named_parameters()}
two_layers = state_dict | {name.replace("enc.", "dec."): value for name, value in state_dict.items()}

eights = mlx_lstm.Quantized(*mx.quantize(mx.ones((16, 64)), 32, 8), group_size=32, bits=4)  # they have 8 bits


def cell(a, states):
    i, f, o = a
    _, c = states
    c = mx.sigmoid(f) * c + i
    return mx.sigmoid(o) * c, c


class Sequential:
    """Stands for a model of Keras."""

    layers = ()


def wrong_Wh():
    layer = nn.LSTM(3, 4)
    layer.Wh = mx.ones((12, 4))
    return layer(x)


MISTAKES = {
    # a constructor with the words of another framework
    "nn.LSTM(3, units=4)": "units is no option of this layer: it is called hidden_size here, but got units=4.",
    "nn.LSTM(input_dims=3, hidden_size=4)": "input_dims is no option of this layer: it is called input_size here",
    "nn.LSTM(3, 4, 2)": r"bias must be True or False \(nn.stack runs several layers\) but got 2",
    "nn.LSTM(3, 4, num_layers=2)": "mlx_lstm.torch.LSTM has it, and mlx_lstm.nn.stack runs several layers",
    "nn.GRU(3, 4, batch_first=True)": "batch_first is no option of this layer: mlx_lstm.torch.GRU has it",
    "nn.LSTM(3, 4, device='mps')": r"\[nn.LSTM\] device is no option .* mx.set_default_device",
    "nn.LSTM(3, 4, dtype=mx.float16)": r"dtype is no option of this layer: layer.set_dtype\(mx.float16\)",
    "nn.LSTM(3, 4, return_sequences=True)": "return_sequences is no option of this layer: a call returns all steps",
    "nn.LSTM(3, 4, activation='relu')": "activation is no option of this layer: mlx_lstm.lstm and gru",
    "nn.QuantizedLSTM(64, 64, dropout=0.5)": r"\[nn.QuantizedLSTM\] dropout is no option",
    "nn.RNN(3, 4, nonlinearity='relu6')": "nonlinearity must be a function .* but got 'relu6'",
    "torch.LSTM(3, units=4)": r"\[torch.LSTM\] units is no option of this layer: it is called hidden_size here",
    "torch.LSTM(3, 4, device='mps')": "device is no option of this layer",
    "torch.GRUCell(3, 4, dtype=mx.float16)": "dtype is no option of this layer",
    # a call with the words of another framework
    "nn.LSTM(3, 4)(x, mask=state)": "mask is no argument of a call: lengths= takes the number of steps",
    "nn.LSTM(3, 4)(x, h0=state)": "h0 is no argument of a call: the first state is called hidden here, and",
    "nn.GRU(3, 4)(x, initial_state=state)": "the first state is called hidden here, but got initial_state=array",
    "torch.LSTM(3, 4)(x, mask=state)": r"\[torch.LSTM\] mask is no argument of a call: lengths=",
    "torch.GRU(3, 4)(x, h_0=state)": "h_0 is no argument of a call: the first states are called hx here",
    "nn.LSTM(3, 4)(x, hx=state)": "the first state is called hidden here, and that of c cell, but got hx=array",
    "torch.GRU(3, 4)(x, hidden=state)": "the first states are called hx here, but got hidden=array",
    "torch.LSTM(3, 4)(x, cell=state)": "the first states are called hx here, but got cell=array",
    "nn.LSTM(3, 4)(x, (state, state))": "pass hidden and cell, not a tuple",
    # arrays of a wrong shape or kind
    "nn.LSTM(7, 4)(x)": r"\[nn.LSTM\] x must have shape \[..., L, D = 7\] .* but got shape \[2, 5, 3\]",
    "nn.LSTM(3, 4)(x, mx.zeros((2, 9)))": r"hidden must have shape \[2, 4\]",
    "nn.LSTM(3, 4)(x, mx.zeros((1, 2, 4)))": "nn.stack takes the states of several layers",
    "nn.LSTM(3, 4)(np.ones((2, 5, 3)))": r"make one by mx.array\(...\), but got ndarray",
    "nn.LSTM(3, 4)(x, lengths=[5, 6])": r"\[nn.LSTM\] lengths must lie in 0..5 but got lengths\[1\] = 6",
    "nn.LSTM(3, 4)(x, lengths=[5])": r"\[nn.LSTM\] lengths must have shape \[2\]",
    "wrong_Wh()": r"\[nn.LSTM\] Wh must have shape .* but got shape \[12, 4\]",
    "nn.Pointwise(cell, 3, 4, gates=2, states=2)(x)": "gates, states, params and inputs must be as many .* got gates=2",
    "torch.LSTM(3, 4)(x, mx.zeros((1, 5, 4)))": r"hx must be a tuple \(h_0, c_0\)",
    "torch.LSTM(3, 4, bidirectional=True)(x, (mx.zeros((1, 5, 4)),) * 2)": r"h_0 must have shape \[2, 5, 4\]",
    "lstm(x, mx.ones((16, 3)), mx.ones((20, 5)))": r"Wx .* as Wh has shape \[20, 5\] .* but got shape \[16, 3\]",
    "lstm(x, mx.ones((3, 16)), mx.ones((16, 4)))": r"Wx must have shape \[16, 3\], as Wh has shape \[16, 4\]",
    "lstm(x, mx.ones((16, 3)), mx.ones((16, 4)), engine='gpu')": "engine must be one of fused, stepwise, numpy, ops",
    "lstm(x, mx.ones((16, 3)), mx.ones((16, 4)), mx.ones(16), mx.ones(16))": r"h0 .* \(b is one bias, such as the sum",
    "lstm(x, mx.ones((16, 3)), mx.ones((16, 4)), bidirectional=True)": r"Wh .*, H\] \(join_directions joins the arrays",
    "lstm(mx.ones((5, 2, 64)), eights, mx.ones((16, 4)))": "scales .*, as its rows are 128 weights of 4 bits in groups",
    "nn.LSTM(3, 4).stepper()(mx.ones((1, 3)))": r"must have shape \[3\] \(stepper\(batch=1\) takes \[1, 3\]\) but",
    "nn.LSTM(3, 4).stepper(1)(mx.ones(3))": r"must have shape \[1, 3\] \(stepper\(batch=\(\)\) takes \[3\]\) but got",
    "nn.LSTM(3, 4).stepper(2)(x)": r"x must have shape \[2, 3\] but got shape \[2, 5, 3\]",
    "nn.Pointwise(cells.augru, 3, 4, gates=3, apart=True).stepper(2)": r"\(layer.stepper\(batch, inputs=1\) passes one",
    "nn.quantize(nn.LSTM(64, 64))": r"that has layers \(of one layer, QuantizedLSTM.from_layer makes another\) but got",
    # weights
    "convert.from_mlx(nn.QuantizedLSTM.from_layer(nn.LSTM(64, 64)))": r": layer.dequantize\(\) returns one",
    "convert.from_keras([Sequential()])": "Bidirectional of Keras: pass the layers one by one, but got list",
    "convert.from_torch(state_dict)": "layers found: 'enc.'; pass prefix=",
    "convert.from_torch(state_dict, prefix='encoder.')": "layers found: 'enc.'; pass prefix=, but got 'encoder.'",
    "convert.from_torch(two_layers)": "layers found: 'enc.', 'dec.'; pass prefix=",
    "convert.from_mlx(nn.LSTM(3, 4, layer_norm=True))": r"\(no format holds layer normalisation\)",
    "convert.from_torch({})": "weight_ih_l0 must be there",
    "convert.from_torch('model.pt')": r"a layer or a dict of arrays \(of a file: mx.load\(file\), or convert.read",
    "convert.from_keras(Sequential())": "convert.read takes a file with all layers, but got Sequential",
    "keras.lstm_from_keras(Sequential())": r"as in lstm_from_keras\(\*layer.get_weights\(\)\), but got Sequential",
    "convert.write('a.npz', nn.LSTM(3, 4))": r"a dict of Weights by name: {name: from_torch\(layer\)}, but got LSTM",
    "convert.write('a.pt', {})": r"must end in .*, .mlpackage: safetensors.torch.load_file reads a .safetensors file",
    "convert.write('a.mlmodel', {})": "a Core ML package ends in .mlpackage",
    "nn.GRU(3, 4, norm=True)": "norm is no option of this layer: it is called layer_norm here, but got norm=True",
    "torch.LSTM(3, 4, layer_norm=True)": "mlx_lstm.nn.LSTM, GRU and RNN have it, and mlx_lstm.nn.stack runs several",
    "lstm(x, mx.ones((16, 3)), mx.ones((16, 4)), norm=True)": r"norm must be a mlx_lstm.Norm, such as Norm\(\) or",
    "torch.GRU(3, 4, proj_size=2)": "proj_size is no option of this layer: only the LSTM has it, as in PyTorch",
    "pointwise(cell, x, *weights, [state] * 3)": "must be as many as the cell takes, .* but got gates=3, states=3",
    "pointwise(lambda x, h: x + h, x, *weights, [state])": r"the cell must return a tuple of 1 states",
    "pointwise(lambda x, h: mx.tanh(x), x, *weights, [state])": r"cell\(a, state, \*inputs, \*params\), .* gates=3",
}

ATTRIBUTES = {
    "keras.LSTM": "mlx_lstm.keras converts weights and has no layers such as LSTM: use mlx_lstm.torch.LSTM and",
    "keras.Bidirectional": r"use mlx_lstm.torch.LSTM\(..., bidirectional=True\)",
    "nn.Bidirectional": r"mlx_lstm.nn.stack\(layers, x, reverse=others\)",
    "torch.pad_sequence": r"mlx_lstm.torch has no pad_sequence: pad each array by mx.pad, join them by mx.stack",
    "torch.unpad_sequence": r"output\[n, : lengths\[n\]\] of a batch-first output is sequence n",
    "tf.BlockLSTM": "mlx_lstm.tf has no BlockLSTM: it is called block_lstm here",
    "cudnn.CudnnRNNV3": "mlx_lstm.cudnn has no CudnnRNNV3: it is called cudnn_rnn_v3 here",
}
METHODS = {
    "to": "mx.set_default_device",
    "cuda": "mx.set_default_device",
    "half": r"layer.set_dtype\(mx.float16\)",
    "float": r"layer.set_dtype\(mx.float32\)",
    "reset_parameters": "a new layer draws new parameters",
    "backward": "nn.value_and_grad",
    "load_state_dict": "layer.load_weights",
    "state_dict": r"layer.parameters\(\)",
    "flatten_parameters": "leave the call out",
    "named_parameters": "mlx.utils.tree_flatten",
    "set_weights": "layer.load_weights",
}


@pytest.mark.parametrize("code", MISTAKES)
def test_a_mistake_is_answered_with_what_to_use(code):
    with pytest.raises(ValueError, match=MISTAKES[code]):
        eval(code)


@pytest.mark.parametrize("code", ATTRIBUTES)
def test_a_name_that_a_module_does_not_have_is_answered_with_ours(code):
    with pytest.raises(AttributeError, match=ATTRIBUTES[code]):
        eval(code)
    with pytest.raises(AttributeError, match="has no attribute 'colour'"):
        eval(f"{code.split('.')[0]}.colour")


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("layer", [nn.LSTM(3, 4), torch.GRU(3, 4)], ids=["nn", "torch"])
def test_methods_of_other_frameworks(layer, name):
    with pytest.raises(AttributeError, match=METHODS[name]):
        getattr(layer, name)
    assert not hasattr(layer, name)


def test_arguments_of_calls_of_other_frameworks():
    for word in ("sequence_lengths", "seq_lengths", "seq_lens", "sequence_length"):
        with pytest.raises(ValueError, match=f"{word} .*: it is called lengths here"):
            nn.LSTM(3, 4)(x, **{word: [5, 3]})
    for word in ("initial_state", "state", "states", "h0", "h_0", "c0", "c_0", "carry"):
        for layer, ours in ((nn.LSTM(3, 4), "called hidden here"), (torch.LSTM(3, 4), "hx")):
            with pytest.raises(ValueError, match=f"{word} .*{ours}"):
                layer(x, **{word: state})


def test_unknown_names_keep_the_errors_of_python():
    with pytest.raises(TypeError, match=r"^LSTM\.__init__\(\) got an unexpected keyword argument 'colour'"):
        nn.LSTM(3, 4, colour="red")
    with pytest.raises(TypeError, match=r"^GRU\.__call__\(\) got an unexpected keyword argument 'colour'"):
        torch.GRU(3, 4)(x, colour="red")
    with pytest.raises(AttributeError, match="has no attribute 'colour'"):
        nn.LSTM(3, 4).colour  # noqa: B018


def test_a_stepper_cannot_be_copied():
    for copy in (copying.copy, copying.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"\[nn.LSTM.stepper\] a stepper cannot be copied: make another by layer."):
            copy(nn.LSTM(3, 4).stepper())


@pytest.mark.parametrize("ending", ["safetensors", "npz"])
@pytest.mark.parametrize("prefix", ["", "model.rnn."])
def test_a_file_with_more_than_an_lstm_is_not_read_as_an_lstm(tmp_path, prefix, ending):
    """A file has Wx and Wh, and in addition arrays of layer normalisation or of a cell that the user wrote. Reading it
    as a plain LSTM would lose these arrays, so it is refused."""
    norms = [mlx_lstm.Norm("sum"), mlx_lstm.Norm(None, c="state"), mlx_lstm.Norm(), mlx_lstm.Norm("recurrent")]
    layers = [(nn.LSTM(3, 4, layer_norm=norm), "layer normalisation") for norm in norms]
    layers += [(nn.GRU(3, 4, layer_norm=True), "layer normalisation"), (nn.RNN(3, 4, layer_norm=True), "layer norm")]
    layers += [(nn.Pointwise(cells.peephole_lstm, 3, 4, gates=4, states=2, params=3), "the cell of a layer Pointwise")]
    for layer, text in layers:
        path = tmp_path / f"a.{ending}"
        arrays = {prefix + name: array for name, array in tree_flatten(layer.parameters())}
        if ending == "npz":
            mx.savez(str(path), **arrays)
        else:
            mx.save_safetensors(str(path), arrays)
        with pytest.raises(ValueError, match=f"{prefix}(norm_|params).* must not be there: no format holds {text}"):
            convert.read(path)


NORMAL, TURNED = (
    convert.from_torch(torch.LSTM(3, 4)),
    convert.from_ops("lstm", [{"Wx": weights[0], "Wh": weights[1][:, :3]}]),
)


@pytest.mark.parametrize("ending", ["safetensors", "onnx", "keras", "mlpackage"])
def test_a_layer_that_a_format_cannot_hold_is_named(tmp_path, ending):
    layers = {"encoder": NORMAL, "decoder": TURNED._replace(cell=TURNED.cell._replace(cell_clip=2.0))}
    with pytest.raises(ValueError, match=r"\. The layer is decoder\.$"):
        convert.write(tmp_path / f"a.{ending}", layers)
    with pytest.raises(ValueError, match="but got") as error:  # Keras gives a layer without a name its own name
        convert.write(tmp_path / f"a.{ending}", {"": layers["decoder"]})
    assert ending == "keras" or "The layer is" not in str(error.value)


def test_a_subclass_has_its_own_options():
    """A subclass of a layer may have options and parameters with the names of another framework."""

    class Deep(nn.LSTM):
        def __init__(self, units, num_layers):
            super().__init__(3, units)
            self.to = num_layers

    assert Deep(4, num_layers=2).to == 2


def test_dropout_in_one_layer_warns():
    checks.forget_warnings()
    with pytest.warns(UserWarning, match=r"\[torch.LSTM\] dropout=0.5 has no effect on one layer"):
        torch.LSTM(3, 4, dropout=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.LSTM(3, 4, num_layers=2, dropout=0.5)


LAYERS = [nn.LSTM, nn.GRU, nn.RNN, nn.QuantizedLSTM, nn.QuantizedGRU, nn.QuantizedRNN, torch.LSTM, torch.GRU, torch.RNN]
LAYERS += [torch.LSTMCell, torch.QuantizedLSTM, torch.QuantizedGRU, torch.QuantizedRNN]


@pytest.mark.parametrize("layer", LAYERS)
def test_signatures_show_the_arguments(layer):
    """help() and the site show every argument by its name, and no `*_`, `*sizes` or `**options`."""
    arguments = inspect.signature(layer).parameters
    assert list(arguments)[:2] == ["input_size", "hidden_size"]
    assert not any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in arguments.values())
    assert ("bits" in arguments) == ("Quantized" in layer.__name__)
    assert next(iter(inspect.signature(layer(64, 64)).parameters)) in ("x", "input")


def test_no_public_name_has_a_hidden_argument():
    """The pages of the site show the signatures of these names."""
    modules = (cells, convert, engines, keras, mlx_lstm, nn, torch, tf, cudnn, mpsgraph)
    for module in modules:
        for name in module.__all__:
            one = getattr(module, name)
            calls = [one, one.__call__] if inspect.isclass(one) and "__call__" in vars(one) else [one]
            for call in calls if callable(one) else ():
                arguments = inspect.signature(call).parameters
                assert not any(argument.startswith("_") for argument in arguments), f"{module.__name__}.{name}"


def test_a_subclass_of_a_quantized_layer_shows_its_own_arguments():
    class Small(nn.QuantizedLSTM):
        def __init__(self, units):
            super().__init__(64, units)

    assert list(inspect.signature(Small).parameters) == ["units"]


def test_repr_shows_the_engine_and_checkpoints():
    assert repr(nn.LSTM(3, 4, engine="ops")) == "LSTM(input_dims=3, hidden_size=4, bias=True, engine='ops')"
    assert repr(torch.GRU(3, 4, checkpoint_every=8)) == "GRU(3, 4, checkpoint_every=8)"
    layer = nn.Pointwise(cell, 3, 4, gates=3, states=2, engine="numpy", checkpoint_every="auto")
    assert repr(layer).endswith("bias=True, checkpoint_every='auto', engine='numpy')")


def test_dir_lists_public_names_only():
    assert dir(cells) == sorted(cells.__all__) and dir(keras) == sorted(keras.__all__)


def test_version_and_unknown_options(capsys):
    assert command.main(["--version"]) == 0
    assert capsys.readouterr().out == "mlx-lstm 0.1.0\n"
    assert command.main(["--foo"]) == 2
    assert "There is no option '--foo'" in capsys.readouterr().err
    for name in command.COMMANDS:
        with pytest.raises(SystemExit) as end:
            command.main([name, "--version"])
        assert end.value.code == 0 and capsys.readouterr().out == "mlx-lstm 0.1.0\n"
        with pytest.raises(SystemExit) as end:
            command.main([name, *["a.npz", "b.npz"] * (name == "convert"), "--foo"])
        assert end.value.code == 2 and "--foo" in capsys.readouterr().err


def test_progress_in_a_pipe_is_a_line_now_and_then(monkeypatch):
    monkeypatch.setattr(progress_module, "EVERY", 0.05)
    with Progress(io.StringIO()) as progress:
        progress.count(0, 4)
        progress.say("first part")
        time.sleep(0.02)
        progress.count(1, 4)
        progress.say("second part", left=1000)
        time.sleep(0.1)
        progress.count(0, 4)
        progress.say("third part", left=-1)
        time.sleep(0.1)
    lines = progress.out.getvalue().splitlines()
    assert lines[0] == "0:00  second part, about 0:00 left" and lines[-1] == "0:00  third part, longer than expected"


@pytest.mark.parametrize("options", [["--contenders", "ours", "--seconds", "60"]])
def test_ctrl_c_says_what_is_kept(options):
    """The child sends itself Ctrl-C as soon as it measures. A child of a shell's background job would ignore it."""
    code = (
        "import signal, mlx_lstm.bench.__main__ as b\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "b.measure = lambda *a, **k: signal.raise_signal(signal.SIGINT)\n"
    )
    code += f"raise SystemExit(b.main({[*options, '--sizes', '2,1,2,3']!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 130 and "interrupted after 0 of 2 tables: nothing is kept" in done.stderr, done.stderr
