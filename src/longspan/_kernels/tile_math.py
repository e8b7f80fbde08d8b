"""Tile arithmetic in torch operations: merging partial results, softmax, grouped products, gradients of lookups.

Legend as in `longspan._kernels.protocol`; a tile is m queries × n keys, its tensors [B, H, m, n].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan._kernels.protocol import State, Work


def empty_state(shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, max_scores: bool) -> State:
    """The state before the first step: out 0, lse −inf. shape: that of out."""
    lse = torch.full(shape[:-1], -torch.inf, dtype=dtype, device=device)
    return State(out=torch.zeros(shape, dtype=dtype, device=device), lse=lse, max_scores=lse.clone() if max_scores else None)


def running_state(
    state: State | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, max_scores: bool
) -> State:  # fmt: skip
    """A state to merge into: `state`, which is consumed, or an empty one. shape: that of out."""
    if state is None:
        return empty_state(shape, dtype, device, max_scores=max_scores)
    row_max = None
    if max_scores:
        row_max = torch.full_like(state.lse, -torch.inf) if state.max_scores is None else state.max_scores
    return State(out=state.out, lse=state.lse, max_scores=row_max)


def merge_weight(lse: Tensor, total: Tensor) -> Tensor:
    """exp(lse − total), and 0 where both are −inf: rows that saw no KV."""
    return torch.exp(lse - total.masked_fill(total == -torch.inf, 0.0))


def merge_(state: State, slices: tuple[slice, ...], out: Tensor, lse: Tensor, max_scores: Tensor | None = None) -> None:
    """Merge a partial result for the rows `slices` into the state, in place. Exact also where either lse, or both, are −inf."""
    state_out, state_lse = state.out[slices], state.lse[slices]
    total = torch.logaddexp(state_lse, lse)
    state_out.mul_(merge_weight(state_lse, total)[..., None]).addcmul_(out, merge_weight(lse, total)[..., None])
    state_lse.copy_(total)
    if state.max_scores is not None and max_scores is not None:
        torch.maximum(state.max_scores[slices], max_scores, out=state.max_scores[slices])


def softmax_tile(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, lse, max scores) over the last dim; rows of −inf give weights 0, lse −inf."""
    max_scores = scores.amax(-1)
    weights = torch.exp(scores - max_scores.masked_fill(max_scores == -torch.inf, 0.0)[..., None])
    total = weights.sum(-1)
    lse = max_scores + torch.log(total)
    return weights / total.masked_fill(total == 0, 1.0)[..., None], lse.masked_fill(total == 0, -torch.inf), max_scores


def grouped_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a [B, H, m, x] @ b [B, G, x, n] → [B, H, m, n]: H/G consecutive heads of a share one head of b, which is not copied."""
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
    """Add the gradient of each lookup of a tile to the looked-up element of `totals`, in place.

    `grads[r]` broadcasts to `shape`, the tile's, plus trailing dims for vector lookups. `seen` is False for masked scores.
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
        ones = torch.empty((1,) * len(shape), device="meta")
        index_shape = torch.broadcast_tensors(ones, *index)[0].shape  # torch.broadcast_shapes would import sympy
        constant_dims = [d for d, size in enumerate(index_shape) if size == 1]
        grad = grad.sum(constant_dims, keepdim=True) if constant_dims else grad
        if index:
            flat_index: list[Tensor | None] = [i.expand(index_shape).reshape(-1) for i in index]
            total.index_put_(flat_index, grad.reshape(-1, *grad.shape[len(shape) :]), accumulate=True)
        else:
            total.add_(grad.reshape(total.shape))


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float, float]:
    """(q, scale, sign) with the same products q·k·scale and a scale above 0.

    torch's operators add −inf for masked scores before they scale: a scale of 0 or less would undo the mask. The gradient of the given q is
    `sign` times that of the returned q.
    """
    if scale > 0:
        return q, scale, 1.0
    return (-q, -scale, -1.0) if scale < 0 else (torch.zeros_like(q), 1.0, 0.0)


def contiguous_last_dim(t: Tensor) -> Tensor:
    """t, or a copy with a contiguous last dim: torch's CPU flash operator ignores the stride of the last dim."""
    return t if t.stride(-1) == 1 else t.contiguous()
