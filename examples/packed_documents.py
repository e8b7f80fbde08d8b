"""Packed documents with a learned bias on one device: out, lse and gradients, compared with dense attention in float64.

    python examples/packed_documents.py

Prints relative errors; exits with an error if one is too large.
"""

from __future__ import annotations

import time

import torch

import longspan as ls
from longspan.testing import oracle

TOKENS, HEADS, KV_HEADS, DIM = 1500, 8, 2, 64
LENGTHS = [700, 150, 30, 420, 200]


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q = torch.randn(1, HEADS, TOKENS, DIM, device=device, requires_grad=True)
    k = torch.randn(1, KV_HEADS, TOKENS, DIM, device=device, requires_grad=True)
    v = torch.randn(1, KV_HEADS, TOKENS, DIM, device=device, requires_grad=True)
    bias = torch.randn(HEADS, 64, device=device, requires_grad=True)
    sink = torch.randn(HEADS, device=device, requires_grad=True)

    mask = ls.causal() & ls.documents(lengths=LENGTHS)

    def score_mod(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        """A learned bias by distance up to 63, then a soft cap."""
        return 20 * torch.tanh((score + bias[h, (q_idx - kv_idx).clamp(0, 63)]) / 20)

    print(f"{TOKENS} tokens in {len(LENGTHS)} documents, {HEADS} query heads, {KV_HEADS} KV heads, on {device}\n")
    print(mask.block_table(TOKENS))

    start = time.perf_counter()
    out, lse = ls.attention(q, k, v, mask=mask, score_mod=score_mod, sink=sink, return_lse=True)
    leaves = {"q": q, "k": k, "v": v, "bias": bias, "sink": sink}
    grads = torch.autograd.grad(out.square().mean() + lse.mean(), list(leaves.values()))
    print(f"\nforward and backward: {time.perf_counter() - start:.2f} s")

    expected_out, expected_lse = oracle(q, k, v, mask=mask, score_mod=score_mod, sink=sink, return_lse=True)
    expected_grads = torch.autograd.grad(expected_out.square().mean() + expected_lse.mean(), list(leaves.values()))
    print(f"\n{'against dense float64':24}{'relative error':>16}")
    pairs = {"out": (out, expected_out), "lse": (lse, expected_lse)}
    pairs |= {f"gradient of {name}": (g, w) for name, g, w in zip(leaves, grads, expected_grads, strict=True)}
    for name, (got, expected) in pairs.items():
        error = float((got.detach().double() - expected.detach().double()).norm() / expected.detach().double().norm())
        print(f"{name:24}{error:16.1e}")
        if not error < 1e-5:
            raise SystemExit(f"{name} does not match: relative error {error:.1e}")
    print("\nall match")


if __name__ == "__main__":
    main()
