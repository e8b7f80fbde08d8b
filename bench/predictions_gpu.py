"""Predicted against measured on one GPU: the compute of the busiest rank of 12 plans over 4 masks.

    PYTHONPATH=src:. python bench/predictions_gpu.py [--profile FILE] [--calibrate FILE] [--json]

One GPU plays the busiest rank of each mesh, as in bench/engine_gpu.py: what others would send is copied from its own rows, so that
links take no time. The prediction is of computing alone (links without latency, no contention). Without --profile the kernel is calibrated
first, on rectangles and triangles only, in the same run, and --calibrate writes that profile; the plans below take no part in it.
"""

from __future__ import annotations

import argparse
import datetime
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench.engine_gpu import Clock, EchoMesh, both

import longspan as ls
from longspan.cli.measure import measured
from longspan.plan.clusters import cluster, dump
from longspan.plan.cost import Cluster, Link
from longspan.plan.report import report

HEADS, KV_HEADS, DIM = 32, 8, 128
WITHIN = 0.10


def _documents(tokens: int) -> ls.Mask:
    generator, found, left = torch.Generator().manual_seed(3), [], tokens
    while left:
        found.append(min(left, 64 + int(torch.empty(()).log_normal_(8.0, 1.2, generator=generator))))
        left -= found[-1]
    return ls.causal() & ls.documents(lengths=found)


MASKS = {
    "causal": lambda tokens: ls.causal(),
    "documents": _documents,
    "window 4096": lambda tokens: ls.causal() & ls.sliding_window(4096),
    "prefix": lambda tokens: ls.causal() | ls.prefix(tokens // 4),
}
PLANS = ((65536, 8, "head_tail", "ring"), (65536, 8, "auto", "exchange"), (131072, 16, "round_robin", "allgather"))


def predicted(plan: ls.Plan, profile: Cluster) -> tuple[int, float, float]:
    """(the busiest rank, its seconds of computing forward, and backward)."""
    free = Link(bandwidth=1e18, latency=0.0)
    found = report(plan.data, replace(profile, inside=free, between=free, contention=0.0)).timeline
    rank = int((found.forward.busy + found.backward.busy).argmax())
    return rank, float(found.forward.busy[rank]), float(found.backward.busy[rank])


def measure(mask: ls.Mask, tokens: int, ranks: int, layout: str, strategy: str, rank: int, kernel: str, clock: Clock) -> dict[str, Any]:
    mesh = EchoMesh(axes=ls.Mesh.abstract(ranks).axes, coordinate=(rank,))
    plan = ls.plan(mask, tokens, mesh, layout=layout, strategy=strategy, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM)
    inputs = [
        torch.randn(1, h, plan.local_len, DIM, device="cuda", dtype=torch.bfloat16).requires_grad_() for h in (HEADS, KV_HEADS, KV_HEADS)
    ]
    return both(lambda: ls.attention(*inputs, plan=plan, kernel=kernel), inputs, clock)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", help="a profile by name or file, in place of calibrating")
    parser.add_argument("--calibrate", type=Path, help="write the calibrated profile here")
    parser.add_argument("--kernel", default="triton")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.profile:
        profile = cluster(args.profile)
    else:
        found, lines = measured(name="h200", kernel=args.kernel, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, quick=False)
        assert found is not None
        profile = found
        print("\n".join(lines), flush=True)
        if args.calibrate:
            args.calibrate.write_text(dump(profile), encoding="utf-8")
    about = {
        "bench": "predictions_gpu",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "kernel": args.kernel,
        "date": datetime.date.today().isoformat(),
    }
    print(", ".join(f"{k} {v}" for k, v in about.items()))
    print(f"{'':44}{'forward, ms':^30}{'backward, ms':^30}")
    print(f"{'mask':14}{'tokens':>8}{'N':>4}  {'plan':16}" + 2 * f"{'predicted':>10}{'measured':>10}{'off':>10}", flush=True)
    clock, rows, missed = Clock(args.repeat), [], 0
    for name, make in MASKS.items():
        for tokens, ranks, layout, strategy in PLANS:
            mask = make(tokens)
            plan = ls.plan(
                mask, tokens, ls.Mesh.abstract(ranks), layout=layout, strategy=strategy, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM
            )
            rank, forward, backward = predicted(plan, profile)
            took = measure(mask, tokens, ranks, layout, strategy, rank, args.kernel, clock)
            real = [took[s]["device"] for s in ("forward", "backward")]
            off = [1e3 * p / m - 1 for p, m in zip((forward, backward), real, strict=True)]
            both_off = 1e3 * (forward + backward) / sum(real) - 1
            missed += abs(both_off) > WITHIN
            row = {"mask": name, "tokens": tokens, "ranks": ranks, "layout": layout, "strategy": strategy, "rank": rank}
            rows.append({**row, "predicted_ms": [1e3 * forward, 1e3 * backward], "measured_ms": real, "off": off, "off_both": both_off})
            parts = "".join(f"{1e3 * p:10.3f}{m:10.3f}{100 * o:+9.1f}%" for p, m, o in zip((forward, backward), real, off, strict=True))
            mark = "" if abs(both_off) <= WITHIN else "  MISSED"
            print(
                f"{name:14}{tokens:8d}{ranks:4d}  {layout[:6] + ' ' + strategy:16}{parts}   both {100 * both_off:+.1f}%{mark}", flush=True
            )
    print(f"{len(rows) - missed} of {len(rows)} plans within {100 * WITHIN:.0f} %")
    if args.json:
        print(json.dumps({**about, "profile": dump(profile), "rows": rows}))


if __name__ == "__main__":
    main()
