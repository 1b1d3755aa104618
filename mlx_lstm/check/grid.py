"""What is checked: problems that together need every kernel; with all options, each of them once."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx

from ..bench.tasks import DTYPES
from ..engines.cells import Cell, GRUCell, LSTMCell, RNNCell
from ..engines.choice import choose
from ..engines.ops.packed import judged
from ..engines.packing import WEIGHTS, WIDTHS, Packing, Quantized
from ..engines.problem import limited
from .cases import EVERY_OPTION, KINK_MARGIN, ROUNDING_MARGIN, Case, at_batch, draw_away_from_kinks, to_mlx

HALVES = ("float16", "bfloat16")

LAYERS: dict[str, dict[str, Any]] = {
    "lstm": {},
    "lstm, projection": {"projection": True},
    "gru": {"op": "gru"},
    "gru, reset before": {"op": "gru", "reset": "before"},
    "rnn": {"op": "rnn"},
}

WAYS: dict[int, dict[str, Any]] = {1: {}, 4: {"bidirectional": True}, 17: {"reverse": True}, 66: {}}
"""Batch sizes, each of which another form of the kernels serves, and directions. `stepwise` multiplies in lanes below 8
items, in small tiles below 32; `fused` in matrices from 65 on."""

STEPS = 24
"""More than `stepwise` may lay out in time without joining some on the way."""

BARE = {
    "lstm": {"h0": None, "c0": None},
    "gru": {"h0": None, "bhn": None},
    "rnn": {"h0": None},
}
"""What a layer leaves out that is called without states."""

WIDE: dict[str, dict[str, Any]] = {
    # One in registers entirely, one in part, one at Metal's limit of threads: T, B, I, H and the op.
    "lstm, 128 units": {"sizes": (2, 17, 8, 128, 128)},
    "lstm, 256 units": {"sizes": (2, 66, 8, 256, 256)},
    "gru, 128 units": {"op": "gru", "sizes": (2, 17, 8, 128, 128)},
    "rnn, 1024 units": {"op": "rnn", "sizes": (2, 1, 8, 1024, 1024)},
}

UNBOUNDED = ("relu_gates", "identity_gates")  # of many items some leave the range of float16
KINKED = ("relu", "hard")  # of many items some are nearer to a kink than 16 bits can tell


class Problem(NamedTuple):
    """A problem: its name in reports, the dtype's name, what `cases.draw` takes besides; the outputs that have a
    gradient, () for all; whether indices have 64 bits, as in arrays of more elements than a test can have; how the
    weights are packed, if they are."""

    name: str
    dtype: str
    options: dict[str, Any]
    shown: tuple[str, ...] = ()
    long: bool = False
    packing: Packing | None = None

    @property
    def op(self) -> str:
        """`lstm`, `gru` or `rnn`."""
        return self.options.get("op", "lstm")

    def draw(self) -> tuple[Case, dict[str, Any]]:
        """(case, cotangents), the same ones at every call."""
        margin = ROUNDING_MARGIN if self.dtype == "float32" else KINK_MARGIN
        recurrent = 0.7 / self.options["sizes"][3] ** 0.5  # a norm above 1 would let rounding errors grow with time
        case, cotangents = draw_away_from_kinks(1, margin, **self.options, recurrent=recurrent, dtype=self.dtype)
        return case, {name: cotangents[name] for name in self.shown or cotangents}

    def packed(self, case: Case) -> tuple[Case, dict[str, Quantized]]:
        """The case with what its weights come to once they are packed, and the packed ones."""
        if self.packing is None:
            return case, {}
        weights, found, dtype = {}, dict(case), DTYPES[self.dtype]
        for name in (name for name in WEIGHTS if case.get(name) is not None):
            packed = mx.quantize(to_mlx(case[name], dtype), *self.packing)
            weights[name] = Quantized(*packed, **self.packing._asdict())
            found[name] = judged(self.packing, weights[name].arrays(name), name)
        return found, weights

    def hindrance(self, engine: str, device: str, metal: bool) -> str:
        """Why an engine cannot run this there; "" if it can."""
        cells: dict[str, Cell] = {"lstm": LSTMCell(), "gru": GRUCell(reset=self.options.get("reset", "after"))}
        T, B, width, H, _ = self.options["sizes"]
        given: dict[str, Any] = {name: self.options.get(name, False) for name in ("bidirectional", "projection")}
        given |= {"device": "cpu" if engine == "numpy" else device, "metal": metal, "traced": False}
        try:
            sizes, cell = (T, B, width, H), cells.get(self.op, RNNCell())
            choose(sizes=sizes, dtype=DTYPES[self.dtype], cell=cell, requested=engine, packing=self.packing, **given)
        except ValueError as error:
            return str(error).partition("cannot run: ")[2].rstrip(".") or str(error)
        return ""

    def indices(self) -> AbstractContextManager[object]:
        """Return the context in which this runs: with indices of 64 bits if it is `long`."""
        return limited(index=1) if self.long else nullcontext()


def grid(full: bool = False) -> list[Problem]:
    """The problems; `full` for those of every option, too."""
    found = [*families(), *wide(), *quantized()]
    if full:
        found += [problem for problem in others(found) if problem not in found]
    names = [(problem.name, problem.dtype) for problem in found]
    assert len(set(names)) == len(names)
    return found


def families() -> Iterator[Problem]:
    """Every layer in every form of the kernels in float32, in one form of each kind in 16 bits; with all arrays and all
    gradients, or bare."""
    for name in LAYERS:
        for B in WAYS:
            yield layer(name, B, "float32", bare=B in (1, 66))
        for dtype in HALVES:
            yield from (layer(name, B, dtype, bare=B == 66) for B in (4, 66))


def layer(name: str, B: int, dtype: str, bare: bool) -> Problem:
    """A layer of a few units; `bare`: without states, of which only h has a gradient."""
    options: dict[str, Any] = LAYERS[name] | WAYS[B] | {"sizes": (STEPS, B, 3, 5, 3)}
    items = "1 item" if B == 1 else f"{B} items"
    if bare:
        op = options.get("op", "lstm")
        without = {key: None for key in BARE[op] if key != "bhn" or options.get("reset") != "before"}
        return Problem(f"{name}, {items}, bare", dtype, options | without, ("h",))
    return Problem(f"{name}, {items}", dtype, options)


def wide() -> Iterator[Problem]:
    """Layers of many units, whose weights do not fit in registers."""
    for name, options in WIDE.items():
        yield Problem(name, "float32", options)
    yield Problem("lstm, 256 units", "float16", WIDE["lstm, 256 units"])


def quantized() -> Iterator[Problem]:
    """Packed weights, which the product by lanes and that by tiles unpack."""
    four, eight, small = Packing(64, 4, "affine"), Packing(32, 8, "affine"), Packing(16, 4, "nvfp4")
    yield Problem("lstm, 4 bits, 1 item", "float32", {"sizes": (3, 1, 64, 64, 64)}, packing=four)
    yield Problem("gru, 8 bits, 9 items", "float32", {"op": "gru", "sizes": (3, 9, 32, 32, 32)}, packing=eight)
    before: dict[str, Any] = LAYERS["gru, reset before"] | {"sizes": (3, 4, 16, 48, 48)}
    yield Problem("gru, reset before, nvfp4, 4 items", "float16", before, packing=small)
    projected: dict[str, Any] = {"projection": True, "sizes": (3, 33, 64, 64, 64)}
    yield Problem("lstm, projection, 4 bits, 33 items", "bfloat16", projected, packing=four)


def others(taken: list[Problem]) -> Iterator[Problem]:
    """What is rarer: the other forms in 16 bits and the other choice of arrays, fewest numbers, long indices, wide
    layers in 16 bits, and each option alone, with forms and dtypes in turns."""
    for name in LAYERS:
        yield from (layer(name, B, dtype, bare) for dtype in DTYPES for B in WAYS for bare in (False, True))
        one = LAYERS[name] | {"sizes": (1, 1, 1, 1, 1)}
        yield Problem(f"{name}, one of everything", "float32", one)
        for B in (4, 66):
            few: dict[str, Any] = LAYERS[name] | {"sizes": (3, B, 3, 5, 3), "mask": (3, B, "P")}
            yield Problem(f"{name}, {B} items, indices of 64 bits", "float32", few, long=True)
    yield from (Problem(name, dtype, options) for name, options in WIDE.items() for dtype in HALVES)
    for mode, (groups, widths) in WIDTHS.items():
        for n, (bits, group) in enumerate(product(widths, groups)):
            dtype, op, B = list(DTYPES)[n % 3], ("lstm", "gru", "rnn")[n // 3 % 3], (1, 9)[n % 2]
            packed: dict[str, Any] = {"op": op, "sizes": (3, B, group, group, group)}
            yield Problem(
                f"{op}, {mode}, {bits} bits, groups of {group}", dtype, packed, packing=Packing(group, bits, mode)
            )
    for n, option in enumerate(EVERY_OPTION):
        dtype = list(DTYPES)[n % len(DTYPES)]
        careful = option.endswith(UNBOUNDED) or (dtype != "float32" and any(word in option for word in KINKED))
        batches = (1, 4) if careful else tuple(WAYS)
        B = batches[n % len(batches)]
        options = at_batch(EVERY_OPTION[option], B) | {"sizes": (4, B, 3, 5, 3)}
        yield Problem(f"option {option}, {B} items", dtype, options)
