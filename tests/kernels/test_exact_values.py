"""Operands of floors, comparisons and indices equal torch's to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import longspan as ls
from longspan._kernels.gpu import codegen
from longspan._masks.joint import joint_of
from longspan._masks.tracing import trace

Mod = Callable[..., Tensor]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAST = codegen.Options(fast=True)


def blocks(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """41 · (1/41) is below 1 in float32: one of 271 such divisors below 2000."""
    return (q / 41).floor() == (kv / 41).floor()


def near(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s + 5 * ((q / 41).floor() - (kv / 41).floor())


def sooner(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return torch.where(q / 41 >= 3, s, 7 + kv / 100 - s)


TABLE = torch.linspace(-3, 3, 6, device=DEVICE)


def bucket(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s + TABLE[(kv / 41).int()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("score", [None, near, sooner, bucket])
def test_quotients_before_discontinuous_operations_equal_torchs(score: Mod | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 230, 16, dtype=dtype, device=DEVICE) for _ in range(3))
    mask = blocks if score is None else None
    got, want = (ls.attention(q, k, v, mask=mask, score_mod=score, kernel=kernel) for kernel in ("triton", "dense"))
    assert float((got - want).abs().max()) < 4e-3


@pytest.mark.parametrize("power", [torch.exp2, lambda x: 2.0**x, lambda x: (x * 0 + 2) ** x], ids=["exp2", "base 2", "tensors"])
@pytest.mark.parametrize("device", [DEVICE, pytest.param("cuda", marks=pytest.mark.gpu)])
def test_subnormal_powers_of_two_are_not_zero_in_a_mask(power: Callable[[Tensor], Tensor], device: str) -> None:
    """2⁻¹⁴⁹ is the smallest positive float32. Triton's exp2 gives 0 for all results below 2⁻¹²⁶."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 200, 16, device=device) for _ in range(3))

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (power(-(kv.float())) <= 0) | (q == kv)

    got, want = (ls.attention(q, k, v, mask=mask, kernel=kernel) for kernel in ("triton", "dense"))
    assert float((got - want).abs().max()) < 4e-3


def test_powers_of_two_keep_subnormal_results_before_a_comparison_only() -> None:
    assert "exp2_subnormal" in source(lambda b, h, q, kv: torch.exp2(-kv.float()) <= q, "mask")
    assert "exp2_subnormal" not in source(lambda s, b, h, q, kv: s + torch.exp2(-kv.float()))
    assert "exp2_subnormal" in source(lambda b, h, q, kv: 2.0 ** -kv.float() <= q, "mask")


def source(mod: Mod, kind: str = "score") -> str:
    """The generated function of a program."""
    return codegen.program_source(trace(mod, kind).program, FAST).split("\n\n\n")[1]  # type: ignore[arg-type]


def test_division_becomes_multiplication_only_without_a_discontinuity() -> None:
    text = source(lambda s, b, h, q, kv: 30 * torch.tanh(s / 30) + (q / 41).floor() * 0.5)
    assert repr(1 / 30) in text and repr(1 / 41) not in text and "tanh_fast" in text


def test_approximate_tanh_is_not_used_before_a_comparison() -> None:
    assert "tanh_fast" not in source(lambda s, b, h, q, kv: torch.where(torch.tanh(s) > 0.5, s, -s))
    assert "tanh_fast" not in source(lambda b, h, q, kv: torch.tanh((q - kv) / 7) > 0.5, "mask")


def test_integer_masks_use_no_float_operations() -> None:
    text = source(lambda b, h, q, kv: (q // 41 == kv // 41) & (q - kv < 300) & (q % 3 != 1), "mask")
    assert not any(word in text for word in ("div_rn", "mul_rn", "sqrt_rn", "float"))


def test_division_by_a_power_of_two_becomes_multiplication() -> None:
    text = source(lambda b, h, q, kv: (q / 64).floor() == (kv / 64).floor(), "mask")
    assert "0.015625" in text and "div_rn" not in text


def test_gradients_use_fast_forms_without_a_discontinuity() -> None:
    program = trace(lambda s, b, h, q, kv: 30 * torch.tanh(s / 30), "score").program
    text = codegen.joint_source(program, joint_of(program), [], FAST)
    assert "tanh_fast(" in text and repr(1 / 30) in text


FUNCTIONS = ["exp exp2 expm1 log log2 log10", "log1p sin cos tan sinh cosh", "tanh atanh sigmoid silu", "sqrt rsqrt reciprocal"]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["triton", "hopper"])
@pytest.mark.parametrize("names", FUNCTIONS)
def test_functions_in_masks_have_the_bits_of_torch(names: str, kernel: str) -> None:
    """A row sees its keys if functions of its number equal torch's. Numbers of all sizes: random bits, integers by 7, normal ones."""
    functions = [getattr(torch.nn.functional if name == "silu" else torch, name) for name in names.split()]
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (40_000,), generator=generator).to(torch.int32).view(torch.float32)
    x = torch.cat([bits[bits.isfinite()], torch.arange(-9_000, 9_001) / 7, torch.randn(8_000, generator=generator)]).cuda()
    want = torch.stack([function(x) for function in functions])
    finite = want.isfinite()  # NaN equals nothing
    want.nan_to_num_(0.0, 0.0, 0.0)

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        seen = kv >= 0
        for i, function in enumerate(functions):
            seen = seen & ((function(x[q]) == want[i, q]) | ~finite[i, q])
        return seen

    q = torch.zeros(1, 1, len(x), 64, device="cuda", dtype=torch.bfloat16)
    k = torch.zeros(1, 1, 3, 64, device="cuda", dtype=torch.bfloat16)
    _, lse = ls.attention(q, k, k, mask=mask, kernel=kernel, return_lse=True)
    wrong = torch.isinf(lse[0, 0])
    assert not wrong.any(), f"{int(wrong.sum())} of {len(x)}: {x[wrong][:5].tolist()}"
