"""Tests of the recipes in CONTRIBUTING.md, "Adding an activation" and "Adding an option". A recipe names the files that
a contributor has to edit. The tests find these files in the sources: those that read an option or an activation that
exists. A recipe that leaves out one of them is incomplete."""

import ast
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from mlx_lstm.engines.definitions import UNBOUNDED
from mlx_lstm.oracle.arithmetic import ACTIVATIONS, Rounding
from mlx_lstm.recurrence._draw import is_never_negative

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*ROOT.glob("mlx_lstm/**/*.py"), *ROOT.glob("metal/*.metal")])

OPTION, ACTIVATION = "Adding an option", "Adding an activation"
READ = {
    # {name: (recipe, column of the recipe's table)}. These are the columns "A number or a flag", "An array" and "What
    # to add".
    "forget_bias": (OPTION, 1),
    "mask": (OPTION, 2),
    "keep": (OPTION, 2),
    "hard_sigmoid": (ACTIVATION, 1),
    "hard_sigmoid_sixth": (ACTIVATION, 1),
}


@cache
def words(path):
    """Return the names that a source file uses: names of variables, arguments and attributes, and texts such as "keep",
    without docstrings and comments."""
    text = path.read_text()
    if path.suffix == ".metal":
        return {*re.findall(r"[A-Za-z_]\w*", re.sub(r"//.*", "", text))}
    docs, found = set(), set()
    for node in ast.walk(ast.parse(text)):  # `ast.walk` yields a docstring after the statement that it is
        if isinstance(node, ast.Expr):
            docs.add(node.value)
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str) and node not in docs:
                found.add(node.value)
        else:
            found.update(getattr(node, field) for field in ("id", "attr", "arg") if field in node._fields)
    return found


@cache
def table(recipe):
    """Return a recipe's table as a list of rows. A row is the list of the texts in its cells."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = page.partition(f"## {recipe}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    assert len(rows) > 5, f"CONTRIBUTING.md has no table in the section {recipe}"
    return [[cell.strip() for cell in row] for row in rows[2:]]


def names_of(recipe, column):
    """Return the files, folders and patterns in the first cells of the rows that say something in a column."""
    return [name for row in table(recipe) if row[column] for name in re.findall(r"`([^`]*)`", row[0])]


def matches(path, name):
    """Return whether a file is the one that a recipe names, lies in the named folder, or fits the named pattern."""
    places = [path.relative_to(ROOT)]
    if places[0].parts[0] == "mlx_lstm":
        places.append(path.relative_to(ROOT / "mlx_lstm"))
    # The recipe for an option of `lstm` says: for `gru` or `rnn` edit the file of the same name.
    stems = {path.stem, re.sub(r"_(gru|rnn|single_gate)$", "_lstm", path.stem)}
    places = [place.with_stem(stem) for place in places for stem in stems]
    return any(place.match(name) or name in map(str, place.parents) for place in places)


@pytest.mark.parametrize("name", READ)
def test_a_recipe_names_every_file_that_reads_an_option(name):
    """The recipe names each file of the library that reads the option or the activation `name`."""
    recipe, column = READ[name]
    spellings = {name, name.upper()} if recipe == ACTIVATION else {name}  # shaders have activations in capitals
    readers = [path for path in SOURCES if spellings & words(path)]
    assert len(readers) > 5
    named = names_of(recipe, column)
    missing = [str(path.relative_to(ROOT)) for path in readers if not any(matches(path, each) for each in named)]
    assert not missing, (
        f"These files read `{name}`, but the table of the section '{recipe}' in CONTRIBUTING.md does not name them in "
        f"a row with a text in column {column + 1}: {', '.join(missing)}. Somebody who adds another one would forget "
        "them. Add them to the row of the files with the same purpose, or a new row."
    )


def test_lists_of_activations_follow_from_their_formulas():
    """`UNBOUNDED` has the activations without a limit: the step of a GRU has another formula for them."""
    fl = Rounding(np.float64)
    without_limit = {name for name, formula in ACTIVATIONS.items() if np.abs(formula(np.array(1e6), fl)) > 1e3}
    assert set(UNBOUNDED) == without_limit


def test_the_trial_derives_the_signs_of_an_activation():
    """The trial draws a candidate of both signs, unless its activation is never negative."""
    assert {name for name in ACTIVATIONS if not is_never_negative(name)} == {"identity", "tanh"}
