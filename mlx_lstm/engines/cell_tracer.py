"""Trace a recurrent cell that a user wrote with MLX's operations, and MLX's own derivative of it, into a `CellGraph`.
Refuse a cell that is not pointwise, with an error that names the operation and its line. A cell is pointwise if each
number of its results depends only on the numbers of the same batch item and hidden unit.

The user's function is cell(a, state, *inputs, *params); it returns the new states. The functions below get it as
`step`, which takes all arrays one after the other, each [B, H] (B: batch items, H: hidden units). A cell gets each
preactivation `a` as a sum or, with `apart`, as a pair (input's part, recurrent part).

A graph is a list of nodes; a node is an operation on other nodes, by number. The name of an input is a letter and a
number: x a preactivation (or its input's part), p its recurrent part, s a state (s0 is h), u an input of the step, w a
parameter, d the gradient of a new state. The built-in cells (LSTM, GRU, RNN) are traced like a user's cell. They have
more inputs: e the gradient of a gate, i0 is h times the mask, k a limit, W0 a matrix, N0 the layer normalisation of c.

`exported` returns MLX's list of the operations of a function: dicts in which a key stands for each array. `absorb` adds
all these operations to a graph, `primitive` adds one of them. The dict `found` has the node of each key. If a cell uses
what it must not, NotPointwise is raised with the name of that operation, and `refuse` raises the error for the user.

apart: whether the cell gets
each preactivation as a pair. shape: (B, H), the shape of each array; dtype: float32 or float64. given: arrays with the
shapes and dtypes of a function's arguments; a trace does not read their values.
"""

import linecache
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from traceback import extract_tb, walk_tb
from types import FrameType
from typing import Any

import mlx.core as mx
import numpy as np

from ..ground.checks import fail
from . import definitions
from .captures import Captured, Weakly, library_of
from .cell_graph import CONDITIONS, CellGraph, Counts, Graph, Node, cell_graph, names_of, needed
from .cells import AnyCell, Cell, NormOptions, PointwiseCell, form_of
from .problem import address_of, memory_of
from .tracing import distinct, have_values, vjp

OP = "pointwise"
"""The name of the public function with which error texts begin."""

MLX = str(Path(mx.__file__).parent)
"""The folder of MLX's own Python code."""

UNARY = {
    "Negative": "neg", "Exp": "exp", "Expm1": "expm1", "Log1p": "log1p", "Tanh": "tanh", "Sigmoid": "sigmoid",
    "Abs": "abs", "Sign": "sign", "Sin": "sin", "Cos": "cos", "Tan": "tan", "Sinh": "sinh",
    "Cosh": "cosh", "ArcSin": "asin", "ArcCos": "acos", "ArcTan": "atan", "ArcSinh": "asinh", "ArcCosh": "acosh",
    "ArcTanh": "atanh", "Erf": "erf", "Floor": "floor", "Ceil": "ceil", "Round": "round", "LogicalNot": "not",
}  # fmt: skip
BINARY = {
    "Add": "add", "Subtract": "sub", "Multiply": "mul", "Divide": "div", "Maximum": "max", "Minimum": "min",
    "Power": "pow", "Remainder": "rem", "LogAddExp": "logaddexp", "ArcTan2": "atan2", "Greater": "gt",
    "GreaterEqual": "ge", "Less": "lt", "LessEqual": "le", "Equal": "eq", "NotEqual": "ne",
    "LogicalAnd": "and", "LogicalOr": "or",
}  # fmt: skip
"""UNARY, BINARY: MLX's operations of one and of two operands, and their names in a graph."""

VIEWS = ("Broadcast", "Copy", "Contiguous", "Full")
"""MLX's operations that only repeat or copy numbers. A number keeps its value and its hidden unit, so these operations
get no node in a graph."""

PRODUCTS = ("Matmul", "AddMM", "QuantizedMatmul", "GatherMM", "GatherQMM", "BlockMaskedMM")
"""MLX's operations that multiply matrices. If a cell has such a product, the error names the product, not another
forbidden operation that MLX lists before it, such as the transposition of the matrix."""

ADVICE = {
    "the products of x and h belong into Wx and Wh, any other product into a step for mlx_lstm.recurrent": PRODUCTS,
    "a step that mixes units is one for mlx_lstm.recurrent; norm= normalises the products": (
        *("Reduce", "Softmax", "LogSumExp", "Scan", "ArgReduce", "Sort", "ArgSort", "Partition"),
    ),
    "a cell must not change shapes, but a step for mlx_lstm.recurrent may": (
        *("Reshape", "Transpose", "Slice", "Split", "Concatenate", "Gather", "GatherAxis", "ExpandDims", "Squeeze"),
        *("Flatten", "Unflatten", "AsStrided", "Pad", "SliceUpdate", "DynamicSlice"),
    ),
    "draw random numbers before, and pass them in inputs": ("RandomBits",),
    "an array that is not the same number everywhere must be passed in params": ("a constant array",),
    "arrays from around the cell would be constants without a gradient: pass it in params": ("a captured array",),
    "MLX cannot write out functions with derivatives of their own": ("a custom function",),
    "a cell computes in float32": ("AsType",),
    "use mx.where instead of if, and functions of MLX only": ("a decision on values",),
    "compute it before, as a number, or use mlx_lstm.recurrent": ("a compiled function of constants",),
}
"""{advice in an error text: the operations that cause this error, because a cell must not use them}."""


class NotPointwise(Exception):
    """Raised if a cell uses something that cannot be computed for each number separately. what: the name of this
    operation or mistake, such as "Matmul" or "a captured array"."""

    def __init__(self, what: str):
        self.what = what
        super().__init__(what)


def traced(cell: Callable[..., Any], counts: Counts, apart: bool, shape: tuple[int, int], dtype: mx.Dtype) -> CellGraph:
    """Return the graph of a cell, from a cache if the same function was traced for the same arguments and captures the
    same numbers."""
    captured, step = Captured(cell), partial(called, cell, counts, apart)
    try:
        # If the search may have missed a number, the key also gets MLX's list of the cell's operations.
        key = captured.key if captured.is_whole else [*captured.key, listing(step, counts, apart, shape, dtype)]
        return cached_trace(Weakly(cell), counts, apart, shape, dtype, tuple(key)).of_function(step)
    except NotPointwise:  # MLX cannot list an operation; `trace` finds the text of the error for the user
        return trace(cell, counts, apart, shape, dtype).of_function(step)


def listing(
    step: Callable[..., list[mx.array]], counts: Counts, apart: bool, shape: tuple[int, int], dtype: mx.Dtype
) -> str:
    """Return MLX's list of the operations of a cell and of its gradient as text, with the exact numbers of the
    constants. The list of the cell alone would lack mx.stop_gradient."""

    def results(*arrays: mx.array) -> list[mx.array]:
        n = len(arrays) - counts.states  # the cotangents of the new states come last
        values, gradients = vjp(step, arrays[:n], arrays[n:])
        return [*values, *gradients]

    with mx.stream(mx.cpu):  # as in `trace`
        given, d_states = arrays_of(counts, apart, shape, dtype)
        content = exported(results, [*given, *d_states])
    try:
        constants = [array.tolist() for item in content for _, array in item.get("constants", ())]
    except (ValueError, RuntimeError) as error:  # a placeholder of mx.compile or mx.vmap has no numbers
        raise NotPointwise("a captured array") from error
    return repr((content, constants))


@lru_cache(512)
def cached_trace(
    cell: Weakly,
    counts: Counts,
    apart: bool,
    shape: tuple[int, int],
    dtype: mx.Dtype,
    captured: tuple[Any, ...],
) -> CellGraph:
    """Return the graph of a cell from a cache. captured: the numbers and the code that the cell reads besides its
    arguments; as a part of the cache's key they make sure that a changed cell is traced again."""
    return trace(cell.function(), counts, apart, shape, dtype)


def arrays_of(
    counts: Counts, apart: bool, shape: tuple[int, int], dtype: mx.Dtype
) -> tuple[list[mx.array], list[mx.array]]:
    """Return two lists of arrays of zeros with which a cell is traced: one array for each argument, and one for the
    cotangent of each new state. With `apart` a preactivation is two arguments."""
    zeros = mx.zeros(shape, dtype)
    return [zeros] * (counts.gates * (1 + apart) + sum(counts[1:])), [zeros] * counts.states


def trace(cell: Callable[..., Any], counts: Counts, apart: bool, shape: tuple[int, int], dtype: mx.Dtype) -> CellGraph:
    """Trace a cell and its derivative by MLX. Return both as one `CellGraph`, or raise an error if the cell is not
    pointwise. The graph does not refer to the user's function, so that a cache of graphs does not keep it alive."""
    with mx.stream(mx.cpu):  # nothing runs, but MLX creates float64 arrays only on the CPU
        step = partial(called, cell, counts, apart)  # the cell as a function of one list of arrays
        given, d_states = arrays_of(counts, apart, shape, dtype)
        graph, n = Graph(), len(given)
        try:
            names = [*names_of(counts, apart)]
            # `distinct` makes each result an array of its own: if two results differ only by an mx.stop_gradient, MLX's
            # export leaves one of them out.
            forward = absorb(graph, lambda *arrays: distinct(step(*arrays)), given, names)
            graph.derives = True  # the nodes that are added from now on belong to the derivative
            names += [f"d{k}" for k in range(counts.states)]  # the cotangents of the new states
            back = absorb(graph, lambda *arrays: vjp(step, arrays[:n], arrays[n:])[1], given + d_states, names)
        except NotPointwise as error:
            refuse(cell, step, given, error.what)  # raises the error for the user
        cell_of = cell_graph(graph, counts, apart, forward, back)
        verify(cell_of, step, shape)
        return cell_of


OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "div": lambda a, b: a / b,
    "neg": lambda a: -a, "max": mx.maximum, "min": mx.minimum, "pow": mx.power, "rem": mx.remainder,
    "logaddexp": mx.logaddexp, "atan2": mx.arctan2, "exp": mx.exp, "expm1": mx.expm1, "log": mx.log, "log2": mx.log2,
    "log10": mx.log10, "log1p": mx.log1p, "sqrt": mx.sqrt, "rsqrt": mx.rsqrt, "tanh": mx.tanh, "erf": mx.erf,
    "sigmoid": definitions.sigmoid, "abs": mx.abs, "sign": mx.sign, "floor": mx.floor, "ceil": mx.ceil,
    "round": mx.round, "sin": mx.sin, "cos": mx.cos, "tan": mx.tan, "sinh": mx.sinh, "cosh": mx.cosh,
    "asin": mx.arcsin, "acos": mx.arccos, "atan": mx.arctan, "asinh": mx.arcsinh, "acosh": mx.arccosh,
    "atanh": mx.arctanh, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "and": mx.logical_and,
    "or": mx.logical_or, "not": mx.logical_not, "select": mx.where, "matmul": lambda a, b: a @ b,
    "norm": lambda c, norm: norm(c), "unnorm": lambda d, c, norm: norm.back(d, c),
}  # fmt: skip
"""{operation of a graph: MLX's function for it}. The operation "float" is missing, because its function needs a
dtype."""


def values_of(
    nodes: tuple[Node, ...],
    outputs: Iterable[int],
    known: Mapping[int, mx.array],
    like: mx.array,
    functions: Mapping[str, Callable[..., Any]] = OPERATIONS,
    order: Iterable[int] | None = None,
) -> dict[int, mx.array]:
    """Compute nodes of a graph with MLX. Return {number of a node: its value} for the nodes from which the outputs are
    computed.

    outputs: the numbers of the nodes whose values the caller needs. known: {node: its value}, among them all inputs
    that are read. like: an array of the dtype in which constants are created. functions: MLX's function for each
    operation. order: the nodes to compute; None to find them here.
    """
    values = dict(known)
    for n in needed(nodes, outputs, known) if order is None else order:
        node = nodes[n]
        if n in values:
            continue
        if node.op == "const":
            values[n] = mx.array(node.value, like.dtype)
        elif node.op == "float":  # a condition becomes 0 or 1
            values[n] = values[node.args[0]].astype(like.dtype)
        else:
            values[n] = functions[node.op](*[values[k] for k in node.args])
    return values


AS_MLX = OPERATIONS | {"sigmoid": mx.sigmoid}
"""The function of MLX for each operation, with mx.sigmoid, which users call. With these a graph rounds like the user's
cell. Otherwise a comparison of two nearly equal numbers could be true in one of them and false in the other."""


def verify(graph: CellGraph, step: Callable[..., Any], shape: tuple[int, int]) -> None:
    """Check a graph: compare its results with those of the function `step`, and its gradients with MLX's forward-mode
    derivative of this function, for random numbers in float64. The graph's gradients come from MLX's reverse mode, so
    forward mode, which has other formulas, is an independent check. shape: (B, H), the shape of each random array.

    A number that is infinite or NaN in MLX's result is not compared, because a rewritten graph may be finite where
    MLX's formula overflows. Functions such as log and arccosh are NaN outside of their domain. So the random numbers
    are of three kinds: of any sign, between 0 and 1, and above 1. Each item and unit gets one kind at random. If there
    are few items and units, the check runs three times, once with each kind.

    Raises:
        RuntimeError: they differ, which is a defect of this package.
    """
    rng, names = np.random.default_rng(0), graph.names
    # kinds: arrays [B, H] with the kind of each item and unit. With 64 numbers or more, one random array contains each
    # kind often enough.
    kinds = [rng.integers(3, size=shape)] if shape[0] * shape[1] >= 64 else [np.full(shape, kind) for kind in range(3)]
    for kind in kinds:
        numbers = [(rng.normal(size=shape), rng.uniform(0.1, 0.9, shape), rng.uniform(1.1, 3, shape)) for _ in names]
        drawn = [mx.array(np.choose(kind, each), mx.float64) for each in numbers]
        weights = [mx.array(rng.normal(size=shape), mx.float64) for _ in range(graph.states)]  # random cotangents
        try:
            wanted = [*step(*drawn), *derivative_forward(step, drawn, weights)]
        except ValueError:  # a function of MLX that does not take float64: compare in float32
            drawn, weights = ([array.astype(mx.float32) for array in each] for each in (drawn, weights))
            wanted = [*step(*drawn), *derivative_forward(step, drawn, weights)]
        given = dict(zip([*names, *(f"d{k}" for k in range(graph.states))], [*drawn, *weights], strict=True))
        known = {n: given[name] for name, n in graph.number.items()}
        # AS_MLX: the same functions of MLX that the cell calls, so that both round alike.
        values = values_of(graph.nodes, [*graph.forward, *graph.back], known, drawn[0], AS_MLX)
        got = [mx.broadcast_to(values[n], shape) for n in (*graph.forward, *graph.back)]
        mx.eval(wanted, got)
        if not all(near(one, other) for one, other in zip(wanted, got, strict=True)):
            raise RuntimeError(f"[{OP}] the graph of the cell differs from the cell. Please report its source.")


def derivative_forward(step: Callable[..., Any], drawn: list[mx.array], weights: list[mx.array]) -> list[mx.array]:
    """Return the gradients of `step` with respect to its arguments `drawn`, for the cotangents `weights` of its
    results, in forward mode, one derivative per argument. One suffices because each number of a new state depends only
    on the numbers of its own item and unit."""
    found = []
    for k in range(len(drawn)):
        # `step` as a function of its argument number k. The default value stores the current k, because the loop
        # changes it.
        def of_one(value: mx.array, k: int = k) -> list[mx.array]:
            return step(*drawn[:k], value, *drawn[k + 1 :])

        tangents = mx.jvp(of_one, [drawn[k]], [mx.ones_like(drawn[k])])[1]
        found.append(sum((w * t for w, t in zip(weights, tangents, strict=True)), mx.zeros_like(drawn[k])))
    return found


def near(wanted: mx.array, got: mx.array) -> bool:
    """Return whether two arrays are equal up to rounding errors. Numbers that are not finite in `wanted` are not
    compared. The tolerance is 1e-3 (1 + the largest number): MLX computes exp of float64 only as precisely as of
    float32, and a cell may magnify this error. A wrong graph differs by far more."""
    a, b = (np.array(array.astype(mx.float64)) for array in (wanted, got))
    finite = np.isfinite(a)
    return bool((np.abs(a - b)[finite] <= 1e-3 * (1 + np.abs(a[finite]).max(initial=0))).all())


# --- The built-in cells ---


def graph_of(cell: AnyCell, names: Collection[str], exposes: bool) -> CellGraph:
    """Return the graph of a cell. names: the names of the call's arrays. exposes: for a forward pass, whether the
    caller gets the gates; for a backward pass, whether the gates have cotangents."""
    if isinstance(cell, PointwiseCell):
        return cell.graph
    form = form_of(cell)  # the cell without its numbers, such as limits, which are inputs of a graph
    if form.norm is not None:  # a graph has only the norm of c; norms of products are computed before it
        form = form._replace(norm=NormOptions(of=None, c=form.norm.c) if form.norm.c else None)
    return traced_definition(form, frozenset({"peephole", "Wp"} & set(names)), exposes)


def straight_through(x: mx.array, value: mx.array) -> mx.array:
    """Return an array that has the value of `value` and the gradient of x (a straight-through estimator): x + (value -
    x), where MLX takes the difference for a constant. In a graph the rewrite `cell_graph.add_difference` replaces the
    sum by `value`, so no step computes it."""
    return x + mx.stop_gradient(value - x)


def traced_clip(x: mx.array, limit: mx.array, gradient: str) -> mx.array:
    """Return clip(x, -limit, limit) for the graph of a built-in cell. Its gradient passes to x unchanged if `gradient`
    is "through". If it is "zero", the gradient is 0 where the clip changed x.

    The gradient passes where |x| <= limit. But a backward pass computes x again, maybe rounded differently. So it
    compares the clipped value, which was saved: if its size is below the limit, the clip did not change x. If it equals
    the limit, only x can say whether the clip changed it.
    """
    value = mx.clip(x, -limit, limit)
    if gradient == "zero":
        before, after = mx.stop_gradient(x), mx.stop_gradient(value)
        x = mx.where((mx.abs(after) < limit) | (mx.abs(before) == limit), x, before)
    return straight_through(x, value)


TRACED: definitions.Functions = {
    **definitions.FUNCTIONS,
    "sigmoid": mx.sigmoid,
    "clip": traced_clip,
    "where": lambda condition, value, x: straight_through(x, mx.where(condition, value, x)),
    "norm": lambda c, N: c @ N,  # stands for the normalisation of c: `Graph.normalise` replaces this product
}
"""The functions that a cell's definition calls while it is traced. Four of them differ from `definitions.FUNCTIONS`, so
that the graph gets the operations and gradients that engines need."""


@lru_cache(256)
def traced_definition(cell: Cell, names: frozenset[str], exposes: bool) -> CellGraph:
    """Return the graph of a built-in cell. Calls that differ only in numbers share a graph: the limits of c and h are
    inputs, and the biases, such as an LSTM's forget bias, are parts of the preactivations. names: which of the arrays
    "peephole" and "Wp" the call has. exposes: as in `graph_of`, whether the gates are given to the caller or have
    cotangents."""
    gates, resets_first = cell.gate_order, cell.reset == "before"
    # products: the numbers of the gates whose recurrent part is an input of its own, such as p0. The candidate n of a
    # GRU with reset "before" has none, because the step itself computes its product.
    products = [k for k, gate in enumerate(gates) if cell.apart and not (resets_first and gate == "n")]
    peepholes = [f"w{k}" for k in range(cell.gates)] if "peephole" in names else []
    # first: the inputs that have a gradient. given: all inputs. i0, which is h times the mask, is an input only if the
    # second product of a GRU (`resets_first`) reads it.
    first = [*(f"x{k}" for k in range(cell.gates)), *(f"p{k}" for k in products)]
    first += [*(f"s{k}" for k in range(cell.carried + 1)), *peepholes, *(["i0"] if resets_first else [])]
    more = {"k0": cell.cell_clip is not None, "k1": cell.projection_clip is not None}
    more |= {"W0": resets_first or "Wp" in names, "N0": cell.norm is not None}  # the norm is one of c (`graph_of`)
    given = [*first, *(name for name, is_there in more.items() if is_there)]

    # Return the new states and then the gates, which the backward pass reads. arrays: one for each name in `given`.
    def results(*arrays: mx.array) -> list[mx.array]:
        states, found = definitions.step(cell, dict(zip(given, arrays, strict=True)), TRACED)
        return distinct([*states, *(found[gate] for gate in gates)])

    # Return the gradients of the inputs `first`. arrays: those of `given`, then the cotangents of n results.
    def derivatives(*arrays: mx.array) -> list[mx.array]:
        rest = arrays[len(first) : len(given)]
        return vjp(lambda *x: results(*x, *rest)[:n], arrays[: len(first)], arrays[len(given) :])[1]

    states = cell.carried + 1  # the number of states: `carried` does not count h
    n = states + cell.gates * exposes  # the number of results that have cotangents
    with mx.stream(mx.cpu):
        # zero: traced in place of every argument. It is square, because it is also an operand of the matrix products.
        graph, zero = Graph(is_built_in=True), mx.zeros((3, 3), mx.float64)
        forward = absorb(graph, results, [zero] * len(given), given)
        graph.derives = True
        cotangents = [*(f"d{k}" for k in range(states)), *(f"e{k}" for k in range(n - states))]
        back = absorb(graph, derivatives, [zero] * (len(given) + n), [*given, *cotangents])
    saved = forward[states:]  # the gates
    if not exposes:  # the backward pass of a plain RNN reads only h
        read = needed(graph.nodes, back, {*forward})
        saved = [k for k in saved if k in read]
    counts = Counts(cell.gates, states, inputs=0, params=len(peepholes))
    return cell_graph(graph, counts, cell.apart, forward[:states], back, saved, tuple(first))


def called(cell: Callable[..., Any], counts: Counts, apart: bool, *arrays: mx.array) -> list[mx.array]:
    """Call the cell with arrays in the order of `names_of`. Return the new states. Raise an error if their number,
    type, shape or dtype is wrong."""
    x, rest = arrays[: counts.gates], arrays[counts.gates :]  # x: the preactivations, or their input parts
    a: Sequence[Any] = x
    if apart:
        a, rest = tuple(zip(x, rest[: counts.gates], strict=True)), rest[counts.gates :]
    try:
        states = cell(a, rest[: counts.states], *rest[counts.states :])
    except (TypeError, ValueError) as error:
        # Raise the errors of the cell as they are, except those that a wrong number of arguments causes: Python's
        # errors for it, and MLX's for a tuple of arrays in place of an array.
        if not any(text in str(error) for text in (" to unpack", "positional argument", "Invalid type tuple")):
            raise
        given = f"gates={counts.gates}, states={counts.states}, params={counts.params}, inputs={counts.inputs}"
        rule = "gates, states, params and inputs must be as many as the cell takes, cell(a, state, *inputs, *params),"
        raise ValueError(f"[{OP}] {rule} but got {given}: {str(error).rstrip('.')}.") from error
    shape = rest[0].shape
    if isinstance(states, mx.array) and counts.states == 1:
        states = (states,)
    if not isinstance(states, (tuple, list)) or len(states) != counts.states:
        many = f" of {len(states)}" if isinstance(states, (tuple, list)) else ""
        fail(OP, f"the cell must return a tuple of {counts.states} states, h first,", type(states).__name__ + many)
    for k, state in enumerate(states):
        if not isinstance(state, mx.array):
            fail(OP, f"the cell must return arrays as states, state {k}", type(state).__name__)
        if state.shape not in (shape, ()):
            fail(OP, f"the cell must keep the shape of state {k}, {list(shape)},", list(state.shape))
        if state.dtype == mx.bool_:
            fail(OP, f"the cell must return floats as states, state {k}", state.dtype)
    return [mx.broadcast_to(state, shape) for state in states]


# --- From MLX's graph to ours ---

Exported = list[dict[str, Any]]
"""MLX's graph of a function: a list of inputs, constants, operations ("primitive") and outputs."""


def exported(function: Callable[..., Any], given: list[mx.array]) -> Exported:
    """Return MLX's graph of a function, as mx.export_function lists it. given: arrays of the shapes and dtypes of its
    arguments. Raise `NotPointwise` if MLX cannot list an operation; its error says which."""
    content: Exported = []
    try:
        mx.export_function(content.append, function, *given)
    except ValueError as error:
        if "CustomTransforms" in str(error):
            raise NotPointwise("a custom function") from error
        # The cell reads the values of an array, which has none while it is traced. MLX's error has the second text if
        # float(a), math.tanh(a) or `if a` gets an array of several numbers.
        if "eval an array during function transformations" in str(error) or "Only length-1 arrays" in str(error):
            raise NotPointwise("a decision on values") from error
        name = str(error).partition("Unable to get state for primitive ")[2]
        if name:  # "Compiled": a compiled function, such as nn.relu, of an array that does not depend on the arguments
            raise NotPointwise("a compiled function of constants" if name.startswith("Compiled") else name) from error
        raise
    return content


def absorb(graph: Graph, function: Callable[..., Any], given: list[mx.array], names: list[str]) -> list[int]:
    """Trace a function that uses MLX, and add its operations to `graph`. Return the nodes of its results. given: arrays
    with the shapes and dtypes of its arguments. names: for each argument the name of the graph's input."""
    content = exported(function, given)
    # A user's cell with random numbers or matrix products is refused, and the error shall name these. MLX may list
    # another forbidden operation before them, such as the splitting of the random key. So look for these first.
    for item in content:
        if item.get("name") in ("RandomBits", *PRODUCTS) and not graph.is_built_in:
            raise NotPointwise(item["name"])
    # Find the arrays that the function captures: trace it again while the first trace `content` is alive.
    again = exported(function, given)
    captured = captured_arrays(content, again)
    found: dict[str, int | None] = {}  # {key of an array in MLX's list: node; None if its numbers are not all equal}
    outputs: list[str] = []
    for item in content:
        if item["type"] == "inputs":
            found |= {key: graph.input(name) for (key, *_), name in zip(item["inputs"], names, strict=True)}
        elif item["type"] == "outputs":
            outputs = [key for key, *_ in item["outputs"]]
        elif item["type"] == "constants":
            for key, array in item["constants"]:
                found[key] = None if key in captured else constant_of(graph, array)
        elif item["type"] == "primitive":
            found[item["outputs"][0][0]] = primitive(graph, item, found, captured)
    results = [found[key] for key in outputs]
    if None in results:
        raise NotPointwise("a captured array" if captured else "a constant array")
    return [n for n in results if n is not None]


def constant_of(graph: Graph, array: mx.array) -> int | None:
    """Return the node of a constant, or None for an array whose numbers are not all equal."""
    values = np.array(array.astype(mx.float64 if array.dtype == mx.float64 else mx.float32), copy=False).reshape(-1)
    # NaN != NaN, so for an array with NaN the function returns None, too.
    if values.size == 0 or (values != values[0]).any():
        return None
    n = graph.constant(float(values[0]))
    # A graph has only numbers as constants. So a constant bool becomes the condition "number != 0".
    return graph.add("ne", n, graph.constant(0)) if array.dtype == mx.bool_ else n


def captured_arrays(content: Exported, again: Exported) -> set[str]:
    """Return the keys of the captured arrays: the constants that come from outside of the function. content, again: the
    graphs of two traces of it.

    A constant that the function creates has a different memory address in each trace, because both traces are alive. A
    captured array has the same address in both. A placeholder of mx.compile or mx.vmap has no value and no address. It
    comes from a transformation around the function, so it is captured, too.
    """
    captured: set[str] = set()
    pairs = [
        [pair for item in graph if item["type"] == "constants" for pair in item["constants"]]
        for graph in (content, again)
    ]
    for (key, one), (_, other) in zip(*pairs, strict=False):
        try:
            same = one.size > 0 and address_of(memory_of(one)) == address_of(memory_of(other))
        except (ValueError, RuntimeError):  # a placeholder of mx.compile or mx.vmap
            same = True
        if same:
            captured.add(key)
    return captured


def primitive(graph: Graph, item: dict[str, Any], found: dict[str, int | None], captured: set[str]) -> int:
    """Add one operation of MLX's graph to `graph`. Return its node. item: the operation, as mx.export_function lists
    it. captured: the keys of arrays from outside of the function.

    In a built-in cell a matrix is an input, such as W0. Its transpose becomes another input, W0T; the transpose of W0T
    becomes W0.
    """
    name, arguments = item["name"], item["arguments"]
    keys = [key for key, *_ in item["inputs"]]
    supported = {*UNARY, *BINARY, *VIEWS, "AsType", "Square", "Sqrt", "Log", "BitwiseBinary", "Select", "FloorDivide"}
    if name not in supported and not (graph.is_built_in and name in ("Transpose", "Matmul", "StopGradient")):
        raise NotPointwise("a captured array" if captured.intersection(keys) else name)
    if any(found[key] is None for key in keys):
        raise NotPointwise("a captured array" if captured.intersection(keys) else "a constant array")
    # conditions: for each operand whether its values are bool.
    args = [n for n in (found[key] for key in keys) if n is not None]
    conditions = [graph.nodes[n].op in CONDITIONS for n in args]
    if name == "Transpose":  # "W0" becomes "W0T", "W0T" becomes "W0"
        matrix = str(graph.nodes[args[0]].value)
        return graph.input(matrix[:-1] if matrix[-1] == "T" else matrix + "T")
    if name == "Matmul":
        return graph.normalise(*args) if graph.nodes[args[1]].value in ("N0", "N0T") else graph.add("matmul", *args)
    if name in (*VIEWS, "StopGradient"):  # they copy or repeat numbers, but change no value and no unit
        return args[0]
    if name == "AsType":
        return cast(graph, args[0], conditions[0], item["inputs"][0][2], item["outputs"][0][2])  # both dtypes
    if name == "Sqrt":  # its argument says whether it is 1 / sqrt
        return graph.add("rsqrt" if arguments[0] else "sqrt", *args)
    if name == "Log":  # its argument is the number of the base: 2, 10 or e
        return graph.add(("log2", "log10", "log")[int(arguments[0])], *args)
    if name == "BitwiseBinary":  # MLX's numbers 0, 1, 2 mean and, or, xor; on conditions xor is "not equal"
        if not all(conditions) or arguments[0] not in (0, 1, 2):
            raise NotPointwise(name)
        return graph.add(("and", "or", "ne")[arguments[0]], *args)
    if name == "Square":
        return graph.add("mul", args[0], args[0])
    if name == "Select":
        return graph.add("select", *args)
    if name == "FloorDivide":
        return graph.add("floor", graph.add("div", *args))
    op = {**UNARY, **BINARY}[name]
    # A logical operation needs conditions, so a number x becomes x != 0. Any other operation needs numbers, so a
    # condition becomes 0 or 1.
    pairs = zip(args, conditions, strict=True)
    if op in ("and", "or", "not"):
        return graph.add(op, *[n if is_bool else graph.add("ne", n, graph.constant(0)) for n, is_bool in pairs])
    return graph.add(op, *[graph.add("float", n) if is_bool else n for n, is_bool in pairs])


def cast(graph: Graph, n: int, is_bool: bool, before: mx.Dtype, after: mx.Dtype) -> int:
    """Return the node of a conversion of node n from the dtype `before` to the dtype `after`. is_bool: whether n is a
    condition.

    Conversions between bool and numbers, of constants, and from float32 to float64 are supported. Any other conversion
    raises an error. float32 in a cell of float64 is exact: only results of constants such as mx.where(p, 1.0, 0.0) have
    this dtype, because all arguments are float64.
    """
    if after == mx.bool_:
        return n if is_bool else graph.add("ne", n, graph.constant(0))
    if is_bool:
        return graph.add("float", n)
    if before == after or graph.value(n) is not None or (before, after) == (mx.float32, mx.float64):
        return n
    raise NotPointwise("AsType")


# --- Refusals ---


def refuse(cell: Callable[..., Any], step: Callable[..., Any], given: list[mx.array], what: str) -> None:
    """Raise the error for a cell that is not pointwise. It names the operation, its line and what to do instead. what:
    what the cell must not use, from `NotPointwise`."""
    what = what_with_values(cell, step, given, what)
    advice = next((text for text, names in ADVICE.items() if what in names), "docs/cells.md lists the operations")
    # If the cell reads values by a call such as np.tanh(h), name this call.
    if what == "a decision on values" and (other := call_outside_mlx(step, given)):
        what, advice = other
    name = getattr(cell, "__name__", type(cell).__name__)
    fail(OP, f"the cell must compute each number by itself ({advice})", f"{what} in {name}{line_of(step, given)}")


def what_with_values(cell: Callable[..., Any], step: Callable[..., Any], given: list[mx.array], what: str) -> str:
    """Return the name of what makes a cell not pointwise, found by one more trace in which all arrays that it captures
    are evaluated. what: the name that the first trace found.

    MLX's list contains the operations that compute a captured array if this array is not evaluated yet. So the initial
    weights of a module would look like random numbers that the cell draws.
    """
    if arrays := Captured(cell).every_array():
        have_values(arrays)
        try:
            absorb(Graph(), step, given, [f"x{k}" for k in range(len(given))])  # any names will do
        except NotPointwise as error:
            what = error.what
    # The cell captures no array, so the array with the same address in two traces is a constant of a compiled function,
    # which MLX stores from call to call.
    elif what == "a captured array":
        what = "a compiled function of constants"
    return what


def call_outside_mlx(step: Callable[..., Any], given: list[mx.array]) -> tuple[str, str] | None:
    """Return (call, advice), such as ("np.tanh", "use mx.tanh"), if a cell passes an array to a function of NumPy or of
    Python's math module and MLX has a function of this name. Otherwise return None."""
    try:
        exported(step, given)
    except NotPointwise as error:
        # The innermost frame of the user's code is at the line with the call.
        cause = None if error.__cause__ is None else error.__cause__.__traceback__
        frames = [(frame, line) for frame, line in walk_tb(cause) if is_users(frame.f_code.co_filename)]
        if not frames:
            return None
        frame, line = frames[-1]
        names = frame.f_builtins | frame.f_globals | frame.f_locals
        # For each name before a "(" in this line, such as "np.tanh", find the object: first `np`, then its attribute.
        for text in re.findall(r"([A-Za-z_][\w.]*)\(", linecache.getline(frame.f_code.co_filename, line)):
            first, *rest = text.split(".")
            value = names.get(first)
            for part in rest:
                value = getattr(value, part, None)
            name = getattr(value, "__name__", "")
            if library_of(value) in ("numpy", "math") and hasattr(mx, name):
                return text, f"use mx.{name}"
    return None


def line_of(step: Callable[..., Any], given: list[mx.array]) -> str:
    """Return the place of the first line of a cell that cannot be traced, as text: ", file.py line 7: y = h @ W".

    To find this line, the cell is traced again and again: with its first intermediate result as the only output, then
    with its second one, and so on. The first trace that fails shows the line.
    """
    names, n = [f"x{k}" for k in range(len(given))], 0
    seen: list[tuple[mx.array, str, int]] = []

    # Run the cell, but return only its intermediate result number n. seen: (result, file, line) of all these results.
    def one(*arrays: mx.array) -> list[mx.array]:
        seen.clear()
        with recorded(seen):
            step(*arrays)
        return [seen[n][0]] if n < len(seen) else []

    while n == 0 or n < len(seen):  # the first run fills `seen`
        try:
            absorb(Graph(), one, given, names)
        except NotPointwise as error:
            if error.what == "a decision on values" and error.__cause__ is not None:
                frames = [frame for frame in extract_tb(error.__cause__.__traceback__) if is_users(frame.filename)]
                return place(frames[-1].filename, frames[-1].lineno or 0) if frames else ""
            return place(*seen[n][1:]) if n < len(seen) else ""
        n += 1
    return ""


def place(file: str, line: int) -> str:
    """Return text for an error message: a file's name, the number of a line, and the source of this line."""
    source = linecache.getline(file, line).strip()
    return f", {Path(file).name} line {line}" + (f": {source}" if source else "")


def is_users(file: str) -> bool:
    """Return whether a file belongs to the user: it is neither this module nor a part of Python or MLX."""
    return file != __file__ and not file.startswith(("<frozen", MLX))


@contextmanager
def recorded(seen: list[tuple[mx.array, str, int]]) -> Iterator[None]:
    """Record every array that appears in a variable or as a result of Python code inside this context, with the file
    and the number of the line that made it. No line of a function made its arguments, so they are not recorded."""
    known: dict[int, Any] = {}  # {id: array}; the dict keeps the arrays alive, so that no other object gets such an id
    before = sys.gettrace()

    def note(values: Any, frame: FrameType, line: int) -> None:
        for value in values:
            if isinstance(value, mx.array) and id(value) not in known:
                known[id(value)] = value
                seen.append((value, frame.f_code.co_filename, line))

    # Python calls `enter` when a function begins, and `follow` before each line of the function and at its return. At
    # that moment the variables have the values that the previous line gave them; `last` holds the number of this line.
    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        if not is_users(frame.f_code.co_filename):
            return None
        last = [frame.f_lineno]
        known.update({id(value): value for each in frame.f_locals.values() for value in flattened(each)})

        def follow(frame: FrameType, event: str, argument: Any) -> Any:
            note([value for each in frame.f_locals.values() for value in flattened(each)], frame, last[0])
            if event == "return":
                note(flattened(argument), frame, last[0])
            last[0] = frame.f_lineno
            return follow

        return follow

    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


def flattened(value: Any) -> list[Any]:
    """Return all values of nested tuples and lists as one list."""
    return [inner for each in value for inner in flattened(each)] if isinstance(value, (tuple, list)) else [value]
