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

HEADS, KV_HEADS, DIM = 8, 2, 64
LENGTHS = [1900, 150, 30, 1420, 200, 396]
STRATEGIES = ("ring", "allgather", "exchange", "ulysses")


def inputs(tokens: int) -> list[Tensor]:
    """q, k, v, the gradient of out, and a learned bias by distance: the same on every rank, in float64 so that nothing hides."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, h, tokens, DIM) for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in (*shapes, (HEADS, 64))]


def attend(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, bias: Tensor, **options: Any) -> list[Tensor]:
    """out and the gradients of q, k, v and the bias."""
    q, k, v, bias = (t.detach().requires_grad_() for t in (q, k, v, bias))

    def near(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[h, (q_idx - kv_idx).clamp(0, 63)]

    out = ls.attention(q, k, v, score_mod=near, **options)
    return [out.detach(), *torch.autograd.grad(out, [q, k, v, bias], grad)]


def rank(lengths: list[int], want: list[Tensor]) -> list[tuple[list[float], float, str]]:
    """One rank's part of the work, for each strategy: errors, seconds, the report. Only its own tokens are given to a call."""
    found, mask = [], ls.causal() & ls.documents(lengths=lengths)
    *whole, bias = inputs(sum(lengths))
    attend(*(t[:, :, :64] for t in whole), bias, mask=ls.causal())  # the first call of a process loads and compiles
    for strategy in STRATEGIES:
        sizes = {"batch": 1, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM}
        plan = ls.plan(mask, sum(lengths), dist.group.WORLD, strategy=strategy, **sizes)
        mine = [plan.shard(t, 2) for t in whole]
        dist.barrier()
        start = time.perf_counter()
        out, dq, dk, dv, dbias = attend(*mine, bias, plan=plan)
        seconds = time.perf_counter() - start
        dist.all_reduce(dbias)  # a rank's gradient of what all ranks share is its own part of the sum
        got = [*(plan.unshard(t, 2) for t in (out, dq, dk, dv)), dbias]
        found.append(([float((g - w).norm() / w.norm()) for g, w in zip(got, want, strict=True)], seconds, str(plan.report())))
    return found


def main(lengths: list[int] = LENGTHS, ranks: int = 4) -> None:
    print(f"{sum(lengths)} tokens in {len(lengths)} documents over {ranks} processes, {HEADS} query heads over {KV_HEADS} key heads\n")
    want = attend(*inputs(sum(lengths)), mask=ls.causal() & ls.documents(lengths=lengths))
    found = run_processes(rank, ranks, lengths, want, timeout=600.0)
    print(found[0][STRATEGIES.index("exchange")][2])
    print(f"\n{'error':12}" + "".join(f"{name:>10}" for name in ("out", "dq", "dk", "dv", "dbias")) + f"{'seconds':>10}")
    for strategy, told in zip(STRATEGIES, zip(*found, strict=True), strict=True):
        errors = [max(of_ranks) for of_ranks in zip(*(t[0] for t in told), strict=True)]
        print(f"{strategy:12}" + "".join(f"{e:10.1e}" for e in errors) + f"{max(t[1] for t in told):10.2f}")
        if not max(errors) < 1e-11:
            raise SystemExit(f"{strategy} does not match one process: relative errors {errors}")
    print("\nall match")


if __name__ == "__main__":
    main()
