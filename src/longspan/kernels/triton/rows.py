"""Adding rows that came home to the rows they belong to, in one pass over memory."""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDTH = 1024


@triton.jit
def add_rows_kernel(home_ptr, back_ptr, ptr, index, width, BLOCK: tl.constexpr):
    """home[r] += Σ back[index[j]], ptr[r] ≤ j < ptr[r + 1], added one after the other in that order."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    first, last = tl.load(ptr + row), tl.load(ptr + row + 1)
    if first < last:
        total = tl.load(home_ptr + row * width + column, mask=inside)
        for j in range(first, last):
            at = tl.load(index + j).to(tl.int64)
            total += tl.load(back_ptr + at * width + column, mask=inside).to(total.dtype)
        tl.store(home_ptr + row * width + column, total, mask=inside)


def add_rows(home: Tensor, back: Tensor, ptr: Tensor, index: Tensor) -> None:
    """home [S, W] and back [R, W] contiguous, ptr [S + 1] and index int32, all on one CUDA device."""
    with torch.cuda.device(home.device):
        grid = (home.shape[0], triton.cdiv(home.shape[1], WIDTH))
        add_rows_kernel[grid](home, back, ptr, index, home.shape[1], BLOCK=WIDTH, num_warps=4)
