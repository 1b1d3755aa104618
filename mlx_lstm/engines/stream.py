"""Run a stack of layers on steps that arrive one at a time, on an engine that computes with MLX: `fused`, `stepwise` or
`ops`. The class `MLXStream` stores the states between two calls.

Arrays are in dicts by name: parameters such as Wx and Wh, the states h0 and c0 before a step, the states hT and cT
after it. B: batch items, I: input features, H: hidden units, P: the width of h.
"""

from math import prod
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from .autodiff import ENGINE_MODULES
from .cells import AnyCell
from .chunks import for_engine
from .input_norm import normalised_input
from .metal import fused
from .ops.packed import dequantized
from .packing import Packing
from .problem import Arrays, Problem

CARRIED = {"h0": "hT", "c0": "cT"}
"""{name of a state before a step: name of the output of the previous step that becomes this state}."""


class Launch(NamedTuple):
    """What a layer needs at every step: the module of its engine, the description of one step (sizes and options), and
    its parameters as the engine reads them.

    norm: None, or what `normalised_input` needs if the layer normalises x Wx^T: the cell, the layer's parameters and
    the format of its quantized weights. The engine then reads the normalised product as x.
    """

    module: Any
    problem: Problem
    arrays: Arrays
    norm: tuple[AnyCell, Arrays, Packing | None] | None = None


def launch_of(engine: str, problem: Problem, arrays: Arrays) -> Launch:
    """Return what a layer needs at every step. arrays: the parameters, and an array "x", of which only the shape and
    the dtype are read. What depends on the parameters alone is computed here, once: dequantized weights for `ops`, and
    for `fused` the recurrent weights in the order in which its threads read them."""
    arrays = for_engine(engine, arrays)
    if engine == "ops":
        arrays = dequantized(problem.packing, arrays)
    elif engine == "fused" and problem.cell.recurrent:
        arrays["arranged"] = fused.arranged(problem, arrays)
    mx.eval(arrays)
    return Launch(ENGINE_MODULES[engine], problem, arrays)


class MLXStream:
    """A stack of layers that runs one step at a time, for engines that compute with MLX. It has the same methods as
    `engines.numpy.stream.Stream`, but x, h and the states are lazy MLX arrays.

    batch: the sizes of the batch axes of x, which may be none. x has the shape (*batch, I) with I input features, and
    h has the shape (*batch, P), where P is the width of the last layer's h.
    """

    def __init__(self, launches: list[tuple[Launch, Launch]], batch: tuple[int, ...], device: mx.Device):
        """Prepare the layers; all states are zero. launches: for each layer a pair of results of `launch_of`, for steps
        without and with the option `keep` (a factor on the states). batch: the sizes of the batch axes; B is their
        product. device: where the steps run."""
        self.launches, self.batch, self.device = launches, batch, device
        self.B: int = prod(batch)
        self.carried: list[Arrays] = [zero_states(launch) for launch, _ in launches]

    def __call__(
        self, x: mx.array | np.ndarray, keep: np.ndarray | None = None, inputs: np.ndarray | None = None
    ) -> mx.array:
        """Run one step, and return the last layer's new h (*batch, P), with P its width. keep: factors [B] by which
        the states are multiplied before the step, or None. inputs [B, U H]: the U inputs of this step of a cell that
        the user wrote, or None."""
        with mx.stream(self.device):
            dtype, more = self.launches[0][0].arrays["x"].dtype, {}  # more: arrays of this step alone
            row: mx.array = x.astype(dtype) if isinstance(x, mx.array) else to_mlx(x, dtype)
            row = row.reshape(1, self.B, -1)
            if keep is not None:
                more["keep"] = to_mlx(keep[None, :, None], dtype)
            if inputs is not None:
                more["inputs"] = to_mlx(inputs[None], dtype)
            for n, pair in enumerate(self.launches):
                module, problem, arrays, norm = pair[keep is not None]  # pair: for a step without and with `keep`
                # The engine of a layer that normalises x Wx^T gets the normalised product as x (see `Launch.norm`).
                if norm is not None:
                    cell, given, packing = norm  # given: the layer's parameters, Wx among them
                    given = given | {"x": row.astype(given["Wh"].dtype)}
                    row = normalised_input(cell, given, packing, directions=1, batch_first=False)
                    row = row.astype(arrays["x"].dtype)
                outputs = module.forward(problem, {**arrays, **more, "x": row, **self.carried[n]})
                row = outputs["h"]
                self.carried[n] = {start: outputs[end] for start, end in CARRIED.items() if end in outputs}
            return row.astype(self.launches[0][0].problem.dtype).reshape(*self.batch, -1)

    def states(self) -> dict[str, list[mx.array]]:
        """Return the current states of all layers by name: h (*batch, P) and, for an LSTM, c (*batch, H). P is the
        width of a layer's h, H the number of its hidden units."""
        names = self.carried[0]  # h0 and, for an LSTM, c0: the first letter is the state's name
        return {name[0]: [layer[name].reshape(*self.batch, -1) for layer in self.carried] for name in names}

    def set_states(self, states: dict[str, list[np.ndarray]]) -> None:
        """Set the states of all layers. states: {"h": a list with one array per layer} and, if the cell has c, also
        "c". Each array has the shape (*batch, width of this state)."""
        for layer, carried in enumerate(self.carried):
            for name, old in carried.items():
                carried[name] = to_mlx(states[name[0]][layer], old.dtype).reshape(old.shape)


def to_mlx(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """Convert a NumPy array to an MLX array of floats. NumPy first makes a contiguous float32 or float64 array, because
    MLX accepts no reversed view, no foreign byte order and no long double."""
    with np.errstate(all="ignore"):  # a large float64 becomes infinite without a warning
        # np.ascontiguousarray would not copy a reversed view of a single number.
        return mx.array(np.array(array, np.float64 if dtype == mx.float64 else np.float32, order="C"), dtype)


def zero_states(launch: Launch) -> Arrays:
    """Return the first states of a layer, which are zeros: h0 [B, P] and, for C states besides h (an LSTM: 1), c0 [B, C
    H]. They have the dtypes that its engine returns: c is always float32 or wider."""
    problem, dtype = launch.problem, launch.arrays["x"].dtype
    states = {"h0": mx.zeros((problem.B, problem.P), dtype)}
    if "c" in problem.cell.outputs:
        states["c0"] = mx.zeros(
            (problem.B, problem.cell.carried * problem.H), mx.float64 if dtype == mx.float64 else mx.float32
        )
    return states
