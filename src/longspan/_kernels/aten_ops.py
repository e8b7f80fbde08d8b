"""torch's SDPA operators, each called as its layout rules want. One rectangle, full or a causal square, to out and lse, and back.

Legend as in `longspan._kernels.protocol`, of one rectangle: m queries, n keys. `out` comes back in the dtype that the operator computes in:
the inputs' on CUDA; float32 (float64) on CPU, where the operator rounds partial sums in half precision.

All four backward operators recompute the weights as exp(score − lse) and take Σ out·grad_out for the rows' share: given out and lse over
*all* keys, they give this rectangle's part of the gradients.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from longspan._kernels.isolation import Rows
from longspan._kernels.protocol import like_query, state_dtype
from longspan._kernels.tile_math import side_by_side

Backend = Literal["flash", "efficient", "cudnn"]
_aten = torch.ops.aten
_BYTES = 16  # what the CUDA operators load at once: rows must begin at multiples of it


class Operator(Protocol):
    """One operator, forward and backward. `step`: head dims must be multiples of it. `same_dims`: values as wide as keys."""

    step: int
    same_dims: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]: ...

    def backward(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, *, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]: ...


class _CpuFlash:
    step, same_dims = 1, True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        wide = state_dtype(q.dtype)
        tensors = (side_by_side(t.to(wide)) for t in (q, k, v))
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(*tensors, 0.0, causal, scale=scale)
        return out, lse

    def backward(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, *, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        wide = state_dtype(q.dtype)
        tensors = (side_by_side(t.to(wide)) for t in (rows.grad_out, q, k, v, rows.out))
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, rows.lse.to(wide), 0.0, causal, scale=scale)
        return dq, dk, dv


class _Flash:
    """Takes fewer key heads than query heads, and sums their gradients itself."""

    step, same_dims = 8, True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = map(_loadable, (q, k, v))
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse

    def backward(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, *, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, grad_out, out = map(_loadable, (q, k, v, rows.grad_out.to(q.dtype), rows.out))
        # The kernel reads lse as a dense array, whatever its strides. Random states are for dropout: not read.
        seed, unused = q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)
        lengths = (None, None, q.shape[2], k.shape[2])
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            grad_out, q, k, v, out, rows.lse.contiguous(), *lengths, 0.0, causal, seed, unused, scale=scale
        )
        return dq, dk, dv


class _Efficient:
    """Wants a key head for each query head."""

    step, same_dims = 8, False
    _LSE = 32  # rows of lse that its backward reads at once

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = _loadable(q), *(_loadable(_expanded(t, q)) for t in (k, v))
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
        return out, lse[..., : q.shape[2]].contiguous()

    def backward(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, *, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        groups = k.shape[1]
        q, k, v = _loadable(q), *(_loadable(_expanded(t, q)) for t in (k, v))
        # The kernel takes it for granted that out lies token by token, its heads side by side.
        out, grad_out = (_loadable(t.transpose(1, 2).contiguous()).transpose(1, 2) for t in (rows.out, rows.grad_out.to(q.dtype)))
        lse = pad(rows.lse, (0, -rows.lse.shape[-1] % self._LSE), value=torch.inf).contiguous()
        seed, offset = q.new_empty((), dtype=torch.int64), q.new_empty((), dtype=torch.int64)
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            grad_out, q, k, v, None, out, lse, seed, offset, 0.0, [True, True, True, False], causal, scale=scale
        )
        return dq, *(_summed(t, groups) for t in (dk, dv))


class _Cudnn:
    """Takes fewer key heads than query heads, and values narrower than keys."""

    step, same_dims = 8, False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = map(_loadable, (q, k, v))
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
        return out, lse.reshape(q.shape[:3])

    def backward(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, *, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = map(_loadable, (q, k, v))
        # Compiled plans are kept under the strides of q, k and v alone: out and its gradient must always lie in the one way that
        # follows from q's, the way of torch's own result, or a plan for other strides reads them.
        out, grad_out = (in_order_of(q, t.to(q.dtype)) for t in (rows.out, rows.grad_out))
        lse = rows.lse.contiguous()
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
    """The operator for a backend on a device; on CPU there is only flash."""
    return _CPU if device.type == "cpu" else _CUDA[backend]


def backward_through_lse(q: Tensor, k: Tensor, v: Tensor, rows: Rows, *, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The backward pass where lse has a gradient too, of which the operators know nothing.

    It is a shift of the rows' share: Σ out·grad_out − grad_lse. Columns are put beside the values: zeros in v, so that nothing else
    changes; in out and grad_out, numbers whose products sum to −grad_lse. On CUDA this takes the efficient operator whatever the
    forward pass took: the others have no room for more columns at common head dims.
    """
    assert rows.grad_lse is not None
    op = operator("efficient", q.device)
    dim, value_dim = q.shape[-1], v.shape[-1]
    left, right = _columns(rows.grad_lse, state_dtype(q.dtype) if op is _CPU else q.dtype, op.step)
    out, grad_out = torch.cat([rows.out.to(left.dtype), left], -1), torch.cat([rows.grad_out.to(left.dtype), right], -1)
    if op.same_dims:
        q, k = pad(q, (0, op.step)), pad(k, (0, op.step))
    dq, dk, dv = op.backward(q, k, pad(v, (0, op.step)), Rows(grad_out, out, rows.lse), causal=causal, scale=scale)
    return dq[..., :dim], dk[..., :dim], dv[..., :value_dim]


def _columns(grad_lse: Tensor, dtype: torch.dtype, count: int) -> tuple[Tensor, Tensor]:
    """Two tensors [B, H, m, count] of a dtype, maybe a narrow one; the products of their elements sum to −grad_lse, to float32's precision.

    One holds a power of two per row, the other the quotient, in up to three pieces of a half-precision mantissa each.
    """
    _, exponent = torch.frexp(grad_lse)
    unit = torch.ldexp(torch.ones_like(grad_lse), exponent.clamp(-14, 15))  # within the range of float16
    left = torch.zeros(*grad_lse.shape, count, dtype=dtype, device=grad_lse.device)
    rest = -grad_lse / unit
    for i in range(min(3, count)):
        left[..., i] = rest
        rest = rest - left[..., i].to(rest.dtype)
    return left, unit.to(dtype)[..., None].expand_as(left)


def in_order_of(q: Tensor, t: Tensor) -> Tensor:
    """t [B, H, m, any], dense, its dims in memory in the order of q's; t itself where it lies so already."""
    twin = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device="meta")
    want = like_query(twin, t.shape[-1], t.dtype).stride()
    fits = all(n == 1 or s == w for n, s, w in zip(t.shape, t.stride(), want, strict=True))
    return t if fits and _begins_well(t) else like_query(q, t.shape[-1], t.dtype).copy_(t)


def _loadable(t: Tensor) -> Tensor:
    """t, or a copy where its rows do not begin where the operators can load them."""
    step = _BYTES // t.element_size()
    rows = zip(t.shape[:-1], t.stride()[:-1], strict=True)
    fits = t.stride(-1) == 1 and all(n == 1 or (s > 0 and s % step == 0) for n, s in rows)
    return t if fits and _begins_well(t) else t.clone(memory_format=torch.contiguous_format)


def _begins_well(t: Tensor) -> bool:
    return t.data_ptr() % _BYTES == 0


def _expanded(t: Tensor, q: Tensor) -> Tensor:
    shared = q.shape[1] // t.shape[1]
    return t if shared == 1 else t.repeat_interleave(shared, 1)


def _summed(grad: Tensor, groups: int) -> Tensor:
    """The gradients of a group's heads, summed in float32."""
    return grad if grad.shape[1] == groups else grad.unflatten(1, (groups, -1)).sum(2, dtype=torch.float32)


@cache
def _cudnn_lse_rank(device: torch.device) -> int:
    """torch's versions differ: lse is [B, H, m] or [B, H, m, 1], and backward wants it as forward gives it."""
    q = torch.zeros(1, 1, 128, 64, dtype=torch.float16, device=device)
    return int(_aten._scaled_dot_product_cudnn_attention(q, q, q, None, True, 0.0, False, False, scale=1.0)[1].ndim)
