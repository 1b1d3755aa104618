"""What a dump may mean where it differs: layouts, gate orders, properties and the open readings, tried one by one, then
in pairs; the nearest are held against bounds derived for themselves."""

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, permutations
from typing import Any, NamedTuple

import numpy as np

from ..mpsgraph.layouts import ACTIVATIONS
from ..oracle.arithmetic import ACTIVATIONS as FUNCTIONS
from ..oracle.arithmetic import Arithmetic
from ..oracle.closeness import exact_and_bounds, largest
from .cases import ACTIVATION_PROPERTIES, COTANGENTS, RESULTS, Arrays, Case
from .dump import Dump, forms
from .experiments import preactivations, with_product
from .judge import HARD_SIGMOIDS, evaluated, options
from .report import progress

NEAREST = 3  # of all readings, so many are held against their bounds
FEW = 2  # items of the batch that a search by results of single items looks at
LETTERS = {"lstm": "ifzo", "gru": "zro", "single_gate_rnn": "h"}
FLAGS = {"lstm": ("reverse",), "gru": ("reverse", "flip_z", "reset_after"), "single_gate_rnn": ("reverse",)}


class Change(NamedTuple):
    """One thing read otherwise: of which kind, in words, and what it makes of the case; `readings` are the judge's."""

    kind: str
    words: str
    apply: Callable[[Case], Case] = lambda case: case
    readings: dict[str, str] = {}  # noqa: RUF012  nobody writes into it


class Shown(NamedTuple):
    """A result as it may have been dumped: in words, the way back to the documented layout, and what it should be."""

    words: str
    back: Callable[[np.ndarray], np.ndarray]
    value: str


class Reading(NamedTuple):
    """What explains a dump: in words, the case, by result the error in parts of its bound and how it was dumped."""

    words: list[str]
    case: Case
    distances: dict[str, float]
    shown: dict[str, str]

    @property
    def fitting(self) -> int:
        """How many results it explains."""
        return sum(distance <= 1 for distance in self.distances.values())


def base_case(dump: Dump) -> tuple[Case, list[str]]:
    """The dump's case in the documented layouts, and what had to be read otherwise for that."""
    arrays, words = dict(dump.case.arrays), []
    for name, value in arrays.items():
        if name != "mask":
            layout, back = forms(dump, name, value)[0]
            arrays[name] = back(value)
            words += [f"{name} is {layout}"] if layout else []
    return dump.case._replace(arrays=arrays), words


def search(dumps: list[Dump]) -> tuple[Reading, bool]:
    """The reading that explains most results, and whether pairs of changes were tried."""
    best = judged(dumps[0], ())
    if best.fitting < len(best.distances):
        alone = [(dump, chosen) for dump in dumps for chosen in [(), *((one,) for one in changes(dump))]]
        best = nearest(alone, "readings")
    if best.fitting == len(best.distances):
        return best, False
    pairs = [(dump, pair) for dump in dumps for pair in combinations(list(changes(dump, few=True)), 2)]
    pairs = [(dump, pair) for dump, pair in pairs if pair[0].kind != pair[1].kind or pair[0].kind == "layout"]
    return max(best, nearest(pairs, "pairs of readings"), key=lambda reading: reading.fitting), True


def nearest(candidates: list[tuple[Dump, tuple[Change, ...]]], title: str) -> Reading:
    """Of the candidates the first that explains everything, else the one that explains most, among the nearest."""
    ranked = []
    for n, (dump, chosen) in enumerate(progress(candidates, title)):
        ranked.append((rank(dump, chosen), n))
    found = []
    for _, n in sorted(ranked)[:NEAREST]:
        found.append(judged(*candidates[n]))
        if found[-1].fitting == len(found[-1].distances):
            break
    return max(found, key=lambda reading: reading.fitting)


def applied(dump: Dump, chosen: Iterable[Change]) -> tuple[Case, dict[str, str], list[str]]:
    """The case in this reading, the judge's readings, the words."""
    case, words = base_case(dump)
    readings: dict[str, str] = {}
    for change in chosen:
        subject = change.words.partition(" is ")[0]
        words = [*(word for word in words if word.partition(" is ")[0] != subject), change.words]
        case = change.apply(case)
        readings |= change.readings
    return case, readings, words


def rank(dump: Dump, chosen: tuple[Change, ...]) -> float:
    """How far the reading is from the dump, in float64: the mean logarithm of each result's relative error."""
    case, readings, _ = applied(dump, chosen)
    alone = {name: value for name, value in dump.results.items() if name in RESULTS[case.op]}
    results, places = dump.results, {}
    if alone:
        # Items of a batch do not mix on the way forward: a few are as good as all.
        results = alone
        arrays = {name: value for name, value in case.arrays.items() if name not in COTANGENTS[case.op]}
        for name, value in arrays.items():
            place = (
                -2 if name == "mask" else next((n for n, parts in enumerate(dump.groups(name)) if "N" in parts), None)
            )
            if place is not None and value.ndim >= 2 and value.shape[place] == dump.sizes["N"]:
                arrays[name] = np.take(value, range(min(FEW, dump.sizes["N"])), place)
        case = case._replace(arrays=arrays)
        places = {name: range(min(FEW, dump.sizes["N"])) for name in results}
    try:
        with np.errstate(all="ignore"):
            values = predicted(case, Arithmetic(np.float64), readings)
    except ValueError:  # a mask that does not fit
        return np.inf
    total = 0.0
    for name, value in results.items():
        errors = [1.0]
        for shown in presentations(dump, case, name, value):
            if shown.value in values:
                got = shown.back(value).astype(np.float64)
                got = np.take(got, places[name], -2) if name in places else got
                exact = values[shown.value]
                errors.append(largest(got - exact) / (largest(exact) or 1.0))
        total += np.log10(np.nanmin(errors) + 1e-16)
    return total / len(results)


def judged(dump: Dump, chosen: tuple[Change, ...]) -> Reading:
    """The reading with every result's error in parts of the bound derived for it."""
    case, readings, words = applied(dump, chosen)
    try:
        exact, bound = exact_and_bounds(lambda fl: predicted(case, fl, readings), case.arrays["source"].dtype)
    except ValueError:
        return Reading(words, case, dict.fromkeys(dump.results, np.inf), {})
    distances, manner = {}, {}
    for name, value in dump.results.items():
        distances[name], manner[name] = np.inf, ""
        for shown in presentations(dump, case, name, value):
            if shown.value in exact:
                error = largest(shown.back(value).astype(np.float64) - exact[shown.value]) / (bound[shown.value] or 1.0)
                if error < distances[name]:
                    distances[name], manner[name] = error, shown.words
                if error <= 1:
                    break
    return Reading(words, case, distances, manner)


def presentations(dump: Dump, case: Case, name: str, value: np.ndarray) -> Iterator[Shown]:
    """The ways in which a result may have been dumped, the documented one first."""
    if name in ("h", "c") and value.shape == dump.shape(name)[1:]:
        yield Shown("the last step alone", lambda v: v, f"last {name}")
    ways = forms(dump, name, value)
    for layout, back in ways:
        yield Shown(layout, back, name)
    others = [f"{name} {word}" for word in ("before", "after", "squashed", "product", "by step", "halved")]
    for word in others:
        for layout, back in ways:
            yield Shown(", ".join(part for part in (OTHERWISE[word.split(" ", 1)[1]], layout) if part), back, word)
    gates = next((n for n, parts in enumerate(dump.groups(name)) if "G" in parts), None)
    if gates is not None:
        for order in orders(case):
            for layout, back in ways:
                words = ", ".join(part for part in (f"in the order {spelled(order)}", layout) if part)
                yield Shown(
                    words, lambda v, b=back, o=order: reordered(b(v), gates, dump.sizes, inverse(case, o)), name
                )


OTHERWISE = {
    "before": "before the activations",
    "after": "after the activation",
    "squashed": "after the last activation",
    "product": "z, r and what r multiplies",
    "by step": "in the order of the steps",
    "halved": "its second direction in the order of the steps",
}
"""A result that is something else, in words, by the second half of its key in `predicted`."""


def predicted(case: Case, fl: Arithmetic, readings: dict[str, str]) -> Arrays:
    """All results as documented, and what may have been dumped in their place."""
    found = evaluated(case, fl, **readings)
    more = {"z_state before": preactivations(case, fl, **readings)} if case.op != "single_gate_rnn" else {}
    if case.op == "single_gate_rnn":
        more["z_state after"] = found["h"]
    if case.op == "lstm":
        activation = options(case, **readings)["activations"][-1]
        more["c squashed"] = FUNCTIONS[activation](found["c"], fl)
    if case.op == "gru" and {"init_state", "secondary_bias"} <= set(case.arrays) and "mask" not in case.arrays:
        more["z_state product"] = with_product(case, fl)
    reverse = case.descriptor.get("reverse", False) and not case.bidirectional
    for name in RESULTS[case.op]:
        value = found[name]
        half = value.shape[-1] // 2
        if reverse:
            more[f"{name} by step"] = value[::-1]
        if case.bidirectional:
            more[f"{name} halved"] = np.concatenate([value[..., :half], value[::-1, :, half:]], axis=-1)
        if name != "z_state":
            ends = value[-1, :, :half], value[0, :, half:]
            more[f"last {name}"] = np.concatenate(ends, -1) if case.bidirectional else value[0 if reverse else -1]
    return found | more


def changes(dump: Dump, few: bool = False) -> Iterator[Change]:
    """Everything that may be read otherwise; `few`: without what concerns one array or one activation alone."""
    case = base_case(dump)[0]
    yield from of_layouts(dump)
    yield from of_options(case)
    weights = [name for name in case.arrays if name != "mask" and any("G" in part for part in dump.groups(name))]
    for order in orders(case):
        yield Change(
            "order", f"the gates of all weights are in the order {spelled(order)}", reorder(dump, case, weights, order)
        )
    for flag in FLAGS[case.op]:
        value = not case.descriptor.get(flag, False)
        if (flag, case.bidirectional) != ("reverse", True) and not (
            flag == "reset_after" and "secondary_bias" in case.arrays
        ):
            yield Change(flag, f"the descriptor has {flag} = {value}", described(flag, value))
    if few:
        return
    if len(weights) > 1:
        for name in weights:
            for order in orders(case):
                yield Change(
                    "order",
                    f"the gates of {name} alone are in the order {spelled(order)}",
                    reorder(dump, case, [name], order),
                )
    defaults = {"activation": "tanh" if case.op == "lstm" else "relu", "cell_gate_activation": "tanh"}
    defaults |= {"output_gate_activation": "tanh"} if case.op == "gru" else {}
    for name in ACTIVATION_PROPERTIES[case.op]:
        for word in ACTIVATIONS:
            if word != case.descriptor.get(name, defaults.get(name, "sigmoid")):
                yield Change("activation", f"the descriptor has {name} = {word!r}", described(name, word))


def of_layouts(dump: Dump) -> Iterator[Change]:
    """Each argument in each other layout that its shape allows; the directions exchanged."""
    case = dump.case
    for name, value in ((name, value) for name, value in case.arrays.items() if name != "mask"):
        for layout, back in forms(dump, name, value)[1:]:
            changed = lambda c, n=name, v=value, b=back: c._replace(arrays=c.arrays | {n: b(v)})  # noqa: E731
            yield Change("layout", f"{name} is {layout}", changed)
    if case.bidirectional:
        yield Change("directions", "the reverse direction comes first", lambda c: exchanged(dump, c))


def of_options(case: Case) -> Iterator[Change]:
    """The readings that Apple's texts leave open, as far as they are arguments of the dialect or of the case."""
    if "peephole" in case.arrays:
        yield Change("peephole", "the output gate peeps at c[t] (E:peephole)", readings={"output_peephole": "current"})
    if "hard_sigmoid" in case.descriptor.values():
        other = next(word for word in HARD_SIGMOIDS if word != "x/5")
        yield Change(
            "hard_sigmoid", "hard_sigmoid has the slope 1/6 (E:hard_sigmoid)", readings={"hard_sigmoid": other}
        )
    mask = case.arrays.get("mask")
    if case.bidirectional and mask is not None and mask.ndim == 3 and len(mask) == 2:
        beside = lambda c: c._replace(arrays=c.arrays | {"mask": np.concatenate(list(c.arrays["mask"]), -1)})  # noqa: E731
        yield Change("mask", "the mask is [2, N, H] (E:mask)", beside)
    if {"state_gradient", "source_gradient"} <= set(case.arrays) and case.descriptor.get("reverse"):
        yield Change("grads", "state_gradient enters at time T-1 (E:grads)", moved)


def moved(case: Case) -> Case:
    """The state's gradient as one of h at the last time."""
    arrays = {name: array for name, array in case.arrays.items() if name != "state_gradient"}
    arrays["source_gradient"] = case.arrays["source_gradient"].copy()
    arrays["source_gradient"][-1] += case.arrays["state_gradient"]
    return case._replace(arrays=arrays)


def described(name: str, value: Any) -> Callable[[Case], Case]:
    """The case with another property."""
    return lambda case: case._replace(descriptor=case.descriptor | {name: value})


def documented(case: Case) -> str:
    """The order of the gates that the descriptor says."""
    if case.descriptor.get("forget_gate_last"):
        return "izfo"
    return "rzo" if case.descriptor.get("reset_gate_first") else LETTERS[case.op]


def orders(case: Case) -> list[str]:
    """All orders of the gates but the documented one."""
    return ["".join(order) for order in permutations(documented(case)) if "".join(order) != documented(case)]


def spelled(order: str) -> str:
    """An order as Apple writes it, with the property that gives it."""
    names = {"izfo": " (forgetGateLast)", "rzo": " (resetGateFirst)"}
    return f"[{', '.join(order)}]{names.get(order, '')}"


def inverse(case: Case, order: str) -> list[int]:
    """Where in `order` each gate of the documented order is."""
    return [order.index(gate) for gate in documented(case)]


def reorder(dump: Dump, case: Case, names: list[str], order: str) -> Callable[[Case], Case]:
    """The arrays brought from an order of the gates to the documented one."""
    places = {name: next(n for n, parts in enumerate(dump.groups(name)) if "G" in parts) for name in names}

    def apply(c: Case) -> Case:
        turned = {n: reordered(c.arrays[n], axis, dump.sizes, inverse(case, order)) for n, axis in places.items()}
        return c._replace(arrays=c.arrays | turned)

    return apply


def reordered(array: np.ndarray, axis: int, sizes: dict[str, int], index: list[int]) -> np.ndarray:
    """The blocks of an axis [D] G H in another order."""
    parts = np.moveaxis(array, axis, 0).reshape(-1, sizes["G"], sizes["H"], *np.delete(array.shape, axis))
    return np.moveaxis(parts[:, index].reshape(-1, *np.delete(array.shape, axis)), 0, axis)


def exchanged(dump: Dump, case: Case) -> Case:
    """The halves of everything that has two directions."""
    arrays = dict(case.arrays)
    for name in arrays:
        if name == "mask":
            continue
        for axis, parts in enumerate(dump.groups(name)):
            if "D" in parts:
                arrays[name] = np.concatenate(np.split(arrays[name], 2, axis)[::-1], axis)
    return case._replace(arrays=arrays)
