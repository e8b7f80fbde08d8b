"""Tiles of rectangles in plain torch operations: how they cover a rectangle, and copies with zeros in some vectors."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from tests.kernels.shards import work_of
from torch import Tensor

from longspan._kernels import plain_tiles
from longspan._kernels.isolation import _zeroed
from longspan._kernels.plain_tiles import PlainTiles
from longspan._kernels.protocol import AttentionInputs
from longspan._kernels.rectangles import Rectangle


def by_head(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q + b + h >= kv


def tiles_of(batch: int, heads: int) -> PlainTiles:
    """3 batch rows, 6 heads over 2 KV heads, 50 queries and 70 keys; a table of so many batch rows and heads."""
    work = work_of(by_head, [(20, 50)], [(0, 70)], block=16, batch=3, heads=6)
    table = replace(work.table, batch=batch, heads=heads)
    q, k = torch.zeros(3, 6, 50, 8), torch.zeros(3, 2, 70, 8)
    return PlainTiles(AttentionInputs(q=q, k=k, v=k), replace(work, table=table))


@pytest.mark.parametrize("kind", ["full", "masked", "causal"])
@pytest.mark.parametrize(("elements", "width"), [(18 * 12 * 7, 12), (18 * 12 * 7 - 1, 12), (1, 9), (18 * 1000, 1000)])
def test_parts_of_a_rectangle_have_a_bounded_size(
    kind: Literal["full", "masked", "causal"], elements: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 3 · 6 batch rows and heads. A part is at least one query high. Parts above the diagonal of a causal square are left out."""
    monkeypatch.setattr(plain_tiles, "TILE_ELEMENTS", elements)
    monkeypatch.setattr(plain_tiles, "TILE_KEYS", width)
    rect = Rectangle(b=0, h=0, q0=5, q1=45, k0=20, k1=60, kind=kind)
    painted = torch.zeros(50, 70, dtype=torch.int32)
    parts = list(tiles_of(1, 1).parts(rect))
    for part in parts:
        painted[part.q0 : part.q1, part.k0 : part.k1] += 1
        rows, columns = part.q1 - part.q0, part.k1 - part.k0
        assert 0 < columns <= width and part.kind == kind and (18 * rows * columns <= elements or rows == 1)
    needed = torch.zeros_like(painted)
    inside = torch.ones(40, 40, dtype=torch.int32)
    needed[5:45, 20:60] = inside.tril() if kind == "causal" else inside
    assert bool((painted[needed > 0] == 1).all()) and int(painted.max()) == 1
    if kind == "causal":
        assert all(part.k0 - 20 <= part.q1 - 1 - 5 for part in parts)
    else:
        assert torch.equal(painted, needed)
    if width == 12:
        assert max(part.q1 - part.q0 for part in parts) == (7 if elements == 18 * 12 * 7 else 6)


def test_tiles_have_at_most_1024_keys_and_two_million_scores() -> None:
    rect = Rectangle(b=0, h=0, q0=0, q1=300, k0=0, k1=2100, kind="full")
    sizes = [(part.q1 - part.q0, part.k1 - part.k0) for part in tiles_of(1, 1).parts(rect)]
    assert sizes == [(m, n) for m in (113, 113, 74) for n in (1024, 1024, 52)] and 18 * 113 * 1024 <= 1 << 21


@pytest.mark.parametrize(
    ("batch", "heads", "rows", "q_heads", "kv_heads"),
    [(1, 1, (0, 3), (0, 6), (0, 2)), (3, 1, (2, 3), (0, 6), (0, 2)), (1, 6, (0, 3), (4, 5), (1, 2)), (3, 6, (2, 3), (4, 5), (1, 2))],
)
def test_a_rectangle_is_for_one_batch_row_and_head_of_its_table(
    batch: int, heads: int, rows: tuple[int, int], q_heads: tuple[int, int], kv_heads: tuple[int, int]
) -> None:
    """A table of one batch row or head is for all."""
    tiles, rect = tiles_of(batch, heads), Rectangle(b=2, h=4, q0=5, q1=45, k0=20, k1=61, kind="masked")
    rect = replace(rect, b=rect.b if batch > 1 else 0, h=rect.h if heads > 1 else 0)
    assert tiles.q_slices(rect) == (slice(*rows), slice(*q_heads), slice(5, 45))
    assert tiles.kv_slices(rect) == (slice(*rows), slice(*kv_heads), slice(20, 61))
    whole = replace(rect, q0=0, q1=50, k0=0, k1=70)
    assert tiles.is_everything(whole) == (batch == heads == 1)
    for part in ({"q0": 1}, {"q1": 49}, {"k0": 1}, {"k1": 69}):
        assert not tiles.is_everything(replace(whole, **part))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "shifted", "expanded", "one expanded row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeroed_copies_have_the_strides_and_alignment_of_the_tensor(layout: str, dtype: torch.dtype) -> None:
    """Products of matrices round differently with others. Expanded tensors become copies that can be written."""
    x = torch.randn(2 * 3 * 7 * 5 + 3, dtype=dtype)
    given = {
        "contiguous": x[: 2 * 3 * 7 * 5].view(2, 3, 7, 5),
        "transposed": x[: 2 * 3 * 7 * 5].view(2, 7, 3, 5).transpose(1, 2),
        "shifted": x[3:].view(2, 3, 7, 5),
        "expanded": x[: 3 * 7 * 5].view(1, 3, 7, 5).expand(2, 3, 7, 5),
        "one expanded row": x[: 3 * 7 * 5].view(3, 7, 5).as_strided((1, 3, 7, 5), (0, 35, 5, 1)),
    }[layout]
    before, bad = x.clone(), torch.rand(given.shape[:3]) > 0.5
    made = _zeroed(given, bad)
    assert torch.equal(made, torch.where(bad[..., None], 0.0, given)) and torch.equal(x, before)
    if layout != "expanded":
        assert made.stride() == given.stride() and (made.data_ptr() - given.data_ptr()) % 64 == 0
        end = made.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(made.shape, made.stride(), strict=True))
        assert made.storage_offset() >= 0 and end * made.element_size() <= made.untyped_storage().nbytes()
