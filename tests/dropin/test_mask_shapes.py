"""Shapes of an attn_mask: up to four dims that broadcast over batch rows and heads."""

from __future__ import annotations

import pytest
import torch

from longspan._dropin.attn_mask import with_four_dims


@pytest.mark.parametrize("shape", [(5,), (4, 5), (1, 4, 5), (3, 4, 5), (1, 1, 4, 5), (2, 1, 4, 5), (1, 3, 4, 5), (2, 3, 4, 5)], ids=str)
def test_masks_that_broadcast_over_2_rows_and_3_heads_get_four_dims(shape: tuple[int, ...]) -> None:
    for dtype in (torch.bool, torch.float16, torch.float64):
        mask = torch.ones(shape, dtype=dtype)
        assert with_four_dims(mask, 2, 3).shape == (1,) * (4 - len(shape)) + shape


@pytest.mark.parametrize("shape", [(3, 1, 4, 5), (1, 2, 4, 5), (2, 2, 4, 5), (3, 3, 4, 5), (2, 4, 5), (1, 1, 1, 4, 5)], ids=str)
def test_masks_that_do_not_raise(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected a shape that broadcasts to|expected at most 4 dims"):
        with_four_dims(torch.ones(shape, dtype=torch.bool), 2, 3)


def test_masks_of_integers_and_of_other_types_raise() -> None:
    with pytest.raises(TypeError, match=r"expected bool or floating point, got torch\.int64"):
        with_four_dims(torch.ones(4, 5, dtype=torch.int64), 2, 3)
    for value in ("causal", torch.nn.Parameter(torch.ones(4, 5))):
        with pytest.raises(TypeError, match="expected a plain tensor or None"):
            with_four_dims(value, 2, 3)
