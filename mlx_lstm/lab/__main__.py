"""Serve requests in a child process of a command: `python -m mlx_lstm.lab KIND ARGUMENT`.

KIND is a folder of mlx_lstm/lab and says what the child serves. ARGUMENT is a text for the function `answers` in this
folder: for engines the name of a grid of cases ("full" or "default"), for timing a task as JSON, for mpsgraph the name
of a contender (an implementation to compare)."""

import sys
from importlib import import_module

from ..ground.child import serve
from ..ground.machine import run_command
from ..recurrence import unguarded

MODULES = {"engines": "comparison", "timing": "worker", "mpsgraph": "contenders"}
"""For each KIND the module with the function `answers`, which takes ARGUMENT and returns a function that answers
requests."""


def main() -> int:
    """Answer requests until the parent closes the pipe. Kernels run without the usual trial run before their first use,
    because the commands compare all results with float64 themselves."""
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
