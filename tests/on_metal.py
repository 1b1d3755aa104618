"""The library as on a Mac, its Metal shaders executed by the emulator."""

from contextlib import contextmanager
from unittest.mock import patch

from cases import OPTIONS
from metal_emulator import emulated_metal

from mlx_lstm import kernels, recurrence
from mlx_lstm.engines import METAL_ENGINES as ENGINES

WEIGHTS = ("Wh", "Wh_T", "weights", "peephole")


@contextmanager
def on_metal(**options):
    """Yields the log of launches; a finding of the emulator raises. The stream in effect counts as the GPU's."""
    caches = [kernels.build.cache_clear]
    with (
        patch.object(recurrence, "current_device", lambda: "gpu"),
        emulated_metal(pretend_available=True, on_enter=caches, **options) as log,
    ):
        yield log


# --- What to run -----------------------------------------------------------------------------------------------------

# By batch size the kernels change their ways: rows per threadgroup, and the product in lanes or in matrices.
BATCHES = (1, 2, 9)


def options_at(option, B):
    """An entry of OPTIONS, written for a batch of 2, for a batch of B."""
    options = dict(OPTIONS[option])
    if "lengths" in options:
        options["lengths"] = (options["lengths"] * B)[:B]
    if "mask" in options:
        options["mask"] = tuple(B if size == 2 else size for size in options["mask"])
    return options


def can_run(engine, options):
    return engine == "stepwise" or not options.get("projection")


def pairs():
    """(engine, option) for every entry of OPTIONS that the engine runs."""
    return [(engine, option) for engine in ENGINES for option in OPTIONS if can_run(engine, OPTIONS[option])]
