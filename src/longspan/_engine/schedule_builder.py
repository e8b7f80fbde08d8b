"""From a plan to one rank's `LocalSchedule`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longspan._engine.buffer_rows import RowSelection
from longspan._engine.local_schedule import ComputeStep, LocalSchedule, StageExchange, StepTiles
from longspan._engine.plan_cache import plan_cache
from longspan._kernels.tiling import Tiling
from longspan._masks.block_table import expand_ranges
from longspan._plan.local_split import late_share, late_tiles
from longspan._plan.plan_data import PlanData
from longspan._plan.tile_grid import TileGrid, coverage


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Options of a local schedule.

    Attributes:
        block: Tile size (queries, KV).
        heads: First query head and one past the last, where the rank computes some heads only; None for all.
        backward: Only KV that a rank reads is received (`PlanData.backward_schedule`), and stages in which nothing moves on any rank are
            left out.
        merge_stages: All stages of a step are one all-to-all: on CUDA, where starting a collective takes as long as launching several
            kernels, and where K and V are sent separately. Otherwise each stage is one, and its rows are packed when it begins.
        split_bytes: Of a backward pass, (bytes of a KV element, bytes of a gradient element in flight). The local KV is then split between
            tiles into a first and a last step, in proportion to the transfers that each overlaps with (`late_share`). It stays in one
            step where batch rows differ, where no received KV is computed, and where there are not two tiles to compute.
    """

    block: tuple[int, int]
    heads: tuple[int, int] | None = None
    backward: bool = False
    merge_stages: bool = False
    split_bytes: tuple[int, int] | None = None


def local_schedule(plan: PlanData, options: ScheduleOptions) -> LocalSchedule:
    """This rank's schedule, cached. One object for both passes where the backward pass moves what the forward pass does."""
    if options.backward and plan.backward_schedule is plan.schedule and int(plan.schedule.active_stages.sum()) == plan.schedule.stages:
        options = replace(options, backward=False)
    return plan_cache.schedule(plan, options, lambda: _ScheduleBuilder(plan, options).build())


class _ScheduleBuilder:
    def __init__(self, plan: PlanData, options: ScheduleOptions) -> None:
        self.plan, self.options = plan, options
        self.moves = plan.backward_schedule if options.backward else plan.schedule
        self.rank = 0 if plan.kv_axis is None else plan.mesh.coordinate[plan.kv_axis]
        self.ranks = plan.inner[0].ranks
        self.local_tokens = plan.inner[1].local_len(self.rank)
        self.tiled_rows = plan_cache.tiles(plan, options.block)
        self.q_order = [tiled.queries.of_rank(self.rank) for tiled in self.tiled_rows]
        self.q_tilings = [tiling_of(tiled.queries, order) for tiled, order in zip(self.tiled_rows, self.q_order, strict=True)]
        self.receives, self.sends = self.moves.receiver == self.rank, self.moves.source == self.rank
        moves_per_stage = torch.bincount(self.moves.stage, minlength=self.moves.stages).tolist()
        keep_empty = not (options.backward and int(self.moves.active_stages.sum()) < self.moves.stages)
        self.stage_is_active = [count > 0 or keep_empty for count in moves_per_stage]

    def build(self) -> LocalSchedule:
        if self.options.split_bytes is not None:
            whole = local_schedule(self.plan, replace(self.options, split_bytes=None))
            return self._split(whole, *self.options.split_bytes)
        stages = self.moves.steps
        first = 1 if self.moves.joined else 0
        steps = [self._step(stages[0] if first else range(0), with_local=True)]
        steps += [self._step(group, with_local=False) for group in stages[first:] if any(self.stage_is_active[s] for s in group)]
        batch_rows = range(self.plan.batch_layouts)
        last = [max([i for i, step in enumerate(steps) if not step.tiles[row].empty], default=0) for row in batch_rows]
        by_row = [_mark_complete([step.tiles[row] for step in steps], last[row]) for row in batch_rows]
        steps = [replace(step, tiles=tuple(tiles[i] for tiles in by_row)) for i, step in enumerate(steps)]
        return LocalSchedule(steps=tuple(steps), last_step=tuple(last))

    def _split(self, whole: LocalSchedule, kv_bytes: int, grad_bytes: int) -> LocalSchedule:
        """The same schedule with the first tiles of the local KV in a step of their own at the end."""
        first, *received = whole.steps
        if len(first.tiles) > 1 or self.moves.joined or all(step.empty for step in received):
            return whole
        local_tiles = self.tiled_rows[0].kv.of_rank(self.rank)
        share = late_share(received[0].transfer_rows * kv_bytes, received[-1].transfer_rows * grad_bytes)
        table = first.tiles[0].table
        q_tiles = coverage(torch.zeros(len(table.first), dtype=torch.int64), table.first, table.last + 1, len(local_tiles), range(1))
        max_tiles = max(step.received_rows for step in received) // self.options.block[1] if len(received) > 1 else None
        late = late_tiles(q_tiles[0], share, max_tiles)
        if not late:
            return whole
        early_tiles, last_tiles = (self._tiles(0, tiles, kv_rows=None) for tiles in (local_tiles[late:], local_tiles[:late]))
        cut = last_tiles.kv_tiles.length
        early, last = (
            ComputeStep(buffer_rows=len(local), local=local, exchanges=(), tiles=(tiles,))
            for local, tiles in ((range(cut, first.buffer_rows), early_tiles), (range(cut), last_tiles))
        )
        return LocalSchedule(steps=(early, *received, last), last_step=(len(received) + 1,))

    def _step(self, stages: range, *, with_local: bool) -> ComputeStep:
        local_tokens = self.local_tokens if with_local else 0
        exchanges, offset = [], local_tokens * len(self.tiled_rows)
        tiles = [[tiled.kv.of_rank(self.rank)] if with_local else [] for tiled in self.tiled_rows]
        buffer_rows = [[torch.arange(row * local_tokens, (row + 1) * local_tokens)] for row in range(len(self.tiled_rows))]
        for merged in [stages] if self.options.merge_stages and stages else [range(stage, stage + 1) for stage in stages]:
            if not any(self.stage_is_active[stage] for stage in merged):
                continue
            exchange, received = self._exchange(merged, offset)
            for row, (received_tiles, place) in enumerate(received):
                tiles[row].append(received_tiles)
                buffer_rows[row].append(place + offset)
            exchanges.append(exchange)
            offset = exchange.stop
        step_tiles = []
        for row in range(len(self.tiled_rows)):
            # Without exchanges, the KV of a batch row is a slice of a tensor, not rows of a common buffer.
            kv_rows = RowSelection.of(torch.cat(buffer_rows[row])) if len(self.tiled_rows) > 1 and exchanges else None
            step_tiles.append(self._tiles(row, torch.cat(tiles[row]), kv_rows=kv_rows))
        local = range(local_tokens * len(self.tiled_rows))
        return ComputeStep(buffer_rows=offset, local=local, exchanges=tuple(exchanges), tiles=tuple(step_tiles))

    def _tiles(self, row: int, kv_tiles: Tensor, *, kv_rows: RowSelection | None) -> StepTiles:
        heads = None if self.options.heads is None else range(*self.options.heads)
        table = self.tiled_rows[row].table.select(self.q_order[row], kv_tiles, heads=heads)
        return StepTiles(table=table, q_tiles=self.q_tilings[row], kv_tiles=tiling_of(self.tiled_rows[row].kv, kv_tiles), kv_rows=kv_rows)

    def _exchange(self, stages: range, offset: int) -> tuple[StageExchange, list[tuple[Tensor, Tensor]]]:
        """The all-to-all of these stages, and for each batch row its received tiles and the places of their tokens: by rank, then stage."""
        moves = self.moves
        now = (moves.stage >= stages.start) & (moves.stage < stages.stop)
        received, sent = (torch.nonzero(mine & now).flatten() for mine in (self.receives, self.sends))
        received = received[moves.source[received].argsort(stable=True)]
        sent = sent[moves.receiver[sent].argsort(stable=True)]
        recv_counts, send_counts = (
            torch.zeros(self.ranks, dtype=torch.int64).index_add_(0, rank[chosen], moves.length[chosen]).tolist()
            for rank, chosen in ((moves.source, received), (moves.receiver, sent))
        )
        sent_rows = torch.zeros(sum(send_counts), dtype=torch.int64)
        for row, (tiles, place) in enumerate(self._moved(sent)):
            grid = self.tiled_rows[row].kv
            sent_rows[place] = expand_ranges(grid.row[tiles], grid.count[tiles]) + row * self.local_tokens
        exchange = StageExchange(
            what=f"{_stage_names(stages)} of {moves.stages} ({self.plan.strategy})",
            start=offset,
            stop=offset + sum(recv_counts),
            recv_counts=tuple(recv_counts),
            send_counts=tuple(send_counts),
            sent=RowSelection.of(sent_rows),
            sent_to=tuple(RowSelection.of(rows) for rows in sent_rows.split(send_counts)),
        )
        return exchange, self._moved(received)

    def _moved(self, chosen: Tensor) -> list[tuple[Tensor, Tensor]]:
        """For each batch row, the tiles of the chosen moves, and the places of their tokens when the moves are concatenated."""
        batch_row, start, length = self.moves.row[chosen], self.moves.start[chosen], self.moves.length[chosen]
        offset = length.cumsum(0) - length
        by_row = []
        for row, tiled in enumerate(self.tiled_rows):
            here = batch_row == row
            first, end = tiled.kv.within(start[here], length[here])
            by_row.append((expand_ranges(first, end - first), expand_ranges(offset[here], length[here])))
        return by_row


def _mark_complete(steps: list[StepTiles], last: int) -> list[StepTiles]:
    """The tiles of one batch row, step by step, each with the query tiles whose last visible KV arrives in that step.

    Unchanged where a query tile is not complete at the same step in all heads and batch rows.
    """
    count = steps[0].table.q_tiles
    done, complete = torch.zeros(count, dtype=torch.bool), {}
    for i in range(last, -1, -1):
        table = steps[i].table
        seen = table.tiles_per_row.view(table.batch * table.heads, count) > 0
        complete[i] = seen.all(0) & ~done
        if not torch.equal(complete[i], seen.any(0) & ~done):
            return steps
        done |= complete[i]
    if not bool(done.all()):
        return steps
    return [
        replace(tiles, complete_q_tiles=complete[i]) if i < last and bool(complete[i].any()) else tiles for i, tiles in enumerate(steps)
    ]


def _stage_names(stages: range) -> str:
    return f"stage {stages.stop}" if len(stages) == 1 else f"stages {stages.start + 1} to {stages.stop}"


def tiling_of(grid: TileGrid, tiles: Tensor) -> Tiling:
    """The tiling of a buffer in which these tiles follow each other."""
    count = grid.count[tiles]
    length = int(count.sum())
    position = grid.edges[tiles]
    row = count.cumsum(0) - count
    if len(tiles) and torch.equal(position, row) and torch.equal(position, torch.arange(0, length, grid.block)):
        return Tiling(length=length, block=grid.block)
    return Tiling(length=length, block=grid.block, row=row.int(), pos=position.int(), count=count.int())
