"""Compare every engine with float64. `grid` defines the cases, `comparison` runs and compares them in a child process,
so that a crash does no harm, and `report` prints the findings and writes them to a file."""

__all__: list[str] = []  # for this package's own commands and tests
