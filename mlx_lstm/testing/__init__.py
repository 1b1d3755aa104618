"""Tools shared by the commands check, bench and compare, and by the tests.

`cases` draws random calls of the ops, `judge` decides whether results are right, `report` describes the machine and
prints tables, `progress` shows the current work.
"""

__all__: list[str] = []  # for this package's own commands and tests
