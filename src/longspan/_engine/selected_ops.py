"""The operators `longspan::attend_selected` and `longspan::attend_selected_backward`: keys chosen at run time, under torch.compile.

They take the chosen blocks and the handle of a `Spec` whose mask is the rest of the mask. Where a kernel selects keys on the device, a call
makes no host work for a new choice; elsewhere the choice becomes a lookup table. Legend as in `longspan._kernels.protocol`.
No `from __future__ import annotations` in this module: torch reads the operators' schemas from their annotations.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from longspan._engine import ops
from longspan._engine.checks import reject_batched_gradients
from longspan._engine.selected import SelectedCall, SplitMask, selects_keys
from longspan._engine.values import BackwardTensors, CallOptions, CallTensors, InputGrads, empty_flat_grads
from longspan._kernels.protocol import Selection, like_query, state_dtype
from longspan._masks.selected_shard import PairForm, captured_in_order, chosen_bits, pair_program
from longspan._torch_modes import without_user_defaults

_TAGS = (torch.Tag.cudagraph_unsafe,)  # first calls compile kernels, and calls without such a kernel read the choice on the host


@without_user_defaults()
def _selected_call(
    inputs: CallTensors, options: CallOptions, selection: Selection, *, captured_grads: bool
) -> SelectedCall | None:  # fmt: skip
    if not selects_keys(inputs.q, inputs.k, selection.indices, options.spec.kernel):
        return None
    return SelectedCall.of(inputs, options, SplitMask(selection, None, fixed=False), captured_grads=captured_grads)


def _as_lookup(inputs: CallTensors, options: CallOptions, selection: Selection) -> tuple[CallTensors, CallOptions]:
    """The call with the choice as bits [B, choices, rows, blocks / 32] that the mask program reads."""
    spec, indices = options.spec, selection.indices
    form = PairForm(
        granularity=selection.granularity,
        q_granularity=selection.q_granularity,
        heads_per_choice=selection.heads_per_choice,
        per_batch=indices.shape[0] > 1,
        per_choice=indices.shape[1] > 1,
    )
    program, origins = pair_program(spec.mask, form)
    bits = chosen_bits(indices, -(-inputs.k.shape[2] // selection.granularity))
    rows = torch.arange(indices.shape[2], dtype=torch.int32, device=indices.device)
    captured = captured_in_order(origins, inputs.mask_captured, bits, rows, form)
    whole = ops.specs.of(program, spec.score, spec.kernel, lse=spec.lse, invariant=spec.invariant)
    return replace(inputs, mask_captured=captured), replace(options, spec=whole)


@torch.library.custom_op("longspan::attend_selected", mutates_args=(), tags=_TAGS)
def attend_selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    indices: Tensor,
    mask_captured: Sequence[Tensor],
    score_captured: Sequence[Tensor],
    spec: int,
    scale: float,
    granularity: int,
    q_granularity: int,
    heads_per_choice: int,
) -> tuple[Tensor, Tensor]:
    """(out, lse) over the chosen blocks that the rest of the mask allows."""
    inputs = CallTensors(q=q, k=k, v=v, sink=sink, mask_captured=mask_captured, score_captured=score_captured)
    options = CallOptions(spec=ops.specs[spec], scale=scale)
    selection = Selection(indices=indices, granularity=granularity, q_granularity=q_granularity, heads_per_choice=heads_per_choice)
    call = _selected_call(inputs, options, selection, captured_grads=False)
    if call is not None:
        return call.forward(inputs)
    (out, lse, _), _ = ops.run_forward(*_as_lookup(inputs, options, selection), None)
    return out, lse


@attend_selected.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return like_query(q, v.shape[-1], q.dtype), q.new_empty(q.shape[:-1], dtype=state_dtype(q.dtype))


@torch.library.custom_op("longspan::attend_selected_backward", mutates_args=(), tags=_TAGS)
def attend_selected_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    indices: Tensor,
    mask_captured: Sequence[Tensor],
    score_captured: Sequence[Tensor],
    needs: Sequence[bool],
    spec: int,
    scale: float,
    granularity: int,
    q_granularity: int,
    heads_per_choice: int,
) -> list[Tensor]:
    """Gradients of q, k and v, then of the sink if there is one, then of the captured tensors that need one; all contiguous."""
    inputs = CallTensors(q=q, k=k, v=v, sink=sink, mask_captured=mask_captured, score_captured=score_captured)
    options = CallOptions(spec=ops.specs[spec], scale=scale)
    selection = Selection(indices=indices, granularity=granularity, q_granularity=q_granularity, heads_per_choice=heads_per_choice)
    tensors = BackwardTensors(inputs=inputs, out=out, lse=lse, grad_out=grad_out, grad_lse=grad_lse, needs=needs)
    call = _selected_call(inputs, options, selection, captured_grads=any(needs))
    if call is not None:
        return call.backward(tensors)
    inputs, options = _as_lookup(inputs, options, selection)
    return ops.run_backward(replace(tensors, inputs=inputs), options, None)


@attend_selected_backward.register_fake
def _(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *rest: Any) -> list[Tensor]:
    _out, _lse, _indices, _mask_captured, score_captured, needs, *_ = rest
    return empty_flat_grads(q, k, v, sink, score_captured, needs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sink, indices, mask_captured, score_captured, spec, *numbers = inputs
    ctx.save_for_backward(q, k, v, sink, *output, indices, *mask_captured, *score_captured)
    ctx.counts, ctx.spec, ctx.numbers = (len(mask_captured), len(score_captured)), spec, numbers
    ctx.keep_alive = ops.specs[spec]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    reject_batched_gradients(grad_out, grad_lse)
    q, k, v, sink, out, lse, indices, *captured = ctx.saved_tensors
    mask_captured, score_captured = captured[: ctx.counts[0]], captured[ctx.counts[0] :]
    needs = [bool(n) for n in ctx.needs_input_grad[6]] if score_captured else []
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    flat = attend_selected_backward(
        grad_out, grad_lse, q, k, v, sink, out, lse, indices, mask_captured, score_captured, needs, ctx.spec, *ctx.numbers
    )
    grads = InputGrads.of(flat, sink, needs)
    return *grads[:4], None, [None] * len(mask_captured), grads.captured, *[None] * 5


attend_selected.register_autograd(_backward, setup_context=_setup_context)
attend_selected_backward.register_autograd(ops.reject_double_backward, setup_context=lambda ctx, inputs, output: None)
attend_selected.register_vmap(ops.reject_vmap)
attend_selected_backward.register_vmap(ops.reject_vmap)
