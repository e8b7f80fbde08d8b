"""Rows that come home are added in a fixed order, and packing copies every element."""

from __future__ import annotations

import torch

from longspan.kernels.rows import add_rows_, copy_rows_, row_lists


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
