"""Overhead of the engine on a CPU: two processes of one thread each over Gloo against one process of two threads.

    python bench/engine_cpu.py [--tokens N] [--json]

16,384 tokens, causal, 8 heads, D 64, float32, forward and backward. The slower of the two ranks counts. torch's SDPA with two threads is
measured too.
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


def median_seconds(fn: Callable[[], Any], repeat: int, before_each: Callable[[], Any] = lambda: None) -> float:
    """Median seconds of `repeat` calls after a warm-up call."""
    samples = []
    for _ in range(repeat + 1):
        before_each()
        start = time.perf_counter()
        fn()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples[1:])


def forward_backward(call: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], Any]:
    """A call that runs forward and backward."""
    grad = torch.randn(inputs[0].shape)
    return lambda: torch.autograd.grad(call(*inputs), inputs, grad)


def qkv(tokens: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, HEADS, tokens, DIM).requires_grad_() for _ in range(3)]


def rank(tokens: int, strategy: str, repeat: int) -> float:
    """Median seconds on this rank of the default process group."""
    plan = ls.plan(ls.causal(), tokens, dist.group.WORLD, layout="head_tail", strategy=strategy)
    inputs = qkv(plan.local_len)
    call = forward_backward(lambda q, k, v: ls.attention(q, k, v, plan=plan), inputs)
    return median_seconds(call, repeat, before_each=dist.barrier)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(2)
    inputs = qkv(args.tokens)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    one_process = {
        "torch SDPA, 1 × 2 threads": forward_backward(lambda q, k, v: sdpa(q, k, v, is_causal=True), inputs),
        "longspan, 1 × 2 threads": forward_backward(lambda q, k, v: ls.attention(q, k, v, mask=ls.causal()), inputs),
    }
    seconds = {name: median_seconds(fn, args.repeat) for name, fn in one_process.items()}
    for strategy in ("ring", "exchange"):
        by_rank = run_processes(rank, 2, args.tokens, strategy, args.repeat, timeout=600, group_timeout=300)
        seconds[f"longspan {strategy}, 2 × 1 thread"] = max(by_rank)
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
