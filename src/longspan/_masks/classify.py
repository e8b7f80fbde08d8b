"""From a mask program to its block table: coarse squares of tiles first, refined only where the answer is unknown.

Legend: a *tile* is block[0] queries × block[1] keys; a *square* of side s is s × s tiles. Squares are processed in chunks of bounded
size and their answers kept as runs, so memory follows the table's size, not the number of tiles.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from longspan._masks.block_table import BLOCK_SIZE, EMPTY, FULL, PARTIAL, BlockTable
from longspan._masks.interval_rules import Interval
from longspan._masks.interval_steps import KV, Q
from longspan._masks.intervals import Interpreter
from longspan._masks.program import Program
from longspan._masks.tile_runs import Segments

UNKNOWN = 3
SQUARES = 1 << 16  # squares decided at once
ELEMENTS = 1 << 18  # mask elements evaluated at once
SAMPLES = (2, 8, 32)  # points per side of a tile, before all of it is evaluated
PATIENCE = 2.0  # seconds of silence before the first line
INTERVAL = 0.2  # seconds between reports


def classify(
    program: Program | None,
    captured: Sequence[Tensor] = (),
    q_len: int = 0,
    kv_len: int = 0,
    *,
    block: tuple[int, int] = (BLOCK_SIZE, BLOCK_SIZE),
    batch: int = 1,
    heads: int = 1,
    levels: Sequence[int] | None = None,
    edges: tuple[Tensor, Tensor] | None = None,
    first_batch: int = 0,
    mask_mod: Callable[..., Any] | None = None,
    progress: Callable[[float], None] | None = None,
) -> BlockTable:
    """The kind of every tile, exactly: FULL where all elements are visible, EMPTY where none is, else PARTIAL.

    A tile with fewer tokens than its block, as at the end of queries or keys, is never FULL: kernels compute full tiles without
    looking at bounds. `batch` and `heads` become 1 where the program does not depend on them; `first_batch` is the batch row that
    comes first. `captured` may be on any device. `edges`: where tiles of queries and of keys begin, and the end; int64, ascending from
    0, no tile wider than its block. `levels` are the sides of squares in tiles, each dividing the one before, the last one 1.
    `progress` is called with the share done, 0 to 1; by default a line on stderr appears when a table takes more than two seconds.
    No program is no mask: all is visible.
    """
    _check(q_len, kv_len, block, batch, heads)
    batch = batch if program is not None and program.uses_batch else 1
    heads = heads if program is not None and program.uses_head else 1
    given = edges is not None
    edges = edges or (_even_edges(q_len, block[0]), _even_edges(kv_len, block[1]))
    q_tiles, kv_tiles = (len(e) - 1 for e in edges)
    segments = Segments(rows=batch * heads * q_tiles, columns=kv_tiles)
    report = _Report(progress, parts=batch * heads)
    if q_tiles and kv_tiles and batch * heads:
        sides = _sides(levels, max(q_tiles, kv_tiles))
        on_cpu = [t.detach().cpu() for t in captured]
        for b in range(batch):
            for h in range(heads):
                fixed, row = (first_batch + b, h), (b * heads + h) * q_tiles
                _Head(program, on_cpu, edges, block, fixed, sides, segments, row, report).run()
                report.next_part()
    report.close()
    ptr, first, last, kind = segments.table()
    return BlockTable(
        q_len=q_len,
        kv_len=kv_len,
        block=block,
        batch=batch,
        heads=heads,
        ptr=ptr,
        first=first,
        last=last,
        kind=kind,
        tiles=(q_tiles, kv_tiles) if given else None,
        mask_mod=mask_mod,
    )


def _even_edges(length: int, block: int) -> Tensor:
    return torch.cat([torch.arange(0, length, block), torch.tensor([length])])


def _check(q_len: int, kv_len: int, block: tuple[int, int], batch: int, heads: int) -> None:
    if len(block) != 2 or min(block) < 1:
        raise ValueError(f"block: expected two sizes (queries, keys) of 1 or more, got {block}")
    if min(q_len, kv_len) < 0 or min(batch, heads) < 0:
        raise ValueError(
            f"expected lengths, batch and heads of 0 or more, got q_len {q_len}, kv_len {kv_len}, batch {batch}, heads {heads}"
        )


def _sides(levels: Sequence[int] | None, tiles: int) -> list[int]:
    if levels is None:
        side, sides = 1, [1]
        while tiles > 32 * side:
            side *= 4
            sides.insert(0, side)
        return sides
    sides = list(levels)
    if not sides or sides[-1] != 1 or any(b >= a or a % b for a, b in itertools.pairwise(sides)):
        raise ValueError(f"levels: expected falling sides that divide each other and end with 1, such as (16, 4, 1), got {tuple(levels)}")
    return sides


class _Report:
    """Tells how far the work is: to `progress`, or in one line on stderr that is rewritten in place, if it takes long."""

    def __init__(self, progress: Callable[[float], None] | None, parts: int) -> None:
        self.progress, self.parts, self.part = progress, max(1, parts), 0
        self.start = self.shown = time.monotonic()
        self.written = False

    def __call__(self, share: float) -> None:
        now = time.monotonic()
        if now - self.shown < INTERVAL:
            return
        self.shown, share = now, (self.part + share) / self.parts
        if self.progress is not None:
            self.progress(share)
        elif now - self.start > PATIENCE:
            self.written = True
            why = "intervals cannot decide this mask's lookups: its tiles are evaluated one by one"
            sys.stderr.write(f"\rblock table: {share:4.0%} ({why})")
            sys.stderr.flush()

    def next_part(self) -> None:
        self.part += 1

    def close(self) -> None:
        if self.written:
            sys.stderr.write("\n")


class _Head:
    """The table of one batch row and head."""

    def __init__(
        self,
        program: Program | None,
        captured: Sequence[Tensor],
        edges: tuple[Tensor, Tensor],
        block: tuple[int, int],
        fixed: tuple[int, int],
        sides: list[int],
        segments: Segments,
        row: int,
        report: _Report,
    ) -> None:
        self.program, self.captured, self.edges, self.block, self.sides = program, captured, edges, block, sides
        self.segments, self.row, self.report = segments, row, report
        self.tiles = [len(e) - 1 for e in edges]
        self.whole = [e.diff() == size for e, size in zip(edges, block, strict=True)]
        self.short: dict[tuple[int, int], Tensor | None] = {}
        self.fixed = [torch.full((1, 1, 1), i) for i in fixed]
        self.domain: Interpreter | None = None
        if program is not None:
            (b, h), (q_end, kv_end) = fixed, (int(e[-1]) - 1 for e in edges)
            self.domain = Interpreter(program, captured, b=(b, b), h=(h, h), q=(0, q_end), kv=(0, kv_end))
            self.width = max([1, *(n.meta["val"].numel() for n in program.graph.nodes if n.op == "call_function")])
        self.along: dict[tuple[int, int], list[Interval]] = {}
        self.area, self.done = -1, 0

    def run(self) -> None:
        top = self.sides[0]
        rows, columns = (torch.arange(-(-n // top)) for n in self.tiles)
        self.area = len(rows) * len(columns) * top * top
        per_chunk = max(1, SQUARES // len(columns))
        for part in rows.split(per_chunk):
            self._decide(0, part[None, :, None], columns[None, None, :])

    def _decide(self, level: int, rows: Tensor, columns: Tensor) -> None:
        """Decide squares rows [n, r, 1] × columns [n, 1, c] (numbered in squares of this level), and refine what stays unknown."""
        side = self.sides[level]
        kind = self._kinds(level, rows, columns)
        n, i, j = (kind == UNKNOWN).nonzero(as_tuple=True)
        if side == 1:
            if len(n):
                kind[n, i, j] = self._finish(rows[n, i, 0], columns[n, 0, j])
            self._emit(kind == PARTIAL, rows, columns, PARTIAL, 1)
        self._emit(kind == FULL, rows, columns, FULL, side)
        if side == 1:
            self.done += kind.numel()
            self.report(self.done / self.area)
            return
        self.done += (kind.numel() - len(n)) * side * side
        steps = side // self.sides[level + 1]
        inner = torch.arange(steps)
        parents = max(1, SQUARES // (steps * steps))
        for r, c in zip(rows[n, i, 0].split(parents), columns[n, 0, j].split(parents), strict=True):
            if len(r):
                self._decide(level + 1, (r[:, None] * steps + inner)[:, :, None], (c[:, None] * steps + inner)[:, None, :])

    def _kinds(self, level: int, rows: Tensor, columns: Tensor) -> Tensor:
        """EMPTY, FULL, UNKNOWN (or, for ragged tiles that are all visible, PARTIAL), int8 [n, r, c]."""
        side = self.sides[level]
        shape = (rows.shape[0], rows.shape[1], columns.shape[2])
        must, may = (x.expand(shape) for x in self._bounds(level, rows, columns))
        kind = torch.where(must, FULL, torch.where(may, UNKNOWN, EMPTY)).to(torch.int8)
        for axis, at in enumerate((rows, columns)):
            short = self._short(level, axis)
            if short is None:
                continue
            beyond = at >= len(short)
            ragged = short[at.clamp(max=len(short) - 1)] | beyond
            if bool(ragged.any()):
                kind.masked_fill_(ragged & (kind == FULL), PARTIAL if side == 1 else UNKNOWN)
                kind.masked_fill_(beyond, EMPTY)
        return kind

    def _short(self, level: int, axis: int) -> Tensor | None:
        """Which squares of this level hold a short tile or reach past the last one, along one side; None for none."""
        key = (level, axis)
        if key not in self.short:
            side, tiles = self.sides[level], self.tiles[axis]
            padded = torch.ones(-(-tiles // side) * side, dtype=torch.bool)
            padded[:tiles] = ~self.whole[axis]
            short = padded.view(-1, side).any(1)
            evenly = max(self.sides) == side or tiles % self.sides[0] == 0
            self.short[key] = None if evenly and not bool(short.any()) else short
        return self.short[key]

    def _bounds(self, level: int, rows: Tensor, columns: Tensor) -> Interval:
        if self.domain is None:
            yes = torch.ones(1, 1, 1, dtype=torch.bool)
            return Interval(yes, yes)
        if self.domain.constant is not None:
            return Interval(*(x.view(1, 1, 1) for x in self.domain.constant))
        axis_values = []
        for axis, at, tiles in zip((Q, KV), (rows, columns), self.tiles, strict=True):
            at = at.clamp(max=-(-tiles // self.sides[level]) - 1)  # squares past the end are dropped later
            axis_values.append([Interval(lo[at], hi[at]) for lo, hi in self._along(level, axis)])
        return self.domain.evaluate_squares(*axis_values)

    def _along(self, level: int, axis: int) -> list[Interval]:
        key = (level, axis)
        if key not in self.along:
            assert self.domain is not None
            edges, step = self.edges[0 if axis == Q else 1], self.sides[level]
            start = edges[:-1:step]
            self.along[key] = self.domain.evaluate_axis(axis, start, torch.cat([start[1:], edges[-1:]]) - 1)
        return self.along[key]

    def _emit(self, chosen: Tensor, rows: Tensor, columns: Tensor, kind: int, side: int) -> None:
        n, i, j = chosen.nonzero(as_tuple=True)
        if len(n):
            self.segments.add(rows[n, i, 0], columns[n, 0, j], kind, side=side, row_offset=self.row, row_limit=self.tiles[0])

    # -------------------------------------------------------------------------------------------- tiles that intervals leave open

    def _finish(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The kinds of single tiles [t], by points: few of them often show both values; else all of them are evaluated."""
        kind = torch.full_like(rows, UNKNOWN, dtype=torch.int8)
        for points in (*(p for p in SAMPLES if p < max(self.block)), max(self.block)):
            self._sample(points, rows, columns, kind)
        return kind

    def _sample(self, points: int, rows: Tensor, columns: Tensor, kind: Tensor) -> None:
        counts = [min(points, size) for size in self.block]
        final = counts == list(self.block)
        per_chunk = max(1, ELEMENTS // (counts[0] * counts[1]))
        for open_ in (kind == UNKNOWN).nonzero()[:, 0].split(per_chunk):
            if not len(open_):
                continue
            r, c = rows[open_], columns[open_]
            some, every = self._evaluate(self._positions(0, r, counts[0]), self._positions(1, c, counts[1]))
            if final:
                every &= self.whole[0][r] & self.whole[1][c]
                kind[open_] = torch.where(every, FULL, torch.where(some, PARTIAL, EMPTY)).to(torch.int8)
            else:
                kind[open_[some & ~every]] = PARTIAL
            self.report((self.done + int((kind != UNKNOWN).sum())) / self.area)

    def _positions(self, axis: int, tile: Tensor, count: int) -> Tensor:
        """`count` positions spread over each tile [t, count], both ends among them; past the end the last token stands in."""
        edges, size = self.edges[axis], self.block[axis]
        spread = torch.arange(count) * (size - 1) // max(1, count - 1)
        return torch.minimum(edges[tile, None] + spread, edges[tile + 1, None] - 1)

    def _evaluate(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """q [t, m], kv [t, n] → whether some and whether every element of each tile is visible [t]."""
        if self.width > 1 and q.shape[0] * q.shape[1] > 1 and q.shape[0] * q.shape[1] * kv.shape[1] * self.width > ELEMENTS:
            axis = 0 if q.shape[0] > 1 else 1
            half = q.shape[axis] // 2
            pairs = [(q[:half], kv[:half]), (q[half:], kv[half:])] if axis == 0 else [(q[:, :half], kv), (q[:, half:], kv)]
            (some, every), (more, all_) = (self._evaluate(*pair) for pair in pairs)
            return (torch.cat([some, more]), torch.cat([every, all_])) if axis == 0 else (some | more, every & all_)
        assert self.program is not None
        visible = self.program(*self.fixed, q[:, :, None], kv[:, None, :], *self.captured)
        visible = visible.expand(q.shape[0], q.shape[1], kv.shape[1]).reshape(q.shape[0], -1).view(torch.uint8)
        # amax and amin of bytes are vectorised; any and all of booleans are many times slower.
        return visible.amax(1) > 0, visible.amin(1) > 0
