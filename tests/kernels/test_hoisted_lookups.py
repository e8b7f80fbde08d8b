"""Lookups by batch row and head, loaded before the loop over tiles: which ones, and the score and its gradient computed from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from torch import Tensor

from longspan._kernels.gpu import codegen, launch
from longspan._kernels.gpu.hoisted_lookups import early_function, early_options, hoisted_options, uniform_function
from longspan._kernels.gpu.interpreter import interpreted, quiet
from longspan._masks.joint import joint_of
from longspan._masks.tracing import trace

SLOPES = torch.linspace(0.1, 0.9, 5)
BY_ROW = torch.linspace(-1, 1, 15).view(3, 5)
LINE = torch.linspace(-2, 2, 57)
SCALE = torch.tensor(1.25)
ORDER = torch.tensor([3, 1, 4, 0, 2])
SMALL = torch.tensor([3, -1, 7, 0, -5, 2, 4], dtype=torch.int8)
FLAGS = torch.tensor([True, False, True, True, False])
ROWS, COLUMNS = 8, 16


def alibi(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s + (kv - q) * SLOPES[h]


def twice(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return torch.tanh(s * SLOPES[h]) * SLOPES[h]


def mixed(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s * SCALE * BY_ROW[b, h] + LINE[torch.clamp(q - kv, 0, 56)]


def chosen(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    place = ORDER[h // 2]
    return s + torch.where(FLAGS[h], place * SLOPES[place], 0.0)


def two_places(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s * SLOPES[h] + SLOPES[h // 2]


def within(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s + LINE[(h + q) % 57]


def tables(score: Any) -> tuple[int, ...]:
    program = trace(score, "score").program
    return hoisted_options(program, joint_of(program), codegen.Options()).hoisted


def test_lookups_by_batch_row_and_head_are_hoisted() -> None:
    assert tables(alibi) == (0,)
    assert tables(twice) == (0,)
    captured = trace(mixed, "score").captured()
    assert [captured[i].ndim for i in tables(mixed)] == [0, 2]


def test_a_score_that_is_a_captured_number_is_one_lookup() -> None:
    assert tables(lambda s, b, h, q, kv: SCALE.float()) == (0,)
    assert tables(lambda s, b, h, q, kv: SCALE) == (0,)


def test_lookups_at_two_places_or_within_the_tile_are_not_hoisted() -> None:
    assert tables(two_places) == tables(within) == ()
    # An index that is itself read from memory stays in the loop.
    captured = trace(chosen, "score").captured()
    assert [captured[i].dtype for i in tables(chosen)] == [torch.bool]
    assert uniform_function(trace(within, "score").program, codegen.Options()) is None
    assert uniform_function(None, codegen.Options(hoisted=(0,))) is None


@triton.jit
def probe(
    s_ptr, out_ptr, grad_ptr, b, h, q_first, kv_first, captured, sizes,
    UNIFORM: tl.constexpr, SCORE: tl.constexpr, JOINT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    q, kv = q_first + tl.arange(0, ROWS)[:, None], kv_first + tl.arange(0, COLUMNS)[None, :]
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    s = tl.load(s_ptr + at)
    elements = UNIFORM(b, h, captured, sizes)
    tl.store(out_ptr + at, SCORE(s, b, h, q, kv, elements, sizes))
    tl.store(grad_ptr + at, JOINT(s * 0.0 + 1.0, s, b, h, q, kv, s == s, elements, sizes, ()))


@pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")
@pytest.mark.parametrize("score", [alibi, twice, mixed, chosen])
def test_score_and_gradient_from_hoisted_elements_equal_torch(score: Any) -> None:
    traced = trace(score, "score")
    program, joint = traced.program, joint_of(traced.program)
    options = hoisted_options(program, joint, codegen.Options(interpreted=True))
    captured = traced.captured()
    b, h, q_first, kv_first = 2, 3, 40, 7
    s = torch.randn(ROWS, COLUMNS, requires_grad=True)
    out, grad = torch.empty(2, ROWS, COLUMNS)
    with quiet():
        probe[(1,)](
            s.detach(), out, grad, b, h, q_first, kv_first, tuple(captured), launch.pack_sizes(captured),
            uniform_function(program, options), codegen.program_function(program, options),
            codegen.joint_function(program, joint, [False] * len(captured), options), ROWS, COLUMNS,
        )  # fmt: skip
    q, kv = q_first + torch.arange(ROWS)[:, None], kv_first + torch.arange(COLUMNS)[None, :]
    expected = score(s, torch.tensor(b), torch.tensor(h), q, kv)
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), s)[0])


def four_places(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s + SMALL[kv % 7] * LINE[q % 57] - LINE[kv % 57] * SMALL[h] + torch.where(SMALL[kv % 7] > SMALL[q % 3], LINE[(q + kv) % 57], 0.0)


def by_score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s + SLOPES[torch.clamp(s, 0, 4).to(torch.int64)] * LINE[kv % 57]


def test_lookups_that_do_not_depend_on_the_score_are_early() -> None:
    def ndims(score: Any) -> list[int]:
        traced = trace(score, "score")
        captured = traced.captured()
        return [captured[i].ndim for i in early_options(traced.program, codegen.Options()).hoisted]

    assert ndims(alibi) == [1]
    assert ndims(mixed) == [0, 2, 1]
    assert ndims(chosen) == [1, 1, 1]  # also at an index that is itself read
    assert ndims(two_places) == [1]
    traced = trace(by_score, "score")
    (early,) = early_options(traced.program, codegen.Options()).hoisted
    assert traced.captured()[early] is LINE
    assert early_function(None, codegen.Options(hoisted=(0,))) is None
    assert early_function(trace(within, "score").program, codegen.Options()) is None


@triton.jit
def early_probe(
    s_ptr, out_ptr, b, q_first, kv_first, captured, sizes,
    EARLY: tl.constexpr, SCORE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    q, kv = q_first + tl.arange(0, ROWS)[:, None], kv_first + tl.arange(0, COLUMNS)[None, :]
    h = tl.arange(0, ROWS)[:, None] % 5
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    elements = EARLY(b, h, q, kv, captured, sizes)
    tl.store(out_ptr + at, SCORE(tl.load(s_ptr + at), b, h, q, kv, elements, sizes))


@pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")
@pytest.mark.parametrize("score", [alibi, twice, mixed, chosen, within, by_score, two_places, four_places])
def test_score_from_early_lookups_equals_torch(score: Any) -> None:
    """Rows of a tile have different heads, as in decoding."""
    traced = trace(score, "score")
    options = early_options(traced.program, codegen.Options(interpreted=True))
    captured = traced.captured()
    packed = launch.pack_captured(captured, SLOPES)
    b, q_first, kv_first = 2, 40, 7
    s, out = torch.randn(ROWS, COLUMNS), torch.empty(ROWS, COLUMNS)
    with quiet():
        early_probe[(1,)](
            s, out, b, q_first, kv_first, packed, launch.pack_sizes(captured),
            early_function(traced.program, options), codegen.program_function(traced.program, options), ROWS, COLUMNS,
        )  # fmt: skip
    rows = torch.arange(ROWS)[:, None]
    expected = score(s, torch.tensor(b), rows % 5, q_first + rows, kv_first + torch.arange(COLUMNS)[None, :])
    torch.testing.assert_close(out, expected)
