"""SDPA over the ranks of torchrun with every strategy and two layouts: loss and gradients, compared with one process.

    torchrun --nproc-per-node 2 examples/sdpa_cp.py

Uses NCCL if every rank has a GPU, else Gloo on the CPU. The model is unchanged: it calls F.scaled_dot_product_attention.
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
        self.positions = nn.Embedding(LENGTH, HEADS * DIM)
        self.qkv = nn.Linear(HEADS * DIM, 3 * HEADS * DIM)
        self.out = nn.Linear(HEADS * DIM, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(positions)
        q, k, v = (t.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def step(model: Model, tokens: Tensor, positions: Tensor, labels: Tensor, total: int) -> Tensor:
    """This rank's share of the loss: the sum over its tokens, divided by the number of all tokens."""
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
    # Labels are shifted before sharding. Buffers may be views of one tensor.
    tokens, labels, positions = text[:, :-1], text[:, 1:], torch.arange(LENGTH, device=device)
    total = tokens.numel()

    expected = step(model, tokens, positions, labels, total)
    expected_grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    if mesh.get_rank() == 0:
        print(f"{LENGTH} tokens over {mesh.size()} ranks of {device}; one process: loss {float(expected):.6f}")
    for layout in ("contiguous", "head_tail"):
        for strategy in ("ring", "allgather", "exchange", *(("ulysses",) if HEADS % mesh.size() == 0 else ())):
            buffers = {"buffers": [tokens, labels, positions], "buffer_seq_dims": [1, 1, 0]}
            with ls.context_parallel(mesh, **buffers, layout=layout, strategy=strategy):
                loss = step(model, tokens, positions, labels, total)
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            for t in (loss, *grads):
                dist.all_reduce(t)
            worst = max(float((g - w).abs().max()) for g, w in zip(grads, expected_grads, strict=True))
            if abs(float(loss - expected)) > 1e-5 or worst > 1e-5:
                raise SystemExit(f"{layout}, {strategy}: loss {float(loss):.6f}, largest gradient error {worst:.1e}")
            if mesh.get_rank() == 0:
                print(f"  {layout:<11} {strategy:<10} loss {float(loss):.6f}, gradients match, largest error {worst:.1e}")
    assert tokens.shape == (2, LENGTH), "the context restores the buffers"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
