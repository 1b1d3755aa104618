"""The verdicts on kernels. A verdict is the result of a test run of kernels on this machine, before their first use: a
text that says why the kernels are refused, or "" if they are correct.

All processes share the file `verdicts.json`, next to the table that says which engine is faster (`tuning`). It holds
the verdicts for a few environments: {environment: {name of a test run: verdict}}. An environment is a chip and a system
with its versions of macOS, MLX and the kernels' source. The name of a test run (`trial`) says which kernels it ran.
"""

import json
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..ground.budget import shown
from ..ground.files import read_json, write_whole
from . import tuning

MACHINES = 8
"""How many environments the file keeps. Another version of MLX, or another version of the kernels, is a different
environment."""

PROCESSES = 3
"""A fault that may not come again refuses kernels in its own process only. After such faults in this number of
processes the kernels are refused for a week."""

DAY, WEEK = 86_400.0, 604_800.0
"""In seconds."""

Keeping = Literal["always", "day", "process"]
"""How long a verdict counts: always, for a day, or in this process. After PROCESSES processes have given a verdict of
the last kind, it counts for a week."""


class Kept(NamedTuple):
    """A stored verdict. reason: why the kernels are refused, or "" if they are correct. until: the time, in seconds
    since 1970, until which other processes obey it; None for always. processes: how many processes have given it."""

    reason: str
    until: float | None = None
    processes: int = 1

    def counts(self) -> bool:
        """Return whether a process that starts now obeys this verdict. A time that is farther away than a week was
        written with another clock."""
        return self.until is None or 0.0 < self.until - time.time() <= WEEK


_known: dict[str, Kept] = {}
"""The verdicts that this process has read or stored, by the name of the test run."""

_broken: set[Path] = set()
"""The broken files for which this process has warned already."""


def file() -> Path:
    """Return the path of the JSON file with the verdicts: the results of test runs of kernels on this machine."""
    return tuning.cache_file().with_name("verdicts.json")


def find(trial: str) -> str | None:
    """Return the recorded verdict on the kernels of one test run: the reason why they are refused, `""` if they are
    correct, or None if they were not tested or the verdict counts no more."""
    if trial not in _known:
        stored = read().get(names(), {})  # names(): the environment as text
        _known.update({name: kept for name, kept in stored.items() if name not in _known and kept.counts()})
    return _known[trial].reason if trial in _known else None


def record(trial: str, reason: str, keeping: Keeping = "always") -> None:
    """Store the verdict of one test run of kernels: the reason why they are refused, or "" if they are correct. It is
    stored for this process and, if `verdicts.json` can be written, for other processes. keeping: for how long:
    "always", for a "day", or in this "process" only, because the fault may not come again. If PROCESSES processes give
    such a verdict, it comes again, and the verdict counts for a week."""
    content = read()
    # This environment is removed and added again as the last one, so that the oldest one falls out of the file.
    mine = content.pop(names(), {})
    kept = Kept(reason)
    if keeping != "always":
        # count: the processes that have given a verdict on this trial. seconds: how long it counts; 0: only here.
        count = mine[trial].processes + 1 if trial in mine else 1
        seconds = DAY if keeping == "day" else WEEK if count >= PROCESSES else 0.0
        kept = Kept(reason, time.time() + seconds if seconds else 0.0, count)
    _known[trial] = kept
    content = dict([*content.items(), (names(), mine | {trial: kept})][-MACHINES:])  # the newest ones
    texts = {name: {key: written(one) for key, one in own.items()} for name, own in content.items()}
    with suppress(OSError):
        file().parent.mkdir(parents=True, exist_ok=True)
        # force: replace the file.
        write_whole(file(), lambda partial: partial.write_text(json.dumps(texts, indent=1) + "\n"), force=True)


def keeping_of(reason: str) -> str:
    """Return how long `verdicts.json` keeps the latest verdict with this reason, in words for a warning: "always", "for
    a week", "for a day", or "" if only this process obeys it. A caller that warns knows the reason, but no trial."""
    known = list(_known.values())  # a copy: another thread may add a verdict
    kept = next((one for one in reversed(known) if one.reason == reason), None)
    if kept is None or kept.until == 0.0:  # 1970: no other process obeys such a verdict
        return ""
    if kept.until is None:
        return "always"
    return "for a day" if kept.until - time.time() <= DAY else "for a week"


def forget() -> None:
    """Forget the verdicts that this process has read or stored, and for which broken files it has warned, so that the
    next call reads the file again. The file remains. Only tests call this."""
    _known.clear()
    _broken.clear()


def names() -> str:
    """Return the name of this environment, made of the names and values of its chip, system, versions and kernels."""
    return ", ".join(f"{name} {value}" for name, value in tuning.machine().items())


def read() -> dict[str, dict[str, Kept]]:
    """Return the content of `verdicts.json`: for each environment (system and versions) a dict from a test run's name
    to its verdict. Return an empty dict if the file is missing or broken; if it is broken, also warn."""
    path = file()
    try:
        content = read_json(path)
        return {name: {trial: kept_of(one) for trial, one in own.items()} for name, own in content.items()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
        if path not in _broken:
            _broken.add(path)
            text = f"{path} has no verdicts on kernels and is ignored: {type(error).__name__}, {shown(error)}"
            warnings.warn(text, stacklevel=2)
        return {}


def written(kept: Kept) -> str | dict[str, Any]:
    """Return a verdict as `verdicts.json` has it: a text if it counts always, else a dict of all fields."""
    return kept.reason if kept.until is None else kept._asdict()


def kept_of(value: Any) -> Kept:
    """Return the verdict from which `written` made this value. Raise an error that `read` expects if it is no such
    value. A verdict that counts always is a text, so a dict has a time `until`."""
    if isinstance(value, str):
        return Kept(value)
    kept = Kept(**value)
    if not (isinstance(kept.reason, str) and isinstance(kept.until, int | float) and isinstance(kept.processes, int)):
        raise ValueError("a verdict is a text, or has a reason, a time and a number of processes")
    return kept._replace(until=float(kept.until))  # OverflowError: an integer that no clock gives
