"""Tests of the performance model of `bench --model`: predicted launches and bytes equal the emulator's counts, and
the thresholds between engines follow from predicted times."""

import csv
import re
from collections import Counter
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from cases import draw, draw_cotangents, run
from machine_code.__main__ import main
from machine_code.instructions import cycles_of, has_product
from machine_code.launches import trace
from machine_code.times import (
    CHIPS,
    ISSUE,
    floor_bytes,
    fused_until,
    fused_wins,
    host_seconds,
    moved_bytes,
    of_mlx,
    ours,
    parts_of,
    total_seconds,
)
from on_metal import ENGINES, can_run, on_metal

from mlx_lstm.bench.tasks import Size
from mlx_lstm.engines.cells import GRUCell, LSTMCell, RNNCell
from mlx_lstm.engines.choice import FUSED_LIMIT
from mlx_lstm.engines.packing import Packing
from mlx_lstm.engines.tuning import NARROW, OF_4, OF_8, PREDICTED, WIDE
from mlx_lstm.oracle import forward

DTYPES = {np.float32: mx.float32, np.float16: mx.float16}


CELLS = {"lstm": LSTMCell(), "gru": GRUCell(), "rnn": RNNCell()}
ON_THE_EMULATOR = pytest.mark.not_on_a_mac("bytes: the emulator counts them")


def seen_by_the_emulator(size, dtype, engine, **layer):
    """Run a training step on the Metal emulator. Return three counters by kernel name: launches, bytes moved (every
    access counts) and bytes touched (each address counts once). Buffers that hold sizes are not counted."""
    rng = np.random.default_rng(0)
    case = draw(rng, sizes=(*size, size.H), dtype=dtype, **layer)
    case = {name: value for name, value in case.items() if name not in ("h0", "c0", "bhn")}
    cotangents = draw_cotangents(rng, forward(**case), dtype)
    with on_metal() as log:
        run(case, engine, dtype, {"h": cotangents["h"]})
    counts = Counter(), Counter(), Counter()  # by kernel name: launches, bytes moved, bytes touched
    for dispatch in log:
        name = re.sub("_joining|_without.*|__.*", "", dispatch.name)
        sizes = re.findall(r"constant [\w ]+[*&] (\w+) \[\[buffer", dispatch.source)
        arrays = [traffic for name, traffic in dispatch.traffic.items() if name not in (*sizes, "starts", "row")]
        counts[0][name] += 1
        counts[1][name] += sum(traffic.bytes_read + traffic.bytes_written for traffic in arrays)
        counts[2][name] += sum(traffic.distinct_read + traffic.distinct_written for traffic in arrays)
    return counts


def check_against_the_emulator(engine, size, dtype, **layer):
    cell, both = CELLS[layer.get("op", "lstm")], layer.get("bidirectional", False)
    problem, graph = ours(size, DTYPES[dtype], engine, "backward", cell, both)
    predicted = [launch for launch in graph.launches if launch.ours]
    launches, moved, touched = seen_by_the_emulator(size, dtype, engine, **layer)
    assert Counter(launch.name.replace("_joining", "") for launch in predicted) == launches
    for name in launches:
        alike = [launch for launch in predicted if launch.name.replace("_joining", "") == name]
        assert sum(floor_bytes(launch, problem) for launch in alike) == pytest.approx(touched[name], rel=0.01)
        # The tolerance is 2 %, not 1 %, because the model also counts the weights that pad a row to a multiple of 4.
        assert sum(moved_bytes(launch, problem) for launch in alike) == pytest.approx(moved[name], rel=0.02)


@ON_THE_EMULATOR
@pytest.mark.parametrize(
    ("engine", "size", "dtype"),
    [
        *((engine, Size(3, B, 5, 40), np.float32) for engine in ENGINES for B in (1, 2, 6, 9, 40)),
        *((engine, Size(2, 2, 3, 24), np.float16) for engine in ENGINES),
        ("stepwise", Size(30, 2, 3, 8), np.float32),  # some launches also concatenate rows of old steps
        ("fused", Size(2, 130, 3, 12), np.float32),  # `fused` uses its kernel with matrix products
        # Not all weights fit in registers. A threadgroup computes two sequences of the batch.
        ("fused", Size(2, 17, 3, 112), np.float32),
    ],
)
def test_launches_and_bytes_are_those_of_the_emulator(engine, size, dtype):
    check_against_the_emulator(engine, size, dtype)


LAYERS = [{"op": op, "bidirectional": both} for op in CELLS for both in (False, True)][1:]


@ON_THE_EMULATOR
@pytest.mark.parametrize(
    ("engine", "layer"), [(engine, layer) for engine in ENGINES for layer in LAYERS if can_run(engine, layer)]
)
@pytest.mark.parametrize("B", [2, 9])
def test_launches_and_bytes_of_other_cells_and_of_both_directions(engine, layer, B):
    check_against_the_emulator(engine, Size(3, B, 5, 24), np.float32, **layer)


def test_what_counts_as_a_launch():
    """A view needs no kernel launch, but a copy of a non-contiguous array does. The depth of the graph is the
    longest chain of launches that wait for each other."""

    def function(a, b):
        flat = a.T.reshape(-1)  # MLX copies the array
        rows = b[1:3].reshape(-1)  # MLX returns a view without a copy
        return [mx.concatenate([mx.exp(flat), mx.exp(rows)])]

    graph = trace(function, [mx.zeros((2, 3)), mx.zeros((4, 3))])
    assert Counter(launch.name for launch in graph.launches) == {"Copy": 1, "Exp": 2, "Concatenate": 2}
    assert graph.depth == 3
    copied = next(launch for launch in graph.launches if launch.name == "Copy")
    assert floor_bytes(copied, None) == 2 * 6 * 4


def test_a_bias_counts_as_it_lies_in_memory():
    graph = trace(lambda x, w, b: [mx.addmm(b, x, w)], [mx.zeros(shape) for shape in ((8, 4), (4, 3), (3,))])
    assert [floor_bytes(launch, None) for launch in graph.launches] == [4 * (8 * 4 + 4 * 3 + 3 + 8 * 3)]


# --- Thresholds ------------------------------------------------------------------------------------------------------


BATCHES = {1: (1, 8, 16), 17: (17, 32, 64), 65: (65, 128, 256)}
"""Keys: the smallest batch size of each row of the default thresholds. Values: the batch sizes tested for the row."""


@pytest.mark.parametrize("least", BATCHES)
@pytest.mark.parametrize(("dtype", "rows"), [(mx.float32, WIDE), (mx.float16, NARROW)])
def test_the_default_thresholds_are_those_of_the_model(dtype, rows, least):
    """Each default threshold for the hidden size H is a multiple of 32. It is the largest one at which the model
    predicts that `fused` wins at every tested batch size of the threshold's table row."""
    assert list(rows) == list(BATCHES)
    ((threshold, engine),) = rows[least]
    last = threshold == FUSED_LIMIT["lstm"]
    wins = all(fused_wins(dtype, B, threshold) for B in BATCHES[least])
    loses = last or not all(fused_wins(dtype, B, threshold + 32) for B in BATCHES[least])
    assert engine == "fused" and threshold % 32 == 0
    assert wins and loses, f"the model says {fused_until(dtype, BATCHES[least])}"


@pytest.mark.parametrize(("bits", "rows"), [(4, OF_4), (8, OF_8)])
def test_the_thresholds_of_quantized_weights_are_those_of_the_model(bits, rows):
    """For quantized weights, each default threshold is the largest H at which the model predicts that `fused` wins.
    The prediction is for a forward pass of 100 steps at the first batch size of each table row. A quantization group
    has 64 weights if 64 divides H, otherwise 32."""
    for B, ((threshold, engine),) in rows.items():
        packing = {H: Packing(64 if H % 64 == 0 else 32, bits, "affine") for H in (threshold, threshold + 32)}
        wins = {H: fused_wins(mx.float32, B, H, 100, "forward", packing[H]) for H in packing if H <= 256}
        assert engine == "fused" and wins.pop(threshold) and not any(wins.values())


def test_the_default_table_has_every_dtype_of_the_shaders():
    """The default table of engines has every dtype of the shaders, and docs/engines.md shows the same thresholds."""
    assert PREDICTED.engines == {"float32": WIDE, "float16": NARROW, "bfloat16": NARROW}
    page = (Path(__file__).parents[1] / "docs/engines.md").read_text()
    for names, rows in (("float32", WIDE), ("float16, bfloat16", NARROW)):
        assert f"| {names} | {' | '.join(str(row[0][0]) for row in rows.values())} |\n" in page


def test_the_rule_against_what_was_published_of_mlx():
    """The model predicts published times of `mlx.nn.LSTM` within a factor of 2. At N = 1, H = 512 on an unnamed Mac
    one step took 34 us compiled and 58 us not compiled (ml-explore/mlx#1419)."""
    problem, graph = of_mlx(Size(300, 1, 512, 512), mx.float32, "forward")
    host = host_seconds("mlx.nn.LSTM", "forward", 300)
    steps = [1e6 * total_seconds(graph, problem, chip, host) / 300 for chip in CHIPS]
    assert all(34 / 2 < microseconds < 58 * 2 for microseconds in steps), steps


# --- Instructions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("B", [1, 32])
def test_a_sweep_takes_what_its_instructions_take(B):
    """The predicted time of a recurrence kernel is longer than the time of its instructions alone, because the model
    adds latencies to the instructions' time. Each of the four quarters of a GPU core executes one SIMD-group
    instruction per cycle."""
    problem, graph = ours(Size(50, B, 64, 64), mx.float32, "fused", "backward")
    for launch in graph.launches:
        if has_product(launch):
            cycles = cycles_of(launch, problem, 50)[0]
            for chip in CHIPS:
                parts = parts_of(launch, problem, chip)
                simdgroups = -(-launch.groups[0] // chip.cores) * launch.threads / 32
                assert parts["instructions"] > cycles * simdgroups / ISSUE / chip.clock


def test_the_host_is_a_bound():
    problem, graph = of_mlx(Size(3, 1, 8, 8), mx.float32, "forward")
    free, busy = (total_seconds(graph, problem, CHIPS[0], host) for host in (0.0, 1.0))
    assert free < 0.01 and 1.0 < busy < 1.01


# --- The command -----------------------------------------------------------------------------------------------------


def test_model_command(tmp_path, capsys):
    """The command `bench --model` marks every time as predicted. The predicted time of a layer is the sum of the
    times in its lines of output."""
    file = tmp_path / "model.csv"
    assert main(["--model", "--sizes", "5,3,4,8", "--passes", "backward", "--csv", str(file)]) == 0
    printed = capsys.readouterr().out
    header = next(line for line in printed.splitlines() if line.startswith("layer"))
    assert all(f"{chip.name}, predicted ms" in header for chip in CHIPS)
    assert "mlx.nn.LSTM over fused, predicted: " in printed and "nobody measured any of them" in printed
    assert "bound by" in header and "instructions of lstm_fused_forward: estimated from those of lstm_fused" in printed
    rows = list(csv.DictReader(file.open()))
    assert {row["layer"] for row in rows} == {"fused", "stepwise", "mlx.nn.LSTM"}
    assert {row["bound_M1"] for row in rows} >= {"host", "instructions", "memory"}
    for layer in ENGINES:
        *lines, whole = [row for row in rows if row["layer"] == layer]
        for column in ("launches", "moved", "predicted_s_M1", "predicted_s_M4 Max"):
            assert sum(float(line[column]) for line in lines) == pytest.approx(float(whole[column]))
    assert main(["--model", "--sizes", "2,3,4,300", "--engine", "stepwise"]) == 0
    assert "fused " not in capsys.readouterr().out
