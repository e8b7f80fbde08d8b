"""Options that `auto` considers, with predicted times, and the table that `plan.explain()` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from longspan._balance.search import Candidate
from longspan._cost.predict import TIE
from longspan._cost.rates import Cluster
from longspan._cost.timeline import Conditions, Timeline
from longspan._plan.strategies import Strategy

BALANCED = 1.05  # options whose busiest rank has at most this many times the mean work come first
SHOWN_OPTIONS = 12


@dataclass(frozen=True, kw_only=True, eq=False)
class Option:
    """One combination of strategy, layout and stages, with predictions. Seconds are summed over all masks.

    Attributes:
        strategy: The strategy on the mesh.
        layout: The layout's name.
        candidate: The layout as the balancer proposed it; None once an option is stored with a plan.
        stages: Number of stages that was asked for; None for the strategy's default.
        forward, backward: Predicted seconds of the passes on the slowest rank.
        computing: Predicted seconds of kernels, both passes, on the busiest rank.
        imbalance: Pairs of the busiest rank over the mean, all masks together. Where `exact`, counted as in the plan's report.
        received: KV received along the KV axis, as a share of an all-gather.
        joined: Local KV of every mask is computed together with the KV of the only all-to-all.
        exact: The option was planned and timed exactly; otherwise it was estimated from owners of units.
    """

    strategy: Strategy
    layout: str
    candidate: Candidate | None
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
        """Predicted seconds of forward and backward."""
        return self.forward + self.backward

    @property
    def name(self) -> str:
        """The option in words: "exchange in 2 stages, head_tail"."""
        stages = "" if self.stages is None else f" in {self.stages} stage{'s' if self.stages > 1 else ''}"
        return f"{self.strategy.name}{stages}{' at once' if self.joined else ''}, {self.layout}"

    def scaled(self, ratio: float) -> Option:
        """The option with its times multiplied by `ratio`."""
        return replace(self, forward=self.forward * ratio, backward=self.backward * ratio, computing=self.computing * ratio)

    def timed(self, exact: ExactTiming) -> Option:
        """The option with exact times in place of estimates."""
        forward, backward, computing = pass_seconds(exact.timelines)
        return replace(
            self,
            forward=forward,
            backward=backward,
            computing=computing,
            imbalance=exact.imbalance,
            joined=exact.joined,
            exact=True,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ExactTiming:
    """The plans of one option, timed: a timeline per mask, the imbalance of all masks together, and whether all plans are joined."""

    timelines: Sequence[Timeline]
    imbalance: float
    joined: bool


def pass_seconds(timelines: Sequence[Timeline]) -> tuple[float, float, float]:
    """(`forward`, `backward`, `computing`) of an option, summed over its masks."""
    return (
        sum(t.forward.seconds for t in timelines),
        sum(t.backward.seconds for t in timelines),
        sum(float((t.forward.busy + t.backward.busy).max()) for t in timelines),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Considered:
    """All options, the best first, and the strategies that are not possible, as (name, reason), under `conditions` on a cluster."""

    options: tuple[Option, ...]
    not_possible: tuple[tuple[str, str], ...]
    cluster: Cluster
    conditions: Conditions = field(default_factory=Conditions)

    @property
    def winner(self) -> Option:
        """The best option."""
        return self.options[0]

    def without_candidates(self) -> Considered:
        """The same without the layouts' tensors: small enough to be pickled with a plan."""
        return replace(self, options=tuple(replace(option, candidate=None) for option in self.options))

    def __str__(self) -> str:
        best = self.winner
        lines = [f"considered on {self.cluster.name}: {len(self.options)} options; the winner is {best.name}: {1e3 * best.seconds:.3f} ms"]
        lines.append(f"  {'':38}{'ms':>10}{'slower':>8}{'computing':>11}{'busiest':>9}{'received':>10}  why not")
        for option in self.options[:SHOWN_OPTIONS]:
            slower = option.seconds / best.seconds - 1
            mark = "" if option.exact else " ~"
            lines.append(
                f"  {option.name:38}{1e3 * option.seconds:10.3f}{100 * slower:7.1f}%{1e3 * option.computing:11.3f}{option.imbalance:9.3f}"
                f"{100 * option.received:9.1f}%  {'the winner' if option is best else _why_not(option, best)}{mark}"
            )
        if len(self.options) > SHOWN_OPTIONS:
            lines.append(f"  … and {len(self.options) - SHOWN_OPTIONS} slower ones")
        lines += [f"  {name:38} not possible: {reason}" for name, reason in self.not_possible]
        lines.append(
            "  computing: ms of kernels on the busiest rank; busiest: its (query, key) pairs over the mean; received: KV, as a share of "
            "an all-gather; ~: estimated only"
        )
        return "\n".join(lines)


def _why_not(option: Option, best: Option) -> str:
    if option.imbalance > BALANCED >= best.imbalance:
        return f"busiest rank {option.imbalance:.2f} × the mean"
    if option.seconds <= TIE * best.seconds:
        return "as fast, but not simpler"
    waiting, least_waiting = option.seconds - option.computing, best.seconds - best.computing
    if waiting - least_waiting > option.computing - best.computing:
        return f"waits {1e3 * (waiting - least_waiting):.3f} ms longer for data"
    return f"computes {1e3 * (option.computing - best.computing):.3f} ms longer"
