"""The source that masks and scores compile to, line by line, against `generated_source.json`.

After a deliberate change: `PYTHONPATH=src:. python tests/kernels/test_generated_source.py` writes the file anew; read its diff.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")

import longspan as ls
from longspan._kernels.gpu import codegen, hoisted_lookups, row_bounds, uniform_lookup
from longspan._kernels.gpu.typed_values import Unsupported
from longspan._masks.joint import joint_of
from longspan._masks.tracing import trace

TORCH = "2.13"  # the version of the record: others may decompose gradients in another way
RECORD = Path(__file__).with_name("generated_source.json")
Mod = Callable[..., Tensor]
PLAIN, FAST, LONG = codegen.Options(), codegen.Options(fast=True), codegen.Options(max_position=codegen.LONG)
BIG, INTERPRETED = codegen.Options(big_tables=True), codegen.Options(interpreted=True)
LINE, GRID, SLOPES, SCALE = torch.zeros(57), torch.zeros(3, 5), torch.zeros(5, dtype=torch.bfloat16), torch.tensor(1.25)
DOUBLE, FLAGS = torch.zeros(9, dtype=torch.float64), torch.zeros(7, dtype=torch.bool)
BYTES, SMALL, SHORT = (torch.zeros(11, dtype=dtype) for dtype in (torch.uint8, torch.int8, torch.int16))
WORDS, LONGS = torch.zeros(13, dtype=torch.int32), torch.zeros(17, dtype=torch.int64)
CUBE = torch.zeros(4, 5, 6)
REAL, SCALE_LEARNED = torch.zeros(6, requires_grad=True), torch.tensor(1.5, requires_grad=True)

UNARY = (
    "reciprocal sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh asinh acosh atanh sigmoid tanh erf erfc square neg "
    "abs sign sgn floor ceil trunc round frac relu isnan isinf isfinite signbit"
).split()
BINARY = (
    "hypot logaddexp logaddexp2 copysign minimum maximum fmin fmax remainder fmod floor_divide pow add sub mul div atan2 eq ne lt le gt ge "
    "logical_and logical_or logical_xor"
).split()
INTEGER = (
    "add sub mul floor_divide remainder fmod minimum maximum bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift "
    "eq lt"
).split()


def float_unary(name: str, mod: str) -> Mod:
    if mod == "score":
        return lambda s, b, h, q, kv: s * getattr(torch, name)(s * 0.7)
    return lambda b, h, q, kv: getattr(torch, name)((q - kv) / 7) * 1.0 >= 0.5


def float_binary(name: str, mod: str) -> Mod:
    if mod == "score":
        return lambda s, b, h, q, kv: s + getattr(torch, name)(s, LINE[q])
    return lambda b, h, q, kv: getattr(torch, name)(LINE[q], kv / 3) > 0.25


def integers(name: str, x: Tensor, y: Tensor | None, swapped: bool = False) -> Mod:
    """A comparison of an operation on q, or an element of x at q, with kv, or an element of y, or a number."""

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        left, right = x[q], kv if y is None else y[kv]
        return getattr(torch, name)(*((right, left) if swapped else (left, right))) >= h

    return mod


def looked_up(*indices: Tensor) -> Tensor:
    return sum((LINE[i] for i in indices), start=LINE[0])


def number(fn: Callable[[Tensor, Tensor], Tensor]) -> Mod:
    return lambda b, h, q, kv: fn(q - kv, q) >= h


def score(fn: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Mod:
    return lambda s, b, h, q, kv: fn(s, q, kv)


SCORES: dict[str, Mod] = {
    "alibi": lambda s, b, h, q, kv: s + (kv - q) * SLOPES[h],
    "softcap": lambda s, b, h, q, kv: 30 * torch.tanh(s / 30),
    "bias": lambda s, b, h, q, kv: s * SCALE + LINE[torch.clamp(q - kv, 0, 56)] * GRID[b, h],
    "two places": lambda s, b, h, q, kv: s * GRID[b, h] + GRID[b, h // 2] + GRID[b, q % 5],
    "tables in a row": lambda s, b, h, q, kv: s + GRID[b % 3, WORDS[LONGS[q]]] + LINE[-1 - q % 57],
    "double": lambda s, b, h, q, kv: s + DOUBLE[q] * 2 - DOUBLE[kv] / 4,
    "half": lambda s, b, h, q, kv: (s.half() + SLOPES[h].half()).float() + s.bfloat16(),
    "learned": lambda s, b, h, q, kv: s * REAL[h] + REAL[(q - kv).clamp(0, 5)] + REAL[q % 6] * REAL[kv % 6],
    "learned scalar": lambda s, b, h, q, kv: s * SCALE_LEARNED + REAL[0],
    "constants": score(lambda s, q, kv: torch.where(q > kv, float("inf"), s) + torch.where(kv > 5, s, -float("inf"))),
    "constant": score(lambda s, q, kv: torch.zeros_like(s) + 2),
    "full": score(lambda s, q, kv: s * torch.full_like(s, 1.5) + torch.ones_like(q) * torch.full_like(kv, 3)),
    "row": score(lambda s, q, kv: (q * 0.5).to(torch.float32) + torch.zeros_like(s)),
    "activations": score(lambda s, q, kv: functional.gelu(s) + functional.gelu(s, approximate="tanh") + functional.silu(s)),
    "clipped": score(lambda s, q, kv: functional.leaky_relu(s) + functional.leaky_relu(s, 0.3) + functional.hardtanh(s, -2, 3)),
    "hardtanh": score(lambda s, q, kv: functional.hardtanh(s) + functional.relu6(s) + functional.softplus(s)),
    "softplus": score(lambda s, q, kv: functional.softplus(s, 2.0, 15.0) + functional.threshold(s, 0.5, 0.25)),
    "left out": score(
        lambda s, q, kv: functional.softplus(s, 2.0) + functional.softplus(s, threshold=9.0) + functional.hardtanh(s, -2, 1)
        + functional.hardtanh(s, max_val=3.0) + torch.ops.aten.hardtanh(s * 2)
    ),
    "clamps": score(lambda s, q, kv: s.clamp(min=-3) + s.clamp(max=4) + s.clamp(-1, 2) + torch.clamp_min(s, 5) + torch.clamp_max(s, 6)),
    "clamps of integers": score(lambda s, q, kv: s + (q - kv).clamp(min=-3) + (q - kv).clamp(max=4) + (q - kv).clamp(-1, 2)),
    "addc": score(lambda s, q, kv: torch.addcmul(s, s, s, value=0.5) + torch.addcdiv(s, s, s + 2)),
    "decisive addc": score(lambda s, q, kv: torch.where(torch.addcdiv(s, s, s + 3, value=2) > 1, s, 0.0)),
    "lerp": score(lambda s, q, kv: torch.lerp(s, s * 2, 0.25) + torch.lerp(s, s * 2, s)),
    "learned lerp": lambda s, b, h, q, kv: torch.lerp(s, REAL[h], REAL[kv % 6]) + torch.addcdiv(s, s, REAL[q % 6]) + torch.atanh(s),
    "double numbers": lambda s, b, h, q, kv: s + (DOUBLE[q] * 0.1 < 0.3) + DOUBLE[kv].clamp(min=0.1) / 0.7,
    "alpha": score(lambda s, q, kv: torch.add(s, s, alpha=3) - torch.sub(s, 2 * s, alpha=0.5) + torch.rsub(s, 5) + (7 - q)),
    "rsub alpha": score(lambda s, q, kv: torch.rsub(s, s * 3, alpha=2)),
    "quotients": score(lambda s, q, kv: s / 3 + s / 8 + s / LINE[q] + 1 / s + s / 0.1 + q / 4 + q / 5),
    "rounded quotients": score(lambda s, q, kv: torch.div(s, 3, rounding_mode="floor") + torch.div(s, 3, rounding_mode="trunc")),
    "decisive": score(lambda s, q, kv: torch.where(torch.tanh(s) * 3 / 7 + torch.sqrt(s) > 0.5, s / 7, -s)),
    "filled": score(lambda s, q, kv: s.masked_fill(q < kv, -1.0) + (q - kv).masked_fill(q > 3, 2)),
    "powers": score(lambda s, q, kv: s**2 + s**3 + s**8 + s**9 + s**0.5 + s**-0.5 + s**-1 + s**-2 + s**0 + s**1.7 + 2.0**s + s**s),
    "decisive powers": score(lambda s, q, kv: torch.where(s**0.5 + s**-0.5 + s**-1 + 3.0**s > 0, s, 0.0)),
    "kinds": score(lambda s, q, kv: s + (q > kv) * 2 + (q > kv).int() + FLAGS[q] + BYTES[kv] + (s > 0) * s + s.int() + s.long()),
    "float checks": score(lambda s, q, kv: torch.where(torch.isnan(s) | torch.isinf(s * 2) | ~torch.isfinite(s + 1), 0.0, s)),
    "copies": score(lambda s, q, kv: s.clone() + s.detach() * (q.clone() + kv.int()).float()),
    "small integers": score(
        lambda s, q, kv: s + q // 3 + (q & 7) + (q - kv) % 5 + SMALL[q].square() + (q - kv).abs() - (-q) + torch.minimum(q, kv)
        + (q + kv) * 2 + (q << 1) + (q >> 1) + torch.sign(q - kv) + (~q)
    ),
    "decimals": score(lambda s, q, kv: torch.round(s, decimals=2)),
    "zero and one": score(lambda s, q, kv: s / 0 + s / 1 + s / -8 + s / -1 + s / float("inf") + 0.0**s + 1**s),
    "negative base": score(lambda s, q, kv: (-2.0) ** s),
    "rsub of a number": score(lambda s, q, kv: torch.rsub(s, 5, alpha=3) + torch.add(q, 5, alpha=3) + torch.rsub(kv, 7, alpha=2)),
    "minimum": score(lambda s, q, kv: s + torch.minimum(q, kv) + torch.maximum(q - 3, kv) - torch.maximum(q - 9, kv - 8)),
    "bool sums": score(lambda s, q, kv: s + ((q > 3) + (kv > 5)) + (q > 3) * (kv > 5)),
    "sizes": lambda s, b, h, q, kv: s + CUBE[b, 2, q % 6] + CUBE[kv % 4, 1, 3],
}  # fmt: skip
MASKS: dict[str, Mod] = {
    "bools": lambda b, h, q, kv: (q > kv).logical_or(q > 3).logical_and(kv < 9).logical_xor(~(q < 5)),
    "bool bits": lambda b, h, q, kv: ((q > kv) | (q > 3)) & (kv < 9) ^ torch.logical_not(q) & (b == 0),
    "bool comparisons": lambda b, h, q, kv: ((q > kv) == (q > 3)) | ((q > 3) != FLAGS[kv]) | (FLAGS[q] >= 0),
    "comparisons of kinds": lambda b, h, q, kv: (q > 2.5) | (LONGS[q] > kv) | (DOUBLE[q] < kv) | (SMALL[q] != BYTES[kv]) | (kv < 2**40),
    "always": lambda b, h, q, kv: torch.ones_like(q, dtype=torch.bool) & (kv >= 0),
    "shifts": lambda b, h, q, kv: (q << 3) + (kv >> 2) + (q >> 40) + (kv << 0) + (q << 64) + (q >> 31) + (q >> 30) > h,
    "shifts of long": lambda b, h, q, kv: (LONGS[q] << 3) + (LONGS[kv] >> 2) + (LONGS[kv] >> 63) + (LONGS[kv] >> 64) > h,
    "shifts by tensors": lambda b, h, q, kv: (q << h) + (kv >> h) + (LONGS[q] >> h) + (SMALL[q] >> SMALL[kv]) > 7,
    "bits": lambda b, h, q, kv: (q & 15) + (kv | 3) - (q ^ kv) + (~q) + ((q - kv) & 7) + (-(q & kv)) > h,
    "quotients": lambda b, h, q, kv: q // 3 + (q - kv) // 3 + (q - kv) // 4 + q // 16 + kv // (h + 1) + (q - 5) // h > b,
    "truncated": number(lambda d, q: torch.div(d, 3, rounding_mode="trunc") + torch.div(q, 3, rounding_mode="trunc") + d // -3),
    "floors": number(lambda d, q: torch.div(d, 3, rounding_mode="floor") + torch.div(d, 8, rounding_mode="floor")),
    "remainders": lambda b, h, q, kv: (q - kv) % 3 + (q - kv) % 8 + q % 5 + q % 8 + q % (h + 1) + (q - 9) % (kv + 1) + q % (h - 4) > b,
    "fmods": number(lambda d, q: torch.fmod(d, 3) + torch.fmod(d, 8) + torch.fmod(q, 3) + torch.fmod(q, 8)),
    "signs": number(lambda d, q: torch.sign(d) + d.abs() - (-d) + d * d + d.square() + q.square() + torch.sgn(q)),
    "powers": lambda b, h, q, kv: q**2 - kv**3 + (q - kv) ** 4 + q**1 + h**8 > b,
    "rounded": number(lambda d, q: torch.floor(d) + torch.round(q) + torch.relu(d) + d.clamp(0, 7) + torch.hypot(d / 3, q / 3).floor()),
    "wide products": lambda b, h, q, kv: q * kv + q * 1000 - kv * 2 * h + q * 2**33 > b * h,
    "sums near 32 bits": lambda b, h, q, kv: (q + (2**31 - 2**23) > kv) & (q + (2**31 - 2**23 - 1) > kv) & (q - 2**31 < kv),
    "narrow sums": lambda b, h, q, kv: (SHORT[q] + SHORT[kv] > 3) & (SHORT[q] * SHORT[kv] > 3) & (SMALL[q] - 3 > SMALL[kv]) & (-SMALL[q] > 2),  # noqa: E501
    "narrow bytes": lambda b, h, q, kv: (BYTES[q] - 3 > 4) & (BYTES[q] // 2 > BYTES[kv]) & (-BYTES[q] + 1 > 2) & (BYTES[q] + 300 > 7),
    "narrow choices": lambda b, h, q, kv: (torch.maximum(SMALL[q], SMALL[kv]) > 3) & (SMALL[q].clamp(-3, 200) > 1) & ((~SMALL[q]) > 0),
    "narrow words": lambda b, h, q, kv: (WORDS[q] + WORDS[kv] > 3) & (WORDS[q] * 5 > 3) & (WORDS[kv] + q > 0) & (SHORT[q] << 2 > 5),
    "conversions": lambda b, h, q, kv: ((q / 3).int() > kv) & ((kv / 5).long() > h) & (q.int() > 2) & (q.float() > 3) & (q.to(torch.int8) > 1),  # noqa: E501
    "indices that may be negative": lambda b, h, q, kv: looked_up(
        torch.div(q - kv, 3, rounding_mode="trunc"), ~q, kv << h, q * (q - kv), q * 2**40, q * (2**40 + 1), torch.fmod(q - kv, 7),
        (q - kv) % (h - 4), -q, (q - kv) ** 2, torch.minimum(q - 9, kv), (q - kv) & 7, (q - kv) << 2, (q - kv) >> 1, (q - kv) >> h,
        torch.where(q > kv, q - kv, 0), q - 1, torch.sign(q - kv), (q - kv) // 8, (q - kv) // 3, torch.div(q, h - 4, rounding_mode="trunc"),
        q // (h - 4), q % (h - 4), (q - kv) | 3, q ^ (kv - 1), (q / 3).int(), (q - kv).clamp(max=9), WORDS[q],
    ) > h,
    "indices that are not": lambda b, h, q, kv: looked_up(
        q // 3, q // 8, kv << 2, q * kv, q + kv, (q - kv) % 7, (q - kv) % 8, (q - kv) % (h + 3), q % (h + 3), (q - kv).abs(),
        (q - kv).square(), q**2, torch.maximum(q - 9, kv), torch.minimum(q, kv), q & kv, q | 3, q ^ kv, q >> 1, q >> h, q << 70,
        torch.where(q > kv, q, kv), (q > kv).long(), (q > kv).int(), torch.div(q, 3, rounding_mode="trunc"), BYTES[q].long(), q.clone(),
        (q - kv).clamp(min=0), torch.relu(q - kv), q.masked_fill(q > 3, 2), h, b, q // 1, torch.fmod(q, 7),
    ) > h,
    "largest sums in 32 bits": lambda b, h, q, kv: (
        (torch.sign(q - kv) * (2**31 - 1) > h) & (torch.minimum(q, kv * 200) + kv * 200 > h) & ((~q) + (2**31 - 2**23 - 2) > h)
        & ((~q) + (2**31 - 2**23 - 1) > h) & ((q | kv) + (2**31 - 2**24) > h) & ((q | kv) + (2**31 - 2**24 + 1) > h)
        & ((q << 7) + 2**30 - 1 > h) & (q << 8 > h) & ((q << 64) + (2**31 - 1) > h) & ((q > kv).long() + (2**31 - 2) > h)
        & ((q > kv).long() + (2**31 - 1) > h) & (torch.where(q > 3, q, 5) + (2**31 - 2**23 - 1) > h) & ((q / 3).long() + 1 > h)
        & ((q / 3).int() + 1 > h) & (q.square() + 1 > h) & (q * 255 + 2**23 - 1 > h) & (q * 256 > h)
        & (q // 3 + (2**31 - 2**23 - 1) > h) & ((q - kv) % 9 + (2**31 - 10) > h) & ((q - kv) % 9 + (2**31 - 9) > h)
        & (q % (2**30) + 2**30 - 1 > h) & ((q - kv) % 8 + (2**31 - 9) > h) & (torch.fmod(q - kv, 9) + (2**31 - 10) > h)
        & ((q >> 2) + (2**31 - 2**23 - 1) > h) & (h + (2**31 - 2**20 - 1) > q) & (h + (2**31 - 2**20) > q)
    ),
    "largest sums of tables": lambda b, h, q, kv: (
        (BYTES[q].long() + (2**31 - 2**8 - 1) > h) & (SHORT[q].long() + (2**31 - 2**15 - 1) > h) & (WORDS[q].long() + 1 > h)
        & (SMALL[q].long() + (2**31 - 2**7 - 1) > h) & (SMALL[q].long() + (2**31 - 2**7) > h) & (FLAGS[q].long() + (2**31 - 2) > h)
        & (SMALL[q].long() ** 2 + (2**31 - 2**14 - 1) > h) & (SMALL[q].long().square() + (2**31 - 2**14) > h)
        & (SMALL[q].long().square() + (2**31 - 2**14 - 1) > h) & (torch.sign(WORDS[q]).long() * (2**31 - 1) > h)
    ),
    "numbers": lambda b, h, q, kv: (q - 2**31 > kv - 2**31 - 1) & (q == 2**31 - 1) & (q < 2**31) & (kv != -(2**31)) & (q + 0 > -0.5),
    "other powers": lambda b, h, q, kv: q**9 > kv,
    "no power": lambda b, h, q, kv: q**0 > kv,
    "documents": ls.causal() & ls.documents(ids=torch.arange(57) // 9),
    "window": ls.sliding_window(10, 5) | ls.prefix(7),
}  # fmt: skip
BOUNDS: dict[str, Mod] = {
    "causal": ls.causal(),
    "after": ~ls.causal(),
    "window": ls.sliding_window(10, 5),
    "documents": ls.causal() & ls.documents(ids=torch.arange(57) // 9),
    "all signs": lambda b, h, q, kv: (kv < q) & (kv <= q + h) | (kv > q - 3) & (kv >= 7) | ~(q < kv) & (q + 2 >= kv),
    "sums on both sides": lambda b, h, q, kv: (h > kv - q) & (kv >= 5) | (kv + 3 < q - h) & (h - kv <= 7 - q) & (b - kv + 1 > 0),
    "seven": lambda b, h, q, kv: (kv < q) & (kv < 1) & (kv < 2) & (kv < 3) & (kv < 4) & (kv < 5) & (kv < 6),
    "six": lambda b, h, q, kv: (kv < q) & (kv < 1) & (kv < 2) & (kv < 3) & (kv < 4) & (kv < 5) & (kv < q),
    "wide": lambda b, h, q, kv: (kv - q + 2**33 > 0) & (kv < WORDS[q]) & (kv > LONGS[q]) & (LONGS[q] >= kv) & (WORDS[q] < kv + 1),
    "unbounded": lambda b, h, q, kv: kv + LONGS[q] > 3,
    "unbounded constant": lambda b, h, q, kv: kv < LONGS[q] + 1,
    "negative": lambda b, h, q, kv: -kv < q,
    "minus long": lambda b, h, q, kv: kv < -LONGS[q],
    "minus": lambda b, h, q, kv: (kv < -q + 5) & (q - kv > -9) & (q - kv - h < 12) & (kv + q - q > 3),
    "row": lambda b, h, q, kv: (FLAGS[q] | (q > 7)) & (kv < 5) & (q >= 0) | logical(q, kv),
    "constant": lambda b, h, q, kv: (q >= 0) & (h >= 0),
    "constants": lambda b, h, q, kv: ((q >= 0) & (kv < q)) | ~((q >= 0) | (kv > 3)),
    "equal": lambda b, h, q, kv: kv == q,
    "xor": lambda b, h, q, kv: (kv < q) ^ (kv < 3),
    "narrow": lambda b, h, q, kv: (kv < SMALL[q] + 2) & (BYTES[q] <= kv),
    "twice": lambda b, h, q, kv: kv + kv < q,
    "twice q": lambda b, h, q, kv: kv < q + q,
}


def logical(q: Tensor, kv: Tensor) -> Tensor:
    return torch.logical_and(torch.logical_not(kv > q), torch.logical_or(kv > 2, q > 4))


FLAT: dict[str, Mod] = {
    "distance": lambda s, b, h, q, kv: s + LINE[(q - kv).clamp(0, 56)],
    "other way": lambda s, b, h, q, kv: s + GRID[b, torch.minimum(kv - q + 9, h + 3)],
    "negated": lambda s, b, h, q, kv: s * SLOPES[h] + LINE[(-(q - kv)).clamp_min(0) // 2 * 3 + 1],
    "both": lambda s, b, h, q, kv: s + LINE[(q + kv).clamp_max(56).clamp_min(3)],
    "query": lambda s, b, h, q, kv: s + LINE[q],
    "two lookups": lambda s, b, h, q, kv: s + LINE[(q - kv).clamp(0, 56)] + LINE[q],
    "not monotonic": lambda s, b, h, q, kv: s + LINE[(q - kv).abs().clamp(0, 56)],
    "back and forth": lambda s, b, h, q, kv: s + LINE[(q - kv + (kv - q)).clamp(0, 56)],
    "divided by −2": lambda s, b, h, q, kv: s + LINE[((q - kv) // -2).clamp(0, 56)],
    "times 0": lambda s, b, h, q, kv: s + LINE[((q - kv) * 0).clamp(0, 56)],
    "by a table": lambda s, b, h, q, kv: s + LINE[LONGS[q - kv].clamp(0, 56)],
    "float": lambda s, b, h, q, kv: s + LINE[((q - kv) / 3).long().clamp(0, 56)],
    "alpha": lambda s, b, h, q, kv: s + LINE[torch.sub(q, kv, alpha=2).clamp(0, 56)],
    "kept": lambda s, b, h, q, kv: s + LINE[(q - kv + (h + 2 * b) % 3).clamp(min=0)],
}


def body(source: Any) -> Any:
    """The functions of a source, without the program's key in their names."""
    return None if source is None else re.sub(r"_[0-9a-f]{12}(?=[_(])", "", str(source).split("\n\n\n", 1)[1]).removeprefix("@triton.jit\n")


@cache
def program_of(mod: Mod, kind: Any) -> Any:
    return trace(mod, kind).program


def source_or_error(make: Callable[[], str]) -> Any:
    try:
        return body(make())
    except (Unsupported, RuntimeError) as error:
        return f"{type(error).__name__}: {error}".split("\n")[0]


def text_of(mod: Mod, kind: str, options: codegen.Options = PLAIN) -> Any:
    return source_or_error(lambda: codegen.program_source(program_of(mod, kind), options))


def gradient_of(mod: Mod, options: codegen.Options) -> Any:
    program, captured = program_of(mod, "score"), trace(mod, "score").captured()
    needs = [c.differentiable and c.dtype is torch.float32 for c in program.captured]
    return source_or_error(lambda: codegen.joint_source(program, joint_of(program, sizes=[t.shape for t in captured]), needs, options))


def ahead(mod: Mod, kind: str, *, uniform: bool, direct: bool = False) -> Any:
    """Hoisted tensors, the function that looks up their elements, and the program that reads these."""
    program, plain = program_of(mod, kind), codegen.Options(direct=direct)
    options = hoisted_lookups.hoisted_options(program, None, plain) if uniform else hoisted_lookups.early_options(program, plain)
    name, inputs = ("uniform", hoisted_lookups._UNIFORM) if uniform else ("early", hoisted_lookups._EARLY)
    if not options.hoisted:
        return None
    lookups = hoisted_lookups._lookup_function.__wrapped__(codegen.ByKey(program), options, name, inputs)
    return [list(options.hoisted), body(lookups), text_of(mod, kind, options)]


def functions_of(module: Any, function: str, mod: Mod, kind: str, options: codegen.Options = PLAIN) -> Any:
    """The sources of two functions, or None."""
    made = getattr(module, function).__wrapped__(codegen.ByKey(program_of(mod, kind)), options)
    return None if made is None else [body(source) for source in made]


def of_score(mod: Mod) -> list[Any]:
    return [
        text_of(mod, "score"), text_of(mod, "score", FAST), gradient_of(mod, FAST), ahead(mod, "score", uniform=True),
        ahead(mod, "score", uniform=False),
    ]  # fmt: skip


def of_mask(mod: Mod) -> list[Any]:
    return [text_of(mod, "mask"), text_of(mod, "mask", LONG), ahead(mod, "mask", uniform=False, direct=True)]


def of_unary(name: str) -> list[Any]:
    scored, masked = float_unary(name, "score"), float_unary(name, "mask")
    return [text_of(scored, "score"), text_of(masked, "mask"), text_of(masked, "mask", INTERPRETED), gradient_of(scored, PLAIN)]


def of_binary(name: str) -> list[Any]:
    scored = float_binary(name, "score")
    return [text_of(scored, "score"), text_of(float_binary(name, "mask"), "mask"), gradient_of(scored, PLAIN)]


def of_integers(name: str) -> list[Any]:
    operands = ((BYTES, None, False), (SMALL, SMALL, False), (BYTES, BYTES, False), (WORDS, None, True), (LONGS, WORDS, False))
    return [text_of(integers(name, x, y, swapped), "mask") for x, y, swapped in operands]


GENERATED: dict[str, Callable[[], Any]] = {
    **{f"score {name}": partial(of_score, mod) for name, mod in SCORES.items()},
    **{f"mask {name}": partial(of_mask, mod) for name, mod in MASKS.items()},
    **{f"function {name}": partial(of_unary, name) for name in UNARY},
    **{f"functions {name}": partial(of_binary, name) for name in BINARY},
    **{f"integers {name}": partial(of_integers, name) for name in INTEGER},
    **{f"large {name}": partial(text_of, SCORES[name], "score", BIG) for name in ("bias", "tables in a row", "double", "sizes")},
    **{f"bounds {name}": partial(functions_of, row_bounds, "_functions", mod, "mask") for name, mod in BOUNDS.items()},
    **{f"flat {name}": partial(functions_of, uniform_lookup, "_flat", mod, "score") for name, mod in FLAT.items()},
    "flat large": partial(functions_of, uniform_lookup, "_flat", FLAT["distance"], "score", BIG),
    "flat mask": partial(functions_of, uniform_lookup, "_flat", lambda b, h, q, kv: LINE[(q - kv).clamp(0, 56)] > 0, "mask"),
}


@cache
def recorded() -> dict[str, Any]:
    return json.loads(RECORD.read_text())  # type: ignore[no-any-return]


def give_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions in pairs are made as source."""
    for module in (row_bounds, uniform_lookup, hoisted_lookups):
        monkeypatch.setattr(module, "loaded", lambda source: source)


@pytest.mark.skipif(not torch.__version__.startswith(f"{TORCH}."), reason=f"recorded with torch {TORCH}")
@pytest.mark.parametrize("name", GENERATED)
def test_generated_source_is_as_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    give_sources(monkeypatch)
    assert GENERATED[name]() == recorded()[name]


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        give_sources(patch)
        lines = [f"{json.dumps(name)}: {json.dumps(make())}" for name, make in GENERATED.items()]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
