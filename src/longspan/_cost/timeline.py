"""The predicted timeline of a workload: when each rank computes, when KV and gradients are in flight, and how much of that is exposed.

The model follows the engine. While step i is computed, the KV of step i + 1 is in flight. An all-to-all begins when the one before it has
ended and the computation before the one it overlaps with is done. In backward, the gradients of a step's KV return to their owners
while the next step is computed; those of the last step while the second part of local KV is. In a joined schedule nothing overlaps with
the first all-to-all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Ranks that are slower than the cluster's profile says, for `plan(…, conditions=…)` and `Plan.report`.

    Attributes:
        stragglers: From a rank to how many times slower it computes.
        slow_links: From a rank to how many times slower it sends and receives.
    """

    stragglers: Mapping[int, float] = field(default_factory=dict)
    slow_links: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, factors in (("stragglers", self.stragglers), ("slow_links", self.slow_links)):
            for rank, factor in factors.items():
                if rank < 0 or not factor > 0:
                    raise ValueError(f"{what}: expected ranks of 0 or more and factors above 0, got {rank}: {factor}")


@dataclass(frozen=True, kw_only=True, eq=False)
class PassTimes:
    """Forward or backward of R ranks in K + 1 steps. Seconds from the pass's start, float64.

    Where local KV has a second part, that is one more step at the end, empty in forward.

    Attributes:
        compute: (start, end) of each step's computation [R, K + 1].
        transfer: (start, end) of the all-to-all that brings each step's KV [R, K + 1]; empty for step 0.
        grad_return: (start, end) of the return of each step's gradients [R, K + 1]; None in forward.
        before: Seconds of the Ulysses transpose before the first step [R].
        after: Seconds after the last computation [R]: the last gradients' return, and the Ulysses transpose.
        total: Seconds of the pass [R].
    """

    compute: tuple[Tensor, Tensor]
    transfer: tuple[Tensor, Tensor]
    grad_return: tuple[Tensor, Tensor] | None
    before: Tensor
    after: Tensor
    total: Tensor

    @property
    def busy(self) -> Tensor:
        """Seconds that each rank computes [R]."""
        return (self.compute[1] - self.compute[0]).sum(1)

    @property
    def exposed(self) -> Tensor:
        """Seconds that each rank waits for data [R]."""
        return self.total - self.busy

    @property
    def seconds(self) -> float:
        """Seconds of the slowest rank."""
        return float(self.total.max())

    def select(self, rank: Tensor) -> PassTimes:
        """The pass with row rank[i] in place i."""
        compute, transfer = ((a[rank], b[rank]) for a, b in (self.compute, self.transfer))
        grad_return = None if self.grad_return is None else (self.grad_return[0][rank], self.grad_return[1][rank])
        return PassTimes(
            compute=compute,
            transfer=transfer,
            grad_return=grad_return,
            before=self.before[rank],
            after=self.after[rank],
            total=self.total[rank],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """Both passes, and the bytes that they move per rank, inside the node and between nodes [2, R]."""

    forward: PassTimes
    backward: PassTimes
    bytes: Tensor

    @property
    def seconds(self) -> float:
        """Predicted seconds of forward and backward."""
        return self.forward.seconds + self.backward.seconds

    def select(self, rank: Tensor) -> Timeline:
        """The timeline with rank rank[i] in place i."""
        return Timeline(forward=self.forward.select(rank), backward=self.backward.select(rank), bytes=self.bytes[:, rank])
