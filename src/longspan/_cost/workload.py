"""What each rank has to do, step by step: tiles to compute, keys to receive and to send.

Legend: R ranks of the ring axis (or some of them), K + 1 steps (step 0 is over local keys, and empty where the schedule is joined), T key
tiles. Backward has a step more where local keys are computed in two parts: before what arrives and after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from longspan._comm.mesh import Mesh
from longspan._cost.rates import Shape
from longspan._masks.block_table import BLOCK_SIZE, FULL, PARTIAL, BlockTable
from longspan._plan.derived_cache import DerivedCache
from longspan._plan.local_split import late_share, late_tiles
from longspan._plan.plan_data import PlanData
from longspan._plan.schedule import Schedule
from longspan._plan.tile_grid import coverage

CHUNK = 1 << 24  # entries of a (rank, tile) matrix at once


class Again(NamedTuple):
    """What backward brings again and sends gradients home of: as in `Workload`."""

    received: Tensor
    sent: Tensor
    gathered: Tensor | None
    exchanges: Tensor
    pairs: tuple[tuple[Tensor, Tensor], ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """Tensors are float64. `rank` [R]: which ranks of `ranks` these are.

    rows:               tiles of queries times heads and batch rows that a rank computes for [R], or in each step [R, K + 1].
    busy [R, K + 1]:    those of them that see any of a step's keys; None: all of them, in every step that computes anything.
    full, partial:      tiles times heads and batch rows, of each step [R, K + 1].
    received, sent:     tokens of keys, of each step, from and to ranks of the own node and of others [2, R, K + 1].
    again:              what moves in backward; None: as much as forward.
    gathered [R, K + 1]: tokens of `sent` that do not lie side by side and are copied first; None: none of them.
    exchanges [K + 1]:  exchanges that a step waits for.
    local [R]:          tokens (queries) of one batch row that a rank of the mesh owns, the largest of a Ulysses group.
    local_keys [R]:     the same of keys; None: as many as queries.
    degree:             ranks that share the heads; `turned`: the share of a transpose that crosses nodes.
    scale:              batch rows per token counted in `received` and `sent`.
    fold:               bytes read and written beside the kernels' work [R, K + 1], both passes alike; None: as the engine does it.
    pairs:              for each step, who gets keys from whom; () where only some ranks are looked at.
    joined:             local keys are computed with those of step 1.
    halves:             full, partial and busy of the local keys' first and second part, backward [3, R, 2]; None: estimated. Where it is
                        given, the last of the K + 1 columns stands for the second part and is empty.
    """

    ranks: int
    degree: int
    rank: Tensor
    rows: Tensor
    full: Tensor
    partial: Tensor
    received: Tensor
    sent: Tensor
    exchanges: Tensor
    local: Tensor
    turned: float
    shape: Shape
    scale: int = 1
    busy: Tensor | None = None
    gathered: Tensor | None = None
    fold: Tensor | None = None
    pairs: tuple[tuple[Tensor, Tensor], ...] = ()
    local_keys: Tensor | None = None
    joined: bool = False
    halves: Tensor | None = None
    again: Again | None = None

    def back(self) -> Workload:
        """The same with what moves in backward."""
        return self if self.again is None else replace(self, **self.again._asdict(), again=None)

    def join(self) -> Workload:
        """The same with local keys computed with those of step 1, by as many rows as see any of either."""
        if self.halves is not None:
            return self._columns(-1).join()
        full, partial = self.full.clone(), self.partial.clone()
        for tiles in (full, partial):
            tiles[:, 1] += tiles[:, 0]
            tiles[:, 0] = 0
        busy = None if self.busy is None else self.busy.clone()
        if busy is not None:
            busy[:, 1] = busy[:, :2].amax(1)
            busy[:, 0] = 0
        return replace(self, full=full, partial=partial, busy=busy, joined=True)

    def split(self) -> Workload:
        """The same as backward computes it: the last step is over the second part of the local keys. Itself where they are in one part."""
        if self.joined or self.fold is not None or not self.travels:
            return self
        found = self if self.halves is not None else self._columns(1)
        full, partial = found.full.clone(), found.partial.clone()
        busy = (found.rows if found.rows.ndim == 2 else found.rows[:, None].expand_as(full)) if found.busy is None else found.busy
        busy = busy.clone()
        if self.halves is None:
            # By bytes, as far as tiles allow. Rows that see any local keys are taken to see both parts.
            share = self.late[:, None]
            local = torch.cat([1 - share, share], 1)
            halves = torch.stack([full[:, :1] * local, partial[:, :1] * local, busy[:, :1] * (local > 0)])
        else:
            halves = self.halves
        for tiles, half in zip((full, partial, busy), halves, strict=True):
            tiles[:, 0], tiles[:, -1] = half[:, 0], half[:, 1]
        return replace(found, full=full, partial=partial, busy=busy, halves=halves)

    @property
    def late(self) -> Tensor:
        """Of the local keys' work, what backward computes last [R]: nothing where nothing that arrives is computed."""
        moved = torch.maximum(self.received.sum(0), self.sent.sum(0))
        some = moved.sum(0).nonzero()[:, 0].tolist() or [0]  # steps for which anything moves anywhere
        first, last = moved[:, some[0]] * self.shape.element, moved[:, some[-1]] * self.shape.grad_element
        computed = (self.full + self.partial)[:, 1:].sum(1) > 0
        found = [late_share(a, b) if c else 0.0 for a, b, c in zip(first.tolist(), last.tolist(), computed.tolist(), strict=True)]
        return torch.tensor(found, dtype=torch.float64)

    def _columns(self, more: int) -> Workload:
        """The same with an empty step more at the end, or without that step (−1)."""

        def cut(x: Tensor) -> Tensor:
            return torch.nn.functional.pad(x, (0, more))

        def cut_some(x: Tensor | None) -> Tensor | None:
            return None if x is None else cut(x)

        def pairs_of(pairs: tuple[tuple[Tensor, Tensor], ...]) -> tuple[tuple[Tensor, Tensor], ...]:
            return pairs if more < 0 or not pairs else (*pairs, pairs[0])

        return replace(
            self,
            rows=self.rows if self.rows.ndim == 1 else torch.cat([self.rows, self.rows[:, :1]], 1)[:, : self.steps + more],
            full=cut(self.full),
            partial=cut(self.partial),
            received=cut(self.received),
            sent=cut(self.sent),
            again=None
            if (a := self.again) is None
            else Again(cut(a.received), cut(a.sent), cut_some(a.gathered), cut(a.exchanges), pairs_of(a.pairs)),
            exchanges=cut(self.exchanges),
            busy=cut_some(self.busy),
            gathered=cut_some(self.gathered),
            pairs=pairs_of(self.pairs),
            halves=None,
        )

    @property
    def travels(self) -> int:
        """Steps whose keys arrive."""
        return int((self.exchanges > 0).sum())

    @property
    def keys(self) -> Tensor:
        """Tokens of keys that a rank of the mesh owns [R]."""
        return self.local if self.local_keys is None else self.local_keys

    @property
    def steps(self) -> int:
        return self.full.shape[1]

    @property
    def key_bytes(self) -> int:
        """Bytes of one token's keys and values as they move along the ring axis."""
        s = self.shape
        return 2 * self.scale * s.kv_heads_of(self.degree) * s.head_dim * s.element


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where ranks are: rank j of the ring axis is device j · stride.

    Attributes:
        per_node: Devices per node.
        stride: Devices between neighbours of the ring axis.
        degree: Members of a Ulysses group.
        member_stride: Devices between neighbours of a Ulysses group.
    """

    per_node: int
    stride: int = 1
    degree: int = 1
    member_stride: int = 1

    @classmethod
    def of(cls, mesh: Mesh, ulysses: int | None, ring: int | None, per_node: int) -> Placement:
        """The placement of a mesh whose devices are numbered in row-major order."""
        sizes = [axis.size for axis in mesh.axes]
        strides = [sizes[1], 1] if len(sizes) == 2 else [1]
        return cls(
            per_node=per_node,
            stride=1 if ring is None else strides[ring],
            degree=1 if ulysses is None else sizes[ulysses],
            member_stride=1 if ulysses is None else strides[ulysses],
        )

    def node(self, rank: Tensor) -> Tensor:
        """The node of each rank of the ring axis."""
        return rank * self.stride // self.per_node

    @property
    def cross_node_share(self) -> float:
        """The share of a Ulysses transpose's traffic that leaves the node, seen from the group's first device."""
        members = torch.arange(self.degree) * self.member_stride // self.per_node
        return float((members != members[0]).sum()) / max(1, self.degree - 1)


def shape_of(data: PlanData) -> Shape:
    """Sizes that the plan does not know count as 1, the head dim as 128."""
    heads = data.heads or 1
    grad = 4 if data.grad_reduce_dtype is None else data.grad_reduce_dtype.itemsize
    return Shape(batch=data.batch or 1, heads=heads, kv_heads=data.kv_heads or heads, head_dim=data.head_dim or 128, grad_element=grad)


_cached: DerivedCache[Workload] = DerivedCache(4)  # by devices per node


def of_plan(data: PlanData, per_node: int) -> Workload:
    """Exactly what the plan says."""
    apart = _cached.get(data, per_node, lambda: _of_plan(data, per_node))
    return apart.join() if data.schedule.joined else apart


def _of_plan(data: PlanData, per_node: int) -> Workload:
    """Local keys apart, whether the schedule is joined or not."""
    ranks, shape, placement = data.inner[0].ranks, shape_of(data), Placement.of(data.mesh, data.ulysses, data.ring, per_node)
    steps = data.schedule.steps
    count = len(steps) + 1
    full, partial, busy = torch.zeros(3, ranks, count, dtype=torch.float64)
    rows = torch.zeros(ranks, dtype=torch.float64)
    step_of_stage = torch.zeros(data.schedule.stages + 1, dtype=torch.int64)
    for i, group in enumerate(steps):
        step_of_stage[group.start : group.stop] = i + 1
    for row in range(data.rows):
        table, queries, keys = data.tiles[row].table, data.tiles[row].queries, data.tiles[row].kv
        many = shape.heads // table.heads * (shape.batch // table.batch if data.rows == 1 else 1) / data.degree
        rows += torch.bincount(queries.owner, minlength=ranks) * shape.heads / data.degree * (shape.batch if data.rows == 1 else 1)
        chosen = data.schedule.row == row if data.rows > 1 else slice(None)
        stage, receiver, start, length = (
            c[chosen] for c in (data.schedule.stage, data.schedule.receiver, data.schedule.start, data.schedule.length)
        )
        first, end = keys.within(start, length)
        for part in _chunks(ranks, keys.tiles):
            step = _step_map(part, keys.tiles, receiver, first, end, step_of_stage[stage])
            step[step < 0] = 0
            for kind, total in ((FULL, full), (PARTIAL, partial)):
                covered = _coverage(table, kind, queries.owner, part)
                total[part.start : part.stop].scatter_add_(1, step, covered.double() * many)
            busy[part.start : part.stop] += _busy(table, queries.owner, step, part, count) * many
    received, sent, gathered = _moved(data, data.schedule, placement, step_of_stage, ranks)
    lens = data.tokens.double()
    found = Workload(
        ranks=ranks,
        degree=data.degree,
        rank=torch.arange(ranks),
        rows=rows,
        full=full,
        partial=partial,
        received=received,
        sent=sent,
        exchanges=torch.tensor([0, *(len(group) for group in steps)], dtype=torch.float64),
        local=lens[0, data.groups].amax(1),
        local_keys=lens[1, data.groups].amax(1),
        turned=placement.cross_node_share,
        shape=shape,
        scale=1 if data.rows > 1 else shape.batch,
        busy=busy,
        gathered=gathered,
        pairs=_pairs(data.schedule, step_of_stage, ranks),
        again=_again(data, placement, step_of_stage, ranks),
    )
    return replace(found._columns(1), halves=_halves(data, found.back())) if steps else found


def _again(data: PlanData, placement: Placement, step_of_stage: Tensor, ranks: int) -> Again | None:
    moves = data.returns
    if moves is data.schedule and int(moves.carried.sum()) == moves.stages:
        return None
    received, sent, gathered = _moved(data, moves, placement, step_of_stage, ranks)
    exchanges = torch.cat([torch.zeros(1), moves.carried]).double()
    return Again(received, sent, gathered, exchanges, _pairs(moves, step_of_stage, ranks))


def _halves(data: PlanData, work: Workload) -> Tensor:
    """Of the local keys' parts in backward, (full, partial, busy) [3, R, 2]."""
    if data.rows > 1:
        assert work.busy is not None
        local = torch.stack([work.full[:, 0], work.partial[:, 0], work.busy[:, 0]])
        return torch.stack([local, torch.zeros_like(local)], 2)
    table, queries, keys = data.tiles[0].table, data.tiles[0].queries, data.tiles[0].kv
    many = work.shape.heads // table.heads * (work.shape.batch // table.batch) / data.degree
    share, out = work.late.tolist(), torch.zeros(3, work.ranks, 2, dtype=torch.float64)
    several = int((work.received.sum((0, 1)) > 0).sum()) > 1
    largest = (work.received.sum(0).amax(1) // BLOCK_SIZE).long().tolist() if several else [None] * work.ranks
    for part in _chunks(work.ranks, keys.tiles):
        tiles = [_coverage(table, kind, queries.owner, part) for kind in (FULL, PARTIAL)]
        half, both = torch.full_like(tiles[0], -1), tiles[0] + tiles[1]
        for i, rank in enumerate(part):
            mine = keys.of_rank(rank)
            half[i, mine] = 0
            half[i, mine[: late_tiles(both[i, mine], share[rank], largest[rank])]] = 1
        for at in range(2):
            for kind, total in zip(tiles, out, strict=False):
                total[part.start : part.stop, at] = (kind * (half == at)).sum(1) * many
        out[2, part.start : part.stop] = _busy(table, queries.owner, half, part, 2) * many
    return out


def _pairs(s: Schedule, step_of_stage: Tensor, ranks: int) -> tuple[tuple[Tensor, Tensor], ...]:
    line = ((step_of_stage[s.stage] * ranks + s.receiver) * ranks + s.source).unique()
    step, pair = line // (ranks * ranks), line % (ranks * ranks)
    edges = torch.searchsorted(step, torch.arange(len(s.steps) + 2)).tolist()
    return tuple((pair[a:b] // ranks, pair[a:b] % ranks) for a, b in pairwise(edges))


def _chunks(ranks: int, tiles: int) -> Iterator[range]:
    size = max(1, CHUNK // max(1, tiles))
    for start in range(0, ranks, size):
        yield range(start, min(ranks, start + size))


def _step_map(part: range, tiles: int, receiver: Tensor, first: Tensor, end: Tensor, step: Tensor) -> Tensor:
    """In which step each tile arrives at each rank of `part` [ranks, T], int64; −1 where it does not."""
    mine = ((receiver >= part.start) & (receiver < part.stop)).nonzero()[:, 0]
    base = (receiver[mine] - part.start) * (tiles + 1)
    change = torch.zeros(len(part) * (tiles + 1), dtype=torch.int64)
    change.index_add_(0, base + first[mine], step[mine] + 1)
    change.index_add_(0, base + end[mine], -(step[mine] + 1))
    return change.view(len(part), -1).cumsum(1)[:, :-1] - 1


def _coverage(table: BlockTable, kind: int, owner: Tensor, part: range) -> Tensor:
    """How many query tiles of each rank of `part` compute each key tile [ranks, T], over the table's heads and batch rows."""
    ptr, first, last = table.runs(kind)
    row = torch.repeat_interleave(torch.arange(table.rows), ptr.diff().long()) % max(1, table.q_tiles)
    return coverage(owner[row], first.long(), last.long() + 1, table.kv_tiles, part)


def _busy(table: BlockTable, owner: Tensor, step: Tensor, part: range, steps: int) -> Tensor:
    """How many rows of query tiles of each rank of `part` see any key tile of each step [ranks, steps], over heads and batch rows."""
    size = step.shape[1] + 1
    owners = owner.repeat(table.rows // max(1, table.q_tiles)) - part.start
    mine = (owners >= 0) & (owners < len(part))
    runs = []
    for kind in (FULL, PARTIAL):
        ptr, first, last = table.runs(kind)
        row = torch.repeat_interleave(torch.arange(table.rows), ptr.diff().long())
        here = mine[row]
        row, base = row[here], owners[row[here]] * size
        runs.append((row, base + first[here].long(), base + last[here].long() + 1))
    row, first, end = (torch.cat(column) for column in zip(*runs, strict=True))
    out = torch.zeros(len(part), steps, dtype=torch.float64)
    before = torch.zeros(len(part), size, dtype=torch.int32)
    for s in range(steps):
        torch.cumsum(step == s, 1, dtype=torch.int32, out=before[:, 1:])
        seen = torch.zeros(table.rows, dtype=torch.bool)
        seen[row[before.view(-1)[end] > before.view(-1)[first]]] = True
        out[:, s] = torch.bincount(owners[seen], minlength=len(part))
    return out


def _gathered(data: PlanData, s: Schedule, step_of_stage: Tensor, ranks: int) -> Tensor:
    """Tokens sent in stages in which some receiver gets anything but one stretch of a rank's rows: those are listed and copied."""
    begin = torch.tensor([data.inner[1].local_len(rank) for rank in range(ranks)])[s.source] * s.row  # batch rows follow each other
    for row in range(data.rows):
        side, here = data.tiles[row].kv, s.row == row
        begin[here] += side.row[side.within(s.start[here], s.length[here])[0]]
    sender = s.stage * ranks + s.source
    key = sender * ranks + s.receiver
    order = torch.argsort(key, stable=True)
    # A stretch is one move, or several of which each begins where the one before ends.
    apart = (begin[order][1:] != (begin + s.length)[order][:-1]) & (key[order].diff() == 0)
    pieces = torch.zeros(s.stages * ranks, dtype=torch.int64).index_add_(0, sender[order][1:], apart.long())
    sent = torch.zeros(s.stages * ranks, dtype=torch.float64).index_add_(0, sender, s.length.double())
    copied = torch.where(pieces > 0, sent, 0.0).view(s.stages, ranks)
    return torch.zeros(len(s.steps) + 1, ranks, dtype=torch.float64).index_add_(0, step_of_stage[: s.stages], copied).T


def _moved(data: PlanData, s: Schedule, placement: Placement, step_of_stage: Tensor, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """`received`, `sent` and `gathered` of a workload."""
    steps = len(s.steps) + 1
    away = (placement.node(s.receiver) != placement.node(s.source)).long()
    found = []
    for rank in (s.receiver, s.source):
        total = torch.zeros(2 * ranks * steps, dtype=torch.float64)
        total.index_add_(0, (away * ranks + rank) * steps + step_of_stage[s.stage], s.length.double())
        found.append(total.view(2, ranks, steps))
    return found[0], found[1], _gathered(data, s, step_of_stage, ranks)
