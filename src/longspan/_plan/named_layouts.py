"""Layouts by name: contiguous, head-tail, round-robin by work, per document. Pure functions of sizes and counts.

Lengths and numbers of ranks are 1 or more. Ranks own whole *units* of tokens. Their numbers of units differ by at most one; a rank may own
none. Only the last unit may be shorter than the others; it belongs to a rank with one unit more.
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

MIN_CELL = 16  # tokens: documents are not cut into smaller pieces, unless the whole sequence is short
MAX_TOKEN_SHARE = 1.05  # a rank owns at most this many times its share of tokens


class UnitWork(Protocol):
    """A sequence of `length` tokens in units, and the work of each unit [T], float64."""

    @property
    def length(self) -> int: ...

    @property
    def unit(self) -> int: ...

    @property
    def work(self) -> Tensor: ...


def unit_for(length: int, ranks: int) -> int:
    """Tokens per unit: BLOCK_SIZE, or less for short sequences.

    The largest power of two with four units or more for every rank, and at most 1.05 times its share of tokens for any rank.
    """
    _check(length, ranks)
    unit = BLOCK_SIZE
    while unit > 1:
        largest_shard = units_per_rank(-(-length // unit), ranks)[-1] * unit
        if length >= 4 * ranks * unit and largest_shard * ranks <= MAX_TOKEN_SHARE * length:
            break
        unit //= 2
    return unit


def _check(length: int, ranks: int) -> None:
    if length < 1 or ranks < 1:
        raise ValueError(f"layout: expected a length and a number of ranks of 1 or more, got length {length}, ranks {ranks}")


def units_per_rank(units: int, ranks: int) -> list[int]:
    """Number of units of each rank: equal, or one more at the last ranks."""
    return [(units + rank) // ranks for rank in range(ranks)]


# ---------------------------------------------------------------------------------------------------------- owners of units [T]


def contiguous_owner(units: int, ranks: int) -> Tensor:
    """Rank i owns the i-th contiguous range of units."""
    return torch.repeat_interleave(torch.arange(ranks), torch.tensor(units_per_rank(units, ranks)))


def head_tail_owner(units: int, ranks: int) -> Tensor:
    """Of 2N chunks, rank i owns chunks i and 2N − 1 − i. Rank 0 owns the last unit, so the first ranks have one unit more."""
    count = torch.tensor(units_per_rank(units, ranks)[::-1])
    rank, head = torch.arange(ranks), count // 2
    return torch.cat([rank.repeat_interleave(head), rank.flip(0).repeat_interleave((count - head).flip(0))])


def round_robin_owner(work: Tensor, ranks: int, *, short_last: bool) -> Tensor:
    """Units by decreasing work, dealt to ranks in a snake order.

    A short last unit is then swapped with a unit of the last rank that has similar work.
    """
    units = len(work)
    order = torch.argsort(work, descending=True, stable=True)
    deal = torch.arange(units)
    index, turn = deal % ranks, deal // ranks
    # An incomplete last turn starts at the last rank, which owns one unit more.
    reversed_turn = (turn + units // ranks) % 2 == 0
    owner = torch.empty_like(order)
    owner[order] = torch.where(reversed_turn, ranks - 1 - index, index)
    if short_last and int(owner[-1]) != ranks - 1:
        last_rank_units = (owner == ranks - 1).nonzero()[:, 0]
        similar = last_rank_units[(work[last_rank_units] - work[-1]).abs().argmin()]
        owner[similar], owner[-1] = int(owner[-1]), ranks - 1
    return owner


def from_owner(owner: Tensor, *, length: int, unit: int, ranks: int) -> Layout:
    """The layout in which unit t, tokens t · unit … (t + 1) · unit − 1, belongs to rank owner[t]. A rank's units are in ascending order."""
    units = -(-length // unit)
    if owner.shape != (units,) or int(owner.min()) < 0 or int(owner.max()) >= ranks:
        raise ValueError(
            f"layout: expected {units} owners in 0 … {ranks - 1} for {length} tokens in units of {unit}, got {tuple(owner.shape)}"
        )
    changes = (owner.diff() != 0).nonzero()[:, 0] + 1
    starts = [0, *changes.tolist()]
    edges = [start * unit for start in starts] + [length]
    segments: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for i, rank in enumerate(owner[starts].tolist()):
        segments[rank].append((edges[i], edges[i + 1] - edges[i]))
    return Layout(length=length, rows=(tuple(map(tuple, segments)),))


# ----------------------------------------------------------------------------------------------------------------- the layouts


def contiguous(length: int, ranks: int, *, unit: int | None = None) -> Layout:
    """Rank i owns the i-th contiguous range of tokens. `unit`: by default `unit_for(length, ranks)`."""
    unit = unit or unit_for(length, ranks)
    _check(length, ranks)
    return from_owner(contiguous_owner(-(-length // unit), ranks), length=length, unit=unit, ranks=ranks)


def head_tail(length: int, ranks: int, *, unit: int | None = None) -> Layout:
    """Of 2N chunks, rank i owns chunks i and 2N − 1 − i, in this order: equal work under a causal mask."""
    unit = unit or unit_for(length, ranks)
    _check(length, ranks)
    return from_owner(head_tail_owner(-(-length // unit), ranks), length=length, unit=unit, ranks=ranks)


def round_robin(demand: UnitWork, ranks: int) -> Layout:
    """Units sorted by work, dealt to ranks in a snake order: nearly equal work under any mask, at the price of most traffic."""
    _check(demand.length, ranks)
    owner = round_robin_owner(demand.work, ranks, short_last=demand.length % demand.unit != 0)
    return from_owner(owner, length=demand.length, unit=demand.unit, ranks=ranks)


def per_document(lengths: Sequence[int], ranks: int) -> Layout:
    """Each document cut head-tail over all ranks.

    Chunks begin at multiples of BLOCK_SIZE, or of a smaller power of two where a document is too short for 2N blocks. The remainder of a
    document, its ragged ends and its middle, goes in pieces to the ranks with the fewest tokens so far. In the end all ranks own equally
    many tokens; the first ones own one more where the length does not divide.

    Args:
        lengths: Lengths of the documents in order; padding counts as a document, zeros are skipped.
        ranks: Number of ranks.
    """
    if any(n < 0 for n in lengths):
        raise ValueError(f"per_document: lengths must be 0 or more, got {min(lengths)}")
    length = sum(lengths)
    _check(length, ranks)
    finest = min(MIN_CELL, unit_for(length, ranks))
    segments: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    shared, end = 0, 0  # tokens that each rank has so far
    remainders: list[tuple[int, int, int]] = []  # (start, end, start of the document)
    for n in lengths:
        start, end = end, end + n
        cell = BLOCK_SIZE
        while cell > finest and n < 2 * ranks * cell:
            cell //= 2
        first, last = -(-start // cell) * cell, end // cell * cell
        if first >= last:
            remainders.append((start, end, start))
            continue
        chunk = (last - first) // (2 * ranks * cell) * cell
        for rank in range(ranks if chunk else 0):
            segments[rank] += [(first + rank * chunk, chunk), (last - (rank + 1) * chunk, chunk)]
        shared += 2 * chunk
        middle = range(first + ranks * chunk, last - ranks * chunk, cell)
        remainders += [(start, first, start), *((at, at + cell, start) for at in middle), (last, end, start)]
    _deal(remainders, segments, [length // ranks + (rank < length % ranks) - shared for rank in range(ranks)])
    return Layout(length=length, rows=(tuple(map(_merged, segments)),))


def _deal(pieces: list[tuple[int, int, int]], segments: list[list[tuple[int, int]]], missing: list[int]) -> None:
    """Append each piece to the rank that misses most tokens, on ties the one with the least causal work.

    Pieces are cut where a rank is full.
    """
    queue = [(-n, 0, rank) for rank, n in enumerate(missing)]
    heapq.heapify(queue)
    for start, end, document in pieces:
        while start < end:
            miss, work, rank = queue[0]
            take = min(end - start, -miss)
            segments[rank].append((start, take))
            heapq.heapreplace(queue, (miss + take, work + take * (2 * (start - document) + take), rank))
            start += take


def _merged(segments: list[tuple[int, int]]) -> Segments:
    """Segments in ascending order, adjacent ones merged."""
    out: list[tuple[int, int]] = []
    for start, length in sorted(segments):
        if out and sum(out[-1]) == start:
            out[-1] = (out[-1][0], out[-1][1] + length)
        else:
            out.append((start, length))
    return tuple(out)


def documents_of(mask: Mask) -> list[list[int]] | None:
    """Lengths of the documents in order, one list per batch row (one list where rows do not differ); None where the mask has no documents.

    Looks into masks combined with `&`. A document is a contiguous range of tokens with one id; a range of padding counts as one.
    """
    documents = list(_documents_in(mask))
    if not documents:
        return None
    batch_rows = max(d.ids.shape[0] if d.ids.ndim == 2 else 1 for d in documents)
    change = torch.zeros(batch_rows, documents[0].ids.shape[-1], dtype=torch.bool)
    for d in documents:
        for values in (d.ids, d.valid):
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
    """One layout with a batch row for each of these one-row layouts.

    A rank must own equally many tokens of each row. Layouts of one name, length and number of ranks always fit: the numbers of tokens
    depend on the sizes alone.
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
    """The layout over single ranks: the tokens of rank i cut into equal contiguous parts for the members of group i."""
    rows = []
    for ranks in layout.rows:
        parts: list[Any] = [()] * sum(map(len, groups))
        for members, segments in zip(groups, ranks, strict=True):
            for member, piece in zip(members, _cut(segments, len(members)), strict=True):
                parts[member] = piece
        rows.append(tuple(parts))
    return Layout(length=layout.length, rows=tuple(rows))


def _cut(segments: Any, parts: int) -> list[Any]:
    """Segments cut, in order, into `parts` lists whose tokens differ by at most a unit."""
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
