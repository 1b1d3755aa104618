"""Run a single torch layer (LSTM, GRU or RNN; one or two directions) and convert its arrays, outputs and gradients
to the layout of `mlx_lstm`."""

import numpy as np
import torch

LAYERS = {  # name: (torch's class, options of the class, options of our op)
    "lstm": (torch.nn.LSTM, {}, {}),
    "lstm_projection": (torch.nn.LSTM, {"proj_size": 4}, {}),
    "gru": (torch.nn.GRU, {}, {"op": "gru"}),
    "rnn_tanh": (torch.nn.RNN, {}, {"op": "rnn"}),
    "rnn_relu": (torch.nn.RNN, {"nonlinearity": "relu"}, {"op": "rnn", "activation": "relu"}),
}


def torch_layer(name, sizes, *, bidirectional, lengths, dtype):
    """Return (case, cotangents, expected). `case` has the arguments for the oracle; `expected` has torch's h, hT, cT
    and the gradient of each array."""
    T, B, I, H = sizes
    kind, their_options, options = LAYERS[name]
    rng = np.random.default_rng(7)
    torch.manual_seed(0)
    layer = kind(I, H, bidirectional=bidirectional, dtype=dtype, **their_options)
    D, lstm = 2 if bidirectional else 1, kind is torch.nn.LSTM
    leaf = lambda *shape: torch.tensor(rng.normal(size=shape), dtype=dtype, requires_grad=True)  # noqa: E731
    x, states = leaf(T, B, I), {"h0": leaf(D, B, their_options.get("proj_size", H))}
    states |= {"c0": leaf(D, B, H)} if lstm else {}
    given = x if lengths is None else torch.nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    h, last = layer(given, tuple(states.values()) if lstm else states["h0"])
    h = h if lengths is None else torch.nn.utils.rnn.pad_packed_sequence(h, total_length=T)[0]
    outputs = {"h": h, "hT": last[0], "cT": last[1]} if lstm else {"h": h, "hT": last}
    cotangents = {name: leaf(*value.shape).detach() for name, value in outputs.items()}
    torch.autograd.backward(list(outputs.values()), list(cotangents.values()))

    case = weights_of(layer, lambda parameter: parameter.detach().numpy())
    b_hh = case.pop("b_hh")
    case |= options | {"b": case["b"] + b_hh, "x": x.detach().numpy(), "bidirectional": bidirectional}
    case |= {} if lengths is None else {"lengths": lengths}
    expected = weights_of(layer, lambda parameter: parameter.grad.numpy()) | {"x": x.grad.numpy()}
    del expected["b_hh"]  # equals the gradient of b, because only the sum of both biases is used
    for name, state in states.items():
        case[name], expected[name] = side_by_side(name, state), side_by_side(name, state.grad)
    expected |= {name: side_by_side(name, value) for name, value in outputs.items()}
    return case, {name: side_by_side(name, value) for name, value in cotangents.items()}, expected


def weights_of(layer, of):
    """Apply the function `of` to each parameter of the torch layer. Return the results under our names and in our
    layout. Our b is torch's b_ih. Torch's b_hh is returned, too. For a GRU, the candidate gate's part of b_hh is
    returned as bhn, and is 0 in the returned b_hh."""
    suffixes = ("", "_reverse") if layer.bidirectional else ("",)
    parts = {name: [of(p) for suffix in suffixes for p in parameters(layer, name, suffix)] for name in THEIRS}
    own_axis = np.stack if layer.bidirectional else lambda arrays: arrays[0]
    found = {name: np.concatenate(parts[name]) for name in ("Wx", "b")} | {"Wh": own_axis(parts["Wh"])}
    if parts["Wp"]:
        found["Wp"] = own_axis(parts["Wp"])
    b_hh = np.stack(parts["b_hh"])
    if isinstance(layer, torch.nn.GRU):
        candidate = np.arange(b_hh.shape[1]) >= 2 * layer.hidden_size
        found["bhn"] = b_hh[:, candidate].flatten()
        b_hh = np.where(candidate, 0, b_hh)
    return found | {"b_hh": b_hh.flatten()}


THEIRS = {"Wx": "weight_ih", "Wh": "weight_hh", "b": "bias_ih", "b_hh": "bias_hh", "Wp": "weight_hr"}


def parameters(layer, name, suffix):
    """Return a list with the torch parameter that corresponds to our array `name`, such as "Wx". suffix: "" for the
    forward direction, "_reverse" for the other. Return [] if the layer has no such parameter."""
    found = getattr(layer, f"{THEIRS[name]}_l0{suffix}", None)
    return [] if found is None else [found]


def side_by_side(name, tensor):
    """Return a tensor as a NumPy array. States [D, B, H] become [B, D H] (D: number of directions); a sequence h
    keeps its shape."""
    array = tensor.detach().numpy()
    return array if name == "h" else np.concatenate(list(array), axis=-1)
