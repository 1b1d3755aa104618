"""Run the library as on a Mac. The Metal shaders run on the GPU if this machine is a Mac, and in the emulator
otherwise."""

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
    """Run the Metal engines inside the context. Yield the log of launches.

    guarded: whether a kernel has a trial before its first use, as in production.

    In the emulator a finding raises an error, and the stream in effect counts as the GPU's; `emulator` holds options
    of `emulated_metal`. On a Mac these options have no effect: the GPU chooses the order of threads and reports no
    findings.
    """
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
    """A launch on a real GPU, with the fields that it shares with the emulator's log."""

    name: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    source: str


class LoggedKernel(EmulatedKernel):
    """MLX's own Metal kernel, not emulated. Each launch is added to a log, and its outputs are NaN before the kernel
    writes them."""

    def __init__(self, build, log, **definition):
        super().__init__(**definition)
        self.own, self.log = build(**definition), log

    def __call__(self, *, inputs, **call):
        text = self._capture(inputs, call).source
        self.log.append(Launch(self.definition["name"], tuple(call["grid"]), tuple(call["threadgroup"]), text))
        # float16 outputs are stored as 16-bit integers; 0xFFFF is a NaN in both 16-bit dtypes.
        poison = 0xFFFF if mx.uint16 in call["output_dtypes"] else float("nan")
        return self.own(inputs=inputs, **call, init_value=poison)


@contextmanager
def logged_metal():
    """Log the launches of all kernels that `mx.fast.metal_kernel` builds inside the context. Yield the log."""
    log, build = [], mx.fast.metal_kernel
    kernels.forget()
    try:
        with patch.object(mx.fast, "metal_kernel", lambda **definition: LoggedKernel(build, log, **definition)):
            yield log
    finally:
        kernels.forget()


def pretend():
    """Make the rest of this process run as on a Mac, except inside an `mx.stream` context, which counts as the CPU.
    For processes that tests start."""
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
    """Return an entry of EVERY_OPTION with its shapes set for a batch of B."""
    return at_batch(EVERY_OPTION[option], B)


def can_run(engine, options):
    """Return whether `choose` allows this engine with these options on a Mac."""
    cell = {"lstm": LSTMCell(), "gru": GRUCell(reset=options.get("reset", "after")), "rnn": RNNCell()}
    arguments = {name: options.get(name, False) for name in ("bidirectional", "projection")}
    arguments |= {"cell": cell[options.get("op", "lstm")], "device": "gpu", "metal": True, "traced": False}
    try:
        return bool(choose(sizes=(4, 2, 3, 2), dtype=mx.float32, requested=engine, **arguments))
    except ValueError:
        return False


def pairs(table):
    """Return (engine, name) for each engine and each entry of a table of options that the engine can run."""
    return [(engine, name) for engine in ENGINES for name in table if can_run(engine, table[name])]


def in_turns(cases, choices, others=False):
    """Combine each case with one choice, cycling through the choices. Return (*case, choice) for each case; a case
    is a tuple.

    With `others`, add the remaining combinations of case and choice, marked as slow.
    """
    turns = [(case, n % len(choices), k) for n, case in enumerate(cases) for k in range(len(choices))]
    default = [(*case, choices[k]) for case, turn, k in turns if k == turn]
    slow = [pytest.param(*case, choices[k], marks=pytest.mark.slow) for case, turn, k in turns if k != turn]
    return default + (slow if others else [])


def over_engines(table, choices):
    """Return (engine, name, choice) for the table's names and the choices. Each engine leaves out one choice per
    name; together the two engines cover every choice."""
    turns = [(n, k, e) for n in range(len(table)) for k in range(len(choices) - 1) for e in range(len(ENGINES))]
    names = list(table)
    triples = [(ENGINES[e], names[n], choices[(n + k + e) % len(choices)]) for n, k, e in turns]
    return [triple for triple in triples if can_run(triple[0], table[triple[1]])]


def merged(case, option):
    """Merge two sets of options. Return None if they set an argument to different values.

    Activations are compared gate by gate: two sets agree if they do not replace the default activation of the same
    gate by different ones.
    """
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
    """Combine the table's options into few cases. Return {"gru_both_3": {"op": "gru", "reset": ..., ...}}.

    Most options change a kernel's text, so a case per option would cost a compilation per option. Here each option
    of the table is added to one case: the smallest case that agrees with it. Each kind of cell has at least `fewest`
    cases, because the table has that many shapes of a mask; a GRU with reset="before" has at least 3. The first case
    of a kind has no other option.
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
"""The cases of `crossed` for every option that an engine runs, by (engine, name)."""
