"""Lead and fill: a layout constructed from the structure of a demand, rank by rank.

Where queries read their document from its start, a rank that owns any part of a document reads all of it up to the last unit it owns.
Traffic is therefore low if ranks touch few documents, and few ranks touch the heavy ends of long ones. Each rank in turn *leads* with the
tail of the document whose last unit is the heaviest left, as long a tail as its work allows. It *fills* its number of units with whole
light documents. The remaining units and work are closed with the head of the leading document, which the rank reads anyway, or with the
head of another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from longspan._balance.demand import Demand

MERGE_UNITS = 8  # neighbouring groups of up to this many units together are merged
MAX_GROUPS = 400  # above this number, longer groups are merged too
EFFORT = 400  # closings tried per rank; then the rank is filled without search
TOLERANCE = 0.005  # allowed distance of a rank's work from its target, as a share of the mean work


@dataclass(frozen=True, kw_only=True, eq=False)
class Structure:
    """A demand as intervals: unit t reads units low[t] … high[t] − 1. Neither end decreases from one unit to the next.

    Attributes:
        mirrored: Everything here is of the reversed sequence, because that has fewer groups (masks that look ahead).
        work: Pairs of each unit [T].
        sums: Prefix sums of the work [T + 1].
        low, high: The intervals [T], int64.
        groups: Contiguous ranges of units (begin, end) whose intervals begin at one unit: documents.
    """

    mirrored: bool
    work: list[float]
    sums: list[float]
    low: Tensor
    high: Tensor
    groups: list[tuple[int, int]]

    @property
    def units(self) -> int:
        """Number of units T."""
        return len(self.work)


def structure_of(demands: Sequence[Demand]) -> Structure | None:
    """The structure of several demands on one sequence, their work added; None where they have none.

    Of a unit's reads the longest run counts. There is no structure if monotone intervals that contain these runs are more than twice as
    long, as for masks that select blocks at random.
    """
    units = demands[0].units
    unit = torch.arange(units)
    low, high, size = unit, unit + 1, torch.ones_like(unit)
    for demand in demands:
        longest = torch.zeros_like(unit)
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
    by_unit = work.tolist()
    return Structure(mirrored=mirrored, work=by_unit, sums=[0.0, *accumulate(by_unit)], low=low, high=high, groups=_merged_groups(begins))


def _merged_groups(begins: list[int]) -> list[tuple[int, int]]:
    """Groups between consecutive `begins`, short neighbours merged."""
    short = MERGE_UNITS
    while True:
        edges = begins[:1]
        for at, after in pairwise(begins[1:]):
            if after - edges[-1] > short:
                edges.append(at)
        edges.append(begins[-1])
        if len(edges) <= MAX_GROUPS + 1 or short >= 64:
            return list(pairwise(edges))
        short *= 2


class _Unassigned:
    """Units of a group without an owner, begin … end − 1. `start`: the group's first unit; `order`: scales its place among light groups."""

    __slots__ = ("begin", "end", "order", "start")

    def __init__(self, begin: int, end: int, order: float) -> None:
        self.begin, self.end, self.start, self.order = begin, end, begin, order

    @property
    def size(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True)
class _Fill:
    """A way to fill a rank: `tail` and `head` units of the leading group, `whole` groups, and units of one more group, `cut`."""

    score: float
    tail: int
    head: int
    whole: tuple[_Unassigned, ...]
    cut: tuple[_Unassigned, int] | None


def lead_and_fill(structure: Structure, counts: Sequence[int], slack: float, variant: int = 0) -> tuple[Tensor, bool]:
    """(An owner for each unit [T], int64; whether the search was short).

    Args:
        structure: The demand's structure.
        counts: Number of units of each rank.
        slack: The work of a rank aims at 1 + slack times the mean.
        variant: Variants other than 0 perturb the order of filling.
    """
    builder = _Assignment(structure, counts, slack, variant)
    return torch.tensor(builder.owner), builder.spent <= EFFORT // 2 * len(counts)


class _Assignment:
    """Assigns units to ranks, rank by rank."""

    def __init__(self, structure: Structure, counts: Sequence[int], slack: float, variant: int) -> None:
        self.work, self.sums = structure.work, structure.sums
        self.mean = self.sums[-1] / len(counts)
        self.aim = (1 + slack) * self.mean
        self.unassigned = [_Unassigned(a, b, _perturbation(i, variant)) for i, (a, b) in enumerate(structure.groups)]
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

    def _work(self, group: _Unassigned) -> float:
        return self.sums[group.end] - self.sums[group.begin]

    def _top(self, group: _Unassigned) -> float:
        """The heavier of the last two units: the last one may belong half to the next document."""
        return max(self.work[max(group.begin, group.end - 2) : group.end])

    def _take(self, group: _Unassigned, count: int, *, tail: bool = False) -> None:
        begin = group.end - count if tail else group.begin
        self.owner[begin : begin + count] = [self.rank] * count
        self.room -= count
        self.budget -= self.sums[begin + count] - self.sums[begin]
        if tail:
            group.end = begin
        else:
            group.begin += count

    def _step(self, *, fresh: bool) -> None:
        """Fill the rank completely, or if that fails give it one group and leave the rest to the next step."""
        groups = self.unassigned = [g for g in self.unassigned if g.end > g.begin]
        light = sorted(groups, key=lambda g: self._work(g) / g.size * g.order)
        heavy = sorted(groups, key=self._top, reverse=True)
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

    def _best_fill(self, lead: _Unassigned, light: list[_Unassigned]) -> _Fill | None:
        """The fill with the most work from the lead's tail, as reads saved for other ranks, less the reads that cutting a group costs."""
        tolerance = max(TOLERANCE * self.mean, 0.51 * self._top(lead))
        others = [g for g in light if g is not lead]
        fits = [(0, 0.0)]  # units and work of the first i light groups
        for group in others:
            units, work = fits[-1][0] + group.size, fits[-1][1] + self._work(group)
            if units > self.room or work > self.budget + tolerance:
                break
            fits.append((units, work))

        best: _Fill | None = None
        last = len(fits) - 1
        for i in range(max(0, last - 2), last + 1):
            units, work = fits[i]
            room, budget = self.room - units, self.budget - work
            best = self._closed(best, lead, room, budget, tolerance, others, i, None)
            for group in others[i + 1 :: 1 + len(others) // 200]:
                size, work_of_group = group.size, self._work(group)
                if size <= room and work_of_group <= budget + tolerance:
                    best = self._closed(best, lead, room - size, budget - work_of_group, tolerance, others, i, group)
        for i in range(last - 2) if best is None else ():
            best = self._closed(best, lead, self.room - fits[i][0], self.budget - fits[i][1], tolerance, others, i, None)
        return best

    def _closed(
        self,
        best: _Fill | None,
        lead: _Unassigned,
        room: int,
        budget: float,
        tolerance: float,
        others: list[_Unassigned],
        whole: int,
        extra: _Unassigned | None,
    ) -> _Fill | None:
        """`best`, or a better fill: the first `whole` light groups, `extra`, and a tail and a head of `room` units and `budget` work."""
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

    def _tail(
        self, lead: _Unassigned, other: _Unassigned, least: int, largest: int, room: int, budget: float, tolerance: float
    ) -> int | None:
        """The tail of the lead that, with the head of `other` to `room` units in all, comes nearest to the budget; None if none is near."""
        if least > largest:
            return None
        sums, end, begin = self.sums, lead.end, other.begin
        fixed = sums[end] - sums[begin]
        if fixed - sums[end - least] + sums[begin + room - least] > budget + tolerance:
            return None
        if fixed - sums[end - largest] + sums[begin + room - largest] < budget - tolerance:
            return None
        low, high = least, largest
        while low < high:
            middle = (low + high + 1) // 2
            if fixed - sums[end - middle] + sums[begin + room - middle] <= budget:
                low = middle
            else:
                high = middle - 1
        below = budget - (fixed - sums[end - low] + sums[begin + room - low])
        if low < largest:
            above = fixed - sums[end - low - 1] + sums[begin + room - low - 1] - budget
            if above < below:
                low, below = low + 1, above
        return low if abs(below) <= tolerance else None


def _perturbation(index: int, variant: int) -> float:
    """1 for variant 0, otherwise a fixed pseudo-random number between 0.85 and 1.15."""
    return 1.0 if variant == 0 else 0.85 + (index * 2654435761 + variant * 40503) % 65537 / 65537 * 0.3
