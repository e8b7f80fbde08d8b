"""Tiles that selections choose from, and the units of KV that move, against lists of tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan as ls
from longspan._engine import selected_mesh
from longspan._engine.selected_exchange import KVMoves, _packed, _unpacked, kv_moves, needed_blocks
from longspan._engine.selected_grid import SelectionGrid
from longspan._engine.selected_mesh import ShardChoice
from longspan._engine.spec import Spec
from longspan._engine.values import CallOptions, CallTensors
from longspan._masks.tracing import trace

LAYOUTS = {
    "contiguous": ("contiguous", 384, 3),
    "head_tail": ("head_tail", 500, 2),
    "round_robin": ("round_robin", 1000, 2),
    "scattered": (ls.Layout(length=400, rows=((((300, 100), (0, 70)), (), ((200, 100), (70, 130))),)), 400, 3),
}


def plan_of(name: str, rank: int) -> Any:
    layout, tokens, ranks = LAYOUTS[name]
    return ls.plan(ls.causal(), tokens, ls.Mesh.abstract(ranks, rank=rank), layout=layout, strategy="exchange")


def positions_of(edges: Tensor, tiles: Tensor) -> list[int]:
    return [p for t in tiles.tolist() for p in range(int(edges[t]), int(edges[t + 1]))]


def readable(plan: Any, reader: int) -> set[int]:
    """The positions in coarse tiles of which a rank's queries see a key, under a causal mask."""
    edges, queries = plan.data.rank_tiles.kv.edges.tolist(), plan.layout.positions(reader)
    last = int(queries.max()) if len(queries) else -1
    return {p for start, stop in pairwise(edges) if start <= last for p in range(start, stop)}


@pytest.mark.parametrize("granularity", [64, 16, 1])
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_request_the_tiles_that_their_queries_may_see_in_the_order_of_the_owner(name: str, granularity: int) -> None:
    _, tokens, ranks = LAYOUTS[name]
    for rank in range(ranks):
        plan = plan_of(name, rank)
        grid = SelectionGrid.of(plan.data, granularity, 32)
        assert grid.blocks == -(-tokens // granularity)
        edges = grid.fine.edges
        assert grid.block_of.tolist() == [p // granularity for p in edges[:-1].tolist()]
        for other in range(ranks):
            read, served = readable(plan, rank), readable(plan, other)
            theirs = [p for p in plan.layout.positions(other).tolist() if other != rank and p in read]
            mine = [p for p in plan.layout.positions(rank).tolist() if other != rank and p in served]
            assert positions_of(edges, grid.requests[other]) == theirs
            assert positions_of(edges, grid.serves[other]) == mine
        for tile, (first, last) in enumerate(zip(grid.block_spans.first.tolist(), grid.block_spans.last.tolist(), strict=True)):
            blocks = [p // granularity for p in positions_of(grid.tiles.kv.edges, torch.tensor([tile]))]
            assert (first, last) == (blocks[0], blocks[-1])


@pytest.mark.parametrize("row", [128, 32, 1])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_of_queries_are_numbered_in_ascending_order(name: str, row: int) -> None:
    _, tokens, ranks = LAYOUTS[name]
    for rank in range(ranks):
        plan = plan_of(name, rank)
        grid, positions = SelectionGrid.of(plan.data, 16, row), plan.layout.positions(rank).tolist()
        rows = list(dict.fromkeys(p // row for p in positions))
        assert grid.rows.tolist() == rows
        assert (rows if grid.ascending is None else [rows[i] for i in grid.ascending.tolist()]) == sorted(rows)
        assert (grid.ascending is None) == (rows == sorted(rows))
        number = {r: i for i, r in enumerate(sorted(rows))}
        assert grid.local_row.tolist() == [number.get(r, 0) for r in range(-(-tokens // row))]
        spans = zip(grid.q_order.tolist(), grid.row_spans.first.tolist(), grid.row_spans.last.tolist(), strict=True)
        for tile, first, last in spans:
            local = [number[p // row] for p in positions_of(grid.tiles.queries.edges, torch.tensor([tile]))]
            assert (first, last) == (local[0], local[-1])


@pytest.mark.parametrize(
    ("name", "granularity", "unit"),
    [
        ("contiguous", 64, 64), ("contiguous", 128, 128), ("contiguous", 1, 1), ("head_tail", 64, 1), ("head_tail", 4, 4),
        ("scattered", 16, 1), ("scattered", 1, 1),
    ],
)  # fmt: skip
def test_blocks_move_as_a_unit_where_each_is_whole_and_has_one_owner(name: str, granularity: int, unit: int) -> None:
    plan = plan_of(name, 0)
    counts = SelectionGrid.of(plan.data, granularity, 1).fine.count
    assert SelectionGrid.of(plan.data, granularity, 1).unit == unit
    assert (unit == granularity) == bool((counts == granularity).all())


@pytest.mark.parametrize("granularity", [64, 4])
@pytest.mark.parametrize("name", ["contiguous", "head_tail", "scattered"])
def test_both_ends_list_the_chosen_tokens_in_one_order(name: str, granularity: int) -> None:
    (_, _, ranks), sizes = LAYOUTS[name], (2, 3)
    plans = [plan_of(name, rank) for rank in range(ranks)]
    grids = [SelectionGrid.of(plan.data, granularity, 1) for plan in plans]
    generator = torch.Generator().manual_seed(granularity)
    shape = (sizes[0], sizes[1], grids[0].blocks)
    needed = [torch.rand(shape, generator=generator) < 0.3 for _ in range(ranks)]
    moves = [
        kv_moves(grid, needed[r], [needed[o][..., grid.block_of[grid.serves[o]]] for o in range(ranks)], sizes)
        for r, grid in enumerate(grids)
    ]
    decoded = {}
    for rank, (plan, grid, move) in enumerate(zip(plans, grids, moves, strict=True)):
        assert move.unit == grid.unit
        buffer = positions_of(grid.tiles.kv.edges, move.tiles)
        assert move.tokens == len(buffer) and buffer == sorted(buffer)
        places = {"sent": plan.layout.positions(rank).tolist(), "placed": buffer}
        for side, counts in (("sent", move.send_counts), ("placed", move.recv_counts)):
            tokens = [u * move.unit + i for u in getattr(move, side).tolist() for i in range(move.unit)]
            parts = torch.tensor(tokens, dtype=torch.int64).split([n * move.unit for n in counts])
            length = len(places[side])
            for other, part in enumerate(parts):
                where = [(t // length // sizes[1], t // length % sizes[1], places[side][t % length]) for t in part.tolist()]
                decoded[(rank, other) if side == "sent" else (other, rank), side] = where
    for (owner, reader), _ in list(decoded):
        got, read, bits = decoded[(owner, reader), "placed"], readable(plans[0], reader), needed[reader].tolist()
        assert got == decoded[(owner, reader), "sent"]
        tokens = [p for p in plans[0].layout.positions(owner).tolist() if owner != reader and p in read]
        want = {(b, g, p) for b in range(sizes[0]) for g in range(sizes[1]) for p in tokens if bits[b][g][p // granularity]}
        assert set(got) == want and len(got) == len(want)


def test_moves_are_restored_from_their_numbers() -> None:
    moves = KVMoves(
        unit=4, sent=torch.tensor([3, 1, 2]), placed=torch.tensor([5, 0]), send_counts=(0, 2, 1), recv_counts=(2, 0, 0),
        tiles=torch.tensor([7, 9, 11, 20]), tokens=512,
    )  # fmt: skip
    again = KVMoves.of_numbers(moves.numbers())
    assert (again.unit, again.send_counts, again.recv_counts, again.tokens) == (4, (0, 2, 1), (2, 0, 0), 512)
    assert [t.tolist() for t in (again.sent, again.placed, again.tiles)] == [[3, 1, 2], [5, 0], [7, 9, 11, 20]]


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 24])
def test_requests_are_packed_into_bytes(count: int) -> None:
    bits = torch.arange(count) % 3 == 0
    packed = _packed(bits.view(1, 1, -1))
    assert packed.tolist() == [sum(1 << i for i in range(8) if 8 * n + i < count and bits[8 * n + i]) for n in range(-(-count // 8))]
    assert _unpacked(packed, count).dtype == torch.bool and torch.equal(_unpacked(packed, count), bits)


def test_blocks_that_any_query_or_head_needs_are_those_of_its_kv_head() -> None:
    indices = torch.tensor([[[[0, 5]], [[2, -1]], [[2, 2]], [[-1, -1]]], [[[1, 1]], [[1, 3]], [[4, 0]], [[0, 0]]]])  # [2, 4, 1, 2]
    as_sets = lambda needed: [[set(row.nonzero()[:, 0].tolist()) for row in heads] for heads in needed]
    assert as_sets(needed_blocks(indices, 6, 2)) == [[{0, 2, 5}, {2}], [{1, 3}, {0, 4}]]
    assert as_sets(needed_blocks(indices, 6, 4)) == [[{0, 5}, {2}, {2}, set()], [{1}, {1, 3}, {0, 4}, {0}]]
    assert as_sets(needed_blocks(indices.view(2, 1, 4, 2), 6, 2)) == [[{0, 2, 5}], [{0, 1, 3, 4}]]


# ---------------------------------------------------------------------------------------------------------------------- calls


def test_a_choice_of_a_shard_has_its_rows_in_ascending_order() -> None:
    data = plan_of("scattered", 0).data  # tokens 300 to 399, then 0 to 69: rows 9, 10, 11, 12, 0, 1, 2
    indices = torch.arange(2 * 3 * 7).view(2, 3, 7, 1).int()
    choice = ShardChoice.of(data, ls.selected(indices, 16, 32), 6)
    assert choice.grid.rows.tolist() == [9, 10, 11, 12, 0, 1, 2]
    assert torch.equal(choice.indices, indices[:, :, [4, 5, 6, 0, 1, 2, 3]])


@pytest.mark.parametrize(("batch", "choices"), [(1, 1), (1, 3), (2, 1), (2, 6)])
def test_the_program_of_a_choice_depends_on_dims_above_one(batch: int, choices: int) -> None:
    mask = replace(ls.selected(torch.zeros(batch, choices, 4, 2).int(), 16, 32), heads_per_choice=6 // choices)
    form = ShardChoice.of(plan_of("contiguous", 1).data, mask, 6).form
    assert (form.granularity, form.q_granularity, form.heads_per_choice) == (16, 32, 6 // choices)
    assert (form.per_batch, form.per_choice) == (batch > 1, choices > 1)
    assert ShardChoice.of(plan_of("contiguous", 1).data, replace(mask, heads_per_choice=None), 6).form.heads_per_choice == 1


def test_a_choice_takes_four_bytes_for_each_row_and_32_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = CallTensors(q=torch.zeros(2, 6, 1056, 8), k=torch.zeros(2, 3, 1056, 8), v=torch.zeros(2, 3, 1056, 8))
    data = ls.plan(ls.causal(), 1056, ls.Mesh.abstract(1)).data
    mask, options = (
        ls.selected(torch.zeros(2, 3, 33, 5).int(), 1, 32),
        CallOptions(spec=Spec(mask=None, score=None, kernel="auto"), scale=1.0),
    )
    size = 4 * 2 * 3 * 33 * 33  # 1056 blocks of one key are 33 words
    assert selected_mesh.MAX_BITS_BYTES == 4 * 2**30
    monkeypatch.setattr(selected_mesh, "MAX_BITS_BYTES", size)
    assert selected_mesh.checked_selection(data, mask, inputs, options).heads_per_choice == 2
    monkeypatch.setattr(selected_mesh, "MAX_BITS_BYTES", size - 1)
    with pytest.raises(ValueError, match=r"each of 1056 blocks of keys takes 0\.0 GiB on rank 0, expected at most 2\.4.*e-05 GiB"):
        selected_mesh.checked_selection(data, mask, inputs, options)


def test_calls_that_differ_are_described_anew() -> None:
    """Each call differs in one thing; a cached description of another call would compare the wrong call with that of other ranks."""
    data = ls.plan(ls.causal(), 64, ls.Mesh.abstract(1)).data
    zeros = lambda heads, dim=8, dtype=torch.float32: torch.zeros(1, heads, 64, dim, dtype=dtype)
    bias = torch.zeros(4)
    mod = trace(lambda s, b, h, q, kv: s + bias[h], "score").program
    inputs = CallTensors(q=zeros(4), k=zeros(2), v=zeros(2), score_captured=[bias])
    options = CallOptions(spec=Spec(mask=None, score=mod, kernel="auto"), scale=0.5)
    mask = ls.selected(torch.zeros(1, 1, 4, 2).int(), 16, 16)
    calls = [
        (options, inputs, mask, None),
        (options, inputs, mask, (True,)),
        (replace(options, scale=0.25), inputs, mask, None),
        (replace(options, spec=Spec(mask=None, score=None, kernel="auto")), inputs, mask, None),
        (replace(options, spec=Spec(mask=None, score=mod, kernel="cpu")), inputs, mask, None),
        (options, replace(inputs, q=zeros(2)), mask, None),
        (options, replace(inputs, k=zeros(4)), mask, None),
        (options, replace(inputs, v=zeros(2, 16)), mask, None),
        (options, replace(inputs, q=zeros(4, dtype=torch.bfloat16)), mask, None),
        (options, replace(inputs, q=zeros(4).to("meta")), mask, None),
        (options, replace(inputs, sink=torch.zeros(4)), mask, None),
        (options, replace(inputs, sink=torch.zeros(4).double()), mask, None),
        (options, replace(inputs, score_captured=[torch.zeros(5)]), mask, None),
        (options, replace(inputs, score_captured=[torch.zeros(4).double()]), mask, None),
        (options, inputs, ls.selected(torch.zeros(1, 1, 4, 2).int(), 4, 16), None),
        (options, inputs, ls.selected(torch.zeros(1, 1, 4, 2).int(), 16, 4), None),
        (options, inputs, ls.selected(torch.zeros(2, 1, 4, 2).int(), 16, 16), None),
        (options, inputs, ls.selected(torch.zeros(1, 2, 4, 2).int(), 16, 16), None),
    ]  # fmt: skip
    described = [selected_mesh._description(data, o, i, m, n) for o, i, m, n in calls]
    assert len({d.digests for d in described}) == len(calls)
    assert [d.kind for d in described[:2]] == [f"attention over selected keys, {way} pass" for way in ("forward", "backward")]
    assert described[-1].fields["selection"] == "16 keys, 16 queries, 2 choices, batch 1"
    assert described[-2].fields["selection"] == "16 keys, 16 queries, 1 choices, batch 2"
    assert all(selected_mesh._description(data, o, i, m, n) is d for (o, i, m, n), d in zip(calls, described, strict=True))
