"""The Ulysses transpose: before it, a rank holds some tokens of all heads; after it, all tokens of its group, of some heads.

Legend: U ranks of the group, L[u] tokens of rank u (queries or KV), L = Σ L[u], S = L[this rank]; H query heads, G KV heads. A rank
computes h = H/U and g = G/U, or g = 1 where G < U: then several ranks receive the same KV head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from longspan._comm.group import Group
from longspan._plan.strategies import ulysses_error


@dataclass(frozen=True, kw_only=True)
class UlyssesTranspose:
    """The transpose of one group, for given numbers of heads. `lengths`, `kv_lengths`: L of queries and of KV."""

    group: Group
    lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    heads: int
    kv_heads: int

    def __post_init__(self) -> None:
        reason = ulysses_error(self.group.size, self.heads, self.kv_heads)
        if reason:
            advice = "Use 'exchange' or 'ring' over a mesh of one axis, or a mesh with another Ulysses degree"
            raise ValueError(f"strategy 'ulysses': {reason}. {advice}")

    @property
    def local_heads(self) -> range:
        """Query heads that this rank computes."""
        return self._heads(self.group.rank)

    @property
    def partial_kv_sums(self) -> bool:
        """Whether several ranks compute a part of the gradient of one KV head."""
        return self.kv_heads < self.group.size

    def gathered_shapes(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """Tensors of the shapes that `gather_all` gives for q, k and v, without memory or contents."""
        heads, kv_heads = len(self._heads(0)), len(self._kv_heads(0))
        sizes = (heads, sum(self.lengths)), (kv_heads, sum(self.kv_lengths)), (kv_heads, sum(self.kv_lengths))
        return [t.new_empty((1,)).expand(t.shape[0], n, tokens, t.shape[3]) for t, (n, tokens) in zip((q, k, v), sizes, strict=True)]

    def _heads(self, rank: int) -> range:
        n = self.heads // self.group.size
        return range(rank * n, (rank + 1) * n)

    def _kv_heads(self, rank: int) -> range:
        shared = self.heads // self.kv_heads
        heads = self._heads(rank)
        return range(heads.start // shared, (heads.stop - 1) // shared + 1)

    def _range(self, tensor_heads: int, rank: int) -> range:
        return self._heads(rank) if tensor_heads == self.heads else self._kv_heads(rank)

    def gather_all(self, queries: Sequence[Tensor], kv: Sequence[Tensor], *, what: str) -> list[Tensor]:
        """`gather` of tensors by queries and of tensors by KV: one all-to-all where both have the same lengths, else two."""
        if self.lengths == self.kv_lengths:
            return self.gather([*queries, *kv], self.lengths, what=what)
        return [*self.gather(queries, self.lengths, what=what), *self.gather(kv, self.kv_lengths, what=f"{what} (KV)")]

    def gather(self, tensors: Sequence[Tensor], lengths: Sequence[int], *, what: str) -> list[Tensor]:
        """[B, H or G, S, D] each → [B, h or g, L, D] each, in one all-to-all. All of one dtype; the results are views of one buffer."""
        size, batch, length = self.group.size, tensors[0].shape[0], tensors[0].shape[2]
        kinds = [t.shape[1] if t.shape[1] == self.heads else self.kv_heads for t in tensors]
        counts = [len(self._range(kind, 0)) for kind in kinds]
        widths = [n * t.shape[3] for n, t in zip(counts, tensors, strict=True)]
        sent = tensors[0].new_empty((size, length, batch, sum(widths)))
        for t, kind, place in zip(tensors, kinds, _column_slices(widths), strict=True):
            for rank in range(size):
                heads = self._range(kind, rank)
                part = t[:, heads.start : heads.stop].permute(2, 0, 1, 3)
                sent[rank, :, :, place].unflatten(-1, part.shape[2:]).copy_(part)
        out = sent.new_empty((sum(lengths), batch, sum(widths)))
        sent = sent.view(size * length, batch, sum(widths))
        self.group.all_to_all(out, sent, lengths, [length] * size, what=what).wait()
        columns = zip(tensors, counts, _column_slices(widths), strict=True)
        return [out[..., place].unflatten(-1, (count, t.shape[3])).permute(1, 2, 0, 3) for t, count, place in columns]

    def scatter(self, tensors: Sequence[Tensor], *, what: str) -> list[Tensor]:
        """[B, h, L, D] each → [B, H, S, D] each: the inverse of `gather`, for query heads. All of one dtype."""
        size, batch = self.group.size, tensors[0].shape[0]
        widths = [t.shape[1] * t.shape[3] for t in tensors]
        out = self._return(tensors, widths, self.lengths, what=what)
        results = []
        for t, place in zip(tensors, _column_slices(widths), strict=True):
            part = out[..., place].unflatten(-1, (t.shape[1], t.shape[3]))  # [U, S, B, h, D]
            results.append(part.permute(2, 0, 3, 1, 4).reshape(batch, size * t.shape[1], out.shape[1], t.shape[3]))
        return results

    def scatter_sum(self, tensors: Sequence[Tensor], *, what: str) -> list[Tensor]:
        """[B, g, L, D] each → [B, G, S, D] each: the adjoint of `gather`, for KV heads.

        Parts of a head are summed in rank order, in float32 or wider.
        """
        widths = [t.shape[1] * t.shape[3] for t in tensors]
        out = self._return(tensors, widths, self.kv_lengths, what=what)
        results = []
        for t, place in zip(tensors, _column_slices(widths), strict=True):
            part = out[..., place].unflatten(-1, (t.shape[1], t.shape[3])).permute(0, 2, 3, 1, 4)  # [U, B, g, S, D]
            total = part.new_zeros((t.shape[0], self.kv_heads, out.shape[1], t.shape[3]), dtype=torch.promote_types(t.dtype, torch.float32))
            for rank in range(self.group.size):
                heads = self._kv_heads(rank)
                total[:, heads.start : heads.stop] += part[rank]
            results.append(total)
        return results

    def _return(self, tensors: Sequence[Tensor], widths: Sequence[int], lengths: Sequence[int], *, what: str) -> Tensor:
        """Send each rank its tokens; the parts that this rank receives [U, S, B, Σ widths]."""
        size, batch, length = self.group.size, tensors[0].shape[0], lengths[self.group.rank]
        sent = tensors[0].new_empty((sum(lengths), batch, sum(widths)))
        for t, place in zip(tensors, _column_slices(widths), strict=True):
            sent[..., place].unflatten(-1, (t.shape[1], t.shape[3])).copy_(t.permute(2, 0, 1, 3))
        out = sent.new_empty((size * length, batch, sum(widths)))
        self.group.all_to_all(out, sent, [length] * size, lengths, what=what).wait()
        return out.view(size, length, batch, sum(widths))


def _column_slices(widths: Sequence[int]) -> list[slice]:
    """The columns of tensors that lie side by side."""
    ends = list(accumulate(widths))
    return [slice(end - width, end) for end, width in zip(ends, widths, strict=True)]
