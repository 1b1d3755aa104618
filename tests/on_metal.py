"""The library as on a Mac: its Metal shaders run on the GPU of this one, elsewhere on the emulator."""

from contextlib import ExitStack, contextmanager
from typing import NamedTuple
from unittest.mock import patch

import mlx.core as mx
import pytest
from cases import GPU, METAL
from metal_emulator import emulated_metal
from metal_emulator.dropin import EmulatedKernel

from mlx_lstm.engines import METAL_ENGINES as ENGINES
from mlx_lstm.engines import choice, choose
from mlx_lstm.engines.cells import GRUCell, LSTMCell, RNNCell
from mlx_lstm.engines.metal import kernel as kernels
from mlx_lstm.recurrence import _guard
from mlx_lstm.testing.cases import EVERY_OPTION, at_batch

WEIGHTS = ("Wh", "weights", "arranged", "peephole", "bhn")


@contextmanager
def on_metal(*, guarded=False, **emulator):
    """Yields the log of launches. On the emulator, of which the others are options, a finding raises, and the stream in
    effect counts as the GPU's. On a Mac the GPU has its own order of threads, and finds nothing. Kernels have a trial
    before only if `guarded`."""
    if GPU:
        with patch.object(_guard, "is_real", lambda: guarded), mx.stream(METAL), logged_metal() as log:
            yield log
        return
    caches = [kernels.forget]
    with (
        patch.object(_guard, "is_real", lambda: guarded),
        patch.object(choice, "current_device", lambda: "gpu"),
        emulated_metal(pretend_available=True, on_enter=caches, **emulator) as log,
    ):
        yield log


class Launch(NamedTuple):
    """What the log of a GPU has in common with that of the emulator."""

    name: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    source: str


class LoggedKernel(EmulatedKernel):
    """MLX's own kernel, not emulated: its launches are in a log, and its outputs start as NaN."""

    def __init__(self, build, log, **definition):
        super().__init__(**definition)
        self.own, self.log = build(**definition), log

    def __call__(self, *, inputs, **call):
        text = self._capture(inputs, call).source
        self.log.append(Launch(self.definition["name"], tuple(call["grid"]), tuple(call["threadgroup"]), text))
        # Halves are kept as integers of 16 bits, of which the largest is a NaN.
        poison = 0xFFFF if mx.uint16 in call["output_dtypes"] else float("nan")
        return self.own(inputs=inputs, **call, init_value=poison)


@contextmanager
def logged_metal():
    """Yields the log of what `mx.fast.metal_kernel` launches."""
    log, build = [], mx.fast.metal_kernel
    kernels.forget()
    try:
        with patch.object(mx.fast, "metal_kernel", lambda **definition: LoggedKernel(build, log, **definition)):
            yield log
    finally:
        kernels.forget()


def pretend():
    """The rest of this process runs as on a Mac, but for what is in an `mx.stream`; for processes that tests start."""
    on_cpu, stream = [], mx.stream

    @contextmanager
    def leaving(where):
        on_cpu.append(where)
        with stream(mx.cpu):
            yield
        on_cpu.pop()

    pretended.enter_context(on_metal())
    pretended.enter_context(patch.object(choice, "current_device", lambda: "cpu" if on_cpu else "gpu"))
    pretended.enter_context(patch.object(mx, "stream", leaving))
    pretended.enter_context(patch.object(mx, "set_default_device", lambda device: None))


pretended = ExitStack()


# --- What to run -----------------------------------------------------------------------------------------------------

# The batch size selects the kernels: rows per threadgroup, and whether a product is computed by lanes, by tiles or in
# matrices.
BATCHES = (1, 2, 9)


def options_at(option, B):
    """Return an entry of EVERY_OPTION for a batch of B."""
    return at_batch(EVERY_OPTION[option], B)


def can_run(engine, options):
    """Return whether `choose` lets this engine run these options on a Mac."""
    cell = {"lstm": LSTMCell(), "gru": GRUCell(reset=options.get("reset", "after")), "rnn": RNNCell()}
    arguments = {name: options.get(name, False) for name in ("bidirectional", "projection")}
    arguments |= {"cell": cell[options.get("op", "lstm")], "device": "gpu", "metal": True, "traced": False}
    try:
        return bool(choose(sizes=(4, 2, 3, 2), dtype=mx.float32, requested=engine, **arguments))
    except ValueError:
        return False


def pairs(table):
    """Return (engine, name) for every entry of a table of options that the engine runs."""
    return [(engine, name) for engine in ENGINES for name in table if can_run(engine, table[name])]


def in_turns(cases, choices, others=False):
    """Return (*case, choice) for each case, a tuple; the choices take turns. With `others` the other choices follow,
    marked as slow."""
    turns = [(case, n % len(choices), k) for n, case in enumerate(cases) for k in range(len(choices))]
    default = [(*case, choices[k]) for case, turn, k in turns if k == turn]
    slow = [pytest.param(*case, choices[k], marks=pytest.mark.slow) for case, turn, k in turns if k != turn]
    return default + (slow if others else [])


def over_engines(table, choices):
    """Return (engine, name, choice): over the two engines each name of the table meets every choice, and each engine
    leaves out one choice per name."""
    turns = [(n, k, e) for n in range(len(table)) for k in range(len(choices) - 1) for e in range(len(ENGINES))]
    names = list(table)
    triples = [(ENGINES[e], names[n], choices[(n + k + e) % len(choices)]) for n, k, e in turns]
    return [triple for triple in triples if can_run(triple[0], table[triple[1]])]


def merged(case, option):
    """Return the options of both, or None if they set an argument to different values. Activations may differ as long
    as they differ from the default ones at different gates."""
    both = case | option
    for name in case.keys() & option.keys():
        if case[name] == option[name]:
            continue
        if name != "activations":
            return None
        default = LSTMCell().activations if len(case[name]) == 5 else GRUCell().activations
        gates = list(zip(default, case[name], option[name], strict=True))
        if any(usual not in (one, other) and one != other for usual, one, other in gates):
            return None
        both[name] = tuple(other if one == usual else one for usual, one, other in gates)
    return both


def crossed(table, fewest=7):
    """Return cases that have several options of the table each, {"gru_both_3": {"op": "gru", "reset": ..., ...}}.

    Most options change a kernel's text, so a case for each option takes a compilation for each. Here every option of
    the table goes to one case: the smallest one that agrees with it. A cell has at least `fewest` cases, since the
    table has so many shapes of a mask, and a GRU with reset="before" at least 3. The first case has no option.
    """
    groups = {}
    for option in table.values():
        kind = option.get("op", "lstm") + "_before" * ("reset" in option) + "_both" * ("bidirectional" in option)
        group = groups.setdefault(kind, [])
        agrees = [n for n, case in enumerate(group) if (n or "reset" in option) and merged(case, option)]
        if len(group) < (3 if "reset" in option else fewest) or not agrees:
            group.append(dict(option))
        else:
            smallest = min(agrees, key=lambda n: len(group[n]))
            group[smallest] = merged(group[smallest], option)
    return {f"{kind}_{n}": case for kind, group in groups.items() for n, case in enumerate(group)}


CROSSED = {
    (engine, name): case
    for engine in ENGINES
    for name, case in crossed({key: value for key, value in EVERY_OPTION.items() if can_run(engine, value)}).items()
}
"""Every option that an engine runs, crossed with others: its cases by (engine, name)."""
