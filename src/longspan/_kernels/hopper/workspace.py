"""Memory that a launch has for itself: what its items are counted with, and what pieces of items leave for each other."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from longspan._kernels.gpu import launch
from longspan._kernels.hopper.forward_producer import GROUPS
from longspan._kernels.hopper.split_kv import Pieces


def counter(device: torch.device) -> tuple[Tensor, ...]:
    return (zeros(1, device),)


def counter_and_locks(device: torch.device, count: int) -> tuple[Tensor | None, ...]:
    """(the counter, so many locks or None)."""
    return zeros(1, device), zeros(count, device) if count else None


def counter_and_states(device: torch.device, cut: Pieces, rows: int, dim: int) -> tuple[Tensor, ...]:
    """(the counter and flags, states that pieces leave: outputs, lse), for pieces of so many rows and dims."""
    flags, states = zeros(1 + GROUPS.value * cut.cut, device), cut.cut * cut.parts
    if not states:
        return flags, flags.view(torch.float32), flags.view(torch.float32)
    out, lse = torch.empty(states * rows * (dim + 1), dtype=torch.float32, device=device).split([states * rows * dim, states * rows])
    return flags, out, lse


class _Zeros(threading.local):
    """For every stream, a tensor of zeros and how many of them were given away."""

    def __init__(self) -> None:
        self.by_stream: dict[tuple[torch.device, int], tuple[Tensor, int]] = {}


_given_away = _Zeros()
_ZEROS = 4096


def zeros(count: int, device: torch.device) -> Tensor:
    """So many int32 zeros that no other launch gets, on 16 bytes. One fill serves many launches: one before each would take as long as a
    small kernel. Many at once have a fill of their own, and so has a CUDA graph that is being captured: it needs zeros at every replay.
    """
    if device.type != "cuda" or count > _ZEROS or launch.capturing(device):
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    found, start = _given_away.by_stream.get(key, (None, 0))
    if found is None or start + count > len(found):
        found, start = torch.zeros(_ZEROS, dtype=torch.int32, device=device), 0
    _given_away.by_stream[key] = found, start + -(-count // 4) * 4
    return found[start : start + count]
