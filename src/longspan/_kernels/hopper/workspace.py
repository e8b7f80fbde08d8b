"""Workspaces of the Hopper kernels, allocated per launch: item counters, semaphores of ordered dQ, partial results of split-KV."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from longspan._kernels.gpu import launch
from longspan._kernels.hopper.forward_producer import GROUPS
from longspan._kernels.hopper.split_kv import KvSplit


def counter(device: torch.device) -> tuple[Tensor, ...]:
    """(the item counter,)."""
    return (zeros(1, device),)


def counter_and_semaphores(device: torch.device, count: int) -> tuple[Tensor | None, ...]:
    """(the item counter, `count` semaphores or None for 0)."""
    return zeros(1, device), zeros(count, device) if count else None


def counter_and_parts(device: torch.device, split: KvSplit, rows: int, dim: int) -> tuple[Tensor, ...]:
    """(the item counter and the split items' arrival counters, out of all parts, lse of all parts). A part has `rows` rows of `dim`."""
    counters, parts = zeros(1 + GROUPS.value * split.split_items, device), split.split_items * split.parts
    if not parts:
        return counters, counters.view(torch.float32), counters.view(torch.float32)
    out, lse = torch.empty(parts * rows * (dim + 1), dtype=torch.float32, device=device).split([parts * rows * dim, parts * rows])
    return counters, out, lse


class _Pools(threading.local):
    """For each stream, a tensor of zeros and how many of them are in use. One pool per device and stream."""

    def __init__(self) -> None:
        self.by_stream: dict[tuple[torch.device, int], tuple[Tensor, int]] = {}


_pools = _Pools()
_POOL_SIZE = 4096


def zeros(count: int, device: torch.device) -> Tensor:
    """`count` int32 zeros that no other launch uses, aligned to 16 bytes.

    Taken from a pool: a fill before each launch would take as long as a small kernel. Large counts are filled on their own. So are those of
    a CUDA graph in capture, which needs zeros at every replay.
    """
    if device.type != "cuda" or count > _POOL_SIZE or launch.capturing(device):
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    pool, start = _pools.by_stream.get(key, (None, 0))
    if pool is None or start + count > len(pool):
        pool, start = torch.zeros(_POOL_SIZE, dtype=torch.int32, device=device), 0
    _pools.by_stream[key] = pool, start + -(-count // 4) * 4
    return pool[start : start + count]
