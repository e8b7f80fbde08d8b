"""Bounded caches of values that the engine derives from plans: tile tables, local schedules, kernels, device copies.

A plan is an immutable value without anything of a device. These values follow from a plan and the calls made with it. They are dropped with
the plan; where one plan has many, the least recently used first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longspan._comm.agreement import CallDescription
from longspan._comm.row_moves import RowMoves
from longspan._derived_cache import DerivedCache
from longspan._engine.document_tiles import LaidOutTiles, RankTiles, laid_out_tiles, tiles_of_rank
from longspan._masks.block_table import BLOCK_SIZE
from longspan._plan.plan_data import MaskTiling, PlanData, TiledRow
from longspan._plan.pooling import BlockPooling
from longspan._plan.relayout import Relayout
from longspan._plan.sharding import places

if TYPE_CHECKING:
    from longspan._engine.call_agreement import CheckedCall
    from longspan._engine.local_schedule import LocalSchedule
    from longspan._engine.pass_setup import PassSetup
    from longspan._engine.selected_grid import SelectionGrid


class PlanCache:
    """The caches, one for each kind of value."""

    def __init__(self) -> None:
        self._tiles: DerivedCache[PlanData, tuple[TiledRow, ...]] = DerivedCache(8)
        self._captured: DerivedCache[PlanData, list[Tensor]] = DerivedCache(4)
        self._laid_out: DerivedCache[MaskTiling, tuple[tuple[LaidOutTiles, ...], tuple[LaidOutTiles, ...]]] = DerivedCache(8)
        self._rank_tiles: DerivedCache[PlanData, RankTiles] = DerivedCache(8)
        self._places: DerivedCache[PlanData, Tensor] = DerivedCache(8)
        self._moves: DerivedCache[PlanData, RowMoves] = DerivedCache(16)
        self._schedules: DerivedCache[PlanData, LocalSchedule] = DerivedCache(64)
        self._pass_setups: DerivedCache[PlanData, PassSetup] = DerivedCache(128)
        self._selection_grids: DerivedCache[PlanData, SelectionGrid] = DerivedCache(8)
        self._poolings: DerivedCache[PlanData, BlockPooling] = DerivedCache(8)
        self._descriptions: DerivedCache[PlanData, CallDescription] = DerivedCache(256)
        self._scales: DerivedCache[PlanData, float] = DerivedCache(64)
        self._checked_calls: DerivedCache[PlanData, CheckedCall] = DerivedCache(256)

    def tiles(self, plan: PlanData, block: tuple[int, int]) -> tuple[TiledRow, ...]:
        """The plan's batch rows in tiles of `block` (queries, KV) tokens; the plan has its own for BLOCK_SIZE."""
        if block == (BLOCK_SIZE, BLOCK_SIZE):
            return plan.tiles
        return self._tiles.get(plan, block, lambda: plan.tiling.all_rows(block))

    def captured(self, plan: PlanData, device: torch.device) -> list[Tensor]:
        """The mask's captured tensors on a device."""
        return self._captured.get(plan, device, lambda: [t.to(device) for t in plan.mask.captured])

    def rank_tiles(self, plan: PlanData, batch: int, heads: int) -> RankTiles:
        """A rank's tiles in `longspan.invariant()`. Virtual ranks share a plan's `tiling`, and with it what does not depend on the rank."""
        key = (batch, heads)

        def of_rank() -> RankTiles:
            layouts = tuple(layout.digest for layout in plan.layouts)
            laid_out = self._laid_out.get(plan.tiling, (key, layouts), lambda: laid_out_tiles(plan, batch=batch, heads=heads))
            return tiles_of_rank(laid_out, plan.mesh.rank)

        return self._rank_tiles.get(plan, key, of_rank)

    def places(self, plan: PlanData, side: int, device: torch.device) -> Tensor:
        """The place of each position of the queries (side 0) or of the KV (1) in the concatenated shards of all ranks, on a device."""
        return self._places.get(plan, (side, device), lambda: places(plan.layouts[side], device))

    def moves(self, plan: PlanData, move: Relayout, device: torch.device, *, back: bool) -> RowMoves:
        """A rank's part of a relayout of the plan's tokens, or of the relayout back, on a device."""
        key = (move.before.digest, move.after.digest, move.heads_dim is None, device, back)
        return self._moves.get(plan, key, lambda: move.moves(device, back=back))

    def schedule(self, plan: PlanData, key: Hashable, make: Callable[[], LocalSchedule]) -> LocalSchedule:
        """A rank's local schedule."""
        return self._schedules.get(plan, key, make)

    def pass_setup(self, plan: PlanData, key: Hashable, choose: Callable[[], PassSetup]) -> PassSetup:
        """The kernel and the local schedule of one kind of call."""
        return self._pass_setups.get(plan, key, choose)

    def selection_grid(self, plan: PlanData, key: Hashable, make: Callable[[], SelectionGrid]) -> SelectionGrid:
        """The tiles from which selections of one kind choose."""
        return self._selection_grids.get(plan, key, make)

    def pooling(self, plan: PlanData, block: int) -> BlockPooling:
        """The blocks of keys of which each rank owns tokens."""
        layout, mesh = plan.layouts[1], plan.mesh
        return self._poolings.get(plan, block, lambda: BlockPooling(layout=layout, mesh=mesh, block=block))

    def description(self, plan: PlanData, key: Hashable, describe: Callable[[], CallDescription]) -> CallDescription:
        """One kind of call with a selection, as all ranks must describe it."""
        return self._descriptions.get(plan, key, describe)

    def scale(self, plan: PlanData, key: Hashable, check: Callable[[], float]) -> float:
        """The scale of one kind of call, whose arguments were checked."""
        return self._scales.get(plan, key, check)

    def checked_call(self, plan: PlanData, key: Hashable, check: Callable[[], CheckedCall]) -> CheckedCall:
        """One kind of call, checked on this rank."""
        return self._checked_calls.get(plan, key, check)


plan_cache = PlanCache()
