"""Relayout: tensors move from one layout of tokens to another, or to all tokens of some heads or batch rows, under autograd.

A relayout is a permutation of rows over all ranks; its gradient is the permutation back.

Legend: B batch rows of the layouts (1 if all batch rows are laid out alike), L tokens, S a rank's tokens, N ranks, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan._comm.mesh import Mesh
from longspan._comm.row_moves import RowMoves, move_rows
from longspan._plan.layout import Layout


@dataclass(frozen=True, kw_only=True)
class HeadsLayout:
    """All tokens of some heads: rank r owns heads [r · H / N, (r + 1) · H / N) of a sequence of `length` tokens, in order."""

    length: int
    ranks: int

    @property
    def digest(self) -> str:
        return f"heads over {self.ranks}"

    def local_len(self, rank: int) -> int:
        return self.length


@dataclass(frozen=True, kw_only=True)
class RowsLayout:
    """Whole sequences of some batch rows: rank r owns rows [r · B / N, (r + 1) · B / N), rounded down, of `batch` rows."""

    length: int
    ranks: int
    batch: int

    @property
    def digest(self) -> str:
        return f"{self.batch} rows over {self.ranks}"

    def local_len(self, rank: int) -> int:
        return self.length

    def local_rows(self, rank: int) -> range:
        """The batch rows of a rank."""
        return range(rank * self.batch // self.ranks, (rank + 1) * self.batch // self.ranks)


Placement = Layout | HeadsLayout | RowsLayout


@dataclass(frozen=True, kw_only=True)
class Relayout:
    """A move between two placements of one sequence.

    `dim`: of tokens. `heads_dim`: of heads; None if both placements are layouts of tokens. Both count from 0.
    """

    mesh: Mesh
    before: Placement
    after: Placement
    dim: int
    heads_dim: int | None = None

    @property
    def batch_rows(self) -> int:
        """Batch rows that are laid out differently, B: then dim 0 is the batch. 1: all are laid out alike."""
        return max(_batch_rows(self.before), _batch_rows(self.after))

    def moves(self, device: torch.device, *, back: bool) -> RowMoves:
        """This rank's moves, or the moves `back`. A row is a token, or one rank's heads of a token."""
        before, after = (self.after, self.before) if back else (self.before, self.after)
        return RowMoves.between(self.mesh, self._ids(before), self._ids(after), device)

    def _ids(self, placement: Placement) -> list[Tensor]:
        ranks, rows, length = self.mesh.size, self.batch_rows, placement.length
        if isinstance(placement, HeadsLayout):
            return [torch.arange(rows * length) * ranks + rank for rank in range(ranks)]
        if isinstance(placement, RowsLayout):
            owned = [placement.local_rows(rank) for rank in range(ranks)]
            return [torch.arange(r.start * length, r.stop * length) for r in owned]
        first = torch.arange(rows).unsqueeze(1) * length
        tokens = [(first + torch.atleast_2d(placement.positions(rank))).flatten() for rank in range(ranks)]
        if self.heads_dim is None:
            return tokens
        return [(ids.unsqueeze(1) * ranks + torch.arange(ranks)).flatten() for ids in tokens]

    def to_rows(self, x: Tensor, placement: Placement) -> Tensor:
        """x as rows: [B · S, ...], or [B · S · N, H / N, ...] where heads move and the placement holds all of them."""
        x = x.movedim(self._front, tuple(range(len(self._front))))
        if self.heads_dim is not None and isinstance(placement, Layout):
            x = x.unflatten(len(self._front) - 1, (self.mesh.size, -1)).flatten(len(self._front) - 2, len(self._front) - 1)
        return x.flatten(0, 1) if self._batched else x

    def from_rows(self, rows: Tensor, placement: Placement) -> Tensor:
        """The inverse of `to_rows`, contiguous."""
        tokens = placement.local_len(self.mesh.rank)
        if self._batched:
            local = placement.local_rows(self.mesh.rank) if isinstance(placement, RowsLayout) else range(self.batch_rows)
            rows = rows.unflatten(0, (len(local), -1))
        if self.heads_dim is not None and isinstance(placement, Layout):
            at = len(self._front) - 2
            rows = rows.unflatten(at, (tokens, self.mesh.size)).flatten(at + 1, at + 2)
        return rows.movedim(tuple(range(len(self._front))), self._front).contiguous()

    @property
    def _batched(self) -> bool:
        return self.batch_rows > 1

    @property
    def _front(self) -> tuple[int, ...]:
        """Dims that become the first ones: the batch, the tokens, the heads."""
        return (*([0] if self._batched else []), self.dim, *([] if self.heads_dim is None else [self.heads_dim]))


def _batch_rows(placement: Placement) -> int:
    if isinstance(placement, HeadsLayout):
        return 1
    return placement.batch if isinstance(placement, RowsLayout) else len(placement.rows)


def relayout(x: Tensor, move: Relayout, moves: Callable[[bool], RowMoves]) -> Tensor:
    """x in the placement `move.before` → x in the placement `move.after`. `moves(back)`: `move.moves` of x's device, cached."""
    rows = move.to_rows(x, move.before)
    moved: Tensor = _MoveRows.apply(rows, move, moves, False)  # type: ignore[no-untyped-call]
    return move.from_rows(moved, move.after)


class _MoveRows(torch.autograd.Function):
    """`move_rows` by a relayout's moves, or by those `back`. Backward: the moves in the other direction, differentiable again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, move: Relayout, moves: Callable[[bool], RowMoves], back: bool) -> Tensor:
        ctx.move, ctx.moves, ctx.back = move, moves, back
        before, after = (move.after, move.before) if back else (move.before, move.after)
        fields = {"from": before.digest[:12], "to": after.digest[:12]}
        what = "relayout, backward pass" if back else "relayout"
        return move_rows(move.mesh, rows, moves(back), what=what, fields=fields)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _MoveRows.apply(grad, ctx.move, ctx.moves, not ctx.back), None, None, None  # type: ignore[no-untyped-call]
