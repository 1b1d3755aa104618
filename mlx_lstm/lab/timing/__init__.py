"""Measure the time and the memory of implementations, which are called contenders.

`cases` defines what is measured, with one file for each benchmark case; `tasks` has the types. `judge` decides whether
results are right; only then is a contender timed. `worker` runs one contender alone in a process, `rounds` lets these
processes take turns, and `report` formats the figures and writes them to files. `short` is the benchmark of the command
`check`.
"""

__all__: list[str] = []  # for this package's own commands and tests
