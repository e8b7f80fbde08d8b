"""Simulation of a persistent kernel's CTAs: each takes the next item as soon as it is free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heapreplace
from typing import TypeVar

from longspan._masks.block_table import BlockTable

T = TypeVar("T", int, float)
REFERENCE_CTAS = 132  # SMs of an H100 or H200. A constant, so that the bits of results do not depend on the device and LONGSPAN_SM_MARGIN
MANY_ITEMS = 64  # items per CTA from which on their order hardly matters


def finish_times(lengths: Iterable[T], free: list[T], *, cost: T) -> list[T]:
    """When each CTA finishes. `lengths`: of items, in the order in which they are taken. `free`: when each CTA becomes free; modified.
    `cost`: added to the length of every item.
    """
    heapify(free)
    for length in lengths:
        heapreplace(free, free[0] + length + cost)
    return free


def makespan(lengths: Sequence[float], repeats: int) -> float:
    """When the last of REFERENCE_CTAS finishes, if each item is taken `repeats` times."""
    return max(finish_times((length for length in lengths for _ in range(repeats)), [0.0] * REFERENCE_CTAS, cost=0.0))


def mean_tiles(table: BlockTable) -> list[float]:
    """The number of tiles in each row of tiles, averaged over heads and batch rows."""
    counts: list[float] = table.tiles_per_row.view(-1, table.q_tiles).double().mean(0).tolist()
    return counts
