"""transformers' Trainer with every sequence split over four processes: weights after 20 steps, compared with a plain Trainer.

    python examples/transformers_trainer.py

The recipe is `train`: a model with attn_implementation="longspan", a mesh, and `SpanningTrainer` in place of `Trainer`.
"""

from __future__ import annotations

import os
import socket
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import longspan.integrations.transformers  # noqa: F401  (registers "longspan")
from longspan.testing import run_processes

SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
STEPS, RANKS = 20, 4


def llama(implementation: str) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, attn_implementation=implementation))


def data(packed: bool) -> list[dict[str, Tensor]]:
    """Sequences of 203 tokens: two packed documents, or one, padded right. The first tokens are a prompt without labels."""
    generator = torch.Generator().manual_seed(1)
    out = []
    for i in range(2 * STEPS):
        ids = torch.randint(0, 97, (203,), generator=generator)
        labels = ids.clone()
        labels[: 20 + 3 * i] = -100
        real = torch.arange(203) < 203 - i
        padded = {"attention_mask": real.long(), "labels": labels.masked_fill(~real, -100)}
        documents = {"position_ids": torch.cat([torch.arange(140), torch.arange(63)]), "labels": labels}
        out.append({"input_ids": ids, **(documents if packed else padded)})
    return out


def arguments(folder: str) -> TrainingArguments:
    quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "ddp_find_unused_parameters": False}
    return TrainingArguments(
        output_dir=folder, max_steps=STEPS, per_device_train_batch_size=1, gradient_accumulation_steps=2, learning_rate=0.5, optim="sgd",
        train_sampling_strategy="sequential", use_cpu=True, **quiet,
    )  # fmt: skip


def train(packed: bool) -> list[Tensor]:
    from longspan.integrations.trainer import SpanningTrainer

    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp_replicate", "cp"))
    model = llama("longspan")
    with tempfile.TemporaryDirectory() as folder:
        SpanningTrainer(model=model, args=arguments(folder), train_dataset=data(packed), mesh=mesh).train()
    return [p.detach() for p in model.parameters()]


def rank(port: int, packed: bool) -> list[Tensor]:
    """`train` with the environment variables of torchrun, which accelerate reads."""
    this_rank, size = dist.get_rank(), dist.get_world_size()
    os.environ |= {
        "RANK": str(this_rank),
        "LOCAL_RANK": str(this_rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    warnings.simplefilter("ignore")
    return train(packed)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def differences(packed: bool) -> tuple[float, float]:
    """(largest difference of a weight between the two runs, largest change of a weight by training)."""
    by_rank = run_processes(rank, RANKS, free_port(), packed, timeout=240.0)
    model = llama("eager")
    before = [p.detach().clone() for p in model.parameters()]
    # With a cache, transformers does not separate packed documents.
    model.config.use_cache = False
    with tempfile.TemporaryDirectory() as folder:
        Trainer(model=model, args=arguments(folder), train_dataset=data(packed)).train()
    weights = [p.detach() for p in model.parameters()]
    difference = max(float((a - b).abs().max()) for of_rank in by_rank for a, b in zip(of_rank, weights, strict=True))
    return difference, max(float((a - b).abs().max()) for a, b in zip(before, weights, strict=True))


def main() -> None:
    for packed in (True, False):
        difference, moved = differences(packed)
        print(f"{STEPS} steps on {RANKS} processes, {'packed' if packed else 'padded'}; training changed weights by up to {moved:.1e}")
        print(f"largest difference of a weight from one process: {difference:.1e}")
        if not difference < 1e-6:
            raise SystemExit("weights do not match")
    print("all match")


if __name__ == "__main__":
    main()
