"""Describe the machine (chip, system, versions), build the command line of a child process, and run a command in this
process.

A child is a Python process that this process starts. A command is a program of this package, such as `python -m
mlx_lstm.check`: `run_command` calls its main function, handles signals and errors of the output, and ends the process.
"""

import errno
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

VERSION = "0.1.0"
"""The version of this package."""

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Numbers of the errors of an output that cannot be written: the disk or the user's share of it is full, the file is
too large, or the disk or terminal fails."""


def chip() -> str:
    """Return the name of the processor."""
    if sys.platform == "darwin":
        found = subprocess.run(["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True)
        return found.stdout.strip() or platform.processor()
    lines: list[str] = []
    with suppress(OSError), open("/proc/cpuinfo") as file:
        lines = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return f"{lines[0] if lines else platform.processor()} ({platform.machine()})"


@cache
def counted_gpu_cores() -> int | None:
    """Return the number of cores of this Mac's GPU, or None if the system does not say or is not macOS. The command
    that answers takes some hundredths of a second, once per process."""
    if sys.platform != "darwin":
        return None
    with suppress(OSError, subprocess.SubprocessError):
        command = ["/usr/sbin/ioreg", "-rc", "AGXAccelerator", "-d", "1"]
        found = subprocess.run(command, capture_output=True, timeout=2, stdin=subprocess.DEVNULL)
        counts = [int(digits) for digits in re.findall(rb'"gpu-core-count"\s*=\s*(\d{1,4})\b', found.stdout)]
        return next((count for count in counts if 1 <= count <= 1024), None)  # the first plausible number
    return None


def system() -> str:
    """Return the operating system and its version."""
    return f"macOS {platform.mac_ver()[0]}" if sys.platform == "darwin" else f"{platform.system()} {platform.release()}"


def installed_version(*packages: str) -> str:
    """Return the version of the first of these packages that is installed; packages are not imported."""
    from importlib.metadata import PackageNotFoundError, version  # imported here, because it takes long

    for package in packages:
        with suppress(PackageNotFoundError):
            return version(package)
    return "not installed"


def shader_folder() -> Path:
    """Return the path of the folder metal/ with the shaders. An installed package contains it; in a checkout of the
    repository it lies beside the package."""
    package = Path(__file__).parents[1]
    return package / "metal" if (package / "metal").is_dir() else package.parent / "metal"


def in_all_digits() -> None:
    """Let MLX compute float32 products with full precision, unless the user has set MLX_ENABLE_TF32. By default MLX
    uses fewer digits on the newest chips (TF32), and a comparison with float64 would report that as an error. Call this
    function before MLX runs anything."""
    os.environ.setdefault("MLX_ENABLE_TF32", "0")


def on_one_thread() -> None:
    """Let OpenBLAS, NumPy's BLAS on Linux, use one thread in the child processes of a command, unless the user has set
    OPENBLAS_NUM_THREADS. The threads of one product wait for one another. If another program occupies one core, the
    slowest thread delays the others, and the measured times change."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def has_interpreter() -> bool:
    """Return whether sys.executable is a Python interpreter. In a frozen application, or where Python is embedded,
    it is not."""
    return not getattr(sys, "frozen", False) and "python" in Path(sys.executable or "").name.lower()


def child_command(code: str, *arguments: str) -> list[str]:
    """Return a command line that runs `code` in another process of this Python, with `arguments` in sys.argv.

    The child has this interpreter's flags and import path. Entries that depend on the working folder ("", "." and
    other relative paths) are left out, so that no module of that folder, such as a numpy.py, is imported. The folder
    of this package is added at the end.
    """
    # flags: {letter of an option of the command `python`: its name in sys.flags}.
    flags = {"I": "isolated", "E": "ignore_environment", "s": "no_user_site", "S": "no_site"}
    given = [f"-{letter}" for letter, name in flags.items() if getattr(sys.flags, name)]
    paths = absolute(sys.path)
    package = str(Path(__file__).absolute().parents[2])
    paths += [package] if package not in paths else []
    return [sys.executable, *given, "-c", f"import sys; sys.path[:] = {paths!r}; {code}", *arguments]


def child_environment() -> dict[str, str]:
    """Return the environment for a child process: the current one, with only absolute entries left in PYTHONPATH.

    A relative entry is a folder inside the working folder, which may contain files from unknown sources, such as a
    download. When Python starts, it runs a module `sitecustomize` that it finds in PYTHONPATH, before `child_command`
    replaces the child's import path. So a file of this name in such a folder would run.
    """
    paths = absolute(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return others | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})


def module_command(module: str, *arguments: str) -> list[str]:
    """Return a command line that does the same as `python -m module`, for a child process: see `child_command`."""
    code = f"from runpy import run_module; run_module({module!r}, run_name='__main__', alter_sys=True)"
    return child_command(code, *arguments)


def absolute(paths: Iterable[object]) -> list[str]:
    """Return the absolute paths among the entries of an import path. Relative entries depend on the working folder,
    whose files may come from unknown sources."""
    return [path for path in paths if isinstance(path, str) and os.path.isabs(path)]


def check_files(options: object, *names: str) -> None:
    """Check the files that a command will write: raise ValueError if the folder of a file does not exist, if it is a
    folder itself or a pipe, or if there is no permission. Otherwise a command that ran for minutes would lose its
    results. options: the parsed command line. names: the options whose values are paths of files to write; None means
    that an option was not given, "-" means the terminal."""
    for name in names:
        if getattr(options, name) in (None, "-"):
            continue
        path = Path(getattr(options, name))
        if not path.parent.is_dir():
            raise ValueError(f"--{name}: no folder {path.parent}")
        if path.is_dir():
            raise ValueError(f"--{name}: {path} is a folder")
        # The shell's pipes, such as /dev/stdout and /dev/fd/63, have a reader. Opening another pipe may wait forever.
        if path.is_fifo() and path.parts[:2] != ("/", "dev"):
            raise ValueError(f"--{name}: {path} is a pipe")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"--{name}: no permission to write {path}")


def run_command(main: Callable[[], int]) -> NoReturn:
    """Call `main` and end the process with its exit code.

    Ctrl-C and a closed output pipe, as after `| head`, end the process without a message. An output that cannot be
    written, as on a full disk, ends it with an error of one line. SIGTERM, and SIGHUP of a closed terminal, raise
    SystemExit, so that incomplete files are removed and child processes end. Characters that the terminal cannot show
    are escaped. If stdout is closed, as after `>&-`, the output is lost.
    """
    code: object
    for number in range(3):  # open a closed stdin, stdout or stderr; else a file that is opened later gets its number
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, which is this number
    signal.signal(signal.SIGTERM, terminate)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # under `nohup` the signal is ignored, and stays so
        signal.signal(signal.SIGHUP, terminate)
    sys.unraisablehook = raise_later  # else Python drops an exception that a signal handler raises in a destructor
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            code = main()
        except SystemExit as end:  # argparse raises it
            code = end.code
        if sys.stdout is not None:  # None if it was closed when Python started
            sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130  # the exit code of a process that Ctrl-C ended
    except OSError as error:
        if error.errno not in (errno.EPIPE, *UNWRITABLE):
            raise
        if sys.stdout is not None:  # let stdout lead nowhere, so that Python's last flush at exit does not fail
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # 141: the exit code of a process that SIGPIPE ended. If SystemExit holds a text, Python prints it and ends with
        # exit code 1.
        code = 141 if error.errno == errno.EPIPE else f"the output cannot be written: {error}"
    raise SystemExit(code)


def terminate(signum: int, frame: object) -> NoReturn:
    """Raise SystemExit for a signal, so that `finally` blocks run; a second signal ends the process at once. signum:
    its number. frame: where the program was; Python passes it to a signal handler, and it is not read."""
    signal.signal(signum, signal.SIG_DFL)
    raise SystemExit(128 + signum)


def raise_later(unraisable: "sys.UnraisableHookArgs") -> None:
    """Handle an exception that Python would ignore, because it was raised in a destructor or a callback. If it is the
    SystemExit of `terminate`, raise it again a moment later; otherwise a signal at such a moment would be lost."""
    end = unraisable.exc_value
    if not isinstance(end, SystemExit):
        sys.__unraisablehook__(unraisable)
        return

    # Handle the signal of the timer. Python passes both arguments; they are not needed.
    def again(signum: int, frame: object) -> NoReturn:
        raise SystemExit(end.code)

    signal.signal(signal.SIGALRM, again)
    signal.setitimer(signal.ITIMER_REAL, 0.01)  # seconds
