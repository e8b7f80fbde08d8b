"""How demands count pairs: points per tile, chunks of tiles, and the sampled positions of large tiles."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan as ls
from longspan._balance import demand as counting
from longspan._balance.demand import Demand, Evaluation, _TileSampler, evaluate, pairs_per_row


def sampled(monkeypatch: pytest.MonkeyPatch, table: Any, mask: ls.Mask, **limits: int) -> tuple[int, list[tuple[list[int], bool]]]:
    """(points per side, the tiles of each evaluation and whether they are cut) for these limits."""
    for name, value in limits.items():
        monkeypatch.setattr(counting, name, value)
    points, parts = [], []

    def pairs(self: _TileSampler, row: Tensor, column: Tensor, *, cut: bool) -> Tensor:
        points.append(self.points)
        parts.append(((row * 100 + column).tolist(), cut))
        return torch.zeros(len(row), dtype=torch.float64)

    monkeypatch.setattr(_TileSampler, "pairs", pairs)
    pairs_per_row(table, mask.traced.program, mask.traced.captured())
    assert len(set(points)) == 1
    return points[0], parts


@pytest.mark.parametrize(("evaluations", "exact", "points"), [
    (4 * 16 * 16, 4 * 64 * 64, 64), (4 * 16 * 16, 4 * 64 * 64 - 1, 16), (4 * 16 * 16 - 1, 0, 8), (4 * 8 * 8, 0, 8), (4 * 8 * 8 - 1, 0, 4),
    (4 * 4 * 4 - 1, 0, 2), (4 * 2 * 2, 0, 2), (4 * 2 * 2 - 1, 0, 1), (3, 0, 1), (1, 0, 1), (1, 4 * 64 * 64, 64),
])  # fmt: skip
def test_the_more_partial_tiles_the_fewer_points_of_each(
    evaluations: int, exact: int, points: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (counting.POINTS, counting.EVALUATIONS, counting.EXACT, counting.CHUNK) == (16, 2**21, 2**22, 2**18)
    table = ls.causal().block_table(256, block=64)  # four partial tiles
    assert sampled(monkeypatch, table, ls.causal(), EVALUATIONS=evaluations, EXACT=exact)[0] == points


def test_pairs_of_partial_tiles_past_the_end_do_not_count_for_the_exact_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    table = ls.causal().block_table(250, block=64)
    limit = 3 * 64 * 64 + 3 * 58 * 64 + 58 * 58  # of three tiles on the diagonal, and of all four in the last row
    assert sampled(monkeypatch, table, ls.causal(), EXACT=limit)[0] == 64
    assert sampled(monkeypatch, table, ls.causal(), EXACT=limit - 1)[0] == 16


@pytest.mark.parametrize(("length", "chunk", "parts"), [
    (640, 4 * 16 * 16, [4, 4, 2]), (640, 5 * 16 * 16 - 1, [4, 4, 2]), (640, 5 * 16 * 16, [5, 5]), (640, 1, [1] * 10), (640, 10**6, [10]),
    (630, 4 * 16 * 16, [4, 4, 1, 4, 4, 2]), (10, 256, [1]),
])  # fmt: skip
def test_tiles_are_evaluated_in_chunks_whole_ones_first(length: int, chunk: int, parts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    table = ls.causal().block_table(length, block=64)
    points, made = sampled(monkeypatch, table, ls.causal(), EXACT=0, CHUNK=chunk)
    tiles = -(-length // 64)
    assert [len(part) for part, _ in made] == parts and points == 16
    whole, cut = ([tile for part, is_cut in made for tile in part if is_cut == want] for want in (False, True))
    assert whole == [101 * t for t in range(length // 64)] and [is_cut for _, is_cut in made] == sorted(is_cut for _, is_cut in made)
    assert (
        sorted(cut) == ([100 * (tiles - 1) + t for t in range(tiles)] if length % 64 else []) and cut[:1] == [101 * (tiles - 1)][: len(cut)]
    )


def test_chunks_of_tiles_that_are_evaluated_pair_by_pair_hold_as_many_tiles_as_pairs_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    table = ls.causal().block_table(60, block=(10, 20))
    counts = [len(part) for part, _ in sampled(monkeypatch, table, ls.causal(), CHUNK=3 * 20 * 20)[1]]
    assert counts == [6] or counts == [3, 3]
    cells = sampled(monkeypatch, table, ls.causal(), CHUNK=2 * 10 * 20)[1]
    assert [len(part) for part, _ in cells] == [2, 2, 2]


def test_cut_tiles_are_evaluated_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 8 or 4 queries by 8, 1 or 4 keys, of which two are whole. 8 × 1 tokens are fewer than 4 × 4."""
    mask = ls.mask_mod(lambda b, h, q, kv: (q + kv) % 3 == 0)
    edges = torch.tensor([0, 8, 12, 20]), torch.tensor([0, 8, 9, 13])
    table = mask.block_table(24, block=8)
    order: list[tuple[int, int]] = []

    def pairs(self: _TileSampler, row: Tensor, column: Tensor, *, cut: bool) -> Tensor:
        order.extend(zip(row.tolist(), column.tolist()))
        assert cut == any(int(side.diff()[at]) < 8 for side, tiles in zip(edges, (row, column)) for at in tiles.tolist())
        return torch.ones(len(row), dtype=torch.float64)

    monkeypatch.setattr(_TileSampler, "pairs", pairs)
    monkeypatch.setattr(counting, "CHUNK", 1)
    got = pairs_per_row(table, mask.traced.program, mask.traced.captured(), edges=edges)
    assert got.tolist() == [3.0, 3.0, 3.0]
    assert order[:2] == [(0, 0), (2, 0)]
    sizes = [int(edges[0].diff()[r] * edges[1].diff()[c]) for r, c in order[2:]]
    assert sizes == [4, 8, 8, 16, 32, 32, 32]


@pytest.mark.parametrize("block", [(8, 8), (6, 8), (8, 3)])
@pytest.mark.parametrize("exact", [True, False])
def test_tiles_with_edges_count_the_pairs_between_them(block: tuple[int, int], exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exact:
        monkeypatch.setattr(counting, "EXACT", 0)  # 16 points for tiles of at most 8 tokens: every pair as well
    q_edges, kv_edges = ([0, *range(block[i] - 1, 40, block[i]), 40] for i in range(2))
    mask = ls.mask_mod(lambda b, h, q, kv: (q * 3 + kv * (h + 2) + 5 * b) % 7 < 3)
    edges = torch.tensor(q_edges), torch.tensor(kv_edges)
    from longspan._masks.classify import TableShape, classify

    shape = TableShape(q_len=40, kv_len=40, block=block, batch=2, heads=3, first_batch=1, edges=edges)
    table = classify(mask.traced.program, mask.traced.captured(), shape)
    got = pairs_per_row(table, mask.traced.program, mask.traced.captured(), edges=edges, first_batch=1).view(2, 3, -1)
    for b in range(2):
        for h in range(3):
            seen = mask(torch.full((1, 1), b + 1), torch.full((1, 1), h), torch.arange(40)[:, None], torch.arange(40)[None])
            assert got[b, h].tolist() == [float(seen[a:z].sum()) for a, z in itertools.pairwise(q_edges)]


@pytest.mark.parametrize(("points", "block", "tokens"), [(4, 8, 8), (4, 8, 5), (4, 10, 10), (4, 10, 7), (3, 10, 1), (16, 8, 8), (16, 8, 3)])
def test_positions_stand_for_all_tokens_of_a_tile(points: int, block: int, tokens: int) -> None:
    edges = torch.tensor([0, block, block + tokens])
    table: Any = type("Table", (), {"block": (block, block)})
    sampler = _TileSampler(table=table, program=None, captured=[], edges=(edges, edges), first_batch=0, points=points)
    tile = torch.tensor([1, 0, 1])
    at, stands = sampler._grid(1, tile, torch.tensor([0, 1, 5]), 5)
    cuts = [i * block // points for i in range(points + 1)] if points < block else list(range(block + 1))
    for t in range(3):
        begin, count = (0, block) if tile[t] == 0 else (block, tokens)
        cells = [max(0, min(count, z) - a) for a, z in itertools.pairwise(cuts)]
        assert stands[:, t].tolist() == cells and sum(cells) == count
        for i, (position, size) in enumerate(zip(at[:, t].tolist(), cells)):
            width = cuts[i + 1] - cuts[i]
            offset = (i * 5 + [0, 1, 5][t]) % width
            expected = begin + cuts[i] + min(offset, max(0, size - 1))
            assert position == min(expected, begin + count - 1)


def test_sampled_pairs_of_blocks_are_those_of_the_cells() -> None:
    """A mask that is constant on cells of 4 × 4 tokens, at 16 points per side of blocks of 64."""
    seen = torch.rand(48, 48, generator=torch.Generator().manual_seed(2)) < 0.5
    mask = ls.mask_mod(lambda b, h, q, kv: seen[q // 4, kv // 4])
    per_cell = seen.double() * 16
    for length in (192, 180):
        table = mask.block_table(length, block=64)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(counting, "EXACT", 0)
            got = pairs_per_row(table, mask.traced.program, mask.traced.captured())
        cells = length // 4
        expected = torch.zeros(48, dtype=torch.float64)
        expected[:cells] = per_cell[:cells, :cells].sum(1)
        assert got.tolist() == expected.view(3, 16).sum(1).tolist()


def test_pairs_are_counted_on_the_host_and_are_float64_for_any_kind_of_tile() -> None:
    seen = torch.arange(12) % 5 < 3
    mask = ls.mask_mod(lambda b, h, q, kv: seen[kv])
    on_a_device: Any = SimpleNamespace(cpu=lambda: seen)
    table = mask.block_table(12, block=4)
    assert pairs_per_row(table, mask.traced.program, [on_a_device]).tolist() == [4 * 8.0] * 3
    for mask in (ls.full(), ls.causal(), ls.sliding_window(8), ~ls.full()):
        table = mask.block_table(12, block=4)
        made = Demand.of(table)
        assert pairs_per_row(table, mask.traced.program).dtype == made.work.dtype == torch.float64
        assert (made.ptr.dtype, made.first.dtype, made.last.dtype) == (torch.int64,) * 3


def test_tiles_that_are_all_cut_are_evaluated_in_chunks_of_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = ls.mask_mod(lambda b, h, q, kv: (q + kv) % 3 == 0)
    table = mask.block_table(256, 10, 64)  # four tiles of 64 × 10 tokens
    assert [len(part) for part, _ in sampled(monkeypatch, table, mask, CHUNK=2 * 64 * 10)[1]] == [2, 2]


def test_estimated_pairs_are_the_same_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 16 points per side of tiles of 128 tokens. Renew the numbers where the points change."""
    monkeypatch.setattr(counting, "EXACT", 0)
    seen = torch.arange(700) * 7 % 11 < 6
    mask = ls.mask_mod(lambda b, h, q, kv: (q >= kv) & (seen[q] | seen[kv]))
    got = pairs_per_row(mask.block_table(700, block=128), mask.traced.program, mask.traced.captured())
    assert got.tolist() == [5248, 21824, 29952, 46272, 58368, 31952]
    assert float(got.sum()) == pytest.approx(194310, rel=0.005)  # pairs counted one by one


def test_demands_of_single_batch_rows_and_errors() -> None:
    mask = ls.mask_mod(lambda b, h, q, kv: (q >= kv) & (kv // 4 != b + h))
    table = mask.block_table(18, block=4, batch=3, heads=2)
    for row in range(3):
        one = Demand.of(table, row=row)
        seen = torch.stack(
            [mask(torch.full((1, 1), row), torch.full((1, 1), h), torch.arange(18)[:, None], torch.arange(18)[None]) for h in (0, 1)]
        )
        for t in range(5):
            read = sorted({int(kv) // 4 for kv in seen[:, t * 4 : t * 4 + 4].any(0).any(0).nonzero()})
            runs = slice(int(one.ptr[t]), int(one.ptr[t + 1]))
            assert [u for a, b in zip(one.first[runs].tolist(), one.last[runs].tolist()) for u in range(a, b + 1)] == read
        assert (one.length, one.unit, one.units) == (18, 4, 5) and one.row_of_run.tolist() == torch.arange(5).repeat_interleave(
            one.ptr.diff()
        ).tolist()
    with pytest.raises(ValueError, match="the table has 3 batch rows, got row 3"):
        Demand.of(table, row=3)
    with pytest.raises(ValueError, match="the table has 3 batch rows, got row -1"):
        Demand.of(table, row=-1)
    alike = ls.causal().block_table(18, block=4)
    assert torch.equal(Demand.of(alike, row=7).work, Demand.of(alike).work)  # one row stands for all
    with pytest.raises(ValueError, match=r"30 in all, got shape \(29,\)"):
        Demand.of(table, torch.ones(29))
    with pytest.raises(ValueError, match="got 18 × 18 tokens in blocks of 4 × 6"):
        Demand.of(ls.causal().block_table(18, block=(4, 6)))
    assert Demand.of(ls.causal().block_table(1, block=4)).work.tolist() == [16.0]


def test_evaluations_have_an_imbalance_a_traffic_and_a_sum() -> None:
    made = Evaluation(work=torch.tensor([3.0, 9.0, 0.0]).double(), received=torch.tensor([2, 0, 5]), tokens=torch.tensor([4, 4, 2]))
    assert made.imbalance == 2.25 and made.traffic == 7 / 3
    total = made + made
    assert total.work.tolist() == [6, 18, 0] and total.received.tolist() == [4, 0, 10] and total.tokens.tolist() == [4, 4, 2]
    idle = Evaluation(work=torch.zeros(2).double(), received=torch.zeros(2, dtype=torch.int64), tokens=torch.tensor([1, 1]))
    assert idle.imbalance == 1.0 and idle.traffic == 0.0
    half = Evaluation(work=torch.tensor([0.5, 0.0]).double(), received=torch.zeros(2, dtype=torch.int64), tokens=torch.tensor([1, 1]))
    assert half.imbalance == 2.0


def test_owners_must_be_ranks_one_per_unit() -> None:
    made = Demand.of(ls.causal().block_table(18, block=4))
    for owner in ([0, 1, 2, 0, -1], [0, 1, 2, 0, 3], [0, 1, 2, 0], [0, 1, 2, 0, 1, 2]):
        with pytest.raises(ValueError, match=rf"evaluate: expected 5 owners in 0 … 2, got shape \({len(owner)},\)"):
            evaluate(made, torch.tensor(owner), 3)
    got = evaluate(made, torch.tensor([0, 1, 2, 0, 1]), 3)
    assert got.tokens.tolist() == [8, 6, 4] and got.received.tolist() == [2, 3, 2]
    nothing = Demand.of((~ls.full()).block_table(18, block=4))
    got = evaluate(nothing, torch.tensor([0, 1, 2, 0, 1]), 3)
    assert got.tokens.tolist() == [8, 6, 4] and got.received.tolist() == [0, 0, 0] and got.work.tolist() == [0, 0, 0]
