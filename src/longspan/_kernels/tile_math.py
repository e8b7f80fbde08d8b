"""Small algebra that several kernels share: merging partial results, running programs on tiles, summing gradients of lookups.

Legend as in `protocol`; a tile is m queries × n keys, its tensors [B, H, m, n].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan._kernels.protocol import State, Work


def empty_state(shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, peak: bool) -> State:
    """The state of rows that have seen nothing; `shape` is that of out."""
    lse = torch.full(shape[:-1], -torch.inf, dtype=dtype, device=device)
    return State(out=torch.zeros(shape, dtype=dtype, device=device), lse=lse, peak=lse.clone() if peak else None)


def begun(state: State | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, peak: bool) -> State:
    """A state to fold into: the given one, which is spent, or an empty one; `shape` is that of out."""
    if state is None:
        return empty_state(shape, dtype, device, peak=peak)
    most = None
    if peak:
        most = torch.full_like(state.lse, -torch.inf) if state.peak is None else state.peak
    return State(out=state.out.to(dtype), lse=state.lse, peak=most)


def shares(lse: Tensor, total: Tensor) -> Tensor:
    """exp(lse − total), and 0 where nothing was seen at all (both −inf)."""
    return torch.exp(lse - total.masked_fill(total == -torch.inf, 0.0))


def fold_(state: State, where: tuple[slice, ...], out: Tensor, lse: Tensor, peak: Tensor | None = None) -> None:
    """Merge a partial result for the rows `where` into the state, in place. Both sides may be empty (−inf) or far apart."""
    old = state.lse[where]
    total = torch.logaddexp(old, lse)
    mine = state.out[where]
    mine.mul_(shares(old, total)[..., None]).addcmul_(out, shares(lse, total)[..., None])
    old.copy_(total)
    if state.peak is not None and peak is not None:
        torch.maximum(state.peak[where], peak, out=state.peak[where])


def softmax_tile(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, lse, peak) over the last dim; rows of −inf give weights 0, lse −inf."""
    peak = scores.amax(-1)
    weights = torch.exp(scores - peak.masked_fill(peak == -torch.inf, 0.0)[..., None])
    total = weights.sum(-1)
    lse = peak + torch.log(total)
    return weights / total.masked_fill(total == 0, 1.0)[..., None], lse.masked_fill(total == 0, -torch.inf), peak


def grouped_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a [B, H, m, x] @ b [B, G, x, n] → [B, H, m, n]: each of the G heads serves H/G neighbouring ones, without copies of b."""
    (batch, heads, m, x), groups = a.shape, b.shape[1]
    return (a.reshape(batch, groups, heads // groups * m, x) @ b).view(batch, heads, m, b.shape[-1])


def grouped_matmul_t(a: Tensor, b: Tensor, groups: int) -> Tensor:
    """aᵀ @ b over queries, summed over the heads of a group: a [B, H, m, n], b [B, H, m, x] → [B, G, n, x]."""
    batch, heads, m, n = a.shape
    rows = heads // groups * m
    return a.reshape(batch, groups, rows, n).transpose(-1, -2) @ b.reshape(batch, groups, rows, b.shape[-1])


def tile_indices(batches: Tensor, heads: Tensor, q_pos: Tensor, kv_pos: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """b, h, q, kv as rank-4 tensors that broadcast to [B, H, m, n]."""
    return batches.view(-1, 1, 1, 1), heads.view(1, -1, 1, 1), q_pos.view(1, 1, -1, 1), kv_pos.view(1, 1, 1, -1)


def add_lookup_grads_(
    totals: Sequence[Tensor | None],
    work: Work,
    grads: Sequence[Tensor],
    indices: Sequence[Sequence[Tensor]],
    seen: Tensor | None,
    shape: torch.Size,
) -> None:
    """Add the gradient of each captured lookup of a tile to its element of the captured tensor's total, in place.

    `grads[r]` broadcasts to `shape` (the tile's, and for vector lookups more dims behind); `seen` is False where a score does not exist.
    """
    assert work.joint is not None
    for captured, grad, index in zip(work.joint.reads, grads, indices, strict=True):
        total = totals[captured]
        if total is None:
            continue
        grad = grad.expand(*shape, *grad.shape[len(shape) :]).to(total.dtype)
        if seen is not None:
            keep = seen.expand(shape).reshape(*shape, *(1,) * (grad.ndim - len(shape)))
            grad = torch.where(keep, grad, 0.0)
        lead = torch.broadcast_shapes((1,) * len(shape), *(i.shape for i in index))
        same = [d for d, size in enumerate(lead) if size == 1]
        grad = grad.sum(same, keepdim=True) if same else grad
        if index:
            where: list[Tensor | None] = [i.expand(lead).reshape(-1) for i in index]
            total.index_put_(where, grad.reshape(-1, *grad.shape[len(shape) :]), accumulate=True)
        else:
            total.add_(grad.reshape(total.shape))


def above_zero(q: Tensor, scale: float) -> tuple[Tensor, float, float]:
    """(q, scale, sign): the same products q·k·scale with a scale above 0. torch's operators mask first and then scale, and −inf times 0 or
    less is no mask. The gradient of the given q is `sign` times that of the new one.
    """
    if scale > 0:
        return q, scale, 1.0
    return (-q, -scale, -1.0) if scale < 0 else (torch.zeros_like(q), 1.0, 0.0)


def side_by_side(t: Tensor) -> Tensor:
    """t, or a copy whose last dim's elements lie side by side: torch's CPU flash operator reads them so, whatever the stride."""
    return t if t.stride(-1) == 1 else t.contiguous()
