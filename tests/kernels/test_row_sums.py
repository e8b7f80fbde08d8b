"""Rows that come home are added in a fixed order, and packing copies every element."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from longspan._kernels.gpu.interpreter import interpreted, quiet
from longspan._kernels.gpu.row_sums import add_rows_kernel, last_rows_kernel
from longspan._kernels.row_sums import add_last_rows, add_rows_, copy_rows_, row_lists, split_rows


def test_rows_come_home_in_order() -> None:
    torch.manual_seed(0)
    home, parts = torch.randn(11, 6), [torch.tensor([3, 4, 5]), torch.tensor([9, 0, 4]), torch.tensor([4])]
    back = torch.randn(7, 6, dtype=torch.bfloat16)
    want = home.clone()
    for part, rows in zip(parts, back.split([3, 3, 1]), strict=True):
        want[part] += rows.float()
    ptr, index = row_lists(parts, 11)
    assert [index[ptr[r] : ptr[r + 1]].tolist() for r in (4, 9, 0, 1)] == [[1, 5, 6], [3], [4], []]
    add_rows_(home, back, parts, (ptr, index))
    assert torch.equal(home, want)


def test_copies_are_exact_whatever_the_strides() -> None:
    for dim in (8, 5, 16):
        x = torch.randn(2, 3, 7, dim)
        out = torch.zeros(7, 2, 3, dim + 4)
        copy_rows_(out[..., :dim], x.permute(2, 0, 1, 3))
        assert torch.equal(out[..., :dim], x.permute(2, 0, 1, 3)) and not out[..., dim:].any()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("unwritten", [0, 5, 11])
def test_rows_that_hold_nothing_yet_are_not_read(unwritten: int, device: str) -> None:
    torch.manual_seed(0)
    home, parts = torch.randn(11, 6), [torch.tensor([3, 4, 8]), torch.tensor([9, 0, 4])]
    back = torch.randn(6, 6)
    want = home.clone()
    want[:unwritten] = 0
    for part, rows in zip(parts, back.split(3), strict=True):
        want[part] += rows
    home[:unwritten] = torch.nan
    home, back, want, again = home.to(device), back.to(device), want.to(device), home.to(device, copy=True)
    lists = tuple(t.to(device) for t in row_lists(parts, 11))
    add_rows_(home, back, parts, lists, unwritten=unwritten)  # type: ignore[arg-type]
    assert torch.equal(home, want)
    if device == "cpu" and interpreted():
        with quiet():
            add_rows_kernel[11, 1](again, back, *lists, 6, unwritten, BLOCK=8)
        assert torch.equal(again, want)


@pytest.mark.parametrize("cut", [None, 0, 2])
@pytest.mark.parametrize("late", [None, 4])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_last_rows_go_straight_to_keys_and_values(per_row: bool, device: str, late: int | None, cut: int | None) -> None:
    """`cut`: how many of the three parts came in another tensor than the others; None for one tensor."""
    torch.manual_seed(0)
    batch, groups, length, dims = 2, 3, 11, (24, 40)
    rows = batch * length if per_row else length
    width = groups * sum(dims) * (1 if per_row else batch)
    home, back = torch.randn(rows, width).to(device), torch.randn(7, width, dtype=torch.bfloat16).to(device)
    parts = [torch.tensor([3, 4, 5]), torch.tensor([9, 0, 4]), torch.tensor([4])]
    lists = tuple(t.to(device) for t in row_lists(parts, rows))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # the interpreter does not round as a device does
    k, v, want_k, want_v = (torch.empty(batch, groups, length, d, dtype=dtype, device=device) for d in (*dims, *dims))
    summed = home.clone()
    add_rows_(summed, back, parts, lists)  # type: ignore[arg-type]
    own = None if late is None else torch.randn(late, width).to(device)
    if own is not None:
        summed[:late] += own
    split_rows(summed, want_k, want_v, per_row=per_row)
    backs, of_backs = [back], [parts]
    if cut is not None:
        count = sum(map(len, parts[:cut]))
        backs, of_backs = [back[:count].clone(), back[count:].clone()], [parts[:cut], parts[cut:]]
    if device == "cpu" and interpreted():
        with quiet():
            last_rows_kernel[rows, 1](
                home, backs[0], backs[-1], home if own is None else own, *lists, k, v, k.stride()[:3], v.stride()[:3], length, groups,
                width, len(backs[0]), late or 0, D=dims[0], WIDE=sum(dims), PER_ROW=per_row, BLOCK=512,
            )  # fmt: skip
        assert torch.equal(k, want_k) and torch.equal(v, want_v)
        k.zero_()
        v.zero_()
    add_last_rows(home, backs, of_backs, lists, k, v, per_row=per_row, late=own)  # type: ignore[arg-type]
    assert torch.equal(k, want_k) and torch.equal(v, want_v)
