"""Bounds of lookups in ranges of entries, in units of 16 entries."""

from __future__ import annotations

import itertools

import pytest
import torch

from longspan._masks.interval_rules import Interval
from longspan._masks.range_lookup import RangeTable, _sparse_table, lookup_points, wrap_indices

F16, F32, U8, I8, I64 = torch.float16, torch.float32, torch.uint8, torch.int8, torch.int64


def _wrapped(first: int, last: int, size: int) -> tuple[int, int]:
    """The smallest and the largest entry of a range of indices, as torch indexes: −1 is the last entry. Clamped outside."""
    if first < 0 <= last:
        return 0, size - 1
    if last < 0:
        first, last = max(first, -size) + size, last + size
    return min(max(first, 0), size - 1), min(max(last, 0), size - 1)


def test_negative_indices_wrap_once_and_are_clamped():
    for size in (1, 2, 5):
        pairs = list(itertools.combinations_with_replacement(range(-8, 9), 2))
        got = wrap_indices(Interval(*torch.tensor(pairs).T), size)
        assert list(zip(*(x.tolist() for x in got), strict=True)) == [_wrapped(*pair, size) for pair in pairs]


@pytest.mark.parametrize("dtype", [I64, I8, U8, F16, F32, torch.bool])
@pytest.mark.parametrize("size", [1, 5, 16, 17, 32, 33, 70, 130])
def test_bounds_of_a_range_are_those_of_the_16s_that_it_touches(size, dtype):
    values = torch.randint(0, 100, (size,), generator=torch.Generator().manual_seed(size)).to(dtype)
    values = values % 2 == 0 if dtype == torch.bool else values
    carried = values.to(dtype if dtype.is_floating_point or dtype == torch.bool else I64)
    keep = torch.rand(size, generator=torch.Generator().manual_seed(1)) < 0.3
    everything, kept = RangeTable(values), RangeTable(values, keep)
    first, last = torch.triu_indices(size, size)[:, :: max(1, size // 7)]
    for table, inside in itertools.product((everything, kept), (True, False)):
        lo, hi = table.query(Interval(first, last), inside)
        assert lo.dtype == hi.dtype == carried.dtype
        for i, j, low, high in zip(first.tolist(), last.tolist(), lo.tolist(), hi.tolist(), strict=True):
            blocks = slice(i // 16 * 16, (j // 16 + 1) * 16)
            touched = carried[blocks] if table is everything else carried[blocks][keep[blocks]]
            if table is everything and i == j:
                assert low == high == carried[i]
            elif len(touched):
                assert (low, high) == (touched.min(), touched.max())
            else:
                assert low > high or dtype == torch.bool
    lo, hi = everything.query(Interval(torch.tensor([-1]), torch.tensor([-1])), False)
    assert lo == hi == carried[-1]


def test_ranges_without_an_admitted_entry_have_no_value():
    for dtype, limits in ((I8, (127, -128)), (U8, (255, 0)), (F32, (torch.inf, -torch.inf)), (torch.bool, (True, False))):
        table = RangeTable(torch.ones(20).to(dtype), torch.zeros(20, dtype=torch.bool))
        lo, hi = table.query(Interval(torch.tensor([3]), torch.tensor([18])), True)
        assert (lo.item(), hi.item()) == limits


def test_spans_of_powers_of_two_are_reduced():
    values = torch.tensor([5, 3, 8, 1, 9])
    table = _sparse_table(values, torch.minimum)
    assert table.shape == (3, 5) and table[0].tolist() == values.tolist()
    assert table[1, :4].tolist() == [3, 3, 1, 1] and table[2, :2].tolist() == [1, 1]
    assert _sparse_table(values[:1], torch.minimum).tolist() == [[5]] and _sparse_table(values[:2], torch.maximum).shape == (2, 2)


def test_lookups_at_two_indices_are_known_where_both_are_one_value():
    table = torch.tensor([[1, 7, 3], [4, 5, 6]], dtype=U8)
    whole = Interval(torch.tensor([1]), torch.tensor([7]))
    rows = Interval(torch.tensor([0, 0, 1, -1, 5]), torch.tensor([0, 1, 1, -1, 5]))
    columns = Interval(torch.tensor([1, 1, 0, -3, 9]), torch.tensor([1, 1, 2, -3, 9]))
    got = lookup_points(table, whole, [rows, columns])
    assert got.lo.tolist() == [7, 1, 1, 4, 6] and got.hi.tolist() == [7, 7, 7, 4, 6] and got.lo.dtype == I64
