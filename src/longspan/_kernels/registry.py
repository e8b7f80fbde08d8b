"""Kernels by name, and the choice among them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from longspan._kernels.protocol import Kernel, Work

NAMES = ("auto", "dense", "cpu", "triton", "hopper", "aten", "flash", "efficient", "cudnn")


class KernelRefused(ValueError):
    """A kernel was named that cannot do what was asked; the message says why and what can."""


def check_name(name: str) -> None:
    if name not in NAMES:
        raise ValueError(f"kernel: expected one of {', '.join(map(repr, NAMES))}, got {name!r}")


@cache
def kernel_named(name: str) -> Kernel:
    if name == "cpu":
        from longspan._kernels.cpu import CpuKernel

        return CpuKernel()
    if name == "triton":
        if not has_triton():
            raise KernelRefused("kernel 'triton' needs the triton package: pip install 'longspan[triton]', or use kernel='auto'")
        from longspan._kernels.triton import TritonKernel

        return TritonKernel()
    if name == "hopper":
        if not has_gluon():
            raise KernelRefused("kernel 'hopper' needs Gluon as Triton 3.6 has it: pip install 'triton==3.6.*', or use kernel='auto'")
        from longspan._kernels.hopper import HopperKernel

        return HopperKernel(fallback=kernel_named("triton"))
    if name in ("aten", "flash", "efficient", "cudnn"):
        from longspan._kernels.aten import KERNELS

        return KERNELS[name]
    raise AssertionError(f"no kernel of the protocol is called {name!r}")


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def has_gluon() -> bool:
    """Whether the Hopper kernels can be imported: Gluon is experimental, and they need names of it that are not public."""
    if not has_triton():
        return False
    try:
        import longspan._kernels.hopper  # noqa: F401
    except ImportError:
        return False
    return True


def choose(name: str, q: Tensor, k: Tensor, v: Tensor, work: Work, *, more: Sequence[Work] = ()) -> Kernel:
    """The kernel for a call: the named one, or with "auto" the first supported of hopper, triton and cpu on CUDA, and cpu elsewhere.

    `more`: other pieces of work of the call; the kernel must support them all. hopper is a candidate on Hopper GPUs with a tested Triton
    only (`usual`). torch's SDPA operators are never chosen by "auto": they round partial results, and sum the gradient of q in any order.
    """
    pieces = (work, *more)
    if name != "auto":
        kernel = kernel_named(name)
        reason = _refusal(kernel, q, k, v, pieces)
        if reason is not None:
            raise KernelRefused(f"kernel {name!r} cannot do this: {reason}. kernel='auto' picks one that can")
        return kernel
    candidates = (usual(q.device), "triton") if q.is_cuda and has_triton() else ()
    for candidate in candidates:
        if _refusal(kernel_named(candidate), q, k, v, pieces) is None:
            return kernel_named(candidate)
    return kernel_named("cpu")


def usual(device: torch.device) -> Literal["hopper", "triton"]:
    """The first candidate of "auto" on a CUDA device: hopper on Hopper GPUs with a tested Triton, else triton."""
    if not has_gluon() or torch.version.hip is not None:
        return "triton"
    from longspan._kernels.gpu.interpreter import interpreted
    from longspan._kernels.hopper.config import HOPPER
    from longspan._kernels.hopper.kernel import untested

    if interpreted() or _capability(device) != HOPPER:
        return "triton"
    if (reason := untested()) is not None:
        _warn_once(f"kernel='auto' takes 'triton' on this Hopper GPU, which is slower than 'hopper'. That one refuses {reason}")
        return "triton"
    return "hopper"


@cache
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=2)


def _refusal(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[Work]) -> str | None:
    return next((reason for work in pieces if (reason := kernel.refuses(q, k, v, work)) is not None), None)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
