"""Printed tables: text of any length stays in one line where the output is no terminal."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

import longspan as ls
from longspan.cli import printing


def test_the_heading_of_simulated_strategies_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    mask = f"causal & documents([{', '.join(map(str, range(60)))}])"
    line = SimpleNamespace(forward=SimpleNamespace(seconds=0.25), backward=SimpleNamespace(seconds=0.5))
    sizes = {"tokens": 1 << 20, "gpus": 4096, "seconds": 0.75, "computing": 0.125, "imbalance": 1.5, "flops_per_device": 3e14}
    best = SimpleNamespace(name="ring", timeline=line, **sizes)
    printing.simulated([best], mask, SimpleNamespace(name="h200", kernel=SimpleNamespace(name="hopper")))
    head, _, row = capsys.readouterr().out.splitlines()[:3]
    assert head == f"{mask}, 1,048,576 tokens over 4,096 devices (h200: hopper), simulated from a sample of ranks"
    assert row.startswith("ring ") and row.split() == ["ring", "750.00", "250.00", "500.00", "125.00", "1.500", "300"]


def test_text_in_a_terminal_is_printed_without_colours_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    printing.text("4096 tokens, 'ring', True, 1.5e-3")
    assert capsys.readouterr().out == "4096 tokens, 'ring', True, 1.5e-3\n"


def test_ranks_have_visible_colours_of_the_cube_and_neighbours_distant_ones() -> None:
    """Of 6 × 6 × 6 colours, those whose red, green and blue add up to 5 or more of 15."""
    numbers = [int(printing._colour(rank).removeprefix("color(").removesuffix(")")) for rank in range(400)]
    levels = [((n - 16) // 36, (n - 16) // 6 % 6, (n - 16) % 6) for n in numbers]
    assert all(17 <= n < 231 and sum(level) >= 5 for n, level in zip(numbers, levels))
    assert len(set(numbers)) == len({(r, g, b) for r in range(6) for g in range(6) for b in range(6) if r + g + b >= 5}) - 1
    assert all(abs(a - b) > 6 for a, b in pairwise(numbers))


@pytest.mark.parametrize(("ranks", "rows"), [(1, 1), (16, 16), (17, 10), (60, 13)])
def test_a_table_has_every_rank_of_16_or_a_sample_with_the_busiest_and_the_last(
    ranks: int, rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    report = ls.plan(ls.causal(), 128 * ranks, ls.Mesh.abstract(ranks), layout="contiguous", strategy="ring").report()
    report.tiles[ranks // 3] = 10 * int(report.tiles.max())
    table = printing._rank_table(report)
    shown = [int(cell) for cell in table.columns[0].cells]
    assert len(shown) == rows == table.row_count and shown == sorted(set(shown))
    assert {0, ranks // 3, ranks - 1} <= set(shown)
    assert all(column.no_wrap for column in table.columns)
    printing._console().print(table)
    assert capsys.readouterr().out.startswith("rank ")


def test_brackets_are_text_and_long_lines_are_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    line = "documents([3, 9]) [bold] " + "x" * 300
    printing.text(line)
    assert capsys.readouterr().out == line + "\n"


def test_a_table_of_ranks_without_work_has_empty_bars() -> None:
    report = ls.plan(ls.causal(), 256, ls.Mesh.abstract(2), layout="contiguous", strategy="ring").report()
    report.tiles[:] = 0
    table = printing._rank_table(report)
    assert [[str(cell).strip() for cell in table.columns[i].cells] for i in (1, 2)] == [["0", "0"], ["", ""]]


def test_lines_of_a_report_are_not_wrapped(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Report:
        def __str__(self) -> str:
            return "word " * 60 + "[end]"

    asked: list[object] = []
    made = SimpleNamespace(data="plan", report=lambda cluster, conditions: asked.append((cluster, conditions)) or Report())
    monkeypatch.setattr(printing, "grid_lines", lambda data, rows, columns: [(0, f"{data} {rows} {columns}")])
    monkeypatch.setattr(printing, "_rank_table", lambda report: "table")
    printing.plan(made, "cluster", "conditions")
    assert capsys.readouterr().out.splitlines() == ["plan 24 72", str(Report()), "table"] and asked == [("cluster", "conditions")]
