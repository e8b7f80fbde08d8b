"""`longspan.invariant()` over real processes (Gloo over loopback): the bits of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests import invariant_cases as cases

import longspan as ls
from longspan.testing import run_processes

pytestmark = pytest.mark.processes
PLANS = [("head_tail", "ring"), ("round_robin", "exchange"), ("contiguous", "allgather"), ("auto", "auto")]
BEFORE, AFTER = [41], [60]


def _problem(seed: int) -> cases.Problem:
    return cases.problem(seed, longest=300)


def _tensors(one: cases.Problem) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return cases.packed_tensors(one, sum(BEFORE), sum(AFTER))


def _rank(_: Any = None) -> list[cases.Results]:
    got = []
    for seed, (layout, strategy) in enumerate(PLANS):
        one = _problem(seed)
        tensors = _tensors(one)
        plan = ls.plan(cases.packed_mask(one, BEFORE, AFTER), tensors[0].shape[2], dist.group.WORLD, layout=layout, strategy=strategy)
        results = cases.results(one, tuple(plan.shard(t, 2) for t in tensors), None, plan=plan)
        got.append({name: x if name == "dsink" else plan.unshard(x, 2) for name, x in results.items()})
    return got


@pytest.mark.parametrize("ranks", [2, 3])
def test_real_processes_have_the_bits_of_one_device(ranks: int) -> None:
    by_rank = run_processes(_rank, ranks, None)
    for seed in range(len(PLANS)):
        one, got = _problem(seed), by_rank[0][seed]
        packed = cases.results(one, _tensors(one), cases.packed_mask(one, BEFORE, AFTER))
        got = {**got, **({"dsink": torch.stack([r[seed]["dsink"] for r in by_rank]).sum(0)} if "dsink" in got else {})}
        assert cases.differences(got, packed) == [], (seed, PLANS[seed])
        inside = slice(sum(BEFORE), sum(BEFORE) + one.length)
        assert cases.differences({n: x[:, :, inside] for n, x in got.items() if n != "dsink"}, cases.alone(one)) == []
