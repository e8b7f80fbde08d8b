"""What masks and tensors hold, as keys: equal where the contents are, in whatever tensor they lie, and so the same on every rank.

Plans are found by these keys. An object's identity says too little, since it may have been written to, and too much: the same mask in
another tensor on one rank would make that rank alone plan, and talk to the others about it.

A digest is computed once per tensor, and again when the tensor changed. On the CPU, and where torch keeps no version (inference tensors),
contents are compared at each use: writes through shared memory, `.data` or a collective leave no trace. On other devices the version
decides.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from longspan._masks.algebra import Causal, Full, Mask, as_mask
from longspan._masks.program import canonical_text
from longspan._plan.digest import digest_of

KEPT = 64  # block masks


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The mask of a call: its key, whether batch row or head matter to it, and the mask itself, for a plan that is not there yet."""

    key: Hashable
    per_batch: bool = False
    per_head: bool = False
    make: Callable[[], Mask]


@dataclass(frozen=True, kw_only=True)
class _Known:
    """A tensor as it was. `copy`: what it held; else `stamp` tells."""

    ref: weakref.ref[Tensor]
    stamp: Hashable
    copy: Tensor | None
    digest: str

    def holds(self, tensor: Tensor) -> bool:
        if self.ref() is not tensor or self.stamp != _stamp(tensor):
            return False
        return self.copy is None or torch.equal(self.copy, tensor)


def _stamp(tensor: Tensor) -> Hashable:
    version = None if tensor.is_inference() else tensor._version
    return version, tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride(), tensor.data_ptr()


class Contents:
    """Keys of masks, and digests of tensors, with what is needed to notice that they changed."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._listed: dict[int, tuple[BlockMask, Hashable, Any, Mask]] = {}
        self._preambles: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def digest(self, tensor: Tensor) -> str:
        """Of dtype, shape and contents."""
        number = id(tensor)
        known = self._known.get(number)
        if known is not None and known.holds(tensor):
            return known.digest
        found = digest_of([tensor])
        compared = tensor.is_cpu or tensor.is_inference()
        if compared and (tensor.is_floating_point() or tensor.is_complex()):
            return found  # what compares equal may differ in its bytes, such as -0.0
        copied = tensor.detach().clone() if compared else None
        ref = weakref.ref(tensor, lambda _: self._known.pop(number, None))
        self._known[number] = _Known(ref=ref, stamp=_stamp(tensor), copy=copied, digest=found)
        return found

    def asked(self, value: Any) -> Asked:
        """What a user passed for a mask, as it is now: a mask, a BlockMask or a mask_mod."""
        mask = self._of_block_mask(value) if isinstance(value, BlockMask) else as_mask(value)
        if isinstance(mask, Full | Causal):
            return Asked(key=type(mask).__name__, make=lambda: mask)
        traced = mask.traced
        if traced.preamble is not None and traced.preamble not in self._preambles:
            self._preambles[traced.preamble] = canonical_text(traced.preamble.graph)
        computed = "" if traced.preamble is None else self._preambles[traced.preamble]
        key = (traced.program.key, computed, tuple(self.digest(t) for t in traced.sources), mask.extent)
        return Asked(key=key, per_batch=traced.program.uses_batch, per_head=traced.program.uses_head, make=lambda: mask)

    def _of_block_mask(self, given: BlockMask) -> Mask:
        """The lists are read again where they changed; the mask_mod is traced anew, as it may read what is no tensor."""
        lists = (given.kv_num_blocks, given.kv_indices, given.full_kv_num_blocks, given.full_kv_indices)
        key = (tuple(given.BLOCK_SIZE), tuple(given.seq_lengths), tuple(None if t is None else self.digest(t) for t in lists))
        kept = self._listed.get(id(given))
        if kept is None or kept[0] is not given or kept[1] != key or kept[2] is not given.mask_mod:
            while len(self._listed) >= KEPT:
                self._listed.pop(next(iter(self._listed)))
            kept = self._listed[id(given)] = given, key, given.mask_mod, as_mask(given)
        return copy.copy(kept[3])  # without its trace
