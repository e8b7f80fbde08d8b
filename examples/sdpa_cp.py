"""SDPA over the ranks of torchrun, against one process: each way of moving keys, each way of sharing tokens.

    torchrun --nproc-per-node 2 examples/sdpa_cp.py

Runs over NCCL where every rank has a GPU, else over Gloo on the CPU. The model is unchanged: it calls F.scaled_dot_product_attention.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import longspan as ls

LENGTH, VOCABULARY, HEADS, DIM = 203, 97, 4, 16


class Model(nn.Module):
    """A small causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HEADS * DIM)
        self.place = nn.Embedding(LENGTH, HEADS * DIM)
        self.qkv = nn.Linear(HEADS * DIM, 3 * HEADS * DIM)
        self.out = nn.Linear(HEADS * DIM, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(positions)
        q, k, v = (t.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def step(model: Model, tokens: Tensor, positions: Tensor, labels: Tensor, total: int) -> Tensor:
    """Loss over this rank's tokens, as a share of all of them."""
    model.zero_grad()
    loss = F.cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten(), reduction="sum") / total
    loss.backward()
    return loss.detach()


def main() -> None:
    gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = "cuda" if gpu else "cpu"
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model = Model().to(device)
    text = torch.randint(VOCABULARY, (2, LENGTH + 1), device=device)
    dist.broadcast(text, 0)
    # Labels are shifted before anything is sharded. Both are views of one tensor, which is fine.
    tokens, labels, positions = text[:, :-1], text[:, 1:], torch.arange(LENGTH, device=device)
    total = tokens.numel()

    want = step(model, tokens, positions, labels, total)
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    if mesh.get_rank() == 0:
        print(f"{LENGTH} tokens over {mesh.size()} ranks of {device}; one process: loss {float(want):.6f}")
    for layout in ("contiguous", "head_tail"):
        for strategy in ("ring", "allgather", "exchange", *(("ulysses",) if HEADS % mesh.size() == 0 else ())):
            buffers = {"buffers": [tokens, labels, positions], "buffer_seq_dims": [1, 1, 0]}
            with ls.context_parallel(mesh, **buffers, layout=layout, strategy=strategy):
                loss = step(model, tokens, positions, labels, total)
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            for t in (loss, *grads):
                dist.all_reduce(t)
            worst = max(float((g - w).abs().max()) for g, w in zip(grads, wanted, strict=True))
            if abs(float(loss - want)) > 1e-5 or worst > 1e-5:
                raise SystemExit(f"{layout}, {strategy}: loss {float(loss):.6f}, gradients off by {worst:.1e}")
            if mesh.get_rank() == 0:
                print(f"  {layout:<11} {strategy:<10} loss {float(loss):.6f}, gradients match, off by {worst:.1e}")
    assert tokens.shape == (2, LENGTH), "buffers are whole again"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
