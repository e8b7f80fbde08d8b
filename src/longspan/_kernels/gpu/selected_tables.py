"""Block tables of selections, made on the device: lists of chosen tiles by query tile, and by KV tile for dK and dV.

    indices ──► rows_kernel: distinct chosen tiles of a query tile, ascending by kind                                 forward and dQ
       └──► bits [B, G, kv_tiles, q_tiles / 32] ──► columns_kernel: query tiles of a KV tile ──► order_kernel       dK and dV

Nothing is read on the host: lists have room for as many tiles as a row can have. The mask besides the selection has its block table on the
host; its kinds, a byte per tile, are copied to the device once per table. A chosen tile has the kind that this table gives it. Heads with
the same choice and the same kinds share lists.

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
_RANKED, _COMPARED = 64, 128  # KV tiles that a CTA of `order_kernel` ranks, and compares with at a time
_NARROW_KEYS = 2**31  # below it, keys of `order_kernel` have 32 bits
_ENTRIES = 1024  # entries of indices that a CTA of `bits_kernel` reads
_ONE_WARP = 32  # entries of a row of indices that one warp of `rows_kernel` compares
# KV tiles of each KV head, as a share, whose items of all heads come first. The longest items of the last head would start when all others
# end; the other items of a head come together, so that they read the same queries and add to the same dQ in L2. H200, 131k tokens, backward
# TFLOP/s with 1/8, 1/128, 1/512 and 1/1024: blocks of 128 433, 461, 453, 454; blocks of 64 with 1/8, 1/128 and 1/2048: 387, 403, 395.
_HEAVY_SHARE = 128


@triton.jit
def _row_of(pid, tiles, heads, sizes):
    """(tile, head of the grid, batch row, row of the choice without its tile) of a CTA. sizes: (batch, choices, heads per choice)."""
    tile = pid % tiles
    h = (pid // tiles) % heads
    b = pid // (tiles * heads)
    return tile, h, b, ((b % sizes[0]) * sizes[1] + (h // sizes[2]) % sizes[1]).to(tl.int64)


@triton.jit
def _store_row(partial, full, counts, rows, begin, partials, fulls, inside):
    """Store begin, end and numbers of a row's partial and full runs for table rows `rows`."""
    tl.store(partial + 2 * rows, begin + rows * 0, mask=inside)
    tl.store(partial + 2 * rows + 1, begin + partials + rows * 0, mask=inside)
    tl.store(full + 2 * rows, begin + partials + rows * 0, mask=inside)
    tl.store(full + 2 * rows + 1, begin + partials + fulls + rows * 0, mask=inside)
    tl.store(counts + 2 * rows, partials + rows * 0, mask=inside)
    tl.store(counts + 2 * rows + 1, fulls + rows * 0, mask=inside)


@triton.jit
def rows_kernel(
    indices, kinds, partial, full, counts, listed, sizes, choice_sizes, kind_sizes, room,
    K: tl.constexpr, KP: tl.constexpr, J: tl.constexpr, COPIES: tl.constexpr, DUMMY: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """The list of one query tile, partial tiles first, for `copies` heads.

    sizes: (query tiles, KV tiles, heads of the grid, copies, rows of the choice, query tiles per row). choice_sizes: of `_row_of`.
    kind_sizes: (batch, heads). room: of a row's list. KP, COPIES: k and `copies`, to the next power of two. J: entries compared at a time.
    DUMMY: a row without tiles gets a partial tile past the last key. PAIRS: a run is two entries of the list. A list of odd length begins
    with a tile past the last key; a run with a partial entry, or with such a tile, is partial.
    """
    tiles, columns, heads, copies, source_rows, per_row = sizes
    pid = tl.program_id(0)
    tile, h, b, choice = _row_of(pid, tiles, heads, choice_sizes)
    indices += (choice * source_rows + tile // per_row) * K
    kinds += (((b % kind_sizes[0]) * kind_sizes[1] + h % kind_sizes[1]) * tiles + tile).to(tl.int64) * columns
    i = tl.arange(0, KP)
    own = tl.load(indices + i, mask=i < K, other=-1).to(tl.int32)
    kind = tl.load(kinds + own, mask=(own >= 0) & (own < columns), other=0).to(tl.int32)
    repeats, partial_rank, full_rank = i * 0, i * 0, i * 0
    for first in range(0, K, J):
        j = first + tl.arange(0, J)
        other = tl.load(indices + j, mask=j < K, other=-1).to(tl.int32)
        other_kind = tl.load(kinds + other, mask=(other >= 0) & (other < columns), other=0).to(tl.int32)
        same, later = own[:, None] == other[None, :], i[:, None] > j[None, :]
        repeats += tl.sum((same & later).to(tl.int32), 1)
        other_kind = tl.where(tl.sum((same & (i[:, None] < j[None, :])).to(tl.int32), 0) > 0, 0, other_kind)
        below = other[None, :] < own[:, None]
        partial_rank += tl.sum((below & (other_kind == 1)[None, :]).to(tl.int32), 1)
        full_rank += tl.sum((below & (other_kind == 2)[None, :]).to(tl.int32), 1)
    kind = tl.where(repeats > 0, 0, kind)
    partials, fulls = tl.sum((kind == 1).to(tl.int32), 0), tl.sum((kind == 2).to(tl.int32), 0)
    entries = partials + fulls
    fill = tl.where(DUMMY & (entries == 0), 2 if PAIRS else 1, entries % 2 if PAIRS else 0)
    listed += pid.to(tl.int64) * room
    tl.store(listed + fill + tl.where(kind == 1, partial_rank, partials + full_rank), own, mask=kind > 0)
    each = tl.arange(0, COPIES)
    tl.store(listed + each, columns + each * 0, mask=each < tl.minimum(fill, 1))
    if PAIRS:
        tl.store(listed + 1 + each, columns + each * 0, mask=each < fill - 1)
    begin, partial_runs, runs = pid * room, partials + fill, entries + fill
    if PAIRS:
        begin, partial_runs, runs = begin // 2, (partial_runs + 1) // 2, runs // 2
    rows = ((b * heads + h) * copies + each) * tiles + tile
    _store_row(partial, full, counts, rows, begin, partial_runs, runs - partial_runs, each < copies)


@triton.jit
def bits_kernel(indices, bits, entries, rows, tiles, per_row, columns, words, K: tl.constexpr, E: tl.constexpr):
    """Set the bits of query tiles in the rows of the KV tiles that they choose.

    One CTA per E of the `entries` of all choices and query tiles. columns: KV tiles. words: of a row of bits.
    """
    e = tl.program_id(0) * E + tl.arange(0, E)
    tile = (e // K) % tiles
    choice = (e // K // tiles).to(tl.int64)
    column = tl.load(indices + (choice * rows + tile // per_row) * K + e % K, mask=e < entries, other=-1)
    chosen = (column >= 0) & (column < columns)
    tl.atomic_or(bits + (choice * columns + column) * words + tile // 32, 1 << (tile % 32), mask=chosen, sem="relaxed")


@triton.jit
def _lowest(words):
    """(the lowest set bit of each word, its number); 0 and a negative number for 0. words: uint32."""
    bit = words & (0 - words)
    return bit, (bit.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # the exponent of a power of two


@triton.jit
def _set_bits(words):
    """The number of set bits of each word, int32. words: uint32."""
    pairs = words - ((words >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    bytes_ = (fours + (fours >> 4)) & 0x0F0F0F0F
    halves = bytes_ + (bytes_ >> 8)
    return ((halves + (halves >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def _list_bits(listed, w, words, number):
    """Store the numbers of the set bits of words w, ascending. number: of set bits in each."""
    at = tl.cumsum(number, 0) - number
    for _ in range(tl.max(number, 0)):
        bit, place = _lowest(words)
        tl.store(listed + at, w * 32 + place, mask=words != 0)
        at += 1
        words = words ^ bit


@triton.jit
def columns_kernel(
    bits, used, kinds, partial, full, counts, listed, sizes, choice_sizes, kind_sizes,
    WORDS: tl.constexpr, W: tl.constexpr, COPIES: tl.constexpr, DUMMY: tl.constexpr,
):  # fmt: skip
    """The list of one KV tile, partial tiles first, for `copies` heads.

    sizes: (KV tiles, query tiles, heads of the grid, copies). choice_sizes, kind_sizes, DUMMY: of `rows_kernel`. used: entries of `listed`
    that other CTAs took. bits: None if all tiles are chosen. WORDS: of a row of bits, a bit per query tile. W: to the next power of two.
    """
    tiles, columns, heads, copies = sizes
    tile, h, b, choice = _row_of(tl.program_id(0), tiles, heads, choice_sizes)
    kinds += (((b % kind_sizes[0]) * kind_sizes[1] + h % kind_sizes[1]) * tiles + tile).to(tl.int64) * columns
    w = tl.arange(0, W)
    if bits is None:
        i = tl.arange(0, 32)[None, :]
        c = w[:, None] * 32 + i
        kind = tl.load(kinds + c, mask=c < columns, other=0)
        is_partial = tl.sum(tl.where(kind == 1, 1 << i, 0), 1).to(tl.uint32, bitcast=True)
        is_full = tl.sum(tl.where(kind == 2, 1 << i, 0), 1).to(tl.uint32, bitcast=True)
    else:
        rest = tl.load(bits + (choice * tiles + tile) * WORDS + w, mask=w < WORDS, other=0).to(tl.uint32, bitcast=True)
        is_partial, is_full = rest & 0, rest & 0
        for _ in range(tl.max(_set_bits(rest), 0)):
            bit, place = _lowest(rest)
            kind = tl.load(kinds + w * 32 + place, mask=rest != 0, other=0)
            is_partial |= tl.where(kind == 1, bit, 0)
            is_full |= tl.where(kind == 2, bit, 0)
            rest = rest ^ bit
    partials_of, fulls_of = _set_bits(is_partial), _set_bits(is_full)
    partials, fulls = tl.sum(partials_of, 0), tl.sum(fulls_of, 0)
    fill = tl.where(DUMMY & (partials + fulls == 0), 1, 0)
    begin = tl.atomic_add(used, partials + fulls + fill, sem="relaxed")
    _list_bits(listed + begin, w, is_partial, partials_of)
    _list_bits(listed + begin + partials, w, is_full, fulls_of)
    each = tl.arange(0, COPIES)
    tl.store(listed + begin + each, columns + each * 0, mask=each < fill)
    rows = ((b * heads + h) * copies + each) * tiles + tile
    _store_row(partial, full, counts, rows, begin, partials + fill, fulls, each < copies)


@triton.jit
def _order_key(counts, group, tile, tiles, shared, summed, WIDE: tl.constexpr):
    """A key of a KV tile, greater for more work and, of equal work, for earlier tiles; least past the last tile.

    Work: tiles of the rows of the KV tile, over the first `summed` of the `shared` query heads of a group. WIDE: 32 bits do not suffice.
    """
    total = tile * 0
    for head in range(summed):
        row = (group * shared + head) * tiles + tile
        total += tl.load(counts + 2 * row, mask=tile < tiles, other=0) + tl.load(counts + 2 * row + 1, mask=tile < tiles, other=0)
    if WIDE:
        total = total.to(tl.int64)
    return tl.where(tile < tiles, total * tiles + (tiles - tile), 0)


@triton.jit
def order_kernel(
    counts, order, tiles, groups, shared, summed, heavy, T: tl.constexpr, J: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Rows of (group of query heads, KV tile) in launch order: the `heavy` longest of each group, then group after group, longest first.

    One CTA per group and T KV tiles, which it compares with J at a time. counts: of a table by KV tile. shared, summed, WIDE: of
    `_order_key`.
    """
    blocks = tl.cdiv(tiles, T)
    group = tl.program_id(0) // blocks
    tile = (tl.program_id(0) % blocks) * T + tl.arange(0, T)
    own = _order_key(counts, group, tile, tiles, shared, summed, WIDE)[:, None]
    j = tl.arange(0, J)[None, :]
    greater = tl.zeros([T, J], tl.int32)
    for first in range(0, tiles, J):  # sums over threads after the loop: one exchange between threads, not one per step
        greater += (_order_key(counts, group, first + j, tiles, shared, summed, WIDE) > own).to(tl.int32)
    rank = tl.sum(greater, 1)
    at = tl.where(rank < heavy, rank * groups + group, heavy * groups + group * (tiles - heavy) + rank - heavy)
    tl.store(order + at, group * tiles + tile, mask=tile < tiles)


@dataclass(kw_only=True, eq=False)
class SelectedTables:
    """The device tables of one selection, each made when a pass first needs it.

    Attributes:
        selection: The chosen blocks, of the size of this table's KV tiles.
        table: Block table of the mask besides the selection.
        batch, heads: Dims of the device tables.
        dummy: Whether rows without tiles get a tile past the last key: the Hopper forward kernel needs one.
        kv_pairs: Whether a run of a query tile's list is two KV tiles (`rows_kernel`).
        head_pairs: Whether an item is a query tile of two heads: the order of query tiles has the first of them.
    """

    selection: Selection
    table: BlockTable
    batch: int
    heads: int
    dummy: bool
    kv_pairs: bool = False
    head_pairs: bool = False
    _rows: DeviceTable | None = field(default=None, init=False)
    _columns: DeviceTable | None = field(default=None, init=False)

    @property
    def signature(self) -> Hashable:
        """Properties on which launches depend; the addresses of the tables are not among them."""
        return self.dummy, self.kv_pairs, self.head_pairs

    def of_pass(self, *, by_query: bool, shared: int) -> DeviceTable:
        """The table by query tile, or by KV tile. shared: query heads of an item of the pass over KV tiles."""
        if by_query:
            if self._rows is None:
                self._rows = self._by_query()
            return self._rows
        if self._columns is None:
            self._columns = self._by_key()
        return self._columns._replace(order=self._key_order(self._columns.counts, shared if self.heads > 1 else 1))

    @property
    def _listed_heads(self) -> int:
        """Number of heads with lists of their own. The others share them."""
        return self.heads if self.table.heads > 1 else min(self.selection.indices.shape[1], self.heads)

    @property
    def _grid(self) -> tuple[int, int, tuple[int, int, int]]:
        """(heads with lists of their own, heads that share each, sizes of the choice by `_row_of`)."""
        (batch_rows, choices), heads = self.selection.indices.shape[:2], self._listed_heads
        return heads, self.heads // heads, (batch_rows, choices, heads // min(choices, heads))

    def _empty(self, rows: int, room: int) -> tuple[dict[str, Tensor], DeviceTable]:
        """(tensors of the kernels, the table) for `rows` table rows and `room` entries of lists, uninitialised."""
        sizes = [4 * (-(-n // 4) + 1) for n in (2 * rows, 2 * rows, 2 * rows, room)]
        memory = torch.empty(sum(sizes), dtype=torch.int32, device=self.selection.indices.device)
        partial, full, counts, listed = memory.split(sizes)
        tensors = {"partial": partial, "full": full, "counts": counts, "listed": listed}
        return tensors, DeviceTable(counts, (full, listed, listed), (partial, listed, listed), counts)

    def _by_query(self) -> DeviceTable:
        selection, table, (heads, copies, choice_sizes) = self.selection, self.table, self._grid
        source_rows, k = selection.indices.shape[2:]
        tiles, columns, rows = table.q_tiles, table.kv_tiles, self.batch * heads * table.q_tiles
        room = (min(k, columns) + 2) // 2 * 2
        tensors, made = self._empty(rows * copies, rows * room)
        tensors = {"indices": selection.indices, "kinds": _device_kinds(table, selection.indices.device)[0], **tensors}
        launch_kernel(rows_kernel, rows, tensors, {
            "sizes": (tiles, columns, heads, copies, source_rows, selection.q_granularity // table.block[0]), "choice_sizes": choice_sizes,
            "kind_sizes": (table.batch, table.heads), "room": room, "K": k, "KP": triton.next_power_of_2(max(1, k)),
            "J": min(64, triton.next_power_of_2(max(1, k))), "COPIES": triton.next_power_of_2(copies), "DUMMY": self.dummy,
            "PAIRS": self.kv_pairs,
        }, num_warps=1 if k <= _ONE_WARP else 4)  # fmt: skip
        # Head after head; pairs of heads: all pairs of a choice together, which read the same keys at the same time.
        groups = self.batch * (min(selection.indices.shape[1], self.heads) if self.head_pairs else self.heads)
        dims = groups, self.batch * self.heads // groups, tiles
        return made._replace(order=query_order(dims, 2 if self.head_pairs else 1, selection.indices.device))

    def _by_key(self) -> DeviceTable:
        selection, table, (heads, copies, choice_sizes) = self.selection, self.table, self._grid
        batch_rows, choices, source_rows, k = selection.indices.shape
        tiles, columns, device = table.kv_tiles, table.q_tiles, selection.indices.device
        words, rows = -(-columns // 32), self.batch * heads * tiles
        bits = torch.zeros(batch_rows * choices * tiles * words + 4, dtype=torch.int32, device=device)
        tensors = {"indices": selection.indices, "bits": bits[4:]}
        entries = batch_rows * choices * columns * k
        launch_kernel(bits_kernel, -(-entries // _ENTRIES), tensors, {
            "entries": entries, "rows": source_rows, "tiles": columns, "per_row": selection.q_granularity // table.block[0],
            "columns": tiles, "words": words, "K": max(1, k), "E": _ENTRIES,
        })  # fmt: skip
        tensors, made = self._empty(rows * copies, self.batch * heads * columns * min(k, tiles))
        tensors = {"bits": bits[4:], "used": bits[:4], "kinds": _device_kinds(table, device)[1], **tensors}
        launch_kernel(columns_kernel, rows, tensors, {
            "sizes": (tiles, columns, heads, copies), "choice_sizes": choice_sizes, "kind_sizes": (table.batch, table.heads),
            "WORDS": words, "W": triton.next_power_of_2(words), "COPIES": triton.next_power_of_2(copies), "DUMMY": False,
        }, num_warps=1)  # fmt: skip
        return made

    def _key_order(self, counts: Tensor, shared: int) -> Tensor:
        tiles, groups = self.table.kv_tiles, self.batch * self.heads // shared
        order = torch.empty(groups * tiles, dtype=torch.int32, device=counts.device)
        summed = 1 if self.heads // self._listed_heads % shared == 0 else shared
        launch_kernel(order_kernel, groups * -(-tiles // _RANKED), {"counts": counts, "order": order}, {
            "tiles": tiles, "groups": groups, "shared": shared, "summed": summed, "heavy": -(-tiles // _HEAVY_SHARE),
            "T": _RANKED, "J": min(_COMPARED, triton.next_power_of_2(tiles)),
            "WIDE": (summed * self.table.q_tiles + 1) * tiles >= _NARROW_KEYS,
        })  # fmt: skip
        return order


def launch_kernel(kernel: Any, ctas: int, tensors: Mapping[str, Tensor | None], constants: dict[str, Any], *, num_warps: int = 4) -> None:
    """Launch a kernel of this module, if there is a CTA."""
    if ctas:
        layout_launch(kernel, tensors, constants, ctas, num_warps=num_warps)(tensors, {})


@lru_cache(maxsize=64)
def query_order(dims: tuple[int, int, int], step: int, device: torch.device) -> Tensor:
    """Rows of (group, head, query tile), of every `step`-th head: query tiles of a group from the last to the first, heads together.

    Under a causal mask, later queries may have more tiles.
    """
    rows = torch.arange(dims[0] * dims[1] * dims[2], dtype=torch.int32, device=device).view(dims)
    order = rows[:, ::step].flip(2).mT.flatten()
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
def stand_in(lengths: tuple[int, int], block: tuple[int, int], batch: int, heads: int, tiles_per_row: int) -> BlockTable:
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


def tiled_work(
    inputs: AttentionInputs, work: Work, selection: Selection, *, dummy: bool, kv_pairs: bool = False, head_pairs: bool = False
) -> Work:  # fmt: skip
    """`work` over the chosen tiles only. The table of `work`: of the mask besides the selection. Options: of `SelectedTables`."""
    table, heads = work.table, inputs.q.shape[1]
    choices = selection.indices.shape[1]
    table_heads = heads if choices > 1 or table.heads > 1 or head_pairs else 1
    batch = max(table.batch, selection.indices.shape[0])
    tables = SelectedTables(
        selection=replace(selection, indices=selection.indices.contiguous()), table=table, batch=batch, heads=table_heads, dummy=dummy,
        kv_pairs=kv_pairs, head_pairs=head_pairs,
    )  # fmt: skip
    estimate = stand_in((table.q_len, table.kv_len), table.block, batch, table_heads, max(1, selection.indices.shape[3]))
    return replace(work, table=estimate, device_tables=tables)


def computes_heads_alone(work: Work) -> bool:
    """Whether the tiles of `work` were chosen and have 64 queries, of heads that `hopper` does not compute in pairs."""
    tables = work.device_tables
    return isinstance(tables, SelectedTables) and work.q_tiles.block == 64 and not tables.head_pairs


def pairs_of(work: Work) -> tuple[bool, bool]:
    """(`kv_pairs`, `head_pairs`) of the device tables of a call."""
    tables = work.device_tables
    return (tables.kv_pairs, tables.head_pairs) if isinstance(tables, SelectedTables) else (False, False)
