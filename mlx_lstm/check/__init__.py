"""The first command on a new machine, `python -m mlx_lstm.check`: does every engine compute what it should?

`grid` says which cases are checked, `comparison` compares an engine with the float64 oracle, in a process where a crash
does no harm, `report` prints and writes the findings, `further` runs the other commands of `--full`.
"""

__all__: list[str] = []  # a command
