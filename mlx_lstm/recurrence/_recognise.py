"""Find out which call of `lstm`, `gru` or `rnn` equals a recurrent cell that somebody wrote by hand.

1. The cell runs one step with all parameters 0. The new states show how the cell takes and returns its states, and the
   numbers in its formula: the forget bias and the limit on c.
2. It runs with parameters that are 0 except for one block of H rows. The new states show what this block is for. For
   example, if the block is the forget gate's matrix W of x, then c is multiplied by sigmoid(W x). So the number of
   runs grows with the number of blocks, not with the number of their combinations.
3. The blocks of an LSTM's gate i and of a GRU's gate r have no effect while all other parameters are 0. So each of them
   runs again while another block, of gate g (LSTM) or n (GRU), is not 0.
4. All values and gradients are compared, with parameters, inputs and states of many sizes: every activation is driven
   into both of its tails, and a limit on any array shows. Only this comparison decides; steps 1 to 3 only find out what
   to compare.

The cell runs in float64 on the CPU. There MLX computes `mx.sigmoid` and `mx.exp` to the precision of float32, and
everything else exactly.

The names of this module are:

- D: features of x, H: units, B: batch items.
- A block is H rows of a parameter (`Block`). n: its index in `trial.blocks`.
- A part says what a block is for: (gate, kind), such as ("f", "x") for the forget gate's weights of x.
- A form says how the user's step takes and returns states (`Form`).
- A way is a hypothesis on the formula of the cell (`Way`): the function "lstm", "gru" or "rnn", and its options.
- A `Trial` runs the user's cell with chosen parameters.
- A title is the Python code for a parameter, such as "self.weight".
- `trial.note(rank, text)` stores the text of the highest rank, which the warning shows if no call equals the cell.
"""

import warnings
from collections.abc import Callable, Iterator
from inspect import signature
from itertools import product
from keyword import iskeyword
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..ground.checks import check_integer, fail
from ..oracle.verdict import judged
from ._gru import gru
from ._lstm import lstm
from ._rnn import rnn

OP = "recognise"
OPS = {"lstm": lstm, "gru": gru, "rnn": rnn}
GATES = {"lstm": "ifgo", "gru": "rzn", "rnn": "h"}
"""OP: the function that error texts begin with. OPS, GATES: the functions by name, and their usual gate orders."""

HIDDEN = {"lstm": "i", "gru": "r", "rnn": ""}
"""For each op the gate whose weights have no effect while all other parameters are 0."""

OPENERS = {
    "lstm": [("g", "x"), ("g", "h"), ("g", "b"), ("g", "p")],
    "gru": [("n", "h"), ("n", "bhn")],
    "rnn": [],
}
"""{op: parts (gate, kind)}. The weights of the `HIDDEN` gate change the result only while one of these parts is not 0,
so one of them gets weights while the weights of the `HIDDEN` gate are tried."""

DEFAULTS = {name: each.default for op in OPS.values() for name, each in signature(op).parameters.items()}
"""{option of one of these functions: its default}. The returned line contains only other values."""

ROUNDING = {"lstm": 1e-6, "gru": 1e-6, "rnn": 2e-7}
"""{op: allowed error of a value v, relative to 1 + |v|}. The error comes from MLX's sigmoid, which is not exact in
float64: its absolute error is 3e-8 and, for an argument z < 0, its relative error 6e-8 |z|. This matters for |z| up to
14 = log(1e6), because c is at most 1e6, so a smaller gate times c is less than 1. A plain RNN multiplies nothing by a
sigmoid."""

SLOPES = 1e-5
"""The allowed error of a gradient, relative to 1 + its largest absolute value. The gradient of each gate has the error
of the sigmoid, and it is multiplied by states and weights of the size 10 and summed over the rows of a batch."""

LOOSE = 0.1
"""The largest relative error at which a block counts as the weights of a gate, until the last comparison decides. It is
this large so that a warning on a cell that is nearly an LSTM can say by how much the cell differs."""

B, T = 3, 8
"""The batch size and the number of steps of a comparison of several steps."""

BATCHES = [
    # factors on the random numbers of: matrices, vectors, x and h, c
    (1, 1, 1, 1),
    (1, 1, 10, 10),
    (10, 10, 1, 1),
    (1, 1e-6, 1, 1e6),
    (10, 10, 10, 10),
    (0.01, 1, 100, 100),
    (100, 1, 0.01, 1e4),
    (1e-4, 1, 1e4, 1e4),
    (1e4, 1, 1e-4, 1),
    (1e-3, 1e-4, 1e3, 1e4),
    (100, 100, 1, 100),
    (1e3, 1e3, 1e3, 1e3),
]
"""The magnitudes of all numbers in each batch of the last comparison. In some batches the matrices and the inputs are
large together, which drives all preactivations into the tails of the activations. In others one is large and the other
small, which shows limits on weights, inputs and states. Gradients and several steps are compared in the first four
batches only, because the gradient of a sigmoid written with mx.exp is NaN for large arguments. The fourth batch shows
the gradient at a limit on c."""

WITH_GRADIENTS, ROWS = 4, 48
"""How many of the first batches are compared with gradients, and the rows (batch items) of each."""

BESIDE = "what it returns beside its state and must be h (let step return the state only)"
"""The name, in warnings, of the arrays [B, H] that a step returns in addition to the states."""

Array = Any  # an array of NumPy or of MLX
Pair = tuple[str, np.ndarray, np.ndarray, np.ndarray]
"""A result to compare: its name, the cell's array, the call's array, and its allowed error."""
Part = tuple[str, str]
"""What a block of weights is for: (gate, kind). Kinds: "x" and "h" are matrices of the input and the state, "b" is a
bias, "bhn" a bias that the reset gate multiplies, "p" a peephole."""


class HC(NamedTuple):
    """The states of an LSTM, h first. The user's step may read the fields by name."""

    h: mx.array
    c: mx.array


class CH(NamedTuple):
    """The states of an LSTM, c first, as in Flax and TensorFlow. The user's step may read the fields by name."""

    c: mx.array
    h: mx.array


CALLS: dict[str, Callable[..., Any]] = {
    "step(x, (h, c))": lambda step, x, h, c: step(x, HC(h, c)),
    "step(x, (c, h))": lambda step, x, h, c: step(x, CH(c, h)),
    "step((h, c), x)": lambda step, x, h, c: step(HC(h, c), x),
    "step((c, h), x)": lambda step, x, h, c: step(CH(c, h), x),
    "step(x, h, c)": lambda step, x, h, c: step(x, h, c),
    "step(x, c, h)": lambda step, x, h, c: step(x, c, h),
    "step(x, h)": lambda step, x, h: step(x, h),
    "step(h, x)": lambda step, x, h: step(h, x),
}
"""The ways to call the user's step: {Python code: function that calls it so}. The last one is tried only if x and h
differ in width: for equal widths "step(x, h)" would run, too, and nothing shows which array the step takes as x."""


class StepError(Exception):
    """The user's step raised an error, or returned something else than the new states."""


class Form(NamedTuple):
    """How the user's step takes and returns the states. call: a key of `CALLS`; the step returns the states in the same
    order. at: the index of the first new state among all arrays that the step returns."""

    call: str
    at: int

    @property
    def states(self) -> int:
        """Return the number of states: 2 for h and c, 1 for h."""
        return 2 if "c" in self.call else 1  # such as "step(x, h, c)" and "step(x, h)"

    @property
    def c_first(self) -> bool:
        return "c, h" in self.call


class Block(NamedTuple):
    """H rows of one parameter of the user's module, which may be the weights of one gate.

    The rows are taken from a view of the parameter: the parameter itself, its transpose, or some of its columns. The
    view consists of k blocks: it has k H rows if it is a matrix, and k H elements if it is a bias.

        title: the Python code for the parameter, such as "self.weight"
        view: a function that takes the parameter and returns the view
        form: the code for the view, such as ".T"
        columns: the code for the columns, such as ":5", or "" for all
        row: the index of this block among the k blocks of the view
        kinds: what the block may be by its shape, such as "x" for a matrix of the input (see `Part`)
    """

    title: str
    view: Callable[[Array], Array]
    form: str
    columns: str
    row: int
    k: int
    kinds: tuple[str, ...]

    @property
    def view_key(self) -> tuple[str, str, str, int]:
        """Return a key that is equal for all blocks of the same view of a parameter."""
        return self.title, self.form, self.columns, self.k

    def text(self, rows: str = "") -> str:
        """Return the Python code for some rows of the parameter's view, such as "self.weight[0:4]". rows: the slice,
        such as "0:4", or "" for all rows."""
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


class Match(NamedTuple):
    """The arguments of a call that may equal the user's cell: an `Expression` for each array, and the options, by name;
    empty if no parameter is the weight of a gate. parts: the blocks of parameters by (gate, kind). unknown: the Python
    code of blocks that have the effect of no gate."""

    arguments: dict[str, Any]
    parts: dict[Part, list[Block]]
    unknown: list[str]


def recognise(
    module: nn.Module | dict[str, Any], step: Callable[..., Any], D: int, H: int, *, name: str = ""
) -> str | None:
    """Return the call of `lstm`, `gru` or `rnn` that equals a recurrent cell written by hand, as a line to paste.
    Sizes: B sequences, T steps, D features of x, H units.

    The function runs `step` with parameters that it chooses, finds out which rows of which parameter belong to which
    gate, and compares values and gradients, with numbers of the sizes 1e-4 to 1e6. So it does not matter how the cell
    is written or what its parameters are called. There may be one matrix or one for each gate, joined or separate
    weights of x and h, transposed or not, in any gate order, and any number of biases; some gates may have no matrix.
    The cell may be

    - an LSTM, also with a constant forget bias of at most six digits, with peepholes or with `cell_clip` and either
      `clip_gradient`;
    - a GRU that resets before or after its product, whose z is the weight of the old h or of the candidate;
    - a plain RNN with tanh, relu or sigmoid.

    Args:
        module (Module or dict): has all parameters of the cell, and maybe others. They are replaced while the function
            runs, and restored.
        step (callable): one step of the cell, which reads the parameters from the module at each call: it must not be
            compiled by `mx.compile` before. x is [B, D]; the state is `(h, c)` or `(c, h)` for an LSTM, else h, each
            [B, H]. It is `step(x, state)`, `step(state, x)` (if the state is h alone, only if D is not H, because
            nothing else tells h from x) or `step(x, h, c)`. It returns the new state in the same order, alone or with
            an output: `h, c` or `out, (h, c)`. An output [B, H] must be h; other arrays, such as scores, are ignored. D
            (int): the number of features of x. H (int): the number of units, at least 2. name (str): the name of the
            module in the returned line, such as `"self"`. Default: the line has the names of the parameters without a
            module, or `"params"` for a dict.

    Returns:
        str or None: a call whose x is [T, B, D] and whose output is `.h`; add `h0=` and `c0=` for first states. None if
        no call equals the cell within rounding; a warning then names the nearest call, by how much it misses and where.

    Raises:
        ValueError: an argument breaks a rule, or `step` runs with none of these states.

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
    if not isinstance(module, dict):  # mlx.nn.Module is a dict
        fail(OP, "module must be a module or a dict that holds the cell's parameters", type(module).__name__)
    if not callable(step):
        fail(OP, "step must be a function, step(x, state) -> state,", type(step).__name__)
    D, H = check_integer(OP, "D", D, least=1), check_integer(OP, "H", H, least=2)
    if not isinstance(name, str):
        fail(OP, "name must be a str", repr(name))
    trial = Trial(module, step, D, H, name)
    if not trial.shapes:
        fail(OP, "module must hold parameters of a float dtype", f"a {type(module).__name__} without any")
    try:
        with mx.stream(mx.cpu):  # float64 needs the CPU
            line = line_found(trial)
    finally:
        trial.set(trial.before)
    if line is None:
        warnings.warn(f"[{OP}] no call equals the step. {trial.nearest}.{about_norms(module)}", stacklevel=2)
    return line


def about_norms(module: Any) -> str:
    """Return advice for a warning if the module contains an nn.LayerNorm, else an empty text."""
    if not isinstance(module, nn.Module) or not any(isinstance(part, nn.LayerNorm) for part in module.modules()):
        return ""
    return " The module holds an nn.LayerNorm, and steps with one are not recognised: pass norm=mlx_lstm.Norm(...)"


def line_found(trial: "Trial") -> str | None:
    """Return, as a line of Python, the call of the first hypothesis that equals the user's cell, or None; then
    `trial.nearest` says why."""
    # Remember the state of MLX's random numbers. If it has changed below, the cell has drawn random numbers.
    random: Any = mx.random.state
    before = np.array(random[0])
    forms = trial.forms()
    if not forms:
        fail(OP, "step must run for x [B, D] and the state (h, c) or h, each [B, H],", trial.errors)
    if not np.array_equal(before, np.array(random[0])):
        # (4,): the highest rank, so the user sees this text.
        trial.note((4,), "It draws random numbers: call eval() of the module if it has dropout")
        return None
    # question: a text that says why a hypothesis that equals the cell within rounding may still be wrong; "" if nothing
    # is in doubt.
    for form in forms:
        for way, question in ways_of(trial, form):
            match = match_of(way, trial, form)
            if not match.arguments or not equals(way, match, trial, form):
                continue
            if not question and way.op == "lstm" and not bias_is_exact(way, match, trial, form):
                question = "its forget_bias is another number"
            if not question and trial.changes(form):
                question = "it gives other results than at its first call with the same numbers"
            line = line_of(way, match.arguments)
            if not question:
                return line
            # (3,): a high rank, so that the warning shows this text rather than those of hypotheses that differ.
            trial.note((3,), f"The nearest, {line}, equals it within rounding, but {question}")
    return None


class Trial:
    """Run the user's cell with chosen parameters, cache the results of steps in which only single blocks (the weights
    of one gate) are not 0, and remember the hypothesis that was nearest to the cell. nearest: the text that describes
    this hypothesis. errors: the text on the calls that did not run. before: the module's own parameters by title (their
    Python code), which `set` puts back."""

    def __init__(self, module: Any, step: Callable[..., Any], D: int, H: int, name: str):
        """Find the float parameters of the module, and draw the inputs of a step. name: the module's name in the
        Python code that `recognise` returns."""
        self.step, self.D, self.H = step, D, H
        title = name if name or isinstance(module, nn.Module) else "params"
        # Three dicts by title: where each parameter is (the array is owner[key]), the module's own arrays, and their
        # shapes.
        self.places = {text: (owner, key) for text, owner, key in parameters_of(module, title, set())}
        self.before = {text: owner[key] for text, (owner, key) in self.places.items()}
        self.shapes: dict[str, tuple[int, ...]] = {text: array.shape for text, array in self.before.items()}
        # x, h and c [B, width] for all runs of one step. No number of c is near 0, because results are divided by c.
        draws = np.random.default_rng(0)
        self.x, self.h = (draws.uniform(-1, 1, (B, width)) for width in (D, H))
        self.c = draws.uniform(0.2, 1, (B, H)) * draws.choice([-1, 1], (B, H))
        self.blocks = [each for text, shape in self.shapes.items() for each in blocks_of(text, shape, D, H)]
        self.known: dict[Any, np.ndarray | None] = {}  # a cache of the results of `new`
        self.rank: tuple[float, ...] = ()  # the rank of the text `nearest`, see `note`
        self.nearest, self.errors = "It does not run with all parameters 0", ""

    def set(self, arrays: dict[str, mx.array]) -> None:
        """Replace parameters of the module. arrays: {title of a parameter: its new array}."""
        for title, array in arrays.items():
            owner, key = self.places[title]
            owner[key] = array

    def note(self, rank: tuple[float, ...], text: str) -> None:
        """Remember the text on a hypothesis if its rank is the highest so far. rank: how near the hypothesis came to
        the cell; tuples are compared from the left. Its first number is 0 if no formula fits, 1 if no matrix belongs to
        a gate, 2 if values differ, 3 if all are equal but a number could not be read, 4 if the cell is random."""
        if rank > self.rank:
            self.rank, self.nearest = rank, text

    def numbers(self, n: int) -> np.ndarray:
        """Return the random weights [H, C] or [H] of block n, the same in every run of the cell, in which all blocks
        but one or two are 0. H, C: units, columns of the matrix."""
        block = self.blocks[n]
        C = {"x": self.D, "h": self.H}.get(block.kinds[0])  # the columns; None for a vector, such as a bias
        draws = np.random.default_rng([1, n])  # 1: another sequence than that of x and the states, whose seed is 0
        return draws.uniform(-1.5, 1.5, (self.H, C) if C else self.H) / np.sqrt(C or 1)

    def forms(self) -> list[Form]:
        """Return all forms in which the step runs with all parameters 0 and returns new states."""
        found, errors = [], []
        self.set({title: mx.zeros(shape, mx.float64) for title, shape in self.shapes.items()})
        for call in CALLS:
            if call == "step(h, x)" and self.D == self.H:  # "step(x, h)" would run, too, and nothing says which is x
                continue
            first = Form(call, 0)  # 0: where the new states begin is not known yet
            try:
                shapes = [array.shape for array in self.arrays(call, *self.inputs(first))]
            except StepError as error:
                errors.append(f"{call}: {error}")
                continue
            # fits: at which indices among the returned arrays the new states, each [B, H], may begin.
            starts = range(len(shapes) - first.states + 1)
            fits = [at for at in starts if shapes[at : at + first.states] == [(B, self.H)] * first.states]
            found += [Form(call, at) for at in fits]
            if not fits:
                errors.append(f"{call} returned arrays of the shapes {[list(shape) for shape in shapes]}")
        self.errors = "; ".join(errors[:1] + errors[-1:])  # only the first and the last, as the text may be long
        return found

    def inputs(self, form: Form, size: float = 1) -> list[mx.array]:
        """Return x and the states for one step; the state c is multiplied by `size`."""
        return [mx.array(each, mx.float64) for each in (self.x, self.h, self.c * size)[: 1 + form.states]]

    def arrays(self, call: str, x: mx.array, *states: mx.array) -> list[mx.array]:
        """Run the user's step, called as `call` (a key of CALLS) says. Return all arrays that it returns, in order."""
        try:
            result: Any = tree_flatten(CALLS[call](self.step, x, *states))
            found = [each for _, each in result if isinstance(each, mx.array)]
            mx.eval(found)
            return found
        except Exception as error:  # the user's function may raise any error for a state that it does not take
            raise StepError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error

    def run(self, form: Form, x: mx.array, *states: mx.array) -> tuple[list[mx.array], list[mx.array]]:
        """Run the user's step. Return two lists: its new states, h or h and c, and all other arrays [B, H] that it
        returns. The caller checks that each of these equals the new h. states: the states before the step, h, or h and
        c. B, H: batch items, units."""
        arrays, stop = self.arrays(form.call, x, *states), form.at + form.states
        found, rest = arrays[form.at : stop], arrays[: form.at] + arrays[stop:]
        if [array.shape for array in found] != [states[0].shape] * form.states:
            raise StepError(f"it must return states of the shape {list(states[0].shape)}")
        # Return h first. states[0] is h before the step, [B, H].
        return found[::-1] if form.c_first else found, [array for array in rest if array.shape == states[0].shape]

    def new(self, form: Form, blocks: tuple[int, ...] = (), size: float = 1) -> np.ndarray | None:
        """Return the new states [1 or 2, B, H] after one step in which all parameters are 0 except for some blocks (H
        rows of a parameter each). form: how the step takes and returns states. size: a factor on c before the step.
        Return None if the step raises an error. B, H: batch items, units."""
        if (form, blocks, size) in self.known:  # the results of earlier runs
            return self.known[form, blocks, size]
        arrays = {title: np.zeros(shape) for title, shape in self.shapes.items()}
        for n in blocks:
            block = self.blocks[n]  # its view is an array whose rows belong to gates, such as the transpose
            block.view(arrays[block.title])[block.row * self.H : (block.row + 1) * self.H] = self.numbers(n)
        self.set({title: mx.array(array, mx.float64) for title, array in arrays.items()})
        try:
            found = np.stack([double(state) for state in self.run(form, *self.inputs(form, size))[0]])
        except StepError:
            found = None
        self.known[form, blocks, size] = found
        return found

    def changes(self, form: Form) -> bool:
        """Return whether the step with all parameters 0 gives other states than at its first call."""
        first = self.new(form)
        self.known.clear()  # empty the cache, so that `new` runs the step again
        again = self.new(form)
        return first is None or again is None or not np.array_equal(first, again)


def double(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float64))


def parameters_of(node: Any, title: str, seen: set[Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (title, owner, key) for each float array in a tree of modules, dicts and lists. The array is owner[key];
    the title is the Python code for it, such as "self.layers[0].weight", which begins with the argument `title`, the
    code for `node`. seen: the ids of the dicts and lists that were searched, none of which is searched again."""
    items: Any = enumerate(node) if isinstance(node, list) else node.items()
    for key, child in items:
        of_module = isinstance(node, nn.Module)
        if of_module and key.startswith("_"):  # MLX does not count it as a parameter
            continue
        if of_module and key.isidentifier() and not iskeyword(key):
            text = f"{title}.{key}".removeprefix(".")
        else:
            text = f"{title or 'module'}[{key!r}]"
        if isinstance(child, mx.array) and mx.issubdtype(child.dtype, mx.floating):
            yield text, node, key
        elif isinstance(child, (dict, list)) and id(child) not in seen:
            seen.add(id(child))
            yield from parameters_of(child, text, seen)


def blocks_of(title: str, shape: tuple[int, ...], D: int, H: int) -> Iterator[Block]:
    """Yield the blocks of a parameter: all groups of H rows that, by their shape, may be the weights of one gate. The
    rows are rows of the parameter or of its transpose. If one matrix may hold the weights of x and of h side by side,
    only the columns for x, or only the columns for h, are part of a block. D and H are the widths of x and h.

    A `Block` is (title, view, form, columns, row, k, kinds). Each lambda is such a view: it takes the parameter and
    returns the part that holds the rows. Its arguments with defaults, such as n=n, store the values of the loop.
    """
    # 8: an array may stack at most 8 matrices or biases: for four gates one of x and one of h. n: the index of one.
    # "b", "bhn", "p": what a vector may be, a bias, a bias that the reset gate multiplies, or a peephole.
    if len(shape) in (2, 3) and shape[0] <= 8:  # several biases or matrices in one array, such as one per gate
        for n in range(shape[0]):
            for block in blocks_of(title, shape[1:], D, H):
                view = block.view
                yield block._replace(form=f"[{n}]{block.form}", view=lambda a, n=n, view=view: view(a[n]))
    if len(shape) == 1 and shape[0] % H == 0:
        for row in range(shape[0] // H):
            yield Block(title, lambda a: a, "", "", row, shape[0] // H, ("b", "bhn", "p"))
    if len(shape) != 2:
        return
    # columns: {kind: its possible places in a matrix}. A place is (width of the matrix, first column, last column + 1,
    # the Python code of these columns).
    columns = {"x": [(D, 0, D, ""), (D + H, 0, D, f":{D}"), (D + H, H, D + H, f"{H}:")]}
    columns["h"] = [(H, 0, H, ""), (D + H, D, D + H, f"{D}:"), (D + H, 0, H, f":{H}")]
    # form: the code for the matrix itself, "", or its transpose, ".T". C: the width that it must have for this place.
    for form, (rows, width) in (("", shape), (".T", shape[::-1])):
        for kind, C, start, stop, text in [(kind, *each) for kind, all_of in columns.items() for each in all_of]:
            if width == C and rows % H == 0:
                turn, k = form == ".T", rows // H
                view = lambda a, turn=turn, start=start, stop=stop: (a.T if turn else a)[:, start:stop]  # noqa: E731
                yield from (Block(title, view, form, text, row, k, (kind,)) for row in range(k))


OTHERS = [Way("gru", {"reset": reset, "flip_z": flip}) for reset in ("after", "before") for flip in (False, True)]
OTHERS += [Way("rnn", {"activation": word}) for word in ("tanh", "relu", "sigmoid")]
"""The hypotheses on the formula of a cell whose only state is h."""


def ways_of(trial: Trial, form: Form) -> Iterator[tuple[Way, str]]:
    """Yield (hypothesis, text) for each hypothesis on the formula of the cell that gives nearly the cell's states after
    a step with all parameters 0. text: which number of the formula could not be measured, or "". A cell with the states
    h and c may be an LSTM (`lstm_ways`), a cell with h alone a GRU or a plain RNN (OTHERS)."""
    got = trial.new(form)
    for way, text in lstm_ways(trial, form) if form.states == 2 else [(way, "") for way in OTHERS]:
        want = computed(way, trial, {})  # {}: all weights are 0
        error = np.inf if got is None else np.abs(got - want).max()
        if error <= LOOSE * (np.abs(want).max() or 1):
            yield way, text
        else:
            options = ", ".join(f"{key}={value!r}" for key, value in way.options.items() if value != DEFAULTS[key])
            formula = f"the nearest formula, {way.op}{f' with {options}' if options else ''}"
            text = f"With all parameters 0, {form.call} returns states that miss those of {formula}, by {error:.1g}"
            trial.note((0, -error), text)


def lstm_ways(trial: Trial, form: Form) -> Iterator[tuple[Way, str]]:
    """Yield (way, text) for a cell with the states h and c: an LSTM with the measured forget bias and limit on c, once
    for each kind of output peephole, which reads the current or the previous c, and both gradients that a limit may
    have (0 where it cuts, or as if it did not cut). text: says that the forget bias could not be measured, or "". A
    step with all parameters 0 multiplies c by the sigmoid of the forget bias. So a step from a tiny c shows the forget
    bias, and one from a huge c the limit on c."""
    tiny, huge = trial.new(form, size=1e-6), trial.new(form, size=1e6)
    if tiny is None or huge is None:
        return
    factor = tiny[1] / (trial.c * 1e-6)  # the new c is sigmoid(forget bias) times the old c, as i g is 0
    f = float(np.median(factor))  # sigmoid(forget bias)
    if not np.abs(factor - f).max() <= 1e-6 or not 0 < f < 1:
        call = f"With all parameters 0, {form.call} returns a c that is not a part of the c before, the same part for"
        # (0, -inf): the lowest rank of a note. The user sees only the note of the highest rank.
        trial.note((0, -np.inf), f"{call} all units, as in an LSTM")
        return
    # The forget bias is the inverse sigmoid of f. The error of f, up to 5e-8, grows by the slope 1 / (f (1 - f)).
    measured, error = float(np.log(f / (1 - f))), 5e-8 / (f * (1 - f))
    bias = decimal(measured, error)
    text = "" if bias is not None else (
        f"its forget_bias, {measured:.7g} +- {error:.0e}, is no number of at most six digits: pass the number yourself"
    )  # fmt: skip
    options: dict[str, Any] = {"forget_bias": measured if bias is None else bias}
    limits = huge[1] * np.sign(trial.c)  # the new |c| of each unit, which is the limit if there is one
    limit = float(np.median(limits))
    # A clip that lets gradients through is usually written as c + stop_gradient(clip(c) - c). In float64 this sum is
    # clip(c) up to the rounding of c, which is 1e6 here: 1e6 times 1e-16 is 1e-10. Allow ten times this error.
    error = 1e-9 * max(1, abs(limit))
    if limit > 0 and np.abs(limits - limit).max() <= error:
        # The limit was measured to its last digit, unlike the forget bias. So a limit of many digits is accepted, too.
        # If it is the float32 of a short number such as 0.1, `written` returns the short number.
        number = decimal(limit, error)
        options["cell_clip"] = written(limit) if number is None else number
    rules = ("through", "zero") if "cell_clip" in options else ("through",)  # how gradients may pass the clip
    for word, rule in product(("current", "previous"), rules):
        yield Way("lstm", options | {"output_peephole": word, "clip_gradient": rule}), text


def decimal(measured: float, error: float) -> float | None:
    """Return the number with the fewest digits, at most six, that differs from a measured one by at most `error`.
    Return None if there is none: then the number cannot be read."""
    each = [float(f"{measured:.{digits}e}") for digits in range(6)]  # rounded to 1, 2, ... 6 digits
    # + 0.0 turns -0.0 into 0.0.
    return next((number + 0.0 for number in [0.0, *each] if abs(number - measured) <= error), None)


def written(number: float) -> float:
    """Return the short decimal that a programmer would have written: for the float32 nearest to 0.1 return 0.1. Return
    a number that is no float32 unchanged."""
    short = float(str(np.float32(number)))
    return short if float(np.float32(short)) == number else number


def parts_of(way: Way, trial: Trial, form: Form) -> tuple[dict[Part, list[Block]], list[str]]:
    """Find out which blocks (H rows of a parameter) are the weights of which gate, if the cell computes the formula
    `way`. Return {(gate, kind): blocks}, with the kind "x", "h", "b" or "p" (weights of the input, of h, biases,
    peepholes), and the Python code of blocks that have the effect of no gate."""
    parts: dict[Part, list[int]] = {}
    # gates: the gates whose weights have an effect while all other parameters are 0.
    gates = [gate for gate in GATES[way.op] if gate != HIDDEN[way.op]]
    # A block is named by its index in trial.blocks here. parts: {(gate, kind): blocks that belong to it}. rest: the
    # blocks that belong to no gate yet. effects: blocks that change the states as no gate does, for the warning.
    rest, effects = list(range(len(trial.blocks))), set[int]()

    def assign(gates: list[str], known: dict[Part, int]) -> None:
        """Move the blocks from `rest` to `parts` that have the effect of one of the gates while the `known` blocks are
        not 0. Add to `effects` the blocks that have another effect."""
        for n in list(rest):
            part, effect = part_of(way, trial, form, n, gates, known)
            if part:
                parts.setdefault(part, []).append(n)
                rest.remove(n)
            elif effect:
                effects.add(n)

    assign(gates, {})
    # The weights of the gate HIDDEN[way.op] have an effect only while another block, the opener, is not 0.
    opener = next((part for part in OPENERS[way.op] if part in parts), None)
    if opener:
        assign([HIDDEN[way.op]], {opener: parts[opener][0]})
    # A parameter has several views, such as itself and its transpose. In at most one of them its rows are the weights
    # of gates.
    found = {part: [trial.blocks[n] for n in blocks] for part, blocks in parts.items()}
    views = {block.view_key for blocks in found.values() for block in blocks}
    titles = {block.title for blocks in found.values() for block in blocks}
    # others: blocks with an effect that fits no gate. Three cases differ. If other rows of the block's view belong to
    # gates, return the code of the block, such as "self.weight[4:8]". If no rows of its parameter belong to gates,
    # return the parameter's title. Else the view is wrong, such as the transpose of a matrix: leave the block out.
    others = [trial.blocks[n] for n in sorted(effects - {n for blocks in parts.values() for n in blocks})]
    texts = [sliced(each, trial.H) for each in others if each.view_key in views]
    return found, texts + sorted({each.title for each in others if each.title not in titles})


def part_of(
    way: Way, trial: Trial, form: Form, n: int, gates: list[str], known: dict[Part, int]
) -> tuple[Part | None, bool]:
    """Find out what block number n (H rows of a parameter) of the user's cell is. Return two values. The first is
    (gate, kind): the gate to which the block belongs and what it multiplies, or None if no gate fits. The second tells
    whether the block changes the states. The user's cell runs one step with all parameters 0 except for this block, and
    the formula `way` with the same numbers as the weights of one gate and kind. If both give nearly the same states,
    this gate and kind are right. gates: the gates to try. known: another block that is not 0, because some gates have
    no effect alone; or {}."""
    context = tuple(known.values())
    # base: the new states without block n. got: the new states with it. want: what the formula gives if block n has the
    # weights of `part`.
    base, got = trial.new(form, context), trial.new(form, (*context, n))
    # A difference up to 1e-7 may be rounding. A step that raises an error counts as an effect of the block.
    if base is None or got is None or not np.abs(got - base).max() > 1e-7:
        return None, got is None
    others = {part: trial.numbers(block) for part, block in known.items()}
    # best: the part that fits best so far. least: its error, relative to its effect; it must be below LOOSE.
    best, least = None, LOOSE
    for part in product(gates, trial.blocks[n].kinds):
        if part[1] == "bhn" and (part[0] != "n" or way.options["reset"] != "after"):
            continue
        if part[1] == "p" and way.op != "lstm":
            continue
        want = computed(way, trial, others | {part: trial.numbers(n)})
        effect = np.abs(want - base).max()
        if effect > 0 and np.abs(got - want).max() / effect < least:
            best, least = part, np.abs(got - want).max() / effect
        if least < 1e-5:  # it fits within rounding
            break
    return best, True


def computed(way: Way, trial: Trial, weights: dict[Part, np.ndarray]) -> np.ndarray:
    """Compute one step of the formula `way`. `weights` holds the weights that are not 0 by (gate, kind), see `Part`.
    Return the states [1 or 2, B, H]: h, and c if there is one. B, H: batch items, units."""

    def all_gates(kind: str, *shape: int) -> mx.array:
        """Return the weights of this kind of all gates one after the other. shape: the shape of one gate's weights."""
        each = [weights.get((gate, kind), np.zeros(shape)) for gate in GATES[way.op]]
        return mx.array(np.concatenate(each), mx.float64)

    H = trial.H
    arguments = {"Wx": all_gates("x", H, trial.D), "Wh": all_gates("h", H, H), "b": all_gates("b", H)}
    if any(kind == "p" for _, kind in weights):
        arguments["peephole"] = all_gates("p", H)
    if ("n", "bhn") in weights:
        arguments["bhn"] = mx.array(weights["n", "bhn"], mx.float64)
    inputs = [mx.array(each, mx.float64) for each in (trial.x, trial.h, trial.c)]
    return np.stack([double(state) for state in called(way, arguments | way.options, *inputs)])


def called(way: Way, arguments: dict[str, Any], x: mx.array, h: mx.array, c: mx.array | None = None) -> list[mx.array]:
    """Call the function of the formula `way` for one step. Return the new states, h or h and c. x[None] is a sequence
    of one step; "ops" is the engine that runs in float64."""
    first = {"h0": h, "c0": c} if way.op == "lstm" else {"h0": h}
    found: Any = OPS[way.op](x[None], **arguments, **first, engine="ops")
    return [found.h[0], found.c[0]] if way.op == "lstm" else [found.h[0]]


def match_of(way: Way, trial: Trial, form: Form) -> Match:
    """Return the arguments of a call that may equal the user's cell; none if no call fits. A gate without weights gets
    zeros. way: a hypothesis on the cell's formula. form: how the step takes and returns the states."""
    parts, unknown = parts_of(way, trial, form)
    if not {kind for _, kind in parts} & {"x", "h"}:
        # (1,): the rank of this note. It is low, as not even one gate was found; the user sees only the note of the
        # highest rank.
        trial.note((1,), f"No matrix among its parameters has the effect of a gate of {way.op}")
        return Match({}, parts, unknown)
    # ("o", "p"): the peephole of the output gate.
    if way.options.get("output_peephole") == "previous" and ("o", "p") not in parts:
        return Match({}, parts, unknown)  # without this peephole it is the same as "current", which was tested before
    gates, H = GATES[way.op], trial.H
    # order: if one parameter holds all gates, its gate order, because the call can then take it without slices.
    orders = [order_of([parts.get((gate, kind), []) for gate in gates], gates) for kind in "xh"]
    order = next((found for found in orders if found), gates)
    arguments: dict[str, Any] = {}
    for key, kind, shape in (("Wx", "x", (H, trial.D)), ("Wh", "h", (H, H)), ("b", "b", (H,)), ("peephole", "p", (H,))):
        # The call always needs both matrices, even if all their gates are zeros.
        if kind in "xh" or any((gate, kind) in parts for gate in gates):
            arguments[key] = joined([parts.get((gate, kind), []) for gate in order], order, shape)
    if ("n", "bhn") in parts:
        arguments["bhn"] = joined([parts["n", "bhn"]], "n", (H,))  # only gate n has this bias
    options = {"gate_order": order} if order != gates else {}
    options |= {key: value for key, value in way.options.items() if value != DEFAULTS[key]}
    return Match(arguments | options, parts, unknown)


def order_of(blocks: list[list[Block]], gates: str) -> str:
    """Return the gate order, such as "ifgo", in which one parameter holds the blocks of all `gates`; "" if a gate has
    several blocks, or if they belong to different parameters. blocks: for each gate a list of its blocks."""
    firsts = [each[0] for each in blocks if len(each) == 1]
    like = {block.view_key for block in firsts}
    if len(firsts) != len(gates) or len(like) != 1 or firsts[0].k != len(gates):
        return ""
    return "".join(gate for _, gate in sorted(zip([block.row for block in firsts], gates, strict=True)))


def joined(blocks: list[list[Block]], order: str, shape: tuple[int, ...]) -> Expression:
    """Return one argument of the call: the weights of all gates one after the other. blocks: for each gate a list of
    its blocks (H rows of a parameter each), of this shape. Several blocks of one gate, such as two biases, are added. A
    gate without a block gets zeros. order: the gate order of the call."""
    H = shape[0]
    # If the blocks together are whole parameters, in the gate order of the call, the code needs no slices: it is then,
    # for example, "ih.bias + hh.bias". Test this: each entry of `columns` has one block of every gate, and these blocks
    # together may be one parameter. `whole` returns all rows of a block's view; `sliced` returns the code for a block's
    # own rows.
    columns = list(zip(*blocks, strict=True)) if len({len(each) for each in blocks}) == 1 and blocks[0] else []
    if columns and all(order_of([[block] for block in column], order) == order for column in columns):
        firsts = [column[0] for column in columns]
        return Expression(
            " + ".join(first.text() for first in firsts),
            lambda arrays: sum([whole(first, arrays) for first in firsts[1:]], whole(firsts[0], arrays)),
        )
    texts = [
        " + ".join(sliced(block, H) for block in each) or f"mx.zeros({shape if shape[1:] else H})" for each in blocks
    ]
    text = texts[0] if len(texts) == 1 else f"mx.concatenate([{', '.join(texts)}])"

    # Compute from the module's parameters what the code `text` says.
    def value(arrays: dict[str, mx.array]) -> mx.array:
        rows = []
        for each in blocks:
            terms = [whole(block, arrays)[block.row * H : (block.row + 1) * H] for block in each]
            rows.append(sum(terms[1:], terms[0]) if terms else mx.zeros(shape, next(iter(arrays.values())).dtype))
        return mx.concatenate(rows)

    return Expression(text, value)


def whole(block: Block, arrays: dict[str, mx.array]) -> mx.array:
    """Return all rows of the view of a parameter from which `block` (H of these rows) was taken, such as the transpose.
    arrays: the module's parameters by title."""
    return block.view(arrays[block.title])


def sliced(block: Block, H: int) -> str:
    """Return the Python code that selects a block of H rows from its parameter, such as "self.weight[0:4]"."""
    return block.text(f"{block.row * H}:{(block.row + 1) * H}" if block.k > 1 else "")


def equals(way: Way, match: Match, trial: Trial, form: Form) -> bool:
    """Return whether `lstm`, `gru` or `rnn`, called with these arguments, equals the user's cell in all batches of
    `BATCHES`. If not, `trial` remembers by how much it misses and where."""
    line = line_of(way, match.arguments)
    for batch, sizes in enumerate(BATCHES):
        try:
            pairs = list(compared(way, match.arguments, trial, form, batch))
        except StepError as error:
            trial.note((2, batch), f"The nearest is {line}, but then the step raises {error}")
            return False
        misses = [(miss(got, want, allowed), what, got, want) for what, got, want, allowed in pairs]
        # worst: the largest error, in units of the allowed error. A wrong value is reported before a wrong gradient.
        worst, what, got, want = max(misses, key=lambda each: (each[0] > 1 and "gradient" not in each[1], each[0]))
        if not worst <= 1:  # also if it is NaN
            error = f"by {np.abs(got - want).max():.2g}" if got.shape == want.shape else "its shape"
            # names: what the numbers in `sizes` are the sizes of. Only an LSTM has a c.
            names = ("matrices", "vectors", "x and h", "c")[: 3 + (form.states == 2)]
            where = ", ".join(f"{name} {size:g}" for name, size in zip(names, sizes, strict=False))
            text = f"The nearest, {line}, misses {what} {error} where the numbers have the sizes {where}"
            if match.unknown:
                text += f"; no gate has the effect of {', '.join(match.unknown)}"
            trial.note((2, batch, -worst), text)
            return False
    return True


def bias_is_exact(way: Way, match: Match, trial: Trial, form: Form) -> bool:
    """Return whether the cell's forget bias is the number in `way.options`, to about 1e-9; if the cell has no weights
    that show it, whether this number is 0. MLX rounds a sigmoid to float32, also in float64, so sigmoid(z) is a
    staircase: if z is wrong by even a small part of a stair, some of many points z lie on another stair. The cell adds
    its forget bias to the preactivation of f. So f is given z minus the supposed bias: if this bias is right, the
    staircase of f around z = 0 equals that of gate i, which is given z. The new c shows them: it is sigmoid(z_f) g if
    only f has weights and the old c is g, and sigmoid(z_i) g if only i and g have weights and the old c is 0."""
    # z_f, z_i: the preactivations of the gates f and i. g: the value of the candidate.
    # found: a block of f and of i that multiplies x, and one of g, if there are such. by_x: whether g reads x, too.
    kinds = (("f", "x"),), (("i", "x"),), (("g", "h"), ("g", "b"), ("g", "x"))
    found = [[block for part in each for block in match.parts.get(part, [])][:1] for each in kinds]
    by_x = bool(found[2]) and found[2][0].kinds == ("x",)
    if not all(found) or (by_x and trial.D == 1):
        return way.options["forget_bias"] == 0
    (f,), (i,), (g,) = found
    # z: 1001 preactivations around 0, 1e-9 apart. MLX rounds a sigmoid to float32, so it is constant over intervals of
    # z, which are 1e-7 to 3e-7 wide near 0. The points lie in several intervals. a: the weight of block g. It is so
    # small that the candidate tanh(a) is below usual limits on c.
    z, H, a = np.linspace(-5e-7, 5e-7, 1001), trial.H, 0.01

    def new_c(blocks: list[Block], x: np.ndarray, c: float) -> np.ndarray:
        """Return the new c [rows, H] after a step. All weights are 0, except for these blocks: one column of a matrix,
        or all of a bias, is 1, or `a` for the block of g. x [rows]: the first feature of x, which the gates f and i
        read. The gate g reads the second feature (if `by_x`) or the first unit of h, which are 1. c: the value of all
        numbers of c before the step."""
        arrays = {title: np.zeros(shape) for title, shape in trial.shapes.items()}
        for block in blocks:
            rows = block.view(arrays[block.title])[block.row * H : (block.row + 1) * H]
            # The column of the feature or unit that is multiplied: the second if g multiplies x, else the first.
            column = int(block is g and by_x)
            (rows[:, column] if rows.ndim == 2 else rows)[:] = a if block is g else 1
        trial.set({title: mx.array(array, mx.float64) for title, array in arrays.items()})
        x_in, h_in, c_in = np.zeros((len(x), trial.D)), np.zeros((len(x), H)), np.full((len(x), H), c)
        x_in[:, 0], h_in[:, 0] = x, 1
        x_in[:, 1:2] = 1  # if x has one feature, [:, 1:2] is empty
        states, _ = trial.run(form, *[mx.array(array, mx.float64) for array in (x_in, h_in, c_in)])
        return double(states[1])

    # value: the candidate g, because sigmoid(100) is 1. of_f: sigmoid(z) g by gate f. of_i: the same by gate i.
    value = new_c([i, g], np.array([100.0]), 0.0)
    of_f = new_c([f], z - way.options["forget_bias"], value[0, 0])
    of_i = new_c([i, g], z, 0.0)
    # of_f and of_i must be equal at all points z but two. Two points may differ, because they may be so near to a jump
    # of the rounded sigmoid that an error of z decides on which side they are.
    return bool((np.abs(of_f - of_i) <= 1e-12).all(axis=1).sum() >= len(z) - 2)


def miss(got: np.ndarray, want: np.ndarray, allowed: np.ndarray) -> float:
    """Return the largest error of `got`, in units of the allowed error. It is infinite if the shapes differ, if a
    number is not finite, or if all numbers of `want` are 0, because then nothing was compared."""
    return judged("", got, want, allowed).ratio if want.any() else np.inf


def compared(way: Way, arguments: dict[str, Any], trial: Trial, form: Form, batch: int) -> Iterator[Pair]:
    """Run the user's cell and the call with random numbers of the magnitudes `BATCHES[batch]`. Yield (name, the cell's
    array, the call's array, its allowed error) for the outputs of one step with many rows and, in the first
    WITH_GRADIENTS batches, for all gradients and the outputs of several steps: in later batches the numbers are so
    large that a gradient may be NaN."""
    arrays, first = drawn(trial, form, batch)  # parameters by title; [x, h] or [x, h, c]

    # by_hand: compute one step by the user's cell. by_call: compute the same step by the call.
    def by_hand(arrays: dict[str, mx.array], *inputs: mx.array) -> list[mx.array]:
        trial.set(arrays)
        states, rest = trial.run(form, *inputs)
        return states + rest

    def by_call(arrays: dict[str, mx.array], *inputs: mx.array) -> list[mx.array]:
        values = {key: each.value(arrays) if isinstance(each, Expression) else each for key, each in arguments.items()}
        return called(way, values, *inputs)

    # Compare the outputs of one step of the user's cell, `given`, with the outputs of the call for the same inputs.
    def outputs(inputs: list[mx.array], given: list[mx.array]) -> Iterator[Pair]:
        want = by_call(arrays, *inputs)
        names = ["h", "c"][: form.states] + [BESIDE] * (len(given) - form.states)
        # A GRU may be written as h + (1 - z) (n - h): then the error of z is multiplied by h.
        size = 1 + np.abs(double(inputs[1])) if way.op == "gru" else 1
        # All other arrays [B, H] that the cell returns are compared with h, which is want[0].
        for name, one, other in zip(names, given, want + want[:1] * (len(given) - len(want)), strict=True):
            yield name, double(one), double(other), ROUNDING[way.op] * (size + np.abs(double(other)))

    yield from outputs(first, by_hand(arrays, *first))
    if batch < WITH_GRADIENTS:
        got, want = (gradients(function, form.states, arrays, first) for function in (by_hand, by_call))
        for name, slope in got.items():
            if not (slope.any() or want[name].any()):
                continue  # a parameter of another part of the module
            allowed = SLOPES * (1 + np.abs(want[name]).max())
            yield f"the gradient of {name}", slope, want[name], np.full(slope.shape, allowed)
        # Run the cell for T steps. taken: the inputs of each step. given: its outputs. The call computes each step from
        # the cell's own states before this step, so that errors do not grow from step to step.
        states, taken, given = [each[:B] for each in first[1:]], [], []
        for t in range(T):
            taken.append([first[0][t * B : (t + 1) * B], *states])
            given.append(by_hand(arrays, *taken[-1]))
            states = given[-1][: form.states]
        yield from outputs(
            *([mx.concatenate(list(each)) for each in zip(*steps, strict=True)] for steps in (taken, given))
        )


def drawn(trial: Trial, form: Form, batch: int) -> tuple[dict[str, mx.array], list[mx.array]]:
    """Return random parameters as {title: array}, and x and the states with ROWS rows each. batch: the index of a row
    of BATCHES, which says how large the numbers are. form.states: the number of states."""
    # matrices, vectors, inputs, cell: how large the numbers are (their magnitudes) in the matrices, in the biases and
    # peepholes, in x and h, and in c. batch + 1: another random seed for each batch; `Trial.x` has the seed 0.
    draws, (matrices, vectors, inputs, cell) = np.random.default_rng(batch + 1), BATCHES[batch]
    arrays = {}
    for title, shape in trial.shapes.items():
        # Divide a matrix by the square root of the smaller of its two sizes, so that products with it do not grow with
        # the widths D of x and H of the states.
        size = vectors if len(shape) < 2 else matrices / np.sqrt(min(shape[-2:]))
        arrays[title] = mx.array(draws.uniform(-1.5, 1.5, shape) * size, mx.float64)
    rows = []
    for width, size in [(trial.D, inputs), (trial.H, inputs), (trial.H, cell)][: 1 + form.states]:
        # Each row has its own magnitude, so that the tails and the middle of every activation occur in each batch.
        each = size * 10 ** draws.uniform(-1, 0.5, (ROWS, 1))
        row = draws.uniform(-1, 1, (ROWS, width)) * each
        # In one row x is 0, in another row h, in another row c, because a cell may treat zeros as padding. x and h are
        # never 0 in the same row, because a relu without a bias has no derivative there.
        row[-1 - len(rows)] = 0
        rows.append(mx.array(row, mx.float64))
    return arrays, rows


def gradients(
    function: Callable[..., list[mx.array]], states: int, arrays: dict[str, mx.array], inputs: list[mx.array]
) -> dict[str, np.ndarray]:
    """Return the gradients of all parameters by title, and of x and the states, for random gradients of the first
    `states` outputs of a function. arrays: the parameters by title. inputs: x and the states."""
    draws = np.random.default_rng(0)
    cotangents = [mx.array(draws.uniform(0.5, 1.5, inputs[1].shape), mx.float64) for _ in range(states)]

    # The function to differentiate: the sum of all outputs times their random gradients.
    def loss(arrays: dict[str, mx.array], *inputs: mx.array) -> mx.array:
        outputs = function(arrays, *inputs)[:states]
        return mx.stack([(weight * each).sum() for weight, each in zip(cotangents, outputs, strict=True)]).sum()

    try:
        # found[0]: the gradients of the parameters by title; after it those of x and the states.
        found, others = mx.grad(loss, (0, *range(1, 1 + len(inputs))))(arrays, *inputs), ["x", "h", "c"]
    except StepError:
        raise
    except Exception as error:  # the user's function may contain an operation without a gradient
        raise StepError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
    return {name: double(each) for name, each in [*found[0].items(), *zip(others, found[1:], strict=False)]}


def line_of(way: Way, arguments: dict[str, Any]) -> str:
    """Return the call as a line of Python code. Wx and Wh are passed by position, all others by name."""
    texts = []
    for key, value in arguments.items():
        text = value.text if isinstance(value, Expression) else repr(value)
        texts.append(text if key in ("Wx", "Wh") else f"{key}={text}")
    return f"{way.op}(x, {', '.join(texts)})"
