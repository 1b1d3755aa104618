"""What is compared: calls of MPSGraph's ops with random arrays, each forward with all results and back.

Names are those of the dialect: arguments in Python's spelling, a result's gradient "d" + the argument's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..mpsgraph.layouts import ACTIVATIONS, layouts, size_of

Arrays = dict[str, np.ndarray]

GATES = {"lstm": 4, "gru": 3, "single_gate_rnn": 1}
"""The ops, and how many gates each has."""

RESULTS = {"lstm": ("h", "c", "z_state"), "gru": ("h", "z_state"), "single_gate_rnn": ("h", "z_state")}
"""What a forward op returns for training (and produce_cell), in its order."""

_WEIGHTS = ("source", "recurrent_weight", "input_weight", "bias")
GRADIENTS = {
    "lstm": (*_WEIGHTS, "peephole", "init_state", "init_cell"),
    "gru": (*_WEIGHTS, "init_state", "secondary_bias"),
    "single_gate_rnn": (*_WEIGHTS, "init_state"),
}
"""The arguments with a gradient, in the order of Apple's lists."""

COTANGENTS = {
    "lstm": ("source_gradient", "state_gradient", "cell_gradient"),
    "gru": ("source_gradient", "state_gradient"),
    "single_gate_rnn": ("source_gradient", "state_gradient"),
}

ACTIVATION_PROPERTIES = {
    "lstm": (
        "input_gate_activation",
        "forget_gate_activation",
        "cell_gate_activation",
        "output_gate_activation",
        "activation",
    ),
    "gru": ("update_gate_activation", "reset_gate_activation", "output_gate_activation"),
    "single_gate_rnn": ("activation",),
}


class Case(NamedTuple):
    """A call: its name in reports, the op, the descriptor's properties that differ from Apple's defaults (training and
    produce_cell are always set), and the arrays by argument; an absent one is missing."""

    name: str
    op: str
    descriptor: dict[str, Any]
    arrays: Arrays

    @property
    def bidirectional(self) -> bool:
        """Whether both directions run."""
        return self.descriptor.get("bidirectional", False)

    @property
    def directions(self) -> int:
        """1 or 2."""
        return 2 if self.bidirectional else 1

    @property
    def hidden(self) -> int:
        """H."""
        return self.arrays["recurrent_weight"].shape[-1]

    @property
    def gradients(self) -> list[str]:
        """The arguments given that have a gradient, in Apple's order."""
        return [name for name in GRADIENTS[self.op] if name in self.arrays]

    @property
    def results(self) -> list[str]:
        """The names of all results, forward and back."""
        return [*RESULTS[self.op], *(f"d{name}" for name in self.gradients)]


def draw(
    rng: np.random.Generator,
    op: str,
    sizes: tuple[int, int, int, int] = (3, 2, 3, 2),
    *,
    name: str = "",
    absent: Iterable[str] = ("peephole", "mask"),
    mask_shape: tuple[int | str, ...] = ("N", "DH"),
    weights: float = 0.7,
    dtype: type = np.float32,
    **descriptor: Any,
) -> Case:
    """A case of sizes (T, N, I, H) with random arrays, but those in `absent`.

    In `mask_shape` letters are sizes; `weights` is the standard deviation of the recurrent weights.
    """
    bidirectional = descriptor.get("bidirectional", False)
    lengths = dict(zip("TNIH", sizes, strict=True))
    absent = set(absent) | ({"secondary_bias"} if not descriptor.get("reset_after") else set())
    shapes = layouts(GATES[op], bidirectional, "input_weight" not in absent)
    arrays = {}
    for argument in (*GRADIENTS[op], *COTANGENTS[op]):
        if argument not in absent:
            shape = [size_of(axis, lengths) for axis in shapes[argument]]
            spread = weights if argument == "recurrent_weight" else 0.7
            arrays[argument] = rng.normal(0, spread, shape).astype(dtype)
    if "mask" not in absent:
        letters = lengths | {"DH": lengths["H"] * (2 if bidirectional else 1)}
        shape = [letters.get(axis, axis) for axis in mask_shape]
        arrays["mask"] = (rng.random(shape) * 1.5).astype(dtype)
    return Case(name, op, descriptor, arrays)


# --- The grid --------------------------------------------------------------------------------------------------------

DIRECTIONS = {"uni": {}, "reverse": {"reverse": True}, "bi": {"bidirectional": True}}
NO_STATES = ("init_state", "init_cell", "state_gradient", "cell_gradient")
WITHOUT = {
    "no input weight": ("input_weight", "peephole", "mask"),
    "no bias": ("bias", "peephole", "mask"),
    "no states": (*NO_STATES, "peephole", "mask"),
    "source and weights only": ("input_weight", "bias", *NO_STATES, "peephole", "mask"),
    "mask": ("peephole",),
    "peephole": ("mask",),
}
"""What is left out, by the name of the case: without a word on them, mask and peephole are."""


def grid(off_kinks: Callable[[Case], bool], seed: int = 0) -> list[Case]:
    """The cases of the command: each option alone, in every direction where it has another layout there."""
    rng = np.random.default_rng(seed)
    return [draw_until(off_kinks, rng, op, name=f"{op}: {name}", **chosen) for op, name, chosen in descriptions()]


def draw_until(accept: Callable[[Case], bool], rng: np.random.Generator, op: str, **chosen: Any) -> Case:
    """A random case that is accepted."""
    for _ in range(1000):
        case = draw(rng, op, **chosen)
        if accept(case):
            return case
    raise RuntimeError(f"no accepted case of {op} {chosen}")


def descriptions() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(op, name, what `draw` takes) of each case of the grid."""
    sizes = {"sizes": (5, 3, 4, 6)}
    for op in GATES:
        for direction, flags in DIRECTIONS.items():
            yield op, direction, sizes | flags
            for name, absent in WITHOUT.items():
                if direction != "reverse" and (op == "lstm" or name != "peephole"):
                    yield op, f"{direction}, {name}", sizes | flags | {"absent": absent}
        for name in ACTIVATIONS:
            # Gates without a bound let the states of five steps grow beyond float32.
            short = {"sizes": (2, 3, 4, 6)} if name in ("none", "relu") else sizes
            yield op, f"every activation {name}", short | dict.fromkeys(ACTIVATION_PROPERTIES[op], name)
        yield op, "one of everything", {"sizes": (1, 1, 1, 1)}
        # A single gate's relu, Apple's default, lets the state grow without bound; so do recurrent weights with a norm
        # above 1 the errors, over many steps.
        smooth = {"activation": "tanh"} if op == "single_gate_rnn" else {}
        yield op, "64 steps", {"sizes": (64, 2, 8, 16), "weights": 0.15} | smooth
        yield op, "float16", {"sizes": (5, 3, 4, 6), "dtype": np.float16} | smooth
    for direction, flags in DIRECTIONS.items():
        yield "lstm", f"{direction}, forget gate last", sizes | flags | {"forget_gate_last": True, "absent": ("mask",)}
    for first in (False, True):
        for after, flip in ((False, True), (True, False), (True, True)):
            flavour = {"reset_gate_first": first, "reset_after": after, "flip_z": flip}
            words = ", ".join(name.replace("_", " ") for name, value in flavour.items() if value)
            yield "gru", words, sizes | flavour
    torch = {"reset_gate_first": True, "reset_after": True, "bidirectional": True}
    yield "gru", "bi, as PyTorch", sizes | torch
