"""Scale by simulation: predictions for thousands of devices, from a mask and owners of units. Nothing has ranks × ranks entries.

Some ranks are looked at in full: the busiest, the least busy and some between. The prediction for them stands for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan._balance.demand import Demand, pairs_per_row
from longspan._cost.clusters import cluster as cluster_of
from longspan._cost.estimate import OwnerEstimate
from longspan._cost.predict import fastest
from longspan._cost.rates import Cluster, Shape
from longspan._cost.timeline import Conditions, Timeline
from longspan._cost.workload import Placement, Workload
from longspan._masks.algebra import Full, as_mask
from longspan._masks.classify import TableShape, classify
from longspan._plan.named_layouts import contiguous_owner, head_tail_owner, round_robin_owner, unit_for
from longspan._plan.strategies import ulysses_error

MAX_UNITS = 1 << 16  # units of the sequence, unless four per rank are more
SAMPLED_RANKS = 16
KV_MEMORY = 0.5  # share of a device's memory that KV in flight may take
MOVES = ("exchange", "ring", "allgather")


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulated:
    """One way to span `gpus` devices, with its prediction.

    Attributes:
        strategy, layout: Names.
        gpus, tokens: Devices, and tokens of the sequence.
        degree: Devices that share the heads.
        stages: Exchanges of a forward pass.
        imbalance: Work of the busiest rank over the mean, of all ranks.
        work, timeline: Of the sampled ranks.
        flops: Useful operations of forward and backward, all devices together.
    """

    strategy: str
    layout: str
    gpus: int
    tokens: int
    degree: int
    stages: int
    imbalance: float
    work: Workload
    timeline: Timeline
    flops: float

    @property
    def seconds(self) -> float:
        """Predicted seconds of forward and backward."""
        return self.timeline.seconds

    @property
    def computing(self) -> float:
        """Predicted seconds of kernels on the busiest sampled rank."""
        return float((self.timeline.forward.busy + self.timeline.backward.busy).max())

    @property
    def in_flight(self) -> float:
        """Largest number of bytes of KV and its gradients in buffers at once, on one rank."""
        work = self.work
        forward, backward = (w.received.sum(0)[:, 1:] for w in (work, work.with_backward_moves()))
        if not forward.numel():
            return 0.0
        merged = float((work.query_tiles[:, 1] / work.query_tiles[:, 0].clamp(min=1)).max())
        step_tokens = max(float(forward.max()), float(backward.max()) * (1 + work.shape.grad_element / work.shape.element))
        return 2 * step_tokens / max(1.0, merged) * work.kv_token_bytes

    @property
    def flops_per_device(self) -> float:
        """Useful operations per second and device."""
        return self.flops / self.gpus / self.seconds if self.seconds else 0.0

    @property
    def name(self) -> str:
        """The way in words: "ulysses_ring 8 × 512, head_tail"."""
        split = f" {self.degree} × {self.gpus // self.degree}" if 1 < self.degree < self.gpus else ""
        return f"{self.strategy}{split}, {self.layout}"


def demand_for(mask: Any, tokens: int, ranks: int) -> Demand:
    """A mask's demand on a sequence, in units that suit `ranks` ranks."""
    mask = as_mask(mask)
    mask.extent.check(f"mask {mask}", q_len=tokens, kv_len=tokens)
    unit = unit_for(tokens, ranks)
    while -(-tokens // unit) > max(MAX_UNITS, 4 * ranks):
        unit *= 2
    program, captured = (None, ()) if isinstance(mask, Full) else (mask.traced.program, tuple(mask.traced.captured()))
    table = classify(program, captured, TableShape(q_len=tokens, kv_len=tokens, block=(unit, unit)))
    return Demand.of(table, pairs_per_row(table, program, captured))


def simulate(
    mask: Any,
    tokens: int,
    gpus: int,
    *,
    shape: Shape,
    cluster: Cluster | str | None = None,
    conditions: Conditions | None = None,
    layouts: Sequence[str] = ("head_tail", "contiguous", "round_robin"),
    degrees: Sequence[int] | None = None,
) -> list[Simulated]:
    """Every way that the heads and the devices' memory allow, the fastest first.

    Ulysses runs over `degree` devices, inside nodes first; KV moves between the groups.

    Args:
        mask: The mask.
        tokens: Tokens of the sequence.
        gpus: Number of devices.
        shape: Batch, heads and head dim of the call.
        cluster: A profile, by default h200.
        conditions: Slow ranks and links.
        layouts: Names of layouts to try.
        degrees: Ulysses degrees to try; by default 1, powers of two up to a node, and all devices.

    Raises:
        ValueError: There are fewer tokens than devices.
    """
    if tokens < gpus:
        raise ValueError(f"simulate: expected one token or more for each of {gpus} devices, got {tokens}: use fewer devices")
    profile = cluster_of(cluster)
    if degrees is None:
        degrees = [1, *(2**i for i in range(1, 8) if 2**i <= min(profile.gpus_per_node, gpus)), gpus]
    scenario = _Scenario(mask=mask, tokens=tokens, gpus=gpus, shape=shape, cluster=profile, conditions=conditions, layouts=layouts)
    simulated = []
    for degree in sorted(set(degrees)):
        if gpus % degree == 0 and ulysses_error(degree, shape.heads, shape.kv_heads) is None:
            simulated += scenario.with_degree(degree)
    fitting = [s for s in simulated if s.in_flight <= KV_MEMORY * profile.memory]
    return sorted(fitting or simulated, key=lambda s: s.seconds)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Scenario:
    """The problem to simulate; fields as the arguments of `simulate`."""

    mask: Any
    tokens: int
    gpus: int
    shape: Shape
    cluster: Cluster
    conditions: Conditions | None
    layouts: Sequence[str]

    def with_degree(self, degree: int) -> list[Simulated]:
        """Every layout and every way to move KV, with heads shared by `degree` devices."""
        ranks = self.gpus // degree
        demand = demand_for(self.mask, self.tokens, ranks)
        placement = Placement(per_node=self.cluster.gpus_per_node, stride=degree, degree=degree)
        flops = 3.5 * self.shape.flops(float(demand.work.sum()))
        prefix = ["ulysses"] if degree > 1 else []
        simulated = []
        for layout in self.layouts if ranks > 1 else ("contiguous",):
            owner = owner_of(layout, demand, ranks)
            work_by_rank = torch.zeros(ranks, dtype=torch.float64).index_add_(0, owner, demand.work)
            imbalance = float(work_by_rank.max()) * ranks / max(1.0, float(work_by_rank.sum()))
            estimate = OwnerEstimate(demand, owner, ranks, _sampled(work_by_rank, self.conditions, degree))
            for moves in MOVES if ranks > 1 else ("none",):
                work = estimate.workload(moves=moves, placement=placement, shape=self.shape)
                work, timeline = fastest(work, self.cluster, self.conditions)
                simulated.append(
                    Simulated(
                        strategy="_".join([*prefix, *([moves] if moves != "none" else [])]) or "none",
                        layout=layout,
                        gpus=self.gpus,
                        tokens=self.tokens,
                        degree=degree,
                        stages=int(work.exchanges.sum()),
                        imbalance=imbalance,
                        work=work,
                        timeline=timeline,
                        flops=flops,
                    )
                )
        return simulated


def owner_of(layout: str, demand: Demand, ranks: int) -> Tensor:
    """The owner of each unit under a named layout [T]."""
    if layout == "contiguous":
        return contiguous_owner(demand.units, ranks)
    if layout == "head_tail":
        return head_tail_owner(demand.units, ranks)
    if layout == "round_robin":
        return round_robin_owner(demand.work, ranks, short_last=demand.length % demand.unit != 0)
    raise ValueError(f"layout: expected 'contiguous', 'head_tail' or 'round_robin', got {layout!r}")


def _sampled(work: Tensor, conditions: Conditions | None, degree: int) -> Tensor:
    """The ranks to look at: evenly from the busiest to the least busy, the first and the last, and slow ones."""
    ranks = len(work)
    if ranks <= SAMPLED_RANKS:
        return torch.arange(ranks)
    by_work = work.argsort(descending=True, stable=True)
    picked = by_work[torch.linspace(0, ranks - 1, SAMPLED_RANKS - 2).round().long()]
    slow = [r // degree for r in ({**conditions.stragglers, **conditions.slow_links} if conditions else {})]
    ends = torch.tensor([0, ranks - 1, *(r for r in slow if r < ranks)])
    return torch.cat([picked, ends]).unique()


def curve(mask_for: Callable[[int], Any], sizes: Sequence[tuple[int, int]], **options: Any) -> list[Simulated]:
    """The fastest way for each (gpus, tokens): weak scaling where tokens grow with gpus, strong scaling where they stay.

    `mask_for`: from a number of tokens to the mask; `options`: as in `simulate`.
    """
    return [simulate(mask_for(tokens), tokens, gpus, **options)[0] for gpus, tokens in sizes]
