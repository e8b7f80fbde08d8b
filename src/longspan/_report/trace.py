"""The timeline as a trace for Chrome's and Perfetto's viewers: one process per rank, a lane for computing and one for what travels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longspan._cost.report_data import PlanReport
from longspan._cost.timeline import Pass

LANES = ("compute", "keys", "gradients home", "Ulysses transpose")


def events(report: PlanReport) -> list[dict[str, Any]]:
    """Complete events, in microseconds. Backward follows forward."""
    out: list[dict[str, Any]] = []
    ranks = list(range(report.ranks))
    for rank in ranks:
        out.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        out += [{"ph": "M", "name": "thread_name", "pid": rank, "tid": i, "args": {"name": lane}} for i, lane in enumerate(LANES)]
    named = {(0, 0): "pack local keys"} if report.work.joined else {}
    if report.work.halves is not None:
        named[0, report.work.steps - 1] = "compute local keys, second part"
    out += _pass(report.timeline.forward, "forward", 0.0, ranks, named)
    out += _pass(report.timeline.backward, "backward", report.timeline.forward.seconds, ranks, named)
    return out


def _pass(found: Pass, name: str, start: float, ranks: list[int], named: dict[tuple[int, int], str]) -> list[dict[str, Any]]:
    """`named`: what to say of a lane's step, where that is not its number."""
    out: list[dict[str, Any]] = []
    lanes = [(0, "compute", found.compute), (1, "keys of", found.travel)]
    if found.home is not None:
        lanes.append((2, "gradients of", found.home))
    for lane, what, (begin, end) in lanes:
        for i, rank in enumerate(ranks):
            for step, (a, b) in enumerate(zip(begin[i].tolist(), end[i].tolist(), strict=True)):
                if b > a:
                    said = named.get((lane, step), f"{what} step {step}")
                    out.append(_event(f"{name}: {said}", rank, lane, start + a, b - a))
    for i, rank in enumerate(ranks):
        before, after, total = float(found.before[i]), float(found.after[i]), float(found.total[i])
        if before > 0:
            out.append(_event(f"{name}: transpose", rank, 3, start, before))
        if after > 0:
            out.append(_event(f"{name}: transpose or last gradients", rank, 3, start + total - after, after))
    return out


def _event(name: str, rank: int, lane: int, start: float, length: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": rank, "tid": lane, "ts": round(start * 1e6, 3), "dur": round(length * 1e6, 3)}


def save(report: PlanReport, path: str | Path) -> None:
    Path(path).write_text(json.dumps({"traceEvents": events(report), "displayTimeUnit": "ms"}), encoding="utf-8")
