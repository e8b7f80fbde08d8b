"""From requests to plans: when `auto` has a choice, which options are timed, stages, heads and overlap."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import longspan as ls
from longspan._cost.options import Option
from longspan._plan.schedule import STAGE_TOKENS
from longspan._plan.strategies import one_axis_strategy, strategy_for
from longspan._planner.build import BuiltPlan, Choice, PlanBuilder
from longspan._planner.request import CallSizes, PlanRequest, RequestedOptions

SIZES = CallSizes(heads=8, kv_heads=2, head_dim=64)
TWO_AXES = ls.Mesh.abstract((2, 3), axis_names=("ring", "ulysses"))


def builder(
    masks: Any = None, seq_len: Any = 1024, mesh: Any = 4, sizes: CallSizes = SIZES, **options: Any
) -> PlanBuilder:  # fmt: skip
    mesh = ls.Mesh.abstract(mesh) if isinstance(mesh, int) else mesh
    return PlanBuilder(PlanRequest.of(masks or [ls.causal()], seq_len, mesh, sizes, RequestedOptions(**options)))


def schedule() -> ls.Schedule:
    return ls.plan(ls.causal(), 1024, ls.Mesh.abstract(4), strategy="exchange", layout="contiguous").schedule


@pytest.mark.parametrize(
    ("options", "chooses"),
    [
        ({}, True),
        ({"strategy": "ring"}, True),
        ({"strategy": "exchange"}, True),
        ({"strategy": "allgather"}, False),
        ({"strategy": "ulysses"}, False),
        ({"layout": "contiguous"}, True),
        ({"layout": "contiguous", "strategy": "exchange"}, False),
        ({"layout": "per_document", "masks": [ls.causal() & ls.documents(lengths=[24, 1000])]}, False),
        ({"layout": "per_document", "strategy": "ring", "masks": [ls.documents(lengths=[24, 1000])]}, False),
        ({"seq_len": (1024, 512)}, False),
        ({"mesh": 1}, False),
        ({"sizes": CallSizes(kv_heads=2)}, False),
        ({"masks": [ls.documents(lengths=[[24, 1000], [512, 512]])], "sizes": CallSizes(heads=2, batch=2)}, False),
        ({"layout": ls.Layout(length=1024, rows=(tuple(((256 * r, 256),) for r in range(4)),))}, False),
        ({"strategy": schedule(), "layout": "contiguous"}, False),
    ],
)
def test_auto_chooses_where_sizes_are_known_and_options_exist(options: dict[str, Any], chooses: bool) -> None:
    made = builder(**options)
    assert made._has_choice() is chooses
    plans = made.plans()
    assert (made.considered is not None) is chooses and len(plans) == 1
    if made.considered is not None:
        assert plans[0].strategy == made.considered.winner.strategy.name
        assert options.get("strategy", "auto") in ("auto", plans[0].strategy)


def test_options_are_restricted_to_what_was_asked_for() -> None:
    considered = []
    for options in ({"stages": 2}, {"overlap": False}, {"strategy": "ring"}, {"layout": "head_tail"}):
        made = builder(**options)
        made.plans()
        assert made.considered is not None
        considered.append(made.considered.options)
    assert all(o.stages == 2 or o.strategy.stages(4) in (None, 2) for o in considered[0])
    assert all(o.joined for o in considered[1] if o.strategy.name == "exchange") and {o.strategy.name for o in considered[2]} == {"ring"}
    assert {o.layout for o in considered[3] if o.strategy.name != "ulysses"} == {"head_tail"}


def test_without_sizes_auto_is_an_exchange() -> None:
    made = builder(sizes=CallSizes())
    assert made._choose() == Choice(strategy=strategy_for("exchange", ls.Mesh.abstract(4)))
    assert builder(sizes=CallSizes(), stages=3)._choose().stages == 3
    assert builder(strategy=schedule(), layout="contiguous")._choose().strategy.name == "exchange"


def test_the_plans_of_the_winner_are_those_that_were_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Choice] = []
    build = PlanBuilder._build
    monkeypatch.setattr(PlanBuilder, "_build", lambda self, choice: built.append(choice) or build(self, choice))
    made = builder([ls.causal(), ls.causal() & ls.sliding_window(200)])
    first, second = made.plans()
    assert len(built) == len(set(built)) and made.considered is not None
    winner = made._choice_of(made.considered.winner)
    assert [plan.data for plan in made._built[winner]] == [first, second] and first.layouts == second.layouts
    assert winner.layout is not None and first.layouts[0] == winner.layout and first.layout == "auto"
    timing = made._time_exactly(made.considered.winner)
    pairs = sum(plan_pairs(plan) for plan in (first, second))
    assert timing.imbalance == pytest.approx(float(pairs.max() / pairs.mean()))
    assert len(timing.timelines) == 2 and timing.joined is (first.schedule.joined and second.schedule.joined)


def plan_pairs(data: Any) -> torch.Tensor:
    at = torch.arange(1024)
    window = 200 if "sliding" in data.mask.text else 1024
    seen = ((at[:, None] >= at) & (at[:, None] - at < window)).sum(1).double()
    return 8 * torch.stack([seen[data.inner[0].positions(r)].sum() for r in range(4)])


def test_layouts_of_options_are_used_where_auto_chooses_them() -> None:
    made = builder()
    made.plans()
    assert made.considered is not None
    option = made.considered.winner
    assert option.candidate is not None
    usual: dict[str, Any] = {"forward": 0.0, "backward": 0.0, "computing": 0.0, "imbalance": 1.0, "received": 0.0}
    named = Option(strategy=one_axis_strategy("ring"), layout="x", candidate=None, stages=5, **usual)
    assert made._choice_of(named) == Choice(strategy=one_axis_strategy("ring"), stages=5, layout=None)
    assert made._choice_of(option).layout is option.candidate.layout
    assert builder(layout="contiguous")._choice_of(option).layout is None


@pytest.mark.parametrize(
    ("mesh", "strategy", "stages", "message"),
    [
        (4, "ring", 2, "'ring' over 4 ranks has 3 stages, expected .* got stages=2: leave it out, or use strategy='exchange'"),
        (4, "ulysses", 1, "strategy 'ulysses' over 4 ranks has 0 stages"),
        (TWO_AXES, "ulysses_ring", 3, "strategy 'ulysses_ring' over 6 ranks has 1 stages, .* use strategy='ulysses_exchange'"),
        (4, schedule(), 9, "plan: the given schedule has 1 stages, got stages=9: leave stages out"),
    ],
)  # fmt: skip
def test_other_numbers_of_stages_raise(mesh: Any, strategy: Any, stages: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        builder(mesh=mesh, strategy=strategy, stages=stages, layout="contiguous", sizes=CallSizes()).plans()


@pytest.mark.parametrize(
    ("mesh", "strategy", "stages"), [(4, "ring", 3), (4, "exchange", 5), (TWO_AXES, "ulysses_ring", 1), (4, schedule(), 1)]
)
def test_the_strategys_own_number_of_stages_is_allowed(mesh: Any, strategy: Any, stages: int) -> None:
    (plan,) = builder(mesh=mesh, strategy=strategy, stages=stages, layout="contiguous", sizes=CallSizes()).plans()
    assert plan.schedule.stages == stages or strategy == "exchange"


@pytest.mark.parametrize(("heads", "kv_heads", "fits"), [(6, 3, True), (6, 6, True), (4, 2, False), (6, None, True), (12, 4, False)])
def test_heads_divide_among_a_ulysses_group(heads: int, kv_heads: int | None, fits: bool) -> None:
    made = builder(mesh=TWO_AXES, strategy="ulysses_ring", sizes=CallSizes(heads=heads, kv_heads=kv_heads), layout="contiguous")
    if fits:
        assert made.plans()[0].degree == 3
        return
    with pytest.raises(ValueError, match=r"strategy 'ulysses_ring': .* Use 'exchange' or 'ring' over a mesh of one axis, or a mesh"):
        made.plans()


def test_overlap_is_as_requested_or_as_is_faster() -> None:
    fixed: dict[str, Any] = {"strategy": "exchange", "layout": "contiguous"}
    for overlap in (True, False):
        (plan,) = builder(overlap=overlap, **fixed).plans()
        assert plan.schedule.joined is not overlap
    assert builder(overlap=False, strategy="ulysses").plans()[0].schedule.steps == ()
    # Several steps, unknown sizes and given schedules overlap.
    (several,) = builder(stages=3, **fixed).plans()
    assert len(several.schedule.steps) > 1 and not several.schedule.joined
    assert not builder(sizes=CallSizes(), **fixed).plans()[0].schedule.joined
    given = schedule()
    assert builder(strategy=given, layout="contiguous").plans()[0].schedule is given
    one = builder(seq_len=1024, **fixed)
    choice = one._choose()
    (made,) = one._build(choice)
    assert made.data.schedule.joined and made.timeline is not None  # 256 tokens: an exchange is too short to hide
    assert one._timeline(made) is made.timeline
    again = one._timeline(BuiltPlan(made.data, None))
    assert again.seconds == pytest.approx(made.timeline.seconds)


def test_plans_carry_the_request() -> None:
    sizes = CallSizes(batch=3, heads=8, kv_heads=2, head_dim=64)
    (plan,) = builder(strategy="ring", layout="head_tail", sizes=sizes, grad_reduce_dtype=torch.bfloat16).plans()
    assert (plan.batch, plan.heads, plan.kv_heads, plan.head_dim, plan.grad_reduce_dtype) == (3, 8, 2, 64, torch.bfloat16)
    assert (plan.strategy, plan.layout, plan.q_len, plan.kv_len, plan.head_axis, plan.kv_axis) == ("ring", "head_tail", 1024, 1024, None, 0)
    rows = (tuple(((256 * r, 256),) for r in range(4)),)
    (given,) = builder(strategy=schedule(), layout=ls.Layout(length=1024, rows=rows)).plans()
    assert (given.strategy, given.layout) == ("exchange", "given")
    (cross,) = builder([ls.full()], (1024, 512), strategy="ring", layout="contiguous").plans()
    assert (cross.q_len, cross.kv_len) == (1024, 512) and cross.inner[0] is not cross.inner[1]
    (alone,) = builder(mesh=1).plans()
    assert alone.schedule is alone.backward_schedule and alone.schedule.stages == 0
    assert plan.inner[0] is plan.inner[1]


def test_backward_moves_only_kv_that_is_read() -> None:
    (window,) = builder([ls.sliding_window(100)], strategy="allgather", layout="contiguous").plans()
    assert int(window.schedule.length.sum()) == 3 * 1024 > int(window.backward_schedule.length.sum()) > 0
    (exchange,) = builder(strategy="exchange", layout="contiguous", overlap=True).plans()
    assert exchange.backward_schedule is exchange.schedule


def test_stages_of_an_exchange_have_a_shard_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    assert STAGE_TOKENS == 16384
    monkeypatch.setattr("longspan._plan.schedule.STAGE_TOKENS", 128)
    fixed: dict[str, Any] = {"strategy": "exchange", "layout": "contiguous", "sizes": CallSizes()}
    assert builder([ls.full()], **fixed).plans()[0].schedule.stages == 3  # three shards of 256 tokens
    monkeypatch.setattr("longspan._plan.schedule.STAGE_TOKENS", 384)
    assert builder([ls.full()], **fixed).plans()[0].schedule.stages == 2
    assert builder([ls.full()], **{**fixed, "mesh": TWO_AXES, "strategy": "ulysses_exchange"}).plans()[0].schedule.stages == 1
    assert len(builder([ls.full()], **{**fixed, "strategy": "ring"}).plans()[0].schedule.steps) == 2
