"""Error budgets of attention results, derived from the error of dense attention in the same dtype on the same inputs.

Shapes: B batch, H query heads, G KV heads, Q queries, K keys, E value dim; v [B, G, K, E], grad_out [B, H, Q, E].
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from longspan._kernels.protocol import state_dtype

FEW = 16  # results with at most this many elements: one draw of inputs says little about their errors
Results = Mapping[str, Tensor]


def error(got: Tensor, right: Tensor) -> float:
    """Maximum absolute error; infinity if the shape differs or NaN and infinities are not where `right` has them."""
    got, right, finite = got.double(), right.double(), torch.isfinite(right)
    if got.shape != right.shape or not torch.equal(torch.isfinite(got), finite) or not torch.equal(got[~finite], right[~finite]):
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
    """Allowed absolute error of each result (out, lse, gradients): twice the dense error plus two roundings.

    Args:
        right: Results of the oracle in float64.
        dense: Results of the oracle in the dtype of v and grad_out.
        captured: Names of the results that are gradients of captured tensors.
        others: (right, dense) pairs for other draws of the inputs; used for results with at most FEW elements.

    The dense error may be zero, as for a single key; then only the roundings remain: one of the result to its dtype, and one, in the dtype
    of lse, of the terms that cancel in a score's gradient. The gradient of a captured tensor sums gradients of scores, whose roundings
    add up like a random walk; if even the dense sums are exact, roundings of single products are used instead.
    """
    weights, values = grad_out.double(), v.double().repeat_interleave(grad_out.shape[1] // v.shape[1], 1)
    terms, products = float((weights @ values.mT).abs().max()), float((weights.abs() @ values.abs().mT).max())
    narrow, wide = torch.finfo(v.dtype).eps, torch.finfo(state_dtype(v.dtype)).eps
    query_rows = weights[..., 0].numel()
    allowed = {}
    for name, want in right.items():
        size = _largest(want)
        dense_error = _largest(dense[name] - want)
        summed = (terms if dense_error else products) * query_rows**0.5 if name in captured else terms
        rounding = 2 * wide * max(summed, size) + (wide if name == "lse" or name in captured else narrow) * size
        draws = others if want.numel() <= FEW else ()
        errors = [dense_error, *(_largest(by_dense[name] - by_right[name]) for by_right, by_dense in draws)]
        allowed[name] = 2 * max(errors) + rounding
    return allowed


def _largest(t: Tensor) -> float:
    finite = t[torch.isfinite(t)]
    return float(finite.abs().max()) if finite.numel() else 0.0
