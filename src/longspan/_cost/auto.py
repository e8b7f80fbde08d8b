"""`auto`: layout, strategy and stages by the cost model.

Every layout that the balancer proposes is combined with every strategy that the mesh and the heads allow. All combinations are estimated
from owners of units; the few best are then planned and timed exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longspan._balance import search as balance
from longspan._balance.demand import Demand
from longspan._comm.mesh import Mesh
from longspan._cost.estimate import OwnerEstimate
from longspan._cost.options import BALANCED, Considered, ExactTiming, Option, pass_seconds
from longspan._cost.pair_counts import balance_of
from longspan._cost.predict import TIE, fastest
from longspan._cost.rates import Cluster, Shape
from longspan._cost.timeline import Conditions
from longspan._cost.workload import Placement
from longspan._plan.named_layouts import unit_for
from longspan._plan.strategies import Strategy, one_axis_strategy, two_axis_strategy, ulysses_axis, ulysses_error

TIMED_WITHIN = 1.10  # options with an estimate within this factor of the best are planned and timed exactly,
EXACT = (2, 4)  # at most this many of them: (of large problems, of small ones)
SMALL = 1 << 12  # ranks times units of a small problem
STAGES = (None, 1, 2, 4, 8)  # numbers of stages of strategy "exchange" to estimate

TimeExactly = Callable[[Option], ExactTiming]


@dataclass(frozen=True, kw_only=True, eq=False)
class SearchSpace:
    """The choices that `auto` has, and the masks, sizes and devices to choose for.

    Attributes:
        demands: From a unit's tokens to the demand of each mask.
        pairs_by_member: From (unit, degree) to the pairs of each unit in the heads of each member of a Ulysses group [degree, T], summed
            over masks.
        length: Tokens of the sequence.
        mesh, shape, cluster: Ranks, sizes of the calls and devices.
        conditions: Slow ranks and slow links.
        strategy, layout: A name, or "auto" for any.
        stages: Only options with this many stages; None for any.
        overlap: Only options that do (True) or do not (False) overlap local computation with the first all-to-all; None for either.
    """

    demands: Callable[[int], Sequence[Demand]]
    pairs_by_member: Callable[[int, int], Tensor]
    length: int
    mesh: Mesh
    shape: Shape
    cluster: Cluster
    conditions: Conditions = field(default_factory=Conditions)
    strategy: str = "auto"
    layout: str = "auto"
    stages: int | None = None
    overlap: bool | None = None

    def degree(self, strategy: Strategy) -> int:
        """Number of ranks that share the heads."""
        return 1 if strategy.head_axis is None else self.mesh.axes[strategy.head_axis].size

    def ranks(self, strategy: Strategy) -> int:
        """Number of ranks along the KV axis."""
        return 1 if strategy.kv_axis is None else self.mesh.axes[strategy.kv_axis].size

    def not_possible(self, strategy: Strategy) -> str | None:
        """Why a strategy is not possible here, or None."""
        reason = ulysses_error(self.degree(strategy), self.shape.heads, self.shape.kv_heads)
        stages = strategy.stages(self.ranks(strategy))
        if reason is None and self.stages is not None and stages is not None and stages != self.stages:
            return f"{stages} stages, where {self.stages} are asked for"
        return reason


def consider(space: SearchSpace, time_exactly: TimeExactly | None = None) -> Considered:
    """Every option of a search space, estimated, the best first. The best are timed by `time_exactly`, if given."""
    options: list[Option] = []
    not_possible: list[tuple[str, str]] = []
    layouts = _Layouts(space)
    for strategy in strategies(space.mesh, space.strategy):
        reason = space.not_possible(strategy)
        if reason is not None:
            not_possible.append((strategy.name, reason))
            continue
        options += _strategy_options(space, strategy, layouts)
    limit = EXACT[layouts.largest <= SMALL]
    ordered = _ordered(_distinct(options), time_exactly, limit)
    return Considered(options=tuple(ordered), not_possible=tuple(not_possible), cluster=space.cluster, conditions=space.conditions)


def strategies(mesh: Mesh, name: str) -> list[Strategy]:
    """The strategies of a name on a mesh, the preferred first; all of them for "auto"."""
    if len(mesh.axes) == 1:
        every = [one_axis_strategy(moves) for moves in ("exchange", "ring", "allgather")]
        every.append(Strategy(name="ulysses", head_axis=0, kv_axis=None, moves="none"))
    else:
        first = ulysses_axis(mesh)
        named = {"ulysses", "ring"} & {axis.name for axis in mesh.axes}
        axes = (first,) if named else (first, 1 - first)
        every = [two_axis_strategy(moves, axis) for axis in axes for moves in ("exchange", "ring", "allgather")]
    return every if name == "auto" else [s for s in every if s.name == name][:1]


class _LaidOut:
    """A candidate layout, and the estimate of each mask under it."""

    def __init__(self, candidate: balance.Candidate, demands: Sequence[Demand], ranks: int) -> None:
        self.candidate, self.ranks = candidate, ranks
        self.estimates = [OwnerEstimate(demand, candidate.owner, ranks) for demand in demands]
        self.tokens = sum(demand.length for demand in demands)


class _Layouts:
    """Candidate layouts by number of ranks, each searched for once."""

    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        self._laid_out: dict[int, list[_LaidOut]] = {}
        self._demands: dict[int, Sequence[Demand]] = {}

    def over(self, ranks: int) -> list[_LaidOut]:
        """Candidates over `ranks` ranks, the balancer's preferred one first."""
        if ranks not in self._laid_out:
            unit = unit_for(self.space.length, ranks)
            if unit not in self._demands:
                self._demands[unit] = self.space.demands(unit)
            demands = self._demands[unit]
            self._laid_out[ranks] = [_LaidOut(c, demands, ranks) for c in self._candidates(demands, ranks)]
        return self._laid_out[ranks]

    def _candidates(self, demands: Sequence[Demand], ranks: int) -> list[balance.Candidate]:
        candidates = balance.candidates(demands, ranks)
        if self.space.layout != "auto":
            return [c for c in candidates if c.name == self.space.layout]
        if ranks == 1:
            return candidates[:1]
        preferred = balance.preferred(candidates)
        return [preferred, *(c for c in candidates if c is not preferred)]

    @property
    def largest(self) -> int:
        """Ranks times units of the largest problem."""
        return max((one.ranks * one.candidate.owner.numel() for laid_out in self._laid_out.values() for one in laid_out), default=0)


def _strategy_options(space: SearchSpace, strategy: Strategy, layouts: _Layouts) -> list[Option]:
    """The estimated options of one strategy."""
    ranks, degree = space.ranks(strategy), space.degree(strategy)
    pairs = space.pairs_by_member(unit_for(space.length, ranks), degree)
    always, with_best = _stage_counts(strategy, space.stages)
    laid_out = layouts.over(ranks)
    options = []
    for i, one in enumerate(laid_out):
        if i and space.strategy == "auto" and (strategy.moves == "allgather" or one.candidate.evaluation.imbalance > 2 * BALANCED):
            continue  # never faster than an option that is estimated
        # Numbers of stages are compared under the preferred layout; other layouts are compared with it at the first number.
        options += [_estimate(space, strategy, one, pairs, stages) for stages in (always if not i else always[:1])]
    if with_best:
        best = _ordered(options, None)[0]
        one = next(x for x in laid_out if x.candidate is best.candidate)
        options += [_estimate(space, strategy, one, pairs, stages) for stages in with_best]
    return options


def _stage_counts(strategy: Strategy, stages: int | None) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    """Numbers of stages to estimate: (under every layout, then under the best layout of these)."""
    if strategy.moves != "exchange":
        return (None,), ()
    return (STAGES[:2], STAGES[2:]) if stages is None else ((stages,), ())


def _estimate(space: SearchSpace, strategy: Strategy, laid_out: _LaidOut, pairs: Tensor, stages: int | None) -> Option:
    """One option. `pairs`: pairs of each unit in the heads of each member of a Ulysses group [degree, T]."""
    placement = Placement.of(space.mesh, strategy.head_axis, strategy.kv_axis, space.cluster.gpus_per_node)
    timelines, received, joined = [], 0.0, True
    for estimate in laid_out.estimates:
        work = estimate.workload(moves=strategy.moves, placement=placement, shape=space.shape, stages=stages)
        work, timeline = fastest(work, space.cluster, space.conditions, overlap=space.overlap)
        timelines.append(timeline)
        joined &= work.joined
        received += float(work.received.sum())
    allgather_tokens = laid_out.tokens * (laid_out.ranks - 1)
    candidate = laid_out.candidate
    pairs_by_rank = torch.zeros(len(pairs), laid_out.ranks, dtype=torch.float64).index_add_(1, candidate.owner, pairs)
    forward, backward, computing = pass_seconds(timelines)
    return Option(
        strategy=strategy,
        layout=candidate.name,
        candidate=candidate,
        stages=stages,
        forward=forward,
        backward=backward,
        computing=computing,
        imbalance=balance_of(pairs_by_rank.view(-1)),
        received=received / allgather_tokens if allgather_tokens else 0.0,
        joined=joined,
    )


def _distinct(options: Sequence[Option]) -> list[Option]:
    """Drops options with identical predictions, such as numbers of stages beyond the number of moves."""
    first_of: dict[object, Option] = {}
    for o in options:
        first_of.setdefault((o.strategy, o.layout, o.forward, o.backward), o)
    return list(first_of.values())


def _ordered(options: list[Option], time_exactly: TimeExactly | None, limit: int = 0) -> list[Option]:
    """Options, the best first: balanced ones before others, then by time. Of near ties the first proposed comes first.

    The best options are timed exactly, up to `limit` of them, until no estimate is below the best exact time. An option that proves not
    balanced is discarded, with all options of the same layout. The other estimates are scaled by the mean ratio of exact time to estimate.
    """
    if not options:
        return []
    least = min(o.imbalance for o in options)
    max_imbalance = BALANCED * (least if least > BALANCED else 1.0)
    balanced = [o for o in options if o.imbalance <= max_imbalance]
    others = [o for o in options if o.imbalance > max_imbalance]
    if time_exactly is None:
        return _by_time(balanced) + sorted(others, key=lambda o: o.seconds)
    timed: dict[int, Option] = {}
    ratio, best = 1.0, float("inf")
    unbalanced_layouts = set()
    for i in sorted(range(len(balanced)), key=lambda i: (balanced[i].seconds, i)):
        option = balanced[i]
        if best < float("inf") and (len(timed) >= limit or option.seconds * ratio > TIMED_WITHIN * best):
            break
        layout = (id(option.candidate), option.strategy.head_axis)
        if layout in unbalanced_layouts:
            continue
        timed[i] = option.timed(time_exactly(option))
        if timed[i].imbalance <= max_imbalance:
            best = min(best, timed[i].seconds)
        else:
            unbalanced_layouts.add(layout)
        ratio = sum(t.seconds / balanced[j].seconds for j, t in timed.items()) / len(timed)
    exact = [timed[i] for i in sorted(timed)]
    good = [o for o in exact if o.imbalance <= max_imbalance] or exact
    estimated = [o.scaled(ratio) for i, o in enumerate(balanced) if i not in timed]
    last = [o for o in exact if o not in good] + [o.scaled(ratio) for o in others]
    return _by_time(good) + sorted(estimated, key=lambda o: o.seconds) + sorted(last, key=lambda o: o.seconds)


def _by_time(options: list[Option]) -> list[Option]:
    """Options by time; of those within a tie of the fastest, the first proposed comes first."""
    fastest_seconds = min(o.seconds for o in options)
    lead = next(o for o in options if o.seconds <= TIE * fastest_seconds)
    return [lead, *sorted((o for o in options if o is not lead), key=lambda o: o.seconds)]
