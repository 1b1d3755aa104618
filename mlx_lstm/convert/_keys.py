"""Find out which layer, direction and array each key of a file means, and make the keys for a file to be written.

A key is the name of an array in a file, such as `encoder.weight_ih_l0_reverse`. The leaf of a key says which array of a
layer it is, here weight_ih. The way of a key is the direction, 0 forward or 1 reverse. A `Group` collects the keys of
one layer and direction, or of both directions if they share arrays. A template is a pattern of keys, such as
"{name}.{array}".

In `Weights` one direction's arrays are Wx [GH, I], Wh [GH, P], the biases bx and bh [GH], Wp [P, H] (a projection) and
peephole. These names are called words; `ENTRIES` has the word for each leaf. A file may have other biases: b, the only
bias, and bhn [H], the recurrent bias of a GRU's candidate. Sizes: G gates, H units, I input features, P numbers in h, D
directions, K layers.
"""

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..engines.cells import ACTIVATIONS
from ..engines.directions import OWN_AXIS, part
from ..engines.problem import Arrays
from ..ground.budget import shown
from ..ground.checks import check_array, check_option, fail
from . import mlx, torch
from .keras import NAMED, arrays_of, direction
from .keras import NAMES as KERAS_NAMES
from .layers import check_keys
from .mlx import to_ops
from .torch import assembled, gates_of, refuse_source, source_of
from .weights import OF_GATES, OURS, Weights, as_stored, from_one_bias, gate_order, of_layer, rows_reordered
from .weights import to_mlx as as_mlx

STYLES = ("torch", "mlx", "two-biases", "keras", "ops")
"""The styles of keys that a file may have: as in PyTorch; as in MLX; as in MLX but with two biases, `bias_ih` and
`bias_hh`; as in Keras; as the arguments of `mlx_lstm.lstm`, `gru` and `rnn`."""

WAYS = ("forward", "backward")
"""The default words for the forward and the reverse direction in keys."""

WAY_NUMBERS = {"forward": 0, "fwd": 0, "backward": 1, "bwd": 1, "back": 1, "reverse": 1}
"""The words for a direction in the keys of all formats, and the number of this direction: 0 forward, 1 reverse."""

ENTRIES = {"weight_ih": "Wx", "Wx": "Wx", "Wxh": "Wx", "kernel": "Wx"}
ENTRIES |= {"weight_hh": "Wh", "Wh": "Wh", "Whh": "Wh", "recurrent_kernel": "Wh"}
ENTRIES |= {"weight_hr": "Wp", "Wp": "Wp", "peephole": "peephole", "bias_ih": "bx", "bias_hh": "bh"}
ENTRIES |= {"bias": "b", "b": "b", "bhn": "bhn", "recurrent_bias": "bh"}
"""The leaves of keys in all formats, and for each leaf the array's name in `Weights`. Two names are not in `Weights`:
b, the only bias of a layer, and bhn, the recurrent bias of a GRU's candidate."""

REFUSED = dict.fromkeys(
    ("gamma", *(f"norm{of}_{part}" for of in ("", "_input", "_c") for part in ("scale", "shift"))),
    "no format holds layer normalisation (the options norm= and layer_norm= of mlx_lstm run it)",
)
REFUSED["params.0"] = "no format holds the cell of a layer Pointwise"
"""The leaves of arrays that no format can hold, and the reason for the error text. Without such an array a layer would
compute something else, so the whole layer is refused."""

PARTNERS = {"weight_ih": "weight_hh", "Wx": "Wh", "Wxh": "Whh", "kernel": "recurrent_kernel"}
"""The leaves of the two matrices that each layer has, by format: {leaf of the input weight: leaf of the recurrent
weight}."""

# TORCH_LEAF matches the last part of a PyTorch key, such as weight_ih_l0_reverse. LEAF matches the last part of any
# other key, such as Wx_fwd. PATH_WAY matches a word for a direction before the last part, such as fwd in
# encoder.fwd.Wx.
TORCH_LEAF = re.compile(r"(weight_ih|weight_hh|weight_hr|bias_ih|bias_hh)(?:_l(\d+))(_reverse)?")
ANY_WORD = "|".join(sorted(ENTRIES, key=len, reverse=True))
LEAF = re.compile(rf"({ANY_WORD})(?:_({'|'.join(WAY_NUMBERS)}))?")
PATH_WAY = re.compile(rf"(?<![A-Za-z])({'|'.join(WAY_NUMBERS)})(?![A-Za-z])")


class Place(NamedTuple):
    """The layer to which an array belongs: the name of its stack, the number of the layer and the number of the
    direction."""

    name: str
    layer: int
    way: int


class Told(NamedTuple):
    """What the metadata of a file say. options: the options of a layer's cell, by the key of each of its matrices.
    places: by key, the stack, layer and direction to which an array belongs; empty if the keys suffice to find the
    layers."""

    options: Mapping[str, Mapping[str, Any]]
    places: Mapping[str, Place]


class Group(NamedTuple):
    """The keys of the arrays of one layer and direction, such as lstm.weight_ih_l0 and lstm.weight_hh_l0.

    own: a text that differs for each layer and direction. name: the common name of all layers and directions of a
    stack, such as lstm. layer, way: the numbers of the layer and the direction; None if the keys do not contain them.
    numbered: whether the number in the keys is certainly the layer's number, as in torch's `_l0`. keys: the full key of
    each array, by its leaf, such as weight_ih. form: a full key with a NUL character in place of the leaf; it is the
    same for all keys of the group.
    """

    own: str
    name: str
    layer: int | None
    way: int | None
    numbered: bool
    keys: dict[str, str]
    form: str

    def title(self, leaf: str) -> str:
        """Return the full key of the array whose name in keys is `leaf`, such as weight_ih. If the file lacks the
        array, return the key that it would have."""
        return self.keys.get(leaf, self.form.replace("\0", leaf))


def parse(key: str, pattern: re.Pattern[str] | None, ways: Sequence[str]) -> tuple[str, Group] | None:
    """Split the key of an array into its parts. Return (leaf, group): the leaf says which array it is, such as
    weight_ih; the group is a new `Group` with the layer, direction and name, but still without keys. Return None if the
    key belongs to no recurrent layer. pattern: the regular expression of a template, or None for the usual keys. ways:
    the words for both directions in a template's keys."""
    if pattern is not None:
        # If a layer's name is empty, its keys do not begin with the dot that follows {name} in a template. So a dot is
        # added before the key if the key alone does not match.
        match = pattern.fullmatch(key) or pattern.fullmatch("." + key)
        if match is None:
            return None
        fields = match.groupdict()  # the parts of the key, by the fields of the template: name, layer, array, way
        layer = int(fields["layer"]) if fields.get("layer") else None
        way = list(ways).index(fields["way"]) if fields.get("way") is not None else None
        # start: the position of the leaf in the key, without the dot that may have been added.
        start = match.start("array") - (len(match.string) - len(key))
        form = key[:start] + "\0" + key[start + len(fields["array"]) :]
        name = fields.get("name") or ""
        own = ".".join(str(part) for part in (name, layer, fields.get("way")) if part not in (None, ""))
        return fields["array"], Group(own, name, layer, way, layer is not None, {}, form)
    # Without a template, recognise the usual keys: of PyTorch first, then of all other formats. source: the
    # parts of the key, if torch computes a weight of a layer from this array, as weight norm does; else None. Such an
    # array gets into the same group as the weight, and `words_of` raises an error for the group.
    source = source_of(key)
    path, dot, last_part = (source.path + source.weight if source else key).rpartition(".")
    if match := TORCH_LEAF.fullmatch(last_part):  # match: 1 the leaf, 2 the layer's number, 3 "_reverse" or None
        form = f"{path}{dot}\0{last_part[match.end(1) :]}"
        own = f"{path}{dot}{last_part[match.end(1) + 1 :]}"  # such as lstm.l0, which error texts print
        group = Group(own, path, int(match[2]), int(bool(match[3])), True, {}, form)
        return key if source else match[1], group
    if not (match := LEAF.fullmatch(last_part)):  # match: 1 the leaf, 2 the word for the direction or None
        return None
    form = f"{path}{dot}\0{last_part[match.end(1) :]}"
    # The word for a direction is either in the last part of the key, as in Wx_fwd, or before it, as in fwd.Wx.
    way, name = WAY_NUMBERS[match[2]] if match[2] else None, path
    if way is None and (found := PATH_WAY.search(path)):
        way, name = WAY_NUMBERS[found[1]], merged(path, found)
    # A number at the end of the name, as in "lstm.0", is taken for the layer's number.
    base, _, number = name.rpartition(".")
    layer = int(number) if number.isdecimal() else None
    # The argument False: it is not certain that the number is the layer's, since it may also count other modules.
    return match[1], Group(path, base if layer is not None else name, layer, way, False, {}, form)


def merged(path: str, found: re.Match[str]) -> str:
    """Return `path` without its word for a direction and without one separator next to the word: "encoder.forward.lstm"
    becomes "encoder.lstm". found: the match of the word in the path."""
    before, after = path[: found.start()], path[found.end() :]
    return (before + after[1:] if not before or before[-1] == "." else before[:-1] + after).rstrip(".")


def pattern_of(template: str, ways: Sequence[str]) -> re.Pattern[str]:
    """Return a regular expression that matches the keys of a template such as "{name}.{layer}.{array}". The groups of
    the expression have the names of the template's fields. ways: the words for both directions, for the field {way}."""
    # ANY_WORD is a regular expression that matches any word for an array, such as weight_ih: the keys of `ENTRIES`.
    fields = {"{name}": "(?P<name>.*?)", "{layer}": r"(?P<layer>\d+)", "{array}": f"(?P<array>{ANY_WORD})"}
    fields["{way}"] = f"(?P<way>{'|'.join(map(re.escape, ways))})"
    check_template(template)
    return re.compile("".join(fields.get(each, re.escape(each)) for each in re.split(r"(\{\w+\})", template)))


def check_template(template: str) -> None:
    """Raise ValueError unless a template of keys has {array}, and no unknown or repeated field."""
    fields = re.findall(r"\{(\w*)\}", template)
    if "array" not in fields or set(fields) - {"name", "layer", "way", "array"} or len(fields) != len(set(fields)):
        fail("convert", "keys must have {array}, and maybe {name}, {layer} and {way}, each once,", repr(template))


def groups_of(
    keys: Iterable[str], template: str | None, ways: Sequence[str], places: Mapping[str, Place]
) -> list[Group]:
    """Sort the keys into groups, one per layer and direction. Return the groups that contain a matrix of a recurrent
    layer. template: a pattern of the keys, or None for the usual keys. ways: the words for both directions in the
    template. places: the place of an array, by key, if the file's metadata say it."""
    pattern, found = None if template is None else pattern_of(template, ways), {}
    for key in keys:
        if parsed := parse(key, pattern, ways):
            leaf, group = parsed
            if key in places:
                name, layer, way = places[key]
                # The argument True: the metadata say that `layer` is the layer's number.
                group = group._replace(own=name, name=name, layer=layer, way=way, numbered=True)
            # Keys of the same layer and direction share the group of the first of them.
            found.setdefault((group.own, group.layer, group.way, group.form), group).keys[leaf] = key
    # unsure: the leaves that also occur in other layers: all but those of both matrices, such as weight_ih and
    # weight_hh. "kernel" is unsure, because a dense layer of Keras has it, too.
    unsure = ENTRIES.keys() - {*PARTNERS, *PARTNERS.values()} | {"kernel"}
    return [group for group in found.values() if group.keys.keys() - unsure]


def layers_of(
    arrays: Mapping[str, Any],
    told: Told,
    *,
    keys: str | None = None,
    ways: Sequence[str] = WAYS,
    order: str | None = None,
    nonlinearity: str | None = None,
    only: Sequence[str] | None = None,
) -> tuple[dict[str, Weights], dict[str, list[str]]]:
    """Find all recurrent layers among a file's arrays. Return (layers, used): the `Weights` of each layer, and the keys
    of its arrays, by the layer's name. Numbered layers whose sizes fit become one stack, and two directions become one
    layer.

    arrays: all arrays of the file, by key. told: what the file's metadata say. keys: a template of the keys, or None
    for the usual keys. ways: the words for both directions in the template. order: the gate order in the file, or None
    for the usual order. nonlinearity: the activation of plain RNNs, or None for tanh. only: the names of the layers
    that must be readable, or None for all. Of an unreadable layer that is not in `only`, only the keys are returned.
    """
    # buckets: for each name the groups of its keys. All layers and directions of a stack have the same name.
    buckets: dict[str, list[Group]] = {}
    for group in groups_of(arrays, keys, ways, told.places):
        buckets.setdefault(group.name, []).append(group)
    # A number after a name counts the layers of a stack only if no other module has a number after this name. (In a
    # Sequential the numbers count all modules.) counted: for each key the names in it that a number follows. totals:
    # the number of keys by such a name.
    counted = {key: names_counted_by(key, buckets) for key in arrays}
    totals = Counter(name for names in counted.values() for name in names)
    layers, used = {}, {}
    for name, groups in buckets.items():
        found: list[tuple[str, list[str], Weights]] = []  # (name of a stack, its keys, its weights)
        try:
            # parts: the arrays of each group by the names in `Weights`, one dict per direction.
            parts = {group.form: words_of(group, arrays, order) for group in groups}
            recurrent = sum(name in counted[key] for group in groups for key in group.keys.values())
            # alone: all keys with a number after this name belong to recurrent layers.
            for label, stack in arranged(name, groups, parts, alone=recurrent == totals[name]):
                stack_keys = [key for group in stack.values() for key in group.keys.values()]
                options = next((told.options[key] for key in stack_keys if key in told.options), {})
                act = {} if nonlinearity is None else {"activation": nonlinearity}
                found.append((label, stack_keys, weights_of(stack, parts, {**options, **act})))
        except ValueError:
            # The layers cannot be read. Raise the error if `only` names one of them. A layer may have several names,
            # such as rnn and rnn.0.
            names = {name, *(f"{name}.{group.layer}".lstrip(".") for group in groups), *(group.own for group in groups)}
            if only is None or names & set(only):
                raise
            used[name] = [key for key in arrays if any(is_of(group, key) for group in groups)]
            continue
        layers |= {label: weights for label, _, weights in found}
        used |= {label: stack_keys for label, stack_keys, _ in found}
    return layers, used


def is_of(group: Group, key: str) -> bool:
    """Return whether a key belongs to the layer whose keys `group` has. This includes arrays that no format can hold:
    those of layer normalisation (`REFUSED`) and the `params` of a layer Pointwise."""
    return key in (*group.keys.values(), *map(group.title, REFUSED)) or key.startswith(group.title("params."))


def from_names(arrays: Mapping[str, Any], *, nonlinearity: str | None = None) -> Weights:
    """Return the weights of one layer, or of one stack of layers, whose arrays have the names of any format.

    The names are those that `read` finds in files: torch's `weight_ih_l0`, MLX's `Wx`, `Wx_forward` with `bias_ih` and
    `bias_hh`, Keras' `kernel`, or the arguments of `mlx_lstm.lstm`.

    Args:
        arrays (dict): arrays by name, of one recurrent layer or stack and of nothing else.
        nonlinearity (str, optional): the nonlinearity of a plain RNN. Default: tanh.

    Returns:
        Weights: the given arrays. Where the format needs a sum or a transposed array, MLX makes it, and gradients flow
        through it to the given arrays.

    Raises:
        ValueError: the arrays are not those of one layer or stack, or a shape does not fit.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import convert
        >>> names = {"Wx": (12, 3), "Wh": (12, 4), "bias_ih": (12,), "bias_hh": (12,)}
        >>> both = {f"{name}_{way}": mx.ones(shape) for name, shape in names.items() for way in ("fwd", "bwd")}
        >>> convert.from_names(both)
        Weights(GRU, 3 -> 4, both directions)
    """
    op = "from_names"
    if not isinstance(arrays, Mapping):
        fail(op, "arrays must be a dict of arrays by name", type(arrays).__name__)
    check_keys(op, arrays)
    if nonlinearity is not None:
        check_option(op, "nonlinearity", nonlinearity, tuple(ACTIVATIONS))
    layers, used = layers_of(arrays, Told({}, {}), nonlinearity=nonlinearity)  # {}: there are no metadata
    others = set(arrays).difference(*used.values())  # keys that belong to no layer
    if len(layers) != 1 or others:
        fail(op, "arrays must be those of one recurrent layer or stack", ", ".join(map(shown, sorted(arrays))))
    return next(iter(layers.values()))


def names_counted_by(key: str, names: Container[str]) -> list[str]:
    """Return the names in `names` with which `key` begins and after which a number follows that may be the number of a
    layer. For "rnn.12.Wx" this is "rnn" (number 12); for "lstm1.Wx", with a template "{name}{layer}.{array}", it is
    "lstm" (number 1)."""
    counted = []
    for number in re.finditer(r"\d+(?=\.)", key):
        start, end = number.span()
        # A name may end before the number in the key, with or without the dot before it, or between two digits of the
        # number. If the part of the key up to such a position is in `names`, it is one of the names. At most
        # `MOST_DIGITS` positions are tried, because a key of a foreign file may be one very long number.
        dot = [start - 1] if key[:start].endswith(".") else []
        counted += [key[:place] for place in [*dot, *range(start, end)][:MOST_DIGITS] if key[:place] in names]
    return counted


MOST_DIGITS = 20
"""The largest number of digits of a number in a key that are examined."""


def arranged(
    name: str, groups: list[Group], parts: dict[str, list[Arrays]], alone: bool
) -> list[tuple[str, dict[tuple[int, int], Group]]]:
    """Divide the layers of one name into stacks: one stack if all layers fit together, else one stack per layer. Return
    pairs (name of the stack, stack). A stack is a dict {(layer, direction): group of keys}.

    groups: the groups of keys whose common name is `name`. parts: the arrays of each group, by the group's `form` (the
    text that identifies it). alone: False if other arrays of the file also have a number after `name`, as in a
    Sequential with other modules between its recurrent layers.

    Examples of keys, with * in place of the array's word: "lstm.*_l0", "lstm.*_l1" are one stack of two layers; so are
    "rnn.0.*", "rnn.1.*" if their sizes fit. "rnn.0.*", "rnn.3.*" are two stacks of one layer, as 1 and 2 are missing.
    "a.forward.*", "a.backward.*" are one layer with two directions; "a.forward.*" alone is a layer of this name.
    """
    # whole: all groups as one stack. A layer or direction that the keys do not name counts as 0.
    whole = {(group.layer or 0, group.way or 0): group for group in groups}
    if groups[0].numbered and len(whole) != len(groups):
        rule = f"each layer and direction of {shown(name)} must be there once"
        fail("convert", rule, ", ".join(shown(key) for group in groups for key in group.keys.values())[:200])
    layers, ways = ({layer_and_way[n] for layer_and_way in whole} for n in range(2))
    # full: each layer from 0 on has each direction exactly once, and either all keys name a direction or no key does.
    full = len(whole) == len(groups) == len(layers) * len(ways) and ways in ({0}, {0, 1})
    full = full and layers == set(range(len(layers))) and len({group.way is None for group in groups}) == 1
    if full and len(ways) == 1 and groups[0].way == 0 and not groups[0].numbered:
        full = False  # all keys contain "forward" (without a word, way is None), none "backward": it is part of a name
    # torch's keys (`_l0`) always mean one stack; `weights_of` reports missing ones. Layers with other keys are one
    # stack if no layer is missing, the sizes fit, and the keys contain no number or the numbers count layers only.
    if groups[0].numbered or (
        full and fits(whole, parts, len(ways)) and (alone or (layers == {0} and groups[0].layer is None))
    ):
        return [(name, whole)]
    # The layers do not fit together, so each of them becomes a stack. ways_of: the directions of each layer. A forward
    # and a reverse direction with the same number are one layer, unless one of the directions occurs twice. Two layers
    # of different sizes, and no others, are not one: a model calls them forward and backward, and joins their outputs.
    shapes = {(arrays["Wx"].shape, arrays["Wh"].shape) for group in groups for arrays in parts[group.form]}
    alike = len(groups) > 2 or len(shapes) == 1
    ways_of: dict[int | None, list[int | None]] = {}
    for group in groups:
        ways_of.setdefault(group.layer, []).append(group.way)
    stacks: dict[str, dict[tuple[int, int], Group]] = {}
    for group in groups:
        # A layer with both directions is one stack, named by the name and the layer's number. Any other layer is a
        # stack with one direction, number 0, named by the text `own`.
        both = alike and len(ways_of[group.layer]) == 2 and set(ways_of[group.layer]) == {0, 1}
        label = name + (f".{group.layer}" if group.layer is not None else "") if both else group.own
        # Each of these stacks has one layer, number 0.
        stacks.setdefault(label.lstrip("."), {})[0, group.way or 0 if both else 0] = group
    return list(stacks.items())


def fits(whole: dict[tuple[int, int], Group], parts: dict[str, list[Arrays]], D: int) -> bool:
    """Return whether the layers fit together as a stack: all have the same number of units, and the input of each layer
    has as many numbers as the output of the layer below.

    whole: the groups of keys by (layer, direction). parts: the arrays of a group by its `form`: one dict, or two if the
    group holds both directions. D: the number of groups of each layer. So the output of a layer has P * D * len(first)
    numbers, where P, the size of h in one direction, is the number of columns of Wh.
    """
    first = parts[whole[0, 0].form]
    outputs = first[0]["Wh"].shape[-1] * D * len(first)
    each = [(layer, arrays) for (layer, _), group in whole.items() for arrays in parts[group.form]]
    same = len({arrays["Wh"].shape for _, arrays in each}) == 1
    return same and all(arrays["Wx"].shape[-1] == outputs for layer, arrays in each if layer)


def words_of(group: Group, arrays: Mapping[str, Any], order: str | None) -> list[Arrays]:
    """Return the arrays of a group of keys as a list of dicts, by the names that `Weights` uses. The list has one dict,
    or two if both directions share the group's arrays. Raise a ValueError that names a missing or unexpected key.
    arrays: all arrays of the file, by key. order: the gate order in the file, or None for the usual one."""
    for leaf in group.keys:
        if source := source_of(leaf):
            refuse_source("convert", source)
    # Both matrices of a layer must be there: `PARTNERS` has their leaves (the last parts of their keys) in each format.
    for one, other in PARTNERS.items():
        if (one in group.keys) != (other in group.keys):
            there, missing = (one, other) if one in group.keys else (other, one)
            fail("convert", f"{group.title(missing)} must be there, as {group.title(there)} is,", "no such key")
    for key in group.keys.values():
        if f"{key}_scales" in arrays:
            fail("convert", f"{key} must not be quantized: mx.dequantize it first,", f"{key}_scales beside it")
    by_leaf = {leaf: as_mlx(arrays[key]) for leaf, key in group.keys.items()}
    # Refuse arrays that no format can hold. "gamma" is such an array only beside a kernel (in haste); elsewhere it may
    # belong to another layer.
    for leaf, why in REFUSED.items():
        if group.title(leaf) in arrays and (leaf != "gamma" or "kernel" in by_leaf):
            rule = f"{group.title(leaf)} must not be there: {why}; only= and --only read the others,"
            fail("convert", rule, "this key")
    if "kernel" in by_leaf:
        return [keras_words(group, by_leaf, order)]
    # No two leaves (last parts of keys) may mean the same array of `Weights`, and a file may not have both a single
    # bias b and bias_ih. (`settled` refuses b beside bias_hh.)
    words: Arrays = {}
    for leaf, array in by_leaf.items():
        if ENTRIES[leaf] in words or (ENTRIES[leaf] == "b" and "bias_ih" in by_leaf):
            fail("convert", f"{group.title(leaf)} must not be there, beside {', '.join(group.keys)}", "this key")
        words[ENTRIES[leaf]] = array
    # both: whether each array holds both directions, as the functions of this package take them; then Wh has three
    # axes. The arrays listed in `OWN_AXIS` then have the direction as their first axis, so its size must be 2.
    both = words["Wh"].ndim == 3
    if both:
        for leaf, array in by_leaf.items():
            rows = 2 if ENTRIES[leaf] in OWN_AXIS else "rows"
            if array.ndim == 0 or (rows == 2 and array.shape[0] != 2):
                rule = f"{group.title(leaf)} must have shape [{rows}, ...], as both directions share arrays,"
                fail("convert", rule, f"shape {list(array.shape)}")
    directions = [part(words, way) for way in range(2)] if both else [words]  # `part`: one direction's part of arrays
    return [settled(group, each, order) for each in directions]


def settled(group: Group, words: Arrays, order: str | None) -> Arrays:
    """Return one direction's arrays as `Weights` stores them: in our gate order, with the biases `bx` and `bh`. group:
    the keys of the arrays, for error texts. words: the arrays of the file by their names in `Weights`. Instead of `bx`
    and `bh` it may have their sum `b` and, for a GRU, `bhn`, the recurrent bias of the candidate. order: the gate order
    in the file, or None for the usual order."""
    matrix = next(leaf for leaf in group.keys if ENTRIES[leaf] == "Wh")  # its shape shows which cell it is
    kind = OF_GATES[gates_of("convert", words, group.title(matrix))]  # "lstm", "gru" or "rnn"
    if "bhn" in words and kind != "gru":
        fail("convert", f"{group.title('bhn')} must not be there, as {group.title(matrix)} is no GRU's,", "this key")
    if "bhn" in words and "b" in words and words["b"].shape == words["bhn"].shape:
        # In this package bhn [H] is the candidate's part of a GRU's recurrent bias. Some programs use the name for the
        # whole recurrent bias [3H].
        words["bx"], words["bh"] = words.pop("b"), words.pop("bhn")
    if "bhn" in words:
        check_array("convert", group.title("bhn"), words["bhn"], [words["Wh"].shape[1]])
    if order is not None:
        usual = OURS[kind]  # the order in `Weights`
        before = order_of(group, order, usual)
        for name, array in words.items():
            if name not in ("bhn", "Wp") and (not array.ndim or array.shape[0] % len(usual)):
                fail("convert", f"{name} of {group.own} must have {len(usual)}H rows", f"shape {list(array.shape)}")
        words = rows_reordered(words, before, usual)
    # A layer has both biases bx and bh or none of them. A GRU has bhn only together with b.
    for one, other in (("bx", "bh"), ("bh", "bx"), ("bhn", "b")):
        if one in words and other not in words:
            leaf = {"bx": "bias_ih", "bh": "bias_hh"}.get(other, other)
            fail("convert", f"{group.title(leaf)} must be there, beside {', '.join(group.keys)}", "no such key")
    b, bhn = (words.pop(name, None) for name in ("b", "bhn"))
    return words | from_one_bias(b, bhn)  # b and bhn become bx and bh; {} if both are None


def keras_words(group: Group, given: Arrays, order: str | None) -> Arrays:
    """Convert one direction's arrays kernel, recurrent_kernel and bias (`given`, by these names) to the arrays of
    `Weights`. Keras and the library haste use these names. haste's GRU also has an array recurrent_bias; it becomes the
    second row of bias, as in Keras. group: the keys of the arrays, for error texts. order: the gate order in the file,
    or None for Keras' order."""
    R = given["recurrent_kernel"]  # [H, GH]: its transpose has the shape of Wh, which shows the number of gates
    kind = OF_GATES[gates_of("convert", {"Wh": R.T}, group.title("recurrent_kernel"))]
    allowed = {*KERAS_NAMES, *(["recurrent_bias"] if kind == "gru" else [])}
    if extra := given.keys() - allowed:
        fail("convert", f"{group.title(min(extra))} must not be there, beside {', '.join(KERAS_NAMES)}", "this key")
    arrays = [given.get(name) for name in KERAS_NAMES]
    if "recurrent_bias" in given:
        for name in ("bias", "recurrent_bias"):
            check_array("convert", group.title(name), given.get(name), [R.shape[1]])
        arrays[2] = mx.stack([given["bias"], given["recurrent_bias"]])
    of = f" of {group.own}" if group.own else ""  # the end of an array's name in error texts
    # biases: the allowed shapes of bias, in multiples of H along the last axis: [2, 3] means the shape [2, 3H].
    biases = [[2, 3], [3]] if kind == "gru" else [[{"lstm": 4, "rnn": 1}[kind]]]
    order = None if order is None else order_of(group, order, OURS[kind])
    return direction("convert", kind, arrays, biases=biases, of=of, order=order)


def order_of(group: Group, order: str, usual: str) -> str:
    """Return the gate order in the file, `order`, in our letters. usual: our gate order of the layer's cell. group: the
    keys of the layer, which an error text names, because a file may hold layers with other gates."""
    with of_layer(group.own):
        return gate_order("convert", order, usual)


def weights_of(
    stack: dict[tuple[int, int], Group], parts: dict[str, list[Arrays]], options: Mapping[str, Any]
) -> Weights:
    """Return the weights of a layer, or of a stack of layers. stack: the group of keys by (layer, way), the numbers of
    the layer and the direction. parts: the arrays of a group, by its `form`: one dict per direction, with the names of
    `Weights`. options: the options of the cell that are known from the file or the caller."""
    # A group whose arrays hold both directions gives two entries, (layer, 0) and (layer, 1).
    directions = {
        (layer, way + n): arrays for (layer, way), group in stack.items() for n, arrays in enumerate(parts[group.form])
    }

    # Return the key of an array for an error text. If the file lacks the array, return the key that it would have.
    # word: the array's name in `Weights`, such as "Wx".
    def title(layer: int, way: int, word: str) -> str:
        # The group of this layer and direction; else the group of both directions; else, for a missing layer, any
        # group.
        group = stack.get((layer, way)) or stack.get((layer, 0)) or next(iter(stack.values()))
        leaves = [leaf for leaf, ours in ENTRIES.items() if ours == word]  # this array's leaves in all formats
        leaf = next((leaf for leaf in leaves if leaf in group.keys), None)
        # In an error text a file's single bias stands for bx or bh. If the file has none of the leaves, take torch's.
        leaf = leaf or next((leaf for leaf in ("bias", "b") if word in ("bx", "bh") and leaf in group.keys), leaves[0])
        if (layer, way) in stack or not group.numbered:
            return group.title(leaf)
        # The layer or direction is missing. `group` belongs to another one, so its keys contain other numbers.
        return f"{leaf} of layer {layer}, {WAYS[way]}" + (" (the numbers begin at 0)," if not layer else "")

    first = next(iter(stack.values()))
    if first.numbered and "weight_ih" in first.keys:  # torch's keys, such as weight_ih_l0
        prefix = first.name + "." if first.name else ""

        # Return the key that torch gives to an array, also if the file lacks it. word: the array's name in `Weights`.
        def torch_title(layer: int, way: int, word: str) -> str:
            return f"{prefix}{torch.KEYS.get(word, word)}_l{layer}{torch.WAYS[way]}"

        return assembled("convert", directions, torch_title, options)
    # A GRU with a single bias applies its reset gate before the product. With Keras' keys this is certain. With other
    # keys the file may lack a bias by mistake, unless the options say reset="before". The arrays of any one direction
    # show whether there is a single bias.
    any_arrays = next(iter(directions.values()))
    is_gru = any_arrays["Wh"].shape[0] == 3 * any_arrays["Wh"].shape[1]
    if is_gru and "bx" in any_arrays and "bh" not in any_arrays:
        if "kernel" not in first.keys and options.get("reset") != "before":
            rule = f"{first.title('bhn')} must be there, beside {', '.join(first.keys)}"
            fail("convert", f"{rule} (from_ops reads a GRU without it),", "no such key")
        options = {**options, "reset": "before"}
    # lenient=True: in these formats some layers of a stack may have a bias while others have none.
    return assembled("convert", directions, title, options, lenient=True)


def keys_of(
    name: str, weights: Weights, style: str, *, keys: str | None = None, ways: Sequence[str] | None = None
) -> dict[str, tuple[mx.array, Place]]:
    """Return the arrays of a stack by the keys with which a file stores them: {key: (array, place)}. name: the name of
    the stack. style: the names of the arrays, one of `STYLES`. keys: a template such as "{name}.{layer}.{array}", or
    None for the usual keys of the style. ways: the words for both directions, or None for the style's words."""
    if keys is not None:
        check_template(keys)
    # D: the number of directions that have keys of their own; in the style "ops" both directions share arrays.
    D, K = (1 if style == "ops" else weights.directions), len(weights.layers)
    usual = "{name}.{way}.{layer}.{array}" if D == 2 else "{name}.{layer}.{array}"
    template = keys or ("{name}.{array}_l{layer}{way}" if style == "torch" else usual)
    # The keys of a single layer contain no layer number, with two exceptions. torch's keys always have a number
    # (`_l0`). In MLX a model with both directions has two lists of layers, whose keys contain the list index.
    if K == 1 and keys is None and style != "torch" and not (style == "mlx" and D == 2):
        template = template.replace(".{layer}", "")
    words = ways or (torch.WAYS if style == "torch" and keys is None else WAYS)
    with of_layer(name):  # adds the stack's name to the text of an error
        layers = in_style(weights, style)
    by_key = {}
    for layer, directions in enumerate(layers):
        for way, arrays in enumerate(directions):
            for leaf, array in arrays.items():
                key = template.format(name=name, layer=layer, way=words[way], array=leaf).lstrip(".")
                if key in by_key:  # a template without {layer} or {way}
                    rule = f"keys must have {{layer}} and {{way}} for {K} layers and {D} directions"
                    fail("convert", rule, repr(keys))
                by_key[key] = array, Place(name, layer, way)
    return by_key


def in_style(weights: Weights, style: str) -> list[list[Arrays]]:
    """Return the arrays of a stack with the names and layouts of one library: a list of layers, each a list with one
    dict of arrays per direction. In the style "ops" one dict holds both directions. style: "torch", "keras", "mlx" (the
    layers of `mlx.nn`), "two-biases" (the names in `TWO_BIASES`) or "ops" (the functions of this package)."""
    if style == "ops":
        return [[arrays] for arrays in to_ops(weights)]
    if style == "mlx":
        return mlx.by_names(weights)
    if style == "keras":
        weights = as_stored("to_keras", weights, NAMED)  # refuses options that the format `NAMED` cannot hold
        use_bias = weights.has_bias
        return [
            [dict(zip(KERAS_NAMES, map(as_mlx, arrays_of(weights.cell, way, use_bias)), strict=False)) for way in layer]
            for layer in weights.layers
        ]  # way: the arrays of one direction
    names = torch.NAMES if style == "torch" else TWO_BIASES  # leaf: name in `Weights`
    weights = torch.with_both_biases("to_torch" if style == "torch" else "convert", weights)
    return [
        [{leaf: arrays[word] for leaf, word in names.items() if word in arrays} for arrays in layer]
        for layer in weights.layers
    ]


TWO_BIASES = {"Wx": "Wx", "Wh": "Wh", "bias_ih": "bx", "bias_hh": "bh", "Wp": "Wp"}
"""The leaves of the style "two-biases", and for each leaf the array's name in `Weights`."""
