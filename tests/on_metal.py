"""The library as on a Mac: its Metal shaders run on the GPU of this one, elsewhere on the emulator."""

from contextlib import ExitStack, contextmanager
from typing import NamedTuple
from unittest.mock import patch

import mlx.core as mx
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

# By batch size the kernels change their ways: rows per threadgroup, and the product in lanes or in matrices.
BATCHES = (1, 2, 9)


def options_at(option, B):
    """An entry of EVERY_OPTION for a batch of B."""
    return at_batch(EVERY_OPTION[option], B)


def can_run(engine, options):
    """Whether the choice of engines lets this engine run these options on a Mac."""
    cell = {"lstm": LSTMCell(), "gru": GRUCell(reset=options.get("reset", "after")), "rnn": RNNCell()}
    given = {"bidirectional": options.get("bidirectional", False), "projection": options.get("projection", False)}
    given |= {"cell": cell[options.get("op", "lstm")], "device": "gpu", "metal": True, "traced": False}
    try:
        return bool(choose(sizes=(4, 2, 3, 2), dtype=mx.float32, requested=engine, **given))
    except ValueError:
        return False


def pairs(table):
    """(engine, option) for every entry of a table of options that the engine runs."""
    return [(engine, option) for engine in ENGINES for option in table if can_run(engine, table[option])]
