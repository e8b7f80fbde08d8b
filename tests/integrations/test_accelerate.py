"""`SpanningAccelerator`: masks outside of its context, and batches that it cannot split."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.integrations.tiny_models import model_of

from longspan.integrations import accelerate as spanning


def test_masks_are_dropped_in_the_context_only_and_padding_raises_there() -> None:
    model, ids = model_of("llama", "sdpa"), torch.arange(2, 14).view(2, 6)
    padded = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    want = model(ids, attention_mask=padded).logits
    spanning._drop_masks(model)
    assert torch.equal(model(ids, attention_mask=padded).logits, want)
    token = spanning._in_context.set(True)
    try:
        with pytest.raises(ValueError, match="got padding"):
            model(ids, attention_mask=padded)
        with pytest.raises(ValueError, match="position_ids that start again"):
            model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))
        assert torch.equal(model(ids, attention_mask=torch.ones_like(ids)).logits, model(ids).logits)
    finally:
        spanning._in_context.reset(token)
