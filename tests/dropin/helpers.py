"""Random tensors, and attention with them on one device and over virtual ranks: shared by the tests of the drop-in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from longspan._dropin.context import Context, context_parallel
from longspan.testing import virtual_world

BATCH, HEADS, DIM = 2, 6, 8


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(q_len: int, kv_len: int | None = None, *, kv_heads: int = HEADS, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Whole q [B, H, Q, D], k and v [B, G, K, D]."""
    kv_len = q_len if kv_len is None else kv_len
    return [
        random(BATCH, HEADS, q_len, DIM, seed=1, dtype=dtype),
        random(BATCH, kv_heads, kv_len, DIM, seed=2, dtype=dtype),
        random(BATCH, kv_heads, kv_len, DIM, seed=3, dtype=dtype),
    ]


def on_one_device(attend: Callable[..., Tensor], tensors: Sequence[Tensor], extra: Sequence[Tensor] = ()) -> list[Tensor]:
    """[out, the gradient of each of tensors and of extra] on one device."""
    inputs = [t.detach().clone().requires_grad_() for t in tensors]
    out = attend(*inputs)
    grads = torch.autograd.grad((out * random(*out.shape, seed=9, dtype=out.dtype)).sum(), [*inputs, *extra])
    return [out.detach(), *grads]


def on_ranks(
    ranks: int,
    attend: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    extra: Sequence[Tensor] = (),
    *,
    context: Callable[[Any], Context] | None = None,
) -> list[Tensor]:
    """[out, gradients] as by `on_one_device`, with tensors sharded along dim 2 by the context. Gradients of `extra` are summed."""

    def rank(mesh: Any) -> list[Tensor]:
        lengths = sorted({t.shape[2] for t in tensors})
        with context(mesh) if context else context_parallel(mesh, seq_len=lengths) as cp:
            shards = [cp.shard(t, 2).detach().requires_grad_() for t in tensors]
            out = attend(*shards)
            grad = cp.shard(random(*out.shape[:2], tensors[0].shape[2], *out.shape[3:], seed=9, dtype=out.dtype), 2)
            grads = torch.autograd.grad((out * grad).sum(), [*shards, *extra])
            return [cp.unshard(out.detach(), 2), *(cp.unshard(g, 2) for g in grads[: len(shards)]), *grads[len(shards) :]]

    results = virtual_world(ranks).run(rank)
    sharded = 1 + len(tensors)
    return results[0][:sharded] + [torch.stack([r[i] for r in results]).sum(0) for i in range(sharded, sharded + len(extra))]


def assert_close(got: Sequence[Tensor], want: Sequence[Tensor], within: float = 1e-12) -> None:
    """Equal shapes, no NaN, and a largest error of `within` relative to the largest value."""
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape and bool(torch.isfinite(g).all())
        assert float((g - w).detach().abs().max()) <= within * max(1.0, float(w.detach().abs().max()))
