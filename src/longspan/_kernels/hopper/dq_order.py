"""Turns: an order in which tiles of keys add to the gradient of q, so that its bits do not change from run to run.

Programs take tiles of keys off a counter in the order of `Turns.order`. To each tile of queries they add in that same order: a program
waits only for others that were taken before it, so that whoever was taken first never waits, and all come to an end, however many run at
once. From the last tile of keys to the first, each walking its queries upwards: where queries see what is before them, programs that begin
together then reach a tile of queries one after the other, in the order in which they are to add to it.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from longspan._kernels.gpu import launch
from longspan._kernels.hopper.makespan import MANY, PROGRAMS, mean_work, took
from longspan._masks.block_table import BlockTable, expand_ranges

MOST = 2**22  # tiles in a table: one number each, counted once (0.4 s for 2 million)
LEAST = 0.25  # share of tiles in a table. In sparser ones, as of documents, heads and documents of other lengths are waited for
# What the order of turns leaves of the speed of one that begins with the longest items, by `evenness`. Causal on an H200, against the fast
# mode, which does: where that says 0.94, turns have 0.87 to 0.91 of its speed, where it says 0.89, 0.80 to 0.83, where it says 0.80, 0.67;
# two passes have 0.86 to 0.91.
EVEN = 0.92


class Turns(NamedTuple):
    """On the device, int32. `order`: rows of (batch, head group, tile of keys) in the order to start them. `before`: for a row's tiles of
    queries, ascending, how many tiles of keys add to it earlier; the row's begin at `ptr`.
    """

    order: Tensor
    ptr: Tensor
    before: Tensor


_kept: WeakKeyDictionary[BlockTable, dict[tuple[torch.device, int], Turns]] = WeakKeyDictionary()
_evenness: WeakKeyDictionary[BlockTable, dict[int, float]] = WeakKeyDictionary()


def worthwhile(table: BlockTable, groups: int) -> bool:
    """Whether turns take less time than another pass. `groups`: how many programs walk a tile of keys, each other heads."""
    return sum(table.counts()[1:]) <= MOST and table.density >= LEAST and evenness(table.transposed, groups) >= EVEN


def evenness(table: BlockTable, groups: int) -> float:
    """Of a table whose rows are tiles of keys: how long its items take if the longest begin, over how long in the order of turns, if none
    waits for another. 1 where there are so many that it does not matter. Kept with the table.
    """
    kept = _evenness.setdefault(table, {})
    if groups not in kept:
        work = mean_work(table)
        many = groups * len(work) > MANY * PROGRAMS
        kept[groups] = 1.0 if many else took(sorted(work, reverse=True), groups) / took(work[::-1], groups)
    return kept[groups]


def turns(table: BlockTable, shared: int, device: torch.device) -> Turns:
    """Of a table whose rows are tiles of keys. `shared`: heads whose rows one program walks together. Kept with the table."""
    kept = _kept.setdefault(table, {})
    if (device, shared) not in kept:
        kept[device, shared] = Turns(*launch.to_device([_order(table, shared), *_counted(table)], device))
    return kept[device, shared]


def _order(table: BlockTable, shared: int) -> Tensor:
    """Rows of (batch, head group, tile), the last tiles first."""
    groups = table.batch * max(1, table.heads // shared)
    return torch.arange(groups * table.q_tiles).view(groups, table.q_tiles).flip(1).mT.flatten()


def _counted(table: BlockTable) -> tuple[Tensor, Tensor]:
    """(first place of each row, how many later rows of the same batch and head hold each of its tiles)."""
    held = table.tiles_per_row
    row = torch.repeat_interleave(torch.arange(table.rows), held)
    tile = expand_ranges(table.first.long(), (table.last - table.first + 1).long())
    # Last rows first: among equal tiles the sort then keeps the order in which they add.
    where, place = (row // max(1, table.q_tiles) * table.kv_tiles + tile).flip(0).sort(stable=True)
    begins = torch.cat([torch.ones(min(1, len(where)), dtype=torch.bool), where.diff() != 0])
    nth = torch.arange(len(where))
    before = torch.empty_like(nth)
    before[place] = nth - torch.where(begins, nth, 0).cummax(0).values
    return held.cumsum(0) - held, before.flip(0)
