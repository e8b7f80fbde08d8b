"""Block tables of selections, made on the device: lists of chosen tiles by query tile, and by KV tile for dK and dV.

    indices ──► bits [B, G, q_tiles, kv_tiles / 32] ──► count runs of each row ──► cumulative sum ──► write runs     forward and dQ
       └──► bits [B, G, kv_tiles, q_tiles / 32] ──► the same over rows of KV tiles                                   dK and dV

Nothing is read on the host: lists have room for as many tiles as a row can have. The mask besides the selection has its block table on the
host; its kinds, a byte per tile, are copied to the device once per table. A chosen tile has the kind that this table gives it.

Legend: B batch, H query heads, G choices, k entries per row. A table has batch dim 1 or B and head dim 1 or H.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan._derived_cache import DerivedCache
from longspan._kernels.gpu.launch import DeviceTable
from longspan._kernels.gpu.prepared_launch import layout_launch
from longspan._kernels.gpu.uploads import note_upload
from longspan._kernels.protocol import AttentionInputs, Selection, Work
from longspan._masks.block_table import PARTIAL, BlockTable
from longspan._torch_modes import default_modes

_kinds: DerivedCache[BlockTable, tuple[Tensor, Tensor]] = DerivedCache(4)  # by device


@triton.jit
def bit_of(bits, row, columns, count, WORDS: tl.constexpr):
    """Whether each of `columns` is chosen in a row of bits; False outside of [0, count)."""
    inside = (columns >= 0) & (columns < count)
    word = tl.load(bits + row * WORDS + columns // 32, mask=inside, other=0)
    return inside & (((word >> (columns % 32)) & 1) != 0)


@triton.jit
def kinds_of(kinds, chosen, columns):
    """The kind of each of `columns`: 0 if not chosen."""
    return tl.load(kinds + columns, mask=chosen, other=0).to(tl.int32)


@triton.jit
def runs_kernel(
    bits, kinds, ptr, counts, first, last, sizes, bits_sizes, kind_sizes,
    WORDS: tl.constexpr, C: tl.constexpr, COPIES: tl.constexpr, WRITE: tl.constexpr, DUMMY: tl.constexpr,
):  # fmt: skip
    """Runs of one row of tiles, for `copies` heads: their number with WRITE False, then, given `ptr`, the runs themselves.

    sizes: (rows of tiles, columns, heads of the grid, copies, stride of ptr). bits_sizes: (batch, choices, heads of the grid per choice).
    kind_sizes: (batch, heads). ptr: partial, then full. COPIES: `copies`, to the next power of two. DUMMY: a row without tiles gets a
    partial tile past the last key.
    """
    tiles, count, heads, copies, ptr_stride = sizes
    batch_rows, choices, per_choice = bits_sizes
    pid = tl.program_id(0)
    tile = pid % tiles
    h = (pid // tiles) % heads
    b = pid // (tiles * heads)
    row = (((b % batch_rows) * choices + (h // per_choice) % choices) * tiles + tile).to(tl.int64)
    kind_row = ((b % kind_sizes[0]) * kind_sizes[1] + h % kind_sizes[1]) * tiles + tile
    columns = tl.arange(0, C)
    kinds += kind_row.to(tl.int64) * count
    here = kinds_of(kinds, bit_of(bits, row, columns, count, WORDS), columns)
    before = kinds_of(kinds, bit_of(bits, row, columns - 1, count, WORDS), columns - 1)
    partials = tl.sum((here == 1).to(tl.int32), 0)
    fulls = tl.sum((here == 2).to(tl.int32), 0)
    begins = (here != before) & (here > 0)
    dummy = DUMMY & (partials + fulls == 0)
    each = tl.arange(0, COPIES)
    tables = (b * heads * copies + h * copies + each) * tiles + tile
    if WRITE:
        after = kinds_of(kinds, bit_of(bits, row, columns + 1, count, WORDS), columns + 1)
        ends = (here != after) & (here > 0)
        for kind in tl.static_range(1, 3):
            begin, end = begins & (here == kind), ends & (here == kind)
            begin_at = tl.cumsum(begin.to(tl.int32), 0) - 1
            end_at = tl.cumsum(end.to(tl.int32), 0) - 1
            starts = tl.load(ptr + (kind - 1) * ptr_stride + tables, mask=each < copies, other=0)  # all at once: a load takes long
            for copy in range(copies):
                at = tl.sum(tl.where(each == copy, starts, 0), 0)
                tl.store(first + at + begin_at, columns, mask=begin)
                tl.store(last + at + end_at, columns, mask=end)
                if DUMMY and kind == 1:
                    tl.store(first + at, count, mask=dummy)
                    tl.store(last + at, count, mask=dummy)
    else:
        extra = dummy.to(tl.int32)
        partial_runs = tl.sum((begins & (here == 1)).to(tl.int32), 0) + extra
        full_runs = tl.sum((begins & (here == 2)).to(tl.int32), 0)
        tl.store(ptr + tables + 1, partial_runs, mask=each < copies)
        tl.store(ptr + ptr_stride + tables + 1, full_runs, mask=each < copies)
        tl.store(counts + 2 * tables, partials + extra, mask=each < copies)
        tl.store(counts + 2 * tables + 1, fulls, mask=each < copies)


@triton.jit
def bits_kernel(indices, bits, rows, tiles, per_row, columns, words, K: tl.constexpr, KP: tl.constexpr, BY_QUERY: tl.constexpr):
    """Set the bits of the KV tiles that a query tile chooses in its row, or, not BY_QUERY, its bit in the rows of these KV tiles.

    One CTA per choice and query tile. columns: KV tiles. words: of a row of bits.
    """
    pid = tl.program_id(0)
    tile = pid % tiles
    choice = (pid // tiles).to(tl.int64)
    j = tl.arange(0, KP)
    column = tl.load(indices + (choice * rows + tile // per_row) * K + j, mask=j < K, other=-1)
    chosen = (column >= 0) & (column < columns)
    if BY_QUERY:
        word, bit = (choice * tiles + tile) * words + column // 32, 1 << (column & 31)
    else:
        word, bit = (choice * columns + column) * words + tile // 32, 1 << (tile % 32)
    tl.atomic_or(bits + word, bit, mask=chosen, sem="relaxed")


@dataclass(kw_only=True, eq=False)
class SelectedTables:
    """The device tables of one selection, each made when a pass first needs it.

    Attributes:
        selection: The chosen blocks, of the size of this table's KV tiles.
        table: Block table of the mask besides the selection.
        batch, heads: Dims of the device tables.
        dummy: Whether rows without tiles get a tile past the last key: the Hopper forward kernel needs one.
    """

    selection: Selection
    table: BlockTable
    batch: int
    heads: int
    dummy: bool
    _rows: DeviceTable | None = field(default=None, init=False)
    _columns: DeviceTable | None = field(default=None, init=False)

    @property
    def signature(self) -> Hashable:
        """Properties on which launches depend; the addresses of the tables are not among them."""
        return self.dummy

    def of_pass(self, *, by_query: bool, shared: int) -> DeviceTable:
        """The table by query tile, or by KV tile. shared: query heads of an item of the pass over KV tiles."""
        if by_query:
            if self._rows is None:
                order = _descending(self.batch * self.heads * self.table.q_tiles, self.selection.indices.device)
                self._rows = self._build(by_query=True)._replace(order=order)
            return self._rows
        if self._columns is None:
            self._columns = self._build(by_query=False)
        tiles, shared = self.table.kv_tiles, shared if self.heads > 1 else 1
        work = self._columns.counts[: 2 * self.batch * self.heads * tiles].view(self.batch, self.heads // shared, shared, tiles, 2)
        return self._columns._replace(order=work.sum((2, 4), dtype=torch.int32).flatten().argsort(descending=True).int())

    def _build(self, *, by_query: bool) -> DeviceTable:
        selection, table = self.selection, self.table
        indices, device = selection.indices, selection.indices.device
        batch_rows, choices, source_rows, k = indices.shape
        # Heads with the same choice and the same kinds have copies of one row.
        grid_heads = self.heads if table.heads > 1 else min(choices, self.heads)
        copies, per_choice = self.heads // grid_heads, grid_heads // min(choices, grid_heads)
        tiles, columns = (table.q_tiles, table.kv_tiles) if by_query else (table.kv_tiles, table.q_tiles)
        rows, words = self.batch * self.heads * tiles, -(-columns // 32)
        room = self.batch * self.heads * table.q_tiles * min(k, table.kv_tiles)
        bits = torch.zeros(batch_rows * choices * tiles * words, dtype=torch.int32, device=device)
        _launch(bits_kernel, batch_rows * choices * table.q_tiles if k else 0, {"indices": indices, "bits": bits}, {
            "rows": source_rows, "tiles": table.q_tiles, "per_row": selection.q_granularity // table.block[0], "columns": table.kv_tiles,
            "words": words, "K": k, "KP": triton.next_power_of_2(k), "BY_QUERY": by_query,
        })  # fmt: skip
        stride = (rows + 8) // 4 * 4
        ptr = torch.zeros(2, stride, dtype=torch.int32, device=device)
        counts = torch.empty(2 * rows + 4, dtype=torch.int32, device=device)
        # Runs of both kinds are in one list, partial ones first: a sum over one long dim is faster than two sums.
        lists = torch.empty(2, (room + (rows if self.dummy else 0) + 4) // 4 * 4, dtype=torch.int32, device=device)
        kinds = _device_kinds(table, device)[0 if by_query else 1]
        tensors = {"bits": bits, "kinds": kinds, "ptr": ptr, "counts": counts, "first": lists[0], "last": lists[1]}
        constants = {
            "sizes": (tiles, columns, grid_heads, copies, stride), "bits_sizes": (batch_rows, choices, per_choice),
            "kind_sizes": (table.batch, table.heads), "WORDS": words, "C": triton.next_power_of_2(columns),
            "COPIES": triton.next_power_of_2(copies), "DUMMY": self.dummy and by_query,
        }  # fmt: skip
        ctas = self.batch * grid_heads * tiles
        _launch(runs_kernel, ctas, tensors, {**constants, "WRITE": False})
        ptr = tensors["ptr"] = ptr.flatten().cumsum(0, dtype=torch.int32).view(2, stride)
        _launch(runs_kernel, ctas, tensors, {**constants, "WRITE": True})
        return DeviceTable(counts, (ptr[1], lists[0], lists[1]), (ptr[0], lists[0], lists[1]), counts)


def _launch(kernel: Any, ctas: int, tensors: Mapping[str, Tensor], constants: dict[str, Any]) -> None:
    if ctas:
        layout_launch(kernel, tensors, constants, ctas)(tensors, {})


@lru_cache(maxsize=64)
def _descending(rows: int, device: torch.device) -> Tensor:
    """Rows from the last to the first: under a causal mask, rows of later queries may have more tiles."""
    order = torch.arange(rows - 1, -1, -1, dtype=torch.int32, device=device)
    note_upload(order)
    return order


def _device_kinds(table: BlockTable, device: torch.device) -> tuple[Tensor, Tensor]:
    """Kinds of a table's tiles [batch, heads, q_tiles, kv_tiles] uint8 on the device, and the same with the last dims swapped."""

    def copy() -> tuple[Tensor, Tensor]:
        kinds = table.to_dense().to(torch.uint8).to(device)
        swapped = kinds.mT.contiguous()
        note_upload(kinds)
        note_upload(swapped)
        return kinds, swapped

    return _kinds.get(table, device, copy)


@lru_cache(maxsize=64)
@default_modes()
def _stand_in(lengths: tuple[int, int], block: tuple[int, int], batch: int, heads: int, tiles_per_row: int) -> BlockTable:
    """A host table with as many tiles per row as a selection may have. Tile sizes and launches are chosen for it, and cached with it."""
    q_len, kv_len = lengths
    q_tiles, kv_tiles = -(-q_len // block[0]), -(-kv_len // block[1])
    tiles_per_row = min(tiles_per_row, kv_tiles)
    table = _uniform_table(lengths, block, (batch, heads, q_tiles), tiles_per_row)
    per_column = min(q_tiles, -(-q_tiles * tiles_per_row // max(1, kv_tiles)))
    table.__dict__["transposed"] = _uniform_table(lengths[::-1], block[::-1], (batch, heads, kv_tiles), per_column)
    return table


def _uniform_table(lengths: tuple[int, int], block: tuple[int, int], dims: tuple[int, int, int], tiles: int) -> BlockTable:
    batch, heads, row_tiles = dims
    first = torch.zeros(batch * heads * row_tiles if tiles else 0, dtype=torch.int32)
    ptr = torch.arange(batch * heads * row_tiles + 1, dtype=torch.int32) if tiles else torch.zeros(batch * heads * row_tiles + 1).int()
    kind = torch.full_like(first, PARTIAL, dtype=torch.int8)
    return BlockTable(
        q_len=lengths[0], kv_len=lengths[1], block=block, batch=batch, heads=heads, ptr=ptr, first=first, last=first + max(0, tiles - 1),
        kind=kind,
    )  # fmt: skip


def tile_of(selection: Selection) -> tuple[int, int] | None:
    """The tile size (queries, KV) of which a selection chooses whole tiles; None if its blocks are too small for tiles."""
    if selection.granularity < 64 or selection.q_granularity < 64:
        return None
    return min(128, selection.q_granularity), selection.granularity


def tiled_work(inputs: AttentionInputs, work: Work, selection: Selection, *, dummy: bool) -> Work:
    """`work` over the chosen tiles only. The table of `work`: of the mask besides the selection."""
    table, heads = work.table, inputs.q.shape[1]
    choices = selection.indices.shape[1]
    table_heads = heads if choices > 1 or table.heads > 1 else 1
    batch = max(table.batch, selection.indices.shape[0])
    tables = SelectedTables(
        selection=replace(selection, indices=selection.indices.contiguous()), table=table, batch=batch, heads=table_heads, dummy=dummy
    )  # fmt: skip
    stand_in = _stand_in((table.q_len, table.kv_len), table.block, batch, table_heads, max(1, selection.indices.shape[3]))
    return replace(work, table=stand_in, device_tables=tables)
