"""Packed documents with a learned bias: train a step on any device, and check it against the dense float64 computation.

    python examples/packed_documents.py

Prints what matched; exits with an error if something did not.
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
        """A learned bias for the 64 nearest distances, then a soft cap."""
        return 20 * torch.tanh((score + bias[h, (q_idx - kv_idx).clamp(0, 63)]) / 20)

    print(f"{TOKENS} tokens in {len(LENGTHS)} documents, {HEADS} query heads over {KV_HEADS} key heads, on {device}\n")
    print(mask.block_table(TOKENS))

    start = time.perf_counter()
    out, lse = ls.attention(q, k, v, mask=mask, score_mod=score_mod, sink=sink, return_lse=True)
    wanted = {"q": q, "k": k, "v": v, "bias": bias, "sink": sink}
    grads = torch.autograd.grad(out.square().mean() + lse.mean(), list(wanted.values()))
    print(f"\nforward and backward: {time.perf_counter() - start:.2f} s")

    want_out, want_lse = oracle(q, k, v, mask=mask, score_mod=score_mod, sink=sink, return_lse=True)
    want_grads = torch.autograd.grad(want_out.square().mean() + want_lse.mean(), list(wanted.values()))
    print(f"\n{'against dense float64':24}{'relative error':>16}")
    pairs = {"out": (out, want_out), "lse": (lse, want_lse)}
    pairs |= {f"gradient of {name}": (g, w) for name, g, w in zip(wanted, grads, want_grads, strict=True)}
    for name, (got, want) in pairs.items():
        error = float((got.detach().double() - want.detach().double()).norm() / want.detach().double().norm())
        print(f"{name:24}{error:16.1e}")
        if not error < 1e-5:
            raise SystemExit(f"{name} does not match: relative error {error:.1e}")
    print("\nall match")


if __name__ == "__main__":
    main()
