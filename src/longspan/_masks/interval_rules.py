"""Interval arithmetic for aten operations: bounds of a result from bounds of its operands.

Bounds are vectors over squares of (query, key) indices, in the operand's *carrier*: bool for bool (False < True), int64 for every
integer type, and a floating-point type for itself. Bounds are never NaN.

Soundness rests on two facts:
1. A monotone operation has its extremes at the ends of its operands' intervals. Rounding (IEEE arithmetic, conversion) is monotone too,
   so running *the same operation in the same dtype* on the ends bounds every result bit for bit.
2. Bounds over a part of the domain lie inside the bounds over the whole domain. So `may_compute` and `is_sound` exclude overflow, NaN
   and division by zero once, over the whole domain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

EXACT = 2**62  # the largest magnitude of integer bounds: int64 arithmetic on them does not overflow


class Interval(NamedTuple):
    """Elementwise bounds lo <= value <= hi: tensors of rank 1 or more, broadcastable against other intervals."""

    lo: Tensor
    hi: Tensor


Operand = Interval | int | float | bool | str | None


@dataclass(frozen=True, kw_only=True)
class Call:
    """An operation of a program: its name without overload, the callable, and the dtype of its result."""

    name: str
    target: Callable[..., Any]
    dtype: torch.dtype
    kwargs: dict[str, Any] = field(default_factory=dict)


Rule = Callable[[Call, Sequence[Operand]], Interval | None]


def carrier(dtype: torch.dtype) -> torch.dtype:
    """The dtype that holds bounds of values of `dtype`."""
    return dtype if dtype.is_floating_point or dtype == torch.bool else torch.int64


def dtype_range(dtype: torch.dtype) -> Interval | None:
    """The interval of all values of a dtype; None for floats, because no interval contains NaN."""
    if dtype == torch.bool:
        return Interval(torch.tensor([False]), torch.tensor([True]))
    if dtype.is_floating_point or dtype.is_complex:
        return None
    info = torch.iinfo(dtype)
    return Interval(torch.tensor([info.min]), torch.tensor([info.max]))


def may_compute(call: Call, args: Sequence[Operand]) -> bool:
    """Whether a rule may compute with the bounds of its operands: floats are finite, int64 does not overflow.

    Checked before the rule runs, because the smallest int64 divided by −1 ends the process.
    """
    if call.name not in ARITHMETIC:
        return True
    if call.dtype.is_floating_point:
        return all(_finite(a, call.dtype) for a in args)
    return _growth(call.name, [_magnitude(a) for a in args if not isinstance(a, str | None)]) <= EXACT


def is_sound(call: Call, result: Interval | None) -> bool:
    """Whether the bounds of a result over the whole domain are valid, and so the bounds on every part of it."""
    if result is None or result.lo.dtype != carrier(call.dtype) or result.hi.dtype != carrier(call.dtype):
        return False
    if bool((result.lo.isnan() | result.hi.isnan()).any()):
        return False
    if call.name in NEAR and not _finite(result, call.dtype):
        return False  # `near_monotone` widens its bounds: inf − inf is NaN
    if call.dtype.is_floating_point or call.dtype == torch.bool:
        return True
    info = torch.iinfo(call.dtype)
    return bool((result.lo >= info.min).all() & (result.hi <= info.max).all())


def _finite(arg: Operand, dtype: torch.dtype) -> bool:
    """Whether an operand is finite after conversion to `dtype`."""
    if isinstance(arg, Interval):
        return bool(arg.lo.to(dtype).isfinite().all() & arg.hi.to(dtype).isfinite().all())
    return arg is None or isinstance(arg, str) or math.isfinite(arg)


def _magnitude(arg: Operand) -> int:
    """The largest absolute value of an integer operand; above EXACT for floats that are not."""
    if isinstance(arg, Interval):
        if arg.lo.is_floating_point():
            return EXACT + 1
        return max(abs(int(arg.lo.min())), abs(int(arg.hi.max())))
    return abs(math.ceil(cast(float, arg))) if math.isfinite(cast(float, arg)) else EXACT + 1


def _growth(name: str, sizes: Sequence[int]) -> int:
    """An upper bound on the magnitude of an integer result and of its intermediate bounds."""
    if name == "mul":
        return math.prod(sizes)
    if name in ("square", "pow"):
        return sizes[0] ** 2
    if name in LEFT_SHIFTS:
        return sizes[0] << min(sizes[1], 64)
    return sum(sizes)


# ------------------------------------------------------------------------------------------------ rule makers


def monotone(*signs: int) -> Rule:
    """The rule of an operation that increases (+1) or decreases (−1) in each operand."""
    assert set(signs) <= {1, -1}

    def rule(call: Call, args: Sequence[Operand]) -> Interval | None:
        low, high = ([_end(a, s * side) for a, s in zip(args, signs, strict=False)] for side in (1, -1))
        return Interval(call.target(*low, **call.kwargs), call.target(*high, **call.kwargs))

    return rule


def _end(arg: Operand, sign: int) -> Any:
    """The lower end of an interval for sign +1, the upper end for −1; scalars unchanged."""
    return arg if not isinstance(arg, Interval) else arg.lo if sign > 0 else arg.hi


def near_monotone(call: Call, args: Sequence[Operand]) -> Interval | None:
    """Bounds of an increasing function whose rounding differs between libraries (exp, tanh): the ends, widened by 16 ulp."""
    if call.dtype not in (torch.float32, torch.float64):
        return None
    lo, hi = cast(Interval, monotone(1)(call, args))
    info = torch.finfo(call.dtype)
    return Interval(lo - (16 * info.eps * lo.abs() + info.tiny), hi + (16 * info.eps * hi.abs() + info.tiny))


def on_truth(rule: Rule) -> Rule:
    """The rule applied to the truth values of its operands."""
    return lambda call, args: rule(call, [truth(a) for a in args])


def truth(arg: Operand) -> Interval:
    """Bounds of `value != 0`, bool."""
    if not isinstance(arg, Interval):
        value = torch.tensor([bool(arg)])
        return Interval(value, value)
    if arg.lo.dtype == torch.bool:
        return arg
    return Interval((arg.lo > 0) | (arg.hi < 0), (arg.lo != 0) | (arg.hi != 0))


def as_interval(arg: Operand, dtype: torch.dtype) -> Interval:
    """An operand as an interval in the carrier of `dtype`. The conversion is torch's, which is monotone."""
    target = carrier(dtype)
    if isinstance(arg, Interval):
        return Interval(arg.lo.to(target), arg.hi.to(target))
    value = torch.tensor([arg], dtype=target)
    return Interval(value, value)


# ------------------------------------------------------------------------------------------------ rules of other operations


def _equal(call: Call, args: Sequence[Operand]) -> Interval:
    (alo, ahi), (blo, bhi) = (a if isinstance(a, Interval) else (a, a) for a in args)
    may = _compare(torch.le, alo, bhi) & _compare(torch.ge, ahi, blo)
    # a.lo = b.hi and a.hi = b.lo hold together only if both intervals are the same single value.
    must = _compare(torch.eq, alo, bhi) & _compare(torch.eq, ahi, blo)
    return Interval(must, may)


def _compare(op: Callable[..., Tensor], a: Any, b: Any) -> Tensor:
    """`op(a, b)` for a tensor and a scalar in either order."""
    return op(a, b) if isinstance(a, Tensor) else {torch.le: torch.ge, torch.ge: torch.le, torch.eq: torch.eq}[op](b, a)


def _unequal(call: Call, args: Sequence[Operand]) -> Interval:
    lo, hi = _equal(call, args)
    return Interval(~hi, ~lo)


def _corners(call: Call, args: Sequence[Operand]) -> Interval:
    """Bounds of an operation that is monotone in each operand, in a direction set by the sign of the other: the four corners."""
    ends = [(a.lo, a.hi) if isinstance(a, Interval) else (a,) for a in args[:2]]
    corners = [call.target(x, y, **call.kwargs) for x in ends[0] for y in ends[1]]
    lo = hi = corners[0]
    for value in corners[1:]:
        lo, hi = torch.minimum(lo, value), torch.maximum(hi, value)
    return Interval(lo, hi)


def _divide(call: Call, args: Sequence[Operand]) -> Interval | None:
    floors = call.name == "floor_divide" or call.kwargs.get("rounding_mode") == "floor"
    if (call.dtype.is_floating_point and floors) or not _sign_fixed(args[1]):
        return None  # torch computes floor division of floats with fmod, whose rounding is not proved monotone
    return _corners(call, args)


def _sign_fixed(arg: Operand) -> bool:
    if isinstance(arg, Interval):
        return bool((arg.lo > 0).all() | (arg.hi < 0).all())
    return arg != 0


def _remainder(call: Call, args: Sequence[Operand]) -> Interval | None:
    """Bounds of an integer remainder by a positive divisor; the result has the sign of the divisor, as in Python."""
    if call.dtype.is_floating_point:
        return None
    a, m = (as_interval(x, torch.int64) for x in args)
    if not bool((m.lo > 0).all()):
        return None
    if call.name == "fmod" and not bool((a.lo >= 0).all()):
        return None
    within = (a.lo >= 0) & (a.hi < m.lo)
    # Inside one period the remainder increases with the dividend.
    one_period = within | ((m.lo == m.hi) & (torch.div(a.lo, m.lo, rounding_mode="floor") == torch.div(a.hi, m.lo, rounding_mode="floor")))
    shift = torch.where(within, 0, a.lo - torch.remainder(a.lo, m.lo))
    return Interval(torch.where(one_period, a.lo - shift, 0), torch.where(one_period, a.hi - shift, m.hi - 1))


def _absolute(call: Call, args: Sequence[Operand]) -> Interval:
    lo, hi = cast(Interval, args[0])
    return Interval(torch.maximum(lo, -hi).clamp(min=0), torch.maximum(-lo, hi))


def _square(call: Call, args: Sequence[Operand]) -> Interval | None:
    if call.name == "pow" and not (isinstance(args[1], int | float) and args[1] == 2):
        return None
    size = _absolute(call, args)
    return Interval(call.target(size.lo, *args[1:]), call.target(size.hi, *args[1:]))


def _where(call: Call, args: Sequence[Operand]) -> Interval:
    choice, a, b = truth(args[0]), as_interval(args[1], call.dtype), as_interval(args[2], call.dtype)
    lo, hi = torch.minimum(a.lo, b.lo), torch.maximum(a.hi, b.hi)
    return Interval(
        torch.where(choice.lo, a.lo, torch.where(choice.hi, lo, b.lo)), torch.where(choice.lo, a.hi, torch.where(choice.hi, hi, b.hi))
    )


def _masked_fill(call: Call, args: Sequence[Operand]) -> Interval:
    return _where(call, (args[1], args[2], args[0]))


def _bits(call: Call, args: Sequence[Operand]) -> Interval | None:
    """Bounds of bitwise and, or and xor; for bool, and/or are monotone and xor is `!=`."""
    name = call.name.removeprefix("bitwise_").strip("_")
    if call.dtype == torch.bool:
        a, b = truth(args[0]), truth(args[1])
        if name == "xor":
            return _unequal(call, (a, b))
        # Not call.target: of `mask & True` it takes a number.
        combine = torch.logical_and if name == "and" else torch.logical_or
        return Interval(combine(a.lo, b.lo), combine(a.hi, b.hi))
    a, b = (as_interval(x, torch.int64) for x in args)
    if name == "and":
        for x, m in ((a, b), (b, a)):
            mask = int(m.lo.max())
            if mask >= 0 and mask & (mask + 1) == 0 and bool((m.lo == m.hi).all() & (m.lo == mask).all()) and mask < EXACT:
                return _remainder(call, (x, mask + 1))  # x & (2^k − 1) = x mod 2^k, also for negative x in two's complement
    nonnegative = [bool((x.lo >= 0).all()) for x in (a, b)]
    if name == "and" and any(nonnegative):
        ends = [x.hi for x, is_nonnegative in zip((a, b), nonnegative, strict=True) if is_nonnegative]
        return Interval(torch.zeros_like(ends[0]), torch.minimum(ends[0], ends[-1]))
    if not all(nonnegative):
        return None
    upper = a.hi | b.hi
    for shift in (1, 2, 4, 8, 16, 32):  # sets every bit below the highest one
        upper = upper | (upper >> shift)
    return Interval(torch.maximum(a.lo, b.lo) if name == "or" else torch.zeros_like(upper), upper)


def _shift(call: Call, args: Sequence[Operand]) -> Interval | None:
    """Bounds of a shift by one known amount."""
    by = as_interval(args[1], torch.int64)
    if not bool(((by.lo == by.hi) & (by.lo >= 0) & (by.hi < _width(call.dtype))).all()):
        return None
    value = as_interval(args[0], torch.int64)
    shift = torch.bitwise_left_shift if call.name in LEFT_SHIFTS else torch.bitwise_right_shift
    return Interval(shift(value.lo, by.lo), shift(value.hi, by.lo))


def _width(dtype: torch.dtype) -> int:
    """Bits of an integer dtype; 1 for dtypes that cannot be shifted."""
    return 1 if dtype == torch.bool or dtype.is_floating_point else torch.iinfo(dtype).bits


def _convert(call: Call, args: Sequence[Operand]) -> Interval | None:
    a = cast(Interval, args[0])
    if call.dtype == torch.bool:
        return truth(a)
    if a.lo.is_floating_point() and not call.dtype.is_floating_point and _magnitude_of_float(a) > EXACT:
        return None
    return as_interval(a, call.dtype)


def _magnitude_of_float(a: Interval) -> float:
    size = max(abs(float(a.lo.min())), abs(float(a.hi.max())))
    return size if math.isfinite(size) else math.inf


def _same(call: Call, args: Sequence[Operand]) -> Interval:
    return cast(Interval, args[0])


def _never(call: Call, args: Sequence[Operand]) -> Interval:
    no = torch.tensor([False])
    return Interval(no, no)


def _clamp(call: Call, args: Sequence[Operand]) -> Interval | None:
    low, high = (*args[1:], None, None)[:2]
    call = Call(name=call.name, target=torch.clamp, dtype=call.dtype)
    if low is None and high is None:
        return None
    # torch.clamp rejects one scalar and one tensor bound.
    if isinstance(low, Interval) or isinstance(high, Interval):
        low, high = (x if x is None else as_interval(x, call.dtype) for x in (low, high))
    return monotone(1, 1, 1)(call, (as_interval(args[0], call.dtype), low, high))


RISING = monotone(1, 1)
LEFT_SHIFTS = ("__lshift__", "bitwise_left_shift")
NEAR = frozenset(("exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "tanh", "sigmoid"))
INTEGRAL = frozenset(("add", "sub", "rsub", "mul", "div", "floor_divide", "remainder", "fmod", "neg", "abs", "square", "pow", *LEFT_SHIFTS))
ARITHMETIC = INTEGRAL | NEAR

RULES: dict[str, Rule] = {
    "add": RISING,
    "sub": monotone(1, -1),
    "rsub": monotone(-1, 1),
    "neg": monotone(-1),
    "mul": _corners,
    "div": _divide,
    "floor_divide": _divide,
    "remainder": _remainder,
    "fmod": _remainder,
    "abs": _absolute,
    "square": _square,
    "pow": _square,
    "where": _where,
    "masked_fill": _masked_fill,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda call, args: _clamp(call, (args[0], None, args[1])),
    "eq": _equal,
    "ne": _unequal,
    "logical_and": on_truth(RISING),
    "logical_or": on_truth(RISING),
    "logical_xor": on_truth(_unequal),
    "logical_not": on_truth(monotone(-1)),
    "bitwise_not": monotone(-1),
    "_to_copy": _convert,
    "isnan": _never,
    **dict.fromkeys(("lt", "le"), monotone(-1, 1)),
    **dict.fromkeys(("gt", "ge"), monotone(1, -1)),
    **dict.fromkeys(("minimum", "maximum", "fmin", "fmax"), RISING),
    **dict.fromkeys(("floor", "ceil", "round", "trunc", "sgn", "sign", "relu"), monotone(1)),
    **dict.fromkeys(NEAR, near_monotone),
    **dict.fromkeys(("clone", "detach", "alias", "lift_fresh_copy"), _same),
    **dict.fromkeys((p + n for p, s in (("bitwise_", ""), ("__", "__")) for n in (f"and{s}", f"or{s}", f"xor{s}")), _bits),
    **dict.fromkeys(("__rshift__", "bitwise_right_shift", *LEFT_SHIFTS), _shift),
}
