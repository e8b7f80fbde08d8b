"""The passes of a call: the order in which steps wait, prepare, compute and send; dtypes and strides of what a pass returns."""

from __future__ import annotations

from collections import defaultdict
from threading import get_ident
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan as ls
from longspan._engine import distributed, invariant, one_device, selected_mesh
from longspan._engine.attention import AttendOptions, attend
from longspan._engine.gradient_sums import GradientSums
from longspan._engine.kv_exchange import KVExchange
from longspan._engine.sharded_call import ShardedCall
from longspan._engine.step_calls import LayoutCalls
from longspan._engine.streams import StepStreams
from longspan.testing import virtual_world


def shards(plan: ls.PlanHandle, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """This rank's q, k and v of a sequence, which require gradients."""
    generator = torch.Generator().manual_seed(0)
    tokens = plan.data.q_len
    whole = [torch.randn(1, heads, tokens, dim, generator=generator).to(dtype) for heads, dim in ((4, 16), (2, 16), (2, 8))]
    return [plan.shard(x, 2).requires_grad_() for x in whole]


def test_the_kv_of_the_next_step_is_packed_before_and_sent_after_a_step_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a kernel is launched before the host waits for all ranks to agree."""
    log: dict[int, list[tuple[str, int]]] = defaultdict(list)
    nested: set[int] = set()

    def noted(name: str) -> Any:
        original = getattr(KVExchange, name)

        def call(self: KVExchange, i: int) -> Any:
            thread = get_ident()
            if thread in nested:
                return original(self, i)
            log[thread].append((name, i))
            nested.add(thread)
            try:
                return original(self, i)
            finally:
                nested.discard(thread)

        return call

    def launched(name: str) -> Any:
        original = getattr(LayoutCalls, name)

        def call(self: LayoutCalls, place: tuple[int, int], *args: Any, **options: Any) -> Any:
            log[get_ident()].append(("launch", place[0]))
            return original(self, place, *args, **options)

        return call

    for name in ("wait", "prepare", "send"):
        monkeypatch.setattr(KVExchange, name, noted(name))
    for name in ("forward", "backward"):
        monkeypatch.setattr(LayoutCalls, name, launched(name))

    def run(mesh: ls.Mesh) -> list[list[tuple[str, int]]]:
        plan = ls.plan(ls.full(), 96, mesh, strategy="ring", layout="contiguous")
        out = ls.attention(*shards(plan), plan=plan)
        forward = log.pop(get_ident())
        out.sum().backward()
        return [forward, log.pop(get_ident())]

    for passes in virtual_world(3).run(run):
        for calls in passes:
            steps = sum(name == "wait" for name, _ in calls)
            by_step = [[("wait", i), ("prepare", i + 1), ("launch", i), ("send", i + 1)] for i in range(steps)]
            assert steps >= 2 and calls == [("prepare", 0), ("send", 0), *(one for step in by_step for one in step)]


def test_tensors_of_a_step_are_allocated_sent_and_awaited_on_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the numbers of steps, whose parity is the stream; on the CPU there is one stream, and no step runs beside another."""
    now: dict[int, int] = {}
    seen: dict[int, list[tuple[str, int, int]]] = defaultdict(
        list
    )  # by thread: what, the step that it belongs to, the step whose turn it is

    def use(self: StepStreams, step: int) -> int:
        before, now[get_ident()] = now.get(get_ident(), 0), step
        return before

    def noted(owner: Any, name: str, step_of: Any) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            if get_ident() in now:  # in a backward pass
                seen[get_ident()].append((name, step_of(*args), now[get_ident()]))
            return original(*args, **options)

        monkeypatch.setattr(owner, name, call)

    def begun(self: StepStreams, q: Tensor, *, two: bool) -> None:
        now[get_ident()] = 0
        init(self, q, two=two)
        assert not two

    init = StepStreams.__init__
    monkeypatch.setattr(StepStreams, "use", use)
    monkeypatch.setattr(StepStreams, "__init__", begun)
    noted(KVExchange, "wait", lambda exchange, i: i)
    noted(KVExchange, "prepare", lambda exchange, i: i)
    noted(LayoutCalls, "backward", lambda calls, place, *_: place[0])
    noted(GradientSums, "send", lambda sums, i, *_: i)
    noted(GradientSums, "finish", lambda *_: 0)
    work = ShardedCall.work
    concurrent: list[bool] = []
    monkeypatch.setattr(ShardedCall, "work", lambda *a, **o: (concurrent.append(o.get("concurrent", False)), work(*a, **o))[1])

    def run(mesh: ls.Mesh) -> list[tuple[str, int, int]]:
        plan = ls.plan(ls.full(), 1152, mesh, strategy="ring", layout="contiguous")
        out = ls.attention(*shards(plan), plan=plan)
        seen[get_ident()].clear()
        out.sum().backward()
        return seen[get_ident()]

    for events in virtual_world(3).run(run):
        assert {name for name, _, _ in events} == {"wait", "prepare", "backward", "send", "finish"}
        assert all(step == turn for _, step, turn in events), events
        assert max(step for _, step, _ in events) >= 3
    assert concurrent and not any(concurrent)


@pytest.mark.parametrize("kind", ["one device", "invariant", "ring", "returned in bfloat16", "ulysses", "selected keys"])
def test_gradients_leave_a_pass_in_the_dtypes_of_their_tensors(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd would convert others, after they took twice the memory."""
    made: list[list[torch.dtype]] = []

    def noted(module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            grads = result[:3] if isinstance(result, list) else (result[0].q, result[0].k, result[0].v)
            made.append([g.dtype for g in grads])
            return result

        monkeypatch.setattr(module, name, call)

    for module, name in (
        (one_device, "backward"), (invariant, "backward"), (invariant, "backward_over_mesh"), (distributed, "backward"),
        (selected_mesh, "backward"),
    ):  # fmt: skip
        noted(module, name)
    options: dict[str, Any] = {"ulysses": {"strategy": "ulysses"}, "returned in bfloat16": {"grad_reduce_dtype": torch.bfloat16}}.get(
        kind, {}
    )

    def run(mesh: ls.Mesh) -> None:
        plan = ls.plan(ls.causal(), 128, mesh, layout="contiguous", **options)
        mask = ls.selected(torch.zeros(1, 1, 2, 1, dtype=torch.int32), 16, 16) if kind == "selected keys" else None
        ls.attention(*shards(plan), plan=plan, mask=mask).sum().backward()

    if kind in ("one device", "invariant"):
        plan = ls.plan(ls.causal(), 57, ls.Mesh.abstract(1))
        with ls.invariant():
            ls.attention(*shards(plan), mask=ls.causal(), kernel="cpu").sum().backward()
        if kind == "one device":
            made.clear()
            ls.attention(*shards(plan), mask=ls.causal(), kernel="cpu").sum().backward()
        assert made == [[torch.bfloat16] * 3]
    else:
        virtual_world(4).run(run)
        assert made == [[torch.bfloat16] * 3] * 4


def test_lse_and_max_scores_are_contiguous_after_a_transpose() -> None:
    def run(mesh: ls.Mesh) -> bool:
        plan = ls.plan(ls.causal(), 60, mesh, strategy="ulysses", layout="contiguous")
        with torch.no_grad():
            out, lse, top = attend(*shards(plan), AttendOptions(plan=plan, max_scores=True))
        assert lse.shape == top.shape == out.shape[:3] == (1, 4, 30)
        return lse.is_contiguous() and top.is_contiguous()

    assert all(virtual_world(2).run(run))


def test_a_repeated_call_returns_lse_and_no_max_scores() -> None:
    q, k, v = (torch.randn(1, h, 29, 8, requires_grad=True) for h in (4, 2, 2))
    first = attend(q, k, v, AttendOptions(mask=ls.causal()))
    for _ in range(3):
        results = attend(q, k, v, AttendOptions(mask=ls.causal()))
        assert all(torch.equal(a, b) for a, b in zip(results, first, strict=True)) and results[2].numel() == 0
