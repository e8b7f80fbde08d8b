"""Tiles of a plan's KV from which selections choose: their owner ranks, and the ranks whose queries may see them.

Fine tiles: the KV layout in tiles of the selection's granularity. Coarse tiles: the plan's tiles of BLOCK_SIZE, over which kernels compute.
Every fine tile lies in one coarse tile. Legend: F fine tiles, T coarse tiles, N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from longspan._engine.schedule_builder import tiling_of
from longspan._kernels.tiling import Tiling
from longspan._masks.block_table import BlockTable
from longspan._masks.selected_shard import TileSpans
from longspan._plan.plan_data import PlanData, TiledRow
from longspan._plan.tile_grid import TileGrid, read_tiles


@dataclass(frozen=True, kw_only=True, eq=False)
class SelectionGrid:
    """One rank's view of a plan's KV as tiles that selections choose.

    Attributes:
        rank: This rank.
        granularity, q_granularity: Of the selections.
        tiles: Queries, KV and the block table of the plan's mask in tiles of BLOCK_SIZE.
        fine: KV in tiles of `granularity`.
        coarse_of: The coarse tile of each fine tile [F].
        reads: Which coarse tiles each rank's queries may see under the plan's mask [N, T].
    """

    rank: int
    granularity: int
    q_granularity: int
    tiles: TiledRow
    fine: TileGrid
    coarse_of: Tensor
    reads: Tensor

    @classmethod
    def of(cls, plan: PlanData, granularity: int, q_granularity: int) -> SelectionGrid:
        """The grid of a plan. Its layouts are those over all ranks: a Ulysses transpose is not part of selected calls."""
        tiles = plan.rank_tiles
        fine = TileGrid.of(plan.layouts[1], granularity)
        coarse_of = torch.searchsorted(tiles.kv.edges, fine.edges[:-1], right=True) - 1
        reads = read_tiles(tiles.table, tiles.queries, plan.mesh.size)
        return cls(
            rank=plan.mesh.rank, granularity=granularity, q_granularity=q_granularity, tiles=tiles, fine=fine, coarse_of=coarse_of,
            reads=reads,
        )  # fmt: skip

    @property
    def blocks(self) -> int:
        """Number of blocks of keys of the whole sequence."""
        return -(-self.fine.layout.length // self.granularity)

    @cached_property
    def block_of(self) -> Tensor:
        """The block of keys that each fine tile is a part of [F]."""
        return self.fine.edges[:-1] // self.granularity

    @cached_property
    def unit(self) -> int:
        """Tokens that are always sent together: `granularity` where every block of keys has one owner and is whole, else 1."""
        return self.granularity if bool((self.fine.count == self.granularity).all()) else 1

    @cached_property
    def requests(self) -> list[Tensor]:
        """For each rank, its fine tiles that this rank may read, in the owner's local order; none of this rank's own."""
        return [self._readable(owner=r, reader=self.rank) for r in range(len(self.reads))]

    @cached_property
    def serves(self) -> list[Tensor]:
        """For each rank, the fine tiles of this rank that it may read, in local order; none for this rank."""
        return [self._readable(owner=self.rank, reader=r) for r in range(len(self.reads))]

    def _readable(self, *, owner: int, reader: int) -> Tensor:
        tiles = self.fine.of_rank(owner)
        return tiles[:0] if owner == reader else tiles[self.reads[reader][self.coarse_of[tiles]]]

    # ------------------------------------------------------------------------------------------------------------ queries

    @cached_property
    def q_order(self) -> Tensor:
        """This rank's query tiles, in local order."""
        return self.tiles.queries.of_rank(self.rank)

    @cached_property
    def q_tiling(self) -> Tiling:
        return tiling_of(self.tiles.queries, self.q_order)

    @cached_property
    def rows(self) -> Tensor:
        """The rows of `q_granularity` queries of which this rank owns tokens, by first appearance in its local order."""
        return self.tiles.queries.layout.blocks(self.rank, self.q_granularity)

    @cached_property
    def ascending(self) -> Tensor | None:
        """The places of `rows` in ascending order; None if they ascend already."""
        return None if bool((self.rows.diff() > 0).all()) else self.rows.argsort()

    @cached_property
    def local_row(self) -> Tensor:
        """The place of each row of queries of the sequence among this rank's rows in ascending order, int32; 0 for rows of other ranks."""
        rows = torch.zeros(-(-self.tiles.queries.layout.length // self.q_granularity), dtype=torch.int32)
        rows[self.rows.sort().values] = torch.arange(len(self.rows), dtype=torch.int32)
        return rows

    @cached_property
    def row_spans(self) -> TileSpans:
        """The local rows, in ascending order, that each of this rank's query tiles overlaps."""
        edges = self.tiles.queries.edges
        first, last = edges[self.q_order] // self.q_granularity, (edges[self.q_order + 1] - 1) // self.q_granularity
        return TileSpans(first=self.local_row[first].long(), last=self.local_row[last].long())

    # ----------------------------------------------------------------------------------------------------------------- KV

    @cached_property
    def block_spans(self) -> TileSpans:
        """The blocks of keys that each coarse tile overlaps [T]."""
        edges = self.tiles.kv.edges
        return TileSpans(first=edges[:-1] // self.granularity, last=(edges[1:] - 1) // self.granularity)

    @cached_property
    def local_tiles(self) -> Tensor:
        """This rank's coarse tiles, in local order."""
        return self.tiles.kv.of_rank(self.rank)

    @cached_property
    def every_tile(self) -> tuple[BlockTable, Tiling]:
        """`table` and `tiling` of all coarse tiles. Cached: kernels remember checks by table object."""
        tiles = torch.arange(self.tiles.kv.tiles)
        return self.table(tiles), self.tiling(tiles)

    def table(self, kv_tiles: Tensor) -> BlockTable:
        """The plan's block table of this rank's queries over these coarse tiles."""
        return self.tiles.table.select(self.q_order, kv_tiles)

    def tiling(self, kv_tiles: Tensor) -> Tiling:
        """The tiling of a buffer in which these coarse tiles follow each other."""
        return tiling_of(self.tiles.kv, kv_tiles)
