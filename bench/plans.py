"""Plans for a million tokens on 64 ranks: work balance, KV traffic and planning time. Needs no GPU.

    python bench/plans.py [--json]

Masks: causal packed documents with log-normal lengths (mu 8.0, sigma 1.4, seeds 0 to 4), causal, sliding window.

    busiest    (query, key) pairs of the busiest rank over the mean, counted exactly
    received   KV that a rank receives (mean, maximum), in percent of an all-gather; whole tiles of 128 tokens
    shards     mean KV received, in shards
    bound      lower bound of `received` for any layout with the same balance, see `bound`
    seconds    mask, block table, layout and schedule on one thread
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import time
from typing import Any

import numpy as np
import torch

import longspan as ls

TOKENS, RANKS = 1 << 20, 64
LAYOUTS = ("contiguous", "head_tail", "round_robin", "auto")
TARGETS = (2.0, 4.7, 4.3, 19.0, 4.3)  # received percent, one per seed


def lengths(seed: int, tokens: int = TOKENS) -> list[int]:
    """Log-normal document lengths with sum `tokens`."""
    generator, drawn, left = np.random.default_rng(seed), [], tokens
    while left:
        drawn.append(int(min(left, max(16, generator.lognormal(8.0, 1.4)))))
        left -= drawn[-1]
    return drawn


def visible_keys(mask: str, tokens: int, documents: list[int]) -> torch.Tensor:
    """Number of keys that each query sees [tokens]."""
    position = torch.arange(tokens)
    if mask == "documents":
        start = torch.tensor(documents).cumsum(0) - torch.tensor(documents)
        return position - start.repeat_interleave(torch.tensor(documents)) + 1
    return position + 1 if mask == "causal" else (position + 1).clamp(max=1024)


def bound(documents: list[int], ranks: int, limit: float = 1.03) -> float:
    """Lower bound of the mean KV received, as a share of an all-gather, for any layout with imbalance up to `limit`.

    A rank that owns position p of a document reads all KV before p. The positions after p hold a known amount of work and of tokens, so
    at least h(p) ranks own some of them. Each of these ranks, except the owner of key p, receives key p.
    """
    tokens = sum(documents)
    work = sum(n * (n + 1) / 2 for n in documents)
    max_work, max_tokens, total = limit * work / ranks, tokens / ranks + 128, 0.0
    for n in documents:
        p = np.arange(0, n, 128)
        left, pairs = n - p, (n * (n + 1.0) - p * (p + 1.0)) / 2
        total += float((np.ceil(np.maximum(pairs / max_work, left / max_tokens)) - 1).clip(min=0).sum() * 128)
    return total / ranks / (tokens * (ranks - 1) / ranks)


def measure(name: str, mask: Any, kind: str, tokens: int, documents: list[int], layout: str) -> dict[str, Any]:
    """One row of the result."""
    start = time.perf_counter()
    plan = ls.plan(mask, tokens, ls.Mesh.abstract(RANKS), layout=layout, strategy="exchange")
    seconds = time.perf_counter() - start
    visible = visible_keys(kind, tokens, documents).double()
    work = torch.stack([visible[plan.layout.positions(r)].sum() for r in range(RANKS)])
    received = plan.schedule.received(RANKS).sum(0).double()
    all_gather = tokens * (RANKS - 1) / RANKS
    return {
        "mask": name,
        "layout": layout,
        "busiest": float(work.max() / work.mean()),
        "received_mean_percent": 100 * float(received.mean()) / all_gather,
        "received_most_percent": 100 * float(received.max()) / all_gather,
        "received_shards": float(received.mean()) / (tokens / RANKS),
        "stages": plan.schedule.stages,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    about = {"bench": "plans", "machine": platform.machine(), "torch": torch.__version__, "date": datetime.date.today().isoformat()}
    print(", ".join(f"{k} {v}" for k, v in about.items()))
    ls.plan(ls.causal() & ls.documents(lengths=[1000, 24]), 1024, ls.Mesh.abstract(2))  # warm up
    print(f"{'':24}{'layout':12}{'busiest':>9}{'received':>10}{'max':>8}{'shards':>8}{'stages':>8}{'seconds':>9}")
    rows = []
    cases: list[tuple[str, Any, str, int, list[int]]] = []
    for seed in range(5):
        documents = lengths(seed)
        cases.append((f"documents, seed {seed}", ls.causal() & ls.documents(lengths=documents), "documents", TOKENS, documents))
    cases.append(("causal, 8k per rank", ls.causal(), "causal", 8192 * RANKS, []))
    cases.append(("window 1024", ls.sliding_window(1024), "window", 8192 * RANKS, []))
    for i, (name, mask, kind, tokens, documents) in enumerate(cases):
        for layout in LAYOUTS:
            r = measure(name, mask, kind, tokens, documents, layout)
            rows.append(r)
            print(
                f"{name:24}{layout:12}{r['busiest']:9.3f}{r['received_mean_percent']:9.2f}%{r['received_most_percent']:7.1f}%"
                f"{r['received_shards']:8.2f}{r['stages']:8d}{r['seconds']:9.2f}",
                flush=True,
            )
        if documents:
            print(f"{'':24}target {TARGETS[i]} %, bound {100 * bound(documents, RANKS):.2f} %")
    if args.json:
        print(json.dumps({**about, "rows": rows}))


if __name__ == "__main__":
    main()
