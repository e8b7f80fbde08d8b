"""Sizes of one launch of the decode kernel. Legend as in `longspan._kernels.paged`."""

from __future__ import annotations

from typing import NamedTuple

import triton

from longspan._kernels.gpu import launch
from longspan._kernels.gpu.split_kernel import SplitKernel
from longspan._kernels.triton.split_rule import RESIDENT, SplitRule

GROUPED_RESULTS = 32 * 128  # results of a tile at most: a thread holds 32, and those of a group
_MERGED_RESULTS = 128 * 128  # results of the splits of a group that a CTA loads at once
FEW_GROUPS = 2  # groups of splits that are merged at once, of sequences with at most so many groups


class DecodeSizes(NamedTuple):
    """Sizes of a launch: sequences, fewest and most queries of a sequence, tokens of the longest sequence, most partial results of a
    sequence, rows of a tile; how sequences are split; whether values are the first elements of keys; `decode_call.Queries.by`.

    grouped: whether a CTA computes a group of splits. joined: partial results per group, at most. groups: of a sequence, at most.
    taken: of a `SplitKernel`, tokens of a CTA (`SplitRule.cta_group`) and CTAs of a sequence, at most; (0, 0): a split per CTA.
    graphed: whether the launch is made for CUDA graphs (`QueryRanges.longest`). fp8: whether pages hold FP8.
    """

    sequences: int
    queries: tuple[int, int]
    longest: int
    splits: int
    tile_rows: int
    rule: SplitRule
    joined: int
    groups: int
    grouped: bool
    shared: bool = False
    by: SplitKernel | None = None
    taken: tuple[int, int] = (0, 0)
    graphed: bool = False
    fp8: bool = False

    @property
    def direct(self) -> bool:
        """Whether a CTA computes results, so that none are left to merge."""
        return self.splits == 1 and self.by is None

    def merged_rows(self, rows: int, dim: int, ctas: int, sms: int) -> int:
        """Rows of a tile, rounded up to a power of two, if the decode kernel merges its partial results itself; else 0.

        It does in launches of one wave over sequences of few groups. In larger ones, waits for stores to be visible take longer than a
        launch. A graph would fill the counters by a node of its own.

        rows: of the sequence with the most queries, per KV head. dim: elements of a row. ctas: of the launch, on `sms` SMs.
        """
        if self.direct or self.shared or self.graphed:
            return 0
        taken = min(self.tile_rows, triton.next_power_of_2(rows))
        few = self.groups <= FEW_GROUPS and taken * launch.padded(dim) * self.joined <= _MERGED_RESULTS
        return taken if few and ctas <= sms * RESIDENT else 0
