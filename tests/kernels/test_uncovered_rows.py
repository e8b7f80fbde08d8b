"""Rows that no tile contains: out is 0, lse −inf, and so are gradients, whatever the memory of the results held."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.shards import work_of

from longspan._kernels.gpu.buffers import zero_uncovered
from longspan._kernels.protocol import AttentionInputs, Grads, Work
from longspan._kernels.tiling import Tiling
from longspan._kernels.triton.kernel import TritonKernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def shifted(tiling: Tiling, rows: int, after: int) -> Tiling:
    """The tiling with rows before and after it that are in no tile."""
    assert tiling.row is not None
    return Tiling(length=rows + tiling.length + after, block=tiling.block, row=tiling.row + rows, pos=tiling.pos, count=tiling.count)


def work(q_rows: tuple[int, int], kv_rows: tuple[int, int]) -> Work:
    whole = work_of(lambda b, h, q, kv: q >= kv, ((0, 20),), ((0, 20),), block=16)
    return replace(whole, q_tiles=shifted(whole.q_tiles, *q_rows), kv_tiles=shifted(whole.kv_tiles, *kv_rows))


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("rows", [(0, 0), (4, 3)], ids=str)
def test_rows_in_no_tile_have_no_result(rows: tuple[int, int], final: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def filled(*args: Any, **options: Any) -> Tensor:
        made = empty(*args, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 16, generator=generator).to(DEVICE) for n in (20 + sum(rows), 23, 23))
    inputs = AttentionInputs(q=q, k=k, v=v)
    monkeypatch.setattr(torch, "empty", filled)
    state = TritonKernel().forward(inputs, work(rows, (2, 1)), state=None, final=final, max_scores=False)
    covered = slice(rows[0], rows[0] + 20)
    scores = (q[:, :, covered] @ k[:, :, 2:22].mT * 0.3).masked_fill(torch.ones(20, 20, device=DEVICE).triu(1).bool(), -torch.inf)
    want, lse = torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf, device=DEVICE)
    want[:, :, covered], lse[:, :, covered] = scores.softmax(-1) @ v[:, :, 2:22], scores.logsumexp(-1)
    torch.testing.assert_close(state.out, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.lse, lse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize(("q_rows", "kv_rows"), [((0, 0), (0, 0)), ((1, 0), (0, 0)), ((0, 0), (0, 1)), ((2, 0), (1, 0))], ids=str)
def test_gradients_are_zeroed_where_a_tiling_leaves_rows_out(q_rows: tuple[int, int], kv_rows: tuple[int, int], into: bool) -> None:
    grads = Grads(q=torch.ones(3), k=torch.ones(3), v=torch.ones(3), captured=[])
    zero_uncovered(grads, work(q_rows, kv_rows), into=into)
    assert bool(grads.q.any()) == (into or sum(q_rows) == 0)
    assert bool(grads.k.any()) == bool(grads.v.any()) == (sum(kv_rows) == 0)
