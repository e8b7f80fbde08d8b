"""Tiles of a laid-out sequence: cut at multiples of the block and wherever a segment begins, so that each belongs to one rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from longspan._masks.block_table import BlockTable
from longspan._plan.layout import Layout


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """The queries or the keys of one batch row in tiles. T tiles; tile t holds positions edges[t] … edges[t + 1] − 1.

    `owner` [T] is the rank that holds a tile, `row` [T] where in its shard it begins. All int64.
    """

    layout: Layout
    block: int
    edges: Tensor
    owner: Tensor
    row: Tensor

    @classmethod
    def of(cls, layout: Layout, block: int, *, batch_row: int = 0) -> Side:
        ranks = layout.rows[batch_row if len(layout.rows) > 1 else 0]
        listed = torch.tensor([(s, n, rank) for rank, segments in enumerate(ranks) for s, n in segments], dtype=torch.int64)
        start, length, rank = listed.unbind(1)
        before = length.cumsum(0) - length
        first = torch.tensor([len(segments) for segments in ranks]).cumsum(0) - torch.tensor([len(segments) for segments in ranks])
        base = torch.cat([before, before[-1:] + length[-1:]])[first]  # tokens listed before each rank's first
        local = before - base[rank]
        order = start.argsort()
        start, rank, local = start[order], rank[order], local[order]
        edges = torch.cat([torch.arange(0, layout.length, block), start]).unique()
        segment = torch.searchsorted(start, edges, right=True) - 1
        return cls(
            layout=layout,
            block=block,
            edges=torch.cat([edges, torch.tensor([layout.length])]),
            owner=rank[segment],
            row=local[segment] + edges - start[segment],
        )

    @property
    def tiles(self) -> int:
        return len(self.owner)

    @cached_property
    def count(self) -> Tensor:
        """Tokens of each tile [T]."""
        return self.edges.diff()

    def of_rank(self, rank: int) -> Tensor:
        """A rank's tiles in its local order."""
        mine = (self.owner == rank).nonzero()[:, 0]
        return mine[self.row[mine].argsort()]

    def within(self, start: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """(first tile, one past the last) of stretches of positions that begin and end where tiles do."""
        return torch.searchsorted(self.edges, start), torch.searchsorted(self.edges, start + length)


def reads(table: BlockTable, queries: Side, ranks: int) -> Tensor:
    """Which key tiles each rank's queries read, over all heads and batch rows of the table: bool [ranks, key tiles]."""
    tile = torch.repeat_interleave(torch.arange(table.rows), table.ptr.diff().long()) % max(1, table.q_tiles)
    base = queries.owner[tile] * (table.kv_tiles + 1)
    size = ranks * (table.kv_tiles + 1)
    begin, end = base + table.first, base + table.last + 1
    change = torch.bincount(begin, minlength=size) - torch.bincount(end, minlength=size)
    return change.view(ranks, -1).cumsum(1)[:, :-1] > 0
