"""All-gather of rows over a mesh and its adjoint, the reduce-scatter. Both consist of one all-to-all per axis of the mesh.

Legend: n[r] rows that rank r owns, N their sum. Rows of all ranks are in rank order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from longspan._comm.agreement import Agreement, CallDescription, agree, raising_on_all_ranks
from longspan._comm.mesh import Mesh


def all_gather_rows(
    mesh: Mesh, x: Tensor, counts: Sequence[int], *, what: str = "all-gather of rows", fields: Mapping[str, str] | None = None
) -> Tensor:
    """x [n[rank], ...] of every rank, concatenated: [N, ...], on every rank. `counts` is n, the same on every rank.

    Ranks compare `what`, `fields`, dtype, row shape, counts and device type first: if they differ, every rank raises ValueError.
    Not differentiable: an autograd function that calls this in forward must call `reduce_scatter_rows` in backward.
    """
    with _agree(mesh, x, counts, counts[mesh.rank] if len(counts) == mesh.size else None, what, fields):
        blocks = tuple(counts)  # rows per rank; after the last axis was gathered, rows per line of ranks along it
        for i in reversed(range(len(mesh.axes))):
            x, blocks = gather_axis(mesh, i, x, blocks, what)
    return x


def reduce_scatter_rows(
    mesh: Mesh, x: Tensor, counts: Sequence[int], *, what: str = "reduce-scatter of rows", fields: Mapping[str, str] | None = None
) -> Tensor:
    """The rows of x [N, ...] that this rank owns, summed over all ranks: [n[rank], ...], in x's dtype.

    The order of the sum is fixed: ranks along the first axis, then along the second. Half dtypes are summed in float32, others in their own
    dtype. Half dtypes are sent as such along the first axis, and as float32 along the second. Ranks agree first, as in `all_gather_rows`.
    """
    with _agree(mesh, x, counts, sum(counts), what, fields):
        dtype, last = x.dtype, mesh.axes[-1].size
        inner = tuple(counts) if len(mesh.axes) == 1 else tuple(counts[mesh.coordinate[0] * last :][:last])
        if len(mesh.axes) == 2:
            x = _reduce_axis(mesh, 0, x, tuple(sum(counts[r : r + last]) for r in range(0, mesh.size, last)), what)
        return _reduce_axis(mesh, len(mesh.axes) - 1, x, inner, what).to(dtype)


def gather_axis(mesh: Mesh, i: int, x: Tensor, blocks: tuple[int, ...], what: str) -> tuple[Tensor, tuple[int, ...]]:
    """(rows of all ranks along axis i, concatenated; numbers of rows after it). `blocks`: rows of each rank, or of each line of ranks."""
    group, size = mesh.group(i), mesh.axes[i].size
    line = mesh.coordinate[0] if i == 1 else 0
    recv_counts = blocks[line * size :][:size]
    sent = x.repeat(size, *[1] * (x.ndim - 1))
    out = x.new_empty((sum(recv_counts), *x.shape[1:]))
    group.all_to_all(out, sent, recv_counts, [x.shape[0]] * size, what=what).wait()
    return out, tuple(sum(blocks[r : r + size]) for r in range(0, len(blocks), size))


def _reduce_axis(mesh: Mesh, i: int, x: Tensor, blocks: tuple[int, ...], what: str) -> Tensor:
    """Send block r of x [sum(blocks), ...] to rank r of the axis. Return the sum of received blocks in rank order, in float32 or wider."""
    group, size = mesh.group(i), mesh.axes[i].size
    local_rows = blocks[mesh.coordinate[i]]
    out = x.new_empty((size * local_rows, *x.shape[1:]))
    group.all_to_all(out, x.contiguous(), [local_rows] * size, blocks, what=what).wait()
    parts = out.view(size, local_rows, *x.shape[1:])
    total = parts[0].to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _agree(
    mesh: Mesh, x: Tensor, counts: Sequence[int], rows: int | None, what: str, fields: Mapping[str, str] | None
) -> Agreement:  # fmt: skip
    """Check this rank's arguments, and compare them with those of all ranks before any data moves."""
    with raising_on_all_ranks(mesh):
        _check(mesh, x, counts, rows, what)
    return agree(mesh, CallDescription(what, {
        "dtype": str(x.dtype), "row shape": str(list(x.shape[1:])), "tokens": str(list(counts)), "device": x.device.type, **(fields or {}),
    }))  # fmt: skip


def _check(mesh: Mesh, x: Tensor, counts: Sequence[int], rows: int | None, what: str) -> None:
    if len(counts) != mesh.size or x.ndim < 1 or x.shape[0] != rows:
        raise ValueError(
            f"{what}: rank {mesh.rank} expected {mesh.size} counts and a tensor of {rows if rows is not None else 'its count of'} rows, "
            f"got counts {list(counts)} and shape {list(x.shape)}; pass the same counts on every rank"
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{what}: exchanges are not differentiable; call it in an autograd function, or under torch.no_grad()")
