"""Ranks as forked processes, watched by one process: several runs at a time, each with its own group, a fault and a verdict.

Ranks fork from a process with torch and longspan imported and one thread, so that a run takes well under a second of CPU time. A forked
rank leaves the supervisor's stack by `InRank`, so that it can end as a program does: an error that nobody catches, Python's exit handlers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import select
import shutil
import signal
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.faults import hosts
from tests.faults.inject import STOP, Fault

GRACE = 5.0  # seconds past the timeout in which every rank must have reported
EXIT_SECONDS = 20.0  # in which a rank must have ended after it was released
EXITS = 16  # of one run in so many, ranks run Python's exit handlers, 1 s of CPU time each
_PR_SET_PDEATHSIG = 1


class InRank(BaseException):
    """Raised in a forked rank: unwinds the supervisor's stack. The main module then runs the rank and exits with its code."""

    def __init__(self, rank: Callable[[], int]) -> None:
        self.rank = rank


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: a scenario on `size` ranks, with a fault or without."""

    scenario: str
    size: int
    fault: Fault | None = None
    two_hosts: bool = False  # even ranks on one, odd ranks on the other

    def __str__(self) -> str:
        fault = self.fault
        return f"{self.scenario} on {self.size} ranks, " + (
            "no fault" if fault is None else f"{fault.kind} of rank {fault.victim} at {fault.at} ({fault.name})"
        )


@dataclass(kw_only=True)
class Report:
    """What one rank said and how it ended. `results`: digest or error of each call, with the time."""

    results: list[tuple[str, str, str, float]] = field(default_factory=list)  # (call, "value" | "error", digest or message, time)
    started: dict[str, float] = field(default_factory=dict)  # time of each call
    points: list[str] = field(default_factory=list)
    exit_status: int | None = None  # negative: the signal that ended the process
    continued: float = 0.0  # time at which it was continued after a stop
    ended: float | None = None


@dataclass(kw_only=True)
class Run:
    """A run in progress."""

    case: Case
    folder: str
    pids: list[int]
    pipes: list[int]
    release: int
    reports: list[Report]
    started: float
    struck: float | None = None
    released: float | None = None
    buffers: list[bytes] = field(default_factory=list)
    hung: list[int] = field(default_factory=list)


def _host_name(folder: str) -> str:
    return "lsf" + folder[-8:]


def _is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] == "T"


class Supervisor:
    """Starts runs and collects reports. `rank_main(case, rank, folder, timeout, report)` runs in the forked ranks."""

    def __init__(self, rank_main: Callable[..., int], timeout: float) -> None:
        self.rank_main, self.timeout = rank_main, timeout

    def run(self, cases: list[Case], jobs: int) -> Iterator[tuple[Case, list[Report], float | None, list[int]]]:
        """(case, reports by rank, time of the fault, ranks that hung), in the order of completion."""
        waiting, active = list(reversed(cases)), list[Run]()
        try:
            while waiting or active:
                while waiting and len(active) < jobs:
                    active.append(self._start(waiting.pop()))
                for run in self._step(active):
                    active.remove(run)
                    self._clean(run)
                    yield run.case, run.reports, run.struck, run.hung
        except InRank:
            raise
        except BaseException:
            for run in active:
                self._clean(run)
            raise

    def _start(self, case: Case) -> Run:
        if threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1:
            raise RuntimeError("the supervisor has more than one thread: forked ranks would inherit locks that nobody releases")
        folder = tempfile.mkdtemp(prefix="longspan-faults-")
        if case.two_hosts:
            hosts.make(_host_name(folder))
        hold, release = os.pipe()
        run = Run(case=case, folder=folder, pids=[], pipes=[], release=release, reports=[], started=time.monotonic())
        supervisor = os.getpid()
        for rank in range(case.size):
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                raise InRank(lambda rank=rank, writing=writing: self._rank(case, rank, folder, writing, hold, release, supervisor))
            os.close(writing)
            run.pids.append(pid)
            run.pipes.append(reading)
            run.reports.append(Report())
            run.buffers.append(b"")
        os.close(hold)
        return run

    def _rank(self, case: Case, rank: int, folder: str, writing: int, hold: int, release: int, supervisor: int) -> int:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            return 1
        os.close(release)
        if case.two_hosts:
            hosts.enter(_host_name(folder), rank % 2)

        def report(*message: Any) -> None:
            data = pickle.dumps((*message, time.monotonic()))
            os.write(writing, struct.pack("<I", len(data)) + data)

        log = os.open(os.path.join(folder, f"rank{rank}.log"), os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = self.rank_main(case, rank, folder, self.timeout, report)
        if code == 0:
            os.read(hold, 1)  # a rank that is done lives until all have reported, so that closed connections do not end the others early
            if case.fault is None or case.fault.at % EXITS:
                os._exit(0)
        return code

    def _step(self, active: list[Run]) -> list[Run]:
        pipes = {pipe: (run, rank) for run in active for rank, pipe in enumerate(run.pipes) if pipe >= 0}
        for pipe in select.select(list(pipes), [], [], 0.05)[0]:
            self._read(*pipes[pipe])
        return [run for run in active if self._advance(run)]

    def _read(self, run: Run, rank: int) -> None:
        data = os.read(run.pipes[rank], 1 << 16)
        if not data:
            os.close(run.pipes[rank])
            run.pipes[rank] = -1
            return
        buffer = run.buffers[rank] + data
        while len(buffer) >= 4 and len(buffer) >= 4 + (size := struct.unpack_from("<I", buffer)[0]):
            kind, *rest, when = pickle.loads(buffer[4 : 4 + size])
            buffer = buffer[4 + size :]
            report = run.reports[rank]
            if kind == "fault":
                run.struck = when
            elif kind == "call":
                report.started[rest[0]] = when
            elif kind == "end":
                report.points, report.ended = rest[0], when
            else:
                report.results.append((rest[0], kind, rest[1], when))
        run.buffers[rank] = buffer

    def _advance(self, run: Run) -> bool:
        """Whether the run is over: every rank has ended and everything it said was read."""
        now, reports = time.monotonic(), run.reports
        for report, pid in zip(reports, run.pids, strict=True):
            if report.exit_status is None:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    report.exit_status = os.waitstatus_to_exitcode(status)
        silent = [rank for rank, report in enumerate(reports) if report.ended is None and report.exit_status is None]
        fault = run.case.fault
        if fault is not None and fault.kind == STOP and run.struck is not None and silent == [fault.victim]:
            self._continue(reports[fault.victim], run.pids[fault.victim])
        if run.released is None and not silent:
            run.released = now
            with contextlib.suppress(BrokenPipeError):  # every rank has ended
                os.write(run.release, b"." * len(reports))  # not closed: ranks of later runs hold copies of the descriptor
        alive = [rank for rank, report in enumerate(reports) if report.exit_status is None]
        late = now > run.released + EXIT_SECONDS if run.released is not None else now > run.started + 4 * (self.timeout + GRACE)
        if alive and late:
            run.hung += [rank for rank in alive if rank not in run.hung]
            for rank in alive:
                os.kill(run.pids[rank], signal.SIGKILL)
        return not alive and all(pipe < 0 for pipe in run.pipes)

    def _continue(self, victim: Report, pid: int) -> None:
        """Continue a victim once it has stopped: it reports the fault before."""
        if not victim.continued and _is_stopped(pid):
            victim.continued = time.monotonic()
            os.kill(pid, signal.SIGCONT)

    def _clean(self, run: Run) -> None:
        for report, pid in zip(run.reports, run.pids, strict=True):
            if report.exit_status is None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        for pipe in run.pipes:
            if pipe >= 0:
                os.close(pipe)
        os.close(run.release)
        if run.case.two_hosts:
            hosts.remove(_host_name(run.folder))
        shutil.rmtree(run.folder, ignore_errors=True)
