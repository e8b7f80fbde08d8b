"""Block tables and runs of tiles by hand: rows, runs, transposes, selections, pictures; ranges of tables and of documents."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan._masks import tile_runs
from longspan._masks.block_table import FULL, BlockTable, Counts, expand_ranges
from longspan._masks.tile_runs import Segments, join_neighbours, row_pointers

SIZES = [(1, 1, 1, 1), (2, 3, 5, 7), (3, 1, 4, 9), (1, 2, 1, 6), (1, 1, 8, 1), (2, 1, 33, 70)]


def table_of(kinds: Tensor, block: tuple[int, int] = (4, 2), **options: Any) -> BlockTable:
    """A table of kinds [batch, heads, q_tiles, kv_tiles], built run by run."""
    batch, heads, q_tiles, kv_tiles = kinds.shape
    ptr, first, last, kind = [0], [], [], []
    for row in kinds.flatten(0, 2).tolist():
        start = 0
        for value, group in itertools.groupby(row):
            length = len(list(group))
            if value:
                first.append(start)
                last.append(start + length - 1)
                kind.append(value)
            start += length
        ptr.append(len(first))
    return BlockTable(
        q_len=q_tiles * block[0] - 1,
        kv_len=kv_tiles * block[1],
        block=block,
        batch=batch,
        heads=heads,
        ptr=torch.tensor(ptr, dtype=torch.int32),
        first=torch.tensor(first, dtype=torch.int32),
        last=torch.tensor(last, dtype=torch.int32),
        kind=torch.tensor(kind, dtype=torch.int8),
        **options,
    )


def random_kinds(*sizes: int, seed: int = 0, empty: float = 0.4) -> Tensor:
    """Kinds with runs of some length: EMPTY with probability `empty`."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.where(torch.rand(sizes, generator=generator) < empty, 0, 1 + (torch.rand(sizes, generator=generator) < 0.6).int())
    repeats = torch.rand(sizes, generator=generator) < 0.5
    for x in range(1, sizes[3]):
        kinds[..., x] = torch.where(repeats[..., x], kinds[..., x - 1], kinds[..., x])
    return kinds.to(torch.int8)


def same(table: BlockTable, expected: BlockTable) -> bool:
    """Whether two tables have the same runs, in the same dtypes."""
    return all(
        torch.equal(a, b) and a.dtype == b.dtype
        for a, b in ((getattr(table, name), getattr(expected, name)) for name in ("ptr", "first", "last", "kind"))
    )


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("empty", [0.0, 0.4, 1.0])
def test_numbers_of_tiles_and_runs_by_kind(sizes, empty):
    kinds = random_kinds(*sizes, empty=empty)
    table, rows = table_of(kinds), kinds.reshape(-1, sizes[3])
    assert (table.q_tiles, table.kv_tiles, table.rows) == (sizes[2], sizes[3], len(rows)) and table.nominal is table
    assert torch.equal(table.to_dense(), kinds) and table.to_dense().dtype == torch.int8
    counts = Counts(*((kinds == kind).sum().item() for kind in range(3)))
    assert table.counts() == counts and table.density == pytest.approx(1 - counts.empty / kinds.numel())
    per_row = (rows > 0).sum(1)
    assert torch.equal(table.tiles_per_row, per_row) and table.tiles_per_row.dtype == torch.int64
    assert table.heavy_first.tolist() == sorted(range(len(rows)), key=lambda r: -per_row[r]) and table.heavy_first.dtype == torch.int32
    for kind in (1, 2):
        only = table_of(torch.where(kinds == kind, kinds, 0))
        runs = table.runs(kind)
        assert all(
            torch.equal(a, b) and a.dtype == b.dtype == torch.int32 for a, b in zip(runs, (only.ptr, only.first, only.last), strict=True)
        )


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("empty", [0.0, 0.4, 1.0])
def test_a_transposed_table_has_the_runs_of_the_transposed_kinds(sizes, empty):
    kinds = random_kinds(*sizes, seed=1, empty=empty)
    table = table_of(kinds, tiles=None if empty else (sizes[2], sizes[3]), mask_mod=lambda b, h, q, kv: (b, h, q, kv))
    transposed = table.transposed
    assert same(transposed, table_of(kinds.mT))
    assert (transposed.q_len, transposed.kv_len, transposed.block) == (table.kv_len, table.q_len, (2, 4))
    assert (transposed.batch, transposed.heads) == sizes[:2]
    assert transposed.tiles == (None if empty else (sizes[3], sizes[2]))
    assert transposed.mask_mod is not None and transposed.mask_mod(1, 2, 3, 4) == (1, 2, 4, 3)
    assert table_of(kinds).transposed.mask_mod is None


@pytest.mark.parametrize("seed", range(6))
def test_a_selection_has_the_runs_of_the_selected_kinds(seed):
    generator = torch.Generator().manual_seed(seed)
    kinds = random_kinds(2, 3, 7, 12, seed=seed)
    table = table_of(kinds)
    q, kv = (torch.randperm(n, generator=generator)[:size] for n, size in ((7, 5), (12, 1 + 2 * seed)))
    if seed % 2:
        kv = kv.sort().values
    for heads in (None, range(1, 3), range(2, 3)):
        selected = table.select(q, kv, heads=heads)
        chosen = kinds if heads is None else kinds[:, heads.start : heads.stop]
        assert same(selected, table_of(chosen[:, :, q][..., kv]))
        assert (selected.q_len, selected.kv_len, selected.block) == (20, 2 * len(kv), (4, 2))
        assert (selected.batch, selected.heads, selected.tiles) == (2, chosen.shape[1], (5, len(kv)))
    one_head = table_of(kinds[:, :1]).select(q, kv, heads=range(4, 6))
    assert one_head.heads == 1 and same(one_head, table_of(kinds[:, :1, q][..., kv]))


def test_a_selection_of_no_tiles_is_empty():
    table = table_of(random_kinds(1, 1, 3, 4, empty=0.0))
    none, one = torch.zeros(0, dtype=torch.int64), torch.tensor([1])
    assert (table.select(none, one).rows, table.select(one, none).ptr.tolist()) == (0, [0, 0])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_block_mask_lists_the_tiles_of_each_kind_in_order(sizes):
    kinds = random_kinds(*sizes, seed=2)
    table = table_of(kinds)
    block_mask = table.to_block_mask()
    for kind, counts, indices in (
        (1, block_mask.kv_num_blocks, block_mask.kv_indices),
        (2, block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    ):
        assert counts is not None and indices is not None
        assert counts.shape == sizes[:3] and indices.shape == sizes and counts.dtype == indices.dtype == torch.int32
        for count, row, of_row in zip(counts.flatten().tolist(), indices.view(-1, sizes[3]), kinds.view(-1, sizes[3]), strict=True):
            listed = (of_row == kind).nonzero()[:, 0].tolist()
            assert row.tolist() == listed + [0] * (sizes[3] - count) and count == len(listed)
    assert block_mask.BLOCK_SIZE == (4, 2) and block_mask.seq_lengths == (table.q_len, table.kv_len)


def test_tables_are_printed_with_sizes_runs_and_density():
    assert repr(table_of(random_kinds(1, 1, 5, 7, empty=0.0))).startswith("BlockTable(19 × 14, block 4 × 2, ")
    kinds = torch.tensor([[[[0, 1, 2], [2, 2, 0]]], [[[1, 1, 1], [0, 0, 0]]]], dtype=torch.int8)
    assert repr(table_of(kinds)) == "BlockTable(7 × 6, block 4 × 2, batch 2, heads 1, 4 runs, density 0.583)"
    assert repr(table_of(kinds.mT.reshape(1, 2, 3, 2))).startswith("BlockTable(11 × 4, block 4 × 2, batch 1, heads 2, ")
    assert str(table_of(kinds)) == f"{table_of(kinds)!r}\n ▒█\n██ "
    assert str(table_of(kinds[:, :, :0])) == repr(table_of(kinds[:, :, :0]))
    assert str(table_of(kinds[..., :0])) == repr(table_of(kinds[..., :0]))


def test_pictures_shade_the_share_of_tiles():
    kinds = torch.tensor(
        [
            [0, 0, 0, 0, 1, 0, 0, 2, 2, 2],
            [0, 0, 0, 1, 1, 0, 0, 2, 2, 2],
            [0, 1, 0, 1, 1, 2, 1, 2, 2, 2],
            [2, 2, 2, 2, 2, 2, 1, 2, 2, 2],
            [2, 2, 0, 2, 0, 0, 0, 0, 0, 1],
        ],
        dtype=torch.int8,
    )[None, None].repeat(2, 1, 1, 1)
    table = table_of(kinds)
    recorded = {
        (32, 64): ["    ▒  ███", "   ▒▒  ███", " ▒ ▒▒█▒███", "██████▒███", "██ █     ▒"],
        (2, 4): ["░▓▒█", "▓▒▒▒"],
        (3, 10): ["   ▒▓  ███", "▒▓▒▓▓█▓███", "██ █     ▒"],
        (5, 3): [" ░█", "░░█", "▒▓█", "█▓█", "▒ ░"],
        (1, 1): ["▒"],
    }
    assert {size: table.picture(*size).splitlines() for size in recorded} == recorded


def test_ranges_are_concatenated():
    first, length = torch.tensor([5, 0, 9, 2]), torch.tensor([2, 0, 1, 3])
    assert expand_ranges(first, length).tolist() == [5, 6, 9, 2, 3, 4]
    assert expand_ranges(first[:0], length[:0]).tolist() == []


def test_runs_are_joined_where_row_tile_and_kind_continue():
    row = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    first, last = torch.tensor([0, 2, 3, 6, 7, 8, 9]), torch.tensor([1, 2, 4, 6, 7, 8, 9])
    kind = torch.tensor([1, 1, 2, 2, 2, 2, 1])
    joined = [x.tolist() for x in join_neighbours(row, first, last, kind)]
    assert joined == [[0, 0, 0, 1, 1], [0, 3, 6, 7, 9], [2, 4, 6, 8, 9], [1, 2, 2, 2, 1]]
    assert [x.tolist() for x in join_neighbours(*(x[:1] for x in (row, first, last, kind)))] == [[0], [0], [1], [1]]
    assert [x.tolist() for x in join_neighbours(*(x[:0] for x in (row, first, last, kind)))] == [[], [], [], []]
    pointers = row_pointers(torch.tensor([0, 2, 2]), 5)
    assert pointers.tolist() == [0, 1, 1, 3, 3, 3] and pointers.dtype == torch.int32


@pytest.mark.parametrize("limit", [1 << 20, 3, 4])
def test_squares_become_runs_of_their_tiles_whenever_they_are_joined(limit, monkeypatch):
    """Squares of 3 × 3 tiles, then single tiles, of two batch rows of 7 × 10 tiles."""
    dense = torch.zeros(14, 10, dtype=torch.int8)
    segments = Segments(rows=14, columns=10)
    joins = []
    join = Segments._join
    monkeypatch.setattr(Segments, "_join", lambda self: (joins.append(len(self._parts)), join(self))[1])
    monkeypatch.setattr(tile_runs, "JOIN_AFTER", limit)
    for offset in (0, 7):
        for row, column, kind in (([0, 0, 2], [0, 1, 3], 2), ([1], [0], 1)):
            segments.add(torch.tensor(row), torch.tensor(column), kind, side=3, row_offset=offset, row_limit=7)
            for r, c in zip(row, column, strict=True):
                dense[offset + 3 * r : offset + min(7, 3 * r + 3), 3 * c : 3 * c + 3] = kind
        singles = torch.tensor([4, 4, 0, 6]), torch.tensor([7, 5, 6, 0])
        segments.add(*singles, 1, row_offset=offset, row_limit=7)
        dense[singles[0] + offset, singles[1]] = 1
    ptr, first, last, kind = segments.table()
    assert [x.dtype for x in (ptr, first, last, kind)] == [torch.int32] * 3 + [torch.int8]
    expected = table_of(dense[None, None])
    assert torch.equal(ptr, expected.ptr) and torch.equal(first, expected.first)
    assert torch.equal(last, expected.last) and torch.equal(kind, expected.kind)
    assert joins == {1 << 20: [6], 3: [1, 3, 4], 4: [2, 3, 3]}[limit]


def test_segments_without_squares_have_no_runs():
    ptr, first, last, kind = Segments(rows=2, columns=5).table()
    assert ptr.tolist() == [0, 0, 0] and ptr.dtype == first.dtype == last.dtype == torch.int32 and kind.dtype == torch.int8
    assert len(first) == len(last) == len(kind) == 0 and first is not last


def test_a_table_has_one_batch_row_and_head_by_default() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    table = BlockTable(
        q_len=3, kv_len=5, block=(2, 2), ptr=torch.zeros(3, dtype=torch.int32), first=none, last=none, kind=none.to(torch.int8)
    )
    assert (table.batch, table.heads, table.rows, table.tiles, table.mask_mod) == (1, 1, 2, None, None)
    assert table.counts() == (6, 0, 0)


def test_a_picture_has_at_most_32_lines_of_64_characters() -> None:
    assert table_of(torch.full((1, 1, 41, 83), FULL)).picture().splitlines() == ["█" * 64] * 32
