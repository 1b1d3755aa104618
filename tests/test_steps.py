"""Tests of the options `keep` (a factor on the previous state) and `hold` (a step that leaves the state unchanged).
They are compared with loops of torch's cells, used inside MLX's transformations, and tested with NaN in values that
must not be read."""

from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from assertions import assert_within
from cases import KINDS, draw, draw_cotangents, run, run_gradients, split, to_mlx, to_numpy
from kernel_calls import usual_call
from on_metal import matrices_from, on_metal

import mlx_lstm.nn
import mlx_lstm.torch
from mlx_lstm import gru, lstm, lstm_gradients, recurrence, rnn
from mlx_lstm.engines import METAL_ENGINES
from mlx_lstm.oracle import forward

CPU_ENGINES = ("numpy", "ops")
T, B, I, H = 7, 3, 4, 5
SIZES = (T, B, I, H, H)


def resets(rng):
    """Return random factors [T, B] for the option `keep`: mostly 1 (keep the state), sometimes 0 (reset it) or 0.6."""
    return rng.choice([1.0, 1.0, 0.0, 0.6], (T, B))


def held(rng):
    """Return a bool array [T, B] that says which steps are held: some steps of the first sequence, all steps of the
    second, and the last steps of the third."""
    return np.stack([rng.random(T) < 0.5, np.ones(T, bool), np.arange(T) > 3], axis=1)


def cell_of_torch(op, case):
    """Return (torch's cell with the weights of the case, a dict of all tensors that receive gradients)."""
    torch = pytest.importorskip("torch")
    G = {"lstm": 4, "gru": 3, "rnn": 1}[op]
    cell = {"lstm": torch.nn.LSTMCell, "gru": torch.nn.GRUCell, "rnn": torch.nn.RNNCell}[op](I, H, dtype=torch.float64)
    bhn = np.concatenate([np.zeros((G - 1) * H), case["bhn"]]) if op == "gru" else np.zeros(G * H)
    given = {"Wx": cell.weight_ih, "Wh": cell.weight_hh, "b": cell.bias_ih, "bhn": cell.bias_hh}
    with torch.no_grad():
        for name, tensor in given.items():
            tensor.copy_(torch.tensor(bhn if name == "bhn" else case[name]))
    more = {name: torch.tensor(case[name], requires_grad=True) for name in ("x", "h0", "c0", "keep") if name in case}
    return cell, given | more


def loop_of_torch(op, case, cotangents):
    """Return (outputs, gradients) of the loop that users write with torch: multiply the state by keep, run the cell,
    restore the state where hold is set."""
    torch = pytest.importorskip("torch")
    cell, tensors = cell_of_torch(op, case)
    state = [tensors[name] for name in ("h0", "c0") if name in tensors]
    steps = range(T)[::-1] if case.get("reverse") else range(T)
    hold = torch.tensor(np.asarray(case.get("hold", np.zeros((T, B), bool))))
    sequences = {}
    for t in steps:
        before = [part * tensors["keep"][t][:, None] for part in state]
        new = cell(tensors["x"][t], tuple(before) if op == "lstm" else before[0])
        new = new if op == "lstm" else (new,)
        state = [torch.where(hold[t][:, None], old, fresh) for old, fresh in zip(before, new, strict=True)]
        sequences[t] = state
    outputs = {name: torch.stack([sequences[t][n] for t in range(T)]) for n, name in enumerate("hc"[: len(state)])}
    outputs |= {f"{name}T": last for name, last in zip("hc", state, strict=False)}
    sum((value * torch.tensor(cotangents[name])).sum() for name, value in outputs.items()).backward()
    gradients = {name: tensor.grad.numpy() for name, tensor in tensors.items()}
    gradients["bhn"] = gradients["bhn"][-H:]
    return {name: value.detach().numpy() for name, value in outputs.items()}, gradients


@pytest.mark.parametrize("holds", [False, True], ids=["resets", "resets and holds"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("op", ["lstm", "gru", "rnn"])
def test_equals_a_loop_of_torch(op, reverse, holds):
    """Outputs and gradients, including the gradient of keep, agree with a loop of torch's cell on both CPU engines."""
    rng = np.random.default_rng(3)
    case = draw(rng, op=op, sizes=SIZES, reverse=reverse) | {"keep": resets(rng)}
    case |= {"hold": held(rng)} if holds else {}
    cotangents = draw_cotangents(rng, forward(**case))
    del cotangents["gates"]
    outputs, gradients = loop_of_torch(op, case, cotangents)
    for engine in CPU_ENGINES:
        found = run(case, engine, np.float64, cotangents)
        for name, value in (found[0] | found[1]).items():
            assert_within(name, value, (outputs | gradients)[name], 1e-13 * 64)


@pytest.mark.parametrize("engine", CPU_ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_read_at_held_steps(engine, kind):
    """Values that must not be read may be NaN, and all results stay the same bit for bit. At held steps these values
    are x, masks and the cotangent of gates. After the end of a sequence they are the values of all arrays. The gates
    are 0 at all these steps."""
    rng = np.random.default_rng(0)
    options = {"hold": held(rng), "lengths": [T - 1, T, 5], "keep": True, "mask": (T, B, "P"), **KINDS[kind]}
    case = draw(rng, sizes=SIZES, **options)
    assert_same_if_spoilt(engine, case, draw_cotangents(rng, forward(**case)), np.float64)


# The kernels of test_kernel_paths.py.
@pytest.mark.parametrize(
    "engine, row, B",
    [(engine, *of) for engine in METAL_ENGINES for of in (("lstm", 9), ("gru", 3), ("rnn", 9))],
)
def test_nothing_is_read_at_held_steps_on_metal(engine, row, B):
    hold = np.arange(T * B).reshape(T, B) % 3 == 1
    drawn = usual_call(engine, row, (T, B, 2, 12, 13), dtype=np.float32, bidirectional=row == "gru", hold=hold)
    with on_metal(), matrices_from(9):
        assert_same_if_spoilt(engine, *drawn, np.float32)


def assert_same_if_spoilt(engine, case, cotangents, dtype):
    hold, ended = np.asarray(case["hold"]), np.arange(T)[:, None] >= case["lengths"]
    clean = run(case, engine, dtype, cotangents), run_gradients(case, engine, dtype, cotangents)
    for array in (case["x"], case["mask"], cotangents["gates"]):
        array[hold | ended] = np.nan
    for array in (case["keep"], *(cotangents[name] for name in ("h", "c") if name in cotangents)):
        array[ended] = np.nan
    spoilt = run(case, engine, dtype, cotangents), run_gradients(case, engine, dtype, cotangents)
    for before, after in zip((*clean[0], clean[1]), (*spoilt[0], spoilt[1]), strict=True):
        for name in before:
            np.testing.assert_array_equal(before[name], after[name], err_msg=name)
    assert not spoilt[0][0]["gates"][hold | ended].any()


def test_what_may_be_given():
    """keep may be bool, integers or floats of another dtype, may broadcast, and may have an axis for the directions.
    hold may be an array or a list of bool or integers, also an array of NumPy that is reversed or has another byte
    order."""
    rng = np.random.default_rng(1)
    case = draw(rng, sizes=SIZES, dtype=np.float32)
    _, arrays, _ = split(case)
    arrays = {name: to_mlx(array, np.float32) for name, array in arrays.items()}
    done = rng.random((T, B)) < 0.4
    with mx.stream(mx.cpu):
        whole = lstm(**arrays, keep=mx.array(1 - done.astype(np.float32)), hold=mx.array(done)).h
        for keep in (
            ~mx.array(done),
            mx.array(1 - done),
            mx.array(1 - done, mx.float16),
            mx.array(1 - done)[..., None],
        ):
            for hold in (done, done.astype(int).tolist(), done[::-1].copy()[::-1], done.astype(">i4")):
                assert mx.array_equal(lstm(**arrays, keep=keep, hold=hold).h, whole)
        for axis, shape in ((0, (1, B)), (1, (T, 1))):
            one = mx.array(rng.random(shape), mx.float32)
            whole = lstm(**arrays, keep=mx.broadcast_to(one, (T, B))).h
            assert mx.array_equal(lstm(**arrays, keep=one).h, whole), axis
        gradients = lstm_gradients(**arrays, keep=~mx.array(done), **saved(arrays, ~mx.array(done)))
        assert "keep" not in gradients and gradients["x"].any()


@pytest.mark.parametrize("shown", ("h", "hT"))
@pytest.mark.parametrize("op", ("lstm", "rnn"))
def test_the_gradient_needs_no_saved_h(op, shown):
    """`lstm_gradients` and `rnn_gradients` with keep and hold give the same without h, which follows from the gates."""
    case = draw(np.random.default_rng(4), sizes=SIZES, dtype=np.float32, op=op)
    _, arrays, _ = split(case)
    rng = np.random.default_rng(5)
    arrays = {name: to_mlx(array, np.float32) for name, array in arrays.items()}
    arrays |= {"keep": to_mlx(rng.normal(size=(T, B)), np.float32), "hold": mx.array(rng.random((T, B)) < 0.5)}
    with mx.stream(mx.cpu):
        out = getattr(recurrence, op)(**arrays, return_gates=True)
        given = {"gates": out.gates, f"d{shown}": to_mlx(rng.normal(size=getattr(out, shown).shape), np.float32)}
        given |= {"c": out.c} if op == "lstm" else {}
        whole, without = (
            getattr(recurrence, f"{op}_gradients")(**arrays, **given, **more) for more in ({"h": out.h}, {})
        )
    assert whole["keep"].any()
    for name, gradient in whole.items():
        np.testing.assert_allclose(np.array(without[name]), np.array(gradient), rtol=0, atol=1e-5, err_msg=name)


def saved(arrays, keep):
    """Return the arguments of `lstm_gradients` besides the op's own arrays: the saved gates, c and h, and a
    cotangent of ones for h."""
    out = lstm(**arrays, keep=keep, return_gates=True)
    return {"gates": out.gates, "c": out.c, "h": out.h, "dh": mx.ones_like(out.h)}


def test_each_direction_has_its_own_keep():
    rng = np.random.default_rng(2)
    case = draw(rng, sizes=SIZES, keep=True, bidirectional=True, dtype=np.float64)
    sides = [{name: case[name][d] for name in ("Wh",)} for d in range(2)]
    for d, side in enumerate(sides):
        side |= {name: np.split(case[name], 2)[d] for name in ("Wx", "b")} | {
            "x": case["x"],
            "keep": case["keep"][..., d],
        }
        side |= {name: np.split(case[name], 2, axis=-1)[d] for name in ("h0", "c0")} | {"reverse": d == 1}
    both = run(case, "numpy", np.float64)[0]["h"]
    for d, side in enumerate(sides):
        np.testing.assert_array_equal(np.split(both, 2, axis=-1)[d], run(side, "numpy", np.float64)[0]["h"])


@pytest.mark.parametrize("op", [lstm, gru, rnn])
def test_inside_transformations(op):
    """mx.compile of the gradient and mx.vmap over x, keep and hold give the results of plain calls."""
    rng = np.random.default_rng(4)
    case = draw(rng, op=op.__name__, sizes=SIZES, dtype=np.float32)
    _, arrays, _ = split(case)
    x, others = arrays.pop("x"), {name: to_mlx(array, np.float32) for name, array in arrays.items()}
    given = [to_mlx(x, np.float32), mx.array(resets(rng), mx.float32), mx.array(held(rng))]

    def loss(x, keep, hold):
        return (mx.sin(op(x, **others, keep=keep, hold=hold, training=True).h)).sum()

    with mx.stream(mx.cpu):
        plain, gradients = mx.value_and_grad(loss, argnums=(0, 1))(*given)
        compiled, found = mx.compile(mx.value_and_grad(loss, argnums=(0, 1)))(*given)
        np.testing.assert_allclose(compiled.item(), plain.item(), rtol=1e-5)
        for got, expected in zip(found, gradients, strict=True):
            np.testing.assert_allclose(np.array(got), np.array(expected), rtol=1e-4, atol=1e-5)
        pairs = [mx.stack([array, array[::-1]]) for array in given]
        rows = mx.vmap(loss)(*pairs)
        np.testing.assert_allclose(rows[0].item(), plain.item(), rtol=1e-5)
        np.testing.assert_allclose(rows[1].item(), loss(*(array[::-1] for array in given)).item(), rtol=1e-5)


def test_an_export_has_them(tmp_path):
    rng = np.random.default_rng(5)
    _, arrays, _ = split(draw(rng, sizes=SIZES, dtype=np.float32))
    x, others = arrays.pop("x"), {name: to_mlx(array, np.float32) for name, array in arrays.items()}
    given = [to_mlx(x, np.float32), mx.array(resets(rng), mx.float32), mx.array(held(rng))]
    path = str(tmp_path / "steps.mlxfn")
    with mx.stream(mx.cpu):
        call = lambda x, keep, hold: lstm(x, **others, keep=keep, hold=hold, training=False).h  # noqa: E731
        mx.export_function(path, call, *given)
        np.testing.assert_allclose(np.array(mx.import_function(path)(*given)[0]), to_numpy(call(*given)), atol=1e-6)


@pytest.mark.parametrize("word", ["lstm", "gru_gradients"])
def test_what_is_refused(word):
    """A wrong `keep` (factors on the state before each step) or `hold` (steps that leave the state as it is) raises
    ValueError. The message names the argument."""
    G = {"lstm": 4, "gru": 3}[word.removesuffix("_gradients")]
    arrays = {"x": mx.zeros((T, B, I)), "Wx": mx.zeros((G * H, I)), "Wh": mx.zeros((G * H, H))}
    if G == 3:
        arrays |= {"gates": mx.zeros((T, B, 3 * H)), "h": mx.zeros((T, B, H))}
    for name, value, rule in [
        ("keep", mx.ones((B, T)), f"keep must broadcast to [T, B] = [{T}, {B}] but got shape [{B}, {T}]."),
        ("keep", mx.ones((T,)), f"keep must broadcast to [T, B] = [{T}, {B}] but got shape [{T}]."),
        ("keep", mx.ones((T, B, 2)), f"keep must broadcast to [T, B] = [{T}, {B}] but got shape [{T}, {B}, 2]."),
        ("keep", mx.ones((T, B), mx.complex64), "keep must be real, an integer or bool but got mlx.core.complex64."),
        ("keep", np.ones((T, B)), "keep must be an mlx.core.array: make one by mx.array(...), but got ndarray."),
        ("hold", mx.ones((T + 1, B), mx.bool_), f"hold must broadcast to [T, B] = [{T}, {B}] but got shape [8, {B}]."),
        ("hold", mx.ones((T, B)), "hold must be bool or integers but got mlx.core.float32."),
        ("keep", ~mx.zeros((T, B), mx.int32), "keep of integers must be 0 and 1 (for ~ use a bool array)"),
        ("hold", ~mx.zeros((T, B), mx.int32), "hold of integers must be 0 and 1 (for ~ use a bool array)"),
        ("hold", [[-2] * B] * T, "hold of integers must be 0 and 1 (for ~ use a bool array)"),
        ("hold", True, "hold must be an mlx.core.array but got bool."),
        ("hold", [[1, 0], [1]], "hold must be bool or integers, in rows of equal length, but got [[1, 0], [1]]."),
        ("hold", [["no"]], "hold must be bool or integers, in rows of equal length, but got [['no']]."),
    ]:
        with pytest.raises(ValueError) as error:
            getattr(recurrence, word)(**arrays, **{name: value})
        assert str(error.value).startswith(f"[{word}] {rule}")


EVERY_LAYER = {
    "nn.LSTM": lambda: (mlx_lstm.nn.LSTM(I, H), lambda out: out[0]),
    "nn.GRU": lambda: (mlx_lstm.nn.GRU(I, H), lambda out: out),
    "nn.RNN": lambda: (mlx_lstm.nn.RNN(I, H), lambda out: out),
    "nn.stack": lambda: (
        partial(mlx_lstm.nn.stack, [mlx_lstm.nn.LSTM(I, H), mlx_lstm.nn.LSTM(H, H)]),
        lambda out: out[0],
    ),
    "torch.LSTM": lambda: (mlx_lstm.torch.LSTM(I, H, num_layers=2, batch_first=True, proj_size=3), lambda out: out[0]),
    "torch.GRU": lambda: (mlx_lstm.torch.GRU(I, H, batch_first=True), lambda out: out[0]),
    "torch.RNN": lambda: (mlx_lstm.torch.RNN(I, H, num_layers=2, batch_first=True), lambda out: out[0]),
}


@pytest.mark.parametrize("name", EVERY_LAYER)
def test_layers_refuse_by_their_own_names(name):
    """The error message of a layer begins with the name of the layer, not with the name of the op that the layer
    calls."""
    layer = EVERY_LAYER[name]()[0]
    wrong = {"keep": mx.ones((B, T), mx.complex64), "hold": mx.ones((B, T))}
    if "nn" not in name or "stack" in name:
        wrong |= {"lengths": [T + 1, 1, 1]}
    for word, value in wrong.items():
        with pytest.raises(ValueError, match=rf"^\[{name}\] {word} must "):
            layer(mx.zeros((B, T, I)), **{word: value})


@pytest.mark.parametrize("name", EVERY_LAYER)
def test_layers(name):
    """In every layer, a sequence with a reset gives the results of two separate sequences, and a held step repeats
    the output of the step before. Layers that accept x without a batch axis or with two batch axes are also called
    with such an x."""
    layer, output_of = EVERY_LAYER[name]()
    x = mx.random.normal((B, T, I), key=mx.random.key(0))
    keep, hold = mx.ones((B, T), mx.bool_), mx.zeros((B, T), mx.bool_)
    keep[1, 3], hold[2, 2:4] = False, True
    with mx.stream(mx.cpu):
        found, plain = output_of(layer(x, keep=keep, hold=hold)), output_of(layer(x))
        anew = output_of(layer(x[:, 3:]))
        without = output_of(layer(mx.concatenate([x[:, :2], x[:, 4:]], axis=1)))
        expected = {0: plain[0], 1: mx.concatenate([plain[1, :3], anew[1]])}
        expected[2] = mx.concatenate([without[2, :2], mx.stack([without[2, 1]] * 2), without[2, 2:]])
        for item, rows in expected.items():
            np.testing.assert_allclose(np.array(found[item]), np.array(rows), rtol=1e-5, atol=1e-6)
            alone = output_of(layer(x[item], keep=keep[item], hold=hold[item])) if "stack" not in name else None
            if alone is not None:
                np.testing.assert_allclose(np.array(alone), np.array(rows), rtol=1e-5, atol=1e-6)
        if "nn" in name:
            many = output_of(layer(mx.stack([x] * 2), keep=mx.stack([keep] * 2), hold=mx.stack([hold] * 2)))
            np.testing.assert_allclose(np.array(many[1]), np.array(found), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"keep must broadcast to .* = \[3, 7\] but got shape \[7, 3\]"):
        layer(x, keep=keep.T)
