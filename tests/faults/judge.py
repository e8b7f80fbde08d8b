"""What a run must show: no wrong number, no abort, no hang, no orphan, an error where one is due, in time."""

from __future__ import annotations

import signal

from tests.faults.inject import CATCH, DIVERGE, HARMLESS, KILL, RAISE, REORDER, SKIP
from tests.faults.scenarios import SEVERAL_GROUPS
from tests.faults.supervisor import Case, Report

NOTHING = ""  # digest of a call that this rank did not make


def verdict(case: Case, reports: list[Report], clean: list[Report], struck: float | None, hung: list[int], limit: float) -> list[str]:
    """Everything wrong with a run; empty if nothing is. `clean`: reports of a run without a fault. `limit`: seconds to the first error."""
    fault = case.fault
    assert fault is not None
    wrong = [f"rank {rank} hung" for rank in hung]
    if struck is None:
        return [*wrong, "the fault did not strike"]
    for rank, (report, reference) in enumerate(zip(reports, clean, strict=True)):
        victim = rank == fault.victim
        wrong += [f"rank {rank} {text}" for text in _exit(report, fault.kind if victim else "", rank in hung)]
        expected = {call: digest for call, kind, digest, _ in reference.results if kind == "value"}
        values = {call: digest for call, kind, digest, _ in report.results if kind == "value"}
        errors = [(call, text, when) for call, kind, text, when in report.results if kind == "error"]
        wrong += [f"rank {rank}: wrong number in {call!r}" for call, d in values.items() if d not in (NOTHING, expected[call])]
        if fault.kind in HARMLESS:
            wrong += [f"rank {rank}: {call!r} raised {text}" for call, text, _ in errors]
        # A rank that skipped a call, or had nothing to do in one that came too early, may end without an error.
        if fault.kind in HARMLESS or (victim and (fault.kind in (KILL, RAISE, CATCH, SKIP) or NOTHING in values.values())):
            continue
        if errors:
            seconds = errors[0][2] - max(struck, report.started[errors[0][0]], report.continued)
            if seconds > limit:
                wrong.append(f"rank {rank}: {errors[0][0]!r} raised after {seconds:.1f} s")
        elif values != expected or (fault.kind in (DIVERGE, SKIP, REORDER) and case.scenario not in SEVERAL_GROUPS):
            wrong.append(f"rank {rank}: no error, and not every result")
    return wrong


def _exit(report: Report, kind: str, hung: bool) -> list[str]:
    """Wrong ways to end. `kind`: of the fault that struck this rank."""
    status = report.exit_status
    assert status is not None
    if hung or (kind == KILL and status == -signal.SIGKILL) or (kind == RAISE and status == 1) or status == 0:
        return []
    return [f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with code {status}"]


def slowest(reports: list[Report], struck: float | None) -> float:
    """Seconds from the fault to each rank's first error: the most. From the start of the call that raised, or from the end of a stop, if
    that was later.
    """
    first = [next(((r, call, when) for call, kind, _, when in r.results if kind == "error"), None) for r in reports]
    return max((e[2] - max(struck or e[2], e[0].started.get(e[1], 0.0), e[0].continued) for e in first if e is not None), default=0.0)
