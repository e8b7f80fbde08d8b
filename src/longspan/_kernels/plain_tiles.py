"""Attention over rectangles in plain torch operations, tile by tile, on any device and for any mask and score program.

Legend as in `longspan._kernels.protocol`; a tile is m queries × n keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from longspan._kernels.nonfinite import largest_norm, masked_product, within
from longspan._kernels.protocol import AttentionInputs, Grads, State, Work, state_dtype
from longspan._kernels.rectangles import Rectangle
from longspan._kernels.tile_math import (
    add_lookup_grads_,
    empty_state,
    grouped_matmul,
    grouped_matmul_t,
    merge_,
    softmax_tile,
    tile_indices,
)

# Scores in flight in one tile: large enough for matrix products to run at full speed, small enough for the caches.
TILE_ELEMENTS = 1 << 21
TILE_KEYS = 1024  # columns of one tile


class PlainTiles:
    """The tensors of one call, and the results and gradients of its rectangles."""

    def __init__(self, inputs: AttentionInputs, work: Work) -> None:
        assert inputs.local_kv is None
        self.q, self.k, self.v, self.work = inputs.q, inputs.k, inputs.v, work
        self.wide = state_dtype(self.q.dtype)
        self.ratio = self.q.shape[1] // self.k.shape[1]
        self.limit = largest_norm(self.wide, work.scale)
        self._bounded: dict[int, tuple[Tensor, bool]] = {}

    def bounded(self, *tensors: Tensor, lse: Tensor | None = None) -> bool:
        """Whether tensors of the whole call hold no NaN, inf or numbers whose products overflow; tested once each. lse may be −inf."""
        for t in tensors if lse is None else (*tensors, lse):
            if id(t) not in self._bounded:
                self._bounded[id(t)] = t, within(self.limit, t.masked_fill(t == -torch.inf, 0.0) if t is lse else t)
            if not self._bounded[id(t)][1]:
                return False
        return True

    @cached_property
    def q_pos(self) -> Tensor:
        return self.work.q_tiles.positions(self.q.device)

    @cached_property
    def kv_pos(self) -> Tensor:
        return self.work.kv_tiles.positions(self.q.device)

    def empty_grads(self, needs: Sequence[bool]) -> Grads:
        """Zeros to add to; captured tensors in float64, since many small terms meet in one element."""
        captured = [torch.zeros_like(c, dtype=torch.float64) if n else None for c, n in zip(self.work.score_captured, needs, strict=True)]
        q, k, v = (torch.zeros_like(t, dtype=self.wide) for t in (self.q, self.k, self.v))
        return Grads(q=q, k=k, v=v, captured=captured)

    def is_everything(self, rect: Rectangle) -> bool:
        """Whether a rectangle holds every query and key, for all batch rows and heads."""
        one = self.work.table.batch == self.work.table.heads == 1
        return one and (rect.q0, rect.q1, rect.k0, rect.k1) == (0, self.q.shape[2], 0, self.k.shape[2])

    def q_slices(self, rect: Rectangle) -> tuple[slice, slice, slice]:
        """Batch rows, query heads and tokens of q, out, lse that a rectangle is for."""
        table = self.work.table
        b = slice(rect.b, rect.b + 1) if table.batch > 1 else slice(0, self.q.shape[0])
        h = slice(rect.h, rect.h + 1) if table.heads > 1 else slice(0, self.q.shape[1])
        return b, h, slice(rect.q0, rect.q1)

    def kv_slices(self, rect: Rectangle) -> tuple[slice, slice, slice]:
        """Batch rows, KV heads and tokens of k and v that a rectangle is for."""
        b, h, _ = self.q_slices(rect)
        return b, slice(h.start // self.ratio, (h.stop - 1) // self.ratio + 1), slice(rect.k0, rect.k1)

    def parts(self, rect: Rectangle) -> Iterator[Rectangle]:
        """A rectangle cut into tiles of bounded size."""
        b, h, _ = self.q_slices(rect)
        area = max(1, TILE_ELEMENTS // ((b.stop - b.start) * (h.stop - h.start)))
        width = min(rect.k1 - rect.k0, TILE_KEYS)
        height = max(1, min(rect.q1 - rect.q0, area // width))
        for q0 in range(rect.q0, rect.q1, height):
            for k0 in range(rect.k0, rect.k1, width):
                q1, k1 = min(q0 + height, rect.q1), min(k0 + width, rect.k1)
                if rect.kind == "causal" and q1 - 1 - rect.q0 < k0 - rect.k0:
                    continue
                yield Rectangle(b=rect.b, h=rect.h, q0=q0, q1=q1, k0=k0, k1=k1, kind=rect.kind)

    def indices(self, rect: Rectangle) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        firsts = (self.work.first_batch, self.work.first_head)
        b, h = (torch.arange(s.start, s.stop, device=self.q.device) + first for s, first in zip(self.q_slices(rect), firsts, strict=False))
        return tile_indices(b, h, self.q_pos[rect.q0 : rect.q1], self.kv_pos[rect.k0 : rect.k1])

    def seen(self, rect: Rectangle) -> Tensor | None:
        """Which scores of a rectangle exist, broadcasting to [B, H, m, n]; None for all of them."""
        if rect.kind == "full":
            return None
        if rect.kind == "causal":
            # Not the mask: it may allow tiles above the diagonal, and those are rectangles of their own.
            return (self.q_pos[rect.q0 : rect.q1, None] >= self.kv_pos[rect.k0 : rect.k1]).view(1, 1, rect.q1 - rect.q0, -1)
        assert self.work.mask is not None
        return self.work.mask(*self.indices(rect), *self.work.mask_captured)

    def scores(self, rect: Rectangle) -> tuple[Tensor, Tensor, Tensor | None]:
        """(scores, scores before the program, seen) of a tile, in the wide dtype; −inf where a score does not exist."""
        q, k = self.q[self.q_slices(rect)].to(self.wide), self.k[self.kv_slices(rect)].to(self.wide)
        raw = grouped_matmul(q * self.work.scale, k.transpose(-1, -2))
        scores = raw
        if self.work.score is not None:
            scores = self.work.score(raw, *self.indices(rect), *self.work.score_captured).to(self.wide).expand_as(raw)
        seen = self.seen(rect)
        return scores if seen is None else torch.where(seen, scores, -torch.inf), raw, seen

    def forward(self, rect: Rectangle) -> tuple[Tensor, Tensor, Tensor]:
        """(out, lse, max scores) of one tile."""
        scores, _, seen = self.scores(rect)
        weights, lse, max_scores = softmax_tile(scores)
        v = self.v[self.kv_slices(rect)].to(self.wide)
        if seen is None or self.bounded(self.v):
            return grouped_matmul(weights, v), lse, max_scores
        return masked_product(grouped_matmul, weights, v, seen), lse, max_scores

    def forward_all(self, rect: Rectangle) -> State:
        """out and lse of one rectangle, of any size."""
        b, h, _ = self.q_slices(rect)
        shape = (b.stop - b.start, h.stop - h.start, rect.q1 - rect.q0, self.v.shape[-1])
        state = empty_state(shape, self.wide, self.q.device, max_scores=False)
        for part in self.parts(rect):
            out, lse, _ = self.forward(part)
            merge_(state, (slice(None), slice(None), slice(part.q0 - rect.q0, part.q1 - rect.q0)), out, lse)
        return state

    def add_grads_(self, total: Grads, rect: Rectangle, lse: Tensor, delta: Tensor, grad_out: Tensor) -> None:
        """Add one tile's gradients to `total`, whose tensors are of the whole call."""
        rows, keys = self.q_slices(rect), self.kv_slices(rect)
        q, grad = self.q[rows].to(self.wide), grad_out[rows].to(self.wide)
        k, v = self.k[keys].to(self.wide), self.v[keys].to(self.wide)
        scores, raw, seen = self.scores(rect)
        norm, shift = lse[rows][..., None], delta[rows][..., None]
        p = torch.exp(scores - norm.masked_fill(norm == -torch.inf, torch.inf))
        ds = p * (grouped_matmul(grad, v.transpose(-1, -2)) - shift)
        # With NaN or overflow in a visible pair of a row, p and ds are NaN in its hidden pairs too.
        isolate = seen is not None and not self.bounded(self.q, self.k, self.v, grad_out, delta, lse=lse)
        if self.work.joint is not None:
            assert self.work.score is not None
            result = self.work.score.result.meta["val"].dtype
            ds, read_grads, read_indices = self.work.joint(ds.to(result), raw, *self.indices(rect), *self.work.score_captured)
            ds = ds.to(self.wide).expand_as(raw)
            add_lookup_grads_(total.captured, self.work, read_grads, read_indices, seen, raw.shape)
            if seen is not None:
                ds = torch.where(seen, ds, 0.0)
        groups = k.shape[1]
        if not isolate:
            dq, dk, dv = grouped_matmul(ds, k), grouped_matmul_t(ds, q, groups), grouped_matmul_t(p, grad, groups)
        else:
            assert seen is not None
            over_queries = partial(grouped_matmul_t, groups=groups)
            dq = masked_product(grouped_matmul, ds, k, seen)
            dk, dv = (masked_product(over_queries, a, x, seen) for a, x in ((ds, q), (p, grad)))
        total.q[rows] += dq * self.work.scale
        total.k[keys] += dk * self.work.scale
        total.v[keys] += dv
