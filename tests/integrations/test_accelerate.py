"""`SpanningAccelerator`: masks outside of its context, and batches that it cannot split."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.integrations.tiny_models import model_of

import longspan as ls
from longspan.integrations import accelerate as spanning


@contextmanager
def inside(mesh: Any, ids: torch.Tensor, *buffers: torch.Tensor) -> Iterator[None]:
    """The context of an accelerator that splits ids and buffers [B, S] over a mesh."""
    with ls.context_parallel(mesh, buffers=[ids, *buffers], buffer_seq_dims=[1] * (1 + len(buffers))) as context:
        token = spanning._context.set(context)
        try:
            yield
        finally:
            spanning._context.reset(token)


def test_masks_are_dropped_in_the_context_only_and_padding_raises_there() -> None:
    model, ids = model_of("llama", "sdpa"), torch.arange(2, 14).view(2, 6)
    padded = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    want = model(ids, attention_mask=padded).logits
    spanning._check_model(model)
    spanning._drop_masks(model)
    assert torch.equal(model(ids, attention_mask=padded).logits, want)
    with inside(ls.Mesh.abstract(1), ids):
        with pytest.raises(ValueError, match="got padding"):
            model(ids, attention_mask=padded)
        torch.testing.assert_close(model(ids, attention_mask=torch.ones_like(ids)).logits, model(ids).logits)


@pytest.mark.parametrize("first", [2, 4, 8])
@pytest.mark.parametrize("rank", [0, 1])
def test_positions_of_other_tokens_raise_in_the_context(rank: int, first: int) -> None:
    """Documents of `first` and 8 − `first` tokens (8: one document) over two ranks, which hold tokens 0, 1, 6, 7 and 2, 3, 4, 5."""
    model, ids = model_of("llama", "sdpa"), torch.arange(2, 10)[None]
    spanning._check_model(model)
    with inside(ls.Mesh.abstract(2, rank), ids, positions := (torch.arange(8) % first)[None]):
        if first == 8:
            spanning._check_batch(model, (ids,), {"position_ids": positions})
        else:
            with pytest.raises(ValueError, match="got others, as of packed documents"):
                model(ids, position_ids=positions)
        with pytest.raises(ValueError, match="got none: give positions"):
            model(ids)


def test_layers_with_windows_are_not_supported() -> None:
    with pytest.raises(ValueError, match="expected full causal attention, got other layers in Gemma3ForCausalLM"):
        spanning._check_model(model_of("gemma3", "sdpa"))
