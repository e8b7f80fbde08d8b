"""Attention of one query per batch row, a step of `generate`, in torch's operations: for a few keys on a CPU, planning and tracing a call
take longer than the call.

Legend: B batch, H query heads, G KV heads, S keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longspan._engine.invariant_mode import is_invariant
from longspan.integrations._model_mask import ModelMask

ScoreMod = Callable[..., Tensor]
_OWN_MODS = "longspan.integrations."  # the score mods of these modules compute with tensors of any shape


def attend_one_query(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scale: float | None, sink: Tensor | None, score_mod: ScoreMod | None
) -> Tensor | None:  # fmt: skip
    """out [B, 1, H, D] of query [B, H, 1, D] over key and value [B, G, S, D]; None for other calls, which `attention` computes.

    Without sink and score mod by torch's SDPA. With them, on a CPU, scores and sums are in float32, or float64 for float64.
    """
    if query.shape[2] != 1 or not isinstance(mask, ModelMask) or mask.mask is not None or is_invariant():
        return None
    visible = None if mask.row is None else mask.row[:, None, None].to(query.device)  # [B or 1, 1, 1, S]
    if sink is None and score_mod is None:
        grouped = query.shape[1] != key.shape[1]
        out = scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale, enable_gqa=grouped)
    elif query.device.type == "cpu" and (score_mod is None or _is_own(score_mod)):
        with torch.autocast("cpu", enabled=False):  # it would round scores to bfloat16
            out = _by_scores(query, key, value, visible, scale, sink, score_mod)
    else:
        return None
    return out.transpose(1, 2)  # contiguous, as of one query


def _is_own(score_mod: ScoreMod) -> bool:
    return getattr(score_mod, "__module__", "").startswith(_OWN_MODS)


def _by_scores(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float | None, sink: Tensor | None, score_mod: ScoreMod | None
) -> Tensor:  # fmt: skip
    """out [B, H, 1, D]: 0 for a query that sees nothing and has no sink."""
    batch, heads, _, dim = query.shape
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    q, k, v = (t.to(wide) for t in (query, key, value))
    if visible is not None:
        v = v.masked_fill(~visible.transpose(2, 3), 0.0)  # 0 · NaN is NaN
    scores = (q.reshape(batch, key.shape[1], -1, dim) @ k.transpose(2, 3)).reshape(batch, heads, 1, -1)
    scores = scores * (dim**-0.5 if scale is None else scale)
    if score_mod is not None:
        b, h, kv = torch.arange(batch)[:, None, None, None], torch.arange(heads)[:, None, None], torch.arange(key.shape[2])
        scores = score_mod(scores, b, h, torch.zeros((), dtype=torch.int64), kv)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    columns = scores if sink is None else torch.cat([scores, sink.to(wide)[:, None, None].expand(batch, heads, 1, 1)], -1)
    lse = columns.logsumexp(-1, keepdim=True)
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0))
    out = weights.reshape(batch, key.shape[1], -1, key.shape[2]) @ v
    return out.reshape(batch, heads, 1, -1).to(query.dtype)
