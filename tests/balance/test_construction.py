"""Parts of the layout search by hand or by brute force, and the layouts of a few demands, which are the same on every machine."""

from __future__ import annotations

import hashlib
import random
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import longspan as ls
from longspan._balance import lead_fill, search
from longspan._balance.demand import Demand, Evaluation, pairs_per_row
from longspan._balance.lead_fill import Structure, lead_and_fill, structure_of
from longspan._balance.search import _Search, candidates
from longspan._balance.swaps import Swapper


def structure(work: list[float], groups: list[tuple[int, int]]) -> Structure:
    """Each unit reads its group up to itself."""
    low = [a for a, b in groups for _ in range(a, b)]
    return Structure(
        mirrored=False, work=work, sums=[0.0, *accumulate(work)], low=torch.tensor(low), high=torch.arange(1, len(work) + 1), groups=groups
    )


def assignment(work: list[float]) -> Any:
    """A construction with nothing assigned, of which single methods are called."""
    made = object.__new__(lead_fill._Assignment)
    made.work, made.sums = work, [0.0, *accumulate(work)]
    return made


@pytest.mark.parametrize("tolerance", [0.0, 2.0, 30.0])
def test_the_tail_of_a_lead_comes_nearest_to_the_budget(tolerance: float) -> None:
    """Against every tail of units 4 … 11 with a head of units 0 … 3, or of the same group; tails of heavier units are heavier."""
    work = [1.0, 1.0, 2.0, 3.0, 2.0, 3.0, 5.0, 7.0, 11.0, 13.0, 17.0, 19.0]
    made, group = assignment(work), lambda begin, end: lead_fill._Unassigned(begin, end, 1.0)
    compared = 0
    for lead, other in ((group(4, 12), group(0, 4)), (group(4, 12), group(4, 12)), (group(4, 10), group(1, 4))):
        for room in range(1, 5):
            for budget in range(0, 70, 3):
                sums = {
                    tail: sum(work[lead.end - tail : lead.end]) + sum(work[other.begin : other.begin + room - tail])
                    for tail in range(room + 1)
                }
                if other.begin + room > other.end:
                    continue
                got = made._tail(lead, other, 0, room, room, float(budget), tolerance)
                near = min(abs(s - budget) for s in sums.values())
                if got is None:
                    assert near > tolerance, (room, budget)
                else:
                    assert abs(sums[got] - budget) == near <= tolerance, (room, budget)
                    compared += 1
    assert compared and made._tail(group(4, 12), group(0, 4), 3, 2, 5, 10.0, 100.0) is None


def test_variants_perturb_the_order_by_up_to_15_percent() -> None:
    assert [lead_fill._perturbation(i, 0) for i in range(3)] == [1.0, 1.0, 1.0]
    drawn = [lead_fill._perturbation(i, variant) for variant in (1, 2, 3) for i in range(200)]
    assert 0.85 <= min(drawn) < 0.87 and 1.13 < max(drawn) <= 1.15 and len(set(drawn)) > 590
    assert lead_fill._perturbation(1, 1) == pytest.approx(0.85 + (2654435761 + 40503) % 65537 / 65537 * 0.3)


def test_short_neighbouring_groups_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lead_fill._merged_groups([0, 3, 8, 9, 30, 33, 50]) == [(0, 8), (8, 9), (9, 30), (30, 33), (33, 50)]
    assert lead_fill._merged_groups([0, 9, 18, 26]) == [(0, 9), (9, 18), (18, 26)]
    assert lead_fill.MAX_GROUPS == 400
    monkeypatch.setattr(lead_fill, "MAX_GROUPS", 2)
    assert lead_fill._merged_groups([0, 9, 18, 27, 36]) == [(0, 27), (27, 36)]  # up to 32 units together, for two groups
    assert len(lead_fill._merged_groups(list(range(0, 64 * 5, 64)))) == 4  # more than 64 units together are never short


def test_the_top_of_a_group_is_the_heavier_of_its_last_two_units() -> None:
    made = assignment([9.0, 4.0, 5.0, 2.0])
    tops = [made._top(lead_fill._Unassigned(a, b, 1.0)) for a, b in ((0, 4), (0, 3), (0, 1), (1, 2), (2, 4))]
    assert tops == [5.0, 5.0, 9.0, 4.0, 5.0]


def test_ranks_lead_with_heavy_tails_and_fill_with_light_documents() -> None:
    """One document of 8 units and two of 4, over two ranks of 8 units: 36 and 20 pairs, 28 of them each."""
    work = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0]
    owner, short = lead_and_fill(structure(work, [(0, 8), (8, 12), (12, 16)]), [8, 8], 0.0)
    load = torch.zeros(2, dtype=torch.float64).index_add_(0, owner, torch.tensor(work, dtype=torch.float64))
    assert short and owner[7] == 0 and load.tolist() == pytest.approx([28, 28], abs=5) and torch.bincount(owner).tolist() == [8, 8]


def test_prices_of_excess_work_follow_the_longest_group_and_the_mean() -> None:
    made = Swapper(structure([2.0] * 10, [(0, 3), (3, 10)]), torch.tensor([0] * 5 + [1] * 5), 2, max_work=11.0)
    assert made.price == 32 * 7 / 10 and made.max_price == 1e4 * 10 / 10 and made.load.tolist() == [10, 10]
    short = Swapper(structure([0.01] * 10, [(0, 3), (3, 6), (6, 10)]), torch.tensor([0] * 5 + [1] * 5), 2, max_work=11.0)
    assert short.price == 32 * 5 and short.max_price == 1e5  # at least the units of a rank, and a mean of at least one pair


def test_a_swap_must_not_raise_excess_work() -> None:
    made = Swapper(structure([2.0] * 10, [(0, 10)]), torch.tensor([0] * 6 + [1] * 4), 2, max_work=9.0)
    assert made.load.tolist() == [12, 8]
    relieved = made._relieved(0, torch.tensor([1, 1, 1, 1]), torch.tensor([1.0, 3.0, 5.0, -1.0], dtype=torch.float64))
    assert relieved.tolist() == [1.0, 1.0, -float("inf"), -float("inf")]


def test_chunks_are_runs_and_their_heads_and_tails_of_powers_of_two() -> None:
    chunks = Swapper(structure([1.0] * 103, [(0, 103)]), torch.tensor([0] * 100 + [1] * 3), 2, max_work=1e9).chunks
    assert [chunks.size[chunks.rank == rank].tolist() for rank in (0, 1)] == [[*sorted([1, 2, 4, 8, 16, 32, 64] * 2), 100], [1, 1, 2, 2, 3]]


def searching(**fields: Any) -> Any:
    """A search of which single methods are called."""
    made = object.__new__(_Search)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_the_rating_adds_a_tenth_of_the_traffic_per_mean_work_in_excess() -> None:
    made = searching(total=30.0, ranks=3, limit=1.03)
    evaluation = Evaluation(
        work=torch.tensor([16.3, 3.0, 10.7], dtype=torch.float64), received=torch.tensor([4, 5, 9]), tokens=torch.tensor([1, 1, 1])
    )
    assert made._rating(SimpleNamespace(evaluation=evaluation)) == pytest.approx(6 * (1 + 0.1 * (0.6 + 0.04)))


def test_ranks_are_numbered_by_their_count_and_their_heaviest_unit() -> None:
    work = torch.tensor([5.0, 1.0, 9.0, 2.0, 7.0, 3.0, 4.0], dtype=torch.float64)
    made = searching(work=work, ranks=3, units=7, short_last=False)
    # Rank 0 has units 0, 5 and 6, rank 1 units 1 and 4, rank 2 units 2 and 3: heaviest 0, 4 and 2.
    assert made._relabelled(torch.tensor([0, 1, 2, 2, 1, 0, 0])).tolist() == [2, 1, 0, 0, 1, 2, 2]
    made.short_last = True
    assert made._relabelled(torch.tensor([0, 0, 2, 2, 1, 0, 1])).tolist() == [1, 1, 0, 0, 2, 1, 2]


def test_the_owner_of_a_short_last_unit_gets_the_lightest_unit_of_a_longer_rank() -> None:
    work = torch.tensor([5.0, 1.0, 9.0, 2.0, 7.0], dtype=torch.float64)
    made = searching(work=work, ranks=2, short_last=True)
    assert made._with_long_last_rank(torch.tensor([0, 0, 1, 0, 1])).tolist() == [0, 1, 1, 0, 1]
    assert made._with_long_last_rank(torch.tensor([0, 1, 1, 0, 1])).tolist() == [0, 1, 1, 0, 1]
    made.short_last = False
    assert made._with_long_last_rank(torch.tensor([0, 0, 1, 0, 1])).tolist() == [0, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("mirrored", "short_last", "pinned"), [(False, True, 6), (True, True, 0), (False, False, None), (True, False, None)]
)
def test_swaps_leave_a_short_last_unit_where_it_is(
    mirrored: bool, short_last: bool, pinned: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[Any, ...]] = []

    def swapper(structure: Any, owner: torch.Tensor, ranks: int, *, max_work: float, pinned: int | None) -> Any:
        given.append((owner.tolist(), ranks, max_work, pinned))
        return SimpleNamespace(improve=lambda rounds: owner)

    monkeypatch.setattr(search, "Swapper", swapper)
    made = searching(ranks=2, units=7, short_last=short_last, total=40.0, limit=1.5, candidates=[])
    monkeypatch.setattr(made, "_candidate", lambda name, owner: (name, owner.tolist()))
    monkeypatch.setattr(made, "_relabelled", lambda owner: owner)
    monkeypatch.setattr(made, "_rating", lambda candidate: 0.0)
    owner = [0, 0, 1, 0, 1, 1, 0]
    made._improve(SimpleNamespace(mirrored=mirrored), [SimpleNamespace(owner=torch.tensor(owner))])
    assert given == [(owner[::-1] if mirrored else owner, 2, pytest.approx(20 * 1.49), pinned)]
    assert made.candidates == [("constructed", owner)]


def made_demand(mask: ls.Mask, length: int, unit: int) -> Demand:
    table = mask.block_table(length, block=unit)
    return Demand.of(table, pairs_per_row(table, mask.traced.program, mask.traced.captured()))


LENGTHS = [1700, 33, 410, 90, 700, 260, 45, 1210, 150, 380, 77, 512, 64, 900, 128, 341]
CASES = {
    "causal documents": (ls.causal() & ls.documents(lengths=LENGTHS), 7000, 16, 5),
    "short last unit": (ls.causal() & ls.documents(lengths=[*LENGTHS, 9]), 7009, 16, 4),
    "looking ahead": (~ls.causal() & ls.documents(lengths=LENGTHS[::-1]), 7000, 32, 3),
    "windows in documents": (ls.causal() & ls.sliding_window(300) & ls.documents(lengths=LENGTHS), 7000, 16, 6),
    "both ways": (ls.documents(lengths=LENGTHS), 7000, 16, 7),
}
DIGESTS = {
    "causal documents": (5, "d3540427ded7"),
    "short last unit": (4, "2f1c7846b428"),
    "looking ahead": (4, "41dcfdfaf41f"),
    "windows in documents": (4, "068e485707ba"),
    "both ways": (4, "cabc65024964"),
}


@pytest.mark.parametrize("name", CASES)
def test_layouts_are_the_same_on_every_machine(name: str) -> None:
    """All ranks of a job make their own plans. Renew the digests where the search changes."""
    mask, length, unit, ranks = CASES[name]
    made = candidates(made_demand(mask, length, unit), ranks)
    text = "|".join(f"{c.name} {','.join(map(str, cast(Any, c.owner).tolist()))}" for c in made)
    assert (len(made), hashlib.sha256(text.encode()).hexdigest()[:12]) == DIGESTS[name]


def random_structure(draw: random.Random) -> Structure:
    """Documents of 1 to 14 units with small whole numbers of pairs, so that sums are often equal."""
    groups, work = [], []
    for _ in range(draw.randint(1, 9)):
        size, kind = draw.randint(1, 14), draw.randrange(3)
        groups.append((len(work), len(work) + size))
        work += [float((i + 1, 3, draw.randint(0, 4))[kind]) for i in range(size)]
    return structure(work, groups)


@pytest.mark.parametrize(
    ("effort", "tolerance", "digest"),
    [(400, 0.005, "3f9e5c3c911e"), (400, 0.1, "df3923f69b30"), (6, 0.02, "5c5e4177ca15"), (1, 0.005, "110bc6c56265")],
)
def test_constructions_of_small_demands_are_the_same_on_every_machine(
    effort: int, tolerance: float, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Renew the digests where the construction changes."""
    assert (lead_fill.EFFORT, lead_fill.TOLERANCE) == (400, 0.005)
    monkeypatch.setattr(lead_fill, "EFFORT", effort)
    monkeypatch.setattr(lead_fill, "TOLERANCE", tolerance)
    draw, owners = random.Random(5), []
    for _ in range(120):
        made, ranks = random_structure(draw), draw.randint(1, 6)
        counts = [(made.units + rank) // ranks for rank in range(ranks)]
        owner, short = lead_and_fill(made, counts, draw.choice([0.0, 0.02, 0.25]), draw.randrange(3))
        assert torch.bincount(owner, minlength=ranks).tolist() == counts
        owners.append(f"{short} {owner.tolist()}")
    assert hashlib.sha256("|".join(owners).encode()).hexdigest()[:12] == digest


def random_demand(draw: random.Random) -> tuple[Demand, list[tuple[int, int]]]:
    """20 to 60 units in documents, causal, both ways, looking ahead or in windows; and their intervals of reads."""
    reads: list[tuple[int, int]] = []
    kind, width = draw.randrange(4), draw.randint(1, 6)
    while len(reads) < 20:
        begin, end = len(reads), len(reads) + draw.randint(1, 20)
        ends = {
            0: lambda i, begin=begin, end=end: (begin, i + 1),
            1: lambda i, begin=begin, end=end: (begin, end),
            2: lambda i, begin=begin, end=end: (i, end),
            3: lambda i, begin=begin, end=end: (max(begin, i - width), i + 1),
        }[kind]
        reads += [ends(i) for i in range(begin, end)]
    work = [float(draw.randint(0, 9) if draw.random() < 0.2 else b - a) for a, b in reads]
    first, last = torch.tensor([a for a, _ in reads]), torch.tensor([b - 1 for _, b in reads])
    length = len(reads) * 4 - draw.choice([0, 0, 3])
    made = Demand(length=length, unit=4, work=torch.tensor(work).double(), ptr=torch.arange(len(reads) + 1), first=first, last=last)
    return made, reads


def test_layouts_of_small_demands_are_the_same_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renew the digest where the search changes."""
    monkeypatch.setattr(search, "ROUNDS", 10)
    draw, texts, constructed = random.Random(11), [], 0
    for _ in range(24):
        made, ranks, limit = random_demand(draw)[0], draw.randint(1, 5), draw.choice([1.03, 1.03, 1.2, 1.0])
        options = candidates(made, ranks, limit=limit)
        constructed += options[-1].name == "constructed"
        texts += [f"{c.name} {cast(Any, c.owner).tolist()}" for c in options]
    assert constructed > 12
    assert hashlib.sha256("|".join(texts).encode()).hexdigest()[:12] == "521232f4afee"


def test_structures_are_monotone_intervals_around_the_reads_of_all_demands() -> None:
    draw, mirrored = random.Random(3), []
    for _ in range(60):
        (one, reads), (other, _) = random_demand(draw), random_demand(draw)
        demands = [one]
        if draw.random() < 0.3 and other.units >= one.units:
            cut = slice(0, one.units)
            last = other.last[cut].clamp(max=one.units - 1)
            other = Demand(length=one.length, unit=4, work=other.work[cut], ptr=one.ptr, first=other.first[cut], last=last)
            demands.append(other)
            reads = [(min(a, int(b)), max(c, int(d) + 1)) for (a, c), b, d in zip(reads, other.first, other.last)]
        sizes = [max(int(d.last[t] - d.first[t]) + 1 for d in demands) for t in range(one.units)]
        low = [min(a for a, _ in reads[t:]) for t in range(one.units)]
        high = [max(b for _, b in reads[: t + 1]) for t in range(one.units)]
        made = structure_of(demands)
        assert (made is None) == (sum(high) - sum(low) > 2 * sum(sizes))
        if made is None:
            continue
        changes = [sum(a != b for a, b in pairwise(ends)) for ends in (low, high)]
        assert made.mirrored == (changes[0] > changes[1])
        mirrored.append(made.mirrored)
        work = [float(w) for w in sum(d.work for d in demands)]
        if made.mirrored:
            low, high, work = [one.units - b for b in high[::-1]], [one.units - a for a in low[::-1]], work[::-1]
        assert (made.low.tolist(), made.high.tolist(), made.work, made.sums) == (low, high, work, [0.0, *accumulate(work)])
        begins = [0, *(t for t in range(1, one.units) if low[t] != low[t - 1]), one.units]
        assert made.groups == lead_fill._merged_groups(begins) and made.units == one.units
    assert 5 < sum(mirrored) < len(mirrored) - 5


def test_candidates_need_demands_on_one_sequence() -> None:
    made = lambda units, unit: Demand(
        length=units * unit, unit=unit, work=torch.ones(units).double(), ptr=torch.arange(units + 1), first=torch.arange(units),
        last=torch.arange(units),
    )  # fmt: skip
    for demands, ranks in (([], 2), ([made(4, 2)], 0), ([made(4, 2), made(2, 4)], 2), ([made(4, 2), made(4, 2), made(4, 3)], 2)):
        with pytest.raises(ValueError, match=rf"auto: expected demands on one sequence .*, ranks {ranks}"):
            candidates(demands, ranks)
    assert len(candidates([made(4, 2), made(4, 2)], 1)) == 3


def test_intervals_of_more_than_twice_the_reads_are_no_structure() -> None:
    """Units that read themselves, of which the last reads the first: intervals of 1 … T units."""
    for units, has_structure in ((2, True), (3, True), (4, False), (5, False)):
        first = torch.tensor([*range(units - 1), 0])
        made = Demand(
            length=units, unit=1, work=torch.ones(units).double(), ptr=torch.arange(units + 1), first=first, last=first
        )  # fmt: skip
        assert (structure_of([made]) is not None) == has_structure


@pytest.mark.parametrize(("units", "ranks", "variants"), [
    (9, 5, 0), (10, 5, 4), (32, 16, 4), (40, 17, 3), (42, 21, 3), (44, 22, 2), (64, 32, 2), (66, 33, 2), (80, 40, 2)
])  # fmt: skip
def test_the_more_ranks_the_fewer_constructions(units: int, ranks: int, variants: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one causal document, whose contiguous layout is far from balanced; three aims each."""
    tried: list[int] = []

    def construct(structure: Structure, counts: list[int], slack: float, variant: int) -> tuple[torch.Tensor, bool]:
        tried.append(variant)
        return torch.arange(ranks).repeat_interleave(torch.tensor(counts)), True

    monkeypatch.setattr(search, "lead_and_fill", construct)
    monkeypatch.setattr(_Search, "_improve", lambda self, structure, starts: None)
    unit = torch.arange(units)
    made = Demand(length=units, unit=1, work=unit.double() + 1, ptr=torch.arange(units + 1), first=torch.zeros_like(unit), last=unit)
    assert len(candidates(made, ranks)) == 3 and tried == [variant for variant in range(variants) for _ in search.AIMS]


@pytest.mark.parametrize(("share", "constructs"), [(0.999, True), (1.0, False), (1.001, False)])
def test_a_contiguous_layout_at_the_limit_is_balanced(share: float, constructs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = random_demand(random.Random(8))[0], []
    contiguous = candidates(made, 4)[0].evaluation.imbalance
    monkeypatch.setattr(_Search, "_construct", lambda self, structure: asked.append(structure))
    assert contiguous > 1.1
    candidates(made, 4, limit=share * contiguous)
    assert len(asked) == constructs


@pytest.mark.parametrize(("ranks", "starts", "rounds"), [(32, 2, [24, 24]), (33, 1, [48])])
def test_swaps_are_shared_by_the_layouts_that_they_improve(
    ranks: int, starts: int, rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One causal document, whose contiguous layout is far from balanced: the best constructions are improved."""
    asked: list[int] = []
    monkeypatch.setattr(Swapper, "improve", lambda self, rounds: asked.append(rounds) or torch.tensor(self.owner.tolist()))
    unit = torch.arange(99)
    made = Demand(length=99, unit=1, work=unit.double() + 1, ptr=torch.arange(100), first=torch.zeros_like(unit), last=unit)
    assert candidates(made, ranks)[-1].name == "constructed" and len(asked) == starts and asked == rounds


@pytest.mark.parametrize(("share", "improves"), [(0.999, True), (1.0, False)])
def test_constructions_with_no_less_traffic_are_improved_only_beyond_the_limit(
    share: float, improves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, unit = [], torch.arange(23)
    made = Demand(length=23, unit=1, work=unit.double() ** 2 + 1, ptr=torch.arange(24), first=torch.zeros_like(unit), last=unit)
    head_tail = candidates(made, 3)[1]
    monkeypatch.setattr(search, "round_robin_owner", lambda work, ranks, short_last: head_tail.owner)
    monkeypatch.setattr(search, "lead_and_fill", lambda structure, counts, slack, variant: (head_tail.owner, True))
    monkeypatch.setattr(_Search, "_improve", lambda self, structure, starts: asked.append(starts))
    candidates(made, 3, limit=share * head_tail.evaluation.imbalance)
    assert len(asked) == improves
