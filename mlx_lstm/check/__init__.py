"""`python -m mlx_lstm.check`, the first command on a new machine: it checks that every engine computes correct
results.

`__main__` has the command line, and `mlx_lstm.lab.engines` does the work. With `--full`, `further` runs other commands,
among them `cells`.
"""

__all__: list[str] = []  # nothing to import: this package is a command
