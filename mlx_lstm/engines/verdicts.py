"""The verdicts on kernels: what came of each one's trial on this machine, in a file for all processes.

The file lies beside the table of engines. It holds the verdicts of a few machines by their names; a machine with
another system, MLX or kernels is another one.
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
    """Return why a trial's kernels are refused here, `""` if they are not, None if nobody has tried them."""
    if trial not in _known:
        _known.update(read().get(names(), {}))
    return _known.get(trial)


def record(trial: str, verdict: str) -> None:
    """Let a verdict count, in this process and, if the file can be written, in others."""
    _known[trial] = verdict
    content = read()
    mine = content.pop(names(), {}) | {trial: verdict}
    content = dict([*content.items(), (names(), mine)][-MACHINES:])
    text = json.dumps(content, indent=1) + "\n"
    with suppress(OSError):
        file().parent.mkdir(parents=True, exist_ok=True)
        write_whole(file(), lambda partial: partial.write_text(text), force=True)


def is_recorded(reason: str) -> bool:
    """Return whether a verdict with this reason counts on this machine, in further processes, too."""
    return reason in _known.values()


def forget() -> None:
    """Drop the verdicts that this process knows; the file stays."""
    _known.clear()
    _broken.clear()


def names() -> str:
    """Return this machine's name: its chip, system, versions, and kernels."""
    return ", ".join(f"{name} {value}" for name, value in tuning.machine().items())


def read() -> dict[str, dict[str, str]]:
    """Return the file's verdicts by machine and trial: none if it is missing, and none, with a warning, if broken."""
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
