"""Read files from unknown sources safely, and write files completely or not at all.

A file from an unknown source may declare a wrong format, wrong sizes or wrong names. The sizes that it declares are
compared with the bytes that it stores before memory is allocated for them; `shown` makes its names safe to print.
"""

import errno
import io
import json
import os
import secrets
import stat
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import mlx.core as mx
import numpy as np

from .checks import fail

DTYPES = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1"}
DTYPES |= {"U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1", "BOOL": "?"}
"""The names of dtypes in safetensors files, and NumPy's codes for them. NumPy does not support BF16: MLX reads it."""

MOST_HEADER = 100_000_000
"""The most bytes of a safetensors header that the format allows."""

DAMAGE = (ArithmeticError, AttributeError, EOFError, LookupError, OSError, RuntimeError, SyntaxError, TypeError)
DAMAGE += (ValueError, struct.error, zipfile.BadZipFile, zlib.error)
"""Errors that NumPy's and Python's readers raise at damaged bytes."""

UNLINKABLE = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK)
"""Error numbers that `os.link` may give on a file system without hard links."""

Result = TypeVar("Result")


def broken(path: Path, why: str) -> NoReturn:
    """Raise the ValueError for a file that is truncated or damaged."""
    raise ValueError(f"{path} is truncated or damaged: {why}.")


def size_of(path: Path) -> int:
    """Return the size of a regular file. Refuse anything that may never end, such as a pipe or a device.

    Raises:
        FileNotFoundError, IsADirectoryError: there is no such file, or it is a folder.
        ValueError: the path is a pipe, a device or a socket.
    """
    about = path.stat()
    if stat.S_ISDIR(about.st_mode):
        raise IsADirectoryError(f"{path} is a folder")
    if not stat.S_ISREG(about.st_mode):
        raise ValueError(f"{path} is no regular file")
    return about.st_size


def most_bytes(stored: int) -> int:
    """Return how many bytes of arrays a file of `stored` bytes may declare. Weights hardly compress, but zip bombs
    do."""
    return 4 * stored + 32 * 2**20


def check_expansion(path: Path, declared: int, stored: int) -> None:
    """Raise ValueError if a file declares far more bytes of arrays than it stores."""
    if declared > most_bytes(stored):
        raise ValueError(f"{path} has {stored} bytes and declares {declared}: save it uncompressed, if it is honest.")


def shown(text: object, most: int = 80) -> str:
    """Return a name from a file in a form that is safe to print: one line, no control characters, at most `most`
    characters.

    Example:
        >>> from mlx_lstm.files import shown
        >>> print(shown("a" + chr(27) + "[2J" + chr(10) + "read back"))
        a\\x1b[2J\\nread back
    """
    clean = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text)[: most + 1])
    return clean if len(clean) <= most else f"{clean[: most - 3]}..."


def parse_json(text: str | bytes) -> Any:
    """Return the parsed JSON. Raise ValueError if the text is not JSON, nests too deep, or has a key twice."""
    try:
        return json.loads(text, object_pairs_hook=without_duplicates)
    except RecursionError:
        raise ValueError("it nests too deep") from None


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Raise ValueError for a key that appears twice, because JSON readers differ in
    which of the two values they use."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it has a key twice")
    return found


# --- Reading ---------------------------------------------------------------------------------------------------------


def read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arrays of a safetensors file by key, and the file's metadata. NumPy arrays are views of the file,
    which is mapped into memory."""
    size = size_of(path)
    if size < 8:
        broken(path, f"it has {size} bytes")
    data = np.memmap(path, np.uint8, "r").view(np.ndarray)
    n = int.from_bytes(data[:8].tobytes(), "little")
    if n > min(size - 8, MOST_HEADER):
        broken(path, f"its header has {n} bytes, the file {size}")
    body = data[8 + n :]
    try:
        header = parse_json(data[8 : 8 + n].tobytes())
        metadata = header.pop("__metadata__", None) or {}
        metadata = {utf8(key): utf8(value) for key, value in metadata.items()}
        entries = {utf8(key): entry_of(entry) for key, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        broken(path, "its header is none of safetensors")
    # The format has no gaps: each array must start at the byte `end`, where the previous array ends. The first array
    # starts at 0.
    end = 0
    for key in sorted(entries, key=lambda key: entries[key][2:]):
        dtype, shape, start, stop = entries[key]
        kind = "u2" if dtype == "BF16" else DTYPES.get(dtype)
        if kind is None:
            fail(str(path), f"{shown(key)} must have a dtype that MLX knows", shown(dtype))
        if start != end or stop - start != prod(shape) * np.dtype(kind).itemsize or stop > body.size:
            broken(path, f"{shown(key)} {shown(shape)} of {dtype} lies at {start}..{stop}, expected at {end}")
        end = stop
    if end != body.size:
        broken(path, f"its arrays have {end} bytes, of which there are {body.size}")
    return {key: array_at(body, *entry) for key, entry in entries.items()}, metadata


def utf8(text: object) -> str:
    """Check that UTF-8 can encode this text, and return it. JSON may contain half of a
    surrogate pair, which UTF-8 cannot encode."""
    if not isinstance(text, str):
        raise TypeError("no text")
    text.encode()
    return text


def entry_of(entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Return the dtype, shape, start and stop in an entry of a safetensors header."""
    shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(k) is int and 0 <= k < 2**63 for k in (*shape, start, stop)) or len(shape) > 32:
        raise ValueError("no sizes")
    return utf8(entry["dtype"]), shape, start, stop


LITTLE = {name: np.dtype(kind).newbyteorder("<") for name, kind in DTYPES.items()} | {"BF16": np.dtype("<u2")}


def array_at(body: np.ndarray, dtype: str, shape: tuple[int, ...], start: int, stop: int) -> Any:
    """Return the array whose bytes are body[start:stop], the data of a safetensors file."""
    array = body[start:stop].view(LITTLE[dtype]).reshape(shape)
    return mx.array(np.array(array)).view(mx.bfloat16) if dtype == "BF16" else array


def open_zip(path: Path) -> zipfile.ZipFile:
    """Open a zip file. Raise ValueError if it is no zip file, holds a name twice, or would expand to far more bytes
    than it has. Only compression methods that Python and NumPy write are allowed, since others can expand without a
    bound."""
    size = size_of(path)
    try:
        archive = zipfile.ZipFile(path)
    except DAMAGE as error:
        broken(path, f"it is no zip file: {shown(error)}")
    members = archive.infolist()
    if len({member.filename for member in members}) < len(members):
        broken(path, "it holds a name twice")
    if any(member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for member in members):
        broken(path, "it is compressed by another method than deflate")
    check_expansion(path, sum(member.file_size for member in members), size)
    return archive


def member_of(path: Path, archive: zipfile.ZipFile, name: str) -> bytes:
    """Return the bytes of one member of a zip file."""
    try:
        return archive.read(name)
    except DAMAGE as error:
        broken(path, f"{shown(name)}: {shown(error)}")


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file by name."""
    with open_zip(path) as archive:
        names = archive.namelist()
        return {name.removesuffix(".npy"): array_of(path, member_of(path, archive, name), name) for name in names}


def read_npy(path: Path) -> np.ndarray:
    """Return the array of an .npy file."""
    size_of(path)
    return array_of(path, path.read_bytes(), path.name)


def array_of(path: Path, data: bytes, name: str) -> np.ndarray:
    """Return the array in the bytes of an .npy file, after checking that the header declares as many bytes as there
    are."""
    headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    stream = io.BytesIO(data)
    try:
        with warnings.catch_warnings():  # Python's parser warns about strange literals
            warnings.simplefilter("ignore")
            shape, fortran, dtype = headers[np.lib.format.read_magic(stream)](stream)
        count = prod(shape)
    except Exception:  # NumPy's parser may raise any error. Its text is not shown: it advises to trust the file
        broken(path, f"{shown(name)} is no array of numbers")
    start = stream.tell()
    if dtype.hasobject:
        broken(path, f"{shown(name)} holds Python's objects, which run code when they are read")
    if count < 0 or count * dtype.itemsize != len(data) - start:
        broken(path, f"{shown(name)} declares {shown(shape)} of {dtype} and has {len(data) - start} bytes")
    try:
        return np.ndarray(shape, dtype, data, start, order="F" if fortran else "C").copy(order="K")
    except (ValueError, TypeError):
        broken(path, f"{shown(name)} has no shape of an array")


# --- Writing ---------------------------------------------------------------------------------------------------------


def write_whole(
    path: Path, work: Callable[[Path], Result], *, force: bool = False, ending: str | None = None
) -> Result:
    """Call `work` to write a new file beside `path`, then rename the new file to `path`; return the result of `work`.

    At every moment `path` is either the old file or the complete new file. The new file gets the old file's
    permissions.

    Args:
        path (Path): the file to write.
        work (function): is called with a path and writes a file there.
        force (bool): replace a file that exists. Without it, a file that appears in the meantime is not replaced,
            either.
        ending (str, optional): the ending of the temporary file's name. Default: the last suffix of `path`.

    Raises:
        FileExistsError: `path` exists, without `force`.
    """
    # The name cannot be guessed, and exclusive creation follows no link. Only the owner may read the unfinished file.
    partial = path.with_name(f".{secrets.token_hex(16)}{path.suffix if ending is None else ending}")
    try:
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        result = work(partial)
        if force:
            partial.chmod(mode_of(path))
            os.replace(partial, path)
        else:
            partial.chmod(new_mode())
            link(partial, path)
        return result
    finally:
        partial.unlink(missing_ok=True)


def link(partial: Path, path: Path) -> None:
    """Give a file the second name `path`, which must not exist. (A rename would replace an existing file.) A file
    system without hard links allows no second name: then rename the file."""
    try:
        os.link(partial, path)
    except OSError as error:
        if path.exists() or path.is_symlink():
            raise FileExistsError(f"{path} exists") from None
        if error.errno not in UNLINKABLE:
            raise
        os.replace(partial, path)


def mode_of(path: Path) -> int:
    """Return the permission bits of a file. If the file does not exist, return the permission bits that a new file
    gets."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return new_mode()


def new_mode() -> int:
    """Return the permission bits of a new file. The umask can only be read by setting it, here briefly to a strict
    one."""
    umask = os.umask(0o077)
    os.umask(umask)
    return 0o666 & ~umask
