"""Limits of torch's SDPA operators, decided from shapes, dtypes, device and work before any operator is called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda as backends

from longspan._kernels.aten_ops import Backend, operator
from longspan._kernels.protocol import AttentionInputs, Work
from longspan._kernels.rectangles import Rectangle, rectangles

_HALF = (torch.bfloat16, torch.float16)
_DTYPES: dict[Backend, tuple[torch.dtype, ...]] = {"flash": _HALF, "cudnn": _HALF, "efficient": (*_HALF, torch.float32)}
_CPU_DTYPES = (torch.float64, torch.float32, *_HALF)
_ALLOWED: dict[Backend, Callable[..., bool]] = {
    "flash": backends.can_use_flash_attention,
    "efficient": backends.can_use_efficient_attention,
    "cudnn": backends.can_use_cudnn_attention,
}
_params: Callable[..., Any] = backends.SDPAParams  # torch's own annotation of it is wrong
_MAX_HEADS = 65535  # a dimension of a CUDA grid


def unsupported_reason(backend: Backend, inputs: AttentionInputs, work: Work) -> str | None:
    """Why a backend cannot compute this work, forward and backward; None if it can. Reads lengths from `work`, not from k and v."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if work.score is not None:
        return f"score_mod {work.score.name!r}: torch's SDPA operators do not support score_mod"
    reason = _tensors(backend, q, v)
    if reason is not None:
        return reason
    rects = rectangles(work)
    masked = [r for r in rects if r.kind == "masked"]
    if masked:
        r = masked[0]
        return (
            f"{len(masked)} of {len(rects)} rectangles of the mask are neither full nor causal squares, such as queries {r.q0} to "
            f"{r.q1 - 1} and keys {r.k0} to {r.k1 - 1}: expected full rectangles and causal squares"
        )
    return _sizes(backend, q, k, v, rects) if q.is_cuda and rects else None


def _tensors(backend: Backend, q: Tensor, v: Tensor) -> str | None:
    """Device, dtype and head dims."""
    device, dim, value_dim = q.device.type, q.shape[-1], v.shape[-1]
    if device not in ("cpu", "cuda") or (device == "cpu" and backend != "flash"):
        return f"tensors on {q.device}: expected a CUDA device" + (" or the CPU" if backend == "flash" else "")
    supported = _CPU_DTYPES if device == "cpu" else _DTYPES[backend]
    if q.dtype not in supported:
        return f"dtype {q.dtype} on {device}: expected {', '.join(str(d).removeprefix('torch.') for d in supported)}"
    op = operator(backend, q.device)
    if op.same_dims and dim != value_dim:
        return f"head dims {dim} of keys and {value_dim} of values: expected the same"
    step = min(op.step, 16 // q.element_size()) if device == "cuda" else 1
    if dim % step or value_dim % step or not dim or not value_dim:
        return f"head dims {dim} and {value_dim}: expected multiples of {step}"
    return _cuda(backend, q, value_dim) if device == "cuda" else None


def _cuda(backend: Backend, q: Tensor, value_dim: int) -> str | None:
    if torch.version.hip is not None:
        return "a ROCm build of torch: not tested"
    capability, dim = _capability(q.device), q.shape[-1]
    named = f"{torch.cuda.get_device_name(q.device)} (compute capability {capability[0]}.{capability[1]})"
    if capability < (8, 0) and (backend != "efficient" or q.dtype == torch.bfloat16):
        return f"{named}: expected 8.0 (Ampere) or later" + (" for bfloat16" if backend == "efficient" else "")
    if max(q.shape[:2]) > _MAX_HEADS:
        return f"batch {q.shape[0]}, heads {q.shape[1]}: expected at most {_MAX_HEADS} each"
    if backend == "flash":
        if dim > 256:
            return f"head dim {dim}: expected at most 256"
        if 192 < dim <= 224 and ((8, 6) <= capability < (9, 0) or capability >= (12, 0)):
            return f"head dim {dim} on {named}: its backward pass does not support 193 to 224 there"
    if backend == "cudnn":
        return _cudnn(dim, value_dim)
    return None


def _cudnn(dim: int, value_dim: int) -> str | None:
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return "torch.use_deterministic_algorithms(True) is set: cuDNN accumulates the gradient of q in arbitrary order"
    latent = (dim, value_dim) == (192, 128) and _cudnn_version() >= 91100
    if max(dim, value_dim) > 128 and not latent:
        return f"head dims {dim} and {value_dim} with cuDNN {_cudnn_version()}: expected at most 128 each, or 192 and 128 from 91100 on"
    return None


def _cudnn_version() -> int:
    return torch.backends.cudnn.version() or 0


def _sizes(backend: Backend, q: Tensor, k: Tensor, v: Tensor, rects: Iterable[Rectangle]) -> str | None:
    """Limits of lengths on CUDA. torch's own check comes last: it covers its build, library versions and the user's backend switches."""
    shapes = sorted({(r.q1 - r.q0, r.k1 - r.k0, r.kind == "causal") for r in rects}, reverse=True)
    odd = [(m, n) for m, n, _ in shapes if m % 128 or n % 128]
    if backend == "cudnn" and odd and _cudnn_version() < 91501:
        m, n = odd[0]
        reason = "before 91501 it writes out of bounds unless both are multiples of 128"
        return f"{m} queries and {n} keys with cuDNN {_cudnn_version()}: {reason}"
    heads = k.shape[1] if backend != "efficient" else q.shape[1]
    for m, n, causal in shapes:
        with torch.cuda.device(q.device):
            parts = ((q, q.shape[1], m), (k, heads, n), (v, heads, n))
            like = [t.new_empty(t.shape[-1]).expand(t.shape[0], h, length, -1) for t, h, length in parts]
            if not _ALLOWED[backend](_params(*like, None, 0.0, causal, heads != q.shape[1]), False):
                check = f"torch.backends.cuda.{_ALLOWED[backend].__name__}"
                return f"{m} queries and {n} keys: {check} returns False on this machine (with debug=True it warns with the reason)"
    return None


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
