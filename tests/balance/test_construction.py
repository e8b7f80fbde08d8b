"""Parts of the layout search by hand or by brute force, and the layouts of a few demands, which are the same on every machine."""

from __future__ import annotations

import hashlib
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import longspan as ls
from longspan._balance import lead_fill
from longspan._balance.demand import Demand, Evaluation, pairs_per_row
from longspan._balance.lead_fill import Structure, lead_and_fill
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
                    assert near >= tolerance or near > tolerance, (room, budget)
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
    monkeypatch.setattr(lead_fill, "MAX_GROUPS", 2)
    assert lead_fill._merged_groups([0, 9, 18, 27, 36]) == [(0, 27), (27, 36)]  # up to 32 units together, for two groups
    assert len(lead_fill._merged_groups(list(range(0, 65 * 5, 65)))) == 4  # groups of 65 units are never short


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
