"""A model's recurrent layers of `mlx.nn` become ours where they are, and back."""

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import mlx.nn as nn

from ..checks import check_flag, fail
from ._layers import GRU, LSTM, RNN, activation_of

M = TypeVar("M", bound=nn.Module | dict[Any, Any] | list[Any] | tuple[Any, ...])

Kinds = dict[type[nn.Module], type[nn.Module]]

OURS: Kinds = {nn.LSTM: LSTM, nn.GRU: GRU, nn.RNN: RNN}
THEIRS: Kinds = {ours: theirs for theirs, ours in OURS.items()}


def replace(model: M, *, back: bool = False, engine: str | None = None) -> M:
    """Every `mlx.nn.LSTM`, `GRU` and `RNN` of a model becomes ours, in place.

    The layers stay the objects they are, and only their class changes: parameters, their names, what is frozen,
    training or evaluation mode and an optimizer's state stay; so does a layer that several modules share. Found are
    those in modules, dicts, lists and tuples of any depth, hidden ones (`_name`) too; the model may itself be one.

    A subclass, which may compute something else, and an `RNN` whose nonlinearity is none of `NONLINEARITIES` are left:
    a warning names them. One also says if the model has no such layer at all, as where it brings classes of its own.
    What `mx.compile` has traced before does not change.

    Args:
        model (Module): or a dict, list or tuple of modules.
        back (bool): make ours those of `mlx.nn` again. Default: `False`.
        engine (str, optional): force an engine in every layer of ours in the model, as in `mlx_lstm.lstm`. Default:
            those replaced now take the best for the stream's device.

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
    if not isinstance(model, (nn.Module, dict, list, tuple)):
        fail(op, "model must be a module, or a dict, list or tuple of them,", type(model).__name__)
    if back and engine is not None:
        fail(op, "engine must be None with back=True", repr(engine))
    kinds, modules = (THEIRS if back else OURS), list(modules_of(model, "", set()))
    left = [f"{name or 'the model'} ({why})" for name, layer in modules if (why := turn(layer, kinds))]
    if left:
        warnings.warn(f"[{op}] left as they are: {', '.join(left)}.", stacklevel=2)
    elif not any(type(layer) in kinds.values() for _, layer in modules):
        wanted = " or ".join(sorted(name_of(kind) for kind in kinds))
        warnings.warn(f"[{op}] found no {wanted} in the model.", stacklevel=2)
    for _, layer in modules:
        if engine is not None and isinstance(layer, (LSTM, GRU, RNN)):
            layer.engine = engine
    return model


@contextmanager
def patched(*, engine: str | None = None) -> Iterator[None]:
    """What is built as `mlx.nn.LSTM`, `GRU` or `RNN` inside the block is ours, as after `replace`.

    For code that builds and runs a model where nobody can reach it in between. However the class was imported, also
    before the block, and in every thread: the constructors of `mlx.nn` are others until the block ends. What `replace`
    leaves is left here, too, with a warning at the line that built it.

    Args:
        engine (str, optional): force an engine in these layers, as in `mlx_lstm.lstm`. Default: the best for the
            stream's device.

    Example:
        >>> import mlx.nn
        >>> import mlx_lstm.nn
        >>> with mlx_lstm.nn.patched():
        ...     layer = mlx.nn.LSTM(3, 4)
        >>> isinstance(layer, mlx_lstm.nn.LSTM), isinstance(mlx.nn.LSTM(3, 4), mlx_lstm.nn.LSTM)
        (True, False)
    """
    constructors = {kind: kind.__init__ for kind in OURS}
    for kind, constructor in constructors.items():
        kind.__init__ = turning(constructor, engine)
    try:
        yield
    finally:
        for kind, constructor in constructors.items():
            kind.__init__ = constructor


def turning(constructor: Callable[..., None], engine: str | None) -> Callable[..., None]:
    """A constructor whose layers are ours, where they can be."""

    @functools.wraps(constructor)
    def construct(self: nn.Module, *args: Any, **options: Any) -> None:
        constructor(self, *args, **options)
        if why := turn(self, OURS):
            warnings.warn(f"[nn.patched] left as it is: {why}.", stacklevel=2)
        elif engine is not None:
            self.engine = engine

    return construct


def modules_of(tree: object, name: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """All modules in it under their paths, each once."""
    if not isinstance(tree, (dict, list, tuple)) or id(tree) in seen:
        return
    seen.add(id(tree))
    if isinstance(tree, nn.Module):
        yield name, tree
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from modules_of(value, f"{name}.{key}" if name else str(key), seen)


def turn(layer: nn.Module, kinds: Kinds) -> str:
    """A layer of these kinds is from now on of the kind each leads to; else why not, nothing of other modules."""
    kind = kinds.get(type(layer))
    if kind is None:
        bases = [name_of(base) for base in kinds if isinstance(layer, base)]
        return f"{type(layer).__name__}, a subclass of {bases[0]}" if bases else ""
    if kind is RNN:
        try:
            activation_of(layer.nonlinearity)
        except ValueError:
            return f"{name_of(nn.RNN)} with nonlinearity={layer.nonlinearity!r}"
    layer.__class__ = kind
    if kind in THEIRS:
        layer.engine = None
    else:
        del layer.engine
        layer.__dict__.pop("checkpoint_every", None)
    return ""


def name_of(kind: type[nn.Module]) -> str:
    """As users write it."""
    return f"{'mlx' if kind in OURS else 'mlx_lstm'}.nn.{kind.__name__}"
