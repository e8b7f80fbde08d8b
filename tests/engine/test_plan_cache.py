"""Values derived from plans: kept by everything that they depend on, and bounded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import longspan as ls
from longspan._engine import plan_cache as module
from longspan._engine.plan_cache import PlanCache

CPU, META = torch.device("cpu"), torch.device("meta")
DATA = ls.plan(ls.causal(), 300, ls.Mesh.abstract(1)).data


def test_relayouts_are_kept_by_both_layouts_heads_device_and_direction() -> None:
    cache, made = PlanCache(), []

    def get(before: str, after: str, heads_dim: int | None, device: torch.device, back: bool) -> Any:
        def moves(device: torch.device, *, back: bool) -> str:
            made.append((before, after, heads_dim, device, back))
            return str(made[-1])

        layouts = {"before": SimpleNamespace(digest=before), "after": SimpleNamespace(digest=after)}
        return cache.moves(DATA, SimpleNamespace(**layouts, heads_dim=heads_dim, moves=moves), device, back=back)  # type: ignore[arg-type]

    calls = [
        ("a", "b", None, CPU, False), ("c", "b", None, CPU, False), ("a", "c", None, CPU, False), ("a", "b", 1, CPU, False),
        ("a", "b", None, META, False), ("a", "b", None, CPU, True),
    ]  # fmt: skip
    assert [get(*call) for call in calls] == [str(call) for call in calls] == [get(*call) for call in calls]
    assert made == calls and get("a", "b", 2, CPU, False) == str(calls[3])  # of dims of heads, only whether there is one


def test_tiles_of_invariant_calls_are_kept_by_batch_and_heads(monkeypatch: Any) -> None:
    cache = PlanCache()
    monkeypatch.setattr(module, "laid_out_tiles", lambda plan, *, batch, heads: (batch, heads))
    monkeypatch.setattr(module, "tiles_of_rank", lambda laid_out, rank: (*laid_out, rank))
    assert [cache.rank_tiles(DATA, *sizes) for sizes in ((2, 3), (1, 3), (2, 4), (2, 3))] == [(2, 3, 0), (1, 3, 0), (2, 4, 0), (2, 3, 0)]


def test_tiles_of_the_plans_own_size_are_the_plans() -> None:
    cache = PlanCache()
    assert cache.tiles(DATA, (128, 128)) is DATA.tiles
    other, wide = cache.tiles(DATA, (64, 128)), cache.tiles(DATA, (128, 64))
    assert (other[0].queries.block, other[0].kv.block) == (64, 128) and (wide[0].queries.block, wide[0].kv.block) == (128, 64)
    assert cache.tiles(DATA, (64, 128)) is other


def test_places_and_captured_tensors_are_kept_by_side_and_device() -> None:
    cache = PlanCache()
    plan = ls.plan(ls.causal(), (300, 200), ls.Mesh.abstract(1)).data
    q, kv = cache.places(plan, 0, CPU), cache.places(plan, 1, CPU)
    assert (len(q), len(kv)) == (300, 200) and cache.places(plan, 0, CPU) is q and cache.places(plan, 1, META).device == META
    table = torch.ones(300, dtype=torch.bool)
    reading = ls.plan(ls.mask_mod(lambda b, h, q, kv: table[kv]), 300, ls.Mesh.abstract(1)).data
    assert [t.device for t in cache.captured(reading, META)] == [META] and [t.device for t in cache.captured(reading, CPU)] == [CPU]


def test_other_values_are_kept_by_their_keys() -> None:
    cache, makers = PlanCache(), ("schedule", "pass_setup", "selection_grid", "description", "scale", "checked_call")
    for name in makers:
        get, values = getattr(cache, name), iter(range(9))
        assert [get(DATA, key, lambda: next(values)) for key in ("a", "b", "a", "b")] == [0, 1, 0, 1]  # noqa: B023
    assert cache.pooling(DATA, 64) is cache.pooling(DATA, 64) and cache.pooling(DATA, 128).block == 128


def test_a_plan_keeps_so_many_values_of_each_kind() -> None:
    """The most that one plan holds; the value that was not used for longest is dropped first."""
    bounds = {
        "_tiles": 8, "_captured": 4, "_laid_out": 8, "_rank_tiles": 8, "_places": 8, "_moves": 16, "_schedules": 64, "_pass_setups": 128,
        "_selection_grids": 8, "_poolings": 8, "_descriptions": 256, "_scales": 64, "_checked_calls": 256,
    }  # fmt: skip
    caches = vars(PlanCache())
    assert set(caches) == set(bounds)
    for name, bound in bounds.items():
        for key in range(bound + 1):
            caches[name].get(DATA, key, lambda: object())
        kept = [caches[name].peek(DATA, key) is not None for key in range(bound + 1)]
        assert kept == [False] + [True] * bound, name
