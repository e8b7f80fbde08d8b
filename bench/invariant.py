"""`longspan.invariant()` on one GPU beside the fast mode: forward and backward, causal and packed documents.

    PYTHONPATH=src:. python bench/invariant.py [--tokens N] [--rounds N] [--kernel NAME] [--json]

B 1, H 16 over 4 KV heads, D 128, bfloat16; documents of 200 to 4,000 tokens. Device time of calls that are queued behind a waiting kernel,
median of rounds that alternate between the modes. Prints the relative difference of the gradients of both modes first.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

import longspan as ls

HEADS, KV_HEADS, DIM = 16, 4, 128
AHEAD = 30_000_000  # cycles of the waiting kernel: more than the host needs for a call
MODES = {"fast": nullcontext, "invariant": ls.invariant}


def documents(tokens: int) -> list[int]:
    draw, lengths = random.Random(0), []
    while sum(lengths) < tokens:
        lengths.append(min(draw.randint(200, 4000), tokens - sum(lengths)))
    return lengths


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """(milliseconds on the device, result)."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD)
    begin.record()
    result = call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end), result


def one_round(tensors: list[Tensor], mask: Any, mode: str, kernel: str) -> tuple[float, float, tuple[Tensor, ...]]:
    """(forward ms, backward ms, gradients) of one call."""
    q, k, v, grad = tensors
    with MODES[mode]():
        forward, out = timed(lambda: ls.attention(q, k, v, mask=mask, kernel=kernel))
    backward, grads = timed(lambda: torch.autograd.grad(out, (q, k, v), grad))
    return forward, backward, grads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--kernel", default="hopper")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    shapes = [(1, heads, options.tokens, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    for name, mask in (("causal", ls.causal()), ("documents", ls.causal() & ls.documents(documents(options.tokens)))):
        first = [one_round(tensors, mask, mode, options.kernel)[2] for mode in MODES]
        apart = [float((a.float() - b.float()).norm() / a.float().norm()) for a, b in zip(*first, strict=True)]
        print(f"{name}: relative difference of dq, dk, dv " + ", ".join(f"{x:.1e}" for x in apart), flush=True)
        del first
        rounds = [[one_round(tensors, mask, mode, options.kernel)[:2] for mode in MODES] for _ in range(options.rounds + 1)][1:]
        if not rounds:
            continue
        ms = {mode: [statistics.median(r[i][j] for r in rounds) for j in range(2)] for i, mode in enumerate(MODES)}
        ms = {mode: [*times, sum(times)] for mode, times in ms.items()}
        for j, part in enumerate(("forward", "backward", "both")):
            fast, same_bits = ms["fast"][j], ms["invariant"][j]
            print(f"{name:10s} {part:9s} fast {fast:7.3f} ms, invariant {same_bits:7.3f} ms, speed {fast / same_bits:.3f}", flush=True)
            rows.append({"mask": name, "pass": part, "fast_ms": fast, "invariant_ms": same_bits})
    if options.json:
        print(json.dumps({"bench": "invariant", "kernel": options.kernel, "tokens": options.tokens, "rows": rows}))


if __name__ == "__main__":
    main()
