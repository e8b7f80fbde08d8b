"""The `dense` kernel, which defines correctness: tensor algebra over the whole score matrix, differentiated by autograd.

Memory is O(S²). Half-precision inputs are computed in float32, float64 in float64. Legend as in `longspan._kernels.protocol`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan._kernels.masked_autograd import masked_outer, masked_weighted_sum
from longspan._kernels.protocol import state_dtype
from longspan._kernels.tile_math import merge_weight
from longspan._masks.program import Program


@dataclass(frozen=True, kw_only=True, eq=False)
class Scoring:
    """How each score is computed and masked: the scale, the programs and the tensors that they capture."""

    scale: float
    mask: Program | None = None
    mask_captured: Sequence[Tensor] = ()
    score: Program | None = None
    score_captured: Sequence[Tensor] = ()


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, *, sink: Tensor | None = None, q_pos: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, lse, max scores): out in the dtype of q, the others in float32 (float64). out and lse are differentiable to any order.

    Tokens that the mask hides from a row change no bit of the row's results, NaN and inf included.

    Args:
        sink: [H], the logit of one more key per head, whose value is 0; part of the softmax and of lse.
        q_pos: Positions of the queries, [Q] or [B, Q]; by default 0, 1, 2, …
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
    seen = None if scoring.mask is None else scoring.mask(*indices, *scoring.mask_captured).expand(batch, heads, queries, n)
    scores = (q.to(wide) @ keys.mT if seen is None else masked_outer(q.to(wide), keys, seen)) * scoring.scale
    if scoring.score is not None:
        scores = scoring.score(scores, *indices, *scoring.score_captured).to(wide).expand(batch, heads, queries, n)
    if seen is not None:
        scores = torch.where(seen, scores, -torch.inf)
    max_scores = scores.detach().amax(-1) if n else scores.new_full(scores.shape[:-1], -torch.inf)
    weights = torch.exp(scores - max_scores.masked_fill(max_scores == -torch.inf, 0.0)[..., None])
    total = weights.sum(-1)
    blind = total == 0  # rows that see no key
    lse = torch.where(blind, -torch.inf, max_scores + torch.log(total.masked_fill(blind, 1.0)))
    weights = weights / total.masked_fill(blind, 1.0)[..., None]
    out = weights @ values if seen is None else masked_weighted_sum(weights, values, seen)
    if sink is not None:
        sinks = sink.to(wide)[:, None].expand_as(lse)
        # Where both are −inf, so is their sum; the gradient of logaddexp would be NaN.
        both = (lse == -torch.inf) & (sinks == -torch.inf)
        joined = torch.logaddexp(lse.masked_fill(both, 0.0), sinks.masked_fill(both, 0.0)).masked_fill(both, -torch.inf)
        out = out * merge_weight(lse, joined)[..., None]
        lse = joined
    return out.to(q.dtype), lse, max_scores
