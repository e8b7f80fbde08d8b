"""Train a MoBA layer and an NSA layer over ranks, and compare the loss curves with those of one process.

    torchrun --nproc-per-node 4 examples/sparse_training.py [--steps 50]

Each rank holds its tokens only. Which blocks of keys a query sees is chosen at every step from pooled keys, which are small and gathered
(`plan.gather_pooled`). One plan, made before the first choice, serves all steps: only the chosen blocks move.
"""

from __future__ import annotations

import argparse
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

import longspan as ls

HEADS, KV_HEADS, DIM, WIDTH, VOCABULARY = 4, 2, 16, 32, 64
BLOCK, TOP, WINDOW = 16, 3, 24


class Tokens(Protocol):
    """The tokens that a process holds: all of them, or a shard."""

    positions: Tensor

    def pooled(self, x: Tensor) -> Tensor:
        """Means of blocks of x [B, G, S, D] of the whole sequence."""

    def selected(self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor: ...

    def window(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class AllTokens:
    """A whole sequence in one process."""

    def __init__(self, length: int) -> None:
        self.positions = torch.arange(length)

    def pooled(self, x: Tensor) -> Tensor:
        return torch.stack([part.mean(2) for part in x.split(BLOCK, 2)], 2)

    def selected(self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
        return ls.attention(q, k, v, mask=ls.selected(indices, BLOCK, q_granularity=1) & ls.causal())

    def window(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ls.attention(q, k, v, mask=ls.sliding_window(WINDOW))


class ShardedTokens:
    """A rank's tokens. Both plans have the same layout."""

    def __init__(self, length: int, mesh: ls.Mesh) -> None:
        masks = {"causal": ls.causal(), "window": ls.sliding_window(WINDOW)}
        self.plans = ls.plan(masks, length, mesh, layout="head_tail", heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM)
        self.positions = self.plans["causal"].positions

    def pooled(self, x: Tensor) -> Tensor:
        return self.plans["causal"].gather_pooled(x, BLOCK)

    def selected(self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
        return ls.attention(q, k, v, plan=self.plans["causal"], mask=ls.selected(indices, BLOCK, q_granularity=1))

    def window(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ls.attention(q, k, v, plan=self.plans["window"])


class SparseModel(nn.Module):
    """Embedding, one layer of MoBA or NSA, and logits. `nsa`: three branches with gates; else selected blocks alone."""

    def __init__(self, *, nsa: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.q = nn.Linear(WIDTH, HEADS * DIM, bias=False)
        self.k = nn.Linear(WIDTH, KV_HEADS * DIM, bias=False)
        self.v = nn.Linear(WIDTH, KV_HEADS * DIM, bias=False)
        self.gates = nn.Linear(WIDTH, 3 * HEADS) if nsa else None
        self.out = nn.Linear(HEADS * DIM, VOCABULARY)

    def forward(self, ids: Tensor, tokens: Tokens) -> Tensor:
        """Logits of this process's tokens: ids [B, S] → [B, S, VOCABULARY]."""
        x = self.embedding(ids)
        q, k, v = (layer(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        pooled_k = tokens.pooled(k)
        with torch.no_grad():  # no gradient flows through the choice
            indices = choose_blocks(q, pooled_k, tokens.positions)
        mixed = tokens.selected(q, k, v, indices)
        if self.gates is not None:
            positions = tokens.positions
            past = ls.mask_mod(lambda b, h, q_idx, block: (block + 1) * BLOCK <= positions[q_idx])
            branches = (mixed, ls.attention(q, pooled_k, tokens.pooled(v), mask=past), tokens.window(q, k, v))
            gates = torch.sigmoid(self.gates(x)).unflatten(-1, (3, HEADS, 1)).permute(2, 0, 3, 1, 4)  # [3, B, H, S, 1]
            mixed = torch.stack([gate * branch for gate, branch in zip(gates, branches, strict=True)]).sum(0)
        return self.out(mixed.transpose(1, 2).flatten(2))


def choose_blocks(q: Tensor, pooled_k: Tensor, positions: Tensor) -> Tensor:
    """Indices [B, KV heads, S, TOP]: each query's own block, and the past blocks with the highest scores of a KV head's query heads."""
    scores = (q.unflatten(1, (pooled_k.shape[1], -1)) @ pooled_k[:, :, None].mT).sum(2)
    block, own = torch.arange(pooled_k.shape[2]), (positions // BLOCK)[:, None]
    scores = scores.masked_fill(block > own, -torch.inf).masked_fill(block == own, torch.inf)
    top = scores.topk(min(TOP, len(block)), -1)
    return torch.where(top.values > -torch.inf, top.indices, -1).int()


def train(*, nsa: bool, steps: int, length: int = 200, mesh: ls.Mesh | None = None) -> list[float]:
    """The losses of a training run on a fixed sequence. mesh: the ranks that share the sequence; None for one process."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(0, VOCABULARY, (1, length + 1), generator=generator)
    inputs, labels = whole[:, :-1], whole[:, 1:]  # shifted before they are sharded
    torch.manual_seed(1)
    model = SparseModel(nsa=nsa).double()  # float64: rounding differs between one process and many, choices must not
    tokens: Tokens = AllTokens(length)
    if mesh is not None:
        tokens = ShardedTokens(length, mesh)
        inputs, labels = (tokens.plans["causal"].shard(t, 1) for t in (inputs, labels))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        logits = model(inputs, tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / length  # of this process's tokens
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if mesh is not None:
            for t in (loss, *(p.grad for p in model.parameters())):
                dist.all_reduce(t)
        optimizer.step()
        losses.append(float(loss))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for nsa in (False, True):
        over_ranks, alone = train(nsa=nsa, steps=steps, mesh=mesh), train(nsa=nsa, steps=steps)
        difference = max(abs(a - b) for a, b in zip(over_ranks, alone, strict=True))
        if dist.get_rank() == 0:
            print(
                f"{'NSA' if nsa else 'MoBA'}: loss {alone[0]:.3f} → {alone[-1]:.3f} in {steps} steps, largest difference {difference:.1e}"
            )
        if not difference < 1e-9:
            raise SystemExit("the loss curves do not match")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
