"""How the Hopper kernels are cut. Measured on an H200 (bench/results)."""

from __future__ import annotations

from dataclasses import dataclass


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
        return Step(m=128, n=128, stages=3)
    return Step(m=128, n=128 if wide <= 128 else 64, stages=2)
