"""Parts of a plan's contents: tilings, groups of ranks, digests."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import longspan as ls
from longspan._comm.mesh import Mesh
from longspan._masks.block_table import FULL
from longspan._plan.layout import Layout
from longspan._plan.named_layouts import contiguous, head_tail, stack
from longspan._plan.plan_data import MaskTiling, PlanData, PlannedMask, inner_layout, ulysses_groups
from longspan._plan.tile_grid import TileGrid


def tiling(mask: ls.Mask, queries: Layout, kv: Layout, batch: int = 1, heads: int = 1) -> MaskTiling:
    planned = PlannedMask(text=str(mask), program=mask.traced.program, captured=tuple(mask.traced.captured()))
    return MaskTiling(mask=planned, layouts=(queries, kv), batch=batch, heads=heads)


def tiles_of(table: object) -> set[tuple[int, int, int]]:
    """(row, column, kind) of the tiles of a block table."""
    ptr, first, last, kind = (getattr(table, name).tolist() for name in ("ptr", "first", "last", "kind"))
    return {(row, c, kind[i]) for row in range(len(ptr) - 1) for i in range(ptr[row], ptr[row + 1]) for c in range(first[i], last[i] + 1)}


def test_grids_of_queries_and_kv_are_one_where_both_are_alike() -> None:
    layout, other = contiguous(50, 2, unit=10), head_tail(50, 2, unit=5)
    same = tiling(ls.causal(), layout, layout)
    queries, kv = same.grids((8, 8), 0)
    assert queries is kv and (queries.layout, queries.block) == (layout, 8)
    queries, kv = same.grids((8, 4), 0)
    assert (queries.block, kv.block, kv.layout) == (8, 4, layout)
    queries, kv = tiling(ls.causal(), layout, other).grids((8, 8), 0)
    assert (queries.layout, kv.layout, kv.block) == (layout, other, 8)


@pytest.mark.parametrize("stacked", ["neither", "queries", "kv", "both"])
def test_batch_rows_that_are_laid_out_differently_are_tiled_one_by_one(stacked: str) -> None:
    mask = ls.mask_mod(lambda b, h, q, kv: q // 7 + b + h >= kv // 3)
    one = contiguous(60, 2, unit=10), contiguous(30, 2, unit=5)
    two = stack([one[0], head_tail(60, 2, unit=10)]), stack([head_tail(30, 2, unit=5), one[1]])
    queries = two[0] if stacked in ("queries", "both") else one[0]
    kv = two[1] if stacked in ("kv", "both") else one[1]
    made = tiling(mask, queries, kv, batch=2, heads=3)
    rows = 1 if stacked == "neither" else 2
    assert made.batch_layouts == rows == len(made.all_rows((8, 4)))
    for number, row in enumerate(made.all_rows((8, 4))):
        grids = TileGrid.of(queries, 8, batch_row=number), TileGrid.of(kv, 4, batch_row=number)
        assert torch.equal(row.queries.edges, grids[0].edges) and torch.equal(row.kv.owner, grids[1].owner)
        assert (row.table.batch, row.table.heads) == (2 if rows == 1 else 1, 3)
        expected = set()
        for b in range(row.table.batch):
            for h in range(3):
                seen = mask(torch.full((1, 1), b + number), torch.full((1, 1), h), torch.arange(60)[:, None], torch.arange(30)[None])
                for t in range(grids[0].tiles):
                    for u in range(grids[1].tiles):
                        part = seen[grids[0].edges[t] : grids[0].edges[t + 1], grids[1].edges[u] : grids[1].edges[u + 1]]
                        if part.any():
                            expected.add(((b * 3 + h) * grids[0].tiles + t, u, bool(part.all())))
        assert {(r, c) for r, c, _ in tiles_of(row.table)} == {(r, c) for r, c, _ in expected}
        assert all((r, c, True) in expected for r, c, kind in tiles_of(row.table) if kind == FULL)


def test_masks_say_whether_they_depend_on_batch_rows_and_heads() -> None:
    of = lambda mask: tiling(mask, contiguous(8, 1), contiguous(8, 1)).mask
    masks = [ls.causal(), ls.mask_mod(lambda b, h, q, kv: q > kv + b), ls.mask_mod(lambda b, h, q, kv: q > kv + h)]
    assert [(of(mask).per_batch, of(mask).per_head) for mask in masks] == [(False, False), (True, False), (False, True)]
    full = PlannedMask(text="full", program=None)
    assert (full.per_batch, full.per_head) == (False, False)


def plan_of(axes: tuple[int, ...], names: tuple[str, ...], strategy: str, rank: int = 0, length: int = 600) -> PlanData:
    mesh = Mesh.abstract(axes, rank, names)
    return ls.plan(ls.causal(), length, mesh, strategy=strategy, layout="contiguous", heads=12).data


GROUPS = [
    ((2, 3), ("ulysses", "ring"), "ulysses_ring", [[0, 3], [1, 4], [2, 5]], [0, 1, 2, 0, 1, 2]),
    ((2, 3), ("ring", "ulysses"), "ulysses_ring", [[0, 1, 2], [3, 4, 5]], [0, 0, 0, 1, 1, 1]),
    ((4,), ("cp",), "ring", [[0], [1], [2], [3]], [0, 1, 2, 3]),
    ((4,), ("cp",), "ulysses", [[0, 1, 2, 3]], [0, 0, 0, 0]),
]


@pytest.mark.parametrize(("axes", "names", "strategy", "groups", "coordinates"), GROUPS)
def test_ranks_of_a_group_share_heads(
    axes: tuple[int, ...], names: tuple[str, ...], strategy: str, groups: list[list[int]], coordinates: list[int]
) -> None:
    data = plan_of(axes, names, strategy)
    assert data.groups.tolist() == groups and data.degree == len(groups[0]) and data.kv_coordinates.tolist() == coordinates
    assert ulysses_groups(data.mesh, data.head_axis).tolist() == groups
    assert data.tokens.tolist() == [[layout.local_len(rank) for rank in range(data.mesh.size)] for layout in data.layouts]
    assert data.inner[0] == inner_layout(data.layouts[0], data.mesh, data.head_axis) == data.layouts[0].merged(groups)
    edges, owner = data.rank_tiles.queries.edges.tolist(), data.rank_tiles.queries.owner.tolist()
    assert data.rank_tiles.queries.block == 128 and (data.rank_tiles is data.tiles[0]) == (len(groups[0]) == 1)
    for edge, rank in zip(edges, owner):
        assert any(start <= edge < start + length for start, length in data.layouts[0].segments(rank))


def test_lengths_are_in_words() -> None:
    data = plan_of((2,), ("cp",), "ring")
    assert data.lengths == "600 tokens" and replace(data, kv_len=900).lengths == "600 × 900 tokens"


def test_joining_keeps_the_moves() -> None:
    for strategy in ("ring", "exchange"):
        data = plan_of((4,), ("cp",), strategy, length=4096)
        assert (data.backward_schedule is data.schedule) == (strategy == "exchange")
        assert data.with_joined(data.schedule.joined) is data
        joined = data.with_joined(not data.schedule.joined)
        assert joined.schedule.joined is joined.backward_schedule.joined is (not data.schedule.joined)
        assert (joined.backward_schedule is joined.schedule) == (strategy == "exchange")
        assert torch.equal(joined.backward_schedule.length, data.backward_schedule.length)


def test_digests_of_plans_differ_by_what_ranks_must_share_and_not_by_rank() -> None:
    data = plan_of((4,), ("cp",), "ring", length=4096)
    assert plan_of((4,), ("cp",), "ring", rank=3, length=4096).digest == data.digest
    changed = [
        replace(data, **fields)
        for fields in (
            {"q_len": 7}, {"kv_len": 7}, {"batch": 7}, {"heads": 7}, {"kv_heads": 7}, {"head_dim": 7},
            {"grad_reduce_dtype": torch.float32}, {"mesh": Mesh.abstract(4, 0, ("other",))}, {"head_axis": 0}, {"kv_axis": 1},
            {"layouts": (head_tail(4096, 4), data.layouts[1])}, {"layouts": (data.layouts[0], head_tail(4096, 4))},
            {"mask": replace(data.mask, program=None)}, {"mask": replace(data.mask, program=ls.full().traced.program)},
            {"mask": replace(data.mask, captured=(torch.ones(2),))}, {"mask": replace(data.mask, captured=(torch.zeros(2),))},
            {"schedule": replace(data.schedule, joined=not data.schedule.joined)},
        )
    ]  # fmt: skip
    digests = [data.digest, *(other.digest for other in changed)]
    assert len(set(digests)) == len(digests) - (ls.full().traced.program is None)
    assert replace(data, mask=replace(data.mask, text="other")).digest == data.digest
