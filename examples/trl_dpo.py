"""TRL's DPOTrainer with every sequence split over four processes: losses of each step, compared with one process.

    pip install trl
    python -m examples.trl_dpo

The recipe is `SpanningDPOTrainer`: longspan's mixin in front of TRL's trainer, and a mesh. Policy and reference model are both split.
"""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from examples.trl_sft import RANKS, STEPS, VOCAB, free_port, llama, tokenizer, torchrun_environment
from torch.distributed.device_mesh import init_device_mesh
from trl import DPOConfig, DPOTrainer

from longspan.integrations.trainer import SpanningLogProbsMixin
from longspan.testing import run_processes


class SpanningDPOTrainer(SpanningLogProbsMixin, DPOTrainer):
    """TRL's trainer over a mesh."""


def data() -> Dataset:
    generator = torch.Generator().manual_seed(1)

    def words(low: int, high: int) -> str:
        length = int(torch.randint(low, high, (), generator=generator))
        return " ".join(f"w{i}" for i in torch.randint(3, VOCAB, (length,), generator=generator).tolist())

    rows = [{"prompt": words(5, 30), "chosen": " " + words(5, 50), "rejected": " " + words(5, 50)} for _ in range(2 * STEPS)]
    return Dataset.from_list(rows)


def train(trainer: type, **more: Any) -> list[float]:
    """The loss of each step."""
    with tempfile.TemporaryDirectory() as folder:
        args = DPOConfig(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=2, learning_rate=0.002, optim="sgd",
            lr_scheduler_type="constant", train_sampling_strategy="sequential", use_cpu=True, bf16=False, max_length=80, report_to=[],
            save_strategy="no", logging_steps=1, disable_tqdm=True, ddp_find_unused_parameters=False, gradient_checkpointing=False,
            max_grad_norm=0.0, logging_nan_inf_filter=False, beta=0.1,
        )  # fmt: skip
        run = trainer(
            model=llama("longspan"), ref_model=llama("longspan"), args=args, train_dataset=data(), processing_class=tokenizer(), **more
        )
        run.train()
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def rank(port: int) -> list[float]:
    torchrun_environment(port)
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp_replicate", "cp"))
    return train(SpanningDPOTrainer, mesh=mesh)


def difference() -> float:
    """The largest difference of a step's loss between one process and several."""
    by_rank = run_processes(rank, RANKS, free_port(), timeout=280.0)
    expected = train(DPOTrainer)
    assert len(expected) == STEPS == len(by_rank[0]) and abs(expected[0] - expected[-1]) > 1e-3
    return max(abs(a - b) for losses in by_rank for a, b in zip(losses, expected, strict=True))


def main() -> None:
    largest = difference()
    print(f"{STEPS} steps on {RANKS} processes: losses differ by up to {largest:.1e}")
    if not largest < 1e-5:
        raise SystemExit("losses do not match")
    print("all match")


if __name__ == "__main__":
    main()
