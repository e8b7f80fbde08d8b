"""Conversions of FP8 pages (`paged.FP8`) in the decode kernel. SCALE is None for pages of other dtypes: functions return their argument.

Inline assembly converts two elements per instruction; Triton's own conversion takes more instructions. The product P V needs four
consecutive keys of one column of V in each thread, which the compiler would load from shared memory byte by byte. The columns of V are
therefore permuted: as [E / 4, 4], transposed. Four columns of a thread are then adjacent in memory, and one load fetches them;
`values_sum` undoes the permutation in the result.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)  # of float8_e4m3fn
TO_FLOAT16 = tl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")
TO_BFLOAT16 = tl.constexpr("""{
    .reg .b16 low, high, half<4>;
    .reg .b32 first, second;
    .reg .f32 x<4>;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 first, low;
    cvt.rn.f16x2.e4m3x2 second, high;
    mov.b32 {half0, half1}, first;
    mov.b32 {half2, half3}, second;
    cvt.f32.f16 x0, half0;
    cvt.f32.f16 x1, half1;
    cvt.f32.f16 x2, half2;
    cvt.f32.f16 x3, half3;
    cvt.rn.bf16x2.f32 $0, x1, x0;
    cvt.rn.bf16x2.f32 $1, x3, x2;
}""")


@triton.jit
def in_pages(x, SCALE: tl.constexpr):
    """New tokens in the dtype of pages, in FP8 as `paged.to_fp8` rounds them."""
    if SCALE is None:
        return x
    else:
        x = x.to(tl.float32)
        y = x * (1.0 / SCALE)
        y = tl.where(y > LARGEST, LARGEST, tl.where(y < -LARGEST, -LARGEST, y))
        return tl.where(tl.abs(x) < float("inf"), y, float("nan")).to(tl.float8e4nv)


@triton.jit
def from_pages(x, SCALE: tl.constexpr, DTYPE: tl.constexpr):
    """Elements of FP8 pages in DTYPE, exact, before multiplication by SCALE. Only whether SCALE is None matters here."""
    if SCALE is None:
        return x
    elif x.dtype == tl.float8e4nv and tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(TO_FLOAT16, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
    elif x.dtype == tl.float8e4nv and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(TO_BFLOAT16, "=r,=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        return x.to(DTYPE)


@triton.jit
def values_from_pages(v, SCALE: tl.constexpr, DTYPE: tl.constexpr):
    """Values [N, E] of pages as an operand of P V, FP8 ones with permuted columns. DTYPE: of queries.

    float16 also for bfloat16 queries: FP8 is exact in it, probabilities over 2⁻¹⁶ are more precise, and conversion takes one instruction.
    """
    if SCALE is None:
        return v
    else:
        v = v.reshape(v.shape[0], v.shape[1] // 4, 4).permute(0, 2, 1).reshape(v.shape[0], v.shape[1])
        return from_pages(v, SCALE, tl.float32 if tl.float32 == DTYPE else tl.float16)


@triton.jit
def values_sum(acc, SCALE: tl.constexpr):
    """The product P V [M, E] of `values_from_pages`, of FP8 values in the order of columns and multiplied by SCALE."""
    if SCALE is None:
        return acc
    else:
        acc = acc.reshape(acc.shape[0], 4, acc.shape[1] // 4).permute(0, 2, 1).reshape(acc.shape[0], acc.shape[1])
        return acc * SCALE
