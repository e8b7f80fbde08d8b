"""Numbers as the page shows them, limits of its tables, symbols of ranks and lines of figures."""

from __future__ import annotations

import base64
import re
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.report.pages import page_of

import longspan as ls
from longspan._report import figure, page_data, page_tables
from longspan._report.grid import density_grid
from longspan._report.page import _fill, page, save
from longspan._report.terminal import bar, curve, picture, symbol


@pytest.fixture(scope="module")
def plan() -> ls.Plan:
    return ls.plan(ls.causal(), 2048, ls.Mesh.abstract(4), layout="contiguous", strategy="exchange", heads=8, kv_heads=2, head_dim=64)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1234567, "1,234,567"), (5, "5"), (99.9994, "99.999"), (100.0, "100.0"), (-100.0, "-100.0"), (-2.5, "-2.500"), (12345.67, "12,345.7")],
)
def test_integers_are_exact_and_other_numbers_short(value: float, shown: str) -> None:
    (row,) = page_tables.numbers({"n": ("a < b", value, "ms")}).splitlines()
    assert row == f'<tr><th scope="row">a &lt; b</th><td data-name="n" data-value="{value!r}">{shown} ms</td></tr>'
    assert f">{shown}</td>" in page_tables.numbers({"n": ("", value, "")})


def test_given_numbers_and_the_title_come_first(plan: ls.Plan, tmp_path: Path) -> None:
    given = {"mine": ("measured", 3.25, "ms")}
    save(plan.report(), None, tmp_path / "page.html", title="A title", numbers=given)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text == page(plan.report(), None, title="A title", numbers=given)
    assert re.findall(r'data-name="(\w+)"', text)[:2] == ["mine", "seconds"] and "A title" in text and "nothing to choose from" in text
    assert plan.report().plan.split("\n")[0][:10] in page(plan.report(), None)


def test_a_field_that_looks_like_a_placeholder_is_left_alone() -> None:
    assert _fill("a {{x}} b {{y}}{{x}}", {"x": "{{y}}", "y": "}}"}) == "a {{y}} b }}{{y}}"


def test_tables_have_at_most_as_many_rows_as_their_limits(plan: ls.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (page_tables.MAX_OPTIONS, page_tables.MAX_RANKS, page_data.MAX_RANKS, figure.MAX_RANKS) == (15, 1024, 64, 32)
    report, considered = plan.report(), plan.considered()
    assert considered is not None and page_tables.work(report).count("<tr>") == 4
    monkeypatch.setattr(page_tables, "MAX_RANKS", 3)
    assert re.findall(r'row">(\d)<', page_tables.work(report)) == ["0", "1", "2"]
    before = page_tables.options(report, considered)
    assert before.count("class=own") == 1
    monkeypatch.setattr(page_tables, "MAX_OPTIONS", 2)
    after = page_tables.options(report, considered)
    assert before.count("<tr") - after.count("<tr") == min(15, len(considered.options)) - 2
    marked = [option.name for option in considered.options[:15] if not option.exact]
    assert re.findall(r'row">([^<]*) ~<', before) == marked


def test_rows_of_options_show_balance_and_received_kv(plan: ls.Plan) -> None:
    report, considered = plan.report(), plan.considered()
    assert considered is not None
    rows = re.findall(r"<td>([\d.]+)</td><td>([\d.]+) %</td></tr>", page_tables.options(report, considered))
    want = [(report.balance, report.share), *((o.imbalance, o.received) for o in considered.options[:15])]
    assert rows == [(f"{balance:.3f}", f"{100 * share:.1f}") for balance, share in want]


def test_sampled_ranks_are_evenly_spaced(plan: ls.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    report = plan.report()
    assert page_data.shown_ranks(report) == [0, 1, 2, 3]
    monkeypatch.setattr(page_data, "MAX_RANKS", 4)
    assert page_data.shown_ranks(report) == [0, 1, 2, 3]
    monkeypatch.setattr(page_data, "MAX_RANKS", 2)
    busiest = {int(report.timeline.backward.total.argmax()), int(report.pairs.argmax())}
    assert page_data.shown_ranks(report) == sorted({0, 3} | busiest)


def test_a_page_with_too_many_arrivals_names_no_steps(plan: ls.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    moves = int((plan.data.schedule.row == 0).sum())
    for limit, runs in ((moves, moves), (moves - 1, 0)):
        monkeypatch.setattr(page_data, "MAX_ARRIVALS", limit)
        arrays = page_data._arrivals(plan.data)
        assert len(arrays["step_value"]) == runs and arrays["step_ptr"].tolist()[-1] == runs and len(arrays["step_ptr"]) == 5
    assert "data-value" in page_of(plan)


def test_arrays_are_packed_one_after_another_as_32_bit_numbers() -> None:
    index, block = page_data.pack(
        {"a": torch.arange(6).view(2, 3).T, "b": torch.tensor([0.5], dtype=torch.float64), "c": torch.tensor([True])}
    )
    assert index == {
        "a": {"at": 0, "shape": [3, 2], "type": "i4"},
        "b": {"at": 24, "shape": [1], "type": "f4"},
        "c": {"at": 28, "shape": [1], "type": "i4"},
    }
    raw = bytearray(zlib.decompress(base64.b64decode(block)))
    assert torch.frombuffer(raw, dtype=torch.int32, count=6).tolist() == [0, 3, 1, 4, 2, 5] and len(raw) == 32


def test_symbols_repeat_after_62_ranks() -> None:
    assert [symbol(r) for r in (0, 9, 10, 35, 36, 61, 62, 72)] == ["0", "9", "a", "z", "A", "Z", "0", "a"]
    assert len({symbol(r) for r in range(62)}) == 62


def test_bars_and_curves_have_the_given_width() -> None:
    assert bar(0.5, 3) == "█▌" and bar(-1.0, 3) == ""
    lines = curve([1.0, 3.0, 5.0, 7.0], label="x", width=2, height=1).splitlines()
    assert lines == ["         6 ┤▁█", "           └── x, steps 1 to 4"]
    assert len(curve([1.0, 2.0], label="x").splitlines()) == 9
    assert len(curve([1.0] * 500, label="x").splitlines()[-1].split()[0]) == 65


def test_the_timeline_of_many_ranks_has_lines_of_an_even_sample(plan: ls.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    report = plan.report()
    for limit, ranks in ((4, ["0", "1", "2", "3"]), (3, ["0", "2"])):
        monkeypatch.setattr(figure, "MAX_RANKS", limit)
        grid_axes, work_axes, time_axes = figure.figure(report).axes
        assert [label.get_text() for label in time_axes.get_yticklabels()] == ranks
    assert list(grid_axes.images[0].get_extent()) == [0, 2048, 2048, 0] and grid_axes.get_title() == "coloured by the rank that computes"
    ends = [float(line.get_xdata()[0]) for line in time_axes.lines]
    forward = report.timeline.forward.seconds
    assert ends == pytest.approx([1e3 * forward, 1e3 * (forward + report.timeline.backward.seconds)])
    assert time_axes.yaxis_inverted() and [float(line.get_ydata()[0]) for line in work_axes.lines] == [1.0]


def test_a_picture_has_dots_where_less_than_a_tenth_is_computed() -> None:
    # Of 16 × 16 tiles in one cell, the diagonal: 1 / 16.
    sparse: Any = ls.documents(lengths=[128] * 16)
    plan = ls.plan(sparse, 2048, ls.Mesh.abstract(1))
    assert picture(plan.data, 1, 1) == "·" and picture(plan.data, 2, 2) == "0\n 0"


@pytest.mark.parametrize(
    ("values", "options", "lines"),
    [
        ([0.0, 7.0, 14.0, 15.0], {"height": 2}, ["        15 ┤  ▇█", "         0 ┤▁███", "           └──── x, steps 1 to 4"]),
        ([2.0] * 3, {"height": 2}, ["         2 ┤", "         2 ┤▁▁▁", "           └─── x, steps 1 to 3"]),
        ([1.0, float("inf"), 3.0], {"height": 1, "first": 7}, ["         3 ┤▁ █", "           └─── x, steps 7 to 9"]),
        (
            [0.0, 2.0, 1.0, 3.0, 4.0, 5.0, float("nan")],
            {"height": 2, "width": 3},
            ["       4.5 ┤  █", "         1 ┤▁▅█", "           └─── x, steps 1 to 7"],
        ),
        ([0.0, 1.0, 16.0], {"height": 3}, ["        16 ┤  █", "           ┤  █", "         0 ┤▁▂█", "           └─── x, steps 1 to 3"]),
    ],
)
def test_curves_line_by_line(values: list[float], options: dict[str, Any], lines: list[str]) -> None:
    assert curve(values, label="x", **options).splitlines() == lines


def test_bars_are_rounded_to_eighths() -> None:
    assert [bar(n / 16, 2) for n in range(17)] == ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉", "█", *("█" + c for c in "▏▎▍▌▋▊▉"), "██"]
    assert len(bar(1.0)) == 24 and len(bar(7.0, 5)) == 5


def test_headline_numbers_are_of_the_busiest_and_the_mean_rank() -> None:
    layout = ls.Layout(length=1000, rows=((((0, 700),), ((700, 300),)),))
    report = ls.plan(ls.causal(), 1000, ls.Mesh.abstract(2), layout=layout, strategy="exchange", heads=2).report()
    numbers = page_tables.headline_numbers(report)
    assert numbers["tokens"] == ("tokens per rank, maximum", 700, "") and numbers["steps"][1] == report.steps
    received = report.bytes_received.sum(0).double() / 2**20
    assert (numbers["received"][1], numbers["received_max"][1]) == (float(received.mean()), float(received.max())) and received[
        0
    ] != received[1]
    assert page_tables.MIB == 2**20


def test_times_of_ranks_that_differ_are_shown_in_their_rows() -> None:
    report = ls.plan(ls.causal(), 4096, ls.Mesh.abstract(3), layout="contiguous", strategy="exchange", heads=8).report()
    passes = (report.timeline.forward, report.timeline.backward)
    busy, waits = sum(p.busy for p in passes), sum(p.exposed for p in passes)
    rows = re.findall(r"<td>([\d.,]+)</td><td>([\d.,]+)</td></tr>", page_tables.work(report))
    assert rows == [(f"{1e3 * float(b):,.3f}", f"{1e3 * float(w):,.3f}") for b, w in zip(busy, waits)]
    assert len(set(rows)) == 3
    considered = ls.plan(ls.causal(), 4096, ls.Mesh.abstract(3), heads=8).considered()
    first = re.findall(r"<td>([\d.]+)</td>", page_tables.options(report, considered))[1]
    assert first == f"{1e3 * float(busy.max()):.3f}" != f"{1e3 * float(busy.min()):.3f}"


def test_arrivals_of_every_step_begin_where_those_of_the_rank_before_end() -> None:
    sizes: dict[str, Any] = {"strategy": "exchange", "layout": "contiguous", "heads": 2, "stages": 3}
    data = ls.plan(ls.causal(), 2048, ls.Mesh.abstract(4), **sizes).data
    s, kv = data.schedule, data.tiles[0].kv
    arrays = page_data._arrivals(data)
    want = []
    for rank in range(4):
        mine = []
        for stage, receiver, start, length in zip(*(column.tolist() for column in (s.stage, s.receiver, s.start, s.length))):
            if receiver == rank:
                tiles = [t for t, edge in enumerate(kv.edges[:-1].tolist()) if start <= edge < start + length]
                step = 1 + next(i for i, stages in enumerate(s.steps) if stage in stages)
                mine.append((tiles[0], tiles[-1] + 1, step))
        want.append(sorted(mine))
    assert len(s.steps) > 1 and arrays["step_ptr"].tolist() == [sum(map(len, want[:r])) for r in range(5)]
    columns = (arrays[name].tolist() for name in ("step_first", "step_end", "step_value"))
    assert list(zip(*columns)) == [run for mine in want for run in mine]


def test_more_ranks_than_are_shown_are_sampled_evenly_with_the_busiest(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, total = torch.ones(100), torch.ones(100)
    pairs[41], total[57] = 2, 2
    backward = SimpleNamespace(total=total)
    report: Any = SimpleNamespace(ranks=100, pairs=pairs, timeline=SimpleNamespace(backward=backward))
    shown = page_data.shown_ranks(report)
    assert {0, 41, 57, 99} <= set(shown) and shown == sorted({41, 57, *(round(i * 99 / 63) for i in range(64))})
    monkeypatch.setattr(page_data, "MAX_RANKS", 100)
    assert page_data.shown_ranks(report) == list(range(100))


def test_arrivals_and_runs_are_those_of_the_first_batch_row() -> None:
    mask = ls.causal() & ls.documents(lengths=[[700, 324], [1000, 24], [512, 512]])
    data = ls.plan(mask, 1024, ls.Mesh.abstract(3), strategy="exchange", layout="auto", batch=3, heads=2).data
    s, kv = data.schedule, data.tiles[0].kv
    first = [n for n, row in enumerate(s.row.tolist()) if row == 0]
    assert data.batch_layouts == 3 and 0 < len(first) < len(s.row)
    arrays = page_data._arrivals(data)
    tiles = [(int(s.receiver[n]), (kv.edges[:-1] >= s.start[n]) & (kv.edges[:-1] < s.start[n] + s.length[n])) for n in first]
    assert arrays["step_ptr"].diff().tolist() == [sum(rank == r for rank, _ in tiles) for r in range(3)]
    assert sorted((arrays["step_end"] - arrays["step_first"]).tolist()) == sorted(int(here.sum()) for _, here in tiles)


def test_grids_are_of_the_first_head() -> None:
    mask = ls.mask_mod(lambda b, h, q, kv: (q >= kv) & (q - kv < 200 * (h + 1)))
    data = ls.plan(mask, 1024, ls.Mesh.abstract(2), strategy="ring", layout="contiguous", heads=3).data
    table = data.tiles[0].table
    assert table.heads == 3
    assert torch.equal(density_grid(data, 8, 8).density > 0, table.to_dense()[0, 0] > 0)
