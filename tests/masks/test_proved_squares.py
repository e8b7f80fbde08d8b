"""How much interval evaluation proves: squares without and with all pairs visible, and the values computed per row, column and square."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.masks.test_intervals import EXPRESSIONS
from torch import Tensor

from longspan._masks.classify import TableShape, classify
from longspan._masks.interval_rules import Interval
from longspan._masks.interval_steps import KV, Q
from longspan._masks.intervals import Interpreter, bounds
from longspan._masks.tracing import trace

SIZE, SIDE = 256, 16
GENERATOR = torch.Generator().manual_seed(3)
IDS = torch.arange(SIZE) // 40
PADDED = torch.where(torch.rand(SIZE, generator=GENERATOR) < 0.1, -1, IDS)
NARROW, HALF = PADDED.to(torch.int8), PADDED.half()
VALID = PADDED >= 0
FIRST = IDS * 40
LIMITS = torch.randint(0, SIZE, (SIZE,), generator=GENERATOR)
GRID = torch.rand(16, 16, generator=GENERATOR) < 0.4
ROWS = torch.randint(0, 50, (3, SIZE), generator=GENERATOR).cumsum(1) // 50
NUMBER = torch.tensor(90)


def _at_least_40(value: Tensor) -> Tensor:
    return value if value.dtype == torch.bool else value >= 40


MASKS: dict[str, Callable[..., Tensor]] = {
    **{name: (lambda b, h, q, kv, fn=fn: _at_least_40(fn(q, kv))) for name, fn in EXPRESSIONS.items()},
    "documents": lambda b, h, q, kv: (IDS[q] == IDS[kv]) & (q >= kv),
    "first": lambda b, h, q, kv: (kv >= FIRST[q]) & (q >= kv),
    "padded": lambda b, h, q, kv: (PADDED[q] == PADDED[kv]) & (q >= kv),
    "padded, ids of queries": lambda b, h, q, kv: (PADDED[q] == PADDED[kv]) & (PADDED[q] >= 0),
    "padded, ids of keys": lambda b, h, q, kv: (q >= kv) & (PADDED[kv] > -1) & (PADDED[q] == PADDED[kv]),
    "padded, logical": lambda b, h, q, kv: torch.logical_and(PADDED[q] == PADDED[kv], torch.logical_not(PADDED[q] < 0)),
    "padded, not": lambda b, h, q, kv: (PADDED[q] == PADDED[kv]) & ~(PADDED[kv] == -1) & ~(PADDED[q] == -1),
    "padded, left": lambda b, h, q, kv: (PADDED[q] == PADDED[kv]) & (torch.rsub(PADDED[kv], 0) <= 0),
    "padded, valid keys": lambda b, h, q, kv: (PADDED[q] == PADDED[kv]) & VALID[kv],
    "padded, valid queries and keys": lambda b, h, q, kv: (PADDED[q] == PADDED[kv]) & VALID[kv] & VALID[q],
    "padded, narrow": lambda b, h, q, kv: (NARROW[q] == PADDED[kv]) & (PADDED[kv] >= 0),
    "padded, narrow condition": lambda b, h, q, kv: (NARROW[q] == PADDED[kv]) & (NARROW[q] >= 0),
    "padded, half": lambda b, h, q, kv: (HALF[q] == HALF[kv]) & (HALF[kv] >= 0),
    "padded, half and integers": lambda b, h, q, kv: (HALF[q] == PADDED[kv]) & (PADDED[kv] >= 0),
    "padded, captured number": lambda b, h, q, kv: (PADDED[q] == PADDED[kv]) & (PADDED[q] >= NUMBER - 90),
    "padded, two tables": lambda b, h, q, kv: (PADDED[q] == IDS[kv]) & (IDS[kv] != 2) & (LIMITS[q] < 200),
    "padded, disjunction": lambda b, h, q, kv: ((PADDED[q] == PADDED[kv]) & (PADDED[q] >= 0)) | (kv < 20),
    "padded, in two conjunctions": lambda b, h, q, kv: ((PADDED[q] == PADDED[kv]) & VALID[q]) & ((IDS[q] == IDS[kv]) & (q >= kv)),
    "limits": lambda b, h, q, kv: kv < LIMITS[q],
    "grid": lambda b, h, q, kv: GRID[q // 16, kv // 16],
    "grid of one row": lambda b, h, q, kv: GRID[3, kv // 16] & (q > 100),
    "grid by batch": lambda b, h, q, kv: ROWS[b, q] == ROWS[b, kv],
    "grid by head": lambda b, h, q, kv: (ROWS[h + 1, q] == ROWS[h + 1, kv]) & (h < 2),
    "negative indices": lambda b, h, q, kv: IDS[q - 200] == IDS[kv - SIZE],
    "table of a table": lambda b, h, q, kv: IDS[FIRST[q]] == IDS[kv],
    "row of a table": lambda b, h, q, kv: (ROWS[1] * 2 + 1)[q] > ROWS[2][kv],
    "expanded": lambda b, h, q, kv: torch.tensor(7).expand(SIZE, SIZE)[q, kv] < kv,
    "creations": lambda b, h, q, kv: torch.full_like(q, 40) + q.new_ones(()) + torch.zeros_like(kv) < kv,
    "creations of floats": lambda b, h, q, kv: torch.full_like(q.float(), 2.5) * q < kv,
    "constants": lambda b, h, q, kv: (q >= 0) & (kv < 9999) & (q + kv < 100),
    "all": lambda b, h, q, kv: (q >= 0) & (kv >= 0),
    "none": lambda b, h, q, kv: (q < 0) | (kv > 999),
    "batch and head": lambda b, h, q, kv: (b + h > 2) & (q > 3),
    "shared": lambda b, h, q, kv: ((q - kv) % 64 < 32) & ((q - kv) % 64 > 8) & ((q - kv).abs() < 150),
    "number of the wrong width": lambda b, h, q, kv: (q.to(torch.int8) < 200) & (kv > 3),
    "alpha of a table": lambda b, h, q, kv: torch.add(q, kv, alpha=2) < 300,
    "rounding of a table": lambda b, h, q, kv: torch.div(q - 7, 16, rounding_mode="floor") == torch.div(kv, 16, rounding_mode="trunc"),
    "clamp of a table": lambda b, h, q, kv: q.clamp(max=100) - kv.clamp(min=30, max=90) > 20,
}


def _proved(mask: Callable[..., Tensor]) -> tuple[int, ...] | str:
    """Squares that the bounds prove empty and full, then the values computed per row, per column and per square."""
    traced = trace(mask, "mask")
    domain = Interpreter(traced.program, traced.captured(), b=(1, 1), h=(0, 0), q=(0, SIZE - 1), kv=(0, SIZE - 1))
    if domain.constant is not None:
        return f"{domain.constant.lo.item()} to {domain.constant.hi.item()}"
    start = torch.arange(0, SIZE, SIDE)
    rows = [Interval(lo[:, None], hi[:, None]) for lo, hi in domain.evaluate_axis(Q, start, start + SIDE - 1)]
    columns = [Interval(lo[None], hi[None]) for lo, hi in domain.evaluate_axis(KV, start, start + SIDE - 1)]
    must, may = (x.expand(len(start), len(start)) for x in domain.evaluate_squares(rows, columns))
    return (int((~may).sum()), int(must.sum()), *(len(domain._steps[axes]) for axes in (Q, KV, Q | KV)))


# Recorded: squares proved empty and full of 16 × 16, then numbers of values per row, per column and per square; or the result everywhere.
PROVED: dict[str, tuple[int, ...] | str] = {
    "add": (1, 250, 1, 1, 2),
    "sub": (151, 78, 1, 1, 2),
    "rsub": "False to False",
    "alpha": "False to True",
    "mul": (85, 140, 2, 2, 2),
    "mul narrow": (85, 140, 3, 3, 2),
    "mul scalar": (216, 22, 2, 1, 2),
    "neg": (151, 78, 2, 1, 2),
    "abs": (46, 156, 1, 1, 3),
    "square": (0, 254, 3, 1, 4),
    "cube": "False to True",
    "floor divide": (256, 0, 1, 1, 5),
    "trunc divide": "False to False",
    "divide by a range": (249, 0, 2, 2, 2),
    "divide by maybe zero": "False to True",
    "true divide": (242, 0, 1, 2, 3),
    "float floor divide": "False to True",
    "remainder": "False to False",
    "remainder by a range": (60, 78, 1, 2, 2),
    "remainder by a negative": "False to True",
    "fmod": "False to True",
    "minimum": (256, 0, 1, 2, 4),
    "clamp": (1, 249, 2, 2, 5),
    "clamp to tensors": (18, 221, 1, 2, 2),
    "clamp to a float": "False to False",
    "where": (16, 198, 1, 2, 4),
    "masked fill": (256, 0, 1, 1, 4),
    "and": (0, 0, 2, 1, 6),
    "or": "False to True",
    "xor": (4, 0, 1, 1, 2),
    "not": (151, 78, 2, 1, 2),
    "not unsigned": "False to True",
    "shift": (0, 252, 2, 2, 5),
    "shift by a range": "False to True",
    "wrap 8 bits": (160, 0, 0, 4, 0),
    "truth": (225, 0, 3, 2, 3),
    "to bool": (225, 0, 3, 2, 5),
    "and a constant": (120, 120, 1, 1, 3),
    "compare": (49, 176, 1, 3, 8),
    "compare floats": (157, 62, 4, 3, 3),
    "float": "False to False",
    "half": "False to True",
    "bfloat": (2, 248, 3, 1, 2),
    "large ints as floats": (151, 78, 3, 3, 2),
    "float to int": (233, 11, 2, 1, 3),
    "huge float to int": "False to True",
    "rounding": (3, 244, 5, 5, 4),
    "sign": (151, 78, 1, 1, 5),
    "exp": (8, 235, 3, 1, 5),
    "exp overflows": "False to True",
    "log": "False to False",
    "log of zero": "False to True",
    "sqrt": (14, 213, 1, 1, 10),
    "nan": "False to True",
    "infinite": "False to True",
    "isnan": "False to True",
    "overflow": "False to True",
    "like": (32, 208, 0, 3, 0),
    "unknown": "False to True",
    "documents": (222, 6, 2, 2, 3),
    "first": (222, 6, 2, 1, 3),
    "padded": (137, 0, 2, 2, 3),
    "padded, ids of queries": (204, 2, 4, 3, 3),
    "padded, ids of keys": (222, 0, 3, 4, 5),
    "padded, logical": (204, 2, 5, 3, 3),
    "padded, not": (204, 2, 5, 5, 4),
    "padded, left": (34, 2, 2, 4, 2),
    "padded, valid keys": (119, 2, 2, 4, 3),
    "padded, valid queries and keys": (204, 2, 4, 5, 5),
    "padded, narrow": (204, 2, 3, 4, 3),
    "padded, narrow condition": (204, 2, 4, 3, 3),
    "padded, half": (204, 2, 3, 4, 3),
    "padded, half and integers": (119, 2, 2, 4, 3),
    "padded, captured number": (204, 2, 4, 3, 3),
    "padded, two tables": (146, 0, 6, 5, 5),
    "padded, disjunction": (178, 18, 4, 4, 4),
    "padded, in two conjunctions": (222, 0, 6, 3, 8),
    "limits": (11, 3, 2, 1, 1),
    "grid": (158, 98, 2, 2, 1),
    "grid of one row": (176, 72, 2, 3, 1),
    "grid by batch": (224, 0, 2, 2, 1),
    "grid by head": (224, 0, 2, 2, 2),
    "negative indices": (176, 12, 3, 3, 1),
    "table of a table": (204, 25, 3, 2, 1),
    "row of a table": (58, 176, 2, 2, 1),
    "expanded": (0, 240, 0, 2, 0),
    "creations": (32, 208, 0, 2, 0),
    "creations of floats": (195, 42, 2, 1, 1),
    "constants": (228, 15, 1, 1, 3),
    "all": "True to True",
    "none": "False to False",
    "batch and head": "False to False",
    "shared": (85, 0, 1, 1, 8),
    "number of the wrong width": (0, 0, 0, 3, 0),
    "alpha of a table": "False to True",
    "rounding of a table": (225, 0, 3, 2, 1),
    "clamp of a table": (194, 54, 2, 2, 2),
}


@pytest.mark.parametrize("name", MASKS)
def test_bounds_prove_as_many_squares_from_as_few_values_as_recorded(name: str) -> None:
    assert _proved(MASKS[name]) == PROVED[name]


NARROWED: dict[str, Callable[..., Tensor]] = {
    "dtypes": lambda b, h, q, kv: q.to(torch.int8) + kv == q.to(torch.int16) + kv,
    "dtypes of fixed values": lambda b, h, q, kv: ((b + 299).to(torch.int8) == (b + 299).to(torch.int16)) | (q > kv),
    "rounding modes": lambda b, h, q, kv: torch.div(q - 90, 7, rounding_mode="floor") == torch.div(q - 90, 7, rounding_mode="trunc"),
    "keywords of fixed values": lambda b, h, q, kv: (torch.add(b, b + 1, alpha=2) == torch.add(b, b + 1, alpha=3)) | (q > kv),
    "numbers of two types": lambda b, h, q, kv: (q * 1.0 / 7 < kv * 1 // 7) | (kv < True),
    "tables": lambda b, h, q, kv: (IDS[q] < LIMITS[q]) & (LIMITS[kv] < IDS[kv] + 200),
}


@pytest.mark.parametrize("name", NARROWED)
def test_calls_that_differ_in_dtype_keywords_or_table_are_told_apart(name: str) -> None:
    mask, traced = NARROWED[name], trace(NARROWED[name], "mask")
    domain = Interpreter(traced.program, traced.captured(), b=(1, 1), h=(0, 0), q=(0, SIZE - 1), kv=(0, SIZE - 1))
    start = torch.arange(0, SIZE, SIDE)
    if domain.constant is None:
        rows = [Interval(lo[:, None], hi[:, None]) for lo, hi in domain.evaluate_axis(Q, start, start + SIDE - 1)]
        must, may = domain.evaluate_squares(rows, domain.evaluate_axis(KV, start, start + SIDE - 1))
    else:
        must, may = domain.constant
    one, index = torch.tensor(1), torch.arange(SIZE)
    tiles = mask(one, one, index[:, None], index[None]).expand(SIZE, SIZE).unflatten(1, (-1, SIDE)).unflatten(0, (-1, SIDE))
    assert bool((tiles.all(3).all(1) | ~must).all()) and bool((~tiles.any(3).any(1) | may).all())


def _inside(mask: Callable[..., Tensor], **sizes: int) -> list[bool]:
    traced = trace(mask, "mask")
    return list(bounds(traced.program, traced.captured(), SIZE, SIZE, **sizes).lookups.values())


def test_lookups_of_fixed_rows_are_inside_unless_they_are_negative() -> None:
    assert _inside(lambda b, h, q, kv: (IDS[b] == 0) & (q > 3)) == [True]
    assert _inside(lambda b, h, q, kv: (IDS[b - 1] == 0) & (q > 3)) == [False]
    assert _inside(lambda b, h, q, kv: (ROWS[b, h - 1] == 0) & (ROWS[b, h] == 0) & (q > 3)) == [False, True]
    assert _inside(lambda b, h, q, kv: ROWS[b, q] == ROWS[b - 1, kv], batch=2) == [True, False]
    assert _inside(lambda b, h, q, kv: ROWS[h, q] == ROWS[h + 1, kv], heads=3) == [True, False]


def test_lookups_are_certainly_outside_from_one_entry_past_either_end() -> None:
    for mask, kv_len in ((lambda b, h, q, kv: IDS[kv + SIZE - 1] == q, 1), (lambda b, h, q, kv: IDS[kv - SIZE] == q, 1)):
        traced = trace(mask, "mask")
        Interpreter(traced.program, traced.captured(), b=(0, 0), h=(0, 0), q=(0, 9), kv=(0, kv_len - 1))
    for mask, message in (
        (lambda b, h, q, kv: IDS[kv + SIZE - 1] == q, f"from -{SIZE} to {SIZE - 1} in a dim of {SIZE} entries, got up to {SIZE};"),
        (lambda b, h, q, kv: IDS[kv - SIZE - 1] == q, f"from -{SIZE} to {SIZE - 1} in a dim of {SIZE} entries, got down to -{SIZE + 1};"),
        (lambda b, h, q, kv: ROWS[kv % 3 + 2, q] == q, "from -3 to 2 in a dim of 3 entries, got up to 3;"),
    ):
        traced = trace(mask, "mask")
        with pytest.raises(ValueError, match=message):
            Interpreter(traced.program, traced.captured(), b=(0, 0), h=(0, 0), q=(0, 9), kv=(0, 1))
        Interpreter(traced.program, traced.captured(), b=(0, 0), h=(0, 0), q=(0, 9), kv=(0, 1), strict=False)


@pytest.mark.parametrize(
    "corner", [lambda h, q, kv: 9 - q + 7 - kv, lambda h, q, kv: q + 7 - kv, lambda h, q, kv: 9 - q + kv, lambda h, q, kv: q + kv]
)
def test_lookups_outside_at_one_corner_are_those_of_the_first_batch_row_and_head(corner: Callable[..., Tensor]) -> None:
    """The index is past the end by one at one corner, where h, or b, is 0."""
    table = torch.zeros(16, dtype=torch.int64)
    for mask in (lambda b, h, q, kv: table[corner(h, q, kv) - h] < q, lambda b, h, q, kv: table[corner(h, q, kv) - b] < q):
        traced = trace(mask, "mask")
        with pytest.raises(ValueError, match="got up to 16;"):
            Interpreter(traced.program, traced.captured(), b=(0, 2), h=(0, 3), q=(0, 9), kv=(0, 7))


@pytest.mark.parametrize("mask", [
    lambda b, h, q, kv: torch.ones_like(IDS[:20] + q).sum() > kv,  # 20: as many ones as entries
    lambda b, h, q, kv: (IDS[:20] + q).new_full((4,), 5).sum() > kv,
    lambda b, h, q, kv: torch.zeros_like(IDS[:20]).sum() + 20 > kv,
    lambda b, h, q, kv: q.new_full((4,), 5).sum() > kv,
])  # fmt: skip
def test_tensors_that_are_made_like_others_have_their_shape(mask: Callable[..., Tensor]) -> None:
    traced = trace(mask, "mask")
    table = classify(traced.program, traced.captured(), TableShape(q_len=11, kv_len=37, block=(4, 8)))
    assert table.to_dense()[0, 0].tolist() == [[2, 2, 1, 0, 0]] * 2 + [[1, 1, 1, 0, 0]]


def test_a_table_that_is_made_by_the_mask_is_looked_up_inside() -> None:
    assert _inside(lambda b, h, q, kv: q.new_full((5,), 7)[q % 5] > kv) == [True]
    assert _inside(lambda b, h, q, kv: torch.full_like(IDS + q, 7)[q % 5] > kv) == [False]


def test_operations_on_a_fixed_index_are_told_apart() -> None:
    traced = trace(lambda b, h, q, kv: (q < b + 5) & (kv >= b - 5) & (kv < b * 5), "mask")
    table = classify(traced.program, traced.captured(), TableShape(q_len=12, kv_len=14, block=(4, 4), batch=2, first_batch=1))
    expected = [[[2, 1, 0, 0], [1, 1, 0, 0], [0] * 4], [[2, 2, 1, 0], [1, 1, 1, 0], [0] * 4]]
    assert table.to_dense()[:, 0].tolist() == expected


def test_bounds_are_of_one_batch_row_and_head_by_default() -> None:
    table = torch.ones(1, 1, dtype=torch.bool)
    traced = trace(lambda b, h, q, kv: table[b, h] & (q > 3), "mask")
    inside = [list(bounds(traced.program, traced.captured(), 9, 9, *sizes).lookups.values()) for sizes in ((), (1, 1), (2, 1), (1, 2))]
    assert inside == [[True], [True], [False], [False]]
