"""A coarse grid of the mask: the computed share of each cell, and the rank that computes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan._plan.plan_data import PlanData


@dataclass(frozen=True, kw_only=True, eq=False)
class DensityGrid:
    """Cells of h × w over queries × keys.

    Attributes:
        density: Share of a cell's tiles that are computed, in 0 … 1 [h, w], float64.
        owner: Rank (or Ulysses group) that owns the middle query tile of each line [h], int64.
    """

    density: Tensor
    owner: Tensor


def density_grid(data: PlanData, height: int, width: int) -> DensityGrid:
    """The grid of the first batch row and head, with at most one line per query tile and one column per KV tile.

    Cost is proportional to the runs of the block table plus height × KV tiles: no query tiles × KV tiles array is made.
    """
    table = data.tiles[0].table
    height, width = min(height, table.q_tiles), min(width, table.kv_tiles)
    line_of_tile = torch.arange(table.q_tiles) * height // table.q_tiles
    column_of_tile = torch.arange(table.kv_tiles) * width // table.kv_tiles

    runs = int(table.ptr[table.q_tiles])
    line_of_run = torch.repeat_interleave(line_of_tile, table.ptr[: table.q_tiles + 1].diff())
    change = torch.zeros(height, table.kv_tiles + 1, dtype=torch.float64)  # +1 where a run begins, −1 past its end
    ones = torch.ones(runs, dtype=torch.float64)
    change.index_put_((line_of_run, table.first[:runs]), ones, accumulate=True)
    change.index_put_((line_of_run, table.last[:runs] + 1), -ones, accumulate=True)
    computed = torch.zeros(height, width, dtype=torch.float64).index_add_(1, column_of_tile, change.cumsum(1)[:, :-1])

    q_tiles_per_line = torch.bincount(line_of_tile, minlength=height)
    kv_tiles_per_column = torch.bincount(column_of_tile, minlength=width)
    middle_tile = ((torch.arange(height) * 2 + 1) * table.q_tiles // (2 * height)).clamp(max=table.q_tiles - 1)
    return DensityGrid(density=computed / (q_tiles_per_line[:, None] * kv_tiles_per_column), owner=data.tiles[0].queries.owner[middle_tile])
