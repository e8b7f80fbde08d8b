"""The operator for one device: `attention`, and torch's two signatures for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from longspan._comm.agreement import refuse
from longspan._engine import eager, ops
from longspan._engine.checks import check_captured, check_scale, check_sink, check_tensors, refuse_transforms, tracing_under_transforms
from longspan._engine.dense_distributed import dense_over_mesh
from longspan._engine.table_cache import DeviceCopies
from longspan._engine.values import CallOptions, CallTensors
from longspan._kernels.dense import dense_attention
from longspan._kernels.protocol import state_dtype
from longspan._kernels.registry import check_name
from longspan._masks.algebra import Full, Mask, MaskLike, as_mask
from longspan._masks.trace_cache import traces
from longspan._masks.tracing import Traced
from longspan._plan.handle import PlanHandle
from longspan._torch_modes import without_autocast

_copies = DeviceCopies()


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: MaskLike | None = None, score_mod: Callable[..., Tensor] | None = None,
    scale: float | None = None, sink: Tensor | None = None, return_lse: Literal[False] = False, kernel: str = "auto",
    plan: PlanHandle | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: MaskLike | None = None, score_mod: Callable[..., Tensor] | None = None,
    scale: float | None = None, sink: Tensor | None = None, return_lse: Literal[True], kernel: str = "auto",
    plan: PlanHandle | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: MaskLike | None = None, score_mod: Callable[..., Tensor] | None = None,
    scale: float | None = None, sink: Tensor | None = None, return_lse: bool, kernel: str = "auto",
    plan: PlanHandle | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: MaskLike | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
    plan: PlanHandle | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q [B, H, Q, D] over k [B, G, K, D] and v [B, G, K, E]: out [B, H, Q, E], or (out, lse [B, H, Q]).

    Heads are grouped when G < H (H a multiple of G). Query i stands at position i, key j at position j.

    mask:       a longspan mask, a torch BlockMask or a mask_mod callable; None lets every query see every key.
    score_mod:  fn(score, b, h, q_idx, kv_idx) → score, FlexAttention's contract; may capture tensors, which get gradients.
    scale:      multiplies q·k before score_mod; 1/√D unless given.
    sink:       [H], a learned logit per head that takes its share of every softmax and gives nothing; it is part of lse.
    return_lse: also the log of each softmax's denominator, in natural log and float32 (float64 for float64); differentiable.
    kernel:     "auto", "cpu", "triton", "hopper", "dense", or one of torch's own: "aten" (the best of them), "flash", "efficient", "cudnn".
                A named kernel is used or refused.
    plan:       from `longspan.plan`: q, k, v are this rank's shards of a longer sequence, and all ranks of the plan's mesh make this call.
                The plan holds the mask. Mods see global positions. Gradients of captured tensors and of the sink are this rank's
                share: their sum over ranks is the gradient.

    Scores, sums and running results are held in float32 (float64 for float64). A query that sees nothing gives out 0, lse −inf
    (the sink's logit where there is one) and gradients 0. The output's dims lie in memory in the order of q's.
    """
    out, lse, _ = attend(
        q, k, v, mask=mask, score_mod=score_mod, scale=scale, sink=sink, kernel=kernel, peak=False, plan=plan, lse=return_lse
    )
    return (out, lse) if return_lse else out


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Any,
    score_mod: Callable[..., Tensor] | None,
    scale: float | None,
    sink: Tensor | None,
    kernel: str,
    peak: bool,
    plan: PlanHandle | None = None,
    lse: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, peak) after every check; peak, the rows' largest scores, has no elements unless asked for. `lse`: whether it is handed on.
    Ranks that share heads must agree on that: its gradient travels.
    """
    if plan is not None:
        options: dict[str, Any] = {"scale": scale, "sink": sink, "kernel": kernel, "peak": peak, "lse": lse}
        return _attend_planned(q, k, v, mask=mask, score_mod=score_mod, plan=plan, **options)
    scale = _checked(q, k, v, score_mod, scale, sink, kernel)
    found = _checked_mask(mask, q, k)
    if torch.compiler.is_dynamo_compiling():
        from longspan._engine.compiled import attend_compiled

        return attend_compiled(q, k, v, mask=found, score_mod=score_mod, scale=scale, sink=sink, kernel=kernel, peak=peak)
    if kernel != "dense":
        refuse_transforms()
    wide = state_dtype(q.dtype)
    with tracing_under_transforms():
        mask_traced = None if found is None else found.traced
        score_traced = None if score_mod is None else traces.trace(score_mod, "score", score_dtype=wide)
    return call(q, k, v, mask_traced, score_traced, scale=scale, sink=sink, kernel=kernel, peak=peak)


def _attend_planned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Any,
    score_mod: Callable[..., Tensor] | None,
    scale: float | None,
    sink: Tensor | None,
    kernel: str,
    peak: bool,
    plan: PlanHandle,
    lse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same over a mesh. What one rank finds wrong before the call is entered, all ranks learn."""
    if not isinstance(plan, PlanHandle):
        names = " (a set of plans: take one of them by its mask's name)" if isinstance(plan, Mapping) else ""
        raise TypeError(f"plan: expected what longspan.plan returns, got {type(plan).__name__}{names}")
    lse |= plan.data.degree == 1  # otherwise nothing of it travels
    if torch.compiler.is_dynamo_compiling():
        from longspan._engine.compiled import attend_compiled

        _refuse_mask(mask)
        scale = _checked(q, k, v, score_mod, scale, sink, kernel)
        options: dict[str, Any] = {"scale": scale, "sink": sink, "kernel": kernel, "peak": peak, "lse": lse}
        return attend_compiled(q, k, v, mask=None, score_mod=score_mod, plan=plan.token, **options)
    try:
        refuse_transforms(planned=True)
        _refuse_mask(mask)
        scale = _checked(q, k, v, score_mod, scale, sink, kernel)
        score_traced = None if score_mod is None else traces.trace(score_mod, "score", score_dtype=state_dtype(q.dtype))
    except (ValueError, TypeError, RuntimeError) as error:
        refuse(plan.data.mesh, error)
    return call(q, k, v, None, score_traced, scale=scale, sink=sink, kernel=kernel, peak=peak, plan=plan, lse=lse)


def _checked(q: Tensor, k: Tensor, v: Tensor, score_mod: Any, scale: float | None, sink: Tensor | None, kernel: str) -> float:
    """Every check that needs neither a mask nor a plan; the scale."""
    check_tensors(q, k, v)
    check_sink(sink, q)
    check_name(kernel)
    if score_mod is not None and not callable(score_mod):
        raise TypeError(f"score_mod: expected a callable (score, b, h, q_idx, kv_idx) -> score, got {type(score_mod).__name__}")
    return check_scale(scale, q.shape[-1])


def _refuse_mask(mask: Any) -> None:
    if mask is not None:
        raise ValueError("attention: with plan=… the plan's mask is the mask; leave out mask=, or make a plan for that one")


def call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Traced | None,
    score: Traced | None,
    *,
    scale: float,
    sink: Tensor | None,
    kernel: str,
    peak: bool,
    plan: PlanHandle | None = None,
    lse: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run traced programs on checked tensors."""
    inputs = CallTensors(
        q=q,
        k=k,
        v=v,
        sink=sink,
        mask_captured=[] if mask is None else [_copies.on(t.detach() if t.requires_grad else t, q.device) for t in mask.captured()],
        score_captured=[] if score is None else score.captured(),
    )
    try:
        check_captured(inputs.score_captured, q, "score_mod")
        if kernel != "dense":
            _refuse_forward_mode(inputs.differentiable)
    except (ValueError, RuntimeError) as error:
        if plan is None:
            raise
        refuse(plan.data.mesh, error)
    spec = ops.specs.of(None if mask is None else mask.program, None if score is None else score.program, kernel, lse=lse)
    options = CallOptions(spec=spec, scale=scale, max_scores=peak)
    if kernel == "dense":
        with without_autocast():
            return _dense(inputs, options) if plan is None else dense_over_mesh(inputs, options, plan.data)
    try:
        if eager.is_plain([*inputs.differentiable, *inputs.mask_captured]):
            return eager.attend(inputs, options, None if plan is None else plan.data)
        token = None if plan is None else plan.token
        out, rows, most = ops.attend(
            q, k, v, sink, inputs.mask_captured, inputs.score_captured, token, spec.handle, scale, options.max_scores
        )  # fmt: skip
    except RuntimeError as error:
        if "functorch transforms" in str(error):
            raise RuntimeError(ops.NO_TRANSFORMS) from error
        raise
    return out, rows, most.detach()


def _dense(inputs: CallTensors, options: CallOptions) -> ops.Outputs:
    return dense_attention(
        inputs.q, inputs.k, inputs.v, scale=options.scale, mask=options.spec.mask, mask_captured=inputs.mask_captured,
        score=options.spec.score, score_captured=inputs.score_captured, sink=inputs.sink,
    )  # fmt: skip


def _refuse_forward_mode(tensors: list[Tensor]) -> None:
    """The operator has no rule for tangents; torch would drop them in silence."""
    if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError(ops.NO_TRANSFORMS)


def _checked_mask(mask: Any, q: Tensor, k: Tensor) -> Mask | None:
    if mask is None:
        return None
    found = as_mask(mask)
    found.extent.check(f"mask {found}", q_len=q.shape[2], kv_len=k.shape[2], batch=q.shape[0], heads=q.shape[1])
    return None if isinstance(found, Full) else found
