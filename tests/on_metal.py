"""Run the library as on a Mac. On a Mac the Metal shaders run on the GPU. On other machines they run in the
emulator."""

from contextlib import ExitStack, contextmanager
from typing import NamedTuple
from unittest.mock import patch

import mlx.core as mx
import pytest
from cases import GPU, METAL
from metal_emulator import coverage, emulated_metal
from metal_emulator.dropin import EmulatedKernel

from mlx_lstm.engines import METAL_ENGINES as ENGINES
from mlx_lstm.engines import choice, choose
from mlx_lstm.engines.cells import GRUCell, LSTMCell, RNNCell
from mlx_lstm.engines.metal import fused
from mlx_lstm.engines.metal import kernel as kernels
from mlx_lstm.lab.cases import ACTIVATIONS, EVERY_OPTION, at_batch
from mlx_lstm.recurrence import _guard

WEIGHTS = ("Wh", "weights", "arranged", "peephole", "bhn")


@contextmanager
def on_metal(*, guarded=False, **emulator):
    """Make the Metal engines usable inside the context. Yield the log of kernel launches.

    guarded: whether each new kernel is tested in a small run before its first use, as in production. emulator:
    options of `emulated_metal`. They have no effect on a Mac, where the GPU chooses the order of threads.

    Without a Mac, a defect that the emulator finds in a kernel raises an error, and the library treats the current
    stream as a stream of the GPU.
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
    """A kernel launch on a real GPU. The emulator's log has the same fields, and more."""

    name: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    source: str


class LoggedKernel(EmulatedKernel):
    """A kernel that MLX runs on a real GPU. Each launch is added to a log. Its outputs are filled with NaN before
    the kernel runs, so that a test notices elements that the kernel does not write."""

    def __init__(self, build, log, **definition):
        super().__init__(**definition)
        self.own, self.log = build(**definition), log

    def __call__(self, *, inputs, **call):
        text = self._capture(inputs, call).source
        self.log.append(Launch(self.definition["name"], tuple(call["grid"]), tuple(call["threadgroup"]), text))
        # Fill the outputs with NaN. Kernels store 16-bit floats as uint16; the bits 0xFFFF are a NaN in float16 and in
        # bfloat16.
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
    """Make the rest of this process run as on a Mac. Code inside an `mx.stream` context is still treated as running
    on the CPU. Tests call this function in child processes."""
    on_cpu, stream = [], mx.stream

    @contextmanager
    def leaving(where):
        on_cpu.append(where)
        with stream(mx.cpu):
            yield
        on_cpu.pop()

    coverage.count_lines(False)  # nobody collects the lines that ran in a child process
    pretended.enter_context(on_metal())
    pretended.enter_context(patch.object(choice, "current_device", lambda: "cpu" if on_cpu else "gpu"))
    pretended.enter_context(patch.object(mx, "stream", leaving))
    pretended.enter_context(patch.object(mx, "set_default_device", lambda device: None))


pretended = ExitStack()


# --- Cases, batch sizes and kernels that the tests run ---------------------------------------------------------------

# Batch sizes that use different kernels. The batch size decides how many batch rows a threadgroup computes. It also
# decides whether single lanes, tiles or 8 x 8 matrices compute a product.
BATCHES = (1, 2, 9)


def options_at(option, B):
    """Return the options that EVERY_OPTION has under the name `option`, with array shapes for a batch of B
    sequences."""
    return at_batch(EVERY_OPTION[option], B)


def can_run(engine, options):
    """Return whether this Metal engine supports these options on a Mac, according to `choose`."""
    cell = {"lstm": LSTMCell(), "gru": GRUCell(reset=options.get("reset", "after")), "rnn": RNNCell()}
    cell = {op: each._replace(norm=options.get("norm")) for op, each in cell.items()}
    arguments = {name: options.get(name, False) for name in ("bidirectional", "projection")}
    arguments |= {"cell": cell[options.get("op", "lstm")], "device": "gpu", "metal": True, "traced": False}
    try:
        return bool(choose(sizes=(4, 2, 3, 2), dtype=mx.float32, requested=engine, **arguments))
    except ValueError:
        return False


def pairs(table):
    """Return (engine, name) for each Metal engine and each name in `table` (name: options) whose options the engine
    supports."""
    return [(engine, name) for engine in ENGINES for name in table if can_run(engine, table[name])]


def in_turns(cases, choices, others=False):
    """Give each test case (a tuple) one of the choices, taken in turn: the first case the first choice, and so on.
    Return a list of (*case, choice).

    With `others`, also return the other combinations of a case and a choice, marked as slow tests.
    """
    turns = [(case, n % len(choices), k) for n, case in enumerate(cases) for k in range(len(choices))]
    default = [(*case, choices[k]) for case, turn, k in turns if k == turn]
    slow = [pytest.param(*case, choices[k], marks=pytest.mark.slow) for case, turn, k in turns if k != turn]
    return default + (slow if others else [])


def on_one_engine(table):
    """Return (engine, name) for each name in `table` (name: options): one of the Metal engines that support its
    options. The engine changes after every second name, so that what `in_turns` adds does not change with it."""
    able = {name: [engine for engine in ENGINES if can_run(engine, table[name])] for name in table}
    turns = enumerate((name, engines) for name, engines in able.items() if engines)
    return [(engines[n // 2 % len(engines)], name) for n, (name, engines) in turns]


def merged(case, option):
    """Return the union of two sets of options, or None if they set the same argument to different values."""
    differ = any(case[name] != option[name] for name in case.keys() & option.keys())
    return None if differ else case | option


DEPENDENT = {"clip_gradient": {"cell_clip", "projection_clip"}, "output_peephole": {"peephole"}}
"""Options that have an effect only next to another one. `crossed` writes their usual values out, so that it does not
take a case with another value for a test of the usual one."""


def crossed(table, turn, fewest=4):
    """Combine the options in `table` into few test cases. Return {"gru_both_3.0": {"op": "gru", "mask": ..., ...}}.

    Most options change the source of a kernel, so a test case per option would compile a kernel per option. Instead,
    several options are merged into one case.

    Cases are grouped by op, reset="before" and number of directions. The first `fewest` options of a group (3 with
    reset="before") each begin a new case. Each further option is added to the smallest case that it can be merged
    with. Without reset="before", nothing is added to the first case of a group. Two kinds of options are not merged:

    - The shape of a mask changes no kernel. So the shapes of a group are dealt out to its cases, and a case runs once
      with each of its shapes. Its name ends with the number of the run.
    - Each gate of a case gets another activation. From case to case the activations move on by two places, and `turn`,
      the number of the engine, moves them by one. So each gate has all activations on one of two engines.

    The number of directions does not change a kernel's source. Therefore a bidirectional group begins as a copy of
    the group with one direction. Options that one of the copied cases already has are not added again.
    """
    groups, masks = {}, {}
    for option in table.values():
        kind = option.get("op", "lstm") + "_before" * ("reset" in option) + "_norm" * ("norm" in option)
        kind += "_both" * ("bidirectional" in option)
        if kind.endswith("_both") and kind not in groups:
            groups[kind] = [{**case, "op": option["op"], "bidirectional": True} for case in groups[kind[:-5]]]
            for case in groups[kind]:
                case.pop("reverse", None)
        group = groups.setdefault(kind, [])
        masks.setdefault(kind, {})
        if "mask" in option:
            masks[kind][option["mask"]] = None
        usual = {name: getattr(LSTMCell(), name) for name, of in DEPENDENT.items() if of & option.keys()}
        left_out = ("mask", "activations", "activation")
        option = usual | {name: value for name, value in option.items() if name not in left_out}
        agrees = [n for n, case in enumerate(group) if (n or "reset" in option) and merged(case, option)]
        if any(merged(case, option) == case for case in group):
            continue
        if len(group) < (3 if "reset" in option else fewest) or not agrees:
            group.append(option)
        else:
            smallest = min(agrees, key=lambda n: len(group[n]))
            group[smallest] = merged(group[smallest], option)
    found = {}
    for kind, group in groups.items():
        for n, case in enumerate(group):
            dealt = list(masks[kind])[n - 1 :: len(group) - 1] if n else []
            dealt = [{"mask": shape} for shape in dealt] or [{}]
            found |= {f"{kind}_{n}.{k}": case | mask | acting(case, n, turn) for k, mask in enumerate(dealt)}
    return found


def acting(case, n, turn):
    """Return the activations of case n of a group: the usual ones for case 0, else another one for each gate."""
    count = {"lstm": 5, "gru": 3, "rnn": 1}[case.get("op", "lstm")]
    names = tuple(ACTIVATIONS[(gate + 2 * n + turn) % len(ACTIVATIONS)] for gate in range(count))
    return {} if n == 0 else {"activation": names[0]} if count == 1 else {"activations": names}


def rows_from(batch):
    """Return a replacement for `fused.rows_for`, which chooses how many sequences a threadgroup computes. If the
    call has at least `batch` sequences, it chooses 8, for the kernel with 8 x 8 matrix products. Otherwise it
    chooses 1, 2 or 4, for the kernel without matrix products. With two directions each sequence counts twice."""

    def rows_for(layer):
        matrices = layer.directions * layer.B >= batch and fused.fits_matrices(layer.cell, layer.H)
        return 8 if matrices else 1 if layer.B <= 16 else 2 if layer.B <= 64 else 4

    return rows_for


def matrices_from(batch):
    """Return a context manager in which `fused` uses its kernel with 8 x 8 matrix products if a call has at least
    `batch` sequences. With two directions each sequence counts twice."""
    return patch.object(fused, "rows_for", rows_from(batch))
