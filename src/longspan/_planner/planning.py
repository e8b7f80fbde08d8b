"""`longspan.plan`: from a mask, lengths and a mesh to a plan."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import overload

import torch

from longspan._comm.mesh import MeshLike, context_mesh
from longspan._cost.rates import Cluster
from longspan._cost.timeline import Conditions
from longspan._environment import switch
from longspan._masks.algebra import MaskLike, as_mask
from longspan._plan.handle import mask_sources
from longspan._plan.layout import Layout
from longspan._plan.schedule import Schedule
from longspan._plan.strategies import LayoutName, StrategyName
from longspan._planner.build import PlanBuilder
from longspan._planner.plan import Plan
from longspan._planner.plan_set import PlanSet
from longspan._planner.request import CallSizes, PlanRequest, RequestedOptions
from longspan._torch_modes import default_modes


@overload
def plan(
    mask: Mapping[str, MaskLike], seq_len: int | tuple[int, int], mesh: MeshLike, *,
    layout: LayoutName | Layout | tuple[Layout, Layout] = "auto", strategy: StrategyName | Schedule = "auto",
    batch: int | None = None, heads: int | None = None, kv_heads: int | None = None, head_dim: int | None = None,
    stages: int | None = None, overlap: bool | None = None, grad_reduce_dtype: torch.dtype | None = None,
    cluster: Cluster | str | Path | None = None, conditions: Conditions | None = None,
) -> PlanSet: ...  # fmt: skip
@overload
def plan(
    mask: MaskLike, seq_len: int | tuple[int, int], mesh: MeshLike, *,
    layout: LayoutName | Layout | tuple[Layout, Layout] = "auto", strategy: StrategyName | Schedule = "auto",
    batch: int | None = None, heads: int | None = None, kv_heads: int | None = None, head_dim: int | None = None,
    stages: int | None = None, overlap: bool | None = None, grad_reduce_dtype: torch.dtype | None = None,
    cluster: Cluster | str | Path | None = None, conditions: Conditions | None = None,
) -> Plan: ...  # fmt: skip
def plan(
    mask: MaskLike | Mapping[str, MaskLike],
    seq_len: int | tuple[int, int],
    mesh: MeshLike,
    *,
    layout: LayoutName | Layout | tuple[Layout, Layout] = "auto",
    strategy: StrategyName | Schedule = "auto",
    batch: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    stages: int | None = None,
    overlap: bool | None = None,
    grad_reduce_dtype: torch.dtype | None = None,
    cluster: Cluster | str | Path | None = None,
    conditions: Conditions | None = None,
) -> Plan | PlanSet:
    """Plan attention under `mask` over `seq_len` tokens that are split over `mesh`.

    Every rank that makes the same call gets the same plan. No rank communicates.

    Args:
        mask: A mask as `longspan.attention` takes it, or a mapping of names to masks. Several masks share one layout.
        seq_len: Length of the whole sequence, or (q_len, kv_len) for cross-attention.
        mesh: A DeviceMesh of one or two axes, a ProcessGroup, a virtual world's mesh, or `longspan.Mesh.abstract(…)` to plan only. All
            its ranks share the sequence. Or a DeviceMesh of any number of axes, "cp" beside "dp", "dp_replicate", "dp_shard" or "tp":
            the ranks along "cp" share it.
        layout: Who owns which tokens: "contiguous", "head_tail", "per_document", "round_robin", "auto", a `Layout`, or a pair of layouts
            (queries, keys).
        strategy: How KV moves: "ring", "allgather", "exchange", "ulysses", "ulysses_ring", "ulysses_exchange", "ulysses_allgather",
            "auto", or a `Schedule`. "auto" without `heads` is "exchange".
        batch: Batch size of the calls to come, checked there. Needed for masks that depend on the batch row.
        heads: Number of query heads, checked at each call. Needed for masks that depend on the head, and by "auto" to compare options by
            the cost model.
        kv_heads: Number of KV heads, checked at each call; as many as query heads by default.
        head_dim: Head dim of queries and keys, checked at each call.
        stages: Number of stages of strategy "exchange". By default as few as keep a stage at one shard or 16,384 tokens; with "auto" and
            `heads`, the number that the cost model predicts to be fastest.
        overlap: Whether local KV is computed while the first all-to-all is in flight (True), or together with its KV in one kernel call
            (False). False hides no communication but keeps no running result. By default the faster one by the cost model, where there
            is one all-to-all and `heads` is given; otherwise True.
        grad_reduce_dtype: The dtype in which partial gradients of K and V are sent; float32 (float64 for float64 inputs) by default.
        cluster: The profile for the cost model: a name such as "h100", a TOML file, or a `Cluster`; "h200" by default. The plan's
            reports use it too.
        conditions: Slow ranks and slow links for the cost model, as `Plan.report` takes them; none by default. The plan's reports assume
            them too.

    Returns:
        A `Plan`, or a `PlanSet` with the names of the masks if `mask` is a mapping. With LONGSPAN_EXPLAIN=1 in the environment, rank 0
        prints the options that "auto" considered to stderr.

    Raises:
        ValueError: A name, a size or a combination is not supported; the message lists what is.
        TypeError: An argument has the wrong type.

    Example:
        >>> import longspan as ls
        >>> mesh = ls.Mesh.abstract(4)  # a DeviceMesh in a real run
        >>> plan = ls.plan(ls.causal(), 4096, mesh, layout="head_tail", strategy="ring")
        >>> plan.local_len
        1024
        >>> plans = ls.plan({"full": ls.causal(), "sliding": ls.causal() & ls.sliding_window(512)}, 4096, mesh)
        >>> sorted(plans)
        ['full', 'sliding']
    """
    masks = dict(mask) if isinstance(mask, Mapping) else {"": mask}
    if not masks:
        raise ValueError("plan: expected a mask or a dict of masks, got an empty dict")
    sizes = CallSizes(batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    options = RequestedOptions(
        layout=layout, strategy=strategy, stages=stages, overlap=overlap, grad_reduce_dtype=grad_reduce_dtype, cluster=cluster,
        conditions=conditions,
    )  # fmt: skip
    explains = switch("LONGSPAN_EXPLAIN", default=False)
    with default_modes():
        request = PlanRequest.of([as_mask(m) for m in masks.values()], seq_len, context_mesh(mesh), sizes, options)
        builder = PlanBuilder(request)
        data = builder.plans()
        considered = None if builder.considered is None else builder.considered.without_candidates()
        plans = [Plan(one, cluster=request.cluster, conditions=request.conditions, considered=considered) for one in data]
        for made, one_mask in zip(plans, request.masks, strict=True):
            if not one_mask.reads_copies:
                made.mask_sources = mask_sources(one_mask.traced.sources)
    if explains and request.mesh.rank == 0:
        print(plans[0]._explanation(), file=sys.stderr)
    return PlanSet(dict(zip(masks, plans, strict=True))) if isinstance(mask, Mapping) else plans[0]
