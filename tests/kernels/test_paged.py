"""Pages of sequences on one rank and spread over ranks, and the merge of partial results, entry by entry."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan._kernels import paged
from longspan._kernels.paged import PagedKV, PagedWork, QueryRanges, SpreadPages, query_ranges
from longspan._kernels.paged_splits import gathered_keys, merge_ranks

CPU, SIZE, WIDTH = torch.device("cpu"), 4, 6
STARTS, LENGTHS, ROWS = [9, 0, 17], [14, 3, 18], [2, 0, 3]


def pages_of(seed: int = 0, *, shared: bool = False) -> PagedKV:
    """30 pages of 4 tokens, 2 KV heads; 5 rows of 6 pages, no page twice."""
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(30, 2, SIZE, 5, generator=generator)
    v = k[..., :3] if shared else torch.randn(30, 2, SIZE, 3, generator=generator)
    return PagedKV(k=k, v=v, table=torch.randperm(30, generator=generator).int().view(5, WIDTH), shared=shared)


def token(pages: PagedKV, x: Tensor, row: int, position: int) -> Tensor:
    return x[int(pages.table[row, position // SIZE]), :, position % SIZE]


def by_token(pages: PagedKV, row: int, positions: list[int]) -> list[Tensor]:
    return [torch.stack([token(pages, x, row, p) for p in positions], 1) if positions else x[0, :, :0] for x in pages.kv]


def spread(rank: int, ranks: int = 3, shifts: tuple[int, ...] = (0, 1, 5)) -> SpreadPages:
    return SpreadPages(ranks=ranks, rank=rank, shifts=shifts, page_size=SIZE)


def ranges_of(of: SpreadPages | None = None) -> QueryRanges:
    return query_ranges(STARTS, LENGTHS, ROWS, [], CPU, of)[0]


@pytest.mark.parametrize(("start", "stop"), [(0, 24), (0, 3), (4, 8), (5, 7), (6, 17), (11, 12)])
def test_gathered_tokens_are_those_of_the_sequence(start: int, stop: int) -> None:
    pages = pages_of()
    assert all(map(torch.equal, pages.gather(3, start, stop), by_token(pages, 3, list(range(start, stop)))))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize(("start", "stop"), [(0, 24), (0, 3), (4, 8), (5, 7), (6, 17), (11, 12), (23, 24)])
def test_ranks_gather_each_token_once(start: int, stop: int, ranks: int) -> None:
    pages, seen = pages_of(), []
    for rank in range(ranks):
        of = spread(rank, ranks)
        columns = of.local_pages(2, start // SIZE, -(-stop // SIZE))
        assert all((column + 5) % ranks == rank for column in columns)
        k, v, positions = pages.gather_local(3, start, stop, columns)
        assert all(map(torch.equal, (k, v), by_token(pages, 3, positions.tolist())))
        seen += positions.tolist()
    assert sorted(seen) == list(range(start, stop))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rank", [None, 0, 1, 2])
def test_new_tokens_are_written_to_their_pages(rank: int | None, shared: bool) -> None:
    """Of each rank the tokens that it holds; all else stays."""
    pages, of = pages_of(shared=shared), None if rank is None else spread(rank)
    places = [(i, p) for i in range(3) for p in range(STARTS[i], LENGTHS[i])]
    k = torch.randn(len(places), 2, 5)
    v = k[..., :3] if shared else torch.randn(len(places), 2, 3)
    wanted = [x.clone() for x in pages.kv]
    for token_k, token_v, (i, p) in zip(k, v, places, strict=True):
        if of is None or p // SIZE in of.local_pages(i, 0, WIDTH):
            for x, new in zip(wanted, (token_k, token_v), strict=True):
                x[int(pages.table[ROWS[i], p // SIZE]), :, p % SIZE] = new
    pages.write(k, v, ranges_of(of))
    assert all(map(torch.equal, pages.kv, wanted))


@pytest.mark.parametrize(("tokens", "lists"), [(1, True), (256, True), (257, False)])
def test_lists_make_the_ranges_of_few_tokens(tokens: int, lists: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "_token_tensors" if lists else "_token_lists", None)
    assert query_ranges([7], [7 + tokens], [4], [], CPU)[0].positions.tolist() == list(range(7, 7 + tokens))


@pytest.mark.parametrize("few", [True, False])
def test_ranges_of_a_step(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By lists for few tokens, else by tensors."""
    monkeypatch.setattr(paged, "_FEW_TOKENS", 9 if few else 8)
    monkeypatch.setattr(paged, "_token_tensors" if few else "_token_lists", None)
    also = [torch.arange(6).view(2, 3), torch.tensor([7])]
    ranges, copies = query_ranges(STARTS, LENGTHS, ROWS, also, CPU)
    assert all(map(torch.equal, copies, also))
    assert ranges.counts == [5, 3, 1] and ranges.firsts == [0, 5, 8]
    assert (ranges.starts, ranges.lengths, ranges.rows) == (tuple(STARTS), tuple(LENGTHS), tuple(ROWS))
    assert ranges.device_ranges.tolist() == [ROWS, STARTS, LENGTHS, [0, 5, 8]] and ranges.device_ranges.dtype == torch.int32
    assert ranges.positions.tolist() == [9, 10, 11, 12, 13, 0, 1, 2, 17] and ranges.token_rows.tolist() == [2] * 5 + [0] * 3 + [3]
    assert ranges.local_tokens is None and ranges.spread is None
    elsewhere, moved = query_ranges(STARTS, LENGTHS, ROWS, also, torch.device("meta"))
    on_device = (elsewhere.device_ranges, elsewhere.positions, elsewhere.token_rows, *moved)
    assert [(t.device.type, t.shape) for t in on_device] == [
        ("meta", t.shape) for t in (ranges.device_ranges, ranges.positions, ranges.token_rows, *also)
    ]


def test_ranks_hold_each_new_token_once() -> None:
    held = [ranges_of(spread(rank)).local_tokens for rank in range(3)]
    assert sorted(torch.cat(held).tolist()) == list(range(9))  # type: ignore[arg-type]
    # Pages 2 and 3 of the first sequence, 0 of the second and 4 of the third, shifted by 0, 1 and 5.
    assert [t.tolist() for t in held if t is not None] == [[3, 4, 8], [5, 6, 7], [0, 1, 2]]


@pytest.mark.parametrize(("window", "first"), [(None, 0), (1, 40), (5, 36), (41, 0), (42, 0), (60, 0)])
def test_the_first_key_of_a_window(window: int | None, first: int) -> None:
    assert PagedWork(scale=1.0, window=window).first_key(40) == first


@pytest.mark.parametrize("rank", [None, 0, 2])
def test_keys_of_a_sequence_begin_with_a_split(rank: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of 8 tokens; a window of 3 before token 17 begins at token 15, in the second split."""
    from longspan._kernels import paged_splits

    monkeypatch.setattr(paged_splits, "SPLIT", 8)
    pages, of = pages_of(), None if rank is None else spread(rank)
    keys = gathered_keys(pages, ranges_of(of), 2, PagedWork(scale=1.0, window=3))
    columns = range(WIDTH) if of is None else of.local_pages(2, 2, 5)
    wanted = [p for p in range(8, 18) if p // SIZE in columns]
    assert keys.positions.tolist() == wanted and keys.batch_index == 2
    assert all(map(torch.equal, (keys.k, keys.v), by_token(pages, 3, wanted)))


@pytest.mark.parametrize(("start", "first"), [(511, 0), (513, 0), (514, 512), (1025, 512), (1026, 1024)])
def test_splits_have_512_tokens(start: int, first: int) -> None:
    """Wherever a window begins, splits do: a window of 3 tokens."""
    k = torch.randn(1, 2, 1100, 5)
    pages = PagedKV(k=k, v=k, table=torch.zeros(1, 1, dtype=torch.int32))
    keys = gathered_keys(pages, query_ranges([start], [start + 1], [0], [], CPU)[0], 0, PagedWork(scale=1.0, window=3))
    assert keys.positions.tolist() == list(range(first, start + 1)) and torch.equal(keys.k, k[0, :, first : start + 1])


@pytest.mark.parametrize("sink", [None, -3.0, 150.0])
@pytest.mark.parametrize(
    "lse",
    [[0.5, 2.0, -1.0], [-200.0, 150.0, 3.0], [-math.inf, 4.0, -math.inf], [-math.inf] * 3, [1000.0, 999.0, -1000.0]],
)
def test_merged_results_are_those_of_all_ranks(lse: list[float], sink: float | None) -> None:
    """Ranks that saw nothing, and gaps that overflow if they are not subtracted, included."""
    out = torch.randn(3, 1, 5, generator=torch.Generator().manual_seed(1))
    logits = torch.tensor(lse if sink is None else [*lse, sink]).double()
    total = logits.logsumexp(0)
    weights = torch.zeros(3).double() if total == -math.inf else (logits[:3] - total).exp()
    merged: Any = merge_ranks(out, torch.tensor(lse)[:, None], None if sink is None else torch.tensor([sink]))
    torch.testing.assert_close(merged[0], (out * weights[:, None, None]).sum(0).float())
    torch.testing.assert_close(merged[1], total[None].float())
