"""The oracle: dense attention in float64, from the mods themselves.

It shares no code with the kernels, and none with the tracer: mods are called through `torch.vmap`, as torch's own FlexAttention does it in
eager mode, and gradients come from autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _ScalarIndexing(TorchFunctionMode):
    """Under vmap, `table[i]` with a mapped scalar i must be a gather."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            table, index = args
            index = index if isinstance(index, tuple) else (index,)
            if any(isinstance(i, Tensor) for i in index) and all(isinstance(i, Tensor | int) for i in index):
                return torch.ops.aten.index(table, [i if isinstance(i, Tensor) else torch.tensor(i) for i in index])
        return func(*args, **(kwargs or {}))


def _over_all(
    fn: Callable[..., Tensor], batch: int, heads: int, q_len: int, kv_len: int, device: torch.device, score: Tensor | None
) -> Tensor:
    """A mod at every (b, h, q, kv): [B, H, Q, K]."""
    lead = () if score is None else (0,)
    for dim in range(3, -1, -1):
        fn = torch.vmap(fn, in_dims=(*lead, *(0 if d == dim else None for d in range(4))))
    indices = [torch.arange(n, device=device) for n in (batch, heads, q_len, kv_len)]
    with _ScalarIndexing():
        return fn(*indices) if score is None else fn(score, *indices)


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Any = None,
    score_mod: Callable[..., Tensor] | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Any:
    """Attention of q [B, H, Q, D] over k [B, G, K, D] and v [B, G, K, E] by definition; float64 out, or (out, lse).

    Differentiable for q, k, v, sink and whatever the mods capture. `dtype` computes everything in another dtype instead: what an
    error against float64 is to be compared with.
    """
    from longspan._masks.algebra import as_mask

    batch, heads, q_len, dim = q.shape
    kv_len, groups = k.shape[2], heads // k.shape[1]
    query, key, value = q.to(dtype), k.to(dtype).repeat_interleave(groups, 1), v.to(dtype).repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * (1 / math.sqrt(dim) if scale is None else scale)
    if score_mod is not None:
        scores = _over_all(score_mod, batch, heads, q_len, kv_len, q.device, scores).to(dtype)
    if mask is not None:
        seen = _over_all(as_mask(mask), batch, heads, q_len, kv_len, q.device, None)
        scores = torch.where(seen, scores, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.to(dtype)[None, :, None, None].expand(batch, heads, q_len, 1)], -1)
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    lse = torch.logsumexp(scores.masked_fill(nothing, 0.0), -1, keepdim=True)
    weights = torch.where(nothing, 0.0, torch.exp(scores - lse))[..., :kv_len]
    out = weights @ value
    return (out, torch.where(nothing, -torch.inf, lse)[..., 0]) if return_lse else out
