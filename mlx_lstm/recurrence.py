"""THE recurrence: one LSTM layer over a sequence, with its own gradient. Every dialect of the package comes here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from . import engine_fused, engine_numpy, engine_ops, engine_stepwise
from .batching import vmap_one_by_one
from .cells import ACTIVATIONS, LSTMCell
from .checks import check_array, check_flag, check_lengths, check_number, check_option, check_sizes, fail
from .engines import METAL_ENGINES, choose
from .problem import Problem

ENGINE_MODULES = {
    "fused": engine_fused,
    "stepwise": engine_stepwise,
    "numpy": engine_numpy,
    "ops": engine_ops,
}


class LSTMOutput(NamedTuple):
    """What `lstm` returns: sequences h [T, B, P], c [T, B, H], gates [T, B, 4H]; last states hT [B, P], cT [B, H]."""

    h: mx.array
    c: mx.array
    gates: mx.array | None
    hT: mx.array
    cT: mx.array


def lstm(
    x: mx.array,
    Wx: mx.array | None,
    Wh: mx.array,
    b: mx.array | None = None,
    h0: mx.array | None = None,
    c0: mx.array | None = None,
    *,
    gate_order: str = "ifgo",
    activations: Sequence[str] = ("sigmoid", "sigmoid", "tanh", "sigmoid", "tanh"),
    peephole: mx.array | None = None,
    output_peephole: str = "current",
    mask: mx.array | None = None,
    cell_clip: float | None = None,
    forget_bias: float = 0.0,
    reverse: bool = False,
    lengths: mx.array | Sequence[int] | None = None,
    Wp: mx.array | None = None,
    return_gates: bool = False,
    training: bool = True,
    engine: str | None = None,
    stream: mx.Stream | mx.Device | None = None,
) -> LSTMOutput:
    r"""A long short-term memory layer over a time-major sequence.

    .. math::

        a_k &= x_t W_{x,k}^T + (m_t \odot h_{t-1}) W_{h,k}^T + b_k + p_k \odot c_{t-1}, \quad k \in \{i, f, g, o\} \\
        i, f, g, o &= s_i(a_i),\; s_f(a_f + \text{forget\_bias}),\; s_g(a_g),\; s_o(a_o) \\
        c_t &= f \odot c_{t-1} + i \odot g, \text{ clipped to } \pm\text{cell\_clip} \\
        h_t &= \left(o \odot s_{output}(c_t)\right) W_p^T

    Without options it equals `torch.nn.LSTM` of one layer (b = b_ih + b_hh) and `mlx.nn.LSTM` on a transposed batch.
    The gradient is exact for every array and flows from all five outputs; it keeps the gates and the cell states.

    Args:
        x (array): input, [T, B, I]; or, with `Wx=None`, the already projected input, [T, B, 4H].
        Wx (array, optional): input weights, [4H, I].
        Wh (array): recurrent weights, [4H, P]; P is H, or the projection's width.
        b (array, optional): bias, [4H].
        h0 (array, optional): first h, [B, P]. Default: zeros.
        c0 (array, optional): first c, [B, H]. Default: zeros.
        gate_order (str): order of the four H-blocks on every 4H axis (weights, bias, peephole, gates), a permutation of
            input, forget, candidate and output gate. Default: `"ifgo"`.
        activations (sequence of str): those of i, f, g, o (in this order, whatever `gate_order` is) and of the output,
            each one of `"identity"`, `"relu"`, `"tanh"`, `"sigmoid"`, `"hard_sigmoid"` (clip(0.2 x + 0.5, 0, 1)).
        peephole (array, optional): peephole weights, [4H]; zeros for a gate that shall not peep.
        output_peephole (str): whether o peeps at c[t], `"current"`, or at c[t-1], `"previous"`. Default: `"current"`.
        mask (array, optional): factor on h[t-1] as it enters the recurrent product; broadcastable to [B, P] or, one per
            step, to [T, B, P].
        cell_clip (float, optional): bound on |c[t]|, greater than 0. The gradient passes straight through, as in
            TensorFlow's block ops.
        forget_bias (float): added to the forget gate's preactivation. Default: 0.
        reverse (bool): process t = T-1 ... 0; outputs stay aligned with the input. Default: `False`.
        lengths (integer array or list, optional): [B], each in 0..T. Past its end an item's outputs are 0, its state is
            carried unchanged and its input never read; with `reverse` the item starts at its end. The range goes
            unchecked under `mx.compile`.
        Wp (array, optional): projection of h, [P, H].
        return_gates (bool): whether `gates` is returned, else it is `None`. Default: `False`.
        training (bool): `False` for inference. The numpy engine then keeps nothing for a gradient; should one be
            asked for, it runs forward again. A graph that MLX traces stays free of our gradient, which
            `mx.export_function` could not write; MLX then derives its own. Default: `True`.
        engine (str, optional): `"fused"`, `"stepwise"` (Metal), `"numpy"` or `"ops"` to force an engine. Default: the
            best for the stream's device and the sizes, see `mlx_lstm.engines.choose`.
        stream (Stream or Device, optional): where to run, as for any MLX op.

    Returns:
        LSTMOutput: h [T, B, P], c [T, B, H] (clipped), gates [T, B, 4H] (after activation, in `gate_order`; `None`
        unless `return_gates`), hT [B, P] and cT [B, H] (the state after the last step processed), in the dtype of x.
        float16 and bfloat16 are computed in float32. Engines on the CPU round once, at the outputs; the Metal engines
        keep the projected input, h and the gates in 16 bits, c in float32.

    Raises:
        ValueError: a rule on an argument is broken, or a forced engine cannot run. Nothing has been computed then.
        RuntimeError: a second or a forward-mode derivative was asked of an engine other than `"ops"`.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import lstm
        >>> x = mx.random.normal((10, 2, 3))  # T, B, I
        >>> Wx, Wh, b = mx.zeros((16, 3)), mx.zeros((16, 4)), mx.ones((16,))
        >>> out = lstm(x, Wx, Wh, b)
        >>> out.h.shape, out.cT.shape
        ((10, 2, 4), (2, 4))
        >>> mx.grad(lambda Wh: lstm(x, Wx, Wh, b).hT.sum())(Wh).shape
        (16, 4)
    """
    optional = {"b": b, "h0": h0, "c0": c0, "peephole": peephole, "mask": mask, "Wp": Wp}
    arrays = {"x": x, "Wx": Wx, "Wh": Wh} | optional
    arrays = {name: array for name, array in arrays.items() if array is not None or name in ("x", "Wh")}
    T, B, H, P = check_arrays(arrays)
    cell = check_cell(gate_order, activations, output_peephole, cell_clip, forget_bias)
    check_flag("lstm", "reverse", reverse)
    check_flag("lstm", "return_gates", return_gates)
    check_flag("lstm", "training", training)
    with mx.stream(stream) if stream is not None else nullcontext():
        traced = is_traced(list(arrays.values()) + ([lengths] if isinstance(lengths, mx.array) else []))
        if lengths is not None:
            lengths = check_lengths("lstm", lengths, B, T, traced=traced)
        word = choose(
            sizes=(T, B, x.shape[-1], H),
            dtype=x.dtype,
            projection=Wp is not None,
            device=current_device(),
            metal=mx.metal.is_available(),
            traced=traced,
            requested=engine,
        ).engine
        problem = Problem(T, B, H, P, cell, reverse, lengths, return_gates, training)
        return run(problem, arrays, word, plain=traced and not training)


def run(problem: Problem, arrays: dict[str, mx.array], engine: str, plain: bool) -> LSTMOutput:
    """Run a checked problem on an engine, with our gradient unless the graph shall stay plain.

    16-bit arrays reach the Metal engines as they are, for the shaders compute in float32 themselves.
    """
    dtype = arrays["x"].dtype
    if dtype in (mx.float16, mx.bfloat16) and engine not in METAL_ENGINES:
        arrays = {name: array.astype(mx.float32) for name, array in arrays.items()}
    outputs = ENGINE_MODULES[engine].forward(problem, arrays) if plain else differentiable(problem, arrays, engine)
    if not problem.return_gates:
        outputs["gates"] = None
    return LSTMOutput(**{name: output if output is None else output.astype(dtype) for name, output in outputs.items()})


def differentiable(problem: Problem, arrays: dict[str, mx.array], engine: str) -> dict[str, mx.array]:
    """The engine's outputs, with its backward pass as their gradient."""
    module, names = ENGINE_MODULES[engine], tuple(arrays)
    # MLX differentiates the ops engine's backward pass again, so all it reads must be outputs. The numpy engine keeps
    # what the caller does not want where MLX never sees it.
    hidden = {"gates"} if module is engine_numpy and not problem.return_gates else set()
    shown = [name for name in LSTMOutput._fields if name not in hidden]
    kept = {}
    used: set[str] | None = set()

    @mx.custom_function
    def forward(*values: mx.array) -> tuple[mx.array, ...]:
        outputs = module.forward(problem, dict(zip(names, values, strict=True)))
        kept.update((name, outputs[name]) for name in hidden)
        return tuple(outputs[name] for name in shown)

    @forward.vjp
    def backward(primals, cotangents, outputs):
        # MLX hands zeros for outputs the loss does not use; they are neither computed nor added. In a second
        # derivative gradients also arrive past the taps, through what this function itself read: then all count.
        nonlocal used
        present = {name: d for name, d in zip(shown, cotangents, strict=True) if used is None or name in used}
        used = None
        saved = dict(zip(shown, outputs, strict=True))
        gradients = first_order(engine, problem, names, kept)(primals, present, saved)
        return tuple(gradients[name] for name in names)

    if module is not engine_ops:

        @forward.jvp
        def jvp(primals, tangents):
            raise RuntimeError(f"[lstm] engine={engine!r} has no forward-mode derivative: use engine='ops'.")

    def count_all() -> None:  # under mx.vmap the taps are lost
        nonlocal used
        used = None

    if engine in METAL_ENGINES:
        vmap_one_by_one(forward, count_all)
    outputs = zip(shown, forward(*arrays.values()), strict=True)
    return {name: tap(value, used, name) for name, value in outputs}


def tap(value: mx.array, used: set[str], name: str) -> mx.array:
    """`value`, noting in `used` when a gradient comes back through it."""

    @mx.custom_function
    def identity(value: mx.array) -> mx.array:
        return value

    @identity.vjp
    def note(primal, cotangent, output):
        used.add(name)
        return cotangent

    return identity(value)


def first_order(engine: str, problem: Problem, names: tuple[str, ...], kept: dict):
    """The engine's backward pass; for an engine whose results MLX cannot differentiate, one that says so."""
    module = ENGINE_MODULES[engine]

    def backward(primals, cotangents, saved):
        return module.backward(problem, dict(zip(names, primals, strict=True)), saved | kept, cotangents)

    if module is engine_ops:
        return backward
    backward = mx.custom_function(backward)
    if engine in METAL_ENGINES:
        vmap_one_by_one(backward)

    @backward.vjp
    def second_order(primals, cotangents, outputs):
        raise RuntimeError(f"[lstm] engine={engine!r} has no second derivative: use engine='ops'.")

    return backward


def current_device() -> str:
    """`"cpu"` or `"gpu"`: where the stream in effect runs."""
    return "cpu" if mx.default_device() == mx.cpu else "gpu"


def is_traced(arrays: list[mx.array]) -> bool:
    """Whether any of these arrays is a placeholder without a value. Evaluates the others."""
    try:
        mx.eval(arrays)
    except ValueError as error:
        if "during function transformations" in str(error):
            return True
        raise
    return False


# --- Arguments -------------------------------------------------------------------------------------------------------


def check_arrays(arrays: dict[str, mx.array], op: str = "lstm") -> tuple[int, int, int, int]:
    """Rank, size and dtype of every array; returns (T, B, H, P)."""
    x, Wh = arrays["x"], arrays["Wh"]
    check_array(op, "x", x, ["T", "B", "I" if "Wx" in arrays else "4H"])
    check_array(op, "Wh", Wh, ["4H", "P" if "Wp" in arrays else "H"], x.dtype)
    for name in ("x", "Wh"):
        check_sizes(op, name, arrays[name])
    T, B, I = x.shape
    rows, P = Wh.shape
    H = rows // 4
    if rows % 4 or ("Wp" not in arrays and P != H):
        fail(op, "Wh must have shape [4H, P] with Wp, else [4H, H]", f"shape {list(Wh.shape)}")
    if "Wx" not in arrays and I != 4 * H:
        fail(op, f"x must have shape [T, B, 4H = {4 * H}] when Wx is None", f"shape {list(x.shape)}")
    shapes = {"Wx": [4 * H, I], "b": [4 * H], "h0": [B, P], "c0": [B, H], "peephole": [4 * H], "Wp": [P, H]}
    for name in shapes.keys() & arrays.keys():
        check_array(op, name, arrays[name], shapes[name], x.dtype)
    if "mask" in arrays:
        check_mask(op, arrays["mask"], (T, B, P), x.dtype)
    return T, B, H, P


def check_mask(op: str, mask: mx.array, shape: tuple[int, int, int], dtype: mx.Dtype) -> None:
    """The mask broadcasts to [T, B, P] without enlarging it."""
    check_array(op, "mask", mask, list(getattr(mask, "shape", ())), dtype)
    try:
        fits = np.broadcast_shapes(mask.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        T, B, P = shape
        rule = f"mask must broadcast to [B, P] = [{B}, {P}] or [T, B, P] = [{T}, {B}, {P}]"
        fail(op, rule, f"shape {list(mask.shape)}")


def check_cell(
    gate_order: str,
    activations: Sequence[str],
    output_peephole: str,
    cell_clip: float | None,
    forget_bias: float,
    op: str = "lstm",
) -> LSTMCell:
    """The cell these options describe."""
    if not isinstance(gate_order, str) or sorted(gate_order) != sorted("ifgo"):
        fail(op, "gate_order must be a permutation of 'ifgo'", repr(gate_order))
    if isinstance(activations, str) or not isinstance(activations, Sequence) or len(activations) != 5:
        fail(op, "activations must be five names: those of i, f, g, o and of the output", repr(activations))
    for name in activations:
        check_option(op, "activations: each", name, ACTIVATIONS)
    check_option(op, "output_peephole", output_peephole, ("current", "previous"))
    if cell_clip is not None:
        check_number(op, "cell_clip", cell_clip, positive=True)
    check_number(op, "forget_bias", forget_bias)
    return LSTMCell(gate_order, tuple(activations), output_peephole, cell_clip, float(forget_bias))
