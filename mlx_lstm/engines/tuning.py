"""The table that says which Metal engine is faster at which sizes, and how `fused` divides its work.

`python -m mlx_lstm.bench --tune` measures the table on a user's Mac and writes it to a file. This file is used only
with the chip, system, versions and kernels with which it was measured. Without a file the faster engine is predicted
from the number of GPU cores, which this module determines, too.
"""

import hashlib
import os
import platform
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import mlx.core as mx

from ..ground.files import read_json
from ..ground.machine import VERSION, counted_gpu_cores, installed_version, shader_folder
from .problem import CORES, Cut, Limits

Row = tuple[tuple[int, str], ...]
"""The type of a row of the table: pairs (largest H, engine that is faster up to this H), with H ascending."""


class Table(NamedTuple):
    """A table of the faster Metal engine by dtype, batch size and H. It is measured for an LSTM with one direction,
    and it is used for all cells and for two directions.

    source: where the numbers come from, as text for the reason of a choice.
    engines: {dtype: {B: pairs (largest H, engine)}}, with H ascending. The pairs are used for batches of B items up to
        the next larger B. For H above the last pair `stepwise` is faster.
    discarded: every (dtype, B, engine) for which a measurement failed or gave a wrong result.
    cuts: {(dtype, B): cut}, where a cut says how `fused` divides its work. An entry exists only where a measured cut is
        faster than the rules of `fused`.
    """

    source: str
    engines: dict[str, dict[int, Row]]
    discarded: frozenset[tuple[str, int, str]] = frozenset()
    cuts: Mapping[tuple[str, int], Cut] = MappingProxyType({})

    def preferred(self, dtype: mx.Dtype | str, B: int, H: int) -> tuple[str, str]:
        """Return the faster engine for a batch of B items and H hidden units, and the reason.

        Example:
            >>> import mlx.core as mx
            >>> from mlx_lstm.engines.tuning import Table
            >>> Table("measured", {"float32": {1: ((128, "fused"),)}}).preferred(mx.float32, 32, 64)
            ('fused', 'H = 64 <= 128 in float32 at B = 32, measured')
        """
        name, _, row = self.row_at(dtype, B)
        where = f"in {name} at B = {B}, {self.source}"  # a part of the reason
        for largest, engine in row:
            if largest >= H:
                return engine, f"H = {H} <= {largest} {where}"
        # The engine above the last measured H: `stepwise`, unless a measurement of it failed.
        beyond = "stepwise" if self.trusts("stepwise", dtype, B) else "ops"
        return beyond, f"H = {H} > {row[-1][0]} {where}" if row else f"H = {H} {where}"

    def trusts(self, engine: str, dtype: mx.Dtype | str, B: int) -> bool:
        """Return whether an engine may run at a value of H that was not measured, for this dtype and batch size. It
        may not if it failed at a measured H."""
        name, least, _ = self.row_at(dtype, B)
        return (name, least, engine) not in self.discarded

    def cut(self, dtype: mx.Dtype, B: int) -> Cut | None:
        """Return how `fused` shall divide its work for a batch of B items (a cut), as measured. Return None if the
        table has no cut for this dtype and B; `fused` then uses its own rules."""
        return self.cuts.get(self.row_at(dtype, B)[:2]) if self.cuts else None

    def row_at(self, dtype: mx.Dtype | str, B: int) -> tuple[str, int, Row]:
        """Return the entry of `engines` for this dtype and a batch of B items: (name of the dtype, least batch size to
        which the entry applies, pairs (largest H, engine))."""
        name = str(dtype).removeprefix("mlx.core.")
        batches = self.engines.get(name) or {1: ()}  # no measurement: an empty row from B = 1 on
        least = max((least for least in batches if least <= B), default=min(batches))
        return name, least, batches[least]


PREDICTED = Table("predicted", {})
"""The table without measurements. Where it is used, `predicted.predict` says which engine is faster."""

CORES_OF_KINDS = {"Pro": 18, "Max": 38, "Ultra": 76}
"""{last word of a chip's name: typical number of GPU cores}. The real numbers differ by up to a quarter between
generations of chips."""

CORES_OF_LETTERS = {"p": 5, "s": 38, "d": 76}
"""{last letter of the name of the GPU's architecture: typical number of GPU cores}. `p`: a phone, `s`: a Max, `d`: an
Ultra."""


@cache
def gpu_cores() -> int:
    """Return the number of GPU cores of this machine. It is what the system reports or, if it reports nothing, the
    typical number for the name of the chip or of the GPU's architecture or, if both names are unknown, 10."""
    return counted_gpu_cores() or suggested_cores(machine())


@cache
def on_this_gpu(limits: Limits) -> Limits:
    """Return the limits (sizes above which an engine launches different kernels) with the number of GPU cores of this
    machine, unless they contain a number of cores already."""
    return limits if limits.cores else limits._replace(cores=gpu_cores())


def suggested_cores(about: Mapping[str, str]) -> int:
    """Return the typical number of GPU cores of this kind of chip. The kind is the last word of the chip's name ("Max"
    in "Apple M4 Max") or, if that says nothing, the last letter of the name of the GPU's architecture ("s" in
    "applegpu_g16s"). about: a dict with both names, "chip" and "architecture"."""
    kind, letter = about["chip"].split(" ")[-1], about["architecture"][-1:]
    known = CORES_OF_LETTERS.get(letter, CORES) if about["architecture"].startswith("applegpu") else CORES
    return CORES_OF_KINDS.get(kind, known)


def cache_file() -> Path:
    """Return the default path of the file with a measured table. If the user has no home folder, the path is below the
    null device, where no file can be read or written."""
    home = os.path.expanduser("~")
    caches = Path(
        home if os.path.isabs(home) else os.devnull, "Library/Caches" if sys.platform == "darwin" else ".cache"
    )
    return caches / "mlx-lstm" / "engines.json"


@cache
def machine() -> dict[str, str]:
    """Return everything on which a measured table depends: the chip, the system, the versions and the kernels."""
    chip = mx.device_info(mx.gpu if mx.is_available(mx.gpu) else mx.cpu)
    return {
        "chip": str(chip.get("device_name", "unknown")),
        "architecture": str(chip.get("architecture", "unknown")),
        "system": f"macOS {platform.mac_ver()[0]}" if sys.platform == "darwin" else platform.system(),
        "mlx": installed_version("mlx"),
        "mlx_lstm": VERSION,
        "kernels": kernels_hash(),
    }


def kernels_hash() -> str:
    """Return a short hash of the source of the shaders and of the modules that launch them."""
    files = [*shader_folder().glob("*.metal"), *(Path(__file__).parent / "metal").glob("*.py")]
    text = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        text.update(file.name.encode() + b"\0" + file.read_bytes())
    return text.hexdigest()[:16]


def load(file: Path) -> Table:
    """Return the table in a file if it was measured on this machine. Otherwise return the predicted table, whose
    `source` says why.

    A broken file causes a warning; a missing file does not.
    """
    try:
        content = read_json(file)
        engines = {
            str(dtype): {int(least): checked_row(row) for least, row in batches.items()}
            for dtype, batches in content["engines"].items()
        }
        discarded = frozenset(failures(content["measured"]))
        cuts = {(str(dtype), int(least)): checked_cut(*cut) for dtype, least, *cut in content.get("cuts", [])}
        # differing: what differs between this machine and the one that measured the table, such as "mlx" (its version).
        differing = [name for name, value in machine().items() if content["machine"].get(name) != value]
    except (FileNotFoundError, NotADirectoryError):
        return PREDICTED
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        warnings.warn(f"{file} is not a table of engines and is ignored: {error!r}", stacklevel=2)
        return PREDICTED._replace(source=f"predicted, as {file} is broken")
    if differing:
        return PREDICTED._replace(source=f"predicted, as {file} was measured with another {', '.join(differing)}")
    return Table(f"measured here, {file}", engines, discarded, cuts)


def failures(measured: list[dict[str, Any]]) -> Iterator[tuple[str, int, str]]:
    """Yield (dtype, B, engine) for every measurement that failed. measured: the measurements in the file; for one that
    failed `bench --tune` has written a reason instead of milliseconds."""
    for point in measured:  # one dtype, B and H, and for each engine its milliseconds or a reason
        words = (name for name in ("fused", "stepwise") if isinstance(point[name], str))
        yield from ((str(point["dtype"]), int(point["B"]), name) for name in words)


def checked_row(row: Any) -> Row:
    """Return a row of a table that comes from a file. Raise an error if it is not pairs (largest H, engine), H
    ascending."""
    pairs = tuple([(H, engine) for H, engine in row])
    if not all(type(H) is int and engine in ("fused", "stepwise", "ops") for H, engine in pairs):
        raise ValueError(f"a row is pairs of H and engine but got {row}")
    if list(pairs) != sorted(pairs, key=lambda pair: pair[0]):
        raise ValueError(f"a row ascends in H but got {row}")
    return pairs


def checked_cut(rows: Any, spare: Any) -> Cut:
    """Return a cut that comes from a file, or raise an error if one of its numbers is wrong."""
    if rows not in (1, 2, 4, 8) or type(spare) is not int or spare < 0:
        raise ValueError(f"a cut is rows 1, 2, 4 or 8 and registers to spare but got {rows}, {spare}")
    return Cut(rows, spare)


_chosen: list[Path] = []
"""The file that `use` has chosen; empty for the file in the user's cache folder."""

_tried: list[Cut | None] = []
"""The cuts of the contexts `trying` that are active, the innermost last."""


@cache
def current() -> Table:
    """Return the table that this process uses to choose the faster Metal engine. The first call reads it from the file
    that `bench --tune` wrote."""
    return load(_chosen[-1] if _chosen else cache_file())


def cut(dtype: mx.Dtype, B: int) -> Cut | None:
    """Return how `fused` divides its work in this process for this dtype and a batch of B items: the cut of the
    innermost context `trying`, else the measured cut, or None if `fused` uses its own rules."""
    return _tried[-1] if _tried else current().cut(dtype, B)


@contextmanager
def trying(cut: Cut | None) -> Iterator[None]:
    """Inside the context, make `fused` divide its work as `cut` says, whatever the table of measurements says. cut:
    how many batch items a threadgroup computes and how many registers it leaves free; with None `fused` uses its own
    rules."""
    _tried.append(cut)
    try:
        yield
    finally:
        _tried.pop()


def use(file: str | Path | None) -> Table:
    """Use the table in this file in this process from now on. With None, use the table in the user's cache folder."""
    _chosen[:] = [] if file is None else [Path(file)]
    current.cache_clear()
    return current()
