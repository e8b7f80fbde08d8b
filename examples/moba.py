"""MoBA: each query of each head attends to its own block of keys and to the blocks whose mean key it scores highest.

    python examples/moba.py

Compares out and gradients with dense attention in float64; exits with an error if they do not match.
"""

from __future__ import annotations

import torch
from torch import Tensor

import longspan as ls

HEADS, KV_HEADS, DIM, BLOCK, TOP = 4, 2, 32, 64, 3


def choose_blocks(q: Tensor, k: Tensor) -> Tensor:
    """Indices [B, H, S, TOP] of blocks: the query's own one, and of the complete past ones those with the highest q · mean(k)."""
    tokens = q.shape[2]
    means = torch.stack([part.mean(2) for part in k.split(BLOCK, 2)], 2)  # [B, G, blocks, D]
    scores = q @ means.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    own = (torch.arange(tokens, device=q.device) // BLOCK)[:, None]
    block = torch.arange(means.shape[2], device=q.device)
    scores = scores.masked_fill(block > own, -torch.inf).masked_fill(block == own, torch.inf)
    top = scores.topk(min(TOP, len(block)), -1)
    return torch.where(top.values > -torch.inf, top.indices, -1).int()


def moba(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():  # no gradient flows through the choice
        indices = choose_blocks(q, k)
    return ls.attention(q, k, v, mask=ls.selected(indices, BLOCK, q_granularity=1) & ls.causal())


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by the definition: a mask of all pairs."""
    tokens, shared = q.shape[2], q.shape[1] // k.shape[1]
    i = torch.arange(tokens, device=q.device)
    visible = (choose_blocks(q, k)[..., None] == i // BLOCK).any(-2) & (i[:, None] >= i)
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    return (q @ k.mT / DIM**0.5).masked_fill(~visible, -torch.inf).softmax(-1) @ v


def main(tokens: int = 1000) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(1, h, tokens, DIM, device=device, requires_grad=True) for h in (HEADS, KV_HEADS, KV_HEADS))
    out = moba(q, k, v)
    grads = torch.autograd.grad(out.square().mean(), (q, k, v))
    expected = dense(q.double(), k.double(), v.double())
    expected_grads = torch.autograd.grad(expected.square().mean(), (q, k, v))
    for name, got, right in zip(("out", "dq", "dk", "dv"), (out, *grads), (expected, *expected_grads), strict=True):
        error = float((got.detach().double() - right.detach()).norm() / right.detach().norm())
        print(f"{name:8}{error:10.1e}")
        if not error < 1e-5:
            raise SystemExit(f"{name} does not match: relative error {error:.1e}")
    print("all match")


if __name__ == "__main__":
    main()
