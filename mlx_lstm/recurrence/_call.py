"""From a call of a recurrence to an engine."""

from collections.abc import Sequence
from functools import partial
from threading import local
from typing import Any, NamedTuple

import mlx.core as mx

from ..checks import check_every, check_flag, check_lengths, warn_once
from ..engines import METAL_ENGINES, Choice, choice, tuning
from ..engines.autodiff import run, run_backward
from ..engines.cells import Cell, RNNCell
from ..engines.choice import Stream, on
from ..engines.chunks import Chunks, chunks_of
from ..engines.ops.cells import activate
from ..engines.packing import Packing, packed_names
from ..engines.problem import Arrays, Cut, Problem, masks_differ
from ..engines.tracing import are_free, custom_function, have_values
from ._arguments import Sizes, check_arrays, check_sequences, unpacked
from ._form import Form
from ._guard import guarded
from ._steps import Steps, check_hold

Lengths = mx.array | Sequence[int] | None
Hold = mx.array | Sequence[Sequence[bool]] | None

SLOW_WHEN_TRACED = """\
inside mx.compile, mx.vmap or an export the arrays have no values yet, which engine 'numpy' needs. On the CPU 'ops' \
takes over, a graph of every step: several times slower. mx.disable_compile() lets compiled functions run 'numpy'; \
engine='ops' says that the graph is wanted."""

_latest = local()
"""`choice`: of this thread's latest call."""


class Call(NamedTuple):
    """A call's cell and options, as the caller gave them: checks them with the arrays, chooses an engine and runs.

    With `batch_first`, which only `forward` knows, x and the sequences it returns are [B, T, .], keep and hold [B, T].
    `checked`: whether the lengths are ours. With `one_step` x is [B, I], without an axis of time.
    """

    cell: Cell
    reverse: bool = False
    bidirectional: bool = False
    lengths: Lengths = None
    engine: str | None = None
    stream: Stream = None
    batch_first: bool = False
    hold: Hold = None
    checked: bool = False
    checkpoint_every: int | str | None = None
    one_step: bool = False

    def forward(
        self, given: dict[str, Any], *, return_gates: bool, training: bool, wants_last: bool = True
    ) -> dict[str, Any]:
        """The outputs, with their gradient; gates None unless wanted, hT and cT missing unless wanted. `given`: arrays
        and quantized weights."""
        op = self.cell.op
        arrays, packing = unpacked(op, given)
        check_flag(op, "return_gates", return_gates)
        check_flag(op, "training", training)
        check_every(op, self.checkpoint_every)
        sizes, wanted = self.check(arrays, op, packing), Wanted(training, return_gates, wants_last)
        with on(self.stream, op):
            if self.hold is None and "keep" not in arrays:
                return self.run(arrays, sizes, packing, wanted)
            steps, call = self.steps(sizes, op)
            # Of held steps the sequences say the last states.
            wanted = wanted._replace(wants_last=wants_last and self.hold is None)
            found = call.run(steps.to_engine(arrays), sizes, packing, wanted)
            return steps.outputs(found, arrays, wants_last)

    def run(self, arrays: Arrays, sizes: Sizes, packing: Packing | None, wanted: "Wanted") -> dict[str, Any]:
        """`forward`, of what an engine knows."""
        chosen = self.choose(arrays, [], sizes, packing, wanted)
        problem = self.problem(sizes, packing, chosen, wanted.return_gates)
        how = {"plain": chosen.plain, "batch_first": self.batch_first, "wants_last": wanted.wants_last}
        return run(problem, arrays, chosen.engine, **how, chunks=chosen.chunks)

    def backward(self, given: dict[str, Any], saved: Arrays, cotangents: Arrays) -> Arrays:
        """The gradients of the arrays; quantized weights have none."""
        op = f"{self.cell.op}_gradients"
        arrays, packing = unpacked(op, given)
        sizes = self.check(arrays, op, packing)
        check_sequences(self.problem(sizes, packing), arrays, saved, cotangents, op)
        with on(self.stream, op):
            if self.hold is None and "keep" not in arrays:
                return self.run_backward(arrays, saved, cotangents, sizes, packing)
            return self.backward_of_steps(arrays, saved, cotangents, sizes, packing, op)

    def run_backward(
        self, arrays: Arrays, saved: Arrays, cotangents: Arrays, sizes: Sizes, packing: Packing | None
    ) -> Arrays:
        """`backward`, of what an engine knows."""
        names = tuple(cotangents)
        wanted = Wanted(training=True, return_gates="gates" in names, wants_last=True, cotangents=names)
        chosen = self.choose(arrays, [*saved.values(), *cotangents.values()], sizes, packing, wanted)
        problem = self.problem(sizes, packing, chosen)
        if "h" not in saved:
            saved = saved | {"h": h_of(problem, saved)}
        return run_backward(problem, arrays, saved, cotangents, chosen.engine)

    def backward_of_steps(
        self, arrays: Arrays, saved: Arrays, cotangents: Arrays, sizes: Sizes, packing: Packing | None, op: str
    ) -> Arrays:
        """`backward` with keep or hold: through what they make of the engine's arrays and outputs, too."""
        (steps, call), x = self.steps(sizes, op), arrays["x"]
        width = self.problem(sizes, packing).directions * sizes[3]
        saved, cotangents = steps.saved(saved), cotangents or {"h": mx.zeros((*x.shape[:2], width), x.dtype)}
        without = packed_names(arrays)
        names = [n for n, array in arrays.items() if mx.issubdtype(array.dtype, mx.floating) and n not in without]
        shown = tuple({name[0] if self.hold is not None and name != "gates" else name: 0 for name in cotangents})
        like = {name: saved.get(name, cotangents.get(name)) for name in shown}

        def outputs_of(*values: mx.array) -> list[mx.array]:
            given = arrays | dict(zip(names, values, strict=True))
            inner = steps.to_engine(given)
            engine = custom_function(lambda *values: tuple(like.values()))

            @engine.vjp
            def pull(primals: Any, given: Any, outputs: Any) -> tuple[mx.array, ...]:
                arrays, given = dict(zip(inner, primals, strict=True)), dict(zip(shown, given, strict=True))
                gradients = call.run_backward(arrays, saved, given, sizes, packing)
                return tuple([gradients[n] if n in gradients else mx.zeros_like(arrays[n]) for n in inner])

            found = dict(zip(shown, engine(*inner.values()), strict=True))
            outputs = steps.outputs(found, given, wants_last=True)
            return [outputs[name] for name in cotangents]

        found = mx.vjp(outputs_of, [arrays[name] for name in names], list(cotangents.values()))[1]
        return dict(zip(names, found, strict=True))

    def steps(self, sizes: Sizes, op: str) -> tuple[Steps, "Call"]:
        """What keep and hold make of this call's steps, and the call of an engine that they leave."""
        T, B = sizes[:2]
        lengths = self.whole_lengths(op, sizes)
        hold = None if self.hold is None else check_hold(op, self.hold, T, B, self.batch_first)
        backwards = (False, True) if self.bidirectional else (self.reverse,)
        steps = Steps(T, B, backwards, self.batch_first, lengths, hold)
        return steps, self._replace(hold=None, lengths=steps.engine_lengths(), checked=True)

    def whole_lengths(self, op: str, sizes: Sizes) -> mx.array | None:
        """The lengths, found right."""
        return whole_lengths(op, self.lengths, sizes[1], sizes[0], checked=self.checked)

    def check(self, arrays: Arrays, op: str, packing: Packing | None) -> Sizes:
        """(T, B, H, P), once arrays and flags are found right."""
        check_flag(op, "reverse", self.reverse)
        check_flag(op, "bidirectional", self.bidirectional)
        return check_arrays(op, arrays, self.cell, self.bidirectional, self.batch_first, packing, self.one_step)

    def problem(
        self, sizes: Sizes, packing: Packing | None, chosen: "Chosen | None" = None, return_gates: bool = False
    ) -> Problem:
        """What the engine is told."""
        reverse = self.reverse and not self.bidirectional
        lengths, training, cut = (None, True, None) if chosen is None else (chosen.lengths, chosen.training, chosen.cut)
        return Problem(*sizes, self.cell, reverse, lengths, return_gates, training, self.bidirectional, cut, packing)

    def choose(
        self, arrays: Arrays, others: list[mx.array], sizes: Sizes, packing: Packing | None, wanted: "Wanted"
    ) -> "Chosen":
        """What runs the call. Nothing is evaluated for an engine that trains and does without."""
        (T, B, H, _), dtype = sizes, arrays["x"].dtype
        op = self.cell.op if wanted.cotangents is None else f"{self.cell.op}_gradients"
        lengths = self.whole_lengths(op, sizes)
        metal, on_cpu = mx.metal.is_available(), choice.current_device() == "cpu"
        free = traced = False
        if not wanted.training or (on_cpu and self.engine in (None, "numpy")):
            seen = [*arrays.values(), *others, *([] if lengths is None else [lengths])]
            free = are_free(seen)
            traced = not free and not have_values(seen)
        best = partial(
            choice.choose,
            sizes=(T, B, arrays["x"].shape[-1], H),
            dtype=dtype,
            cell=self.cell,
            bidirectional=self.bidirectional,
            projection="Wp" in arrays,
            device="cpu" if on_cpu else "gpu",
            metal=metal,
            traced=traced,
            requested=self.engine,
            table=tuning.current() if metal else tuning.PREDICTED,
            op=op,
            packing=packing,
        )
        found, plain, training = best(), free or (traced and not wanted.training), wanted.training and not free
        cut = tuning.cut(dtype, B) if found.engine == "fused" else None
        chosen = Chosen(lengths, found.engine, training, plain, cut, self.chunks(found.engine, sizes, plain, wanted))
        if found.engine in METAL_ENGINES:
            found = guarded(found, self.form(arrays, sizes, packing, wanted, chosen), best)
            if found.engine != chosen.engine:
                chosen = chosen._replace(engine=found.engine, chunks=self.chunks(found.engine, sizes, plain, wanted))
        elif traced and on_cpu and self.engine is None:
            warn_once(SLOW_WHEN_TRACED)
        _latest.choice = found
        return chosen

    def chunks(self, engine: str, sizes: Sizes, plain: bool, wanted: "Wanted") -> Chunks | None:
        """How the steps are cut. A gradient op has all that another forward pass would give."""
        if wanted.cotangents is not None:
            return None
        T, B, H, _ = sizes
        return chunks_of(engine, T, B, self.cell.gates * H, None if plain else self.checkpoint_every)

    def form(self, arrays: Arrays, sizes: Sizes, packing: Packing | None, wanted: "Wanted", chosen: "Chosen") -> Form:
        """What selects a Metal engine's kernels."""
        return Form(
            *sizes,
            cell=self.cell,
            dtype=arrays["x"].dtype,
            names=tuple(arrays),
            masks="keep" in arrays or masks_differ(arrays),
            lengths=chosen.lengths is not None,
            reverse=self.reverse and not self.bidirectional,
            bidirectional=self.bidirectional,
            batch_first=self.batch_first,
            training=chosen.training,
            plain=chosen.plain,
            cut=chosen.cut,
            return_gates=wanted.return_gates,
            wants_last=wanted.wants_last,
            cotangents=wanted.cotangents,
            chunks=chosen.chunks,
            packing=packing,
        )


class Wanted(NamedTuple):
    """What is asked of a call: that a gradient may follow; which outputs; of a gradient op those that have one."""

    training: bool
    return_gates: bool
    wants_last: bool
    cotangents: tuple[str, ...] | None = None


class Chosen(NamedTuple):
    """What runs a call: the lengths; the engine's word; whether it keeps what a gradient needs; whether its graph is
    plain, as nobody can ask for a gradient; how `fused` cuts the problem; how the steps are cut."""

    lengths: mx.array | None
    engine: str
    training: bool
    plain: bool
    cut: Cut | None = None
    chunks: Chunks | None = None


def whole_lengths(op: str, lengths: Lengths, batch: int, longest: int, *, checked: bool = False) -> mx.array | None:
    """A caller's lengths as int32 [batch], found right. Of arrays without values, and those `checked`, the range goes
    unseen."""
    if lengths is None:
        return None
    unknown = isinstance(lengths, mx.array) and (checked or not have_values([lengths]))
    return check_lengths(op, lengths, batch, longest, traced=unknown)


@property
def engine_used(layer: object) -> Choice | None:
    """The engine of the layer's latest call and why it was that one, `Choice(engine, reason)`; None before the first.
    In a compiled function it is what its tracing found."""
    return getattr(layer, "_engine_used", None)


def note_engine(layer: object) -> None:
    """Let `engine_used` of a layer say what this thread's latest call ran."""
    object.__setattr__(layer, "_engine_used", _latest.choice)  # past MLX, which would count a tuple as a state


def given(**arrays: Any) -> dict[str, Any]:
    """The arrays that are not None; x and Wh have to be there, which is checked later."""
    return {name: array for name, array in arrays.items() if array is not None or name in ("x", "Wh")}


def h_of(problem: Problem, saved: Arrays) -> mx.array:
    """[T, B, D H]: h out of an LSTM's gates and c, where nothing is projected, or of a plain cell's preactivations."""
    cell, D, H, gates = problem.cell, problem.directions, problem.H, saved["gates"]
    if isinstance(cell, RNNCell):
        return activate(cell.act, gates)
    c = saved["c"]
    blocks = gates.reshape(*gates.shape[:2], D, 4 * H)[..., cell.block("o", H)]
    return (blocks.reshape(c.shape) * activate(cell.activation("output"), c)).astype(gates.dtype)
