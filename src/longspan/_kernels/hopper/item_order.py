"""In which order a forward launch takes its items.

Head after head, or where several share their keys, those: programs that begin together then read the same keys at the same time, so that
few heads of keys are at work at once and most of what they read is in the cache. In each head, the longest items first. Where the last ones
would still be long, programs that find none left would wait for them: then the shorter items of all heads are kept for the end, or all
heads come at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from longspan._kernels.hopper.makespan import MANY

# Of the time, for each head of keys at work whose keys do not fit into the cache. Measured on an H200 at 32,768 causal tokens: 0.2 to
# 0.3 %, with 1 to 32 heads at a time, of a whole sequence and of a rank's share of it.
_CROWD = 0.0025
_ROUNDS = 16  # up to which all are gone through,
_LAST = 6  # and if there are more, of the full ones before the last so many
_HEAVY = (3 / 4, 1 / 2)  # shares of the rows after which the others may be kept for the end
_WORTH = 0.995  # of the time, from which on they are


class Order(NamedTuple):
    """First the first `heavy` rows of tiles, the longest, `group` heads at a time, group after group. Then the others, `late` at a time."""

    group: int
    heavy: int
    late: int

    def lengths(self, work: Sequence[int], *, heads: int, subs: int, count: int) -> list[int]:
        """Blocks of the last `count` items of all `heads`. `work`: of an item of each row of tiles, which has `subs` of them."""
        split, items = heads * self.heavy * subs, heads * len(work) * subs
        before, after, light = self.group * subs, self.late * subs, len(work) - self.heavy
        return [
            work[i % (self.heavy * before) // before] if i < split else work[self.heavy + (i - split) % (light * after) // after]
            for i in range(items - count, items)
        ]


def last_rounds(items: int, programs: int) -> int:
    """How many of the last items are gone through to see how a launch ends."""
    return items if items <= _ROUNDS * programs else items % programs + _LAST * programs


def best_order(
    work: Sequence[int], *, heads: int, batches: int, subs: int, shared: int, fit: int, programs: int, ending: Callable[[list[int]], float]
) -> Order:
    """`shared`: heads that have the same keys. `fit`: of how many heads the keys fit into the cache. `ending`: when the last program ends,
    given the lengths of the last items.
    """
    rows, items = len(work), len(work) * subs * heads * batches
    plain = Order(shared, rows, shared)
    if rows < 2 or items > MANY * programs or min(work) == max(work):
        return plain
    total, count = sum(work), last_rounds(items, programs)

    def time(order: Order) -> float:
        lengths = order.lengths(work, heads=heads * batches, subs=subs, count=count)
        late = sum(work[order.heavy :]) / total
        crowd = sum(part * max(0, group - max(fit, shared)) for part, group in ((1 - late, order.group), (late, order.late))) / shared
        return ((total * subs * heads * batches - sum(lengths)) / programs + ending(lengths)) * (1 + _CROWD * crowd)

    found = {Order(heads, rows, heads)} | {Order(shared, int(rows * share), late) for share in _HEAVY for late in (shared, heads)}
    least, best = min((time(order), order) for order in found)
    return best if least < _WORTH * time(plain) else plain
