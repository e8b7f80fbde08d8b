"""Shards of whole tensors and back: derivatives of any order on virtual ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import longspan as ls
from longspan._plan import sharding
from longspan._plan.sharding import _select, places, shard, unshard
from longspan.testing import virtual_world

MESHES: dict[str, Any] = {"1": 1, "3": 3, "2x2": (2, 2)}
LENGTH = 23


@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("rows_differ", [False, True])
@pytest.mark.parametrize("by", ["grad", "backward"])
def test_derivatives_of_unshard_to_third_order_equal_those_of_the_whole_tensor(by: str, rows_differ: bool, shape: Any) -> None:
    x, first_weight, second_weight = (torch.randn(2, LENGTH, 3, dtype=torch.float64) for _ in range(3))
    world = virtual_world(shape, axis_names=("ulysses", "ring")) if isinstance(shape, tuple) else virtual_world(shape)
    ranks = shape if isinstance(shape, int) else 4
    weights = torch.randn(ranks, 2, LENGTH, 3, dtype=torch.float64)
    mask = ls.causal() & ls.documents([[9, 14], [20, 3]]) if rows_differ else ls.causal()

    def rank(mesh: Any) -> list[Tensor]:
        options: dict[str, Any] = {"strategy": "ulysses_ring", "heads": 4} if isinstance(shape, tuple) else {}
        plan = ls.plan(mask, LENGTH, mesh, layout="per_document" if rows_differ else "head_tail", batch=2, **options)
        assert len(plan.layout.rows) == 1 + rows_differ
        part = plan.shard(x, 1).requires_grad_()
        (first,) = torch.autograd.grad((weights[plan.mesh.rank] * plan.unshard(part, 1) ** 4).sum(), part, create_graph=True)
        (second,) = torch.autograd.grad((first * plan.shard(first_weight, 1)).sum(), part, create_graph=True)
        loss = (second * plan.shard(second_weight, 1)).sum()
        if by == "grad":
            (third,) = torch.autograd.grad(loss, part)
        else:
            loss.backward()
            assert part.grad is not None
            third = part.grad
        return [plan.unshard(t.detach(), 1) for t in (first, second, third)]

    total = weights.sum(0)
    wanted = [4 * total * x**3, 12 * total * x**2 * first_weight, 24 * total * x * first_weight * second_weight]
    for got in world.run(rank):
        torch.testing.assert_close(got, wanted)


ONE_ROW = ls.Layout(length=5, rows=((((2, 3), (0, 2)),),))
TWO_ROWS = ls.Layout(length=5, rows=((((0, 5),),), (((2, 3), (0, 2)),)))


@pytest.mark.parametrize("layout", [ONE_ROW, TWO_ROWS])
@pytest.mark.parametrize(("dim", "shape"), [(1, (2, 5, 3)), (2, (2, 3, 5)), (-1, (2, 3, 4, 5))])
def test_whole_tensors_are_contiguous_along_any_dim(layout: ls.Layout, dim: int, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    part = shard(x, dim, layout, 0)
    whole = unshard(part, dim, layout, ls.Mesh.abstract(1))
    assert torch.equal(whole, x) and whole.is_contiguous() and part.is_contiguous() and not torch.equal(part, x)


def test_positions_follow_the_device_of_the_tensor() -> None:
    for layout, shape in ((ONE_ROW, (5,)), (TWO_ROWS, (2, 5))):
        place = places(layout, torch.device("meta"))
        assert place.device.type == "meta" and place.shape == shape
    one: Any = SimpleNamespace(positions=lambda rank: torch.tensor([3, 1]))
    two: Any = SimpleNamespace(positions=lambda rank: torch.tensor([[3, 1, 0], [0, 2, 4]]))
    with FakeTensorMode(allow_non_fake_inputs=True):  # a CUDA device without a GPU
        x = torch.empty(7, 5, device="cuda")
        parts = [_select(x, 1, one, 0), _select(x, 1, two, 0, row=1)]
    assert [(part.device.type, part.shape) for part in parts] == [("cuda", (7, 2)), ("cuda", (7, 3))]


@pytest.mark.parametrize(("count", "gathered"), [(16, 0), (17, 1)])
def test_up_to_16_segments_are_concatenated_and_more_are_gathered(count: int, gathered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(sharding, "_select", lambda x, dim, layout, rank: asked.append(rank) or _select(x, dim, layout, rank))
    segments = tuple((2 * i, 1) for i in range(count)), tuple((2 * i + 1, 1) for i in range(count))
    x = torch.arange(2 * count * 3).view(3, 2 * count)
    got = shard(x, 1, ls.Layout(length=2 * count, rows=(segments,)), 1)
    assert got.tolist() == x[:, 1::2].tolist() and asked == [1] * gathered
