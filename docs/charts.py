"""Draw the charts of docs/speed.md and docs/predictions.md into docs/pictures/ from the tables of these pages.

    .venv/bin/python docs/charts.py

A chart shows only numbers that its page has, so run this script after you change a table. `tests/test_docs.py` fails if
a chart does not fit its page. The charts are readable at a width of 390 px, on white and on dark pages: they have no
background, and their text is mid grey.
"""

import math
import re
from pathlib import Path
from xml.sax.saxutils import escape

DOCS = Path(__file__).parent
WIDTH = 420
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" \
role="img" aria-labelledby="title">
  <title id="title">{title}</title>
  <style>
    text {{ font-family: -apple-system, BlinkMacSystemFont, 'Segoe UI', Helvetica, Arial, sans-serif; font-size: 15px; \
fill: #7d8590 }}
    .name {{ font-weight: 600 }} .middle {{ text-anchor: middle }} .end {{ text-anchor: end }}
    .a {{ fill: #4f8fd0 }} .b {{ fill: #8f73cf }} .c {{ fill: #22a08c }} .d {{ fill: #b9803a }}
    .e {{ fill: #c45f7a }} .f {{ fill: #7d8590 }}
    path {{ stroke: #7d8590; stroke-opacity: 0.35 }} .one {{ stroke-opacity: 1; stroke-width: 2 }}
  </style>
"""


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Return a text element. kind: its classes in the style."""
    return f'  <text class="{kind}" x="{x:g}" y="{y:g}">{escape(words)}</text>\n'.replace(' class=""', "")


def box(x: float, y: float, width: float, kind: str) -> str:
    """Return a bar of a chart."""
    return f'  <rect class="{kind}" x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="16" rx="3"/>\n'


def svg(title: str, height: int, parts: list[str]) -> str:
    """Return a picture made of elements."""
    return HEAD.format(width=WIDTH, height=height, title=escape(title)) + "".join(parts) + "</svg>\n"


def number(words: str) -> float:
    """Return the value of a text such as "1.6" or "1/38"."""
    above, _, below = words.partition("/")
    return float(above) / float(below or 1)


def speed(page: str) -> str:
    """Draw the first table of the page speed: our time divided by that of torch and of mlx.nn.LSTM."""
    rows = re.findall(r"^\| ([\d,]+) \| ([\d.-]+) \| ([\d.-]+) \| (1/\d+) \|$", page, re.MULTILINE)
    left, right, low, high = 150, WIDTH - 8, -6, 3  # the axis goes from 2^low to 2^high
    labels = (("a", "forward, torch"), ("b", "training, torch"), ("c", "training, mlx.nn"))

    def place(value: float) -> float:
        return left + (math.log2(value) - low) / (high - low) * (right - left)

    parts = [text(4, 18, "Our time divided by the time of the other library")]
    parts.append(text(place(1) - 8, 44, "we are faster", "end") + text(place(1) + 8, 44, "slower"))
    y, ticks = 56, range(low, high + 1, 2)
    for size, *cells in rows:
        parts.append(text(4, y + 16, f"T,B,I,H = {size}", "name"))
        for power in ticks:
            kind = ' class="one"' if power == 0 else ""
            parts.append(f'  <path{kind} d="M{place(2**power):.1f} {y + 22} v76"/>\n')
        for n, ((kind, label), cell) in enumerate(zip(labels, cells, strict=True)):
            first, _, last = cell.partition("-")
            start, end = place(number(first)) - 2, place(number(last or first)) + 2
            at = y + 38 + 24 * n
            parts += [text(4, at, label), box(start, at - 13, end - start, kind), text(end + 8, at, cell)]
        y += 106
    parts += [text(place(2**n), y + 14, str(2**n) if n >= 0 else f"1/{2**-n}", "middle") for n in ticks]
    return svg("One LSTM layer on a Linux CPU: our time over torch's and mlx.nn's, as in the table", y + 24, parts)


PARTS = {  # of a call's time: the class in the style, and the beginnings of the lines that belong to the part
    "our kernels": ("a", ("lstm_", "recurrent_input")),
    "kernels of MLX, most of all matrix products": ("b", ("AddMM", "Matmul", "Reduce", "Copy")),
    "the host builds the graph": ("d", ("building",)),
    "between launches": ("e", ("between",)),
}


def predictions(page: str) -> str:
    """Draw the output of the model on the page predictions: the times of a training step, and what they consist of."""
    lines = re.findall(r"^(fused|stepwise|mlx\.nn\.LSTM) +(\S+) (.*)$", page, re.MULTILINE)
    times = [(layer, launch, re.findall(r"\d[\d.]*", rest)) for layer, launch, rest in lines]
    all_of = {layer: (int(numbers[0]), float(numbers[-1])) for layer, launch, numbers in times if launch == "all"}
    ours = {layer: total for layer, (_, total) in all_of.items() if layer != "mlx.nn.LSTM"}
    parts = [text(4, 18, "Predicted for an M2 Max, not measured:")]
    parts.append(text(4, 38, "one training step at T,B,I,H = 64,32,64,64"))
    y, scale = 50, (WIDTH - 12) / max(total for _, total in all_of.values())
    for layer, (launches, total) in all_of.items():
        parts += [
            text(4, y + 16, layer, "name"),
            text(WIDTH - 8, y + 16, f"{total} ms, {launches:,} launches", "end"),
        ]
        parts.append(box(4, y + 24, total * scale, "f"))
        y += 52
    parts.append(text(4, y + 24, "What our times consist of, on a larger scale:"))
    y, scale = y + 32, (WIDTH - 12) / max(ours.values())
    for name in ours:
        parts.append(text(4, y + 16, name, "name"))
        x = 4.0
        for kind, beginnings in PARTS.values():
            width = scale * sum(
                float(n[-1]) for layer, launch, n in times if layer == name and launch.startswith(beginnings)
            )
            parts.append(box(x, y + 24, width, kind))
            x += width
        y += 52
    for label, (kind, _) in PARTS.items():
        parts.append(box(4, y + 6, 16, kind) + text(28, y + 19, label))
        y += 24
    return svg("Predicted times of a training step: fused, stepwise and mlx.nn.LSTM, as in the output", y + 8, parts)


CHARTS = {"speed": speed, "predictions": predictions}


def main() -> None:
    """Draw the chart of each page from the page's table. Write it to docs/pictures."""
    for name, draw in CHARTS.items():
        (DOCS / "pictures" / f"{name}.svg").write_text(draw((DOCS / f"{name}.md").read_text()))


if __name__ == "__main__":
    main()
