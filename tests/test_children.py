"""Tests of the child processes that the library starts: a child has its parent's interpreter flags and import path,
and it imports nothing from the working folder."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_lstm.ground import child
from mlx_lstm.ground.machine import raise_later
from mlx_lstm.lab import child as lab_child

ROOT = Path(__file__).parents[1]

TRAPS = ("numpy", "mlx_lstm", "mlx", "json", "runpy", "h5py", "argparse", "sitecustomize", "usercustomize")
"""Names of the trap modules in the working folder. A trap module writes its name to a file when it is imported."""

CHILDREN = {
    "any": """
from subprocess import run
from mlx_lstm.ground.machine import child_command, child_environment
flags = "sys.flags.isolated, sys.flags.ignore_environment, sys.flags.no_user_site"
code = f"import json, numpy, mlx_lstm, runpy, sys; print(({flags}))"
found = run(child_command(code), env=child_environment(), capture_output=True, text=True).stdout
assert found == f"{(sys.flags.isolated, sys.flags.ignore_environment, sys.flags.no_user_site)}\\n", found
""",
    "trial": """
from mlx_lstm.ground.child import Child, ChildError
from mlx_lstm.recurrence import _guard
try:
    Child(_guard.command()).ask(do="nothing", trials=[])
except ChildError as error:
    assert "KeyError" in str(error), error
""",
    "check": """
from mlx_lstm.ground.child import Child
from mlx_lstm.ground.machine import module_command
child = Child(module_command("mlx_lstm.lab", "engines", "default"))
child.end(patience=60)
assert child.said() == "" and child.process.returncode == 0
""",
    "compare": """
from mlx_lstm.lab.mpsgraph import contenders
from mlx_lstm.lab.mpsgraph.cases import grid
case = next(iter(grid(lambda case: True)))
mpsgraph = contenders.all_contenders()["mpsgraph"]
problem = mpsgraph.run(case).problem
mpsgraph.close()
assert "Metal" in problem or not problem, problem  # without PyObjC the error of its import
""",
    "bench": """
import json
from mlx_lstm.lab.timing.tasks import Size, Task
from mlx_lstm.ground.child import Child, ChildError
from mlx_lstm.ground.machine import module_command
task = Task("ours", "ops", Size(1, 1, 1, 1), "forward")
child = Child(module_command("mlx_lstm.lab", "timing", json.dumps(task)))
try:
    child.ask(do="nothing")
except ChildError as error:
    assert "KeyError" in str(error), error
""",
    "further": """
from mlx_lstm.check import further
line, found = further.run("x", further.Command(("compare", "--cases", "none such"), None, ""))
assert found["exit code"] == 2 and "no case has" in found["printed"], found
""",
}
"""For each kind of child process: code that lets the library start the child and asserts that the child ran."""

PARENTS = {
    "a script": ((), ""),
    "-I": (("-I",), ""),
    "-E": (("-E",), ""),
    "-s": (("-s",), ""),
    "other entries": ((), "sys.path[:0] = ['', '.', None]"),
    "entries in PYTHONPATH": ((), "os.environ['PYTHONPATH'] = os.pathsep.join(['', '.', os.environ['PYTHONPATH']])"),
}
"""For each kind of parent process: (interpreter flags, code that the parent runs before it starts a child)."""


def start_from_a_hostile_folder(tmp_path, kinds, flags, before):
    """Run a parent process in a working folder that contains trap modules. Return (error text if the parent failed,
    names of the trap modules that were imported)."""
    hostile, script = tmp_path / "hostile", tmp_path / "parent.py"
    hostile.mkdir()
    for name in TRAPS:
        (hostile / f"{name}.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'a').write('{name} ')")
    code = "".join(CHILDREN[kind] for kind in kinds)
    # The test is about the children only. So the parent adds the library's folder to sys.path itself, and it imports
    # argparse, which it needs, before the code `before` may put the working folder on its path.
    script.write_text(
        f"import argparse, os, sys\nsys.path.insert(0, {str(ROOT)!r})\nimport numpy, mlx_lstm\n{before}\n{code}"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *flags, str(script)]
    done = subprocess.run(command, cwd=hostile, env=environment, capture_output=True, text=True)
    sprung = tmp_path / "sprung"
    return done.stderr if done.returncode else "", sprung.read_text() if sprung.exists() else ""


@pytest.mark.parametrize("kind", CHILDREN)
def test_children_import_nothing_from_the_working_folder(kind, tmp_path):
    assert start_from_a_hostile_folder(tmp_path, [kind], *PARENTS["a script"]) == ("", "")


@pytest.mark.parametrize("parent", [parent for parent in PARENTS if parent != "a script"])
def test_whatever_the_parent_s_path_is(parent, tmp_path):
    """A child also has the interpreter flags of its parent."""
    assert start_from_a_hostile_folder(tmp_path, ["any"], *PARENTS[parent]) == ("", "")


@pytest.mark.slow  # slow: 6 x 6 processes take a second each
@pytest.mark.parametrize("parent", PARENTS)
def test_every_child_of_every_parent(parent, tmp_path):
    assert start_from_a_hostile_folder(tmp_path, list(CHILDREN), *PARENTS[parent]) == ("", "")


def test_a_runner_ends_the_child_that_it_has_started(monkeypatch):
    """A runner of the commands starts a child with the first request, and a new one if the child has ended."""
    ended = []

    class Fake:
        def __init__(self, kind, argument):
            self.serves, self.close = lambda: True, lambda: ended.append(self)

        def ask(self, limit, **request):
            return request

    monkeypatch.setattr(lab_child, "start", Fake)
    runner = lab_child.Runner("engines", "default")
    runner.close()  # there is no child yet
    assert runner.ask(case=1) == {"case": 1}
    first = runner.child
    assert runner.ask() == {} and runner.child is first
    first.serves = lambda: False
    runner.ask()
    runner.close()
    assert runner.child is not first and ended == [runner.child]


def test_a_forked_process_does_not_use_the_child_of_its_parent(monkeypatch):
    """After a fork two processes hold the pipes of one child, and would take the answers to each other's requests."""
    held = child.Child([sys.executable, "-c", "input()"])
    try:
        assert held.serves()
        monkeypatch.setattr(child.os, "getpid", lambda: held.owner + 1)  # as in a process after os.fork()
        assert not held.serves()
    finally:
        monkeypatch.undo()
        held.end()
    assert not held.serves()


def test_a_signal_in_a_destructor_is_not_lost(monkeypatch):
    """Python drops an exception that a destructor raises. The SystemExit of a signal is raised again a moment later;
    other exceptions are printed as Python prints them."""
    printed = []
    monkeypatch.setattr(sys, "__unraisablehook__", printed.append)
    before = signal.getsignal(signal.SIGALRM)
    try:
        raise_later(SimpleNamespace(exc_value=ValueError("a")))
        assert len(printed) == 1 and signal.getsignal(signal.SIGALRM) is before
        raise_later(SimpleNamespace(exc_value=SystemExit(143)))
        with pytest.raises(SystemExit, match="143"):
            time.sleep(5)
        assert len(printed) == 1
    finally:
        signal.signal(signal.SIGALRM, before)
