"""From whole tensors to shards and back, along any dim, under autograd.

A whole tensor that every rank holds counts once per rank: as for any replicated parameter, the sum of the ranks' gradients is the
gradient. So `shard` gives each rank the gradient of its own part (zeros elsewhere), and `unshard` sums, for a rank's part, the gradients
of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from longspan._comm.gather import all_gather_rows, reduce_scatter_rows
from longspan._comm.mesh import Mesh
from longspan._plan.layout import Layout
from longspan._torch_private import tree_map

Tree = TypeVar("Tree")


def each_tensor(fn: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """fn of every tensor of a tree; other leaves stay."""
    found: Tree = tree_map(lambda leaf: fn(leaf) if isinstance(leaf, Tensor) else leaf, tree)
    return found


def shard(x: Tensor, dim: int, layout: Layout, rank: int) -> Tensor:
    """A rank's part of x along dim, contiguous."""
    segments = layout.rows[0][rank]
    if len(layout.rows) == 1:
        if not segments:
            return x.narrow(dim, 0, 0).contiguous()
        return (
            torch.cat([x.narrow(dim, start, length) for start, length in segments], dim)
            if len(segments) <= 16
            else _pick(x, dim, layout, rank)
        )
    return torch.stack([_pick(part, dim % x.ndim - 1, layout, rank, row) for row, part in enumerate(x.unbind(0))])


def _pick(x: Tensor, dim: int, layout: Layout, rank: int, row: int = 0) -> Tensor:
    positions = layout.positions(rank)
    return x.index_select(dim, (positions if positions.ndim == 1 else positions[row]).to(x.device))


def unshard(x: Tensor, dim: int, layout: Layout, mesh: Mesh, place: Tensor | None = None) -> Tensor:
    """The whole tensor from every rank's part along dim. `place`: `places(layout, x.device)`, where the caller has it."""
    dim = dim % x.ndim
    rows = x.movedim(dim, 0)
    if len(layout.rows) > 1:
        rows = x.movedim(dim, 1).transpose(0, 1)  # tokens first, the batch second
    gathered: Tensor = _Gather.apply(rows, layout, mesh, f"unshard along dim {dim} of {x.ndim}")  # type: ignore[no-untyped-call]
    place = places(layout, x.device) if place is None else place
    if len(layout.rows) == 1:
        return gathered.index_select(0, place).movedim(0, dim).contiguous()
    picked = [gathered[:, row].index_select(0, place[row]) for row in range(len(layout.rows))]
    return torch.stack(picked).movedim(1, dim).contiguous()


def places(layout: Layout, device: torch.device) -> Tensor:
    """Where each position lies when all ranks' shards follow each other: [S], or [B, S] where batch rows differ."""
    order = torch.cat([torch.atleast_2d(layout.positions(rank)) for rank in range(layout.ranks)], 1)
    found = order.argsort(1).to(device)
    return found[0] if len(layout.rows) == 1 else found


class _Gather(torch.autograd.Function):
    """Every rank's rows, rank by rank. Backward: each rank's rows of the gradient, summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, mesh: Mesh, what: str) -> Tensor:
        ctx.counts, ctx.mesh, ctx.what = [layout.local_len(r) for r in range(layout.ranks)], mesh, what
        ctx.fields = {"layout": layout.digest[:12]}
        return all_gather_rows(mesh, x.contiguous(), ctx.counts, what=what, fields=ctx.fields)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        grad_x = reduce_scatter_rows(ctx.mesh, grad.contiguous(), ctx.counts, what=f"{ctx.what}, backward pass", fields=ctx.fields)
        return grad_x, None, None, None
