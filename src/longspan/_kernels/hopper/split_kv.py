"""Split-KV of a forward launch's last items, so that no CTA idles in the last wave.

1,024 items of equal length on 132 CTAs take 8 waves for the work of 7.76; 32 items, few queries over many keys, leave 100 CTAs idle. So the
items that are still running when the first CTA finds none left are split along KV. If they occupy at most half of the CTAs, each is split
into as many equal parts as there are CTAs for. Otherwise each gives up one or two short parts, which the idle CTAs compute. The split, and
whether there is one, result from a simulation of the last waves.

All items are split at the same share of their KV: CTAs that read the same KV go on reading it at the same time, which L2 needs. Each part
stores a partial result. The last part of an item to finish combines all of them: no part waits for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isqrt
from typing import NamedTuple

from longspan._kernels.hopper.makespan import finish_times

_ITEM_COST = 1  # time to start and finish an item, in KV blocks
_PART_COST = 2  # time that each part takes in addition, in KV blocks
_MIN_PART = 4  # KV blocks; a CTA that computes a shorter part takes its next item early (`NEAR_END` in forward_producer.py)
_WIDE_PARTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)  # candidates for `KvSplit.wide_part`


class KvSplit(NamedTuple):
    """The first `unsplit` items are whole. The `split_items` after them have `parts` parts each: a first part of `wide_part` shares of the
    item's KV blocks and parts of one share. The launch takes the first parts of all of them, then the second parts, and so on.
    """

    unsplit: int
    split_items: int = 0
    parts: int = 0
    wide_part: int = 1

    @property
    def items(self) -> int:
        """Items of the launch, each part counted as one."""
        return self.unsplit + self.split_items * self.parts


def best_split(lengths: Sequence[int], items: int, *, ctas: int, splittable: bool = True) -> tuple[KvSplit, int]:
    """(the fastest split of a launch, when its last CTA finishes, in KV blocks). lengths: KV blocks of the last items, in launch order."""
    whole = finish_times(lengths, [0] * ctas, cost=_ITEM_COST)
    if not splittable:
        return KvSplit(items), max(whole)
    first_idle = min(whole)
    split_items = sum(end > first_idle for end in whole)
    before, last = lengths[: len(lengths) - split_items], lengths[len(lengths) - split_items :]
    shortest = min(last, default=0)
    if 2 * split_items <= ctas:
        # Combining parts takes time too: at most as many parts as KV blocks per part.
        shapes = [(min(ctas // max(1, split_items), isqrt(shortest), shortest // (_MIN_PART + 1)), 1)]
    else:
        shapes = [(parts, wide) for parts in (2, 3) for wide in _WIDE_PARTS if shortest // (parts - 1 + wide) > _MIN_PART]
    free, best = finish_times(before, [0] * ctas, cost=_ITEM_COST), KvSplit(items)
    best_end, needed = max(whole), max(whole) - 2 * _PART_COST
    for split in (KvSplit(items - split_items, split_items, parts, wide) for parts, wide in shapes if parts > 1):
        end = max(finish_times(part_lengths(last, split), list(free), cost=_ITEM_COST))
        if end <= needed:
            best_end, needed, best = end, end - 1, split
    return best, best_end


def part_lengths(lengths: Sequence[int], split: KvSplit) -> list[int]:
    """KV blocks of all parts in launch order, plus the cost of a part. lengths: KV blocks of the split items."""
    shares, edges = split.wide_part + split.parts - 1, [0, *(split.wide_part + i for i in range(split.parts))]
    return [n * b // shares - n * a // shares + _PART_COST for a, b in pairwise(edges) for n in lengths]
