"""A fixed order in which key tiles are added to dQ, so that its bits do not change from run to run.

CTAs take key tiles from a counter in the order of `DqOrder.order`, and each query tile of dQ accumulates them in that order. A CTA waits
only for CTAs that took their item earlier, so that the first never waits and there is no deadlock, however many CTAs run at once.

Key tiles are taken from the last to the first, and each item's queries are walked upwards. Under a causal mask, CTAs that start together
then reach a query tile one after the other, in the order in which they add to it.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from longspan._derived_cache import DerivedCache
from longspan._kernels.gpu import launch
from longspan._kernels.hopper.makespan import MANY_ITEMS, REFERENCE_CTAS, makespan, mean_tiles
from longspan._masks.block_table import BlockTable, expand_ranges

MAX_TILES = 2**22  # tiles of a table: one int32 each, counted once (0.4 s for 2 million)
MIN_DENSITY = 0.25  # share of tiles in the table. In sparser ones, such as packed documents, CTAs wait for other heads and documents
# Least `order_efficiency` for which the fixed order beats a separate dQ kernel. Causal on an H200, speed relative to the unordered mode,
# which takes the longest items first: 0.87 to 0.91 at an efficiency of 0.94, 0.80 to 0.83 at 0.89, 0.67 at 0.80; two kernels: 0.86 to 0.91.
MIN_EFFICIENCY = 0.92


class DqOrder(NamedTuple):
    """int32 tensors on the device.

    order: rows of (batch row, head group, key tile) in launch order. before: for each query tile of a row, ascending, the number of key
    tiles that are added to it earlier. ptr: where in `before` each row begins.
    """

    order: Tensor
    ptr: Tensor
    before: Tensor


_orders: DerivedCache[BlockTable, DqOrder] = DerivedCache(16)  # by device and query heads per item
_efficiencies: DerivedCache[BlockTable, float] = DerivedCache(16)  # by items per key tile


def ordered_dq_pays(table: BlockTable, items_per_tile: int) -> bool:
    """Whether ordered accumulation is faster than a separate dQ kernel. items_per_tile: items of each key tile, one per head group."""
    small = sum(table.counts()[1:]) <= MAX_TILES
    return small and table.density >= MIN_DENSITY and order_efficiency(table.transposed, items_per_tile) >= MIN_EFFICIENCY


def order_efficiency(table: BlockTable, items_per_tile: int) -> float:
    """The makespan with the longest items first, over that in the fixed order if no CTA waited for another. Cached per table.

    1 if there are so many items that their order does not matter. table: rows are key tiles.
    """
    return _efficiencies.get(table, items_per_tile, partial(_simulate_efficiency, table, items_per_tile))


def _simulate_efficiency(table: BlockTable, items_per_tile: int) -> float:
    tiles = mean_tiles(table)
    if items_per_tile * len(tiles) > MANY_ITEMS * REFERENCE_CTAS:
        return 1.0
    return makespan(sorted(tiles, reverse=True), items_per_tile) / makespan(tiles[::-1], items_per_tile)


def dq_order(table: BlockTable, shared: int, device: torch.device) -> DqOrder:
    """The order for a table whose rows are key tiles. shared: query heads that one item covers. Cached per table."""
    return _orders.get(table, (device, shared), partial(_build_order, table, shared, device))


def _build_order(table: BlockTable, shared: int, device: torch.device) -> DqOrder:
    return DqOrder(*launch.to_device([_launch_order(table, shared), *_count_earlier(table)], device))


def _launch_order(table: BlockTable, shared: int) -> Tensor:
    """Rows of (batch row, head group, key tile), the last tiles first."""
    groups = table.batch * max(1, table.heads // shared)
    return torch.arange(groups * table.q_tiles).view(groups, table.q_tiles).flip(1).mT.flatten()


def _count_earlier(table: BlockTable) -> tuple[Tensor, Tensor]:
    """(ptr, before): for each tile of each row, the number of later rows of the same batch row and head that have it."""
    tiles_per_row = table.tiles_per_row
    row = torch.repeat_interleave(torch.arange(table.rows), tiles_per_row)
    tile = expand_ranges(table.first.long(), (table.last - table.first + 1).long())
    # Last rows first: the stable sort then keeps equal tiles in the order in which they are added.
    key, place = (row // max(1, table.q_tiles) * table.kv_tiles + tile).flip(0).sort(stable=True)
    begins = torch.cat([torch.ones(min(1, len(key)), dtype=torch.bool), key.diff() != 0])
    nth = torch.arange(len(key))
    before = torch.empty_like(nth)
    before[place] = nth - torch.where(begins, nth, 0).cummax(0).values
    return tiles_per_row.cumsum(0) - tiles_per_row, before.flip(0)
