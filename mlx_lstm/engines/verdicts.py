"""The verdicts on kernels: the result of each kernel's trial on this machine, in a file that all processes share.

The file is next to the table of engines. It holds the verdicts of a few environments by name; another system, MLX
version or kernel text is another environment.
"""

import json
import warnings
from contextlib import suppress
from pathlib import Path

from ..files import parse_json, shown, size_of, write_whole
from . import tuning

MACHINES = 8
"""Machines whose verdicts the file keeps: environments with another MLX, say, and the kernels before a change."""

_known: dict[str, str] = {}
_broken: set[Path] = set()


def file() -> Path:
    """Return the file's path."""
    return tuning.cache_file().with_name("verdicts.json")


def find(trial: str) -> str | None:
    """Return the recorded verdict on a trial's kernels: the reason for which they are refused, `""` if they are
    right, None if there was no trial."""
    if trial not in _known:
        _known.update(read().get(names(), {}))
    return _known.get(trial)


def record(trial: str, verdict: str) -> None:
    """Record a verdict for this process and, if the file can be written, for other processes."""
    _known[trial] = verdict
    content = read()
    mine = content.pop(names(), {}) | {trial: verdict}
    content = dict([*content.items(), (names(), mine)][-MACHINES:])
    text = json.dumps(content, indent=1) + "\n"
    with suppress(OSError):
        file().parent.mkdir(parents=True, exist_ok=True)
        write_whole(file(), lambda partial: partial.write_text(text), force=True)


def is_recorded(reason: str) -> bool:
    """Return whether a verdict with this reason is recorded for this machine, so that further processes use it, too."""
    return reason in _known.values()


def forget() -> None:
    """Forget the verdicts that this process has read or recorded. The file remains."""
    _known.clear()
    _broken.clear()


def names() -> str:
    """Return the name of this environment: its chip, system, versions and kernels."""
    return ", ".join(f"{name} {value}" for name, value in tuning.machine().items())


def read() -> dict[str, dict[str, str]]:
    """Return the file's verdicts by environment and trial. Return none if the file is missing; if it is broken, also
    warn."""
    path = file()
    try:
        size_of(path)
        content = parse_json(path.read_text())
        pairs = [pair for verdicts in content.values() for pair in verdicts.items()]
        if not all(isinstance(verdict, str) for _, verdict in pairs):
            raise ValueError("a verdict is a text")
        return content
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, OverflowError) as error:
        if path not in _broken:
            _broken.add(path)
            text = f"{path} has no verdicts on kernels and is ignored: {type(error).__name__}, {shown(error)}"
            warnings.warn(text, stacklevel=2)
        return {}
