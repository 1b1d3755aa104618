"""Shared parts of the command lines of check, bench and compare."""

import argparse
import importlib.util
from pathlib import Path
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser of command-line options that prints an error in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.rstrip('.')}; see --help\n")


def check_plot(file: str, extra: str) -> None:
    """Raise ValueError if matplotlib is not installed, or if it cannot write a file with this ending. extra: the name
    in `pip install '.[extra]'` that installs matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"--plot needs matplotlib: pip install '.[{extra}]'")
    from matplotlib.backend_bases import FigureCanvasBase  # imported here, because it takes long

    endings = sorted(FigureCanvasBase.get_supported_filetypes())
    if Path(file).suffix.removeprefix(".").lower() not in endings:
        raise ValueError(f"--plot: the ending of {file} must be one of {', '.join(endings)}")
