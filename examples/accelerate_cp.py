"""accelerate with DDP and every sequence split over four processes: losses of each step, compared with one process.

    python -m examples.accelerate_cp

Whole sequences: `SpanningAccelerator` in place of `Accelerator`, and torch's attention. Packed documents: `attn_implementation="longspan"`
and `prepare_batch`. Lengths need not divide by anything. On GPUs, `parallelism_config` with FSDP2 takes the place of `context_mesh`.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from longspan.integrations.accelerate import SpanningAccelerator
from longspan.integrations.loss import shift_labels, token_loss
from longspan.integrations.transformers import prepare_batch
from longspan.testing import run_processes

STEPS, RANKS, VOCAB, LENGTH = 20, 4, 97, 83


def model(attention: str) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        attn_implementation=attention, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batch(step: int, *, packed: bool) -> dict[str, Tensor]:
    """Ids, labels and positions [2, S]. packed: two documents in a row, of other lengths in every step."""
    ids = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(step))
    first = LENGTH if not packed else 20 + step * 7 % 50
    positions = torch.cat([torch.arange(first), torch.arange(LENGTH - first)]).expand(2, -1).contiguous()
    labels = ids.masked_fill(positions == 0, -100)  # no token predicts the first one of a document
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def whole_sequences(accelerator: Accelerator, net: Any, step: int) -> Tensor:
    """Run a step in the context of `maybe_context_parallel`. Returns the loss of this rank's tokens, times the number of ranks."""
    rows = batch(step, packed=False)
    ids, labels, positions = rows["input_ids"], shift_labels(rows["labels"]), rows["position_ids"]
    count = int((labels != -100).sum())
    with accelerator.maybe_context_parallel(buffers=[ids, labels, positions], buffer_seq_dims=[1, 1, 1]):
        logits = net(input_ids=ids, position_ids=positions, use_cache=False).logits
        # DDP averages gradients over all ranks.
        loss = token_loss(logits, labels, count=count, averaged=accelerator.num_processes)
        accelerator.backward(loss)
    return loss


def packed_documents(accelerator: Accelerator, net: Any, step: int) -> Tensor:
    """Run a step of a packed batch. Returns the loss of this rank's tokens, times the number of ranks."""
    rows: Any = batch(step, packed=True)
    if isinstance(accelerator, SpanningAccelerator):
        rows = prepare_batch(rows, accelerator.context_mesh, config=accelerator.unwrap_model(net))
    loss: Tensor = net(**rows).loss
    accelerator.backward(loss)
    return loss


def train(accelerator: Accelerator, *, packed: bool) -> list[float]:
    """The loss of each step, over all ranks."""
    warnings.simplefilter("ignore")
    net: Any = model("longspan" if packed and isinstance(accelerator, SpanningAccelerator) else "sdpa")
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.3)
    net, optimizer = accelerator.prepare(net, optimizer)
    losses = []
    for step in range(STEPS):
        loss = (packed_documents if packed else whole_sequences)(accelerator, net, step)
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        if accelerator.num_processes > 1:
            dist.all_reduce(whole)
        losses.append(float(whole) / accelerator.num_processes)
    return losses


def rank(packed: bool) -> list[float]:
    """One process, with the environment variables of torchrun."""
    this_rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": this_rank, "LOCAL_RANK": this_rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    mesh = init_device_mesh("cpu", (int(size),), mesh_dim_names=("cp",))
    return train(SpanningAccelerator(cpu=True, context_mesh=mesh), packed=packed)


def one(packed: bool) -> list[float]:
    return train(Accelerator(cpu=True), packed=packed)


def difference() -> float:
    """The largest difference of a step's loss between one process and several, of whole sequences and packed documents."""
    return max(difference_of(packed=packed) for packed in (False, True))


def difference_of(*, packed: bool) -> float:
    by_rank = run_processes(rank, RANKS, packed, timeout=280.0)
    (losses,) = run_processes(one, 1, packed, timeout=280.0)
    assert abs(losses[0] - losses[-1]) > 1e-3
    return max(abs(a - b) for r in by_rank for a, b in zip(r, losses, strict=True))


def main() -> None:
    for packed in (False, True):
        largest = difference_of(packed=packed)
        what = "packed documents" if packed else "whole sequences"
        print(f"{STEPS} steps of {what} on {RANKS} processes: losses differ by up to {largest:.1e}")
        if not largest < 1e-5:
            raise SystemExit("losses do not match")
    print("all match")


if __name__ == "__main__":
    main()
