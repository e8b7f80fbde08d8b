"""`TritonKernel`: the kernel protocol over the Triton kernels. Shapes and names as in `longspan.kernels.protocol`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longspan.kernels.protocol import Grads, State, Work, like_query
from longspan.kernels.triton import codegen, launch
from longspan.kernels.triton.backward import delta_kernel, keys_kernel, queries_kernel
from longspan.kernels.triton.config import FINE, Config, Tile, choose, prefers_fine_tables
from longspan.kernels.triton.forward import forward_kernel
from longspan.kernels.triton.interpreter import computable, interpreted, quiet
from longspan.masks.table import BlockTable

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TritonKernel:
    """Scores, sums and the running state in float32; probabilities in the values' dtype where they meet the values.

    `config` replaces the built-in choice of tile sizes. Gradients of captured tensors are summed by atomic additions, in an order that may
    differ from run to run; all else is computed in a fixed order.
    """

    name = "triton"

    def __init__(self, *, config: Config | None = None) -> None:
        self.config = config

    def refuses(self, q: Tensor, k: Tensor, v: Tensor, work: Work) -> str | None:
        if q.dtype not in _DTYPES:
            return f"dtype {q.dtype}: it computes bfloat16, float16 and float32"
        if interpreted():
            if q.is_cuda:
                return "TRITON_INTERPRET=1 is set: the interpreter works on CPU tensors only"
        elif not q.is_cuda:
            return f"tensors on {q.device}: it needs a CUDA device"
        elif torch.cuda.get_device_capability(q.device) < (8, 0):
            return f"{torch.cuda.get_device_name(q.device)}: it needs compute capability 8.0 (Ampere) or later"
        if max(q.shape[-1], v.shape[-1]) > 256:
            return f"head dims {q.shape[-1]} and {v.shape[-1]}: at most 256 each"
        for block in work.table.block:
            if launch.sub_tile(block, 128) < 16:
                return f"table block {work.table.block}: both sizes must be multiples of 16"
        opts = launch.options(work, q.dtype)
        return codegen.unsupported(work.mask, None, opts) or codegen.unsupported(work.score, work.joint, opts)

    def block(self, q: Tensor, v: Tensor, table: BlockTable) -> tuple[int, int]:
        counts = table.counts()
        share = counts.partial / max(1, counts.partial + counts.full)
        dims = {"d": launch.padded(q.shape[-1]), "e": launch.padded(v.shape[-1])}
        fine = prefers_fine_tables(capability=_capability(q.device), dtype=q.dtype, partial_share=share, **dims)
        return FINE if fine else table.block

    def forward(self, q: Tensor, k: Tensor, v: Tensor, work: Work, *, state: State | None, final: bool, peak: bool) -> State:
        B, H, Q, _ = q.shape
        dtype = q.dtype
        q, k, v = map(computable, (q, k, v))
        out = like_query(q, v.shape[-1], q.dtype if final else torch.float32)
        lse = q.new_empty((B, H, Q), dtype=torch.float32)
        top = torch.empty_like(lse) if peak else None
        result = State(out=out, lse=lse, peak=top)
        if not out.numel():
            return result
        old_lse = state.lse.contiguous() if state else None
        old_peak = state.peak.contiguous() if peak and state and state.peak is not None else None
        common = _Common(self, q, k, v, work)
        _prefill_unvisited(work, result, state)
        common.launch(
            forward_kernel, common.config.forward, work.table, over="queries",
            tensors=(q, k, v, out, lse, top, state.out if state else None, old_lse, old_peak),
            strides=(q, k, v, out, state.out if state else out), FOLD=work.score is None and work.scale > 0,
        )  # fmt: skip
        result.out = result.out.to(dtype) if final else result.out
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
    ) -> Grads:
        dtype = torch.float32 if wide else q.dtype
        q, k, v, grad_out = map(computable, (q, k, v, grad_out))
        dq, dk, dv = (torch.empty(x.shape, dtype=torch.float32 if wide else q.dtype, device=q.device) for x in (q, k, v))
        for grad, side in ((dq, work.q_tiles), (dk, work.kv_tiles), (dv, work.kv_tiles)):
            if side.row is not None:
                grad.zero_()  # rows that no tile holds
        captured = [
            torch.zeros(c.shape, dtype=torch.float32, device=c.device) if n else None
            for c, n in zip(work.score_captured, needs, strict=True)
        ]
        grads = Grads(q=dq, k=dk, v=dv, captured=captured)
        if work.score is not None and work.joint is None:
            raise ValueError(
                f"score_mod {work.score.name!r}: expected work.joint for a backward pass, got None; make it with joint_of(program)"
            )
        common = _Common(self, q, k, v, work)
        lse = lse.contiguous()
        fuse = delta is None and work.q_tiles.row is None
        if delta is None and not fuse:
            delta = self.delta(out, grad_out, grad_lse)
        rows = torch.empty_like(lse) if delta is None else delta.contiguous()
        if dq.numel():
            fused = (computable(out), None if grad_lse is None else grad_lse.float().contiguous()) if fuse else (None, None)
            common.queries(grad_out, lse, rows, dq, captured, *fused)
        if dk.numel():
            common.keys(grad_out, lse, rows, dk, dv)
        grads.q, grads.k, grads.v = (g.to(dtype) for g in (grads.q, grads.k, grads.v))
        return grads

    def delta(self, out: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
        B, H, Q, E = out.shape
        out, grad_out = computable(out), computable(grad_out)
        delta = out.new_empty((B, H, Q), dtype=torch.float32)
        if delta.numel():
            m = 64
            grad_lse = None if grad_lse is None else grad_lse.float().contiguous()
            with _on(out.device):
                delta_kernel[(B * H * -(-Q // m),)](
                    out, grad_out, grad_lse, delta, out.stride(), grad_out.stride(), H, Q, M=m, E=E, EP=launch.padded(E), num_warps=4
                )
        return delta


class _Common:
    """The arguments that every launch of one call shares."""

    def __init__(self, kernel: TritonKernel, q: Tensor, k: Tensor, v: Tensor, work: Work) -> None:
        self.q, self.k, self.v, self.work = q, k, v, work
        self.d, self.e = q.shape[-1], v.shape[-1]
        self.config = kernel.config or choose(
            capability=_capability(q.device),
            d=launch.padded(self.d),
            e=launch.padded(self.e),
            dtype=q.dtype,
            scored=work.score is not None,
            fine=work.table.block == FINE,
            keys=k.shape[2],
        )
        self.options = launch.options(work, q.dtype)
        self.captured = launch.captured(work, q)
        self.precision = "ieee" if q.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32 else "tf32"

    def keys(self, grad_out: Tensor, lse: Tensor, delta: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Fill dk and dv."""
        q, k, v = self.q, self.k, self.v
        self.launch(
            keys_kernel, self.config.dkdv, self.work.table.transposed, over="keys", tensors=(q, k, v, grad_out, lse, delta, dk, dv),
            strides=(q, k, v, grad_out, dk, dv), JOINT=self._joint([False] * len(self.work.score_captured)),
        )  # fmt: skip

    def queries(
        self,
        grad_out: Tensor,
        lse: Tensor,
        delta: Tensor,
        dq: Tensor,
        captured: Sequence[Tensor | None],
        out: Tensor | None = None,
        grad_lse: Tensor | None = None,
    ) -> None:
        """Fill dq, and add to the gradients of captured tensors that are not None. Given `out`, compute and fill delta on the way."""
        q, k, v = self.q, self.k, self.v
        self.launch(
            queries_kernel, self.config.dq, self.work.table, over="queries",
            tensors=(q, k, v, grad_out, lse, delta, dq, out, grad_lse),
            strides=(q, k, v, grad_out, dq, q if out is None else out), JOINT=self._joint([g is not None for g in captured]),
            grads=tuple(g for g in captured if g is not None) or (lse,),
        )  # fmt: skip

    def _joint(self, needs: Sequence[bool]) -> Any:
        work = self.work
        if work.score is None or work.joint is None:
            return None
        return codegen.joint_function(work.score, work.joint, needs, self.options)

    def launch(
        self, kernel: Any, step: Tile, table: BlockTable, *, over: str, tensors: tuple[Tensor | None, ...], strides: tuple[Tensor, ...],
        grads: tuple[Tensor, ...] | None = None, **constants: Any,
    ) -> None:  # fmt: skip
        """Start one program per sub-tile of the table's rows (`over` queries, or over keys with the transposed table)."""
        q, k, work = self.q, self.k, self.work
        B, H, G = q.shape[0], q.shape[1], k.shape[1]
        shared = H // G
        by_query = over == "queries"
        heads, loop_shared = (H, 1) if by_query else (G, shared)
        columns = work.kv_tiles if by_query else work.q_tiles
        m, n = launch.sub_tile(work.q_tiles.block, step.m), launch.sub_tile(work.kv_tiles.block, step.n)
        m_subs, n_subs = work.q_tiles.block // m, work.kv_tiles.block // n
        per_batch, per_head = table.batch > 1, table.heads > 1
        on_device = launch.device_table(table, columns, q.device, shared=loop_shared)
        tiles = table.q_tiles
        rows = tiles * table.batch * (heads if per_head else 1)
        head_bytes = (
            table.batch * (k.shape[2] * (self.d + self.e) if by_query else q.shape[2] * (self.d + self.e) * shared) * q.element_size()
        )
        group = 1 if per_head else launch.head_group(heads, shared if by_query else 1, head_bytes, self.config.l2_bytes)
        programs = rows * (1 if per_batch else B) * (1 if per_head else heads) * (m_subs if by_query else n_subs)
        streamed = (1, 2) if by_query else (0, 3)
        described = (
            launch.described([t for t in (tensors[i] for i in streamed) if t is not None], n if by_query else m)
            if step.tma and columns.row is None
            else None
        )
        arguments: list[Any] = list(tensors)
        if described:
            arguments[streamed[0]], arguments[streamed[1]] = described
        c = self.captured
        counts = (rows, tiles, H, shared, group) if by_query else (rows, tiles, H, G, shared, group)
        with _on(q.device):
            kernel[(programs,)](
                *arguments, *(t.stride() for t in strides), *on_device,
                launch.side(work.q_tiles, q.device), launch.side(work.kv_tiles, q.device),
                c.mask, c.mask_sizes, c.score, c.score_sizes, *(() if grads is None else (grads,)),
                *counts, q.shape[2], k.shape[2], float(work.scale),
                MASK=launch.function(work.mask, self.options), SCORE=launch.function(work.score, self.options), **constants,
                PER_BATCH=per_batch, PER_HEAD=per_head, M=m, N=n, M_SUBS=m_subs, N_SUBS=n_subs,
                D=self.d, DP=launch.padded(self.d), E=self.e, EP=launch.padded(self.e), PRECISION=self.precision, TMA=described is not None,
                num_warps=step.warps, num_stages=step.stages,
            )  # fmt: skip


def _prefill_unvisited(work: Work, result: State, state: State | None) -> None:
    """Rows of the tensor that no tile holds keep the previous state (tilings by arrays only)."""
    if work.q_tiles.row is None:
        return
    if state is None:
        result.out.zero_()
        result.lse.fill_(float("-inf"))
    else:
        result.out.copy_(state.out)
        result.lse.copy_(state.lse)
    if result.peak is not None:
        if state is not None and state.peak is not None:
            result.peak.copy_(state.peak)
        else:
            result.peak.fill_(float("-inf"))


def _capability(device: torch.device) -> tuple[int, int]:
    return (8, 0) if interpreted() else torch.cuda.get_device_capability(device)


def _on(device: torch.device) -> Any:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else quiet()
