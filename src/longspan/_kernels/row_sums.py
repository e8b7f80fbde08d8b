"""Rows of KV and of their gradients: packed before a transfer, and summed when ranks return gradients to the owner of the KV.

Shapes: S local rows of W columns, R returned rows, B batch rows, G KV heads, D and E head dims of k and v.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longspan._kernels.registry import has_triton


@dataclass(frozen=True, kw_only=True, eq=False)
class ReturnedGrads:
    """Gradient rows that other ranks returned, in one buffer or several, and the local rows that they belong to.

    buffers: [R, W] each. parts: for each buffer, the local rows of its consecutive parts; no row twice in one part. lists: `row_lists` of
    the parts of all buffers, on the device.
    """

    buffers: Sequence[Tensor]
    parts: Sequence[Sequence[Tensor]]
    lists: tuple[Tensor, Tensor]


class RepeatedSum(NamedTuple):
    """`add_returned_and_split` by the launch of an earlier call, at the addresses of this call's tensors."""

    launch_at: Callable[[Sequence[int]], None]

    def __call__(self, grads: Tensor, returned: ReturnedGrads, k: Tensor, v: Tensor, local_grads: Tensor | None) -> None:
        """The layouts of all tensors are those of the earlier call."""
        first, last, (ptr, index) = returned.buffers[0], returned.buffers[-1], returned.lists
        local = grads if local_grads is None else local_grads
        self.launch_at([t.data_ptr() for t in (grads, first, last, local, ptr, index, k, v)])


def copy_rows_(out: Tensor, x: Tensor) -> None:
    """out.copy_(x), in elements of 16 bytes if both allow it: strided copies of small elements reach half of the memory bandwidth."""
    if x.is_cuda and out.dtype == x.dtype and _viewable_as_16_bytes(out) and _viewable_as_16_bytes(x):
        out, x = out.view(torch.complex128), x.view(torch.complex128)
    out.copy_(x)


def _viewable_as_16_bytes(t: Tensor) -> bool:
    """Whether a tensor can be viewed as one of 16-byte elements."""
    per = 16 // t.element_size()
    strides = all(s % per == 0 for s in t.stride()[:-1])
    return t.stride(-1) == 1 and t.shape[-1] % per == 0 and strides and t.storage_offset() % per == 0 and t.data_ptr() % 16 == 0


def add_returned_rows_(grads: Tensor, returned: ReturnedGrads, *, unwritten: int = 0) -> None:
    """grads [S, W] += the returned rows of one buffer, for each local row in the order of the buffer.

    The first `unwritten` rows of grads are uninitialised: they are not read, and their sums begin at 0.
    """
    (buffer,) = returned.buffers
    if grads.is_cuda and has_triton():
        from longspan._kernels.gpu.row_sum_kernels import add_rows

        add_rows(grads, buffer, *returned.lists, unwritten=unwritten)
        return
    grads[:unwritten] = 0
    _add_parts(grads, buffer, returned.parts[0])


def _add_parts(grads: Tensor, buffer: Tensor, parts: Sequence[Tensor]) -> None:
    """Add consecutive parts of a buffer to the rows of grads that they belong to."""
    start = 0
    for rows in parts:
        grads.index_add_(0, rows.to(grads.device), buffer[start : start + len(rows)].to(grads.dtype))
        start += len(rows)


def add_returned_and_split(
    grads: Tensor, returned: ReturnedGrads, k: Tensor, v: Tensor, *, per_row: bool, local_grads: Tensor | None = None
) -> RepeatedSum | None:
    """`split_rows` of grads + the returned rows of one or two buffers + local_grads [L, W], which belongs to the first L rows.

    The sums are made in this order, on a GPU in one pass over memory. grads is modified. Returns a function that repeats the sum on
    tensors of the same layouts, where that takes less time.
    """
    if grads.is_cuda and has_triton():
        from longspan._kernels.gpu.row_sum_kernels import add_rows_and_split

        launch = add_rows_and_split(grads, returned.buffers, returned.lists, k, v, per_row=per_row, local_grads=local_grads)
        return RepeatedSum(launch.launch_at) if launch.is_compiled else None
    for buffer, parts in zip(returned.buffers, returned.parts, strict=True):
        _add_parts(grads, buffer, parts)
    if local_grads is not None:
        grads[: len(local_grads)] += local_grads
    split_rows(grads, k, v, per_row=per_row)
    return None


def split_rows(grads: Tensor, k: Tensor, v: Tensor, *, per_row: bool) -> None:
    """Copy packed rows to k [B, G, S, D] and v [B, G, S, E].

    grads: [S, B·G·(D + E)], or [B·S, G·(D + E)] if per_row; each head's k and v side by side.
    """
    batch, kv_heads, length, dim = k.shape
    shape = (batch, length, kv_heads) if per_row else (length, batch, kv_heads)
    by_head = grads.view(*shape, dim + v.shape[-1]).permute((0, 2, 1, 3) if per_row else (1, 2, 0, 3))
    k.copy_(by_head[..., :dim])
    v.copy_(by_head[..., dim:])


def row_lists(parts: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """(ptr [count + 1], index [R]), int32: local row r receives the returned rows index[ptr[r]] … index[ptr[r + 1] − 1], ascending."""
    rows = torch.cat([*parts, torch.zeros(0, dtype=torch.int64)])
    ptr = torch.zeros(count + 1, dtype=torch.int32)
    ptr[1:] = torch.bincount(rows, minlength=count).cumsum(0)
    return ptr, rows.argsort(stable=True).int()
