"""Every argument of `lstm` given wrongly: a ValueError that names op, argument, rule and value, before any work."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_lstm import engine_numpy, engine_ops, lstm

T, B, I, H, P = 3, 2, 4, 5, 6
RIGHT = {
    "x": (T, B, I),
    "Wx": (4 * H, I),
    "Wh": (4 * H, P),
    "b": (4 * H,),
    "h0": (B, P),
    "c0": (B, H),
    "peephole": (4 * H,),
    "mask": (B, P),
    "Wp": (P, H),
}

WRONG_SHAPES = {
    "x": [(T, B), (T, B, I + 1), (0, B, I), (T, 0, I), (T, B, 0), (T, B, I, 1)],
    "Wx": [(4 * H,), (4 * H, I + 1), (4 * H + 4, I), (I, 4 * H)],
    "Wh": [(4 * H,), (4 * H + 1, P), (4 * H, P + 1), (0, P), (4 * H, 0)],
    "b": [(4 * H, 1), (4 * H - 1,), (H,)],
    "h0": [(B,), (B + 1, P), (B, H), (1, B, P)],
    "c0": [(H,), (B, P), (B, H + 1)],
    "peephole": [(4, H), (3 * H,)],
    "mask": [(B + 1, P), (T + 1, B, P), (B, H), (1, T, B, P), (T, B)],
    "Wp": [(P,), (H, P), (P + 1, H)],
}
BAD_VALUES = [
    ("gate_order", "ifog2", "permutation"),
    ("gate_order", "iifg", "permutation"),
    ("gate_order", "IFGO", "permutation"),
    ("gate_order", None, "permutation"),
    ("activations", "tanh", "five names"),
    ("activations", ("tanh",) * 4, "five names"),
    ("activations", ("tanh",) * 4 + ("softsign",), "softsign"),
    ("activations", ("tanh",) * 4 + (None,), "None"),
    ("output_peephole", "next", "'current', 'previous'"),
    ("cell_clip", -1.0, "greater than 0"),
    ("cell_clip", 0, "greater than 0"),
    ("cell_clip", float("nan"), "finite"),
    ("cell_clip", "3", "finite number"),
    ("forget_bias", float("inf"), "finite"),
    ("forget_bias", None, "finite number"),
    ("forget_bias", True, "finite number"),
    ("reverse", 1, "True or False"),
    ("return_gates", "yes", "True or False"),
    ("training", None, "True or False"),
    ("lengths", [1], "shape"),
    ("lengths", [[1, 2]], "integers"),
    ("lengths", [T + 1, 1], r"lengths\[0\] = 4"),
    ("lengths", [1, -1], r"lengths\[1\] = -1"),
    ("lengths", [1.0, 2.0], "integers"),
    ("lengths", [True, False], "integers"),
    ("lengths", mx.array([1.0, 2.0]), "integers"),
    ("lengths", mx.array([[1, 2]]), "shape"),
    ("lengths", np.array([0, 9]), r"lengths\[1\] = 9"),
    ("lengths", 3, "integers"),
    ("engine", "gpu", "one of"),
    ("engine", "", "one of"),
    ("engine", 1, "one of"),
]


@pytest.fixture
def no_work(monkeypatch):
    """An engine that runs at all fails the test."""

    def refuse(*_):
        raise AssertionError("work was done before the arguments were checked")

    for engine in (engine_numpy, engine_ops):
        monkeypatch.setattr(engine, "forward", refuse)


def arguments(**changed):
    return {name: mx.zeros(shape) for name, shape in RIGHT.items()} | changed


def refused(**changed):
    with pytest.raises(ValueError, match=r"^\[lstm\] .* but got .*\.$") as error:
        lstm(**arguments(**changed))
    return str(error.value)


def test_right_arguments_are_taken():
    assert lstm(**arguments()).h.shape == (T, B, P)


@pytest.mark.parametrize("name, shape", [(name, shape) for name, shapes in WRONG_SHAPES.items() for shape in shapes])
def test_wrong_shape(no_work, name, shape):
    message = refused(**{name: mx.zeros(shape)})
    assert str(list(shape)) in message or "shape" in message
    # Sizes are read off x and Wh, so that another array's name may come up for these two.
    assert name in ("x", "Wh") or f"] {name} must" in message


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("dtype", [mx.int32, mx.bool_, mx.float16, mx.complex64], ids=str)
def test_wrong_dtype(no_work, name, dtype):
    with mx.stream(mx.cpu):
        message = refused(**{name: mx.zeros(RIGHT[name], dtype)})
    assert "dtype" in message or "must be float32" in message
    assert str(dtype).split(".")[-1] in message or name == "x"


@pytest.mark.parametrize("name", [name for name in RIGHT if name not in ("x", "Wh")])
@pytest.mark.parametrize("value", [np.zeros(3), 1.0, [0.0], "none"], ids=lambda value: type(value).__name__)
def test_not_an_mlx_array(no_work, name, value):
    message = refused(**{name: value})
    assert f"] {name} must be an mlx.core.array but got {type(value).__name__}." in message


@pytest.mark.parametrize("name", ["x", "Wh"])
def test_what_may_not_be_absent(no_work, name):
    assert f"] {name} must be an mlx.core.array but got NoneType." in refused(**{name: None})


@pytest.mark.parametrize("name, value, rule", BAD_VALUES, ids=lambda value: str(value)[:24])
def test_bad_value(no_work, name, value, rule):
    with pytest.raises(ValueError, match=rule) as error:
        lstm(**arguments(**{name: value}))
    assert str(error.value).startswith(f"[lstm] {name}") and " but got " in str(error.value)


def test_projected_input_must_be_4H_wide(no_work):
    assert "[T, B, 4H = 20]" in refused(Wx=None, x=mx.zeros((T, B, 4 * H + 4)))


def test_without_a_projection_Wh_is_square(no_work):
    assert "[4H, H]" in refused(Wp=None)


def test_a_mask_must_not_enlarge_the_batch(no_work):
    assert "mask must broadcast" in refused(x=mx.zeros((T, 1, I)), h0=None, c0=None, mask=mx.zeros((B, P)))


def test_a_forced_engine_that_cannot_run():
    rest = {name: value for name, value in arguments(Wp=None, mask=None).items() if name not in ("Wh", "h0")}
    with pytest.raises(ValueError, match="engine='numpy' cannot run: inside mx"):
        mx.compile(lambda Wh: lstm(Wh=Wh, **rest, engine="numpy").h)(mx.zeros((4 * H, H)))
