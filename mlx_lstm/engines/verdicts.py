"""What came of each kernel's trial on this machine: kept in a file beside the table of engines, for all processes.

The file has the verdicts of a few machines by their names; one with another system, MLX or kernels is another one.
"""

import json
import os
import warnings
from contextlib import suppress
from pathlib import Path
from threading import get_ident

from . import tuning

KEPT = 8
"""Machines whose verdicts the file keeps: environments with another MLX, say, and the kernels before a change."""

_found: dict[str, str] = {}
_broken: set[Path] = set()


def file() -> Path:
    """Where they lie."""
    return tuning.cache_file().with_name("verdicts.json")


def find(trial: str) -> str | None:
    """Why the kernels of a trial are refused here, `""` if they are not; None if nobody has tried."""
    if trial not in _found:
        _found.update(read().get(names(), {}))
    return _found.get(trial)


def keep(trial: str, verdict: str) -> None:
    """Let a verdict count, in this process and, if the file can be written, in others."""
    _found[trial] = verdict
    content = read()
    mine = content.pop(names(), {}) | {trial: verdict}
    content = dict([*content.items(), (names(), mine)][-KEPT:])
    path = file()
    part = path.with_suffix(f".{os.getpid()}-{get_ident()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(content, indent=1) + "\n")
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()


def is_recorded(reason: str) -> bool:
    """Return whether a verdict with this reason counts on this machine, in further processes, too."""
    return reason in _found.values()


def forget() -> None:
    """Drop what this process knows; the file stays."""
    _found.clear()
    _broken.clear()


def names() -> str:
    """This machine: its chip, system, versions, and kernels."""
    return ", ".join(f"{name} {value}" for name, value in tuning.machine().items())


def read() -> dict[str, dict[str, str]]:
    """The file: by machine and trial. A missing one is empty, and so is a broken one, which is named in a warning."""
    path = file()
    try:
        content = json.loads(path.read_text())
        pairs = [pair for verdicts in content.values() for pair in verdicts.items()]
        if not all(isinstance(verdict, str) for _, verdict in pairs):
            raise ValueError("a verdict is a text")
        return content
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        if path not in _broken:
            _broken.add(path)
            warnings.warn(f"{path} has no verdicts on kernels and is ignored: {error!r}", stacklevel=2)
        return {}
