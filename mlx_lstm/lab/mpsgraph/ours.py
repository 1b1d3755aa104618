"""Run a case (a call of an MPSGraph op with its arrays) on `mlx_lstm.mpsgraph`: the forward op with all results,
then the gradient op on these results."""

from typing import Any

import mlx.core as mx
import numpy as np

from ... import mpsgraph
from .cases import COTANGENTS, RESULTS, Arrays, CompareCase, through_layers

DESCRIPTORS = {
    "lstm": mpsgraph.LSTMDescriptor,
    "gru": mpsgraph.GRUDescriptor,
    "single_gate_rnn": mpsgraph.SingleGateRNNDescriptor,
}
SAVED = {
    "lstm": {"z_state": "z_state", "cell_output_fwd": "c"},
    "gru": {"z_state": "z_state", "output_fwd": "h"},
    "single_gate_rnn": {"z_state": "z_state"},
}
"""The arguments of the gradient op that are results of the forward op: {argument's name: result's name}."""


def run(case: CompareCase, engine: str | None = None, **options: Any) -> Arrays:
    """Return all results of a case by name. engine: None for the library's choice. options: keywords of the ops."""
    return through_layers(case, lambda layer: run_layer(layer, engine, **options))


def run_layer(case: CompareCase, engine: str | None, **options: Any) -> Arrays:
    """Run one layer of a case. options: keywords of the ops; leading_ones is for the gradient op only: it names
    arguments whose gradients get leading axes of size 1, as Apple's op may return them."""
    arrays = {name: mx.array(array) for name, array in case.arrays.items()}
    descriptor = make_descriptor(case)
    inputs = {name: array for name, array in arrays.items() if name not in COTANGENTS[case.op]}
    forward = {name: value for name, value in options.items() if name != "leading_ones"}
    results = getattr(mpsgraph, case.op)(**inputs, **forward, descriptor=descriptor, engine=engine)
    results = dict(zip(RESULTS[case.op], results, strict=True))
    if "source_gradient" not in arrays:
        return {name: np.array(array) for name, array in results.items()}
    saved = {argument: results[name] for argument, name in SAVED[case.op].items()}
    gradient_op = getattr(mpsgraph, f"{case.op}_gradients")
    gradients = gradient_op(**arrays, **saved, **options, descriptor=descriptor, engine=engine)
    results |= dict(zip((f"d{name}" for name in case.gradients), gradients, strict=True))
    return {name: np.array(array) for name, array in results.items()}


def make_descriptor(case: CompareCase) -> object:
    """Return the descriptor of a case with training turned on, with which an LSTM also returns its cell states."""
    return DESCRIPTORS[case.op](training=True, **case.descriptor)
