"""Tiles of a laid-out sequence: cut at multiples of the tile size and wherever a segment begins, so that each tile belongs to one rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from longspan._masks.block_table import BlockTable
from longspan._plan.layout import Layout


@dataclass(frozen=True, kw_only=True, eq=False)
class TileGrid:
    """The queries or the KV of one batch row in T tiles; tile t holds positions edges[t] … edges[t + 1] − 1.

    Attributes:
        layout: Layout over the KV axis.
        block: Tokens per tile; tiles at the ends of segments are shorter.
        edges: Global positions where tiles begin, and the sequence's length [T + 1], int64.
        owner: Rank that holds each tile [T], int64.
        row: Row of the owner's shard at which each tile begins [T], int64.
    """

    layout: Layout
    block: int
    edges: Tensor
    owner: Tensor
    row: Tensor

    @classmethod
    def of(cls, layout: Layout, block: int, *, batch_row: int = 0) -> TileGrid:
        """The grid of one batch row of a layout."""
        ranks = layout.rows[batch_row if len(layout.rows) > 1 else 0]
        segments_by_rank = torch.tensor([(s, n, rank) for rank, segments in enumerate(ranks) for s, n in segments], dtype=torch.int64)
        start, length, rank = segments_by_rank.unbind(1)
        before = length.cumsum(0) - length
        segment_counts = torch.tensor([len(segments) for segments in ranks])
        first = segment_counts.cumsum(0) - segment_counts
        base = before[first.clamp(max=len(before) - 1)]  # tokens listed before each rank's first segment, if it has one
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
        """Number of tiles T."""
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
        """(first tile, one past the last tile) of contiguous ranges of positions that begin and end at edges of tiles."""
        return torch.searchsorted(self.edges, start), torch.searchsorted(self.edges, start + length)


def read_tiles(table: BlockTable, queries: TileGrid, ranks: int) -> Tensor:
    """Which KV tiles each rank's queries read, over all heads and batch rows of the table: bool [ranks, KV tiles]."""
    tile = torch.repeat_interleave(torch.arange(table.rows), table.ptr.diff()) % max(1, table.q_tiles)
    return coverage(queries.owner[tile], table.first, table.last + 1, table.kv_tiles, range(ranks)) > 0


def coverage(rank: Tensor, first: Tensor, end: Tensor, tiles: int, ranks: range) -> Tensor:
    """How many runs of each rank of `ranks` cover each KV tile [len(ranks), tiles], int64.

    Args:
        rank: Rank whose queries each run belongs to [runs].
        first: First tile of each run [runs].
        end: One past the last tile of each run [runs].
        tiles: Number of KV tiles.
        ranks: Contiguous range of ranks to count for; runs of other ranks are left out.
    """
    every_rank = ranks.start == 0 and bool((rank < ranks.stop).all())
    mine = slice(None) if every_rank else (rank >= ranks.start) & (rank < ranks.stop)
    base = (rank[mine] - ranks.start) * (tiles + 1)
    size = len(ranks) * (tiles + 1)
    change = torch.bincount(base + first[mine], minlength=size) - torch.bincount(base + end[mine], minlength=size)
    return change.view(len(ranks), -1).cumsum(1)[:, :-1]
