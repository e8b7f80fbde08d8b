"""What callers get wrong, said before any kernel runs: expected, got, what to do."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_tensors(q: Any, k: Any, v: Any) -> None:
    """Rank, dtype, device, batch, heads and dims of q [B, H, Q, D], k [B, G, K, D], v [B, G, K, E]."""
    named = (("q", q), ("k", k), ("v", v))
    for name, t in named:
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(t).__name__}")
        if t.is_nested or t.layout != torch.strided:
            raise TypeError(f"{name}: expected a plain dense tensor, got layout {t.layout}; pack sequences and use a documents() mask")
        if t.ndim != 4:
            raise ValueError(f"{name}: expected 4 dims [batch, heads, tokens, head_dim], got shape {tuple(t.shape)}")
    if q.dtype not in DTYPES:
        raise TypeError(f"q: expected one of {', '.join(str(d) for d in DTYPES)}, got {q.dtype}; convert q, k and v")
    for name, t in named[1:]:
        if t.dtype != q.dtype:
            raise TypeError(f"{name}: expected the dtype of q, {q.dtype}, got {t.dtype}; convert one of them")
        if t.device != q.device:
            raise ValueError(f"{name}: expected the device of q, {q.device}, got {t.device}; move it with .to(q.device)")
        if t.shape[0] != q.shape[0]:
            raise ValueError(f"{name}: expected the batch of q, {q.shape[0]}, got {t.shape[0]} (shape {tuple(t.shape)})")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k: expected the head dim of q, {q.shape[-1]}, got {k.shape[-1]}")
    if v.shape[1:3] != k.shape[1:3]:
        raise ValueError(f"v: expected the heads and tokens of k, {tuple(k.shape[1:3])}, got {tuple(v.shape[1:3])}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"k: query heads must be a multiple of key heads, got {q.shape[1]} and {k.shape[1]}")
    if 0 in (*q.shape[:2], q.shape[-1], v.shape[-1]):
        raise ValueError(f"q, k, v: batch, heads and head dims must be >= 1, got q {tuple(q.shape)} and v {tuple(v.shape)}")


def check_scale(scale: Any, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, Tensor) or not isinstance(scale, int | float) or isinstance(scale, bool):
        raise TypeError(f"scale: expected a number or None, got {type(scale).__name__}; a learned scale belongs in a score_mod")
    if not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {scale}")
    return float(scale)


def check_sink(sink: Any, q: Tensor) -> None:
    if sink is None:
        return
    if not isinstance(sink, Tensor) or not sink.dtype.is_floating_point:
        raise TypeError(
            f"sink: expected a floating-point tensor of shape [{q.shape[1]}], got {getattr(sink, 'dtype', type(sink).__name__)}"
        )
    if sink.shape != (q.shape[1],):
        raise ValueError(f"sink: expected one logit per query head, shape [{q.shape[1]}], got {tuple(sink.shape)}")
    if sink.device != q.device:
        raise ValueError(f"sink: expected the device of q, {q.device}, got {sink.device}; move it with .to(q.device)")


def check_captured(tensors: list[Tensor], q: Tensor, what: str) -> None:
    for t in tensors:
        if t.ndim and t.device != q.device:
            raise ValueError(f"{what} captures a tensor on {t.device}, but q is on {q.device}: move it with .to(q.device)")
