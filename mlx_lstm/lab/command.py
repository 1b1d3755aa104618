"""The command lines of check, bench and compare."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser of command-line options whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see --help\n")
