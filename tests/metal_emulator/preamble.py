"""The text `metal::utils()` that MLX puts before every custom kernel, rebuilt from the headers in the mlx wheel.

The procedure is that of MLX's make_compiled_preamble.sh: headers in include order, without local includes and
#pragma once.
"""

import re
from functools import cache
from pathlib import Path

import mlx.core as mx

_TOP = "mlx/backend/metal/kernels/utils.h"
_LOCAL_INCLUDE = re.compile(r'^#include "(.*?\.h)"', re.M)


@cache
def preamble_text() -> str:
    """Returns the preamble of the installed MLX version."""
    root = Path(mx.__file__).parent / "include"
    texts: dict[str, str] = {}

    def visit(path: str) -> None:
        if path in texts:
            return
        texts[path] = ""
        text = (root / path).read_text()
        for included in _LOCAL_INCLUDE.findall(text):
            visit(included)
        del texts[path]  # insert after what it includes
        texts[path] = text

    visit(_TOP)
    parts = []
    for path, text in texts.items():
        lines = [s for s in text.split("\n") if not _LOCAL_INCLUDE.match(s) and "#pragma once" not in s]
        parts.append(f'#line 1 "{path}"\n' + "\n".join(lines))
    return "\n".join(parts) + "\n"
