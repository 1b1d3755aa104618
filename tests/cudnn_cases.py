"""Random stacks of layers for the cuDNN ops: arrays, how ours runs them, and what torch makes of them in float64."""

from typing import NamedTuple

import mlx.core as mx
import numpy as np
from cases import to_mlx, to_numpy

from mlx_lstm import cudnn
from mlx_lstm.cudnn_params import GATES

MODES = tuple(GATES)
INPUTS = ("input", "input_h", "input_c", "params")
OUTPUTS = ("output", "output_h", "output_c")


class Case(NamedTuple):
    """Sizes, attributes, lengths, and float64 arrays by the names of the ops: inputs and gradients of the outputs."""

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
        """The names of the outputs that mean something."""
        return OUTPUTS if self.mode == "lstm" else OUTPUTS[:2]


def draw(seed, **fixed):
    """A random case, but for what is fixed."""
    rng = np.random.default_rng(seed)
    pick = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    sizes = {"mode": pick(*MODES), "L": pick(1, 1, 2, 3, 4), "D": pick(1, 2), "T": pick(1, 2, 3, 5)}
    sizes |= {"N": pick(1, 2, 3, 5), "I": pick(1, 3, 4), "H": pick(2, 3, 5)} | fixed
    # torch wants a projection to be narrower than H.
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
    """sequence_lengths, T where the case has none."""
    return mx.array(np.full(case.N, case.T) if case.lengths is None else case.lengths).astype(mx.int32)


def ours(case, dtype, engine=None, stream=mx.cpu, **attributes):
    """(outputs, gradients) by the ops' names, as NumPy arrays, from `cudnn_rnn_v3` and its backward op."""
    with mx.stream(mx.cpu):
        given = {name: to_mlx(array, dtype) for name, array in case.inputs.items()}
        cotangents = [to_mlx(case.cotangents[name], dtype) for name in OUTPUTS]
    lengths = lengths_of(case)
    options = case.attributes | attributes | {"engine": engine, "stream": stream}
    *outputs, reserve, host = cudnn.cudnn_rnn_v3(**given, sequence_lengths=lengths, **options)
    back = cudnn.cudnn_rnn_backprop_v3(*given.values(), lengths, *outputs, *cotangents, reserve, host, **options)
    gradients = dict(zip(INPUTS, map(to_numpy, back), strict=True))
    return dict(zip(OUTPUTS, map(to_numpy, outputs), strict=True)), gradients


def by_torch(case):
    """The same from torch, in float64."""
    import torch

    kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}.get(case.mode, torch.nn.RNN)
    options = {"nonlinearity": case.mode.removeprefix("rnn_")} if kind is torch.nn.RNN else {}
    options |= {"proj_size": case.P} if case.P else {}
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
    """The parameters of a torch layer, in the order of cuDNN's buffer: matrices, then biases."""
    suffixes = [f"l{n}{way}" for n in range(layers.num_layers) for way in ("", "_reverse")[: 1 + layers.bidirectional]]
    matrices = ("weight_ih", "weight_hh") + (("weight_hr",) if getattr(layers, "proj_size", 0) else ())
    names = [
        f"{kind}_{suffix}" for kinds in (matrices, ("bias_ih", "bias_hh")) for suffix in suffixes for kind in kinds
    ]
    return [getattr(layers, name) for name in names]
