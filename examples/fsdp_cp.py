"""FSDP2 and context parallelism together: 2 × 2 processes, a step of AdamW, against one process.

    python examples/fsdp_cp.py

Weights are sharded over all four processes. Two pairs of processes take a batch each, with different numbers of tokens that count; each
pair shares its batch's sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import longspan as ls
from longspan._training.decoder import Decoder, DecoderConfig
from longspan.integrations import prepare_batch
from longspan.testing import run_processes

CONFIG = DecoderConfig(vocab=101, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, hidden=96)


def batch(i: int) -> dict[str, Tensor]:
    ids = torch.randint(0, CONFIG.vocab, (1, (611, 350)[i]), generator=torch.Generator().manual_seed(i))
    documents = torch.bucketize(torch.arange(ids.shape[1]), torch.tensor([90, 300]), right=True)[None]
    return {"input_ids": ids, "labels": ids.masked_fill(documents == 0, -100), "document_ids": documents}


def loss_of(model: Any, given: dict[str, Any]) -> Tensor:
    plan, count = given["longspan_plan"]["full"], given["num_items_in_batch"]
    return model(given["input_ids"], given["position_ids"], plan=plan, labels=given["labels"], count=count)


def rank() -> tuple[Tensor, list[Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    everyone = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    model = Decoder(CONFIG).initialise(0)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=everyone)
    for part in model.modules():
        if isinstance(part, FSDPModule):  # Gloo cannot average: sum the shares instead. With NCCL leave this out, and gradients="sum" below
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = loss_of(model, prepare_batch(batch(mesh.get_local_rank("dp_shard")), mesh, gradients="sum"))
    loss.backward()
    optimizer.step()
    total = loss.detach()
    dist.all_reduce(total)
    return total, [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]


def one_process() -> tuple[Tensor, list[Tensor]]:
    model = Decoder(CONFIG).initialise(0)
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
    want_loss, want = one_process()
    off = max(float((a - b).abs().max()) for a, b in zip(weights, want))
    print(f"loss {float(loss):.6f}, one process {float(want_loss):.6f}; after a step of AdamW weights differ by at most {off:.1e}")
    if not (off < 1e-4 and abs(float(loss - want_loss)) < 1e-5):  # AdamW's first step is the gradient's sign: 1e-3 where it is not 0
        raise SystemExit("does not match one process")
    print("all match")


if __name__ == "__main__":
    main()
