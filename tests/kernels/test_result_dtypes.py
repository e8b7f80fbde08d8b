"""dtypes of results and gradients by kernel, also where sinks and scores come in other dtypes than the inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.kernels.calls import backward, forward
from tests.kernels.shards import work_of
from torch import Tensor

import longspan as ls
from longspan._kernels import aten, cpu
from longspan._kernels.dense import Scoring, dense_attention
from longspan._kernels.invariant_tiles import row_delta
from longspan._kernels.plain_tiles import PlainTiles
from longspan._kernels.protocol import AttentionInputs, Capabilities, State, plain_delta
from longspan._kernels.registry import kernel_named
from longspan._kernels.tile_math import contiguous_last_dim
from longspan._masks.tracing import trace

BATCH, HEADS, GROUPS, QUERIES, KEYS, DIM, VALUE_DIM = 2, 4, 2, 37, 45, 8, 5
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
BIAS = torch.linspace(-1, 1, 9, dtype=FP64)


def full(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q + kv >= 0


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q - kv).abs() < 9


def late_rows(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= 9


def early_keys(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return kv < 21


def tensors(dtype: torch.dtype, value_dim: int = DIM) -> list[Tensor]:
    """q, k, v, grad_out."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((HEADS, QUERIES, DIM), (GROUPS, KEYS, DIM), (GROUPS, KEYS, value_dim), (HEADS, QUERIES, value_dim))
    return [torch.randn(BATCH, *shape, generator=generator).to(dtype) for shape in shapes]


def parts(mask: Any, scale: float = 0.3) -> Any:
    segments = [(0, QUERIES), (QUERIES, KEYS - QUERIES)]
    return work_of(mask, [(0, QUERIES)], segments, block=16, batch=BATCH, heads=HEADS, scale=scale)


CALLS: Any = [("cpu", full), ("cpu", causal), ("cpu", window), ("cpu", early_keys), ("cpu", late_rows), ("flash", full), ("flash", causal)]


@pytest.mark.parametrize(("dtype", "scale"), [(BF16, 0.3), (FP64, 0.3), (FP64, -0.4), (FP64, 0.0)])
@pytest.mark.parametrize(("name", "mask"), CALLS)
def test_results_are_wide_between_steps_and_in_the_dtype_of_q_at_last(name: str, mask: Any, dtype: torch.dtype, scale: float) -> None:
    kernel, work, (q, k, v, grad), wide = kernel_named(name), parts(mask, scale), tensors(dtype), FP64 if dtype == FP64 else FP32
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT * work.scale
    q_pos, kv_pos = torch.arange(QUERIES)[:, None], torch.arange(KEYS)
    seen = mask(torch.zeros(()), torch.zeros(()), q_pos, kv_pos).expand(QUERIES, KEYS)
    scores = torch.where(seen, scores, -torch.inf)
    largest, blind = scores.amax(-1), ~seen.any(-1)
    weights, values = scores.softmax(-1).masked_fill(blind[:, None], 0.0), v.double().repeat_interleave(2, 1)
    want, atol = weights @ values, 2e-2 if dtype == BF16 else 1e-9
    ds = weights * (grad.double() @ values.mT - (grad.double() * want).sum(-1, keepdim=True)) * work.scale
    dq = ds @ k.double().repeat_interleave(2, 1)
    dk, dv = (x.unflatten(1, (GROUPS, 2)).sum(2) for x in (ds.mT @ q.double(), weights.mT @ grad.double()))
    for final in (False, True):
        for max_scores in (False, True):
            state = forward(kernel, q, k, v, work, final=final, max_scores=max_scores)
            assert (state.out.dtype, state.lse.dtype) == (dtype if final else wide, wide)
            torch.testing.assert_close(state.out.double(), want, rtol=0, atol=atol)
            assert (state.max_scores is not None) == max_scores
            if state.max_scores is not None:
                assert state.max_scores.dtype == wide
                torch.testing.assert_close(state.max_scores.double(), largest, rtol=0, atol=1e-5)
    for is_wide in (False, True):
        for grad_lse in (None, state.lse):
            grads = backward(kernel, q, k, v, state.out, state.lse, grad, grad_lse, work, wide=is_wide)
            for got, right in zip((grads.q, grads.k, grads.v), (dq, dk, dv), strict=True) if grad_lse is None else ():
                torch.testing.assert_close(got.double(), right, rtol=1e-2, atol=3 * atol)
            assert {g.dtype for g in (grads.q, grads.k, grads.v)} == {wide if is_wide else dtype}


@pytest.mark.parametrize("name", ["cpu", "flash", "aten"])
def test_torchs_kernels_have_no_optional_capability(name: str) -> None:
    q, k, v, _ = tensors(FP32)
    capabilities = kernel_named(name).capabilities(AttentionInputs(q=q, k=k, v=v), parts(full))
    assert capabilities == Capabilities(
        unsupported=None, two_kv_buffers=False, concurrent_backward=False, rounds_kv_grads_once=False
    )  # fmt: skip


def test_rows_that_operators_read_have_a_contiguous_last_dim() -> None:
    t = torch.randn(2, 3, 5, 8)
    made = contiguous_last_dim(t.mT)
    assert contiguous_last_dim(t) is t and made.stride(-1) == 1 and torch.equal(made, t.mT)


@pytest.mark.parametrize("name", ["cpu", "flash"])
def test_the_results_of_one_rectangle_are_not_added_to_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that see nothing included, which torch's operator gives other values."""
    kernel, (q, k, v, grad) = kernel_named(name), tensors(FP32)
    for mask in (full, late_rows) if name == "cpu" else (full,):
        work = work_of(mask, [(0, QUERIES)], [(0, KEYS)], block=64)
        with monkeypatch.context() as patch:
            for module, attribute in ((aten, "merge_"), (cpu, "merge_"), (PlainTiles, "empty_grads"), (torch, "zeros_like")):
                patch.setattr(module, attribute, lambda *args, **how: pytest.fail("merged"))
            state = forward(kernel, q, k, v, work)
            grads = backward(kernel, q, k, v, state.out, state.lse, grad, None, work)
        parts_state = forward(kernel, q, k, v, parts(mask))
        parts_grads = backward(kernel, q, k, v, state.out, state.lse, grad, None, parts(mask))
        pairs = (
            (state.out, parts_state.out),
            (state.lse, parts_state.lse),
            *zip((grads.q, grads.k, grads.v), (parts_grads.q, parts_grads.k, parts_grads.v), strict=True),
        )
        for got, want in pairs:
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("name", ["cpu", "flash"])
def test_two_heads_and_batch_rows_have_rectangles_of_their_own(name: str, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(6)
    q, k, v, grad = (torch.randn(2, h, 32, DIM, generator=generator) for h in (2, kv_heads, kv_heads, 2))
    for mod in (
        lambda b, h, q, kv: (q >= kv) | (h == 1),
        lambda b, h, q, kv: (q >= kv) | (b == 0),
        lambda b, h, q, kv: (q >= kv) | (b + h == 1),
    ):
        work = work_of(mod, [(0, 32)], [(0, 32)], block=16, batch=2, heads=2)
        state = forward(kernel_named(name), q, k, v, work)
        grads = backward(kernel_named(name), q, k, v, state.out, state.lse, grad, None, work)
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out, lse, _ = dense_attention(*leaves, Scoring(scale=work.scale, mask=work.mask, mask_captured=work.mask_captured))
        wanted = [out, lse, *torch.autograd.grad(out, leaves, grad)]
        for got, want in zip((state.out, state.lse, grads.q, grads.k, grads.v), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("delta", [plain_delta, row_delta])
def test_delta_is_in_the_dtype_of_lse(delta: Callable[..., Tensor]) -> None:
    out, grad = torch.tensor([[1.0, 2.0, 257.0]]), torch.tensor([[4.0, 5.0, 255.0]])
    """Products of half-precision numbers are exact."""
    for dtype, wide in ((torch.float16, FP32), (FP32, FP32), (FP64, FP64)):
        for lse in (None, torch.tensor([10.0], dtype=wide)):
            got = delta(out.to(dtype), grad.to(dtype), lse)
            assert got.dtype == wide and got.tolist() == [65549.0 - (0 if lse is None else 10)]


@pytest.mark.parametrize(("max_scores", "final"), [(False, False), (True, False), (False, True)])
def test_half_precision_results_of_an_operator_become_a_wide_state(max_scores: bool, final: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators on CUDA round out to the dtype of q."""
    q, k, v, _ = tensors(BF16)
    kernel, real = kernel_named("flash"), aten.operator("flash", q.device)

    class Rounding:
        def forward(self, *args: Any, **how: Any) -> tuple[Tensor, Tensor]:
            out, lse = real.forward(*args, **how)
            return out.bfloat16(), lse

    monkeypatch.setattr(aten, "operator", lambda backend, device: Rounding())
    for mask in (full, causal):
        state = forward(kernel, q, k, v, parts(mask), final=final, max_scores=max_scores)
        assert state.out.dtype == (BF16 if final else FP32)
        before = State(out=torch.zeros(*q.shape[:3], DIM), lse=torch.full(q.shape[:3], -torch.inf))
        merged = forward(kernel, q, k, v, parts(mask), state=before, final=False)
        assert merged.out.dtype == FP32 and torch.equal(merged.out.bfloat16(), state.out.bfloat16())


def scored(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s + BIAS[(q - kv) % 9]


def narrow(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (s * 0.5).half()


def by_head(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return 0.25 * h


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("score", [scored, narrow, by_head])
@pytest.mark.parametrize("mask", [ls.full(), ls.mask_mod(window)], ids=["full", "window"])
def test_scores_may_be_of_another_dtype_or_of_fewer_dims(mask: Any, score: Any, invariant: bool) -> None:
    """Results stay in float32: scores of float64 are rounded to it, and those of float16 converted."""
    q, k, v, grad = tensors(FP32, VALUE_DIM)
    results = []
    for kernel in ("dense", "cpu"):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        if invariant and kernel == "cpu":
            with ls.invariant():
                out, lse = ls.attention(*leaves, mask=mask, score_mod=score, kernel=kernel, return_lse=True)
        else:
            out, lse = ls.attention(*leaves, mask=mask, score_mod=score, kernel=kernel, return_lse=True)
        assert out.dtype == lse.dtype == FP32
        loss = (out * grad).sum() + lse.sum()
        results.append([out, lse, *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-3 if score is narrow else 2e-5)


def by_batch_row(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s + b * (q - kv).abs()


@pytest.mark.parametrize(
    ("mask", "score"),
    [(None, None), (causal, None), (early_keys, None), (None, by_head), (causal, scored), (None, by_batch_row)],
)
def test_dense_results_are_float32_and_max_scores_are_constants(mask: Any, score: Any) -> None:
    """Also with a sink and a score of float64. Scores and masks that no query, or no key, changes count for all of them."""
    q, k, v, grad = (t.requires_grad_() for t in tensors(BF16, VALUE_DIM))
    sink = torch.linspace(-1, 2, HEADS, dtype=FP64)
    traced = [None if mod is None else trace(mod, kind) for mod, kind in ((mask, "mask"), (score, "score"))]  # type: ignore[arg-type]
    programs = [None if t is None else t.program for t in traced]
    captured = [() if t is None else t.captured() for t in traced]
    scoring = Scoring(scale=0.3, mask=programs[0], mask_captured=captured[0], score=programs[1], score_captured=captured[1])
    out, lse, largest = dense_attention(q, k, v, scoring, sink=sink)
    assert (out.dtype, lse.dtype, largest.dtype) == (BF16, FP32, FP32) and not largest.requires_grad
    b, h, q_pos, kv_pos = (
        torch.arange(n).view([-1 if i == dim else 1 for i in range(4)]) for dim, n in enumerate((BATCH, HEADS, QUERIES, KEYS))
    )
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT * 0.3
    scores = scores if score is None else score(scores, b, h, q_pos, kv_pos).expand_as(scores)
    scores = scores if mask is None else torch.where(mask(b, h, q_pos, kv_pos), scores, -torch.inf)
    total = torch.logaddexp(scores.logsumexp(-1), sink[:, None])
    want = (scores - total[..., None]).exp() @ v.double().repeat_interleave(2, 1)
    for got, right, atol in ((lse, total, 1e-5), (largest, scores.amax(-1), 1e-5), (out, want, 1e-2)):
        torch.testing.assert_close(got.double(), right.double(), rtol=0, atol=atol)
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(out, v, grad))
