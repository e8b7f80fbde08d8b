"""How long the items of a launch take, gone through as the programs will: each takes the next one as soon as it is free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heapreplace
from typing import TypeVar
from weakref import WeakKeyDictionary

from longspan._masks.block_table import BlockTable

T = TypeVar("T", int, float)
PROGRAMS = 132  # at once, on an H100 or H200: not those of this device and its settings, on which bits would depend then
MANY = 64  # items for each program from which on it hardly matters in which order they are taken
# Of backward passes on an H200 at head dim 128: seconds for 128 queries and 128 keys of one head, and of a sum beside its bytes.
_TILE_SECONDS = 4.5e-6
_SUM_SECONDS = 1.5e-5
_BYTES_PER_SECOND = 3.5e12
_WORTH = 0.95  # of the time: what is saved by summing must be more than this leaves

_kept: WeakKeyDictionary[BlockTable, dict[tuple[int, ...], int]] = WeakKeyDictionary()


def ends(lengths: Iterable[T], free: list[T], *, cost: T) -> list[T]:
    """When each program ends. `lengths`: of items, in the order in which they are taken. `free`: when each program is; used up. `cost`: of
    any item beside its length.
    """
    heapify(free)
    for length in lengths:
        heapreplace(free, free[0] + length + cost)
    return free


def took(work: Sequence[float], groups: int) -> float:
    """When the last program ends, where each item is taken once for each group."""
    return max(ends((item for item in work for _ in range(groups)), [0.0] * PROGRAMS, cost=0.0))


def mean_work(table: BlockTable) -> list[float]:
    """Tiles in each row of tiles, in the mean over heads and batch rows."""
    found: list[float] = table.tiles_per_row.view(-1, table.q_tiles).double().mean(0).tolist()
    return found


def walks(table: BlockTable, groups: int, shared: int, dims: int) -> int:
    """Into how many parts the `shared` query heads of each of `groups` key heads are split, each of which a program walks: more than one
    where programs would idle else, and what each part finds is summed then. `table`: rows are tiles of keys. `dims`: of a key and a value.
    Kept with the table.
    """
    kept = _kept.setdefault(table, {})
    if (groups, shared, dims) not in kept:
        kept[groups, shared, dims] = _walks(table, groups, shared, dims)
    return kept[groups, shared, dims]


def _walks(table: BlockTable, groups: int, shared: int, dims: int) -> int:
    work = mean_work(table)
    if groups * len(work) > MANY * PROGRAMS:
        return 1
    work.sort(reverse=True)
    tile = _TILE_SECONDS * dims / 256
    best, least = 1, took(work, groups) * shared * tile * _WORTH
    if_even = sum(work) * groups * shared / PROGRAMS * tile
    for parts in (n for n in range(2, shared + 1) if shared % n == 0):
        summed = _SUM_SECONDS + 2 * 4 * parts * groups * table.q_len * dims / _BYTES_PER_SECOND
        if if_even + summed >= least:  # and with more parts, too
            break
        seconds = took(work, groups * parts) * (shared // parts) * tile + summed
        if seconds < least:
            best, least = parts, seconds
    return best
