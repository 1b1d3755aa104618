"""Every reader of foreign files against every kind of lie: about a size, a count, a name, a link, an alias, a depth, a
dtype. A reader refuses a lie in one line, within limits of memory and time. `python tests/test_readers.py FOLDER` is
the child process that reads all files."""

import ast
import json
import os
import re
import resource
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from mlx_lstm import convert
from mlx_lstm.engines import tuning, verdicts
from mlx_lstm.lab.mpsgraph import dump, judge
from mlx_lstm.lab.mpsgraph.cases import grid
from mlx_lstm.lab.mpsgraph.files import Golden, checksum, load_golden, save_golden

h5py = pytest.importorskip("h5py")
onnx = pytest.importorskip("onnx")
ROOT = Path(__file__).parents[1]
MB = 2**20
KINDS = ("size", "count", "name", "link", "alias", "depth", "dtype")

READERS = {
    "a.safetensors": ("convert/_files.py", convert.read),
    "a.npz": ("convert/_files.py", convert.read),
    "a.keras": ("convert/_files.py", convert.read),
    "a.h5": ("convert/_files.py", convert.read),
    "a.weights.h5": ("convert/_files.py", convert.read),
    "a.onnx": ("convert/_files.py", convert.read),
    "a.data.onnx": ("convert/_onnx_file.py", lambda path: convert.read(path, external_data=True)),
    "arrays.safetensors": ("lab/mpsgraph/dump.py", lambda path: dump.read(str(path))),
    "arrays.npz": ("lab/mpsgraph/dump.py", lambda path: dump.read(str(path))),
    "arrays.npy": ("lab/mpsgraph/dump.py", lambda path: dump.read(str(path))),
    "golden.npz": ("lab/mpsgraph/files.py", lambda path: load_golden(str(path))),
    "verdicts.json": ("engines/verdicts.py", lambda path: verdicts.read()),
    "engines.json": ("engines/tuning.py", tuning.load),
}
"""The readers by the name of the file that they read: the module that opens the file, and a function of its path."""

OPENING = re.compile(r"^open$|\.(open|fdopen|read_bytes|read_text|fromfile|memmap|ZipFile|load_model_from_string)$")
OWN = re.compile(r"^(np|numpy|mx|json|onnx|pickle|h5py|zipfile)\.(load|loads|File)$")
ENDS = set(re.findall(r"\w\w+", OPENING.pattern + OWN.pattern)) | {"foreign", "read_json"}
OPENERS = {
    "__main__.py": set(),
    "lab/timing/report.py": {"open"},  # writes
    "lab/timing/rounds.py": {"np.load", "open"},  # the results of our child; /proc
    "lab/timing/worker.py": {"json.loads", "open"},  # the parent's words; /proc
    "ground/budget.py": {"json.loads"},  # the door
    "check/further.py": {"file.read_text", "json.loads"},  # what our child wrote
    "ground/child.py": {"json.loads", "os.fdopen"},  # answers of our child
    "lab/mpsgraph/contenders.py": {"np.load"},  # the results of our child
    "lab/mpsgraph/files.py": {"json.loads", "np.load", "open"},  # the case of our parent; writes
    "lab/mpsgraph/report.py": {"open"},  # writes
    "convert/_files.py": {"file.open", "path.open", "zipfile.ZipFile"},  # writes
    "convert/_hdf5_child.py": {"h5py.File", "open"},  # has a budget; /proc
    "convert/_keras_file.py": {"h5py.File", "zipfile.ZipFile"},  # writes
    "convert/_onnx_file.py": {"onnx.load_model_from_string"},  # the bytes of the door
    "engines/metal/kernel.py": {"(shader_folder() / f'{name}.metal').read_text"},
    "engines/tuning.py": {"file.read_bytes"},  # our shaders
    "ground/files.py": {"archive.open", "os.open", "path.open", "zipfile.ZipFile"},  # the door
    "ground/machine.py": {"open", "os.open"},  # /proc, /dev/null
    "recurrence/_guard.py": {"os.fdopen", "os.open"},  # a lock
    "recurrence/_trial.py": {"json.loads"},  # our parent's words
}
"""What opens or parses files in the package, by module, and why it needs no door."""


def test_only_the_door_opens_foreign_files():
    """No other module opens files than those listed above, and every module that goes through the door `foreign` has a
    reader in the table."""
    openers, door = {"__main__.py": set()}, set()
    for path in sorted((ROOT / "mlx_lstm").rglob("*.py")):
        name = path.relative_to(ROOT / "mlx_lstm").as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            last = getattr(getattr(node, "func", None), "attr", getattr(getattr(node, "func", None), "id", None))
            if isinstance(node, ast.Call) and last in ENDS:
                called = ast.unparse(node.func)
                if OPENING.search(called) or OWN.search(called):
                    openers.setdefault(name, set()).add(called)
                if called in ("foreign", "read_json") and name != "ground/files.py":
                    door.add(name)
    assert openers == OPENERS
    assert door == {module for module, _ in READERS.values()}


# --- The lies --------------------------------------------------------------------------------------------------------


def layer():
    rng = np.random.default_rng(0)
    shapes = {"weight_ih_l0": (16, 3), "weight_hh_l0": (16, 4), "bias_ih_l0": (16,), "bias_hh_l0": (16,)}
    return convert.from_torch({name: rng.normal(size=shape).astype("f") for name, shape in shapes.items()})


def safetensors(path, lie):
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    headers = {
        "size": {"a": entry | {"shape": [10**9], "data_offsets": [0, 4 * 10**9]}},
        "count": b'{"a":[' + b"[]," * 600_000 + b"[]]}",
        "name": {"1." * 300_000 + "w": entry},
        "alias": {"a": entry, "b": entry},
        "depth": b'{"a":' + b"[" * 90 + b"]" * 90 + b"}",
        "dtype": {"a": entry | {"dtype": "X9"}},
    }
    text = headers[lie] if isinstance(headers[lie], bytes) else json.dumps(headers[lie]).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))


def npy_of(lie):
    """Return the bytes of an .npy file with a lie."""
    headers = {
        "size": b"{'descr': '|V0', 'fortran_order': False, 'shape': (1000000000000,)}",
        "count": b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"1," * 40 + b")}",
        "depth": b"(" * 5000,
        "dtype": b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
    }
    header = headers.get(lie, b"{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}")
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(4)


def npy(path, lie):
    path.mkdir()
    (path / "x.npy").write_bytes(npy_of(lie))


def bomb(path, name, declared):
    """Write a zip whose member expands to 400 MB and declares few bytes; the checksum is that of those bytes."""
    make = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = make.compress(bytes(MB)) + make.flush(zlib.Z_FULL_FLUSH)
    data = declared + block * 400 + make.flush()
    plain = zlib.decompressobj(-15).decompress(data, 100)
    sizes = struct.pack("<III", zlib.crc32(plain), len(data), 100)
    fields = struct.pack("<HHHHH", 20, 0, 8, 0, 0) + sizes + struct.pack("<HH", len(name), 0)
    entry = b"PK\1\2" + b"\x14\0" + fields + bytes(14) + name
    start = b"PK\3\4" + fields + name + data
    path.write_bytes(start + entry + b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(entry), len(start), 0))


def many(path):
    """Write a zip whose directory has 110,000 members of no bytes."""
    entry = b"PK\1\2" + bytes(24) + struct.pack("<H", 1) + bytes(16) + b"x"
    end = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 10, 10, len(entry) * 110_000, 0, 0)
    path.write_bytes(entry * 110_000 + end)


def zipped(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def npz(path, lie):
    if lie == "size":
        return bomb(path, b"x.npy", b"")
    if lie == "count":
        return many(path)
    names = {"name": ["a" * 60_000], "alias": ["x", "x.npy"]}.get(lie, ["x.npy"])
    zipped(path, {name: npy_of(lie) for name in names})


def golden(path, lie):
    if lie in ("size", "count", "name", "dtype"):
        return npz(path, lie)
    case = next(iter(grid(lambda case: True)))
    results = {name: value.astype(np.float32) for name, value in judge.expected(case).items()}
    save_golden(str(path), Golden({"chip": "x"}, "oracle", [case], {case.name: results}))
    with np.load(path) as file:
        arrays = {name: array for name, array in file.items() if name != "checksum"}
    meta = json.loads(str(arrays["meta"]))
    if lie == "alias":
        arrays |= {f"1{name[1:]}": array for name, array in arrays.items() if name.startswith("0/")}
        meta["cases"] *= 2
    else:
        meta["card"] = json.loads("[" * 90 + "]" * 90)
    arrays["meta"] = np.array(json.dumps(meta))
    np.savez(path, **arrays, checksum=np.array(checksum(arrays)))


def h5(path, lie):
    convert.write(path, {"lstm": layer()})
    with h5py.File(path, "r+") as file:
        root = file.get("model_weights", file)
        if lie == "size":
            file.create_dataset("huge", (2**40,), "f4", chunks=(MB,))
        elif lie == "count":  # texts that share their bytes
            words = np.array(["M" * 1_000_003] + [f"{n:07}" for n in range(500)], object)
            name = "layer_names" if path.name == "a.h5" else "keras_version"
            root.attrs.create(name, words, dtype=h5py.string_dtype())
        elif lie == "name":
            file["a" * 5000] = np.ones(2)
        elif lie == "link":
            file["stolen"] = h5py.ExternalLink("/etc/passwd", "/x")
        elif lie == "alias":
            root.attrs["layer_names"] = [b"lstm"] * 2
        elif lie == "depth":
            file.require_group("/".join("a" * 70))
        else:
            file.create_dataset("x", (4,), "c8")
    if lie == "count":
        data = bytearray(path.read_bytes())
        first = data.find(struct.pack("<I", 1_000_003))  # the length, the address and the number of the first text
        data[first : first + 16 * 501] = data[first : first + 16] * 501
        path.write_bytes(data)


def keras(path, lie):
    if lie == "size":
        return bomb(path, b"config.json", b"")
    if lie == "count":
        return many(path)
    convert.write(path, {"lstm": layer()})
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    config = {"class_name": "LSTM", "config": {"name": "n" * 10_000 if lie == "name" else "n"}}
    for _ in range(30 if lie == "depth" else 1):
        config = {"class_name": "Sequential", "config": {"name": "n", "layers": [config]}}
    members["config.json"] = json.dumps(config).encode()
    if lie == "alias":
        members["config.json"] = b'{"config": {}, "config": {}}'
    if lie in ("link", "dtype"):
        inner = path.with_name("inner.weights.h5")
        h5(inner, lie)
        members["model.weights.h5"] = inner.read_bytes()
    zipped(path, members)


def part(number, data):
    """Return bytes as the field `number` of a message of protobuf."""
    length, rest = [], len(data)
    while rest > 127:
        length.append(rest & 127 | 128)
        rest >>= 7
    return bytes([number << 3 | 2, *length, rest]) + data


def onnx_model(path, lie):
    convert.write(path, {"lstm": layer()})
    model = onnx.load(path)
    graph, make = model.graph, onnx.helper
    if lie == "size":
        graph.initializer.add(name="x", data_type=1, dims=[10**9], raw_data=bytes(4))
    elif lie == "name":
        graph.initializer.add(name="1." * 300_000, data_type=1, dims=[1], raw_data=bytes(4))
    elif lie in ("link", "alias"):
        tensor = graph.initializer.add(name="x", data_type=2, dims=[4], data_location=1)
        tensor.external_data.add(key="location", value="key" if lie == "alias" else "../key")
        path.with_name("key").write_bytes(b"mine")
        if lie == "alias":  # a Constant whose output has the same name, as if the tensor were in the file
            one = onnx.numpy_helper.from_array(np.ones(1, "f4"))
            graph.node.append(make.make_node("Constant", [], ["x"], value=one))
    elif lie == "dtype":
        graph.initializer.add(name="x", data_type=99, dims=[1], raw_data=bytes(4))
    data = model.SerializeToString()
    if lie == "count":  # one more graph, whose nodes are empty
        data += part(7, b"\x0a\x00" * 1_100_000)
    if lie == "depth":  # a graph in an attribute of a node of a graph, and so on
        inner = b""
        for _ in range(70):
            inner = part(1, part(5, part(6, inner)))
        data += part(7, inner)
    path.write_bytes(data)


def cache(path, lie):
    texts = {"count": "[" + "[]," * 600_000 + "[]]", "alias": '{"a":{},"a":{}}', "depth": "[" * 90 + "]" * 90}
    path.write_text(texts.get(lie, '{"a": {"b": 1}}'))


WRITERS = {".safetensors": safetensors, ".npz": npz, ".npy": npy, ".keras": keras, ".h5": h5, ".json": cache}
WRITERS |= {".onnx": onnx_model, "golden.npz": golden}
READ = {(reader, "dtype") for reader in ("a.keras", "a.h5", "a.weights.h5")}
READ |= {("arrays.npy", "name"), ("arrays.npy", "alias"), ("a.h5", "count")}
"""Files that are read. Arrays of other dtypes in HDF5 are left out, with a note. The names of .npy files are those of
the file system, so they cannot lie. A long list of the layers' names in HDF5 is not read."""


def test_every_lie_is_refused_in_a_line(tmp_path):
    for reader in READERS:
        for lie in KINDS:
            folder = tmp_path / reader / lie
            folder.mkdir(parents=True)
            path = folder / ("arrays" if reader == "arrays.npy" else reader)
            if lie == "link" and not reader.endswith((".onnx", "h5", ".keras")):
                path.symlink_to("/dev/zero")  # formats that name no other files
            else:
                WRITERS.get(reader, WRITERS.get(path.suffix, npy))(path, lie)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(READERS) * len(KINDS)
    for reader in ("a.h5", "a.weights.h5"):  # refused for the lie, not for damage beside it
        texts = {lie: said for other, lie, said, *_ in found if other == reader}
        assert "1000 characters" in texts["name"] and "64 levels" in texts["depth"]
        assert reader == "a.h5" or "keras_version" in texts["count"]
    assert {(reader, lie) for reader, lie, said, *_ in found if said is None} == READ
    for reader, lie, said, memory, seconds, size in found:
        assert said is None or (said.isprintable() and len(said) < 1100), (reader, lie, said)
        assert memory < 10 * size + 200 * MB and seconds < 20, (reader, lie, memory, seconds)


def read_all(folder):
    """Read all files; print for each the error, the memory, the time and the file's size."""
    import warnings

    from test_file_fuzz import hdf5_in_this_process

    hdf5_in_this_process()
    resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))
    warnings.simplefilter("error")
    for reader, (_, read) in READERS.items():
        for lie in KINDS:
            path = folder / reader / lie / ("arrays" if reader == "arrays.npy" else reader)
            tuning.cache_file = lambda path=path: path
            verdicts.forget()
            before, start, said = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time(), None
            try:
                read(path)
            except (ValueError, UserWarning) as error:
                said = str(error)
            memory = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
            print(json.dumps([reader, lie, said, memory, time.process_time() - start, path.stat().st_size]), flush=True)


if __name__ == "__main__":
    read_all(Path(sys.argv[1]))
