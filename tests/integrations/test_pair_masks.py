"""Masks of query-key pairs on one device: as eager attention uses them, or an error."""

from __future__ import annotations

import pytest
import torch
from tests.integrations import families
from tests.integrations.tiny_models import batch_of, model_of, relative

transformers = pytest.importorskip("transformers")
lst = pytest.importorskip("longspan.integrations.transformers")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_a_mask_of_pairs_equals_eager(dtype: torch.dtype) -> None:
    ids = batch_of("plain")["input_ids"]
    seen = torch.rand(2, 1, ids.shape[1], ids.shape[1], generator=torch.Generator().manual_seed(2)) < 0.3  # not causal
    seen |= torch.eye(ids.shape[1], dtype=torch.bool)
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    given = seen if dtype == torch.bool else added
    want = model_of("llama")(ids, attention_mask=added, use_cache=False).logits
    assert relative(model_of("llama", "longspan")(ids, attention_mask=given, use_cache=False).logits, want) < 2e-5


def test_a_mask_of_pairs_beside_sinks_raises() -> None:
    layer, x = model_of("llama", "longspan").model.layers[0].self_attn, torch.zeros(1, 4, 3, 8)
    with pytest.raises(ValueError, match=r"expected a mask by token beside sinks, .* got attention_mask of shape \(1, 1, 3, 3\)"):
        lst.attention_forward(layer, x, x, x, torch.zeros(1, 1, 3, 3), s_aux=torch.zeros(4))


def test_a_mask_of_pairs_that_shows_padding_on_the_left_raises() -> None:
    model = families.tiny_model("blt", "longspan")  # its patches see all their bytes
    with pytest.raises(ValueError, match="shows tokens of padding on the left"):
        model(**families.batch_of("left"), use_cache=False)
    model(**families.batch_of("right"), use_cache=False)
