"""Limit what reading one foreign file may cost. This module imports only Python's own modules, so that a child process
that reads files can load it without the package.

A foreign file comes from an unknown source: it may declare huge sizes, millions of names or endless nesting. A reader
takes what it is about to allocate from a `Budget`, which raises `Refused`, a ValueError, if the file takes too much.
"""

import json
from typing import Any

MOST_NAMES = 100_000
LONGEST_NAME = 1000
DEEPEST = 64
MOST_VALUES = 1_000_000
"""The limits of one foreign file: how many names it has, the characters of a name, the levels of nesting in JSON and
in paths, and how many values its JSON has. The largest known models have less than a tenth of each."""

SECONDS = 10
"""How many seconds of processor time a child process may use to read a file. For each 10 MB of the file one second is
added."""


def shown(text: object, most: int = 80) -> str:
    """Return a name from a file in a form that is safe to print: one line, no control characters, at most `most`
    characters.

    Example:
        >>> from mlx_lstm.ground.budget import shown
        >>> print(shown("a" + chr(27) + "[2J" + chr(10) + "read back"))
        a\\x1b[2J\\nread back
    """
    # ascii(c)[1:-1]: the escape of a character, such as \x1b, without the quotes.
    clean = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text)[: most + 1])
    return clean if len(clean) <= most else f"{clean[: most - 3]}..."


class Refused(ValueError):
    """The error of a file that exceeds its budget. Its text is written for users, so it is shown to them as it is."""


class Budget:
    """What reading one foreign file may still cost: bytes of memory, names, levels of nesting, seconds.

    A reader takes from the budget before it allocates. Whatever exceeds the budget raises a ValueError.

    Args:
        stored (int): the bytes that the file stores. Weights hardly compress, but zip bombs do. So a file may
            declare 4 times the bytes that it stores, and 32 MB more.
        left (int, optional): the bytes of memory that are left, if another process has used a part of the budget.
    """

    def __init__(self, stored: int, left: int | None = None):
        self.stored = stored
        self.left: int = 4 * stored + 32 * 2**20 if left is None else left
        self.names: int = MOST_NAMES
        self.seconds: float = SECONDS + stored / 10_000_000

    def check(self, size: int, what: str) -> None:
        """Raise ValueError if `size` more bytes would exceed the budget. what: the name of the part of the file that
        needs them, for the error text."""
        if size > self.left:
            rule = f"{shown(what)} must not declare far more bytes than the file has"
            raise Refused(f"{rule} but got {size} and {self.stored}: save it uncompressed, if it is honest.")

    def take(self, size: int, what: str) -> None:
        """Take `size` bytes from the budget. Raise ValueError if it has not so many left. what: the name of the part of
        the file that needs them, for the error text."""
        self.check(size, what)
        self.left -= size

    def name(self, text: Any) -> str:
        """Count one name against the budget and return it unchanged. Raise an error if the budget has no name left, or
        if the name is no text, cannot be encoded as UTF-8 (JSON may contain half of a surrogate pair), is too long or
        has too many levels."""
        if not isinstance(text, str):
            raise TypeError("a name is no text")
        text.encode()  # raises a ValueError if UTF-8 cannot encode it
        self.names -= 1
        if self.names < 0:
            raise Refused(f"it must have at most {MOST_NAMES} names but got more.")
        if len(text) > LONGEST_NAME or text.count("/") > DEEPEST:
            rule = f"it must have no name of more than {LONGEST_NAME} characters or {DEEPEST} levels"
            raise Refused(f"{rule} but got {shown(text)}, of {len(text)} characters.")
        self.take(len(text), text)
        return text

    def values(self, count: int) -> None:
        """Raise ValueError if the file has more than MOST_VALUES parts (count), each of which would become a Python
        object."""
        if count > MOST_VALUES:
            raise Refused(f"it must have at most {MOST_VALUES} parts but got more.")

    def json(self, text: str | bytes) -> Any:
        """Return the parsed JSON. Raise ValueError if the text is not JSON, has too many values or levels, or has a
        key twice."""
        # Count the values before anything is allocated: each value but the first one follows one of these characters.
        marks = [text.count(mark) for mark in ",:[{"] if isinstance(text, str) else map(text.count, b",:[{")
        self.values(sum(marks))
        try:
            found = json.loads(text, object_pairs_hook=without_duplicates)
        except (RecursionError, ValueError) as error:
            raise Refused(f"it is truncated or damaged: its JSON: {shown(error)}") from None
        # Count the levels of nesting. level: all values of one level. inner: the dicts and lists among them.
        level, depth = [found], 0
        while level:
            inner = [each.values() if isinstance(each, dict) else each for each in level if type(each) in (dict, list)]
            level, depth = [value for values in inner for value in values], depth + 1
            if depth > DEEPEST:
                raise Refused("it is truncated or damaged: its JSON nests too deep.")
        return found


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Raise ValueError for a key that appears twice, because JSON readers differ in
    which of the two values they use."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key twice")
    return found
