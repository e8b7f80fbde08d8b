"""Result tensors of GPU kernels: running states and gradients, allocated, normalised and initialised.

Legend: B batch, H query heads, Q query tokens, D key head dim, E value head dim. q [B, H, Q, D], out [B, H, Q, E], lse [B, H, Q].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan._kernels.gpu import launch
from longspan._kernels.protocol import Grads, State, Work, like_query


def usable(state: State, *, peak: bool) -> State:
    """The state with contiguous lse and, with `peak`, max scores, which start at −inf."""
    top = None
    if peak:
        top = torch.full_like(state.lse, float("-inf")) if state.peak is None else state.peak
    return State(out=state.out, lse=state.lse.contiguous(), peak=None if top is None else top.contiguous())


def empty_state(q: Tensor, dim: int, dtype: torch.dtype, *, peak: bool) -> State:
    """An uninitialised state for q; out [B, H, Q, dim] of `dtype`."""
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    return State(out=empty_out(q, dim, dtype), lse=lse, peak=torch.empty_like(lse) if peak else None)


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
    if result.peak is not None:
        if old is not None and old.peak is not None:
            result.peak.copy_(old.peak)
        else:
            result.peak.fill_(float("-inf"))


def empty_grads(q: Tensor, k: Tensor, v: Tensor, work: Work, needs: Sequence[bool], *, wide: bool) -> Grads:
    """Uninitialised gradients of q, k and v, float32 if `wide`, and zeros for the captured tensors that need a gradient."""
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
