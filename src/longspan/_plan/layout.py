"""Layouts: who owns which tokens of a sequence. A layout is a value; ranks that make the same one agree without talking."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

Segments = tuple[tuple[int, int], ...]  # (global start, length), in the order in which the owner holds them


@dataclass(frozen=True, kw_only=True)
class Layout:
    """`rows[b][rank]`: the segments that a rank owns, in its local order. One row serves every batch row, or there is one for each.

    Every token belongs to exactly one rank. A rank may own nothing. Over batch rows a rank owns the same number of tokens, so that
    its shard is a rectangle.
    """

    length: int
    rows: tuple[tuple[Segments, ...], ...]

    def __post_init__(self) -> None:
        if self.length < 1 or not self.rows or not self.rows[0]:
            raise ValueError(
                f"layout: expected a length and a number of ranks of 1 or more, got length {self.length}, rows {len(self.rows)}"
            )
        for b, ranks in enumerate(self.rows):
            if len(ranks) != len(self.rows[0]):
                raise ValueError(f"layout: batch row {b} is laid over {len(ranks)} ranks, row 0 over {len(self.rows[0])}")
            ends = 0
            for start, length in sorted(chain.from_iterable(ranks)):
                if length < 1 or start != ends:
                    what = "belong to nobody" if start > ends else "belong to two segments"
                    raise ValueError(f"layout: batch row {b}: tokens from {min(start, ends)} on {what}; segment ({start}, {length})")
                ends = start + length
            if ends != self.length:
                raise ValueError(f"layout: batch row {b}: segments end at {ends}, the sequence at {self.length}")
            for rank, owned in enumerate(map(_tokens, ranks)):
                if owned != self._local_lens[rank]:
                    raise ValueError(
                        f"layout: rank {rank} owns {owned} tokens of batch row {b} and {self._local_lens[rank]} of row 0; a shard is a "
                        "tensor, so that they must be as many in each row"
                    )

    @cached_property
    def _local_lens(self) -> tuple[int, ...]:
        return tuple(map(_tokens, self.rows[0]))

    @property
    def ranks(self) -> int:
        return len(self.rows[0])

    def segments(self, rank: int, row: int = 0) -> Segments:
        """What a rank owns of a batch row."""
        return self.rows[row if len(self.rows) > 1 else 0][rank]

    def local_len(self, rank: int) -> int:
        return self._local_lens[rank]

    def positions(self, rank: int) -> Tensor:
        """Global positions of a rank's tokens in local order, int64: [S_local], or [B, S_local] where batch rows differ."""
        rows = torch.stack([_positions(ranks[rank]) for ranks in self.rows])
        return rows[0] if len(self.rows) == 1 else rows

    def merged(self, groups: Sequence[Sequence[int]]) -> Layout:
        """Groups of ranks as one rank each, their segments one after the other."""
        rows = tuple(tuple(tuple(s for r in group for s in ranks[r]) for group in groups) for ranks in self.rows)
        return Layout(length=self.length, rows=rows)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(repr((self.length, self.rows)).encode()).hexdigest()


def _tokens(segments: Segments) -> int:
    return sum(length for _, length in segments)


def _positions(segments: Segments) -> Tensor:
    if not segments:
        return torch.empty(0, dtype=torch.int64)
    start, length = torch.tensor(segments).unbind(1)
    before = length.cumsum(0) - length
    return torch.arange(_tokens(segments)) + (start - before).repeat_interleave(length)
