"""Replace the recurrent layers of `mlx.nn` in a model by those of `mlx_lstm.nn`, or the reverse.

A layer stays the same object: only its class changes. kinds: a dict {class of a layer: the class that it gets}. A
reason is a text that says why a layer stays as it is; "" means that it was converted, or is no recurrent layer. name:
the path of a layer in the model, such as "layers.0".
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, TypeVar

import mlx.nn as nn

from ..convert.layers import activation_of
from ..engines.choice import Engine, check_engine
from ..ground.checks import check_flag, fail
from ._from_weights import Recurrence
from ._layers import GRU, LSTM, RNN, Layer
from ._pointwise import Pointwise
from ._stack import read

M = TypeVar("M", bound=nn.Module | dict[Any, Any] | list[Any] | tuple[Any, ...])

Kinds = dict[type[nn.Module], type[nn.Module]]

OURS: Kinds = {nn.LSTM: LSTM, nn.GRU: GRU, nn.RNN: RNN}
THEIRS: Kinds = {ours: theirs for theirs, ours in OURS.items()}
"""OURS maps classes of `mlx.nn` to ours, THEIRS maps ours back: each is named after the class that a layer gets."""

_constructors: dict[type[nn.Module], Callable[..., None]] = {}
"""MLX's own constructors, which `patched` restores."""

_blocks: dict[object, Engine | None] = {}
"""The active `with patched()` blocks of all threads, in the order in which they began, each with its engine."""

_lock = Lock()
"""The lock of the two dicts above and of MLX's constructors."""


def replace(model: M, *, back: bool = False, engine: Engine | None = None) -> M:
    """Turn every `mlx.nn.LSTM`, `GRU` and `RNN` of a model, in place, into the layer of the same name in `mlx_lstm.nn`.

    The layers stay the same objects; only their class changes. So the parameters, their names, frozen parameters,
    training or evaluation mode, an optimizer's state and layers shared by several modules stay as they are. Layers are
    found in modules, dicts, lists and tuples of any depth, hidden ones (`_name`) included; the model may itself be a
    layer.

    A subclass is left as it is, because it may compute something else. An `RNN` whose nonlinearity is not in
    `NONLINEARITIES` is left as it is, too. A warning names such layers. It also names layers of other classes that have
    the parameters of a recurrent layer, such as torch's `weight_ih_l0`, with a line of code that runs them. Another
    warning is shown if the model has no recurrent layer at all. Functions that `mx.compile` has already traced do not
    change.

    Args:
        model (Module): or a dict, list or tuple of modules.
        back (bool): turn the layers of `mlx_lstm.nn` into those of `mlx.nn`. Default: `False`.
        engine (str, optional): force an engine in every `mlx_lstm.nn` layer of the model, as in `mlx_lstm.lstm`.
            Default: each layer that this call replaces uses the best engine for the stream's device.

    Returns:
        Module: the model, the same object.

    Raises:
        ValueError: an argument breaks a rule.

    Example:
        >>> import mlx.core as mx
        >>> import mlx.nn
        >>> from mlx_lstm.nn import replace
        >>> model = replace(mlx.nn.Sequential(mlx.nn.Linear(2, 3), mlx.nn.GRU(3, 4)))
        >>> type(model.layers[1]).__module__.split(".")[0]
        'mlx_lstm'
        >>> model(mx.ones((1, 10, 2))).shape
        (1, 10, 4)
    """
    op = "nn.replace"
    check_flag(op, "back", back)
    check_engine(op, engine)
    if not isinstance(model, (nn.Module, dict, list, tuple)):
        fail(op, "model must be a module, or a dict, list or tuple of them,", type(model).__name__)
    if back and engine is not None:
        fail(op, "engine must be None with back=True", repr(engine))
    kinds, modules = (THEIRS if back else OURS), list(modules_of(model, "", set()))
    left = []  # the layers that stay as they are, with the reasons, for a warning
    for name, layer in modules:
        if reason := convert(layer, kinds) or (not back and look_alike(name, layer)):
            left.append(f"{name or 'the model'} ({reason})")
    if left:
        warnings.warn(f"[{op}] left as they are: {', '.join(left)}.", stacklevel=2)
    elif not any(type(layer) in kinds.values() for _, layer in modules):
        wanted = " or ".join(sorted(name_of(kind) for kind in kinds))
        warnings.warn(f"[{op}] found no {wanted} in the model.", stacklevel=2)
    for _, layer in modules:
        if engine is not None and isinstance(layer, (Layer, Pointwise, Recurrence)):
            layer.engine = engine
    return model


@contextmanager
def patched(*, engine: Engine | None = None) -> Iterator[None]:
    """Replace every `mlx.nn.LSTM`, `GRU` and `RNN` that is built inside the block by a layer of `mlx_lstm.nn`.

    This is for code that builds a model and runs it immediately. The constructors of `mlx.nn` are replaced until the
    block ends. This holds in every thread, also for classes that were imported before the block. Blocks may be nested,
    or overlap in several threads; when the last block ends, the constructors are MLX's own again. A layer that
    `replace` would leave as it is stays unchanged, with a warning at the line that built it.

    Args:
        engine (str, optional): force an engine in the layers built inside the block, as in `mlx_lstm.lstm`. If several
            blocks are active, the engine of the latest block that names one is used. Default: the best for the stream's
            device.

    Raises:
        ValueError: there is no such engine.

    Example:
        >>> import mlx.nn
        >>> import mlx_lstm.nn
        >>> with mlx_lstm.nn.patched():
        ...     layer = mlx.nn.LSTM(3, 4)
        >>> isinstance(layer, mlx_lstm.nn.LSTM), isinstance(mlx.nn.LSTM(3, 4), mlx_lstm.nn.LSTM)
        (True, False)
    """
    block = object()  # a key for this block in `_blocks`
    check_engine("nn.patched", engine)
    with _lock:
        if not _blocks:  # the first block of all threads replaces the constructors, the last one restores them
            for kind in OURS:
                _constructors[kind] = kind.__init__
                kind.__init__ = converting(kind.__init__)
        _blocks[block] = engine
    try:
        yield
    finally:
        with _lock:
            del _blocks[block]
            if not _blocks:
                for kind, constructor in _constructors.items():
                    kind.__init__ = constructor


def converting(constructor: Callable[..., None]) -> Callable[..., None]:
    """Wrap a constructor of `mlx.nn`. The new constructor builds the layer of `mlx.nn`, then changes its class to that
    of `mlx_lstm.nn`; if this is not possible, it shows a warning."""

    @functools.wraps(constructor)
    def construct(self: nn.Module, *args: Any, **options: Any) -> None:
        constructor(self, *args, **options)
        if reason := convert(self, OURS):
            warnings.warn(f"[nn.patched] left as it is: {reason}.", stacklevel=2)
        elif isinstance(self, Layer):
            # The engine of the latest open `with` block that names one, else None.
            with _lock:
                engines: list[Engine | None] = [None, *(engine for engine in _blocks.values() if engine is not None)]
            self.engine = engines[-1]

    return construct


def modules_of(tree: object, name: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) once for each module in a tree of modules, dicts, lists and tuples. name: the path of the
    tree itself, "" for the whole model. seen: collects the ids of the objects visited so far, so that a shared object
    is visited once."""
    if not isinstance(tree, (dict, list, tuple)) or id(tree) in seen:
        return
    seen.add(id(tree))
    if isinstance(tree, nn.Module):
        yield name, tree
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from modules_of(value, f"{name}.{key}" if name else str(key), seen)


def convert(layer: nn.Module, kinds: Kinds) -> str:
    """Change the class of a layer to kinds[its class]. Return "" if it was changed, or if its class has no relation to
    the classes in `kinds`. Otherwise return the reason why the layer stays as it is, for a warning."""
    kind = kinds.get(type(layer))  # the new class
    if kind is None:
        bases = [name_of(base) for base in kinds if isinstance(layer, base)]
        return f"{type(layer).__name__}, a subclass of {bases[0]}" if bases else ""
    if getattr(layer, "_norm", None) is not None:  # a layer of `mlx.nn` has no layer normalisation
        return f"{name_of(type(layer))} with layer_norm"
    if kind is RNN:
        try:
            activation_of(layer.nonlinearity)
        except ValueError:
            return f"{name_of(nn.RNN)} with nonlinearity={layer.nonlinearity!r}"
    layer.__class__ = kind
    if kind in THEIRS:  # `layer` is now a layer of this package: add the two attributes that a layer of MLX lacks
        layer.engine = layer.checkpoint_every = None
    else:
        for name in ("engine", "checkpoint_every", "_engine_used"):  # remove the attributes that a layer of MLX lacks
            layer.__dict__.pop(name, None)
    return ""


def look_alike(name: str, layer: nn.Module) -> str:
    """Return a text for a warning if a layer of another package has the parameters of a recurrent layer; for any other
    layer return "". The text names the layer's class, and a line of code that runs the layer with `mlx_lstm.nn.stack`,
    if the layer computes what its parameters suggest: another gate order or transposed square matrices do not show.
    name: the layer's path in the model."""
    if isinstance(layer, (Layer, Pointwise, *OURS)) or type(layer).__module__.partition(".")[0] == "mlx_lstm":
        return ""
    if not (kind := kind_of_parameters(layer)):
        return ""
    # target: the code for the layer, such as "model.layers[0]".
    target = "model" + "".join(f"[{word}]" if word.isdecimal() else f".{word}" for word in name.split(".") if word)
    call = f"if it computes one, mlx_lstm.nn.stack([{target}], x) runs it"
    return f"{type(layer).__name__}, which has the parameters of {kind}: {call}"


def kind_of_parameters(layer: nn.Module) -> str:
    """Return "an LSTM", "a GRU" and so on if a module has the parameters of one, under the names of any known
    format, else an empty text."""
    try:
        # now=False: use no cache of converted arrays. may_drop=True: accept dropout, as the layer does not run here.
        # [0][0]: the first direction of the first layer.
        first = read("the layer", layer, now=False, may_drop=True)[0][0]
    except ValueError:
        return ""
    return {"lstm": "an LSTM", "gru": "a GRU", "rnn": "an RNN", "pointwise": "a Pointwise"}[first.cell.op]


def name_of(kind: type[nn.Module]) -> str:
    """Return the name of a layer's class as users write it, for example mlx.nn.LSTM."""
    return f"{'mlx' if kind in OURS else 'mlx_lstm'}.nn.{kind.__name__}"
