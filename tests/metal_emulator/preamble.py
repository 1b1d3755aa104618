"""Rebuild `metal::utils()`, the source that MLX puts before every custom kernel, from the headers in the mlx wheel.

The procedure is that of MLX's script make_compiled_preamble.sh: join the headers in the order in which they are
included, without local #include lines and #pragma once.
"""

import re
from functools import cache
from pathlib import Path

import mlx.core as mx

_TOP = "mlx/backend/metal/kernels/utils.h"
_LOCAL_INCLUDE = re.compile(r'^#include "(.*?\.h)"', re.M)


@cache
def preamble_text() -> str:
    """Return the preamble of the installed MLX version."""
    root = Path(mx.__file__).parent / "include"
    texts: dict[str, str] = {}

    def visit(path: str) -> None:
        if path in texts:
            return
        texts[path] = ""
        text = (root / path).read_text()
        for included in _LOCAL_INCLUDE.findall(text):
            visit(included)
        del texts[path]  # move it after the headers that it includes
        texts[path] = text

    visit(_TOP)
    parts = []
    for path, text in texts.items():
        lines = [s for s in text.split("\n") if not _LOCAL_INCLUDE.match(s) and "#pragma once" not in s]
        parts.append(f'#line 1 "{path}"\n' + "\n".join(lines))
    return "\n".join(parts) + "\n"
