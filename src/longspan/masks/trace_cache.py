"""Traces of mods, kept: tracing costs milliseconds, and eager training calls the same mod thousands of times.

A trace may be reused only if nothing that the mod could read has changed. What it can read is found by walking its code: the cells
it closes over, the globals and attributes it names, the functions it calls. Tensors enter the key by shape and dtype alone, and the
program is bound to the tensors of the present call, so a closure made anew in every step hits. Anything the walk does not
understand makes the mod uncacheable: it is then traced at every call, which is slow but never stale.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from longspan.masks.program import Kind
from longspan.masks.tracing import Traced, trace

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type(Ellipsis), range)
_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType)
_FIXED_MODULES = frozenset({"torch", "math", "builtins", "operator", "functools", "typing", "longspan"})
_DYNAMIC_NAMES = frozenset({"getattr", "eval", "exec", "globals", "locals", "vars", "__dict__", "__import__"})


class _Unknown(Exception):
    """The mod reads something whose changes could not be noticed."""


class _Walk:
    """Collects what a callable can read: a hashable description, and the tensors in the order met.

    `names` are those that any code reached so far uses: an object is described by its attributes of these names, since
    code can read no others.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self.met: set[str] = set()
        self.tensors: list[Tensor] = []
        self._seen: dict[int, int] = {}

    def value(self, value: Any) -> Hashable:
        if isinstance(value, _PLAIN):
            return type(value), repr(value) if isinstance(value, float) else value
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, _BUILTIN) or _is_fixed(value):
            return "object", value
        if id(value) in self._seen:
            return "seen", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        if isinstance(value, tuple | list):
            return type(value), tuple(self.value(v) for v in value)
        if isinstance(value, dict):
            return dict, tuple((self.value(k), self.value(v)) for k, v in value.items())
        if isinstance(value, functools.partial):
            return "partial", self.value(value.func), self.value(value.args), self.value(value.keywords)
        if isinstance(value, types.MethodType):
            return "method", self.value(value.__func__), self.value(value.__self__)
        if isinstance(value, types.FunctionType):
            return self.function(value)
        return self.instance(value)

    def tensor(self, tensor: Tensor) -> Hashable:
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise _Unknown
        position = next((i for i, t in enumerate(self.tensors) if t is tensor), len(self.tensors))
        if position == len(self.tensors):
            self.tensors.append(tensor)
        return "tensor", position, tensor.dtype, tuple(tensor.shape), tensor.device

    def instance(self, value: Any) -> Hashable:
        """An object, a class or a module: the attributes that code could name, and what calling it could read."""
        passive = isinstance(value, type | types.ModuleType | torch.nn.Module) or not callable(value)
        call = None if passive else type(value).__call__
        called = self.function(call) if isinstance(call, types.FunctionType) else None
        found = []
        for name in sorted(self.names):
            if isinstance(getattr(type(value), name, None), property | functools.cached_property):
                raise _Unknown
            if hasattr(value, name):
                found.append((name, self.value(getattr(value, name))))
        return value if isinstance(value, type | types.ModuleType) else type(value), tuple(found), called

    def function(self, fn: types.FunctionType) -> Hashable:
        names = _names(fn.__code__)
        if names & _DYNAMIC_NAMES:
            raise _Unknown
        self.met |= names
        try:
            cells = tuple(self.value(c.cell_contents) for c in fn.__closure__ or ())
        except ValueError as empty_cell:
            raise _Unknown from empty_cell
        read = tuple((n, self.value(fn.__globals__[n])) for n in sorted(names) if n in fn.__globals__)
        return fn.__code__, cells, read, self.value((fn.__defaults__, fn.__kwdefaults__))


def _is_fixed(value: Any) -> bool:
    """Functions, classes and modules of libraries: taken as they are."""
    if isinstance(value, types.ModuleType):
        return value.__name__.split(".")[0] in _FIXED_MODULES
    named = isinstance(value, types.FunctionType | type) or type(value).__module__.split(".")[0] == "torch"
    return named and not isinstance(value, torch.nn.Module) and str(getattr(value, "__module__", "")).split(".")[0] in _FIXED_MODULES


def _names(code: types.CodeType) -> frozenset[str]:
    inner = [_names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def _describe(fn: Callable[..., Any]) -> tuple[Hashable, list[Tensor]]:
    names: frozenset[str] = frozenset()
    while True:
        walk = _Walk(names)
        described = walk.value(fn)
        if walk.met <= names:
            return described, walk.tensors
        names |= walk.met


class TraceCache:
    """A bounded memo of `trace`; what it returns is what `trace` would return now."""

    def __init__(self, size: int = 256) -> None:
        self._size = size
        self._entries: OrderedDict[Hashable, tuple[Traced, tuple[int, ...]]] = OrderedDict()
        self.hits = 0
        self._lock = Lock()

    def trace(self, fn: Callable[..., Any], kind: Kind, *, score_dtype: torch.dtype, name: str | None = None) -> Traced:
        try:
            described, tensors = _describe(fn)
            key = (kind, score_dtype, described)
            hash(key)
        except (_Unknown, TypeError, RecursionError):
            return trace(fn, kind, score_dtype=score_dtype, name=name)
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                self.hits += 1
                traced, places = self._entries[key]
                return replace(traced, sources=tuple(tensors[i] for i in places))
        # What a module computes when it is called is beyond the walk: a mod that calls one is not kept.
        modules: list[Any] = []
        hook = register_module_forward_pre_hook(lambda module, _: modules.append(module))
        try:
            traced = trace(fn, kind, score_dtype=score_dtype, name=name)
        finally:
            hook.remove()
        found = [next((i for i, t in enumerate(tensors) if t is source), None) for source in traced.sources]
        if None not in found and not modules:
            with self._lock:
                self._entries[key] = replace(traced, sources=()), tuple(i for i in found if i is not None)
                if len(self._entries) > self._size:
                    self._entries.popitem(last=False)
        return traced


# Programs are values that hold no tensor: one memo serves masks, plans and operators.
traces = TraceCache()
