"""The tables of the report page as HTML."""

from __future__ import annotations

import html
from collections.abc import Mapping

from longspan._cost.options import Considered
from longspan._cost.report_data import PlanReport

MAX_OPTIONS = 15
MAX_RANKS = 1024
MIB = 2**20


def headline_numbers(report: PlanReport) -> dict[str, tuple[str, float, str]]:
    """The page's headline numbers: name → (label, value, unit)."""
    received = report.bytes_received.sum(0).double()
    timeline = report.timeline
    return {
        "seconds": ("predicted, forward and backward", 1e3 * report.seconds, "ms"),
        "forward": ("… forward", 1e3 * timeline.forward.seconds, "ms"),
        "backward": ("… backward", 1e3 * timeline.backward.seconds, "ms"),
        "exposed": ("exposed communication, maximum", 1e3 * report.exposed, "ms"),
        "flops": ("useful work per device", report.flops_per_device / 1e12, "TFLOP/s"),
        "balance": ("busiest rank over the mean", report.balance, "×"),
        "tokens": ("tokens per rank, maximum", max(report.tokens), ""),
        "received": ("received per rank in forward, mean", float(received.mean()) / MIB, "MiB"),
        "received_max": ("… maximum", float(received.max()) / MIB, "MiB"),
        "share": ("KV received, as a share of an all-gather", 100 * report.share, "%"),
        "stages": ("stages", len(report.received), ""),
        "steps": ("… computed in steps", report.steps, ""),
        "in_flight": ("KV tokens in flight, maximum", report.in_flight, ""),
        "memory": ("memory per rank, maximum", sum(report.memory_parts.values()) / MIB, "MiB"),
    }


def numbers(values: Mapping[str, tuple[str, float, str]]) -> str:
    """Rows of numbers by name, each with label, value and unit; `data-value` holds each value exactly."""
    rows = []
    for name, (label, value, unit) in values.items():
        shown = f"{_number(value)} {unit}".strip()
        rows.append(f'<tr><th scope="row">{html.escape(label)}</th><td data-name="{name}" data-value="{value!r}">{shown}</td></tr>')
    return "\n".join(rows)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}" if abs(value) < 100 else f"{value:,.1f}"


def options(report: PlanReport, considered: Considered | None) -> str:
    """The table of strategies and layouts that `auto` compares, this plan first."""
    if considered is None:
        return "<p>There was nothing to choose from.</p>"
    best = min(considered.winner.seconds, report.seconds)
    compute = float((report.timeline.forward.busy + report.timeline.backward.busy).max())
    name = f"this plan: {report.strategy}, {report.layout}"
    rows = [_option(name, report.seconds, best, compute, report.balance, report.share, css=" class=own")]
    for option in considered.options[:MAX_OPTIONS]:
        name = option.name + ("" if option.exact else " ~")
        rows.append(_option(name, option.seconds, best, option.computing, option.imbalance, option.received))
    rows += [
        f'<tr><th scope="row">{html.escape(name)}</th><td colspan="5">not possible: {html.escape(reason)}</td></tr>'
        for name, reason in considered.not_possible
    ]
    columns = "".join(f'<th scope="col">{c}</th>' for c in ("option", "ms", "slower", "compute, ms", "busiest", "received"))
    note = "~ is an estimate from the owners of tokens alone; all others are planned and timed exactly. Unbalanced options come last."
    return f"<table><thead><tr>{columns}</tr></thead><tbody>{''.join(rows)}</tbody></table><p>{note}</p>"


def _option(name: str, seconds: float, best: float, compute: float, imbalance: float, received: float, *, css: str = "") -> str:
    return (
        f'<tr{css}><th scope="row">{html.escape(name)}</th><td>{1e3 * seconds:.3f}</td><td>{100 * (seconds / best - 1):+.1f} %</td>'
        f"<td>{1e3 * compute:.3f}</td><td>{imbalance:.3f}</td><td>{100 * received:.1f} %</td></tr>"
    )


def memory(report: PlanReport) -> str:
    """Rows of the memory parts of the rank that needs most, with bars."""
    total = sum(report.memory_parts.values()) or 1
    return "".join(
        f'<tr><th scope="row">{html.escape(name)}</th><td>{size / MIB:,.1f} MiB</td>'
        f'<td class="bar"><span style="width:{100 * size / total:.1f}%"></span></td></tr>'
        for name, size in report.memory_parts.items()
    )


def work(report: PlanReport) -> str:
    """Rows of the work, traffic and time of each rank."""
    received = report.bytes_received.sum(0).double() / MIB
    forward, backward = report.timeline.forward, report.timeline.backward
    columns = [
        report.pairs.tolist(),
        report.tiles.tolist(),
        received.tolist(),
        (1e3 * (forward.busy + backward.busy)).tolist(),
        (1e3 * (forward.exposed + backward.exposed)).tolist(),
    ]
    return "".join(
        f'<tr><th scope="row">{rank}</th><td>{pairs:,.0f}</td><td>{tiles:,}</td><td>{mib:,.1f}</td>'
        f"<td>{busy:,.3f}</td><td>{waits:,.3f}</td></tr>"
        for rank, (pairs, tiles, mib, busy, waits) in enumerate(zip(*columns, strict=True))
        if rank < MAX_RANKS
    )
