"""Which of the two Metal engines is faster where: the predicted table, and one measured on a user's Mac.

`python -m mlx_lstm.bench --tune` measures and writes a file. It counts only on the chip, system, versions and kernels
it was measured with.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from .metal.launch import shader_folder

Row = tuple[tuple[int, str], ...]


class Table(NamedTuple):
    """By dtype and by least batch size: the engine up to each H, ascending, `stepwise` beyond; where that comes from.

    What holds for an LSTM of one direction is taken to hold for all cells, and for both directions.
    """

    source: str
    engines: dict[str, dict[int, Row]]

    def preferred(self, dtype: mx.Dtype, B: int, H: int) -> tuple[str, str]:
        """The engine for a batch of B and H units, and why.

        Example:
            >>> import mlx.core as mx
            >>> from mlx_lstm.engines.tuning import PREDICTED
            >>> PREDICTED.preferred(mx.float32, 32, 512)
            ('stepwise', 'H = 512 > 128 in float32 at B = 32, predicted')
        """
        name = str(dtype).removeprefix("mlx.core.")
        batches = self.engines.get(name) or {1: ()}
        row = batches[max((least for least in batches if least <= B), default=min(batches))]
        where = f"in {name} at B = {B}, {self.source}"
        for largest, engine in row:
            if largest >= H:
                return engine, f"H = {H} <= {largest} {where}"
        return "stepwise", f"H = {H} > {row[-1][0]} {where}" if row else f"H = {H} {where}"


WIDE = {1: ((128, "fused"),), 65: ((160, "fused"),)}
NARROW = {1: ((160, "fused"),), 65: ((224, "fused"),)}
PREDICTED = Table("predicted", {"float32": WIDE, "float16": NARROW, "bfloat16": NARROW})
"""The largest multiple of 32 up to which two of the three chips of `bench.model.times` are predicted to need no more
GPU time for forward and backward in `fused` than in `stepwise`, at every B of the row. Beyond it one GPU core streams
the recurrent weights more slowly than all cores do in a launch per step; from B = 65 on `fused` streams them for 8
items at once. Not measured."""


def cache_file() -> Path:
    """Where a measured table lies unless told otherwise."""
    caches = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return caches / "mlx-lstm" / "engines.json"


@cache
def machine() -> dict[str, str]:
    """What a table depends on: the chip, the system, the versions, the kernels."""
    from .. import __version__  # which is not there yet when this file is read

    chip = mx.device_info(mx.gpu if mx.is_available(mx.gpu) else mx.cpu)
    return {
        "chip": str(chip.get("device_name", "unknown")),
        "architecture": str(chip.get("architecture", "unknown")),
        "system": f"macOS {platform.mac_ver()[0]}" if sys.platform == "darwin" else platform.system(),
        "mlx": mx.__version__,
        "mlx_lstm": __version__,
        "kernels": kernels_hash(),
    }


def kernels_hash() -> str:
    """A short hash of the shaders and of all that launches them."""
    files = [*shader_folder().glob("*.metal"), *(Path(__file__).parent / "metal").glob("*.py")]
    text = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        text.update(file.name.encode() + b"\0" + file.read_bytes())
    return text.hexdigest()[:16]


def write(file: Path, engines: dict[str, dict[int, Row]], measured: list[dict[str, object]]) -> None:
    """Write a table, with what was measured for it. OSError if the file cannot be written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": machine(), "engines": engines, "measured": measured}, indent=1)
    part = file.with_suffix(".part")
    part.write_text(text + "\n")
    part.replace(file)


def load(file: Path) -> Table:
    """The table in a file, if it is this machine's; else the predicted one, whose `source` says what is wrong.

    A missing file is no reason to warn, a broken one is.
    """
    try:
        content = json.loads(file.read_text())
        engines = {
            str(dtype): {int(least): checked_row(row) for least, row in batches.items()}
            for dtype, batches in content["engines"].items()
        }
        differing = [name for name, value in machine().items() if content["machine"].get(name) != value]
    except FileNotFoundError:
        return PREDICTED
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(f"{file} is not a table of engines and is ignored: {error!r}", stacklevel=2)
        return PREDICTED._replace(source=f"predicted, as {file} is broken")
    if differing:
        return PREDICTED._replace(source=f"predicted, as {file} was measured with another {', '.join(differing)}")
    return Table(f"measured here, {file}", engines)


def checked_row(row: list[list[object]]) -> Row:
    """A row as it should be, or ValueError."""
    found = tuple((H, engine) for H, engine in row)
    if not all(type(H) is int and engine in ("fused", "stepwise", "ops") for H, engine in found):
        raise ValueError(f"a row is pairs of H and engine but got {row}")
    if list(found) != sorted(found, key=lambda pair: pair[0]):
        raise ValueError(f"a row ascends in H but got {row}")
    return found


_chosen: list[Path] = []


@cache
def current() -> Table:
    """The table that counts in this process, read when it is first needed."""
    return load(_chosen[-1] if _chosen else cache_file())


def use(file: str | Path | None) -> Table:
    """Let this file count in this process from now on, or, with `None`, the one in the user's cache again."""
    _chosen[:] = [] if file is None else [Path(file)]
    current.cache_clear()
    return current()
