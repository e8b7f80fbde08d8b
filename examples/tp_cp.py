"""Tensor parallelism with context parallelism on 2 × 2 processes: gradients, compared with one process.

    python examples/tp_cp.py

Heads and hidden units are split over one mesh axis, the sequence over the other. Attention needs no change: each rank has fewer heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import longspan as ls
from longspan.integrations import prepare_batch
from longspan.integrations.loss import token_loss
from longspan.testing import run_processes

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MAX_POSITIONS = 101, 64, 4, 2, 16, 96, 1024
STYLES = {**dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel()), **dict.fromkeys(("out", "down"), RowwiseParallel())}


class Block(nn.Module):
    """Attention and MLP with residuals: x [B, L, C] → [B, L, C], L local tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * HEAD_DIM, bias=False) for n in (HEADS, KV_HEADS, KV_HEADS))
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor, plan: ls.Plan) -> Tensor:
        h = F.rms_norm(x, (WIDTH,))
        q, k, v = (layer(h).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.out(ls.attention(q, k, v, plan=plan).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(F.rms_norm(x, (WIDTH,)))))


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


def batch() -> dict[str, Tensor]:
    """Three packed documents."""
    ids = torch.randint(0, VOCAB, (1, 611), generator=torch.Generator().manual_seed(0))
    documents = torch.bucketize(torch.arange(611), torch.tensor([90, 300]), right=True)[None]
    return {"input_ids": ids, "labels": ids, "document_ids": documents}


def gradients(model: Any, mesh: Any) -> dict[str, Tensor]:
    """Gradients of this rank's share of the loss."""
    loss_of(model, prepare_batch(batch(), mesh, gradients="sum")).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def rank() -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    model = seeded_model()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], STYLES)
    grads = gradients(model, mesh)
    for grad in grads.values():
        dist.all_reduce(grad.to_local() if isinstance(grad, DTensor) else grad, group=mesh.get_group("cp"))
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}


def main() -> None:
    grads = run_processes(rank, 4)[0]
    expected = gradients(seeded_model(), ls.Mesh.abstract(1))
    errors = {name: float((grads[name] - grad).norm() / grad.norm()) for name, grad in expected.items()}
    worst = max(errors, key=lambda name: errors[name])
    print(f"gradients of {len(errors)} parameters on 2 × 2 processes: largest relative error {errors[worst]:.1e} ({worst})")
    if not errors[worst] < 1e-4:
        raise SystemExit("does not match one process")
    print("all match")


if __name__ == "__main__":
    main()
