"""The `cpu` kernel: blockwise attention in torch operations, with memory O(S · block).

Rectangles without a score program use torch's CPU flash operator, in float32 (float64 for float64 inputs): in half precision it rounds
partial sums. All other rectangles are computed tile by tile (`PlainTiles`), on any device: the portable path for programs that no compiled
kernel supports. `longspan.invariant()` has a path of its own (`InvariantTiles`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan._kernels.invariant_tiles import InvariantTiles
from longspan._kernels.isolation import OutputTerms, isolated_backward, isolated_forward
from longspan._kernels.plain_tiles import PlainTiles
from longspan._kernels.protocol import AttentionInputs, BackwardInputs, Capabilities, Grads, State, Work, like_query, plain_delta
from longspan._kernels.rectangles import Rectangle, rectangles
from longspan._kernels.tile_math import contiguous_last_dim, merge_, positive_scale, running_state
from longspan._masks.block_table import BlockTable

_operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, kw_only=True)
class CpuKernel:
    """See the module's docstring."""

    name: str = "cpu"

    def capabilities(self, inputs: AttentionInputs, work: Work, *, needs: Sequence[bool] = ()) -> Capabilities:
        if work.invariant and inputs.q.device.type != "cpu":
            return Capabilities(unsupported=f"longspan.invariant() with tensors on {inputs.q.device}: expected CPU tensors")
        return Capabilities()

    def block_size(self, inputs: AttentionInputs, table: BlockTable) -> tuple[int, int]:
        return table.block

    def check(self, inputs: AttentionInputs, work: Work, *, needs: Sequence[bool] = ()) -> None:
        pass

    def delta(self, out: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
        return plain_delta(out, grad_out, grad_lse)

    def forward(self, inputs: AttentionInputs, work: Work, *, state: State | None, final: bool, max_scores: bool) -> State:
        if work.invariant:
            return InvariantTiles(inputs, work).forward(state, max_scores=max_scores)
        q, tiles, rects = inputs.q, PlainTiles(inputs, work), rectangles(work)
        flash = _flash_supports(tiles) and not max_scores
        if flash and state is None and len(rects) == 1 and tiles.is_everything(rects[0]):
            out, lse = _flash_forward(tiles, rects[0])
            return State(out=_final_out(out, q) if final else out, lse=lse)
        result = running_state(state, (*q.shape[:3], inputs.v.shape[-1]), tiles.wide, q.device, max_scores=max_scores)
        for rect in rects:
            if flash:
                merge_(result, tiles.q_slices(rect), *_flash_forward(tiles, rect))
                continue
            for part in tiles.parts(rect):
                merge_(result, tiles.q_slices(part), *tiles.forward(part))
        if final:
            result.out = _final_out(result.out, q)
        return result

    def backward(self, tensors: BackwardInputs, work: Work, *, wide: bool, into: Grads | None = None) -> Grads:
        inputs, delta = tensors.inputs, tensors.delta
        if work.invariant:
            return InvariantTiles(inputs, work).backward(tensors, wide=wide)
        tiles, rects = PlainTiles(inputs, work), rectangles(work)
        # The operator computes delta itself, without the gradient of lse.
        flash = _flash_supports(tiles) and tensors.grad_lse is None
        terms = OutputTerms(tensors.grad_out, tensors.out, tensors.lse)
        if flash and len(rects) == 1 and tiles.is_everything(rects[0]):
            dq, dk, dv = _flash_backward(tiles, rects[0], terms, delta)
            if into is not None:
                into.q.add_(dq)
                into.k.copy_(dk)
                into.v.copy_(dv)
                return into
            dtype = tiles.wide if wide else inputs.q.dtype
            return Grads(q=dq.to(dtype), k=dk.to(dtype), v=dv.to(dtype), captured=[])
        total = tiles.empty_grads(tensors.needs) if into is None else into
        if into is not None:
            into.k.zero_()
            into.v.zero_()
        if delta is None and not flash:
            delta = self.delta(tensors.out, tensors.grad_out, tensors.grad_lse)
        for rect in rects:
            q_slices, kv_slices = tiles.q_slices(rect), tiles.kv_slices(rect)
            if flash:
                dq, dk, dv = _flash_backward(tiles, rect, terms, delta)
                total.q[q_slices] += dq
                total.k[kv_slices] += dk
                total.v[kv_slices] += dv
                continue
            assert delta is not None
            for part in tiles.parts(rect):
                tiles.add_grads_(total, part, tensors.lse, delta, tensors.grad_out)
        if not wide and into is None:
            total.q, total.k, total.v = total.q.to(inputs.q.dtype), total.k.to(inputs.k.dtype), total.v.to(inputs.v.dtype)
        return total


def _final_out(out: Tensor, q: Tensor) -> Tensor:
    """out in the dtype and memory order of q."""
    return like_query(q, out.shape[-1], q.dtype).copy_(out)


def _flash_supports(tiles: PlainTiles) -> bool:
    return tiles.work.score is None and tiles.q.shape[-1] == tiles.v.shape[-1] and tiles.q.device.type == "cpu"


def _flash_forward(tiles: PlainTiles, rect: Rectangle) -> tuple[Tensor, Tensor]:
    """(out, lse) of a rectangle by torch's CPU flash operator."""
    bias, any_seen = _bias(tiles, rect)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        q, scale, _ = positive_scale(q, tiles.work.scale)
        out, lse = _operator(*map(contiguous_last_dim, (q, k, v)), 0.0, rect.kind == "causal", attn_mask=bias, scale=scale)
        if any_seen is None:
            return out, lse
        # The operator returns lse 0 for fully masked rows. The merge would count it as one key of score 0.
        return torch.where(any_seen[..., None], out, 0.0), torch.where(any_seen, lse, -torch.inf)

    return isolated_forward(tiles, rect, run)


def _flash_backward(tiles: PlainTiles, rect: Rectangle, terms: OutputTerms, delta: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v of a rectangle by torch's CPU flash operator. `terms`, `delta`: of the whole call."""
    bias, _ = _bias(tiles, rect)

    def run(q: Tensor, k: Tensor, v: Tensor, terms: OutputTerms) -> tuple[Tensor, Tensor, Tensor]:
        q, scale, sign = positive_scale(q, tiles.work.scale)
        tensors = map(contiguous_last_dim, (terms.grad_out, q, k, v, terms.out))
        lse = terms.lse.masked_fill(terms.lse == -torch.inf, 0.0)
        dq, dk, dv = _backward_operator(*tensors, lse, 0.0, rect.kind == "causal", attn_mask=bias, scale=scale)
        return (dq if sign == 1.0 else dq * sign), dk, dv

    return isolated_backward(tiles, rect, terms, delta, run)


def _bias(tiles: PlainTiles, rect: Rectangle) -> tuple[Tensor | None, Tensor | None]:
    """The additive mask of a rectangle and which rows see any key, broadcasting to [B, H, m, n] and [B, H, m]; None without a mask."""
    if rect.kind != "masked":
        return None, None
    seen = tiles.seen(rect)
    assert seen is not None
    return torch.zeros(seen.shape, dtype=tiles.wide).masked_fill_(~seen, -torch.inf), seen.any(-1)
