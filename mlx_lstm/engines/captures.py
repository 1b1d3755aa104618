"""Find what a function reads besides its arguments (what it captures): variables of enclosing functions, global
variables, defaults, and what these objects hold. A cache of the function's results needs the captured numbers in its
key, and the gradient of a function needs the captured arrays.

The search begins at the function and follows objects in objects. It stops at the nesting depth DEEPEST, and after MOST
objects. It follows an attribute `object.name` only if `name` occurs in the code of the function that uses the object.
"""

import sys
from collections import deque
from collections.abc import Callable, ItemsView, Iterable, KeysView, ValuesView
from contextlib import suppress
from contextvars import ContextVar
from dis import get_instructions
from functools import lru_cache, partial
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any
from weakref import ref

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

DEEPEST, MOST = 16, 2000
"""Limits of a search: how deep it follows objects in objects, and how many objects it visits."""

LIBRARIES = ("mlx", "numpy", "math", "builtins")
"""Packages whose functions and constants do not change, so that the search does not enter them. Only their layers hold
numbers that may change, such as the slope of an `mlx.nn.LeakyReLU`."""

OWN = __name__.partition(".")[0]
"""This package. The search does not enter its functions, but its objects, which may hold what a user gave them."""

PLAIN = (type(None), bool, int, str, bytes, complex, slice, range, mx.Dtype)
"""Types whose values are put into the key without a search, because they hold no other objects. (`visit` handles float,
whose NaN is not equal to itself.)"""

CONTAINERS = (list, tuple, set, frozenset, dict)
"""Types of containers that hold nothing else than their contents."""

HIDING_READERS = {"globals", "locals", "eval", "exec", "__import__", "import_module"}
"""Functions by which code reads what its own names do not tell."""

OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
UNNAMED = [f"__{before}{name}__" for name in OPERATORS for before in ("", "r")]
UNNAMED += ["__call__", "__getitem__", "__missing__", "__iter__", "__next__", "__len__", "__contains__", "__float__"]
UNNAMED += ["__int__", "__index__", "__bool__", "__neg__", "__pos__", "__abs__", "__enter__", "__exit__"]
"""The methods of an object's class that code may run without their names."""

METHODS_IN_C = (BuiltinFunctionType, MethodWrapperType)
"""Types of methods that are not written in Python, such as `a.get` of a dict. A function of a module written in C has
the same type, and the module in its attribute `__self__`."""

COMPILED: type = type(mx.compile(abs))
"""The type of the functions that `mx.compile` returns. MLX records their operations once."""


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


class Weakly:
    """A function as part of a key, where only the same function is equal. The key does not keep it alive: a cell may be
    a method of a large model. Once the function is gone, the key is equal to no other."""

    def __init__(self, function: Callable[..., Any]):
        # Python makes a new object each time a method is read, so the key refers to what the method is made of.
        parts = [function.__self__, function.__func__] if isinstance(function, MethodType) else [function]
        self.parts: list[Callable[[], Any]] = [reference(part) for part in parts]
        self.ids: tuple[int, ...] = tuple([id(part) for part in parts])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Weakly) or self.ids != other.ids:
            return False
        # An id may belong to another object by now, so compare the objects themselves.
        pairs = zip(self.parts, other.parts, strict=True)
        return all(one() is another() is not None for one, another in pairs)

    def __hash__(self) -> int:
        return hash(self.ids)

    def function(self) -> Callable[..., Any]:
        """Return the function. The weak references to it and to its parts are alive, because the caller still holds
        it."""
        held, *method = [part() for part in self.parts]
        return MethodType(method[0], held) if method else held


def reference(value: Any) -> Callable[[], Any]:
    """Return a function that returns the value, or None if the value is gone. A value of which Python has no weak
    references, such as an object with slots, stays alive."""
    try:
        return ref(value)
    except TypeError:
        return lambda: value


class Captured:
    """What a function captures.

    key: the numbers, texts and code that it can reach, as a list of values that can be compared. is_whole: whether the
    key surely has all of them. It is not whole if the function reads an object, an array or a class of the user's,
    whose numbers code may reach in ways that the names in the code do not show, such as `getattr(self, name)`, or if
    the search reached its limits.

    modules: the modules of `mlx.nn`. arrays: the MLX arrays outside of modules, as pairs (path, array). A path, such as
    "self.weights.0", says how the function's code reaches the array; it is "" if a property computes the array.
    """

    def __init__(self, function: Callable[..., Any]):
        self.key: list[Any] = []
        self.is_whole: bool = True
        self.modules: list[nn.Module] = []
        self.arrays: list[tuple[str, mx.array]] = []
        # The objects visited so far, by id. They are held here, so that no new object gets the id of a dead one.
        self.seen: dict[tuple[int, tuple[str, ...], bool], Any] = {}
        self.visit(function, "", (), 0)

    def visit(self, value: Any, path: str, names: tuple[str, ...], depth: int) -> None:
        """Search one object. path: how the function's code reaches it, or "". names: the names in the code of the
        function that uses the object; the search follows no other attributes. depth: how many objects lead from the
        function to this one."""
        if isinstance(value, float):
            self.key.append((type(value), float.hex(value)))  # so -0.0 differs from 0.0, and NaN equals NaN
        elif isinstance(value, PLAIN):
            self.is_whole &= type(value) in PLAIN  # an IntEnum may have attributes
            # As texts: Python cannot hash a slice in all its versions, and 0j == -0j, but their texts differ.
            self.key.append((type(value), str(value) if isinstance(value, (slice, complex)) else value))
        elif isinstance(value, (np.number, np.bool_)):
            self.key.append((type(value), value.tobytes()))
        elif isinstance(value, mx.array):
            # A graph may depend on an array's shape. `cell_tracer.absorb` refuses a graph that contains the array, but
            # code may also read its numbers as Python numbers, as in `rate.item()` or `if flag`.
            self.is_whole = False
            self.key.append((mx.array, value.shape, value.dtype))
            self.arrays.append((path, value))
        elif (key := (id(value), names, bool(path))) not in self.seen:
            # An object that was visited with other names is visited again: other attributes of it are followed.
            self.seen[key] = value
            if depth > DEEPEST or len(self.seen) > MOST:
                self.is_whole = False
            else:
                self.enter(value, path, names, depth + 1)

    def enter(self, value: Any, path: str, names: tuple[str, ...], depth: int) -> None:
        """Search the parts of an object that is not a single value. path, names: as in `visit`. depth: how many objects
        lead to these parts."""
        if isinstance(value, MethodType):
            code = getattr(value.__func__, "__code__", None)  # a method that Python did not compile has no code
            self.visit(value.__func__, path, names, depth)
            self.visit(value.__self__, "self", names_in(code) if code else names, depth)
        elif isinstance(value, partial):
            self.is_whole &= type(value) is partial and not vars(value)
            parts = [("func", value.func), ("arguments", value.args), ("keywords", value.keywords)]
            self.many(parts, path, names, depth)
        elif isinstance(value, nn.Module) and is_of_library(value):
            # The code of a layer of mlx.nn does not change, but the numbers, arrays and further layers that it holds
            # do.
            self.is_whole = False
            self.modules.append(value)
            self.many([("", vars(value)), ("", dict(value))], "", names, depth)
        elif isinstance(value, METHODS_IN_C) and not isinstance(value.__self__, (ModuleType, type(None))):
            self.is_whole = False
            self.visit(value.__self__, path, names, depth)
        # What is not searched. Objects may have any kind of ==, so `Itself` compares only which objects they are.
        elif isinstance(value, COMPILED) or is_own(value) or (is_of_library(value) and is_constant(value)):
            self.key.append(Itself(value))
        elif isinstance(value, FunctionType):
            self.function(value, path, names, depth)
        elif (parts := contents(value)) is not None:
            self.is_whole &= type(value) in CONTAINERS  # a NamedTuple may have methods
            self.key.append((type(value), len(parts)))
            self.many(parts, path, names, depth)
        else:
            self.is_whole = False
            if not is_of_library(value):
                self.object(value, path, names, depth)

    def function(self, value: FunctionType, path: str, names: tuple[str, ...], depth: int) -> None:
        """Search a function of Python: what it reads, and those of its own attributes that `names` has, the names in
        the code that uses the function. path: as in `visit`. depth: how many objects lead to these parts."""
        self.key.append(value.__code__)
        # read: the names in its own code, which say what it reads.
        read = names_in(value.__code__)
        # The key is not whole if the function has attributes, or if it may read variables by a name that it computes.
        self.is_whole &= not vars(value) and HIDING_READERS.isdisjoint(read)
        defaults = [("defaults", value.__defaults__), ("defaults", value.__kwdefaults__)]
        for name, each in [*variables_of(value), *defaults, *imported_by(value)]:
            self.visit(each, name, read, depth)
        for name in [name for name in vars(value) if name in names]:
            self.key.append(name)
            self.visit(vars(value)[name], f"{path}.{name}" if path else name, names, depth)

    def object(self, value: Any, path: str, names: tuple[str, ...], depth: int) -> None:
        """Search an object with attributes: an instance, a class or a Python module. path, names: as in `visit`. depth:
        how many objects lead from the function to its attributes."""
        if isinstance(value, nn.Module):
            self.modules.append(value)
        # Code may run methods of the object's class without their names, such as `__call__`. They read more attributes.
        methods = [] if isinstance(value, (type, ModuleType)) else unnamed_methods(type(value))
        # `__wrapped__`: the function inside of one that a decorator such as `lru_cache` made.
        more = ["__wrapped__", *(name for method in methods for name in names_in(method.__code__))]
        names = tuple(sorted({*names, *more}))
        found: list[tuple[str, Any]] = []
        for name in names:
            with suppress(Exception):  # a property of the user's may raise anything
                found.append((name, getattr(value, name)))
        for name, held in found:
            # The arrays of a module and the results of a property have no path.
            is_held = not isinstance(value, nn.Module) and not isinstance(getattr(type(value), name, None), property)
            self.visit(held, "" if not is_held else f"{path}.{name}" if path else name, names, depth)
        for method in methods:  # last: they may lead to much that the function never reaches
            self.visit(method, path, names, depth)

    def many(self, pairs: Iterable[tuple[str, Any]], path: str, names: tuple[str, ...], depth: int) -> None:
        """Search the pairs (name, object) of a container or a partial function. path, names, depth: as in `visit`."""
        for name, value in pairs:
            self.visit(value, f"{path}.{name}" if path else "", names, depth)

    def every_array(self) -> list[mx.array]:
        """Return all MLX arrays, also those that the modules hold."""
        held: list[Any] = [each for module in self.modules for _, each in tree_flatten(module)]
        return [*(array for _, array in self.arrays), *(each for each in held if isinstance(each, mx.array))]


def contents(value: Any) -> list[tuple[str, Any]] | None:
    """Return what a container holds as pairs (name, object); None for any other object."""
    if isinstance(value, (dict, MappingProxyType)) and not isinstance(value, nn.Module):
        return [("keys", tuple(value)), *((str(key), each) for key, each in value.items())]
    if isinstance(value, (list, tuple, set, frozenset, deque, ItemsView, KeysView, ValuesView)):
        return [(str(n), each) for n, each in enumerate(value)]
    if isinstance(value, ref):
        return [("object", value())]
    return [("value", value.get(None))] if isinstance(value, ContextVar) else None


@lru_cache(1024)
def unnamed_methods(kind: type) -> list[FunctionType]:
    """Return the methods of a class that code may run without naming them, such as `__call__`. Methods of libraries are
    left out."""
    found = [next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None) for name in UNNAMED]
    return [each for each in found if isinstance(each, FunctionType) and not is_of_library(each)]


def imported_by(function: FunctionType) -> list[tuple[str, ModuleType]]:
    """Return the Python modules that are named in the `import` statements inside a function, as pairs (name, module),
    with the packages that hold them: after `import a.b` code may read a, too. The code does not say from how many
    packages above a relative import counts, so each module that it may mean is returned."""
    package = str(function.__globals__.get("__package__") or "").split(".")
    above = [".".join([*package[:n], ""]) for n in range(1, len(package) + 1)]
    paths = [(before + name).split(".") for name in imports_in(function.__code__) for before in ("", *above)]
    names = dict.fromkeys(".".join(path[:n]) for path in paths for n in range(1, len(path) + 1))
    return [(name, sys.modules[name]) for name in names if name in sys.modules]


@lru_cache(1024)
def imports_in(code: CodeType) -> list[str]:
    """Return the names of the Python modules that code imports, including the functions defined inside of it."""
    inner = [name for each in code.co_consts if isinstance(each, CodeType) for name in imports_in(each)]
    return [*inner, *(each.argval for each in get_instructions(code) if each.opname == "IMPORT_NAME")]


def is_own(value: Any) -> bool:
    """Return whether a value is a function of this package that holds nothing a user gave it."""
    return isinstance(value, FunctionType) and value.__closure__ is None and library_of(value) == OWN


def is_of_library(value: Any) -> bool:
    """Return whether an object, or its class, is defined in one of LIBRARIES."""
    return library_of(value) in LIBRARIES


def is_constant(value: Any) -> bool:
    """Return whether an object of a library holds no numbers that may change: a function, a class or a module of
    Python, unlike a NumPy array or a generator of random numbers."""
    return callable(value) or isinstance(value, ModuleType)


def library_of(value: Any) -> str:
    """Return the first part of the name of the module in which an object, or an object's class, is defined."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    name = name if isinstance(name, str) else type(value).__module__
    return name.partition(".")[0]


def variables_of(function: FunctionType) -> list[tuple[str, Any]]:
    """Return the variables of enclosing functions and the global variables that a function reads, as pairs (name,
    value)."""
    # A cell of Python holds a variable that an enclosing function shares with the functions inside of it.
    held: list[tuple[str, Any]] = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # the variable has no value yet
            held.append((name, cell.cell_contents))
    names = [name for name in globals_in(function.__code__) if name in function.__globals__]
    return [*held, *((name, function.__globals__[name]) for name in names)]


@lru_cache(1024)
def globals_in(code: CodeType) -> tuple[str, ...]:
    """Return the names of the global variables that code reads, including the functions defined inside of it. The
    attribute in `self.W` and the key in `parameters["W"]` are no global variable W."""
    inner = [name for each in code.co_consts if isinstance(each, CodeType) for name in globals_in(each)]
    read = [each.argval for each in get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    return tuple(dict.fromkeys([*read, *inner]))


@lru_cache(1024)
def names_in(code: CodeType) -> tuple[str, ...]:
    """Return the names of global variables and attributes in the code of a function, including the functions defined
    inside of it, and the texts that may be names, as in `getattr(self, "rate")`."""
    inner = [name for each in code.co_consts if isinstance(each, CodeType) for name in names_in(each)]
    texts = [each for each in code.co_consts if isinstance(each, str) and each.isidentifier()]
    return tuple(dict.fromkeys([*code.co_names, *inner, *texts]))
