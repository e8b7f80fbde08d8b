"""Workloads estimated from the owners of units: for layouts that are only considered, and for very many ranks.

Legend as in `longspan._cost.workload`; T units.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from longspan._balance.demand import Demand
from longspan._cost.rates import Shape
from longspan._cost.workload import BackwardMoves, Placement, Workload
from longspan._masks.block_table import BLOCK_SIZE
from longspan._plan.schedule import STAGE_TOKENS
from longspan._plan.tile_grid import coverage

MAX_STEPS = 256  # more steps are merged into this many


class OwnerEstimate:
    """The work of ranks if rank owner[t] owned unit t of a demand.

    Nothing here has ranks × ranks entries, so that a few of very many ranks can be looked at. Partial tiles are estimated from the units'
    pairs. Where only some ranks are looked at, a rank is assumed to send as much as it receives.

    Args:
        demand: Work and reads of each unit.
        owner: Rank of each unit [T].
        ranks: Number of ranks.
        chosen: Ranks to look at; all by default.
    """

    def __init__(self, demand: Demand, owner: Tensor, ranks: int, chosen: Tensor | None = None) -> None:
        self.ranks, self.owner, self.unit = ranks, owner, demand.unit
        self.chosen = torch.arange(ranks) if chosen is None else chosen
        self.tokens = torch.full((demand.units,), float(demand.unit), dtype=torch.float64)
        self.tokens[-1] = demand.length - (demand.units - 1) * demand.unit
        index = torch.full((ranks,), -1).index_put_((self.chosen,), torch.arange(len(self.chosen)))[owner]  # −1: not looked at
        run = index[demand.row_of_run]
        mine = run >= 0
        self.computed = coverage(run[mine], demand.first[mine], demand.last[mine] + 1, demand.units, range(len(self.chosen)))
        self.work, self.owned_tokens = torch.zeros(2, len(self.chosen), dtype=torch.float64)
        self.work.index_add_(0, index[index >= 0], demand.work[index >= 0])
        self.owned_tokens.index_add_(0, index[index >= 0], self.tokens[index >= 0])
        self.is_local = owner == self.chosen[:, None]
        self.shard_tokens = int(-(-float(self.tokens.sum()) // ranks))

    @cached_property
    def _tiles_per_unit(self) -> tuple[Tensor, Tensor]:
        """Tiles per unit: of each unit [T], and of each rank's units in the mean [R], float64.

        A tile ends where the owner changes (see `TileGrid`); the units of a tile share it. A unit between units of others is a tile.
        """
        if self.unit >= BLOCK_SIZE:
            share = torch.full_like(self.tokens, self.unit / BLOCK_SIZE)
        else:
            starts = torch.arange(len(self.owner)) * self.unit % BLOCK_SIZE == 0
            starts[1:] |= self.owner.diff() != 0
            tile = starts.cumsum(0) - 1
            share = 1.0 / torch.bincount(tile)[tile].double()
        of_rank = torch.zeros(self.ranks, dtype=torch.float64).index_add_(0, self.owner, share)
        mean = of_rank / torch.bincount(self.owner, minlength=self.ranks).clamp(min=1)
        return share, mean[self.chosen]

    @cached_property
    def _owned_tiles(self) -> Tensor:
        """Query tiles of one head and batch row of each rank [R]."""
        if self.unit >= BLOCK_SIZE:
            return (self.owned_tokens / BLOCK_SIZE).ceil()
        units = torch.bincount(self.owner, minlength=self.ranks)[self.chosen]
        return (self._tiles_per_unit[1] * units).round()

    @cached_property
    def _area(self) -> Tensor:
        """Tiles that each rank's queries compute of each unit of KV [R, T], float64."""
        share, mean_share = self._tiles_per_unit
        return self.computed * share * mean_share[:, None]

    @cached_property
    def _distance(self) -> Tensor:
        """From each rank back to the owner of each unit, around the ring [R, T]."""
        return (self.chosen[:, None] - self.owner) % self.ranks

    @cached_property
    def _exchange_order(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For strategy "exchange": units that a rank needs [R, T], their order, tokens taken before each, and tokens in all [R]."""
        need = (self.computed > 0) & ~self.is_local
        # By distance, then by unit: the units by descending owner, from the rank's own on, around the ring.
        units = need.shape[1]
        by_owner = self.owner.argsort(descending=True, stable=True)
        first = torch.searchsorted(-self.owner[by_owner], -self.chosen)
        order = torch.cat([by_owner, by_owner]).unfold(0, units, 1)[first]
        sizes = (need * self.tokens).gather(1, order)
        return need, order, sizes.cumsum(1) - sizes, sizes.sum(1)

    def workload(
        self, *, moves: str, placement: Placement, shape: Shape, stages: int | None = None, step_tokens: int = STAGE_TOKENS
    ) -> Workload:
        """The workload with KV moving by "ring", "allgather", "exchange" or "none"."""
        step, exchanges = self._steps(moves, stages, max(step_tokens, self.shard_tokens))
        step = step.clamp(min=0)  # what never moves is not computed either, and counts nowhere
        merged = max(1, -(-(len(exchanges) - 1) // MAX_STEPS))
        if merged > 1:
            # Similar steps become one step that computes for its queries as many times.
            step = (step - 1) // merged + 1
            exchanges = torch.stack([e.sum() for e in (exchanges[:1], *exchanges[1:].split(merged))])
        count = len(exchanges)
        area = torch.zeros(len(self.chosen), count, dtype=torch.float64).scatter_add_(1, step, self._area)
        whole = self.computed.sum(1).clamp(min=1) * (self.unit / BLOCK_SIZE) ** 2
        stretch = area.sum(1) / whole  # above 1 where tiles are cut into smaller ones
        full, partial = _full_and_partial(area, self.work / BLOCK_SIZE**2 * stretch, self.unit / BLOCK_SIZE * stretch.sqrt())
        heads = shape.heads * shape.batch / placement.degree
        received, sent = self._moved(step, placement, count)
        backward = None
        if moves != "exchange":
            arriving, leaving = self._moved(step * (self.computed > 0), placement, count)
            # Of a step's exchanges at least one takes place, where it brings anything.
            share = (arriving.sum((0, 1)) / received.sum((0, 1)).clamp(min=1)).clamp(max=1)
            backward = BackwardMoves(arriving, leaving, None, (exchanges * share).ceil())
        query_tiles = (self._owned_tiles * heads)[:, None].repeat(1, count)
        query_tiles[:, 1:] *= merged
        # At least as many query tiles as see one unit of the step's KV; under masks whose rows see one range, not many more.
        seen = torch.zeros_like(area, dtype=torch.int64).scatter_reduce_(1, step, self.computed, "amax")
        active = seen * (self._tiles_per_unit[1] * heads)[:, None]
        active[:, 1:] *= merged
        return Workload(
            ranks=self.ranks,
            degree=placement.degree,
            rank=self.chosen,
            query_tiles=query_tiles,
            full=full * heads,
            partial=partial * heads,
            received=received,
            sent=sent,
            exchanges=exchanges,
            local=self.owned_tokens / placement.degree,
            cross_node_share=placement.cross_node_share,
            shape=shape,
            scale=shape.batch,
            active_tiles=torch.minimum(active, query_tiles),
            backward=backward,
        )

    def _steps(self, moves: str, stages: int | None, step_tokens: int) -> tuple[Tensor, Tensor]:
        """(step of each unit at each rank [R, T]: 0 local, −1 never; exchanges of each step [steps])."""
        no_exchange = torch.zeros(1, dtype=torch.float64)
        if moves == "none" or self.ranks == 1:
            return torch.zeros_like(self.computed), no_exchange
        if moves == "allgather":
            return ~self.is_local, torch.tensor([0.0, 1.0], dtype=torch.float64)
        if moves == "ring":
            stages_per_step = max(1, -(-step_tokens // max(1, self.shard_tokens)))
            steps = -(-(self.ranks - 1) // stages_per_step)
            exchanges = torch.full((steps + 1,), float(stages_per_step), dtype=torch.float64)
            exchanges[0], exchanges[-1] = 0, self.ranks - 1 - (steps - 1) * stages_per_step
            return torch.where(self.is_local, 0, (self._distance - 1) // stages_per_step + 1), exchanges
        if moves != "exchange":
            raise NotImplementedError(
                f"cost model: expected moves 'ring', 'allgather', 'exchange' or 'none', got {moves!r}: add them to OwnerEstimate._steps"
            )
        need, order, before, needed_tokens = self._exchange_order
        largest = int(needed_tokens.max()) if len(needed_tokens) else 0
        count = -(-largest // step_tokens) if stages is None else min(stages, largest)
        if not count:
            return torch.where(self.is_local, 0, -1), no_exchange
        stage = (before * (count / needed_tokens.clamp(min=1))[:, None]).long().clamp(max=count - 1)
        step = torch.zeros_like(stage).scatter_(1, order, stage + 1)
        exchanges = torch.ones(count + 1, dtype=torch.float64)
        exchanges[0] = 0
        return torch.where(self.is_local, 0, torch.where(need, step, -1)), exchanges

    def _moved(self, step: Tensor, placement: Placement, count: int) -> tuple[Tensor, Tensor]:
        """Tokens received and sent in each step, inside a node and between nodes [2, R, steps]. Nothing moves in step 0."""
        crosses = placement.node(self.owner) != placement.node(self.chosen)[:, None]
        column = step + crosses * count
        received = torch.zeros(len(step), 2 * count, dtype=torch.float64).scatter_add_(1, column, self.tokens.expand_as(column))
        totals = [received.view(-1, 2, count).transpose(0, 1)]
        if len(self.chosen) == self.ranks:
            by_unit = torch.zeros(2 * count, len(self.owner), dtype=torch.float64).scatter_add_(0, column, self.tokens.expand_as(column))
            sent = torch.zeros(2 * count, self.ranks, dtype=torch.float64).index_add_(1, self.owner, by_unit)
            totals.append(sent.view(2, count, -1).transpose(1, 2))
        for total in totals:
            total[:, :, 0] = 0
        return totals[0], totals[-1]


def _full_and_partial(area: Tensor, useful: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """Full and partial tiles [R, steps] from the area of units computed, the useful area and the side of a unit [R], all in tiles.

    A unit that an edge of the mask crosses is half used, and so is a tile. The unused area, in units, therefore says how many edges there
    are. Edges are assigned to local KV as far as it has room for them.
    """
    unused = (area.sum(1) - useful).clamp(min=0)
    local = torch.minimum(unused, area[:, 0] / 2)
    others = area[:, 1:].sum(1).clamp(min=1e-9)
    spread = torch.cat([local[:, None], (unused - local)[:, None] * area[:, 1:] / others[:, None]], 1)
    partial = 2 * spread / unit.clamp(min=1e-9)[:, None]  # an edge crosses `unit` tiles of a unit, each half used
    return (area - spread - partial / 2).clamp(min=0), partial
