"""The benchmark command, `python -m mlx_lstm.bench`: it compares the speed of this package with that of MLX's own LSTM,
torch and TensorFlow.

`mlx_lstm.lab.timing` does the work. `tune` measures which engine the library should choose, and `host` measures the
time to build the graph of a call.
"""

from ..lab.timing.tasks import Contender, Size, Task, Work

__all__ = ["Contender", "Size", "Task", "Work"]  # the types that a user's own contender needs
