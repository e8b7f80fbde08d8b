"""The operator in plain eager mode: the same forward and backward as the custom operators, without their dispatch.

A custom operator costs some tenths of a millisecond of host time per call, more than the attention of a short sequence takes. Where
nothing asks for an operator (no compiler, no dispatch mode, plain tensors), an autograd function calls the same code directly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longspan._engine import ops
from longspan._engine.checks import refuse_batched_gradients
from longspan._engine.spec import Spec
from longspan._plan.handle import PlanHandle
from longspan._plan.plan_data import PlanData
from longspan._torch_private import modes_are_active


def is_plain(tensors: list[Tensor]) -> bool:
    """Whether tensors and context are such that nobody could tell the operator from the function."""
    return not modes_are_active() and all(type(t) in (Tensor, torch.nn.Parameter) for t in tensors)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    mask: list[Tensor],
    score: list[Tensor],
    plan: PlanData | None,
    spec: Spec,
    scale: float,
    peak: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.attend`, given a plan and a spec instead of their handles."""
    tensors = [q, k, v, *score] if sink is None else [q, k, v, sink, *score]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return _Attend.apply(q, k, v, sink, mask, plan, spec, scale, peak, *score)  # type: ignore[no-untyped-call,no-any-return]
    with torch.no_grad():
        return ops.run_forward(q, k, v, sink, mask, score, plan, spec, scale, peak)[0]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        mask: list[Tensor],
        plan: PlanData | None,
        spec: Spec,
        scale: float,
        peak: bool,
        *score: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        (out, lse, most), ctx.number = ops.run_forward(q, k, v, sink, mask, score, plan, spec, scale, peak)
        # The mask's tensors too: torch then refuses a backward pass after they were written to, instead of one over another mask.
        ctx.save_for_backward(q, k, v, sink, out, lse, *mask, *score)
        ctx.masks, ctx.plan, ctx.spec, ctx.scale = len(mask), plan, spec, scale
        ctx.mark_non_differentiable(most)
        ctx.set_materialize_grads(False)
        return out, lse, most

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _most: Any) -> tuple[Any, ...]:  # type: ignore[override]
        refuse_batched_gradients(grad_out, grad_lse)
        q, k, v, sink, out, lse, *captured = ctx.saved_tensors
        mask, score = captured[: ctx.masks], captured[ctx.masks :]
        needs = [bool(n) for n in ctx.needs_input_grad[9:]]
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        if torch.is_grad_enabled():
            # create_graph=True: the operator's result says, when it is differentiated, why it cannot be.
            plan = None if ctx.plan is None else PlanHandle(ctx.plan).token
            spec = ops.specs.intern(ctx.spec)
            found = ops.attend_backward(grad_out, grad_lse, q, k, v, sink, out, lse, mask, score, needs, plan, spec.handle, ctx.scale)
        else:
            found = ops.run_backward(
                grad_out, grad_lse, q, k, v, sink, out, lse, mask, score, needs, ctx.plan, ctx.spec, ctx.scale, ctx.number
            )
        grads = iter(found)
        dq, dk, dv = next(grads), next(grads), next(grads)
        dsink = None if sink is None else next(grads)
        return dq, dk, dv, dsink, None, None, None, None, None, *(next(grads) if n else None for n in needs)
