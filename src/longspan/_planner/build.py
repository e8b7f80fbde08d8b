"""From a request to the contents of plans. Local and deterministic: no rank talks to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from longspan._cost.auto import consider
from longspan._cost.options import Considered, ExactTiming, Option
from longspan._cost.pair_counts import balance_of, counts
from longspan._cost.plan_workload import of_plan
from longspan._cost.predict import fastest, timeline
from longspan._cost.timeline import Timeline
from longspan._plan import kv_moves
from longspan._plan import schedule as schedules
from longspan._plan.kv_moves import KVReads
from longspan._plan.layout import Layout
from longspan._plan.plan_data import MaskTiling, PlanData, TiledRow, inner_layout
from longspan._plan.schedule import Schedule
from longspan._plan.strategies import Strategy, strategy_for, ulysses_error
from longspan._planner.layouts import RequestLayouts
from longspan._planner.mask_work import MaskWork, search_space
from longspan._planner.request import PlanRequest


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The parts of which a plan is built.

    Attributes:
        strategy: The strategy on the mesh.
        stages: Number of stages; None for the strategy's default.
        layout: Layout over the KV axis, where `auto` has chosen it; None for the request's own.
    """

    strategy: Strategy
    stages: int | None = None
    layout: Layout | None = None


class BuiltPlan(NamedTuple):
    """A plan's contents, and its timeline if the builder needed it."""

    data: PlanData
    timeline: Timeline | None


class PlanBuilder:
    """Builds the plans of one request, one per mask.

    Attributes:
        considered: The options that `auto` compared, set by `plans`; None where it had nothing to choose from.
    """

    def __init__(self, request: PlanRequest) -> None:
        self.request, self.cluster = request, request.profile
        self.works = [MaskWork(mask, request.q_len, request.kv_len, request.sizes) for mask in request.planned]
        self.layouts = RequestLayouts(request, self.works)
        self.considered: Considered | None = None
        self._built: dict[Choice, list[BuiltPlan]] = {}  # options that were timed exactly
        self._imbalance: dict[tuple[Layout | None, int | None], float] = {}

    def plans(self) -> list[PlanData]:
        """The contents of the plans, in the order of the request's masks."""
        choice = self._choose()
        built = self._built.get(choice) or self._build(choice)
        return [plan.data for plan in built]

    # -------------------------------------------------------------------------------------------------------------- the choice

    def _choose(self) -> Choice:
        """The strategy and stages of the request; where it leaves a choice and the cost model can make it, those of the best option."""
        request = self.request
        name = request.strategy if isinstance(request.strategy, str) else "exchange"
        choice = Choice(strategy=strategy_for(name, request.mesh), stages=request.stages)
        self._check_stages(choice.strategy)
        if self._has_choice():
            space = search_space(self.works, request.mesh, request.sizes.shape, self.cluster, request.conditions)
            options = {"strategy": request.strategy, "layout": request.layout, "stages": request.stages, "overlap": request.overlap}
            considered = consider(replace(space, **options), self._time_exactly)  # type: ignore[arg-type]
            if considered.options:
                self.considered, choice = considered, self._choice_of(considered.winner)
        self._check_heads(choice.strategy)
        return choice

    def _has_choice(self) -> bool:
        """Whether there is a choice between options, and the sizes that the cost model needs are known."""
        strategy, layout = self.request.strategy, self.request.layout
        if not isinstance(strategy, str) or not isinstance(layout, str) or (strategy, layout) == ("auto", "per_document"):
            return False
        self_attention = self.request.q_len == self.request.kv_len
        known = self.request.sizes.heads is not None and self_attention and self.request.mesh.size > 1 and not self.request.per_row
        return known and (strategy == "auto" or (layout == "auto" and strategy in ("ring", "exchange")))

    def _choice_of(self, option: Option) -> Choice:
        chosen = option.candidate.layout if option.candidate is not None and self.request.layout == "auto" else None
        return Choice(strategy=option.strategy, stages=option.stages, layout=chosen)

    def _time_exactly(self, option: Option) -> ExactTiming:
        """The plans of an option, built and timed. The winner's plans are taken from here."""
        choice = self._choice_of(option)
        built = self._built[choice] = self._build(choice)
        where = (choice.layout, choice.strategy.head_axis)  # decides who computes which pair; stages do not
        if where not in self._imbalance:
            pairs = [counts(plan.data, work.pairs_in(plan.data.tiles)).pairs for work, plan in zip(self.works, built, strict=True)]
            self._imbalance[where] = balance_of(torch.stack(pairs).sum(0))
        return ExactTiming(
            timelines=[self._timeline(plan) for plan in built],
            imbalance=self._imbalance[where],
            joined=all(plan.data.schedule.joined for plan in built),
        )

    def _timeline(self, plan: BuiltPlan) -> Timeline:
        return plan.timeline or timeline(of_plan(plan.data, self.cluster.gpus_per_node), self.cluster, self.request.conditions)

    def _check_heads(self, strategy: Strategy) -> None:
        heads, kv_heads = self.request.sizes.heads, self.request.sizes.kv_heads
        if strategy.head_axis is None or heads is None:
            return
        reason = ulysses_error(self.request.mesh.axes[strategy.head_axis].size, heads, kv_heads or heads)
        if reason:
            advice = "Use 'exchange' or 'ring' over a mesh of one axis, or a mesh with another Ulysses degree"
            raise ValueError(f"strategy {strategy.name!r}: {reason}. {advice}")

    def _check_stages(self, strategy: Strategy) -> None:
        """Raises ValueError where the strategy or the schedule has another number of stages than was asked for."""
        request = self.request
        custom = request.strategy if isinstance(request.strategy, Schedule) else None
        stages = strategy.stages(self._kv_axis_size(strategy)) if custom is None else custom.stages
        if request.stages is None or stages is None or stages == request.stages:
            return
        if custom is not None:
            raise ValueError(f"plan: the given schedule has {stages} stages, got stages={request.stages}: leave stages out")
        other = "'exchange'" if len(request.mesh.axes) == 1 else "'ulysses_exchange'"
        raise ValueError(
            f"plan: strategy {strategy.name!r} over {request.mesh.size} ranks has {stages} stages, expected stages=None or that, "
            f"got stages={request.stages}: leave it out, or use strategy={other}, which takes any number"
        )

    # -------------------------------------------------------------------------------------------------------------- the plans

    def _kv_axis_size(self, strategy: Strategy) -> int:
        return 1 if strategy.kv_axis is None else self.request.mesh.axes[strategy.kv_axis].size

    def _build(self, choice: Choice) -> list[BuiltPlan]:
        """The plans of a choice, one per mask."""
        request, head_axis = self.request, choice.strategy.head_axis
        layouts = self.layouts.over_mesh(choice.strategy, choice.layout)
        queries = inner_layout(layouts[0], request.mesh, head_axis)
        inner = (queries, queries if layouts[1] is layouts[0] else inner_layout(layouts[1], request.mesh, head_axis))
        return [self._build_one(work, choice, layouts, inner) for work in self.works]

    def _build_one(
        self, work: MaskWork, choice: Choice, layouts: tuple[Layout, Layout], inner: tuple[Layout, Layout]
    ) -> BuiltPlan:  # fmt: skip
        request = self.request
        tiling = MaskTiling(mask=work.mask, layouts=inner, batch=work.batch, heads=work.heads)
        tiles = work.tiles(tiling)
        schedule, backward_schedule = self._schedules(choice, tiles)
        data = PlanData(
            mask=work.mask,
            q_len=request.q_len,
            kv_len=request.kv_len,
            mesh=request.mesh,
            layouts=layouts,
            tiling=tiling,
            tiles=tiles,
            schedule=schedule,
            backward_schedule=backward_schedule,
            head_axis=choice.strategy.head_axis,
            kv_axis=choice.strategy.kv_axis,
            layout=request.layout if isinstance(request.layout, str) else "given",
            strategy=request.strategy.name if isinstance(request.strategy, Schedule) else choice.strategy.name,
            batch=request.sizes.batch,
            heads=request.sizes.heads,
            kv_heads=request.sizes.kv_heads,
            head_dim=request.sizes.head_dim,
            grad_reduce_dtype=request.grad_reduce_dtype,
        )
        return self._overlapped(data)

    def _schedules(self, choice: Choice, tiles: Sequence[TiledRow]) -> tuple[Schedule, Schedule]:
        """The KV moves of the forward and of the backward pass."""
        ranks = self._kv_axis_size(choice.strategy)
        if ranks == 1:
            nothing = kv_moves.no_moves()
            return nothing, nothing
        row_reads = [KVReads.of(row, ranks) for row in tiles]
        forward = self._forward_schedule(choice, row_reads)
        return forward, forward if forward.only_read_kv or not forward.stages else kv_moves.only_read(forward, row_reads)

    def _forward_schedule(self, choice: Choice, row_reads: list[KVReads]) -> Schedule:
        if isinstance(self.request.strategy, Schedule):
            kv_moves.check_brings(self.request.strategy, row_reads)
            return self.request.strategy
        if choice.strategy.moves == "ring":
            return kv_moves.ring(row_reads, step_tokens=schedules.STAGE_TOKENS)
        if choice.strategy.moves == "allgather":
            return kv_moves.allgather(row_reads)
        if choice.strategy.moves == "exchange":
            shard_tokens = -(-self.request.kv_len // self._kv_axis_size(choice.strategy)) * len(row_reads)
            return kv_moves.exchange(row_reads, stage_tokens=max(shard_tokens, schedules.STAGE_TOKENS), stages=choice.stages)
        raise NotImplementedError(
            f"strategy {choice.strategy.name!r}: expected moves 'ring', 'allgather' or 'exchange' between ranks, got "
            f"{choice.strategy.moves!r}: build their schedule in PlanBuilder._forward_schedule"
        )

    def _overlapped(self, data: PlanData) -> BuiltPlan:
        """The plan with local KV computed before the first KV that arrives, or together with it: as requested, or as is faster."""
        overlap = self.request.overlap
        if not data.schedule.steps:
            return BuiltPlan(data, None)
        if overlap is not None:
            return BuiltPlan(data.with_joined(not overlap), None)
        is_custom = isinstance(self.request.strategy, Schedule)
        if is_custom or len(data.schedule.steps) > 1 or self.request.sizes.heads is None:
            return BuiltPlan(data, None)
        work, line = fastest(of_plan(data, self.cluster.gpus_per_node), self.cluster, self.request.conditions)
        return BuiltPlan(data.with_joined(work.joined), line)
