"""Read files from unknown sources safely, and write files completely or not at all.

`foreign` is the only function of the package that opens a file from an unknown source. Such a file may declare a wrong
format, wrong sizes or wrong names. Its `Budget` limits bytes, names, levels and time, whatever the file declares.

A safetensors file is a header in JSON, then the bytes of the arrays. An .npy file is a header and one array; an .npz
file is a zip of .npy files.
"""

import errno
import io
import os
import secrets
import stat
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn, TypeVar

import mlx.core as mx
import numpy as np

from .budget import Budget, Refused, shown

DTYPES = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1"}
DTYPES |= {"U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1", "BOOL": "?"}
"""The names of dtypes in safetensors files, and NumPy's codes for them. NumPy does not support BF16: MLX reads it."""

LITTLE = {name: np.dtype(code).newbyteorder("<") for name, code in DTYPES.items()} | {"BF16": np.dtype("<u2")}
"""{name of a dtype in a safetensors file: NumPy's dtype, little-endian ("<")}. bfloat16 is read as uint16 first."""

NUMBERS = {np.dtype(code) for code in DTYPES.values()}
"""The dtypes of the arrays that are read from files of any format."""

MOST_HEADER = 100_000_000
"""The most bytes of a safetensors header that the format allows."""

PIECE = 2**20
"""How many bytes of a zip file are read at a time."""

DAMAGE = (ArithmeticError, AttributeError, EOFError, LookupError, OSError, RuntimeError, SyntaxError, TypeError)
DAMAGE += (ValueError, struct.error, zipfile.BadZipFile, zlib.error)
"""The errors that readers of NumPy and Python raise if the bytes of a file are damaged."""

UNLINKABLE = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK)
"""Error numbers that `os.link` may give on a file system without hard links."""

Result = TypeVar("Result")


# --- Reading ---------------------------------------------------------------------------------------------------------


class Foreign(NamedTuple):
    """A file from an unknown source, opened by `foreign`: its path, its bytes as a stream, and its budget."""

    path: Path
    stream: BinaryIO
    budget: Budget

    def read(self) -> bytes:
        """Return a copy of all bytes of the file, which does not change if another program writes to the file later."""
        data = self.stream.read(self.budget.stored)
        if len(data) != self.budget.stored:
            broken("it shrinks while it is read")
        return data


@contextmanager
def foreign(path: Path) -> Iterator[Foreign]:
    """Open a file from an unknown source for the time of a `with` block.

    Inside the block, errors that damaged bytes cause (DAMAGE) and MemoryError become a ValueError of one line. Its text
    begins with the path; if the text of the error begins with "it", the path replaces this word. Other errors pass
    unchanged, such as the ImportError of a reader whose package is missing.

    Raises:
        OSError: the file cannot be opened.
        ValueError: the file is a pipe, a device or a socket, or is damaged, or exceeds its budget.
    """
    size_of(path)  # refuse a pipe before it is opened, because opening a pipe may wait forever
    with path.open("rb") as stream:
        try:
            yield Foreign(path, stream, Budget(regular(path, os.fstat(stream.fileno()))))
        except MemoryError:
            raise ValueError(f"{path} needs more memory than there is") from None
        except DAMAGE as error:
            ours = type(error) in (ValueError, Refused)  # errors of this package, whose text is written for users
            text = f"{error}" if ours else f"it is truncated or damaged: {named(error)}."
            if text.startswith(str(path)):
                raise
            # text[3:]: the text without "it ".
            raise ValueError(f"{path} {text[3:]}" if text.startswith("it ") else f"{path}: {text}") from None


def named(error: BaseException) -> str:
    """Return the class and the text of an error in one line that is safe to print."""
    return f"{type(error).__name__}, {shown(error)}"


def broken(why: str) -> NoReturn:
    """Raise the ValueError for a file that is truncated or damaged; `foreign` replaces "it" by the path."""
    raise ValueError(f"it is truncated or damaged: {why}.")


def size_of(path: Path) -> int:
    """Return the size of a regular file. Refuse anything that may never end, such as a pipe or a device.

    Raises:
        FileNotFoundError, IsADirectoryError: there is no such file, or it is a folder.
        ValueError: the path is a pipe, a device or a socket.
    """
    return regular(path, path.stat())


def regular(path: Path, about: os.stat_result) -> int:
    """Return the size of the file that `about` describes; raise an error unless it is a regular file."""
    if stat.S_ISDIR(about.st_mode):
        raise IsADirectoryError(f"{path} is a folder")
    if not stat.S_ISREG(about.st_mode):
        raise ValueError(f"{path} is no regular file")
    return about.st_size


def read_json(path: Path) -> Any:
    """Return the content of a JSON file."""
    with foreign(path) as file:
        return file.budget.json(file.read())


def check_shape(name: str, shape: tuple[Any, ...]) -> None:
    """Raise ValueError unless MLX and NumPy can hold an array of this shape. name: the array's name in the file, which
    may be damaged."""
    if len(shape) > 32 or not all(type(size) is int and 0 <= size < 2**31 for size in shape):
        broken(f"{shown(name)} declares {shown(shape)}, no shape of an array")


def array_in(
    data: Any,
    name: str,
    dtype: np.dtype,
    shape: tuple[Any, ...],
    start: int = 0,
    stop: int | None = None,
    order: Any = "C",
) -> np.ndarray:
    """Return the array whose bytes are data[start:stop], as a view of the data. The readers of all formats call this
    function. It raises a ValueError if the dtype is not one of NUMBERS, or if the shape declares another number of
    bytes. data: the bytes of the file. stop: None for the end of the data. order: "C" or "F", as in NumPy."""
    stored = (len(data) if stop is None else stop) - start
    # Compare in the byte order of this machine ("="). Text has the kind "U".
    if dtype.newbyteorder("=") not in NUMBERS and not (dtype.kind == "U" and dtype.itemsize):
        raise ValueError(f"{shown(name)} must have a dtype that MLX knows but got {shown(dtype)}.")
    check_shape(name, shape)
    if stored < 0 or start + stored > len(data) or prod(shape) * dtype.itemsize != stored:
        broken(f"{shown(name)} declares {shown(shape)} of {dtype} and has {stored} bytes")
    return np.ndarray(shape, dtype, data, start, order=order)


def as_bfloat16(array: np.ndarray) -> mx.array:
    """Return the bfloat16 array that has the same bits as an array of uint16."""
    return mx.array(np.array(array)).view(mx.bfloat16)


def read_safetensors(file: Foreign) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arrays of a safetensors file by key, and the file's metadata."""
    # size: the number of bytes of the file. name: a function that counts a name against the budget and returns it. n:
    # the number of bytes of the header.
    data, size, name = file.read(), file.budget.stored, file.budget.name
    n = int.from_bytes(data[:8], "little")
    if size < 8 or n > min(size - 8, MOST_HEADER):
        broken(f"its header has {n} bytes, the file {size}")
    header = file.budget.json(data[8 : 8 + n])
    try:
        metadata = header.pop("__metadata__", None) or {}
        metadata = {name(key): value for key, value in metadata.items()}
        if not all(isinstance(value, str) for value in metadata.values()):
            raise TypeError("metadata are texts")
        entries = {name(key): entry_of(entry) for key, entry in header.items()}
    except Refused:
        raise
    except (ValueError, TypeError, KeyError, AttributeError):
        broken("its header is none of safetensors")
    # The format has no gaps: each array must start at the byte `end`, at which the array before it ends.
    end, arrays = 0, {}
    for key in sorted(entries, key=lambda key: entries[key][2:]):
        dtype, shape, start, stop = entries[key]
        if start != end:
            broken(f"{shown(key)} {shown(shape)} of {shown(dtype)} lies at {start}..{stop}, expected at {end}")
        if dtype not in LITTLE:
            raise ValueError(f"{shown(key)} must have a dtype that MLX knows but got {shown(dtype)}.")
        arrays[key] = array_in(data, key, LITTLE[dtype], shape, 8 + n + start, 8 + n + stop)
        end = stop
    if 8 + n + end != size:
        broken(f"its arrays have {end} bytes, of which there are {size - 8 - n}")
    return {key: as_bfloat16(arrays[key]) if entries[key][0] == "BF16" else arrays[key] for key in entries}, metadata


def entry_of(entry: Any) -> tuple[str, tuple[Any, ...], int, int]:
    """Return (dtype, shape, start, stop) of an entry of a safetensors header: the name of the array's dtype, its shape,
    and where its bytes begin and end, counted from the end of the header."""
    dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not (isinstance(dtype, str) and isinstance(shape, list) and type(start) is type(stop) is int):
        raise TypeError("no entry")
    return dtype, tuple(shape), start, stop


def members_of(file: Foreign) -> Iterator[tuple[str, bytearray]]:
    """Yield the name and the bytes of each member of a zip file. Only compression methods that Python and NumPy write
    are allowed, since others can expand without a bound."""
    # Count the entries of the zip's directory before Python creates an object for each. An entry begins with PK\1\2.
    entries = sum(piece.count(b"PK\1\2") for piece in iter(lambda: file.stream.read(PIECE), b""))
    if entries > file.budget.names:
        broken(f"it holds {entries} files")
    # All names and declared sizes are counted against the budget before the first member is unpacked.
    with zipfile.ZipFile(file.stream) as archive:
        members = archive.infolist()
        names = [file.budget.name(member.filename).removesuffix(".npy") for member in members]
        if len(set(names)) < len(names):
            broken("it holds a name twice")
        for member in members:
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                broken("it is compressed by another method than deflate")
            file.budget.take(member.file_size, member.filename)
        for member in members:
            yield member.filename, content_of(archive, member)


def content_of(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytearray:
    """Return the bytes of a member of a zip file. They are unpacked piece by piece, since a member may be longer than
    it declares."""
    data, end = bytearray(member.file_size), 0  # end: how many bytes have been read
    reader: Any
    longer = copy(member)
    longer.file_size += 1  # let Python read one byte more, so that a member that is too long is noticed
    with archive.open(longer) as reader, memoryview(data) as view:
        while count := reader.readinto(view[end : end + PIECE]):
            end += count
        if end < len(data) or reader.read(1):
            broken(f"{shown(member.filename)} has not the {len(data)} bytes that it declares")
    return data


def read_npz(file: Foreign, text: bool = False) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file by name. text: whether arrays of text are allowed, too."""
    return {name.removesuffix(".npy"): npy_array(data, name, text) for name, data in members_of(file)}


def read_npy(file: Foreign) -> np.ndarray:
    """Return the array of an .npy file."""
    return npy_array(file.read(), file.path.name)


def npy_array(data: bytes | bytearray, name: str, text: bool = False) -> np.ndarray:
    """Return the array in `data`, the bytes of an .npy file. name: the array's name, for error texts. text: whether an
    array of text is allowed, too."""
    # {version of the format: NumPy's function that reads its header}
    headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    stream = io.BytesIO(memoryview(data)[: 2**16])  # enough bytes: NumPy accepts headers of up to 10,000 bytes
    try:
        with warnings.catch_warnings():  # Python's parser warns about strange literals
            warnings.simplefilter("ignore")
            shape, fortran, dtype = headers[np.lib.format.read_magic(stream)](stream)
    except Exception:  # NumPy's parser may raise any error; its text advises to trust the file, so it is not shown
        broken(f"{shown(name)} is no array of numbers")
    if dtype.hasobject:
        broken(f"{shown(name)} holds Python's objects, which run code when they are read")
    if dtype.kind == "U" and not text:
        raise ValueError(f"{shown(name)} must hold numbers but got text.")
    return array_in(data, name, dtype, shape, stream.tell(), order="F" if fortran else "C")


# --- Writing ---------------------------------------------------------------------------------------------------------


def write_whole(
    path: Path, work: Callable[[Path], Result], *, force: bool = False, ending: str | None = None
) -> Result:
    """Call `work` to write a new file in the folder of `path`, then rename the new file to `path`. Return the result of
    `work`.

    At every moment `path` is either the old file or the complete new file. The new file gets the permissions of the old
    one, if the old one belongs to this user.

    Args:
        path (Path): the file to write.
        work (function): is called with a path and writes a file there.
        force (bool): replace a file that exists. Without it, a file that appears in the meantime is not replaced,
            either.
        ending (str, optional): the ending of the temporary file's name. Default: the last suffix of `path`.

    Raises:
        FileExistsError: `path` exists, without `force`; or it is a device or a pipe, which a file must not replace.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is no regular file")
    # Other users may write to the folder. So the file's name cannot be guessed, its creation (O_EXCL) follows no link,
    # and only the owner may read it until it is complete.
    partial = path.with_name(f".{secrets.token_hex(16)}{path.suffix if ending is None else ending}")
    try:
        # O_EXCL: fail if the file exists. 0o600: the permission to read and write for the owner only.
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        result = work(partial)
        if force:
            partial.chmod(mode_of(path))
            os.replace(partial, path)
        else:
            partial.chmod(new_mode(path.parent))
            link(partial, path)
        return result
    finally:
        partial.unlink(missing_ok=True)


def link(partial: Path, path: Path) -> None:
    """Give the file `partial` the second name `path` by a hard link, which fails if `path` exists; a rename would
    replace an existing file. On a file system without hard links rename the file."""
    try:
        os.link(partial, path)
    except OSError as error:
        if path.exists() or path.is_symlink():
            raise FileExistsError(f"{path} exists") from None
        if error.errno not in UNLINKABLE:  # the error has another reason than a file system without hard links
            raise
        os.replace(partial, path)


def mode_of(path: Path) -> int:
    """Return the permission bits for the file that replaces `path`. They are those of the old file, without setuid,
    setgid and sticky bits, if this user owns it. Otherwise they are those of a new file, because another owner may have
    made the old file writable for everybody."""
    try:
        about = path.stat()
        return about.st_mode & 0o777 if about.st_uid == os.geteuid() else new_mode(path.parent)
    except FileNotFoundError:
        return new_mode(path.parent)


def new_mode(folder: Path) -> int:
    """Return the permission bits that a new file in this folder gets. An empty file is created to find them: the umask
    can only be read by setting it, which would affect files that other threads create at that moment."""
    probe = folder / f".{secrets.token_hex(16)}"
    file = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # the umask removes some of these bits
    try:
        return os.fstat(file).st_mode & 0o777
    finally:
        os.close(file)
        probe.unlink()
