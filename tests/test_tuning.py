"""Tests of the table that says which Metal engine is fastest on this machine. They check how the table is measured
and stored, when the library uses it, and when the library uses its default table instead."""

import json
import shutil
import subprocess
import warnings
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from on_metal import in_turns, on_metal

import mlx_lstm
from mlx_lstm import gru, lstm, rnn
from mlx_lstm.bench import tune as tune_module
from mlx_lstm.bench.__main__ import main
from mlx_lstm.bench.tune import Grid, measure_point, measure_row, row_of, tune, write
from mlx_lstm.engines import choice, choose, tuning
from mlx_lstm.engines.autodiff import ENGINE_MODULES
from mlx_lstm.engines.metal import fused
from mlx_lstm.engines.problem import Limits
from mlx_lstm.engines.tuning import PREDICTED, Table
from mlx_lstm.ground import machine
from mlx_lstm.lab.timing.tasks import Size

# Two batch sizes that use the same kernels.
TINY = Grid(units=(9,), batches=(9, 10), dtypes=("float32",), steps=2, checked=2, turns=1, seconds=0.0)
ENGINES = {"float32": {1: ((4, "stepwise"), (8, "fused")), 16: ((8, "ops"),)}}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Use a temporary folder as the user's cache folder. Yield the path of the file that stores the table of the
    fastest engines."""
    file = tmp_path / "cache" / "engines.json"
    monkeypatch.setattr(tuning, "cache_file", lambda: file)
    tuning.current.cache_clear()
    yield file
    tuning._chosen.clear()
    tuning.current.cache_clear()


def test_the_sizes_that_are_measured():
    """`--tune` measures H = 32, 64, 96 and so on up to 256, the largest H that `fused` supports."""
    assert Grid().units == (32, 64, 96, 128, 160, 192, 224, 256)


def written(file, engines=ENGINES, cuts=(), **other):
    """Write a file with a table of the fastest engines and return its path. `engines`: the preferred engines.
    `other`: replacements for the entries that describe the machine on which the table was measured."""
    write(file, engines, [], cuts)
    content = json.loads(file.read_text())
    content["machine"] |= other
    file.write_text(json.dumps(content))
    return file


# --- The table of the fastest engines --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "B", "H", "engine"),
    [
        (mx.float32, 1, 4, "stepwise"),
        (mx.float32, 15, 5, "fused"),
        (mx.float32, 15, 9, "stepwise"),  # H is larger than the row's last entry
        (mx.float32, 16, 8, "ops"),
        (mx.float32, 1000, 9, "stepwise"),
        (mx.float16, 1, 4, "stepwise"),  # without a row for the dtype, `stepwise` is chosen
    ],
)
def test_a_table_decides(dtype, B, H, engine):
    where = {"sizes": (3, B, 2, H), "dtype": dtype, "device": "gpu", "metal": True, "traced": False}
    choice = choose(**where, table=Table("measured here", ENGINES))
    assert choice.engine == engine and "measured here" in choice.reason and f"H = {H} " in choice.reason


def test_below_the_first_row_the_first_row_counts():
    assert Table("", {"float32": {8: ((4, "fused"),)}}).preferred(mx.float32, 1, 4)[0] == "fused"


def test_an_engine_that_was_discarded_is_never_answered():
    """If the table of the fastest engines marks an engine as discarded (wrong or failing) for a range of batch
    sizes, `choose` never selects it there, not even if no other Metal engine can run. For other batch sizes it still
    selects the engine, and a caller can request it."""
    table = Table("measured here", {"float32": {1: ((64, "fused"),), 16: ()}}, frozenset({("float32", 1, "stepwise")}))
    where = {"dtype": mx.float32, "device": "gpu", "metal": True, "traced": False, "table": table}
    at = {(B, H): choose(sizes=(3, B, 2, H), **where).engine for B in (1, 16) for H in (64, 65, 300)}
    assert at == {(1, 64): "fused", (1, 65): "ops", (1, 300): "ops"} | {(16, H): "stepwise" for H in (64, 65, 300)}
    assert choose(sizes=(3, 1, 2, 8), **where, projection=True).engine == "ops"
    assert choose(sizes=(3, 1, 2, 65), **where, requested="stepwise").engine == "stepwise"


def test_a_table_cannot_make_an_engine_run():
    """`choose` selects an engine only within the engine's limits and only with Metal, whatever the table of the
    fastest engines says. If the caller requests an engine, the table has no effect."""
    table = Table("measured here", {"float32": {1: ((1000, "fused"),)}})
    where = {"sizes": (3, 1, 2, 8), "dtype": mx.float32, "traced": False, "table": table}
    on_gpu = where | {"device": "gpu", "metal": True}
    assert choose(**on_gpu | {"sizes": (3, 1, 2, 300)}).engine == "stepwise"
    assert choose(**on_gpu, projection=True).engine == "stepwise"
    assert choose(**on_gpu, requested="stepwise").engine == "stepwise"
    assert choose(**where, device="cpu", metal=True).engine == "numpy"
    assert choose(**where, device="gpu", metal=False).engine == "ops"


# --- The file that stores the table ----------------------------------------------------------------------------------


def test_a_file_of_this_machine_counts(own_cache):
    assert tuning.load(own_cache) is PREDICTED  # there is no file, so the default table is used
    written(own_cache)
    assert tuning.load(own_cache) == Table(f"measured here, {own_cache}", ENGINES)


@pytest.mark.parametrize("folder", ["metal", "engines/metal"])
def test_a_changed_file_changes_the_hash_of_the_kernels(tmp_path, folder):
    """`kernels_hash` changes when any file of the shaders or of the Metal engines changes. The files of a copy of
    the package are changed one after the other."""
    package, before = tmp_path / "mlx_lstm", tuning.kernels_hash()
    shutil.copytree(Path(mlx_lstm.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(tuning.shader_folder(), package / "metal", dirs_exist_ok=True)
    with (
        patch.object(tuning, "shader_folder", lambda: package / "metal"),
        patch.object(tuning, "__file__", str(package / "engines" / "tuning.py")),
    ):
        found = {tuning.kernels_hash()}
        assert found == {before}
        files = [file for file in (package / folder).iterdir() if file.suffix in (".metal", ".py")]
        for file in files:
            file.write_text(file.read_text() + "\n")
            found.add(tuning.kernels_hash())
    assert len(files) > 5 and len(found) == len(files) + 1


@pytest.mark.parametrize("entry", ["chip", "architecture", "system", "mlx", "mlx_lstm", "kernels"])
def test_a_file_of_another_machine_does_not(own_cache, entry):
    """The library ignores the file with the table of the fastest engines if an entry of the file describes another
    machine, another version or other kernels. There is no warning, but the reason that is given for the choice of an
    engine names this entry."""
    written(own_cache, **{entry: "another"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = tuning.load(own_cache)
    assert table.engines == PREDICTED.engines
    assert table.preferred(mx.float32, 1, 4)[1].endswith(f"{own_cache} was measured with another {entry}")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"machine": {}}',
        '{"machine": [], "engines": {}}',
        '{"machine": {}, "engines": {"float32": 1}}',
        '{"machine": {}, "engines": {"float32": {"x": []}}}',
        '{"machine": {}, "engines": {"float32": {"1": [[4, "metal"]]}}}',
        '{"machine": {}, "engines": {"float32": {"1": [["4", "fused"]]}}}',
        '{"machine": {}, "engines": {"float32": {"1": [[8, "fused"], [4, "stepwise"]]}}}',
        '{"machine": {}, "engines": {"float32": {"1": [4]}}}',
        '{"machine": {}, "engines": {}, "measured": [], "cuts": [["float32", 1, 3, 0]]}',
        '{"machine": {}, "engines": {}, "measured": [], "cuts": [["float32", 1, 2, -8]]}',
        '{"machine": {}, "engines": {}, "measured": [], "cuts": [["float32", 1, 2]]}',
        b"\xff\xfe",
    ],
)
def test_a_broken_file_is_named_in_a_warning(own_cache, text):
    own_cache.parent.mkdir()
    own_cache.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.warns(UserWarning, match="engines.json is not a table of engines and is ignored"):
        table = tuning.load(own_cache)
    assert table.engines == PREDICTED.engines and f"{own_cache} is broken" in table.source


def test_a_file_that_cannot_be_read_is_named_in_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="is not a table"):
        assert tuning.load(tmp_path).engines == PREDICTED.engines  # the path is a folder


# --- The library uses the table --------------------------------------------------------------------------------------


def engines_that_run(monkeypatch):
    """Record the result of every choice of an engine. Return the list of results, which grows with each choice."""
    words, decide = [], choice.decide

    def noted(*arguments, **refused):
        words.append(decide(*arguments, **refused))
        return words[-1]

    monkeypatch.setattr(choice, "decide", noted)
    return words


def test_the_library_reads_it_once_when_a_metal_engine_may_run(own_cache, monkeypatch):
    written(own_cache, {"float32": {1: ((8, "stepwise"),)}})
    words, read = engines_that_run(monkeypatch), []
    load = tuning.load
    monkeypatch.setattr(tuning, "load", lambda file: (read.append(file), load(file))[1])
    arrays = [mx.zeros(shape) for shape in ((2, 1, 1), (4, 1), (4, 1))]
    with patch.object(mx.metal, "is_available", lambda: False):
        lstm(*arrays)
    assert not read
    with on_metal():
        lstm(*arrays)
        lstm(*arrays)
    assert read == [own_cache]
    assert [choice.engine for choice in words] == ["numpy", "stepwise", "stepwise"]
    assert words[-1].reason == f"H = 1 <= 8 in float32 at B = 1, measured here, {own_cache}"


def test_a_program_may_name_another_file(tmp_path):
    file = written(tmp_path / "mine.json")
    assert tuning.use(file).source == tuning.current().source == f"measured here, {file}"
    assert tuning.use(None) is PREDICTED


# --- The command `tune` ----------------------------------------------------------------------------------------------


def test_tune_measures_writes_and_counts(own_cache, capsys, monkeypatch):
    """`tune` measures all Metal engines and writes the table of the fastest ones, which the library then uses. The
    emulator replaces the GPU, so the times have no meaning."""
    monkeypatch.setattr(tune_module, "ROWS", (2,))
    monkeypatch.setattr(tune_module, "SPARE", (8,))
    with on_metal():
        assert tune(None, TINY) == 0
    printed = capsys.readouterr().out
    assert f"written to {own_cache}: it counts on this machine" in printed and "float32 B = 9 H = 9:" in printed
    content = json.loads(own_cache.read_text())
    assert content["machine"] == tuning.machine() and len(content["measured"]) == 2
    for point in content["measured"]:
        assert point["fused"] > 0 and point["stepwise"] > 0 and point["engine"] in ("fused", "stepwise")
    table = tuning.current()
    assert table.source == f"measured here, {own_cache}"
    for point in content["measured"]:
        assert table.preferred(getattr(mx, point["dtype"]), point["B"], point["H"])[0] == point["engine"]
    words = engines_that_run(monkeypatch)
    with on_metal():
        lstm(*(mx.zeros(shape) for shape in ((2, 1, 1), (8, 1), (8, 2))))
    assert words[0].engine == content["measured"][0]["engine"] and "measured here" in words[0].reason


@pytest.fixture
def no_cuts(monkeypatch):
    """Make `tune` skip its measurements of how to divide the work (batch rows per threadgroup, registers left free)."""
    monkeypatch.setattr(tune_module, "best_cut", lambda dtype, B, grid: None)


def test_tune_measures_every_dtype(own_cache, monkeypatch, no_cuts):
    times = {"fused": 1.0, "stepwise": 2.0, "engine": "fused"}
    monkeypatch.setattr(
        tune_module,
        "measure_point",
        lambda size, dtype, grid: {"dtype": dtype, "B": size.B, "H": size.H, **times},
    )
    with on_metal():
        assert tune(None, TINY._replace(dtypes=("float32", "float16"))) == 0
    for dtype in (mx.float32, mx.float16):
        assert tuning.current().preferred(dtype, 9, 9)[0] == "fused"
    assert {point["dtype"] for point in json.loads(own_cache.read_text())["measured"]} == {"float32", "float16"}


@pytest.mark.parametrize(
    "op, rows", in_turns([("rnn",), ("gru",), ("gru-before",), ("lstm",)], tune_module.ROWS, others=True)
)
def test_however_it_is_cut_the_result_is_the_same(op, rows):
    """Gradients do not depend on how `fused` divides its work: on the number of batch rows per threadgroup, and on
    the number of registers that it does not fill with weights. If the cell does not support a number of rows, fewer
    rows are used."""
    reset = {"reset": "before"} if op == "gru-before" else {}
    function = {"lstm": lstm, "rnn": rnn}.get(op, gru)
    H, G = 8, {"lstm": 4, "rnn": 1}.get(op, 3)
    draw = np.random.default_rng(7).standard_normal
    arrays = [mx.array(draw(shape).astype(np.float32)) for shape in ((3, 9, 2), (G * H, 2), (G * H, H), (G * H,))]

    def gradients(engine):
        return mx.grad(lambda *arrays: (function(*arrays, engine=engine, **reset).h ** 2).sum(), (0, 1, 2, 3))(*arrays)

    expected = gradients("ops")
    with on_metal() as log, tuning.trying(tuning.Cut(rows, spare=64)):
        found = gradients("fused")
        mx.eval(found)
    assert any("matrix" in launch.name for launch in log) == (rows == 8 and op != "gru-before")
    for ours, exact in zip(found, expected, strict=True):
        assert mx.abs(ours - exact).max() < 1e-4 * mx.abs(exact).max()


def test_the_library_cuts_as_the_file_says(own_cache):
    written(own_cache, {"float32": {1: ((8, "fused"),), 16: ((8, "fused"),)}}, [("float32", 16, 1, 8)])
    assert [tuning.current().cut(mx.float32, B) for B in (1, 15, 16, 99)] == [None, None, (1, 8), (1, 8)]
    with on_metal(), patch.object(fused, "rows_of", wraps=fused.rows_of) as rows_of:
        mx.eval(lstm(*(mx.zeros(shape) for shape in ((2, 20, 1), (8, 1), (8, 2)))).h)
    assert {call.args[2] for call in rows_of.call_args_list} == {
        1
    }  # the file says 1 batch row per threadgroup; the default would be 2


def test_a_cut_counts_where_it_is_worth_it(monkeypatch, capsys):
    """A cut says how `fused` divides its work: the batch rows per threadgroup, and the number of registers that
    weights leave free. `best_cut` first tries several numbers of rows, then several numbers of free registers. It
    never selects a cut that gives wrong results or that is hardly faster than the default."""
    times = {None: 1.0, (1, 0): "discarded: wrong", (2, 0): 0.98, (4, 0): 0.9, (8, 0): 2.0}
    times |= {(4, 8): 0.89, (4, 16): 0.8, (4, 32): "discarded: no pipeline"}
    monkeypatch.setattr(tune_module, "measure", lambda contenders, *_: {cut: times[cut] for cut in contenders})
    assert tune_module.best_cut("float32", 32, Grid()) == (4, 16)
    assert "rows 4 spare 16 0.800 ms" in capsys.readouterr().out
    times |= {(4, 0): 0.98, (1, 8): 1.0, (1, 16): 1.0, (1, 32): 1.0, (2, 8): 1.0, (2, 16): 1.0, (2, 32): 1.0}
    times |= dict.fromkeys([(8, 8), (8, 16), (8, 32)], 1.0)
    assert tune_module.best_cut("float32", 32, Grid()) is None
    times[None] = "discarded: no pipeline"
    assert tune_module.best_cut("float32", 32, Grid()) == (2, 0)


def test_tune_writes_where_it_is_told_to(tmp_path, own_cache, capsys, no_cuts):
    file = tmp_path / "elsewhere" / "mine.json"
    with on_metal():
        assert tune(str(file), TINY) == 0
    assert file.exists() and not own_cache.exists()
    assert f"mlx_lstm.engines.tuning.use('{file}')" in capsys.readouterr().out
    assert tuning.current() is PREDICTED


@pytest.mark.parametrize("engine", ["fused", "stepwise"])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda outputs: outputs | {"h": outputs["h"] * 1.001}, "discarded: h: error"),
        (lambda outputs: outputs["nothing"], "discarded: KeyError: 'nothing'"),
    ],
)
def test_what_is_wrong_or_fails_is_discarded(monkeypatch, engine, damage, said):
    module = ENGINE_MODULES[engine]
    forward = module.forward
    monkeypatch.setattr(module, "forward", lambda *arguments: damage(forward(*arguments)))
    with on_metal():
        point = measure_point(Size(2, 9, 3, 9), "float32", TINY)
    other = {"fused": "stepwise", "stepwise": "fused"}[engine]
    assert point[engine].startswith(said) and point[other] > 0 and point["engine"] == other


def test_what_was_discarded_is_read_again(own_cache):
    point = {"dtype": "float32", "B": 1, "H": 4, "fused": 1.5, "stepwise": "discarded: no pipeline", "engine": "fused"}
    write(own_cache, {"float32": {1: ((4, "fused"),), 16: ((4, "fused"),)}}, [point], [])
    table = tuning.load(own_cache)
    assert [table.preferred(mx.float32, B, 5)[0] for B in (1, 15, 16)] == ["ops", "ops", "stepwise"]


def test_where_no_engine_is_right_ops_is():
    def broken(*arguments):
        raise RuntimeError("no pipeline\nand more")

    with pytest.MonkeyPatch.context() as patch, on_metal():
        for engine in ("fused", "stepwise"):
            patch.setattr(ENGINE_MODULES[engine], "forward", broken)
        point = measure_point(Size(2, 1, 2, 2), "float32", TINY)
    assert point["engine"] == "ops" and point["fused"] == "discarded: RuntimeError: no pipeline"


def test_a_row_ends_when_fused_has_lost_twice(monkeypatch, capsys):
    winners = iter(["fused", "stepwise", "fused", "stepwise", "stepwise", "fused"])
    monkeypatch.setattr(
        tune_module,
        "measure_point",
        lambda size, dtype, grid: (
            {"dtype": dtype, "B": size.B, "H": size.H, "fused": 1.0, "stepwise": 2.0} | {"engine": next(winners)}
        ),
    )
    found = measure_row("float32", 4, TINY._replace(units=(1, 2, 3, 4, 5, 6)))
    assert row_of(found) == ((1, "fused"), (2, "stepwise"), (3, "fused"), (5, "stepwise"))


def test_no_metal_no_tuning(capsys, own_cache, monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert main(["--tune"]) == 2
    assert "no Metal back end on this machine" in capsys.readouterr().err
    assert not own_cache.exists()


@pytest.mark.parametrize("folder", ["/proc/mlx-lstm", "/proc"])
def test_a_folder_that_cannot_be_written(folder, capsys):
    """The command says so before it measures anything: a new folder in /proc, or a file in it, cannot be made."""
    with on_metal():
        assert tune(f"{folder}/engines.json", TINY) == 2
    said = capsys.readouterr()
    assert f"cannot write {folder}/engines.json" in said.err and "--tune-file names another place" in said.err
    assert not said.out


# --- The number of GPU cores -----------------------------------------------------------------------------------------


IOREG = (
    b'+-o AGXAcceleratorG14X  <class AGXAcceleratorG14X>\n    {\n      "gpu-core-count" = 38\n      "model" = "M2"\n'
)


def test_the_system_counts_gpu_cores(monkeypatch):
    """On a Mac `counted_gpu_cores` runs the command ioreg once per process. It returns None if the command is missing,
    hangs or prints no plausible number. On other systems it returns None without running the command."""
    asked = []

    def answering(answer):
        def run(command, **options):
            asked.append(command)
            if isinstance(answer, Exception):
                raise answer
            return subprocess.CompletedProcess(command, 0, stdout=answer)

        monkeypatch.setattr(machine.subprocess, "run", run)
        machine.counted_gpu_cores.cache_clear()
        return max((machine.counted_gpu_cores() for _ in range(2)), key=bool)

    monkeypatch.setattr(machine.sys, "platform", "linux")
    assert answering(IOREG) is None and not asked
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    assert answering(IOREG) == 38 and len(asked) == 1
    for none in (b"", b'"gpu-core-count" = "many"', b'"gpu-core-count" = 0', b'"gpu-core-count" = 99999', b"\xff\xfe"):
        assert answering(none) is None
    for error in (FileNotFoundError(), PermissionError(), subprocess.TimeoutExpired("ioreg", 2)):
        assert answering(error) is None
    monkeypatch.undo()
    machine.counted_gpu_cores.cache_clear()


@pytest.mark.parametrize(
    ("chip", "architecture", "cores"),
    [
        ("Apple M1", "applegpu_g13g", 10),
        ("Apple M4 Pro", "applegpu_g16s", 18),
        ("Apple M2 Max", "applegpu_g14s", 38),
        ("Apple M3 Ultra", "applegpu_g15d", 76),
        ("Apple Silicon", "applegpu_g18d", 76),
        ("Apple Silicon", "applegpu_g18p", 5),
        ("unknown", "unknown", 10),
        ("", "", 10),
        ("AMD EPYC", "x86_64s", 10),
    ],
)
def test_a_name_suggests_a_number_of_cores(chip, architecture, cores):
    assert tuning.suggested_cores({"chip": chip, "architecture": architecture}) == cores


def test_limits_get_the_cores_of_this_gpu(monkeypatch):
    monkeypatch.setattr(tuning, "counted_gpu_cores", lambda: 30)
    tuning.gpu_cores.cache_clear()
    tuning.on_this_gpu.cache_clear()
    assert tuning.on_this_gpu(Limits()).cores == 30 and tuning.on_this_gpu(Limits(cores=8)).cores == 8
    monkeypatch.undo()
    tuning.gpu_cores.cache_clear()
    tuning.on_this_gpu.cache_clear()
