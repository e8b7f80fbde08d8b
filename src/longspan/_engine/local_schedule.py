"""A rank's itinerary: a plan as one rank carries it out. What arrives when, what is sent, and which tiles each step computes.

Derived from the plan alone, once per plan and tile size, and kept with it. Rows of a buffer are tokens, or (batch row, token) where batch
rows are laid out differently.

Forward, local keys come first and hide the first arrival. Backward, they come in two parts: the first hides the first arrival, the second
comes last and hides the gradients that go home last.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from longspan._engine.plan_cache import plan_cache
from longspan._kernels.protocol import Tiling
from longspan._kernels.row_sums import row_lists
from longspan._masks.block_table import BlockTable, stretched
from longspan._plan.local_split import late_share, late_tiles
from longspan._plan.plan_data import PlanData
from longspan._plan.schedule import Schedule
from longspan._plan.tile_grid import TileGrid, coverage


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Some rows of a tensor: a stretch of them, or a list. Lists are copied to a device once."""

    start: int
    stop: int
    index: Tensor | None = None
    _copies: dict[torch.device, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, index: Tensor) -> Rows:
        if not len(index):
            return cls(start=0, stop=0)
        start, stop = int(index[0]), int(index[-1]) + 1
        plain = stop - start == len(index) and bool((index.diff() == 1).all())
        return cls(start=start, stop=stop) if plain else cls(start=0, stop=len(index), index=index)

    @property
    def count(self) -> int:
        return self.stop - self.start

    def on(self, device: torch.device) -> Tensor:
        assert self.index is not None
        if device not in self._copies:
            self._copies[device] = self.index.to(device)
        return self._copies[device]

    def take(self, x: Tensor) -> Tensor:
        """Those rows of x, a view where they are a stretch."""
        return x[self.start : self.stop] if self.index is None else x.index_select(0, self.on(x.device))

    def listed(self) -> Tensor:
        """The rows, one by one."""
        return torch.arange(self.start, self.stop) if self.index is None else self.index

    def put_(self, x: Tensor, rows: Tensor) -> None:
        """x[these] = rows."""
        if self.index is None:
            x[self.start : self.stop] = rows
        else:
            x.index_copy_(0, self.on(x.device), rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrival:
    """One exchange: rows [start, stop) of the step's buffer arrive, `sent` leaves; `home[r]` are the local rows that rank r gets."""

    what: str
    start: int
    stop: int
    arriving: tuple[int, ...]
    leaving: tuple[int, ...]
    sent: Rows
    home: tuple[Rows, ...]

    @cached_property
    def in_pieces(self) -> bool:
        """Whether each rank gets a stretch of the local rows and all of them together are none: they leave without being gathered."""
        return self.sent.index is not None and all(rows.index is None for rows in self.home)


@dataclass(frozen=True, kw_only=True, eq=False)
class Home:
    """Local rows that other ranks got, part by part: where what they send back belongs."""

    parts: tuple[Tensor, ...]
    _lists: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def lists(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The parts seen from `count` local rows; copied to a device once."""
        if (count, device) not in self._lists:
            ptr, index = row_lists(self.parts, count)
            self._lists[count, device] = ptr.to(device), index.to(device)
        return self._lists[count, device]


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """The tiles that a step computes for a batch row, or for all of them. `rows`: its keys' rows in the buffer, None for all. `complete`:
    as in `longspan._kernels.protocol.Work`.
    """

    table: BlockTable
    q_tiles: Tiling
    kv_tiles: Tiling
    rows: Rows | None = None
    complete: Tensor | None = None

    @property
    def empty(self) -> bool:
        return not len(self.table.first)


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """What is computed at once. `tokens`: rows of its buffer, of which the first are those of the local rows `own`: all of the first and of
    backward's last step's, which have no arrivals then, or, in a joined schedule, those before its arrivals.
    """

    tokens: int
    own: range
    arrivals: tuple[Arrival, ...]
    parts: tuple[Part, ...]

    @property
    def empty(self) -> bool:
        return all(part.empty for part in self.parts)

    @property
    def arriving(self) -> int:
        """Rows of its buffer that arrive."""
        return self.tokens - len(self.own)

    @property
    def leaving(self) -> int:
        """Rows that are sent, of which gradients come home."""
        return sum(arrival.sent.count for arrival in self.arrivals)

    @property
    def moved(self) -> int:
        """Rows that arrive or leave, whichever are more."""
        return max(self.arriving, self.leaving)

    @cached_property
    def home(self) -> Home:
        """By arrivals, and in each by ranks."""
        return Home(parts=tuple(rows.listed() for arrival in self.arrivals for rows in arrival.home if rows.count))


@dataclass(frozen=True, kw_only=True, eq=False)
class Itinerary:
    """`last[p]`: the last step in which part p computes anything (0, the local one, if none)."""

    steps: tuple[Step, ...]
    last: tuple[int, ...]

    @cached_property
    def ending(self) -> tuple[Step, ...]:
        """The last two steps with arrivals: what they sent is added together when it has come home. Only the last one, where it would take
        more memory than what arrived did: gradients of the step before, and keys, in half as many bytes, of the last one.
        """
        last = tuple(step for step in self.steps if step.arrivals)[-2:]
        return last[-1:] if len(last) == 2 and last[1].leaving > last[0].arriving + last[1].arriving // 2 else last

    @cached_property
    def ending_home(self) -> Home:
        """Theirs, one after the other."""
        return Home(parts=tuple(part for step in self.ending for part in step.home.parts))


def itinerary(
    data: PlanData,
    block: tuple[int, int],
    heads: range | None,
    *,
    backward: bool = False,
    home: tuple[int, int] | None = None,
    merged: bool = False,
) -> Itinerary:
    """This rank's steps, for tiles of this size and (where the mask differs by head) these heads. `merged`: what arrives in a step does so
    in one exchange, however many stages there are to it. `backward`: only what a rank reads arrives (`PlanData.returns`), and stages in
    which nothing moves anywhere are left out.

    `home`: of a backward pass, the bytes of a number in keys on their way and in gradients on their way home. Local keys are then cut in
    two parts between tiles, in proportion to what each hides (`late_share`); in one part where batch rows differ, where nothing that
    arrives is computed, and where there are not two tiles to compute.
    """
    moves = data.returns if backward else data.schedule
    quiet = backward and int(moves.carried.sum()) < moves.stages
    key = (block, None if heads is None else (heads.start, heads.stop), moves is data.schedule, quiet, home, merged)
    whole = None if home is None else itinerary(data, block, heads, backward=backward, merged=merged)

    def make() -> Itinerary:
        maker = _Maker(data, moves, block, heads, quiet=quiet, merged=merged)
        return maker.make() if whole is None or home is None else maker.split(whole, home)

    return plan_cache.schedule(data, key, make)


class _Maker:
    def __init__(
        self, data: PlanData, moves: Schedule, block: tuple[int, int], heads: range | None, *, quiet: bool, merged: bool
    ) -> None:  # fmt: skip
        """`quiet`: stages in which nothing moves anywhere are left out."""
        self.data, self.moves, self.block, self.heads, self.merged = data, moves, block, heads, merged
        self.me = 0 if data.ring is None else data.mesh.coordinate[data.ring]
        self.ranks = data.inner[0].ranks
        self.tiles = plan_cache.tiles(data, block)
        self.queries = [row.queries for row in self.tiles]
        self.keys = [row.kv for row in self.tiles]
        self.q_order = [side.of_rank(self.me) for side in self.queries]
        self.q_tilings = [_tiling(side, order) for side, order in zip(self.queries, self.q_order, strict=True)]
        self.mine = {"in": moves.receiver == self.me, "out": moves.source == self.me}
        self.active = [n > 0 or not quiet for n in torch.bincount(moves.stage, minlength=moves.stages).tolist()]

    def make(self) -> Itinerary:
        s = self.moves
        first = 1 if s.joined else 0
        steps = [self._step(s.steps[0] if first else range(0), own=True)]
        steps += [self._step(group, own=False) for group in s.steps[first:] if any(self.active[stage] for stage in group)]
        last = [max([i for i, step in enumerate(steps) if not step.parts[p].empty], default=0) for p in range(self.data.rows)]
        parts = [_completed([step.parts[p] for step in steps], last[p]) for p in range(self.data.rows)]
        steps = [replace(step, parts=tuple(of_row[i] for of_row in parts)) for i, step in enumerate(steps)]
        return Itinerary(steps=tuple(steps), last=tuple(last))

    def split(self, whole: Itinerary, home: tuple[int, int]) -> Itinerary:
        """The same with the first tiles of local keys in a step of their own at the end."""
        first, *arriving = whole.steps
        if len(first.parts) > 1 or self.moves.joined or all(step.empty for step in arriving):
            return whole
        tiles = self.keys[0].of_rank(self.me)
        share = late_share(arriving[0].moved * home[0], arriving[-1].moved * home[1])
        table = first.parts[0].table
        work = coverage(torch.zeros(len(table.first), dtype=torch.int64), table.first.long(), table.last.long() + 1, len(tiles), range(1))
        largest = max(step.arriving for step in arriving) // self.block[1] if len(arriving) > 1 else None
        late = late_tiles(work[0], share, largest)
        if not late:
            return whole
        parts = [self._part(0, some, rows=None) for some in (tiles[late:], tiles[:late])]
        cut = parts[1].kv_tiles.length
        early, last = (
            Step(tokens=len(own), own=own, arrivals=(), parts=(part,))
            for own, part in zip((range(cut, first.tokens), range(cut)), parts, strict=True)
        )
        return Itinerary(steps=(early, *arriving, last), last=(len(arriving) + 1,))

    def _part(self, row: int, tiles: Tensor, *, rows: Rows | None) -> Part:
        table = self.tiles[row].table.select(self.q_order[row], tiles, heads=self.heads)
        return Part(table=table, q_tiles=self.q_tilings[row], kv_tiles=_tiling(self.keys[row], tiles), rows=rows)

    def _step(self, stages: range, *, own: bool) -> Step:
        local = self.data.inner[1].local_len(self.me) if own else 0
        arrivals, offset = [], local * len(self.keys)
        listed = [[side.of_rank(self.me)] if own else [] for side in self.keys]
        places = [[torch.arange(row * local, (row + 1) * local)] for row in range(len(self.keys))]
        for together in [stages] if self.merged and stages else [range(stage, stage + 1) for stage in stages]:
            if not any(self.active[stage] for stage in together):
                continue
            arrival, found = self._arrival(together, offset)
            for row, (tiles, place) in enumerate(found):
                listed[row].append(tiles)
                places[row].append(place + offset)
            arrivals.append(arrival)
            offset = arrival.stop
        parts = []
        for row in range(len(self.keys)):
            # Without arrivals, the keys of a batch row are its own slice of a tensor, not rows of a common buffer.
            rows = Rows.of(torch.cat(places[row])) if len(self.keys) > 1 and arrivals else None
            parts.append(self._part(row, torch.cat(listed[row]), rows=rows))
        return Step(tokens=offset, own=range(local * len(self.keys)), arrivals=tuple(arrivals), parts=tuple(parts))

    def _arrival(self, stages: range, offset: int) -> tuple[Arrival, list[tuple[Tensor, Tensor]]]:
        """An exchange, and for each batch row the tiles that it brings and where their tokens lie in it: by ranks, in each by stages."""
        s = self.moves
        now = (s.stage >= stages.start) & (s.stage < stages.stop)
        into, out = (torch.nonzero(self.mine[way] & now).flatten() for way in ("in", "out"))
        into, out = into[s.source[into].argsort(stable=True)], out[s.receiver[out].argsort(stable=True)]
        arriving, leaving = (
            torch.zeros(self.ranks, dtype=torch.int64).index_add_(0, rank[chosen], s.length[chosen]).tolist()
            for rank, chosen in ((s.source, into), (s.receiver, out))
        )
        sent = torch.zeros(sum(leaving), dtype=torch.int64)
        local = self.data.inner[1].local_len(self.me)
        for row, (tiles, place) in enumerate(self._moved(out)):
            side = self.keys[row]
            sent[place] = stretched(side.row[tiles], side.count[tiles]) + (row * local if self.data.rows > 1 else 0)
        arrival = Arrival(
            what=f"{_named(stages)} of {s.stages} ({self.data.strategy})",
            start=offset,
            stop=offset + sum(arriving),
            arriving=tuple(arriving),
            leaving=tuple(leaving),
            sent=Rows.of(sent),
            home=tuple(Rows.of(rows) for rows in sent.split(leaving)),
        )
        return arrival, self._moved(into)

    def _moved(self, chosen: Tensor) -> list[tuple[Tensor, Tensor]]:
        """For each batch row, the tiles of some moves, and where their tokens lie when all those moves follow each other."""
        s = self.moves
        row, start, length = s.row[chosen], s.start[chosen], s.length[chosen]
        offset = length.cumsum(0) - length
        found = []
        for b, side in enumerate(self.keys):
            here = row == b
            first, end = side.within(start[here], length[here])
            found.append((stretched(first, end - first), stretched(offset[here], length[here])))
        return found


def _completed(parts: list[Part], last: int) -> list[Part]:
    """The parts of a batch row, step by step, with what is complete with each before the last. Nothing, where a tile is not complete with
    the same step in all heads and batch rows.
    """
    tiles = parts[0].table.q_tiles
    done, found = torch.zeros(tiles, dtype=torch.bool), {}
    for i in range(last, -1, -1):
        table = parts[i].table
        seen = table.tiles_per_row.view(table.batch * table.heads, tiles) > 0
        found[i] = seen.all(0) & ~done
        if not torch.equal(found[i], seen.any(0) & ~done):
            return parts
        done |= found[i]
    if not bool(done.all()):
        return parts
    return [replace(part, complete=found[i]) if i < last and bool(found[i].any()) else part for i, part in enumerate(parts)]


def _named(stages: range) -> str:
    return f"stage {stages.stop}" if len(stages) == 1 else f"stages {stages.start + 1} to {stages.stop}"


def _tiling(side: TileGrid, tiles: Tensor) -> Tiling:
    """Tiles one after the other in a buffer."""
    count = side.count[tiles]
    length = int(count.sum())
    position = side.edges[tiles]
    row = count.cumsum(0) - count
    if len(tiles) and torch.equal(position, row) and torch.equal(position, torch.arange(0, length, side.block)):
        return Tiling(length=length, block=side.block)
    return Tiling(length=length, block=side.block, row=row.int(), pos=position.int(), count=count.int())
