"""Keys of masks by their contents: equal masks have equal keys on every rank, in whatever tensors they are stored.

The dispatcher caches plans by these keys. The identity of a mask object would not do. A mask may be written to between calls, and a rank
that holds an equal mask in another tensor must not plan, and communicate, alone.

A tensor's digest is cached. A CPU tensor, and an inference tensor, is compared with a copy at each use: writes through shared memory,
`.data` or a collective do not change `tensor._version`. For other tensors the version, dtype, shape and address decide.
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

MAX_BLOCK_MASKS = 64
MAX_TENSORS = 256


@dataclass(frozen=True, kw_only=True)
class MaskRequest:
    """The mask of one call.

    key:       of its contents.
    per_batch: whether the mask depends on the batch row.
    per_head:  whether the mask depends on the head.
    make:      returns the mask, for a plan that is not cached yet.
    """

    key: Hashable
    per_batch: bool = False
    per_head: bool = False
    make: Callable[[], Mask]


@dataclass(frozen=True, kw_only=True)
class _CachedDigest:
    """A tensor's digest, with the values by which a change is noticed: a copy if torch does not count writes, else the stamp."""

    ref: weakref.ref[Tensor]
    stamp: Hashable
    copy: Tensor | None
    digest: str

    def is_current(self, tensor: Tensor) -> bool:
        if self.ref() is not tensor or self.stamp != _stamp(tensor):
            return False
        return self.copy is None or torch.equal(self.copy, tensor)


def _stamp(tensor: Tensor) -> Hashable:
    version = None if tensor.is_inference() else tensor._version
    return version, tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride(), tensor.data_ptr()


class MaskKeys:
    """Keys of the masks and digests of the tensors of one dispatcher.

    Bounded: digests of the last MAX_TENSORS tensors and block lists of the last MAX_BLOCK_MASKS BlockMasks.
    """

    def __init__(self) -> None:
        self._digests: dict[int, _CachedDigest] = {}
        self._block_masks: dict[int, tuple[BlockMask, Hashable, Mask]] = {}

    def digest(self, tensor: Tensor) -> str:
        """Digest of a tensor's dtype, shape and contents."""
        number = id(tensor)
        cached = self._digests.get(number)
        if cached is not None and cached.is_current(tensor):
            return cached.digest
        digest = digest_of([tensor])
        compared = tensor.is_cpu or tensor.is_inference()
        if compared and (tensor.is_floating_point() or tensor.is_complex()):
            return digest  # equal values may have different bytes: 0.0 and -0.0
        contents = tensor.clone() if compared else None
        ref = weakref.ref(tensor, lambda _: self._digests.pop(number, None))
        _drop_oldest(self._digests, MAX_TENSORS)
        self._digests[number] = _CachedDigest(ref=ref, stamp=_stamp(tensor), copy=contents, digest=digest)
        return digest

    def request(self, value: Any) -> MaskRequest:
        """The request for a mask, a BlockMask or a mask_mod, with its contents at this moment."""
        mask = self._of_block_mask(value) if isinstance(value, BlockMask) else as_mask(value)
        if isinstance(mask, Full | Causal):
            return MaskRequest(key=type(mask).__name__, make=lambda: mask)
        traced = mask.traced
        preamble = "" if traced.preamble is None else canonical_text(traced.preamble.graph)
        key = (traced.program.key, preamble, tuple(self.digest(t) for t in traced.sources), mask.extent)
        return MaskRequest(key=key, per_batch=traced.program.uses_batch, per_head=traced.program.uses_head, make=lambda: mask)

    def _of_block_mask(self, block_mask: BlockMask) -> Mask:
        """The BlockMask as an untraced mask: its mask_mod may read Python values, so each call traces it again.

        The block lists are read again if one of them, or another attribute, changed.
        """
        lists = (block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
        digests = tuple(None if t is None else self.digest(t) for t in lists)
        key = (tuple(block_mask.BLOCK_SIZE), tuple(block_mask.seq_lengths), block_mask.mask_mod, digests)
        cached = self._block_masks.get(id(block_mask))
        if cached is None or cached[1] != key:
            _drop_oldest(self._block_masks, MAX_BLOCK_MASKS)
            cached = self._block_masks[id(block_mask)] = block_mask, key, as_mask(block_mask)  # holds the BlockMask: its id stays its own
        return copy.copy(cached[2])


def _drop_oldest(cache: dict[Any, Any], limit: int) -> None:
    while len(cache) >= limit:
        cache.pop(next(iter(cache)), None)
