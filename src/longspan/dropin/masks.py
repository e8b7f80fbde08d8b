"""What `attn_mask` means across ranks.

Legend: B batch, H heads, Q, K whole lengths, q, k what this rank holds of them.
Accepted, each dim also of size 1: [B, H, Q, K], the whole mask, the same on every rank; [B, H, q, K], this rank's rows of it; and
[B, H, 1, k], for each key that this rank holds whether it is seen (a padding mask that was sharded like the tokens).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.comm.gather import all_gather_rows
from longspan.comm.mesh import Mesh
from longspan.masks.algebra import Mask, mask_mod
from longspan.plan.layout import Layout
from longspan.plan.shards import unshard


@dataclass(frozen=True, kw_only=True)
class Around:
    """The attention that a mask is for."""

    mesh: Mesh
    q: Layout
    kv: Layout
    batch: int
    heads: int

    @property
    def held(self) -> tuple[int, int]:
        return self.q.local_len(self.mesh.rank), self.kv.local_len(self.mesh.rank)


def whole_mask(attn_mask: Any, around: Around) -> Tensor:
    """The mask as [1 or B, 1 or H, 1 or Q or q, 1 or K]; a shard of keys' flags is gathered (a collective call)."""
    if type(attn_mask) is not Tensor:
        raise TypeError(
            f"attn_mask: expected a plain tensor or None, got {type(attn_mask).__name__}; for a causal mask pass is_causal=True"
        )
    if attn_mask.dtype != torch.bool and not attn_mask.dtype.is_floating_point:
        raise TypeError(f"attn_mask: expected bool or floating point, got {attn_mask.dtype}")
    if attn_mask.ndim > 4:
        raise ValueError(f"attn_mask: expected at most 4 dims, got shape {tuple(attn_mask.shape)}")
    mask = attn_mask.reshape((1,) * (4 - attn_mask.ndim) + tuple(attn_mask.shape))
    (q, k), (whole_q, whole_k) = around.held, (around.q.length, around.kv.length)
    batch, heads, rows, columns = mask.shape
    fits = batch in (1, around.batch) and heads in (1, around.heads)
    if fits and rows == 1 and columns == k and columns not in (1, whole_k):
        return unshard(mask, 3, around.kv, around.mesh)
    if fits and rows in (1, q, whole_q) and columns in (1, whole_k):
        return mask
    raise ValueError(
        f"attn_mask: expected a shape that broadcasts to {(around.batch, around.heads, whole_q, whole_k)} (the whole mask, the same on "
        f"every rank), to {(around.batch, around.heads, q, whole_k)} (this rank's rows) or to {(around.batch, around.heads, 1, k)} "
        f"(flags of this rank's keys), got {tuple(attn_mask.shape)}"
    )


def _are_own_rows(mask: Tensor, around: Around) -> bool:
    """Whether the mask's rows are those of this rank's queries, rather than the whole mask's or one for all. The same on every rank.

    One row on a rank that holds one query may be either: if any rank can hold one query, ranks tell each other what theirs are.
    """
    held, whole, rows = around.held[0], around.q.length, mask.shape[2]
    ranks = range(around.mesh.size)
    if around.mesh.size == 1 or all(around.q.local_len(r) != 1 for r in ranks):
        return rows == held and rows not in (1, whole)
    mine = torch.tensor([[int(rows == held and rows not in (1, whole))]], device=mask.device)
    return bool(all_gather_rows(around.mesh, mine, [1] * len(ranks), what="agreement of all ranks, rows of attn_mask").any())


def as_mask_mod(mask: Tensor, around: Around) -> Mask:
    """A bool mask from `whole_mask` as a mask over whole positions; this rank's rows are put together with those of the others."""
    if _are_own_rows(mask, around):
        mask = unshard(mask, 2, around.q, around.mesh)
    kept, used = _squeezed(mask)
    if not any(used):
        seen = bool(kept)
        return mask_mod(lambda b, h, q, kv: (q >= 0) & seen)
    return mask_mod(lambda b, h, q, kv: kept[tuple(i for i, wanted in zip((b, h, q, kv), used) if wanted)])


def as_score_mod(mask: Tensor, around: Around) -> Callable[..., Tensor]:
    """A floating-point mask as what is added to scores. Rows of this rank alone are read through a table of where they lie."""
    own = _are_own_rows(mask, around)
    if own:
        most = max(around.q.local_len(r) for r in range(around.mesh.size))
        mask = F.pad(mask, (0, 0, 0, most - mask.shape[2]))  # of one shape on every rank
    kept, used = _squeezed(mask)
    if not any(used):
        return lambda score, b, h, q, kv: score + kept
    if not own:
        return lambda score, b, h, q, kv: score + kept[tuple(i for i, wanted in zip((b, h, q, kv), used) if wanted)]
    positions = around.q.positions(around.mesh.rank)
    if positions.ndim > 1:
        raise ValueError("attn_mask: rows of this rank alone need a layout that is the same for every batch row; pass the whole mask")
    row = torch.zeros(around.q.length, dtype=torch.int64)
    row[positions] = torch.arange(len(positions))
    row = row.to(mask.device)
    return lambda score, b, h, q, kv: score + kept[tuple(i for i, wanted in zip((b, h, row[q], kv), used) if wanted)]


def _squeezed(mask: Tensor) -> tuple[Tensor, tuple[bool, ...]]:
    """Without dims of size 1, and which dims are left."""
    return mask.reshape([size for size in mask.shape if size != 1]), tuple(size != 1 for size in mask.shape)
