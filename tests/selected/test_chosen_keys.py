"""Lists of single chosen keys, in Triton's interpreter on CPU, and Hopper's choice of kernels for them."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

import longspan as ls
from longspan._kernels.gpu import chosen_keys
from longspan._kernels.gpu.chosen_keys import ChosenKeysCall
from longspan._kernels.hopper import HopperKernel
from longspan._kernels.hopper.gathered_call import GatheredKeys, gatherable
from longspan._kernels.protocol import AttentionInputs, Selection, Work
from longspan._kernels.tiling import Tiling
from longspan._kernels.triton import TritonKernel
from longspan._masks.tracing import trace

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs_of(batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, dim: int = 16) -> AttentionInputs:
    q, k = torch.zeros(batch, heads, q_len, dim, device=DEVICE), torch.zeros(batch, kv_heads, kv_len, dim, device=DEVICE)
    return AttentionInputs(q=q, k=k, v=k)


def work_of(q_len: int, kv_len: int, mask: ls.Mask | None) -> Work:
    traced = None if mask is None else trace(mask, "mask")
    table = ls.full().block_table(q_len, kv_len, block=(64, 64))
    tilings = [Tiling(length=n, block=64) for n in (q_len, kv_len)]
    work = Work(table=table, q_tiles=tilings[0], kv_tiles=tilings[1], scale=1.0, selects=True)
    if traced is None:
        return work
    captured = [t.to(DEVICE) for t in traced.captured()]
    return Work(
        table=table, q_tiles=tilings[0], kv_tiles=tilings[1], scale=1.0, selects=True, mask=traced.program, mask_captured=captured
    )  # fmt: skip


IDS = torch.tensor([0] * 5 + [1] * 9 + [-1] + [2] * 6)


@pytest.mark.parametrize(
    ("mask", "q_granularity", "batch_rows"),
    [(None, 1, 2), (ls.causal(), 4, 1), (ls.causal(), 1, 1), (ls.causal() & ls.documents(ids=IDS), 1, 2)],
)
def test_lists_hold_distinct_keys_that_single_queries_see(mask: ls.Mask | None, q_granularity: int, batch_rows: int) -> None:
    batch, choices, tokens, k = 2, 3, 21, 11
    generator = torch.Generator().manual_seed(0)
    rows = -(-tokens // q_granularity)
    indices = torch.randint(-1, tokens, (batch_rows, choices, rows, k), generator=generator, dtype=torch.int32)
    indices[:, 1, 2] = -1
    indices[:, 0, :] = indices[:, 0, :].sort(-1).values
    indices[:, 2, 0] = torch.arange(k)  # no repeats
    strided = indices.to(DEVICE).mT.contiguous().mT
    selection = Selection(indices=strided, granularity=1, q_granularity=q_granularity, heads_per_choice=2)
    lists = ChosenKeysCall(inputs_of(batch, 6, 3, tokens, tokens), work_of(tokens, tokens, mask), selection).lists()
    mask = mask if q_granularity == 1 else None  # of several queries, the kernel evaluates it
    assert lists.counts.shape == (batch_rows if mask is None else batch, choices, rows)
    for b, g, q in torch.cartesian_prod(*map(torch.arange, lists.counts.shape)).tolist():
        row = indices[b % batch_rows, g, q].tolist()

        def sees(kv: int, b: int = b, q: int = q) -> bool:
            return mask is None or bool(mask(*(torch.tensor(i) for i in (b, 0, q, kv))))

        got = lists.keys[b, g, q, : int(lists.counts[b, g, q])].tolist()
        assert len(got) == len(set(got)) and set(got) == {kv for kv in row if kv >= 0 and sees(kv)}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([4, -1, 2, 6, 0], [4, 2, 6, 0]),
        ([3, -1, -1, 1, 2], [3, 1, 2]),
        ([1, 2, 5, -1, -1], [1, 2, 5]),
        ([-1, 0, 5, -1, 6], [0, 5, 6]),
        ([0, 1, 1, 5, 6], [0, 1, 5, 6]),
        ([2, 5, -1, 5, 6], [2, 5, 6]),
        ([1, 5, 2, 3, 4], [1, 5, 2, 3, 4]),
        ([2, 3, 4, 6, 5], [2, 3, 4, 6, 5]),
        ([6, 5, -1, 3, 5], [3, 5, 6]),  # with repeats: sorted
        ([6, 6, 6, 6, 6], [6]),
        ([-1, -1, -1, -1, -1], []),
    ],
)
@pytest.mark.parametrize("chunk", [2, 512])
def test_rows_without_repeats_keep_their_order(row: list[int], expected: list[int], chunk: int) -> None:
    """Three equal rows, one after the other: the bits that the first one sets are cleared."""
    rows = 3 if chunk == 2 else 4  # launches are cached by shape
    indices = torch.tensor([[[row] * rows]], dtype=torch.int32, device=DEVICE)
    selection = Selection(indices=indices, granularity=1, q_granularity=1, heads_per_choice=1)
    with patch.object(chosen_keys, "_CTAS", 1), patch.object(chosen_keys, "_CHUNK", chunk):
        lists = ChosenKeysCall(inputs_of(1, 1, 1, rows, 7), work_of(rows, 7, None), selection).lists()
    assert [lists.keys[0, 0, q, : int(lists.counts[0, 0, q])].tolist() for q in range(rows)] == [expected] * rows


@pytest.mark.parametrize("falls_at", [1, 31, 32, 33, 40, 69])
@pytest.mark.parametrize("repeats", [False, True])
def test_a_row_that_falls_once_keeps_all_of_its_keys(falls_at: int, repeats: bool) -> None:
    """Whether the fall is among the entries that are compared first, at their end, or in a later chunk."""
    row = torch.arange(3, 73)
    row[falls_at] = row[falls_at - 1] if repeats else 1
    indices = row.to(torch.int32).to(DEVICE)[None, None, None]
    selection = Selection(indices=indices, granularity=1, q_granularity=1, heads_per_choice=1)
    with patch.object(chosen_keys, "_CHUNK", 16):
        lists = ChosenKeysCall(inputs_of(1, 1, 1, 1, 75), work_of(1, 75, None), selection).lists()
    got = lists.keys[0, 0, 0, : int(lists.counts)].tolist()
    assert got == (row.unique() if repeats else row).tolist()


def test_bits_of_many_keys_and_few_entries_are_cleared() -> None:
    """A bit per key takes more stores than the entries: words of the entries alone are cleared."""
    rows, kv_len = 5, 3001
    indices = torch.tensor([[2900, 31], [31, 30], [2900, 2900], [3000, 0], [31, 30]], dtype=torch.int32, device=DEVICE)[None, None]
    selection = Selection(indices=indices, granularity=1, q_granularity=1, heads_per_choice=1)
    with patch.object(chosen_keys, "_CTAS", 1):
        lists = ChosenKeysCall(inputs_of(1, 1, 1, rows, kv_len), work_of(rows, kv_len, None), selection).lists()
    got = [lists.keys[0, 0, q, : int(lists.counts[0, 0, q])].tolist() for q in range(rows)]
    assert got == [[2900, 31], [31, 30], [2900], [3000, 0], [31, 30]]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "choices", "dims", "granularity", "gathers"),
    [
        (64, 1, 1, (128, 128), 1, True),
        (128, 1, 1, (128, 64), 1, True),
        (64, 1, 64, (128, 128), 1, False),  # one head per choice
        (96, 1, 1, (128, 128), 1, False),  # neither 64 nor 128 heads
        (64, 8, 8, (128, 128), 1, True),
        (64, 16, 16, (128, 128), 1, False),  # 4 heads
        (64, 1, 1, (96, 96), 1, False),
        (64, 1, 1, (128, 128), 4, False),
    ],
)
def test_hopper_gathers_keys_for_groups_of_many_heads(
    heads: int, kv_heads: int, choices: int, dims: tuple[int, int], granularity: int, gathers: bool
) -> None:  # fmt: skip
    kernel = HopperKernel(fallback=TritonKernel())
    q, k, v = (torch.zeros(1, h, 32, d) for h, d in ((heads, dims[0]), (kv_heads, dims[0]), (kv_heads, dims[1])))
    indices = torch.zeros(1, choices, 32, 5, dtype=torch.int32)
    selection = Selection(indices=indices, granularity=granularity, q_granularity=1, heads_per_choice=heads // choices)
    inputs = AttentionInputs(q=q, k=k, v=v)
    for by_head, captured_grads in ((False, False), (True, False), (False, True)):
        block = kernel.selection_block(inputs, selection, captured_grads=captured_grads, by_head=by_head)
        assert (block is not None) == (gathers and not by_head and not captured_grads)
    if gathers:
        assert isinstance(kernel.select(inputs, work_of(32, 32, None), selection).device_tables, GatheredKeys)


@pytest.mark.parametrize(
    ("strides", "copied"),
    [
        ((0, 640, 128, 1), False),
        ((640, 128, 128, 1), False),
        ((680, 680, 136, 1), True),  # rows of 128 of 136 elements
        ((1, 1, 128, 1), True),  # dims of size 1
        ((2**33, 2**33, 2**31 - 16, 1), False),
        ((2**34, 2**34, 2**31, 1), True),  # rows of 2³² bytes
        ((640, 640, 1, 5), True),
    ],
)
def test_keys_that_hopper_cannot_address_are_copied(strides: tuple[int, ...], copied: bool) -> None:
    keys = torch.empty_strided((1, 1, 5, 128), strides, dtype=torch.bfloat16, device="meta")
    result = gatherable(keys)
    assert (result is not keys) == copied
    assert result.stride() == ((640, 640, 128, 1) if copied else strides)
