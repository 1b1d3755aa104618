"""List the commands."""

from .machine import run_command

COMMANDS = {
    "check": "is every result right on this machine?",
    "bench": "how fast is it here, beside mlx.nn and others?",
    "compare": "does it equal Apple's MPSGraph? Needs a Mac, or a dump that was made on one",
    "convert": "weight files of PyTorch, Keras, ONNX, MLX and others into one another",
}


def main() -> int:
    """Print the commands, each with the question that it answers; return the exit code."""
    print("Commands, each with --help:\n")
    for command, question in COMMANDS.items():
        print(f"    python -m mlx_lstm.{command:8} {question}")
    return 0


if __name__ == "__main__":
    run_command(main)
