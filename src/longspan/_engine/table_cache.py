"""Block tables, kept: training calls the same mask over the same captured tensors layer after layer, step after step.

Whether a tensor was written to since: on the CPU its contents are compared, since numpy, `.data` and collectives write without torch
counting it (a million int64 take about a millisecond). On other devices that would wait for the device at every call; there torch's count
of writes is believed.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from longspan._masks.block_table import BlockTable
from longspan._masks.classify import classify
from longspan._masks.program import Program


def _version(tensor: Tensor) -> int | None:
    """torch's count of writes to a tensor, None where it says nothing."""
    return None if tensor.is_inference() or tensor.device.type == "cpu" else tensor._version


def _copied(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A copy that serves training too, also where it is made in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        return tensor.detach().to(device, copy=True)


def _same_contents(a: Tensor, b: Tensor) -> bool:
    """Bit for bit: nan is nan, and 0.0 is not −0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.is_floating_point:
        bits = _BITS[a.dtype.itemsize]
        a, b = a.view(bits), b.view(bits)
    return torch.equal(a, b)


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class _Snapshot:
    """A captured tensor as it was when something was made from it."""

    tensor: weakref.ref[Tensor]
    version: int | None
    copy: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor, *, on_cpu: bool = True, gone: Callable[[Any], object] | None = None) -> _Snapshot:
        """`on_cpu`: keep a copy also where a tensor of another device has a count of writes. `gone`: called when the tensor is."""
        version = _version(tensor)
        return cls(weakref.ref(tensor, gone), version, _copied(tensor, "cpu") if on_cpu or version is None else None)

    def seen_in(self, tensor: Tensor) -> _Snapshot:
        """The same contents, now in another tensor."""
        return _Snapshot(weakref.ref(tensor), _version(tensor), self.copy)

    def is_same(self, tensor: Tensor) -> bool:
        """The same tensor, not written to since, as far as torch's count tells."""
        return self.tensor() is tensor and self.version is not None and _version(tensor) == self.version

    def is_known(self) -> bool:
        """Whether there is a tensor that `is_same`."""
        tensor = self.tensor()
        return tensor is not None and self.is_same(tensor)

    def holds(self, host: Tensor) -> bool:
        """The same contents."""
        return self.copy is not None and _same_contents(host, self.copy)


def _unchanged(snapshots: Sequence[_Snapshot], captured: Sequence[Tensor], host: dict[int, Tensor]) -> bool:
    """Whether captured tensors are what they were. `host` keeps the copies that had to be made to tell."""
    for i, (snapshot, tensor) in enumerate(zip(snapshots, captured, strict=True)):
        if snapshot.is_same(tensor):
            continue
        if i not in host:
            host[i] = tensor.detach().cpu()
        if not snapshot.holds(host[i]):
            return False
    return True


class DeviceCopies:
    """Copies of captured tensors on the device of the queries, made once per tensor and contents.

    A tensor made in inference mode is copied for calls outside of it, even where it lies on their device: autograd keeps no such tensor.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[_Snapshot, Tensor]] = {}

    def on(self, tensor: Tensor, device: torch.device) -> Tensor:
        if tensor.device == device and (not tensor.is_inference() or torch.is_inference_mode_enabled()):
            return tensor
        key = id(tensor)
        if key in self._copies:
            snapshot, copy = self._copies[key]
            alive = snapshot.tensor() is tensor and copy.device == device
            if alive and (snapshot.is_same(tensor) or snapshot.holds(tensor.detach().cpu())):
                return copy
        copy = _copied(tensor, device)
        self._copies[key] = _Snapshot.of(tensor, on_cpu=False, gone=lambda _: self._copies.pop(key, None)), copy
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
            if all(s.is_same(t) for s, t in zip(snapshots, captured, strict=True)):
                return table
        host: dict[int, Tensor] = {}
        for snapshots, table in found:
            if _unchanged(snapshots, captured, host):
                # Equal contents in other tensors: on other devices than the CPU, the next call need not look at these or at those.
                fresh = [s if s.is_same(t) else s.seen_in(t) for s, t in zip(snapshots, captured, strict=True)]
                others = [e for e in found if e[1] is not table or all(s.is_known() for s in e[0])]
                with self._lock:
                    self._entries[key] = [(fresh, table), *others][:8]
                return table
        snapshots = [_Snapshot.of(t) for t in captured]  # before they are read: what another thread writes meanwhile is not of this table
        table = classify(program, captured, q_len, kv_len, block=block, batch=batch, heads=heads)
        with self._lock:
            self._entries[key] = [(snapshots, table), *found][:8]
            self._entries.move_to_end(key)
            if len(self._entries) > self._size:
                self._entries.popitem(last=False)
        return table
