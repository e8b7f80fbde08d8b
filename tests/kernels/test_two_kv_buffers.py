"""Keys and values of which the first rows lie apart: the Hopper kernels read them from both places."""

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
from longspan._kernels.hopper.kernel import _in_one, _without_nothing
from longspan._kernels.protocol import Grads, Tiling, Work
from longspan._kernels.triton import TritonKernel
from longspan._masks.joint import joint_of
from longspan._masks.tracing import trace

HOPPER = HopperKernel(fallback=TritonKernel())

QUERIES: Segments = ((700, 300), (1500, 212))
OWN: Segments = ((700, 300), (1500, 212))  # tiles of 44 and 84 keys end them
OTHERS: Segments = ((0, 700), (1000, 333))


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def softcap(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return 20 * torch.tanh(s / 20)


def inputs(
    dim: int, device: str, dtype: torch.dtype = torch.bfloat16, *, own: Segments = OWN, others: Segments = OTHERS
) -> tuple[Any, ...]:
    """(q, k, v, rows of k and v that lie apart): the sizes are all different."""
    torch.manual_seed(0)
    lengths = sum(n for _, n in QUERIES), sum(n for _, n in own), sum(n for _, n in others)
    q, k, v = (torch.randn(2, h, n, dim, device=device, dtype=dtype) for h, n in ((6, lengths[0]), *((3, lengths[1] + lengths[2]),) * 2))
    return q, k, v, lengths[1]


def split(k: Tensor, v: Tensor, rows: int, work: Work) -> tuple[Tensor, Tensor, Work]:
    """As the engine hands them over: local keys token by token, the others in a buffer of their own."""
    own = tuple(t[:, :, :rows].transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
    return k[:, :, rows:].contiguous(), v[:, :, rows:].contiguous(), replace(work, own=own)


def test_places_without_keys_and_what_others_compute() -> None:
    _, k, v, rows = inputs(8, "cpu", torch.float32)
    work = work_of(causal, QUERIES, (*OWN, *OTHERS), block=64)
    rest, rest_v, apart = split(k, v, rows, work)
    one = _in_one(rest, rest_v, apart)
    assert torch.equal(one[0], k) and torch.equal(one[1], v) and one[2].own is None
    assert _without_nothing(rest, rest_v, apart)[2] is apart
    only = _without_nothing(k[:, :, :0], v[:, :, :0], replace(work, own=(k, v)))
    assert only[0] is k and only[1] is v and only[2].own is None
    none = _without_nothing(k, v, replace(work, own=(k[:, :, :0], v[:, :, :0])))
    assert none[0] is k and none[2].own is None


@pytest.mark.gpu
@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.bfloat16), (96, torch.float16), (128, torch.bfloat16), (256, torch.bfloat16)])
def test_two_places_give_the_bits_of_one(dim: int, dtype: torch.dtype, scored: bool) -> None:
    on_hopper()
    q, k, v, rows = inputs(dim, "cuda", dtype)
    work = work_of(causal, QUERIES, (*OWN, *OTHERS), block=128)
    if scored:
        score = trace(softcap, "score")
        work = replace(work, score=score.program, joint=joint_of(score.program))
    of = HOPPER
    places = [(k, v, work), split(k, v, rows, work)]
    one, two = (of.forward(q, *given, state=None, final=True, peak=False) for given in places)
    assert torch.equal(one.out, two.out) and torch.equal(one.lse, two.lse)
    grad = torch.randn_like(one.out)
    found: dict[bool, list[Grads]] = {}
    for fixed in (True, False):
        torch.use_deterministic_algorithms(fixed)
        try:
            found[fixed] = []
            for k_part, v_part, part in places:
                into = Grads(
                    q=torch.zeros(q.shape, device="cuda"), k=torch.full(k.shape, torch.nan, device="cuda"),
                    v=torch.full(v.shape, torch.nan, device="cuda"), captured=[],
                )  # fmt: skip
                of.backward(q, k_part, v_part, one.out, one.lse, grad, None, part, needs=[], wide=True, into=into)
                found[fixed].append(into)
        finally:
            torch.use_deterministic_algorithms(False)
    for a, b in found.values():
        assert torch.equal(a.k, b.k) and torch.equal(a.v, b.v)
    assert torch.equal(found[True][0].q, found[True][1].q)
    a, b = (g.q.double() for g in found[False])
    assert float((a - b).norm()) <= 1e-5 * float(a.norm())  # sums in any order
    for t in (found[True][0].k, found[True][0].v):
        assert bool(torch.isfinite(t).all())


@pytest.mark.gpu
@pytest.mark.parametrize("describable", [True, False])
def test_a_plain_sequence_whose_first_rows_lie_apart(describable: bool) -> None:
    on_hopper()
    q, k, v = (torch.randn(1, h, 700, 128, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2))
    tiles = Tiling(length=700, block=128)
    mask = trace(causal, "mask")
    work = Work(table=ls.causal().block_table(700, block=128), q_tiles=tiles, kv_tiles=tiles, scale=0.1, mask=mask.program)
    k_part, v_part, part = split(k, v, 256, work)
    if not describable:  # rows that do not begin on 16 bytes: the copy engine gets a copy
        part = replace(part, own=tuple(torch.nn.functional.pad(t, (1, 0))[..., 1:] for t in (k[:, :, :256], v[:, :, :256])))
    one, two = (HOPPER.forward(q, *given, state=None, final=True, peak=False) for given in ((k, v, work), (k_part, v_part, part)))
    assert torch.equal(one.out, two.out) and torch.equal(one.lse, two.lse)


@pytest.mark.gpu
@pytest.mark.parametrize("nothing", ["own", "others"])
def test_one_of_the_places_may_hold_nothing(nothing: str) -> None:
    on_hopper()
    own, others = ((), OTHERS) if nothing == "own" else (OWN, ())
    q, k, v, rows = inputs(128, "cuda", own=own, others=others)
    work = work_of(causal, QUERIES, (*own, *others), block=128)
    places = [(k, v, work), split(k, v, rows, work)]
    one, two = (HOPPER.forward(q, *given, state=None, final=True, peak=False) for given in places)
    assert torch.equal(one.out, two.out) and torch.equal(one.lse, two.lse)


@pytest.mark.gpu
def test_rows_that_no_tile_holds_fall_to_triton_with_both_places() -> None:
    on_hopper()
    q, k, v, rows = inputs(128, "cuda")
    work = work_of(causal, QUERIES, (*OWN, *OTHERS), block=128)
    tiles = work.kv_tiles
    k, v = (torch.cat([t, torch.full_like(t[:, :, :5], torch.nan)], 2) for t in (k, v))  # five rows that belong to no tile
    work = replace(work, kv_tiles=replace(tiles, length=tiles.length + 5))
    places = [(k, v, work), split(k, v, rows, work)]
    one, two = (HOPPER.forward(q, *given, state=None, final=True, peak=False) for given in places)
    assert torch.equal(one.out, two.out) and bool(torch.isfinite(two.out).all())
