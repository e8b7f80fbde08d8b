"""Ranks that disagree, and tensors that do not fit the plan: an error on every rank, in seconds, that says what to change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import longspan as ls
from longspan._engine.attention import attend
from longspan.testing import virtual_world

SIZES = {"batch": 2, "heads": 6, "kv_heads": 3, "head_dim": 8}


def tensors(plan: ls.Plan, batch: int = 2, heads: int = 6, kv_heads: int = 3, dim: int = 8, **options: Any) -> list[torch.Tensor]:
    shapes = [(batch, heads, plan.local_len, dim), (batch, kv_heads, plan.kv_local_len, dim), (batch, kv_heads, plan.kv_local_len, dim)]
    return [torch.randn(*shape, **options) for shape in shapes]


def errors_of(fn: Callable[[Any], Any], ranks: int = 3) -> list[BaseException]:
    """What each rank raises."""

    def caught(mesh: Any) -> BaseException:
        try:
            fn(mesh)
        except Exception as error:
            return error
        raise AssertionError(f"rank {mesh.rank} raised nothing")

    return virtual_world(ranks, timeout=20.0).run(caught)


def odd(mesh: Any, usual: Any, other: Any) -> Any:
    return other if mesh.rank == 1 else usual


DISAGREE: dict[str, Callable[[Any], Any]] = {
    "tokens": lambda mesh: _call(ls.plan(ls.causal(), odd(mesh, 300, 301), mesh, **SIZES)),
    "mask": lambda mesh: _call(ls.plan(odd(mesh, ls.causal(), ls.full()), 300, mesh, layout="contiguous", strategy="ring")),
    "layout": lambda mesh: _call(ls.plan(ls.causal(), 300, mesh, layout=odd(mesh, "contiguous", "head_tail"), strategy="ring")),
    "schedule": lambda mesh: _call(ls.plan(ls.causal(), 300, mesh, layout="contiguous", strategy=odd(mesh, "ring", "exchange"))),
    "dtype": lambda mesh: _call(ls.plan(ls.causal(), 300, mesh), dtype=odd(mesh, torch.float32, torch.float64)),
    "batch": lambda mesh: _call(ls.plan(ls.causal(), 300, mesh), batch=odd(mesh, 2, 1)),
    "heads": lambda mesh: _call(ls.plan(ls.causal(), 300, mesh), heads=odd(mesh, 6, 3)),
    "head dims": lambda mesh: _call(ls.plan(ls.causal(), 300, mesh), dim=odd(mesh, 8, 4)),
    "scale": lambda mesh: _call(ls.plan(ls.causal(), 300, mesh), scale=odd(mesh, 0.3, 0.4)),
    "score_mod": lambda mesh: _call(ls.plan(ls.causal(), 300, mesh), score_mod=odd(mesh, None, lambda s, b, h, q, kv: s + q)),
    "kernel": lambda mesh: _call(ls.plan(ls.causal(), 300, mesh), kernel=odd(mesh, "auto", "cpu")),
    "sink": lambda mesh: _call(ls.plan(ls.causal(), 300, mesh), sink=odd(mesh, None, torch.zeros(6))),
    "returned": lambda mesh: _call(ls.plan(ls.causal(), 300, mesh, strategy="ulysses", **SIZES), return_lse=odd(mesh, False, True)),
}


def _call(plan: ls.Plan, **options: Any) -> Any:
    names = ("batch", "heads", "kv_heads", "dim", "dtype")
    given = tensors(plan, **{k: v for k, v in options.items() if k in names})
    return ls.attention(*given, plan=plan, **{k: v for k, v in options.items() if k not in names})


@pytest.mark.parametrize("field", list(DISAGREE))
def test_ranks_that_disagree_all_hear_of_it(field: str) -> None:
    for error in errors_of(DISAGREE[field]):
        assert isinstance(error, ValueError) and "rank 1" in str(error) and field in str(error), error


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "whole length": (lambda plan: [torch.randn(2, h, 300, 8) for h in (6, 3, 3)], "plan.shard"),
    "wrong length": (lambda plan: [torch.randn(2, h, plan.local_len + 1, 8) for h in (6, 3, 3)], "owns"),
    "batch": (lambda plan: tensors(plan, batch=1), "batch=2, got batch=1"),
    "heads": (lambda plan: tensors(plan, heads=3), "heads=6, got heads=3"),
    "kv heads": (lambda plan: tensors(plan, kv_heads=1), "kv_heads=3, got kv_heads=1"),
    "head dim": (lambda plan: tensors(plan, dim=4), "head_dim=8, got head_dim=4"),
    "dims": (lambda plan: [t[0] for t in tensors(plan)], "4 dims"),
}


@pytest.mark.parametrize("wrong", list(REFUSED))
@pytest.mark.parametrize("everywhere", [True, False])
def test_tensors_that_do_not_fit_the_plan_are_refused_on_every_rank(wrong: str, everywhere: bool) -> None:
    make, says = REFUSED[wrong]

    def rank(mesh: Any) -> Any:
        plan = ls.plan(ls.causal(), 300, mesh, layout="contiguous", **SIZES)
        return ls.attention(*(make(plan) if everywhere or mesh.rank == 1 else tensors(plan)), plan=plan)

    for r, error in enumerate(errors_of(rank)):
        assert says in str(error)
        assert isinstance(error, ValueError if everywhere or r == 1 else RuntimeError)
        assert everywhere or r == 1 or "rank 1 refused" in str(error)


def test_a_strategy_that_the_head_counts_do_not_allow_is_refused_at_the_call() -> None:
    for error in errors_of(lambda mesh: _call(ls.plan(ls.causal(), 300, mesh, strategy="ulysses"), heads=4, kv_heads=2)):
        assert "4 query heads do not divide by a Ulysses degree of 3" in str(error)


def test_a_mask_beside_a_plan_and_a_set_of_plans_are_refused() -> None:
    plan = ls.plan(ls.causal(), 30, ls.Mesh.abstract(1))
    with pytest.raises(ValueError, match="the plan's mask is the mask"):
        ls.attention(*tensors(plan), mask=ls.causal(), plan=plan)
    with pytest.raises(TypeError, match="take one of them by its mask's name"):
        ls.attention(*tensors(plan), plan=ls.plan({"a": ls.causal()}, 30, ls.Mesh.abstract(1)))  # type: ignore[arg-type]


def test_a_plan_without_a_group_can_be_made_but_not_run() -> None:
    plan = ls.plan(ls.causal(), 300, ls.Mesh.abstract(3), layout="contiguous")
    with pytest.raises(RuntimeError, match="this mesh is abstract"):
        ls.attention(*tensors(plan), plan=plan)


def test_later_calls_compare_nothing() -> None:
    world = virtual_world(3)

    def rank(mesh: Any) -> Any:
        plan = ls.plan(ls.causal(), 300, mesh, strategy="ring", **SIZES)
        for _ in range(3):
            ls.attention(*tensors(plan), plan=plan)

    world.run(rank)
    assert len([e for e in world.exchanges if "agreement" in e.what]) == 1


def test_a_call_of_one_rank_alone_says_which_stage_it_waited_for() -> None:
    world = virtual_world(2, timeout=1.0)
    done = []

    def rank(mesh: Any) -> Any:
        plan = ls.plan(ls.causal(), 300, mesh, strategy="ring")
        given = tensors(plan)
        ls.attention(*given, plan=plan)
        done.append(mesh.rank)
        if mesh.rank == 0:
            ls.attention(*given, plan=plan)

    with pytest.raises(RuntimeError, match="stage 1 of 1"):
        world.run(rank)
    assert sorted(done) == [0, 1]


def test_a_rank_may_ask_for_more_where_nothing_of_it_travels() -> None:
    def rank(mesh: Any) -> Any:
        plan = ls.plan(ls.causal(), 300, mesh, strategy="ring", **SIZES)
        given = tensors(plan)
        ls.attention(*given, plan=plan)
        options: dict[str, Any] = {"mask": None, "score_mod": None, "scale": None, "sink": None, "kernel": "auto", "plan": plan}
        return attend(*given, peak=mesh.rank == 0, lse=mesh.rank == 1, **options)[2].numel()

    found = virtual_world(3, timeout=20.0).run(rank)
    assert found[0] > 0 == found[1] == found[2]


def test_a_lookup_outside_of_its_table_is_refused_by_all_ranks_before_anything_is_sent() -> None:
    pytest.importorskip("triton")
    table, world = torch.rand(200), virtual_world(2, timeout=20.0)

    def rank(mesh: Any) -> str:
        plan = ls.plan(ls.causal(), 300, mesh, layout="contiguous", strategy="exchange", heads=2, kv_heads=2)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            ls.attention(*tensors(plan, 1, 2, 2, 16), plan=plan, kernel="triton", score_mod=lambda s, b, h, q, kv: s + table[q])
        return str(caught.value)

    assert all("looks outside a captured tensor of shape (200,)" in said for said in world.run(rank))
    assert not any("stage" in exchange.what for exchange in world.exchanges)
