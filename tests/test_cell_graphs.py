"""Tests of the tracing of a cell (a function of one step) for `mlx_lstm.pointwise`: its graph, the rewrites of
operations in the graph, what a forward pass saves for the gradient, and which cells are refused."""

import gc
import json
import math
import sys
from collections import UserDict, deque
from contextvars import ContextVar
from functools import partial
from operator import attrgetter
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import NamedTuple
from weakref import ref

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from on_metal import on_metal
from pointwise_cases import ZOO, Form, assert_right, by_pointwise, by_recurrent, draw, judged, run

from mlx_lstm import pointwise
from mlx_lstm.engines import METAL_ENGINES
from mlx_lstm.engines.captures import Captured
from mlx_lstm.engines.cell_graph import (
    CONDITIONS,
    FOLDS,
    REWRITES,
    CellGraph,
    Graph,
    from_json,
    needed,
    next_on_all_paths,
)
from mlx_lstm.engines.cell_tracer import cached_trace, values_of, verify
from mlx_lstm.engines.cells import PointwiseCell

SAVED = {
    "lstm": ["sigmoid", "sigmoid", "tanh", "sigmoid"],
    "zoneout_lstm": ["sigmoid", "sigmoid", "tanh", "sigmoid"],
    "cifg": ["sigmoid", "tanh", "sigmoid"],
    "peephole_lstm": ["sigmoid", "sigmoid", "tanh", "sigmoid"],
    "gru": ["sigmoid", "sigmoid", "tanh", "input"],
    "slstm": ["input", "select", "tanh", "sigmoid"],
}


@pytest.mark.parametrize("cell", SAVED)
def test_what_is_saved_is_found(cell):
    """The forward pass saves one number per gate for the gradient, e.g. an LSTM's gates after activation. For a GRU
    it also saves the recurrent product of the candidate."""
    graph = ZOO[cell].graph(2, 3)
    assert sorted(graph.nodes[n].op for n in graph.saved) == sorted(SAVED[cell])


@pytest.mark.parametrize("cell", ZOO)
def test_whether_a_cell_reads_h_itself_is_found(cell):
    """A cell reads the state h itself, not only the product h Wh^T, if another h changes its new states while its gates
    stay as they are."""
    form, rng = ZOO[cell], np.random.default_rng(0)

    def draw_arrays(count, shape=(2, 3)):
        return [mx.array(rng.uniform(0.5, 1.5, shape), mx.float32) for _ in range(count)]

    gates, states = draw_arrays(form.gates), draw_arrays(form.states)
    gates = list(zip(gates, draw_arrays(form.gates), strict=True)) if form.apart else gates
    others = [*draw_arrays(form.inputs), *draw_arrays(form.params, (3,))]
    one, other = (form.cell(tuple(gates), (h, *states[1:]), *others) for h in draw_arrays(2))
    reads = not all(mx.array_equal(x, y) for x, y in zip(one, other, strict=True))
    assert PointwiseCell(form.graph(2, 3), form.recurrent).passes_h == reads


@pytest.mark.parametrize("cell", ZOO)
def test_a_node_on_all_paths_is_found(cell):
    """What the forward pass can save in place of a node is the first later node without which no gradient depends on
    it. All nodes of each cell are tried."""
    graph = ZOO[cell].graph(2, 3)
    leaves = set(graph.known_after())
    order = needed(graph.nodes, graph.back, leaves)
    excluded = set(order[::5])
    for n in [n for n in order if n not in leaves]:
        possible = [m for m in order if m > n and n in needed(graph.nodes, [m], leaves)]
        possible = [m for m in possible if n not in needed(graph.nodes, graph.back, leaves | {m})]
        possible = [m for m in possible if graph.nodes[m].op not in CONDITIONS and m not in excluded]
        assert next_on_all_paths(graph, order, n, excluded) == next(iter(possible), None)


def test_a_graph_survives_json():
    """A cell's graph that was written as JSON and read again equals the original."""
    for form in ZOO.values():
        graph = form.graph(2, 3)
        again = from_json(json.loads(json.dumps(graph.to_json())))
        assert again == graph and hash(again) == hash(graph)
        assert again != ZOO["indrnn" if form is not ZOO["indrnn"] else "lstm"].graph(2, 3)


# --- Rewrites of operations, compared with the original operations ---

X, Y, P = "x0", "x1", ("gt", "x0", "x1")
ORIGINALS = {
    "add_zero": ("add", X, 0.0),
    "add_difference": ("add", X, ("sub", Y, X)),
    "add_branches": ("add", ("select", P, X, 0.0), ("select", P, 0.0, Y)),
    "subtract_zero": ("sub", 0.0, X),
    "multiply_by_one": ("mul", -1.0, X),
    "multiply_by_condition": ("mul", ("float", ("not", P)), Y),
    "divide_by_one": ("div", X, 1.0),
    "divide_by_cosh": ("div", Y, ("mul", ("cosh", X), ("cosh", X))),
    "negate_twice": ("neg", ("neg", X)),
    "same_branches": ("select", P, X, X),
    "rewrite of gt after a clip": ("add", ("max", X, 0.5), ("float", ("gt", X, 0.5))),
    "rewrite of lt after a clip": ("add", ("min", X, 0.5), ("float", ("lt", X, 0.5))),
    **{f"small_power {n}": ("pow", ("abs", X), n) for n in (0.0, 1.0, 2.0, 3.0, 0.5, -0.5, -1.0)},
    **{f"fold {op}": (op, 1.5, -0.25)[: 2 + (op != "neg")] for op in FOLDS},
}


def built(graph, term, rewrites):
    """Add a term, e.g. ("add", "x0", 0.0), to a cell's graph. Return the number of the term's node. rewrites:
    whether the graph may replace the term's operations by simpler ones."""
    if isinstance(term, float):
        return graph.constant(term)
    if isinstance(term, str):
        return graph.input(term)
    op, *operands = term
    args = tuple(built(graph, operand, rewrites) for operand in operands)
    return graph.add(op, *args) if rewrites else graph.node(graph.nodes[0]._replace(op=op, args=args, value=None))


@pytest.mark.parametrize("name", ORIGINALS)
def test_a_rewrite_keeps_the_value(name):
    """If a cell's graph replaces an operation by a simpler one, the values stay the same."""
    rng, results = np.random.default_rng(0), []
    drawn = [mx.array(rng.normal(size=1000), mx.float64) for _ in range(2)]
    for rewrites in (False, True):
        graph = Graph(is_built_in=True)
        graph.derives = True
        known = dict(zip(map(graph.input, (X, Y)), drawn, strict=True))
        n = built(graph, ORIGINALS[name], rewrites)
        assert (graph.nodes[n].op == ORIGINALS[name][0]) is (
            not rewrites or name in ("add_branches", "divide_by_cosh")
        ) or rewrites
        with mx.stream(mx.cpu):
            value = np.array(mx.broadcast_to(values_of(tuple(graph.nodes), [n], known, drawn[0])[n], (1000,)))
        results.append(value)
    np.testing.assert_allclose(results[0], results[1], rtol=1e-7, atol=0)


SIGNS = {
    "add": lambda x: mx.arctan2((x + 0.0) * 1, -1.0),
    "subtract": lambda x: mx.arctan2(0.0 - x, -1.0),
    "subtract zero": lambda x: mx.arctan2(x - 0.0, -1.0),
    "condition": lambda x: mx.arctan2((x > 9) * (x - 1), -1.0),
    "remainder": lambda x: mx.arctan2(x % 1.0, -1.0),
    "negated": lambda x: mx.arctan2(mx.negative(-x), -1.0),
    "both zeros": lambda x: mx.arctan2(mx.where(x < 1, 0.0, -0.0), -1.0),
}


@pytest.mark.parametrize("name", SIGNS)
def test_zeros_of_a_cell_keep_their_signs(name):
    """The sign of a zero in a cell is that of MLX: arctan2 of a zero and a negative number is pi or -pi."""
    x = mx.array([[[0.0, -0.0, 1.0, -1.0]]])
    for engine in ("numpy", "ops"):
        cell = lambda a, state: (SIGNS[name](a[0]),)  # noqa: E731
        h = pointwise(cell, x, None, None, None, (mx.zeros((1, 4)),), engine=engine)[0]
        np.testing.assert_allclose(np.array(h), np.array(SIGNS[name](x)), rtol=1e-6)


@pytest.mark.parametrize("engine", ["numpy", "ops", "fused"])  # both Metal engines have the same statements
def test_the_sign_of_nan_is_that_of_mlx(engine):
    """MLX's sign of NaN is 0 on every device, and so the derivative of abs at NaN is 0."""
    x = mx.array([[[np.nan, -np.nan, 0.0, -0.0, 2.0, -3.0, np.inf, -np.inf]]])
    products = {"sign": lambda x: x * mx.sign(x), "abs": lambda x: 2 * mx.abs(x)}

    def h(x, f):
        return pointwise(lambda a, state: (f(a[0]),), x, None, None, None, (mx.zeros((1, 8)),), engine=engine)[0]

    def gradients(of):
        return [np.array(mx.grad(lambda x, f=f: of(x, f).sum())(x)) for f in products.values()]

    with mx.stream(mx.cpu):
        sign, derivatives = np.array(mx.sign(x)), gradients(lambda x, f: f(x))
    with on_metal() if engine in METAL_ENGINES else mx.stream(mx.cpu):
        np.testing.assert_array_equal(np.array(h(x, mx.sign)), sign)
        np.testing.assert_array_equal(gradients(h), derivatives)


def test_every_rewrite_has_a_case():
    """Each rewrite of operations in REWRITES is tested by an operation in ORIGINALS."""
    names = {rewrite.__name__ for rewrites in REWRITES.values() for rewrite in rewrites} - {"fold"}
    assert names == {name.partition(" ")[0] for name in ORIGINALS} - {"fold"}


@pytest.mark.parametrize("engine", ["numpy", "ops"])
def test_a_sum_with_a_difference_is_rounded_in_a_cell(engine):
    """x + (y - x) is y only in a built-in cell, which writes gradients of its own so."""
    (h,) = pointwise(
        lambda a, state: (a[0] + (0.1 * a[0] - a[0]),), x := mx.array([[[1e8, 3.0]]]), None, None, None,
        (mx.zeros((1, 2)),), engine=engine,
    )[:1]  # fmt: skip
    np.testing.assert_array_equal(np.array(h), np.array(x + (0.1 * x - x)))


def test_a_cell_gives_the_same_with_and_without_training():
    """A step divides by 1 + exp(-z) instead of multiplying by sigmoid(z), whether a backward pass follows or not."""
    rng = np.random.default_rng(0)
    x, state = (mx.array(rng.normal(size=shape).astype(np.float32)) for shape in ((3, 4, 10), (4, 5)))

    def cell(a, state):
        return (mx.sigmoid(a[0]) * mx.tanh(a[1]) + (1 - mx.sigmoid(a[0])) * state[0],)

    for gates in (True, False):
        own = cell if gates else lambda a, state: (mx.sigmoid(a[0]) * a[1] - mx.sigmoid(a[1]) * state[0],)
        both = [pointwise(own, x, None, None, None, (state,), engine="numpy", training=t)[0] for t in (True, False)]
        np.testing.assert_array_equal(np.array(both[0]), np.array(both[1]))


def test_gradients_are_finite_where_plain_mlx_overflows():
    """In a cell, the gradients of tanh and maximum are finite and right for arguments up to 1000. A formula that
    divides by the square of cosh would overflow there."""

    def cell(a, state):
        return (mx.maximum(mx.tanh(a[0]), 0.5) + state[0],)

    def loss(x):
        return pointwise(cell, x, None, None, None, (mx.zeros((1, 4)),), engine="numpy")[0].sum()

    x = mx.array([[[-1000.0, -1.0, 1.0, 1000.0]]])
    slope = 1 - np.tanh(1.0) ** 2
    np.testing.assert_allclose(np.array(mx.grad(loss)(x))[0, 0], [0, 0, slope, 0], atol=1e-7)


# --- Operations of MLX inside a cell ---

UNARY = {
    "exp": mx.exp, "expm1": mx.expm1, "log": lambda x: mx.log(1 + x * x), "log2": lambda x: mx.log2(1 + x * x),
    "log10": lambda x: mx.log10(1 + x * x), "log1p": lambda x: mx.log1p(x * x), "sqrt": lambda x: mx.sqrt(1 + x * x),
    "rsqrt": lambda x: mx.rsqrt(1 + x * x), "tanh": mx.tanh, "sigmoid": mx.sigmoid, "abs": mx.abs, "sign": mx.sign,
    "square": mx.square, "negative": mx.negative, "sin": mx.sin, "cos": mx.cos,
    "tan": lambda x: mx.tan(0.3 * mx.tanh(x)),
    "sinh": mx.sinh, "cosh": mx.cosh, "arcsin": lambda x: mx.arcsin(0.9 * mx.tanh(x)),
    "arccos": lambda x: mx.arccos(0.9 * mx.tanh(x)), "arctan": mx.arctan, "arcsinh": mx.arcsinh,
    "arccosh": lambda x: mx.arccosh(1.5 + x * x), "arctanh": lambda x: mx.arctanh(0.9 * mx.tanh(x)), "erf": mx.erf,
    "floor": lambda x: x * mx.floor(3 * x), "ceil": lambda x: x * mx.ceil(3 * x),
    "round": lambda x: x * mx.round(3 * x),
    "reciprocal": lambda x: mx.reciprocal(1 + x * x), "stop_gradient": lambda x: x * mx.stop_gradient(x),
    "clip": lambda x: mx.clip(x, -0.5, 0.5), "relu": nn.relu, "silu": nn.silu, "gelu": nn.gelu, "softplus": nn.softplus,
    "elu": nn.elu, "hardswish": nn.hardswish, "selu": nn.selu, "mish": nn.mish, "log_sigmoid": nn.log_sigmoid,
    "isnan": lambda x: mx.where(mx.isnan(x), 0.0, x), "nan_to_num": mx.nan_to_num, "cube": lambda x: x**3,
    "remainder": lambda x: mx.remainder(x, 0.7), "remainder of a constant": lambda x: x * (1.3 % (0.5 + x * x)),
    "floor_divide": lambda x: x * (x // 0.3),
    "power": lambda x: mx.power(1 + x * x, 0.3), "ones_like": lambda x: x + mx.ones_like(x),
}  # fmt: skip
BINARY = {
    "add": mx.add, "subtract": mx.subtract, "multiply": mx.multiply, "divide": lambda x, y: x / (1 + y * y),
    "maximum": mx.maximum, "minimum": mx.minimum, "logaddexp": mx.logaddexp, "arctan2": mx.arctan2,
    "power": lambda x, y: mx.power(1 + x * x, y), "greater": lambda x, y: mx.where(x > y, x, y * y),
    "less_equal": lambda x, y: mx.where(x <= y, x, y * y), "equal": lambda x, y: mx.where(x == y, x, y * y),
    "and": lambda x, y: mx.where((x > 0) & (y > 0), x, y * y), "or": lambda x, y: mx.where((x > 0) | (y > 0), x, y * y),
    "logical_and": lambda x, y: mx.where(mx.logical_and(x > 0, y > 0), x, y * y),
    "not": lambda x, y: mx.where(mx.logical_not(x > y), x, y * y), "bool_times": lambda x, y: (x > y) * x + y,
    "remainder": lambda x, y: x % (0.5 + y * y), "floor_divide": lambda x, y: x * (x // (0.1 + y * y)),
    "xor": lambda x, y: mx.where((x > 0) ^ (y > 0), x, y * y), "not_equal": lambda x, y: mx.where(x != y, x, y * y),
}  # fmt: skip
OPERATIONS = {name: lambda a, state, f=f: (0.5 * f(a[0]) + 0.5 * mx.tanh(state[0]),) for name, f in UNARY.items()}
OPERATIONS |= {f"binary {n}": lambda a, state, f=f: (mx.tanh(f(a[0], state[0])),) for n, f in BINARY.items()}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_of_mlx_is_right_in_a_cell(name):
    """A cell with this operation of MLX has right values and gradients on the CPU engines and in `recurrent`, which
    runs the cell as plain MLX. NumPy has no erf, so cells with erf are not tested with engine `numpy`."""
    form = Form(OPERATIONS[name], 1)
    case, cotangents = draw(np.random.default_rng(11), form, {}, (2, 2, 2, 4))
    exact, bounds = judged(form, case, cotangents)
    erf = any(node.op == "erf" for node in form.graph(2, 4).nodes)
    for engine in ("ops",) if erf else ("numpy", "ops"):
        assert_right(run(form, case, cotangents, by_pointwise(engine)), exact, bounds, engine)
    assert_right(run(form, case, cotangents, by_recurrent), exact, bounds, "recurrent")


# --- Cells that are refused ---

WEIGHTS, HALF = mx.ones((3, 3)), mx.array(0.5)


@mx.custom_function
def own_derivative(x):
    return mx.exp(x)


own_derivative.vjp(lambda x, d, y: d)


def product(a, state):
    square = mx.outer(state[0][0], state[0][0])
    return (a[0] + square[:2],)


def total(a, state):
    x = a[0] + state[0]
    x = x - x.mean(axis=-1, keepdims=True)
    return (x,)


def softmax(a, state):
    weights = mx.softmax(a[0], axis=-1)
    return (weights * state[0],)


def captured(a, state):
    x = mx.tanh(a[0])
    x = x * HALF
    return (x,)


def decided(a, state):
    if a[0].sum() > 0:
        return state
    return (a[0],)


def asked(a, state):
    return (a[0] * float(a[0][0, 0]),)


def drawn(a, state):
    noise = mx.random.normal(state[0].shape)
    return (a[0] + noise,)


def attention(a, state):
    weights = mx.softmax(state[0] @ state[0].T, axis=-1)
    return (weights @ a[0],)


def numpys(a, state):
    h = np.tanh(state[0])
    return (a[0] + h,)


def maths(a, state):
    return (a[0] * math.exp(state[0][0, 0]),)


def maths_of_all(a, state):
    return (a[0] * math.exp(state[0]),)


def larger(a, state):
    return (max(a[0], state[0]),)


REFUSED = {
    product: "product",
    lambda a, state: (a[0] @ mx.ones((3, 3)),): "Matmul",
    lambda a, state: (a[0] @ WEIGHTS,): r"\(the products of x and h .* mlx_lstm.recurrent\) but got Matmul",
    attention: r"any other product into a step for mlx_lstm.recurrent\) but got Matmul in attention",
    numpys: r"\(use mx.tanh\) but got np.tanh in numpys, test_cell_graphs.py line \d+: h = np.tanh\(state\[0\]\)",
    maths: r"\(use mx.exp\) but got math.exp in maths, test_cell_graphs.py line \d+",
    maths_of_all: r"\(use mx.exp\) but got math.exp in maths_of_all, test_cell_graphs.py line \d+",
    larger: r"a decision on values in larger, test_cell_graphs.py line \d+: return \(max",
    lambda a, state: (nn.relu(mx.array(0.5)) + a[0],): "a compiled function of constants",
    lambda a, state: (nn.relu(mx.full(a[0].shape, -0.5)) + a[0],): "a compiled function of constants",
    lambda a, state: (a[0] * WEIGHTS[0],): "a captured array",
    total: r"Reduce in total, test_cell_graphs.py line \d+: x = x - x.mean",
    softmax: r"Softmax in softmax, test_cell_graphs.py line \d+: weights = mx.softmax",
    lambda a, state: (mx.logsumexp(a[0], axis=-1, keepdims=True) + state[0],): "LogSumExp",
    lambda a, state: (mx.cumsum(a[0], axis=-1),): "Scan",
    lambda a, state: (mx.sort(a[0], axis=-1),): "Sort",
    lambda a, state: (a[0][:, ::-1],): "Slice",
    lambda a, state: (mx.roll(a[0], 1, axis=-1),): "",
    lambda a, state: (mx.concatenate([a[0][:, 1:], a[0][:, :1]], axis=-1),): "",
    lambda a, state: (a[0].reshape(3, 2).reshape(2, 3),): "Reshape",
    lambda a, state: (mx.take(a[0], mx.array([2, 1, 0]), axis=-1),): "",
    captured: r"a captured array in captured, test_cell_graphs.py line \d+: x = x \* HALF",
    lambda a, state: (a[0] * mx.array([1.0, 2.0, 3.0]),): "a constant array",
    lambda a, state: (own_derivative(a[0]),): "a custom function",
    lambda a, state: (a[0].astype(mx.float16).astype(mx.float32),): "AsType",
    lambda a, state: (a[0].astype(mx.int32).astype(mx.float32),): "AsType",
    decided: r"a decision on values in decided, test_cell_graphs.py line \d+: if a\[0\]",
    asked: "a decision on values",
    drawn: r"RandomBits in drawn, test_cell_graphs.py line \d+: noise = mx.random",
    lambda a, state: (nn.LayerNorm(3)(a[0]),): r"\(a step that mixes units .* norm= .*\) but got Reduce",
    lambda a, state: (nn.RMSNorm(3)(a[0]),): r"\(a step that mixes units .*\) but got Reduce",
    lambda a, state: (
        a[0] + mx.argmax(a[0], axis=-1, keepdims=True),
    ): r"\(a step that mixes units .*\) but got ArgReduce",
    lambda a, state: (a[0] + mx.argsort(a[0], axis=-1),): r"\(a step that mixes units .*\) but got ArgSort",
    lambda a, state: (mx.partition(a[0], 1, axis=-1),): r"\(a step that mixes units .*\) but got Partition",
    lambda a, state: (a[0].T.T,): r"\(a cell must not change shapes, .*\) but got Transpose",
    lambda a, state: (mx.pad(a[0], 1)[1:-1, 1:-1],): r"\(a cell must not change shapes, .*\) but got Pad",
    lambda a, state: (a[0][None].squeeze(0),): r"\(a cell must not change shapes, .*\) but got ExpandDims",
    lambda a, state: (a[0].flatten().reshape(2, 3),): r"\(a cell must not change shapes, .*\) but got Flatten",
}


def if_compiled(cell):
    """Return the cell as a parameter of a test that runs only where MLX compiles, if the cell is refused only then."""
    marks = [pytest.mark.needs_mx_compile] if REFUSED[cell] == "a compiled function of constants" else []
    return pytest.param(cell, marks=marks, id=cell.__name__.strip("<>"))


@pytest.mark.parametrize("cell", [if_compiled(cell) for cell in REFUSED])
def test_a_cell_that_is_not_pointwise_is_refused(cell):
    """A cell that is not pointwise, e.g. one with a matrix product or a softmax, is refused. The error names the
    operation, the function, the file and the line, and says what to do instead."""
    with pytest.raises(ValueError, match=r"^\[pointwise\] the cell must compute each number by itself \(") as caught:
        pointwise(cell, mx.ones((2, 2, 3)), None, None, None, (mx.zeros((2, 3)),))
    text = str(caught.value)
    assert "test_cell_graphs.py line" in text
    if REFUSED[cell] != "product":
        caught.match(REFUSED[cell])


def test_an_array_of_a_transformation_around_the_cell_is_refused():
    """A cell is refused if it reads an array of the surrounding function that MLX differentiates, compiles or maps.
    Otherwise the array's gradient would be lost."""

    def loss(u):
        cell = lambda a, state: (mx.tanh(a[0] + u * state[0]),)  # noqa: E731
        return pointwise(cell, mx.ones((2, 2, 3)), None, None, None, (mx.zeros((2, 3)),))[0].sum()

    for transformed in (mx.grad(loss), mx.compile(loss), mx.vmap(loss)):
        with pytest.raises(ValueError, match="a captured array"):
            transformed(mx.ones((2, 3)))


def test_an_error_of_the_cell_is_not_hidden():
    """An exception that the cell itself raises reaches the caller."""

    def broken(a, state):
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        pointwise(broken, mx.ones((2, 2, 3)), None, None, None, (mx.zeros((2, 3)),))


@pytest.mark.parametrize("held", ["an array", "a module", "a module that is called"])
def test_an_array_without_a_value_is_named(held):
    """A cell that captures an array which nobody has evaluated yet, such as the initial weights of a module, is refused
    for the captured array. The error does not blame random numbers."""
    linear, array = nn.Linear(3, 3), mx.random.normal((3,))
    cells = {
        "an array": lambda a, state: (a[0] * array,),
        "a module": lambda a, state: (a[0] * linear.bias,),
        "a module that is called": lambda a, state: (linear(a[0]),),
    }
    with pytest.raises(ValueError, match="got AddMM" if "called" in held else "got a captured array"):
        pointwise(cells[held], mx.ones((2, 2, 3)), None, None, None, (mx.zeros((2, 3)),))


def test_constants_of_a_float64_cell():
    """A float64 cell may select between constants. The sign of a zero is kept."""
    cell = lambda a, state: (mx.arctan2(mx.where(a[0] > 0, 0.0, -0.0) * mx.ones_like(a[0]), -1.0),)  # noqa: E731
    for dtype, engine in ((mx.float64, "numpy"), (mx.float64, "ops"), (mx.float32, "numpy"), (mx.float32, "ops")):
        x, h = mx.array([[[1.0, -1.0]]], dtype), mx.zeros((1, 2), dtype)
        with mx.stream(mx.cpu):
            got = pointwise(cell, x, None, None, None, (h,), engine=engine)[0]
            np.testing.assert_allclose(np.array(got)[0, 0], [np.pi, -np.pi], rtol=1e-6)


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("engine", ["numpy", "ops"])
def test_one_number_may_be_a_parameter(shape, engine):
    """A parameter of the shape [] or [1] is one number for all units, in both directions. Its gradient has its
    shape and is the sum over the units."""
    cell = lambda a, state, w: (mx.tanh(a[0] * w + state[0]),)  # noqa: E731
    rng, h = np.random.default_rng(0), mx.zeros((2, 6))
    x, d = (mx.array(rng.normal(size=(4, 2, 6)).astype(np.float32)) for _ in range(2))

    def loss(w):
        call = partial(pointwise, cell, x, None, None, None, (h,), bidirectional=True, engine=engine)
        return (call(params=(w,))[0] * d).sum()

    whole = mx.full((6,), 0.7)
    one = mx.grad(loss)(mx.full(shape, 0.7))
    assert one.shape == shape
    np.testing.assert_allclose(one.item(), mx.grad(loss)(whole).sum().item(), rtol=1e-5)
    with pytest.raises(ValueError, match=r"params\[0\] must have shape \[6\], one number per unit, or \[1\] or \[\]"):
        loss(mx.ones(3))


# --- Numbers that a cell captures ---


class Rate:
    """An object with a number, which is also a cell."""

    rate = 0.5

    def __init__(self):
        self.own = 0.5

    def method(self, a, state):
        return (a[0] * self.own,)

    def __call__(self, a, state):
        return (a[0] * self.twice() / 2,)

    def __getitem__(self, key):
        return self.own

    def __float__(self):
        return self.own

    def twice(self):
        return 2 * self.own


SETTINGS, NUMBER = ModuleType("settings"), 0.5


def by_helper(x):
    return x * NUMBER


def helper():
    """A function with an attribute."""


def own_of(settings):
    """A function that reads an attribute of its argument. The cell's code does not name the attribute."""
    return settings.own


class Scale(NamedTuple):
    """A tuple with a method."""

    k: float

    def times(self, x):
        return x * NUMBER * self.k


class Made:
    """A class whose objects read a number when they are made."""

    def __init__(self):
        self.k = NUMBER


class Level:
    """An object that a cell compares."""

    def __init__(self):
        self.own = 0.5

    def __lt__(self, number):
        return self.own < number


def captures():
    """Return {kind: (cell, a function that sets the number that this cell captures)}."""
    own, table, array, part = Rate(), {"k": [0.5]}, np.array(0.5), [0.5]
    SETTINGS.k = number = helper.rate = 0.5
    sys.modules["settings_of_cells"] = SETTINGS
    weak, by_name, get, values = ref(own), attrgetter("own"), table.get, table.values()
    level, rate, scale, plain = Level(), mx.array(0.5), Scale(1.0), SimpleNamespace(own=0.5)
    user, queue, variable, view = UserDict(k=0.5), deque([0.5]), ContextVar("k", default=0.5), MappingProxyType(table)

    def importing(a, state):
        from settings_of_cells import k

        return (a[0] * k,)

    def closure(a, state):
        return (a[0] * number,)

    def set_closure(value):
        nonlocal number
        number = value

    scalar = np.float32(0.5)

    def set_scalar(value):
        nonlocal scalar
        scalar = np.float32(value)

    def set_global(value):
        global NUMBER
        NUMBER = value

    def found():
        return plain

    def set_rate(value):
        nonlocal rate
        rate = mx.array(value)

    def default(a, state, k=0.5):
        return (a[0] * k,)

    def keyword(a, state, *, k=0.5):
        return (a[0] * k,)

    set_global(0.5)
    return {
        "closure": (closure, set_closure),
        "global": (lambda a, state: (a[0] * NUMBER,), set_global),
        "helper": (lambda a, state: (by_helper(a[0]),), set_global),
        "method": (own.method, partial(setattr, own, "own")),
        "callable": (own, partial(setattr, own, "own")),
        "class": (lambda a, state: (a[0] * Rate.rate,), partial(setattr, Rate, "rate")),
        "module": (lambda a, state: (a[0] * SETTINGS.k,), partial(setattr, SETTINGS, "k")),
        "dict": (lambda a, state: (a[0] * table["k"][0],), partial(table["k"].__setitem__, 0)),
        "NumPy": (lambda a, state: (a[0] * float(array),), partial(array.__setitem__, ...)),
        "NumPy number": (lambda a, state: (a[0] * float(scalar),), set_scalar),
        "partial": (partial(lambda k, a, state: (a[0] * k[0],), part), partial(part.__setitem__, 0)),
        "text": (lambda a, state: (a[0] * getattr(own, "own"),), partial(setattr, own, "own")),  # noqa: B009
        "attribute of a function": (lambda a, state: (a[0] * helper.rate,), partial(setattr, helper, "rate")),
        "[]": (lambda a, state: (a[0] * own["k"],), partial(setattr, own, "own")),
        "float()": (lambda a, state: (a[0] * float(own),), partial(setattr, own, "own")),
        "UserDict": (lambda a, state: (a[0] * user["k"],), partial(user.__setitem__, "k")),
        "deque": (lambda a, state: (a[0] * queue[0],), partial(queue.__setitem__, 0)),
        "variable": (lambda a, state: (a[0] * variable.get(),), variable.set),
        "view": (lambda a, state: (a[0] * view["k"][0],), partial(table["k"].__setitem__, 0)),
        "weak": (lambda a, state: (a[0] * weak().own,), partial(setattr, own, "own")),
        "written in C": (lambda a, state: (a[0] * by_name(own),), partial(setattr, own, "own")),
        "method in C": (lambda a, state: (a[0] * get("k")[0],), partial(table["k"].__setitem__, 0)),
        "values": (lambda a, state: (a[0] * next(iter(values))[0],), partial(table["k"].__setitem__, 0)),
        "globals": (lambda a, state: (a[0] * globals()["NUMBER"],), set_global),
        "import": (importing, partial(setattr, SETTINGS, "k")),
        "default": (default, lambda value: setattr(default, "__defaults__", (value,))),
        "keyword": (keyword, lambda value: keyword.__kwdefaults__.update(k=value)),
        "argument of a helper": (lambda a, state: (a[0] * own_of(plain),), partial(setattr, plain, "own")),
        "result of a helper": (lambda a, state: (a[0] * found().own,), partial(setattr, plain, "own")),
        "computed name": (lambda a, state: (a[0] * getattr(plain, "OWN".lower()),), partial(setattr, plain, "own")),
        "tuple with a method": (lambda a, state: (scale.times(a[0]),), set_global),
        "object made inside": (lambda a, state: (a[0] * Made().k,), set_global),
        "comparison": (lambda a, state: (a[0] * (0.5 if level < 1 else 2.0),), partial(setattr, level, "own")),
        "array in if": (lambda a, state: (a[0] * (0.5 if rate < 1 else 2.0),), set_rate),
    }


def closure_of(number):
    return lambda a, state: (a[0] * number,)


@pytest.mark.parametrize("kind", captures())
def test_a_captured_number_may_change(kind):
    """If a number that a cell captures changes, the next call uses the new number."""
    cell, change = captures()[kind]

    def result():
        return pointwise(cell, mx.ones((1, 1, 2)), None, None, None, (mx.zeros((1, 2)),), engine="numpy")[0][0, 0, 0]

    assert result().item() == 0.5
    change(2.0)
    try:
        assert result().item() == 2.0
    finally:
        change(0.5)


ACTIVATION = mx.abs


class Activated(nn.Module):
    """A module with a function, `act`."""


def functions():
    """Return {kind: (cell, a function `put`)}: the cell calls a function that gives 1 for -1 after `put(1)`, and -1
    after `put(-1)`."""
    table, module, slope, layers = {}, Activated(), nn.LeakyReLU(), nn.Sequential(mx.abs)
    plain = {1: mx.abs, -1: mx.floor}.__getitem__

    def by_global(put):
        return lambda a, state: (ACTIVATION(a[0]),), lambda n: globals().update(ACTIVATION=put(n))

    return {
        "function": by_global(plain),
        "compiled": by_global(lambda n: mx.compile(plain(n))),
        "partial": by_global(lambda n: partial(plain(n))),
        "table": (lambda a, state: (table["act"](a[0]),), lambda n: table.update(act=plain(n))),
        "module": (lambda a, state: (module.act(a[0]),), lambda n: setattr(module, "act", plain(n))),
        "slope": (lambda a, state: (slope(a[0]),), lambda n: setattr(slope, "_negative_slope", -n)),
        "layers": (lambda a, state: (layers(a[0]),), lambda n: setattr(layers, "layers", [plain(n)])),
    }


@pytest.mark.parametrize("kind", functions())
def test_a_captured_function_may_change(kind):
    """If another function of MLX, or a layer of `mlx.nn` with another slope, takes the place of the one that a cell
    calls, the next call uses the new one."""
    cell, put = functions()[kind]
    for n in (1, -1, 1):
        put(n)
        h, _ = pointwise(cell, -mx.ones((1, 1, 2)), None, None, None, (mx.zeros((1, 2)),), engine="numpy")
        assert h[0, 0, 0].item() == n


def passed(settings, x):
    return mx.stop_gradient(x) if settings.own > 1 else x


def test_a_captured_object_may_stop_the_gradient():
    """If an object, which only a helper of the cell reads, says that no gradient passes any more, none does."""
    own = SimpleNamespace(own=0.5)

    def cell(a, state):
        return (passed(own, a[0]),)

    def gradient():
        call = partial(pointwise, cell, Wx=None, Wh=None, b=None, state=(mx.zeros((1, 2)),), engine="numpy")
        return mx.grad(lambda x: call(x)[0].sum())(mx.ones((1, 1, 2)))[0, 0, 0].item()

    assert gradient() == 1
    own.own = 2.0
    assert gradient() == 0


@pytest.mark.parametrize("use", [lambda k, x: x * k.size, lambda k, x: x * k.sum().item()], ids=["shape", "item"])
def test_a_captured_array_may_change(use):
    """If a cell computes with the shape of an array or with its numbers, the next call uses those of another array."""
    k = None
    cell = lambda a, state: (use(k, a[0]),)  # noqa: E731
    for k in (mx.ones(2), mx.ones(5)):
        h, _ = pointwise(cell, mx.ones((1, 1, 2)), None, None, None, (mx.zeros((1, 2)),), engine="numpy")
        assert h[0, 0, 0].item() == k.size
    k[0] = 3.0  # in place
    h, _ = pointwise(cell, mx.ones((1, 1, 2)), None, None, None, (mx.zeros((1, 2)),), engine="numpy")
    assert h[0, 0, 0].item() == use(k, 1.0)


def test_what_a_key_tells_apart():
    """The key of what a function captures is the same in two searches, and tells apart zeros of both signs, numbers of
    different types, and NaN from a number."""

    def key(value):
        return Captured(closure_of(value)).key

    values = [0.0, -0.0, 0, False, np.float32(0), np.float64(0), math.nan, "0", None, (0,), [0], {0: 0}, {0: -0.0}]
    keys = [key(value) for value in values]
    assert keys == [key(value) for value in values]
    assert all(one != other for n, one in enumerate(keys) for other in keys[:n])


def test_a_cell_may_capture_more_than_a_search_visits():
    """If a search for captured numbers reaches its limits, the cell is traced again only when its numbers change."""
    many, before = list(range(5000)), cached_trace.cache_info()
    cell = lambda a, state: (a[0] * many[-1],)  # noqa: E731
    for last in (2.0, 3.0, 3.0):
        many[-1] = last
        h = pointwise(cell, mx.ones((1, 1, 2)), None, None, None, (mx.zeros((1, 2)),), engine="numpy")[0]
        assert h[0, 0, 0].item() == last
    after = cached_trace.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (2, 1)


class Model(nn.Module):
    """A module with a cell. Its `__call__` leads to much code."""

    def __init__(self):
        super().__init__()
        self.rate = 0.5

    def cell(self, a, state):
        return (a[0] * self.rate,)

    def __call__(self, engine):
        given = mx.ones((3, 1, 2)), None, None, None, (mx.zeros((1, 2)),)
        return pointwise(self.cell, *given, engine=engine)[0].sum()


@pytest.mark.parametrize("engine", ["numpy", "ops"])
def test_a_method_is_traced_once_and_not_kept_alive(engine):
    """A cell that is a method of a module is traced at the first call only. The caches do not keep the module alive,
    not even if its graph is equal to that of another module."""
    dead, before = [], cached_trace.cache_info()
    for _ in range(3):
        model = Model()
        assert model(engine).item() == model(engine).item() == 3
        dead.append(ref(model))
    after = cached_trace.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (3, 3)
    del model
    gc.collect()
    assert [each() for each in dead[1:]] == [None, None]


# --- The judge of graphs, and their keys ---


def changed(graph, **parts):
    """Return a copy of a cell's graph in which some parts are others."""
    counts = graph.gates, graph.states, graph.inputs, graph.params
    whole = {name: getattr(graph, name) for name in ("nodes", "apart", "forward", "back", "saved")}
    whole = {"nodes": whole["nodes"], "counts": counts, **whole} | parts
    return CellGraph(*(whole[name] for name in ("nodes", "counts", "apart", "forward", "back", "saved")))


def lies(graph):
    """Return wrong copies of a cell's graph by name: each is wrong in its results or in its gradients."""
    nodes, zero = list(graph.nodes), len(graph.nodes)
    more = [
        *nodes,
        nodes[0]._replace(op="const", args=(), value=0.0),
        nodes[0]._replace(op="const", args=(), value=math.nan),
    ]
    first, *others = graph.back
    op = {"mul": "add", "add": "sub", "sub": "add", "sigmoid": "tanh", "tanh": "sigmoid"}
    return {
        "states in another order": changed(graph, forward=graph.forward[::-1]),
        "a state of zeros": changed(graph, nodes=tuple(more), forward=(zero, *graph.forward[1:])),
        "a state of NaN": changed(graph, nodes=tuple(more), forward=(zero + 1, *graph.forward[1:])),
        "gradients in another order": changed(graph, back=(*others, first)),
        "the first right, the rest zeros": changed(graph, nodes=tuple(more), back=(first, *[zero] * len(others))),
        "the last zero": changed(graph, nodes=tuple(more), back=(*graph.back[:-1], zero)),
        "gradients of NaN": changed(graph, nodes=tuple(more), back=(zero + 1, *others)),
        **{
            f"node {n}: {op[node.op]} for {node.op}": changed(
                graph, nodes=(*nodes[:n], node._replace(op=op[node.op]), *nodes[n + 1 :])
            )
            for n, node in enumerate(nodes)
            if node.op in op
        },
    }


@pytest.mark.parametrize("cell", ["lstm", "peephole_lstm"])
def test_a_wrong_graph_is_refused(cell):
    """The comparison of a graph with its cell accepts the graph, and refuses every graph that is wrong in one place:
    in the results, in the gradients, or in one operation."""
    graph = ZOO[cell].graph(2, 3)
    with mx.stream(mx.cpu):
        verify(graph, graph.function, (2, 3))
        for lie in lies(graph).values():
            with pytest.raises(RuntimeError, match="differs from the cell"):
                verify(lie, graph.function, (2, 3))


@pytest.mark.parametrize("shape", [(1, 2), (2, 3), (8, 8)])
def test_a_graph_that_is_wrong_for_some_numbers_is_refused(shape):
    """The comparison tries negative numbers, numbers between 0 and 1, and numbers above 1, whatever the sizes."""
    wrong = [mx.abs, lambda a: mx.minimum(a, 1), lambda a: mx.where(mx.abs(a - 0.5) < 0.5, 0.5, a)]
    for function in wrong:
        graph = Form(lambda a, state, function=function: (function(a[0]) + state[0],), 1, 1).graph(*shape)
        with mx.stream(mx.cpu), pytest.raises(RuntimeError, match="differs from the cell"):
            verify(graph, lambda x, h: (x + h,), shape)


def test_a_graph_of_a_cell_that_returns_one_array_twice_is_right():
    """The comparison notices a gradient that lost the cotangent of the second state, if both states are one array."""

    def twice(a, state):
        c = mx.tanh(a[0]) + state[1]
        return c, c

    graph = Form(twice, 1, 2).graph(2, 3)
    lost = Form(lambda a, state: (mx.tanh(a[0]) + state[1], mx.zeros_like(a[0])), 1, 2).graph(2, 3)
    with mx.stream(mx.cpu), pytest.raises(RuntimeError, match="differs from the cell"):
        verify(changed(lost, forward=lost.forward[:1] * 2), graph.function, (2, 3))


@pytest.mark.parametrize("cell", ["lstm", "gru", "indrnn"])
def test_graphs_that_differ_in_one_part_have_different_keys(cell):
    """Two graphs that differ in one part are not equal and have different hashes, so that no cache confuses them."""
    graph = ZOO[cell].graph(2, 3)
    counts = graph.gates, graph.states, graph.inputs, graph.params
    others = [lie for name, lie in lies(graph).items() if graph.states > 1 or name != "states in another order"]
    others += [changed(graph, apart=not graph.apart), changed(graph, saved=graph.saved[:-1])]
    others += [changed(graph, counts=tuple(n + (k == part) for k, n in enumerate(counts))) for part in range(4)]
    assert all(other != graph and hash(other) != hash(graph) for other in others)
