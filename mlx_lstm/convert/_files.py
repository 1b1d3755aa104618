"""Read all recurrent layers of a file of weights, and write such a file completely or not at all.

The ending of a file's name selects its format. Files of arrays (.safetensors, .npz) only have arrays by key, such as
lstm.weight_ih_l0; the module `_keys` finds out to which layer each key belongs. Arrays do not show the options of a
cell, so this package stores the options in the file's metadata, under the key `METADATA`. Files of Keras and ONNX
describe their layers: the modules `_keras_file` and `_onnx_file` read and write them.
"""

import json
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..engines.cells import ACTIVATIONS
from ..ground.budget import Budget, shown
from ..ground.checks import check_flag, check_option, fail
from ..ground.files import DTYPES, Foreign, broken, foreign, read_npz, read_safetensors, size_of, write_whole
from . import _coreml_file, _keras_file, _keys, _onnx_file
from .weights import Weights, check_weights, in_bias

ENDINGS = (".safetensors", ".npz", ".weights.h5", ".h5", ".keras", ".onnx")
"""The endings of the files that can be read. `.weights.h5` comes before `.h5`, because `ending_of` returns the first
match."""

METADATA = "mlx_lstm"
"""The key, in the metadata of a safetensors file and in the comment of an .npz file, under which the options of the
layers' cells are stored as JSON."""

PLACES = "mlx_lstm.layers"
"""The key in the metadata under which `write` stores, as JSON, the stack, the layer and the direction of each array. It
does so only if `read` could not find them out from the keys of the arrays."""

COMMENT = b'{"mlx_lstm":'
"""The first bytes of the comment of an .npz file that `write_npz` wrote. Any other comment is ignored."""

LONGEST = 2**16 - 1
"""The largest number of bytes of a zip file's comment."""


class Model(NamedTuple):
    """The contents of a file. layers: the `Weights` of the recurrent layers by name. keys: for each layer the keys
    under which the file stores its arrays. rest: all other arrays by key, unchanged. notes: texts on what was not
    read. metadata: the metadata of a safetensors file."""

    layers: dict[str, Weights]
    rest: dict[str, Any]
    keys: dict[str, list[str]]
    notes: list[str]
    metadata: dict[str, str]

    def __repr__(self) -> str:
        return f"Model(layers={self.layers}, {len(self.rest)} other arrays)"


def read(
    path: str | os.PathLike[str],
    *,
    keys: str | None = None,
    ways: Sequence[str] = _keys.WAYS,
    order: str | None = None,
    nonlinearity: str | None = None,
    external_data: bool = False,
    only: Sequence[str] | None = None,
) -> Model:
    """Return all recurrent layers of a file, and its other arrays.

    The names and shapes of the arrays tell what a layer is, except in `.keras`, `.h5` and `.onnx`. So a layer
    `nn.Pointwise`, whose cell a user wrote, is read as an LSTM if it has four gates, as a plain RNN if it has one, and
    as a GRU if it has three and no bias. If it has parameters of its own (`params`), it is refused.

    Args:
        path (str or Path): a file that ends in `.safetensors` or `.npz`, with keys as in torch, MLX, Keras or
            `mlx_lstm.lstm`; `.keras`, `.h5`, `.weights.h5` (with h5py); or `.onnx` (with onnx).
        keys (str, optional): the template of the arrays' keys, such as `"{name}.{layer}.{array}_{way}"`. Default:
            detected; directions may be called forward, fwd, backward, bwd, back or reverse.
        ways (sequence of str): the names of the two directions in the keys, for the template's `{way}`.
        order (str, optional): the gate order in a file of arrays, such as `"icfo"` (whose c is the candidate g), if it
            is not the usual order for such keys.
        nonlinearity (str, optional): the nonlinearity of plain RNNs, if the file does not name it. Default: tanh.
        external_data (bool): read the files that an `.onnx` file names for its arrays, from the folder of the file
            only. Default: `False`: a file with external data raises a ValueError.
        only (sequence of str, optional): the names of the layers to read. All others are left out, also those that
            cannot be read, such as a layer with layer normalisation. Default: all layers.

    Returns:
        Model: `layers`, `rest`, `keys`, `notes`, `metadata`.

    Raises:
        ValueError: the file is truncated, of another kind, or its arrays do not fit; the text says which.
        ImportError: h5py or onnx is missing.

    Example:
        >>> import mlx.nn, tempfile
        >>> from mlx_lstm import convert, torch
        >>> path = f"{tempfile.mkdtemp()}/gru.safetensors"
        >>> mlx.nn.GRU(3, 4).save_weights(path)
        >>> torch.from_weights(convert.read(path).layers[""])
        GRU(3, 4)
    """
    check_names(keys, ways)
    if nonlinearity is not None:
        check_option("convert", "nonlinearity", nonlinearity, tuple(ACTIVATIONS))
    check_flag("convert", "external_data", external_data)
    path = path_of(path)
    ending = ending_of(path)
    # Only files of arrays need these options; other files describe their layers. `ways` always has a value, its
    # default, so it is not refused.
    options = {"keys": keys, "ways": ways, "order": order, "nonlinearity": nonlinearity}
    for name, value in options.items():
        if ending not in (".safetensors", ".npz") and value is not None and name != "ways":
            fail("convert", f"{name} must be left out for {path.name}, which says it itself,", repr(value))
    if only is not None and (isinstance(only, str) or not all(isinstance(name, str) for name in only)):
        fail("convert", "only must be a list of names of layers", repr(only))
    # The readers of other formats return the first four fields of a `Model`; these files have no metadata.
    with foreign(path) as file:
        if ending == ".onnx":
            return selected(Model(*_onnx_file.read(file, external_data, only), metadata={}), only)
        if ending not in (".safetensors", ".npz"):
            return selected(Model(*_keras_file.read(file, only), metadata={}), only)
        arrays, metadata = read_safetensors(file) if ending == ".safetensors" else (read_npz(file), comment_of(file))
        # told: what the metadata say about the layers; used: for each layer the keys of its arrays.
        told = _keys.Told(told_options(file.budget, metadata), told_places(file.budget, metadata))
        layers, used = _keys.layers_of(arrays, told, only=only, **options)
        taken = {key for keys_of_layer in used.values() for key in keys_of_layer}
        rest = {key: array for key, array in arrays.items() if key not in taken}
        # Return only the metadata of other programs, without this package's entries.
        metadata = {key: text for key, text in metadata.items() if key not in (METADATA, PLACES)}
        # plain: the plain RNNs whose activation neither the caller nor the file tells.
        plain = [name for name, weights in layers.items() if weights.cell.op == "rnn" and nonlinearity is None]
        plain = [name for name in plain if not any(key in told.options for key in used[name])]
        note = f"{some(map(title, plain))}: the file does not tell the activation: tanh is assumed (see nonlinearity)"
        notes = [note] if plain else []
        notes += notes_beside({name: used[name] for name in layers if only is None or name in only}, rest)
        return selected(Model(layers, rest, used, notes, metadata), only)


def notes_beside(keys: Mapping[str, Sequence[str]], rest: Iterable[str]) -> list[str]:
    """Return a note for each layer beside whose arrays the file has other arrays, under the same path or one level
    below: a layer that uses them, such as one with layer normalisation or with an adapter, computes something else.
    keys: the keys of each layer. rest: all other keys of the file."""
    owners = {folder(key): name for name, own in keys.items() for key in own}
    # peft calls a layer `base_layer` and puts the arrays of an adapter beside this name: lstm.base_layer.weight_ih_l0,
    # lstm.lora_A.default.weight. adapted: the layers by the path before this name, one name or several.
    adapted: dict[str, str] = {}
    for path, name in owners.items():
        while path.rpartition(".")[2] == ADAPTED:
            path = folder(path)
            adapted[path] = name
    beside: dict[str, list[str]] = {}
    for key in rest:
        here = folder(key)
        above = folder(here)
        near = [path for path in (here, above, folder(above)) if path in adapted]
        if here in owners:
            beside.setdefault(owners[here], []).append(key)
        elif above and above in owners:  # not if it is empty: below the empty path is the whole model
            beside.setdefault(owners[above], []).append(key)
        elif near:
            beside.setdefault(adapted[near[0]], []).append(key)
    rule = "are not read; a layer that uses them computes something else"
    return [f"{title(name)}: the arrays beside its own, {some(others, 3)}, {rule}" for name, others in beside.items()]


ADAPTED = "base_layer"
"""The name that the package peft gives to a layer with an adapter, such as LoRA."""


def folder(key: str) -> str:
    """Return the path of a key: all before its last dot or slash, or an empty text."""
    return key[: max(key.rfind("."), key.rfind("/"), 0)]


def path_of(path: object) -> Path:
    """Return the argument `path` of `read` or `write` as a `Path`. Raise ValueError if it is neither a text nor a path
    object, for example if it is an open file or its bytes."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        fail("convert", "path must be a str or a Path", type(path).__name__)
    return Path(text)


def selected(model: Model, only: Sequence[str] | None) -> Model:
    """Return a model with only the layers that `only` names, or with all layers if it is None. Raise ValueError if a
    named layer is missing."""
    names = list(model.layers) if only is None else only
    for name in names:
        if name not in model.layers:
            raise ValueError(f"no recurrent layer is called {name!r}; there are {some(map(title, model.layers))}")
    layers, keys = ({name: all_of[name] for name in all_of if name in names} for all_of in (model.layers, model.keys))
    return model._replace(layers=layers, keys=keys)


def title(name: str) -> str:
    """Return a layer's name for printing; "(no name)" if it is empty."""
    return shown(name) or "(no name)"


def some(names: Iterable[str], most: int = 6) -> str:
    """Return a text with the first `most` names and the number of the other names, such as "a, b and 3 more"."""
    names = list(names)
    return ", ".join(map(shown, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def check_names(keys: object, ways: object) -> None:
    """Check that `keys` is None or a str, and that `ways` holds two different strings: the words with which the
    names in the file mark the forward and the reverse direction, such as "fw" and "bw"."""
    if keys is not None and not isinstance(keys, str):
        fail("convert", 'keys must be a form such as "{name}.{array}"', repr(keys))
    names = ways if isinstance(ways, (list, tuple)) else ()
    if len(names) != 2 or names[0] == names[1] or not all(isinstance(name, str) for name in names):
        fail("convert", "ways must be two names, one for each direction,", repr(ways))


def write(
    path: str | os.PathLike[str],
    model: Model | Mapping[str, Weights],
    *,
    style: str = "torch",
    keys: str | None = None,
    ways: Sequence[str] | None = None,
    force: bool = False,
) -> None:
    """Write recurrent layers to a file, whose ending selects the format. The file is written completely or not at all.

    Args:
        path (str or Path): a file with one of the endings that `read` takes, or `.mlpackage`. `.keras` and `.h5` become
            complete Keras models of these layers. `.onnx` becomes a model in which each layer is a node; in a stack
            each node reads the output of the node before. Only `.safetensors` and `.npz` hold other arrays.
            Options such as `reset`, which the arrays do not show, are stored for `read`: in the metadata of a
            `.safetensors` file, in the zip comment of an `.npz` file, as `model_config` in a `.weights.h5` file.
            Other programs ignore these texts.
            `.mlpackage` is a Core ML model of LSTMs in float32 (with coremltools), which `read` cannot read. Its inputs
            are x [T, 1, I], h_0 and c_0, its outputs h, h_n and c_n. These names begin with the stack's name if it has
            one.
        model (Model or dict): what `read` returns, or `Weights` by name.
        style (str): how the arrays are called in `.safetensors` and `.npz`: as in PyTorch (`"torch"`), in MLX (`"mlx"`;
            `"two-biases"` with bias_ih and bias_hh), in Keras (`"keras"`) or in `mlx_lstm.lstm` (`"ops"`).
        keys (str, optional): a template for the keys of the arrays, such as `"{name}.{layer}.{way}.{array}"`.
        ways (sequence of str, optional): the names of the two directions. Default: as in the style, or forward and
            backward.
        force (bool): replace a file that exists. Default: `False`.

    Raises:
        ValueError: the file exists, or the format has no place for an option.
        FileExistsError: another process wrote the file in the meantime.
        OSError: the file cannot be written, for example because the disk is full.
        ImportError: h5py, onnx or coremltools is missing.

    Example:
        >>> import tempfile
        >>> from mlx_lstm import convert, torch
        >>> path = f"{tempfile.mkdtemp()}/lstm.npz"
        >>> convert.write(path, {"lstm": convert.from_torch(torch.LSTM(3, 4))}, style="mlx")
        >>> convert.read(path).keys
        {'lstm': ['lstm.Wx', 'lstm.Wh', 'lstm.bias']}
    """
    path = path_of(path)
    check_folder(path)
    if path.suffix != _coreml_file.ENDING:
        ending_of(path, writes=True)
    if not isinstance(model, Model):
        if not isinstance(model, Mapping) or hasattr(model, "parameters"):  # a layer of MLX is a dict, too
            rule = "model must be what convert.read returns, or a dict of Weights by name: {name: from_torch(layer)},"
            fail("convert", rule, type(model).__name__)
        model = Model(dict(model), {}, {}, [], {})
    for name, weights in model.layers.items():
        if not isinstance(name, str):
            fail("convert", "names of layers must be texts", repr(name))
        check_weights("convert", weights)
    check_option("convert", "style", style, _keys.STYLES)
    check_names(keys, _keys.WAYS if ways is None else ways)
    check_flag("convert", "force", force)
    if path.exists() and not force:
        fail("convert", f"{path} must not exist, or be replaced by force,", "a file")
    if path.suffix == _coreml_file.ENDING:
        return _coreml_file.write(path, model.layers, force)
    replace(path, lambda partial: write_to(partial, model, style, keys, ways), force)


def check_folder(path: Path) -> None:
    """Check that the folder of a new file exists, and that this user may write to it: `replace` makes a temporary file
    there."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is no folder")
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"no permission to write {path}, because its folder is read-only")


def replace(path: Path, work: Callable[[Path], Any], force: bool) -> Any:
    """Call `work` with a temporary path that has the same ending as `path`, and rename the file that `work` writes
    there to `path`. Return the result of `work`. force: whether an existing file is replaced."""
    if path.exists():
        size_of(path)  # raises for a device, which must not be replaced
    return write_whole(path, work, force=force, ending=ending_of(path))


def write_to(path: Path, model: Model, style: str, keys: str | None, ways: Sequence[str] | None) -> None:
    """Write a model's layers and other arrays to a file, in the format that the file's ending selects. style, keys,
    ways: the names of the arrays, as for `write`."""
    ending = ending_of(path)
    if ending not in (".safetensors", ".npz"):  # these formats hold layers only, no other arrays
        writer = _onnx_file.write if ending == ".onnx" else _keras_file.write
        return writer(path, ending, model.layers)
    arrays, told = dict(model.rest), {}  # told: {key of a matrix: options of its cell}, for the metadata
    # Only the style "ops" has the forget bias as an option. For another style `in_bias` adds it to the bias and removes
    # it from the options, so that no reader adds it again.
    layers = model.layers if style == "ops" else {name: in_bias(weights) for name, weights in model.layers.items()}
    places: dict[str, _keys.Place] = {}
    for name, weights in layers.items():
        # The metadata name a layer's options by the keys of its matrices, since every layer has matrices. The option
        # "bidirectional" is left out: the keys show the directions.
        options = {option: value for option, value in weights.options.items() if option != "bidirectional"}
        for key, (array, places[key]) in _keys.keys_of(name, weights, style, keys=keys, ways=ways).items():
            if key in arrays:
                rule = f"{shown(key)} must be one array: give a form of keys, or another prefix,"
                fail("convert", rule, "two")
            arrays[key] = array
            if options and array.ndim > 1:  # a matrix
                told[key] = options
    metadata = {METADATA: json.dumps(told)} if told else {}
    # A layer's name may contain a number or a word for a direction, such as "rnn.0" or "back.enc". If `read` would find
    # other layers in the keys for this reason, the metadata also contain the place of each array.
    try:
        suffices = is_read_as(layers, arrays, _keys.Told(told, {}), places, (keys, ways))
    except ValueError:  # `read` would take another array for an array of a layer
        suffices = False
    if not suffices:
        if not is_read_as(layers, arrays, _keys.Told(told, places), places, (keys, ways)):
            rule = "the layers' names and the other arrays must leave the layers as they are when the file is read,"
            fail("convert", rule, some(map(title, layers)))
        metadata = {METADATA: json.dumps(told), PLACES: json.dumps(places)}
    if ending == ".npz":
        return write_npz(path, arrays, metadata)
    write_safetensors(path, arrays, model.metadata | metadata)


def is_read_as(
    layers: Mapping[str, Weights],
    arrays: Mapping[str, Any],
    told: _keys.Told,
    places: Mapping[str, _keys.Place],
    names: tuple[str | None, Sequence[str] | None],
) -> bool:
    """Return whether `read` would find the given layers in a file with the given arrays, each layer made of the right
    arrays. Raise the ValueError of `read` if it could not read them.

    arrays: by key. told: what the metadata of the file say. places: the true stack, layer and direction of each array,
    by key. names: the template of keys and the words for the directions, as for `write`. A template without {name} does
    not store names, so names are then not compared."""
    keys, ways = names
    found, used = _keys.layers_of(arrays, told, keys=keys, ways=ways or _keys.WAYS, only=list(layers))
    has_names = keys is None or "{name}" in keys
    to_write = {name: [key for key, place in places.items() if place.name == name] for name in layers}

    # Return for each stack its name, its numbers of layers and directions, and the keys of its arrays.
    def facts(stacks: Mapping[str, Weights], keys_by_stack: dict[str, list[str]]) -> set[tuple[Any, ...]]:
        named = ((name if has_names else "", stack, frozenset(keys_by_stack[name])) for name, stack in stacks.items())
        return {(name, len(stack.layers), stack.directions, its_keys) for name, stack, its_keys in named}

    return facts(layers, to_write) <= facts(found, used)


TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")
"""The endings of PyTorch's own files, which this package does not read."""

INSTEAD = {
    ": torch.load(..., weights_only=True), then safetensors.torch.save_file,": TORCH_ENDINGS,
    ": rename it to .h5,": (".hdf5", ".hdf"),
    ": Core ML packages can be written, not read,": (".mlpackage",),
    ": of a SavedModel save the weights by Keras, as .h5,": (".pb",),
}
"""Advice for an error text if a file with an unsupported ending is to be read, each with the endings for which it is
given."""

INSTEAD_OF_WRITING = {
    ": safetensors.torch.load_file reads a .safetensors file in PyTorch,": TORCH_ENDINGS,
    ": a Core ML package ends in .mlpackage,": (".mlmodel",),
}
"""Advice for an error text if a file with an unsupported ending is to be written, each with these endings."""


def ending_of(path: Path, *, writes: bool = False) -> str:
    """Return the ending of a file's name, which selects the format. Raise ValueError with advice for an unknown ending.
    writes: whether the file is to be written. A caller that writes must handle .mlpackage itself."""
    for ending in ENDINGS:
        if path.name.endswith(ending):
            return ending
    found = ".pb" if (path / "saved_model.pb").exists() else path.suffix  # a SavedModel of TensorFlow is a folder
    advice = INSTEAD_OF_WRITING if writes else INSTEAD  # {advice: the endings for which it is given}
    more = next((text for text, endings in advice.items() if found in endings), "")
    known = (*ENDINGS, _coreml_file.ENDING) if writes else ENDINGS
    fail("convert", f"{path.name or path} must end in {', '.join(known)}{more}", repr(path.suffix))


def comment_of(file: Foreign) -> dict[str, str]:
    """Return the metadata that `write_npz` stored in the comment of a zip file; {} without such a comment, which begins
    with the bytes `COMMENT`."""
    with zipfile.ZipFile(file.stream) as archive:
        comment = archive.comment
    # budget.json parses JSON, and refuses a text with too many values or levels.
    return file.budget.json(comment) if comment.startswith(COMMENT) else {}


def told_options(budget: Budget, metadata: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Read the options of cells that `write` stored in a file's metadata. Return them by the key of each matrix of the
    layer: {key: {option: value}}."""
    try:
        return {str(name): dict(options) for name, options in budget.json(metadata.get(METADATA, "{}")).items()}
    except (ValueError, TypeError, AttributeError):
        broken(f"its metadata {METADATA!r} is not what this package writes")


def told_places(budget: Budget, metadata: Mapping[str, str]) -> dict[str, _keys.Place]:
    """Read the places (stack, layer, direction) of arrays that `write` stored in a file's metadata. Return {key of an
    array: place}, or {} if the metadata contain none."""
    places = {}
    try:
        for key, value in budget.json(metadata.get(PLACES, "{}")).items():
            name, layer, way = value
            if not (isinstance(name, str) and isinstance(layer, int) and layer >= 0 and way in (0, 1)):
                raise ValueError
            places[str(key)] = _keys.Place(name, layer, way)
    except (ValueError, TypeError, AttributeError):
        broken(f"its metadata {PLACES!r} is not what this package writes")
    return places


def write_safetensors(path: Path, arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file: eight bytes with the header's length, the header as JSON, then the arrays. metadata:
    texts that the header also holds. `DTYPES` has NumPy's code of a dtype by the format's name, such as "F32"."""
    names = {np.dtype(code).newbyteorder("<"): name for name, code in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    data, end = [], 0
    for key, array in arrays.items():
        # NumPy has no bfloat16, so its bytes are written as those of 16-bit integers.
        is_bfloat16 = isinstance(array, mx.array) and array.dtype == mx.bfloat16
        values = np.array(array.view(mx.uint16)) if is_bfloat16 else np.asarray(array)
        values = np.require(values, values.dtype.newbyteorder("<"), "C")  # the format's byte order, contiguous
        if values.dtype not in names:
            fail("convert", f"{shown(key)} must have a dtype that safetensors has", values.dtype)
        start, end = end, end + values.nbytes
        dtype = "BF16" if is_bfloat16 else names[values.dtype]
        header[key] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [start, end]}
        data.append(values)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # spaces, so that the arrays begin at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in data:
            file.write(values.tobytes())


def write_npz(path: Path, arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Write arrays as an .npz file, a zip of NumPy files, and the metadata as the zip's comment. A key becomes a file
    name when the zip is unpacked, so a key that contains a path is refused."""
    comment = json.dumps(dict(metadata), separators=(",", ":")).encode() if metadata else b""
    if len(comment) > LONGEST:  # a zip file cannot hold a longer comment
        rule = f"the options of all layers must take at most {LONGEST} bytes in .npz: take .safetensors,"
        fail("convert", rule, len(comment))
    for key in arrays:
        if key.startswith("..") or any(c in key for c in "/\\\0"):
            fail("convert", "keys in .npz must have no '/', '\\', '..' or NUL: take .safetensors,", repr(shown(key)))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        file.comment = comment
        for key, array in arrays.items():
            if isinstance(array, mx.array) and array.dtype == mx.bfloat16:
                rule = f"{shown(key)} must not be bfloat16, which .npz does not have: take .safetensors,"
                fail("convert", rule, "it")
            # force_zip64: an array may have more than 4 GiB.
            with file.open(f"{key}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
