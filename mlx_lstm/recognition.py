"""Find out which call of `lstm`, `gru` or `rnn` equals a recurrent cell that somebody wrote by hand.

The cell runs for one step with parameters that are 0 except for one block of H rows. The output shows what this
block is for. For example, if the block is the forget gate's matrix W of x, then c is multiplied by sigmoid(W x). So
the number of runs grows with the number of blocks, not with the number of their combinations.

The blocks of an LSTM's gate i and of a GRU's gate r have no effect while all other parameters are 0. So each of them
runs again while another block, of gate g (LSTM) or n (GRU), is not 0. At the end all values and gradients are compared
over several steps.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from .checks import check_integer, fail
from .recurrence import gru, lstm, rnn

OP = "recognise"
OPS = {"lstm": lstm, "gru": gru, "rnn": rnn}
GATES = {"lstm": "ifgo", "gru": "rzn", "rnn": "h"}
HIDDEN = {"lstm": "i", "gru": "r", "rnn": ""}
"""For each op the gate whose weights have no effect while all other parameters are 0."""

OPENER = {"lstm": ("g", "x"), "gru": ("n", "h")}
"""For each op the weights, as (gate, kind), that are not 0 while the weights of the `HIDDEN` gate are tried. Without
them the weights of the `HIDDEN` gate would not change the result."""

ROUNDING = 1e-4
"""The largest relative difference of equal results. Rounding in float32 gives about 1e-6, another formula 1e-2."""

B, T = 3, 4

Array = Any  # an array of NumPy or of MLX
Part = tuple[str, str]
"""What a block of weights is for: (gate, kind). Kinds: "x" and "h" are matrices of the input and the state, "b" is a
bias, "bhn" a bias that the reset gate multiplies, "p" a peephole."""


class Block(NamedTuple):
    """H rows of one parameter of the user's module, which may be the weights of one gate.

    The rows are taken from a view of the parameter: the parameter itself, its transpose, or some of its columns. The
    view consists of k blocks: it has k H rows if it is a matrix, and k H elements if it is a bias.

        name: the parameter's key in the module        title: the Python code for the parameter
        view: the function that returns the view       form: the code for it, such as ".T"
        columns: the code for the columns, such as ":5"
        row: the index of this block among the k blocks of the view
        kinds: what the block may be by its shape, such as "x" for a matrix of the input (see `Part`)
    """

    name: str
    title: str
    view: Callable[[Array], Array]
    form: str
    columns: str
    row: int
    k: int
    kinds: tuple[str, ...]

    def text(self, rows: str = "") -> str:
        """Return the Python code for these rows of the parameter, such as "self.weight[0:4]". Without `rows` return
        the code for all rows."""
        index = f"[{rows or ':'}, {self.columns}]" if self.columns else rows and f"[{rows}]"
        return f"{self.title}{self.form}{index}"


class Expression(NamedTuple):
    """An argument of the call that `recognise` returns: its Python code, and a function that computes its value from
    the module's parameters by name."""

    text: str
    value: Callable[[dict[str, mx.array]], mx.array]


class Way(NamedTuple):
    """A hypothesis on what the user's cell computes: a function of this package, such as "lstm", and its options."""

    op: str
    options: dict[str, Any]


def recognise(module: nn.Module, step: Callable[[mx.array, Any], Any], D: int, H: int, *, name: str = "") -> str | None:
    """Return the call of `lstm`, `gru` or `rnn` that equals a recurrent cell written by hand, as a line to paste.

    The function runs `step` with parameters that it chooses, finds out which rows of which parameter belong to which
    gate, and compares values and gradients over several steps. So it does not matter how the cell is written or what
    its parameters are called. There may be one matrix or one for each gate, joined or separate weights of x and h,
    transposed or not, in any gate order, and no, one or two biases. The cell may be

    - an LSTM, also with a constant forget bias or with peepholes;
    - a GRU that resets before or after its product, whose z is the weight of the old h or of the candidate;
    - a plain RNN with tanh, relu or sigmoid.

    Args:
        module (Module): has all parameters of the cell, and maybe others. They are replaced while the function runs,
            and restored.
        step (callable): one step of the cell, `step(x, state) -> state`. x is [B, D]; the state is `(h, c)` for an
            LSTM, else h, each [B, H]. It must read the parameters from the module at each call: it must not be compiled
            by `mx.compile` before.
        D (int): the number of features of x.
        H (int): the number of units, at least 2.
        name (str): the name of the module in the returned line, such as `"self"`. Default: the line has the names of
            the parameters without a module.

    Returns:
        str or None: a call whose x is [T, B, D] and whose output is `.h`; add `h0=` and `c0=` for first states. None if
        no call equals the cell within rounding.

    Raises:
        ValueError: an argument breaks a rule, or `step` runs neither with the state h nor with (h, c).

    Example:
        >>> import mlx.core as mx
        >>> import mlx.nn as nn
        >>> from mlx_lstm import recognise
        >>> model = nn.Sequential(nn.Linear(7, 20))
        >>> def step(x, state):
        ...     h, c = state
        ...     i, f, o, g = mx.split(model.layers[0](mx.concatenate([x, h], axis=-1)), 4, axis=-1)
        ...     c = mx.sigmoid(f + 1) * c + mx.sigmoid(i) * mx.tanh(g)
        ...     return mx.sigmoid(o) * mx.tanh(c), c
        >>> line = recognise(model, step, D=2, H=5, name="model")
        >>> print(line.replace(", b=", ",\\n     b="))
        lstm(x, model.layers[0].weight[:, :2], model.layers[0].weight[:, 2:],
             b=model.layers[0].bias, gate_order='ifog', forget_bias=1.0)
    """
    if not isinstance(module, nn.Module):
        fail(OP, "module must be a module that holds the cell's parameters", type(module).__name__)
    if not callable(step):
        fail(OP, "step must be a function, step(x, state) -> state,", type(step).__name__)
    D, H = check_integer(OP, "D", D, least=1), check_integer(OP, "H", H, least=2)
    before: Any = tree_flatten(module.parameters())
    floats = {key: array.shape for key, array in before if mx.issubdtype(array.dtype, mx.floating)}
    trial = Trial(module, step, floats, D, H, name)
    try:
        with_tuple, without = trial.baseline(True), trial.baseline(False)
        if with_tuple is None and without is None:
            fail(OP, "step must run for x [B, D] and the state (h, c) or h, each [B, H],", trial.error)
        for way in [*ways_of_lstm(with_tuple, trial.c), *OTHERS]:
            if (without if way.op != "lstm" else with_tuple) is None:
                continue
            parts = parts_of(way, trial)
            arguments = None if parts is None else arguments_of(way, parts, H)
            if arguments is not None and equals(way, arguments, trial):
                return line_of(way, arguments)
    finally:
        module.update(tree_unflatten(before))
    return None


OTHERS = [Way("gru", {"reset": reset, "flip_z": flip}) for reset in ("after", "before") for flip in (False, True)]
OTHERS += [Way("rnn", {"activation": word}) for word in ("tanh", "relu", "sigmoid")]


def ways_of_lstm(baseline: np.ndarray | None, c: np.ndarray) -> list[Way]:
    """Return the hypotheses on the formula of a cell with the states h and c: an LSTM with peepholes that read the
    current or the previous c.

    baseline: the h and c that the cell returns after one step with all parameters 0. Such a step multiplies c by the
    sigmoid of the forget bias, so the forget bias is computed from the change of c. If the result is not one number
    for all units, the list is empty.
    """
    if baseline is None:
        return []
    with np.errstate(all="ignore"):
        factor = baseline[1] / c
        bias = np.log(factor / (1 - factor))
    if not np.isfinite(bias).all() or np.ptp(bias) > 1e-3:
        return []
    return [
        Way("lstm", {"output_peephole": word, "forget_bias": round(float(np.median(bias)), 4) + 0.0})
        for word in ("current", "previous")
    ]


class Trial:
    """Run the user's cell for one step with chosen parameters on fixed random inputs, and cache the results."""

    module: nn.Module
    step: Callable[..., Any]
    shapes: dict[str, Any]
    D: int
    H: int
    x: np.ndarray
    h: np.ndarray
    c: np.ndarray

    def __init__(self, module: nn.Module, step: Callable[..., Any], shapes: dict[str, Any], D: int, H: int, name: str):
        """Draw the inputs of a step. shapes: the shapes of all float parameters by key; name: the module's name in
        the Python code that `recognise` returns."""
        self.module, self.step, self.shapes, self.D, self.H = module, step, shapes, D, H
        self.error: str = ""
        draws = np.random.default_rng(0)
        self.x, self.h, self.c = (draws.uniform(-1, 1, (B, width)) for width in (D, H, H))
        self.blocks: list[Block] = [
            each for key in shapes for each in blocks_of(key, title_of(key, name), shapes[key], D, H)
        ]
        self.known: dict[Any, np.ndarray | None] = {}

    def numbers(self, block: Block) -> np.ndarray:
        """Return the random weights [H, C] or [H] for a block of rows. In each run of the cell all blocks are 0 except
        one or two, which have these weights. The weights of a block are the same in every run."""
        C = {"x": self.D, "h": self.H}.get(block.kinds[0])
        draws = np.random.default_rng([block.row, self.blocks.index(block)])
        return draws.uniform(-1.5, 1.5, (self.H, C) if C else self.H) / np.sqrt(C or 1)

    def baseline(self, pair: bool) -> np.ndarray | None:
        """Return the states after one step with all parameters 0, or None if the step raises an error. pair: whether
        the state is (h, c), not only h."""
        return self.run(pair, ())

    def run(self, pair: bool, blocks: tuple[int, ...]) -> np.ndarray | None:
        """Run the user's cell for one step in which all parameters are 0 except for some blocks (H rows of a
        parameter each). blocks: their indices in `self.blocks`. pair: whether the state is (h, c), not only h.
        Return the new states [1 or 2, B, H]. Return None if the step raises an error or returns something else."""
        if (pair, blocks) in self.known:
            return self.known[pair, blocks]
        arrays = {key: np.zeros(shape, np.float32) for key, shape in self.shapes.items()}
        for n in blocks:
            block = self.blocks[n]
            rows = slice(block.row * self.H, (block.row + 1) * self.H)
            block.view(arrays[block.name])[rows] = self.numbers(block)
        self.set({key: mx.array(array) for key, array in arrays.items()})
        x, h, c = (mx.array(each, mx.float32) for each in (self.x, self.h, self.c))
        found = None
        try:
            states = self.states(self.step(x, (h, c) if pair else h), pair)
            found = np.stack([np.array(state.astype(mx.float32)) for state in states])
        except Exception as error:  # the user's function may raise any error for a state that it does not take
            self.error = f"{type(error).__name__}: {error}"
        self.known[pair, blocks] = found
        return found

    def states(self, result: Any, pair: bool) -> list[mx.array]:
        """Return the states that a step returned as a list, h or h and c, after checking their number and shapes."""
        states = list(result) if pair and isinstance(result, (tuple, list)) else [result]
        shapes = [getattr(state, "shape", type(state).__name__) for state in states]
        if shapes != [(B, self.H)] * (1 + pair):
            wanted = "(h, c), two arrays" if pair else "h, an array"
            raise ValueError(f"it must return {wanted} [B, {self.H}], but returned {shapes}")
        return states

    def set(self, arrays: dict[str, mx.array]) -> None:
        """Replace the parameters of the module."""
        self.module.update(tree_unflatten(list(arrays.items())))


def title_of(key: str, module: str) -> str:
    """Return the Python code for a parameter: "self.layers[0].weight" for the key "layers.0.weight" of a module
    called self."""
    words = f"{module}.{key}".strip(".").split(".")
    return "".join(f"[{word}]" if word.isdecimal() else f".{word}" for word in words).removeprefix(".")


def blocks_of(name: str, title: str, shape: tuple[int, ...], D: int, H: int) -> Iterator[Block]:
    """Yield the blocks of a parameter: all groups of H rows that, by their shape, may be the weights of one gate. The
    rows are rows of the parameter or of its transpose. If one matrix may hold the weights of x and of h side by side,
    only the columns for x, or only the columns for h, are part of a block. D and H are the widths of x and h."""
    if len(shape) == 3 and shape[0] <= 8:
        for n in range(shape[0]):
            for block in blocks_of(name, title, shape[1:], D, H):
                view = block.view
                yield block._replace(form=f"[{n}]{block.form}", view=lambda a, n=n, view=view: view(a[n]))
    if len(shape) == 2 and shape[0] <= 8 and shape[1] % H == 0:  # several biases in one array, one per row
        for n, row in product(range(shape[0]), range(shape[1] // H)):
            yield Block(name, title, lambda a, n=n: a[n], f"[{n}]", "", row, shape[1] // H, ("b", "bhn", "p"))
    if len(shape) == 1 and shape[0] % H == 0:
        for row in range(shape[0] // H):
            yield Block(name, title, lambda a: a, "", "", row, shape[0] // H, ("b", "bhn", "p"))
    if len(shape) != 2:
        return
    columns = {"x": [(D, 0, D, ""), (D + H, 0, D, f":{D}"), (D + H, H, D + H, f"{H}:")]}
    columns["h"] = [(H, 0, H, ""), (D + H, D, D + H, f"{D}:"), (D + H, 0, H, f":{H}")]
    for form, (rows, width) in (("", shape), (".T", shape[::-1])):
        for kind, C, start, stop, text in [(kind, *each) for kind, all_of in columns.items() for each in all_of]:
            if width == C and rows % H == 0:
                turn = form == ".T"
                for row in range(rows // H):
                    yield Block(
                        name,
                        title,
                        lambda a, turn=turn, start=start, stop=stop: (a.T if turn else a)[:, start:stop],
                        form,
                        text,
                        row,
                        rows // H,
                        (kind,),
                    )


def parts_of(way: Way, trial: Trial) -> dict[Part, list[Block]] | None:
    """Find out which blocks (H rows of a parameter) are the weights of which gate, if the cell computes the formula
    `way` (an op and its options). Return a dict from (gate, kind) to lists of blocks; kind says what the weights
    multiply, such as "x" or "h" (see `Part`). Return None if the cell computes something else."""
    baseline = trial.baseline(way.op == "lstm")
    if baseline is None or not near(baseline, stepped(way, trial, {})):
        return None
    parts: dict[Part, list[Block]] = {}
    rest = []
    for n, block in enumerate(trial.blocks):
        part = part_of(way, trial, n, [gate for gate in GATES[way.op] if gate != HIDDEN[way.op]], ())
        parts.setdefault(part, []).append(block) if part else rest.append(n)
    if way.op == "rnn":
        return parts
    opener = parts.get(OPENER[way.op], [])
    if len(opener) != 1:
        return None
    context = (trial.blocks.index(opener[0]),)
    for n in rest:
        if part := part_of(way, trial, n, [HIDDEN[way.op]], context):
            parts.setdefault(part, []).append(trial.blocks[n])
    return parts


def part_of(way: Way, trial: Trial, n: int, gates: list[str], context: tuple[int, ...]) -> Part | None:
    """Find out to which gate block n (H rows of a parameter) belongs, and what its weights multiply. Return (gate,
    kind), where kind is "x", "h" or another word of `Part`. Return None if no gate fits.

    The user's cell runs one step with all parameters 0 except for this block. The formula `way` (an op and its
    options) runs one step with the same numbers as the weights of one gate and kind. If both give the same states,
    this gate and kind are right. gates: the gates to try. context: the index of another block that is not 0, because
    some gates have no effect alone; or ().
    """
    got = trial.run(way.op == "lstm", (*context, n))
    if got is None:
        return None
    known = {OPENER[way.op]: trial.numbers(trial.blocks[context[0]])} if context else {}
    block = trial.blocks[n]
    for part in product(gates, block.kinds):
        if part[1] == "bhn" and (part[0] != "n" or way.options["reset"] != "after"):
            continue
        if part[1] == "p" and (way.op != "lstm" or part[0] == "g"):
            continue
        if near(got, stepped(way, trial, known | {part: trial.numbers(block)})):
            return part
    return None


def near(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two arrays agree within rounding."""
    return bool(np.all(np.abs(one - other) <= ROUNDING * max(1, float(np.abs(other).max()))))


def sigmoid(x: Any) -> np.ndarray:
    """Return the sigmoid of x."""
    return 1 / (1 + np.exp(-np.asarray(x)))


def stepped(way: Way, trial: Trial, weights: dict[Part, np.ndarray]) -> np.ndarray:
    """Compute one step of the formula `way` (an op such as "gru" with its options). `weights` holds the weights that
    are not 0 by (gate, kind); kind says what the weights multiply, such as "x" or "h". Return the states [1 or 2, B,
    H]."""
    x, h, c, options = trial.x, trial.h, trial.c, way.options
    zero = np.zeros((1, 1))

    def input_part(gate: str) -> np.ndarray:
        """Return the part of a gate's preactivation that comes from x and the bias."""
        W = weights.get((gate, "x"))
        return (zero if W is None else x @ W.T) + weights.get((gate, "b"), zero)

    def state_part(gate: str, h: np.ndarray = h) -> np.ndarray:
        """Return the part of a gate's preactivation that comes from h."""
        W = weights.get((gate, "h"))
        return zero if W is None else h @ W.T

    def gate(name: str, c: np.ndarray | None = None, bias: float = 0.0) -> np.ndarray:
        """Return the value of a gate. c: the cell state that the gate's peephole reads."""
        peep = zero if c is None else weights.get((name, "p"), zero) * c
        return sigmoid(input_part(name) + state_part(name) + peep + bias)

    if way.op == "lstm":
        i, f, g = gate("i", c), gate("f", c, options["forget_bias"]), np.tanh(input_part("g") + state_part("g"))
        new = f * c + i * g
        return np.stack([gate("o", new if options["output_peephole"] == "current" else c) * np.tanh(new), new])
    if way.op == "gru":
        r, z = gate("r"), gate("z")
        inner = state_part("n", r * h) if options["reset"] == "before" else 0
        if options["reset"] == "after":
            inner = r * (state_part("n") + weights.get(("n", "bhn"), zero))
        n = np.tanh(input_part("n") + inner)
        z = 1 - z if options["flip_z"] else z
        return np.broadcast_to(z * h + (1 - z) * n, (1, *h.shape))
    function = {"tanh": np.tanh, "relu": lambda a: np.maximum(a, 0), "sigmoid": sigmoid}[options["activation"]]
    return np.broadcast_to(function(input_part("h") + state_part("h")), (1, *h.shape))


def arguments_of(way: Way, parts: dict[Part, list[Block]], H: int) -> dict[str, Any] | None:
    """Return the arguments of the call by name: an `Expression` for each array, and the options. Return None if a
    gate lacks a matrix or has two."""
    gates = GATES[way.op]
    if any(len(parts.get((gate, kind), [])) != 1 for gate in gates for kind in "xh"):
        return None
    whole = [order_of([parts[gate, kind] for gate in gates], gates) for kind in "xh"]
    order = next((found for found in whole if found), gates)
    arguments: dict[str, Any] = {"Wx": joined([parts[gate, "x"] for gate in order], order, H)}
    arguments["Wh"] = joined([parts[gate, "h"] for gate in order], order, H)
    if any((gate, "b") in parts for gate in gates):
        arguments["b"] = joined([parts.get((gate, "b"), []) for gate in order], order, H)
    if ("n", "bhn") in parts:
        arguments["bhn"] = joined([parts["n", "bhn"]], "n", H)
    if any((gate, "p") in parts for gate in gates):
        arguments["peephole"] = joined([parts.get((gate, "p"), []) for gate in order], order, H)
    elif way.options.get("output_peephole") == "previous":
        return None  # without peepholes it is the same as "current", which was tested before
    defaults = {"reset": "after", "flip_z": False, "activation": "tanh", "output_peephole": "current", "forget_bias": 0}
    options = {"gate_order": order} if order != gates else {}
    return arguments | options | {key: value for key, value in way.options.items() if value != defaults[key]}


def order_of(blocks: list[list[Block]], gates: str) -> str:
    """Return the gate order, such as "ifgo", in which one parameter holds the blocks of all gates. A block is H rows
    of a parameter. `blocks` has a list of blocks for each of the `gates`. Return "" if a gate has several blocks, or
    if the blocks belong to different parameters."""
    firsts = [each[0] for each in blocks if len(each) == 1]
    like = {(block.name, block.form, block.columns) for block in firsts}
    if len(firsts) != len(gates) or len(like) != 1 or firsts[0].k != len(gates):
        return ""
    return "".join(gate for _, gate in sorted(zip([block.row for block in firsts], gates, strict=True)))


def joined(blocks: list[list[Block]], order: str, H: int) -> Expression:
    """Return the code of one argument of the call: the weights of all gates one after the other. `blocks` has for each
    gate its blocks (H rows of a parameter each). Several blocks of one gate are several biases, so they are added."""
    # If the blocks together are whole parameters, in the gate order of the call, the code needs no slices, such as
    # "ih.bias + hh.bias". Test this: each entry of `columns` has one block of every gate, which may be one parameter.
    columns = list(zip(*blocks, strict=True)) if len({len(each) for each in blocks}) == 1 and blocks[0] else []
    if columns and all(order_of([[block] for block in column], order) == order for column in columns):
        firsts = [column[0] for column in columns]
        return Expression(
            " + ".join(first.text() for first in firsts),
            lambda arrays: sum([first.view(arrays[first.name]) for first in firsts[1:]], whole(firsts[0], arrays)),
        )
    texts = [" + ".join(sliced(block, H) for block in each) or f"mx.zeros({H})" for each in blocks]
    text = texts[0] if len(texts) == 1 else f"mx.concatenate([{', '.join(texts)}])"

    def value(arrays: dict[str, mx.array]) -> mx.array:
        rows = []
        for each in blocks:
            terms = [whole(block, arrays)[block.row * H : (block.row + 1) * H] for block in each]
            rows.append(sum(terms[1:], terms[0]) if terms else mx.zeros(H))
        return mx.concatenate(rows)

    return Expression(text, value)


def whole(block: Block, arrays: dict[str, mx.array]) -> mx.array:
    """Return all rows of the parameter from which `block` (H of its rows) was taken."""
    return block.view(arrays[block.name])


def sliced(block: Block, H: int) -> str:
    """Return the Python code that selects a block of H rows from its parameter, such as "self.weight[0:4]"."""
    return block.text(f"{block.row * H}:{(block.row + 1) * H}" if block.k > 1 else "")


def equals(way: Way, arguments: dict[str, Any], trial: Trial) -> bool:
    """Return whether `lstm`, `gru` or `rnn`, called with these arguments, equals the user's cell over several steps:
    all values, and the gradients of all parameters, of x and of the first states. The parameters are drawn at
    random."""
    random, H = np.random.default_rng(1), trial.H
    arrays = {
        key: mx.array(random.normal(size=shape) / np.sqrt(max(1, *shape, 1)), mx.float32)
        for key, shape in trial.shapes.items()
    }
    pair = way.op == "lstm"
    inputs = [mx.array(random.normal(size=shape), mx.float32) for shape in [(T, B, trial.D), *[(B, H)] * (1 + pair)]]
    weights = [mx.array(random.normal(size=(T, B, H)), mx.float32) for _ in range(1 + pair)]

    def by_hand(arrays: dict[str, mx.array], x: mx.array, *first: mx.array) -> tuple[mx.array, list[mx.array]]:
        trial.set(arrays)
        state: Any = first if pair else first[0]
        steps = []
        for x_t in x:
            state = trial.step(x_t, state)
            steps.append(trial.states(state, pair))
        outputs = [mx.stack(list(each)) for each in zip(*steps, strict=True)]
        return loss(outputs), outputs

    def by_call(arrays: dict[str, mx.array], x: mx.array, *first: mx.array) -> tuple[mx.array, list[mx.array]]:
        values = {key: each.value(arrays) if isinstance(each, Expression) else each for key, each in arguments.items()}
        values |= dict(zip(("h0", "c0"), first, strict=False))
        found: Any = OPS[way.op](x, **values, engine="ops")
        outputs = [found.h, found.c] if pair else [found.h]
        return loss(outputs), outputs

    def loss(outputs: list[mx.array]) -> mx.array:
        return sum((weight * each).sum() for weight, each in zip(weights, outputs, strict=True))  # pyright: ignore

    results = []
    for function in (by_hand, by_call):
        (_, outputs), gradients = mx.value_and_grad(function, argnums=tuple(range(2 + len(inputs[1:]))))(
            arrays, *inputs
        )
        results.append(tree_flatten([outputs, gradients]))
    return all(near(np.array(one), np.array(other)) for (_, one), (_, other) in zip(*results, strict=True))


def line_of(way: Way, arguments: dict[str, Any]) -> str:
    """Return the call as a line of Python code."""
    texts = []
    for key, value in arguments.items():
        text = value.text if isinstance(value, Expression) else repr(value)
        texts.append(text if key in ("Wx", "Wh") else f"{key}={text}")
    return f"{way.op}(x, {', '.join(texts)})"
