"""Row terms of backward passes of the triton kernel in any strides: the bits are those of contiguous ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.calls import backward, forward
from tests.kernels.shards import work_of

from longspan._kernels.protocol import AttentionInputs, Grads, Selection, Work
from longspan._kernels.triton import TritonKernel, gathered_call
from longspan._kernels.triton.gathered_call import without_repeats

KERNEL = TritonKernel()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS, QUERIES, KEYS, DIM = 1, 4, 5, 11, 16


def strided(t: Tensor) -> Tensor:
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v, grad_out."""
    torch.manual_seed(2)
    shapes = ((HEADS, QUERIES), (2, KEYS), (2, KEYS), (HEADS, QUERIES))
    return [torch.randn(BATCH, *shape, DIM, device=DEVICE).to(dtype) for shape in shapes]


def plain_work() -> Work:
    return work_of(lambda b, h, q, kv: q + 4 >= kv, [(0, QUERIES)], [(0, KEYS)], block=64)


def gathered_work(q: Tensor, k: Tensor) -> Work:
    """Single keys, two choices of heads, of which some repeat."""
    indices = torch.randint(-1, KEYS, (BATCH, 2, QUERIES, 3), dtype=torch.int32, device=DEVICE)
    selection = Selection(indices=indices, granularity=1, q_granularity=1, heads_per_choice=2)
    return KERNEL.select(AttentionInputs(q=q, k=k, v=k), plain_work(), selection)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("given", ["grad_lse", "one grad_lse", "delta"])
def test_row_terms_may_have_any_strides(given: str, gathered: bool) -> None:
    q, k, v, grad = tensors()
    work = gathered_work(q, k) if gathered else plain_work()
    state = forward(KERNEL, q, k, v, work)
    grad_lse = torch.randn(BATCH, HEADS, QUERIES, device=DEVICE) if given == "grad_lse" else None
    if given == "one grad_lse":
        grad_lse = torch.tensor(0.75, device=DEVICE).expand(BATCH, HEADS, QUERIES)
    delta = KERNEL.delta(state.out, grad, None) if given == "delta" else None
    want, got = (
        backward(
            KERNEL, q, k, v, state.out, of(state.lse), grad, None if grad_lse is None else of(grad_lse), work, wide=not gathered,
            delta=None if delta is None else of(delta),
        )
        for of in (Tensor.contiguous, strided if given != "one grad_lse" else lambda t: t)
    )  # fmt: skip
    for x, y in zip((got.q, got.k, got.v), (want.q, want.k, want.v), strict=True):
        if gathered:  # dk and dv are sums by atomic additions
            torch.testing.assert_close(x, y)
        else:
            assert torch.equal(x, y)


def test_gradients_added_to_others_take_strided_delta() -> None:
    q, k, v, grad = tensors()
    work, state = plain_work(), forward(KERNEL, q, k, v, plain_work())
    results = []
    for of in (Tensor.contiguous, strided):
        into = Grads(q=torch.ones_like(q), k=torch.zeros_like(k), v=torch.zeros_like(v), captured=[])
        delta = of(KERNEL.delta(state.out, grad, None))
        assert backward(KERNEL, q, k, v, state.out, of(state.lse), grad, None, work, delta=delta, into=into) is into
        results.append(into)
    alone = backward(KERNEL, q, k, v, state.out, state.lse, grad, None, work)
    assert all(map(torch.equal, (results[0].q, results[0].k, results[0].v), (results[1].q, results[1].k, results[1].v)))
    torch.testing.assert_close(results[0].q, alone.q + 1)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_results_keep_their_dtype(dtype: torch.dtype, gathered: bool) -> None:
    """Also in the interpreter, which computes bfloat16 in float32."""
    q, k, v, grad = tensors(dtype)
    work = gathered_work(q, k) if gathered else plain_work()
    state = forward(KERNEL, q, k, v, work)
    assert (state.out.dtype, state.lse.dtype) == (dtype, torch.float32)
    grads = backward(KERNEL, q, k, v, state.out, state.lse, grad, None, work, wide=False)
    assert {g.dtype for g in (grads.q, grads.k, grads.v)} == {dtype}
    if not gathered:
        wide = backward(KERNEL, q, k, v, state.out, state.lse, grad, None, work, wide=True)
        assert {g.dtype for g in (wide.q, wide.k, wide.v)} == {torch.float32}


def test_repeated_entries_are_dropped_from_strided_lists() -> None:
    indices = torch.tensor([[4, 1, 4, 3, 1], [2, 2, 2, 2, 7], [-1, 5, 6, -1, 5]], dtype=torch.int32, device=DEVICE)
    for given in (indices, indices.T.contiguous().T):
        got = without_repeats(given, 9).tolist()
        assert [sorted(i for i in row if i >= 0) for row in got] == [[1, 3, 4], [2, 7], [5, 6]]


@pytest.mark.parametrize(("rows", "ctas"), [(1, 1), (1056, 1056), (1057, 1056), (5000, 1056)])
def test_long_lists_share_the_bits_of_1056_ctas(rows: int, ctas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CTA has a bit per block of keys; 70 blocks are three words."""
    launched: list[Any] = []
    monkeypatch.setattr(gathered_call, "layout_launch", lambda *args: launched.append(args) or (lambda tensors, per_call: None))
    without_repeats(torch.zeros(rows, 5, dtype=torch.int32), 70)
    ((_, tensors, constants, count),) = launched
    assert count == constants["ctas"] == ctas and tensors["bits_ptr"].shape == (ctas, 3) and not tensors["bits_ptr"].any()
    assert (constants["rows"], constants["words"], constants["K"], constants["KP"]) == (rows, 3, 5, 8)
