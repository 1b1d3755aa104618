"""An sLSTM in float64 without its state m, and random calls with extreme input gates to compare with it.

The states of a step are sums over the earlier steps of the episode. So h is a softmax over these steps:
h_t = sigmoid(o_t) sum over s of softmax_s(w_s) tanh(z_s), where w_s = i_s + the sum of log sigmoid(f) after step s. The
largest w_s is m. torch computes the gradients.
"""

import numpy as np
import torch
from torch.nn.functional import logsigmoid

EXTREMES = (-1000.0, -300.0, -100.0, -50.0, 0.0, 50.0, 1000.0)


def draw_extreme(rng, sizes, lengths):
    """Return random (case, cotangents) of a call of sLSTM that begins at zero states. Many preactivations of the
    input gate are extreme. `keep` resets some sequences in the middle."""
    T, B, H = sizes
    case = {"x": rng.normal(size=(T, B, 4 * H)), "Wh": rng.normal(size=(4 * H, H)) / np.sqrt(H)}
    case["x"][..., :H] += rng.choice(EXTREMES, (T, B, H))
    case |= {"h0": np.zeros((B, H)), "c0": np.zeros((B, 3 * H)), "keep": (rng.random((T, B, 1)) < 0.7).astype(float)}
    case = {name: array.astype(np.float32).astype(np.float64) for name, array in case.items()} | {"reverse": False}
    if lengths:
        case["lengths"] = rng.integers(0, T + 1, B)
    shapes = {"h": (T, B, H), "hT": (B, H), "cT": (B, 3 * H)}
    return case, {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def slstm_by_softmax(case, cotangents):
    """Return the outputs h, hT and cT, and the gradients of x and Wh, by name."""
    x, Wh = (torch.tensor(case[name], requires_grad=True) for name in ("x", "Wh"))
    T, B, H = len(x), x.shape[1], Wh.shape[1]
    outputs, last = torch.zeros(T, B, H, dtype=x.dtype), torch.zeros(4, B, H, dtype=x.dtype)
    outputs, last = list(outputs.unbind(1)), list(last.unbind(1))
    for b in range(B):
        h, w, z_seen, hs = torch.zeros(H, dtype=x.dtype), [], [], []
        for t in range(case["lengths"][b] if "lengths" in case else T):
            if case["keep"][t, b, 0] == 0:  # the episode begins again
                h, w, z_seen = torch.zeros(H, dtype=x.dtype), [], []
            i, f, z, o = (x[t, b] + h @ Wh.T).split(H)
            w = [earlier + logsigmoid(f) for earlier in w] + [i]
            z_seen = [*z_seen, torch.tanh(z)]
            h = torch.sigmoid(o) * (torch.softmax(torch.stack(w), 0) * torch.stack(z_seen)).sum(0)
            hs.append(h)
            m = torch.stack(w).max(0).values
            scaled = torch.exp(torch.stack(w) - m)
            last[b] = torch.stack([h, (scaled * torch.stack(z_seen)).sum(0), scaled.sum(0), m])
        outputs[b] = torch.stack([*hs, *[torch.zeros(H, dtype=x.dtype)] * (T - len(hs))])
    last = torch.stack(last, 1)
    found = {"h": torch.stack(outputs, 1), "hT": last[0], "cT": torch.cat(list(last[1:]), -1)}
    loss = sum((found[name] * torch.tensor(d, dtype=x.dtype)).sum() for name, d in cotangents.items())
    loss.backward()
    outputs = {name: array.detach().numpy() for name, array in found.items()}
    return outputs | {"dx": x.grad.numpy(), "dWh": Wh.grad.numpy()}
