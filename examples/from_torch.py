"""PyTorch to MLX and back: an LSTM, GRU or RNN with any number of layers, converted in both directions.

    python examples/from_torch.py                        # an LSTM of two layers in both directions
    python examples/from_torch.py --mode gru --layers 3 --save gru.safetensors

The functions `from_torch` and `to_torch` convert the layer. The program then runs both layers, with the same random
weights, on the same sequences of different lengths, and prints how their results differ. The example needs torch.
"""

import argparse
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from support.command import run_main

import mlx_lstm.torch
from mlx_lstm import convert

Layer = mlx_lstm.torch.LSTM | mlx_lstm.torch.GRU | mlx_lstm.torch.RNN
NAMES = ["input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional"]


def from_torch(theirs: torch.nn.RNNBase) -> Layer:
    """Return a layer of mlx_lstm.torch with the sizes, options and weights of a torch layer."""
    weights = convert.from_torch(theirs)
    return mlx_lstm.torch.from_weights(weights, batch_first=theirs.batch_first, dropout=theirs.dropout)


def to_torch(ours: Layer) -> torch.nn.RNNBase:
    """Return a torch layer with the sizes, options and weights of a layer of mlx_lstm.torch."""
    theirs = getattr(torch.nn, type(ours).__name__)(**options(ours))
    theirs.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in ours.parameters().items()})
    return theirs


def options(layer: Layer | torch.nn.RNNBase) -> dict[str, Any]:
    """Return the constructor arguments with which `layer`, of torch or of mlx_lstm.torch, was made."""
    more = {"LSTM": ["proj_size"], "RNN": ["nonlinearity"]}.get(type(layer).__name__, [])
    return {name: getattr(layer, name) for name in NAMES + more}


def run_torch(layer: torch.nn.RNNBase, x: np.ndarray, lengths: np.ndarray) -> dict[str, np.ndarray]:
    """Run a torch layer. Return output, last h, and gradients of output.sum() + h.sum() for x and all parameters."""
    inputs = torch.tensor(x, requires_grad=True)
    packed = torch.nn.utils.rnn.pack_padded_sequence(inputs, torch.from_numpy(lengths), enforce_sorted=False)
    output, last = layer(packed)
    output, _ = torch.nn.utils.rnn.pad_packed_sequence(output, total_length=len(x))
    h = last[0] if isinstance(last, tuple) else last
    (output.sum() + h.sum()).backward()
    results = {"output": output, "last h": h, "gradient of x": inputs.grad}
    results |= {f"gradient of {name}": array.grad for name, array in layer.named_parameters()}
    return {name: value.detach().numpy() for name, value in results.items()}


def run_mlx(layer: Layer, x: np.ndarray, lengths: np.ndarray) -> dict[str, np.ndarray]:
    """Run an MLX layer. Return the output, the last h, and the same gradients as `run_torch`."""

    def sums(parameters: dict[str, mx.array], x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        layer.update(parameters)
        output, last = layer(x, lengths=mx.array(lengths))
        h = last[0] if isinstance(last, tuple) else last
        return output.sum() + h.sum(), output, h

    parameters = layer.parameters()
    (_, output, h), gradients = mx.value_and_grad(sums, argnums=(0, 1))(parameters, mx.array(x))
    layer.update(parameters)
    results = {"output": output, "last h": h, "gradient of x": gradients[1]}
    results |= {f"gradient of {name}": array for name, array in gradients[0].items()}
    return {name: np.array(value) for name, value in results.items()}


def main(argv: list[str] | None = None) -> int:
    """Convert a torch layer to MLX and back, and compare. Return 0 if the weights come back bit for bit."""
    layers = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn": torch.nn.RNN}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=layers, default="lstm")
    parser.add_argument("--layers", type=int, choices=range(1, 10), default=2, help="number of layers (default: 2)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the weights under torch's names, .safetensors")
    arguments = parser.parse_args(argv)
    if (file := arguments.save) and (file.suffix != ".safetensors" or file.is_dir() or not file.parent.is_dir()):
        parser.error("--save must be a file name that ends in .safetensors, in a folder that exists")
    torch.manual_seed(0)
    theirs = layers[arguments.mode](24, 32, arguments.layers, bidirectional=True)
    print(ours := from_torch(theirs))
    x, lengths = np.random.default_rng(0).standard_normal((20, 5, 24), np.float32), np.array([20, 3, 11, 1, 20])
    expected, got = run_torch(theirs, x, lengths), run_mlx(ours, x, lengths)
    for name, value in expected.items():
        print(f"{name:32} {value.shape!s:14} largest difference {np.abs(got[name] - value).max():.1e}")
    same = all(torch.equal(*pair) for pair in zip(theirs.parameters(), to_torch(ours).parameters(), strict=True))
    print(f"back in torch: {'the same bits' if same else 'DIFFERENT'}")
    if file:
        ours.save_weights(str(file))
    return 0 if same else 1


if __name__ == "__main__":
    run_main(main)
