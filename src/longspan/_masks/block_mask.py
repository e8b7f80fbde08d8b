"""Conversion of torch's BlockMask to a block table and to a mask_mod.

Shapes: for each query tile [B, H, q_tiles], a BlockMask lists the number of partial and of full KV tiles and their indices
[B, H, q_tiles, kv_tiles]. B or H is 1 if the mask does not depend on it.
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
    """The mask_mod that a BlockMask stands for: a pair is visible in a full tile, or in a partial tile if `mask_mod` allows it.

    Attributes:
        kinds: Kind of each tile, [B, H, q_tiles, kv_tiles] int8.
        block: Tokens per tile as (queries, keys).
        mask_mod: mask_mod of the BlockMask; None if every pair of a partial tile is visible.
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
        # Dims of size 1 are not indexed, so that the traced program does not depend on b or h.
        kinds = self.kinds if heads > 1 else self.kinds[:, 0]
        kinds = kinds if batch > 1 else kinds[0]
        index = (*((b,) if batch > 1 else ()), *((h,) if heads > 1 else ()), q // self.block[0], kv // self.block[1])
        kind = kinds[index]
        if self.mask_mod is None:
            return kind > 0
        return (kind == FULL) | ((kind == PARTIAL) & self.mask_mod(b, h, q, kv))


def mask_mod_of_block_mask(block_mask: BlockMask) -> ListedMask:
    """Mask_mod of a BlockMask that accounts for its block lists as well as its own mask_mod.

    Only tensor operations of static shape, so that it can be built inside a compiled region.

    Raises:
        ValueError: The BlockMask has fewer rows of tiles than its sequence length needs, as slices of a BlockMask may have.
    """
    block, (q_tiles, kv_tiles) = _block(block_mask), _tiles(block_mask)
    batch, heads, _ = block_mask.kv_num_blocks.shape
    kinds = torch.zeros(batch, heads, q_tiles, kv_tiles + 1, dtype=torch.int8, device=block_mask.kv_num_blocks.device)
    for count, indices, kind in _lists(block_mask):
        count, indices = count[:, :, :q_tiles], indices[:, :, :q_tiles].long()
        listed = (torch.arange(indices.shape[-1], device=kinds.device) < count[..., None]) & (indices < kv_tiles)
        kinds = kinds.scatter(-1, torch.where(listed, indices, kv_tiles), kind)  # unused entries write to an extra last column
    mask_mod = block_mask.mask_mod
    return ListedMask(kinds=kinds[..., :kv_tiles], block=block, mask_mod=None if mask_mod is None or mask_mod is noop_mask else mask_mod)


def table_of_block_mask(block_mask: BlockMask) -> BlockTable:
    """Block table of a BlockMask, in its block size.

    A full tile that reaches past the last query or key becomes partial, as in every block table. The table's mask_mod is
    `mask_mod_of_block_mask`, for which all pairs of such a tile are visible.

    Raises:
        ValueError: The BlockMask has fewer rows of tiles than its sequence length needs.
    """
    (batch, heads, q_tiles, kv_tiles), row, column, kind = _listed_tiles(block_mask)
    (q_len, kv_len), block = block_mask.seq_lengths, _block(block_mask)
    ragged = (row % max(1, q_tiles) >= q_len // block[0]) | (column >= kv_len // block[1])
    kind = torch.where(ragged, PARTIAL, kind)
    segments = Segments(rows=batch * heads * q_tiles, columns=kv_tiles)
    for tile_kind in (PARTIAL, FULL):
        segments.add(row[kind == tile_kind], column[kind == tile_kind], tile_kind)
    ptr, first, last, run_kind = segments.table()
    return BlockTable(
        q_len=q_len,
        kv_len=kv_len,
        block=block,
        batch=batch,
        heads=heads,
        ptr=ptr,
        first=first,
        last=last,
        kind=run_kind,
        mask_mod=mask_mod_of_block_mask(block_mask),
    )


def _block(block_mask: BlockMask) -> tuple[int, int]:
    """Tokens per tile as (queries, keys)."""
    q, kv = block_mask.BLOCK_SIZE
    return q, kv


def _tiles(block_mask: BlockMask) -> tuple[int, int]:
    """Rows and columns of tiles that the sequence lengths need. Raises ValueError if the lists have fewer rows; reads shapes only."""
    (q_len, kv_len), block = block_mask.seq_lengths, _block(block_mask)
    q_tiles, listed_q_tiles = -(-q_len // block[0]), block_mask.kv_num_blocks.shape[2]
    if listed_q_tiles < q_tiles:
        raise ValueError(
            f"BlockMask: expected {q_tiles} rows of tiles ({q_len} queries, blocks of {block[0]}), got {listed_q_tiles}; "
            "rebuild it for this length"
        )
    return q_tiles, -(-kv_len // block[1])


def _lists(block_mask: BlockMask) -> list[tuple[Tensor, Tensor, int]]:
    """(counts, indices, kind) of each list. Full tiles come last, so that a tile in both lists becomes full."""
    partial, full = (block_mask.kv_num_blocks, block_mask.kv_indices), (block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    listed = [(*partial, PARTIAL)]
    if full[0] is not None and full[1] is not None:
        listed.append((full[0], full[1], FULL))
    return listed


def _listed_tiles(block_mask: BlockMask) -> tuple[tuple[int, int, int, int], Tensor, Tensor, Tensor]:
    """(batch, heads, q_tiles, kv_tiles), then row, column and kind (int64) of each listed tile: unique, sorted, on the CPU."""
    batch, heads, _ = block_mask.kv_num_blocks.shape
    q_tiles, kv_tiles = _tiles(block_mask)
    codes = []  # tile number * 4 + kind
    for count, indices, kind in _lists(block_mask):
        count, indices = count[:, :, :q_tiles].reshape(-1).cpu(), indices[:, :, :q_tiles].reshape(batch * heads * q_tiles, -1).cpu()
        row, entry = (torch.arange(indices.shape[1]) < count[:, None]).nonzero(as_tuple=True)
        column = indices[row, entry]
        row, column = row[column < kv_tiles], column[column < kv_tiles]
        codes.append((row * max(1, kv_tiles) + column) * 4 + kind)
    # A tile in both lists is full. `unique` sorts its full code last; the last code of each tile is taken.
    code = torch.cat(codes).unique()
    code = code[torch.cat([code[1:] // 4 != code[:-1] // 4, torch.ones(min(1, len(code)), dtype=torch.bool)])]
    tile, kinds = code // 4, code % 4
    return (batch, heads, q_tiles, kv_tiles), tile // max(1, kv_tiles), tile % max(1, kv_tiles), kinds
