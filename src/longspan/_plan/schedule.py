"""Schedules: which KV moves when. A schedule is a list of moves, as data; the engine knows no strategy by name.

In each stage every rank receives contiguous ranges of KV from the ranks that own them, in one all-to-all. Local KV never moves and is
computed first. Consecutive stages may be computed together in one *step*: a kernel launch per short range would cost more than it hides.
In a *joined* schedule, local KV is computed together with the KV of the first step: this is faster where the all-to-all takes less time
than writing and reading a running result.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from longspan._plan.digest import content

# Tokens that a stage (or a step of several stages) brings at least, where it can. Below this size, kernels and links idle between launches.
STAGE_TOKENS = 16384


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """The KV moves of one attention, as six int64 columns with one entry per move.

    Move i: in stage stage[i], rank receiver[i] receives positions start[i] … start[i] + length[i] − 1 of batch row row[i] from rank
    source[i]. Moves are sorted by (stage, receiver, source, row, start). Ranks are those of the KV axis.

    Attributes:
        name: The strategy's name.
        stages: Number of stages, each one all-to-all.
        steps: Consecutive ranges of stages that are computed together.
        stage, row, receiver, source, start, length: The columns [moves]. `row` is 0 where all batch rows are laid out alike.
        joined: Local KV is computed together with the KV of the first step.
        only_read_kv: Every token that moves is read by its receiver.

    Example:
        >>> import longspan as ls
        >>> schedule = ls.plan(ls.causal(), 4096, ls.Mesh.abstract(4), layout="contiguous", strategy="exchange").schedule
        >>> schedule.received(4).tolist()  # rank 3 reads the shards of ranks 0, 1 and 2
        [[0, 1024, 2048, 3072]]
    """

    name: str
    stages: int
    steps: tuple[range, ...]
    stage: Tensor
    row: Tensor
    receiver: Tensor
    source: Tensor
    start: Tensor
    length: Tensor
    joined: bool = False
    only_read_kv: bool = False

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """The six columns of moves."""
        return self.stage, self.row, self.receiver, self.source, self.start, self.length

    def received(self, ranks: int) -> Tensor:
        """Tokens that each rank receives in each stage [stages, ranks], summed over batch rows that are laid out differently."""
        return self._tokens(self.receiver, ranks)

    def sent(self, ranks: int) -> Tensor:
        """Tokens that each rank sends in each stage [stages, ranks]."""
        return self._tokens(self.source, ranks)

    def _tokens(self, rank: Tensor, ranks: int) -> Tensor:
        total = torch.zeros(self.stages * ranks, dtype=torch.int64)
        return total.index_add_(0, self.stage * ranks + rank, self.length).view(self.stages, ranks)

    @cached_property
    def active_stages(self) -> Tensor:
        """Number of stages of each step in which anything moves [steps]."""
        moves = torch.bincount(self.stage, minlength=self.stages) > 0
        return torch.tensor([int(moves[step.start : step.stop].sum()) for step in self.steps], dtype=torch.int64)

    @cached_property
    def digest(self) -> str:
        """A digest of the schedule's contents, the same on every rank."""
        digest = hashlib.sha256(f"{self.stages} {[(s.start, s.stop) for s in self.steps]} {self.joined} {self.only_read_kv}".encode())
        for column in self.columns:
            digest.update(content(column))
        return digest.hexdigest()
