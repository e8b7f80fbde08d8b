"""The `dense` kernel: the definition of right. Plain tensor algebra over the whole score matrix, differentiated by autograd.

Memory is O(S²). Half-precision inputs are computed in float32, float64 stays float64. Legend as in `protocol`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan._kernels.masked_autograd import masked_outer, masked_weighted_sum
from longspan._kernels.protocol import state_dtype
from longspan._kernels.tile_math import merge_weight
from longspan._masks.program import Program


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    mask: Program | None,
    mask_captured: Sequence[Tensor],
    score: Program | None,
    score_captured: Sequence[Tensor],
    sink: Tensor | None = None,
    q_pos: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max scores): out in the dtype of q, the others in float32 (float64). out and lse are differentiable to any order.

    Keys, values, queries and gradients that the mask hides from a row change no bit of its results, NaN and inf included.

    `q_pos`: the queries' positions [Q] or [B, Q], where they are not 0, 1, 2, …

    The sink, [H], is one more key per head whose value is 0: it takes its share of the softmax and is part of lse.
    """
    wide = state_dtype(q.dtype)
    groups = q.shape[1] // k.shape[1]
    keys, values = (t.to(wide).repeat_interleave(groups, 1) for t in (k, v))
    (batch, heads, queries, _), n = q.shape, k.shape[2]
    rows = torch.arange(queries, device=q.device) if q_pos is None else q_pos.to(q.device)
    indices = (
        torch.arange(batch, device=q.device).view(-1, 1, 1, 1),
        torch.arange(heads, device=q.device).view(1, -1, 1, 1),
        rows.view(len(rows) if rows.ndim == 2 else 1, 1, queries, 1),
        torch.arange(n, device=q.device).view(1, 1, 1, -1),
    )
    seen = None if mask is None else mask(*indices, *mask_captured).expand(batch, heads, queries, n)
    scores = (q.to(wide) @ keys.mT if seen is None else masked_outer(q.to(wide), keys, seen)) * scale
    if score is not None:
        scores = score(scores, *indices, *score_captured).to(wide).expand(batch, heads, queries, n)
    if seen is not None:
        scores = torch.where(seen, scores, -torch.inf)
    max_scores = scores.detach().amax(-1) if n else scores.new_full(scores.shape[:-1], -torch.inf)
    weights = torch.exp(scores - max_scores.masked_fill(max_scores == -torch.inf, 0.0)[..., None])
    total = weights.sum(-1)
    nothing = total == 0
    lse = torch.where(nothing, -torch.inf, max_scores + torch.log(total.masked_fill(nothing, 1.0)))
    weights = weights / total.masked_fill(nothing, 1.0)[..., None]
    out = weights @ values if seen is None else masked_weighted_sum(weights, values, seen)
    if sink is not None:
        sinks = sink.to(wide)[:, None].expand_as(lse)
        # A sink of −inf and a row that sees nothing: the sum of both is nothing still, but its gradient would be NaN.
        nothing = (lse == -torch.inf) & (sinks == -torch.inf)
        joined = torch.logaddexp(lse.masked_fill(nothing, 0.0), sinks.masked_fill(nothing, 0.0)).masked_fill(nothing, -torch.inf)
        out = out * merge_weight(lse, joined)[..., None]
        lse = joined
    return out.to(q.dtype), lse, max_scores
