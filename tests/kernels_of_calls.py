"""Which GPU kernels calls would compile, counted on a machine without a GPU.

`pretend_gpu()` lets longspan take CPU tensors for those of a Hopper GPU: launches compute nothing, results are uninitialised memory, and
each launch adds the key by which Triton caches its kernel. For a process of its own, without Triton's interpreter.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import compute_cache_key

SHARED_MEMORY = 227 * 1024  # bytes that a CTA may have


class CompileOnlyDriver:
    """A Triton driver with a target and no device."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def pretend_device() -> None:
    """Patch torch and Triton for the life of the process, so that launches for CPU tensors find the properties of a Hopper GPU."""
    driver.set_active(CompileOnlyDriver())  # type: ignore[arg-type]
    torch.cuda.device = lambda device: nullcontext()  # type: ignore[assignment, misc, return-value]
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(  # type: ignore[assignment, return-value]
        multi_processor_count=132, shared_memory_per_block_optin=SHARED_MEMORY
    )


def pretend_gpu() -> set[tuple[str, str]]:
    """Patch longspan too; returns the set of (kernel name, key) that later launches fill."""
    from longspan import _torch_private
    from longspan._kernels.gpu import prepared_launch
    from longspan._kernels.gpu.prepared_launch import PreparedLaunch
    from longspan._kernels.hopper import HopperKernel
    from longspan._kernels.triton import TritonKernel

    pretend_device()
    kernels: set[tuple[str, str]] = set()
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment, misc]
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.current_device = torch._C._cuda_getDevice = _torch_private.current_cuda_device = lambda: 0  # type: ignore[attr-defined]
    torch.cuda.default_stream = torch.cuda.current_stream = lambda device=None: 0  # type: ignore[assignment, return-value]

    def record(kernel: Any, arguments: Any, options: dict[str, Any]) -> Any:
        _, specialization, rest = kernel.device_caches[0][-1](*arguments, **options)
        kernels.add((kernel.fn.__name__, compute_cache_key({}, specialization, rest)))
        return SimpleNamespace(metadata=SimpleNamespace(shared=0))

    prepared_launch.compile_kernel = record
    prepared_launch.driver_launch = lambda *args, **options: None  # type: ignore[assignment]
    PreparedLaunch.__call__ = PreparedLaunch.compile  # type: ignore[method-assign]
    for kernel in (HopperKernel, TritonKernel):
        for name in ("prepare_forward", "prepare_backward", "prepare_forward_step", "prepare_backward_step", "prepare_row_terms"):
            if hasattr(kernel, name):
                setattr(kernel, name, lambda self, *args, **options: None)
    return kernels
