"""Block tables whose contents are replaced in place: their size, and what kernels allocate for them, stays the same.

A CUDA graph holds addresses and sizes. With a `StaticTable`, kernels keep the table in device memory with room for `runs_per_row` runs of
each kind per row and refresh it when the contents are replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from longspan._masks.block_table import FULL, PARTIAL, BlockTable

_CONTENTS = ("ptr", "first", "last", "kind")


@dataclass(frozen=True, kw_only=True, eq=False)
class StaticTable(BlockTable):
    """A block table in which every row of queries has a tile, with replaceable contents.

    Attributes:
        runs_per_row: Room for runs of each kind, on average per row.
        original: The first contents. Choices that a graph fixes, such as the order of CTAs, are made for them.
    """

    runs_per_row: int
    original: BlockTable
    _refreshers: list[Callable[[], None]] = field(default_factory=list, init=False, repr=False)

    @classmethod
    def of(cls, table: BlockTable, *, runs_per_row: int) -> StaticTable:
        """A static table that begins with these contents, without empty rows. Raises ValueError if there is no room for them."""
        table = with_every_row_busy(table)
        static = cls(**_values(table), runs_per_row=runs_per_row, original=table)
        static.check_room(table)
        static.__dict__["transposed"] = cls(**_values(table.transposed), runs_per_row=runs_per_row, original=table.transposed)
        return static

    @property
    def nominal(self) -> BlockTable:
        return self.original

    @property
    def room(self) -> int:
        """Number of runs of each kind that there is room for."""
        return self.runs_per_row * max(self.rows, self.kv_tiles * self.batch * self.heads)

    def check_room(self, table: BlockTable) -> None:
        """Raise ValueError if there is no room for the contents of a table, as rows of queries or as rows of keys."""
        runs = max(len(t.runs(kind).first) for t in (table, table.transposed) for kind in (PARTIAL, FULL))
        if runs > self.room:
            rows = self.room // self.runs_per_row
            raise ValueError(f"static mask: expected at most {self.runs_per_row} runs of tiles per row, got {runs} in {rows} rows; "
                             f"make it with runs_per_row={-(-runs // rows)}")  # fmt: skip

    def replace_contents(self, table: BlockTable) -> None:
        """Take the contents of a table of the same size that `check_room` accepts, here and on all devices."""
        transposed: StaticTable = self.__dict__["transposed"]
        for old, new in ((self, table), (transposed, table.transposed)):
            for name in list(old.__dict__):
                if name not in _field_names() and not (old is self and name == "transposed"):  # cached properties
                    del old.__dict__[name]
            for name in _CONTENTS:
                object.__setattr__(old, name, getattr(new, name))
        for old in (self, transposed):
            for refresh in old._refreshers:
                refresh()

    def when_replaced(self, refresh: Callable[[], None]) -> None:
        """Call a function after each replacement of the contents."""
        self._refreshers.append(refresh)


def _field_names() -> frozenset[str]:
    return frozenset(f.name for f in fields(StaticTable))


def _values(table: BlockTable) -> dict[str, Any]:
    return {f.name: getattr(table, f.name) for f in fields(BlockTable)}


def with_every_row_busy(table: BlockTable) -> BlockTable:
    """The table with a partial tile in each row that has none: the tile at the row's own position, in which the mask hides all pairs.

    Launches over rows that have tiles then have the same size for all contents.
    """
    idle = (table.ptr.diff() == 0).nonzero()[:, 0]
    if not len(idle) or not table.kv_tiles:
        return table
    own_tile = (idle % table.q_tiles * table.block[0] // table.block[1]).clamp(max=table.kv_tiles - 1)
    row = torch.cat([torch.repeat_interleave(torch.arange(table.rows), table.ptr.diff()), idle])
    order = row.argsort(stable=True)

    def joined(runs: Tensor, added: Tensor) -> Tensor:
        return torch.cat([runs, added.to(runs.dtype)])[order]

    ptr = torch.zeros(table.rows + 1, dtype=table.ptr.dtype)
    ptr[1:] = torch.bincount(row, minlength=table.rows).cumsum(0)
    contents = {
        "ptr": ptr, "first": joined(table.first, own_tile), "last": joined(table.last, own_tile),
        "kind": joined(table.kind, torch.full_like(own_tile, PARTIAL)),
    }  # fmt: skip
    return BlockTable(**{**_values(table), **contents})
