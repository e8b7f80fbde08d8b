"""Chosen tiles of 64 queries of heads that Hopper's forward kernel cannot compute in pairs, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.selected.cases import check
from tests.selected.test_gathered_gpu import case_of, record_works

pytest.importorskip("triton")

import longspan as ls
from longspan._kernels.gpu.selected_tables import computes_heads_alone
from longspan._kernels.hopper.config import HOPPER

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER, reason="needs a Hopper GPU"),
]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every call of a test computes heads one by one."""
    works = record_works(monkeypatch)
    yield
    assert works and all(work is not None and computes_heads_alone(work) for work in works)


def choose(shape: tuple[int, ...], blocks: int, seed: int) -> torch.Tensor:
    """Random indices with repeats and −1; rows of no, one and all blocks."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, blocks, shape, generator=generator, dtype=torch.int32)
    indices[torch.rand(shape, generator=generator) < 0.2] = -1
    indices[:, 0, 0] = -1
    indices[:, :, -1] = torch.arange(shape[3]) % blocks
    indices[:, -1, 1, 1:] = -1
    return indices.cuda()


@pytest.mark.parametrize("heads", [(3, 3), (5, 1), (14, 2)])
def test_odd_groups_and_a_causal_mask(heads: tuple[int, int]) -> None:
    mask = ls.selected(choose((1, heads[1], 9, 6), 9, 0), 64, 64) & ls.causal()
    check(case_of(heads, (555, 555), (128, 128), mask), kernel="hopper")


def test_a_choice_of_each_query_head() -> None:
    mask = ls.selected(choose((2, 4, 5, 4), 9, 1), 64, 64)
    check(case_of((4, 2), (300, 517), (128, 128), mask, batch=2, sink=True, by_token=True), kernel="hopper")


def test_whole_tiles_without_another_mask() -> None:
    mask = ls.selected(choose((1, 3, 6, 5), 8, 2), 64, 64)
    check(case_of((3, 3), (384, 512), (128, 128), mask), kernel="hopper")


def test_documents_and_a_window() -> None:
    rest = ls.documents([200, 311]) & ls.causal() & ls.sliding_window(150)
    mask = ls.selected(choose((1, 1, 8, 7), 8, 3), 64, 64) & rest
    check(case_of((3, 3), (511, 511), (64, 64), mask, dtype=torch.float16), kernel="hopper")


def test_a_mask_of_each_head() -> None:
    rest = ls.mask_mod(lambda b, h, q, kv: (q - kv) % (h + 3) != 1)
    mask = ls.selected(choose((1, 2, 4, 4), 4, 4), 64, 64) & rest & ls.causal()
    check(case_of((4, 2), (256, 256), (128, 128), mask), kernel="hopper")


def test_blocks_of_128_keys_and_odd_dims() -> None:
    mask = ls.selected(choose((1, 3, 7, 3), 4, 5), 128, 64) & ls.causal()
    for dims in ((72, 40), (128, 128)):
        check(case_of((3, 3), (430, 430), dims, mask), kernel="hopper")
    check(case_of((3, 3), (430, 430), (64, 128), mask, sink=True), kernel="hopper")


@pytest.mark.parametrize("dims", [(128, 128), (72, 40)])
def test_a_last_block_of_128_keys_of_which_64_exist(dims: tuple[int, int]) -> None:
    mask = ls.selected(choose((1, 3, 3, 2), 2, 10), 128, 64)
    check(case_of((3, 3), (192, 192), dims, mask), kernel="hopper")


def test_one_list_for_all_batch_rows_and_heads() -> None:
    mask = ls.selected(choose((1, 1, 6, 4), 6, 11), 64, 64) & ls.documents([100, 283])
    check(case_of((3, 1), (383, 383), (128, 128), mask, batch=2), kernel="hopper")


@pytest.mark.parametrize("granularity", [64, 128])
def test_deterministic_algorithms(granularity: int) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        mask = ls.selected(choose((1, 3, 6, 2), 3, 12), granularity, 64) & ls.causal()
        check(case_of((3, 3), (333, 333), (128, 128), mask), kernel="hopper")
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_negative_scale() -> None:
    mask = ls.selected(choose((1, 3, 6, 5), 6, 6), 64, 64) & ls.causal()
    q, k, v = (t.detach() for t in case_of((3, 3), (333, 333), (128, 128), mask).tensors.values())
    opposite = ls.attention(-q, k, v, mask=mask, scale=-(128**-0.5), kernel="hopper")
    torch.testing.assert_close(opposite, ls.attention(q, k, v, mask=mask, kernel="hopper"), rtol=0, atol=0.02)


def test_many_items_per_cta() -> None:
    """Rings continue from item to item: 7 heads of 8,192 queries are 896 items."""
    torch.manual_seed(0)
    indices = choose((1, 7, 128, 5), 128, 7)
    q, k, v, grad_out = (torch.randn(1, 7, 8192, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    mask = ls.selected(indices, 64, 64) & ls.causal()
    out, lse = ls.attention(q, k, v, mask=mask, return_lse=True, kernel="hopper")
    other, other_lse = ls.attention(q, k, v, mask=mask, return_lse=True, kernel="triton")
    torch.testing.assert_close(out, other, rtol=0, atol=0.02)
    torch.testing.assert_close(lse, other_lse, rtol=0, atol=1e-3)
    assert torch.equal(out, ls.attention(q, k, v, mask=mask, kernel="hopper"))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    ours, others = (torch.autograd.grad(ls.attention(q, k, v, mask=mask, kernel=name), leaves, grad_out) for name in ("hopper", "triton"))
    for got, expected in zip(ours, others, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0.01 * float(expected.abs().max()))


def test_a_graph_sees_new_indices() -> None:
    indices = choose((1, 3, 6, 4), 6, 8)
    case = case_of((3, 3), (333, 333), (128, 128), ls.selected(indices, 64, 64) & ls.causal())
    q, k, v = (t.detach() for t in case.tensors.values())

    def attend() -> torch.Tensor:
        return ls.attention(q, k, v, mask=ls.selected(indices, 64, 64) & ls.causal(), kernel="hopper")

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    indices.copy_(choose((1, 3, 6, 4), 6, 9))
    graph.replay()
    torch.testing.assert_close(out, attend(), rtol=0, atol=0)
