"""Tests of docs/figures.py, which measures figures of the pages."""

import importlib.util
from pathlib import Path

import mlx.core as mx
import pytest

SPEC = importlib.util.spec_from_file_location("figures", Path(__file__).parents[1] / "docs" / "figures.py")
figures = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(figures)

FIRST_ROWS = [(make, who, row) for make, names, rows in figures.tables().values() for row in rows[:1] for who in names]


@pytest.mark.parametrize(("make", "who", "row"), FIRST_ROWS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_every_implementation_runs(make, who, row, monkeypatch):
    """Every implementation of every table runs, here with small sizes."""
    if "torch" in who:
        pytest.importorskip("torch")
    monkeypatch.setattr(mx, "set_default_device", lambda device: None)
    sizes = [2 if size < 64 else 64 if "4 bits" in who else 4 for size in row if isinstance(size, int)]
    make(who, *[word for word in row if isinstance(word, str)], *sizes)()
