"""`auto`: the layout that is best for work and traffic together, found by arithmetic alone: same demand, same layout, on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add

import torch
from torch import Tensor

from longspan._balance.demand import Demand, Evaluation, evaluate, pairs_per_row
from longspan._balance.lead_fill import Structure, lead_and_fill, structure_of
from longspan._balance.swaps import Swapper
from longspan._plan.layout import Layout
from longspan._plan.named_layouts import contiguous_owner, from_owner, head_tail_owner, round_robin_owner, units_per_rank

__all__ = ["Candidate", "Demand", "Evaluation", "auto", "candidates", "choose", "evaluate", "pairs_per_row", "preferred"]

ALLOWED = 1.05  # above LIMIT, but better than more where this can be had
LIMIT = 1.03  # the busiest rank's work over the mean that is as good as balanced
EQUAL_TRAFFIC = 1.05  # mean traffic within this factor of the least counts as equal
MARGIN = 0.98  # of what LIMIT allows above the mean is used: work is estimated
AIMS = (0.6, 0.75, 0.9)  # shares of the allowed excess that constructions aim at
NEARLY = 1.5  # a contiguous layout of at most this imbalance is worth improving
ROUNDS = 48  # swaps, over all constructions that are improved


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A named way to own units [T], and what each rank does under it."""

    name: str
    owner: Tensor
    evaluation: Evaluation
    length: int
    unit: int

    @cached_property
    def layout(self) -> Layout:
        return from_owner(self.owner, length=self.length, unit=self.unit, ranks=len(self.evaluation.work))


def auto(demand: Demand | Sequence[Demand], ranks: int, *, limit: float = LIMIT) -> Layout:
    """The preferred one of `candidates`. Several demands on one sequence (several masks, one layout) count together.

    What a rank owns, in tokens, depends on length, unit and ranks alone, so that such layouts of several batch rows can be stacked.
    """
    return choose(demand, ranks, limit=limit).layout


def choose(demand: Demand | Sequence[Demand], ranks: int, *, limit: float = LIMIT) -> Candidate:
    """`auto` with its reasons: the name of what it chose and its evaluation."""
    return preferred(candidates(demand, ranks, limit=limit), limit)


def preferred(candidates: Sequence[Candidate], limit: float = LIMIT) -> Candidate:
    """The rule. Of those whose busiest rank has at most `limit` times the mean work, the least mean traffic.

    Traffic within 5 % of the least counts as equal: then the better balance decides, then the least received by any rank, then
    the order of the candidates. Where nobody is within the limit, those are judged whose imbalance is within `limit` times the least,
    and at most 1.05 if the least is.
    """
    balanced = [c for c in candidates if c.evaluation.imbalance <= limit]
    if not balanced:
        least = min(c.evaluation.imbalance for c in candidates)
        most = limit * least if least > ALLOWED else min(limit * least, ALLOWED)
        balanced = [c for c in candidates if c.evaluation.imbalance <= most]
    traffic = EQUAL_TRAFFIC * min(c.evaluation.traffic for c in balanced)
    close = [c for c in balanced if c.evaluation.traffic <= traffic]
    return min(close, key=lambda c: (c.evaluation.imbalance, int(c.evaluation.received.max())))


def candidates(demand: Demand | Sequence[Demand], ranks: int, *, limit: float = LIMIT) -> list[Candidate]:
    """Contiguous, head-tail, round-robin and, where the demand has a structure and contiguous is not balanced, layouts made for it."""
    demands = [demand] if isinstance(demand, Demand) else list(demand)
    if not demands or ranks < 1 or any((d.length, d.unit) != (demands[0].length, demands[0].unit) for d in demands):
        sizes = [(d.length, d.unit) for d in demands]
        raise ValueError(
            f"auto: expected demands on one sequence in one unit and 1 rank or more, got (length, unit) {sizes}, ranks {ranks}"
        )
    search = _Search(demands, ranks, limit)
    return search.found


class _Search:
    def __init__(self, demands: list[Demand], ranks: int, limit: float) -> None:
        self.demands, self.ranks, self.limit = demands, ranks, limit
        self.first, self.units = demands[0], demands[0].units
        self.short = demands[0].length % demands[0].unit != 0
        self.work = torch.stack([d.work for d in demands]).sum(0)
        self.total = float(self.work.sum())
        contiguous = self._candidate("contiguous", contiguous_owner(self.units, ranks))
        head_tail = head_tail_owner(self.units, ranks)
        if self.short or self.units % ranks:
            head_tail = ranks - 1 - head_tail  # the ranks with one more unit last, as everywhere else
        self.found = [
            contiguous,
            self._candidate("head_tail", head_tail),
            self._candidate("round_robin", round_robin_owner(self.work, ranks, short_last=self.short)),
        ]
        if contiguous.evaluation.imbalance <= limit or self.units < 2 * ranks:
            return
        structure = structure_of(demands)
        if structure is not None:
            self._construct(structure)

    def _candidate(self, name: str, owner: Tensor) -> Candidate:
        evaluation = reduce(add, (evaluate(d, owner, self.ranks) for d in self.demands))
        return Candidate(name=name, owner=owner, evaluation=evaluation, length=self.first.length, unit=self.first.unit)

    def _construct(self, structure: Structure) -> None:
        """Improve, by swaps, the contiguous layout if it is nearly balanced, and those of several constructions that promise most."""
        nearly = self.found[0].evaluation.imbalance < NEARLY
        if nearly:
            self._improve(structure, self.found[:1])
        counts = units_per_rank(self.units, self.ranks)
        starts = []
        for variant in range(max(2, min(4, 64 // self.ranks))):
            for share in AIMS:
                owner, easy = lead_and_fill(structure, counts, share * MARGIN * (self.limit - 1), variant)
                if nearly and not easy:
                    return  # many small groups: constructions cost most and bring least here
                starts.append(self._candidate("constructed", self._seated(owner.flip((0,) if structure.mirrored else ()))))
            if not easy:
                break
        starts.sort(key=self._rating)
        best = preferred(self.found, self.limit).evaluation
        if starts[0].evaluation.traffic * EQUAL_TRAFFIC < best.traffic or best.imbalance > self.limit:
            self._improve(structure, starts[: 1 if self.ranks > 32 else 2])

    def _improve(self, structure: Structure, starts: Sequence[Candidate]) -> None:
        most = (1 + MARGIN * (self.limit - 1)) * self.total / self.ranks
        flips = (0,) if structure.mirrored else ()
        pinned = (0 if structure.mirrored else self.units - 1) if self.short else None
        improved = []
        for start in starts:
            owner = Swapper(structure, start.owner.flip(flips), self.ranks, most=most, pinned=pinned).improve(ROUNDS // len(starts))
            improved.append(self._candidate("constructed", self._relabelled(owner.flip(flips))))
        self.found.append(min(improved, key=self._rating))

    def _rating(self, candidate: Candidate) -> float:
        """Traffic, and what it will cost to do away with excess work: experience says a tenth of it per mean work in excess."""
        mean = self.total / self.ranks
        excess = (candidate.evaluation.work / mean - self.limit).clamp(min=0).sum()
        return candidate.evaluation.traffic * (1 + 0.1 * float(excess))

    def _seated(self, owner: Tensor) -> Tensor:
        """A short last unit belongs to a rank with one more than others: it gets a unit, the lightest one, of a rank that has one more."""
        count = torch.bincount(owner, minlength=self.ranks)
        last = int(owner[-1])
        if self.short and int(count[last]) < int(count.max()):
            theirs = (owner == int(count.argmax())).nonzero()[:, 0]
            owner[theirs[self.work[theirs].argmin()]] = last
        return owner

    def _relabelled(self, owner: Tensor) -> Tensor:
        """Ranks numbered by where their heaviest unit lies, those with one more unit last and the one with a short unit at the very end."""
        by_work = self.work.argsort(descending=True, stable=True)
        turn = torch.full((self.ranks,), self.units).scatter_reduce_(0, owner[by_work], torch.arange(self.units), "amin")
        heaviest = by_work[turn].tolist()
        count = torch.bincount(owner, minlength=self.ranks).tolist()
        last = int(owner[-1]) if self.short else -1
        order = sorted(range(self.ranks), key=lambda rank: (rank == last, count[rank], heaviest[rank]))
        label = torch.empty(self.ranks, dtype=torch.int64)
        label[torch.tensor(order)] = torch.arange(self.ranks)
        return label[owner]
