"""Whole tensors, what one device computes with them, and the same over virtual ranks: shared by the tests of the drop-in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from longspan._dropin.context import Context, context_parallel
from longspan.testing import virtual_world

BATCH, HEADS, DIM = 2, 6, 8


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(q_len: int, kv_len: int | None = None, *, kv_heads: int = HEADS, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    kv_len = q_len if kv_len is None else kv_len
    return [
        draw(BATCH, HEADS, q_len, DIM, seed=1, dtype=dtype),
        draw(BATCH, kv_heads, kv_len, DIM, seed=2, dtype=dtype),
        draw(BATCH, kv_heads, kv_len, DIM, seed=3, dtype=dtype),
    ]


def alone(attend: Callable[..., Tensor], tensors: Sequence[Tensor], extra: Sequence[Tensor] = ()) -> list[Tensor]:
    """[out, a gradient for each of tensors and of extra] on one device."""
    given = [t.detach().clone().requires_grad_() for t in tensors]
    out = attend(*given)
    grads = torch.autograd.grad((out * draw(*out.shape, seed=9, dtype=out.dtype)).sum(), [*given, *extra])
    return [out.detach(), *grads]


def over(
    ranks: int,
    attend: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    extra: Sequence[Tensor] = (),
    *,
    context: Callable[[Any], Context] | None = None,
) -> list[Tensor]:
    """The same, with tensors sharded along dim 2 by the context. Gradients of `extra` are summed over ranks."""

    def rank(mesh: Any) -> list[Tensor]:
        lengths = sorted({t.shape[2] for t in tensors})
        with context(mesh) if context else context_parallel(mesh, seq_len=lengths) as cp:
            given = [cp.shard(t, 2).detach().requires_grad_() for t in tensors]
            out = attend(*given)
            grad = cp.shard(draw(*out.shape[:2], tensors[0].shape[2], *out.shape[3:], seed=9, dtype=out.dtype), 2)
            grads = torch.autograd.grad((out * grad).sum(), [*given, *extra])
            return [cp.unshard(out.detach(), 2), *(cp.unshard(g, 2) for g in grads[: len(given)]), *grads[len(given) :]]

    found = virtual_world(ranks).run(rank)
    whole = 1 + len(tensors)
    return found[0][:whole] + [torch.stack([f[i] for f in found]).sum(0) for i in range(whole, whole + len(extra))]


def check(got: Sequence[Tensor], want: Sequence[Tensor], within: float = 1e-12) -> None:
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape and bool(torch.isfinite(g).all())
        assert float((g - w).detach().abs().max()) <= within * max(1.0, float(w.detach().abs().max()))
