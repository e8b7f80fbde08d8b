"""Result tensors of GPU kernels: running states and gradients, allocated, normalised and initialised.

Legend: B batch, H query heads, Q query tokens, D key head dim, E value head dim. q [B, H, Q, D], out [B, H, Q, E], lse [B, H, Q].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan._kernels.gpu import launch
from longspan._kernels.protocol import AttentionInputs, Grads, State, Work, like_query


def usable(state: State, *, max_scores: bool) -> State:
    """The state with contiguous lse and, if asked for, contiguous max scores, which start at −inf."""
    row_max = None
    if max_scores:
        row_max = torch.full_like(state.lse, float("-inf")) if state.max_scores is None else state.max_scores.contiguous()
    return State(out=state.out, lse=state.lse.contiguous(), max_scores=row_max)


def empty_state(q: Tensor, dim: int, dtype: torch.dtype, *, max_scores: bool) -> State:
    """An uninitialised state for q; out [B, H, Q, dim] of `dtype`."""
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    return State(out=empty_out(q, dim, dtype), lse=lse, max_scores=torch.empty_like(lse) if max_scores else None)


def empty_out(q: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised out [B, H, Q, dim], its dims in memory in the order of q's."""
    return torch.empty((*q.shape[:3], dim), dtype=dtype, device=q.device) if q.is_contiguous() else like_query(q, dim, dtype)


def prefill(result: State, old: State | None) -> None:
    """Initialise `result` with the state `old`, or with the empty state: rows in no tile keep it."""
    if old is None:
        result.out.zero_()
        result.lse.fill_(float("-inf"))
    else:
        result.out.copy_(old.out)
        result.lse.copy_(old.lse)
    if result.max_scores is not None:
        if old is not None and old.max_scores is not None:
            result.max_scores.copy_(old.max_scores)
        else:
            result.max_scores.fill_(float("-inf"))


def empty_grads(inputs: AttentionInputs, work: Work, needs: Sequence[bool], *, wide: bool) -> Grads:
    """Uninitialised gradients of q, k and v, float32 if `wide`, and zeros for the captured tensors that need a gradient."""
    q, k, v = inputs.q, inputs.k, inputs.v
    dq, dk, dv = (torch.empty(x.shape, dtype=torch.float32 if wide else q.dtype, device=q.device) for x in (q, k, v))
    captured = [
        torch.zeros(c.shape, dtype=torch.float32, device=c.device) if n else None for c, n in zip(work.score_captured, needs, strict=True)
    ]
    return Grads(q=dq, k=dk, v=dv, captured=captured)


def zero_uncovered(grads: Grads, work: Work, *, into: bool) -> None:
    """Set gradients to 0 where a tiling leaves rows uncovered. `into`: the gradient of q is added to, not written."""
    if not into and not launch.facts(work.q_tiles).covers:
        grads.q.zero_()
    if not launch.facts(work.kv_tiles).covers:
        grads.k.zero_()
        grads.v.zero_()
