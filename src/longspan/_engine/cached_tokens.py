"""The queries and results of a step over a cache, by sequence. Legend as in `longspan._kernels.paged`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from longspan._cache.step import CacheStep


class StepQueries(NamedTuple):
    """Queries q [n, H, count, D] or [1, H, T, D] of a step's new tokens, in one layer."""

    q: Tensor
    step: CacheStep
    layer: int = 0

    def part(self, x: Tensor, index: int) -> Tensor:
        """The rows [H, count, …] of one sequence, of a tensor shaped like q."""
        if x.shape[0] == len(self.step.ids):
            return x[index]
        ranges = self.step.ranges
        return x[0, :, ranges.firsts[index] : ranges.firsts[index] + ranges.counts[index]]


class StepResults(NamedTuple):
    """Results out [n, H, count, E] or [1, H, T, E] and lse of a step's queries."""

    of: StepQueries
    out: Tensor
    lse: Tensor

    def queries(self, index: int) -> Tensor:
        """Queries [H, count, D] of a sequence."""
        return self.of.part(self.of.q, index)

    def add(self, index: int, out: Tensor, lse: Tensor, block: slice = slice(None)) -> None:
        """Set the results [H, m, E] and [H, m] of a sequence, or of a block of its queries."""
        self.of.part(self.out, index)[:, block].copy_(out)
        self.of.part(self.lse, index)[:, block].copy_(lse)
