"""Small modules, and batches of token ids."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import longspan as ls
from longspan.integrations import prepare_batch

ZERO = torch.zeros((), dtype=torch.int64)


def module(children: dict[str, nn.Module] | None = None, kind: type[nn.Module] = nn.Module, **attributes: Any) -> Any:
    made = kind()
    for name, value in {**(children or {}), **attributes}.items():
        setattr(made, name, value)
    return made


def ids(batch: int = 2, length: int = 9) -> Tensor:
    return torch.arange(batch * length).view(batch, length) + 1


def pairs(mask: Any, tokens: int, batch: int = 1) -> list[Any]:
    """Which pairs a mask lets see each other, [batch, tokens, tokens], as 0 and 1."""
    b, q, kv = torch.arange(batch)[:, None, None], torch.arange(tokens)[:, None], torch.arange(tokens)
    return (mask(b, ZERO, q, kv) & torch.ones(batch, tokens, tokens, dtype=torch.bool)).int().tolist()


def encoder_decoder(kind: str = "bart", **extra: Any) -> Any:
    class TinyForConditionalGeneration:
        config = SimpleNamespace(
            is_encoder_decoder=True, model_type=kind, num_attention_heads=4, num_key_value_heads=4, pad_token_id=0, max_source_positions=15,
            decoder_start_token_id=3,
        )  # fmt: skip

    for name, value in extra.items():
        setattr(TinyForConditionalGeneration, name, value)
    return TinyForConditionalGeneration()


def two(batch: dict[str, Any], model: Any = None, ranks: int = 2, rank: int = 1, **options: Any) -> dict[str, Any]:
    model = encoder_decoder() if model is None else model
    return dict(prepare_batch(batch, ls.Mesh.abstract(ranks, rank), config=model, **{"layout": "contiguous", **options}))


SOURCE = {"input_ids": ids(2, 12), "decoder_input_ids": ids(2, 7)}
