"""Traces of mods, kept: tracing costs milliseconds, and eager training calls the same mod thousands of times.

A trace may be reused only if nothing that the mod could read has changed (see `longspan._masks.reads`). Tensors enter the key by dtype,
shape and strides alone, and the program is bound to the tensors of the present call, so a closure made anew in every step hits. A mod
that reads what is not understood is traced at every call, which is slow but never stale.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from threading import Lock
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from longspan._masks.program import Kind
from longspan._masks.reads import reads
from longspan._masks.tracing import Traced, trace


class TraceCache:
    """A bounded memo of `trace`; what it returns is what `trace` would return now."""

    def __init__(self, size: int = 256) -> None:
        self._size = size
        self._entries: OrderedDict[Hashable, tuple[Traced, tuple[int, ...]]] = OrderedDict()
        self.hits = 0
        self._lock = Lock()

    def trace(self, fn: Callable[..., Any], kind: Kind, *, score_dtype: torch.dtype, name: str | None = None) -> Traced:
        try:
            described, tensors = reads(fn)
            # `torch.tensor(2.0)` and `i / j` of a mod have the default dtype; what it makes lies on the default device.
            key = (kind, score_dtype, torch.get_default_dtype(), torch.get_default_device(), described)
            hash(key)
        except Exception:  # `Unknown`, or whatever the user's `__getattr__` raises
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
