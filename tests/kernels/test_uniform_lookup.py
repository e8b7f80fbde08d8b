"""Lookups that are uniform over a tile: when they are detected, and the score computed from one element."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from torch import Tensor

from longspan._kernels.gpu import codegen, launch
from longspan._kernels.gpu.interpreter import interpreted, quiet
from longspan._kernels.gpu.uniform_lookup import flat_functions
from longspan._masks.tracing import trace

TABLE = torch.linspace(-1, 1, 3 * 40).view(3, 40)
LINE = torch.linspace(-2, 2, 57)
ROWS, COLUMNS = 8, 16


def clamped(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s + TABLE[h, torch.clamp(q - kv, 0, 39)]


def forwards(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s * 2 + LINE[torch.clamp(kv - q + 20, min=3, max=50)] * h


def coarse(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return torch.tanh(s) + LINE[torch.clamp((q - kv) // 16, -1, 29) + 1]


def around(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Indices from −1 to 11 of 12 elements: both corners read the last element, pairs between read others."""
    return s + LINE[:12][torch.clamp(q - kv, -1, 11)]


def by_query(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s + LINE[q % 57]


def product(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s + LINE[torch.clamp(q * kv, 0, 56)]


def against(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s + LINE[torch.clamp(torch.maximum(q - kv, kv - q), 0, 56)]


def two(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s + LINE[torch.clamp(q - kv, 0, 56)] + TABLE[h, torch.clamp(q - kv, 0, 39)]


def alone(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s + TABLE[h, 3]


@pytest.mark.parametrize("score", [by_query, product, against, two, alone])
def test_lookups_without_a_monotonic_index_are_not_uniform(score: Any) -> None:
    assert flat_functions(trace(score, "score").program, codegen.Options(fast=True)) == (None, None)
    assert flat_functions(None, codegen.Options(fast=True)) == (None, None)


@triton.jit
def probe(
    s_ptr, out_ptr, found_ptr, b, h, q_first, kv_first, captured, sizes,
    FLAT: tl.constexpr, CORNERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    q, kv = q_first + tl.arange(0, ROWS)[:, None], kv_first + tl.arange(0, COLUMNS)[None, :]
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    low, high = CORNERS(b, h, q_first, q_first + ROWS - 1, kv_first, kv_first + COLUMNS - 1, captured, sizes)
    tl.store(found_ptr, low)
    tl.store(found_ptr + 1, high)
    tl.store(out_ptr + at, FLAT(tl.load(s_ptr + at), b, h, q, kv, low, captured, sizes))


@pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")
@pytest.mark.parametrize("score", [clamped, forwards, coarse, around])
def test_corners_bound_the_index_and_the_uniform_score_is_right_where_they_agree(score: Any) -> None:
    traced = trace(score, "score")
    corners, flat = flat_functions(traced.program, codegen.Options(fast=False, interpreted=True))
    assert flat is not None
    captured = traced.captured()
    equal = 0
    for q_first, kv_first in ((0, 0), (100, 7), (5, 300), (60, 40), (39, 0), (700, 16), (21, 30)):
        s, out, bounds = torch.randn(ROWS, COLUMNS), torch.zeros(ROWS, COLUMNS), torch.zeros(2, dtype=torch.int32)
        with quiet():
            probe[1,](
                s, out, bounds, 1, 2, q_first, kv_first, launch.pack_captured(captured, s), launch.pack_sizes(captured),
                FLAT=flat, CORNERS=corners, ROWS=ROWS, COLUMNS=COLUMNS,
            )  # fmt: skip
        q, kv = q_first + torch.arange(ROWS)[:, None], kv_first + torch.arange(COLUMNS)[None, :]
        want = score(s, torch.tensor(1), torch.tensor(2), q, kv)
        # Tables rise strictly, so the bias identifies the elements that were read.
        bias = score(torch.zeros_like(s), torch.tensor(1), torch.tensor(2), q, kv)
        same = int(bounds[0]) == int(bounds[1])
        assert int(bounds[0]) <= int(bounds[1]) and same == (bool((bias == bias.flatten()[0]).all()))
        if same:
            equal += 1
            torch.testing.assert_close(out, want)
    assert 0 < equal < 7
