"""Work over parts of a sequence, for kernel tests: tilings by arrays, and tables made by looking at every pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longspan._kernels.protocol import Work
from longspan._kernels.tiling import Tiling
from longspan._masks.block_table import FULL, PARTIAL, BlockTable
from longspan._masks.tracing import trace

Segments = Sequence[tuple[int, int]]  # (first position, length)


def shard(segments: Segments, block: int) -> Tiling:
    """Segments one after the other in a tensor, each cut into tiles from its own start on."""
    row, pos, count, at = [], [], [], 0
    for start, length in segments:
        for inner in range(0, length, block):
            row.append(at + inner)
            pos.append(start + inner)
            count.append(min(block, length - inner))
        at += length
    arrays = (torch.tensor(x, dtype=torch.int32) for x in (row, pos, count))
    return Tiling(length=at, block=block, **dict(zip(("row", "pos", "count"), arrays, strict=True)))


def table_of_pairs(seen: Tensor, q_tiles: Tiling, kv_tiles: Tiling) -> BlockTable:
    """The table of pairs seen [batch, heads, Q, K], rows and columns of the tensors at hand. Tiles shorter than a block are never full."""
    batch, heads = seen.shape[:2]
    ptr, first, last, kind = [0], [], [], []
    for b in range(batch):
        for h in range(heads):
            for i in range(q_tiles.tiles):
                row, m, _ = q_tiles.span(i)
                before = (-2, 0)
                for c in range(kv_tiles.tiles):
                    column, n, _ = kv_tiles.span(c)
                    tile = seen[b, h, row : row + m, column : column + n]
                    whole = bool(tile.all()) and m == q_tiles.block and n == kv_tiles.block
                    value = FULL if whole else PARTIAL if bool(tile.any()) else 0
                    if value and before == (c - 1, value):
                        last[-1] = c
                    elif value:
                        first.append(c)
                        last.append(c)
                        kind.append(value)
                    before = (c, value)
                ptr.append(len(first))
    p, f, z, k = (torch.tensor(x, dtype=torch.int32) for x in (ptr, first, last, kind))
    return BlockTable(
        q_len=q_tiles.length,
        kv_len=kv_tiles.length,
        block=(q_tiles.block, kv_tiles.block),
        batch=batch,
        heads=heads,
        ptr=p,
        first=f,
        last=z,
        kind=k.to(torch.int8),
        tiles=(q_tiles.tiles, kv_tiles.tiles),
    )


def work_of(
    mod: Callable[..., Tensor],
    q_segments: Segments,
    kv_segments: Segments,
    *,
    block: int,
    batch: int = 1,
    heads: int = 1,
    first: tuple[int, int] = (0, 0),
    scale: float = 0.3,
) -> Work:
    """The work of some queries over some keys of a sequence. `batch`, `heads`: of the tensors at hand, the first of them at `first`."""
    traced = trace(mod, "mask")
    q_tiles, kv_tiles = shard(q_segments, block), shard(kv_segments, block)
    q, kv = (t.positions(torch.device("cpu")) for t in (q_tiles, kv_tiles))
    b = torch.arange(batch if traced.program.uses_batch else 1) + first[0]
    h = torch.arange(heads if traced.program.uses_head else 1) + first[1]
    seen = mod(b.view(-1, 1, 1, 1), h.view(1, -1, 1, 1), q.view(1, 1, -1, 1), kv.view(1, 1, 1, -1)).expand(len(b), len(h), len(q), len(kv))
    return Work(
        table=table_of_pairs(seen, q_tiles, kv_tiles),
        q_tiles=q_tiles,
        kv_tiles=kv_tiles,
        scale=scale,
        mask=traced.program,
        mask_captured=traced.captured(),
        first_batch=first[0],
        first_head=first[1],
    )
