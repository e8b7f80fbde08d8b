"""The kernels `flash`, `efficient`, `cudnn` and `aten`: torch's SDPA operators, for masks made of full rectangles and causal squares.

Each rectangle is one operator call. A rectangle that is the whole call gives the result directly; otherwise partial results are merged into
the running state. On CUDA the operators round each partial result and each partial gradient to the inputs' dtype. In bfloat16 over 16
steps this raises the rms error to 1.12–1.24 times that of one call (out, dq, dk, dv; full and causal); float32 partial results do not raise
it. `auto` therefore never chooses these kernels (`longspan._kernels.registry`).

On CUDA the backward operators of `flash` and `cudnn` accumulate the gradient of q in arbitrary order: bits may differ from run to run.
With torch.use_deterministic_algorithms, `flash` and `efficient` are deterministic and `cudnn` is not supported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan._kernels.aten_limits import unsupported_reason
from longspan._kernels.aten_ops import Backend, backward_through_lse, in_order_of, operator
from longspan._kernels.isolation import OutputTerms, isolated_backward, isolated_forward
from longspan._kernels.plain_tiles import PlainTiles
from longspan._kernels.protocol import AttentionInputs, BackwardInputs, Capabilities, Grads, Kernel, State, Work, plain_delta, state_dtype
from longspan._kernels.rectangles import Rectangle, rectangles
from longspan._kernels.tile_math import grouped_matmul, merge_, positive_scale, running_state
from longspan._masks.block_table import BlockTable

# Measured on an H200, forward and backward.
FASTEST_FIRST: tuple[Backend, ...] = ("cudnn", "flash", "efficient")

_MAX_SCORES_IN_FLIGHT = 1 << 22  # elements of the score matrix held at once to find each row's largest score


class _ByRectangles:
    """What all kernels of torch's operators have in common."""

    def block_size(self, inputs: AttentionInputs, table: BlockTable) -> tuple[int, int]:
        return table.block

    def check(self, inputs: AttentionInputs, work: Work, *, needs: Sequence[bool] = ()) -> None:
        pass

    def delta(self, out: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
        return plain_delta(out, grad_out, grad_lse)


@dataclass(frozen=True)
class AtenKernel(_ByRectangles):
    """One backend. On CPU, `flash` is torch's CPU flash operator, in float32 (float64 for float64 inputs)."""

    backend: Backend

    @property
    def name(self) -> str:
        return self.backend

    def capabilities(self, inputs: AttentionInputs, work: Work, *, needs: Sequence[bool] = ()) -> Capabilities:
        return Capabilities(unsupported=unsupported_reason(self.backend, inputs, work))

    def forward(self, inputs: AttentionInputs, work: Work, *, state: State | None, final: bool, max_scores: bool) -> State:
        q, k, v = inputs.q, inputs.k, inputs.v
        op, wide = operator(self.backend, q.device), state_dtype(q.dtype)
        parts, (_, scale, _) = list(_parts(q, k, work)), positive_scale(q, work.scale)
        tiles = PlainTiles(inputs, work)
        whole = state is None and len(parts) == 1 and parts[0].everything
        result = None if whole else running_state(state, (*q.shape[:3], v.shape[-1]), wide, q.device, max_scores=max_scores)
        for part in parts:

            def run(q: Tensor, k: Tensor, v: Tensor, causal: bool = part.causal) -> tuple[Tensor, Tensor]:
                return op.forward(positive_scale(q, work.scale)[0], k, v, causal=causal, scale=scale)

            out, lse = isolated_forward(tiles, part.rect, run)
            row_max = _max_scores(q[part.q_slices], k[part.kv_slices], part.causal, work.scale) if max_scores else None
            if result is None:
                result = State(out=out if final else out.to(wide), lse=lse, max_scores=row_max)
            else:
                merge_(result, part.q_slices, out, lse, row_max)
        assert result is not None
        if final:
            result.out = in_order_of(q, result.out.to(q.dtype))
        return result

    def backward(self, tensors: BackwardInputs, work: Work, *, wide: bool, into: Grads | None = None) -> Grads:
        """As in the protocol. `delta` serves only to detect non-finite rows: the operators compute their own and add `grad_lse`."""
        inputs, lse = tensors.inputs, tensors.lse
        q, k, v = inputs.q, inputs.k, inputs.v
        op = operator(self.backend, q.device)
        total: Grads | None = into
        parts, (_, scale, sign) = list(_parts(q, k, work)), positive_scale(q, work.scale)
        tiles, call_terms = PlainTiles(inputs, work), OutputTerms(tensors.grad_out, tensors.out, lse, tensors.grad_lse)
        whole = len(parts) == 1 and parts[0].everything
        if into is None and not whole:
            dq, dk, dv = (torch.zeros_like(t, dtype=state_dtype(q.dtype)) for t in (q, k, v))
            total = Grads(q=dq, k=dk, v=dv, captured=[])
        elif into is not None and not whole:
            into.k.zero_()
            into.v.zero_()
        for part in parts:

            def run(q: Tensor, k: Tensor, v: Tensor, terms: OutputTerms, causal: bool = part.causal) -> tuple[Tensor, Tensor, Tensor]:
                scaled_q = positive_scale(q, work.scale)[0]
                method = op.backward if terms.grad_lse is None else backward_through_lse
                dq, dk, dv = method(scaled_q, k, v, terms, causal=causal, scale=scale)
                return (dq if sign == 1.0 else dq * sign), dk, dv

            dq, dk, dv = isolated_backward(tiles, part.rect, call_terms, tensors.delta, run)
            if total is None:
                total = Grads(q=dq, k=dk, v=dv, captured=[])
            elif whole:
                total.q.add_(dq)
                total.k.copy_(dk)
                total.v.copy_(dv)
            else:
                total.q[part.q_slices] += dq
                total.k[part.kv_slices] += dk
                total.v[part.kv_slices] += dv
        assert total is not None
        if into is None:
            total.q, total.k, total.v = (g.to(lse.dtype if wide else t.dtype) for g, t in ((total.q, q), (total.k, k), (total.v, v)))
            total.captured = [None] * len(tensors.needs)
        return total


class AnyAtenKernel(_ByRectangles):
    """The kernel `aten`: the fastest backend that supports the work."""

    name = "aten"

    def pick(self, inputs: AttentionInputs, work: Work) -> AtenKernel | str:
        """The backend for this work, or why no backend supports it."""
        reasons = []
        for kernel in map(AtenKernel, FASTEST_FIRST):
            reason = kernel.capabilities(inputs, work).unsupported
            if reason is None:
                return kernel
            reasons.append(f"{kernel.name}: {reason}")
        return "; ".join(reasons)

    def capabilities(self, inputs: AttentionInputs, work: Work, *, needs: Sequence[bool] = ()) -> Capabilities:
        picked = self.pick(inputs, work)
        return Capabilities(unsupported=picked if isinstance(picked, str) else None)

    def forward(self, inputs: AttentionInputs, work: Work, *, state: State | None, final: bool, max_scores: bool) -> State:
        return self._picked(inputs, work).forward(inputs, work, state=state, final=final, max_scores=max_scores)

    def backward(self, tensors: BackwardInputs, work: Work, *, wide: bool, into: Grads | None = None) -> Grads:
        return self._picked(tensors.inputs, work).backward(tensors, work, wide=wide, into=into)

    def _picked(self, inputs: AttentionInputs, work: Work) -> AtenKernel:
        picked = self.pick(inputs, work)
        if isinstance(picked, str):
            raise ValueError(f"kernel 'aten' does not support this call: {picked}. kernel='auto' picks one that does")
        return picked


KERNELS: dict[str, Kernel] = {"aten": AnyAtenKernel()} | {backend: AtenKernel(backend) for backend in FASTEST_FIRST}


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A rectangle as slices of q, out and lse, and of k and v. `everything`: the rectangle is the whole call."""

    q_slices: tuple[slice, slice, slice]
    kv_slices: tuple[slice, slice, slice]
    rect: Rectangle
    everything: bool

    @property
    def causal(self) -> bool:
        return self.rect.kind == "causal"


def _parts(q: Tensor, k: Tensor, work: Work) -> Iterator[_Part]:
    if not (q.numel() and k.numel()):
        return
    table, shared = work.table, q.shape[1] // k.shape[1]
    for r in rectangles(work):
        if r.kind == "masked":
            raise ValueError(_masked_rectangle(r))
        b = slice(r.b, r.b + 1) if table.batch > 1 else slice(None)
        h = slice(r.h, r.h + 1) if table.heads > 1 else slice(None)
        g = slice(r.h // shared, r.h // shared + 1) if table.heads > 1 else slice(None)
        everything = table.batch == table.heads == 1 and (r.q0, r.q1, r.k0, r.k1) == (0, q.shape[2], 0, k.shape[2])
        yield _Part(q_slices=(b, h, slice(r.q0, r.q1)), kv_slices=(b, g, slice(r.k0, r.k1)), rect=r, everything=everything)


def _masked_rectangle(r: Rectangle) -> str:
    return (
        f"torch's SDPA operators compute full rectangles and causal squares; the mask is neither for queries {r.q0} to {r.q1 - 1} and "
        f"keys {r.k0} to {r.k1 - 1} of this step. kernel='auto' picks a kernel that supports it"
    )


def _max_scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """Largest score of each row [B, H, m], which the operators do not return: in torch operations, a slice of rows at a time."""
    wide = state_dtype(q.dtype)
    rows = max(1, _MAX_SCORES_IN_FLIGHT // (q.shape[0] * q.shape[1] * k.shape[2]))
    keys, row_max = k.to(wide).transpose(-1, -2), []
    for start in range(0, q.shape[2], rows):
        scores = grouped_matmul(q[:, :, start : start + rows].to(wide) * scale, keys)
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(start + 1)
            scores = scores.masked_fill_(hidden, -torch.inf)
        row_max.append(scores.amax(-1))
    return torch.cat(row_max, -1)
