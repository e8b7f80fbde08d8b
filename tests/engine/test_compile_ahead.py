"""Backward kernels that compile ahead: once for each kind of call, with tensors of the same layouts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan as ls
from longspan._engine import compile_ahead, eager
from longspan._engine.compile_ahead import _shortened, compiling_backward
from longspan._engine.spec import Spec
from longspan._engine.values import CallOptions, CallTensors
from longspan.testing import virtual_world


@pytest.mark.parametrize(
    ("shape", "limit", "want"),
    [
        ((3, 4, 700, 8), 3 * 4 * 700 * 8 * 2, (3, 4, 700, 8)),  # exactly the limit: the tensor itself
        ((3, 4, 700, 8), 3 * 4 * 700 * 8 * 2 - 1, (2, 4, 700, 8)),
        ((3, 4, 1500, 8), 1 << 10, (2, 4, 512 + 1500 % 128, 8)),  # at least four tiles
        ((3, 4, 1500, 8), 2 * 4 * 8 * 2 * 1000, (2, 4, 896 + 1500 % 128, 8)),
        ((1, 4, 1500, 8), 4 * 8 * 2 * 1300, (1, 4, 1280 + 1500 % 128, 8)),
        ((1, 4, 400, 8), 1 << 10, (1, 4, 400, 8)),
    ],
)
def test_large_tensors_are_shortened_to_tokens_with_the_same_remainder(
    shape: tuple[int, ...], limit: int, want: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_ahead, "_MAX_BYTES", limit)
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)):
        x = torch.empty([shape[i] for i in order], dtype=torch.bfloat16).permute([order.index(i) for i in range(4)])
        made = _shortened(x.requires_grad_())
        assert (made.shape, made.dtype, made.requires_grad) == (want, torch.bfloat16, False)
        like = torch.empty([want[i] for i in order]).permute([order.index(i) for i in range(4)])
        assert all(n == 1 or a == b for n, a, b in zip(want, made.stride(), like.stride(), strict=True))
        assert (made.data_ptr() == x.data_ptr()) == (x.numel() * 2 <= limit)


def test_kernels_compile_ahead_once_for_each_kind_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    compilation: Any = pytest.importorskip("longspan._kernels.gpu.compilation")
    jobs: list[Any] = []

    @contextmanager
    def meanwhile(made: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(compilation, "start_driver", lambda: None)
    monkeypatch.setattr(compilation, "compiling_meanwhile", meanwhile)
    monkeypatch.setattr(compile_ahead, "_may_compile", lambda q: True)
    monkeypatch.setattr(compile_ahead, "_backward_jobs", lambda *call: jobs.append(call) or [])
    monkeypatch.setattr(compile_ahead, "_seen", set())
    zeros = lambda heads, dim, dtype=torch.float32: torch.zeros(1, heads, 6, dim, dtype=dtype)
    inputs = CallTensors(q=zeros(4, 8), k=zeros(2, 8), v=zeros(2, 8))
    options, sink = CallOptions(spec=Spec(mask=None, score=None, kernel="auto"), scale=1.0), torch.zeros(4)

    def compiles(inputs: CallTensors, options: CallOptions = options, needs: tuple[bool, ...] = ()) -> bool:
        before = len(jobs)
        with compiling_backward(inputs, options, needs):
            pass
        return len(jobs) > before

    kinds: list[tuple[Any, ...]] = [
        (inputs,), (inputs, replace(options, spec=Spec(mask=None, score=None, kernel="triton"))), (replace(inputs, q=zeros(4, 8).half()),),
        (replace(inputs, q=zeros(4, 8).to("meta")),), (replace(inputs, q=zeros(4, 16)),), (replace(inputs, v=zeros(2, 16)),),
        (replace(inputs, v=zeros(4, 8)),), (replace(inputs, sink=sink),), (inputs, options, (True,)), (inputs, options, (False,)),
    ]  # fmt: skip
    assert [compiles(*kind) for kind in kinds] == [True] * len(kinds)
    assert [compiles(*kind) for kind in kinds] == [False] * len(kinds)
    assert not compiles(replace(inputs, q=torch.zeros(3, 4, 9, 8)), replace(options, scale=0.5))  # batch, lengths and scale do not matter
    assert compile_ahead.compiles_only() is False
    assert (compile_ahead._MAX_SEEN, compile_ahead._MAX_BYTES) == (256, 512 * 2**20)
    monkeypatch.setattr(compile_ahead, "_MAX_SEEN", len(kinds) + 1)
    assert compiles(replace(inputs, v=zeros(2, 24))) and not compiles(inputs)
    assert compiles(replace(inputs, v=zeros(2, 32))) and compiles(inputs)  # the set was full and was cleared

    def fails(*call: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(compile_ahead, "_backward_jobs", fails)
    assert not compiles(replace(inputs, v=zeros(2, 40)))  # the call goes on
    monkeypatch.setattr(compilation, "collected_jobs", list)
    with pytest.raises(MemoryError):
        compiles(replace(inputs, v=zeros(2, 40)))
    assert compile_ahead.compiles_only() is True


def test_calls_on_the_cpu_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "_backward_jobs", None)
    q: Tensor = torch.zeros(1, 2, 3, 4)
    with compiling_backward(CallTensors(q=q, k=q, v=q), CallOptions(spec=Spec(mask=None, score=None, kernel="auto"), scale=1.0), ()):
        assert not compile_ahead._may_compile(q)


@pytest.mark.parametrize(
    ("name", "value_dim", "order"), [("triton", 8, (0, 1, 2, 3)), ("hopper", 24, (0, 2, 1, 3)), ("cpu", 8, (0, 1, 2, 3))]
)
def test_the_pass_that_compiles_has_tensors_of_the_layouts_of_results(
    name: str, value_dim: int, order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    calls: list[Any] = []
    kernel = SimpleNamespace(name=name)
    monkeypatch.setattr(compile_ahead.one_device, "kernel_and_work", lambda inputs, options, *, backward: (kernel, ("work", backward)))
    monkeypatch.setattr(compile_ahead.one_device, "backward_by", lambda *call: calls.append(call))
    q = torch.zeros([(2, 4, 6, 8)[i] for i in order]).permute([order.index(i) for i in range(4)]).bfloat16().requires_grad_()
    inputs = CallTensors(q=q, k=torch.zeros(2, 2, 5, 8).bfloat16(), v=torch.zeros(2, 2, 5, value_dim).bfloat16())
    options = CallOptions(spec=Spec(mask=None, score=None, kernel="auto"), scale=1.0)
    assert list(compile_ahead._backward_jobs(inputs, options, (True,))) == []
    assert len(calls) == (name != "cpu")
    for used, work, tensors in calls:
        assert used is kernel and work == ("work", True)
        assert (tensors.out.shape, tensors.out.dtype, tensors.lse.shape, tensors.lse.dtype) == (
            (2, 4, 6, value_dim), torch.bfloat16, (2, 4, 6), torch.float32,
        )  # fmt: skip
        assert tensors.grad_out.stride() == tensors.out.stride() and tensors.grad_out is not tensors.out
        assert tensors.grad_lse is None and tensors.needs == (True,) and not tensors.inputs.q.requires_grad
        if value_dim == 8:
            assert tensors.out.stride() == q.stride()


def test_backward_kernels_compile_meanwhile_on_one_device_and_not_over_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[bool]] = []

    def note(inputs: CallTensors, options: CallOptions, needs: Any) -> Any:
        seen.append(list(needs))
        return nullcontext()

    monkeypatch.setattr(eager, "compiling_backward", note)
    q, k, v = (torch.randn(1, h, 24, 8, requires_grad=True) for h in (4, 2, 2))
    slopes = torch.rand(4, requires_grad=True)
    ls.attention(q, k, v, scale=0.7, score_mod=lambda s, b, h, i, j: s + slopes[h] * i)
    assert seen == [[True]]
    virtual_world(1).run(lambda mesh: ls.attention(q, k, v, plan=ls.plan(ls.causal(), 24, mesh)))
    assert seen == [[True]]
