"""Read the command line of the short examples."""

import sys


def numbers(usage: str, most: int = 1) -> list[int]:
    """Return the numbers of the command line: none to `most`, each at least 1. For any other words end the program
    with the text `usage`."""
    words = sys.argv[1:]
    if len(words) > most or not all(word.isdecimal() and int(word) for word in words):
        sys.exit(usage)
    return [int(word) for word in words]
