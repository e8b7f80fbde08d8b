"""Host side of launches: block tables, tilings, cached launches, CUDA graph captures."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import itertools

from tests.kernels.shards import Segments, shard, work_of
from tests.torch_settings import matmul_precision
from torch import Tensor

import longspan as ls
from longspan._kernels.gpu import launch
from longspan._kernels.gpu import prepared_launch as prepared
from longspan._kernels.tiling import Tiling
from longspan._masks.block_table import FULL, Runs

SHARDS: list[Segments] = [[(0, 96)], [(5, 37), (42, 64)], [(64, 16), (0, 16), (16, 40), (200, 48)], [(9, 7), (30, 7), (48, 16), (64, 33)]]


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def tiles_of(runs: Runs, row: int) -> list[tuple[int, int]]:
    return list(
        zip(runs.first[runs.ptr[row] : runs.ptr[row + 1]].tolist(), runs.last[runs.ptr[row] : runs.ptr[row + 1]].tolist(), strict=True)
    )


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("segments", SHARDS)
def test_split_runs_are_contiguous_and_cover_every_tile_once(segments: Segments, positions: bool) -> None:
    work = work_of(causal, [(40, 90)], segments, block=16)
    kinds, tiling = work.table.to_dense()[0, 0], work.kv_tiles
    full, partial = launch.split_runs(work.table, launch.facts(tiling), positions=positions)
    for row in range(work.table.rows):
        held = {}
        for runs, kind in ((full, "full"), (partial, "partial")):
            pieces = tiles_of(runs, row)
            assert pieces == sorted(pieces)
            for first, last in pieces:
                held |= dict.fromkeys(range(first, last + 1), kind)
                spans = [tiling.span(tile) for tile in range(first, last + 1)]
                for (r, n, p), (next_r, _, next_p) in itertools.pairwise(spans):
                    assert (n, next_r) == (16, r + 16)
                    assert next_p == p + 16 or (kind == "full" and not positions)
                assert kind == "partial" or all(n == 16 for _, n, _ in spans)
        wanted = {c: "full" if kind == FULL else "partial" for c, kind in enumerate(kinds[row].tolist()) if kind}
        assert held == wanted


def test_the_short_last_tile_of_a_whole_sequence_is_partial() -> None:
    work = work_of(causal, [(100, 32)], [(0, 40)], block=16)
    full, partial = launch.split_runs(work.table, launch.facts(Tiling(length=40, block=16)), positions=False)
    assert tiles_of(full, 0) == [(0, 1)] and tiles_of(partial, 0) == [(2, 2)]


def test_facts_tell_whether_a_tiling_covers_its_rows() -> None:
    whole = shard([(3, 20), (50, 9)], 16)
    assert launch.facts(whole).covers
    assert whole.row is not None and whole.count is not None
    assert not launch.facts(Tiling(length=30, block=16, row=whole.row, pos=whole.pos, count=whole.count)).covers
    assert launch.facts(Tiling(length=29, block=16)).covers


def test_device_arrays_are_cached_and_freed_with_their_tiling() -> None:
    tiling, device = shard([(3, 20)], 16), torch.device("cpu")
    assert launch.side(tiling, device) is launch.side(tiling, device)
    alive = weakref.ref(tiling)
    del tiling
    gc.collect()
    assert alive() is None


def attended(mask: Any = None) -> Tensor:
    """One call of the triton kernel."""
    q, k, v = (torch.randn(1, 2, 50, 16, device="cuda" if torch.cuda.is_available() else "cpu") for _ in range(3))
    return ls.attention(q, k, v, mask=mask, kernel="triton")


def test_launches_in_a_captured_graph_are_held_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    held: set[prepared.PreparedLaunch] = set()
    monkeypatch.setattr(prepared, "_held_for_graphs", held)
    attended(causal)
    assert not held
    monkeypatch.setattr(launch, "capturing", lambda device: True)
    attended(causal)
    attended(causal)
    assert len(held) == 1


def test_a_launch_asked_for_again_is_found_by_its_layouts_alone() -> None:
    def tensors(offset: int = 0, columns: int = 8) -> list[Tensor]:
        return [torch.zeros(4 * columns + 4)[offset : offset + 4 * columns].view(4, columns) for _ in range(3)]

    def asked(a: Tensor | None, b: Tensor | None, c: Tensor | None, size: int = 3, ctas: int = 2) -> Any:
        return prepared.layout_launch("kernel", {"a_ptr": a, "b_ptr": b, "c_ptr": c}, {"size": size}, ctas)

    first, (a, b, c) = asked(*tensors()), tensors()
    others = [
        asked(a, b, None), asked(a, None, b), asked(None, a, b), asked(a, a, b), asked(a, b, b), asked(a, b, c, size=4),
        asked(a, b, c, ctas=3), asked(*tensors(columns=12)), asked(*tensors(offset=1)), asked(a.t().contiguous().t(), b, c),
        asked(a.double(), b, c),
    ]  # fmt: skip
    assert len({id(launch) for launch in (first, *others)}) == len(others) + 1
    for _ in range(2):
        assert asked(a, b, c) is first and asked(*tensors(offset=1)) is others[8] and asked(a, b, None) is others[0]


def test_capturing_a_mask_that_reads_tensors_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.arange(50) // 20
    monkeypatch.setattr(launch, "capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="cannot capture a CUDA graph: the mask reads tensors"):
        attended(lambda b, h, q, kv: ids[q] == ids[kv])


@pytest.mark.parametrize(("setting", "wanted"), [("tf32", "tf32"), ("ieee", "ieee")])
def test_precision_follows_the_newer_fp32_setting(setting: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    made = prepared.PreparedLaunch.__init__
    monkeypatch.setattr(
        prepared.PreparedLaunch, "__init__", lambda self, **known: (seen.append(known["constants"]["PRECISION"]), made(self, **known))[1]
    )
    with matmul_precision(setting):
        attended(lambda b, h, q, kv: q >= kv - 3)
    assert seen == [wanted]


@pytest.mark.parametrize("keys", [[(0, 24)], [(30, 20)], [(64, 16), (0, 16)], [(400, 16)]])
@pytest.mark.parametrize("segments", SHARDS)
def test_idle_spans_are_the_rows_outside_busy_tiles(segments: Segments, keys: Segments) -> None:
    work = work_of(causal, segments, keys, block=16)
    busy, tiling = work.table.tiles_per_row > 0, work.q_tiles
    in_busy_tiles = torch.zeros(tiling.length, dtype=torch.bool)
    for t in range(len(busy)):
        row = t * 16 if tiling.row is None else int(tiling.row[t])
        count = min(16, tiling.length - row) if tiling.count is None else int(tiling.count[t])
        in_busy_tiles[row : row + count] |= bool(busy[t])
    outside_spans = torch.ones(tiling.length, dtype=torch.bool)
    spans = launch.idle_spans(work.table, tiling)
    for start, stop in spans:
        assert outside_spans[start:stop].all() and start < stop
        outside_spans[start:stop] = False
    assert torch.equal(outside_spans, in_busy_tiles)


def test_idle_spans_join_heads_and_merge_when_there_are_many() -> None:
    def some(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q // 16 % 2 == 0) & (q < 320) & (h >= 0) | (q < 16 * h)

    table = ls.mask_mod(some).block_table(400, 48, block=16, heads=3)
    spans = launch.idle_spans(table, Tiling(length=400, block=16))
    assert spans == ((16, 400),)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_tma_needs_strides_of_16_bytes_in_dims_of_two_and_more(dim: int) -> None:
    """In bfloat16, 8 elements. A dim of size one may have any stride, as views of one token or head have."""
    whole = torch.zeros(6000, dtype=torch.bfloat16)
    sizes, strides = [3, 5, 7, 16], [5 * 7 * 24, 7 * 24, 24, 1]
    view = lambda size, stride, start=0: whole.as_strided(
        [*sizes[:dim], size, *sizes[dim + 1 :]], [*strides[:dim], stride, *strides[dim + 1 :]], start
    )
    stride = strides[dim]
    assert launch.describable(view(sizes[dim], stride)) and launch.describable(view(1, stride)) and launch.describable(view(1, stride + 3))
    assert launch.describable(view(2, stride + 8, 8)) and launch.describable(view(2, stride)[..., :1])
    for other in (view(2, stride + 3), view(2, stride + 4), view(2, 0), view(0, stride), view(2, stride, 4)):
        assert not launch.describable(other)
    assert not launch.describable(view(2, stride)[..., ::2]) and not launch.describable(view(2, stride)[..., :0])
