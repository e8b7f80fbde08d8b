"""The workload of a plan, counted from its block tables and its schedule. Legend as in `longspan._cost.workload`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from longspan._cost.rates import Shape
from longspan._cost.workload import BackwardMoves, Peers, Placement, Workload
from longspan._derived_cache import DerivedCache
from longspan._masks.block_table import BLOCK_SIZE, FULL, PARTIAL, BlockTable
from longspan._plan.local_split import late_tiles
from longspan._plan.plan_data import PlanData
from longspan._plan.schedule import Schedule
from longspan._plan.tile_grid import coverage

CHUNK = 1 << 24  # entries of a (rank, tile) matrix at once

_workloads: DerivedCache[PlanData, Workload] = DerivedCache(4)  # by devices per node


def shape_of(data: PlanData) -> Shape:
    """The shape of a plan's calls. Unknown sizes count as 1, the head dim as 128."""
    heads = data.heads or 1
    grad_element = 4 if data.grad_reduce_dtype is None else data.grad_reduce_dtype.itemsize
    return Shape(
        batch=data.batch or 1, heads=heads, kv_heads=data.kv_heads or heads, head_dim=data.head_dim or 128, grad_element=grad_element
    )


def of_plan(data: PlanData, per_node: int) -> Workload:
    """The exact workload of a plan on nodes of `per_node` devices."""
    work = _workloads.get(data, per_node, lambda: _PlanCounter(data, per_node).workload())
    return work.join() if data.schedule.joined else work


class _PlanCounter:
    """Counts the workload of one plan, with local KV apart whether or not the schedule is joined."""

    def __init__(self, data: PlanData, per_node: int) -> None:
        self.data, self.shape = data, shape_of(data)
        self.placement = Placement.of(data.mesh, data.head_axis, data.kv_axis, per_node)
        self.ranks, self.groups = data.inner[0].ranks, data.schedule.steps
        self.step_of_stage = torch.zeros(data.schedule.stages + 1, dtype=torch.int64)
        for i, stages in enumerate(self.groups):
            self.step_of_stage[stages.start : stages.stop] = i + 1

    def workload(self) -> Workload:
        data, shape = self.data, self.shape
        query_tiles, full, partial, active = self._tiles()
        received, sent, gathered = self._moved(data.schedule)
        tokens = data.tokens.double()
        work = Workload(
            ranks=self.ranks,
            degree=data.degree,
            rank=torch.arange(self.ranks),
            query_tiles=query_tiles,
            full=full,
            partial=partial,
            received=received,
            sent=sent,
            exchanges=torch.tensor([0, *(len(stages) for stages in self.groups)], dtype=torch.float64),
            local=tokens[0, data.groups].amax(1),
            local_kv=tokens[1, data.groups].amax(1),
            cross_node_share=self.placement.cross_node_share,
            shape=shape,
            scale=1 if data.batch_layouts > 1 else shape.batch,
            active_tiles=active,
            gathered=gathered,
            peers=self._peers(data.schedule),
            backward=self._backward_moves(),
        )
        return work.with_halves(self._halves(work.with_backward_moves())) if self.groups else work

    def _repeats(self, table: BlockTable) -> float:
        """How often a table's tiles are computed: for the heads and batch rows that share them, over the ranks that share the heads."""
        batch = self.shape.batch // table.batch if self.data.batch_layouts == 1 else 1
        return self.shape.heads // table.heads * batch / self.data.degree

    def _tiles(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`query_tiles`, `full`, `partial` and `active_tiles` of the workload."""
        data, steps = self.data, len(self.groups) + 1
        full, partial, active = torch.zeros(3, self.ranks, steps, dtype=torch.float64)
        query_tiles = torch.zeros(self.ranks, dtype=torch.float64)
        s = data.schedule
        for row, tiles in enumerate(data.tiles):
            table, owner = tiles.table, tiles.queries.owner
            repeats = self._repeats(table)
            batch = self.shape.batch if data.batch_layouts == 1 else 1
            query_tiles += torch.bincount(owner, minlength=self.ranks) * self.shape.heads / data.degree * batch
            chosen = s.row == row
            stage, receiver, start, length = (c[chosen] for c in (s.stage, s.receiver, s.start, s.length))
            first, end = tiles.kv.within(start, length)
            for part in _chunks(self.ranks, tiles.kv.tiles):
                step = _arrival_steps(part, tiles.kv.tiles, receiver, first, end, self.step_of_stage[stage]).clamp(min=0)
                for kind, total in ((FULL, full), (PARTIAL, partial)):
                    computed = computed_tiles(table, kind, owner, part)
                    total[part.start : part.stop].scatter_add_(1, step, computed.double() * repeats)
                active[part.start : part.stop] += _active(table, owner, step, part, steps) * repeats
        return query_tiles, full, partial, active

    def _moved(self, s: Schedule) -> tuple[Tensor, Tensor, Tensor]:
        """`received`, `sent` and `gathered` of a schedule."""
        steps = len(s.steps) + 1
        crosses = self.placement.node(s.receiver) != self.placement.node(s.source)
        totals = []
        for rank in (s.receiver, s.source):
            total = torch.zeros(2 * self.ranks * steps, dtype=torch.float64)
            total.index_add_(0, (crosses * self.ranks + rank) * steps + self.step_of_stage[s.stage], s.length.double())
            totals.append(total.view(2, self.ranks, steps))
        return totals[0], totals[1], self._gathered(s)

    def _gathered(self, s: Schedule) -> Tensor:
        """Tokens sent in stages in which some receiver gets anything but one contiguous range of the sender's rows [R, K + 1]."""
        data, ranks = self.data, self.ranks
        begin = torch.tensor([data.inner[1].local_len(rank) for rank in range(ranks)])[s.source] * s.row  # batch rows follow each other
        for row, tiles in enumerate(data.tiles):
            here = s.row == row
            begin[here] += tiles.kv.row[tiles.kv.within(s.start[here], s.length[here])[0]]
        sender = s.stage * ranks + s.source
        key = sender * ranks + s.receiver
        order = torch.argsort(key, stable=True)
        # Moves that each begin where the one before ends are one contiguous range.
        breaks = (begin[order][1:] != (begin + s.length)[order][:-1]) & (key[order].diff() == 0)
        break_count = torch.zeros(s.stages * ranks, dtype=torch.int64).index_add_(0, sender[order][1:], breaks.long())
        sent = torch.zeros(s.stages * ranks, dtype=torch.float64).index_add_(0, sender, s.length.double())
        copied = torch.where(break_count > 0, sent, 0.0).view(s.stages, ranks)
        return torch.zeros(len(s.steps) + 1, ranks, dtype=torch.float64).index_add_(0, self.step_of_stage[: s.stages], copied).T

    def _peers(self, s: Schedule) -> Peers:
        ranks = self.ranks
        line = ((self.step_of_stage[s.stage] * ranks + s.receiver) * ranks + s.source).unique()
        step, pair = line // (ranks * ranks), line % (ranks * ranks)
        edges = torch.searchsorted(step, torch.arange(len(s.steps) + 2)).tolist()
        return tuple((pair[a:b] // ranks, pair[a:b] % ranks) for a, b in pairwise(edges))

    def _backward_moves(self) -> BackwardMoves | None:
        moves = self.data.backward_schedule
        if moves is self.data.schedule and int(moves.active_stages.sum()) == moves.stages:
            return None
        received, sent, gathered = self._moved(moves)
        exchanges = torch.cat([torch.zeros(1), moves.active_stages]).double()
        return BackwardMoves(received, sent, gathered, exchanges, self._peers(moves))

    def _halves(self, work: Workload) -> Tensor:
        """Full, partial and active tiles of the two parts of local KV in backward [3, R, 2]. `work`: with the moves of backward."""
        if self.data.batch_layouts > 1:
            assert work.active_tiles is not None
            local = torch.stack([work.full[:, 0], work.partial[:, 0], work.active_tiles[:, 0]])
            return torch.stack([local, torch.zeros_like(local)], 2)
        tiles = self.data.tiles[0]
        table, owner, kv = tiles.table, tiles.queries.owner, tiles.kv
        repeats = self._repeats(table)
        share, halves = work.late_fraction.tolist(), torch.zeros(3, work.ranks, 2, dtype=torch.float64)
        several = int((work.received.sum((0, 1)) > 0).sum()) > 1
        # With several steps, the gradients of the second part must fit into the buffer of received KV.
        limit = (work.received.sum(0).amax(1) // BLOCK_SIZE).tolist() if several else [None] * work.ranks
        for part in _chunks(work.ranks, kv.tiles):
            computed = [computed_tiles(table, kind, owner, part) for kind in (FULL, PARTIAL)]
            half, both = torch.full_like(computed[0], -1), computed[0] + computed[1]
            for i, rank in enumerate(part):
                local_tiles = kv.of_rank(rank)
                half[i, local_tiles] = 0
                half[i, local_tiles[: late_tiles(both[i, local_tiles], share[rank], limit[rank])]] = 1
            for i in range(2):
                for kind, total in zip(computed, halves, strict=False):
                    total[part.start : part.stop, i] = (kind * (half == i)).sum(1) * repeats
            halves[2, part.start : part.stop] = _active(table, owner, half, part, 2) * repeats
        return halves


def _chunks(ranks: int, tiles: int) -> Iterator[range]:
    """Ranges of ranks with at most CHUNK (rank, tile) entries."""
    size = max(1, CHUNK // max(1, tiles))
    for start in range(0, ranks, size):
        yield range(start, min(ranks, start + size))


def _arrival_steps(part: range, tiles: int, receiver: Tensor, first: Tensor, end: Tensor, step: Tensor) -> Tensor:
    """The step in which each tile arrives at each rank of `part` [len(part), T], int64; −1 where it does not arrive."""
    mine = ((receiver >= part.start) & (receiver < part.stop)).nonzero()[:, 0]
    base = (receiver[mine] - part.start) * (tiles + 1)
    change = torch.zeros(len(part) * (tiles + 1), dtype=torch.int64)
    change.index_add_(0, base + first[mine], step[mine] + 1)
    change.index_add_(0, base + end[mine], -(step[mine] + 1))
    return change.view(len(part), -1).cumsum(1)[:, :-1] - 1


def computed_tiles(table: BlockTable, kind: int, owner: Tensor, part: range) -> Tensor:
    """How many query tiles of each rank of `part` compute each KV tile [len(part), T], over the table's heads and batch rows."""
    ptr, first, last = table.runs(kind)
    q_tile = torch.repeat_interleave(torch.arange(table.rows), ptr.diff()) % max(1, table.q_tiles)
    return coverage(owner[q_tile], first, last + 1, table.kv_tiles, part)


def _active(table: BlockTable, owner: Tensor, step: Tensor, part: range, steps: int) -> Tensor:
    """How many rows of the table, of each rank of `part`, see any KV tile of each step [len(part), steps]."""
    size = step.shape[1] + 1
    owners = owner.repeat(table.rows // max(1, table.q_tiles)) - part.start
    mine = (owners >= 0) & (owners < len(part))
    runs = []
    for kind in (FULL, PARTIAL):
        ptr, first, last = table.runs(kind)
        row = torch.repeat_interleave(torch.arange(table.rows), ptr.diff())
        here = mine[row]
        row, base = row[here], owners[row[here]] * size
        runs.append((row, base + first[here], base + last[here] + 1))
    row, first, end = (torch.cat(column) for column in zip(*runs, strict=True))
    active = torch.zeros(len(part), steps, dtype=torch.float64)
    before = torch.zeros(len(part), size, dtype=torch.int32)
    for s in range(steps):
        torch.cumsum(step == s, 1, dtype=torch.int32, out=before[:, 1:])
        seen = torch.zeros(table.rows, dtype=torch.bool)
        seen[row[before.view(-1)[end] > before.view(-1)[first]]] = True
        active[:, s] = torch.bincount(owners[seen], minlength=len(part))
    return active
