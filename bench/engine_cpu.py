"""Two processes of one thread each over Gloo against one process of two threads: what the engine's exchanges cost on a CPU.

    python bench/engine_cpu.py [--tokens N] [--json]

16,384 tokens, causal, 8 heads, d 64, float32, forward and backward. The slower of the two ranks counts. torch's SDPA with two threads
stands beside it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import longspan as ls
from longspan.testing import run_processes

HEADS, DIM = 8, 64


def timed(fn: Callable[[], Any], repeat: int, ready: Callable[[], Any] = lambda: None) -> float:
    found = []
    for _ in range(repeat + 1):
        ready()
        start = time.perf_counter()
        fn()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def step(call: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], Any]:
    grad = torch.randn(inputs[0].shape)
    return lambda: torch.autograd.grad(call(*inputs), inputs, grad)


def qkv(tokens: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, HEADS, tokens, DIM).requires_grad_() for _ in range(3)]


def rank(tokens: int, strategy: str, repeat: int) -> float:
    plan = ls.plan(ls.causal(), tokens, dist.group.WORLD, layout="head_tail", strategy=strategy)
    inputs = qkv(plan.local_len)
    return timed(step(lambda q, k, v: ls.attention(q, k, v, plan=plan), inputs), repeat, ready=dist.barrier)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(2)
    inputs = qkv(args.tokens)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    one = {
        "torch SDPA, 1 × 2 threads": step(lambda q, k, v: sdpa(q, k, v, is_causal=True), inputs),
        "longspan, 1 × 2 threads": step(lambda q, k, v: ls.attention(q, k, v, mask=ls.causal()), inputs),
    }
    seconds = {name: timed(fn, args.repeat) for name, fn in one.items()}
    for strategy in ("ring", "exchange"):
        found = run_processes(rank, 2, args.tokens, strategy, args.repeat, timeout=600, group_timeout=300)
        seconds[f"longspan {strategy}, 2 × 1 thread"] = max(found)
    base = seconds["longspan, 1 × 2 threads"]
    about = {"bench": "engine_cpu", "machine": platform.machine(), "torch": torch.__version__, "tokens": args.tokens}
    about["date"] = datetime.date.today().isoformat()
    print(", ".join(f"{k} {v}" for k, v in about.items()))
    for name, s in seconds.items():
        print(f"{name:32}{s:8.2f} s{base / s:7.2f} × the speed of one process with two threads")
    if args.json:
        print(json.dumps({**about, "seconds": seconds}))


if __name__ == "__main__":
    main()
