"""Cover of a block table by few rectangles: full ones, causal squares, and strips that need the mask.

For kernels that compute one rectangle per call, such as torch's SDPA operators: few large calls are faster than many small ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from longspan._derived_cache import DerivedCache
from longspan._kernels.protocol import Work
from longspan._kernels.tiling import Tiling
from longspan._masks.block_table import FULL, BlockTable


@dataclass(frozen=True, kw_only=True)
class Rectangle:
    """Queries [q0, q1) and keys [k0, k1) of the call's tensors, for batch row b and head h of the table.

    `causal`: a square with equal query and key positions; it stands for the pairs on and below its diagonal. Tiles above the diagonal that
    the mask allows are covered by other rectangles. `masked`: the mask decides each pair. `full`: every pair.
    """

    b: int
    h: int
    q0: int
    q1: int
    k0: int
    k1: int
    kind: Literal["full", "causal", "masked"]


_Run = tuple[int, int, int]  # first tile, last tile, kind
_Spans = list[tuple[int, int, int]]  # first row, count, first position of each tile of one side

_covers_of: DerivedCache[BlockTable, list[Rectangle]] = DerivedCache(16)  # by tilings and first batch row and head
_TILES_AT_ONCE = 64
_MAX_MASKED_TILES = 64


def rectangles(work: Work) -> list[Rectangle]:
    """Cover the work's tiles, each exactly once, largest rectangles first. Cached per table and tilings; callers must not modify it."""
    key = (work.q_tiles.name, work.kv_tiles.name, work.mask is None, work.first_batch, work.first_head)
    return _covers_of.get(work.table, key, lambda: _cover(work, max_masked_tiles=_MAX_MASKED_TILES))


def _cover(work: Work, *, max_masked_tiles: int) -> list[Rectangle]:
    """A masked rectangle spans at most `max_masked_tiles` tiles (or one row of a run), which bounds the memory for its mask."""
    table = work.table
    out: list[Rectangle] = []
    ptr, first, last, kind = (t.tolist() for t in (table.ptr, table.first, table.last, table.kind))
    q_spans, k_spans = _spans(work.q_tiles), _spans(work.kv_tiles)
    for b in range(table.batch):
        for h in range(table.heads):
            base = (b * table.heads + h) * table.q_tiles
            rows: list[list[_Run]] = [
                list(zip(first[ptr[r] : ptr[r + 1]], last[ptr[r] : ptr[r + 1]], kind[ptr[r] : ptr[r + 1]], strict=True))
                for r in range(base, base + table.q_tiles)
            ]
            mask = None if work.mask is None else _MaskTiles(work, b, h, q_spans, k_spans)
            rows = [_all_full(runs) for runs in rows] if mask is None else _promote_full_tiles(rows, mask)
            squares = () if mask is None else _take_causal_squares(rows, mask)
            for i0, i1, c0, c1, shape in (*squares, *_merge_rows(rows, max_masked_tiles)):
                for q0, q1 in _row_spans(q_spans[i0:i1]):
                    for k0, k1 in _row_spans(k_spans[c0:c1]):
                        out.append(Rectangle(b=b, h=h, q0=q0, q1=q1, k0=k0, k1=k1, kind=shape))
    return sorted(out, key=lambda r: (r.q1 - r.q0) * (r.k1 - r.k0), reverse=True)


def _spans(tiling: Tiling) -> _Spans:
    if tiling.row is None or tiling.pos is None or tiling.count is None:
        return [tiling.span(tile) for tile in range(tiling.tiles)]
    return list(zip(tiling.row.tolist(), tiling.count.tolist(), tiling.pos.tolist(), strict=True))


class _MaskTiles:
    """The mask inside tiles, evaluated on the host, for one batch row and head of the table."""

    def __init__(self, work: Work, b: int, h: int, q_spans: _Spans, k_spans: _Spans) -> None:
        assert work.mask is not None
        self.q_spans, self.k_spans, self._program = q_spans, k_spans, work.mask
        self._captured = [c.cpu() for c in work.mask_captured]
        self._b, self._h = b + work.first_batch, h + work.first_head
        self.blocks = (work.q_tiles.block, work.kv_tiles.block)
        self.ragged = any(n < self.blocks[0] for _, n, _ in q_spans) or any(n < self.blocks[1] for _, n, _ in k_spans)

    def all_true(self, tiles: Sequence[tuple[int, int]], *, causal: bool = False) -> list[bool]:
        """Whether every query of a tile (i, c) sees every key of it; with `causal`, exactly the keys up to its own position."""
        results: list[bool] = []
        m, n = (max((s[1] for s in spans), default=1) for spans in (self.q_spans, self.k_spans))
        for start in range(0, len(tiles), _TILES_AT_ONCE):
            part = tiles[start : start + _TILES_AT_ONCE]
            q_pos, q_count, k_pos, k_count = (
                torch.tensor([spans[t[side]][field] for t in part])
                for side, spans, field in ((0, self.q_spans, 2), (0, self.q_spans, 1), (1, self.k_spans, 2), (1, self.k_spans, 1))
            )
            # Rows past a short tile's end repeat its last one, so that lookups stay inside their tables.
            q = (q_pos[:, None] + torch.arange(m).minimum(q_count[:, None] - 1))[:, :, None]
            kv = (k_pos[:, None] + torch.arange(n).minimum(k_count[:, None] - 1))[:, None, :]
            b, h = torch.full((1, 1, 1), self._b), torch.full((1, 1, 1), self._h)
            seen = self._program(b, h, q, kv, *self._captured)
            matches = seen == (q >= kv) if causal else seen
            results += matches.expand(len(part), m, n).flatten(1).all(1).tolist()
        return results


def _all_full(runs: list[_Run]) -> list[_Run]:
    """Runs of a table without a mask: tiles are partial only at the end of the sequence, so all are full."""
    out: list[_Run] = []
    for first, last, _ in runs:
        if out and out[-1][1] == first - 1:
            first = out.pop()[0]
        out.append((first, last, FULL))
    return out


def _promote_full_tiles(rows: list[list[_Run]], mask: _MaskTiles) -> list[list[_Run]]:
    """The rows with short tiles marked full where the mask allows every pair. Tables mark short tiles as partial whatever the mask."""
    if not mask.ragged:
        return rows
    tiles: list[tuple[int, int]] = []
    for i, runs in enumerate(rows):
        short = mask.q_spans[i][1] < mask.blocks[0]
        for first, last, kind in runs:
            if kind != FULL:
                tiles += [(i, c) for c in range(first, last + 1) if short or mask.k_spans[c][1] < mask.blocks[1]]
    whole: dict[int, set[int]] = {}
    for (i, c), seen in zip(tiles, mask.all_true(tiles), strict=True):
        if seen:
            whole.setdefault(i, set()).add(c)
    return [_promoted(runs, whole[i]) if i in whole else runs for i, runs in enumerate(rows)]


def _promoted(runs: list[_Run], whole: set[int]) -> list[_Run]:
    out: list[_Run] = []
    for first, last, kind in runs:
        for tile in range(first, last + 1) if kind != FULL else (first,):
            now, end = (FULL, tile) if tile in whole else (kind, last if kind == FULL else tile)
            if out and out[-1][1] == tile - 1 and out[-1][2] == now:
                tile = out.pop()[0]
            out.append((tile, end, now))
    return out


_TileRectangle = tuple[int, int, int, int, Literal["full", "causal", "masked"]]  # row tiles [i0, i1), column tiles [c0, c1)


def _take_causal_squares(rows: list[list[_Run]], mask: _MaskTiles) -> Iterator[_TileRectangle]:
    """Maximal squares with a causal diagonal. Removes their tiles from `rows`."""
    diagonal = _causal_tiles(rows, mask)
    start = 0
    while start < len(rows):
        if start not in diagonal:
            start += 1
            continue
        c0, stop = diagonal[start], start + 1
        while diagonal.get(stop) == c0 + stop - start:
            if not (_contiguous(mask, stop, diagonal[stop]) and _covers(rows[stop], c0, diagonal[stop] - 1)):
                break
            stop += 1
        for i in range(start, stop):
            rows[i] = _without(rows[i], c0, c0 + i - start)
        yield start, stop, c0, c0 + stop - start, "causal"
        start = stop


def _causal_tiles(rows: list[list[_Run]], mask: _MaskTiles) -> dict[int, int]:
    """Query tile → the KV tile at the same positions, where each query sees exactly the keys up to its own position."""
    kv_tile = {(pos, count): c for c, (_, count, pos) in enumerate(mask.k_spans)}
    pairs = [(i, kv_tile.get((pos, count), -1)) for i, (_, count, pos) in enumerate(mask.q_spans)]
    pairs = [(i, c) for i, c in pairs if c >= 0 and any(first <= c <= last and kind != FULL for first, last, kind in rows[i])]
    return {i: c for (i, c), causal in zip(pairs, mask.all_true(pairs, causal=True), strict=True) if causal}


def _contiguous(mask: _MaskTiles, i: int, c: int) -> bool:
    """Whether the rows and positions of query tile i and KV tile c continue those of the previous tiles."""
    for spans, tile in ((mask.q_spans, i), (mask.k_spans, c)):
        (row, count, pos), (next_row, _, next_pos) = spans[tile - 1], spans[tile]
        if (row + count, pos + count) != (next_row, next_pos):
            return False
    return True


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


def _merge_rows(rows: list[list[_Run]], max_masked_tiles: int) -> Iterator[_TileRectangle]:
    """Equal runs of consecutive rows as one rectangle."""
    open_: dict[_Run, int] = {}
    for i in range(len(rows) + 1):
        now = set(rows[i]) if i < len(rows) else set()
        for run, start in list(open_.items()):
            width = run[1] - run[0] + 1
            too_big = run[2] != FULL and (i - start + 1) * width > max(width, max_masked_tiles)
            if run not in now or too_big:
                yield start, i, run[0], run[1] + 1, "full" if run[2] == FULL else "masked"
                del open_[run]
        for run in now:
            open_.setdefault(run, i)


def _row_spans(spans: _Spans) -> Iterator[tuple[int, int]]:
    """Maximal contiguous ranges of the tensor rows of consecutive tiles."""
    start, end = spans[0][0], spans[0][0]
    for row, count, _ in spans:
        if row != end:
            yield start, end
            start = row
        end = row + count
    yield start, end
