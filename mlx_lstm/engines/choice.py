"""Choose the engine of a recurrence, with a reason. The choice is a pure function, so that every machine can test the
choice of every other."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from math import isqrt
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast

import mlx.core as mx

from ..checks import FLOATS, check_option, fail
from . import tuning
from .cells import Cell, LSTMCell
from .packing import Packing, field_of
from .problem import Chunks, Problem
from .tuning import PACKED, PREDICTED, Table

ENGINES = ("fused", "stepwise", "numpy", "ops")
"""`fused`: our Metal shaders, the sequence in one launch. `stepwise`: our Metal shaders, a launch per time step.
`numpy`: the CPU engine, in place on MLX's own memory. `ops`: a plain MLX graph, any device, and the definition."""

Engine = Literal["fused", "stepwise", "numpy", "ops"]
"""The type of an option `engine`."""

METAL_ENGINES = ("fused", "stepwise")

LSTM = LSTMCell()

FUSED_LIMIT = {"lstm": 256, "gru": 256, "rnn": 1024}
"""The largest H `fused` can run: its threadgroups have 4 threads per unit, of a plain cell 1; Metal's limit is 1024."""

LONGEST = {"numpy": 0, "ops": 256, "stepwise": 4096, "fused": 4096}
"""Steps up to which nothing is evaluated while a graph is built. 0: `numpy` evaluates in any case. A step of `ops`
takes about 40 KB of the host's memory, forward and back; a step of `stepwise` is a launch and a row in each sweep."""

GATES = {"ops": 2**20, "stepwise": 2**24, "fused": 2**24}
"""Gates (steps x batch x G H) of a chunk at most, if the sequence is divided for its length. On the GPU this is 64 MB
in float32. A product of so many gates by weights of width 512 takes the smallest GPU 7 ms by its peak, not measured;
macOS ends a launch that keeps the GPU from the display for too long. `ops` has a lower limit: while MLX derives a
gradient, it holds all arrays of a chunk, about 16 times as much."""

ROWS = 1024
"""Rows (steps x batch) of a recomputed chunk of `numpy` at least. What it prepares for each chunk is then small beside
the steps. Its products take as many rows at a time, so that shorter chunks would save little."""

NONE: Mapping[str, str] = MappingProxyType({})
"""No engine is refused."""


class Choice(NamedTuple):
    """An engine's name and the reason it was chosen, as text for the user."""

    engine: str
    reason: str


def choose(
    *,
    sizes: tuple[int, int, int, int],
    dtype: mx.Dtype,
    device: str,
    metal: bool,
    traced: bool,
    cell: Cell = LSTM,
    bidirectional: bool = False,
    projection: bool = False,
    requested: str | None = None,
    table: Table = PREDICTED,
    op: str = "lstm",
    refused: Mapping[str, str] = NONE,
    packing: Packing | None = None,
) -> Choice:
    """Choose the engine of a recurrence, and say why.

    Args:
        sizes (tuple of int): (T, B, I, H).
        dtype (Dtype): dtype of the arrays.
        device (str): `"cpu"` or `"gpu"`, the device of the stream the op was called on.
        metal (bool): whether MLX has its Metal backend, `mx.metal.is_available()`.
        traced (bool): whether an input is a placeholder of `mx.compile`, `mx.vmap` or an export, without a value yet.
        cell (Cell): the cell. Default: an LSTM's.
        bidirectional (bool): whether both directions run. Default: `False`.
        projection (bool): whether h is projected. Default: `False`.
        requested (str): the engine that the caller forces. Default: `None`, the best that can run.
        table (Table): the faster Metal engine by dtype, batch and H. Default: the predicted table.
        op (str): the op that an error names. Default: `"lstm"`.
        refused (mapping): engines that failed their trial on this machine, each with the reason. Default: none.
        packing (Packing): how the recurrent weights are quantized. Default: `None`, they are not.

    Raises:
        ValueError: an argument has a value that is not listed above, `requested` cannot run here, or no engine can.
            The text gives the reason.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.engines import choose
        >>> here = {"sizes": (64, 32, 300, 300), "dtype": mx.float32}
        >>> choose(**here, device="gpu", metal=True, traced=False, requested="stepwise")
        Choice(engine='stepwise', reason='asked for')
        >>> choose(**here, device="gpu", metal=True, traced=False).engine
        'stepwise'
        >>> choose(**here, device="cpu", metal=True, traced=False).engine
        'numpy'
        >>> choose(**here, device="gpu", metal=True, traced=False, refused={"stepwise": "it does not compile"})
        Choice(engine='ops', reason='it does not compile')
    """
    check_option(op, "dtype", dtype, FLOATS)
    check_option(op, "device", device, ("cpu", "gpu"))
    T, B, _, H = sizes
    names = ("Wp",) if projection else ()
    problem = Problem(T, B, H, H, cell, dtype, names, bidirectional=bidirectional, packing=packing)
    return decide(problem, table, op, requested, device, metal, traced, refused=refused)


def decide(
    problem: Problem,
    table: Table,
    op: str,
    requested: str | None,
    device: str,
    metal: bool,
    traced: bool,
    *,
    refused: Mapping[str, str] = NONE,
) -> Choice:
    """Return what `choose` returns, for a problem that was checked."""
    check_engine(op, requested)
    B, H, dtype, packing = problem.B, problem.H, problem.dtype, problem.packing
    check_device(op, dtype, device)
    reasons = {**refused, **obstacles(problem.cell, H, device, metal, traced, "Wp" in problem.names)}
    if requested is not None:
        if requested in reasons:
            raise ValueError(f"[{op}] engine={requested!r} cannot run: {reasons[requested]}.")
        return Choice(requested, "asked for")
    if "numpy" not in reasons:
        return Choice("numpy", "the stream's device is the CPU")
    if packing is None:
        engine, reason = table.preferred(dtype, B, H)
    else:
        engine, reason = PACKED.preferred(f"weights of {field_of(packing)} bits", B, H)
    if engine not in reasons:
        return Choice(engine, reason)
    if "stepwise" in reasons:
        return Choice("ops", reasons["numpy" if device == "cpu" else "stepwise"])
    # `fused` was preferred and cannot run. Where a measurement discarded `stepwise`, the plain graph takes over.
    return Choice("stepwise" if table.trusts("stepwise", dtype, B) else "ops", reasons[engine])


def check_engine(op: str, engine: Any) -> Engine | None:
    """Return `engine`, which is `None` or one of `ENGINES`."""
    if engine is not None and not (isinstance(engine, str) and engine in ENGINES):
        fail(op, f"engine must be one of {', '.join(ENGINES)}", repr(engine))
    return cast(Engine | None, engine)


def check_device(op: str, dtype: mx.Dtype, device: str) -> None:
    """Raise an error unless the stream's device computes in this dtype."""
    if device != "cpu" and dtype == mx.float64:
        raise ValueError(f"[{op}] float64 needs the CPU, stream=mx.cpu, but the stream's device is {device}.")


def obstacles(
    cell: Cell,
    H: int,
    device: str,
    metal: bool,
    traced: bool,
    projection: bool,
) -> dict[str, str]:
    """Return the reason for each engine that cannot run."""
    reasons = {}
    if traced:
        reasons["numpy"] = "inside mx.compile, mx.vmap or an export the arrays have no values yet"
    elif device != "cpu":
        reasons["numpy"] = f"the numpy engine runs on the CPU and the stream's device is {device}"
    if device == "cpu":
        reasons["fused"] = reasons["stepwise"] = "Metal shaders run on the GPU and the stream's device is cpu"
    elif not metal:
        reasons["fused"] = reasons["stepwise"] = "MLX has no Metal back end on this machine"
    elif projection:
        reasons["fused"] = "a projection of h is a product between two steps"
    elif (limit := FUSED_LIMIT[cell.op]) < H:
        reasons["fused"] = f"H = {H} > {limit}, and a threadgroup has at most 1024 threads, {1024 // limit} per unit"
    return reasons


def divide(problem: Problem, engine: str, every: int | str | None) -> Problem:
    """Return the problem with what depends on its engine: the cut of `fused` and the chunks in time.

    every: the option `checkpoint_every`. A gradient op gets all that a chunk would recompute, so it has no chunks.
    """
    cut = tuning.cut(problem.dtype, problem.B) if engine == "fused" else None
    chunks = chunks_of(engine, problem, every) if problem.cotangents is None else None
    return problem._replace(cut=cut, chunks=chunks)


def chunks_of(engine: str, problem: Problem, every: int | str | None) -> Chunks | None:
    """Return how a call is divided, or None if it is not. every: the option `checkpoint_every`."""
    T, B, width = problem.T, problem.B, problem.cell.gates * problem.H
    if every is not None:
        # T / K saved states and a chunk of K steps are smallest together near K = sqrt(T). A step of `ops` takes about
        # 16 times the memory of a state, so its K is a quarter of that.
        auto = isqrt((T - 1) // (16 if engine == "ops" else 1)) + 1
        if engine == "numpy":  # gates and states of T / 8 steps are less than half of h and dx
            auto = max(auto, min(ROWS // B, T // 8))
        return Chunks(min(auto if isinstance(every, str) else every, T), recomputes=True)
    longest, gates = longest_whole(engine, problem), B * width
    return Chunks(max(1, min(longest, GATES[engine] // gates)), recomputes=False) if 0 < longest < T else None


def longest_whole(engine: str, problem: Problem) -> int:
    """Return the steps up to which an engine builds one graph for the sequence."""
    return LONGEST[engine] if problem.limits.unchunked is None else problem.limits.unchunked


Stream = mx.Stream | mx.Device | None

NOWHERE: AbstractContextManager[None] = nullcontext()


def on(stream: Stream, op: str = "stream") -> AbstractContextManager[object]:
    """Return the context of a stream; without one, a context that changes nothing."""
    if stream is None:
        return NOWHERE
    try:
        return mx.stream(stream)
    except TypeError:
        fail(op, "stream must be a stream or a device of MLX", repr(stream))


def current_device() -> str:
    """Return `"cpu"` or `"gpu"`, the device of the stream in effect."""
    return "cpu" if mx.default_device() == mx.cpu else "gpu"
