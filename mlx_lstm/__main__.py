"""The command `mlx-lstm`, or `python -m mlx_lstm`: run one of the package's commands, or list them."""

import importlib
import sys
from typing import NoReturn

from .machine import VERSION, run_command

COMMANDS = {
    "check": "is every result right on this machine?",
    "bench": "how fast is it here, beside mlx.nn and others?",
    "compare": "does it equal Apple's MPSGraph? Needs a Mac, or a dump that was made on one",
    "convert": "weight files of PyTorch, Keras, ONNX, MLX and others into one another",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command that the first argument names, and return its exit code. Without arguments print the list of
    commands; with --version print the version."""
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if command in COMMANDS:
        return importlib.import_module(f"mlx_lstm.{command}.__main__").main(rest)
    if command == "--version":
        print(f"mlx-lstm {VERSION}")
        return 0
    print("Commands, each with --help; `mlx-lstm check` is the same as `python -m mlx_lstm.check`:\n")
    for name, question in COMMANDS.items():
        print(f"    python -m mlx_lstm.{name:8} {question}")
    if command in ("-h", "--help", ""):
        return 0
    what = "option" if command.startswith("-") else "command"
    print(f"\nThere is no {what} {command!r}.", file=sys.stderr)
    return 2


def run() -> NoReturn:
    """Call `main` and end the process with its exit code."""
    run_command(main)


if __name__ == "__main__":
    run()
