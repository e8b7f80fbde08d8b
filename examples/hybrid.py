"""A hybrid of attention and linear attention (Qwen3-Next) trained with sequences split over four processes, compared with one process.

    python examples/hybrid.py

`prepare_batch` and `attn_implementation="longspan"` are all it takes: layers of linear attention run on whole sequences.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from longspan.integrations.transformers import prepare_batch
from longspan.testing import run_processes

STEPS, RANKS, VOCAB, LENGTH = 20, 4, 97, 77


def model() -> Any:
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, shared_expert_intermediate_size=24,
        num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_experts=4, num_experts_per_tok=2, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, attn_implementation="longspan", pad_token_id=0,
    )  # fmt: skip
    return Qwen3NextForCausalLM(config)


def batch(step: int) -> dict[str, Tensor]:
    """One row and four rows in turn. Of linear attention, every rank computes the one row, and one of the four."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCAB, (4 if step % 2 else 1, LENGTH), generator=generator)
    real = torch.arange(LENGTH) < LENGTH - torch.arange(len(ids))[:, None] * 9
    return {"input_ids": ids, "labels": ids.masked_fill(~real, -100), "attention_mask": real.long()}


def train(mesh: Any = None) -> tuple[list[float], list[Tensor]]:
    """The loss of each step, and the weights after training."""
    warnings.simplefilter("ignore")
    net, losses = model(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        arguments = {**batch(step), "use_cache": False}
        if mesh is not None:
            arguments = dict(prepare_batch(batch(step), mesh, config=net, gradients="sum"))
        loss = net(**arguments).loss
        loss.backward()
        whole = loss.detach().clone()
        if mesh is not None:
            dist.all_reduce(whole)
            for p in net.parameters():
                if p.grad is None:  # an expert that saw none of this rank's tokens
                    p.grad = torch.zeros_like(p)
                dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(whole))
    return losses, [p.detach() for p in net.parameters()]


def rank() -> tuple[list[float], list[Tensor]]:
    return train(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",)))


def difference() -> float:
    """The largest difference of a step's loss or of a weight between one process and several."""
    by_rank = run_processes(rank, RANKS, timeout=280.0)
    losses, weights = train()
    off = [abs(a - b) for r in by_rank for a, b in zip(r[0], losses, strict=True)]
    return max(*off, *(float((a - b).abs().max()) for r in by_rank for a, b in zip(r[1], weights, strict=True)))


def main() -> None:
    largest = difference()
    print(f"{STEPS} steps on {RANKS} processes: losses and weights differ by up to {largest:.1e}")
    if not largest < 1e-5:
        raise SystemExit("results do not match")
    print("all match")


if __name__ == "__main__":
    main()
