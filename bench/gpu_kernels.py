"""The operator on one GPU against compiled FlexAttention, forward and backward, same inputs, same run.

    PYTHONPATH=src python bench/gpu_kernels.py [--quick] [--json]

B 1, H 32, D 128, bfloat16; 8,192 and 32,768 tokens; 32 and 8 key heads. Both sides are called as users call them: `longspan.attention`, and
`torch.compile(flex_attention)`; backward through autograd. A time is the median over repetitions of ten calls in a row, so that the host
runs ahead of the device as it does in training. FLOP: 4·D per pair that the mask allows, 2.5 times that backward.
`error` is the largest difference of out to a float32 computation of a few rows, next to FlexAttention's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import longspan as ls

HEADS, DIM = 32, 128
Mod = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    mask: Any
    score_mod: Mod | None = None


def document_lengths(tokens: int, documents: int = 16) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    cuts = torch.randperm(tokens - 1, generator=generator)[: documents - 1].sort().values + 1
    return torch.diff(torch.cat([torch.tensor([0]), cuts, torch.tensor([tokens])])).tolist()


def softcap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return 30 * torch.tanh(score / 30)


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


def milliseconds(fn: Callable[[], Any], repeat: int, calls: int = 10) -> float:
    for _ in range(3):
        fn()
    times = []
    for _ in range(repeat):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            fn()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return statistics.median(times)


def pairs(mask: Any, tokens: int) -> int:
    """How many (query, key) pairs the mask allows, counted on the device, a strip at a time."""
    zero, keys, total = torch.zeros((), dtype=torch.int64, device="cuda"), torch.arange(tokens, device="cuda"), 0
    for start in range(0, tokens, 1024):
        total += int(mask(zero, zero, torch.arange(start, start + 1024, device="cuda")[:, None], keys[None]).sum())
    return total


def reference_rows(case: Case, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    """Some rows of the result in float32."""
    shared = q.shape[1] // k.shape[1]
    keys, values = (t.float().repeat_interleave(shared, 1) for t in (k, v))
    scores = q[:, :, rows].float() @ keys.mT / DIM**0.5
    b = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device="cuda")
    h = torch.arange(HEADS, device="cuda").view(1, -1, 1, 1)
    index = b, h, rows.view(1, 1, -1, 1), torch.arange(k.shape[2], device="cuda").view(1, 1, 1, -1)
    scores = scores if case.score_mod is None else case.score_mod(scores, *index)
    return torch.softmax(torch.where(case.mask(*index), scores, -torch.inf), -1) @ values


def measure(case: Case, tokens: int, kv_heads: int, repeat: int) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, h, tokens, DIM, device="cuda", dtype=torch.bfloat16) for h in (HEADS, kv_heads, kv_heads, HEADS))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    block_mask = torch.compile(create_block_mask)(case.mask, None, None, tokens, tokens, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    calls: dict[str, Callable[[], Tensor]] = {
        "flex": lambda: compiled(q, k, v, score_mod=case.score_mod, block_mask=block_mask, enable_gqa=kv_heads != HEADS),  # type: ignore[dict-item,return-value]
        "longspan": lambda: ls.attention(q, k, v, mask=case.mask, score_mod=case.score_mod),
    }
    rows = torch.randint(0, tokens, (64,), device="cuda")
    want = reference_rows(case, q.detach(), k.detach(), v.detach(), rows)
    row: dict[str, Any] = {"case": case.name, "tokens": tokens, "heads": f"{HEADS}/{kv_heads}"}
    flop = 4.0 * DIM * HEADS * pairs(case.mask, tokens)
    for name, call in calls.items():
        out = call()
        row[f"{name}_error"] = float((out.detach()[:, :, rows].float() - want).abs().max())
        row[f"{name}_forward_ms"] = milliseconds(call, repeat)
        row[f"{name}_backward_ms"] = milliseconds(lambda out=out: torch.autograd.grad(out, inputs, grad, retain_graph=True), repeat)  # type: ignore[misc]
        row[f"{name}_forward_tflops"] = flop / row[f"{name}_forward_ms"] / 1e9
        row[f"{name}_backward_tflops"] = 2.5 * flop / row[f"{name}_backward_ms"] / 1e9
    for step in ("forward", "backward"):
        row[f"{step}_ratio"] = row[f"flex_{step}_ms"] / row[f"longspan_{step}_ms"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8,192 tokens, 32 key heads only")
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
    print("TFLOP/s of useful work; ratio: time of compiled FlexAttention over time of longspan")
    print(
        f"{'':18}{'tokens':>7}{'heads':>7} |{'flex':>6}{'ours':>6}{'ratio':>7} fwd |{'flex':>6}{'ours':>6}{'ratio':>7} bwd | error flex / ours"
    )
    rows = []
    for tokens, kv_heads in [(8192, 32)] if args.quick else [(8192, 32), (32768, 32), (8192, 8), (32768, 8)]:
        for case in cases(tokens):
            row = measure(case, tokens, kv_heads, args.repeat)
            rows.append(row)
            steps = [
                f"{row[f'flex_{s}_tflops']:6.0f}{row[f'longspan_{s}_tflops']:6.0f}{row[f'{s}_ratio']:7.2f}" for s in ("forward", "backward")
            ]
            errors = f"{row['flex_error']:.1e} / {row['longspan_error']:.1e}"
            print(f"{case.name:18}{tokens:7d}{row['heads']:>7} |{steps[0]} fwd |{steps[1]} bwd | {errors}", flush=True)
    if args.json:
        print(json.dumps({**about, "rows": rows}))


if __name__ == "__main__":
    main()
