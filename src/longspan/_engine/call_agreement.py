"""The entry to a pass over a mesh: this rank's tensors must fit the plan, and all ranks must make the same call.

Every forward and every backward pass begins with a control message (`longspan._comm.agreement`). If a rank makes another call, or its
tensors do not fit the plan, every rank raises an error that names the rank and the field, before any data moves. The message is sent here
and awaited before the first all-to-all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from longspan._comm.agreement import Agreement, CallDescription, raising_on_all_ranks
from longspan._engine.invariant import check_over_mesh
from longspan._engine.pass_setup import PassSetup
from longspan._engine.plan_cache import plan_cache
from longspan._engine.sharded_call import ShardedCall
from longspan._engine.values import CallOptions, CallTensors
from longspan._kernels.registry import torch_settings
from longspan._plan.plan_data import PlanData


def begin_call(
    plan: PlanData, options: CallOptions, inputs: CallTensors, *, needs: Sequence[bool] | None = None, forward_number: int = 0
) -> ShardedCall:
    """The call, checked on this rank, its agreement with all ranks in flight.

    Args:
        needs: Of a backward pass, whether each captured tensor needs a gradient. None in a forward pass.
        forward_number: Of a backward pass, `Agreement.number` of its forward pass; 0 if unknown.
    """
    with raising_on_all_ranks(plan.mesh):
        checked = plan_cache.checked_call(plan, _cache_key(options, inputs, needs), lambda: _check(plan, options, inputs, needs))
    agreement = Agreement(plan.mesh, checked.description, forward=None if needs is None else forward_number)
    return _call(plan, options, inputs, agreement, checked.setup)


class CheckedCall(NamedTuple):
    """One kind of pass, checked on this rank: its description, which all ranks must have in common, and its setup.

    setup: None for the dense kernel and in `longspan.invariant()`.
    """

    description: CallDescription
    setup: PassSetup | None


def _call(
    plan: PlanData, options: CallOptions, inputs: CallTensors, agreement: Agreement, setup: PassSetup | None = None
) -> ShardedCall:  # fmt: skip
    return ShardedCall(
        plan=plan,
        spec=options.spec,
        scale=options.scale,
        score_captured=inputs.score_captured,
        heads=inputs.q.shape[1],
        kv_heads=inputs.k.shape[1],
        device=inputs.q.device,
        agreement=agreement,
        setup=setup,
    )


def _cache_key(options: CallOptions, inputs: CallTensors, needs: Sequence[bool] | None) -> tuple[object, ...]:
    """Everything that `_check` depends on besides the plan."""
    q, k, v, sink = inputs.q, inputs.k, inputs.v, inputs.sink
    return (
        q.shape, k.shape, v.shape, q.dtype, q.device, options.spec.handle, options.scale, options.max_scores,
        None if sink is None else (sink.shape, sink.dtype), tuple((t.shape, t.dtype) for t in inputs.score_captured),
        None if needs is None else tuple(needs), torch_settings(),
    )  # fmt: skip


def _check(plan: PlanData, options: CallOptions, inputs: CallTensors, needs: Sequence[bool] | None) -> CheckedCall:
    """Check the call on this rank, and describe it.

    Captured tensors and sinks may hold other values on each rank.
    """
    check(plan, inputs.q, inputs.k, inputs.v)
    setup = None
    if options.spec.invariant:
        check_over_mesh(plan, inputs, options, needs)
    else:
        setup = _call(plan, options, inputs, Agreement.none()).check(inputs, needs)
    kind = "attention, forward pass" if needs is None else "attention, backward pass"
    return CheckedCall(CallDescription(kind, described_fields(plan, options, inputs)), setup)


def described_fields(plan: PlanData, options: CallOptions, inputs: CallTensors) -> dict[str, str]:
    """The fields of a call that all ranks must have in common."""
    q, k, v, sink, spec = inputs.q, inputs.k, inputs.v, inputs.sink, options.spec
    returned = ["out", *["lse"] * spec.lse, *["max_scores"] * options.max_scores]
    return {
        "plan": plan.digest[:16],
        "mask": plan.mask.text,
        "tokens": f"{plan.q_len} × {plan.kv_len}",
        "layout": " ".join(layout.digest[:12] for layout in plan.layouts),
        "schedule": f"{plan.strategy}, {plan.schedule.stages} stages{' at once' if plan.schedule.joined else ''}",
        "batch": str(q.shape[0]),
        "heads": f"{q.shape[1]}/{k.shape[1]}",
        "head dims": f"{q.shape[-1]}/{v.shape[-1]}",
        "dtype": str(q.dtype),
        "device": q.device.type,
        "scale": repr(options.scale),
        "score_mod": "none" if spec.score is None else f"{spec.score.name} {spec.score.key[:12]}",
        "captured": ", ".join(f"{t.dtype}{list(t.shape)}" for t in inputs.score_captured) or "none",
        "sink": "none" if sink is None else f"{sink.dtype}{list(sink.shape)}",
        "kernel": spec.kernel,
        "invariant": str(spec.invariant),
        "returned": " ".join(returned) if plan.degree > 1 else "",  # elsewhere nothing of it is exchanged
    }  # fmt: skip


def check(plan: PlanData, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless this rank's tensors have the plan's sizes."""
    rank = plan.mesh.rank
    for name, tensor, layout, whole in (("q", q, plan.layouts[0], plan.q_len), ("k", k, plan.layouts[1], plan.kv_len)):
        want = layout.local_len(rank)
        if tensor.shape[2] != want:
            hint = "; this is the whole sequence: shard it with plan.shard(x, 2)" if tensor.shape[2] == whole else ""
            raise ValueError(
                f"{name}: rank {rank} owns {want} of {whole} tokens in this plan, got {tensor.shape[2]} (shape {tuple(tensor.shape)}){hint}"
            )
    for size, got, planned in (
        ("batch", q.shape[0], plan.batch),
        ("heads", q.shape[1], plan.heads),
        ("kv_heads", k.shape[1], plan.kv_heads),
        ("head_dim", q.shape[3], plan.head_dim),
    ):
        if planned is not None and got != planned:
            raise ValueError(f"the plan was made for {size}={planned}, got {size}={got}: make a plan for these tensors")
    if plan.batch_layouts > 1 and q.shape[0] != plan.batch_layouts:
        raise ValueError(f"the plan lays out {plan.batch_layouts} batch rows, got batch={q.shape[0]}: make a plan for this batch")
