"""Demands: the work of each unit of queries and the units of KV that it reads; and the evaluation of an owner of units by them.

A *unit* is a contiguous range of tokens that one rank owns whole. There are T = ceil(length / unit) of them; the last may be shorter. Work
is counted in (query, key) pairs. Counts are whole numbers in float64: sums below 2^53 are exact in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from longspan._masks.block_table import FULL, PARTIAL, BlockTable, expand_ranges
from longspan._masks.program import Program
from longspan._masks.tile_runs import row_pointers

POINTS = 16  # points per side at which a partial tile is sampled
EVALUATIONS = 1 << 21  # points in all; with more partial tiles, each gets fewer points
EXACT = 1 << 22  # up to this many pairs in partial tiles, every pair is evaluated
CHUNK = 1 << 18  # points evaluated at once


@dataclass(frozen=True, kw_only=True, eq=False)
class Demand:
    """Work and reads of one sequence in T units.

    Attributes:
        length: Tokens of the sequence.
        unit: Tokens per unit.
        work: Pairs of each unit's queries [T], float64.
        ptr, first, last: The KV that unit t's queries read: units first[i] … last[i] for ptr[t] <= i < ptr[t + 1], ascending and disjoint,
            int64.
    """

    length: int
    unit: int
    work: Tensor
    ptr: Tensor
    first: Tensor
    last: Tensor

    @property
    def units(self) -> int:
        """Number of units T."""
        return len(self.work)

    @cached_property
    def row_of_run(self) -> Tensor:
        """The unit whose queries read each run [runs]."""
        return torch.repeat_interleave(torch.arange(self.units), self.ptr.diff())

    @classmethod
    def of(cls, table: BlockTable, pairs: Tensor | None = None, *, row: int | None = None) -> Demand:
        """The demand of a block table of square tiles over one sequence; the tile is the unit.

        Args:
            table: The table. Reads of several heads or batch rows are united, their work is summed.
            pairs: Work of each table row [rows], as `pairs_per_row` returns it; by default every computed tile counts whole.
            row: A batch row to take alone.
        """
        if table.q_len != table.kv_len or table.block[0] != table.block[1] or table.q_len < 1 or table.tiles is not None:
            raise ValueError(
                f"demand: expected the table of one sequence in square blocks, got {table.q_len} × {table.kv_len} tokens in blocks of "
                f"{table.block[0]} × {table.block[1]}; for queries and keys that differ give a named layout for each"
            )
        if row is not None and table.batch > 1 and not 0 <= row < table.batch:
            raise ValueError(f"demand: the table has {table.batch} batch rows, got row {row}")
        units = table.q_tiles
        work = table.tiles_per_row.double() * table.block[0] ** 2 if pairs is None else pairs
        if work.shape != (table.rows,):
            raise ValueError(f"demand: pairs must hold one number per table row, {table.rows} in all, got shape {tuple(work.shape)}")
        unit, first, last = _row_of_run(table), table.first, table.last
        if row is not None and table.batch > 1:
            begin, end = row * table.heads * units, (row + 1) * table.heads * units
            runs = slice(int(table.ptr[begin]), int(table.ptr[end]))
            work, unit, first, last = work[begin:end], unit[runs], first[runs], last[runs]
        many = len(work) > units
        unit, first, last = _united(unit % units, first, last, units, in_order=not many)
        ptr = row_pointers(unit, units).long()
        return cls(length=table.q_len, unit=table.block[0], work=work.view(-1, units).sum(0), ptr=ptr, first=first, last=last)


def _row_of_run(table: BlockTable) -> Tensor:
    return torch.repeat_interleave(torch.arange(table.rows), table.ptr.diff())


def _united(unit: Tensor, first: Tensor, last: Tensor, units: int, *, in_order: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Runs with those of one unit that overlap or touch merged."""
    begin, end = unit * (units + 1) + first, unit * (units + 1) + last + 1  # one line per unit, with a gap after each
    if not in_order:
        begin, order = begin.sort()
        end = end[order].cummax(0).values
    starts = torch.ones_like(begin, dtype=torch.bool)
    starts[1:] = begin[1:] > end[:-1]
    begin, end = begin[starts], end[starts.roll(-1)]
    unit = begin // (units + 1)
    return unit, begin - unit * (units + 1), end - 1 - unit * (units + 1)


# ----------------------------------------------------------------------------------------------------------------------- pairs


def pairs_per_row(
    table: BlockTable,
    program: Program | None,
    captured: Sequence[Tensor] = (),
    *,
    edges: tuple[Tensor, Tensor] | None = None,
    first_batch: int = 0,
) -> Tensor:
    """Allowed (query, key) pairs of each row of a block table [rows], float64 whole numbers.

    Full tiles count whole. Partial tiles are evaluated pair by pair where they are few; otherwise at a grid of points that each stand for a
    cell: exact for tiles of up to 16 tokens, an estimate above. Tokens past the end do not count.

    Args:
        table: The table.
        program: The mask's program; None for full attention.
        captured: The mask's captured tensors, on any device.
        edges: Edges of the tiles of queries and of KV, as in `TableShape`.
        first_batch: First batch row of the table, as in `TableShape`.
    """
    size_q, size_kv = table.block
    if table.tiles is not None and edges is None:
        raise ValueError("pairs_per_row: expected the table of a whole sequence, got one of selected tiles; pass edges=")
    ptr, first, last = table.runs(FULL)
    tiles = torch.zeros(len(first) + 1, dtype=torch.int64)
    tiles[1:] = (last - first + 1).cumsum(0)
    total = tiles[ptr].diff().double() * (size_q * size_kv)
    ptr, first, last = table.runs(PARTIAL)
    length = last - first + 1
    if not len(length):
        return total
    row = torch.repeat_interleave(torch.arange(table.rows), ptr.diff()).repeat_interleave(length)
    column = expand_ranges(first, length)

    edges = edges or (_even(table.q_len, size_q), _even(table.kv_len, size_kv))
    tall, wide = edges[0].diff()[row % table.q_tiles], edges[1].diff()[column]
    points = POINTS
    while points > 1 and len(row) * points * points > EVALUATIONS:
        points //= 2
    if int((tall * wide).sum()) <= EXACT:
        points = max(size_q, size_kv)
    sampler = _TileSampler(
        table=table,
        program=program,
        captured=[t.cpu() for t in captured],
        edges=edges,
        first_batch=first_batch,
        points=points,
    )
    ragged = (tall < size_q) | (wide < size_kv)
    cells = [points if points < side else int(tokens.max()) for side, tokens in ((size_q, tall), (size_kv, wide))]
    size = max(1, CHUNK // (cells[0] * cells[1]))
    for part in (~ragged).nonzero()[:, 0].split(size):
        if len(part):
            total.index_add_(0, row[part], sampler.pairs(row[part], column[part], cut=False))
    cut = ragged.nonzero()[:, 0]
    # Tiles of similar size together: a chunk is evaluated at the size of its largest tile.
    for part in cut[(tall * wide)[cut].argsort()].split(size):
        if len(part):
            total.index_add_(0, row[part], sampler.pairs(row[part], column[part], cut=True))
    return total


def _even(length: int, block: int) -> Tensor:
    return torch.cat([torch.arange(0, length, block), torch.tensor([length])])


@dataclass(frozen=True, kw_only=True, eq=False)
class _TileSampler:
    """Evaluates the mask inside single tiles."""

    table: BlockTable
    program: Program | None
    captured: list[Tensor]
    edges: tuple[Tensor, Tensor]
    first_batch: int
    points: int

    def pairs(self, row: Tensor, column: Tensor, *, cut: bool) -> Tensor:
        """Pairs in single tiles [t]. `cut`: some have fewer tokens than a block. Tiles are the innermost dim, for long inner loops."""
        table = self.table
        head, tile = row // table.q_tiles, row % table.q_tiles
        q, of_q = self._grid(0, tile, column, 3)
        kv, of_kv = self._grid(1, column, tile, 5)
        shape = (len(q), len(kv), len(row))
        if self.program is None:
            visible = torch.ones(shape, dtype=torch.bool)
        else:
            b, h = (head // table.heads + self.first_batch).view(1, 1, -1), (head % table.heads).view(1, 1, -1)
            visible = self.program(b, h, q[:, None], kv[None, :], *self.captured).expand(shape)
        if cut or any(size % cells for size, cells in zip(table.block, shape)):  # cells of different sizes
            return torch.einsum("ijt,it,jt->t", visible.double(), of_q.double(), of_kv.double())
        cells = visible.reshape(-1, len(row)).view(torch.uint8).sum(0, dtype=torch.int32)
        return cells.double() * (table.block[0] // len(q) * (table.block[1] // len(kv)))

    def _grid(self, side: int, tile: Tensor, other: Tensor, stride: int) -> tuple[Tensor, Tensor]:
        """(positions [p, t], tokens that each position stands for [p, t]): p cells along each tile, one position in each.

        The offset of a position in its cell varies with the cell and with the tile on the other side. Otherwise an edge of the mask that
        crosses many tiles would be misjudged in the same way in all of them.
        """
        size, begin = self.table.block[side], self.edges[side][tile]
        count = self.edges[side][tile + 1] - begin
        edges = torch.arange(self.points + 1) * size // self.points if self.points < size else torch.arange(int(count.max()) + 1)
        start, cell = edges[:-1, None], edges.diff()[:, None]
        offset = (torch.arange(len(cell))[:, None] * stride + other) % cell
        tokens = (count - start).clamp(min=0).minimum(cell)
        return (begin + start + offset.minimum((tokens - 1).clamp(min=0))).minimum(begin + count - 1), tokens


# ------------------------------------------------------------------------------------------------------------------ evaluation


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """Work and traffic of each of N ranks under a layout, all [N].

    Attributes:
        work: Pairs, float64.
        received: Units of KV that a rank reads but does not own, int64.
        tokens: Tokens that a rank owns, int64.
    """

    work: Tensor
    received: Tensor
    tokens: Tensor

    @cached_property
    def imbalance(self) -> float:
        """Work of the busiest rank over the mean; 1 where there is no work."""
        total = float(self.work.sum())
        return float(self.work.max()) * len(self.work) / total if total > 0 else 1.0

    @cached_property
    def traffic(self) -> float:
        """Mean number of units received per rank."""
        return int(self.received.sum()) / len(self.received)

    def __add__(self, other: Evaluation) -> Evaluation:
        """The evaluation of the same layout by two demands together."""
        return Evaluation(work=self.work + other.work, received=self.received + other.received, tokens=self.tokens)


def evaluate(demand: Demand, owner: Tensor, ranks: int) -> Evaluation:
    """The evaluation of an owner per unit [T], int64 in 0 … ranks − 1. A unit of KV moves whole, once to each rank that reads any of it."""
    units = demand.units
    if owner.shape != (units,) or (units and (int(owner.min()) < 0 or int(owner.max()) >= ranks)):
        raise ValueError(f"evaluate: expected {units} owners in 0 … {ranks - 1}, got shape {tuple(owner.shape)}")
    work = torch.zeros(ranks, dtype=torch.float64).index_add_(0, owner, demand.work)
    tokens = torch.bincount(owner, minlength=ranks) * demand.unit
    tokens[owner[-1]] -= units * demand.unit - demand.length
    if not len(demand.first):
        return Evaluation(work=work, received=torch.zeros_like(tokens), tokens=tokens)

    # One line of units per rank. Each run, in order, counts the units that no run before it covers.
    line = owner * (units + 1)
    base = line[demand.row_of_run]
    begin, order = (base + demand.first).sort()
    reach = (base + demand.last + 1)[order].cummax(0).values
    before = torch.zeros_like(reach)
    before[1:] = reach[:-1]
    covered = (reach - torch.maximum(begin, before)).clamp(min=0)
    received = torch.zeros_like(tokens).index_add_(0, begin // (units + 1), covered)
    local_unit = line + torch.arange(units)
    run = torch.searchsorted(begin, local_unit, right=True) - 1
    local = (run >= 0) & (reach[run.clamp(min=0)] > local_unit)
    return Evaluation(work=work, received=received - torch.bincount(owner[local], minlength=ranks), tokens=tokens)
