"""`auto`: layout, strategy and stages by the cost model, with what was considered and why the winner won.

Every layout that the balancer proposes is combined with every strategy that the mesh and the heads allow. All are estimated from owners of
units alone; the few that come out best are then planned and timed exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from longspan._balance import search as balance
from longspan._balance.demand import Demand
from longspan._comm.mesh import Mesh
from longspan._cost.estimate import Owned
from longspan._cost.pair_counts import balance_of
from longspan._cost.rates import Cluster, Shape
from longspan._cost.timeline import TIE, Timeline, fastest
from longspan._cost.workload import Place
from longspan._plan.named_layouts import unit_for
from longspan._plan.strategies import MOVES, Strategy, heads_refusal, ulysses_axis

BALANCED = 1.05  # a busiest rank within this of the mean is looked for first
TIMED_WITHIN = 1.10  # options with an estimate within this factor of the best are planned and timed exactly,
EXACT = (2, 4)  # at most this many of them: (of large problems, of small ones)
SMALL = 1 << 12  # ranks times units
STAGES = (None, 1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True, eq=False)
class Option:
    """One way to span the mesh, and what the model says about it. Seconds are of forward and backward, of all masks together.

    imbalance: the busiest rank's pairs over the mean, of all masks together; where `exact`, as the plan's report counts them.
    joined:    local keys of all masks are computed with those that the only exchange brings.
    """

    strategy: Strategy
    layout: str
    candidate: balance.Candidate | None
    stages: int | None
    forward: float
    backward: float
    computing: float
    imbalance: float
    received: float
    joined: bool = False
    exact: bool = False

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    @property
    def name(self) -> str:
        stages = "" if self.stages is None else f" in {self.stages} stage{'s' if self.stages > 1 else ''}"
        return f"{self.strategy.name}{stages}{' at once' if self.joined else ''}, {self.layout}"


# From an option to the timelines of its plans, its imbalance, and whether all its plans are joined.
Exactly = Callable[[Option], tuple[Sequence[Timeline], float, bool]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Considered:
    """All options, the best first, and those that could not be: name → reason."""

    options: tuple[Option, ...]
    refused: tuple[tuple[str, str], ...]
    cluster: Cluster

    def without_candidates(self) -> Considered:
        """The same numbers without the layouts' tensors: small enough to be pickled with a plan."""
        return replace(self, options=tuple(replace(option, candidate=None) for option in self.options))

    @property
    def winner(self) -> Option:
        return self.options[0]

    def __str__(self) -> str:
        best = self.winner
        lines = [f"considered on {self.cluster.name}: {len(self.options)} options; the winner is {best.name}: {1e3 * best.seconds:.3f} ms"]
        lines.append(f"  {'':38}{'ms':>10}{'slower':>8}{'computing':>11}{'busiest':>9}{'received':>10}  why not")
        for option in self.options[:12]:
            slower = option.seconds / best.seconds - 1
            mark = "" if option.exact else " ~"
            lines.append(
                f"  {option.name:38}{1e3 * option.seconds:10.3f}{100 * slower:7.1f}%{1e3 * option.computing:11.3f}{option.imbalance:9.3f}"
                f"{100 * option.received:9.1f}%  {'the winner' if option is best else _why(option, best)}{mark}"
            )
        if len(self.options) > 12:
            lines.append(f"  … and {len(self.options) - 12} slower ones")
        lines += [f"  {name:38} cannot be: {reason}" for name, reason in self.refused]
        lines.append(
            "  computing: ms of kernels on the busiest rank; busiest: its (query, key) pairs over the mean; received: keys, as a share of "
            "an all-gather; ~: estimated only"
        )
        return "\n".join(lines)


def _why(option: Option, best: Option) -> str:
    if option.imbalance > BALANCED >= best.imbalance:
        return f"busiest rank {option.imbalance:.2f} × the mean"
    if option.seconds <= TIE * best.seconds:
        return "as fast, and not the simpler one"
    waits, least = option.seconds - option.computing, best.seconds - best.computing
    if waits - least > option.computing - best.computing:
        return f"waits {1e3 * (waits - least):.3f} ms longer for data"
    return f"computes {1e3 * (option.computing - best.computing):.3f} ms longer"


def strategies(mesh: Mesh, wanted: str) -> list[Strategy]:
    """What `auto` may choose from on this mesh, the preferred first; one where it is named."""
    found = []
    if len(mesh.axes) == 1:
        found = [Strategy(name=m, ulysses=None, ring=0, moves=m) for m in ("exchange", "ring", "allgather")]
        found.append(Strategy(name="ulysses", ulysses=0, ring=None, moves="none"))
    else:
        first = ulysses_axis(mesh)
        named = {"ulysses", "ring"} & {axis.name for axis in mesh.axes}
        for axis in (first,) if named else (first, 1 - first):
            found += [Strategy(name=f"ulysses_{m}", ulysses=axis, ring=1 - axis, moves=m) for m in ("exchange", "ring", "allgather")]
    assert {s.moves for s in found} <= {*MOVES, "none"}
    return found if wanted == "auto" else [s for s in found if s.name == wanted][:1]


def consider(
    demands: Callable[[int], Sequence[Demand]],
    shares: Callable[[int, int], Tensor],
    length: int,
    mesh: Mesh,
    shape: Shape,
    cluster: Cluster,
    *,
    strategy: str = "auto",
    layout: str = "auto",
    stages: int | None = None,
    overlap: bool | None = None,
    exactly: Exactly | None = None,
) -> Considered:
    """Every option, estimated; the best of them timed exactly by `exactly`, if given. `demands(unit)`: the masks', in units of a size;
    `shares(unit, degree)`: the pairs of each unit in the heads of each rank of a Ulysses group [degree, T]. `stages`, `overlap`: only
    what has so many and does so, where given.
    """
    options, refused = [], []
    estimate = partial(_estimate, mesh=mesh, shape=shape, cluster=cluster, overlap=overlap)
    laid: dict[int, list[_Laid]] = {}
    known: dict[int, Sequence[Demand]] = {}
    for s in strategies(mesh, strategy):
        degree = 1 if s.ulysses is None else mesh.axes[s.ulysses].size
        reason = heads_refusal(degree, shape.heads, shape.kv_heads)
        if reason:
            refused.append((s.name, reason))
            continue
        ranks = 1 if s.ring is None else mesh.axes[s.ring].size
        fixed = s.stages(ranks)
        if stages is not None and fixed is not None and fixed != stages:
            refused.append((s.name, f"{fixed} stages, where {stages} are asked for"))
            continue
        if ranks not in laid:
            unit = unit_for(length, ranks)
            if unit not in known:
                known[unit] = demands(unit)
            laid[ranks] = _candidates(known[unit], ranks, layout)
        rounds, share = _stages(s, stages), shares(unit_for(length, ranks), degree)
        for i, one in enumerate(laid[ranks]):
            if i and strategy == "auto" and (s.moves == "allgather" or one.candidate.evaluation.imbalance > 2 * BALANCED):
                continue  # never faster than what is looked at
            # Stages are compared with the preferred layout; other layouts are measured against it at the first count.
            options += [estimate(s, one, share, count) for count in (rounds[0] if not i else rounds[0][:1])]
        if rounds[1]:
            best = _ordered([o for o in options if o.strategy is s], None)[0]
            one = next(x for x in laid[ranks] if x.candidate is best.candidate)
            options += [estimate(s, one, share, count) for count in rounds[1]]
    size = max((one.ranks * one.candidate.owner.numel() for found in laid.values() for one in found), default=0)
    ordered = _ordered(_distinct(options), exactly, EXACT[size <= SMALL])
    return Considered(options=tuple(ordered), refused=tuple(refused), cluster=cluster)


def _distinct(options: Sequence[Option]) -> list[Option]:
    """Without those that come to the same: so many stages where there would be no more anyway."""
    seen, out = set(), []
    for o in options:
        key = (o.strategy, o.layout, o.forward, o.backward)
        if key not in seen:
            seen.add(key)
            out.append(o)
    return out


class _Laid:
    """A layout, and what it makes of each mask."""

    def __init__(self, candidate: balance.Candidate, demands: Sequence[Demand], ranks: int) -> None:
        self.candidate, self.ranks = candidate, ranks
        self.owned = [Owned(demand, candidate.owner, ranks) for demand in demands]
        self.tokens = sum(demand.length for demand in demands)


def _candidates(demands: Sequence[Demand], ranks: int, layout: str) -> list[_Laid]:
    """The balancer's preferred layout first."""
    candidates = balance.candidates(demands, ranks)
    if layout != "auto":
        candidates = [c for c in candidates if c.name == layout]
    elif ranks > 1:
        preferred = balance.preferred(candidates)
        candidates = [preferred, *(c for c in candidates if c is not preferred)]
    else:
        candidates = candidates[:1]
    return [_Laid(c, demands, ranks) for c in candidates]


def _stages(strategy: Strategy, stages: int | None) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    """How many stages to look at: with every layout, and then with the best of these."""
    if strategy.moves != "exchange":
        return (None,), ()
    return (STAGES[:2], STAGES[2:]) if stages is None else ((stages,), ())


def _estimate(
    s: Strategy, laid: _Laid, share: Tensor, stages: int | None, *, mesh: Mesh, shape: Shape, cluster: Cluster, overlap: bool | None
) -> Option:
    sizes = [axis.size for axis in mesh.axes]
    strides = [sizes[1], 1] if len(sizes) == 2 else [1]
    place = Place(
        per_node=cluster.gpus_per_node,
        stride=1 if s.ring is None else strides[s.ring],
        degree=1 if s.ulysses is None else sizes[s.ulysses],
        apart=1 if s.ulysses is None else strides[s.ulysses],
    )
    lines, received, joined = [], 0.0, True
    for owned in laid.owned:
        work, line = fastest(owned.workload(moves=s.moves, place=place, shape=shape, stages=stages), cluster, overlap=overlap)
        lines.append(line)
        joined &= work.joined
        received += float(work.received.sum())
    every = laid.tokens * (laid.ranks - 1)
    c = laid.candidate
    pairs = torch.zeros(len(share), laid.ranks, dtype=torch.float64).index_add_(1, c.owner, share)
    return _option(s, c.name, c, stages, lines, balance_of(pairs.view(-1)), received / every if every else 0.0, joined)


def _option(
    s: Strategy,
    layout: str,
    candidate: balance.Candidate | None,
    stages: int | None,
    lines: Sequence[Timeline],
    imbalance: float,
    received: float,
    joined: bool,
) -> Option:
    return Option(
        strategy=s,
        layout=layout,
        candidate=candidate,
        stages=stages,
        forward=sum(t.forward.seconds for t in lines),
        backward=sum(t.backward.seconds for t in lines),
        computing=sum(float((t.forward.busy + t.backward.busy).max()) for t in lines),
        imbalance=imbalance,
        received=received,
        joined=joined,
    )


def _ordered(options: list[Option], exactly: Exactly | None, limit: int = 0) -> list[Option]:
    """The best first: balanced ones before others, then by time; near ties in the order in which they were proposed.

    The best are timed exactly, up to `limit`, until no estimate is below what was found; and their pairs are counted in their own tiles.
    One that proves not balanced does not count, nor do others that lay out alike. Estimates are then corrected by what exact times made of
    theirs on average.
    """
    if not options:
        return []
    least = min(o.imbalance for o in options)
    most = BALANCED * (least if least > BALANCED else 1.0)
    balanced, others = [o for o in options if o.imbalance <= most], [o for o in options if o.imbalance > most]
    if exactly is None:
        return _by_time(balanced) + sorted(others, key=lambda o: o.seconds)
    timed: dict[int, Option] = {}
    ratio, best = 1.0, float("inf")
    tilted = set()  # layouts that are not balanced after all
    for i in sorted(range(len(balanced)), key=lambda i: (balanced[i].seconds, i)):
        option = balanced[i]
        if best < float("inf") and (len(timed) >= limit or option.seconds * ratio > TIMED_WITHIN * best):
            break
        if (id(option.candidate), option.strategy.ulysses) in tilted:
            continue
        timed[i] = found = _timed(option, *exactly(option))
        if found.imbalance <= most:
            best = min(best, found.seconds)
        else:
            tilted.add((id(option.candidate), option.strategy.ulysses))
        ratio = sum(t.seconds / balanced[j].seconds for j, t in timed.items()) / len(timed)
    exact = [timed[i] for i in sorted(timed)]
    good = [o for o in exact if o.imbalance <= most] or exact
    rest = [_scaled(o, ratio) for i, o in enumerate(balanced) if i not in timed]
    behind = [o for o in exact if o not in good] + [_scaled(o, ratio) for o in others]
    return _by_time(good) + sorted(rest, key=lambda o: o.seconds) + sorted(behind, key=lambda o: o.seconds)


def _timed(option: Option, lines: Sequence[Timeline], imbalance: float, joined: bool) -> Option:
    return replace(
        option,
        forward=sum(t.forward.seconds for t in lines),
        backward=sum(t.backward.seconds for t in lines),
        computing=sum(float((t.forward.busy + t.backward.busy).max()) for t in lines),
        imbalance=imbalance,
        joined=joined,
        exact=True,
    )


def _scaled(option: Option, ratio: float) -> Option:
    return replace(option, forward=option.forward * ratio, backward=option.backward * ratio, computing=option.computing * ratio)


def _by_time(options: list[Option]) -> list[Option]:
    """By time; of those as good as the best, the first proposed leads."""
    fastest = min(o.seconds for o in options)
    lead = next(o for o in options if o.seconds <= TIE * fastest)
    return [lead, *sorted((o for o in options if o is not lead), key=lambda o: o.seconds)]
