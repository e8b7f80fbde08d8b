"""Legal but rare inputs: strides, scales, ranks without queries, literals in compiled mods."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.sharded import Problem
from torch import Tensor

import longspan as ls
from longspan.integrations import memory
from longspan.testing import oracle, virtual_world

Grads = tuple[Tensor, ...]


def _both(kernel: str, tensors: list[Tensor], **options: Any) -> tuple[tuple[Tensor, Tensor, Grads], tuple[Tensor, Tensor, Grads]]:
    """(out, lse, gradients) of a kernel and of the oracle."""
    results = []
    for attend in (
        lambda *t: ls.attention(*t, kernel=kernel, return_lse=True, **options),
        lambda *t: oracle(*t, return_lse=True, **options),
    ):
        out, lse = attend(*tensors)
        results.append((out, lse, torch.autograd.grad(out.sum() + out.square().sum(), tensors)))
    return results[0], results[1]


def _check(kernel: str, tensors: list[Tensor], **options: Any) -> None:
    got, right = _both(kernel, tensors, **options)
    torch.testing.assert_close(got[0].double(), right[0].double(), rtol=0, atol=1e-5)
    torch.testing.assert_close(got[1].double(), right[1].double(), rtol=0, atol=1e-5)
    for a, b in zip(got[2], right[2], strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=2e-4)


def _drawn() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, 37, 8, generator=generator) for heads in (4, 2, 2)]


@pytest.mark.parametrize("kernel", ["cpu", "flash", "aten", "dense"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_strided_head_dims_are_supported(kernel: str, which: int) -> None:
    tensors = _drawn()
    tensors[which] = tensors[which].mT.contiguous().mT
    assert tensors[which].stride(-1) != 1
    _check(kernel, [t.requires_grad_() for t in tensors], mask=ls.causal())


@pytest.mark.parametrize("kernel", ["cpu", "flash", "aten", "dense"])
@pytest.mark.parametrize("scale", [0.0, -1.3])
def test_masks_hold_for_zero_and_negative_scales(kernel: str, scale: float) -> None:
    _check(kernel, [t.requires_grad_() for t in _drawn()], mask=ls.causal(), scale=scale)
    if kernel == "cpu":
        _check(kernel, [t.requires_grad_() for t in _drawn()], mask=ls.causal() & ls.sliding_window(5), scale=scale)


def test_the_dense_kernel_supports_ranks_without_queries() -> None:
    problem = Problem(mask=ls.causal(), score="relative bias", q_len=2, kv_len=2, batch=2, heads=4, kv_heads=2)
    right, got = problem.by_oracle(), problem.over(3, kernel="dense")
    for name in right.values:
        assert got.error(right, name) < 1e-11, name


def test_literals_of_mods_compile_with_the_dense_kernel_too() -> None:
    q, k, v = (t.requires_grad_() for t in _drawn())

    def add_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(i - j > 9, -torch.inf, score * torch.tensor(1.5)) + torch.zeros_like(score)

    def attend(q: Tensor) -> Tensor:
        return ls.attention(q, k, v, mask=ls.causal(), score_mod=add_bias, kernel="dense")

    right = attend(q)
    torch.testing.assert_close(torch.compile(attend, backend="aot_eager", fullgraph=True)(q), right)
    got = ls.attention(q, k, v, mask=ls.causal(), score_mod=add_bias)  # the gradient of a program with literals, traced
    for a, b in zip(*(torch.autograd.grad(o.square().sum(), [q, k, v]) for o in (got, right)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_gradients_are_traced_in_anomaly_mode() -> None:
    q, k, v = (t.requires_grad_() for t in _drawn())
    cap = 7.25  # of this test alone: the first call of its kind
    with torch.autograd.set_detect_anomaly(True):
        ls.attention(q, k, v, score_mod=lambda s, b, h, i, j: cap * torch.tanh(s / cap)).sum().backward()
        assert torch.is_anomaly_enabled()
    assert bool(q.grad.isfinite().all())


WHOLE: dict[str, Any] = {
    "mean": lambda s, t, e, i, j: (t * s).mean(),
    "tanh mean": lambda s, t, e, i, j: torch.tanh(t * s).mean() + s,
    "std": lambda s, t, e, i, j: (t * s).std(),
    "softmax": lambda s, t, e, i, j: (t * s).softmax(0)[0],
    "last": lambda s, t, e, i, j: (t * s)[-1],
    "flip": lambda s, t, e, i, j: (t * s).flip(0)[0],
    "cat": lambda s, t, e, i, j: torch.cat([t * s, t]).sum() * 0.1,
    "row": lambda s, t, e, i, j: (e[j] * s).mean(),
    "rows": lambda s, t, e, i, j: s + (e[i] * e[j]).sum() * 0.1,
    "products": lambda s, t, e, i, j: s + (e @ e[j]).mean() * 0.1,
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_score_mod_may_use_captured_tensors_whole_whatever_their_sizes(name: str) -> None:
    """Captured tensors of other sizes give the same program but another gradient: a mean divides by the size."""
    fn = WHOLE[name]
    for size, width in ((9, 5), (4, 7)):
        generator = torch.Generator().manual_seed(size)
        q, k, v = (torch.randn(1, 2, 13, 4, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3))
        t, e = (torch.randn(*s, generator=generator, dtype=torch.float64, requires_grad=True) for s in ((size,), (13, width)))
        results = []
        for kernel in ("cpu", "dense"):
            out = ls.attention(q, k, v, mask=ls.causal(), score_mod=lambda s, b, h, i, j, t=t, e=e: fn(s, t, e, i, j), kernel=kernel)
            results.append(torch.autograd.grad(out.square().sum(), [q, k, v, t, e], allow_unused=True))
        for got, right in zip(*results, strict=True):
            assert (got is None) == (right is None)
            if got is not None:
                torch.testing.assert_close(got, right)


def left_over(leaf: Tensor) -> Tensor:
    """The tensor that a transform of torch.func wrapped around a leaf, after the transform has ended."""
    wrapped: list[Tensor] = []
    torch.func.grad(lambda t: (wrapped.append(t), t.sum())[1])(leaf)
    return wrapped[0]


@pytest.mark.parametrize("what", ["q, k, v", "sink", "captured"])
@pytest.mark.parametrize("planned", [False, True])
def test_tensors_left_over_from_a_transform_get_their_gradients(what: str, planned: bool) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(1, 2, 12, 8, requires_grad=True), torch.randn(2, requires_grad=True)
    leaf = x if what == "q, k, v" else w

    def gradient(t: Tensor, plan: Any) -> Tensor:
        q, v = (t, t) if what == "q, k, v" else (x, x)
        mod = (lambda s, b, h, q, kv: s + t[h] * kv) if what == "captured" else None
        options = {"plan": plan} if planned else {"mask": ls.causal()}
        out = ls.attention(q, q, v, score_mod=mod, sink=t if what == "sink" else None, **options)
        return torch.autograd.grad((out * out).sum(), leaf)[0]

    def rank(mesh: Any) -> None:
        plan = ls.plan(ls.causal(), 12, mesh, heads=2, head_dim=8)
        want = gradient(leaf, plan)
        assert float(want.abs().sum()) > 0
        for _ in range(3):  # the third call of a kind is prepared
            gradient(leaf, plan)
            torch.testing.assert_close(gradient(left_over(leaf), plan), want)

    virtual_world(1).run(rank)


@pytest.mark.parametrize("kernel", ["cpu", "triton"])
def test_lazily_negated_views_have_the_sign_of_their_values(kernel: str) -> None:
    if kernel == "triton":
        pytest.importorskip("triton")
    device = "cuda" if kernel == "triton" and torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    shapes = (*[(1, 1, 20, 8)] * 4, (1,))
    *leaves, gradient, sink = (torch.randn(shape, dtype=torch.complex64, generator=generator).to(device) for shape in shapes)
    leaves = [x.requires_grad_() for x in leaves]

    def results(kernel: str) -> list[Tensor]:
        tensors = [x.conj().imag for x in leaves]
        grad_out, logits = gradient.conj().imag, sink.conj().imag
        assert all(t.is_neg() for t in (*tensors, grad_out, logits))
        out = ls.attention(*tensors, mask=ls.causal(), sink=logits, score_mod=lambda s, b, h, q, kv: s * logits[h], kernel=kernel)
        return [out, *torch.autograd.grad(out, leaves, grad_out)]

    for _ in range(3):  # the third call of a kind would be prepared
        for got, right in zip(results(kernel), results("dense"), strict=True):
            torch.testing.assert_close(got, right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_have_the_strides_of_inputs_by_token_or_are_contiguous(checkpointed: bool) -> None:
    by_token = [torch.randn(2, 37, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    grads: list[Tensor] = []

    def attend(*tensors: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) * 1.0 for t in tensors)
        for t in (q, k, v):
            t.register_hook(grads.append)
        return ls.attention(q, k, v, mask=ls.causal())

    out = memory.checkpoint(attend, *by_token) if checkpointed else attend(*by_token)
    got = torch.autograd.grad(out.square().sum(), by_token)
    want = torch.autograd.grad(
        ls.attention(*(t.transpose(1, 2) for t in by_token), mask=ls.causal(), kernel="dense").square().sum(), by_token
    )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert len(grads) == 3
    assert all(g.is_contiguous() or g.transpose(1, 2).is_contiguous() for g in grads)
    assert any(g.shape[1] == 4 and g.transpose(1, 2).is_contiguous() for g in grads)  # no copy of the operator's gradient of q


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("mask", [None, ls.causal()], ids=["full", "causal"])
def test_a_score_mod_may_return_another_dtype(dtype: torch.dtype, mask: Any) -> None:
    """Scores and their gradients are computed in float32 on either side of it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 20, 8, generator=generator).requires_grad_() for heads in (4, 2, 2))

    def grads(score_mod: Any) -> Any:
        out = ls.attention(q, k, v, mask=mask, score_mod=score_mod, kernel="cpu")
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    got = grads(lambda s, b, h, q, kv: (s * 2).to(dtype))
    want = grads(lambda s, b, h, q, kv: s * 2)
    assert all(t.dtype == torch.float32 for t in got)
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
