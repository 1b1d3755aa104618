"""Measure times. `cases` defines what is measured, one file each, with the types of `tasks`. `judge` decides whether
results are right; only right results are timed. `worker` runs one contender alone in a process, `rounds` lets these
processes take turns, `report` formats the figures, `files` writes them to files. `short` is the benchmark inside the
command `check`."""

__all__: list[str] = []  # for this package's own commands and tests
