"""Ranks that make different calls, or whose tensors do not fit the plan: every rank raises, and says what to change."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import longspan as ls
from longspan._comm.agreement import AGREEMENT
from longspan._engine.attention import AttendOptions, attend
from longspan.testing import virtual_world

SIZES = {"batch": 2, "heads": 6, "kv_heads": 3, "head_dim": 8}


def tensors(plan: ls.Plan, batch: int = 2, heads: int = 6, kv_heads: int = 3, dim: int = 8, **options: Any) -> list[torch.Tensor]:
    shapes = [(batch, heads, plan.local_len, dim), (batch, kv_heads, plan.kv_local_len, dim), (batch, kv_heads, plan.kv_local_len, dim)]
    return [torch.randn(*shape, **options) for shape in shapes]


def errors_of(fn: Callable[[Any], Any], ranks: int = 3) -> list[BaseException]:
    """The exception of each rank."""

    def caught(mesh: Any) -> BaseException:
        try:
            fn(mesh)
        except Exception as error:
            return error
        raise AssertionError(f"rank {mesh.rank} raised nothing")

    return virtual_world(ranks, timeout=20.0).run(caught)


def call_by_field(field: str, mesh: Any, *, odd: bool) -> Any:
    """A call that differs in one field where `odd`."""
    if field == "tokens":
        return _call(ls.plan(ls.causal(), 301 if odd else 300, mesh, **SIZES))
    if field == "mask":
        return _call(ls.plan(ls.full() if odd else ls.causal(), 300, mesh, layout="contiguous", strategy="ring"))
    if field == "layout":
        return _call(ls.plan(ls.causal(), 300, mesh, layout="head_tail" if odd else "contiguous", strategy="ring"))
    if field == "schedule":
        return _call(ls.plan(ls.causal(), 300, mesh, layout="contiguous", strategy="exchange" if odd else "ring"))
    if field == "returned":
        return _call(ls.plan(ls.causal(), 300, mesh, strategy="ulysses", **SIZES), return_lse=odd)
    name, usual, other = OPTIONS[field]
    return _call(ls.plan(ls.causal(), 300, mesh), **{name: other if odd else usual})


def add(constant: float) -> Callable[..., torch.Tensor]:
    return lambda score, b, h, q, kv: score + constant * q


def table_of(size: int) -> Callable[..., torch.Tensor]:
    table = torch.linspace(-1.0, 1.0, size)
    return lambda score, b, h, q, kv: score + table[h]


OPTIONS: dict[str, tuple[str, Any, Any]] = {
    "dtype": ("dtype", torch.float32, torch.float64),
    "batch": ("batch", 2, 1),
    "heads": ("heads", 6, 3),
    "head dims": ("dim", 8, 4),
    "scale": ("scale", 0.3, 0.4),
    "score_mod": ("score_mod", add(0.5), add(0.25)),
    "captured": ("score_mod", table_of(6), table_of(7)),
    "kernel": ("kernel", "auto", "cpu"),
    "sink": ("sink", None, torch.zeros(6)),
}
FIELDS = ["tokens", "mask", "layout", "schedule", "returned", *OPTIONS]


def _call(plan: ls.Plan, **options: Any) -> Any:
    names = ("batch", "heads", "kv_heads", "dim", "dtype")
    arguments = tensors(plan, **{k: v for k, v in options.items() if k in names})
    return ls.attention(*arguments, plan=plan, **{k: v for k, v in options.items() if k not in names})


@pytest.mark.parametrize("agreed_before", [False, True])
@pytest.mark.parametrize("field", FIELDS)
def test_ranks_that_differ_in_a_field_all_raise(field: str, agreed_before: bool) -> None:
    def rank(mesh: Any) -> None:
        if agreed_before:
            call_by_field(field, mesh, odd=False)
            call_by_field(field, mesh, odd=True)
        call_by_field(field, mesh, odd=mesh.rank == 1)

    errors = errors_of(rank)
    assert len({str(error) for error in errors}) == 1
    for error in errors:
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
def test_tensors_that_do_not_fit_the_plan_raise_on_every_rank(wrong: str, everywhere: bool) -> None:
    make, says = REFUSED[wrong]

    def rank(mesh: Any) -> Any:
        plan = ls.plan(ls.causal(), 300, mesh, layout="contiguous", **SIZES)
        return ls.attention(*(make(plan) if everywhere or mesh.rank == 1 else tensors(plan)), plan=plan)

    for r, error in enumerate(errors_of(rank)):
        assert says in str(error)
        assert isinstance(error, ValueError if everywhere or r == 1 else RuntimeError)
        assert everywhere or r == 1 or "rank 1 raised" in str(error)


def test_head_counts_that_ulysses_does_not_support_raise_at_the_call() -> None:
    for error in errors_of(lambda mesh: _call(ls.plan(ls.causal(), 300, mesh, strategy="ulysses"), heads=4, kv_heads=2)):
        assert "4 query heads do not divide by a Ulysses degree of 3" in str(error)


def test_a_mask_with_a_plan_and_a_set_of_plans_raise() -> None:
    plan = ls.plan(ls.causal(), 30, ls.Mesh.abstract(1))
    with pytest.raises(ValueError, match="the plan holds the mask"):
        ls.attention(*tensors(plan), mask=ls.causal(), plan=plan)
    with pytest.raises(TypeError, match="pick one by its mask's name"):
        ls.attention(*tensors(plan), plan=ls.plan({"a": ls.causal()}, 30, ls.Mesh.abstract(1)))  # type: ignore[arg-type]


def test_a_plan_without_a_group_can_be_made_but_not_run() -> None:
    plan = ls.plan(ls.causal(), 300, ls.Mesh.abstract(3), layout="contiguous")
    with pytest.raises(RuntimeError, match="this mesh is abstract"):
        ls.attention(*tensors(plan), plan=plan)


def test_every_forward_and_backward_pass_begins_with_one_control_message() -> None:
    world = virtual_world(3)

    def rank(mesh: Any) -> Any:
        plan = ls.plan(ls.causal(), 300, mesh, strategy="ring", **SIZES)
        for _ in range(3):
            ls.attention(*(t.requires_grad_() for t in tensors(plan)), plan=plan).sum().backward()

    world.run(rank)
    messages = [i for i, e in enumerate(world.exchanges) if e.what == AGREEMENT]
    assert len(messages) == 6
    assert len({later - first for first, later in pairwise(messages)}) == 2  # each before its pass's exchanges


def test_a_plan_that_moves_nothing_is_agreed_upon_too() -> None:
    def rank(mesh: Any) -> Any:
        plan = ls.plan(ls.documents(lengths=[128, 128, 128]), 384, mesh, layout="contiguous", strategy="exchange")
        assert not plan.schedule.stages
        return ls.attention(*tensors(plan, batch=1 + (mesh.rank == 2)), plan=plan)

    assert all("batch: rank 2 has 2" in str(error) for error in errors_of(rank))


def test_a_call_of_one_rank_only_times_out_in_the_agreement() -> None:
    world = virtual_world(2, timeout=1.0)
    done = []

    def rank(mesh: Any) -> Any:
        plan = ls.plan(ls.causal(), 300, mesh, strategy="ring")
        inputs = tensors(plan)
        ls.attention(*inputs, plan=plan)
        done.append(mesh.rank)
        if mesh.rank == 0:
            ls.attention(*inputs, plan=plan)

    with pytest.raises(RuntimeError, match=AGREEMENT):
        world.run(rank)
    assert sorted(done) == [0, 1]


def test_ranks_may_return_different_results_where_these_are_not_exchanged() -> None:
    def rank(mesh: Any) -> Any:
        plan = ls.plan(ls.causal(), 300, mesh, strategy="ring", **SIZES)
        inputs = tensors(plan)
        ls.attention(*inputs, plan=plan)
        return attend(*inputs, AttendOptions(plan=plan, max_scores=mesh.rank == 0, return_lse=mesh.rank == 1))[2].numel()

    by_rank = virtual_world(3, timeout=20.0).run(rank)
    assert by_rank[0] > 0 == by_rank[1] == by_rank[2]


def test_an_index_out_of_bounds_raises_on_all_ranks_before_anything_is_sent() -> None:
    pytest.importorskip("triton")
    table, world = torch.rand(200), virtual_world(2, timeout=20.0)

    def rank(mesh: Any) -> str:
        plan = ls.plan(ls.causal(), 300, mesh, layout="contiguous", strategy="exchange", heads=2, kv_heads=2)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            ls.attention(*tensors(plan, 1, 2, 2, 16), plan=plan, kernel="triton", score_mod=lambda s, b, h, q, kv: s + table[q])
        return str(caught.value)

    assert all("looks outside a captured tensor of shape (200,)" in message for message in world.run(rank))
    assert not any("stage" in exchange.what for exchange in world.exchanges)


class _Passes(TorchDispatchMode):
    """A mode that changes nothing. Calls in it use the custom operators, as compiled code does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [nullcontext, _Passes])
def test_a_tensor_that_one_rank_modified_before_the_backward_pass_raises_on_every_rank(mode: Any) -> None:
    def run(mesh: Any) -> None:
        plan = ls.plan(ls.causal(), 300, mesh)
        q, k, v = tensors(plan)
        q.requires_grad_()
        with mode():
            out = ls.attention(q, k, v, plan=plan)
        if mesh.rank == 1:
            v.zero_()
        out.sum().backward()

    errors = errors_of(run)
    assert all(isinstance(e, RuntimeError) and "modified by an inplace operation" in str(e) for e in errors)
    assert "rank 1" in str(errors[0])


def test_a_rank_in_the_backward_pass_while_others_call_again_is_named() -> None:
    def run(mesh: Any) -> None:
        plan = ls.plan(ls.causal(), 40, mesh, layout="contiguous", strategy="ring")
        given = [t.requires_grad_() for t in tensors(plan)]
        out = ls.attention(*given, plan=plan)
        if plan.mesh.rank == 2:
            out.sum().backward()
        else:
            ls.attention(*given, plan=plan)

    for error in errors_of(run):
        assert "call: rank 2 has attention, backward pass, ranks 0, 1 have attention, forward pass" in str(error), error
