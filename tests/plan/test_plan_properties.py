"""Properties of every plan: each pair is computed once, only KV that is read moves, unshard inverts shard, and all ranks agree."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.sharded import Problem, mask_named

import longspan as ls
from longspan._engine.schedule_builder import ScheduleOptions, local_schedule
from longspan._plan.tile_grid import read_tiles
from longspan._planner.plan import Plan
from longspan.testing import virtual_world

MASKS = ("causal", "documents", "window", "prefix", "custom", "per head")
LAYOUTS = ("contiguous", "head_tail", "per_document", "round_robin", "auto")
MOVES = ("ring", "allgather", "exchange")


@st.composite
def planned(draw: Any, longest: int = 1000) -> tuple[dict[str, Any], Any, int, int]:
    """Arguments of a plan: a layout and a strategy, a mask, a length and a number of ranks."""
    length, ranks = draw(st.integers(1, longest)), draw(st.integers(1, 16))
    layout = draw(st.sampled_from(LAYOUTS))
    strategy = draw(st.sampled_from(MOVES))
    stages = draw(st.sampled_from([None, 1, 2, 5])) if strategy == "exchange" else None
    options = {"layout": layout, "strategy": strategy, "stages": stages, "overlap": draw(st.sampled_from([None, False]))}
    mask = mask_named(draw(st.sampled_from(MASKS)), length, layout)
    return options, mask, length, ranks


@dataclass(frozen=True)
class Planned:
    """A plan, its view on every rank, and options of the schedule."""

    plan: Plan
    by_rank: list[Plan]
    strategy: str
    merged: bool
    backward: bool

    def steps(self, rank: int) -> Any:
        options = ScheduleOptions(block=(128, 128), backward=self.backward, merge_stages=self.merged)
        return local_schedule(self.by_rank[rank].data, options).steps


@pytest.mark.long
@settings(max_examples=50)
@given(planned(), st.booleans(), st.booleans())
def test_every_plan_is_consistent(args: Any, merged: bool, backward: bool) -> None:
    """All properties of one plan: planning takes longer than a check."""
    options, mask, length, ranks = args
    plan = ls.plan(mask, length, ls.Mesh.abstract(ranks), batch=2, heads=3, **options)
    by_rank = [plan.on(ls.Mesh.abstract(ranks, rank=rank)) for rank in range(ranks)]
    case = Planned(plan, by_rank, options["strategy"], merged, backward)
    check_that_every_allowed_pair_is_computed_exactly_once_by_exactly_one_rank(case)
    check_that_query_tiles_are_complete_with_the_last_step_that_has_their_kv(case)
    check_that_sent_tokens_are_expected_and_an_exchange_moves_only_tokens_that_are_read(case)
    check_that_backward_moves_the_tokens_of_forward_that_are_read(case)
    check_that_rows_arrive_at_the_place_where_the_receiver_reads_them(case)
    if backward:  # half of the plans: it plans again
        check_that_the_last_rank_makes_the_same_plan_and_pickling_keeps_it(case, args)


def check_that_every_allowed_pair_is_computed_exactly_once_by_exactly_one_rank(case: Planned) -> None:
    for row in range(case.plan.data.batch_layouts):
        table = case.plan.data.tiles[row].table
        kinds = table.to_dense()
        seen = torch.zeros(table.batch, table.heads, table.q_tiles, table.kv_tiles, dtype=torch.int64)
        for rank, mine in enumerate(case.by_rank):
            queries, keys = mine.data.tiles[row].queries, mine.data.tiles[row].kv
            for step in case.steps(rank):
                part = step.tiles[row]
                q = _numbers(part.q_tiles, queries)
                kv = _numbers(part.kv_tiles, keys)
                local_kinds = part.table.to_dense()
                seen[:, :, q[:, None], kv[None]] += (local_kinds > 0).long()
                assert torch.equal(local_kinds, kinds[:, :, q][..., kv])
        assert torch.equal(seen, (kinds > 0).long())


def _numbers(tiling: Any, side: Any) -> torch.Tensor:
    """The indices of a tiling's tiles, from their positions."""
    position = torch.arange(0, tiling.length, tiling.block) if tiling.pos is None else tiling.pos.long()
    return torch.searchsorted(side.edges, position)


def check_that_query_tiles_are_complete_with_the_last_step_that_has_their_kv(case: Planned) -> None:
    for mine in case.by_rank:
        schedule = local_schedule(mine.data, ScheduleOptions(block=(128, 128)))
        for row, last in enumerate(schedule.last_step):
            parts = [step.tiles[row] for step in schedule.steps]
            seen = torch.stack([part.table.to_dense().gt(0).any(3).flatten(0, 1) for part in parts])  # [steps, heads and batch rows, tiles]
            ends = torch.where(seen.any(0), seen.shape[0] - 1 - seen.flip(0).long().argmax(0), -1)
            complete = [
                torch.zeros_like(ends[0], dtype=torch.bool) if part.complete_q_tiles is None else part.complete_q_tiles for part in parts
            ]
            if any(bool(c.any()) for c in complete):
                assert all(torch.equal(complete[i], (ends == i).all(0)) for i in range(last))
                assert torch.equal(torch.stack(complete[:last]).sum(0) == 1, ~(ends == last).any(0))
                assert not any(bool(c.any()) for c in complete[last:])
            else:  # all tiles end with the last step, or some end in no step, or heads of one tile end in different steps
                assert bool((ends == last).all()) or bool((ends == -1).any()) or bool((ends != ends[0]).any())


def check_that_sent_tokens_are_expected_and_an_exchange_moves_only_tokens_that_are_read(case: Planned) -> None:
    data, schedule = case.plan.data, case.plan.schedule
    ranks = len(case.by_rank)
    sent = torch.zeros(schedule.stages, ranks, ranks, dtype=torch.int64)
    expected = torch.zeros_like(sent)
    for rank, mine in enumerate(case.by_rank):
        exchanges = [a for step in local_schedule(mine.data, ScheduleOptions(block=(128, 128))).steps for a in step.exchanges]
        assert len(exchanges) == schedule.stages
        for stage, exchange in enumerate(exchanges):
            sent[stage, rank] += torch.tensor(exchange.send_counts)
            expected[stage, :, rank] += torch.tensor(exchange.recv_counts)
    assert torch.equal(sent, expected)
    if case.strategy == "exchange":
        assert data.backward_schedule is schedule
        assert all(bool(read[moved > 0].all()) for read, moved in _read_and_moved(data, schedule))


def _read_and_moved(data: Any, schedule: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each batch row: which tiles each rank reads, and how often each arrives there [ranks, tiles]."""
    for row in range(data.batch_layouts):
        keys = data.tiles[row].kv
        read = read_tiles(data.tiles[row].table, data.tiles[row].queries, data.inner[0].ranks)
        moved = torch.zeros_like(read, dtype=torch.int64)
        here = schedule.row == row
        first, end = keys.within(schedule.start[here], schedule.length[here])
        for receiver, a, b in zip(schedule.receiver[here].tolist(), first.tolist(), end.tolist(), strict=True):
            moved[receiver, a:b] += 1
        yield read, moved


def check_that_backward_moves_the_tokens_of_forward_that_are_read(case: Planned) -> None:
    data, ranks = case.plan.data, len(case.by_rank)
    backward = data.backward_schedule
    assert (
        replace(backward, only_read_kv=not backward.only_read_kv).digest != backward.digest
    )  # ranks that would not move the same do not agree
    assert (backward.stages, backward.steps, backward.joined) == (data.schedule.stages, data.schedule.steps, data.schedule.joined)
    for (read, moved), (_, returned) in zip(*(_read_and_moved(data, s) for s in (data.schedule, backward)), strict=True):
        assert torch.equal(returned, moved * read)
    assert bool((backward.received(ranks) <= data.schedule.received(ranks)).all())
    for mine in case.by_rank:
        steps = local_schedule(mine.data, ScheduleOptions(block=(128, 128), backward=True)).steps
        assert all(step.exchanges for step in steps[1:]) and sum(len(step.exchanges) for step in steps) == len(backward.stage.unique())


def check_that_rows_arrive_at_the_place_where_the_receiver_reads_them(case: Planned) -> None:
    mine, length = case.by_rank, case.plan.data.kv_len
    steps_by_rank = [case.steps(rank) for rank in range(len(mine))]
    for i, group in enumerate(zip(*steps_by_rank, strict=True)):
        assert {len(step.exchanges) for step in group} == {len(group[0].exchanges)}
        assert not case.merged or len(group[0].exchanges) <= 1
        for k in range(len(group[0].exchanges)):
            assert len({step.exchanges[k].what for step in group}) == 1
        for receiver, step in enumerate(group):
            # Each row of the buffer by its batch row and position.
            read_numbers = torch.full((step.buffer_rows,), -1)
            for row, part in enumerate(step.tiles):
                at = torch.arange(step.buffer_rows) if part.kv_rows is None else part.kv_rows.indices()
                read_numbers[at[: part.kv_tiles.length]] = row * length + part.kv_tiles.positions(torch.device("cpu"))
            for k, exchange in enumerate(step.exchanges):
                sent = [_local_numbers(mine[source])[other.exchanges[k].sent_to[receiver].indices()] for source, other in enumerate(group)]
                assert [len(rows) for rows in sent] == list(exchange.recv_counts)
                assert torch.equal(torch.cat(sent), read_numbers[exchange.start : exchange.stop]), (i, k)


def _local_numbers(plan: ls.Plan) -> torch.Tensor:
    """Numbers batch row × length + position of a rank's local KV, in the order of sending."""
    rows = plan.data.batch_layouts
    return (torch.arange(rows)[:, None] * plan.data.kv_len + plan.kv_positions.view(rows, -1)).flatten()


def check_that_the_last_rank_makes_the_same_plan_and_pickling_keeps_it(case: Planned, args: Any) -> None:
    options, mask, length, ranks = args
    last = ls.plan(mask, length, ls.Mesh.abstract(ranks, rank=ranks - 1), batch=2, heads=3, **options)
    assert last.digest == case.plan.digest
    unpickled = pickle.loads(pickle.dumps(last))
    assert unpickled.digest == last.digest
    assert torch.equal(unpickled.positions, last.positions)
    assert str(unpickled.report()) == str(last.report())


@settings(max_examples=40)
@given(planned(longest=500), st.integers(0, 2))
def test_unshard_of_shard_is_the_same_bits(args: Any, dim: int) -> None:
    options, mask, length, ranks = args
    shape = [3, 2]
    shape.insert(dim, length)
    whole = torch.randn(*shape, generator=torch.Generator().manual_seed(length))

    planned_once = ls.plan(mask, length, ls.Mesh.abstract(ranks), batch=2, heads=3, **options)

    def rank(mesh: Any) -> torch.Tensor:
        plan = planned_once.on(mesh)
        if plan.data.batch_layouts > 1:
            return whole
        part = plan.shard(whole, dim)
        assert part.shape[dim] == plan.local_len and torch.equal(part, whole.index_select(dim, plan.positions))
        out = plan.unshard(part, dim)
        assert out.is_contiguous()
        return out

    assert all(torch.equal(unsharded, whole) for unsharded in virtual_world(ranks).run(rank))


@pytest.mark.long
@settings(max_examples=16)
@example("causal", "relative bias", "ring", "contiguous", 1, 3, (4, 2), None)  # ranks that own nothing
@given(
    st.sampled_from(MASKS),
    st.sampled_from(["none", "alibi", "relative bias", "softcap"]),
    st.sampled_from(MOVES),
    st.sampled_from(LAYOUTS),
    st.integers(1, 400),
    st.integers(1, 16),
    st.sampled_from([(3, 1), (4, 2), (5, 5)]),
    st.sampled_from([None, False]),
)
def test_results_equal_the_oracle(
    mask: str, score: str, strategy: str, layout: str, length: int, ranks: int, heads: tuple[int, int], overlap: bool | None
) -> None:
    problem = Problem(
        mask=mask_named(mask, length, layout), score=score, q_len=length, kv_len=length, batch=2, heads=heads[0], kv_heads=heads[1]
    )
    right, got = problem.by_oracle(), problem.over(ranks, strategy=strategy, layout=layout, overlap=overlap)
    for name in right.values:
        assert got.error(right, name) < 1e-10, name
