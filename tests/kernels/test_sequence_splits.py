"""Queries over the splits of one sequence against the whole score matrix in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longspan._kernels import paged_splits
from longspan._kernels.paged import PagedWork
from longspan._kernels.paged_splits import SequenceKeys, attend_sequence
from longspan._masks.tracing import trace

HEADS, GROUPS, QUERIES, TOKENS, DIM, VALUE_DIM, START = 6, 2, 3, 21, 8, 5, 40
FP32, FP64 = torch.float32, torch.float64
BIAS, LIMIT = torch.linspace(-1, 1, 9, dtype=FP64), torch.tensor([30, 57, 34])


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def by_sequence(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return kv < LIMIT[b]


def biased(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s + BIAS[(q - kv + h) % 9]


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP32, FP64])
@pytest.mark.parametrize(
    ("mask", "score", "sink"), [(None, None, False), (causal, None, True), (by_sequence, biased, True), (None, biased, False)]
)
def test_results_match_in_the_dtype_of_running_results(
    mask: Any, score: Any, sink: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Splits of 8 tokens, the last one short; a sink and a bias of float64."""
    monkeypatch.setattr(paged_splits, "SPLIT", 8)
    generator = torch.Generator().manual_seed(3)
    shapes = ((HEADS, QUERIES, DIM), (GROUPS, TOKENS, DIM), (GROUPS, TOKENS, VALUE_DIM))
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    traced = [None if mod is None else trace(mod, kind) for mod, kind in ((mask, "mask"), (score, "score"))]  # type: ignore[arg-type]
    programs = [None if t is None else t.program for t in traced]
    captured = [() if t is None else t.captured() for t in traced]
    logits = torch.linspace(-2, 3, HEADS, dtype=FP64) if sink else None
    work = PagedWork(
        scale=0.4, mask=programs[0], mask_captured=captured[0], score=programs[1], score_captured=captured[1], sink=logits
    )  # fmt: skip
    positions = torch.arange(22, 22 + TOKENS)
    out, lse = attend_sequence(q, SequenceKeys(k, v, positions, 1), START, work)
    assert out.dtype == lse.dtype == (FP64 if dtype == FP64 else FP32) and out.shape == (HEADS, QUERIES, VALUE_DIM)
    b, h, at = torch.tensor(1), torch.arange(HEADS).view(-1, 1, 1), torch.arange(START, START + QUERIES).view(-1, 1)
    scores = q.double() @ k.double().repeat_interleave(HEADS // GROUPS, 0).mT * 0.4
    scores = scores if score is None else score(scores, b, h, at, positions)
    scores = scores if mask is None else torch.where(mask(b, h, at, positions), scores, -torch.inf)
    total = scores.logsumexp(-1)
    total = total if logits is None else torch.logaddexp(total, logits[:, None])
    want = (scores - total[..., None]).exp() @ v.double().repeat_interleave(HEADS // GROUPS, 0)
    for got, right in ((out, want), (lse, total)):
        torch.testing.assert_close(got.double(), right, rtol=0, atol=1e-5)


def test_no_tokens_give_no_result() -> None:
    q, k, v = torch.randn(HEADS, QUERIES, DIM).double(), torch.zeros(GROUPS, 0, DIM).double(), torch.zeros(GROUPS, 0, VALUE_DIM).double()
    out, lse = attend_sequence(q, SequenceKeys(k, v, torch.arange(0), 0), START, PagedWork(scale=0.4))
    assert out.shape == (HEADS, QUERIES, VALUE_DIM) and not out.any() and lse.shape == (HEADS, QUERIES)
    assert bool((lse == -torch.inf).all()) and out.dtype == lse.dtype == FP64
