"""The Ulysses transpose: ranks of one group hold some tokens of all heads; after it, all the group's tokens of some heads.

Legend: U ranks of the group, L[u] their tokens (of queries or of keys), L = Σ L[u], S = L[this rank]; H query heads, G key heads, h = H/U
and g of them per rank, g = G/U or 1. Where several ranks need the same key head, each gets it once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan._comm.group import Group
from longspan._plan.strategies import ulysses_error


@dataclass(frozen=True, kw_only=True)
class Transpose:
    """One group's transpose, for some number of heads."""

    group: Group
    lengths: tuple[int, ...]  # of queries
    kv_lengths: tuple[int, ...]
    heads: int
    kv_heads: int

    def __post_init__(self) -> None:
        reason = ulysses_error(self.group.size, self.heads, self.kv_heads)
        if reason:
            raise ValueError(f"strategy 'ulysses': {reason}. Use 'exchange' or 'ring', or a mesh with another Ulysses degree")

    @property
    def own(self) -> range:
        """Query heads that this rank computes."""
        return self._heads(self.group.rank)

    @property
    def counts(self) -> tuple[int, int]:
        """Query and key heads that each rank computes with."""
        return len(self._heads(0)), len(self._kv_heads(0))

    def _heads(self, rank: int) -> range:
        n = self.heads // self.group.size
        return range(rank * n, (rank + 1) * n)

    def _kv_heads(self, rank: int) -> range:
        shared = self.heads // self.kv_heads
        heads = self._heads(rank)
        return range(heads.start // shared, (heads.stop - 1) // shared + 1)

    def _range(self, tensor_heads: int, rank: int) -> range:
        return self._heads(rank) if tensor_heads == self.heads else self._kv_heads(rank)

    def gather_all(self, queries: Sequence[Tensor], keys: Sequence[Tensor], *, what: str) -> list[Tensor]:
        """Tensors by queries and tensors by keys, in one exchange where both are laid out alike, else in two."""
        if self.lengths == self.kv_lengths:
            return self.gather([*queries, *keys], self.lengths, what=what)
        return [*self.gather(queries, self.lengths, what=what), *self.gather(keys, self.kv_lengths, what=f"{what} (keys)")]

    def gather(self, tensors: Sequence[Tensor], lengths: Sequence[int], *, what: str) -> list[Tensor]:
        """[B, H or G, S, D] each → [B, h or g, L, D] each, in one exchange. All of one dtype; views of one buffer."""
        size, batch, length = self.group.size, tensors[0].shape[0], tensors[0].shape[2]
        kinds = [t.shape[1] if t.shape[1] == self.heads else self.kv_heads for t in tensors]
        counts = [len(self._range(kind, 0)) for kind in kinds]
        widths = [n * t.shape[3] for n, t in zip(counts, tensors, strict=True)]
        sent = tensors[0].new_empty((size, length, batch, sum(widths)))
        for t, kind, place in zip(tensors, kinds, _stretches(widths), strict=True):
            for rank in range(size):
                heads = self._range(kind, rank)
                part = t[:, heads.start : heads.stop].permute(2, 0, 1, 3)
                sent[rank, :, :, place].unflatten(-1, part.shape[2:]).copy_(part)
        out = sent.new_empty((sum(lengths), batch, sum(widths)))
        sent = sent.view(size * length, batch, sum(widths))
        self.group.all_to_all(out, sent, lengths, [length] * size, what=what).wait()
        found = []
        for t, count, place in zip(tensors, counts, _stretches(widths), strict=True):
            found.append(out[..., place].unflatten(-1, (count, t.shape[3])).permute(1, 2, 0, 3))
        return found

    def scatter(self, tensors: Sequence[Tensor], *, what: str) -> list[Tensor]:
        """[B, h, L, D] each → [B, H, S, D] each: the way back, for query heads. All of one dtype."""
        size, batch = self.group.size, tensors[0].shape[0]
        widths = [t.shape[1] * t.shape[3] for t in tensors]
        out = self._home(tensors, widths, self.lengths, what=what)
        found = []
        for t, place in zip(tensors, _stretches(widths), strict=True):
            part = out[..., place].unflatten(-1, (t.shape[1], t.shape[3]))  # [U, S, B, h, D]
            found.append(part.permute(2, 0, 3, 1, 4).reshape(batch, size * t.shape[1], out.shape[1], t.shape[3]))
        return found

    def scatter_sum(self, tensors: Sequence[Tensor], *, what: str) -> list[Tensor]:
        """[B, g, L, D] each → [B, G, S, D] each: the way back for key heads; parts of one head are summed in the order of ranks."""
        widths = [t.shape[1] * t.shape[3] for t in tensors]
        out = self._home(tensors, widths, self.kv_lengths, what=what)
        found = []
        for t, place in zip(tensors, _stretches(widths), strict=True):
            part = out[..., place].unflatten(-1, (t.shape[1], t.shape[3])).permute(0, 2, 3, 1, 4)  # [U, B, g, S, D]
            total = part.new_zeros((t.shape[0], self.kv_heads, out.shape[1], t.shape[3]), dtype=torch.promote_types(t.dtype, torch.float32))
            for rank in range(self.group.size):
                heads = self._kv_heads(rank)
                total[:, heads.start : heads.stop] += part[rank]
            found.append(total)
        return found

    def _home(self, tensors: Sequence[Tensor], widths: Sequence[int], lengths: Sequence[int], *, what: str) -> Tensor:
        """Each rank's tokens to it: [U, S, B, Σ widths]."""
        size, batch, length = self.group.size, tensors[0].shape[0], lengths[self.group.rank]
        sent = tensors[0].new_empty((sum(lengths), batch, sum(widths)))
        for t, place in zip(tensors, _stretches(widths), strict=True):
            sent[..., place].unflatten(-1, (t.shape[1], t.shape[3])).copy_(t.permute(2, 0, 1, 3))
        out = sent.new_empty((size * length, batch, sum(widths)))
        self.group.all_to_all(out, sent, [length] * size, lengths, what=what).wait()
        return out.view(size, length, batch, sum(widths))


def _stretches(widths: Sequence[int]) -> list[slice]:
    found, at = [], 0
    for width in widths:
        found.append(slice(at, at + width))
        at += width
    return found
