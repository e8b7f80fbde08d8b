"""Runs of tiles, collected in any order and joined into the runs of a block table."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

JOIN_AFTER = 1 << 20  # collected runs, or as many as were joined before


@dataclass(kw_only=True, eq=False)
class Segments:
    """Collector of runs of tiles, in any order and without overlap, that joins them into the runs of a block table.

    Attributes:
        rows: Number of rows of the table.
        columns: Number of tiles per row.
    """

    rows: int
    columns: int
    _parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)
    _pending: int = 0
    _joined: int = 0

    def add(self, row: Tensor, column: Tensor, kind: int, *, side: int = 1, row_offset: int = 0, row_limit: int | None = None) -> None:
        """Add squares of side × side tiles of one kind.

        Args:
            row: Row of each square, in squares, [n] int64.
            column: Column of each square, in squares, [n] int64.
            kind: PARTIAL or FULL.
            side: Tiles per side of a square.
            row_offset: Added to every row of tiles.
            row_limit: Rows of tiles from this one on are dropped, before `row_offset` is added.
        """
        row, first, last = row * side, column * side, ((column + 1) * side - 1).clamp(max=self.columns - 1)
        row, first, last, kinds = join_neighbours(row, first, last, torch.full_like(row, kind, dtype=torch.int8))
        if side > 1:
            row = (row[:, None] + torch.arange(side)).flatten()
            first, last, kinds = (x.repeat_interleave(side) for x in (first, last, kinds))
        if row_limit is not None and side > 1:
            inside = row < row_limit
            row, first, last, kinds = row[inside], first[inside], last[inside], kinds[inside]
        self._parts.append(((row + row_offset).int(), first.int(), last.int(), kinds))
        self._pending += len(row)
        if self._pending > max(JOIN_AFTER, self._joined):
            self._join()

    def _join(self) -> None:
        """Sort the collected runs and join adjacent ones, so that memory stays proportional to the size of the table."""
        row, first, last, kind = (torch.cat(x) for x in zip(*self._parts, strict=True))
        order = (row.long() * max(1, self.columns) + first).argsort()
        self._parts = [join_neighbours(row[order], first[order], last[order], kind[order])]
        self._joined, self._pending = len(self._parts[0][0]), 0

    def table(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Runs in CSR form: ptr [rows + 1], first [runs], last [runs] (int32, last inclusive) and kind [runs] (int8)."""
        if not self._parts:
            no_runs = torch.zeros(0, dtype=torch.int32)
            return torch.zeros(self.rows + 1, dtype=torch.int32), no_runs, no_runs.clone(), no_runs.to(torch.int8)
        self._join()
        row, first, last, kind = self._parts[0]
        return row_pointers(row, self.rows), first, last, kind


def join_neighbours(row: Tensor, first: Tensor, last: Tensor, kind: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Join consecutive runs that are adjacent in one row and of one kind; all arguments [n], all results [m] with m <= n."""
    continues = (row[1:] == row[:-1]) & (first[1:] == last[:-1] + 1) & (kind[1:] == kind[:-1])
    begins = torch.cat([continues.new_ones(min(1, len(row))), ~continues])
    ends = torch.cat([~continues, continues.new_ones(min(1, len(row)))])
    return row[begins], first[begins], last[ends], kind[begins]


def row_pointers(row: Tensor, rows: int) -> Tensor:
    """CSR row pointers [rows + 1] int32 of entries whose row numbers are `row` [n], ascending."""
    ptr = torch.zeros(rows + 1, dtype=torch.int32)
    ptr[1:] = torch.bincount(row, minlength=rows).cumsum(0)
    return ptr
