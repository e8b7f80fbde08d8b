"""Bounded cache of traces: tracing costs milliseconds, and eager training calls the same mod thousands of times.

A trace is reused only if nothing that the mod can read has changed (see `longspan._masks.trace_key`). Captured tensors enter the key by
dtype, shape, strides and device alone. A cached program is bound to the tensors of the current call, so a closure that is recreated in
every step hits the cache. A mod without a key, and one that reads the value of a captured tensor in Python, is traced at every call.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from longspan._masks.program import Kind, Program
from longspan._masks.trace_guard import Guard
from longspan._masks.trace_key import TraceKey, Unsure, trace_key
from longspan._masks.tracing import Traced, trace
from longspan._torch_private import foreign_function_modes_are_active, function_modes_are_active


@dataclass(frozen=True)
class _CachedTrace:
    """A cached trace without its tensors.

    `positions`: index of each source tensor among the key's tensors. `alive`: objects whose ids are part of the key.
    """

    traced: Traced
    positions: tuple[int, ...]
    alive: list[Any]


@dataclass(frozen=True)
class _Guarded:
    """A cached trace for mods that pass a guard."""

    guard: Guard
    entry: _CachedTrace

    def sources(self, fn: types.FunctionType) -> list[Tensor] | None:
        """The sources of the trace of a mod; None if it does not pass the guard."""
        tensors = self.guard.tensors(fn)
        return None if tensors is None else [tensors[i] for i in self.entry.positions]


_GUARDS_PER_CODE = 4


class TraceCache:
    """Bounded LRU cache of `trace` results, thread-safe."""

    def __init__(self, size: int = 256) -> None:
        self._size = size
        self._entries: OrderedDict[Hashable, _CachedTrace] = OrderedDict()
        self._guarded: OrderedDict[Hashable, list[_Guarded]] = OrderedDict()  # by the code of the mod
        self._lock = Lock()
        self.hits = 0

    def trace(self, fn: Callable[..., Any], kind: Kind, *, score_dtype: torch.dtype, name: str | None = None) -> Traced:
        """Trace a mod, or reuse the trace of a mod with an equal key."""
        guard_key = _guard_key(fn, kind, score_dtype)
        guarded, sources = self._guarded_trace(fn, guard_key)
        if guarded is not None:
            return replace(guarded.traced, sources=tuple(sources))
        try:
            lookup = _key(fn, kind, score_dtype)
            hash(lookup.key)
        except Exception:  # `Unsure`, or any exception that a user's object raises on attribute access or hashing
            return trace(fn, kind, score_dtype=score_dtype, name=name)
        with self._lock:
            entry = self._entries.get(lookup.key)
            if entry is not None:
                self._entries.move_to_end(lookup.key)
                self.hits += 1
                self._guard(guard_key, lookup, entry)
                return replace(entry.traced, sources=tuple(lookup.tensors[i] for i in entry.positions))
        # The key does not describe a module's forward (hooks, submodules), so a mod that calls modules is not cached.
        called_modules: list[Any] = []
        hook = register_module_forward_pre_hook(lambda module, _: called_modules.append(module))
        try:
            traced = trace(fn, kind, score_dtype=score_dtype, name=name)
        finally:
            hook.remove()
        position = {id(tensor): i for i, tensor in enumerate(lookup.tensors)}
        if not called_modules and not traced.has_read_values and all(id(source) in position for source in traced.sources):
            entry = _CachedTrace(replace(traced, sources=()), tuple(position[id(s)] for s in traced.sources), lookup.alive)
            with self._lock:
                self._entries[lookup.key] = entry
                if len(self._entries) > self._size:
                    self._entries.popitem(last=False)
                self._guard(guard_key, lookup, entry)
        return traced

    def guarded(self, fn: Callable[..., Any], kind: Kind, *, score_dtype: torch.dtype) -> tuple[Program, Sequence[Tensor]] | None:
        """(program, captured tensors) of a mod that passes the guard of a cached trace without a preamble; None for other mods."""
        entry, sources = self._guarded_trace(fn, _guard_key(fn, kind, score_dtype))
        return None if entry is None or entry.traced.preamble is not None else (entry.traced.program, sources)

    def _guarded_trace(self, fn: Any, guard_key: Hashable) -> tuple[_CachedTrace | None, Sequence[Tensor]]:
        """(cached trace, its sources) of a mod that passes a guard."""
        for guarded in self._guarded.get(guard_key, ()) if guard_key is not None else ():
            sources = guarded.sources(fn)
            if sources is not None:
                self.hits += 1
                return guarded.entry, sources
        return None, ()

    def _guard(self, guard_key: Hashable, lookup: TraceKey, entry: _CachedTrace) -> None:
        """Remember the guard of a lookup, with the lock held."""
        if guard_key is None or lookup.guard is None:
            return
        others = [g for g in self._guarded.get(guard_key, ()) if g.entry is not entry]
        self._guarded[guard_key] = [_Guarded(lookup.guard, entry), *others][:_GUARDS_PER_CODE]
        self._guarded.move_to_end(guard_key)
        if len(self._guarded) > self._size:
            self._guarded.popitem(last=False)


def _guard_key(fn: Callable[..., Any], kind: Kind, score_dtype: torch.dtype) -> Hashable:
    """The key of a mod's guards: its code and torch's state; None for mods without guards. The cached trace holds the code alive."""
    if type(fn) is not types.FunctionType or function_modes_are_active():
        return None
    return (
        id(fn.__code__),
        kind,
        score_dtype,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
    )


def _key(fn: Callable[..., Any], kind: Kind, score_dtype: torch.dtype) -> TraceKey:
    """The key of a mod together with the global torch state that its trace depends on; raises `Unsure`."""
    if foreign_function_modes_are_active():
        raise Unsure
    mod_key = trace_key(fn)
    # A mod depends on these settings without naming them: `torch.tensor(2.0)` and `i / j` have the default dtype.
    state = torch.get_default_dtype(), torch.get_default_device(), torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()
    return mod_key._replace(key=(kind, score_dtype, state, mod_key.key))


# Programs are values that hold no tensor: one cache serves masks, plans and operators.
traces = TraceCache()
