"""The comparison of the MPSGraph dialect with Apple's MPSGraph and others: `python -m mlx_lstm.compare`."""

__all__: list[str] = []  # a command
