"""The benchmark command, `python -m mlx_lstm.bench`: this package against MLX's own LSTM, torch and TensorFlow.

`cases` says what is measured, a file each, in the types of `tasks`; `judge` whether results may be compared at all.
`worker` runs one contender alone in a process, `rounds` lets these processes take turns, `report` prints the figures,
`files` writes them. `tune` measures for the library instead of for people, `host` what a call costs before it runs,
`short` is the measurement of the command `check`.
"""

from .tasks import Contender, Size, Task, Work

__all__ = ["Contender", "Size", "Task", "Work"]  # what a contender of yours is made of
