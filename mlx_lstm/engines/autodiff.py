"""A recurrence on an engine as MLX sees it: with the engine's backward pass as its gradient."""

from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

import mlx.core as mx

from .choice import METAL_ENGINES
from .chunks import SEQUENCES, Chunked, Chunks, evaluates
from .metal import fused, stepwise
from .numpy import sweep as numpy
from .numpy.sweep import Saved
from .ops import sweep as ops
from .ops.packed import dequantized
from .packing import packed_names
from .problem import Arrays, Problem
from .tracing import custom_function, have_values, one_by_one

HALVES = (mx.float16, mx.bfloat16)
"""Dtypes of arrays that engines compute with in float32."""

ENGINE_MODULES = {"fused": fused, "stepwise": stepwise, "numpy": numpy, "ops": ops}


def run(problem: Problem, arrays: Arrays, engine: str) -> dict[str, Any]:
    """Return the cell's outputs by name, with our gradient unless the graph shall stay plain; gates None if not wanted.
    x and the sequences are [B, T, .] with `batch_first`. x [B, I] is a single step."""
    dtype, chunked, plain, batch_first = problem.dtype, None, problem.plain, problem.batch_first
    if arrays["x"].ndim == 2 and not (plain and engine == "numpy"):
        arrays = arrays | {"x": arrays["x"][None]}
    if problem.chunks is not None:
        chunked = in_chunks(problem.chunks, problem, arrays, engine)
    if chunked is None and dtype in HALVES:
        arrays = for_engine(engine, arrays)
    if plain and engine == "numpy":  # which makes sequences of either order without an operation of MLX
        outputs: dict[str, Any] = numpy.forward(problem, arrays, batch_first, problem.wants_last)
    else:
        if batch_first:
            arrays = arrays | {"x": mx.swapaxes(arrays["x"], 0, 1)}
        shown = shown_of(problem)
        if plain:
            outputs = (chunked or ENGINE_MODULES[engine]).forward(problem, arrays)
        else:
            outputs = differentiable(problem, arrays, engine, shown, chunked)
        outputs = {name: outputs[name] for name in shown}
        if batch_first:
            outputs |= {name: mx.swapaxes(outputs[name], 0, 1) for name in ("h", "c", "gates") if name in outputs}
    if not problem.return_gates:
        outputs["gates"] = None
    if dtype not in HALVES:
        return outputs
    return {name: output if output is None else output.astype(dtype) for name, output in outputs.items()}


def in_chunks(chunks: Chunks, problem: Problem, arrays: Arrays, engine: str) -> Chunked | None:
    """The engine, cut so; None where it would be of no use: cutting does not bound a graph without values, and without
    a gradient nothing is kept."""
    plain, one_at_a_time = problem.plain, evaluates(engine, problem, list(arrays.values()))
    if (plain and engine == "numpy") or not (one_at_a_time or (chunks.recomputes and not plain)):
        return None
    module, chunks = ENGINE_MODULES[engine], chunks._replace(recomputes=chunks.recomputes or not problem.training)
    return Chunked(chunks, engine, module, for_engine, batch_first=problem.batch_first, evaluates=one_at_a_time)


def shown_of(problem: Problem) -> tuple[str, ...]:
    """The outputs a caller gets."""
    return without(
        problem.cell.outputs, ("hT", "cT") * (not problem.wants_last) + ("gates",) * (not problem.return_gates)
    )


@cache
def without(names: tuple[str, ...], hidden: tuple[str, ...]) -> tuple[str, ...]:
    """The names that are not hidden."""
    return tuple(name for name in names if name not in hidden)


def run_backward(problem: Problem, arrays: Arrays, saved: Arrays, cotangents: Arrays, engine: str) -> Arrays:
    """The gradient of every array that is not packed, from the outputs a forward pass gave and the cotangents of some
    of them."""
    dtype = arrays["x"].dtype
    arrays, saved, cotangents = (for_engine(engine, values) for values in (arrays, saved, cotangents))
    backward, wanted = (
        first_order(engine, problem, tuple(arrays), {}),
        arrays.keys() - {*packed_names(arrays), "lengths"},
    )
    gradients = backward(tuple(arrays.values()), cotangents, saved)
    return {name: gradient.astype(dtype) for name, gradient in gradients.items() if name in wanted}


def for_engine(engine: str, arrays: Arrays) -> Arrays:
    """The arrays in the dtype an engine computes in: 16 bits reach the Metal shaders, which widen them themselves."""
    if engine in METAL_ENGINES:  # they keep c in float32, and so have its gradient
        return {name: array.astype(mx.float32) if name in ("c", "cT") else array for name, array in arrays.items()}
    packed = packed_names(arrays)  # these stay as they are
    return {
        name: array.astype(mx.float32) if array.dtype in HALVES and name not in packed else array
        for name, array in arrays.items()
    }


def differentiable(
    problem: Problem, arrays: Arrays, engine: str, shown: tuple[str, ...], chunked: Chunked | None
) -> dict[str, mx.array]:
    """The engine's outputs, with its backward pass as their gradient; `shown`: those that a caller gets."""
    arrays = without_gradient(problem, arrays)
    tape = Tape(problem, tuple(arrays), engine, chunked)
    # A custom function has to get every array that mx.vmap may map.
    found = tape.function()(*arrays.values())
    outputs = dict(zip(tape.shown, found, strict=True))
    if problem.training or tape.cut_off:
        for names in tapped(shown):
            outputs |= zip(names, tape.tap(names, [outputs[name] for name in names]), strict=True)
    return outputs


def without_gradient(problem: Problem, arrays: Arrays) -> Arrays:
    """The arrays, of which the packed ones raise an error where their gradient is asked for."""
    if problem.packing is None:
        return arrays
    names = packed_names(arrays)

    def refuse(primals: object, cotangents: object, outputs: object) -> NoReturn:
        raise RuntimeError(
            f"[{problem.cell.op}] quantized weights have no gradient: freeze them, as layer.freeze() does, or "
            "differentiate with respect to other arrays."
        )

    identity = custom_function(all_of)
    identity.vjp(refuse)
    return arrays | dict(zip(names, identity(*(arrays[name] for name in names)), strict=True))


@cache
def tapped(shown: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The outputs shown, those together that share a tap, which costs the host as much as two launches: the last states
    are small."""
    groups = [tuple(name for name in group if name in shown) for group in (("h",), ("c",), ("gates",), ("hT", "cT"))]
    return [group for group in groups if group]


def all_of(*values: mx.array) -> tuple[mx.array, ...]:
    """Themselves."""
    return values


class Tape:
    """One run of an engine and its gradient, as `mx.custom_function` wants them: functions of arrays in their order.

    shown: the outputs MLX sees. kept: what is saved where MLX never sees it. used: the outputs that have a gradient, as
    far as taps can tell; None where all count. MLX hands zeros for the others, which are neither computed nor added.

    Where the chunks of a sequence are evaluated, the run is `cut_off` from MLX's graph. MLX would keep all its outputs
    as long as it keeps one of them, so it sees zeros without memory in place of sequences; these are `held` until taps
    show them, and each lives as long as the caller has it.
    """

    def __init__(self, problem: Problem, names: tuple[str, ...], engine: str, chunked: Chunked | None = None):
        self.problem: Problem = problem
        self.names: tuple[str, ...] = names
        self.engine: str = engine
        self.chunked: Chunked | None = chunked
        self.cut_off: bool = chunked is not None and chunked.evaluates
        # MLX differentiates the ops engine's backward pass again, so all it reads must be outputs. The numpy engine
        # keeps what the caller does not want to itself; without training the shaders do not write it.
        hides = chunked or engine == "numpy" or (engine in METAL_ENGINES and not problem.training)
        self.shown: list[str] = [n for n in problem.cell.outputs if n != "gates" or not hides or problem.return_gates]
        self.keeps: list[str] = ["gates"] if hides and not problem.return_gates else []
        if chunked:
            self.keeps = chunked.kept(problem)
            if not self.cut_off:
                self.shown, self.keeps = self.shown + self.keeps, []
        self.kept: Saved = {}
        self.held: Arrays = {}
        self.dtypes: list[mx.Dtype] = []
        self.used: set[str] | None = set() if problem.training else None

    def function(self) -> Callable[..., tuple[mx.array, ...]]:
        """`forward`, as MLX transforms it. Nothing here refers to it, so that it goes without the garbage collector."""
        function = custom_function(self.forward)
        function.vjp(self.backward)
        if self.engine != "ops":
            function.jvp(self.refuse)
        elif self.cut_off:
            function.jvp(self.along)
        if self.engine in METAL_ENGINES:
            function.vmap(self.one_by_one)
        return function

    def forward(self, *values: mx.array) -> tuple[mx.array, ...]:
        """The outputs MLX sees."""
        module = self.chunked or ENGINE_MODULES[self.engine]
        outputs = module.forward(self.problem, dict(zip(self.names, values, strict=True)))
        if self.keeps:
            self.kept |= {name: outputs.get(name) for name in self.keeps}
        if self.cut_off:
            self.held |= {name: outputs[name] for name in SEQUENCES if name in self.shown}
            outputs |= {name: mx.broadcast_to(mx.array(0, a.dtype), a.shape) for name, a in self.held.items()}
            self.dtypes = [outputs[name].dtype for name in self.shown]
        return tuple(outputs[name] for name in self.shown)

    def backward(
        self, primals: tuple[mx.array, ...], cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]
    ) -> tuple[mx.array, ...]:
        """The gradients of all arrays; zeros for lengths."""
        named = zip(self.shown, cotangents, strict=True)
        present = {name: d for name, d in named if self.used is None or name in self.used}
        self.count_all()  # in a second derivative gradients arrive past the taps too, through what was read here
        saved = dict(zip(self.shown, outputs, strict=True))
        gradients = first_order(self.engine, self.problem, self.names, self.kept, self.chunked)(primals, present, saved)
        arrays = dict(zip(self.names, primals, strict=True))
        # Quantized weights have no gradient, and nobody can have asked for one.
        gradients |= {name: arrays[name] for name in packed_names(arrays)}
        if "lengths" in arrays:
            gradients["lengths"] = mx.zeros_like(arrays["lengths"])
        return tuple([gradients[name] for name in arrays])

    def refuse(self, primals: object, tangents: object) -> NoReturn:
        """What forward mode gets."""
        op, engine = self.problem.cell.op, self.engine
        raise RuntimeError(f"[{op}] engine={engine!r} has no forward-mode derivative: use engine='ops'.")

    def along(self, primals: tuple[mx.array, ...], tangents: tuple[mx.array | None, ...]) -> tuple[mx.array, ...]:
        """The tangents of the outputs of `ops` where these are cut off from MLX's graph: those of its plain graph."""

        def outputs(*values: mx.array) -> list[mx.array]:
            found = ops.forward(self.problem, for_engine("ops", dict(zip(self.names, values, strict=True))))
            return [found[name].astype(dtype) for name, dtype in zip(self.shown, self.dtypes, strict=True)]

        return tuple(along(outputs, primals, tangents))

    def one_by_one(self, inputs: object, axes: object) -> tuple[object, object]:
        """What `mx.vmap` gets, under which the taps are lost."""
        self.count_all()
        return one_by_one(self.function(), inputs, axes)

    def count_all(self) -> None:
        """From now on every output counts as used."""
        self.used = None

    def tap(self, names: tuple[str, ...], values: list[mx.array]) -> tuple[mx.array, ...]:
        """`values`, noting when a gradient comes back through one of them."""

        def note(primals: object, cotangents: tuple[mx.array, ...], outputs: object) -> tuple[mx.array, ...]:
            if self.used is not None:
                self.used.update(names)
            return cotangents

        held = {name: self.held.pop(name) for name in names if name in self.held} if self.held else None
        if held:
            shows = [held.get(name, value) for name, value in zip(names, values, strict=True)]
            identity = custom_function(lambda *given: tuple(shows))
            identity.jvp(lambda given, tangents: tangents)
        else:
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


def first_order(
    engine: str, problem: Problem, names: tuple[str, ...], kept: Saved, chunked: Chunked | None = None
) -> Callable[..., Arrays]:
    """The engine's backward pass, of arrays in their order, cotangents and what was saved besides `kept`; for an engine
    whose results MLX cannot differentiate, one that says so."""

    def backward(primals: tuple[mx.array, ...], cotangents: Arrays, shown: Arrays) -> Arrays:
        arrays: Arrays = dict(zip(names, primals, strict=True))
        saved: Any = shown | kept
        module = chunked or ENGINE_MODULES[engine]
        if engine == "numpy" and have_values([*primals, *cotangents.values()]):
            return module.backward(problem, arrays, saved, cotangents)
        floats = dequantized(problem.packing, arrays)
        if engine == "numpy":
            floats, cotangents = for_engine(engine, floats), for_engine(engine, cotangents)
            module, saved = ops, ops.forward(problem, floats) if chunked else in_mlx(problem, floats, saved)
        return module.backward(problem, floats, saved, cotangents)

    if engine == "ops":
        return through_ops(problem, names, chunked, kept) if chunked and chunked.evaluates else backward
    function = custom_function(backward)
    if engine in METAL_ENGINES:
        function.vmap(lambda inputs, axes: one_by_one(first_order(engine, problem, names, kept, chunked), inputs, axes))

    @function.vjp
    def second_order(primals: object, cotangents: object, outputs: object) -> NoReturn:
        raise RuntimeError(f"[{problem.cell.op}] engine={engine!r} has no second derivative: use engine='ops'.")

    return function


def through_ops(problem: Problem, names: tuple[str, ...], chunked: Chunked, kept: Saved) -> Callable[..., Arrays]:
    """The backward pass of `chunked`, whose results are cut off from MLX's graph: with the derivatives of the plain
    graph."""

    def backward(primals: tuple[mx.array, ...], cotangents: Arrays, shown: Arrays) -> Arrays:
        arrays = dequantized(problem.packing, dict(zip(names, primals, strict=True)))
        # Lengths are no floats, so that MLX derives nothing by them.
        lengths = {"lengths": arrays.pop("lengths")} if "lengths" in arrays else {}

        def parts(values: tuple[mx.array, ...]) -> tuple[Arrays, Arrays]:
            """The arrays and the cotangents."""
            rest = values[len(arrays) :]
            return dict(zip(arrays, values, strict=False)) | lengths, dict(zip(cotangents, rest, strict=True))

        def run(*values: mx.array) -> tuple[mx.array, ...]:
            given, d = parts(values)
            found = chunked.backward(problem, given, shown | kept, d)
            return tuple(found[name] for name in arrays)

        def plain(*values: mx.array) -> list[mx.array]:
            given, d = parts(values)
            wide = for_engine("ops", given)
            found = ops.backward(problem, wide, ops.forward(problem, wide), for_engine("ops", d))
            return [found[name].astype(given[name].dtype) for name in arrays]

        function = custom_function(run)
        function.vjp(lambda values, d, _: tuple(mx.vjp(plain, list(values), list(d))[1]))
        function.jvp(lambda values, tangents: tuple(along(plain, values, tangents)))
        return dict(zip(arrays, function(*arrays.values(), *cotangents.values()), strict=True))

    return backward


def along(
    function: Callable[..., list[mx.array]], values: tuple[mx.array, ...], tangents: tuple[mx.array | None, ...]
) -> list[mx.array]:
    """The tangents of a function's results, given those of the values that have one."""
    moved = {n: tangent for n, tangent in enumerate(tangents) if tangent is not None}

    def of_moved(*changed: mx.array) -> list[mx.array]:
        return function(*(dict(enumerate(values)) | dict(zip(moved, changed, strict=True))).values())

    return mx.jvp(of_moved, [values[n] for n in moved], list(moved.values()))[1]
