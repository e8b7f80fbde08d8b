"""longspan on a CPU against torch's SDPA, forward and backward.

    python bench/cpu.py [--tokens 8192] [--repeat 3] [--json]

Peers: SDPA(is_causal=True) for the causal mask; SDPA with a dense boolean mask, torch's only way on a CPU, for packed documents.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import longspan as ls


def seconds(fn: Callable[[], Any], repeat: int) -> float:
    """Minimum of `repeat` calls after a warm-up call; on a shared machine, the minimum is the least disturbed."""
    fn()
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        fn()
        best = min(best, time.perf_counter() - start)
    return best


def forward_backward(call: Callable[..., Tensor], tensors: list[Tensor], grad: Tensor) -> Callable[[], Any]:
    """A call that runs forward and backward."""
    return lambda: torch.autograd.grad(call(*tensors), tensors, grad)


def document_lengths(tokens: int, documents: int) -> list[int]:
    """Linearly growing lengths with sum `tokens`."""
    ends = [round(tokens * (i + i * i / documents) / (2 * documents)) for i in range(documents + 1)]
    return [b - a for a, b in itertools.pairwise(ends)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    tensors = [torch.randn(1, args.heads, args.tokens, args.dim, requires_grad=True) for _ in range(3)]
    grad = torch.randn(1, args.heads, args.tokens, args.dim)
    lengths = document_lengths(args.tokens, 16)
    packed = ls.causal() & ls.documents(lengths=lengths)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    dense = (ids[:, None] == ids[None, :]).tril()
    cases = {
        "causal": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), ls.causal()),
        "16 packed documents": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=dense), packed),
    }
    rows: list[dict[str, Any]] = []
    print(
        f"{args.tokens} tokens, {args.heads} heads, dim {args.dim}, float32, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    print(f"{'mask':22}{'density':>9}{'SDPA s':>10}{'longspan s':>12}{'ratio':>8}")
    for name, (peer, mask) in cases.items():
        ours = forward_backward(lambda q, k, v, mask=mask: ls.attention(q, k, v, mask=mask), tensors, grad)
        theirs = forward_backward(peer, tensors, grad)
        for a, b in zip(ours(), theirs(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        density = mask.block_table(args.tokens).density
        times = seconds(theirs, args.repeat), seconds(ours, args.repeat)
        rows.append({"mask": name, "density": density, "sdpa_s": times[0], "longspan_s": times[1], "ratio": times[0] / times[1]})
        print(f"{name:22}{density:9.3f}{times[0]:10.3f}{times[1]:12.3f}{times[0] / times[1]:8.2f}")
    if args.json:
        print(
            json.dumps(
                {
                    "bench": "cpu",
                    "torch": torch.__version__,
                    "machine": platform.machine(),
                    "threads": torch.get_num_threads(),
                    "rows": rows,
                }
            )
        )


if __name__ == "__main__":
    main()
