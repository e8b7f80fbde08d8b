"""Batches with equal masks share plans; batches that differ in anything a plan depends on do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import longspan as ls
from longspan._masks.algebra import Mask
from longspan.integrations import prepare_batch
from longspan.integrations._plans import FULL
from longspan.integrations._recent_plans import RecentPlans, mask_contents, plans_key

LENGTH, MESH = 70, ls.Mesh.abstract(3, rank=1)


def packed(*lengths: int, rows: int = 1) -> dict[str, torch.Tensor]:
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(rows, -1)
    return {"input_ids": torch.zeros_like(positions), "position_ids": positions}


def full_plan(batch: dict[str, torch.Tensor], mesh: Any = MESH, **options: Any) -> ls.Plan:
    return prepare_batch(batch, mesh, **options)["longspan_plan"][FULL]


def test_a_batch_with_the_masks_of_a_recent_one_has_its_plans() -> None:
    options: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16}
    first = full_plan(packed(41, 29), **options)
    other = full_plan(packed(29, 41), **options)
    assert full_plan(packed(41, 29), **options) is first and full_plan(packed(29, 41), **options) is other is not first
    batches = [prepare_batch(packed(41, 29), MESH, **options)["longspan_plan"] for _ in range(2)]
    assert batches[0] is not batches[1]
    batches[0].of(("sliding", 9))  # a plan that a layer asks for belongs to its batch
    assert set(batches[0]) == {FULL, "sliding"} and set(batches[1]) == {FULL}


@pytest.mark.parametrize(
    ("batch", "mesh", "options"),
    [
        (packed(40, 30), MESH, {}),
        (packed(70), MESH, {}),
        (packed(41, 30), MESH, {}),
        (packed(41, 29, rows=2), MESH, {}),
        (packed(41, 29), ls.Mesh.abstract(3, rank=2), {}),
        (packed(41, 29), ls.Mesh.abstract(2, rank=1), {}),
        (packed(41, 29), ls.Mesh.abstract(3, rank=1, axis_names=("cp",)), {}),
        (packed(41, 29), MESH, {"layout": "contiguous"}),
        (packed(41, 29), MESH, {"strategy": "ring"}),
        (packed(41, 29), MESH, {"heads": 6}),
        (packed(41, 29), MESH, {"kv_heads": 1}),
        (packed(41, 29), MESH, {"head_dim": 32}),
        (packed(41, 29), MESH, {"strategy": "exchange", "stages": 1}),
        (packed(41, 29), MESH, {"strategy": "exchange", "stages": 1, "overlap": False}),
        (packed(41, 29), MESH, {"grad_reduce_dtype": torch.bfloat16}),
    ],
)
def test_a_batch_that_differs_has_the_plan_of_a_fresh_call(batch: dict[str, torch.Tensor], mesh: Any, options: dict[str, Any]) -> None:
    usual: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16}
    first = full_plan(packed(41, 29), **usual)
    plan = full_plan(batch, mesh, **{**usual, **options})
    positions = batch["position_ids"]
    ids = (positions[0] == 0).cumsum(0)
    mask = ls.causal() & ls.documents(ids=ids) if int(ids[-1]) > 1 else ls.causal()
    fresh = ls.plan(mask, positions.shape[1], mesh, **{"batch": len(positions), **usual, **options})
    assert plan is not first and str(plan) == str(fresh) and plan.data.mesh == fresh.data.mesh
    assert torch.equal(plan.positions, fresh.positions.expand_as(plan.positions))
    assert torch.equal(plan.schedule.received(mesh.size), fresh.schedule.received(mesh.size))
    sizes = [(p.data.heads, p.data.kv_heads, p.data.head_dim, p.data.grad_reduce_dtype, p.data.batch) for p in (plan, fresh)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (ls.mask_mod(lambda b, h, q, kv: q >= kv), {}),
        (ls.causal() & ls.mask_mod(lambda b, h, q, kv: kv % 2 == 0), {}),
        (~ls.mask_mod(lambda b, h, q, kv: q >= kv), {}),
        (ls.causal(), {"cluster": "h100"}),
        (ls.causal(), {"layout": ls.plan(ls.causal(), LENGTH, MESH).layout}),
    ],
)
def test_functions_files_and_layouts_are_planned_at_every_call(mask: Mask, options: dict[str, Any]) -> None:
    assert plans_key({FULL: mask}, LENGTH, MESH, options) is None


def test_contents_tell_masks_apart() -> None:
    ids = torch.tensor([0, 0, 1, 1, 1, -1])
    masks = [
        ls.full(), ls.causal(), ~ls.causal(), ls.prefix(2), ls.prefix(3), ls.prefix(torch.tensor([2, 3])), ls.prefix(torch.tensor([3, 2])),
        ls.sliding_window(2), ls.sliding_window(3), ls.sliding_window(2, 1), ls.documents(ids=ids), ls.documents(ids=ids.abs()),
        ls.documents(ids=ids.expand(2, 6)), ~ls.documents(ids=ids), ls.causal() & ls.documents(ids=ids),
        ls.causal() | ls.documents(ids=ids),
        ls.documents(lengths=[3, 3]), ls.documents(lengths=[4, 2]), ls.documents(ids=torch.tensor([0, 1, 0, 1, 1, -1])),
    ]  # fmt: skip
    contents = [mask_contents(mask) for mask in masks]
    assert None not in contents and len(set(contents)) == len(masks)
    assert mask_contents(ls.causal() & ls.documents(ids=ids.clone())) == mask_contents(ls.causal() & ls.documents(ids=ids))
    assert plans_key({"a": ls.causal()}, 8, MESH, {}) != plans_key({"b": ls.causal()}, 8, MESH, {})


def test_ranks_of_one_process_share_what_was_planned() -> None:
    recent, made = RecentPlans(4), []
    mask = ls.causal() & ls.documents(lengths=[41, 29])

    def plan(mesh: ls.Mesh) -> ls.Plan:
        key = plans_key({FULL: mask}, LENGTH, mesh, {})
        return recent.get(key, mesh, lambda: made.append(mesh) or {FULL: ls.plan(mask, LENGTH, mesh)})[FULL]  # type: ignore[func-returns-value]

    meshes = [ls.Mesh.abstract(3, rank=rank) for rank in range(3)]
    plans = [plan(mesh) for mesh in meshes]
    assert made == meshes[:1] and [plan(mesh) for mesh in meshes] == plans
    for mesh, bound in zip(meshes, plans, strict=True):
        fresh = ls.plan(mask, LENGTH, mesh)
        assert bound.mesh == mesh and str(bound) == str(fresh) and torch.equal(bound.positions, fresh.positions)
    plan(ls.Mesh.abstract(2))
    assert len(made) == 2


def test_only_the_last_plans_are_kept() -> None:
    recent, made = RecentPlans(2), []

    def ask(key: str | None) -> dict[str, Any]:
        return recent.get(key, MESH, lambda: made.append(key) or {"plan": key})  # type: ignore[func-returns-value, dict-item]

    for key in ("a", "b", "a", "c", "a", "b", None, None):
        assert ask(key) == {"plan": key}
    assert made == ["a", "b", "c", "b", None, None]  # "b" was the least recently used when "c" came


def test_plain_options_have_a_key_of_all_parts_of_a_call() -> None:
    calls = [
        ({FULL: ls.causal()}, LENGTH, MESH, {"batch": 2, "strategy": "ring"}),
        ({"other": ls.causal()}, LENGTH, MESH, {"batch": 2, "strategy": "ring"}),
        ({FULL: ls.full()}, LENGTH, MESH, {"batch": 2, "strategy": "ring"}),
        ({FULL: ls.causal()}, LENGTH + 1, MESH, {"batch": 2, "strategy": "ring"}),
        ({FULL: ls.causal()}, LENGTH, ls.Mesh.abstract(MESH.size + 1), {"batch": 2, "strategy": "ring"}),
        ({FULL: ls.causal()}, LENGTH, MESH, {"batch": 3, "strategy": "ring"}),
        ({FULL: ls.causal()}, LENGTH, MESH, {}),
    ]
    keys = [plans_key(*call) for call in calls]
    assert None not in keys and len(set(keys)) == len(keys)
    assert plans_key({FULL: ls.causal()}, LENGTH, MESH, {"strategy": "ring", "batch": 2}) == keys[0]
