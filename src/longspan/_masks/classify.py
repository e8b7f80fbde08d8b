"""Block tables of mask programs: classify coarse squares of tiles by interval arithmetic, refine only the undecided squares.

Legend: a *tile* is block[0] queries × block[1] keys; a *square* of side s is s × s tiles. Squares are processed in chunks of bounded
size and stored as runs, so memory is proportional to the size of the table, not to the number of tiles.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan._masks.block_table import BLOCK_SIZE, EMPTY, FULL, PARTIAL, BlockTable
from longspan._masks.interval_rules import Interval
from longspan._masks.interval_steps import KV, Q
from longspan._masks.intervals import Interpreter
from longspan._masks.program import Program
from longspan._masks.tile_runs import Segments
from longspan._torch_modes import default_modes

UNKNOWN = 3
MAX_SQUARES = 1 << 16  # squares classified at once
MAX_ELEMENTS = 1 << 18  # mask elements evaluated at once
SAMPLES = (2, 8, 32)  # sampled points per side of a tile, tried before evaluating the whole tile
REPORT_AFTER = 2.0  # seconds before the first progress line
REPORT_INTERVAL = 0.2  # seconds between progress reports


@dataclass(frozen=True, kw_only=True, eq=False)
class TableShape:
    """Sizes of a block table.

    Attributes:
        q_len, kv_len: Numbers of queries and of keys.
        block: Tokens of a tile: queries, keys.
        batch, heads: Batch rows and query heads.
        first_batch: Index of the first batch row.
        edges: First token of every query tile and of every KV tile, then the length; int64 [tiles + 1], ascending from 0, no tile wider
            than its block. None: tiles of `block` tokens, the last one shorter.

    Raises:
        ValueError: A size is negative, or a tile has no tokens.
    """

    q_len: int
    kv_len: int
    block: tuple[int, int] = (BLOCK_SIZE, BLOCK_SIZE)
    batch: int = 1
    heads: int = 1
    first_batch: int = 0
    edges: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        if len(self.block) != 2 or min(self.block) < 1:
            raise ValueError(f"block: expected two sizes (queries, keys) of at least 1, got {self.block}; for example block=(128, 128)")
        sizes = {"q_len": self.q_len, "kv_len": self.kv_len, "batch": self.batch, "heads": self.heads}
        if min(sizes.values()) < 0:
            got = ", ".join(f"{name}={size}" for name, size in sizes.items())
            raise ValueError(f"expected non-negative q_len, kv_len, batch and heads, got {got}")


@default_modes()
def classify(
    program: Program | None,
    captured: Sequence[Tensor],
    shape: TableShape,
    *,
    levels: Sequence[int] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    progress: Callable[[float], None] | None = None,
) -> BlockTable:
    """The exact block table of a mask: FULL where all elements of a tile are visible, EMPTY where none is, else PARTIAL.

    A tile with fewer tokens than its block (at the end of queries or keys) is never FULL, because kernels compute full tiles without
    bounds checks. Without a program every element is visible.

    The table has one batch row or head if the program does not depend on the index.

    Args:
        program, captured: The traced mask, and its captured tensors on any device.
        shape: Sizes of the table.
        levels: Sides of squares in tiles, each a divisor of the one before, ending with 1.
        mask_mod: The mask, stored in the table.
        progress: Called with the fraction done, 0 to 1. Without it, a progress line appears on stderr after two seconds.
    """
    batch = shape.batch if program is not None and program.uses_batch else 1
    heads = shape.heads if program is not None and program.uses_head else 1
    edges = shape.edges or (_even_edges(shape.q_len, shape.block[0]), _even_edges(shape.kv_len, shape.block[1]))
    q_tiles, kv_tiles = (len(e) - 1 for e in edges)
    segments = Segments(rows=batch * heads * q_tiles, columns=kv_tiles)
    report = _Report(progress, parts=batch * heads)
    if q_tiles and kv_tiles and batch * heads:
        sides = _sides(levels, max(q_tiles, kv_tiles))
        inputs = _Inputs(
            program=program,
            captured=[t.detach().cpu() for t in captured],
            edges=edges,
            block=shape.block,
            sides=sides,
            segments=segments,
            report=report,
        )
        for b in range(batch):
            for h in range(heads):
                _Head(inputs, batch_row=shape.first_batch + b, head=h, first_row=(b * heads + h) * q_tiles).run()
                report.next_part()
    report.close()
    ptr, first, last, kind = segments.table()
    return BlockTable(
        q_len=shape.q_len,
        kv_len=shape.kv_len,
        block=shape.block,
        batch=batch,
        heads=heads,
        ptr=ptr,
        first=first,
        last=last,
        kind=kind,
        tiles=(q_tiles, kv_tiles) if shape.edges is not None else None,
        mask_mod=mask_mod,
    )


def _even_edges(length: int, block: int) -> Tensor:
    """Edges [tiles + 1] of tiles of `block` tokens; the last tile may be shorter."""
    return torch.cat([torch.arange(0, length, block), torch.tensor([length])])


def _sides(levels: Sequence[int] | None, tiles: int) -> list[int]:
    """The sides of squares from coarse to fine; by default the coarsest level has at most 32 squares per side."""
    if levels is None:
        side, sides = 1, [1]
        while tiles > 32 * side:
            side *= 4
            sides.insert(0, side)
        return sides
    sides = list(levels)
    if not sides or sides[-1] != 1 or any(b >= a or a % b for a, b in itertools.pairwise(sides)):
        raise ValueError(
            f"levels: expected descending sides, each a divisor of the one before, ending with 1, got {tuple(levels)}; "
            "for example levels=(16, 4, 1)"
        )
    return sides


class _Report:
    """Progress reports: calls `progress`, or writes to stderr when classification is slow.

    On a terminal, one line with a bar is rewritten. In a file, a line is written after 2, 20, 40, 80, … seconds.
    """

    def __init__(self, progress: Callable[[float], None] | None, parts: int) -> None:
        self.progress, self.parts, self.part = progress, max(1, parts), 0
        self.start = self.shown = time.monotonic()
        self.next_line = REPORT_AFTER
        self.written = False

    def __call__(self, share: float) -> None:
        now = time.monotonic()
        if now - self.shown < REPORT_INTERVAL:
            return
        self.shown, share = now, (self.part + share) / self.parts
        if self.progress is not None:
            self.progress(share)
        elif now - self.start > REPORT_AFTER:
            self._write(share, now - self.start)

    def _write(self, share: float, seconds: float) -> None:
        left = f"about {seconds * (1 - share) / share:.0f} s left" if share else "starting"
        text = f"{share:4.0%}, {left} (interval bounds do not decide this mask; evaluating its tiles one by one)"
        if sys.stderr.isatty():
            done = round(20 * share)
            sys.stderr.write(f"\rblock table [{'#' * done}{'.' * (20 - done)}] {text}\033[K")
            self.written = True
        elif seconds > self.next_line:
            self.next_line = max(20.0, 2 * seconds)
            sys.stderr.write(f"block table: {text}\n")
        sys.stderr.flush()

    def next_part(self) -> None:
        self.part += 1

    def close(self) -> None:
        if self.written:
            sys.stderr.write("\n")


@dataclass(frozen=True, kw_only=True, eq=False)
class _Inputs:
    """The part of a classification that all batch rows and heads share."""

    program: Program | None
    captured: Sequence[Tensor]  # on the CPU
    edges: tuple[Tensor, Tensor]
    block: tuple[int, int]
    sides: list[int]
    segments: Segments
    report: _Report


class _Head:
    """Classification of the tiles of one batch row and head; adds runs to the segments from row `first_row` on."""

    def __init__(self, inputs: _Inputs, *, batch_row: int, head: int, first_row: int) -> None:
        program, edges = inputs.program, inputs.edges
        self.program, self.captured, self.edges = program, inputs.captured, edges
        self.block, self.sides = inputs.block, inputs.sides
        self.segments, self.first_row, self.report = inputs.segments, first_row, inputs.report
        self.tiles = [len(e) - 1 for e in edges]
        self.is_full_size = [e.diff() == size for e, size in zip(edges, self.block, strict=True)]
        self.short_squares: dict[tuple[int, int], Tensor | None] = {}
        self.indices = [torch.full((1, 1, 1), i) for i in (batch_row, head)]
        self.domain: Interpreter | None = None
        if program is not None:
            q_end, kv_end = (int(e[-1]) - 1 for e in edges)
            b, h = (batch_row, batch_row), (head, head)
            self.domain = Interpreter(program, self.captured, b=b, h=h, q=(0, q_end), kv=(0, kv_end))
            self.width = max([1, *(n.meta["val"].numel() for n in program.graph.nodes if n.op == "call_function")])
        self.axis_values: dict[tuple[int, int], list[Interval]] = {}
        self.total_tiles, self.done_tiles = -1, 0

    def run(self) -> None:
        """Classify all tiles, starting with the coarsest squares."""
        top = self.sides[0]
        rows, columns = (torch.arange(-(-n // top)) for n in self.tiles)
        self.total_tiles = len(rows) * len(columns) * top * top
        per_chunk = max(1, MAX_SQUARES // len(columns))
        for row_chunk in rows.split(per_chunk):
            self._classify_squares(0, row_chunk[None, :, None], columns[None, None, :])

    def _classify_squares(self, level: int, rows: Tensor, columns: Tensor) -> None:
        """Classify squares rows [n, r, 1] × columns [n, 1, c], in units of this level's squares; refine the unknown ones."""
        side = self.sides[level]
        kind = self._square_kinds(level, rows, columns)
        n, i, j = (kind == UNKNOWN).nonzero(as_tuple=True)
        if side == 1:
            if len(n):
                kind[n, i, j] = self._evaluate_tiles(rows[n, i, 0], columns[n, 0, j])
            self._emit(kind == PARTIAL, rows, columns, PARTIAL, 1)
        self._emit(kind == FULL, rows, columns, FULL, side)
        if side == 1:
            self.done_tiles += kind.numel()
            self.report(self.done_tiles / self.total_tiles)
            return
        self.done_tiles += (kind.numel() - len(n)) * side * side
        steps = side // self.sides[level + 1]
        inner = torch.arange(steps)
        parents = max(1, MAX_SQUARES // (steps * steps))
        for r, c in zip(rows[n, i, 0].split(parents), columns[n, 0, j].split(parents), strict=True):
            if len(r):
                self._classify_squares(level + 1, (r[:, None] * steps + inner)[:, :, None], (c[:, None] * steps + inner)[:, None, :])

    def _square_kinds(self, level: int, rows: Tensor, columns: Tensor) -> Tensor:
        """Kinds of squares, int8 [n, r, c]: EMPTY, FULL or UNKNOWN, and PARTIAL for short tiles that are all visible."""
        side = self.sides[level]
        shape = (rows.shape[0], rows.shape[1], columns.shape[2])
        must, may = (x.expand(shape) for x in self._bounds(level, rows, columns))
        kind = torch.where(must, FULL, torch.where(may, UNKNOWN, EMPTY)).to(torch.int8)
        for axis, square in enumerate((rows, columns)):
            is_short = self._short_squares(level, axis)
            if is_short is None:
                continue
            beyond = square >= len(is_short)
            never_full = is_short[square.clamp(max=len(is_short) - 1)] | beyond
            if bool(never_full.any()):
                kind.masked_fill_(never_full & (kind == FULL), PARTIAL if side == 1 else UNKNOWN)
                kind.masked_fill_(beyond, EMPTY)
        return kind

    def _short_squares(self, level: int, axis: int) -> Tensor | None:
        """Whether squares along an axis hold a short tile or reach past the last tile, bool [squares]; None if none does."""
        key = (level, axis)
        if key not in self.short_squares:
            side, tiles = self.sides[level], self.tiles[axis]
            padded = torch.ones(-(-tiles // side) * side, dtype=torch.bool)
            padded[:tiles] = ~self.is_full_size[axis]
            is_short = padded.view(-1, side).any(1)
            divides_evenly = max(self.sides) == side or tiles % self.sides[0] == 0
            self.short_squares[key] = None if divides_evenly and not bool(is_short.any()) else is_short
        return self.short_squares[key]

    def _bounds(self, level: int, rows: Tensor, columns: Tensor) -> Interval:
        """Bounds of the mask in squares, broadcastable to [n, r, c]. lo: every element is visible; hi: some element may be."""
        if self.domain is None:
            visible = torch.ones(1, 1, 1, dtype=torch.bool)
            return Interval(visible, visible)
        if self.domain.constant is not None:
            return Interval(*(x.view(1, 1, 1) for x in self.domain.constant))
        axis_values = []
        for axis, square, tiles in zip((Q, KV), (rows, columns), self.tiles, strict=True):
            square = square.clamp(max=-(-tiles // self.sides[level]) - 1)  # `_square_kinds` drops squares past the end
            axis_values.append([Interval(lo[square], hi[square]) for lo, hi in self._axis_values(level, axis)])
        return self.domain.evaluate_squares(*axis_values)

    def _axis_values(self, level: int, axis: int) -> list[Interval]:
        """The values of `Interpreter.evaluate_axis` for all rows or columns of squares of a level, cached."""
        key = (level, axis)
        if key not in self.axis_values:
            assert self.domain is not None
            edges, step = self.edges[0 if axis == Q else 1], self.sides[level]
            start = edges[:-1:step]
            self.axis_values[key] = self.domain.evaluate_axis(axis, start, torch.cat([start[1:], edges[-1:]]) - 1)
        return self.axis_values[key]

    def _emit(self, selected: Tensor, rows: Tensor, columns: Tensor, kind: int, side: int) -> None:
        """Add the squares selected by a mask [n, r, c] to the table as one kind."""
        n, i, j = selected.nonzero(as_tuple=True)
        if len(n):
            self.segments.add(rows[n, i, 0], columns[n, 0, j], kind, side=side, row_offset=self.first_row, row_limit=self.tiles[0])

    # -------------------------------------------------------------------------------------------- tiles undecided by intervals

    def _evaluate_tiles(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Kinds of single tiles, int8 [t], by evaluating the mask.

        A few sampled points often show both a visible and a masked element; the other tiles are evaluated completely.
        """
        kind = torch.full_like(rows, UNKNOWN, dtype=torch.int8)
        for points in (*(p for p in SAMPLES if p < max(self.block)), max(self.block)):
            self._sample(points, rows, columns, kind)
        return kind

    def _sample(self, points: int, rows: Tensor, columns: Tensor, kind: Tensor) -> None:
        """Evaluate points × points elements of every UNKNOWN tile and update `kind` [t] in place."""
        counts = [min(points, size) for size in self.block]
        complete = counts == list(self.block)
        per_chunk = max(1, MAX_ELEMENTS // (counts[0] * counts[1]))
        for unknown in (kind == UNKNOWN).nonzero()[:, 0].split(per_chunk):
            if not len(unknown):
                continue
            r, c = rows[unknown], columns[unknown]
            any_visible, all_visible = self._evaluate(self._positions(0, r, counts[0]), self._positions(1, c, counts[1]))
            if complete:
                all_visible &= self.is_full_size[0][r] & self.is_full_size[1][c]
                kind[unknown] = torch.where(all_visible, FULL, torch.where(any_visible, PARTIAL, EMPTY)).to(torch.int8)
            else:
                kind[unknown[any_visible & ~all_visible]] = PARTIAL
            self.report((self.done_tiles + int((kind != UNKNOWN).sum())) / self.total_tiles)

    def _positions(self, axis: int, tile: Tensor, count: int) -> Tensor:
        """Positions [t, count] spread evenly over each tile, including both ends; a short tile repeats its last token."""
        edges, size = self.edges[axis], self.block[axis]
        spread = torch.arange(count) * (size - 1) // max(1, count - 1)
        return torch.minimum(edges[tile, None] + spread, edges[tile + 1, None] - 1)

    def _evaluate(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Whether any and whether all elements q [t, m] × kv [t, n] of each tile are visible, bool [t] each."""
        if self.width > 1 and q.shape[0] * q.shape[1] > 1 and q.shape[0] * q.shape[1] * kv.shape[1] * self.width > MAX_ELEMENTS:
            axis = 0 if q.shape[0] > 1 else 1
            half = q.shape[axis] // 2
            halves = [(q[:half], kv[:half]), (q[half:], kv[half:])] if axis == 0 else [(q[:, :half], kv), (q[:, half:], kv)]
            (any_1, all_1), (any_2, all_2) = (self._evaluate(*positions) for positions in halves)
            return (torch.cat([any_1, any_2]), torch.cat([all_1, all_2])) if axis == 0 else (any_1 | any_2, all_1 & all_2)
        assert self.program is not None
        visible = self.program(*self.indices, q[:, :, None], kv[:, None, :], *self.captured)
        visible = visible.expand(q.shape[0], q.shape[1], kv.shape[1]).reshape(q.shape[0], -1).view(torch.uint8)
        # amax and amin of bytes are vectorized; any and all of bools are many times slower.
        return visible.amax(1) > 0, visible.amin(1) > 0
