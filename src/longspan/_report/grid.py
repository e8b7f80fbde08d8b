"""The mask's grid made coarse: how much of each cell is computed, and by whom."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan._plan.plan_data import PlanData


@dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """density [h, w] in 0 … 1, float64: the share of a cell's tiles that are computed. owner [h]: whose queries a line mostly is."""

    density: Tensor
    owner: Tensor


def grid(data: PlanData, height: int, width: int) -> Grid:
    """The first batch row and head. No more lines and columns than there are tiles. Cost follows the lines and the runs."""
    table = data.tiles[0].table
    height, width = min(height, table.q_tiles), min(width, table.kv_tiles)
    row = torch.repeat_interleave(torch.arange(table.rows), table.ptr.diff().long())
    here = row < table.q_tiles
    line = row[here] * height // table.q_tiles
    change = torch.zeros(height, table.kv_tiles + 1, dtype=torch.float64)
    ones = torch.ones(int(here.sum()), dtype=torch.float64)
    change.index_put_((line, table.first[here].long()), ones, accumulate=True)
    change.index_put_((line, table.last[here].long() + 1), -ones, accumulate=True)
    column = torch.arange(table.kv_tiles) * width // table.kv_tiles
    computed = torch.zeros(height, width, dtype=torch.float64).index_add_(1, column, change.cumsum(1)[:, :-1])
    tall = torch.bincount(torch.arange(table.q_tiles) * height // table.q_tiles, minlength=height)
    wide = torch.bincount(column, minlength=width)
    owner = data.tiles[0].queries.owner
    middle = ((torch.arange(height) * 2 + 1) * table.q_tiles // (2 * height)).clamp(max=table.q_tiles - 1)
    return Grid(density=computed / (tall[:, None] * wide), owner=owner[middle])
