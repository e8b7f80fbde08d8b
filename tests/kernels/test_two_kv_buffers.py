"""Local and received KV in two buffers: the Hopper kernels read both without a copy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.shards import Segments, work_of
from tests.kernels.test_hopper import on_hopper

import longspan as ls
from longspan._kernels.hopper import HopperKernel
from longspan._kernels.hopper.kernel import _in_one_buffer, _without_empty_buffer
from longspan._kernels.protocol import AttentionInputs, BackwardInputs, Grads, State, Work
from longspan._kernels.tiling import Tiling
from longspan._kernels.triton import TritonKernel
from longspan._masks.joint import joint_of
from longspan._masks.tracing import trace

HOPPER = HopperKernel(fallback=TritonKernel())

QUERIES: Segments = ((700, 300), (1500, 212))
LOCAL: Segments = ((700, 300), (1500, 212))  # their last tiles have 44 and 84 keys
RECEIVED: Segments = ((0, 700), (1000, 333))


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def softcap(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return 20 * torch.tanh(s / 20)


def tensors(
    dim: int, device: str, dtype: torch.dtype = torch.bfloat16, *, local: Segments = LOCAL, received: Segments = RECEIVED
) -> tuple[Any, ...]:
    """(q, k, v, number of local KV rows); all sizes are different."""
    torch.manual_seed(0)
    lengths = sum(n for _, n in QUERIES), sum(n for _, n in local), sum(n for _, n in received)
    q, k, v = (torch.randn(2, h, n, dim, device=device, dtype=dtype) for h, n in ((6, lengths[0]), *((3, lengths[1] + lengths[2]),) * 2))
    return q, k, v, lengths[1]


def split(q: Tensor, k: Tensor, v: Tensor, rows: int) -> AttentionInputs:
    """The inputs as the engine passes them: local KV in [B, S, G, D] memory order, received KV in a buffer of its own."""
    local_k, local_v = (t[:, :, :rows].transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
    return AttentionInputs(q=q, k=k[:, :, rows:].contiguous(), v=v[:, :, rows:].contiguous(), local_kv=(local_k, local_v))


def final(inputs: AttentionInputs, work: Work) -> State:
    return HOPPER.forward(inputs, work, state=None, final=True, max_scores=False)


def test_kv_is_copied_into_one_buffer_only_where_both_hold_rows() -> None:
    q, k, v, rows = tensors(8, "cpu", torch.float32)
    two = split(q, k, v, rows)
    one = _in_one_buffer(two)
    assert torch.equal(one.k, k) and torch.equal(one.v, v) and one.local_kv is None
    assert _without_empty_buffer(two) is two
    only_local = _without_empty_buffer(AttentionInputs(q=q, k=k[:, :, :0], v=v[:, :, :0], local_kv=(k, v)))
    assert only_local.k is k and only_local.v is v and only_local.local_kv is None
    only_received = _without_empty_buffer(AttentionInputs(q=q, k=k, v=v, local_kv=(k[:, :, :0], v[:, :, :0])))
    assert only_received.k is k and only_received.local_kv is None


@pytest.mark.gpu
@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.bfloat16), (96, torch.float16), (128, torch.bfloat16), (256, torch.bfloat16)])
def test_two_buffers_give_the_bits_of_one(dim: int, dtype: torch.dtype, scored: bool) -> None:
    on_hopper()
    q, k, v, rows = tensors(dim, "cuda", dtype)
    work = work_of(causal, QUERIES, (*LOCAL, *RECEIVED), block=128)
    if scored:
        score = trace(softcap, "score")
        work = replace(work, score=score.program, joint=joint_of(score.program))
    buffers = [AttentionInputs(q=q, k=k, v=v), split(q, k, v, rows)]
    one, two = (final(inputs, work) for inputs in buffers)
    assert torch.equal(one.out, two.out) and torch.equal(one.lse, two.lse)
    grad = torch.randn_like(one.out)
    grads: dict[bool, list[Grads]] = {}
    for deterministic in (True, False):
        torch.use_deterministic_algorithms(deterministic)
        try:
            grads[deterministic] = []
            for inputs in buffers:
                into = Grads(
                    q=torch.zeros(q.shape, device="cuda"), k=torch.full(k.shape, torch.nan, device="cuda"),
                    v=torch.full(v.shape, torch.nan, device="cuda"), captured=[],
                )  # fmt: skip
                HOPPER.backward(BackwardInputs(inputs=inputs, out=one.out, lse=one.lse, grad_out=grad), work, wide=True, into=into)
                grads[deterministic].append(into)
        finally:
            torch.use_deterministic_algorithms(False)
    for a, b in grads.values():
        assert torch.equal(a.k, b.k) and torch.equal(a.v, b.v)
    assert torch.equal(grads[True][0].q, grads[True][1].q)
    a, b = (g.q.double() for g in grads[False])
    assert float((a - b).norm()) <= 1e-5 * float(a.norm())  # sums in any order
    for t in (grads[True][0].k, grads[True][0].v):
        assert bool(torch.isfinite(t).all())


@pytest.mark.gpu
@pytest.mark.parametrize("describable", [True, False])
def test_a_plain_sequence_in_two_buffers(describable: bool) -> None:
    on_hopper()
    q, k, v = (torch.randn(1, h, 700, 128, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2))
    tiles = Tiling(length=700, block=128)
    mask = trace(causal, "mask")
    work = Work(table=ls.causal().block_table(700, block=128), q_tiles=tiles, kv_tiles=tiles, scale=0.1, mask=mask.program)
    two_buffers = split(q, k, v, 256)
    if not describable:  # rows that do not start at multiples of 16 bytes: TMA reads a copy
        local_k, local_v = (torch.nn.functional.pad(t, (1, 0))[..., 1:] for t in (k[:, :, :256], v[:, :, :256]))
        two_buffers = replace(two_buffers, local_kv=(local_k, local_v))
    one, two = (final(inputs, work) for inputs in (AttentionInputs(q=q, k=k, v=v), two_buffers))
    assert torch.equal(one.out, two.out) and torch.equal(one.lse, two.lse)


@pytest.mark.gpu
@pytest.mark.parametrize("empty", ["local", "received"])
def test_one_of_the_buffers_may_be_empty(empty: str) -> None:
    on_hopper()
    local, received = ((), RECEIVED) if empty == "local" else (LOCAL, ())
    q, k, v, rows = tensors(128, "cuda", local=local, received=received)
    work = work_of(causal, QUERIES, (*local, *received), block=128)
    one, two = (final(inputs, work) for inputs in (AttentionInputs(q=q, k=k, v=v), split(q, k, v, rows)))
    assert torch.equal(one.out, two.out) and torch.equal(one.lse, two.lse)


@pytest.mark.gpu
def test_uncovered_rows_use_the_fallback_with_both_buffers() -> None:
    on_hopper()
    q, k, v, rows = tensors(128, "cuda")
    work = work_of(causal, QUERIES, (*LOCAL, *RECEIVED), block=128)
    tiles = work.kv_tiles
    k, v = (torch.cat([t, torch.full_like(t[:, :, :5], torch.nan)], 2) for t in (k, v))  # five rows that belong to no tile
    work = replace(work, kv_tiles=replace(tiles, length=tiles.length + 5))
    one, two = (final(inputs, work) for inputs in (AttentionInputs(q=q, k=k, v=v), split(q, k, v, rows)))
    assert torch.equal(one.out, two.out) and bool(torch.isfinite(two.out).all())
