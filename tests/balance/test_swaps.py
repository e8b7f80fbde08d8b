"""Swaps of chunks: against every swap that is possible, and the order in which ranks take their turns."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

from longspan._balance import swaps
from longspan._balance.lead_fill import Structure
from longspan._balance.swaps import Swapper


def causal(groups: list[int], work: list[float] | None = None) -> Structure:
    """Units that read their group, of one of these sizes, up to themselves. By default unit i of a group has i + 1 pairs."""
    edges = [0, *accumulate(groups)]
    work = work or [float(i + 1) for size in groups for i in range(size)]
    low = torch.tensor([edge for edge, size in zip(edges, groups) for _ in range(size)])
    return Structure(
        mirrored=False,
        work=work,
        sums=[0.0, *accumulate(work)],
        low=low,
        high=torch.arange(1, len(work) + 1),
        groups=list(pairwise(edges)),
    )


def window(units: int, width: int, work: list[float]) -> Structure:
    """Units that read themselves and the `width` units before them: one group."""
    unit = torch.arange(units)
    low = (unit - width).clamp(min=0)
    return Structure(mirrored=False, work=work, sums=[0.0, *accumulate(work)], low=low, high=unit + 1, groups=[(0, units)])


def reads_of(structure: Structure, owner: list[int], ranks: int) -> list[int]:
    """Units that each rank reads."""
    read: list[set[int]] = [set() for _ in range(ranks)]
    for unit, rank in enumerate(owner):
        read[rank].update(range(int(structure.low[unit]), int(structure.high[unit])))
    return [len(units) for units in read]


def loads_of(structure: Structure, owner: list[int], ranks: int) -> list[float]:
    return [sum(w for w, rank in zip(structure.work, owner) if rank == r) for r in range(ranks)]


def chunks_of(structure: Structure, owner: list[int], pinned: int | None) -> set[tuple[int, int]]:
    """Runs of one owner in one group, and their heads and tails of 1, 2, 4 … 64 units, without the pinned unit."""
    starts = {a for a, _ in structure.groups} | {i for i in range(1, len(owner)) if owner[i] != owner[i - 1]}
    edges = [*sorted(starts), len(owner)]
    chunks = set()
    for begin, end in pairwise(edges):
        chunks.add((begin, end))
        for size in (1, 2, 4, 8, 16, 32, 64):
            if size < end - begin:
                chunks |= {(begin, begin + size), (end - size, end)}
    return {(a, b) for a, b in chunks if pinned is None or not a <= pinned < b}


def best_change(structure: Structure, owner: list[int], ranks: int, rank: int, max_work: float, price: float, pinned: int | None) -> float:
    """The least change of reads plus `price` times the excess work, by swaps of `rank` that do not raise the excess; 0 without one."""
    chunks = sorted(chunks_of(structure, owner, pinned))
    reads, excess = sum(reads_of(structure, owner, ranks)), sum(max(0.0, x - max_work) for x in loads_of(structure, owner, ranks))
    best = 0.0
    for a, b in chunks:
        for c, d in chunks:
            if owner[a] == rank != owner[c] and b - a == d - c:
                after = list(owner)
                after[a:b], after[c:d] = [owner[c]] * (d - c), [rank] * (b - a)
                added = sum(max(0.0, x - max_work) for x in loads_of(structure, after, ranks)) - excess
                if added <= 0:
                    best = min(best, sum(reads_of(structure, after, ranks)) - reads + price * added)
    return best


def drawn(seed: int) -> tuple[Structure, list[int], int]:
    """A structure, an owner per unit, and a number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high + 1, (), generator=generator))
    ranks = draw(2, 4)
    owner: list[int] = []
    while len(owner) < 24:
        owner += [draw(0, ranks - 1)] * draw(1, 6)
    work = [float(draw(1, 9)) for _ in owner]
    if seed % 3 == 0:
        return window(len(owner), draw(1, 7), work), owner, ranks
    groups: list[int] = []
    while sum(groups) < len(owner):
        groups.append(min(draw(1, 12), len(owner) - sum(groups)))
    return causal(groups, work if seed % 3 == 1 else None), owner, ranks


@pytest.mark.parametrize("seed", range(9))
def test_the_best_of_all_swaps_of_a_rank_is_made(seed: int) -> None:
    structure, owner, ranks = drawn(seed)
    made = 0
    for pinned in (None, len(owner) - 1, 4):
        for share in (0.8, 1.1, 2.0):
            max_work = share * sum(structure.work) / ranks
            for rank in range(ranks):
                start = torch.tensor(owner)
                swapper = Swapper(structure, start, ranks, max_work=max_work, pinned=pinned)
                swapper.price = price = 0.75
                swapped = swapper._swap(rank)
                after = swapper.owner.tolist()
                assert start.tolist() == owner and (after != owner) == swapped
                got = sum(reads_of(structure, after, ranks)) - sum(reads_of(structure, owner, ranks))
                loads, before = loads_of(structure, after, ranks), loads_of(structure, owner, ranks)
                cost = sum(max(0.0, x - max_work) for x in loads) - sum(max(0.0, x - max_work) for x in before)
                best = best_change(structure, owner, ranks, rank, max_work, price, pinned)
                assert got + price * cost == pytest.approx(best) and swapped == (best < 0)
                assert swapper.load.tolist() == pytest.approx(loads)
                assert sorted(after) == sorted(owner) and (pinned is None or after[pinned] == owner[pinned])
                swapper._survey()  # chunks of the new owner, as of a swapper that begins with it
                again = Swapper(structure, swapper.owner, ranks, max_work=max_work, pinned=pinned)
                assert (swapper.chunks.begin.tolist(), swapper.cut.tolist()) == (again.chunks.begin.tolist(), again.cut.tolist())
                made += swapped
    assert made >= 4


@pytest.mark.parametrize("pinned", [None, 0, 4, 7, 8, 12, 19])
def test_chunks_do_not_hold_the_pinned_unit(pinned: int | None) -> None:
    structure, owner = causal([8, 4, 8]), [0] * 4 + [1] * 8 + [0] * 8
    c = Swapper(structure, torch.tensor(owner), 2, max_work=1e9, pinned=pinned).chunks
    listed = list(zip(c.begin.tolist(), c.end.tolist()))
    assert len(listed) == len(set(listed)) or pinned is None
    assert set(listed) == chunks_of(structure, owner, pinned)
    assert c.size.tolist() == sorted(b - a for a, b in listed)
    assert c.rank.tolist() == [owner[a] for a, _ in listed] and c.work.tolist() == [sum(structure.work[a:b]) for a, b in listed]
    assert c.low.tolist() == [int(structure.low[a]) for a, _ in listed] and c.high.tolist() == [b for _, b in listed]


def test_reads_of_runs_are_the_union_of_their_intervals() -> None:
    made = Swapper(window(12, 3, [1.0] * 12), torch.tensor([0] * 6 + [1] * 6), 2, max_work=1e9)
    cases = {(): 0, ((0, 1),): 1, ((0, 2),): 2, ((4, 5),): 4, ((4, 6), (6, 7)): 6, ((1, 2), (8, 9)): 6, ((2, 3), (4, 5), (6, 7)): 7}
    assert {runs: made._reads(list(runs)) for runs in cases} == cases


def test_only_some_swaps_are_evaluated_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with the least bounds, in order, until the bound is no less than the best exact change."""
    assert swaps.TRIED == 64
    structure, owner = causal([9, 4, 11], [1.0] * 24), ([0] * 3 + [1] * 2 + [2] * 4) * 2 + [0] * 3 + [1] * 2 + [2]
    for tried in (1, 2, 5, 64):
        monkeypatch.setattr(swaps, "TRIED", tried)
        swapper = Swapper(structure, torch.tensor(owner), 3, max_work=1e9)
        evaluated: list[tuple[int, int]] = []
        monkeypatch.setattr(swapper, "_reads_change", lambda x, y, seen=evaluated: seen.append((x, y)) or 0)
        assert not swapper._swap(0) and swapper.owner.tolist() == owner  # none improves
        assert len(set(evaluated)) == len(evaluated)
        assert len(evaluated) == tried or tried == 64
        assert all(swapper.chunks.rank[x] == 0 != swapper.chunks.rank[y] for x, y in evaluated)


def turns(load: list[float], swapped: list[bool], rounds: int, *, price: float = 1.0, max_price: float = 1e9) -> tuple[Any, list[int]]:
    """A swapper of a limit of 10 pairs after `improve`, and the ranks that tried to swap. `swapped`: which of them did, then none does."""
    made: Any = object.__new__(Swapper)
    made.ranks, made.load, made.max_work, made.price, made.max_price = len(load), torch.tensor(load), 10.0, price, max_price
    made.owner, tried, made.surveyed = torch.tensor([0]), [], 0

    def swap(rank: int) -> bool:
        tried.append(rank)
        return len(tried) <= len(swapped) and swapped[len(tried) - 1]

    def survey() -> None:
        made.surveyed += 1

    made._swap, made._survey = swap, survey
    assert made.improve(rounds) is made.owner
    assert made.surveyed == sum(swapped[: len(tried)])
    return made, tried


@pytest.mark.parametrize(("load", "swapped", "rounds", "tried"), [
    ([10, 9, 8], [], 9, [0, 1, 2]),  # at the limit is not overloaded; after one turn without a swap nothing is left
    ([10, 9, 8], [False, True], 9, [0, 1, 2, 0, 1]),
    ([10, 9, 8], [True] * 9, 5, [0, 1, 2, 0, 1]),
    ([10, 9, 8], [True] * 9, 1, [0]),
    ([10, 9, 8], [True] * 9, 0, []),
    ([9, 12, 11], [True] * 99, 2, [1] * 8),  # the busiest first, four times as many
    ([9, 12, 11], [False, True, False, False, True], 3, [1, 2, 1, 2, 1, 1, 2, 1, 2]),
])  # fmt: skip
def test_overloaded_ranks_swap_first_and_then_all_in_turn(load: list[float], swapped: list[bool], rounds: int, tried: list[int]) -> None:
    assert turns(load, swapped, rounds)[1] == tried


@pytest.mark.parametrize(("price", "max_price", "last", "tried"), [
    (1.0, 20.0, 64.0, 8), (1.0, 16.0, 64.0, 8), (1.0, 15.9, 16.0, 6), (1.0, 1.0, 4.0, 4), (1.0, 0.5, 1.0, 2)
])  # fmt: skip
def test_the_price_of_excess_work_rises_fourfold_while_no_swap_is_worth_its_reads(
    price: float, max_price: float, last: float, tried: int
) -> None:
    made, ranks = turns([12, 9, 11], [], 9, price=price, max_price=max_price)
    assert made.price == last and ranks == [0, 2] * (tried // 2)
