"""`python -m mlx_lstm.compare`: compare the MPSGraph dialect with Apple's MPSGraph, with torch and with the oracle."""

__all__: list[str] = []  # a command
