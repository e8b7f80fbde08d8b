"""The order in which CTAs take the items of a forward launch.

By default head after head (heads that share KV together), the longest items of each head first. CTAs that start together then read the same
KV at the same time, so that few heads' KV are in use at once and most reads hit L2. If the last items were still long, CTAs would idle at
the end. Then the shorter items of all heads come last, or all heads are interleaved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longspan._kernels.hopper.makespan import MANY_ITEMS
from longspan._masks.block_table import PARTIAL, BlockTable

# Slowdown per KV head in use whose KV does not fit into L2. On an H200 at 32,768 causal tokens: 0.2 to 0.3 %, with 1 to 32 heads in use,
# for a whole sequence and for a rank's shard of it.
_L2_MISS_COST = 0.0025
_MAX_WAVES = 16  # waves of items up to which all are simulated
_LAST_WAVES = 6  # full waves that are simulated otherwise
_HEAVY_SHARES = (3 / 4, 1 / 2)  # of the table rows: candidates for `ItemOrder.heavy_rows`
_OUTLIER = 4  # times the mean
_MAX_RELATIVE_TIME = 0.995  # another order must take less than this share of the default's time


class ItemOrder(NamedTuple):
    """The order of items: first the `heavy_rows` longest table rows, `heavy_group` heads at a time; then the others, `light_group` heads at
    a time.
    """

    heavy_group: int
    heavy_rows: int
    light_group: int

    def lengths(self, row_blocks: Sequence[int], *, heads: int, subs: int, count: int) -> list[int]:
        """KV blocks of the last `count` items of all heads. row_blocks: KV blocks of an item of each table row, which has `subs` items."""
        heavy_items, items = heads * self.heavy_rows * subs, heads * len(row_blocks) * subs
        per_heavy, per_light, light_rows = self.heavy_group * subs, self.light_group * subs, len(row_blocks) - self.heavy_rows
        return [
            row_blocks[i % (self.heavy_rows * per_heavy) // per_heavy]
            if i < heavy_items
            else row_blocks[self.heavy_rows + (i - heavy_items) % (light_rows * per_light) // per_light]
            for i in range(items - count, items)
        ]


def simulated_items(items: int, ctas: int) -> int:
    """The number of items, from the last one backwards, that are simulated to see how a launch ends."""
    return items if items <= _MAX_WAVES * ctas else items % ctas + _LAST_WAVES * ctas


def best_order(
    row_blocks: Sequence[int],
    *,
    heads: int,
    batches: int,
    subs: int,
    shared: int,
    heads_in_l2: int,
    ctas: int,
    end_time: Callable[[list[int]], float],
) -> ItemOrder:
    """The fastest order by simulation.

    row_blocks, subs: see `ItemOrder.lengths`. shared: heads that share KV. heads_in_l2: heads whose KV fits into L2.
    end_time: when the last CTA finishes, given the lengths of the last items.
    """
    rows, items = len(row_blocks), len(row_blocks) * subs * heads * batches
    default = ItemOrder(shared, rows, shared)
    if rows < 2 or items > MANY_ITEMS * ctas or min(row_blocks) == max(row_blocks):
        return default
    total, count = sum(row_blocks), simulated_items(items, ctas)

    def time(order: ItemOrder) -> float:
        lengths = order.lengths(row_blocks, heads=heads * batches, subs=subs, count=count)
        light = sum(row_blocks[order.heavy_rows :]) / total
        phases = ((1 - light, order.heavy_group), (light, order.light_group))
        l2_misses = sum(part * max(0, group - max(heads_in_l2, shared)) for part, group in phases) / shared
        return ((total * subs * heads * batches - sum(lengths)) / ctas + end_time(lengths)) * (1 + _L2_MISS_COST * l2_misses)

    candidates = {ItemOrder(heads, rows, heads)}
    candidates |= {ItemOrder(shared, int(rows * share), group) for share in _HEAVY_SHARES for group in (shared, heads)}
    least, best = min((time(order), order) for order in candidates)
    return best if least < _MAX_RELATIVE_TIME * time(default) else default


def outlier_rows(table: BlockTable) -> int:
    """Rows with several times the mean number of tiles, such as the first keys, which all queries see, beside a window.

    Their items of all heads come first. In head order, the long items of the last head would start when all other items end.
    0 for a table by head, whose rows of all heads are in one order.
    """
    return len(outlier_tiles(table.tiles_per_row)) if table.heads == 1 else 0


def outlier_tiles(tiles_per_row: Tensor) -> Tensor:
    """The numbers of rows that have several times the mean number of tiles."""
    tiles = tiles_per_row.double()
    return torch.nonzero(tiles > _OUTLIER * tiles.mean()).flatten()


def diagonal_first(table: BlockTable) -> bool:
    """Whether items begin with their last partial tile: in most rows it is the diagonal, and not the only partial tile.

    Under causal masks of windows and documents, every row sees a key there, and may see none in the others.
    """
    runs = table.runs(PARTIAL)
    ptr, last = runs.ptr.long(), runs.last.long()
    if not len(last):
        return False
    last_of_row, first_of_row = last[(ptr[1:] - 1).clamp(min=0)], runs.first.long()[ptr[:-1].clamp(max=len(last) - 1)]
    masked = ptr.diff() > 0
    ends_on_diagonal = masked & (last_of_row > first_of_row) & (last_of_row == torch.arange(len(masked)) % table.q_tiles)
    return 2 * int(ends_on_diagonal.sum()) > int(masked.sum())
