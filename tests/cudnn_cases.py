"""Random stacks of layers for the tests of cuDNN's ops, and functions that run them with `mlx_lstm`, torch and the
oracle."""

from typing import NamedTuple

import mlx.core as mx
import numpy as np
from cases import ROUNDING_MARGIN, device_of, to_mlx, to_numpy

from mlx_lstm import cudnn
from mlx_lstm.convert.cudnn import GATES
from mlx_lstm.oracle import activation_arguments, evaluate
from mlx_lstm.oracle.arithmetic import Rounding

MODES = tuple(GATES)
INPUTS = ("input", "input_h", "input_c", "params")
OUTPUTS = ("output", "output_h", "output_c")


class Case(NamedTuple):
    """A random call of a cuDNN op: sizes, attributes and lengths. `inputs` and the outputs' `cotangents` are dicts
    of float64 arrays under the op's argument names."""

    mode: str
    L: int
    D: int
    T: int
    N: int
    I: int
    H: int
    P: int
    lengths: np.ndarray | None
    input_mode: str
    inputs: dict
    cotangents: dict

    @property
    def S(self):
        return self.P or self.H

    @property
    def attributes(self):
        direction = "bidirectional" if self.D == 2 else "unidirectional"
        return {"rnn_mode": self.mode, "direction": direction, "num_proj": self.P, "input_mode": self.input_mode}

    @property
    def outputs(self):
        """Return the names of the op's outputs that have a meaning in this mode. Only an LSTM has output_c."""
        return OUTPUTS if self.mode == "lstm" else OUTPUTS[:2]


def draw(seed, **fixed):
    """Return a random case. The fields given in `fixed` get these values and are not random."""
    rng = np.random.default_rng(seed)
    pick = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    sizes = {"mode": pick(*MODES), "L": pick(1, 1, 2, 3, 4), "D": pick(1, 2), "T": pick(1, 2, 3, 5)}
    sizes |= {"N": pick(1, 2, 3, 5), "I": pick(1, 3, 4), "H": pick(2, 3, 5)} | fixed
    # The projection size P must be less than H, as torch requires.
    sizes.setdefault("P", pick(0, 0, 1, sizes["H"] - 1) if sizes["mode"] == "lstm" else 0)
    T, N = sizes["T"], sizes["N"]
    sizes.setdefault("lengths", pick(None, rng.integers(1, T + 1, N), np.full(N, T)))
    case = Case(**{"input_mode": "linear_input"} | sizes, inputs={}, cotangents={})
    L, D, I, H, S = case.L, case.D, case.I, case.H, case.S
    shapes = {"input": (T, N, I), "input_h": (L * D, N, S), "input_c": (L * D, N, H)}
    shapes |= {"params": (cudnn.cudnn_rnn_params_size(L, H, I, **case.attributes).item(),)}
    outputs = {"output": (T, N, D * S), "output_h": (L * D, N, S), "output_c": (L * D, N, H)}
    return case._replace(
        inputs={name: rng.normal(0, 0.5, shape) for name, shape in shapes.items()},
        cotangents={name: rng.normal(size=shape) for name, shape in outputs.items()},
    )


def lengths_of(case):
    """Return the argument `sequence_lengths` of the op. If the case has no lengths, every sequence has length T."""
    return mx.array(np.full(case.N, case.T) if case.lengths is None else case.lengths).astype(mx.int32)


def ours(case, dtype, engine=None, stream=None, **attributes):
    """Run our `cudnn_rnn_v3` and its backward op. Return (outputs, gradients), two dicts of NumPy arrays under the
    ops' names."""
    with mx.stream(mx.cpu):
        given = {name: to_mlx(array, dtype) for name, array in case.inputs.items()}
        cotangents = [to_mlx(case.cotangents[name], dtype) for name in OUTPUTS]
    lengths = lengths_of(case)
    options = case.attributes | attributes | {"engine": engine, "stream": stream or device_of(engine)}
    *outputs, reserve, host = cudnn.cudnn_rnn_v3(**given, sequence_lengths=lengths, **options)
    back = cudnn.cudnn_rnn_backprop_v3(*given.values(), lengths, *outputs, *cotangents, reserve, host, **options)
    gradients = dict(zip(INPUTS, map(to_numpy, back), strict=True))
    return dict(zip(OUTPUTS, map(to_numpy, outputs), strict=True)), gradients


def by_torch(case, **more):
    """Run the case with torch in float64. Return (outputs, gradients), two dicts of NumPy arrays under the cuDNN
    ops' names. `more` are options of the torch layer's constructor."""
    import torch

    kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}.get(case.mode, torch.nn.RNN)
    options = {"nonlinearity": case.mode.removeprefix("rnn_")} if kind is torch.nn.RNN else {}
    options |= more | ({"proj_size": case.P} if case.P else {})
    layers = kind(case.I, case.H, case.L, bidirectional=case.D == 2, dtype=torch.float64, **options)
    arrays = torch_arrays(layers)
    start = 0
    with torch.no_grad():
        for array in arrays:
            part = case.inputs["params"][start : start + array.numel()]
            array.copy_(torch.from_numpy(part).reshape(array.shape))
            start += array.numel()
    assert start == case.inputs["params"].size
    x, h, c = (torch.tensor(case.inputs[name], requires_grad=True) for name in INPUTS[:3])
    packed = x
    if case.lengths is not None:
        lengths = torch.from_numpy(case.lengths)
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    output, last = layers(packed, (h, c) if case.mode == "lstm" else h)
    if case.lengths is not None:
        output, _ = torch.nn.utils.rnn.pad_packed_sequence(output, total_length=case.T)
    outputs = (output, *last) if case.mode == "lstm" else (output, last)
    loss = sum(
        (out * torch.from_numpy(case.cotangents[name])).sum() for name, out in zip(OUTPUTS, outputs, strict=False)
    )
    loss.backward()
    gradients = {"input": x.grad, "input_h": h.grad} | ({"input_c": c.grad} if case.mode == "lstm" else {})
    gradients["params"] = torch.cat([array.grad.reshape(-1) for array in arrays])
    named = dict(zip(OUTPUTS, outputs, strict=False))
    return tuple({name: value.detach().numpy() for name, value in found.items()} for found in (named, gradients))


def torch_arrays(layers):
    """Return the parameters of a torch layer in the order of cuDNN's flat parameter buffer: all matrices, then all
    biases."""
    return [getattr(layers, name) for name in torch_names(layers)]


def torch_names(layers):
    """Return the names of a torch layer's parameters in the order of cuDNN's flat parameter buffer."""
    suffixes = [f"l{n}{way}" for n in range(layers.num_layers) for way in ("", "_reverse")[: 1 + layers.bidirectional]]
    matrices = ("weight_ih", "weight_hh") + (("weight_hr",) if getattr(layers, "proj_size", 0) else ())
    return [f"{kind}_{suffix}" for kinds in (matrices, ("bias_ih", "bias_hh")) for suffix in suffixes for kind in kinds]


def by_oracle(case, fl=None):
    """Return the oracle's outputs and gradients in one dict under the cuDNN ops' names. The oracle computes in the
    arithmetic `fl` (float64 by default)."""
    fl = fl or Rounding(np.float64)
    layers, x = [], case.inputs["input"]
    for layer in range(case.L):
        layers.append(layer_case(case, layer, x, fl))
        x = evaluate(layers[-1], None, fl)[0]["h"]
    outputs, dh, found = [], case.cotangents["output"], []
    for layer in reversed(range(case.L)):
        last = {"hT": "output_h", "cT": "output_c"} if case.mode == "lstm" else {"hT": "output_h"}
        cotangents = {short: side_by_side(case, case.cotangents[name], layer) for short, name in last.items()}
        out, gradients = evaluate(layers[layer], cotangents | {"h": dh}, fl)
        outputs.insert(0, out)
        found.insert(0, gradients)
        dh = gradients["x"]
    named = {"output": x, "output_h": stacked(case, outputs, "hT"), "input": dh, "input_h": stacked(case, found, "h0")}
    if case.mode == "lstm":
        named |= {"output_c": stacked(case, outputs, "cT"), "input_c": stacked(case, found, "c0")}
    return named | {"params": buffer_of(case, found)}


def layer_case(case, layer, x, fl):
    """Return the oracle's arguments for one layer of the stack, whose input is `x`."""
    D, H, GH = case.D, case.H, GATES[case.mode] * case.H
    matrices, biases = arrays_in(case, case.inputs["params"])
    W, R, *Pr = ([matrices[layer * D + d][n] for d in range(D)] for n in range(2 + (case.P > 0)))
    bW, bR = (np.concatenate([biases[layer * D + d][n] for d in range(D)]) for n in range(2))
    op = case.mode[:3] if case.mode.startswith("rnn") else case.mode
    found = {"op": op, "bidirectional": D == 2, "lengths": case.lengths, "x": x, "Wx": np.concatenate(W)}
    found |= {"Wh": np.stack(R) if D == 2 else R[0], "h0": side_by_side(case, case.inputs["input_h"], layer)}
    if op == "rnn":
        found["activation"] = case.mode[4:]
    if op == "lstm":
        found["c0"] = side_by_side(case, case.inputs["input_c"], layer)
    if Pr:
        found["Wp"] = np.stack(Pr[0]) if D == 2 else Pr[0][0]
    b = bW + bR
    if op == "gru":
        candidate = np.tile(np.arange(GH) >= 2 * H, D)
        b, found["bhn"] = np.where(candidate, bW, b), bR[candidate]
    return found | {"b": fl(b)}


def arrays_in(case, params):
    """Split the flat parameter buffer. Return (matrices, biases), two lists with one entry per layer and direction.
    The entries are [W, R] or [W, R, projection], and [input bias, recurrent bias]."""
    GH, start, matrices, biases = GATES[case.mode] * case.H, 0, [], []
    shapes = [
        [(GH, case.I if n < case.D else case.D * case.S), (GH, case.S)] + [(case.P, case.H)] * (case.P > 0)
        for n in range(case.L * case.D)
    ]
    for found, shapes_of in ((matrices, shapes), (biases, [[(GH,), (GH,)]] * (case.L * case.D))):
        for row in shapes_of:
            found.append([])
            for shape in row:
                found[-1].append(params[start : start + np.prod(shape)].reshape(shape))
                start += np.prod(shape)
    return matrices, biases


def buffer_of(case, gradients):
    """Return the gradient of cuDNN's flat parameter buffer: the oracle's gradients of all layers, joined in the
    buffer's order."""
    matrices, biases, D = [], [], case.D
    for layer in gradients:
        for d in range(D):
            own = [layer[name] if D == 1 else layer[name][d] for name in ("Wh", "Wp") if name in layer]
            matrices += [np.split(layer["Wx"], D)[d], *own]
            db = np.split(layer["b"], D)[d]
            other = np.concatenate([db[: 2 * case.H], np.split(layer["bhn"], D)[d]]) if "bhn" in layer else db
            biases += [db, other]
    return np.concatenate([array.reshape(-1) for array in matrices + biases])


def side_by_side(case, states, layer):
    """Return the states [B, D S] of one layer, taken from the states [L D, B, S] of a stack of L layers with D
    directions. S is the number of features of a state."""
    return np.concatenate(list(states[layer * case.D : (layer + 1) * case.D]), axis=-1)


def stacked(case, layers, name):
    """Return the states [L D, B, S] of a stack of L layers with D directions, joined from the states [B, D S] of
    each layer. S is the number of features of a state."""
    return np.concatenate([np.split(layer[name], case.D, axis=-1) for layer in layers])


def draw_for(seed, dtype, **fixed):
    """Return a random case whose values are representable in `dtype`. No argument of relu is so close to the kink at
    0 that rounding could move it across."""
    for attempt in range(100):
        case = draw(seed + 10**6 * attempt, **fixed)
        rounded = [{n: v.astype(dtype).astype(np.float64) for n, v in named.items()} for named in case[-2:]]
        case = case._replace(inputs=rounded[0], cotangents=rounded[1])
        if case.mode != "rnn_relu" or kink_distance(case) > ROUNDING_MARGIN:
            return case
    raise RuntimeError("no case keeps off the kinks of relu")


def kink_distance(case):
    """Return the smallest distance of any argument of an activation from 0, the kink of relu."""
    fl, x, nearest = Rounding(np.float64), case.inputs["input"], np.inf
    for layer in range(case.L):
        here = layer_case(case, layer, x, fl)
        nearest = min([nearest, *(np.abs(a).min(initial=np.inf) for _, a in activation_arguments(**here))])
        x = evaluate(here, None, fl)[0]["h"]
    return nearest
