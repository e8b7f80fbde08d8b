"""Calls in inference mode do not affect later training: cached values are no inference tensors, and gradients are not zero."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import longspan as ls
from longspan.testing import virtual_world

LENGTH = 203


def without_gradients_below_an_operator() -> AbstractContextManager[Any]:
    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    stack.enter_context(FlopCounterMode(display=False))  # with a dispatch mode there, attention is an operator
    return stack


FIRST: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "below an operator": without_gradients_below_an_operator,
}


@pytest.fixture
def cap() -> int:
    """A number that makes a test's score_mod unique, so that no other test has traced its gradient."""
    return next(CAPS)


CAPS = itertools.count(20)


def inputs(heads: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, heads, LENGTH, 8, generator=generator) for _ in range(3)]


def expected(full: list[Tensor], bias: Tensor, cap: int, **how: Any) -> list[Tensor]:
    """Gradients of q, k, v and a bias, by the dense kernel."""
    leaves = [t.clone().requires_grad_() for t in (*full, bias)]
    q, k, v, table = leaves
    ls.attention(q, k, v, score_mod=biased(table, cap), kernel="dense", **how).square().sum().backward()
    return [t.grad for t in leaves if t.grad is not None]


def biased(table: Tensor, cap: int) -> Callable[..., Tensor]:
    return lambda s, b, h, i, j: cap * torch.tanh(s / cap) + table[(i - j).clamp(0, 63)]


@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST)
@pytest.mark.parametrize("strategy", ["ring", "allgather", "ulysses"])
def test_scores_have_gradients_over_a_mesh_after_a_call_without(
    strategy: str, first: Callable[[], AbstractContextManager[Any]], cap: int
) -> None:
    full, bias = inputs(), torch.randn(64)

    def rank(mesh: Any) -> list[Tensor]:
        table = bias.clone().requires_grad_()
        plan = ls.plan(ls.causal(), LENGTH, mesh, strategy=strategy)
        q, k, v = (plan.shard(t, 2).requires_grad_() for t in full)
        with first():
            ls.attention(q.detach(), k.detach(), v.detach(), plan=plan, score_mod=biased(table, cap))
        ls.attention(q, k, v, plan=plan, score_mod=biased(table, cap)).square().sum().backward()
        assert table.grad is not None
        return [*(plan.unshard(t.grad, 2) for t in (q, k, v) if t.grad is not None), table.grad]

    ranks = virtual_world(2).run(rank)
    got = [*ranks[0][:3], ranks[0][3] + ranks[1][3]]
    for grad, want in zip(got, expected(full, bias, cap, mask=ls.causal()), strict=True):
        torch.testing.assert_close(grad, want, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST)
def test_scores_have_gradients_on_one_device_after_a_call_without(first: Callable[[], AbstractContextManager[Any]], cap: int) -> None:
    full, bias = inputs(heads=2), torch.randn(64)
    with first():
        virtual_world(2).run(lambda mesh: planned_call(mesh, full, bias, first, cap))
        ls.attention(*full, score_mod=biased(bias, cap))
    leaves = [t.clone().requires_grad_() for t in (*full, bias)]
    ls.attention(*leaves[:3], score_mod=biased(leaves[3], cap)).square().sum().backward()
    for leaf, want in zip(leaves, expected(full, bias, cap), strict=True):
        torch.testing.assert_close(leaf.grad, want, atol=1e-3, rtol=1e-4)


def planned_call(mesh: Any, full: list[Tensor], bias: Tensor, first: Callable[[], AbstractContextManager[Any]], cap: int) -> None:
    with first():
        plan = ls.plan(ls.causal(), LENGTH, mesh)
        q, k, v = (plan.shard(t, 2) for t in full)
        ls.attention(q, k, v, plan=plan, score_mod=biased(bias, cap))


@pytest.mark.parametrize("compiled", [False, True])
def test_scores_have_gradients_after_a_compiled_call_in_inference_mode(compiled: bool, cap: int) -> None:
    full, bias = inputs(heads=3), torch.randn(64)
    run = torch.compile(lambda q, k, v, table: ls.attention(q, k, v, score_mod=biased(table, cap)), backend="aot_eager")
    with torch.inference_mode():
        run(*full, bias)
    leaves = [t.clone().requires_grad_() for t in (*full, bias)]
    out = run(*leaves) if compiled else ls.attention(*leaves[:3], score_mod=biased(leaves[3], cap))
    out.square().sum().backward()
    for leaf, want in zip(leaves, expected(full, bias, cap), strict=True):
        torch.testing.assert_close(leaf.grad, want, atol=1e-3, rtol=1e-4)


MASKS: dict[str, Callable[[], ls.Mask]] = {
    "documents": lambda: ls.causal() & ls.documents(lengths=[90, 3, 110]),
    "ids": lambda: ls.documents(ids=torch.arange(LENGTH) % 5),
    "prefix": lambda: ls.causal() | ls.prefix(torch.tensor([31])),
    "custom": lambda: custom(torch.arange(LENGTH) // 70),
}


def custom(ids: Tensor) -> ls.Mask:
    return ls.mask_mod(lambda b, h, i, j: (ids[i] == ids[j]) & (i + 3 * torch.tensor(2) >= j))


@pytest.mark.parametrize("make", MASKS.values(), ids=MASKS)
def test_a_mask_made_and_used_in_inference_mode_can_be_trained_with(make: Callable[[], ls.Mask]) -> None:
    full = inputs(heads=2)
    with torch.inference_mode():
        mask = make()
        ls.attention(*full, mask=mask)
    leaves = [t.clone().requires_grad_() for t in full]
    ls.attention(*leaves, mask=mask).square().sum().backward()
    others = [t.clone().requires_grad_() for t in full]
    ls.attention(*others, mask=make(), kernel="dense").square().sum().backward()
    for leaf, other in zip(leaves, others, strict=True):
        torch.testing.assert_close(leaf.grad, other.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MASKS)
def test_a_plan_made_and_used_in_inference_mode_can_be_trained_with(name: str) -> None:
    full = inputs()

    def rank(mesh: Any) -> list[Tensor]:
        with torch.inference_mode():
            plan = ls.plan(MASKS[name](), LENGTH, mesh)
            ls.attention(*(plan.shard(t, 2) for t in full), plan=plan)
        leaves = [plan.shard(t, 2).clone().requires_grad_() for t in full]
        ls.attention(*leaves, plan=plan).square().sum().backward()
        return [plan.unshard(t.grad, 2) for t in leaves if t.grad is not None]

    got = virtual_world(2).run(rank)[0]
    leaves = [t.clone().requires_grad_() for t in full]
    ls.attention(*leaves, mask=MASKS[name](), kernel="dense").square().sum().backward()
    for grad, leaf in zip(got, leaves, strict=True):
        torch.testing.assert_close(grad, leaf.grad, atol=1e-4, rtol=1e-4)
