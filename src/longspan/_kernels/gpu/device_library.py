"""Device functions for generated programs: torch operations that Triton lacks or defines differently.

All take and return scalars or tiles and broadcast like operators. Floating point is float32 unless the operands are wider.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
TINY = tl.constexpr(1.1754943508222875e-38)  # 2⁻¹²⁶, the smallest normal float32


@triton.jit
def floor_div(a, b):
    """Integers: rounds down, as torch does; the hardware rounds towards zero."""
    quotient = a // b
    rest = a - quotient * b
    return quotient - ((rest != 0) & ((rest < 0) != (b < 0))).to(tl.int32)


@triton.jit
def trunc_div(a, b):
    """Integers: rounds towards zero, whichever way `//` goes."""
    quotient = a // b
    rest = a - quotient * b
    return quotient + ((rest != 0) & ((rest < 0) != (a < 0))).to(tl.int32)


@triton.jit
def wrap(index, size):
    """An index into a dim of `size`: negative ones count from the end; clamped, since padding rows compute arbitrary ones."""
    index = tl.where(index < 0, index + size, index)
    return tl.minimum(tl.maximum(index, 0), size - 1)


@triton.jit
def extent(sizes, WHICH: tl.constexpr):
    """Size number WHICH of the packed sizes (`launch.pack_sizes`)."""
    return (sizes[WHICH] >> 1) - 1


@triton.jit
def load_direct(pointer):
    """Load a tile into registers in the layout of its user. Memory that no kernel writes meanwhile.

    `tl.load` inside a pipelined loop copies a tile to shared memory in every stage, 4 bytes at a time if the compiler cannot prove that
    elements are adjacent. Bytes are returned as int32.
    """
    address = pointer.to(tl.int64)
    kind = pointer.dtype.element_ty
    if kind.primitive_bitwidth == 8:
        if kind.is_int_signed():
            return tl.inline_asm_elementwise("ld.global.nc.s8 $0, [$1];", "=r,l", [address], dtype=tl.int32, is_pure=True, pack=1)
        else:
            return tl.inline_asm_elementwise("ld.global.nc.u8 $0, [$1];", "=r,l", [address], dtype=tl.int32, is_pure=True, pack=1)
    elif kind.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise("ld.global.nc.b16 $0, [$1];", "=h,l", [address], dtype=kind, is_pure=True, pack=1)
    elif kind.primitive_bitwidth == 32:
        return tl.inline_asm_elementwise("ld.global.nc.b32 $0, [$1];", "=r,l", [address], dtype=kind, is_pure=True, pack=1)
    else:
        return tl.inline_asm_elementwise("ld.global.nc.b64 $0, [$1];", "=l,l", [address], dtype=kind, is_pure=True, pack=1)


@triton.jit
def mul_rn(x, y):
    """A float32 product that the compiler does not fuse into a multiply-add."""
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def exp2_subnormal(x):
    """2 ** x in float32 with results below 2⁻¹²⁶, which the instruction of `tl.exp2` replaces by 0."""
    half = tl.exp2(x * 0.5)
    return tl.where(x < -126.0, half * half, tl.exp2(x))


@triton.jit
def rsqrt_subnormal(x):
    """1 / √x in float32 by the instruction of `tl.rsqrt`, also of numbers below 2⁻¹²⁶, which it takes for 0."""
    return tl.where(tl.abs(x) < TINY, tl.rsqrt(x * 16777216.0) * 4096.0, tl.rsqrt(x))


@triton.jit
def keep_subnormals(x, y):
    """y = f(x); x itself where it is subnormal. For f(x) ≈ x near 0: Triton compiles libdevice with flush-to-zero."""
    return tl.where(tl.abs(x) < TINY, x, y)


@triton.jit
def tanh_fast(x):
    """The hardware's tanh, one instruction: relative error up to 2⁻¹¹, that of rounding to float16."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def tanh(x):
    """tanh to a few float32 ulps: a series where 1 − exp(−2|x|) would cancel."""
    square = x * x
    series = x + x * square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835))))
    small = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - small) / (1.0 + small)
    return tl.where(square < 0.09, series, tl.where(x < 0, -large, large))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def expm1(x):
    series = x * (1.0 + x * (1.0 / 2 + x * (1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120)))))
    return tl.where(tl.abs(x) < 0.1, series, tl.exp(x) - 1.0)


@triton.jit
def log1p(x):
    """The rounding error of 1 + x cancels in the quotient."""
    shifted = 1.0 + x
    rest = shifted - 1.0
    return tl.where(rest == 0.0, x, tl.where(shifted == float("inf"), shifted, tl.log(shifted) * (x / tl.where(rest == 0.0, 1.0, rest))))


@triton.jit
def cosh(x):
    """For large |x|, exp(|x| / 2)² / 2: exp(|x|) overflows before cosh(x) does."""
    root = tl.exp(0.5 * tl.abs(x))
    return tl.where(tl.abs(x) > 40.0, 0.5 * root * root, 0.5 * (tl.exp(x) + tl.exp(-x)))


@triton.jit
def sinh(x):
    root = tl.exp(0.5 * tl.abs(x))
    return tl.where(tl.abs(x) > 40.0, tl.where(x < 0, -0.5, 0.5) * root * root, 0.5 * (expm1(x) - expm1(-x)))


@triton.jit
def asinh(x):
    """log1p for small |x|, where log would cancel; log(2|x|) for large |x|, whose square would overflow."""
    size = tl.abs(x)
    near = tl.minimum(size, 1e9, propagate_nan=tl.PropagateNan.ALL)
    near = log1p(near + near * near / (1.0 + tl.sqrt(near * near + 1.0)))
    result = tl.where(size > 1e9, tl.log(size) + LN_2, near)
    return tl.where(x < 0, -result, result)


@triton.jit
def acosh(x):
    above = tl.minimum(x, 1e9, propagate_nan=tl.PropagateNan.ALL) - 1.0
    near = tl.where(x < 1.0, float("nan"), log1p(above + tl.sqrt(2.0 * above + above * above)))
    return tl.where(x > 1e9, tl.log(x) + LN_2, near)


@triton.jit
def erfc(x):
    """1 − erf(x) cancels for large x: there, a rational fit of erfc itself (W. H. Press et al.).

    Relative error 1.2e-7; in float32, up to 1e-5, because x² is rounded.
    """
    size = tl.abs(x)
    t = 1.0 / (1.0 + 0.5 * size)
    fit = -0.82215223 + t * 0.17087277
    fit = -1.13520398 + t * (1.48851587 + t * fit)
    fit = 0.09678418 + t * (-0.18628806 + t * (0.27886807 + t * fit))
    tail = t * tl.exp(-size * size - 1.26551223 + t * (1.00002368 + t * (0.37409196 + t * fit)))
    far = 4.0 if x.dtype == tl.float64 else 0.5
    return tl.where(x > far, tail, 1.0 - tl.erf(x))


@triton.jit
def hypot(a, b):
    """√(a² + b²), scaled by the larger magnitude: the squares neither overflow nor underflow."""
    a, b = alike(a, b)
    large, small = tl.maximum(tl.abs(a), tl.abs(b)), tl.minimum(tl.abs(a), tl.abs(b))
    quotient = small / tl.where(large == 0.0, 1.0, large)
    length = tl.where((a != a) | (b != b), a + b, large * tl.sqrt(1.0 + quotient * quotient))
    return tl.where((tl.abs(a) == float("inf")) | (tl.abs(b) == float("inf")), float("inf"), length)


@triton.jit
def logaddexp(a, b):
    """log(exp(a) + exp(b)). Equal operands are a case of their own: the difference of two infinities is NaN."""
    return tl.where(a == b, a + LN_2, tl.maximum(a, b) + log1p(tl.exp(-tl.abs(a - b))))


@triton.jit
def logaddexp2(a, b):
    return tl.where(a == b, a + 1.0, tl.maximum(a, b) + log1p(tl.exp2(-tl.abs(a - b))) * LOG2_E)


@triton.jit
def lerp(start, end, weight):
    """start + weight · (end − start), for weights of 0.5 or more computed from end, as torch does: weight 1 gives end exactly."""
    span = end - start
    return tl.where(tl.abs(weight) < 0.5, start + weight * span, end - span * (1.0 - weight))


@triton.jit
def softplus(x, beta, threshold):
    return tl.where(x * beta > threshold, x, log1p(tl.exp(tl.minimum(x * beta, threshold))) / beta)


@triton.jit
def truncate(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def alike(a, b):
    """a and b as tiles of the same shape and dtype; one of them may be a number."""
    always = (a == b) | (a != b)
    return tl.where(always, a, b), tl.where(always, b, a)


@triton.jit
def fmod(a, b):
    """The remainder of the truncated division a / b, exact for quotients below 2^70.

    `a - truncate(a / b) * b` is not: 1 / 0.1 is below 10 in float32, but rounds to 10.
    """
    a, b = alike(a, b)
    rest, divisor = a.to(tl.float64), b.to(tl.float64)
    negative = rest < 0
    for _ in tl.static_range(3):  # 24 bits of the quotient at a time: their float64 product with a float32 divisor is exact
        rest = tl.fma(-truncate(rest / divisor).to(tl.float32).to(tl.float64), divisor, rest)
        too_far = (rest != 0) & ((rest < 0) != negative)  # a quotient that was rounded up is too large
        rest = tl.where(too_far, rest + tl.where(negative, -tl.abs(divisor), tl.abs(divisor)), rest)
    only_b_is_infinite = (tl.abs(divisor) == float("inf")) & (tl.abs(a) != float("inf"))
    return tl.where(only_b_is_infinite, a, rest.to(a.dtype))


@triton.jit
def remainder(a, b):
    """Floating point: the remainder of the floor division a / b, which has the sign of b."""
    rest = fmod(a, b)
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def floor_quotient(a, b):
    """Floating point: the floor of a / b, from the exact remainder."""
    a, b = alike(a, b)
    rest = fmod(a, b)
    towards_zero = tl.floor((a.to(tl.float64) - rest) / b + 0.5)  # an integer but for the error of the division
    return tl.where(b == 0, a / b, (towards_zero - ((rest != 0) & ((rest < 0) != (b < 0))).to(tl.int32)).to(a.dtype))


@triton.jit
def round_even(x):
    """To the nearest integer, halves to the even one."""
    up = tl.floor(x + 0.5)
    odd = up - 2.0 * tl.floor(up * 0.5)
    return tl.where((up - x == 0.5) & (odd == 1.0), up - 1.0, tl.where(tl.abs(x) >= 8388608.0, x, up))


@triton.jit
def sign(x):
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def power(x, y):
    """x ** y for any float32 x: the sign of a negative base follows the parity of an integral exponent, else NaN."""
    magnitude = exp2_subnormal(y * tl.log2(tl.abs(x)))
    odd = y - 2.0 * tl.floor(y * 0.5)
    signed = tl.where(odd == 1.0, -magnitude, tl.where(odd == 0.0, magnitude, float("nan")))
    return tl.where(y == 0.0, 1.0, tl.where(x < 0, signed, magnitude))


@triton.jit
def gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_grad(grad, x):
    density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return grad * (0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * density)


@triton.jit
def gelu_tanh(x):
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def gelu_tanh_grad(grad, x):
    t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
    return grad * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 0.134145 * x * x))


@triton.jit
def silu_grad(grad, x):
    s = sigmoid(x)
    return grad * s * (1.0 + x * (1.0 - s))


@triton.jit
def bits_below(bound, columns):
    """int32 words whose bit 2 · (c // 8) + c % 2 is 1 if c < bound. columns: at most 128.

    In a tensor-core tile, all columns of a row that one thread holds have the same c & 6. A word has the bits of these columns.
    """
    before = tl.maximum(tl.minimum(tl.maximum(bound, 0), 128) - (columns & 6), 0)
    count = (before >> 3) * 2 + tl.minimum(before & 7, 2)
    half = count >> 1
    return ((1 << half) << (count - half)) - 1  # a shift by 32 is undefined
