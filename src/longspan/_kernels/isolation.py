"""torch's attention operators over causal and masked rectangles with NaN, inf or overflow in some rows.

The operators multiply masked probabilities by hidden values, and 0 × NaN is NaN. Here the operators get zeros in place of non-finite
vectors; rows and keys that see such a vector are recomputed in torch operations (`PlainTiles`). All other results have the bits that any
finite vectors in these places would give.

Legend as in `longspan._kernels.protocol`, of one rectangle: m queries, n keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from longspan._kernels.nonfinite import beyond, within
from longspan._kernels.plain_tiles import PlainTiles
from longspan._kernels.protocol import plain_delta, state_dtype
from longspan._kernels.rectangles import Rectangle


class OutputTerms(NamedTuple):
    """Results of queries and their gradients, as a backward operator reads them."""

    grad_out: Tensor
    out: Tensor
    lse: Tensor
    grad_lse: Tensor | None = None


_ALIGNMENT = 64  # bytes: a cache line, and the widest vector register

ForwardOperator = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
BackwardOperator = Callable[[Tensor, Tensor, Tensor, OutputTerms], tuple[Tensor, Tensor, Tensor]]


def isolated_forward(tiles: PlainTiles, rect: Rectangle, operator: ForwardOperator) -> tuple[Tensor, Tensor]:
    """(out, lse) of a rectangle by an operator on (q, k, v) of the rectangle."""
    keys = tiles.kv_slices(rect)
    q, k, v = _computed(tiles.q[tiles.q_slices(rect)], tiles.k[keys], tiles.v[keys])
    # Causal rectangles: the operators replace scores above the diagonal. Others: they add −inf to scores, which NaN and +inf survive.
    tests = () if rect.kind == "full" else (v,) if rect.kind == "causal" else (q, k, v)
    whole = () if rect.kind == "full" else (tiles.v,) if rect.kind == "causal" else (tiles.q, tiles.k, tiles.v)
    if tiles.bounded(*whole) or within(tiles.limit, *tests):
        return operator(q, k, v)
    none = torch.zeros((), dtype=torch.bool, device=q.device)
    bad_q, bad_k = (beyond(tiles.limit, q), beyond(tiles.limit, k)) if rect.kind == "masked" else (none, none)
    bad_kv = bad_k | beyond(tiles.limit, v)
    out, lse = operator(*(_zeroed(t, bad) for t, bad in ((q, bad_q), (k, bad_k), (v, bad_kv))))
    affected = bad_q | _rows_that_see(tiles, rect, bad_kv)
    plain = tiles.forward_all(rect)
    # Written in place: the merge with other rectangles rounds differently for other strides.
    if rect.kind == "masked":
        lse.copy_(torch.where(bad_q | _rows_that_see(tiles, rect, bad_k), plain.lse, lse))
    return out.copy_(torch.where(affected[..., None], plain.out, out)), lse


def isolated_backward(
    tiles: PlainTiles, rect: Rectangle, terms: OutputTerms, delta: Tensor | None, operator: BackwardOperator
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v of a rectangle by an operator on (q, k, v, terms). `terms`, `delta`: of the whole call."""
    at, keys = tiles.q_slices(rect), tiles.kv_slices(rect)
    grad_lse = None if terms.grad_lse is None else terms.grad_lse[at]
    q, k, v, grad_out, out, lse = _computed(tiles.q[at], tiles.k[keys], tiles.v[keys], terms.grad_out[at], terms.out[at], terms.lse[at])
    if delta is None and grad_lse is not None:
        delta = plain_delta(terms.out, terms.grad_out, terms.grad_lse)
    # delta has the NaN and inf of out and grad_lse. Not the size of grad_out: in a row that sees nothing, out is 0.
    whole = (terms.grad_out, terms.out if delta is None else delta)
    here = (q, k, v, grad_out, out, lse.masked_fill(lse == -torch.inf, 0.0), *(() if grad_lse is None else (grad_lse,)))
    if rect.kind == "full" or tiles.bounded(tiles.q, tiles.k, tiles.v, *whole, lse=terms.lse) or within(tiles.limit, *here):
        return operator(q, k, v, OutputTerms(grad_out, out, lse, grad_lse))
    bad_q = beyond(tiles.limit, q, grad_out, out) | ~(lse < torch.inf)
    if grad_lse is not None:
        bad_q, grad_lse = bad_q | ~grad_lse.isfinite(), grad_lse.masked_fill(bad_q | ~grad_lse.isfinite(), 0.0)
    bad_kv = beyond(tiles.limit, k, v)
    clean_q, grad_out, out = (_zeroed(t, bad_q) for t in (q, grad_out, out))
    clean_k, clean_v = (_zeroed(t, bad_kv) for t in (k, v))
    clean_dq, clean_dk, clean_dv = operator(clean_q, clean_k, clean_v, OutputTerms(grad_out, out, lse.masked_fill(bad_q, 0.0), grad_lse))
    affected_q = bad_q | _rows_that_see(tiles, rect, bad_kv)
    affected_kv = bad_kv | _keys_seen_by(tiles, rect, affected_q)
    plain = tiles.empty_grads([False] * len(tiles.work.score_captured))
    delta = plain_delta(terms.out, terms.grad_out, None) if delta is None else delta
    for part in tiles.parts(rect):
        tiles.add_grads_(plain, part, terms.lse, delta, terms.grad_out)
    pairs = ((affected_q, plain.q[at], clean_dq), (affected_kv, plain.k[keys], clean_dk), (affected_kv, plain.v[keys], clean_dv))
    dq, dk, dv = (torch.where(affected[..., None], exact, clean) for affected, exact, clean in pairs)
    return dq, dk, dv


def _computed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors in the dtype that operators compute in: on CPU float32 (float64), which is also faster to test."""
    return tuple(t if t.is_cuda else t.to(state_dtype(t.dtype)) for t in tensors)


def _zeroed(t: Tensor, bad: Tensor) -> Tensor:
    """A copy of t with zeros in the vectors `bad`, of t's strides and alignment: matrix products round differently with others."""
    if any(stride == 0 and size > 1 for size, stride in zip(t.shape, t.stride(), strict=True)):
        return t.masked_fill(bad[..., None], 0.0)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    room = t.new_empty(extent + _ALIGNMENT // t.element_size())
    shift = (t.data_ptr() - room.data_ptr()) % _ALIGNMENT // t.element_size()
    return room.as_strided(t.shape, t.stride(), shift).copy_(t).masked_fill_(bad[..., None], 0.0)


def _rows_that_see(tiles: PlainTiles, rect: Rectangle, keys: Tensor) -> Tensor:
    """Which queries [B, H, m] see one of some keys [B, G, n], given as a bool for each."""
    per_head = keys.repeat_interleave(tiles.ratio, 1)[:, : _heads(tiles, rect)]
    if rect.kind == "causal":
        return per_head.cumsum(-1) > 0
    return (_seen(tiles, rect).to(tiles.wide) @ per_head.to(tiles.wide)[..., None])[..., 0] > 0


def _keys_seen_by(tiles: PlainTiles, rect: Rectangle, rows: Tensor) -> Tensor:
    """Which keys [B, G, n] are seen by one of some queries [B, H, m], given as a bool for each."""
    if rect.kind == "causal":
        per_head = rows.flip(-1).cumsum(-1).flip(-1) > 0
    else:
        per_head = (_seen(tiles, rect).to(tiles.wide).transpose(-1, -2) @ rows.to(tiles.wide)[..., None])[..., 0] > 0
    groups = tiles.kv_slices(rect)[1]
    return per_head.unflatten(1, (groups.stop - groups.start, -1)).any(2)


def _seen(tiles: PlainTiles, rect: Rectangle) -> Tensor:
    seen = tiles.seen(rect)
    assert seen is not None
    return seen.expand(*seen.shape[:2], rect.q1 - rect.q0, rect.k1 - rect.k0)


def _heads(tiles: PlainTiles, rect: Rectangle) -> int:
    h = tiles.q_slices(rect)[1]
    return h.stop - h.start
