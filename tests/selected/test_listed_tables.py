"""Torch BlockMasks whose lists stay on the device, in Triton's interpreter on CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import longspan as ls
from longspan._engine import selected as engine
from longspan._engine import table_cache
from longspan._kernels.gpu import listed_tables
from longspan._kernels.gpu.listed_tables import ListedTables
from longspan._kernels.protocol import Selection

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensors(q_len: int, kv_len: int, *, heads: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((2, heads, q_len, 16), (2, 1, kv_len, 16), (2, 1, kv_len, 24))
    return [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]


def results(q: Tensor, k: Tensor, v: Tensor, mask: Any, kernel: str) -> list[Tensor]:
    out, lse = ls.attention(q, k, v, mask=mask, kernel=kernel, return_lse=True)
    grad = torch.linspace(-1, 1, out.numel(), device=DEVICE).view_as(out)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def random_lists(per_head: bool) -> BlockMask:
    """Lists of 64 × 64 tiles of 150 queries and 200 keys: full tiles that the mask_mod would mask, rows without tiles, padding."""
    generator = torch.Generator().manual_seed(3)
    heads = 2 if per_head else 1
    order = torch.rand(2, heads, 3, 4, generator=generator).argsort(-1).int()
    counts = torch.randint(0, 3, (2, 2, heads, 3), generator=generator, dtype=torch.int32)
    counts[:, 0, 0, 1] = 0
    partial, full = order, order.flip(-1).contiguous()
    return BlockMask.from_kv_blocks(
        counts[0].to(DEVICE), partial.to(DEVICE), counts[1].to(DEVICE), full.to(DEVICE), BLOCK_SIZE=64,
        mask_mod=lambda b, h, q, kv: (q + kv + h) % 3 > 0, seq_lengths=(150, 200),
    )  # fmt: skip


@pytest.fixture
def device_calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call with a BlockMask listed its tiles on the device."""
    used: list[bool] = []
    of_kinds = engine.SelectedCall.of_kinds

    def noted(*args: Any) -> Any:
        call = of_kinds(*args)
        used.append(call is not None and isinstance(call.work.device_tables, ListedTables))
        return call

    monkeypatch.setattr(engine.SelectedCall, "of_kinds", noted)
    return used


@pytest.mark.parametrize("per_head", [False, True])
def test_a_block_mask_gives_the_same_results_as_its_table_on_the_host(per_head: bool, device_calls: list[bool]) -> None:
    q, k, v = tensors(150, 200)
    mask = ls.mask_mod(random_lists(per_head))
    got = results(q, k, v, mask, "triton")
    assert device_calls == [True]
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, results(q, k, v, mask, "dense"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)


def test_a_block_mask_on_the_device_builds_no_block_table_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_cache.TableCache, "tables", None)
    q, k, v = tensors(130, 130)
    lengths = torch.tensor([60, 70], device=DEVICE)
    ids = torch.repeat_interleave(torch.arange(2, device=DEVICE), lengths)
    made = create_block_mask(lambda b, h, i, j: (i >= j) & (ids[i] == ids[j]), None, None, 130, 130, device=DEVICE, BLOCK_SIZE=64)
    got = results(q, k, v, ls.mask_mod(made), "triton")
    for a, b in zip(got, results(q, k, v, ls.causal() & ls.documents([60, 70]), "dense"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_block_mask_of_many_calls_gets_a_table_on_the_host(monkeypatch: pytest.MonkeyPatch, device_calls: list[bool]) -> None:
    assert engine._MAX_LISTED_CALLS == 256
    monkeypatch.setattr(engine, "_MAX_LISTED_CALLS", 1)
    q, k, v = tensors(150, 200)
    mask = ls.mask_mod(random_lists(False))
    first, second = (results(q, k, v, mask, "triton") for _ in range(2))
    assert device_calls == [True]
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_block_mask_of_many_tiles_gets_a_table_on_the_host(monkeypatch: pytest.MonkeyPatch, device_calls: list[bool]) -> None:
    q, k, v = tensors(150, 200)
    per_tile = 14  # bytes; the lists have 2 batch rows, 2 heads, 3 × 4 tiles
    got = []
    for limit in (2 * 2 * 3 * 4 * per_tile, 2 * 2 * 3 * 4 * per_tile - 1):
        monkeypatch.setattr(listed_tables, "MAX_BYTES", limit)
        got.append(results(q, k, v, ls.mask_mod(random_lists(True)), "triton"))
    assert device_calls == [True, False]
    for a, b in zip(*got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_lists_have_room_for_every_tile_and_the_limit_is_a_gib() -> None:
    assert listed_tables.MAX_BYTES == 1 << 30
    kinds = torch.ones(2, 3, 5, 7, dtype=torch.int8, device=DEVICE)
    table = ls.full().block_table(5 * 64, 7 * 64, block=64)
    indices = torch.full((2, 3, 5, 7), -1, dtype=torch.int32, device=DEVICE)
    selection = Selection(indices=indices, granularity=64, q_granularity=64, heads_per_choice=1)
    made = ListedTables(selection=selection, table=table, batch=2, heads=3, dummy=False, kinds=kinds)
    partial, full = made._by_query().full, made._by_query().partial
    assert partial[1].numel() >= 2 * 3 * 5 * 7 and full[1].numel() >= 2 * 3 * 5 * 7


def test_other_block_sizes_and_kernels_take_the_table_on_the_host(device_calls: list[bool]) -> None:
    q, k, v = tensors(96, 96)
    made = create_block_mask(lambda b, h, i, j: i >= j, None, None, 96, 96, device=DEVICE, BLOCK_SIZE=32)
    expected = results(q, k, v, ls.causal(), "dense")
    for kernel in ("triton", "cpu") if DEVICE == "cpu" else ("triton",):
        for a, b in zip(results(q, k, v, ls.mask_mod(made), kernel), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert device_calls == [False]  # asked for triton only


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kernel", ["triton", "hopper"])
def test_a_graph_sees_new_lists_of_a_block_mask(kernel: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 500, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2))
    ids = torch.zeros(500, dtype=torch.int32, device=DEVICE)
    counts, indices = torch.zeros(1, 1, 4, dtype=torch.int32, device=DEVICE), torch.zeros(1, 1, 4, 4, dtype=torch.int32, device=DEVICE)

    def draw(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        counts.copy_(torch.randint(0, 5, counts.shape, generator=generator))
        indices.copy_(torch.rand(indices.shape, generator=generator).argsort(-1))
        ids.copy_(torch.randint(0, 2, ids.shape, generator=generator).sort().values)

    def block_mask() -> BlockMask:
        mod = lambda b, h, i, j: (i >= j) & (ids[i] == ids[j])
        return BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=128, mask_mod=mod, seq_lengths=(500, 500))

    draw(0)
    mask = block_mask()

    def call(mask: BlockMask) -> list[Tensor]:
        out = ls.attention(q, k, v, mask=mask, kernel=kernel)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            call(mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call(mask)
    for seed in (1, 2):
        draw(seed)
        graph.replay()
        for a, b in zip(got, call(block_mask()), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-2)
        assert bool(got[0].any())
