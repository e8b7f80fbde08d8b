"""A report as a matplotlib figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from longspan._cost.report_data import PlanReport
from longspan._plan.plan_data import PlanData
from longspan._report.grid import density_grid

MAX_RANKS = 32  # lines of the timeline


def figure(report: PlanReport, path: str | Path | None = None) -> Any:
    """The mask coloured by rank, the work of each rank, and the timeline of both passes. Saved if `path` is given; needs no display."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plan.plot() needs matplotlib, which is not installed: pip install 'longspan[viz]'") from error
    drawing = Figure(figsize=(13, 6), layout="constrained")
    grid_axes, work_axes, time_axes = drawing.subplot_mosaic([["grid", "work"], ["grid", "time"]], width_ratios=[1, 1.1]).values()
    drawing.suptitle(report.plan, parse_math=False)
    kv_coordinates = report.data.kv_coordinates
    # Steps of the golden ratio keep the colours of neighbouring ranks far apart.
    colours = colormaps["turbo"]((torch.arange(int(kv_coordinates.max()) + 1) * 0.618034 % 1).tolist())
    _draw_grid(grid_axes, report.data, colours)
    work_axes.bar(range(report.ranks), (report.pairs / report.pairs.mean().clamp(min=1)).tolist(), color=colours[kv_coordinates.tolist()])
    work_axes.axhline(1, color="grey", linewidth=0.8)
    work_axes.set(xlabel="rank", ylabel="work over the mean", title=f"busiest rank {report.balance:.3f} × the mean")
    _draw_timeline(time_axes, report)
    if path is not None:
        drawing.savefig(path, dpi=140)
    return drawing


def _draw_grid(axes: Any, data: PlanData, colours: Any) -> None:
    """The mask's grid in the colours of the ranks, fading to white where less of a cell is computed."""
    grid = density_grid(data, 512, 512)
    rank_colours = torch.tensor(colours, dtype=torch.float64)[grid.owner][:, None, :3]
    opacity = grid.density.pow(0.4)[:, :, None]
    image = 1 - opacity * (1 - rank_colours)
    axes.imshow(image.tolist(), extent=(0, data.kv_len, data.q_len, 0), aspect="auto", interpolation="nearest")
    axes.set(xlabel="keys", ylabel="queries", title=f"coloured by the {'rank' if data.degree == 1 else 'Ulysses group'} that computes")


def _draw_timeline(axes: Any, report: PlanReport) -> None:
    """Compute above, transfers below, one line per rank; at most MAX_RANKS ranks, evenly spaced."""
    ranks = list(range(0, report.ranks, -(-report.ranks // MAX_RANKS)))
    start = 0.0
    for one in (report.timeline.forward, report.timeline.backward):
        rows = [(one.compute, "tab:blue", 0.0), (one.transfer, "tab:orange", 0.45)]
        if one.grad_return is not None:
            rows.append((one.grad_return, "tab:green", 0.45))
        for (begin, end), colour, offset in rows:
            for y, rank in enumerate(ranks):
                steps = zip(begin[rank].tolist(), end[rank].tolist(), strict=True)
                axes.broken_barh([(1e3 * (start + a), 1e3 * (b - a)) for a, b in steps if b > a], (y + offset, 0.4), facecolors=colour)
        start += one.seconds
        axes.axvline(1e3 * start, color="grey", linewidth=0.8)
    axes.set_yticks([y + 0.4 for y in range(len(ranks))], [str(rank) for rank in ranks])
    axes.set(xlabel="ms (blue: compute, orange: KV, green: gradients)", ylabel="rank", title=f"{1e3 * report.seconds:.2f} ms predicted")
    axes.invert_yaxis()
