"""A recurrence on an engine as MLX sees it: with the engine's backward pass as its gradient."""

from collections.abc import Callable
from typing import Any, NoReturn

import mlx.core as mx

from .choice import METAL_ENGINES
from .metal import fused, stepwise
from .numpy import sweep as numpy
from .numpy.sweep import Saved
from .ops import sweep as ops
from .ops.packed import dequantized
from .packing import packed_names
from .problem import Arrays, Problem
from .tracing import custom_function, have_values, one_by_one

ENGINE_MODULES = {"fused": fused, "stepwise": stepwise, "numpy": numpy, "ops": ops}


def run(
    problem: Problem, arrays: Arrays, engine: str, *, plain: bool, batch_first: bool, wants_last: bool
) -> dict[str, Any]:
    """The cell's outputs by name, with our gradient unless the graph shall stay plain; gates None if not wanted. With
    `batch_first` x and all sequences have the batch first; `wants_last`: with hT and cT."""
    dtype, arrays = arrays["x"].dtype, for_engine(engine, arrays)
    if plain and engine == "numpy":  # which makes sequences of either order without an operation of MLX
        outputs: dict[str, Any] = numpy.forward(problem, arrays, batch_first, wants_last)
    else:
        if batch_first:
            arrays["x"] = mx.swapaxes(arrays["x"], 0, 1)
        shown = shown_of(problem, wants_last)
        if plain:
            outputs = ENGINE_MODULES[engine].forward(problem, arrays)
        else:
            outputs = differentiable(problem, arrays, engine, shown)
        outputs = {name: outputs[name] for name in shown}
        if batch_first:
            outputs |= {name: mx.swapaxes(outputs[name], 0, 1) for name in ("h", "c", "gates") if name in outputs}
    if not problem.return_gates:
        outputs["gates"] = None
    return {name: output if output is None else output.astype(dtype) for name, output in outputs.items()}


def shown_of(problem: Problem, wants_last: bool) -> list[str]:
    """The outputs a caller gets."""
    hidden = (() if wants_last else ("hT", "cT")) + (() if problem.return_gates else ("gates",))
    return [name for name in problem.cell.outputs if name not in hidden]


def run_backward(problem: Problem, arrays: Arrays, saved: Arrays, cotangents: Arrays, engine: str) -> Arrays:
    """The gradient of every array that is not packed, from the outputs a forward pass gave and the cotangents of some
    of them."""
    dtype = arrays["x"].dtype
    arrays, saved, cotangents = (for_engine(engine, values) for values in (arrays, saved, cotangents))
    backward, wanted = first_order(engine, problem, tuple(arrays), {}), arrays.keys() - packed_names(arrays)
    gradients = backward(tuple(arrays.values()), cotangents, saved)
    return {name: gradient.astype(dtype) for name, gradient in gradients.items() if name in wanted}


def for_engine(engine: str, arrays: Arrays) -> Arrays:
    """The arrays in the dtype an engine computes in: 16 bits reach the Metal shaders, which widen them themselves."""
    if engine in METAL_ENGINES:  # they keep c in float32, and so have its gradient
        return {name: array.astype(mx.float32) if name in ("c", "cT") else array for name, array in arrays.items()}
    wide, packed = {mx.float16: mx.float32, mx.bfloat16: mx.float32}, packed_names(arrays)  # these stay as they are
    return {
        name: array if name in packed else array.astype(wide.get(array.dtype, array.dtype))
        for name, array in arrays.items()
    }


def differentiable(problem: Problem, arrays: Arrays, engine: str, shown: list[str]) -> dict[str, mx.array]:
    """The engine's outputs, with its backward pass as their gradient; `shown`: those that a caller gets."""
    arrays = without_gradient(problem, arrays)
    tape = Tape(problem, tuple(arrays), engine)
    # A custom function has to get every array that mx.vmap may map.
    found = tape.function()(*arrays.values(), *([] if problem.lengths is None else [problem.lengths]))
    outputs = dict(zip(tape.shown, found, strict=True))
    if problem.training:
        for names in TAPPED:
            if present := [name for name in names if name in shown]:
                outputs |= zip(present, tape.tap(present, [outputs[name] for name in present]), strict=True)
    return outputs


def without_gradient(problem: Problem, arrays: Arrays) -> Arrays:
    """The arrays, of which the packed ones raise an error where their gradient is asked for."""
    names = packed_names(arrays)
    if not names:
        return arrays

    def refuse(primals: object, cotangents: object, outputs: object) -> NoReturn:
        raise RuntimeError(
            f"[{problem.cell.op}] quantized weights have no gradient: freeze them, as layer.freeze() does, or "
            "differentiate with respect to other arrays."
        )

    identity = custom_function(all_of)
    identity.vjp(refuse)
    return arrays | dict(zip(names, identity(*(arrays[name] for name in names)), strict=True))


TAPPED = (("h",), ("c",), ("gates",), ("hT", "cT"))
"""Outputs that share a tap, which costs the host as much as two launches: the last states are small."""


def all_of(*values: mx.array) -> tuple[mx.array, ...]:
    """Themselves."""
    return values


class Tape:
    """One run of an engine and its gradient, as `mx.custom_function` wants them: functions of arrays in their order.

    shown: the outputs MLX sees. kept: those the numpy engine saves where MLX never sees them. used: the outputs that
    have a gradient, as far as taps can tell; None where all count. MLX hands zeros for the others, which are neither
    computed nor added.
    """

    def __init__(self, problem: Problem, names: tuple[str, ...], engine: str):
        self.problem: Problem = problem
        self.names: tuple[str, ...] = names
        self.engine: str = engine
        # MLX differentiates the ops engine's backward pass again, so all it reads must be outputs. The numpy engine
        # keeps what the caller does not want to itself; without training the shaders do not write it.
        hides = engine == "numpy" or (engine in METAL_ENGINES and not problem.training)
        self.hidden: set[str] = {"gates"} if hides and not problem.return_gates else set()
        self.shown: list[str] = [name for name in problem.cell.outputs if name not in self.hidden]
        self.kept: Saved = {}
        self.used: set[str] | None = set() if problem.training else None

    def parts(self, values: tuple[mx.array, ...]) -> tuple[Problem, tuple[mx.array, ...]]:
        """The problem with its lengths, which come last, and the arrays."""
        ragged = self.problem.lengths is not None
        return (self.problem._replace(lengths=values[-1]), values[:-1]) if ragged else (self.problem, values)

    def function(self) -> Callable[..., tuple[mx.array, ...]]:
        """`forward`, as MLX transforms it. Nothing here refers to it, so that it goes without the garbage collector."""
        function = custom_function(self.forward)
        function.vjp(self.backward)
        if self.engine != "ops":
            function.jvp(self.refuse)
        if self.engine in METAL_ENGINES:
            function.vmap(self.one_by_one)
        return function

    def forward(self, *values: mx.array) -> tuple[mx.array, ...]:
        """The outputs MLX sees."""
        problem, values = self.parts(values)
        outputs = ENGINE_MODULES[self.engine].forward(problem, dict(zip(self.names, values, strict=True)))
        self.kept |= {name: outputs.get(name) for name in self.hidden}
        return tuple(outputs[name] for name in self.shown)

    def backward(
        self, primals: tuple[mx.array, ...], cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]
    ) -> tuple[mx.array, ...]:
        """The gradients of all arrays; zeros for lengths."""
        named = zip(self.shown, cotangents, strict=True)
        present = {name: d for name, d in named if self.used is None or name in self.used}
        self.count_all()  # in a second derivative gradients arrive past the taps too, through what was read here
        problem, values = self.parts(primals)
        saved = dict(zip(self.shown, outputs, strict=True))
        gradients = first_order(self.engine, problem, self.names, self.kept)(values, present, saved)
        # Packed weights have none, and nobody can have asked for it.
        packed, given = packed_names(dict(zip(self.names, values, strict=True))), zip(self.names, values, strict=True)
        found = [array if name in packed else gradients[name] for name, array in given]
        return *found, *map(mx.zeros_like, primals[len(values) :])

    def refuse(self, primals: object, tangents: object) -> NoReturn:
        """What forward mode gets."""
        op, engine = self.problem.cell.op, self.engine
        raise RuntimeError(f"[{op}] engine={engine!r} has no forward-mode derivative: use engine='ops'.")

    def one_by_one(self, inputs: object, axes: object) -> tuple[object, object]:
        """What `mx.vmap` gets, under which the taps are lost."""
        self.count_all()
        return one_by_one(self.function(), inputs, axes)

    def count_all(self) -> None:
        """From now on every output counts as used."""
        self.used = None

    def tap(self, names: list[str], values: list[mx.array]) -> tuple[mx.array, ...]:
        """`values`, noting when a gradient comes back through one of them."""

        def note(primals: object, cotangents: tuple[mx.array, ...], outputs: object) -> tuple[mx.array, ...]:
            if self.used is not None:
                self.used.update(names)
            return cotangents

        identity = custom_function(all_of)
        identity.vjp(note)
        return identity(*values)


def in_mlx(problem: Problem, arrays: Arrays, saved: Saved) -> Arrays:
    """What the numpy engine saved, as the ops engine reads it. Gates that nobody kept are computed again; the gradient
    of a plain cell does without."""
    if saved.get("gates") is None and problem.cell.op != "rnn":
        return ops.forward(problem, arrays)
    given = {name: array for name, array in saved.items() if array is not None}
    return {name: array if isinstance(array, mx.array) else mx.array(array) for name, array in given.items()}


def first_order(engine: str, problem: Problem, names: tuple[str, ...], kept: Saved) -> Callable[..., Arrays]:
    """The engine's backward pass, of arrays in their order, cotangents and what was saved besides `kept`; for an engine
    whose results MLX cannot differentiate, one that says so."""

    def backward(primals: tuple[mx.array, ...], cotangents: Arrays, shown: Arrays) -> Arrays:
        arrays, saved, module = dict(zip(names, primals, strict=True)), shown | kept, ENGINE_MODULES[engine]
        if engine == "numpy" and have_values([*primals, *cotangents.values()]):
            return module.backward(problem, arrays, saved, cotangents)
        floats = dequantized(problem.packing, arrays)
        if engine == "numpy":
            module, saved = ops, in_mlx(problem, floats, saved)
        return module.backward(problem, floats, saved, cotangents)

    if engine == "ops":
        return backward
    function = custom_function(backward)
    if engine in METAL_ENGINES:
        function.vmap(lambda inputs, axes: one_by_one(first_order(engine, problem, names, kept), inputs, axes))

    @function.vjp
    def second_order(primals: object, cotangents: object, outputs: object) -> NoReturn:
        raise RuntimeError(f"[{problem.cell.op}] engine={engine!r} has no second derivative: use engine='ops'.")

    return function
