"""NaN and ±inf in matrix products over masked tiles, kept from rows that may not see them.

A matrix product adds 0 · x for every masked pair, and 0 · NaN is NaN. A kernel therefore computes at full speed first. Only if its result
holds a NaN, it computes again with `finite_or_zero` operands, and then adds what visible non-finite elements contribute: it counts them by
a product of zeros and ones (`count_nonfinite`) and changes the stored result where there are any (`add_nonfinite`).
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from longspan._kernels.gpu.tile_access import load_rows, store_where


@triton.jit
def any_nan(x, inside):
    """Whether a [R, C] tile holds a NaN in a row that is `inside` [R]."""
    return tl.max(tl.max(((x != x) & inside[:, None]).to(tl.int32), 1), 0) > 0


@triton.jit
def finite_or_zero(x):
    """x with 0 in place of NaN and ±inf."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(x.dtype)


@triton.jit
def count_nonfinite(count, visible, x, sign, PRECISION: tl.constexpr):
    """count [R, D] plus the number of elements of x [C, D] that are sign · inf or NaN, over the rows of x that are `visible` [R, C].

    sign: 1 or −1; 0 counts all that are not finite.
    """
    y = x.to(tl.float32)
    chosen = (y != y) | ((sign == 0) & (tl.abs(y) == float("inf"))) | (y * sign == float("inf"))
    return tl.dot(tl.where(visible, 1.0, 0.0).to(x.dtype), tl.where(chosen, 1.0, 0.0).to(x.dtype), count, input_precision=PRECISION)


@triton.jit
def add_nonfinite(base, count, sign, row, left, stride, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Add sign · inf (NaN for sign 0) to the elements of a stored result that count > 0. A NaN is counted under both signs: inf − inf.

    Other threads of the CTA stored the result: they are waited for.
    """
    tl.debug_barrier()
    value = tl.where(sign == 0, float("nan"), sign * float("inf"))
    there = load_rows(base, row, left, stride[2], stride[3], ROWS, DIM, PADDED, True)
    store_where(base, there.to(tl.float32) + value, count > 0.0, row, left, stride[2], stride[3], ROWS, DIM, PADDED)
