"""The cases of the command `compare`: one case for each option of an op. If the layout of an option's array depends on
the direction, there is a separate case for each kind of direction."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...mpsgraph.layouts import ACTIVATIONS
from .cases import ACTIVATION_PROPERTIES, GATES, CompareCase, draw, draw_stack

SIZES = (5, 3, 4, 6)  # T, N, I, H
DIRECTIONS = {"uni": {}, "reverse": {"reverse": True}, "bi": {"bidirectional": True}}
"""The directions of a layer: {word in the name of a case: properties of the descriptor}."""
NO_STATES = ("init_state", "init_cell", "state_gradient", "cell_gradient")
WITHOUT = {
    "no input weight": ("input_weight", "peephole", "mask"),
    "no bias": ("bias", "peephole", "mask"),
    "no states": (*NO_STATES, "peephole", "mask"),
    "source and weights only": ("input_weight", "bias", *NO_STATES, "peephole", "mask"),
    "mask": ("peephole",),
    "peephole": ("mask",),
}
"""The arguments that are not passed, by a part of the case's name. Cases that are not listed here have no mask and no
peephole."""


def grid(off_kinks: Callable[[CompareCase], bool], seed: int = 0) -> list[CompareCase]:
    """Return the cases of the command `compare`. off_kinks: a function that returns whether the arguments of relu and
    hard_sigmoid in a random case are far enough from kinks, where the slope jumps."""
    rng = np.random.default_rng(seed)
    single = [draw_until(off_kinks, rng, op, name=f"{op}: {name}", **chosen) for op, name, chosen in descriptions()]
    return [*single, *stacks(rng)]


def stacks(rng: np.random.Generator) -> Iterator[CompareCase]:
    """Yield cases of several layers, which torch can run."""
    flags = {
        "lstm": {},
        "gru": {"reset_gate_first": True, "reset_after": True},
        "single_gate_rnn": {"activation": "tanh"},
    }
    for op, own in flags.items():
        yield draw_stack(rng, op, SIZES, count=2, name=f"{op}: 2 layers, bi", bidirectional=True, **own)
        yield draw_stack(rng, op, SIZES, count=3, name=f"{op}: 3 layers", **own)


def draw_until(accept: Callable[[CompareCase], bool], rng: np.random.Generator, op: str, **chosen: Any) -> CompareCase:
    """Draw random cases until the function `accept` accepts one, and return it."""
    for _ in range(1000):
        case = draw(rng, op, **chosen)
        if accept(case):
            return case
    raise RuntimeError(f"no accepted case of {op} {chosen}")


def descriptions() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (op, name, arguments of `draw`) for each case of one layer."""
    sizes: dict[str, Any] = {"sizes": SIZES}
    for op in GATES:
        for direction, flags in DIRECTIONS.items():
            yield op, direction, sizes | flags
            for name, absent in WITHOUT.items():
                # A reverse layer has the same layouts as a forward layer. Only an LSTM has a peephole.
                if direction != "reverse" and (op == "lstm" or name != "peephole"):
                    yield op, f"{direction}, {name}", sizes | flags | {"absent": absent}
        for name in ACTIVATIONS:
            # With these unbounded activations the states would overflow within five steps, so run two steps.
            short = {"sizes": (2, *SIZES[1:])} if name in ("none", "relu") else sizes
            yield op, f"every activation {name}", short | dict.fromkeys(ACTIVATION_PROPERTIES[op], name)
        yield op, "one of everything", {"sizes": (1, 1, 1, 1)}
        # In 64 steps the state would grow without bound with relu, Apple's default for the single gate, and errors
        # would grow with recurrent weights whose norm is above 1. So take tanh and small weights.
        smooth = {"activation": "tanh"} if op == "single_gate_rnn" else {}
        yield op, "64 steps", {"sizes": (64, 2, 8, 16), "weights": 0.15} | smooth
        yield op, "float16", sizes | {"dtype": np.float16} | smooth
    for direction, flags in DIRECTIONS.items():  # with a peephole, whose order also changes
        yield "lstm", f"{direction}, forget gate last", sizes | flags | {"forget_gate_last": True, "absent": ("mask",)}
    for first in (False, True):
        # The case without any of the three flags is the case "uni". reset_gate_first occurs only with other flags.
        for after, flip in ((False, True), (True, False), (True, True)):
            flavour = {"reset_gate_first": first, "reset_after": after, "flip_z": flip}
            words = ", ".join(name.replace("_", " ") for name, value in flavour.items() if value)
            yield "gru", words, sizes | flavour
    as_torch = {"reset_gate_first": True, "reset_after": True, "bidirectional": True}
    yield "gru", "bi, as PyTorch", sizes | as_torch
