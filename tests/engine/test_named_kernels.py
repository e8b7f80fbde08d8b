"""A named kernel over a mesh is used on every rank, or raises on every rank before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.sharded import Problem

import longspan as ls
from longspan.testing import virtual_world


@pytest.mark.parametrize("kernel", ["flash", "aten", "cpu"])
@pytest.mark.parametrize("strategy", ["ring", "exchange", "ulysses"])
def test_torchs_kernels_compute_rectangular_stages(kernel: str, strategy: str) -> None:
    problem = Problem(
        mask=ls.causal(), score="none", q_len=512, kv_len=512, batch=2, heads=4, kv_heads=2, dim=16, value_dim=16, sink=False,
        dtype=torch.float32,
    )  # fmt: skip
    right, got = problem.by_oracle(), problem.over(2, kernel=kernel, strategy=strategy, layout="head_tail")
    for name in right.values:
        assert got.error(right, name) < 2e-5, name


def test_a_kernel_that_one_rank_cannot_use_raises_on_all() -> None:
    mask = ls.mask_mod(lambda b, h, q, kv: (q >= kv) & ((q < 400) | (q % 3 > 0)))  # causal squares on the first rank only

    def rank(mesh: Any) -> str:
        plan = ls.plan(mask, 600, mesh, layout="contiguous", strategy="ring")
        with pytest.raises((ValueError, RuntimeError), match="kernel 'flash' does not support this call") as caught:
            ls.attention(*(torch.randn(1, 2, plan.local_len, 16) for _ in range(3)), plan=plan, kernel="flash")
        return str(caught.value)

    told = virtual_world(2).run(rank)
    assert "rank 1 refused" in told[0] and "refused" not in told[1]
