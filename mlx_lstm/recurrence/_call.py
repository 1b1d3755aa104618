"""Run one call of a recurrence: check the caller's arguments, describe them as a `Problem`, choose an engine and run
it.

- sizes: (T, B, H, P), that is time steps, batch items, hidden units, width of h. D: directions.
- arrays: a dict by the names of the arguments (x, Wx, Wh, ...). Outputs are in a dict, too (h, c, gates, hT, cT).
- packing: the group size, bits and mode of quantized weights, or None. op: the name of the function in error texts.
- keep: a factor on the states before a step. hold: steps that leave the states unchanged. Engines do not support
  `hold`, so `Steps` (`_steps`) moves the other steps together before an engine runs.
- A cotangent is the gradient of an output, which the caller gives. A `Choice` is an engine's name and the reason why
  it was chosen. METAL_ENGINES: the engines whose kernels are tested before their first use.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from ..engines import METAL_ENGINES, Choice, choice, tuning
from ..engines.autodiff import run, run_backward
from ..engines.cells import AnyCell, LSTMCell
from ..engines.choice import NOWHERE, Stream, on
from ..engines.definitions import activate
from ..engines.input_norm import before_steps
from ..engines.packing import Packing, packed_names
from ..engines.problem import HALVES, Arrays, Problem, limits_in_effect, masks_differ
from ..engines.tracing import custom_function, have_values, is_transforming, vjp
from ..ground.checks import check_every, check_lengths, warn_once
from ._arguments import Sizes, check_call, check_sequences
from ._guard import gradient_refusal, guarded
from ._steps import Steps, check_flags, check_hold

Lengths = mx.array | Sequence[int] | None
"""The type of an option `lengths`."""

Hold = mx.array | Sequence[Sequence[bool]] | None
"""The type of an option `hold`."""

SLOW_WHEN_TRACED = """\
inside mx.compile, mx.vmap or an export the arrays have no values yet, which engine 'numpy' needs. On the CPU 'ops' \
takes over, a graph of every step: several times slower. mx.disable_compile() lets compiled functions run 'numpy'; \
engine='ops' says that the graph is wanted."""
"""The warning of a call on the CPU whose arrays have no values."""


class Wanted(NamedTuple):
    """What the caller of a recurrence wants. return_gates: the output `gates`. training: a forward pass that saves what
    a gradient needs. wants_last: the last states hT and cT. cotangents: in a gradient op the names of the outputs whose
    gradients the caller gives; None in a forward pass."""

    return_gates: bool
    training: bool
    wants_last: bool
    cotangents: tuple[str, ...] | None = None


class Call(NamedTuple):
    """The options of one call as the caller passed them, not yet checked against the arrays. An engine gets a `Problem`
    instead, which is checked and also describes the arrays.

    cell: the kind of cell with its options. reverse: the single direction runs from the last step to the first.
    lengths: the number of steps of each batch item. engine: the engine that the user forces, or None. stream: where MLX
    runs the call. batch_first: the batch axis is before the time axis in x, in the output sequences, in keep and in
    hold; `backward` does not support this option. hold: steps that leave the state unchanged. lengths_checked: the
    lengths need no check of their range, because this package computed them. checkpoint_every: save the states of every
    n-th step only, or "auto". one_step: x is one step, [batch, features]. op: the name of the layer in error texts; ""
    for the functions lstm, gru and rnn.
    """

    cell: AnyCell
    reverse: bool = False
    bidirectional: bool = False
    lengths: Lengths = None
    engine: str | None = None
    stream: Stream = None
    batch_first: bool = False
    hold: Hold = None
    lengths_checked: bool = False
    checkpoint_every: int | str | None = None
    one_step: bool = False
    op: str = ""

    @property
    def title(self) -> str:
        """Return the name of the function or layer that the user called, for error texts."""
        return self.op or self.cell.op

    def forward(
        self, weights_and_arrays: dict[str, Any], *, return_gates: bool, training: bool, wants_last: bool = True
    ) -> tuple[dict[str, Any], Choice]:
        """Run the forward pass. Return (outputs by name, the choice of the engine that ran). MLX can differentiate the
        outputs.

        weights_and_arrays: the arguments by name, such as x, Wx, h0. training: save what a gradient needs. The output
        `gates` is None without `return_gates`. The last states hT and cT are missing without `wants_last`.
        """
        op = self.title
        if self.checkpoint_every is not None:
            check_every(op, self.checkpoint_every)
        # flags: the options that `check_call` checks to be True or False.
        flags = {"return_gates": return_gates, "training": training, "reverse": self.reverse}
        arrays, packing, sizes = check_call(
            op, weights_and_arrays, self.cell, self.bidirectional, flags, self.batch_first, self.one_step
        )
        # NOWHERE: a context that does nothing, because the caller named no stream.
        with NOWHERE if self.stream is None else on(self.stream, op):
            # `plan_with_norm` chooses the engine. If this engine cannot normalise the input's product x Wx^T, then
            # `plan_with_norm` computes the product itself: it returns another call and other arrays.
            # steps: an object that applies `keep` and `hold` before and after the engine runs. inner: the arrays that
            # the engine gets.
            steps, call, inner = None, self, arrays
            if self.hold is not None or "keep" in arrays:
                steps, call = self.steps(arrays, sizes, op)
                inner = steps.to_engine(arrays)
            inner = call.with_lengths(inner, sizes, op)
            # With `hold` the engine does not run the held steps. So `steps.outputs` reads the last states of the call
            # from the sequences h and c, not from the engine.
            wanted = Wanted(return_gates, training, wants_last and self.hold is None)
            call, inner, problem, chosen = call.plan_with_norm(inner, sizes, packing, wanted)
            outputs = call.run(problem, inner, chosen)
            return outputs if steps is None else steps.outputs(outputs, arrays, wants_last), chosen

    def run(self, problem: Problem, arrays: Arrays, chosen: Choice) -> dict[str, Any]:
        """Run the chosen engine on the arrays of the call. Return {name: output}. MLX can differentiate the outputs."""
        # refusal: a function that tests the backward kernels when MLX asks for a gradient; None if they need no test.
        # If the test fails, an engine that the user forced raises an error; otherwise engine `ops` takes over.
        # problem.plain: nobody can ask for a gradient.
        refusal = None
        if chosen.engine in METAL_ENGINES and not problem.plain:
            refusal = partial(gradient_refusal, chosen, problem, self.engine is not None)
        return run(problem, arrays, chosen.engine, refusal)

    def backward(self, weights_and_arrays: dict[str, Any], saved: Arrays, cotangents: Arrays) -> Arrays:
        """Return the gradients of all float arrays of the call. Quantized weights have no gradient. saved: outputs of
        the forward pass, such as gates and c. cotangents: the gradients of outputs, by the outputs' names.

        Engines do not support `hold`, and take `keep` only as [T, B, D]. So a call with one of these options goes
        through `backward_of_steps`, which converts the arrays. T, B, D: steps, batch items, directions."""
        op = f"{self.cell.op}_gradients"
        flags = {"reverse": self.reverse}
        arrays, packing, sizes = check_call(op, weights_and_arrays, self.cell, self.bidirectional, flags)
        check_sequences(Problem(*sizes, self.cell, bidirectional=self.bidirectional), arrays, saved, cotangents, op)
        with on(self.stream, op):
            if self.hold is None and "keep" not in arrays:
                return self.run_backward(arrays, saved, cotangents, sizes, packing)
            return self.backward_of_steps(arrays, saved, cotangents, sizes, packing, op)

    def run_backward(
        self, arrays: Arrays, saved: Arrays, cotangents: Arrays, sizes: Sizes, packing: Packing | None
    ) -> Arrays:
        """Return the gradients of a call without `hold` (steps that leave the state unchanged); its array `keep` (a
        factor on the state) must already be [T, B, D]. saved: outputs of the forward pass. cotangents: the gradients of
        outputs, by name. T, B, D: steps, batch items, directions."""
        arrays = self.with_lengths(arrays, sizes, f"{self.cell.op}_gradients")
        # others: the arrays besides the arguments. `plan` checks whether they, too, have values (are not traced).
        names, others = tuple(cotangents), [*saved.values(), *cotangents.values()]
        # The first field, return_gates, is true only if the gates have a cotangent. wants_last is always true, because
        # hT and cT may have one.
        wanted = Wanted("gates" in names, training=True, wants_last=True, cotangents=names)
        problem, chosen = self.plan(arrays, others, sizes, packing, wanted)
        if "h" not in saved:
            saved = saved | {"h": h_of(problem, saved)}
        return run_backward(problem, arrays, saved, cotangents, chosen.engine)

    def backward_of_steps(
        self, arrays: Arrays, saved: Arrays, cotangents: Arrays, sizes: Sizes, packing: Packing | None, op: str
    ) -> Arrays:
        """Return the gradients of a call with the option `keep` (factors on the states before each step) or `hold` (the
        steps at which an item keeps its state).

        `Steps` translates the arrays of the call to those of the engine, and the engine's outputs back to those of the
        call. MLX differentiates both translations. Between them the engine is a custom function of MLX, and the
        engine's gradient op is its vjp rule.
        """
        (steps, call), x = self.steps(arrays, sizes, op), arrays["x"]
        # `steps.saved` returns the saved outputs in the engine's order of steps: the steps that ran come first.
        # Without any cotangent all gradients are 0: use a cotangent of zeros for h. sizes[3]: P, the width of h in one
        # direction.
        width = (2 if self.bidirectional else 1) * sizes[3]
        saved, cotangents = steps.saved(saved), cotangents or {"h": mx.zeros((*x.shape[:2], width), x.dtype)}
        # The gradient of `keep` at a held step reads h, which the caller need not pass.
        if "h" not in saved:
            saved |= {"h": h_of(Problem(*sizes, self.cell, bidirectional=self.bidirectional), saved)}
        quantized = packed_names(arrays)
        names = [n for n, array in arrays.items() if mx.issubdtype(array.dtype, mx.floating) and n not in quantized]
        # `shown` lists the engine's outputs that get a cotangent. With `hold` the last states hT and cT are read from
        # h and c, so their cotangents become part of those of h and c: name[0] is the "h" of "hT". The dict, with
        # values 0 that nobody reads, removes names that occur twice and preserves the order.
        shown = tuple({name[0] if self.hold is not None and name != "gates" else name: 0 for name in cotangents})
        # like: {name: output} for the outputs in `shown`. `saved` has h, c and gates, not hT and cT. Only the shapes
        # of these two are needed, so their cotangents, which have the same shapes, stand in for them.
        like = {name: saved.get(name, cotangents.get(name)) for name in shown}

        # The outputs of the call as a function of its float arrays, which MLX differentiates below.
        def outputs_of(*values: mx.array) -> list[mx.array]:
            changed = arrays | dict(zip(names, values, strict=True))
            inner = steps.to_engine(changed)
            # A custom function of MLX in place of the engine's forward pass. It computes nothing: it returns the
            # outputs that an earlier forward pass has saved. Its vjp rule `pull` calls the engine's gradient op.
            engine = custom_function(lambda *values: tuple(like.values()))

            # primals: the arguments of `engine`. outputs: its results, which MLX passes and `pull` does not need.
            @engine.vjp
            def pull(primals: Any, engine_cotangents: Any, outputs: Any) -> tuple[mx.array, ...]:
                engine_arrays = dict(zip(inner, primals, strict=True))
                by_name = dict(zip(shown, engine_cotangents, strict=True))
                gradients = call.run_backward(engine_arrays, saved, by_name, sizes, packing)
                return tuple([gradients[n] if n in gradients else mx.zeros_like(engine_arrays[n]) for n in inner])

            engine_outputs = dict(zip(shown, engine(*inner.values()), strict=True))
            outputs = steps.outputs(engine_outputs, changed, wants_last=True)
            return [outputs[name] for name in cotangents]

        gradients = vjp(outputs_of, [arrays[name] for name in names], list(cotangents.values()))[1]
        return dict(zip(names, gradients, strict=True))

    def steps(self, arrays: Arrays, sizes: Sizes, op: str) -> tuple[Steps, "Call"]:
        """Check the values of the options `keep` (factors on the carried states) and `hold` (steps at which the states
        stay unchanged). Return (steps, call): an object that applies these options before and after an engine runs,
        and a copy of this call without `hold`, which an engine can run."""
        if "keep" in arrays:  # floats may have any values, integers must be 0 and 1
            check_flags(op, "keep", arrays["keep"])
        T, B = sizes[:2]
        lengths = whole_lengths(op, self.lengths, B, T, checked=self.lengths_checked)
        hold = None if self.hold is None else check_hold(op, self.hold, T, B, self.batch_first)
        backwards = (False, True) if self.bidirectional else (self.reverse,)  # whether each direction runs in reverse
        steps = Steps(T, B, backwards, self.batch_first, lengths, hold)
        if hold is not None:  # an engine runs only the steps that are not held
            lengths = steps.live().astype(mx.int32).sum(axis=0)
        return steps, self._replace(hold=None, lengths=lengths, lengths_checked=True)

    def with_lengths(self, arrays: Arrays, sizes: Sizes, op: str) -> Arrays:
        """Check the lengths of the call. Return the arrays with the lengths added, if the call has any."""
        lengths = whole_lengths(op, self.lengths, sizes[1], sizes[0], checked=self.lengths_checked)
        return arrays if lengths is None else arrays | {"lengths": lengths}

    def plan_with_norm(
        self, arrays: Arrays, sizes: Sizes, packing: Packing | None, wanted: Wanted
    ) -> tuple["Call", Arrays, Problem, Choice]:
        """Return (call, arrays, problem, choice): the call and its arrays as the engine takes them, its description,
        and the choice of the engine. `numpy` computes layer normalisation itself. For other engines `with_norm` first
        computes the part that needs no state, such as the normalisation of the input's product x Wx^T."""
        if self.cell.norm is None:  # []: no other arrays, which only a gradient op has
            return self, arrays, *self.plan(arrays, [], sizes, packing, wanted)
        choice.check_engine(self.title, self.engine)
        # `numpy` runs on the CPU only. So on the CPU first plan the unchanged call, as `numpy` takes it. If `plan`
        # chooses another engine nevertheless, plan the changed call below.
        if self.engine in (None, "numpy") and choice.current_device() == "cpu":
            problem, chosen = self.plan(arrays, [], sizes, packing, wanted)
            if chosen.engine == "numpy":
                return self, arrays, problem, chosen
        call, arrays, packing = self.with_norm(arrays, packing)
        return call, arrays, *call.plan(arrays, [], sizes, packing, wanted)

    def with_norm(self, arrays: Arrays, packing: Packing | None) -> tuple["Call", Arrays, Packing | None]:
        """Compute the part of layer normalisation that comes before the steps. Return the (call, arrays, packing) that
        are left for the engine. If the input's product x Wx^T is normalised, the result replaces x: then the new arrays
        have no Wx, and the cell of the new call normalises only h Wh^T."""
        directions = 2 if self.bidirectional else 1
        cell, arrays, packing = before_steps(self.cell, arrays, packing, directions, self.batch_first)
        return self._replace(cell=cell), arrays, packing

    def plan(
        self, arrays: Arrays, others: list[mx.array], sizes: Sizes, packing: Packing | None, wanted: Wanted
    ) -> tuple[Problem, Choice]:
        """Return the problem that describes this call, and the choice of its engine.

        Arrays are evaluated only for inference, or if the engine `numpy` may run, which needs their values. others:
        further arrays that the engine would read, besides `arrays`.
        """
        return_gates, training, wants_last, cotangents = wanted
        dtype, device = arrays["x"].dtype, choice.current_device()
        # free: no transformation of MLX (grad, compile, vmap) is running, so nobody can ask for a gradient. traced: MLX
        # traces the arrays, so they have no values. Only inference and the engine `numpy` use these two flags. For all
        # other calls both stay False, because finding out would evaluate the arrays.
        free = traced = False
        if not training or (device == "cpu" and choice.may_be_numpy(self.engine)):
            values = [*arrays.values(), *others]
            free = not is_transforming()
            # A small step in training runs on the engine `ops`, which only builds a graph. Its arrays are not evaluated
            # here, because that takes time.
            small = training and self.engine is None and choice.is_small_step(self.cell, sizes[0], sizes[1], sizes[2])
            # transforming=True: a transformation is running (`free` is False), so the arrays must keep their graphs.
            traced = not free and not small and not have_values(values, transforming=True)
        # masks_differ: each step has its own mask. This is also so with `keep`, because engines multiply it into the
        # mask.
        problem = Problem(
            *sizes,
            cell=with_limits_of(self.cell, dtype),
            dtype=dtype,
            names=tuple(arrays),
            masks_differ="keep" in arrays or ("mask" in arrays and masks_differ(arrays)),
            reverse=self.reverse,
            bidirectional=self.bidirectional,
            batch_first=self.batch_first,
            training=training and not free,
            plain=free or (traced and not training),
            return_gates=return_gates,
            wants_last=wants_last,
            cotangents=cotangents,
            packing=packing,
            limits=tuning.on_this_gpu(limits_in_effect.get()),
        )
        op = self.title if cotangents is None else f"{self.cell.op}_gradients"
        metal = choice.has_metal()  # whether MLX can run Metal kernels here
        place = choice.Place(device, metal, traced)
        # best(refused=...): choose an engine that is not among the refused ones, whose kernels failed their test.
        # table: measured or predicted times, which tell the faster Metal engine. divided(problem, engine): add to the
        # problem how this engine divides the sequence in time. every: the option `checkpoint_every`, which only a
        # gradient uses. problem.plain: nobody can ask for a gradient.
        table = tuning.current() if metal else tuning.PREDICTED
        best = partial(choice.decide, problem, table, op, self.engine, place)
        chosen = best()
        every = None if problem.plain else self.checkpoint_every
        divided = partial(choice.divide, every=every)
        problem = divided(problem, chosen.engine)
        if chosen.engine in METAL_ENGINES:
            chosen, problem = guarded(chosen, problem, best, divided)
        elif traced and device == "cpu" and self.engine is None:
            warn_once(SLOW_WHEN_TRACED)
        return problem, chosen


def with_limits_of(cell: AnyCell, dtype: mx.Dtype) -> AnyCell:
    """Return the cell. If its clips stop gradients, round their limits to the 16-bit dtype of the arrays: the backward
    pass finds a clipped number, which was saved in 16 bits, because it equals the limit."""
    if not isinstance(cell, LSTMCell) or cell.clip_gradient == "through" or dtype not in HALVES:
        return cell
    limits = {"cell_clip": cell.cell_clip, "projection_clip": cell.projection_clip}
    return cell._replace(**{name: None if n is None else mx.array(n, dtype).item() for name, n in limits.items()})


def whole_lengths(op: str, lengths: Lengths, batch: int, longest: int, *, checked: bool = False) -> mx.array | None:
    """Check the option `lengths`, the number of steps of each batch item, at most `longest`. Return an int32 array
    [batch] or None. The range is not checked if `checked`, or for an array without values (inside mx.compile)."""
    if lengths is None:
        return None
    unknown = isinstance(lengths, mx.array) and (checked or not have_values([lengths]))
    return check_lengths(op, lengths, batch, longest, traced=unknown)


@property
def engine_used(layer: object) -> Choice | None:
    """The engine that ran in the layer's latest call, with the reason: `Choice(engine, reason)`. None before the
    first call.

    For a compiled function it is the engine chosen while MLX traced the function. A layer stores `_engine_used`
    directly in its `vars`, because MLX would count a tuple attribute among the parameters.
    """
    return getattr(layer, "_engine_used", None)


def given(**arrays: Any) -> dict[str, Any]:
    """Return a dict of the arguments that are not None. x and Wh are always in it: if one of them is None, a later
    check raises an error that names it."""
    return {name: array for name, array in arrays.items() if array is not None or name in ("x", "Wh")}


def h_of(problem: Problem, saved: Arrays) -> mx.array:
    """Compute the output h [T, B, D H] for a caller who did not pass it (D: directions). For an LSTM without projection
    it is computed from the gates and c in `saved`, for a plain RNN from the preactivations. T, B, H: steps, batch
    items, hidden units."""
    cell, D, H, gates = problem.cell, problem.directions, problem.H, saved["gates"]
    if cell.op == "rnn":  # its output `gates` is the preactivation
        return activate(cell.activations[-1], gates)
    c = saved["c"]
    # h = o output(c), with the output gate o and the last activation `output`. blocks: the gate o of each direction,
    # [T, B, D, H].
    blocks = gates.reshape(*gates.shape[:2], D, 4 * H)[..., cell.block("o", H)]
    return (blocks.reshape(c.shape) * activate(cell.activations[-1], c)).astype(gates.dtype)
