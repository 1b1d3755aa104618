"""Tests of the float64 oracle against finite differences, torch in float64, TensorFlow's block ops, and known
properties of the cells."""

from decimal import Decimal

import ml_dtypes
import numpy as np
import pytest
from assertions import assert_close, assert_within, bounds, keeps_off_kinks
from cases import BOTH, CELLS, OPTIONS, SIZES, combination, draw, draw_away_from_kinks, draw_cotangents

from mlx_lstm.lab.cases import EVERY_OPTION
from mlx_lstm.oracle import ARRAYS, OUTPUTS, activation_arguments, backward, clip_shift, forward, kink_distance
from mlx_lstm.oracle.arithmetic import ACTIVATIONS, SLOPES, Rounding
from mlx_lstm.oracle.closeness import FIRST, FLOATS, Noise, errors, errors_of_groups
from mlx_lstm.oracle.recurrence import KINKS

T, B, I, H, _ = SIZES
STEP = 1e-5


def check_gradients(case, cotangents):
    """Compare the oracle's gradients of sum(cotangent * output) with finite differences (fourth-order central
    differences), along a random direction for each array. A wrong element of a gradient changes its product with the
    direction."""
    through = case.get("clip_gradient") != "zero" and (case.get("cell_clip") or case.get("projection_clip"))
    frozen = clip_shift(**case) if through else None

    def loss(name, value):
        outputs = forward(**(case | {name: value}), frozen_clip=frozen)
        return sum(np.sum(cotangents[k] * outputs[k]) for k in outputs)

    gradients = backward(case, cotangents)
    assert set(gradients) == {name for name in ARRAYS if case.get(name) is not None}
    size = max(1.0, *(np.abs(value).max(initial=0) for value in forward(**case).values()))
    for name, gradient in gradients.items():
        direction = np.random.default_rng(np.size(case[name])).normal(size=np.shape(case[name]))
        far_below, below, above, far_above = (loss(name, case[name] + k * STEP * direction) for k in (-2, -1, 1, 2))
        expected = (8 * (above - below) - (far_above - far_below)) / (12 * STEP)
        # A finite difference has a rounding error of about 1e-11 of the loss and a smaller truncation error, of order
        # STEP**4. So a tolerance of 1e-8 is wide enough.
        assert_within(name, np.sum(gradient * direction), np.array(expected), 1e-8 * max(size, abs(expected)))


@pytest.mark.parametrize("option", OPTIONS | CELLS)
def test_gradients_by_finite_differences(option):
    check_gradients(*draw_away_from_kinks(1, **(OPTIONS | CELLS)[option]))


# Masks of a GRU and a plain RNN are those of one direction, and `test_gradients_of_random_combinations` joins them.
@pytest.mark.parametrize("option", [name for name in BOTH if name.startswith("lstm") or "_mask_" not in name])
def test_gradients_of_both_directions(option):
    check_gradients(*draw_away_from_kinks(1, **BOTH[option]))


@pytest.mark.parametrize("bidirectional", [False, True], ids=["one", "both"])
@pytest.mark.parametrize("op", OUTPUTS)
@pytest.mark.parametrize("seed", range(6))
def test_gradients_of_random_combinations(seed, op, bidirectional):
    options = combination(np.random.default_rng(seed), op=op, bidirectional=bidirectional)
    if options.get("norm"):  # near a variance of 0 a norm bends within sqrt(eps), which must be more than STEP
        options["norm"] = options["norm"]._replace(eps=0.1)
    check_gradients(*draw_away_from_kinks(seed, **options))


def test_both_directions_stand_side_by_side():
    """The results of a bidirectional run are the concatenated results of two runs, one per direction, as the
    documentation of the ops says."""
    rng = np.random.default_rng(3)
    pair = [draw(rng, projection=True, peephole=True, mask=(T, B, "P"), reverse=reverse) for reverse in (False, True)]
    pair[1]["x"] = pair[0]["x"]
    case = {"x": pair[0]["x"], "bidirectional": True}
    case |= {name: np.concatenate([one[name] for one in pair]) for name in ("Wx", "b")}
    case |= {name: np.stack([one[name] for one in pair]) for name in ("Wh", "Wp", "peephole")}
    case |= {name: np.concatenate([one[name] for one in pair], axis=-1) for name in ("h0", "c0", "mask")}
    got = forward(**case)
    for name, value in got.items():
        np.testing.assert_array_equal(value, np.concatenate([forward(**one)[name] for one in pair], axis=-1))
    cotangents = draw_cotangents(rng, got)
    halves = [{name: np.split(value, 2, axis=-1)[d] for name, value in cotangents.items()} for d in range(2)]
    expected = [backward(one, half) for one, half in zip(pair, halves, strict=True)]
    for name, value in backward(case, cotangents).items():
        ways = {"x": lambda parts: parts[0] + parts[1]} | dict.fromkeys(("Wh", "Wp", "peephole"), np.stack)
        ways |= dict.fromkeys(("Wx", "b"), np.concatenate)
        way = ways.get(name, lambda parts: np.concatenate(parts, axis=-1))
        np.testing.assert_array_equal(value, way([gradients[name] for gradients in expected]), err_msg=name)


@pytest.mark.parametrize("bidirectional", [False, True], ids=["one", "both"])
@pytest.mark.parametrize("lengths", [None, [4, 1, 3]], ids=["full", "packed"])
@pytest.mark.parametrize("name", ["lstm", "lstm_projection", "gru", "rnn_tanh", "rnn_relu"])
def test_equals_torch(name, lengths, bidirectional):
    """Outputs, and all gradients for cotangents of h, hT and cT, agree with torch in float64."""
    torch = pytest.importorskip("torch")
    torch_layer = pytest.importorskip("torch_layers").torch_layer
    options = {"bidirectional": bidirectional, "lengths": lengths, "dtype": torch.float64}
    case, cotangents, expected = torch_layer(name, (4, 3, 2, 5), **options)
    got = forward(**case) | backward(case, cotangents)
    assert set(expected) == set(got) - {"c", "gates"}
    for key, value in expected.items():
        assert_within(key, got[key], value, 1e-12)


@pytest.mark.parametrize("version", [1, 2])
def test_equals_tensorflow_block_lstm(version):
    """Outputs and gradients agree with TensorFlow's BlockLSTM ops, with peepholes, clip and forget bias.
    TensorFlow's gate orders icfo (version 1) and ifco (version 2) are called igfo and ifgo here."""
    ops = pytest.importorskip("tensorflow").raw_ops
    order, forget_bias = {1: ("igfo", 0.75), 2: ("ifgo", 0.0)}[version]
    rng = np.random.default_rng(3)
    case = draw(rng, peephole=True, dtype=np.float32, cell_clip=0.5, gate_order=order, forget_bias=forget_bias)
    block = {k: slice(n * H, (n + 1) * H) for n, k in enumerate(order)}
    case["peephole"][block["g"]] = 0  # TensorFlow's gate g (cell input) has no peephole
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
    expected["peephole"][block["g"]] = 0  # TensorFlow has no gradient for the missing peephole
    assert clip_shift(**case)["c"].any()
    for name, value in got.items():
        assert_within(name, np.asarray(value), expected[name], limit[name])


def test_equals_tensorflow_gru_block_cell():
    """A loop over time with TensorFlow's GRU cell gives the oracle's outputs and gradients. TensorFlow's cell
    applies the reset gate before the product, and its u is our z. The weight gradients of its steps must be summed
    over time."""
    ops = pytest.importorskip("tensorflow").raw_ops
    rng = np.random.default_rng(4)
    case = draw(rng, op="gru", reset="before", dtype=np.float32)
    W = np.concatenate([case["Wx"], case["Wh"]], axis=1).T
    weights = {"w_ru": W[:, : 2 * H], "w_c": W[:, 2 * H :], "b_ru": case["b"][: 2 * H], "b_c": case["b"][2 * H :]}
    dh, steps, h = rng.normal(size=(T, B, H)).astype(np.float32), [], case["h0"]
    for x in case["x"]:
        out = ops.GRUBlockCell(x=x, h_prev=h, **weights)._asdict()
        steps.append({"x": x, "h_prev": h} | out)
        h = out["h"]
    got = {"h": np.stack([s["h"] for s in steps]), "hT": h}
    got["gates"] = np.stack([np.concatenate([s[k] for k in "ruc"], axis=1) for s in steps])
    got |= {"x": np.zeros_like(case["x"]), "Wx": 0, "Wh": 0, "b": 0}
    carry = 0
    for t, s in reversed(list(enumerate(steps))):
        back = ops.GRUBlockCellGrad(**{k: v for k, v in s.items() if k != "h"}, **weights, d_h=dh[t] + carry)
        got["x"][t], carry = back.d_x, back.d_h_prev
        da = np.concatenate([back.d_r_bar_u_bar, back.d_c_bar], axis=1)
        seen = np.concatenate([s["h_prev"], s["h_prev"], s["r"] * s["h_prev"]], axis=1)
        got["Wx"] += da.T @ s["x"]
        got["Wh"] += np.concatenate([da[:, k].T @ seen[:, k] for k in np.split(np.arange(3 * H), 3)])
        got["b"] += da.sum(axis=0)
    got["h0"] = carry
    expected, limit = forward(**case) | backward(case, {"h": dh}), bounds(case, np.float32, {"h": dh})
    assert set(got) == set(expected)
    for name, value in got.items():
        assert_within(name, np.asarray(value), expected[name], limit[name])


def test_sigmoid_has_all_its_digits():
    """The oracle's sigmoid and its slope agree with decimal arithmetic. The sigmoid is computed from e = exp(-|x|) and
    may have four rounding errors: two of e, one of 1 + e, and one of the quotient."""
    x = np.linspace(-700, 40, 1481)
    exact = np.array([float(1 / (1 + (-Decimal(value)).exp())) for value in x.tolist()])
    s = ACTIVATIONS["sigmoid"](x, Rounding(np.float64))
    assert_within("sigmoid", s / exact, np.ones_like(x), 4 * 2.0**-53)
    s, exact = s[x < 0], exact[x < 0]  # without x >= 0, where 1 - s loses digits by cancellation
    slope = SLOPES["sigmoid"](s, Rounding(np.float64))
    assert_within("slope", slope / (exact * (1 - exact)), np.ones_like(s), 16 * 2.0**-53)


@pytest.mark.parametrize("reset", ["after", "before"])
def test_flip_z_is_an_update_gate_of_the_other_sign(reset):
    """The option `flip_z` exchanges the roles of z and 1 - z in a GRU: h = z n + (1 - z) h instead of (1 - z) n + z
    h. With `flip_z` and negated weights of the gate z, h is the same, because sigmoid(-a) = 1 - sigmoid(a)."""
    case = draw(np.random.default_rng(5), op="gru", reset=reset, mask=(B, "P"))
    sign = np.repeat([1.0, -1.0, 1.0], H)
    negated = {"Wx": case["Wx"] * sign[:, None], "Wh": case["Wh"] * sign[:, None], "b": case["b"] * sign}
    assert_within("h", forward(**(case | negated), flip_z=True)["h"], forward(**case)["h"], 1e-15)


def test_mask_of_a_gru_is_on_what_enters_the_products_only():
    """A GRU's mask applies only to the h that enters the matrix products. With z = 1, h is the unmasked previous h;
    with z = 0, h is the candidate computed from the masked previous h."""
    case = draw(np.random.default_rng(6), op="gru", mask=(B, "P"), activations=("sigmoid", "hard_sigmoid", "identity"))
    for bias, reset in ((1e3, "after"), (-1e3, "after"), (-1e3, "before")):
        case |= {"b": np.repeat([1e3, bias, 0.0], H), "bhn": None, "reset": reset}  # the bias 1e3 makes r = 1
        h_prev = np.concatenate([case["h0"][None], forward(**case)["h"][:-1]])
        candidate = case["x"] @ case["Wx"][2 * H :].T + (h_prev * case["mask"]) @ case["Wh"][2 * H :].T
        assert_within("h", forward(**case)["h"], h_prev if bias > 0 else candidate, 1e-12)


@pytest.mark.parametrize("bidirectional", [False, True], ids=["reverse", "both"])
@pytest.mark.parametrize("op", OUTPUTS)
def test_padding_is_never_read(op, bidirectional):
    rng = np.random.default_rng(0)
    reverse = not bidirectional
    case = draw(rng, op=op, mask=(T, B, "P"), lengths=[3, 0], reverse=reverse, bidirectional=bidirectional)
    cotangents = draw_cotangents(rng, forward(**case))
    clean = forward(**case) | backward(case, cotangents)
    sequences = [name for name in OUTPUTS[op] if name not in ("hT", "cT")]
    for array in (case["x"], case["mask"], *(cotangents[name] for name in sequences)):
        array[3:, 0], array[:, 1] = np.nan, np.nan
    for name, value in (forward(**case) | backward(case, cotangents)).items():
        np.testing.assert_array_equal(value, clean[name], err_msg=name)
    assert not any(clean[name][:, 1].any() or clean[name][3:, 0].any() for name in (*sequences, "x", "mask"))
    np.testing.assert_array_equal(clean["hT"][1], case["h0"][1])
    np.testing.assert_array_equal(clean["h0"][1], cotangents["hT"][1])


@pytest.mark.parametrize("direction", [{}, {"reverse": True}, {"bidirectional": True}], ids=str)
@pytest.mark.parametrize("op", OUTPUTS)
def test_lengths_equal_items_run_alone(op, direction):
    case = draw(np.random.default_rng(1), op=op, **direction)
    together = forward(**case, lengths=[3, 1])
    for n, length in enumerate([3, 1]):
        one = {name: case[name][n : n + 1] for name in ("h0", "c0") if name in case}
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


def test_unknown_arguments_are_refused():
    for op, name in (("gru", "c0"), ("rnn", "bhn"), ("lstm", "reset"), ("gru", "cell_clip"), ("lstm", "Wy")):
        with pytest.raises(TypeError, match=name):
            forward(**draw(np.random.default_rng(0), op=op), **{name: np.zeros((B, H))})


@pytest.mark.parametrize("op, options", [("lstm", {"peephole": True, "projection": True}), ("gru", {}), ("rnn", {})])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_closeness(dtype, op, options):
    """The error bounds accept results that the oracle's own formula gives when it is computed in the tested dtype.
    They refuse wrong values, shapes, dtypes and NaN."""
    rng = np.random.default_rng(11)
    case = draw(rng, op=op, mask=(B, "P"), dtype=dtype, bidirectional=op != "lstm", **options)
    cotangents = {name: value.astype(dtype) for name, value in draw_cotangents(rng, forward(**case)).items()}
    ref = forward(**case) | backward(case, cotangents)
    same = forward(**case, dtype=dtype) | backward(case, cotangents, dtype=dtype)
    limit = bounds(case, dtype, cotangents)
    eps = float(ml_dtypes.finfo(dtype).eps)
    for name, value in same.items():
        assert value.dtype == dtype
        assert_close(name, value, value, ref[name])
        assert_within(name, value, ref[name], limit[name])
        assert limit[name] < 200 * eps * np.abs(ref[name]).max(), name
    h = same["h"]
    for wrong in (h + np.array(100 * eps, dtype), np.full_like(h, np.nan), h[1:]):
        with pytest.raises(AssertionError, match="h: "):
            assert_within("h", wrong, ref["h"], limit["h"])
        with pytest.raises(AssertionError, match="h: "):
            assert_close("h", wrong, h, ref["h"])
    with pytest.raises(AssertionError, match="dtype"):
        assert_close("h", h.astype(np.longdouble), h, ref["h"])


def test_floats_are_those_of_the_dtypes():
    for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16):
        info = ml_dtypes.finfo(dtype)
        assert FLOATS[np.dtype(dtype).name] == (info.eps, info.tiny, info.smallest_subnormal)


def test_bounds_allow_both_ways_to_blend():
    """The error bounds accept two formulas in float32, z a + (1 - z) b and b + z (a - b). They accept both even
    where z is near 1 and a is much smaller than b."""
    rng = np.random.default_rng(8)
    z = np.concatenate([rng.uniform(size=500), 1 - rng.uniform(size=500) * 1e-3]).astype(np.float32)
    a, b = (scale * rng.normal(size=1000).astype(np.float32) for scale in (np.float32(0.01), np.float32(3)))
    exact = z.astype(np.float64) * a + (1 - z.astype(np.float64)) * b
    largest = np.max(
        [
            np.abs(Noise(np.float32, seed, False).blend(*(n.astype(np.float64) for n in (z, a, b))) - exact)
            for seed in range(8)
        ],
        axis=0,
    )
    for way in (z * a + (1 - z) * b, b + z * (a - b)):
        assert (np.abs(way - exact) <= 4 * largest).all()


@pytest.mark.parametrize("K", [1, 100, 10000])
def test_the_error_of_a_sum_grows_with_the_root_of_its_length(K):
    """The oracle's random rounding moves a dot product of K equal terms by at most about sqrt(K) rounding errors of
    the accumulator and one rounding error of the dtype. Both are relative to the sum."""
    for seed in range(20):
        noise = Noise(np.float32, seed, False)
        moved = abs(noise.dot(np.ones((1, K)), np.ones((K, 1))).item() - K) / K
        assert moved <= 1.01 * (np.sqrt(K) * noise.accumulator_unit + noise.unit)
        assert K < 100 or moved >= (np.sqrt(K) / 2 - 1) * noise.accumulator_unit


def test_the_error_of_quantized_weights_grows_with_their_groups():
    """`errors_of_groups` returns the error that a product with quantized weights may have. A group of n weights adds
    sqrt(n + 4) roundings, here sqrt(32 + 4) = 6, of a sum over its x: the sum of all positive x or the sum of all
    negative x, whichever is larger. If half of the x are negative, this sum is half as large. Errors of groups add up
    like independent random errors, so 4 groups have twice the error of 1."""
    for groups, sign, largest in ((1, 1, 32), (4, 1, 2 * 32), (4, -1, 32)):
        a = np.where(np.arange(32 * groups) % 2, 1.0, sign)[None]
        factors = np.zeros((32 * groups, 3))
        factors[::32] = 1.0
        np.testing.assert_allclose(errors_of_groups(a, factors), np.full((1, 3), 6.0 * largest))
        assert errors_of_groups(np.ones((1, 3)), factors.T) == 0


@pytest.mark.parametrize("activation", [name for name in KINKS if name != "clip"])
def test_kinks_are_as_near_as_rounding_comes(activation):
    """A kink is a point where an activation's slope jumps, such as 0 for relu. `keeps_off_kinks` returns False for a
    sum that rounding can move across a kink: a sum whose terms nearly cancel, or a sum right next to the kink."""
    case = {"op": "rnn", "activation": activation, "Wx": np.ones((1, 2)), "Wh": np.zeros((1, 1))}

    def keeps_off(dtype, *terms):
        return keeps_off_kinks(case | {"x": np.array([[terms]], np.float64)}, dtype)

    for kink in KINKS[activation]:
        assert kink_distance(**case, x=np.array([[[2.0**24, 0.5 + kink - 2.0**24]]])) == 0.5
        assert not keeps_off(np.float32, 2.0**24, 0.5 + kink - 2.0**24)  # near 2**24 float32 rounds by up to 1
        assert keeps_off(np.float64, 2.0**18, 0.5 + kink - 2.0**18) and keeps_off(np.float32, 8, 0.5 + kink - 8)
        for dtype in (np.float32, np.float16):
            eps = max(kink, 1) * np.finfo(dtype).eps
            assert kink == 0 or not keeps_off(dtype, kink - eps, 0)
            assert keeps_off(dtype, kink - 100 * eps, 0)
    assert keeps_off(np.float16, 0, 0)


def test_a_clip_that_stops_gradients_has_kinks_at_its_limit():
    """`kink_distance` and `keeps_off_kinks` measure how near c and a projected h come to the limit of their clip, if
    the clip stops gradients."""
    rng = np.random.default_rng(5)
    case = draw(rng, projection=True, cell_clip=0.4, projection_clip=0.2)
    assert kink_distance(**case) == np.inf
    clips = [argument for name, argument in activation_arguments(**case, clip_gradient="zero") if name == "clip"]
    assert len(clips) == 2 * T
    nearest = min(np.abs(np.abs(argument) - 1).min() for argument in clips)
    assert kink_distance(**case, clip_gradient="zero") == nearest
    c = forward(**{name: value for name, value in case.items() if "clip" not in name})["c"][0, 0, 0]
    for limit in (abs(c), abs(c) * (1 - 2.0**-24)):
        at_limit = case | {"cell_clip": limit, "clip_gradient": "zero"}
        assert not keeps_off_kinks(at_limit, np.float32)


@pytest.mark.parametrize("systematic", [False, True])
def test_kept_errors_are_those_of_a_generator(systematic):
    """The random errors of a trial are those of one generator with the trial's seed, also behind those that are kept.
    A systematic trial repeats them at each time step."""
    noise, size = Noise("float32", 3, systematic), FIRST // 2 + 1
    expected = errors(np.random.default_rng(3), 4 * size)
    for start in (0, 0 if systematic else 2):
        for part in (start, start + 1):
            wanted = 2.0 * expected[part * size : (part + 1) * size]
            np.testing.assert_array_equal(noise.move(np.full(size, 2.0)), wanted)
        noise.start_step()
    assert ((np.abs(expected) >= 0.5) & (np.abs(expected) <= 1)).all() and len(set(np.sign(expected))) == 2


def test_the_named_options_differ_from_the_default():
    """An option that was off in the table of options would be tested nowhere, and no test would fail."""
    assert [name for name, options in EVERY_OPTION.items() if False in options.values()] == []
