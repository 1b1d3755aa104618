"""Run the other commands of this package, for `check --full`, each in a separate process."""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from ..engines import tuning
from ..ground.machine import child_environment, module_command
from ..lab.mpsgraph.contenders import no_pyobjc

LIMIT = 3600  # seconds that a command may take


class Command(NamedTuple):
    """A command that `check --full` runs. line: the module and its options. file: the file that the command always
    writes, or None if it writes the file that the option --json names. hindrance: why the command cannot run on this
    machine, or "". answers: the exit codes of a command that has done its work."""

    line: tuple[str, ...]
    file: Path | None
    hindrance: str
    answers: tuple[int, ...] = (0,)


def commands(metal: bool) -> dict[str, Command]:
    """Return the commands that `check --full` runs, by their names in the report. `metal`: whether this machine can
    run Metal kernels."""
    missing = no_pyobjc()
    apple = f"{missing}, of PyObjC: on a Mac pip install '.[compare]'" if missing else ""
    absent = "" if metal else "MLX has no Metal back end here"
    # Exit code 1 is no failure for two commands. For `cells` it means that an engine refuses a cell, which only makes
    # calls slower. For `settle` it means that MPSGraph differs from our reading of its documentation. For `compare` it
    # means wrong results.
    return {
        "tune": Command(("bench", "--tune"), tuning.cache_file(), absent),
        "cells": Command(("check.cells",), None, absent, answers=(0, 1)),
        "compare": Command(("compare",), None, apple),
        "settle": Command(("compare", "--settle"), None, apple, answers=(0, 1)),
    }


def run(name: str, command: Command) -> tuple[str, dict[str, Any]]:
    """Run a command. Return a one-line summary, and a dict for the report: whether it failed, its exit code, the text
    that it printed and the file that it wrote."""
    if command.hindrance:
        return f"{name:11}not run: {command.hindrance}", {"failed": False, "not run": command.hindrance}
    module, *options = command.line
    with tempfile.TemporaryDirectory() as folder:
        file = command.file or Path(folder, f"{name}.json")
        line = module_command(f"mlx_lstm.{module}", *options, *([] if command.file else ["--json", str(file)]))
        pipe, same = subprocess.PIPE, subprocess.STDOUT
        try:
            done = subprocess.run(line, stdout=pipe, stderr=same, text=True, env=child_environment(), timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return f"{name:11}no answer after {LIMIT} seconds", {"failed": True}
        failed = done.returncode not in command.answers
        written = json.loads(file.read_text()) if not failed and file.exists() else None
    last = (done.stdout.strip().splitlines() or ["it said nothing"])[-1].strip()
    result = {"failed": failed, "exit code": done.returncode, "printed": done.stdout, "written": written}
    return f"{name:11}exit code {done.returncode}: {last}", result
