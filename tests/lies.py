"""Make files that lie: one field of a true file is set to an extreme value, while all the rest stays true, checksums
included. `test_file_fuzz.py` reads such files in every format."""

import copy
import io
import json
import struct
import zipfile

import numpy as np

NUMBERS = (0, 1, -1, 2, 127, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**53, 2**63 - 1, 2**64 - 1)
TEXTS = (
    "",
    "a" * 2000,
    "a" * 300_000,
    "1." * 5000,
    "\ud800",
    "../x",
    "/etc/passwd",
    "\x1b[2J\n",
    "\0",
    "e\u0301\u202e",
)
DEEP = json.loads("[" * 90 + "]" * 90)
VALUES = (*NUMBERS, *TEXTS, 10**30, 0.5, 1e308, float("inf"), float("nan"), None, True, [], {}, [[]] * 30_000, DEEP)
VALUES += ({"a": {"b": {}}}, [0] * 1000, [2**31] * 3, [10**12, 0], ["a"] * 1000)
"""Values for any field of JSON."""


def chosen(rng, values):
    """Return one of the values. (`rng.choice` would convert them to one dtype.)"""
    return values[int(rng.integers(len(values)))]


def lie_in_json(tree, rng):
    """Change a value, a name, or the number of copies of one field of a JSON tree, in place; return the tree."""
    places, todo = [], [tree]
    while todo:
        here = todo.pop()
        for key in here if isinstance(here, dict) else range(len(here)):
            places.append((here, key))
            if isinstance(here[key], (dict, list)):
                todo.append(here[key])
    here, key = chosen(rng, places)
    match int(rng.integers(0, 8)):
        case 0 if isinstance(here, dict):
            here[chosen(rng, TEXTS)] = here.pop(key)
        case 1 if isinstance(here, dict):
            here |= {f"copy{n}": copy.deepcopy(here[key]) for n in range(50)}
        case 2 if isinstance(here, list):
            here *= 300
        case _:
            here[key] = copy.deepcopy(chosen(rng, VALUES))
    return tree


def safetensors(data, rng):
    """Return a safetensors file with a lie in its header, or about the header's length."""
    n = int.from_bytes(data[:8], "little")
    if rng.random() < 0.1:
        return (chosen(rng, NUMBERS) % 2**64).to_bytes(8, "little") + data[8:]
    text = json.dumps(lie_in_json(json.loads(data[8 : 8 + n]), rng)).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + n :]


DTYPES = ("|V0", "|V2", "|S0", "<U0", "<U5", "|O", "<f16", "<c8", "<M8[s]", ">f4", "<f8", "|b1", "<i8", "V2147483647")
SHAPES = (
    (),
    (0,),
    (-1,),
    (10**12,),
    (10**12, 0),
    (2**31, 0),
    (2**62, 4),
    (1,) * 40,
    (0,) * 33,
    (2**64,),
    (True,),
    (1.0,),
)


def npy(data, rng):
    """Return an .npy file with a lie about its dtype, shape, order, version or header."""
    n = 10 + int.from_bytes(data[8:10], "little")
    header = eval(data[10:n].decode(), {})  # our own file
    field = chosen(rng, ["descr", "shape", "fortran_order", "version", "length", "text"])
    if field == "version":
        return data[:6] + bytes([chosen(rng, [0, 1, 2, 3, 255]), chosen(rng, [0, 1, 255])]) + data[8:]
    if field == "length":
        return data[:8] + (chosen(rng, NUMBERS) % 2**16).to_bytes(2, "little") + data[10:]
    if field == "descr":
        header["descr"] = chosen(rng, [*DTYPES, [("a", "<f4"), ("b", "|V0")], ("<f4", (2**31,)), *VALUES[:20]])
    elif field == "shape":
        header["shape"] = chosen(rng, [*SHAPES, header["shape"][::-1], [3, 4], *VALUES[:20]])
    elif field == "fortran_order":
        header["fortran_order"] = chosen(rng, [True, *VALUES[:20]])
    text = (
        repr(header).encode(errors="replace")
        if field != "text"
        else chosen(rng, [b"(" * 5000, b"{}", b"1", b"9" * 9000])
    )
    return data[:8] + min(len(text), 2**16 - 1).to_bytes(2, "little") + text + data[n:]


NAMES = [text[:60_000] for text in TEXTS if text not in ("", "\0", "\ud800")]
"""Names of members that Python can write."""

ZIP = {
    b"PK\3\4": [(4, 2), (6, 2), (8, 2), (10, 4), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2)],
    b"PK\1\2": [
        (4, 2),
        (6, 2),
        (8, 2),
        (10, 2),
        (12, 4),
        (16, 4),
        (20, 4),
        (24, 4),
        (28, 2),
        (30, 2),
        (32, 2),
        (34, 2),
    ],
    b"PK\5\6": [(4, 2), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2)],
}
ZIP[b"PK\1\2"] += [(36, 2), (38, 4), (42, 4)]
"""The place and the width of each field of a zip's three structures, by their signatures."""


def zip_fields(data, rng):
    """Return a zip file in which one number of its directory or of a member's header is extreme."""
    data, mark = bytearray(data), chosen(rng, list(ZIP))
    starts = [n for n in range(len(data)) if data[n : n + 4] == mark]
    start, (place, width) = chosen(rng, starts), chosen(rng, ZIP[mark])
    number = chosen(rng, NUMBERS) % 256**width
    data[start + place : start + place + width] = number.to_bytes(width, "little")
    return bytes(data)


def zipped(data, rng, inner):
    """Return a zip file with a lie in its own fields or, by the function `inner`, in a member."""
    if rng.random() < 0.3:
        return zip_fields(data, rng)
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    which = chosen(rng, list(members))
    longer = rng.random() < 0.05
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED if longer else zipfile.ZIP_STORED) as changed:
        for name, content in members.items():
            if name != which:
                changed.writestr(name, content)
            elif longer:
                changed.writestr(name, content + bytes(60 * 2**20))
            else:
                changed.writestr(chosen(rng, NAMES) if rng.random() < 0.05 else name, inner(name, content, rng))
    raw = bytearray(out.getvalue())
    if longer:  # declare as many bytes as the true member has
        size = struct.pack("<I", len(members[which]))
        for mark, start in ((b"PK\3\4", 22), (b"PK\1\2", 24)):
            for n in (n for n in range(len(raw)) if raw[n : n + 4] == mark and which.encode() in raw[n : n + 90]):
                raw[n + start : n + start + 4] = size
    return bytes(raw)


def npz(data, rng):
    return zipped(data, rng, lambda name, content, rng: npy(content, rng))


def golden(data, rng):
    """Return a golden file with a lie in its description, sealed again, or in an array."""
    if rng.random() < 0.5:
        return npz(data, rng)
    from mlx_lstm.lab.mpsgraph.files import checksum

    with np.load(io.BytesIO(data)) as file:
        arrays = {name: array for name, array in file.items() if name != "checksum"}
    text = json.dumps(lie_in_json(json.loads(str(arrays["meta"])), rng))
    arrays["meta"], out = np.array(text), io.BytesIO()
    np.savez_compressed(out, **arrays, checksum=np.array(checksum(arrays)))
    return out.getvalue()


def keras(data, rng):
    def inner(name, content, rng):
        return (
            json.dumps(lie_in_json(json.loads(content), rng)).encode() if name.endswith(".json") else hdf5(content, rng)
        )

    return zipped(data, rng, inner)


def hdf5(data, rng):
    """Return an HDF5 file with one extreme number among its structures, all of which lie outside of the arrays' bytes,
    or with a lie that h5py can write."""
    import h5py

    if rng.random() < 0.3:
        out = io.BytesIO(data)
        with h5py.File(out, "r+") as file:
            lie_by_h5py(file, rng)
        return out.getvalue()
    arrays = []
    with h5py.File(io.BytesIO(data)) as file:
        file.visititems(lambda name, item: arrays.append(item.id) if isinstance(item, h5py.Dataset) else None)
        spans = [(each.get_offset(), each.get_offset() + each.get_storage_size()) for each in arrays]
    width = chosen(rng, [1, 2, 4, 8])
    while True:
        place = width * int(rng.integers(0, len(data) // width))
        # Most bytes of a file are empty room; the fields are where a byte nearby is not 0.
        if any(data[place : place + 8]) and not any(start <= place < stop for start, stop in spans):
            break
    number = chosen(rng, NUMBERS) % 256**width
    return data[:place] + number.to_bytes(width, "little") + data[place + width :]


def lie_by_h5py(file, rng):
    """Write a lie into an open HDF5 file."""
    import h5py

    groups = [file]
    file.visititems(lambda name, item: groups.append(item) if isinstance(item, h5py.Group) else None)
    group, name = chosen(rng, groups), f"lie{int(rng.integers(100))}"
    match int(rng.integers(0, 9)):
        case 0:
            words = [chosen(rng, TEXTS[:4]).replace("\0", "")] * chosen(rng, [0, 1, 100, 3000])
            where = chosen(rng, ["layer_names", "weight_names", "name", "model_config", "keras_version"])
            group.attrs.create(where, np.array(words, object), dtype=h5py.string_dtype())
        case 1:
            shape = chosen(rng, [(2**40,), (2**31, 2**31), (2**32, 2**32), (2**40, 0), (0,), (1,) * 32])
            group.create_dataset(name, shape, "f4", chunks=True)
        case 2:
            group.create_dataset(name, (8,), "f4", chunks=(2**29,), maxshape=(None,), compression="gzip")
        case 3:
            group[name] = h5py.SoftLink(chosen(rng, ["/", ".", "/nothing", name]))
        case 4:
            group[name] = chosen(rng, groups)
        case 5:
            group.require_group("/".join(["a"] * chosen(rng, [10, 70, 400])))
        case 6:
            name = chosen(rng, ["a" * 2000, "b\x1b[2J", "0", "kernel", "recurrent_kernel"])
            if name in group:
                del group[name]
            group[name] = np.ones((3, 4), "f4")
        case 7:
            kinds = ["V2", "V9", "S5", "c8", "f2", [("a", "f4")], h5py.vlen_dtype("f4"), h5py.ref_dtype, "M8[s]"]
            dtype = chosen(rng, kinds[:-1])
            group.create_dataset(name, (4,), dtype)
        case 8:
            for n in range(3000):
                group[f"{name}{n}"] = np.ones((1,), "f4")


def onnx(data, rng):
    """Return an ONNX model in which one field of any message is extreme, or one length of protobuf."""
    import onnx as package
    from google.protobuf.descriptor import FieldDescriptor

    if rng.random() < 0.1:
        place = int(rng.integers(0, len(data)))
        return data[:place] + b"\xff\xff\xff\xff\x07" + data[place + 1 :]
    model = package.load_model_from_string(data)
    places, todo = [], [model]
    while todo:
        message = todo.pop()
        places += [
            (message, field) for field in message.DESCRIPTOR.fields if field.name not in ("g", "graphs", "functions")
        ]
        for field, value in message.ListFields():
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                todo += [value] if hasattr(value, "DESCRIPTOR") else list(value)
    message, field = chosen(rng, places)
    many, kind = not hasattr(getattr(message, field.name), "DESCRIPTOR") and field.is_repeated, field.cpp_type
    times = chosen(rng, [1, 1, 3, 2000])
    if kind == FieldDescriptor.CPPTYPE_MESSAGE:
        target = getattr(message, field.name)
        if many and len(target):
            for _ in range(times):
                target.add().CopyFrom(target[0])
        elif many:
            for _ in range(times):
                target.add()
        else:
            target.SetInParent()
        return model.SerializeToString()
    if kind == FieldDescriptor.CPPTYPE_STRING:
        value = chosen(rng, [text for text in TEXTS if text != "\ud800"])
        value = value.encode() if field.type == FieldDescriptor.TYPE_BYTES else value
    elif kind == FieldDescriptor.CPPTYPE_ENUM:
        value = chosen(rng, [each.number for each in field.enum_type.values])
    elif kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        value = chosen(rng, [0.0, -1.0, float("inf"), float("nan"), 1e30])
    else:
        bits = 32 if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32) else 64
        signed = kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
        value = chosen(rng, NUMBERS) % 2**bits
        value -= 2**bits if signed and value >= 2 ** (bits - 1) else 0
    if many:
        target = getattr(message, field.name)
        values, times = list(target), 1 if isinstance(value, (str, bytes)) and len(value) > 2000 else times
        if values and rng.random() < 0.5:
            values[int(rng.integers(len(values)))] = value
        else:
            values += [value] * times
        del target[:]
        target.extend(values)
    else:
        setattr(message, field.name, value)
    return model.SerializeToString()


OF = {".safetensors": safetensors, ".npz": npz, ".keras": keras, ".h5": hdf5, ".weights.h5": hdf5, ".onnx": onnx}
OF |= {".npy": npy, ".golden.npz": golden}
"""For each format the function that returns a lying copy of a file's bytes."""
