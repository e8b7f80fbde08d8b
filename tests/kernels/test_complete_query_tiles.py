"""Query tiles whose last visible KV arrives before the last stage: the Hopper kernel writes their output to the final tensor at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.calls import forward
from tests.kernels.shards import Segments, work_of
from tests.kernels.test_hopper import on_hopper
from tests.kernels.test_split_kv import record_splits

import longspan as ls
from longspan._kernels.hopper import HopperKernel
from longspan._kernels.hopper.kernel import HopperState
from longspan._kernels.protocol import AttentionInputs, State, Work
from longspan._kernels.tiling import Tiling
from longspan._kernels.triton import TritonKernel
from longspan.testing import oracle

HOPPER = HopperKernel(fallback=TritonKernel())

QUERIES: Segments = ((0, 300), (900, 212))
STAGES: tuple[Segments, ...] = (((0, 300), (900, 212)), ((300, 200),), ((500, 400),))
LATE: Segments = ((3000, 300), (7000, 212))
LONG: tuple[Segments, ...] = (((0, 3300),), ((3300, 3912),))


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def staged(queries: Segments, keys: tuple[Segments, ...], *, block: int) -> list[Work]:
    """The stages of a causal shard: its first 300 rows are complete after the first stage, the others after the last."""
    works = [work_of(causal, queries, part, block=block) for part in keys]
    tiles = works[0].q_tiles
    complete = torch.arange(tiles.tiles) < -(-300 // block)
    return [replace(work, q_tiles=tiles, complete_q_tiles=None if i else complete) for i, work in enumerate(works)]


def shards(t: Tensor, segments: Segments) -> Tensor:
    return torch.cat([t[:, :, start : start + length] for start, length in segments], 2)


def test_rows_of_selected_tiles() -> None:
    tiling = Tiling(length=9, block=4, row=torch.tensor([5, 0, 4]), pos=torch.tensor([0, 40, 80]), count=torch.tensor([4, 4, 1]))
    assert tiling.rows_of(torch.tensor([True, False, True])).tolist() == [5, 6, 7, 8, 4]
    assert Tiling(length=10, block=4).rows_of(torch.tensor([False, True, True])).tolist() == [4, 5, 6, 7, 8, 9]
    assert tiling.rows_of(torch.zeros(3, dtype=torch.bool)).tolist() == []


def test_stages_by_the_fallback_keep_complete_rows() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 1112, 16) for h in (3, 1, 1))
    local_q = shards(q, QUERIES)
    states: list[State | None] = [None, None]
    for i, work in enumerate(staged(QUERIES, STAGES, block=32)):
        inputs = AttentionInputs(q=local_q, k=shards(k, STAGES[i]), v=shards(v, STAGES[i]))
        states[0] = TritonKernel().forward(inputs, work, state=states[0], final=i == 2, max_scores=False)
        states[1] = HOPPER._forward_by_fallback(inputs, work, states[1], final=i == 2, max_scores=False)
        if i < 2:
            assert isinstance(states[1], HopperState) and states[1].completed_out is not None
            states[1].out[:, :, :300] = torch.nan  # rows that no later step may read
    want, got = states
    assert want is not None and got is not None and not isinstance(got, HopperState)
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)


@pytest.mark.parametrize("reason", ["max scores", "uncovered rows", "head dim not innermost"])
def test_complete_rows_stay_in_the_running_state_where_they_cannot_be_final(reason: str) -> None:
    q, k, v = (torch.randn(1, h, n, 16) for h, n in ((3, 512), (1, 512), (1, 512)))
    work = staged(QUERIES, STAGES, block=32)[0]
    if reason == "uncovered rows":
        q = torch.randn(1, 3, 515, 16)
        work = replace(work, q_tiles=replace(work.q_tiles, length=515))
    if reason == "head dim not innermost":
        q = q.mT.contiguous().mT
    inputs = AttentionInputs(q=q, k=k, v=v)
    state = HOPPER._forward_by_fallback(inputs, work, None, final=False, max_scores=reason == "max scores")
    assert isinstance(state, HopperState) and state.completed_out is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dim", "dtype", "sink", "order", "block", "split_kv"),
    [
        (128, torch.bfloat16, False, "by head", 128, False),
        (128, torch.bfloat16, True, "by token", 128, True),
        (64, torch.float16, False, "by token", 256, True),
        (256, torch.bfloat16, True, "by head", 128, False),
        (64, torch.bfloat16, True, "head dim not innermost", 128, False),
    ],
)
def test_rows_written_early_have_the_bits_of_rows_written_last(
    monkeypatch: pytest.MonkeyPatch, dim: int, dtype: torch.dtype, sink: bool, order: str, block: int, split_kv: bool
) -> None:
    on_hopper()
    splits = record_splits(monkeypatch)
    torch.manual_seed(0)
    queries, keys = (LATE, LONG) if split_kv else (QUERIES, STAGES)
    q, k, v = (torch.randn(2, h, 7212 if split_kv else 1112, dim, device="cuda", dtype=dtype) for h in (6, 2, 2))
    local_q, inner_dim_strided = shards(q, queries), order == "head dim not innermost"
    if order == "by token":
        local_q = local_q.transpose(1, 2).contiguous().transpose(1, 2)
    if inner_dim_strided:
        local_q = local_q.mT.contiguous().mT
    results = []
    for early in (True, False):
        state: State | None = None
        if sink:
            state = State(out=torch.zeros(local_q.shape, device="cuda"), lse=torch.zeros(local_q.shape[:3], device="cuda"))
        for i, work in enumerate(staged(queries, keys, block=block)):
            last = i == len(keys) - 1
            work = work if early else replace(work, complete_q_tiles=None)
            before = state.completed_out if isinstance(state, HopperState) else None
            state = forward(HOPPER, local_q, shards(k, keys[i]), shards(v, keys[i]), work, state=state, final=last)
            if early and not last and not inner_dim_strided:
                assert isinstance(state, HopperState)
                assert state.completed_out is not None and (before is None or state.completed_out is before)
                state.out[:, :, :300] = torch.nan  # rows that no later step may read
        results.append(state)
    got, want = results
    assert got is not None and want is not None and all(bool(split.split_items) == split_kv for split in splits)
    assert not isinstance(got, HopperState) and got.out.stride() == want.out.stride() == local_q.stride()
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)
    if not sink:
        right, dense = (shards(oracle(q, k, v, mask=ls.causal(), scale=0.3, dtype=d), queries) for d in (torch.float64, dtype))
        assert float((got.out.double() - right).norm()) <= 1.1 * float((dense.double() - right).norm())
