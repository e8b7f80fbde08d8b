"""Backward passes of prepared calls: recomputation, hooks, layouts of gradients, settings."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.engine.call_cases import CAUSAL, deterministic, qkv, strided
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import longspan as ls
from longspan._engine.prepared_call import PreparedCall


@pytest.mark.parametrize("mask", [ls.causal(), ls.causal() & ls.documents([13, 27])], ids=str)
def test_checkpointed_calls_may_be_prepared(mask: ls.Mask, prepared: list[PreparedCall]) -> None:
    want = None
    for _ in range(3):  # the first layers of the first step are not prepared, their recomputations are
        q, k, v = tensors = qkv()
        x = q
        for _ in range(3):
            x = checkpoint(lambda x, k, v: ls.attention(x, k, v, mask=mask), x, k, v, use_reentrant=False)
        grads = torch.autograd.grad(x.sum(), tensors)
        want = grads if want is None else want
        assert all(map(torch.equal, grads, want))
    assert prepared


def test_the_preamble_of_a_score_mod_runs_once_in_a_call_and_in_its_recomputation(prepared: list[PreparedCall]) -> None:
    """Activation checkpointing compares the tensors that autograd saves in both."""
    table, tensors = torch.linspace(-1.0, 0.0, 4, requires_grad=True), qkv()

    def decaying(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s + table.exp()[h] * (kv - q)

    def doubled(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s * 2 + table.exp()[h] * (kv - q)

    for _ in range(4):
        for mod in (decaying, doubled):
            attend = functools.partial(ls.attention, mask=CAUSAL, score_mod=mod)
            out, want = checkpoint(attend, *tensors, use_reentrant=False), attend(*tensors, kernel="dense")
            grads = (torch.autograd.grad(o.sum(), [*tensors, table]) for o in (out, want))
            for got, wanted in zip(*grads, strict=True):
                torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    assert prepared


def test_a_backward_pass_follows_the_present_deterministic_setting(prepared: list[PreparedCall]) -> None:
    tensors, grad = qkv(), torch.randn(1, 4, 40, 16)
    for _ in range(3):
        out = ls.attention(*tensors, mask=CAUSAL)
        torch.autograd.grad(out, tensors, grad)
    call = prepared[-1]
    before = len(call._backwards)
    out = call(*tensors, None, [], lse=False)[0]
    with deterministic():
        torch.autograd.grad(out, tensors, grad)
    assert len(call._backwards) == before + 1


def test_gradients_of_other_layouts_are_right(prepared: list[PreparedCall]) -> None:
    tensors = qkv()
    grads = [torch.randn(1, 4, 40, 16), torch.randn(1, 40, 4, 16).transpose(1, 2), torch.ones(()).expand(1, 4, 40, 16)]
    for _ in range(3):
        for grad in grads:
            got = torch.autograd.grad(ls.attention(*tensors, mask=CAUSAL), tensors, grad)
            want = torch.autograd.grad(ls.attention(*tensors, mask=CAUSAL, kernel="dense"), tensors, grad)
            torch.testing.assert_close(got, want)
    assert prepared


def test_saved_tensors_may_be_replaced_by_hooks(prepared: list[PreparedCall]) -> None:
    tensors, grad = qkv(), torch.randn(1, 4, 40, 16)
    want = torch.autograd.grad(ls.attention(*tensors, mask=CAUSAL, kernel="dense"), tensors, grad)
    for unpack in (lambda t: t, lambda t: t.clone(), strided_if_wide):
        for _ in range(3):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), unpack):
                out = ls.attention(*tensors, mask=CAUSAL)
            torch.testing.assert_close(torch.autograd.grad(out, tensors, grad), want)
    assert prepared


def strided_if_wide(t: Tensor) -> Tensor:
    return strided(t) if t.ndim == 4 else t.clone()


def test_a_second_differentiation_raises(prepared: list[PreparedCall]) -> None:
    tensors = qkv()
    for _ in range(3):
        out = ls.attention(*tensors, mask=CAUSAL)
        (grad,) = torch.autograd.grad(out.sum(), tensors[:1], create_graph=True)
        with pytest.raises(RuntimeError, match="supports one differentiation, not two"):
            grad.sum().backward()
    assert prepared


def test_results_need_no_gradient_without_gradients(prepared: list[PreparedCall]) -> None:
    tensors = qkv()
    for _ in range(3):
        ls.attention(*tensors, mask=CAUSAL)
    with torch.no_grad():
        assert not ls.attention(*tensors, mask=CAUSAL).requires_grad
    assert not ls.attention(*qkv(grad=False), mask=CAUSAL).requires_grad
    assert ls.attention(*tensors, mask=CAUSAL).requires_grad
    assert len(prepared) == 4
