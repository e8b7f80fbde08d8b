"""Tile shapes, pipeline stages and registers of the Hopper kernels. Measured on an H200 (bench/results)."""

from __future__ import annotations

from dataclasses import dataclass

HOPPER = (9, 0)  # compute capability


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """m queries by n keys at a time, `stages` tiles in flight.

    `start_registers`: registers per thread at launch. `registers`: registers per thread of the warp groups that compute.
    """

    m: int
    n: int
    stages: int
    start_registers: int = 168
    registers: int = 240


def forward_config(d: int, e: int) -> TileConfig:
    """For padded head dims d of keys and e of values. The queries, the KV stages and the output tile fit into 227 KB of shared memory."""
    widest = max(d, e)
    if widest <= 64:
        return TileConfig(m=128, n=128, stages=4)
    return TileConfig(m=128, n=128 if widest <= 128 else 64, stages=2)


def has_backward(d: int, e: int) -> bool:
    """Whether the backward kernels support these padded head dims: dK and dV of 64 keys must fit into the registers of a warp group."""
    return d == e <= 128


def dkv_config(d: int, *, with_dq: bool) -> TileConfig:
    """For the kernel by key tiles: items of n keys, steps of m queries. A wide dQ takes the shared memory of two stages."""
    return TileConfig(m=64, n=128, stages=2 if with_dq and d > 64 else 4)


def dq_tile(d: int, m: int) -> tuple[int, int]:
    """(queries, dims) of a step's dQ that each of two warp groups computes: half of the dims, or at 64 dims half of the queries."""
    return (m, 64) if d > 64 else (m // 2, 64)


def dq_config(d: int, e: int, *, scored: bool) -> TileConfig:
    """For the kernel by query tiles. A score mod needs registers of its own and gets blocks of 64 keys, for which `backward_dq` holds the
    queries in registers. Small blocks leave shared memory for twice as many stages.
    """
    n = 64 if scored else 128
    return TileConfig(m=128, n=n, stages=4 if n * max(d, e) <= 8192 else 2)
