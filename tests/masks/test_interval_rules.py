"""Rules of interval arithmetic return the tightest bounds where they can, known wider ones elsewhere, and none where none is sound."""

import itertools

import pytest
import torch

from longspan._masks import interval_rules
from longspan._masks.interval_rules import EXACT, RULES, Call, Interval, as_interval, carrier, dtype_range, is_sound, may_compute

I8, U8, I32, I64 = torch.int8, torch.uint8, torch.int32, torch.int64
F16, F32, F64, BOOL = torch.float16, torch.float32, torch.float64, torch.bool
aten = torch.ops.aten


def _interval(lo, hi, dtype=I64):
    lo, hi = ((x,) if not isinstance(x, list | tuple) else x for x in (lo, hi))
    return Interval(torch.tensor(lo, dtype=dtype), torch.tensor(hi, dtype=dtype))


def _apply(name, target, args, dtype=I64, **kwargs):
    """The bounds of a rule as lists, or None."""
    result = RULES[name](Call(name=name, target=target, dtype=dtype, kwargs=kwargs), args)
    return None if result is None else (result.lo.tolist(), result.hi.tolist())


def _name(parameter):
    """The first parameter of a case: the rule."""
    return parameter if isinstance(parameter, str) else ""


SMALL = torch.arange(-3, 4)
POSITIVE, NEGATIVE, NOT_NEGATIVE = torch.arange(1, 5), torch.arange(-4, 0), torch.arange(0, 5)
HALVES = torch.arange(-3, 4) / 2
TRUTHS = torch.tensor([False, True])

# (name of the rule, operation, values of each operand, keywords)
TIGHT = [
    ("add", aten.add.Tensor, (SMALL, POSITIVE), {}),
    ("add", aten.add.Tensor, (SMALL, POSITIVE), {"alpha": 2}),
    ("sub", aten.sub.Tensor, (SMALL, POSITIVE), {}),
    ("rsub", torch.rsub, (SMALL, POSITIVE), {}),
    ("neg", aten.neg.default, (SMALL,), {}),
    ("mul", aten.mul.Tensor, (SMALL, SMALL), {}),
    ("mul", aten.mul.Tensor, (HALVES, HALVES), {}),
    ("div", aten.div.Tensor_mode, (SMALL, POSITIVE), {"rounding_mode": "floor"}),
    ("div", aten.div.Tensor_mode, (SMALL, NEGATIVE), {"rounding_mode": "trunc"}),
    ("div", aten.div.Tensor, (HALVES, POSITIVE.float()), {}),
    ("floor_divide", aten.floor_divide.default, (SMALL, NEGATIVE), {}),
    ("abs", aten.abs.default, (SMALL,), {}),
    ("abs", aten.abs.default, (HALVES,), {}),
    ("square", aten.square.default, (SMALL,), {}),
    ("where", aten.where.self, (TRUTHS, SMALL, POSITIVE), {}),
    ("masked_fill", lambda x, hidden, fill: torch.where(hidden, fill, x), (SMALL, TRUTHS, POSITIVE), {}),
    ("clamp", torch.clamp, (SMALL, NEGATIVE, POSITIVE), {}),
    ("clamp_min", torch.clamp_min, (SMALL, POSITIVE), {}),
    ("clamp_max", torch.clamp_max, (SMALL, POSITIVE), {}),
    ("eq", aten.eq.Tensor, (SMALL, POSITIVE), {}),
    ("ne", aten.ne.Tensor, (SMALL, POSITIVE), {}),
    ("lt", aten.lt.Tensor, (SMALL, POSITIVE), {}),
    ("le", aten.le.Tensor, (SMALL, POSITIVE), {}),
    ("gt", aten.gt.Tensor, (SMALL, POSITIVE), {}),
    ("ge", aten.ge.Tensor, (SMALL, POSITIVE), {}),
    ("logical_and", aten.logical_and.default, (SMALL, NOT_NEGATIVE), {}),
    ("logical_or", aten.logical_or.default, (SMALL, NOT_NEGATIVE), {}),
    ("logical_xor", aten.logical_xor.default, (SMALL, NOT_NEGATIVE), {}),
    ("logical_not", aten.logical_not.default, (SMALL,), {}),
    ("bitwise_not", aten.bitwise_not.default, (SMALL,), {}),
    ("bitwise_not", aten.bitwise_not.default, (TRUTHS,), {}),
    ("bitwise_and", aten.bitwise_and.Tensor, (TRUTHS, TRUTHS), {}),
    ("__or__", aten.bitwise_or.Tensor, (TRUTHS, TRUTHS), {}),
    ("bitwise_xor", aten.bitwise_xor.Tensor, (TRUTHS, TRUTHS), {}),
    ("_to_copy", lambda x: x.bool(), (SMALL,), {}),
    ("_to_copy", lambda x: x.to(I64), (HALVES,), {}),
    ("_to_copy", lambda x: x.to(F32), (SMALL,), {}),
    ("minimum", torch.minimum, (SMALL, POSITIVE), {}),
    ("maximum", torch.maximum, (SMALL, POSITIVE), {}),
    ("fmin", torch.fmin, (HALVES, HALVES), {}),
    ("fmax", torch.fmax, (HALVES, HALVES), {}),
    *((name, getattr(torch, name), (HALVES,), {}) for name in ("floor", "ceil", "round", "trunc", "sign", "sgn", "relu")),
    *((name, torch.clone, (SMALL,), {}) for name in ("clone", "detach", "alias", "lift_fresh_copy")),
]


@pytest.mark.parametrize(("name", "target", "operands", "kwargs"), TIGHT, ids=_name)
def test_bounds_are_the_extremes_over_all_values_of_the_operands(name, target, operands, kwargs):
    grids = [x.reshape([-1 if i == axis else 1 for i in range(len(operands))]) for axis, x in enumerate(operands)]
    values = target(*grids, **kwargs)
    for ends in itertools.product(*(list(itertools.combinations_with_replacement(range(len(x)), 2)) for x in operands)):
        args = [Interval(x[i : i + 1], x[j : j + 1]) for x, (i, j) in zip(operands, ends, strict=True)]
        part = values[tuple(slice(i, j + 1) for i, j in ends)]
        lo, hi = _apply(name, target, args, values.dtype, **kwargs)
        assert (lo, hi) == ([part.min().item()], [part.max().item()]), args


@pytest.mark.parametrize("name", ["remainder", "fmod"])
def test_remainders_are_tight_inside_one_period_of_a_single_divisor(name):
    target = getattr(aten, name).Tensor
    for lo, hi in itertools.combinations_with_replacement(range(-9, 10), 2):
        for m_lo, m_hi in itertools.combinations_with_replacement(range(1, 6), 2):
            got = _apply(name, target, [_interval(lo, hi), _interval(m_lo, m_hi)])
            if name == "fmod" and lo < 0:
                assert got is None
            elif lo >= 0 and hi < m_lo:
                assert got == ([lo], [hi])
            elif m_lo == m_hi and lo // m_lo == hi // m_lo:
                assert got == ([lo % m_lo], [hi % m_lo])
            else:
                assert got == ([0], [m_hi - 1])


MAX = torch.iinfo(I64).max
# (rule, operation, operands, dtype of the result, keywords, bounds)
CASES = [
    ("add", aten.add.Tensor, (_interval(2, 5), 3), I64, {}, (5, 8)),
    ("rsub", torch.rsub, (_interval(2, 5), 3), I64, {}, (-2, 1)),
    ("mul", aten.mul.Tensor, (_interval(-2, 5), -3), I64, {}, (-15, 6)),
    ("eq", aten.eq.Scalar, (_interval(4, 4), 4), BOOL, {}, (True, True)),
    ("eq", aten.eq.Scalar, (_interval(3, 5), 4), BOOL, {}, (False, True)),
    ("eq", aten.eq.Scalar, (_interval(5, 6), 4), BOOL, {}, (False, False)),
    ("eq", aten.eq.Scalar, (4, _interval(3, 4)), BOOL, {}, (False, True)),
    ("eq", aten.eq.Scalar, (4, _interval(1, 3)), BOOL, {}, (False, False)),
    ("eq", aten.eq.Scalar, (4, _interval(5, 6)), BOOL, {}, (False, False)),
    ("eq", aten.eq.Scalar, (4, _interval(4, 4)), BOOL, {}, (True, True)),
    ("ne", aten.ne.Scalar, (_interval(3, 4), 4), BOOL, {}, (False, True)),
    # Divisors of one sign only, and no floor division of floats.
    ("div", aten.div.Tensor_mode, (_interval(1, 9), _interval(0, 2)), I64, {"rounding_mode": "floor"}, None),
    ("div", aten.div.Tensor_mode, (_interval(1, 9), _interval(-2, 0)), I64, {"rounding_mode": "floor"}, None),
    ("div", aten.div.Tensor_mode, (_interval(1, 9), _interval(-2, 2)), I64, {"rounding_mode": "floor"}, None),
    ("div", aten.div.Tensor_mode, (_interval(1, 9), 0), I64, {"rounding_mode": "floor"}, None),
    ("div", aten.div.Tensor_mode, (_interval(1, 9), 2), I64, {"rounding_mode": "floor"}, (0, 4)),
    ("div", aten.div.Tensor_mode, (_interval(-9, 9), -2), I64, {"rounding_mode": "trunc"}, (-4, 4)),
    ("div", aten.div.Tensor_mode, (_interval(1, 9, F32), 2.0), F32, {"rounding_mode": "floor"}, None),
    ("div", aten.div.Tensor_mode, (_interval(1, 9, F32), 2.0), F32, {"rounding_mode": "trunc"}, (0, 4)),
    ("floor_divide", aten.floor_divide.default, (_interval(1, 9, F32), _interval(2, 2, F32)), F32, {}, None),
    ("div", aten.div.Tensor, (_interval(1, 9), 2), F32, {}, (0.5, 4.5)),
    ("remainder", aten.remainder.Scalar, (_interval(9, 11), 7), I64, {}, (2, 4)),
    ("remainder", aten.remainder.Scalar, (_interval(6, 7), 7), I64, {}, (0, 6)),
    ("remainder", aten.remainder.Scalar, (_interval(6, 7), 0), I64, {}, None),
    ("remainder", aten.remainder.Scalar, (_interval(6, 7), -7), I64, {}, None),
    ("remainder", aten.remainder.Tensor, (_interval(6, 7), _interval(0, 7)), I64, {}, None),
    ("remainder", aten.remainder.Scalar, (_interval(1, 2, F32), 7), F32, {}, None),
    ("fmod", aten.fmod.Scalar, (_interval(-1, 2), 7), I64, {}, None),
    ("fmod", aten.fmod.Scalar, (_interval(0, 2), 7), I64, {}, (0, 2)),
    ("pow", aten.pow.Tensor_Scalar, (_interval(-3, 2), 2), I64, {}, (0, 9)),
    ("pow", aten.pow.Tensor_Scalar, (_interval(-3, 2), 2.0), F32, {}, (0, 9)),
    ("pow", aten.pow.Tensor_Scalar, (_interval(-3, 2), 3), I64, {}, None),
    ("pow", aten.pow.Tensor_Tensor, (_interval(-3, 2), _interval(2, 2)), I64, {}, None),
    ("where", aten.where.self, (_interval(2, 3), _interval(1, 2), 7), I64, {}, (1, 2)),
    ("where", aten.where.self, (True, _interval(1, 2), 7), I64, {}, (1, 2)),
    ("where", aten.where.self, (_interval(0, 3), _interval(1, 2), 2.5), F32, {}, (1, 2.5)),
    ("masked_fill", aten.masked_fill.Scalar, (_interval(1, 2), _interval(False, True, BOOL), -7), I64, {}, (-7, 2)),
    ("clamp", torch.clamp, (_interval(-5, 5), None, None), I64, {}, None),
    ("clamp", torch.clamp, (_interval(-5, 5), -2), I64, {}, (-2, 5)),
    ("clamp", torch.clamp, (_interval(-5, 5), None, 3), I64, {}, (-5, 3)),
    ("clamp", torch.clamp, (_interval(-5, 5), -2, 3), I64, {}, (-2, 3)),
    ("clamp", torch.clamp, (_interval(-5, 5), _interval(-3, -1), 3), I64, {}, (-3, 3)),
    ("clamp", torch.clamp, (_interval(-5, 5), -4, _interval(1, 2)), I64, {}, (-4, 2)),
    ("clamp", torch.clamp, (_interval(-5, 5), _interval(-3, -1), None), I64, {}, (-3, 5)),
    ("clamp_max", torch.clamp_max, (_interval(-5, 5), 3), I64, {}, (-5, 3)),
    ("clamp_min", torch.clamp_min, (_interval(-5, 5), 3), I64, {}, (3, 5)),
    ("isnan", torch.isnan, (_interval(1.0, 2.0, F32),), BOOL, {}, (False, False)),
    # Bitwise operations with scalars.
    ("bitwise_and", aten.bitwise_and.Tensor, (_interval(3, 5), 7), I64, {}, (3, 5)),
    ("__and__", aten.bitwise_and.Tensor, (7, _interval(3, 5)), I64, {}, (3, 5)),
    ("bitwise_and", aten.bitwise_and.Tensor, (_interval(6, 9), 7), I64, {}, (0, 7)),
    ("bitwise_and", aten.bitwise_and.Tensor, (_interval(-3, -2), 7), I64, {}, (5, 6)),
    ("bitwise_and", aten.bitwise_and.Tensor, (_interval(-3, 9), 0), I64, {}, (0, 0)),
    ("bitwise_and", aten.bitwise_and.Tensor, (_interval(9, 10), 1), I64, {}, (0, 1)),
    ("bitwise_and", aten.bitwise_and.Tensor, (_interval(4, 5), 6), I64, {}, (0, 5)),
    ("bitwise_and", aten.bitwise_and.Tensor, (_interval(4, 9), 6), I64, {}, (0, 6)),
    ("bitwise_and", aten.bitwise_and.Tensor, (_interval(-4, 9), 6), I64, {}, (0, 6)),
    ("bitwise_and", aten.bitwise_and.Tensor, (_interval(2, 9), -1), I64, {}, (0, 9)),
    ("bitwise_and", aten.bitwise_and.Tensor, (_interval(-4, 9), -2), I64, {}, None),
    ("bitwise_and", aten.bitwise_and.Tensor, (_interval(-4, 9), _interval(6, 7)), I64, {}, (0, 7)),
    ("bitwise_and", aten.bitwise_and.Tensor, (_interval(0, 9), _interval(-6, 7)), I64, {}, (0, 9)),
    ("bitwise_and", aten.bitwise_and.Tensor, (_interval(5, 9), 2**62 - 1), I64, {}, (5, 9)),
    ("bitwise_and", aten.bitwise_and.Tensor, (_interval(-3, 9), MAX), I64, {}, (0, MAX)),
    ("bitwise_or", aten.bitwise_or.Tensor, (_interval(1, 4), 9), I64, {}, (9, 15)),
    ("bitwise_or", aten.bitwise_or.Tensor, (_interval(0, 2**61), 1), I64, {}, (1, 2**62 - 1)),
    ("bitwise_or", aten.bitwise_or.Tensor, (_interval(-1, 4), 9), I64, {}, None),
    ("bitwise_or", aten.bitwise_or.Tensor, (_interval(1, 4), -9), I64, {}, None),
    ("bitwise_xor", aten.bitwise_xor.Tensor, (_interval(1, 4), 9), I64, {}, (0, 15)),
    ("__xor__", aten.bitwise_xor.Tensor, (_interval(0, 2**61), 1), I64, {}, (0, 2**62 - 1)),
    ("__xor__", aten.bitwise_xor.Tensor, (_interval(0, 3), _interval(0, 0)), I64, {}, (0, 3)),
    ("__xor__", aten.bitwise_xor.Tensor, (_interval(-1, 3), _interval(0, 0)), I64, {}, None),
    ("bitwise_and", aten.bitwise_and.Tensor, (_interval(False, True, BOOL), True), BOOL, {}, (False, True)),
    ("bitwise_or", aten.bitwise_or.Tensor, (_interval(False, True, BOOL), True), BOOL, {}, (True, True)),
    # Shifts by one known amount within the width of the dtype.
    ("__lshift__", None, (_interval(-3, 5), 2), I64, {}, (-12, 20)),
    ("bitwise_left_shift", None, (_interval(-3, 5), _interval(2, 2)), I64, {}, (-12, 20)),
    ("__rshift__", None, (_interval(-9, 21), 2), I64, {}, (-3, 5)),
    ("bitwise_right_shift", None, (_interval(-9, 21), 0), I64, {}, (-9, 21)),
    ("bitwise_right_shift", None, (_interval(-9, 21), -1), I64, {}, None),
    ("bitwise_right_shift", None, (_interval(-9, 21), _interval(1, 2)), I64, {}, None),
    ("bitwise_right_shift", None, (_interval(-9, 21), 31), I32, {}, (-1, 0)),
    ("bitwise_right_shift", None, (_interval(-9, 21), 32), I32, {}, None),
    ("bitwise_right_shift", None, (_interval(0, 1), 1), BOOL, {}, None),
    ("bitwise_right_shift", None, (_interval(0, 1), 0), BOOL, {}, (0, 1)),
    # Conversions.
    ("_to_copy", None, (_interval(-(2.0**62), 2.0**62, F64),), I64, {}, (-EXACT, EXACT)),
    ("_to_copy", None, (_interval(-1.0, 2.0**62 + 2**11, F64),), I64, {}, None),
    ("_to_copy", None, (_interval(-(2.0**62) - 2**11, 1.0, F64),), I64, {}, None),
    ("_to_copy", None, (_interval(-1.0, torch.inf, F64),), I64, {}, None),
    ("_to_copy", None, (_interval(-1.0, torch.inf, F64),), F32, {}, (-1.0, torch.inf)),
    ("_to_copy", None, (_interval(-MAX, MAX),), I8, {}, (-MAX, MAX)),
    ("_to_copy", None, (_interval(0.25, 2.0, F32),), BOOL, {}, (True, True)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "target", "operands", "dtype", "kwargs", "expected"), CASES, ids=_name)
def test_bounds_of_scalars_edges_and_unsupported_operands(name, target, operands, dtype, kwargs, expected):
    got = _apply(name, target, operands, dtype, **kwargs)
    assert got == (None if expected is None else ([expected[0]], [expected[1]]))


def test_one_unsupported_square_leaves_all_without_bounds():
    assert _apply("div", aten.div.Tensor_mode, [_interval([1, 1], [2, 2]), _interval([1, -2], [2, -1])], rounding_mode="floor") is None
    assert _apply("remainder", aten.remainder.Tensor, [_interval([1, 1], [2, 2]), _interval([1, 0], [2, 1])]) is None
    assert _apply("fmod", aten.fmod.Tensor, [_interval([1, -1], [2, 2]), 9]) is None
    assert _apply("bitwise_and", aten.bitwise_and.Tensor, [_interval([3, 3], [5, 5]), _interval([7, 3], [7, 3])]) == ([0, 0], [5, 3])
    assert _apply("bitwise_and", aten.bitwise_and.Tensor, [_interval([-3, 3], [5, 5]), _interval([-7, 3], [7, 3])]) is None
    assert _apply("bitwise_and", aten.bitwise_and.Tensor, [_interval([3, 3], [5, 5]), _interval([7, 7], [7, 9])]) == ([0, 0], [5, 5])
    for far in (_interval([-(2.0**63), 0.0], [0.0, 1.0], F64), _interval([0.0, 0.0], [2.0**63, 1.0], F64)):
        assert _apply("_to_copy", None, [far]) is None
    assert _apply("bitwise_right_shift", None, [_interval([8, 8], [9, 9]), _interval([2, 3], [2, 3])]) == ([2, 1], [2, 1])


def test_functions_that_libraries_round_differently_are_widened_by_16_ulp():
    for dtype in (F32, F64):
        info = torch.finfo(dtype)
        call = Call(name="exp", target=torch.clone, dtype=dtype)
        got = RULES["exp"](call, [_interval([-2.0, 0.0], [4.0, 0.0], dtype)])
        assert got.lo.tolist() == [-2.0 - 32 * info.eps, -info.tiny]
        assert got.hi.tolist() == [4.0 + 64 * info.eps, info.tiny]
        assert RULES["exp"](call, [_interval(-8.0, -4.0, dtype)]).hi.tolist() == [-4.0 + 64 * info.eps]
    for name in ("exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "tanh", "sigmoid"):
        got = RULES[name](Call(name=name, target=getattr(torch, name), dtype=F64), [_interval(1.0, 2.0, F64)])
        ends = getattr(torch, name)(torch.tensor([1.0, 2.0], dtype=F64)).tolist()
        assert [got.lo.item(), got.hi.item()] == pytest.approx(ends, rel=1e-12)
        assert RULES[name](Call(name=name, target=getattr(torch, name), dtype=F16), [_interval(1.0, 2.0, F16)]) is None


def test_carriers_and_ranges_of_dtypes():
    assert [carrier(d) for d in (BOOL, U8, I32, I64, F16, F64)] == [BOOL, I64, I64, I64, F16, F64]
    ranges = {BOOL: (False, True), I8: (-128, 127), U8: (0, 255), I32: (-(2**31), 2**31 - 1)}
    assert {d: tuple(x.item() for x in dtype_range(d)) for d in ranges} == ranges
    assert all(x.shape == (1,) for d in ranges for x in dtype_range(d))
    assert dtype_range(F32) is None and dtype_range(torch.complex64) is None
    assert as_interval(2.5, F32).lo.dtype == F32 and as_interval(2, U8).hi.tolist() == [2]


def _allowed(name, *args, dtype=I64):
    return may_compute(Call(name=name, target=None, dtype=dtype), args)


def test_integer_arithmetic_is_bounded_by_two_to_the_62():
    half = _interval(-(2**61), 5)
    assert _allowed("add", half, _interval(0, 2**61)) and not _allowed("add", half, _interval(0, 2**61 + 1))
    assert _allowed("sub", half, 2**61) and not _allowed("sub", half, -(2**61) - 1)
    assert _allowed("mul", half, -2) and not _allowed("mul", half, 3)
    for name in ("square", "pow"):
        assert _allowed(name, _interval(-(2**31), 0), 2) and not _allowed(name, _interval(0, 2**31 + 1), 2)
    for name in ("__lshift__", "bitwise_left_shift"):
        assert _allowed(name, _interval(0, 4), 60) and not _allowed(name, _interval(0, 4), 61)
        assert not _allowed(name, _interval(1, 1), 2**40) and _allowed(name, _interval(0, 0), 2**40)
    for name in ("rsub", "div", "floor_divide", "remainder", "fmod", "neg", "abs"):
        assert _allowed(name, _interval(-(2**62), 0)) and not _allowed(name, _interval(-(2**62) - 1, 0))
    assert _allowed("div", _interval(2, 3), None, "floor") and not _allowed("add", _interval(2, 3), _interval(0.5, 0.5, F32))
    assert not _allowed("add", _interval(2, 3), float("inf"))
    assert not _allowed("add", _interval([0, -MAX], [1, 1])) and not _allowed("add", _interval([0, 0], [MAX, 1]))
    assert _allowed("minimum", _interval(-MAX, MAX), MAX)  # no arithmetic


def test_arithmetic_of_floats_is_bounded_by_finite_operands():
    finite, infinite = _interval(-1.0, 2.0, F32), _interval(-1.0, torch.inf, F32)
    for name in ("add", "exp", "sqrt", "mul"):
        assert _allowed(name, finite, 2.0, None, "x", dtype=F32)
        assert not _allowed(name, infinite, dtype=F32) and not _allowed(name, Interval(-infinite.hi, finite.lo), dtype=F32)
        assert not _allowed(name, finite, float("nan"), dtype=F32)
    assert not _allowed("add", _interval(0, 70000), dtype=F16) and _allowed("add", _interval(0, 60000), dtype=F16)
    assert not _allowed("add", _interval(-70000, 0), dtype=F16)
    assert not _allowed("add", _interval([0, -70000], [1, 1]), dtype=F16) and not _allowed("add", _interval([0, 0], [1, 70000]), dtype=F16)


def _sound(result, *, name="add", dtype=I64):
    return is_sound(Call(name=name, target=None, dtype=dtype), result)


def test_sound_bounds_lie_in_the_carrier_and_the_range_of_their_dtype():
    assert not _sound(None)
    assert _sound(_interval(-128, 127), dtype=I8)
    assert not _sound(_interval(-129, 127), dtype=I8) and not _sound(_interval(-128, 128), dtype=I8)
    assert not _sound(_interval([0, -129], [1, 1]), dtype=I8) and not _sound(_interval([0, 0], [1, 200]), dtype=I8)
    int32 = torch.tensor([1], dtype=I32)
    assert not _sound(Interval(int32, int32.long())) and not _sound(Interval(int32.long(), int32))
    assert _sound(_interval(-1e30, torch.inf, F32), dtype=F32) and _sound(_interval(False, True, BOOL), dtype=BOOL)
    assert not _sound(_interval(torch.nan, 1.0, F32), dtype=F32) and not _sound(_interval([0.0, 0.0], [1.0, torch.nan], F32), dtype=F32)
    assert not _sound(_interval(0.0, torch.inf, F32), name="exp", dtype=F32)
    assert not _sound(_interval(-torch.inf, 0.0, F32), name="log", dtype=F32) and _sound(_interval(0.0, 1.0, F32), name="exp", dtype=F32)


def test_bits_of_dtypes_that_shift():
    assert [interval_rules._width(d) for d in (BOOL, F32, U8, I32, I64)] == [1, 1, 8, 32, 64]
