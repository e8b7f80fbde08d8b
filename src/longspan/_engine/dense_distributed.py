"""The `dense` kernel over a mesh: the reference that defines right, on every rank."""

from __future__ import annotations

from longspan._engine.call_agreement import begin_call
from longspan._engine.ops import Outputs
from longspan._engine.plan_cache import plan_cache
from longspan._engine.values import CallOptions, CallTensors
from longspan._kernels.dense import Scoring, dense_attention
from longspan._plan.plan_data import PlanData
from longspan._plan.sharding import unshard


def dense_over_mesh(inputs: CallTensors, options: CallOptions, plan: PlanData) -> Outputs:
    """(out, lse, max scores) of this rank's queries over the gathered KV. Memory O(S_local · S). Differentiable once, as unshard is."""
    agreement = begin_call(plan, options, inputs).agreement
    with agreement:
        agreement.wait()
        place = plan_cache.places(plan, 1, inputs.k.device)
        k, v = (unshard(x, 2, plan.layouts[1], plan.mesh, place) for x in (inputs.k, inputs.v))
    scoring = Scoring(
        scale=options.scale,
        mask=plan.mask.program,
        mask_captured=plan_cache.captured(plan, inputs.q.device),
        score=options.spec.score,
        score_captured=inputs.score_captured,
    )
    return dense_attention(inputs.q, k, v, scoring, sink=inputs.sink, q_pos=plan.layouts[0].positions(plan.mesh.rank))
