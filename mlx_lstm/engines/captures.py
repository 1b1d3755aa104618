"""Find what a function reads besides its arguments (what it captures): variables of enclosing functions, global
variables, defaults, and what these objects hold. A cache of the function's results needs these values in its key.

The search begins at the function and follows objects in objects, up to the limits DEEPEST, MOST and LARGEST. It follows
an attribute only if the code that reads the object contains the attribute's name.
"""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import lru_cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

DEEPEST, MOST, LARGEST = 16, 2000, 4096
"""Limits of a search: how deep it follows objects in objects, how many objects it visits, and the bytes of a NumPy
array whose numbers it puts into the key."""

LIBRARIES = ("mlx", "numpy", "math", "builtins")
"""Packages whose functions and constants do not change, so that the search does not enter them. Only their layers hold
numbers that may change, such as the slope of an `mlx.nn.LeakyReLU`."""

PLAIN = (type(None), bool, int, str, bytes, complex, slice, range, mx.Dtype)
"""Types whose values are put into the key without a search, because they hold no other objects. (`visit` handles float,
whose NaN is not equal to itself.)"""

NUMBER_READERS = {"item", "tolist", "float", "int"}
"""Methods and functions by which code reads the numbers of an array as numbers of Python."""


COMPILED: type = type(mx.compile(abs))
"""The type of the functions that `mx.compile` returns. MLX records their operations once."""


class TooMuch(Exception):
    """Raised if a function captures more than a search may visit."""


class Itself:
    """An object as part of a key, where only the same object is equal: a function that is not searched further. So a
    cell that now calls `mx.tanh` instead of `mx.sigmoid` has another key. The key holds the object, so that its id
    stays its own."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Captured:
    """What a function captures. key: the numbers, texts and code that it can reach, as a list of values that can be
    compared. arrays: the MLX arrays, of which the key has only shape and dtype. modules: the modules of `mlx.nn`.
    named: the arrays that are attributes of other objects, of classes and of Python modules, as pairs (attribute,
    array), without those that a property computes. reads_numbers: whether code that the search finds may read numbers
    of arrays, for which the key does not suffice.

    The search follows an attribute of an object or of a Python module only if the code that reads the object contains
    the attribute's name.
    """

    def __init__(self, function: Callable[..., Any], partly: bool = False):
        """Search `function`. If it captures more than the limits allow, raise `TooMuch`; with `partly`, keep what was
        found so far."""
        self.key: list[Any] = []
        self.arrays: list[mx.array] = []
        self.modules: list[nn.Module] = []
        self.named: list[tuple[str, mx.array]] = []
        self.reads_numbers: bool = False
        self.seen: dict[tuple[int, tuple[str, ...]], Any] = {}  # holds the objects, so that their ids stay theirs
        with suppress(TooMuch) if partly else nullcontext():
            self.visit(function, (), 0)

    def visit(self, value: Any, names: tuple[str, ...], depth: int) -> None:
        """Search one object. names: the names in the code that reads it; the search follows no other
        attributes. depth: how many objects lead from the function to this one."""
        if isinstance(value, float):
            self.key.append((type(value), float.hex(value)))  # so -0.0 differs from 0.0, and NaN equals NaN
        elif isinstance(value, PLAIN):
            # As texts: Python cannot hash a slice in all its versions, and 0j == -0j, but their texts differ.
            self.key.append((type(value), str(value) if isinstance(value, (slice, complex)) else value))
        elif isinstance(value, (np.ndarray, np.generic)):
            if value.nbytes > LARGEST or value.dtype.hasobject:
                raise TooMuch
            self.key.append((value.dtype.str, value.shape, value.tobytes()))
        elif isinstance(value, mx.array):
            # A graph may depend on an array's shape. `cell_tracer.absorb` refuses a graph that contains its numbers.
            self.key.append((mx.array, value.shape, value.dtype))
            self.arrays.append(value)
        elif (id(value), names) not in self.seen:
            self.seen[id(value), names] = value
            # An object that was visited with other names is visited again: other attributes of it are followed.
            if depth > DEEPEST or len(self.seen) > MOST:
                raise TooMuch
            self.enter(value, names, depth + 1)

    def enter(self, value: Any, names: tuple[str, ...], depth: int) -> None:
        """Search the parts of an object that is not a single value. names: the names in the code that reads the object;
        the search follows no other attributes. depth: how many objects lead from the function to these parts."""
        if isinstance(value, MethodType):
            self.visit(value.__func__, names, depth)
            code = getattr(value.__func__, "__code__", None)  # a method that Python did not compile has no code
            self.visit(value.__self__, names_in(code) if code else names, depth)
        elif isinstance(value, partial):
            self.many([value.func, list(value.args), value.keywords], names, depth)
        elif isinstance(value, (list, tuple, set, frozenset)):
            self.key.append((type(value), len(value)))
            self.many(value, names, depth)
        elif isinstance(value, dict) and not isinstance(value, nn.Module):
            self.key.append((dict, len(value)))
            self.many([each for pair in value.items() for each in pair], names, depth)
        elif isinstance(value, nn.Module) and library_of(value) in LIBRARIES:
            # The code of a layer of mlx.nn does not change, but what it holds does: numbers in its attributes, arrays
            # and further layers in its items.
            self.modules.append(value)
            self.key.append(type(value))
            self.many([vars(value), dict(value)], names, depth)
        # What is not searched. A method such as `a.append` is made anew at each access but compares equal, so it is a
        # key itself. Other objects may have any kind of ==, so `Itself` compares only which objects they are.
        elif isinstance(value, BuiltinFunctionType):
            self.key.append(value)
        elif isinstance(value, COMPILED) or library_of(value) in LIBRARIES:
            self.key.append(Itself(value))
        elif isinstance(value, FunctionType):
            self.key.append(value.__code__)
            # read: the names in its own code, which say what it reads of its variables and defaults.
            read = names_in(value.__code__)
            self.reads_numbers |= not NUMBER_READERS.isdisjoint(read)
            self.many([each for _, each in variables_of(value)], read, depth)
            self.many([value.__defaults__, value.__kwdefaults__], read, depth)
        else:
            self.object(value, names, depth)

    def object(self, value: Any, names: tuple[str, ...], depth: int) -> None:
        """Search an object with attributes: an instance, a class or a Python module. names: the names in the code that
        reads it. depth: how many objects lead from the function to its attributes."""
        if isinstance(value, nn.Module):
            self.modules.append(value)
        # An object that can be called runs the method `__call__` of its class, which reads more attributes.
        call = next((vars(each)["__call__"] for each in type(value).__mro__ if "__call__" in vars(each)), None)
        if isinstance(call, FunctionType):
            self.visit(call, names, depth)
            names = tuple(sorted({*names, *names_in(call.__code__)}))
        self.key.append(type(value))
        found: list[tuple[str, Any]] = []
        for name in names:
            with suppress(Exception):  # a property of the user's may raise anything
                found.append((name, getattr(value, name)))
        for name, held in found:
            # named: without the arrays of a module, which is in `modules` itself, and without results of a property.
            is_held = not isinstance(value, nn.Module) and not isinstance(getattr(type(value), name, None), property)
            self.named += [(name, held)] if isinstance(held, mx.array) and is_held else []
            self.key.append(name)
            self.visit(held, names, depth)

    def many(self, values: Any, names: tuple[str, ...], depth: int) -> None:
        """Search several objects. names, depth: as in `visit`."""
        for value in values:
            self.visit(value, names, depth)

    def every_array(self) -> list[mx.array]:
        """Return all MLX arrays, also those that the modules hold."""
        held: list[Any] = [each for module in self.modules for _, each in tree_flatten(module)]
        return [*self.arrays, *(each for each in held if isinstance(each, mx.array))]


def reached(function: Callable[..., Any]) -> tuple[list[nn.Module], list[tuple[str, mx.array]]]:
    """Return the modules of `mlx.nn` and the arrays, as pairs (name, array), that a function reaches by the names in
    its code, as attributes of objects, classes and Python modules. If the limits end the search, return those found so
    far."""
    found = Captured(function, partly=True)
    return found.modules, found.named


def library_of(value: Any) -> str:
    """Return the first part of the name of the module in which an object, or an object's class, is defined."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    name = name if isinstance(name, str) else type(value).__module__
    return name.partition(".")[0]


def variables_of(function: FunctionType) -> list[tuple[str, Any]]:
    """Return the variables of enclosing functions and the global variables that a function reads, as pairs (name,
    value)."""
    # A cell of Python holds a variable that an enclosing function shares with the functions inside of it.
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    held = [(name, cell.cell_contents) for name, cell in cells if cell_is_full(cell)]
    # Without texts: the key in `parameters["W"]` is no global variable W.
    names = [name for name in names_in(function.__code__, with_texts=False) if name in function.__globals__]
    return [*held, *((name, function.__globals__[name]) for name in names)]


@lru_cache(1024)
def names_in(code: CodeType, with_texts: bool = True) -> tuple[str, ...]:
    """Return the names of global variables and attributes in the code of a function, including the functions defined
    inside of it. With texts, those that may be names count, too, as in `getattr(self, "rate")`."""
    inner = [name for each in code.co_consts if isinstance(each, CodeType) for name in names_in(each, with_texts)]
    texts = [each for each in code.co_consts if isinstance(each, str) and each.isidentifier()]
    return tuple(dict.fromkeys([*code.co_names, *inner, *(texts if with_texts else [])]))


def cell_is_full(cell: Any) -> bool:
    """Return whether a variable of an enclosing function, held in a closure's cell, has a value yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
