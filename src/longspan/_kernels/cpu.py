"""The `cpu` kernel: blockwise attention in plain torch operations, memory O(S · block).

Rectangles that need no score program go to torch's CPU flash operator, in float32 (float64) whatever the inputs: in half precision
it rounds partial sums. The rest is computed here, tile by tile. The latter part runs on any
device and serves as the portable kernel for programs that no compiled kernel takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from longspan._kernels.isolation import Rows, isolated_backward, isolated_forward
from longspan._kernels.plain_tiles import PlainTiles
from longspan._kernels.protocol import Grads, State, Work, like_query, plain_delta
from longspan._kernels.rectangles import Rectangle, rectangles
from longspan._kernels.tile_math import above_zero, begun, fold_, side_by_side
from longspan._masks.block_table import BlockTable

_operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


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
        tiles = PlainTiles(q, k, v, work)
        flash = _flash_fits(tiles) and not peak
        rects = rectangles(work)
        if flash and state is None and len(rects) == 1 and tiles.is_everything(rects[0]):
            out, lse = _flash_forward(tiles, rects[0])
            return State(out=_finished(out, q) if final else out, lse=lse)
        result = begun(state, (*q.shape[:3], v.shape[-1]), tiles.wide, q.device, peak=peak)
        for rect in rects:
            if flash:
                fold_(result, tiles.q_slices(rect), *_flash_forward(tiles, rect))
                continue
            for part in tiles.parts(rect):
                fold_(result, tiles.q_slices(part), *tiles.forward(part))
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
        tiles = PlainTiles(q, k, v, work)
        rects = rectangles(work)
        # The operator computes delta by itself, without a gradient of lse.
        flash = _flash_fits(tiles) and grad_lse is None
        rows = Rows(grad_out, out, lse)
        if flash and len(rects) == 1 and tiles.is_everything(rects[0]):
            dq, dk, dv = _flash_backward(tiles, rects[0], rows, delta)
            if into is not None:
                into.q.add_(dq)
                into.k.copy_(dk)
                into.v.copy_(dv)
                return into
            dtype = tiles.wide if wide else q.dtype
            return Grads(q=dq.to(dtype), k=dk.to(dtype), v=dv.to(dtype), captured=[])
        total = tiles.empty_grads(needs) if into is None else into
        if into is not None:
            into.k.zero_()
            into.v.zero_()
        if delta is None and not flash:
            delta = self.delta(out, grad_out, grad_lse)
        for rect in rects:
            at, keys = tiles.q_slices(rect), tiles.kv_slices(rect)
            if flash:
                dq, dk, dv = _flash_backward(tiles, rect, rows, delta)
                total.q[at] += dq
                total.k[keys] += dk
                total.v[keys] += dv
                continue
            assert delta is not None
            for part in tiles.parts(rect):
                tiles.add_grads_(total, part, lse, delta, grad_out)
        if not wide and into is None:
            total.q, total.k, total.v = total.q.to(q.dtype), total.k.to(k.dtype), total.v.to(v.dtype)
        return total


def _finished(out: Tensor, q: Tensor) -> Tensor:
    """The result as callers get it: the query's dtype and memory order."""
    return like_query(q, out.shape[-1], q.dtype).copy_(out)


def _flash_fits(tiles: PlainTiles) -> bool:
    return tiles.work.score is None and tiles.q.shape[-1] == tiles.v.shape[-1] and tiles.q.device.type == "cpu"


def _flash_forward(tiles: PlainTiles, rect: Rectangle) -> tuple[Tensor, Tensor]:
    """(out, lse) of a rectangle by torch's CPU flash operator."""
    bias, any_seen = _bias(tiles, rect)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        q, scale, _ = above_zero(q, tiles.work.scale)
        out, lse = _operator(*map(side_by_side, (q, k, v)), 0.0, rect.kind == "causal", attn_mask=bias, scale=scale)
        if any_seen is None:
            return out, lse
        # The operator gives rows that see nothing an lse of 0: they would count as one key of score 0.
        return torch.where(any_seen[..., None], out, 0.0), torch.where(any_seen, lse, -torch.inf)

    return isolated_forward(tiles, rect, run)


def _flash_backward(tiles: PlainTiles, rect: Rectangle, rows: Rows, delta: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v of a rectangle by torch's CPU flash operator. `rows`, `delta`: of the whole call."""
    bias, _ = _bias(tiles, rect)

    def run(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        q, scale, sign = above_zero(q, tiles.work.scale)
        tensors = map(side_by_side, (rows.grad_out, q, k, v, rows.out))
        lse = rows.lse.masked_fill(rows.lse == -torch.inf, 0.0)
        dq, dk, dv = _backward_operator(*tensors, lse, 0.0, rect.kind == "causal", attn_mask=bias, scale=scale)
        return (dq if sign == 1.0 else dq * sign), dk, dv

    return isolated_backward(tiles, rect, rows, delta, run)


def _bias(tiles: PlainTiles, rect: Rectangle) -> tuple[Tensor | None, Tensor | None]:
    """The additive mask of a rectangle [B or 1, H or 1, m, n], and which rows see anything."""
    if rect.kind != "masked":
        return None, None
    seen = tiles.seen(rect)
    assert seen is not None
    seen = seen.expand(*seen.shape[:2], rect.q1 - rect.q0, rect.k1 - rect.k0)
    return torch.zeros(seen.shape, dtype=tiles.wide).masked_fill_(~seen, -torch.inf), seen.any(-1)
