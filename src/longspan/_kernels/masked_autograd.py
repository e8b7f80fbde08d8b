"""Two products over the visible pairs of a mask, differentiable to any order, vmapped and in forward mode.

Hidden pairs contribute exactly 0 to results and gradients, whatever the operands hold there (NaN and inf included). The derivative of
each product consists of the two products again. `seen` is bool and has the shape of the pairs [..., m, n].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longspan._kernels.nonfinite import masked_product


def masked_weighted_sum(a: Tensor, x: Tensor, seen: Tensor) -> Tensor:
    """Σ_j a[i, j] · x[j] over visible pairs: a [..., m, n], x [..., n, d] → [..., m, d]."""
    return _WeightedSum.apply(a, x, seen)  # type: ignore[no-any-return, no-untyped-call]


def masked_outer(x: Tensor, y: Tensor, seen: Tensor) -> Tensor:
    """x[i] · y[j] of visible pairs, 0 for the others: x [..., m, d], y [..., n, d] → [..., m, n]."""
    return _Outer.apply(x, y, seen)  # type: ignore[no-any-return, no-untyped-call]


class _Product(torch.autograd.Function):
    """Base of both functions: saves the operands, and maps over a leading dim."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @classmethod
    def _mapped(cls, info: Any, in_dims: tuple[int | None, ...], *operands: Tensor) -> tuple[Tensor, int]:
        batched = [t.unsqueeze(0) if dim is None else t.movedim(dim, 0) for t, dim in zip(operands, in_dims, strict=True)]
        return cls.apply(*batched), 0  # type: ignore[no-untyped-call]


class _WeightedSum(_Product):
    @staticmethod
    def forward(a: Tensor, x: Tensor, seen: Tensor) -> Tensor:
        return masked_product(torch.matmul, a, x, seen)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        a, x, seen = ctx.saved_tensors
        return masked_outer(grad, x, seen), masked_weighted_sum(a.mT, grad, seen.mT), None

    @staticmethod
    def jvp(ctx: Any, da: Tensor | None, dx: Tensor | None, _: None) -> Tensor:
        a, x, seen = ctx.saved_tensors
        terms = [masked_weighted_sum(w, v, seen) for w, v in ((da, x), (a, dx)) if w is not None and v is not None]
        return sum(terms[1:], terms[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *operands: Tensor) -> tuple[Tensor, int]:
        return _WeightedSum._mapped(info, in_dims, *operands)


class _Outer(_Product):
    @staticmethod
    def forward(x: Tensor, y: Tensor, seen: Tensor) -> Tensor:
        return torch.where(seen, x @ y.mT, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y, seen = ctx.saved_tensors
        return masked_weighted_sum(grad, y, seen), masked_weighted_sum(grad.mT, x, seen.mT), None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dy: Tensor | None, _: None) -> Tensor:
        x, y, seen = ctx.saved_tensors
        terms = [masked_outer(u, w, seen) for u, w in ((dx, y), (x, dy)) if u is not None and w is not None]
        return sum(terms[1:], terms[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *operands: Tensor) -> tuple[Tensor, int]:
        return _Outer._mapped(info, in_dims, *operands)
