"""Kernels by name, and the choice among them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch

from longspan._kernels.protocol import AttentionInputs, Capabilities, Kernel, Work

NAMES = ("auto", "dense", "cpu", "triton", "hopper", "aten", "flash", "efficient", "cudnn")


class KernelRefused(ValueError):
    """Raised when a named kernel does not support a call, or is not installed. The message has the reason and an alternative."""


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
    raise AssertionError(f"no kernel is called {name!r}")


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def has_gluon() -> bool:
    """Whether the Hopper kernels can be imported: they use private names of Gluon, which is experimental."""
    if not has_triton():
        return False
    try:
        import longspan._kernels.hopper  # noqa: F401
    except ImportError:
        return False
    return True


class KernelChoice(NamedTuple):
    """The kernel for a call, and its capabilities for the first piece of work."""

    kernel: Kernel
    capabilities: Capabilities


def choose(name: str, inputs: AttentionInputs, work: Work, *, more: Sequence[Work] = ()) -> KernelChoice:
    """The kernel for a call: the named one, or with "auto" the first supported of hopper, triton and cpu on CUDA, and cpu elsewhere.

    `more`: other pieces of work of the call; the kernel must support them all. hopper is a candidate on Hopper GPUs with a tested Triton
    only (`first_candidate`). "auto" never chooses torch's SDPA operators: they round partial results and accumulate dQ in arbitrary order.
    """
    if name != "auto":
        choice, reason = _consider(name, inputs, (work, *more))
        if reason is not None:
            raise KernelRefused(f"kernel {name!r} does not support this call: {reason}. kernel='auto' picks one that does")
        return choice
    for candidate in (first_candidate(inputs.q.device), "triton") if inputs.q.is_cuda and has_triton() else ():
        choice, reason = _consider(candidate, inputs, (work, *more))
        if reason is None:
            return choice
    return _consider("cpu", inputs, (work,))[0]


def first_candidate(device: torch.device) -> Literal["hopper", "triton"]:
    """The first candidate of "auto" on a CUDA device: hopper on Hopper GPUs with a tested Triton, else triton."""
    if not has_gluon() or torch.version.hip is not None:
        return "triton"
    from longspan._kernels.gpu.interpreter import interpreted
    from longspan._kernels.hopper.config import HOPPER
    from longspan._kernels.hopper.kernel import untested

    if interpreted() or _capability(device) != HOPPER:
        return "triton"
    if (reason := untested()) is not None:
        _warn_once(f"kernel='auto' uses 'triton' on this Hopper GPU, which is slower than 'hopper': 'hopper' does not support {reason}")
        return "triton"
    return "hopper"


@cache
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=2)


def _consider(name: str, inputs: AttentionInputs, pieces: Sequence[Work]) -> tuple[KernelChoice, str | None]:
    """A kernel as a choice, and the reason why it does not support one of the pieces, if so."""
    kernel = kernel_named(name)
    first, *more = (kernel.capabilities(inputs, work) for work in pieces)
    return KernelChoice(kernel, first), next((c.refusal for c in (first, *more) if c.refusal is not None), None)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
