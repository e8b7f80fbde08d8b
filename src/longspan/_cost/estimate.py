"""What each rank would have to do, from the owners of units alone: for layouts that are only considered, and for very many ranks.

Legend as in `longspan._cost.workload`; T units.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from longspan._balance.demand import Demand
from longspan._cost.rates import Shape
from longspan._cost.workload import Again, Placement, Workload
from longspan._masks.block_table import BLOCK_SIZE
from longspan._plan.schedule import STAGE_TOKENS
from longspan._plan.tile_grid import coverage

MOST_STEPS = 256  # that are looked at one by one


class OwnerEstimate:
    """What ranks would do if rank owner[t] owned unit t of a demand; `chosen` ranks alone are looked at.

    Nothing here is of size ranks × ranks: a few ranks of very many can be looked at. Partial tiles are estimated from how many pairs the
    units have; where only some ranks are looked at, what a rank sends is taken to be what it receives.
    """

    def __init__(self, demand: Demand, owner: Tensor, ranks: int, chosen: Tensor | None = None) -> None:
        self.ranks, self.owner, self.unit = ranks, owner, demand.unit
        self.chosen = torch.arange(ranks) if chosen is None else chosen
        self.tokens = torch.full((demand.units,), float(demand.unit), dtype=torch.float64)
        self.tokens[-1] = demand.length - (demand.units - 1) * demand.unit
        here = torch.full((ranks,), -1).index_put_((self.chosen,), torch.arange(len(self.chosen)))[owner]
        run = here[demand.row_of_run]
        mine = run >= 0
        self.covered = coverage(run[mine], demand.first[mine], demand.last[mine] + 1, demand.units, range(len(self.chosen)))
        self.work, self.owned = torch.zeros(2, len(self.chosen), dtype=torch.float64)
        self.work.index_add_(0, here[here >= 0], demand.work[here >= 0])
        self.owned.index_add_(0, here[here >= 0], self.tokens[here >= 0])
        self.own = owner == self.chosen[:, None]
        self.shard = int(-(-float(self.tokens.sum()) // ranks))

    @cached_property
    def _area(self) -> Tensor:
        return self.covered.double()

    @cached_property
    def distance(self) -> Tensor:
        return (self.chosen[:, None] - self.owner) % self.ranks

    @cached_property
    def _queue(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For an exchange: which units a rank needs [R, T], the order in which it takes them, tokens taken before, and tokens in all."""
        need = (self.covered > 0) & ~self.own
        order = (self.distance.int() * need.shape[1] + torch.arange(need.shape[1], dtype=torch.int32)).argsort(1)
        sizes = (need * self.tokens).gather(1, order)
        return need, order, sizes.cumsum(1) - sizes, sizes.sum(1)

    def workload(
        self, *, moves: str, placement: Placement, shape: Shape, stages: int | None = None, step_tokens: int = STAGE_TOKENS
    ) -> Workload:
        """Keys moving by "ring", "allgather", "exchange" or "none"."""
        step, exchanges = self._steps(moves, stages, max(step_tokens, self.shard))
        merged = -(-(len(exchanges) - 1) // MOST_STEPS)
        if merged > 1:
            # Steps that are alike, as one that computes for its queries as many times.
            step = torch.where(step > 0, (step - 1) // merged + 1, step)
            exchanges = torch.stack([e.sum() for e in (exchanges[:1], *exchanges[1:].split(merged))])
        count = len(exchanges)
        area = torch.zeros(len(self.chosen), count, dtype=torch.float64).scatter_add_(1, step.clamp(min=0), self._area)
        full, partial = _kinds(area * (self.unit / BLOCK_SIZE) ** 2, self.work / BLOCK_SIZE**2, self.unit)
        heads = shape.heads * shape.batch / placement.degree
        received, sent = self._moved(step, placement, count)
        again = None
        if moves != "exchange":
            arriving, leaving = self._moved(torch.where(self.covered > 0, step, -1), placement, count)
            # Of a step's exchanges at least one is carried out, where it brings anything.
            share = (arriving.sum((0, 1)) / received.sum((0, 1)).clamp(min=1)).clamp(max=1)
            again = Again(arriving, leaving, None, (exchanges * share).ceil())
        rows = ((self.owned / BLOCK_SIZE).ceil() * heads)[:, None].repeat(1, count)
        rows[:, 1:] *= max(1, merged)
        # At least as many rows as see one unit of the step's keys; in masks whose rows see one stretch, not many more.
        busy = torch.zeros_like(area).scatter_reduce_(1, step.clamp(min=0), self._area, "amax") * (self.unit / BLOCK_SIZE * heads)
        busy[:, 1:] *= max(1, merged)
        return Workload(
            ranks=self.ranks,
            degree=placement.degree,
            rank=self.chosen,
            rows=rows,
            full=full * heads,
            partial=partial * heads,
            received=received,
            sent=sent,
            exchanges=exchanges,
            local=self.owned / placement.degree,
            turned=placement.cross_node_share,
            shape=shape,
            scale=shape.batch,
            busy=torch.minimum(busy, rows),
            again=again,
        )

    def _steps(self, moves: str, stages: int | None, most: int) -> tuple[Tensor, Tensor]:
        """(step of each unit at each rank [R, T]: 0 local, −1 never; exchanges of each step [steps])."""
        one = torch.zeros(1, dtype=torch.float64)
        if moves == "none" or self.ranks == 1:
            return torch.zeros_like(self.covered), one
        if moves == "allgather":
            return (~self.own).long(), torch.tensor([0.0, 1.0], dtype=torch.float64)
        if moves == "ring":
            together = max(1, -(-most // max(1, self.shard)))
            steps = -(-(self.ranks - 1) // together)
            exchanges = torch.full((steps + 1,), float(together), dtype=torch.float64)
            exchanges[0], exchanges[-1] = 0, self.ranks - 1 - (steps - 1) * together
            return torch.where(self.own, 0, (self.distance - 1) // together + 1), exchanges
        need, order, before, wanted = self._queue
        longest = int(wanted.max()) if len(wanted) else 0
        count = -(-longest // most) if stages is None else min(stages, longest)
        if not count:
            return torch.where(self.own, 0, -1), one
        stage = (before * (count / wanted.clamp(min=1))[:, None]).long().clamp(max=count - 1)
        step = torch.zeros_like(stage).scatter_(1, order, stage + 1)
        exchanges = torch.ones(count + 1, dtype=torch.float64)
        exchanges[0] = 0
        return torch.where(self.own, 0, torch.where(need, step, -1)), exchanges

    def _moved(self, step: Tensor, placement: Placement, count: int) -> tuple[Tensor, Tensor]:
        """Tokens received and sent, of each step, inside a node and between nodes [2, R, steps]."""
        arrives = (step > 0).nonzero()
        rank, unit = arrives.unbind(1)
        at, source, to = step[rank, unit], self.owner[unit], self.chosen[rank]
        away = (placement.node(source) != placement.node(to)).long()
        found = []
        whole = len(self.chosen) == self.ranks
        for row in (rank, source) if whole else (rank,):
            total = torch.bincount((away * len(self.chosen) + row) * count + at, self.tokens[unit], 2 * len(self.chosen) * count)
            found.append(total.view(2, len(self.chosen), count))
        return found[0], found[-1]


def _kinds(area: Tensor, useful: Tensor, unit: int) -> tuple[Tensor, Tensor]:
    """Full and partial tiles [R, steps] from the area of units computed and the useful area of each rank [R], all in tiles.

    A unit that a mask's edge crosses is half used, and so is a tile: what is computed in vain, in units, tells how many edges there are.
    Edges lie among local keys as far as those have room for them.
    """
    vain = (area.sum(1) - useful).clamp(min=0)
    there = torch.minimum(vain, area[:, 0] / 2)
    others = area[:, 1:].sum(1).clamp(min=1e-9)
    spread = torch.cat([there[:, None], (vain - there)[:, None] * area[:, 1:] / others[:, None]], 1)
    edges = 2 * spread * (BLOCK_SIZE / unit)  # a unit's edge crosses unit / BLOCK_SIZE tiles, each half used
    return (area - spread - edges / 2).clamp(min=0), edges
