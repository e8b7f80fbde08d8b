"""Kernels by name, and the choice among them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from longspan._kernels import choice
from longspan._kernels.protocol import Kernel, Work
from longspan._kernels.rectangles import rectangles

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


def choose(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    work: Work,
    *,
    more: Sequence[Work] = (),
    staged: bool = False,
    backward: bool = False,
    peak: bool = False,
) -> Kernel:
    """The kernel for a call: the named one or a refusal; for `auto`, on CUDA the fastest that can, else the portable one.

    On CUDA that is what was measured to be the fastest for this work, else `usual`, else triton.

    `more`: other pieces that the same kernel will be given; it must take them all. `staged`: results are folded into a state (of another
    piece, or a sink's). `backward`: the choice is for the backward pass; it may differ from the forward's, since what is saved between
    them is no more than out and lse. `peak`: the largest scores are asked for. The last three guide `auto` alone.
    """
    pieces = (work, *more)
    if name != "auto":
        kernel = kernel_named(name)
        reason = _refusal(kernel, q, k, v, pieces)
        if reason is not None:
            raise KernelRefused(f"kernel {name!r} cannot do this: {reason}. kernel='auto' picks one that can")
        return kernel
    if q.device.type != "cuda":
        return kernel_named("cpu")
    # Partial results in half precision are rounded where they leave these kernels: one call only, and nothing to fold it into.
    alone = not (more or staged or peak)
    candidates = [_measured_faster(q, v, work, backward=backward)] if alone else []
    candidates += [usual(q.device), "triton"] if has_triton() else []
    for candidate in candidates:
        if candidate is not None and _refusal(kernel_named(candidate), q, k, v, pieces) is None:
            return kernel_named(candidate)
    return kernel_named("cpu")


def usual(device: torch.device) -> Literal["hopper", "triton"]:
    """What `auto` takes on a CUDA device, in half precision, where nothing was measured to be faster."""
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


def _measured_faster(q: Tensor, v: Tensor, work: Work, *, backward: bool) -> str | None:
    """The kernel that was measured to be the fastest for this work. flash and cuDNN sum the gradient of q in any order: not where results
    must be the same in every run.
    """
    fixed = backward and torch.are_deterministic_algorithms_enabled()
    if fixed or work.score is not None or q.dtype not in (torch.bfloat16, torch.float16):
        return None
    dims, tokens = (q.shape[-1], v.shape[-1]), min(work.q_tiles.length, work.kv_tiles.length)
    rows = [r for r in _known(q.device) if (r.backward, r.dims) == (backward, dims) and tokens >= r.tokens]
    kind = whole_kind(work) if rows else None
    return next((r.kernel for r in rows if r.kind == kind), None)


def whole_kind(work: Work) -> Literal["full", "causal"] | None:
    """Whether the work is one rectangle, all queries against all keys: full, or a causal square."""
    table, counts = work.table, work.table.counts()
    rows, columns, found = table.q_tiles, table.kv_tiles, counts.partial + counts.full
    # From the numbers alone most masks are told apart, before anything is evaluated.
    if table.batch * table.heads != 1 or counts.partial > 2 * (rows + columns) or found not in (rows * columns, rows * (rows + 1) // 2):
        return None
    rects = rectangles(work)
    everything = (0, work.q_tiles.length, 0, work.kv_tiles.length)
    if len(rects) != 1 or (rects[0].q0, rects[0].q1, rects[0].k0, rects[0].k1) != everything or rects[0].kind == "masked":
        return None
    return rects[0].kind


def _known(device: torch.device) -> tuple[choice.Faster, ...]:
    return choice.rows_for(_device_name(device), _capability(device))


@cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
