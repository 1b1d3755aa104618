"""Draw the pictures of the short examples."""

import os
from collections.abc import Mapping, Sequence


def draw(name: str, title: str, lines: Mapping[str, Sequence[float]], x: Sequence[float] | None = None, **labels: str):
    """Write runs/NAME.png: a curve over `x` (default: 1, 2, ...) for each entry of `lines`, or a horizontal line if the
    entry is a number.

    `labels` are properties of Matplotlib's axes, such as `xlabel`. If Matplotlib is missing, print how to install it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: pip install matplotlib")
        return
    axes = (figure := Figure(figsize=(9, 3.5), layout="constrained")).subplots()
    for label, values in lines.items():
        if isinstance(values, float):
            axes.axhline(values, color="0.5", linestyle="--", label=label)
        else:
            axes.plot(range(1, len(values) + 1) if x is None else x, values, label=label)
    axes.set(title=title, **labels)
    axes.legend()
    os.makedirs("runs", exist_ok=True)
    figure.savefig(f"runs/{name}.png", dpi=120)
    print(f"wrote runs/{name}.png")
