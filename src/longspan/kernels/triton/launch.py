"""The host side that both passes share: block tables, tilings, programs and captured tensors as kernel arguments.

Nothing here waits for the device. What is derived from a block table is copied to the device once and kept as long as the table lives.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from longspan.kernels.protocol import Tiling, Work
from longspan.kernels.triton import codegen
from longspan.kernels.triton.interpreter import computable, interpreted
from longspan.masks.program import Program
from longspan.masks.table import FULL, PARTIAL, BlockTable, Runs

Pointers = tuple[Tensor, Tensor, Tensor]


class DeviceTable(NamedTuple):
    """A block table on the device: rows in the order to start them, and the runs of full and of partial tiles. All int32."""

    order: Tensor
    full: Pointers
    partial: Pointers


def short_tiles(tiling: Tiling) -> Tensor:
    """The tiles that hold fewer tokens than a block, ascending, int64, on the host."""
    if tiling.count is not None:
        return torch.nonzero(tiling.count.cpu() < tiling.block).flatten()
    return torch.tensor([tiling.tiles - 1] if tiling.length % tiling.block else [], dtype=torch.int64)


def split_runs(table: BlockTable, short: Tensor) -> tuple[Runs, Runs]:
    """The table's (full, partial) runs, with short tiles taken out of full runs: kernels check bounds in partial tiles only."""
    full, partial = table.runs(FULL), table.runs(PARTIAL)
    if not len(short):
        return full, partial
    row = torch.repeat_interleave(torch.arange(table.rows), full.ptr.diff().long())
    first, last = full.first.long(), full.last.long()
    low, high = torch.searchsorted(short, first), torch.searchsorted(short, last, right=True)
    cuts = high - low
    # Of a run with c short tiles: c tiles on their own, and the c + 1 pieces between them, some of them empty.
    run = torch.repeat_interleave(torch.arange(len(row)), cuts)
    nth = torch.arange(len(run)) - (cuts.cumsum(0) - cuts)[run]
    cut = short[low[run] + nth]
    begin = torch.cat([first, cut + 1])
    piece_row = torch.cat([row, row[run]])
    key = torch.argsort(torch.cat([torch.arange(len(row)), run]) * (table.kv_tiles + 1) + begin)
    begin, piece_row = begin[key], piece_row[key]
    piece_run = torch.cat([torch.arange(len(row)), run])[key]
    is_last = torch.cat([piece_run[1:] != piece_run[:-1], torch.ones(min(1, len(piece_run)), dtype=torch.bool)])
    end = torch.where(is_last, last[piece_run], torch.cat([begin[1:] - 2, begin[:1]]))
    keep = begin <= end
    own = torch.repeat_interleave(torch.arange(table.rows), partial.ptr.diff().long())
    mixed_row = torch.cat([own, row[run]])
    mixed_first = torch.cat([partial.first.long(), cut])
    by_row = torch.argsort(mixed_row * (table.kv_tiles + 1) + mixed_first)
    mixed = _csr(mixed_row[by_row], mixed_first[by_row], torch.cat([partial.last.long(), cut])[by_row], table.rows)
    return _csr(piece_row[keep], begin[keep], end[keep], table.rows), mixed


def _csr(row: Tensor, first: Tensor, last: Tensor, rows: int) -> Runs:
    ptr = torch.zeros(rows + 1, dtype=torch.int32)
    ptr[1:] = torch.bincount(row, minlength=rows).cumsum(0)
    return Runs(ptr, first.int(), last.int())


def start_order(table: BlockTable, shared: int) -> Tensor:
    """Rows, most work first. Where one program walks the rows of `shared` heads together, rows of (batch, head group, tile)."""
    if table.heads == 1 or shared == 1:
        return table.heavy_first
    work = table.tiles_per_row.view(table.batch, table.heads // shared, shared, -1).sum(2)
    return torch.argsort(work.flatten(), descending=True, stable=True).int()


_tables: WeakKeyDictionary[BlockTable, dict[Hashable, DeviceTable]] = WeakKeyDictionary()


def device_table(table: BlockTable, columns: Tiling, device: torch.device, *, shared: int = 1) -> DeviceTable:
    """`table` on the device for columns tiled so; `shared`: see `start_order`."""
    kept = _tables.setdefault(table, {})
    key = (device, shared, columns if columns.count is not None else columns.length)
    if key not in kept:
        if len(kept) >= 16:
            kept.clear()
        full, partial = split_runs(table, short_tiles(columns))
        parts = [start_order(table, shared), *full, *partial]
        # One copy; each part begins on 16 bytes so that its alignment never asks for another compilation.
        padded = [torch.nn.functional.pad(p.int(), (0, 4 - len(p) % 4)) for p in parts]
        whole = torch.cat(padded).to(device)
        order, *rest = whole.split([len(p) for p in padded])
        kept[key] = DeviceTable(order, (rest[0], rest[1], rest[2]), (rest[3], rest[4], rest[5]))
    return kept[key]


def side(tiling: Tiling, device: torch.device) -> tuple[Tensor | None, ...]:
    """A tiling's (row, pos, count) on the device, int32; Nones for a plain sequence."""
    arrays = (tiling.row, tiling.pos, tiling.count)
    return tuple(None if a is None else a.to(device=device, dtype=torch.int32, non_blocking=True).contiguous() for a in arrays)


def pack_sizes(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """All sizes, each as 2·size + 3. Triton compiles anew for integers that are 1 or divisible by 16; these never are."""
    return tuple((size << 1) + 3 for t in tensors for size in t.shape) or (3,)


def pack_captured(tensors: Sequence[Tensor], spare: Tensor) -> tuple[Tensor, ...]:
    """Contiguous captured tensors, bools as bytes; never an empty tuple."""
    return tuple(_packed(t.detach().contiguous()) for t in tensors) or (spare,)


def _packed(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else computable(tensor)


@dataclass(frozen=True, kw_only=True)
class Captured:
    """What programs read, as kernel arguments."""

    mask: tuple[Tensor, ...]
    mask_sizes: tuple[int, ...]
    score: tuple[Tensor, ...]
    score_sizes: tuple[int, ...]


def captured(work: Work, spare: Tensor) -> Captured:
    return Captured(
        mask=pack_captured(work.mask_captured, spare),
        mask_sizes=pack_sizes(work.mask_captured),
        score=pack_captured(work.score_captured, spare),
        score_sizes=pack_sizes(work.score_captured),
    )


def max_position(tiling: Tiling) -> int:
    """A bound on positions, padding included, in one of the two classes for which programs are compiled."""
    if tiling.pos is None:
        reach = tiling.tiles * tiling.block
    elif tiling.pos.is_cuda:
        return codegen.LONG
    else:
        reach = int(tiling.pos.max()) + tiling.block if len(tiling.pos) else 0
    return codegen.SHORT if reach <= codegen.SHORT else codegen.LONG


def options(work: Work, dtype: torch.dtype) -> codegen.Options:
    """How this work's programs are compiled."""
    tables = [*work.mask_captured, *work.score_captured]
    return codegen.Options(
        max_position=max(max_position(work.q_tiles), max_position(work.kv_tiles)),
        fast=dtype != torch.float32,
        big_tables=any(t.numel() >= 2**31 for t in tables),
        interpreted=interpreted(),
    )


def function(program: Program | None, opts: codegen.Options) -> Any:
    return None if program is None else codegen.program_function(program, opts)


def described(tensors: Sequence[Tensor], rows: int) -> list[Any] | None:
    """Descriptors of [B, H, S, D] tensors for the copy engine, in tiles of `rows`; None where a tensor's layout does not allow it."""
    for t in tensors:
        strides = [s * t.element_size() for s in t.stride()[:3]]
        if t.stride(3) != 1 or t.data_ptr() % 16 or any(s % 16 or s == 0 for s in strides) or t.numel() == 0:
            return None
    return [TensorDescriptor(t, list(t.shape), list(t.stride()), [1, 1, rows, padded(t.shape[3])]) for t in tensors]


def sub_tile(block: int, wanted: int) -> int:
    """The largest power of two that divides `block` and is at most `wanted`."""
    return min(block & -block, wanted)


def padded(dim: int) -> int:
    """A head dim as the kernels hold it."""
    return max(16, triton.next_power_of_2(dim))


def head_group(heads: int, shared: int, bytes_per_head: int, l2_bytes: int) -> int:
    """How many of `heads` query heads to run at once so that their keys and values (`bytes_per_head` each `shared` heads) stay in cache."""
    want = max(1, l2_bytes // max(1, bytes_per_head)) * shared
    return next(n for n in range(min(heads, want), 0, -1) if heads % n == 0)
