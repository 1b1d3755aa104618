"""Read and write files of Keras: `.keras`, whole models in `.h5`, and weights in `.weights.h5`. This needs h5py, not
Keras.

All three are HDF5 files (a `.keras` file is a zip that contains one): trees of groups and arrays. The path of an array
is its key. In Keras 3 the path contains the class of the layer and its number in the model:
`layers/lstm_1/cell/vars/0`. In whole models in `.h5` (the legacy format) the path contains the name of the layer:
`model_weights/encoder/encoder/lstm_cell/kernel`. The configuration of the model, a JSON text, has the options of the
layers. A `.weights.h5` file of Keras has no configuration: there the shapes of the arrays say which cell a layer has,
and Keras' default options are assumed.

A place is the path of a layer's arrays in a Keras 3 file. A way is a direction: "", "forward" or "backward". A spec is
a layer or model as Keras serializes it: a dict with class_name, config and other entries.
"""

import io
import json
import re
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from ..ground.budget import Budget, shown
from ..ground.checks import fail
from ..ground.files import Foreign, members_of
from . import _hdf5
from .keras import ACTIVATIONS, KINDS, NAMES, from_arrays, is_of_keras, to_keras
from .weights import OF_GATES, Found, Weights, of_layer

CLASSES = {"lstm": "LSTM", "gru": "GRU", "rnn": "SimpleRNN"}
"""Keras' classes of layers, by this package's names of the cells."""

VERSION = "3.0.0"
"""The Keras version that written files name: the first version with this format."""


class Known(NamedTuple):
    """A layer in a model's configuration. place: the path of its arrays in a Keras 3 file; path: the names of the
    models and wrappers that contain the layer, then the layer's name; config: the layer as Keras serialized it."""

    place: str
    path: tuple[str, ...]
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Return the full name of the layer: the names in its path, joined by dots."""
        return ".".join(self.path)

    @property
    def own(self) -> str:
        """Return the layer's own name, without the models around it."""
        return self.path[-1]


def read(file: Foreign, only: Sequence[str] | None = None) -> Found:
    """Read a Keras file. Return its layers by name, all other arrays by key, the keys of each layer, and notes on what
    was not read. only: the names of the layers that must be readable, or None for all. Of an unreadable layer that is
    not in `only`, only the keys are returned."""
    _hdf5.check_h5py()
    # config: the model's configuration, if the file has one. contents: the arrays and texts of the HDF5 file.
    config, budget = None, file.budget
    if file.path.suffix == ".keras":
        members = dict(members_of(file))  # the files in the zip, by name
        config = budget.json(bytes(members["config.json"]))
        contents = _hdf5.read(members["model.weights.h5"], budget)
    else:
        contents = _hdf5.read(file.stream, budget)
        if text := contents.texts("/", "model_config"):  # an attribute of the whole file
            config = budget.json(text[0])
    known = None if config is None else list(walk(config, "", (), budget))
    # A legacy file lists the names of its layers in an attribute; a Keras 3 file does not.
    root = "model_weights" if "model_weights" in contents.attributes else "/"
    if layers := contents.texts(root, "layer_names"):
        # The version of Keras is an attribute of the file or of the group `root`; without it, assume Keras 3.
        version = [*contents.texts("/", "keras_version"), *contents.texts(root, "keras_version"), VERSION][0]
        arrays = by_layer(contents, "" if root == "/" else f"{root}/", layers)
        slope = "x/5" if version.startswith(("1", "2")) else "x/6"  # Keras 3 changed its hard_sigmoid
        found = gathered(arrays, names_in_legacy(arrays, known or []), known, slope, only)
    else:
        if not contents.arrays:
            raise ValueError("it must hold a model of Keras, or its weights, but got no arrays")
        found = gathered(contents.arrays, names_in_new(contents, budget), known, "x/6", only)
    layers, rest, keys, notes = found
    if SHARD.search(file.path.name):
        notes.append("the name is that of a shard of Keras, whose layers may lack a bias: save without max_shard_size")
    return layers, rest, keys, [*contents.notes, *notes, *notes_on(known or [], rest)]


SHARD = re.compile(r"_\d{5}\.weights\.h5$")
"""Matches the end of the name of a file that has a part of the arrays. Keras divides even the arrays of one layer."""

COUNTERPARTS = {
    "Dense": "mlx.nn.Linear, whose weight is the transposed kernel",
    "Embedding": "mlx.nn.Embedding, whose weight is embeddings",
    "LayerNormalization": "mlx.nn.LayerNorm(eps=1e-3), whose weight is gamma and whose bias is beta",
    "Conv1D": "mlx.nn.Conv1d, whose weight is kernel.transpose(2, 0, 1)",
}
"""Classes of Keras that are often used beside a recurrent layer, and the layers of MLX that take their arrays."""

MOST_NOTES = 20
"""The largest number of notes on layers that are printed."""


def notes_on(known: list[Known], rest: dict[str, Any]) -> list[str]:
    """Return notes for the user on facts that the converted arrays do not show: how a Bidirectional merges the outputs
    of its two directions, which layers of `mlx.nn` take the arrays of the other layers, and which wrappers are of a
    user's own class. known: the model's layers. rest: the arrays that belong to no recurrent layer, by key."""
    notes = []
    for each in known:
        kind, mode = each.config["class_name"], each.config["config"].get("merge_mode", "concat")
        if is_bidirectional(each.config) and mode != "concat":
            advice = "mlx_lstm.nn.stack(..., merge='sum') adds them" if mode == "sum" else "merge them in your model"
            notes.append(f"{shown(each.name)}: merge_mode is {shown(mode)}. A call returns both halves: {advice}")
        # inner_kind: the class of the layer inside a TimeDistributed, else of the layer itself. A TimeDistributed
        # applies its layer to each time step. The layers of `mlx.nn` in `COUNTERPARTS` do this without a wrapper,
        # because they work on the last axis; only Conv1d mixes time steps, so it gets no note here.
        wrapped = each.config["config"].get("layer") if kind == "TimeDistributed" else None
        inner_kind = wrapped.get("class_name") if isinstance(wrapped, Mapping) else kind
        if (
            isinstance(inner_kind, str)
            and inner_kind in COUNTERPARTS
            and (inner_kind == kind or inner_kind != "Conv1D")
            and not each.place.endswith("/layer")  # the note on the TimeDistributed around it suffices
        ):
            title = inner_kind if inner_kind == kind else f"TimeDistributed({inner_kind})"
            options = (wrapped if is_spec(wrapped) else each.config)["config"]
            counterpart = COUNTERPARTS[inner_kind]
            if is_quantized(options.get("dtype")):
                counterpart = "quantized, so its arrays are others than those of a layer of mlx.nn"
            notes.append(f"{shown(each.name)}: {title} is {counterpart}")
    # Keras 3 numbers the arrays of a layer: the path `vars/0` is the key vars.0 in `rest`.
    if notes and any(key.endswith("vars.0") for key in rest):
        notes.append("vars.0 of a layer is its kernel, embeddings or gamma, and vars.1 its bias or beta")
    wrappers = [each for each in known if is_own_wrapper(each.config)]
    rule = "does to the layer inside is not read"
    notes += [f"{shown(each.name)}: what its class {shown(str(each.config['class_name']))} {rule}" for each in wrappers]
    more = len(notes) - MOST_NOTES  # a foreign file may have any number of layers
    return notes if more <= 0 else [*notes[:MOST_NOTES], f"and {more} notes more on other layers"]


def is_quantized(policy: Any) -> bool:
    """Return whether a layer of Keras has quantized arrays. policy: the entry dtype of the layer's configuration. Only
    that of a quantized layer has the entry source_name, the dtype before quantization."""
    return is_spec(policy) and "source_name" in policy["config"]


def by_layer(file: _hdf5.Contents, root: str, layers: list[str]) -> dict[str, Any]:
    """Return the arrays of a legacy file (`.h5`), in which each layer has a list of the names of its arrays. root: the
    group of all layers, "" or "model_weights/". layers: the names of the layers. The keys of the returned dict are
    "layer//array", without the ":0" that ends an array's name in older files."""
    arrays = {}
    if len(set(layers)) < len(layers):
        raise ValueError("it is truncated or damaged: it names a layer twice")
    for layer in layers:
        for name in file.texts(root + layer, "weight_names"):
            key = f"{root}{layer}/{name}"
            if key not in file.arrays:
                raise ValueError(f"it is truncated or damaged: it names {shown(key)}, and has no such array")
            arrays[f"{layer}//{name.partition(':')[0]}"] = file.arrays[key]
    return arrays


def walk(config: Mapping[str, Any], place: str, path: tuple[str, ...], budget: Budget) -> Iterator[Known]:
    """Yield all layers in a model's configuration, also the layers of nested models. place: the path of the model's
    weights in a Keras 3 file, such as "layers/sequential/". path: the names of the nested models and wrappers that lead
    to this model, its own name last. `place` and `path` are empty for the outermost model, whose name is not used.
    """
    # In old versions of Keras the configuration of a Sequential is the list of layers itself.
    inner = config.get("config")
    layers = inner.get("layers") if isinstance(inner, Mapping) else inner
    counts: Counter[str] = Counter()  # how many layers of each class came before
    for each in layers if isinstance(layers, list) else []:
        if is_spec(each):
            kind = snake(budget.name(each["class_name"]))  # such as lstm
            yield from walk_layer(each, f"{place}layers/{numbered(kind, counts)}", path, budget)


def walk_layer(spec: Mapping[str, Any], place: str, path: tuple[str, ...], budget: Budget) -> Iterator[Known]:
    """Yield a layer and all layers inside of it: the layers of a model, the layer of a wrapper such as TimeDistributed,
    the cells of an RNN of several cells. spec: the layer as Keras serialized it; place: the path of its arrays in a
    Keras 3 file; path: the names of the models and wrappers around it."""
    path = (*path, budget.name(str(spec["config"].get("name", snake(budget.name(spec["class_name"]))))))
    # `place` and `path` get longer with each level of nesting, so their memory is limited, too.
    budget.take(len(place) + sum(map(len, path)), ".".join(path))
    yield Known(place, path, spec)
    yield from walk(spec, f"{place}/", path, budget)
    for part, inner in parts_of(spec).items():
        yield from walk_layer(inner, f"{place}/{part}", path, budget)


def parts_of(spec: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the layers inside a layer that is not a model, by their path below it: the layer of a wrapper such as
    TimeDistributed, or the cells of an RNN of several cells, each as an RNN with this cell alone. A Bidirectional
    counts as one layer, so its two directions are returned only if they are RNNs of several cells."""
    config = spec["config"]
    layer, cells = config.get("layer"), cells_of(spec)
    if is_bidirectional(spec):
        if not is_spec(layer) or not cells_of(layer):
            return {}
        backward = config.get("backward_layer")
        if not is_spec(backward):  # Keras then makes the backward layer as a copy of the forward layer
            name = str(layer["config"].get("name")).replace("forward_", "backward_", 1)
            backward = {**layer, "config": {**layer["config"], "name": name, "go_backwards": True}}
        return {"forward_layer": layer, "backward_layer": backward}
    if is_spec(layer):
        return {"layer": layer}
    parts = {}
    for n, (place, cell) in enumerate(placed(cells, "cell/cells")):
        kind = snake(str(cell["class_name"]))
        # Only the first cell has go_backwards: Keras reverses the time axis once, before the first cell.
        options = {"cell": cell, "go_backwards": n == 0 and bool(config.get("go_backwards"))}
        options |= {"name": cell["config"].get("name", kind)}
        parts[place] = {"class_name": "RNN", "config": options}
    return parts


def placed(cells: Sequence[Mapping[str, Any]], place: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (path, cell) for each cell of an RNN of several cells, also for those in a StackedRNNCells inside another.
    place: the path of the cells below the RNN."""
    counts: Counter[str] = Counter()  # how many cells of each class came before
    for cell in cells:
        path, inner = f"{place}/{numbered(snake(str(cell['class_name'])), counts)}", cell["config"].get("cells")
        if isinstance(inner, list):
            yield from placed([each for each in inner if is_spec(each)], f"{path}/cells")
        else:
            yield path, cell


def cells_of(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the cells of an RNN of several cells; an empty list for any other layer."""
    cell = spec["config"].get("cell")
    cells = cell["config"].get("cells") if is_spec(cell) else None
    return [each for each in cells if is_spec(each)] if isinstance(cells, list) else []


def is_spec(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a value in a configuration describes a layer or a cell."""
    return isinstance(value, Mapping) and "class_name" in value and isinstance(value.get("config"), Mapping)


def is_bidirectional(spec: Mapping[str, Any]) -> bool:
    """Return whether a layer is a Bidirectional of Keras or has a user's class derived from it. Only these have the
    options layer and merge_mode."""
    is_derived = is_spec(spec["config"].get("layer")) and "merge_mode" in spec["config"]
    return spec["class_name"] == "Bidirectional" or is_derived


def is_own_wrapper(spec: Mapping[str, Any]) -> bool:
    """Return whether a layer is a wrapper of a user's own class around a recurrent layer, such as one that normalises
    its weights."""
    layer = spec["config"].get("layer")
    if not is_spec(layer) or is_bidirectional(spec) or (spec["class_name"] == "TimeDistributed" and is_of_keras(spec)):
        return False
    return of_keras(layer, "LSTM") is not None


def numbered(kind: str, counts: Counter[str]) -> str:
    """Return the name that Keras 3 gives to the next layer of a class in a model's file: lstm, lstm_1, lstm_2. kind:
    the class, such as lstm. counts: how many layers of each class came before; this function adds the new one."""
    counts[kind] += 1
    return kind if counts[kind] == 1 else f"{kind}_{counts[kind] - 1}"


def snake(name: str) -> str:
    """Return the name of a class as Keras writes it in paths: SimpleRNN becomes simple_rnn."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=.)(?=[A-Z][a-z])", "_", name).lower()


class Direction(NamedTuple):
    """The arrays of one direction of a layer in a file. place: the path of the layer's arrays in the file. name: the
    names of the models that contain the layer, then the layer's name; own: only the layer's name. way: "", "forward" or
    "backward". keys: the keys of the arrays, in Keras' order."""

    place: str
    name: str
    own: str
    way: str
    keys: list[str]


def names_in_new(file: _hdf5.Contents, budget: Budget) -> list[Direction]:
    """Find the recurrent layers of a Keras 3 file; return one `Direction` for each direction of each layer. A group
    `cell/vars` of the file holds the arrays of one direction: two matrices and sometimes a bias."""
    groups: dict[str, list[str]] = {}  # the keys of the arrays, such as "layers/lstm/cell/vars/0", by their group
    for key in file.arrays:
        parent, _, last = key.rpartition("/")
        # An RNN of stacked cells has one such group per cell, under cell/cells, and deeper if stacks lie in stacks.
        if re.search(r"(^|/)cell(/cells/[^/]+)*/vars$", parent) and last.isdecimal():
            groups.setdefault(parent, []).append(key)
    directions = []
    for parent, keys in groups.items():
        keys.sort(key=lambda key: int(key.rpartition("/")[2]))  # by the number at the end
        place = re.sub(r"(/cell)?/vars$", "", parent)
        match = re.search(r"/(forward|backward)_layer$", place)  # a direction of a Bidirectional
        place = place[: match.start()] if match else place
        # steps: the paths of the models around the layer, the outermost first, and then of the layer itself.
        parts = [part for part in place.split("/") if part]
        steps = ["/".join(parts[: n + 1]) for n, part in enumerate(parts) if part not in ("layers", "cell", "cells")]
        # Newer files store each layer's name in an attribute. For older files the last part of the path is taken.
        names = [(file.texts(f"{step}/vars", "name") or [step.rpartition("/")[2]])[0] for step in steps]
        budget.take(sum(map(len, names)), place)
        # A file with a part of a layer's arrays may have the recurrent kernel and the bias, but not the kernel.
        has_first = keys[0].rpartition("/")[2] == "0"
        if all(np.ndim(file.arrays[key]) == 2 for key in keys[:2]) and len(keys) > 1 and has_first:  # two matrices
            way = match[1] if match else ""
            directions.append(Direction(place, ".".join(names), (names or [""])[-1], way, keys))
    return directions


def names_in_legacy(arrays: Mapping[str, Any], known: list[Known]) -> list[Direction]:
    """Find the recurrent layers of a legacy `.h5` file; return one `Direction` for each direction of each layer. Each
    group of the file with an array `recurrent_kernel` is a direction. arrays: by keys "layer//array", such as
    "encoder//encoder/lstm_cell/kernel". known: the layers of the configuration."""
    directions: list[Direction] = []
    taken: set[tuple[str, str]] = set()  # the (name, way) of all directions so far
    # paths: for each group of arrays, such as "encoder//encoder/lstm_cell", the names of the models and layers in it. A
    # cell's name at the end is left out: its number may differ between the two directions.
    paths: dict[str, list[str]] = {}
    for parent in dict.fromkeys(key.rpartition("/")[0] for key in arrays):
        # A kernel with more than two axes belongs to a ConvLSTM, which is not read.
        if f"{parent}/recurrent_kernel" in arrays and np.ndim(arrays[f"{parent}/recurrent_kernel"]) <= 2:
            layer, _, inner = parent.partition("//")
            parts = [part for part in inner.split("/") if part]
            paths[parent] = [layer, *(parts[:-1] if len(parts) > 1 and "cell" in parts[-1] else parts)]
    inside: dict[tuple[str, ...], dict[str, None]] = {}  # by a model's or layer's path: the names in it, each once
    for path in paths.values():
        inside.setdefault(tuple(path[:-1]), {})[path[-1]] = None
    both = {each.own for each in known if is_bidirectional(each.config)}
    for parent, (layer, *parts) in paths.items():
        keys = [f"{parent}/{name}" for name in NAMES if f"{parent}/{name}" in arrays]
        inner, way = parent.partition("//")[2], ""
        names = inside[(layer, *parts)[:-1]]
        if parts and len(names) == 2 and (layer, *parts)[-2] in both:  # the first name is the forward layer's
            way = ("forward", "backward")[list(names).index(parts.pop())]
        # "forward_" may also begin the name of an ordinary layer. It means a direction only if the group of the other
        # direction is in the file, too.
        elif parts and (match := re.match(r"(forward|backward)_", parts[-1])):
            other = {"forward": "backward", "backward": "forward"}[match[1]] + parts[-1][match.end() - 1 :]
            if other in names:
                parts.pop()
                way = match[1]
        # Keras repeats names: "model//model/lstm" is the layer lstm of a model, "lstm//model/lstm" the layer lstm
        # itself.
        if parts and parts[0] == layer:
            parts.pop(0)
        elif parts and parts[-1] == layer:
            parts = []
        name, own = ".".join([layer, *parts]), [layer, *parts][-1]
        if (name, way) in taken:  # the layer has several stacked cells: add the cell's name
            own = inner.rpartition("/")[2]
            name += f".{own}"
        taken.add((name, way))
        directions.append(Direction(f"{layer}/{inner}", name, own, way, keys))
    return directions


def gathered(
    arrays: Mapping[str, Any],
    directions: list[Direction],
    known: list[Known] | None,
    slope: str,
    only: Sequence[str] | None,
) -> Found:
    """Build `Weights` from the arrays of all directions. Return (layers, others, keys, notes): the layers in the
    order of the model's configuration, the arrays that belong to no recurrent layer, the keys of each layer, and notes.
    Arrays of the optimizer and of random generators are left out; a note says how many.

    known: the layers of the configuration; None if the file has none. only: the layers that must be readable. slope:
    the hard_sigmoid of this version of Keras: "x/5" is clip(x/5 + 0.5, 0, 1), "x/6" is clip(x/6 + 0.5, 0, 1).
    """
    layers: dict[str, list[Direction]] = {}  # the directions of each layer, by its place or, in a legacy file, its name
    legacy = any("//" in key for key in arrays)  # `by_layer` makes such keys
    for each in directions:
        layers.setdefault(each.name if legacy else each.place, []).append(each)
    told = told_layers(layers, known or [], legacy)
    rank = {id(each): n for n, each in enumerate(known or [])}  # the position of each layer in the configuration
    # A layer is called by its own name. If several layers have this name, the names of the models around the layer come
    # before it. titles: for each layer an object with these names, a `Known` or a `Direction`. owners: how many layers
    # have each own name.
    titles = {place: told.get(place, each[0]) for place, each in layers.items()}
    owners = Counter(title.own for title in titles.values())
    found: dict[str, Weights] = {}
    keys: dict[str, list[str]] = {}
    silent: list[str] = []  # the layers whose options are in no configuration
    own: list[str] = []  # the layers of a user's class that derives from a class of Keras
    more = more_arrays(arrays, directions)
    # Layers that the configuration does not list come last.
    for place in sorted(layers, key=lambda place: (rank.get(id(told.get(place)), len(rank)), natural(place))):
        ways = sorted(layers[place], key=lambda direction: direction.way == "backward")  # the backward one last
        title = titles[place]
        name = title.own if owners[title.own] == 1 else title.name
        name = place.replace("/", ".") if name in found else name
        arrays_of_ways = [[arrays[key] for key in way.keys] for way in ways]
        config = told[place].config if place in told else None
        read_as = None if config is None else of_keras(config, kind_of(*arrays_of_ways[0]))
        try:
            for key in (key for way in ways for key in more.get(cell_of(way), [])):
                fail("convert", f"{shown(name)} must have no arrays but {', '.join(NAMES)}", shown(key))
            check_cell(config, name)
            found[name] = from_arrays("convert", arrays_of_ways, read_as, name, slope=slope)
            if read_as is None:
                silent.append(name)
            elif read_as is not config:
                own.append(name)
        except ValueError:
            if only is None or name in only:
                raise
        keys[name] = [key.replace("//", "/") for way in ways for key in way.keys]
    taken = {key for each in directions for key in each.keys}.union(*more.values())
    rest = {key: array for key, array in arrays.items() if key not in taken}
    left_out = {key for key in rest if key.startswith("optimizer") or "seed_generator" in key}
    notes = [f"{len(left_out)} arrays of the optimizer and of random generators are left out"] if left_out else []
    rule = "the file does not tell options such as activation and go_backwards: Keras 3's defaults are assumed"
    notes += notes_naming(silent, rule)
    notes += notes_naming(own, "a class of your own, read as the class of Keras from which it derives")
    return found, {plain(key): array for key, array in rest.items() if key not in left_out}, keys, notes


def notes_naming(names: list[str], text: str) -> list[str]:
    """Return a list with one note, the names of these layers and the text; an empty list if there are no names."""
    first = ", ".join(map(shown, names[:MOST_NOTES])) + (" and others" if len(names) > MOST_NOTES else "")
    return [f"{first}: {text}"] if names else []


def told_layers(layers: Mapping[str, list[Direction]], known: Sequence[Known], legacy: bool) -> dict[str, Known]:
    """Find each layer's entry in the configuration. Return the entries by the keys of `layers`; layers that the
    configuration does not list are left out. layers: the directions of each layer, by the layer's place or, in a legacy
    file, by its name. known: the entries of the configuration."""
    by_key = {each.name if legacy else each.place: each for each in known}
    told = {key: by_key[key] for key in layers if key in by_key}
    if not legacy:
        return told
    # In a legacy file the names between the outermost and the innermost layer may differ from those in the
    # configuration. So compare the outermost and the innermost name only, the keys of `ends`. If several layers have
    # both names, take the layer whose other names are in the path, too.
    ends: dict[tuple[str, str], list[Known]] = {}
    for each in known:
        # The entry describes a single recurrent cell, maybe in a Bidirectional, or maybe a user's cell.
        if of_keras(each.config, "LSTM") is not None or own_cell(each.config):
            ends.setdefault((each.path[0], each.path[-1]), []).append(each)
    for key in layers.keys() - told.keys():
        outermost, _, inner = layers[key][0].keys[0].partition("//")
        parts = inner.split("/")[:-1]  # the last part is the array's name
        # found: go through the parts of the path from the last to the first, and take the layers of the configuration
        # whose innermost name is this part and whose outermost name is `outermost`. Stop at the first part with such
        # layers.
        found = next((ends[outermost, part] for part in reversed(parts) if (outermost, part) in ends), [])
        if len(found) > 1:
            found = [each for each in found[:MOST_ALIKE] if set(each.path) <= {outermost, *parts}]
        if len(found) == 1:
            told[key] = found[0]
    return told


MOST_ALIKE = 8
"""The largest number of layers with the same outermost and innermost name that are compared. A foreign file may have
any number of them."""


def of_keras(spec: Mapping[str, Any], kind: str) -> Mapping[str, Any] | None:
    """Return the description of a layer or cell with a class of Keras: unchanged if its class is one of Keras, with the
    class `kind` if it is a user's class derived from Keras, else None. A derived class is recognised by the option
    recurrent_initializer, which all recurrent classes of Keras write and no others."""
    config, cell = spec["config"], spec["config"].get("cell")
    if is_spec(cell):  # an RNN, or a user's class derived from RNN
        read_as = of_keras(cell, kind)
        is_same = read_as is cell and spec["class_name"] == "RNN"
        changed = {"class_name": "RNN", "config": {**config, "cell": read_as}}
        return None if read_as is None else spec if is_same else changed
    if spec["class_name"] in (*KINDS, "Bidirectional") and is_of_keras(spec):
        return spec
    if is_bidirectional(spec):
        return {"class_name": "Bidirectional", "config": config}
    return {"class_name": kind, "config": config} if "recurrent_initializer" in config else None


def own_cell(config: Mapping[str, Any]) -> str:
    """Return the class of the cell of an `RNN` of Keras, or of a class derived from it, if the cell's class is a
    user's own that derives from no class of Keras; else an empty text."""
    cell = config["config"].get("cell")
    if not is_spec(cell) or cells_of(config) or of_keras(cell, "LSTM") is not None:
        return ""
    return str(cell["class_name"])


def check_cell(config: Mapping[str, Any] | None, name: str) -> None:
    """Raise ValueError for a layer whose `own_cell` is not empty: nothing says what such a cell computes. config: the
    layer's description, if the file has one. name: the layer's name, for the error text."""
    if config is not None and (kind := own_cell(config)):
        rule = f"the cell of {shown(name)} must be of a class of Keras or of one derived from it"
        fail("convert", rule, shown(kind))


def kind_of(kernel: Any, recurrent_kernel: Any, *_: Any) -> str:
    """Return Keras' class of the layer with these arrays, by the shape [H, GH] of its recurrent kernel. This function
    does not check the shapes; the caller does so later."""
    H, columns = [*np.shape(recurrent_kernel), 1, 1][:2]
    return CLASSES[OF_GATES.get(columns // max(H, 1), "lstm")]


def more_arrays(arrays: Mapping[str, Any], directions: list[Direction]) -> dict[str, list[str]]:
    """Return the keys of arrays in a cell's group besides the kernel, recurrent kernel and bias, by the cell's group. A
    user's cell may have such arrays, for example a peephole. The state of a random generator does not count."""
    taken = {key for each in directions for key in each.keys}
    cells = {cell_of(each) for each in directions}
    found: dict[str, list[str]] = {}
    for key in arrays:
        if key in taken or "seed_generator" in key:
            continue
        # outer: the groups that contain the array.
        for outer in (key[: slash.start()] for slash in re.finditer("/", key)):
            if outer in cells:
                found.setdefault(outer, []).append(key)
    return found


def cell_of(direction: Direction) -> str:
    """Return the group of a file that holds the arrays of a direction's cell, without "/vars" at its end."""
    return direction.keys[0].rpartition("/")[0].removesuffix("/vars")


def natural(text: str) -> list[Any]:
    """Return a sort key that puts "lstm_2" before "lstm_10": the text is divided into numbers and other parts."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)]


def plain(key: str) -> str:
    """Return the key of an array in a Keras file as a key for file formats without folders: with dots for slashes. A
    key is a path such as "layers/lstm/vars/0" or, in an older file, "layer//name of the array". The layer's name is
    left out if the name of the array begins with it: "lstm//lstm/kernel" becomes "lstm.kernel"."""
    layer, _, name = key.rpartition("//")
    return (name if not layer or name.startswith(f"{layer}/") else f"{layer}/{name}").replace("/", ".")


# --- Writing ---------------------------------------------------------------------------------------------------------


class KerasLayer(NamedTuple):
    """A Keras layer to be written to a file. spec: its description as Keras serializes it; ways: for each direction,
    the list of its arrays."""

    spec: dict[str, Any]
    ways: list[list[np.ndarray]]


def write(path: Path, ending: str, layers: Mapping[str, Weights]) -> None:
    """Write a Keras model: one stack becomes a Sequential; several stacks become a model of Sequentials, each with its
    own input. ending: ".keras", ".h5" or ".weights.h5", which selects the format.

    HDF5 writes into memory first, because on a full disk HDF5 fails in a way from which no code can recover.
    """
    _hdf5.check_h5py()
    import h5py  # only to write files: a child process reads them

    # HDF5 would read a slash in a name as a group; a stack without a name is called "recurrent".
    given, layers = layers, {name.replace("/", ".") or "recurrent": weights for name, weights in layers.items()}
    if len(layers) < len(given):
        rule = "names of layers must differ in more than a slash and a dot, and none be recurrent beside an empty name,"
        fail("convert", rule, ", ".join(map(shown, given)))
    made = {name: stack_of(name, weights) for name, weights in layers.items()}
    models = {name: sequential(name, stack) for name, stack in made.items()}
    config = next(iter(models.values())) if len(models) == 1 else functional(models)
    data = io.BytesIO()
    with h5py.File(data, "w") as file:
        if ending == ".h5":
            write_legacy(file, made, config)
        else:
            write_new(file, made)
        # Keras ignores this configuration; `read` of this module finds the options of the layers in it.
        if ending == ".weights.h5":
            file.attrs["model_config"] = json.dumps(config)
    if ending != ".keras":
        path.write_bytes(data.getbuffer())
        return
    metadata = {"keras_version": VERSION, "date_saved": time.strftime("%Y-%m-%d@%H:%M:%S")}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata.json", json.dumps(metadata))
        archive.writestr("config.json", json.dumps(config))
        archive.writestr("model.weights.h5", data.getbuffer())


def stack_of(name: str, weights: Weights) -> list[KerasLayer]:
    """Return the Keras layers for a stack of layers, each with its arrays. A layer with two directions becomes a
    Bidirectional. name: the name of the stack; if it has several layers, their names get numbers."""
    with of_layer(name):  # adds the stack's name to the text of an error
        of_keras = to_keras(weights)  # for each layer its arrays in Keras' order, the forward direction first
    stack = []
    # layer: the `Weights` of one layer.
    for n, (layer, arrays) in enumerate(zip(weights.each(), of_keras, strict=True)):
        kind = CLASSES[layer.cell.op]  # such as "LSTM"
        title = name + (f"_{n}" if len(weights.layers) > 1 else "")
        D = layer.directions
        count = len(arrays) // D  # the arrays of one direction: the last of three is the bias
        config = config_of(layer, str(arrays[0].dtype), count > 2)
        shape = [None, None, layer.input_size]  # batch and time may have any size
        spec = spec_of(kind, config | {"name": f"forward_{title}" if D == 2 else title}, shape)
        if D == 2:
            backward = spec_of(kind, config | {"name": f"backward_{title}", "go_backwards": True}, shape)
            both = {"name": title, "merge_mode": "concat", "layer": spec, "backward_layer": backward}
            spec = spec_of("Bidirectional", both, shape)
        stack.append(KerasLayer(spec, [arrays[way * count : (way + 1) * count] for way in range(D)]))
    return stack


def config_of(weights: Weights, dtype: str, use_bias: bool) -> dict[str, Any]:
    """Return the arguments for the constructor of a Keras layer. weights: the weights of this one layer. dtype: the
    name of its dtype, such as "float32". use_bias: whether the layer has a bias. All layers of a stack have one if any
    of them has: `to_keras` adds zeros to the others."""
    words = {ours: theirs for theirs, ours in ACTIVATIONS.items()}  # Keras' name by our name of an activation
    cell = weights.cell
    # names: Keras has one activation for the candidate and one for all other gates. `to_keras` refuses other cells.
    names = cell.activations if cell.op == "rnn" else (cell.activations[2], cell.activations[0])
    for name in names:
        if name not in words:
            raise ValueError(f"[convert] activations must be those of Keras 3, {', '.join(words)}, but got {name!r}.")
    config = {"units": weights.hidden_size, "activation": words[names[0]], "use_bias": use_bias, "dtype": dtype}
    config |= {"recurrent_activation": words[names[1]]} if len(names) > 1 else {}
    config |= {"reset_after": cell.reset == "after"} if cell.reset else {}  # only a GRU has a reset
    return config | {"return_sequences": True, "go_backwards": weights.reverse}


def spec_of(kind: str, config: dict[str, Any], shape: list[int | None]) -> dict[str, Any]:
    """Return the description of a layer as Keras serializes it. kind: the layer's class. config: the arguments of its
    constructor. shape: the shape of its input, with None for an axis of any size; an InputLayer has this shape in its
    config."""
    spec = {"module": "keras.layers", "class_name": kind, "config": config, "registered_name": None}
    return spec | ({"build_config": {"input_shape": shape}} if kind != "InputLayer" else {})


def sequential(name: str, made: list[KerasLayer]) -> dict[str, Any]:
    """Return the description of a Sequential model of the layers `made`, as Keras serializes it."""
    shape = made[0].spec["build_config"]["input_shape"]
    dtype = inner(made[0].spec)["config"]["dtype"]  # a Bidirectional has none of its own
    first = spec_of("InputLayer", {"batch_shape": shape, "dtype": dtype, "name": f"{name}_input"}, shape)
    config = {"name": f"{name}_model", "layers": [first, *(each.spec for each in made)], "build_input_shape": shape}
    return spec_of("Sequential", config, shape) | {"module": "keras"}  # Keras' layers are in keras.layers


def inner(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the description of a layer itself, or, for a Bidirectional, of its forward layer."""
    return spec["config"]["layer"] if spec["class_name"] == "Bidirectional" else spec


def functional(models: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the description of a model that contains several models, each with its own input, as Keras serializes
    it. models: the descriptions of these models by name."""
    # In Keras a tensor is named by [the layer that made it, the number of its call, the number of its output].
    layers, inputs, outputs = [], [], []
    for name, spec in models.items():
        shape, own = spec["build_config"]["input_shape"], spec["config"]["name"]
        dtype = spec["config"]["layers"][0]["config"]["dtype"]
        input_layer = spec_of("InputLayer", {"batch_shape": shape, "dtype": dtype, "name": f"{name}_x"}, shape)
        tensor = {"shape": shape, "dtype": dtype, "keras_history": [f"{name}_x", 0, 0]}
        node = {"args": [{"class_name": "__keras_tensor__", "config": tensor}], "kwargs": {}}  # a call with this tensor
        layers.append(input_layer | {"name": f"{name}_x", "inbound_nodes": []})
        layers.append(spec | {"name": own, "inbound_nodes": [node]})
        inputs.append([f"{name}_x", 0, 0])
        outputs.append([own, 0, 0])
    config = {"name": "recurrent_layers", "layers": layers, "input_layers": inputs, "output_layers": outputs}
    module = "keras.src.models.functional"  # the same module in all versions of Keras 3
    return {"module": module, "class_name": "Functional", "config": config, "registered_name": None}


def write_new(file: Any, made: Mapping[str, list[KerasLayer]]) -> None:
    """Write the arrays of all layers at the paths of Keras 3, such as layers/lstm_1/cell/vars/0. made: the layers of
    each stack, by the stack's name. layer.ways: for each direction the list of its arrays."""
    containers: Counter[str] = Counter()  # how many Sequentials have been written
    for layers in made.values():
        # A single stack is written as the whole model. Each of several stacks is written as a Sequential inside the
        # model, under a path of its own.
        before = "" if len(made) == 1 else f"layers/{numbered('sequential', containers)}/"
        counts: Counter[str] = Counter()  # how many layers of each class this stack has so far
        for layer in layers:
            place = f"{before}layers/{numbered(snake(layer.spec['class_name']), counts)}"  # such as layers/lstm_1
            file.create_group(f"{place}/vars").attrs["name"] = layer.spec["config"]["name"]
            for way, arrays in zip(("forward_layer/", "backward_layer/"), layer.ways, strict=False):
                way = way if len(layer.ways) == 2 else ""  # only a Bidirectional has a group for each direction
                for n, array in enumerate(arrays):
                    file[f"{place}/{way}cell/vars/{n}"] = array


def write_legacy(file: Any, made: Mapping[str, list[KerasLayer]], config: dict[str, Any]) -> None:
    """Write a legacy `.h5` file of Keras: it has a group for each layer or model, and in each group the list of the
    names of its arrays. made: the layers of each stack, by the stack's name. config: the description of the model."""
    file.attrs["model_config"], file.attrs["keras_version"] = json.dumps(config), VERSION
    root = file.create_group("model_weights")
    # groups: the layers in each group of the file. Several stacks are models, with one group for each model; a single
    # stack has one group for each layer.
    if len(made) > 1:
        groups = {f"{name}_model": layers for name, layers in made.items()}
    else:
        groups = {layer.spec["config"]["name"]: [layer] for layers in made.values() for layer in layers}
    root.attrs["layer_names"] = [name.encode() for name in groups]
    root.attrs["keras_version"] = VERSION
    for name, each in groups.items():
        group, names = root.create_group(name), []  # names: the paths of the group's arrays
        for layer in each:
            title, kind = layer.spec["config"]["name"], snake(inner(layer.spec)["class_name"])  # kind: such as lstm
            for way, arrays in zip(("forward", "backward"), layer.ways, strict=False):
                # For example lstm/lstm_cell, or in the group of a model a_model/lstm/lstm_cell.
                path = f"{title}/{way}_{title}/{kind}_cell" if len(layer.ways) == 2 else f"{title}/{kind}_cell"
                path = f"{name}/{path}" if name != title else path
                for word, array in zip(NAMES, arrays, strict=False):
                    names.append(f"{path}/{word}")
                    group[names[-1]] = array
        group.attrs["weight_names"] = [each.encode() for each in names]
