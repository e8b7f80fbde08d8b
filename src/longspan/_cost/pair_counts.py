"""Tiles and (query, key) pairs that each rank of a plan's mesh computes.

Balance is judged by pairs: they have to be computed by any kernel. Tiles are proportional to pairs in long sequences; in short ones they
depend on where a layout happens to cut them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan._balance.demand import pairs_per_row
from longspan._derived_cache import DerivedCache
from longspan._plan.plan_data import PlanData


@dataclass(frozen=True, kw_only=True, eq=False)
class RankCounts:
    """Tiles and allowed pairs of each rank of the mesh [N], float64, over all batch rows and the rank's heads."""

    tiles: Tensor
    pairs: Tensor


_counts: DerivedCache[PlanData, RankCounts] = DerivedCache(1)


def balance_of(pairs: Tensor) -> float:
    """Pairs of the busiest rank over the mean; 1 where there are none."""
    total = float(pairs.sum())
    return float(pairs.max()) * len(pairs) / total if total > 0 else 1.0


def counts(data: PlanData, table_pairs: Tensor | None = None) -> RankCounts:
    """The counts of a plan. Exact where few tiles are partial; otherwise partial tiles are sampled (see `pairs_per_row`).

    Args:
        data: The plan.
        table_pairs: Pairs of each row of the plan's only block table, where they have been counted.
    """
    return _counts.get(data, None, lambda: _count(data, table_pairs))


def _count(data: PlanData, table_pairs: Tensor | None) -> RankCounts:
    kv_axis_size, degree = len(data.groups), data.degree
    batch, heads = data.batch or 1, data.heads or 1
    totals = torch.zeros(2, degree, kv_axis_size, dtype=torch.float64)
    for row, tiles in enumerate(data.tiles):
        table = tiles.table
        pairs = _pairs(data, row) if table_pairs is None else table_pairs
        repeats = batch / table.batch if data.batch_layouts == 1 else 1.0
        for total, per_row in zip(totals, (table.tiles_per_row.double(), pairs), strict=True):
            by_head = per_row.view(table.batch, table.heads, -1).sum(0) * repeats
            total += torch.zeros_like(total).index_add_(1, tiles.queries.owner, split_heads(by_head, degree, heads))
    by_rank = torch.empty(2, data.mesh.size, dtype=torch.float64)
    by_rank[:, data.groups.T.reshape(-1)] = totals.view(2, -1)
    return RankCounts(tiles=by_rank[0], pairs=by_rank[1])


def _pairs(data: PlanData, row: int) -> Tensor:
    """Pairs of each row of a batch row's block table."""
    tiles = data.tiles[row]
    edges = tiles.queries.edges, tiles.kv.edges
    return pairs_per_row(tiles.table, data.mask.program, data.mask.captured, edges=edges, first_batch=row)


def split_heads(by_head: Tensor, degree: int, heads: int) -> Tensor:
    """Work by head [1 or H, T] as the work of each member of a Ulysses group [degree, T], for H = `heads`."""
    if len(by_head) == 1:
        return by_head.expand(degree, -1) * (heads / degree)
    if heads % degree:
        return by_head.sum(0).expand(degree, -1) / degree
    return by_head.view(degree, heads // degree, -1).sum(1)
