"""A case: a call with its numbers, which an engine or another library runs and the float64 oracle judges."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .arithmetic import Array, Rounding, Tensors
from .case import ARRAYS, OUTPUTS, Call
from .closeness import exact_and_bounds, trials_for
from .recurrence import evaluate
from .verdict import Judge


class Case(NamedTuple):
    """A call with its numbers. call: the arguments of the oracle; for a user's cell "op" is "pointwise", and "graph"
    the cell's graph of operations. cotangents: those of outputs by name; without any, there are no gradients. dtype:
    the name of the dtype in which the call is run, which can represent all values. weights: quantized weights by name,
    which an engine gets in place of the arrays of `call` with the same values."""

    call: Call
    cotangents: Tensors = {}  # noqa: RUF012 (never changed)
    dtype: str = "float32"
    weights: Mapping[str, Any] = {}

    @property
    def op(self) -> str:
        """Return the op's name: `lstm`, `gru`, `rnn`, or `pointwise` for a cell that the user wrote."""
        return self.call.get("op", "lstm")

    @property
    def arrays(self) -> dict[str, Array]:
        """Return the arrays of the call by name, without lengths and hold."""
        return {name: self.call[name] for name in ARRAYS if self.call.get(name) is not None}

    @property
    def options(self) -> dict[str, Any]:
        return {name: value for name, value in self.call.items() if name not in ARRAYS and name != "op"}

    def names(self, training: bool = True) -> list[str]:
        """Return the names of the results that are judged: without cotangents all outputs; with them the outputs that
        have one, and the gradient "d" + name of each array. With training=False there are no gradients and no gates."""
        if not training or not self.cotangents:
            return [name for name in OUTPUTS[self.op] if training or name != "gates"]
        gradients = [f"d{name}" for name in self.arrays if name not in self.weights]
        return [*(name for name in OUTPUTS[self.op] if name in self.cotangents), *gradients]

    def results(self, fl: Rounding) -> Tensors:
        """Return all outputs by name, and all gradients as "d" + name, computed in the arithmetic `fl`."""
        # Unbounded activations may overflow, and a cell that the user wrote may have no value at padded steps.
        with np.errstate(all="ignore"):
            outputs, gradients = evaluate(self.call, self.cotangents or None, fl)
        return outputs | {f"d{name}": gradient for name, gradient in gradients.items()}

    def judge(self) -> Judge:
        """Return the float64 results with bounds on their errors."""
        trials = trials_for(max(array.size for array in self.arrays.values()))
        return exact_and_bounds(self.results, self.dtype, trials)
