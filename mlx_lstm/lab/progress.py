"""Show the current work, its duration and the estimated time left. In a terminal one line is redrawn; in a file or a
pipe a new line is printed now and then."""

import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TextIO, TypeVar

ERASE = "\r\x1b[2K"  # moves the cursor to the start of the line and deletes the line
EVERY = 30.0  # seconds between two lines in a file or a pipe
EARLY = 3.0  # seconds of work before the first estimate of the time left

T = TypeVar("T")


class Progress:
    """A context manager that shows the progress of a command on `out` (default: stderr). It writes `title` and the
    latest text that `say` got. In a terminal a thread redraws one line each second; otherwise it prints a line every
    `EVERY` seconds."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.out: TextIO = sys.stderr if out is None else out
        self.title: str = ""
        self.text: str = ""
        self.start: float = time.monotonic()
        self.end: float | None = None  # the end of all work, as the latest call of `say` estimated it
        # None before the first call of `count`, then (time of the first call, estimated end of all parts). The end is
        # infinity while no part is done and there is no estimate.
        self.parts: tuple[float, float] | None = None
        self.lock: AbstractContextManager[bool] = threading.Lock()
        self.ended: threading.Event = threading.Event()
        self.thread: threading.Thread = threading.Thread(target=self.redraw, daemon=True)

    def __enter__(self) -> "Progress":
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

    def count(self, n: int, total: int) -> None:
        """Note that `n` of `total` parts of the work are done. As soon as one part is done, the time left is estimated
        from the time of the finished parts. This estimate then replaces the estimates passed to `say`."""
        now = time.monotonic()
        start = self.parts[0] if self.parts and n else now
        self.parts = (start, now + (now - start) / n * (total - n)) if n else (now, math.inf)

    def each(self, items: Sequence[T], title: str) -> Iterator[T]:
        """Yield the items, and show the number of the current item and the estimated time left."""
        start = time.monotonic()
        for n, item in enumerate(items):
            passed = time.monotonic() - start  # at n = 0 this is less than EARLY: no division by 0
            self.say(f"{n + 1} of {len(items)} {title}", passed / n * (len(items) - n) if passed > EARLY else None)
            yield item
        self.say("")

    def print(self, text: str, file: TextIO | None = None) -> None:
        """Print a text in the place of the progress line, which the next call of `say` shows again."""
        self.say("")
        with self.lock:
            print(text, file=file, flush=True)

    def redraws(self) -> bool:
        """Return whether `out` is a terminal that can erase a line; one of the kind "dumb" shows `ERASE` as text."""
        return self.out.isatty() and os.environ.get("TERM") != "dumb"

    def redraw(self) -> None:
        """Draw the progress line until the context ends: in a terminal once a second, and erase it at the end.
        Elsewhere print it every EVERY seconds, unless the text of `say` is empty."""
        redraws = self.redraws()
        while not self.ended.wait(1 if redraws else EVERY):
            with self.lock:
                if redraws:
                    self.draw()
                elif line := self.line():
                    print(line, file=self.out, flush=True)
        if redraws:
            self.out.write(ERASE)
            self.out.flush()

    def draw(self) -> None:
        """Draw the progress line, if the output is a terminal and the `with` block is running."""
        if self.thread.is_alive() and self.redraws():
            self.out.write(ERASE + self.line()[: shutil.get_terminal_size().columns - 1])
            self.out.flush()

    def line(self) -> str:
        """Return the progress line; "" if the text of `say` is empty."""
        if not self.text:
            return ""
        now = time.monotonic()
        line = "  ".join(filter(None, [clock(now - self.start), self.title, self.text]))
        # The estimate of `count`, if there is one, else the estimate passed to `say`.
        end = self.end if self.parts is None or math.isinf(self.parts[1]) else self.parts[1]
        if end is None:
            return line
        return f"{line}, about {clock(end - now)} left" if end > now else f"{line}, longer than expected"


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
