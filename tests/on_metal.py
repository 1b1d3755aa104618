"""The library as on a Mac, its Metal shaders executed by the emulator."""

from contextlib import contextmanager
from unittest.mock import patch

from metal_emulator import emulated_metal

from mlx_lstm import kernels, recurrence

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
