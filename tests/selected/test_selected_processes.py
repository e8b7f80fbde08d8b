"""Keys chosen at run time over real processes: random cases, disagreements and tiny models, in one set of processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from examples.sparse_training import train
from tests.selected.mesh_cases import MeshCase, draw, expected, rank_results
from torch.distributed.device_mesh import init_device_mesh

import longspan as ls
from longspan.testing import run_processes

pytestmark = pytest.mark.processes
RANKS = 4


def run_rank(steps: int, seeds: tuple[int, ...]) -> dict[str, Any]:
    """What one process computes: shards of random cases, errors of calls that differ between ranks, and loss curves."""
    mesh = init_device_mesh("cpu", (RANKS,))
    cases = [rank_results(draw(seed, ranks=RANKS), mesh) for seed in seeds]
    errors = [disagree(mesh, **odd) for odd in ({"granularity": 64}, {"choices": 2}, {"entry": 99}, {"rows": 1})]
    curves = {nsa: train(nsa=nsa, steps=steps, mesh=mesh) for nsa in (False, True)}
    return {"cases": cases, "errors": errors, "curves": curves, "again": rank_results(draw(seeds[0], ranks=RANKS), mesh)}


def disagree(mesh: Any, *, granularity: int = 128, choices: int = 1, entry: int = 0, rows: int = 0) -> str:
    """The error of a call in which rank 1 has other arguments than the other ranks."""
    plan = ls.plan(ls.causal(), 1024, mesh, layout="contiguous")
    odd = dist.get_rank() == 1
    q = torch.ones(1, 2, plan.local_len, 8)
    shape = (1, choices if odd else 1, len(plan.query_blocks(128)) + (rows if odd else 0), 1)
    indices = torch.full(shape, entry if odd else 0, dtype=torch.int32)
    try:
        ls.attention(q, q, q, plan=plan, mask=ls.selected(indices, granularity if odd else 128, q_granularity=128))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "no error"


def test_processes_match_one_device(request: pytest.FixtureRequest) -> None:
    steps, seeds = (50, (1, 5, 9)) if request.config.getoption("--whole-grid") else (2, (1,))
    results = run_processes(run_rank, RANKS, steps, seeds)
    curves = {nsa: train(nsa=nsa, steps=steps) for nsa in (False, True)}
    for i, seed in enumerate(seeds):
        case: MeshCase = draw(seed, ranks=RANKS)
        for name, got, right in expected(case, [result["cases"][i] for result in results]):
            torch.testing.assert_close(got, right, atol=1e-9, rtol=1e-9, msg=lambda m, at=f"{case.text}: {name}": f"{at}: {m}")
    for result in results:
        granularity, choices, entry, rows = result["errors"]
        assert "selection: rank 1 has 64 keys" in granularity and "do not agree" in choices
        assert "expected indices from -1 to 7" in entry and "expected 2 rows" in rows
        assert all(torch.equal(a, b) for a, b in zip(result["again"], result["cases"][0], strict=True))
        for nsa, curve in result["curves"].items():
            assert curve == pytest.approx(curves[nsa], abs=1e-9)
            assert curve[-1] < curve[0]
