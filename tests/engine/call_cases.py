"""Small calls of `longspan.attention` that tests of prepared calls share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import longspan as ls

CAUSAL = ls.causal()
BIAS = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 40))


def biased(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s + BIAS[kv]


def qkv(dtype: torch.dtype = torch.float32, *, tokens: int = 40, grad: bool = True) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, h, tokens, 16, dtype=dtype, requires_grad=grad) for h in (4, 2, 2)]


def same_as_dense(tensors: list[Tensor], captured: list[Tensor], **options: Any) -> None:
    """Check out, lse and gradients against the dense kernel."""
    results = []
    for kernel in ("auto", "dense"):
        out, lse = ls.attention(*tensors, return_lse=True, **options, kernel=kernel)
        grads = torch.autograd.grad((out * out).sum() + lse.sum(), [*tensors, *captured]) if out.requires_grad else ()
        results.append((out, lse, *grads))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@contextmanager
def deterministic(*, warn_only: bool = False) -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def strided(t: Tensor) -> Tensor:
    return t.detach().transpose(1, 2).contiguous().transpose(1, 2)
