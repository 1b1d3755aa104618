"""Run layers one time step at a time with as little work per step as possible: the class `Stepper`.

A `Stepper` checks its arguments once and keeps the states. The steps themselves run in a stream: `Stream`
(`engines.numpy.stream`) for the engine `numpy`, `MLXStream` (`engines.stream`) for all others. States are in dicts
{name: [state of each layer]}. The names are h, and c, which has all other states side by side.

B: batch items, H: hidden units, P: the width of h, U: inputs of each step of a user's cell, K: layers. keep: a factor
on the states before a step. carried: the number of states of a cell besides h. A holder is a dict of parameters: a
layer (MLX's layers are dicts), or a dict of arrays.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, NoReturn, overload

import mlx.core as mx
import numpy as np

from ..engines import Choice
from ..engines.cells import AnyCell, Cell, LSTMCell
from ..engines.chunks import for_engine
from ..engines.definitions import widened
from ..engines.numpy.stream import Stream
from ..engines.numpy.sweep import Views, views
from ..engines.ops.packed import dequantized
from ..engines.packing import Packing
from ..engines.problem import Arrays, Problem
from ..engines.stream import Launch, MLXStream, launch_of
from ..engines.tracing import is_transforming
from ..ground.checks import check_integer, fail, in_the_name_of, instead_of
from ._arguments import check_call, common_dtype, in_dtype
from ._call import Call, Wanted
from ._pointwise import OwnCell
from ._steps import broadcasts

Read = Callable[[], Sequence[tuple[Cell | OwnCell, dict[str, Any], str | None]]]
"""Type of a function that returns for each layer its cell, its parameters by the names of the recurrence, and the
engine that the user forces, or None."""

MUST_BE_OUTSIDE = (
    "a stepper has no gradient and must be called outside of mx.grad, mx.compile and mx.vmap (use step there)"
)
"""The rule of the error that a stepper raises inside a transformation of MLX."""


class Watched(NamedTuple):
    """A parameter of a layer that a stepper has read, with what it needs to notice a change. A change in place, such as
    `layer.Wh *= 2`, leaves the array the same object in MLX, but gives it other memory. So a view of the memory that
    was read is stored, too."""

    holder: dict[str, Any]  # the dict that holds the array
    key: str
    place: int  # the index in the list that the dict has under this key; -1 if the dict has the array itself
    array: mx.array
    view_of: Callable[[Any], np.ndarray]  # returns a NumPy view of an array's memory
    view: np.ndarray


class Plan(NamedTuple):
    """One layer of a stepper. problem, with_keep: the description of one step without and with `keep`, a factor on the
    states. choice: the engine that runs both. arrays: the parameters, and an input "x" of zeros. norm: None, or if the
    product x Wx^T is normalised, the (cell, parameters, packing) from which it is computed; then `arrays` has no Wx."""

    problem: Problem
    with_keep: Problem
    choice: Choice
    arrays: Arrays
    norm: tuple[AnyCell, Arrays, Packing | None] | None = None

    @property
    def given(self) -> Arrays:
        """Return all parameters of the layer, with the Wx that `arrays` may lack, and an input "x" of zeros."""
        return self.arrays if self.norm is None else self.norm[1]


class Stepper:
    """One stream of single time steps through a layer or a stack of layers; a method `stepper` of a layer makes it.

    It computes the same as the layer's method `step` in evaluation mode, with less work per step: the parameters are
    checked and copied once, the buffers are allocated once, and the states stay inside. It has no gradient. It is for
    input that arrives one step at a time: frames of sound, sensor values, text that a model generates.

    A step notices parameters that have changed: new arrays, as an optimizer or `load_weights` assigns them, and MLX's
    changes in place such as `layer.Wh *= 2`. It then copies the new parameters before it runs. It does not notice a
    write through a NumPy view of a parameter, nor that a layer of a stack was replaced by another object: make a new
    stepper then. The engine is chosen for the current device when the stepper is made, and again when parameters have
    changed. A stepper serves one thread at a time; a layer can have any number of steppers.

    Attributes:
        engine_used (Choice): the engine that runs the steps, with the reason.

    Example:
        >>> import numpy as np
        >>> from mlx_lstm.nn import LSTM
        >>> stepper = LSTM(3, 4).stepper()
        >>> for frame in np.ones((10, 3), np.float32):
        ...     hidden = stepper(frame)
        >>> type(hidden).__name__, hidden.shape
        ('ndarray', (4,))
        >>> hidden, cell = stepper.state()
        >>> stepper.reset()
    """

    engine_used: Choice

    def __init__(
        self,
        op: str,
        read: Read,
        holders: Sequence[Any],
        *,
        batch: int | Sequence[int],
        is_stack: bool,
        inputs: int = 0,
    ):
        """Read the parameters and prepare a stream of steps whose states are zero. Only the layers call this. op: the
        name in errors. read: returns the layers' cells and parameters. holders: the dicts or objects with the arrays
        that `read` reads. batch: the sizes of the batch axes. is_stack: whether the states have a first axis with one
        entry per layer, even for a single layer. inputs: how many inputs of each step the cell of the only layer
        reads."""
        self._op, self._read, self._is_stack, self._inputs = op, read, is_stack, inputs
        # `_prepare` sets: _shape (of x), _dtype (of the parameters), _carried (the number of states besides h),
        # _is_lstm (the states are h and c of an LSTM), _on_numpy (all layers run on the engine `numpy`), _stream (which
        # runs the steps), _watched (the arrays read) and _count (how many parameters there were).
        self._holders = [h if isinstance(h, dict) else getattr(h, "__dict__", {}) for h in holders]
        sizes = batch if isinstance(batch, (tuple, list)) else [batch]
        self._batch = tuple([check_integer(op, "batch: each size", size, least=1) for size in sizes])
        if is_transforming():
            fail(op, MUST_BE_OUTSIDE, "a call inside")
        self._prepare()

    def __reduce__(self) -> NoReturn:
        """Refuse copy and pickle, which would not copy the buffers that the engine holds."""
        rule = "a stepper cannot be copied: make another by layer.stepper, and pass state() to its set_state"
        raise TypeError(f"[{self._op}] {rule}.")

    @overload
    def __call__(
        self, x: mx.array, *, keep: mx.array | np.ndarray | None = None, inputs: Sequence[Any] = ()
    ) -> mx.array: ...

    @overload
    def __call__(
        self, x: np.ndarray, *, keep: mx.array | np.ndarray | None = None, inputs: Sequence[Any] = ()
    ) -> np.ndarray: ...

    def __call__(self, x: Any, *, keep: mx.array | np.ndarray | None = None, inputs: Sequence[Any] = ()) -> Any:
        """Run one time step, and return the hidden state after it: the last layer's output. Sizes: D features, H hidden
        units, P the width of h; "..." stands for the batch axes.

        Args:
            x (array): the input of one step, of MLX or NumPy, [..., D] with the batch axes of this stepper. It is cast
                to the dtype of the parameters, so a float64 array of NumPy is accepted, too.
            keep (array, optional): [...], a factor on the states of all layers before the step: 0 where an episode
                begins.
            inputs (sequence of array): for a layer `Pointwise` whose stepper was made with `inputs=U`: U arrays, each
                broadcastable to [..., H].

        Returns:
            array: h [..., P], a new array of the same kind as x. MLX arrays have the dtype to which the parameters
            promote; NumPy arrays are float32 if that dtype has 16 bits. On the CPU h is computed when the call returns.
            On a GPU h is lazy, as always in MLX.

        Raises:
            ValueError: x or keep breaks a rule, or the call is inside a transformation of MLX.
        """
        is_numpy = isinstance(x, np.ndarray)
        # To save time, `_check` is called only for a wrong type or shape, to raise the error.
        if not (is_numpy or isinstance(x, mx.array)) or x.shape != self._shape:
            self._check(x)
        if is_transforming():
            fail(self._op, MUST_BE_OUTSIDE, "a call inside")
        if self._has_changed():
            self._prepare_again()
        # more: the optional arrays of the step, as the stream takes them.
        more: dict[str, Any] = {} if keep is None else {"keep": self._factors(keep)}
        if self._inputs or not isinstance(inputs, (tuple, list)) or inputs:
            more["inputs"] = self._whole_inputs(inputs)
        if not self._on_numpy:
            self._check(x)  # checks the dtype; on `numpy` the cast below raises an error for a wrong dtype
            h = self._stream(x, **more)
            return as_numpy(h) if is_numpy else h
        try:
            # NumPy has no bfloat16.
            row = x if is_numpy else np.asarray(x if x.dtype != mx.bfloat16 else x.astype(mx.float32))
            h = self._stream(row, **more)
        except TypeError:  # NumPy refuses to cast x
            self._check(x)
            raise
        # h is a view of a buffer, so it is copied. MLX takes contiguous arrays only.
        return h.copy() if is_numpy else mx.array(np.ascontiguousarray(h), self._dtype)

    def state(self, as_numpy: bool = False) -> Any:
        """Return a copy of the current states, as `set_state` takes them. H: hidden units; P: the width of h, which is
        H without a projection; "...": the batch axes.

        Args:
            as_numpy (bool): return NumPy arrays instead of MLX arrays. Default: `False`.

        Returns:
            array or tuple: (hidden, cell) for an LSTM, all states for a layer `Pointwise` with several, else hidden.
            For a single layer hidden has the shape [..., P], and every other state [..., H], as `step` takes them; for
            a stack of K layers [K, ..., P] and [K, ..., H]. The dtypes are those of a step's result.
        """
        states: list[Any] = []
        for name, layers in self._states().items():
            whole = np.stack(layers) if self._is_stack else layers[0]
            # The array c has all states except h side by side: one state of an LSTM, several of a user's cell.
            states += np.split(whole, self._carried, axis=-1) if name == "c" else [whole]
        states = states if as_numpy else [mx.array(np.ascontiguousarray(state), self._dtype) for state in states]
        return tuple(states) if len(states) > 1 else states[0]

    def set_state(self, state: Any) -> None:
        """Set the states of all layers. H: hidden units; P: the width of h, which is H without a projection; "...": the
        batch axes.

        Args:
            state (array or tuple): (hidden, cell) for an LSTM, all states for a layer `Pointwise` with several, else
                hidden, in arrays of MLX or NumPy. For a single layer hidden has the shape [..., P], and every other
                state [..., H]; for a stack of K layers [K, ..., P] and [K, ..., H].

        Raises:
            ValueError: the states have the wrong number or shape.
        """
        current, count = self._states(), 1 + self._carried  # count: how many arrays the state has
        # words: what error texts call these arrays.
        words = ["hidden", "cell"] if self._is_lstm else ["hidden", *(f"state[{n}]" for n in range(1, count))]
        given = (state,) if count == 1 and not isinstance(state, (tuple, list)) else state
        if not isinstance(given, (tuple, list)) or len(given) != count:
            rule = "state must be a tuple (hidden, cell)" if self._is_lstm else f"state must have {count} arrays"
            fail(self._op, rule, type(state).__name__)
        layers = current["h"]
        whole: list[np.ndarray] = []
        for n, (word, value) in enumerate(zip(words, given, strict=True)):
            array = self._real(word, value)
            # own: the shape of this state in one layer. current["c"] has all states except h, count - 1 of them.
            own = layers[0].shape if n == 0 else (*current["c"][0].shape[:-1], current["c"][0].shape[-1] // (count - 1))
            shape = (len(layers), *own) if self._is_stack else own
            if array.shape != shape:
                fail(self._op, f"{word} must have shape {list(shape)}", f"shape {list(array.shape)}")
            whole.append(array)
        new = {"h": whole[0]} | ({"c": np.concatenate(whole[1:], axis=-1)} if count > 1 else {})
        self._stream.set_states({name: list(array) if self._is_stack else [array] for name, array in new.items()})

    def reset(self) -> None:
        """Set the states of all layers to 0."""
        states = self._states()
        self._stream.set_states({name: [np.zeros_like(layer) for layer in states[name]] for name in states})

    def __repr__(self) -> str:
        return f"Stepper({self._op}, x {list(self._shape)}, engine {self.engine_used.engine})"

    def _prepare(self) -> None:
        """Read and check the parameters, choose an engine, and make a stream whose states are zero. A stream is the
        object of an engine that runs the steps."""
        # For `_has_changed`, which finds out whether a parameter has changed: each array with a view of its memory, and
        # the number of parameters.
        self._watched = watched(self._holders)
        self._count = count_of(self._holders)
        layers = self._read()  # of each layer: the cell, the parameters, and the engine that the user forces
        self._dtype = common_dtype([array for _, arrays, _ in layers for array in arrays.values()])
        B, U = prod(self._batch), self._inputs  # the batch items in all batch axes; the inputs of a step
        plans = [plan(self._op, cell, in_dtype(arrays, self._dtype), forced, B, U) for cell, arrays, forced in layers]
        self._is_lstm = isinstance(plans[0].problem.cell, LSTMCell)
        self._carried = plans[0].problem.cell.carried
        for n, (before, after) in enumerate(pairwise(plans), 1):  # a layer reads the h of the layer before
            if after.given["x"].shape[1] != before.problem.P:
                rule = f"layer {n} must read the {before.problem.P} features of the layer before"
                fail(self._op, rule, after.given["x"].shape[1])
        self.engine_used = plans[-1].choice  # that of the last layer
        self._on_numpy = all(plan.choice.engine == "numpy" for plan in plans)
        self._shape = (*self._batch, plans[0].given["x"].shape[1])
        if self._on_numpy:
            # plan.norm[0]: the layer's own cell, with its norm. `numpy` gets this cell, because it normalises the
            # input's product itself.
            problems = [one.problem._replace(cell=one.norm[0]) if one.norm else one.problem for one in plans]
            # Or MLXStream, which has the same methods.
            self._stream: Any = Stream(problems, [numpy_views(plan) for plan in plans], self._batch)
        else:
            pairs = [launches_of(plan) for plan in plans]
            self._stream = MLXStream(pairs, self._batch, mx.default_device())

    def _has_changed(self) -> bool:
        """Return whether a parameter is another array, or has other memory, than when this stepper read it."""
        for holder, key, place, array, view_of, view in self._watched:
            now = holder.get(key)
            if place >= 0:  # the dict has a list of arrays under this key
                now = now[place] if isinstance(now, (list, tuple)) and place < len(now) else None
            if now is not array or not np.may_share_memory(view_of(now), view):
                return True
        return count_of(self._holders) != self._count  # a parameter is new

    def _prepare_again(self) -> None:
        """Read the changed parameters, check them and choose an engine again. The states stay as they are."""
        # Make another stepper first: if that raises an error, this one is unchanged, and a later call tries again.
        new = Stepper(
            self._op, self._read, self._holders, batch=self._batch, is_stack=self._is_stack, inputs=self._inputs
        )
        states, zeros = self._states(), new._states()
        sizes = [[layer.shape for layer in layers] for layers in states.values()]
        if new._shape != self._shape or [[layer.shape for layer in layers] for layers in zeros.values()] != sizes:
            rule = "parameters may change their values, but not the sizes of x and the states: make a new stepper,"
            fail(self._op, rule, f"x {list(new._shape)} and states {[layer.shape for layer in zeros['h']]}")
        new._stream.set_states(states)
        vars(self).update(vars(new))

    def _states(self) -> dict[str, list[np.ndarray]]:
        """Return copies of the states of all layers by name, as NumPy arrays."""
        return {name: [as_numpy(layer) for layer in layers] for name, layers in self._stream.states().items()}

    def _check(self, x: Any) -> None:
        """Raise an error if x is not the input of a step."""
        if not isinstance(x, (mx.array, np.ndarray)):
            fail(self._op, f"x must be an mlx.core.array or a NumPy array{instead_of(x, 'x')}", type(x).__name__)
        if x.shape != self._shape:
            # is_frame: x has the right features, and would fit a stepper with another batch size.
            is_frame = x.ndim in (1, 2) and x.shape[-1] == self._shape[-1]
            batch = x.shape[0] if x.ndim == 2 else ()
            advice = f" (stepper(batch={batch}) takes {list(x.shape)})" if is_frame else ""
            fail(self._op, f"x must have shape {list(self._shape)}{advice}", f"shape {list(x.shape)}")
        if not is_real(x):
            fail(self._op, "x must be real", x.dtype)

    def _real(self, name: str, value: Any) -> np.ndarray:
        """Check that a value is a real array of MLX or NumPy. Return it as a NumPy array."""
        if not isinstance(value, (mx.array, np.ndarray)):
            rule = f"{name} must be an mlx.core.array or a NumPy array{instead_of(value)}"
            fail(self._op, rule, type(value).__name__)
        if not is_real(value):
            fail(self._op, f"{name} must be real", value.dtype)
        return as_numpy(value) if isinstance(value, mx.array) else value

    def _factors(self, keep: Any) -> np.ndarray:
        """Check the option `keep` (a factor on the states). Return it as [B], with all batch axes in one."""
        array = self._real("keep", keep)
        if not broadcasts(array.shape, self._batch):
            fail(self._op, f"keep must broadcast to {list(self._batch)}", f"shape {list(array.shape)}")
        return np.broadcast_to(array, self._batch).reshape(-1)

    def _whole_inputs(self, inputs: Any) -> np.ndarray:
        """Check the cell's U inputs of this step. Return them side by side, [B, U H], for B batch items and H units."""
        if not isinstance(inputs, (tuple, list)) or len(inputs) != self._inputs:
            what = len(inputs) if isinstance(inputs, (tuple, list)) else type(inputs).__name__
            fail(self._op, f"inputs must be a tuple or list of {self._inputs} arrays", what)
        shape, arrays = self._states()["h"][0].shape, []
        for n, value in enumerate(inputs):
            array = self._real(f"inputs[{n}]", value)
            sizes = (1,) * (len(shape) - array.ndim) + array.shape  # with as many axes, as broadcasting adds them
            if not broadcasts(sizes, shape):
                fail(self._op, f"inputs[{n}] must broadcast to {list(shape)}", f"shape {list(array.shape)}")
            arrays.append(np.broadcast_to(array, shape).reshape(-1, shape[-1]))
        return np.concatenate(arrays, axis=-1)


def watched(holders: Sequence[dict[str, Any]]) -> list[Watched]:
    """Evaluate all arrays in the dicts, and return each with a NumPy view of its memory. While the view exists, MLX
    does not write into this memory: a parameter that is changed in place gets new memory, which a stepper notices."""
    found = []
    for holder in holders:
        for key, array in holder.items():
            several = enumerate(array) if isinstance(array, (list, tuple)) else [(-1, array)]
            for place, one in several:
                if isinstance(one, mx.array):
                    view_of = view_of_bfloat16 if one.dtype == mx.bfloat16 else np.asarray
                    # mx.stop_gradient returns another array with the same memory. View this other array: with only a
                    # view of `one` itself, MLX would write into the same memory, and nobody would notice the change.
                    found.append(Watched(holder, key, place, one, view_of, view_of(mx.stop_gradient(one))))
    return found


def count_of(holders: Sequence[dict[str, Any]]) -> int:
    """Return the number of entries of all dicts, plus those of the list `params` of a layer `Pointwise`."""
    return sum([len(holder) + len(holder.get("params", ())) for holder in holders])


def view_of_bfloat16(array: mx.array) -> np.ndarray:
    """Return a view of the memory of a bfloat16 array, as integers. NumPy has no bfloat16."""
    try:
        memory: Any = array  # NumPy's stubs do not know that MLX arrays are buffers
        return np.frombuffer(memory, np.uint16)
    except BufferError:  # the array is not contiguous
        return np.asarray(array.view(mx.uint16))


def plan(op: str, cell: Cell | OwnCell, parameters: dict[str, Any], engine: str | None, B: int, inputs: int) -> Plan:
    """Check the parameters of one layer, which have one dtype, and choose the engine for steps of B batch items. cell:
    the layer's cell; an `OwnCell` is traced here. engine: the engine that the user forces, or None. inputs: the number
    of inputs of each step that a cell of the user's own reads."""
    # `.shape` is that of the float matrix, also for a `Quantized` weight. P: the width of h.
    Wx, dtype = parameters["Wx"], common_dtype(parameters.values())
    H = Wx.shape[0] // cell.gates
    P = parameters["Wh"].shape[-1] if "Wh" in parameters else H
    traced = cell.traced(B, H, dtype, inputs) if isinstance(cell, OwnCell) else cell
    arrays = parameters | {"x": mx.zeros((B, Wx.shape[-1]), dtype), "h0": mx.zeros((B, P), dtype)}
    if "c" in traced.outputs:
        arrays["c0"] = mx.zeros((B, traced.carried * H), dtype)
    if inputs:
        arrays["inputs"] = mx.zeros((1, B, inputs * H), dtype)
    # False: one direction. {}: no flags to check.
    arrays, packing, sizes = check_call(op, arrays, traced, False, {}, one_step=True)
    # `with_norm` computes the part of layer normalisation that comes before the steps, if there is one. call, inner,
    # inner_packing: what is left for the engine.
    call, inner, inner_packing = Call(traced, engine=engine, one_step=True).with_norm(arrays, packing)
    # Plan a step without `keep` and a step with it. Only the name and the shape of `keep` matter here.
    names = inner | {"keep": mx.ones((1, B, 1), dtype)}
    wanted = Wanted(return_gates=False, training=False, wants_last=True)
    # An error names `op`, the layer or function that the user called, instead of the cell's function such as "lstm".
    with in_the_name_of(op, cell.op):
        problem, chosen = call.plan(inner, [], sizes, inner_packing, wanted)
        with_keep, _ = call.plan(names, [], sizes, inner_packing, wanted)
    # Remove the states: only the checks needed them, and the stream has its own. is_before: the product x Wx^T is
    # normalised before the step. The engine `numpy` does this itself; for other engines the stream does it.
    arrays, inner = ({name: each[name] for name in each if name not in ("h0", "c0")} for each in (arrays, inner))
    is_before = traced.norm is not None and traced.norm.of == "products"
    return Plan(problem, with_keep, chosen, inner, (traced, arrays, packing) if is_before else None)


def numpy_views(plan: Plan) -> Views:
    """Return a layer's parameters as the engine `numpy` reads them: float32 or float64 arrays of NumPy, in memory
    that MLX does not overwrite."""
    packing = plan.problem.packing if plan.norm is None else plan.norm[2]  # norm: (cell, parameters, packing)
    arrays = dequantized(packing, for_engine("numpy", plan.given))  # for_engine: cast to dtypes that the engine reads
    # mx.stop_gradient returns another array with the same memory. While it exists, MLX does not write into this memory.
    return views({name: mx.stop_gradient(array) for name, array in arrays.items()})


def launches_of(plan: Plan) -> tuple[Launch, Launch]:
    """Return what a layer needs at each step on an engine other than `numpy`, as two `Launch` objects: for steps
    without the option `keep` (a factor on the states), and with it."""
    launch = launch_of(plan.choice.engine, plan.problem, plan.arrays)._replace(norm=plan.norm)
    return launch, launch._replace(problem=plan.with_keep)


def is_real(array: mx.array | np.ndarray) -> bool:
    """Return whether an array has a real dtype: floats, integers or bool."""
    return array.dtype.kind in "fiub" if isinstance(array, np.ndarray) else array.dtype != mx.complex64


def as_numpy(array: mx.array | np.ndarray) -> np.ndarray:
    """Return a copy of an array as a NumPy array. The 16-bit floats of MLX become float32."""
    if isinstance(array, mx.array):
        array = widened(array)
    return np.array(array, order="C")
