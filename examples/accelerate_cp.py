"""accelerate with DDP and every sequence split over four processes: losses of each step, compared with one process.

    python -m examples.accelerate_cp

The recipe is `SpanningAccelerator` in place of `Accelerator`. Lengths need not divide by anything. On GPUs, `parallelism_config` with FSDP2
takes the place of `context_mesh`.
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
from longspan.testing import run_processes

STEPS, RANKS, VOCAB, LENGTH = 20, 4, 97, 83


def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, shifted labels and positions [2, S]."""
    ids = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(step))
    return ids, shift_labels(ids), torch.arange(LENGTH).expand(2, -1).contiguous()


def train(accelerator: Accelerator) -> list[float]:
    """The loss of each step, over all ranks."""
    warnings.simplefilter("ignore")
    net: Any = model()
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.3)
    net, optimizer = accelerator.prepare(net, optimizer)
    losses = []
    for step in range(STEPS):
        ids, labels, positions = batch(step)
        count = int((labels != -100).sum())
        with accelerator.maybe_context_parallel(buffers=[ids, labels, positions], buffer_seq_dims=[1, 1, 1]):
            logits = net(input_ids=ids, position_ids=positions, use_cache=False).logits
            # DDP averages gradients over all ranks.
            loss = token_loss(logits, labels, count=count, averaged=accelerator.num_processes)
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        if accelerator.num_processes > 1:
            dist.all_reduce(whole)
        losses.append(float(whole) / accelerator.num_processes)
    return losses


def rank() -> list[float]:
    """One process, with the environment variables of torchrun."""
    this_rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": this_rank, "LOCAL_RANK": this_rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    mesh = init_device_mesh("cpu", (int(size),), mesh_dim_names=("cp",))
    return train(SpanningAccelerator(cpu=True, context_mesh=mesh))


def one() -> list[float]:
    return train(Accelerator(cpu=True))


def difference() -> float:
    """The largest difference of a step's loss between one process and several."""
    by_rank = run_processes(rank, RANKS, timeout=280.0)
    (losses,) = run_processes(one, 1, timeout=280.0)
    assert abs(losses[0] - losses[-1]) > 1e-3
    return max(abs(a - b) for r in by_rank for a, b in zip(r, losses, strict=True))


def main() -> None:
    largest = difference()
    print(f"{STEPS} steps on {RANKS} processes: losses differ by up to {largest:.1e}")
    if not largest < 1e-5:
        raise SystemExit("losses do not match")
    print("all match")


if __name__ == "__main__":
    main()
