"""A fixed order in which key tiles are added to dQ, so that its bits do not change from run to run.

CTAs take items, a key tile each, from a counter, and each query tile of dQ accumulates them in the order in which they are taken. A CTA
waits only for CTAs that took their item earlier, so that the first never waits and there is no deadlock, however many CTAs run at once.

Key tiles are taken from the first to the last. An item walks its query tiles from the last to the first, at each tile through some of the
query heads of its KV head. It does not wait if items before it reach its queries earlier:

  mask      items that start together                                        query heads at each tile
  causal    walk the same queries one after the other, from the last to      all: with one head after the other, an item would reach the
            their diagonal; the longest items come first                     second head before the longer items that add to it first
  window    begin with queries that no item before them sees                 one: until a query tile is visited again, with all heads four
                                                                             times as many others are, and it leaves L2

Two kinds of launches have an order of their own (`OrderChoice`):

- Few items per CTA (`upward`), causal 2k for example: all CTAs begin at once, and would begin with the last query tile. Key tiles of the
  first wave are taken from the last to the first, and each begins with its diagonal and walks up to the diagonal of the wave's last key
  tile, where others have not begun; then it walks from the last query tile down. The shortest items reach the last query tile first, one
  step after the other, and the next wave follows them. Number of the step in which a tile is computed, four CTAs per head:

                  key tile 0    1    2    3   |  4    5    6    7
    query tile 0           0
               1           1    0
               2           2    1    0
               3           3    2    1    0
               4           7    6    5    4      8
               5           6    5    4    3      7    8
               6           5    4    3    2      6    7    8
               7           4    3    2    1      5    6    7    8

- A few key tiles that most queries see (`long`), the first keys beside a window for example. Their items may take nearly as long
  as the launch; other items would wait for them. They are taken with the first wave, behind its other items. They walk upwards from the
  first queries of the wave after it, `chunk` query tiles at a time, each chunk through one head after the other, as the items beside them
  do, and at the end through the queries of the first wave.

In `longspan.invariant()`, dK and dV are sums in the order of the plain walk: all query heads of a KV head at each tile.
`hopper.backward_dq` has the bits of dQ (BY_BLOCK).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from heapq import heapreplace
from typing import NamedTuple

import torch
from torch import Tensor

from longspan._derived_cache import DerivedCache
from longspan._kernels.gpu import launch
from longspan._kernels.hopper.dkv_producer import DOWN_LEG, MASKED_LEG
from longspan._kernels.hopper.item_order import outlier_tiles
from longspan._kernels.hopper.makespan import REFERENCE_CTAS, finish_times
from longspan._kernels.tiling import Tiling
from longspan._masks.block_table import BlockTable, expand_ranges

MAX_TILES = 2**22  # tiles of a table: one int32 each, counted once (0.4 s for 2 million)
# Mean query tiles of an item. With fewer, two kernels are faster: documents of ~512 tokens (5.1 tiles) 1.03 of the default's speed, ordered
# 1.00; documents of 200 to 4,000 tokens (12 tiles) are faster in one.
MIN_ITEM_TILES = 6
# Least `OrderChoice.efficiency` for which an order beats a separate dQ kernel. H200, D128, its speed over that with the kernel: 0.96 at an
# efficiency of 0.68 (causal 2k, 16 heads, plain order; 1.05 in prepared calls), 1.09 at 0.87 (documents, invariant), 1.03 at 0.88 (causal
# 4k, 32 heads over 8), 1.09 at 0.84 and 1.08 at 0.92 (first keys and a window, 16k and 32k), 1.19 at 1 (causal 2k).
MIN_EFFICIENCY = 0.8
MIN_EFFICIENCY_SCORED = 0.75  # with a score mod, which that kernel evaluates a second time
# In the time of a tile of one head: of a step behind the same step of another CTA; and until a query tile that all CTAs leave is no longer
# in L2. Loads and additions of a tile that is not there take 1.65 times as long as its products.
_LAG = 1.0
_L2_GAP = 3.5
_L2_MISS_COST = 0.65
_SIMULATED_TILES = 2**15  # of the first items that are simulated (20 ms)
_GOOD_EFFICIENCY = 0.95  # for which no other order is simulated
_MIN_GAIN = 0.01  # of efficiency, for which a later candidate is taken
_LAST_PHASES = 2**30  # greater than the index of any query tile
_ALIKE = 0.9  # mean over most query tiles of an item, from which on items have the same length


class OrderChoice(NamedTuple):
    """How items are taken, and how they walk their query tiles.

    Attributes:
        together: Query heads at each query tile.
        all_heads: Whether items of all KV heads are taken together. Items of the same length need not be: those of fewer heads read
            less at once, which stays in L2.
        efficiency: The estimated time with the longest items first and no waits, over that of this order.
        wave: Key tiles that are taken first, from the last to the first if there are no `long` ones.
        upward: Query tiles below this number are walked first, upwards.
        long: Key tiles that are taken behind those of `wave`.
        begin: The query tile with which walks of `long` key tiles begin.
        chunk: Query tiles that they walk at a time.
    """

    together: int
    all_heads: bool
    efficiency: float = 0.0
    wave: int = 0
    upward: int = 0
    long: tuple[int, ...] = ()
    begin: int = 0
    chunk: int = 1

    def taken(self, key_tiles: int) -> Tensor:
        """Key tiles in the order in which they are taken, [key_tiles] int64."""
        tiles = torch.arange(key_tiles)
        others = tiles[~torch.isin(tiles, torch.tensor(self.long, dtype=torch.int64))]
        wave, after = others[: self.wave], others[self.wave :]
        return torch.cat([wave, torch.tensor(self.long, dtype=torch.int64), after] if self.long else [wave.flip(0), after])

    def phases(self, key_tile: Tensor, query_tile: Tensor) -> tuple[Tensor, Tensor]:
        """(phase in which an item of key tile `key_tile` walks a query tile, whether upwards). In a phase, heads come one after the
        other, `together` at a time.
        """
        up = query_tile < self.upward
        phase = (~up).long()
        if self.long:
            is_long = self.is_long(key_tile)
            after, before = (query_tile - self.begin) // self.chunk, query_tile // self.chunk
            chunk = torch.where(query_tile >= self.begin, after, before + _LAST_PHASES)
            phase, up = torch.where(is_long, chunk, phase), up | is_long
        return phase, up

    def is_long(self, key_tile: Tensor) -> Tensor:
        return torch.isin(key_tile, torch.tensor(self.long, dtype=torch.int64))

    def cuts(self, query_tiles: int) -> tuple[Tensor, Tensor]:
        """(query tiles at which phases of most key tiles begin, those of `long` ones), ascending."""
        chunks = torch.cat([torch.arange(0, self.begin, self.chunk), torch.arange(self.begin, max(self.begin, query_tiles), self.chunk)])
        return torch.tensor([self.upward]), chunks if self.long else chunks[:0]


class DqOrder(NamedTuple):
    """int32 tensors on the device.

    order: rows of (batch row, head group, key tile) in launch order. legs: the walk of each of these rows in parts, which consist of tiles
    of one kind, contiguous in memory (`dkv_producer.LEG_FIELDS`). ptr: where in `legs` each row begins, then their number. before: for each
    query tile of a table row, ascending, the number of key tiles that are added to it earlier.
    """

    order: Tensor
    ptr: Tensor
    legs: Tensor
    before: Tensor


_orders: DerivedCache[BlockTable, DqOrder] = DerivedCache(16)  # by device, query heads per item, choice and tiling of queries
_choices: DerivedCache[BlockTable, OrderChoice] = DerivedCache(16)  # by items per key tile, query heads per item, whether invariant


def ordered_dq_pays(table: BlockTable, items_per_tile: int, shared: int, *, scored: bool, invariant: bool = False) -> bool:
    """Whether ordered accumulation is faster than a separate dQ kernel.

    items_per_tile: items of each key tile, one per head group. shared: query heads of an item. scored: with a score mod.
    """
    tiles = sum(table.counts()[1:])
    if tiles > MAX_TILES or tiles < MIN_ITEM_TILES * table.transposed.rows:
        return False
    efficiency = choose_order(table.transposed, items_per_tile, shared, invariant=invariant).efficiency
    return efficiency >= (MIN_EFFICIENCY_SCORED if scored else MIN_EFFICIENCY)


def choose_order(table: BlockTable, items_per_tile: int, shared: int, *, invariant: bool = False) -> OrderChoice:
    """The fastest order of a table whose rows are key tiles. Cached per table. Arguments as of `ordered_dq_pays`."""
    key = (items_per_tile, shared, invariant)
    return _choices.get(table, key, partial(_simulate_orders, table, items_per_tile, shared, invariant))


def heads_of_tables(table: BlockTable, shared: int) -> int:
    """Query heads of a KV head that have one table, and are walked together in `longspan.invariant()`."""
    return 1 if table.heads > 1 else shared


def _simulate_orders(table: BlockTable, items_per_tile: int, shared: int, invariant: bool) -> OrderChoice:
    """By the first query tiles of the first batch row and head."""
    tiles = _FirstTiles.of(table)
    ctas = max(1, REFERENCE_CTAS // items_per_tile)
    most = heads_of_tables(table, shared)
    all_heads = len(tiles.query) < _ALIKE * table.q_tiles * max(tiles.lengths, default=0)
    best = OrderChoice(most, all_heads)
    for choice in (best,) if invariant else _candidates(table, tiles, ctas, most, all_heads):
        efficiency = _efficiency(tiles, choice, ctas, shared)
        if efficiency > best.efficiency + _MIN_GAIN:
            best = choice._replace(efficiency=efficiency)
        if efficiency >= _GOOD_EFFICIENCY:
            break
    return best


class _FirstTiles(NamedTuple):
    """The tiles of the first batch row and head of a table by key tiles, in ascending order: the rows `key` and `query`, int64.

    lengths: query tiles of each key tile.
    """

    key: Tensor
    query: Tensor
    lengths: list[int]

    @classmethod
    def of(cls, table: BlockTable) -> _FirstTiles:
        runs = int(table.ptr[table.q_tiles])
        counts = (table.last[:runs] - table.first[:runs] + 1).long()
        lengths = table.tiles_per_row[: table.q_tiles].long()
        key = torch.repeat_interleave(torch.arange(table.q_tiles), lengths)
        return cls(key, expand_ranges(table.first[:runs].long(), counts), lengths.tolist())


def _candidates(table: BlockTable, tiles: _FirstTiles, ctas: int, most: int, all_heads: bool) -> Sequence[OrderChoice]:
    """Orders to compare. ctas: of one head group."""
    heads = sorted({1, most}, reverse=True)
    choices = [OrderChoice(together, all_heads) for together in heads]
    long = tuple(outlier_tiles(torch.tensor(tiles.lengths)).tolist())
    wave = max(0, ctas - len(long))
    others = [tile for tile in range(table.q_tiles) if tile not in long]
    next_queries = tiles.query[tiles.key == others[wave]] if wave < len(others) else tiles.query[:0]
    begin = int(next_queries.min()) if len(next_queries) else table.kv_tiles
    if not long:
        return [*choices, OrderChoice(most, True, wave=wave, upward=begin)]
    chunk = max(1, sum(tiles.lengths[tile] for tile in others) // max(1, len(others)))
    # First, where it is better than all others: with the long items in the plain order, others wait for them.
    return [*(OrderChoice(n, True, wave=wave, long=long, begin=begin, chunk=chunk) for n in reversed(heads)), *choices]


def _efficiency(tiles: _FirstTiles, choice: OrderChoice, ctas: int, shared: int) -> float:
    """`OrderChoice.efficiency`. ctas: of one head group."""
    taken = choice.taken(len(tiles.lengths))
    lengths = torch.tensor(tiles.lengths)[taken]
    simulated = max(1, int((lengths.cumsum(0) <= _SIMULATED_TILES).sum()))
    rounds = shared // choice.together
    phase, up = choice.phases(tiles.key, tiles.query)
    nth = torch.empty_like(taken).scatter_(0, taken, torch.arange(len(taken)))[tiles.key]
    chosen = nth < simulated
    nth, phase, query = (t[chosen].repeat(rounds) for t in (nth, phase, tiles.query))
    up = up[chosen].repeat(rounds)
    head = torch.arange(rounds).repeat_interleave(int(chosen.sum()))
    in_order = lexical_order(nth, phase, head, torch.where(up, query, -query))
    width = int(query.max()) + 1 if len(query) else 1
    walked = (head * width + query)[in_order].tolist()
    ends = torch.bincount(nth, minlength=simulated).cumsum(0).tolist()
    walks = [walked[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    least = max(finish_times(sorted(lengths[:simulated].double().tolist(), reverse=True), [0.0] * ctas, cost=0.0))
    end = _simulated_end(walks, width * rounds, ctas, choice.together) / rounds
    return least / max(1.0, end)


def _simulated_end(walks: list[list[int]], slots: int, ctas: int, heads: int) -> float:
    """When the last of so many CTAs has added to its last query tile, in the time of a tile of `heads` heads.

    walks: for each item in launch order, numbers below `slots` of query tiles of `heads` heads.
    """
    lag, far = _LAG / heads, _L2_GAP / heads
    free, added = [0.0] * ctas, [-lag] * slots
    steps = misses = 0
    for walk in walks:
        time = free[0]
        for slot in walk:
            before, time = added[slot], time + 1
            if before + lag > time:
                time = before + lag
            elif before >= 0 and time - before > far:
                misses += 1
            added[slot] = time
        steps += len(walk)
        heapreplace(free, time)
    return max(free) * (1 + _L2_MISS_COST * misses / max(1, steps))


def lexical_order(*keys: Tensor) -> Tensor:
    """Indices in the order of the first key; of the second where the first are equal; and so on."""
    order = torch.arange(len(keys[0]))
    for key in reversed(keys):
        order = order[torch.argsort(key[order], stable=True)]
    return order


def dq_order(
    table: BlockTable, queries: Tiling, choice: OrderChoice, shared: int, device: torch.device, *, positions: bool = False
) -> DqOrder:  # fmt: skip
    """The order for a table whose rows are key tiles. Cached per table. shared: query heads of an item. positions: as of
    `launch.split_runs`.
    """
    key = (device, shared, choice, queries.name, positions)
    return _orders.get(table, key, partial(_build_order, table, queries, choice, shared, device, positions))


def _build_order(
    table: BlockTable, queries: Tiling, choice: OrderChoice, shared: int, device: torch.device, positions: bool
) -> DqOrder:  # fmt: skip
    taken = choice.taken(table.q_tiles)
    groups = table.batch * max(1, table.heads // shared)
    # Each key tile for all batch rows and head groups.
    order = torch.arange(groups * table.q_tiles).view(groups, table.q_tiles)[:, taken].mT.flatten()
    runs = _cut_runs(table, launch.facts(queries), choice, positions)
    return DqOrder(*launch.to_device([order, *_legs(table, runs, choice, shared), _count_earlier(table, taken)], device))


class _Runs(NamedTuple):
    """Runs of tiles of one kind, in the order of rows and tiles, int64. row: of the table."""

    row: Tensor
    first: Tensor
    last: Tensor
    masked: Tensor


def _cut_runs(table: BlockTable, queries: launch.TilingFacts, choice: OrderChoice, positions: bool) -> _Runs:
    """The table's runs, each of which is in one phase."""
    parts, (cuts, long_cuts) = [], choice.cuts(table.kv_tiles)
    for masked, runs in enumerate(launch.split_runs(table, queries, positions=positions)):
        row, first, last = launch.rows_of(runs, table.rows), runs.first.long(), runs.last.long()
        is_long = choice.is_long(row % max(1, table.q_tiles))
        for chosen, at in ((~is_long, cuts), (is_long, long_cuts)):
            part = launch.cut_runs(row[chosen], first[chosen], last[chosen], at)
            parts.append(_Runs(*part, torch.full_like(part[0], masked)))
    together = _Runs(*(torch.cat(arrays) for arrays in zip(*parts, strict=True)))
    order = lexical_order(together.row, together.first)
    return _Runs(*(array[order] for array in together))


def _legs(table: BlockTable, runs: _Runs, choice: OrderChoice, shared: int) -> tuple[Tensor, Tensor]:
    """(ptr, legs) of `DqOrder`."""
    tiles, per_head = max(1, table.q_tiles), table.heads > 1
    groups, together = (table.heads // shared, 1) if per_head else (1, choice.together)
    counts = runs.last - runs.first + 1
    before = counts.cumsum(0) - counts
    h, tile = runs.row // tiles % table.heads, runs.row % tiles
    item = (runs.row // (tiles * table.heads) * groups + h // shared) * tiles + tile
    phase, up = choice.phases(tile, runs.first)
    head = h % shared
    flags = runs.masked * MASKED_LEG.value + (~up) * DOWN_LEG.value
    legs = torch.stack([runs.first, runs.last, flags, head, torch.full_like(h, together), before], 1)
    if not per_head:  # the same legs for each of several groups of heads
        rounds = shared // together
        head = (torch.arange(rounds) * together).repeat_interleave(len(legs))
        legs, item, phase, up = legs.repeat(rounds, 1), item.repeat(rounds), phase.repeat(rounds), up.repeat(rounds)
        legs[:, 3] = head
    order = lexical_order(item, phase, head, torch.where(up, legs[:, 0], -legs[:, 0]))
    ends = torch.bincount(item, minlength=table.batch * groups * table.q_tiles).cumsum(0)
    return torch.cat([torch.zeros(1, dtype=torch.int64), ends]), legs[order].flatten()


def _count_earlier(table: BlockTable, taken: Tensor) -> Tensor:
    """For each tile of each row, the number of rows of the same batch row and head that have it and are taken earlier."""
    height = max(1, table.q_tiles)
    row = torch.repeat_interleave(torch.arange(table.rows), table.tiles_per_row)
    column = row // height * table.kv_tiles + expand_ranges(table.first.long(), (table.last - table.first + 1).long())
    nth_taken = torch.empty_like(taken).scatter_(0, taken, torch.arange(len(taken)))
    in_order = torch.argsort(column * height + nth_taken[row % height])
    begins = torch.cat([torch.ones(min(1, len(row)), dtype=torch.bool), column[in_order].diff() != 0])
    nth = torch.arange(len(row))
    before = torch.empty_like(nth)
    before[in_order] = nth - torch.where(begins, nth, 0).cummax(0).values
    return before
