"""The operators `longspan::attend_selected_shards` and its backward pass: keys chosen at run time, over a mesh.

The forward pass also returns the KV moves of its choice as numbers, so that the backward pass exchanges no requests, and activation
checkpointing can keep the results of a call like those of `longspan::attend`. Legend as in `longspan._kernels.protocol`.
No `from __future__ import annotations` in this module: torch reads the operators' schemas from their annotations.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longspan._comm.agreement import raising_on_all_ranks
from longspan._engine import ops, selected_mesh
from longspan._engine.checks import reject_batched_gradients
from longspan._engine.selected_exchange import KVMoves
from longspan._engine.values import BackwardTensors, CallOptions, CallTensors, InputGrads, empty_flat_grads
from longspan._kernels.protocol import like_query, state_dtype
from longspan._masks.selected import Selected
from longspan._plan.handle import PlanHandle
from longspan._plan.plan_data import PlanData

_TAGS = (torch.Tag.cudagraph_unsafe,)


def attend(inputs: CallTensors, options: CallOptions, plan: PlanHandle, selection: Selected) -> tuple[Tensor, Tensor]:
    """(out, lse), differentiable. selection: from `selected_mesh.checked_selection`."""
    out, lse, _ = attend_selected_shards(
        inputs.q, inputs.k, inputs.v, inputs.sink, selection.indices, inputs.score_captured, plan.token, options.spec.handle,
        options.scale, selection.granularity, selection.q_granularity,
    )  # fmt: skip
    return out, lse


def _plan(token: Tensor) -> PlanData:
    plan = ops.plan_of(token)
    assert plan is not None
    return plan


def _selection(q: Tensor, indices: Tensor, granularity: int, q_granularity: int) -> Selected:
    return Selected(indices, granularity, q_granularity, q.shape[1] // indices.shape[1])


@torch.library.custom_op("longspan::attend_selected_shards", mutates_args=(), tags=_TAGS)
def attend_selected_shards(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    indices: Tensor,
    score_captured: Sequence[Tensor],
    plan: Tensor,
    spec: int,
    scale: float,
    granularity: int,
    q_granularity: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, numbers): `KVMoves.numbers` behind the number of the call. plan: the token of a plan."""
    inputs = CallTensors(q=q, k=k, v=v, sink=sink, score_captured=score_captured)
    options = CallOptions(spec=ops.specs[spec], scale=scale)
    selection = _selection(q, indices, granularity, q_granularity)
    out, lse, moves, number = selected_mesh.forward(inputs, options, _plan(plan), selection)
    return out, lse, torch.cat([torch.tensor([number]), moves.numbers()])


@attend_selected_shards.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[:-1], dtype=state_dtype(q.dtype))
    numbers = torch.empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64, device="cpu")
    return like_query(q, v.shape[-1], q.dtype), lse, numbers


@torch.library.custom_op("longspan::attend_selected_shards_backward", mutates_args=(), tags=_TAGS)
def attend_selected_shards_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    numbers: Tensor,
    indices: Tensor,
    score_captured: Sequence[Tensor],
    needs: Sequence[bool],
    plan: Tensor,
    spec: int,
    scale: float,
    granularity: int,
    q_granularity: int,
) -> list[Tensor]:
    """Gradients of q, k and v, then of the sink if there is one, then of the captured tensors that need one; all contiguous."""
    inputs = CallTensors(q=q, k=k, v=v, sink=sink, score_captured=score_captured)
    tensors = BackwardTensors(inputs=inputs, out=out, lse=lse, grad_out=grad_out, grad_lse=grad_lse, needs=needs)
    options = CallOptions(spec=ops.specs[spec], scale=scale)
    selection, moves = _selection(q, indices, granularity, q_granularity), KVMoves.of_numbers(numbers[1:])
    return selected_mesh.backward(tensors, options, _plan(plan), selection, moves, forward_number=int(numbers[0]))


@attend_selected_shards_backward.register_fake
def _(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *rest: Any) -> list[Tensor]:
    _out, _lse, _numbers, _indices, score_captured, needs, *_ = rest
    return empty_flat_grads(q, k, v, sink, score_captured, needs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, sink, indices, score_captured, ctx.plan, ctx.spec, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, sink, *output, indices, *score_captured)
    ctx.keep_alive = ops.specs[ctx.spec]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _grad_numbers: Tensor | None) -> tuple[Any, ...]:
    with raising_on_all_ranks(_plan(ctx.plan).mesh):  # such as an error for a tensor that was modified in place
        reject_batched_gradients(grad_out, grad_lse)
        q, k, v, sink, out, lse, numbers, indices, *score_captured = ctx.saved_tensors
    needs = [bool(n) for n in ctx.needs_input_grad[5]] if score_captured else []
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    flat = attend_selected_shards_backward(
        grad_out, grad_lse, q, k, v, sink, out, lse, numbers, indices, score_captured, needs, ctx.plan, ctx.spec, *ctx.options
    )
    grads = InputGrads.of(flat, sink, needs)
    return *grads[:4], None, grads.captured, *[None] * 5


attend_selected_shards.register_autograd(_backward, setup_context=_setup_context)
attend_selected_shards_backward.register_autograd(ops.reject_double_backward, setup_context=lambda ctx, inputs, output: None)
attend_selected_shards.register_vmap(ops.reject_vmap)
attend_selected_shards_backward.register_vmap(ops.reject_vmap)
