"""Calls that differ in one setting, one after the other in one process: no cached decision of one call reaches the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan as ls
from longspan._kernels.registry import NotSupported
from longspan.testing import oracle, virtual_world

MASK = ls.mask_mod(lambda b, h, q, kv: ((q + b) % 3 != kv % 2) & (q - kv < 3 * (h + 2)) | (kv == 1))


def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s + (kv - q) * 0.1 * (h + 1)


@dataclass(frozen=True, kw_only=True)
class Call:
    """Settings of one call; `needs`: which of q, k, v, sink get gradients."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    q_len: int = 12
    kv_len: int = 12
    value_dim: int = 4
    dtype: torch.dtype = torch.float64
    scale: float | None = None
    sink: bool = False
    scored: bool = True
    through_lse: bool = False
    return_lse: bool = True
    needs: str = "qkv"
    kernel: str = "cpu"

    def tensors(self) -> list[Tensor]:
        """q, k, v, the gradient of out, the gradient of lse, the sink."""
        generator = torch.Generator().manual_seed(3)
        b, h, g = self.batch, self.heads, self.kv_heads
        sizes = (b, h, self.q_len, 4), (b, g, self.kv_len, 4), (b, g, self.kv_len, self.value_dim), (b, h, self.q_len, self.value_dim)
        drawn = [torch.randn(s, generator=generator, dtype=torch.float64).to(self.dtype) for s in (*sizes, (b, h, self.q_len), (h,))]
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        return [*drawn[:4], drawn[4].to(wide), drawn[5].to(wide)]

    def results(self, attend: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor | None]:
        """[out, lse, the gradients that are needed]."""
        q, k, v, grad_out, grad_lse, sink = tensors
        leaves = {name: t.detach().clone().requires_grad_(name in self.needs) for name, t in zip("qkvs", (q, k, v, sink))}
        options = {"score_mod": score_mod if self.scored else None, "scale": self.scale, "sink": leaves["s"] if self.sink else None}
        outputs = attend(leaves["q"], leaves["k"], leaves["v"], return_lse=self.return_lse, **options)
        out, lse = outputs if self.return_lse else (outputs, None)
        loss = (out * grad_out).sum()
        if self.through_lse:
            loss = loss + (lse.masked_fill(lse == -torch.inf, 0.0) * grad_lse).sum()
        return [
            out.detach(),
            None if lse is None else lse.detach(),
            *torch.autograd.grad(loss, [t for t in leaves.values() if t.requires_grad], allow_unused=True),
        ]


BASE = Call()
ANYWHERE = {
    "scale": replace(BASE, scale=0.9),
    "sink": replace(BASE, sink=True, needs="qkvs"),
    "no score_mod": replace(BASE, scored=False),
    "gradient of lse": replace(BASE, through_lse=True),
    "no lse": replace(BASE, return_lse=False),
    "no gradient of q": replace(BASE, needs="kv"),
    "only the gradient of v": replace(BASE, needs="v"),
    "float32": replace(BASE, dtype=torch.float32),
    "value dim": replace(BASE, value_dim=7),
    "kv heads": replace(BASE, kv_heads=4),
    "dense kernel": replace(BASE, kernel="dense"),
}
ON_ONE_DEVICE = ANYWHERE | {
    "batch": replace(BASE, batch=3),
    "heads": replace(BASE, heads=6),
    "queries": replace(BASE, q_len=140),
    "keys": replace(BASE, kv_len=140),
}


def check(call: Call, got: list[Tensor | None]) -> None:
    tolerance = 1e-11 if call.dtype == torch.float64 else 2e-5
    want = call.results(lambda *t, **options: oracle(*t, mask=MASK, **options), [t.double() for t in call.tensors()])
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ON_ONE_DEVICE)
def test_a_call_between_two_others_on_one_device_equals_the_oracle(name: str) -> None:
    for call in (BASE, ON_ONE_DEVICE[name], BASE):
        attend = lambda *t, **options: ls.attention(*t, mask=MASK, kernel=call.kernel, **options)  # noqa: B023
        check(call, call.results(attend, call.tensors()))


@pytest.mark.parametrize("strategy", ["exchange", "ulysses"])
def test_calls_with_one_plan_that_differ_in_one_setting_equal_the_oracle(strategy: str) -> None:
    world = virtual_world(2)
    plan = ls.plan(MASK, 12, ls.Mesh.abstract(2), strategy=strategy, layout="head_tail", batch=2, heads=4)
    order = [c for call in ANYWHERE.values() for c in (BASE, call)] + [BASE]

    def rank(mesh: Any) -> list[list[Tensor | None]]:
        mine = plan.on(mesh)
        by_call = []
        for call in order:
            shards = [mine.shard(t, 2) if t.ndim > 1 else t for t in call.tensors()]
            results = call.results(lambda *t, **o: ls.attention(*t, plan=mine, kernel=call.kernel, **o), shards)  # noqa: B023
            by_call.append([t if t is None or t.ndim == 1 else mine.unshard(t, 2) for t in results])
        return by_call

    by_rank = world.run(rank)
    for i, call in enumerate(order):
        shared = [sum(ranks[i][j] for ranks in by_rank) if t is not None and t.ndim == 1 else t for j, t in enumerate(by_rank[0][i])]
        check(call, shared)


def test_lse_gets_its_gradient_after_a_call_that_did_not_return_it() -> None:
    mod = lambda s, b, h, q, kv: s * 0.8 + h  # of this test only: programs are cached
    plan = ls.plan(MASK, 12, ls.Mesh.abstract(2), strategy="ulysses", layout="contiguous", batch=2, heads=4)
    q, k, v, _, grad_lse, _ = BASE.tensors()

    def rank(mesh: Any) -> Tensor:
        mine = plan.on(mesh)
        shards = [mine.shard(t, 2).detach().requires_grad_() for t in (q, k, v)]
        torch.autograd.grad(ls.attention(*shards, plan=mine, score_mod=mod).sum(), shards)
        _, lse = ls.attention(*shards, plan=mine, score_mod=mod, return_lse=True)
        return mine.unshard(torch.autograd.grad(lse, shards[0], mine.shard(grad_lse, 2))[0], 2)

    leaf = q.clone().requires_grad_()
    _, lse = oracle(leaf, k, v, mask=MASK, score_mod=mod, return_lse=True)
    torch.testing.assert_close(virtual_world(2).run(rank)[0], torch.autograd.grad(lse, leaf, grad_lse)[0])


def test_a_named_kernel_rejects_a_call_that_another_kernel_computed_before() -> None:
    q, k, v = BASE.tensors()[:3]
    ls.attention(q, k, v, score_mod=score_mod, kernel="cpu")
    with pytest.raises(NotSupported, match="score_mod"):
        ls.attention(q, k, v, score_mod=score_mod, kernel="aten")


@pytest.mark.parametrize("other", ["kernel", "value dim", "dtype"])
def test_a_named_kernel_rejects_a_call_after_another_one_with_the_same_plan(other: str) -> None:
    """The kernel of a pass is cached by plan: a call that only differs in `other` must not run with it."""
    if other == "dtype":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("the kernel runs on the CPU in the interpreter only")
    refused = {"kernel": "score_mod", "value dim": "head dims", "dtype": "float64"}[other]
    kernel = "triton" if other == "dtype" else "aten"
    mod = score_mod if other == "kernel" else None

    def rank(mesh: Any) -> None:
        plan = ls.plan(ls.full(), 12, mesh)
        q, k, v = BASE.tensors()[:3]
        first = [t.float() for t in (q, k, v)] if other == "dtype" else [q, k, v]
        ls.attention(*first, plan=plan, score_mod=mod, kernel="cpu" if other == "kernel" else kernel)
        with pytest.raises(ValueError, match=refused):
            ls.attention(q, k, v[..., :3] if other == "value dim" else v, plan=plan, score_mod=mod, kernel=kernel)

    virtual_world(1).run(rank)
