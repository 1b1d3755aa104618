"""Tests of `mlx_lstm.mpsgraph`, our version of Apple's RNN ops in MPSGraph. Results are compared with the float64
oracle, `mx.grad` and torch; wrong arguments are refused."""

from dataclasses import asdict

import mlx.core as mx
import numpy as np
import pytest
from assertions import assert_within
from on_metal import on_metal

from mlx_lstm import mpsgraph
from mlx_lstm.engines import METAL_ENGINES, choose
from mlx_lstm.engines.cells import GRUCell, LSTMCell, RNNCell
from mlx_lstm.lab.mpsgraph import judge, ours
from mlx_lstm.lab.mpsgraph.cases import ACTIVATION_PROPERTIES, COTANGENTS, GATES, RESULTS, CompareCase, draw, draw_until
from mlx_lstm.mpsgraph.layouts import ACTIVATIONS, LEADING_ONE, layouts, title
from mlx_lstm.oracle.closeness import bounds_of, exact_and_bounds

ROUNDING_MARGIN = 1e-4  # smallest allowed distance of relu and hard_sigmoid arguments from their kinks
CELLS = {"lstm": LSTMCell(), "gru": GRUCell(), "single_gate_rnn": RNNCell()}
CASES = {"lstm": 50, "gru": 25, "single_gate_rnn": 20}
"""The number of random cases that a test draws for each op and each seed."""

OPTIONAL = ("input_weight", "bias", "peephole", "init_state", "init_cell", "secondary_bias", "mask")
OPTIONAL += ("state_gradient", "cell_gradient")
FLAGS = {"lstm": ("forget_gate_last",), "gru": ("reset_gate_first", "reset_after", "flip_z"), "single_gate_rnn": ()}
"""The flags of each op, without those for directions, produce_cell and training."""


def combination(rng, op):
    """Return random keyword arguments for `draw`: direction, flags, activations, absent arguments, shape of the
    mask, and sizes."""

    def pick(*values):
        return values[rng.integers(len(values))]

    descriptor = pick({}, {"reverse": True}, {"bidirectional": True}, {"bidirectional": True, "reverse": True})
    chosen = dict(descriptor) | {flag: True for flag in FLAGS[op] if rng.random() < 0.5}
    if rng.random() < 0.6:
        chosen |= {name: str(pick(*ACTIVATIONS)) for name in ACTIVATION_PROPERTIES[op]}
    chosen["absent"] = [name for name in OPTIONAL if rng.random() < 0.4]
    chosen["mask_shape"] = pick(("N", "DH"), ("DH",), (1, "DH"), (1, "N", "DH"), ("N", 1))
    chosen["sizes"] = (pick(1, 2, 3), pick(1, 2, 3), pick(1, 3), pick(1, 2, 3))
    return chosen


def random_case(rng, op):
    """Return a case (dict of arrays and options) with random options. No argument of an activation is so close to a
    kink (e.g. 0 for relu) that rounding could move it across."""
    for _ in range(200):
        case = draw(rng, op, **combination(rng, op))
        if judge.kink_distance(case) > ROUNDING_MARGIN:
            return case
    raise RuntimeError("no case keeps off its kinks")


def check(case, by_engine, **readings):
    """Assert that the results of every engine in `by_engine` are complete and float32, and differ from the oracle's
    by at most the error bounds. `readings` say how to interpret Apple's documentation where it is unclear."""
    for results in by_engine.values():
        assert list(results) == case.results
        assert {value.dtype for value in results.values()} == {np.dtype(np.float32)}
    exact, limit = within(case, **readings)
    check_within(case, by_engine, exact, limit)


def within(case, **readings):
    """Return the oracle's results of a case and their error bounds."""
    return exact_and_bounds(lambda fl: judge.evaluated(case, fl, **readings), np.float32)


def check_within(case, by_engine, exact, limit):
    for engine, results in by_engine.items():
        for name, value in results.items():
            assert_within(f"{case.descriptor} {engine} {name}", value, exact[name], limit[name])


def has_metal(engine, case):
    """Return whether the Metal engine supports the cell of a case (dict of arrays and options) in its direction."""
    sizes = (*case.arrays["source"].shape, case.hidden)
    options = {"dtype": mx.float32, "device": "gpu", "metal": True, "traced": False}
    options |= {"cell": CELLS[case.op], "bidirectional": case.bidirectional, "requested": engine}
    try:
        choose(sizes=sizes, **options)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
@pytest.mark.parametrize("op", CASES)
def test_random_combinations(op, seed):
    rng = np.random.default_rng([seed, len(op)])
    for _ in range(CASES[op]):
        case = random_case(rng, op)
        check(case, {engine: ours.run(case, engine) for engine in ("ops", "numpy")})


def check_on_metal(op, count, seed):
    """Check `count` random cases on the Metal engines that support them; successive cases use different engines.
    Return the number of cases that ran."""
    rng, ran = np.random.default_rng(seed), 0
    with on_metal():
        for number in range(count):
            case = random_case(rng, op)
            engines = [engine for engine in METAL_ENGINES if has_metal(engine, case)]
            if engines:
                engine = engines[number % len(engines)]
                check(case, {engine: ours.run(case, engine)})
                ran += 1
    return ran


@pytest.mark.parametrize("op, count", [("lstm", 2), ("gru", 1), ("single_gate_rnn", 1)])
def test_random_combinations_on_metal(op, count):
    check_on_metal(op, count, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("op, count", [("lstm", 20), ("gru", 10), ("single_gate_rnn", 10)])
def test_many_random_combinations_on_metal(op, count):
    check_on_metal(op, count, seed=2)


@pytest.mark.parametrize("op", CASES)
def test_gradients_of_the_forward_op_are_those_of_the_gradient_op(op):
    """`mx.vjp` of the forward op, with and without `checkpoint_every`, gives the gradients that the gradient op
    defines. The cotangents of h and of the last states are the gradient op's source_gradient, state_gradient and
    cell_gradient."""
    rng = np.random.default_rng(3)
    for number in range(8):
        case = random_case(rng, op)
        (expected, limit), descriptor = within(case), ours.make_descriptor(case)
        how = {"engine": ("ops", "numpy")[number % 2], "checkpoint_every": (None, 1, 2, "auto")[number // 2 % 4]}
        arrays = {name: mx.array(array) for name, array in case.arrays.items()}
        fixed = {"mask": arrays["mask"]} if "mask" in arrays else {}

        def outputs(*values, case=case, fixed=fixed, descriptor=descriptor, how=how):
            given = dict(zip(case.gradients, values, strict=True)) | fixed
            results = dict(
                zip(
                    RESULTS[case.op],
                    getattr(mpsgraph, case.op)(**given, descriptor=descriptor, **how),
                    strict=True,
                )
            )
            seen = {"source_gradient": results["h"], "state_gradient": last(case, results["h"])}
            if "c" in results:
                seen["cell_gradient"] = last(case, results["c"])
            return [seen[name] for name in COTANGENTS[case.op] if name in case.arrays]

        cotangents = [arrays[name] for name in COTANGENTS[op] if name in arrays]
        _, gradients = mx.vjp(outputs, [arrays[name] for name in case.gradients], cotangents)
        for name, gradient in zip(case.gradients, gradients, strict=True):
            assert_within(name, np.array(gradient), expected[f"d{name}"], limit[f"d{name}"])


def last(case, states):
    """Return the last states as one array [N, D H], from the states of all time steps in D directions. The last
    state of the reverse direction is at the first time step."""
    if not case.bidirectional:
        return states[0 if case.descriptor.get("reverse") else -1]
    forward, reverse = mx.split(states, 2, axis=-1)
    return mx.concatenate([forward[-1], reverse[0]], axis=-1)


@pytest.mark.parametrize("layers, bidirectional", [(1, False), (2, True)], ids=["one, uni", "two, bi"])
def test_torch_lstm_by_chained_calls(layers, bidirectional):
    torch = pytest.importorskip("torch")
    T, N, I, H, D = 6, 3, 5, 4, 2 if bidirectional else 1
    torch.manual_seed(0)
    lstm = torch.nn.LSTM(I, H, layers, bidirectional=bidirectional)
    source = torch.randn(T, N, I, requires_grad=True)
    states = [torch.randn(layers * D, N, H, requires_grad=True) for _ in range(2)]
    y, ends = lstm(source, tuple(states))
    cotangents = [torch.randn_like(value) for value in (y, *ends)]
    torch.autograd.backward([y, *ends], cotangents)

    stack = [apple_weights(lstm, layer, D) for layer in range(layers)]
    named = {"init_state": states[0], "init_cell": states[1]}
    named |= {"state_gradient": cotangents[1], "cell_gradient": cotangents[2]}
    for name, value in named.items():
        for weights, rows in zip(stack, side_by_side(value, layers, D), strict=True):
            weights[name] = rows
    descriptor = {"bidirectional": True} if bidirectional else {}
    case = CompareCase("", "lstm", descriptor, {})

    def chain_with(run):
        return chain(case, stack, source.detach().numpy(), cotangents[0].numpy(), run)

    limit = bounds_of(lambda fl: chain_with(lambda case: judge.evaluated(case, fl)), np.float32)
    expected = {"y": y.detach().numpy(), "dsource 0": source.grad.numpy()}
    for layer in range(layers):
        gradients = apple_weights(lstm, layer, D, gradient=True)
        gradients |= {name: side_by_side(named[name].grad, layers, D)[layer] for name in ("init_state", "init_cell")}
        expected |= {f"d{name} {layer}": gradient for name, gradient in gradients.items()}
    for engine in ("ops", "numpy"):
        got = chain_with(lambda case, engine=engine: ours.run(case, engine))
        for name, value in expected.items():
            assert_within(name, got[name], value.astype(np.float64), 2 * limit[name])


def chain(case, stack, source, source_gradient, run):
    """Run a stack of layers forward, then backward. In the backward pass, the dsource (gradient of the input) of one
    layer is the source_gradient (cotangent of h) of the layer below.

    `run` returns all results of a case, gradients included. In the forward pass only h is used, so source_gradient
    is zero there.
    """
    sources, found = [source], {}
    for weights in stack:
        width = weights["init_state"].shape[-1]
        zeros = np.zeros((*source.shape[:2], width), np.float32)
        results = run(case._replace(arrays=weights | {"source": sources[-1], "source_gradient": zeros}))
        sources.append(results["h"])
    gradient = source_gradient
    for layer in reversed(range(len(stack))):
        results = run(case._replace(arrays=stack[layer] | {"source": sources[layer], "source_gradient": gradient}))
        gradient = results["dsource"]
        found |= {f"{name} {layer}": value for name, value in results.items() if name.startswith("d")}
    return found | {"y": sources[-1]}


def apple_weights(lstm, layer, D, gradient=False):
    """Return the weights of a torch layer, or their gradients, under Apple's names. With two directions, the forward
    direction comes first, and the recurrent weight has a leading axis for the directions. The bias is b_ih + b_hh."""

    def parameters(kind):
        values = [getattr(lstm, f"{kind}_l{layer}{suffix}") for suffix in ("", "_reverse")[:D]]
        return [(value.grad if gradient else value.detach()).numpy() for value in values]

    R, bias = parameters("weight_hh"), parameters("bias_ih")
    if not gradient:
        bias = [one + other for one, other in zip(bias, parameters("bias_hh"), strict=True)]
    found = {"recurrent_weight": np.stack(R) if D == 2 else R[0], "bias": np.concatenate(bias)}
    return found | {"input_weight": np.concatenate(parameters("weight_ih"))}


def side_by_side(states, layers, D):
    """Split torch's states [L D, N, H] (L layers, D directions) into a list of L arrays [N, D H]."""
    rows = [states.detach()[n].numpy() for n in range(layers * D)]
    return [np.concatenate(rows[layer * D : layer * D + D], axis=-1) for layer in range(layers)]


def call(op, arrays, **options):
    """Call a forward op for training. It gets all of `arrays` except the cotangents."""
    given = {name: mx.array(array) for name, array in arrays.items() if name not in COTANGENTS[op]}
    return getattr(mpsgraph, op)(**given, **options)


@pytest.mark.parametrize("readings", [{"output_peephole": "current"}, {"hard_sigmoid": "x/6"}])
def test_other_readings_of_the_formula(readings):
    names = ("input_gate", "forget_gate", "cell_gate", "output_gate")
    rng = np.random.default_rng(1)
    descriptor = {f"{name}_activation": "hard_sigmoid" for name in names}
    case = draw(rng, "lstm", absent=(), bidirectional=True, **descriptor)
    for check_case in (case, case._replace(descriptor=case.descriptor | {"forget_gate_last": True})):
        check(check_case, {"ops": ours.run(check_case, "ops", **readings)}, **readings)
        default, other = ours.run(check_case, "ops"), ours.run(check_case, "ops", **readings)
        assert all(np.abs(default[name] - other[name]).max() > 1e-3 for name in default)


@pytest.mark.parametrize("op", CASES)
def test_hard_sigmoid_of_slope_a_sixth(op):
    rng, readings = np.random.default_rng(1), {"hard_sigmoid": "x/6"}
    descriptor = dict.fromkeys(ACTIVATION_PROPERTIES[op], "hard_sigmoid")
    for _ in range(4):
        case = draw_until(
            lambda case: judge.kink_distance(case, **readings) > ROUNDING_MARGIN,
            rng,
            op,
            **combination(rng, op) | descriptor,
        )
        check(case, {"ops": ours.run(case, "ops", **readings)}, **readings)


@pytest.mark.parametrize("op", CASES)
def test_layouts_of_a_mask(op):
    rng = np.random.default_rng(2)
    case = draw(rng, op, (3, 2, 3, 4), absent=(), bidirectional=True)
    mask = case.arrays["mask"]  # shape [N, 2H]: both directions side by side
    plain = ours.run(case, "ops")
    stacked = np.stack(np.split(mask, 2, axis=-1))
    same = {"directions": stacked, "steps": np.broadcast_to(mask, (3, *mask.shape))}
    for layout, array in same.items():
        got = ours.run(case._replace(arrays=case.arrays | {"mask": array}), "ops", mask_layout=layout)
        for name, value in plain.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6, err_msg=f"{layout} {name}")
    steps = rng.random((3, 2, 8)).astype(np.float32)
    case = case._replace(arrays=case.arrays | {"mask": steps})
    check(case, {"ops": ours.run(case, "ops", mask_layout="steps")})


def test_results_of_training_without_produce_cell():
    case = draw(np.random.default_rng(0), "lstm", (3, 2, 3, 4))

    def shapes(produce_cell, training, **options):
        descriptor = mpsgraph.LSTMDescriptor(produce_cell=produce_cell, training=training)
        return [array.shape[-1] for array in call("lstm", case.arrays, descriptor=descriptor, **options)]

    assert shapes(False, False) == [4] and shapes(True, False) == [4, 4]
    assert shapes(True, True) == shapes(False, True) == [4, 4, 16]
    assert shapes(True, True, training_returns_cell=False) == [4, 4, 16]
    assert shapes(False, True, training_returns_cell=False) == [4, 16]


@pytest.mark.parametrize("op", CASES)
def test_leading_ones(op):
    names = {"lstm": ["bias", "peephole"], "gru": ["bias", "secondary_bias"], "single_gate_rnn": ["bias"]}[op]
    options = {"reset_after": True} if op == "gru" else {}
    case = draw(np.random.default_rng(0), op, absent=(), bidirectional=True, **options)
    plain, led = ours.run(case, "ops"), ours.run(case, "ops", leading_ones=names)
    for name, value in plain.items():
        expected = value[None, None] if name.removeprefix("d") in names else value
        np.testing.assert_array_equal(led[name], expected)


def test_single_gate_state_after_the_activation():
    case = draw(np.random.default_rng(0), "single_gate_rnn", activation="tanh", bidirectional=True)
    before, after = ours.run(case, "ops"), ours.run(case, "ops", z_state_holds="activations")
    np.testing.assert_array_equal(after["z_state"], after["h"])
    for name in set(before) - {"z_state"}:
        np.testing.assert_array_equal(before[name], after[name])


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("op", CASES)
def test_a_leading_axis_of_1_of_states_does_not_come_back(op, both):
    """Initial states may have a leading axis of size 1, as PyTorch passes them. Their gradients are returned without
    this axis, because PyTorch adds it itself."""
    case = draw(np.random.default_rng(0), op, bidirectional=both)
    led = {name: array[None] for name, array in case.arrays.items() if name in LEADING_ONE}
    plain, led = ours.run(case, "ops"), ours.run(case._replace(arrays=case.arrays | led), "ops")
    assert plain["dinit_state"].ndim == 2
    for name, value in plain.items():
        np.testing.assert_array_equal(led[name], value, strict=True)


def test_reverse_is_ignored_with_bidirectional():
    case = draw(np.random.default_rng(0), "lstm", bidirectional=True)
    both = case._replace(descriptor={"bidirectional": True, "reverse": True})
    for name, value in ours.run(case, "ops").items():
        np.testing.assert_array_equal(ours.run(both, "ops")[name], value)


def test_16_bit_results_have_the_dtype_of_source():
    for op in CASES:
        case = draw(np.random.default_rng(0), op, dtype=np.float16)
        assert {value.dtype for value in ours.run(case, "ops").values()} == {np.dtype(np.float16)}


def test_defaults_are_those_of_apple():
    assert mpsgraph.SingleGateRNNDescriptor().activation == "relu"
    lstm, gru = mpsgraph.LSTMDescriptor(), mpsgraph.GRUDescriptor()
    flags = [value for d in (lstm, gru) for value in asdict(d).values() if isinstance(value, bool)]
    assert len(flags) == 11 and not any(flags)
    assert [v for v in asdict(lstm).values() if v not in (False,)] == ["sigmoid", "sigmoid", "tanh", "sigmoid", "tanh"]
    assert [v for v in asdict(gru).values() if v not in (False,)] == ["sigmoid", "sigmoid", "tanh"]


@pytest.mark.parametrize("kind", [mpsgraph.LSTMDescriptor, mpsgraph.GRUDescriptor, mpsgraph.SingleGateRNNDescriptor])
def test_misspelt_property_raises(kind):
    """A property may be set after the descriptor was made, as in Apple's API. A misspelt one must not be ignored."""
    descriptor = kind()
    descriptor.reverse = True
    with pytest.raises(AttributeError, match="bidirectonal"):
        descriptor.bidirectonal = True


@pytest.mark.parametrize("bidirectional", [False, True], ids=["uni", "bi"])
@pytest.mark.parametrize("op", CASES)
def test_every_wrong_layout_names_apples_argument_and_the_layout(op, bidirectional):
    """An argument with one axis too many, one too few, or one axis longer by one raises an error that names Apple's
    argument and the expected layout."""
    rng = np.random.default_rng(0)
    flags = {"reset_after": True} if op == "gru" else {}
    case = draw(rng, op, (3, 2, 3, 4), absent=(), bidirectional=bidirectional, **flags)
    shapes = layouts(GATES[op], bidirectional, True)
    saved = {name: mx.array(ours.run(case, "ops")[result]) for name, result in ours.SAVED[op].items()}
    arrays = {name: mx.array(array) for name, array in case.arrays.items()} | saved
    function, descriptor = getattr(mpsgraph, f"{op}_gradients"), ours.make_descriptor(case)
    function(**arrays, descriptor=descriptor)
    for name in set(arrays) - {"mask"}:
        shape = arrays[name].shape
        wrong = [(2, *shape), shape[1:]] + [(*shape[:n], shape[n] + 1, *shape[n + 1 :]) for n in range(len(shape))]
        for size in wrong:
            with pytest.raises(ValueError, match=r"\[mpsgraph\." + op + r"_gradients\] .* must have layout \[") as info:
                function(**arrays | {name: mx.zeros(size)}, descriptor=descriptor)
            # The sizes are read from `source` and `recurrent_weight`. So a longer axis of one of these two arrays
            # raises an error about another array, which then does not fit. Such errors are not checked.
            if name not in ("source", "recurrent_weight") or len(size) != len(shape):
                assert title(name) in str(info.value) and f"[{', '.join(shapes[name])}]" in str(info.value)


def test_titles_are_apples():
    assert title("cell_output_fwd") == "cell_output_fwd (cellOutputFwd)" and title("mask") == "mask"


def test_layout_without_input_weight():
    arrays = {"source": mx.zeros((3, 2, 5)), "recurrent_weight": mx.zeros((8, 2))}
    with pytest.raises(
        ValueError, match=r"source must have layout \[T, N, 4H\] = \[3, 2, 8\] but got shape \[3, 2, 5\]"
    ):
        mpsgraph.lstm(**arrays)


def refusals():
    """Yield (name of the test, op, changed arguments, pattern of the expected error)."""
    bi = {"descriptor": mpsgraph.LSTMDescriptor(bidirectional=True)}
    yield "no cell", "lstm_gradients", {"cell_output_fwd": None}, r"cellOutputFwd\) must have layout \[T, N, H\]"
    yield "no z", "lstm_gradients", {"z_state": None}, r"zState\) must have layout \[T, N, 4H\]"
    yield "no dh", "lstm_gradients", {"source_gradient": None}, r"sourceGradient\) must have layout"
    yield "one direction", "lstm", bi, r"recurrentWeight\) must have layout \[2, 4H, H\]"
    for activation in ("softsign", "identity", None, 3):
        descriptor = mpsgraph.LSTMDescriptor(cell_gate_activation=activation)
        yield f"activation {activation}", "lstm", {"descriptor": descriptor}, r"\(cellGateActivation\) must be one of"
    yield "flag", "lstm", {"descriptor": mpsgraph.LSTMDescriptor(reverse=1)}, "descriptor.reverse must be True or"
    yield "descriptor", "lstm", {"descriptor": mpsgraph.GRUDescriptor()}, "must be a LSTMDescriptor"
    for shape in [(3,), (2, 3), (3, 2, 4), (2, 2, 4), (1, 1, 2, 4), (0,)]:
        yield f"mask {shape}", "lstm", {"mask": mx.zeros(shape)}, r"mask must broadcast to \[N, H\] = \[2, 4\]"
    steps = {"mask": mx.zeros((2, 2, 4)), "mask_layout": "steps"}
    yield "steps", "lstm", steps, r"mask must broadcast to \[T, N, H\] = \[3, 2, 4\]"
    yield "directions", "lstm", {"mask": mx.zeros((2, 2, 4)), "mask_layout": "directions"}, "needs bidirectional"
    for layout in ("steps", "directions"):
        yield f"{layout} of none", "lstm", {"mask_layout": layout}, "mask must be given with mask_layout='"
    yield "mask layout", "lstm", {"mask_layout": "rows"}, "mask_layout must be one of"
    yield "mask dtype", "lstm", {"mask": mx.zeros((4,), mx.float16)}, "mask must have the dtype"
    yield "peephole", "lstm", {"peephole": mx.zeros((12,))}, r"peephole must have layout \[4H\] = \[16\]"
    yield "bias dtype", "lstm", {"bias": mx.zeros((16,), mx.float16)}, "bias must have the dtype"
    yield "no array", "lstm", {"bias": np.zeros(16)}, "bias must be an mlx.core.array"
    yield "empty", "lstm", {"source": mx.zeros((0, 2, 3))}, "no empty axis"
    yield "integers", "lstm", {"source": mx.zeros((3, 2, 3), mx.int32)}, "source must be float32"
    yield "secondary bias", "gru", {"secondary_bias": mx.zeros((4,))}, r"secondaryBias\) must be None"
    yield "output", "gru_gradients", {"output_fwd": None}, r"outputFwd\) must have layout"
    yield "peep", "lstm", {"output_peephole": "next"}, "output_peephole must be one of"
    yield "slope", "lstm", {"hard_sigmoid": 0.2}, "hard_sigmoid must be one of"
    yield "ones", "lstm_gradients", {"leading_ones": "bias"}, "leading_ones must be a sequence"
    yield "nested ones", "lstm_gradients", {"leading_ones": [["bias"]]}, "leading_ones must be a sequence"
    yield "holds", "single_gate_rnn", {"z_state_holds": "h"}, "z_state_holds must be one of"
    for op in ("lstm", "gru", "single_gate_rnn"):
        for each in (op, f"{op}_gradients"):
            yield f"engine of {each}", each, {"engine": "fused"}, "engine='fused' cannot run"


@pytest.mark.parametrize("op, change, words", [entry[1:] for entry in refusals()], ids=[e[0] for e in refusals()])
def test_refusals(op, change, words):
    forward = op.removesuffix("_gradients")
    case = draw(np.random.default_rng(0), forward, (3, 2, 3, 4))
    arrays = {name: mx.array(array) for name, array in case.arrays.items()}
    if op == forward:
        arrays = {name: array for name, array in arrays.items() if name not in COTANGENTS[forward]}
    else:
        results = ours.run(case, "ops")
        arrays |= {name: mx.array(results[result]) for name, result in ours.SAVED[forward].items()}
    with pytest.raises(ValueError, match=words) as info:
        getattr(mpsgraph, op)(**arrays | change)
    assert str(info.value).startswith("[mpsgraph.") or "engine" in change
