"""`flash_attn_func` and `flash_attn_varlen_func` against a dense computation of flash-attn's rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.other_device import OTHER, OtherDevice
from torch import Tensor

from longspan._dropin import flash
from longspan._dropin.flash import flash_attn_func, flash_attn_varlen_func
from longspan._engine.attention import attention
from longspan._masks.algebra import Mask
from longspan._masks.constructors import causal, full, sliding_window

HEADS, KV_HEADS, DIM = 4, 2, 8


def dense(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: tuple[int, int], softcap: float, sink: Tensor | None) -> Tensor:
    """[S, H, D] of one sequence in float64. Query i stands at key i + T - S."""
    queries, keys = q.shape[0], k.shape[0]
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1).double() for x in (k, v))
    scores = torch.einsum("shd,thd->hst", q.double(), k) * DIM**-0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(keys)[None] - torch.arange(queries)[:, None] - (keys - queries)
    seen = torch.ones_like(distance, dtype=torch.bool)
    seen &= (distance <= 0) | (not causal)
    seen &= (distance >= -window[0]) | (window[0] < 0)
    seen &= (distance <= window[1]) | (window[1] < 0)
    scores = scores.masked_fill(~seen, -torch.inf)
    extra = torch.full((HEADS, queries, 1), -torch.inf).double() if sink is None else sink.double()[:, None, None].expand(HEADS, queries, 1)
    weights = torch.cat([scores, extra], -1).softmax(-1).nan_to_num()[..., :-1]
    return torch.einsum("hst,thd->shd", weights, v)


CASES = [
    {"causal": False, "window": (-1, -1), "softcap": 0.0},
    {"causal": True, "window": (-1, -1), "softcap": 0.0},
    {"causal": True, "window": (5, 5), "softcap": 3.0},
    {"causal": False, "window": (5, 3), "softcap": 0.0},
    {"causal": False, "window": (-1, 3), "softcap": 0.0},
    {"causal": False, "window": (4, -1), "softcap": 0.0},
    {"causal": False, "window": (3, 1), "softcap": 0.0},
    {"causal": False, "window": (2, 0), "softcap": 0.0},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("lengths", [[(19, 19)], [(7, 19)], [(2, 19)], [(1, 19)], [(11, 11), (6, 6)], [(11, 13), (1, 9), (5, 5)]], ids=str)
def test_packed_and_plain_sequences(case: dict, lengths: list[tuple[int, int]]) -> None:
    generator = torch.Generator().manual_seed(0)
    queries, keys = (sum(n) for n in zip(*lengths))
    q, k, v = (torch.randn(n, h, DIM, generator=generator) for n, h in ((queries, HEADS), (keys, KV_HEADS), (keys, KV_HEADS)))
    sink = torch.randn(HEADS, generator=generator)
    parts = zip(q.split([n for n, _ in lengths]), k.split([n for _, n in lengths]), v.split([n for _, n in lengths]))
    options = {"causal": case["causal"], "window_size": case["window"], "softcap": case["softcap"], "s_aux": sink}
    want = torch.cat([dense(*part, **case, sink=sink) for part in parts])
    bounds = [torch.tensor([0, *(pair[i] for pair in lengths)], dtype=torch.int32).cumsum(0).int() for i in (0, 1)]
    got = flash_attn_varlen_func(q, k, v, *bounds, max_seqlen_q=19, max_seqlen_k=19, **options)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    if len(lengths) == 1:
        got = flash_attn_func(*(x[None].expand(3, *x.shape) for x in (q, k, v)), **options)
        torch.testing.assert_close(got.double(), want.expand(3, *want.shape), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [(-1, -1), (31, 0)])
@pytest.mark.parametrize("queries", [1, 3])
def test_steps_over_more_and_more_keys_have_one_mask_program(
    queries: int, window: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = []

    def attend(*tensors: Tensor, mask: Mask, **options: Any) -> Tensor:
        programs.append(mask.traced.program.key)
        return attention(*tensors, mask=mask, **options)

    monkeypatch.setattr(flash, "attention", attend)
    for keys in range(40, 45):
        k = torch.randn(2, keys, KV_HEADS, DIM)
        flash_attn_func(torch.randn(2, queries, HEADS, DIM), k, k, causal=True, window_size=window)
    assert len(programs) == 5 and len(set(programs)) == 1


def test_masks_of_equal_lengths_and_without_sides_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[Mask] = []
    monkeypatch.setattr(flash, "attention", lambda q, k, v, *, mask, **options: masks.append(mask) or q)
    q, k = torch.zeros(2, 5, HEADS, DIM), torch.zeros(2, 7, KV_HEADS, DIM)
    flash_attn_func(q, q, q, causal=True)
    flash_attn_func(q, q, q, causal=True, window_size=(3, 0))
    flash_attn_func(q, k, k)
    assert [str(mask) for mask in masks] == [str(causal()), str(causal() & sliding_window(4, 0)), str(full())]


def test_bounds_of_other_integers_and_devices() -> None:
    x, bounds = torch.randn(6, 2, DIM), torch.tensor([0, 2, 6])
    want = flash_attn_varlen_func(x, x, x, bounds, bounds, causal=True)
    assert torch.equal(flash_attn_varlen_func(x, x, x, bounds.int(), bounds, causal=True), want)
    with OtherDevice():
        made = flash._bounds(bounds.int().to(OTHER), "cu_seqlens_q", 6)
        assert made.dtype == torch.int64 and made.tolist() == [0, 2, 6]
        mask = flash._packed(bounds, torch.tensor([0, 3, 8]), 1, 0, OTHER)
        i, j = torch.arange(6)[:, None].to(OTHER), torch.arange(8).to(OTHER)
        seen = mask(i[:1, 0], i[:1, 0], i, j).cpu()
    assert [row.nonzero()[:, 0].tolist() for row in seen] == [[0, 1], [1, 2], [3, 4], [4, 5], [5, 6], [6, 7]]


def test_dropout_and_wrong_bounds_raise() -> None:
    x, bounds = torch.randn(6, 2, DIM), torch.tensor([0, 6])
    with pytest.raises(ValueError, match=r"expected dropout_p=0\.0"):
        flash_attn_func(x[None], x[None], x[None], dropout_p=0.1)
    with pytest.raises(ValueError, match="deterministic=True needs"):
        flash_attn_func(x[None], x[None], x[None], deterministic=True)
    with pytest.raises(ValueError, match=r"expected dropout_p=0\.0, got 0\.1"):
        flash_attn_varlen_func(x, x, x, bounds, bounds, dropout_p=0.1)
    with pytest.raises(ValueError, match="deterministic=True needs"):
        flash_attn_varlen_func(x, x, x, bounds, bounds, deterministic=True)
    with pytest.raises(ValueError, match="expected cu_seqlens_k from 0 to 6, got 0 to 5"):
        flash_attn_varlen_func(x, x, x, bounds, torch.tensor([0, 5]))


@pytest.mark.parametrize(
    ("bounds_q", "bounds_k", "message"),
    [
        ([0, 2, 6], [0, 7], "got 2 in cu_seqlens_q and 1 in cu_seqlens_k"),
        ([1, 6], [0, 7], "expected cu_seqlens_q from 0 to 6, got 1 to 6"),
        ([0, 6], [0, 8], "expected cu_seqlens_k from 0 to 7, got 0 to 8"),
        ([0, 4, 2, 6], [0, 3, 5, 7], r"expected cu_seqlens_q that ascend, got \[0, 4, 2, 6\]"),
        ([[0, 6]], [0, 7], r"expected cu_seqlens_q of shape \[sequences \+ 1\], got \[1, 2\]"),
        ([0, 6], [], r"expected cu_seqlens_k of shape \[sequences \+ 1\], got \[0\]"),
    ],
)
def test_wrong_bounds_of_sequences_raise(bounds_q: list, bounds_k: list[int], message: str) -> None:
    q, k = torch.randn(6, HEADS, DIM), torch.randn(7, KV_HEADS, DIM)
    with pytest.raises(ValueError, match=message):
        flash_attn_varlen_func(q, k, k, torch.tensor(bounds_q).int(), torch.tensor(bounds_k).int())
