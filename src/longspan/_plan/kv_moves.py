"""Schedules of the known strategies, and checks of schedules that users made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from longspan._masks.block_table import expand_ranges
from longspan._plan.plan_data import TiledRow
from longspan._plan.schedule import Schedule
from longspan._plan.tile_grid import TileGrid, read_tiles

Columns = tuple[Tensor, ...]  # stage, row, receiver, source, start, length


@dataclass(frozen=True, kw_only=True, eq=False)
class KVReads:
    """The KV that ranks read, of one batch row (or of all, where they are laid out alike).

    Attributes:
        kv: The KV in T tiles.
        is_read: Which tiles each rank's queries read [ranks, T], bool.
    """

    kv: TileGrid
    is_read: Tensor

    @classmethod
    def of(cls, tiles: TiledRow, ranks: int) -> KVReads:
        """The reads of a batch row's block table."""
        return cls(kv=tiles.kv, is_read=read_tiles(tiles.table, tiles.queries, ranks))

    @property
    def ranks(self) -> int:
        """Number of ranks of the KV axis."""
        return self.is_read.shape[0]

    @cached_property
    def remote(self) -> Tensor:
        """Tiles that a rank does not own [ranks, T], bool."""
        return self.kv.owner != torch.arange(self.ranks)[:, None]


def no_moves() -> Schedule:
    """The schedule of one rank, or of ranks that read only local KV."""
    return _schedule("none", 0, [], 1)


def ring(row_reads: list[KVReads], *, step_tokens: int) -> Schedule:
    """N − 1 stages; in stage s a rank receives the whole shard of the rank s + 1 before it.

    Consecutive stages are computed in one step until the rank with the most KV has `step_tokens` tokens for it.
    """
    columns = []
    for row, reads in enumerate(row_reads):
        receiver, tile = reads.remote.nonzero(as_tuple=True)
        stage = (receiver - reads.kv.owner[tile]) % reads.ranks - 1
        columns.append(_merged_moves(reads, row, stage, receiver, tile))
    ranks = row_reads[0].ranks
    return _with_long_steps(_schedule("ring", ranks - 1, columns, ranks), ranks, step_tokens)


def allgather(row_reads: list[KVReads]) -> Schedule:
    """One stage that brings all KV to every rank."""
    columns = []
    for row, reads in enumerate(row_reads):
        receiver, tile = reads.remote.nonzero(as_tuple=True)
        columns.append(_merged_moves(reads, row, torch.zeros_like(tile), receiver, tile))
    ranks = row_reads[0].ranks
    return _schedule("allgather", min(1, ranks - 1), columns, ranks)


def exchange(row_reads: list[KVReads], *, stage_tokens: int, stages: int | None = None) -> Schedule:
    """Only tiles that their receiver reads move, in `stages` stages, by default as few as keep a stage below `stage_tokens` per rank.

    A rank receives from its nearest predecessors first, in equal parts, so that each stage has as many senders as receivers.
    """
    read_remote = [reads.is_read & reads.remote for reads in row_reads]
    tokens = torch.stack([(tiles * reads.kv.count).sum(1) for tiles, reads in zip(read_remote, row_reads, strict=True)]).sum(
        0
    )  # per receiver
    largest = int(tokens.max())
    if stages is None:
        stages = -(-largest // max(1, stage_tokens))
    stages = min(stages, largest)
    columns = []
    earlier_rows = torch.zeros_like(tokens)  # tokens that a rank receives of earlier batch rows
    for row, (reads, tiles) in enumerate(zip(row_reads, read_remote, strict=True)):
        receiver, tile = tiles.nonzero(as_tuple=True)
        distance = (receiver - reads.kv.owner[tile]) % reads.ranks
        order = ((receiver * reads.ranks + distance) * reads.kv.tiles + tile).argsort()
        receiver, tile = receiver[order], tile[order]
        count = reads.kv.count[tile]
        row_tokens = (tiles * reads.kv.count).sum(1)
        before = count.cumsum(0) - count - (row_tokens.cumsum(0) - row_tokens)[receiver] + earlier_rows[receiver]
        stage = before * stages // tokens[receiver]
        earlier_rows = earlier_rows + row_tokens
        columns.append(_merged_moves(reads, row, stage, receiver, tile))
    return replace(_schedule("exchange", stages, columns, len(tokens)), only_read_kv=True)


def only_read(schedule: Schedule, row_reads: list[KVReads]) -> Schedule:
    """The same stages and steps without the tokens that their receiver does not read. The same object if there are none."""
    columns = []
    for row, reads in enumerate(row_reads):
        here = schedule.row == row
        first, end = reads.kv.within(schedule.start[here], schedule.length[here])
        tile = expand_ranges(first, end - first)
        stage, receiver = (c[here].repeat_interleave(end - first) for c in (schedule.stage, schedule.receiver))
        chosen = reads.is_read[receiver, tile]
        columns.append(_merged_moves(reads, row, stage[chosen], receiver[chosen], tile[chosen]))
    moves = _schedule(schedule.name, schedule.stages, columns, row_reads[0].ranks)
    if int(moves.length.sum()) == int(schedule.length.sum()):
        return schedule
    return replace(moves, steps=schedule.steps, joined=schedule.joined, only_read_kv=True)


def check_brings(schedule: Schedule, row_reads: list[KVReads]) -> None:
    """Check that a user's schedule brings every remote tile that is read exactly once, from its owner.

    Raises:
        ValueError: A move does not begin and end at edges of tiles, its sender does not own the tokens, or tokens arrive not exactly once.
    """
    for row, reads in enumerate(row_reads):
        here = schedule.row == row
        receiver, source, start, length = (c[here] for c in (schedule.receiver, schedule.source, schedule.start, schedule.length))
        first, end = reads.kv.within(start, length)
        if bool((reads.kv.edges[first] != start).any() | (reads.kv.edges[end] != start + length).any()):
            raise ValueError("schedule: moves must begin and end at edges of tiles: multiples of 128 tokens or ends of segments")
        arrivals = torch.zeros(reads.ranks, reads.kv.tiles, dtype=torch.int64)
        for to, src, a, b in zip(receiver.tolist(), source.tolist(), first.tolist(), end.tolist(), strict=True):
            if bool((reads.kv.owner[a:b] != src).any()):
                raise ValueError(f"schedule: rank {src} is to send tokens {int(reads.kv.edges[a])}… to rank {to} but does not own them")
            arrivals[to, a:b] += 1
        wrong = torch.where(reads.is_read & reads.remote, arrivals != 1, (arrivals > 1) | ((arrivals > 0) & ~reads.remote))
        if bool(wrong.any()):
            rank, tile = (int(i) for i in wrong.nonzero()[0])
            raise ValueError(
                f"schedule: tokens {int(reads.kv.edges[tile])}… arrive {int(arrivals[rank, tile])} times at rank {rank}; "
                "remote tokens that a rank reads must arrive exactly once"
            )


def _merged_moves(reads: KVReads, row: int, stage: Tensor, receiver: Tensor, tile: Tensor) -> Columns:
    """Moves of single tiles as moves of contiguous ranges: neighbours of one owner that arrive in one stage at one rank are one move."""
    source = reads.kv.owner[tile]
    order = (((stage * reads.ranks + receiver) * reads.ranks + source) * reads.kv.tiles + tile).argsort()
    stage, receiver, source, tile = stage[order], receiver[order], source[order], tile[order]
    place = reads.kv.row[tile]
    continues = (stage[1:] == stage[:-1]) & (receiver[1:] == receiver[:-1]) & (source[1:] == source[:-1])
    continues &= (tile[1:] == tile[:-1] + 1) & (place[1:] == place[:-1] + reads.kv.count[tile[:-1]])
    begins = torch.ones(len(tile), dtype=torch.bool)
    begins[1:] = ~continues
    ends = torch.ones_like(begins)
    ends[:-1] = begins[1:]
    start = reads.kv.edges[tile[begins]]
    length = reads.kv.edges[tile[ends] + 1] - start
    stage, receiver, source = stage[begins], receiver[begins], source[begins]
    return stage, torch.full_like(stage, row), receiver, source, start, length


def _schedule(name: str, stages: int, columns_by_row: list[Columns], ranks: int) -> Schedule:
    """A schedule of the moves of all batch rows, sorted; every stage is a step."""
    empty = torch.zeros(0, dtype=torch.int64)
    columns: Columns = tuple(torch.cat(c) for c in zip(*columns_by_row, strict=True)) if columns_by_row else (empty,) * 6
    if len(columns_by_row) > 1:
        stage, row, receiver, source, _, _ = columns
        order = (((stage * ranks + receiver) * ranks + source) * len(columns_by_row) + row).argsort(stable=True)
        columns = tuple(c[order] for c in columns)
    stage, row, receiver, source, start, length = columns
    steps = tuple(range(i, i + 1) for i in range(stages))
    return Schedule(
        name=name, stages=stages, steps=steps, stage=stage, row=row, receiver=receiver, source=source, start=start, length=length
    )


def _with_long_steps(schedule: Schedule, ranks: int, step_tokens: int) -> Schedule:
    """The same moves with consecutive stages in one step until the rank that receives most has `step_tokens` tokens for it."""
    steps, begin, tokens = [], 0, 0
    for stage, count in enumerate(schedule.received(ranks).amax(1).tolist()):
        tokens += count
        if tokens >= step_tokens:
            steps.append(range(begin, stage + 1))
            begin, tokens = stage + 1, 0
    if begin < schedule.stages:
        steps.append(range(begin, schedule.stages))
    return replace(schedule, steps=tuple(steps))
