"""Tiles whose edges depend on the documents of a sequence only, for `longspan.invariant()`.

Blocks of BLOCK_SIZE tokens are counted from the first token of each document (`document_starts`), or from token 0. A document then has the
same blocks at any offset in a packed sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan._kernels.tiling import Tiling
from longspan._masks.block_table import BLOCK_SIZE, BlockTable
from longspan._masks.classify import TableShape, classify
from longspan._masks.document_starts import block_edges, document_starts
from longspan._masks.program import Program
from longspan._plan.plan_data import PlanData
from longspan._plan.tile_grid import TileGrid

_BLOCK = (BLOCK_SIZE, BLOCK_SIZE)


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentTiles:
    """The tiles of one batch row, or of all of them where they have the same tiles (`row` None)."""

    row: int | None
    table: BlockTable
    q_tiles: Tiling
    kv_tiles: Tiling

    @property
    def batch(self) -> slice:
        """The batch rows of these tiles."""
        return slice(None) if self.row is None else slice(self.row, self.row + 1)


def tiles_of_sequence(
    program: Program | None, captured: Sequence[Tensor], lengths: tuple[int, int], *, batch: int, heads: int
) -> tuple[DocumentTiles, ...]:  # fmt: skip
    """The tiles of a whole attention of lengths (queries, keys)."""
    starts = document_starts(program, captured, *lengths, batch)
    rows = len(starts.q)

    def of_row(row: int) -> DocumentTiles:
        edges = block_edges(starts.q[row], lengths[0], BLOCK_SIZE), block_edges(starts.kv[row], lengths[1], BLOCK_SIZE)
        shape = TableShape(
            q_len=lengths[0], kv_len=lengths[1], block=_BLOCK, batch=1 if rows > 1 else batch, heads=heads,
            first_batch=row if rows > 1 else 0, edges=edges,
        )  # fmt: skip
        table = classify(program, captured, shape)
        return DocumentTiles(row=row if rows > 1 else None, table=table, q_tiles=_tiling(edges[0]), kv_tiles=_tiling(edges[1]))

    return tuple(map(of_row, range(rows)))


@dataclass(frozen=True, kw_only=True, eq=False)
class RankTiles:
    """A rank's tiles over a mesh.

    Attributes:
        by_query: The rank's queries and all KV: KV tiles begin where documents say.
        by_kv: All queries and the rank's KV: query tiles begin where documents say.
    """

    by_query: tuple[DocumentTiles, ...]
    by_kv: tuple[DocumentTiles, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class LaidOutTiles:
    """The tiles of one batch row of laid-out tokens, of all ranks.

    Attributes:
        grid: The queries, or the KV, cut where ranks' segments begin.
        edges: First tokens of the blocks of the other side, counted from document starts, then its length.
        table: The block table of both.
    """

    grid: TileGrid
    edges: Tensor
    table: BlockTable


def laid_out_tiles(plan: PlanData, *, batch: int, heads: int) -> tuple[tuple[LaidOutTiles, ...], tuple[LaidOutTiles, ...]]:
    """The tiles of a plan with its queries laid out, and with its KV laid out: one entry for all batch rows, or one for each. The same for
    all ranks.
    """
    mask, lengths = plan.mask, (plan.q_len, plan.kv_len)
    starts = document_starts(mask.program, mask.captured, *lengths, batch)
    rows = max(len(starts.q), *(len(layout.rows) for layout in plan.layouts))

    def of_row(row: int, side: int) -> LaidOutTiles:
        """side: 0 with the queries laid out, 1 with the KV."""
        grid = TileGrid.of(plan.layouts[side], BLOCK_SIZE, batch_row=row)
        other = (starts.kv, starts.q)[side]
        edges = block_edges(other[row if len(other) > 1 else 0], lengths[1 - side], BLOCK_SIZE)
        shape = TableShape(
            q_len=lengths[0], kv_len=lengths[1], block=_BLOCK, batch=1 if rows > 1 else batch, heads=heads,
            first_batch=row if rows > 1 else 0, edges=(grid.edges, edges) if side == 0 else (edges, grid.edges),
        )  # fmt: skip
        return LaidOutTiles(grid=grid, edges=edges, table=classify(mask.program, mask.captured, shape))

    by_query, by_kv = (tuple(of_row(row, side) for row in range(rows)) for side in (0, 1))
    return by_query, by_kv


def tiles_of_rank(laid_out: tuple[tuple[LaidOutTiles, ...], tuple[LaidOutTiles, ...]], rank: int) -> RankTiles:
    """One rank's part of `laid_out_tiles`."""
    rows = len(laid_out[0])

    def of_row(row: int, side: int) -> DocumentTiles:
        grid, edges, table = laid_out[side][row].grid, laid_out[side][row].edges, laid_out[side][row].table
        mine, every = grid.of_rank(rank), torch.arange(len(edges) - 1)
        count = grid.count[mine]
        local = Tiling(
            length=int(count.sum()), block=BLOCK_SIZE, row=(count.cumsum(0) - count).int(), pos=grid.edges[mine].int(), count=count.int()
        )
        whole = _tiling(edges)
        return DocumentTiles(
            row=row if rows > 1 else None,
            table=table.select(mine, every) if side == 0 else table.select(every, mine),
            q_tiles=local if side == 0 else whole,
            kv_tiles=whole if side == 0 else local,
        )

    by_query, by_kv = (tuple(of_row(row, side) for row in range(rows)) for side in (0, 1))
    return RankTiles(by_query=by_query, by_kv=by_kv)


def _tiling(edges: Tensor) -> Tiling:
    """Tiles of a whole sequence with these edges."""
    length, start = int(edges[-1]), edges[:-1].int()
    if torch.equal(edges[:-1], torch.arange(0, length, BLOCK_SIZE)):
        return Tiling(length=length, block=BLOCK_SIZE)
    return Tiling(length=length, block=BLOCK_SIZE, row=start, pos=start, count=edges.diff().int())
