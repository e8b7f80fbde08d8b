"""Attention of few queries over paged KV in torch operations: split-KV by positions.

Splits are the token ranges [i · SPLIT, (i + 1) · SPLIT) of each sequence, computed on their own and merged by their log-sum-exp. A row's
bits therefore depend on its sequence and its step alone: not on the other sequences of the call, on pages, or on forks.

Legend as in `longspan._kernels.paged`; one sequence at a time: S splits of C = SPLIT tokens, R = H / G heads of a group, m new tokens.
Scores are [S, G, R, m, C].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longspan._kernels.nonfinite import masked_product
from longspan._kernels.paged import PagedKV, PagedWork, QueryRanges
from longspan._kernels.protocol import state_dtype

SPLIT = 512


class SequenceKeys(NamedTuple):
    """Tokens of one sequence: k [G, t, D], v [G, t, E], their positions [t], and the batch index that programs read."""

    k: Tensor
    v: Tensor
    positions: Tensor
    batch_index: int


def gathered_keys(pages: PagedKV, ranges: QueryRanges, index: int, work: PagedWork) -> SequenceKeys:
    """The tokens of a sequence that its new tokens may see and this rank holds, from the beginning of a split on."""
    start, length, row = ranges.starts[index], ranges.lengths[index], ranges.rows[index]
    first = work.first_key(start) // SPLIT * SPLIT
    if ranges.spread is None:
        return SequenceKeys(*pages.gather(row, first, length), torch.arange(first, length, device=pages.k.device), index)
    columns = ranges.spread.local_pages(index, first // pages.page_size, -(-length // pages.page_size))
    return SequenceKeys(*pages.gather_local(row, first, length, columns), index)


def attend_sequence(q: Tensor, keys: SequenceKeys, start: int, work: PagedWork) -> tuple[Tensor, Tensor]:
    """(out [H, m, E], lse [H, m]), in the dtype of running results, of queries q [H, m, D] at start … start + m − 1."""
    (heads, m, dim), tokens = q.shape, keys.k.shape[1]
    G, wide, device = keys.k.shape[0], state_dtype(q.dtype), q.device
    if not tokens:
        assert work.sink is None  # over a mesh, the sink is added when ranks are merged
        lse = torch.full((heads, m), -torch.inf, dtype=wide, device=device)
        return torch.zeros((heads, m, keys.v.shape[-1]), dtype=wide, device=device), lse
    R = heads // G
    k, v = (_in_splits(x, wide) for x in (keys.k, keys.v))
    S = k.shape[0]
    rows = (q.to(wide) * work.scale).reshape(1, G, R * m, dim)
    scores = torch.matmul(rows, k.mT).view(S, G, R, m, SPLIT)
    b = torch.full((1, 1, 1, 1, 1), keys.batch_index, device=device)
    h = torch.arange(heads, device=device).view(1, G, R, 1, 1)
    at = torch.arange(start, start + m, device=device).view(1, 1, 1, m, 1)
    padding = S * SPLIT - tokens
    kv = torch.cat([keys.positions, keys.positions[-1:].expand(padding)]).view(S, 1, 1, 1, SPLIT)  # programs may look positions up
    inside = (torch.arange(S * SPLIT, device=device) < tokens).view(S, 1, 1, 1, SPLIT)
    if work.score is not None:
        scores = work.score(scores, b, h, at, kv, *work.score_captured).to(wide)
    seen = inside if work.mask is None else inside & work.mask(b, h, at, kv, *work.mask_captured)
    seen = seen.expand(S, G, R, m, SPLIT)
    scores = torch.where(seen, scores, -torch.inf)
    top = scores.amax(-1)
    p = torch.exp(scores - _finite(top)[..., None])
    total, acc = p.sum(-1), _values_sum(p, v, seen)
    logits = None if work.sink is None else work.sink.to(wide)[:, None]
    if work.scales is not None:
        acc = acc * work.scales[1]
    return _merged(top.view(S, heads, m), total.view(S, heads, m), acc.view(S, heads, m, -1), logits)


def _in_splits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Tokens [G, t, D] as [S, G, SPLIT, D] in `dtype`, with zeros after the last token."""
    G, tokens, dim = x.shape
    S = -(-tokens // SPLIT)
    padded = torch.zeros((G, S * SPLIT, dim), dtype=dtype, device=x.device)
    padded[:, :tokens] = x
    return padded.view(G, S, SPLIT, dim).transpose(0, 1)


def _values_sum(p: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """p [S, G, R, m, C] @ v [S, G, C, E] over visible pairs."""
    S, G, R, m, C = p.shape
    p, seen = p.reshape(S, G, R * m, C), seen.reshape(S, G, R * m, C)
    return masked_product(torch.matmul, p, v, seen)


def _finite(top: Tensor) -> Tensor:
    """A maximum to subtract: 0 where nothing was seen, because −inf − −inf would be NaN."""
    return top.masked_fill(top == -torch.inf, 0.0)


def merge_ranks(out: Tensor, lse: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out [R, E], lse [R]) of partial results of N ranks, out [N, R, E] and lse [N, R]. `sink`: a logit per row [R], or None."""
    return _merged(lse, torch.ones_like(lse), out, sink)


def _merged(top: Tensor, total: Tensor, acc: Tensor, logit: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out [rows, E], lse [rows]) of splits: maxima [S, rows], sums of exponentials, sums of exponentials times values [S, rows, E].

    `logit`: of the sink, broadcast to rows, which may be several dims.
    """
    largest = top.amax(0)
    if logit is not None:
        largest = torch.maximum(largest, logit)
    base = _finite(largest)
    weight = torch.exp(top - base)
    denominator = (total * weight).sum(0)
    if logit is not None:
        denominator = denominator + torch.exp(logit - base)
    seen = denominator != 0  # also where it is NaN: a row that sees a NaN has lse NaN
    divisor = denominator.masked_fill(~seen, 1.0)
    out = (acc * weight[..., None]).sum(0) / divisor[..., None]
    return out, torch.where(seen, base + torch.log(divisor), -torch.inf)
