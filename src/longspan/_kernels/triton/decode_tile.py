"""Tile sizes of the decode kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class DecodeTile:
    """Keys per step, warps per CTA, tiles in shared memory; whether keys are loaded by TMA where possible, and multiplied by wgmma."""

    n: int
    warps: int
    buffers: int
    tma: bool = False
    wgmma: bool = False

    def stages(self, *, paged: bool) -> int:
        """Stages of Triton's software pipeline for this number of buffers.

        wgmma still reads a tile when the next step begins, so one buffer is not a stage. With pages, Triton loads a page's number as many
        stages before a tile as it loads the tile before its use; with wgmma, one stage before.
        """
        if self.wgmma:
            return self.buffers + paged
        return 2 * self.buffers + 1 if paged else self.buffers + 1


def choose_tile(*, dim: int, dtype: torch.dtype, rows: int, waves: float, fp8: bool = False) -> DecodeTile:
    """The tile of `rows` query rows for padded head dims of at most `dim`. waves: CTAs of the launch per SM. fp8: of FP8 pages.

    n, the keys that are summed at a time, depends neither on pages nor on the batch: a row has the same bits on pages of any size.
    """
    if dim > 256:  # latent vectors of MLA: key and value are one tile
        if dtype == torch.float32:
            return DecodeTile(n=16, warps=4, buffers=1)
        return DecodeTile(n=64, warps=4 if rows <= 16 else 8, buffers=2, tma=True, wgmma=rows >= 64)
    if dtype == torch.float32:
        return DecodeTile(n=32, warps=4, buffers=2)
    if fp8 and rows <= 16:
        return DecodeTile(n=64 if dim > 128 else 128, warps=4, buffers=2)
    if dim > 128:
        return DecodeTile(n=32, warps=4, buffers=3)
    return DecodeTile(n=64, warps=4, buffers=2 if waves > 4 else 3)  # 3 or 2 CTAs per SM: with 3, a second wave may be nearly empty


def tile_rows(rows: int, dim: int, dtype: torch.dtype) -> int:
    """Rows of a tile for a sequence with so many query rows of a KV head. `dim`: of values; registers hold rows × dim results."""
    if dim > 256:
        return 16 if rows <= 16 or dtype == torch.float32 else 64
    return 16 if rows <= 16 else 32 if rows <= 32 else 64
