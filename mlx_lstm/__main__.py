"""The command `mlx-lstm`, or `python -m mlx_lstm`: run one of the package's commands, or list them."""

import importlib
import sys
from typing import NoReturn

from .ground.machine import VERSION, run_command

COMMANDS = {
    "check": "Are all results right on this machine? Start here.",
    "bench": "How fast are our layers here, compared with mlx.nn and PyTorch?",
    "compare": "Do Apple's MPSGraph and our ops compute the same? Needs a Mac, or arrays saved on one.",
    "convert": "Convert a weight file: PyTorch, Keras, ONNX, MLX, Core ML and others.",
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
    print("usage: mlx-lstm COMMAND [OPTIONS], the same as python -m mlx_lstm.COMMAND [OPTIONS]\n\ncommands:")
    for name, text in COMMANDS.items():
        print(f"  {name:8} {text}")
    print("\nmlx-lstm COMMAND --help shows the options of a command. mlx-lstm --version prints the version.")
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
