"""Items cut along their keys, so that the last round of a launch leaves no program idle.

Where items take equally long, the last round of them may be far from full: 1,024 items on 132 programs take 8 rounds for the work of 7.76,
and 32 items, as of few queries over many keys, leave 100 programs nothing at all. So the items of the last round are cut. Where they would
keep at most half of the programs busy, each is cut into as many equal pieces as there are programs for; else each gives up a short piece,
and the programs that would have idled compute those.

All items are cut at the same place: programs that read the same keys go on doing so at the same time, which the cache needs. Every piece
leaves its state. Whoever is the last of an item's pieces reads them all and writes the result: no piece waits for another.
"""

from __future__ import annotations

from math import isqrt
from typing import NamedTuple

from longspan.masks.table import BlockTable

_ALIKE = 1.1  # items count as equally long where the longest takes at most so many times the shortest
_CUT_COST = 4  # blocks of keys that a program could compute in the time that one more piece costs it
_SHORT = 4  # blocks of which a program takes the next item before it has come to the end (`_NEAR` in forward.py): it might take two


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


def pieces(table: BlockTable, items: int, *, blocks: int, programs: int) -> Pieces:
    """How to cut the items of a launch, all rows of a table that have any tile in all heads. `blocks`: of keys in a tile."""
    cut = items % programs
    work = table.tiles_per_row[table.tiles_per_row > 0] * blocks
    if not cut or int(work.max()) > _ALIKE * int(work.min()):
        return Pieces(items)
    length = int(work.min())
    if 2 * cut <= programs:
        # To read many states takes time, too: at most as many pieces as each has blocks.
        found = Pieces(items - cut, cut, max(1, min(programs // cut, isqrt(length), length // (_SHORT + 1))))
    else:
        found = Pieces(items - cut, cut, 2, -(-cut // (programs - cut)))
    longest = length * found.wide / (found.wide + found.parts - 1)
    return found if length - longest >= 2 * _CUT_COST else Pieces(items)
