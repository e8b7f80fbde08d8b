"""Block tables: for each tile of queries, the key tiles that are empty, partial or full, as runs.

Shapes: rows = batch · heads · q_tiles, row r = (b · heads + h) · q_tiles + i.  A dim that the mask does not depend on has size 1.
A row's runs are `first[ptr[r]:ptr[r+1]]`, … in ascending order; tiles in no run are empty. `last` is inclusive.
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

BLOCK_SIZE = 128  # tokens per side of a tile, unless a caller asks for another size
EMPTY, PARTIAL, FULL = 0, 1, 2
SHADES = " ░▒▓█"


class Counts(NamedTuple):
    """How many tiles of each kind."""

    empty: int
    partial: int
    full: int


class Runs(NamedTuple):
    """The runs of one kind, row by row (CSR): tiles first[i] … last[i] for ptr[r] <= i < ptr[r + 1]. All int32."""

    ptr: Tensor
    first: Tensor
    last: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockTable:
    """Which tiles of a q_len × kv_len attention exist. Never holds anything of size q_tiles × kv_tiles."""

    q_len: int
    kv_len: int
    block: tuple[int, int]
    batch: int = 1
    heads: int = 1
    ptr: Tensor
    first: Tensor
    last: Tensor
    kind: Tensor
    tiles: tuple[int, int] | None = None  # tiles of queries and of keys, where they do not simply follow each other block by block
    mask_mod: Callable[..., Any] | None = None

    @property
    def q_tiles(self) -> int:
        return -(-self.q_len // self.block[0]) if self.tiles is None else self.tiles[0]

    @property
    def kv_tiles(self) -> int:
        return -(-self.kv_len // self.block[1]) if self.tiles is None else self.tiles[1]

    @property
    def rows(self) -> int:
        return self.batch * self.heads * self.q_tiles

    @cached_property
    def _row_of_run(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(self.rows), self.ptr.diff().long())

    @cached_property
    def tiles_per_row(self) -> Tensor:
        """Non-empty tiles of each row [rows], int64: the row's work."""
        length = (self.last - self.first + 1).long()
        return torch.zeros(self.rows, dtype=torch.int64).index_add_(0, self._row_of_run, length)

    def counts(self) -> Counts:
        return self._counts

    @cached_property
    def _counts(self) -> Counts:
        length = (self.last - self.first + 1).long()
        partial = int(length[self.kind == PARTIAL].sum())
        full = int(length[self.kind == FULL].sum())
        return Counts(empty=self.rows * self.kv_tiles - partial - full, partial=partial, full=full)

    @cached_property
    def density(self) -> float:
        """Share of tiles that are computed, 0 to 1."""
        counts = self.counts()
        return (counts.partial + counts.full) / max(1, sum(counts))

    def runs(self, kind: int) -> Runs:
        """The runs of one kind alone."""
        return self._runs_by_kind[kind]

    @cached_property
    def _runs_by_kind(self) -> dict[int, Runs]:
        out = {}
        for kind in (PARTIAL, FULL):
            keep = self.kind == kind
            count = torch.zeros(self.rows + 1, dtype=torch.int32)
            count[1:] = torch.bincount(self._row_of_run[keep], minlength=self.rows)
            out[kind] = Runs(count.cumsum(0, dtype=torch.int32), self.first[keep].int(), self.last[keep].int())
        return out

    @cached_property
    def heavy_first(self) -> Tensor:
        """All rows, most work first [rows], int32: the order in which to start them so that no long row comes last."""
        return torch.argsort(self.tiles_per_row, descending=True, stable=True).int()

    def to_dense(self) -> Tensor:
        """Kinds as a tensor [batch, heads, q_tiles, kv_tiles], int8: for tests and small tables only."""
        edge = torch.zeros(self.rows, self.kv_tiles + 1, dtype=torch.int32)
        kind = self.kind.int()
        edge.index_put_((self._row_of_run, self.first.long()), kind, accumulate=True)
        edge.index_put_((self._row_of_run, self.last.long() + 1), -kind, accumulate=True)
        dense = edge.cumsum(1)[:, :-1].to(torch.int8)
        return dense.view(self.batch, self.heads, self.q_tiles, self.kv_tiles)

    @cached_property
    def transposed(self) -> BlockTable:
        """The same tiles, key tiles as rows: what the backward pass over keys walks. `mask_mod` then takes (b, h, kv, q).

        A column changes kind only between rows that differ there. Neighbouring rows are compared run by run, and only
        where they differ is a stretch of columns taken apart: the cost follows the runs here and those of the result.
        """
        gaps = self.q_tiles + 1  # gap i of a head lies before its row i; the last one after all rows
        row, first, last, kind = self._row_of_run, self.first.long(), self.last.long() + 1, self.kind.long()
        gap = row // max(1, self.q_tiles) * gaps + row % max(1, self.q_tiles)
        # Along a gap's columns: how much the row after it exceeds the row before it, and the kind after it, as sums of edges.
        key = torch.cat([gap, gap, gap + 1, gap + 1]) * (self.kv_tiles + 1) + torch.cat([first, last, first, last])
        key, order = key.sort()
        excess = torch.cat([kind, -kind, -kind, kind])[order].cumsum(0)
        after = torch.cat([kind, -kind, torch.zeros_like(kind), torch.zeros_like(kind)])[order].cumsum(0)
        width = torch.cat([key.diff(), key.new_zeros(min(1, len(key)))])  # every run has ended when a gap's columns have
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
        """The table of some tiles: query tiles q and key tiles kv (int64, each at most once) in the order given, of some heads.

        A run is cut where its tiles do not follow each other among `kv`; the cost follows the runs, not the tiles.
        """
        heads = heads if heads is not None and self.heads > 1 else range(self.heads)
        starts = torch.ones(len(kv), dtype=torch.bool)
        starts[1:] = kv[1:] != kv[:-1] + 1
        at = starts.nonzero()[:, 0]
        low, order = kv[at].sort()
        offset = at[order] - low  # from a tile's number to its column
        high = low + torch.diff(at, append=torch.tensor([len(kv)]))[order]

        head = torch.arange(self.batch)[:, None] * self.heads + torch.arange(heads.start, heads.stop)
        rows = (head.view(-1, 1) * self.q_tiles + q).view(-1)
        count = (self.ptr[rows + 1] - self.ptr[rows]).long()
        run, row = expand_ranges(self.ptr[rows].long(), count), torch.arange(len(rows)).repeat_interleave(count)
        first, last, kind = self.first[run].long(), self.last[run].long(), self.kind[run]
        begin = torch.searchsorted(high, first, right=True)
        pieces = (torch.searchsorted(low, last, right=True) - begin).clamp(min=0)
        part = expand_ranges(begin, pieces)
        row, kind = row.repeat_interleave(pieces), kind.repeat_interleave(pieces)
        first = torch.maximum(first.repeat_interleave(pieces), low[part]) + offset[part]
        last = torch.minimum(last.repeat_interleave(pieces), high[part] - 1) + offset[part]

        by_row = (row * (len(kv) + 1) + first).argsort()
        row, first, last, kind = join_neighbours(row[by_row], first[by_row], last[by_row], kind[by_row])
        return BlockTable(
            q_len=len(q) * self.block[0],
            kv_len=len(kv) * self.block[1],
            block=self.block,
            batch=self.batch,
            heads=len(heads),
            ptr=row_pointers(row, len(rows)),
            first=first.int(),
            last=last.int(),
            kind=kind,
            tiles=(len(q), len(kv)),
        )

    @classmethod
    def from_block_mask(cls, block_mask: BlockMask) -> BlockTable:
        """The tiles that torch's BlockMask lists, in its own block size. For another size: `mask_mod(block_mask).block_table(…)`."""
        from longspan._masks.block_mask import table_of_block_mask

        return table_of_block_mask(block_mask)

    def to_block_mask(self, device: torch.device | str = "cpu") -> BlockMask:
        """The same table as torch's BlockMask. It lists tiles densely: 8 bytes · rows · kv_tiles, and as much for its backward."""
        from torch.nn.attention.flex_attention import BlockMask, noop_mask

        listed: list[Any] = []
        for kind in (PARTIAL, FULL):
            ptr, first, last = self.runs(kind)
            length = (last - first + 1).long()
            row = torch.repeat_interleave(torch.arange(self.rows), ptr.diff().long()).repeat_interleave(length)
            count = torch.bincount(row, minlength=self.rows)
            place = torch.arange(len(row)) - (count.cumsum(0) - count)[row]
            indices = torch.zeros(self.rows, self.kv_tiles, dtype=torch.int32)
            indices[row, place] = expand_ranges(first.long(), length).int()
            shape = (self.batch, self.heads, self.q_tiles)
            listed += [count.int().view(shape).to(device), indices.view(*shape, self.kv_tiles).to(device)]
        lengths = (self.q_len, self.kv_len)
        count, indices, full_count, full_indices = listed
        mask_mod = noop_mask if self.mask_mod is None else self.mask_mod
        return BlockMask.from_kv_blocks(
            count, indices, full_count, full_indices, BLOCK_SIZE=self.block, mask_mod=mask_mod, seq_lengths=lengths
        )

    def __repr__(self) -> str:
        many = f", batch {self.batch}, heads {self.heads}" if self.batch * self.heads != 1 else ""
        block = f"{self.block[0]} × {self.block[1]}"
        return f"BlockTable({self.q_len} × {self.kv_len}, block {block}{many}, {len(self.first)} runs, density {self.density:.3g})"

    def __str__(self) -> str:
        return f"{self!r}\n{self.picture()}" if self.rows and self.kv_tiles else repr(self)

    def picture(self, height: int = 32, width: int = 64) -> str:
        """The first batch row and head in shades: blank for empty, solid for full, between them by the share of tiles computed."""
        height, width = min(height, self.q_tiles), min(width, self.kv_tiles)
        here = self._row_of_run < self.q_tiles
        line = self._row_of_run[here] * height // self.q_tiles
        first, last, full = self.first[here].long(), self.last[here].long() + 1, self.kind[here] == FULL
        some, whole = torch.zeros(2, height, width, dtype=torch.int64)
        tiles = torch.zeros_like(some)
        tall = torch.bincount(torch.arange(self.q_tiles) * height // self.q_tiles, minlength=height)
        for x in range(width):
            left, right = -(-x * self.kv_tiles // width), -(-(x + 1) * self.kv_tiles // width)
            overlap = (last.clamp(max=right) - first.clamp(min=left)).clamp(min=0)
            some[:, x].index_add_(0, line, overlap)
            whole[:, x].index_add_(0, line, overlap * full)
            tiles[:, x] = tall * (right - left)
        shade = torch.where(some == 0, 0, torch.where(whole == tiles, 4, 1 + (3 * some // (tiles + 1)).clamp(max=2)))
        return "\n".join("".join(SHADES[s] for s in row) for row in shade.tolist())


def expand_ranges(first: Tensor, length: Tensor) -> Tensor:
    """Concatenation of the integer ranges first[i] … first[i] + length[i] − 1; first, length [n] int64 → [length.sum()] int64."""
    offset = length.cumsum(0) - length  # of each range in the result
    return torch.arange(int(length.sum())) + (first - offset).repeat_interleave(length)


def _swapped(mask_mod: Callable[..., Any], b: Any, h: Any, kv: Any, q: Any) -> Any:
    return mask_mod(b, h, q, kv)
