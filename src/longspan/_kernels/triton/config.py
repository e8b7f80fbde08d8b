"""Tile sizes by device, head dims and dtype. Fixed, not autotuned: the same inputs give the same bits in every run."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Tile:
    """The tile of one pass: m queries × n keys per step, warps per CTA, stages of the software pipeline.

    `tma`: the loop loads its tiles by TMA (Hopper and later) where the tensors' strides allow it.
    """

    m: int
    n: int
    warps: int
    stages: int
    tma: bool = False


@dataclass(frozen=True, kw_only=True)
class Config:
    """The tiles of all passes. `l2_bytes`: KV that concurrent CTAs share should fit into so many bytes of L2."""

    forward: Tile
    dkdv: Tile
    dq: Tile
    l2_bytes: int = 24 * 2**20


FINE = (64, 64)


def prefers_fine_tables(*, capability: tuple[int, int], d: int, e: int, dtype: torch.dtype, partial_share: float) -> bool:
    """Whether 64 × 64 block tables are faster: with many partial tiles they waste less work; otherwise larger tiles are faster."""
    return capability >= (9, 0) and dtype != torch.float32 and max(d, e) <= 128 and partial_share > 0.1


def choose(*, capability: tuple[int, int], d: int, e: int, dtype: torch.dtype, scored: bool, looks_up: bool, fine: bool) -> Config:
    """The configuration for a device of this compute capability, padded head dims d and e.

    `scored`: there is a score program. `looks_up`: the mask reads captured tensors. `fine`: the table's tiles are 64 × 64. Measured on
    an H200 (bench/results); not measured on other devices.
    """
    wide = max(d, e)
    if dtype == torch.float32:
        small = Tile(m=32, n=32, warps=4, stages=2)
        if wide <= 64:
            return Config(forward=Tile(m=64, n=32, warps=4, stages=3), dkdv=small, dq=small)
        tiny = Tile(m=16, n=32, warps=4, stages=1) if wide > 128 else small
        return Config(forward=Tile(m=32, n=32, warps=4, stages=2), dkdv=tiny, dq=tiny)
    if capability >= (9, 0):
        if wide <= 64:
            step = Tile(m=64, n=128, warps=8 if scored else 4, stages=3)
            return Config(forward=Tile(m=128, n=128, warps=8, stages=3), dkdv=step, dq=Tile(m=128, n=64, warps=8, stages=3))
        # With three stages of 64 × 64, two CTAs fill the shared memory of an SM. A mask that looks values up needs some of it.
        square = Tile(m=64, n=64, warps=4, stages=2 if looks_up else 3, tma=True)
        if wide <= 128 and fine:
            return Config(
                forward=square,
                dkdv=Tile(m=32, n=64, warps=4, stages=3, tma=True),
                dq=Tile(m=64, n=64, warps=4, stages=2, tma=True),
            )
        if wide <= 128:
            return Config(
                forward=square if scored else Tile(m=128, n=64, warps=4, stages=2, tma=True),
                dkdv=Tile(m=32, n=64, warps=4, stages=3, tma=True),
                dq=Tile(m=128, n=64, warps=8, stages=3),
            )
        return Config(
            forward=Tile(m=128, n=64, warps=8, stages=2), dkdv=Tile(m=32, n=64, warps=8, stages=1), dq=Tile(m=64, n=32, warps=4, stages=1)
        )
    if wide <= 64:
        return Config(
            forward=Tile(m=128, n=64, warps=4, stages=3), dkdv=Tile(m=64, n=64, warps=4, stages=3), dq=Tile(m=64, n=64, warps=4, stages=3)
        )
    if wide <= 128:
        return Config(
            forward=Tile(m=64, n=64, warps=4, stages=2), dkdv=Tile(m=32, n=64, warps=4, stages=2), dq=Tile(m=64, n=32, warps=4, stages=2)
        )
    return Config(
        forward=Tile(m=64, n=32, warps=4, stages=2), dkdv=Tile(m=16, n=32, warps=4, stages=1), dq=Tile(m=32, n=16, warps=4, stages=1)
    )
