"""`python -m mlx_lstm.check`, the first command on a new machine: it checks that every engine computes correct
results.

`grid` defines the cases. `comparison` compares an engine with the float64 oracle, in a child process, so that a crash
does no harm. `report` prints and writes the findings. `further` runs the other commands of `--full`.
"""

__all__: list[str] = []  # nothing to import: this package is a command
