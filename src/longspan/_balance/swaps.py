"""Swaps: two ranks exchange equal numbers of units, as long as overloaded ranks get lighter or reads decrease.

Legend: N ranks, T units. A *run* is a contiguous range of units of one owner inside one group; there are R, in order of position. A *chunk*
is a whole run, its head or its tail; there are C, in order of size, X of them of the rank in question.

Reads are counted on the structure's intervals. The reads of a rank are the union of its runs' intervals. Because intervals are monotone,
their number is a sum over runs in order, of the units that each adds to the runs before it. Adding or removing a chunk changes few terms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan._balance.lead_fill import Structure

SIZES = torch.tensor([1, 2, 4, 8, 16, 32, 64])  # units of heads and tails
FAR = 1 << 40
EPSILON = 1e-9  # a smaller change counts as none
TRIED = 64  # swaps of one rank that are evaluated exactly


def at(values: Tensor, index: Tensor) -> Tensor:
    """values[index] for one dim. Many times faster than indexing."""
    return values.index_select(0, index)


def _adds(before: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Units that the interval low … high − 1 adds to intervals that end at `before`."""
    return (high - torch.maximum(low, before)).clamp(min=0)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Chunks:
    """All chunks, one entry each [C].

    Attributes:
        run, rank: The chunk's run and its owner.
        begin, end, size: Its units begin … end − 1, and their number.
        work: Its pairs.
        low, high: Its interval of reads.
        removed: Change of the owner's reads if the chunk is removed.
    """

    run: Tensor
    rank: Tensor
    begin: Tensor
    end: Tensor
    size: Tensor
    work: Tensor
    low: Tensor
    high: Tensor
    removed: Tensor


class Swapper:
    """Improves an owner per unit [T] of `ranks` ranks. A rank may have `max_work` pairs; the unit `pinned`, if any, keeps its owner."""

    def __init__(self, structure: Structure, owner: Tensor, ranks: int, *, max_work: float, pinned: int | None = None) -> None:
        self.owner, self.ranks, self.max_work = owner.clone(), ranks, max_work
        self.low, self.high, self.sums = structure.low, structure.high, torch.tensor(structure.sums, dtype=torch.float64)
        self.work = torch.tensor(structure.work, dtype=torch.float64)
        self.load = torch.zeros(ranks, dtype=torch.float64).index_add_(0, owner, self.work)
        self.cut = torch.zeros(len(owner), dtype=torch.bool)
        self.cut[torch.tensor([a for a, _ in structure.groups])] = True
        self.pinned = -1 if pinned is None else pinned
        longest = max(len(owner) // ranks, max(b - a for a, b in structure.groups))
        mean = max(1.0, structure.sums[-1] / ranks)
        self.price = 32 * longest / mean  # reads per pair of excess work
        self.max_price = 1e4 * len(owner) / mean
        self.lows, self.highs = structure.low.tolist(), structure.high.tolist()
        self._survey()

    def improve(self, rounds: int) -> Tensor:
        """Make the best swap of up to `rounds` ranks: overloaded ranks first, the busiest of them first, then all in turn.

        While ranks are overloaded, up to four times as many. If no swap is worth its reads, the price of excess work rises.
        """
        turn, idle, stuck = 0, 0, set[int]()
        for done in range(4 * rounds):
            load = self.load.tolist()
            overloaded = [rank for rank in range(self.ranks) if load[rank] > self.max_work]
            free = [rank for rank in overloaded if rank not in stuck]
            if overloaded and not free:
                if self.price > self.max_price:
                    break
                self.price *= 4
                stuck.clear()
                continue
            if not overloaded and (done >= rounds or idle >= self.ranks):
                break
            if overloaded:
                rank = max(free, key=load.__getitem__)
            else:
                rank, turn = turn, (turn + 1) % self.ranks
            if self._swap(rank):
                stuck.clear()
                idle = 0
                self._survey()
            else:
                stuck.add(rank)
                idle += 1
        return self.owner

    def _survey(self) -> None:
        """Find the runs and chunks of the current owner."""
        starts = self.cut.clone()
        starts[1:] |= self.owner.diff() != 0
        begin = starts.nonzero()[:, 0]
        runs = len(begin)
        end = torch.cat([begin[1:], begin.new_tensor([len(self.owner)])])
        rank = self.owner[begin]
        self.runs_of: list[list[tuple[int, int]]] = [[] for _ in range(self.ranks)]
        for owner, a, b in zip(rank.tolist(), begin.tolist(), end.tolist()):
            self.runs_of[owner].append((a, b))
        # Run i is at i + 1. Index 0 stands for "no run before", R + 1 for "no run after".
        self.run_low = torch.cat([begin.new_zeros(1), self.low[begin], begin.new_full((1,), FAR)])
        self.run_high = torch.cat([begin.new_zeros(1), self.high[end - 1], begin.new_full((1,), FAR)])
        place = torch.arange(1, runs + 1)
        seen = torch.zeros(self.ranks, runs + 2, dtype=torch.int64)
        seen[rank, place] = place
        self.previous = seen.cummax(1).values.roll(1, 1)  # [N, R + 2]: the rank's last run before each
        seen = torch.full((self.ranks, runs + 2), runs + 1)
        seen[rank, place] = place
        self.following = seen.flip(1).cummin(1).values.flip(1).roll(-1, 1)

        length = end - begin
        of, size = (length[:, None] > SIZES).nonzero(as_tuple=True)
        size = at(SIZES, size)
        run = torch.cat([torch.arange(runs), of, of])
        first = torch.cat([begin, at(begin, of), at(end, of) - size])
        last = torch.cat([end, at(begin, of) + size, at(end, of)])
        movable = ((first > self.pinned) | (last <= self.pinned)).nonzero()[:, 0]
        order = at(movable, at(last - first, movable).argsort(stable=True))
        run, first, last = at(run, order), at(first, order), at(last, order)
        head, tail = last < at(end, run), first > at(begin, run)
        where, owner = run + 1, at(rank, run)
        line = owner * (runs + 2) + where
        before, then = at(self.run_high, at(self.previous.view(-1), line)), at(self.following.view(-1), line)
        next_low, next_high = at(self.run_low, then), at(self.run_high, then)
        run_low, run_high = at(self.run_low, where), at(self.run_high, where)
        rest_low = torch.where(head, at(self.low, last.clamp(max=len(self.owner) - 1)), torch.where(tail, run_low, FAR))
        rest_high = torch.where(head, run_high, torch.where(tail, at(self.high, (first - 1).clamp(min=0)), before))
        now = _adds(before, run_low, run_high) + _adds(run_high, next_low, next_high)
        rest = torch.maximum(rest_high, before)
        self.chunks = _Chunks(
            run=where,
            rank=owner,
            begin=first,
            end=last,
            size=last - first,
            work=at(self.sums, last) - at(self.sums, first),
            low=at(self.low, first),
            high=at(self.high, last - 1),
            removed=_adds(before, rest_low, rest_high) + _adds(rest, next_low, next_high) - now,
        )

    def _swap(self, rank: int) -> bool:
        """Make the best swap of one rank with any other, if there is one that improves; whether there was."""
        c = self.chunks
        mine = (c.rank == rank).nonzero()[:, 0]
        if not len(mine):
            return False
        before, after = at(self.previous[rank], c.run), at(self.following[rank], c.run)
        added_here = self._added(c.low, c.high, before, after)
        runs = at(c.run, mine)
        previous, following = self.previous.index_select(1, runs), self.following.index_select(1, runs)  # [N, X]
        added_there = self._added(at(c.low, mine), at(c.high, mine), previous, following)
        out, back = at(c.removed, mine) + added_there, c.removed + added_here  # [N, X], [C]: change of reads by moving there, and here

        # The change of reads by both moves together is never less than the sum of both. The least sums therefore bound which chunks of
        # other ranks can improve.
        sizes, group = at(c.size, mine).unique_consecutive(return_inverse=True)
        least = out.new_full((self.ranks, len(sizes)), FAR).scatter_reduce_(1, group.expand(self.ranks, -1), out, "amin")
        same_size = torch.searchsorted(sizes, c.size).clamp(max=len(sizes) - 1)
        excess = (self.load - self.max_work).clamp(min=0)
        relief = (excess + excess[rank]) * self.price
        bound = (back + at(least.view(-1), c.rank * len(sizes) + same_size)) - at(relief, c.rank)
        y = ((bound < 0) & (at(sizes, same_size) == c.size) & (c.rank != rank)).nonzero()[:, 0]
        same_size = at(same_size, y)
        begin = torch.searchsorted(group, same_size)
        count = torch.searchsorted(group, same_size, right=True) - begin
        pair = torch.repeat_interleave(torch.arange(len(y)), count)
        x = torch.arange(len(pair)) + at(begin - count.cumsum(0) + count, pair)
        y = at(y, pair)

        other = at(c.rank, y)
        reads = at(out.view(-1), other * len(mine) + x) + at(back, y)
        x = at(mine, x)
        change = reads - self.price * self._relieved(rank, other, at(c.work, x) - at(c.work, y))
        if not len(change):
            return False
        worst = float(change.kthvalue(min(TRIED, len(change))).values)
        good = (change <= min(worst, -EPSILON)).nonzero()[:, 0]
        good = at(good, at(change, good).argsort(stable=True)[:TRIED])
        best, best_swap = -EPSILON, None
        for least_, reads_, x_, y_ in zip(*(at(t, good).tolist() for t in (change, reads, x, y))):
            if least_ >= best:
                break
            exact = least_ - reads_ + self._reads_change(x_, y_)
            if exact < best:
                best, best_swap = exact, (x_, y_)
        if best_swap is None:
            return False
        self._exchange(*best_swap)
        return True

    def _reads_change(self, x: int, y: int) -> int:
        """Change of the reads of two ranks if they exchange chunks x and y."""
        c = self.chunks
        total = 0
        for leaving, arriving in ((x, y), (y, x)):
            runs = self.runs_of[int(c.rank[leaving])]
            begin, end = int(c.begin[leaving]), int(c.end[leaving])
            changed = [(a, begin) if a < begin < b else (end, b) if a < end < b else (a, b) for a, b in runs if (a, b) != (begin, end)]
            changed.append((int(c.begin[arriving]), int(c.end[arriving])))
            total += self._reads(sorted(changed)) - self._reads(runs)
        return total

    def _reads(self, runs: list[tuple[int, int]]) -> int:
        total, reach = 0, 0
        for begin, end in runs:
            high = self.highs[end - 1]
            if high > reach:
                total += high - max(self.lows[begin], reach)
                reach = high
        return total

    def _relieved(self, rank: int, other: Tensor, shift: Tensor) -> Tensor:
        """Decrease of two ranks' excess work if `shift` pairs move from `rank` to the other; −inf for swaps that raise it."""
        here, there = self.load[rank] - self.max_work, at(self.load - self.max_work, other)
        fall = there.clamp(min=0) - (there + shift).clamp(min=0) + (here.clamp(min=0) - (here - shift).clamp(min=0))
        return torch.where(fall < 0, -torch.inf, fall)

    def _exchange(self, x: int, y: int) -> None:
        c = self.chunks
        rank, other = int(c.rank[x]), int(c.rank[y])
        self.owner[int(c.begin[x]) : int(c.end[x])] = other
        self.owner[int(c.begin[y]) : int(c.end[y])] = rank
        self.load[rank] -= c.work[x] - c.work[y]
        self.load[other] += c.work[x] - c.work[y]

    def _added(self, low: Tensor, high: Tensor, previous: Tensor, following: Tensor) -> Tensor:
        """Change of a rank's reads if a chunk is added between two of its runs."""
        shape, following = previous.shape, following.reshape(-1)
        before = at(self.run_high, previous.reshape(-1)).view(shape)
        next_low, next_high = at(self.run_low, following).view(shape), at(self.run_high, following).view(shape)
        return _adds(before, low, high) + _adds(high, next_low, next_high) - _adds(before, next_low, next_high)
