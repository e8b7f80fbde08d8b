"""What each rank of a plan's mesh computes: tiles, and the (query, key) pairs in them that the mask allows.

Balance is judged by pairs. They are what has to be computed whatever the kernel; tiles, which are what kernels compute, come to the same in
long sequences, and in short ones depend on where a layout happens to cut them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan._balance.demand import pairs_per_row
from longspan._plan.derived_cache import DerivedCache
from longspan._plan.plan_data import PlanData


@dataclass(frozen=True, kw_only=True, eq=False)
class Counts:
    """Of each rank of the mesh [N], float64, over all batch rows and the rank's own heads."""

    tiles: Tensor
    pairs: Tensor

    @property
    def balance(self) -> float:
        """The busiest rank's pairs over the mean; 1 where there are none."""
        return balance_of(self.pairs)


def balance_of(pairs: Tensor) -> float:
    total = float(pairs.sum())
    return float(pairs.max()) * len(pairs) / total if total > 0 else 1.0


_cached: DerivedCache[Counts] = DerivedCache(1)


def counts(data: PlanData, pairs: Tensor | None = None) -> Counts:
    """The counts of a plan. Exact where few tiles are partial; otherwise partial tiles are sampled (see `pairs_per_row`).

    `pairs`: pairs of each row of the only block table, where the caller has counted them.
    """
    return _cached.get(data, None, lambda: _counted(data, pairs))


def _counted(data: PlanData, pairs_of_table: Tensor | None) -> Counts:
    ring, degree = len(data.groups), data.degree
    batch, heads = data.batch or 1, data.heads or 1
    total = torch.zeros(2, degree, ring, dtype=torch.float64)
    for row in range(data.rows):
        table, owner = data.tiles[row].table, data.tiles[row].queries.owner
        pairs = _pairs(data, row) if pairs_of_table is None else pairs_of_table
        many = batch / table.batch if data.rows == 1 else 1.0
        for found, per_row in zip(total, (table.tiles_per_row.double(), pairs), strict=True):
            by_head = per_row.view(table.batch, table.heads, -1).sum(0) * many
            found += torch.zeros_like(found).index_add_(1, owner, split_heads(by_head, degree, heads))
    out = torch.empty(2, data.mesh.size, dtype=torch.float64)
    out[:, data.groups.T.reshape(-1)] = total.view(2, -1)
    return Counts(tiles=out[0], pairs=out[1])


def _pairs(data: PlanData, row: int) -> Tensor:
    """Pairs of each row of a batch row's table."""
    tiles = data.tiles[row]
    edges = tiles.queries.edges, tiles.kv.edges
    first = row if data.rows > 1 else 0
    return pairs_per_row(tiles.table, data.mask.program, data.mask.captured, edges=edges, first_batch=first)


def split_heads(by_head: Tensor, degree: int, heads: int) -> Tensor:
    """Work by head [1 or H, T] as that of each rank of a Ulysses group [degree, T], for H = `heads`."""
    if len(by_head) == 1:
        return by_head.expand(degree, -1) * (heads / degree)
    if heads % degree:
        return by_head.sum(0, keepdim=True).expand(degree, -1) / degree
    return by_head.view(degree, heads // degree, -1).sum(1)
