"""What is being done, and for how long: a line of a terminal that is gone when anything else is printed."""

import shutil
import sys
import threading
import time
from typing import TextIO

ERASE = "\r\x1b[2K"


class Progress:
    """A thread draws the line again each second; where `out` is no terminal, none does. `title` stands before what is
    said."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.out: TextIO = sys.stderr if out is None else out
        self.title: str = ""
        self.text: str = ""
        self.start: float = time.monotonic()
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.redraw, daemon=True)

    def __enter__(self) -> "Progress":
        if self.out.isatty():
            self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        if self.thread.is_alive():
            self.thread.join()

    def say(self, text: str) -> None:
        """What is being done from now on."""
        with self.lock:
            self.text = text
            self.draw()

    def print(self, text: str, file: TextIO | None = None) -> None:
        """Print. The line comes back below with the next thing that is done."""
        self.say("")
        with self.lock:
            print(text, file=file, flush=True)

    def redraw(self) -> None:
        """Once a second until the end; then erase it."""
        while not self.ended.wait(1):
            with self.lock:
                self.draw()
        self.out.write(ERASE)
        self.out.flush()

    def draw(self) -> None:
        """The line as it is now."""
        if not self.thread.is_alive():
            return
        minutes, seconds = divmod(int(time.monotonic() - self.start), 60)
        line = f"{minutes}:{seconds:02}  {self.title}  {self.text}" if self.text else ""
        self.out.write(ERASE + line[: shutil.get_terminal_size().columns - 1])
        self.out.flush()
