"""Gradient checkpointing of the function `recurrent`: the sequence is divided into chunks of steps. Only the states at
the start of each chunk are saved, and the gradient runs each chunk again.

`mx.checkpoint` does not suffice for two reasons. An array that a function captures would get a gradient of 0, and
MLX could run all chunks again at the same time. Here the gradient of a chunk waits for the gradient of the following
chunk, and the parameters of captured modules are inputs of a chunk.

T: time steps, B: batch items, K: steps of a chunk; `start` is the first step of a chunk. A tree is an array, or nested
tuples, lists and dicts of arrays; its leaves are the arrays; `filled(tree, arrays)` puts other arrays in their places.
A piece is the part of all sequences that belongs to a chunk. The letter d begins the names of gradients. A custom
function of MLX gets and returns arrays only, not trees; its vjp rule gets (primals, cotangents, results).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from gc import get_referents
from math import isqrt
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from ..engines.captures import Captured
from ..engines.cell_tracer import captured_arrays, exported
from ..engines.tracing import custom_function, split_apart, vjp
from ..ground.checks import fail, without_warnings

OP = "recurrent"
"""The function that error texts begin with."""

Chunk = Callable[[int, Any, Any, Any], tuple[Any, Any]]
"""Type of a function that runs the steps of one chunk, which begins at step `start`:
`chunk(start, sequences, state, parameters) -> (outputs, state)`."""


def checkpointed(
    chunk: Chunk, every: int | str, step: Any, sequences: Any, state: Any, parameters: Any, reverse: bool
) -> tuple[Any, Any]:
    """Run all chunks of a sequence. Return the outputs [T, B, ...] and the last state; their gradient runs the
    chunks again. chunk(start, sequences, state, parameters) runs one chunk, and returns (its outputs, the state after
    it). every: the number of steps per chunk, or "auto". step: the user's function, which may capture
    modules; their parameters get gradients, too. sequences: a tree of arrays [T, ...]. state: the first state.
    parameters: a tree of arrays that each step gets, or None. reverse: whether the last step runs first."""
    modules = captured_modules(step)
    T = len(leaves(sequences)[0])
    K = min(T, isqrt(T - 1) + 1 if isinstance(every, str) else every)  # "auto": the square root of T, rounded up
    order = range(0, T, K)[:: -1 if reverse else 1]  # the first step of each chunk, in the order in which they run
    first = mapped(lambda array: array[:1], sequences), state, parameters  # of one step
    refuse_lost(lambda tree: chunk(order[0], *tree), first, modules)
    inputs = {"sequences": sequences, "state": state, "parameters": parameters}
    chunks = Chunks(chunk, (T, K, order), modules, inputs)
    whole_run = custom_function(chunks.forward)
    whole_run.vjp(chunks.backward)
    results = whole_run(*leaves(chunks.inputs))  # sets `chunks.structure`
    outputs, last, _ = filled(chunks.structure, results)
    return outputs, last


class Chunks:
    """The chunks of a sequence: `forward` runs them, `backward` runs each again for its gradients. Both get and return
    leaves of trees, as MLX's custom functions do."""

    def __init__(self, chunk: Chunk, sizes: tuple[int, int, range], modules: list[nn.Module], inputs: dict[str, Any]):
        """chunk: runs the steps of one chunk. sizes: T steps, K steps per chunk, and the first steps of the chunks in
        the order in which they run. modules: those that `chunk` captures. inputs: the trees `sequences`, `state` and
        `parameters`, to which the float arrays of the modules are added: everything of which the gradient is taken."""
        self.chunk, self.modules = chunk, modules
        self.T, self.K, self.order = sizes
        # floats: for each module its parameters that can have a gradient, as pairs (key, array).
        floats = [[(key, array) for key, array in flat(each.parameters()) if is_float(array)] for each in modules]
        self.keys = [[key for key, _ in each] for each in floats]
        self.inputs = inputs | {"modules": [[array for _, array in each] for each in floats]}
        # The tree of the results of `forward`, which is known when it has run: (outputs, last state, starts). starts:
        # for each chunk the state before it, and the state of MLX's random numbers, so that a step with dropout draws
        # the same ones in both passes. They are results, so MLX keeps them for the backward pass, also in a compiled
        # function, where they have no numbers yet.
        self.structure: Any = None

    def run(self, start: int, given: Any) -> tuple[Any, Any]:
        """Run the chunk of steps from `start` on. Return (its outputs, the state after it). given: a dict with the
        `piece` of the sequences, the `state` before the chunk, and the inputs `shared` by all chunks: the `parameters`
        of the user's function, and the float arrays of the `modules` that it captures."""
        # MLX takes gradients of arguments only. So the modules get arrays of `given`, an argument, during the chunk.
        pairs = [list(zip(*each, strict=True)) for each in zip(self.keys, given["shared"]["modules"], strict=True)]
        with replaced(self.modules, pairs):
            return self.chunk(start, given["piece"], given["state"], given["shared"]["parameters"])

    def forward(self, *values: mx.array) -> list[mx.array]:
        """Run all chunks. values: the leaves of `inputs`. Return the leaves of the results."""
        tree = filled(self.inputs, values)
        state, pieces, outputs, starts = tree["state"], in_pieces(tree["sequences"], self.T, self.K), {}, {}
        for start in self.order:
            starts[str(start)] = {"state": state, "random": random_state()[0]}
            # Make all inputs of this chunk wait for the state. Products of the input alone do not depend on the state,
            # so MLX could otherwise compute them for all chunks at once, which takes more memory.
            piece = waiting(pieces[start // self.K], state)
            outputs[start], state = self.run(start, {"piece": piece, "state": state, "shared": tree})
        whole = mapped(in_time, *(outputs[start] for start in sorted(outputs)))
        self.structure = (whole, state, starts)
        return leaves(self.structure)

    def backward(self, primals: Any, cotangents: Any, results: Any) -> list[mx.array]:
        """Run each chunk again, the last one first, and return the gradients of the leaves of `inputs`."""
        # whole: the outputs of all steps. shared: the inputs that all chunks read, whose gradients are added up.
        tree, (_, _, starts) = filled(self.inputs, primals), filled(self.structure, results)
        d_whole, d_state, d_starts = filled(self.structure, cotangents)
        pieces, d_outputs = in_pieces(tree["sequences"], self.T, self.K), in_pieces(d_whole, self.T, self.K)
        shared = {name: tree[name] for name in ("parameters", "modules")}
        d_pieces, d_shared = {}, mapped(mx.zeros_like, shared)
        for start in reversed(self.order):
            n = start // self.K
            begin = starts[str(start)]
            given = waiting({"piece": pieces[n], "state": begin["state"], "shared": shared}, d_state)
            # A second derivative must not follow the random numbers, which have no derivative.
            with random_numbers_from(mx.stop_gradient(begin["random"])):
                d = gradients(partial(self.run, start), given, (d_outputs[n], d_state))
            # The states at the starts are results of `forward`, so they have cotangents, too.
            d_state = mapped(added, d["state"], d_starts[str(start)]["state"])
            d_shared = mapped(added, d_shared, d["shared"])
            # The chunk that ran before this one is next in the backward pass. Let its gradients wait for all gradients
            # of this chunk. Otherwise MLX could recompute several chunks at the same time, which takes more memory.
            d_state = waiting(d_state, (d_shared, d["piece"]))
            d_pieces[start] = d["piece"]
        d_sequences = mapped(in_time, *(d_pieces[start] for start in sorted(d_pieces)))
        return leaves({"sequences": d_sequences, "state": d_state} | d_shared)


def gradients(function: Callable[[Any], Any], given: Any, cotangents: Any) -> Any:
    """Return the gradients of a function with respect to the arrays of its argument, the tree `given`; 0 for integers.
    cotangents: the gradients of the function's results, as a tree of the same structure."""
    arrays = leaves(given)
    # varied: the indices of the arrays of floats.
    varied = [n for n, array in enumerate(arrays) if is_float(array)]

    # The float results of the function as a function of the float arrays alone, as MLX differentiates it.
    def floats_of(*values: mx.array) -> list[mx.array]:
        whole = list(arrays)
        for n, value in zip(varied, values, strict=True):
            whole[n] = value
        return [array for array in leaves(function(filled(given, whole))) if is_float(array)]

    # vjp returns (results, gradients).
    found = vjp(floats_of, [arrays[n] for n in varied], [each for each in leaves(cotangents) if is_float(each)])[1]
    by_index = dict(zip(varied, found, strict=True))
    return filled(given, [by_index.get(n, mx.zeros_like(array)) for n, array in enumerate(arrays)])


def mapped(function: Callable[..., Any], *trees: Any) -> Any:
    """Apply a function to the corresponding arrays of trees that have the same structure. Return the tree of the
    results, in which None stays None."""
    return tree_map(lambda *each: None if each[0] is None else function(*each), *trees)


def in_time(*pieces: mx.array) -> mx.array:
    return mx.concatenate(list(pieces))


def is_float(array: mx.array) -> bool:
    """Return whether an array can have a gradient, because its dtype is floating or complex."""
    return mx.issubdtype(array.dtype, mx.inexact)


def added(one: mx.array, other: mx.array) -> mx.array:
    """Return the sum of two gradients of an array. For integers both are 0, so return one of them."""
    return one + other if is_float(one) else one


def flat(tree: Any) -> list[tuple[str, Any]]:
    """Return the leaves of a tree as pairs (key, leaf)."""
    found: Any = tree_flatten(tree)
    return found


def leaves(tree: Any) -> list[mx.array]:
    """Return a list of the arrays of a tree, without None."""
    return [array for _, array in flat(tree) if array is not None]


def filled(tree: Any, values: Any) -> Any:
    """Return a tree of the same structure with the arrays `values`, in the order in which `leaves` lists them."""
    following = iter(values)
    return tree_map(lambda leaf: None if leaf is None else next(following), tree)


def in_pieces(tree: Any, T: int, K: int) -> list[Any]:
    """Split all arrays [T, ...] of a tree into pieces of K steps. Return a list with one tree per piece."""
    bounds = list(range(K, T, K))
    # A split is used instead of array[start:stop], whose gradient is an array of all T steps for each piece.
    pieces = [split_apart(array, bounds) for array in leaves(tree)]
    # Not zip(*pieces): a tree of outputs may have no array, and still has one piece for each chunk.
    return [filled(tree, [piece[n] for piece in pieces]) for n in range(len(bounds) + 1)]


def waiting(tree: Any, before: Any) -> Any:
    """Return a tree with the same values. Operations that read them run only after MLX has computed the arrays of the
    tree `before`."""
    others = leaves(before)
    return filled(tree, mx.depends(leaves(tree), others)) if others else tree


@contextmanager
def replaced(modules: list[nn.Module], parameters: list[Any]) -> Iterator[None]:
    """Inside the context, replace parameters of the modules. parameters: for each module a list of (key, new array).
    Afterwards the modules have their own parameters again. So an array that the code inside assigns to a module, such
    as a running mean, would be lost: raise a ValueError that names it."""
    old = [dict(flat(module.parameters())) for module in modules]
    try:
        for module, new in zip(modules, parameters, strict=True):
            module.update(tree_unflatten(new))
        given = [dict(flat(module.parameters())) for module in modules]
        yield
        for module, arrays in zip(modules, given, strict=True):
            now = dict(flat(module.parameters()))
            for key in [key for key in now | arrays if now.get(key) is not arrays.get(key)]:
                refuse_change(f"{type(module).__name__}.{key}")
    finally:
        for module, before in zip(modules, old, strict=True):
            module.update(tree_unflatten(list(before.items())))


def captured_modules(step: Any) -> list[nn.Module]:
    """Return the modules that a function captures: the object of a method, variables of enclosing functions, global
    variables, defaults. Raise a ValueError that names an array of floats that it captures outside of a module."""
    captured = Captured(step)
    for path, array in captured.arrays:
        if path:  # an array without one belongs to a module or is computed by a property
            refuse_floats(array, path)
    # A module is left out if those before it have all its parameters. A module in an attribute with a private name, as
    # in `self._cell`, is one of its own: MLX does not count its parameters among those of the module that holds it.
    modules: list[nn.Module] = []
    covered: set[int] = set()  # the ids of the parameters of these modules
    for module in [inner for outer in captured.modules for inner in outer.modules()]:
        parameters = {id(array) for _, array in flat(module.parameters())}
        if not parameters <= covered:
            modules.append(module)
            covered |= parameters
    return modules


def refuse_lost(run: Callable[[Any], Any], tree: Any, modules: list[nn.Module]) -> None:
    """Raise an error if one step reads an array of floats that is neither in the tree of its arguments nor in a module:
    its gradient would be 0. A search of the step's code may miss it, so MLX lists what the step reads. Raise an error,
    too, if the step changes an array of a module, such as a running mean: the change would be lost, or made again by
    the gradient. If MLX cannot list the step's operations, nothing is raised. run: runs the step with such a tree."""
    # held: of each module all arrays, as pairs (key, array), also those that are no parameters. Arrays in a tuple, no
    # parameters for MLX, cannot be replaced, so a step with such a module is not checked.
    whole: Any = [tree_flatten(module, is_leaf=lambda value: isinstance(value, tuple)) for module in modules]
    held = [[(key, array) for key, array in each if isinstance(array, mx.array)] for each in whole]
    own = [array for each in held for _, array in each]
    in_tuples = leaves([value for each in whole for _, value in each if isinstance(value, tuple)])
    if any(isinstance(value, mx.array) for value in in_tuples):
        return

    # Put arrays into the modules.
    def put(values: Any) -> None:
        following = iter(values)
        for module, each in zip(modules, held, strict=True):
            module.update(tree_unflatten([(key, next(following)) for key, _ in each]))

    # Run the step with arrays in place of those of the tree and of the modules. Return the arrays of its results, and
    # then those that the modules hold afterwards.
    def work(*arrays: mx.array) -> list[mx.array]:
        put(arrays[len(arrays) - len(own) :])
        results = leaves(run(filled(tree, arrays)))
        for module, each in zip(modules, held, strict=True):
            now = dict(flat(module))
            after = [now.get(key) for key, _ in each]
            results += [array if isinstance(array, mx.array) else mx.zeros(()) for array in after]
        return results

    given = [mx.zeros(array.shape, array.dtype) for array in [*leaves(tree), *own]]  # the numbers do not matter
    try:
        # In an export arrays have no values, of which engines warn: hide these warnings here; the real run gives those
        # that matter. Draw from another key, so that this check takes no random numbers from the real run.
        with without_warnings(), random_numbers_from(mx.random.key(0)):
            # Both lists are alive at the same time, as `captured_arrays` needs them.
            content, again = exported(work, given), exported(work, given)
    except Exception:  # MLX cannot export the step; an error of the user's own code comes again in the real run
        return
    finally:
        put(own)
    # The arrays of the modules are the last inputs and outputs of the list. An array that the step has not changed has
    # the same key among both.
    names = [f"{type(module).__name__}.{key}" for module, each in zip(modules, held, strict=True) for key, _ in each]
    before, after = (
        [key for item in content if item["type"] == word for key, *_ in item[word]] for word in ("inputs", "outputs")
    )
    for n in range(-len(names), 0):
        if before[n] != after[n]:
            refuse_change(names[n])
    found = {key: array for item in content for key, array in item.get("constants", ())}
    captured = captured_arrays(content, again)
    for key in [key for key in found if key in captured]:
        refuse_floats(found[key], f"an array of shape {list(found[key].shape)}")


def random_state() -> list[mx.array]:
    """Return the list of one array in which MLX keeps the state of the random numbers of this thread. MLX gives out
    only an iterator over this list. `mx.random.seed` takes only a number, which the state in a compiled function is
    not."""
    state: Any = mx.random.state
    kept: Any = get_referents(iter(state))[0]
    return kept


@contextmanager
def random_numbers_from(key: mx.array) -> Iterator[None]:
    """Let MLX draw its random numbers from the state `key` inside the context, and then from its old state again."""
    state = random_state()
    before, state[0] = state[0], key
    try:
        yield
    finally:
        state[0] = before


def refuse_change(name: str) -> None:
    """Raise an error for an array of a module that the step changes. name: what the error text calls it."""
    fail(OP, "step must not assign arrays to a module with checkpoint_every: return them as outputs,", name)


def refuse_floats(array: mx.array, name: str) -> None:
    """Raise an error if an array that the user's function captures is of floats. name: what the error text calls it."""
    if is_float(array):
        rule = "step must not capture arrays of floats with checkpoint_every: pass them as parameters="
        fail(OP, f"{rule}, or hold them in a module,", name)
