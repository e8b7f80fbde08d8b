"""Prepared steps of sharded calls: used for calls that repeat, and right for calls that differ in anything."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engine.test_separate_kv import let_cpu_read_two_buffers
from torch import Tensor

import longspan as ls
from longspan._engine import kv_exchange
from longspan._engine.kv_exchange import StepKV
from longspan._engine.step_calls import MAX_LAYOUTS, LayoutCalls, StepCalls, forward_layouts
from longspan._engine.values import BackwardTensors, CallTensors
from longspan._kernels import registry
from longspan._kernels.cpu import CpuKernel
from longspan._kernels.protocol import AttentionInputs, BackwardInputs, Grads, GradTargets, KVAddresses, State, Work
from longspan.testing import oracle, virtual_world

TOKENS, HEADS, KV_HEADS = 61, 4, 2


class PreparingKernel(CpuKernel):
    """The CPU kernel with prepared steps that compute the work they were prepared for, with the tensors of the call."""

    def __init__(self) -> None:
        self.prepared = 0
        self.used: list[str] = []

    def prepare_forward_step(self, inputs: AttentionInputs, work: Work, *, state: State | None, result: State, final: bool) -> Any:
        self.prepared += 1
        layouts = _Layouts.of(inputs)

        def step(q: Tensor, kv: KVAddresses, state: State | None, captured: Sequence[Tensor]) -> State:
            self.used.append("forward")
            return self.forward(
                layouts.inputs_at(q, kv), replace(work, score_captured=captured), state=state, final=final, max_scores=False
            )

        return step

    def prepare_backward_step(self, tensors: BackwardInputs, work: Work, *, into: Grads) -> Any:
        self.prepared += 1
        needs, layouts, deterministic = tuple(tensors.needs), _Layouts.of(tensors.inputs), torch.are_deterministic_algorithms_enabled()

        def step(tensors: BackwardInputs, kv: KVAddresses, into: GradTargets, captured: Sequence[Tensor]) -> None:
            assert tuple(tensors.needs) == needs and torch.are_deterministic_algorithms_enabled() == deterministic
            self.used.append("backward")
            grads = into.views()
            assert (grads.k.data_ptr(), grads.v.data_ptr(), grads.q) == (into.k, into.v, into.q) and grads.captured is into.captured
            tensors = replace(tensors, inputs=layouts.inputs_at(tensors.inputs.q, kv))
            self.backward(tensors, replace(work, score_captured=captured), wide=True, into=grads)

        return step


@dataclass(frozen=True)
class _Layouts:
    """Layouts of the tensors that a step was prepared for: meta tensors."""

    q: Tensor
    kv: tuple[Tensor, ...]  # k, v, and local k and v if they are in buffers of their own

    @classmethod
    def of(cls, inputs: AttentionInputs) -> _Layouts:
        tensors = inputs.q, inputs.k, inputs.v, *(inputs.local_kv or ())
        q, *kv = (torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors)
        return cls(q, tuple(kv))

    def inputs_at(self, q: Tensor, kv: KVAddresses) -> AttentionInputs:
        """Inputs of these layouts in the memory at these addresses."""
        assert q.stride() == self.q.stride() and bool(kv.local_k) == bool(kv.local_v) == (len(self.kv) == 4)
        k, v, *local = (_tensor_at(address, like) for address, like in zip(kv, self.kv))
        return AttentionInputs(q=q, k=k, v=v, local_kv=(local[0], local[1]) if local else None)


def _tensor_at(address: int, like: Tensor) -> Tensor:
    """The memory at an address as a tensor of the dtype, shape and strides of another."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride()))
    memory = (ctypes.c_char * (elements * like.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> PreparingKernel:
    """The kernel of calls with kernel="cpu", with one stage of a ring per step."""
    preparing, named = PreparingKernel(), registry.kernel_named
    monkeypatch.setattr(registry, "kernel_named", lambda name: preparing if name == "cpu" else named(name))
    monkeypatch.setattr(importlib.import_module("longspan._plan.schedule"), "STAGE_TOKENS", 16)
    return preparing


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call. `bias`: a captured tensor [TOKENS]; `by_token`: tokens are outermost in memory."""

    seed: int = 0
    by_token: bool = False
    scale: float | None = None
    bias: Tensor | None = None
    grad: bool = True
    through_lse: bool = False
    mode: Callable[[], Any] = nullcontext

    def tensors(self) -> list[Tensor]:
        """q, k, v, grad_out."""
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.randn(2, h, TOKENS, 8, generator=generator, dtype=torch.float64) for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)]

    def results(self, attend: Callable[..., Any], tensors: Sequence[Tensor]) -> list[Tensor]:
        """[out, lse, gradients of q, k, v and the bias]."""
        *qkv, grad = (t.transpose(1, 2).contiguous().transpose(1, 2) if self.by_token else t.contiguous() for t in tensors)
        bias = self.bias
        leaves = [t.detach().requires_grad_(self.grad) for t in qkv]
        score_mod = None if bias is None else lambda s, b, h, q, kv: s + bias[kv] * 0.5
        with self.mode():
            out, lse = attend(*leaves, score_mod=score_mod, scale=self.scale, return_lse=True)
            if not self.grad:
                assert not out.requires_grad
                return [out, lse]
            loss = (out * grad).sum() + (lse.sum() if self.through_lse else 0.0)
            wanted = [*leaves, bias] if bias is not None and bias.requires_grad else leaves
            return [out.detach(), lse.detach(), *torch.autograd.grad(loss, wanted)]


def run(calls: Sequence[Call], strategy: str, ranks: int = 2, **options: Any) -> list[list[Tensor]]:
    """The results of calls with one plan, one after the other: [out, lse, dq, dk, dv, gradient of the bias] of each."""
    plan = ls.plan(
        ls.causal(), TOKENS, ls.Mesh.abstract(ranks), strategy=strategy, layout="head_tail", heads=HEADS, kv_heads=KV_HEADS, **options
    )

    def rank(mesh: Any) -> list[list[Tensor]]:
        mine, by_call = plan.on(mesh), []
        for call in calls:
            shards = [mine.shard(t, 2) for t in call.tensors()]
            got = call.results(lambda *t, **o: ls.attention(*t, plan=mine, kernel="cpu", **o), shards)
            by_call.append([mine.unshard(t, 2) if t.ndim > 1 else t for t in got])
        return by_call

    by_rank = virtual_world(ranks).run(rank)
    return [
        [sum(r[i][j] for r in by_rank) if t.ndim == 1 else t for j, t in enumerate(by_rank[0][i])]  # type: ignore[misc]
        for i in range(len(calls))
    ]


def check(call: Call, got: Sequence[Tensor]) -> None:
    want = call.results(lambda *t, **o: oracle(*t, mask=ls.causal(), **o), call.tensors())
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def variations() -> dict[str, Call]:
    """Calls that differ in one setting each."""
    bias, other, fixed = (torch.linspace(-1.0, 1.0, TOKENS, dtype=torch.float64) * n for n in (1.0, -2.0, 0.5))
    return {
        "base": Call(),
        "other values": Call(seed=1),
        "strides": Call(by_token=True),
        "scale": Call(scale=0.3),
        "bias": Call(bias=bias.requires_grad_()),
        "another bias": Call(bias=other.requires_grad_()),
        "bias without gradient": Call(bias=fixed),
        "strided bias": Call(bias=torch.stack([fixed, fixed], 1)[:, 1]),
        "deterministic": Call(mode=deterministic),
        "no grad": Call(grad=False),
        "gradient of lse": Call(through_lse=True),
    }


SOME = ("base", "strides", "bias")


@pytest.mark.parametrize(
    ("strategy", "names", "separate"), [("ring", None, False), ("exchange", SOME, False), ("ring", SOME, True), ("exchange", SOME, True)]
)
def test_calls_that_repeat_in_any_order_equal_the_oracle(
    strategy: str, names: Sequence[str] | None, separate: bool, kernel: PreparingKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """separate: K and V are sent in exchanges of their own."""
    if separate:
        monkeypatch.setattr(kv_exchange, "SEPARATE_KV_BYTES", 0)
    calls = [call for name, call in variations().items() if names is None or name in names]
    order = [*calls, *calls, *reversed(calls)]
    for call, got in zip(order, run(order, strategy), strict=True):
        check(call, got)
    assert kernel.used.count("forward") >= 2 * len(calls) and kernel.used.count("backward") >= 2 * (len(calls) - 1)


def test_prepared_steps_read_local_and_received_kv_from_two_buffers(kernel: PreparingKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = let_cpu_read_two_buffers(monkeypatch)
    monkeypatch.setattr(kv_exchange, "SEPARATE_KV_BYTES", 0)
    calls = [Call(seed=seed, by_token=seed % 2 == 1) for seed in range(6)]
    for call, got in zip(calls, run(calls, "exchange", stages=1, overlap=False), strict=True):
        check(call, got)
    assert len(kernel.used) == len(tokens) // 3, "the third call of each layout, both passes"


def test_a_call_is_prepared_the_second_time(kernel: PreparingKernel) -> None:
    run([Call()], "ring")
    assert not kernel.prepared
    run([Call(), Call(seed=1)], "ring")
    assert kernel.prepared and not kernel.used
    prepared = kernel.prepared
    run([Call(), Call(seed=1), Call(seed=2)], "ring")
    assert kernel.prepared == 2 * prepared and len(kernel.used) == prepared


def test_a_captured_tensor_that_was_modified_in_place_is_read_again(kernel: PreparingKernel) -> None:
    bias = torch.linspace(-1.0, 1.0, TOKENS, dtype=torch.float64)
    plan = ls.plan(ls.causal(), TOKENS, ls.Mesh.abstract(1), heads=HEADS)

    def rank(mesh: Any) -> None:
        mine, call = plan.on(mesh), Call(bias=bias, grad=False)
        for factor in (1.0, 1.0, 1.0, -2.0, 0.5):
            bias.mul_(factor)
            check(call, call.results(lambda *t, **o: ls.attention(*t, plan=mine, kernel="cpu", **o), call.tensors()))

    virtual_world(1).run(rank)
    assert kernel.used


def test_a_modified_tensor_of_the_mask_raises_at_a_repeated_call(kernel: PreparingKernel) -> None:
    ids = torch.arange(TOKENS) // 10
    plan = ls.plan(ls.mask_mod(lambda b, h, q, kv: ids[q] == ids[kv]), TOKENS, ls.Mesh.abstract(1), heads=HEADS)
    q, k, v = Call().tensors()[:3]

    def rank(mesh: Any) -> None:
        for _ in range(3):
            ls.attention(q, k, v, plan=plan, kernel="cpu")
        assert kernel.used
        ids.zero_()
        with pytest.raises(ValueError, match="modified in place"):
            ls.attention(q, k, v, plan=plan, kernel="cpu")

    virtual_world(1).run(rank)


def test_kernels_without_prepared_steps_graph_captures_and_max_scores_take_the_plain_way(kernel: PreparingKernel) -> None:
    q, kv, work = _one_step()
    for calls, max_scores in (
        (StepCalls(CpuKernel()).of_layouts(0), False),
        (StepCalls(kernel).unprepared(), False),
        (StepCalls(kernel).of_layouts(0), True),
    ):
        for _ in range(3):
            state = calls.forward((0, 0), q, kv, lambda: work, (), state=None, final=True, max_scores=max_scores)
            assert (state.max_scores is not None) == max_scores
    assert not kernel.prepared and not kernel.used


def test_unprepared_and_prepared_calls_of_a_step_have_the_same_bits_and_no_max_scores(kernel: PreparingKernel) -> None:
    q, kv, work = _one_step()
    calls = StepCalls(kernel).of_layouts(0)
    states = [calls.forward((0, 0), q, kv, lambda: work, (), state=None, final=True, max_scores=False) for _ in range(3)]
    assert kernel.used == ["forward"] and all(state.max_scores is None for state in states)
    assert all(torch.equal(state.out, states[0].out) and torch.equal(state.lse, states[0].lse) for state in states)


def test_kernels_with_a_norm_compute_row_terms_from_the_pass_and_the_gradient_of_q() -> None:
    given: list[tuple[Any, Tensor]] = []

    class WithNorm(PreparingKernel):
        def norm(self, lse: Tensor) -> Tensor:
            raise AssertionError("row_terms computes it")

        def row_terms(self, tensors: BackwardInputs, grad_q: Tensor) -> tuple[Tensor, Tensor]:
            given.append((tensors, grad_q))
            return tensors.lse + 1, tensors.lse + 2

        def prepare_row_terms(self, tensors: BackwardInputs, grad_q: Tensor) -> None:
            given.append((tensors, grad_q))

    q, _, _ = _one_step()
    out, lse, grad_out = torch.randn_like(q), torch.randn(q.shape[:3]), torch.randn_like(q)
    calls = StepCalls(WithNorm()).of_layouts(0)
    terms = BackwardTensors(inputs=CallTensors(q=q, k=q, v=q, sink=None), out=out, lse=lse, grad_out=grad_out, grad_lse=None, needs=())
    for _ in range(2):
        grad_q, delta, norm = calls.row_terms(terms)
        assert torch.equal(delta, lse + 1) and norm is not None and torch.equal(norm, lse + 2) and grad_q.shape == q.shape
    assert len(given) == 3 and all(one[0].out is out and one[0].lse is lse and isinstance(one[1], Tensor) for one in given)
    assert given[2][0].delta is not None and torch.equal(given[2][0].delta, lse + 1)


def test_a_misaligned_q_and_a_misaligned_k_are_different_layouts() -> None:
    """With an aligned q, steps over received KV are prepared whatever the alignment of the local k."""
    whole = [torch.randn(1, 1, 9, 4, dtype=torch.float64) for _ in range(3)]
    aligned, shifted = ([t.flatten()[start : start + 32].view(1, 1, 8, 4) for t in whole] for start in (0, 1))
    misaligned_q = CallTensors(q=shifted[0], k=aligned[1], v=aligned[2])
    misaligned_k = CallTensors(q=aligned[0], k=shifted[1], v=aligned[2])
    assert forward_layouts(misaligned_q, (), 1.0) != forward_layouts(misaligned_k, (), 1.0)


def test_layouts_of_prepared_steps_are_bounded() -> None:
    kernel = PreparingKernel()
    calls, (q, kv, work) = StepCalls(kernel), _one_step()
    for layouts in range(MAX_LAYOUTS + 3):
        for _ in range(3):
            calls.of_layouts(layouts).forward((0, 0), q, kv, lambda: work, (), state=None, final=True, max_scores=False)
    assert len(calls) == MAX_LAYOUTS == 16 and len(kernel.used) == MAX_LAYOUTS + 3


def test_many_steps_stay_prepared_while_other_layouts_come_and_go() -> None:
    kernel, steps = PreparingKernel(), 70
    calls, (q, kv, work) = StepCalls(kernel), _one_step()

    def run(layouts: float) -> None:
        for step in range(steps):
            calls.of_layouts(layouts).forward((step, 0), q, kv, lambda: work, (), state=None, final=True, max_scores=False)

    for _ in range(2):
        run(1.0)
    kernel.used.clear()
    for other in range(2 * MAX_LAYOUTS):
        run(1.0)
        run(2.0 + other)  # once each
    assert len(kernel.used) == 2 * MAX_LAYOUTS * steps


def _one_step() -> tuple[Tensor, StepKV, Work]:
    from longspan._engine.one_device import plain_tiling

    tiling = plain_tiling(8, 128)
    q, k, v = (torch.randn(1, 1, 8, 8) for _ in range(3))
    work = Work(table=ls.full().block_table(8, 8), q_tiles=tiling, kv_tiles=tiling, scale=0.5)
    return q, StepKV(KVAddresses(k.data_ptr(), v.data_ptr()), lambda q: AttentionInputs(q=q, k=k, v=v)), work


def test_gradients_of_a_step_are_wide_and_go_to_their_targets() -> None:
    """Steps are summed: a kernel that rounds each of them would add its errors."""
    given: list[tuple[bool, Any]] = []
    kernel: Any = SimpleNamespace(backward=lambda tensors, work, *, wide, into: given.append((wide, into)))
    q, kv, work = _one_step()
    grads = Grads(q=q, k=q, v=q, captured=[])
    tensors = BackwardInputs(inputs=AttentionInputs(q=q, k=q, v=q), out=q, lse=q[..., 0], grad_out=q)
    LayoutCalls(kernel, None, None).backward((0, 0), tensors, kv, lambda: work, (), GradTargets(q, [], 0, 0, lambda: grads))
    assert given == [(True, grads)]
