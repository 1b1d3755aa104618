"""The first command on a new machine, `python -m mlx_lstm.check`: does every engine compute what it should?

`cases` draws problems, `grid` says which are checked, `comparison` holds an engine against the float64 oracle,
`process` does that where a crash does no harm, `timing` times it, `report` prints and writes what was found.
"""

__all__: list[str] = []  # a command
