"""A recurrence on an engine as MLX sees it: with the engine's backward pass as its gradient."""

from __future__ import annotations

import mlx.core as mx

from .choice import METAL_ENGINES
from .metal import fused, stepwise
from .numpy import sweep as numpy
from .ops import sweep as ops
from .problem import Problem
from .tracing import is_traced, vmap_one_by_one

ENGINE_MODULES = {
    "fused": fused,
    "stepwise": stepwise,
    "numpy": numpy,
    "ops": ops,
}


def run(problem: Problem, arrays: dict[str, mx.array], engine: str, plain: bool) -> dict[str, mx.array | None]:
    """The cell's outputs by name, with our gradient unless the graph shall stay plain; gates None if not wanted."""
    dtype = arrays["x"].dtype
    arrays = for_engine(engine, arrays)
    outputs = ENGINE_MODULES[engine].forward(problem, arrays) if plain else differentiable(problem, arrays, engine)
    if not problem.return_gates:
        outputs["gates"] = None
    return {name: output if output is None else output.astype(dtype) for name, output in outputs.items()}


def run_backward(
    problem: Problem,
    arrays: dict[str, mx.array],
    saved: dict[str, mx.array],
    cotangents: dict[str, mx.array],
    engine: str,
) -> dict[str, mx.array]:
    """The gradient of every array, from the outputs a forward pass gave and the cotangents of some of them."""
    dtype = arrays["x"].dtype
    arrays, saved, cotangents = (for_engine(engine, values) for values in (arrays, saved, cotangents))
    if engine in METAL_ENGINES:  # they keep c in float32, and so have its gradient
        saved, cotangents = (
            {name: value.astype(mx.float32) if name in ("c", "cT") else value for name, value in values.items()}
            for values in (saved, cotangents)
        )
    backward = first_order(engine, problem, tuple(arrays), {})
    gradients = backward(tuple(arrays.values()), cotangents, saved)
    return {name: gradient.astype(dtype) for name, gradient in gradients.items() if name in arrays}


def for_engine(engine: str, arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """The arrays in the dtype an engine computes in: 16 bits reach the Metal shaders, which widen them themselves."""
    if engine in METAL_ENGINES:
        return arrays
    wide = {mx.float16: mx.float32, mx.bfloat16: mx.float32}
    return {name: array.astype(wide.get(array.dtype, array.dtype)) for name, array in arrays.items()}


def differentiable(problem: Problem, arrays: dict[str, mx.array], engine: str) -> dict[str, mx.array]:
    """The engine's outputs, with its backward pass as their gradient."""
    module, names = ENGINE_MODULES[engine], tuple(arrays)
    # MLX differentiates the ops engine's backward pass again, so all it reads must be outputs. The numpy engine keeps
    # what the caller does not want where MLX never sees it; without training the shaders do not write it.
    hides = engine == "numpy" or (engine in METAL_ENGINES and not problem.training)
    hidden = {"gates"} if hides and not problem.return_gates else set()
    shown = [name for name in problem.cell.outputs if name not in hidden]
    # A custom function has to get every array that mx.vmap may map.
    lengths = () if problem.lengths is None else (problem.lengths,)
    kept = {}
    used: set[str] | None = set()

    def parts(values: tuple[mx.array, ...]) -> tuple[Problem, tuple[mx.array, ...]]:
        return (problem._replace(lengths=values[-1]), values[:-1]) if lengths else (problem, values)

    @mx.custom_function
    def forward(*values: mx.array) -> tuple[mx.array, ...]:
        its_problem, values = parts(values)
        outputs = module.forward(its_problem, dict(zip(names, values, strict=True)))
        kept.update((name, outputs.get(name)) for name in hidden)
        return tuple(outputs[name] for name in shown)

    @forward.vjp
    def backward(primals, cotangents, outputs):
        # MLX hands zeros for outputs the loss does not use; they are neither computed nor added. In a second
        # derivative gradients also arrive past the taps, through what this function itself read: then all count.
        nonlocal used
        present = {name: d for name, d in zip(shown, cotangents, strict=True) if used is None or name in used}
        used = None
        saved = dict(zip(shown, outputs, strict=True))
        its_problem, values = parts(primals)
        gradients = first_order(engine, its_problem, names, kept)(values, present, saved)
        return *(gradients[name] for name in names), *map(mx.zeros_like, lengths)

    if module is not ops:

        @forward.jvp
        def jvp(primals, tangents):
            raise RuntimeError(
                f"[{problem.cell.op}] engine={engine!r} has no forward-mode derivative: use engine='ops'."
            )

    def count_all() -> None:  # under mx.vmap the taps are lost
        nonlocal used
        used = None

    if engine in METAL_ENGINES:
        vmap_one_by_one(forward, count_all)
    outputs = zip(shown, forward(*arrays.values(), *lengths), strict=True)
    return {name: tap(value, used, name) for name, value in outputs}


def tap(value: mx.array, used: set[str], name: str) -> mx.array:
    """`value`, noting in `used` when a gradient comes back through it."""

    @mx.custom_function
    def identity(value: mx.array) -> mx.array:
        return value

    @identity.vjp
    def note(primal, cotangent, output):
        used.add(name)
        return cotangent

    return identity(value)


def in_mlx(problem: Problem, arrays: dict[str, mx.array], saved: dict) -> dict[str, mx.array]:
    """What the numpy engine saved, as the ops engine reads it. Gates that nobody kept are computed again; the gradient
    of a plain cell does without."""
    saved = {name: array for name, array in saved.items() if array is not None}
    if "gates" not in saved and problem.cell.op != "rnn":
        return ops.forward(problem, arrays)
    return {name: array if isinstance(array, mx.array) else mx.array(array) for name, array in saved.items()}


def first_order(engine: str, problem: Problem, names: tuple[str, ...], kept: dict):
    """The engine's backward pass; for an engine whose results MLX cannot differentiate, one that says so."""
    module = ENGINE_MODULES[engine]

    def backward(primals, cotangents, saved):
        arrays, saved = dict(zip(names, primals, strict=True)), saved | kept
        if engine == "numpy" and is_traced([*primals, *cotangents.values()], wait=True):
            return ops.backward(problem, arrays, in_mlx(problem, arrays, saved), cotangents)
        return module.backward(problem, arrays, saved, cotangents)

    if module is ops:
        return backward
    backward = mx.custom_function(backward)
    if engine in METAL_ENGINES:
        vmap_one_by_one(backward)

    @backward.vjp
    def second_order(primals, cotangents, outputs):
        raise RuntimeError(f"[{problem.cell.op}] engine={engine!r} has no second derivative: use engine='ops'.")

    return backward
