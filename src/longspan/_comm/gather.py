"""Rows of every rank on every rank, and the adjoint. Both are made of all-to-alls, one axis of the mesh after the other.

Legend: n[r] rows that rank r owns, N their sum.  Rows of all ranks lie in the order of their shards' indices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from longspan._comm.agreement import CallDescription, agree, refuse
from longspan._comm.mesh import Mesh


def all_gather_rows(
    mesh: Mesh, x: Tensor, counts: Sequence[int], *, what: str = "all-gather of rows", fields: Mapping[str, str] | None = None
) -> Tensor:
    """x [n[rank], ...] of every rank, one after the other: [N, ...], on every rank. `counts` is n, the same everywhere.

    Ranks compare `what`, `fields`, dtype, row shape, counts and device type first: if they differ, every rank raises ValueError.
    Not differentiable: an autograd function that calls this in its forward has `reduce_scatter_rows` as its backward.
    """
    _agree(mesh, x, counts, counts[mesh.rank] if len(counts) == mesh.size else None, what, fields)
    blocks = tuple(counts)  # rows that ranks hold now: of each rank, later of each line of ranks along the last axis
    for i in reversed(range(len(mesh.axes))):
        x, blocks = _gather_axis(mesh, i, x, blocks, what)
    return x


def reduce_scatter_rows(
    mesh: Mesh, x: Tensor, counts: Sequence[int], *, what: str = "reduce-scatter of rows", fields: Mapping[str, str] | None = None
) -> Tensor:
    """The rows of x [N, ...] that this rank owns, summed over all ranks: [n[rank], ...], in x's dtype.

    Ranks are added in their order along the first axis, then along the second, in float32 for half dtypes and in x's own otherwise: the
    same bits every time. Half dtypes travel as such at first, and in float32 between the axes. Ranks agree first, as in `all_gather_rows`.
    """
    _agree(mesh, x, counts, sum(counts), what, fields)
    dtype, last = x.dtype, mesh.axes[-1].size
    inner = tuple(counts) if len(mesh.axes) == 1 else tuple(counts[mesh.coordinate[0] * last :][:last])
    if len(mesh.axes) == 2:
        x = _reduce_axis(mesh, 0, x, tuple(sum(counts[r : r + last]) for r in range(0, mesh.size, last)), what)
    return _reduce_axis(mesh, len(mesh.axes) - 1, x, inner, what).to(dtype)


def _gather_axis(mesh: Mesh, i: int, x: Tensor, blocks: tuple[int, ...], what: str) -> tuple[Tensor, tuple[int, ...]]:
    group, size = mesh.group(i), mesh.axes[i].size
    line = mesh.coordinate[0] if i == 1 else 0
    arriving = blocks[line * size :][:size]
    x = x.contiguous()
    sent = x.repeat(size, *[1] * (x.ndim - 1))
    out = x.new_empty((sum(arriving), *x.shape[1:]))
    group.all_to_all(out, sent, arriving, [x.shape[0]] * size, what=what).wait()
    return out, tuple(sum(blocks[r : r + size]) for r in range(0, len(blocks), size))


def _reduce_axis(mesh: Mesh, i: int, x: Tensor, blocks: tuple[int, ...], what: str) -> Tensor:
    """x [sum(blocks), ...]: block r goes to rank r of the axis, which sums what it gets, in order, in float32 or wider."""
    group, size = mesh.group(i), mesh.axes[i].size
    mine = blocks[mesh.coordinate[i]]
    out = x.new_empty((size * mine, *x.shape[1:]))
    group.all_to_all(out, x.contiguous(), [mine] * size, blocks, what=what).wait()
    parts = out.view(size, mine, *x.shape[1:])
    total = parts[0].to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _agree(
    mesh: Mesh, x: Tensor, counts: Sequence[int], rows: int | None, what: str, fields: Mapping[str, str] | None
) -> None:  # fmt: skip
    """Check this rank's arguments, and compare them with those of all ranks before any data moves."""
    try:
        _check(mesh, x, counts, rows, what)
    except (ValueError, RuntimeError) as error:
        refuse(mesh, error)
    agree(mesh, CallDescription(what, {
        "dtype": str(x.dtype), "row shape": str(list(x.shape[1:])), "tokens": str(list(counts)), "device": x.device.type, **(fields or {}),
    }))  # fmt: skip


def _check(mesh: Mesh, x: Tensor, counts: Sequence[int], rows: int | None, what: str) -> None:
    if len(counts) != mesh.size or x.ndim < 1 or x.shape[0] != rows:
        raise ValueError(
            f"{what}: rank {mesh.rank} expected {mesh.size} counts and a tensor of {rows if rows is not None else 'its count of'} rows, "
            f"got counts {list(counts)} and shape {list(x.shape)}; every rank passes the same counts"
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{what}: no gradient flows through a plain exchange; call it in an autograd function, or under torch.no_grad()")
