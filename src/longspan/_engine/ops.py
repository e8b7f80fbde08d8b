"""The operators `longspan::attend` and `longspan::attend_backward`: opaque to compilers, differentiable once.

They take tensors and the handle of a `Spec` (`longspan._engine.spec`). Legend as in `longspan._kernels.protocol`.
No `from __future__ import annotations` in this module: torch reads the operators' schemas from their annotations.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longspan._comm.agreement import raising_on_all_ranks
from longspan._engine import distributed, invariant, one_device
from longspan._engine.call_agreement import begin_call
from longspan._engine.checks import is_plain, reject_batched_gradients
from longspan._engine.invariant_mode import is_invariant
from longspan._engine.spec import SpecRegistry
from longspan._engine.values import BackwardTensors, CallOptions, CallTensors, InputGrads, empty_flat_grads
from longspan._kernels.protocol import like_query, state_dtype
from longspan._plan.handle import live
from longspan._plan.plan_data import PlanData
from longspan._torch_modes import without_user_defaults

NO_TRANSFORMS = (
    "longspan.attention is not supported under torch.vmap, torch.func or forward-mode differentiation; kernel='dense' without a plan "
    "supports them, in O(S²) memory"
)

specs = SpecRegistry()

Outputs = tuple[Tensor, Tensor, Tensor]  # out, lse, max scores (without elements unless asked for)


@without_user_defaults()
def run_forward(inputs: CallTensors, options: CallOptions, plan: PlanData | None) -> tuple[Outputs, int]:
    """The results of `attend`, and `Agreement.number` of the call (0 without a plan), which its backward pass must name."""
    if is_invariant() and not options.spec.invariant:
        raise RuntimeError("longspan.invariant(): this attention was compiled outside of the context; call it uncompiled")
    if plan is None:
        state = (invariant if options.spec.invariant else one_device).forward(inputs, options)
        out, lse, max_scores, number = state.out, state.lse, state.max_scores, 0
    else:
        call = begin_call(plan, options, inputs)
        with call.agreement:
            if options.spec.invariant:
                call.agreement.wait()
                state = invariant.forward_over_mesh(plan, inputs, options)
                out, lse, max_scores = state.out, state.lse, state.max_scores
            else:
                out, lse, max_scores = distributed.forward(call, inputs, max_scores=options.max_scores)
        number = call.agreement.number
    return (out, lse.contiguous(), lse.new_empty(0) if max_scores is None else max_scores.contiguous()), number


@without_user_defaults()
def run_backward(
    tensors: BackwardTensors, options: CallOptions, plan: PlanData | None, *, forward_number: int = 0, strided: bool = False
) -> list[Tensor]:  # fmt: skip
    """The results of `attend_backward`. forward_number: from `run_forward`, 0 if unknown. strided: as for `flat_grads`."""
    inputs = tensors.inputs
    if plan is None:
        grads, grad_sink = (invariant if options.spec.invariant else one_device).backward(tensors, options)
    else:
        call = begin_call(plan, options, inputs, needs=tensors.needs, forward_number=forward_number)
        with call.agreement:
            if options.spec.invariant:
                call.agreement.wait()
                grads, grad_sink = invariant.backward_over_mesh(plan, tensors, options)
            else:
                grads, grad_sink = distributed.backward(call, tensors)
    return tensors.flat_grads(grads, grad_sink, strided=strided)


# The host decides which tiles exist: CUDA graphs of a compiler must leave the operators out.
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
    max_scores: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max scores); the last has no elements unless asked for. plan: the token of a plan, which then holds the mask."""
    inputs = CallTensors(q=q, k=k, v=v, sink=sink, mask_captured=mask_captured, score_captured=score_captured)
    return run_forward(inputs, CallOptions(spec=specs[spec], scale=scale, max_scores=max_scores), plan_of(plan))[0]


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[:-1], dtype=state_dtype(q.dtype))
    max_scores = rest[-1]
    return like_query(q, v.shape[-1], q.dtype), lse, torch.empty_like(lse) if max_scores else lse.new_empty(0)


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
    """Gradients of q, k and v, then of the sink if there is one, then of the captured tensors that need one; all contiguous."""
    inputs = CallTensors(q=q, k=k, v=v, sink=sink, mask_captured=mask_captured, score_captured=score_captured)
    tensors = BackwardTensors(inputs=inputs, out=out, lse=lse, grad_out=grad_out, grad_lse=grad_lse, needs=needs)
    return run_backward(tensors, CallOptions(spec=specs[spec], scale=scale), plan_of(plan))


@attend_backward.register_fake
def _(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *rest: Any) -> list[Tensor]:
    _out, _lse, _mask_captured, score_captured, needs, _plan, _spec, _scale = rest
    return empty_flat_grads(q, k, v, sink, score_captured, needs)


def plan_of(token: Tensor | None) -> PlanData | None:
    """The plan of a token; None without one."""
    if token is None:
        return None
    plan = live.get(int(token))
    if plan is None:
        raise RuntimeError("longspan: the plan of this call was deleted; keep the plan until the backward pass is done")
    return plan


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, sink, mask_captured, score_captured, plan, spec, scale, _max_scores = inputs
    out, lse, _ = output
    ctx.save_for_backward(q, k, v, sink, out, lse, plan, *mask_captured, *score_captured)
    ctx.counts = len(mask_captured), len(score_captured)
    ctx.spec, ctx.scale = spec, scale
    ctx.keep_alive = specs[spec]
    data = plan_of(plan) if type(plan) is Tensor else None  # the token of AOTAutograd's trace has no value
    ctx.mesh = None if data is None else data.mesh
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _grad_max_scores: Tensor | None) -> tuple[Any, ...]:
    with raising_on_all_ranks(ctx.mesh):  # such as an error for a tensor modified in place
        reject_batched_gradients(grad_out, grad_lse)
        q, k, v, sink, out, lse, plan, *captured = ctx.saved_tensors
    mask_captured, score_captured = captured[: ctx.counts[0]], captured[ctx.counts[0] :]
    needs = [bool(n) for n in ctx.needs_input_grad[5]] if score_captured else []
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    given = (grad_out, grad_lse, q, k, v, sink, out, lse, plan, *captured)
    if not torch.is_grad_enabled() and is_plain([t for t in given if t is not None]):
        # The same code without the operator, whose results are contiguous: a copy of the gradient of q would be the peak of a long step.
        inputs = CallTensors(q=q, k=k, v=v, sink=sink, mask_captured=mask_captured, score_captured=score_captured)
        tensors = BackwardTensors(
            inputs=inputs, out=out, lse=lse, grad_out=grad_out.resolve_neg(), grad_lse=None if grad_lse is None else grad_lse.resolve_neg(),
            needs=needs,
        )  # fmt: skip
        flat = run_backward(tensors, CallOptions(spec=ctx.keep_alive, scale=ctx.scale), plan_of(plan), strided=True)
    else:
        flat = attend_backward(grad_out, grad_lse, q, k, v, sink, out, lse, mask_captured, score_captured, needs, plan, ctx.spec, ctx.scale)
    grads = InputGrads.of(flat, sink, needs)
    return *grads[:4], [None] * len(mask_captured), grads.captured, *[None] * 4


def reject_double_backward(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(
        "longspan.attention supports one differentiation, not two (create_graph=True, torch.func.hessian, gradient penalties); "
        "kernel='dense' supports any order"
    )


def reject_vmap(info: Any, in_dims: Any, *args: Any) -> Any:
    raise RuntimeError(NO_TRANSFORMS)


attend.register_autograd(_backward, setup_context=_setup_context)
attend_backward.register_autograd(reject_double_backward, setup_context=lambda ctx, inputs, output: None)
attend.register_vmap(reject_vmap)
attend_backward.register_vmap(reject_vmap)
