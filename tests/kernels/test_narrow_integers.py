"""Integers of less than 64 bits in masks and score_mods wrap as in torch, on every kernel: one operation per head."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from tests.kernels.integer_cases import COMPARISONS, DTYPES, Operation, table_of
from torch import Tensor

import longspan as ls
from longspan.testing import oracle

COMPILED = [COMPARISONS[i] for i in (0, 1, 2, 3, 4, 6, 7, 12, 16, 18)]
SCORED = [COMPARISONS[i] for i in (0, 1, 4, 6, 16)]  # fewer: backward kernels of long programs take a minute to compile
TOKENS, DIM = 256, 64


def by_head(table: Tensor, operations: Sequence[Operation]) -> Callable[..., Tensor]:
    """The comparison of a head."""

    def compare(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        x, y = table[q], table[kv]
        result = operations[0](x, y, q, kv)
        for head, operation in enumerate(operations[1:], 1):
            result = torch.where(h == head, operation(x, y, q, kv), result)
        return result

    return compare


def tensors(device: str, heads: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, heads, TOKENS, DIM).to(device, dtype) for _ in range(3)]


def wrong_heads(got: Tensor, want: Tensor, tolerance: float) -> list[int]:
    """Heads [1, H, …] that differ."""
    error = (got.double() - want.double()).abs().flatten(2).amax(2)[0]
    return torch.nonzero(~(error <= tolerance)).flatten().tolist()  # type: ignore[no-any-return]


def wrong_masks(kernel: str, dtype: torch.dtype, device: str, of: torch.dtype, operations: Sequence[Operation] = COMPARISONS) -> list[int]:
    """Heads whose comparison hides other pairs than in torch."""
    q, k, v = tensors(device, len(operations), of)
    mask = ls.mask_mod(by_head(table_of(dtype, device, TOKENS), operations))
    got = ls.attention(q, k, v, mask=mask, kernel=kernel)
    return wrong_heads(got, oracle(q.double(), k.double(), v.double(), mask=mask), 0.02)


def wrong_scores(kernel: str, dtype: torch.dtype, device: str, of: torch.dtype) -> list[int]:
    """Heads whose comparison adds to other scores than in torch, in out or in a gradient."""
    compare = by_head(table_of(dtype, device, TOKENS), SCORED)
    leaves = [t.requires_grad_() for t in tensors(device, len(SCORED), of)]

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.where(compare(b, h, q, kv), s, s * 0.5 - 1.0)

    got = ls.attention(*leaves, score_mod=score_mod, kernel=kernel)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    want = oracle(*wide, score_mod=score_mod)
    wrong = wrong_heads(got, want, 0.02)
    for g, w in zip(torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(want.sum(), wide), strict=True):
        wrong += wrong_heads(g, w, 0.1)
    return sorted(set(wrong))


ROWS = {"difference": 1, "negation": 3, "negative constant": 7}


def wrong_rows(kernel: str, dtype: torch.dtype, device: str, of: torch.dtype, names: Sequence[str] = tuple(ROWS)) -> list[str]:
    """Masks of one comparison beside `causal`, which may become bounds by row: names of results that differ."""
    table, wrong = table_of(dtype, device, TOKENS), []
    for name in names:
        operation = COMPARISONS[ROWS[name]]
        mask = ls.causal() & ls.mask_mod(lambda b, h, q, kv, operation=operation: operation(table[q], table[kv], q, kv))
        q, k, v = tensors(device, 1, of)
        got = ls.attention(q, k, v, mask=mask, kernel=kernel)
        if wrong_heads(got, oracle(q.double(), k.double(), v.double(), mask=mask), 0.02):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_narrow_integers_wrap_in_masks(dtype: torch.dtype) -> None:
    assert wrong_masks("cpu", dtype, "cpu", torch.float32) == []
    assert wrong_rows("cpu", dtype, "cpu", torch.float32) == []


def test_narrow_integers_wrap_in_score_mods() -> None:
    assert wrong_scores("cpu", torch.uint8, "cpu", torch.float32) == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16], ids=str)
@pytest.mark.parametrize("kernel", ["triton", "hopper"])
def test_narrow_integers_wrap_in_gpu_code(kernel: str, dtype: torch.dtype) -> None:
    if kernel == "hopper" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    assert wrong_masks(kernel, dtype, "cuda", torch.bfloat16, COMPILED) == []
    if dtype is torch.uint8:
        assert wrong_scores(kernel, dtype, "cuda", torch.bfloat16) == []
        assert wrong_rows(kernel, dtype, "cuda", torch.bfloat16, ["difference"]) == []
