"""Tests that every op rejects wrong arguments: before any work it raises a ValueError that names the op, the
argument, the rule and the value."""

from fractions import Fraction
from inspect import signature

import mlx.core as mx
import numpy as np
import pytest

from mlx_lstm import convert, gru, lstm, oracle, pointwise, recurrence, rnn
from mlx_lstm.engines.numpy import sweep as engine_numpy
from mlx_lstm.engines.ops import sweep as engine_ops

T, B, I, H, P = 3, 2, 4, 5, 6
GATES = {"lstm": 4, "gru": 3, "rnn": 1}
SAVED = {"lstm": ("gates", "c", "h"), "gru": ("gates", "h"), "rnn": ("h", "gates")}
OUTPUTS = {"lstm": ("h", "c", "gates", "hT", "cT"), "gru": ("h", "gates", "hT"), "rnn": ("h", "gates", "hT")}
OPS = [*GATES, *(f"{op}_gradients" for op in GATES)]
KINDS = [(op, both) for op in OPS for both in (False, True)]


def right(word, both=False):
    """Return {name: correct shape} for every array argument of the op called `word`. `both` means that the op is
    bidirectional."""
    op = word.removesuffix("_gradients")
    G, D, own, width = GATES[op], 2 if both else 1, (2,) if both else (), P if op == "lstm" else H
    shapes = {"x": (T, B, I), "Wx": (D * G * H, I), "Wh": (*own, G * H, width), "b": (D * G * H,)}
    shapes |= {"h0": (B, D * width), "mask": (B, D * width)}
    if op == "lstm":
        shapes |= {"c0": (B, D * H), "peephole": (*own, 4 * H), "Wp": (*own, P, H)}
    if op == "gru":
        shapes["bhn"] = (D * H,)
    if word != op:
        kept = {"h": (T, B, D * width), "c": (T, B, D * H), "gates": (T, B, D * G * H)}
        kept |= {"hT": (B, D * width), "cT": (B, D * H)}
        shapes |= {name: kept[name] for name in SAVED[op]} | {f"d{name}": kept[name] for name in OUTPUTS[op]}
    return shapes


def arguments(word, both=False, **changed):
    return {name: mx.zeros(shape) for name, shape in right(word, both).items()} | {"bidirectional": both} | changed


def call(word, both=False, **changed):
    return getattr(recurrence, word)(**arguments(word, both, **changed))


def refused(word, both=False, **changed):
    with pytest.raises(ValueError, match=rf"^\[{word}\] .* but got .*\.$") as error:
        call(word, both, **changed)
    return str(error.value)


def wrong_shapes(word, both):
    """Yield pairs (array name, wrong shape). There are three kinds of wrong shapes: one axis is missing or added; one
    axis is empty or longer by 1; the shape is that of an op with the other number of directions."""
    other = right(word, not both)
    for name, shape in right(word, both).items():
        shapes = [shape[1:], (1, *shape), other[name]]
        shapes += [(*shape[:n], size + 1, *shape[n + 1 :]) for n, size in enumerate(shape)]
        shapes += [(*shape[:n], 0, *shape[n + 1 :]) for n in range(len(shape))]
        # A mask may be broadcast and may have a time axis, so some of the shapes above are correct for a mask. This
        # list replaces them.
        if name == "mask":
            shapes = [
                (B + 1, shape[1]),
                (B, shape[1] + 1),
                (B, 0),
                (T + 1, *shape),
                (1, T, *shape),
                (T, B),
                other[name],
            ]
        free = {(T + 1, B, I)} if name == "x" and word in GATES else set()
        for wrong in dict.fromkeys(shapes):
            if wrong != shape and wrong not in free:
                yield name, wrong


@pytest.fixture
def no_work(monkeypatch):
    """Make the test fail if an engine runs, because arguments must be checked before any work."""

    def refuse(*_):
        raise AssertionError("work was done before the arguments were checked")

    for engine in (engine_numpy, engine_ops):
        for name in ("forward", "backward"):
            monkeypatch.setattr(engine, name, refuse)


@pytest.mark.parametrize("word, both", KINDS)
def test_right_arguments_are_taken(word, both):
    found = call(word, both)
    if word in GATES:
        assert found.h.shape == (T, B, right(word, both)["h0"][1])
    else:
        arrays = set(right(word.removesuffix("_gradients")))
        assert {name: gradient.shape for name, gradient in found.items()} == {n: right(word, both)[n] for n in arrays}


@pytest.mark.parametrize("word, both", KINDS)
def test_wrong_shape(no_work, word, both):
    """A wrong shape raises an error that names the array. A wrong x or Wh may be reported under another array's
    name, because all sizes are taken from x and Wh."""
    for name, shape in wrong_shapes(word, both):
        message = refused(word, both, **{name: mx.zeros(shape)})
        assert "shape" in message, (name, shape)
        if name not in ("x", "Wh"):
            assert f"] {name} must" in message and str(list(shape)) in message, (name, shape, message)
            assert name == "mask" or str(list(right(word, both)[name])) in message


@pytest.mark.parametrize("word", GATES)
def test_states_of_another_batch_say_what_the_axes_of_x_are(no_work, word):
    h0 = right(word)["h0"]
    message = refused(word, h0=mx.zeros((T, h0[1])))
    assert f"h0 must have shape {list(h0)}, as x is [time, batch, features] = {[T, B, I]}, but got" in message


@pytest.mark.parametrize("word, name", [(word, name) for word in OPS for name in right(word)])
def test_wrong_dtype(no_work, word, name):
    for dtype in (mx.int32, mx.bool_, mx.float16, mx.complex64):
        with mx.stream(mx.cpu):
            message = refused(word, **{name: mx.zeros(right(word)[name], dtype)})
        assert "dtype" in message or "must be float32" in message
        assert str(dtype).split(".")[-1] in message or name == "x"


@pytest.mark.parametrize("word, name", [(word, name) for word in OPS for name in right(word)])
def test_not_an_mlx_array(no_work, word, name):
    make, unpack = ": make one by mx.array(...),", ": pass the tuple's arrays one by one,"
    if name == "x":
        unpack = ": of what an LSTM returns pass h, or run all layers by mlx_lstm.nn.stack,"
    packed, wrap = mx.quantize(mx.zeros((1, 32)), 32, 8), ": of what mx.quantize returns make an mlx_lstm.Quantized("
    wrap += "*..., group_size=..., bits=...),"
    given = [(np.zeros(3), make), ([0.0], make), ((1, 2), unpack), (packed, wrap), (tuple(packed), wrap)]
    for value, instead in [*given, ([], make), ((), unpack), (1.0, ""), ("none", "")]:
        message = refused(word, **{name: value})
        assert f"] {name} must be an mlx.core.array{instead} but got {type(value).__name__}." in message


MUST_BE_GIVEN = [(word, name) for word in OPS for name in ("x", "Wh")]
MUST_BE_GIVEN += [
    ("lstm_gradients", "gates"),
    ("lstm_gradients", "c"),
    ("gru_gradients", "gates"),
    ("gru_gradients", "h"),
]


@pytest.mark.parametrize("word, name", MUST_BE_GIVEN)
def test_what_may_not_be_absent(no_work, word, name):
    assert f"] {name} must be an mlx.core.array but got NoneType." in refused(word, **{name: None})


def test_h_may_be_absent_where_it_can_be_made_of_the_rest(no_work):
    assert "] h or gates must be given but got None." in refused("rnn_gradients", h=None, gates=None)
    assert "] h must be given where there is a projection" in refused("lstm_gradients", h=None)
    square = {"Wh": mx.zeros((4 * H, H)), "Wp": mx.zeros((H, H))}
    square |= {name: mx.zeros((B, H)) for name in ("h0", "mask", "dhT")} | {"dh": mx.zeros((T, B, H)), "h": None}
    assert "] h must be given where there is a projection" in refused("lstm_gradients", **square)


@pytest.mark.parametrize("word", ["lstm", "gru", "rnn", "lstm_gradients", "gru_gradients", "rnn_gradients"])
def test_one_direction_or_both(no_work, word):
    """`reverse` chooses the only direction, so with both directions it would change nothing."""
    assert "] reverse must be False with bidirectional=True" in refused(word, reverse=True, bidirectional=True)


EVERY_OP = [
    ("reverse", 1, "True or False"),
    ("bidirectional", "both", "True or False"),
    ("lengths", [1], "shape"),
    ("lengths", [[1, 2]], "integers"),
    ("lengths", [T + 1, 1], r"lengths\[0\] = 4"),
    ("lengths", [1, -1], r"lengths\[1\] = -1"),
    ("lengths", [2**70, 1], r"lengths\[0\] = 1180591620717411303424"),
    ("lengths", [1, -(2**70)], r"lengths\[1\] = -1180591620717411303424"),
    ("lengths", np.array([1, 2**63], np.uint64), r"lengths\[1\] = 9223372036854775808"),
    ("lengths", [1.0, 2.0], "integers"),
    ("lengths", [True, False], "integers"),
    ("lengths", mx.array([1.0, 2.0]), "integers"),
    ("lengths", mx.array([[1, 2]]), "shape"),
    ("lengths", np.array([0, 9]), r"lengths\[1\] = 9"),
    ("lengths", 3, "integers"),
    ("engine", "gpu", "one of"),
    ("engine", "", "one of"),
    ("engine", 1, "one of"),
    ("stream", "cpu", "a stream or a device of MLX"),
    ("stream", [mx.cpu], "a stream or a device of MLX"),
]
FORWARD = [("return_gates", "yes", "True or False"), ("training", None, "True or False")]
BAD_VALUES = {
    "lstm": [
        ("gate_order", "ifog2", "permutation"),
        ("gate_order", "iifg", "permutation"),
        ("gate_order", "IFGO", "permutation"),
        ("gate_order", None, "permutation"),
        ("activations", "tanh", "five names"),
        ("activations", ("tanh",) * 4, "five names"),
        ("activations", ("tanh",) * 4 + ("softsign",), "softsign"),
        ("activations", ("tanh",) * 4 + (None,), "None"),
        ("output_peephole", "next", "'current', 'previous'"),
    ],
    "gru": [
        ("gate_order", "ifgo", "permutation of 'rzn'"),
        ("gate_order", "rz", "permutation of 'rzn'"),
        ("gate_order", ("r", "z", "n"), "permutation of 'rzn'"),
        ("activations", ("tanh",) * 5, "three names"),
        ("activations", "sigmoid", "three names"),
        ("activations", ("tanh", "tanh", "gelu"), "gelu"),
        ("reset", True, "'after', 'before'"),
        ("reset", "before", "bhn must be None with reset='before'"),
        ("flip_z", 0, "True or False"),
    ],
    "rnn": [
        ("activation", "softplus", "softplus"),
        ("activation", ("tanh",), "one of 'identity'"),
        ("activation", None, "None"),
    ],
}
OF_LSTM_ALONE = [
    ("cell_clip", float("nan"), "finite"),
    ("cell_clip", 10**400, "finite"),
    ("cell_clip", "3", "finite number"),
    ("cell_clip", np.bool_(True), "finite number"),
    ("projection_clip", float("inf"), "finite"),
    ("projection_clip", "3", "finite number"),
    ("clip_gradient", "clip", "'through', 'zero'"),
    ("clip_gradient", None, "'through', 'zero'"),
    ("forget_bias", -(10**400), "finite"),
    ("forget_bias", float("inf"), "finite"),
    ("forget_bias", None, "finite number"),
    ("forget_bias", True, "finite number"),
]
CASES = [(word, *row) for word in OPS for row in EVERY_OP + BAD_VALUES[word.removesuffix("_gradients")]]
CASES += [(word, *row) for word in GATES for row in FORWARD] + [("lstm", *row) for row in OF_LSTM_ALONE]


@pytest.mark.parametrize("word, name, value, rule", CASES, ids=lambda value: str(value)[:24])
def test_bad_value(no_work, word, name, value, rule):
    with pytest.raises(ValueError, match=rule) as error:
        call(word, **{name: value})
    assert str(error.value).startswith((f"[{word}] {name}", f"[{word}] bhn")) and " but got " in str(error.value)


def test_numbers_of_any_type():
    one = np.float32(1), np.float64(1), np.float16(1), np.int64(1), Fraction(1)
    expected = call("lstm", cell_clip=1.0, forget_bias=1.0)
    for number in one:
        got = call("lstm", cell_clip=number, forget_bias=number)
        assert mx.array_equal(got.h, expected.h) and mx.array_equal(got.c, expected.c)


@pytest.mark.parametrize("none", [0, -0.0, -1, np.float32(-3), None])
def test_a_clip_of_0_or_less_is_none(none):
    """A `cell_clip` of 0, below 0, or None means that the cell state is not clipped, as in TensorFlow's block ops."""
    arrays = {name: 3 * mx.random.normal(shape) for name, shape in right("lstm").items()}
    got, clipped = (recurrence.lstm(**arrays, cell_clip=clip) for clip in (none, 1.0))
    assert mx.array_equal(got.c, recurrence.lstm(**arrays).c) and mx.abs(got.c).max() > 1 == mx.abs(clipped.c).max()
    case = {name: np.array(array) for name, array in arrays.items()}
    np.testing.assert_array_equal(oracle.forward(**case, cell_clip=none)["c"], oracle.forward(**case)["c"])


def test_a_projection_clip_needs_a_projection():
    """A `projection_clip` without `Wp` raises an error, unless it is 0 or less, which means none."""
    arrays = {name: mx.zeros(shape) for name, shape in (("x", (2, 1, 3)), ("Wx", (16, 3)), ("Wh", (16, 4)))}
    recurrence.lstm(**arrays, projection_clip=-1)
    with pytest.raises(ValueError, match=r"^\[lstm\] projection_clip must be None without a projection Wp but got 2"):
        recurrence.lstm(**arrays, projection_clip=2)
    with pytest.raises(ValueError, match=r"^\[from_ops\] projection_clip must be None without a projection but got 2"):
        convert.from_ops("lstm", [{name: arrays[name] for name in ("Wx", "Wh")}], projection_clip=2)


def test_a_list_s_range_is_checked_inside_a_transformation():
    op = mx.compile(lambda x: call("lstm", x=x, lengths=[2**70, 1]).h)
    with pytest.raises(ValueError, match=r"\[lstm\] lengths must lie in 0..3 but got lengths\[0\]"):
        op(mx.zeros((T, B, I)))


WIDTHS = [("lstm", False, "4H"), ("lstm", True, "8H"), ("gru", False, "3H"), ("gru", True, "6H")]
WIDTHS += [("rnn", False, "H"), ("rnn", True, "2H")]


@pytest.mark.parametrize("word, both, width", WIDTHS)
def test_projected_input_is_as_wide_as_the_gates(no_work, word, both, width):
    size = GATES[word] * H * (1 + both)
    assert f"[T, B, {width} = {size}]" in refused(word, both, Wx=None, x=mx.zeros((T, B, size + 1)))
    assert f"[T, B, {width} = {size}]" in refused(word, both, Wx=None, x=mx.zeros((T, B, size // 2)))


def test_without_a_projection_Wh_is_square(no_work):
    assert "[4H, H]" in refused("lstm", Wp=None)
    assert "[2, 4H, H]" in refused("lstm", True, Wp=None)
    assert "[3H, H]" in refused("gru", Wh=mx.zeros((3 * H, P)))
    assert "[2, H, H]" in refused("rnn", True, Wh=mx.zeros((2, P, H)))


@pytest.mark.parametrize("word, both", KINDS)
def test_a_mask_must_not_enlarge_the_batch(no_work, word, both):
    sequences = [name for name, shape in right(word, both).items() if shape[:2] == (T, B)]
    one = {name: mx.zeros((T, 1, right(word, both)[name][2])) for name in sequences}
    states = dict.fromkeys(name for name in ("h0", "c0", "dhT", "dcT") if name in right(word, both))
    message = refused(word, both, **one, **states)
    assert "mask must broadcast to [B, " in message and f"[{T}, 1, " in message


@pytest.mark.needs_mx_compile
@pytest.mark.parametrize("word", GATES)
def test_a_forced_engine_that_cannot_run(word):
    rest = {name: value for name, value in arguments(word).items() if name not in ("Wh", "h0", "Wp", "mask")}
    op = getattr(recurrence, word)
    with pytest.raises(ValueError, match=rf"\[{word}\] engine='numpy' cannot run: inside mx"):
        mx.compile(lambda Wh: op(Wh=Wh, **rest, engine="numpy").h)(mx.zeros((GATES[word] * H, H)))


@pytest.mark.parametrize("op", [lstm, gru, rnn, pointwise], ids=lambda op: op.__name__)
def test_defaults_are_the_same_in_every_function(op):
    """A call trains, in one forward direction, on the best engine, and returns no gates."""
    defaults = {"training": True, "reverse": False, "bidirectional": False, "return_gates": False, "engine": None}
    defaults |= dict.fromkeys(("lengths", "keep", "hold", "mask", "norm", "checkpoint_every", "stream"))
    found = {name: each.default for name, each in signature(op).parameters.items() if name in defaults}
    assert found == {name: defaults[name] for name in found}
    assert len(found) == len(defaults) - (op is pointwise)  # which has no gates to return
