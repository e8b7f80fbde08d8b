"""The engine on a GPU: virtual ranks of one process, and two processes over Gloo with CUDA tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.sharded import Problem, Results, check_budget, mask_named, summed

import longspan as ls
from longspan.testing import run_processes, virtual_world

CASES = [
    ("causal", "none", "ring", "head_tail", 4, torch.bfloat16),
    ("documents", "relative bias", "exchange", "auto", 3, torch.bfloat16),
    ("per head", "softcap", "ulysses", "contiguous", 4, torch.float16),
    ("prefix", "alibi", "allgather", "round_robin", 2, torch.float32),
    ("custom", "none", "exchange", "contiguous", 5, torch.float32),
    ("window", "relative bias", "ring", "per_document", 3, torch.float32),
    ("documents", "none", "exchange", "per_document", 3, torch.bfloat16),  # tiles begin at odd rows
]


def problem(mask: str, score: str, layout: str, dtype: torch.dtype) -> Problem:
    return Problem(
        mask=mask_named(mask, 701, layout), score=score, q_len=701, kv_len=701, batch=2, heads=8, kv_heads=2, dim=64, value_dim=32,
        dtype=dtype, device="cuda",
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("mask", "score", "strategy", "layout", "ranks", "dtype"), CASES, ids=[f"{c[0]}-{c[2]}-{c[4]}" for c in CASES])
def test_virtual_ranks_on_a_gpu_equal_the_oracle(mask: str, score: str, strategy: str, layout: str, ranks: int, dtype: Any) -> None:
    p = problem(mask, score, layout, dtype)
    check_budget(p, p.over(ranks, strategy=strategy, layout=layout))


@pytest.mark.gpu
@pytest.mark.parametrize(("mask", "score", "strategy"), [("causal", "none", "ring"), ("documents", "relative bias", "exchange")])
def test_repeated_calls_with_one_plan_equal_the_oracle_every_time(mask: str, score: str, strategy: str) -> None:
    """Steps are prepared at the second call; the calls differ in values, and the last one runs on another stream."""
    check_repeated([replace(problem(mask, score, "head_tail", torch.bfloat16), seed=seed) for seed in range(5)], strategy)


def check_repeated(problems: list[Problem], strategy: str, ranks: int = 3) -> None:
    """Make the calls of problems that have one plan in common, one after the other."""
    made = problems[0].plan(ls.Mesh.abstract(ranks), strategy=strategy, layout="head_tail")

    def results(some: list[Problem]) -> list[list[dict[str, Any]]]:
        return world.run(lambda mesh: [p.on_rank(plans[mesh.rank]) for p in some])

    world = virtual_world(ranks)
    plans = [made.on(mesh) for mesh in world.meshes]
    by_rank = results(problems[:-1])
    side = torch.cuda.Stream() if torch.cuda.is_available() else None
    if side is not None:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        last = results(problems[-1:])
    if side is not None:
        torch.cuda.current_stream().wait_stream(side)
    for i, p in enumerate(problems):
        check_budget(p, Results(summed([mine[i] if i < len(mine) else more[0] for mine, more in zip(by_rank, last, strict=True)])))


def _rank(_: Any) -> list[Any]:
    results = []
    for mask, score, strategy, layout, _, dtype in CASES[:4]:
        p = problem(mask, score, layout, dtype)
        values = p.on_rank(p.plan(dist.group.WORLD, strategy=strategy, layout=layout))
        results.append({name: t.cpu() for name, t in values.items()})
    return results


@pytest.mark.gpu
def test_two_processes_over_gloo_with_cuda_tensors_equal_the_oracle() -> None:
    ranks = run_processes(_rank, 2, None, timeout=300)
    for i, (mask, score, _, layout, _, dtype) in enumerate(CASES[:4]):
        values = summed([{name: t.cuda() for name, t in r[i].items()} for r in ranks])
        check_budget(problem(mask, score, layout, dtype), Results(values))


@pytest.mark.gpu
def test_sixteen_ring_stages_in_bfloat16_lose_no_more_than_one_kernel() -> None:
    p = Problem(
        mask=ls.causal(), score="none", q_len=4096, kv_len=4096, batch=1, heads=3, kv_heads=3, dim=64, value_dim=64, dtype=torch.bfloat16,
        sink=False, device="cuda",
    )  # fmt: skip
    right, one, many = p.by_oracle(), p.over(1), p.over(17, strategy="ring", layout="head_tail")
    for name in right.values:
        digits = 4 * torch.finfo(torch.float32).eps * float(right.values[name].abs().max())
        assert many.error(right, name) <= 1.1 * one.error(right, name) + digits, name


WIDE = [
    {"strategy": "exchange", "stages": 3},
    {"strategy": "ring"},
    {"strategy": "exchange", "stages": 2, "grad_reduce_dtype": torch.bfloat16},
]


def wide_problem() -> Problem:
    sizes: dict[str, Any] = {"dim": 128, "value_dim": 128, "dtype": torch.bfloat16, "device": "cuda"}
    return Problem(mask=ls.causal(), score="none", q_len=3001, kv_len=3001, batch=2, heads=8, kv_heads=2, **sizes)


def _rank_of_two_streams(_: Any) -> tuple[list[Any], list[int]]:
    from longspan._engine import distributed as sharded

    real, used = sharded.StepStreams, []

    class Counted(real):  # type: ignore[valid-type, misc]
        def __init__(self, device: torch.device, *, two: bool) -> None:
            super().__init__(device, two=two)
            used.append(len(self.streams))

    sharded.StepStreams = Counted  # type: ignore[misc]
    p = wide_problem()
    plans = [p.plan(dist.group.WORLD, layout="head_tail", overlap=True, **way) for way in WIDE]
    for plan in plans:
        p.on_rank(plan)  # the first time there is one stream
    used.clear()
    results = [p.on_rank(plan) for plan in plans]
    return [{name: t.cpu() for name, t in values.items()} for values in results], used


@pytest.mark.gpu
def test_steps_on_two_streams_equal_the_oracle() -> None:
    ranks = run_processes(_rank_of_two_streams, 2, None, timeout=300)
    for i in range(len(WIDE)):
        check_budget(wide_problem(), Results(summed([{name: t.cuda() for name, t in results[i].items()} for results, _ in ranks])))
    if torch.cuda.get_device_capability() == (9, 0):
        assert all(used == [2] * len(WIDE) for _, used in ranks), [used for _, used in ranks]
