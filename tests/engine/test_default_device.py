"""torch's default device has no influence on calls whose tensors are on another device. The meta device stands for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan as ls
from longspan.testing import virtual_world

Q, K, V = (torch.randn(1, 2, 200, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
CHOICE = torch.randint(0, 13, (1, 1, 13, 3), generator=torch.Generator().manual_seed(3))


def gradients(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> list[Tensor]:
    """out and the gradients of q, k and v."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = ls.attention(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def sharded(mesh: ls.Mesh, strategy: Any = "auto", *, selects: bool = False) -> list[Tensor]:
    plan = ls.plan(ls.causal(), 200, mesh, strategy=strategy, layout="head_tail", heads=2, kv_heads=2)
    mask = ls.selected(CHOICE[:, :, plan.query_blocks(16)], 16) if selects else None
    return gradients(*(plan.shard(x, 2) for x in (Q, K, V)), plan=plan, mask=mask)


def moved(mesh: ls.Mesh) -> list[Tensor]:
    plan = ls.plan(ls.causal(), 200, mesh, layout="head_tail")
    k = plan.shard(K, 2)
    return [plan.positions, plan.relayout(k, 2, to="contiguous"), plan.gather_pooled(k, 48), plan.unshard(k, 2)]


def cached(mesh: ls.Mesh | None = None) -> list[Tensor]:
    cache, results = ls.KVCache(pages=16, layers=1, kv_heads=2, head_dim=16, dtype=torch.float32, device="cpu", mesh=mesh), []
    ids = cache.allocate(1)
    for tokens in (slice(150), slice(150, 198), slice(198, 199)):
        step = cache.step(ids, tokens.indices(200)[1] - tokens.indices(200)[0])
        results += [ls.attention(*(x[:, :, tokens] for x in (Q, K, V)), cache=step, layer=0, mask=ls.causal()), step.positions]
    cache.step([ids[0], cache.fork(ids[0])], 1)
    return [*results, cache.lengths(ids)]


def invariant() -> list[Tensor]:
    with ls.invariant():
        return gradients(Q, K, V, mask=ls.causal())


def on_two_ranks(fn: Callable[[ls.Mesh], list[Tensor]]) -> list[Tensor]:
    device = torch.get_default_device()

    def run(mesh: ls.Mesh) -> list[Tensor]:
        with torch.device(device):  # a mode of the thread
            return fn(mesh)

    return [x for results in virtual_world(2).run(run) for x in results]


CALLS: dict[str, Callable[[], list[Tensor]]] = {
    "documents": lambda: gradients(Q, K, V, mask=ls.documents([70, 130])),
    "selected": lambda: gradients(Q, K, V, mask=ls.selected(CHOICE, 16) & ls.causal()),
    "invariant": invariant,
    "block table": lambda: [ls.documents([70, 130]).block_table(200, block=32).first],
    "static mask": lambda: [ls.StaticMask(ls.documents([70, 130]), device="cpu").block_table(200, block=32).first],
    "ring": lambda: on_two_ranks(lambda mesh: sharded(mesh, "ring")),
    "ulysses": lambda: on_two_ranks(lambda mesh: sharded(mesh, "ulysses")),
    "selected, sharded": lambda: on_two_ranks(lambda mesh: sharded(mesh, selects=True)),
    "moved": lambda: on_two_ranks(moved),
    "cache": cached,
    "cache over a mesh": lambda: on_two_ranks(cached),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_default_device_changes_no_result(name: str) -> None:
    expected = CALLS[name]()
    with torch.device("meta"):
        got = CALLS[name]()
    assert all(a.device.type == "cpu" and torch.equal(a, b) for a, b in zip(got, expected, strict=True))
