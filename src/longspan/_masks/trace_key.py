"""A cache key for traced mods: the code a mod can reach and every value that the code names.

The key covers a closed world: plain Python functions and methods, numbers and strings, tensors, lists, tuples and dicts, modules, and
objects whose classes define no operators. Inside it, every name in the bytecode must be a known value or a torch operator. Anything else
raises `Unsure`, and the mod is traced again: a trace costs milliseconds, a stale one costs a wrong answer. Functions that read global
state (`torch.is_grad_enabled`), remember results (`functools.cache`) or look up names given as strings (`getattr`) are outside.
"""

from __future__ import annotations

import builtins
import dis
import functools
import math
import types
from collections.abc import Callable, Hashable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

_IMMUTABLE = frozenset({bool, int, str, bytes, range, type(None), type(Ellipsis), torch.dtype, torch.device, torch.Size})
_BUILTINS = "abs all any bool divmod enumerate float int isinstance len list max min pow range reversed round slice sum tuple zip"
_LIBRARY_OBJECTS = frozenset({Tensor, torch.finfo, torch.iinfo, *(getattr(builtins, name) for name in _BUILTINS.split())})
# Attributes that are no torch operator: metadata that is part of a tensor's key, casts, fields of torch.finfo, methods of containers.
_ATTRIBUTES = frozenset(
    """
    shape dtype device ndim size dim numel nelement stride T is_floating_point is_complex element_size itemsize
    float double half bfloat16 int long short bool values indices
    eps tiny smallest_normal bits get items keys index count
    """.split()
)
# Operators by name and signature, but they return memory that the key does not describe.
_NOT_OPERATORS = frozenset({"data", "grad", "from_file", "empty", "empty_like", "new_empty"})
# Special methods that no expression inside a mod calls: construction, and text, which the walk rejects.
_UNUSED_METHODS = frozenset(
    "__init__ __post_init__ __new__ __init_subclass__ __repr__ __str__ __getstate__ __setstate__ __reduce__ __copy__ __deepcopy__".split()
)


class Unsure(Exception):
    """The mod may read a value that the key does not describe."""


class TraceKey(NamedTuple):
    """What a trace depends on.

    `key` is hashable. Equal keys mean the same trace up to the captured `tensors`, which the key names by position. The key holds ids of
    code and library objects: a cache must keep `alive` for as long as it keeps the key.
    """

    key: Hashable
    tensors: list[Tensor]
    alive: list[Any]


def trace_key(fn: Callable[..., Any]) -> TraceKey:
    """The key of a mod; raises `Unsure` for a mod outside the closed world (see the module's docstring)."""
    walk = _Walk()
    key = walk.value(fn), *walk.attributes()
    if not all(_is_known_attribute(name) or (name in walk.explained and not hasattr(Tensor, name)) for name in walk.names):
        raise Unsure
    if any(name in tensor.__dict__ for tensor in walk.tensors for name in walk.names):
        raise Unsure
    return TraceKey(key, walk.tensors, walk.alive)


class _Names(NamedTuple):
    """Names in a code object and in the functions defined inside it."""

    globals: tuple[str, ...]
    attributes: tuple[str, ...]


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> _Names | None:
    """Names that the code reads; None where it imports, assigns to a name or attribute, matches classes or formats text."""
    global_names, attributes = set[str](), set[str]()
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_GLOBAL":
            global_names.add(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(step.argval)
        elif step.opcode in dis.hasname or step.opname == "MATCH_CLASS" or step.opname.startswith("FORMAT"):
            return None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names_in(constant)
            if inner is None:
                return None
            global_names.update(inner.globals)
            attributes.update(inner.attributes)
        elif isinstance(constant, str) and "%" in constant:  # formats text
            return None
    return _Names(tuple(sorted(global_names)), tuple(sorted(attributes)))


@functools.lru_cache(maxsize=4096)
def _is_operator(name: str) -> bool:
    """Whether a name is an aten operator that computes tensors and mutates nothing."""
    packet: Any = None if name.startswith("_") or name in _NOT_OPERATORS else getattr(torch.ops.aten, name, None)
    if not hasattr(packet, "overloads"):
        return False
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    return any(s.returns and not s.is_mutable and all("Tensor" in str(r.type) for r in s.returns) for s in schemas)


def _is_known_attribute(name: str) -> bool:
    return name in _ATTRIBUTES or _is_operator(name)


def _is_library_function(value: Any) -> bool:
    """Whether a value is a torch operator, a function of `math` or a builtin without state."""
    if isinstance(value, types.BuiltinFunctionType):
        owner = value.__self__
        in_torch = getattr(torch, value.__name__, None) is value or getattr(owner, "__name__", None) == "torch._C._nn"
        return owner is math or (in_torch and _is_operator(value.__name__))
    if isinstance(value, types.FunctionType):
        in_torch = value.__globals__.get("__name__") in ("torch.functional", "torch.nn.functional")
        return in_torch and value.__closure__ is None and _is_operator(value.__name__)
    return False


class _Walk:
    """One walk over everything that a mod can read.

    `names` are the attribute names in the code reached so far, `objects` the modules, classes and instances. Each object is described by
    its attributes of these names. `explained` are the names that some object has.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.objects: list[tuple[Any, tuple[type, ...]]] = []
        self.explained: set[str] = set()
        self.tensors: list[Tensor] = []
        self.alive: list[Any] = []
        self._numbers: dict[int, int] = {}

    def value(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in _IMMUTABLE:
            return kind, value
        if kind is float:
            return kind, repr(value)  # tells 0.0 from -0.0
        number = self._numbers.get(id(value))
        if number is not None:
            return "again", number
        self._numbers[id(value)] = len(self._numbers)
        self.alive.append(value)
        if isinstance(value, Tensor):
            return self.tensor(value)
        if kind is types.FunctionType:
            return id(value) if _is_library_function(value) else self.function(value)
        if kind is tuple or kind is list:
            return kind, tuple(map(self.value, value))
        if kind is dict:
            return kind, tuple((self.value(k), self.value(v)) for k, v in value.items())
        if kind is functools.partial and not value.__dict__:
            return kind, self.value(value.func), self.value(value.args), self.value(value.keywords)
        if kind is types.MethodType and type(value.__func__) is types.FunctionType:
            return kind, self.value(value.__func__), self.value(value.__self__)
        if kind is types.ModuleType:
            return id(value), self.instance(value, ())
        if isinstance(value, type | types.BuiltinFunctionType):
            if value in _LIBRARY_OBJECTS or _is_library_function(value):
                return id(value)
            if kind is not type or not isinstance(value, type) or any("__init__" in vars(cls) for cls in value.__mro__[:-1]):
                raise Unsure  # code may call the class
            return id(value), self.instance(value, value.__mro__)
        reads = getattr(kind, "trace_reads", None)
        if reads is not None and kind.__module__.startswith("longspan."):
            return kind, tuple(self.value(getattr(value, name)) for name in reads)
        return kind, self.instance(value, kind.__mro__)

    def tensor(self, tensor: Tensor) -> Hashable:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            raise Unsure
        self.tensors.append(tensor)
        # Strides: the trace decided whether `reshape` copies.
        return tensor.dtype, tensor.shape, tensor.stride(), tensor.device

    def function(self, fn: types.FunctionType) -> Hashable:
        names = _names_in(fn.__code__)
        if names is None or fn.__dict__:
            raise Unsure
        self.names += [name for name in names.attributes if name not in self.names]
        values: list[Hashable] = [id(fn.__code__), self.value(fn.__defaults__), self.value(fn.__kwdefaults__)]
        values += [self.value(cell.cell_contents) for cell in fn.__closure__ or ()]
        for name in names.globals:
            values.append(self.value(fn.__globals__[name] if name in fn.__globals__ else getattr(builtins, name, None)))
        self.alive.append(fn.__code__)
        return tuple(values)

    def instance(self, value: Any, classes: tuple[type, ...]) -> Hashable:
        """The part of an object that code can read without naming it: a dataclass's fields, which its `==` compares, and `__call__`."""
        self.objects.append((value, classes))
        unnamed: list[str] = []
        for cls in classes:
            if not _has_plain_operators(cls):
                raise Unsure
            if is_dataclass(cls):
                unnamed += [f.name for f in fields(cls)]
            if "__call__" in vars(cls) and cls is not torch.nn.Module:
                unnamed.append("__call__")
        return tuple(self.attribute(value, name, classes) for name in unnamed)

    def attributes(self) -> Iterator[Hashable]:
        """The attributes of all objects that code can read by name. Both lists grow meanwhile: methods name further attributes."""
        next_name: list[int] = []
        todo = True
        while todo:
            todo = False
            for i, (value, classes) in enumerate(self.objects):
                if i == len(next_name):
                    next_name.append(0)
                while next_name[i] < len(self.names):
                    name, todo = self.names[next_name[i]], True
                    next_name[i] += 1
                    part = self.attribute(value, name, classes)
                    if part is not None:
                        yield i, name, part

    def attribute(self, value: Any, name: str, classes: tuple[type, ...]) -> Hashable:
        """The description of one attribute, None where there is none. Follows Python's lookup without calling the user's code."""
        of_class, owner = next(((vars(cls)[name], cls) for cls in classes if name in vars(cls)), (None, None))
        stored: dict[str, Any] = {} if isinstance(value, type) else vars(value)
        if isinstance(of_class, property) and of_class.fget is not None:
            part = self.value(of_class.fget)
        elif name in stored:
            part = self.value(stored[name])
        elif isinstance(of_class, staticmethod):
            part = self.value(of_class.__func__)
        elif owner is torch.nn.Module or owner is object:
            if not _is_known_attribute(name):
                raise Unsure
            return None  # `.float()` and `.to()`: named in the code for tensors
        elif of_class is not None:
            if not isinstance(of_class, types.FunctionType) and hasattr(type(of_class), "__get__"):
                raise Unsure
            part = self.value(of_class)
        else:
            tables = [stored[t] for t in ("_parameters", "_buffers", "_modules") if torch.nn.Module in classes and t in stored]
            table = next((t for t in tables if name in t), None)
            if table is None:
                return None
            part = self.value(table[name])
        self.explained.add(name)
        return part


@functools.lru_cache(maxsize=1024)
def _has_plain_operators(cls: type) -> bool:
    """Whether operators and builtins on the objects of a class read nothing but its fields and `__call__`."""
    if cls in (object, torch.nn.Module):
        return True
    for name, part in vars(cls).items():
        if not (name.startswith("__") and name.endswith("__")) or name in _UNUSED_METHODS:
            continue
        generated = is_dataclass(cls) and getattr(getattr(part, "__code__", None), "co_filename", "") == "<string>"
        is_call = name == "__call__" and isinstance(part, types.FunctionType)
        if (callable(part) or isinstance(part, classmethod)) and not generated and not is_call:
            return False
    return True
