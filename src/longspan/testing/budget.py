"""What a result of attention may be off by, from the error that the dense computation in the same dtype makes on the same inputs.

Legend: B batch, H query heads, G key heads, Q queries, K keys, E value dim.  v [B, G, K, E], grad_out [B, H, Q, E].
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from longspan._kernels.protocol import state_dtype

FEW = 16  # numbers of a result, up to which one draw says little about how large its errors are
Results = Mapping[str, Tensor]


def error(got: Tensor, right: Tensor) -> float:
    """The largest error of a result. Infinity for another shape, and for NaN and infinities that are not where they are right."""
    got, finite = got.double(), torch.isfinite(right)
    if got.shape != right.shape or not torch.equal(torch.isfinite(got), finite) or not torch.equal(got[~finite], right[~finite].double()):
        return float("inf")
    return _largest(got - right)


def budgets(
    right: Results,
    dense: Results,
    *,
    v: Tensor,
    grad_out: Tensor,
    captured: Collection[str] = (),
    others: Sequence[tuple[Results, Results]] = (),
) -> dict[str, float]:
    """For each result (out, lse, gradients; those of captured tensors are named in `captured`) twice the dense error and two roundings.

    `right` and `dense` are the oracle's, in float64 and in the dtype of v and grad_out. `others` are pairs of the same from other draws of
    the inputs: they count for a result of few numbers only.

    The dense error may be nothing, as it is for a single key; what remains are the roundings. One is of the result to its dtype. One is of
    the terms that cancel in a score's gradient, in the dtype of lse. The gradient of a captured tensor sums those of scores, and roundings
    add up as random steps do; where not even the dense sums are off, the roundings of single products do.
    """
    weights, values = grad_out.double(), v.double().repeat_interleave(grad_out.shape[1] // v.shape[1], 1)
    terms, products = float((weights @ values.mT).abs().max()), float((weights.abs() @ values.abs().mT).max())
    narrow, wide = torch.finfo(v.dtype).eps, torch.finfo(state_dtype(v.dtype)).eps
    rows = weights[..., 0].numel()
    found = {}
    for name, want in right.items():
        size = _largest(want)
        off = _largest(dense[name].double() - want)
        summed = (terms if off else products) * rows**0.5 if name in captured else terms
        rounding = 2 * wide * max(summed, size) + (wide if name == "lse" or name in captured else narrow) * size
        again = others if want.numel() <= FEW else ()
        found[name] = 2 * max([off, *(_largest(by_dense[name].double() - by_right[name]) for by_right, by_dense in again)]) + rounding
    return found


def _largest(t: Tensor) -> float:
    finite = t[torch.isfinite(t)].double()
    return float(finite.abs().max()) if finite.numel() else 0.0
