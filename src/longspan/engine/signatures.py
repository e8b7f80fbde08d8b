"""The operator under the names and signatures that torch gave it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from longspan.engine.attention import attend
from longspan.masks.algebra import Mask, causal, mask_mod


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: BlockMask | Mask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """`torch.nn.attention.flex_attention.flex_attention`, on any device, forward and backward; see `longspan.attention` for numerics.

    `block_mask` may also be a longspan mask or a mask_mod callable. Returns out; (out, lse) with `return_lse`; (out, AuxOutput) with
    `return_aux`. `max_scores` are not differentiable. Batches of keys of size 1 serve every query batch.
    """
    if kernel_options:
        raise ValueError(f"kernel_options: torch's tile settings have no meaning here, got {sorted(kernel_options)}; leave them out")
    if return_lse and return_aux is not None:
        raise ValueError("give return_lse or return_aux, not both; return_aux=AuxRequest(lse=True) is torch's newer form")
    if isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor) and query.ndim == key.ndim == value.ndim == 4:
        if not enable_gqa and query.shape[1] != key.shape[1]:
            raise ValueError(
                f"key: expected {query.shape[1]} heads as in query, got {key.shape[1]}; pass enable_gqa=True for grouped heads"
            )
        if key.shape[0] == 1 and query.shape[0] > 1:
            key, value = key.expand(query.shape[0], -1, -1, -1), value.expand(query.shape[0], -1, -1, -1)
    mask = None if isinstance(block_mask, BlockMask) and _is_no_mask(block_mask) else block_mask
    peak = return_aux is not None and return_aux.max_scores
    out, lse, most = attend(query, key, value, mask=mask, score_mod=score_mod, scale=scale, sink=None, kernel="auto", peak=peak)
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=most if peak else None)
    return (out, lse) if return_lse else out


def _is_no_mask(block_mask: BlockMask) -> bool:
    """torch's stand-in for no mask: one block larger than any sequence."""
    return min(block_mask.BLOCK_SIZE) >= 1 << 30


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`: inputs [..., H, S, D], [..., S, D] or [S, D], at most one dim before H.

    A boolean `attn_mask` is True where a query sees a key; a floating-point one is added to the scores and gets its gradient. Both
    broadcast to [B, H, Q, K]. Dropout is refused: there is no exact counterpart of it across devices.
    """
    if dropout_p:
        raise ValueError(
            f"dropout_p: expected 0, got {dropout_p}: longspan's attention is exact and has no dropout; call torch's SDPA for it"
        )
    if attn_mask is not None and is_causal:
        raise ValueError("give attn_mask or is_causal=True, not both; a longspan mask & causal() in longspan.attention does both")
    ndim = query.ndim
    if not 2 <= ndim <= 4 or not ndim == key.ndim == value.ndim:
        raise ValueError(f"query, key, value: expected the same 2 to 4 dims, got shapes {[tuple(t.shape) for t in (query, key, value)]}")
    if ndim < 4:
        query, key, value = ((t if t.ndim == 3 else t[None])[:, None] for t in (query, key, value))
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(f"key: expected {query.shape[1]} heads as in query, got {key.shape[1]}; pass enable_gqa=True for grouped heads")
    mask: Mask | None = causal() if is_causal else None
    score_mod = None
    if attn_mask is not None:
        shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        lookup = _lookup(attn_mask if ndim == 4 else _with_head_dim(attn_mask), shape)
        if attn_mask.dtype == torch.bool:
            mask = mask_mod(lambda b, h, q_idx, kv_idx: lookup(b, h, q_idx, kv_idx))
        elif attn_mask.dtype.is_floating_point:
            score_mod = lambda score, b, h, q_idx, kv_idx: score + lookup(b, h, q_idx, kv_idx)  # noqa: E731
        else:
            raise TypeError(f"attn_mask: expected bool or floating point, got {attn_mask.dtype}")
    out, _, _ = attend(query, key, value, mask=mask, score_mod=score_mod, scale=scale, sink=None, kernel="auto", peak=False)
    return out if ndim == 4 else out[:, 0] if ndim == 3 else out[0, 0]


def _with_head_dim(attn_mask: Tensor) -> Tensor:
    return attn_mask[:, None] if attn_mask.ndim == 3 else attn_mask


def _lookup(table: Tensor, shape: tuple[int, int, int, int]) -> Callable[..., Tensor]:
    """The element of a mask that broadcasts to `shape`, read without expanding it."""
    if table.ndim > 4 or any(t not in (1, s) for t, s in zip(reversed(table.shape), reversed(shape), strict=False)):
        raise ValueError(f"attn_mask: expected a shape that broadcasts to {shape}, got {tuple(table.shape)}")
    sizes = (1,) * (4 - table.ndim) + tuple(table.shape)
    used = [d for d in range(4) if sizes[d] > 1]
    kept = table.reshape([sizes[d] for d in used])

    def lookup(*index: Tensor) -> Tensor:
        return kept[tuple(index[d] for d in used)] if used else kept

    return lookup
