"""Find out whether MLX is transforming a function, and evaluate arrays during a transformation without losing their
graphs.

MLX's transformations (grad, vjp, jvp, vmap, checkpoint, compile, export) run a function on tracers: marked arrays,
whose graph MLX reads afterwards. Tracers of grad, vjp and jvp have values. Tracers of vmap, compile and an export are
placeholders without values.

A custom function is a function with rules of its own for derivatives: MLX calls its vjp rule with (primals, cotangents,
outputs) to get a gradient. Primals are the arguments, cotangents the gradients of the outputs. Some functions below use
a vjp rule only to learn something: that MLX called it, so that it needs a gradient, and when.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import local
from typing import Any

import mlx.core as mx

custom_function: Callable[[Callable[..., Any]], Any] = mx.custom_function
"""`mx.custom_function` with a declared type, because MLX's type stubs do not tell the type of its result."""


def vjp(
    function: Callable[..., Sequence[mx.array]], primals: Sequence[mx.array], cotangents: Sequence[mx.array]
) -> tuple[list[mx.array], list[mx.array]]:
    """Return (outputs, gradients) of a function like `mx.vjp`, but correctly also for outputs that share an array,
    where `mx.vjp` is wrong (see `distinct`). The package calls this function wherever MLX derives a gradient."""
    return mx.vjp(lambda *values: distinct(function(*values)), list(primals), list(cotangents))


def distinct(outputs: Sequence[mx.array]) -> list[mx.array]:
    """Return the outputs of a function, each multiplied by 1, so that no two of them are the same array.

    `mx.vjp` is wrong otherwise, in two cases. If two outputs are the same array, or views of it that MLX makes without
    an operation, `mx.vjp` reads only the cotangent of the first one. If an output is the result of mx.stop_gradient,
    `mx.vjp` passes the cotangent of this output to the next one. A product with 1 is exact, and MLX can export it.
    Integers and bools stay as they are, because they have no cotangent.
    """
    return [output * 1 if mx.issubdtype(output.dtype, mx.inexact) else output for output in outputs]


def split_apart(array: mx.array, parts: int | list[int], axis: int = 0) -> list[mx.array]:
    """Return what `mx.split` returns, also if a compiled function splits the same array several times.

    MLX 0.32.4 cannot compile two equal splits of an array that an elementwise operation computed: it raises the
    IndexError "_Map_base::at". Here they split a view of the array.
    """
    return list(mx.split(view_of(array), parts, axis))


def view_of(array: mx.array) -> mx.array:
    """Return a view of the array. In `mx.compile` no elementwise operation has computed the view, and operations that
    read it are not merged with equal operations that read the array."""
    return array[None].squeeze(0)


class Leaving(Exception):
    """Exception that `stale_placeholder` raises inside mx.vmap, to end it before MLX removes the tracer mark of its
    placeholder."""


def stale_placeholder() -> mx.array:
    """Return a placeholder (an array without a value) of an `mx.vmap` that an exception has ended. Because of the
    exception MLX never removed the mark that makes this array a tracer.

    MLX still treats the array as a tracer, but only while some transformation runs in the current thread. So
    `is_transforming` finds out by this array whether a transformation runs.
    """
    leaked: list[mx.array] = []

    def leave(placeholder: mx.array) -> mx.array:
        leaked.append(placeholder)
        raise Leaving

    with suppress(Leaving):
        mx.vmap(leave)(mx.zeros(1))
    return leaked[0]


PLACEHOLDER = stale_placeholder()
"""An array that MLX treats as a tracer while a transformation runs in this thread, and only then."""

ZERO = mx.array(0.0)
"""An array with a value, which is never marked as a tracer."""


class Probe(local):
    """A compiled function of each thread, and how often Python has run it. If calling it with an array makes Python run
    it again, this array is a tracer (see `is_transforming`).

    A compiled function leaves Python objects in a cache of the thread that called it. MLX frees this cache when the
    thread has ended, and the process aborts if Python is shutting down at that moment. As an attribute of a
    `threading.local` the function is freed while its thread still runs Python, and its objects in the cache are freed
    with it.
    """

    def __init__(self) -> None:
        self.runs: int = 0
        self.compiled: Callable[[mx.array], object] = mx.compile(count_run)


def count_run(array: mx.array) -> list[mx.array]:
    """Count one run of this function, which MLX compiles. It returns no arrays, so MLX computes nothing."""
    probe.runs += 1
    return []


probe = Probe()
"""The compiled function and its count. `Probe` is a `threading.local`, so each thread has its own."""


def runs_python(array: mx.array) -> bool:
    """Call the compiled function of this thread with the array. Return whether MLX ran `count_run` again, as it does
    for a tracer at every call, instead of using the result of an earlier compilation."""
    before = probe.runs
    probe.compiled(array)
    return probe.runs > before


def is_transforming() -> bool:
    """Return whether MLX is transforming a function in this thread.

    MLX has no function that answers this question. But MLX runs the Python code of a compiled function only once, to
    compile it, except if an argument is a tracer: then it runs the code at every call. So this function calls a
    compiled function with `PLACEHOLDER`, which is a tracer only during transformations, and looks whether Python ran.
    Outside of transformations this takes a microsecond. Calling mx.eval would take longer, because it wakes another
    thread.
    """
    # The first call of a thread or a stream compiles the function, so Python runs once. It runs at the second call,
    # too, only if MLX is transforming or if mx.disable_compile() is in effect.
    if not (runs_python(PLACEHOLDER) and runs_python(PLACEHOLDER)):
        return False
    # Python ran at both calls. If it does not run twice for an array that is never a tracer, compilation is enabled, so
    # the reason was a transformation.
    if not (runs_python(ZERO) and runs_python(ZERO)):
        return True
    # Two cases are left: mx.disable_compile() is in effect, or MLX is calling a vjp rule, where it treats every array
    # as a tracer. To decide, evaluate the stale placeholder, which has no value. The evaluation always fails: with a
    # ValueError during a transformation, otherwise with a RuntimeError. It takes three times as long as the calls
    # above.
    try:
        mx.eval(PLACEHOLDER)
    except RuntimeError:
        return False
    except ValueError:
        pass
    return True


def have_values(arrays: list[mx.array], transforming: bool | None = None) -> bool:
    """Evaluate the arrays. Return False if one of them is a placeholder of `mx.compile`, `mx.vmap` or an export, which
    has no value; else True.

    transforming: whether MLX is transforming a function, so that the arrays must keep their graphs when they are
    evaluated. None if the caller does not know. A vjp rule passes False: there MLX keeps all graphs anyway.
    """
    try:
        if is_transforming() if transforming is None else transforming:
            with_graphs_kept(lambda: mx.eval(arrays))
        else:
            mx.eval(arrays)
    except ValueError as error:
        if "during function transformations" not in str(error):
            raise
        return False
    return True


def with_graphs_kept(function: Callable[[], Any]) -> Any:
    """Call `function` and return its result. Arrays that it evaluates keep their graphs: the operations that computed
    them, which an outer derivative needs.

    MLX keeps the graph of an evaluated array only if the array has the tracer mark. When an inner transformation ends,
    MLX removes this mark also from tracers of an outer transformation. If such a tracer is then evaluated, its graph is
    lost, and the outer derivative silently becomes wrong. But while MLX calls a vjp rule, it keeps all graphs. So this
    function makes an identity function with a vjp rule that calls `function`, and asks MLX for its gradient.
    """
    results = []

    # The vjp rule of the identity function. It calls `function`, and returns the cotangent as the gradient.
    def rule(primal: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        results.append(function())
        return cotangent

    identity = custom_function(lambda array: array)
    identity.vjp(rule)
    mx.vjp(identity, [ZERO], [ZERO])
    return results[0]


def marks_come_first() -> bool:
    """Return whether this version of MLX calls vjp rules in an order by which a rule can learn which gradients MLX asks
    for. MLX does not document the order, so it is tested here.

    The test has three custom functions: `product`, of x and w; a scalar `mark`, which depends on x; and a `tap`, which
    takes both results. MLX must call their vjp rules in the order tap, mark, product, so that the rule of `product`
    knows whether the rule of `mark` was called. If MLX asks only for the gradient of w, it must not call the rule of
    `mark`.
    """
    # called: the names of the rules in the order in which MLX called them; "function" is the name for `product`.
    called: list[str] = []

    def noting(name: str, function: Callable[..., Any], gradient: Callable[..., Any]) -> Callable[..., Any]:
        noted = custom_function(function)
        noted.vjp(lambda primals, cotangents, outputs: (called.append(name), gradient(primals, cotangents))[1])
        return noted

    product = noting("function", lambda x, w: x * w, lambda primals, d: (primals[1] * d, primals[0] * d))
    mark = noting("mark", lambda x: ZERO, lambda primals, d: d)
    tap = noting("tap", lambda result, mark: result, lambda primals, d: (d, ZERO))
    for argnums in (0, 1):
        mx.value_and_grad(lambda x, w: tap(product(x, w), mark(x)), argnums)(ZERO, ZERO)
    return called == ["tap", "mark", "function", "tap", "function"]


MARKS_COME_FIRST = marks_come_first()
"""Whether this version of MLX calls vjp rules in the order that `marks_come_first` tests."""
