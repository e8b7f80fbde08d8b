"""Dtypes of block tables however they are made, and masks whose tensors are on another device than the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.other_device import OTHER, OtherDevice
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import longspan as ls
from longspan._masks.algebra import as_mask
from longspan._masks.block_mask import mask_mod_of_block_mask
from longspan._masks.block_table import BlockTable
from longspan._masks.classify import TableShape, classify
from longspan._masks.selected_shard import TileSpans, chosen_blocks, covered, selected_table, tile_kinds

Q_LEN, KV_LEN, BLOCK = 37, 53, 8
LIMITS = torch.arange(Q_LEN) * 3 % 41


def seen(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) | (kv > q + 20)


@pytest.fixture
def other_device() -> Iterator[None]:
    with OtherDevice():
        yield


def table() -> BlockTable:
    return as_mask(seen).block_table(Q_LEN, KV_LEN, block=BLOCK)


def of_selection() -> BlockTable:
    kinds = torch.zeros(2, 1, 5, 7, dtype=torch.int8)
    kinds[1, 0, 2, 3:] = 2
    return selected_table(kinds, table(), 3)


MADE: dict[str, Callable[[], BlockTable]] = {
    "classified": table,
    "empty": lambda: as_mask(lambda b, h, q, kv: q < 0).block_table(Q_LEN, KV_LEN, block=BLOCK),
    "full": lambda: ls.full().block_table(Q_LEN, KV_LEN, block=BLOCK),
    "transposed": lambda: table().transposed,
    "transposed twice": lambda: table().transposed.transposed,
    "part": lambda: table().select(torch.tensor([3, 1]), torch.tensor([0, 1, 5, 4])),
    "of block lists": lambda: as_mask(create_block_mask(seen, None, None, Q_LEN, KV_LEN, device="cpu", BLOCK_SIZE=BLOCK)).block_table(
        Q_LEN, KV_LEN, block=BLOCK
    ),
    "of a selection": of_selection,
}


@pytest.mark.parametrize("name", MADE)
def test_tables_have_32_bit_runs(name: str) -> None:
    made = MADE[name]()
    assert [t.dtype for t in (made.ptr, made.first, made.last, made.kind)] == [torch.int32] * 3 + [torch.int8]
    assert made.heavy_first.dtype == torch.int32 and made.tiles_per_row.dtype == torch.int64 and made.to_dense().dtype == torch.int8
    for kind in (1, 2):
        assert [t.dtype for t in made.runs(kind)] == [torch.int32] * 3
    counts = made.counts()
    assert [counts.empty, counts.partial, counts.full] == [int((made.to_dense() == kind).sum()) for kind in range(3)]


@pytest.mark.parametrize("captured", [torch.int16, torch.int32, torch.int64, torch.uint8])
def test_captured_tensors_on_another_device_give_the_same_table(captured: torch.dtype) -> None:
    limits, rows = LIMITS.to(captured), (torch.arange(2 * Q_LEN).view(2, -1) // 19).to(captured)
    shape = TableShape(q_len=Q_LEN, kv_len=Q_LEN, block=(BLOCK, BLOCK), batch=2, heads=1)
    masks = (
        ls.mask_mod(lambda b, h, q, kv: kv < limits[q]),
        ls.mask_mod(lambda b, h, q, kv: rows[b, q] == rows[b, kv]),
        ls.mask_mod(lambda b, h, q, kv: (q >= kv) & (limits[q] == limits[kv])),
    )
    for mask in masks:
        program, tensors = mask.traced.program, mask.traced.captured()
        here = classify(program, tensors, shape)
        with OtherDevice():
            there = classify(program, [t.to(OTHER) for t in tensors], shape)
        assert torch.equal(here.to_dense(), there.to_dense()) and there.first.device.type == "cpu"


def test_block_lists_on_another_device_have_the_same_table(other_device: None) -> None:
    tables, kinds = [], []
    for device in ("cpu", str(OTHER)):
        block_mask = create_block_mask(seen, None, None, Q_LEN, KV_LEN, device=device, BLOCK_SIZE=BLOCK)
        tables.append(as_mask(block_mask).block_table(Q_LEN, KV_LEN, block=BLOCK).to_dense())
        kinds.append(mask_mod_of_block_mask(block_mask).kinds)
    assert torch.equal(*tables) and kinds[1].device == OTHER and torch.equal(kinds[0], kinds[1].cpu())


def test_selections_on_another_device_have_the_same_kinds(other_device: None) -> None:
    indices = torch.tensor([[0, 3, -1], [2, 2, 9], [5, 4, 1]]).expand(2, 1, 3, 3)
    rows, spans = (TileSpans(first=torch.tensor(a), last=torch.tensor(b)) for a, b in (([0, 1], [0, 2]), ([0, 2, 4], [1, 3, 5])))
    want = tile_kinds(indices, 6, rows, spans)
    for dtype in (torch.int32, torch.int64):
        assert torch.equal(chosen_blocks(indices.to(dtype).to(OTHER), 6).cpu(), chosen_blocks(indices, 6))
    chosen = chosen_blocks(indices, 6)
    moved = spans.to(OTHER)
    sums = covered(chosen.to(OTHER), moved.first, moved.last)
    assert sums.dtype == torch.int32 and torch.equal(sums.cpu(), covered(chosen, spans.first, spans.last))
    assert want.dtype == torch.int8 and want.tolist()[0][0] == want.tolist()[1][0]
    rest = ls.full().block_table(16, 24, block=8)
    assert torch.equal(selected_table(want.to(OTHER), rest, 3).to_dense(), selected_table(want, rest, 3).to_dense())


def test_selected_blocks_carry_no_gradient_and_stay_out_of_range() -> None:
    made = ls.selected(torch.tensor([[[[2**32, -5, 3]]]]), granularity=4)
    assert made.indices.dtype == torch.int32 and made.indices.flatten().tolist() == [2**31 - 1, -2, 3]


def test_static_masks_hold_contiguous_copies() -> None:
    limits: Any = torch.arange(2 * Q_LEN).view(Q_LEN, 2)[:, 0]
    made = ls.StaticMask(ls.mask_mod(lambda b, h, q, kv: kv < limits[q]), device="cpu")
    (held,) = made._captured
    assert held.is_contiguous() and torch.equal(held, limits) and held.data_ptr() != limits.data_ptr()
