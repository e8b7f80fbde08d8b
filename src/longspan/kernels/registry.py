"""Kernels by name, and the choice among them."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from torch import Tensor

from longspan.kernels.protocol import Kernel, Work

NAMES = ("auto", "dense", "cpu", "triton")


class KernelRefused(ValueError):
    """A kernel was named that cannot do what was asked; the message says why and what can."""


def check_name(name: str) -> None:
    if name not in NAMES:
        raise ValueError(f"kernel: expected one of {', '.join(map(repr, NAMES))}, got {name!r}")


@cache
def kernel_named(name: str) -> Kernel:
    if name == "cpu":
        from longspan.kernels.cpu import CpuKernel

        return CpuKernel()
    if name == "triton":
        if not _has_triton():
            raise KernelRefused("kernel 'triton' needs the triton package: pip install 'longspan[triton]', or use kernel='auto'")
        from longspan.kernels.triton import TritonKernel

        return TritonKernel()
    raise AssertionError(f"no kernel of the protocol is called {name!r}")


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def choose(name: str, q: Tensor, k: Tensor, v: Tensor, work: Work) -> Kernel:
    """The kernel for a call: the named one or a refusal; for `auto`, triton on CUDA where it can, else the portable one."""
    if name != "auto":
        kernel = kernel_named(name)
        reason = kernel.refuses(q, k, v, work)
        if reason is not None:
            raise KernelRefused(f"kernel {name!r} cannot do this: {reason}. kernel='auto' picks one that can")
        return kernel
    if q.device.type == "cuda" and _has_triton():
        kernel = kernel_named("triton")
        if kernel.refuses(q, k, v, work) is None:
            return kernel
    return kernel_named("cpu")
