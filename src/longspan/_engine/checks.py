"""Checks of arguments before any kernel runs. Messages say what was expected, what was given, and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import FlexKernelOptions
from torch.overrides import TorchFunctionMode

from longspan._engine.values import PLAIN
from longspan._masks.tracing import ProgramError
from longspan._torch_private import is_batched_gradient, is_transformed, modes_are_active, transform_is_active, tree_leaves

# torch's option names, each also with a prefix for the forward or the backward pass only.
_OPTIONS = frozenset(f"{side}{name}" for name in FlexKernelOptions.__annotations__ for side in ("", "fwd_", "bwd_"))
_BACKENDS = ("AUTO", "TRITON", "TRITON_DECODE", "FLASH")

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def is_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether a call without torch's dispatcher behaves as the operator would: no dispatch mode is active, no tensor is of a subclass, and
    none is left over from a transform of torch.func, whose gradients would be lost.
    """
    return not modes_are_active() and all(type(t) in PLAIN and not is_transformed(t) for t in tensors)


def check_tensors(q: Any, k: Any, v: Any) -> None:
    """Raise unless q [B, H, Q, D], k [B, G, K, D] and v [B, G, K, E] fit together in rank, dtype, device and sizes."""
    named = (("q", q), ("k", k), ("v", v))
    for name, t in named:
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(t).__name__}")
        if t.is_nested or t.layout != torch.strided:
            raise TypeError(f"{name}: expected a plain dense tensor, got layout {t.layout}; pack sequences and use a documents() mask")
        if t.ndim != 4:
            raise ValueError(f"{name}: expected 4 dims [batch, heads, tokens, head_dim], got shape {tuple(t.shape)}")
    if q.dtype not in DTYPES:
        raise TypeError(f"q: expected one of {', '.join(str(d) for d in DTYPES)}, got {q.dtype}; convert q, k and v")
    for name, t in named[1:]:
        if t.dtype != q.dtype:
            raise TypeError(f"{name}: expected the dtype of q, {q.dtype}, got {t.dtype}; convert one of them")
        if t.device != q.device:
            raise ValueError(f"{name}: expected the device of q, {q.device}, got {t.device}; move it with .to(q.device)")
        if t.shape[0] != q.shape[0]:
            raise ValueError(f"{name}: expected the batch of q, {q.shape[0]}, got {t.shape[0]} (shape {tuple(t.shape)})")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k: expected the head dim of q, {q.shape[-1]}, got {k.shape[-1]}")
    if v.shape[1:3] != k.shape[1:3]:
        raise ValueError(f"v: expected the heads and tokens of k, {tuple(k.shape[1:3])}, got {tuple(v.shape[1:3])}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"k: expected a number of KV heads that divides the {q.shape[1]} query heads, got {k.shape[1]}")
    if 0 in (*q.shape[:2], q.shape[-1], v.shape[-1]):
        raise ValueError(f"q, k, v: expected batch, heads and head dims >= 1, got q {tuple(q.shape)} and v {tuple(v.shape)}")


def reject_transforms(*, planned: bool = False) -> None:
    """Raise RuntimeError under torch.vmap and torch.func. Only the dense kernel without a plan has rules for them."""
    if transform_is_active():
        other = "with a plan no kernel supports them" if planned else "kernel='dense' supports them, in O(S²) memory"
        raise RuntimeError(
            f"longspan.attention is not supported under torch.vmap or the transforms of torch.func; {other}. Instead of torch.vmap, "
            "flatten the mapped dim into the batch, x.flatten(0, 1), and call it once; for gradients use torch.autograd"
        )


_CAPTURED = (
    "longspan.attention under torch.vmap or torch.func: a mod captures a tensor that is mapped or differentiated. Only q, k, v and sink "
    "may be; loop over the captured tensors, or use torch.autograd"
)


class _NoTransformed(TorchFunctionMode):
    """Raises when tracing touches a tensor that a transform maps or differentiates."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_transformed(value) for value in tree_leaves((args, kwargs))):
            raise RuntimeError(_CAPTURED)
        return func(*args, **(kwargs or {}))


@contextmanager
def tracing_under_transforms() -> Iterator[None]:
    """A context for tracing mods: under torch.vmap and torch.func, captured tensors must be neither mapped nor differentiated."""
    if not transform_is_active():
        yield
        return
    try:
        with _NoTransformed():
            yield
    except ProgramError as error:
        if _CAPTURED in str(error):
            raise RuntimeError(_CAPTURED) from error
        raise


def reject_batched_gradients(*gradients: Tensor | None) -> None:
    """Raise RuntimeError for batched gradients, which autograd passes for is_grads_batched=True."""
    if any(g is not None and is_batched_gradient(g) for g in gradients):
        raise RuntimeError(
            "longspan.attention does not support batched gradients (torch.autograd.grad with is_grads_batched=True, "
            "torch.autograd.functional.jacobian with vectorize=True): call torch.autograd.grad once per gradient with retain_graph=True, "
            "or, without a plan, use kernel='dense'"
        )


def check_scale(scale: Any, head_dim: int) -> float:
    """The scale as a float, 1/√head_dim if None."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, Tensor) or not isinstance(scale, int | float) or isinstance(scale, bool):
        raise TypeError(f"scale: expected a number or None, got {type(scale).__name__}; a learned scale belongs in a score_mod")
    if not -math.inf < scale < math.inf:  # not math.isfinite: torch.compile traces a scale that changes as a symbol
        raise ValueError(f"scale: expected a finite number, got {scale}")
    return float(scale)


def check_kernel_options(options: Any) -> None:
    """Raise for names that are not in torch's `kernel_options`. Known options are accepted and have no effect.

    They select and tune torch's kernels, or promise properties of the mask (ROWS_GUARANTEED_SAFE, BLOCKS_ARE_CONTIGUOUS) that our kernels
    do not rely on. None changes results except by rounding (PRESCALE_QK); ours round as without it.
    """
    if options is None:
        return
    if not isinstance(options, dict):
        raise TypeError(f"kernel_options: expected a dict or None, got {type(options).__name__}")
    for name, value in options.items():
        if name not in _OPTIONS:
            raise ValueError(
                f"kernel_options: expected a name of this torch's FlexKernelOptions, got {name!r}; leave it out (options of torch's "
                "kernels have no effect here)"
            )
        if name == "BACKEND" and value not in _BACKENDS:
            raise ValueError(f"kernel_options: expected BACKEND to be one of {', '.join(_BACKENDS)}, got {value!r}")


def check_sink(sink: Any, q: Tensor) -> None:
    """Raise unless the sink is None or a floating-point tensor [H] on the device of q."""
    if sink is None:
        return
    if not isinstance(sink, Tensor) or not sink.dtype.is_floating_point:
        raise TypeError(
            f"sink: expected a floating-point tensor of shape [{q.shape[1]}], got {getattr(sink, 'dtype', type(sink).__name__)}"
        )
    if sink.shape != (q.shape[1],):
        raise ValueError(f"sink: expected one logit per query head, shape [{q.shape[1]}], got {tuple(sink.shape)}")
    if sink.device != q.device:
        raise ValueError(f"sink: expected the device of q, {q.device}, got {sink.device}; move it with .to(q.device)")


def check_captured(tensors: Sequence[Tensor], q: Tensor, what: str) -> None:
    """Raise unless captured tensors are on the device of q. Scalars may be on any device."""
    for t in tensors:
        if t.ndim and t.device != q.device:
            raise ValueError(
                f"{what}: expected captured tensors on the device of q, {q.device}, got {t.device}; move it with .to(q.device)"
            )
