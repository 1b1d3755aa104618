"""Read the command line of the short examples, and run their `main`."""

import sys
from collections.abc import Callable

from mlx_lstm.ground.machine import run_command


def numbers(usage: str, most: int = 1) -> list[int]:
    """Return the numbers of the command line: none to `most`, each at least 1. For any other words end the program
    with the text `usage`."""
    words = sys.argv[1:]
    if len(words) > most or not all(word.isdecimal() and int(word) for word in words):
        sys.exit(usage)
    return [int(word) for word in words]


def run_main(main: Callable[[], int | None]):
    """Call `main`, and end the program with the exit code that it returns, or with 0. Ctrl-C, and an output that is
    closed, as after `| head`, or cannot be written, end it without a traceback."""
    run_command(lambda: main() or 0)
