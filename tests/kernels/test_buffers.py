"""Result tensors of GPU kernels: shapes, dtypes, order in memory and first contents."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from longspan._kernels.gpu import buffers
from longspan._kernels.protocol import AttentionInputs, Grads, State
from longspan._kernels.tiling import Tiling

INF = float("inf")


def state(*, max_scores: bool) -> State:
    """lse and max scores as views whose heads come last in memory."""
    lse, top = torch.randn(2, 2, 5, 3).mT
    return State(out=torch.randn(2, 3, 5, 7), lse=lse, max_scores=top if max_scores else None)


def test_usable_states_have_contiguous_rows() -> None:
    old = state(max_scores=True)
    made = buffers.usable(old, max_scores=True)
    assert old.max_scores is not None and made.max_scores is not None and not old.lse.is_contiguous()
    assert made.out is old.out and made.lse.is_contiguous() and made.max_scores.is_contiguous()
    assert torch.equal(made.lse, old.lse) and torch.equal(made.max_scores, old.max_scores)
    assert buffers.usable(old, max_scores=False).max_scores is None
    begun = buffers.usable(state(max_scores=False), max_scores=True).max_scores
    assert begun is not None and begun.eq(-INF).all() and begun.shape == (2, 3, 5)


@pytest.mark.parametrize("max_scores", [False, True])
def test_empty_states_have_the_order_of_the_query_in_memory(max_scores: bool) -> None:
    q = torch.empty(2, 5, 3, 8, dtype=torch.bfloat16).transpose(1, 2)
    made = buffers.empty_state(q, 7, torch.float16, max_scores=max_scores)
    assert made.out.shape == (2, 3, 5, 7) and made.out.dtype == torch.float16 and made.out.transpose(1, 2).is_contiguous()
    rows = [made.lse, *([] if made.max_scores is None else [made.max_scores])]
    assert len(rows) == 1 + max_scores and all(r.shape == (2, 3, 5) and r.dtype == torch.float32 and r.is_contiguous() for r in rows)
    assert buffers.empty_out(q.contiguous(), 7, torch.float16).is_contiguous()


@pytest.mark.parametrize(("new_max", "old_max"), [(False, False), (False, True), (True, False), (True, True)])
def test_rows_in_no_tile_keep_the_former_state(new_max: bool, old_max: bool) -> None:
    old, made = state(max_scores=old_max), state(max_scores=new_max)
    buffers.prefill(made, old)
    assert torch.equal(made.out, old.out) and torch.equal(made.lse, old.lse)
    if made.max_scores is not None:
        assert torch.equal(made.max_scores, torch.full_like(old.lse, -INF) if old.max_scores is None else old.max_scores)
    buffers.prefill(made, None)
    assert not made.out.any() and made.lse.eq(-INF).all() and (made.max_scores is None or made.max_scores.eq(-INF).all())


@pytest.mark.parametrize("wide", [False, True])
def test_empty_gradients(wide: bool) -> None:
    q, k, v = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((2, 6, 5, 8), (2, 3, 9, 8), (2, 3, 9, 7)))
    work: Any = SimpleNamespace(score_captured=[torch.ones(4, dtype=torch.float16), torch.ones(3, 2), torch.ones(1)])
    made = buffers.empty_grads(AttentionInputs(q=q, k=k, v=v), work, [True, False, True], wide=wide)
    for grad, x in zip((made.q, made.k, made.v), (q, k, v), strict=True):
        assert grad.shape == x.shape and grad.dtype == (torch.float32 if wide else torch.bfloat16) and grad.is_contiguous()
    first, none, last = made.captured
    assert none is None and first is not None and last is not None
    assert [first.tolist(), last.tolist()] == [[0.0] * 4, [0.0]] and first.dtype == last.dtype == torch.float32


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("gaps", ["", "q", "kv"])
def test_gradients_of_uncovered_rows_are_zero(gaps: str, into: bool) -> None:
    def tiling(length: int, *, gap: bool) -> Tiling:
        row = torch.tensor([0])
        return Tiling(length=length, block=length, row=row, pos=row, count=torch.tensor([length - gap]))

    work: Any = SimpleNamespace(q_tiles=tiling(5, gap=gaps == "q"), kv_tiles=tiling(9, gap=gaps == "kv"))
    grads = Grads(q=torch.ones(1, 2, 5, 8), k=torch.ones(1, 2, 9, 8), v=torch.ones(1, 2, 9, 7), captured=[])
    buffers.zero_uncovered(grads, work, into=into)
    assert [bool(x.any()) for x in (grads.q, grads.k, grads.v)] == [gaps != "q" or into, gaps != "kv", gaps != "kv"]
