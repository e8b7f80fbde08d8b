"""Scale by simulation: what thousands of devices would take, from a mask and owners alone. No object per pair of ranks exists.

Some ranks are looked at in full: the busiest, the least busy and others in between. What is predicted of them is predicted of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan._balance import search as balance
from longspan._balance.demand import Demand
from longspan._cost.clusters import cluster as cluster_of
from longspan._cost.estimate import OwnerEstimate
from longspan._cost.rates import Cluster, Shape
from longspan._cost.timeline import Conditions, Timeline, fastest
from longspan._cost.workload import Placement, Workload
from longspan._masks.algebra import Full, as_mask
from longspan._masks.classify import classify
from longspan._plan.named_layouts import contiguous_owner, head_tail_owner, round_robin_owner, unit_for
from longspan._plan.strategies import ulysses_error

UNITS = 1 << 16  # units of the sequence at most, but four for each rank
LOOKED_AT = 16  # ranks
ROOM = 0.5  # of a device's memory that keys in flight may take
MOVES = ("exchange", "ring", "allgather")


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulated:
    """One way to span so many devices. Seconds are of forward and backward; `imbalance`: busiest rank over the mean, of all ranks."""

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
        return self.timeline.seconds

    @property
    def computing(self) -> float:
        return float((self.timeline.forward.busy + self.timeline.backward.busy).max())

    @property
    def in_flight(self) -> float:
        """Bytes of keys and of their gradients in buffers at once, at most, on one rank."""
        work, rows = self.work, self.work.rows
        forward, backward = (w.received.sum(0)[:, 1:] for w in (work, work.back()))
        if not forward.numel():
            return 0.0
        merged = float((rows[:, 1] / rows[:, 0].clamp(min=1)).max())
        most = max(float(forward.max()), float(backward.max()) * (1 + work.shape.grad_element / work.shape.element))
        return 2 * most / max(1.0, merged) * work.key_bytes

    @property
    def flops_per_device(self) -> float:
        """Useful operations per second and device."""
        return self.flops / self.gpus / self.seconds if self.seconds else 0.0

    @property
    def name(self) -> str:
        split = f" {self.degree} × {self.gpus // self.degree}" if 1 < self.degree < self.gpus else ""
        return f"{self.strategy}{split}, {self.layout}"


def demand_for(mask: Any, tokens: int, ranks: int) -> Demand:
    """A mask's demand on a sequence in units that suit so many ranks."""
    found = as_mask(mask)
    found.extent.check(f"mask {found}", q_len=tokens, kv_len=tokens)
    unit = unit_for(tokens, ranks)
    while -(-tokens // unit) > max(UNITS, 4 * ranks):
        unit *= 2
    program, captured = (None, ()) if isinstance(found, Full) else (found.traced.program, tuple(found.traced.captured()))
    table = classify(program, captured, tokens, tokens, block=(unit, unit), batch=1, heads=1)
    return Demand.of(table, balance.pairs_per_row(table, program, captured))


def simulate(
    mask: Any,
    tokens: int,
    gpus: int,
    *,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int = 128,
    batch: int = 1,
    cluster: Cluster | str | None = None,
    conditions: Conditions | None = None,
    layouts: Sequence[str] = ("head_tail", "contiguous", "round_robin"),
    degrees: Sequence[int] | None = None,
) -> list[Simulated]:
    """Every way that the heads and the devices' memory allow, the fastest first.

    Ulysses over `degree` devices, inside nodes first; keys move between the rest.

    degrees: Ulysses degrees to look at; by default 1, powers of two up to a node, and all devices.
    """
    found, shape = cluster_of(cluster), Shape(batch=batch, heads=heads, kv_heads=kv_heads or heads, head_dim=head_dim)
    if tokens < gpus:
        raise ValueError(f"simulate: expected a token for each of {gpus} devices or more, got {tokens}")
    wanted = [1, *(2**i for i in range(1, 8) if 2**i <= min(found.gpus_per_node, gpus)), gpus] if degrees is None else degrees
    out = []
    for degree in sorted(set(wanted)):
        if gpus % degree or ulysses_error(degree, shape.heads, shape.kv_heads):
            continue
        out += _with_degree(mask, tokens, gpus, degree, shape, found, conditions, layouts)
    fitting = [s for s in out if s.in_flight <= ROOM * found.memory]
    return sorted(fitting or out, key=lambda s: s.seconds)


def _with_degree(
    mask: Any, tokens: int, gpus: int, degree: int, shape: Shape, cluster: Cluster, conditions: Conditions | None, layouts: Sequence[str]
) -> list[Simulated]:
    ranks = gpus // degree
    demand = demand_for(mask, tokens, ranks)
    placement = Placement(per_node=cluster.gpus_per_node, stride=degree, degree=degree)
    flops = 3.5 * shape.flops(float(demand.work.sum()))
    prefix = "ulysses" if degree > 1 else ""
    out = []
    for layout in layouts if ranks > 1 else ("contiguous",):
        owner = owner_of(layout, demand, ranks)
        work = torch.zeros(ranks, dtype=torch.float64).index_add_(0, owner, demand.work)
        imbalance = float(work.max()) * ranks / max(1.0, float(work.sum()))
        owned = OwnerEstimate(demand, owner, ranks, _chosen(work, conditions, degree))
        for moves in MOVES if ranks > 1 else ("none",):
            found, line = fastest(owned.workload(moves=moves, placement=placement, shape=shape), cluster, conditions)
            name = "_".join(part for part in (prefix, moves if moves != "none" else "") if part) or "none"
            out.append(
                Simulated(
                    strategy=name,
                    layout=layout,
                    gpus=gpus,
                    tokens=tokens,
                    degree=degree,
                    stages=int(found.exchanges.sum()),
                    imbalance=imbalance,
                    work=found,
                    timeline=line,
                    flops=flops,
                )
            )
    return out


def owner_of(layout: str, demand: Demand, ranks: int) -> Tensor:
    """The owner of each unit under a named layout."""
    if layout == "contiguous":
        return contiguous_owner(demand.units, ranks)
    if layout == "head_tail":
        return head_tail_owner(demand.units, ranks)
    if layout == "round_robin":
        return round_robin_owner(demand.work, ranks, short_last=demand.length % demand.unit != 0)
    raise ValueError(f"layout: expected 'contiguous', 'head_tail' or 'round_robin', got {layout!r}")


def _chosen(work: Tensor, conditions: Conditions | None, degree: int) -> Tensor:
    """The ranks to look at: by work, from the busiest to the least busy, and those that are slow."""
    ranks = len(work)
    if ranks <= LOOKED_AT:
        return torch.arange(ranks)
    order = work.argsort(descending=True, stable=True)
    picked = order[torch.linspace(0, ranks - 1, LOOKED_AT - 2).round().long()]
    slow = [r // degree for r in ({**conditions.stragglers, **conditions.slow_links} if conditions else {})]
    ends = torch.tensor([0, ranks - 1, *(r for r in slow if r < ranks)])
    return torch.cat([picked, ends]).unique()


def curve(mask_for: Any, sizes: Sequence[tuple[int, int]], **options: Any) -> list[Simulated]:
    """The fastest way for each (gpus, tokens): weak scaling where tokens grow with gpus, strong where they stay. `mask_for(tokens)`."""
    return [simulate(mask_for(tokens), tokens, gpus, **options)[0] for gpus, tokens in sizes]


def without_timeline(found: Simulated) -> dict[str, Any]:
    """The numbers of a simulation, for tables and JSON."""
    names = ("strategy", "layout", "gpus", "tokens", "degree", "stages", "imbalance", "seconds", "computing", "flops_per_device")
    return {name: getattr(found, name) for name in names}


__all__ = ["Simulated", "curve", "demand_for", "owner_of", "simulate", "without_timeline"]
