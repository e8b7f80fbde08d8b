"""The `dense` kernel over a mesh: keys and values gathered whole, then plain tensor algebra. The definition of right, on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from longspan._engine.agreement import enter
from longspan._engine.plan_cache import plan_cache
from longspan._engine.spec import Spec
from longspan._kernels.dense import dense_attention
from longspan._masks.program import Program
from longspan._plan.handle import PlanHandle
from longspan._plan.sharding import unshard


def dense_over_mesh(
    plan: PlanHandle,
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
    data = plan.data
    call = enter(data, spec, q, k, v, sink, score_captured, scale)
    call.agreement.wait()
    place = plan_cache.places(data, 1, k.device)
    keys, values = (unshard(x, 2, data.layouts[1], data.mesh, place) for x in (k, v))
    return dense_attention(
        q,
        keys,
        values,
        scale=scale,
        mask=data.mask.program,
        mask_captured=call.captured_mask(q.device),
        score=score,
        score_captured=score_captured,
        sink=sink,
        q_pos=data.layouts[0].positions(data.mesh.rank),
    )
