"""A fixed order in which key tiles are added to dQ, so that its bits do not change from run to run.

CTAs take key tiles from a counter in the order of `DqOrder.order`, and each query tile of dQ accumulates them in that order. A CTA waits
only for CTAs that took their item earlier, so that the first never waits and there is no deadlock, however many CTAs run at once.

Each item's queries are walked upwards. An item does not wait if the items before it reach its queries earlier: under a causal mask, items
that start together should be taken from the last key tile to the first.

  order        key tiles                                          under a causal mask
  descending   from the last to the first, head after head        no waits, but the longest items come last: SMs idle at the end
  waves        of all heads, as many as run at once, then the     no waits in a descending wave, whose items end one after the other, and
               next; the first wave descending, the second        short ones in the ascending wave after it, whose items end together;
               ascending, and so on                               CTAs of a head walk the same queries, which stay in L2

H200, causal, 32,768 tokens, 16 heads over 4, head dim 128, speed over that of the unordered mode: waves 0.97, descending 0.81, a separate
dQ kernel 0.82. Descending, with all heads together: 0.56.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from longspan._derived_cache import DerivedCache
from longspan._kernels.gpu import launch
from longspan._kernels.hopper.makespan import MANY_ITEMS, REFERENCE_CTAS, makespan, mean_tiles
from longspan._masks.block_table import BlockTable, expand_ranges

KeyTileOrder = Literal["descending", "waves"]

MAX_TILES = 2**22  # tiles of a table: one int32 each, counted once (0.4 s for 2 million)
MIN_DENSITY = 0.25  # share of tiles in the table. In sparser ones, such as packed documents, CTAs wait for other heads and documents
# Least `OrderChoice.efficiency` for which an order beats a separate dQ kernel. Speed over that of the unordered mode, H200, causal: waves
# 0.94 at an efficiency of 0.89 (4,096 tokens, 32 heads over 8), two kernels 0.91; descending 0.80 to 0.83 at 0.89, two kernels 0.86 to
# 0.91.
MIN_EFFICIENCY: dict[KeyTileOrder, float] = {"descending": 0.92, "waves": 0.88}
MIN_EFFICIENCY_SCORED = 0.75  # with a score mod, which that kernel evaluates a second time
_LAG = 1.0  # of a step behind the same step of another CTA, in the time of a tile of one head


class OrderChoice(NamedTuple):
    """efficiency: the estimated time with the longest items first and no waits, over that of this order."""

    order: KeyTileOrder
    efficiency: float


class DqOrder(NamedTuple):
    """int32 tensors on the device.

    order: rows of (batch row, head group, key tile) in launch order. before: for each query tile of a row, ascending, the number of key
    tiles that are added to it earlier. ptr: where in `before` each row begins.
    """

    order: Tensor
    ptr: Tensor
    before: Tensor


_orders: DerivedCache[BlockTable, DqOrder] = DerivedCache(16)  # by device, query heads per item and items per key tile
_choices: DerivedCache[BlockTable, OrderChoice] = DerivedCache(16)  # by items per key tile and query heads per item


def ordered_dq_pays(table: BlockTable, items_per_tile: int, shared: int, *, scored: bool) -> bool:
    """Whether ordered accumulation is faster than a separate dQ kernel.

    items_per_tile: items of each key tile, one per head group. shared: query heads of an item. scored: with a score mod.
    """
    if sum(table.counts()[1:]) > MAX_TILES or table.density < MIN_DENSITY:
        return False
    order, efficiency = choose_order(table.transposed, items_per_tile, shared)
    return efficiency >= (MIN_EFFICIENCY_SCORED if scored else MIN_EFFICIENCY[order])


def choose_order(table: BlockTable, items_per_tile: int, shared: int) -> OrderChoice:
    """The faster order of a table whose rows are key tiles. Cached per table. Arguments as of `ordered_dq_pays`."""
    return _choices.get(table, (items_per_tile, shared), partial(_simulate_orders, table, items_per_tile, shared))


def _simulate_orders(table: BlockTable, items_per_tile: int, shared: int) -> OrderChoice:
    tiles = mean_tiles(table)
    in_waves_too = len(set(tiles)) > 1 and _end_together(table)  # items of the same length need no waves
    if items_per_tile * len(tiles) > MANY_ITEMS * REFERENCE_CTAS:
        return OrderChoice("waves" if in_waves_too else "descending", 1.0)
    least = makespan(sorted(tiles, reverse=True), items_per_tile)
    descending = OrderChoice("descending", least / max(1.0, makespan(tiles[::-1], items_per_tile)))
    if not in_waves_too:
        return descending
    in_waves = [tiles[i] for i in key_tiles(len(tiles), items_per_tile, "waves").tolist()]
    # The items of an ascending wave follow each other.
    waits = min(len(tiles), REFERENCE_CTAS // items_per_tile) * _LAG / shared
    return max(descending, OrderChoice("waves", least / (makespan(in_waves, items_per_tile) + waits)), key=lambda choice: choice.efficiency)


def _end_together(table: BlockTable) -> bool:
    """Whether the same query tile is the last one of all key tiles."""
    busy = table.ptr.diff() > 0
    last = table.last[table.ptr[1:][busy].long() - 1]
    return bool((last == last[:1]).all())


def key_tiles(tiles: int, items_per_tile: int, order: KeyTileOrder) -> Tensor:
    """Key tiles in launch order. A wave has as many as REFERENCE_CTAS run at once."""
    ascending = torch.arange(tiles)
    if order == "descending":
        return ascending.flip(0)
    waves: list[Tensor] = []
    begin = 0
    while begin < tiles:
        end = max(begin + 1, (len(waves) + 1) * REFERENCE_CTAS // items_per_tile)
        waves.append(ascending[begin:end] if len(waves) % 2 else ascending[begin:end].flip(0))
        begin = end
    return torch.cat(waves) if waves else ascending


def dq_order(table: BlockTable, items_per_tile: int, shared: int, device: torch.device) -> DqOrder:
    """The order for a table whose rows are key tiles. Cached per table. Arguments as of `ordered_dq_pays`."""
    return _orders.get(table, (device, items_per_tile, shared), partial(_build_order, table, items_per_tile, shared, device))


def _build_order(table: BlockTable, items_per_tile: int, shared: int, device: torch.device) -> DqOrder:
    tiles = key_tiles(table.q_tiles, items_per_tile, choose_order(table, items_per_tile, shared).order)
    return DqOrder(*launch.to_device([_launch_order(table, shared, tiles), *_count_earlier(table, tiles)], device))


def _launch_order(table: BlockTable, shared: int, tiles: Tensor) -> Tensor:
    """Rows of (batch row, head group, key tile): each of `tiles` for all batch rows and head groups."""
    groups = table.batch * max(1, table.heads // shared)
    return torch.arange(groups * table.q_tiles).view(groups, table.q_tiles)[:, tiles].mT.flatten()


def _count_earlier(table: BlockTable, tiles: Tensor) -> tuple[Tensor, Tensor]:
    """(ptr, before): for each tile of each row, the number of rows of the same batch row and head that have it and come earlier."""
    tiles_per_row, height = table.tiles_per_row, max(1, table.q_tiles)
    row = torch.repeat_interleave(torch.arange(table.rows), tiles_per_row)
    place = torch.empty_like(tiles)
    place[tiles] = torch.arange(len(tiles))
    column = row // height * table.kv_tiles + expand_ranges(table.first.long(), (table.last - table.first + 1).long())
    in_order = torch.argsort(column * height + place[row % height])
    begins = torch.cat([torch.ones(min(1, len(row)), dtype=torch.bool), column[in_order].diff() != 0])
    nth = torch.arange(len(row))
    before = torch.empty_like(nth)
    before[in_order] = nth - torch.where(begins, nth, 0).cummax(0).values
    return tiles_per_row.cumsum(0) - tiles_per_row, before
