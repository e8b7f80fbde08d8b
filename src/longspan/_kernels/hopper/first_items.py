"""Records of the items with which the CTAs of a small forward launch begin, made on the host.

A CTA that takes its first item from the global counter looks up one value after the other: the counter, the order of table rows, the row's
counts, its first run. On an H200, its first KV load starts 2.5 µs later, and 3.6 µs if the table is not in L2. With a record at hand, the
CTA reads once, while it initialises mbarriers: a launch over 2,048 causal tokens of 16 heads takes 33.6 µs instead of 35.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from longspan._kernels.gpu import launch
from longspan._kernels.hopper.item_order import ItemOrder
from longspan._kernels.protocol import Work

_FEW_ITEMS = 8  # per CTA, up to which records pay
_FIELDS = 16  # `forward_producer.ITEM_FIELDS`
_ITEM_ROWS = 128  # query rows of an item


def first_records(
    work: Work, order: ItemOrder, sizes: Mapping[str, Any], *, q_len: int, items: int, unsplit: int, ctas: int
) -> Tensor | None:
    """int32 [CTAs · 16] on the host: the fields of `hopper.forward_producer`'s item records of items 0, 1, …, one per CTA.

    None if the launch is not small, if its first items are split, or if the host does not know where they are.
    sizes: the constants rows, tiles, heads, M_SUBS, N_SUBS, PER_BATCH, PER_HEAD and heavy_items of the launch. unsplit: of `KvSplit`.
    """
    count = min(items, ctas)
    if items > _FEW_ITEMS * ctas or unsplit < count or work.q_tiles.row is not None:
        return None
    tile, sub, b, h = places(torch.arange(count), order, launch.start_order(work.table, 1).long(), sizes)
    table_row = tile + (h * sizes["tiles"] if sizes["PER_HEAD"] else 0)
    if sizes["PER_BATCH"]:
        table_row += b * sizes["tiles"] * (sizes["heads"] if sizes["PER_HEAD"] else 1)
    full, partial = launch.split_runs(work.table, launch.facts(work.kv_tiles), positions=work.score is not None)
    full_run, partial_run = full.ptr[table_row].long(), partial.ptr[table_row].long()
    full_tiles, partial_tiles = _tiles(full, table_row), _tiles(partial, table_row)
    firsts, lasts = (
        torch.where(partial_tiles > 0, _at(of_partial, partial_run), _at(of_full, full_run))
        for of_partial, of_full in ((partial.first, full.first), (partial.last, full.last))
    )
    leading = _at(partial.last, (partial.ptr[table_row + 1].long() - 1).clamp(min=0)) * (partial_tiles > 0)
    row = (tile * sizes["M_SUBS"] + sub) * _ITEM_ROWS
    partial_blocks, zero = partial_tiles * sizes["N_SUBS"], torch.zeros_like(row)
    fields = [
        h, b, row, row, q_len - row, partial_blocks, partial_blocks + full_tiles * sizes["N_SUBS"], partial_run, full_run, zero,
        torch.arange(count) - unsplit, zero, firsts, lasts, leading,
    ]  # fmt: skip
    return torch.stack(fields + [zero] * (_FIELDS - len(fields)), 1).int().flatten()


def places(item: Tensor, order: ItemOrder, rows_in_order: Tensor, sizes: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`gpu.tile_access.place_in_order` on the host: (tile, sub-tile, batch row, head) of items. rows_in_order: the rows of the table."""
    is_light = item >= sizes["heavy_items"]
    group = torch.where(is_light, order.light_group, order.heavy_group)
    rows = torch.where(is_light, sizes["rows"] - order.heavy_rows, order.heavy_rows)
    within = item - is_light * sizes["heavy_items"]
    sub, within = within % sizes["M_SUBS"], within // sizes["M_SUBS"]
    head_group, rest = within // (rows * group), within % (rows * group)
    row = rows_in_order[is_light * order.heavy_rows + rest // group]
    tiles, heads = sizes["tiles"], sizes["heads"]
    if sizes["PER_HEAD"]:
        return row % tiles, sub, row // (tiles * heads) if sizes["PER_BATCH"] else head_group, row // tiles % heads
    groups = heads // group
    return row % tiles, sub, row // tiles if sizes["PER_BATCH"] else head_group // groups, head_group % groups * group + rest % group


def _tiles(runs: Any, row: Tensor) -> Tensor:
    """The number of tiles in the runs of each row."""
    before = torch.nn.functional.pad((runs.last - runs.first + 1).long().cumsum(0), (1, 0))
    return before[runs.ptr[row + 1].long()] - before[runs.ptr[row].long()]


def _at(values: Tensor, index: Tensor) -> Tensor:
    """values[index], 0 past the end."""
    return torch.nn.functional.pad(values.long(), (0, 1))[index.clamp(max=len(values))]
