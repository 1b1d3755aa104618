"""A torch LSTM, GRU or RNN of any depth in MLX, and back: a `state_dict` loads as it is.

    python examples/from_torch.py                                    # an LSTM of two layers in both directions
    python examples/from_torch.py --mode gru --layers 3
    python examples/from_torch.py --projection 16 --save lstm.safetensors
    python examples/from_torch.py --projection 16 --load lstm.safetensors      # into a layer of the same sizes

The example makes a torch layer with random weights and ours with the same ones, runs both on the same ragged batch,
prints how far outputs and gradients are apart, and moves the weights back. It needs `pip install torch`.
"""

from __future__ import annotations

import argparse

import mlx.core as mx
import numpy as np
import torch

import mlx_lstm.torch

LAYERS = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN", "rnn_relu": "RNN"}
Layer = mlx_lstm.torch.LSTM | mlx_lstm.torch.GRU | mlx_lstm.torch.RNN


def from_torch(theirs: torch.nn.Module, ours: Layer) -> None:
    """torch's weights into our layer of the same sizes."""
    ours.load_weights([(name, mx.array(value.numpy())) for name, value in theirs.state_dict().items()])


def to_torch(ours: Layer, theirs: torch.nn.Module) -> None:
    """Our weights into torch's layer."""
    theirs.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in ours.parameters().items()})


def pair(
    mode: str, input: int, hidden: int, layers: int, directions: int, projection: int
) -> tuple[torch.nn.RNNBase, Layer]:
    """A layer in torch and one of the same sizes here: the constructors are the same, too. The weights are random."""
    options = {"bidirectional": directions == 2} | ({"proj_size": projection} if projection else {})
    if mode.startswith("rnn"):
        options["nonlinearity"] = mode.removeprefix("rnn_")
    ours = getattr(mlx_lstm.torch, LAYERS[mode])(input, hidden, layers, **options)  # first: it checks the sizes
    return getattr(torch.nn, LAYERS[mode])(input, hidden, layers, **options), ours


def run_torch(layer: torch.nn.RNNBase, x: np.ndarray, lengths: np.ndarray) -> dict[str, np.ndarray]:
    """The output, the last h, and the gradients of both sums' sum for x and the parameters."""
    inputs = torch.tensor(x, requires_grad=True)
    packed = torch.nn.utils.rnn.pack_padded_sequence(inputs, torch.from_numpy(lengths), enforce_sorted=False)
    output, last = layer(packed)
    output, _ = torch.nn.utils.rnn.pad_packed_sequence(output, total_length=len(x))
    h = last[0] if isinstance(last, tuple) else last
    (output.sum() + h.sum()).backward()
    found = {"output": output, "last h": h, "gradient of x": inputs.grad}
    found |= {f"gradient of {name}": array.grad for name, array in layer.named_parameters()}
    return {name: value.detach().numpy() for name, value in found.items()}


def run_mlx(layer: Layer, x: np.ndarray, lengths: np.ndarray) -> dict[str, np.ndarray]:
    """The same from MLX."""

    def sums(parameters: dict[str, mx.array], x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        layer.update(parameters)
        output, last = layer(x, lengths=mx.array(lengths))
        h = last[0] if isinstance(last, tuple) else last
        return output.sum() + h.sum(), output, h

    parameters = layer.parameters()
    (_, output, h), gradients = mx.value_and_grad(sums, argnums=(0, 1))(parameters, mx.array(x))
    layer.update(parameters)
    found = {"output": output, "last h": h, "gradient of x": gradients[1]}
    found |= {f"gradient of {name}": array for name, array in gradients[0].items()}
    return {name: np.array(value) for name, value in found.items()}


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=LAYERS, default="lstm")
    parser.add_argument("--input", type=int, default=24, metavar="I", help="size of the input (default: 24)")
    parser.add_argument("--hidden", type=int, default=32, metavar="H", help="size of the hidden state (default: 32)")
    parser.add_argument("--layers", type=int, default=2, metavar="L", help="number of layers (default: 2)")
    parser.add_argument("--directions", type=int, choices=(1, 2), default=2, help="default: 2")
    parser.add_argument("--projection", type=int, default=0, metavar="P", help="width of a projected h, LSTM only")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    parser.add_argument("--save", metavar="FILE", help="write the weights under torch's names, .safetensors")
    parser.add_argument("--load", metavar="FILE", help="start from such a file instead of random weights")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    options = vars(parser.parse_args(argv))
    seed, save, load = (options.pop(name) for name in ("seed", "save", "load"))
    if options["projection"] and options["mode"] != "lstm":
        parser.error(f"--projection must be 0 with --mode {options['mode']} but is {options['projection']}.")
    torch.manual_seed(seed)
    try:
        theirs, ours = pair(**options)
    except ValueError as error:
        parser.error(str(error))
    from_torch(theirs, ours)
    if load:
        try:
            ours.load_weights(load)
        except (ValueError, RuntimeError) as error:
            parser.error(f"--load must name a file of these sizes but {load} is none: {' '.join(str(error).split())}")
        to_torch(ours, theirs)

    rng = np.random.default_rng(0)
    x, lengths = rng.standard_normal((20, 5, options["input"]), np.float32), np.array([20, 3, 11, 1, 20])
    expected, got = run_torch(theirs, x, lengths), run_mlx(ours, x, lengths)
    print(ours)
    for name, value in expected.items():
        print(f"{name:32} {value.shape!s:14} largest difference {np.abs(got[name] - value).max():.1e}")

    again, _ = pair(**options)
    to_torch(ours, again)
    same = all(torch.equal(one, two) for one, two in zip(theirs.parameters(), again.parameters(), strict=True))
    print(f"back in torch: {'the same bits' if same else 'DIFFERENT'}")
    if save:
        ours.save_weights(save)
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
