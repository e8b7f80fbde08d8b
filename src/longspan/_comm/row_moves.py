"""Rows that change owners: one all-to-all per axis of a mesh, computed on every rank without communication.

Legend: a row has an id, unique over all ranks. n rows that a rank holds before, m rows that it holds after the moves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan._comm.agreement import CallDescription, agree
from longspan._comm.mesh import Mesh


@dataclass(frozen=True, kw_only=True, eq=False)
class Hop:
    """One all-to-all along an axis. `order`: the rows to send, grouped by receiver. `sent`, `received`: numbers of rows by rank."""

    axis: int
    order: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowMoves:
    """One rank's part of a move of rows: its hops, and the order [m] of the rows received last."""

    hops: tuple[Hop, ...]
    order: Tensor

    @staticmethod
    def between(mesh: Mesh, before: Sequence[Tensor], after: Sequence[Tensor], device: torch.device) -> RowMoves:
        """The moves after which each rank r holds the rows `after[r]`, in that order.

        before, after: ids of each rank's rows, int64. Together they are 0, 1, … without gaps, both before and after.
        """
        owner = torch.empty(sum(map(len, after)), dtype=torch.int64)
        for rank, ids in enumerate(after):
            owner[ids] = rank
        held, hops = list(before), []
        sizes = [axis.size for axis in mesh.axes]
        for axis in reversed(range(len(sizes))):
            hop, held = _hop(mesh, axis, math.prod(sizes[axis + 1 :]), held, owner)
            hops.append(Hop(axis=axis, order=hop.order.to(device), sent=hop.sent, received=hop.received))
        order = held[mesh.rank].argsort()
        place = torch.searchsorted(held[mesh.rank][order], after[mesh.rank])
        return RowMoves(hops=tuple(hops), order=order[place].to(device))


def _hop(mesh: Mesh, axis: int, stride: int, held: Sequence[Tensor], owner: Tensor) -> tuple[Hop, list[Tensor]]:
    """(this rank's all-to-all along an axis, the ids that each rank holds after it). `stride`: between neighbours along the axis, in ranks.

    Each rank sends a row to the rank of its line whose coordinate along the axis is the coordinate of the row's new owner.
    """
    size = mesh.axes[axis].size
    pieces, orders = [], []
    for ids in held:
        coordinate = owner[ids] // stride % size
        order = coordinate.argsort(stable=True)
        orders.append(order)
        pieces.append(ids[order].split(torch.bincount(coordinate, minlength=size).tolist()))

    def received(rank: int) -> list[Tensor]:
        at = rank // stride % size
        line = range(rank - at * stride, rank + (size - at) * stride, stride)
        return [pieces[sender][at] for sender in line]

    here = mesh.rank
    hop = Hop(axis=axis, order=orders[here], sent=tuple(map(len, pieces[here])), received=tuple(map(len, received(here))))
    return hop, [torch.cat(received(rank)) for rank in range(len(held))]


def move_rows(mesh: Mesh, x: Tensor, moves: RowMoves, *, what: str, fields: Mapping[str, str]) -> Tensor:
    """x [n, ...] of every rank → [m, ...]. Not differentiable.

    Ranks compare `what`, `fields`, dtype, row shape and device type first: if they differ, every rank raises ValueError.
    """
    description = {"dtype": str(x.dtype), "row shape": str(list(x.shape[1:])), "device": x.device.type, **fields}
    with agree(mesh, CallDescription(what, description)):
        for hop in moves.hops:
            sent = x.index_select(0, hop.order)
            x = sent.new_empty((sum(hop.received), *sent.shape[1:]))
            mesh.group(hop.axis).all_to_all(x, sent, hop.received, hop.sent, what=what).wait()
    return x.index_select(0, moves.order)
