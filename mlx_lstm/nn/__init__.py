"""Layers that drop into any MLX model, in the place of those of `mlx.nn`."""

from ._layers import GRU, LSTM, NONLINEARITIES, RNN

__all__ = ["GRU", "LSTM", "NONLINEARITIES", "RNN"]
