"""FSDP2 with context parallelism on 2 × 2 processes: one AdamW step, compared with one process.

    python examples/fsdp_cp.py

Weights are sharded over all four processes. Each pair of processes takes one batch and splits its sequence. The batches have different
numbers of counted tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import longspan as ls
from longspan.integrations import prepare_batch
from longspan.integrations.loss import token_loss
from longspan.testing import run_processes

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM, MAX_POSITIONS = 101, 64, 4, 2, 16, 1024


class Block(nn.Module):
    """Attention and MLP with residuals: x [B, L, C] → [B, L, C], L local tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * HEAD_DIM)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH))

    def forward(self, x: Tensor, plan: ls.Plan) -> Tensor:
        h = F.rms_norm(x, (WIDTH,))
        q, k, v = (t.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for t in (self.q(h), *self.kv(h).chunk(2, -1)))
        x = x + self.out(ls.attention(q, k, v, plan=plan).transpose(1, 2).flatten(2))
        return x + self.mlp(F.rms_norm(x, (WIDTH,)))


class Model(nn.Module):
    """A causal language model: token ids, positions and labels [B, L] → this rank's share of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(MAX_POSITIONS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor, count: Tensor, plan: ls.Plan) -> Tensor:
        x = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x, plan)
        return token_loss(self.head(x), labels, count=count)


def loss_of(model: Any, prepared: Any) -> Tensor:
    """This rank's share of the loss of a prepared batch."""
    fields = (prepared[name] for name in ("input_ids", "position_ids", "labels", "num_items_in_batch"))
    return model(*fields, prepared["longspan_plan"]["full"])


def seeded_model() -> Model:
    torch.manual_seed(0)
    return Model()


def batch(i: int) -> dict[str, Tensor]:
    """Three packed documents; the first one is a prompt without labels."""
    ids = torch.randint(0, VOCAB, (1, (611, 350)[i]), generator=torch.Generator().manual_seed(i))
    documents = torch.bucketize(torch.arange(ids.shape[1]), torch.tensor([90, 300]), right=True)[None]
    return {"input_ids": ids, "labels": ids.masked_fill(documents == 0, -100), "document_ids": documents}


def rank() -> tuple[Tensor, list[Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    all_ranks = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    model = seeded_model()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=all_ranks)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # Gloo cannot average, so gradients are summed. With NCCL, drop this and gradients="sum" below.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = loss_of(model, prepare_batch(batch(mesh.get_local_rank("dp_shard")), mesh, gradients="sum"))
    loss.backward()
    optimizer.step()
    total = loss.detach()
    dist.all_reduce(total)
    return total, [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]


def one_process() -> tuple[Tensor, list[Tensor]]:
    model = seeded_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    count = sum(int((batch(i)["labels"][:, 1:] != -100).sum()) for i in (0, 1))
    total = torch.zeros(())
    for i in (0, 1):
        loss = loss_of(model, prepare_batch(batch(i), ls.Mesh.abstract(1), gradients="sum", count=count))
        loss.backward()
        total += loss.detach()
    optimizer.step()
    return total, [p.detach() for p in model.parameters()]


def main() -> None:
    loss, weights = run_processes(rank, 4)[0]
    expected_loss, expected = one_process()
    difference = max(float((a - b).abs().max()) for a, b in zip(weights, expected, strict=True))
    print(f"loss {float(loss):.6f}, one process {float(expected_loss):.6f}; largest difference of a weight after one step {difference:.1e}")
    # AdamW's first step moves every weight by 1e-3 times the sign of its gradient, unless the gradient is near 0.
    if not (difference < 1e-4 and abs(float(loss - expected_loss)) < 1e-5):
        raise SystemExit("does not match one process")
    print("all match")


if __name__ == "__main__":
    main()
