"""Run MLX's Metal kernels on the CPU and check every memory access. See README.md."""

from .dropin import Dispatch, emulated_metal, install
from .findings import Finding, KernelError

__all__ = ["Dispatch", "Finding", "KernelError", "emulated_metal", "install"]
