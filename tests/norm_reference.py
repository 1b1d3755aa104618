"""A reference for layer normalisation inside the step, apart from the library: plain loops in PyTorch's float64, whose
gradients PyTorch derives. `Rounded` adds random rounding errors to every operation, from which error bounds follow."""

from functools import partial

import numpy as np
import torch

from mlx_lstm.oracle.closeness import FEW, SAFETY, TRIALS, float_of
from mlx_lstm.oracle.verdict import Bound

ACTS = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "identity": lambda x: x,
    "hard_sigmoid": lambda x: torch.clamp(0.2 * x + 0.5, 0, 1),
    "hard_sigmoid_sixth": lambda x: torch.clamp(x / 6 + 0.5, 0, 1),
}


class Exact:
    """Arithmetic without rounding errors."""

    def __call__(self, x):
        return x

    def dot(self, x, W):
        return x @ W.T


class Rounded(Exact):
    """Arithmetic with a random error in every result, and so in every gradient: between half an eps and one eps of the
    result, times `gain`."""

    def __init__(self, eps, seed, gain):
        self.size, self.random = eps * gain, torch.Generator().manual_seed(seed)

    def errors(self, shape):
        sizes = 0.5 + 0.5 * torch.rand(shape, generator=self.random, dtype=torch.float64)
        signs = 2.0 * torch.randint(0, 2, shape, generator=self.random) - 1
        return self.size * sizes * signs

    def __call__(self, x):
        return x * (1 + self.errors(x.shape))

    def dot(self, x, W):
        terms = x.abs() @ W.abs().T
        return self(x @ W.T) + (self.errors(terms.shape) * terms * W.shape[1] ** 0.5).detach()


def normalised(fl, x, blocks, eps, scale, shift):
    """Return the layer normalisation of x [B, n] in blocks of n / blocks numbers, by torch's own function."""
    parts = x.reshape(len(x), blocks, -1)
    y = fl(fl(torch.nn.functional.layer_norm(parts, parts.shape[-1:], eps=eps)).reshape(x.shape))
    y = y if scale is None else fl(y * scale)
    return y if shift is None else fl(y + shift)


def clip(x, limit, gradient):
    """Return x within +-limit; its gradient is 0 where the clip changed x, or passes "through"."""
    if limit is None:
        return x
    return x.clamp(-limit, limit) if gradient == "zero" else x + (x.clamp(-limit, limit) - x).detach()


def one_step(cell, p, z, h_in, h, c, fl):
    """Run a step. Return (gates, h, c). p: the arrays of one direction. z [B, G H]: the input's part."""
    H, norm, product = z.shape[1] // cell.gates, cell.norm, fl.dot(h_in, p["Wh"])
    blocks = cell.gates if norm.gates == "each" else 1
    arrays = p.get("norm_scale"), p.get("norm_shift")
    if norm.of == "product":
        product = normalised(fl, product, blocks, norm.eps, *arrays)
    elif norm.of == "sum":
        z, product = normalised(fl, z + product, blocks, norm.eps, *arrays), torch.zeros_like(z)
    place = {gate: slice(k * H, (k + 1) * H) for k, gate in enumerate(cell.gate_order)}
    a, act = {gate: (z[:, at], product[:, at]) for gate, at in place.items()}, cell.activations
    if cell.op == "rnn":
        gate = fl(a["h"][0] + a["h"][1])
        return gate, fl(ACTS[act[0]](gate)), c
    if cell.op == "gru":
        r, u = (fl(ACTS[act[k]](fl(a[g][0] + a[g][1]))) for k, g in enumerate("rz"))
        q = a["n"][1] + p["bhn"] if "bhn" in p else a["n"][1]
        n = fl(ACTS[act[2]](fl(a["n"][0] + fl(r * q))))
        gates = {"r": r, "z": u, "n": n}
        old, new = (1 - u, u) if cell.flip_z else (u, 1 - u)
        return torch.cat([gates[g] for g in cell.gate_order], 1), fl(fl(old * h) + fl(new * n)), c

    def gate(name, k, seen):
        total = a[name][0] + a[name][1] + (cell.forget_bias if name == "f" else 0.0)
        return fl(ACTS[act[k]](fl(total + (p["peephole"][place[name]] * seen if "peephole" in p else 0.0))))

    i, f, g = (gate(name, k, c) for k, name in enumerate("ifg"))
    new = clip(fl(fl(f * c) + fl(i * g)), cell.cell_clip, cell.clip_gradient)
    shown = new
    if norm.c is not None:
        shown = normalised(fl, new, 1, norm.eps, p.get("norm_c_scale"), p.get("norm_c_shift"))
    new = shown if norm.c == "state" else new
    o = gate("o", 3, new if cell.output_peephole == "current" else c)
    gates = {"i": i, "f": f, "g": g, "o": o}
    h = fl(o * fl(ACTS[act[4]](shown)))
    if "Wp" in p:
        h = clip(fl.dot(h, p["Wp"]), cell.projection_clip, cell.clip_gradient)
    return torch.cat([gates[g] for g in cell.gate_order], 1), h, new


def side(arrays, d, D):
    """Return the arrays of direction d of D directions."""
    found = {}
    for name, array in arrays.items():
        if name in ("x", "lengths") or D == 1:
            found[name] = array
        elif name in ("Wx", "b", "bhn"):
            found[name] = array.reshape(D, -1, *array.shape[1:])[d]
        elif name.startswith(("Wh", "Wp", "peephole", "norm")):
            found[name] = array[d]
        else:
            found[name] = array.reshape(*array.shape[:-1], D, -1)[..., d, :]
    return found


def one_direction(cell, p, reverse, fl):
    """Run all steps of one direction. Return the outputs by name."""
    x, P, H = p["x"], p["Wh"].shape[-1], p["Wh"].shape[0] // cell.gates
    T, B = x.shape[:2]
    h = p.get("h0", torch.zeros(B, P, dtype=torch.float64))
    c = p.get("c0", torch.zeros(B, H, dtype=torch.float64))
    rows = {}
    for t in reversed(range(T)) if reverse else range(T):
        live = torch.ones(B, 1, dtype=torch.bool) if "lengths" not in p else (p["lengths"] > t)[:, None]
        keep = p["keep"][t] if "keep" in p else 1.0
        h_prev, c_prev = fl(h * keep), fl(c * keep)
        mask = p["mask"][t] if "mask" in p else 1.0
        z = fl.dot(torch.where(live, x[t], 0.0), p["Wx"])
        gates, h_new, c_new = one_step(cell, p, z + p["b"] if "b" in p else z, fl(h_prev * mask), h_prev, c_prev, fl)
        h, c = torch.where(live, h_new, h), torch.where(live, c_new, c)
        rows[t] = [torch.where(live, value, 0.0) for value in (h_new, c_new, gates)]
    h_all, c_all, gates = (torch.stack([rows[t][k] for t in range(T)]) for k in range(3))
    return {"h": h_all, "c": c_all, "gates": gates, "hT": h, "cT": c}


def evaluate(cell, arrays, cotangents, reverse=False, bidirectional=False, fl=None):
    """Return the outputs and, as d + name, the gradients of a call, as NumPy arrays."""
    fl, D = fl or Exact(), 2 if bidirectional else 1
    given = {name: torch.tensor(np.array(array)) for name, array in arrays.items()}
    for name in given.keys() - {"lengths"}:
        given[name] = given[name].double().requires_grad_()
    sides = [one_direction(cell, side(given, d, D), reverse or d == 1, fl) for d in range(D)]
    outputs = {name: torch.cat([each[name] for each in sides], -1) for name in cell.outputs}
    loss = sum((outputs[name] * torch.tensor(d).double()).sum() for name, d in cotangents.items())
    loss.backward()
    found = {name: value.detach().numpy() for name, value in outputs.items()}
    zeros = {name: np.zeros(value.shape) for name, value in given.items()}
    return found | {
        f"d{name}": zeros[name] if value.grad is None else value.grad.numpy()
        for name, value in given.items()
        if name != "lengths"
    }


def exact_and_bounds(cell, arrays, cotangents, dtype, **ways):
    """Return (exact results, error bounds): a bound is SAFETY times the largest change that random rounding errors of
    `dtype` make in any element of an array, plus one rounding of the result."""
    eps, gain = float_of(dtype).eps, 2.0**12 if dtype == "float32" else 1.0
    exact, changes = evaluate(cell, arrays, cotangents, **ways), []

    def bound(name, trials):
        while len(changes) < trials:
            moved = evaluate(cell, arrays, cotangents, fl=Rounded(eps, len(changes), gain), **ways)
            changes.append({name: np.abs(value - exact[name]).max(initial=0) / gain for name, value in moved.items()})
        largest = max(change[name] for change in changes)
        return eps * np.abs(exact[name]).max(initial=0) + SAFETY * largest

    return exact, {name: Bound(bound(name, FEW), partial(bound, name, TRIALS)) for name in exact}
