"""A table's tiles as few rectangles: full ones, causal squares, and strips that need their mask.

For kernels that compute one rectangle per call (torch's SDPA operators): fewer, larger calls run faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from longspan.kernels.protocol import Tiling, Work
from longspan.masks.program import Program
from longspan.masks.table import FULL, BlockTable


@dataclass(frozen=True, kw_only=True)
class Rectangle:
    """Rows [q0, q1) against keys [k0, k1) of the tensors at hand, for one batch row and head of the table (its own b and h).

    `causal`: a square in which query i sees keys up to i. `masked`: the mask decides inside. `full`: no mask.
    """

    b: int
    h: int
    q0: int
    q1: int
    k0: int
    k1: int
    kind: Literal["full", "causal", "masked"]


_Run = tuple[int, int, int]  # first tile, last tile, kind


_kept: WeakKeyDictionary[BlockTable, list[Rectangle]] = WeakKeyDictionary()


def rectangles(work: Work) -> list[Rectangle]:
    """Cover the work's tiles, each exactly once, heaviest rectangles first. Found once per table of a whole sequence."""
    if work.q_tiles.row is not None or work.kv_tiles.row is not None:
        return _cover(work, most_masked_tiles=64)
    if work.table not in _kept:
        _kept[work.table] = _cover(work, most_masked_tiles=64)
    return _kept[work.table]


def _cover(work: Work, *, most_masked_tiles: int) -> list[Rectangle]:
    """A masked rectangle spans at most `most_masked_tiles` tiles (or one row of a run), which bounds the memory for its mask."""
    table = work.table
    out: list[Rectangle] = []
    ptr, first, last, kind = (t.tolist() for t in (table.ptr, table.first, table.last, table.kind))
    for b in range(table.batch):
        for h in range(table.heads):
            base = (b * table.heads + h) * table.q_tiles
            rows: list[list[_Run]] = [
                list(zip(first[ptr[r] : ptr[r + 1]], last[ptr[r] : ptr[r + 1]], kind[ptr[r] : ptr[r + 1]], strict=True))
                for r in range(base, base + table.q_tiles)
            ]
            if work.mask is None:
                rows = [_all_full(runs) for runs in rows]
            for i0, i1, c0, c1, shape in (*_take_causal_squares(rows, work, b, h), *_merge_rows(rows, most_masked_tiles)):
                for q0, q1 in _row_spans(work.q_tiles, i0, i1):
                    for k0, k1 in _row_spans(work.kv_tiles, c0, c1):
                        out.append(Rectangle(b=b, h=h, q0=q0, q1=q1, k0=k0, k1=k1, kind=shape))
    return sorted(out, key=lambda r: (r.q1 - r.q0) * (r.k1 - r.k0), reverse=True)


def _all_full(runs: list[_Run]) -> list[_Run]:
    """Without a mask, tiles are partial only where the sequence ends inside them: join them to their neighbours."""
    out: list[_Run] = []
    for first, last, _ in runs:
        if out and out[-1][1] == first - 1:
            first = out.pop()[0]
        out.append((first, last, FULL))
    return out


_Found = tuple[int, int, int, int, Literal["full", "causal", "masked"]]  # row tiles [i0, i1), column tiles [c0, c1)


def _take_causal_squares(rows: list[list[_Run]], work: Work, b: int, h: int) -> Iterator[_Found]:
    """Find maximal squares on the diagonal and take their tiles out of `rows`."""
    block_q, block_k = work.table.block
    if work.q_tiles.row is not None or work.kv_tiles.row is not None or block_q != block_k or work.mask is None:
        return
    diagonal = _causal_tiles(work.table, work.mask, list(work.mask_captured), b, h, [i for i, r in enumerate(rows) if _partial_at(r, i)])
    start = 0
    while start < len(rows):
        stop = start
        while stop < len(rows) and stop in diagonal and _covers(rows[stop], start, stop - 1):
            stop += 1
        if stop == start:
            start += 1
            continue
        for i in range(start, stop):
            rows[i] = _without(rows[i], start, i)
        yield start, stop, start, stop, "causal"
        start = stop


def _partial_at(runs: list[_Run], tile: int) -> bool:
    return any(first <= tile <= last and kind != FULL for first, last, kind in runs)


def _covers(runs: list[_Run], first: int, last: int) -> bool:
    return first > last or any(f <= first and last <= e and kind == FULL for f, e, kind in runs)


def _without(runs: list[_Run], first: int, last: int) -> list[_Run]:
    out: list[_Run] = []
    for f, e, kind in runs:
        if f < first:
            out.append((f, min(e, first - 1), kind))
        if e > last:
            out.append((max(f, last + 1), e, kind))
    return out


def _causal_tiles(table: BlockTable, mask: Program, captured: list[Tensor], b: int, h: int, tiles: list[int]) -> set[int]:
    """Those diagonal tiles in which query i sees exactly the keys up to i."""
    block = table.block[0]
    captured = [c.cpu() for c in captured]
    found: set[int] = set()
    for tile in tiles:
        rows = torch.arange(tile * block, min((tile + 1) * block, table.q_len))
        cols = torch.arange(tile * block, min((tile + 1) * block, table.kv_len))
        if len(rows) != len(cols):
            continue
        seen = mask(torch.full((1, 1), b), torch.full((1, 1), h), rows[:, None], cols[None, :], *captured)
        if torch.equal(seen.expand(len(rows), len(cols)), rows[:, None] >= cols[None, :]):
            found.add(tile)
    return found


def _merge_rows(rows: list[list[_Run]], most_masked_tiles: int) -> Iterator[_Found]:
    """Runs that stand in the same columns of consecutive rows become one rectangle."""
    open_: dict[_Run, int] = {}
    for i in range(len(rows) + 1):
        now = set(rows[i]) if i < len(rows) else set()
        for run, start in list(open_.items()):
            width = run[1] - run[0] + 1
            too_big = run[2] != FULL and (i - start + 1) * width > max(width, most_masked_tiles)
            if run not in now or too_big:
                yield start, i, run[0], run[1] + 1, "full" if run[2] == FULL else "masked"
                del open_[run]
        for run in now:
            open_.setdefault(run, i)


def _row_spans(tiling: Tiling, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The rows of tiles [start, stop), as few contiguous spans; positions are contiguous within a span too."""
    row, count, pos = tiling.span(start)
    end, next_pos = row + count, pos + count
    if tiling.row is None:
        yield row, min(stop * tiling.block, tiling.length)
        return
    for tile in range(start + 1, stop):
        r, n, p = tiling.span(tile)
        if r != end or p != next_pos:
            yield row, end
            row, end, next_pos = r, r, p
        end, next_pos = end + n, next_pos + n
    yield row, end
