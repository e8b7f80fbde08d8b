"""`plan.gather_pooled` and `plan.query_blocks`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import longspan as ls
from longspan._plan.pooling import BlockPooling, RowGroups, _GroupSums
from longspan.testing import virtual_world


@pytest.mark.parametrize(("ranks", "length", "block"), [(1, 10, 4), (2, 37, 8), (3, 100, 7), (4, 1030, 64), (8, 5, 2)])
@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
def test_pooled_values_and_gradients_are_those_of_one_device(ranks: int, length: int, block: int, layout: str) -> None:
    x = torch.randn(2, 3, length, 5, dtype=torch.float64, requires_grad=True)
    means = torch.stack([part.mean(2) for part in x.split(block, 2)], 2)
    weight = torch.randn(ranks, *means.shape, dtype=torch.float64)
    (right,) = torch.autograd.grad((means * weight.sum(0)).sum(), x)
    world = virtual_world(ranks)

    def rank(mesh: ls.Mesh) -> tuple[torch.Tensor, torch.Tensor]:
        plan = ls.plan(ls.causal(), length, mesh, layout=layout)
        local = plan.shard(x.detach(), 2).requires_grad_()
        pooled = plan.gather_pooled(local, block)
        (pooled * weight[mesh.rank]).sum().backward()
        return pooled.detach(), plan.unshard(local.grad, 2)

    for pooled, grad in world.run(rank):
        torch.testing.assert_close(pooled, means.detach(), atol=1e-12, rtol=0)
        torch.testing.assert_close(grad, right, atol=1e-12, rtol=0)


@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
def test_second_derivatives_of_pooled_values_are_those_of_one_device(layout: str) -> None:
    ranks, length, block = 3, 37, 8
    x = torch.randn(2, length, 5, dtype=torch.float64, requires_grad=True)
    means = torch.stack([part.mean(1) for part in x.split(block, 1)], 1)
    weight, again = torch.randn(ranks, *means.shape, dtype=torch.float64), torch.randn(2, length, 5, dtype=torch.float64)
    (first,) = torch.autograd.grad((means**3 * weight.sum(0)).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first * again).sum(), x)

    def rank(mesh: ls.Mesh) -> list[torch.Tensor]:
        plan = ls.plan(ls.causal(), length, mesh, layout=layout)
        local = plan.shard(x.detach(), 1).requires_grad_()
        (first,) = torch.autograd.grad((plan.gather_pooled(local, block) ** 3 * weight[mesh.rank]).sum(), local, create_graph=True)
        (second,) = torch.autograd.grad((first * plan.shard(again, 1)).sum(), local)
        return [plan.unshard(first.detach(), 1), plan.unshard(second, 1)]

    for got in virtual_world(ranks).run(rank):
        torch.testing.assert_close(got, [first.detach(), second])


def test_pooled_values_have_the_dtype_and_dim_of_the_keys() -> None:
    plan = ls.plan(ls.causal(), 6, ls.Mesh.abstract(1))
    x = torch.arange(12.0).view(6, 2).bfloat16()
    assert torch.equal(plan.gather_pooled(x, 3, dim=0), torch.tensor([[2.0, 3.0], [8.0, 9.0]]).bfloat16())


def test_sums_of_narrow_dtypes_are_float32_and_follow_the_device_of_the_keys() -> None:
    plan = ls.plan(ls.causal(), 70, ls.Mesh.abstract(1))
    x = torch.randint(-200, 200, (6, 70), generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(plan.gather_pooled(x, 7, dim=1), (x.float().view(6, 10, 7).sum(2) / 7).bfloat16())
    assert plan.gather_pooled(x.to("meta"), 7, dim=1).device.type == "meta"
    groups = RowGroups.of(torch.tensor([2, 0, 2]), 3)
    with FakeTensorMode(allow_non_fake_inputs=True):  # a CUDA device without a GPU
        grad, _ = _GroupSums.backward(SimpleNamespace(groups=groups), torch.empty(3, 5, device="cuda"))
    assert grad.device.type == "cuda" and grad.shape == (3, 5)


@pytest.mark.parametrize(
    ("x", "block", "message"),
    [(torch.ones(1, 5, 1), 2, "6 keys in dim -2"), (torch.ones(6, 1), 0, "1 or more keys"), (torch.ones(6, 1).int(), 2, "floating-point")],
)
def test_unusable_arguments_of_gather_pooled_raise(x: torch.Tensor, block: int, message: str) -> None:
    plan = ls.plan(ls.causal(), 6, ls.Mesh.abstract(1))
    with pytest.raises((ValueError, TypeError), match=message):
        plan.gather_pooled(x, block)


def test_query_blocks_are_in_local_order() -> None:
    layout = ls.Layout(length=10, rows=((((6, 3), (0, 2)), ((2, 4), (9, 1))),))
    plans = [ls.plan(ls.causal(), 10, ls.Mesh.abstract(2, rank=rank), layout=layout) for rank in range(2)]
    assert [plan.query_blocks(4).tolist() for plan in plans] == [[1, 2, 0], [0, 1, 2]]
    assert plans[0].query_blocks(1).tolist() == [6, 7, 8, 0, 1]


def test_rows_are_grouped_in_ascending_order_and_summed() -> None:
    groups = RowGroups.of(torch.tensor([2, 0, 2, 3, 2, 0]), 5)
    assert groups.members.tolist() == [[1, 5, 6], [6, 6, 6], [0, 2, 4], [3, 6, 6], [6, 6, 6]]
    rows = torch.arange(12.0, dtype=torch.float64).view(6, 2).requires_grad_()
    sums = groups.sums(rows)
    assert sums.tolist() == [[12, 14], [0, 0], [12, 15], [6, 7], [0, 0]]
    (grad,) = torch.autograd.grad(sums, rows, torch.arange(10.0, dtype=torch.float64).view(5, 2))
    assert grad.tolist() == [[4, 5], [0, 1], [4, 5], [6, 7], [4, 5], [0, 1]]
    even = RowGroups.of(torch.tensor([1, 0, 1, 0]), 2)
    assert even.members.tolist() == [[1, 3], [0, 2]] and even.sums(torch.arange(4.0)).tolist() == [4, 2]
    assert RowGroups.of(torch.zeros(0, dtype=torch.int64), 0).members.shape == (0, 0)


def test_blocks_of_ranks_and_their_parts() -> None:
    """Blocks of 4 of 14 tokens: rank 0 owns parts of blocks 0, 1 and 3, rank 1 none, rank 2 the others."""
    layout = ls.Layout(length=14, rows=((((12, 2), (0, 2), (5, 3)), (), ((2, 3), (8, 4))),))
    of = lambda rank: BlockPooling(layout=layout, mesh=ls.Mesh.abstract(3, rank), block=4)
    made = of(0)
    assert (made.blocks, made.counts, made.tokens.tolist()) == (4, [3, 0, 3], [4, 4, 4, 2])
    assert [blocks.tolist() for blocks in made.by_rank] == [[0, 1, 3], [], [0, 1, 2]]
    assert [of(rank).local.group.tolist() for rank in range(3)] == [[2, 2, 0, 0, 1, 1, 1], [], [0, 0, 1, 2, 2, 2, 2]]
    assert made.gathered.members.tolist() == [[0, 3], [1, 4], [5, 6], [2, 6]]
    whole = BlockPooling(layout=ls.Layout(length=8, rows=((((0, 8),),),)), mesh=ls.Mesh.abstract(1), block=4)
    assert (whole.blocks, whole.tokens.tolist(), whole.counts) == (2, [4, 4], [2])
