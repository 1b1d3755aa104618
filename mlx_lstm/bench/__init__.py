"""The benchmark command, `python -m mlx_lstm.bench`: this package's LSTM against `mlx.nn.LSTM` and `torch.nn.LSTM`.

`contenders` says what is measured, `judge` whether results may be compared at all, `worker` runs one contender alone in
a process, `rounds` lets these processes take turns, `report` describes the machine and prints the figures.
"""
