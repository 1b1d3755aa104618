"""Tests with files that lie about their contents. Each file attacks one weakness of the reader. The reader must
print one line of error and stay within limits of memory and time."""

import bz2
import io
import json
import os
import re
import signal
import stat
import struct
import subprocess
import sys
import time
import zipfile
from contextlib import nullcontext
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_lstm import convert
from mlx_lstm.convert import _hdf5, _onnx_file
from mlx_lstm.convert.__main__ import main
from mlx_lstm.ground import budget, files
from mlx_lstm.lab.mpsgraph.dump import read as read_arrays
from mlx_lstm.lab.mpsgraph.files import Golden, load_golden, save_golden

h5py = pytest.importorskip("h5py")
onnx = pytest.importorskip("onnx")
ROOT = Path(__file__).parents[1]
MB = 2**20


def layer(H=4, I=3):
    """Return the weights of a small LSTM."""
    rng = np.random.default_rng(0)
    shapes = {"weight_ih_l0": (4 * H, I), "weight_hh_l0": (4 * H, H), "bias_ih_l0": (4 * H,), "bias_hh_l0": (4 * H,)}
    return convert.from_torch({name: rng.normal(size=shape).astype("f") for name, shape in shapes.items()})


def refusal(capsys, *arguments):
    """Run the convert command, assert that it converts nothing, and return its only line of error, which must be
    printable."""
    assert main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("not converted: ") and err.count("\n") == 1 and err[:-1].isprintable()
    assert len(err) < 1100
    return err


def refusals_in_little_memory(paths, target):
    """Convert each file by the command, one after the other, in one process with limited memory. Return a list of
    (exit code, stderr, MB of memory used so far in addition to the imports)."""
    code = """
import contextlib, io, json, resource, sys
from mlx_lstm.convert.__main__ import main
import h5py, onnx
from mlx_lstm import convert
resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[2:]:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main([path, sys.argv[1]])
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    used = max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, child - 60_000) // 1024
    print(json.dumps([code, said.getvalue(), used]), flush=True)
"""
    command = [sys.executable, "-c", code, str(target), *map(str, paths)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


# --- 1. HDF5 that reads other files ----------------------------------------------------------------------------------


def keras_file(path, change):
    """Write a .weights.h5 or .keras file of one layer and let `change` alter its HDF5 contents."""
    convert.write(path, {"lstm": layer()})
    if path.suffix == ".h5":
        with h5py.File(path, "r+") as file:
            change(file)
        return
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    data = io.BytesIO(members["model.weights.h5"])
    with h5py.File(data, "r+") as file:
        change(file)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (members | {"model.weights.h5": data.getvalue()}).items():
            archive.writestr(name, content)


def external(secret):
    def change(file):
        file.create_dataset("stolen", (16,), "u1", external=[(str(secret), 0, 16)])

    return change


def virtual(secret):
    def change(file):
        layout = h5py.VirtualLayout((16,), "u1")
        layout[:] = h5py.VirtualSource(str(secret), "x", (16,))
        file.create_virtual_dataset("stolen", layout)

    return change


def linked(secret):
    def change(file):
        file["stolen"] = h5py.ExternalLink(str(secret), "/x")

    return change


def of_a_layer(secret):
    def change(file):
        group = file["layers/lstm/cell/vars"]
        shape = group["0"].shape
        del group["0"]
        group.create_dataset("0", shape, "f4", external=[(str(secret), 0, 4 * int(np.prod(shape)))])

    return change


# Each hole once: the same child process reads the HDF5 of both kinds of files.
@pytest.mark.parametrize(
    ("hole", "ending"),
    [(external, ".weights.h5"), (virtual, ".keras"), (linked, ".weights.h5"), (of_a_layer, ".keras")],
)
def test_hdf5_reads_no_other_file(hole, ending, tmp_path, capsys):
    secret, path, target = tmp_path / "secret.h5", tmp_path / f"m{ending}", tmp_path / "out.safetensors"
    with h5py.File(secret, "w") as file:
        file["x"] = np.frombuffer(b"SECRET, KEEP OUT" * 64, np.uint8)
    keras_file(path, hole(secret))
    said = refusal(capsys, path, target)
    assert "must lie in the file itself" in said and not target.exists()


def test_a_legacy_file_with_an_external_link(tmp_path, capsys):
    path, secret = tmp_path / "m.h5", tmp_path / "secret.h5"
    convert.write(path, {"lstm": layer()})
    with h5py.File(secret, "w") as file:
        file["kernel"] = np.ones((3, 16), "f4")
    with h5py.File(path, "r+") as file:
        group = file["model_weights/lstm/lstm/lstm_cell"]
        del group["kernel"]
        group["kernel"] = h5py.ExternalLink(str(secret), "/kernel")
    assert "is a link to another file" in refusal(capsys, path, tmp_path / "out.npz")


# --- 2. ONNX with arrays in other files ------------------------------------------------------------------------------


def test_an_encrypted_archive(tmp_path):
    """Python's reader of zip files raises a RuntimeError for an encrypted file."""
    path = tmp_path / "layer.npz"
    convert.write(path, {"layer": layer()})
    data = bytearray(path.read_bytes())
    for header, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # of each array, and in the list of all arrays
        for found in re.finditer(re.escape(header), data):
            data[found.start() + flags] |= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="is truncated or damaged: RuntimeError"):
        convert.read(path)


def test_an_onnx_message_of_too_many_parts(monkeypatch):
    """Every text, array and message inside of an ONNX model counts, at any depth; numbers of any encoding do not."""
    model = onnx.ModelProto(ir_version=300)
    for n in range(9):
        node = model.graph.node.add(name=100 * n * "n" or "n")
    node.attribute.add(f=1.0, i=-1)
    data = b"\x79" + bytes(8) + model.SerializeToString()  # first an unknown field of eight bytes
    for most in (20, 19):  # the graph, nine nodes, their names, and an attribute are 20 parts
        monkeypatch.setattr(budget, "MOST_VALUES", most)
        with pytest.raises(ValueError, match="it must have at most 19") if most < 20 else nullcontext():
            _onnx_file.check_count(data, onnx.ModelProto.DESCRIPTOR, budget.Budget(len(data)))


def onnx_with_external(path, location, data=None):
    """Write an ONNX model whose array W is stored in another file."""
    convert.write(path, {"lstm": layer()}, force=True)
    model = onnx.load(path)
    tensor = next(each for each in model.graph.initializer if each.name == "lstm.W")
    content = tensor.raw_data
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": "0", "length": str(len(content))}.items():
        tensor.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())
    if data:
        data.write_bytes(content)


def test_onnx_reads_other_files_only_if_asked(tmp_path, capsys):
    folder, target = tmp_path / "model", tmp_path / "out.npz"
    folder.mkdir()
    path = folder / "m.onnx"
    onnx_with_external(path, "m.data", folder / "m.data")
    said = refusal(capsys, path, target)
    assert "lstm.W must lie in the file itself, or --external-data be given, but got m.data" in said
    assert main([str(path), str(target), "--external-data"]) == 0
    capsys.readouterr()
    assert convert.differences(layer(), convert.read(target).layers["lstm"]) == []
    for location in ("../secret", str(tmp_path / "secret"), "..", "", "sub/secret"):
        onnx_with_external(path, location, tmp_path / "secret")
        assert "must lie beside the model" in refusal(capsys, path, target, "--force", "--external-data")
    onnx_with_external(path, "link", tmp_path / "secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    assert "and be no link" in refusal(capsys, path, target, "--force", "--external-data")
    onnx_with_external(path, "m.data")
    model = onnx.load(path, load_external_data=False)
    other = model.graph.initializer.add()
    other.CopyFrom(next(each for each in model.graph.initializer if each.name == "lstm.W"))
    other.name = "twin"
    path.write_bytes(model.SerializeToString())
    assert "must not overlap but got twin" in refusal(capsys, path, target, "--force", "--external-data")
    onnx_with_external(path, "short")
    (folder / "short").write_bytes(b"1234")
    assert "lies beyond the end of short" in refusal(capsys, path, target, "--force", "--external-data")


# --- 4. Links at temporary names, file modes, files that appear during a write ---------------------------------------


def test_temporary_names_follow_no_link(tmp_path, monkeypatch):
    """A symbolic link planted under a temporary name never makes the program overwrite another file of the user:
    temporary names are unpredictable, and an existing name is refused."""
    victim, target = tmp_path / "victim", tmp_path / "out.npz"
    victim.write_text("mine")
    convert.write(tmp_path / "in.npz", {"lstm": layer()})
    for name in (
        f".{os.getpid()}.new.out.npz",
        f".{os.getpid()}.out.npz",
        f".{os.getpid()}..{os.getpid()}.new.out.npz",
    ):
        (tmp_path / name).symlink_to(victim)
    assert main([str(tmp_path / "in.npz"), str(target)]) == 0
    assert victim.read_text() == "mine" and target.is_file() and not target.is_symlink()
    monkeypatch.setattr("secrets.token_hex", lambda n: "guessed")
    (tmp_path / ".guessed.npz").symlink_to(victim)
    with pytest.raises(FileExistsError):
        files.write_whole(tmp_path / "x.npz", lambda partial: partial.write_text("theirs"))
    assert victim.read_text() == "mine"


def test_modes(tmp_path):
    path = tmp_path / "out.npz"
    old = os.umask(0o027)
    try:
        convert.write(path, {"lstm": layer()})
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o600)
        convert.write(path, {"lstm": layer()}, force=True)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(old)


def test_modes_of_strangers_and_threads(tmp_path, monkeypatch):
    """Setuid bits, and the permissions that another user gave a file, are not kept; no thread sees another umask."""
    path = tmp_path / "out.npz"
    path.touch()
    path.chmod(0o4750)
    convert.write(path, {"lstm": layer()}, force=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    path.chmod(0o777)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    monkeypatch.setattr(os, "umask", None)  # must not be called
    (tmp_path / "new").touch()
    convert.write(path, {"lstm": layer()}, force=True)
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "new").stat().st_mode)


def test_the_report_of_check_follows_no_link(tmp_path):
    from mlx_lstm.lab.engines.report import Report

    (tmp_path / "victim").write_text("mine")
    (tmp_path / "r.json.part").symlink_to(tmp_path / "victim")
    Report(tmp_path / "r.json", "python", "cpu").save()
    assert (tmp_path / "victim").read_text() == "mine" and not (tmp_path / "r.json").is_symlink()


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_appears_meanwhile_is_kept(links, tmp_path, monkeypatch):
    path = tmp_path / "out.npz"
    if not links:  # simulate a file system without hard links

        def no_links(*_):
            raise OSError(95, "not supported")

        monkeypatch.setattr(os, "link", no_links)

    def work(partial):
        partial.write_text("ours")
        path.write_text("theirs")

    with pytest.raises(FileExistsError, match="exists"):
        files.write_whole(path, work)
    assert path.read_text() == "theirs" and [each.name for each in tmp_path.iterdir()] == ["out.npz"]
    path.unlink()
    files.write_whole(path, lambda partial: partial.write_text("ours"))
    assert path.read_text() == "ours" and [each.name for each in tmp_path.iterdir()] == ["out.npz"]


def test_a_signal_in_a_destructor_ends_the_command():
    """SIGTERM ends a command with its exit code even if it arrives while Python runs a destructor, where Python
    ignores exceptions. `finally` blocks run."""
    code = """
import os, signal, time
from mlx_lstm.ground.machine import run_command
class Killed:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)
def main():
    Killed()
    try:
        time.sleep(60)
    finally:
        print("cleared")
run_command(main)
"""
    command, environment = [sys.executable, "-c", code], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (143, "cleared\n", "")


@pytest.mark.parametrize("number", ["TERM", "KILL"])
def test_kills_during_writes(number, tmp_path):
    kill_during_writes(tmp_path, number, 3)


@pytest.mark.slow
@pytest.mark.parametrize("number", ["TERM", "KILL"])
def test_many_kills_during_writes(number, tmp_path):
    kill_during_writes(tmp_path, number, 25)


def kill_during_writes(folder, number, times):
    """Kill a command that replaces a file again and again. Check that the file is complete after every kill, and
    that SIGTERM leaves no temporary file."""
    source, target = folder / "in.safetensors", folder / "out.safetensors"
    rest = {"large": np.zeros(2_000_000, "f4")}
    convert.write(source, convert.Model({"lstm": layer()}, rest, {}, [], {}))
    target.write_bytes(source.read_bytes())
    code = f"""
import sys
from mlx_lstm.convert.__main__ import main
from mlx_lstm.ground.machine import run_command
def forever():
    print("ready", flush=True)
    while main([{str(source)!r}, {str(target)!r}, "--force"]) == 0:
        pass
run_command(forever)
"""
    rng = np.random.default_rng(times)
    for _ in range(times):
        command = [sys.executable, "-c", code]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
        process.stdout.readline()
        time.sleep(rng.uniform(0.05, 0.4))
        process.terminate() if number == "TERM" else process.kill()
        try:
            process.communicate(timeout=300)
        finally:
            process.kill()  # a process that did not end would disturb later tests
        assert process.returncode == (143 if number == "TERM" else -9)
        assert convert.differences(layer(), convert.read(target).layers["lstm"]) == []
        left = sorted({each.name for each in folder.iterdir()} - {"in.safetensors", "out.safetensors"})
        assert len(left) <= (number == "KILL"), left
        for name in left:
            assert name.startswith(".") and name.endswith(".safetensors")
            (folder / name).unlink()


# --- 5. Small files that declare large sizes -------------------------------------------------------------------------


def h5_of_fill_values(path):
    def change(file):
        file.create_dataset("huge", (1_500_000_000,), "f4", chunks=(1_000_000,), fillvalue=1.0)

    keras_file(path, change)


def h5_of_a_huge_chunk(path):
    def change(file):
        data = file.create_dataset("huge", (8,), "f4", chunks=(500_000_000,), maxshape=(None,), compression="gzip")
        del data

    keras_file(path, change)


def zip_of(method, size):
    """Return a function that writes a compressed .npz file whose only array has `size` MB of zeros."""

    def make(path):
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (size * MB,)})
        with zipfile.ZipFile(path, "w", method, compresslevel=1) as archive, archive.open("x.npy", "w") as member:
            member.write(header.getvalue())
            for _ in range(size):
                member.write(bytes(MB))

    return make


def npz_that_lies_about_its_size(path):
    """Write an .npz file whose bzip2 member expands to 20 MB, although the zip directory declares 100 bytes."""
    data = bz2.compress(bytes(20 * MB))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", data)
    raw = bytearray(path.read_bytes())
    directory = raw.rindex(b"PK\x01\x02")
    for place in (8, directory + 10):
        raw[place : place + 2] = struct.pack("<H", zipfile.ZIP_BZIP2)
    for place in (22, directory + 24):
        raw[place : place + 4] = struct.pack("<I", 100)
    path.write_bytes(raw)


def npz_of_a_huge_header(path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (2_000_000_000,)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", header.getvalue() + bytes(16))


def overlapping(path):
    entries = {f"k{n}": {"dtype": "F32", "shape": [MB // 4], "data_offsets": [0, MB]} for n in range(2000)}
    safetensors(path, entries, bytes(MB))


def safetensors(path, entries, data=b""):
    """Write a safetensors file with the header `entries` (a dict or bytes) and the bytes `data`."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


BOMBS = {
    "fill values": (h5_of_fill_values, ".weights.h5", "declare far more bytes"),
    "a huge chunk": (h5_of_a_huge_chunk, ".keras", "declare far more bytes"),
    "bzip2": (zip_of(zipfile.ZIP_BZIP2, 20), ".npz", "another method than deflate"),
    "deflate": (zip_of(zipfile.ZIP_DEFLATED, 200), ".npz", "save it uncompressed"),
    "deflate in keras": (zip_of(zipfile.ZIP_DEFLATED, 200), ".keras", "save it uncompressed"),
    "a lie": (npz_that_lies_about_its_size, ".npz", "another method than deflate"),
    "a header": (npz_of_a_huge_header, ".npz", "x.npy declares (2000000000,) of float32 and has 16 bytes"),
    "overlaps": (overlapping, ".safetensors", "k1 (262144,) of F32 lies at 0..1048576, expected at 1048576"),
}


def test_bombs(tmp_path):
    """The memory of a process never shrinks below its peak, so a later file is not refused for an earlier one: all of
    them have to stay below the smallest of the limits."""
    target, paths = tmp_path / "out.safetensors", []
    for n, (make, ending, _) in enumerate(BOMBS.values()):
        make(path := tmp_path / f"b{n}{ending}")
        paths.append(path)
    found = refusals_in_little_memory(paths, target)
    for path, (bomb, (_, ending, what)), (code, said, memory) in zip(paths, BOMBS.items(), found, strict=True):
        assert code == 2 and what in said and said.count("\n") == 1 and not target.exists(), (bomb, said)
        assert memory < 10 * path.stat().st_size / MB + 200, bomb
        if ending == ".npz" or ending == ".safetensors":
            with pytest.raises(ValueError, match=r"\.npz or a \.safetensors"):
                read_arrays(str(path))
        if ending == ".npz":
            with pytest.raises(ValueError, match="is no golden"):
                load_golden(str(path))


def test_no_memory_is_one_line(tmp_path, capsys, monkeypatch):
    def exhausted(*_, **__):
        raise MemoryError

    monkeypatch.setattr("mlx_lstm.convert.__main__.read", exhausted)
    assert "a.npz needs more memory than there is" in refusal(capsys, tmp_path / "a.npz", tmp_path / "b.npz")


# --- 6. HDF5 that hangs or crashes -----------------------------------------------------------------------------------


def test_hdf5_that_does_not_end(tmp_path, capsys, monkeypatch):
    """A child process that hangs or crashes while it reads HDF5 leads to one line of error."""
    path = tmp_path / "m.weights.h5"
    convert.write(path, {"lstm": layer()})
    for code, what, seconds in (
        ("import os, signal; os.kill(os.getpid(), signal.SIGXCPU)", "does not come to an end", 60),
        ("import time; time.sleep(3600)", "does not come to an end", 0.1),
        ("import os; os.abort()", "code -6", 60),
    ):
        monkeypatch.setattr("mlx_lstm.ground.budget.SECONDS", seconds)
        monkeypatch.setattr(_hdf5, "child_command", lambda *_, code=code: [sys.executable, "-c", code])
        assert what in refusal(capsys, path, tmp_path / "out.npz")


def test_an_orphaned_child_ends(tmp_path, monkeypatch):
    """A child that reads HDF5 has a limit of processor time of its own, since its parent may be killed."""
    path, code = tmp_path / "m.weights.h5", "from runpy import run_path; run_path(sys.argv.pop(1), run_name='__main__')"
    convert.write(path, {"lstm": layer()})
    script = tmp_path / "child.py"
    text = Path(_hdf5.__file__).with_name("_hdf5_child.py").read_text()
    script.write_text(text.replace("    limit_memory(budget)\n", "    while True:\n        pass\n"))
    command = [
        sys.executable,
        "-c",
        f"import sys; {code}",
        str(script),
        str(ROOT / "mlx_lstm/ground/budget.py"),
        "1",
        "1",
        "1",
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=300)
    assert done.returncode == -signal.SIGXCPU


@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_ends_the_command(ignored):
    """SIGHUP ends a command as SIGTERM does, unless nohup has started it."""
    code = f"""
import os, signal
from mlx_lstm.ground.machine import run_command
signal.signal(signal.SIGHUP, signal.SIG_IGN if {ignored} else signal.SIG_DFL)
def main():
    try:
        os.kill(os.getpid(), signal.SIGHUP)
    finally:
        print("cleared")
    return 0
run_command(main)
"""
    command, environment = [sys.executable, "-c", code], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0 if ignored else 129, "cleared\n", "")


# --- 7. Files with many keys -----------------------------------------------------------------------------------------


def test_reading_keys_takes_linear_time(tmp_path):
    """Reading twice as many layers takes at most 2.1 times as many Python function calls and returns, counted by a
    profiler."""
    counts = []
    for n in (200, 400):
        arrays = {}
        for k in range(n):
            arrays |= {f"b{k}.Wx": np.zeros((4, 1), "f4"), f"b{k}.Wh": np.zeros((4, 1), "f4")}
            arrays |= {f"list.{k}.Wx": np.zeros((4, 2), "f4"), f"list.{k}.Wh": np.zeros((4, 1), "f4")}
        path = tmp_path / f"{n}.safetensors"
        convert.write(path, convert.Model({}, arrays, {}, [], {}))
        steps = 0

        def count(frame, event, arg):
            nonlocal steps
            steps += 1

        sys.setprofile(count)
        try:
            found = convert.read(path)
        finally:
            sys.setprofile(None)
        assert len(found.layers) == 2 * n
        counts.append(steps)
    assert counts[1] < 2.1 * counts[0]


# --- 8. Names that forge lines of the command's output ---------------------------------------------------------------

FORGED = "a\x1b[2J\r\n  read back: the same to the last bit\u202e" + "x" * 500


def test_keys_forge_no_line(tmp_path, capsys):
    path, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    rest = {FORGED: np.zeros(2, "f4"), "e\u0301\u4e2d": np.zeros(2, "f4")}
    convert.write(path, convert.Model({f"{FORGED}.rnn": layer()}, rest, {}, [], {}))
    assert main([str(path), str(target), "--to", "mlx"]) == 0
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable() and "\\x1b[2J\\r\\n  read back" in out
    assert [line for line in out.splitlines() if line.startswith("  read back")] == []
    assert max(map(len, out.splitlines())) < 1001
    safetensors(path, {FORGED: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(8))
    assert "read back" not in refusal(capsys, path, target, "--force")
    safetensors(path, {FORGED: {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}}, bytes(4))
    assert "\\x1b[2J" in refusal(capsys, path, target, "--force")


def golden(tmp_path, change):
    """Write a golden file, which holds recorded results of one implementation. The function `change` alters the
    contents before the checksum is computed. Return the path."""
    from mlx_lstm.lab.mpsgraph import judge
    from mlx_lstm.lab.mpsgraph.cases import grid

    case = next(iter(grid(lambda case: True)))
    results = {name: value.astype(np.float32) for name, value in judge.expected(case).items()}
    made = {"card": {"chip": "x"}, "contender": "oracle", "cases": [case], "results": {case.name: results}}
    change(made, case)
    path = str(tmp_path / "g.npz")
    save_golden(path, Golden(**made))
    return path


def renamed(name):
    def change(made, case):
        made["cases"] = [case._replace(name=name)]
        made["results"] = {name: made["results"][case.name]}

    return change


def with_case(**fields):
    def change(made, case):
        made["cases"] = [case._replace(**fields)]

    return change


def with_array(name, array):
    def change(made, case):
        made["cases"] = [case._replace(arrays=case.arrays | {name: array})]

    return change


GOLDENS = {
    "an op": (with_case(op="rm -rf"), "unknown op rm -rf"),
    "no dict": (with_case(descriptor=[1]), "must be a JSON object"),
    "a property": (with_case(descriptor={"mystery": 1}), "no property 'mystery'"),
    "a shape": (with_array("recurrent_weight", np.ones((3, 5), "f4")), "the oracle cannot compute"),
    "a dtype": (with_array("source", np.array("text")), "must be float32 or float16"),
    "too large": (with_array("recurrent_weight", np.ones((4000, 1000), "f4")), "is too large"),
    "a result": (lambda made, case: made["results"][case.name].update(h=np.ones((1, 9), "f4")), "has shape"),
    "the card": (lambda made, case: made.update(card=[1]), "is no golden"),
}


@pytest.mark.parametrize("name", GOLDENS)
def test_goldens_that_are_sealed_and_wrong(name, tmp_path):
    change, what = GOLDENS[name]
    with pytest.raises(ValueError, match=f"is no golden: .*{what}" if "no golden" not in what else what):
        load_golden(golden(tmp_path, change))


def test_names_in_a_golden_forge_no_line(tmp_path, capsys):
    from mlx_lstm.compare import __main__ as command

    def change(made, case):
        renamed(FORGED)(made, case)
        made["card"] = {FORGED: FORGED}
        made["contender"] = FORGED

    path = golden(tmp_path, change)
    assert load_golden(path).cases[0].name.isprintable()
    assert command.main(["--golden", path, "--contenders", "ops", "--all"]) == 0
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable() and "\n  read back" not in out


def test_a_golden_of_too_many_steps(tmp_path, monkeypatch):
    monkeypatch.setattr("mlx_lstm.lab.mpsgraph.files.MOST_STEPS", 2)
    with pytest.raises(ValueError, match=r"is no golden: .*must have at most 2 steps together"):
        load_golden(golden(tmp_path, lambda made, case: None))


def test_no_memory_is_one_line_of_compare(tmp_path, capsys, monkeypatch):
    from mlx_lstm.compare import __main__ as command

    def exhausted(*_, **__):
        raise MemoryError

    (tmp_path / "a.npz").touch()
    monkeypatch.setattr(files, "members_of", exhausted)
    with pytest.raises(SystemExit, match="2"):
        command.main(["--arrays", str(tmp_path / "a.npz"), "--op", "lstm"])
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "needs more memory than there is" in said


def test_arrays_are_no_views_of_the_file(tmp_path):
    """A file that is rewritten in place after it was read changes no array."""
    path = tmp_path / "a.safetensors"
    convert.write(path, convert.Model({}, {"x": np.ones(100_000, "f4")}, {}, [], {}))
    rest = convert.read(path).rest
    path.write_bytes(b"")
    assert np.all(rest["x"] == 1)


# --- 9. Broken cache files: results of trial runs, table of engines --------------------------------------------------


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a": Infinity}', "1e999", '{"a": {"b": 1}}', "\ud800", '{"a":{},"a":{}}']
)
def test_broken_files_of_verdicts_and_engines_warn(text, tmp_path, monkeypatch):
    from mlx_lstm.engines import tuning, verdicts

    path = tmp_path / "engines.json"
    monkeypatch.setattr(tuning, "cache_file", lambda: path)
    verdicts.forget()
    path.with_name("verdicts.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.warns(UserWarning, match="has no verdicts on kernels and is ignored"):
        assert verdicts.find("a trial") is None
    verdicts.record("a trial", "")
    verdicts.forget()
    assert verdicts.find("a trial") == ""
    verdicts.forget()
    content = {"machine": tuning.machine(), "engines": {}, "measured": [{"dtype": "a", "B": 1e999, "fused": "wrong"}]}
    for broken in (text, json.dumps(content)):
        path.write_bytes(broken.encode(errors="surrogatepass"))
        with pytest.warns(UserWarning, match="is not a table of engines and is ignored"):
            assert "is broken" in tuning.load(path).source


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    """Without HOME and without an entry in the system's list of users, calls work and nothing is stored."""
    import pwd

    from mlx_lstm.engines import tuning, verdicts
    from mlx_lstm.lab.report import json_text

    def nobody(*_):
        raise KeyError("no such user")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert str(tuning.cache_file()).startswith(f"{os.devnull}/")
    assert tuning.load(tuning.cache_file()) == tuning.PREDICTED
    verdicts.forget()
    verdicts.record("a trial", "")
    verdicts.forget()
    assert verdicts.find("a trial") is None
    assert json_text(["~/x"]) == '[\n "~/x"\n]'


# --- Malformed headers and contents ----------------------------------------------------------------------------------

ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
HEADERS = {
    "1e999": b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}',
    "NaN": b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}',
    "a float": {"a": ENTRY | {"shape": [1.0]}},
    "a list as dtype": {"a": ENTRY | {"dtype": ["F32"]}},
    "a text as shape": {"a": ENTRY | {"shape": "1"}},
    "a long shape": {"a": ENTRY | {"shape": [1] * 70}},
    "negative": {"a": ENTRY | {"shape": [-1], "data_offsets": [4, 0]}},
    "three offsets": {"a": ENTRY | {"data_offsets": [0, 2, 4]}},
    "no dict": b"[1]",
    "deep": b"[" * 100_000,
    "deep metadata": b'{"__metadata__":{"mlx_lstm":"' + b"[" * 100_000 + b'"},"a":' + json.dumps(ENTRY).encode() + b"}",
    "metadata of lists": {"__metadata__": {"a": [1]}, "a": ENTRY},
    "half a character": b'{"\\ud800":' + json.dumps(ENTRY).encode() + b"}",
    "a key twice": b'{"a":' + json.dumps(ENTRY).encode() + b',"a":' + json.dumps(ENTRY).encode() + b"}",
    "a hole": {"a": ENTRY, "b": ENTRY | {"data_offsets": [8, 12]}},
    "digits": b'{"a":{"dtype":"F32","shape":[' + b"9" * 10_000 + b'],"data_offsets":[0,4]}}',
}


@pytest.mark.parametrize("header", HEADERS)
def test_headers_of_safetensors(header, tmp_path, capsys):
    path, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    safetensors(path, HEADERS[header], bytes(12 if header == "a hole" else 4))
    assert "a.safetensors is truncated or damaged" in refusal(capsys, path, target) and not target.exists()


def npz_with(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members:
            archive.writestr(name, data)


def npy(array=None, header=b"", pickled=False):
    """Return the bytes of an .npy file with the given array, or with only the given header."""
    out = io.BytesIO()
    if array is not None:
        np.lib.format.write_array(out, array, allow_pickle=pickled)
        return out.getvalue()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


def test_a_text_in_npz_is_no_array_of_numbers(tmp_path):
    np.savez(path := tmp_path / "a.npz", **{"a.Wx": np.ones((4, 3)), "a.name": np.array("LSTM")})
    with pytest.raises(ValueError, match=r"a\.name.* must hold numbers but got text"):
        convert.read(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    "members",
    [
        [("x.npy", npy(header=b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"1," * 20_000 + b")}"))],
        [("x.npy", npy(header=b"(" * 5000))],
        [("x.npy", npy(header=b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}") + bytes(4))],
        [
            (
                "x.npy",
                npy(header=b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"1," * 100 + b")}") + bytes(4),
            )
        ],
        [("x.npy", npy(np.array([{}], object), pickled=True))],
        [("x.npy", b"")],
        [("x.txt", b"text")],
        [("x.npy", npy(np.ones(2))), ("x.npy", npy(np.ones(2)))],
    ],
    ids=["long header", "deep", "negative", "axes", "pickle", "empty", "text", "twice"],
)
def test_members_of_npz(members, tmp_path, capsys):
    path = tmp_path / "a.npz"
    npz_with(path, members)
    said = refusal(capsys, path, tmp_path / "b.npz")
    assert "truncated or damaged" in said and "trust" not in said and "allow_pickle" not in said


@pytest.mark.parametrize("key", ["../x", "a/b", "a\\b", "/etc/x", "..", "a\0b"])
def test_keys_of_npz_are_no_paths(key, tmp_path, capsys):
    path = tmp_path / "a.safetensors"
    convert.write(path, convert.Model({"lstm": layer()}, {key: np.ones(2)}, {}, [], {}))
    assert "take .safetensors" in refusal(capsys, path, tmp_path / "b.npz")
    assert not (tmp_path / "b.npz").exists()


@pytest.mark.parametrize("ending", [".safetensors", ".npz", ".keras", ".h5", ".onnx"])
def test_pipes_and_devices_are_refused(ending, tmp_path, capsys):
    path = tmp_path / f"pipe{ending}"
    os.mkfifo(path)
    assert "is no regular file" in refusal(capsys, path, tmp_path / "b.npz")
    if ending in (".npz", ".safetensors"):
        with pytest.raises(ValueError, match="is no regular file"):
            read_arrays(str(path))
    (tmp_path / f"zero{ending}").symlink_to("/dev/zero")
    assert "is no regular file" in refusal(capsys, tmp_path / f"zero{ending}", tmp_path / "b.npz")
    (good := tmp_path / "good.npz").exists() or convert.write(good, {"lstm": layer()})
    assert "is no regular file" in refusal(capsys, good, path, "--force")
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_a_full_disk(tmp_path):
    """When the disk is full, the command prints one line of error and leaves no file, whatever the format. A limit on
    the size of files simulates the full disk."""
    source = tmp_path / "in.safetensors"
    convert.write(source, {"lstm": layer(H=64)})
    targets = [str(tmp_path / f"out{ending}") for ending in (".safetensors", ".npz", ".keras", ".h5", ".onnx")]
    targets.append(str(tmp_path / "out.weights.h5"))
    code = f"""
import resource, signal, sys
from mlx_lstm.convert.__main__ import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
assert [main([{str(source)!r}, target]) for target in sys.argv[1:]] == [2] * {len(targets)}
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, *targets], capture_output=True, text=True, env=environment)
    said = done.stderr.splitlines()
    assert done.returncode == 0 and done.stdout == "" and len(said) == len(targets), done.stderr
    assert all(line.startswith("not converted: ") for line in said)
    assert [each.name for each in tmp_path.iterdir()] == ["in.safetensors"]


def test_a_bfloat16_array_of_keras(tmp_path):
    """A bfloat16 array of Keras, which HDF5 stores as two opaque bytes per number, is read as bfloat16."""
    path = tmp_path / "m.weights.h5"
    wanted = mx.array([1.5, -2.0], mx.bfloat16)

    def change(file):
        file["low"] = np.array(wanted.view(mx.uint16)).view("V2")
        file["words"] = ["no", "numbers"]

    keras_file(path, change)
    found = convert.read(path)
    assert mx.array_equal(found.rest["low"], wanted) and found.notes == ["1 datasets without numbers are left out"]
