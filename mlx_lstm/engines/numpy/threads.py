"""The number of threads that NumPy's BLAS uses for a call of the engine `numpy`.

OpenBLAS divides each larger product among all cores and waits for the slowest of them. If another process runs on one
of the cores, the wait lasts until the system runs the other process no more, which is thousands of times as long as a
product of one time step. Between products the threads spin, and take a core from MLX's own thread. So a call whose
products are small runs on one thread.
"""

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from typing import NamedTuple

ALL_THREADS: AbstractContextManager[None] = nullcontext()
"""A context in which BLAS uses its usual number of threads; it changes nothing."""


class Threads(NamedTuple):
    """The two functions of OpenBLAS that return and set the number of threads of all products in this process."""

    get: Callable[[], int]
    set: Callable[[int], None]


@cache
def openblas() -> Threads | None:
    """Return the functions of the OpenBLAS that NumPy uses, or None if NumPy uses another BLAS, as on a Mac."""
    names = ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath")
    file = next((sys.modules[name].__file__ for name in names if name in sys.modules), None)
    if file is None or sys.platform == "darwin":
        return None
    with suppress(OSError):
        library = ctypes.CDLL(file)  # it is loaded already; its functions include those of the BLAS that it links
        for prefix in ("scipy_", ""):  # NumPy's wheels rename all functions of their OpenBLAS
            for suffix in ("64_", ""):
                with suppress(AttributeError):
                    get = getattr(library, f"{prefix}openblas_get_num_threads{suffix}")
                    return Threads(get, getattr(library, f"{prefix}openblas_set_num_threads{suffix}"))
    return None


lock = threading.Lock()  # held while the two numbers below change
running = 0  # calls that run on one thread at this moment, in all threads of Python
usual = 1  # the number of threads that OpenBLAS used before the first of these calls began


@contextmanager
def one_thread() -> Iterator[None]:
    """Return a context in which BLAS uses one thread, for a call whose products are small. The last of several such
    calls, which may run in different threads of Python, restores the number of threads."""
    global running, usual
    blas = openblas()
    if blas is None:
        yield
        return
    with lock:
        if running == 0:
            usual = blas.get()
            blas.set(1)
        running += 1
    try:
        yield
    finally:
        with lock:
            running -= 1
            if running == 0:
                blas.set(usual)
