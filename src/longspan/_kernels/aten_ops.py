"""torch's SDPA operators with the memory layouts that each requires: one rectangle, full or a causal square, forward and backward.

Legend as in `longspan._kernels.protocol`, of one rectangle: m queries, n keys. `out` has the dtype that the operator computes in: the
inputs' on CUDA; float32 (float64) on CPU, where the operator rounds partial sums in half precision.

All four backward operators recompute the weights as exp(score − lse) and compute delta as Σ out·grad_out: given out and lse over *all*
keys, they return this rectangle's part of the gradients.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from longspan._kernels.isolation import OutputTerms
from longspan._kernels.protocol import like_query
from longspan._kernels.tile_math import contiguous_last_dim

Backend = Literal["flash", "efficient", "cudnn"]
QKVGrads = tuple[Tensor, Tensor, Tensor]
_aten = torch.ops.aten
_BYTES = 16  # alignment of rows: the width of the CUDA operators' loads


class Operator(Protocol):
    """One operator, forward and backward. `step`: divisor of head dims. `same_dims`: key and value head dims must be equal."""

    step: int
    same_dims: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]: ...

    def backward(self, q: Tensor, k: Tensor, v: Tensor, terms: OutputTerms, *, causal: bool, scale: float) -> QKVGrads: ...


class _CpuFlash:
    """Takes float32 or float64."""

    step, same_dims = 1, True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        tensors = map(contiguous_last_dim, (q, k, v))
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(*tensors, 0.0, causal, scale=scale)
        return out, lse

    def backward(self, q: Tensor, k: Tensor, v: Tensor, terms: OutputTerms, *, causal: bool, scale: float) -> QKVGrads:
        tensors = map(contiguous_last_dim, (terms.grad_out, q, k, v, terms.out))
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, terms.lse, 0.0, causal, scale=scale)
        return dq, dk, dv


class _Flash:
    """Supports GQA and sums the gradients of a KV head itself."""

    step, same_dims = 8, True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = map(_loadable, (q, k, v))
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse

    def backward(self, q: Tensor, k: Tensor, v: Tensor, terms: OutputTerms, *, causal: bool, scale: float) -> QKVGrads:
        q, k, v, grad_out, out = map(_loadable, (q, k, v, terms.grad_out.to(q.dtype), terms.out))
        # The kernel reads lse as a dense array, whatever its strides. Random states are for dropout: not read.
        seed, unused = q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)
        lengths = (None, None, q.shape[2], k.shape[2])
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            grad_out, q, k, v, out, terms.lse.contiguous(), *lengths, 0.0, causal, seed, unused, scale=scale
        )
        return dq, dk, dv


class _Efficient:
    """Wants a key head for each query head."""

    step, same_dims = 8, False
    _LSE = 32  # the backward operator reads lse in multiples of this many rows

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = _loadable(q), *(_loadable(_expanded(t, q)) for t in (k, v))
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
        return out, lse[..., : q.shape[2]].contiguous()

    def backward(self, q: Tensor, k: Tensor, v: Tensor, terms: OutputTerms, *, causal: bool, scale: float) -> QKVGrads:
        groups = k.shape[1]
        q, k, v = _loadable(q), *(_loadable(_expanded(t, q)) for t in (k, v))
        # The kernel assumes out in [B, m, H, E] memory order.
        out, grad_out = (_loadable(t.transpose(1, 2).contiguous()).transpose(1, 2) for t in (terms.out, terms.grad_out.to(q.dtype)))
        lse = pad(terms.lse, (0, -terms.lse.shape[-1] % self._LSE), value=torch.inf).contiguous()
        seed, offset = q.new_empty((), dtype=torch.int64), q.new_empty((), dtype=torch.int64)
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            grad_out, q, k, v, None, out, lse, seed, offset, 0.0, [True, True, True, False], causal, scale=scale
        )
        return dq, *(_summed(t, groups) for t in (dk, dv))


class _Cudnn:
    """Supports GQA and a value head dim smaller than the key head dim."""

    step, same_dims = 8, False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = map(_loadable, (q, k, v))
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
        return out, lse.reshape(q.shape[:3])

    def backward(self, q: Tensor, k: Tensor, v: Tensor, terms: OutputTerms, *, causal: bool, scale: float) -> QKVGrads:
        q, k, v = map(_loadable, (q, k, v))
        # torch caches compiled cuDNN plans by the strides of q, k and v only. out and its gradient must have the strides of torch's own
        # result for this q: a plan compiled for other strides would read them wrongly.
        out, grad_out = (in_order_of(q, t.to(q.dtype)) for t in (terms.out, terms.grad_out))
        lse = terms.lse.contiguous()
        lse = lse if _cudnn_lse_rank(q.device) == 3 else lse[..., None]
        seed, offset = q.new_empty((), dtype=torch.int64), q.new_empty((), dtype=torch.int64)
        lengths = (None, None, q.shape[2], k.shape[2])
        dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
            grad_out, q, k, v, out, lse, seed, offset, None, *lengths, 0.0, causal, scale=scale
        )
        return dq, dk, dv


_CPU = _CpuFlash()
_CUDA: dict[Backend, Operator] = {"flash": _Flash(), "efficient": _Efficient(), "cudnn": _Cudnn()}


def operator(backend: Backend, device: torch.device) -> Operator:
    """The operator of a backend on a device; on CPU always flash."""
    return _CPU if device.type == "cpu" else _CUDA[backend]


def backward_through_lse(q: Tensor, k: Tensor, v: Tensor, terms: OutputTerms, *, causal: bool, scale: float) -> QKVGrads:
    """Backward pass with a gradient of lse, which the operators do not support.

    The gradient of lse shifts delta: Σ out·grad_out − grad_lse. Extra columns carry the shift: zeros in v, and in out and grad_out numbers
    whose products sum to −grad_lse. On CUDA this uses the efficient operator for every backend: the others have no room for more columns
    at common head dims.
    """
    assert terms.grad_lse is not None
    op = operator("efficient", q.device)
    dim, value_dim = q.shape[-1], v.shape[-1]
    left, right = _columns(terms.grad_lse, q.dtype, op.step)
    out, grad_out = torch.cat([terms.out, left], -1), torch.cat([terms.grad_out, right], -1)
    if op.same_dims:
        q, k = pad(q, (0, op.step)), pad(k, (0, op.step))
    dq, dk, dv = op.backward(q, k, pad(v, (0, op.step)), OutputTerms(grad_out, out, terms.lse), causal=causal, scale=scale)
    return dq[..., :dim], dk[..., :dim], dv[..., :value_dim]


def _columns(grad_lse: Tensor, dtype: torch.dtype, count: int) -> tuple[Tensor, Tensor]:
    """Two tensors [B, H, m, count] of `dtype` whose elementwise products sum to −grad_lse in float32 precision, also in a narrow dtype.

    The second is a power of two per row; the first is the quotient, in up to three terms of a half-precision mantissa each.
    """
    _, exponent = torch.frexp(grad_lse)
    unit = torch.ldexp(torch.ones_like(grad_lse), exponent.clamp(-14, 15))  # within the range of float16
    left = torch.zeros(*grad_lse.shape, count, dtype=dtype, device=grad_lse.device)
    rest = -grad_lse / unit
    for i in range(min(3, count)):
        left[..., i] = rest
        rest = rest - left[..., i]
    return left, unit.to(dtype)[..., None].expand_as(left)


def in_order_of(q: Tensor, t: Tensor) -> Tensor:
    """t [B, H, m, any], dense, its dims ordered in memory as q's; t itself where it has these strides already."""
    twin = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device="meta")
    want = like_query(twin, t.shape[-1], t.dtype).stride()
    fits = all(n == 1 or s == w for n, s, w in zip(t.shape, t.stride(), want, strict=True))
    return t if fits and _aligned(t) else like_query(q, t.shape[-1], t.dtype).copy_(t)


def _loadable(t: Tensor) -> Tensor:
    """t, or a contiguous copy where the operators cannot load its rows."""
    step = _BYTES // t.element_size()
    rows = zip(t.shape[:-1], t.stride()[:-1], strict=True)
    fits = t.stride(-1) == 1 and all(n == 1 or (s > 0 and s % step == 0) for n, s in rows)
    return t if fits and _aligned(t) else t.clone(memory_format=torch.contiguous_format)


def _aligned(t: Tensor) -> bool:
    return t.data_ptr() % _BYTES == 0


def _expanded(t: Tensor, q: Tensor) -> Tensor:
    shared = q.shape[1] // t.shape[1]
    return t if shared == 1 else t.repeat_interleave(shared, 1)


def _summed(grad: Tensor, groups: int) -> Tensor:
    """Gradients of the query heads of each KV head, summed in float32."""
    return grad if grad.shape[1] == groups else grad.unflatten(1, (groups, -1)).sum(2, dtype=torch.float32)


@cache
def _cudnn_lse_rank(device: torch.device) -> int:
    """Rank of lse in this torch version, [B, H, m] or [B, H, m, 1]; the backward operator expects the same."""
    q = torch.zeros(1, 1, 128, 64, dtype=torch.float16, device=device)
    return int(_aten._scaled_dot_product_cudnn_attention(q, q, q, None, True, 0.0, False, False, scale=1.0)[1].ndim)
