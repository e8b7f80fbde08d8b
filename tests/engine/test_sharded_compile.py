"""Calls over a mesh under torch.compile (one graph, one compilation for many plans), activation checkpointing, lifetimes of plans."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import longspan as ls
from longspan.testing import virtual_world

BIAS = torch.randn(4, 601, generator=torch.Generator().manual_seed(1)).requires_grad_()


def model(q: Tensor, k: Tensor, v: Tensor, plan: ls.Plan) -> Tensor:
    score_mod = lambda s, b, h, i, j: s + BIAS[h, i - j + 300]
    return ls.attention(q * 2, k.sin(), v, plan=plan, score_mod=score_mod).cos()


def gradients(fn: Any, tensors: list[Tensor], plan: ls.Plan) -> list[Tensor]:
    loss = fn(*tensors, plan).square().sum()
    return [loss.detach(), *torch.autograd.grad(loss, [*tensors, BIAS])]


def shards(plan: ls.Plan, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(plan.data.q_len)
    whole = [torch.randn(1, h, plan.data.q_len, 8, generator=generator, dtype=dtype) for h in (4, 2, 2)]
    return [plan.shard(t, 2).requires_grad_() for t in whole]


def test_twenty_plans_through_one_compiled_function_compile_at_most_twice() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)

    def rank(mesh: Any) -> None:
        for i in range(20):
            length = 200 + 5 * i
            mask = ls.causal() & ls.documents(lengths=[60 + i, length - 60 - i])
            plan = ls.plan(mask, length, mesh, layout="auto", strategy=("ring", "exchange")[i % 2])
            tensors = shards(plan)
            for got, want in zip(gradients(compiled, tensors, plan), gradients(model, tensors, plan), strict=True):
                torch.testing.assert_close(got, want)

    virtual_world(1).run(rank)
    assert counter.frame_count <= 2


def test_a_compiled_function_runs_on_many_ranks() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    plan = ls.plan(ls.causal(), 203, ls.Mesh.abstract(1), layout="contiguous")
    want = gradients(model, [t.detach().requires_grad_() for t in shards(plan)], plan)
    # Dynamo compiles in one thread at a time: here, before the ranks begin.
    gradients(compiled, shards(plan), plan)

    def rank(mesh: Any) -> list[Tensor]:
        plan = ls.plan(ls.causal(), 203, mesh, layout="head_tail", strategy="ring")
        return [t if i in (0, 4) else plan.unshard(t, 2) for i, t in enumerate(gradients(model, shards(plan), plan))]

    by_rank = virtual_world(3).run(rank)
    for i, right in enumerate(want):
        torch.testing.assert_close(sum(f[i] for f in by_rank) if i in (0, 4) else by_rank[0][i], right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("policy", [None, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_activation_checkpointing_recomputes_over_the_mesh(policy: CheckpointPolicy | None) -> None:
    def choose(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policy if op is torch.ops.longspan.attend.default else CheckpointPolicy.PREFER_RECOMPUTE  # type: ignore[return-value]

    options: dict[str, Any] = {} if policy is None else {"context_fn": partial(create_selective_checkpoint_contexts, choose)}

    def rank(mesh: Any) -> None:
        plan = ls.plan(ls.causal(), 203, mesh, layout="head_tail", strategy="ring")
        tensors = shards(plan)
        again = lambda *args: checkpoint(model, *args, use_reentrant=False, **options)
        for got, want in zip(gradients(again, tensors, plan), gradients(model, tensors, plan), strict=True):
            torch.testing.assert_close(got, want)

    virtual_world(3).run(rank)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_plan_lives_until_its_backward_pass_is_done(compiled: bool) -> None:
    fn = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model

    def rank(mesh: Any) -> None:
        plan = ls.plan(ls.causal(), 203, mesh, layout="contiguous")
        tensors = shards(plan)
        loss = fn(*tensors, plan).sum()
        del plan
        gc.collect()
        loss.backward()
        assert all(t.grad is not None for t in tensors)

    virtual_world(1).run(rank)


def test_double_backward_over_a_mesh_raises() -> None:
    plan = ls.plan(ls.causal(), 50, ls.Mesh.abstract(1))
    tensors = shards(plan)
    (first,) = torch.autograd.grad(model(*tensors, plan).sum(), tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="supports one differentiation"):
        first.sum().backward()


def test_without_gradients_autograd_is_not_used() -> None:
    plan = ls.plan(ls.causal(), 203, ls.Mesh.abstract(1), layout="contiguous")
    q, k, v = (t.detach() for t in shards(plan))
    want, changed = model(q, k, v, plan).detach(), BIAS.detach().clone()
    score_mod = lambda s, b, h, i, j: s + changed[h, i - j + 300] + 0 * s  # another program than the model's: not traced yet
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            fresh = ls.plan(ls.causal(), 203, ls.Mesh.abstract(1), layout="contiguous")
            torch.testing.assert_close(ls.attention(q * 2, k.sin(), v, plan=fresh, score_mod=score_mod).cos(), want)


@pytest.mark.parametrize(
    ("options", "says"),
    [({"sink": torch.zeros(1)}, "sink"), ({"kernel": "cpuu"}, "kernel"), ({"score_mod": 3}, "score_mod: expected a callable")],
)
def test_bad_input_raises_under_compilation(options: dict[str, Any], says: str) -> None:
    plan = ls.plan(ls.causal(), 150, ls.Mesh.abstract(1))
    q = torch.randn(1, 2, 150, 8)
    with pytest.raises(Exception, match=says):
        torch.compile(lambda q: ls.attention(q, q, q, plan=plan, **options), backend="eager", fullgraph=True)(q)
