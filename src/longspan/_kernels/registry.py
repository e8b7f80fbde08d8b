"""Kernels by name, and the choice among them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, cast

import torch

from longspan._kernels.protocol import AttentionInputs, Capabilities, Kernel, Work

NAMES = ("auto", "dense", "cpu", "triton", "hopper", "aten", "flash", "efficient", "cudnn")
STATIC = ("triton", "hopper")  # kernels that support `longspan.StaticMask`
INVARIANT = ("cpu", "triton", "hopper")  # kernels that support `longspan.invariant()`


class NotSupported(ValueError):
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
            raise NotSupported("kernel 'triton' needs the triton package: pip install 'longspan[triton]', or use kernel='auto'")
        from longspan._kernels.triton import TritonKernel

        return TritonKernel()
    if name == "hopper":
        if not has_gluon():
            raise NotSupported("kernel 'hopper' needs Gluon of Triton 3.6 to 3.9: pip install 'triton>=3.6,<3.10', or use kernel='auto'")
        from longspan._kernels.hopper import HopperKernel

        return HopperKernel(fallback=cast(Kernel, _LoadedAtFirstUse("triton")))
    if name in ("aten", "flash", "efficient", "cudnn"):
        from longspan._kernels.aten import KERNELS

        return KERNELS[name]
    raise AssertionError(f"no kernel is called {name!r}")


class _LoadedAtFirstUse:
    """A kernel that is imported when it is used: importing one takes a tenth of a second."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(kernel_named(self._name), attribute)


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
    except Exception:  # a private name may be missing in any way
        return False
    return True


class KernelCall(NamedTuple):
    """One kernel call of a pass: its inputs and its work."""

    inputs: AttentionInputs
    work: Work


class KernelChoice(NamedTuple):
    """The kernel for a pass, and its capabilities for all calls of the pass together."""

    kernel: Kernel
    capabilities: Capabilities


def choose(name: str, calls: Sequence[KernelCall]) -> KernelChoice:
    """The kernel for a pass: the named one, or with "auto" the first of hopper, triton and cpu on CUDA that supports all calls, else cpu.

    hopper is a candidate on Hopper GPUs with a tested Triton only (`first_candidate`). "auto" never chooses torch's SDPA operators: they
    round partial results and accumulate dQ in arbitrary order.
    """
    if name != "auto":
        choice = _consider(name, calls)
        if choice.capabilities.unsupported is not None:
            reason = choice.capabilities.unsupported
            raise NotSupported(f"kernel {name!r} does not support this call: {reason}. kernel='auto' picks one that does")
        return choice
    q = calls[0].inputs.q
    candidates = dict.fromkeys((first_candidate(q.device), "triton")) if q.is_cuda and has_triton() else ()
    for candidate in candidates:
        choice = _consider(candidate, calls)
        if choice.capabilities.unsupported is None:
            return choice
    return _consider("cpu", calls)


def combined_capabilities(kernel: Kernel, calls: Sequence[KernelCall], *, needs: Sequence[bool] = ()) -> Capabilities:
    """The capabilities of a kernel for all calls of a pass together; `unsupported` is the first reason that a call has."""
    if any(work.invariant for _, work in calls) and kernel.name not in INVARIANT:
        return Capabilities(unsupported=f"longspan.invariant(): expected kernel 'auto' or one of {', '.join(map(repr, INVARIANT))}")
    each = [kernel.capabilities(inputs, work, needs=needs) for inputs, work in calls]
    return Capabilities(
        unsupported=next((c.unsupported for c in each if c.unsupported is not None), None),
        two_kv_buffers=all(c.two_kv_buffers for c in each),
        concurrent_backward=all(c.concurrent_backward for c in each),
        rounds_kv_grads_once=all(c.rounds_kv_grads_once for c in each),
    )


def torch_settings() -> tuple[bool, ...]:
    """torch's global settings that capabilities depend on; part of the key wherever a choice of kernel is cached."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    backends = torch.backends.cuda
    sdpa = backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(), backends.cudnn_sdp_enabled()
    return deterministic, torch.is_deterministic_algorithms_warn_only_enabled(), *sdpa


def first_candidate(device: torch.device) -> Literal["hopper", "triton"]:
    """The first candidate of "auto" on a CUDA device: hopper on Hopper GPUs with a tested Triton, else triton."""
    if not has_gluon() or torch.version.hip is not None:
        return "triton"
    from longspan._kernels.gpu.interpreter import interpreted
    from longspan._kernels.hopper.config import HOPPER
    from longspan._kernels.hopper.kernel import untested_triton

    if interpreted() or _capability(device) != HOPPER:
        return "triton"
    if (reason := untested_triton()) is not None:
        _warn_once(f"kernel='auto' uses 'triton' on this Hopper GPU, which is slower than 'hopper': {reason}")
        return "triton"
    return "hopper"


@cache
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=2)


def _consider(name: str, calls: Sequence[KernelCall]) -> KernelChoice:
    kernel = kernel_named(name)
    return KernelChoice(kernel, combined_capabilities(kernel, calls))


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
