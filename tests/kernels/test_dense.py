"""The definition of right, where rows see nothing."""

from __future__ import annotations

import torch
from torch import Tensor

import longspan as ls
from longspan._kernels.dense import Scoring, dense_attention
from longspan._masks.tracing import trace


def test_a_sink_of_minus_infinity_and_an_empty_row_give_zeros_and_no_nan() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 11, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sink = torch.tensor([-torch.inf, 0.3, -torch.inf], dtype=torch.float64, requires_grad=True)

    def late(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q > kv + 4

    out, lse = ls.attention(q, k, v, mask=late, sink=sink, return_lse=True, kernel="dense")
    assert bool((out[:, :, :5] == 0).all())
    assert bool((lse[:, ::2, :5] == -torch.inf).all()) and torch.allclose(lse[:, 1, :5], sink[1].detach())
    plain, plain_lse = ls.attention(q, k, v, mask=late, return_lse=True, kernel="dense")
    torch.testing.assert_close(out[:, ::2], plain[:, ::2])
    torch.testing.assert_close(lse[:, ::2], plain_lse[:, ::2])
    grads = torch.autograd.grad(out.square().sum() + lse[:, :, 6:].sum(), [q, k, v, sink])
    assert all(bool(g.isfinite().all()) for g in grads)
    assert float(grads[3][0]) == float(grads[3][2]) == 0.0 and float(grads[3][1]) != 0.0


def test_positions_of_queries_are_moved_to_their_device() -> None:
    q, k, v = (torch.empty(2, 3, n, d, device="meta") for n, d in ((5, 8), (11, 8), (11, 4)))
    score = trace(lambda s, b, h, q, kv: s - (q - kv).abs(), "score").program
    out, lse, _ = dense_attention(q, k, v, Scoring(scale=0.3, score=score), q_pos=torch.tensor([3, 9, 4, 0, 7]))
    assert out.is_meta and out.shape == (2, 3, 5, 4) and lse.shape == (2, 3, 5)


def test_rows_of_a_batch_may_have_positions_of_their_own() -> None:
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 11, 8)
    positions = torch.tensor([[3, 9, 4, 0, 7], [10, 1, 2, 6, 5]])
    scoring = Scoring(scale=0.3, mask=trace(lambda b, h, q, kv: q >= kv, "mask").program)
    got = dense_attention(q, k, k, scoring, q_pos=positions)
    for row in range(2):
        want = dense_attention(q[row : row + 1], k[row : row + 1], k[row : row + 1], scoring, q_pos=positions[row])
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x[row], y[0])


def test_rows_without_keys_see_nothing() -> None:
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 0, 8), torch.randn(2, 3, 0, 4)
    out, lse, largest = dense_attention(q, k, v, Scoring(scale=0.3))
    assert out.shape == (2, 3, 5, 4) and not out.any()
    assert all(t.shape == (2, 3, 5) and bool((t == -torch.inf).all()) for t in (lse, largest))
