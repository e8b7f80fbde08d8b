"""The search for a layout with balanced work and little traffic. Deterministic: the same demand gives the same layout on every machine."""

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

FALLBACK_LIMIT = 1.05  # imbalance allowed where none is within LIMIT but some is within this
LIMIT = 1.03  # imbalance (work of the busiest rank over the mean) that counts as balanced
EQUAL_TRAFFIC = 1.05  # mean traffic within this factor of the least counts as equal
MARGIN = 0.98  # share of the excess that LIMIT allows; the rest is reserve, since work is estimated
AIMS = (0.6, 0.75, 0.9)  # shares of the allowed excess at which constructions aim
NEARLY_BALANCED = 1.5  # a contiguous layout of at most this imbalance is improved by swaps
ROUNDS = 48  # swaps, over all layouts that are improved


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """An owner of each unit [T], with a name and its evaluation."""

    name: str
    owner: Tensor
    evaluation: Evaluation
    length: int
    unit: int

    @cached_property
    def layout(self) -> Layout:
        """The candidate as a layout."""
        return from_owner(self.owner, length=self.length, unit=self.unit, ranks=len(self.evaluation.work))


def auto(demand: Demand | Sequence[Demand], ranks: int, *, limit: float = LIMIT) -> Layout:
    """The layout of the preferred candidate. Several demands on one sequence (several masks, one layout) count together.

    The number of tokens of a rank depends on length, unit and ranks alone, so that layouts of several batch rows can be stacked.
    """
    return choose(demand, ranks, limit=limit).layout


def choose(demand: Demand | Sequence[Demand], ranks: int, *, limit: float = LIMIT) -> Candidate:
    """The preferred candidate, with its name and its evaluation."""
    return preferred(candidates(demand, ranks, limit=limit), limit)


def preferred(candidates: Sequence[Candidate], limit: float = LIMIT) -> Candidate:
    """The candidate with the least mean traffic among those whose imbalance is at most `limit`.

    Traffic within 5 % of the least counts as equal: then the better balance decides, then the least traffic of any rank, then the order of
    the candidates. If no candidate is within the limit, those within `limit` times the least imbalance are compared, and at most 1.05 if
    the least is.
    """
    balanced = [c for c in candidates if c.evaluation.imbalance <= limit]
    if not balanced:
        least = min(c.evaluation.imbalance for c in candidates)
        max_imbalance = limit * least if least > FALLBACK_LIMIT else min(limit * least, FALLBACK_LIMIT)
        balanced = [c for c in candidates if c.evaluation.imbalance <= max_imbalance]
    max_traffic = EQUAL_TRAFFIC * min(c.evaluation.traffic for c in balanced)
    close = [c for c in balanced if c.evaluation.traffic <= max_traffic]
    return min(close, key=lambda c: (c.evaluation.imbalance, int(c.evaluation.received.max())))


def candidates(demand: Demand | Sequence[Demand], ranks: int, *, limit: float = LIMIT) -> list[Candidate]:
    """Contiguous, head-tail and round-robin; where contiguous is not balanced and the demand has a structure, also constructed layouts."""
    demands = [demand] if isinstance(demand, Demand) else list(demand)
    if not demands or ranks < 1 or any((d.length, d.unit) != (demands[0].length, demands[0].unit) for d in demands):
        sizes = [(d.length, d.unit) for d in demands]
        raise ValueError(
            f"auto: expected demands on one sequence in one unit and 1 rank or more, got (length, unit) {sizes}, ranks {ranks}"
        )
    return _Search(demands, ranks, limit).candidates


class _Search:
    """The candidates for some demands: named layouts, then constructions improved by swaps."""

    def __init__(self, demands: list[Demand], ranks: int, limit: float) -> None:
        self.demands, self.ranks, self.limit = demands, ranks, limit
        self.first, self.units = demands[0], demands[0].units
        self.short_last = demands[0].length % demands[0].unit != 0
        self.work = torch.stack([d.work for d in demands]).sum(0)
        self.total = float(self.work.sum())
        contiguous = self._candidate("contiguous", contiguous_owner(self.units, ranks))
        head_tail = head_tail_owner(self.units, ranks)
        if self.short_last or self.units % ranks:
            head_tail = ranks - 1 - head_tail  # as in the other candidates, the last ranks have one unit more
        self.candidates = [
            contiguous,
            self._candidate("head_tail", head_tail),
            self._candidate("round_robin", round_robin_owner(self.work, ranks, short_last=self.short_last)),
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
        """Improve by swaps the contiguous layout, if it is nearly balanced, and the most promising of several constructions."""
        nearly = self.candidates[0].evaluation.imbalance < NEARLY_BALANCED
        if nearly:
            self._improve(structure, self.candidates[:1])
        counts = units_per_rank(self.units, self.ranks)
        starts = []
        for variant in range(max(2, min(4, 64 // self.ranks))):
            for share in AIMS:
                owner, easy = lead_and_fill(structure, counts, share * MARGIN * (self.limit - 1), variant)
                if nearly and not easy:
                    return  # many small groups: constructions cost the most and gain the least
                starts.append(self._candidate("constructed", self._with_long_last_rank(owner.flip((0,) if structure.mirrored else ()))))
            if not easy:
                break
        starts.sort(key=self._rating)
        best = preferred(self.candidates, self.limit).evaluation
        if starts[0].evaluation.traffic * EQUAL_TRAFFIC < best.traffic or best.imbalance > self.limit:
            self._improve(structure, starts[: 1 if self.ranks > 32 else 2])

    def _improve(self, structure: Structure, starts: Sequence[Candidate]) -> None:
        max_work = (1 + MARGIN * (self.limit - 1)) * self.total / self.ranks
        flips = (0,) if structure.mirrored else ()
        pinned = (0 if structure.mirrored else self.units - 1) if self.short_last else None
        improved = []
        for start in starts:
            owner = Swapper(structure, start.owner.flip(flips), self.ranks, max_work=max_work, pinned=pinned).improve(ROUNDS // len(starts))
            improved.append(self._candidate("constructed", self._relabelled(owner.flip(flips))))
        self.candidates.append(min(improved, key=self._rating))

    def _rating(self, candidate: Candidate) -> float:
        """Traffic, and an estimate of what removing excess work will add to it: a tenth per mean work in excess, by experience."""
        mean = self.total / self.ranks
        excess = (candidate.evaluation.work / mean - self.limit).clamp(min=0).sum()
        return candidate.evaluation.traffic * (1 + 0.1 * float(excess))

    def _with_long_last_rank(self, owner: Tensor) -> Tensor:
        """Give the owner of a short last unit one unit more than others: the lightest unit of a rank that has one more."""
        count = torch.bincount(owner, minlength=self.ranks)
        last = int(owner[-1])
        if self.short_last and int(count[last]) < int(count.max()):
            largest = (owner == int(count.argmax())).nonzero()[:, 0]
            owner[largest[self.work[largest].argmin()]] = last
        return owner

    def _relabelled(self, owner: Tensor) -> Tensor:
        """Renumber ranks by the position of their heaviest unit. Ranks with one unit more come last, the owner of a short unit is last."""
        by_work = self.work.argsort(descending=True, stable=True)
        turn = torch.full((self.ranks,), self.units).scatter_reduce_(0, owner[by_work], torch.arange(self.units), "amin")
        heaviest = by_work[turn].tolist()
        count = torch.bincount(owner, minlength=self.ranks).tolist()
        last = int(owner[-1]) if self.short_last else -1
        order = sorted(range(self.ranks), key=lambda rank: (rank == last, count[rank], heaviest[rank]))
        label = torch.empty(self.ranks, dtype=torch.int64)
        label[torch.tensor(order)] = torch.arange(self.ranks)
        return label[owner]
