"""Samples of pairs: all lie in tiles of the table or in chosen blocks, and corners are among them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

import longspan as ls
from longspan._kernels.gpu import sample_pairs
from longspan._kernels.protocol import Selection
from longspan._kernels.tiling import Tiling
from longspan._masks.block_table import BlockTable

Q_LEN, KV_LEN, BLOCK = 90, 150, (16, 32)


def tiling(length: int, block: int, *, arrays: bool) -> Tiling:
    """Whole tiles, or tiles of 3 rows less, at positions 7 and on."""
    if not arrays:
        return Tiling(length=length, block=block)
    row = torch.arange(0, length, block, dtype=torch.int32)
    count = (length - row).clamp(max=block - 3)
    return Tiling(length=length, block=block, row=row, pos=row + 7, count=count)


def pairs_in_tiles(table: BlockTable, rows: Tiling, columns: Tiling) -> set[tuple[int, ...]]:
    pairs = set()
    for b, h, i, j in (table.to_dense() != 0).nonzero().tolist():
        (_, m, q), (_, n, kv) = rows.span(i), columns.span(j)
        pairs |= {(b, h, q + x, kv + y) for x in range(m) for y in range(n)}
    return pairs


def table_of(batch: int) -> BlockTable:
    lengths = torch.tensor([40, 130, 71])[:batch]
    return ls.mask_mod(lambda b, h, q, kv: (q // 20 >= kv // 33 - 2 * h) & (kv < lengths[b])).block_table(
        Q_LEN, KV_LEN, block=BLOCK, batch=batch, heads=2
    )


def banded_table(batch: int) -> BlockTable:
    """Rows with two runs, of which the first begins past the first keys."""
    return ls.mask_mod(lambda b, h, q, kv: ((kv - q - 30).abs() < 9 + 4 * h) | (kv > 140 + b)).block_table(
        Q_LEN, KV_LEN, block=BLOCK, batch=batch, heads=2
    )


@pytest.mark.parametrize("table_of", [table_of, banded_table])
@pytest.mark.parametrize("arrays", [False, True])
def test_few_pairs_are_all_taken_and_of_many_a_sample_with_the_corners_of_tiles(
    arrays: bool, table_of: Callable[[int], BlockTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    table, rows, columns = table_of(3), tiling(Q_LEN, BLOCK[0], arrays=arrays), tiling(KV_LEN, BLOCK[1], arrays=arrays)
    wanted = pairs_in_tiles(table, rows, columns)
    took = {tuple(pair) for pair in torch.stack(sample_pairs.sampled(table, rows, columns), 1).tolist()}
    assert took == wanted
    assert all(t.dtype == torch.int64 for t in sample_pairs.sampled(table, rows, columns))
    monkeypatch.setattr(sample_pairs, "_PAIRS", 4000)
    sample = torch.stack(sample_pairs.sampled(table, rows, columns), 1).tolist()
    some = {tuple(pair) for pair in sample}
    assert some < wanted and 3000 < len(sample) <= 4000
    for b, h, i, j in (table.to_dense() != 0).nonzero().tolist():
        (_, m, q), (_, n, kv) = rows.span(i), columns.span(j)
        assert {(b, h, q + x, kv + y) for x in (0, m - 1) for y in (0, n - 1)} <= some


def test_a_large_table_has_two_to_the_17_sampled_pairs() -> None:
    """Of 600 rows of 20 tiles, 512 rows and 8 tiles each; around given positions, 16 of them in 16 tiles of 4 heads."""
    table = ls.mask_mod(lambda b, h, q, kv: q >= 0 * h).block_table(16 * 600, 16 * 20, block=16, heads=7)
    rows, columns = Tiling(length=16 * 600, block=16), Tiling(length=16 * 20, block=16)
    assert sample_pairs.sampled(table, rows, columns).q.shape == (1 << 17,)
    _, h, q, kv = sample_pairs.around(table, rows, columns, torch.tensor([5, 900]))
    assert {*h.tolist()} == {0, 2, 4, 6} and {*q.tolist()} == {5, 900} and len(kv) == 4 * 2 * 16 * 16


@pytest.mark.parametrize("tiles", [1024, 1025])
def test_tables_of_up_to_two_to_the_18_pairs_are_taken_whole(tiles: int) -> None:
    table = ls.full().block_table(16 * tiles, 16, block=16)
    pairs = sample_pairs.sampled(table, Tiling(length=16 * tiles, block=16), Tiling(length=16, block=16))
    assert len(pairs.q) == (1 << 18 if tiles == 1024 else 512 * 256)


def test_rows_without_tiles_have_no_pairs() -> None:
    table = ls.mask_mod(lambda b, h, q, kv: (kv <= q) & (q >= 20)).block_table(Q_LEN, KV_LEN, block=BLOCK)
    rows, columns = tiling(Q_LEN, BLOCK[0], arrays=False), tiling(KV_LEN, BLOCK[1], arrays=False)
    b, h, q, kv = sample_pairs.around(table, rows, columns, torch.tensor([3, 11]))
    assert b.numel() == h.numel() == q.numel() == kv.numel() == 0
    *_, q, kv = sample_pairs.around(table, rows, columns, torch.tensor([3, 47, 88]))
    assert {*q.tolist()} == {47, 88}


@pytest.mark.parametrize("table_of", [table_of, banded_table])
@pytest.mark.parametrize("arrays", [False, True])
def test_pairs_around_given_positions_lie_in_their_tiles(arrays: bool, table_of: Callable[[int], BlockTable]) -> None:
    table, rows, columns = table_of(2), tiling(Q_LEN, BLOCK[0], arrays=arrays), tiling(KV_LEN, BLOCK[1], arrays=arrays)
    wanted = pairs_in_tiles(table, rows, columns)
    places = torch.tensor([7, 50, 88])
    pairs = sample_pairs.around(table, rows, columns, places)
    assert all(t.dtype == torch.int64 for t in pairs)
    some = {tuple(pair) for pair in torch.stack(pairs, 1).tolist()}
    assert some <= wanted and {q for *_, q, _ in some} == {7, 50, 88}
    for b, h, place in product(range(2), range(2), (7, 50, 88)):
        seen = [kv for pair in wanted if pair[:3] == (b, h, place) for kv in pair[3:]]
        assert {min(seen), max(seen)} <= {pair[3] for pair in some if pair[:3] == (b, h, place)}


def test_positions_are_all_those_of_tiles() -> None:
    made = sample_pairs.places(tiling(50, 16, arrays=True))
    assert made.tolist() == [start + 7 + i for start, count in ((0, 13), (16, 13), (32, 13), (48, 2)) for i in range(count)]


@pytest.mark.parametrize("rows_of_indices", [1, 3])
def test_chosen_pairs_are_the_corners_of_chosen_blocks(rows_of_indices: int) -> None:
    """3 batch rows, 2 choices of 3 heads each, rows of 4 queries of 14, blocks of 8 keys of 37."""
    indices = torch.randint(-1, 5, (rows_of_indices, 2, 4, 2), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    indices[0, 0, 0] = torch.tensor([4, 0])
    selection = Selection(indices=indices, granularity=8, q_granularity=4, heads_per_choice=3)
    pairs = sample_pairs.chosen_pairs(selection, 14, 37, 3)
    assert all(t.dtype == torch.int64 and t.shape[:2] == (1, 1) for t in pairs)
    made = {tuple(pair) for pair in torch.stack([t.flatten() for t in pairs], 1).tolist()}
    wanted = set()
    for b, choice, row, k in product(range(rows_of_indices), range(2), range(4), range(2)):
        block = int(indices[b, choice, row, k])
        if block >= 0:
            batch = (0, 2) if rows_of_indices == 1 else (b,)
            q, kv = (row * 4, min(row * 4 + 3, 13)), (block * 8, min(block * 8 + 7, 36))
            wanted |= set(product(batch, (choice * 3, choice * 3 + 2), q, kv))
    assert made == wanted
    many = torch.arange(10_000, dtype=torch.int32).view(1, 2, 5, 1000)
    pairs = sample_pairs.chosen_pairs(Selection(indices=many, granularity=8, q_granularity=4, heads_per_choice=3), 14, 80_000, 3)
    assert pairs[0].shape == (1, 1, 16 * (8192 + 2)) and {0, 79_999} <= {*pairs[3].flatten().tolist()}
    nothing = Selection(indices=indices.fill_(-1), granularity=8, q_granularity=4, heads_per_choice=3)
    assert not any(t.numel() for t in sample_pairs.chosen_pairs(nothing, 14, 37, 3))


def test_tiles_of_a_long_row_are_evenly_spread() -> None:
    """The first and the last are among them; a row of fewer tiles repeats its last one."""
    table = ls.causal().block_table(80, 160, block=(40, 10))
    rows, tiles = sample_pairs._tiles_of(table, torch.tensor([0, 1]), 4)
    assert rows.tolist() == [0] * 4 + [1] * 4
    assert tiles.tolist() == [0, 1, 2, 3, 0, 2, 4, 7]
