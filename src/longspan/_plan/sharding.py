"""From whole tensors to shards and back, along any dim, under autograd.

A whole tensor that every rank holds counts once per rank: as for a replicated parameter, the sum of the ranks' gradients is the gradient.
`shard` therefore gives each rank the gradient of its part, zeros elsewhere; `unshard` sums the gradients of all ranks for a rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from longspan._comm.gather import all_gather_rows, reduce_scatter_rows
from longspan._comm.mesh import Mesh
from longspan._plan.layout import Layout
from longspan._torch_private import tree_map

Tree = TypeVar("Tree")

MAX_VIEWS = 16  # up to this many segments are concatenated as views; more are gathered by index


def check_dims(what: str, *dims: Any) -> None:
    """Raise TypeError unless all dims are integers. `what` names the call or the argument in the message."""
    for dim in dims:
        if isinstance(dim, bool) or not hasattr(dim, "__index__"):
            raise TypeError(f"{what}: expected an integer dim, got {dim!r}, a {type(dim).__name__}")


def each_tensor(fn: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Apply fn to every tensor of a tree; other leaves are returned as they are."""
    mapped: Tree = tree_map(lambda leaf: fn(leaf) if isinstance(leaf, Tensor) else leaf, tree)
    return mapped


def shard(x: Tensor, dim: int, layout: Layout, rank: int) -> Tensor:
    """A rank's part of x along dim, contiguous. Where batch rows differ, dim 0 of x is the batch."""
    if len(layout.rows) > 1:
        return torch.stack([_select(part, dim % x.ndim - 1, layout, rank, row) for row, part in enumerate(x.unbind(0))])
    segments = layout.rows[0][rank]
    if not segments:
        return x.narrow(dim, 0, 0)
    if len(segments) > MAX_VIEWS:
        return _select(x, dim, layout, rank)
    return torch.cat([x.narrow(dim, start, length) for start, length in segments], dim)


def _select(x: Tensor, dim: int, layout: Layout, rank: int, row: int = 0) -> Tensor:
    positions = layout.positions(rank)
    return x.index_select(dim, (positions if positions.ndim == 1 else positions[row]).to(x.device))


def unshard(x: Tensor, dim: int, layout: Layout, mesh: Mesh, place: Tensor | None = None) -> Tensor:
    """The whole tensor from every rank's part along dim. `place`: `places(layout, x.device)`, where the caller has it."""
    dim = dim % x.ndim
    rows = x.movedim(dim, 0)  # where batch rows differ, the batch is dim 1
    counts = tuple(layout.local_len(rank) for rank in range(layout.ranks))
    fields = {"layout": layout.digest[:12]}  # ranks compare it: two layouts may have the same counts
    gathered = Gather(mesh=mesh, counts=counts, what=f"unshard along dim {dim} of {x.ndim}", fields=fields)(rows)
    place = places(layout, x.device) if place is None else place
    if len(layout.rows) == 1:
        return gathered.index_select(0, place).movedim(0, dim).contiguous()
    by_row = [gathered[:, row].index_select(0, place[row]) for row in range(len(layout.rows))]
    return torch.stack(by_row).movedim(1, dim).contiguous()


def places(layout: Layout, device: torch.device) -> Tensor:
    """The place of each position in the concatenated shards of all ranks: [S], or [B, S] where batch rows differ."""
    order = torch.cat([torch.atleast_2d(layout.positions(rank)) for rank in range(layout.ranks)], 1)
    place = order.argsort(1).to(device)
    return place[0] if len(layout.rows) == 1 else place


@dataclass(frozen=True, kw_only=True)
class Gather:
    """Every rank's rows, rank by rank: [counts[rank], ...] → [sum(counts), ...]. Differentiable any number of times.

    The gradient of a rank's rows is the sum of all ranks' gradients for them. Ranks compare `what` and `fields`.
    """

    mesh: Mesh
    counts: tuple[int, ...]
    what: str
    fields: Mapping[str, str]

    def __call__(self, rows: Tensor) -> Tensor:
        return _Exchange.apply(rows, self, False)  # type: ignore[no-untyped-call,no-any-return]


class _Exchange(torch.autograd.Function):
    """All-gather of rows, or its transpose `back`, the reduce-scatter. Backward: the other one, differentiable again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gather: Gather, back: bool) -> Tensor:
        ctx.gather, ctx.back = gather, back
        exchange, what = (reduce_scatter_rows, f"{gather.what}, backward pass") if back else (all_gather_rows, gather.what)
        return exchange(gather.mesh, rows, gather.counts, what=what, fields=gather.fields)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _Exchange.apply(grad, ctx.gather, not ctx.back), None, None  # type: ignore[no-untyped-call]
