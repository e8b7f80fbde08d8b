"""Block tables, kept: training calls the same mask over the same captured tensors layer after layer, step after step."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from longspan.masks.classify import classify
from longspan.masks.program import Program
from longspan.masks.table import BlockTable


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


@dataclass(frozen=True, eq=False)
class _Snapshot:
    """A captured tensor as it was when a table was built."""

    tensor: weakref.ref[Tensor]
    version: int | None
    copy: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> _Snapshot:
        return cls(weakref.ref(tensor), _version(tensor), tensor.detach().to("cpu", copy=True))

    def still_is(self, tensor: Tensor) -> bool:
        if self.tensor() is tensor and self.version is not None and _version(tensor) == self.version:
            return True
        return tensor.shape == self.copy.shape and tensor.dtype == self.copy.dtype and torch.equal(tensor.detach().cpu(), self.copy)


class DeviceCopies:
    """Copies of captured tensors on the device of the queries, made once per tensor and version."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[weakref.ref[Tensor], int | None, Tensor]] = {}

    def on(self, tensor: Tensor, device: torch.device) -> Tensor:
        if tensor.device == device:
            return tensor
        key, version = id(tensor), _version(tensor)
        if key in self._copies:
            source, then, copy = self._copies[key]
            if source() is tensor and version is not None and then == version and copy.device == device:
                return copy
        copy = tensor.detach().to(device)
        self._copies[key] = weakref.ref(tensor, lambda _: self._copies.pop(key, None)), version, copy
        return copy


class TableCache:
    """A bounded memo of `classify`, keyed by what the captured tensors hold, not by where they lie."""

    def __init__(self, size: int = 32) -> None:
        self._size = size
        self._lock = Lock()
        self._entries: OrderedDict[Hashable, list[tuple[list[_Snapshot], BlockTable]]] = OrderedDict()

    def table(
        self,
        program: Program | None,
        captured: Sequence[Tensor],
        q_len: int,
        kv_len: int,
        *,
        block: tuple[int, int],
        batch: int,
        heads: int,
    ) -> BlockTable:
        batch = batch if program is not None and program.uses_batch else 1
        heads = heads if program is not None and program.uses_head else 1
        key = (None if program is None else program.key, q_len, kv_len, block, batch, heads)
        with self._lock:
            found = self._entries.get(key, [])
            if found:
                self._entries.move_to_end(key)
        for snapshots, table in found:
            if all(s.still_is(t) for s, t in zip(snapshots, captured, strict=True)):
                return table
        table = classify(program, captured, q_len, kv_len, block=block, batch=batch, heads=heads)
        with self._lock:
            self._entries[key] = [([_Snapshot.of(t) for t in captured], table), *found][:8]
            self._entries.move_to_end(key)
            if len(self._entries) > self._size:
                self._entries.popitem(last=False)
        return table
