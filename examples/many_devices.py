"""One attention over four processes: packed documents, a learned bias, every strategy, checked against one process.

    python examples/many_devices.py

Starts four local processes that talk over Gloo on the loopback interface. Prints what matched; exits with an error if something did not.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import longspan as ls
from longspan.testing import run_processes

RANKS, HEADS, KV_HEADS, DIM = 4, 8, 2, 64
LENGTHS = [1900, 150, 30, 1420, 200, 396]
TOKENS = sum(LENGTHS)
STRATEGIES = ("ring", "allgather", "exchange", "ulysses")


def inputs() -> list[Tensor]:
    """q, k, v, the gradient of out, and a learned bias by distance: the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, h, TOKENS, DIM) for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [torch.randn(*shape, generator=generator) for shape in (*shapes, (HEADS, 64))]


def attend(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, bias: Tensor, **options: Any) -> list[Tensor]:
    """out and the gradients of q, k, v and the bias."""
    q, k, v, bias = (t.detach().requires_grad_() for t in (q, k, v, bias))

    def near(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[h, (q_idx - kv_idx).clamp(0, 63)]

    out = ls.attention(q, k, v, score_mod=near, **options)
    return [out.detach(), *torch.autograd.grad(out, [q, k, v, bias], grad)]


def rank(strategy: str) -> tuple[list[Tensor], str, float]:
    """One rank's part of the work. Only its own tokens are given to the call."""
    mask = ls.causal() & ls.documents(lengths=LENGTHS)
    plan = ls.plan(mask, TOKENS, dist.group.WORLD, strategy=strategy, batch=1, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM)
    *whole, bias = inputs()
    mine = [plan.shard(t, 2) for t in whole]
    attend(*mine, bias, plan=plan)
    dist.barrier()
    start = time.perf_counter()
    out, dq, dk, dv, dbias = attend(*mine, bias, plan=plan)
    seconds = time.perf_counter() - start
    dist.all_reduce(dbias)  # a rank's gradient of what all ranks share is its own part of the sum
    return [*(plan.unshard(t, 2) for t in (out, dq, dk, dv)), dbias], str(plan.report()), seconds


def main() -> None:
    print(f"{TOKENS} tokens in {len(LENGTHS)} documents over {RANKS} processes, {HEADS} query heads over {KV_HEADS} key heads\n")
    want = attend(*inputs(), mask=ls.causal() & ls.documents(lengths=LENGTHS))
    names = ("out", "dq", "dk", "dv", "dbias")
    lines, told = [], ""
    for strategy in STRATEGIES:
        found = run_processes(rank, RANKS, strategy)
        errors = [max(float((f[0][i] - w).norm() / w.norm()) for f in found) for i, w in enumerate(want)]
        lines.append(f"{strategy:12}" + "".join(f"{e:10.1e}" for e in errors) + f"{max(f[2] for f in found):10.2f}")
        told = found[0][1] if strategy == "exchange" else told
        if not max(errors) < 1e-5:
            raise SystemExit(f"{strategy} does not match one process: relative errors {errors}")
    print(told)
    print(f"\n{'error':12}" + "".join(f"{n:>10}" for n in names) + f"{'seconds':>10}")
    print("\n".join(lines))
    print("\nall match")


if __name__ == "__main__":
    main()
