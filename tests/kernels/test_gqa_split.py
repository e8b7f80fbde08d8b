"""GQA in the backward pass with few KV heads: the query heads of a KV head are divided among CTAs that would idle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.test_hopper import on_hopper
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

import longspan as ls
from longspan._kernels.hopper.gqa_split import head_parts, parts_in_l2
from longspan._kernels.hopper.makespan import MANY_ITEMS, REFERENCE_CTAS, makespan, mean_tiles
from longspan._kernels.hopper.passes import head_parts_of
from longspan._kernels.protocol import Work
from longspan._kernels.tiling import Tiling
from longspan._masks.block_table import BlockTable
from longspan.testing import oracle


def by_keys(mask: ls.Mask, tokens: int) -> BlockTable:
    return mask.block_table(tokens, tokens, block=128).transposed


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([ls.full(), ls.causal(), ls.sliding_window(700)]), st.integers(1, 9000), st.integers(1, 9), st.integers(1, 12))
def test_heads_are_divided_evenly_and_only_if_that_is_faster(mask: ls.Mask, tokens: int, groups: int, shared: int) -> None:
    table = by_keys(mask, tokens)
    parts = head_parts(table, groups, shared, 256)
    assert shared % parts == 0
    work = sorted(mean_tiles(table), reverse=True)
    if parts > 1:
        assert makespan(work, groups * parts) / parts < makespan(work, groups)
    if groups * len(work) > MANY_ITEMS * REFERENCE_CTAS:
        assert parts == 1


def test_heads_are_divided_with_few_kv_heads_and_tokens() -> None:
    causal = by_keys(ls.causal(), 8192)
    assert head_parts(causal, 1, 8, 256) > 1 and head_parts(causal, 2, 8, 256) > 1  # a layer of 64/8 heads on 8 or 4 devices
    assert head_parts(causal, 8, 4, 256) == head_parts(causal, 32, 1, 256) == head_parts(by_keys(ls.causal(), 131072), 1, 8, 256) == 1


def test_heads_are_not_divided_if_concurrent_launches_fill_the_device() -> None:
    table, tiles = ls.causal().block_table(8192, 8192, block=128), Tiling(length=8192, block=128)
    work = Work(table=table, q_tiles=tiles, kv_tiles=tiles, scale=0.1)
    q, v = (torch.empty(1, heads, 8192, 128) for heads in (8, 1))
    assert head_parts_of(q, v, work) > 1 == head_parts_of(q, v, replace(work, concurrent=True))


@pytest.mark.parametrize(("tokens", "shared", "parts"), [(4096, 8, 1), (32768, 8, 2), (131072, 8, 4), (131072, 6, 2), (131072, 1, 1)])
def test_query_heads_of_chosen_tiles_are_divided_if_l2_does_not_hold_what_items_read(tokens: int, shared: int, parts: int) -> None:
    assert parts_in_l2(tokens, shared, 256) == parts


MASKS: dict[str, Callable[[], ls.Mask]] = {
    "causal": ls.causal,
    "documents": lambda: ls.causal() & ls.documents([300, 1, 512, 450]),
    "by head": lambda: ls.mask_mod(lambda b, h, q, kv: (q >= kv) & (q - kv < 100 * (h + 1))),
}


@pytest.mark.gpu
@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "deterministic"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", MASKS)
def test_gradients_of_divided_heads_are_right(name: str, dim: int, ordered: bool) -> None:
    on_hopper()
    torch.manual_seed(0)
    inputs = [torch.randn(2, h, 1263, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (12, 2, 2)]
    assert head_parts(MASKS[name]().block_table(1263, 1263, block=128, heads=12 if name == "by head" else 1).transposed, 4, 6, 2 * dim) > 1
    torch.use_deterministic_algorithms(ordered)
    try:
        out = ls.attention(*inputs, mask=MASKS[name](), kernel="hopper")
        grad = torch.randn_like(out)
        runs = [torch.autograd.grad(out, inputs, grad, retain_graph=True) for _ in range(10 if ordered else 1)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))

    def of_oracle(dtype: torch.dtype) -> Sequence[Tensor]:
        return torch.autograd.grad(oracle(*inputs, mask=MASKS[name](), dtype=dtype), inputs, grad.to(dtype))

    for got, want, dense in zip(runs[0], of_oracle(torch.float64), of_oracle(torch.bfloat16), strict=True):
        assert float((got.double() - want.double()).norm()) <= 1.1 * float((dense.double() - want.double()).norm())
