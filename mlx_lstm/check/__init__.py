"""`python -m mlx_lstm.check`, the first command on a new machine: it checks that every engine computes correct
results.

`mlx_lstm.lab.engines` does the work. `further` runs the other commands of `--full`, among them `cells`.
"""

__all__: list[str] = []  # nothing to import: this package is a command
