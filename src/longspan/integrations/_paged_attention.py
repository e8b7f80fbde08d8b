"""Attention of a transformers layer over a `PagedCache`: rows without padding, and multi-head latent attention (MLA) in absorbed form.

Legend: B batch rows, n new columns, H query heads, G KV heads, D head dim, E value dim; T tokens of the new columns that are not padding.
MLA: r dim of latent vectors, p dim of a head without rotary embedding, t dim with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longspan._engine.attention import attention
from longspan._engine.cached import write_cached
from longspan._kernels.paged import FEW_QUERIES
from longspan._masks.algebra import Mask
from longspan._masks.constructors import causal, sliding_window
from longspan.integrations._model_mask import ModelMask
from longspan.integrations._paged_cache import PendingUpdate

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class LayerInputs(NamedTuple):
    """q [B, H, n, D], k [B, G, n, D] and v [B, G, n, E] of a layer; `restore`: attention's out → out as the model expects it."""

    q: Tensor
    k: Tensor
    v: Tensor
    restore: Callable[[Tensor], Tensor]


def attend_paged(
    update: PendingUpdate, module: nn.Module, qkv: tuple[Tensor, Tensor, Tensor], mask: Any, options: dict[str, Any]
) -> Tensor | None:
    """out [B, n, H, E] of a layer after its update of a `PagedCache`; None if KV was written and the caller computes over the new tokens.

    options: of `longspan.attention`: scale, sink and score_mod.
    """
    cache, layer = update.cache, update.layer
    real = _checked_padding(update, module, mask)
    is_latent = hasattr(module, "expand_kv") and update.k.shape[1] == 1  # the layer gave latent vectors to the cache
    inputs = absorbed(module, qkv[0], update) if is_latent else LayerInputs(*qkv, _itself)
    step, index, new = cache.step_for(layer, inputs.k, inputs.v, real, shared_kv=is_latent)
    columns = None if new is None else new.flatten().nonzero().flatten().to(inputs.q.device)
    q, k, v = (x if columns is None else _ragged(x, columns) for x in inputs[:3])
    if is_latent:
        v = k[..., : v.shape[-1]]
        if cache.mesh is None and cache.columns == inputs.q.shape[2] > FEW_QUERIES:
            write_cached(k, v, step, index)  # no cached tokens before these: heads of p + t dims are cheaper than of r + t
            return None
    out = attention(q, k, v, cache=step, layer=index, mask=_mask_of(cache.windows[layer]), **options)
    if columns is not None:
        out = _with_padding(out, columns, inputs.q.shape[0], inputs.q.shape[2])
    return inputs.restore(out).transpose(1, 2).contiguous()


@lru_cache(maxsize=16)
def _mask_of(window: int | None) -> Mask:
    return causal() if window is None else causal() & sliding_window(window)


def _itself(out: Tensor) -> Tensor:
    return out


def _checked_padding(update: PendingUpdate, module: nn.Module, mask: Any) -> Tensor | None:
    """bool [B, columns], False for padding; None without padding. Raises ValueError for masks that are not causal or windows."""
    if getattr(module, "layer_idx", update.layer) != update.layer:
        raise ValueError(f"longspan: expected attention of layer {update.layer} after its cache update, got that of {module.layer_idx}")
    if not isinstance(mask, ModelMask):
        raise ValueError(
            f"longspan: expected a mask by token [B, S] or None with a PagedCache, got attention_mask of type {type(mask).__name__}"
        )
    if mask.foreign or not getattr(module, "is_causal", True):
        raise ValueError(
            f"longspan: expected a causal mask with a PagedCache, got {mask.foreign or 'a layer that is not causal'!r}; use transformers' "
            "DynamicCache"
        )
    window = update.cache.windows[update.layer]
    if mask.window != window:
        raise ValueError(
            f"longspan: expected the window {window} of layer {update.layer} as the PagedCache has, got a mask with the window "
            f"{mask.window}; make the cache with the model's config"
        )
    return mask.padding_mask


def _ragged(x: Tensor, columns: Tensor) -> Tensor:
    """[B, H, n, D] → [1, H, T, D]: the columns that are tokens."""
    return x.transpose(1, 2).flatten(0, 1)[columns].transpose(0, 1)[None]


def _with_padding(out: Tensor, columns: Tensor, rows: int, count: int) -> Tensor:
    """[1, H, T, E] → [B, H, n, E], 0 for padding."""
    padded = out.new_zeros(rows * count, out.shape[1], out.shape[3])
    padded[columns] = out[0].transpose(0, 1)
    return padded.unflatten(0, (rows, count)).transpose(1, 2)


def absorbed(module: Any, query: Tensor, update: PendingUpdate) -> LayerInputs:
    """MLA over latent vectors: one KV head, whose keys are (latent, rotary part) and whose values are the latent.

    q·k = q_p · (W_k c) + q_t · k_t = (W_kᵀ q_p) · c + q_t · k_t, and Σ w (W_v c) = W_v Σ w c: the up-projections are applied to queries
    and outputs, and this path forms no key or value per head.
    """
    up, (latent, rotary) = module.kv_b_proj, (update.k, update.v)
    p, e = module.qk_nope_head_dim, module.v_head_dim
    # A quantized layer has scales besides its weight, a parallel one a part of its weight.
    plain = type(up) is nn.Linear and up.bias is None and type(up.weight) in (nn.Parameter, Tensor) and up.weight.dtype in _FLOATS
    if not plain or latent.shape[3] != module.kv_lora_rank:
        raise ValueError(
            f"longspan: expected latent vectors [B, 1, n, {module.kv_lora_rank}] and a torch.nn.Linear kv_b_proj without bias, of 16 bits "
            f"or more, in {type(module).__name__}, got {tuple(latent.shape)} and {type(up).__name__} of {up.weight.dtype}; use "
            "transformers' DynamicCache"
        )
    weight = up.weight.to(query.dtype).view(query.shape[1], p + e, latent.shape[3])
    q = torch.cat([torch.einsum("bhnp,hpr->bhnr", query[..., :p], weight[:, :p]), query[..., p:]], -1)
    k = torch.cat([latent, rotary], -1).to(query.dtype)
    return LayerInputs(q, k, k[..., : latent.shape[3]], lambda out: torch.einsum("bhnr,her->bhne", out, weight[:, p:]))
