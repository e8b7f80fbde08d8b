"""`python -m tests.soak`: many calls with changing masks, lengths, mods and plans, in one or several processes.

Memory and time must stay flat. Memory is the resident set after garbage collection. Time is CPU time per call, relative to that of a
fixed computation measured before and after each part of the run: other load on the machine slows both.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import longspan as ls
from longspan.testing import run_processes

SAMPLES = 40  # of memory and time, over the whole run
# Shares of calls with a new plan, and of calls with a new callable, which is traced. Both take as long as many other calls.
NEW_PLANS = NEW_MODS = 0.03
WARM_UP = 0.25  # of the run, in which caches fill


def calls(seed: int, mesh: Any) -> Callable[[], None]:
    """A function that makes the next random call: the same sequence on every rank."""
    draw = random.Random(seed)
    plans: deque[ls.Plan] = deque(maxlen=10)

    def mask(length: int) -> ls.Mask:
        kind = 4 if draw.random() < NEW_MODS else draw.randrange(4)
        if kind == 0:
            return ls.causal()
        if kind == 1:
            return ls.causal() & ls.sliding_window(draw.randrange(1, length + 1))
        if kind == 2:
            cut = draw.randrange(1, length)
            return ls.causal() & ls.documents(lengths=[cut, length - cut])
        if kind == 3:
            return ls.causal() | ls.prefix(draw.randrange(1, length + 1))
        step = draw.randrange(2, 50)
        return ls.mask_mod(lambda b, h, q, kv: (q >= kv) | (kv % step == 0))

    def call() -> None:
        length = draw.randrange(16, 200)
        slope = draw.random() if draw.random() < NEW_MODS else 0.0
        options: dict[str, Any] = {"score_mod": lambda score, b, h, q, kv: score - slope * (q - kv)} if slope else {}
        if mesh is None and draw.random() < 0.7:
            options["mask"], tokens = mask(length), length
        else:
            if not plans or draw.random() < NEW_PLANS:
                layout, strategy = draw.choice(["contiguous", "head_tail"]), draw.choice(["ring", "exchange", "allgather"])
                over = ls.Mesh.abstract(1) if mesh is None else mesh
                plans.append(ls.plan(mask(length), length, over, layout=layout, strategy=strategy))
            options["plan"] = plan = draw.choice(plans)
            tokens = plan.local_len
        q, k, v = (torch.randn(1, 2, tokens, 8, requires_grad=True) for _ in range(3))
        out = ls.attention(q, k, v, **options)
        if draw.random() < 0.5:
            out.sum().backward()

    return call


def _yardstick() -> float:
    """CPU seconds of a fixed computation of small tensors and Python objects."""
    x, start = torch.ones(8, 64), time.process_time()
    for i in range(3000):
        x = (x * 0.5).add_(0.5)
        _ = {str(j): (i, j) for j in range(10)}
    return time.process_time() - start


def soak(count: int, seed: int, over_group: bool, say: bool) -> list[tuple[int, float]]:
    """(resident bytes, CPU seconds per call) of each part of the run, the seconds at the speed of the fastest part. say: print them."""
    torch.set_num_threads(1)
    call = calls(seed, dist.group.WORLD if over_group else None)
    samples, speeds = [], [_yardstick()]
    for part in range(SAMPLES):
        size = (part + 1) * count // SAMPLES - part * count // SAMPLES
        start = time.process_time()
        for _ in range(size):
            call()
        seconds = (time.process_time() - start) / max(1, size)
        speeds.append(_yardstick())
        seconds *= min(speeds) / statistics.mean(speeds[-2:])
        gc.collect()
        samples.append((_resident(), seconds))
        if say:
            print(f"{(part + 1) * count // SAMPLES} calls: {samples[-1][0] / 2**20:.1f} MiB, {1e3 * seconds:.2f} ms", flush=True)
    return samples


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def summary(samples: list[tuple[int, float]]) -> dict[str, float]:
    """Growth of memory and time from the first to the last third after the warm-up, as fractions."""
    steady = samples[int(WARM_UP * len(samples)) :]
    third = len(steady) // 3
    growth = {}
    for i, name in enumerate(("memory", "time")):
        first, last = (statistics.median(s[i] for s in part) for part in (steady[:third], steady[-third:]))
        growth[name] = last / first - 1
    return {**growth, "resident_mib": samples[-1][0] / 2**20, "ms_per_call": 1e3 * statistics.median(s[1] for s in steady)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--calls", type=int, default=50_000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.processes == 1:
        ranks = [soak(options.calls, options.seed, False, True)]
    else:
        ranks = run_processes(soak, options.processes, options.calls, options.seed, True, False, timeout=36_000.0)
    results = [summary(samples) for samples in ranks]
    for rank, r in enumerate(results):
        print(
            f"rank {rank}: {options.calls} calls, {r['ms_per_call']:.2f} ms each ({r['time']:+.1%} from the first to the last third), "
            f"{r['resident_mib']:.0f} MiB ({r['memory']:+.2%})"
        )
    print(json.dumps({"calls": options.calls, "processes": options.processes, "ranks": results}))
    return 0 if all(abs(r["memory"]) <= 0.02 and r["time"] <= 0.1 for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
