"""Masks as bounds on kv by row: which masks have this form, and the tiles computed from the bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from torch import Tensor

import longspan as ls
from longspan._kernels.gpu import codegen, launch
from longspan._kernels.gpu.interpreter import interpreted, quiet
from longspan._kernels.gpu.row_bounds import bounds_functions
from longspan._masks.tracing import trace

GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.arange(700) // 90
ANY_INT64 = torch.randint(-(2**63), 2**63 - 1, (700,), generator=GENERATOR)
ANY_INT32 = torch.randint(-(2**31), 2**31 - 1, (700,), generator=GENERATOR).int()
ANY_INT64[::3], ANY_INT32[::2] = (
    torch.randint(0, 700, (234,), generator=GENERATOR),
    torch.randint(0, 700, (350,), generator=GENERATOR).int(),
)
ANY_INT64[1], ANY_INT64[4], ANY_INT32[1], ANY_INT32[3] = 2**63 - 1, -(2**63), 2**31 - 1, -(2**31)
ROWS = 64


def any_bound(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (kv <= ANY_INT64[q]) | (kv > ANY_INT64[q]) & (q > 7)


def sums_beyond_32_bits(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (kv - ANY_INT32[q] < 3) & ~(q < kv) & (kv - q + 2**33 > 0)


def by_head(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q // 64 * 64 <= kv) & (kv < q + h)


def by_row_alone(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (IDS[q] > 3) & (kv <= q)


def past_the_first_row(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q != 0) & (kv <= q + 3)


def first_document(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (IDS[q] == 0) | (kv < 70)


NEAR_LIMITS = {t: torch.tensor([torch.iinfo(t).max - n % 3 if n % 2 else torch.iinfo(t).min + n % 3 for n in range(700)], dtype=t)
               for t in (torch.uint8, torch.int8, torch.int32)}  # fmt: skip


def sums_that_wrap_in_uint8(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (kv >= NEAR_LIMITS[torch.uint8][q] - 2) | (kv < NEAR_LIMITS[torch.uint8][q] + 2)


def sums_that_wrap_in_int8(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (kv < NEAR_LIMITS[torch.int8][q] + 2) & (kv < q)


def sums_that_wrap_in_int32(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (kv < NEAR_LIMITS[torch.int32][q] + 2) & (kv < q + 9)


MASKS = {
    "causal": ls.causal(),
    "after": ~ls.causal(),
    "documents": ls.documents(ids=IDS),
    "documents by batch row": ls.causal() & ls.documents(ids=torch.stack([IDS, torch.arange(700) // 37])),
    "window": ls.sliding_window(100, 5),
    "first tokens and a window": (ls.prefix(64) | ls.sliding_window(99)) & ls.causal(),
    "prefixes": ls.prefix(torch.tensor([5, 300])) | ls.causal(),
    **{m.__name__: ls.mask_mod(m) for m in (any_bound, sums_beyond_32_bits, by_head, by_row_alone, past_the_first_row, first_document)},
    **{m.__name__: ls.mask_mod(m) for m in (sums_that_wrap_in_uint8, sums_that_wrap_in_int8, sums_that_wrap_in_int32)},
}


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, kv: kv // 4 < q,
        lambda b, h, q, kv: kv == q,
        lambda b, h, q, kv: kv.float() < 3.5 * q,
        lambda b, h, q, kv: (kv < q) ^ (kv < 7),
        lambda b, h, q, kv: 2 * kv < q,
        lambda b, h, q, kv: kv + kv < q,
        lambda b, h, q, kv: kv - q < q,
        lambda b, h, q, kv: kv - kv < q,
        lambda b, h, q, kv: kv < 3.5,
        lambda b, h, q, kv: (kv < 5) | (q >= 0),
        lambda b, h, q, kv: kv < ANY_INT64[q] + 1,
        lambda b, h, q, kv: kv - ANY_INT64[q] < 0,
        lambda b, h, q, kv: IDS[kv] < IDS[q],
        lambda b, h, q, kv: (kv < q) & True,
    ],
)
def test_masks_of_another_form_have_no_bounds(mask: Any) -> None:
    assert bounds_functions(trace(mask, "mask").program, codegen.Options()) == (None, None)
    assert bounds_functions(None, codegen.Options()) == (None, None)


@pytest.mark.parametrize(("comparisons", "bounded"), [(5, True), (6, True), (7, False)])
def test_masks_of_many_comparisons_have_no_bounds(comparisons: int, bounded: bool) -> None:
    """The last is a condition of the row. One that always holds, and one that was made before, need no bound."""

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        seen = (q >= 0) & (kv <= q) & (kv <= q)
        for i in range(comparisons - 2):
            seen = seen & (kv >= q - 90 * (i + 1)) if i % 2 else seen | (kv < 7 * i + 3)
        return seen & (IDS[q] > 1)

    functions = bounds_functions(trace(mask, "mask").program, codegen.Options())
    assert (functions != (None, None)) == bounded


@triton.jit
def probe(
    out_ptr, b, h, q_first, kv_first, captured, sizes,
    BOUNDS: tl.constexpr, VISIBLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    words = VISIBLE(BOUNDS(b, h, q_first + rows, captured, sizes), kv_first, columns)
    visible = (words >> ((columns >> 3) * 2 + (columns & 1))) & 1  # as `hopper.masked_scores` reads the words
    tl.store(out_ptr + rows * COLUMNS + columns, (visible != 0) & (rows >= 0))


@pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")
@pytest.mark.parametrize("name", MASKS)
def test_tiles_from_bounds_equal_the_mask(name: str) -> None:
    mask = MASKS[name]
    traced = trace(mask, "mask")
    bounds, visible = bounds_functions(traced.program, codegen.Options(interpreted=True))
    assert bounds is not None
    captured, seen = traced.captured(), set()
    for columns in (64, 128):
        for q_first, kv_first in ((0, 0), (0, 1), (64, 130), (301, 301), (573, 512), (611, 64), (300, 289)):
            out = torch.zeros(ROWS, columns, dtype=torch.bool)
            with quiet():
                probe[1,](
                    out, 1, 3, q_first, kv_first, launch.pack_captured(captured, out), launch.pack_sizes(captured),
                    BOUNDS=bounds, VISIBLE=visible, ROWS=ROWS, COLUMNS=columns,
                )  # fmt: skip
            q, kv = q_first + torch.arange(ROWS)[:, None], kv_first + torch.arange(columns)[None, :]
            assert torch.equal(out, mask(torch.tensor(1), torch.tensor(3), q, kv).expand(ROWS, columns))
            seen |= {bool(v) for v in out.unique()}
    assert seen == {False, True}
