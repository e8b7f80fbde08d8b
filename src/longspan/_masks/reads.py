"""What a mod can read, as a key: found by walking its code.

The cells it closes over, the globals and attributes it names, the functions it calls, and what operators on its objects call. Whatever
the walk does not understand is an error, never a guess: a key that leaves something out would stand for two different mods.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import sys
import types
from abc import ABCMeta
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

_PLAIN = frozenset(
    {bool, int, str, bytes, range, type(None), type(Ellipsis), type(NotImplemented)}
    | {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}
)
_IN_C = (types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType, types.ClassMethodDescriptorType)
_BY_NAME = (*_IN_C, types.MemberDescriptorType, types.BuiltinFunctionType, types.FunctionType, types.MethodType)
_CACHED = type(functools.cache(len))
_FIXED_MODULES = frozenset({"torch", "math", "builtins", "operator", "functools", "typing", "longspan"})
# What reads by other means than a name in the code: attributes named by a string, files; and what no key holds: a tensor's values.
_BY_STRING = frozenset(
    """
    getattr hasattr setattr delattr eval exec globals locals vars super __import__ __builtins__ import_module attrgetter methodcaller
    """.split()
)
_DYNAMIC_GLOBALS = _BY_STRING | {"type", "id", "dir", "open", "input", "compile"}
_DYNAMIC_ATTRIBUTES = _BY_STRING | set(
    """
    __dict__ __class__ __name__ __qualname__ __doc__ __module__ __code__ __closure__ __defaults__ __kwdefaults__ __globals__ __wrapped__
    __self__ __func__ __annotations__ __slots__ __array__ __reduce_ex__ tolist numpy data_ptr storage untyped_storage storage_offset
    _version _base grad grad_fn is_leaf requires_grad is_inference
    """.split()
)
_FORMATTING = frozenset({"str", "repr", "format", "ascii", "print", "format_map", "__str__", "__repr__", "__format__"})
_FORMATS = "‹formats›"  # stands among the names for code that turns objects into text
# Methods that no expression over a finished object calls, those that make one, and `__getattr__`, of which the walk takes the result.
_MAKING = frozenset("__init__ __new__ __post_init__ __init_subclass__ __class_getitem__ __set_name__".split())
_APART = frozenset(
    """
    __setattr__ __delattr__ __getattr__ __getattribute__ __getstate__ __setstate__ __reduce__ __reduce_ex__ __getnewargs__
    __getnewargs_ex__ __copy__ __deepcopy__ __replace__ __del__ __dir__ __sizeof__ __subclasshook__
    """.split()
)


class Unknown(Exception):
    """The mod reads something whose changes could not be noticed."""


def reads(fn: Callable[..., Any]) -> tuple[Hashable, list[Tensor]]:
    """A hashable description of all that a callable can read, and the tensors among it, which the description knows by number.

    Equal descriptions, equal behaviour up to what the tensors hold. Raises `Unknown` where something is read that the walk does not
    understand, and what attributes of the user's objects raise when they are looked up.
    """
    names: frozenset[str] = frozenset()
    while True:
        walk = _Walk(names)
        described = walk.value(fn)
        if walk.met <= names:
            return described, walk.tensors
        names |= walk.met


@dataclass(frozen=True)
class _Names:
    """What code names, that of functions inside it too. `understood`: it reads nothing by other means."""

    globals: frozenset[str]
    attributes: frozenset[str]
    understood: bool


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> _Names:
    found, attributes, understood = set[str](), set[str](), True
    steps = list(dis.get_instructions(code))
    for i, step in enumerate(steps):
        name, op = step.argval, step.opname
        if op == "IMPORT_NAME":  # after its level (0 unless relative) and the names wanted
            understood &= _root(name) in _FIXED_MODULES and steps[i - 2].argval == 0
        elif "ATTR" in op or "METHOD" in op or op == "IMPORT_FROM":
            attributes.add(str(name))
        elif "GLOBAL" in op or "NAME" in op:
            found.add(str(name))
        elif op == "MATCH_CLASS":  # names attributes in a constant
            understood = False
        elif op.startswith("FORMAT"):
            attributes.add(_FORMATS)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names(constant)
            found |= inner.globals
            attributes |= inner.attributes
            understood &= inner.understood
        elif isinstance(constant, str) and "%" in constant:
            attributes.add(_FORMATS)
    if (found | attributes) & _FORMATTING:
        attributes.add(_FORMATS)
    understood &= not (attributes & _DYNAMIC_ATTRIBUTES or found & _DYNAMIC_GLOBALS)
    return _Names(frozenset(found), frozenset(attributes), understood)


class _Walk:
    """Collects what a callable can read: a hashable description, and the tensors in the order met.

    `names` are the attributes that any code reached so far names: an object is described by its attributes of these names and by what its
    operators (`o[0]`, `o == x`, `o(…)`) could read, since code can read nothing else of it.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self.in_order = sorted(names)
        self.met: set[str] = set()
        self.tensors: list[Tensor] = []
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # what was seen stays alive: another object at its address would pass for it

    def value(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind is float or kind is complex:
            return kind, repr(value)  # tells 0.0 from −0.0, and nan is nan
        if isinstance(value, Tensor):
            return self.tensor(value)
        if _is_fixed(value):
            return "object", value
        if _root(kind.__module__) == "numpy":
            return _of_numpy(value)
        return self.once(value, self.parts)

    def once(self, value: Any, describe: Callable[[Any], Hashable]) -> Hashable:
        if id(value) in self._seen:
            return "seen", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        return describe(value)

    def parts(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in (tuple, list, set, frozenset):
            return kind, tuple(self.value(v) for v in value)  # a set in its own order: the mod may read it so
        if kind is dict:
            return kind, tuple((self.value(k), self.value(v)) for k, v in value.items())
        if kind is slice:
            return kind, self.value(value.start), self.value(value.stop), self.value(value.step)
        if kind is types.SimpleNamespace:
            return kind, self.value(vars(value))
        if kind is functools.partial and not value.__dict__:
            return kind, self.value(value.func), self.value(value.args), self.value(value.keywords)
        if kind is property:
            return kind, self.value(value.fget)
        if kind is _CACHED:
            return kind, self.value(value.__wrapped__)
        if kind is types.BuiltinFunctionType and not isinstance(value.__self__, types.ModuleType | None):
            return kind, value.__name__, self.value(value.__self__)
        if kind is types.MethodType:
            return kind, self.method(value.__func__), self.value(value.__self__)
        if kind is types.FunctionType:
            return self.function(value)
        if kind is types.ModuleType:
            return value, self.attributes(value)
        if isinstance(value, type) and kind in (type, ABCMeta, enum.EnumMeta):
            return value, self.attributes(value), self.operators(value, making=True)
        if isinstance(value, enum.Enum):
            return kind, value.name, self.value(value.value), self.attributes(value), self.operators(kind)
        if isinstance(value, tuple) and kind.__mro__[1:] == (tuple, object) and hasattr(kind, "_fields"):
            return kind, tuple(self.value(v) for v in value), self.attributes(value), self.operators(kind)
        if isinstance(value, type | types.ModuleType | tuple):
            raise Unknown
        return kind, self.attributes(value), self.operators(kind)

    def tensor(self, tensor: Tensor) -> Hashable:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or _FORMATS in self.names:
            raise Unknown
        position = next((i for i, t in enumerate(self.tensors) if t is tensor), len(self.tensors))
        if position == len(self.tensors):
            self.tensors.append(tensor)
        # Strides: whether `reshape` copies was decided in the trace.
        return "tensor", position, tensor.dtype, tensor.shape, tensor.stride(), tensor.device, self.named(tensor.__dict__)

    def attributes(self, value: Any) -> Hashable:
        """What code could read of an object, a class or a module by name."""
        found = []
        for name in self.in_order:
            part = getattr(type(value), name, None)
            if isinstance(part, property):
                found.append((name, self.value(part)))
            elif hasattr(type(part), "__get__") and not isinstance(part, _BY_NAME) and not isinstance(value, tuple):
                raise Unknown
            elif hasattr(value, name):
                found.append((name, self.value(getattr(value, name))))
        return tuple(found)

    def named(self, attributes: dict[str, Any]) -> Hashable:
        return tuple((n, self.value(v)) for n, v in attributes.items() if n in self.names)

    def operators(self, kind: type, *, making: bool = False) -> Hashable:
        """What operators and builtins could call of an object of this class; `making`: or of the class itself."""
        found = []
        for cls in kind.__mro__:
            for name, part in _operators_of(cls, plain=issubclass(kind, enum.Enum | tuple)):
                if (name in _MAKING and not making) or (name in _FORMATTING and _FORMATS not in self.names):
                    continue
                if is_dataclass(cls) and name not in _MAKING and part.__code__.co_qualname.startswith("__create_fn__"):
                    # Made by @dataclass: it reads the fields.
                    self.met |= {f.name for f in fields(cls)}
                else:
                    found.append((name, self.once(part, self.function)))
        return tuple(found)

    def method(self, fn: Any) -> Hashable:
        if not isinstance(fn, types.FunctionType):
            return self.value(fn)
        if hasattr(Tensor, fn.__name__) and vars(torch.nn.Module).get(fn.__name__) is fn:
            return "object", fn  # `.float()`, `.to()`: named in the code for tensors
        return self.once(fn, self.function)

    def function(self, fn: types.FunctionType) -> Hashable:
        names = _names(fn.__code__)
        if not names.understood:
            raise Unknown
        self.met |= names.attributes
        cells = tuple(self.value(c.cell_contents) for c in fn.__closure__ or ())
        read = tuple((n, self.value(fn.__globals__[n])) for n in sorted(names.globals) if n in fn.__globals__)
        return fn.__code__, cells, read, self.value(fn.__defaults__), self.value(fn.__kwdefaults__), self.named(fn.__dict__)


def _root(module: Any) -> str:
    return str(module).split(".")[0]


def _is_fixed(value: Any) -> bool:
    """Functions, classes and modules of libraries: taken as they are. A function that closes over something is not the library's alone."""
    if isinstance(value, types.ModuleType):
        return _root(value.__name__) in _FIXED_MODULES
    if isinstance(value, types.FunctionType):
        return value.__closure__ is None and _root(value.__globals__.get("__name__")) in _FIXED_MODULES
    if isinstance(value, types.BuiltinFunctionType | type):
        if _root(value.__module__) in _FIXED_MODULES and value.__name__ in _DYNAMIC_GLOBALS:
            raise Unknown
        return _root(value.__module__) in _FIXED_MODULES
    return isinstance(value, (*_IN_C, types.MemberDescriptorType)) or type(value).__module__ == "torch._ops"


def _of_numpy(value: Any) -> Hashable:
    numpy = sys.modules["numpy"]
    if isinstance(value, numpy.dtype | numpy.ufunc):
        return "object", value
    if not (isinstance(value, numpy.generic) or type(value) is numpy.ndarray) or value.dtype.hasobject:
        raise Unknown
    return type(value), value.dtype, value.shape, hashlib.sha256(value.tobytes()).digest()


def _operators_of(cls: type, *, plain: bool) -> Iterable[tuple[str, types.FunctionType]]:
    """The special methods that a class defines. `plain`: its objects are enum members or named tuples, whose contents are known."""
    root = _root(cls.__module__)
    if cls in (object, torch.nn.Module) or root in ("typing", "abc", "enum") or (plain and root == "builtins"):
        return ()
    return _operators_of_library(cls) if root in ("longspan", "torch") else _special(cls, plain=plain)


@functools.lru_cache(maxsize=1024)
def _operators_of_library(cls: type) -> Iterable[tuple[str, types.FunctionType]]:
    """Masks are called, and their other operators read nothing more. Of torch's classes, containers of modules are not understood."""
    found = _special(cls, plain=False)
    if _root(cls.__module__) == "longspan":
        return [(name, part) for name, part in found if name == "__call__"]
    if any(name not in _MAKING | _FORMATTING for name, _ in found):
        raise Unknown
    return ()


def _special(cls: type, *, plain: bool) -> list[tuple[str, types.FunctionType]]:
    found = []
    for name, part in vars(cls).items():
        if not plain and isinstance(part, _IN_C) and name not in ("__dict__", "__weakref__"):
            raise Unknown  # written in C: it may hold what no attribute shows
        if name.startswith("__") and name.endswith("__") and name not in _APART:
            made = part.__func__ if isinstance(part, staticmethod | classmethod) else part
            if isinstance(made, types.FunctionType):
                found.append((name, made))
            elif callable(made) and not isinstance(made, type) and not plain:
                raise Unknown
    return found
