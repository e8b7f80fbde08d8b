"""Compiled programs: each operation computes what torch computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

# ruff: noqa: E402
from tests.kernels.integer_cases import COMPARISONS, DTYPES, table_of

from longspan._kernels.gpu import codegen, launch
from longspan._kernels.gpu.compile_options import FUSED
from longspan._kernels.gpu.interpreter import interpreted, quiet
from longspan._masks.tracing import trace

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Mod = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@triton.jit
def _evaluate_kernel(score_ptr, out_ptr, captured, sizes, PROGRAM: tl.constexpr):  # type: ignore[no-untyped-def]
    q, kv = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    zero = tl.program_id(0)
    score = tl.load(score_ptr + q * 64 + kv)
    tl.store(out_ptr + q * 64 + kv, PROGRAM(score, zero, zero, q, kv, captured, sizes))


def _evaluate(fn: Mod) -> tuple[Tensor, Tensor]:
    """(compiled, torch) values of a mod on a grid with negative and positive differences."""
    traced = trace(fn, "score")
    program = codegen.program_function(traced.program, codegen.Options(interpreted=interpreted()))
    score = torch.randn(64, 64, device=DEVICE) * 3
    out = torch.empty_like(score)
    captured = traced.captured()
    with quiet():
        _evaluate_kernel[(1,)](score, out, launch.pack_captured(captured, score), launch.pack_sizes(captured), program, **FUSED)
    zero, place = torch.zeros((), dtype=torch.int64, device=DEVICE), torch.arange(64, device=DEVICE)
    return out, fn(score, zero, zero, place[:, None], place[None, :]).expand(64, 64).to(out.dtype)


OPERATIONS: dict[str, Mod] = {
    "floor_divide": lambda s, b, h, q, kv: s + (q - kv) // 7 + (q - kv) // -3 + (kv - q) // 8 + q // (kv + 1),
    "remainder": lambda s, b, h, q, kv: s + (q - kv) % 7 + (q - kv) % -3 + (kv - q) % 8 + torch.remainder(s, 1.5),
    "truncating": lambda s, b, h, q, kv: s + torch.div(q - kv, 5, rounding_mode="trunc") + torch.fmod(q - kv, 5) + torch.fmod(s, 1.5),
    "true_divide": lambda s, b, h, q, kv: s + (q - kv) / 7 + 1 / (q + 1) + q / (kv + 1),
    "wide_integers": lambda s, b, h, q, kv: s + ((q * 65536 * 65536 + kv) >> 30) + (q << 33) // 2**31,
    "powers": lambda s, b, h, q, kv: s**2 + s**3 + s.abs() ** 0.5 + s.abs() ** 1.7 + torch.pow(2.0, s) + (s.abs() + 1) ** -1 + q**2,
    "inverse_powers": lambda s, b, h, q, kv: sum((s.abs() + 1) ** n for n in (-0.5, -1.0, -2.0, -3.0)) + s**0.0,
    "negative_base": lambda s, b, h, q, kv: torch.pow(s, torch.ones_like(s) * 3),
    "exponentials": lambda s, b, h, q, kv: (
        torch.exp(s) + torch.expm1(s * 0.01) + torch.exp2(s) + torch.sigmoid(s) + torch.nn.functional.silu(s)
    ),
    "logarithms": lambda s, b, h, q, kv: torch.log(s.abs()) + torch.log2(s.abs()) + torch.log1p(s.abs() * 1e-4) + torch.log10(s.abs() + 1),
    "hyperbolic": lambda s, b, h, q, kv: torch.tanh(s) + torch.tanh(s * 0.05) + torch.sinh(s.abs()) + torch.cosh(s) + torch.asinh(s),
    "trigonometric": lambda s, b, h, q, kv: torch.sin(s) + torch.cos(s) + torch.erf(s),
    "rounding": lambda s, b, h, q, kv: (
        torch.floor(s) + torch.ceil(s) + torch.round((q - kv) * 0.5) + torch.trunc(s) + torch.frac(s) + s.sign()
    ),
    "extremes": lambda s, b, h, q, kv: torch.minimum(s, -s) + torch.clamp(s, -1, 2) + torch.clamp(q - kv, min=-4, max=9) + torch.relu(s),
    "nan_propagates": lambda s, b, h, q, kv: torch.where(torch.isnan(torch.maximum(torch.where(q > kv, torch.nan, s), s)), 1.0, s),
    "choices": lambda s, b, h, q, kv: torch.where((q > kv) ^ (q % 2 == 0), s, -torch.inf).masked_fill(~(kv < 50), 0.25),
    "logic": lambda s, b, h, q, kv: s + torch.logical_or(q > 5, torch.logical_not(kv > 9)).to(s.dtype) + (q & 6) + (q | kv) + (q ^ kv) + ~q,
    "not_of_integers": lambda s, b, h, q, kv: s + torch.logical_not(q % 3) + torch.logical_not(q * 65536 * 65536) + ~(q == kv) + ~(kv % 2),
    "activations": lambda s, b, h, q, kv: torch.nn.functional.gelu(s) + torch.nn.functional.softplus(s) + torch.nn.functional.leaky_relu(s),
    "settings left out": lambda s, b, h, q, kv: torch.nn.functional.softplus(s, 2.0) + torch.nn.functional.hardtanh(s * 3, -2, 1),
    "gelu_tanh": lambda s, b, h, q, kv: torch.nn.functional.gelu(s, approximate="tanh") + torch.nn.functional.hardtanh(s),
    "conversions": lambda s, b, h, q, kv: torch.round(s).to(torch.bfloat16).float() + s.int() + (q == kv).float() + torch.tensor(2.5),
    "fused": lambda s, b, h, q, kv: torch.lerp(s, -s, 0.25) + torch.addcmul(s, s, s, value=2) + torch.rsub(s, 3, alpha=2),
    "constant": lambda s, b, h, q, kv: torch.zeros_like(s) + 3.0,
    "constant_infinity": lambda s, b, h, q, kv: torch.full_like(s, -torch.inf),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_matches_torch(name: str) -> None:
    got, want = _evaluate(OPERATIONS[name])
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
def test_integers_of_less_than_64_bits_wrap_as_in_torch(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    table = torch.tensor([info.max, info.min, 1, info.max - 1, 0, info.min + 1, 7, 2], dtype=dtype, device=DEVICE).repeat(8)

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        x, y = table[q], table[kv]
        sums = (x + y > 0).float() + 2 * (x - y < 1) + 4 * (x * 2 <= q) + 8 * (-x < kv) + 16 * (x + 2 > kv) + 32 * (x.abs() < 3)
        sums = sums + 64 * (~x < kv) + 128 * ((x - y).long() + q < kv) + 256 * (q.to(dtype) * y < 5)
        # Integers beyond the dtype: torch wraps them.
        sums = sums + 512 * (y > -3) + 1024 * (x - y <= -2) + 2048 * (x < info.max + 5) + 4096 * (x.clamp(min=-7) > y)
        return sums + 8192 * (torch.where(x > y, x, -5) > 2) + 16384 * (torch.full_like(x, -1) > y)

    got, want = _evaluate(mod)
    assert torch.equal(got, want.to(got.dtype))


def test_numbers_beside_float64_tables_are_float64() -> None:
    """Triton takes 0.1 for a float32: `table < 0.1` was true where the table has 0.1."""
    table = torch.tensor([0.1, 0.05, 0.3, -0.1, 1e-50, 1e300, 0.5, 0.2], dtype=torch.float64, device=DEVICE).repeat(8)

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        x, y = table[q], table[kv]
        bits = (x < 0.1).float() + 2 * (x == 0.1) + 4 * (x + 0.1 < 0.2) + 8 * (x.clamp(min=0.1) == y) + 16 * (x > -0.1)
        return bits + 32 * (torch.logaddexp(x, torch.full_like(x, 0.3)) > y) + 64 * (x == 1e-50) + 128 * (y * 0.3 > 0.3e300 - 1e285)

    got, want = _evaluate(mod)
    assert torch.equal(got, want)


_INF, _NAN = float("inf"), float("nan")
_SIZES = [0.0, 1e-30, 1e-10, 1e-6, 0.1, 0.4999, 0.5, 0.75, 1.0, 2.0, 4.0, 6.0, 9.0, 30.0, 39.0, 41.0, 60.0, 87.0, 88.5, 89.0, 1e5, 1e9, 2e9]
_SIZES += [1e15, 2e19, 1e30, 3e38, _INF]


@pytest.mark.parametrize(
    "function",
    [
        torch.erfc,
        torch.asinh,
        torch.acosh,
        torch.sinh,
        torch.cosh,
        torch.hypot,
        torch.logaddexp,
        torch.logaddexp2,
        lambda x, y: torch.lerp(x, y, 0.3),
        lambda x, y: torch.lerp(x, y, 1.0),
        lambda x, y: torch.lerp(torch.ones_like(x), torch.full_like(y, 3.0), x),
    ],
)
def test_functions_of_small_and_large_numbers_match_torch(function: Callable[..., Tensor]) -> None:
    """In size relative to the result: 1 − erf(x) is 0 for x = 4, and a square overflows from 2e19 on."""
    numbers = torch.tensor([*_SIZES, *(-x for x in _SIZES), _NAN, *[3.0] * (63 - 2 * len(_SIZES))], device=DEVICE)
    operands = 2 if function not in (torch.erfc, torch.asinh, torch.acosh, torch.sinh, torch.cosh) else 1

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return function(*(numbers[q], numbers[kv])[:operands]) + 0 * kv

    got = _evaluate(mod)[0].double()
    wide = numbers.double()
    exact = function(*(wide[:, None], wide[None])[:operands]).expand(64, 64)
    of_torch = function(*(numbers[:, None], numbers[None])[:operands]).expand(64, 64)
    want = torch.where(of_torch.isfinite(), exact, of_torch.double())
    budget = 1e-5 * want.abs() + 4 * (of_torch.double() - exact).abs().nan_to_num(0.0, 0.0, 0.0) + 1e-37
    same = (got == want) | (got.isnan() & want.isnan()) | ((got - want).abs() <= budget)
    wrong = [(numbers[i].item(), numbers[j].item(), got[i, j].item(), want[i, j].item()) for i, j in (~same).nonzero()[:5].tolist()]
    assert not wrong


def _wrong_operations(dtype: torch.dtype) -> list[int]:
    table = table_of(dtype, DEVICE, 64)

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        results = [2**i * operation(table[q], table[kv], q, kv) for i, operation in enumerate(COMPARISONS)]
        return sum(results).float()  # type: ignore[union-attr]

    got, want = _evaluate(mod)
    return [i for i in range(len(COMPARISONS)) if not torch.equal(got.int() >> i & 1, want.int() >> i & 1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operations_on_narrow_integers_wrap_as_in_torch(dtype: torch.dtype) -> None:
    assert _wrong_operations(dtype) == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operations_on_narrow_integers_wrap_as_in_torch_on_a_gpu(dtype: torch.dtype) -> None:
    assert _wrong_operations(dtype) == []


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16], ids=str)
def test_quotients_by_integers_beyond_the_dtype_match_torch(dtype: torch.dtype) -> None:
    """A quotient is a float: torch does not wrap its operands."""
    table = torch.arange(64, device=DEVICE).to(dtype)
    got, want = _evaluate(lambda s, b, h, q, kv: table[q] / 40000 + table[kv] / -2 + torch.copysign(table[q], -70000))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("divided", [torch.remainder, torch.fmod, torch.floor_divide])
def test_float_quotients_and_rests_are_exact(divided: Callable[..., Tensor]) -> None:
    """1 / 0.1 rounds to 10 in float32, but 0.1 is above a tenth: torch's `1 // 0.1` is 9."""
    numbers = torch.tensor([1.0, 0.1, -0.3, 7.5, 3e7, -1e9, 2.0, 0.7, -49.0, 1e-3, 0.0, 6.0, torch.inf, -torch.inf, torch.nan, 12345.678])
    table = numbers.to(DEVICE).repeat(4)

    def by_numbers(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return divided(q * 1.0, 0.1) + 100 * divided(kv, -0.7) + divided(3.5 + 0 * s, table[q].abs() + 0.1)

    for mod in (lambda s, b, h, q, kv: divided(table[q], table[kv]), by_numbers):
        got, want = _evaluate(mod)
        torch.testing.assert_close(got, want.to(got.dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64], ids=str)
def test_shifts_by_less_than_zero_or_more_than_the_width_match_torch(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    table = torch.tensor([info.max, info.min, 5, 1], dtype=dtype, device=DEVICE).repeat(16)
    counts = torch.tensor([-1, 0, 3, 7, 8, 31, 32, 33, 63, 64, 70, 100, -5, 9, 40, 2], device=DEVICE).to(dtype).repeat(4)

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        x, y = table[q], counts[kv]
        fixed = [x << -1, x << 3, x << 40, x << 70, x >> -1, x >> 9, x >> 33, x >> 70]
        return sum(((value % 97) * (i + 1)).float() for i, value in enumerate([*fixed, x << y, x >> y]))  # type: ignore[return-value]

    got, want = _evaluate(mod)
    assert torch.equal(got, want.to(got.dtype))


def test_negated_int16_is_not_computed_in_16_bits() -> None:
    """ptxas compares the 16-bit −(−32768) as 32768."""
    table = torch.zeros(64, dtype=torch.int16)
    source = codegen.program_source(trace(lambda b, h, q, kv: -table[q] < table[kv].abs() - 1, "mask").program, codegen.Options())
    assert "tl.int16" not in source


def test_lookups_wrap_negative_indices() -> None:
    table, flags = torch.randn(3, 64, device=DEVICE), torch.randint(2, (64,), device=DEVICE).bool()
    got, want = _evaluate(lambda s, b, h, q, kv: torch.where(flags[kv], s, 0.0) + table[h - 1, -1 - q] * table[2, kv - q])
    torch.testing.assert_close(got, want)


def test_equal_programs_share_one_function() -> None:
    options = codegen.Options()
    first, second = (trace(lambda b, h, q, kv: q - kv < 5, "mask").program for _ in range(2))
    assert codegen.program_function(first, options) is codegen.program_function(second, options)


def test_int64_is_used_only_where_lengths_need_it() -> None:
    def wide(mod: Mod, longest: int) -> bool:
        return "int64" in codegen.program_source(trace(mod, "mask").program, codegen.Options(max_position=longest))

    assert not wide(lambda b, h, q, kv: q * 1000 > kv, 1000)
    assert wide(lambda b, h, q, kv: q * 1000 > kv, 3_000_000)
    assert not wide(lambda b, h, q, kv: q >= kv, 2**30)
