"""Layouts by name: contiguous, head-tail, round-robin by work, per document. Pure functions of sizes and counts.

Any length and any number of ranks of 1 or more. Ranks own whole *units* of tokens, as many as each other or one more, so that their token
counts differ by at most a unit; a rank may own nothing. The one unit that may be shorter, the last, belongs to a rank with one more.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from longspan._masks.algebra import And, Documents, Mask
from longspan._masks.block_table import BLOCK_SIZE
from longspan._plan.layout import Layout, Segments

FINEST = 16  # tokens: short documents are not cut into smaller pieces, unless the whole sequence is short
MOST = 1.05  # times its share of tokens that a rank may own


class UnitWork(Protocol):
    """A sequence of `length` tokens in units, and the work of each unit [T], float64."""

    @property
    def length(self) -> int: ...

    @property
    def unit(self) -> int: ...

    @property
    def work(self) -> Tensor: ...


def unit_for(length: int, ranks: int) -> int:
    """Tokens per unit: 128, or for short sequences the largest power of two that leaves every rank four units, and no rank 1.05 times its
    share of tokens, at least 1."""
    _check(length, ranks)
    unit = BLOCK_SIZE
    while unit > 1 and (length < 4 * ranks * unit or units_per_rank(-(-length // unit), ranks)[-1] * unit * ranks > MOST * length):
        unit //= 2
    return unit


def _check(length: int, ranks: int) -> None:
    if length < 1 or ranks < 1:
        raise ValueError(f"layout: expected a length and a number of ranks of 1 or more, got length {length}, ranks {ranks}")


def units_per_rank(units: int, ranks: int) -> list[int]:
    """How many units each rank owns: as many as each other, or one more at the last ranks."""
    return [(units + rank) // ranks for rank in range(ranks)]


# ---------------------------------------------------------------------------------------------------------- owners of units [T]


def contiguous_owner(units: int, ranks: int) -> Tensor:
    return torch.repeat_interleave(torch.arange(ranks), torch.tensor(units_per_rank(units, ranks)))


def head_tail_owner(units: int, ranks: int) -> Tensor:
    """2N chunks; rank i owns chunk i and chunk 2N − 1 − i. Rank 0 owns the last unit, so that the first ranks are those with one more."""
    count = torch.tensor(units_per_rank(units, ranks)[::-1])
    rank, head = torch.arange(ranks), count // 2
    return torch.cat([rank.repeat_interleave(head), rank.flip(0).repeat_interleave((count - head).flip(0))])


def round_robin_owner(work: Tensor, ranks: int, *, short_last: bool) -> Tensor:
    """Units by falling work, dealt forth and back. A short last unit is then exchanged for one of the last rank's, near in work."""
    units = len(work)
    order = torch.argsort(work, descending=True, stable=True)
    deal = torch.arange(units)
    forth, turn = deal % ranks, deal // ranks
    # A last turn in which not all ranks get a unit begins at the last rank: that is where one more is owned.
    backwards = (turn + units // ranks) % 2 == 0
    owner = torch.empty_like(order)
    owner[order] = torch.where(backwards, ranks - 1 - forth, forth)
    if short_last and int(owner[-1]) != ranks - 1:
        theirs = (owner == ranks - 1).nonzero()[:, 0]
        near = theirs[(work[theirs] - work[-1]).abs().argmin()]
        owner[near], owner[-1] = int(owner[-1]), ranks - 1
    return owner


def from_owner(owner: Tensor, *, length: int, unit: int, ranks: int) -> Layout:
    """The layout in which unit t, tokens t · unit … (t + 1) · unit − 1, belongs to rank owner[t]; a rank's units in ascending order."""
    units = -(-length // unit)
    if owner.shape != (units,) or int(owner.min()) < 0 or int(owner.max()) >= ranks:
        raise ValueError(
            f"layout: expected {units} owners in 0 … {ranks - 1} for {length} tokens in units of {unit}, got {tuple(owner.shape)}"
        )
    changes = (owner.diff() != 0).nonzero()[:, 0] + 1
    starts = [0, *changes.tolist()]
    edges = [start * unit for start in starts] + [length]
    held: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for i, rank in enumerate(owner[starts].tolist()):
        held[rank].append((edges[i], edges[i + 1] - edges[i]))
    return Layout(length=length, rows=(tuple(map(tuple, held)),))


# ----------------------------------------------------------------------------------------------------------------- the layouts


def contiguous(length: int, ranks: int, *, unit: int | None = None) -> Layout:
    """Rank i owns the i-th stretch of tokens. `unit`: that of `unit_for`, unless given."""
    unit = unit or unit_for(length, ranks)
    _check(length, ranks)
    return from_owner(contiguous_owner(-(-length // unit), ranks), length=length, unit=unit, ranks=ranks)


def head_tail(length: int, ranks: int, *, unit: int | None = None) -> Layout:
    """Of 2N chunks rank i owns chunk i and chunk 2N − 1 − i, in that order: equal work under a causal mask."""
    unit = unit or unit_for(length, ranks)
    _check(length, ranks)
    return from_owner(head_tail_owner(-(-length // unit), ranks), length=length, unit=unit, ranks=ranks)


def round_robin(demand: UnitWork, ranks: int) -> Layout:
    """Units sorted by work, dealt to ranks forth and back: nearly equal work under any mask, and the most traffic."""
    _check(demand.length, ranks)
    owner = round_robin_owner(demand.work, ranks, short_last=demand.length % demand.unit != 0)
    return from_owner(owner, length=demand.length, unit=demand.unit, ranks=ranks)


def per_document(lengths: Sequence[int], ranks: int) -> Layout:
    """Each document cut head-tail over all ranks. `lengths`: the documents' (padding is one too) in order; zeros are skipped.

    Chunks begin at multiples of the unit, or of a smaller power of two where a document is too short for 2N units. What remains of
    a document, its ragged ends and its middle, goes in pieces to the ranks with the fewest tokens so far. In the end all ranks own
    equally many tokens; the first ones own one more where the length does not divide.
    """
    if any(n < 0 for n in lengths):
        raise ValueError(f"per_document: lengths must be 0 or more, got {min(lengths)}")
    length = sum(lengths)
    _check(length, ranks)
    finest = min(FINEST, unit_for(length, ranks))
    held: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    shared, end = 0, 0
    remains: list[tuple[int, int, int]] = []  # (start, end, start of its document)
    for n in lengths:
        start, end = end, end + n
        cell = BLOCK_SIZE
        while cell > finest and n < 2 * ranks * cell:
            cell //= 2
        first, last = -(-start // cell) * cell, end // cell * cell
        if first >= last:
            remains.append((start, end, start))
            continue
        chunk = (last - first) // (2 * ranks * cell) * cell
        for rank in range(ranks if chunk else 0):
            held[rank] += [(first + rank * chunk, chunk), (last - (rank + 1) * chunk, chunk)]
        shared += 2 * chunk
        middle = range(first + ranks * chunk, last - ranks * chunk, cell)
        remains += [(start, first, start), *((at, at + cell, start) for at in middle), (last, end, start)]
    _deal(remains, held, [length // ranks + (rank < length % ranks) - shared for rank in range(ranks)])
    return Layout(length=length, rows=(tuple(map(_joined, held)),))


def _deal(pieces: list[tuple[int, int, int]], held: list[list[tuple[int, int]]], missing: list[int]) -> None:
    """Each piece to the rank that misses most tokens, of those the one that got the least causal work, cut where a rank has its share."""
    queue = [(-n, 0, rank) for rank, n in enumerate(missing) if n > 0]
    heapq.heapify(queue)
    for start, end, document in pieces:
        while start < end:
            miss, work, rank = queue[0]
            take = min(end - start, -miss)
            held[rank].append((start, take))
            entry = (miss + take, work + take * (2 * (start - document) + take), rank)
            if entry[0] < 0:
                heapq.heapreplace(queue, entry)
            else:
                heapq.heappop(queue)
            start += take


def _joined(segments: list[tuple[int, int]]) -> Segments:
    """In ascending order, neighbours made one."""
    out: list[tuple[int, int]] = []
    for start, length in sorted(segments):
        if out and sum(out[-1]) == start:
            out[-1] = (out[-1][0], out[-1][1] + length)
        else:
            out.append((start, length))
    return tuple(out)


def documents_of(mask: Mask) -> list[list[int]] | None:
    """The documents' lengths in order, one list per batch row (one list where rows do not differ), or None where the mask has none.

    Looks into masks combined with `&`. A document is a stretch of tokens with one id; a stretch of padding counts as one.
    """
    found = list(_documents_in(mask))
    if not found:
        return None
    rows = max(d.ids.shape[0] if d.ids.ndim == 2 else 1 for d in found)
    change = torch.zeros(rows, found[0].ids.shape[-1], dtype=torch.bool)
    for d in found:
        for values in (d.ids, d.real):
            if values is not None:
                change[:, 1:] |= (values[..., 1:] != values[..., :-1]).cpu()
    edges = [[0, *(row.nonzero()[:, 0].tolist()), len(row)] for row in change]
    return [[b - a for a, b in pairwise(row)] for row in edges]


def _documents_in(mask: Mask) -> Iterator[Documents]:
    if isinstance(mask, Documents):
        yield mask
    elif isinstance(mask, And):
        yield from _documents_in(mask.a)
        yield from _documents_in(mask.b)


def stack(layouts: Sequence[Layout]) -> Layout:
    """One layout with a row for each of these one-row layouts, for as many batch rows.

    A rank must own equally many tokens of each row. Layouts of one kind, length and number of ranks always fit: what a rank owns of
    them is a matter of the sizes alone.
    """
    if not layouts:
        raise ValueError("stack: expected one layout or more, got none")
    for i, layout in enumerate(layouts):
        if len(layout.rows) != 1 or layout.length != layouts[0].length or layout.ranks != layouts[0].ranks:
            raise ValueError(
                f"stack: expected one-row layouts of {layouts[0].length} tokens over {layouts[0].ranks} ranks, got number {i} "
                f"with {len(layout.rows)} rows, {layout.length} tokens, {layout.ranks} ranks"
            )
    return Layout(length=layouts[0].length, rows=tuple(layout.rows[0] for layout in layouts))


def split(layout: Layout, groups: Sequence[Sequence[int]]) -> Layout:
    """Each rank's tokens cut into equal parts for the ranks of a group."""
    rows = []
    for ranks in layout.rows:
        parts: list[Any] = [()] * sum(map(len, groups))
        for members, segments in zip(groups, ranks, strict=True):
            for member, piece in zip(members, _cut(segments, len(members)), strict=True):
                parts[member] = piece
        rows.append(tuple(parts))
    return Layout(length=layout.length, rows=tuple(rows))


def _cut(segments: Any, parts: int) -> list[Any]:
    """Segments in order as `parts` lists of them, equal but for a unit."""
    total = sum(n for _, n in segments)
    unit = unit_for(total, parts) if total else 1
    ends = [min(total, -(-(i + 1) * (-(-total // unit)) // parts) * unit) for i in range(parts)]
    out: list[list[tuple[int, int]]] = [[] for _ in range(parts)]
    done, part = 0, 0
    for start, length in segments:
        while length:
            while ends[part] <= done:
                part += 1
            take = min(length, ends[part] - done)
            out[part].append((start, take))
            start, length, done = start + take, length - take, done + take
    return [tuple(p) for p in out]
