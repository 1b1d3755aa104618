"""Check the kernels that the library generates for the cells of `mlx_lstm.cells`. `check --full` runs this command:

    python -m mlx_lstm.check.cells --json FILE

The command only runs each cell, two cells also with layer normalisation. It need not compare results: before the first
use of a kernel, the library itself compares the kernel's results with the float64 oracle and refuses a wrong kernel.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from .. import cells
from ..engines import METAL_ENGINES
from ..engines.choice import Engine
from ..recurrence import Norm, pointwise

B, H = 3, 40


class Form(NamedTuple):
    """A cell and the arguments that it needs. gates, states, inputs, params: the number of its gates, states, inputs
    per step and parameter vectors. apart: whether the cell gets two numbers for each gate, the part from x and the part
    from h, instead of their sum. recurrent: whether h is multiplied by a matrix Wh. norm: the layer normalisation
    inside the step."""

    cell: Callable[..., Any]
    gates: int
    states: int = 1
    inputs: int = 0
    params: int = 0
    apart: bool = False
    recurrent: bool = True
    norm: Norm | None = None

    @property
    def title(self) -> str:
        return self.cell.__name__ + (" with a norm" if self.norm else "")


FORMS = (
    Form(cells.lstm, 4, 2),
    Form(cells.zoneout_lstm, 4, 2, inputs=2),
    Form(cells.cifg, 3, 2),
    Form(cells.peephole_lstm, 4, 2, params=3),
    Form(cells.sum_peephole_lstm, 4, 2, params=1),
    Form(cells.slstm, 4, 4),
    Form(cells.gru, 3, apart=True),
    Form(cells.augru, 3, inputs=1, apart=True),
    Form(cells.indrnn, 1, params=1, recurrent=False),
    Form(cells.minimal_gru, 2, recurrent=False),
    Form(cells.minimal_gru_log, 2, recurrent=False),
)
"""All cells of `mlx_lstm.cells`, with the arguments that each needs. The two numbers are the numbers of gates and
states."""

NORMED = (
    Form(cells.lstm, 4, 2, norm=Norm("sum", gates="each")),
    Form(cells.gru, 3, apart=True, norm=Norm("recurrent")),
)
"""Cells with layer normalisation. They are checked, too, because layer normalisation has separate shader files."""


def verdict(form: Form, engine: Engine) -> str:
    """Run both passes of a cell on a Metal engine. Return why the library refuses its kernels, or "". The numbers and
    sizes do not matter, because the library tests the kernels with numbers of its own."""
    Wx, Wh = mx.ones((form.gates * H, 2)), mx.zeros((form.gates * H, H)) if form.recurrent else None
    inputs, params = [mx.ones((3, B, H))] * form.inputs, [mx.ones(H)] * form.params

    def loss(x: mx.array) -> mx.array:
        state = [mx.zeros((B, H))] * form.states
        more = {"inputs": inputs, "params": params, "apart": form.apart, "norm": form.norm}
        h, _ = pointwise(form.cell, x, Wx, Wh, b=None, state=state, engine=engine, **more)
        return h.sum()

    try:
        mx.eval(mx.grad(loss)(mx.ones((3, B, 2))))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def main(words: list[str]) -> int:
    """Print for each cell and each Metal engine "right", or why the engine refuses the cell, and write these verdicts
    to a file. Return the exit code: 1 if a cell is refused, else 0. words: the arguments of the command line."""
    parser = argparse.ArgumentParser(prog="python -m mlx_lstm.check.cells", description=__doc__)
    parser.add_argument("--json", required=True, type=Path, metavar="FILE", help="where the verdicts are written")
    options = parser.parse_args(words)
    verdicts = {f"{form.title}, {name}": verdict(form, name) for form in FORMS + NORMED for name in METAL_ENGINES}
    options.json.write_text(json.dumps(verdicts))
    for name, reason in verdicts.items():
        print(f"{name:28}{reason or 'right'}")
    wrong = [name for name, reason in verdicts.items() if reason]
    print(f"{len(wrong)} of {len(verdicts)} pairs of a cell and an engine are refused")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
