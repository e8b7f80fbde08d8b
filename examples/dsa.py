"""Token selection by an indexer, as in DeepSeek's sparse attention: each query attends to the keys that a small scorer ranks highest.

    python examples/dsa.py

All query heads share one KV head and one choice. The indexer is trained to match the attention probabilities (a KL divergence); the model's
loss does not reach it, because no gradient flows through the choice. Compares out and gradients with dense attention in float64; exits
with an error if they do not match.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import longspan as ls

HEADS, DIM, INDEX_HEADS, INDEX_DIM, TOP = 8, 32, 2, 8, 48


class Indexer(nn.Module):
    """Scores [B, S, S] of all keys for all queries: Σ over index heads of weight · relu(q · k), −∞ for later keys."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q = nn.Linear(width, INDEX_HEADS * INDEX_DIM, bias=False)
        self.k = nn.Linear(width, INDEX_DIM, bias=False)
        self.weight = nn.Linear(width, INDEX_HEADS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x).unflatten(-1, (INDEX_HEADS, INDEX_DIM)), self.k(x)
        scores = torch.einsum("bqh,bqhk->bqk", self.weight(x), torch.einsum("bqhd,bkd->bqhk", q, k).relu())
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return scores.masked_fill(future, -torch.inf)


def choose_keys(scores: Tensor) -> Tensor:
    """Indices [B, 1, S, TOP] of single keys, −1 where a query has fewer."""
    top = scores.topk(min(TOP, scores.shape[-1]), -1)
    return torch.where(top.values > -torch.inf, top.indices, -1).int()[:, None]


def dense(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
    """The same attention by the definition: a mask of all pairs."""
    visible = (indices[..., None] == torch.arange(k.shape[2], device=k.device)).any(-2)
    return (q @ k.mT / DIM**0.5).masked_fill(~visible, -torch.inf).softmax(-1) @ v


def main(tokens: int = 400, width: int = 64) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, indexer = torch.randn(1, tokens, width, device=device), Indexer(width).to(device)
    q, k, v = (torch.randn(1, h, tokens, DIM, device=device, requires_grad=True) for h in (HEADS, 1, 1))

    scores = indexer(x)
    indices = choose_keys(scores.detach())
    out = ls.attention(q, k, v, mask=ls.selected(indices, granularity=1))
    grads = torch.autograd.grad(out.square().mean(), (q, k, v))
    expected = dense(q.double(), k.double(), v.double(), indices)
    expected_grads = torch.autograd.grad(expected.square().mean(), (q, k, v))
    for name, got, right in zip(("out", "dq", "dk", "dv"), (out, *grads), (expected, *expected_grads), strict=True):
        error = float((got.detach().double() - right.detach()).norm() / right.detach().norm())
        print(f"{name:8}{error:10.1e}")
        if not error < 1e-5:
            raise SystemExit(f"{name} does not match: relative error {error:.1e}")

    # The indexer learns from the probabilities of the chosen keys, averaged over heads.
    chosen = indices[:, 0].clamp(min=0).long()
    missing = indices[:, 0] < 0
    target = (q @ k.mT / DIM**0.5).detach().gather(-1, chosen[:, None].expand(-1, HEADS, -1, -1))
    target = target.masked_fill(missing[:, None], -torch.inf).softmax(-1).mean(1)
    learned = scores.gather(-1, chosen).masked_fill(missing, -torch.inf).log_softmax(-1).masked_fill(missing, 0.0)
    loss = nn.functional.kl_div(learned, target, reduction="batchmean")
    loss.backward()
    print(f"indexer's loss {float(loss.detach()) / tokens:.3f} per query, gradient {float(indexer.q.weight.grad.norm()):.2e}")
    print("all match")


if __name__ == "__main__":
    main()
