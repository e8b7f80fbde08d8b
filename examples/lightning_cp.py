"""Lightning with every sequence split over four processes, padded and packed: weights after 20 steps, compared with one process.

    pip install lightning
    python -m examples.lightning_cp

The recipe: `SpanningStrategy`, and `prepare_batch` in `training_step`.
"""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

from longspan.integrations.lightning import SpanningStrategy
from longspan.integrations.transformers import prepare_batch
from longspan.testing import run_processes

STEPS, RANKS, VOCAB = 20, 4, 97


class Module(LightningModule):
    """A tiny Llama."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            attn_implementation="longspan",
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        strategy: Any = self.trainer.strategy
        if isinstance(strategy, SpanningStrategy):
            batch = prepare_batch(batch, strategy.mesh, config=self.model)  # type: ignore[assignment]
        loss: Tensor = self.model(**batch, **({} if "use_cache" in batch else {"use_cache": False})).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def sample(length: int, *, packed: bool, generator: torch.Generator) -> dict[str, Tensor]:
    """90 tokens: `length` of them, padded right; or a document of `length` tokens and another one."""
    ids, real = torch.randint(3, VOCAB, (90,), generator=generator), torch.arange(90) < length
    if packed:
        labels = ids.clone()
        labels[length] = -100  # shifted, the first document's last token would predict it
        return {"input_ids": ids, "labels": labels, "position_ids": torch.cat([torch.arange(length), torch.arange(90 - length)])}
    return {"input_ids": ids.masked_fill(~real, 0), "labels": ids.masked_fill(~real, -100), "attention_mask": real.long()}


def data(*, packed: bool, shuffled: bool) -> DataLoader[dict[str, Tensor]]:
    """Two rows per batch, of different lengths. shuffled: in the order that Lightning gives several processes."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(20, 90, (2 * STEPS,), generator=generator).tolist()
    samples = [sample(length, packed=packed, generator=generator) for length in lengths]
    sampler = DistributedSampler(samples, num_replicas=1, rank=0, seed=0) if shuffled else None  # type: ignore[arg-type, var-annotated]
    return DataLoader(samples, batch_size=2, sampler=sampler)  # type: ignore[arg-type]


def train(*, packed: bool, **options: Any) -> tuple[list[float], list[Tensor]]:
    """The losses that this rank saw, and the weights after training."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = Module()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu", max_steps=STEPS, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder, **options,
        )  # fmt: skip
        trainer.fit(module, data(packed=packed, shuffled=options["devices"] == 1))
    return module.losses, [p.detach().clone() for p in module.parameters()]


def rank(packed: bool) -> tuple[list[float], list[Tensor]]:
    """One process, with the environment variables of torchrun."""
    this_rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": this_rank, "LOCAL_RANK": this_rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": "0"}
    strategy = SpanningStrategy(context_size=RANKS, cluster_environment=TorchElasticEnvironment(), process_group_backend="gloo")
    return train(packed=packed, strategy=strategy, devices=RANKS)


def difference() -> float:
    """The largest difference of a step's loss or of a weight between one process and several, padded and packed."""
    return max(difference_of(packed=packed) for packed in (False, True))


def difference_of(*, packed: bool) -> float:
    by_rank = run_processes(rank, RANKS, packed, timeout=280.0)
    losses, weights = train(packed=packed, devices=1)
    # Each rank's loss is its share, times the ranks over which gradients are averaged.
    mean = [sum(step) / RANKS for step in zip(*(r[0] for r in by_rank), strict=True)]
    moved = max(float((a - b).abs().max()) for a, b in zip(Module().parameters(), weights, strict=True))
    assert len(losses) == STEPS == len(mean) and moved > 1e-2
    off = max(float((a - b).abs().max()) for r in by_rank for a, b in zip(r[1], weights, strict=True))
    return max(off, *(abs(a - b) for a, b in zip(mean, losses, strict=True)))


def main() -> None:
    largest = difference()
    print(f"{STEPS} steps on {RANKS} processes, padded and packed: losses and weights differ by up to {largest:.1e}")
    if not largest < 1e-5:
        raise SystemExit("results do not match")
    print("all match")


if __name__ == "__main__":
    main()
