"""Native sparse attention: compressed, selected and sliding-window branches, mixed by gates.

    python examples/nsa.py

The compressed branch attends to mean keys and values of blocks. Its probabilities, summed over the query heads of a KV head, choose the
blocks of the selected branch. Compares out and gradients with dense attention in float64; exits with an error if they do not match.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import longspan as ls

HEADS, KV_HEADS, DIM, BLOCK, TOP, WINDOW = 4, 2, 32, 16, 4, 32


def block_is_past(b: Tensor, h: Tensor, q_idx: Tensor, block: Tensor) -> Tensor:
    """mask_mod of the compressed branch, whose keys are blocks: a query sees blocks that ended before it."""
    return (block + 1) * BLOCK <= q_idx


def choose_blocks(q: Tensor, compressed_k: Tensor) -> Tensor:
    """Indices [B, KV heads, S, TOP]: the query's own block, and the past ones to which the heads of a KV head give most probability."""
    i, block = torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(compressed_k.shape[2], device=q.device)
    scores = q @ compressed_k.repeat_interleave(q.shape[1] // compressed_k.shape[1], 1).mT / DIM**0.5
    past = (block + 1) * BLOCK <= i
    weights = scores.masked_fill(~past, -torch.inf).softmax(-1).nan_to_num(0.0)  # the first queries see no block
    importance = weights.unflatten(1, (compressed_k.shape[1], -1)).sum(2)
    importance = importance.masked_fill(block > i // BLOCK, -1.0).masked_fill(block == i // BLOCK, torch.inf)
    top = importance.topk(min(TOP, len(block)), -1)
    return torch.where(top.values >= 0, top.indices, -1).int()


class NativeSparseAttention(nn.Module):
    """Three branches over the same queries. Input and output [B, S, WIDTH]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q = nn.Linear(width, HEADS * DIM, bias=False)
        self.k = nn.Linear(width, KV_HEADS * DIM, bias=False)
        self.v = nn.Linear(width, KV_HEADS * DIM, bias=False)
        self.gates = nn.Linear(width, 3 * HEADS)
        self.out = nn.Linear(HEADS * DIM, width, bias=False)

    def forward(self, x: Tensor, *, dense: bool = False) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        compressed_k, compressed_v = (torch.stack([part.mean(2) for part in t.split(BLOCK, 2)], 2) for t in (k, v))
        with torch.no_grad():  # no gradient flows through the choice
            indices = choose_blocks(q, compressed_k)
        attend = _dense_attention if dense else ls.attention
        branches = (
            attend(q, compressed_k, compressed_v, mask=ls.mask_mod(block_is_past)),
            attend(q, k, v, mask=ls.selected(indices, BLOCK, q_granularity=1) & ls.causal()),
            attend(q, k, v, mask=ls.sliding_window(WINDOW)),
        )
        gates = torch.sigmoid(self.gates(x)).unflatten(-1, (3, HEADS, 1)).permute(2, 0, 3, 1, 4)  # [3, B, H, S, 1]
        mixed = sum(gate * branch for gate, branch in zip(gates, branches, strict=True))
        return self.out(mixed.transpose(1, 2).flatten(2))


def _dense_attention(q: Tensor, k: Tensor, v: Tensor, *, mask: ls.Mask) -> Tensor:
    """Attention by the definition, with a mask of all pairs."""
    shared = q.shape[1] // k.shape[1]
    b, h, i, j = (torch.arange(n, device=q.device) for n in (*q.shape[:3], k.shape[2]))
    heads = h // shared  # a selection has one choice per KV head
    visible = mask(b[:, None, None, None], heads[:, None, None], i[:, None], j)
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scores = (q @ k.mT / DIM**0.5).masked_fill(~visible, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


def main(tokens: int = 500, width: int = 64) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # In float64, so that both models choose the same blocks.
    model = NativeSparseAttention(width).to(device).double()
    x = torch.randn(1, tokens, width, device=device, dtype=torch.float64)
    names, parameters = zip(*model.named_parameters(), strict=True)
    results = []
    for dense in (False, True):
        out = model(x, dense=dense)
        results.append((out, *torch.autograd.grad(out.square().mean(), parameters)))
    for name, got, right in zip(("out", *names), *results, strict=True):
        error = float((got - right).detach().norm() / right.detach().norm())
        print(f"{name:16}{error:10.1e}")
        if not error < 1e-9:
            raise SystemExit(f"{name} does not match: relative error {error:.1e}")
    print("all match")


if __name__ == "__main__":
    main()
