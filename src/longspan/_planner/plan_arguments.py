"""Checks of the tensors, dims and layouts that are passed to methods of `Plan`."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from longspan._plan.layout import Layout
from longspan._plan.named_layouts import contiguous
from longspan._plan.plan_data import PlanData
from longspan._plan.relayout import HeadsLayout, Placement, Relayout
from longspan._plan.sharding import check_dims
from longspan._torch_modes import default_modes

Side = Literal["q", "kv"]
LayoutLike = Layout | Literal["plan", "contiguous", "heads"]  # what `Plan.relayout` moves from and to


def checked_side(plan: PlanData, x: Tensor, dim: int, side: str | None, what: str, *, local: bool) -> int:
    """0 if a tensor's tokens in `dim` are the queries, 1 for the keys. local: this rank's tokens, not those of the whole sequence."""
    if side not in (None, "q", "kv"):
        raise ValueError(f"plan.{what}: side must be 'q', 'kv' or None, got {side!r}")
    check_dims(f"plan.{what}", dim)
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"plan.{what}: dim {dim} is not a dim of a tensor of shape {tuple(x.shape)}")
    sizes = [layout.local_len(plan.mesh.rank) if local else layout.length for layout in plan.layouts]
    options = [0, 1] if side is None else [0 if side == "q" else 1]
    fitting = [i for i in options if x.shape[dim] == sizes[i]]
    names = {i: f"{'q' if i == 0 else 'kv'} {sizes[i]}" for i in options}
    if not fitting:
        raise ValueError(f"plan.{what}: expected size {' or '.join(dict.fromkeys(names.values()))} in dim {dim}, got {tuple(x.shape)}")
    batch_rows = len(plan.layouts[fitting[0]].rows)
    if batch_rows > 1 and (x.shape[0] != batch_rows or dim % x.ndim == 0):
        raise ValueError(f"plan.{what}: batch rows are laid out differently: dim 0 must be the batch of {batch_rows}, got {tuple(x.shape)}")
    if local and len(fitting) == 2 and plan.layouts[0] != plan.layouts[1]:
        raise ValueError(f"plan.{what}: queries and keys have {sizes[0]} tokens here: say side='q' or side='kv'")
    return fitting[0]


@default_modes()
def checked_relayout(
    plan: PlanData, x: Tensor, dim: int, ends: tuple[LayoutLike, LayoutLike], heads_dim: int | None, side: str
) -> Relayout:
    """The move of x from the first of `ends` to the second."""
    if side not in ("q", "kv"):
        raise ValueError(f"plan.relayout: side must be 'q' or 'kv', got {side!r}")
    before, after = (_placement(plan.layouts[0 if side == "q" else 1], end) for end in ends)
    dims = [dim] if heads_dim is None else [dim, heads_dim]
    check_dims("plan.relayout", *dims)
    if not all(-x.ndim <= d < x.ndim for d in dims) or len({d % x.ndim for d in dims}) < len(dims):
        raise ValueError(f"plan.relayout: expected different dims of a tensor of shape {tuple(x.shape)}, got {dims}")
    if HeadsLayout in map(type, (before, after)):
        if before == after:
            raise ValueError("plan.relayout: source and to are both 'heads'; give one layout of tokens")
        if heads_dim is None:
            raise ValueError("plan.relayout: 'heads' needs heads_dim=, the dim of heads")
        if isinstance(before, Layout) and x.shape[heads_dim] % plan.mesh.size:
            raise ValueError(
                f"plan.relayout: {x.shape[heads_dim]} heads (dim {heads_dim}) do not divide by {plan.mesh.size} ranks: use 'contiguous'"
            )
    elif heads_dim is not None:
        raise ValueError("plan.relayout: heads_dim= is used with 'heads' only; leave it out")
    tokens = before.local_len(plan.mesh.rank)
    if x.shape[dim] != tokens:
        raise ValueError(f"plan.relayout: expected {tokens} tokens in dim {dim}, the source layout's, got {tuple(x.shape)}")
    heads = None if heads_dim is None else heads_dim % x.ndim
    move = Relayout(mesh=plan.mesh, before=before, after=after, dim=dim % x.ndim, heads_dim=heads)
    if move.batch_rows > 1 and (x.shape[0] != move.batch_rows or 0 in (move.dim, heads)):
        raise ValueError(
            f"plan.relayout: batch rows are laid out differently: dim 0 must be the batch of {move.batch_rows}, got {tuple(x.shape)}"
        )
    return move


def _placement(mine: Layout, layout: LayoutLike) -> Placement:
    """A layout as `Plan.relayout` takes it. mine: the plan's own."""
    if isinstance(layout, Layout):
        if (layout.length, layout.ranks) != (mine.length, mine.ranks) or len({1, len(layout.rows), len(mine.rows)}) > 2:
            raise ValueError(
                f"plan.relayout: expected a layout of {mine.length} tokens over {mine.ranks} ranks for {len(mine.rows)} batch rows or "
                f"for all, got {layout.length} tokens over {layout.ranks} ranks for {len(layout.rows)} batch rows"
            )
        return layout
    if layout == "plan":
        return mine
    if layout == "contiguous":
        return contiguous(mine.length, mine.ranks)
    if layout == "heads":
        return HeadsLayout(length=mine.length, ranks=mine.ranks)
    raise ValueError(f"plan.relayout: expected a Layout, 'plan', 'contiguous' or 'heads', got {layout!r}")


def check_block(what: str, block: Any, of: str, layout: Layout) -> None:
    """Raise unless `block` is a number of tokens, and one layout holds for all batch rows."""
    if not isinstance(block, int) or isinstance(block, bool) or block < 1:
        raise ValueError(f"plan.{what}: expected a block of 1 or more {of}, got {block!r}")
    if len(layout.rows) > 1:
        raise ValueError(f"plan.{what}: expected one layout for all batch rows, got one per batch row; give another layout=")


def check_keys(plan: PlanData, x: Any, dim: int) -> None:
    """Raise unless x has values of this rank's keys in `dim`."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"plan.gather_pooled: expected a floating-point tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    check_dims("plan.gather_pooled", dim)
    keys = plan.layouts[1].local_len(plan.mesh.rank)
    if not -x.ndim <= dim < x.ndim or x.shape[dim] != keys:
        raise ValueError(f"plan.gather_pooled: expected this rank's {keys} keys in dim {dim}, got shape {tuple(x.shape)}")
