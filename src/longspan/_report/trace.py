"""A report's timeline as trace events for Chrome's and Perfetto's viewers: one process per rank, one thread per kind of work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from longspan._cost.report_data import PlanReport
from longspan._cost.timeline import PassTimes

THREADS = ("compute", "KV transfers", "gradient returns", "Ulysses transposes")
COMPUTE, KV, GRADIENTS, TRANSPOSES = range(4)


def save(report: PlanReport, path: str | Path) -> None:
    """Write the trace as JSON."""
    Path(path).write_text(json.dumps({"traceEvents": events(report), "displayTimeUnit": "ms"}), encoding="utf-8")


def events(report: PlanReport) -> list[dict[str, Any]]:
    """Complete events ("X") of both passes in microseconds, backward after forward, and the metadata that names ranks and threads."""
    metadata: list[dict[str, Any]] = []
    for rank in range(report.ranks):
        metadata.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        metadata += [{"ph": "M", "name": "thread_name", "pid": rank, "tid": i, "args": {"name": name}} for i, name in enumerate(THREADS)]
    step_names = {0: "pack local KV"} if report.work.joined else {}
    if report.work.halves is not None:
        step_names[report.work.steps - 1] = "compute local KV, second part"
    forward, backward = report.timeline.forward, report.timeline.backward
    return [
        *metadata,
        *_pass_events(forward, "forward", 0.0, step_names),
        *_pass_events(backward, "backward", forward.seconds, step_names),
    ]


def _pass_events(one: PassTimes, name: str, start: float, step_names: dict[int, str]) -> list[dict[str, Any]]:
    """Events of one pass that begins at `start` seconds. `step_names`: compute steps that have a name besides their number."""
    compute = {step: step_names.get(step, f"compute step {step}") for step in range(one.compute[0].shape[1])}
    out = _step_events(one.compute, COMPUTE, name, start, compute)
    out += _step_events(one.transfer, KV, name, start, {step: f"KV of step {step}" for step in compute})
    if one.grad_return is not None:
        out += _step_events(one.grad_return, GRADIENTS, name, start, {step: f"gradients of step {step}" for step in compute})
    for rank, (before, after, total) in enumerate(zip(one.before.tolist(), one.after.tolist(), one.total.tolist(), strict=True)):
        if before > 0:
            out.append(_event(f"{name}: transpose", rank, TRANSPOSES, start, before))
        if after > 0:
            out.append(_event(f"{name}: transpose or last gradients", rank, TRANSPOSES, start + total - after, after))
    return out


def _step_events(
    spans: tuple[Tensor, Tensor], thread: int, pass_name: str, start: float, step_names: dict[int, str]
) -> list[dict[str, Any]]:
    """Events of the steps (begin, end) [ranks, steps] that take any time."""
    begin, end = spans[0].tolist(), spans[1].tolist()
    return [
        _event(f"{pass_name}: {step_names[step]}", rank, thread, start + begin[rank][step], end[rank][step] - begin[rank][step])
        for rank in range(len(begin))
        for step in range(len(begin[rank]))
        if end[rank][step] > begin[rank][step]
    ]


def _event(name: str, rank: int, thread: int, start: float, seconds: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": rank, "tid": thread, "ts": round(start * 1e6, 3), "dur": round(seconds * 1e6, 3)}
