"""Layouts: which rank owns which tokens of a sequence. A layout is a value: ranks that make the same one agree without communication."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from longspan._torch_modes import default_modes

Segments = tuple[tuple[int, int], ...]  # (global start, length), in the owner's local order


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which rank owns which tokens.

    Every token belongs to exactly one rank. A rank may own no tokens. A rank owns the same number of tokens of every batch row, so that its
    shard is a tensor.

    Attributes:
        length: Tokens of the sequence.
        rows: `rows[b][rank]` is the tuple of segments (global start, length) that a rank owns of batch row b, in its local order. One row
            serves every batch row, or there is one for each.

    Raises:
        ValueError: A token belongs to no rank or to two, or the batch rows do not fit together.

    Example:
        >>> import longspan as ls
        >>> layout = ls.Layout(length=10, rows=((((0, 2), (8, 2)), ((2, 6),)),))
        >>> layout.positions(0)
        tensor([0, 1, 8, 9])
        >>> ls.plan(ls.causal(), 10, ls.Mesh.abstract(2), layout=layout, strategy="ring").local_len
        4
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
                raise ValueError(f"layout: expected {len(self.rows[0])} ranks in every batch row, got {len(ranks)} in row {b}")
            self._check_segments(b, ranks)
            for rank, owned in enumerate(map(_tokens, ranks)):
                if owned != self._local_lens[rank]:
                    raise ValueError(
                        f"layout: rank {rank} owns {owned} tokens of batch row {b} and {self._local_lens[rank]} of row 0; a shard is a "
                        "tensor: give the rank equally many tokens of each row"
                    )

    def _check_segments(self, batch_row: int, ranks: tuple[Segments, ...]) -> None:
        end = 0
        for start, length in sorted(chain.from_iterable(ranks)):
            if length < 1 or start != end:
                what = "belong to nobody" if start > end else "belong to two segments"
                raise ValueError(f"layout: batch row {batch_row}: tokens from {min(start, end)} on {what}; segment ({start}, {length})")
            end = start + length
        if end != self.length:
            raise ValueError(f"layout: batch row {batch_row}: expected segments up to token {self.length}, got them up to {end}")

    @cached_property
    def _local_lens(self) -> tuple[int, ...]:
        return tuple(map(_tokens, self.rows[0]))

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.rows[0])

    def segments(self, rank: int, row: int = 0) -> Segments:
        """The segments that a rank owns of a batch row."""
        return self.rows[row if len(self.rows) > 1 else 0][rank]

    def local_len(self, rank: int) -> int:
        """Number of tokens that a rank owns."""
        return self._local_lens[rank]

    @default_modes()
    def positions(self, rank: int) -> Tensor:
        """Global positions of a rank's tokens in local order, int64: [S_local], or [B, S_local] where batch rows differ."""
        by_row = torch.stack([_positions(ranks[rank]) for ranks in self.rows])
        return by_row[0] if len(self.rows) == 1 else by_row

    @default_modes()
    def blocks(self, rank: int, block: int) -> Tensor:
        """The blocks of `block` tokens of which a rank owns tokens, by first appearance in its local order [n], int64.

        Only for layouts with one row for all batch rows.
        """
        numbers = self.positions(rank) // block
        values, place = numbers.unique(return_inverse=True)
        first = torch.full((len(values),), len(numbers)).scatter_reduce(0, place, torch.arange(len(numbers)), "amin")
        return values[first.argsort()]

    def merged(self, groups: Sequence[Sequence[int]]) -> Layout:
        """The layout over groups of ranks: each group as one rank that owns its members' segments, member by member."""
        rows = tuple(tuple(tuple(s for r in group for s in ranks[r]) for group in groups) for ranks in self.rows)
        return Layout(length=self.length, rows=rows)

    @cached_property
    def digest(self) -> str:
        """A digest of the layout's contents, the same on every rank."""
        return hashlib.sha256(repr((self.length, self.rows)).encode()).hexdigest()


def _tokens(segments: Segments) -> int:
    return sum(length for _, length in segments)


def _positions(segments: Segments) -> Tensor:
    if not segments:
        return torch.empty(0, dtype=torch.int64)
    start, length = torch.tensor(segments).unbind(1)
    before = length.cumsum(0) - length
    return torch.arange(_tokens(segments)) + (start - before).repeat_interleave(length)
