"""Block tables: the partial and full KV tiles of each query tile, as runs in CSR form.

Shapes: rows = batch · heads · q_tiles; row r = (b · heads + h) · q_tiles + i is query tile i of batch row b and head h. Batch and heads
have size 1 if the mask does not depend on them. The runs of row r are `first[ptr[r]:ptr[r+1]]`, … in ascending order; `last` is
inclusive. Tiles in no run are empty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from longspan._masks.tile_runs import join_neighbours, row_pointers

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK_SIZE = 128  # default number of tokens per side of a tile
EMPTY, PARTIAL, FULL = 0, 1, 2
SHADES = " ░▒▓█"


class Counts(NamedTuple):
    """Number of tiles of each kind."""

    empty: int
    partial: int
    full: int


class Runs(NamedTuple):
    """Runs of one kind in CSR form, all int32: row r holds tiles first[i] … last[i] for ptr[r] <= i < ptr[r + 1]."""

    ptr: Tensor
    first: Tensor
    last: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockTable:
    """Kind of each tile of a q_len × kv_len attention: empty, partial or full. Memory is proportional to the number of runs.

    Attributes:
        q_len: Number of queries.
        kv_len: Number of keys.
        block: Tokens per tile as (queries, keys).
        batch: Batch size; 1 if the mask does not depend on b.
        heads: Number of query heads; 1 if the mask does not depend on h.
        ptr: Position of each row's first run, [rows + 1] int32.
        first: First KV tile of each run, [runs] int32.
        last: Last KV tile of each run, inclusive, [runs] int32.
        kind: PARTIAL (1) or FULL (2) for each run, [runs] int8.
        tiles: (q_tiles, kv_tiles) of a selection of tiles; None if the lengths determine them.
        mask_mod: Decides the pairs of partial tiles; None if not known, as in a selection of tiles.

    Example:
        >>> table = longspan.causal().block_table(1024)
        >>> table.counts()
        Counts(empty=28, partial=8, full=28)
        >>> table.density
        0.5625
    """

    q_len: int
    kv_len: int
    block: tuple[int, int]
    batch: int = 1
    heads: int = 1
    ptr: Tensor
    first: Tensor
    last: Tensor
    kind: Tensor
    tiles: tuple[int, int] | None = None
    mask_mod: Callable[..., Any] | None = None

    @property
    def q_tiles(self) -> int:
        """Number of query tiles."""
        return -(-self.q_len // self.block[0]) if self.tiles is None else self.tiles[0]

    @property
    def kv_tiles(self) -> int:
        """Number of KV tiles."""
        return -(-self.kv_len // self.block[1]) if self.tiles is None else self.tiles[1]

    @property
    def nominal(self) -> BlockTable:
        """The table for which kernels choose tile sizes and the order of work: itself, or the first contents of a static one."""
        return self

    @property
    def rows(self) -> int:
        """Number of rows: batch · heads · q_tiles."""
        return self.batch * self.heads * self.q_tiles

    @cached_property
    def _row_of_run(self) -> Tensor:
        """Row of each run, [runs] int64."""
        return torch.repeat_interleave(torch.arange(self.rows), self.ptr.diff())

    @cached_property
    def tiles_per_row(self) -> Tensor:
        """Number of non-empty tiles of each row, [rows] int64, which is proportional to its work."""
        length = (self.last - self.first + 1).long()
        return torch.zeros(self.rows, dtype=torch.int64).index_add_(0, self._row_of_run, length)

    def counts(self) -> Counts:
        """Number of empty, partial and full tiles, over all batch rows and heads of the table."""
        return self._counts

    @cached_property
    def _counts(self) -> Counts:
        length = self.last - self.first + 1
        partial = int(length[self.kind == PARTIAL].sum())
        full = int(length[self.kind == FULL].sum())
        return Counts(empty=self.rows * self.kv_tiles - partial - full, partial=partial, full=full)

    @cached_property
    def density(self) -> float:
        """Fraction of tiles that are not empty, 0 to 1."""
        counts = self.counts()
        return (counts.partial + counts.full) / max(1, sum(counts))

    def runs(self, kind: int) -> Runs:
        """Runs of one kind, PARTIAL or FULL."""
        return self._runs_by_kind[kind]

    @cached_property
    def _runs_by_kind(self) -> dict[int, Runs]:
        runs = {}
        for kind in (PARTIAL, FULL):
            of_kind = self.kind == kind
            count = torch.zeros(self.rows + 1, dtype=torch.int32)
            count[1:] = torch.bincount(self._row_of_run[of_kind], minlength=self.rows)
            runs[kind] = Runs(count.cumsum(0, dtype=torch.int32), self.first[of_kind], self.last[of_kind])
        return runs

    @cached_property
    def heavy_first(self) -> Tensor:
        """Rows by descending number of tiles, [rows] int32: launched in this order, no long row is left for the end."""
        return torch.argsort(self.tiles_per_row, descending=True, stable=True).int()

    def to_dense(self) -> Tensor:
        """Kind of each tile, [batch, heads, q_tiles, kv_tiles] int8, for tests and small tables."""
        edge = torch.zeros(self.rows, self.kv_tiles + 1, dtype=torch.int32)
        kind = self.kind.int()
        edge.index_put_((self._row_of_run, self.first), kind, accumulate=True)
        edge.index_put_((self._row_of_run, self.last + 1), -kind, accumulate=True)
        dense = edge.cumsum(1)[:, :-1].to(torch.int8)
        return dense.view(self.batch, self.heads, self.q_tiles, self.kv_tiles)

    @cached_property
    def transposed(self) -> BlockTable:
        """Table with KV tiles as rows, for the dK/dV pass. Its `mask_mod` takes (b, h, kv, q).

        Adjacent rows are compared run by run. Only ranges of columns in which they differ are expanded to single columns, because a
        column changes kind there alone. Cost is proportional to the runs of this table plus the runs of the result.
        """
        gaps = self.q_tiles + 1  # gap i of a head lies before its row i; the last one after all rows
        row, first, last, kind = self._row_of_run, self.first, self.last + 1, self.kind
        gap = row // max(1, self.q_tiles) * gaps + row % max(1, self.q_tiles)
        # Along the columns of a gap, as prefix sums over run edges: kind after the gap minus kind before it, and kind after it.
        key = torch.cat([gap, gap, gap + 1, gap + 1]) * (self.kv_tiles + 1) + torch.cat([first, last, first, last])
        key, order = key.sort()
        excess = torch.cat([kind, -kind, -kind, kind])[order].cumsum(0)
        after = torch.cat([kind, -kind, torch.zeros_like(kind), torch.zeros_like(kind)])[order].cumsum(0)
        width = torch.cat([key.diff(), key.new_zeros(min(1, len(key)))])  # 0 for the last edge of a gap: no run continues past it
        changed = ((excess != 0) & (width > 0)).nonzero()[:, 0]
        key, after, width = key[changed], after[changed], width[changed]

        column, gap = (expand_ranges(key % (self.kv_tiles + 1), width), (key // (self.kv_tiles + 1)).repeat_interleave(width))
        after = after.repeat_interleave(width)
        head, tile = gap // gaps, gap % gaps
        out_row = head * self.kv_tiles + column
        order = (out_row * gaps + tile).argsort()
        out_row, tile, after = out_row[order], tile[order], after[order]
        begins = (after > 0).nonzero()[:, 0]
        return BlockTable(
            q_len=self.kv_len,
            kv_len=self.q_len,
            block=(self.block[1], self.block[0]),
            batch=self.batch,
            heads=self.heads,
            ptr=row_pointers(out_row[begins], self.batch * self.heads * self.kv_tiles),
            first=tile[begins].int(),
            last=(tile[begins + 1] - 1).int(),
            kind=after[begins].to(torch.int8),
            tiles=None if self.tiles is None else (self.tiles[1], self.tiles[0]),
            mask_mod=None if self.mask_mod is None else partial(_swapped, self.mask_mod),
        )

    def select(self, q: Tensor, kv: Tensor, *, heads: range | None = None) -> BlockTable:
        """Table of a selection of tiles, in the given order, without a mask_mod.

        A run is split where its tiles are not consecutive in `kv`. Cost is proportional to the number of runs, not of tiles.

        Args:
            q: Query tiles [n] int64, each at most once.
            kv: KV tiles [m] int64, each at most once.
            heads: Selected heads; all by default. Ignored if the table does not depend on heads.

        Returns:
            A table of n × m tiles per batch row and head.
        """
        heads = heads if heads is not None and self.heads > 1 else range(self.heads)
        starts = torch.ones(len(kv), dtype=torch.bool)
        starts[1:] = kv[1:] != kv[:-1] + 1
        range_start = starts.nonzero()[:, 0]
        low, order = kv[range_start].sort()
        offset = range_start[order] - low  # from a tile of this table to its column in the result
        high = low + torch.diff(range_start, append=torch.tensor([len(kv)]))[order]

        head = torch.arange(self.batch)[:, None] * self.heads + torch.arange(heads.start, heads.stop)
        table_rows = (head.view(-1, 1) * self.q_tiles + q).view(-1)
        count = (self.ptr[table_rows + 1] - self.ptr[table_rows]).long()
        run, row = expand_ranges(self.ptr[table_rows].long(), count), torch.arange(len(table_rows)).repeat_interleave(count)
        first, last, kind = self.first[run].long(), self.last[run].long(), self.kind[run]
        first_range = torch.searchsorted(high, first, right=True)
        pieces = (torch.searchsorted(low, last, right=True) - first_range).clamp(min=0)
        kv_range = expand_ranges(first_range, pieces)
        row, kind = row.repeat_interleave(pieces), kind.repeat_interleave(pieces)
        first = torch.maximum(first.repeat_interleave(pieces), low[kv_range]) + offset[kv_range]
        last = torch.minimum(last.repeat_interleave(pieces), high[kv_range] - 1) + offset[kv_range]

        by_row = (row * (len(kv) + 1) + first).argsort()
        row, first, last, kind = join_neighbours(row[by_row], first[by_row], last[by_row], kind[by_row])
        return BlockTable(
            q_len=len(q) * self.block[0],
            kv_len=len(kv) * self.block[1],
            block=self.block,
            batch=self.batch,
            heads=len(heads),
            ptr=row_pointers(row, len(table_rows)),
            first=first.int(),
            last=last.int(),
            kind=kind,
            tiles=(len(q), len(kv)),
        )

    @classmethod
    def from_block_mask(cls, block_mask: BlockMask) -> BlockTable:
        """Convert a torch BlockMask, in its own block size.

        Args:
            block_mask: The BlockMask. For another block size, use `longspan.mask_mod(block_mask).block_table(…)`.

        Returns:
            A table with the tiles of the BlockMask; its mask_mod accounts for the block lists too.

        Raises:
            ValueError: The BlockMask has fewer rows of tiles than its sequence length needs.
        """
        from longspan._masks.block_mask import table_of_block_mask

        return table_of_block_mask(block_mask)

    def to_block_mask(self, device: torch.device | str = "cpu") -> BlockMask:
        """Convert to a torch BlockMask, which takes 8 · rows · kv_tiles bytes, and as much again for its backward.

        Args:
            device: Device of the BlockMask's tensors.

        Returns:
            A BlockMask with the block size, lengths and mask_mod of this table.
        """
        from torch.nn.attention.flex_attention import BlockMask, noop_mask

        lists: list[Any] = []  # counts and indices of partial tiles, then of full tiles
        for kind in (PARTIAL, FULL):
            ptr, first, last = self.runs(kind)
            length = (last - first + 1).long()
            row = torch.repeat_interleave(torch.arange(self.rows), ptr.diff()).repeat_interleave(length)
            count = torch.bincount(row, minlength=self.rows)
            entry = torch.arange(len(row)) - (count.cumsum(0) - count)[row]
            indices = torch.zeros(self.rows, self.kv_tiles, dtype=torch.int32)
            indices[row, entry] = expand_ranges(first.long(), length).int()
            shape = (self.batch, self.heads, self.q_tiles)
            lists += [count.int().view(shape).to(device), indices.view(*shape, self.kv_tiles).to(device)]
        lengths = (self.q_len, self.kv_len)
        count, indices, full_count, full_indices = lists
        mask_mod = noop_mask if self.mask_mod is None else self.mask_mod
        return BlockMask.from_kv_blocks(
            count, indices, full_count, full_indices, BLOCK_SIZE=self.block, mask_mod=mask_mod, seq_lengths=lengths
        )

    def __repr__(self) -> str:
        batch_and_heads = f", batch {self.batch}, heads {self.heads}" if self.batch * self.heads != 1 else ""
        block = f"{self.block[0]} × {self.block[1]}"
        return (
            f"BlockTable({self.q_len} × {self.kv_len}, block {block}{batch_and_heads}, {len(self.first)} runs, density {self.density:.3g})"
        )

    def __str__(self) -> str:
        return f"{self!r}\n{self.picture()}" if self.rows and self.kv_tiles else repr(self)

    def picture(self, height: int = 32, width: int = 64) -> str:
        """Text picture of the first batch row and head: blank for empty, solid for full, else a shade for the share of non-empty tiles.

        Args:
            height: Largest number of lines; each stands for one or more query tiles.
            width: Largest number of characters per line; each stands for one or more KV tiles.
        """
        height, width = min(height, self.q_tiles), min(width, self.kv_tiles)
        in_first_head = self._row_of_run < self.q_tiles
        line = self._row_of_run[in_first_head] * height // self.q_tiles
        first, end = self.first[in_first_head].long(), self.last[in_first_head].long() + 1
        is_full = self.kind[in_first_head] == FULL
        nonempty, full = torch.zeros(2, height, width, dtype=torch.int64)
        tiles = torch.zeros_like(nonempty)
        q_tiles_per_line = torch.bincount(torch.arange(self.q_tiles) * height // self.q_tiles, minlength=height)
        for x in range(width):
            left, right = -(-x * self.kv_tiles // width), -(-(x + 1) * self.kv_tiles // width)
            overlap = (end.clamp(max=right) - first.clamp(min=left)).clamp(min=0)
            nonempty[:, x].index_add_(0, line, overlap)
            full[:, x].index_add_(0, line, overlap * is_full)
            tiles[:, x] = q_tiles_per_line * (right - left)
        shade = torch.where(nonempty == 0, 0, torch.where(full == tiles, 4, 1 + 3 * nonempty // (tiles + 1)))
        return "\n".join("".join(SHADES[s] for s in line_shades) for line_shades in shade.tolist())


def expand_ranges(first: Tensor, length: Tensor) -> Tensor:
    """Concatenation of the integer ranges first[i] … first[i] + length[i] − 1; first, length [n] int64 → [length.sum()] int64."""
    offset = length.cumsum(0) - length  # of each range in the result
    return torch.arange(int(length.sum())) + (first - offset).repeat_interleave(length)


def _swapped(mask_mod: Callable[..., Any], b: Any, h: Any, kv: Any, q: Any) -> Any:
    """`mask_mod` with its query and key index swapped."""
    return mask_mod(b, h, q, kv)
