"""`longspan.plan_step`: samples of very different lengths, planned together over all ranks of an optimizer's step.

Samples are packed one after another, and every rank of the mesh shares every packed sequence: short samples stay on one rank or two, long
ones span more, and only the KV of those moves. If the samples exceed the tokens that ranks can hold at once, the step is divided into
forwards whose gradients accumulate.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from longspan._comm.mesh import MeshLike, as_mesh, context_mesh
from longspan._masks.constructors import causal, documents
from longspan._plan.layout import Layout
from longspan._planner.plan import Plan
from longspan._planner.planning import plan

MORE_FORWARDS = 1  # with head counts, this many forwards more than needed are compared by predicted time
GAIN = 0.9  # share of the predicted time below which a forward more is taken: it costs another pass over the weights, not predicted here


@dataclass(frozen=True, kw_only=True, eq=False)
class Forward:
    """One forward and backward pass of a step.

    Attributes:
        samples: Numbers of the samples, in the order in which they are packed.
        lengths: Their lengths.
        plan: The plan of the packed sequence, `causal() & documents(lengths=lengths)`.
    """

    samples: tuple[int, ...]
    lengths: tuple[int, ...]
    plan: Plan

    @property
    def tokens(self) -> int:
        """Tokens of the packed sequence."""
        return sum(self.lengths)

    @cached_property
    def spans(self) -> tuple[int, ...]:
        """For each sample, the number of ranks that own tokens of it."""
        return _spans(self.plan.layout, self.lengths)

    @cached_property
    def seconds(self) -> float:
        """Predicted time of one layer's attention, forward and backward."""
        return self.plan.report().seconds


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan:
    """The forwards of an optimizer's step, in the order in which all ranks run them. `print` shows them.

    Attributes:
        forwards: The passes whose gradients accumulate.
        tokens_per_rank: The limit for which the step was planned.
    """

    forwards: tuple[Forward, ...]
    tokens_per_rank: int

    @property
    def accumulation(self) -> int:
        """Number of forwards whose gradients accumulate."""
        return len(self.forwards)

    @property
    def seconds(self) -> float:
        """Predicted time of one layer's attention over the step."""
        return sum(forward.seconds for forward in self.forwards)

    def __str__(self) -> str:
        lengths = [n for forward in self.forwards for n in forward.lengths]
        ranks = self.forwards[0].plan.mesh.size
        lines = [
            f"{len(lengths)} samples of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all, over {ranks} ranks: "
            f"{self.accumulation} forward{'s' if self.accumulation > 1 else ''}, at most {self.tokens_per_rank} tokens per rank",
            "  forward  samples    tokens  per rank  on one rank  widest  balance  received per rank  attention",
        ]
        for number, forward in enumerate(self.forwards):
            report = forward.plan.report()
            most = max(forward.plan.layout.local_len(rank) for rank in range(ranks))
            received = f"{float(report.bytes_received.sum(0).double().mean()) / 2**20:.1f} MiB"
            alone = sum(n == 1 for n in forward.spans)
            lines.append(
                f"  {number:7d}  {len(forward.samples):7d}  {forward.tokens:8d}  {most:8d}  {alone:11d}  {max(forward.spans):6d}  "
                f"{report.balance:7.3f}  {received:>17s}  {1e3 * forward.seconds:6.2f} ms"
            )
        lines.append(f"  predicted attention of a layer, forward and backward: {1e3 * self.seconds:.2f} ms")
        return "\n".join(lines)


def plan_step(lengths: Sequence[int], mesh: MeshLike, *, tokens_per_rank: int, **options: Any) -> StepPlan:
    """Plan an optimizer's step over samples of different lengths: which samples run together, and who owns which tokens of them.

    Every rank that makes the same call gets the same step. No rank communicates.

    Args:
        lengths: Tokens of each sample, 1 or more.
        mesh: All ranks of the step, data and context ranks together, as `longspan.plan` takes them: one axis.
        tokens_per_rank: The most tokens that a rank can hold in a forward. Samples of more than this times the ranks raise.
        **options: Keywords of `longspan.plan`: heads, kv_heads, head_dim, cluster, layout, strategy, … With head counts, strategies are
            chosen by predicted time, and one forward more than needed is taken if it saves a tenth of the predicted time of attention.

    Returns:
        A `StepPlan`. The samples of a forward are packed in the order of `Forward.samples`.

    Raises:
        ValueError: A length or the limit is not supported.

    Example:
        >>> import longspan as ls
        >>> step = ls.plan_step([9000, 500, 700, 300, 4000, 600], ls.Mesh.abstract(4), tokens_per_rank=2560)
        >>> step.accumulation
        2
        >>> [sorted(forward.lengths) for forward in step.forwards]
        [[9000], [300, 500, 600, 700, 4000]]
    """
    ranks = as_mesh(mesh).size
    if context_mesh(mesh).size != ranks:
        raise ValueError(
            "plan_step: expected a mesh of one axis, whose ranks share all samples, got one with axes of data or heads; flatten the data "
            "and context axes: mesh['dp', 'cp']._flatten()"
        )
    _check(lengths, ranks, tokens_per_rank)
    needed = -(-sum(lengths) // (tokens_per_rank * ranks))
    steps: list[StepPlan] = []
    for count in range(needed, len(lengths) + 1):
        groups = _grouped(lengths, count, tokens_per_rank * ranks)
        if groups is None or any(sum(lengths[i] for i in group) < ranks for group in groups):
            continue
        made = StepPlan(forwards=tuple(_forward(group, lengths, mesh, options) for group in groups), tokens_per_rank=tokens_per_rank)
        if all(f.plan.layout.local_len(rank) <= tokens_per_rank for f in made.forwards for rank in range(ranks)):
            steps.append(made)
            if options.get("heads") is None or len(steps) > MORE_FORWARDS:
                break
    if not steps:
        raise ValueError(
            f"plan_step: no division of {len(lengths)} samples, {sum(lengths)} tokens, keeps {ranks} ranks within "
            f"tokens_per_rank={tokens_per_rank}; give a larger limit, more ranks or more samples"
        )
    return steps[-1] if len(steps) > 1 and steps[-1].seconds < GAIN * steps[0].seconds else steps[0]


def _check(lengths: Sequence[int], ranks: int, tokens_per_rank: int) -> None:
    wrong = [n for n in lengths if not isinstance(n, int) or isinstance(n, bool) or n < 1]
    if wrong or not lengths:
        raise ValueError(f"plan_step: expected lengths of 1 or more tokens, got {wrong[0] if wrong else 'none'!r}")
    if not isinstance(tokens_per_rank, int) or tokens_per_rank < 1:
        raise ValueError(f"plan_step: expected tokens_per_rank of 1 or more, got {tokens_per_rank!r}")
    if max(lengths) > ranks * tokens_per_rank:
        raise ValueError(
            f"plan_step: a sample of {max(lengths)} tokens exceeds {ranks} ranks × tokens_per_rank={tokens_per_rank}; give more ranks or "
            "a larger limit"
        )
    if sum(lengths) < ranks:
        raise ValueError(f"plan_step: expected at least one token per rank, got {sum(lengths)} tokens for {ranks} ranks; use fewer ranks")


def _grouped(lengths: Sequence[int], count: int, capacity: int) -> list[list[int]] | None:
    """Samples in `count` groups of at most `capacity` tokens, largest first into the group with the fewest; None if they do not fit.

    Groups with equally many tokens need the least memory, and each has long samples beside short ones, by which work is balanced. The time
    of the step does not depend on the grouping as long as the ranks of each forward are balanced.
    """
    queue = [(0, group) for group in range(count)]
    groups: list[list[int]] = [[] for _ in range(count)]
    for sample in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, group = heapq.heappop(queue)
        if tokens + lengths[sample] > capacity:
            return None  # no group has fewer tokens
        groups[group].append(sample)
        heapq.heappush(queue, (tokens + lengths[sample], group))
    return groups if all(groups) else None


def _forward(group: list[int], lengths: Sequence[int], mesh: MeshLike, options: dict[str, Any]) -> Forward:
    own = tuple(lengths[i] for i in group)
    mask = causal() if len(own) == 1 else causal() & documents(lengths=list(own))
    return Forward(samples=tuple(group), lengths=own, plan=plan(mask, sum(own), mesh, **{"batch": 1, **options}))


def _spans(layout: Layout, lengths: Sequence[int]) -> tuple[int, ...]:
    """The number of ranks that own tokens of each packed sample."""
    ends = list(accumulate(lengths))
    owned = sorted((start, start + length, rank) for rank in range(layout.ranks) for start, length in layout.segments(rank))
    counts, first = [], 0
    for length, end in zip(lengths, ends):
        while owned[first][1] <= end - length:
            first += 1
        owners, i = set(), first
        while i < len(owned) and owned[i][0] < end:
            owners.add(owned[i][2])
            i += 1
        counts.append(len(owners))
    return tuple(counts)
