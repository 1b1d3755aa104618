"""Run an engine so that MLX takes the gradient from the engine's own backward pass.

MLX differentiates, maps and compiles graphs of its own operations. The steps of an engine other than `ops` are not such
a graph. So each run is an `mx.custom_function` that tells MLX what to do instead:

    MLX asks for           engine `ops`                                engines `numpy`, `fused`, `stepwise`
    the gradient           runs its backward pass, which is a graph    run their backward pass
    a second derivative    differentiates that graph, to any order     refuse
    forward mode           differentiates the forward graph            refuse
    mx.vmap                maps both graphs                            does not happen: `ops` runs instead of `numpy`,
                                                                       and MLX refuses to map a Metal kernel

The backward pass of `numpy` has one exception: if a call is a single step of a plain RNN, `ops` computes the gradient
(see `is_rnn_step`).

A cotangent is the gradient of the loss with respect to an output; MLX passes it to the backward pass. A rule is a
function that MLX calls instead of its own derivative: vjp for the gradient, jvp for forward mode. A rule gets the
primals (the arguments) and the cotangents or tangents, each as a tuple of arrays. The other functions of this module
pass arrays in dicts by name; the module `problem` lists the names.

These names stand in many functions below:

    names       the names of the arrays of the call
    visible     the names of the outputs that MLX gets
    hidden      the names of the results that only Python saves for the backward pass, in the dict `saved`
    chunked     the object that runs the engine in chunks of time; None if the call is not divided
    left_out    the names of the gradients that MLX does not ask for, so that `numpy` does not compute them
    tap         an identity function after an output; its vjp rule notes that the output has a cotangent
    mark        a scalar that depends on x; its vjp rule notes that MLX asks for the gradient of x
    problem     the sizes and options of the call. plain: nobody can ask for a gradient. training: the forward pass
                saves what the backward pass reads. packing: the format of quantized weights, or None

A derivative that is refused must also be refused inside mx.vmap. By default mx.vmap drops the vjp and jvp rules of a
custom function; `without_derivatives` keeps them.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import mlx.core as mx
import numpy as np

from .cells import AnyCell, PointwiseCell, normalises_input
from .chunks import Chunked, copied_to_mlx, divided, for_engine, plain_gradients, plain_outputs
from .definitions import UNBOUNDED
from .input_norm import before_steps
from .metal import fused, stepwise
from .numpy import sweep as numpy
from .numpy.sweep import Saved
from .ops import sweep as ops
from .ops.packed import dequantized
from .ops.pointwise import gradients_by_mlx
from .packing import packed_names
from .problem import HALVES, SEQUENCES, Arrays, Problem
from .tracing import MARKS_COME_FIRST, ZERO, custom_function, have_values, vjp, with_graphs_kept

ENGINE_MODULES: dict[str, Any] = {"fused": fused, "stepwise": stepwise, "numpy": numpy, "ops": ops}
"""The module of each engine, with the functions `forward` and `backward`."""


TAPS = (("h",), ("c",), ("gates",), ("hT", "cT"))
"""Groups of outputs that share a tap, which costs the host as much time as two kernel launches. The last states hT and
cT share one because they are small: if only one of them has a cotangent, the backward pass reads zeros for the other,
which costs less time than a second tap."""


Refusal = Callable[[tuple[str, ...]], str]
"""The type of a function that returns why an engine's backward pass must not run, or an empty text if it may run. Its
argument, the names of the outputs that have a cotangent, is known only when MLX asks for the gradient."""


def run(problem: Problem, arrays: Arrays, engine: str, refusal: Refusal | None = None) -> dict[str, Any]:
    """Run a recurrence on an engine. Return the outputs that the caller wants, by name; gates are None if the caller
    does not want them. x and the sequences are [B, T, .] with `batch_first`. For a single step x may be [B, I].

    refusal: a function that is called with the names of the outputs that have a cotangent. It returns a reason if the
    engine's backward pass must not run; then the engine `ops` computes the gradients.

    The gradient of the outputs comes from the engine's backward pass (`differentiable`), except in two cases: nobody
    can ask for a gradient (`problem.plain`), or MLX derives the gradient from the operations of `ops`. Here
    `for_engine` casts 16-bit arrays to the dtypes that the engine reads; if the call runs in chunks, the object
    `chunked` casts them chunk by chunk.
    """
    dtype, batch_first = problem.dtype, problem.batch_first
    if problem.plain and engine == "numpy":  # `numpy` reads x as [B, T, I], too, so no swapaxes is needed
        if dtype in HALVES:
            arrays = for_engine(engine, arrays)
        outputs: dict[str, Any] = numpy.forward(problem, arrays, batch_first)
    elif engine == "ops" and is_plain_step(problem):
        outputs = graph_of_step(problem, arrays if dtype not in HALVES else for_engine(engine, arrays))
    else:
        if arrays["x"].ndim == 2:  # a single step [B, I]; `batch_first` is then false
            arrays = arrays | {"x": arrays["x"][None]}
        # `divided` returns None if chunks have no benefit for this call.
        chunked = None if problem.chunks is None else divided(problem, arrays, engine, ENGINE_MODULES[engine])
        if chunked is None and dtype in HALVES:
            arrays = for_engine(engine, arrays)
        if batch_first:
            arrays = arrays | {"x": mx.swapaxes(arrays["x"], 0, 1)}
        # of_graph: whether MLX derives the gradient from the graph, so that no custom function is needed.
        of_graph = engine == "ops" and chunked is None and has_plain_gradient(problem)
        if problem.plain or of_graph:
            outputs = (chunked or ENGINE_MODULES[engine]).forward(problem, arrays)
        else:
            if problem.packing is not None:  # some weights are quantized
                arrays = with_quantized_constant(problem, arrays)
            outputs = differentiable(problem, arrays, engine, chunked, refusal)
        outputs = {name: outputs[name] for name in shown_of(problem)}
        if batch_first:
            outputs |= {name: mx.swapaxes(outputs[name], 0, 1) for name in SEQUENCES if name in outputs}
    if not problem.return_gates:
        outputs["gates"] = None
    if dtype not in HALVES:
        return outputs
    return {name: output if output is None else output.astype(dtype) for name, output in outputs.items()}


def graph_of_step(problem: Problem, arrays: Arrays) -> Arrays:
    """Run a single step on engine `ops`. Return the outputs that the caller wants, by name. MLX derives the gradient
    from the graph of the outputs."""
    x, time = arrays["x"], 1 if problem.batch_first else 0  # the axis of time
    # Remove the axis of time by `reshape`, not by `squeeze`: under mx.compile(shapeless=True) the caller may pass an x
    # of another size later, for which `reshape` raises an error, while `squeeze` could give a wrong result.
    x = (x if x.ndim == 3 else x[None]).reshape(problem.B, x.shape[-1])
    outputs = ops.forward_step(problem, arrays | {"x": x})
    shown = {name: outputs[name] for name in shown_of(problem)}
    return {name: mx.expand_dims(output, time) if name in SEQUENCES else output for name, output in shown.items()}


def shown_of(problem: Problem) -> tuple[str, ...]:
    """Return the names of the outputs that the caller wants to get."""
    unwanted = () if problem.wants_last else ("hT", "cT")
    if not problem.return_gates:
        unwanted += ("gates",)
    return tuple([name for name in problem.cell.outputs if name not in unwanted])


def run_backward(problem: Problem, arrays: Arrays, saved: Arrays, cotangents: Arrays, engine: str) -> Arrays:
    """Run the backward pass of an engine. Return the gradients of all arrays except lengths and quantized weights.

    saved: the outputs h, c and gates of a forward pass. cotangents: the cotangents of some outputs.
    """
    arrays, saved, cotangents = (for_engine(engine, values) for values in (arrays, saved, cotangents))

    # chunked=None: a run in chunks would compute the outputs again, which the caller passes as `saved`. The empty dict:
    # the forward pass saved nothing besides these outputs.
    def of_all_steps() -> Arrays:
        return backward(problem, arrays, engine, chunked=None, cotangents=cotangents, forward=(dict(saved), {}))

    if engine != "numpy":
        gradients = of_all_steps()
    elif problem.plain:  # nobody can ask for a derivative of the gradients
        gradients = numpy.backward(problem, arrays, dict(saved), cotangents)
    else:  # `numpy` evaluates its arrays, which must not lose their graphs: an outer derivative needs these
        gradients = with_graphs_kept(of_all_steps)
    return {name: gradients[name].astype(problem.dtype) for name in with_gradient(problem, arrays)}


def with_gradient(problem: Problem, arrays: Arrays) -> list[str]:
    """Return the names of the arrays that have a gradient: all but lengths and the arrays of quantized weights."""
    no_gradient = {"lengths"} if problem.packing is None else {"lengths", *packed_names(arrays)}
    return [name for name in arrays if name not in no_gradient]


def differentiable(
    problem: Problem, arrays: Arrays, engine: str, chunked: Chunked | None, refusal: Refusal | None
) -> Arrays:
    """Run the engine and return its outputs by name. If MLX asks for their gradient, the engine's backward pass
    computes it, or `ops` if `refusal` returns a reason.

    A custom function of MLX must get every array as an argument. MLX treats any other array that the function reads as
    a constant: MLX does not map it, and its gradient is 0.

    None of the functions inside refers to the custom function. So the graph, the gradient function and all arrays that
    they hold are freed with the last reference to the outputs, without waiting for the garbage collector.
    """
    names, sweeps = tuple(arrays), chunked or ENGINE_MODULES[engine]  # sweeps: has the functions forward and backward
    # MLX gets the outputs that `visible` names. The results that `hidden` names are saved only in the dict `saved`,
    # from which the backward pass reads them.
    visible, hidden = saved_of(problem, engine, names) if chunked is None else chunked.saved_of(problem)
    saved: Saved = {}
    # used: the names of the outputs that have a cotangent. In training the taps (identity functions after the outputs)
    # add them, when MLX asks for the gradient. Without training there are no taps, so any output may have one.
    used = set() if problem.training else set(visible)
    # If MLX does not ask for the gradient of x (for example because x is data), the engine `numpy` does not compute it.
    # To learn whether MLX asks for it, the outputs get a mark: a scalar that depends on x (see `gradient_mark`). That
    # works only if this version of MLX differentiates the mark before the recurrence; MARKS_COME_FIRST says so.
    marks = engine == "numpy" and problem.training and MARKS_COME_FIRST
    mark = gradient_mark(arrays["x"], used) if marks else None

    def forward(*values: mx.array) -> tuple[mx.array, ...]:
        outputs = sweeps.forward(problem, dict(zip(names, values, strict=True)))
        if hidden:
            saved.update({name: outputs[name] for name in hidden if outputs.get(name) is not None})
        if chunked is not None:  # MLX gets zeros instead of evaluated sequences; the taps below return the sequences
            outputs = chunked.stand_ins(outputs, visible)
        return tuple([outputs[name] for name in visible])

    def vjp(primals: tuple[mx.array, ...], d_outputs: Any, outputs: Any) -> tuple[mx.array, ...]:
        # For an output that the loss does not use, MLX passes zeros as cotangent. Only the outputs named in `used`
        # have a real cotangent. The others are left out, so that the engine does not work on zeros.
        cotangents = {name: d for name, d in zip(visible, d_outputs, strict=True) if name in used}
        # The set `used` contains `MARK` if MLX asks for the gradient of x; otherwise the engine leaves this gradient
        # out. From now on `used` names all outputs, because a second derivative calls this rule again. Each output may
        # then have a cotangent that did not come through a tap (the identity after an output, which adds the output's
        # name to `used`): the backward pass reads the outputs themselves.
        left_out = ("x",) if marks and MARK not in used else ()
        used.discard(MARK)
        used.update(visible)
        given, shown = dict(zip(names, primals, strict=True)), dict(zip(visible, outputs, strict=True))
        if refusal is not None and refusal(tuple(cotangents)):
            gradients = plain_gradients(problem, dequantized(problem.packing, given), cotangents)
        else:
            # MLX calls this rule later, when another stream may be the default. `numpy` needs a stream of the CPU.
            with mx.stream(mx.cpu) if engine == "numpy" else nullcontext():
                gradients = backward(problem, given, engine, chunked, cotangents, (shown, saved), left_out)
        if chunked is None:  # free the saved gates; if MLX asks for the gradient again, the engine recomputes them
            saved.clear()
        # MLX needs one result for each argument. Arguments without a gradient, such as lengths, get zeros.
        return tuple([gradients[name] if name in gradients else mx.zeros_like(given[name]) for name in names])

    function = custom_function(forward)
    function.vjp(vjp)
    function.jvp(forward_mode(problem, engine, chunked, names, visible))
    evaluated_chunks = chunked is not None and chunked.evaluates
    # `numpy` and evaluated chunks evaluate the arrays that they get. MLX would then drop the graphs of these arrays,
    # and an outer derivative would silently be wrong. So `with_graphs_kept` calls the custom function inside a vjp
    # rule, because there MLX keeps all graphs.
    evaluates = engine == "numpy" or evaluated_chunks
    results = with_graphs_kept(lambda: function(*arrays.values())) if evaluates else function(*arrays.values())
    outputs: Arrays = dict(zip(visible, results, strict=True))
    # Without training `used` contains all names already, so taps would have nothing to note. Evaluated chunks need taps
    # in any case: MLX got zeros (stand-ins) instead of their sequences, and the taps return the sequences.
    if not problem.training and not evaluated_chunks:
        return outputs
    return with_taps(problem, outputs, used, chunked, mark)


def with_taps(
    problem: Problem, outputs: Arrays, used: set[str], chunked: Chunked | None, mark: mx.array | None
) -> Arrays:
    """Return the outputs after their taps, which add the names of the outputs with a cotangent to the set `used`."""
    shown = shown_of(problem)
    for group in filter(None, [[name for name in sharing if name in shown] for sharing in TAPS]):
        outputs |= zip(group, tapped(group, [outputs[name] for name in group], used, chunked, mark), strict=True)
    return outputs


def forward_mode(
    problem: Problem, engine: str, chunked: Chunked | None, names: Sequence[str], visible: Sequence[str]
) -> Callable[..., tuple[mx.array, ...]]:
    """Return the forward-mode rule (jvp) of a custom function whose arguments are the arrays `names` and whose results
    are the outputs `visible`. On every engine but `ops` the rule raises RuntimeError."""

    # Return the outputs as a graph that MLX can differentiate; for a call in chunks `plain_outputs` builds this graph.
    def outputs_of(*values: mx.array) -> list[mx.array]:
        given = dict(zip(names, values, strict=True))
        outputs = ops.forward(problem, given) if chunked is None else plain_outputs(problem, given, chunked)
        return [outputs[name] for name in visible]

    def jvp(primals: tuple[mx.array, ...], tangents: tuple[mx.array | None, ...]) -> tuple[mx.array, ...]:
        if engine != "ops":
            raise RuntimeError(
                f"[{problem.cell.op}] engine={engine!r} has no forward-mode derivative: use engine='ops'."
            )
        return tuple(tangents_of(outputs_of, primals, tangents))

    return jvp


def has_plain_gradient(problem: Problem) -> bool:
    """Return whether MLX's own gradient of the graph of engine `ops` is used, without a custom function.

    There are two such calls. For a cell that the user wrote `ops` has no other gradient. For a single step of a
    built-in cell a custom function would cost twice as much time. But the step must not have quantized weights, because
    only a custom function refuses their gradient. It must not have lengths or an activation whose result may be
    infinite (`UNBOUNDED`) either, because MLX's own gradient could be NaN.
    """
    cell = problem.cell
    if isinstance(cell, PointwiseCell):
        return True
    has_floats_only = problem.packing is None and "lengths" not in problem.names
    return problem.T == 1 and has_floats_only and not set(cell.activations) & set(UNBOUNDED)


def is_plain_step(problem: Problem) -> bool:
    """Return whether engine `ops` can use `graph_of_step`. Three conditions must hold: the call has a single step and a
    single direction; the cell is built-in; and MLX may derive the gradient from the graph (`has_plain_gradient`)."""
    is_step = problem.T == 1 and not problem.bidirectional and not isinstance(problem.cell, PointwiseCell)
    return is_step and has_plain_gradient(problem)


def is_rnn_step(problem: Problem) -> bool:
    """Return whether `ops` computes the gradients after a forward pass on `numpy`. It does if the call is a single step
    of a plain RNN with fewer batch items than hidden units: a program that makes a call for each step then needs half
    as much memory. A cell that normalises the input's product is excluded, because `ops` does not compute this norm.

    The gradients of `ops` are a graph, which MLX evaluates after the transformation; it frees each array after its last
    use. `numpy` would evaluate the gradients during the transformation, which keeps them until its end. As a plain RNN
    saves only h for its backward pass, the gradients would be most of the memory. With more batch items `numpy` is much
    faster.
    """
    is_small = problem.T == 1 and problem.B < problem.H and problem.cell.op == "rnn"
    return is_small and not normalises_input(problem.cell)


def tapped(
    names: list[str], values: list[mx.array], used: set[str], chunked: Chunked | None, mark: mx.array | None
) -> tuple[mx.array, ...]:
    """Return the outputs `values` after a tap. If MLX asks for a gradient through the tap, its vjp rule adds `names`,
    the names of the outputs, to the set `used`, which the backward pass reads.

    If `chunked` evaluated the chunks, MLX got stand-ins for the sequences to save memory: zeros of the same shape. The
    tap returns the real sequences, which `chunked` holds. The tap takes the mark, or None, as one more argument. So if
    MLX asks for the gradient of x, on which the mark depends, it calls the mark's vjp rule, too.
    """
    shows = values if chunked is None else chunked.real_sequences(names, values)
    marks = () if mark is None else (mark,)

    # The vjp rule returns one gradient per argument of the tap: for an output its cotangent, for the mark 0.
    def note(primals: object, cotangents: tuple[mx.array, ...], outputs: object) -> tuple[mx.array, ...]:
        used.update(names)
        return (*cotangents, *zeros)

    zeros = [ZERO for _ in marks]
    # shows: what the tap returns. It differs from `values`, its arguments, if these are stand-ins.
    identity = custom_function(lambda *given: given[: len(names)] if shows is values else tuple(shows))
    identity.vjp(note)
    identity.jvp(lambda primals, tangents: tangents[: len(names)] if marks else tangents)
    return identity(*values, *marks)


MARK = "the gradient of x"
"""An element of the set `used`. It says that MLX asks for the gradient of x. All other elements are names of outputs
with a cotangent."""


def gradient_mark(x: mx.array, used: set[str]) -> mx.array:
    """Return a mark: a scalar 0 that depends on x and whose vjp rule adds `MARK` to the set `used`. The taps also take
    the mark. So MLX calls its rule if, and only if, it asks for the gradient of x, and before the backward pass of the
    recurrence."""

    # The vjp rule of the mark. It returns zeros as the gradient of x, because the mark is a constant.
    def note(primal: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        used.add(MARK)
        return mx.broadcast_to(mx.array(0, primal.dtype), primal.shape)

    mark = custom_function(lambda x: ZERO)
    mark.vjp(note)
    mark.jvp(lambda primals, tangents: ZERO)
    return mark(x)


def saved_of(problem: Problem, engine: str, names: Collection[str]) -> tuple[list[str], list[str]]:
    """Return two lists: the names of the outputs that MLX gets, and the names of the outputs that only Python saves
    for the backward pass. names: the names of the call's arrays. `numpy` computes the last states only if the caller
    wants them. MLX gets the gates if the caller wants them. Otherwise:

    - `ops`: MLX gets the gates. The backward pass of `ops` reads them, and MLX can differentiate this pass again.
    - `fused`, `stepwise` in training: MLX gets the gates. There is one exception, if `stepwise.keeps_rows`: each launch
      of `stepwise` computes one step and writes a row of results, gates among them. Python saves these rows, in up to
      20 arrays, under the name `stepwise.ROWS`. If MLX got these arrays, too, building and freeing its graph would take
      1.5 times as long.
    - `fused`, `stepwise` without training: Python saves nothing, because they compute no gates.
    - `numpy`: Python saves the gates.

    With layer normalisation on `numpy` Python also saves the normalised products, under the name "norms".
    """
    visible: list[str] = [*problem.cell.outputs]
    if engine == "numpy" and not problem.wants_last:
        visible = [name for name in visible if name not in ("hT", "cT")]
    if engine == "stepwise" and stepwise.keeps_rows(problem, names):
        visible.remove("gates")
        return visible, [stepwise.ROWS]
    norms = ["norms"] * (engine == "numpy" and "norms" in numpy.reads(problem.cell))
    if engine == "ops" or problem.return_gates or (engine != "numpy" and problem.training):
        return visible, norms
    visible.remove("gates")
    return visible, ["gates", *norms]


def backward(
    problem: Problem,
    arrays: Arrays,
    engine: str,
    chunked: Chunked | None,
    cotangents: Arrays,
    forward: tuple[Arrays, Saved],
    left_out: tuple[str, ...] = (),
) -> Arrays:
    """Return the gradients of all arrays except lengths and quantized weights. MLX can differentiate these gradients
    again as far as the engine supports it.

    forward: (the outputs that MLX got from the forward pass, the results that only Python saved).
    """
    outputs, hidden = forward
    # The gradients of `ops` are a graph, so MLX can differentiate them again. If chunks were evaluated, their gradients
    # have no graph: `evaluated_gradients` adds a rule for second derivatives.
    if engine == "ops" or (engine == "numpy" and chunked is None and is_rnn_step(problem)):
        floats = dequantized(problem.packing, arrays)
        if chunked is None:
            return ops.backward(problem, floats, outputs, cotangents)
        if not chunked.evaluates:
            return chunked.backward(problem, floats, outputs | hidden, cotangents)
        return evaluated_gradients(problem, floats, chunked, cotangents, outputs | hidden)
    wanted = with_gradient(problem, arrays)  # the names of the arrays that have a gradient
    if set(wanted) <= set(left_out):  # a custom function of MLX needs at least one result
        left_out = ()
    # The names of the results. `numpy` returns some gradients as two factors: the gradient of Wh as "Wh 0" and "Wh 1",
    # which `numpy.multiplied` multiplies later.
    names: list[str] = []

    def gradients_of(*values: mx.array) -> tuple[mx.array, ...]:
        rest = iter(values)
        # Make dicts of the arguments, in the order of `values` below: the arrays, the cotangents d, the saved outputs.
        given, d, saved = (dict(zip(named, rest, strict=False)) for named in (arrays, cotangents, outputs))
        gradients = engine_gradients(problem, given, engine, chunked, d, saved | hidden, left_out)
        names[:] = [name for name in gradients if name.partition(" ")[0] in wanted]
        return tuple([gradients[name] for name in names])

    error = f"[{problem.cell.op}] engine={engine!r} has no second derivative: use engine='ops'."
    values = (*arrays.values(), *cotangents.values(), *outputs.values())
    results = without_derivatives(gradients_of, error)(*values)
    gradients = dict(zip(names, results, strict=True))
    # MLX computes all results of a custom function together, and `without_derivatives` makes a custom function. So the
    # factors of the weight gradients are multiplied here, outside of it: then MLX can compute these large gradients one
    # by one.
    return numpy.multiplied(gradients) if engine == "numpy" else gradients


def engine_gradients(
    problem: Problem,
    arrays: Arrays,
    engine: str,
    chunked: Chunked | None,
    cotangents: Arrays,
    saved: Any,
    left_out: tuple[str, ...],
) -> Arrays:
    """Return the gradients that the engine `numpy`, `fused` or `stepwise` computes. `numpy` returns some large weight
    gradients as pairs of factors; `numpy.multiplied` multiplies them later, one by one.

    `numpy` can compute only with arrays that have values. If mx.vmap computes a Jacobian, the cotangents have no
    values; then the engine `ops` computes the gradients. saved: what the forward pass saved, by name.
    """
    sweeps = chunked or ENGINE_MODULES[engine]  # both have the function `backward`
    if engine != "numpy":
        floats = arrays if problem.packing is None else dequantized(problem.packing, arrays)
        return sweeps.backward(problem, floats, saved, cotangents)
    # `have_values` evaluates the arrays. transforming=False: `have_values` does nothing to keep their graphs, because
    # this code runs in a vjp rule, where MLX keeps the graphs of evaluated arrays anyway.
    if have_values([*arrays.values(), *cotangents.values()], transforming=False):
        if chunked is None:
            return numpy.backward(problem, arrays, saved, cotangents, as_factors=True, left_out=left_out)
        return chunked.backward(problem, arrays, saved, cotangents, left_out)
    floats, cotangents = (for_engine(engine, values) for values in (dequantized(problem.packing, arrays), cotangents))
    gates = saved.get("gates")
    if normalises_input(problem.cell):
        return gradients_with_input_norm(problem, floats, cotangents)
    # The backward pass of `ops` reads h, c and, except for a plain RNN, gates, each as one array with all steps. The
    # forward pass runs again if such an array is missing: chunks may have saved only their first states; with lengths
    # `numpy` saves the gates as a list of arrays for parts of the steps; without training it saves no gates.
    if chunked or isinstance(gates, list) or (gates is None and problem.cell.op != "rnn"):
        saved = ops.forward(problem, floats)
    saved = {name: a for name, a in saved.items() if a is not None and name != "norms"}
    saved = {name: copied_to_mlx(a) if isinstance(a, np.ndarray) else a for name, a in saved.items()}
    return ops.backward(problem, floats, saved, cotangents)


def gradients_with_input_norm(problem: Problem, floats: Arrays, cotangents: Arrays) -> Arrays:
    """Return the gradients that the engine `ops` computes for a cell that normalises the input's product.
    `before_steps` normalises this product, and `ops` runs the steps. So `ops` first computes the gradients of the
    normalised product and of the other arrays of the steps. From these MLX derives the gradients of the arrays of the
    call. floats: the arrays of the call, with dequantized weights."""

    # Return (cell, arrays) for the steps. There x is the normalised product, and the cell no longer normalises it. The
    # packing, the third result of `before_steps`, is left out: no weight is quantized here.
    def of_steps(arrays: Arrays) -> tuple[AnyCell, Arrays]:
        return before_steps(problem.cell, arrays, packing=None, directions=problem.directions, batch_first=False)[:2]

    cell, given = of_steps(floats)  # given: the arrays of the steps by name
    steps = problem._replace(cell=cell, names=tuple(given), packing=None)
    gradients = plain_gradients(steps, given, cotangents)
    d = {name: gradients[name] for name in given if name != "lengths"}
    return gradients_by_mlx(lambda arrays: of_steps(arrays)[1], floats, d)


def evaluated_gradients(problem: Problem, floats: Arrays, chunked: Chunked, cotangents: Arrays, saved: Any) -> Arrays:
    """Return the gradients that the engine `ops` computes and evaluates chunk by chunk to save memory. Evaluated
    gradients have no graph. So if MLX asks for a second derivative, `plain_gradients` computes the same gradients again
    as one graph of all steps. floats: the arrays of the call, with dequantized weights."""
    # A custom function takes arrays only as arguments, one after the other: all arrays but lengths (integers, which
    # have no gradient), then the cotangents. `split` makes dicts of them again.
    names = [name for name in floats if name != "lengths"]
    lengths = {"lengths": floats["lengths"]} if "lengths" in floats else {}

    def split(values: tuple[mx.array, ...]) -> tuple[Arrays, Arrays]:
        rest = iter(values)
        return dict(zip(names, rest, strict=False)) | lengths, dict(zip(cotangents, rest, strict=True))

    def evaluated(*values: mx.array) -> tuple[mx.array, ...]:
        given, d = split(values)
        gradients = chunked.backward(problem, given, saved, d)
        return tuple([gradients[name] for name in names])

    def plain(*values: mx.array) -> tuple[mx.array, ...]:
        gradients = plain_gradients(problem, *split(values))
        return tuple([gradients[name] for name in names])

    values = (*[floats[name] for name in names], *cotangents.values())
    return dict(zip(names, with_derivatives_of(plain, evaluated)(*values), strict=True))


def with_quantized_constant(problem: Problem, arrays: Arrays) -> Arrays:
    """Return the same arrays, whose quantized weights now have a derivative rule that raises an error if MLX asks for
    their gradient."""
    names = packed_names(arrays)
    error = (
        f"[{problem.cell.op}] quantized weights have no gradient: freeze them, as layer.freeze() does, or "
        "differentiate with respect to other arrays."
    )
    unchanged = without_derivatives(lambda *values: values, error)
    constants = unchanged(*[arrays[name] for name in names])
    return arrays | dict(zip(names, constants, strict=True))


# --- Custom functions whose rules also hold in nested transformations ------------------------------------------------


def without_derivatives(function: Callable[..., tuple[mx.array, ...]], error: str) -> Any:
    """Return a function that computes the same as `function`. Asking for a derivative of the returned function raises a
    RuntimeError with the text `error`. `function` takes at least two arrays: with only one, MLX would call the rule for
    mx.vmap with an array instead of a tuple."""

    def refuse(*arguments: object) -> NoReturn:
        raise RuntimeError(error)

    return with_rules(
        function, refuse, refuse, lambda axes: without_derivatives(mx.vmap(function, in_axes=axes), error)
    )


def with_derivatives_of(
    plain: Callable[..., tuple[mx.array, ...]], function: Callable[..., tuple[mx.array, ...]]
) -> Any:
    """Return a function that computes its results with `function`, and the derivatives of these results with `plain`.
    Both compute the same results, but the results of `function` have no graph, so MLX can differentiate only `plain`.
    Both take at least two arrays: with only one, MLX would call their rules with an array instead of a tuple."""
    return with_rules(
        function,
        lambda values, cotangents, _: tuple(vjp(plain, values, cotangents)[1]),
        lambda values, tangents: tuple(tangents_of(plain, values, tangents)),
        lambda axes: with_derivatives_of(mx.vmap(plain, in_axes=axes), mx.vmap(function, in_axes=axes)),
    )


def with_rules(
    function: Callable[..., Any], vjp: Callable[..., Any], jvp: Callable[..., Any], mapped: Callable[[Any], Any]
) -> Any:
    """Return a custom function that calls `function`, with the rules vjp and jvp for its derivatives. mapped(axes): the
    function to call inside mx.vmap: `function`, mapped over the axes that MLX names, with rules of its own."""

    # The rule for mx.vmap. Return the results, and for each result the axis along which it is mapped (0). `function`
    # may evaluate its arguments; `with_graphs_kept` keeps their graphs, which an outer derivative needs.
    def vmap(values: tuple[mx.array, ...], axes: Any) -> tuple[tuple[mx.array, ...], tuple[int, ...]]:
        results = with_graphs_kept(lambda: mapped(axes)(*values))
        return results, (0,) * len(results)

    wrapped = custom_function(function)
    wrapped.vjp(vjp)
    wrapped.jvp(jvp)
    wrapped.vmap(vmap)
    return wrapped


def tangents_of(
    function: Callable[..., Any], values: tuple[mx.array, ...], tangents: tuple[mx.array | None, ...]
) -> list[mx.array]:
    """Return the tangents (forward-mode derivatives) of a function's results. values: the arguments of the function.
    tangents: one for each value, or None for a value that is a constant.

    MLX's default rule passes all values to mx.jvp, with zeros as the missing tangents. If a value without a tangent is
    a copy of an array of an outer transformation, mx.jvp then replaces it by the original array, and the outer
    derivative silently becomes 0. Here mx.jvp gets only the values that have a tangent; the others are constants.
    """
    moving = {n: tangent for n, tangent in enumerate(tangents) if tangent is not None}

    def of_moved(*changed: mx.array) -> list[mx.array]:
        now = list(values)
        for n, value in zip(moving, changed, strict=True):
            now[n] = value
        return list(function(*now))

    return mx.jvp(of_moved, [values[n] for n in moving], list(moving.values()))[1]
