"""`longspan.invariant()` on the hopper kernel. Needs a Hopper GPU."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tests import invariant_cases as cases
from tests.kernels.calls import backward
from tests.kernels.shards import work_of

import longspan as ls
from longspan._kernels import registry
from longspan.testing import oracle

if not torch.cuda.is_available() or registry.first_candidate(torch.device("cuda", 0)) != "hopper":
    pytest.skip("needs a Hopper GPU: run `make test-gpu` on a machine that has one", allow_module_level=True)

from longspan._kernels.hopper import HopperKernel
from longspan._kernels.hopper import kernel as hopper
from longspan._kernels.triton import TritonKernel

HOPPER = HopperKernel(fallback=TritonKernel())
MODS = {"causal": lambda b, h, q, kv: q >= kv, "window": lambda b, h, q, kv: (q - kv < 300) & (kv - q < 130)}


@pytest.mark.parametrize(("seed", "dim"), [*((seed, 128) for seed in range(6)), (6, 64), (7, 256)])
def test_a_document_has_the_same_bits_wherever_hopper_computes_it(seed: int, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over ranks, a kernel of its own computes dQ. Elsewhere, one kernel computes all gradients at head dims up to 128."""
    monkeypatch.setattr(hopper, "ordered_dq_pays", lambda *_, **__: True)
    one, choose = cases.problem(seed, kernel="hopper", device="cuda", longest=1500, plain_dim=dim), random.Random(seed)
    want = cases.alone(one)
    assert cases.errors_against_oracle(one, want) == []
    chunk, at = cases.chunked(one, choose)
    ranked, where = cases.over_ranks(one, choose)
    everything = slice(None)
    for name, got, rows in (
        ("batched", cases.batched(one, choose), everything), ("packed", cases.packed(one, choose), everything), ("chunked", chunk, at),
        (where, ranked, everything),
    ):  # fmt: skip
        assert cases.differences(got, want, rows) == [], name


@pytest.mark.parametrize(("name", "dim"), [("causal", 128), ("window", 128), ("causal", 64)])
def test_one_backward_kernel_has_the_bits_of_two(name: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """dQ in float32, added in global memory in the order of key tiles, and accumulated by one CTA; also where sums are subnormal."""
    torch.manual_seed(0)
    mod, tokens = MODS[name], 1911
    q, k, v, grad = (torch.randn(1, h, tokens, dim, device="cuda", dtype=torch.bfloat16) for h in (6, 2, 2, 6))
    work = replace(work_of(mod, ((0, tokens),), ((0, tokens),), block=128, scale=dim**-0.5), invariant=True)
    out, lse = oracle(q, k, v, mask=ls.mask_mod(mod), return_lse=True)
    for size in (1.0, 1e-37):
        grads = []
        for pays in (True, False):
            monkeypatch.setattr(hopper, "ordered_dq_pays", lambda *_, pays=pays, **__: pays)
            grads.append(backward(HOPPER, q, k, v, out.to(q.dtype), lse.float(), grad * size, None, work, wide=False))
        for of in ("q", "k", "v"):
            assert bool(getattr(grads[0], of).any())
            assert torch.equal(getattr(grads[0], of), getattr(grads[1], of)), (size, of)
