"""Convert weights between the arguments of NX-AI's function `flashrnn` and `Weights`.

FlashRNN divides the hidden units of a layer into N heads of D units. A head is a small recurrent layer of its own: its
recurrent weights read only its own h. So each head becomes one `Weights` of one layer, and the heads run side by side.

FlashRNN's arrays are W [G, N, D, I] (input weights), R [G, N, D, D] (recurrent weights) and b [G, N, D] (biases), for G
gates and I input features of a head. For one head, `Weights` has Wx [G D, I], Wh [G D, D] and bx, bh [G D].
"""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from ..engines.cells import Cell, GRUCell, LSTMCell, RNNCell
from ..engines.problem import Arrays
from ..ground.checks import check_array, check_option, check_sizes, fail
from .layers import check_keys
from .weights import Format, Weights, as_stored, check_weights, checked, describe, one_bias, to_mlx, whole_bias

CELLS: dict[str, Cell] = {"lstm": LSTMCell(), "gru": GRUCell(), "elman": RNNCell("tanh")}
"""The functions of FlashRNN whose weights `Weights` holds, and their cells."""

SLSTM = ("Wx", "Wh", "bias")
"""The parameters of a layer `nn.Pointwise` that computes one head of an sLSTM."""


def from_flashrnn(W: Any, R: Any, b: Any, *, function: str = "lstm") -> list[Weights]:
    """Return the weights of each head of an LSTM, a GRU or an Elman network that `flashrnn` runs.

    The heads of FlashRNN are independent: no head reads the h of another. So each head becomes one layer, and
    `mlx_lstm.nn.stack` with `groups=` runs them side by side. The function `flashrnn` has no argument W: its caller
    multiplies the input by W before the call, often with a `torch.nn.Linear` without a bias. `W` is the weight of this
    linear layer.

    Args:
        W (array): [G, N, D, I], the input's weights, for G gates, N heads of D units, and I features that one head
            reads: all features of the input, or only the head's own part. It is `linear.weight.reshape(G, N, D, I)`.
        R (array): [G, N, D, D], the argument R of `flashrnn`; row d of [D, D] has the weights of unit d.
        b (array): [G, N, D], the argument b; of a GRU [4, N, D].
        function (str): `"lstm"`, `"gru"` or `"elman"`, as in `flashrnn`. Default: `"lstm"`.

    Gates of an LSTM: i, f, z, o, where z is our g. Gates of a GRU: W has r, z, n; R has n, r, z; b has the recurrent
    bias of n, then r, z, n.

    Returns:
        list of Weights: one per head, in the gate order i, f, g, o or r, z, n.

    Raises:
        ValueError: a shape does not fit, or an unknown function. `from_flashrnn_slstm` reads an sLSTM.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import convert
        >>> from mlx_lstm.nn import stack
        >>> N, D, I = 2, 4, 3
        >>> W, R, b = mx.ones((4, N, D, I)), mx.ones((4, N, D, D)), mx.zeros((4, N, D))
        >>> heads = convert.from_flashrnn(W, R, b, function="lstm")
        >>> layers = [convert.to_mlx(head)[0][0] for head in heads]
        >>> x = mx.ones((5, 10, I))
        >>> h, (h_n, c_n) = stack(layers, mx.tile(x, (1, 1, N)), groups=N)  # every head reads all of x
        >>> h.shape, c_n.shape  # FlashRNN's [B, T, N, D] in one axis N D; [N, B, D]
        ((5, 10, 8), (2, 5, 4))
    """
    op = "from_flashrnn"
    if function == "slstm":
        fail(op, "function must be lstm, gru or elman; from_flashrnn_slstm reads an sLSTM,", repr(function))
    check_option(op, "function", function, tuple(CELLS))
    cell = CELLS[function]
    if W is None:  # raises the error for a missing W, which only an sLSTM may lack
        check_array(op, "W", W, ["G", "N", "D", "I"])
    # A GRU's b has four biases per unit: first the recurrent bias of n, then one bias for each of r, z and n.
    W, R, b = checked_arrays(op, W, R, b, cell.gates, 4 if function == "gru" else cell.gates)
    named = {"Wx": W, "Wh": R, "bx": b}  # the arrays of all heads, by their names in `Weights`
    if function == "gru":  # R: from the order n, r, z to r, z, n; b[0]: the recurrent bias of n
        named["Wh"] = mx.concatenate([R[1:], R[:1]])
        named |= {"bx": b[1:], "bh": mx.concatenate([mx.zeros_like(b[:2]), b[:1]])}
    # Axis 1 is the head; `joined` makes one axis G D of gates and units.
    heads = [{name: joined(array[:, n]) for name, array in named.items()} for n in range(R.shape[1])]
    return [checked(op, Weights(cell, [[arrays]])) for arrays in heads]


def to_flashrnn(heads: Sequence[Weights]) -> Arrays:
    """Return the arguments `W`, `R` and `b` of `from_flashrnn` from the weights of each head.

    R and b are arguments of `flashrnn`. The linear layer before it has the weight `W.reshape(-1, I)` and no bias. Two
    biases become their sum; only a GRU keeps the recurrent bias of n.

    Args:
        heads (list of Weights): one per head, each of one layer in one direction, all of the same cell and sizes.

    Raises:
        ValueError: the heads differ in kind or size, or FlashRNN lacks an option of the cell.
    """
    op = "to_flashrnn"
    if not isinstance(heads, Sequence) or not heads:
        fail(op, "heads must be a list of at least one Weights", type(heads).__name__)
    of_heads = []  # (W, R, b) of each head
    for head in heads:
        first = check_weights(op, heads[0])
        if len(check_weights(op, head).layers) != 1 or head.directions != 1 or describe(head) != describe(first):
            rule = f"heads must be single layers in one direction, all alike, {describe(first)},"
            fail(op, rule, describe(head))
        stored = as_stored(op, head, Format())  # refuses options that FlashRNN lacks; adds a forget bias to the bias
        cell, arrays = stored.cell, stored.layers[0][0]  # layers[layer][direction]
        G, D = cell.gates, head.hidden_size
        W, R = (arrays[name].reshape(G, D, -1) for name in ("Wx", "Wh"))
        b = whole_bias(cell, arrays).reshape(G, D)  # the sum of both biases; for a GRU's n, bx only
        if cell.op == "gru":
            R = mx.stack([R[2], R[0], R[1]])  # from r, z, n to n, r, z
            # The recurrent bias of n comes first; zeros if there is none.
            b = mx.concatenate([one_bias(cell, arrays).get("bhn", mx.zeros_like(b[0]))[None], b])
        of_heads.append((W, R, b))
    # Axis 1 is the head.
    return {letter: mx.stack([arrays[n] for arrays in of_heads], axis=1) for n, letter in enumerate("WRb")}


def from_flashrnn_slstm(W: Any, R: Any, b: Any) -> list[Arrays]:
    """Return the parameters of each head of an sLSTM that `flashrnn` runs, for layers `mlx_lstm.nn.Pointwise`.

    `mlx_lstm.cells.slstm` and FlashRNN's sLSTM give the same h if the states begin as zeros. The states c and n are
    stored divided by e^m, with a third state m. The two libraries may choose different values of m, so c, n and m may
    differ; only c e^m and n e^m are the same in both. FlashRNN's last states are valid first states here.

    Args:
        W (array, optional): [4, N, D, I], for N heads of D units and I inputs, as in `from_flashrnn`. `None` if you
            compute the preactivations yourself; pass them to `mlx_lstm.pointwise` as x [T, B, 4D], one call per
            head, with `Wx=None`.
        R (array): [4, N, D, D], the argument R of `flashrnn`.
        b (array): [4, N, D], the argument b.

    Returns:
        list of dict: for each head `Wx` [4D, I] unless W is `None`, `Wh` [4D, D], `bias` [4D]. Gates i, f, z, o.

    Raises:
        ValueError: a shape does not fit.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import cells, convert
        >>> from mlx_lstm.nn import Pointwise
        >>> N, D, I = 2, 4, 3
        >>> W, R, b = mx.ones((4, N, D, I)), mx.ones((4, N, D, D)), mx.zeros((4, N, D))
        >>> heads = convert.from_flashrnn_slstm(W, R, b)
        >>> layers = [Pointwise(cells.slstm, I, D, gates=4, states=4).update(head) for head in heads]
        >>> x = mx.ones((5, 10, I))
        >>> mx.concatenate([layer(x)[0] for layer in layers], axis=-1).shape
        (5, 10, 8)
    """
    W, R, b = checked_arrays("from_flashrnn_slstm", W, R, b, 4, 4)  # four gates, and one bias for each
    # Axis 1 of W, R and b is the head.
    given = [(name, array) for name, array in zip(SLSTM, (W, R, b), strict=True) if array is not None]
    return [{name: joined(array[:, n]) for name, array in given} for n in range(R.shape[1])]


def to_flashrnn_slstm(heads: Sequence[Mapping[str, Any]]) -> dict[str, mx.array | None]:
    """Return the arguments of `from_flashrnn_slstm` from the parameters of each head.

    Args:
        heads (list of dict): for each head of D units and I inputs `Wx` [4D, I], which all heads or none have, `Wh`
            [4D, D] and `bias` [4D]. They are the parameters of a layer `mlx_lstm.nn.Pointwise` with the cell
            `mlx_lstm.cells.slstm`.

    Returns:
        dict: `W`, which is `None` without `Wx`, `R` and `b`.

    Raises:
        ValueError: an array is missing or unknown, or a shape does not fit.
    """
    op = "to_flashrnn_slstm"
    if not isinstance(heads, Sequence) or not heads or not all(isinstance(head, Mapping) for head in heads):
        fail(op, "heads must be a list of at least one dict of arrays", type(heads).__name__)
    names = [name for name in SLSTM if name in heads[0]]  # of Wx, Wh and bias
    for n, head in enumerate(heads):
        check_keys(op, head)
        if not {"Wh", "bias"} <= head.keys() <= set(SLSTM) or head.keys() != heads[0].keys():
            fail(op, f"heads[{n}] must hold Wh, bias and, in all heads or none, Wx", sorted(head))
    # The arrays of the first head tell the sizes D and I, which all heads must have.
    first = heads[0]
    check_array(op, "heads[0]: Wh", first["Wh"], ["4 D", "D"])
    check_sizes(op, "heads[0]: Wh", first["Wh"])  # no axis of size 0
    D = first["Wh"].shape[1]
    shapes: dict[str, Sequence[int | str]] = {"Wx": [4 * D, "I"], "Wh": [4 * D, D], "bias": [4 * D]}
    if "Wx" in first:
        check_array(op, "heads[0]: Wx", first["Wx"], shapes["Wx"])
        shapes["Wx"] = first["Wx"].shape
    for n, head in enumerate(heads):
        for name in names:
            check_array(op, f"heads[{n}]: {name}", head[name], shapes[name])
    # Divide axis 0 into the axes gate and unit, [4D, ...] to [4, D, ...]. The heads become axis 1.
    found = {
        name: mx.stack([head[name].reshape(4, D, *head[name].shape[1:]) for head in heads], axis=1) for name in names
    }
    return {letter: found.get(name) for letter, name in zip("WRb", SLSTM, strict=True)}


def checked_arrays(op: str, W: Any, R: Any, b: Any, gates: int, biases: int) -> tuple[Any, mx.array, mx.array]:
    """Check the shapes of W [gates, N, D, I], R [gates, N, D, D] and b [biases, N, D], for N heads of D units and I
    inputs. Return them as MLX arrays. W may be None. biases: the number of biases of a unit in b."""
    W, R, b = (None if array is None else to_mlx(array) for array in (W, R, b))
    check_array(op, "R", R, [gates, "N", "D", "D"])  # four axes, of any sizes N and D
    _, N, D, _ = R.shape
    check_array(op, "R", R, [gates, N, D, D])  # the last two axes must be equal
    check_sizes(op, "R", R)  # no axis of size 0
    check_array(op, "b", b, [biases, N, D])
    if W is not None:
        check_array(op, "W", W, [gates, N, D, "I"])
    return W, R, b


def joined(array: mx.array) -> mx.array:
    """Join the first two axes of an array, gate and unit: return [G D, ...] for [G, D, ...]."""
    return array.reshape(-1, *array.shape[2:])
