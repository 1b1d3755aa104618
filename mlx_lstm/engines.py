"""Which engine runs a recurrence, and why: a pure function, so that every machine can test every machine's choice."""

from __future__ import annotations

from typing import NamedTuple

ENGINES = ("numpy", "ops")
"""`numpy`: the CPU engine, in place on MLX's own memory. `ops`: a plain MLX graph, any device, and the definition."""


class Choice(NamedTuple):
    """An engine's word and the reason for it, fit to be printed."""

    engine: str
    reason: str


def choose(*, device: str, traced: bool, requested: str | None = None, op: str = "lstm") -> Choice:
    """How to run a recurrence, and why.

    Args:
        device (str): `"cpu"` or `"gpu"`, the device of the stream the op was called on.
        traced (bool): whether an input is a placeholder of `mx.compile`, `mx.vmap` or an export, without a value yet.
        requested (str): an engine's word to force it. Default: `None`, the best that runs.

    Raises:
        ValueError: `requested` is no engine, or cannot run here; the text gives the reason.

    Example:
        >>> from mlx_lstm.engines import choose
        >>> choose(device="cpu", traced=False).engine
        'numpy'
        >>> choose(device="cpu", traced=True)
        Choice(engine='ops', reason='inside mx.compile, mx.vmap or an export the arrays have no values yet')
    """
    if requested is not None and requested not in ENGINES:
        raise ValueError(f"[{op}] engine must be one of {', '.join(ENGINES)} but got {requested!r}.")
    if requested == "ops":
        return Choice("ops", "asked for")
    if traced:
        obstacle = "inside mx.compile, mx.vmap or an export the arrays have no values yet"
    elif device != "cpu":
        obstacle = f"the numpy engine runs on the CPU and the stream's device is {device}"
    else:
        return Choice("numpy", "asked for" if requested else "the stream's device is the CPU")
    if requested:
        raise ValueError(f"[{op}] engine={requested!r} cannot run: {obstacle}.")
    return Choice("ops", obstacle)
