"""The `dense` kernel over a mesh: keys and values gathered whole, then plain tensor algebra. The definition of right, on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from longspan._engine.agreement import enter
from longspan._engine.spec import Spec
from longspan._kernels.dense import dense_attention
from longspan._masks.program import Program
from longspan._plan.plan_data import Plan


def dense_over_mesh(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    score: Program | None,
    score_captured: Sequence[Tensor],
    sink: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, peak) of this rank's queries over all keys. Memory O(S_local · S). Differentiable once, as the gathers are."""
    spec = Spec(mask=None, score=score, kernel="dense")
    call = enter(plan.data, spec, q, k, v, sink, score_captured, scale, peak=False)
    keys, values = plan.unshard(k, 2, side="kv"), plan.unshard(v, 2, side="kv")
    return dense_attention(
        q,
        keys,
        values,
        scale=scale,
        mask=plan.data.mask.program,
        mask_captured=call.captured_mask(q.device),
        score=score,
        score_captured=score_captured,
        sink=sink,
        q_pos=plan.positions,
    )
