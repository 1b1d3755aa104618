"""The benchmark command, `python -m mlx_lstm.bench`: it compares this package with MLX's own LSTM, torch and
TensorFlow.

`cases` defines what is measured, one file each, with the types of `tasks`. `judge` decides whether results are right;
only right results are timed. `worker` runs one contender alone in a process, `rounds` lets these processes take turns,
`report` prints the figures, `files` writes them to files. `tune` measures which engine the library should choose,
`host` measures the time to build a call's graph, `short` is the benchmark inside the command `check`.
"""

from .tasks import Contender, Size, Task, Work

__all__ = ["Contender", "Size", "Task", "Work"]  # the types that a user's own contender needs
