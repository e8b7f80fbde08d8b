"""All-reduce of rows with any reduction: a reduce-scatter, then an all-gather. Each rank sends two shares of N rows, not N rows to each.

Legend: N rows, the same number on every rank; rank r reduces n[r] of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from longspan._comm.agreement import CallDescription, agree
from longspan._comm.gather import gather_axis
from longspan._comm.mesh import Mesh


def all_reduce_rows(
    mesh: Mesh, x: Tensor, reduce: Callable[[Tensor], Tensor], finish: Callable[[Tensor, range], Tensor], *, what: str,
    fields: Mapping[str, str],
) -> Tensor:  # fmt: skip
    """finish(rows of x [N, ...] reduced over all ranks), [N, ...], the same bits on every rank.

    Ranks compare `what`, `fields`, dtype, shape and device type first: if they differ, every rank raises ValueError. Not differentiable.

    Args:
        reduce: Contributions [ranks of an axis, n, ...] → [n, ...].
        finish: Reduced rows [n, ...] and their indices among the N → the rows that all ranks get, [n, ...] of any shape and dtype.
    """
    description = {"dtype": str(x.dtype), "shape": str(list(x.shape)), "device": x.device.type, **fields}
    with agree(mesh, CallDescription(what, description)):
        counts = _even_counts(x.shape[0], mesh.size)
        first, inner = 0, counts
        for i, axis in enumerate(mesh.axes):
            at = mesh.coordinate[i]
            per_line = len(inner) // axis.size
            blocks = [sum(inner[r : r + per_line]) for r in range(0, len(inner), per_line)]
            received = x.new_empty((axis.size * blocks[at], *x.shape[1:]))
            mesh.group(i).all_to_all(received, x.contiguous(), [blocks[at]] * axis.size, blocks, what=what).wait()
            x = reduce(received.view(axis.size, blocks[at], *x.shape[1:]))
            first += sum(blocks[:at])
            inner = inner[at * per_line : (at + 1) * per_line]
        x, rows_of = finish(x, range(first, first + x.shape[0])), tuple(counts)
        for i in reversed(range(len(mesh.axes))):
            x, rows_of = gather_axis(mesh, i, x, rows_of, what)
    return x


def _even_counts(rows: int, ranks: int) -> list[int]:
    return [rows // ranks + (r < rows % ranks) for r in range(ranks)]
