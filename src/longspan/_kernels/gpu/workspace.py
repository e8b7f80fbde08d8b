"""Memory that each launch has to itself: counters and semaphores that begin at 0, and partial results."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from longspan._kernels.gpu import launch
from longspan._torch_private import current_raw_stream, empty_on_device_of

_ALIGNMENT = 4  # int32 elements: Triton compiles again for addresses that are not divisible by 16
_POOL_SIZE = 4096


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Arrays of int32 zeros, then uninitialised float32 arrays; each kernel argument has one.

    `zeros`: the size of each array of zeros; 0 gives None. `floats`: the size of each float32 array; if all are 0, the kernel does not read
    them and gets the address of the first zeros.
    """

    device: torch.device
    zeros: tuple[int, ...] = ()
    floats: tuple[int, ...] = ()

    @property
    def arguments(self) -> int:
        """Number of kernel arguments."""
        return len(self.zeros) + len(self.floats)

    @cached_property
    def pooled_zeros(self) -> int:
        """The size of a workspace that is one array of zeros, if `take_zeros` can provide it; else 0."""
        sizes = [n for n in self.zeros if n]
        return sizes[0] if len(sizes) == 1 and not any(self.floats) and sizes[0] <= _POOL_SIZE else 0

    @cached_property
    def passed(self) -> int:
        """Number of kernel arguments that are not None."""
        return sum(1 for n in self.zeros if n) + len(self.floats)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """New arrays."""
        zeros = tuple(zeroed(n, self.device) if n else None for n in self.zeros)
        if not any(self.floats):
            first = next((z for z in zeros if z is not None), None)
            return *zeros, *(None if first is None else first.view(torch.float32) for _ in self.floats)
        return *zeros, *torch.empty(sum(self.floats), dtype=torch.float32, device=self.device).split(list(self.floats))

    def addresses(self, stream: int | None = None) -> tuple[list[int], list[Tensor]]:
        """(addresses of new arrays, without Nones; tensors to hold until the launch). stream: the current one, if none is captured."""
        if stream is not None and self.pooled_zeros:
            address, pool = take_zeros(self.pooled_zeros, self.device, stream)
            return [address] * self.passed, [pool]
        if stream is not None and max(self.zeros, default=0) <= _POOL_SIZE:
            taken = [take_zeros(n, self.device, stream) for n in self.zeros if n]
        else:
            taken = [_take(n, self.device) for n in self.zeros if n]
        addresses, held = [address for address, _ in taken], [pool for _, pool in taken]
        if not self.floats:
            return addresses, held
        if not any(self.floats):
            return [*addresses, *addresses[:1] * len(self.floats)], held
        if held:
            floats = empty_on_device_of(held[0], (sum(self.floats),), torch.float32)
        else:
            floats = torch.empty(sum(self.floats), dtype=torch.float32, device=self.device)
        address = floats.data_ptr()
        for size in self.floats:
            addresses.append(address)
            address += 4 * size
        return addresses, [*held, floats]


class _Pools(threading.local):
    """By device and stream: a tensor of zeros, its address, and how many of the zeros are in use."""

    def __init__(self) -> None:
        self.by_stream: dict[tuple[int, int], tuple[Tensor, int, int]] = {}


_pools = _Pools()


def zeroed(count: int, device: torch.device) -> Tensor:
    """`count` int32 zeros that no other launch uses, aligned to 16 bytes."""
    address, pool = _take(count, device)
    start = (address - pool.data_ptr()) // 4
    return pool if len(pool) == count else pool[start : start + count]


def _take(count: int, device: torch.device) -> tuple[int, Tensor]:
    """(the address of `count` zeros, the tensor that they are part of).

    Taken from a pool: a fill before each launch would take as long as a small kernel. Large counts are filled on their own. So are those of
    a CUDA graph in capture, which needs zeros at every replay.
    """
    if device.type != "cuda" or count > _POOL_SIZE or launch.capturing(device):
        alone = torch.zeros(count, dtype=torch.int32, device=device)
        return alone.data_ptr(), alone
    return take_zeros(count, device, current_raw_stream(device.index))


def take_flag(device: torch.device, stream: int | None) -> tuple[int, Tensor]:
    """(the address of one zero, the tensor that it is part of). stream: of `Workspace.addresses`."""
    return _take(1, device) if stream is None else take_zeros(1, device, stream)


def take_zeros(count: int, device: torch.device, stream: int) -> tuple[int, Tensor]:
    """(the address of at most 4,096 zeros, the tensor that they are part of), for a launch on the current stream outside of captures."""
    key = device.index, stream
    pool, address, start = _pools.by_stream.get(key, (None, 0, 0))
    if pool is None or start + count > _POOL_SIZE:
        pool, start = torch.zeros(_POOL_SIZE, dtype=torch.int32, device=device), 0
        address = pool.data_ptr()
    _pools.by_stream[key] = pool, address, start + -(-count // _ALIGNMENT) * _ALIGNMENT
    return address + 4 * start, pool
