"""Shards, block masks and balancers of tensors on another device than the layouts' indices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.other_device import OTHER, OtherDevice
from tests.torch_compat.fake_group import RANK, RANKS, fake_mesh
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import create_block_mask

from longspan.torch_compat import _attention as tc
from longspan.torch_compat import _dispatcher
from longspan.torch_compat._load_balancer import layout_of

LENGTH = 18


@pytest.fixture(autouse=True)
def other_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_dispatcher, "declared_layouts", {})
    monkeypatch.setattr(tc, "_dispatch_mode", tc._dispatch_mode)
    monkeypatch.setattr(tc._cp_options, "enable_load_balance", True)
    with OtherDevice():
        yield


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh() as mesh:
        yield mesh


class Given(tc._LoadBalancer):
    def __init__(self, indices: Tensor) -> None:
        self.indices = indices

    def _generate_indices(self, restore: bool = False) -> Tensor:
        return self.indices


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (q + kv + b > 3)


BALANCERS: dict[str, Any] = {
    "none": lambda: None,
    "head tail": lambda: tc._HeadTailLoadBalancer(LENGTH, RANKS, OTHER),
    "per document": lambda: tc._PerDocumentHeadTailLoadBalancer([[6, 12], [12, 6]], RANKS, OTHER),
    "given": lambda: Given(torch.arange(LENGTH).flip(0)[None].to(OTHER)),
    "round robin": lambda: tc._PTRRLoadBalancer(
        create_block_mask(causal, None, None, LENGTH, LENGTH, device=str(OTHER), BLOCK_SIZE=2), RANKS
    ),
}


@pytest.mark.parametrize("name", BALANCERS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_shards_are_on_the_device_of_their_tensors(mesh: DeviceMesh, name: str, requires_grad: bool) -> None:
    balancer, x = BALANCERS[name](), torch.arange(2.0 * 5 * LENGTH).view(2, 5, LENGTH)
    (part,) = tc._context_parallel_shard(mesh, [x.to(OTHER).requires_grad_(requires_grad)], [2], balancer)
    positions = torch.atleast_2d(layout_of(balancer, LENGTH, RANKS).positions(RANK)).expand(2, -1)
    assert torch.equal(part.cpu(), torch.stack([x[b][:, positions[b]] for b in range(2)]))


@pytest.mark.parametrize("name", ["head tail", "per document"])
def test_indices_are_on_the_balancers_device(name: str) -> None:
    balancer = BALANCERS[name]()
    order, back = balancer._generate_indices(), balancer._generate_indices(restore=True)
    assert order.device == back.device == OTHER
    assert torch.equal(order.gather(1, back).cpu(), torch.arange(LENGTH).expand(len(order), -1))


@pytest.mark.parametrize("name", ["head tail", "per document"])
def test_block_masks_are_sharded_on_their_device(mesh: DeviceMesh, name: str) -> None:
    balancer = BALANCERS[name]()
    whole = create_block_mask(causal, 2, None, LENGTH, LENGTH, device=str(OTHER), BLOCK_SIZE=2)
    (mask,) = tc._context_parallel_shard(mesh, [whole], [0], balancer)
    layout = layout_of(balancer, LENGTH, RANKS)
    kv = torch.cat([torch.atleast_2d(layout.positions(r)) for r in range(RANKS)], 1).expand(2, -1)
    q = torch.atleast_2d(layout.positions(RANK)).expand(2, -1)
    want = causal(torch.arange(2)[:, None, None], torch.tensor(0), q[..., None], kv[:, None])
    b, rows, columns = (torch.arange(n).to(OTHER) for n in (2, 6, LENGTH))
    assert torch.equal(mask.mask_mod(b[:, None, None], b[0], rows[:, None], columns).cpu(), want)
