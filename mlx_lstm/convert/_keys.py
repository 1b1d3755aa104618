"""Find out which layer, direction and array each key of a file means, and make the keys for a file to be written.

A key is the name of an array in a file, such as `encoder.weight_ih_l0_reverse`. Its word (or leaf) says which array of
a layer it is, here weight_ih; its way is the direction, 0 or 1. A `Group` collects the keys of one layer and direction.
A template is a pattern of keys, such as "{name}.{array}". ways: the names of both directions in keys. order: the order
of the gates in the file, if it is not the usual one of such keys.

In `Weights` one direction's arrays are Wx [GH, I], Wh [GH, P], the biases bx and bh [GH], Wp [P, H] (a projection) and
peephole. b: a single bias; bhn [H]: the recurrent bias of a GRU's candidate. G: gates, H: units, I: input features, P:
the width of h, D: directions, K: layers. Errors begin with "convert" or "from_names": `fail("convert", rule, got)`
raises the ValueError "[convert] rule but got ...".
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
from . import torch
from .keras import NAMED, arrays_of, direction
from .keras import NAMES as KERAS_NAMES
from .mlx import to_mlx, to_ops
from .torch import assembled, gates_of
from .weights import OF_GATES, OURS, Weights, as_stored, from_one_bias, gate_order, of_layer, reorder, two_biases
from .weights import to_mlx as as_mlx

STYLES = ("torch", "mlx", "two-biases", "keras", "ops")
"""The styles of keys in a file: torch's; MLX's; MLX's with `bias_ih` and `bias_hh`; Keras'; the arguments of
`mlx_lstm.lstm`, `gru` and `rnn`."""

WAYS = ("forward", "backward")
"""The default names of the directions."""

WAY_WORDS = {"forward": 0, "fwd": 0, "backward": 1, "bwd": 1, "back": 1, "reverse": 1}
"""The words that keys of any format have for a direction, and its number."""

ENTRIES = {"weight_ih": "Wx", "Wx": "Wx", "Wxh": "Wx", "kernel": "Wx"}
ENTRIES |= {"weight_hh": "Wh", "Wh": "Wh", "Whh": "Wh", "recurrent_kernel": "Wh"}
ENTRIES |= {"weight_hr": "Wp", "Wp": "Wp", "peephole": "peephole", "bias_ih": "bx", "bias_hh": "bh"}
ENTRIES |= {"bias": "b", "b": "b", "bhn": "bhn", "recurrent_bias": "bh"}
"""The words for arrays in the keys of all formats, and the arrays' names in `Weights`. Two names are not in
`Weights`: b, a single bias, and bhn, the candidate's second bias in a GRU."""

REFUSED = dict.fromkeys(
    ("gamma", *(f"norm{of}_{part}" for of in ("", "_input", "_c") for part in ("scale", "shift"))),
    "no format holds layer normalisation (the options norm= and layer_norm= of mlx_lstm run it)",
)
REFUSED["params.0"] = "no format holds the cell of a layer Pointwise"
"""Words for arrays without which a layer computes something else, and why they are refused."""

PARTNERS = {"weight_ih": "weight_hh", "Wx": "Wh", "Wxh": "Whh", "kernel": "recurrent_kernel"}
"""The words for the two matrices that each layer has, by format."""

# TORCH_LEAF: the last part of a key of torch, such as weight_ih_l0_reverse. LEAF: that of any other key, such as
# Wx_fwd. PATH_WAY: a word for a direction before the last part of a key.
TORCH_LEAF = re.compile(r"(weight_ih|weight_hh|weight_hr|bias_ih|bias_hh)(?:_l(\d+))(_reverse)?")
ANY_WORD = "|".join(sorted(ENTRIES, key=len, reverse=True))
LEAF = re.compile(rf"({ANY_WORD})(?:_({'|'.join(WAY_WORDS)}))?")
PATH_WAY = re.compile(rf"(?<![A-Za-z])({'|'.join(WAY_WORDS)})(?![A-Za-z])")


class Group(NamedTuple):
    """The keys of the arrays of one layer and direction, such as lstm.weight_ih_l0 and lstm.weight_hh_l0.

    own: a text that differs for each layer and direction. name: the common name of all layers and directions, such
    as lstm. layer, way: the numbers of the layer and the direction; None if the keys do not contain them. numbered:
    whether the keys mark the layer's number as such (`_l0`). keys: the full key of each array, by the word for the
    array, such as weight_ih. form: a full key with a NUL character in place of this word.
    """

    own: str
    name: str
    layer: int | None
    way: int | None
    numbered: bool
    keys: dict[str, str]
    form: str

    def title(self, leaf: str) -> str:
        """Return the key of the array with the word `leaf`, such as weight_ih. If the file lacks this array, return
        the key that it would have."""
        return self.keys.get(leaf, self.form.replace("\0", leaf))


def parse(key: str, pattern: re.Pattern[str] | None, ways: Sequence[str]) -> tuple[str, Group] | None:
    """Split the key of an array into its parts. Return (word, group): the word that says which array it is, such as
    weight_ih, and a new `Group` with layer, direction and name, to which the caller adds the key. Return None if the
    key belongs to no recurrent layer. pattern: the regular expression of a template, or None for the usual keys."""
    if pattern is not None:
        match = pattern.fullmatch(key) or pattern.fullmatch("." + key)
        if match is None:
            return None
        fields = match.groupdict()
        layer = int(fields["layer"]) if fields.get("layer") else None
        way = list(ways).index(fields["way"]) if fields.get("way") is not None else None
        # start: where the word begins in the key; the string that matched may begin with one more dot.
        start = match.start("array") - (len(match.string) - len(key))
        form = key[:start] + "\0" + key[start + len(fields["array"]) :]
        name = fields.get("name") or ""
        own = ".".join(str(part) for part in (name, layer, fields.get("way")) if part not in (None, ""))
        return fields["array"], Group(own, name, layer, way, layer is not None, {}, form)
    path, dot, leaf = key.rpartition(".")
    if match := TORCH_LEAF.fullmatch(leaf):
        form = f"{path}{dot}\0{leaf[match.end(1) :]}"
        return match[1], Group(form, path, int(match[2]), int(bool(match[3])), True, {}, form)
    if not (match := LEAF.fullmatch(leaf)):
        return None
    form = f"{path}{dot}\0{leaf[match.end(1) :]}"
    way, name = WAY_WORDS[match[2]] if match[2] else None, path
    if way is None and (found := PATH_WAY.search(path)):
        way, name = WAY_WORDS[found[1]], merged(path, found)
    # A number at the end of the name is that of a layer, as in "lstm.0".
    base, _, last = name.rpartition(".")
    layer = int(last) if last.isdecimal() else None
    return match[1], Group(path, base if layer is not None else name, layer, way, False, {}, form)


def merged(path: str, found: re.Match[str]) -> str:
    """Return `path` without the word for the direction, such as "forward", and without one separator next to it.
    `found` is the match of this word."""
    before, after = path[: found.start()], path[found.end() :]
    return (before + after[1:] if not before or before[-1] == "." else before[:-1] + after).rstrip(".")


def pattern_of(template: str, ways: Sequence[str]) -> re.Pattern[str]:
    """Return a regular expression that matches the keys of a template such as "{name}.{layer}.{array}"."""
    fields = {"{name}": "(?P<name>.*?)", "{layer}": r"(?P<layer>\d+)", "{array}": f"(?P<array>{ANY_WORD})"}
    fields["{way}"] = f"(?P<way>{'|'.join(map(re.escape, ways))})"
    check_template(template)
    return re.compile("".join(fields.get(each, re.escape(each)) for each in re.split(r"(\{\w+\})", template)))


def check_template(template: str) -> None:
    """Raise ValueError unless a template of keys has {array}, and no unknown or repeated field."""
    fields = re.findall(r"\{(\w*)\}", template)
    if "array" not in fields or set(fields) - {"name", "layer", "way", "array"} or len(fields) != len(set(fields)):
        fail("convert", "keys must have {array}, and maybe {name}, {layer} and {way}, each once,", repr(template))


def groups_of(keys: Iterable[str], template: str | None, ways: Sequence[str]) -> list[Group]:
    """Sort the keys into groups, one per layer and direction; return the groups that have a matrix of a recurrent
    layer."""
    pattern, found = None if template is None else pattern_of(template, ways), {}
    for key in keys:
        if parsed := parse(key, pattern, ways):
            leaf, group = parsed
            found.setdefault((group.own, group.layer, group.way, group.form), group).keys[leaf] = key
    sure = {*PARTNERS, *PARTNERS.values()} - {"kernel"}  # "kernel" proves nothing: a dense layer has one, too
    return [group for group in found.values() if group.keys.keys() & sure]


def layers_of(
    arrays: Mapping[str, Any],
    options: Mapping[str, Mapping[str, Any]],
    *,
    keys: str | None = None,
    ways: Sequence[str] = WAYS,
    order: str | None = None,
    nonlinearity: str | None = None,
    only: Sequence[str] | None = None,
) -> tuple[dict[str, Weights], dict[str, list[str]]]:
    """Return all recurrent layers among a file's arrays, and the keys of each. Numbered layers whose sizes fit
    become one stack, and two directions become one layer. options: the options of a layer's cell, by the keys of its
    matrices. only: the layers that must be readable; others are left out where they are not, except for their
    keys."""
    # buckets: the groups of keys by the name that layers of a stack and both directions have in common.
    buckets: dict[str, list[Group]] = {}
    for group in groups_of(arrays, keys, ways):
        buckets.setdefault(group.name, []).append(group)
    # How many keys have a number after a layer's name. If modules that are no recurrent layers have numbers, too, the
    # numbers count the modules of a Sequential, not the layers of a stack.
    counted = {key: names_counted_by(key, buckets) for key in arrays}
    totals = Counter(name for names in counted.values() for name in names)
    layers, used = {}, {}
    for name, groups in buckets.items():
        found: list[tuple[str, list[str], Weights]] = []
        try:
            parts = {group.form: words_of(group, arrays, order) for group in groups}
            # own: how many keys of recurrent layers have a number after this name. told: options from the metadata.
            own = sum(name in counted[key] for group in groups for key in group.keys.values())
            for label, where in arranged(name, groups, parts, alone=own == totals[name]):
                mine = [key for group in where.values() for key in group.keys.values()]
                told = next((options[key] for key in mine if key in options), {})
                act = {} if nonlinearity is None else {"activation": nonlinearity}
                found.append((label, mine, one_layer(where, parts, {**told, **act})))
        except ValueError:
            names = {name, *(f"{name}.{group.layer}".lstrip(".") for group in groups), *(group.own for group in groups)}
            if only is None or names & set(only):
                raise
            used[name] = [key for key in arrays if any(is_of(group, key) for group in groups)]
            continue
        layers |= {label: weights for label, _, weights in found}
        used |= {label: mine for label, mine, _ in found}
    return layers, used


def is_of(group: Group, key: str) -> bool:
    """Return whether a key is that of an array of this layer (`group` has its keys), even of one that no format
    holds."""
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
    if nonlinearity is not None:
        check_option(op, "nonlinearity", nonlinearity, tuple(ACTIVATIONS))
    layers, used = layers_of(arrays, {}, nonlinearity=nonlinearity)
    others = set(arrays).difference(*used.values())
    if len(layers) != 1 or others:
        fail(op, "arrays must be those of one recurrent layer or stack", ", ".join(map(shown, sorted(arrays))))
    return next(iter(layers.values()))


def names_counted_by(key: str, names: Container[str]) -> list[str]:
    """Return the strings in `names` with which `key` begins, if a number follows that may be the number of a layer. For
    the key "a.12.weight" these are "a" (the number is 12) and "a.1" (the number is 2), if both are in `names`."""
    counted = []
    for number in re.finditer(r"\d+(?=\.)", key):
        start, end = number.span()
        # Where a name may end: before the number in the key, with or without the dot before it, or between two digits
        # of the number. The key up to such a place is collected if it is in `names`.
        dot = [start - 1] if key[:start].endswith(".") else []
        counted += [key[:k] for k in [*dot, *range(start, end)][:MOST_DIGITS] if key[:k] in names]
    return counted


MOST_DIGITS = 20
"""The most digits of a number in a key that are examined: a key of a foreign file may be one very long number."""


def arranged(
    name: str, groups: list[Group], parts: dict[str, list[Arrays]], alone: bool
) -> list[tuple[str, dict[tuple[int, int], Group]]]:
    """Return the layers of one name as stacks: one stack if all of them fit together, else one stack per layer. The
    result has pairs (name of the stack, stack). A stack maps (layer, direction) to the group of its keys. parts: the
    arrays of each group. alone: False if other arrays of the file also have a number
    after `name`, as in a Sequential with other modules between its recurrent layers."""
    whole = {(group.layer or 0, group.way or 0): group for group in groups}
    layers, ways = ({where[n] for where in whole} for n in range(2))
    # full: each layer from 0 on has each direction exactly once, and all keys name a direction or none does.
    full = len(whole) == len(groups) == len(layers) * len(ways) and ways in ({0}, {0, 1})
    full = full and layers == set(range(len(layers))) and len({group.way is None for group in groups}) == 1
    if full and len(ways) == 1 and groups[0].way == 0 and not groups[0].numbered:
        full = False  # all keys contain "forward", none "backward": it is part of a name, not a direction
    if groups[0].numbered or (
        full and fits(whole, parts, len(ways)) and (alone or (layers == {0} and groups[0].layer is None))
    ):
        return [(name, whole)]
    # They do not fit, so each layer is a stack of its own. ways_of: the directions of each layer; two of them are one
    # layer if both are there once.
    ways_of: dict[int | None, list[int | None]] = {}
    for group in groups:
        ways_of.setdefault(group.layer, []).append(group.way)
    stacks: dict[str, dict[tuple[int, int], Group]] = {}
    for group in groups:
        both = len(ways_of[group.layer]) == 2 and set(ways_of[group.layer]) == {0, 1}
        label = name + (f".{group.layer}" if group.layer is not None else "") if both else group.own
        stacks.setdefault(label.lstrip("."), {})[0, group.way or 0 if both else 0] = group
    return list(stacks.items())


def fits(whole: dict[tuple[int, int], Group], parts: dict[str, list[Arrays]], D: int) -> bool:
    """Return whether the layers fit together as a stack: all have the same number of units, and the input of each layer
    is as wide as the output of the layer below.

    whole: by (layer, direction), the group of keys. parts: by the form of a group's keys, its arrays: one dict, or two
    if the group holds both directions. D: how many groups a layer has. So a layer's output is P * D * len(first) wide.
    """
    first = parts[whole[0, 0].form]
    width = first[0]["Wh"].shape[-1] * D * len(first)
    each = [(layer, part) for (layer, _), group in whole.items() for part in parts[group.form]]
    same = len({part["Wh"].shape for _, part in each}) == 1
    return same and all(part["Wx"].shape[-1] == width for layer, part in each if layer)


def words_of(group: Group, arrays: Mapping[str, Any], order: str | None) -> list[Arrays]:
    """Return the arrays of a group of keys as a list of dicts, by the names that `Weights` uses. The list has one
    dict, or two if both directions share the group's arrays. Raise a ValueError that names a missing or unexpected
    key."""
    for one, other in PARTNERS.items():
        if (one in group.keys) != (other in group.keys):
            there, missing = (one, other) if one in group.keys else (other, one)
            fail("convert", f"{group.title(missing)} must be there, as {group.title(there)} is,", "no such key")
    for key in group.keys.values():
        if f"{key}_scales" in arrays:
            fail("convert", f"{key} must not be quantized: mx.dequantize it first,", f"{key}_scales beside it")
    mine = {leaf: as_mlx(arrays[key]) for leaf, key in group.keys.items()}
    for leaf, why in REFUSED.items():
        if group.title(leaf) in arrays and (leaf != "gamma" or "kernel" in mine):
            rule = f"{group.title(leaf)} must not be there: {why}; only= and --only read the others,"
            fail("convert", rule, "this key")
    if "kernel" in mine:
        return [keras_words(group, mine, order)]
    words: Arrays = {}
    for leaf, array in mine.items():
        if ENTRIES[leaf] in words or (ENTRIES[leaf] == "b" and "bias_ih" in mine):
            fail("convert", f"{group.title(leaf)} must not be there, beside {', '.join(group.keys)}", "this key")
        words[ENTRIES[leaf]] = array
    # both: whether each array holds both directions, as the functions of this package take them: then Wh has three
    # axes.
    both = words["Wh"].ndim == 3
    if both:
        for leaf, array in mine.items():
            rows = 2 if ENTRIES[leaf] in OWN_AXIS else "rows"
            if array.ndim == 0 or (rows == 2 and array.shape[0] != 2):
                rule = f"{group.title(leaf)} must have shape [{rows}, ...], as both directions share arrays,"
                fail("convert", rule, f"shape {list(array.shape)}")
    ways = [part(words, d) for d in range(2)] if both else [words]
    return [settled(group, way, order) for way in ways]


def settled(group: Group, words: Arrays, order: str | None) -> Arrays:
    """Return one direction's arrays with the gate order and the biases `bx` and `bh` that `Weights` has. group: their
    keys, for error texts. words: the arrays, with `b` and `bhn` or with `bx` and `bh`. order: the
    gate order in the file, if it is not the usual one."""
    matrix = next(leaf for leaf in group.keys if ENTRIES[leaf] == "Wh")
    kind = OF_GATES[gates_of("convert", words, group.title(matrix))]
    if "bhn" in words and kind != "gru":
        fail("convert", f"{group.title('bhn')} must not be there, as {group.title(matrix)} is no GRU's,", "this key")
    if "bhn" in words and "b" in words and words["b"].shape == words["bhn"].shape:
        # Here "bhn" is the name of a part of a GRU's recurrent bias: the candidate's part [H]. Some programs call the
        # whole bias [3H] "bhn".
        words["bx"], words["bh"] = words.pop("b"), words.pop("bhn")
    if order is not None:
        usual = OURS[kind]
        before = gate_order("convert", order, usual)
        whole = {name: array for name, array in words.items() if name not in ("bhn", "Wp")}
        for name, array in whole.items():
            if array.shape[0] % len(usual):
                fail("convert", f"{name} of {group.own} must have {len(usual)}H rows", f"shape {list(array.shape)}")
        words = words | {name: reorder(array, before, usual) for name, array in whole.items()}
    # Two biases come together, and a GRU's bhn only with b.
    for one, other in (("bx", "bh"), ("bh", "bx"), ("bhn", "b")):
        if one in words and other not in words:
            leaf = {"bx": "bias_ih", "bh": "bias_hh"}.get(other, other)
            fail("convert", f"{group.title(leaf)} must be there, beside {', '.join(group.keys)}", "no such key")
    b, bhn = (words.pop(name, None) for name in ("b", "bhn"))
    return words | from_one_bias(b, bhn)


def keras_words(group: Group, given: Arrays, order: str | None) -> Arrays:
    """Convert one direction's kernel, recurrent_kernel and bias to the arrays of `Weights`. Keras and the library
    haste use these names. haste's GRU also has an array recurrent_bias; it becomes the second row of bias, as in
    Keras. order: the gate order in the file, if it is not Keras' order."""
    R = given["recurrent_kernel"]
    kind = OF_GATES[gates_of("convert", {"Wh": R.T}, group.title("recurrent_kernel"))]
    allowed = {*KERAS_NAMES, *(["recurrent_bias"] if kind == "gru" else [])}
    if extra := given.keys() - allowed:
        fail("convert", f"{group.title(min(extra))} must not be there, beside {', '.join(KERAS_NAMES)}", "this key")
    arrays = [given.get(name) for name in KERAS_NAMES]
    if "recurrent_bias" in given:
        for name in ("bias", "recurrent_bias"):
            check_array("convert", group.title(name), given.get(name), [R.shape[1]])
        arrays[2] = mx.stack([given["bias"], given["recurrent_bias"]])
    of = f" of {group.own}" if group.own else ""
    biases = [[2, 3], [3]] if kind == "gru" else [[{"lstm": 4, "rnn": 1}[kind]]]
    order = None if order is None else gate_order("convert", order, OURS[kind])
    return direction("convert", kind, arrays, biases=biases, of=of, order=order)


def one_layer(
    where: dict[tuple[int, int], Group], parts: dict[str, list[Arrays]], options: Mapping[str, Any]
) -> Weights:
    """Return the weights of a layer, or of a stack of layers. `where` maps (layer, direction) to a `Group`, the keys
    of its arrays; `parts` has the arrays themselves. options: those of the cell that the file or the caller tells."""
    # A group whose arrays hold both directions gives two entries, (layer, 0) and (layer, 1).
    directions = {
        (layer, way + d): arrays for (layer, way), group in where.items() for d, arrays in enumerate(parts[group.form])
    }

    # Return the key of an array for an error text. If the file lacks the array, return the key that it would have.
    def title(layer: int, way: int, word: str) -> str:
        group = where.get((layer, way)) or where.get((layer, 0)) or next(iter(where.values()))
        names = [leaf for leaf, ours in ENTRIES.items() if ours == word]
        leaf = next((name for name in names if name in group.keys), None)
        leaf = leaf or next((name for name in ("bias", "b") if word in ("bx", "bh") and name in group.keys), names[0])
        if (layer, way) in where or not group.numbered:
            return group.title(leaf)
        return f"{leaf} of layer {layer}, {WAYS[way]}"

    first = next(iter(where.values()))
    if first.numbered and "weight_ih" in first.keys:
        prefix = first.name + "." if first.name else ""

        def torch_title(k: int, d: int, word: str) -> str:
            return f"{prefix}{torch.KEYS.get(word, word)}_l{k}{torch.WAYS[d]}"

        return assembled("convert", directions, torch_title, options)
    # A GRU with a single bias resets before the product. Keras' keys show that; other keys might lack a bias by
    # mistake, unless the file tells the option.
    three = directions[0, 0]["Wh"].shape[0] == 3 * directions[0, 0]["Wh"].shape[1]
    if three and "bx" in directions[0, 0] and "bh" not in directions[0, 0]:
        if "kernel" not in first.keys and options.get("reset") != "before":
            rule = f"{first.title('bhn')} must be there, beside {', '.join(first.keys)}"
            fail("convert", f"{rule} (from_ops reads a GRU without it),", "no such key")
        options = {**options, "reset": "before"}
    return assembled("convert", directions, title, options, lenient=True)


def keys_of(
    name: str, weights: Weights, style: str, *, keys: str | None = None, ways: Sequence[str] | None = None
) -> dict[str, mx.array]:
    """Return a stack's arrays by key, with keys in a style such as "torch" or by the template `keys`. name: the name of
    the stack. ways: the words for the directions, or None for those of the style."""
    if keys is not None:
        check_template(keys)
    D, K = (1 if style == "ops" else weights.directions), len(weights.layers)
    usual = "{name}.{way}.{layer}.{array}" if D == 2 else "{name}.{layer}.{array}"
    template = keys or ("{name}.{array}_l{layer}{way}" if style == "torch" else usual)
    # A single layer needs no layer number in its keys. There are two exceptions: torch always has a number (`_l0`), and
    # for both directions MLX has two lists of layers (see `mlx_lstm.nn.stack`), whose keys contain the list index.
    if K == 1 and keys is None and style != "torch" and not (style == "mlx" and D == 2):
        template = template.replace(".{layer}", "")
    words = ways or (torch.WAYS if style == "torch" and keys is None else WAYS)
    with of_layer(name):
        layers = in_style(weights, style)
    by_key = {}
    for layer, each in enumerate(layers):
        for way, arrays in enumerate(each):
            for leaf, array in arrays.items():
                key = template.format(name=name, layer=layer, way=words[way], array=leaf).lstrip(".")
                if key in by_key:
                    fail(
                        "convert", f"keys must have {{layer}} and {{way}} for {K} layers and {D} directions", repr(keys)
                    )
                by_key[key] = array
    return by_key


def in_style(weights: Weights, style: str) -> list[list[Arrays]]:
    """Return the weights under the array names and in the layouts of one library. `style` is the library, such as
    "torch", "keras", "mlx" (`mlx.nn`) or "ops" (the functions of this package); any other name, such as "two-biases",
    means the names in TWO_BIASES. The result is a list of layers. A layer
    is a list with one dict of arrays per direction; in the style "ops" one dict holds both directions."""
    if style == "ops":
        return [[arrays] for arrays in to_ops(weights)]
    if style == "mlx":
        return to_mlx(weights)
    if style == "keras":
        weights = as_stored("to_keras", weights, NAMED)
        use = weights.has_bias
        return [
            [dict(zip(KERAS_NAMES, map(as_mlx, arrays_of(weights.cell, way, use)), strict=False)) for way in layer]
            for layer in weights.layers
        ]
    names = torch.NAMES if style == "torch" else TWO_BIASES
    weights = as_stored("to_torch" if style == "torch" else "convert", weights, torch.FORMAT)
    if weights.has_bias:
        weights = weights.map(lambda arrays: arrays | dict(zip(("bx", "bh"), two_biases(arrays), strict=True)))
    return [[{leaf: way[word] for leaf, word in names.items() if word in way} for way in k] for k in weights.layers]


TWO_BIASES = {"Wx": "Wx", "Wh": "Wh", "bias_ih": "bx", "bias_hh": "bh", "Wp": "Wp"}
"""The words of the style "two-biases", and the arrays' names in `Weights`."""
