"""Workloads and timelines against plans, against the engine, and under slower links and ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import longspan as ls
from longspan._balance.demand import Demand, pairs_per_row
from longspan._cost.clusters import cluster
from longspan._cost.estimate import OwnerEstimate
from longspan._cost.plan_workload import of_plan
from longspan._cost.predict import fastest, timeline
from longspan._cost.rates import KernelRates, Link, Rates, Shape
from longspan._cost.report_data import report
from longspan._cost.simulate import curve, demand_for, owner_of, simulate
from longspan._cost.timeline import Conditions
from longspan._cost.workload import Placement
from longspan._engine.schedule_builder import ScheduleOptions, local_schedule

DOCUMENTS = ls.causal() & ls.documents(lengths=[1700, 40, 2900, 3552])
SIZES: dict[str, Any] = {"heads": 12, "kv_heads": 4, "head_dim": 64}


def planned(mask: Any = DOCUMENTS, tokens: int = 8192, mesh: Any = None, **options: Any) -> ls.Plan:
    return ls.plan(mask, tokens, mesh or ls.Mesh.abstract(4), **{**SIZES, **options})


@pytest.mark.parametrize("strategy", ["ring", "allgather", "exchange"])
@pytest.mark.parametrize("layout", ["contiguous", "head_tail", "round_robin", "per_document"])
def test_every_tile_and_every_moved_token_is_counted_once(strategy: str, layout: str) -> None:
    plan = planned(strategy=strategy, layout=layout)
    work = of_plan(plan.data, 2)
    counts = plan.data.tiles[0].table.counts()
    assert float(work.full.sum()) == counts.full * 12 and float(work.partial.sum()) == counts.partial * 12
    assert float(work.received.sum()) == float(work.sent.sum()) == int(plan.schedule.length.sum())
    assert work.received[0].sum() > 0 and work.received[1].sum() > 0  # two nodes of two


def test_batch_rows_with_different_layouts_are_counted_separately() -> None:
    mask = ls.causal() & ls.documents(lengths=[[700, 324], [1000, 24], [512, 512]])
    plan = planned(mask, 1024, batch=3, layout="auto", strategy="exchange", overlap=True)
    work = of_plan(plan.data, 8)
    tiles = sum(sum(plan.data.tiles[row].table.counts()[1:]) for row in range(3))
    assert float((work.full + work.partial).sum()) == 12 * tiles and work.scale == 1
    assert work.halves is not None and not work.halves[..., 1].any() and bool(work.halves[..., 0].any())  # local keys in one part


@pytest.mark.parametrize("moves", ["ring", "allgather", "exchange"])
@pytest.mark.parametrize("layout", ["contiguous", "head_tail", "round_robin"])
def test_estimates_from_owners_approximate_the_times_of_the_plan(moves: str, layout: str) -> None:
    tokens, ranks, shape = 65536, 8, Shape(heads=8, kv_heads=8)
    plan = ls.plan(ls.causal(), tokens, ls.Mesh.abstract(ranks), layout=layout, strategy=moves, heads=8, kv_heads=8)
    demand = demand_for(ls.causal(), tokens, ranks)
    owned = OwnerEstimate(demand, owner_of(layout, demand, ranks), ranks)
    guess = timeline(owned.workload(moves=moves, placement=Placement(per_node=8), shape=shape), cluster("h100")).seconds
    assert guess == pytest.approx(plan.report("h100").seconds, rel=0.04)


def test_moves_that_the_cost_model_does_not_know_raise() -> None:
    demand = demand_for(ls.causal(), 1000, 4)
    estimate = OwnerEstimate(demand, owner_of("contiguous", demand, 4), 4)
    with pytest.raises(NotImplementedError, match=r"cost model: expected moves 'ring', .* got 'tree'"):
        estimate.workload(moves="tree", placement=Placement(per_node=8), shape=Shape(heads=8, kv_heads=8))


def test_local_kv_is_computed_with_the_only_exchange_where_that_is_faster() -> None:
    mesh, sizes = ls.Mesh.abstract(8), {"heads": 32, "kv_heads": 8, "head_dim": 128}
    little, much = ls.causal() & ls.sliding_window(1024), ls.causal()
    for strategy in ("exchange", "auto"):
        plans = ls.plan({"little": little, "much": much}, 32768, mesh, strategy=strategy, layout="contiguous", stages=1, **sizes)
        assert plans["little"].schedule.joined and not plans["much"].schedule.joined
    for mask, joined in ((little, True), (much, False)):
        plan, other = (ls.plan(mask, 32768, mesh, strategy="exchange", stages=1, overlap=o, **sizes) for o in (None, joined))
        assert plan.schedule.joined is joined is not other.schedule.joined and plan.digest != other.digest
        assert plan.report().seconds < other.report().seconds
        one, two = (plan, other) if joined else (other, plan)
        assert (one.report().steps, two.report().steps) == (1, 2)
        assert " at once" in repr(one) and " at once" not in repr(two)
        assert float(one.report().work.full.sum()) == float(two.report().work.full.sum())
    assert "exchange in 1 stage at once" in str(ls.plan(little, 32768, mesh, stages=1, **sizes)._explanation())
    unknown = ls.plan(little, 32768, mesh, strategy="exchange", stages=1)
    assert not unknown.schedule.joined  # nothing is known of the sizes
    assert not ls.plan(little, 32768, ls.Mesh.abstract(1), overlap=False, **sizes).schedule.joined  # one rank moves nothing
    with pytest.raises(TypeError, match="overlap must be True, False or None, got 'yes'"):
        ls.plan(little, 32768, mesh, overlap="yes")


def test_ulysses_shares_heads_and_takes_time_for_the_transpose() -> None:
    plan = planned(strategy="ulysses")
    work, prediction = of_plan(plan.data, 8), plan.report()
    assert work.degree == 4 and bool((prediction.timeline.forward.before > 0).all()) and bool((prediction.timeline.forward.after > 0).all())
    assert float(work.query_tiles[0]) == 64 * 3 and len(prediction.received) == 0 and prediction.seconds > 0
    # Of 2048 tokens of each of three others 3 query heads and 1 key head arrive; 9 heads of the own tokens' outputs and lse come back.
    assert prediction.bytes_received.tolist() == [[3 * 2048 * (3 + 2) * 64 * 2] * 4, [2048 * 9 * (64 * 2 + 4)] * 4]
    assert float(prediction.timeline.bytes.sum()) == float((prediction.bytes_received + prediction.bytes_received_backward).sum())


def test_two_axes_place_ulysses_groups_inside_nodes_where_they_are_the_last_axis() -> None:
    mesh = ls.Mesh.abstract((4, 2), axis_names=("ring", "ulysses"))
    inside = of_plan(planned(mesh=mesh, strategy="ulysses_ring").data, 2)
    assert inside.cross_node_share == 0 and inside.received[0].sum() == 0  # each ring rank is a node
    flipped = ls.Mesh.abstract((2, 4), axis_names=("ulysses", "ring"))
    across = of_plan(planned(mesh=flipped, strategy="ulysses_ring").data, 4)
    assert across.cross_node_share == 1 and across.received[1].sum() == 0


def test_slow_links_expose_more_time_and_free_links_none() -> None:
    plan, base = planned(ls.full(), strategy="ring", layout="contiguous"), cluster("h100")
    free = replace(base, inside=Link(bandwidth=1e18, latency=0.0), contention=0.0)
    slow = replace(base, inside=Link(bandwidth=1e9, latency=1e-3))
    times = [report(plan.data, c) for c in (free, base, slow)]
    assert times[0].exposed == pytest.approx(0, abs=1e-9)
    assert times[0].seconds <= times[1].seconds < times[2].seconds and times[2].exposed > 0.5 * times[2].seconds


def test_a_straggler_and_a_slow_link_delay_their_peers() -> None:
    plan = planned(ls.causal(), 65536, strategy="ring", layout="head_tail", heads=32, kv_heads=8)
    usual = report(plan.data, "h100")
    late = report(plan.data, "h100", Conditions(stragglers={2: 3.0}))
    assert late.seconds > 2.5 * usual.seconds
    assert float(late.timeline.forward.total[1]) > 1.5 * float(usual.timeline.forward.total[1])
    assert report(plan.data, "h100", Conditions(slow_links={1: 500.0})).seconds > usual.seconds
    with pytest.raises(ValueError, match="expected ranks below 4, got 4"):
        report(plan.data, "h100", Conditions(stragglers={4: 2.0}))
    with pytest.raises(ValueError, match="factors above 0"):
        Conditions(slow_links={0: 0.0})


def test_steps_follow_each_other_and_begin_when_their_kv_has_arrived() -> None:
    predicted = planned(strategy="ring", layout="head_tail", tokens=8192).report("a100").timeline
    for one in (predicted.forward, predicted.backward):
        begin, end = one.compute
        assert bool((begin[:, 1:] >= end[:, :-1] - 1e-12).all()) and bool((begin[:, 1:] >= one.transfer[1][:, 1:] - 1e-12).all())
        assert bool((one.exposed >= -1e-12).all())
    returned = predicted.backward.grad_return
    assert returned is not None and bool((returned[0] >= predicted.backward.compute[1] - 1e-12)[:, 1:-1].all())
    # The last column is the second part of the local keys, after everything that arrives.
    assert bool((predicted.forward.compute[1] - predicted.forward.compute[0])[:, -1].eq(0).all()) and not returned[1][:, -1].any()
    assert bool((predicted.backward.compute[1] - predicted.backward.compute[0])[:, -1].gt(0).all())


@pytest.mark.parametrize("strategy", ["ring", "allgather", "exchange"])
@pytest.mark.parametrize("layout", ["contiguous", "head_tail", "round_robin"])
def test_the_model_splits_local_kv_as_the_engine_does(strategy: str, layout: str) -> None:
    plan = planned(ls.causal() & ls.documents(lengths=[1700, 40, 2900, 3552]), strategy=strategy, layout=layout, overlap=True)
    work = of_plan(plan.data, 8)
    assert work.halves is not None and work.halves.shape == (3, 4, 2) and work.steps == len(plan.schedule.steps) + 2
    for column, halves in zip((work.full, work.partial), work.halves, strict=False):
        assert torch.equal(column[:, 0], halves.sum(1)) and not column[:, -1].any()
    back = work.with_backward_moves().split()
    assert torch.equal(back.full.sum(1), work.full.sum(1)) and back.steps == work.steps and back.active_tiles is not None
    for rank in range(4):
        schedule = local_schedule(
            plan.on(ls.Mesh.abstract(4, rank=rank)).data, ScheduleOptions(block=(128, 128), backward=True, split_bytes=(2, 4))
        )
        local = [step for step in schedule.steps if step.local]
        for at, step in enumerate(local):
            table = step.tiles[0].table
            assert work.halves[:, rank, at].tolist() == [
                12 * n for n in (table.counts().full, table.counts().partial, int((table.tiles_per_row > 0).sum()))
            ]
        assert len(local) == 2 or not work.halves[:, rank, 1].any()


def test_the_last_gradient_return_overlaps_with_local_kv_unless_joined() -> None:
    plan = planned(ls.full(), 65536, strategy="allgather", heads=32, kv_heads=8, head_dim=128, overlap=True)
    work, profile = of_plan(plan.data, 8), cluster("h100")
    split, whole = (
        timeline(w, profile).backward for w in (work, replace(work, halves=torch.stack([work.halves.sum(2), work.halves[..., 0] * 0], 2)))
    )  # type: ignore[union-attr]
    assert split.grad_return is not None and bool((split.compute[0][:, -1] <= split.grad_return[0][:, 1]).all())
    assert split.seconds < whole.seconds
    joined = work.join()
    assert joined.halves is None and joined.steps == 2 and joined.split() is joined


def test_kernel_times_grow_with_keys_and_meet_the_measured_rates() -> None:
    kernel, one = cluster("h100").kernel, torch.ones(1, dtype=torch.float64)
    for keys, rate in zip(kernel.forward.keys, kernel.forward.full, strict=True):
        rows = 4096 * one
        seconds = kernel.seconds(rows=rows, full=rows * keys / 128, partial=0 * one, head_dim=128, backward=False) - kernel.launch
        assert 4 * 128 * 128 * 4096 * keys / float(seconds) / 1e12 == pytest.approx(rate)
    tiles = torch.arange(1.0, 3000.0, 7.0, dtype=torch.float64)
    rows = torch.full_like(tiles, 300.0)
    for backward in (False, True):
        seconds = kernel.seconds(rows=rows, full=tiles, partial=tiles / 9, head_dim=64, backward=backward)
        assert bool((seconds.diff() > 0).all())
    assert float(kernel.seconds(rows=one, full=0 * one, partial=0 * one, head_dim=128, backward=False)) == 0


def test_the_floor_for_short_rows_does_not_change_long_rows() -> None:
    slow_start = Rates(keys=(128.0, 1024.0, 8192.0), full=(50.0, 400.0, 500.0), causal=(40.0, 300.0, 450.0))
    keys = torch.tensor([1024.0, 8192.0, 65536.0], dtype=torch.float64)
    seconds = slow_start.seconds(keys, torch.zeros_like(keys))
    assert (4 * keys / seconds / 1e12)[:2].tolist() == pytest.approx([400.0, 500.0])
    assert float(4 * keys[2] / seconds[2] / 1e12) > 500  # rates beyond the table continue its last slope


def test_each_further_partial_tile_wastes_half_a_tile_at_the_last_slope() -> None:
    """Picoseconds 4 · keys / rate: 10.24, 10.24 and 65.536; the last slope is 55.296 over 7168 keys."""
    rates = Rates(keys=(128.0, 1024.0, 8192.0), full=(50.0, 400.0, 500.0), causal=(40.0, 300.0, 450.0))
    keys, edges = torch.full((4,), 2048.0, dtype=torch.float64), torch.tensor([0.0, 1.0, 2.0, 4.0], dtype=torch.float64)
    seconds = rates.seconds(keys, edges) * 1e12
    assert (seconds[2:] - seconds[1]).tolist() == pytest.approx([55.296 / 7168 * 128 / 2 * n for n in (1, 3)])
    assert float(seconds[0]) == pytest.approx(10.24 + 55.296 / 7) and float(seconds[1]) > float(seconds[0])


def test_only_active_query_tiles_count_and_engine_bytes_take_time() -> None:
    plan = planned(ls.causal() & ls.sliding_window(700), strategy="ring", layout="contiguous", heads=96, overlap=True)
    work = of_plan(plan.data, 8)
    assert work.active_tiles is not None and bool(((work.active_tiles > 0) == (work.full + work.partial > 0)).all())
    # Rank 1 sees all of its 2048 tokens. Only its first 6 query tiles see the last tokens of rank 0.
    assert work.active_tiles[1, :2].tolist() == [16 * 96, 6 * 96] and work.query_tiles.tolist() == [16 * 96] * 4
    busy, everyone = (timeline(replace(work, active_tiles=b), cluster("h200")) for b in (work.active_tiles, None))
    assert float(busy.backward.busy[1]) < float(everyone.backward.busy[1])
    fast, slow = (timeline(work, replace(cluster("h200"), hbm=h)) for h in (4e12, 4e11))
    assert float(slow.forward.busy[1]) > float(fast.forward.busy[1]) and float(slow.backward.busy[1]) > 1.5 * float(fast.backward.busy[1])


ROWS = ls.causal() & ls.documents(lengths=[[1700, 40, 2900, 3552], [4096, 1000, 3096]])  # batch rows that differ


@pytest.mark.parametrize("strategy", ["ring", "exchange", "allgather"])
@pytest.mark.parametrize(
    ("mask", "layout", "gathers"),
    [(ls.causal(), "head_tail", False), (ls.causal(), "auto", False), (DOCUMENTS, "auto", True), (ROWS, "per_document", True)],
    ids=["causal on head-tail", "causal", "documents", "documents by batch row"],
)
def test_gathered_tokens_equal_the_tokens_that_the_engine_packs(mask: ls.Mask, layout: str, gathers: bool, strategy: str) -> None:
    plan = planned(mask, strategy=strategy, layout=layout)
    work = of_plan(plan.data, 8)
    assert work.gathered is not None and work.gathered.shape == work.full.shape and (mask is not ROWS or plan.data.batch_layouts == 2)
    for backward, of_pass in enumerate((work, work.with_backward_moves())):
        assert of_pass.gathered is not None
        for rank in range(4):
            mine = plan.on(ls.Mesh.abstract(4, rank=rank)).data
            steps = local_schedule(mine, ScheduleOptions(block=(128, 128), backward=bool(backward))).steps
            listed = [e.sent.count for step in steps for e in step.exchanges if e.sent.index is not None and not e.sends_views]
            assert float(of_pass.gathered[rank].sum()) == sum(listed)
            arrived = [step.received_rows for step in steps]
            assert [n for n in of_pass.received[:, rank].sum(0).tolist() if n] == [n for n in arrived if n]
    assert bool(work.gathered.any()) == (gathers and strategy == "exchange")


def test_backward_steps_without_moves_take_no_time() -> None:
    around = ls.mask_mod(lambda b, h, q, kv: (q - kv < 8000) & (kv - q < 8000))
    plan = planned(
        around, 131072, ls.Mesh.abstract(8), strategy="ring", layout="contiguous", heads=32, kv_heads=8, head_dim=128, overlap=True
    )
    work, prediction = of_plan(plan.data, 8), plan.report()
    live = [0, 1, 7]  # the shards before and after
    assert work.with_backward_moves().exchanges.tolist() == [0, 1, 0, 0, 0, 0, 0, 1, 0] and work.exchanges.tolist() == [0, *[1] * 7, 0]
    for rank in (2, 5):
        steps = local_schedule(plan.on(ls.Mesh.abstract(8, rank=rank)).data, ScheduleOptions(block=(128, 128), backward=True)).steps
        assert [step.received_rows for step in steps] == work.with_backward_moves().received.sum(0)[rank, live].tolist() == [0, 8064, 8064]
    assert prediction.in_flight_backward == 2 * 8064 < prediction.in_flight
    # KV of the last step is in flight while the first step is computed: steps without an exchange take no time in between.
    begin, end = prediction.timeline.backward.transfer
    assert bool((begin[:, 7] <= prediction.timeline.backward.compute[1][:, 1]).all()) and float((end - begin)[:, 2:7].sum()) == 0
    assert float(prediction.timeline.backward.exposed.max()) < 0.1 * prediction.timeline.backward.seconds


def test_a_demand_in_coarse_units_has_the_same_pairs() -> None:
    table = ls.causal().block_table(65536, block=2048)
    coarse = Demand.of(table, pairs_per_row(table, ls.causal().traced.program))
    assert float(coarse.work.sum()) == pytest.approx(65536 * 65537 / 2, rel=0.01)


def test_seconds_of_a_call_are_a_launch_and_its_rows_or_those_of_all_slots() -> None:
    rates = Rates(keys=(128.0, 1024.0), full=(100.0, 100.0), causal=(50.0, 50.0))
    kernel = KernelRates(name="k", source="", forward=rates, backward=rates, launch=1e-3, slots=10, dims={64: 0.5})
    tiles = torch.tensor([[20.0, 0.0], [0.0, 20.0], [0.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
    rows = torch.tensor([20.0, 20.0, 0.0, 2.0], dtype=torch.float64)
    for backward in (False, True):
        for head_dim, factor in ((128, 1.0), (64, 1.0), (32, 0.5)):  # dim 64: half of the work at half of the rate
            got = kernel.seconds(rows=rows, full=tiles[:, 0], partial=tiles[:, 1], head_dim=head_dim, backward=backward)
            tile = 4.0 * 128 * 128 * 128 * 1e-12 * factor * (2.5 if backward else 1.0)
            # A partial tile is half a tile, but takes 0.75 of a tile's time: short rows are slower.
            want = [1e-3 + 20 * tile / 100, 1e-3 + 20 * 0.75 * tile / 50, 0.0, 1e-3 + 10 * tile / 100]
            assert got.tolist() == pytest.approx(want, rel=1e-9), (backward, head_dim)


def test_units_of_a_simulation_double_until_they_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspan._cost.simulate.MAX_UNITS", 100)
    for ranks, unit in ((2, 2048), (200, 256)):  # at most 100 units, or four per rank
        assert demand_for(ls.causal(), 128 * 1000, ranks).unit == unit


def test_merged_steps_have_as_many_bytes_in_flight_as_single_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, by_steps = Shape(heads=8, kv_heads=8), []
    for steps in (256, 2):
        monkeypatch.setattr("longspan._cost.estimate.MAX_STEPS", steps)
        by_steps.append({s.name: s.in_flight for s in simulate(ls.causal(), 1 << 16, 32, shape=shape, degrees=[1], cluster="h200")})
    assert len(by_steps[0]) == 9 and by_steps[0] == pytest.approx(by_steps[1], rel=0.05)


def test_thousands_of_devices_are_simulated_from_sampled_ranks() -> None:
    shape = Shape(heads=32, kv_heads=8)
    simulated = simulate(ls.causal(), 1 << 22, 4096, shape=shape, degrees=[8], cluster="b200")
    best = simulated[0]
    assert best.work.full.shape[0] <= 20 and best.gpus == 4096 and best.degree == 8
    assert best.imbalance < 1.05 and 0 < best.flops_per_device < 2e15
    assert best.flops_per_device == pytest.approx(best.flops / 4096 / best.seconds) and best.seconds >= best.computing > 0
    assert best.name == f"{best.strategy} 8 × 512, {best.layout}"
    late = Conditions(stragglers={77: 4.0})
    slow = simulate(ls.causal(), 1 << 22, 4096, shape=shape, degrees=[8], cluster="b200", conditions=late)
    assert next(s for s in slow if s.name == best.name).seconds > 2 * best.seconds
    assert all(s.in_flight < 180 * 2**30 for s in simulated)
    with pytest.raises(ValueError, match="one token or more for each of 64 devices"):
        simulate(ls.causal(), 63, 64, shape=Shape(heads=8))


def test_local_kv_is_joined_with_one_all_to_all_only_and_where_that_is_faster() -> None:
    options: dict[str, Any] = {"layout": "head_tail", "strategy": "exchange", "overlap": True, "heads": 8, "head_dim": 64}
    made = lambda tokens, stages: of_plan(ls.plan(ls.causal(), tokens, ls.Mesh.abstract(4), stages=stages, **options).data, 8)
    joined = []
    for tokens in (1 << 10, 1 << 18):
        one = made(tokens, 1)
        both = [fastest(one, cluster("h200"), overlap=overlap)[1].seconds for overlap in (True, False)]
        work, line = fastest(one, cluster("h200"))
        assert line.seconds == min(both) and work.joined == (both[1] < both[0])
        joined.append(work.joined)
    assert joined == [True, False]
    three = made(1 << 11, 3)
    both = [fastest(three, cluster("h200"), overlap=overlap)[1].seconds for overlap in (True, False)]
    assert (
        three.exchange_steps == 3
        and not fastest(three, cluster("h200"))[0].joined
        and fastest(three, cluster("h200"))[1].seconds == both[0]
    )
    assert fastest(three, cluster("h200"), overlap=False)[0].joined


def test_strategies_whose_kv_takes_half_of_the_memory_are_left_out() -> None:
    options: dict[str, Any] = {"shape": Shape(heads=8, kv_heads=8)}
    large = replace(cluster("h200"), memory=1e15)
    every = {s.name: s.in_flight for s in simulate(ls.causal(), 1 << 16, 8, cluster=large, **options)}
    middle = sorted(set(every.values()))[len(set(every.values())) // 2]
    small = simulate(ls.causal(), 1 << 16, 8, cluster=replace(large, memory=2 * middle), **options)
    assert {s.name for s in small} == {name for name, size in every.items() if size <= middle} != set(every)
    tiny = simulate(ls.causal(), 1 << 16, 8, cluster=replace(large, memory=-1.0), **options)
    assert {s.name for s in tiny} == set(every), "where nothing fits, all are shown"


def test_weak_scaling_costs_efficiency_and_strong_scaling_more() -> None:
    options: dict[str, Any] = {"shape": Shape(heads=32, kv_heads=8), "cluster": "h100"}
    weak = curve(lambda tokens: ls.causal(), [(8, 1 << 17), (32, 1 << 19)], **options)
    strong = curve(lambda tokens: ls.causal(), [(8, 1 << 17), (32, 1 << 17)], **options)
    assert strong[1].seconds < strong[0].seconds and weak[1].seconds > weak[0].seconds
    assert strong[1].flops_per_device < strong[0].flops_per_device


def test_a_report_counts_the_wait_of_the_rank_that_waits_longest_and_operations_per_device() -> None:
    plan = ls.plan(ls.causal(), 1 << 14, ls.Mesh.abstract(4), layout="contiguous", strategy="ring", heads=8, kv_heads=8, head_dim=64)
    report = plan.report()
    waits = report.timeline.forward.exposed + report.timeline.backward.exposed
    assert float(waits.min()) < report.exposed == float(waits.max())
    pairs = 8 * (1 << 14) * ((1 << 14) + 1) / 2
    assert report.flops_per_device == pytest.approx(3.5 * 4 * 64 * pairs / 4 / report.seconds, rel=0.02)


def test_memory_is_that_of_the_rank_with_the_most_tokens() -> None:
    layout = ls.Layout(length=700, rows=((((0, 100),), ((100, 400),), ((500, 200),)),))
    report = ls.plan(ls.causal(), 700, ls.Mesh.abstract(3), layout=layout, strategy="ring", heads=4, kv_heads=2, head_dim=8).report()
    most = report._memory_of(400, 400)
    assert report.memory_parts == most and most["q, k, v, out, lse"] > report._memory_of(200, 200)["q, k, v, out, lse"]
