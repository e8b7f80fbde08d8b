"""Tiles of laid-out sequences against the owner and the row of every single position."""

from __future__ import annotations

import pytest
import torch

import longspan as ls
from longspan._plan.layout import Layout
from longspan._plan.tile_grid import TileGrid, coverage, read_tiles

LAYOUTS = {
    "one rank": Layout(length=11, rows=((((0, 11),),),)),
    "last rank first": Layout(length=23, rows=((((9, 14),), ((0, 3), (3, 2)), ((7, 2), (5, 2))),)),
    "ranks without tokens": Layout(length=17, rows=(((), ((4, 6), (0, 4)), (), ((10, 7),), ()),)),
    "two rows": Layout(length=13, rows=((((0, 5),), ((5, 8),)), (((8, 5),), ((6, 2), (0, 6))))),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("block", [1, 3, 4, 16])
def test_a_tile_is_a_range_of_one_segment_up_to_the_next_multiple_of_the_block(name: str, block: int) -> None:
    layout = LAYOUTS[name]
    for batch_row in range(3 if len(layout.rows) == 1 else len(layout.rows)):
        place = {}  # position → owner and row
        starts = set()
        for rank in range(layout.ranks):
            local = 0
            for start, length in layout.segments(rank, batch_row):
                starts.add(start)
                for i in range(length):
                    place[start + i] = (rank, local)
                    local += 1
        edges = sorted(starts | set(range(0, layout.length, block)))
        grid = TileGrid.of(layout, block, batch_row=batch_row)
        if batch_row == 0:
            assert torch.equal(TileGrid.of(layout, block).row, grid.row)
        assert (grid.layout, grid.block, grid.tiles) == (layout, block, len(edges))
        assert grid.edges.tolist() == [*edges, layout.length]
        assert list(zip(grid.owner.tolist(), grid.row.tolist())) == [place[edge] for edge in edges]
        assert grid.count.tolist() == [b - a for a, b in zip(edges, [*edges[1:], layout.length])]
        for rank in range(layout.ranks):
            mine = [t for t, edge in enumerate(edges) if place[edge][0] == rank]
            assert grid.of_rank(rank).tolist() == sorted(mine, key=lambda t: place[edges[t]][1])
        first, end = grid.within(grid.edges[:-1], grid.edges[-1] - grid.edges[:-1])
        assert first.tolist() == list(range(len(edges))) and end.tolist() == [len(edges)] * len(edges)


COVERAGE = [
    ([], [], [], 3, range(2), [[0, 0, 0], [0, 0, 0]]),
    ([0, 1, 1, 0], [0, 1, 2, 2], [2, 3, 3, 4], 4, range(2), [[1, 1, 1, 1], [0, 1, 2, 0]]),
    ([0, 1, 1, 0], [0, 1, 2, 2], [2, 3, 3, 4], 4, range(3), [[1, 1, 1, 1], [0, 1, 2, 0], [0, 0, 0, 0]]),
    ([0, 2, 1, 2], [0, 1, 0, 1], [1, 3, 3, 2], 3, range(2), [[1, 0, 0], [1, 1, 1]]),  # rank 2 is not asked for
    ([0, 2, 1, 2], [0, 1, 0, 1], [1, 3, 3, 2], 3, range(1, 3), [[1, 1, 1], [0, 2, 1]]),
    ([0, 1, 1], [0, 1, 0], [1, 3, 3], 3, range(2, 5), [[0, 0, 0]] * 3),  # nor are ranks 0 and 1
    ([0, 3, 4], [0, 1, 0], [1, 3, 2], 3, range(3, 4), [[0, 1, 1]]),
]


@pytest.mark.parametrize(("rank", "first", "end", "tiles", "ranks", "covered"), COVERAGE)
def test_coverage_counts_runs_per_tile_of_the_ranks_asked_for(
    rank: list[int], first: list[int], end: list[int], tiles: int, ranks: range, covered: list[list[int]]
) -> None:
    columns = [torch.tensor(column, dtype=torch.int64) for column in (rank, first, end)]
    assert coverage(*columns, tiles, ranks).tolist() == covered


@pytest.mark.parametrize(("length", "block", "batch", "heads"), [(7, 8, 2, 3), (20, 8, 2, 3), (33, 4, 2, 3), (33, 4, 1, 1), (7, 8, 1, 1)])
def test_reads_are_united_over_heads_and_batch_rows(length: int, block: int, batch: int, heads: int) -> None:
    mask = ls.mask_mod(lambda b, h, q, kv: (q >= kv) & (kv % (2 + h) == b))
    table = mask.block_table(length, block=block, batch=batch, heads=heads)
    owners = (torch.arange(-(-length // block)) * 2) % 3
    tiles = range(len(owners))
    segments = [tuple((t * block, min(block, length - t * block)) for t in tiles if owners[t] == r) for r in range(3)]
    got = read_tiles(table, TileGrid.of(Layout(length=length, rows=(tuple(segments),)), block), 3)
    q, kv = torch.arange(length)[:, None], torch.arange(length)[None, :]
    expected = torch.zeros(3, len(owners), dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            seen = mask(torch.full((1, 1), b), torch.full((1, 1), h), q, kv)
            for t in tiles:
                for u in tiles:
                    expected[owners[t], u] |= bool(seen[t * block : (t + 1) * block, u * block : (u + 1) * block].any())
    assert torch.equal(got, expected)
