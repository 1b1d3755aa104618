"""Tests that run every option on every path through the Metal kernels, and compare the results with the oracle.

A path is one way to compute the same recurrence: the kind of the recurrent product, one launch or several, 32-bit or
64-bit indices, one direction or both, float32 or 16 bits.
"""

import re

import pytest
from kernel_calls import ROWS, Path, cell_of, check, options_of

from mlx_lstm.lab.cases import EVERY_OPTION
from mlx_lstm.lab.cases import T as T_OF_OPTIONS


def features(options):
    """Return the names of a case's options, such as {"keep", "no b", "mask of each step"}."""
    found = set()
    for name, value in options.items():
        if name == "mask":
            differs = len(value) == 3 and value[0] in ("T", T_OF_OPTIONS)
            found.add("mask of each step" if differs else "mask of all steps")
        elif name == "output_peephole":
            found.add(f"{value} peephole")
        elif value is not False and name not in ("op", "reset", "bidirectional"):
            found.add(f"no {name}" if value is None else name)
    return found


# --- Paths through the kernels ---------------------------------------------------------------------------------------


PATHS = [Path("fused", product, rare) for product in ("lanes", "matrices") for rare in (False, True)]
PATHS += [Path("stepwise", product, rare) for product in ("lanes", "tiles") for rare in (False, True)]
# Quantized ("packed") weights only change how a product reads its weights. So one path for each kind of product is
# enough, instead of one with `rare` and one without.
PATHS += [Path("fused", "packed lanes", True), Path("stepwise", "packed lanes", True)]
PATHS += [Path("stepwise", "packed tiles", False)]

NEVER = {("matrices", "gru_before"): "two products per step leave no registers for matrices"}
"""{(product, cell): reason why no call has this combination}. Matrices also have no layer normalisation: its sums over
all units are written for lanes only."""
NEVER_OPTION = {("fused", name): "`fused` has no projection" for name in ("projection", "projection_clip")}
"""{(engine, option): reason why no call has this combination}."""


LANES, TILES = ("lanes", "tiles")
TURNS = {
    # {row: (is its call on `fused` by lanes a rare one, (product, rare) of its calls on `stepwise`)}. Of two products
    # of a row one is in a rare call. The functions of `fused` for lanes and for matrices are apart, so each row runs by
    # both, if it can. On `stepwise` one function computes a step; the product is an argument of its template. So it is
    # enough that each cell, and each option that several cells have, meets both products, and rare and usual calls.
    # The options of an LSTM alone are in two rows, so these run with both products.
    "lstm": (True, [(LANES, True), (TILES, False)]),
    "lstm, bare": (False, [(LANES, False), (TILES, True)]),
    "gru": (False, [(LANES, False)]),
    "gru, bare": (True, [(TILES, True)]),
    "gru_before": (False, [(TILES, False)]),
    "gru_before, bare": (True, [(LANES, True)]),
    "rnn": (True, [(TILES, False)]),
    "rnn, bare": (False, [(LANES, True)]),
    "lstm, norm": (True, [(TILES, True)]),
    "gru, norm": (False, [(LANES, False)]),
    "rnn, norm": (True, [(LANES, True)]),
}


def cases():
    """Return pytest parameters (path, name). A path of `PATHS` is a variant of the kernels; a name is the key of a
    set of options in `ROWS`.

    The default tests run the calls of `TURNS`. A row with `reverse` uses the kernels of the row without it. The code
    that reads quantized weights is the same for all options. So each path with quantized weights runs only one set of
    options per cell; other cells than LSTM are slow tests here, because test_quantized_kernels.py runs them.
    """
    found = []
    for path in PATHS:
        for name in ROWS:
            row = name.removesuffix(", reverse")
            packed, lanes_rare, calls = "packed" in path.product, *TURNS[row]
            if packed:
                turn, may_run = name == "lstm", name == cell_of(name)
            elif path.engine == "fused":
                turn, may_run = (path.product == "lanes") == (lanes_rare == path.rare), True
            else:
                turn, may_run = (path.product, path.rare) in calls, True
            never = (path.product, cell_of(name)) in NEVER or (path.product == "matrices" and "norm" in ROWS[name])
            if may_run and not never and (turn or row == name):
                found.append(pytest.param(path, name, marks=[] if turn else pytest.mark.slow))
    return found


def test_every_option_is_in_a_row():
    """Each option of the tables in `mlx_lstm.lab.cases` is in a row of ROWS, so that the tests below run it on
    every path. A new option must be added to a row."""
    wanted, found = {}, {}
    for options in EVERY_OPTION.values():
        cell = options.get("op", "lstm") + ("_before" if options.get("reset") == "before" else "")
        wanted.setdefault(cell, set()).update(features(options))
    for engine in ("fused", "stepwise"):
        for name in ROWS:
            found.setdefault((engine, cell_of(name)), set()).update(
                features(options_of(Path(engine, "lanes", False), name))
            )
        for cell, names in wanted.items():
            left_out = {option for left, option in NEVER_OPTION if left == engine}
            assert names - found[engine, cell] <= left_out, (engine, cell)


@pytest.mark.parametrize(
    "path, name", cases(), ids=lambda value: "-".join(map(str, value)) if value in PATHS else value
)
def test_every_option_on_every_path(path, name):
    assert_on_path(path, check(path, name))


def assert_on_path(path, log):
    """Check in the log of kernel launches that a call ran the variant of the kernels that `path` describes."""
    passes = [launch for launch in log if re.search("fused_.*ward|stepwise", launch.name)]
    index = "ulong|long" if path.rare else "uint|int"
    assert passes and all(re.search(rf"Index = ({index});", launch.source) for launch in passes)
    if path.engine == "fused":
        assert {"matrix" in launch.name for launch in passes} == {path.product == "matrices"}
        assert len(passes) == (6 if path.rare else 2)
        assert any("quantized" in launch.name for launch in log) == ("packed" in path.product)
    else:
        assert any("_joining" in launch.name for launch in passes) == path.rare
        assert any("simdgroup_multiply" in launch.source for launch in passes) == ("tiles" in path.product)
        assert any("packed_weights" in launch.source for launch in passes) == ("packed" in path.product)
