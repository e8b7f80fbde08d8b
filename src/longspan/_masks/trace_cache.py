"""A bounded cache of traces: tracing costs milliseconds, and eager training calls the same mod thousands of times.

A trace is reused only if nothing that the mod can read has changed (see `longspan._masks.trace_key`). Captured tensors enter the key by
dtype, shape, strides and device alone. The program is bound to the tensors of the present call, so a closure made anew in every step
hits the cache. A mod without a key is traced at every call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from longspan._masks.program import Kind
from longspan._masks.trace_key import TraceKey, Unsure, trace_key
from longspan._masks.tracing import Traced, trace
from longspan._torch_private import foreign_function_modes_are_active


@dataclass(frozen=True)
class _Entry:
    """A trace without its tensors. `positions`: of its sources among the key's tensors. `alive`: objects whose ids are in the key."""

    traced: Traced
    positions: tuple[int, ...]
    alive: list[Any]


class TraceCache:
    """A bounded, least-recently-used cache of `trace`; returns what `trace` would return now."""

    def __init__(self, size: int = 256) -> None:
        self._size = size
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._lock = Lock()
        self.hits = 0

    def trace(self, fn: Callable[..., Any], kind: Kind, *, score_dtype: torch.dtype, name: str | None = None) -> Traced:
        """Trace a mod, or reuse the trace of a mod with an equal key."""
        try:
            found = _key(fn, kind, score_dtype)
            hash(found.key)
        except Exception:  # `Unsure`, or whatever an unusual object raises when it is looked at
            return trace(fn, kind, score_dtype=score_dtype, name=name)
        with self._lock:
            entry = self._entries.get(found.key)
            if entry is not None:
                self._entries.move_to_end(found.key)
                self.hits += 1
                return replace(entry.traced, sources=tuple(found.tensors[i] for i in entry.positions))
        # The key does not describe what a module computes when it is called.
        called_modules: list[Any] = []
        hook = register_module_forward_pre_hook(lambda module, _: called_modules.append(module))
        try:
            traced = trace(fn, kind, score_dtype=score_dtype, name=name)
        finally:
            hook.remove()
        position = {id(tensor): i for i, tensor in enumerate(found.tensors)}
        if not called_modules and all(id(source) in position for source in traced.sources):
            entry = _Entry(replace(traced, sources=()), tuple(position[id(s)] for s in traced.sources), found.alive)
            with self._lock:
                self._entries[found.key] = entry
                if len(self._entries) > self._size:
                    self._entries.popitem(last=False)
        return traced


def _key(fn: Callable[..., Any], kind: Kind, score_dtype: torch.dtype) -> TraceKey:
    if foreign_function_modes_are_active():
        raise Unsure
    key, tensors, alive = trace_key(fn)
    # A mod reads these without naming them: `torch.tensor(2.0)` and `i / j` have the default dtype.
    state = torch.get_default_dtype(), torch.get_default_device(), torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()
    return TraceKey((kind, score_dtype, state, key), tensors, alive)


# Programs are values that hold no tensor: one cache serves masks, plans and operators.
traces = TraceCache()
