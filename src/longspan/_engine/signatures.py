"""`flex_attention` and `scaled_dot_product_attention` with torch's signatures."""

from __future__ import annotations

from collections.abc import Callable
from math import lcm
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from longspan._engine.attention import AttendOptions, attend
from longspan._engine.checks import check_kernel_options
from longspan._masks.algebra import Mask, MaskLike
from longspan._masks.constructors import causal, mask_mod


@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor] | None = None, block_mask: MaskLike | None = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: Literal[False] = False,
    kernel_options: dict[str, Any] | None = None, *, return_aux: None = None,
) -> Tensor: ...  # fmt: skip
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor] | None = None, block_mask: MaskLike | None = None,
    scale: float | None = None, enable_gqa: bool = False, *, return_lse: Literal[True], kernel_options: dict[str, Any] | None = None,
    return_aux: None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor] | None = None, block_mask: MaskLike | None = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: Literal[False] = False,
    kernel_options: dict[str, Any] | None = None, *, return_aux: AuxRequest,
) -> tuple[Tensor, AuxOutput]: ...  # fmt: skip
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor] | None = None, block_mask: MaskLike | None = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None, *, return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]: ...  # fmt: skip
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: MaskLike | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """`torch.nn.attention.flex_attention.flex_attention`, on any device, forward and backward; see `longspan.attention` for numerics.

    `block_mask` may also be a longspan mask or a mask_mod callable. Returns out; (out, lse) with `return_lse`; (out, AuxOutput) with
    `return_aux`. `max_scores` are not differentiable. Key and value of batch 1 are broadcast to the query's batch. torch's `kernel_options`
    are accepted and have no effect: they tune torch's kernels. Under autocast, query, key and value are cast as torch casts them.
    """
    check_kernel_options(kernel_options)
    if return_lse and return_aux is not None:
        raise ValueError("expected return_lse or return_aux, got both; use return_aux=AuxRequest(lse=True), torch's newer form")
    query, key, value = as_autocast(query, key, value)
    if isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor) and query.ndim == key.ndim == value.ndim == 4:
        if not enable_gqa and query.shape[1] != key.shape[1]:
            raise ValueError(
                f"key: expected {query.shape[1]} heads as in query, got {key.shape[1]}; pass enable_gqa=True for grouped heads"
            )
        if key.shape[0] == 1 and query.shape[0] > 1:
            key, value = key.expand(query.shape[0], -1, -1, -1), value.expand(query.shape[0], -1, -1, -1)
    mask = None if isinstance(block_mask, BlockMask) and is_no_mask(block_mask) else block_mask
    max_scores = return_aux is not None and return_aux.max_scores
    out, lse, row_max = attend(query, key, value, AttendOptions(mask=mask, score_mod=score_mod, scale=scale, max_scores=max_scores))
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=row_max if max_scores else None)
    return (out, lse) if return_lse else out


def is_no_mask(block_mask: BlockMask) -> bool:
    """Whether a BlockMask is torch's default for no mask: one block larger than any sequence."""
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
    """`torch.nn.functional.scaled_dot_product_attention` of query [..., H, Q, D] over key [..., H, K, D] and value [..., H, K, E].

    Leading dims broadcast; there may be none. With `enable_gqa`, key and value may have fewer heads than query, each a number that divides
    query's. A boolean `attn_mask` is True where a query sees a key; a floating-point one is added to the scores and gets a gradient. Both
    broadcast to [..., H, Q, K]. A CausalBias of torch.nn.attention.bias is a causal mask. Dropout is not supported. Under autocast,
    arguments are cast as torch casts them.
    """
    if dropout_p:
        raise ValueError(f"dropout_p: expected 0, got {dropout_p}; attention dropout is not supported: set it to 0, or call torch's SDPA")
    if attn_mask is not None and is_causal:
        raise ValueError("expected attn_mask or is_causal=True, got both; use longspan.attention with mask=your_mask & causal()")
    query, key, value = as_autocast(query, key, value)
    leading = leading_dims(query, key, value, enable_gqa)
    mask: Mask | None = causal() if is_causal else None
    score_mod = None
    q_len, kv_len = query.shape[-2], key.shape[-2]
    if type(attn_mask).__name__ == "CausalBias":  # by name: importing torch.nn.attention.bias imports Triton
        mask, attn_mask = _as_mask(attn_mask, q_len, kv_len), None
    q, k, v = grouped_heads(query, key, value, leading)
    (attn_mask,) = as_autocast(attn_mask)
    table = None if attn_mask is None else _four_dims(attn_mask, (*leading, q_len, kv_len))
    if 0 in q.shape[:2]:
        return _empty_attention(q, k, v, table).reshape(*leading, q_len, v.shape[-1])
    if attn_mask is not None and table is not None:
        lookup = _lookup(table)
        if attn_mask.dtype == torch.bool:
            mask = mask_mod(lambda b, h, q_idx, kv_idx: lookup(b, h, q_idx, kv_idx))
        elif attn_mask.dtype.is_floating_point:
            score_mod = lambda score, b, h, q_idx, kv_idx: score + lookup(b, h, q_idx, kv_idx)  # noqa: E731
        else:
            raise TypeError(f"attn_mask: expected bool or floating point, got {attn_mask.dtype}")
    out, _, _ = attend(q, k, v, AttendOptions(mask=mask, score_mod=score_mod, scale=scale))
    return out if len(leading) == 2 else out.reshape(*leading, q_len, out.shape[-1])


def as_autocast(*tensors: Any) -> tuple[Any, ...]:
    """Arguments cast to the autocast dtype of their device, if autocast is on. float64, integer tensors and None stay as they are."""

    def cast(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
            return x
        kind = x.device.type
        return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x

    return tuple(cast(x) for x in tensors)


def leading_dims(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """The leading dims of the result: those of query, key and value broadcast, with the heads of query if `enable_gqa`."""
    tensors = (query, key, value)
    for name, t in zip(("query", "key", "value"), tensors, strict=True):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(t).__name__}")
        if t.ndim < 2 + enable_gqa:
            expected = "[..., heads, tokens, head_dim] with enable_gqa=True" if enable_gqa else "[..., tokens, head_dim]"
            raise ValueError(f"{name}: expected {expected}, got shape {tuple(t.shape)}")
    sizes = [tuple(t.shape[:-2]) for t in tensors]
    if enable_gqa:
        heads = query.shape[-3]
        for name, t in (("key", key), ("value", value)):
            if t.shape[-3] != heads and (t.shape[-3] == 0 or heads % t.shape[-3]):
                raise ValueError(f"{name}: expected a number of heads that divides the {heads} of query, got {t.shape[-3]}")
        sizes = [(*size[:-1], heads) for size in sizes]
    try:
        return tuple(torch.broadcast_shapes(*sizes))
    except RuntimeError:
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise ValueError(
            f"query, key, value: expected dims before the last two that broadcast, got shapes {shapes}; "
            "pass enable_gqa=True for grouped heads"
        ) from None


def grouped_heads(query: Tensor, key: Tensor, value: Tensor, leading: tuple[int, ...]) -> list[Tensor]:
    """Query [B, H, Q, D], key [B, G, K, D] and value [B, G, K, E] for leading dims (..., H), of which all but H are flattened into B.

    Copies only where broadcast dims are flattened with others, and where key and value have different numbers of heads.
    """
    heads = leading[-1] if leading else 1
    counts = [t.shape[-3] if t.ndim > 2 else 1 for t in (key, value)]
    groups = counts[0] if counts[0] == counts[1] else lcm(*counts)
    grouped = []
    for t, expected in ((query, heads), (key, groups), (value, groups)):
        t = t if t.ndim > 2 else t[None]
        if t.shape[-3] != expected:
            t = t.expand(*t.shape[:-3], expected, -1, -1) if t.shape[-3] == 1 else t.repeat_interleave(expected // t.shape[-3], -3)
        t = t.expand(*leading[:-1], *t.shape[-3:])
        grouped.append(t if t.ndim == 4 else t.reshape(_product(leading[:-1]), *t.shape[-3:]))
    return grouped


def _empty_attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None) -> Tensor:
    """The result where batch or heads are 0, by products without elements: shape, dtype and gradients are those of attention."""
    each = q.shape[1] // max(1, k.shape[1])
    scores = q @ k.repeat_interleave(each, 1).mT
    if table is not None and table.dtype.is_floating_point:
        scores = scores + table.to(q.dtype)
    return scores @ v.repeat_interleave(each, 1)


def _product(sizes: tuple[int, ...]) -> int:
    """The product of sizes, which may be symbolic; 1 if there are none."""
    batch = 1
    for size in sizes:
        batch = batch * size
    return batch


def _as_mask(bias: Any, q_len: int, kv_len: int) -> Mask:
    """The mask of a CausalBias."""
    if (bias.seq_len_q, bias.seq_len_kv) != (q_len, kv_len):
        raise ValueError(f"attn_mask: expected a causal bias for {q_len} × {kv_len} tokens, got {bias.seq_len_q} × {bias.seq_len_kv}")
    if bias.variant.name == "UPPER_LEFT" or q_len == kv_len:
        return causal()
    ahead = kv_len - q_len
    return mask_mod(lambda b, h, q_idx, kv_idx: q_idx + ahead >= kv_idx)


def _four_dims(table: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A mask that broadcasts to `shape` [..., H, Q, K], reshaped to [B or 1, H or 1, Q or 1, K or 1]."""
    sizes = (1,) * (len(shape) - table.ndim) + tuple(table.shape)
    if table.ndim > len(shape) or any(t not in (1, s) for t, s in zip(sizes, shape, strict=True)):
        raise ValueError(f"attn_mask: expected a shape that broadcasts to {shape}, got {tuple(table.shape)}")
    if len(shape) <= 4:
        return table.reshape((1,) * (4 - len(shape)) + sizes)
    batch = sizes[:-3]
    if all(size == 1 for size in batch):
        return table.reshape(1, *sizes[-3:])
    return table.reshape(sizes).expand(*shape[:-3], *sizes[-3:]).reshape(_product(shape[:-3]), *sizes[-3:])


def _lookup(table: Tensor) -> Callable[..., Tensor]:
    """A function (b, h, q, kv) → element of a broadcast mask of four dims, without expanding it."""
    used_dims = [d for d in range(4) if table.shape[d] != 1]
    squeezed = table.reshape([table.shape[d] for d in used_dims])

    def lookup(*index: Tensor) -> Tensor:
        return squeezed[tuple(index[d] for d in used_dims)] if used_dims else squeezed

    return lookup
