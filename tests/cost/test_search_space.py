"""The options that `auto` proposes: which are possible, which layouts and stages they have, and what an estimate adds up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import longspan as ls
from longspan._balance import search as balance
from longspan._cost import auto
from longspan._cost.auto import SearchSpace, consider
from longspan._cost.clusters import cluster
from longspan._cost.options import ExactTiming, Option
from longspan._cost.pair_counts import balance_of
from longspan._cost.predict import fastest
from longspan._cost.simulate import demand_for
from longspan._cost.timeline import Conditions
from longspan._cost.workload import Placement
from longspan._plan.named_layouts import unit_for
from longspan._plan.strategies import one_axis_strategy, two_axis_strategy
from longspan._planner.mask_work import MaskWork, search_space
from longspan._planner.request import CallSizes, planned_mask

MASKS = (ls.causal(), ls.causal() & ls.documents(lengths=[700, 3396]))
SIZES = CallSizes(heads=12, kv_heads=4, head_dim=64, batch=2)
TWO = ls.Mesh.abstract((3, 2), axis_names=("ring", "ulysses"))


def space_of(mesh: Any = 4, masks: Any = MASKS, sizes: CallSizes = SIZES, **options: Any) -> SearchSpace:
    mesh = ls.Mesh.abstract(mesh) if isinstance(mesh, int) else mesh
    works = [MaskWork(planned_mask(mask, 4096, 4096, sizes), 4096, 4096, sizes) for mask in masks]
    conditions = Conditions(stragglers={1: 1.5})
    return replace(search_space(works, mesh, sizes.shape, cluster("h100"), conditions), **options)


def test_degrees_and_ranks_of_strategies() -> None:
    one, two = space_of(), space_of(TWO)
    ring, ulysses = one_axis_strategy("ring"), auto.strategies(one.mesh, "ulysses")[0]
    assert (one.degree(ring), one.ranks(ring), one.degree(ulysses), one.ranks(ulysses)) == (1, 4, 4, 1)
    both = two_axis_strategy("ring", 1)
    assert (two.degree(both), two.ranks(both)) == (2, 3)


def test_what_is_not_possible_has_a_reason() -> None:
    ring, ulysses = one_axis_strategy("ring"), auto.strategies(ls.Mesh.abstract(4), "ulysses")[0]
    assert space_of().not_possible(ulysses) is None is space_of(stages=3).not_possible(ring)
    assert space_of(stages=2).not_possible(ring) == "3 stages, where 2 are asked for"
    assert space_of(stages=2).not_possible(one_axis_strategy("exchange")) is None
    odd = space_of(5)
    reason = odd.not_possible(auto.strategies(odd.mesh, "ulysses")[0])
    assert reason is not None and "12 query heads" in reason
    considered = consider(space_of(5, stages=2))
    assert {name for name, _ in considered.not_possible} == {"ring", "allgather", "ulysses"}
    assert (
        {option.strategy.name for option in considered.options}
        == {"exchange"}
        == {o.strategy.name for o in considered.options if o.stages == 2}
    )
    assert considered.conditions == Conditions(stragglers={1: 1.5}) and considered.cluster is cluster("h100")
    assert consider(space_of(strategy="no")).options == ()


@pytest.mark.parametrize(
    ("mesh", "strategy"), [(4, one_axis_strategy("ring")), (4, one_axis_strategy("exchange")), (TWO, two_axis_strategy("allgather", 1))]
)
@pytest.mark.parametrize("overlap", [None, False])
def test_an_estimate_adds_the_masks_of_a_layout(mesh: Any, strategy: Any, overlap: bool | None) -> None:
    space = space_of(mesh, overlap=overlap)
    degree, ranks = space.degree(strategy), space.ranks(strategy)
    unit = unit_for(4096, ranks)
    pairs = space.pairs_by_member(unit, degree)
    layouts = auto._Layouts(space)
    one = layouts.over(ranks)[-1]
    got = auto._estimate(space, strategy, one, pairs, None)
    forward = backward = computing = received = 0.0
    joined = []
    placement = Placement.of(space.mesh, strategy.head_axis, strategy.kv_axis, 8)
    for estimate in one.estimates:
        work, line = fastest(
            estimate.workload(moves=strategy.moves, placement=placement, shape=space.shape),
            space.cluster,
            space.conditions,
            overlap=overlap,
        )
        forward, backward = forward + line.forward.seconds, backward + line.backward.seconds
        computing += float((line.forward.busy + line.backward.busy).max())
        received += float(work.received.sum())
        joined.append(work.joined)
    assert (got.forward, got.backward, got.computing) == pytest.approx((forward, backward, computing))
    assert got.received == pytest.approx(received / (2 * 4096 * (ranks - 1))) and got.joined is all(joined)
    by_rank = torch.stack([torch.stack([member[one.candidate.owner == r].sum() for r in range(ranks)]) for member in pairs])
    assert (
        got.imbalance == pytest.approx(balance_of(by_rank.view(-1))) and got.candidate is one.candidate and got.layout == one.candidate.name
    )
    assert not got.exact and got.stages is None and len(one.estimates) == 2 and one.tokens == 8192


def test_layouts_are_searched_once_per_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    searched = balance.candidates
    monkeypatch.setattr(balance, "candidates", lambda demands, ranks: asked.append(ranks) or searched(demands, ranks))
    layouts = auto._Layouts(space_of())
    assert layouts.largest == 0
    four, one = layouts.over(4), layouts.over(1)
    assert layouts.over(4) is four and asked == [4, 1] and len(one) == 1 and len(four) > 1
    every = searched([demand_for(mask, 4096, 4) for mask in MASKS], 4)
    assert four[0].candidate.name == balance.preferred(every).name and sorted(x.candidate.name for x in four) == sorted(
        c.name for c in every
    )
    assert layouts.largest == 4 * four[0].candidate.owner.numel() > one[0].candidate.owner.numel()
    named = auto._Layouts(space_of(layout="contiguous")).over(4)
    assert [x.candidate.name for x in named] == ["contiguous"]


def test_numbers_of_stages_are_compared_under_the_preferred_and_the_best_layout() -> None:
    space = space_of()
    layouts = auto._Layouts(space)
    exchange = auto._strategy_options(space, one_axis_strategy("exchange"), layouts)
    first = layouts.over(4)[0].candidate
    assert [o.stages for o in exchange[:2]] == [None, 1] and {id(o.candidate) for o in exchange[:2]} == {id(first)}
    assert [o.stages for o in exchange[-3:]] == [2, 4, 8] and len({id(o.candidate) for o in exchange[-3:]}) == 1
    assert all(o.stages is None and o.candidate is not first for o in exchange[2:-3])
    assert exchange[-1].candidate is auto._ordered(exchange[:-3], None)[0].candidate
    gathers = auto._strategy_options(space, one_axis_strategy("allgather"), layouts)
    assert len(gathers) == 1 and gathers[0].candidate is first
    assert len(auto._strategy_options(replace(space, strategy="allgather"), one_axis_strategy("allgather"), layouts)) == len(
        layouts.over(4)
    )
    rings = auto._strategy_options(space, one_axis_strategy("ring"), layouts)
    even = [x for x in layouts.over(4)[1:] if x.candidate.evaluation.imbalance <= 2 * auto.BALANCED]
    assert len(rings) == 1 + len(even) and all(o.stages is None for o in rings)


@pytest.mark.parametrize(("small", "limit"), [(1 << 30, 4), (1, 2)])
def test_more_options_of_small_problems_are_timed(small: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (auto.EXACT, auto.SMALL, auto.TIMED_WITHIN, auto.STAGES) == ((2, 4), 4096, 1.10, (None, 1, 2, 4, 8))
    monkeypatch.setattr(auto, "SMALL", small)
    monkeypatch.setattr(auto, "TIMED_WITHIN", 1e9)
    called: list[Option] = []
    space = space_of()
    lines = [
        fastest(e.workload(moves="ring", placement=Placement(per_node=8), shape=space.shape), space.cluster)[1]
        for e in auto._Layouts(space).over(4)[0].estimates
    ]

    def time(option: Option) -> ExactTiming:
        called.append(option)
        return ExactTiming(timelines=lines, imbalance=1.0, joined=False)

    considered = consider(space, time)
    assert len(called) == limit == sum(option.exact for option in considered.options)


def test_a_problem_of_exactly_the_limit_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    monkeypatch.setattr(auto, "_ordered", lambda options, time, limit=0: limits.append(limit) or options)
    space = space_of()
    layouts = auto._Layouts(space)
    layouts.over(4)
    for small in (layouts.largest, layouts.largest - 1):
        monkeypatch.setattr(auto, "SMALL", small)
        consider(space)
    assert [limit for limit in limits if limit] == [4, 2]
