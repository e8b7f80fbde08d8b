"""Remembered masks of functions and BlockMasks: numbers that a mod computes with are noticed in the preamble too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import longspan as ls
from longspan._engine import call_cache
from longspan._masks import remembered_mask as remembered_masks

WINDOWS = torch.tensor([1, 2])


def with_a_number() -> tuple[Any, Callable[[int], object]]:
    """A mod whose preamble multiplies by a Python number, and a setter of the number."""
    factor = 1

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q - kv).abs() <= (WINDOWS * factor)[h]

    def change(value: int) -> None:
        nonlocal factor
        factor = value

    return mod, change


def with_a_read_value() -> tuple[Any, Callable[[int], object]]:
    """A mod whose preamble multiplies by a tensor's value, read in Python, and a setter of the value."""
    factor = torch.tensor(1)

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q - kv).abs() <= (WINDOWS * int(factor))[h]

    return mod, factor.fill_


def of_one_partial_tile(mod: Any) -> BlockMask:
    one, tile = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    return BlockMask.from_kv_blocks(one, tile, BLOCK_SIZE=16, mask_mod=mod, seq_lengths=(16, 16))


@pytest.mark.parametrize("make", [with_a_number, with_a_read_value])
@pytest.mark.parametrize("form", ["function", "block_mask"])
def test_a_mask_is_remembered_until_a_number_of_its_preamble_changes(form: str, make: Any) -> None:
    mod, change = make()
    value = mod if form == "function" else of_one_partial_tile(mod)
    remembered: Any = remembered_masks._of_function if form == "function" else remembered_masks._of_block_mask
    first = remembered(value)
    assert first.traced.preamble is not None and remembered(value) is first
    change(3)
    second = remembered(value)
    assert second is not first and second.traced.program.key == first.traced.program.key
    assert remembered(value) is second


def test_a_preamble_that_appears_or_disappears_is_noticed() -> None:
    scaled = False

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q - kv).abs() <= (WINDOWS * 3 if scaled else WINDOWS)[h]

    masks = []
    for scaled in (False, True, False):  # noqa: B007
        masks.append(remembered_masks._of_function(mod))
        assert remembered_masks._of_function(mod) is masks[-1]
    assert [mask.traced.preamble is None for mask in masks] == [True, False, True]
    assert len({mask.traced.program.key for mask in masks}) == 1 and len(set(map(id, masks))) == 3


@pytest.mark.parametrize("make", [with_a_number, with_a_read_value])
def test_attention_with_a_block_mask_follows_a_number_of_its_preamble(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "remembered_mask", remembered_masks._of_block_mask)  # as of BlockMasks on GPUs
    (mod, change), tensors = make(), [torch.randn(1, 2, 16, 8) for _ in range(3)]
    block_mask = of_one_partial_tile(mod)
    for factor in (1, 1, 3, 5, 1):
        change(factor)
        want = ls.attention(*tensors, mask=ls.mask_mod(lambda b, h, q, kv, factor=factor: (q - kv).abs() <= WINDOWS[h] * factor))
        torch.testing.assert_close(ls.flex_attention(*tensors, block_mask=block_mask), want)
