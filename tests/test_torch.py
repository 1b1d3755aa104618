"""Tests of `mlx_lstm.torch`: layers and cells have the same parameters, values, gradients, states and weight files
as torch.nn's LSTM, GRU and RNN."""

import itertools

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from assertions import assert_close
from mlx.utils import tree_flatten
from on_metal import on_metal
from pairs import pairs

import mlx_lstm.torch as ours
from mlx_lstm import convert, lstm, nn, rnn
from mlx_lstm.engines.directions import join
from mlx_lstm.engines.numpy import weights

torch = pytest.importorskip("torch")

I, H = 3, 5
KINDS = {"LSTM": {}, "LSTM_projection": {"proj_size": 2}, "GRU": {}, "RNN": {}, "RNN_relu": {"nonlinearity": "relu"}}
STACKS = [
    {"num_layers": 1, "bidirectional": False},
    {"num_layers": 2, "bidirectional": True},
]


def layers(kind, dtype=torch.float32, **options):
    """Return (torch's layer, our layer with the same parameters) for a name in `KINDS`."""
    word, options = kind.partition("_")[0], KINDS[kind] | options
    torch.manual_seed(0)
    theirs = getattr(torch.nn, word)(I, H, **options, dtype=dtype)
    layer = getattr(ours, word)(I, H, **options)
    ours_dtype = mx.float64 if dtype == torch.float64 else mx.float32
    layer.load_weights([(name, mx.array(value.numpy(), ours_dtype)) for name, value in theirs.state_dict().items()])
    return theirs, layer


def inputs(theirs, shape, given, rng):
    """Return (random input, random initial states). The list of states is empty unless `given` is true."""
    rows = theirs.num_layers * (1 + theirs.bidirectional)
    batch = () if len(shape) == 2 else (shape[0 if theirs.batch_first else 1],)
    widths = [theirs.proj_size or H] + [H] * isinstance(theirs, torch.nn.LSTM)
    return rng.normal(size=shape), [rng.normal(size=(rows, *batch, width)) for width in widths] if given else []


def run_torch(layer, x, states, cotangents, lengths=None):
    """Run torch's layer. Return the outputs and the gradients of input, states and parameters by name. The function
    `cotangents` maps a shape to a random array."""
    dtype = next(layer.parameters()).dtype
    x, *states = (torch.tensor(array, dtype=dtype, requires_grad=True) for array in (x, *states))
    packed = x
    if lengths is not None:
        axis = {"batch_first": layer.batch_first, "enforce_sorted": False}
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, **axis)
    hx = (tuple(states) if len(states) == 2 else states[0]) if states else None
    output, last = layer(packed, hx)
    if lengths is not None:
        padded = {"batch_first": layer.batch_first, "total_length": x.shape[1 if layer.batch_first else 0]}
        output = torch.nn.utils.rnn.pad_packed_sequence(output, **padded)[0]
    outputs = [output, *(last if isinstance(last, tuple) else [last])]
    drawn = [torch.tensor(cotangents(value.shape), dtype=dtype) for value in outputs]
    layer.zero_grad()
    torch.autograd.backward(outputs, drawn)
    named = {"x": x} | {f"{name}_0": state for name, state in zip("hc", states, strict=False)}
    gradients = {f"d{name}": array.grad for name, array in (named | dict(layer.named_parameters())).items()}
    found = dict(zip(("output", "h_n", "c_n"), outputs, strict=False)) | gradients
    return {name: value.detach().numpy() for name, value in found.items()}


def run_ours(layer, x, states, cotangents, lengths=None, dtype=mx.float32):
    """Run our layer. Return the outputs and the gradients of input, states and parameters under the same names as
    `run_torch`."""
    names = ["x", *(f"{name}_0" for name, _ in zip("hc", states, strict=False))]
    arrays = dict(zip(names, (mx.array(array, dtype) for array in (x, *states)), strict=True)) | layer.parameters()
    words = list(arrays)

    def outputs(*values):
        given = dict(zip(words, values, strict=True))
        layer.update({name: given.pop(name) for name in layer.parameters()})
        x, *states = given.values()
        hx = (tuple(states) if len(states) == 2 else states[0]) if states else None
        output, last = layer(x, hx, lengths=lengths)
        return [output, *(last if isinstance(last, tuple) else [last])]

    shapes = [value.shape for value in outputs(*arrays.values())]
    drawn = [mx.array(cotangents(shape), dtype) for shape in shapes]
    values, gradients = mx.vjp(outputs, list(arrays.values()), drawn)
    found = dict(zip(("output", "h_n", "c_n"), values, strict=False))
    found |= {f"d{word}": gradient for word, gradient in zip(words, gradients, strict=True)}
    return {name: np.array(value) for name, value in found.items()}


def drawing(seed):
    """Return a function that maps a shape to a random cotangent. Equal seeds give equal cotangents, so that two
    layers can be compared."""
    rng = np.random.default_rng(seed)
    return lambda shape: rng.normal(size=tuple(shape))


FORMS = {
    "plain": ((7, 2, I), {}, True, None),
    "no states": ((7, 2, I), {}, False, None),
    "batch first": ((2, 7, I), {"batch_first": True}, True, None),
    "no bias": ((4, 3, I), {"bias": False}, True, None),
    "no batch": ((6, I), {}, True, None),
    "no batch, batch first, no states": ((6, I), {"batch_first": True}, False, None),
    "one step": ((1, 1, I), {}, True, None),
    "lengths": ((7, 4, I), {}, True, [3, 7, 1, 5]),
    "lengths, batch first": ((3, 6, I), {"batch_first": True}, False, [1, 6, 2]),
}


RUNS = [*((form, "numpy") for form in FORMS), ("plain", "ops"), ("lengths", "ops")]


@pytest.mark.parametrize("kind, stack, run", pairs(kind=KINDS, stack=STACKS, run=RUNS))
def test_values_and_gradients_in_double_precision(kind, stack, run):
    """Values and gradients in float64 agree with torch. The tolerance is wider for the engine `ops`, because MLX's
    float64 functions have only float32 accuracy."""
    form, engine = run
    shape, options, given, lengths = FORMS[form]
    theirs, layer = layers(kind, torch.float64, **stack, **options)
    layer.engine = engine
    x, states = inputs(theirs, shape, given, np.random.default_rng(1))
    expected = run_torch(theirs, x, states, drawing(2), lengths)
    with mx.stream(mx.cpu):
        got = run_ours(layer, x, states, drawing(2), lengths, mx.float64)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(1.0, np.abs(value).max())
        limit = 1e-12 if engine == "numpy" else 64 * np.finfo(np.float32).eps * np.sqrt(x.size)
        assert got[name].shape == value.shape, name
        np.testing.assert_allclose(got[name], value, rtol=0, atol=limit * scale, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_float32(kind):
    """The error of our float32 results, measured against torch in float64, exceeds the error of torch's float32
    results by at most a small factor."""
    theirs, layer = layers(kind, num_layers=2, bidirectional=True)
    x, states = inputs(theirs, (9, 4, I), True, np.random.default_rng(3))
    rounded = run_torch(theirs, x, states, drawing(4))
    exact = run_torch(theirs.double(), x, states, drawing(4))
    for name, value in run_ours(layer, x, states, drawing(4)).items():
        assert value.dtype == np.float32
        assert_close(name, value, rounded[name], exact[name])


@pytest.mark.parametrize("batch", [(2,), ()], ids=str)
@pytest.mark.parametrize("options", [{}, {"bias": False}], ids=str)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "RNN_relu"])
def test_cells(kind, options, batch):
    """Three steps of our cells, in a loop, agree with three steps of torch's cells and with one call of our layer
    with the same weights. All gradients are compared, too."""
    word, options = f"{kind.partition('_')[0]}Cell", options | KINDS[kind]
    theirs, cell = getattr(torch.nn, word)(I, H, **options).double(), getattr(ours, word)(I, H, **options)
    assert repr(cell) == repr(theirs)
    drawn, lstm_ = np.random.default_rng(1), kind == "LSTM"
    given = {"x": drawn.normal(size=(3, *batch, I))} | {
        name: drawn.normal(size=(*batch, H)) for name in "hc"[: 1 + lstm_]
    }
    cotangents = [drawn.normal(size=(3, *batch, H)) for _ in given if _ != "x"]

    def loop(step, x, states):
        found = []
        for each in x:
            states = step(each, tuple(states) if lstm_ else states[0])
            states = states if lstm_ else (states,)
            found.append(states)
        return list(zip(*found, strict=True))  # one tuple per state (h, c) with its values at all steps

    def of_ours(*values):
        parameters = dict(zip(theirs.state_dict(), values[len(given) :], strict=True))
        cell.update(parameters)
        return [mx.stack(states) for states in loop(cell, values[0], values[1 : len(given)])]

    leaves = [torch.tensor(array, requires_grad=True) for array in given.values()]
    outputs = [torch.stack(states) for states in loop(theirs, leaves[0], leaves[1:])]
    torch.autograd.backward(outputs, [torch.tensor(array) for array in cotangents])
    expected = [*outputs, *(leaf.grad for leaf in [*leaves, *theirs.parameters()])]
    with mx.stream(mx.cpu):
        arrays = [*given.values(), *(value.numpy() for value in theirs.state_dict().values())]
        arrays, cotangents = ([mx.array(array, mx.float64) for array in each] for each in (arrays, cotangents))
        values, gradients = mx.vjp(of_ours, arrays, cotangents)
        for got, value in zip([*values, *gradients], expected, strict=True):
            np.testing.assert_allclose(np.array(got), value.detach().numpy(), rtol=0, atol=1e-12)
        cell.update(dict(zip(theirs.state_dict(), arrays[len(given) :], strict=True)))
        layer = ours.from_weights(convert.from_torch(theirs))
        first = cell(arrays[0][0])[0] if lstm_ else cell(arrays[0][0])
        assert mx.allclose(layer(arrays[0])[0][0], first, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["LSTM_projection", "GRU"])
def test_on_the_metal_kernels(kind):
    theirs, layer = layers(kind, num_layers=2, bidirectional=True)
    x, states = inputs(theirs, (4, 3, I), True, np.random.default_rng(5))
    rounded = run_torch(theirs, x, states, drawing(6), [4, 1, 2])
    exact = run_torch(theirs.double(), x, states, drawing(6), [4, 1, 2])
    with on_metal() as log:
        got = run_ours(layer, x, states, drawing(6), [4, 1, 2])
    assert log
    for name, value in got.items():
        assert_close(name, value, rounded[name], exact[name])


@pytest.mark.parametrize("kind", KINDS)
def test_names_shapes_initialisation_and_repr(kind):
    options = {"num_layers": 2, "bidirectional": True, "dropout": 0.25, "batch_first": True}
    theirs, layer = layers(kind, **options)
    word = kind.partition("_")[0]
    for bias in (True, False):
        fresh = getattr(ours, word)(I, H, bias=bias, **options, **KINDS[kind])
        again = getattr(torch.nn, word)(I, H, bias=bias, **options, **KINDS[kind])
        got = {name: tuple(value.shape) for name, value in tree_flatten(fresh.parameters())}
        assert got == {name: tuple(value.shape) for name, value in again.state_dict().items()}
    values = np.concatenate([np.array(value).flatten() for value in fresh.parameters().values()])
    assert 0.9 / np.sqrt(H) < np.abs(values).max() <= 1 / np.sqrt(H) and abs(values.mean()) < 0.1
    if kind != "RNN_relu":  # torch's repr does not name the nonlinearity
        assert repr(layer) == repr(theirs)
    layer = layers(kind)[1]
    assert repr(layer) == repr(layers(kind)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_weights_go_back_bit_for_bit_and_through_files(kind, tmp_path):
    theirs, layer = layers(kind, num_layers=2, bidirectional=True)
    again = layers(kind, num_layers=2, bidirectional=True)[0]
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    again.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in layer.parameters().items()})
    assert all(torch.equal(one, two) for one, two in zip(theirs.parameters(), again.parameters(), strict=True))
    path = str(tmp_path / "layer.safetensors")
    layer.save_weights(path)
    layer.update({name: value * 0 for name, value in layer.parameters().items()})
    layer.load_weights(path)
    for name, value in theirs.state_dict().items():
        np.testing.assert_array_equal(np.array(layer[name]), value.numpy())


def test_dropout_acts_between_layers_in_training_only():
    layer = ours.LSTM(I, H, num_layers=2, dropout=0.5)
    x = mx.random.normal((6, 4, I))

    def by_hand(factors):
        h = x
        for n in range(2):
            Wx, Wh, *biases = (layer[f"{name}_l{n}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
            h = lstm(h * factors if n else h, Wx, Wh, sum(biases)).h
        return h

    mx.random.seed(3)
    got = layer(x)[0]
    mx.random.seed(3)
    kept = mx.random.bernoulli(0.5, (6, 4, H))
    assert 0 < kept.sum().item() < kept.size
    np.testing.assert_allclose(np.array(got), np.array(by_hand(2 * kept)), rtol=0, atol=1e-6)
    mx.random.seed(3)
    assert mx.array_equal(layer(x)[0], got)  # equal seeds give equal dropout masks
    assert not mx.array_equal(layer(x)[0], got)
    layer.eval()
    np.testing.assert_allclose(np.array(layer(x)[0]), np.array(by_hand(1)), rtol=0, atol=1e-6)


def test_the_attribute_dropout_may_change():
    """A user may set `dropout` after the constructor, also to a whole number. It is checked again."""
    layer, x = ours.LSTM(I, H, num_layers=2, dropout=0.5), mx.ones((4, 2, I))
    layer.dropout, zeros = 1, mx.zeros((4, 2, H))
    bias, Wh = (layer[f"{name}_l1"] for name in ("bias_ih", "weight_hh"))
    expected = lstm(zeros, layer.weight_ih_l1, Wh, bias + layer.bias_hh_l1).h
    np.testing.assert_allclose(np.array(layer(x)[0]), np.array(expected), rtol=0, atol=1e-6)
    for wrong in (1.5, float("nan"), "0.5"):
        layer.dropout = wrong
        with pytest.raises(ValueError, match=rf"\[torch.LSTM\] dropout must .* but got '?{wrong}"):
            layer(x)


def test_the_key_of_a_call_decides_what_dropout_drops():
    """The argument `key` alone determines the dropout masks of all layers, also inside a compiled function. The
    global random state has no effect and does not change."""
    layer = ours.RNN(I, H, num_layers=3, dropout=0.5)
    x, key, drops = mx.random.normal((6, 4, I)), mx.random.key(3), []
    expected = x
    for n in range(3):
        Wx, Wh, *biases = (layer[f"{name}_l{n}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        if n:
            key, drawn = mx.random.split(key)
            drops.append(mx.random.bernoulli(0.5, (6, 4, H), drawn))
            expected = expected * 2 * drops[-1]
        expected = rnn(expected, Wx, Wh, sum(biases)).h
    assert not mx.array_equal(*drops)
    mx.random.seed(0)
    state = [np.array(array) for array in mx.random.state]
    got = layer(x, key=mx.random.key(3))[0]
    np.testing.assert_array_equal(state, [np.array(array) for array in mx.random.state])
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)
    assert not mx.array_equal(layer(x, key=mx.random.key(4))[0], got)
    compiled = mx.compile(lambda x, key: layer(x, key=key)[0])
    for seed in (3, 4):
        again = compiled(x[:2], mx.random.key(seed))
        np.testing.assert_allclose(again, layer(x[:2], key=mx.random.key(seed))[0], rtol=0, atol=1e-6)
    layer.eval()
    assert mx.array_equal(layer(x, key=mx.random.key(3))[0], layer(x)[0])
    for kind in (ours.LSTM, ours.GRU):
        one = kind(I, H, num_layers=2, dropout=0.5)
        assert mx.array_equal(one(x, key=mx.random.key(1))[0], one(x, key=mx.random.key(1))[0])


@pytest.mark.parametrize("engine", ["numpy", "ops"])
def test_what_dropout_leaves_is_divided_by_its_probability(engine):
    """Dropout divides the remaining values by 1 - dropout. The test uses dropout=0.25 (factor 4 / 3), because with
    0.5 a wrong division by dropout would give the same values."""
    layer, x, key = (
        ours.GRU(I, H, num_layers=2, dropout=0.25, engine=engine),
        mx.random.normal((6, 4, I)),
        mx.random.key(3),
    )
    got = layer(x, key=key)[0]
    one, two = ours.GRU(I, H), ours.GRU(H, H)
    for n, single in enumerate((one, two)):
        for name in single.parameters():
            single[name] = layer[f"{name[:-1]}{n}"]
    stays = mx.random.bernoulli(0.75, (6, 4, H), mx.random.split(key)[1])
    assert 0 < stays.sum().item() < stays.size
    expected = two(one(x)[0] * stays * (4 / 3))[0]
    np.testing.assert_allclose(np.array(got), np.array(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_biases_of_two_dtypes_promote(kind):
    layer, same = getattr(ours, kind)(I, H), getattr(ours, kind)(I, H)
    x = mx.random.normal((4, 2, I))
    for name in ("bias_ih_l0", "bias_hh_l0"):
        whole, half = layer[name], layer[name].astype(mx.float16)
        same.update(layer.parameters())
        layer[name], same[name] = half, half.astype(mx.float32)
        output = layer(x)[0]
        assert output.dtype == mx.float32
        np.testing.assert_allclose(np.array(output), np.array(same(x)[0]), rtol=0, atol=1e-6)
        with mx.stream(mx.cpu):
            layer[name] = whole.astype(mx.float64)
            assert layer(x)[0].dtype == mx.float64
        layer[name] = whole
    layer.set_dtype(mx.float16)
    layer.bias_hh_l0 = layer.bias_hh_l0.astype(mx.bfloat16)
    assert layer(x.astype(mx.float16))[0].dtype == mx.float32  # float16 and bfloat16 promote to float32


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_infinite_biases_give_nan_without_a_warning(kind):
    layer = getattr(ours, kind)(I, H)
    layer.bias_ih_l0, layer.bias_hh_l0 = (
        mx.full(layer.bias_ih_l0.shape, mx.inf),
        mx.full(layer.bias_hh_l0.shape, -mx.inf),
    )
    assert np.isnan(np.array(layer(mx.zeros((2, 2, I)))[0])).all()


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_of_everything(kind, bidirectional):
    """With dropout=1, upper layers get zeros as input, and no gradient flows from upper layers to lower ones. Values
    and gradients agree with torch and have no NaN."""
    theirs, layer = layers(kind, num_layers=2, dropout=1.0, bidirectional=bidirectional)
    x, states = inputs(theirs, (5, 3, I), False, np.random.default_rng(7))
    expected, got = (run(one, x, states, drawing(8)) for run, one in ((run_torch, theirs), (run_ours, layer)))
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-5, err_msg=name)
        assert value.any() or name == "dx" or "weight_ih_l1" in name


@pytest.mark.parametrize("form", ["time first", "batch first", "lengths"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch(kind, form):
    """An empty batch gives empty outputs and a zero gradient of every parameter."""
    options = {"num_layers": 2, "bidirectional": True, "batch_first": form == "batch first"}
    theirs, layer = layers(kind, **options)
    shape = (0, 5, I) if options["batch_first"] else (5, 0, I)
    lengths = [] if form == "lengths" else None
    for given in (False, True):
        x, states = inputs(theirs, shape, given, np.random.default_rng(9))
        expected = run_torch(theirs, x, states, drawing(1))  # without lengths: torch cannot pack an empty batch
        got = run_ours(layer, x, states, drawing(1), lengths)
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert got[name].shape == value.shape and got[name].dtype == np.float32 and not got[name].any(), name
    layer.set_dtype(mx.float16)
    output, last = layer(mx.zeros(shape, mx.float16))
    assert output.dtype == mx.float16 == (last[0] if isinstance(last, tuple) else last).dtype
    assert layer(mx.zeros(shape))[0].dtype == mx.float32


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("sorts", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences(kind, sorts, batch_first):
    """Packing, two layers of both directions with first states, and unpacking give the values and gradients of torch.
    The lengths rise and fall, some are equal."""
    is_lstm = kind.startswith("LSTM")
    theirs, layer = layers(kind, num_layers=2, bidirectional=True, batch_first=batch_first)
    lengths, rng = ([5, 4, 4, 1] if sorts else [4, 1, 5, 4]), np.random.default_rng(11)
    x, states = inputs(theirs, (4, 5, I) if batch_first else (5, 4, I), True, rng)
    options = {"batch_first": batch_first, "enforce_sorted": sorts}
    x, *states = (array.astype(np.float32) for array in (x, *states))
    whole = torch.nn.utils.rnn.pack_padded_sequence(torch.tensor(x), lengths, **options)

    tensors = [torch.tensor(array, requires_grad=True) for array in (x, *states)]
    packed = torch.nn.utils.rnn.pack_padded_sequence(tensors[0], lengths, **options)
    output, last = theirs(packed, tuple(tensors[1:]) if is_lstm else tensors[1])
    padded, counts = torch.nn.utils.rnn.pad_packed_sequence(output, batch_first, -3.0, 7)
    last, cotangent = list(last) if is_lstm else [last], rng.standard_normal(padded.shape).astype(np.float32)
    (sum((state**2).sum() for state in last) + (padded * torch.tensor(cotangent)).sum()).backward()

    def run(x, *states):
        packed = ours.pack_padded_sequence(x, lengths, **options)
        np.testing.assert_array_equal(packed.data, whole.data)
        output, last = layer(packed, tuple(states) if is_lstm else states[0])
        assert isinstance(output, ours.PackedSequence) and list(output.batch_sizes) == whole.batch_sizes.tolist()
        for name in ("sorted_indices", "unsorted_indices"):
            one, other = getattr(output, name), getattr(whole, name)
            assert (one is None) == (other is None) and (one is None or one.tolist() == other.tolist())
        return *ours.pad_packed_sequence(output, batch_first, -3.0, 7), *(last if is_lstm else [last])

    def loss(*arrays):
        padded, _, *last = run(*arrays)
        return sum(mx.square(state).sum() for state in last) + (padded * cotangent).sum()

    arrays = [mx.array(array) for array in (x, *states)]
    got = run(*arrays)
    assert got[1].tolist() == counts.tolist()
    for one, other in zip((got[0], *got[2:]), (padded, *last), strict=True):
        np.testing.assert_allclose(one, other.detach(), rtol=0, atol=1e-5)
    gradients = mx.grad(loss, argnums=tuple(range(len(arrays))))(*arrays)
    for one, other in zip(gradients, tensors, strict=True):
        np.testing.assert_allclose(one, other.grad, rtol=0, atol=2e-5)


def test_packed_sequences_of_other_shapes():
    """Random batches of scalars and matrices per step are packed and unpacked as by torch."""
    rng = np.random.default_rng(12)
    for _ in range(50):
        L, N, more = rng.integers(1, 6), rng.integers(1, 6), [(), (2,), (2, 3)][rng.integers(3)]
        lengths, batch_first = rng.integers(1, L + 1, N).tolist(), bool(rng.integers(2))
        x = rng.standard_normal((N, L, *more) if batch_first else (L, N, *more)).astype(np.float32)
        theirs = torch.nn.utils.rnn.pack_padded_sequence(torch.tensor(x), lengths, batch_first, enforce_sorted=False)
        packed = ours.pack_padded_sequence(mx.array(x), lengths, batch_first, enforce_sorted=False)
        np.testing.assert_array_equal(packed.data, theirs.data)
        assert packed.batch_sizes == tuple(theirs.batch_sizes.tolist())
        for first in (False, True):
            padded, counts = ours.pad_packed_sequence(packed, first)
            right, _ = torch.nn.utils.rnn.pad_packed_sequence(theirs, first)
            np.testing.assert_array_equal(padded, right)
            assert counts.tolist() == lengths


PACKED = ours.PackedSequence(mx.zeros((3, I)), (2, 1))
BAD_PACKED = {
    "must fall, the longest first": lambda: ours.pack_padded_sequence(mx.zeros((3, 2, I)), [1, 2]),
    r"lengths must lie in 1..3": lambda: ours.pack_padded_sequence(mx.zeros((3, 2, I)), [3, 0]),
    r"lengths must have shape \[2\]": lambda: ours.pack_padded_sequence(mx.zeros((3, 2, I)), [3]),
    r"input must be an mlx.core.array \[L, N": lambda: ours.pack_padded_sequence(np.zeros((3, 2)), [3, 1]),
    "batch_sizes must be integers": lambda: ours.pad_packed_sequence(PACKED._replace(batch_sizes=(1, 2))),
    "data must have 4 steps": lambda: ours.pad_packed_sequence(PACKED._replace(batch_sizes=(2, 2))),
    "sorted_indices must hold": lambda: ours.pad_packed_sequence(PACKED._replace(sorted_indices=mx.array([1, 1]))),
    "sequence must be": lambda: ours.pad_packed_sequence(mx.zeros((2, 2))),
    "total_length must": lambda: ours.pad_packed_sequence(PACKED, total_length=1),
    "lengths must be None for a PackedSequence": lambda: ours.GRU(I, H)(PACKED, lengths=[2, 1]),
    r"the data of input must have shape \[P, 4\]": lambda: ours.GRU(4, H)(PACKED),
}


@pytest.mark.parametrize("text", BAD_PACKED)
def test_bad_packed_sequences(text):
    with pytest.raises(ValueError, match=rf"^\[torch\.\w+\] .*{text}"):
        BAD_PACKED[text]()


def test_a_subclass_with_parameters_of_its_own():
    class WithHead(ours.LSTM):
        def __init__(self, *sizes, **options):
            super().__init__(*sizes, **options)
            self.head, self.scale = mlx.nn.Linear(H, 1), mx.ones(1, mx.float32)

        def __call__(self, x):
            return self.head(super().__call__(x)[0]) * self.scale

    layer = WithHead(I, H, 2)
    assert layer(mx.zeros((4, 2, I))).shape == (4, 2, 1)
    for name in ours.LSTM(I, H, 2).parameters():
        layer[name] = layer[name].astype(mx.float16)
    assert ours.LSTM.__call__(layer, mx.zeros((4, 2, I), mx.float16))[0].dtype == mx.float16
    gradients = mlx.nn.value_and_grad(layer, lambda x: layer(x).sum())(mx.ones((4, 2, I)))[1]
    assert gradients["head"]["weight"].any() and gradients["weight_ih_l0"].any()


def test_numpy_s_numbers():
    layer = ours.LSTM(np.int64(I), np.int8(H), np.uint8(2), dropout=np.float32(0.5), proj_size=np.int16(2))
    assert repr(layer) == repr(ours.LSTM(I, H, 2, dropout=0.5, proj_size=2))
    assert ours.RNN(I, np.int8(100), bias=False).weight_hh_l0.shape == ours.RNN(I, 100).weight_hh_l0.shape
    assert layer(mx.ones((2, 2, I)))[0].shape == (2, 2, 2)
    with pytest.raises(ValueError, match="num_layers must be an integer of at least 1"):
        ours.LSTM(I, H, np.bool_(True))


@pytest.mark.parametrize("kind", KINDS)
def test_steps_one_by_one_and_items_one_by_one(kind):
    """One call for the whole batch gives the same results as calls for single time steps, with the states passed on,
    and as calls for single sequences."""
    layer = layers(kind, num_layers=2)[1]
    x, last, outputs = mx.random.normal((5, 3, I)), None, []
    whole, end = layer(x)
    for t in range(5):
        output, last = layer(x[t : t + 1], last)
        outputs.append(output)
    pairs = [(mx.concatenate(outputs), whole)]
    pairs += list(zip(last, end, strict=True)) if isinstance(end, tuple) else [(last, end)]
    pairs += [(layer(x[:, b])[0], whole[:, b]) for b in range(3)]
    for got, expected in pairs:
        np.testing.assert_allclose(np.array(got), np.array(expected), rtol=0, atol=2e-6)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("bidirectional", [False, True])
def test_biases_whose_sum_overflows_raise_no_warning(bidirectional):
    layer = ours.LSTM(I, H, bidirectional=bidirectional)
    layer.bias_ih_l0 = layer.bias_hh_l0 = mx.full((4 * H,), 3e38)
    assert mx.all(mx.isfinite(layer(mx.ones((3, 2, I)))[0][..., :H])).item()


def test_joined_parameters_are_cached_while_they_are_the_same(monkeypatch):
    joined = []
    monkeypatch.setattr(weights, "_cached", {})  # without entries of other tests, which may end at any moment
    monkeypatch.setattr(ours, "join", lambda each: joined.append(len(each)) or join(each))
    x = mx.random.normal((3, 2, I))

    def check(layer):
        for update in (
            lambda: None,
            lambda: layer.update({"bias_hh_l0_reverse": layer.bias_hh_l0_reverse + 1}),
            lambda: layer.weight_hh_l0.__imul__(2),  # in place: the same Python object with new values
            lambda: layer.update({"weight_ih_l0": layer.weight_ih_l0 + 1}),
        ):
            update()
            joined.clear()
            first, second = layer(x)[0], layer(x)[0]
            assert joined == [2] and len(weights._cached) == 1
            derived = mx.vjp(lambda x: [layer(x)[0]], [x], [first])[0][0]  # nothing is cached inside a vjp
            for other in (second, derived):
                np.testing.assert_array_equal(np.array(other), np.array(first))

    check(ours.GRU(I, H, bidirectional=True))
    assert not weights._cached


def test_compile_and_export(tmp_path):
    layer = ours.LSTM(I, H, num_layers=2, bidirectional=True)
    x = mx.random.normal((4, 2, I))
    compiled = mx.compile(lambda x: layer(x)[0])(x)
    np.testing.assert_allclose(np.array(compiled), np.array(layer(x)[0]), rtol=0, atol=1e-6)
    layer.eval()
    path = str(tmp_path / "layer.mlxfn")
    mx.export_function(path, lambda x: layer(x)[0], x)
    np.testing.assert_allclose(np.array(mx.import_function(path)(x)[0]), np.array(layer(x)[0]), rtol=0, atol=1e-6)


def test_dtypes():
    layer = ours.GRU(I, H)
    assert layer(mx.zeros((2, 2, I), mx.bfloat16))[0].dtype == mx.float32
    layer.set_dtype(mx.bfloat16)
    output, h_n = layer(mx.zeros((2, 2, I), mx.bfloat16))
    assert output.dtype == h_n.dtype == mx.bfloat16


def changed(layer, input=None, **attributes):
    """Set attributes of a layer, then call the layer."""
    for name, value in attributes.items():
        setattr(layer, name, value)
    layer(mx.zeros((2, 2, I)) if input is None else input)


BAD = {
    "input_size must be an integer of at least 1": lambda: ours.LSTM(0, H),
    "hidden_size must be at most 2147483647, the largest size in MLX but got 10{30}": lambda: ours.LSTM(I, 10**30),
    "hidden_size must be an integer of at least 1": lambda: ours.GRU(I, 2.0),
    "num_layers must be an integer of at least 1": lambda: ours.RNN(I, H, True),
    "num_layers must be at most 65536 but got 1000000": lambda: ours.LSTM(I, H, 10**6),
    "engine must be one of fused, stepwise, numpy, ops but got 'metal'": lambda: ours.LSTM(I, H, engine="metal"),
    "engine must be one of .* but got 'gpu'": lambda: ours.GRUCell(I, H, engine="gpu"),
    r"engine must be one of .* but got array": lambda: changed(ours.GRU(I, H), engine=mx.zeros(2)),
    r"checkpoint_every must be a number .* but got \[2\]": lambda: changed(ours.GRU(I, H), checkpoint_every=[2]),
    r"bias_ih_l0 must have shape \[20\] but got shape \[1\]": lambda: changed(ours.LSTM(I, H), bias_ih_l0=mx.zeros(1)),
    r"bias_hh_l0_reverse must have shape \[5\] but got": lambda: changed(
        ours.RNN(I, H, bidirectional=True), bias_hh_l0_reverse=mx.array(1.0)
    ),
    r"bias_hh must have shape \[15\] but got shape \[1\]": lambda: changed(
        ours.GRUCell(I, H), mx.zeros((2, I)), bias_hh=mx.zeros(1)
    ),
    r"hx must be a tuple \(h_0, c_0\) but got tuple of 1": lambda: ours.LSTM(I, H)(
        mx.zeros((2, 2, 3)), (mx.zeros((1, 2, 5)),)
    ),
    "bias must be True or False": lambda: ours.LSTM(I, H, bias=1),
    "batch_first must be True or False": lambda: ours.LSTM(I, H, batch_first=None),
    "bidirectional must be True or False": lambda: ours.LSTM(I, H, bidirectional="yes"),
    r"dropout must lie in \[0, 1\] but got 1.5": lambda: ours.LSTM(I, H, dropout=1.5),
    "dropout must be a finite number but got True": lambda: ours.LSTM(I, H, dropout=True),
    "proj_size must be less than hidden_size = 5": lambda: ours.LSTM(I, H, proj_size=5),
    "proj_size must be an integer of at least 0": lambda: ours.LSTM(I, H, proj_size=-1),
    "nonlinearity must be one of 'tanh', 'relu'": lambda: ours.RNN(I, H, nonlinearity="sigmoid"),
    r"input must have shape \[L, N, 3\] but got shape \[2, 2, 4\]": lambda: ours.LSTM(I, H)(mx.zeros((2, 2, 4))),
    r"input must have shape \[N, L, 3\]": lambda: ours.GRU(I, H, batch_first=True)(mx.zeros((1, 2, 2, 3))),
    r"input must have shape \[L, 3\] but got": lambda: ours.GRU(I, H)(mx.zeros((2, 4))),
    r"input must be an mlx.core.array: make one by mx.array\(...\), but got ndarray": lambda: ours.RNN(I, H)(
        np.zeros((2, 2, 3))
    ),
    r"input must be an mlx.core.array: make one by mx.array\(...\), but got Tensor": lambda: ours.RNN(I, H)(
        torch.zeros(2, 2, 3)
    ),
    "input must be an mlx.core.array: pad it and use lengths, but got PackedSequence": lambda: ours.LSTM(I, H)(
        torch.nn.utils.rnn.pack_sequence([torch.zeros(2, 3)])
    ),
    r"h_0 must have shape \[1, 2, 5\], as input is \[N, L, I\], but got": lambda: ours.GRU(I, H, batch_first=True)(
        mx.zeros((2, 4, 3)), mx.zeros((2, 1, 5))
    ),
    r"h_0 must be an mlx.core.array: pass the tuple's arrays one by one, but got tuple": lambda: ours.GRU(I, H)(
        mx.zeros((4, 2, 3)), (mx.zeros((1, 2, 5)), mx.zeros((1, 2, 5)))
    ),
    r"hidden_size must be an integer of at least 1, as weights are drawn from .* but got 0": lambda: ours.LSTM(I, 0),
    "input must have at least one step": lambda: ours.RNN(I, H)(mx.zeros((0, 2, 3))),
    r"input must have at least one step but got shape \[0, 3\]": lambda: ours.RNN(I, H)(mx.zeros((0, 3))),
    r"input must have at least one step but got shape \[0, 0, 3\]": lambda: ours.RNN(I, H)(mx.zeros((0, 0, 3))),
    r"input must have shape \[L, N, 3\] but got shape \[2, 0, 0\]": lambda: ours.RNN(I, H)(mx.zeros((2, 0, 0))),
    r"h_0 must have shape \[1, 0, 5\]": lambda: ours.RNN(I, H)(mx.zeros((2, 0, 3)), mx.zeros((1, 1, 5))),
    r"lengths must have shape \[0\]": lambda: ours.RNN(I, H)(mx.zeros((2, 0, 3)), lengths=[1]),
    "input must be float32": lambda: ours.RNN(I, H)(mx.zeros((2, 2, 3), mx.int32)),
    r"hx must be a tuple \(h_0, c_0\)": lambda: ours.LSTM(I, H)(mx.zeros((2, 2, 3)), mx.zeros((1, 2, 5))),
    r"h_0 must have shape \[2, 2, 5\]": lambda: ours.GRU(I, H, 2)(mx.zeros((4, 2, 3)), mx.zeros((1, 2, 5))),
    r"c_0 must have shape \[1, 5\]": lambda: ours.LSTM(I, H)(mx.zeros((2, 3)), (mx.zeros((1, 5)), mx.zeros((1, 1, 5)))),
    r"key must be one of mx.random.key or .* but got int": lambda: ours.GRU(I, H)(mx.zeros((4, 2, 3)), key=3),
    r"key must be .* but got mlx.core.uint32, shape \[3, 2\]": lambda: ours.LSTM(I, H)(
        mx.zeros((4, 2, 3)), key=mx.random.split(mx.random.key(0), 3)
    ),
    r"h must have shape \[2, 5\], as input is \[N, I\] = \[2, 3\]": lambda: ours.GRUCell(I, H)(
        mx.zeros((2, 3)), mx.zeros((1, 2, 5))
    ),
    r"input must have shape \[N, 3\] but got shape \[4, 2, 3\]": lambda: ours.LSTMCell(I, H)(mx.zeros((4, 2, 3))),
    r"hx must be a tuple .* but got array": lambda: ours.LSTMCell(I, H)(mx.zeros((2, 3)), mx.zeros((2, 5))),
    "input must be .* but got list": lambda: ours.RNNCell(I, H)([1.0, 2.0, 3.0]),
    "nonlinearity must be one of .* but got 'sigmoid'": lambda: ours.RNNCell(I, H, nonlinearity="sigmoid"),
    "lengths must be integers, .* but got Tensor": lambda: ours.LSTM(I, H)(
        mx.zeros((4, 2, 3)), lengths=torch.tensor([4, 1])
    ),
    r"lengths must have shape \[2\], .* got shape \[4\], as many as the input has steps: change batch_first": lambda: (
        ours.GRU(I, H)(mx.zeros((4, 2, 3)), lengths=[2, 2, 1, 2])
    ),
    "lengths must lie in 0..4": lambda: ours.LSTM(I, H)(mx.zeros((4, 2, 3)), lengths=[5, 1]),
}


@pytest.mark.parametrize("rule", BAD)
def test_bad_arguments(rule):
    with pytest.raises(ValueError, match=rf"^\[(torch\.(LSTM|GRU|RNN)(Cell)?|lstm|gru)\] {rule}"):
        BAD[rule]()


def test_lengths_of_exchanged_axes_get_a_hint():
    """If there are as many lengths as steps, the error of a layer of `mlx_lstm.nn` says which axes to exchange."""
    with pytest.raises(ValueError, match=r"shape \[3\], as many as the input has steps: exchange batch and time of"):
        nn.LSTM(I, H)(mx.zeros((5, 3, I)), lengths=[2, 3, 1])


def test_from_weights_refuses_options_in_its_own_name():
    """`torch.from_weights` refuses an option that torch lacks. The error begins with the name `torch.from_weights` and
    also names the function that takes the option."""
    weights = convert.from_ops("gru", [{"Wx": mx.ones((12, 3)), "Wh": mx.ones((12, 4))}], reset="before")
    with pytest.raises(ValueError, match=r"^\[torch.from_weights\] reset must be .* nn.from_weights have.* 'before'"):
        ours.from_weights(weights)


def test_torch_s_arrays_in_the_other_layers_and_ops():
    tensor = torch.zeros(2, 5, I)
    with pytest.raises(ValueError, match=r"\[nn.LSTM\] x must be .*: make one by mx.array\(...\), but got Tensor\."):
        nn.LSTM(I, H)(tensor)
    packed = torch.nn.utils.rnn.pack_sequence([tensor[0]])
    for call in (nn.GRU(I, H), lambda x: lstm(x, mx.zeros((4 * H, I)), mx.zeros((4 * H, H)))):
        with pytest.raises(ValueError, match=r"x must be .*: pad it and use lengths, but got PackedSequence\."):
            call(packed)


def test_the_dialect_is_torch_s_own_signature():
    """The constructors have torch's argument names in torch's order. Only `device` and `dtype` are missing, because
    MLX sets them in other ways."""
    import inspect

    base = [name for name in inspect.signature(torch.nn.modules.rnn.RNNBase.__init__).parameters if name != "mode"]
    expected = [name for name in base if name not in ("device", "dtype")]
    for layer, without in ((ours.LSTM, ()), (ours.GRU, ("proj_size",))):
        names = [n for n in inspect.signature(layer.__init__).parameters if n not in ("engine", "checkpoint_every")]
        assert names == [name for name in expected if name not in without]
    assert list(itertools.islice(inspect.signature(ours.RNN.__init__).parameters, 4, 6)) == ["nonlinearity", "bias"]
    for word in ("LSTMCell", "GRUCell", "RNNCell"):
        cells = (inspect.signature(getattr(place, word).__init__).parameters for place in (torch.nn, ours))
        theirs, names = ([name for name in each if name not in ("engine", "device", "dtype")] for each in cells)
        assert names == theirs


def test_dropout_inside_of_a_checkpoint_needs_a_key():
    """Inside `mx.checkpoint` the gradient of a layer with dropout is right with a `key`. Without a key MLX drops
    other elements when it computes the layer again, so the gradient is wrong."""
    layer = ours.LSTM(3, 4, num_layers=2, dropout=0.5)
    x = mx.random.normal((9, 5, 3), key=mx.random.key(1))
    differences = []
    for key in (mx.random.key(2), None):
        gradients = []
        for wrap in (mx.checkpoint, lambda function: function):
            mx.random.seed(3)
            run = wrap(lambda x, key=key: layer(x, key=key)[0])
            gradients.append(mx.grad(lambda x, run=run: run(x).square().sum())(x))
            mx.eval(gradients)
        differences.append(mx.abs(gradients[0] - gradients[1]).max().item())
    assert differences[0] < 1e-6 < differences[1] / 100
