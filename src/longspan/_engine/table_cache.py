"""Caches of what captured tensors determine: block tables of masks, and copies on the device of the queries.

Training calls the same mask over the same captured tensors layer after layer, step after step. Whether a captured tensor was modified since
is decided by comparing contents on the CPU (numpy, `.data` and collectives modify tensors without incrementing torch's version counter; a
million int64 take about a millisecond). On other devices a comparison would synchronize at every call; there the version counter decides.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from longspan._engine.document_tiles import DocumentTiles, tiles_of_sequence
from longspan._kernels.gpu.uploads import note_upload
from longspan._masks.block_table import BlockTable
from longspan._masks.classify import TableShape, classify
from longspan._masks.program import Program
from longspan._masks.static_mask import StaticMask

_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class _Snapshot:
    """A captured tensor as it was when something was derived from it: its version where that can be trusted, a copy of its contents."""

    tensor: weakref.ref[Tensor]
    version: int | None
    contents: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor, *, copy_contents: bool = True, on_delete: Callable[[Any], object] | None = None) -> _Snapshot:
        """copy_contents: copy also where the version can be trusted. on_delete: called when the tensor is deleted."""
        version = _version(tensor)
        contents = _copy(tensor, "cpu") if copy_contents or version is None else None
        return cls(weakref.ref(tensor, on_delete), version, contents)

    def of_equal(self, tensor: Tensor) -> _Snapshot:
        """A snapshot of another tensor with the same contents."""
        return _Snapshot(weakref.ref(tensor), _version(tensor), self.contents)

    def is_current(self, tensor: Tensor | None) -> bool:
        """Whether this is the same tensor and, by its version, unmodified."""
        return tensor is not None and self.tensor() is tensor and self.version is not None and _version(tensor) == self.version

    def equals(self, host_copy: Tensor) -> bool:
        """Whether the contents are the same bits."""
        return self.contents is not None and _same_bits(host_copy, self.contents)


class MaskTables:
    """The block tables of one mask, for given contents of its captured tensors: one per tile size."""

    def __init__(self, program: Program | None, q_len: int, kv_len: int, *, batch: int, heads: int) -> None:
        self._program, self._lengths, self._batch, self._heads = program, (q_len, kv_len), batch, heads
        self._tables: dict[tuple[int, int], BlockTable] = {}
        self._by_document: tuple[DocumentTiles, ...] | None = None

    def at(self, block: tuple[int, int], captured: Sequence[Tensor]) -> BlockTable:
        """The table of a tile size (queries, KV). captured: tensors with the contents that these tables are for."""
        if block not in self._tables:
            q_len, kv_len = self._lengths
            shape = TableShape(q_len=q_len, kv_len=kv_len, block=block, batch=self._batch, heads=self._heads)
            self._tables[block] = classify(self._program, captured, shape)
        return self._tables[block]

    def by_document(self, captured: Sequence[Tensor]) -> tuple[DocumentTiles, ...]:
        """The tiles of `longspan.invariant()`, and their tables. captured: as in `at`."""
        if self._by_document is None:
            self._by_document = tiles_of_sequence(self._program, captured, self._lengths, batch=self._batch, heads=self._heads)
        return self._by_document


class StaticTables:
    """The block tables of a `StaticMask`, for given sizes."""

    def __init__(self, mask: StaticMask, q_len: int, kv_len: int, *, batch: int, heads: int) -> None:
        self._mask, self._lengths, self._batch, self._heads = mask, (q_len, kv_len), batch, heads

    def at(self, block: tuple[int, int], captured: Sequence[Tensor]) -> BlockTable:
        """The table of a tile size (queries, KV)."""
        return self._mask.static_table(*self._lengths, block, batch=self._batch, heads=self._heads)

    def by_document(self, captured: Sequence[Tensor]) -> tuple[DocumentTiles, ...]:
        raise ValueError("longspan.invariant() does not support StaticMask; use the mask that it was made from")


@dataclass(frozen=True, eq=False)
class _CachedTables:
    snapshots: list[_Snapshot]
    tables: MaskTables

    def is_current(self, captured: Sequence[Tensor]) -> bool:
        return all(s.is_current(t) for s, t in zip(self.snapshots, captured, strict=True))

    def equals(self, captured: Sequence[Tensor], host_copies: dict[int, Tensor]) -> bool:
        """Whether the captured tensors have the same contents. host_copies: CPU tensors by index, added to where needed."""
        for i, (snapshot, tensor) in enumerate(zip(self.snapshots, captured, strict=True)):
            if snapshot.is_current(tensor):
                continue
            if i not in host_copies:
                host_copies[i] = tensor.cpu()
            if not snapshot.equals(host_copies[i]):
                return False
        return True


class TableCache:
    """Block tables by mask program, sizes and contents of captured tensors.

    Holds at most `size` (program, sizes) keys, least recently used dropped first, and at most `contents_per_key` contents of each.
    """

    def __init__(self, size: int = 32, contents_per_key: int = 8) -> None:
        self._size, self._contents_per_key = size, contents_per_key
        self._lock = Lock()
        self._entries: OrderedDict[Hashable, list[_CachedTables]] = OrderedDict()

    def tables(
        self, program: Program | None, captured: Sequence[Tensor], q_len: int, kv_len: int, *, batch: int, heads: int
    ) -> MaskTables:  # fmt: skip
        """The tables of a mask over the present contents of its captured tensors."""
        batch = batch if program is not None and program.uses_batch else 1
        heads = heads if program is not None and program.uses_head else 1
        key = (None if program is None else program.key, q_len, kv_len, batch, heads)
        with self._lock:
            entries = self._entries.get(key, [])
            if entries:
                self._entries.move_to_end(key)
        for entry in entries:
            if entry.is_current(captured):
                return entry.tables
        host_copies: dict[int, Tensor] = {}
        for entry in entries:
            if entry.equals(captured, host_copies):
                # Equal contents in other tensors. Snapshots of these make the next call cheap where versions can be trusted.
                fresh = [s if s.is_current(t) else s.of_equal(t) for s, t in zip(entry.snapshots, captured, strict=True)]
                others = [e for e in entries if e.tables is not entry.tables or all(s.is_current(s.tensor()) for s in e.snapshots)]
                self._store(key, [_CachedTables(fresh, entry.tables), *others])
                return entry.tables
        # Snapshots come before the tables: what another thread writes in between must not count as part of the tables.
        entry = _CachedTables([_Snapshot.of(t) for t in captured], MaskTables(program, q_len, kv_len, batch=batch, heads=heads))
        self._store(key, [entry, *entries])
        return entry.tables

    def _store(self, key: Hashable, entries: list[_CachedTables]) -> None:
        with self._lock:
            self._entries[key] = entries[: self._contents_per_key]
            self._entries.move_to_end(key)
            if len(self._entries) > self._size:
                self._entries.popitem(last=False)


@dataclass(eq=False)
class DeviceCopies:
    """Copies of captured tensors on the device of the queries, one per tensor and contents. At most `size`, oldest dropped first.

    A tensor made in inference mode is copied for calls outside of it, also on the same device: autograd cannot save such a tensor.
    """

    size: int = 256
    _copies: dict[int, tuple[_Snapshot, Tensor]] = field(default_factory=dict)

    def on(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The tensor itself where it can be used, else its copy."""
        if tensor.device == device and (not tensor.is_inference() or torch.is_inference_mode_enabled()):
            return tensor
        key = id(tensor)
        cached = self._copies.get(key)
        if cached is not None:
            snapshot, copy = cached
            is_copy_of_tensor = snapshot.tensor() is tensor and copy.device == device
            if is_copy_of_tensor and (snapshot.is_current(tensor) or snapshot.equals(tensor.cpu())):
                return copy
        copy = _copy(tensor, device)
        note_upload(copy)
        if len(self._copies) >= self.size:
            self._copies.pop(next(iter(self._copies)))
        self._copies[key] = _Snapshot.of(tensor, copy_contents=False, on_delete=lambda _: self._copies.pop(key, None)), copy
        return copy


def _version(tensor: Tensor) -> int | None:
    """torch's version counter of a tensor, None where it cannot be trusted."""
    return None if tensor.is_inference() or tensor.device.type == "cpu" else tensor._version


def _copy(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A copy outside of inference mode, so that it can be used in training too."""
    with torch.inference_mode(False), torch.no_grad():
        return tensor.to(device, copy=True)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits: NaN equals NaN, and 0.0 does not equal −0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.is_floating_point:
        int_dtype = _INT_OF_SIZE[a.dtype.itemsize]
        a, b = a.view(int_dtype), b.view(int_dtype)
    return torch.equal(a, b)
