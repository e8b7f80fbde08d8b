"""Cache keys for traced mods: the code that a mod can reach and every value that the code names.

The key covers a closed world: plain Python functions and methods, numbers and strings, tensors, lists, tuples and dicts, modules, and
objects whose classes define no operators. Every name in the bytecode must be a known value or a torch operator. Anything else raises
`Unsure`, and the mod is traced again: a trace costs milliseconds, a stale trace gives wrong results. Functions that read global
state (`torch.is_grad_enabled`), cache results (`functools.cache`) or look up attributes by string (`getattr`) are not supported.
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

from longspan._masks.trace_guard import Guard, Reads, global_or_builtin, guard_of, has_attributes

_IMMUTABLE = frozenset({bool, int, str, bytes, range, type(None), type(Ellipsis), torch.dtype, torch.device, torch.Size})
_BUILTINS = "abs all any bool divmod enumerate float int isinstance len list max min pow range reversed round slice sum tuple zip"
_LIBRARY_OBJECTS = frozenset({Tensor, torch.finfo, torch.iinfo, *(getattr(builtins, name) for name in _BUILTINS.split())})
# Allowed attributes besides torch operators: tensor metadata that is part of the key, casts, torch.finfo fields, container methods.
_ATTRIBUTES = frozenset(
    """
    shape dtype device ndim size dim numel nelement stride T is_floating_point is_complex element_size itemsize
    float double half bfloat16 int long short bool values indices
    eps tiny smallest_normal bits get items keys index count
    """.split()
)
# Pure operators by their schema, but they return memory that the key does not describe.
_NOT_OPERATORS = frozenset({"data", "grad", "from_file", "empty", "empty_like", "new_empty"})
# Special methods that no accepted expression calls: the walk rejects construction and text formatting.
_UNUSED_METHODS = frozenset(
    "__init__ __post_init__ __new__ __init_subclass__ __repr__ __str__ __getstate__ __setstate__ __reduce__ __copy__ __deepcopy__".split()
)


class Unsure(Exception):
    """Raised for a mod that may read a value outside its key; such a mod is not cached."""


class TraceKey(NamedTuple):
    """Hashable key of a trace, and the tensors that the mod captured.

    Equal keys mean equal traces up to the captured `tensors`, which the key names by position. The key holds ids of code and library
    objects: a cache entry must also hold `alive`, so that no id is reused. `guard`: tests for an equal key, if there is such a test.
    """

    key: Hashable
    tensors: list[Tensor]
    alive: list[Any]
    guard: Guard | None = None


def trace_key(fn: Callable[..., Any]) -> TraceKey:
    """The key of a mod; raises `Unsure` for a mod outside the closed world of the module's docstring."""
    walk = _Walk(fn)
    key = walk.value(fn), *walk.attributes()
    if not all(_is_known_attribute(name) or (name in walk.explained and not hasattr(Tensor, name)) for name in walk.names):
        raise Unsure
    if any(name in tensor.__dict__ for tensor in walk.tensors for name in walk.names):
        raise Unsure
    return TraceKey(key, walk.tensors, walk.alive, guard_of(walk.reads, walk.names, walk.tensors))


class _Names(NamedTuple):
    """Global and attribute names in a code object and its nested functions."""

    globals: tuple[str, ...]
    attributes: tuple[str, ...]


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> _Names | None:
    """Names that the code reads; None if it imports, assigns to a global or attribute, matches classes or formats text."""
    global_names, attributes = set[str](), set[str]()
    for instruction in dis.get_instructions(code):
        opname = instruction.opname
        if opname == "LOAD_GLOBAL":
            global_names.add(instruction.argval)
        elif opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(instruction.argval)
        elif instruction.opcode in dis.hasname or opname == "MATCH_CLASS" or opname.startswith("FORMAT"):
            return None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names_in(constant)
            if inner is None:
                return None
            global_names.update(inner.globals)
            attributes.update(inner.attributes)
        elif isinstance(constant, str) and "%" in constant:  # `"%s" % value` formats text without an opcode of its own
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
    """Whether an attribute of a tensor or container is described by the key or is a pure operator."""
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
    """Walk over everything that a mod can read; collects the parts of its key.

    `names`: attribute names in the code reached so far. `objects`: modules, classes and instances, each described by its attributes of
    these names. `explained`: the names that at least one object has.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.reads = Reads(fn)
        self.names: list[str] = []
        self.objects: list[tuple[Any, tuple[type, ...]]] = []
        self.explained: set[str] = set()
        self.tensors: list[Tensor] = []
        self.alive: list[Any] = []
        self._visited: list[Any] = []  # no id of these is reused during the walk
        self._numbers: dict[int, int] = {}

    def value(self, value: Any) -> Hashable:
        """The description of one value; a repeated object is described by its number of first visit."""
        kind = type(value)
        if kind in _IMMUTABLE:
            return kind, value
        if kind is float:
            return kind, repr(value)  # 0.0 == -0.0, but their traces differ
        number = self._numbers.get(id(value))
        if number is not None:
            return "again", number
        self._numbers[id(value)] = len(self._numbers)
        self._visited.append(value)
        if isinstance(value, Tensor):
            return self.tensor(value)
        if kind is types.FunctionType:
            return self.identity(value) if _is_library_function(value) else self.function(value)
        self.reads.visit(value)
        if kind is tuple or kind is list:
            return kind, tuple(map(self.value, value))
        if kind is dict:
            return kind, tuple((self.value(k), self.value(v)) for k, v in value.items())
        if kind is functools.partial and not value.__dict__:
            return kind, self.value(value.func), self.value(value.args), self.value(value.keywords)
        if kind is types.MethodType and type(value.__func__) is types.FunctionType:
            return kind, self.value(value.__func__), self.value(value.__self__)
        if kind is types.ModuleType:
            return self.identity(value), self.instance(value, ())
        if isinstance(value, type | types.BuiltinFunctionType):
            if value in _LIBRARY_OBJECTS or _is_library_function(value):
                return self.identity(value)
            if kind is not type or not isinstance(value, type) or any("__init__" in vars(cls) for cls in value.__mro__[:-1]):
                raise Unsure  # the mod may call the class, which runs `__init__`
            return self.identity(value), self.instance(value, value.__mro__)
        reads = getattr(kind, "trace_reads", None)
        if reads is not None and kind.__module__.startswith("longspan."):
            return kind, tuple(self.value(getattr(value, name)) for name in reads)
        return kind, self.instance(value, kind.__mro__)

    def identity(self, value: Any) -> int:
        """The id of code, or of an object of a library, which is held alive with the key."""
        self.alive.append(value)
        return id(value)

    def tensor(self, tensor: Tensor) -> Hashable:
        """The metadata of a captured tensor; its values are not part of the key."""
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            raise Unsure
        self.tensors.append(tensor)
        # Strides decide during the trace whether `reshape` copies.
        return tensor.dtype, tensor.shape, tensor.stride(), tensor.device

    def function(self, fn: types.FunctionType) -> Hashable:
        """A Python function: its code, defaults, closure cells and the globals that it names."""
        names = _names_in(fn.__code__)
        if names is None or has_attributes(fn):
            raise Unsure
        self.names += [name for name in names.attributes if name not in self.names]
        values: list[Hashable] = [self.identity(fn.__code__), self.value(fn.__defaults__), self.value(fn.__kwdefaults__)]
        values += [self.value(cell.cell_contents) for cell in fn.__closure__ or ()]
        for name in names.globals:
            values.append(self.value(global_or_builtin(fn, name, None)))
        self.reads.function(fn, names.globals)
        return tuple(values)

    def instance(self, value: Any, classes: tuple[type, ...]) -> Hashable:
        """The parts of an object that code reads without naming them: dataclass fields (compared by `==`) and `__call__`."""
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
        """The attributes of all objects that code can read by name.

        `names` and `objects` grow during the iteration, because methods name further attributes. Iterate to a fixed point.
        """
        next_name: list[int] = []
        changed = True
        while changed:
            changed = False
            for i, (value, classes) in enumerate(self.objects):
                if i == len(next_name):
                    next_name.append(0)
                while next_name[i] < len(self.names):
                    name, changed = self.names[next_name[i]], True
                    next_name[i] += 1
                    part = self.attribute(value, name, classes)
                    if part is not None:
                        yield i, name, part

    def attribute(self, value: Any, name: str, classes: tuple[type, ...]) -> Hashable:
        """The description of one attribute, or None if the object lacks it. Follows Python's lookup without calling user code."""
        class_attribute, owner = next(((vars(cls)[name], cls) for cls in classes if name in vars(cls)), (None, None))
        for cls in classes[: None if owner is None else classes.index(owner) + 1]:
            self.reads.class_attribute(cls, name)
        self.reads.attribute(value, None, name)
        stored: dict[str, Any] = {} if isinstance(value, type) else vars(value)
        if isinstance(class_attribute, property) and class_attribute.fget is not None:
            self.reads.guardable = False
            part = self.value(class_attribute.fget)
        elif name in stored:
            part = self.value(stored[name])
        elif isinstance(class_attribute, staticmethod):
            part = self.value(class_attribute.__func__)
        elif owner is torch.nn.Module or owner is object:
            if not _is_known_attribute(name):
                raise Unsure
            return None  # `.float()` and `.to()` also exist on modules; the code calls them on tensors
        elif class_attribute is not None:
            if not isinstance(class_attribute, types.FunctionType) and hasattr(type(class_attribute), "__get__"):
                raise Unsure
            part = self.value(class_attribute)
        else:
            present = [t for t in ("_parameters", "_buffers", "_modules") if torch.nn.Module in classes and t in stored]
            for t in present:
                self.reads.attribute(value, t, name)
            table = next((stored[t] for t in present if name in stored[t]), None)
            if table is None:
                return None
            part = self.value(table[name])
        self.explained.add(name)
        return part


@functools.lru_cache(maxsize=1024)
def _has_plain_operators(cls: type) -> bool:
    """Whether operators and builtins on instances of a class read only its fields and `__call__`."""
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
