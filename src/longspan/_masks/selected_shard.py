"""A selection over one rank's queries: which blocks they chose, as a program and as block tables over tiles of a shard.

Shapes: B batch rows or 1, C choices per batch row (1, KV heads or query heads), R rows of queries of which this rank owns tokens, N blocks
of keys of the whole sequence, T KV tiles, Q query tiles. bits [B, C, R, N / 32] int32: bit i of word j is block 32 j + i.
chosen [B, C, r, N] bool exists for a few rows r at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from longspan._masks.block_table import EMPTY, FULL, PARTIAL, BlockTable, expand_ranges
from longspan._masks.program import Program
from longspan._masks.tile_runs import join_neighbours, row_pointers
from longspan._masks.tracing import trace
from longspan._torch_modes import default_modes

_CHOSEN_AT_ONCE = 1 << 22  # elements of `chosen`


@dataclass(frozen=True, kw_only=True)
class PairForm:
    """Properties of a selection on which a shard's mask program depends: granularities, and the dims of its indices above 1."""

    granularity: int
    q_granularity: int
    heads_per_choice: int
    per_batch: bool
    per_choice: bool


@dataclass(frozen=True, eq=False)
class _ProgramKey:
    """The rest of a mask by the digest of its program; None: every pair."""

    program: Program | None

    def __hash__(self) -> int:
        return hash(None if self.program is None else self.program.key)

    def __eq__(self, other: object) -> bool:
        keys = [None if x.program is None else x.program.key for x in (self, other) if isinstance(x, _ProgramKey)]
        return len(keys) == 2 and keys[0] == keys[1]


def pair_program(rest: Program | None, form: PairForm) -> tuple[Program, tuple[int, ...]]:
    """The program of `rest & chosen`, and the origin of each tensor that it captures.

    Origins are places in the list (tensors of `rest`, bits, local row of each row of queries): bits without dims of size 1 that `form`
    does not index.
    """
    return _pair_program(_ProgramKey(rest), form)


@lru_cache(maxsize=128)
@default_modes()
def _pair_program(rest: _ProgramKey, form: PairForm) -> tuple[Program, tuple[int, ...]]:
    program = rest.program
    specs = () if program is None else program.captured
    rest_tensors = [torch.zeros((1,) * spec.ndim, dtype=spec.dtype) for spec in specs]
    bits = torch.zeros((1,) * (2 + form.per_batch + form.per_choice), dtype=torch.int32)
    local_row = torch.zeros(1, dtype=torch.int32)

    def pair(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        choice = h if form.heads_per_choice == 1 else h // form.heads_per_choice
        leading = (*((b,) if form.per_batch else ()), *((choice,) if form.per_choice else ()))
        block = kv // form.granularity
        visible = (bits[(*leading, local_row[q // form.q_granularity], block // 32)] >> (block % 32)) & 1 != 0
        return visible if program is None else program(b, h, q, kv, *rest_tensors) & visible

    traced = trace(pair, "mask", name="selected" if program is None else f"{program.name} & selected")
    assert traced.preamble is None
    places = {id(t): i for i, t in enumerate((*rest_tensors, bits, local_row))}
    return traced.program, tuple(places[id(t)] for t in traced.sources)


def chosen_blocks(indices: Tensor, blocks: int) -> Tensor:
    """indices [B, C, R, k] → chosen [B, C, R, blocks]; entries outside of the blocks choose nothing."""
    table = torch.zeros(*indices.shape[:3], blocks + 1, dtype=torch.bool, device=indices.device)
    index = torch.where((indices < 0) | (indices >= blocks), blocks, indices).long()
    return table.scatter(-1, index, True)[..., :blocks]


def chosen_bits(indices: Tensor, blocks: int) -> Tensor:
    """indices [B, C, R, k] → bits [B, C, R, ceil(blocks / 32)]."""
    batch, choices, rows, _ = indices.shape
    words = -(-blocks // 32)
    bits = torch.empty(batch, choices, rows, words, dtype=torch.int32, device=indices.device)
    weights = torch.tensor([1 << i for i in range(31)] + [-(1 << 31)], dtype=torch.int32, device=indices.device)
    step = max(1, _CHOSEN_AT_ONCE // (batch * choices * blocks))
    for start in range(0, rows, step):
        chosen = torch.nn.functional.pad(chosen_blocks(indices[:, :, start : start + step], blocks), (0, 32 * words - blocks))
        bits[:, :, start : start + step] = (chosen.unflatten(-1, (words, 32)) * weights).sum(-1, dtype=torch.int32)
    return bits


def covered(values: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Number of True entries among first[i] … last[i] of the last dim: values [..., n] → int32 [..., len(first)]."""
    sums = torch.nn.functional.pad(values.int().cumsum(-1, dtype=torch.int32), (1, 0))
    return sums[..., last + 1] - sums[..., first]


@dataclass(frozen=True, kw_only=True, eq=False)
class TileSpans:
    """The rows, or blocks, that tiles overlap: tile i overlaps first[i] … last[i], int64."""

    first: Tensor
    last: Tensor

    def to(self, device: torch.device) -> TileSpans:
        return TileSpans(first=self.first.to(device), last=self.last.to(device))


def tile_kinds(indices: Tensor, blocks: int, rows: TileSpans, spans: TileSpans) -> Tensor:
    """The kind of each tile under a selection alone: indices [B, C, R, k] → int8 [B, C, Q, T].

    A tile is full if all its rows of queries chose all its blocks of keys. rows: of query tiles; spans: blocks of KV tiles.
    """
    batch, choices = indices.shape[:2]
    order = rows.first.argsort()
    kinds = torch.empty(batch, choices, len(order), len(spans.first), dtype=torch.int8, device=indices.device)
    max_rows = max(1, _CHOSEN_AT_ONCE // (batch * choices * blocks))
    first, last = rows.first[order].tolist(), rows.last[order].tolist()
    start = 0
    while start < len(first):
        stop = start + 1
        while stop < len(first) and last[stop] - first[start] < max_rows:
            stop += 1
        tiles, low = order[start:stop], first[start]
        chosen = chosen_blocks(indices[:, :, low : max(last[start:stop]) + 1], blocks)
        local = TileSpans(first=rows.first[tiles] - low, last=rows.last[tiles] - low)
        kinds[:, :, tiles] = _kinds_of_rows(chosen, local, spans)
        start = stop
    return kinds


def _kinds_of_rows(chosen: Tensor, rows: TileSpans, blocks: TileSpans) -> Tensor:
    """The kinds of query tiles over these rows: chosen [B, C, r, N] → int8 [B, C, Q, T]."""
    in_tile = covered(chosen, blocks.first, blocks.last)  # [B, C, R, T]
    whole = blocks.last - blocks.first + 1
    some, every = (covered(x.mT, rows.first, rows.last).mT for x in (in_tile > 0, in_tile == whole))
    full = every == (rows.last - rows.first + 1)[:, None]
    return torch.where(full, FULL, torch.where(some > 0, PARTIAL, EMPTY)).to(torch.int8)


def selected_table(kinds: Tensor, rest: BlockTable, heads: int) -> BlockTable:
    """The table of `rest & selection`, whose tiles have these kinds [B, C, Q, T], for `heads` query heads."""
    kinds = kinds.cpu()
    if rest.heads > 1:
        kinds = kinds.repeat_interleave(heads // kinds.shape[1], 1)
    kinds = torch.minimum(kinds, rest.to_dense())  # EMPTY < PARTIAL < FULL
    batch, table_heads, q_tiles, kv_tiles = kinds.shape
    by_row = kinds.reshape(batch * table_heads * q_tiles, kv_tiles)
    row, column = by_row.nonzero(as_tuple=True)
    kind = by_row[row, column]
    row, first, last, kind = join_neighbours(row, column, column, kind)
    table = BlockTable(
        q_len=rest.q_len,
        kv_len=rest.kv_len,
        block=rest.block,
        batch=batch,
        heads=table_heads,
        ptr=row_pointers(row, batch * table_heads * q_tiles),
        first=first.int(),
        last=last.int(),
        kind=kind,
        tiles=(q_tiles, kv_tiles),
    )
    return table if table_heads == 1 else repeat_heads(table, heads // table_heads)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RepeatedHeads(BlockTable):
    """The block table `base` with each head `copies` times: query heads that share a choice. Not for `dataclasses.replace`."""

    base: BlockTable
    copies: int

    @cached_property
    def transposed(self) -> BlockTable:
        return repeat_heads(self.base.transposed, self.copies)


def repeat_heads(table: BlockTable, copies: int) -> BlockTable:
    """A table with each head `copies` times, one after the other."""
    if copies == 1:
        return table
    runs_per_row = table.ptr.diff().view(table.batch * table.heads, 1, table.q_tiles)
    runs_per_head = runs_per_row.sum((1, 2))
    run = expand_ranges((runs_per_head.cumsum(0) - runs_per_head).repeat_interleave(copies), runs_per_head.repeat_interleave(copies))
    ptr = runs_per_row.expand(-1, copies, -1).flatten().cumsum(0, dtype=torch.int32)
    return RepeatedHeads(
        q_len=table.q_len,
        kv_len=table.kv_len,
        block=table.block,
        batch=table.batch,
        heads=table.heads * copies,
        ptr=torch.cat([ptr.new_zeros(1), ptr]),
        first=table.first[run],
        last=table.last[run],
        kind=table.kind[run],
        tiles=table.tiles,
        base=table,
        copies=copies,
    )


def captured_in_order(origins: Sequence[int], rest: Sequence[Tensor], bits: Tensor, local_row: Tensor, form: PairForm) -> list[Tensor]:
    """The tensors of `pair_program`, in its order."""
    bits = bits if form.per_choice else bits[:, 0]
    bits = bits if form.per_batch else bits[0]
    tensors = [*rest, bits, local_row]
    return [tensors[i] for i in origins]
