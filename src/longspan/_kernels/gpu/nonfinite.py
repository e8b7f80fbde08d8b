"""NaN and ±inf in matrix products over masked tiles, kept from rows that may not see them.

A matrix product adds 0 · x for every masked pair, and 0 · NaN is NaN. A kernel therefore computes at full speed first. Only if its result
holds a NaN, it computes again with `finite_or_zero` operands, and then adds what visible non-finite elements contribute (`add_specials`).
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from longspan._kernels.gpu.tile_access import load_rows, store_where

# Elements counted by one product, at most 128 of each kind: the sum is exact in float32, and each code exact in 16 bits.
_PLUS, _MINUS, _NAN = tl.constexpr(1.0), tl.constexpr(2.0**-8), tl.constexpr(256.0)


@triton.jit
def any_nan(x, inside):
    """Whether a [R, C] tile holds a NaN in a row that is `inside` [R]."""
    return tl.max(tl.max(((x != x) & inside[:, None]).to(tl.int32), 1), 0) > 0


@triton.jit
def finite_or_zero(x):
    """x with 0 in place of NaN and ±inf."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(x.dtype)


@triton.jit
def add_specials(special, visible, x, PRECISION: tl.constexpr, SIGNED: tl.constexpr):
    """special [R, D] + Σ over visible [R, C] rows of x [C, D] that are not finite. Each weighs more than 0.

    SIGNED: +inf and −inf keep their sign. Otherwise every non-finite element counts as NaN, as the weight may be 0 or have any sign.
    """
    y = x.to(tl.float32)
    code = tl.where(y == float("inf"), _PLUS, tl.where(y == float("-inf"), _MINUS, tl.where(y != y, _NAN, 0.0)))
    count = tl.dot(tl.where(visible, 1.0, 0.0).to(x.dtype), code.to(x.dtype), input_precision=PRECISION)
    if SIGNED:
        plus, minus = (count >= _PLUS) & (count < _NAN), (count > tl.floor(count)) & (count < _NAN)
        value = tl.where(plus, float("inf"), 0.0) + tl.where(minus, float("-inf"), 0.0)
        return special + tl.where(count >= _NAN, float("nan"), value)
    else:
        return special + tl.where(count > 0.0, float("nan"), 0.0)


@triton.jit
def store_specials(base, special, row, left, stride, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Add `special` to a stored result, where it is not 0. Other threads of the CTA stored that: they are waited for."""
    tl.debug_barrier()
    there = load_rows(base, row, left, stride[2], stride[3], ROWS, DIM, PADDED, True)
    store_where(base, special + there.to(tl.float32), special != 0.0, row, left, stride[2], stride[3], ROWS, DIM, PADDED)
