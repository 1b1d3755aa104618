"""Tests of `mlx_lstm.cudnn`: values and gradients against torch and jax, the parameter buffer, dropout, array
layouts and errors."""

from itertools import product

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from assertions import assert_within
from cases import to_mlx, to_numpy
from cudnn_cases import INPUTS, MODES, OUTPUTS, by_oracle, by_torch, draw, draw_for, lengths_of, ours, torch_arrays
from on_metal import ENGINES as METAL_ENGINES
from on_metal import can_run, in_turns, on_metal
from test_peers import FAST

from mlx_lstm import cudnn, rnn
from mlx_lstm.convert.cudnn import GATES, layer_arrays
from mlx_lstm.cudnn._buffer import Attributes, layout
from mlx_lstm.cudnn._stack import dropout_factors
from mlx_lstm.oracle.closeness import exact_and_bounds


def assert_double(got, expected):
    """Assert that all arrays in `got` are float64 and close to `expected`. They may differ by 1e-12 times max(1, the
    largest expected element)."""
    for name, value in expected.items():
        assert got[name].dtype == np.float64 and got[name].shape == value.shape, name
        limit = 1e-12 * max(1.0, np.abs(value).max())
        np.testing.assert_allclose(got[name], value, rtol=0, atol=limit, err_msg=name)


@pytest.mark.parametrize(
    "seeds, engine",
    in_turns([(range(k, k + 12),) for k in range(0, 96, 12)], [None, "ops"], others=True),
    ids=lambda value: str(value[0]) if isinstance(value, range) else value or "default",
)
def test_float64_equals_torch(seeds, engine):
    """All outputs and gradients of random cases equal torch's in float64, up to rounding. The cases have all modes,
    1 to 4 layers, one or two directions, projections, and sequences of different lengths."""
    for seed in seeds:
        case = draw(seed)
        for got, expected in zip(ours(case, np.float64, engine), by_torch(case), strict=True):
            assert_double(got, expected)


def check(seed, dtype, *engines, **fixed):
    """Assert that the outputs and gradients of a random cuDNN call lie within error bounds derived for this call.
    The gradients are computed twice: by the backward op, and by mx.vjp, which in most cases recomputes steps
    (`checkpoint_every`)."""
    every = (None, 2, 1, "auto")[seed % 4]
    case = draw_for(seed, dtype, **fixed)
    exact, limit = exact_and_bounds(lambda fl: by_oracle(case, fl), dtype)
    for engine in engines:
        outputs, gradients = ours(case, dtype, engine)
        assert (outputs | gradients).keys() >= exact.keys()
        by_mlx = by_grad(case, dtype, engine=engine, checkpoint_every=every)
        for name, value in [*outputs.items(), *gradients.items(), *by_mlx.items()]:
            assert value.dtype == dtype, name
            if name in exact:
                assert_within(f"{name}, seed {seed}, engine {engine}", value, exact[name], limit[name])


def test_the_oracle_of_a_stack_equals_torch():
    for seed in range(30):
        case = draw(seed)
        exact = by_oracle(case)
        for expected in by_torch(case):
            for name, value in expected.items():
                np.testing.assert_allclose(exact[name], value, rtol=0, atol=1e-12 * max(1.0, np.abs(value).max()))


@pytest.mark.parametrize("seeds", [range(k, k + 10) for k in range(0, 30, 10)], ids=lambda seeds: str(seeds[0]))
def test_float32_within_bounds(seeds):
    for seed in seeds:
        check(seed, np.float32, (None, "ops")[seed // 4 % 2])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("seeds", [range(k, k + 50) for k in range(1000, 1400, 50)], ids=lambda seeds: str(seeds[0]))
def test_many_more(seeds, dtype):
    for seed in seeds:
        check(seed, dtype, None)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("mode", ["lstm", "gru", "rnn_tanh"])
def test_16_bits_within_bounds(mode, dtype):
    """In 16-bit dtypes, outputs and gradients lie within derived error bounds. Mode rnn_relu is not tested: in 16
    bits too many arguments of relu are so near 0 that rounding changes their sign, and with it the gradient."""
    for seed in range(2):
        check(seed, dtype, None, mode=mode)


ON_METAL = {
    f"{mode}-{D}{'-projection' * (P > 0)}-{engine}": (engine, {"mode": mode, "D": D, "P": P})
    for engine in METAL_ENGINES
    for mode, P in [("lstm", 0), ("lstm", 3), ("gru", 0), ("rnn_relu", 0), ("rnn_tanh", 0)]
    for D in (1, 2)
    if can_run(engine, {"op": "lstm" if mode == "lstm" else mode[:3], "bidirectional": D == 2, "projection": P > 0})
}


# By default a cell runs on one engine, because one or two directions launch the same kernels.
ENGINE_OF = {"lstm": "fused", "lstm-projection": "stepwise", "gru": "stepwise", "rnn_relu": "fused"}


def is_default(case):
    mode, _, rest = case.partition("-")
    return ENGINE_OF.get(mode + "-projection" * ("projection" in rest)) == case.rpartition("-")[2]


@pytest.mark.parametrize("case", [pytest.param(n, marks=() if is_default(n) else pytest.mark.slow) for n in ON_METAL])
def test_metal_within_bounds(case):
    """On the Metal emulator, two layers with sequences of different lengths give results within derived error
    bounds, for every Metal engine and cell that `engines.choose` allows. LSTMs on `fused` also compute steps again."""
    engine, fixed = ON_METAL[case]
    seed = 21 if case.startswith("lstm") and engine == "fused" else 20
    with on_metal():
        check(seed, np.float32, engine, L=2, T=3, N=3, I=4, H=5, lengths=np.array([2, 3, 1]), **fixed)


def test_jax_reads_the_same_buffer():
    """jax reads our parameter buffer unchanged, and its reference implementation of cuDNN's LSTM gives the same
    outputs and gradients, with several layers, directions and lengths."""
    jax = pytest.importorskip("jax")
    rnn = pytest.importorskip("jax.experimental.rnn")
    # In jax 0.6, the newest for Python 3.10, jax itself lacks the name.
    enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    L, D = 2, 2
    case = draw(L, mode="lstm", L=L, D=D, T=5, N=3, I=4, H=3, P=0, lengths=np.array([5, 2, 3]))
    sizes = case.I, case.H, L, D == 2
    assert rnn.get_num_params_in_lstm(*sizes) == case.inputs["params"].size

    def theirs(x, h, c, params):
        weights = rnn.unpack_lstm_weights(params, *sizes)
        x, lengths = x.swapaxes(0, 1), case.lengths.astype(np.int32)
        y, h, c = rnn.lstm_ref(x, h, c, *weights, lengths, case.I, case.H, L, 0.0, D == 2)
        return y.swapaxes(0, 1), h, c

    def both(inputs, cotangents):
        outputs, pull = jax.vjp(theirs, *inputs)
        return outputs, pull(cotangents)

    with enable_x64(True):
        given = tuple(case.inputs[name] for name in INPUTS), tuple(map(jax.numpy.asarray, case.cotangents.values()))
        outputs, gradients = jax.jit(both, compiler_options=FAST)(*given)
    for got, names, found in zip(ours(case, np.float64), (OUTPUTS, INPUTS), (outputs, gradients), strict=True):
        assert_double(got, dict(zip(names, map(np.asarray, found), strict=True)))


ATTRIBUTES = {"plain": {}, "dropout": {"dropout": 0.3, "seed": 5, "seed2": 7}, "skip_input": {}}


def arrays_of(case, dtype=np.float64):
    return {name: to_mlx(array, dtype) for name, array in case.inputs.items()}


def by_grad(case, dtype, **options):
    """Return {input name: gradient} of `cudnn_rnn_v3`, computed by mx.vjp."""

    def outputs_of(*inputs):
        out = cudnn.cudnn_rnn_v3(*inputs, lengths_of(case), **case.attributes, **options)
        return [getattr(out, name) for name in case.outputs]

    cotangents = [to_mlx(case.cotangents[name], dtype) for name in case.outputs]
    _, gradients = mx.vjp(outputs_of, list(arrays_of(case, dtype).values()), cotangents)
    return dict(zip(INPUTS, map(to_numpy, gradients), strict=True))


@pytest.mark.parametrize("attributes", ATTRIBUTES)
@pytest.mark.parametrize("D", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_grad_equals_backprop(mode, D, attributes):
    """The gradients of mx.vjp equal the backward op's gradients bit for bit, because both run the same computation."""
    for seed, (lengths, dtype) in enumerate([(None, np.float32), (np.array([1, 4, 3]), np.float64)]):
        input_mode = "skip_input" if attributes == "skip_input" else "linear_input"
        case = draw(seed, mode=mode, L=3, D=D, T=4, N=3, I=3, H=3, input_mode=input_mode, lengths=lengths)
        _, expected = ours(case, dtype, **ATTRIBUTES[attributes])
        for name, value in by_grad(case, dtype, **ATTRIBUTES[attributes]).items():
            np.testing.assert_array_equal(value, expected[name], err_msg=name)


@pytest.mark.parametrize("D", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_grad_of_what_is_computed_again(mode, D):
    """With `checkpoint_every` and dropout, mx.vjp gives the same gradients as without `checkpoint_every`. The
    reserve space (values saved for the gradient) is then empty, so the backward op raises an error."""
    case = draw(D, mode=mode, L=3, D=D, T=5, N=3, I=3, H=3, lengths=np.array([5, 1, 4]))
    given = ATTRIBUTES["dropout"] | {"checkpoint_every": 2}
    _, expected = ours(case, np.float64, **ATTRIBUTES["dropout"])
    assert_double(by_grad(case, np.float64, **given), expected)
    inputs, cotangents = arrays_of(case), [to_mlx(case.cotangents[name], np.float64) for name in OUTPUTS]
    out = cudnn.cudnn_rnn_v3(**inputs, sequence_lengths=lengths_of(case), **case.attributes, **given)
    assert out.reserve_space.shape == (0,)
    with pytest.raises(ValueError, match=r"must have shape \[\d+\], but with checkpoint_every there is none, but got"):
        cudnn.cudnn_rnn_backprop_v3(
            *inputs.values(), lengths_of(case), *out[:3], *cotangents, *out[3:], **case.attributes
        )


@pytest.mark.parametrize("mode", MODES)
def test_backprop_is_pure(mode):
    """Two calls of the backward op give the same results bit for bit, and the op does not change the reserve space."""
    case = draw(3, mode=mode, L=2, D=2, T=3, N=2)
    inputs, cotangents = arrays_of(case), [to_mlx(case.cotangents[name], np.float64) for name in OUTPUTS]
    options = case.attributes | {"dropout": 0.5, "seed2": 1}
    *outputs, reserve, host = cudnn.cudnn_rnn_v3(**inputs, sequence_lengths=lengths_of(case), **options)
    before = np.array(reserve)
    given = *inputs.values(), lengths_of(case), *outputs, *cotangents, reserve, host
    first, second = (cudnn.cudnn_rnn_backprop_v3(*given, **options) for _ in range(2))
    for name, one, two in zip(first._fields, first, second, strict=True):
        np.testing.assert_array_equal(np.array(one), np.array(two), err_msg=name)
    np.testing.assert_array_equal(np.array(reserve), before)


@pytest.mark.parametrize("version", ["", "_v2", "_v3"])
def test_without_training(version):
    """With is_training=False there is no dropout, and the op saves nothing for the gradient. A request for a
    gradient raises an error with the same message as TensorFlow."""
    case = draw(4, mode="lstm", L=2, D=1, T=3, N=2, P=0, lengths=None)
    inputs = arrays_of(case)
    given = [*inputs.values()] + ([lengths_of(case)] if version == "_v3" else [])
    forward, backward = (getattr(cudnn, f"cudnn_rnn{name}{version}") for name in ("", "_backprop"))
    out, plain = forward(*given, dropout=0.9, is_training=False), forward(*given)
    for name in OUTPUTS:
        np.testing.assert_array_equal(np.array(getattr(out, name)), np.array(getattr(plain, name)))
    assert out.reserve_space.shape == ()
    message = f"^To use CudnnRNN{version.upper().strip('_')} in gradients, is_training must be set to True.$"
    for n, name in product(range(4), OUTPUTS):  # n: the argument to differentiate: input, input_h, input_c or params

        def loss(array, n=n, name=name):
            return getattr(forward(*given[:n], array, *given[n + 1 :], is_training=False), name).sum()

        with pytest.raises(ValueError, match=message):
            mx.grad(loss)(given[n])
    cotangents = [to_mlx(case.cotangents[name], np.float64) for name in OUTPUTS]
    with pytest.raises(ValueError, match=message):
        backward(*given, *out[:3], *cotangents, *out[3:])


def test_versions_agree():
    case = draw(5, mode="lstm", L=2, D=2, T=3, N=2, P=0, lengths=None)
    inputs = arrays_of(case)
    one, two = (f(**inputs, direction="bidirectional") for f in (cudnn.cudnn_rnn, cudnn.cudnn_rnn_v2))
    three = cudnn.cudnn_rnn_v3(**inputs, sequence_lengths=[3, 3], direction="bidirectional")
    for name in one._fields:
        for other in (two, three):
            np.testing.assert_array_equal(np.array(getattr(one, name)), np.array(getattr(other, name)))
    assert (two.host_reserved.shape, three.host_reserved.shape) == ((2,), ())
    cotangents = [to_mlx(value, np.float64) for value in case.cotangents.values()]
    given = *one[:3], *cotangents
    back = cudnn.cudnn_rnn_backprop(*inputs.values(), *given, one.reserve_space, direction="bidirectional")
    for other in (
        cudnn.cudnn_rnn_backprop_v2(*inputs.values(), *given, *two[3:], direction="bidirectional"),
        cudnn.cudnn_rnn_backprop_v3(*inputs.values(), [3, 3], *given, *three[3:], direction="bidirectional"),
    ):
        for name, value in back._asdict().items():
            np.testing.assert_array_equal(np.array(value), np.array(getattr(other, name)), err_msg=name)


@pytest.mark.parametrize("c", [0, None, mx.zeros((0,)), mx.ones((2, 2))], ids=["0", "None", "empty", "ones"])
def test_without_a_cell_state_input_c_may_be_anything(c):
    state, options = mx.zeros((1, 3, 5)), {"rnn_mode": "gru"}
    inputs = mx.ones((4, 3, 4)), state, c, mx.ones((cudnn.cudnn_rnn_params_size(1, 5, 4, **options).item(),))
    *outputs, reserve = cudnn.cudnn_rnn(*inputs, **options)
    back = cudnn.cudnn_rnn_backprop(*inputs, *outputs, *outputs, reserve, **options)
    assert outputs[2].shape == () and back.input_c_backprop.shape == getattr(c, "shape", ())
    assert not np.array(back.input_c_backprop).any()


@pytest.mark.parametrize("D", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_skip_input_equals_identity_matrices(mode, D):
    case = draw(6, mode=mode, L=2, D=D, T=3, N=2, I=3, H=3, P=0)
    attributes = {"rnn_mode": mode, "direction": case.attributes["direction"]}
    weights, biases = canonical((2, 3, 3), case.inputs["params"], attributes)
    G = GATES[mode]
    identity = [np.eye(3) if n < D * 2 * G and n % (2 * G) < G else array for n, array in enumerate(weights)]
    none = [array[:, :0] if n < D * 2 * G and n % (2 * G) < G else array for n, array in enumerate(weights)]
    skipping = case._replace(inputs=case.inputs | {"params": packed(none, biases)})
    linear = case._replace(inputs=case.inputs | {"params": packed(identity, biases)})
    for input_mode in ("skip_input", "auto_select"):
        outputs, gradients = ours(skipping, np.float64, input_mode=input_mode)
        expected, expected_gradients = ours(linear, np.float64)
        matrices = [array.size for array in identity]
        kept = np.concatenate([np.full(size, n >= D * 2 * G or n % (2 * G) >= G) for n, size in enumerate(matrices)])
        kept = np.concatenate([kept, np.full(sum(array.size for array in biases), True)])
        expected_gradients["params"] = expected_gradients["params"][kept]
        assert_double(outputs, expected)
        assert_double(gradients, expected_gradients)


def canonical(sizes, params, attributes):
    """Return (matrices, biases), two lists of NumPy arrays, from a float64 parameter buffer."""
    G, D = GATES[attributes["rnn_mode"]], 1 + (attributes["direction"] == "bidirectional")
    found = cudnn.cudnn_rnn_params_to_canonical(*sizes, to_mlx(params, np.float64), 2 * G * D * sizes[0], **attributes)
    return [[np.array(array) for array in arrays] for arrays in found]


def packed(weights, biases):
    return np.concatenate([array.reshape(-1) for array in weights + biases])


def test_skip_input_as_published_for_a_gpu():
    """A GRU with skip_input, zero parameters, zero state and x = 1 gives 0.20482421, as TensorFlow's issue 8311
    reports for a GPU."""
    params = mx.zeros((cudnn.cudnn_rnn_params_size(1, 2, 2, rnn_mode="gru", input_mode="skip_input").item(),))
    out = cudnn.cudnn_rnn(
        mx.ones((1, 1, 2)), mx.zeros((1, 1, 2)), mx.zeros(()), params, rnn_mode="gru", input_mode="skip_input"
    )
    np.testing.assert_allclose(np.array(out.output), 0.20482421, rtol=0, atol=0.5e-8 + 2.0**-26)


def test_auto_select_is_linear_where_the_sizes_differ():
    case = draw(7, mode="gru", L=1, D=1, I=4, H=3)
    for name, value in ours(case, np.float64)[0].items():
        np.testing.assert_array_equal(ours(case, np.float64, input_mode="auto_select")[0][name], value)


@pytest.mark.parametrize("states", ["transpose", "reinterpret"])
@pytest.mark.parametrize("mode", ["lstm", "gru"])
def test_batch_major(mode, states):
    """Calls with batch-major arrays give the same results as calls with time-major arrays. The states are either
    transposed or, as in TensorFlow, reinterpreted: the same memory gets another shape."""
    case = draw(8, mode=mode, L=2, D=2, T=3, N=3, lengths=np.array([3, 1, 2]))
    names = {"input", "output"}

    def moved(named):
        swapped = {name: value.swapaxes(0, 1) for name, value in named.items() if value.ndim == 3}
        if states == "reinterpret":
            LD, N = case.L * case.D, case.N
            swapped |= {n: v.reshape(N, LD, -1) for n, v in named.items() if v.ndim == 3 and n not in names}
        return named | swapped

    other = case._replace(inputs=moved(case.inputs), cotangents=moved(case.cotangents))
    found = ours(other, np.float64, time_major=False, batch_major_states=states)
    for got, expected in zip(found, ours(case, np.float64), strict=True):
        for name, value in moved(expected).items():
            if mode == "lstm" or not name.endswith("_c"):
                np.testing.assert_array_equal(got[name], value, err_msg=name)


@pytest.mark.parametrize("p", [0, 0.3, 0.9])
@pytest.mark.parametrize("mode", ["lstm", "gru", "rnn_tanh"])
def test_dropout_has_the_gradient_of_its_mask(mode, p):
    """The gradients with dropout agree with central differences in random directions. All evaluations have the same
    dropout mask, because their seeds are equal."""
    case = draw(9, mode=mode, L=3, D=2, T=4, N=3, H=3)
    attributes = {"dropout": p, "seed": 3, "seed2": 4}
    rng, step = np.random.default_rng(0), 1e-5

    def loss(direction, size):
        moved = {name: value + size * direction[name] for name, value in case.inputs.items()}
        outputs, _ = ours(case._replace(inputs=moved), np.float64, **attributes)
        return sum((outputs[name] * case.cotangents[name]).sum() for name in case.outputs)

    _, gradients = ours(case, np.float64, **attributes)
    for only in INPUTS[: 2 if mode != "lstm" else 3] + INPUTS[3:]:
        direction = {name: rng.normal(size=v.shape) * (name == only) for name, v in case.inputs.items()}
        slope = (loss(direction, step) - loss(direction, -step)) / (2 * step)
        expected = (gradients[only] * direction[only]).sum()
        # `slope` is a difference quotient. Its error is about step**2 + rounding / step (third derivative about 1).
        np.testing.assert_allclose(slope, expected, rtol=1e-6, atol=1e-6, err_msg=only)


@pytest.mark.parametrize("mode", MODES)
def test_dropout_of_1_drops_all(mode):
    """With dropout=1 every layer above the first gets zeros as its input, as in torch. Torch and our op then give
    the same outputs and gradients, because neither draws a random mask."""
    pytest.importorskip("torch")
    case = draw(14, mode=mode, L=3, D=2, T=4, N=3, P=0)
    for got, expected in zip(ours(case, np.float64, dropout=1), by_torch(case, dropout=1.0), strict=True):
        for name, value in expected.items():
            # Our op and torch both compute in float64, but add in different orders.
            np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-12 * max(1.0, np.abs(value).max()))


@pytest.mark.parametrize("version", ["", "_v2", "_v3"])
def test_an_engine_that_was_asked_for_has_to_run(version):
    """Forward and backward."""
    x, state, params = mx.ones((2, 1, 3)), mx.ones((1, 1, 4)), mx.ones((cudnn.cudnn_rnn_params_size(1, 4, 3).item(),))
    lengths = {"sequence_lengths": [2]} if version == "_v3" else {}
    names = "output", "output_h", "output_c"
    with mx.stream(mx.cpu):
        found = getattr(cudnn, f"cudnn_rnn{version}")(x, state, state, params, **lengths)._asdict()
        saved = {name: found[name] for name in (*names, "reserve_space", "host_reserved") if name in found}
        saved |= {f"{name}_backprop": found[name] for name in names}
        for op, more in ((f"cudnn_rnn{version}", {}), (f"cudnn_rnn_backprop{version}", saved)):
            given = {"input": x, "input_h": state, "input_c": state, "params": params} | lengths | more
            getattr(cudnn, op)(**given)
            with pytest.raises(ValueError, match="engine='fused' cannot run: Metal shaders run on the GPU"):
                getattr(cudnn, op)(**given, engine="fused")


def test_dropout_between_layers_only():
    """Dropout multiplies the output of each layer except the last by factors. The test runs the layers one by one,
    multiplies by the same factors, and gets the result of the stack. The factors have the right mean and are
    independent."""
    p, L, D, T, N, H = 0.3, 4, 2, 20, 30, 8
    case = draw(10, mode="rnn_tanh", L=L, D=D, T=T, N=N, I=3, H=H, lengths=None)
    inputs = arrays_of(case)
    given = dict(rnn_mode="rnn_tanh", direction="bidirectional", dropout=p, seed=1, seed2=2)
    out = cudnn.cudnn_rnn(**inputs, **given)
    # For each layer except the last, the reserve space contains h and then the dropout factors.
    reserve = np.array(out.reserve_space).reshape(L - 1, 2, T, N, D * H)
    states, factors = reserve[:, 0], reserve[:, 1]
    x = inputs["input"]
    where = layout("", L, H, 3, Attributes("rnn_tanh", "linear_input", "bidirectional", p, 1, 2))
    for layer, arrays in enumerate(layer_arrays(where, inputs["params"])):
        h0 = mx.concatenate(list(inputs["input_h"][2 * layer : 2 * layer + 2]), axis=-1)
        b = (arrays["bW"] + arrays["bR"]).reshape(-1)
        x = rnn(x, arrays["Wx"], arrays["Wh"], b, h0, bidirectional=True).h
        if layer < L - 1:
            np.testing.assert_allclose(np.array(x), states[layer], rtol=0, atol=1e-13)
            x = x * mx.array(factors[layer], mx.float64)
    np.testing.assert_allclose(np.array(x), np.array(out.output), rtol=0, atol=1e-13)

    values = np.unique(factors)
    np.testing.assert_allclose(values, [0, 1 / (1 - p)], rtol=1e-15)
    kept = (factors > 0).reshape(L - 1, T, -1) - (1 - p)
    deviation = np.sqrt(p * (1 - p))
    # The mean of independent draws may differ from the expected mean by five standard deviations.
    assert abs(kept.mean()) < 5 * deviation / np.sqrt(kept.size)
    for one, two in [
        (kept[0], kept[1]),
        (kept[1], kept[2]),
        (kept[:, 1:], kept[:, :-1]),
        (kept[..., 1:], kept[..., :-1]),
    ]:
        assert abs((one * two).mean()) < 5 * deviation**2 / np.sqrt(one.size)
    again, other = (cudnn.cudnn_rnn(**inputs, **(given | seeds)).output for seeds in ({}, {"seed2": 3}))
    assert mx.array_equal(out.output, again) and not mx.array_equal(out.output, other)
    assert not mx.array_equal(other, cudnn.cudnn_rnn(**inputs, **(given | {"seed": 2})).output)


def test_seeds():
    """The seeds of dropout may be any integers. The random key consists of the low 32 bits of `seed` and the low 32
    bits of `seed2`."""
    shape, rows = (4, 3, 5), {"input_h": mx.zeros((2, 3, 5)), "input_c": mx.zeros((2, 3, 5))}
    size = cudnn.cudnn_rnn_params_size(2, 5, 5).item()
    inputs = {"input": mx.zeros(shape), **rows, "params": mx.random.normal((size,), key=mx.random.key(0))}

    def output(seed, seed2):
        return np.array(cudnn.cudnn_rnn(**inputs, dropout=0.5, seed=seed, seed2=seed2).output).tobytes()

    def kept(key):
        attributes = Attributes("lstm", "linear_input", "unidirectional", 0.5, *key)
        where = layout("", 2, 5, 5, attributes)
        return np.array(dropout_factors(where, mx.zeros(shape), attributes)[0])

    for seed, seed2 in ((0, 0), (3, 7), (2**32 - 1, 2**32 - 1), (0, 2**31)):
        key = mx.random.split(mx.random.key(seed * 2**32 + seed2), 1)[0]
        np.testing.assert_array_equal(kept((seed, seed2)), 2 * np.array(mx.random.bernoulli(0.5, shape, key)))
    assert output(1, -1) == output(1, 2**64 - 1) == output(1, 2**32 - 1) == output(1 - 2**32, -1)
    assert len({output(seed, seed2) for seed in (-1, 1, 2) for seed2 in (-1, 0, 2**32 + 5)}) == 9
    assert output(np.int64(2), np.int64(-7)) == output(np.uint8(2), np.int8(-7)) == output(2, -7)


@pytest.mark.parametrize("mode", MODES)
def test_canonical_arrays_and_back(mode):
    """The arrays that are split from a parameter buffer equal torch's parameters, gate by gate, in cuDNN's order.
    Joining the arrays gives the same buffer again."""
    torch = pytest.importorskip("torch")
    for L, D, P in [(1, 1, 0), (2, 2, 0)] + [(2, 2, 2)] * (mode == "lstm"):
        I, H, G = 4, 5, GATES[mode]
        kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}.get(mode, torch.nn.RNN)
        layers = kind(I, H, L, bidirectional=D == 2, **({"proj_size": P} if P else {}))
        arrays = [array.detach().numpy() for array in torch_arrays(layers)]
        params = mx.array(packed(arrays, []))
        attributes = {"rnn_mode": mode, "direction": "bidirectional" if D == 2 else "unidirectional", "num_proj": P}
        assert cudnn.cudnn_rnn_params_size(L, H, I, **attributes).item() == params.size
        per_layer = 2 * G + (P > 0)
        weights, biases = cudnn.cudnn_rnn_params_to_canonical_v2(
            L, H, I, params, per_layer * L * D, 2 * G * L * D, **attributes
        )
        matrices = [np.split(array, G) if len(array) == G * H else [array] for array in arrays]
        expected = [part for parts in matrices for part in parts]
        for got, value in zip(weights + biases, expected, strict=True):
            np.testing.assert_array_equal(np.array(got), value)
        again = cudnn.cudnn_rnn_canonical_to_params_v2(L, H, I, weights, biases, **attributes)
        assert mx.array_equal(again, params)
        if not P:
            attributes.pop("num_proj")
            found = cudnn.cudnn_rnn_params_to_canonical(L, H, I, params, per_layer * L * D, **attributes)
            again = cudnn.cudnn_rnn_canonical_to_params(L, H, I, *found, **attributes)
            assert mx.array_equal(again, params)


def test_params_size():
    assert cudnn.cudnn_rnn_params_size(mx.array(1), 5, 4, S=mx.int64).dtype == mx.int64
    sizes = [cudnn.cudnn_rnn_params_size(2, 4, 4, input_mode=mode).item() for mode in ("linear_input", "skip_input")]
    assert cudnn.cudnn_rnn_params_size(np.int64(1), np.int8(100), np.uint8(100)).item() == 80800
    assert cudnn.cudnn_rnn_params_size(1, 5, 4, dropout=np.float32(0.5), num_proj=np.int64(2)).item() == 170
    # cuDNN turns off a projection that makes h no narrower.
    assert cudnn.cudnn_rnn_params_size(1, 5, 4, num_proj=5).item() == cudnn.cudnn_rnn_params_size(1, 5, 4).item()
    assert sizes == [320, 256] and cudnn.cudnn_rnn_params_size(1, 5, 4, input_mode="auto_select").item() == 220


def test_sizes_beyond_any_memory():
    """The number of parameters of very large layers is computed in 64 bits, without a list of their arrays in
    memory."""
    largest = cudnn.cudnn_rnn_params_size(1, 16384, 16384, S=mx.int64)
    assert largest.item() == 8 * 16384 * 16385 > 2**31
    with pytest.raises(
        ValueError, match=r"the size must be less than 2\^31 with S=mlx.core.int32, .* but got 2147614720"
    ):
        cudnn.cudnn_rnn_params_size(1, 16384, 16384)
    many = {"direction": "bidirectional", "num_proj": 3, "S": mx.int64}
    assert cudnn.cudnn_rnn_params_size(10**12, 5, 4, **many).item() == 2 * (10**12 * (20 * 9 + 15 + 40) - 40)
    with pytest.raises(ValueError, match=r"than 2\^63 with S=mlx.core.int64, but got 2"):
        cudnn.cudnn_rnn_params_size(10**18, 5, 4, S=mx.int64)
    with pytest.raises(ValueError, match=r"params must have \d+ elements for 1000000000000 layers"):
        cudnn.cudnn_rnn_params_to_canonical(10**12, 5, 4, mx.zeros((220,)), 8)
    with pytest.raises(ValueError, match="weights must be 8000000000000 arrays for these layers but got 0"):
        cudnn.cudnn_rnn_canonical_to_params(10**12, 5, 4, [], [])


def test_padding_is_never_read():
    case = draw(11, mode="lstm", L=2, D=2, T=4, N=3, lengths=np.array([1, 4, 2]))
    spoilt = case.inputs["input"].copy(), case.cotangents["output"].copy()
    for array in spoilt:
        array[np.arange(4)[:, None] >= case.lengths] = np.nan
    other = case._replace(inputs=case.inputs | {"input": spoilt[0]}, cotangents=case.cotangents | {"output": spoilt[1]})
    for got, expected in zip(ours(other, np.float64), ours(case, np.float64), strict=True):
        for name, value in expected.items():
            np.testing.assert_array_equal(got[name], value, err_msg=name)
        assert not got.get("input", np.zeros((4, 3)))[2:, 0].any()


def test_compiled_exported_and_second_order(tmp_path):
    case = draw(12, mode="gru", L=2, D=2, T=3, N=2, lengths=None)
    x, h, c, params = arrays_of(case, np.float32).values()
    options = {"rnn_mode": "gru", "direction": "bidirectional"}

    def run(x, h, params, **more):
        return cudnn.cudnn_rnn(x, h, c, params, **options, **more).output

    expected = np.array(run(x, h, params))
    np.testing.assert_allclose(np.array(mx.compile(run)(x, h, params)), expected, atol=1e-6)
    path = str(tmp_path / "stack.mlxfn")
    mx.export_function(path, lambda x, h, params: run(x, h, params, is_training=False), x, h, params)
    np.testing.assert_allclose(np.array(mx.import_function(path)(x, h, params)[0]), expected, atol=1e-6)
    many = mx.vmap(run, in_axes=(0, 0, None))(mx.stack([x, 2 * x]), mx.stack([h, h]), params)
    np.testing.assert_allclose(np.array(many[0]), expected, atol=1e-6)
    slope = mx.grad(lambda x: run(x, h, params, engine="ops").sum())
    again = mx.grad(lambda x: (slope(x) ** 2).sum())(x)
    ahead = mx.grad(lambda x: run(x, h, params, engine="ops").sum())(x + 1e-3 * mx.sign(again))
    assert (ahead**2).sum() > (slope(x) ** 2).sum()


def test_a_compiled_forward_op_and_its_gradient_op():
    """Both ops divide the parameter buffer, here the result of an elementwise operation, and share one compiled
    function."""
    case = draw(12, mode="gru", L=2, D=2, T=3, N=2, lengths=None)
    x, h, c, params = arrays_of(case, np.float32).values()
    options = {"rnn_mode": "gru", "direction": "bidirectional", "dropout": 0.5}

    def both(params):
        given = x, h, c, params * 2
        out = cudnn.cudnn_rnn(*given, **options)
        outputs = out.output, out.output_h, out.output_c
        return cudnn.cudnn_rnn_backprop(*given, *outputs, *outputs, out.reserve_space, **options).params_backprop

    np.testing.assert_allclose(np.array(mx.compile(both)(params)), np.array(both(params)), rtol=1e-5, atol=1e-6)


SMALL = {"input": (5, 3, 4), "input_h": (4, 3, 2), "input_c": (4, 3, 2)}
BAD = {
    "params": ({"params": (10,)}, {}, r"_v3\] params must have 256 elements for .* num_units 2 but got 10 elements\."),
    "params longer": ({"params": (300,)}, {}, r"256 elements .*: pass params\[:256\], but got 300 elements\."),
    "params rank": ({"params": (256, 1)}, {}, r"params must have shape \[params_size\] but got shape \[256, 1\]"),
    "input rank": ({"input": (5, 4)}, {}, r"input must have shape \[T, N, I\] but got shape \[5, 4\]"),
    "no steps": ({"input": (0, 3, 4)}, {}, r"input must have no empty axis"),
    "input_h": ({"input_h": (4, 3, 3)}, {}, r"input_h must have shape \[4, 3, 2\] but got shape \[4, 3, 3\]"),
    "input_h rows": ({"input_h": (2, 3, 2)}, {}, r"input_h must have shape \[4, 3, 2\] but got shape \[2, 3, 2\]"),
    "input_c batch": (
        {"input_c": (4, 2, 2)},
        {},
        r"input_c must have shape \[L \* D, 3, H\] but got shape \[4, 2, 2\]",
    ),
    "input_c rows": ({"input_c": (3, 3, 2)}, {}, r"input_c must have two rows per layer .* but got shape \[3, 3, 2\]"),
    "batch-major": ({}, {"time_major": False}, r"input_c must have shape \[5, L \* D, H\] but got shape \[4, 3, 2\]"),
    "mode": ({}, {"rnn_mode": "foo"}, r"rnn_mode must be one of 'lstm', 'gru', 'rnn_relu', 'rnn_tanh' but got 'foo'"),
    "input_mode": ({}, {"input_mode": "skip"}, r"input_mode must be one of .* but got 'skip'"),
    "skip": (
        {},
        {"input_mode": "skip_input"},
        r"input_size must be num_units = 2 with input_mode='skip_input' but got 4",
    ),
    "direction": ({}, {"direction": "both"}, r"direction must be one of .* but got 'both'"),
    "mode array": ({}, {"rnn_mode": np.ones((2, 2))}, r"rnn_mode must be one of"),
    "direction array": ({}, {"direction": np.ones((2, 2))}, r"direction must be one of"),
    "dropout 1.1": ({}, {"dropout": 1.1}, r"dropout must lie in \[0, 1\] but got 1.1"),
    "dropout -": ({}, {"dropout": -0.1}, r"dropout must lie in \[0, 1\] but got -0.1"),
    "dropout nan": ({}, {"dropout": float("nan")}, r"dropout must be a finite number but got nan"),
    "dropout huge": ({}, {"dropout": 10**400}, r"dropout must be a finite number but got 1000"),
    "seed": ({}, {"seed": 1.5}, r"seed must be an integer but got 1.5"),
    "seed2": ({}, {"seed2": np.bool_(True)}, r"seed2 must be an integer but got"),
    "num_proj": ({}, {"num_proj": 3}, r"num_proj must be at most num_units = 2 but got 3"),
    "num_proj gru": ({}, {"num_proj": 1, "rnn_mode": "gru"}, r"num_proj must be 0 with rnn_mode='gru' but got 1"),
    "proj state": ({}, {"num_proj": 1}, r"input_h must have shape \[4, 3, 1\] but got shape \[4, 3, 2\]"),
    "length 0": ({}, {"sequence_lengths": [5, 0, 3]}, r"must lie in 1..5 but got sequence_lengths\[1\] = 0"),
    "length 6": ({}, {"sequence_lengths": [5, 1, 6]}, r"must lie in 1..5 but got sequence_lengths\[2\] = 6"),
    "no lengths": ({}, {"sequence_lengths": None}, r"sequence_lengths must be integers, .* but got NoneType"),
    "lengths": ({}, {"sequence_lengths": [5, 1]}, r"sequence_lengths must have shape \[3\]"),
    "states": (
        {},
        {"batch_major_states": "x"},
        r"batch_major_states must be one of 'transpose', 'reinterpret' but got",
    ),
    "training": ({}, {"is_training": 1}, r"is_training must be True or False but got 1"),
    "engine": ({}, {"engine": "gpu"}, r"engine must be one of"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    shapes, options, message = BAD[case]
    arrays = {name: mx.zeros(shape) for name, shape in (SMALL | {"params": (256,)} | shapes).items()}
    given = {"direction": "bidirectional", "sequence_lengths": [5, 5, 5]} | options
    with pytest.raises(ValueError, match=message):
        cudnn.cudnn_rnn_v3(**arrays, **given)


def test_bad_arguments_of_the_other_ops():
    state, params = mx.zeros((1, 3, 5)), mx.zeros((220,))
    inputs = mx.zeros((10, 3, 4)), state, state, params
    out = cudnn.cudnn_rnn(*inputs)
    gradients = out[:3]
    bad = {
        r"\[cudnn_rnn_backprop\] output_backprop must have shape \[10, 3, 5\]": (
            *out[:3],
            state,
            *gradients[1:],
            out[3],
        ),
        r"output_c must have shape \[1, 3, 5\]": (*out[:2], params, *gradients, out[3]),
        r"reserve_space must have shape \[750\] but got shape \[749\]": (*out[:3], *gradients, out[3][1:]),
    }
    half = out[3].astype(mx.float16)
    bad["reserve_space must have the dtype of the other arrays"] = (*out[:3], *gradients, half)
    for message, given in bad.items():
        with pytest.raises(ValueError, match=message):
            cudnn.cudnn_rnn_backprop(*inputs, *given)
    with pytest.raises(ValueError, match="input_h must have the dtype of the other arrays"):
        cudnn.cudnn_rnn(inputs[0], state.astype(mx.float16), *inputs[2:])
    with pytest.raises(ValueError, match="num_params must be 8 for these layers but got 9"):
        cudnn.cudnn_rnn_params_to_canonical(1, 5, 4, params, 9)
    with pytest.raises(ValueError, match="num_params must be an integer"):
        cudnn.cudnn_rnn_params_to_canonical(1, 5, 4, params, np.ones((2, 2)))
    with pytest.raises(ValueError, match="num_units must be an integer of at least 1 but got 0"):
        cudnn.cudnn_rnn_params_size(1, 0, 4)
    weights, biases = cudnn.cudnn_rnn_params_to_canonical(1, 5, 4, params, 8)
    with pytest.raises(ValueError, match=r"weights\[0\] must have 20 elements, \[5, 4\], but got shape \[5, 5\]"):
        cudnn.cudnn_rnn_canonical_to_params(1, 5, 4, weights[::-1], biases)
    with pytest.raises(ValueError, match=r"weights\[1\] must have the dtype|weights\[1\] must be"):
        other = [weights[0], weights[1].astype(mx.float16), *weights[2:]]
        cudnn.cudnn_rnn_canonical_to_params(1, 5, 4, other, biases)
    with pytest.raises(ValueError, match="biases must be 8 arrays for these layers but got 7"):
        cudnn.cudnn_rnn_canonical_to_params(1, 5, 4, weights, biases[1:])


def test_float64_needs_the_cpu():
    case = draw(13, mode="gru", L=1, D=1)
    with on_metal(), pytest.raises(ValueError, match=r"\[cudnn_rnn_v3\] float64 needs the CPU, stream=mx.cpu, but"):
        cudnn.cudnn_rnn_v3(**arrays_of(case), sequence_lengths=lengths_of(case), **case.attributes)
