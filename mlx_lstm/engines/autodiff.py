"""Run an engine so that MLX takes the gradient from the engine's own backward pass.

MLX differentiates, maps and compiles graphs of its own operations. The steps of an engine other than `ops` are not such
a graph. So each run is an `mx.custom_function` that tells MLX what to do instead:

    MLX asks for           engine `ops`                                engines `numpy`, `fused`, `stepwise`
    the gradient           runs its backward pass, which is a graph    run their backward pass
    a second derivative    differentiates that graph, to any order     refuse
    forward mode           differentiates the forward graph            refuse
    mx.vmap                maps both graphs                            does not happen: `ops` runs instead of `numpy`,
                                                                       and MLX refuses to map a Metal kernel

There is one exception: if `numpy` runs a single step of a plain RNN, `ops` runs the backward pass (see `is_rnn_step`).

A cotangent is the gradient of an output that comes from outside, from the loss. A rule is a function that MLX calls
instead of its own derivative: vjp for the gradient, jvp for forward mode. It gets the primals (the arguments) and the
cotangents or tangents. Arrays are in dicts by the names that `problem` lists; a rule gets them as tuples.

names: the names of the arrays of the call. visible: the names of the outputs that MLX sees. hidden: the names of
results that Python saves for the backward pass without MLX; saved: these results. chunked: an object that runs the
engine in chunks of time, or None. left_out: names of gradients that nobody asks for, which `numpy` does not compute.
tap: an identity function after an output, whose rule notes that the output has a cotangent. mark: a scalar whose rule
notes that MLX asks for the gradient of x. `for_engine` casts arrays to the dtypes that an engine reads. SEQUENCES: h,
c, gates. HALVES: the 16-bit dtypes. ENGINE_MODULES: the module of each engine.

From `Problem`: plain: nobody can ask for a gradient. training: the forward pass saves what the backward pass reads.
packing: the format of quantized weights, or None; `dequantized` returns arrays with float weights instead.

A derivative that is refused must also be refused inside mx.vmap. But the default rule of MLX for mx.vmap drops all
other rules of a custom function; `without_derivatives` keeps them.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import mlx.core as mx
import numpy as np

from .cells import AnyCell, PointwiseCell, normalises_input
from .chunks import HALVES, SEQUENCES, Chunked, copied_to_mlx, divided, for_engine, plain_gradients, plain_outputs
from .definitions import UNBOUNDED
from .input_norm import before_steps
from .metal import fused, stepwise
from .numpy import sweep as numpy
from .numpy.sweep import Saved
from .ops import sweep as ops
from .ops.packed import dequantized
from .packing import packed_names
from .problem import Arrays, Problem
from .tracing import MARKS_COME_FIRST, ZERO, custom_function, have_values, vjp, with_graphs_kept

ENGINE_MODULES: dict[str, Any] = {"fused": fused, "stepwise": stepwise, "numpy": numpy, "ops": ops}
"""The module of each engine, with the functions `forward` and `backward`."""


TAPS = (("h",), ("c",), ("gates",), ("hT", "cT"))
"""Groups of outputs that share a tap, an identity function whose vjp rule notes that these outputs have a cotangent. A
tap costs the host as much time as two kernel launches. hT and cT share one, because they
are small: if one of them has no cotangent, zeros for it cost less than a second tap."""


Refusal = Callable[[tuple[str, ...]], str]
"""A function that returns why an engine's backward pass must not run, or an empty text if it may. It is called with the
names of the outputs that have a cotangent, which are known only when MLX asks for the gradient."""


def run(problem: Problem, arrays: Arrays, engine: str, refusal: Refusal | None = None) -> dict[str, Any]:
    """Run a recurrence on an engine. Return the outputs that the caller wants, by name; gates are None if the caller
    does not want them. x and the sequences are [B, T, .] with `batch_first`. For a single step x may be [B, I].

    arrays: the arguments x, Wx, Wh and so on, by name; `engines.problem` lists their shapes. refusal: called with the
    names of the outputs that have a cotangent, it returns a reason if the engine's backward pass must not run. Engine
    `ops` then computes the gradients.

    The gradient of the outputs is the engine's backward pass (`differentiable`), with two exceptions: nobody can ask
    for a gradient (the problem is `plain`), or MLX derives it from the operations of `ops`. Arrays of 16 bits are
    prepared by `for_engine` here unless the call runs in chunks, which prepare their own.
    """
    dtype, batch_first = problem.dtype, problem.batch_first
    if problem.plain and engine == "numpy":  # `numpy` reads both memory orders of x without an operation of MLX
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
    # Under mx.compile(shapeless=True) the caller may pass an x of another size later. `reshape` then raises an error.
    # `squeeze` would not, and the result could have a wrong shape.
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

    # No chunks: they would compute the outputs again, which the caller passes here. {}: nothing was saved besides them.
    def of_all_steps() -> Arrays:
        return backward(problem, arrays, engine, chunked=None, cotangents=cotangents, forward=(dict(saved), {}))

    if engine != "numpy":
        gradients = of_all_steps()
    elif problem.plain:  # nobody can ask for a derivative of the gradients
        gradients = numpy.backward(problem, arrays, dict(saved), cotangents)
    else:  # `numpy` evaluates its arrays; they must keep their graphs, which an outer derivative needs
        gradients = with_graphs_kept(of_all_steps)
    return {name: gradients[name].astype(problem.dtype) for name in with_gradient(problem, arrays)}


def with_gradient(problem: Problem, arrays: Arrays) -> list[str]:
    """Return the names of the arrays that have a gradient: all arrays except lengths and the arrays of quantized
    weights."""
    quantized = [] if problem.packing is None else packed_names(arrays)
    return [name for name in arrays if name != "lengths" and name not in quantized]


def differentiable(
    problem: Problem, arrays: Arrays, engine: str, chunked: Chunked | None, refusal: Refusal | None
) -> Arrays:
    """Return the engine's outputs by name. Their gradient is the engine's backward pass. refusal: returns a reason if
    that backward pass must not run; then `ops` computes the gradient.

    A custom function of MLX must get every array as an argument. MLX treats any other array that the function reads
    as a constant: MLX does not map it, and its gradient is 0.

    None of the functions inside refers to the custom function. So the graph, the gradient function and all arrays
    that they hold are freed with the last reference to the outputs, without waiting for the garbage collector.
    """
    names, sweeps = tuple(arrays), chunked or ENGINE_MODULES[engine]  # sweeps: has the functions forward and backward
    # MLX gets the outputs `visible`. Python saves the results `hidden` in `saved`, without MLX, for the backward pass.
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
            saved.update({name: outputs.get(name) for name in hidden})
        if chunked is not None:  # put zeros in place of evaluated sequences, until the taps return the real ones
            outputs = chunked.stand_ins(outputs, visible)
        return tuple([outputs[name] for name in visible])

    def vjp(primals: tuple[mx.array, ...], d_outputs: Any, outputs: Any) -> tuple[mx.array, ...]:
        # For an output that the loss does not use, MLX passes zeros as cotangent. Only the outputs named in `used`
        # have a real cotangent. The others are left out, so that the engine does not work on zeros.
        cotangents = {name: d for name, d in zip(visible, d_outputs, strict=True) if name in used}
        # The set `used` contains `MARK` if MLX asks for the gradient of x; otherwise the engine leaves this gradient
        # out. From now on `used` names all outputs, because a second derivative calls this rule again. Each output may
        # then have a cotangent that did not come through a tap: the backward pass reads the outputs directly.
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
        if chunked is None:  # release the gates; if MLX asks for the gradient again, the engine recomputes them
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
    # Without training `used` has all names already, so taps would have nothing to note. With evaluated chunks they are
    # needed in any case: there the taps also exchange the stand-ins for the real sequences.
    if not problem.training and not evaluated_chunks:
        return outputs
    return with_taps(problem, outputs, used, chunked, mark)


def with_taps(
    problem: Problem, outputs: Arrays, used: set[str], chunked: Chunked | None, mark: mx.array | None
) -> Arrays:
    """Return the outputs after their taps (`tapped`), one for each group in TAPS."""
    shown = shown_of(problem)
    for group in [[name for name in sharing if name in shown] for sharing in TAPS]:
        outputs |= zip(group, tapped(group, [outputs[name] for name in group], used, chunked, mark), strict=True)
    return outputs


def forward_mode(
    problem: Problem, engine: str, chunked: Chunked | None, names: Sequence[str], visible: Sequence[str]
) -> Callable[..., tuple[mx.array, ...]]:
    """Return the forward-mode rule (jvp) of a custom function whose arguments are the arrays `names` and whose results
    are the outputs `visible`. On every engine but `ops` the rule raises RuntimeError."""

    # The outputs as a graph that MLX can differentiate. `plain_outputs` builds it for a call in chunks.
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

    It is used for a cell that the user wrote: `ops` has no other gradient for it, and keeps the values past an item's
    end out of it. It is also used for a single step of any other cell, where a custom function would cost twice as
    much. Such a step must not have quantized weights, nor options whose masked or infinite values would make MLX's
    gradient NaN: lengths, and activations whose result may be infinite (`UNBOUNDED`).
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
    """Return whether a call is a single step of a plain RNN with fewer batch items than hidden units. After a forward
    pass on `numpy`, engine `ops` then computes the gradients: a program that makes a call for each step needs half as
    much memory with `ops`. A norm of the input's product is excluded, because `ops` does not compute it.

    The gradients of `ops` are a graph, which MLX evaluates after the transformation; it frees each array after its last
    use. `numpy` would evaluate the gradients during the transformation, which keeps them until its end. A plain RNN
    saves only h for them, so these gradients would be most of the memory. With more batch items `numpy` is much faster.
    """
    is_small = problem.T == 1 and problem.B < problem.H and problem.cell.op == "rnn"
    return is_small and not normalises_input(problem.cell)


def tapped(
    names: list[str], values: list[mx.array], used: set[str], chunked: Chunked | None, mark: mx.array | None
) -> tuple[mx.array, ...]:
    """Return the outputs `values` after an identity function (a tap), which finds out whether these outputs have a
    cotangent. If MLX asks for a gradient through the tap, the tap's vjp rule adds `names`, the names of the outputs,
    to the set `used`, which the backward pass reads.

    chunked: runs the call in chunks, or None. If it evaluated the chunks, MLX got stand-ins for the sequences to save
    memory: zeros of the same shape. The tap returns the real sequences, which `chunked` holds.

    mark: the scalar from `gradient_mark`, or None. The tap takes the mark as one more argument. So if MLX asks for the
    gradient of x, on which the mark depends, it calls the mark's vjp rule, too.
    """
    if not names:
        return ()
    shows = values if chunked is None else chunked.real_sequences(names, values)
    marks = () if mark is None else (mark,)

    # The vjp rule: the gradients of the outputs are their cotangents, and the gradient of the mark is 0.
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
"""What the set `used`, which otherwise has names of outputs, contains if MLX asks for the gradient of x."""


def gradient_mark(x: mx.array, used: set[str]) -> mx.array:
    """Return a mark: a scalar 0 that depends on x and has its own vjp rule. The rule adds `MARK` to the set `used`,
    from which the backward pass learns that MLX asks for the gradient of x.

    The outputs of the recurrence pass through identity functions (taps) that also take the mark. So MLX calls the
    mark's rule if, and only if, it asks for the gradient of x. It calls this rule before the backward pass of the
    recurrence.
    """

    # The vjp rule of the mark. The mark's gradient does not depend on the arguments, so it is zeros like x.
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
    - `fused`, `stepwise` in training: MLX gets the gates. But if `stepwise.keeps_rows`, Python saves what contains the
      gates, under the name `stepwise.ROWS`: up to 20 arrays of rows (a row is what the launch of a step writes). If
      these arrays were outputs, they would cause a third of the time in which MLX builds and frees the graph.
    - `fused`, `stepwise` without training: Python saves None, because they compute no gates.
    - `numpy`: Python saves the gates. In any case it also saves the normalised products ("norms"), if there are any.
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

    cotangents: those of some outputs. forward: the outputs of the forward pass that MLX sees, and the arrays that it
    saved where MLX does not see them.
    """
    outputs, hidden = forward
    # The gradients of `ops` are a graph that MLX can differentiate again. Gradients of evaluated chunks have no graph;
    # they need a rule for that.
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
    # The names of the results. `numpy` returns some gradients as factors: "Wh 0" and "Wh 1" are two factors of that of
    # Wh, which `numpy.multiplied` multiplies.
    names: list[str] = []

    def gradients_of(*values: mx.array) -> tuple[mx.array, ...]:
        rest = iter(values)
        # Divide the arguments again, in the order of `values` below: arrays, their cotangents d, and saved outputs.
        given, d, saved = (dict(zip(named, rest, strict=False)) for named in (arrays, cotangents, outputs))
        gradients = engine_gradients(problem, given, engine, chunked, d, saved | hidden, left_out)
        names[:] = [name for name in gradients if name.partition(" ")[0] in wanted]
        return tuple([gradients[name] for name in names])

    error = f"[{problem.cell.op}] engine={engine!r} has no second derivative: use engine='ops'."
    values = (*arrays.values(), *cotangents.values(), *outputs.values())
    results = without_derivatives(gradients_of, error)(*values)
    gradients = dict(zip(names, results, strict=True))
    # `without_derivatives` makes a custom function, and MLX computes all results of a custom function together. The
    # weight gradients of `numpy` shall be computed one by one, so they are multiplied only here, outside of that
    # function.
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

    `numpy` can compute only with arrays that have values. In a Jacobian by mx.vmap the cotangents have none; then the
    engine `ops` computes the gradients.

    saved: what the forward pass saved, by name. left_out: () or ("x",).
    """
    sweeps = chunked or ENGINE_MODULES[engine]  # both have the function `backward`
    if engine != "numpy":
        floats = arrays if problem.packing is None else dequantized(problem.packing, arrays)
        return sweeps.backward(problem, floats, saved, cotangents)
    # `have_values` evaluates the arrays. transforming=False: it does nothing to keep their graphs, because this runs in
    # a vjp rule, where MLX keeps the graphs of evaluated arrays anyway.
    if have_values([*arrays.values(), *cotangents.values()], transforming=False):
        if chunked is None:
            return numpy.backward(problem, arrays, saved, cotangents, as_factors=True, left_out=left_out)
        return chunked.backward(problem, arrays, saved, cotangents, left_out)
    floats, cotangents = (for_engine(engine, values) for values in (dequantized(problem.packing, arrays), cotangents))
    gates = saved.get("gates")
    if normalises_input(problem.cell):
        return gradients_with_input_norm(problem, floats, cotangents)
    # The backward pass of `ops` reads h, c and gates, each as one array with all steps. The forward pass runs again if
    # they are not there: chunks may have saved only their first states; with lengths `numpy` saves a list of gates, an
    # array per segment of the steps; without training it saves no gates. A plain RNN needs no gates.
    if chunked or isinstance(gates, list) or (gates is None and problem.cell.op != "rnn"):
        saved = ops.forward(problem, floats)
    saved = {name: a for name, a in saved.items() if a is not None and name != "norms"}
    saved = {name: copied_to_mlx(a) if isinstance(a, np.ndarray) else a for name, a in saved.items()}
    return ops.backward(problem, floats, saved, cotangents)


def gradients_with_input_norm(problem: Problem, floats: Arrays, cotangents: Arrays) -> Arrays:
    """Return the gradients that the engine `ops` computes, if the input's product is normalised. `ops` runs only the
    steps; `before_steps` normalises the product before them. So the gradients of the steps come first, and MLX's own
    gradient of `before_steps` continues them to the arrays of the call. floats: these arrays, none of them
    quantized."""
    # MLX differentiates all arrays but `rest`, the lengths, which are integers.
    names = [name for name in floats if name != "lengths"]
    rest = {name: floats[name] for name in floats if name == "lengths"}

    # Return (cell, arrays) for the steps: x is the normalised product, and the cell does not normalise it again.
    # batch_first: engines get x as [T, B, I]. The third result is the packing, None.
    def of_steps(arrays: Arrays) -> tuple[AnyCell, Arrays]:
        return before_steps(problem.cell, arrays, packing=None, directions=problem.directions, batch_first=False)[:2]

    def before(*values: mx.array) -> list[mx.array]:
        _, found = of_steps(dict(zip(names, values, strict=True)) | rest)
        return [found[name] for name in found if name != "lengths"]

    cell, given = of_steps(floats)  # given: the arrays of the steps by name
    steps = problem._replace(cell=cell, names=tuple(given), packing=None)
    gradients = plain_gradients(steps, given, cotangents)
    d = [gradients[name] for name in given if name != "lengths"]
    return dict(zip(names, vjp(before, [floats[name] for name in names], d)[1], strict=True))


def evaluated_gradients(problem: Problem, floats: Arrays, chunked: Chunked, cotangents: Arrays, saved: Any) -> Arrays:
    """Return the gradients of the engine `ops`. They are computed and evaluated chunk by chunk to save memory, so MLX
    has no graph of them. If MLX asks for their derivatives (a second derivative), `plain_gradients` computes the same
    gradients again as one graph of all steps, which MLX differentiates."""
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
    """Return the same arrays, with a derivative rule for the quantized weights: asking MLX for the gradient of such a
    weight raises an error."""
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
    RuntimeError with the text `error`. `function` takes at least two arrays: for one array MLX would pass the rule for
    mx.vmap an array instead of a tuple."""

    def refuse(*arguments: object) -> NoReturn:
        raise RuntimeError(error)

    # The rule for mx.vmap: map `function` over the axes that MLX names, and refuse derivatives of the mapped function,
    # too. It returns the results and the axis of each along which it is mapped, 0. `function` may evaluate its
    # arguments, which must keep their graphs for an outer derivative.
    def vmap(values: tuple[mx.array, ...], axes: Any) -> tuple[tuple[mx.array, ...], tuple[int, ...]]:
        mapped = without_derivatives(mx.vmap(function, in_axes=axes), error)
        results = with_graphs_kept(lambda: mapped(*values))
        return results, (0,) * len(results)

    wrapped = custom_function(function)
    wrapped.vjp(refuse)
    wrapped.jvp(refuse)
    wrapped.vmap(vmap)
    return wrapped


def with_derivatives_of(
    plain: Callable[..., tuple[mx.array, ...]], function: Callable[..., tuple[mx.array, ...]]
) -> Any:
    """Return a function that computes its results with `function`, and the derivatives of these results with `plain`.
    Both compute the same results, but those of `function` have no graph, so MLX can differentiate only `plain`. Both
    take at least two arrays: for one array MLX would pass the rules below an array instead of a tuple."""

    # The rule for mx.vmap: map both functions over the axes that MLX names. Each result is mapped along its axis 0.
    # `function` evaluates its arguments, which must keep their graphs for an outer derivative.
    def vmap(values: tuple[mx.array, ...], axes: Any) -> tuple[tuple[mx.array, ...], tuple[int, ...]]:
        mapped = with_derivatives_of(mx.vmap(plain, in_axes=axes), mx.vmap(function, in_axes=axes))
        results = with_graphs_kept(lambda: mapped(*values))
        return results, (0,) * len(results)

    wrapped = custom_function(function)
    wrapped.vjp(lambda values, cotangents, _: tuple(vjp(plain, values, cotangents)[1]))
    wrapped.jvp(lambda values, tangents: tuple(tangents_of(plain, values, tangents)))
    wrapped.vmap(vmap)
    return wrapped


def tangents_of(
    function: Callable[..., Any], values: tuple[mx.array, ...], tangents: tuple[mx.array | None, ...]
) -> list[mx.array]:
    """Return the tangents of a function's results, computed from the tangents of those values that have one. values:
    the arguments of the function. tangents: one for each value, or None for a value that is a constant.

    MLX's default rule calls mx.jvp for all values, with zero tangents for the values that have none. If such a value
    is a copy of an array of an outer transformation, mx.jvp replaces it by the original array, and the outer
    derivative would silently be 0. Here the values without a tangent are constants, which mx.jvp does not touch.
    """
    moving = {n: tangent for n, tangent in enumerate(tangents) if tangent is not None}

    def of_moved(*changed: mx.array) -> list[mx.array]:
        now = list(values)
        for n, value in zip(moving, changed, strict=True):
            now[n] = value
        return list(function(*now))

    return mx.jvp(of_moved, [values[n] for n in moving], list(moving.values()))[1]
