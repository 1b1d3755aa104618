"""A torch LSTM, GRU or RNN of any depth in MLX: its weights through cuDNN's parameter buffer, and back, bit for bit.

    python examples/from_torch.py                                    # an LSTM of two layers in both directions
    python examples/from_torch.py --mode gru --layers 3
    python examples/from_torch.py --projection 16 --save lstm.safetensors
    python examples/from_torch.py --load lstm.safetensors            # the sizes are in the file

cuDNN's buffer is one flat array: the matrices of all layers and directions, then all biases (see
`mlx_lstm.cudnn._buffer`). torch has the same arrays under names, so the way there is a concatenation and the way back a
split. The example makes a torch layer with random weights, moves them, runs both on the same ragged batch, prints how
far the outputs and the gradients are apart, and moves the weights back. It needs `pip install torch`.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import torch

from mlx_lstm.cudnn import cudnn_rnn_params_size, cudnn_rnn_v3

LAYERS = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn_tanh": torch.nn.RNN, "rnn_relu": torch.nn.RNN}


class Stack(NamedTuple):
    """What the layers are, in the words of the command line."""

    mode: str = "lstm"
    input: int = 24
    hidden: int = 32
    layers: int = 2
    directions: int = 2
    projection: int = 0

    def in_torch(self) -> torch.nn.RNNBase:
        """A torch layer with random weights."""
        options = {"proj_size": self.projection} if self.projection else {}
        if self.mode.startswith("rnn"):
            options["nonlinearity"] = self.mode.removeprefix("rnn_")
        return LAYERS[self.mode](self.input, self.hidden, self.layers, bidirectional=self.directions == 2, **options)

    @property
    def attributes(self) -> dict[str, object]:
        """The same for the cuDNN ops."""
        direction = "bidirectional" if self.directions == 2 else "unidirectional"
        return {"rnn_mode": self.mode, "direction": direction, "num_proj": self.projection}


# --- The weights -----------------------------------------------------------------------------------------------------


def arrays_of(layer: torch.nn.RNNBase) -> list[torch.Tensor]:
    """A torch layer's parameters in the order of cuDNN's buffer."""
    ends = [f"l{n}{way}" for n in range(layer.num_layers) for way in ("", "_reverse")[: 1 + layer.bidirectional]]
    matrices = ["weight_ih", "weight_hh"] + ["weight_hr"] * (layer.proj_size > 0)
    names = [f"{kind}_{end}" for kinds in (matrices, ["bias_ih", "bias_hh"]) for end in ends for kind in kinds]
    return [getattr(layer, name) for name in names]


def from_torch(layer: torch.nn.RNNBase) -> mx.array:
    """The parameter buffer, [params_size], of a torch layer."""
    return mx.array(torch.cat([array.detach().reshape(-1) for array in arrays_of(layer)]).numpy())


def to_torch(params: mx.array, layer: torch.nn.RNNBase) -> None:
    """Writes a parameter buffer into a torch layer of the same sizes."""
    arrays = arrays_of(layer)
    parts = torch.from_numpy(np.array(params)).split([array.numel() for array in arrays])
    with torch.no_grad():
        for array, part in zip(arrays, parts, strict=True):
            array.copy_(part.reshape(array.shape))


# --- The comparison --------------------------------------------------------------------------------------------------


def run_torch(stack: Stack, layer: torch.nn.RNNBase, x: np.ndarray, lengths: np.ndarray) -> dict[str, np.ndarray]:
    """The output, the last h, and the gradients of both sums' sum for x and the buffer."""
    inputs = torch.tensor(x, requires_grad=True)
    packed = torch.nn.utils.rnn.pack_padded_sequence(inputs, torch.from_numpy(lengths), enforce_sorted=False)
    output, last = layer(packed)
    output, _ = torch.nn.utils.rnn.pad_packed_sequence(output, total_length=len(x))
    h = last[0] if stack.mode == "lstm" else last
    (output.sum() + h.sum()).backward()
    params = torch.cat([array.grad.reshape(-1) for array in arrays_of(layer)])
    found = {"output": output, "last h": h, "gradient of x": inputs.grad, "gradient of the weights": params}
    return {name: value.detach().numpy() for name, value in found.items()}


def run_mlx(stack: Stack, params: mx.array, x: np.ndarray, lengths: np.ndarray) -> dict[str, np.ndarray]:
    """The same from MLX."""
    rows, batch = stack.layers * stack.directions, x.shape[1]
    h0 = mx.zeros((rows, batch, stack.projection or stack.hidden))
    c0 = mx.zeros((rows, batch, stack.hidden))

    def sums(x: mx.array, params: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        out = cudnn_rnn_v3(x, h0, c0, params, mx.array(lengths), **stack.attributes)
        return out.output.sum() + out.output_h.sum(), out.output, out.output_h

    (_, output, h), gradients = mx.value_and_grad(sums, argnums=(0, 1))(mx.array(x), params)
    found = {"output": output, "last h": h, "gradient of x": gradients[0], "gradient of the weights": gradients[1]}
    return {name: np.array(value) for name, value in found.items()}


# --- The command -----------------------------------------------------------------------------------------------------


def arguments(argv: list[str] | None) -> tuple[argparse.Namespace, Stack, mx.array | None]:
    """The options, the stack, and the parameter buffer if one was loaded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=LAYERS, default="lstm")
    parser.add_argument("--input", type=int, default=24, metavar="I", help="size of the input (default: 24)")
    parser.add_argument("--hidden", type=int, default=32, metavar="H", help="size of the hidden state (default: 32)")
    parser.add_argument("--layers", type=int, default=2, metavar="L", help="number of layers (default: 2)")
    parser.add_argument("--directions", type=int, choices=(1, 2), default=2, help="default: 2")
    parser.add_argument("--projection", type=int, default=0, metavar="P", help="width of a projected h, LSTM only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", metavar="FILE", help="write the buffer and the sizes, .safetensors")
    parser.add_argument("--load", metavar="FILE", help="start from such a file instead of random weights")
    options = parser.parse_args(argv)
    for name, least in {"input": 1, "hidden": 1, "layers": 1, "seed": 0}.items():
        if (value := getattr(options, name)) < least:
            parser.error(f"--{name} must be at least {least} but is {value}.")
    if options.load:
        try:
            arrays, sizes = mx.load(options.load, return_metadata=True)
            kinds = {name: type(default) for name, default in Stack()._asdict().items()}
            return options, Stack(*(kind(sizes[name]) for name, kind in kinds.items())), arrays["params"]
        except (RuntimeError, ValueError, KeyError) as error:
            parser.error(f"--load must name a file of --save but {options.load} is none: {error}")
    if options.projection and options.mode != "lstm":
        parser.error(f"--projection must be 0 with --mode {options.mode} but is {options.projection}.")
    if not 0 <= options.projection < options.hidden:
        parser.error(f"--projection must lie in [0, {options.hidden}), below --hidden, but is {options.projection}.")
    return options, Stack(*(getattr(options, name) for name in Stack._fields)), None


def main(argv: list[str] | None = None) -> int:
    options, stack, loaded = arguments(argv)
    torch.manual_seed(options.seed)
    layer = stack.in_torch()
    if loaded is not None:
        to_torch(loaded, layer)
    params = from_torch(layer)
    size = cudnn_rnn_params_size(stack.layers, stack.hidden, stack.input, **stack.attributes).item()
    print(f"{type(layer).__name__} {tuple(stack)}: a buffer of {params.size:,} numbers, cudnn_rnn_params_size {size:,}")

    rng = np.random.default_rng(options.seed)
    x, lengths = rng.standard_normal((20, 5, stack.input), np.float32), np.array([20, 3, 11, 1, 20])
    expected, got = run_torch(stack, layer, x, lengths), run_mlx(stack, params, x, lengths)
    for name, value in expected.items():
        print(f"{name:24} {value.shape!s:14} largest difference {np.abs(got[name] - value).max():.1e}")

    again = stack.in_torch()
    to_torch(params, again)
    same = all(torch.equal(one, two) for one, two in zip(arrays_of(layer), arrays_of(again), strict=True))
    print(f"back in torch: {'the same bits' if same else 'DIFFERENT'}")
    if options.save:
        mx.save_safetensors(options.save, {"params": params}, {name: str(n) for name, n in stack._asdict().items()})
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
