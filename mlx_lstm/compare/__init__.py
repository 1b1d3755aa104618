"""The command `python -m mlx_lstm.compare`: it compares the ops of `mlx_lstm.mpsgraph` with Apple's MPSGraph, with
torch, and with the float64 oracle."""

__all__: list[str] = []  # nothing to import: this package is a command
