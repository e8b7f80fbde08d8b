"""Split-KV of a launch's last items: the planning on the host and, on a GPU, the results."""

from __future__ import annotations

import heapq
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.calls import forward
from tests.kernels.test_hopper import on_hopper

import longspan as ls
from longspan._kernels.gpu import launch, workspace
from longspan._kernels.hopper import HopperKernel
from longspan._kernels.hopper.item_order import ItemOrder, simulated_items
from longspan._kernels.hopper.passes import HopperCall
from longspan._kernels.hopper.split_kv import KvSplit, best_split
from longspan._kernels.protocol import Work
from longspan._kernels.tiling import Tiling
from longspan._kernels.triton import TritonKernel
from longspan._masks.block_table import BlockTable
from longspan.testing import oracle

HOPPER = HopperKernel(fallback=TritonKernel())


def block_ranges(split: KvSplit, length: int) -> list[tuple[int, int]]:
    """(first block, end block) of each part of an item, as the kernel computes them."""
    shares = split.wide_part + split.parts - 1
    ends = [length * (split.wide_part + i) // shares for i in range(split.parts)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def end_time(lengths: list[int], ctas: int) -> int:
    """When the last CTA finishes, if each takes the next item as soon as it is free. Each item costs one block more."""
    free = [0] * ctas
    for length in lengths:
        heapq.heapreplace(free, free[0] + length + 1)
    return max(free)


def plan(table: BlockTable, *, heads: int, together: int = 1, ctas: int = 132) -> tuple[KvSplit, list[int]]:
    """(the split of a launch over all heads, `together` at a time, the blocks of its items)."""
    rows = launch.busy_rows(table)
    work = table.tiles_per_row[table.heavy_first[:rows].long()].tolist()
    lengths = [length for _ in range(heads // together) for length in work for _ in range(together)]
    return best_split(lengths[-simulated_items(len(lengths), ctas) :], len(lengths), ctas=ctas)[0], lengths


MASK_OF: dict[str, Any] = {
    "full": ls.full(),
    "causal": ls.causal(),
    "late chunk": ls.mask_mod(lambda b, h, q, kv: q + 5000 >= kv),
    "two kinds of rows": ls.mask_mod(lambda b, h, q, kv: (q >= 1000) | (kv < 3000)),
}


@given(
    st.sampled_from(sorted(MASK_OF)), st.integers(1, 3000), st.integers(1, 20000), st.sampled_from([(9, 1), (32, 8), (6, 3)]),
    st.sampled_from([132, 114, 8, 1]),
)  # fmt: skip
def test_parts_cover_every_item_once_and_the_last_cta_finishes_earlier(
    mask: str, queries: int, keys: int, heads: tuple[int, int], ctas: int
) -> None:
    table = MASK_OF[mask].block_table(queries, keys, block=128)
    split, lengths = plan(table, heads=heads[0], together=heads[1], ctas=ctas)
    assert split.unsplit + split.split_items == len(lengths) and split.items == split.unsplit + split.split_items * split.parts
    if not split.split_items:
        assert split == KvSplit(len(lengths))
        return
    parts = [block_ranges(split, length) for length in lengths[split.unsplit :]]
    for length, each in zip(lengths[split.unsplit :], parts, strict=True):
        assert each[0][0] == 0 and each[-1][1] == length and all(a < b for a, b in each)
        assert [a for a, _ in each[1:]] == [b for _, b in each[:-1]]
    assert split.parts > 1 and split.split_items < ctas
    if len(lengths) <= 4 * ctas:  # then all waves were simulated
        after = [*lengths[: split.unsplit], *(b - a + 2 for nth in zip(*parts, strict=True) for a, b in nth)]
        assert end_time(after, ctas) <= end_time(lengths, ctas) - 4


def test_few_queries_over_many_keys_occupy_all_ctas() -> None:
    assert plan(ls.full().block_table(256, 65536, block=128), heads=32)[0] == KvSplit(0, 64, 2)
    assert plan(ls.full().block_table(100, 65536, block=128), heads=4)[0].parts == 22  # ⌊√512⌋: combining more parts takes longer


def test_launches_that_end_with_short_items_are_not_split_but_late_chunks_are() -> None:
    assert plan(ls.causal().block_table(4096, 4096, block=128), heads=9)[0] == KvSplit(32 * 9)
    late = ls.mask_mod(lambda b, h, q, kv: q + 60000 >= kv).block_table(640, 60640, block=128)
    assert plan(late, heads=9)[0].parts == 2
    # 100 items in the last wave, 14 to 18 thousand keys each, on 132 CTAs.
    middle = ls.mask_mod(lambda b, h, q, kv: q + 14336 >= kv).block_table(4096, 18432, block=128)
    split, lengths = plan(middle, heads=32, together=8)
    assert split.split_items and lengths[0] > 1.2 * lengths[-1]


def softcap(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return 20 * torch.tanh(s / 20) + 0.001 * (q - kv)


MASKS = {
    "full": ls.full(),
    "late chunk": ls.mask_mod(lambda b, h, q, kv: q + 2900 >= kv),
    "later chunk": ls.mask_mod(lambda b, h, q, kv: q + 5000 >= kv),
    "all blocks partial": ls.mask_mod(lambda b, h, q, kv: (q + 2 * kv) % 5 != 0),
    "by batch and head, idle rows": ls.mask_mod(lambda b, h, q, kv: ((kv + h + b) % 3 != 0) & ((q >= 130) | (h > 0))),
}
CASES: list[tuple[str, int, int, int, int, int, int, torch.dtype, bool, bool]] = [
    # mask, batch, heads, kv heads, queries, keys, dim, dtype, score, sink
    ("full", 2, 3, 1, 300, 3001, 128, torch.bfloat16, False, False),
    ("full", 1, 1, 1, 100, 9000, 64, torch.bfloat16, False, True),
    ("full", 1, 10, 5, 1900, 2300, 96, torch.float16, False, False),
    ("full", 1, 18, 2, 999, 2177, 128, torch.bfloat16, True, True),
    ("late chunk", 1, 6, 2, 290, 3190, 128, torch.bfloat16, False, False),
    ("later chunk", 1, 29, 29, 1000, 6000, 64, torch.bfloat16, False, False),  # two parts, the first one wider
    ("full", 1, 25, 5, 1000, 8100, 64, torch.bfloat16, False, True),  # three parts
    ("all blocks partial", 1, 5, 5, 260, 2500, 128, torch.bfloat16, False, True),
    ("all blocks partial", 2, 4, 2, 390, 2700, 64, torch.float16, True, False),
    ("by batch and head, idle rows", 2, 3, 1, 270, 2600, 128, torch.bfloat16, False, False),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mask", "batch", "heads", "kv_heads", "queries", "keys", "dim", "dtype", "scored", "sink"),
    CASES,
    ids=[f"{c[0]} {c[5]}" for c in CASES],
)
def test_split_items_are_right_and_the_same_in_every_run(
    monkeypatch: pytest.MonkeyPatch, mask: str, batch: int, heads: int, kv_heads: int, queries: int, keys: int, dim: int,
    dtype: torch.dtype, scored: bool, sink: bool,
) -> None:  # fmt: skip
    on_hopper()
    splits = record_splits(monkeypatch)
    torch.manual_seed(0)
    shapes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    q, k, v = (torch.randn(batch, h, n, dim, device="cuda", dtype=dtype) for h, n in shapes)
    options = {"mask": MASKS[mask], "score_mod": softcap if scored else None, "sink": torch.randn(heads, device="cuda") if sink else None}

    def run() -> tuple[Tensor, Tensor]:
        return ls.attention(q, k, v, return_lse=True, kernel="hopper", **options)

    out, lse = run()
    assert splits and all(split.split_items for split in splits)
    (want, want_lse), dense = oracle(q, k, v, return_lse=True, **options), oracle(q, k, v, dtype=dtype, **options)
    assert float((out.double() - want).norm()) <= 1.1 * float((dense.double() - want).norm())
    assert torch.allclose(lse.double(), want_lse, atol=1e-3)
    assert all(torch.equal(a, b) for _ in range(10) for a, b in zip(run(), (out, lse), strict=True))


def record_splits(monkeypatch: pytest.MonkeyPatch) -> list[KvSplit]:
    """The list to which the splits of launches prepared from now on are appended."""
    splits = []

    planned = HopperCall._plan_items

    def watching(*args: Any, **options: Any) -> tuple[ItemOrder, KvSplit]:
        order, cut = planned(*args, **options)
        splits.append(cut)
        return order, cut

    monkeypatch.setattr(HopperCall, "_plan_items", watching)
    return splits


@pytest.mark.gpu
@pytest.mark.parametrize("block", [128, 256])
def test_split_items_merge_with_a_state_in_place(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    on_hopper()
    splits = record_splits(monkeypatch)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, n, 128, device="cuda", dtype=torch.bfloat16) for h, n in ((6, 740), (3, 7803), (3, 7803)))
    work = Work(
        table=ls.full().block_table(740, 2601, block=block), q_tiles=Tiling(length=740, block=block),
        kv_tiles=Tiling(length=2601, block=block), scale=0.1, mask=None, mask_captured=[],
    )  # fmt: skip
    state = None
    for i, (k_part, v_part) in enumerate(zip(k.split(2601, 2), v.split(2601, 2), strict=True)):
        state = forward(HOPPER, q, k_part.contiguous(), v_part.contiguous(), work, state=state, final=i == 2, max_scores=False)
    assert state is not None and splits and all(split.split_items for split in splits)
    want, dense = (oracle(q, k, v, mask=ls.full(), scale=0.1, dtype=d) for d in (torch.float64, torch.bfloat16))
    assert float((state.out.double() - want).norm()) <= 1.1 * float((dense.double() - want).norm())


@pytest.mark.gpu
@pytest.mark.parametrize(("queries", "keys", "split_kv"), [(280, 3072, True), (700, 700, False)], ids=["split", "not split"])
def test_a_captured_graph_recomputes_at_every_replay(queries: int, keys: int, split_kv: bool) -> None:
    on_hopper()
    torch.manual_seed(0)
    mask = ls.full() if split_kv else ls.causal()
    given = [
        torch.randn(1, h, n, 128, device="cuda", dtype=torch.bfloat16).requires_grad_() for h, n in ((4, queries), (2, keys), (2, keys))
    ]
    grad = torch.randn(1, 4, queries, 128, device="cuda", dtype=torch.bfloat16)

    def both() -> tuple[Tensor, ...]:
        out = ls.attention(*given, mask=mask, kernel="hopper")
        return (out, *torch.autograd.grad(out, given, grad))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for _ in range(3):
        with torch.no_grad():
            for t in given:
                t.normal_()
        for t in captured:
            t.detach().fill_(float("nan"))
        graph.replay()
        want = both()
        assert torch.equal(captured[0], want[0])
        assert all(torch.allclose(a, b, atol=1e-2, rtol=1e-2) for a, b in zip(captured[1:], want[1:], strict=True))


def test_pooled_zeros_are_used_once_per_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    device, stream, made = torch.device("cuda", 0), SimpleNamespace(number=1), []

    def zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        made.append(torch.full((count,), 0, dtype=dtype))
        return made[-1]

    monkeypatch.setattr(launch, "capturing", lambda device: False)
    monkeypatch.setattr(workspace, "current_raw_stream", lambda device: stream.number)
    monkeypatch.setattr(torch, "zeros", zeros)
    seen: set[int] = set()
    for i in range(3000):
        stream.number = i % 2
        count = 1 + 2 * (i % 66)
        split = workspace.zeroed(count, device)
        assert len(split) == count and split.storage_offset() % 4 == 0 and any(split._base is m for m in made[-2:])
        split += 1  # as a launch does
        places = range(split.data_ptr(), split.data_ptr() + 4 * count, 4)
        assert int(split.max()) == 1 and seen.isdisjoint(places)
        seen.update(places)
    assert len(made) > 4
    monkeypatch.setattr(launch, "capturing", lambda device: True)
    assert workspace.zeroed(5, device)._base is None


@pytest.mark.parametrize("zeros", [(3,), (1, 0), (0, 5), (1, 7), (2, 5000)])
@pytest.mark.parametrize("floats", [(), (0, 0), (64, 4), (64, 0)])
@pytest.mark.parametrize("stream", [None, 1])
def test_a_workspace_has_an_address_for_each_argument_that_is_not_none(
    zeros: tuple[int, ...], floats: tuple[int, ...], stream: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """stream: a known stream outside of captures, as for prepared launches."""
    made: list[tuple[int, int]] = []  # address and number of zeros

    def take(count: int, device: torch.device, *_: int) -> tuple[int, Tensor]:
        tensor = torch.zeros(count, dtype=torch.int32)
        made.append((tensor.data_ptr(), count))
        held.append(tensor)
        return tensor.data_ptr(), tensor

    held: list[Tensor] = []
    monkeypatch.setattr(workspace, "take_zeros", take)
    monkeypatch.setattr(workspace, "_take", take)
    made_for = workspace.Workspace(device=torch.device("cpu"), zeros=zeros, floats=floats)
    addresses, tensors = made_for.addresses(stream)
    assert len(addresses) == made_for.passed == sum(1 for t in made_for.tensors() if t is not None)
    sizes = [n for n in zeros if n]
    assert made[: len(sizes)] == list(zip(addresses, sizes))
    rest = addresses[len(sizes) :]
    if any(floats):
        assert rest == [tensors[-1].data_ptr(), tensors[-1].data_ptr() + 4 * floats[0]] and tensors[-1].numel() == sum(floats)
    else:
        assert rest == addresses[:1] * len(floats)
