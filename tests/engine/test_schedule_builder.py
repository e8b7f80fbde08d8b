"""Local schedules of all ranks against lists of tokens: ranks receive what others send, and compute every visible pair."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import longspan as ls
from longspan._engine.local_schedule import ComputeStep, LocalSchedule
from longspan._engine.schedule_builder import ScheduleOptions, _stage_names, local_schedule, tiling_of
from longspan._kernels.tiling import Tiling
from longspan._plan.tile_grid import TileGrid

TOKENS, RANKS, BLOCK = 700, 4, (64, 32)
EACH = range(1), range(1, 2), range(2, 3)  # a step for each stage
CUT = torch.tensor([[0] * 200 + [1] * 500, [0] * 450 + [1] * 250])
PLANS: dict[str, dict[str, Any]] = {
    "contiguous ring": {"layout": "contiguous", "strategy": "ring"},
    "contiguous exchange": {"layout": "contiguous", "strategy": "exchange"},
    "head_tail ring": {"layout": "head_tail", "strategy": "ring"},
    "head_tail allgather": {"layout": "head_tail", "strategy": "allgather"},
    "ring by stages": {"layout": "contiguous", "strategy": "ring", "steps": EACH},
    "head_tail ring by stages": {"layout": "head_tail", "strategy": "ring", "steps": EACH},
    "ring in two steps": {"layout": "head_tail", "strategy": "ring", "steps": (range(2), range(2, 3))},
    "joined ring": {"layout": "contiguous", "strategy": "ring", "steps": (range(1), range(1, 3)), "joined": True},
    "window by stages": {
        "mask": ls.causal() & ls.sliding_window(90),
        "layout": "contiguous",
        "strategy": "ring",
        "steps": EACH,
    },
    "window ring": {"mask": ls.causal() & ls.sliding_window(90), "layout": "contiguous", "strategy": "ring"},
    "batch rows": {"mask": ls.causal() & ls.documents(ids=CUT), "layout": "per_document", "strategy": "exchange", "batch": 2},
}


def plans(name: str) -> list[Any]:
    options = dict(PLANS[name])
    mask, steps, joined = (options.pop(key, None) for key in ("mask", "steps", "joined"))
    mask = ls.causal() if mask is None else mask
    made = [ls.plan(mask, TOKENS, ls.Mesh.abstract(RANKS, rank=rank), **options).data for rank in range(RANKS)]
    if steps is None:
        return made
    grouped = lambda schedule: replace(schedule, steps=steps, joined=bool(joined))
    return [replace(p, schedule=grouped(p.schedule), backward_schedule=grouped(p.backward_schedule)) for p in made]


def positions(plan: Any, rank: int) -> list[tuple[int, int]]:
    """(batch row, position) of each local row."""
    layout = plan.layouts[1]
    return [(row, p) for row in range(len(layout.rows)) for start, n in layout.rows[row][rank] for p in range(start, start + n)]


def tile_positions(tiling: Tiling) -> list[list[int]]:
    """The positions of each tile of a tiling."""
    if tiling.pos is None:
        return [list(range(p, min(p + tiling.block, tiling.length))) for p in range(0, tiling.length, tiling.block)]
    return [list(range(p, p + n)) for p, n in zip(tiling.pos.tolist(), tiling.count.tolist(), strict=True)]


def buffer_of(rank: int, step: ComputeStep, all_steps: list[dict[str, Any]], owners: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    """(batch row, position) of each row of a step's KV buffer, by what the other ranks send."""
    rows = [owners[rank][i] for i in step.local]
    for exchange in step.exchanges:
        assert exchange.start == len(rows)
        for source in range(RANKS):
            sent = [owners[source][i] for i in all_steps[source][exchange.what].sent_to[rank].indices().tolist()] if source != rank else []
            assert exchange.recv_counts[source] == len(sent)
            rows += sent
        assert exchange.stop == len(rows)
        assert exchange.send_counts == tuple(r.count for r in exchange.sent_to)
        assert exchange.sent.indices().tolist() == [i for r in exchange.sent_to for i in r.indices().tolist()]
    assert step.buffer_rows == len(rows)
    return rows


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_ranks_receive_what_others_send_and_compute_each_visible_pair_once(name: str, merge: bool, backward: bool) -> None:
    made = plans(name)
    schedules = [local_schedule(plan, ScheduleOptions(block=BLOCK, backward=backward, merge_stages=merge)) for plan in made]
    owners = [positions(made[0], rank) for rank in range(RANKS)]
    exchanges = [{e.what: e for step in s.steps for e in step.exchanges} for s in schedules]
    assert all(e.keys() == exchanges[0].keys() for e in exchanges)
    layouts = made[0].batch_layouts
    dense = {row: torch.ones(TOKENS, TOKENS).tril().bool() for row in range(layouts)}
    if name.startswith("window"):
        dense[0] &= ~torch.ones(TOKENS, TOKENS).tril(-90).bool()
    if layouts > 1:
        dense = {row: seen & (CUT[row][:, None] == CUT[row]) for row, seen in dense.items()}
    for rank, (plan, schedule) in enumerate(zip(made, schedules, strict=True)):
        computed = {row: torch.zeros(TOKENS, TOKENS, dtype=torch.int32) for row in range(layouts)}
        last, steps_seen = [0] * layouts, {row: torch.full((TOKENS,), -1) for row in range(layouts)}
        for i, step in enumerate(schedule.steps):
            buffer = buffer_of(rank, step, exchanges, owners)
            for row, tiles in enumerate(step.tiles):
                q_tiles, kv_tiles = tile_positions(tiles.q_tiles), tile_positions(tiles.kv_tiles)
                flat = [p for tile in kv_tiles for p in tile]
                assert flat == [p for r, p in buffer if r == row]
                assert (tiles.kv_rows is not None) == (layouts > 1 and bool(step.exchanges))
                if tiles.kv_rows is not None:
                    assert [buffer[j] for j in tiles.kv_rows.indices().tolist()] == [(row, p) for p in flat]
                kinds = tiles.table.to_dense()[0, 0]
                for q, k in (kinds > 0).nonzero().tolist():
                    block = torch.tensor(q_tiles[q])[:, None], torch.tensor(kv_tiles[k])
                    seen = dense[row][block]
                    assert bool(seen.any()) and (int(kinds[q, k]) == 1 or bool(seen.all()))
                    computed[row][block] += seen
                    steps_seen[row][block[0][:, 0]] = i
                    last[row] = i
        assert schedule.last_step == tuple(last)
        for row in range(layouts):
            mine = [p for start, n in plan.layouts[0].rows[row][rank] for p in range(start, start + n)]
            assert torch.equal(computed[row][mine], dense[row][mine].int())
            check_complete(schedule, row, steps_seen[row])


def check_complete(schedule: LocalSchedule, row: int, last_seen: torch.Tensor) -> None:
    """Query tiles are marked in the step after which no KV follows, but in the last step."""
    for i, step in enumerate(schedule.steps):
        tiles = step.tiles[row]
        complete = [all(int(last_seen[p]) == i for p in tile) for tile in tile_positions(tiles.q_tiles)]
        if i < schedule.last_step[row] and any(complete):
            assert tiles.complete_q_tiles is not None and tiles.complete_q_tiles.tolist() == complete
        else:
            assert tiles.complete_q_tiles is None


@pytest.mark.parametrize(
    ("name", "backward", "merge", "counts"),
    [
        # A forward pass keeps stages in which nothing moves, a backward pass leaves them out.
        ("contiguous ring", False, False, [(), (1, 2, 3)]),
        ("contiguous ring", True, True, [(), (1,)]),
        ("ring by stages", False, False, [(), (1,), (1,), (1,)]),
        ("ring by stages", True, False, [(), (1,), (1,), (1,)]),
        ("joined ring", False, False, [(1,), (1, 2)]),
        ("joined ring", True, True, [(1,), (1,)]),
        ("window ring", False, False, [(), (1, 2, 3)]),
        ("window ring", True, False, [(), (1,)]),
        ("window by stages", False, True, [(), (1,), (1,), (1,)]),
        ("window by stages", True, True, [(), (1,)]),
    ],
)
def test_a_backward_pass_leaves_out_stages_in_which_nothing_moves(name: str, backward: bool, merge: bool, counts: list[Any]) -> None:
    for plan in plans(name):
        schedule = local_schedule(plan, ScheduleOptions(block=BLOCK, backward=backward, merge_stages=merge))
        assert [len(step.exchanges) for step in schedule.steps] == [len(stages) for stages in counts]


def test_a_rank_that_computes_nothing_ends_with_its_first_step() -> None:
    for rank in range(RANKS):
        for layout, mask in (("contiguous", ls.mask_mod(lambda b, h, q, kv: q + kv < 0)), ("head_tail", ~ls.full())):
            plan = ls.plan(mask, TOKENS, ls.Mesh.abstract(RANKS, rank=rank), layout=layout, strategy="ring").data
            schedule = local_schedule(plan, ScheduleOptions(block=BLOCK))
            assert schedule.last_step == (0,) and all(tiles.empty for step in schedule.steps for tiles in step.tiles)


def test_schedules_are_cached_by_equal_options() -> None:
    plan = plans("contiguous exchange")[1]
    one = local_schedule(plan, ScheduleOptions(block=BLOCK))
    assert local_schedule(plan, ScheduleOptions(block=(64, 32))) is one
    for change in ({"block": (32, 64)}, {"merge_stages": True}, {"heads": (0, 1)}):
        assert local_schedule(plan, replace(ScheduleOptions(block=BLOCK), **change)) is not one
    reused = plan.backward_schedule is plan.schedule
    assert (local_schedule(plan, ScheduleOptions(block=BLOCK, backward=True)) is one) == reused


@pytest.mark.parametrize("name", ["contiguous ring", "head_tail ring", "head_tail ring by stages"])
def test_a_backward_pass_computes_the_first_local_tiles_last(name: str) -> None:
    split_ranks = 0
    for rank, plan in enumerate(plans(name)):
        options = ScheduleOptions(block=BLOCK, backward=True)
        whole, split = local_schedule(plan, options), local_schedule(plan, replace(options, split_bytes=(2, 4)))
        if split is whole:
            continue
        split_ranks += 1
        assert not plan.schedule.joined
        first, *received, last = split.steps
        assert len(received) == len(whole.steps) - 1 and all(a is b for a, b in zip(received, whole.steps[1:], strict=True))
        count = plan.layouts[1].local_len(rank)
        assert (last.local.start, last.local.stop, first.local.start, first.local.stop) == (0, first.local.start, last.local.stop, count)
        assert (last.buffer_rows, first.buffer_rows, last.exchanges, first.exchanges) == (len(last.local), len(first.local), (), ())
        tiles = [tile_positions(s.tiles[0].kv_tiles) for s in (last, first)]
        assert [*tiles[0], *tiles[1]] == tile_positions(whole.steps[0].tiles[0].kv_tiles) and all(tiles)
        assert split.last_step == (len(split.steps) - 1,)
        kinds = torch.cat([s.tiles[0].table.to_dense() for s in (last, first)], -1)
        assert torch.equal(kinds, whole.steps[0].tiles[0].table.to_dense())
    assert split_ranks > 0


@pytest.mark.parametrize(
    ("name", "bytes_sent", "tokens"),
    [
        # Tokens of each rank that are computed last, in tiles of 16. None: nothing is received in the first, or sent in the last step.
        ("contiguous ring", (2, 4), [None, 96, 96, 80]),
        ("contiguous ring", (4, 4), [None, 64, 64, 64]),
        ("contiguous ring", (1, 40), [None, 160, 160, 160]),
        ("contiguous ring", (40, 1), [None, 16, 16, 16]),
        ("ring by stages", (2, 4), [None, None, None, 80]),
        ("head_tail ring", (2, 4), [80, 80, 80, 96]),
        ("head_tail ring by stages", (4, 4), [48, 96, 80, 64]),
        ("head_tail ring by stages", (1, 40), [160, 160, 160, 80]),  # at most as many as received rows
    ],
)
def test_local_kv_is_split_in_proportion_to_the_bytes_of_both_transfers(
    name: str, bytes_sent: tuple[int, int], tokens: list[int | None]
) -> None:
    for plan, late in zip(plans(name), tokens, strict=True):
        options = ScheduleOptions(block=(64, 16), backward=True)
        split = local_schedule(plan, replace(options, split_bytes=bytes_sent))
        assert (split is local_schedule(plan, options)) == (late is None)
        assert late is None or len(split.steps[-1].local) == late


@pytest.mark.parametrize("name", ["joined ring", "batch rows"])
def test_local_kv_stays_in_one_step_where_it_is_joined_or_batch_rows_differ(name: str) -> None:
    for plan in plans(name):
        options = ScheduleOptions(block=BLOCK, backward=True)
        assert local_schedule(plan, replace(options, split_bytes=(2, 4))) is local_schedule(plan, options)


@pytest.mark.parametrize(
    ("stages", "text"), [(range(1), "stage 1"), (range(2, 3), "stage 3"), (range(3), "stages 1 to 3"), (range(2, 4), "stages 3 to 4")]
)
def test_stages_are_counted_from_one(stages: range, text: str) -> None:
    assert _stage_names(stages) == text


def test_tiles_in_their_places_need_no_lists() -> None:
    grid = TileGrid.of(ls.Layout(length=100, rows=((((0, 100),),),)), 32)
    plain = tiling_of(grid, torch.arange(4))
    assert (plain.length, plain.block, plain.row) == (100, 32, None)
    assert tiling_of(grid, torch.arange(3)).row is None and tiling_of(grid, torch.arange(3)).length == 96
    listed = tiling_of(grid, torch.tensor([3, 1]))
    assert (listed.row.tolist(), listed.pos.tolist(), listed.count.tolist(), listed.length) == ([0, 4], [96, 32], [4, 32], 36)
    assert {t.dtype for t in (listed.row, listed.pos, listed.count)} == {torch.int32}
    late, none = tiling_of(grid, torch.tensor([1, 2])), tiling_of(grid, torch.tensor([], dtype=torch.int64))
    assert (late.row.tolist(), late.pos.tolist()) == ([0, 32], [32, 64]) and (none.length, none.row.tolist()) == (0, [])
    ragged = TileGrid.of(ls.Layout(length=100, rows=((((0, 40), (40, 60)),),)), 32)
    assert tiling_of(ragged, torch.arange(len(ragged.owner))).row.tolist() == [0, 32, 40, 64, 96]
