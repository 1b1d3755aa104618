"""The cases of the command `compare`: one case for each option of an op. If the layout of an option's array depends
on the direction, there is one case for each of forward, reverse and bidirectional."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...mpsgraph.layouts import ACTIVATIONS
from .cases import ACTIVATION_PROPERTIES, GATES, CompareCase, draw, draw_stack

SIZES = (5, 3, 4, 6)  # T, N, I, H
DIRECTIONS = {"uni": {}, "reverse": {"reverse": True}, "bi": {"bidirectional": True}}
"""The directions of a layer: the word in the names of cases, and the descriptor's property."""
NO_STATES = ("init_state", "init_cell", "state_gradient", "cell_gradient")
WITHOUT = {
    "no input weight": ("input_weight", "peephole", "mask"),
    "no bias": ("bias", "peephole", "mask"),
    "no states": (*NO_STATES, "peephole", "mask"),
    "source and weights only": ("input_weight", "bias", *NO_STATES, "peephole", "mask"),
    "mask": ("peephole",),
    "peephole": ("mask",),
}
"""The arguments that a case leaves out, by the name of the case. Cases not listed here have no mask and no peephole."""


def grid(off_kinks: Callable[[CompareCase], bool], seed: int = 0) -> list[CompareCase]:
    """Return the cases of the command `compare`. `off_kinks` returns whether a random case is far enough from kinks,
    where the slope of relu or hard_sigmoid jumps."""
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
                # A reverse layer has the layouts of a forward one. Only an LSTM has a peephole.
                if direction != "reverse" and (op == "lstm" or name != "peephole"):
                    yield op, f"{direction}, {name}", sizes | flags | {"absent": absent}
        for name in ACTIVATIONS:
            # With unbounded gates the states would grow beyond float32 within five steps, so use two.
            short = {"sizes": (2, *SIZES[1:])} if name in ("none", "relu") else sizes
            yield op, f"every activation {name}", short | dict.fromkeys(ACTIVATION_PROPERTIES[op], name)
        yield op, "one of everything", {"sizes": (1, 1, 1, 1)}
        # Over 64 steps relu, Apple's default for a single gate, would let the state grow without bound, and recurrent
        # weights with a norm above 1 would let the errors grow.
        smooth = {"activation": "tanh"} if op == "single_gate_rnn" else {}
        yield op, "64 steps", {"sizes": (64, 2, 8, 16), "weights": 0.15} | smooth
        yield op, "float16", sizes | {"dtype": np.float16} | smooth
    for direction, flags in DIRECTIONS.items():  # with a peephole, which follows the gate order, too
        yield "lstm", f"{direction}, forget gate last", sizes | flags | {"forget_gate_last": True, "absent": ("mask",)}
    for first in (False, True):
        # The case without any flag is "uni" above, and reset_gate_first is tested with the other flags only.
        for after, flip in ((False, True), (True, False), (True, True)):
            flavour = {"reset_gate_first": first, "reset_after": after, "flip_z": flip}
            words = ", ".join(name.replace("_", " ") for name, value in flavour.items() if value)
            yield "gru", words, sizes | flavour
    as_torch = {"reset_gate_first": True, "reset_after": True, "bidirectional": True}
    yield "gru", "bi, as PyTorch", sizes | as_torch
