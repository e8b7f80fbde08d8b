"""Dense float64 attention computed from the mods themselves: the definition of a right result in tests.

The oracle shares no code with the kernels or the tracer. Mods are called through `torch.vmap`, as FlexAttention's eager mode does, and
gradients come from autograd.

Shapes: q [B, H, Q, D], k [B, G, K, D], v [B, G, K, E]; G KV heads serve H query heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from longspan._masks.algebra import MaskLike, as_mask
from longspan._masks.extent import AttentionSizes


class _ScalarIndexing(TorchFunctionMode):
    """Turns `table[i]` into a gather: under vmap, indexing with a mapped scalar is not supported."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            table, index = args
            index = index if isinstance(index, tuple) else (index,)
            if any(isinstance(i, Tensor) for i in index) and all(isinstance(i, Tensor | int) for i in index):
                return torch.ops.aten.index(table, [i if isinstance(i, Tensor) else torch.tensor(i) for i in index])
        return func(*args, **(kwargs or {}))


def _evaluate_mod(fn: Callable[..., Tensor], sizes: tuple[int, int, int, int], device: torch.device, scores: Tensor | None) -> Tensor:
    """A mask_mod, or a score_mod of `scores`, at every (b, h, q_idx, kv_idx): [B, H, Q, K]."""
    score_dims = () if scores is None else (0,)
    for dim in range(3, -1, -1):
        fn = torch.vmap(fn, in_dims=(*score_dims, *(0 if d == dim else None for d in range(4))))
    indices = [torch.arange(n, device=device) for n in sizes]
    with _ScalarIndexing():
        return fn(*indices) if scores is None else fn(scores, *indices)


def _sum_over_visible(weights: Tensor, x: Tensor, visible: Tensor) -> Tensor:
    """Σ_j weights[i, j] · x[j] over visible pairs [B, H, m, d]. A hidden pair adds nothing, not even 0 × NaN."""
    finite = x.isfinite().all(-1, keepdim=True)
    total = torch.where(visible, weights, 0.0) @ torch.where(finite, x, 0.0)
    for j in torch.nonzero(~finite.all(0).all(0).flatten()).flatten().tolist():
        selected = visible[..., j : j + 1] & ~finite[..., j : j + 1, :]
        total = total + torch.where(selected, weights[..., j : j + 1] * x[..., j : j + 1, :], 0.0)
    return total


class _VisibleScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, visible)
        return torch.where(visible, q @ k.mT, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        q, k, visible = ctx.saved_tensors
        return _sum_over_visible(grads[0], k, visible), _sum_over_visible(grads[0].mT, q, visible.mT), None


class _VisibleSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        ctx.save_for_backward(weights, v, visible)
        return _sum_over_visible(weights, v, visible)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        weights, v, visible = ctx.saved_tensors
        return torch.where(visible, grads[0] @ v.mT, 0.0), _sum_over_visible(weights.mT, grads[0], visible.mT), None


def _visible_scores(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """q @ kᵀ of visible pairs, 0 for hidden ones, without gradients between hidden pairs."""
    return cast(Tensor, _VisibleScores.apply(q, k, visible))  # type: ignore[no-untyped-call]


def _visible_sum(weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """weights @ v over visible pairs, without gradients between hidden pairs."""
    return cast(Tensor, _VisibleSum.apply(weights, v, visible))  # type: ignore[no-untyped-call]


@overload
def oracle(
    q: Tensor, k: Tensor, v: Tensor, *, mask: MaskLike | None = None, score_mod: Callable[..., Tensor] | None = None,
    scale: float | None = None, sink: Tensor | None = None, return_lse: Literal[False] = False, dtype: torch.dtype = torch.float64,
) -> Tensor: ...  # fmt: skip
@overload
def oracle(
    q: Tensor, k: Tensor, v: Tensor, *, mask: MaskLike | None = None, score_mod: Callable[..., Tensor] | None = None,
    scale: float | None = None, sink: Tensor | None = None, return_lse: Literal[True], dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: MaskLike | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention by definition: out [B, H, Q, E] in `dtype`, or (out, lse [B, H, Q]).

    Tokens that the mask hides from a row change no bit of the row's results, NaN and inf included.
    Differentiable with respect to q, k, v, sink and the tensors that mods capture. The same computation in a lower `dtype` gives the
    error budget of a kernel in that dtype.
    """
    batch, heads, q_len, dim = q.shape
    kv_len, group = k.shape[2], heads // k.shape[1]
    sizes = (batch, heads, q_len, kv_len)
    query, key, value = q.to(dtype), k.to(dtype).repeat_interleave(group, 1), v.to(dtype).repeat_interleave(group, 1)
    visible = torch.ones(sizes, dtype=torch.bool, device=q.device)
    if mask is not None:
        call = AttentionSizes(batch=batch, heads=heads, kv_heads=k.shape[1], q_len=q_len, kv_len=kv_len)
        visible = _evaluate_mod(as_mask(mask).for_sizes(call, as_table=False), sizes, q.device, None).expand(sizes)
    scores = _visible_scores(query, key, visible) * (1 / math.sqrt(dim) if scale is None else scale)
    if score_mod is not None:
        scores = _evaluate_mod(score_mod, sizes, q.device, scores).to(dtype)
    scores = torch.where(visible, scores, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.to(dtype)[None, :, None, None].expand(batch, heads, q_len, 1)], -1)
    empty = (scores == -torch.inf).all(-1, keepdim=True)  # rows that see no key
    lse = torch.logsumexp(scores.masked_fill(empty, 0.0), -1, keepdim=True)
    weights = torch.where(empty, 0.0, torch.exp(scores - lse))[..., :kv_len]
    out = _visible_sum(weights, value, visible)
    return (out, torch.where(empty, -torch.inf, lse)[..., 0]) if return_lse else out
