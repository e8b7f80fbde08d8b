"""A transformers model over two processes: loss, logits and gradients of a packed batch, compared with one process.

    python examples/transformers_llama.py              # starts two processes
    torchrun --nproc-per-node 4 examples/transformers_llama.py

A Llama with random weights. For a trained one: `AutoModelForCausalLM.from_pretrained(…, attn_implementation="longspan")`.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import longspan.integrations.transformers as lst
from longspan.testing import run_processes

SIZES = {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8}
LENGTHS = [500, 31, 270, 196]


def llama(implementation: str) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, attn_implementation=implementation)).eval()


def packed() -> dict[str, Tensor]:
    """Documents one after the other, as transformers' DataCollatorWithFlattening packs them."""
    ids = torch.randint(0, 300, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions}


def rank() -> tuple[Tensor, Tensor, list[Tensor]]:
    model = llama("longspan")
    prepared = lst.prepare_batch(packed(), dist.group.WORLD, config=model, gradients="sum")
    out = model(**prepared)
    out.loss.backward()
    grads = [p.grad for p in model.parameters()]
    for t in (loss := out.loss.detach(), *grads):
        dist.all_reduce(t)
    return loss, prepared["longspan_plan"].unshard(out.logits.detach(), 1), grads


def check(loss: Tensor, logits: Tensor, grads: list[Tensor], ranks: int) -> None:
    """Compare results of the ranks with one process and print relative errors."""
    model = llama("sdpa")
    out = model(**packed(), use_cache=False)
    out.loss.backward()
    expected = [out.loss.detach(), out.logits.detach(), *[p.grad for p in model.parameters()]]
    errors = [float((a - b).norm() / b.norm()) for a, b in zip([loss, logits, *grads], expected, strict=True)]
    print(f"{sum(LENGTHS)} tokens in {len(LENGTHS)} documents over {ranks} processes")
    print(f"loss {float(loss):.6f}, one process {float(expected[0]):.6f}")
    print(f"relative error: logits {errors[1]:.1e}, gradients of {len(errors) - 2} parameters {max(errors[2:]):.1e}")
    if not max(errors) < 1e-4:
        raise SystemExit("does not match one process")
    print("all match")


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        results = rank()
        if dist.get_rank() == 0:
            check(*results, dist.get_world_size())
        dist.destroy_process_group()
    else:
        check(*run_processes(rank, 2)[0], 2)


if __name__ == "__main__":
    main()
