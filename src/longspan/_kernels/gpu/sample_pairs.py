"""Samples of (query, key) pairs from the tiles of a block table, for trial evaluations of a program."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longspan._kernels.protocol import Selection
from longspan._kernels.tiling import Tiling
from longspan._masks.block_table import BlockTable

_ROWS, _TILES, _PAIRS = 512, 8, 1 << 17  # at most: table rows, tiles per row, pairs in total
_CELLS = 1 << 13  # at most: chosen blocks
_GROUPS = 4  # at most: batch rows and heads of a table


class Pairs(NamedTuple):
    """Pairs of positions [N], each with its batch row and head of the table, counted from 0."""

    b: Tensor
    h: Tensor
    q: Tensor
    kv: Tensor


def spread(n: int, most: int, of: Tensor | None = None) -> Tensor:
    """At most `most` indices below n, evenly spread, the first and the last included; or those elements of `of`."""
    picked = torch.arange(n) if n <= most else torch.linspace(0, n - 1, most, dtype=torch.float64).long()
    return picked if of is None else of[picked]


def _spans(tiling: Tiling) -> tuple[Tensor, Tensor]:
    """(first position, count) of every tile."""
    if tiling.pos is None or tiling.count is None:
        first = torch.arange(0, tiling.length, tiling.block)
        return first, (tiling.length - first).clamp(max=tiling.block)
    return tiling.pos, tiling.count


def places(tiling: Tiling) -> Tensor:
    """All positions in the tiles of a tiling."""
    first, count = _spans(tiling)
    step = torch.arange(int(count.sum())) - (count.cumsum(0) - count).repeat_interleave(count)
    return first.repeat_interleave(count) + step


def _tiles_of(table: BlockTable, rows: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """(row, tile): up to `most` tiles of each row, evenly spread, the first and the last included. Each row has at least one."""
    end = (table.last - table.first + 1).cumsum(0)
    start = torch.cat([end.new_zeros(1), end])
    many = table.tiles_per_row[rows]
    steps = min(most, int(many.max()))
    nth = torch.arange(steps)
    nth = torch.where(many[:, None] <= steps, nth.minimum(many[:, None] - 1), nth * (many[:, None] - 1) // max(1, steps - 1))
    at = start[table.ptr[rows]][:, None] + nth
    run = torch.searchsorted(end, at, right=True)
    return rows[:, None].expand_as(at).flatten(), (table.first[run] + at - start[run]).flatten()


def sampled(table: BlockTable, q_tiles: Tiling, kv_tiles: Tiling) -> Pairs:
    """Pairs in tiles of the table: all if there are few, else corners and random ones from a fixed seed."""
    area = table.block[0] * table.block[1]
    busy = torch.nonzero(table.tiles_per_row).flatten()
    few = int(table.tiles_per_row.sum()) * area <= 2 * _PAIRS
    row, tile = _tiles_of(table, busy if few else spread(len(busy), _ROWS, of=busy), table.kv_tiles if few else _TILES)
    (q_pos, q_count), (k_pos, k_count) = _spans(q_tiles), _spans(kv_tiles)
    m, n = q_count[row % table.q_tiles][:, None], k_count[tile][:, None]
    if few:
        inner = torch.arange(area)
        i, j = (inner // table.block[1]).minimum(m - 1), (inner % table.block[1]).minimum(n - 1)
    else:
        chance = torch.rand(2, len(row), max(16, _PAIRS // len(row)), generator=torch.Generator().manual_seed(0))
        chance[:, :, :4] = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 1.0]])[:, None]
        i, j = (chance[0] * m).long().minimum(m - 1), (chance[1] * n).long().minimum(n - 1)
    group = (row // table.q_tiles)[:, None].expand_as(i)
    q, kv = q_pos[row % table.q_tiles][:, None] + i, k_pos[tile][:, None] + j
    return Pairs(*(t.flatten() for t in (group // table.heads, group % table.heads, q, kv)))


def around(table: BlockTable, rows: Tiling, columns: Tiling, places: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(b, h, position, other position): the given positions of rows, each with a sample of positions in its tiles."""
    first, count = _spans(rows)
    at = ((first <= places[:, None]) & (places[:, None] < first + count)).int().argmax(1)
    groups = spread(table.batch * table.heads, _GROUPS)
    wanted = (groups[:, None] * table.q_tiles + at).flatten()
    places = places.repeat(len(groups))[table.tiles_per_row[wanted] > 0]
    wanted = wanted[table.tiles_per_row[wanted] > 0]
    if not len(wanted):
        return (places[:0],) * 4
    row, tile = _tiles_of(table, wanted, 2 * _TILES)
    first, count = _spans(columns)
    other = first[tile][:, None] + (torch.linspace(0, 1, 16) * (count[tile][:, None] - 1)).long()
    here = places.repeat_interleave(len(row) // len(wanted))[:, None].expand_as(other)
    group = (row // table.q_tiles)[:, None].expand_as(other)
    return (group // table.heads).flatten(), (group % table.heads).flatten(), here.flatten(), other.flatten()


def chosen_pairs(selection: Selection, q_len: int, kv_len: int, batch: int) -> list[Tensor]:
    """b, h, q, kv [1, 1, N] of chosen pairs: the corners of chosen blocks, those of the first and the last blocks of keys included."""
    indices = selection.indices.cpu()
    cells = (indices.flatten() >= 0).nonzero()[:, 0]
    if not len(cells):
        return [cells.view(1, 1, -1)] * 4
    entries = indices.flatten()[cells]
    cells = torch.cat([spread(len(cells), _CELLS, of=cells), cells[entries.argmin()][None], cells[entries.argmax()][None]])
    block, row = indices.flatten()[cells], cells // indices.shape[3]
    choice, b = row // indices.shape[2] % indices.shape[1], row // indices.shape[2] // indices.shape[1]
    first_q, first_kv = row % indices.shape[2] * selection.q_granularity, block * selection.granularity
    corners = torch.tensor([[e, c, i, j] for e in (0, 1) for c in (0, 1) for i in (0, 1) for j in (0, 1)])[:, :, None]
    every_batch, end_h, end_q, end_kv = corners.unbind(1)
    b = torch.where(every_batch > 0, batch - 1, 0) if indices.shape[0] == 1 else b
    h = choice * selection.heads_per_choice + end_h * (selection.heads_per_choice - 1)
    q = (first_q + end_q * (selection.q_granularity - 1)).clamp(max=q_len - 1)
    kv = (first_kv + end_kv * (selection.granularity - 1)).clamp(max=kv_len - 1)
    return [t.flatten().view(1, 1, -1) for t in torch.broadcast_tensors(b, h, q, kv)]
