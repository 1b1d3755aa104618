"""The benchmark command, `python -m mlx_lstm.bench`: this package against MLX's own LSTM, torch and TensorFlow.

`cases` says what is measured (`contenders` the case `lstm`, `case_*` the others), `judge` and `judge_stack` whether
results may be compared at all, `worker` runs one contender alone in a process, `rounds` lets these processes take
turns, `report` describes the machine and prints the figures.

Nothing is measured by `--model`: `launches` finds what a function launches, `model` says what that moves and takes,
`predict` prints it. `tune` measures for the library instead of for people.
"""
