"""Classification: which squares and points it looks at, tiles between edges, chunks, progress."""

from __future__ import annotations

import io
import itertools
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch

from longspan._masks import classify as classify_module
from longspan._masks.block_table import EMPTY, FULL, PARTIAL
from longspan._masks.classify import TableShape, _even_edges, _Head, _Inputs, _Report, _sides, classify
from longspan._masks.tile_runs import Segments
from longspan._masks.tracing import trace

NOISE = torch.randint(0, 60, (300,), generator=torch.Generator().manual_seed(0))
MASKS = {
    "causal": lambda b, h, q, kv: q >= kv,
    "window": lambda b, h, q, kv: (q - kv).abs() < 40,
    "noise": lambda b, h, q, kv: NOISE[q] == NOISE[kv],
    "nothing": lambda b, h, q, kv: q < 0,
    "blocks": lambda b, h, q, kv: torch.sin((q // 16 * 3 + kv // 8).float()) > 0,
    "rows": lambda b, h, q, kv: (q + b * 7 + h * 50) % 90 < 60,
    "all but the first query": lambda b, h, q, kv: q > 0,
    "all but the first key": lambda b, h, q, kv: kv > 0,
    "the last query and key": lambda b, h, q, kv: (q >= 299) | (kv >= 199),
    "all but one": lambda b, h, q, kv: (q != 131) | (kv != 77) | ((q * kv) % 3 == 9),
}


def _kinds(mask, q_edges, kv_edges, block, batch, heads):
    """The kinds of tiles [batch, heads, q_tiles, kv_tiles] as nested lists, tile by tile."""
    table = []
    for b in batch:
        for h in heads:
            for top, bottom in itertools.pairwise(q_edges):
                for left, right in itertools.pairwise(kv_edges):
                    q, kv = torch.arange(top, bottom)[:, None], torch.arange(left, right)[None]
                    visible = mask(torch.tensor(b), torch.tensor(h), q, kv).expand(len(q), kv.shape[1])
                    whole = (bottom - top, right - left) == block
                    table.append(EMPTY if not visible.any() else FULL if whole and visible.all() else PARTIAL)
    return table


@pytest.mark.parametrize("levels", [None, (1,), (8, 2, 1), (32, 8, 4, 1), (64, 1)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_tables_in_small_chunks_equal_tiles_evaluated_one_by_one(name, levels, monkeypatch):
    monkeypatch.setattr(classify_module, "MAX_SQUARES", 24)
    monkeypatch.setattr(classify_module, "MAX_ELEMENTS", 500)
    traced = trace(MASKS[name], "mask")
    for q_len, kv_len, block in ((300, 200, (16, 8)), (96, 170, (32, 17)), (40, 290, (50, 10))):
        table = classify(
            traced.program,
            traced.captured(),
            TableShape(q_len=q_len, kv_len=kv_len, block=block, batch=2, heads=3, first_batch=4),
            levels=levels,
        )
        edges = [[*range(0, n, size), n] for n, size in ((q_len, block[0]), (kv_len, block[1]))]
        batch, heads = ((4, 5), (0, 1, 2)) if name == "rows" else ((4,), (0,))
        assert (table.batch, table.heads, table.tiles) == (len(batch), len(heads), None)
        assert table.to_dense().flatten().tolist() == _kinds(MASKS[name], *edges, block, batch, heads)


@pytest.mark.parametrize("name", MASKS)
def test_tiles_between_given_edges_are_full_only_at_the_size_of_a_block(name):
    q_edges, kv_edges = [0, 16, 20, 36, 52, 60, 76, 77], [0, 8, 9, 17, 25, 33, 40, 48, 56, 64, 72, 80]
    traced = trace(MASKS[name], "mask")
    edges = (torch.tensor(q_edges), torch.tensor(kv_edges))
    for levels in (None, (4, 1), (2, 1)):
        table = classify(traced.program, traced.captured(), TableShape(q_len=77, kv_len=80, block=(16, 8), edges=edges), levels=levels)
        assert table.tiles == (7, 11)
        assert table.to_dense().flatten().tolist() == _kinds(MASKS[name], q_edges, kv_edges, (16, 8), (0,), (0,))


def _work(name: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[float]]:
    """(level, squares) of each chunk, (tiles, queries, keys) of each evaluation, and the reported progress."""
    squares: list[tuple[int, ...]] = []
    points: list[tuple[int, ...]] = []
    progress: list[float] = []
    square_kinds, evaluate = _Head._square_kinds, _Head._evaluate
    monkeypatch.setattr(classify_module, "REPORT_INTERVAL", -1.0)
    monkeypatch.setattr(
        _Head,
        "_square_kinds",
        lambda self, level, rows, columns: (
            squares.append((level, rows.shape[0], rows.shape[1], columns.shape[2])),
            square_kinds(self, level, rows, columns),
        )[1],
    )
    monkeypatch.setattr(_Head, "_evaluate", lambda self, q, kv: (points.append((*q.shape, kv.shape[1])), evaluate(self, q, kv))[1])
    traced = trace(MASKS[name], "mask")
    shape = TableShape(q_len=300, kv_len=200, block=(16, 8))
    classify(traced.program, traced.captured(), shape, progress=progress.append, **options)
    return squares, points, [round(share, 3) for share in progress]


# (mask, levels, squares at once, elements at once): (level, chunks, rows, columns) of squares, (tiles, queries, keys) of points, progress
WORK = [
    ("causal", None, 1 << 16, 1 << 18, [(0, 1, 19, 25)], [(25, 2, 2)], [0.053, 1.0]),
    (
        "noise", (4, 1), 1 << 16, 1 << 18,
        [(0, 1, 5, 7), (1, 35, 4, 4)],
        [(475, 2, 2), (415, 8, 8), (177, 16, 8)],
        [0.107, 0.532, 0.848, 1.0],
    ),
    ("all but one", (16, 1), 1 << 16, 1000, [(0, 1, 2, 2), (1, 4, 16, 16)], [(1, 2, 2), (1, 8, 8), (1, 16, 8)], [0.0, 0.0, 0.001, 1.0]),
    ("window", (8, 2, 1), 1 << 16, 1 << 18, [(0, 1, 3, 4), (1, 6, 4, 4), (2, 36, 2, 2)], [(45, 2, 2)], [0.871, 1.0]),
    (
        "window", (8, 2, 1), 20, 21,
        [
            (0, 1, 3, 4), (1, 1, 4, 4), (2, 5, 2, 2), (2, 3, 2, 2), (1, 1, 4, 4), (2, 5, 2, 2), (2, 3, 2, 2), (1, 1, 4, 4),
            (2, 4, 2, 2), (1, 1, 4, 4), (2, 4, 2, 2), (1, 1, 4, 4), (2, 5, 2, 2), (2, 3, 2, 2), (1, 1, 4, 4), (2, 4, 2, 2),
        ],
        [(n, 2, 2) for n in (5, 2, 4, 5, 1, 5, 5, 5, 5, 2, 4, 2)],
        [
            0.548, 0.551, 0.568, 0.573, 0.583, 0.632, 0.633, 0.651, 0.658, 0.667, 0.736, 0.75, 0.819, 0.833, 0.882, 0.884, 0.901, 0.906,
            0.917, 0.982, 1.0,
        ],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "levels", "squares_at_once", "elements_at_once", "squares", "points", "progress"), WORK)
def test_squares_and_points_are_looked_at_from_coarse_to_fine(
    name, levels, squares_at_once, elements_at_once, squares, points, progress, monkeypatch
):
    monkeypatch.setattr(classify_module, "MAX_SQUARES", squares_at_once)
    monkeypatch.setattr(classify_module, "MAX_ELEMENTS", elements_at_once)
    assert _work(name, monkeypatch, levels=levels) == (squares, points, progress)


def test_the_coarsest_level_has_at_most_32_squares_per_side():
    sides = {1: [1], 32: [1], 33: [4, 1], 128: [4, 1], 129: [16, 4, 1], 512: [16, 4, 1], 513: [64, 16, 4, 1]}
    assert {tiles: _sides(None, tiles) for tiles in sides} == sides
    assert _sides((12, 4, 2, 1), 5) == [12, 4, 2, 1]
    for levels in ((), (2,), (4, 4, 1), (1, 1), (2, 4, 1), (6, 4, 1)):
        with pytest.raises(ValueError, match=r"levels: expected descending sides.*for example levels=\(16, 4, 1\)"):
            _sides(levels, 5)


@pytest.mark.parametrize("sizes", [{"q_len": -1}, {"kv_len": -1}, {"batch": -1}, {"heads": -1}])
def test_sizes_of_tables_are_not_negative(sizes):
    with pytest.raises(ValueError, match=r"expected non-negative q_len, kv_len, batch and heads, got .*=-1"):
        TableShape(**{"q_len": 3, "kv_len": 4, **sizes})


@pytest.mark.parametrize("block", [(0, 1), (1, 0), (8,), (8, 8, 8)], ids=str)
def test_blocks_are_two_sizes_of_at_least_1(block):
    with pytest.raises(ValueError, match="block: expected two sizes"):
        TableShape(q_len=3, kv_len=4, block=block)


def test_sizes_of_zero_and_one_are_accepted_and_defaults_are_blocks_of_128():
    shape = TableShape(q_len=0, kv_len=0, batch=0, heads=0, block=(1, 1))
    assert len(classify(None, (), shape).first) == 0
    shape = TableShape(q_len=3, kv_len=4)
    assert (shape.block, shape.batch, shape.heads, shape.first_batch, shape.edges) == ((128, 128), 1, 1, 0, None)
    traced = trace(MASKS["rows"], "mask")
    for sizes in ({"batch": 0, "heads": 2}, {"batch": 2, "heads": 0}):
        assert classify(traced.program, (), TableShape(q_len=300, kv_len=300, **sizes)).rows == 0


def test_edges_of_even_tiles():
    edges = [_even_edges(length, 4).tolist() for length in (0, 1, 4, 5, 8)]
    assert edges == [[0], [0, 1], [0, 4], [0, 4, 5], [0, 4, 8]]


def test_sampled_positions_include_both_ends_of_a_tile_and_none_past_it():
    edges = (torch.tensor([0, 16, 32, 37]), torch.tensor([0, 5]))
    head = _Head(
        _Inputs(
            program=None,
            captured=(),
            edges=edges,
            block=(16, 8),
            sides=[1],
            segments=Segments(rows=3, columns=1),
            report=_Report(None, 1),
        ),
        batch_row=0,
        head=0,
        first_row=0,
    )
    assert head._positions(0, torch.tensor([0, 2]), 2).tolist() == [[0, 15], [32, 36]]
    assert head._positions(0, torch.tensor([1]), 5).tolist() == [[16, 19, 23, 27, 31]]
    assert head._positions(0, torch.tensor([1]), 1).tolist() == [[16]]
    assert head._positions(1, torch.tensor([0]), 8).tolist() == [[0, 1, 2, 3, 4, 4, 4, 4]]


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def _reported(times_and_shares: list[tuple[float, float]], *, parts: int = 1, is_terminal: bool = False, **options: Any) -> str:
    """What a report writes to stderr at these seconds after its start."""
    clock, out = _Clock(), io.StringIO()
    out.isatty = lambda: is_terminal  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(out):
        patch.setattr(classify_module, "time", clock)
        report = _Report(options.get("progress"), parts)
        for seconds, share in times_and_shares:
            clock.now = 100.0 + seconds
            report(share)
            if share == 1.0:
                report.next_part()
        report.close()
    return out.getvalue()


WHY = "(interval bounds do not decide this mask; evaluating its tiles one by one)"


def test_lines_of_progress_follow_after_2_then_20_seconds_then_twice_the_time():
    def lines(*seconds):
        return [line.split()[2] for line in _reported([(s, s / 1000) for s in seconds]).splitlines()]

    assert _reported([(1.9, 0.25), (2.0, 0.3)]) == ""
    assert _reported([(3.0, 0.25), (5.0, 0.5)]) == f"block table:  25%, about 9 s left {WHY}\n"
    assert _reported([(3.0, 0.0)]) == f"block table:   0%, starting {WHY}\n"
    assert lines(3, 19, 20, 21, 41, 42, 43, 85, 86.5) == ["0%,", "2%,", "4%,", "9%,"]
    assert lines(15, 29, 31) == ["2%,", "3%,"]


def test_a_terminal_shows_a_bar_that_ends_with_the_table():
    expected = f"\rblock table [{'#' * 5}{'.' * 15}]  25%, about 9 s left {WHY}\033[K"
    assert _reported([(3.0, 0.5)], parts=2, is_terminal=True) == expected + "\n"
    assert _reported([(1.0, 0.5)], is_terminal=True) == ""
    assert _reported([(3.0, 0.25), (3.1, 0.3)], is_terminal=True).count("\r") == 1
    assert _reported([(3.0, 0.25), (3.3, 0.3)], is_terminal=True).count("\r") == 2


def test_progress_counts_batch_rows_and_heads_and_writes_nothing():
    shares: list[float] = []
    text = _reported([(0.1, 0.25), (0.3, 0.25), (0.4, 0.5), (9.0, 0.5), (10.0, 1.0), (11.0, 0.5)], parts=4, progress=shares.append)
    assert text == "" and shares == [0.0625, 0.125, 0.25, 0.375]


@pytest.mark.parametrize(("q_len", "kv_len"), [(3, 130), (130, 3)])
def test_levels_follow_the_longer_side(q_len, kv_len, monkeypatch):
    made: list[int] = []
    monkeypatch.setattr(classify_module, "_sides", lambda levels, tiles: made.append(tiles) or _sides(levels, tiles))
    table = classify(None, (), TableShape(q_len=q_len, kv_len=kv_len, block=(1, 1)))
    assert made == [130] and table.counts() == (0, 0, 390)
