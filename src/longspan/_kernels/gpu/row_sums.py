"""Sums of gradient rows that other ranks returned, into the owner's rows, in one pass over memory."""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDTH = 1024


@triton.jit(do_not_specialize=["unwritten"])
def add_rows_kernel(home_ptr, back_ptr, ptr, index, width, unwritten, BLOCK: tl.constexpr):
    """home[r] += Σ back[index[j]], ptr[r] ≤ j < ptr[r + 1], added one after the other in that order; for r < unwritten, home[r] = Σ …"""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    first, last = tl.load(ptr + row), tl.load(ptr + row + 1)
    if (first < last) | (row < unwritten):
        total = tl.load(home_ptr + row * width + column, mask=inside & (row >= unwritten), other=0.0)
        for j in range(first, last):
            at = tl.load(index + j).to(tl.int64)
            total += tl.load(back_ptr + at * width + column, mask=inside).to(total.dtype)
        tl.store(home_ptr + row * width + column, total, mask=inside)


@triton.jit(do_not_specialize=["count", "late"])
def last_rows_kernel(
    home_ptr, back_ptr, more_ptr, late_ptr, ptr, index, k_ptr, v_ptr, k_stride, v_stride, length, groups, width, count, late,
    D: tl.constexpr, WIDE: tl.constexpr, PER_ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same sums, of back's `count` rows and from there on of more's, and for r < late those of another tensor [late, width] last, to
    k [B, G, S, D] and v [B, G, S, WIDE − D] instead of home: a row's columns are those of its heads side by side.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.load(home_ptr + row * width + column, mask=inside)
    for j in range(tl.load(ptr + row), tl.load(ptr + row + 1)):
        at = tl.load(index + j).to(tl.int64)
        rows = back_ptr + at * width if at < count else more_ptr + (at - count) * width
        total += tl.load(rows + column, mask=inside).to(total.dtype)
    if row < late:
        total += tl.load(late_ptr + row * width + column, mask=inside)
    head, c = column // WIDE, column % WIDE
    if PER_ROW:
        b, s = head * 0 + row // length, row % length
    else:
        b, s = (head // groups).to(tl.int64), row
    g = (head % groups).to(tl.int64)
    tl.store(k_ptr + b * k_stride[0] + g * k_stride[1] + s * k_stride[2] + c, total.to(k_ptr.dtype.element_ty), mask=inside & (c < D))
    to_v = v_ptr + b * v_stride[0] + g * v_stride[1] + s * v_stride[2] + c - D
    tl.store(to_v, total.to(v_ptr.dtype.element_ty), mask=inside & (c >= D))


def add_last_rows(
    home: Tensor,
    back: Tensor,
    more: Tensor,
    ptr: Tensor,
    index: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    per_row: bool,
    late: Tensor | None = None,
) -> None:
    """As `add_rows`, of back's rows and then of more's, which may be back itself; then `late` [L, W], contiguous, is added to the first L
    rows. The sums go to k and v, whose last dim is contiguous.
    """
    with torch.cuda.device(home.device):
        grid = (home.shape[0], triton.cdiv(home.shape[1], WIDTH))
        last_rows_kernel[grid](
            home, back, more, home if late is None else late, ptr, index, k, v, k.stride()[:3], v.stride()[:3], k.shape[2], k.shape[1],
            home.shape[1], back.shape[0], 0 if late is None else late.shape[0], D=k.shape[3], WIDE=k.shape[3] + v.shape[3],
            PER_ROW=per_row, BLOCK=WIDTH, num_warps=4,
        )  # fmt: skip


def add_rows(home: Tensor, back: Tensor, ptr: Tensor, index: Tensor, *, unwritten: int = 0) -> None:
    """home [S, W] and back [R, W] contiguous, ptr [S + 1] and index int32, all on one CUDA device."""
    with torch.cuda.device(home.device):
        grid = (home.shape[0], triton.cdiv(home.shape[1], WIDTH))
        add_rows_kernel[grid](home, back, ptr, index, home.shape[1], unwritten, BLOCK=WIDTH, num_warps=4)
