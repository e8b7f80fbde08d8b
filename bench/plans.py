"""Plans for a million tokens on 64 ranks, without a GPU: how even the work is, how much moves, how long planning takes.

    python bench/plans.py [--json]

Causal packed documents with log-normal lengths (mu 8.0, sigma 1.4, seeds 0 to 4), causal alone, and a sliding window. "busiest": pairs
computed by the busiest rank over the mean, counted exactly. "received": keys and values received, mean and most over ranks, as a share of
what an all-gather brings, as planned (whole tiles of 128). "bound": no layout with such balance receives less (see `bound`). "seconds":
mask, block table, layout and schedule together, on one thread.
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
TARGETS = (2.0, 4.7, 4.3, 19.0, 4.3)


def lengths(seed: int, tokens: int = TOKENS) -> list[int]:
    generator, found, left = np.random.default_rng(seed), [], tokens
    while left:
        found.append(int(min(left, max(16, generator.lognormal(8.0, 1.4)))))
        left -= found[-1]
    return found


def keys_seen(mask: str, tokens: int, documents: list[int]) -> torch.Tensor:
    """How many keys each query sees [tokens], exactly."""
    position = torch.arange(tokens)
    if mask == "documents":
        start = torch.tensor(documents).cumsum(0) - torch.tensor(documents)
        return position - start.repeat_interleave(torch.tensor(documents)) + 1
    return position + 1 if mask == "causal" else (position + 1).clamp(max=1024)


def bound(documents: list[int], ranks: int, limit: float = 1.03) -> float:
    """Least mean share that any assignment of tokens receives, documents alone considered one at a time.

    A rank that holds position p of a document reads all before p. The positions above p of a document of length n hold a known amount of
    work and of tokens, so at least h(p) ranks hold some of them; each of these but the owner of the key at p receives it.
    """
    tokens = sum(documents)
    work = sum(n * (n + 1) / 2 for n in documents)
    most, cap, total = limit * work / ranks, tokens / ranks + 128, 0.0
    for n in documents:
        p = np.arange(0, n, 128)
        left, pairs = n - p, (n * (n + 1.0) - p * (p + 1.0)) / 2
        total += float((np.ceil(np.maximum(pairs / most, left / cap)) - 1).clip(min=0).sum() * 128)
    return total / ranks / (tokens * (ranks - 1) / ranks)


def measure(name: str, mask: Any, kind: str, tokens: int, documents: list[int], layout: str) -> dict[str, Any]:
    start = time.perf_counter()
    plan = ls.plan(mask, tokens, ls.Mesh.abstract(RANKS), layout=layout, strategy="exchange")
    seconds = time.perf_counter() - start
    seen = keys_seen(kind, tokens, documents).double()
    work = torch.stack([seen[plan.layout.positions(r)].sum() for r in range(RANKS)])
    received = plan.schedule.received(RANKS).sum(0).double()
    every = tokens * (RANKS - 1) / RANKS
    return {
        "mask": name,
        "layout": layout,
        "busiest": float(work.max() / work.mean()),
        "received_mean_percent": 100 * float(received.mean()) / every,
        "received_most_percent": 100 * float(received.max()) / every,
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
    ls.plan(ls.causal() & ls.documents(lengths=[1000, 24]), 1024, ls.Mesh.abstract(2))  # imports and first calls are not planning
    print(f"{'':24}{'layout':12}{'busiest':>9}{'received':>10}{'most':>8}{'shards':>8}{'stages':>8}{'seconds':>9}")
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
