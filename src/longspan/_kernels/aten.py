"""The kernels `flash`, `efficient`, `cudnn` and `aten`: torch's own SDPA operators, for work that is full rectangles and causal squares.

Each rectangle is one call of an operator. Where one rectangle is everything, its result is the result; else partial results are folded
into the running state. On CUDA the operators round each partial result, and each partial gradient, to the inputs' dtype. In bfloat16 that
shows: over 16 stages the rms error is 1.12 to 1.24 times that of one call (out, dq, dk, dv; full and causal), where float32 partial results
make it no larger. So `auto` does not choose these kernels; see `longspan._kernels.registry`.

On CUDA the backward operators of `flash` and `cudnn` sum the gradient of q in any order: bits may differ from run to run, unless
torch.use_deterministic_algorithms is set, which `flash` and `efficient` honour and `cudnn` refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from longspan._kernels.aten_limits import refusal
from longspan._kernels.aten_ops import Backend, backward_through_lse, in_order_of, operator
from longspan._kernels.isolation import Rows, isolated_backward, isolated_forward
from longspan._kernels.plain_tiles import PlainTiles
from longspan._kernels.protocol import Grads, Kernel, State, Work, plain_delta, state_dtype
from longspan._kernels.rectangles import Rectangle, rectangles
from longspan._kernels.tile_math import above_zero, begun, fold_, grouped_matmul
from longspan._masks.block_table import BlockTable

# Fastest first, as measured on an H200, forward and backward.
FASTEST_FIRST: tuple[Backend, ...] = ("cudnn", "flash", "efficient")

_PEAK_ELEMENTS = 1 << 22  # scores in flight where the largest of each row is asked for


@dataclass(frozen=True)
class AtenKernel:
    """One backend. On CPU, `flash` is torch's CPU flash operator, in float32 (float64) whatever the inputs."""

    backend: Backend
    rounds_once: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return self.backend

    def check(self, work: Work, q: Tensor, needs: Sequence[bool] = ()) -> None:
        pass

    def joins(self, q: Tensor, v: Tensor, work: Work, *, backward: bool) -> bool:
        return False

    def apart(self, q: Tensor, v: Tensor, work: Work, needs: Sequence[bool]) -> bool:
        return False

    def refuses(self, q: Tensor, k: Tensor, v: Tensor, work: Work) -> str | None:
        return refusal(self.backend, q, k, v, work)

    def block(self, q: Tensor, v: Tensor, table: BlockTable) -> tuple[int, int]:
        return table.block

    def delta(self, out: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
        return plain_delta(out, grad_out, grad_lse)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, work: Work, *, state: State | None, final: bool, peak: bool) -> State:
        op, wide = operator(self.backend, q.device), state_dtype(q.dtype)
        parts, (_, scale, _) = list(_parts(q, k, work)), above_zero(q, work.scale)
        tiles = PlainTiles(q, k, v, work)
        whole = state is None and len(parts) == 1 and parts[0].everything
        result = None if whole else begun(state, (*q.shape[:3], v.shape[-1]), wide, q.device, peak=peak)
        for part in parts:
            rows, keys = part.rows, part.keys

            def run(q: Tensor, k: Tensor, v: Tensor, causal: bool = part.causal) -> tuple[Tensor, Tensor]:
                return op.forward(above_zero(q, work.scale)[0], k, v, causal=causal, scale=scale)

            out, lse = isolated_forward(tiles, part.rect, run)
            most = _peaks(q[rows], k[keys], part.causal, work.scale) if peak else None
            if result is None:
                result = State(out=out if final else out.to(wide), lse=lse, peak=most)
            else:
                fold_(result, rows, out.to(wide), lse, most)
        assert result is not None
        if final:
            result.out = in_order_of(q, result.out.to(q.dtype))
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
        """As in the protocol. `delta` is read for non-finite numbers alone: the operators make their own, and add a `grad_lse` to that."""
        op = operator(self.backend, q.device)
        total: Grads | None = into
        parts, (_, scale, sign) = list(_parts(q, k, work)), above_zero(q, work.scale)
        tiles, rows_of_call = PlainTiles(q, k, v, work), Rows(grad_out, out, lse, grad_lse)
        whole = len(parts) == 1 and parts[0].everything
        if into is None and not whole:
            dq, dk, dv = (torch.zeros_like(t, dtype=state_dtype(q.dtype)) for t in (q, k, v))
            total = Grads(q=dq, k=dk, v=dv, captured=[])
        elif into is not None and not whole:
            into.k.zero_()
            into.v.zero_()
        for part in parts:
            rows, keys = part.rows, part.keys

            def run(q: Tensor, k: Tensor, v: Tensor, told: Rows, causal: bool = part.causal) -> tuple[Tensor, Tensor, Tensor]:
                given = above_zero(q, work.scale)[0]
                method = op.backward if told.grad_lse is None else backward_through_lse
                dq, dk, dv = method(given, k, v, told, causal=causal, scale=scale)
                return (dq if sign == 1.0 else dq * sign), dk, dv

            dq, dk, dv = isolated_backward(tiles, part.rect, rows_of_call, delta, run)
            if total is None:
                total = Grads(q=dq, k=dk, v=dv, captured=[])
            elif whole:
                total.q.add_(dq)
                total.k.copy_(dk)
                total.v.copy_(dv)
            else:
                total.q[rows] += dq
                total.k[keys] += dk
                total.v[keys] += dv
        assert total is not None
        if into is None:
            total.q, total.k, total.v = (g.to(lse.dtype if wide else t.dtype) for g, t in ((total.q, q), (total.k, k), (total.v, v)))
            total.captured = [None] * len(needs)
        return total


class AnyAtenKernel:
    """The kernel `aten`: for each piece of work the fastest backend that takes it."""

    name = "aten"
    rounds_once = False

    def pick(self, q: Tensor, k: Tensor, v: Tensor, work: Work) -> AtenKernel | str:
        """The backend for a piece of work, or why none takes it."""
        reasons = []
        for kernel in map(AtenKernel, FASTEST_FIRST):
            reason = kernel.refuses(q, k, v, work)
            if reason is None:
                return kernel
            reasons.append(f"{kernel.name}: {reason}")
        return "; ".join(reasons)

    def check(self, work: Work, q: Tensor, needs: Sequence[bool] = ()) -> None:
        pass

    def joins(self, q: Tensor, v: Tensor, work: Work, *, backward: bool) -> bool:
        return False

    def apart(self, q: Tensor, v: Tensor, work: Work, needs: Sequence[bool]) -> bool:
        return False

    def refuses(self, q: Tensor, k: Tensor, v: Tensor, work: Work) -> str | None:
        found = self.pick(q, k, v, work)
        return found if isinstance(found, str) else None

    def block(self, q: Tensor, v: Tensor, table: BlockTable) -> tuple[int, int]:
        return table.block

    def delta(self, out: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
        return plain_delta(out, grad_out, grad_lse)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, work: Work, *, state: State | None, final: bool, peak: bool) -> State:
        return self._picked(q, k, v, work).forward(q, k, v, work, state=state, final=final, peak=peak)

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
        kernel = self._picked(q, k, v, work)
        return kernel.backward(q, k, v, out, lse, grad_out, grad_lse, work, needs=needs, wide=wide, delta=delta, into=into)

    def _picked(self, q: Tensor, k: Tensor, v: Tensor, work: Work) -> AtenKernel:
        found = self.pick(q, k, v, work)
        if isinstance(found, str):
            raise ValueError(f"kernel 'aten' cannot do this: {found}. kernel='auto' picks one that can")
        return found


KERNELS: dict[str, Kernel] = {"aten": AnyAtenKernel()} | {backend: AtenKernel(backend) for backend in FASTEST_FIRST}


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A rectangle as slices: `rows` of q, out and lse, `keys` of k and v. `everything`: it is all there is."""

    rows: tuple[slice, slice, slice]
    keys: tuple[slice, slice, slice]
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
            raise ValueError(_undecided(r))
        b = slice(r.b, r.b + 1) if table.batch > 1 else slice(None)
        h = slice(r.h, r.h + 1) if table.heads > 1 else slice(None)
        g = slice(r.h // shared, r.h // shared + 1) if table.heads > 1 else slice(None)
        everything = table.batch == table.heads == 1 and (r.q0, r.q1, r.k0, r.k1) == (0, q.shape[2], 0, k.shape[2])
        rows, keys = (b, h, slice(r.q0, r.q1)), (b, g, slice(r.k0, r.k1))
        yield _Part(rows=rows, keys=keys, rect=r, everything=everything)


def _undecided(r: Rectangle) -> str:
    return (
        f"torch's SDPA operators compute full rectangles and causal squares; the mask decides inside rows {r.q0} to {r.q1 - 1} against "
        f"keys {r.k0} to {r.k1 - 1} of this stage. kernel='auto' picks a kernel that can"
    )


def _peaks(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """The largest score of each row [B, H, m], which the operators do not give: in plain torch, some rows at a time."""
    wide = state_dtype(q.dtype)
    rows = max(1, _PEAK_ELEMENTS // (q.shape[0] * q.shape[1] * k.shape[2]))
    keys, found = k.to(wide).transpose(-1, -2), []
    for start in range(0, q.shape[2], rows):
        scores = grouped_matmul(q[:, :, start : start + rows].to(wide) * scale, keys)
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(start + 1)
            scores = scores.masked_fill_(hidden, -torch.inf)
        found.append(scores.amax(-1))
    return torch.cat(found, -1)
