"""The host side of Hopper calls on a machine without a GPU: launches are recorded, not made.

CPU tensors stand for CUDA tensors. Kernels are neither compiled nor run, so results are undefined. Everything else, up to the driver's
launch function, is the code that runs on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from longspan._kernels import registry
from longspan._kernels.gpu import prepared_launch, workspace
from longspan._kernels.hopper import kernel as hopper_kernel
from longspan._kernels.hopper import passes, prepared


@dataclass
class Launches:
    """Launches since the last `clear`: kernel names, and the values of driver launches."""

    names: list[str] = field(default_factory=list)
    values: list[tuple[int | float, ...]] = field(default_factory=list)

    def clear(self) -> None:
        self.names.clear()
        self.values.clear()


launches = Launches()  # of the process: prepared launches are cached and outlive a test


@dataclass
class RecordedLaunch:
    """In place of a `DriverLaunch`."""

    name: str

    def __call__(self, stream: int, values: Sequence[int | float]) -> None:
        launches.names.append(self.name)
        launches.values.append(tuple(values))


def record_launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Let CPU tensors pass for tensors on a Hopper GPU, and record launches of the Hopper kernels."""
    launches.clear()

    monkeypatch.setattr(prepared_launch, "interpreted", lambda: False)
    monkeypatch.setattr(prepared_launch.PreparedLaunch, "_compile_with_fewer_stages", lambda self, arguments: _name(self.kernel))
    monkeypatch.setattr(prepared_launch, "driver_launch", lambda compiled, *_, **__: RecordedLaunch(compiled))
    monkeypatch.setattr(prepared_launch, "ordered_stream", lambda device: 0)
    for module in (prepared_launch, prepared):
        monkeypatch.setattr(module, "current_cuda_device", lambda: None)  # the index of the CPU
    for module in (workspace, prepared):
        monkeypatch.setattr(module, "take_zeros", lambda count, device, stream: (0, torch.empty(0)))
    monkeypatch.setattr(prepared, "fill_with_zeros", lambda address, words, stream, device: ctypes.memset(address, 0, 4 * words))
    monkeypatch.setattr(hopper_kernel, "_unsupported_reason", lambda inputs, work: None)
    monkeypatch.setattr(passes, "persistent_ctas", lambda device: 132)
    monkeypatch.setattr(registry, "has_gluon", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return launches


def _name(kernel: Any) -> str:
    return getattr(kernel, "fn", kernel).__name__  # type: ignore[no-any-return]
