"""Attention over four processes: packed documents and a learned bias, with every strategy, compared with one process.

    python examples/many_devices.py

Starts four local processes over Gloo on the loopback interface. Prints relative errors; exits with an error if one is too large.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import longspan as ls
from longspan.testing import run_processes

HEADS, KV_HEADS, DIM = 8, 2, 64
LENGTHS = [1900, 150, 30, 1420, 200, 396]
STRATEGIES = ("ring", "allgather", "exchange", "ulysses")


def inputs(tokens: int) -> list[Tensor]:
    """q, k, v, grad_out and a learned bias by distance, float64, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, h, tokens, DIM) for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in (*shapes, (HEADS, 64))]


def attend(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, bias: Tensor, **options: Any) -> list[Tensor]:
    """[out, dq, dk, dv, dbias]."""
    q, k, v, bias = (t.detach().requires_grad_() for t in (q, k, v, bias))

    def add_bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[h, (q_idx - kv_idx).clamp(0, 63)]

    out = ls.attention(q, k, v, score_mod=add_bias, **options)
    return [out.detach(), *torch.autograd.grad(out, [q, k, v, bias], grad)]


def rank(lengths: list[int], expected: list[Tensor]) -> list[tuple[list[float], float, str]]:
    """Relative errors, seconds and the plan's report of each strategy. Attention gets this rank's tokens only."""
    results, mask = [], ls.causal() & ls.documents(lengths=lengths)
    *whole, bias = inputs(sum(lengths))
    attend(*(t[:, :, :64] for t in whole), bias, mask=ls.causal())  # warm up: the first call imports and compiles
    for strategy in STRATEGIES:
        sizes = {"batch": 1, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM}
        plan = ls.plan(mask, sum(lengths), dist.group.WORLD, strategy=strategy, **sizes)
        local = [plan.shard(t, 2) for t in whole]
        dist.barrier()
        start = time.perf_counter()
        out, dq, dk, dv, dbias = attend(*local, bias, plan=plan)
        seconds = time.perf_counter() - start
        dist.all_reduce(dbias)  # each rank has the gradient of its queries
        got = [*(plan.unshard(t, 2) for t in (out, dq, dk, dv)), dbias]
        errors = [float((g - e).norm() / e.norm()) for g, e in zip(got, expected, strict=True)]
        results.append((errors, seconds, str(plan.report())))
    return results


def main(lengths: list[int] = LENGTHS, ranks: int = 4) -> None:
    print(f"{sum(lengths)} tokens in {len(lengths)} documents over {ranks} processes, {HEADS} query heads, {KV_HEADS} KV heads\n")
    expected = attend(*inputs(sum(lengths)), mask=ls.causal() & ls.documents(lengths=lengths))
    by_rank = run_processes(rank, ranks, lengths, expected, timeout=600.0)
    print(by_rank[0][STRATEGIES.index("exchange")][2])
    print(f"\n{'error':12}" + "".join(f"{name:>10}" for name in ("out", "dq", "dk", "dv", "dbias")) + f"{'seconds':>10}")
    for strategy, results in zip(STRATEGIES, zip(*by_rank, strict=True), strict=True):
        errors = [max(of_ranks) for of_ranks in zip(*(result[0] for result in results), strict=True)]
        print(f"{strategy:12}" + "".join(f"{e:10.1e}" for e in errors) + f"{max(result[1] for result in results):10.2f}")
        if not max(errors) < 1e-11:
            raise SystemExit(f"{strategy} does not match one process: relative errors {errors}")
    print("\nall match")


if __name__ == "__main__":
    main()
