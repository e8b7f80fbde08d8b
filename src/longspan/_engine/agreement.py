"""The way into a call over a mesh: this rank's tensors must fit the plan, and all ranks must mean the same call.

The first call of its kind with a plan compares digests over the mesh. Ranks that disagree, or of which one refuses its tensors, all get
an error that names the rank and the field; none is left waiting. Later calls compare nothing: a rank that then does something else alone is
found when the group's timeout has passed, by the stage that does not arrive.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan._comm.agreement import agree
from longspan._engine.distributed import Call
from longspan._engine.plan_cache import plan_cache
from longspan._engine.spec import Spec
from longspan._plan.plan_data import PlanData


def enter(
    plan: PlanData,
    spec: Spec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    score_captured: Sequence[Tensor],
    scale: float,
    *,
    peak: bool,
) -> Call:
    """The call, checked here and agreed upon by all ranks."""
    known = (
        q.shape, k.shape, v.shape, q.dtype, q.device.type, spec.handle, scale, sink is None, peak and plan.degree > 1,
        tuple((t.shape, t.dtype) for t in score_captured),
    )  # fmt: skip
    call = Call(data=plan, spec=spec, scale=scale, score_captured=score_captured, heads=q.shape[1], kv_heads=k.shape[1])
    if plan_cache.is_agreed(plan, known):
        return call
    error: Exception | None = None
    try:
        check(plan, q, k, v)
        call.rehearse(q, k, v, sink=sink is not None)
    except (ValueError, TypeError, RuntimeError) as refused:
        error = refused
    fields = {
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
        "scale": repr(scale),
        "score_mod": "none" if spec.score is None else f"{spec.score.name} {spec.score.key[:12]}",
        "captured": ", ".join(f"{t.dtype}{list(t.shape)}" for t in score_captured) or "none",
        "sink": "none" if sink is None else f"{sink.dtype}{list(sink.shape)}",
        "kernel": spec.kernel,
        "returned": " ".join(["out", *["lse"] * spec.lse, *["max_scores"] * peak]) if plan.degree > 1 else "",
    }
    agree(plan.mesh, fields, error, device=q.device if q.is_cuda else "cpu")
    plan_cache.set_agreed(plan, known)
    return call


def refuse(plan: PlanData, error: Exception, device: torch.device | None) -> None:
    """Raise an error that was found before the call was entered; if no call was agreed upon yet, on all ranks."""
    if not plan_cache.any_agreed(plan):
        agree(plan.mesh, {}, error, device=device if device is not None and device.type == "cuda" else "cpu")
    raise error


def check(plan: PlanData, q: Tensor, k: Tensor, v: Tensor) -> None:
    """This rank's tensors against the plan's sizes."""
    rank = plan.mesh.rank
    for name, tensor, layout, whole in (("q", q, plan.layouts[0], plan.q_len), ("k", k, plan.layouts[1], plan.kv_len)):
        want = layout.local_len(rank)
        if tensor.shape[2] != want:
            hint = ": it has the whole sequence's length; shard it with plan.shard(x, 2)" if tensor.shape[2] == whole else ""
            raise ValueError(
                f"{name}: by this plan rank {rank} owns {want} of {whole} tokens, got {tensor.shape[2]} (shape {tuple(tensor.shape)}){hint}"
            )
    for size, got, planned in (
        ("batch", q.shape[0], plan.batch),
        ("heads", q.shape[1], plan.heads),
        ("kv_heads", k.shape[1], plan.kv_heads),
        ("head_dim", q.shape[3], plan.head_dim),
    ):
        if planned is not None and got != planned:
            raise ValueError(f"the plan was made for {size}={planned}, got {size}={got}: make a plan for these tensors")
    if plan.rows > 1 and q.shape[0] != plan.rows:
        raise ValueError(f"the plan lays out {plan.rows} batch rows, got batch={q.shape[0]}: make a plan for this batch")
