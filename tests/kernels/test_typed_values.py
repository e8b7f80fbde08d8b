"""Values of generated code: their types, bounds and spellings; weights of a tile."""

from __future__ import annotations

import math

import pytest
import torch

from longspan._kernels.gpu.typed_values import (
    EXACT_FLOAT,
    Unsupported,
    Value,
    bound_of,
    constant,
    materialized,
    spell,
    type_of,
    wrapped_number,
)
from longspan._kernels.tile_math import softmax_tile


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool], ids=str)
def test_bounds_contain_all_values_of_a_dtype(dtype: torch.dtype) -> None:
    if dtype == torch.bool:
        assert bound_of(dtype) == 1 and type_of(dtype) == "bool"
        return
    info = torch.iinfo(dtype)
    assert max(-info.min, info.max) <= bound_of(dtype) <= info.max + 1
    assert type_of(dtype) == ("int64" if dtype == torch.int64 else "int32")
    for number in (info.min - 1, info.min, -1, 0, 7, info.max, info.max + 1, 3 * info.max + 5):
        wrapped = wrapped_number(number, dtype)
        assert info.min <= wrapped <= info.max and (wrapped - number) % 2**info.bits == 0


def test_half_dtypes_are_computed_in_float32_and_complex_ones_are_not_supported() -> None:
    assert [type_of(d) for d in (torch.bfloat16, torch.float16, torch.float32, torch.float64)] == ["float32"] * 3 + ["float64"]
    with pytest.raises(Unsupported, match=r"values of dtype torch.complex64"):
        type_of(torch.complex64)


def test_literals_are_spelled_by_type() -> None:
    assert [spell(3, t) for t in ("int32", "int64", "float32", "float64", "bool")] == ["3", "3", "3.0", "3.0", "True"]
    assert [spell(True, t) for t in ("int32", "float32", "bool")] == ["1", "1.0", "True"] and spell(0.0, "bool") == "False"
    assert spell(-math.inf, "float32") == 'float("-inf")' and spell(math.nan, "float64") == 'float("nan")'
    tenth = "tl.cast(tl.cast(4591870180066957722, tl.int64), tl.float64, bitcast=True)"
    assert (spell(0.1, "float64"), spell(0.5, "float64"), spell(math.inf, "float64")) == (tenth, "0.5", 'float("inf")')
    assert "bitcast" in spell(1e300, "float64") and "bitcast" in spell(-3.4028235677e38, "float64")  # rounds to more than float32 holds
    assert spell(-2.5, "int32") == "-2" and spell(0.1, "float32") == "0.1"


def test_constants_know_their_type_and_bound() -> None:
    for number, kind, nonneg in ((0, "int32", True), (-5, "int32", False), (2**31 - 1, "int32", True), (2**31, "int64", True)):
        value = constant(number)
        assert (value.text, value.type, value.literal, value.bound, value.nonneg) == (str(number), kind, number, abs(number), nonneg)
    assert (constant(True).type, constant(True).bound, constant(False).literal) == ("bool", 1, False)
    assert (constant(1.5).type, constant(1.5).text) == ("float32", "1.5")


def test_constants_as_device_scalars() -> None:
    assert [materialized(constant(c)).text for c in (True, False, -7, 2**40, 1.5)] == [
        "tl.cast(1, tl.int1)", "tl.cast(0, tl.int1)", "tl.cast(-7, tl.int32)", f"tl.cast({2**40}, tl.int64)", "tl.cast(1.5, tl.float32)"
    ]  # fmt: skip
    made = materialized(constant(6))
    assert (made.literal, made.bound, made.nonneg, made.type) == (None, 6, True, "int32")
    plain = Value(text="x", type="int32")
    assert materialized(plain) is plain


def test_values_are_converted_where_types_differ() -> None:
    x = Value(text="x", type="int32", bound=9)
    assert [x.to(t) for t in ("int32", "int64", "bool", "float32")] == ["x", "x.to(tl.int64)", "(x != 0)", "x.to(tl.float32)"]
    assert constant(3).to("float32") == "3.0"
    for bound, text in ((EXACT_FLOAT - 1, "(x.to(tl.float32) - x.to(tl.float32))"), (EXACT_FLOAT, "d.to(tl.float32)")):
        difference = Value(text="d", type="int32", bound=bound, floated=("{} - {}", (x, x)))
        assert difference.to("float32") == text and difference.to("float64") == "d.to(tl.float64)"


def test_weights_of_scores_and_of_rows_that_see_nothing() -> None:
    weights, lse, largest = softmax_tile(torch.tensor([[0.0, 0.0, -torch.inf], [-torch.inf] * 3, [torch.inf, 0.0, 0.0]]))
    assert weights[:2].tolist() == [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]] and weights[2].isnan().any()
    assert lse[:2].tolist() == [pytest.approx(math.log(2)), -math.inf] and largest.tolist() == [0.0, -math.inf, math.inf]
