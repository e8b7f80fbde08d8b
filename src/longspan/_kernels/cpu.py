"""The `cpu` kernel: blockwise attention in plain torch operations, memory O(S · block).

Rectangles that need no score program go to torch's CPU flash operator, in float32 (float64) whatever the inputs: in half precision
it rounds partial sums. The rest is computed here, tile by tile. The latter part runs on any
device and serves as the portable kernel for programs that no compiled kernel takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from longspan._kernels.protocol import Grads, State, Work, like_query, plain_delta, state_dtype
from longspan._kernels.rectangles import Rectangle, rectangles
from longspan._kernels.tile_math import (
    above_zero,
    add_lookup_grads_,
    begun,
    fold_,
    grouped_matmul,
    grouped_matmul_t,
    side_by_side,
    softmax_tile,
    tile_indices,
)
from longspan._masks.block_table import BlockTable

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Scores in flight in one tile of the plain path: large enough for matrix products to run at full speed, small enough for the caches.
_TILE_ELEMENTS = 1 << 21
_TILE_KEYS = 1024  # columns of one tile of the plain path


@dataclass(frozen=True, kw_only=True)
class CpuKernel:
    """See the module's docstring."""

    name: str = "cpu"
    rounds_once: ClassVar[bool] = False

    def check(self, work: Work, q: Tensor, needs: Sequence[bool] = ()) -> None:
        pass

    def joins(self, q: Tensor, v: Tensor, work: Work, *, backward: bool) -> bool:
        return False

    def apart(self, q: Tensor, v: Tensor, work: Work, needs: Sequence[bool]) -> bool:
        return False

    def refuses(self, q: Tensor, k: Tensor, v: Tensor, work: Work) -> str | None:
        return None

    def block(self, q: Tensor, v: Tensor, table: BlockTable) -> tuple[int, int]:
        return table.block

    def delta(self, out: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
        return plain_delta(out, grad_out, grad_lse)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, work: Work, *, state: State | None, final: bool, peak: bool) -> State:
        call = _Call(q, k, v, work)
        flash = call.flash_fits and not peak
        rects = rectangles(work)
        if flash and state is None and len(rects) == 1 and call.is_everything(rects[0]):
            out, lse = call.flash_forward(rects[0])
            return State(out=_finished(out, q) if final else out, lse=lse)
        result = begun(state, (*q.shape[:3], v.shape[-1]), call.wide, q.device, peak=peak)
        for rect in rects:
            if flash:
                out, lse = call.flash_forward(rect)
                fold_(result, (*call.heads(rect), slice(rect.q0, rect.q1)), out, lse)
                continue
            for part in call.parts(rect):
                weights, lse, most = softmax_tile(call.scores(part)[0])
                _, g = call.slices(part)
                out = grouped_matmul(weights, v[(*g, slice(part.k0, part.k1))].to(call.wide))
                fold_(result, (*call.heads(part), slice(part.q0, part.q1)), out, lse, most)
        if final:
            result.out = _finished(result.out, q)
        return result

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        work: Work,
        *,
        needs: Sequence[bool],
        wide: bool,
        delta: Tensor | None = None,
        into: Grads | None = None,
    ) -> Grads:
        call = _Call(q, k, v, work)
        rects = rectangles(work)
        # The operator computes delta by itself: it fits where no gradient of lse is part of it.
        flash = call.flash_fits and grad_lse is None and (delta is None or torch.equal(delta, self.delta(out, grad_out, None)))
        if flash and len(rects) == 1 and call.is_everything(rects[0]):
            dq, dk, dv = call.flash_backward(rects[0], out, lse, grad_out)
            if into is not None:
                into.q.add_(dq)
                into.k.copy_(dk)
                into.v.copy_(dv)
                return into
            dtype = call.wide if wide else q.dtype
            return Grads(q=dq.to(dtype), k=dk.to(dtype), v=dv.to(dtype), captured=[])
        total = call.empty_grads(needs) if into is None else into
        if into is not None:
            into.k.zero_()
            into.v.zero_()
        if delta is None and not flash:
            delta = self.delta(out, grad_out, grad_lse)
        for rect in rects:
            heads, groups = call.slices(rect)
            rows, keys = slice(rect.q0, rect.q1), slice(rect.k0, rect.k1)
            if flash:
                dq, dk, dv = call.flash_backward(rect, out, lse, grad_out)
                total.q[(*heads, rows)] += dq
                total.k[(*groups, keys)] += dk
                total.v[(*groups, keys)] += dv
                continue
            assert delta is not None
            for part in call.parts(rect):
                call.add_tile_grads_(total, part, lse, delta, grad_out)
        if not wide and into is None:
            total.q, total.k, total.v = total.q.to(q.dtype), total.k.to(k.dtype), total.v.to(v.dtype)
        return total


def _finished(out: Tensor, q: Tensor) -> Tensor:
    """The result as callers get it: the query's dtype and memory order."""
    return like_query(q, out.shape[-1], q.dtype).copy_(out)


class _Call:
    """The tensors of one call and what tiles of it are made of."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, work: Work) -> None:
        self.q, self.k, self.v, self.work = q, k, v, work
        self.wide = state_dtype(q.dtype)
        self.ratio = q.shape[1] // k.shape[1]
        self.flash_fits = work.score is None and q.shape[-1] == v.shape[-1] and q.device.type == "cpu"

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
        one = self.work.table.batch == self.work.table.heads == 1
        return one and (rect.q0, rect.q1, rect.k0, rect.k1) == (0, self.q.shape[2], 0, self.k.shape[2])

    def heads(self, rect: Rectangle) -> tuple[slice, slice]:
        """Batch rows and query heads that a rectangle is for."""
        table = self.work.table
        b = slice(rect.b, rect.b + 1) if table.batch > 1 else slice(0, self.q.shape[0])
        return b, slice(rect.h, rect.h + 1) if table.heads > 1 else slice(0, self.q.shape[1])

    def slices(self, rect: Rectangle) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
        """(batch rows, query heads) and (batch rows, key heads)."""
        b, h = self.heads(rect)
        return (b, h), (b, slice(h.start // self.ratio, (h.stop - 1) // self.ratio + 1))

    def parts(self, rect: Rectangle) -> Iterator[Rectangle]:
        """A rectangle cut so that a tile's scores stay small."""
        b, h = self.heads(rect)
        area = max(1, _TILE_ELEMENTS // ((b.stop - b.start) * (h.stop - h.start)))
        width = min(rect.k1 - rect.k0, _TILE_KEYS)
        height = max(1, min(rect.q1 - rect.q0, area // width))
        for q0 in range(rect.q0, rect.q1, height):
            for k0 in range(rect.k0, rect.k1, width):
                q1, k1 = min(q0 + height, rect.q1), min(k0 + width, rect.k1)
                if rect.kind == "causal" and q1 - 1 - rect.q0 < k0 - rect.k0:
                    continue
                yield Rectangle(b=rect.b, h=rect.h, q0=q0, q1=q1, k0=k0, k1=k1, kind=rect.kind)

    def indices(self, rect: Rectangle) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        firsts = (self.work.first_batch, self.work.first_head)
        b, h = (torch.arange(s.start, s.stop, device=self.q.device) + first for s, first in zip(self.heads(rect), firsts, strict=True))
        return tile_indices(b, h, self.q_pos[rect.q0 : rect.q1], self.kv_pos[rect.k0 : rect.k1])

    def seen(self, rect: Rectangle) -> Tensor | None:
        """Which scores of a rectangle exist; None for all of them."""
        if rect.kind == "full":
            return None
        if rect.kind == "causal":
            # Not the mask: it may allow tiles above the diagonal, and those are rectangles of their own.
            return (self.q_pos[rect.q0 : rect.q1, None] >= self.kv_pos[rect.k0 : rect.k1]).view(1, 1, rect.q1 - rect.q0, -1)
        assert self.work.mask is not None
        return self.work.mask(*self.indices(rect), *self.work.mask_captured)

    def scores(self, rect: Rectangle) -> tuple[Tensor, Tensor, Tensor | None]:
        """(scores, scores before the program, seen) of a tile, in the wide dtype; −inf where a score does not exist."""
        (b, h), g = self.slices(rect)
        q, k = self.q[b, h, rect.q0 : rect.q1].to(self.wide), self.k[(*g, slice(rect.k0, rect.k1))].to(self.wide)
        raw = grouped_matmul(q * self.work.scale, k.transpose(-1, -2))
        scores = raw
        if self.work.score is not None:
            scores = self.work.score(raw, *self.indices(rect), *self.work.score_captured).to(self.wide).expand_as(raw)
        seen = self.seen(rect)
        return scores if seen is None else torch.where(seen, scores, -torch.inf), raw, seen

    def add_tile_grads_(self, total: Grads, rect: Rectangle, lse: Tensor, delta: Tensor, grad_out: Tensor) -> None:
        (b, h), g = self.slices(rect)
        rows, keys = slice(rect.q0, rect.q1), slice(rect.k0, rect.k1)
        q, grad = self.q[b, h, rows].to(self.wide), grad_out[b, h, rows].to(self.wide)
        k, v = self.k[(*g, keys)].to(self.wide), self.v[(*g, keys)].to(self.wide)
        scores, raw, seen = self.scores(rect)
        norm = lse[b, h, rows, None]
        p = torch.exp(scores - norm.masked_fill(norm == -torch.inf, torch.inf))
        ds = p * (grouped_matmul(grad, v.transpose(-1, -2)) - delta[b, h, rows, None])
        if self.work.joint is not None:
            assert self.work.score is not None
            result = self.work.score.result.meta["val"].dtype
            ds, read_grads, read_indices = self.work.joint(ds.to(result), raw, *self.indices(rect), *self.work.score_captured)
            ds = ds.to(self.wide).expand_as(raw)
            add_lookup_grads_(total.captured, self.work, read_grads, read_indices, seen, raw.shape)
            if seen is not None:
                ds = torch.where(seen, ds, 0.0)
        groups = k.shape[1]
        total.q[b, h, rows] += grouped_matmul(ds, k) * self.work.scale
        total.k[(*g, keys)] += grouped_matmul_t(ds, q, groups) * self.work.scale
        total.v[(*g, keys)] += grouped_matmul_t(p, grad, groups)

    def _flash_bias(self, rect: Rectangle) -> tuple[Tensor | None, Tensor | None]:
        """The additive mask of a rectangle [B or 1, H or 1, m, n], and which rows see anything."""
        if rect.kind != "masked":
            return None, None
        seen = self.seen(rect)
        assert seen is not None
        shape = (*seen.shape[:2], rect.q1 - rect.q0, rect.k1 - rect.k0)
        seen = seen.expand(shape)
        bias = torch.zeros(shape, dtype=self.wide).masked_fill_(~seen, -torch.inf)
        return bias, seen.any(-1)

    def flash_forward(self, rect: Rectangle) -> tuple[Tensor, Tensor]:
        (b, h), g = self.slices(rect)
        rows, keys = slice(rect.q0, rect.q1), slice(rect.k0, rect.k1)
        bias, any_seen = self._flash_bias(rect)
        q, k, v = (side_by_side(t.to(self.wide)) for t in (self.q[b, h, rows], self.k[(*g, keys)], self.v[(*g, keys)]))
        q, scale, _ = above_zero(q, self.work.scale)
        out, lse = _flash(q, k, v, 0.0, rect.kind == "causal", attn_mask=bias, scale=scale)
        if any_seen is not None:
            # The operator gives such rows lse 0: they would count as one key of score 0.
            lse = torch.where(any_seen, lse, -torch.inf)
            out = torch.where(any_seen[..., None], out, 0.0)
        return out, lse

    def flash_backward(self, rect: Rectangle, out: Tensor, lse: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (b, h), g = self.slices(rect)
        rows, keys = slice(rect.q0, rect.q1), slice(rect.k0, rect.k1)
        bias, _ = self._flash_bias(rect)
        norm = lse[b, h, rows]
        norm = norm.masked_fill(norm == -torch.inf, 0.0)
        tensors = (grad_out[b, h, rows], self.q[b, h, rows], self.k[(*g, keys)], self.v[(*g, keys)], out[b, h, rows])
        grad, q, k, v, o = (side_by_side(t.to(self.wide)) for t in tensors)
        q, scale, sign = above_zero(q, self.work.scale)
        dq, dk, dv = _flash_backward(grad, q, k, v, o, norm, 0.0, rect.kind == "causal", attn_mask=bias, scale=scale)
        return (dq if sign == 1.0 else dq * sign), dk, dv
