"""Interval rules are sound: for all operand values within their bounds, the result lies within its bounds."""

import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan._masks.interval_rules import EXACT, Interval, _magnitude, carrier, truth
from longspan._masks.interval_steps import KV, Q
from longspan._masks.intervals import Interpreter, bounds
from longspan._masks.range_lookup import RangeTable
from longspan._masks.tracing import trace

torch.manual_seed(0)
I64, I32, F32, F64 = torch.int64, torch.int32, torch.float32, torch.float64

CELLS, EDGES = torch.randint(-50, 90, (121, 4), generator=torch.Generator().manual_seed(2)), torch.tensor([20, 55, 90])

# Expressions of the query and key positions that together use every rule.
EXPRESSIONS = {
    "add": lambda q, kv: q + kv,
    "sub": lambda q, kv: q - kv,
    "rsub": lambda q, kv: torch.rsub(q, 7) - kv,
    "alpha": lambda q, kv: torch.add(q, kv, alpha=3),
    "mul": lambda q, kv: (q - 90) * (kv - 40),
    "mul narrow": lambda q, kv: (q.to(I32) - 90) * (kv.to(I32) - 40),
    "mul scalar": lambda q, kv: q * -3 + kv,
    "neg": lambda q, kv: -q + kv,
    "abs": lambda q, kv: (q - kv).abs(),
    "square": lambda q, kv: (q - kv).square() + (q - 5) ** 2,
    "cube": lambda q, kv: (q - kv) ** 3,
    "floor divide": lambda q, kv: (q - kv) // 7 + (q - kv) // -9,
    "trunc divide": lambda q, kv: torch.div(q - kv, 7, rounding_mode="trunc"),
    "divide by a range": lambda q, kv: (q - 30) // (kv + 3),
    "divide by maybe zero": lambda q, kv: q // ((kv - 4) * 2 + 1),
    "true divide": lambda q, kv: (q - kv) / (kv + 1),
    "float floor divide": lambda q, kv: torch.floor_divide(q.float(), kv + 1.5),
    "remainder": lambda q, kv: (q - kv) % 17,
    "remainder by a range": lambda q, kv: q % (kv + 5),
    "remainder by a negative": lambda q, kv: (q - kv) % -17,
    "fmod": lambda q, kv: torch.fmod(q + kv, 17) + torch.fmod(q - kv, 5),
    "minimum": lambda q, kv: torch.minimum(q, 2 * kv) - torch.maximum(q, kv),
    "clamp": lambda q, kv: q.clamp(min=3) + kv.clamp(max=50) - (q - kv).clamp(-5, 9),
    "clamp to tensors": lambda q, kv: torch.clamp(q, kv, kv + 9),
    "clamp to a float": lambda q, kv: (q - kv).clamp(-2.5, 7.25),
    "where": lambda q, kv: torch.where(q > kv, q - kv, kv * 2.5),
    "masked fill": lambda q, kv: (q - kv).masked_fill(q > kv, -7),
    "and": lambda q, kv: ((q - kv) & 15) + (q & 12) + (q & kv),
    "or": lambda q, kv: (q | kv) + (q | -5),
    "xor": lambda q, kv: q ^ kv,
    "not": lambda q, kv: ~q + kv,
    "not unsigned": lambda q, kv: ~q.to(torch.uint8),
    "shift": lambda q, kv: (q >> 2) + (kv << 3) + ((q - kv) >> 1),
    "shift by a range": lambda q, kv: q << (kv % 3),
    "wrap 8 bits": lambda q, kv: q.to(torch.int8) - kv.to(torch.uint8),
    "truth": lambda q, kv: torch.logical_and(q - 3, kv) ^ torch.logical_or(q > 5, kv - 2),
    "to bool": lambda q, kv: (q - kv).bool() & torch.logical_not(q - 7) | torch.logical_xor(q, kv > 3),
    "and a constant": lambda q, kv: ((q > kv) & True) | False,
    "compare": lambda q, kv: (q == kv) | (q != 2 * kv) & (q < 0.5 * kv) | ~(q <= kv),
    "compare floats": lambda q, kv: (q / 3 == kv / 3) | (q.float() / 7 >= kv * 0.25),
    "float": lambda q, kv: (q - kv).float() * 0.01 - q.double() * 0.3,
    "half": lambda q, kv: (q * 900).half() + kv.half() * 0.1,
    "bfloat": lambda q, kv: q.bfloat16() * 0.7 + kv,
    "large ints as floats": lambda q, kv: (q + 2**24).float() - (kv + 2**24).float(),
    "float to int": lambda q, kv: (q * 0.37 - kv).to(I64),
    "huge float to int": lambda q, kv: (q * 1e30).to(I64),
    "rounding": lambda q, kv: (q * 0.3).floor() + (kv * 0.7).ceil() + (q / 2).round() - (kv / 7).trunc(),
    "sign": lambda q, kv: (q - kv).sign() + torch.relu(q - kv),
    "exp": lambda q, kv: torch.exp((kv - q) * 0.1) + torch.exp2(q * 0.1),
    "exp overflows": lambda q, kv: torch.exp((q - kv) * 3.0),
    "log": lambda q, kv: torch.log(q + 1.0) + torch.log2(kv + 2.0) - torch.log1p(q.double()),
    "log of zero": lambda q, kv: torch.log(q.float()),
    "sqrt": lambda q, kv: (q * kv).float().sqrt() + torch.tanh(q - kv) + torch.sigmoid((q - kv).float()),
    "nan": lambda q, kv: (q - 50).float().sqrt(),
    "infinite": lambda q, kv: torch.where(q > kv, torch.inf, kv.float()) * 0.0,
    "isnan": lambda q, kv: torch.isnan(q.float()) | torch.isnan((q - 50).float().sqrt()),
    "overflow": lambda q, kv: q * 2**60 + kv,
    "like": lambda q, kv: torch.ones_like(q) + q.new_full((), 4) + kv,
    "unknown": lambda q, kv: torch.sin(q.float()) > 2,
}
# One index of these lookups is known, of the other one only bounds.
LOOKUPS = {
    "hash of a key": lambda q, kv: CELLS[q, (kv ^ -7) & 3],
    "bucket of a query": lambda q, kv: CELLS.T[torch.bucketize(q, EDGES).clamp(0, 3), kv],
}


@pytest.mark.parametrize("name", [*EXPRESSIONS, *LOOKUPS])
def test_bounds_hold_for_every_value_in_a_square(name):
    fn = (EXPRESSIONS | LOOKUPS)[name]
    generator = torch.Generator().manual_seed(1)
    lows = torch.randint(0, 100, (2, 40), generator=generator)
    sizes = torch.randint(0, 12, (2, 40), generator=generator) * (torch.rand(2, 40, generator=generator) < 0.8)
    highs = lows + sizes
    for threshold in (-40, 0, 5, 60):
        for compare in (operator.lt, operator.ge, operator.eq):

            def mask(b, h, q, kv, compare=compare, threshold=threshold):
                value = fn(q, kv)
                return compare(value, threshold) if value.dtype != torch.bool else value

            traced = trace(mask, "mask")
            domain = Interpreter(traced.program, traced.captured(), b=(0, 0), h=(0, 0), q=(0, 120), kv=(0, 120))
            if domain.constant is not None:
                must, may = (x.expand(40) for x in domain.constant)
            else:
                row_values, column_values = domain.evaluate_axis(Q, lows[0], highs[0]), domain.evaluate_axis(KV, lows[1], highs[1])
                must, may = (x.expand(40) for x in domain.evaluate_squares(row_values, column_values))
            for i in range(40):
                q, kv = (torch.arange(int(lows[a, i]), int(highs[a, i]) + 1) for a in (0, 1))
                visible = mask(None, None, q[:, None], kv[None, :])
                assert not must[i] or bool(visible.all())
                assert may[i] or not bool(visible.any())


# Expressions of two integers, by dtype: together every rule for integers, with operands at the ends of the dtype's range.
INTEGER_EXPRESSIONS = {
    "add": lambda x, y: x + y,
    "add scalar": lambda x, y: x + 100,
    "add a large scalar": lambda x, y: x + 200,
    "sub": lambda x, y: x - y,
    "rsub": lambda x, y: 100 - x,
    "neg": lambda x, y: -x,
    "mul": lambda x, y: x * y,
    "mul scalar": lambda x, y: x * -3,
    "abs": lambda x, y: x.abs(),
    "square": lambda x, y: x.square(),
    "pow": lambda x, y: x**2,
    "floor divide": lambda x, y: x // (y.abs() | 1),
    "floor divide by -1": lambda x, y: x.to(torch.int8) // -1,  # the smallest int32 or int64 by −1 ends the process
    "trunc divide": lambda x, y: torch.div(x, y.abs() | 1, rounding_mode="trunc"),
    "true divide": lambda x, y: x / (y.abs() | 1),
    "remainder": lambda x, y: x % (y.abs() | 1),
    "remainder by a scalar": lambda x, y: x % 7,
    "fmod": lambda x, y: torch.fmod(x, 7),
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "clamp": lambda x, y: x.clamp(3, 90),
    "clamp to tensors": lambda x, y: x.clamp(y, y + 9),
    "where": lambda x, y: torch.where(x > y, x, y),
    "masked fill": lambda x, y: x.masked_fill(y > 3, 90),
    "and": lambda x, y: x & y,
    "and scalar": lambda x, y: x & 127,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "not": lambda x, y: ~x,
    "left shift": lambda x, y: x << 3,
    "right shift": lambda x, y: x >> 3,
    "sign": lambda x, y: x.sign() + y.relu(),
    "to int8": lambda x, y: x.to(torch.int8),
    "to uint8": lambda x, y: x.to(torch.uint8),
    "to int16": lambda x, y: (x * 3).to(torch.int16),
    "to half": lambda x, y: x.half() - y.half(),
    "compare": lambda x, y: (x < y) ^ (x == y),
    "compare with a large scalar": lambda x, y: (x < 200) ^ (y >= -200),
    "truth": lambda x, y: torch.logical_xor(x, y),
}
DTYPE_PAIRS = [(d, d) for d in (torch.int8, torch.uint8, torch.int16, I32, I64)] + [(torch.int8, torch.uint8), (torch.uint8, torch.int16)]


def _edge_values(dtype: torch.dtype) -> torch.Tensor:
    """Ascending values near zero and at the ends of an integer dtype, each 16 times: a range table is exact in steps of 16."""
    info = torch.iinfo(dtype)
    values = {info.min, info.min + 1, info.max // 2 + 1, info.max, *(v for v in (-9, -1, 0, 1, 6) if v >= info.min)}
    return torch.tensor(sorted(values), dtype=dtype).repeat_interleave(16)


@pytest.mark.parametrize("name", INTEGER_EXPRESSIONS)
def test_bounds_hold_at_the_ends_of_every_integer_dtype(name):
    fn = INTEGER_EXPRESSIONS[name]
    for x_dtype, y_dtype in DTYPE_PAIRS:
        x, y = _edge_values(x_dtype), _edge_values(y_dtype)

        def mask(b, h, q, kv, x=x, y=y):
            value = fn(x[q], y[kv])
            return value > 20 if value.dtype != torch.bool else value

        traced = trace(mask, "mask")
        domain = Interpreter(traced.program, traced.captured(), b=(0, 0), h=(0, 0), q=(0, len(x) - 1), kv=(0, len(y) - 1))
        # Every range of distinct values on each axis.
        q_first, q_last = (16 * i for i in torch.triu_indices(len(x) // 16, len(x) // 16))
        kv_first, kv_last = (16 * i for i in torch.triu_indices(len(y) // 16, len(y) // 16))
        shape = (len(q_first), len(kv_first))
        if domain.constant is not None:
            must, may = (b.expand(shape) for b in domain.constant)
        else:
            rows = [Interval(lo[:, None], hi[:, None]) for lo, hi in domain.evaluate_axis(Q, q_first, q_last + 15)]
            must, may = (b.expand(shape) for b in domain.evaluate_squares(rows, domain.evaluate_axis(KV, kv_first, kv_last + 15)))
        visible = mask(None, None, torch.arange(0, len(x), 16)[:, None], torch.arange(0, len(y), 16))
        visible = visible.expand(len(x) // 16, len(y) // 16)
        # Number of visible elements in each rectangle, from two-dimensional prefix sums.
        sums = torch.nn.functional.pad(visible.long().cumsum(0).cumsum(1), (1, 0, 1, 0))
        (top, bottom), (left, right) = (q_first // 16, q_last // 16 + 1), (kv_first // 16, kv_last // 16 + 1)
        count = (sums[bottom] - sums[top])[:, right] - (sums[bottom] - sums[top])[:, left]
        area = (bottom - top)[:, None] * (right - left)
        context = (x_dtype, y_dtype)
        assert bool((~must | (count == area)).all()), context
        assert bool((may | (count == 0)).all()), context


# name: (mask, query range, key range, the value that the bounds must prove)
DECIDED = {
    "remainder in one period": (lambda b, h, q, kv: q % 128 < 64, (0, 63), (0, 9), True),
    "window": (lambda b, h, q, kv: (q - kv).abs() <= 200, (300, 400), (0, 90), False),
    "float slope": (lambda b, h, q, kv: (q - kv).float() * 0.01 < 5.0, (0, 400), (0, 90), True),
    "neighbourhood": (lambda b, h, q, kv: (q // 50 - kv // 50).abs() <= 3, (0, 49), (210, 300), False),
    "power-of-two mask": (lambda b, h, q, kv: (q & 127) < 64, (64, 127), (0, 9), False),
}


@pytest.mark.parametrize("name", DECIDED)
def test_bounds_decide_squares_of_common_mask_expressions(name):
    mask, q, kv, expected = DECIDED[name]
    domain = Interpreter(trace(mask, "mask").program, (), b=(0, 0), h=(0, 0), q=(0, 2000), kv=(0, 2000))
    ends = [torch.tensor([x]) for x in (*q, *kv)]
    must, may = domain.evaluate_squares(domain.evaluate_axis(Q, *ends[:2]), domain.evaluate_axis(KV, *ends[2:]))
    assert (bool(must), bool(may)) == (expected, expected)


@settings(max_examples=120)
@given(
    size=st.integers(1, 200),
    dtype=st.sampled_from([I64, I32, torch.uint8, torch.bool, F32, torch.bfloat16]),
    lo=st.integers(-250, 250),
    span=st.integers(0, 120),
    restrict=st.booleans(),
)
def test_range_table_bounds_contain_every_entry_of_the_index_range(size, dtype, lo, span, restrict):
    generator = torch.Generator().manual_seed(size)
    values = torch.randint(0, 100, (size,), generator=generator).to(dtype)
    keep = torch.rand(size, generator=generator) < 0.5 if restrict else None
    entry_bounds = RangeTable(values, keep).query(Interval(torch.tensor([lo]), torch.tensor([lo + span])), inside=False)
    assert entry_bounds.lo.dtype == carrier(dtype)
    valid_indices = [i for i in range(lo, lo + span + 1) if -size <= i < size]
    valid_indices = [i for i in valid_indices if keep is None or keep[i]]
    if valid_indices:
        entries = values[torch.tensor(valid_indices)].to(carrier(dtype))
        assert bool((entry_bounds.lo <= entries).all()) and bool((entry_bounds.hi >= entries).all())
    if keep is None and span == 0 and valid_indices:
        assert entry_bounds.lo == entry_bounds.hi == values[lo].to(carrier(dtype))


def test_a_range_table_of_a_million_entries_uses_less_than_20_mib():
    table = RangeTable(torch.zeros(2**20, dtype=I64))
    assert sum(t.numel() * t.element_size() for t in (table.low, table.high, table.log2)) < 20 * 2**20


def test_scattered_padding_does_not_prevent_proving_a_square_empty():
    ids = torch.arange(1024) // 8
    ids[7::8] = -1
    masks = (
        lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv]) & (ids[q] >= 0),
        lambda b, h, q, kv: (ids[kv] == ids[q]) & ~(ids[q] < 0) & (q >= kv),
        lambda b, h, q, kv: (ids[q] != -1) & (q >= kv) & (ids[q] == ids[kv]),
        lambda b, h, q, kv: (ids >= 0)[q] & (ids >= 0)[kv] & (ids[q] == ids[kv]),
    )
    for mask in masks:
        traced = trace(mask, "mask")
        domain = Interpreter(traced.program, traced.captured(), b=(0, 0), h=(0, 0), q=(0, 1023), kv=(0, 1023))
        ends = [torch.tensor([x]) for x in (512, 575, 64, 127)]
        must, may = domain.evaluate_squares(domain.evaluate_axis(Q, *ends[:2]), domain.evaluate_axis(KV, *ends[2:]))
        assert not must and not may


def _bounds(mask, q_len=1000, kv_len=1000, **options):
    """(whether all integers fit 32 bits, for each lookup whether its indices are inside the table)."""
    traced = trace(mask, "mask")
    program_bounds = bounds(traced.program, traced.captured(), q_len, kv_len, **options)
    return program_bounds.int32, list(program_bounds.lookups.values())


def test_bounds_prove_whether_all_integers_fit_32_bits():
    big = torch.tensor([2**40] * 1000)
    assert _bounds(lambda b, h, q, kv: q >= kv) == (True, [])
    assert _bounds(lambda b, h, q, kv: (q * 7919 + kv * 104729) % 1024 < 8) == (True, [])
    assert _bounds(lambda b, h, q, kv: (q * 7919 + kv * 104729) % 1024 < 8, 10**6, 10**6)[0] is False
    assert _bounds(lambda b, h, q, kv: big[q] > 0) == (False, [True])
    assert _bounds(lambda b, h, q, kv: q >= kv, 2**31, 2**31) == (True, [])
    assert _bounds(lambda b, h, q, kv: q >= kv, 2**31 + 1, 5)[0] is False
    assert _bounds(lambda b, h, q, kv: q - 2**31 < kv)[0] is True
    assert _bounds(lambda b, h, q, kv: q - 2**31 - 1 < kv)[0] is False


def test_bounds_prove_which_lookups_stay_inside_their_table():
    ids, table = torch.zeros(1000, dtype=I64), torch.zeros(4, 1000, dtype=I64)
    assert _bounds(lambda b, h, q, kv: ids[q] == ids[kv]) == (True, [True, True])
    assert _bounds(lambda b, h, q, kv: ids[q] == ids[kv - 1]) == (True, [True, False])
    assert _bounds(lambda b, h, q, kv: ids[q] == ids[(kv + 1).clamp(max=999)]) == (True, [True, True])
    assert _bounds(lambda b, h, q, kv: ids[q] == 0, 1001) == (True, [False])
    assert _bounds(lambda b, h, q, kv: table[b, q] == table[b, kv], batch=4) == (True, [True, True])
    assert _bounds(lambda b, h, q, kv: table[b, q] == 0, batch=5) == (True, [False])
    assert _bounds(lambda b, h, q, kv: ids[kv] == 0, kv_len=1001) == (True, [False])
    assert _bounds(lambda b, h, q, kv: table[h, q] == 0, heads=5) == (True, [False])
    assert _bounds(lambda b, h, q, kv: table[h, q] == 0, heads=4) == (True, [True])


def test_bounds_support_score_programs():
    bias = torch.randn(2, 100)
    traced = trace(lambda score, b, h, q, kv: score + bias[h, q - kv + 50], "score")
    program_bounds = bounds(traced.program, traced.captured(), 50, 50, heads=2)
    assert program_bounds.int32 and list(program_bounds.lookups.values()) == [True]


def test_magnitudes_are_those_of_the_farthest_ends():
    far_below, far_above = (Interval(torch.tensor(lo), torch.tensor(hi)) for lo, hi in (([-100, 5], [-50, 7]), ([-9, -2], [1, 40])))
    assert [_magnitude(x) for x in (far_below, far_above, -3, 2.5)] == [100, 40, 3, 3]
    assert _magnitude(Interval(torch.tensor([0.5]), torch.tensor([0.5]))) > EXACT and _magnitude(float("inf")) > EXACT


def test_the_truth_of_integers_is_as_narrow_as_it_can_be():
    for lo in range(-2, 3):
        for hi in range(lo, 3):
            got = truth(Interval(torch.tensor([lo]), torch.tensor([hi])))
            values = [bool(value) for value in range(lo, hi + 1)]
            assert (bool(got.lo), bool(got.hi)) == (all(values), any(values))
    for value in (0, 3, True, 0.0):
        got = truth(value)
        assert bool(got.lo) == bool(got.hi) == bool(value)
