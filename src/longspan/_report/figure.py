"""A plan as a matplotlib figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from longspan._cost.report_data import PlanReport
from longspan._plan.plan_data import PlanData
from longspan._report.grid import grid


def _matplotlib() -> Any:
    try:
        from matplotlib import colormaps, figure
    except ImportError as error:
        raise ImportError("plan.plot() draws with matplotlib, which is not installed: pip install 'longspan[viz]'") from error
    return colormaps, figure


def figure(report: PlanReport, path: str | Path | None = None) -> Any:
    """Who computes what, each rank's work, and the timeline of forward and backward, as a matplotlib figure. Needs no display."""
    colormaps, module = _matplotlib()
    found = module.Figure(figsize=(13, 6), layout="constrained")
    left, work, line = found.subplot_mosaic([["grid", "work"], ["grid", "line"]], width_ratios=[1, 1.1]).values()
    found.suptitle(report.plan, parse_math=False)
    ring_of = report.data.ring_of
    colour = colormaps["turbo"]((torch.arange(int(ring_of.max()) + 1).double() * 0.618034 % 1).tolist())
    _draw_grid(left, report.data, colour)
    work.bar(range(report.ranks), (report.pairs / report.pairs.mean().clamp(min=1)).tolist(), color=colour[ring_of.tolist()])
    work.axhline(1, color="grey", linewidth=0.8)
    work.set(xlabel="rank", ylabel="work over the mean", title=f"busiest rank {report.balance:.3f} × the mean")
    _draw_lines(line, report)
    if path is not None:
        found.savefig(path, dpi=140)
    return found


def _draw_grid(axes: Any, data: PlanData, colour: Any) -> None:
    cells = grid(data, 512, 512)
    shown = torch.tensor(colour, dtype=torch.float64)[cells.owner][:, None, :3]
    weight = cells.density.clamp(0, 1).pow(0.4)[:, :, None]
    image = 1 - weight * (1 - shown)
    extent = (0, data.kv_len, data.q_len, 0)
    axes.imshow(image.tolist(), extent=extent, aspect="auto", interpolation="nearest")
    axes.set(xlabel="keys", ylabel="queries", title=f"coloured by the {'rank' if data.degree == 1 else 'Ulysses group'} that computes")


def _draw_lines(axes: Any, report: Any) -> None:
    ranks = list(range(report.ranks))
    shown = ranks if len(ranks) <= 32 else ranks[:: -(-len(ranks) // 32)]
    start = 0.0
    for found in (report.timeline.forward, report.timeline.backward):
        lanes = [(found.compute, "tab:blue", 0.0), (found.travel, "tab:orange", 0.45)]
        if found.home is not None:
            lanes.append((found.home, "tab:green", 0.45))
        for (begin, end), colour, offset in lanes:
            for y, rank in enumerate(shown):
                i = ranks.index(rank)
                spans = [(1e3 * (start + a), 1e3 * (b - a)) for a, b in zip(begin[i].tolist(), end[i].tolist(), strict=True) if b > a]
                axes.broken_barh(spans, (y + offset, 0.4), facecolors=colour)
        start += found.seconds
        axes.axvline(1e3 * start, color="grey", linewidth=0.8)
    axes.set_yticks([y + 0.4 for y in range(len(shown))], [str(r) for r in shown])
    axes.set(xlabel="ms (blue: computing, orange: keys, green: gradients)", ylabel="rank", title=f"{1e3 * report.seconds:.2f} ms predicted")
    axes.invert_yaxis()
