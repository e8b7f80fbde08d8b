"""Sums of gradient rows that other ranks returned, into the owner's rows, in one pass over memory.

Tensors are contiguous, on one CUDA device. ptr, index: `longspan._kernels.row_sums.row_lists`.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from longspan._kernels.gpu.prepared_launch import PreparedLaunch, layout_launch

WIDTH = 1024


@triton.jit(do_not_specialize=["unwritten"])
def add_rows_kernel(grads_ptr, returned_ptr, ptr, index, width, unwritten, BLOCK: tl.constexpr):
    """grads[r] += Σ returned[index[j]], ptr[r] ≤ j < ptr[r + 1], added in this order; for r < unwritten, grads[r] = Σ …"""
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    first, last = tl.load(ptr + row), tl.load(ptr + row + 1)
    if (first < last) | (row < unwritten):
        total = tl.load(grads_ptr + row * width + column, mask=inside & (row >= unwritten), other=0.0)
        for j in range(first, last):
            at = tl.load(index + j).to(tl.int64)
            total += tl.load(returned_ptr + at * width + column, mask=inside).to(total.dtype)
        tl.store(grads_ptr + row * width + column, total, mask=inside)


@triton.jit(do_not_specialize=["first_count", "local_count"])
def add_rows_and_split_kernel(
    grads_ptr, first_ptr, second_ptr, local_ptr, ptr, index, k_ptr, v_ptr, k_stride, v_stride, length, kv_heads, width,
    first_count, local_count,
    D: tl.constexpr, KV_DIM: tl.constexpr, PER_ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of `add_rows_kernel`, stored to k [B, G, S, D] and v [B, G, S, KV_DIM − D] instead of grads.

    Returned rows from `first_count` on are in second_ptr. For r < local_count, row r of local_ptr is added last. A row's columns are those
    of its heads side by side, each k then v.
    """
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.load(grads_ptr + row * width + column, mask=inside)
    for j in range(tl.load(ptr + row), tl.load(ptr + row + 1)):
        at = tl.load(index + j).to(tl.int64)
        returned = first_ptr + at * width if at < first_count else second_ptr + (at - first_count) * width
        total += tl.load(returned + column, mask=inside).to(total.dtype)
    if row < local_count:
        total += tl.load(local_ptr + row * width + column, mask=inside)
    head, c = column // KV_DIM, column % KV_DIM
    if PER_ROW:
        b, s = head * 0 + row // length, row % length
    else:
        b, s = (head // kv_heads).to(tl.int64), row
    g = (head % kv_heads).to(tl.int64)
    tl.store(k_ptr + b * k_stride[0] + g * k_stride[1] + s * k_stride[2] + c, total.to(k_ptr.dtype.element_ty), mask=inside & (c < D))
    to_v = v_ptr + b * v_stride[0] + g * v_stride[1] + s * v_stride[2] + c - D
    tl.store(to_v, total.to(v_ptr.dtype.element_ty), mask=inside & (c >= D))


def add_rows(grads: Tensor, returned: Tensor, ptr: Tensor, index: Tensor, *, unwritten: int = 0) -> None:
    """grads [S, W] += returned [R, W], row by row. The first `unwritten` rows of grads are not read: their sums begin at 0."""
    tensors = {"grads_ptr": grads, "returned_ptr": returned, "ptr": ptr, "index": index}
    constants = {"width": grads.shape[1], "unwritten": unwritten, "BLOCK": WIDTH}
    layout_launch(add_rows_kernel, tensors, constants, _ctas(grads))(tensors, {})


def _ctas(grads: Tensor) -> int:
    return grads.shape[0] * triton.cdiv(grads.shape[1], WIDTH)


def add_rows_and_split(
    grads: Tensor,
    buffers: Sequence[Tensor],
    lists: tuple[Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    *,
    per_row: bool,
    local_grads: Tensor | None = None,
) -> PreparedLaunch:
    """`add_rows` of one or two buffers, then of local_grads [L, W] to the first L rows. Sums go to k and v, whose last dim is contiguous.

    lists: (ptr, index) of the buffers as if concatenated. Returns the launch.
    """
    tensors = {
        "grads_ptr": grads, "first_ptr": buffers[0], "second_ptr": buffers[-1], "local_ptr": grads if local_grads is None else local_grads,
        "ptr": lists[0], "index": lists[1], "k_ptr": k, "v_ptr": v,
    }  # fmt: skip
    constants = {
        "k_stride": k.stride()[:3], "v_stride": v.stride()[:3], "length": k.shape[2], "kv_heads": k.shape[1], "width": grads.shape[1],
        "first_count": buffers[0].shape[0], "local_count": 0 if local_grads is None else local_grads.shape[0],
        "D": k.shape[3], "KV_DIM": k.shape[3] + v.shape[3], "PER_ROW": per_row, "BLOCK": WIDTH,
    }  # fmt: skip
    prepared = layout_launch(add_rows_and_split_kernel, tensors, constants, _ctas(grads))
    prepared(tensors, {})
    return prepared
