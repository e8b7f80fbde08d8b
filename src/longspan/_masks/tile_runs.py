"""Stretches of tiles, collected in any order and joined into the runs of a block table."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(kw_only=True, eq=False)
class Segments:
    """Collects stretches of tiles in any order and joins them into a table's runs; they must not overlap."""

    rows: int
    columns: int
    _parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)
    _pending: int = 0
    _joined: int = 0

    def add(self, row: Tensor, column: Tensor, kind: int, *, side: int = 1, row_offset: int = 0, row_limit: int | None = None) -> None:
        """Squares of `side` tiles, numbered in squares [n], of one kind. Rows from `row_limit` on are cut; `row_offset` is added."""
        row, first, last = row * side, column * side, ((column + 1) * side - 1).clamp(max=self.columns - 1)
        row, first, last, kinds = join_neighbours(row, first, last, torch.full_like(row, kind, dtype=torch.int8))
        if side > 1:
            row = (row[:, None] + torch.arange(side)).flatten()
            first, last, kinds = (x.repeat_interleave(side) for x in (first, last, kinds))
        if row_limit is not None and side > 1:
            keep = row < row_limit
            row, first, last, kinds = row[keep], first[keep], last[keep], kinds[keep]
        self._parts.append(((row + row_offset).int(), first.int(), last.int(), kinds))
        self._pending += len(row)
        if self._pending > max(1 << 20, self._joined):
            self._join()

    def _join(self) -> None:
        """Bring all collected so far in order and join neighbours, which bounds memory by the table's own size."""
        row, first, last, kind = (torch.cat(x) for x in zip(*self._parts, strict=True))
        order = (row.long() * max(1, self.columns) + first).argsort()
        self._parts = [join_neighbours(row[order], first[order], last[order], kind[order])]
        self._joined, self._pending = len(self._parts[0][0]), 0

    def table(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(ptr [rows + 1], first, last: int32; kind: int8)."""
        if not self._parts:
            none = torch.zeros(0, dtype=torch.int32)
            return torch.zeros(self.rows + 1, dtype=torch.int32), none, none.clone(), none.to(torch.int8)
        self._join()
        row, first, last, kind = self._parts[0]
        return row_pointers(row, self.rows), first, last, kind


def join_neighbours(row: Tensor, first: Tensor, last: Tensor, kind: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Join stretches that follow each other in one row, are neighbours and of one kind."""
    goes_on = (row[1:] == row[:-1]) & (first[1:] == last[:-1] + 1) & (kind[1:] == kind[:-1])
    begins = torch.cat([goes_on.new_ones(min(1, len(row))), ~goes_on])
    ends = torch.cat([~goes_on, goes_on.new_ones(min(1, len(row)))])
    return row[begins], first[begins], last[ends], kind[begins]


def row_pointers(row: Tensor, rows: int) -> Tensor:
    """Where each row's entries begin [rows + 1], int32, for rows in ascending order."""
    ptr = torch.zeros(rows + 1, dtype=torch.int32)
    ptr[1:] = torch.bincount(row, minlength=rows).cumsum(0)
    return ptr
