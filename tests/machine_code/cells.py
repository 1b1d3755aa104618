"""Count the instructions of the kernels that are generated for pointwise cells (cells given as a Python function),
and compare them with the kernels of the built-in LSTM:

    PYTHONPATH=tests python -m machine_code.cells [CELL ...]
"""

import inspect
import sys
from collections.abc import Iterator
from itertools import product
from unittest.mock import patch

import mlx.core as mx
from pointwise_cases import ZOO, Form

from mlx_lstm.engines import METAL_ENGINES
from mlx_lstm.engines.autodiff import ENGINE_MODULES
from mlx_lstm.engines.cells import NormOptions, PointwiseCell
from mlx_lstm.engines.metal import fused
from mlx_lstm.engines.problem import Cut, Problem
from mlx_lstm.lab.timing.tasks import Size

from .compiler import machine_code
from .count import Count, count
from .launches import Graph, Launch, trace
from .times import ours

SIZES = ((1, 128), (32, 128), (32, 256))


def layer_of(
    form: Form, engine: str, B: int, H: int, T: int = 3, rows: int = 0, norm: NormOptions | None = None
) -> tuple[Problem, Graph]:
    """Return the `Problem` (sizes and options) of a call with the cell `form`, and the kernel launches of its forward
    and its backward pass on a Metal engine. B, H, T: batch items, hidden units, time steps. rows: the batch items of a
    threadgroup of `fused`, or 0 for the default number. norm: the layer normalisation of the cell's preactivations, or
    None."""
    G, C = form.gates, form.states - 1
    shapes = {"x": (T, B, 8), "Wx": (G * H, 8), "Wh": (G * H, H), "b": (G * H,), "h0": (B, H), "c0": (B, C * H)}
    shapes |= {"inputs": (T, B, form.inputs * H), "params": (form.params * H,)}
    shapes |= {} if norm is None else {"norm_scale": (G * H,)}
    absent = {name for name, shape in shapes.items() if 0 in shape} | (set() if form.recurrent else {"Wh"})
    given = {name: mx.zeros(shape) for name, shape in shapes.items() if name not in absent}
    cell = PointwiseCell(form.graph(B, H), form.recurrent, norm=norm)
    problem, module = Problem(T, B, H, H, cell, names=tuple(given)), ENGINE_MODULES[engine]
    problem = problem._replace(cut=Cut(rows) if rows else None)

    def passes(dh: mx.array, *values: mx.array) -> list[mx.array]:
        arrays = dict(zip(given, values, strict=True))
        saved = module.forward(problem, arrays)
        gradients = module.backward(problem, arrays, saved, {"h": dh})
        return [array for array in [*saved.values(), *gradients.values()] if isinstance(array, mx.array)]

    return problem, trace(passes, [mx.zeros((T, B, H)), *given.values()])


ENDINGS = tuple(f"_{form}_{sweep}" for form in (*METAL_ENGINES, "fused_matrix") for sweep in fused.SWEEPS)
"""The endings of the names of the kernels that run the time steps of a pass."""


def kernels(graph: Graph) -> Iterator[Launch]:
    """Yield the first launch of the forward kernel and of the backward kernel, which run the time steps of a pass."""
    seen = set()
    for launch in graph.launches:
        if launch.ours and launch.name.endswith(ENDINGS) and launch.name not in seen:
            seen.add(launch.name)
            yield launch


def counted(graph: Graph) -> dict[str, Count]:
    """Return the instruction counts of the forward and of the backward kernel, by pass."""
    return {
        launch.name.rpartition("_")[2]: count(machine_code(launch.text, launch.threads)) for launch in kernels(graph)
    }


def per_step(engine: str, c: Count) -> int:
    """Return the number by which kernels are compared. For `fused` it is the number of instructions of a time step.
    For `stepwise` it is the number of cycles outside of the product's loop, which is the same for all cells."""
    return c.kinds.total() if engine == "fused" else c.outside


def main(names: list[str]) -> None:
    """Print one line per cell, size, engine and pass: the number of lines of the cell's function, the count that
    `per_step` returns and its ratio to the built-in LSTM, the registers, and the bytes of spilled registers."""
    head = f"{'cell':18} {'lines':>5} {'B':>3} {'H':>4} {'engine':9} {'pass':9} {'count':>6} {'/ LSTM':>7}"
    print(f"{head} registers spilled")
    for (B, H), engine in product(SIZES, METAL_ENGINES):
        # Compare with the variant of the built-in LSTM kernel that resembles the generated kernels: it divides products
        # among lanes, and its threadgroups compute as many sequences of the batch as those of the generated kernels.
        with patch.object(fused, "rows_for", lambda *_: 1 if B <= 16 else 2):  # noqa: B023
            own = counted(ours(Size(3, B, 8, H), mx.float32, engine, "backward")[1])
        lanes = 0 if engine == "stepwise" else 1 if B <= 16 else 2
        rows = {"built-in LSTM": own}
        rows |= {name: counted(layer_of(ZOO[name], engine, B, H, rows=lanes)[1]) for name in names}
        for name, found in rows.items():
            lines = len(inspect.getsource(ZOO[name].cell).split('"""')[-1].strip().splitlines()) if name in ZOO else 0
            for which, c in found.items():
                total, base = per_step(engine, c), per_step(engine, own[which])
                figures = f"{total:6} {total / base:7.2f} {c.registers:9.1f} {c.scratch:7}"
                print(f"{name:18} {lines or '':>5} {B:3} {H:4} {engine:9} {which:9} {figures}", flush=True)


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    main(sys.argv[1:] or list(ZOO))
