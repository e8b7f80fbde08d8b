"""The operators `longspan::attend` and `longspan::attend_backward`: opaque to compilers, differentiable once.

They take tensors, captured tensors and the handle of a `Spec`; see `longspan._engine.spec`. Legend as in `longspan._kernels.protocol`.
This module does not postpone annotations: torch reads the operators' schemas from them.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from longspan._engine import distributed as sharded
from longspan._engine.agreement import enter
from longspan._engine.checks import refuse_batched_gradients
from longspan._engine.spec import Spec, SpecRegistry
from longspan._engine.table_cache import TableCache
from longspan._kernels.protocol import Kernel, Tiling, Work, like_query, state_dtype
from longspan._kernels.registry import choose
from longspan._masks.block_table import BLOCK_SIZE, BlockTable
from longspan._plan.handle import live
from longspan._plan.plan_data import PlanData
from longspan._torch_modes import without_autocast

NO_TRANSFORMS = "longspan.attention does not run under torch.vmap, torch.func or forward-mode differentiation; with kernel='dense' it does"

specs = SpecRegistry()
_tables = TableCache()
_other_sizes: WeakKeyDictionary[BlockTable, dict[tuple[int, int], BlockTable]] = WeakKeyDictionary()


@lru_cache(maxsize=256)
def plain_tiling(length: int, block: int) -> Tiling:
    """A whole sequence in tiles; one object per size, since kernels keep what they derive from it."""
    return Tiling(length=length, block=block)


def make_work(
    spec: Spec,
    q: Tensor,
    k: Tensor,
    mask_captured: Sequence[Tensor],
    score_captured: Sequence[Tensor],
    scale: float,
    *,
    backward: bool,
    block: tuple[int, int] = (BLOCK_SIZE, BLOCK_SIZE),
) -> Work:
    """The whole attention of q over k as one piece of work."""
    batch, heads, q_len, _ = q.shape
    kv_len = k.shape[2]
    table = _tables.table(spec.mask, mask_captured, q_len, kv_len, block=block, batch=batch, heads=heads)
    return Work(
        table=table,
        q_tiles=plain_tiling(q_len, block[0]),
        kv_tiles=plain_tiling(kv_len, block[1]),
        scale=scale,
        mask=spec.mask,
        mask_captured=[t.to(q.device) for t in mask_captured],
        score=spec.score,
        score_captured=[t.to(q.device) for t in score_captured],
        joint=spec.joint(score_captured) if backward else None,
    )


@without_autocast()
def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    mask_captured: Sequence[Tensor],
    score_captured: Sequence[Tensor],
    plan: PlanData | None,
    spec: Spec,
    scale: float,
    peak: bool,
) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
    """The results of `attend`, and the number on which ranks agreed for this call (0 without a plan): its backward pass names it."""
    if plan is not None:
        call = enter(plan, spec, q, k, v, sink, score_captured, scale, peak=peak)
        out, lse, most = sharded.forward(call, q, k, v, sink, peak=peak)
        return (out, lse.contiguous(), lse.new_empty(0) if most is None else most.contiguous()), call.agreement.number
    staged = sink is not None
    kernel, work = _kernel_and_work(q, k, v, mask_captured, score_captured, spec, scale, backward=False, staged=staged, peak=peak)
    result = kernel.forward(q, k, v, work, state=sharded.sink_state(sink, q, v, peak), final=True, peak=peak)
    return (result.out, result.lse.contiguous(), result.lse.new_empty(0) if result.peak is None else result.peak.contiguous()), 0


@without_autocast()
def run_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    mask_captured: Sequence[Tensor],
    score_captured: Sequence[Tensor],
    needs: Sequence[bool],
    plan: PlanData | None,
    spec: Spec,
    scale: float,
    forward_number: int = 0,
) -> list[Tensor]:
    """The results of `attend_backward`. forward_number: that of `run_forward`, 0 if unknown."""
    if plan is None:
        staged = sink is not None
        kernel, work = _kernel_and_work(q, k, v, mask_captured, score_captured, spec, scale, backward=True, staged=staged)
        delta = None if sink is None else kernel.delta(out, grad_out, grad_lse)
        grads = kernel.backward(q, k, v, out, lse, grad_out, grad_lse, work, needs=needs, wide=False, delta=delta)
        dsink = None if delta is None else sharded.sink_gradient(sink, lse, delta)
    else:
        call = enter(plan, spec, q, k, v, sink, score_captured, scale, needs=needs, forward=forward_number)
        grads, dsink = sharded.backward(call, q, k, v, sink, out, lse, grad_out, grad_lse, needs)
    found = [grads.q, grads.k, grads.v]
    if sink is not None and dsink is not None:
        found.append(dsink.to(sink.dtype))
    for need, grad, tensor in zip(needs, grads.captured, score_captured, strict=False):
        if need and grad is not None:
            found.append(grad.to(tensor.dtype).to(tensor.device))
    return [g.contiguous() for g in found]


# Which tiles exist is decided on the host: a compiler's CUDA graphs leave the operators out.
_TAGS = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("longspan::attend", mutates_args=(), tags=_TAGS)
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    mask_captured: Sequence[Tensor],
    score_captured: Sequence[Tensor],
    plan: Tensor | None,
    spec: int,
    scale: float,
    peak: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, peak): peak has no elements unless asked for. `plan`: the token of a plan; its mask is then the mask."""
    return run_forward(q, k, v, sink, mask_captured, score_captured, planned(plan), specs[spec], scale, peak)[0]


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = q.new_empty(q.shape[:-1], dtype=state_dtype(q.dtype))
    peak = rest[-1]
    return like_query(q, v.shape[-1], q.dtype), rows, torch.empty_like(rows) if peak else rows.new_empty(0)


@torch.library.custom_op("longspan::attend_backward", mutates_args=(), tags=_TAGS)
def attend_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    mask_captured: Sequence[Tensor],
    score_captured: Sequence[Tensor],
    needs: Sequence[bool],
    plan: Tensor | None,
    spec: int,
    scale: float,
) -> list[Tensor]:
    """[dq, dk, dv], then the sink's gradient if there is one, then those of the captured tensors that need it; all contiguous."""
    found = planned(plan)
    return run_backward(grad_out, grad_lse, q, k, v, sink, out, lse, mask_captured, score_captured, needs, found, specs[spec], scale)


@attend_backward.register_fake
def _(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *rest: Any) -> list[Tensor]:
    _out, _lse, _mask_captured, score_captured, needs, _plan, _spec, _scale = rest
    wanted = [q, k, v] + ([sink] if sink is not None else []) + [t for t, need in zip(score_captured, needs, strict=True) if need]
    return [t.new_empty(t.shape) for t in wanted]


def _kernel_and_work(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_captured: Sequence[Tensor],
    score_captured: Sequence[Tensor],
    spec: Spec,
    scale: float,
    *,
    backward: bool,
    staged: bool,
    peak: bool = False,
) -> tuple[Kernel, Work]:
    work = make_work(spec, q, k, mask_captured, score_captured, scale, backward=backward)
    kernel = choose(spec.kernel, q, k, v, work, staged=staged, backward=backward, peak=peak)
    block = kernel.block(q, v, work.table)
    if block == (BLOCK_SIZE, BLOCK_SIZE):
        return kernel, work
    # The captured tensors were looked at for the first table; another tile size for the same table needs no second look.
    other = _other_sizes.setdefault(work.table, {})
    if block not in other:
        other[block] = make_work(spec, q, k, mask_captured, score_captured, scale, backward=backward, block=block).table
    q_tiles, kv_tiles = plain_tiling(q.shape[2], block[0]), plain_tiling(k.shape[2], block[1])
    return kernel, replace(work, table=other[block], q_tiles=q_tiles, kv_tiles=kv_tiles)


def planned(token: Tensor | None) -> PlanData | None:
    """The plan behind a token."""
    if token is None:
        return None
    found = live.get(int(token))
    if found is None:
        raise RuntimeError("longspan: the plan of this call no longer exists; keep it until its backward pass is done")
    return found


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, sink, mask_captured, score_captured, plan, spec, scale, _ = inputs
    out, lse, _ = output
    ctx.save_for_backward(q, k, v, sink, out, lse, plan, *mask_captured, *score_captured)
    ctx.counts = len(mask_captured), len(score_captured)
    ctx.spec, ctx.scale = spec, scale
    ctx.keep_alive = specs[spec]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _grad_peak: Tensor | None) -> tuple[Any, ...]:
    refuse_batched_gradients(grad_out, grad_lse)
    q, k, v, sink, out, lse, plan, *captured = ctx.saved_tensors
    mask_captured, score_captured = captured[: ctx.counts[0]], captured[ctx.counts[0] :]
    needs = [bool(n) for n in ctx.needs_input_grad[5]] if score_captured else []
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    found = iter(
        attend_backward(grad_out, grad_lse, q, k, v, sink, out, lse, mask_captured, score_captured, needs, plan, ctx.spec, ctx.scale)
    )
    dq, dk, dv = next(found), next(found), next(found)
    dsink = None if sink is None else next(found)
    return dq, dk, dv, dsink, [None] * len(mask_captured), [next(found) if n else None for n in needs], None, None, None, None


def _refuse_double_backward(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(
        "longspan.attention can be differentiated once, not twice (create_graph=True, torch.func.hessian, gradient penalties). "
        "kernel='dense' can be differentiated to any order"
    )


def _refuse_vmap(info: Any, in_dims: Any, *args: Any) -> Any:
    raise RuntimeError(NO_TRANSFORMS)


attend.register_autograd(_backward, setup_context=_setup_context)
attend_backward.register_autograd(_refuse_double_backward, setup_context=lambda ctx, inputs, output: None)
attend.register_vmap(_refuse_vmap)
attend_backward.register_vmap(_refuse_vmap)
