"""What the views draw, number by number: densities and owners, event times, arrivals, bars. Compared with brute force over the plan."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.report.pages import page_contents, page_of
from torch import Tensor

import longspan as ls
from longspan._cost.timeline import PassTimes
from longspan._report import trace
from longspan._report.figure import figure
from longspan._report.grid import density_grid
from longspan._report.page_data import MAX_RANKS
from longspan._report.terminal import bar, curve, picture

MASK = ls.causal() & ls.documents(lengths=[1500, 2500, 96])


@pytest.fixture(scope="module", params=["exchange", "ring", "one call", "ulysses_ring"])
def plan(request: Any) -> ls.Plan:
    sizes = {"heads": 8, "kv_heads": 4, "head_dim": 64}
    if request.param == "ulysses_ring":
        mesh = ls.Mesh.abstract((2, 2), axis_names=("ring", "ulysses"))
        return ls.plan(MASK, 4096, mesh, strategy="ulysses_ring", layout="contiguous", **sizes)
    options: dict[str, Any] = {"strategy": "ring"} if request.param == "ring" else {"strategy": "exchange"}
    return ls.plan(MASK, 4096, ls.Mesh.abstract(4), layout="head_tail", overlap=request.param != "one call", **options, **sizes)


def computed_tiles(plan: ls.Plan) -> Tensor:
    """Tiles that are computed [q_tiles, kv_tiles], bool, from the dense mask."""
    tiles = plan.data.tiles[0]
    q, kv = torch.arange(4096)[:, None], torch.arange(4096)
    document = torch.bucketize(torch.arange(4096), torch.tensor([1500, 4000, 4096]), right=True)
    dense = (q >= kv) & (document[:, None] == document)
    q_edges, kv_edges = tiles.queries.edges.tolist(), tiles.kv.edges.tolist()
    rows = [[bool(dense[a:b, c:d].any()) for c, d in itertools.pairwise(kv_edges)] for a, b in itertools.pairwise(q_edges)]
    return torch.tensor(rows)


@pytest.mark.parametrize(("height", "width"), [(5, 7), (24, 64), (1, 1), (1000, 1000)])
def test_a_cells_density_is_the_share_of_its_tiles_that_are_computed(plan: ls.Plan, height: int, width: int) -> None:
    tiles, queries = computed_tiles(plan), plan.data.tiles[0].queries
    q_tiles, kv_tiles = tiles.shape
    grid = density_grid(plan.data, height, width)
    h, w = min(height, q_tiles), min(width, kv_tiles)
    assert grid.density.shape == (h, w) and grid.owner.shape == (h,)
    for y in range(h):
        lines = [t for t in range(q_tiles) if t * h // q_tiles == y]
        assert int(grid.owner[y]) in {int(queries.owner[t]) for t in lines}
        for x in range(w):
            columns = [t for t in range(kv_tiles) if t * w // kv_tiles == x]
            assert float(grid.density[y, x]) == pytest.approx(float(tiles[lines][:, columns].double().mean()), abs=1e-12)
    if (h, w) == (q_tiles, kv_tiles):
        assert grid.owner.tolist() == queries.owner.tolist()


def test_the_terminal_picture_marks_computed_cells_with_their_rank(plan: ls.Plan) -> None:
    grid, lines = density_grid(plan.data, 12, 20), picture(plan.data, 12, 20).splitlines()
    assert len(lines) == 12
    for y, line in enumerate(lines):
        for x, character in enumerate(line.ljust(20)):
            d = float(grid.density[y, x])
            assert character == (" " if d == 0 else "·" if d < 0.1 else str(int(grid.owner[y])))
    assert str(plan) == f"{plan!r}\n{picture(plan.data)}" and "█" in str(ls.causal().block_table(4096))


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, ""), (1.0, "█" * 24), (2.0, "█" * 24), (0.5, "█" * 12), (1 / 192, "▏"), (31 / 192, "███▉")]
)
def test_bars_show_eighths(share: float, text: str) -> None:
    assert bar(share) == text


def expected_events(one: PassTimes, name: str, start: float, joined: bool, split: bool) -> set[tuple[Any, ...]]:
    """(name, rank, thread, µs, µs long) of one pass, from the timeline."""
    out = set()

    def add(what: str, rank: int, thread: int, begin: float, seconds: float) -> None:
        if seconds > 0:
            out.add((f"{name}: {what}", rank, thread, round(1e6 * (start + begin), 3), round(1e6 * seconds, 3)))

    ranks, steps = one.compute[0].shape
    for rank in range(ranks):
        for step in range(steps):
            local = "pack local KV" if joined and step == 0 else "compute local KV, second part" if split and step == steps - 1 else ""
            for thread, what, spans in (
                (0, local or f"compute step {step}", one.compute),
                (1, f"KV of step {step}", one.transfer),
                (2, f"gradients of step {step}", one.grad_return),
            ):
                if spans is not None:
                    begin, end = float(spans[0][rank, step]), float(spans[1][rank, step])
                    add(what, rank, thread, begin, end - begin)
        add("transpose", rank, 3, 0.0, float(one.before[rank]))
        add("transpose or last gradients", rank, 3, float(one.total[rank] - one.after[rank]), float(one.after[rank]))
    return out


def test_trace_events_have_the_times_of_the_timeline(plan: ls.Plan, tmp_path: Path) -> None:
    report = plan.report()
    trace.save(report, tmp_path / "trace.json")
    saved = json.loads((tmp_path / "trace.json").read_text())
    events = saved["traceEvents"]
    drawn = [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    forward, backward = report.timeline.forward, report.timeline.backward
    kind = {"joined": report.work.joined, "split": report.work.halves is not None}
    want = expected_events(forward, "forward", 0.0, **kind) | expected_events(backward, "backward", forward.seconds, **kind)
    assert set(drawn) == want and len(drawn) == len(want)
    assert {e[2] for e in drawn} >= {0, 1, 2} and {e[1] for e in drawn} == {0, 1, 2, 3}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [f"rank {r}" for r in range(4)]
    assert [(e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name" and e["pid"] == 3] == list(enumerate(trace.THREADS))


def test_the_pages_arrays_are_the_reports(plan: ls.Plan) -> None:
    report, (meta, arrays) = plan.report(), page_contents(page_of(plan))
    for name, one in (("forward", report.timeline.forward), ("backward", report.timeline.backward)):
        zero = torch.zeros_like(one.compute[0])
        spans = {"compute": one.compute, "transfer": one.transfer, "return": one.grad_return or (zero, zero)}
        for what, (begin, end) in spans.items():
            torch.testing.assert_close(arrays[f"{name}_{what}"], torch.stack([begin, end]).float(), rtol=1e-6, atol=0)
        torch.testing.assert_close(arrays[f"{name}_transposes"], torch.stack([one.before, one.after, one.total]).float(), rtol=1e-6, atol=0)
        assert meta[name] == one.seconds
    assert torch.equal(arrays["matrix"], report.matrix.float()) and float(arrays["matrix"].max()) > 0
    assert torch.equal(arrays["pairs"], report.pairs.float()) and arrays["tiles"].tolist() == report.tiles.tolist()
    assert meta["group"] == plan.data.kv_coordinates.tolist() and meta["shown"] == [0, 1, 2, 3] and meta["balance"] == report.balance
    tiles = plan.data.tiles[0]
    for side, grid in (("q", tiles.queries), ("k", tiles.kv)):
        assert arrays[f"{side}_owner"].tolist() == grid.owner.tolist() and arrays[f"{side}_edges"].tolist() == grid.edges.tolist()


def test_the_pages_runs_are_the_masks_tiles(plan: ls.Plan) -> None:
    _, arrays = page_contents(page_of(plan))
    drawn = torch.zeros_like(computed_tiles(plan))
    for row, (begin, end) in enumerate(zip(arrays["ptr"].tolist(), arrays["ptr"].tolist()[1:])):
        for first, last in zip(arrays["first"][begin:end].tolist(), arrays["last"][begin:end].tolist()):
            drawn[row, first : last + 1] = True
    assert torch.equal(drawn, computed_tiles(plan)) and set(arrays["kind"].tolist()) == {1, 2}


def test_the_page_names_the_step_in_which_each_tile_arrives(plan: ls.Plan) -> None:
    _, arrays = page_contents(page_of(plan))
    schedule, kv = plan.schedule, plan.data.tiles[0].kv
    want: dict[tuple[int, int], int] = {}
    for stage, receiver, start, length in zip(*(t.tolist() for t in (schedule.stage, schedule.receiver, schedule.start, schedule.length))):
        step = next(i + 1 for i, stages in enumerate(schedule.steps) if stages.start <= stage < stages.stop)
        for tile in range(kv.tiles):
            if start <= int(kv.edges[tile]) < start + length:
                want[receiver, tile] = step
    drawn = {}
    pointers = arrays["step_ptr"].tolist()
    for rank, (begin, end) in enumerate(itertools.pairwise(pointers)):
        firsts = arrays["step_first"][begin:end].tolist()
        assert firsts == sorted(firsts)  # the page searches them
        for i in range(begin, end):
            for tile in range(int(arrays["step_first"][i]), int(arrays["step_end"][i])):
                drawn[rank, tile] = int(arrays["step_value"][i])
    assert drawn == want and want


def test_a_page_of_many_ranks_shows_a_sample_with_the_busiest() -> None:
    mask = ls.causal() & ls.documents(lengths=[9000, *[100] * 72])
    plan = ls.plan(mask, 16200, ls.Mesh.abstract(90), layout="contiguous", strategy="exchange", heads=2)
    report, (meta, arrays) = plan.report(), page_contents(page_of(plan))
    shown = meta["shown"]
    assert MAX_RANKS <= len(shown) <= MAX_RANKS + 2 and shown == sorted(set(shown)) and shown[0] == 0 and shown[-1] == 89
    assert int(report.pairs.argmax()) in shown and int(report.timeline.backward.total.argmax()) in shown
    compute = report.timeline.backward.compute[1][torch.tensor(shown)]
    torch.testing.assert_close(arrays["backward_compute"][1], compute.float(), rtol=1e-6, atol=0)
    assert torch.equal(arrays["matrix"], report.matrix[shown][:, shown].float())


def test_the_figure_draws_work_timeline_and_grid(plan: ls.Plan, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = plan.report()
    grid_axes, work_axes, time_axes = plan.plot(tmp_path / "plan.png").axes
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert [p.get_height() for p in work_axes.patches] == pytest.approx((report.pairs / report.pairs.mean()).tolist())
    image = torch.tensor(grid_axes.images[0].get_array())
    density = density_grid(plan.data, 512, 512).density
    assert torch.equal((image < 1).any(-1), density > 0)  # white where nothing is computed
    drawn = sorted(
        (round(box.x0, 6), round(box.x1, 6), round(box.y0, 2))
        for collection in time_axes.collections
        for box in (path.get_extents() for path in collection.get_paths())
    )
    want, start = [], 0.0
    for one in (report.timeline.forward, report.timeline.backward):
        for spans, offset in ((one.compute, 0.0), (one.transfer, 0.45), (one.grad_return, 0.45)):
            if spans is not None:
                for rank, (begins, ends) in enumerate(zip(spans[0].tolist(), spans[1].tolist())):
                    bars = [(a, b) for a, b in zip(begins, ends) if b > a]
                    want += [(round(1e3 * (start + a), 6), round(1e3 * (start + b), 6), round(rank + offset, 2)) for a, b in bars]
        start += one.seconds
    assert drawn == sorted(want)


def test_without_matplotlib_plot_says_what_to_install(plan: ls.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"longspan\[viz\]"):
        figure(plan.report())


def test_a_curve_in_text_shows_the_largest_and_the_smallest_value() -> None:
    lines = curve([4.0, 3.0, float("nan"), 2.0], label="loss", height=2).splitlines()
    assert lines == ["         4 ┤█▁", "         2 ┤██ ▁", "           └──── loss, steps 1 to 4"]
    assert len(curve([float(i) for i in range(1000)], label="x", width=10).splitlines()[-1].split()[0]) == 11
    assert curve([float("nan")], label="loss") == "loss: no finite value"
    assert "7" in curve([7.0, 7.0], label="loss")
    assert curve([2.0, 1.0], label="loss", first=5).endswith("loss, steps 5 to 6")


def test_pictures_have_24_lines_of_64_or_32_lines_of_a_table_at_most() -> None:
    plan = ls.plan(ls.full(), 128 * 100, ls.Mesh.abstract(2))
    lines = picture(plan.data).splitlines()
    assert len(lines) == 24 and {len(line) for line in lines} == {64}
    table = ls.full().block_table(128 * 100, 128 * 200)
    for shape, given in (((32, 64), {}), ((7, 9), {"height": 7, "width": 9}), ((100, 200), {"height": 500, "width": 500})):
        lines = table.picture(**given).splitlines()
        assert (len(lines), {len(line) for line in lines}) == (shape[0], {shape[1]})
