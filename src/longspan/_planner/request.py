"""Masks that a plan is wanted for, with what is known of them, and what there is to consider for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longspan._balance import search as balance
from longspan._comm.mesh import Mesh
from longspan._cost import auto
from longspan._cost.pair_counts import split_heads
from longspan._cost.rates import Cluster, Shape
from longspan._masks.algebra import Full, Mask
from longspan._masks.block_table import BLOCK_SIZE, BlockTable
from longspan._masks.classify import classify
from longspan._plan.plan_data import MaskTiling, PlanData, PlannedMask, TiledRow


@dataclass(frozen=True, kw_only=True, eq=False)
class Wanted:
    """One mask of a plan to be made, checked."""

    mask: Mask
    planned: PlannedMask
    q_len: int
    kv_len: int
    batch: int
    heads: int
    tables: dict[int, BlockTable] = field(default_factory=dict)
    pairs: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, mask: Mask, q_len: int, kv_len: int, sizes: dict[str, int | None]) -> Wanted:
        extent = mask.extent
        for name in ("batch", "heads"):
            known = getattr(extent, name)
            if known is not None and sizes[name] is None:
                sizes[name] = known
        extent.check(f"mask {mask}", q_len=q_len, kv_len=kv_len, **{n: s for n in ("batch", "heads") if (s := sizes[n]) is not None})
        if isinstance(mask, Full):
            planned = PlannedMask(text=str(mask), program=None)
        else:
            with torch.no_grad():
                captured = tuple(t.detach().to("cpu", copy=True) for t in mask.traced.captured())
            planned = PlannedMask(text=str(mask), program=mask.traced.program, captured=captured)
        for name, depends in (("batch", planned.per_batch), ("heads", planned.per_head)):
            if depends and sizes[name] is None:
                raise ValueError(f"plan: mask {mask} depends on the {name.removesuffix('s')}: say {name}=… when planning")
        return cls(mask=mask, planned=planned, q_len=q_len, kv_len=kv_len, batch=sizes["batch"] or 1, heads=sizes["heads"] or 1)

    def table(self, block: int) -> BlockTable:
        """The table over even tiles, made once."""
        p, sizes = self.planned, {"block": (block, block), "batch": self.batch, "heads": self.heads}
        if block not in self.tables:
            self.tables[block] = classify(p.program, p.captured, self.q_len, self.kv_len, **sizes)  # type: ignore[arg-type]
        return self.tables[block]

    def tiles(self, tiling: MaskTiling) -> tuple[TiledRow, ...]:
        """The mask in tiles of a layout. Takes the table that was made to choose the layout, where the layout cuts no tile."""
        if tiling.rows == 1 and BLOCK_SIZE in self.tables:
            queries, kv = tiling.grids((BLOCK_SIZE, BLOCK_SIZE), 0)
            table = self.tables[BLOCK_SIZE]
            if (queries.tiles, kv.tiles) == (table.q_tiles, table.kv_tiles):
                return (TiledRow(queries=queries, kv=kv, table=table),)
        return tiling.all_rows()

    def counted_pairs(self, tiles: Sequence[TiledRow]) -> Tensor | None:
        """Pairs of each row of the table over `tiles`, where they have been counted."""
        return self.pairs.get(BLOCK_SIZE) if tiles[0].table is self.tables.get(BLOCK_SIZE) else None

    def demands(self, unit: int, rows: Sequence[int | None]) -> list[balance.Demand]:
        """What a layout is judged by, for each batch row, or for all together."""
        return [balance.Demand.of(self.table(unit), self.pairs_in(unit), row=row) for row in rows]

    def pairs_in(self, unit: int) -> Tensor:
        """Pairs of each row of the table of squares of `unit` tokens, counted once."""
        if unit not in self.pairs:
            self.pairs[unit] = balance.pairs_per_row(self.table(unit), self.planned.program, self.planned.captured)
        return self.pairs[unit]

    def shares(self, unit: int, degree: int) -> Tensor:
        """The work of each unit [degree, T] in the heads of each rank of a Ulysses group."""
        table = self.table(unit)
        by_head = self.pairs_in(unit).view(table.batch, table.heads, -1).sum(0) * (self.batch / table.batch)
        return split_heads(by_head, degree, self.heads)


def considered(
    wanted: Sequence[Wanted],
    mesh: Mesh,
    sizes: Mapping[str, int | None],
    cluster: Cluster,
    *,
    strategy: str = "auto",
    layout: str = "auto",
    stages: int | None = None,
    overlap: bool | None = None,
    exactly: Any = None,
) -> auto.Considered:
    """Every option for these masks. Sizes that are not known count as 1, the head dim as 128."""
    heads = sizes["heads"] or 1
    shape = Shape(batch=sizes["batch"] or 1, heads=heads, kv_heads=sizes["kv_heads"] or heads, head_dim=sizes["head_dim"] or 128)

    def demands(unit: int) -> list[balance.Demand]:
        return [w.demands(unit, [None])[0] for w in wanted]

    def shares(unit: int, degree: int) -> Tensor:
        return torch.stack([w.shares(unit, degree) for w in wanted]).sum(0)

    options: dict[str, Any] = {"strategy": strategy, "layout": layout, "stages": stages, "overlap": overlap, "exactly": exactly}
    return auto.consider(demands, shares, wanted[0].q_len, mesh, shape, cluster, **options)


def considered_for(data: PlanData, cluster: Cluster) -> auto.Considered | None:
    """What there would have been to consider for a plan that exists; None where it is not one that `auto` weighs."""
    if data.q_len != data.kv_len or data.rows > 1 or data.mesh.size == 1:
        return None
    sizes = {"batch": data.batch, "heads": data.heads, "kv_heads": data.kv_heads, "head_dim": data.head_dim}
    want = Wanted(mask=Full(), planned=data.mask, q_len=data.q_len, kv_len=data.kv_len, batch=data.batch or 1, heads=data.heads or 1)
    return considered([want], data.mesh, sizes, cluster)
