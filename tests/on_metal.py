"""The library as on a Mac, its Metal shaders executed by the emulator."""

from contextlib import contextmanager
from unittest.mock import patch

import mlx.core as mx
from cases import BOTH, CELLS, OPTIONS
from metal_emulator import emulated_metal

from mlx_lstm.engines import METAL_ENGINES as ENGINES
from mlx_lstm.engines import choice, choose
from mlx_lstm.engines.cells import GRUCell, LSTMCell, RNNCell
from mlx_lstm.engines.metal import launch as kernels

WEIGHTS = ("Wh", "weights", "packed", "peephole", "extra")


@contextmanager
def on_metal(**options):
    """Yields the log of launches; a finding of the emulator raises. The stream in effect counts as the GPU's."""
    caches = [kernels.forget]
    with (
        patch.object(choice, "current_device", lambda: "gpu"),
        emulated_metal(pretend_available=True, on_enter=caches, **options) as log,
    ):
        yield log


# --- What to run -----------------------------------------------------------------------------------------------------

# By batch size the kernels change their ways: rows per threadgroup, and the product in lanes or in matrices.
BATCHES = (1, 2, 9)


EVERY_OPTION = OPTIONS | CELLS | BOTH


def options_at(option, B):
    """An entry of EVERY_OPTION, written for a batch of 2, for a batch of B."""
    options = dict(EVERY_OPTION[option])
    if "lengths" in options:
        options["lengths"] = (options["lengths"] * B)[:B]
    if "mask" in options:
        options["mask"] = tuple(B if size == 2 else size for size in options["mask"])
    return options


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
