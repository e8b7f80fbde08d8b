"""Attention over real processes equals the oracle: Gloo over loopback, two and four ranks, float32 and bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.sharded import Problem, Results, check_budget, mask_named, summed
from torch.distributed.device_mesh import init_device_mesh

import longspan as ls
from longspan.testing import run_processes

pytestmark = pytest.mark.processes
CASES = [
    ("causal", "none", "ring", "head_tail"),
    ("documents", "relative bias", "exchange", "auto"),
    ("per head", "softcap", "ulysses", "contiguous"),
    ("prefix", "alibi", "allgather", "round_robin"),
    ("window", "none", "auto", "auto"),
]


def problem(mask: str, score: str, dtype: torch.dtype) -> Problem:
    return Problem(mask=mask_named(mask, 203, ""), score=score, q_len=203, kv_len=203, batch=2, heads=8, kv_heads=2, dtype=dtype)


def _rank(_: Any = None) -> list[Any]:
    world = dist.group.WORLD
    results = []
    for mask, score, strategy, layout in CASES:
        for dtype in (torch.float32, torch.bfloat16):
            p = problem(mask, score, dtype)
            results.append(p.on_rank(p.plan(world, strategy=strategy, layout=layout)))
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("ring", "ulysses"))
    p = problem("documents", "relative bias", torch.float32)
    results.append(p.on_rank(p.plan(mesh, strategy="ulysses_ring", layout="head_tail")))
    results.append(_disagreement(world))
    return results


def _disagreement(world: Any) -> str:
    plan = ls.plan(ls.causal(), 203, world, layout="contiguous", strategy="ring")
    heads = 4 if dist.get_rank() == 1 else 2
    try:
        ls.attention(*(torch.randn(1, heads, plan.local_len, 8) for _ in range(3)), plan=plan)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("ranks", [2, 4])
def test_real_processes_equal_one_device(ranks: int) -> None:
    ranks_found = run_processes(_rank, ranks, None)
    cases = [(mask, score, dtype) for mask, score, _, _ in CASES for dtype in (torch.float32, torch.bfloat16)]
    for i, (mask, score, dtype) in enumerate([*cases, ("documents", "relative bias", torch.float32)]):
        check_budget(problem(mask, score, dtype), Results(summed([r[i] for r in ranks_found])))
    for results in ranks_found:
        assert "rank 1 has 4/4" in results[-1] and "heads" in results[-1]
