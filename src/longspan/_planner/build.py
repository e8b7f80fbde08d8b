"""`plan`: from a mask, lengths and a mesh to a Plan. Local and deterministic; no rank talks to another."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor

from longspan._balance import search as balance
from longspan._comm.mesh import Mesh, MeshLike, as_mesh
from longspan._cost import auto
from longspan._cost.clusters import cluster as cluster_of
from longspan._cost.pair_counts import balance_of, counts
from longspan._cost.rates import Cluster
from longspan._cost.timeline import Timeline, fastest, timeline
from longspan._cost.workload import of_plan
from longspan._masks.algebra import MaskLike, as_mask
from longspan._plan import named_layouts as layouts
from longspan._plan import schedule
from longspan._plan.layout import Layout
from longspan._plan.plan_data import MaskTiling, PlanData, TiledRow, inner_layout, ulysses_groups
from longspan._plan.schedule import Reads, Schedule, check_brings, only_read
from longspan._plan.strategies import LAYOUTS, Strategy, check_name, heads_refusal, strategy_for
from longspan._plan.tile_grid import reads
from longspan._planner.plan import Plan, PlanSet
from longspan._planner.request import Wanted, considered
from longspan._torch_modes import settled


@overload
def plan(
    mask: Mapping[str, MaskLike], seq_len: int | tuple[int, int], mesh: MeshLike, *,
    layout: str | Layout | tuple[Layout, Layout] = "auto", strategy: str | Schedule = "auto", batch: int | None = None,
    heads: int | None = None, kv_heads: int | None = None, head_dim: int | None = None, stages: int | None = None,
    overlap: bool | None = None, grad_reduce_dtype: torch.dtype | None = None, cluster: Cluster | str | None = None,
) -> PlanSet: ...  # fmt: skip
@overload
def plan(
    mask: MaskLike, seq_len: int | tuple[int, int], mesh: MeshLike, *,
    layout: str | Layout | tuple[Layout, Layout] = "auto", strategy: str | Schedule = "auto", batch: int | None = None,
    heads: int | None = None, kv_heads: int | None = None, head_dim: int | None = None, stages: int | None = None,
    overlap: bool | None = None, grad_reduce_dtype: torch.dtype | None = None, cluster: Cluster | str | None = None,
) -> Plan: ...  # fmt: skip
def plan(
    mask: MaskLike | Mapping[str, MaskLike],
    seq_len: int | tuple[int, int],
    mesh: MeshLike,
    *,
    layout: str | Layout | tuple[Layout, Layout] = "auto",
    strategy: str | Schedule = "auto",
    batch: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    stages: int | None = None,
    overlap: bool | None = None,
    grad_reduce_dtype: torch.dtype | None = None,
    cluster: Cluster | str | None = None,
) -> Plan | PlanSet:
    """A plan for attention under `mask` over `seq_len` tokens, split over `mesh`. The same on every rank, without communication.

    mask:      what `longspan.attention` takes; or a dict of several, which get one layout: a set of plans by the same names.
    seq_len:   the whole sequence's length, or (q_len, kv_len) for cross-attention.
    mesh:      a DeviceMesh of one or two axes, a ProcessGroup, a virtual world's mesh, or `longspan.Mesh.abstract(…)` to plan only.
    layout:    "contiguous", "head_tail", "per_document", "round_robin", "auto", a Layout, or a pair of Layouts (queries, keys).
    strategy:  "ring", "allgather", "exchange", "ulysses", "ulysses_ring", "ulysses_exchange", "ulysses_allgather", "auto", or a Schedule.
    batch, heads, kv_heads, head_dim: the sizes of the calls to come; what is given is checked there. Masks that depend on batch or head
               need them, and so does `auto` to weigh Ulysses against an exchange.
    stages:    in how many stages an exchange brings its keys (fewer where fewer tokens move at all); by default as few as keep a stage at
               one shard or 16,384 tokens, or with "auto", where `heads` is known, as many as the cost model finds fastest. With "auto" and
               a number, only what has so many stages is considered; a strategy of another number refuses.
    overlap:   True: local keys are computed while the first exchange travels. False: together with what it brings, in one call of the
               kernel, so that nothing is hidden, but no running result is kept in between. By default what the cost model finds faster
               where there is one exchange (and `heads` is known), else True.
    grad_reduce_dtype: the dtype in which partial gradients of keys and values travel; float32 (float64) unless given.
    cluster:   the profile by which `auto` weighs layouts, strategies and stages: a name such as "h100", a TOML file, a Cluster; h200
               unless given. It does so where it knows `heads`; else keys are exchanged. LONGSPAN_EXPLAIN=1 prints what was considered
               (to stderr). The plan keeps the profile: its reports and pages are for it.
    """
    masks = dict(mask) if isinstance(mask, Mapping) else {"": mask}
    if not masks:
        raise ValueError("plan: expected a mask or a dict of masks, got an empty dict")
    q_len, kv_len = _lengths(seq_len)
    sizes = _sizes(batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    if stages is not None and (isinstance(stages, bool) or not isinstance(stages, int) or stages < 1):
        raise ValueError(f"plan: stages must be 1 or more, got {stages!r}")
    if overlap is not None and not isinstance(overlap, bool):
        raise TypeError(f"plan: overlap must be True, False or None, got {overlap!r}")
    if grad_reduce_dtype is not None and not isinstance(grad_reduce_dtype, torch.dtype):
        raise TypeError(f"plan: grad_reduce_dtype must be a torch.dtype such as torch.bfloat16, got {grad_reduce_dtype!r}")
    if grad_reduce_dtype is not None and not grad_reduce_dtype.is_floating_point:
        raise ValueError(f"plan: grad_reduce_dtype must be a floating-point dtype, got {grad_reduce_dtype}")
    found = as_mesh(mesh)
    with settled():
        wanted = [Wanted.of(as_mask(m), q_len, kv_len, sizes) for m in masks.values()]
        given = None if cluster is None else cluster_of(cluster)
        maker = _Maker(wanted, found, sizes, strategy, layout, stages, overlap, given, grad_reduce_dtype)
        considered = None if maker.considered is None else maker.considered.without_candidates()
        plans = [Plan(data, cluster=given, considered=considered) for data in maker.plans()]
    if os.environ.get("LONGSPAN_EXPLAIN") == "1" and found.rank == 0:
        print(plans[0]._explanation(), file=sys.stderr)
    if not isinstance(mask, Mapping):
        return plans[0]
    return PlanSet(dict(zip(masks, plans, strict=True)))


def _lengths(seq_len: Any) -> tuple[int, int]:
    pair = tuple(seq_len) if isinstance(seq_len, tuple | list) else (seq_len, seq_len)
    if len(pair) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in pair):
        raise ValueError(f"plan: seq_len must be an int of 1 or more, or (q_len, kv_len), got {seq_len!r}")
    return pair[0], pair[1]


def _sizes(**sizes: int | None) -> dict[str, int | None]:
    for name, size in sizes.items():
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"plan: {name} must be an int of 1 or more, got {size!r}")
    heads, kv_heads = sizes["heads"], sizes["kv_heads"]
    if kv_heads is not None and heads is not None and heads % kv_heads:
        raise ValueError(f"plan: heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
    return sizes


class _Maker:
    def __init__(
        self,
        wanted: list[Wanted],
        mesh: Mesh,
        sizes: dict[str, int | None],
        strategy: Any,
        layout: Any,
        stages: int | None,
        overlap: bool | None,
        cluster: Cluster | None,
        grad_reduce_dtype: torch.dtype | None,
    ) -> None:
        """`cluster`: the one that was given, if one was."""
        self.overlap, self.grad_reduce_dtype = overlap, grad_reduce_dtype
        self.tried: dict[Any, list[PlanData]] = {}
        self.balances: dict[Any, float] = {}
        self.timelines: dict[int, Timeline] = {}  # of plans just made
        self.wanted, self.mesh, self.sizes, self.stages, self.given = wanted, mesh, sizes, stages, cluster
        self.cluster = cluster_of(cluster)
        self.q_len, self.kv_len = wanted[0].q_len, wanted[0].kv_len
        self.schedule = strategy if isinstance(strategy, Schedule) else None
        self.layout = layout
        if self.schedule is None and not isinstance(strategy, str):
            raise TypeError(f"strategy: expected a name or a Schedule, got {type(strategy).__name__}")
        if isinstance(layout, str) and layout not in LAYOUTS:
            raise ValueError(f"layout: expected one of {', '.join(map(repr, LAYOUTS))} or a Layout, got {layout!r}")
        self.laid: Layout | None = None
        self.considered: auto.Considered | None = None
        self.strategy = self._strategy(strategy if self.schedule is None else "exchange")
        self._check_stages()
        if self._weighs(strategy, layout):
            self._weigh(strategy, layout)
        self._check_heads(self.strategy)

    @property
    def ring_size(self) -> int:
        return 1 if self.strategy.ring is None else self.mesh.axes[self.strategy.ring].size

    def _strategy(self, name: str) -> Strategy:
        check_name(name)
        if name == "auto":
            name = "exchange" if len(self.mesh.axes) == 1 else "ulysses_exchange"
        return strategy_for(name, self.mesh)

    def _check_heads(self, strategy: Strategy) -> None:
        heads = self.sizes["heads"]
        if strategy.ulysses is None or heads is None:
            return
        degree, kv_heads = self.mesh.axes[strategy.ulysses].size, self.sizes["kv_heads"] or heads
        reason = heads_refusal(degree, heads, kv_heads)
        if reason:
            raise ValueError(f"strategy {strategy.name!r}: {reason}. Use 'exchange' or 'ring', or a mesh with another Ulysses degree")

    def _check_stages(self) -> None:
        """A number of stages is kept to or refused, never dropped."""
        have = self.strategy.stages(self.ring_size) if self.schedule is None else self.schedule.stages
        if self.stages is None or have is None or have == self.stages:
            return
        if self.schedule is not None:
            raise ValueError(f"plan: the schedule that is given has {have} stages, got stages={self.stages}: leave stages out")
        other = "'exchange'" if len(self.mesh.axes) == 1 else "'ulysses_exchange'"
        raise ValueError(
            f"plan: strategy {self.strategy.name!r} over {self.mesh.size} ranks has {have} stages, expected stages=None or that, "
            f"got stages={self.stages}: leave it out, or use strategy={other}, which takes any number"
        )

    def _weighs(self, strategy: Any, layout: Any) -> bool:
        """Whether there is a choice for the model, and all that it needs to make it."""
        named = isinstance(strategy, str) and isinstance(layout, str)
        per_row = self.wanted[0].batch > 1 and any(w.planned.per_batch for w in self.wanted)
        known = self.sizes["heads"] is not None and self.q_len == self.kv_len and self.mesh.size > 1 and not per_row
        return named and known and (strategy == "auto" or (layout == "auto" and strategy in ("ring", "exchange")))

    def _weigh(self, strategy: str, layout: str) -> None:
        """Choose strategy, layout and stages by the model, and remember what was considered."""
        if strategy == "auto" and layout == "per_document":
            return
        options: dict[str, Any] = {"strategy": strategy, "layout": layout, "stages": self.stages, "overlap": self.overlap}
        found = considered(self.wanted, self.mesh, self.sizes, self.cluster, **options, exactly=self._exactly)
        if found.options:
            best = found.winner
            self.strategy, self.stages, self.considered = best.strategy, best.stages, found
            if best.candidate is not None and layout == "auto":
                self.laid = best.candidate.layout

    def _exactly(self, option: auto.Option) -> tuple[list[Any], float, bool]:
        """The timelines of an option's plans, the busiest rank's pairs of all of them together over the mean, whether all are joined."""
        kept = self.strategy, self.stages, self.laid
        self.strategy, self.stages = option.strategy, option.stages
        self.laid = option.candidate.layout if option.candidate is not None else None
        try:
            plans = self.tried[self._choice] = self.plans()
        finally:
            self.strategy, self.stages, self.laid = kept
        laid = id(option.candidate), option.strategy.ulysses  # stages and the like leave work where it is
        if laid not in self.balances:
            self.balances[laid] = balance_of(
                torch.stack([self._pairs(want, data) for want, data in zip(self.wanted, plans, strict=True)]).sum(0)
            )
        return [self._timeline(data) for data in plans], self.balances[laid], all(data.schedule.joined for data in plans)

    @staticmethod
    def _pairs(want: Wanted, data: PlanData) -> Tensor:
        return counts(data, want.counted_pairs(data.tiles)).pairs

    def _timeline(self, data: PlanData) -> Timeline:
        if id(data) in self.timelines:
            return self.timelines.pop(id(data))
        return timeline(of_plan(data, self.cluster.gpus_per_node), self.cluster)

    # ------------------------------------------------------------------------------------------------------------------- layouts

    def _layouts(self, ranks: int) -> tuple[Layout, Layout]:
        """Layouts of queries and keys over `ranks` ranks of the ring axis."""
        if isinstance(self.layout, Layout | tuple):
            raise AssertionError("layouts that are given cover the whole mesh")
        if self.q_len != self.kv_len:
            return self._cross_layouts(ranks)
        one = self._self_layout(ranks) if self.laid is None else self.laid
        return one, one

    def _self_layout(self, ranks: int) -> Layout:
        name, length = self.layout, self.q_len
        if name == "contiguous":
            return layouts.contiguous(length, ranks)
        if name == "head_tail":
            return layouts.head_tail(length, ranks)
        if name == "per_document":
            for want in self.wanted:
                documents = layouts.documents_of(want.mask)
                if documents:
                    laid = [layouts.per_document(lengths, ranks) for lengths in documents]
                    return laid[0] if len(laid) == 1 else layouts.stack(laid)
            raise ValueError(
                f"layout 'per_document': no mask is made of longspan.documents, got {', '.join(str(w.mask) for w in self.wanted)}"
            )
        batch, per_row = self.wanted[0].batch, any(w.planned.per_batch for w in self.wanted)
        rows: Sequence[int | None] = range(batch) if per_row and batch > 1 else [None]
        unit = layouts.unit_for(length, ranks)
        found = []
        for demands in zip(*(w.demands(unit, rows) for w in self.wanted), strict=True):
            if name == "round_robin":
                together = replace(demands[0], work=torch.stack([d.work for d in demands]).sum(0))
                found.append(layouts.round_robin(together, ranks))
            else:
                found.append(balance.auto(demands, ranks))
        return found[0] if len(found) == 1 else layouts.stack(found)

    def _cross_layouts(self, ranks: int) -> tuple[Layout, Layout]:
        """Queries by their work, keys evenly: who owns a key matters less where queries and keys are different tokens."""
        name = self.layout
        if name == "per_document":
            raise ValueError(
                "layout 'per_document' needs queries and keys to be the same tokens; use 'auto', 'contiguous' or 'round_robin'"
            )
        if name == "head_tail":
            return layouts.head_tail(self.q_len, ranks), layouts.head_tail(self.kv_len, ranks)
        keys = layouts.contiguous(self.kv_len, ranks)
        if name == "contiguous":
            return layouts.contiguous(self.q_len, ranks), keys
        unit = layouts.unit_for(self.q_len, ranks)
        work = torch.zeros(-(-self.q_len // unit), dtype=torch.float64)
        for want in self.wanted:
            work += want.pairs_in(unit).view(-1, len(work)).sum(0)
        none = torch.zeros(0, dtype=torch.int64)
        demand = balance.Demand(
            length=self.q_len, unit=unit, work=work, ptr=torch.zeros(len(work) + 1, dtype=torch.int64), first=none, last=none
        )
        dealt = layouts.round_robin(demand, ranks)
        return (dealt if name == "round_robin" else balance.auto(demand, ranks)), keys

    def _whole_layouts(self) -> tuple[Layout, Layout]:
        """Layouts over all ranks of the mesh."""
        given = self.layout
        if isinstance(given, Layout | tuple):
            pair = (given, given) if isinstance(given, Layout) else given
            if len(pair) != 2 or not all(isinstance(x, Layout) for x in pair):
                raise TypeError("layout: expected a name, a Layout or a pair of Layouts (queries, keys)")
            for side, layout, length in zip(("queries", "keys"), pair, (self.q_len, self.kv_len), strict=True):
                if (layout.length, layout.ranks) != (length, self.mesh.size):
                    raise ValueError(
                        f"layout of {side}: expected {length} tokens over {self.mesh.size} ranks, got {layout.length} over {layout.ranks}"
                    )
                if len(layout.rows) not in (1, self.sizes["batch"] or 1):
                    raise ValueError(f"layout of {side}: {len(layout.rows)} batch rows, but the plan is for batch={self.sizes['batch']}")
            return pair
        if not isinstance(given, str):
            raise TypeError(f"layout: expected a name, a Layout or a pair of Layouts, got {type(given).__name__}")
        inner = self._layouts(self.ring_size)
        if self.strategy.ulysses is None:
            return inner
        groups = ulysses_groups(self.mesh, self.strategy.ulysses).tolist()
        split = layouts.split(inner[0], groups)
        return split, split if inner[1] is inner[0] else layouts.split(inner[1], groups)

    # ------------------------------------------------------------------------------------------------------------------- plans

    @property
    def _choice(self) -> Any:
        return self.strategy, self.stages, id(self.laid)

    def plans(self) -> list[PlanData]:
        ready = self.tried.pop(self._choice, None)
        if ready is not None:
            return ready
        pair = self._whole_layouts()
        out = []
        inner = inner_layout(pair[0], self.mesh, self.strategy.ulysses)
        both = (inner, inner if pair[1] is pair[0] else inner_layout(pair[1], self.mesh, self.strategy.ulysses))
        for want in self.wanted:
            tiling = MaskTiling(mask=want.planned, layouts=both, batch=self.sizes["batch"] or 1, heads=self.sizes["heads"] or 1)
            tiles = want.tiles(tiling)
            moves, returns = self._schedules(tiles)
            data = PlanData(
                mask=want.planned,
                q_len=self.q_len,
                kv_len=self.kv_len,
                mesh=self.mesh,
                layouts=pair,
                tiling=tiling,
                tiles=tiles,
                schedule=moves,
                returns=returns,
                ulysses=self.strategy.ulysses,
                ring=self.strategy.ring,
                layout=self.layout if isinstance(self.layout, str) else "given",
                strategy=self.strategy.name if self.schedule is None else self.schedule.name,
                batch=self.sizes["batch"],
                heads=self.sizes["heads"],
                kv_heads=self.sizes["kv_heads"],
                head_dim=self.sizes["head_dim"],
                grad_reduce_dtype=self.grad_reduce_dtype,
            )
            out.append(self._overlapped(data))
        return out

    def _overlapped(self, data: PlanData) -> PlanData:
        """The plan with local KV computed before the first KV that arrives, or together with it: what was asked for, or what is faster."""
        if not data.schedule.steps or (self.overlap is None and self.schedule is not None):
            return data
        if self.overlap is not None:
            return data.with_joined(not self.overlap)
        if len(data.schedule.steps) > 1 or self.sizes["heads"] is None:
            return data
        work, line = fastest(of_plan(data, self.cluster.gpus_per_node), self.cluster)
        data = data.with_joined(work.joined)
        self.timelines[id(data)] = line
        return data

    def _schedules(self, tiles: Sequence[TiledRow]) -> tuple[Schedule, Schedule]:
        """The moves of forward and of backward."""
        if self.strategy.ring is None or self.ring_size == 1:
            nothing = schedule.none([])
            return nothing, nothing
        needs = [Reads(keys=row.kv, wanted=reads(row.table, row.queries, self.ring_size)) for row in tiles]
        moves = self._schedule(needs)
        return moves, moves if moves.read or not moves.stages else only_read(moves, needs)

    def _schedule(self, rows: list[Reads]) -> Schedule:
        if self.schedule is not None:
            check_brings(self.schedule, rows)
            return self.schedule
        local = -(-self.kv_len // self.ring_size) * len(rows)
        if self.strategy.moves == "ring":
            return schedule.ring(rows, step_tokens=schedule.STAGE_TOKENS)
        if self.strategy.moves == "allgather":
            return schedule.allgather(rows)
        return schedule.exchange(rows, stage_tokens=max(local, schedule.STAGE_TOKENS), stages=self.stages)
