"""kernel="triton" on one GPU against compiled FlexAttention, forward and backward.

    PYTHONPATH=src:. python bench/gpu_kernels.py [--tokens N] [--kv-heads N] [--case NAME] [--json]

B 1, H 32, D 128, bfloat16; 8,192 and 32,768 tokens; 32 and 8 KV heads. Both are called through their public functions,
`longspan.attention` and `torch.compile(flex_attention)`, backward through autograd. Device time and host time per call are measured
separately. TFLOP/s count useful work: 4·D per visible (query, key) pair forward, 2.5 times as much backward. Errors are the largest
difference of out from a float32 computation of 64 queries.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import longspan as ls

HEADS, DIM = 32, 128
STEPS = ("forward", "backward")
Mod = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A mask and a score_mod."""

    name: str
    mask: Any
    score_mod: Mod | None = None


def document_lengths(tokens: int, documents: int = 16) -> list[int]:
    """Random lengths with sum `tokens`; seed 0."""
    generator = torch.Generator().manual_seed(0)
    cuts = torch.randperm(tokens - 1, generator=generator)[: documents - 1].sort().values + 1
    return torch.diff(torch.cat([torch.tensor([0]), cuts, torch.tensor([tokens])])).tolist()


def softcap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return 30 * torch.tanh(score / 30)


@cache
def cases(tokens: int) -> list[Case]:
    slopes = torch.exp2(-torch.arange(1, HEADS + 1, device="cuda") * 8.0 / HEADS)
    ids = torch.repeat_interleave(torch.arange(16), torch.tensor(document_lengths(tokens))).cuda()
    return [
        Case(name="causal", mask=ls.causal()),
        Case(name="16 documents", mask=ls.causal() & ls.documents(ids=ids)),
        Case(name="window 1024", mask=ls.sliding_window(1024)),
        Case(name="causal + softcap", mask=ls.causal(), score_mod=softcap),
        Case(name="causal + alibi", mask=ls.causal(), score_mod=lambda s, b, h, q, kv: s + (kv - q) * slopes[h]),
    ]


class Clock:
    """Device time and host time of a call.

    Ten calls are enqueued behind matrix products that keep the device busy until all ten are queued, so that the time between the events
    does not include host time.
    """

    def __init__(self, repeat: int) -> None:
        self.repeat = repeat
        self.block = torch.randn(16384, 16384, device="cuda", dtype=torch.bfloat16)

    def __call__(self, fn: Callable[[], Any], calls: int = 10) -> tuple[float, float]:
        """(device milliseconds, host microseconds) per call, medians."""
        for _ in range(2):
            fn()
        device, host = [], []
        for _ in range(self.repeat):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            for _ in range(4):
                self.block @ self.block
            start.record()
            began = time.perf_counter()
            for _ in range(calls):
                fn()
            host.append((time.perf_counter() - began) / calls * 1e6)
            end.record()
            end.synchronize()
            device.append(start.elapsed_time(end) / calls)
        return statistics.median(device), statistics.median(host)


def visible_pairs(mask: Any, tokens: int) -> int:
    """Number of visible (query, key) pairs, counted on the device for 1024 queries at a time."""
    zero, keys, total = torch.zeros((), dtype=torch.int64, device="cuda"), torch.arange(tokens, device="cuda"), 0
    for start in range(0, tokens, 1024):
        total += int(mask(zero, zero, torch.arange(start, start + 1024, device="cuda")[:, None], keys[None]).sum())
    return total


def reference(case: Case, q: Tensor, k: Tensor, v: Tensor, queries: Tensor) -> Tensor:
    """Out of the queries at positions `queries` [n] in float32 [B, H, n, D]."""
    group = q.shape[1] // k.shape[1]
    keys, values = (t.float().repeat_interleave(group, 1) for t in (k, v))
    scores = q[:, :, queries].float() @ keys.mT / DIM**0.5
    b = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device="cuda")
    h = torch.arange(HEADS, device="cuda").view(1, -1, 1, 1)
    index = b, h, queries.view(1, 1, -1, 1), torch.arange(k.shape[2], device="cuda").view(1, 1, 1, -1)
    scores = scores if case.score_mod is None else case.score_mod(scores, *index)
    return torch.softmax(torch.where(case.mask(*index), scores, -torch.inf), -1) @ values


def measure(case: Case, tokens: int, kv_heads: int, clock: Clock) -> dict[str, Any]:
    """One row of the result."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, h, tokens, DIM, device="cuda", dtype=torch.bfloat16) for h in (HEADS, kv_heads, kv_heads, HEADS))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    block_mask = torch.compile(create_block_mask)(case.mask, None, None, tokens, tokens, device="cuda")
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    calls: dict[str, Callable[[], Tensor]] = {
        "flex": lambda: compiled(q, k, v, score_mod=case.score_mod, block_mask=block_mask, enable_gqa=kv_heads != HEADS),
        "longspan": lambda: ls.attention(q, k, v, mask=case.mask, score_mod=case.score_mod, kernel="triton"),
    }
    queries = torch.randint(0, tokens, (64,), device="cuda")
    expected = reference(case, q.detach(), k.detach(), v.detach(), queries)
    row: dict[str, Any] = {"case": case.name, "tokens": tokens, "heads": f"{HEADS}/{kv_heads}"}
    flop = 4.0 * DIM * HEADS * visible_pairs(case.mask, tokens)
    for name, call in calls.items():
        out = call()
        row[f"{name}_error"] = float((out.detach()[:, :, queries].float() - expected).abs().max())

        def back(out: Tensor = out) -> Any:
            return torch.autograd.grad(out, inputs, grad, retain_graph=True)

        for step, fn, work in (("forward", call, flop), ("backward", back, 2.5 * flop)):
            row[f"{name}_{step}_ms"], row[f"{name}_{step}_host_us"] = clock(fn)
            row[f"{name}_{step}_tflops"] = work / row[f"{name}_{step}_ms"] / 1e9
    for step in STEPS:
        row[f"{step}_ratio"] = row[f"flex_{step}_ms"] / row[f"longspan_{step}_ms"]
    return row


def line(row: dict[str, Any]) -> str:
    """A row of the printed table."""
    steps = [f"{row[f'flex_{s}_tflops']:6.0f}{row[f'longspan_{s}_tflops']:6.0f}{row[f'{s}_ratio']:7.2f}" for s in STEPS]
    host = [" /".join(f"{row[f'{name}_{s}_host_us']:5.0f}" for s in STEPS) for name in ("flex", "longspan")]
    errors = f"{row['flex_error']:.1e} {row['longspan_error']:.1e}"
    return f"{row['case']:18}{row['tokens']:7d}{row['heads']:>7} |{steps[0]} |{steps[1]} | {errors} | {host[0]} {host[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, choices=(8192, 32768), help="only this number of tokens")
    parser.add_argument("--kv-heads", type=int, choices=(8, 32), help="only this number of KV heads")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeat", type=int, default=10)
    args = parser.parse_args()
    about = {
        "bench": "gpu_kernels",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
    }
    print(", ".join(f"{k} {v}" for k, v in about.items()))
    print("TFLOP/s of useful work on the device; ratio: time of compiled FlexAttention over time of longspan")
    print(f"{'':32} |{'forward':^19} |{'backward':^19} | largest error   | host µs fwd / bwd")
    columns = f"{'flex':>6}{'ours':>6}{'ratio':>7}"
    print(f"{'':18}{'tokens':>7}{'heads':>7} |{columns} |{columns} | flex    ours    | flex         ours")
    clock, rows = Clock(args.repeat), []
    for tokens, kv_heads in [(8192, 32), (32768, 8), (32768, 32), (8192, 8)]:
        if args.tokens in (None, tokens) and args.kv_heads in (None, kv_heads):
            for case in (c for c in cases(tokens) if args.case in c.name):
                rows.append(measure(case, tokens, kv_heads, clock))
                print(line(rows[-1]), flush=True)
    if args.json:
        print(json.dumps({**about, "rows": rows}))


if __name__ == "__main__":
    main()
