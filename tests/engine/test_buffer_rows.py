"""Rows of buffers: contiguous ones as views, each made once; others by index."""

from __future__ import annotations

import pytest
import torch

from longspan._engine.buffer_rows import ReturnedRows, RowSelection, RowViews


def test_a_view_of_the_same_rows_is_made_once() -> None:
    x = torch.arange(12.0).view(6, 2)
    views = RowViews(x)
    assert views.of(0, 6) is x
    made = {(a, b): views.of(a, b) for a in range(6) for b in range(a, 7)}
    for (a, b), view in made.items():
        assert views.of(a, b) is view and torch.equal(view, x[a:b])
        assert a == b or view.data_ptr() == x[a].data_ptr()


@pytest.mark.parametrize("index", [[0, 1, 2], [3, 4], [5], [4, 3], [1, 3], [0, 2, 1, 3]], ids=str)
def test_a_selection_takes_and_writes_its_rows(index: list[int]) -> None:
    x, rows = torch.arange(12.0).view(6, 2), RowSelection.of(torch.tensor(index))
    assert rows.count == len(index) and rows.indices().tolist() == index
    assert (rows.index is None) == (index == list(range(index[0], index[0] + len(index))))
    assert torch.equal(rows.take(x), x[index])
    written = torch.zeros_like(x)
    rows.write_(written, x[index] + 1)
    assert torch.equal(written[index], x[index] + 1) and float(written.sum()) == float((x[index] + 1).sum())


def test_lists_of_returned_rows_are_copied_to_each_device_once() -> None:
    rows = ReturnedRows(parts=(torch.tensor([2, 0]), torch.tensor([1, 2])))
    for device in (torch.device("cpu"), torch.device("meta")):
        ptr, index = rows.lists(3, device)
        assert (ptr.device, index.device, ptr.shape, index.shape) == (device, device, (4,), (4,))
        assert all(a is b for a, b in zip(rows.lists(3, device), (ptr, index), strict=True))
    assert rows.lists(5, torch.device("cpu"))[0].shape == (6,)
