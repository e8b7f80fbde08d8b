"""A cheap test whether a mod reads the same values as when its trace was cached.

The key of a trace (`longspan._masks.trace_key`) walks over everything that a mod can read: tens of microseconds, at every call. A guard
remembers where the walk read what, and compares these places only: closure cells, globals and attributes must hold the same objects, or
tensors of the same dtype, shape, strides and device. A guard that fails says nothing: the walk decides.

A guard belongs to the code of a function, so it also serves closures that are made anew for each call. It holds neither tensors nor the
functions and objects that hold tensors.
"""

from __future__ import annotations

import builtins
import functools
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

MISSING: Any = object()
_COMPARED = frozenset({bool, int, float, str})
_PLAIN = frozenset({Tensor, torch.nn.Parameter})

Expected = tuple[str, Any]  # ("same", value), ("ref", weak reference to the value) or ("tensor", metadata)
Metadata = tuple[Hashable, ...]


REMEMBERED_MASK = "_longspan_mask"  # the attribute of a function that holds its remembered mask, which no mod reads


def has_attributes(fn: types.FunctionType) -> bool:
    """Whether a function has attributes of the user, which its code may read."""
    return bool(fn.__dict__) and (len(fn.__dict__) > 1 or REMEMBERED_MASK not in fn.__dict__)


class Unguarded(Exception):
    """Raised for a read that a guard cannot repeat."""


def metadata(tensor: Tensor) -> Metadata:
    """The properties of a captured tensor that its trace depends on. Strides decide during the trace whether `reshape` copies."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def global_or_builtin(fn: types.FunctionType, name: str, default: Any) -> Any:
    """The value that a function's code loads for a global name; `default` if neither its module nor `builtins` has it."""
    value = fn.__globals__.get(name, MISSING)
    return vars(builtins).get(name, default) if value is MISSING else value


class Reads:
    """Values that a walk read: closure cells and globals of functions, attributes of objects, dicts of objects and of classes."""

    def __init__(self, fn: Any) -> None:
        self.guardable = type(fn) is types.FunctionType
        self._fn = fn
        self.functions: list[tuple[Any, types.CodeType, Any, list[tuple[int, Expected]], list[tuple[str, Expected]]]] = []
        self.dicts: list[tuple[Callable[[], Any], type, str | None, str, Expected]] = []  # (object, its type, a dict in it, name, value)
        self.classes: list[tuple[Any, str, Any]] = []  # (vars of a class, name, value)
        self.tensors: list[Tensor] = []  # in the order of reads, repeated ones too

    def visit(self, value: Any) -> None:
        """A value that the walk looks into by other ways than cells, globals and attributes: it cannot be guarded."""
        if isinstance(value, functools.partial | types.MethodType) or hasattr(type(value), "trace_reads"):
            self.guardable = False

    def function(self, fn: types.FunctionType, global_names: tuple[str, ...]) -> None:
        """All reads of a function: its code, cells and globals."""
        if not self.guardable:
            return
        if fn.__kwdefaults__ or any(type(d) not in _COMPARED and d is not None for d in fn.__defaults__ or ()):
            self.guardable = False
            return
        try:
            cells = [(i, self._expected(cell.cell_contents)) for i, cell in enumerate(fn.__closure__ or ())]
            names = [(name, self._expected(global_or_builtin(fn, name, MISSING))) for name in global_names]
        except Unguarded:
            self.guardable = False
            return
        self.functions.append((None if fn is self._fn else weakref.ref(fn), fn.__code__, fn.__defaults__, cells, names))

    def attribute(self, holder: Any, table: str | None, name: str) -> None:
        """A read of an attribute from an object's `__dict__`, or from a dict in it, present or not."""
        if not self.guardable:
            return
        try:
            stored = vars(holder) if table is None else vars(holder)[table]
            self.dicts.append((weakref.ref(holder), type(holder), table, name, self._expected(stored.get(name, MISSING))))
        except (Unguarded, TypeError, KeyError):
            self.guardable = False

    def class_attribute(self, cls: type, name: str) -> None:
        """A read of an attribute from a class, present or not."""
        value = vars(cls).get(name, MISSING)
        kind = type(value)
        fixed = value is MISSING or value is None or kind in _COMPARED or kind in (torch.dtype, torch.device)
        if not fixed and not isinstance(value, type) and not hasattr(kind, "__get__"):  # functions and properties have __get__
            self.guardable = False  # a container may be modified in place
        self.classes.append((vars(cls), name, value))

    def _expected(self, value: Any) -> Expected:
        if isinstance(value, Tensor):
            if type(value) not in _PLAIN:
                raise Unguarded
            self.tensors.append(value)
            return "tensor", metadata(value)
        kind = type(value)
        if value is MISSING or value is None or kind in _COMPARED or kind in (torch.dtype, torch.device, types.BuiltinFunctionType):
            return "same", value
        if kind is types.FunctionType or kind is types.ModuleType or hasattr(value, "__dict__"):
            try:
                return "ref", weakref.ref(value)
            except TypeError:
                raise Unguarded from None
        raise Unguarded  # containers may be modified in place


class Guard:
    """The reads of a walk, to be repeated for a function of the same code."""

    def __init__(self, reads: Reads, names: list[str], tensors: list[Tensor]) -> None:
        """names: all attribute names in the code. tensors: the distinct tensors that the walk found, in its order."""
        self._functions, self._dicts, self._classes, self._names = reads.functions, reads.dicts, reads.classes, names
        self._pattern = _pattern(reads.tensors)
        number = {id(t): n for t, n in zip(reads.tensors, self._pattern, strict=True)}
        self._order = [number[id(t)] for t in tensors]

    def tensors(self, fn: types.FunctionType) -> list[Tensor] | None:
        """The tensors that a function captured, as the walk would find them; None if a place holds another value."""
        tensors_read: list[Tensor] = []
        for ref, code, defaults, cells, names in self._functions:
            function = fn if ref is None else ref()
            if function is None or function.__code__ is not code or function.__kwdefaults__ or has_attributes(function):
                return None
            if function.__defaults__ is not defaults and not _same_defaults(function.__defaults__, defaults):
                return None
            closure = function.__closure__ or ()
            for i, expected in cells:
                if not _holds(closure[i].cell_contents, expected, tensors_read):
                    return None
            for name, expected in names:
                if not _holds(global_or_builtin(function, name, MISSING), expected, tensors_read):
                    return None
        for ref, kind, table, name, expected in self._dicts:
            holder = ref()
            if type(holder) is not kind:
                return None
            stored = holder.__dict__ if table is None else holder.__dict__[table]
            if not _holds(stored.get(name, MISSING), expected, tensors_read):
                return None
        for attributes, name, value in self._classes:
            if attributes.get(name, MISSING) is not value:
                return None
        distinct = tensors_read
        if len(tensors_read) > 1:
            if _pattern(tensors_read) != self._pattern:
                return None
            distinct = list({id(t): t for t in tensors_read}.values())
        if any(t.__dict__ and any(name in t.__dict__ for name in self._names) for t in distinct):
            return None
        return [distinct[n] for n in self._order]


def guard_of(reads: Reads, names: list[str], tensors: list[Tensor]) -> Guard | None:
    """The guard of a walk, if all that it found can be read again."""
    known = {id(t) for t in reads.tensors}
    return Guard(reads, names, tensors) if reads.guardable and all(id(t) in known for t in tensors) else None


def _holds(value: Any, expected: Expected, tensors_read: list[Tensor]) -> bool:
    """Whether a cell, a global or an attribute has its expected value. A tensor is appended to `tensors_read`."""
    how, what = expected
    if how == "tensor":
        if type(value) not in _PLAIN or value.layout != torch.strided or metadata(value) != what:
            return False
        tensors_read.append(value)
        return True
    if how == "ref":
        return what() is value
    return _same(value, what)


def _same(value: Any, other: Any) -> bool:
    """Whether two values are one object or equal numbers or strings. 0.0 and −0.0 are equal, but their traces differ."""
    return value is other or (type(value) is type(other) and type(value) in _COMPARED and value == other and value != 0)


def _same_defaults(defaults: tuple[Any, ...] | None, others: tuple[Any, ...] | None) -> bool:
    """Whether default arguments are the same values of the same types."""
    return len(defaults or ()) == len(others or ()) and all(map(_same, defaults or (), others or ()))


def _pattern(tensors: list[Tensor]) -> tuple[int, ...]:
    """For each tensor, the number of distinct tensors before its first occurrence."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(t), len(first)) for t in tensors)
