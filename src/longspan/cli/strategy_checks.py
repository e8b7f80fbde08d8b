"""Checks of `longspan verify` for every strategy, over virtual ranks or processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import longspan as ls
from longspan._plan.strategies import STRATEGY_NAMES, StrategyName
from longspan.cli.oracle_checks import Line, Problem
from longspan.testing import virtual_world

CASES = (("documents", "bias"), ("window", "none"))
AXES = ("ring", "ulysses")


def lines(device: torch.device, ranks: int, *, virtual: bool) -> Iterator[Line]:
    """One line per strategy. Strategies of two axes need a number of ranks that is not prime."""
    # Numbers of heads that Ulysses can divide by any number of ranks.
    heads = {"heads": 2 * ranks, "kv_heads": ranks if ranks % 2 else 2}
    problems = [Problem(mask=m, score=s, dtype=torch.float32, device=device, batch=1, tokens=211, dim=16, **heads) for m, s in CASES]
    degree = next((d for d in range(2, ranks) if ranks % d == 0), None)
    for strategy in STRATEGY_NAMES:
        two = strategy.startswith("ulysses_")
        if two and degree is None:
            continue
        shape = (ranks // degree, degree) if two and degree is not None else (ranks,)
        line = Line(name=strategy, dtype="float32")
        for problem in problems:
            try:
                got = _over_threads(problem, strategy, shape) if virtual else _over_processes(problem, strategy, shape)
                line.add(problem, problem.shares(got))
            except Exception as error:  # any exception is a failed check
                line.fail(problem, error)
        yield line


def _over_threads(problem: Problem, strategy: StrategyName, shape: tuple[int, ...]) -> dict[str, Tensor]:
    gpu = problem.device if problem.device.type == "cuda" else None
    world = virtual_world(shape, axis_names=AXES if len(shape) == 2 else None, device=gpu)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the ranks share the cores
    try:
        by_rank = world.run(lambda mesh: _on_rank(problem, strategy, mesh))
    finally:
        torch.set_num_threads(threads)
    shares = [one["dbias"] for one in by_rank if "dbias" in one]
    return {**by_rank[0], "dbias": torch.stack(shares).sum(0)} if shares else by_rank[0]


def _over_processes(problem: Problem, strategy: StrategyName, shape: tuple[int, ...]) -> dict[str, Tensor]:
    mesh: Any = dist.group.WORLD
    if len(shape) == 2:
        mesh = dist.device_mesh.init_device_mesh(problem.device.type, shape, mesh_dim_names=AXES)
    results = _on_rank(problem, strategy, mesh)
    if "dbias" in results:
        dist.all_reduce(results["dbias"])
    return results


def _on_rank(problem: Problem, strategy: StrategyName, mesh: Any) -> dict[str, Tensor]:
    """Whole results, unsharded; the gradient of the bias is this rank's share."""
    sizes: dict[str, Any] = {"batch": problem.batch, "heads": problem.heads, "kv_heads": problem.kv_heads, "head_dim": problem.dim}
    plan = ls.plan(problem.made_mask, problem.tokens, mesh, strategy=strategy, **sizes)

    def attend(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Any:
        return ls.attention(q, k, v, plan=plan, return_lse=True, **rest)

    results = problem.results(attend, [plan.shard(t, 2) for t in problem.inputs])
    return {name: t if name == "dbias" else plan.unshard(t, 2) for name, t in results.items()}


def failures_elsewhere(lines: Sequence[Line]) -> list[str]:
    """Failures on ranks other than 0; the same list on every rank."""
    failures_by_rank: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(failures_by_rank, [f"{line.name} {line.dtype}, {failure}" for line in lines for failure in line.failures])
    return [f"rank {rank}: {failure}" for rank, failures in enumerate(failures_by_rank) if rank for failure in failures]
