"""Rectangles cover what a table's tiles cover, in plain sequences and in shards of them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.kernels.shards import shard, work_of
from torch import Tensor

from longspan._kernels.protocol import Work
from longspan._kernels.rectangles import Rectangle, _all_full, _cover, _covers_of, _MaskTiles, rectangles
from longspan._kernels.tiling import Tiling, _positions
from longspan._masks.block_table import FULL, PARTIAL

Mod = Callable[..., Tensor]


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def everything(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= 0


def documents(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q // 23 == kv // 23) & (q >= kv)


def by_head(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q - kv < 9 * (h + 1)) & (q + 5 * b >= kv)


def by_batch_and_head_only(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return b + h != 4


def with_holes(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Causal, with hidden keys in tiles below the diagonal, next to it and further away."""
    return (q >= kv) & ~((kv == 20) & (q >= 32) & (q < 48)) & ~((kv == 3) & (q >= 64) & (q < 96)) & ~((kv == 70) & (q >= 80))


def painted(work: Work, mod: Mod) -> Tensor:
    """What the rectangles say is seen [batch, heads, Q, K]; a pair in two of them fails."""
    q_pos, kv_pos = work.q_tiles.positions(torch.device("cpu")), work.kv_tiles.positions(torch.device("cpu"))
    seen = torch.zeros(work.table.batch, work.table.heads, len(q_pos), len(kv_pos), dtype=torch.int32)
    for r in rectangles(work):
        q, kv = q_pos[r.q0 : r.q1, None], kv_pos[None, r.k0 : r.k1]
        b, h = torch.tensor(r.b + work.first_batch), torch.tensor(r.h + work.first_head)
        if r.kind == "causal":
            assert r.q1 - r.q0 == r.k1 - r.k0
            inside = torch.arange(r.q1 - r.q0)[:, None] >= torch.arange(r.k1 - r.k0)
        else:
            inside = torch.ones(len(q), kv.shape[1], dtype=torch.bool) if r.kind == "full" else mod(b, h, q, kv).expand(len(q), kv.shape[1])
        seen[r.b, r.h, r.q0 : r.q1, r.k0 : r.k1] += inside
    assert seen.max() <= 1
    return seen.bool()


SHARDS = {
    "whole": ([(0, 150)], [(0, 150)]),
    "head_tail": ([(0, 40), (120, 37)], [(0, 40), (120, 37)]),
    "other": ([(64, 50), (130, 20)], [(0, 64), (3, 61), (100, 48)]),
    "reversed": ([(96, 32), (0, 45)], [(64, 32), (96, 32), (0, 45)]),
}


@pytest.mark.parametrize("mod", [everything, causal, documents, by_head, by_batch_and_head_only, with_holes])
@pytest.mark.parametrize("name", SHARDS)
def test_rectangles_are_what_the_mask_allows(mod: Mod, name: str) -> None:
    q_segments, kv_segments = SHARDS[name]
    work = replace(work_of(mod, q_segments, kv_segments, block=16, batch=2, heads=3, first=(1, 2)), first_batch=1, first_head=2)
    q_pos, kv_pos = (t.positions(torch.device("cpu")) for t in (work.q_tiles, work.kv_tiles))
    b, h = torch.arange(work.table.batch).view(-1, 1, 1, 1) + 1, torch.arange(work.table.heads).view(1, -1, 1, 1) + 2
    want = mod(b, h, q_pos[:, None], kv_pos[None, :]).expand(work.table.batch, work.table.heads, len(q_pos), len(kv_pos))
    assert torch.equal(painted(work, mod), want)


def kinds(cells: list[Rectangle]) -> list[tuple[str, int, int, int, int]]:
    return sorted((r.kind, r.q0, r.q1, r.k0, r.k1) for r in cells)


def test_a_local_head_tail_shard_is_two_causal_squares_and_one_rectangle() -> None:
    segments = [(0, 48), (200, 60)]
    cells = rectangles(work_of(causal, segments, segments, block=16))
    assert kinds(cells) == [("causal", 0, 48, 0, 48), ("causal", 48, 108, 48, 108), ("full", 48, 108, 0, 48)]


def test_short_tiles_that_are_seen_whole_need_no_mask() -> None:
    cells = rectangles(work_of(causal, [(300, 45)], [(0, 37), (60, 21)], block=16))
    assert kinds(cells) == [("full", 0, 45, 0, 58)]


@pytest.mark.parametrize(("queries", "keys"), [(32, 41), (45, 48), (16, 5), (7, 16)])
def test_short_tiles_on_one_side_that_are_seen_whole_need_no_mask(queries: int, keys: int) -> None:
    assert kinds(rectangles(work_of(causal, [(300, queries)], [(60, keys)], block=16))) == [("full", 0, queries, 0, keys)]


@pytest.mark.parametrize(
    ("limit", "heights"), [(5, [16] * 5), (6, [32, 32, 16]), (8, [32, 32, 16]), (9, [48, 32]), (15, [80]), (1, [16] * 5)]
)
def test_masked_rectangles_have_a_largest_number_of_tiles_or_one_row(limit: int, heights: list[int]) -> None:
    """5 × 3 tiles."""
    work = work_of(lambda b, h, q, kv: (q + kv) % 3 > 0, [(0, 80)], [(100, 48)], block=16)
    cells = sorted(_cover(work, max_masked_tiles=limit), key=lambda r: r.q0)
    assert [r.q1 - r.q0 for r in cells] == heights and all((r.kind, r.k0, r.k1) == ("masked", 0, 48) for r in cells)
    full = _cover(replace(work, mask=None), max_masked_tiles=limit)
    assert kinds(full) == [("full", 0, 80, 0, 48)]


@pytest.mark.parametrize(("limit", "heights"), [(4, [32, 32, 16]), (6, [48, 32])])
def test_masked_rectangles_are_as_wide_as_their_run(limit: int, heights: list[int]) -> None:
    """5 × 3 tiles, of which those of the first column are empty."""
    work = work_of(lambda b, h, q, kv: ((q + kv) % 3 > 0) & (kv >= 116), [(0, 80)], [(100, 48)], block=16)
    cells = sorted(_cover(work, max_masked_tiles=limit), key=lambda r: r.q0)
    assert [r.q1 - r.q0 for r in cells] == heights and all((r.kind, r.k0, r.k1) == ("masked", 16, 48) for r in cells)


def test_masked_rectangles_span_64_tiles() -> None:
    """Of 20 × 5 tiles: 12 rows of 5 tiles, and 8."""
    work = work_of(lambda b, h, q, kv: (q + kv) % 3 > 0, [(0, 320)], [(1000, 80)], block=16)
    assert sorted((r.q0, r.q1) for r in rectangles(work)) == [(0, 192), (192, 320)]


def test_masks_are_evaluated_in_64_tiles_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    work = work_of(causal, [(0, 1600)], [(0, 32)], block=16)
    spans = [(16 * i, 16, 16 * i) for i in range(100)]
    tiles, counts = _MaskTiles(work, 0, 0, spans, spans[:2]), []
    program = tiles._program
    monkeypatch.setattr(tiles, "_program", lambda *args: counts.append(len(args[2])) or program(*args))
    assert tiles.all_true([(i, 1) for i in range(100)]) == [i > 1 for i in range(100)] and counts == [64, 36]


def test_captured_tensors_are_read_on_the_host() -> None:
    bound = torch.tensor(70)
    work = work_of(lambda b, h, q, kv: q + bound >= kv, [(0, 40)], [(0, 37)], block=16)
    (captured,) = work.mask_captured
    elsewhere: Any = SimpleNamespace(cpu=lambda: captured)
    assert kinds(rectangles(replace(work, mask_captured=[elsewhere]))) == [("full", 0, 40, 0, 37)]


def test_caches_of_covers_and_positions_are_bounded() -> None:
    work = work_of(causal, [(16, 40)], [(0, 64)], block=16)
    tilings = [shard([(16, 40)], 16) for _ in range(20)]
    for tiling in tilings:
        rectangles(replace(work, q_tiles=tiling))
    assert _covers_of.count(work.table) == 16
    devices = [torch.device("cpu"), *(torch.device("meta", i) for i in range(20))]
    for device in devices:
        tilings[0].positions(device)
    assert _positions.count(tilings[0]) == 16


def test_a_square_ends_where_rows_or_positions_do_not_go_on() -> None:
    cells = rectangles(work_of(causal, [(0, 32), (64, 32)], [(0, 32), (64, 32)], block=16))
    assert ("causal", 0, 32, 0, 32) in kinds(cells) and ("causal", 32, 64, 32, 64) in kinds(cells)


def test_a_cover_is_found_once_per_tilings_and_let_go_with_them() -> None:
    work = work_of(causal, [(16, 40)], [(0, 64)], block=16)
    assert rectangles(work) is rectangles(replace(work))
    other = replace(work, kv_tiles=shard([(0, 64)], 16))
    assert rectangles(other) is not rectangles(work) and kinds(rectangles(other)) == kinds(rectangles(work))
    alive = weakref.ref(work.kv_tiles)
    del work, other
    gc.collect()
    assert alive() is None


def tens(first: int, tiles: int) -> list[tuple[int, int]]:
    """Short tiles of 10 tokens."""
    return [(first + 10 * i, 10) for i in range(tiles)]


def test_covers_of_other_tiles_batch_rows_and_heads_are_their_own() -> None:
    """Of one table, whose tiles are all partial: each call has other tiles that are seen whole."""
    work = work_of(lambda b, h, q, kv: q + 15 * b + 10 * h >= kv + 15, tens(16, 3), tens(0, 4), block=16)
    every = torch.arange(3, dtype=torch.int32)
    work = replace(
        work,
        table=replace(
            work.table,
            ptr=torch.arange(4, dtype=torch.int32),
            first=0 * every,
            last=0 * every + 3,
            kind=(0 * every + PARTIAL).to(torch.int8),
        ),
    )
    others = (
        work, replace(work, q_tiles=shard(tens(26, 3), 16)), replace(work, kv_tiles=shard(tens(8, 4), 16)), replace(work, first_head=2),
        replace(work, first_batch=2), replace(work, mask=None),
    )  # fmt: skip
    covers = [kinds(rectangles(other)) for other in others]
    full = [sum((q1 - q0) * (k1 - k0) for kind, q0, q1, k0, k1 in cover if kind == "full") // 100 for cover in covers]
    assert full == [3, 6, 1, 9, 11, 12]
    assert [kinds(rectangles(other)) for other in others] == covers


def test_positions_follow_the_tiles_and_are_kept() -> None:
    tiling = shard([(40, 20), (3, 5), (90, 17)], 8)
    device = torch.device("cpu")
    want = torch.cat([torch.arange(40, 60), torch.arange(3, 8), torch.arange(90, 107)])
    assert torch.equal(tiling.positions(device), want) and tiling.positions(device) is tiling.positions(device)
    assert tiling.positions(device).dtype == torch.int64 and tiling.positions(torch.device("meta")).is_meta
    chosen = torch.tensor([True, False, False, True, False, True, False])
    whole = Tiling(length=53, block=8)
    for rows, selected in ((tiling.rows_of(chosen), tiling), (whole.rows_of(chosen), whole)):
        spans = [selected.span(i) for i in chosen.nonzero()[:, 0].tolist()]
        assert rows.dtype == torch.int64 and rows.tolist() == [row + i for row, count, _ in spans for i in range(count)]


def test_adjacent_runs_of_a_table_without_a_mask_become_one_full_run() -> None:
    assert _all_full([(0, 1, PARTIAL), (2, 3, FULL), (5, 6, PARTIAL), (7, 9, FULL)]) == [(0, 3, FULL), (5, 9, FULL)]
