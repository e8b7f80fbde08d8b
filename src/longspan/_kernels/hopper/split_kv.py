"""Items cut along their keys, so that the last round of a launch leaves no program idle.

Where items take about equally long, the last round of them may be far from full: 1,024 items on 132 programs take 8 rounds for the work of
7.76, and 32 items, as of few queries over many keys, leave 100 programs nothing at all. So of the last items as many are cut as are still
under way when the first program finds none left. Where they keep at most half of the programs busy, each is cut into as many equal pieces
as there are programs for; else each gives up a short piece or two, and the programs that would have idled compute those. How, and whether
it pays, is found by going through the last rounds about as the programs will.

All items are cut at the same share of their keys: programs that read the same keys go on doing so at the same time, which the cache needs.
Every piece leaves its state. Whoever is the last of an item's pieces reads them all and writes the result: no piece waits for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isqrt
from typing import NamedTuple

from longspan._kernels.hopper.makespan import ends

_ITEM_COST = 1  # blocks of keys that a program could compute in the time that it takes to begin and to end an item
_CUT_COST = 2  # and that one more piece takes
_SHORT = 4  # blocks of which a program takes the next item before it has come to the end (`_NEAR` in forward.py): it might take two
_WIDE = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)  # shares of an item that its first piece may be, to one of each other piece


class Pieces(NamedTuple):
    """The items after the first `uncut` ones, `cut` of them, are cut into `parts` pieces each: the first of `wide` shares, the others of
    one. First come the first pieces of all of them, then the second ones, and so on.
    """

    uncut: int
    cut: int = 0
    parts: int = 0
    wide: int = 1

    @property
    def items(self) -> int:
        return self.uncut + self.cut * self.parts


def pieces(lengths: Sequence[int], items: int, *, programs: int, cuttable: bool = True) -> tuple[Pieces, int]:
    """(how to cut the items of a launch, when the last program ends, in blocks). `lengths`: blocks of the last items, in their order."""
    ended = ends(lengths, [0] * programs, cost=_ITEM_COST)
    if not cuttable:
        return Pieces(items), max(ended)
    idle = min(ended)
    cut = sum(end > idle for end in ended)
    before, last = lengths[: len(lengths) - cut], lengths[len(lengths) - cut :]
    shortest = min(last, default=0)
    if 2 * cut <= programs:
        # To read many states takes time, too: at most as many pieces as each has blocks.
        shares = [(min(programs // max(1, cut), isqrt(shortest), shortest // (_SHORT + 1)), 1)]
    else:
        shares = [(parts, wide) for parts in (2, 3) for wide in _WIDE if shortest // (parts - 1 + wide) > _SHORT]
    free, found = ends(before, [0] * programs, cost=_ITEM_COST), Pieces(items)
    last_end, least = max(ended), max(ended) - 2 * _CUT_COST
    for way in (Pieces(items - cut, cut, parts, wide) for parts, wide in shares if parts > 1):
        end = max(ends(cut_lengths(last, way), list(free), cost=_ITEM_COST))
        if end <= least:
            last_end, least, found = end, end - 1, way
    return found, last_end


def cut_lengths(lengths: Sequence[int], way: Pieces) -> list[int]:
    """Blocks of the pieces of items, and what a piece costs more than an item."""
    shares, edges = way.wide + way.parts - 1, [0, *(way.wide + i for i in range(way.parts))]
    return [n * b // shares - n * a // shares + _CUT_COST for a, b in pairwise(edges) for n in lengths]
