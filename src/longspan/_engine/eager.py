"""The operators in plain eager mode: the same forward and backward pass, without torch's operator dispatch.

A custom operator costs tenths of a millisecond of host time per call, more than a short sequence's attention takes. Without a compiler, a
dispatch mode or tensor subclasses, an autograd function calls the same code directly.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from longspan._comm.agreement import raising_on_all_ranks
from longspan._engine import ops
from longspan._engine.checks import reject_batched_gradients
from longspan._engine.compile_ahead import compiling_backward
from longspan._engine.values import BackwardTensors, CallOptions, CallTensors, InputGrads
from longspan._plan.handle import PlanHandle
from longspan._plan.plan_data import PlanData


def attend(inputs: CallTensors, options: CallOptions, plan: PlanData | None) -> ops.Outputs:
    """`ops.attend`, for a plan and a spec instead of their handles."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs.differentiable):
        tensors = inputs.q, inputs.k, inputs.v, inputs.sink, *inputs.score_captured
        return _apply(inputs, options, plan, *tensors)
    with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
        return ops.run_forward(inputs, options, plan)[0]


class _Attend(torch.autograd.Function):
    """Autograd sees q, k, v, the sink and the score program's captured tensors as arguments after the first three."""

    @staticmethod
    def forward(ctx: Any, inputs: CallTensors, options: CallOptions, plan: PlanData | None, *tensors: Tensor | None) -> ops.Outputs:
        q, k, v, sink, *score_captured = tensors
        mask_captured = inputs.mask_captured
        assert q is not None and k is not None and v is not None
        # Not the tensors of `inputs`: autograd hands over its own, and only those may be saved.
        inputs = CallTensors(
            q=q, k=k, v=v, sink=sink, mask_captured=mask_captured, score_captured=[t for t in score_captured if t is not None]
        )
        with nullcontext() if plan is not None else compiling_backward(inputs, options, ctx.needs_input_grad[7:]):
            (out, lse, max_scores), ctx.number = ops.run_forward(inputs, options, plan)
        # The mask's tensors are saved too, so that torch raises if they were modified in place before the backward pass.
        ctx.save_for_backward(q, k, v, sink, out, lse, *mask_captured, *score_captured)
        ctx.mask_count, ctx.plan, ctx.options = len(mask_captured), plan, options
        ctx.mark_non_differentiable(max_scores)
        ctx.set_materialize_grads(False)
        return out, lse, max_scores

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _max_scores: Any) -> tuple[Any, ...]:  # type: ignore[override]
        with raising_on_all_ranks(None if ctx.plan is None else ctx.plan.mesh):  # such as an error for a tensor modified in place
            reject_batched_gradients(grad_out, grad_lse)
            q, k, v, sink, out, lse, *captured = ctx.saved_tensors
        mask_captured, score_captured = captured[: ctx.mask_count], captured[ctx.mask_count :]
        needs = [bool(n) for n in ctx.needs_input_grad[7:]]
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out.resolve_neg()
        grad_lse = None if grad_lse is None else grad_lse.resolve_neg()
        inputs = CallTensors(q=q, k=k, v=v, sink=sink, mask_captured=mask_captured, score_captured=score_captured)
        tensors = BackwardTensors(inputs=inputs, out=out, lse=lse, grad_out=grad_out, grad_lse=grad_lse, needs=needs)
        if torch.is_grad_enabled():  # create_graph=True
            flat = backward_by_operator(tensors, ctx.options, ctx.plan)
        else:
            flat = ops.run_backward(tensors, ctx.options, ctx.plan, forward_number=ctx.number, strided=True)
        grads = InputGrads.of(flat, sink, needs)
        return None, None, None, *grads[:4], *grads.captured


# The same as `_Attend.apply` where no transform of torch.func is active, which callers have checked, and no tensor is left over from one
# (`is_plain`): torch's own wrapper looks for both in Python.
_apply = super(torch.autograd.Function, _Attend).apply


def backward_by_operator(tensors: BackwardTensors, options: CallOptions, plan: PlanData | None) -> list[Tensor]:
    """The operator's gradients, which raise a clear error when they are differentiated."""
    inputs = tensors.inputs
    return ops.attend_backward(
        tensors.grad_out, tensors.grad_lse, inputs.q, inputs.k, inputs.v, inputs.sink, tensors.out, tensors.lse, inputs.mask_captured,
        inputs.score_captured, tensors.needs, None if plan is None else PlanHandle(plan).token, ops.specs.intern(options.spec).handle,
        options.scale,
    )  # fmt: skip
