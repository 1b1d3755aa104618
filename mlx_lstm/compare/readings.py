"""Explain why arrays that a user saved from an app (a dump) differ from the float64 oracle. A reading is one
interpretation of the arrays: other layouts, gate orders or properties, or another meaning of Apple's documentation. A
change is one difference from the documented interpretation.

The changes are tried one by one, then in pairs. For the readings that are nearest to the saved arrays, error bounds are
derived, and the arrays are compared within these bounds. "E:name" in a printed text names the experiment of
`compare --settle` that decides the question on a Mac.

`dump.groups(name)` has a list for each axis of an array, with the letters of the sizes whose product is the size of the
axis: G gates, D directions, T steps, N batch items, I inputs, H units. `dump.sizes` has the size of each letter.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import combinations, permutations
from typing import Any, NamedTuple

import numpy as np

from ..lab.mpsgraph.cases import ACTIVATION_PROPERTIES, COTANGENTS, RESULTS, CompareCase
from ..lab.mpsgraph.dump import Dump, possible_layouts
from ..lab.mpsgraph.judge import HARD_SIGMOIDS
from ..lab.progress import Progress
from ..mpsgraph.layouts import ACTIVATIONS
from ..oracle import verdict
from ..oracle.arithmetic import Rounding
from ..oracle.closeness import exact_and_element_bounds
from .forms import moved, predicted, side_by_side

NEAREST = 3  # this number of the nearest readings (interpretations) is compared within error bounds
FEW = 2  # the search compares only so many sequences of the batch, since each is computed independently
LETTERS = {"lstm": "ifzo", "gru": "zro", "single_gate_rnn": "h"}
"""Apple's default gate order of each op, in Apple's letters. z is an LSTM's cell gate (g in other libraries) or a GRU's
update gate; o is an LSTM's output gate or a GRU's candidate."""
FLAGS = {"lstm": ("reverse",), "gru": ("reverse", "flip_z", "reset_after"), "single_gate_rnn": ("reverse",)}
"""The properties that a user may have forgotten in the descriptor, by op."""


class Change(NamedTuple):
    """One change to the documented interpretation of the arrays that a user saved. kind: what changes, such as
    "layout"; two changes of one kind, except layouts, exclude each other. words: the change in words. apply: applies it
    to a case. readings: the oracle's choices for points that Apple's documentation leaves open, such as
    {"hard_sigmoid": "x/6"}."""

    kind: str
    words: str
    apply: Callable[[CompareCase], CompareCase] = lambda case: case
    readings: dict[str, str] = {}  # noqa: RUF012  the default dict is never changed


class Form(NamedTuple):
    """A form in which an app may have saved a result: its description, a function that converts it to the documented
    layout, and the name (key) of the values to compare with in the dict that `predicted` returns."""

    words: str
    to_documented: Callable[[np.ndarray], np.ndarray]
    key: str


class Reading(NamedTuple):
    """One interpretation of saved arrays, and how well it fits. words: its description. case: the call of the op in
    this interpretation. distances: each result's error divided by its bound. forms: a description of the form in which
    each result was saved, "" for the documented form."""

    words: list[str]
    case: CompareCase
    distances: dict[str, float]
    forms: dict[str, str]

    @property
    def fitting(self) -> int:
        """Return how many saved results this interpretation explains."""
        return sum(distance <= 1 for distance in self.distances.values())


def base_case(dump: Dump) -> tuple[CompareCase, list[str]]:
    """Return (case, descriptions): the saved case converted to the documented layouts, and a description of each
    array that had another layout."""
    arrays, words = dict(dump.case.arrays), []
    for name, value in arrays.items():
        if name != "mask":
            # The first possible layout is the documented one, if that fits.
            layout, to_documented = possible_layouts(dump, name, value)[0]
            arrays[name] = to_documented(value)
            words += [f"{name} is {layout}"] if layout else []
    return dump.case._replace(arrays=arrays), words


def search(dumps: list[Dump]) -> tuple[Reading, bool]:
    """Return (reading, pairs): the interpretation of the saved arrays that explains the most results, and whether pairs
    of changes (differences from the documented interpretation) were tried, because no single change explains all.
    dumps: one `Dump` for each possible choice of sizes."""
    best = judged(dumps[0], ())
    if best.fitting < len(best.distances):
        alone = [(dump, chosen) for dump in dumps for chosen in [(), *((one,) for one in changes(dump))]]
        best = nearest(alone, "readings")
    if best.fitting == len(best.distances):
        return best, False
    # Leave out pairs of the same kind, which exclude each other. Pairs of layout changes stay, because they may concern
    # two different arrays.
    pairs = [(dump, pair) for dump in dumps for pair in combinations(list(changes(dump, few=True)), 2)]
    pairs = [(dump, pair) for dump, pair in pairs if pair[0].kind != pair[1].kind or pair[0].kind == "layout"]
    return max(best, nearest(pairs, "pairs of readings"), key=lambda reading: reading.fitting), True


def nearest(candidates: list[tuple[Dump, tuple[Change, ...]]], title: str) -> Reading:
    """Rank the interpretations `candidates`, each a dump and the changes to apply, by their distance from the saved
    arrays. Of the nearest ones, return the first one that explains all results, or else the one that explains the most.
    title: the text of the progress line."""
    with Progress() as progress:
        ranked = [(rank(*candidate), n) for n, candidate in enumerate(progress.each(candidates, title))]
    readings = []
    for _, n in sorted(ranked)[:NEAREST]:
        readings.append(judged(*candidates[n]))
        if readings[-1].fitting == len(readings[-1].distances):
            break
    return max(readings, key=lambda reading: reading.fitting)


def applied(dump: Dump, chosen: Iterable[Change]) -> tuple[CompareCase, dict[str, str], list[str]]:
    """Apply the changes `chosen` to the documented interpretation of the saved arrays in `dump`. Return (the call of
    the op as a case, keywords for `judge.options`, descriptions of all changes)."""
    case, words = base_case(dump)
    readings: dict[str, str] = {}
    for change in chosen:
        # The description of a changed layout, such as "bias is [H, 4]", replaces the description of `base_case`.
        subject = change.words.partition(" is ")[0]
        words = [*(word for word in words if word.partition(" is ")[0] != subject), change.words]
        case = change.apply(case)
        readings |= change.readings
    return case, readings, words


def rank(dump: Dump, chosen: tuple[Change, ...]) -> float:
    """Return a fast measure of how far the saved results are from the float64 oracle after these changes of the
    documented interpretation: the mean logarithm of the relative errors."""
    case, readings, _ = applied(dump, chosen)
    # alone: the results of the forward op.
    alone = {name: value for name, value in dump.results.items() if name in RESULTS[case.op]}
    results, places = dump.results, {}
    if alone:
        # If the user saved results of the forward op, compute only these, and only for the first FEW sequences of the
        # batch. The forward op computes each sequence independently, so this is enough to compare interpretations, and
        # fast.
        results = alone
        arrays = {name: value for name, value in case.arrays.items() if name not in COTANGENTS[case.op]}
        for name, value in arrays.items():
            # place: the axis of the sequences; in a mask [.., N, DH] it is the second last axis.
            place = (
                -2 if name == "mask" else next((n for n, parts in enumerate(dump.groups(name)) if "N" in parts), None)
            )
            if place is not None and value.ndim >= 2 and value.shape[place] == dump.sizes["N"]:
                arrays[name] = np.take(value, range(min(FEW, dump.sizes["N"])), place)
        case = case._replace(arrays=arrays)
        places = {name: range(min(FEW, dump.sizes["N"])) for name in results}
    try:
        with np.errstate(all="ignore"):
            values = predicted(case, Rounding(np.float64), readings)
    except ValueError:  # the mask's shape does not fit
        return np.inf
    total = 0.0
    for name, value in results.items():
        errors = [1.0]  # the relative error for each form of the result; at most 1 counts, the error of zeros
        for form in forms_of(dump, case, name, value):
            if form.key in values:
                got = form.to_documented(value).astype(np.float64)
                got = np.take(got, places[name], -2) if name in places else got
                exact = values[form.key]
                errors.append(verdict.largest(got - exact) / (verdict.largest(exact) or 1.0))
        total += np.log10(np.nanmin(errors) + 1e-16)
    return total / len(results)


def judged(dump: Dump, chosen: tuple[Change, ...]) -> Reading:
    """Compare the saved results with the float64 oracle within error bounds, after these changes of the documented
    interpretation. Return it as a `Reading`."""
    case, readings, words = applied(dump, chosen)
    try:
        exact, bound = exact_and_element_bounds(lambda fl: predicted(case, fl, readings), case.arrays["source"].dtype)
    except ValueError:
        return Reading(words, case, dict.fromkeys(dump.results, np.inf), {})
    distances, forms = {}, {}
    for name, value in dump.results.items():
        distances[name], forms[name] = np.inf, ""
        for form in forms_of(dump, case, name, value):
            if form.key in exact:
                error = verdict.judged(name, form.to_documented(value), exact[form.key], bound[form.key]).ratio
                if error < distances[name]:
                    distances[name], forms[name] = error, form.words
                if error <= 1:
                    break
    return Reading(words, case, distances, forms)


def forms_of(dump: Dump, case: CompareCase, name: str, value: np.ndarray) -> Iterator[Form]:
    """Yield the forms, a meaning and a layout that fits the shape, in which an app may have saved the result `name` as
    the array `value`: first the documented one or, for an array without a time axis, the last step alone."""
    if name in ("h", "c") and value.shape == dump.shape(name)[1:]:
        yield Form("the last step alone", lambda v: v, f"last {name}")
    # variants: (a meaning in words, the function that converts it to the documented one, the name in `predicted`).
    variants: list[tuple[str, Callable[[np.ndarray], np.ndarray], str]] = [("", lambda v: v, name)]
    variants += [(words, lambda v: v, f"{name} {suffix}") for suffix, words in OTHERWISE.items()]
    if case.op == "lstm" and name in ("h", "c"):
        other = "c" if name == "h" else "h"
        variants.append((f"{other}, so h and c are exchanged", lambda v: v, other))
    gates = next((n for n, parts in enumerate(dump.groups(name)) if "G" in parts), None)
    if gates is not None:
        for order in orders(case):
            turned = partial(reordered, axis=gates, sizes=dump.sizes, index=gate_positions(case, order))
            variants.append((f"in the order {order_text(order)}", turned, name))
    if any("D" in letters for letters in dump.groups(name)):
        variants.append(("in the order reverse, forward", partial(directions_exchanged, dump, name), name))
    for words, convert, key in variants:
        for layout, to_documented in possible_layouts(dump, name, value):
            described = ", ".join(part for part in (words, layout) if part)
            yield Form(described, lambda v, convert=convert, to=to_documented: convert(to(v)), key)


OTHERWISE = {
    "before": "before the activations",
    "after": "after the activation",
    "squashed": "after the last activation",
    "product": "z, r and what r multiplies",
    "by step": "in the order of the steps",
    "halved": "its second direction in the order of the steps",
}
"""Descriptions of the values that an app may have saved instead of a documented result. A key is the part after the
result's name in a name that `predicted` returns, for example "squashed" in "c squashed"."""


def changes(dump: Dump, few: bool = False) -> Iterator[Change]:
    """Yield all changes of the interpretation to try. few: whether to leave out changes of a single activation, and of
    the gate order of a single array."""
    case = base_case(dump)[0]
    yield from of_layouts(dump)
    yield from of_options(case)
    weights = [name for name in case.arrays if name != "mask" and any("G" in part for part in dump.groups(name))]
    for order in orders(case):
        words = f"the gates of all weights are in the order {order_text(order)}"
        yield Change("order", words, reorder(dump, case, weights, order))
    for flag in FLAGS[case.op]:
        value = not case.descriptor.get(flag, False)
        # Leave out two changes that are impossible: `reverse` if both directions run, and switching `reset_after` off
        # in a case with `secondary_bias`, which only a GRU with `reset_after` has.
        if (flag, case.bidirectional) != ("reverse", True) and not (
            flag == "reset_after" and "secondary_bias" in case.arrays
        ):
            yield Change(flag, f"the descriptor has {flag} = {value}", with_property(flag, value))
    if few:
        return
    if len(weights) > 1:
        for name in weights:
            for order in orders(case):
                words = f"the gates of {name} alone are in the order {order_text(order)}"
                yield Change("order", words, reorder(dump, case, [name], order))
    for name, default in ACTIVATION_PROPERTIES[case.op].items():
        for word in ACTIVATIONS:
            if word != case.descriptor.get(name, default):
                yield Change("activation", f"the descriptor has {name} = {word!r}", with_property(name, word))


def of_layouts(dump: Dump) -> Iterator[Change]:
    """Yield a change for each undocumented layout that the shape of an argument allows, which converts it to the
    documented one, and with two directions one that exchanges them. `of_options` tries the layouts of masks."""
    case = dump.case
    for name, value in ((name, value) for name, value in case.arrays.items() if name != "mask"):
        for layout, to_documented in possible_layouts(dump, name, value)[1:]:  # the first one is the documented layout
            changed = lambda c, n=name, v=value, to=to_documented: c._replace(arrays=c.arrays | {n: to(v)})  # noqa: E731
            yield Change("layout", f"{name} is {layout}", changed)
    if case.bidirectional:
        yield Change("directions", "the reverse direction of all arguments comes first", lambda c: exchanged(dump, c))


def of_options(case: CompareCase) -> Iterator[Change]:
    """Yield a change for each point that Apple's documentation leaves open and that matters for this case. It selects
    the other interpretation: by an option of the oracle, or by changed arrays."""
    if "peephole" in case.arrays:
        yield Change("peephole", "the output gate peeps at c[t] (E:peephole)", readings={"output_peephole": "current"})
    if "hard_sigmoid" in case.descriptor.values():
        other = next(word for word in HARD_SIGMOIDS if word != "x/5")
        words = "hard_sigmoid has the slope 1/6 (E:hard_sigmoid)"
        yield Change("hard_sigmoid", words, readings={"hard_sigmoid": other})
    mask = case.arrays.get("mask")
    if case.bidirectional and mask is not None and mask.ndim == 3 and len(mask) == 2:
        yield Change("mask", "the mask is [2, N, H] (E:mask)", side_by_side)
    if {"state_gradient", "source_gradient"} <= set(case.arrays) and case.descriptor.get("reverse"):
        yield Change("grads", "state_gradient enters at time T-1 (E:grads)", moved)


def with_property(name: str, value: Any) -> Callable[[CompareCase], CompareCase]:
    return lambda case: case._replace(descriptor=case.descriptor | {name: value})


def documented_order(case: CompareCase) -> str:
    """Return the gate order that Apple documents for this case, in Apple's letters: see LETTERS."""
    if case.descriptor.get("forget_gate_last"):
        return "izfo"
    return "rzo" if case.descriptor.get("reset_gate_first") else LETTERS[case.op]


def orders(case: CompareCase) -> list[str]:
    """Return all gate orders of the op except the order that Apple documents."""
    by_apple = documented_order(case)
    return [order for order in map("".join, permutations(by_apple)) if order != by_apple]


def order_text(order: str) -> str:
    """Return a gate order as text, such as "[i, z, f, o] (forgetGateLast)", with the property that selects it."""
    names = {"izfo": " (forgetGateLast)", "rzo": " (resetGateFirst)"}
    return f"[{', '.join(order)}]{names.get(order, '')}"


def gate_positions(case: CompareCase, order: str) -> list[int]:
    """Return the position of each gate, in the documented order, in the gate order `order`, such as "izfo"."""
    return [order.index(gate) for gate in documented_order(case)]


def reorder(dump: Dump, case: CompareCase, names: list[str], order: str) -> Callable[[CompareCase], CompareCase]:
    """Return a function that converts the arrays `names` of a case from this gate order to the documented one."""
    # axes: the axis of the gates in each array.
    axes = {name: next(n for n, parts in enumerate(dump.groups(name)) if "G" in parts) for name in names}
    index = gate_positions(case, order)

    def apply(c: CompareCase) -> CompareCase:
        turned = {name: reordered(c.arrays[name], axis, dump.sizes, index) for name, axis in axes.items()}
        return c._replace(arrays=c.arrays | turned)

    return apply


def reordered(array: np.ndarray, axis: int, sizes: dict[str, int], index: list[int]) -> np.ndarray:
    """Return an array whose blocks of gates along `axis` are put into another order: block n of the result is block
    index[n]. Each block has H elements. With two directions all gates of the first direction come before those of the
    second. sizes: G gates, H units."""
    parts = np.moveaxis(array, axis, 0).reshape(-1, sizes["G"], sizes["H"], *np.delete(array.shape, axis))
    return np.moveaxis(parts[:, index].reshape(-1, *np.delete(array.shape, axis)), 0, axis)


def exchanged(dump: Dump, case: CompareCase) -> CompareCase:
    """Return a case with the two directions exchanged in all its arrays."""
    return case._replace(arrays={name: directions_exchanged(dump, name, a) for name, a in case.arrays.items()})


def directions_exchanged(dump: Dump, name: str, array: np.ndarray) -> np.ndarray:
    """Return an argument or a result, in its documented layout, with its two directions exchanged."""
    if name != "mask":
        axes = [axis for axis, letters in enumerate(dump.groups(name)) if "D" in letters]
    elif array.shape[-1:] == (2 * dump.sizes["H"],):
        axes = [-1]
    else:  # [2, N, H]; in a mask of any other layout both directions share the values
        axes = [0] if array.ndim == 3 and len(array) == 2 else []
    for axis in axes:
        array = np.concatenate(np.split(array, 2, axis)[::-1], axis)
    return array
