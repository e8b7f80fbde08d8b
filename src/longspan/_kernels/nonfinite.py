"""Products of masked matrices whose hidden terms count as 0 even where a factor is NaN or infinite.

A masked probability is 0, and 0 × NaN is NaN: without care, a NaN in a value that a row may not see reaches the row's result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

from longspan._kernels.protocol import state_dtype
from longspan._torch_private import is_batched_gradient


def largest_norm(dtype: torch.dtype, scale: float) -> float:
    """The norm below which the product of two vectors, times `scale`, is finite in `dtype`."""
    return 0.5 * (torch.finfo(dtype).max / max(1.0, abs(scale))) ** 0.5


def within(limit: float, *tensors: Tensor) -> bool:
    """Whether the norm of each tensor is at most `limit`; False for NaN and inf. One pass over each tensor, and one read by the host.

    Also False where the host cannot read values: in a trace, and while a CUDA graph is captured.
    """
    if not tensors or tensors[0].is_meta:
        return True
    return _readable(tensors[0]) and bool((torch.stack([_norm(t) for t in tensors]) <= limit).all())


def beyond(limit: float, *tensors: Tensor) -> Tensor:
    """Which vectors (last dim) have a norm above `limit`, NaN or inf in any of the tensors, bool."""
    exceeds = [~(_norm(t, -1) <= limit) for t in tensors]
    return torch.stack(exceeds).any(0) if len(exceeds) > 1 else exceeds[0]


def _norm(t: Tensor, dim: int | None = None) -> Tensor:
    return torch.linalg.vector_norm(t, dim=dim, dtype=state_dtype(t.dtype))


def _readable(t: Tensor) -> bool:
    """Whether the host may read a tensor's values here."""
    if type(t) not in (Tensor, Parameter) or is_batched_gradient(t):  # of a trace, or several gradients in one
        return False
    return not (t.is_cuda and torch.cuda.is_current_stream_capturing())


def masked_product(product: Callable[[Tensor, Tensor], Tensor], a: Tensor, x: Tensor, seen: Tensor) -> Tensor:
    """product(a, x), bilinear, over the pairs of `a` where `seen`, which broadcasts to a's shape.

    Hidden pairs count as 0 whatever x holds. Where every entry of x is finite the result has the bits of product(where(seen, a, 0), x).
    Non-finite entries of x are replaced by 0 there; the infinities and NaNs that they make in visible pairs are added after.
    """
    finite = x.isfinite()
    a = torch.where(seen, a, 0.0)
    out = product(a, torch.where(finite, x, 0.0))
    if _readable(x) and bool(finite.all()):
        return out
    dtype = a.dtype
    above, below, up, down = (t.to(dtype) for t in (a > 0, a < 0, x == torch.inf, x == -torch.inf))
    zero = (seen & (a == 0)).to(dtype)
    seen = seen.expand_as(a).to(dtype)
    plus = product(above, up) + product(below, down)
    minus = product(above, down) + product(below, up)
    undefined = product(seen, x.isnan().to(dtype)) + product(zero, up + down)
    for count, value in ((plus, torch.inf), (minus, -torch.inf), (undefined, torch.nan)):
        out = out + torch.where(count > 0, value, 0.0).to(out.dtype)
    return out
