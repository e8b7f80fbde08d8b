"""Host microseconds of eager attention calls: longspan, torch's SDPA and, if installed, flash-attn-4.

    PYTHONPATH=src:. python bench/host.py [--rows NAME …] [--kernel NAME] [--profile] [--json]

B 1, H 32/8, S 512, D 128, bfloat16 on a GPU: so little work that the device waits for the host. Wall time of `--calls` calls in a row,
not synchronised in between and too few to fill the device's queue; medians over `--rounds`. On a machine without a GPU, calls run by
kernel "cpu" in float32 with 8 tokens: their time is that of the code around the kernel, and of small torch operations.

    forward    one call that autograd records
    no grad    the same under torch.no_grad
    both       one call and torch.autograd.grad
    launches   kernels that one call of `both` launches, copies and fills included

    causal       mask=causal()
    inline       mask=causal() made anew for each call
    score_mod    causal, and a score_mod that reads an nn.Parameter [H]
    closure      the same, the score_mod made anew for each call, as in a module's forward
    documents    causal and packed documents
    ring, exchange  only on a GPU: one rank of 8 with 4,096 tokens each, by a plan; transfers are copies on the device (bench/link.py).
                 Two calls in a row, because the device takes longer than the host: more would wait for the device.

`--profile` prints the functions in which the host spends its time instead.
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import json
import pstats
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from bench.link import EchoMesh, Link
from torch import Tensor

import longspan as ls

HEADS, KV_HEADS, DIM, RANKS = 32, 8, 128, 8
PLANNED, PLANNED_CALLS = ("ring", "exchange"), 2
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TOKENS, RANK_TOKENS = (512, 4096) if ON_GPU else (8, 16)
PROFILED_FUNCTIONS = 25

Call = Callable[[], Tensor]


def qkv(tokens: int, *, tokens_first: bool = False) -> list[Tensor]:
    """q, k, v [B, H, S, D], or [B, S, H, D], that require gradients."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    made = [torch.randn(1, h, tokens, DIM, device=DEVICE, dtype=dtype) for h in (HEADS, KV_HEADS, KV_HEADS)]
    return [(t.transpose(1, 2).contiguous() if tokens_first else t).requires_grad_() for t in made]


def longspan_rows(kernel: str) -> dict[str, tuple[Call, list[Tensor]]]:
    """(the call, the tensors that get gradients) by row."""
    q, k, v = qkv(TOKENS)
    causal, bias = ls.causal(), torch.nn.Parameter(torch.randn(HEADS, device=DEVICE))
    lengths = [TOKENS // 4] * 4
    documents = ls.causal() & ls.documents(lengths)

    def biased(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return s + bias[h]

    def with_closure() -> Tensor:
        return ls.attention(q, k, v, mask=causal, score_mod=lambda s, b, h, i, j: s + bias[h], kernel=kernel)

    rows: dict[str, tuple[Call, list[Tensor]]] = {
        "causal": (lambda: ls.attention(q, k, v, mask=causal, kernel=kernel), [q, k, v]),
        "inline": (lambda: ls.attention(q, k, v, mask=ls.causal(), kernel=kernel), [q, k, v]),
        "score_mod": (lambda: ls.attention(q, k, v, mask=causal, score_mod=biased, kernel=kernel), [q, k, v, bias]),
        "closure": (with_closure, [q, k, v, bias]),
        "documents": (lambda: ls.attention(q, k, v, mask=documents, kernel=kernel), [q, k, v]),
    }
    if ON_GPU:
        rows |= {strategy: planned(strategy, kernel) for strategy in PLANNED}
    return rows


def planned(strategy: str, kernel: str) -> tuple[Call, list[Tensor]]:
    """A call of rank 3 of 8 over a mesh whose transfers are copies."""
    mesh = EchoMesh(axes=ls.Mesh.abstract(RANKS).axes, coordinate=(3,))
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM}
    plan = ls.plan(ls.causal(), RANKS * RANK_TOKENS, mesh, layout="head_tail", strategy=strategy, **sizes)
    inputs = qkv(plan.local_len)
    return lambda: ls.attention(*inputs, plan=plan, kernel=kernel), inputs


def peer_rows() -> dict[str, tuple[Call, list[Tensor]]]:
    """Peers of the row "causal"."""
    q, k, v = qkv(TOKENS)
    rows: dict[str, tuple[Call, list[Tensor]]] = {
        "sdpa": (lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), [q, k, v])
    }
    try:
        interface = import_module("flash_attn.cute.interface")
    except Exception as error:  # a broken installation may raise anything
        print(f"flash-attn-4 is not measured: {type(error).__name__}: {error}")
        return rows
    inputs = qkv(TOKENS, tokens_first=True)

    def fa4() -> Tensor:
        out = interface.flash_attn_func(*inputs, causal=True)
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]

    rows["flash-attn-4"] = (fa4, inputs)
    return rows


def passes(call: Call, inputs: list[Tensor]) -> dict[str, Callable[[], Any]]:
    """The measured calls by column."""
    grad = torch.randn_like(call())

    def no_grad() -> Tensor:
        with torch.no_grad():
            return call()

    return {"forward": call, "no grad": no_grad, "both": lambda: torch.autograd.grad(call(), inputs, grad)}


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def host_us(fn: Callable[[], Any], *, calls: int, rounds: int) -> float:
    """Median microseconds of a call, by the wall time of `calls` calls in a row."""
    for _ in range(3):
        fn()
    samples = []
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        samples.append((time.perf_counter() - start) / calls)
    synchronize()
    return 1e6 * statistics.median(samples)


def launches(fn: Callable[[], Any]) -> int | None:
    """Device operations of one call; None without a GPU."""
    if not ON_GPU:
        return None
    synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        fn()
        synchronize()
    return sum(e.device_type == torch.autograd.DeviceType.CUDA for e in profiler.events())


def profile(title: str, fn: Callable[[], Any], *, calls: int) -> None:
    """Print the functions in which the host spends its time, in microseconds per call. cProfile adds about 0.2 µs to every function.

    The backward pass runs in this thread, which alone is profiled.
    """
    for _ in range(3):
        fn()
    synchronize()
    profiler = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False), profiler:
        for _ in range(calls):
            fn()
    synchronize()
    stats = pstats.Stats(profiler)
    count = sum(v[1] for v in stats.stats.values()) / calls  # type: ignore[attr-defined]
    print(f"\n{title}: {1e6 * stats.total_tt / calls:.1f} µs and {count:.0f} function calls per call")  # type: ignore[attr-defined]
    by_own_time = sorted(stats.stats.items(), key=lambda item: -item[1][2])  # type: ignore[attr-defined]
    for (file, line, name), (_, times, own, whole, _) in by_own_time[:PROFILED_FUNCTIONS]:
        place = f"{'/'.join(file.split('/')[-2:])}:{line}" if line else ""
        print(f"{1e6 * own / calls:9.2f} own {1e6 * whole / calls:9.2f} with callees {times / calls:6.1f} ×  {name} {place}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="only these rows")
    parser.add_argument("--kernel", default="auto" if ON_GPU else "cpu")
    parser.add_argument("--calls", type=int, default=50 if ON_GPU else 20)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if ON_GPU:
        EchoMesh.use(Link("copy"))
    device = torch.cuda.get_device_name() if ON_GPU else "CPU: no GPU here, times are those of code around the kernels"
    about = {
        "bench": "host", "device": device, "torch": torch.__version__, "kernel": args.kernel, "tokens": TOKENS,
        "heads": f"{HEADS}/{KV_HEADS}", "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    print(", ".join(f"{k} {v}" for k, v in about.items()))
    if not args.profile:
        print(f"{'µs of host time per call':24}{'forward':>10}{'no grad':>10}{'both':>10}{'launches':>10}")
    results = []
    for name, (call, inputs) in {**peer_rows(), **longspan_rows(args.kernel)}.items():
        if args.rows and name not in args.rows:
            continue
        measured = passes(call, inputs)
        if args.profile:
            for step, fn in measured.items():
                profile(f"{name}, {step}", fn, calls=args.calls)
            continue
        calls = PLANNED_CALLS if name in PLANNED else args.calls
        times = {step: host_us(fn, calls=calls, rounds=args.rounds) for step, fn in measured.items()}
        count = launches(measured["both"])
        results.append({"name": name, **times, "launches": count})
        print(f"{name:24}" + "".join(f"{t:10.1f}" for t in times.values()) + f"{'-' if count is None else count:>10}", flush=True)
    if args.json:
        print(json.dumps({**about, "rows": results}))


if __name__ == "__main__":
    main()
