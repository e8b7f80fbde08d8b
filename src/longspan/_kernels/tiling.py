"""Tilings: where the tiles of queries, or of KV, lie in a tensor and in the sequence."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor

from longspan._derived_cache import DerivedCache
from longspan._masks.block_table import expand_ranges


@dataclass(frozen=True, kw_only=True, eq=False)
class Tiling:
    """The tiles of one side. Tile i: rows row[i] … row[i] + count[i] − 1 of the tensor; its first row is at global position pos[i].

    None for all three arrays is a whole sequence in order: row = pos = i · block, and the last tile ends at `length`.
    """

    length: int
    block: int
    row: Tensor | None = None
    pos: Tensor | None = None
    count: Tensor | None = None

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return -(-self.length // self.block) if self.row is None else len(self.row)

    @property
    def name(self) -> Hashable:
        """Key for caches: whole sequences of one length and block are equal, tilings with arrays only to themselves."""
        return (self.length, self.block) if self.row is None else ref(self)

    def span(self, tile: int) -> tuple[int, int, int]:
        """(first row, count, first position) of one tile."""
        if self.row is None or self.pos is None or self.count is None:
            start = tile * self.block
            return start, min(self.block, self.length - start), start
        return int(self.row[tile]), int(self.count[tile]), int(self.pos[tile])

    def rows_of(self, selected: Tensor) -> Tensor:
        """Rows of the selected tiles, int64. selected: a bool per tile."""
        if self.row is None or self.count is None:
            row = torch.nonzero(selected).flatten() * self.block
            return expand_ranges(row, (self.length - row).clamp(max=self.block))
        return expand_ranges(self.row[selected], self.count[selected])

    def positions(self, device: torch.device) -> Tensor:
        """Global position of each row [length], int64, 0 for rows in no tile. Cached per device; callers must not modify it."""
        if self.row is None or self.pos is None or self.count is None:
            return torch.arange(self.length, device=device)
        arrays, length = (self.row, self.pos, self.count), self.length
        return _positions.get(self, device, lambda: _row_positions(*arrays, length=length).to(device))


_positions: DerivedCache[Tiling, Tensor] = DerivedCache(16)


def _row_positions(row: Tensor, pos: Tensor, count: Tensor, *, length: int) -> Tensor:
    offset = torch.arange(int(count.sum())) - (count.cumsum(0) - count).repeat_interleave(count)
    positions = torch.zeros(length, dtype=torch.int64)
    positions[row.repeat_interleave(count) + offset] = pos.repeat_interleave(count) + offset
    return positions
