"""Show the current work, its duration and the estimated time left in a line of the terminal."""

import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TextIO, TypeVar

ERASE = "\r\x1b[2K"
EARLY = 3.0  # seconds of work before the first estimate of the time left

T = TypeVar("T")


class Progress:
    """A context that shows a line of progress in the terminal; a thread redraws the line each second. Nothing is
    shown if `out` (default: stderr) is not a terminal. `title` is printed before the text of `say`."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.out: TextIO = sys.stderr if out is None else out
        self.title: str = ""
        self.text: str = ""
        self.start: float = time.monotonic()
        self.end: float | None = None
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

    def say(self, text: str, left: float | None = None) -> None:
        """Show this text from now on. `left`: the estimated seconds until all work is done, if known."""
        with self.lock:
            self.text = text
            self.end = None if left is None else time.monotonic() + left
            self.draw()

    def each(self, items: Sequence[T], title: str) -> Iterator[T]:
        """Yield the items, and show the number of the current item and the estimated time left."""
        start = time.monotonic()
        for n, item in enumerate(items):
            passed = time.monotonic() - start
            self.say(f"{n + 1} of {len(items)} {title}", passed / n * (len(items) - n) if passed > EARLY else None)
            yield item
        self.say("")

    def print(self, text: str, file: TextIO | None = None) -> None:
        """Remove the progress line and print a text in its place. The next call of `say` shows the progress line
        again, below the text."""
        self.say("")
        with self.lock:
            print(text, file=file, flush=True)

    def redraw(self) -> None:
        """Draw the progress line once a second until the context ends, then erase the line."""
        while not self.ended.wait(1):
            with self.lock:
                self.draw()
        self.out.write(ERASE)
        self.out.flush()

    def draw(self) -> None:
        """Draw the progress line in its current state."""
        if not self.thread.is_alive():
            return
        line = "  ".join([clock(time.monotonic() - self.start), self.title, self.text]) if self.text else ""
        if line and self.end is not None:
            line += f", about {clock(max(self.end - time.monotonic(), 0))} left"
        self.out.write(ERASE + line[: shutil.get_terminal_size().columns - 1])
        self.out.flush()


def clock(seconds: float) -> str:
    """Format seconds as minutes:seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
