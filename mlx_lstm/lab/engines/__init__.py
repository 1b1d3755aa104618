"""Compare every engine with float64. `grid` defines the cases, `comparison` compares in a child process, so that a
crash does no harm, `report` prints and writes the findings."""

__all__: list[str] = []  # for this package's own commands and tests
