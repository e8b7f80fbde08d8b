"""The work of a mask in units of tokens: block tables and pair counts, each made once per unit size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan._balance.demand import Demand, pairs_per_row
from longspan._comm.mesh import Mesh
from longspan._cost.auto import SearchSpace, consider
from longspan._cost.options import Considered
from longspan._cost.pair_counts import split_heads
from longspan._cost.rates import Cluster, Shape
from longspan._cost.timeline import Conditions
from longspan._masks.block_table import BLOCK_SIZE, BlockTable
from longspan._masks.classify import TableShape, classify
from longspan._plan.plan_data import MaskTiling, PlanData, PlannedMask, TiledRow
from longspan._planner.request import CallSizes


class MaskWork:
    """Block tables and pair counts of one mask over square tiles of any size."""

    def __init__(self, mask: PlannedMask, q_len: int, kv_len: int, sizes: CallSizes) -> None:
        self.mask, self.q_len, self.kv_len = mask, q_len, kv_len
        self.batch, self.heads = sizes.batch or 1, sizes.heads or 1
        self._tables: dict[int, BlockTable] = {}
        self._pairs: dict[int, Tensor] = {}

    def table(self, unit: int) -> BlockTable:
        """The block table over tiles of `unit` × `unit` tokens."""
        if unit not in self._tables:
            shape = TableShape(q_len=self.q_len, kv_len=self.kv_len, block=(unit, unit), batch=self.batch, heads=self.heads)
            self._tables[unit] = classify(self.mask.program, self.mask.captured, shape)
        return self._tables[unit]

    def pairs(self, unit: int) -> Tensor:
        """Pairs in each row of `table(unit)` [rows], float64."""
        if unit not in self._pairs:
            self._pairs[unit] = pairs_per_row(self.table(unit), self.mask.program, self.mask.captured)
        return self._pairs[unit]

    def demand(self, unit: int, batch_row: int | None = None) -> Demand:
        """The demand of one batch row, or of all of them together."""
        return Demand.of(self.table(unit), self.pairs(unit), row=batch_row)

    def pairs_by_member(self, unit: int, degree: int) -> Tensor:
        """Pairs of each unit in the heads of each member of a Ulysses group [degree, T]."""
        table = self.table(unit)
        by_head = self.pairs(unit).view(table.batch, table.heads, -1).sum(0) * (self.batch / table.batch)
        return split_heads(by_head, degree, self.heads)

    def tiles(self, tiling: MaskTiling) -> tuple[TiledRow, ...]:
        """The mask in tiles of a layout. Takes the existing table where the layout cuts no tile."""
        if tiling.batch_layouts == 1 and BLOCK_SIZE in self._tables:
            queries, kv = tiling.grids((BLOCK_SIZE, BLOCK_SIZE), 0)
            table = self._tables[BLOCK_SIZE]
            if (queries.tiles, kv.tiles) == (table.q_tiles, table.kv_tiles):
                return (TiledRow(queries=queries, kv=kv, table=table),)
        return tiling.all_rows()

    def pairs_in(self, tiles: Sequence[TiledRow]) -> Tensor | None:
        """Pairs in each row of the table of `tiles`, where they have been counted."""
        return self._pairs.get(BLOCK_SIZE) if tiles[0].table is self._tables.get(BLOCK_SIZE) else None


def search_space(works: Sequence[MaskWork], mesh: Mesh, shape: Shape, cluster: Cluster, conditions: Conditions) -> SearchSpace:
    """All options for several masks over one layout."""
    return SearchSpace(
        demands=lambda unit: [work.demand(unit) for work in works],
        pairs_by_member=lambda unit, degree: torch.stack([work.pairs_by_member(unit, degree) for work in works]).sum(0),
        length=works[0].q_len,
        mesh=mesh,
        shape=shape,
        cluster=cluster,
        conditions=conditions,
    )


def considered_for(data: PlanData, cluster: Cluster, conditions: Conditions) -> Considered | None:
    """The options for the mask of an existing plan, estimated; None where `auto` has nothing to choose from."""
    if data.q_len != data.kv_len or data.batch_layouts > 1 or data.mesh.size == 1:
        return None
    sizes = CallSizes(batch=data.batch, heads=data.heads, kv_heads=data.kv_heads, head_dim=data.head_dim)
    work = MaskWork(data.mask, data.q_len, data.kv_len, sizes)
    return consider(search_space([work], data.mesh, sizes.shape, cluster, conditions))
