"""Files of Keras: `.keras`, whole models in `.h5`, weights in `.weights.h5`. Needs h5py, not Keras.

In Keras 3 a layer's arrays lie under its class, counted in its container: `layers/lstm_1/cell/vars/0`; in `.h5` under
its name: `model_weights/encoder/encoder/lstm_cell/kernel`. Options of the layers stand in the model's configuration,
which `.weights.h5` lacks: there shapes tell the cell, and the usual options are taken.
"""

import io
import json
import re
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..engines.cells import GRUCell, RNNCell
from .keras import ACTIVATIONS, KINDS, NAMES, from_arrays, to_keras
from .weights import Weights

CLASSES = {"lstm": "LSTM", "gru": "GRU", "rnn": "SimpleRNN"}
VERSION = "3.0.0"
"""Of Keras, in what is written: the first one with this format."""

Found = tuple[dict[str, Weights], dict[str, Any], dict[str, list[str]], list[str]]


class Known(NamedTuple):
    """A layer of a model's configuration: where Keras 3 puts its arrays, its name behind those of the models it is in,
    its own, what Keras serialized."""

    place: str
    name: str
    own: str
    config: Mapping[str, Any]


def load() -> Any:
    """The package h5py."""
    try:
        import h5py
    except ImportError as error:
        raise ImportError(f".keras and .h5 files need the package h5py: pip install '.[convert]' ({error})") from None
    return h5py


def read(path: Path) -> Found:
    """Layers by name, other arrays, what each layer is made of, notes."""
    h5py = load()
    try:
        if path.suffix == ".keras":
            with zipfile.ZipFile(path) as archive:
                config = json.loads(archive.read("config.json"))
                data: Any = io.BytesIO(archive.read("model.weights.h5"))
        else:
            config, data = None, path
        with h5py.File(data, "r") as file:
            return read_file(h5py, file, config)
    except (zipfile.BadZipFile, KeyError, OSError, EOFError, RuntimeError, NotImplementedError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"it is truncated or damaged: {str(error).splitlines()[0]}") from None


def read_file(h5py: Any, file: Any, config: Mapping[str, Any] | None) -> Found:
    """The same of an open file."""
    text = file.attrs.get("model_config")
    if config is None and text is not None:
        config = json.loads(text)
    known = [] if config is None else list(walk(config, "", ""))
    root = file.get("model_weights", file)
    if "layer_names" in root.attrs or "layer_names0" in root.attrs:
        version = str(texts(file.attrs.get("keras_version", root.attrs.get("keras_version", VERSION)))[0])
        arrays = dict(of_names(root))
        slope = "x/5" if version.startswith(("1", "2")) else "x/6"
        return gathered(arrays, names_in_legacy(arrays), {each.name: each for each in known}, slope)
    arrays: dict[str, Any] = {}
    file.visititems(lambda key, item: arrays.update({key: number_of(item)}) if isinstance(item, h5py.Dataset) else None)
    if not arrays:
        raise ValueError("it must hold a model of Keras, or its weights, but got no arrays")
    return gathered(arrays, names_in_new(file, arrays), {each.place: each for each in known}, "x/6")


def number_of(item: Any) -> Any:
    """An array; bfloat16, which neither HDF5 nor NumPy knows, as MLX's."""
    array = np.asarray(item[()])
    short = array.dtype.kind == "V" and array.dtype.itemsize == 2
    return mx.array(array.view(np.uint16)).view(mx.bfloat16) if short else array


def texts(value: Any) -> list[str]:
    """An attribute's strings."""
    values = np.asarray(value).reshape(-1)
    return [each.decode() if isinstance(each, bytes) else str(each) for each in values]


def attribute(group: Any, name: str) -> list[str]:
    """A list of strings, which Keras cuts into numbered ones if it is long."""
    if name in group.attrs:
        return texts(group.attrs[name])
    found, n = [], 0
    while f"{name}{n}" in group.attrs:
        found += texts(group.attrs[f"{name}{n}"])
        n += 1
    return found


def of_names(root: Any) -> Iterator[tuple[str, Any]]:
    """Arrays by "layer/its own name" out of a file that lists them."""
    for layer in attribute(root, "layer_names"):
        for name in attribute(root[layer], "weight_names"):
            yield f"{layer}//{name.partition(':')[0]}", number_of(root[layer][name])


def walk(config: Mapping[str, Any], place: str, name: str) -> Iterator[Known]:
    """All layers of a configuration, also those of models in models."""
    inner = config.get("config")
    layers = inner.get("layers") if isinstance(inner, Mapping) else inner
    counts: dict[str, int] = {}
    for each in layers if isinstance(layers, list) else []:
        if not isinstance(each, Mapping) or "class_name" not in each or not isinstance(each.get("config"), Mapping):
            continue
        kind = snake(each["class_name"])
        counts[kind] = counts.get(kind, -1) + 1
        where = f"{place}layers/{kind}" + (f"_{counts[kind]}" if counts[kind] else "")
        own = str(each["config"].get("name", kind))
        yield Known(where, name + own, own, each)
        yield from walk(each, f"{where}/", f"{name}{own}.")


def snake(name: str) -> str:
    """A class's name as Keras has it in paths: SimpleRNN is simple_rnn."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=.)(?=[A-Z][a-z])", "_", name).lower()


class Cell(NamedTuple):
    """One direction's arrays: the layer's place and names, as in `Known`; "", "forward" or "backward"; keys in Keras'
    order."""

    place: str
    name: str
    own: str
    way: str
    keys: list[str]


def names_in_new(file: Any, arrays: Mapping[str, Any]) -> list[Cell]:
    """Of Keras 3: what lies in `cell/vars`, two matrices and maybe a bias."""
    found: dict[str, list[str]] = {}
    for key in arrays:
        parent, _, last = key.rpartition("/")
        if re.search(r"(^|/)cell(/cells/[^/]+)?/vars$", parent) and last.isdecimal():
            found.setdefault(parent, []).append(key)
    cells = []
    for parent, keys in found.items():
        keys.sort(key=lambda key: int(key.rpartition("/")[2]))
        place = re.sub(r"(/cell)?/vars$", "", parent)
        match = re.search(r"/(forward|backward)_layer$", place)
        place = place[: match.start()] if match else place
        parts = [part for part in place.split("/") if part]
        steps = ["/".join(parts[: n + 1]) for n, part in enumerate(parts) if part not in ("layers", "cell", "cells")]
        names = [name_at(file, step) for step in steps]
        if all(np.ndim(arrays[key]) == 2 for key in keys[:2]) and len(keys) > 1:
            cells.append(Cell(place, ".".join(names), (names or [""])[-1], match[1] if match else "", keys))
    return cells


def name_at(file: Any, place: str) -> str:
    """A layer's name, which younger files tell, or the last word of its place."""
    found = file[place]["vars"].attrs.get("name") if "vars" in file[place] else None
    return place.rpartition("/")[2] if found is None else texts(found)[0]


def names_in_legacy(arrays: Mapping[str, Any]) -> list[Cell]:
    """Of `.h5`: what lies beside a `recurrent_kernel`."""
    cells: list[Cell] = []
    for key in arrays:
        parent, _, last = key.rpartition("/")
        if last != "recurrent_kernel":
            continue
        keys = [f"{parent}/{name}" for name in NAMES if f"{parent}/{name}" in arrays]
        layer, _, inner = parent.partition("//")
        parts = [part for part in inner.split("/") if part]
        if len(parts) > 1 and "cell" in parts[-1]:
            parts.pop()
        way = ""
        if parts and (match := re.match(r"(forward|backward)_", parts[-1])):
            other = {"forward": "backward", "backward": "forward"}[match[1]] + parts[-1][match.end() - 1 :]
            if parent.replace(parts[-1], other) in {key.rpartition("/")[0] for key in arrays}:
                parts.pop()
                way = match[1]
        if parts and parts[0] == layer:
            parts.pop(0)
        elif parts and parts[-1] == layer:
            parts = []
        name, own = ".".join([layer, *parts]), [layer, *parts][-1]
        if any((cell.name, cell.way) == (name, way) for cell in cells):  # cells stacked in one layer
            own = inner.rpartition("/")[2]
            name += f".{own}"
        cells.append(Cell(f"{layer}/{inner}", name, own, way, keys))
    return cells


def gathered(arrays: Mapping[str, Any], cells: list[Cell], known: Mapping[str, Known], slope: str) -> Found:
    """The layers out of their directions, in the model's order; all that is in none of them."""
    layers: dict[str, list[Cell]] = {}
    legacy = any("//" in key for key in arrays)
    for cell in cells:
        layers.setdefault(cell.name if legacy else cell.place, []).append(cell)
    places = list(known)
    titles = {place: known.get(place, each[0]) for place, each in layers.items()}
    own = [title.own for title in titles.values()]
    found, keys = {}, {}
    for place in sorted(
        layers, key=lambda place: (places.index(place) if place in known else len(places), natural(place))
    ):
        ways = sorted(layers[place], key=lambda cell: cell.way == "backward")
        each = known.get(place)
        title = titles[place]
        name = title.own if own.count(title.own) == 1 else title.name
        name = place.replace("/", ".") if name in found else name
        config = each.config if each and can_tell(each.config) else None
        found[name] = from_arrays(
            "convert", [[arrays[key] for key in way.keys] for way in ways], config, name, slope=slope
        )
        keys[name] = [key.replace("//", "/") for way in ways for key in way.keys]
    taken = {key for way in cells for key in way.keys}
    rest = {key: array for key, array in arrays.items() if key not in taken}
    state = [key for key in rest if key.startswith("optimizer") or "seed_generator" in key]
    notes = [f"{len(state)} arrays of the optimizer and of random generators are left out"] if state else []
    return found, {plain(key): rest[key] for key in rest if key not in state}, keys, notes


def can_tell(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of a layer with one cell."""
    inner = config["config"]
    if config["class_name"] == "RNN":
        return isinstance(inner.get("cell"), Mapping) and inner["cell"].get("class_name") in KINDS
    return config["class_name"] in (*KINDS, "Bidirectional")


def natural(text: str) -> list[Any]:
    """A key that sorts numbers by their size."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)]


def plain(key: str) -> str:
    """An array's key in files without folders."""
    layer, _, name = key.rpartition("//")
    return (name if not layer or name.startswith(f"{layer}/") else f"{layer}/{name}").replace("/", ".")


# --- The way back ----------------------------------------------------------------------------------------------------


class Made(NamedTuple):
    """A layer of Keras: as Keras serializes it, and the arrays of its directions."""

    spec: dict[str, Any]
    ways: list[list[np.ndarray]]


def write(path: Path, ending: str, layers: Mapping[str, Weights]) -> None:
    """A model with these layers: of one stack a Sequential, of several a model of such, each with an input."""
    h5py = load()
    layers = {name.replace("/", ".") or "recurrent": weights for name, weights in layers.items()}
    made = {name: stack_of(name, weights) for name, weights in layers.items()}
    models = {name: sequential(name, each) for name, each in made.items()}
    config = next(iter(models.values())) if len(models) == 1 else functional(models)
    if ending == ".keras":
        weights = io.BytesIO()
        with h5py.File(weights, "w") as file:
            write_new(file, made)
        metadata = {"keras_version": VERSION, "date_saved": time.strftime("%Y-%m-%d@%H:%M:%S")}
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("metadata.json", json.dumps(metadata))
            archive.writestr("config.json", json.dumps(config))
            archive.writestr("model.weights.h5", weights.getvalue())
        return
    with h5py.File(path, "w") as file:
        if ending == ".weights.h5":
            write_new(file, made)
        else:
            write_legacy(file, made, config)


def stack_of(name: str, weights: Weights) -> list[Made]:
    """Keras' layers for a stack."""
    found = []
    for n, (layer, arrays) in enumerate(zip(weights.each(), to_keras(weights), strict=True)):
        kind = CLASSES[layer.cell.op]
        title = name + (f"_{n}" if len(weights.layers) > 1 else "")
        config = config_of(layer, str(arrays[0].dtype), weights.has_bias)
        shape = [None, None, layer.input_size]
        D = layer.directions
        ahead = spec_of(kind, config | {"name": f"forward_{title}" if D == 2 else title}, shape)
        if D == 2:
            back = spec_of(kind, config | {"name": f"backward_{title}", "go_backwards": True}, shape)
            both = {"name": title, "merge_mode": "concat", "layer": ahead, "backward_layer": back}
            ahead = spec_of("Bidirectional", both, shape)
        n = len(arrays) // D
        found.append(Made(ahead, [arrays[d * n : (d + 1) * n] for d in range(D)]))
    return found


def config_of(weights: Weights, dtype: str, use_bias: bool) -> dict[str, Any]:
    """What a layer's constructor takes."""
    words = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    cell = weights.cell
    names = [cell.act] if isinstance(cell, RNNCell) else [cell.activations[2], cell.activations[0]]
    for name in names:
        if name not in words:
            raise ValueError(f"[convert] activations must be those of Keras 3, {', '.join(words)}, but got {name!r}.")
    config = {"units": weights.hidden_size, "activation": words[names[0]], "use_bias": use_bias, "dtype": dtype}
    config |= {"recurrent_activation": words[names[1]]} if len(names) > 1 else {}
    config |= {"reset_after": cell.reset == "after"} if isinstance(cell, GRUCell) else {}
    return config | {"return_sequences": True, "go_backwards": weights.reverse}


def spec_of(kind: str, config: dict[str, Any], shape: list[int | None]) -> dict[str, Any]:
    """A layer as Keras serializes it."""
    spec = {"module": "keras.layers", "class_name": kind, "config": config, "registered_name": None}
    return spec | ({"build_config": {"input_shape": shape}} if kind != "InputLayer" else {})


def sequential(name: str, made: list[Made]) -> dict[str, Any]:
    """A model of layers on layers."""
    shape = made[0].spec["build_config"]["input_shape"]
    dtype = inner_config(made[0].spec)["dtype"]
    first = spec_of("InputLayer", {"batch_shape": shape, "dtype": dtype, "name": f"{name}_input"}, shape)
    config = {"name": f"{name}_model", "layers": [first, *(each.spec for each in made)], "build_input_shape": shape}
    return spec_of("Sequential", config, shape) | {"module": "keras"}


def inner_config(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """That of the layer, or of the one that a Bidirectional wraps."""
    return spec["config"]["layer"]["config"] if spec["class_name"] == "Bidirectional" else spec["config"]


def functional(models: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """A model of models, each on an input of its own."""
    layers, inputs, outputs = [], [], []
    for name, spec in models.items():
        shape, own = spec["build_config"]["input_shape"], spec["config"]["name"]
        dtype = spec["config"]["layers"][0]["config"]["dtype"]
        given = spec_of("InputLayer", {"batch_shape": shape, "dtype": dtype, "name": f"{name}_x"}, shape)
        tensor = {"shape": shape, "dtype": dtype, "keras_history": [f"{name}_x", 0, 0]}
        node = {"args": [{"class_name": "__keras_tensor__", "config": tensor}], "kwargs": {}}
        layers += [given | {"name": f"{name}_x", "inbound_nodes": []}, spec | {"name": own, "inbound_nodes": [node]}]
        inputs.append([f"{name}_x", 0, 0])
        outputs.append([own, 0, 0])
    config = {"name": "recurrent_layers", "layers": layers, "input_layers": inputs, "output_layers": outputs}
    module = "keras.src.models.functional"  # where each Keras 3 has it
    return {"module": module, "class_name": "Functional", "config": config, "registered_name": None}


def places(made: Mapping[str, list[Made]]) -> Iterator[tuple[str, Made]]:
    """Where Keras 3 puts the arrays of each layer."""
    for n, each in enumerate(made.values()):
        counts: dict[str, int] = {}
        before = "" if len(made) == 1 else f"layers/sequential{f'_{n}' if n else ''}/"
        for layer in each:
            kind = snake(layer.spec["class_name"])
            counts[kind] = counts.get(kind, -1) + 1
            yield f"{before}layers/{kind}" + (f"_{counts[kind]}" if counts[kind] else ""), layer


def write_new(file: Any, made: Mapping[str, list[Made]]) -> None:
    """As Keras 3 does."""
    for place, layer in places(made):
        file.create_group(f"{place}/vars").attrs["name"] = layer.spec["config"]["name"]
        for way, arrays in zip(("forward_layer/", "backward_layer/"), layer.ways, strict=False):
            way = way if len(layer.ways) == 2 else ""
            for n, array in enumerate(arrays):
                file[f"{place}/{way}cell/vars/{n}"] = array


def write_legacy(file: Any, made: Mapping[str, list[Made]], config: dict[str, Any]) -> None:
    """As Keras does where a name ends in .h5: groups by layer, or by model, and lists of names."""
    file.attrs["model_config"], file.attrs["keras_version"] = json.dumps(config), VERSION
    root = file.create_group("model_weights")
    groups = {name: each for name, each in made.items()} if len(made) > 1 else {}
    groups = {f"{name}_model": each for name, each in groups.items()} or {
        layer.spec["config"]["name"]: [layer] for layer in next(iter(made.values()))
    }
    root.attrs["layer_names"] = [name.encode() for name in groups]
    root.attrs["keras_version"] = VERSION
    for name, each in groups.items():
        group, names = root.create_group(name), []
        for layer in each:
            title, kind = layer.spec["config"]["name"], snake(inner_class(layer.spec))
            for way, arrays in zip(("forward", "backward"), layer.ways, strict=False):
                path = f"{title}/{way}_{title}/{kind}_cell" if len(layer.ways) == 2 else f"{title}/{kind}_cell"
                path = f"{name}/{path}" if name != title else path
                for word, array in zip(NAMES, arrays, strict=False):
                    names.append(f"{path}/{word}")
                    group[names[-1]] = array
        group.attrs["weight_names"] = [each.encode() for each in names]


def inner_class(spec: Mapping[str, Any]) -> str:
    """The class of the layer, or of the one that a Bidirectional wraps."""
    return spec["config"]["layer"]["class_name"] if spec["class_name"] == "Bidirectional" else spec["class_name"]
