"""Serve requests in a child process of a command: `python -m mlx_lstm.lab KIND ARGUMENT`.

KIND is a folder of mlx_lstm/lab, which says what the child serves. ARGUMENT is text for the function `answers` of that
folder: of engines which grid of cases ("full" or "default"), of timing a task as JSON, of mpsgraph the name of a
contender (an implementation)."""

import sys
from importlib import import_module

from ..ground.child import serve
from ..ground.machine import run_command
from ..recurrence import unguarded

MODULES = {"engines": "comparison", "timing": "worker", "mpsgraph": "contenders"}
"""For each KIND the module whose function `answers` takes ARGUMENT and returns the function that answers a request."""


def main() -> int:
    """Answer requests until the parent closes the pipe. Kernels run without the usual small test before their first
    use, because all results are compared with float64 anyway."""
    if len(sys.argv) != 3 or sys.argv[1] not in MODULES:
        print("mlx_lstm.lab serves the commands of mlx-lstm: run mlx-lstm --help", file=sys.stderr)
        return 2
    kind, argument = sys.argv[1:]
    module = import_module(f"{__package__}.{kind}.{MODULES[kind]}")
    with unguarded():
        serve(module.answers(argument))
    return 0


if __name__ == "__main__":
    run_command(main)
