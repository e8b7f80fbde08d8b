"""What single classes of transformers need beside the sizes of `families`: settings, inputs, train mode. By class name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Tensor]
IMAGE = 60  # the token of images and audio, the last of the vocabulary
FIRST = 14  # the place of the first image token: behind the padding of all batches


def no_inputs(batch: Batch) -> Batch:
    """No entries beside tokens and labels."""
    return {}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One class.

    settings: fields of its config, those of nested configs in nested dicts; None removes a field of the tiny config.
    inputs: entries of a batch that the class requires, from the batch of tokens and labels; they replace entries of the same name.
    train: the class has a loss in train mode only.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    inputs: Callable[[Batch], Batch] = no_inputs
    train: bool = False

    def batch(self, batch: Batch) -> Batch:
        """The batch with the inputs that the class requires."""
        return {**batch, **self.inputs(batch)}


def merged(settings: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Settings and further ones, which take precedence; nested dicts are merged too."""
    made = dict(settings)
    for name, value in more.items():
        made[name] = merged(made[name], value) if isinstance(value, dict) and isinstance(made.get(name), dict) else value
    return made


def random(*shape: int) -> Tensor:
    """Random numbers, the same each time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(11))


def image_tokens(batch: Batch, count: int, token: int = IMAGE) -> Batch:
    """Tokens and labels with an image, or audio, of `count` tokens in each row."""
    places = torch.arange(batch["input_ids"].shape[1])
    inside = (places >= FIRST) & (places < FIRST + count)
    ids = batch["input_ids"].masked_fill(batch["input_ids"] == token, token - 1).masked_fill(inside, token)
    return {"input_ids": ids, "labels": batch["labels"].masked_fill(inside, -100)}


def case_of(name: str) -> Case:
    """The case of a class by its name."""
    from tests.integrations.image_cases import IMAGE_CASES

    return CASES.get(name) or IMAGE_CASES.get(name) or Case()


CASES: dict[str, Case] = {}
