"""`plan.relayout`: tokens and heads between layouts, on one- and two-axis meshes, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import longspan as ls
from longspan._plan.named_layouts import contiguous
from longspan.testing import virtual_world

MESHES: dict[str, Any] = {"1": 1, "3": 3, "2x2": (2, 2), "3x2": (3, 2)}
LENGTH = 157


def world_of(shape: Any) -> Any:
    return virtual_world(shape, axis_names=("ulysses", "ring")) if isinstance(shape, tuple) else virtual_world(shape)


def plan_on(mesh: Any, **options: Any) -> Any:
    two = len(ls.plan(ls.full(), 1, mesh).mesh.axes) == 2
    return ls.plan(ls.causal(), LENGTH, mesh, layout="head_tail", strategy="ulysses_ring" if two else "ring", heads=12, **options)


def scattered(ranks: int) -> ls.Layout:
    """Pieces of 10 tokens, dealt from the last rank to the first."""
    pieces = [(start, min(10, LENGTH - start)) for start in range(0, LENGTH, 10)]
    return ls.Layout(length=LENGTH, rows=(tuple(tuple(pieces[ranks - 1 - rank :: ranks]) for rank in range(ranks)),))


@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("target", ["contiguous", "own"])
def test_tokens_move_to_another_layout_and_back(shape: Any, target: str) -> None:
    x = torch.randn(2, 5, LENGTH, 3, dtype=torch.float64)

    def rank(mesh: Any) -> bool:
        plan = plan_on(mesh)
        layout = scattered(plan.mesh.size) if target == "own" else "contiguous"
        moved = plan.relayout(plan.shard(x, 2), 2, to=layout)
        back = plan.relayout(moved, -2, source=layout, to="plan")
        want = scattered(plan.mesh.size) if target == "own" else contiguous(LENGTH, plan.mesh.size)
        return torch.equal(moved, x[:, :, want.positions(plan.mesh.rank)]) and torch.equal(back, plan.shard(x, 2))

    assert all(world_of(shape).run(rank))


@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
def test_all_tokens_of_some_heads_and_back(shape: Any) -> None:
    x = torch.randn(2, 12, LENGTH, 3)

    def rank(mesh: Any) -> bool:
        plan = plan_on(mesh)
        n, r = plan.mesh.size, plan.mesh.rank
        by_heads = plan.relayout(plan.shard(x, 2), 2, to="heads", heads_dim=1)
        back = plan.relayout(by_heads, 2, source="heads", to="plan", heads_dim=1)
        return torch.equal(by_heads, x[:, r * 12 // n : (r + 1) * 12 // n]) and torch.equal(back, plan.shard(x, 2))

    assert all(world_of(shape).run(rank))


@pytest.mark.parametrize("to", ["contiguous", "heads"])
def test_gradients_move_back(to: str) -> None:
    x, weight = torch.randn(LENGTH, 8, dtype=torch.float64), torch.randn(LENGTH, 8, dtype=torch.float64)

    def rank(mesh: Any) -> tuple[Tensor, Tensor]:
        plan = plan_on(mesh)
        local = plan.shard(x, 0).requires_grad_()
        options = {"to": to, "heads_dim": 1} if to == "heads" else {"to": to}
        placed = plan.relayout(weight[plan.positions], 0, **options)
        plan.relayout(local, 0, **options).mul(placed).sum().backward()
        return local.grad, weight[plan.positions]

    for grad, want in virtual_world(4).run(rank):
        assert torch.equal(grad, want)


def test_batch_rows_that_are_laid_out_differently() -> None:
    ids = torch.tensor([[0] * 40 + [1] * 117, [0] * 100 + [1] * 57])
    x = torch.randn(2, 3, LENGTH)

    def rank(mesh: Any) -> bool:
        plan = ls.plan(ls.causal() & ls.documents(ids=ids), LENGTH, mesh, layout="per_document", strategy="exchange", batch=2)
        assert plan.positions.ndim == 2
        moved = plan.relayout(plan.shard(x, 2), 2, to="contiguous")
        by_heads = plan.relayout(plan.shard(x, 2), 2, to="heads", heads_dim=1)
        want = ls.plan(ls.full(), LENGTH, mesh, layout="contiguous").shard(x, 2)
        backs = plan.relayout(moved, 2, source="contiguous", to="plan"), plan.relayout(by_heads, 2, source="heads", to="plan", heads_dim=1)
        whole = torch.equal(by_heads, x[:, plan.mesh.rank : plan.mesh.rank + 1])
        return whole and torch.equal(moved, want) and all(torch.equal(back, plan.shard(x, 2)) for back in backs)

    assert all(virtual_world(3).run(rank))


def test_only_rows_that_change_owners_are_sent() -> None:
    world = virtual_world(4)
    x = torch.randn(LENGTH, 8)

    def rank(mesh: Any) -> int:
        plan = ls.plan(ls.causal(), LENGTH, mesh, layout="head_tail", strategy="ring")
        after = contiguous(LENGTH, 4).positions(plan.mesh.rank)
        plan.relayout(plan.shard(x, 0), 0, to="contiguous")
        return len(set(plan.positions.tolist()) - set(after.tolist()))

    moved = sum(world.run(rank))
    assert moved > 0 and world.bytes_sent == moved * 8 * 4


@pytest.mark.parametrize("by", ["grad", "backward"])
def test_second_derivatives_move_back_too(by: str) -> None:
    def rank(mesh: Any) -> bool:
        plan = ls.plan(ls.causal(), LENGTH, mesh, layout="head_tail", strategy="ring")
        x = plan.shard(torch.randn(LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), 0).requires_grad_()
        moved = plan.relayout(x**2, 0, to="contiguous")
        (first,) = torch.autograd.grad(moved.square().sum(), x, create_graph=True)
        if by == "grad":
            (second,) = torch.autograd.grad(first.sum(), x)
        else:
            first.sum().backward()
            assert x.grad is not None
            second = x.grad
        return torch.allclose(first, 4 * x**3) and torch.allclose(second, 12 * x**2)

    assert all(virtual_world(3).run(rank))


REFUSED = [
    ({"to": "spiral"}, "expected a Layout, 'plan', 'contiguous' or 'heads', got 'spiral'"),
    ({"to": ls.Layout(length=5, rows=((((0, 5),), ()),))}, "expected a layout of 157 tokens over 2 ranks"),
    ({"to": "heads"}, "needs heads_dim="),
    ({"to": "heads", "heads_dim": 1}, "5 heads .dim 1. do not divide by 2 ranks"),
    ({"to": "heads", "heads_dim": 2}, "different dims"),
    ({"to": "heads", "source": "heads", "heads_dim": 1}, "both 'heads'"),
    ({"to": "contiguous", "heads_dim": 1}, "with 'heads' only"),
    ({"to": "plan", "source": "heads", "heads_dim": 1}, "expected 157 tokens in dim 2"),
    ({"to": "contiguous", "side": "v"}, "side must be 'q' or 'kv'"),
]


@pytest.mark.parametrize(("options", "says"), REFUSED, ids=[says[:24] for _, says in REFUSED])
def test_illegal_arguments_raise(options: dict[str, Any], says: str) -> None:
    def rank(mesh: Any) -> None:
        plan = ls.plan(ls.causal(), LENGTH, mesh, layout="head_tail", strategy="ring")
        with pytest.raises(ValueError, match=says):
            plan.relayout(plan.shard(torch.zeros(2, 5, LENGTH), 2), 2, **options)

    virtual_world(2).run(rank)


def test_ranks_that_move_to_different_layouts_raise() -> None:
    def rank(mesh: Any) -> None:
        plan = ls.plan(ls.causal(), LENGTH, mesh, layout="head_tail", strategy="ring")
        with pytest.raises(ValueError, match="do not agree: to: rank 1 has"):
            plan.relayout(plan.shard(torch.zeros(LENGTH), 0), 0, to="contiguous" if plan.mesh.rank else scattered(2))

    virtual_world(2).run(rank)


def test_keys_of_cross_attention_move_by_their_own_length_in_a_set_of_plans_too() -> None:
    q, kv = torch.randn(41, 2), torch.randn(3, 67)
    reverse = [ls.Layout(length=n, rows=((((30, n - 30),), ((9, 21),), ((0, 9),)),)) for n in (41, 67)]

    def rank(mesh: Any) -> bool:
        plans = ls.plan({"full": ls.full(), "near": ls.sliding_window(9, 30)}, (41, 67), mesh, layout="contiguous", strategy="allgather")
        r, same = plans["near"].mesh.rank, []
        for plan in (plans, plans["near"]):
            queries, keys = plan.shard(q, 0), plan.shard(kv, 1, side="kv")
            moved = plan.relayout(queries, 0, to=reverse[0]), plan.relayout(keys, 1, to=reverse[1], side="kv")
            back = plan.relayout(moved[1], 1, source=reverse[1], to="plan", side="kv")
            wanted = q[reverse[0].positions(r)], kv[:, reverse[1].positions(r)], kv[:, plan.kv_positions]
            same += [torch.equal(a, b) for a, b in zip((*moved, back), wanted)] + [torch.equal(plan.unshard(keys, 1, side="kv"), kv)]
            with pytest.raises(ValueError, match="expected a layout of 67 tokens over 3 ranks"):
                plan.relayout(keys, 1, to=reverse[0], side="kv")
        return all(same)

    assert all(virtual_world(3).run(rank))
