"""The verdicts on kernels. A verdict is the result of a test run of kernels on this machine, before their first use.
All processes share a file of verdicts.

The file is next to the table that says which engine is faster. It holds the verdicts for a few environments. An
environment is a system with its versions of macOS, MLX and the kernels' source.
"""

import json
import warnings
from contextlib import suppress
from pathlib import Path

from ..budget import shown
from ..files import read_json, write_whole
from . import tuning

MACHINES = 8
"""How many environments the file keeps. Another version of MLX, or another version of the kernels, is a different
environment."""

_known: dict[str, str] = {}
_broken: set[Path] = set()


def file() -> Path:
    """Return the path of the JSON file with the verdicts: the results of test runs of kernels on this machine."""
    return tuning.cache_file().with_name("verdicts.json")


def find(trial: str) -> str | None:
    """Return the recorded verdict on the kernels of one test run: the reason why they are refused, `""` if they are
    correct, or None if they were not tested."""
    if trial not in _known:
        _known.update(read().get(names(), {}))
    return _known.get(trial)


def record(trial: str, verdict: str) -> None:
    """Store the verdict of one test run of kernels: the reason why they are refused, or "" if they are correct. It is
    stored for this process and, if `verdicts.json` can be written, for other processes."""
    _known[trial] = verdict
    content = read()
    mine = content.pop(names(), {}) | {trial: verdict}
    content = dict([*content.items(), (names(), mine)][-MACHINES:])
    text = json.dumps(content, indent=1) + "\n"
    with suppress(OSError):
        file().parent.mkdir(parents=True, exist_ok=True)
        write_whole(file(), lambda partial: partial.write_text(text), force=True)


def is_recorded(reason: str) -> bool:
    """Return whether a test run of kernels on this machine has stored `reason` as its verdict: the reason why it
    refuses these kernels. Other processes read the stored verdicts, so they refuse the kernels, too."""
    return reason in _known.values()


def forget() -> None:
    """Forget the results of test runs of kernels that this process has read or stored. The file `verdicts.json`
    remains."""
    _known.clear()
    _broken.clear()


def names() -> str:
    """Return the name of this environment, made of its chip, system, versions and kernels."""
    return ", ".join(f"{name} {value}" for name, value in tuning.machine().items())


def read() -> dict[str, dict[str, str]]:
    """Return the content of `verdicts.json`: for each environment (system and versions) a dict from a test run's name
    to its verdict, the reason why the kernels are refused or "". Return an empty dict if the file is missing or
    broken; if it is broken, also warn."""
    path = file()
    try:
        content = read_json(path)
        pairs = [pair for verdicts in content.values() for pair in verdicts.items()]
        if not all(isinstance(verdict, str) for _, verdict in pairs):
            raise ValueError("a verdict is a text")
        return content
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, AttributeError, OverflowError) as error:
        if path not in _broken:
            _broken.add(path)
            text = f"{path} has no verdicts on kernels and is ignored: {type(error).__name__}, {shown(error)}"
            warnings.warn(text, stacklevel=2)
        return {}
