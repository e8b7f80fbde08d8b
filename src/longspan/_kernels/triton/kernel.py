"""`TritonKernel`: the kernel protocol over the Triton kernels. Shapes and names as in `longspan._kernels.protocol`."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from functools import cache

import torch
from torch import Tensor

from longspan._kernels.gpu import codegen, launch
from longspan._kernels.gpu.interpreter import computable, interpreted, quiet
from longspan._kernels.gpu.lookup_bounds import check_lookups
from longspan._kernels.protocol import Grads, State, Work, like_query
from longspan._kernels.triton.backward import delta_kernel
from longspan._kernels.triton.config import FINE, Config, prefers_fine_tables
from longspan._kernels.triton.passes import Call
from longspan._masks.block_table import BlockTable
from longspan._masks.joint import Joint
from longspan._masks.program import Program, op_name

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TritonKernel:
    """Scores, sums and the running state in float32; probabilities in the values' dtype where they meet the values.

    `config` replaces the built-in choice of tile sizes. Gradients of captured tensors are summed by atomic additions, in an order that may
    differ from run to run; all else is computed in a fixed order. Where `torch.are_deterministic_algorithms_enabled()`, such gradients are
    an error (or a warning, with `warn_only`), but for tensors of which every pair reads an element of its own.
    """

    name = "triton"
    rounds_once = not interpreted()  # the interpreter cuts off where the hardware rounds

    def __init__(self, *, config: Config | None = None) -> None:
        self.config = config
        self._reasons: dict[Hashable, str | None] = {}  # of programs that were asked for before

    def check(self, work: Work, q: Tensor, needs: Sequence[bool] = ()) -> None:
        if not launch.capturing(q.device):  # what captured tensors hold may be read, which a graph that is being captured forbids
            check_lookups(work, q.shape[0], q.shape[1])
        check_order(work, needs, q)

    def joins(self, q: Tensor, v: Tensor, work: Work, *, backward: bool) -> bool:
        return False

    def apart(self, q: Tensor, v: Tensor, work: Work, needs: Sequence[bool]) -> bool:
        return False

    def refuses(self, q: Tensor, k: Tensor, v: Tensor, work: Work) -> str | None:
        if q.dtype not in _DTYPES:
            return f"dtype {q.dtype}: it computes bfloat16, float16 and float32"
        if interpreted():
            if q.is_cuda:
                return "TRITON_INTERPRET=1 is set: the interpreter works on CPU tensors only"
        elif not q.is_cuda:
            return f"tensors on {q.device}: it needs a CUDA device"
        elif capability(q.device) < (8, 0):
            return f"{torch.cuda.get_device_name(q.device)}: it needs compute capability 8.0 (Ampere) or later"
        if max(q.shape[-1], v.shape[-1]) > 256:
            return f"head dims {q.shape[-1]} and {v.shape[-1]}: at most 256 each"
        for block in work.table.block:
            if launch.sub_tile(block, 128) < 16:
                return f"table block {work.table.block}: both sizes must be multiples of 16"
        if work.mask is None and work.score is None:
            return None
        opts = launch.options(work, q.dtype)
        key = (*(None if p is None else p.key for p in (work.mask, work.score)), work.joint is None, opts)
        if key in (reasons := self._reasons):
            return reasons[key]
        if len(reasons) >= 1024:
            self._reasons = reasons = {}  # a new one: another thread may be reading the old
        reasons[key] = reason = codegen.unsupported(work.mask, None, opts) or codegen.unsupported(work.score, work.joint, opts)
        return reason

    def block(self, q: Tensor, v: Tensor, table: BlockTable) -> tuple[int, int]:
        counts = table.counts()
        share = counts.partial / max(1, counts.partial + counts.full)
        dims = {"d": launch.padded(q.shape[-1]), "e": launch.padded(v.shape[-1])}
        fine = prefers_fine_tables(capability=capability(q.device), dtype=q.dtype, partial_share=share, **dims)
        return FINE if fine else table.block

    def forward(self, q: Tensor, k: Tensor, v: Tensor, work: Work, *, state: State | None, final: bool, peak: bool) -> State:
        dtype = q.dtype
        q, k, v = map(computable, (q, k, v))
        old = None if state is None else usable(state, peak=peak)
        # In place, rows that see none of these keys need no program.
        in_place = old is not None and not final
        result = old if in_place else empty_state(q, v.shape[-1], q.dtype if final else torch.float32, peak=peak)
        assert result is not None
        if result.out.numel():
            if not in_place and not launch.facts(work.q_tiles).covers:
                prefill(result, old)
            Call(q, k, v, work, capability=capability(q.device), config=self.config).forward(result, old, busy_only=in_place)
        if final and result.out.dtype != dtype:
            result.out = result.out.to(dtype)
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
        if work.score is not None and work.joint is None:
            raise ValueError(
                f"score_mod {work.score.name!r}: expected work.joint for a backward pass, got None; make it with joint_of(program)"
            )
        check_order(work, needs, q)
        dtype = torch.float32 if wide else q.dtype
        q, k, v, grad_out = map(computable, (q, k, v, grad_out))
        grads = empty_grads(q, k, v, work, needs, wide=wide) if into is None else into
        zero_uncovered(grads, work, into=into is not None)
        lse = lse.contiguous()
        call = Call(q, k, v, work, capability=capability(q.device), config=self.config)
        fuse = delta is None and into is None and launch.facts(work.q_tiles).covers
        if fuse:
            delta = torch.empty_like(lse)
        elif delta is None:
            delta = self.delta(out, grad_out, grad_lse)
        assert delta is not None
        delta, norm = delta.contiguous(), torch.empty_like(lse)
        if grads.q.numel():
            made_of = (computable(out), None if grad_lse is None else grad_lse.float().contiguous()) if fuse else None
            call.queries(grad_out, lse, norm, delta, grads.q, grads.captured, made_of, add=into is not None)
        if grads.k.numel():
            call.keys(grad_out, norm, delta, grads.k, grads.v)
        if into is None and grads.q.dtype != dtype:
            grads.q, grads.k, grads.v = (g.to(dtype) for g in (grads.q, grads.k, grads.v))
        return grads

    def delta(self, out: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
        B, H, Q, E = out.shape
        out, grad_out = computable(out), computable(grad_out)
        delta = out.new_empty((B, H, Q), dtype=torch.float32)
        if delta.numel():
            m = 64
            grad_lse = None if grad_lse is None else grad_lse.float().contiguous()
            with quiet() if interpreted() else torch.cuda.device(out.device):
                delta_kernel[(B * H * -(-Q // m),)](
                    out, grad_out, grad_lse, delta, out.stride(), grad_out.stride(), H, Q, M=m, E=E, EP=launch.padded(E), num_warps=4
                )
        return delta


def usable(state: State, *, peak: bool) -> State:
    """A state as the kernel reads and writes it."""
    top = None
    if peak:
        top = torch.full_like(state.lse, float("-inf")) if state.peak is None else state.peak
    return State(out=state.out, lse=state.lse.contiguous(), peak=None if top is None else top.contiguous())


def empty_state(q: Tensor, dim: int, dtype: torch.dtype, *, peak: bool) -> State:
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    return State(out=empty_out(q, dim, dtype), lse=lse, peak=torch.empty_like(lse) if peak else None)


def empty_out(q: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return torch.empty((*q.shape[:3], dim), dtype=dtype, device=q.device) if q.is_contiguous() else like_query(q, dim, dtype)


def prefill(result: State, old: State | None) -> None:
    """Rows of the tensor that no tile holds keep the previous state."""
    if old is None:
        result.out.zero_()
        result.lse.fill_(float("-inf"))
    else:
        result.out.copy_(old.out)
        result.lse.copy_(old.lse)
    if result.peak is not None:
        if old is not None and old.peak is not None:
            result.peak.copy_(old.peak)
        else:
            result.peak.fill_(float("-inf"))


def empty_grads(q: Tensor, k: Tensor, v: Tensor, work: Work, needs: Sequence[bool], *, wide: bool) -> Grads:
    dq, dk, dv = (torch.empty(x.shape, dtype=torch.float32 if wide else q.dtype, device=q.device) for x in (q, k, v))
    captured = [
        torch.zeros(c.shape, dtype=torch.float32, device=c.device) if n else None for c, n in zip(work.score_captured, needs, strict=True)
    ]
    return Grads(q=dq, k=dk, v=dv, captured=captured)


def zero_uncovered(grads: Grads, work: Work, *, into: bool) -> None:
    """Rows that no tile holds have no gradient."""
    if not into and not launch.facts(work.q_tiles).covers:
        grads.q.zero_()
    if not launch.facts(work.kv_tiles).covers:
        grads.k.zero_()
        grads.v.zero_()


def check_order(work: Work, needs: Sequence[bool], q: Tensor) -> None:
    """Raise (or warn) as torch does, where results must be the same in every run and gradients of captured tensors may not be."""
    if not any(needs) or not torch.are_deterministic_algorithms_enabled() or work.score is None or work.joint is None:
        return
    if all(written_once(work.score, work.joint, i, batch=q.shape[0], heads=q.shape[1]) for i, need in enumerate(needs) if need):
        return
    message = (
        f"score_mod {work.score.name!r}: the kernels 'triton' and 'hopper' sum the gradients of captured tensors by atomic additions, in "
        "an order that may differ from run to run, and torch.use_deterministic_algorithms(True) is set. kernel='cpu' (on any device) and "
        "kernel='dense' sum them in a fixed order; or detach the captured tensors, or set warn_only=True"
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(message)
    warnings.warn(message, stacklevel=2)


def written_once(program: Program, joint: Joint, captured: int, *, batch: int, heads: int) -> bool:
    """Whether no two pairs add to one element of a captured tensor's gradient, because each looks it up at its own b, h, q and kv."""
    reads = [n for n in program.graph.nodes if n.op == "call_function" and program.captured_nodes[captured] in n.all_input_nodes]
    if len(reads) != 1 or joint.reads.count(captured) != 1 or op_name(reads[0]) != "index":
        return False
    b, h, q, kv = program.index_nodes
    own = {q, kv, *([b] if batch > 1 else []), *([h] if heads > 1 else [])}
    return own <= set(reads[0].args[1])  # type: ignore[arg-type]


@cache
def capability(device: torch.device) -> tuple[int, int]:
    return (8, 0) if interpreted() else torch.cuda.get_device_capability(device)
