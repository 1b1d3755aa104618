"""Run every example and write docs/gallery.md and docs/pictures/ from what they print and draw.

    .venv/bin/python docs/gallery.py             # all, 5 to 10 minutes; `make test` installs TensorFlow and torch
    .venv/bin/python docs/gallery.py policy      # one of them: its section and its picture

A section holds the example's title and description (its docstring), its command, its output and its picture. On the
site docs/conf.py adds the code.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE, PICTURES = ROOT / "docs" / "gallery.md", ROOT / "docs" / "pictures"
EXAMPLES = {  # in the order of the page: what each draws in runs/, if anything
    "beginner": "beginner.png",
    "char_lm": "char_lm/loss.png",
    "classify": "classify.png",
    "forecast": "forecast.png",
    "own_cell": "own_cell.png",
    "voice_activity": "voice_activity.png",
    "policy": "policy.png",
    "quantized_streaming": None,
    "from_torch": None,
    "from_tensorflow": None,
}
HEAD = """# Gallery: the examples, what they print and draw

This page shows every example with its command, its output and its picture. `.venv/bin/python docs/gallery.py` generates
the page by running the examples. The times in the outputs are from one run on two shared cores of a Linux machine, so
they say little about speed; the page [speed](speed.md) has measured figures.
"""


def section(name: str, picture: str | None) -> str:
    """Run an example in an empty folder; return its section of the page."""
    file = ROOT / "examples" / f"{name}.py"
    title, _, rest = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")
    description = next(part for part in rest.split("\n\n") if not part.startswith(("    ", "\n    ")) and part.strip())
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        run = subprocess.run(
            [sys.executable, str(file)], cwd=folder, env=environment, capture_output=True, text=True, check=True
        )
        if picture:
            PICTURES.mkdir(exist_ok=True)
            shutil.copyfile(Path(folder) / "runs" / picture, PICTURES / f"{name}.png")
    title, _, subtitle = title.partition(": ")
    text = f"[examples/{name}.py](../examples/{name}.py): {subtitle} {' '.join(description.split())}"
    parts = [
        f"## {title.rstrip('.')}",
        textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False),
        f"```sh\n.venv/bin/python examples/{name}.py\n```",
        f"```text\n{shortened(run.stdout)}\n```",
    ]
    if picture:
        parts.append(f"![What {name}.py draws](pictures/{name}.png)")
    return "\n\n".join(parts) + "\n"


def shortened(output: str) -> str:
    """Return the output without blank lines, wrapped at 110 characters, at most its first 4 and its last 12 lines."""
    lines = [part for line in output.splitlines() for part in textwrap.wrap(line, 110, subsequent_indent="  ")]
    return "\n".join(lines if len(lines) <= 17 else [*lines[:4], "...", *lines[-12:]])


def main(*names: str) -> None:
    """Run the examples named, or all, and write the page; sections of other examples stay."""
    old = PAGE.read_text() if PAGE.exists() else ""
    sections = {}
    for part in re.split(r"^(?=## )", old, flags=re.MULTILINE)[1:]:
        sections[re.search(r"examples/(\w+)\.py", part)[1]] = part.strip() + "\n"
    for name in names or EXAMPLES:
        print(name, flush=True)
        sections[name] = section(name, EXAMPLES[name])
    PAGE.write_text("\n".join([HEAD, *(sections[name] for name in EXAMPLES if name in sections)]))


if __name__ == "__main__":
    main(*sys.argv[1:]) if set(sys.argv[1:]) <= EXAMPLES.keys() else sys.exit(__doc__)
