"""Estimates from owners of units, counts of pairs and memory, computed by hand for a few units."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest
import torch

import longspan as ls
from longspan._balance.demand import Demand
from longspan._cost import estimate
from longspan._cost import simulate as simulating
from longspan._cost.estimate import OwnerEstimate, _full_and_partial
from longspan._cost.pair_counts import balance_of, split_heads
from longspan._cost.predict import timeline
from longspan._cost.rates import Rates, Shape
from longspan._cost.report_data import report
from longspan._cost.simulate import Simulated, _sampled, demand_for, owner_of, simulate
from longspan._cost.timeline import Conditions
from longspan._cost.workload import BackwardMoves, Placement, Workload
from longspan._plan.named_layouts import from_owner

# Five units of 256 tokens, the last of 176; unit t reads units 0 … t. Rank 0 owns units 0 and 3, rank 1 unit 1, rank 2 units 2 and 4.
OWNER = torch.tensor([0, 1, 2, 0, 2])
WORK = torch.tensor([40.0, 80.0, 120.0, 160.0, 130.0], dtype=torch.float64) * 1000
DEMAND = Demand(
    length=1200, unit=256, work=WORK, ptr=torch.arange(6), first=torch.zeros(5, dtype=torch.int64), last=torch.arange(5)
)  # fmt: skip
SHAPE = Shape(batch=3, heads=8, kv_heads=4, head_dim=64)
PLACE = Placement(per_node=2)


def workload(moves: str, **options: Any) -> Workload:
    return OwnerEstimate(DEMAND, OWNER, 3).workload(moves=moves, placement=PLACE, shape=SHAPE, **options)


def test_owned_tokens_work_and_reads_of_each_rank() -> None:
    estimate = OwnerEstimate(DEMAND, OWNER, 3)
    assert estimate.owned_tokens.tolist() == [512, 256, 432] and estimate.work.tolist() == [200e3, 80e3, 250e3]
    assert estimate.computed.tolist() == [[2, 1, 1, 1, 0], [1, 1, 0, 0, 0], [2, 2, 2, 1, 1]] and estimate.shard_tokens == 400
    some = OwnerEstimate(DEMAND, OWNER, 3, torch.tensor([2]))
    assert some.computed.tolist() == [[2, 2, 2, 1, 1]] and some.owned_tokens.tolist() == [432] and some.work.tolist() == [250e3]
    assert some.is_local.tolist() == [[False, False, True, False, True]]


def test_tokens_moved_by_an_all_gather_and_again_by_its_backward() -> None:
    """Ranks 0 and 1 share a node. Backward moves the units that are read."""
    work = workload("allgather", step_tokens=1)
    assert work.received[:, :, 1].tolist() == [[256, 512, 0], [432, 432, 768]] and not work.received[:, :, 0].any()
    assert work.sent[:, :, 1].tolist() == [[512, 256, 0], [512, 256, 864]] and work.exchanges.tolist() == [0, 1]
    back = work.with_backward_moves()
    assert back.received[:, :, 1].tolist() == [[256, 256, 0], [256, 0, 768]] and back.exchanges.tolist() == [0, 1]
    assert back.sent[:, :, 1].tolist() == [[256, 256, 0], [512, 256, 256]] and back.gathered is None
    assert work.local.tolist() == [512, 256, 432] and work.scale == 3 and work.degree == 1
    assert work.query_tiles.tolist() == [[4 * 24] * 2, [2 * 24] * 2, [4 * 24] * 2]


def test_a_ring_moves_from_the_nearest_rank_before_to_the_farthest() -> None:
    work = workload("ring", step_tokens=1)
    # Step 1: from rank 2 to 0, 0 to 1, 1 to 2; step 2: from 1 to 0, 2 to 1, 0 to 2.
    assert work.received.sum(0).tolist() == [[0, 432, 256], [0, 512, 432], [0, 256, 512]] and work.exchanges.tolist() == [0, 1, 1]
    assert work.sent.sum(0).tolist() == [[0, 512, 512], [0, 256, 256], [0, 432, 432]]
    back = work.with_backward_moves()
    assert back.received.sum(0).tolist() == [[0, 256, 256], [0, 256, 0], [0, 256, 512]]
    joined = workload("ring", step_tokens=800)  # two shards in a step
    assert joined.received.sum(0).tolist() == [[0, 688], [0, 944], [0, 768]] and joined.exchanges.tolist() == [0, 2]


def test_an_exchange_moves_units_that_are_read_in_equal_stages() -> None:
    """Rank 0 reads units 2 and 1 of others, rank 1 unit 0, rank 2 units 1, 0 and 3: the nearest rank before first."""
    work = workload("exchange", step_tokens=1)
    assert work.exchanges.tolist() == [0, 1, 1] and work.backward is None  # 768 tokens in steps of a shard, 400
    assert work.received.sum(0).tolist() == [[0, 256, 256], [0, 256, 0], [0, 512, 256]]
    three = workload("exchange", stages=3)
    assert three.received.sum(0).tolist() == [[0, 256, 256, 0], [0, 256, 0, 0], [0, 256, 256, 256]]
    assert three.sent.sum(0).tolist() == [[0, 256, 256, 256], [0, 256, 256, 0], [0, 256, 0, 0]]
    assert workload("exchange", stages=1).exchanges.tolist() == [0, 1] and int(workload("exchange", stages=4000).exchanges.sum()) == 768
    assert workload("none").exchanges.tolist() == [0] and not workload("none").received.any()


def test_tiles_of_an_estimate_add_up_to_the_work() -> None:
    for moves in ("ring", "allgather", "exchange"):
        work = workload(moves, step_tokens=1)
        useful = (work.full + work.partial / 2).sum(1) / 24 * 128**2
        assert useful.tolist() == pytest.approx([200e3, 80e3, 250e3]), moves
        assert bool((work.active_tiles <= work.query_tiles).all())


def test_query_tiles_that_see_a_step_are_those_of_its_most_read_unit() -> None:
    """Units have 2 query tiles, heads and batch rows 24; no more query tiles than a rank has."""
    work = workload("exchange", stages=3)
    assert work.active_tiles is not None
    assert work.active_tiles.tolist() == [[96, 48, 48, 0], [48, 48, 0, 0], [96, 96, 96, 48]]


def test_kv_and_gradients_in_flight_are_those_of_two_steps_of_the_pass_with_more() -> None:
    """Forward receives 100 and 40 tokens; backward 30 and 20, with gradients of twice as many bytes, or 90."""
    moved = lambda *tokens: torch.tensor([[[0, *tokens]], [[0, 0, 0]]], dtype=torch.float64)
    work = replace(workload("ring"), received=moved(100, 40), query_tiles=torch.tensor([[5.0, 5.0, 5.0]]))
    back = lambda *tokens: BackwardMoves(moved(*tokens), moved(*tokens), None, torch.ones(3))
    of = lambda w: (
        Simulated(
            strategy="ring", layout="x", gpus=2, tokens=1, degree=1, stages=1, imbalance=1.0, work=w, timeline=cast(Any, None), flops=1.0
        ).in_flight
    )
    token = 2 * 3 * 4 * 64 * 2
    assert of(replace(work, backward=back(30, 20))) == 2 * 100 * token and of(replace(work, backward=back(20, 90))) == 2 * 90 * 3 * token
    merged = replace(work, backward=back(30, 20), query_tiles=torch.tensor([[5.0, 20.0, 20.0]]))  # four steps in one
    assert of(merged) == 2 * 25 * token and of(replace(workload("none"), backward=None)) == 0.0


def test_as_many_units_as_are_allowed_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (simulating.MAX_UNITS, simulating.SAMPLED_RANKS) == (65536, 16)
    monkeypatch.setattr("longspan._cost.simulate.MAX_UNITS", 100)
    assert [demand_for(ls.full(), tokens, 2).unit for tokens in (12800, 12801)] == [128, 256]


def test_pairs_of_batch_rows_with_layouts_of_their_own_are_added() -> None:
    rows = [[700, 324], [1000, 24], [512, 512]]
    mask = ls.causal() & ls.documents(lengths=rows)
    plan = ls.plan(mask, 1024, ls.Mesh.abstract(2), batch=3, heads=5, layout="auto", strategy="exchange")
    assert plan.data.batch_layouts == 3
    assert float(report(plan.data).pairs.sum()) == 5 * sum(n * (n + 1) / 2 for row in rows for n in row)


def test_edges_of_a_mask_are_local_as_far_as_there_is_room() -> None:
    """Units of 2 × 2 tiles; rank 0 wastes 3 of 12 tiles, all of them on local KV; rank 1 wastes 4, of which 2 are local."""
    area = torch.tensor([[8.0, 3.0, 1.0], [4.0, 2.0, 6.0], [4.0, 0.0, 0.0]], dtype=torch.float64)
    full, partial = _full_and_partial(area, torch.tensor([9.0, 8.0, 5.0], dtype=torch.float64), torch.tensor([2.0, 2.0, 2.0]))
    assert partial.tolist() == [[3, 0, 0], [2, 0.5, 1.5], [0, 0, 0]]
    assert full.tolist() == [[3.5, 3, 1], [1, 1.25, 3.75], [4, 0, 0]]


def test_tiles_end_where_the_owner_changes() -> None:
    """Eight units of 32 tokens; the tiles are units 0 … 3, 4, 5 and 6 … 7. Every unit reads all units."""
    owner = torch.tensor([0, 0, 0, 0, 1, 0, 1, 1])
    demand = Demand(
        length=256, unit=32, work=torch.full((8,), 32.0 * 256, dtype=torch.float64), ptr=torch.arange(9),
        first=torch.zeros(8, dtype=torch.int64), last=torch.full((8,), 7),
    )  # fmt: skip
    work = OwnerEstimate(demand, owner, 2).workload(moves="allgather", placement=PLACE, shape=Shape(heads=3))
    assert work.query_tiles.tolist() == [[6, 6], [6, 6]] and work.active_tiles is not None
    torch.testing.assert_close(work.active_tiles, work.query_tiles)
    torch.testing.assert_close(work.full, torch.tensor([[12.0, 12.0], [12.0, 12.0]], dtype=torch.float64))
    assert float(work.partial.abs().max()) < 1e-6


@pytest.mark.parametrize(("tokens", "ranks"), [(8192, 7), (5000, 6), (1000, 3), (4096, 8)])
@pytest.mark.parametrize("layout", ["contiguous", "head_tail", "round_robin"])
def test_estimates_of_cut_tiles_are_near_the_plans_own(tokens: int, ranks: int, layout: str) -> None:
    for mask in (ls.causal(), ls.causal() & ls.sliding_window(900)):
        demand = demand_for(mask, tokens, ranks)
        owner = owner_of(layout, demand, ranks)
        made = ls.plan(
            mask, tokens, ls.Mesh.abstract(ranks), layout=from_owner(owner, length=tokens, unit=demand.unit, ranks=ranks),
            strategy="allgather", heads=32, kv_heads=8, overlap=True,
        )  # fmt: skip
        exact = made.report("h200")
        work = OwnerEstimate(demand, owner, ranks).workload(moves="allgather", placement=Placement(per_node=8), shape=exact.shape)
        assert float((work.full + work.partial).sum()) == pytest.approx(float((exact.work.full + exact.work.partial).sum()), rel=0.13)
        assert work.query_tiles[:, 0].sum() == exact.work.query_tiles.sum()
        assert timeline(work, exact.cluster).seconds == pytest.approx(exact.seconds, rel=0.15)


def test_many_steps_are_merged_with_their_exchanges_and_query_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    assert estimate.MAX_STEPS == 256
    monkeypatch.setattr("longspan._cost.estimate.MAX_STEPS", 2)
    work = workload("exchange", stages=3)
    assert work.received.sum(0).tolist() == [[0, 512, 0], [0, 256, 0], [0, 512, 256]] and work.exchanges.tolist() == [0, 2, 1]
    assert work.query_tiles.tolist() == [[96, 192, 192], [48, 96, 96], [96, 192, 192]]


def test_heads_are_split_over_the_members_of_a_group() -> None:
    by_head = torch.arange(12.0).view(6, 2)
    assert split_heads(by_head, 3, 6).tolist() == [[2, 4], [10, 12], [18, 20]]
    assert split_heads(by_head, 4, 6).tolist() == [[7.5, 9.0]] * 4
    assert split_heads(by_head[1:2], 4, 6).tolist() == [[3.0, 4.5]] * 4
    assert (
        balance_of(torch.tensor([1.0, 5.0, 2.0])) == 5 * 3 / 8
        and balance_of(torch.zeros(3)) == 1.0
        and balance_of(torch.tensor([0.5])) == 1
    )


def test_short_rows_take_at_least_half_of_the_first_point() -> None:
    """40.96 and 51.2 ps at 1024 keys; below it at least half of that and as much again in proportion."""
    rates = Rates(keys=(1024.0, 2048.0), full=(100.0, 150.0), causal=(80.0, 100.0))
    keys, none = torch.tensor([0.0, 256.0, 512.0, 1024.0, 1536.0], dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    slope = (4 * 2048 / 150 - 40.96) / 1024
    assert (rates.seconds(keys, none) * 1e12).tolist() == pytest.approx(
        [40.96 - 1024 * slope, max(40.96 * 0.625, 40.96 - 768 * slope), max(40.96 * 0.75, 40.96 - 512 * slope), 40.96, 40.96 + 512 * slope]
    )
    half = rates.seconds(keys, none + 0.5) - rates.seconds(keys, none)
    assert (2 * half[3:] * 1e12).tolist() == pytest.approx([10.24, (51.2 + 81.92) / 2 - (40.96 + 8192 / 150) / 2])


def test_sampled_ranks_include_the_ends_and_slow_ranks() -> None:
    work = torch.arange(100.0, dtype=torch.float64)
    assert _sampled(work[:16], None, 1).tolist() == list(range(16))
    usual = _sampled(work, None, 2)
    slow = _sampled(work, Conditions(stragglers={13: 2.0, 200: 1.5, 9999: 3.0}, slow_links={90: 2.0}), 2)
    assert len(usual) == 14 and {0, 99} <= set(usual.tolist()) and set(slow.tolist()) == {*usual.tolist(), 6, 45}


def test_a_simulation_tries_degrees_that_divide_devices_and_heads() -> None:
    got = simulate(ls.causal(), 3072, 12, shape=Shape(heads=12, kv_heads=4, head_dim=64), cluster="h100", layouts=("contiguous",))
    assert {s.degree for s in got} == {1, 2, 4, 12} and all(a.seconds <= b.seconds for a, b in pairwise(got))
    assert {s.name for s in got if s.degree == 12} == {"ulysses, contiguous"} and all(s.stages == 0 for s in got if s.degree == 12)
    assert {s.strategy for s in got if s.degree == 2} == {"ulysses_exchange", "ulysses_ring", "ulysses_allgather"}
    flops = 3.5 * 4 * 64 * 12 * 3072 * 3073 / 2
    assert all(s.flops == pytest.approx(flops, rel=0.01) and s.tokens == 3072 and s.gpus == 12 for s in got)
    heavy = next(s for s in got if s.name == "ring, contiguous")
    assert heavy.imbalance == pytest.approx(23 / 12, rel=0.01)
    with pytest.raises(ValueError, match="expected 'contiguous', 'head_tail' or 'round_robin', got 'x'"):
        owner_of("x", DEMAND, 3)


def test_memory_of_a_ulysses_rank_by_hand() -> None:
    """8 devices share 16 heads and 2 KV heads of 8 dims: each KV head is on 4 of them. 128 queries and 384 keys on each."""
    plan = ls.plan(ls.full(), (1024, 3072), ls.Mesh.abstract(8), strategy="ulysses", heads=16, kv_heads=2, head_dim=8, batch=3)
    got = report(plan.data, "h100")
    q, kv = 128 * 3 * 16 * 8, 384 * 3 * 2 * 2 * 8  # elements
    assert got.memory_parts == {
        "q, k, v, out, lse": 2 * 2 * q + 128 * 4 * 3 * 16 + 2 * kv,
        "gradients, float32": 4 * (q + 4 * kv),
        "transposed copies": 2 * (3 * q + 4 * kv),
        "KV and gradients in flight": 0,
    }
    assert f"memory       {sum(got.memory_parts.values()) / 2**20:.2f} MiB per rank at most\n" in str(got)


def test_a_simulation_needs_one_token_per_device() -> None:
    assert simulate(ls.full(), 3, 3, shape=Shape(), cluster="h100", degrees=[1], layouts=("contiguous",))[0].gpus == 3
    with pytest.raises(ValueError, match="one token or more for each of 3 devices, got 2"):
        simulate(ls.full(), 2, 3, shape=Shape(), cluster="h100")


def test_the_report_names_the_bytes_of_both_transposes() -> None:
    plan = ls.plan(
        ls.causal(), 4096, ls.Mesh.abstract((2, 2), axis_names=("ring", "ulysses")), strategy="ulysses_ring", heads=8, kv_heads=2
    )
    made = report(plan.data, "h100")
    first, *_, last = made.bytes_received.sum(1).tolist()
    assert first != last and f", {(first + last) / 4 / 2**20:.2f} of it by transposes of heads;" in str(made)
