"""The judge judged: finite differences, PyTorch in float64, TensorFlow's block ops, and properties stated in words."""

import ml_dtypes
import numpy as np
import pytest
from cases import OPTIONS, OUTPUTS, SIZES, combination, draw, draw_away_from_kinks, draw_cotangents

from mlx_lstm.closeness import assert_close, assert_within, bounds
from mlx_lstm.oracle import ARRAYS, backward, clip_shift, forward

T, B, I, H, _ = SIZES
STEP = 1e-5


def finite_differences(case, cotangents):
    """Gradients of sum(cotangent * output) by fourth-order central differences, one element at a time."""
    frozen = clip_shift(**case) if case.get("cell_clip") else None

    def loss(name, value):
        outputs = forward(**(case | {name: value}), frozen_clip=frozen)
        return sum(np.sum(cotangents[k] * outputs[k]) for k in OUTPUTS)

    gradients = {}
    for name in (n for n in ARRAYS if case.get(n) is not None):
        gradients[name] = np.zeros(np.shape(case[name]))
        for index in np.ndindex(gradients[name].shape):
            at = [case[name].copy() if np.ndim(case[name]) else np.array(case[name]) for _ in range(4)]
            for value, shift in zip(at, (-2, -1, 1, 2), strict=True):
                value[index] += shift * STEP
            far_below, below, above, far_above = (loss(name, value) for value in at)
            gradients[name][index] = (8 * (above - below) - (far_above - far_below)) / (12 * STEP)
    return gradients


def check_gradients(case, cotangents):
    got, expected = backward(case, cotangents), finite_differences(case, cotangents)
    assert set(got) == set(expected)
    size = max(1.0, *(np.abs(value).max(initial=0) for value in forward(**case).values()))
    for name in expected:
        # Rounding of the loss over STEP is about 1e-11 of its size; truncation, STEP**4, is below that.
        assert_within(name, got[name], expected[name], 1e-8 * max(size, np.abs(expected[name]).max(initial=0)))


@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_by_finite_differences(option):
    check_gradients(*draw_away_from_kinks(1, **OPTIONS[option]))


@pytest.mark.parametrize("seed", range(40))
def test_gradients_of_random_combinations(seed):
    check_gradients(*draw_away_from_kinks(seed, **combination(np.random.default_rng(seed))))


@pytest.mark.parametrize("projection", [False, True], ids=["plain", "projection"])
@pytest.mark.parametrize("lengths", [None, [4, 1, 3]], ids=["full", "packed"])
def test_equals_torch(lengths, projection):
    """Both directions of a bidirectional torch.nn.LSTM: outputs, and all gradients from h, hT and cT."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    rng = np.random.default_rng(7)
    T, B, I, H = 4, 3, 2, 5
    P = 4 if projection else H
    layer = torch.nn.LSTM(I, H, bidirectional=True, proj_size=P if projection else 0, dtype=torch.float64)
    leaf = lambda *shape: torch.tensor(rng.normal(size=shape), requires_grad=True)  # noqa: E731
    x, h0, c0 = leaf(T, B, I), leaf(2, B, P), leaf(2, B, H)
    pack, unpack = torch.nn.utils.rnn.pack_padded_sequence, torch.nn.utils.rnn.pad_packed_sequence
    y, (hT, cT) = layer(x if lengths is None else pack(x, lengths, enforce_sorted=False), (h0, c0))
    h = y if lengths is None else unpack(y, total_length=T)[0]
    dh, dhT, dcT = (rng.normal(size=value.shape) for value in (h, hT, cT))
    torch.autograd.backward([h, hT, cT], [torch.tensor(value) for value in (dh, dhT, dcT)])

    names = {"Wx": "weight_ih", "Wh": "weight_hh", "b": "bias_ih"} | ({"Wp": "weight_hr"} if projection else {})
    dx = 0
    for d, suffix in enumerate(["", "_reverse"]):
        side = slice(d * P, (d + 1) * P)
        weights = {ours: getattr(layer, f"{theirs}_l0{suffix}") for ours, theirs in names.items()}
        b = weights["b"] + getattr(layer, f"bias_hh_l0{suffix}")
        arrays = weights | {"x": x, "b": b, "h0": h0[d], "c0": c0[d]}
        case = {name: value.detach().numpy() for name, value in arrays.items()}
        case |= {"reverse": d == 1, "lengths": lengths}
        got = forward(**case) | backward(case, {"h": dh[..., side], "hT": dhT[d], "cT": dcT[d]})
        expected = {"h": h[..., side], "hT": hT[d], "cT": cT[d], "h0": h0.grad[d], "c0": c0.grad[d]}
        expected |= {name: value.grad for name, value in weights.items()}
        for name, value in expected.items():
            assert_within(name, got[name], value.detach().numpy(), 1e-12)
        dx = dx + got["x"]
    assert_within("x", dx, x.grad.numpy(), 1e-12)


@pytest.mark.parametrize("version", [1, 2])
def test_equals_tensorflow_block_lstm(version):
    """Peephole, clip and forget bias, forward and gradient; its icfo (V1) and ifco (V2) are igfo and ifgo here."""
    ops = pytest.importorskip("tensorflow").raw_ops
    order, forget_bias = {1: ("igfo", 0.75), 2: ("ifgo", 0.0)}[version]
    rng = np.random.default_rng(3)
    case = draw(rng, peephole=True, dtype=np.float32, cell_clip=0.5, gate_order=order, forget_bias=forget_bias)
    block = {k: slice(n * H, (n + 1) * H) for n, k in enumerate(order)}
    case["peephole"][block["g"]] = 0  # the cell input has no peephole
    args = {"seq_len_max": T, "x": case["x"], "cs_prev": case["c0"], "h_prev": case["h0"], "b": case["b"]}
    args |= {"w": np.concatenate([case["Wx"], case["Wh"]], axis=1).T, "use_peephole": True}
    args |= {f"wc{k}": case["peephole"][block[k]] for k in "ifo"}
    dh, dc = (rng.normal(size=(T, B, H)).astype(np.float32) for _ in "hc")
    if version == 1:
        out = ops.BlockLSTM(**args, cell_clip=0.5, forget_bias=forget_bias)._asdict()
        grad = ops.BlockLSTMGrad(**args, **out, cs_grad=dc, h_grad=dh)
    else:
        out = ops.BlockLSTMV2(**args, cell_clip=0.5)._asdict()
        grad = ops.BlockLSTMGradV2(**args, **out, cs_grad=dc, h_grad=dh)

    gates = {"i": out["i"], "f": out["f"], "g": out["ci"], "o": out["o"]}
    peepholes = {"i": grad.wci_grad, "f": grad.wcf_grad, "g": np.zeros(H), "o": grad.wco_grad}
    got = {"h": out["h"], "c": out["cs"], "gates": np.concatenate([gates[k] for k in order], axis=-1)}
    got |= {"x": grad.x_grad, "Wx": grad.w_grad[:I].numpy().T, "Wh": grad.w_grad[I:].numpy().T, "b": grad.b_grad}
    got |= {"h0": grad.h_prev_grad, "c0": grad.cs_prev_grad, "peephole": np.concatenate([peepholes[k] for k in order])}
    expected, limit = forward(**case) | backward(case, {"h": dh, "c": dc}), bounds(case, np.float32, {"h": dh, "c": dc})
    expected["peephole"][block["g"]] = 0  # and so no such gradient
    assert clip_shift(**case).any()
    for name, value in got.items():
        assert_within(name, np.asarray(value), expected[name], limit[name])


def test_padding_is_never_read():
    rng = np.random.default_rng(0)
    case = draw(rng, mask=(T, B, "P"), lengths=[3, 0], reverse=True)
    cotangents = draw_cotangents(rng, forward(**case))
    clean = forward(**case) | backward(case, cotangents)
    for array in (case["x"], case["mask"], *(cotangents[name] for name in ("h", "c", "gates"))):
        array[3:, 0], array[:, 1] = np.nan, np.nan
    for name, value in (forward(**case) | backward(case, cotangents)).items():
        np.testing.assert_array_equal(value, clean[name], err_msg=name)
    assert not any(clean[name][:, 1].any() or clean[name][3:, 0].any() for name in ("h", "c", "gates", "x", "mask"))
    np.testing.assert_array_equal(clean["hT"][1], case["h0"][1])
    np.testing.assert_array_equal(clean["c0"][1], cotangents["cT"][1])


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_lengths_equal_items_run_alone(reverse):
    case = draw(np.random.default_rng(1), reverse=reverse)
    together = forward(**case, lengths=[3, 1])
    for n, length in enumerate([3, 1]):
        one = {name: case[name][n : n + 1] for name in ("h0", "c0")}
        alone = forward(**(case | one | {"x": case["x"][:length, n : n + 1]}))
        for name, value in alone.items():
            got = together[name][n : n + 1] if name in ("hT", "cT") else together[name][:length, n : n + 1]
            assert_within(name, got, value, 1e-15)


def test_kinks_and_no_time_steps():
    case = draw(
        np.random.default_rng(2),
        projected_x=True,
        activations=("relu", "hard_sigmoid", "identity", "hard_sigmoid", "identity"),
    )
    case |= {
        "x": np.repeat([0.0, 2.5, 1.0, -2.5], H)[None, None] * np.ones((1, B, 1)),
        "b": None,
        "Wh": np.zeros((4 * H, H)),
    }
    dx = backward(case, {"gates": np.ones((1, B, 4 * H))})["x"]
    np.testing.assert_array_equal(dx, np.repeat([0.0, 0.0, 1.0, 0.0], H)[None, None] * np.ones((1, B, 1)))
    empty = draw(np.random.default_rng(2)) | {"x": np.zeros((0, B, I))}
    np.testing.assert_array_equal(forward(**empty)["hT"], empty["h0"])
    np.testing.assert_array_equal(backward(empty, {"cT": np.ones((B, H))})["c0"], np.ones((B, H)))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_closeness(dtype):
    """The same formula in the dtype is within the derived bounds; wrong values, shapes, dtypes and NaN are not."""
    rng = np.random.default_rng(11)
    case = draw(rng, peephole=True, mask=(B, "P"), projection=True, dtype=dtype)
    cotangents = {name: value.astype(dtype) for name, value in draw_cotangents(rng, forward(**case)).items()}
    ref = forward(**case) | backward(case, cotangents)
    same = forward(**case, dtype=dtype) | backward(case, cotangents, dtype=dtype)
    limit = bounds(case, dtype, cotangents)
    eps = float(ml_dtypes.finfo(dtype).eps)
    for name, value in same.items():
        assert value.dtype == dtype
        assert_close(name, value, value, ref[name])
        assert_within(name, value, ref[name], limit[name])
        assert limit[name] < 100 * eps * np.abs(ref[name]).max(), name
    h = same["h"]
    for wrong in (h + np.array(100 * eps, dtype), np.full_like(h, np.nan), h[1:]):
        with pytest.raises(AssertionError, match="h: "):
            assert_within("h", wrong, ref["h"], limit["h"])
        with pytest.raises(AssertionError, match="h: "):
            assert_close("h", wrong, h, ref["h"])
    with pytest.raises(AssertionError, match="dtype"):
        assert_close("h", h.astype(np.longdouble), h, ref["h"])
