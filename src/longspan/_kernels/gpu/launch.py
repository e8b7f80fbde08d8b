"""Kernel arguments made from block tables, tilings, programs and captured tensors.

Nothing here synchronises with the device: copies come from page-locked memory. Device copies of a block table or a tiling are cached for
the life of that table or tiling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from longspan._derived_cache import DerivedCache
from longspan._kernels.gpu import codegen
from longspan._kernels.gpu.interpreter import computable, interpreted
from longspan._kernels.gpu.uploads import note_upload
from longspan._kernels.protocol import Work
from longspan._kernels.tiling import Tiling
from longspan._masks.block_table import FULL, PARTIAL, BlockTable, Runs, expand_ranges
from longspan._masks.program import Program
from longspan._masks.static_table import StaticTable

Pointers = tuple[Tensor, Tensor, Tensor]
# The order in which a kernel iterates over a table row's runs. By kind: full runs and partial runs separately. Ascending, descending: by
# position, so that the order of a row's sum does not depend on other rows of its tile. A kernel that iterates over partial, full and
# partial runs needs `ascending_runs`; a kernel that iterates over partial runs first needs `descending_tiles`.
RunOrder = Literal["by kind", "ascending", "descending"]


class DeviceTable(NamedTuple):
    """A block table on the device, int32.

    `order`: rows in launch order. `full`, `partial`: (ptr, first tile, last tile) of the runs of full and of partial tiles; ptr [rows, 2]
    has the first run of each row and the end of its runs. `counts` [rows, 2]: number of tiles in each row's partial and full runs. In
    ascending order (`ascending_runs`), where a row has partial runs before its full runs, `partial` has a fourth array [rows]: their
    number.
    """

    order: Tensor
    full: Pointers
    partial: tuple[Tensor, ...]
    counts: Tensor


class TilingFacts(NamedTuple):
    """Properties of a tiling that launches depend on.

    `short`: tiles with fewer tokens than a block. `row_breaks`: tiles whose rows do not continue those of the previous tile. `breaks`:
    tiles whose rows or positions do not. All ascending, int64, on the host. `covers`: every row of the tensor is in a tile. `reach`:
    upper bound of all positions, padding included. `aligned`: every tile begins at a multiple of 4 rows, 16 bytes of float32.
    """

    short: Tensor
    row_breaks: Tensor
    breaks: Tensor
    covers: bool
    reach: int
    aligned: bool


_facts: DerivedCache[Tiling, TilingFacts] = DerivedCache(1)
_sides: DerivedCache[Tiling, Pointers] = DerivedCache(16)  # by device
_busy: DerivedCache[BlockTable, int] = DerivedCache(1)
_idle: DerivedCache[BlockTable, tuple[tuple[int, int], ...]] = DerivedCache(16)  # by query tiling
_tables: DerivedCache[BlockTable, DeviceTable] = DerivedCache(16)  # by device, tiling and use
_MAX_SPANS = 8


@lru_cache(maxsize=1024)
def _plain_facts(length: int, block: int) -> TilingFacts:
    tiles = -(-length // block)
    short = torch.tensor([tiles - 1] if length % block else [], dtype=torch.int64)
    return TilingFacts(short, short[:0], short[:0], True, tiles * block, block % 4 == 0)


def facts(tiling: Tiling) -> TilingFacts:
    """The facts of a tiling, cached."""
    if tiling.row is None or tiling.pos is None or tiling.count is None:
        return _plain_facts(tiling.length, tiling.block)
    row, pos, count = tiling.row, tiling.pos, tiling.count
    return _facts.get(tiling, None, lambda: _array_facts(tiling, row.long(), pos, count))


def _array_facts(tiling: Tiling, row: Tensor, pos: Tensor, count: Tensor) -> TilingFacts:
    covered = torch.zeros(tiling.length + 1, dtype=torch.int64)
    covered.index_add_(0, row, torch.ones_like(row)).index_add_(0, row + count, -torch.ones_like(row))
    breaks = (row.diff() != tiling.block) | (count[:-1] < tiling.block)
    return TilingFacts(
        short=torch.nonzero(count < tiling.block).flatten(),
        row_breaks=torch.nonzero(breaks).flatten() + 1,
        breaks=torch.nonzero(breaks | (pos.diff() != tiling.block)).flatten() + 1,
        covers=bool((covered.cumsum(0)[:-1] > 0).all()),
        reach=int(pos.max()) + tiling.block if len(pos) else 0,
        aligned=not bool((row % 4).any()),
    )


def side(tiling: Tiling, device: torch.device) -> Pointers | tuple[None, None, None]:
    """A tiling's (row, pos, count) on the device, int32; Nones for a plain sequence."""
    if tiling.row is None or tiling.pos is None or tiling.count is None:
        return None, None, None
    arrays = [tiling.row, tiling.pos, tiling.count]

    def copy() -> Pointers:
        row, pos, count = to_device(arrays, device)
        return row, pos, count

    return _sides.get(tiling, device, copy)


def to_device(parts: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Arrays as int32 on the device, by one copy. Each is aligned to 16 bytes: Triton compiles again for another alignment."""
    padded = _padded(parts, [0] * len(parts))
    copies: tuple[Tensor, ...] = _joined(padded, device).to(device, non_blocking=True).split([len(p) for p in padded])
    note_upload(*copies)
    return copies


def static_arrays(table: StaticTable, make: Callable[[], Sequence[Tensor]], device: torch.device) -> tuple[Tensor, ...]:
    """`to_device` with room for all contents of a static table, whose later contents are copied to the same memory.

    make: from the table's present contents, the order of rows, (ptr, first, last) of full and of partial runs, and counts by row.
    """
    room = [0, 0, table.room, table.room, 0, table.room, table.room, 0]
    padded = _padded(make(), room)
    whole = _joined(padded, device).to(device)
    parts = whole.split([len(p) for p in padded])
    note_upload(*parts)

    def refresh() -> None:
        whole.copy_(_joined(_padded(make(), room), device), non_blocking=True)

    table.when_replaced(refresh)
    return parts


def _padded(parts: Sequence[Tensor], room: Sequence[int]) -> list[Tensor]:
    """Arrays of the host as int32, of at least these sizes, with a multiple of four elements."""
    sizes = [max(len(p), n) for p, n in zip(parts, room, strict=True)]
    return [torch.nn.functional.pad(p.int(), (0, n + 4 - n % 4 - len(p))) for p, n in zip(parts, sizes, strict=True)]


def _joined(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """One array, for a copy to a device. A copy from pageable memory would synchronise."""
    whole = torch.cat(list(parts))
    return whole.pin_memory() if device.type == "cuda" else whole


def flags(chosen: Tensor, device: torch.device) -> Tensor:
    """Bools as int32 zeros and ones on the device."""
    return to_device([chosen], device)[0]


def split_runs(table: BlockTable, columns: TilingFacts, *, positions: bool) -> tuple[Runs, Runs]:
    """The table's (full, partial) runs as kernels walk them: contiguous in memory, and short tiles in partial runs.

    Rows of a run are contiguous. Positions are contiguous in partial runs and, with `positions`, in full runs: there only a score program
    reads positions.
    """
    full, partial = table.runs(FULL), table.runs(PARTIAL)
    breaks = columns.breaks if positions else columns.row_breaks
    if not (len(columns.short) or len(breaks) or len(columns.breaks)):
        return full, partial
    row, first, last = rows_of(full, table.rows), full.first, full.last
    run, short = _inside(columns.short, first, last)
    mixed_row = torch.cat([rows_of(partial, table.rows), row[run]])
    mixed_first, mixed_last = torch.cat([partial.first, short]), torch.cat([partial.last, short])
    order = torch.argsort(mixed_row * (table.kv_tiles + 1) + mixed_first)
    mixed_row, mixed_first, mixed_last = cut_runs(mixed_row[order], mixed_first[order], mixed_last[order], columns.breaks)
    row, first, last = cut_runs(row, first, last, torch.cat([breaks, columns.short, columns.short + 1]).unique())
    keep = ~torch.isin(first, columns.short)
    return _csr(row[keep], first[keep], last[keep], table.rows), _csr(mixed_row, mixed_first, mixed_last, table.rows)


def cut_runs(row: Tensor, first: Tensor, last: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Runs split before each of the ascending tiles `at`. row: the table row of each run."""
    run, tile = _inside(at, first, last)
    width = int(last.max()) + 1 if len(last) else 1
    key = torch.cat([torch.arange(len(first)) * width + first, run * width + tile]).unique()
    run, begin = key // width, key % width
    continues = torch.cat([run[1:] == run[:-1], torch.zeros(min(1, len(run)), dtype=torch.bool)])
    return row[run], begin, torch.where(continues, begin.roll(-1) - 1, last[run])


def rows_of(runs: Runs, rows: int) -> Tensor:
    """The table row of each run."""
    return torch.repeat_interleave(torch.arange(rows), runs.ptr.diff())


def _inside(tiles: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """(run, tile) for each of the ascending `tiles` and each run that contains it."""
    low, high = torch.searchsorted(tiles, first), torch.searchsorted(tiles, last, right=True)
    hits = high - low
    run = torch.repeat_interleave(torch.arange(len(first)), hits)
    nth = torch.arange(len(run)) - (hits.cumsum(0) - hits)[run]
    return run, tiles[low[run] + nth]


def _run_lengths(runs: Runs) -> Tensor:
    """Number of tiles in each run, int64."""
    return (runs.last - runs.first + 1).long()


def _lengths(runs: Runs, rows: int) -> Tensor:
    """Number of tiles in the runs of each row, int64."""
    return torch.zeros(rows, dtype=torch.int64).index_add_(0, rows_of(runs, rows), _run_lengths(runs))


def _csr(row: Tensor, first: Tensor, last: Tensor, rows: int) -> Runs:
    ptr = torch.zeros(rows + 1, dtype=torch.int32)
    ptr[1:] = torch.bincount(row, minlength=rows).cumsum(0)
    return Runs(ptr, first.int(), last.int())


def descending_tiles(full: Runs, partial: Runs, rows: int) -> tuple[Runs, Runs]:
    """(full runs, partial runs) of one tile each, that a kernel which walks partial runs first walks in descending order of tiles.

    Full tiles above a partial tile become partial: the mask allows all of their pairs.
    """
    row, tile, is_full = [], [], []
    for runs, kind in ((full, True), (partial, False)):
        length = _run_lengths(runs)
        row.append(rows_of(runs, rows).repeat_interleave(length))
        tile.append(expand_ranges(runs.first, length))
        is_full.append(torch.full((len(row[-1]),), kind))
    all_rows, all_tiles, kinds = torch.cat(row), torch.cat(tile), torch.cat(is_full)
    width = int(all_tiles.max()) + 1 if len(all_tiles) else 1
    order = torch.argsort(all_rows * width + (width - 1 - all_tiles))
    all_rows, all_tiles, kinds = all_rows[order], all_tiles[order], kinds[order]
    lowest_partial = torch.full((rows,), width).scatter_reduce_(0, all_rows[~kinds], all_tiles[~kinds], "amin")
    stays = kinds & (all_tiles < lowest_partial[all_rows])
    kept, demoted = (_csr(all_rows[chosen], all_tiles[chosen], all_tiles[chosen], rows) for chosen in (stays, ~stays))
    return kept, demoted


def start_order(table: BlockTable, shared: int) -> Tensor:
    """Rows by descending work. Where one CTA walks the rows of `shared` heads, rows of (batch, head group, tile)."""
    if table.heads == 1 or shared == 1:
        return table.heavy_first
    work = table.tiles_per_row.view(-1, shared, table.q_tiles).sum(1)
    return torch.argsort(work.flatten(), descending=True, stable=True).int()


def busy_rows(table: BlockTable) -> int:
    """Number of table rows that have a tile. They come first in `start_order`."""
    return _busy.get(table, None, lambda: int((table.tiles_per_row > 0).sum()))


def idle_spans(table: BlockTable, queries: Tiling) -> tuple[tuple[int, int], ...]:
    """Contiguous ranges [start, stop) of query rows that a launch over busy table rows does not write in some batch row or head.

    More than 8 ranges are joined into one that contains them all.
    """
    return _idle.get(table, queries.name, lambda: _find_idle_spans(table, queries))


def _find_idle_spans(table: BlockTable, queries: Tiling) -> tuple[tuple[int, int], ...]:
    tiles = table.rows // (table.batch * table.heads)
    busy = (table.tiles_per_row.view(-1, tiles) > 0).all(0)
    row = torch.arange(tiles) * queries.block if queries.row is None else queries.row.long()
    count = (queries.length - row).clamp(max=queries.block) if queries.count is None else queries.count
    depth = torch.zeros(queries.length + 2, dtype=torch.int64)  # +1 where a busy tile starts, −1 after its end
    depth.index_add_(0, row[busy] + 1, torch.ones_like(row[busy])).index_add_(0, (row + count)[busy] + 1, -torch.ones_like(row[busy]))
    idle = torch.nn.functional.pad((depth.cumsum(0)[1:-1] == 0).int(), (1, 1)).diff()
    spans = list(zip(torch.nonzero(idle == 1).flatten().tolist(), torch.nonzero(idle == -1).flatten().tolist(), strict=True))
    return tuple(spans) if len(spans) <= _MAX_SPANS else ((spans[0][0], spans[-1][1]),)


def device_table(
    table: BlockTable, columns: Tiling, device: torch.device, *, shared: int, positions: bool, run_order: RunOrder = "by kind"
) -> DeviceTable:  # fmt: skip
    """The table on the device, cached. `columns`: the tiling of its columns. `shared`: see `start_order`. `positions`: see `split_runs`."""

    def arrays() -> list[Tensor]:
        full, partial = split_runs(table, facts(columns), positions=positions)
        lead = []
        if run_order == "ascending":
            full, partial, before = ascending_runs(full, partial, table.rows)
            lead += [before] if bool(before[full.ptr.diff() > 0].any()) else []
        elif run_order == "descending":
            full, partial = descending_tiles(full, partial, table.rows)
        counts = torch.stack([_lengths(partial, table.rows), _lengths(full, table.rows)], 1).flatten()
        return [start_order(table, shared), _begin_end(full.ptr), *full[1:], _begin_end(partial.ptr), *partial[1:], counts, *lead]

    def copy() -> DeviceTable:
        order, *rest = static_arrays(table, arrays, device) if isinstance(table, StaticTable) else to_device(arrays(), device)
        return DeviceTable(order, (rest[0], rest[1], rest[2]), (*rest[3:6], *rest[7:]), rest[6])

    return _tables.get(table, (device, shared, positions, columns.name, run_order), copy)


def _begin_end(ptr: Tensor) -> Tensor:
    """CSR pointers [rows + 1] as the begin and the end of each row [rows · 2]."""
    return torch.stack([ptr[:-1], ptr[1:]], 1).flatten()


def ascending_runs(full: Runs, partial: Runs, rows: int) -> tuple[Runs, Runs, Tensor]:
    """(full runs, partial runs, partial runs of each row before its full runs [rows], int32) that a kernel walks in ascending order:
    partial runs, full runs, partial runs.

    Full runs after the first partial run that follows a full run become partial: the mask allows all of their pairs.
    """
    row = torch.cat([rows_of(full, rows), rows_of(partial, rows)])
    first, last = torch.cat([full.first, partial.first]), torch.cat([full.last, partial.last])
    is_full = torch.arange(len(row)) < len(full.first)
    order = torch.argsort(row * (int(last.max()) + 1 if len(last) else 1) + first)
    row, first, last, is_full = row[order], first[order], last[order], is_full[order]
    fulls = is_full.cumsum(0)
    begin = torch.zeros(rows + 1, dtype=torch.int64)
    begin[1:] = torch.bincount(row, minlength=rows).cumsum(0)
    fulls_before_row = torch.cat([torch.zeros(1, dtype=torch.int64), fulls])[begin[:-1]]
    after_full = fulls > fulls_before_row[row]  # of this row, a full run is here or before
    late_partials = (after_full & ~is_full).long().cumsum(0)
    late_before_row = torch.cat([torch.zeros(1, dtype=torch.int64), late_partials])[begin[:-1]]
    stays = is_full & (late_partials == late_before_row[row])
    lead = torch.bincount(row[~after_full], minlength=rows).int()
    return _csr(row[stays], first[stays], last[stays], rows), _csr(row[~stays], first[~stays], last[~stays], rows), lead


def pack_sizes(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """All sizes, each as 2·size + 3. Triton specialises on integers that are 1 or divisible by 16; odd numbers above 1 are neither."""
    return tuple((size << 1) + 3 for t in tensors for size in t.shape) or (3,)


def pack_captured(tensors: Sequence[Tensor], spare: Tensor) -> tuple[Tensor, ...]:
    """Contiguous captured tensors, bools as bytes. Without any, `spare`: Triton takes no empty tuple."""
    return tuple(_packed(t.detach().contiguous()) for t in tensors) or (spare,)


def _packed(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else computable(tensor)


def options(work: Work, dtype: torch.dtype) -> codegen.Options:
    """Compile options of the programs of this work."""
    tables = [*work.mask_captured, *work.score_captured]
    reach = max(facts(work.q_tiles).reach, facts(work.kv_tiles).reach)
    return codegen.Options(
        max_position=codegen.SHORT if reach <= codegen.SHORT else codegen.LONG,
        fast=dtype != torch.float32,
        big_tables=any(t.numel() >= 2**31 for t in tables),
        interpreted=interpreted(),
    )


def function(program: Program | None, opts: codegen.Options) -> Any:
    """The jit function of a program, or None."""
    return None if program is None else codegen.program_function(program, opts)


def describable(tensor: Tensor) -> bool:
    """Whether TMA can read a [B, H, S, D] tensor: 16-byte aligned base and strides; strides of dims of size 1 do not matter."""
    batch, heads, tokens, dim = tensor.shape
    by_batch, by_head, by_token, by_dim = tensor.stride()
    per = 16 // tensor.element_size()  # elements
    return (
        by_dim == 1
        and (batch == 1 or (by_batch % per == 0 and by_batch > 0))
        and (heads == 1 or (by_head % per == 0 and by_head > 0))
        and (tokens == 1 or (by_token % per == 0 and by_token > 0))
        and batch > 0 and heads > 0 and tokens > 0 and dim > 0
        and tensor.data_ptr() % 16 == 0
    )  # fmt: skip


def described(tensor: Tensor, rows: int) -> TensorDescriptor:
    """The TMA descriptor of a `describable` tensor, in tiles of `rows`."""
    return TensorDescriptor(tensor, *extents(tensor), [1, 1, rows, padded(tensor.shape[3])])


def extents(tensor: Tensor) -> tuple[list[int], list[int]]:
    """(sizes, strides) for the TMA descriptor of a `describable` tensor. The driver checks strides even of dims of size 1."""
    strides = [16 if n == 1 else step for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return list(tensor.shape), [*strides[:3], 1]


def sub_tile(block: int, wanted: int) -> int:
    """The largest power of two that divides `block` and is at most `wanted`."""
    return min(block & -block, wanted)


def padded(dim: int) -> int:
    """A head dim padded to a power of two, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def head_group(heads: int, shared: int, bytes_per_head: int, l2_bytes: int, *, programs: int, in_flight: int) -> int:
    """Number of query heads to run concurrently so that their KV (`bytes_per_head` for each `shared` heads) stay in L2.

    At least as many as fill the device with `in_flight` CTAs, `programs` per head: fewer would not reduce what runs at once, and within a
    group the CTAs with most work start first, which shortens the tail.
    """
    want = max(1, l2_bytes // max(1, bytes_per_head)) * shared
    least = min(heads, -(-in_flight // max(1, programs)))
    if least >= want:
        return next(n for n in range(least, heads + 1) if heads % n == 0)
    return next(n for n in range(min(heads, want), 0, -1) if heads % n == 0)


def capturing(device: torch.device) -> bool:
    """Whether the device's current stream is being captured into a CUDA graph."""
    if device.type != "cuda":
        return False
    if torch.cuda.current_device() == device.index:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


@cache
def programs_in_flight(device: torch.device) -> int:
    """CTAs that a device runs at once: two per SM, as the triton kernels are cut."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
