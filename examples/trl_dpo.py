"""TRL's DPOTrainer with every sequence split over four processes: losses of each step, compared with one process.

    pip install trl
    python examples/trl_dpo.py

The recipe is `SpanningDPOTrainer`: longspan's mixin in front of TRL's trainer, and a mesh. Policy and reference model are both split.
"""

from __future__ import annotations

import os
import socket
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

import longspan.integrations.transformers  # noqa: F401  (registers "longspan")
from longspan.integrations.trainer import SpanningLogProbsMixin
from longspan.testing import run_processes

STEPS, RANKS, VOCAB = 20, 4, 97


class SpanningDPOTrainer(SpanningLogProbsMixin, DPOTrainer):
    """TRL's trainer over a mesh."""


def llama(implementation: str) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        attn_implementation=implementation, pad_token_id=0, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w2"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", unk_token="w2")


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


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def torchrun_environment(port: int) -> None:
    """The environment variables of torchrun, which accelerate reads."""
    this_rank, size = str(dist.get_rank()), str(dist.get_world_size())
    variables = {"RANK": this_rank, "LOCAL_RANK": this_rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(variables)


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
