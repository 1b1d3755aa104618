"""Choose the engine that runs a recurrence, with a reason. The choice is a pure function of its arguments, so the
choice for one machine can be tested on any other.

T: time steps, B: batch items, I: input features, H: hidden units, G: gates of a cell. A threadgroup is a group of
threads of the GPU that share memory; Metal allows at most 1024 threads in one.
"""

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from math import isqrt
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast

import mlx.core as mx

from ..ground.checks import FLOATS, check_flag, check_integer, check_option, fail
from . import tuning
from .cells import AnyCell, Cell, LSTMCell, PointwiseCell
from .packing import Packing
from .predicted import Choice, predict
from .problem import CORES, LIMITS, Chunks, Problem
from .tuning import PREDICTED, Table

ENGINES = ("fused", "stepwise", "numpy", "ops")
"""The names of the engines. `fused`: our Metal shaders, with all time steps in one launch. `stepwise`: our Metal
shaders, with one launch per time step. `numpy`: NumPy on the CPU, which writes into the memory of MLX arrays. `ops`: a
graph of MLX operations, which runs on any device and defines the correct results."""

Engine = Literal["fused", "stepwise", "numpy", "ops"]
"""The type of an option `engine`."""

METAL_ENGINES: tuple[Engine, ...] = ("fused", "stepwise")
"""The engines that run on the GPU with our own shaders."""

LSTM = LSTMCell()
"""An LSTM with the default options, for the argument `cell` of `choose`."""

FUSED_LIMIT = {"lstm": 256, "gru": 256, "rnn": 1024}
"""The largest H that `fused` supports, by op. A threadgroup has 4 threads per hidden unit (1 for a plain RNN), and
Metal allows at most 1024 threads."""

FUSED_NUMBERS = 16
"""The largest cell of a user that `fused` supports, as a count of numbers per hidden unit: gates, states, inputs of
each step and parameters together. For more numbers a thread would not have enough registers."""

STEPWISE_GATES = 32
"""The largest number of gates of a user's cell that `stepwise` supports. A threadgroup has 32 threads per gate, and
Metal allows at most 1024 threads."""

GATES = {"ops": 2**20, "stepwise": 2**24, "fused": 2**24}
"""The largest number of gate values (steps x batch x G H) in one chunk, if a sequence is divided because of its length.
2^24 values are 64 MB in float32. The limit keeps a launch short, because macOS ends a launch that blocks the display
for too long: at peak speed the smallest GPU needs 7 ms (computed, not measured) for a product with so many results of
512 terms each. `ops` has a lower limit because MLX keeps all arrays of a chunk while it derives a gradient, about 16
times as much memory."""

ROWS = 1024
"""The smallest number of rows (steps x batch) in a chunk of `numpy` that the backward pass computes again. A chunk of
this size takes much longer than its fixed cost. Smaller chunks would save little memory, because one product of the
backward pass of `numpy` has this many rows in any case."""

ONE_STEP = 2**22
"""The largest recurrent product h Wh^T, in multiplications, for which `ops` runs a single step instead of `numpy`
inside a transformation of MLX, such as mx.grad (see `is_small_step`). For larger products `numpy` is faster, at least
in loops of up to about 500 steps, because MLX multiplies matrices slowly on Linux."""


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
    refused: Mapping[str, str] = MappingProxyType({}),
    packing: Packing | None = None,
    cores: int = CORES,
) -> Choice:
    """Choose the engine of a recurrence, and say why.

    Args:
        sizes (tuple of int): (T, B, I, H).
        dtype (Dtype): dtype of the arrays.
        device (str): `"cpu"` or `"gpu"`, the device of the stream the op was called on.
        metal (bool): whether MLX can run Metal kernels here: it has its Metal backend, and the Mac has a GPU.
        traced (bool): whether an input is a placeholder of `mx.compile`, `mx.vmap` or an export, without a value yet.
        cell (Cell): the options of the cell. Default: an LSTM.
        bidirectional (bool): whether both directions run. Default: `False`.
        projection (bool): whether h is projected. Default: `False`.
        requested (str): the engine that the caller forces. Default: `None`, the best that can run.
        table (Table): the faster Metal engine by dtype, batch size and H. Default: no measurements but predictions.
        op (str): the op that an error names. Default: `"lstm"`.
        refused (mapping): engines whose kernels failed a trial run here, each with the reason. Default: none.
        packing (Packing): how the recurrent weights are quantized. Default: `None`, they are not.
        cores (int): number of GPU cores, by which the faster engine is predicted. Default: 10.

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
    check_flag(op, "metal", metal)
    check_flag(op, "traced", traced)
    cores = check_integer(op, "cores", cores, least=1)
    if not isinstance(sizes, (tuple, list)) or len(sizes) != 4:
        fail(op, "sizes must be (T, B, I, H)", repr(sizes))
    T, B, _, H = (
        check_integer(op, f"size {name} of sizes", size, least=1) for name, size in zip("TBIH", sizes, strict=True)
    )
    names = ("Wp",) if projection else ()
    # plain=True: choose as for a call outside of mx.grad. The rule of `is_small_step` is only for calls inside of
    # mx.grad. limits: the ordinary limits, with the caller's number of GPU cores. The second H of `Problem` is the
    # width of h, on which the choice does not depend.
    options = {"packing": packing, "plain": True, "limits": LIMITS._replace(cores=cores)}
    problem = Problem(T, B, H, H, cell, dtype, names, bidirectional=bidirectional, **options)
    return decide(problem, table, op, requested, Place(device, metal, traced), refused=refused)


class Place(NamedTuple):
    """Where a call runs. device: the device of its stream. metal: whether MLX can run Metal kernels here. traced:
    whether arrays have no values yet."""

    device: str
    metal: bool
    traced: bool


def decide(
    problem: Problem,
    table: Table,
    op: str,
    requested: str | None,
    place: Place,
    *,
    refused: Mapping[str, str] = MappingProxyType({}),
) -> Choice:
    """Return the engine that runs this problem, and the reason. Unlike `choose` it gets arguments that have been
    checked.

    table: measurements that say which Metal engine is faster. If there are none, `table.engines` is empty, and
    `table.source` says why. `table.trusts` says whether an engine passed all measurements at this batch size. op: the
    op that an error names. requested: the engine that the caller forces. If it cannot run, an error is raised. If it is
    None, the fastest engine that can run is returned. place: where the call runs. refused: engines that failed a test
    run, with reasons.
    """
    check_engine(op, requested)
    B, H, dtype, packing, cell = problem.B, problem.H, problem.dtype, problem.packing, problem.cell
    check_device(op, dtype, place.device)
    reasons = {**refused, **obstacles(cell, H, place, "Wp" in problem.names)}  # {engine that cannot run: the reason}
    if requested is not None:
        if requested in reasons:
            raise ValueError(f"[{op}] engine={requested!r} cannot run: {reasons[requested]}.")
        return Choice(requested, "asked for")
    if "numpy" not in reasons and not problem.plain and is_small_step(problem.cell, problem.T, B, H):
        return Choice("ops", "one small step inside a transformation of MLX")
    if "numpy" not in reasons:  # on the CPU, where no Metal engine can run, and `numpy` is faster than `ops`
        return Choice("numpy", "the stream's device is the CPU")
    if table.engines and packing is None:
        engine, reason = table.preferred(dtype, B, H)
    # `predict` is only for built-in cells that `fused` can run. In all other cases prefer `fused`. If `fused` cannot
    # run, the lines below choose another engine and give the reason why.
    elif "fused" in reasons or isinstance(cell, PointwiseCell):
        engine, reason = "fused", "all steps in one launch"
    else:
        engine, reason = predict(cell, dtype, B, H, problem.cores, problem.directions, packing)
        reason = f"{reason}, {table.source if packing is None else 'predicted'}"
    if engine not in reasons:
        return Choice(engine, reason)
    if "stepwise" in reasons:
        return Choice("ops", reasons["numpy" if place.device == "cpu" else "stepwise"])
    # The preferred engine is `fused`, which cannot run here. So `stepwise` runs, or `ops` if a measurement of
    # `stepwise` failed.
    return Choice("stepwise" if table.trusts("stepwise", dtype, B) else "ops", reasons[engine])


def is_small_step(cell: AnyCell, T: int, B: int, H: int) -> bool:
    """Return whether a call is a single step that is so small that `ops` computes its gradient faster than `numpy`.

    A program that calls a layer for each step builds a long graph. `numpy` must evaluate its arrays at each call. Each
    evaluation visits all nodes of the graph so far, so each call takes longer than the call before. `ops` evaluates
    nothing during a call.
    """
    return T == 1 and B * cell.gates * H**2 <= ONE_STEP


def may_be_numpy(engine: object) -> bool:
    """Return whether the option `engine` allows the engine `numpy`: it is "numpy", or None for the best engine. The
    option may have any type, because it is not checked yet. So isinstance comes first: comparing an array with a text
    gives no single bool."""
    return engine is None or (isinstance(engine, str) and engine == "numpy")


def check_engine(op: str, engine: Any) -> Engine | None:
    """Return `engine` if it is `None` or one of `ENGINES`. Otherwise raise ValueError. op: the name of the function or
    layer that the user called, with which the error text begins."""
    if engine is not None and not (isinstance(engine, str) and engine in ENGINES):
        fail(op, f"engine must be one of {', '.join(ENGINES)}", repr(engine))
    return cast(Engine | None, engine)


def check_device(op: str, dtype: mx.Dtype, device: str) -> None:
    """Raise ValueError if the device of the stream does not support this dtype. op: the name of the public function,
    for the error text."""
    if device != "cpu" and dtype == mx.float64:
        raise ValueError(f"[{op}] float64 needs the CPU, stream=mx.cpu, but the stream's device is {device}.")


def obstacles(cell: AnyCell, H: int, place: Place, projection: bool) -> dict[str, str]:
    """Return a dict from each engine that cannot run here to the reason. H: the hidden units. projection: whether h is
    projected. Engine `ops` can always run. `place` holds the device of the stream, whether MLX can run Metal kernels,
    and whether arrays have no values yet (`traced`)."""
    (device, metal, traced), reasons = place, {}
    if traced:
        reasons["numpy"] = "inside mx.compile, mx.vmap or an export the arrays have no values yet"
    elif device != "cpu":
        reasons["numpy"] = f"the numpy engine runs on the CPU and the stream's device is {device}"
    if device == "cpu":
        reasons["fused"] = reasons["stepwise"] = "Metal shaders run on the GPU and the stream's device is cpu"
    elif not metal:
        reasons["fused"] = reasons["stepwise"] = "MLX has no Metal back end on this machine"
    if isinstance(cell, PointwiseCell) and "erf" in [node.op for node in cell.graph.nodes]:
        reasons.setdefault("numpy", "NumPy has no erf")
    if "fused" in reasons:  # Metal does not run at all, so the sizes below do not matter
        return reasons
    if isinstance(cell, PointwiseCell):
        if cell.recurrent and cell.gates > STEPWISE_GATES:
            reasons["stepwise"] = (
                f"its {cell.gates} gates > {STEPWISE_GATES}, and a threadgroup has at most 1024 threads, 32 per gate"
            )
        # numbers: how many numbers per unit a thread holds in registers; at most FUSED_NUMBERS fit. lanes: the number
        # of threads per unit. 4 threads share the recurrent product and the activations of a unit; without a product 1
        # thread does all the work.
        numbers = cell.gates + cell.graph.states + cell.graph.inputs + cell.graph.params
        lanes = 4 if cell.recurrent else 1
        if 1024 // lanes < H:
            reasons["fused"] = (
                f"H = {H} > {1024 // lanes}, and a threadgroup has at most 1024 threads, {lanes} per unit"
            )
        elif numbers > FUSED_NUMBERS:
            reasons["fused"] = f"its gates, states, inputs and params are {numbers} > {FUSED_NUMBERS} numbers per unit"
    elif projection:
        reasons["fused"] = "a projection of h is a product between two steps"
    elif (limit := FUSED_LIMIT[cell.op]) < H:
        reasons["fused"] = f"H = {H} > {limit}, and a threadgroup has at most 1024 threads, {1024 // limit} per unit"
    return reasons


def divide(problem: Problem, engine: str, every: int | str | None) -> Problem:
    """Return the problem with the two options that depend on its engine. chunks: the parts of the time steps that run
    one after the other, or None. cut: for `fused`, how many batch items a threadgroup computes and how many registers
    of a thread hold no weights, as measured; None if it was not measured.

    every: the option `checkpoint_every`: the steps of a chunk, "auto", or None for no chunks that save memory. A
    gradient op such as `lstm_gradients` (`cotangents` is not None) has no chunks, because it gets all arrays that a
    chunk would recompute.
    """
    cut = tuning.cut(problem.dtype, problem.B) if engine == "fused" else None
    chunks = chunks_of(engine, problem, every) if problem.cotangents is None else None
    return problem._replace(cut=cut, chunks=chunks)


LONGEST = {"numpy": 0, "ops": 256, "stepwise": 4096, "fused": 4096}
"""The largest number of steps for which an engine builds one graph of the whole sequence. 0: `numpy` does not build
a graph. A step of `ops` takes about 40 KB of the host's memory, forward and backward. A step of `stepwise` takes a
launch and an array in each of the two passes."""


def chunks_of(engine: str, problem: Problem, every: int | str | None) -> Chunks | None:
    """Return how a call is divided into chunks of time, or None if it is not divided. every: the option
    `checkpoint_every`, which saves memory: the number of steps in a chunk, "auto", or None to divide a sequence only if
    it is too long for one graph."""
    T, B, width = problem.T, problem.B, problem.cell.gates * problem.H  # width: the numbers of all gates of an item
    # longest: the largest number of steps in one graph of this engine; tests change it (`unchunked`). For `numpy`,
    # which builds no graph, a call is divided only if the caller asks for it (`every`). The 0 for `numpy` in `LONGEST`
    # has the effect that each chunk is then evaluated before the next one (`is_long`).
    longest = LONGEST[engine] if problem.limits.unchunked is None else problem.limits.unchunked
    if every is not None:
        # With K steps per chunk the forward pass saves T / K states, and the backward pass needs the arrays of K steps.
        # Both together need the least memory near K = sqrt(T). For `ops` a step needs about 16 times the memory of a
        # state, so K is sqrt(T) / 4 there.
        auto = isqrt((T - 1) // (16 if engine == "ops" else 1)) + 1
        # `numpy` has a fixed cost per chunk, which is small if a chunk has at least ROWS rows (steps x batch). So its
        # chunks have ROWS / B steps or more, but for this reason not more than T / 8: the gates and states of T / 8
        # steps take less than half the memory of h and dx of all steps, so the option still saves memory.
        if engine == "numpy":
            auto = max(auto, min(ROWS // B, T // 8))
        return Chunks(min(auto if isinstance(every, str) else every, T), recomputes=True, is_long=longest < T)
    if not 0 < longest < T:
        return None
    # A chunk has at most `longest` steps, and its gates have at most GATES[engine] numbers.
    return Chunks(max(1, min(longest, GATES[engine] // (B * width))), recomputes=False, is_long=True)


Stream = mx.Stream | mx.Device | None
"""The type of an option `stream`; None for MLX's default stream."""

NOWHERE: AbstractContextManager[None] = nullcontext()
"""A context manager that does nothing."""


def on(stream: Stream, op: str = "stream") -> AbstractContextManager[object]:
    """Return the context manager that selects a stream. For None, return one that does nothing. op: the name with which
    the error begins if `stream` is no stream."""
    if stream is None:
        return NOWHERE
    try:
        return mx.stream(stream)
    except TypeError:
        fail(op, "stream must be a stream or a device of MLX", repr(stream))


def has_metal() -> bool:
    """Return whether MLX can run Metal kernels on this machine. MLX for macOS has its Metal back end even on a machine
    without a GPU."""
    return mx.metal.is_available() and (sys.platform != "darwin" or mx.is_available(mx.gpu))


def current_device() -> str:
    """Return `"cpu"` or `"gpu"`: the device of the current stream."""
    return "cpu" if mx.default_device() == mx.cpu else "gpu"
