"""Returned gradient rows are added to the owner's rows in a fixed order, and packing copies every element."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from longspan._kernels.gpu.interpreter import interpreted, quiet
from longspan._kernels.gpu.row_sum_kernels import add_rows_and_split_kernel, add_rows_kernel
from longspan._kernels.row_sums import (
    ReturnedGrads,
    _viewable_as_16_bytes,
    add_returned_and_split,
    add_returned_rows_,
    copy_rows_,
    row_lists,
    split_rows,
)

LOCAL_ROWS = 11


def in_one_buffer(buffer: Tensor, parts: list[Tensor], rows: int = LOCAL_ROWS) -> ReturnedGrads:
    ptr, index = (t.to(buffer.device) for t in row_lists(parts, rows))
    return ReturnedGrads(buffers=(buffer,), parts=(parts,), lists=(ptr, index))


def test_row_lists_hold_the_returned_rows_of_each_local_row_in_order() -> None:
    ptr, index = row_lists([torch.tensor([3, 4, 5]), torch.tensor([9, 0, 4]), torch.tensor([4])], LOCAL_ROWS)
    assert [index[ptr[r] : ptr[r + 1]].tolist() for r in (4, 9, 0, 1)] == [[1, 5, 6], [3], [4], []]
    assert ptr.dtype == index.dtype == torch.int32 and ptr.tolist() == [0, 1, 1, 1, 2, 5, 6, 6, 6, 6, 7, 7]


def test_returned_rows_are_added_in_order() -> None:
    torch.manual_seed(0)
    grads, parts = torch.randn(LOCAL_ROWS, 6), [torch.tensor([3, 4, 5]), torch.tensor([9, 0, 4]), torch.tensor([4])]
    buffer = torch.randn(7, 6, dtype=torch.bfloat16)
    want = grads.clone()
    for part, rows in zip(parts, buffer.split([3, 3, 1]), strict=True):
        want[part] += rows.float()
    add_returned_rows_(grads, in_one_buffer(buffer, parts))
    assert torch.equal(grads, want)


def test_copies_are_exact_for_all_strides() -> None:
    for dim in (8, 5, 16):
        x = torch.randn(2, 3, 7, dim)
        out = torch.zeros(7, 2, 3, dim + 4)
        copy_rows_(out[..., :dim], x.permute(2, 0, 1, 3))
        assert torch.equal(out[..., :dim], x.permute(2, 0, 1, 3)) and not out[..., dim:].any()


def test_elements_of_16_bytes_need_dense_aligned_rows() -> None:
    room = torch.zeros(8 * 24 + 8, dtype=torch.float32)
    room = room[room.data_ptr() % 16 // 4 :]  # allocations are aligned; a slice of one need not be
    for offset, width, stride, step, fits in (
        (0, 8, 24, 1, True), (4, 12, 16, 1, True), (0, 4, 4, 1, True), (1, 8, 24, 1, False), (2, 8, 24, 1, False),
        (0, 8, 22, 1, False), (0, 6, 24, 1, False), (0, 8, 24, 2, False), (0, 1, 4, 1, False),
    ):  # fmt: skip
        assert _viewable_as_16_bytes(room.as_strided((5, width), (stride, step), offset)) == fits
        assert _viewable_as_16_bytes(room.double().as_strided((5, width), (stride, step), offset)) == (
            step == 1 and not any(n % 2 for n in (offset, width, stride))
        )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("unwritten", [0, 5, 11])
def test_unwritten_rows_are_not_read(unwritten: int, device: str) -> None:
    torch.manual_seed(0)
    grads, parts = torch.randn(LOCAL_ROWS, 6), [torch.tensor([3, 4, 8]), torch.tensor([9, 0, 4])]
    buffer = torch.randn(6, 6)
    want = grads.clone()
    want[:unwritten] = 0
    for part, rows in zip(parts, buffer.split(3), strict=True):
        want[part] += rows
    grads[:unwritten] = torch.nan
    grads, buffer, want, by_kernel = grads.to(device), buffer.to(device), want.to(device), grads.to(device, copy=True)
    returned = in_one_buffer(buffer, parts)
    add_returned_rows_(grads, returned, unwritten=unwritten)
    assert torch.equal(grads, want)
    if device == "cpu" and interpreted():
        with quiet():
            add_rows_kernel[LOCAL_ROWS, 1](by_kernel, buffer, *returned.lists, 6, unwritten, BLOCK=8)
        assert torch.equal(by_kernel, want)


@pytest.mark.parametrize("first_parts", [None, 0, 2])
@pytest.mark.parametrize("local_rows", [None, 4])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sums_are_split_into_k_and_v_in_one_pass(per_row: bool, device: str, local_rows: int | None, first_parts: int | None) -> None:
    """first_parts: how many of the three parts are in the first of two buffers; None for one buffer."""
    torch.manual_seed(0)
    batch, kv_heads, length, dims = 2, 3, 11, (24, 40)
    rows = batch * length if per_row else length
    width = kv_heads * sum(dims) * (1 if per_row else batch)
    grads, buffer = torch.randn(rows, width).to(device), torch.randn(7, width, dtype=torch.bfloat16).to(device)
    parts = [torch.tensor([3, 4, 5]), torch.tensor([9, 0, 4]), torch.tensor([4])]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # the interpreter does not round as a device does
    k, v, want_k, want_v = (torch.empty(batch, kv_heads, length, d, dtype=dtype, device=device) for d in (*dims, *dims))
    returned = in_one_buffer(buffer, parts, rows)
    summed = grads.clone()
    add_returned_rows_(summed, returned)
    local_grads = None if local_rows is None else torch.randn(local_rows, width).to(device)
    if local_grads is not None:
        summed[:local_rows] += local_grads
    split_rows(summed, want_k, want_v, per_row=per_row)
    if first_parts is not None:
        count = sum(map(len, parts[:first_parts]))
        buffers = (buffer[:count].clone(), buffer[count:].clone())
        returned = ReturnedGrads(buffers=buffers, parts=(parts[:first_parts], parts[first_parts:]), lists=returned.lists)
    if device == "cpu" and interpreted():
        with quiet():
            add_rows_and_split_kernel[rows, 1](
                grads, returned.buffers[0], returned.buffers[-1], grads if local_grads is None else local_grads, *returned.lists, k, v,
                k.stride()[:3], v.stride()[:3], length, kv_heads, width, len(returned.buffers[0]), local_rows or 0, D=dims[0],
                KV_DIM=sum(dims), PER_ROW=per_row, BLOCK=512,
            )  # fmt: skip
        assert torch.equal(k, want_k) and torch.equal(v, want_v)
        k.zero_()
        v.zero_()
    add_returned_and_split(grads, returned, k, v, per_row=per_row, local_grads=local_grads)
    assert torch.equal(k, want_k) and torch.equal(v, want_v)
