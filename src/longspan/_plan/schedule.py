"""Schedules: which keys move when. A schedule is a list of moves, as data; the engine knows no strategy by name.

In each stage every rank receives stretches of keys (and values) straight from the ranks that own them, all in one exchange. What a rank
owns itself never moves and is computed first. Consecutive stages may be computed together, in one *step*: short stretches are not worth a
kernel each. Where an exchange takes no longer than it costs to keep a running result, own keys wait for it and are computed with what
it brings: the schedule is *joined*.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from longspan._masks.block_table import stretched
from longspan._plan.digest import content
from longspan._plan.tile_grid import TileGrid

# Tokens that a stage (or a step of several stages) brings at least, where it can. Below this size, kernels and links idle between launches.
STAGE_TOKENS = 16384


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """Moves, one per entry of six int64 columns, sorted by (stage, receiver, source, row, start).

    Move i: in stage stage[i], rank receiver[i] gets positions start[i] … start[i] + length[i] − 1 of batch row row[i] (0 where all
    rows are laid out alike) from source[i]. `steps`: groups of stages that are computed together, in order. `joined`: own keys are
    computed with the first of them, not before. `read`: nothing moves that its receiver does not read, so that backward need not look.
    """

    name: str
    stages: int
    steps: tuple[range, ...]
    stage: Tensor
    row: Tensor
    receiver: Tensor
    source: Tensor
    start: Tensor
    length: Tensor
    joined: bool = False
    read: bool = False

    @property
    def columns(self) -> tuple[Tensor, ...]:
        return self.stage, self.row, self.receiver, self.source, self.start, self.length

    def received(self, ranks: int) -> Tensor:
        """Tokens that each rank receives in each stage [stages, ranks], summed over batch rows where they differ."""
        return self._tokens(self.receiver, ranks)

    def sent(self, ranks: int) -> Tensor:
        """Tokens that each rank sends in each stage [stages, ranks]."""
        return self._tokens(self.source, ranks)

    def _tokens(self, rank: Tensor, ranks: int) -> Tensor:
        total = torch.zeros(self.stages * ranks, dtype=torch.int64)
        return total.index_add_(0, self.stage * ranks + rank, self.length).view(self.stages, ranks)

    @cached_property
    def carried(self) -> Tensor:
        """Stages in which anything moves anywhere, in each step."""
        there = torch.bincount(self.stage, minlength=self.stages) > 0
        return torch.tensor([int(there[group.start : group.stop].sum()) for group in self.steps], dtype=torch.int64)

    @cached_property
    def digest(self) -> str:
        found = hashlib.sha256(f"{self.stages} {[(s.start, s.stop) for s in self.steps]} {self.joined} {self.read}".encode())
        for column in self.columns:
            found.update(content(column))
        return found.hexdigest()


@dataclass(frozen=True, kw_only=True, eq=False)
class Reads:
    """What a schedule must bring: for one batch row (or all), the key side and which of its tiles each rank reads [ranks, T]."""

    keys: TileGrid
    wanted: Tensor

    @property
    def ranks(self) -> int:
        return self.wanted.shape[0]

    @cached_property
    def away(self) -> Tensor:
        """Tiles that a rank does not own [ranks, T]."""
        return self.keys.owner != torch.arange(self.ranks)[:, None]


def no_moves() -> Schedule:
    """The schedule of one rank, or of ranks that read only local KV."""
    return _schedule("none", 0, [], step_tokens=0)


def ring(rows: list[Reads], *, step_tokens: int) -> Schedule:
    """N − 1 stages; in stage s a rank receives the whole shard of the rank s + 1 before it."""
    found = []
    for row, reads in enumerate(rows):
        receiver, tile = reads.away.nonzero(as_tuple=True)
        found.append(_moves(reads, row, (receiver - reads.keys.owner[tile]) % reads.ranks - 1, receiver, tile))
    return _schedule("ring", rows[0].ranks - 1, found, step_tokens=step_tokens)


def allgather(rows: list[Reads]) -> Schedule:
    """One stage that brings every key to every rank."""
    found = []
    for row, reads in enumerate(rows):
        receiver, tile = reads.away.nonzero(as_tuple=True)
        found.append(_moves(reads, row, torch.zeros_like(tile), receiver, tile))
    return _schedule("allgather", min(1, rows[0].ranks - 1), found, step_tokens=0)


def exchange(rows: list[Reads], *, stage_tokens: int, stages: int | None = None) -> Schedule:
    """Only tiles that somebody reads move, in as few stages as keep each below `stage_tokens` per rank (or in `stages`).

    A rank takes what it needs from its nearest predecessors first, in equal parts, so that in each stage the senders are as many as
    the receivers.
    """
    needed = [r.wanted & r.away for r in rows]
    tokens = sum((n * r.keys.count).sum(1) for n, r in zip(needed, rows, strict=True))
    assert isinstance(tokens, Tensor)
    most = int(tokens.max())
    if stages is None:
        stages = -(-most // max(1, stage_tokens))
    stages = min(stages, most)
    found = []
    before = torch.zeros_like(tokens)  # tokens a rank takes of earlier batch rows
    for row, (reads, need) in enumerate(zip(rows, needed, strict=True)):
        receiver, tile = need.nonzero(as_tuple=True)
        distance = (receiver - reads.keys.owner[tile]) % reads.ranks
        order = ((receiver * reads.ranks + distance) * reads.keys.tiles + tile).argsort()
        receiver, tile = receiver[order], tile[order]
        count = reads.keys.count[tile]
        own = (need * reads.keys.count).sum(1)
        done = count.cumsum(0) - count - (own.cumsum(0) - own)[receiver] + before[receiver]
        stage = done * stages // tokens[receiver].clamp(min=1)
        before = before + own
        found.append(_moves(reads, row, stage, receiver, tile))
    return replace(_schedule("exchange", stages, found, step_tokens=0), read=True)


def only_read(given: Schedule, rows: list[Reads]) -> Schedule:
    """The same stages and steps; of what moves only what its receiver reads."""
    found = []
    for row, reads in enumerate(rows):
        here = given.row == row
        first, end = reads.keys.within(given.start[here], given.length[here])
        tile = stretched(first, end - first)
        stage, receiver = (c[here].repeat_interleave(end - first) for c in (given.stage, given.receiver))
        kept = reads.wanted[receiver, tile]
        found.append(_moves(reads, row, stage[kept], receiver[kept], tile[kept]))
    moves = _schedule(given.name, given.stages, found, step_tokens=0)
    if int(moves.length.sum()) == int(given.length.sum()):
        return given
    return replace(moves, steps=given.steps, joined=given.joined, read=True)


def _moves(reads: Reads, row: int, stage: Tensor, receiver: Tensor, tile: Tensor) -> tuple[Tensor, ...]:
    """Tiles as stretches: neighbours of one owner that arrive in one stage at one rank are one move."""
    source = reads.keys.owner[tile]
    order = (((stage * reads.ranks + receiver) * reads.ranks + source) * reads.keys.tiles + tile).argsort()
    stage, receiver, source, tile = stage[order], receiver[order], source[order], tile[order]
    place = reads.keys.row[tile]
    goes_on = (stage[1:] == stage[:-1]) & (receiver[1:] == receiver[:-1]) & (source[1:] == source[:-1])
    goes_on &= (tile[1:] == tile[:-1] + 1) & (place[1:] == place[:-1] + reads.keys.count[tile[:-1]])
    begins = torch.ones(len(tile), dtype=torch.bool)
    begins[1:] = ~goes_on
    ends = torch.ones_like(begins)
    ends[:-1] = begins[1:]
    start = reads.keys.edges[tile[begins]]
    length = reads.keys.edges[tile[ends] + 1] - start
    stage, receiver, source = stage[begins], receiver[begins], source[begins]
    return stage, torch.full_like(stage, row), receiver, source, start, length


def _schedule(name: str, stages: int, found: list[tuple[Tensor, ...]], *, step_tokens: int) -> Schedule:
    empty = torch.zeros(0, dtype=torch.int64)
    stage, row, receiver, source, start, length = (torch.cat(c) for c in zip(*found, strict=True)) if found else (empty,) * 6
    if len(found) > 1:
        ranks = int(receiver.max()) + int(source.max()) + 1 if len(receiver) else 1
        order = (((stage * ranks + receiver) * ranks + source) * len(found) + row).argsort(stable=True)
        stage, row, receiver, source, start, length = (c[order] for c in (stage, row, receiver, source, start, length))
    schedule = Schedule(
        name=name,
        stages=stages,
        steps=tuple(range(i, i + 1) for i in range(stages)),
        stage=stage,
        row=row,
        receiver=receiver,
        source=source,
        start=start,
        length=length,
    )
    return schedule if step_tokens <= 0 else _grouped(schedule, step_tokens)


def _grouped(schedule: Schedule, step_tokens: int) -> Schedule:
    """The same with consecutive stages computed together until the busiest rank has `step_tokens` keys for a step."""
    if not schedule.stages:
        return schedule
    ranks = int(torch.cat([schedule.receiver, schedule.source]).max()) + 1 if len(schedule.receiver) else 1
    most = schedule.received(ranks).amax(1).tolist()
    steps, begin, tokens = [], 0, 0
    for stage, count in enumerate(most):
        tokens += count
        if tokens >= step_tokens:
            steps.append(range(begin, stage + 1))
            begin, tokens = stage + 1, 0
    if begin < schedule.stages:
        steps.append(range(begin, schedule.stages))
    return Schedule(**{**schedule.__dict__, "steps": tuple(steps)})


def check_brings(given: Schedule, rows: list[Reads]) -> None:
    """A schedule that users made must bring every tile that is read, once, from its owner."""
    for row, r in enumerate(rows):
        mine = given.row == row
        receiver, source, start, length = (c[mine] for c in (given.receiver, given.source, given.start, given.length))
        first, end = r.keys.within(start, length)
        if bool((r.keys.edges[first] != start).any() | (r.keys.edges[end] != start + length).any()):
            raise ValueError("schedule: moves must begin and end where tiles do: at multiples of 128 tokens or at a segment's ends")
        arrived = torch.zeros(r.ranks, r.keys.tiles, dtype=torch.int64)
        for to, src, a, b in zip(receiver.tolist(), source.tolist(), first.tolist(), end.tolist(), strict=True):
            if bool((r.keys.owner[a:b] != src).any()):
                raise ValueError(f"schedule: rank {src} is to send tokens {int(r.keys.edges[a])}… to rank {to} but does not own them")
            arrived[to, a:b] += 1
        wrong = torch.where(r.wanted & r.away, arrived != 1, (arrived > 1) | ((arrived > 0) & ~r.away))
        if bool(wrong.any()):
            rank, tile = (int(i) for i in wrong.nonzero()[0])
            raise ValueError(
                f"schedule: tokens {int(r.keys.edges[tile])}… arrive {int(arrived[rank, tile])} times at rank {rank}; "
                "what a rank reads and does not own must arrive exactly once"
            )
