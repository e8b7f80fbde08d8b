"""torchtitan with every sequence split over ranks: 20 steps on 2 data × 2 context ranks, compared with torchtitan's own attention on one.

    pip install torchtitan
    python -m examples.torchtitan_cp

The recipe: `SpanningTrainer.Config` in place of `Trainer.Config`, and the override `spanning_attention`. Packed documents, FSDP2.

torchtitan has no CPU mode. To run without GPUs, the example replaces its device type, its memory monitor and NCCL's
premultiplied sums.
"""

# ruff: noqa: E402

from __future__ import annotations

import functools
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.attention.flex_attention import create_mask
from torch.nn.functional import scaled_dot_product_attention

torch._utils._get_available_device_type = lambda: "cpu"  # before torchtitan is imported

from torchtitan.components import metrics
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from longspan.integrations.torchtitan import SpanningTrainer
from longspan.testing import run_processes

STEPS, ROWS, TOKENS = 20, 4, 96
DATA_RANKS, CONTEXT_RANKS = 2, 2


class RandomDocuments(BaseDataLoader):
    """Rows of random tokens: each of three packed documents, or of one."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        packed: bool = True

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **rest: Any) -> None:
        self.rows = slice(dp_rank * local_batch_size, (dp_rank + 1) * local_batch_size)
        self.shape = dp_world_size * local_batch_size, seq_len
        self.packed = config.packed

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        generator = torch.Generator().manual_seed(5)
        place = torch.arange(self.shape[1])
        while True:
            ids = torch.randint(0, 2000, (self.shape[0], self.shape[1] + 1), generator=generator)
            cuts = torch.randint(1, self.shape[1], (self.shape[0], 2), generator=generator)
            starts = torch.where(place == cuts[:, :1], place, 0).maximum(torch.where(place == cuts[:, 1:], place, 0)).cummax(1).values
            batch = {"input": ids[:, :-1], "positions": place - starts if self.packed else place.expand(self.shape)}
            yield {name: x[self.rows].contiguous() for name, x in batch.items()}, ids[self.rows, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    """Data are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **rest: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return 2048


def config_of(kind: type[Trainer], folder: str, *, packed: bool, data_ranks: int, context_ranks: int) -> Any:
    """torchtitan's debug model on random documents, in float32."""
    debug = llama3_debugmodel()
    config = kind.Config(**{field.name: getattr(debug, field.name) for field in fields(debug)})
    config.model_spec = model_registry("debugmodel", attn_backend="flex")
    config.dataloader, config.tokenizer, config.dump_folder = RandomDocuments.Config(packed=packed), NoTokenizer.Config(), folder
    config.training.steps, config.training.seq_len = STEPS, TOKENS
    config.training.local_batch_size, config.training.global_batch_size = ROWS // data_ranks, ROWS
    config.training.disable_cuda_graphs, config.training.mixed_precision_param = True, "float32"
    config.validator.enable = config.checkpoint.enable = config.compile.enable = False
    config.parallelism.data_parallel_shard_degree, config.parallelism.context_parallel_degree = data_ranks, context_ranks
    config.parallelism.spmd_backend = "partial_dtensor"  # "spmd_types" shards parameters with a newer torch than 2.13
    return config


def train(kind: type[Trainer], packed: bool, **ranks: int) -> list[float]:
    """The losses of 20 steps of a process."""
    warnings.simplefilter("ignore")
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    no_memory = metrics.DeviceMemStats(*[0.0] * 6)
    monitor = SimpleNamespace(device_name="CPU", get_peak_stats=lambda: no_memory, reset_peak_stats=lambda: None)
    metrics.build_device_memory_monitor = lambda: monitor
    FlexAttention._compiled_flex_attn = dense_attention
    logging.disable(logging.WARNING)
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(kind, folder, packed=packed, **ranks)
        if kind is SpanningTrainer:
            config.override.imports = ["longspan.integrations.torchtitan.spanning_attention"]
        trainer = config.build()
        trainer.metrics_processor.log = lambda step, loss, *rest, **more: losses.append(float(loss))
        set_weights(trainer.model_parts[0])
        data = trainer.batch_generator(trainer.dataloader)
        for _ in range(STEPS):
            trainer.step += 1
            trainer.train_step(data)
    return losses


def dense_attention(q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: float | None, **rest: Any) -> tuple[Tensor, None]:
    """FlexAttention of the reference on one process, by a dense mask: torch's has no backward pass on CPUs."""
    mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device="cpu")
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True), None


def set_weights(model: torch.nn.Module) -> None:
    """The same weights on any number of ranks, and sums that Gloo has."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                whole = 0.05 * torch.randn(parameter.shape, generator=generator)
                is_sharded = isinstance(parameter, DTensor)
                parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements) if is_sharded else whole)
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)


def difference() -> float:
    """The largest difference of a step's loss between four processes and torchtitan's own attention on one, packed and not."""
    return max(difference_of(packed) for packed in (True, False))


def difference_of(packed: bool) -> float:
    sharded = functools.partial(train, SpanningTrainer, packed, data_ranks=DATA_RANKS, context_ranks=CONTEXT_RANKS)
    many = run_processes(sharded, DATA_RANKS * CONTEXT_RANKS, timeout=280.0)[0]
    one = run_processes(functools.partial(train, Trainer, packed, data_ranks=1, context_ranks=1), 1, timeout=280.0)[0]
    assert len(one) == STEPS == len(many) and abs(one[0] - one[-1]) > 1e-2
    return max(abs(a - b) for a, b in zip(many, one, strict=True))


def main() -> None:
    largest = difference()
    print(f"{STEPS} steps on {DATA_RANKS} × {CONTEXT_RANKS} processes, packed and not: losses differ by up to {largest:.1e}")
    if not largest < 1e-5:
        raise SystemExit("results do not match")
    print("all match")


if __name__ == "__main__":
    main()
