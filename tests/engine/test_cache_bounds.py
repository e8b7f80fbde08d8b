"""Ten thousand changing calls leave every cache of the engine at its bound."""

from __future__ import annotations

import gc
import weakref

import torch

import longspan as ls
from longspan._comm.agreement import CallDescription
from longspan._derived_cache import DerivedCache
from longspan._engine.call_agreement import CheckedCall
from longspan._engine.plan_cache import PlanCache
from longspan._engine.spec import SpecRegistry
from longspan._engine.table_cache import DeviceCopies, TableCache
from longspan._plan.plan_data import PlanData

CALLS = 10_000


def test_table_cache_stays_bounded_over_changing_lengths_and_contents() -> None:
    cache, default = TableCache(size=16, contents_per_key=4), TableCache()
    program = ls.mask_mod(lambda b, h, q, kv: q >= kv).traced.program
    tables = []
    for i in range(CALLS):
        captured = [torch.tensor([i])]
        tables.append(weakref.ref(cache.tables(program, captured, 1 + i % 40, 64, batch=1, heads=1)))
    gc.collect()
    assert len(cache._entries) == 16 and all(len(entries) <= 4 for entries in cache._entries.values())
    assert sum(table() is not None for table in tables) <= 16 * 4
    for i in range(10):
        cache.tables(program, [torch.tensor([i])], 1, 64, batch=1, heads=1)
        default.tables(program, [torch.tensor([i])], 1, 64, batch=1, heads=1)
    assert [len(one._entries[program.key, 1, 64, 1, 1]) for one in (cache, default)] == [4, 8]


def test_device_copies_stay_bounded_also_while_their_tensors_live() -> None:
    copies = DeviceCopies(size=32)
    tensors = [torch.tensor([i]) for i in range(CALLS)]
    for tensor in tensors:
        copies.on(tensor, torch.device("meta"))
    assert len(copies._copies) == 32 and DeviceCopies().size == 256
    del tensor, tensors
    assert not copies._copies


def test_values_derived_from_a_plan_are_bounded_and_dropped_with_it() -> None:
    plan = ls.plan(ls.causal(), 256, ls.Mesh.abstract(2)).data
    cache: DerivedCache[PlanData, CallDescription] = DerivedCache(64)
    values = []
    for i in range(CALLS):
        values.append(weakref.ref(cache.get(plan, i, lambda: CallDescription("attention", {}))))
    gc.collect()
    assert cache.count(plan) == sum(value() is not None for value in values) == 64
    del plan
    gc.collect()
    assert not any(value() is not None for value in values)


def test_plan_cache_holds_no_plan_alive() -> None:
    cache, plans = PlanCache(), []
    for length in range(200, 260):
        plan = ls.plan(ls.causal(), length, ls.Mesh.abstract(2)).data
        cache.captured(plan, torch.device("cpu"))
        cache.checked_call(plan, length, lambda: CheckedCall(CallDescription("attention", {}), None))
        plans.append(weakref.ref(plan))
    del plan
    gc.collect()
    assert not any(plan() is not None for plan in plans)


def test_spec_registry_drops_all_but_the_latest_programs() -> None:
    registry, specs = SpecRegistry(), []
    program = ls.mask_mod(lambda b, h, q, kv: q >= kv).traced.program
    for i in range(CALLS):
        specs.append(weakref.ref(registry.of(program, None, f"kernel {i}")))
    gc.collect()
    assert sum(spec() is not None for spec in specs) == len(registry._latest) == len(registry._live) == 128
