"""Schedules of the known strategies against moves of single tiles, and checks of a user's schedule move by move."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longspan._plan.kv_moves import KVReads, _with_long_steps, allgather, check_brings, exchange, no_moves, only_read, ring
from longspan._plan.layout import Layout
from longspan._plan.schedule import Schedule
from longspan._plan.tile_grid import TileGrid

ROWS = (
    (((3, 4), (0, 3)), ((11, 3), (20, 5)), (), ((14, 6), (7, 4))),
    (((18, 7),), ((0, 8),), (), ((8, 4), (12, 6))),
)


def row_reads(rows: int, block: int, seed: int, density: float = 0.5) -> list[KVReads]:
    """Random reads of four ranks, one of which owns nothing, over 25 tokens."""
    generator = torch.Generator().manual_seed(seed)
    layout = Layout(length=25, rows=ROWS[:rows])
    grids = [TileGrid.of(layout, block, batch_row=row) for row in range(rows)]
    return [KVReads(kv=kv, is_read=torch.rand(4, kv.tiles, generator=generator) < density) for kv in grids]


def tile_moves(schedule: Schedule, reads: list[KVReads]) -> list[tuple[int, int, int, int, int]]:
    """(stage, row, receiver, source, tile) of all moves, tile by tile. Checks that moves are sorted, and as long as they can be."""
    moves = list(zip(*(column.tolist() for column in schedule.columns)))
    assert [(stage, receiver, source, row, start) for stage, row, receiver, source, start, _ in moves] == sorted(
        (stage, receiver, source, row, start) for stage, row, receiver, source, start, _ in moves
    )
    tiles = []
    for stage, row, receiver, source, start, length in moves:
        kv = reads[row].kv
        inside = [t for t in range(kv.tiles) if start <= int(kv.edges[t]) < start + length]
        assert int(kv.edges[inside[0]]) == start and int(kv.edges[inside[-1] + 1]) == start + length
        assert [int(kv.row[t]) - int(kv.row[inside[0]]) for t in inside] == [int(kv.edges[t]) - start for t in inside]
        assert all(int(kv.owner[t]) == source for t in inside)
        tiles += [(stage, row, receiver, source, t) for t in inside]
    for a in moves:
        for b in moves:
            if a[:4] == b[:4] and a[4] + a[5] == b[4]:  # neighbours of one owner that are not neighbours in its shard
                kv = reads[a[1]].kv
                last, first = (int(torch.searchsorted(kv.edges, torch.tensor(at))) for at in (b[4] - 1, b[4]))
                last -= int(kv.edges[last]) != b[4] - 1
                assert int(kv.row[first]) != int(kv.row[last]) + int(kv.count[last])
    return sorted(tiles)


def remote(reads: list[KVReads]) -> list[tuple[int, int, int, int]]:
    """(row, receiver, source, tile) of all KV that a rank does not own."""
    return [
        (row, receiver, int(owner), tile)
        for row, r in enumerate(reads)
        for receiver in range(4)
        for tile, owner in enumerate(r.kv.owner)
        if receiver != int(owner)
    ]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("block", [2, 4])
def test_a_ring_and_an_all_gather_bring_all_remote_tiles(rows: int, block: int) -> None:
    reads = row_reads(rows, block, 1)
    made = ring(reads, step_tokens=0)
    assert (made.name, made.stages, made.steps, made.joined, made.only_read_kv) == (
        "ring",
        3,
        (range(1), range(1, 2), range(2, 3)),
        False,
        False,
    )
    assert tile_moves(made, reads) == sorted(((to - by) % 4 - 1, row, to, by, tile) for row, to, by, tile in remote(reads))
    made = allgather(reads)
    assert (made.name, made.stages, made.steps, made.joined, made.only_read_kv) == ("allgather", 1, (range(1),), False, False)
    assert tile_moves(made, reads) == sorted((0, *move) for move in remote(reads))


def test_one_rank_needs_no_stage() -> None:
    kv = TileGrid.of(Layout(length=9, rows=((((0, 9),),),)), 4)
    reads = [KVReads(kv=kv, is_read=torch.ones(1, kv.tiles, dtype=torch.bool))]
    for made in (no_moves(), allgather(reads), ring(reads, step_tokens=5), exchange(reads, stage_tokens=5)):
        assert (made.stages, made.steps, [len(column) for column in made.columns]) == (0, (), [0] * 6)
    assert [s.name for s in (no_moves(), exchange(reads * 2, stage_tokens=5, stages=3))] == ["none", "exchange"]


@pytest.mark.parametrize(("step_tokens", "steps"), [
    (-1, [1, 1, 1]), (0, [1, 1, 1]), (1, [1, 1, 1]), (10, [1, 1, 1]), (11, [2, 1]), (20, [2, 1]), (21, [3]), (99, [3])
])  # fmt: skip
def test_stages_of_a_ring_join_a_step_until_it_has_enough_tokens(step_tokens: int, steps: list[int]) -> None:
    """The busiest ranks receive 10 tokens in each of the three stages."""
    reads = row_reads(1, 4, 1)
    assert ring(reads, step_tokens=0).received(4).amax(1).tolist() == [10, 10, 10]
    made = ring(reads, step_tokens=step_tokens)
    assert [len(step) for step in made.steps] == steps and made.stages == 3
    assert [i for step in made.steps for i in step] == [0, 1, 2]


def test_tokens_of_a_step_do_not_count_for_the_next() -> None:
    count = [7, 3, 3, 3, 1]
    zeros, stage, length = torch.zeros(10, dtype=torch.int64), torch.arange(10) // 2, torch.tensor(count).repeat_interleave(2)
    made = Schedule(
        name="", stages=5, steps=(), stage=stage, row=zeros, receiver=torch.tensor([1, 2] * 5), source=zeros, start=zeros, length=length
    )
    assert [len(step) for step in _with_long_steps(made, 3, 7).steps] == [1, 3, 1]


def by_hand(reads: list[KVReads], stages: int) -> list[tuple[int, int, int, int, int]]:
    """A rank's tiles by row and by distance of their owners, cut into parts of equally many tokens."""
    moves = []
    for receiver in range(4):
        mine = sorted(
            (row, (receiver - by) % 4, tile, by) for row, to, by, tile in remote(reads) if to == receiver and reads[row].is_read[to, tile]
        )
        total, before = sum(int(reads[row].kv.count[tile]) for row, _, tile, _ in mine), 0
        for row, _, tile, by in mine:
            moves.append((before * stages // total, row, receiver, by, tile))
            before += int(reads[row].kv.count[tile])
    return sorted(moves)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_an_exchange_brings_read_tiles_from_the_nearest_predecessors_first_in_equal_parts(rows: int, seed: int) -> None:
    reads = row_reads(rows, 2, seed)
    largest = max(
        sum(int(r.kv.count[t]) for row, to, _, t in remote(reads) for r in [reads[row]] if to == rank and r.is_read[to, t])
        for rank in range(4)
    )
    for given, tokens, stages in (
        (1, 1, 1), (2, 1, 2), (5, 1, 5), (largest + 7, 1, largest), (None, largest, 1), (None, largest - 1, 2), (None, 5, -(-largest // 5)),
        (None, 0, largest), (None, 1, largest), (None, 2, -(-largest // 2)),
    ):  # fmt: skip
        made = exchange(reads, stage_tokens=tokens, stages=given)
        assert (made.name, made.stages, made.only_read_kv, made.joined) == ("exchange", stages, True, False)
        assert made.steps == tuple(range(i, i + 1) for i in range(stages))
        assert tile_moves(made, reads) == by_hand(reads, stages)


def test_an_exchange_without_reads_has_no_stage() -> None:
    reads = row_reads(2, 4, 0, density=0.0)
    made = exchange(reads, stage_tokens=4, stages=3)
    assert (made.stages, made.steps, len(made.start), made.only_read_kv) == (0, (), 0, True)


@pytest.mark.parametrize("rows", [1, 2])
def test_only_read_keeps_stages_and_steps_and_drops_what_is_not_read(rows: int) -> None:
    reads = row_reads(rows, 2, 3)
    whole = replace(ring(reads, step_tokens=12 * rows), joined=True)
    made = only_read(whole, reads)
    assert (made.name, made.stages, made.steps, made.joined, made.only_read_kv) == ("ring", 3, whole.steps, True, True)
    assert len(made.steps) < 3
    kept = [move for move in tile_moves(whole, reads) if reads[move[1]].is_read[move[2], move[4]]]
    assert tile_moves(made, reads) == kept and only_read(made, reads) is made
    everything = row_reads(rows, 2, 0, density=2.0)
    assert only_read(whole, everything) is whole


def changed(schedule: Schedule, move: int, **columns: int) -> Schedule:
    """The schedule with other entries of one move."""
    new = {name: getattr(schedule, name).clone() for name in columns}
    for name, value in columns.items():
        new[name][move] = value
    return replace(schedule, **new)


def appended(schedule: Schedule, **columns: int) -> Schedule:
    """The schedule with one more move."""
    extra: Any = {"stage": 0, "row": 0, **columns}
    return replace(schedule, **{name: torch.cat([getattr(schedule, name), torch.tensor([value])]) for name, value in extra.items()})


def test_a_schedule_that_brings_what_is_read_once_passes() -> None:
    for rows in (1, 2):
        reads = row_reads(rows, 2, 2)
        for made in (ring(reads, step_tokens=0), allgather(reads), exchange(reads, stage_tokens=5)):
            check_brings(made, reads)


def test_a_schedule_must_bring_what_is_read_once_from_its_owner() -> None:
    kv = TileGrid.of(Layout(length=20, rows=((((0, 8),), ((8, 3), (14, 6)), ((11, 3),)),)), 4)
    assert kv.edges.tolist() == [0, 4, 8, 11, 12, 14, 16, 20] and kv.owner.tolist() == [0, 0, 1, 2, 2, 1, 1]
    is_read = torch.zeros(3, 7, dtype=torch.bool)
    is_read[0, 2] = is_read[2, 5] = is_read[2, 0] = is_read[1, 1] = is_read[1, 5] = True
    reads = [KVReads(kv=kv, is_read=is_read)]
    made = exchange(reads, stage_tokens=100)
    rows = [(to, by, start, length) for _, _, to, by, start, length in zip(*(c.tolist() for c in made.columns))]
    assert rows == [(0, 1, 8, 3), (1, 0, 4, 4), (2, 0, 0, 4), (2, 1, 14, 2)]
    check_brings(made, reads)
    edges = "schedule: moves must begin and end at edges of tiles: multiples of 128 tokens or ends of segments"
    many = "remote tokens that a rank reads must arrive exactly once"
    wrong = {
        edges: [changed(made, 3, start=15, length=1), changed(made, 3, length=3), changed(made, 1, start=3, length=5)],
        r"rank 0 is to send tokens 4… to rank 1 but does not own them": [changed(made, 1, length=7)],
        r"rank 2 is to send tokens 4… to rank 1 but does not own them": [changed(made, 1, source=2)],
        rf"tokens 14… arrive 0 times at rank 2; {many}": [changed(made, 3, start=16, length=4), changed(made, 3, receiver=0)],
        rf"tokens 8… arrive 2 times at rank 0; {many}": [appended(made, receiver=0, source=1, start=8, length=3)],
        rf"tokens 16… arrive 2 times at rank 0; {many}": [  # that nobody reads
            appended(appended(made, receiver=0, source=1, start=16, length=4), receiver=0, source=1, start=16, length=4)
        ],
        rf"tokens 0… arrive 1 times at rank 0; {many}": [appended(made, receiver=0, source=0, start=0, length=4)],  # local, not read
        rf"tokens 14… arrive 1 times at rank 1; {many}": [appended(made, receiver=1, source=1, start=14, length=2)],  # local and read
    }
    for message, schedules in wrong.items():
        for schedule in schedules:
            with pytest.raises(ValueError, match=message):
                check_brings(schedule, reads)
    check_brings(appended(made, receiver=0, source=1, start=16, length=4), reads)  # once does no harm


def test_rows_of_a_batch_are_checked_one_by_one() -> None:
    reads = row_reads(2, 4, 5)
    made = exchange(reads, stage_tokens=6)
    second = next(i for i, row in enumerate(made.row.tolist()) if row == 1)
    with pytest.raises(ValueError, match="schedule: "):
        check_brings(changed(made, second, row=0), reads)
    with pytest.raises(ValueError, match="arrive 0 times"):
        check_brings(
            replace(made, **{n: getattr(made, n)[made.row == 0] for n in ("stage", "row", "receiver", "source", "start", "length")}), reads
        )
