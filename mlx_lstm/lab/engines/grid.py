"""The cases of the command `check`. Together they run every kernel and, with `full`, every option."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any, NamedTuple

from ...engines.cells import Cell, GRUCell, LSTMCell, NormOptions, RNNCell
from ...engines.ops.packed import matrix_for_oracle
from ...engines.packing import WEIGHTS, WIDTHS, Packing
from ...engines.problem import limited
from ...oracle.judge import Case
from ..cases import (
    DTYPES,
    EVERY_OPTION,
    KINK_MARGIN,
    ROUNDING_MARGIN,
    at_batch,
    draw_away_from_kinks,
    hindrance,
    to_mlx,
)

HALVES = ("float16", "bfloat16")

LAYERS: dict[str, dict[str, Any]] = {
    "lstm": {},
    "lstm, projection": {"projection": True},
    "gru": {"op": "gru"},
    "gru, reset before": {"op": "gru", "reset": "before"},
    "rnn": {"op": "rnn"},
}

BATCHES: dict[int, dict[str, Any]] = {1: {}, 4: {"bidirectional": True}, 17: {"reverse": True}, 66: {}}
"""Batch sizes that select different kernels, each with options for the direction. For fewer than 8 sequences the engine
`stepwise` computes a product number by number, for fewer than 32 in small tiles, else in large tiles. With many
sequences the engine `fused` may use matrix instructions."""

STEPS = 24
"""The number of time steps of a case. The engine `stepwise` writes an array per step, and its last kernel launch joins
these arrays into sequences. This launch can read about 20 arrays only. So with more steps, as here, earlier launches
have to join arrays, too."""

BARE = {"lstm": ("h0", "c0"), "gru": ("h0", "bhn"), "rnn": ("h0",)}
"""For each op, the arguments that are None in the cases called "bare"."""

WIDE: dict[str, dict[str, Any]] = {
    # Some of these layers hold all weights in registers, others only a part. The last layer has 1024 threads per
    # threadgroup, which is Metal's limit. The sizes are T, B, I, H and P, where P is the size of h.
    "lstm, 128 units": {"sizes": (2, 17, 8, 128, 128)},
    "lstm, 256 units": {"sizes": (2, 66, 8, 256, 256)},
    "gru, 128 units": {"op": "gru", "sizes": (2, 17, 8, 128, 128)},
    "rnn, 1024 units": {"op": "rnn", "sizes": (2, 1, 8, 1024, 1024)},
}

UNBOUNDED = ("relu_gates", "identity_gates")
"""Options under which h can grow without limit. With a large batch some value of h leaves the range of float16."""
KINKED = ("relu", "hard")
"""Options whose activations have kinks (jumps of the slope). With a large batch, some argument of an activation is so
near to a kink that rounding to 16 bits could move it across."""


class GridCase(NamedTuple):
    """A case that the command `check` compares with float64.

    name: used in reports.
    dtype: the name of the dtype.
    options: the arguments of `lab.cases.draw`.
    with_cotangent: the outputs that have a cotangent; () for all.
    long: whether kernels use indices of 64 bits, as they do for arrays that are too large for a test.
    packing: how the weights are quantized; None if they are not.
    """

    name: str
    dtype: str
    options: dict[str, Any]
    with_cotangent: tuple[str, ...] = ()
    long: bool = False
    packing: Packing | None = None

    @property
    def op(self) -> str:
        return self.options.get("op", "lstm")

    def draw(self, seed: int = 1) -> Case:
        """Return a `Case` with random arrays, which depend on the seed only. If the weights are quantized, the `Case`
        has the quantized weights, and its arrays are the dequantized weights."""
        # margin: the least distance of an argument from a kink of its activation. It is larger for 16 bits, because
        # rounding to 16 bits moves an argument more than rounding to float32 does.
        margin = ROUNDING_MARGIN if self.dtype == "float32" else KINK_MARGIN
        H = self.options["sizes"][3]
        recurrent = 0.7 / H**0.5  # larger weights would amplify rounding errors
        call, cotangents = draw_away_from_kinks(seed, margin, **self.options, recurrent=recurrent, dtype=self.dtype)
        cotangents = {name: cotangents[name] for name in self.with_cotangent or cotangents}
        case = Case(call, cotangents, self.dtype)
        if self.packing is None:
            return case
        given = {name: to_mlx(case.arrays[name], DTYPES[self.dtype]) for name in WEIGHTS if name in case.arrays}
        weights = {name: self.packing.quantize(array) for name, array in given.items()}
        # rounded: the dequantized weights, which the oracle computes with.
        rounded = {name: matrix_for_oracle(self.packing, weight.arrays(name), name) for name, weight in weights.items()}
        return case._replace(call={**call, **rounded}, weights=weights)

    def hindrance(self, engine: str, **machine: Any) -> str:
        """Return the reason why an engine cannot run this case, or "" if it can. machine: facts to assume about the
        machine instead of asking it, for example device="gpu" or metal=True."""
        cells: dict[str, Cell] = {"lstm": LSTMCell(), "gru": GRUCell(reset=self.options.get("reset", "after"))}
        T, B, I, H, _ = self.options["sizes"]
        options: dict[str, Any] = {name: self.options.get(name, False) for name in ("bidirectional", "projection")}
        cell = cells.get(self.op, RNNCell())
        return hindrance(engine, (T, B, I, H), DTYPES[self.dtype], cell, packing=self.packing, **options, **machine)

    def limits(self) -> AbstractContextManager[object]:
        """Return the context in which this case has to run. If `long` is set, its kernels use 64-bit indices."""
        return limited(index=1) if self.long else nullcontext()


def grid(full: bool = False) -> list[GridCase]:
    """Return the cases that the command `check` compares with float64; with `full` also cases for every option."""
    cases = [*families(), *wide(), *quantized(), *norms()]
    if full:
        cases += [case for case in others() if case not in cases]
    names = [(case.name, case.dtype) for case in cases]
    assert len(set(names)) == len(names)
    return cases


def families() -> Iterator[GridCase]:
    """Yield a case for every kind of layer at every batch size in float32, and at two batch sizes in 16 bits. At the
    smallest and the largest batch size layers have no initial states ("bare"); at the others they have all arrays."""
    for name in LAYERS:
        for B in BATCHES:
            yield layer(name, B, "float32", bare=B in (1, 66))
        for dtype in HALVES:
            yield from (layer(name, B, dtype, bare=B == 66) for B in (4, 66))


def layer(name: str, B: int, dtype: str, bare: bool) -> GridCase:
    """Return a case of a small layer. name: a key of `LAYERS`. B: a key of `BATCHES`, whose options the layer gets.
    bare: without initial states (and a GRU's bias bhn), and only h has a cotangent; otherwise with all arguments."""
    options: dict[str, Any] = LAYERS[name] | BATCHES[B] | {"sizes": (STEPS, B, 3, 5, 3)}  # T, B, I, H, P
    items = "1 item" if B == 1 else f"{B} items"
    if bare:
        op = options.get("op", "lstm")
        missing = {key: None for key in BARE[op] if key != "bhn" or options.get("reset") != "before"}
        return GridCase(f"{name}, {items}, bare", dtype, options | missing, ("h",))
    return GridCase(f"{name}, {items}", dtype, options)


def wide() -> Iterator[GridCase]:
    """Yield cases of layers with many units, whose weights do not all fit in registers."""
    for name, options in WIDE.items():
        yield GridCase(name, "float32", options)
    yield GridCase("lstm, 256 units", "float16", WIDE["lstm, 256 units"])


def quantized() -> Iterator[GridCase]:
    """Yield cases of layers with quantized weights. For 1 and 4 sequences the kernels of `stepwise` multiply number by
    number, for 9 and 33 sequences in tiles. The sizes are T, B, I, H, P."""
    # The arguments are the group size (number of weights with the same scale), the bits per weight, and the mode.
    four, eight, small = Packing(64, 4, "affine"), Packing(32, 8, "affine"), Packing(16, 4, "nvfp4")
    yield GridCase("lstm, 4 bits, 1 item", "float32", {"sizes": (3, 1, 64, 64, 64)}, packing=four)
    yield GridCase("gru, 8 bits, 9 items", "float32", {"op": "gru", "sizes": (3, 9, 32, 32, 32)}, packing=eight)
    before: dict[str, Any] = LAYERS["gru, reset before"] | {"sizes": (3, 4, 16, 48, 48)}
    yield GridCase("gru, reset before, nvfp4, 4 items", "float16", before, packing=small)
    projected: dict[str, Any] = {"projection": True, "sizes": (3, 33, 64, 64, 64)}
    yield GridCase("lstm, projection, 4 bits, 33 items", "bfloat16", projected, packing=four)


def norms() -> Iterator[GridCase]:
    """Yield a case of each cell with layer normalisation. The LSTM and the GRU normalise the recurrent product, the
    LSTM also c before it becomes h, and the plain RNN the sum of both products."""
    norms = {"lstm": NormOptions(of="product", c="output"), "gru": NormOptions(), "rnn": NormOptions(of="sum")}
    for op, norm in norms.items():
        options: dict[str, Any] = {"op": op, "sizes": (4, 3, 3, 9, 9), "norm": norm}  # T, B, I, H, P
        yield GridCase(f"{op}, layer normalisation", "float32", options)


def others() -> Iterator[GridCase]:
    """Yield the cases that only `full` adds:

    - every kind of layer in every dtype and at every batch size, once with all arrays and once without initial states;
    - layers whose sizes are all 1, layers with indices of 64 bits, and wide layers in 16 bits;
    - every kind of quantized weights;
    - each option by itself, with changing batch sizes and dtypes.

    Some of these cases are also in `families`; `grid` leaves out the copies.
    """
    for name in LAYERS:
        yield from (layer(name, B, dtype, bare) for dtype in DTYPES for B in BATCHES for bare in (False, True))
        one = LAYERS[name] | {"sizes": (1, 1, 1, 1, 1)}
        yield GridCase(f"{name}, one of everything", "float32", one)
        for B in (4, 66):
            # The mask has all axes, [T, B, P], so that its indices have 64 bits, too.
            few: dict[str, Any] = LAYERS[name] | {"sizes": (3, B, 3, 5, 3), "mask": (3, B, "P")}
            yield GridCase(f"{name}, {B} items, indices of 64 bits", "float32", few, long=True)
    yield from (GridCase(name, dtype, options) for name, options in WIDE.items() for dtype in HALVES)
    for mode, (group_sizes, bit_widths) in WIDTHS.items():
        for n, (bits, group) in enumerate(product(bit_widths, group_sizes)):
            # Dtype, op and batch size change with different periods, so that many combinations occur.
            dtype, op, B = list(DTYPES)[n % 3], ("lstm", "gru", "rnn")[n // 3 % 3], (1, 9)[n % 2]
            options: dict[str, Any] = {"op": op, "sizes": (3, B, group, group, group)}
            name = f"{op}, {mode}, {bits} bits, groups of {group}"
            yield GridCase(name, dtype, options, packing=Packing(group, bits, mode))
    for n, option in enumerate(EVERY_OPTION):
        # Cases whose clip stops gradients run in float32 only. Many values of c are near the limit, where rounding to
        # 16 bits could make the gradient jump.
        stops = EVERY_OPTION[option].get("clip_gradient") == "zero"
        dtype = "float32" if stops else list(DTYPES)[n % len(DTYPES)]
        # In a large batch it is more likely that a value overflows, or that an argument is near a kink.
        few_items = option.endswith(UNBOUNDED) or (dtype != "float32" and any(word in option for word in KINKED))
        batches = (1, 4) if few_items else tuple(BATCHES)
        B = batches[n % len(batches)]
        options = at_batch(EVERY_OPTION[option], B) | {"sizes": (4, B, 3, 5, 3)}
        yield GridCase(f"option {option}, {B} items", dtype, options)
