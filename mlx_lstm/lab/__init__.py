"""The code that the commands check, bench and compare share: it draws random calls, runs them and compares the results.

`cases` draws random calls of the ops and runs them, `child` starts child processes, `progress` shows the current work,
`report` describes the machine and prints tables. The folder `engines` compares our engines with float64, for check;
`timing` measures times, for bench; `mpsgraph` compares the ops of MPSGraph, for compare. Each folder has its cases, a
child process that runs them, and a report.
"""

__all__: list[str] = []  # for this package's own commands and tests
