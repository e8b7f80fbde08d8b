"""A fixed order in which key tiles are added to dQ, so that its bits do not change from run to run.

CTAs take key tiles from a counter, from the first to the last, and each query tile of dQ accumulates them in that order. A CTA waits only
for CTAs that took their item earlier, so that the first never waits and there is no deadlock, however many CTAs run at once.

An item walks its query tiles from the last to the first, at each tile through some of the query heads of its KV head. It does not wait if
items before it reach its queries earlier:

  mask      items that start together                                        query heads at each tile
  causal    walk the same queries one after the other, from the last to      all: with one head after the other, an item would reach the
            their diagonal; the longest items come first                     second head before the longer items that add to it first
  window    begin with queries that no item before them sees                 one: until a query tile is visited again, with all heads four
                                                                             times as many others are, and it leaves L2

In `longspan.invariant()`, dK and dV are sums in the order of this walk: all query heads of a KV head at each tile. `hopper.backward_dq` has
the bits of dQ (BY_BLOCK).
"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from heapq import heapreplace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from longspan._derived_cache import DerivedCache
from longspan._kernels.gpu import launch
from longspan._kernels.hopper.makespan import REFERENCE_CTAS, finish_times
from longspan._masks.block_table import BlockTable, expand_ranges

MAX_TILES = 2**22  # tiles of a table: one int32 each, counted once (0.4 s for 2 million)
# Mean query tiles of an item. With fewer, two kernels are faster: documents of ~512 tokens (5.1 tiles) 1.03 of the default's speed, ordered
# 1.00; documents of 200 to 4,000 tokens (12 tiles) are faster in one.
MIN_ITEM_TILES = 6
# Least `OrderChoice.efficiency` for which an order beats a separate dQ kernel. H200, D128, its speed over that with the kernel: 0.96 at an
# efficiency of 0.68 (causal 2k, 16 heads), 1.09 at 0.87 (documents, invariant), 1.03 at 0.88 (causal 4k, 32 heads over 8).
MIN_EFFICIENCY = 0.8
MIN_EFFICIENCY_SCORED = 0.75  # with a score mod, which that kernel evaluates a second time
# In the time of a tile of one head: of a step behind the same step of another CTA; and until a query tile that all CTAs leave is no longer
# in L2. Loads and additions of a tile that is not there take 1.65 times as long as its products.
_LAG = 1.0
_L2_GAP = 3.5
_L2_MISS_COST = 0.65
_SIMULATED_TILES = 2**15  # of the first items that are simulated (20 ms)
_GOOD_EFFICIENCY = 0.95  # for which no other order is simulated
_ALIKE = 0.9  # mean over most query tiles of an item, from which on items have the same length


class OrderChoice(NamedTuple):
    """How items are walked and taken.

    Attributes:
        together: Query heads at each query tile.
        all_heads: Whether items of all KV heads are taken together. Items of the same length need not be: those of fewer heads read
            less at once, which stays in L2.
        efficiency: The estimated time with the longest items first and no waits, over that of this order.
    """

    together: int
    all_heads: bool
    efficiency: float


class DqOrder(NamedTuple):
    """int32 tensors on the device.

    order: rows of (batch row, head group, key tile) in launch order. before: for each query tile of a row, ascending, the number of key
    tiles that are added to it earlier. ptr: where in `before` each row begins, then its length.
    """

    order: Tensor
    ptr: Tensor
    before: Tensor


_orders: DerivedCache[BlockTable, DqOrder] = DerivedCache(16)  # by device and query heads per item
_choices: DerivedCache[BlockTable, OrderChoice] = DerivedCache(16)  # by items per key tile, query heads per item, whether invariant


def ordered_dq_pays(table: BlockTable, items_per_tile: int, shared: int, *, scored: bool, invariant: bool = False) -> bool:
    """Whether ordered accumulation is faster than a separate dQ kernel.

    items_per_tile: items of each key tile, one per head group. shared: query heads of an item. scored: with a score mod.
    """
    tiles = sum(table.counts()[1:])
    if tiles > MAX_TILES or tiles < MIN_ITEM_TILES * table.transposed.rows:
        return False
    efficiency = choose_order(table.transposed, items_per_tile, shared, invariant=invariant).efficiency
    return efficiency >= (MIN_EFFICIENCY_SCORED if scored else MIN_EFFICIENCY)


def choose_order(table: BlockTable, items_per_tile: int, shared: int, *, invariant: bool = False) -> OrderChoice:
    """The faster order of a table whose rows are key tiles. Cached per table. Arguments as of `ordered_dq_pays`."""
    key = (items_per_tile, shared, invariant)
    return _choices.get(table, key, partial(_simulate_orders, table, items_per_tile, shared, invariant))


def heads_of_tables(table: BlockTable, shared: int) -> int:
    """Query heads of a KV head that have one table, and are walked together in `longspan.invariant()`."""
    return 1 if table.heads > 1 else shared


def _simulate_orders(table: BlockTable, items_per_tile: int, shared: int, invariant: bool) -> OrderChoice:
    """By the first query tiles of the first batch row and head."""
    tiles = _query_tiles(table)
    lengths = [len(t) for t in tiles]
    first = max(1, bisect_right(list(accumulate(lengths)), _SIMULATED_TILES))
    walks = [t[::-1] for t in tiles[:first]]
    ctas = max(1, REFERENCE_CTAS // items_per_tile)
    least = max(finish_times(sorted(map(float, lengths[:first]), reverse=True), [0.0] * ctas, cost=0.0))
    all_heads = sum(lengths) < _ALIKE * len(lengths) * max(lengths, default=0)
    most = heads_of_tables(table, shared)
    choices: list[OrderChoice] = []
    for together in (most,) if invariant else sorted({1, most}, reverse=True):
        end = _simulated_end(walks, table.kv_tiles, ctas, together, shared // together) * together / shared
        choices.append(OrderChoice(together, all_heads, least / max(1.0, end)))
        if choices[-1].efficiency >= _GOOD_EFFICIENCY:
            break
    return max(choices, key=lambda choice: choice.efficiency)


def _query_tiles(table: BlockTable) -> list[list[int]]:
    """The tiles of each row of the first batch row and head, ascending."""
    ptr, rows = table.ptr[: table.q_tiles + 1].tolist(), []
    first, last = table.first[: ptr[-1]].tolist(), table.last[: ptr[-1]].tolist()
    for begin, end in pairwise(ptr):
        tiles = [tile for run in range(begin, end) for tile in range(first[run], last[run] + 1)]
        rows.append(sorted(tiles))
    return rows


def _simulated_end(walks: list[list[int]], q_tiles: int, ctas: int, heads: int, rounds: int) -> float:
    """When the last of so many CTAs has added to its last query tile, in the time of a tile of `heads` heads.

    walks: query tiles of each item, in launch order. rounds: how often an item walks them, each time with other heads.
    """
    lag, far = _LAG / heads, _L2_GAP / heads
    free, added = [0.0] * ctas, [[-lag] * q_tiles for _ in range(rounds)]
    steps = misses = 0
    for walk in walks:
        time = free[0]
        for of_heads in added:
            for tile in walk:
                before, time = of_heads[tile], time + 1
                if before + lag > time:
                    time = before + lag
                elif before >= 0 and time - before > far:
                    misses += 1
                of_heads[tile] = time
        steps += len(walk) * rounds
        heapreplace(free, time)
    return max(free) * (1 + _L2_MISS_COST * misses / max(1, steps))


def dq_order(table: BlockTable, shared: int, device: torch.device) -> DqOrder:
    """The order for a table whose rows are key tiles. Cached per table. shared: query heads of an item."""
    return _orders.get(table, (device, shared), partial(_build_order, table, shared, device))


def _build_order(table: BlockTable, shared: int, device: torch.device) -> DqOrder:
    return DqOrder(*launch.to_device([_launch_order(table, shared), *_count_earlier(table)], device))


def _launch_order(table: BlockTable, shared: int) -> Tensor:
    """Rows of (batch row, head group, key tile): each key tile for all batch rows and head groups."""
    groups = table.batch * max(1, table.heads // shared)
    return torch.arange(groups * table.q_tiles).view(groups, table.q_tiles).mT.flatten()


def _count_earlier(table: BlockTable) -> tuple[Tensor, Tensor]:
    """(ptr, before): for each tile of each row, the number of rows of the same batch row and head that have it and come earlier."""
    tiles_per_row, height = table.tiles_per_row, max(1, table.q_tiles)
    row = torch.repeat_interleave(torch.arange(table.rows), tiles_per_row)
    column = row // height * table.kv_tiles + expand_ranges(table.first.long(), (table.last - table.first + 1).long())
    in_order = torch.argsort(column * height + row % height)
    begins = torch.cat([torch.ones(min(1, len(row)), dtype=torch.bool), column[in_order].diff() != 0])
    nth = torch.arange(len(row))
    before = torch.empty_like(nth)
    before[in_order] = nth - torch.where(begins, nth, 0).cummax(0).values
    return torch.cat([torch.zeros(1, dtype=torch.int64), tiles_per_row.cumsum(0)]), before
