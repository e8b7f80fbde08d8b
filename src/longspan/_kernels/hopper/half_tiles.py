"""Items of three half tiles: 64 queries for each of three consumer warp groups, out of two neighbouring rows of the block table.

A tile of the block table has 128 queries, so three of its rows make two items: both halves of the first row and the first half of the
second; the second half of the second row and both halves of the third. Of an item, the earlier row is its upper row and the later one its
lower row. The warp groups share KV: the item walks the KV tiles of both rows. KV tiles of the upper row alone come first, KV tiles of the
lower row alone last, so that a warp group skips KV tiles before its first or after its last one and nowhere else.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longspan._derived_cache import DerivedCache
from longspan._kernels.gpu import launch
from longspan._kernels.tiling import Tiling
from longspan._masks.block_table import BlockTable

HALF = 64  # queries of a half tile
# Columns of `HalfTileItems.items`, by name; `hopper.forward_three` reads them.
FIRST_QUERY, UPPER_HALVES, UPPER_END, LOWER_END, UPPER_ALONE, KV_TILES, LOWER_ALONE, FIRST_RUN, COLUMNS = range(9)


class HalfTileItems(NamedTuple):
    """Items of one head, the longest first.

    items: int32 [items, COLUMNS]: the first of its 192 queries, halves of the upper row (1 or 2), end of the queries of the upper row and
    of the lower row (0: the row sees nothing), KV tiles of the upper row alone, all KV tiles, KV tiles of the lower row alone, the first
    run.
    first, last: int32 [runs], the KV tiles of each run. full: int32 [runs], 1 if full for the upper row, plus 2 if full for the lower row.
    """

    items: Tensor
    first: Tensor
    last: Tensor
    full: Tensor

    @property
    def kv_tiles(self) -> Tensor:
        """KV tiles that each item walks."""
        return self.items[:, KV_TILES]


_items: DerivedCache[BlockTable, HalfTileItems] = DerivedCache(2)  # by tilings of KV


def half_tile_items(table: BlockTable, kv_tiles: Tiling) -> HalfTileItems:
    """The items of a table of one head and one batch row, in tiles of 128 queries; cached. Rows that see nothing are in no item."""
    assert table.rows == table.q_tiles
    return _items.get(table, kv_tiles.name, lambda: _half_tile_items(table, kv_tiles))


def _half_tile_items(table: BlockTable, kv_tiles: Tiling) -> HalfTileItems:
    counts = table.tiles_per_row.long()
    triple = torch.arange(-(-table.q_tiles // 3))
    upper = torch.stack([3 * triple, 3 * triple + 1], 1).flatten()  # of each item; the lower row is the next one
    upper_halves = torch.tensor([2, 1]).repeat(len(triple))
    sees = torch.cat([counts, torch.zeros(3, dtype=torch.int64)]) > 0
    start = (2 * upper + upper % 3) * HALF
    upper_end, lower_end = (torch.where(sees[row], table.q_len, 0) for row in (upper, upper + 1))

    kinds = launch.split_runs(table, launch.facts(kv_tiles), positions=False)  # full and partial
    row = torch.cat([torch.repeat_interleave(torch.arange(table.rows), runs.ptr.diff().long()) for runs in kinds])
    run_first, run_last = torch.cat([runs.first for runs in kinds]).long(), torch.cat([runs.last for runs in kinds]).long()
    change = torch.where(torch.arange(len(row)) < len(kinds[0].first), 2, 1)  # 1: visible; 2: full
    # The items of a run's row: a first or third row is in one item, a second one is the lower row of one and the upper row of the next.
    place = row % 3
    events = []
    for is_lower, rows in ((0, place < 2), (1, place > 0)):
        item = row[rows] // 3 * 2 + (place[rows] > is_lower).long()
        for at, by in ((run_first[rows], change[rows]), (run_last[rows] + 1, -change[rows])):
            events.append(torch.stack([item, at, by * (1 - is_lower), by * is_lower], 1))
    item, at, up, low = torch.cat(events).unbind(1)
    order = torch.argsort(item * (table.kv_tiles + 1) + at, stable=True)
    item, at, up, low = item[order], at[order], up[order].cumsum(0), low[order].cumsum(0)
    ends, next_item = torch.cat([at, at.new_zeros(1)])[1:], torch.cat([item, item.new_full((1,), -1)])[1:]
    runs = (ends > at) & ((up > 0) | (low > 0)) & (next_item == item)
    item, first, last, up, low = item[runs], at[runs], ends[runs] - 1, up[runs], low[runs]

    # An item one of whose rows sees nothing: both are the row that sees something.
    alone = ~(sees[upper] & sees[upper + 1])[item]
    up, low = torch.where(alone, torch.maximum(up, low), up), torch.where(alone, torch.maximum(up, low), low)
    zone = torch.where(low == 0, 0, torch.where(up == 0, 3, torch.where((up == 2) & (low == 2), 2, 1)))
    order = torch.argsort((item * 4 + zone) * (table.kv_tiles + 1) + first)
    item, first, last, up, low = item[order], first[order], last[order], up[order], low[order]
    tiles = last + 1 - first

    def total(of: Tensor) -> Tensor:
        return torch.zeros(len(upper), dtype=torch.int64).index_add(0, item, tiles * of)

    begin = torch.bincount(item, minlength=len(upper)).cumsum(0) - torch.bincount(item, minlength=len(upper))
    walked = total(torch.ones_like(tiles))
    columns = [start, upper_halves, upper_end, lower_end, total(low == 0), walked, total(up == 0), begin]  # as FIRST_QUERY, UPPER_HALVES, …
    exists = (walked > 0) & (start < table.q_len)
    kept = torch.argsort(walked * exists, descending=True, stable=True)[: int(exists.sum())]
    full = (up == 2).int() + 2 * (low == 2).int()
    return HalfTileItems(torch.stack(columns, 1)[kept].int().contiguous(), first.int(), last.int(), full)
