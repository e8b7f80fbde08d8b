"""torch's BlockMask, read as a block table and as a mask.

Shapes: a BlockMask lists, for each of [B, H, rows], how many key tiles are partial and full and which: kv_indices [B, H, rows, columns].
B and H may be 1 for a mask that is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from longspan._masks.block_table import FULL, PARTIAL, BlockTable
from longspan._masks.tile_runs import Segments


@dataclass(frozen=True, kw_only=True, eq=False)
class ListedMask:
    """A mask_mod with a BlockMask's own meaning: visible where the tile is full, or partial and `mask_mod` says so.

    kinds: [B, H, q_tiles, kv_tiles] int8.
    """

    trace_reads = ("kinds", "block", "mask_mod")
    kinds: Tensor
    block: tuple[int, int]
    mask_mod: Callable[..., Any] | None

    @property
    def __name__(self) -> str:
        return f"block_mask({'' if self.mask_mod is None else getattr(self.mask_mod, '__name__', type(self.mask_mod).__name__)})"

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        batch, heads = self.kinds.shape[:2]
        # A dim of size 1 holds for every batch row or head: taken out here, so that the traced mask does not depend on them.
        kinds = self.kinds if heads > 1 else self.kinds[:, 0]
        kinds = kinds if batch > 1 else kinds[0]
        index = (*((b,) if batch > 1 else ()), *((h,) if heads > 1 else ()), q // self.block[0], kv // self.block[1])
        kind = kinds[index]
        if self.mask_mod is None:
            return kind > 0
        return (kind == FULL) | ((kind == PARTIAL) & self.mask_mod(b, h, q, kv))


def mask_mod_of_block_mask(block_mask: BlockMask) -> ListedMask:
    """The mask that a BlockMask stands for, element by element: its tiles and its mask_mod together.

    Tensor operations of fixed shapes only, so that it can be made inside a compiled region.
    """
    (q_len, kv_len), block = block_mask.seq_lengths, _block(block_mask)
    q_tiles, kv_tiles = -(-q_len // block[0]), -(-kv_len // block[1])
    batch, heads, _ = block_mask.kv_num_blocks.shape
    kinds = torch.zeros(batch, heads, q_tiles, kv_tiles + 1, dtype=torch.int8, device=block_mask.kv_num_blocks.device)
    for count, indices, kind in _lists(block_mask):
        count, indices = count[:, :, :q_tiles], indices[:, :, :q_tiles].long()
        listed = (torch.arange(indices.shape[-1], device=kinds.device) < count[..., None]) & (indices < kv_tiles)
        kinds = kinds.scatter(-1, torch.where(listed, indices, kv_tiles), kind)  # what is not listed goes to a column of its own
    mask_mod = block_mask.mask_mod
    return ListedMask(kinds=kinds[..., :kv_tiles], block=block, mask_mod=None if mask_mod is None or mask_mod is noop_mask else mask_mod)


def table_of_block_mask(block_mask: BlockMask) -> BlockTable:
    """The BlockMask's tiles as runs. A full tile that reaches past the end of queries or keys becomes partial, as everywhere here.

    The table's mask_mod is `mask_mod_of_block_mask`, which keeps such a tile's elements visible.
    """
    (batch, heads, q_tiles, kv_tiles), row, column, kind = _cells(block_mask)
    (q_len, kv_len), block = block_mask.seq_lengths, _block(block_mask)
    ragged = (row % max(1, q_tiles) >= q_len // block[0]) | (column >= kv_len // block[1])
    kind = torch.where(ragged, PARTIAL, kind)
    segments = Segments(rows=batch * heads * q_tiles, columns=kv_tiles)
    for which in (PARTIAL, FULL):
        segments.add(row[kind == which], column[kind == which], which)
    ptr, first, last, kinds = segments.table()
    return BlockTable(
        q_len=q_len,
        kv_len=kv_len,
        block=block,
        batch=batch,
        heads=heads,
        ptr=ptr,
        first=first,
        last=last,
        kind=kinds,
        mask_mod=mask_mod_of_block_mask(block_mask),
    )


def _block(block_mask: BlockMask) -> tuple[int, int]:
    q, kv = block_mask.BLOCK_SIZE
    return q, kv


def _lists(block_mask: BlockMask) -> list[tuple[Tensor, Tensor, int]]:
    """(counts, indices, kind), the full tiles last: where both lists name a tile, it is full."""
    partial, full = (block_mask.kv_num_blocks, block_mask.kv_indices), (block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    listed = [(*partial, PARTIAL)]
    if full[0] is not None and full[1] is not None:
        listed.append((full[0], full[1], FULL))
    return listed


def _cells(block_mask: BlockMask) -> tuple[tuple[int, int, int, int], Tensor, Tensor, Tensor]:
    """(batch, heads, q_tiles, kv_tiles) and the listed tiles, each once, in order: row, column (int64), kind (int8), on the CPU."""
    (q_len, kv_len), block = block_mask.seq_lengths, _block(block_mask)
    batch, heads, rows = block_mask.kv_num_blocks.shape
    q_tiles, kv_tiles = -(-q_len // block[0]), -(-kv_len // block[1])
    if rows < q_tiles:
        raise ValueError(
            f"BlockMask: expected {q_tiles} rows of tiles ({q_len} queries, blocks of {block[0]}), got {rows}; rebuild it for this length"
        )
    found = []
    for count, indices, kind in _lists(block_mask):
        count, indices = count[:, :, :q_tiles].reshape(-1).cpu(), indices[:, :, :q_tiles].reshape(batch * heads * q_tiles, -1).cpu()
        row, place = (torch.arange(indices.shape[1]) < count[:, None]).nonzero(as_tuple=True)
        column = indices[row, place].long()
        row, column = row[column < kv_tiles], column[column < kv_tiles]
        found.append((row * max(1, kv_tiles) + column) * 4 + kind)
    # A tile that both lists name is full: sorting puts its full entry last.
    cells = torch.cat(found).unique()
    cells = cells[torch.cat([cells[1:] // 4 != cells[:-1] // 4, torch.ones(min(1, len(cells)), dtype=torch.bool)])]
    place, kinds = cells // 4, (cells % 4).to(torch.int8)
    return (batch, heads, q_tiles, kv_tiles), place // max(1, kv_tiles), place % max(1, kv_tiles), kinds
