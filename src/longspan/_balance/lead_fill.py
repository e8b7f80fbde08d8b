"""Lead and fill: a layout from the structure of a demand, rank by rank.

Where the queries of a document read it from its start, a rank that owns any of it reads up to the last unit that it owns there. So
traffic is low when ranks touch few documents, and few ranks touch the heavy ends of long ones. Each rank in turn *leads* with the tail of
the document whose last unit is the heaviest left, as long a tail as its work allows, and *fills* up its count of units with whole light
documents. What is left to be closed, units and work at once, is closed with the head of the leading document, which the rank reads
anyway, or with the head of one more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from longspan._balance.demand import Demand

SHORT = 8  # units: neighbouring groups are joined up to this
MOST = 400  # groups; more are joined further
EFFORT = 400  # closings tried for a rank; then it is filled without search
TOLERANCE = 0.005  # of the mean work: how well a rank's work has to meet its target


@dataclass(frozen=True, kw_only=True, eq=False)
class Structure:
    """A demand in the form of intervals: unit t reads units low[t] … high[t] − 1, and neither falls from one unit to the next.

    `sums` [T + 1] are running sums of the work. `groups` are stretches of units, begin and end, that read from one unit on: documents.
    `mirrored`: all of this is of the sequence read backwards, where that has fewer groups (masks that look ahead).
    """

    mirrored: bool
    work: list[float]
    sums: list[float]
    low: Tensor
    high: Tensor
    groups: list[tuple[int, int]]

    @property
    def units(self) -> int:
        return len(self.work)


def structure_of(demands: Sequence[Demand]) -> Structure | None:
    """The structure of several demands on one sequence together, their work added, or None where they have none.

    Of a unit's reads the longest run counts. Where intervals that contain these and do not fall are more than twice as long, as for
    masks that pick blocks at random, there is no structure.
    """
    units = demands[0].units
    own = torch.arange(units)
    low, high, size = own.clone(), own + 1, torch.ones_like(own)
    for demand in demands:
        longest = torch.zeros_like(own)
        runs = (demand.last - demand.first + 1) * (units + 1) + demand.first
        longest.scatter_reduce_(0, demand.row_of_run, runs, "amax")
        length, first = longest // (units + 1), longest % (units + 1)
        reads = length > 0
        low = torch.where(reads, torch.minimum(low, first), low)
        high = torch.where(reads, torch.maximum(high, first + length), high)
        size = torch.maximum(size, length)
    low, high = low.flip(0).cummin(0).values.flip(0), high.cummax(0).values
    if int((high - low).sum()) > 2 * int(size.sum()):
        return None
    work = torch.stack([demand.work for demand in demands]).sum(0)
    mirrored = int((low.diff() != 0).sum()) > int((high.diff() != 0).sum())
    if mirrored:
        low, high, work = units - high.flip(0), units - low.flip(0), work.flip(0)
    begins = [0, *((low.diff() != 0).nonzero()[:, 0] + 1).tolist(), units]
    listed = work.tolist()
    return Structure(mirrored=mirrored, work=listed, sums=[0.0, *accumulate(listed)], low=low, high=high, groups=_joined(begins))


def _joined(begins: list[int]) -> list[tuple[int, int]]:
    short = SHORT
    while True:
        edges = begins[:1]
        for at, after in pairwise(begins[1:]):
            if after - edges[-1] > short:
                edges.append(at)
        edges.append(begins[-1])
        if len(edges) <= MOST + 1 or short >= 64:
            return list(pairwise(edges))
        short *= 2


class _Left:
    """What is left of a group: units begin … end − 1. `start` is where the group began; `order` scales its place among the light ones."""

    __slots__ = ("begin", "end", "order", "start")

    def __init__(self, begin: int, end: int, order: float) -> None:
        self.begin, self.end, self.start, self.order = begin, end, begin, order

    @property
    def size(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True)
class _Fill:
    """A way to fill a rank: `tail` and `head` units of the leading group, some groups whole, and the head of one more."""

    score: float
    tail: int
    head: int
    whole: tuple[_Left, ...]
    cut: tuple[_Left, int] | None


def lead_and_fill(structure: Structure, counts: Sequence[int], slack: float, variant: int = 0) -> tuple[Tensor, bool]:
    """(An owner for each unit [T], int64; whether it came easily). Rank r owns counts[r] units.

    Work aims at 1 + slack times the mean. Variants but 0 disturb the order of filling.
    """
    builder = _Builder(structure, counts, slack, variant)
    return torch.tensor(builder.owner), builder.spent <= EFFORT // 2 * len(counts)


class _Builder:
    def __init__(self, structure: Structure, counts: Sequence[int], slack: float, variant: int) -> None:
        self.work, self.sums = structure.work, structure.sums
        self.mean = self.sums[-1] / len(counts)
        self.aim = (1 + slack) * self.mean
        self.left = [_Left(a, b, _disturbed(i, variant)) for i, (a, b) in enumerate(structure.groups)]
        self.owner = [0] * structure.units
        self.spent = 0
        unspent, remaining = 0.0, self.sums[-1]
        for rank, count in enumerate(counts):
            self.rank, self.room, self.budget = rank, count, min(self.aim + unspent, remaining)
            self.effort = self.spent + EFFORT
            while self.room > 0:
                before = self.budget
                self._step(fresh=self.room == count)
                remaining -= before - self.budget
            unspent = self.budget

    def _work(self, group: _Left) -> float:
        return self.sums[group.end] - self.sums[group.begin]

    def _top(self, group: _Left) -> float:
        """The heaviest unit at the end; the very last one may belong half to the next document."""
        return max(self.work[max(group.begin, group.end - 2) : group.end])

    def _take(self, group: _Left, count: int, *, tail: bool = False) -> None:
        begin = group.end - count if tail else group.begin
        self.owner[begin : begin + count] = [self.rank] * count
        self.room -= count
        self.budget -= self.sums[begin + count] - self.sums[begin]
        if tail:
            group.end = begin
        else:
            group.begin += count

    def _step(self, *, fresh: bool) -> None:
        """Fill the rank whole, or failing that give it one group and leave the rest to the next step."""
        left = self.left = [g for g in self.left if g.end > g.begin]
        light = sorted(left, key=lambda g: self._work(g) / g.size * g.order)
        heavy = sorted(left, key=self._top, reverse=True)
        if fresh:
            leads = heavy[:1]
        else:
            least = self.budget - TOLERANCE * self.mean
            leads = [g for g in reversed(heavy) if self._top(g) * self.room >= least]
            leads = leads[:: 1 + len(leads) // 32]
        for lead in leads:
            if self.spent >= self.effort:
                break
            fill = self._best_fill(lead, light)
            if fill is not None:
                for group in fill.whole:
                    self._take(group, group.size)
                self._take(lead, fill.tail, tail=True)
                self._take(lead, fill.head)
                if fill.cut is not None:
                    self._take(*fill.cut)
                return
        fits = (g for g in heavy if g.size <= self.room and self._work(g) <= self.budget)
        group = next(fits, light[0])
        self._take(group, min(self.room, group.size))

    def _best_fill(self, lead: _Left, light: list[_Left]) -> _Fill | None:
        """Most work from the lead's tail, counted in the reads that it saves others, less the reads that cutting a group costs."""
        tolerance = max(TOLERANCE * self.mean, 0.51 * self._top(lead))
        others = [g for g in light if g is not lead]
        fits = [(0, 0.0)]  # units and work of the first i light groups
        for group in others:
            units, work = fits[-1][0] + group.size, fits[-1][1] + self._work(group)
            if units > self.room or work > self.budget + tolerance:
                break
            fits.append((units, work))

        best: _Fill | None = None
        most = len(fits) - 1
        for i in range(max(0, most - 2), most + 1):
            units, work = fits[i]
            room, budget = self.room - units, self.budget - work
            best = self._closed(best, lead, room, budget, tolerance, others, i, None)
            for group in others[i + 1 :: 1 + len(others) // 200]:
                size, its = group.size, self._work(group)
                if size <= room and its <= budget + tolerance:
                    best = self._closed(best, lead, room - size, budget - its, tolerance, others, i, group)
        for i in range(most - 2) if best is None else ():
            best = self._closed(best, lead, self.room - fits[i][0], self.budget - fits[i][1], tolerance, others, i, None)
        return best

    def _closed(
        self,
        best: _Fill | None,
        lead: _Left,
        room: int,
        budget: float,
        tolerance: float,
        others: list[_Left],
        whole: int,
        extra: _Left | None,
    ) -> _Fill | None:
        """`best`, or a better way to close `room` units of `budget` work next to the first light groups (and an extra one)."""
        self.spent += 1
        price = (lead.end - lead.start) / self.aim
        if room <= lead.size:
            tail = self._tail(lead, lead, 0, room, room, budget, tolerance)
            if tail is not None:
                score = (self.sums[lead.end] - self.sums[lead.end - tail]) * price
                if best is None or score > best.score:
                    groups = (*others[:whole], extra) if extra else tuple(others[:whole])
                    best = _Fill(score=score, tail=tail, head=room - tail, whole=groups, cut=None)
        if extra is None and whole < len(others):
            cut = others[whole]
            tail = self._tail(lead, cut, max(0, room - cut.size), min(room, lead.size), room, budget, tolerance)
            if tail is not None:
                head = room - tail
                score = (self.sums[lead.end] - self.sums[lead.end - tail]) * price - (head if head < cut.size else 0)
                if best is None or score > best.score:
                    best = _Fill(score=score, tail=tail, head=0, whole=tuple(others[:whole]), cut=(cut, head))
        return best

    def _tail(self, lead: _Left, other: _Left, least: int, most: int, room: int, budget: float, tolerance: float) -> int | None:
        """How many units of the lead's tail, with the other's head `room` units in all, come nearest to the budget; None if not near."""
        if least > most:
            return None
        sums, end, begin = self.sums, lead.end, other.begin
        fixed = sums[end] - sums[begin]
        if fixed - sums[end - least] + sums[begin + room - least] > budget + tolerance:
            return None
        if fixed - sums[end - most] + sums[begin + room - most] < budget - tolerance:
            return None
        low, high = least, most
        while low < high:
            middle = (low + high + 1) // 2
            if fixed - sums[end - middle] + sums[begin + room - middle] <= budget:
                low = middle
            else:
                high = middle - 1
        below = budget - (fixed - sums[end - low] + sums[begin + room - low])
        if low < most:
            above = fixed - sums[end - low - 1] + sums[begin + room - low - 1] - budget
            if above < below:
                low, below = low + 1, above
        return low if abs(below) <= tolerance else None


def _disturbed(index: int, variant: int) -> float:
    """1 for variant 0, else a fixed number between 0.85 and 1.15 that looks random."""
    return 1.0 if variant == 0 else 0.85 + (index * 2654435761 + variant * 40503) % 65537 / 65537 * 0.3
