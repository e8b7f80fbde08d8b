"""The figure, number by number: sizes, colours, axes, bars and lines."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import longspan as ls
from longspan._report import figure as module
from longspan._report.figure import figure
from longspan._report.grid import DensityGrid

pytest.importorskip("matplotlib")
STEP = 0.618034  # of the golden ratio


@pytest.fixture(scope="module")
def plan() -> ls.Plan:
    return ls.plan(ls.causal(), 1300, ls.Mesh.abstract(3), layout="contiguous", strategy="exchange", heads=8, kv_heads=2, head_dim=64)


@pytest.fixture
def drawn(plan: ls.Plan) -> Any:
    return figure(plan.report())


def colours(ranks: int) -> list[tuple[float, ...]]:
    from matplotlib import colormaps

    return [tuple(colormaps["turbo"](r * STEP % 1)) for r in range(ranks)]


def test_the_drawing_has_a_title_and_three_axes(plan: ls.Plan, drawn: Any, tmp_path: Path) -> None:
    assert tuple(drawn.get_size_inches()) == (13, 6) and drawn.get_suptitle() == plan.report().plan
    assert not drawn._suptitle.get_parse_math()
    grid, work, time = drawn.axes
    assert grid.get_subplotspec().rowspan == range(2) and [a.get_subplotspec().rowspan for a in (work, time)] == [range(1), range(1, 2)]
    assert list(grid.get_gridspec().get_width_ratios()) == [1, 1.1]
    figure(plan.report(), tmp_path / "plan.png")
    assert struct.unpack(">II", (tmp_path / "plan.png").read_bytes()[16:24]) == (13 * 140, 6 * 140)


def test_bars_of_work_have_the_colours_of_ranks(plan: ls.Plan, drawn: Any) -> None:
    work, report = drawn.axes[1], plan.report()
    assert [tuple(bar.get_facecolor()) for bar in work.patches] == [pytest.approx(c) for c in colours(3)]
    assert [bar.get_height() for bar in work.patches] == pytest.approx((report.pairs / report.pairs.mean()).tolist())
    assert (work.get_xlabel(), work.get_ylabel()) == ("rank", "work over the mean")
    assert work.get_title() == f"busiest rank {report.balance:.3f} × the mean"
    (line,) = work.lines
    assert line.get_color() == "grey" and list(line.get_ydata()) == [1, 1] and line.get_linewidth() == 0.8


def test_ranks_of_a_ulysses_group_share_a_colour() -> None:
    mesh = ls.Mesh.abstract((2, 2), axis_names=("ring", "ulysses"))
    made = figure(ls.plan(ls.causal(), 1300, mesh, strategy="ulysses_ring", heads=8, kv_heads=2).report())
    shown = [tuple(bar.get_facecolor()) for bar in made.axes[1].patches]
    assert shown == [pytest.approx(colours(2)[r]) for r in (0, 0, 1, 1)]
    assert made.axes[0].get_title() == "coloured by the Ulysses group that computes"


def test_cells_fade_to_white_where_less_is_computed(plan: ls.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    density = torch.tensor([[0.0, 0.25], [1.0, 0.5]], dtype=torch.float64)

    def grid(data: Any, height: int, width: int) -> DensityGrid:
        asked.append((height, width))
        return DensityGrid(density=density, owner=torch.tensor([2, 1]))

    monkeypatch.setattr(module, "density_grid", grid)
    axes = figure(plan.report()).axes[0]
    image = torch.tensor(axes.images[0].get_array(), dtype=torch.float64)
    for y, owner in enumerate((2, 1)):
        for x in range(2):
            want = [1 - float(density[y, x]) ** 0.4 * (1 - c) for c in colours(3)[owner][:3]]
            assert image[y, x].tolist() == pytest.approx(want)
    assert asked == [(512, 512)] and list(axes.images[0].get_extent()) == [0, 1300, 1300, 0] and axes.get_aspect() == "auto"
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.images[0].get_interpolation()) == ("keys", "queries", "nearest")


def test_the_timeline_has_a_line_per_rank(plan: ls.Plan, drawn: Any) -> None:
    axes, report = drawn.axes[2], plan.report()
    heights = {round(p.get_extents().y1 - p.get_extents().y0, 6) for c in axes.collections for p in c.get_paths()}
    assert heights == {0.4} and [round(y, 6) for y in axes.get_yticks()] == [0.4, 1.4, 2.4]
    assert [line.get_linewidth() for line in axes.lines] == [0.8, 0.8] and {line.get_color() for line in axes.lines} == {"grey"}
    assert axes.get_xlabel() == "ms (blue: compute, orange: KV, green: gradients)" and axes.get_ylabel() == "rank"
    assert axes.get_title() == f"{1e3 * report.seconds:.2f} ms predicted"
    assert sum(bool(len(c.get_paths())) for c in axes.collections) > 6
