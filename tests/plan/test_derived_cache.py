"""DerivedCache and PlanData: bounded, dropped with the plan, safe for threads; plans are immutable values."""

from __future__ import annotations

import dataclasses
import gc
import pickle
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

import longspan as ls
from longspan._derived_cache import DerivedCache
from longspan._plan.plan_data import PlanData
from longspan.testing import virtual_world

MESH = ls.Mesh.abstract(4, rank=1)


def plan_data() -> PlanData:
    return ls.plan(ls.causal(), 1000, MESH, strategy="ring").data


def test_the_least_recently_used_value_is_dropped_first() -> None:
    cache, plan, derived = DerivedCache[PlanData, str](2), plan_data(), []

    def get(key: str) -> str:
        return cache.get(plan, key, lambda: derived.append(key) or key.upper())  # type: ignore[func-returns-value]

    assert [get(key) for key in "abaca"] == list("ABACA")
    assert derived == ["a", "b", "c"] and cache.count(plan) == 2
    assert (plan, "a") in cache and (plan, "b") not in cache


def test_values_of_10000_plans_leave_nothing_behind() -> None:
    cache, plan = DerivedCache[PlanData, int](4), plan_data()
    for i in range(10000):
        other = dataclasses.replace(plan)
        for key in range(8):
            cache.get(other, key, lambda i=i: i)  # type: ignore[misc]
    del other
    gc.collect()
    assert len(cache._owners) == 0


def test_threads_that_share_a_plan_derive_a_value_once() -> None:
    cache, plan, barrier, derived = DerivedCache[PlanData, object](4), plan_data(), Barrier(8), []

    def derive() -> object:
        derived.append(1)
        return object()

    def get(_: int) -> object:
        barrier.wait()
        return cache.get(plan, "key", derive)

    with ThreadPoolExecutor(8) as pool:
        values = list(pool.map(get, range(8)))
    assert len(derived) == 1 and len(set(map(id, values))) == 1


def test_plan_data_cannot_be_changed() -> None:
    plan = plan_data()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.schedule = plan.backward_schedule  # type: ignore[misc]


def test_running_a_plan_does_not_make_it_larger() -> None:
    import torch

    plan = ls.plan(ls.causal(), 200, ls.Mesh.abstract(2), strategy="ring")
    fresh, fields = len(pickle.dumps(plan)), set(vars(plan.data))

    def rank(mesh: ls.Mesh) -> tuple[int, set[str]]:
        mine = plan.on(mesh)
        x = torch.randn(1, 2, mine.local_len, 8, requires_grad=True)
        ls.attention(x, x, x, plan=mine).sum().backward()
        return len(pickle.dumps(mine)), set(vars(mine.data)) - {"digest"}

    for size, cached in virtual_world(2).run(rank):
        assert cached == fields and size < 1.2 * fresh + 500


def test_a_plan_on_another_rank_shares_tables_and_schedule() -> None:
    plan = ls.plan(ls.causal(), 1000, MESH, strategy="ring")
    other = plan.on(ls.Mesh.abstract(4, rank=3))
    assert other.data.tiles is plan.data.tiles and other.schedule is plan.schedule and other.digest == plan.digest
