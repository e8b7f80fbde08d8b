"""A selection over one rank's queries: which blocks they chose, as a program and as block tables over tiles of a shard.

Shapes: B batch rows or 1, C choices per batch row (1, KV heads or query heads), R rows of queries of which this rank owns tokens, N blocks
of keys of the whole sequence, T KV tiles, Q query tiles. chosen [B, C, R, N] bool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from longspan._masks.block_table import EMPTY, FULL, PARTIAL, BlockTable
from longspan._masks.program import Program
from longspan._masks.tile_runs import join_neighbours, row_pointers
from longspan._masks.tracing import trace


@dataclass(frozen=True, kw_only=True)
class PairForm:
    """What a shard's mask program depends on besides the rest of the mask: the selection's granularities and which dims it indexes."""

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

    Origins are places in the list (tensors of `rest`, chosen, local row of each row of queries): chosen without dims of size 1 that `form`
    does not index.
    """
    return _pair_program(_ProgramKey(rest), form)


@lru_cache(maxsize=128)
def _pair_program(rest: _ProgramKey, form: PairForm) -> tuple[Program, tuple[int, ...]]:
    program = rest.program
    specs = () if program is None else program.captured
    rest_tensors = [torch.zeros((1,) * spec.ndim, dtype=spec.dtype) for spec in specs]
    chosen = torch.zeros((1,) * (2 + form.per_batch + form.per_choice), dtype=torch.bool)
    local_row = torch.zeros(1, dtype=torch.int32)

    def pair(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        choice = h if form.heads_per_choice == 1 else h // form.heads_per_choice
        leading = (*((b,) if form.per_batch else ()), *((choice,) if form.per_choice else ()))
        visible = chosen[(*leading, local_row[q // form.q_granularity], kv // form.granularity)]
        return visible if program is None else program(b, h, q, kv, *rest_tensors) & visible

    traced = trace(pair, "mask", name="selected" if program is None else f"{program.name} & selected")
    assert traced.preamble is None
    places = {id(t): i for i, t in enumerate((*rest_tensors, chosen, local_row))}
    return traced.program, tuple(places[id(t)] for t in traced.sources)


def chosen_blocks(indices: Tensor, blocks: int) -> Tensor:
    """indices [B, C, R, k] → chosen [B, C, R, blocks]; entries outside of the blocks choose nothing."""
    table = torch.zeros(*indices.shape[:3], blocks + 1, dtype=torch.bool, device=indices.device)
    index = torch.where((indices < 0) | (indices >= blocks), blocks, indices).long()
    return table.scatter(-1, index, True)[..., :blocks]


def covered(values: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """How many of the entries first[i] … last[i] of the last dim are True: values [..., n] → int32 [..., len(first)]."""
    sums = torch.nn.functional.pad(values.int().cumsum(-1, dtype=torch.int32), (1, 0))
    return sums[..., last + 1] - sums[..., first]


@dataclass(frozen=True, kw_only=True, eq=False)
class TileSpans:
    """The rows, or blocks, that tiles overlap: tile i overlaps first[i] … last[i], int64."""

    first: Tensor
    last: Tensor

    def to(self, device: torch.device) -> TileSpans:
        return TileSpans(first=self.first.to(device), last=self.last.to(device))


def tile_kinds(chosen: Tensor, rows: TileSpans, blocks: TileSpans) -> Tensor:
    """The kind of each tile under a selection alone: int8 [B, C, Q, T].

    A tile is full if all its rows of queries chose all its blocks of keys.
    """
    in_tile = covered(chosen, blocks.first, blocks.last)  # [B, C, R, T]
    whole = blocks.last - blocks.first + 1
    some, every = (covered(x.mT, rows.first, rows.last).mT for x in (in_tile > 0, in_tile == whole))
    full = every == (rows.last - rows.first + 1)[:, None]
    return torch.where(full, FULL, torch.where(some > 0, PARTIAL, EMPTY)).to(torch.int8)


def selected_table(kinds: Tensor, rest: BlockTable, heads: int) -> BlockTable:
    """The table of `rest & selection`, whose tiles have these kinds [B, C, Q, T], for `heads` query heads."""
    kinds = kinds.cpu()
    if kinds.shape[1] > 1 or rest.heads > 1:
        kinds = kinds.repeat_interleave(heads // kinds.shape[1], 1)
    kinds = torch.minimum(kinds, rest.to_dense())  # EMPTY < PARTIAL < FULL
    batch, table_heads, q_tiles, kv_tiles = kinds.shape
    by_row = kinds.reshape(batch * table_heads * q_tiles, kv_tiles)
    row, column = by_row.nonzero(as_tuple=True)
    kind = by_row[row, column]
    row, first, last, kind = join_neighbours(row, column, column, kind)
    return BlockTable(
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


def captured_in_order(origins: Sequence[int], rest: Sequence[Tensor], chosen: Tensor, local_row: Tensor, form: PairForm) -> list[Tensor]:
    """The tensors of `pair_program`, in its order."""
    chosen = chosen if form.per_choice else chosen[:, 0]
    chosen = chosen if form.per_batch else chosen[0]
    tensors = [*rest, chosen, local_row]
    return [tensors[i] for i in origins]
