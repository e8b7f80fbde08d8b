"""Rows that are complete before the last stage: a kernel may write them to where the result will be as soon as they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.shards import Segments, work_of
from tests.kernels.test_hopper import on_hopper

import longspan as ls
from longspan.kernels.hopper import HopperKernel
from longspan.kernels.hopper.kernel import TritonKernel
from longspan.kernels.protocol import State, Tiling, Work
from longspan.testing import oracle

QUERIES: Segments = ((0, 300), (900, 212))
STAGES: tuple[Segments, ...] = (((0, 300), (900, 212)), ((300, 200),), ((500, 400),))


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def stages(block: int) -> list[Work]:
    """Stages of a causal shard: its first 300 rows are complete with the first one, the others with the last."""
    works = [work_of(causal, QUERIES, keys, block=block) for keys in STAGES]
    tiles, early = works[0].q_tiles, -(-300 // block)
    complete = torch.arange(tiles.tiles) < early
    return [replace(work, q_tiles=tiles, complete=None if i == 1 else complete) for i, work in enumerate(works)]


def shards(t: Tensor, segments: Segments) -> Tensor:
    return torch.cat([t[:, :, start : start + length] for start, length in segments], 2)


def test_rows_of_tiles() -> None:
    tiling = Tiling(length=9, block=4, row=torch.tensor([5, 0, 4]), pos=torch.tensor([0, 40, 80]), count=torch.tensor([4, 4, 1]))
    assert tiling.rows_of(torch.tensor([True, False, True])).tolist() == [5, 6, 7, 8, 4]
    assert Tiling(length=10, block=4).rows_of(torch.tensor([False, True, True])).tolist() == [4, 5, 6, 7, 8, 9]
    assert tiling.rows_of(torch.zeros(3, dtype=torch.bool)).tolist() == []


def test_a_stage_that_falls_to_triton_keeps_and_writes_what_is_done() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 1112, 16) for h in (3, 1, 1))
    works, kernel = stages(32), HopperKernel()
    mine = shards(q, QUERIES)
    states: list[State | None] = [None, None]
    for i, work in enumerate(works):
        given = (mine, shards(k, STAGES[i]), shards(v, STAGES[i]), work)
        states[0] = TritonKernel().forward(*given, state=states[0], final=i == 2, peak=False)
        states[1] = kernel._forward_by_triton(*given, states[1], final=i == 2, peak=False)
        if i == 0 and states[1] is not None:  # as a stage of its own would have left it: what is done is not in `out`
            states[1].done = torch.full_like(mine, torch.nan)
            states[1].done[:, :, :300] = states[1].out[:, :, :300]
            states[1].out[:, :, :300] = torch.nan
    want, got = states
    assert want is not None and got is not None and got.done is None
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)


def test_a_stage_that_falls_to_triton_writes_what_it_completes() -> None:
    torch.manual_seed(0)
    q, k, v = (shards(torch.randn(1, h, 1112, 16), QUERIES) for h in (3, 1, 1))
    work = stages(32)[0]
    state = State(out=torch.zeros(q.shape), lse=torch.full(q.shape[:3], -torch.inf), done=torch.full_like(q, torch.nan))
    got = HopperKernel()._forward_by_triton(q, k, v, work, state, final=False, peak=False)
    assert got.done is not None and torch.equal(got.done[:, :, :300], got.out[:, :, :300]) and got.done[:, :, 300:].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "sink", "strided"), [(128, False, False), (128, True, True), (64, False, True), (256, True, False)])
def test_rows_done_early_have_the_bits_of_those_that_wait(dim: int, sink: bool, strided: bool) -> None:
    on_hopper()
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 1112, dim, device="cuda", dtype=torch.bfloat16) for h in (6, 2, 2))
    mine = shards(q, QUERIES)
    if strided:
        mine = mine.transpose(1, 2).contiguous().transpose(1, 2)
    results = []
    for early in (True, False):
        state = None
        if sink:
            state = State(out=torch.zeros(mine.shape, device="cuda"), lse=torch.zeros(mine.shape[:3], device="cuda"))
        for i, work in enumerate(stages(128)):
            given = work if early else replace(work, complete=None)
            before = None if state is None else state.done
            state = HopperKernel().forward(
                mine, shards(k, STAGES[i]), shards(v, STAGES[i]), given, state=state, final=i == 2, peak=False
            )  # fmt: skip
            if early and i < 2:
                assert state.done is not None and (before is None or state.done is before)
                state.out[:, :, :300] = torch.nan  # nobody reads them any more
        results.append(state)
    got, want = results
    assert got.done is None and got.out.stride() == want.out.stride() == mine.stride()
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)
    if not sink:
        right, dense = (shards(oracle(q, k, v, mask=ls.causal(), scale=0.3, dtype=d), QUERIES) for d in (torch.float64, torch.bfloat16))
        assert float((got.out.double() - right).norm()) <= 1.1 * float((dense.double() - right).norm())
