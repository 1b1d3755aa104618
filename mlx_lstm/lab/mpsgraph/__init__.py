"""Compare the ops of `mlx_lstm.mpsgraph` with Apple's MPSGraph, with torch, and with float64. `cases` has the calls to
run, `contenders` runs them, `measure` compares the results, `files` stores recorded results, and `report` prints."""

__all__: list[str] = []  # for this package's own commands and tests
