"""Names that a code block uses and its page does not define. A block asks for them by a comment in front: `<!-- scope: NAME -->`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import longspan as ls


@contextmanager
def scope(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    """The names of one scope, in a process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield {"dropin": _dropin, "transformers": _transformers}[name](folder) | {"mesh": dist.group.WORLD}
    finally:
        dist.destroy_process_group()


def _dropin(folder: Path) -> dict[str, Any]:
    def model(x: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        q = (x + positions[:, None]).unflatten(-1, (4, 8)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return (out.mean((1, 3)) - labels).square().mean()

    return {"ls": ls, "x": torch.randn(2, 48, 32), "labels": torch.randn(2, 48), "model": model}


def _transformers(folder: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder / "checkpoint")
    ids = torch.randint(99, (1, 40))
    return {"AutoModelForCausalLM": AutoModelForCausalLM, "name": folder / "checkpoint", "batch": {"input_ids": ids, "labels": ids}}
