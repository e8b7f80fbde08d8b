"""Attention with a mask of query-key pairs, on one device: a model makes it itself, as some vision towers do, or was given it.

Legend: B batch, H query heads, G KV heads, Q queries, K keys, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longspan._engine.attention import attention
from longspan._engine.signatures import scaled_dot_product_attention
from longspan.integrations._forward import current_forward


def attend_pairs(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, to_tokens: bool, scale: float | None, sink: Any, score_mod: Any
) -> Tensor:  # fmt: skip
    """out [B, Q, H, D] of query [B, H, Q, D] over key and value [B, G, K, D], with a mask [B or 1, H or 1, Q or 1, K] as SDPA takes it.

    None is a mask of all pairs. to_tokens: whether keys are tokens, of which some may be padding, rather than features of images.

    Raises:
        ValueError: For a sink or a score mod, and a mask by which a query sees padding that sees nothing itself.
    """
    if mask is None:
        return attention(query, key, value, scale=scale, sink=sink, score_mod=score_mod).transpose(1, 2).contiguous()
    if sink is not None or score_mod is not None:
        raise ValueError(
            f"longspan: expected a mask by token beside sinks, a soft cap or a score_mod, got attention_mask of shape {tuple(mask.shape)}; "
            "give the model a mask [B, S]"
        )
    forward = current_forward.get() if to_tokens else None
    _check_padding(None if forward is None else forward.model_mask, mask)
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    return out.transpose(1, 2).contiguous()


def _check_padding(tokens: Any, mask: Tensor) -> None:
    """Raise ValueError if a query sees a token of padding on the left: its attention is 0, and an average of all tokens in eager attention.

    tokens: the `ModelMask` of the layers before, or None.
    """
    real = None if tokens is None or tokens.bidirectional else tokens.padding_mask
    if real is None or real.shape[1] != mask.shape[-1]:
        return
    left = (real.cumsum(1) == 0).to(mask.device)  # [B, K]
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    if bool((seen & left[:, None, None]).any()):
        raise ValueError(
            f"longspan: the model's mask of query-key pairs, of shape {tuple(mask.shape)}, shows tokens of padding on the left, which see "
            "nothing. Pad on the right, or use attn_implementation='eager'"
        )
