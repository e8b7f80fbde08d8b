"""The way into a call over a mesh: this rank's tensors must fit the plan, and all ranks must mean the same call.

Every forward and every backward pass begins with a control message (`longspan._comm.agreement`). A rank that makes another call, or
refuses its own tensors, makes every rank raise an error that names the rank and the field, before any data moves. The message is begun
here and awaited before the first exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longspan._comm.agreement import Agreement, CallDescription, refuse
from longspan._comm.mesh import Mesh
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
    peak: bool = False,
    needs: Sequence[bool] | None = None,
    forward: int = 0,
) -> Call:
    """The call, checked here, its agreement with all ranks under way.

    needs:   of a backward pass, whether each captured tensor needs a gradient; None in a forward pass.
    forward: of a backward pass, the number that the agreement of its forward pass has; 0 if unknown.
    """
    backward = needs is not None
    key = (
        q.shape, k.shape, v.shape, q.dtype, q.device, spec.handle, scale, None if sink is None else (sink.shape, sink.dtype),
        peak and plan.degree > 1, tuple((t.shape, t.dtype) for t in score_captured), None if needs is None else tuple(needs),
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip

    def checked() -> CallDescription:
        call = Call(**parts, agreement=Agreement(Mesh.abstract(1), None))
        check(plan, q, k, v)
        call.rehearse(q, k, v, sink=sink is not None, needs=needs)
        kind = "attention, backward pass" if backward else "attention, forward pass"
        return CallDescription(kind, _fields(plan, spec, (q, k, v, sink), score_captured, scale, peak=peak))

    parts: dict[str, Any] = {
        "data": plan, "spec": spec, "scale": scale, "score_captured": score_captured, "heads": q.shape[1], "kv_heads": k.shape[1],
    }  # fmt: skip
    try:
        description = plan_cache.description(plan, key, checked)
    except (ValueError, TypeError, RuntimeError) as error:
        refuse(plan.mesh, error)
    return Call(**parts, agreement=Agreement(plan.mesh, description, forward=forward if backward else None))


def _fields(
    plan: PlanData,
    spec: Spec,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    score_captured: Sequence[Tensor],
    scale: float,
    *,
    peak: bool,
) -> dict[str, str]:
    """What all ranks must have in common, in words. Captured tensors and sinks may hold other values on each rank."""
    q, k, v, sink = tensors
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
        "scale": repr(scale),
        "score_mod": "none" if spec.score is None else f"{spec.score.name} {spec.score.key[:12]}",
        "captured": ", ".join(f"{t.dtype}{list(t.shape)}" for t in score_captured) or "none",
        "sink": "none" if sink is None else f"{sink.dtype}{list(sink.shape)}",
        "kernel": spec.kernel,
        "returned": " ".join(["out", *["lse"] * spec.lse, *["max_scores"] * peak]) if plan.degree > 1 else "",
    }


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
