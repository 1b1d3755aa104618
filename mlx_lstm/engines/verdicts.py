"""Store the results of the trial runs of kernels, the verdicts. Before kernels are used for the first time on a
machine, a trial run compares their results with float64. Its verdict is a text that says why the kernels are refused,
or "" if they are correct.

All processes of a user share the file `verdicts.json` in the cache folder. It holds {environment: {name of a trial:
verdict}}. An environment is a chip with its versions of macOS, MLX and the kernels' source. The name of a trial says
which kernels it ran.
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
"""How many environments the file keeps. A new version of MLX or of the kernels makes a new environment."""

PROCESSES = 3
"""A fault that may be accidental refuses kernels only in the process in which it occurred. If it has occurred in this
number of processes, all processes refuse the kernels for a week."""

DAY, WEEK = 86_400.0, 604_800.0
"""A day and a week in seconds."""

Keeping = Literal["always", "day", "process"]
"""How long a verdict counts: always, for a day, or only in the process that gave it. If PROCESSES processes have given
a verdict of the last kind, it counts for a week in all processes."""


class Verdict(NamedTuple):
    """A verdict with its duration. reason: why the kernels are refused, or "" if they are correct. until: the time in
    seconds since 1970 until which other processes obey the verdict; None for always. processes: how many processes have
    given it."""

    reason: str
    until: float | None = None
    processes: int = 1

    def counts(self) -> bool:
        """Return whether a process that starts now obeys this verdict. It does not if the time `until` is over, or is
        more than a week away: then the clock was wrong when the verdict was stored."""
        return self.until is None or 0.0 < self.until - time.time() <= WEEK


_known: dict[str, Verdict] = {}
"""The verdicts that this process has read or stored, by the name of the trial."""

_broken: set[Path] = set()
"""The broken files for which this process has warned already."""


def file() -> Path:
    """Return the path of the JSON file with the verdicts: the results of trial runs of kernels on this machine."""
    return tuning.cache_file().with_name("verdicts.json")


def find(trial: str) -> str | None:
    """Return the stored verdict of a trial of kernels: the reason why the kernels are refused, or `""` if they are
    correct. Return None if they were not tried, or if the verdict counts no longer."""
    if trial not in _known:
        stored = read().get(environment(), {})  # environment(): this environment as text
        _known.update({name: verdict for name, verdict in stored.items() if name not in _known and verdict.counts()})
    return _known[trial].reason if trial in _known else None


def record(trial: str, reason: str, keeping: Keeping = "always") -> None:
    """Store the verdict of a trial of kernels for this process and, if `verdicts.json` can be written, for other
    processes. trial: the name of the trial. reason: why the kernels are refused, or "" if they are correct. keeping:
    how long other processes obey the verdict: "always", for a "day", or not at all ("process"), because the fault may
    be accidental. If PROCESSES processes give such a verdict, they obey it for a week."""
    content = read()
    # Remove this environment from the dict and add it again below, as the last one: the file drops the first ones.
    mine = content.pop(environment(), {})
    verdict = Verdict(reason)
    if keeping != "always":
        # count: how many processes have given a verdict on this trial. seconds: how long it counts; 0: only in this
        # process.
        count = mine[trial].processes + 1 if trial in mine else 1
        seconds = DAY if keeping == "day" else WEEK if count >= PROCESSES else 0.0
        verdict = Verdict(reason, time.time() + seconds if seconds else 0.0, count)
    _known[trial] = verdict
    content = dict([*content.items(), (environment(), mine | {trial: verdict})][-MACHINES:])  # the last MACHINES ones
    # A verdict that never expires is stored as its reason alone, a string; any other one as a dict of all fields.
    texts = {
        name: {key: one.reason if one.until is None else one._asdict() for key, one in own.items()}
        for name, own in content.items()
    }
    with suppress(OSError):
        file().parent.mkdir(parents=True, exist_ok=True)
        # force=True: replace an older file.
        write_whole(file(), lambda partial: partial.write_text(json.dumps(texts, indent=1) + "\n"), force=True)


def keeping_of(reason: str) -> str:
    """Return for how long other processes obey the latest verdict with this reason, in words for a warning: "always",
    "for a week", "for a day", or "" if only this process obeys it. The verdict is found by its reason, because a caller
    that warns does not know the name of the trial."""
    known = list(_known.values())  # a copy: another thread may add a verdict
    verdict = next((one for one in reversed(known) if one.reason == reason), None)
    if verdict is None or verdict.until == 0.0:  # 0.0 is in the year 1970, so no other process obeys this verdict
        return ""
    if verdict.until is None:
        return "always"
    return "for a day" if verdict.until - time.time() <= DAY else "for a week"


def forget() -> None:
    """Forget the verdicts that this process has read or stored, and for which broken files it has warned, so that the
    next call reads the file again. The file remains. Only tests call this."""
    _known.clear()
    _broken.clear()


def environment() -> str:
    """Return this environment as text, such as "chip Apple M4, ..., system macOS 26.0, mlx 0.32.4, ...": everything on
    which a verdict depends."""
    return ", ".join(f"{name} {value}" for name, value in tuning.machine().items())


def read() -> dict[str, dict[str, Verdict]]:
    """Return the content of `verdicts.json`: {environment: {name of a trial: its verdict}}. If the file is missing or
    broken, return {}; if it is broken, also warn."""
    path = file()
    try:
        content = read_json(path)
        return {name: {trial: verdict_of(one) for trial, one in own.items()} for name, own in content.items()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
        if path not in _broken:
            _broken.add(path)
            text = f"{path} has no verdicts on kernels and is ignored: {type(error).__name__}, {shown(error)}"
            warnings.warn(text, stacklevel=2)
        return {}


def verdict_of(value: Any) -> Verdict:
    """Return the verdict that `verdicts.json` holds as this value: a string, the reason, if the verdict never expires,
    else a dict of all fields. Raise an error if the value is no verdict; `read` then ignores the file."""
    if isinstance(value, str):
        return Verdict(value)
    verdict = Verdict(**value)
    if not (
        isinstance(verdict.reason, str)
        and isinstance(verdict.until, int | float)
        and isinstance(verdict.processes, int)
    ):
        raise ValueError("a verdict is a text, or has a reason, a time and a number of processes")
    return verdict._replace(until=float(verdict.until))  # raises an OverflowError if the integer is too large
