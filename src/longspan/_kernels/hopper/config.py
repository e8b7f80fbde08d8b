"""How the Hopper kernels are cut. Measured on an H200 (bench/results)."""

from __future__ import annotations

from dataclasses import dataclass

HOPPER = (9, 0)  # compute capability


@dataclass(frozen=True, kw_only=True)
class Step:
    """m queries and n keys at a time, `stages` blocks in flight; registers of a thread at the start, and where it computes."""

    m: int
    n: int
    stages: int
    start_registers: int = 168
    registers: int = 240


def forward_step(d: int, e: int) -> Step:
    """For padded head dims d and e. Shared memory (227 KB) holds the queries, blocks of keys and values, and a result to be written."""
    wide = max(d, e)
    if wide <= 64:
        return Step(m=128, n=128, stages=4)
    return Step(m=128, n=128 if wide <= 128 else 64, stages=2)


def has_backward(d: int, e: int) -> bool:
    """Whether the backward kernels take these padded dims: dK and dV of 64 keys must fit into the registers of four warps."""
    return d == e <= 128


def keys_step(d: int, *, with_dq: bool) -> Step:
    """The pass over keys: n keys of an item, m queries of a step. Where it computes wide dQ too, that takes the room of two stages."""
    return Step(m=64, n=128, stages=2 if with_dq and d > 64 else 4)


def dq_part(d: int, m: int) -> tuple[int, int]:
    """(queries, dims) of a step's dQ that each of two groups of warps has: half of the dims, or of 64 dims all, of half the queries."""
    return (m, 64) if d > 64 else (m // 2, 64)


def queries_step(d: int, e: int, *, scored: bool) -> Step:
    """The pass over queries. A score program needs registers of its own: half the keys at a time. Of small blocks there is room for
    twice as many. 64 keys: `queries.py` holds the queries in registers then.
    """
    n = 64 if scored else 128
    return Step(m=128, n=n, stages=4 if n * max(d, e) <= 8192 else 2)
