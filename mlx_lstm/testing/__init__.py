"""What the commands check, bench and compare and the tests stand on.

`cases` draws random calls of the ops, `judge` decides whether results are right, `report` describes the machine and
prints tables, `progress` shows what is being done, `child` runs what may crash in a process of its own.
"""

__all__: list[str] = []  # for this package's own commands and tests
