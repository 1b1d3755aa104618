"""The text of the shaders as a kernel has it: without comments and indentation, every line still that of its file."""

import re
from importlib.resources import files
from pathlib import Path


def shader_folder() -> Path:
    """metal/, which lies in the package of a wheel and beside that of a checkout."""
    packaged = files("mlx_lstm") / "metal"
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "metal"


def with_lines(name: str, text: str) -> str:
    """A text after the directive by which compilers, profilers and the tests' emulator call it: a diagnostic then names
    the file and its line. What has no code stays as an empty line."""
    bare = "\n".join(line.strip() for line in re.sub(r"//.*", "", text).splitlines())
    return f'#line 1 "{name}"\n{bare}\n'
