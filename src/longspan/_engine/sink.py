"""Attention sinks: a learned logit per head, a key of value 0 that every query sees."""

from __future__ import annotations

import torch
from torch import Tensor

from longspan._kernels.protocol import State, state_dtype


def sink_state(sink: Tensor | None, q: Tensor, v: Tensor, *, max_scores: bool) -> State | None:
    """The running state after the sink [H] alone: out 0, lse = sink; None without a sink."""
    if sink is None:
        return None
    dtype = state_dtype(q.dtype)
    lse = torch.empty(q.shape[:3], dtype=dtype, device=q.device).copy_(sink[None, :, None])  # a copy: kernels overwrite the state
    out = torch.zeros((*q.shape[:3], v.shape[-1]), dtype=dtype, device=q.device)
    return State(out=out, lse=lse, max_scores=torch.full_like(lse, -torch.inf) if max_scores else None)


def sink_gradient(sink: Tensor | None, lse: Tensor, delta: Tensor) -> Tensor | None:
    """The sink's gradient [H]: −Σ over rows of its softmax probability times the row's delta."""
    if sink is None:
        return None
    return -sink_terms(sink, lse, delta).sum((0, 2))


def sink_terms(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The sink's softmax probability times delta, for each row [B, H, Q]."""
    probability = torch.where(lse == -torch.inf, 0.0, torch.exp(sink[:, None] - lse))  # 0, not NaN, for a sink of −inf
    return probability * delta
