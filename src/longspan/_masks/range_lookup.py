"""Range minimum and maximum of captured tables: what a lookup can return when its index is only known to lie in an interval."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from longspan._masks.interval_rules import Interval, carrier

SUB = 16  # entries per sub-block: ranges are rounded out to them, which loosens a bound and never breaks it


class RangeTable:
    """Bounds of `values[i]` for i in an interval; `values` [n] in any dtype.

    `keep` [n] bool restricts the question to the entries that are kept: the bounds are then of those alone, and an interval
    that holds none has lo > hi. Memory: 2 · n / 16 · log2(n / 16) entries.
    """

    def __init__(self, values: Tensor, keep: Tensor | None = None) -> None:
        self.values = values
        self.dtype = carrier(values.dtype)
        self.size = len(values)
        self.restricted = keep is not None
        plain = values.to(torch.uint8) if values.dtype == torch.bool else values
        low = high = plain
        if keep is not None:
            least, most = _limits(plain.dtype)
            low, high = plain.masked_fill(~keep, most), plain.masked_fill(~keep, least)
        self.low = _doubling(_by_sub_block(low, torch.minimum), torch.minimum)
        self.high = _doubling(_by_sub_block(high, torch.maximum), torch.maximum)
        spans = torch.arange(1, self.low.shape[1] + 1)
        powers = 2 ** torch.arange(1, max(2, self.low.shape[0] + 1))
        self.log2 = torch.cat([spans.new_zeros(1), torch.bucketize(spans, powers, right=True)])

    def query(self, index: Interval, inside: bool) -> Interval:
        """Bounds over each interval of indices. `inside`: all are known to lie in 0 … n − 1; else they wrap once and are clamped."""
        first, last = index if inside else wrapped(index, self.size)
        a, b = first // SUB, last // SUB
        level = self.log2[b - a + 1]
        b = b + 1 - (1 << level)
        lo = torch.minimum(self.low[level, a], self.low[level, b])
        hi = torch.maximum(self.high[level, a], self.high[level, b])
        if not self.restricted:
            point, exact = first == last, self.values[first]
            exact = exact.to(lo.dtype)
            lo, hi = torch.where(point, exact, lo), torch.where(point, exact, hi)
        return Interval(lo.to(self.dtype), hi.to(self.dtype))


def lookup_points(table: Tensor, whole: Interval, indices: list[Interval]) -> Interval:
    """A lookup with several varying indices: exact where each index is one value, the whole table's bounds elsewhere."""
    at, point = [], torch.ones(1, dtype=torch.bool)
    for index, size in zip(indices, table.shape, strict=True):
        first, last = wrapped(index, size)
        at.append(first)
        point = point & (first == last)
    exact = table[tuple(at)].to(carrier(table.dtype))
    return Interval(torch.where(point, exact, whole.lo), torch.where(point, exact, whole.hi))


def wrapped(index: Interval, size: int) -> Interval:
    """Indices as torch reads them: negative ones count from the end. What lies outside the table after that is clamped."""
    lo, hi = index
    below, astride = hi < 0, (lo < 0) & (hi >= 0)
    lo = torch.where(below, lo.clamp(min=-size) + size, lo.clamp(min=0))
    hi = torch.where(below, hi + size, torch.where(astride, size - 1, hi))
    return Interval(lo.clamp(0, size - 1), hi.clamp(0, size - 1))


def _limits(dtype: torch.dtype) -> tuple[float, float]:
    if dtype.is_floating_point:
        return -torch.inf, torch.inf
    info = torch.iinfo(dtype)
    return info.min, info.max


def _by_sub_block(values: Tensor, fold: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """values [n] → one value per sub-block. Halving folds of whole vectors: several times faster than a reduction over 16 entries."""
    pad = -len(values) % SUB
    if pad:
        values = torch.cat([values, values[-1:].expand(pad)])
    values = values.view(-1, SUB)
    while values.shape[1] > 1:
        half = values.shape[1] // 2
        values = fold(values[:, :half], values[:, half:])
    return values[:, 0]


def _doubling(values: Tensor, fold: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """[m] → [levels, m]: entry (k, i) folds values i … i + 2^k − 1 (entries that would reach past the end are not read)."""
    levels = max(1, len(values).bit_length())
    out = values.new_empty(levels, len(values))
    out[0] = values
    for k in range(1, levels):
        half = 1 << (k - 1)
        out[k] = out[k - 1]
        out[k, :-half] = fold(out[k - 1, :-half], out[k - 1, half:])
    return out
