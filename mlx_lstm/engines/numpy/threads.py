"""Make NumPy's BLAS use one thread for calls of the engine `numpy` whose products are small.

OpenBLAS divides each larger product among all cores and waits for the slowest one. If another process occupies one of
the cores, OpenBLAS waits until the system stops that process, which takes thousands of times as long as a product of
one time step. Between products the threads spin, so they also take a core from MLX's own thread.
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
        library = ctypes.CDLL(file)  # NumPy has loaded this library, which makes the functions of its BLAS accessible
        for prefix in ("scipy_", ""):  # NumPy's wheels rename all functions of their OpenBLAS
            for suffix in ("64_", ""):
                with suppress(AttributeError):
                    get = getattr(library, f"{prefix}openblas_get_num_threads{suffix}")
                    return Threads(get, getattr(library, f"{prefix}openblas_set_num_threads{suffix}"))
    return None


lock = threading.Lock()  # protects the two numbers below
running = 0  # how many calls run with one thread of BLAS at this moment, in all threads of Python
usual = 1  # the number of threads that OpenBLAS used before the first of these calls began


@contextmanager
def one_thread() -> Iterator[None]:
    """Return a context in which BLAS uses one thread, for a call whose products are small. If several such calls run at
    once, in different threads of Python, the last one to end restores the number of threads."""
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
