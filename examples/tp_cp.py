"""Tensor and context parallelism together: 2 × 2 processes, gradients against one process.

    python examples/tp_cp.py

Heads and hidden units are split over one axis of the mesh, the sequence over the other. Attention needs nothing for this: it gets fewer
heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import longspan as ls
from longspan._training.decoder import Decoder, DecoderConfig
from longspan.integrations import prepare_batch
from longspan.testing import run_processes

CONFIG = DecoderConfig(vocab=101, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, hidden=96)
STYLES = {**dict.fromkeys(("q", "k", "v", "gate", "up"), ColwiseParallel()), "o": RowwiseParallel(), "down": RowwiseParallel()}


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, CONFIG.vocab, (1, 611), generator=torch.Generator().manual_seed(0))
    documents = torch.bucketize(torch.arange(611), torch.tensor([90, 300]), right=True)[None]
    return {"input_ids": ids, "labels": ids, "document_ids": documents}


def gradients(model: Any, mesh: Any) -> dict[str, Tensor]:
    given = prepare_batch(batch(), mesh, gradients="sum")
    plan, count = given["longspan_plan"]["full"], given["num_items_in_batch"]
    model(given["input_ids"], given["position_ids"], plan=plan, labels=given["labels"], count=count).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def rank() -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    model = Decoder(CONFIG).initialise(0)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], STYLES)
    found = gradients(model, mesh)
    for grad in found.values():
        dist.all_reduce(grad.to_local() if isinstance(grad, DTensor) else grad, group=mesh.get_group("cp"))
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


def main() -> None:
    found = run_processes(rank, 4)[0]
    want = gradients(Decoder(CONFIG).initialise(0), ls.Mesh.abstract(1))
    errors = {name: float((found[name] - grad).norm() / grad.norm()) for name, grad in want.items()}
    worst = max(errors, key=lambda name: errors[name])
    print(f"gradients of {len(errors)} parameters on 2 × 2 processes: relative error at most {errors[worst]:.1e} ({worst})")
    if not errors[worst] < 1e-4:
        raise SystemExit("does not match one process")
    print("all match")


if __name__ == "__main__":
    main()
