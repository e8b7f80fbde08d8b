"""`python -m tests.faults`: faults of real processes over Gloo, at every point of every scenario; a table of runs by scenario and kind."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from tests.faults import hosts
from tests.faults.inject import CABLE_KINDS, CATCH, DIVERGE, LATE, POINT_KINDS, REORDER, SKIP, Fault
from tests.faults.judge import slowest, verdict
from tests.faults.rank import prepare, rank_main
from tests.faults.scenarios import DIVERGING, DIVERGING_LATER, SCENARIOS
from tests.faults.supervisor import GRACE, Case, InRank, Report, Supervisor

Clean = dict[tuple[str, int], list[Report]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--scenarios", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--kinds", nargs="+", default=[*POINT_KINDS, *CABLE_KINDS, DIVERGE, SKIP, REORDER])
    parser.add_argument("--two-hosts", action="store_true", help="faults of the cable between two network namespaces instead; needs root")
    parser.add_argument("--ranks", nargs="+", type=int, default=[3, 4])
    parser.add_argument("--runs", type=int, help="a random sample of this many runs")
    parser.add_argument("--covering", action="store_true", help="one run per kind: each of another scenario, at a point in its middle")
    parser.add_argument("--part", type=int, default=0, help="the sample after that many others of the same size and seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=4, help="runs at a time")
    parser.add_argument("--timeout", type=float, default=3.0, help="timeout of the process groups, in seconds")
    parser.add_argument("--grace", type=float, default=GRACE, help="seconds past the timeout in which every rank must have reported")
    parser.add_argument("--verbose", action="store_true", help="print the errors of every run")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON in the last line")
    options = parser.parse_args()
    prepare()
    supervisor = Supervisor(rank_main, options.timeout)
    why = hosts.available() if options.two_hosts else None
    if why is not None:
        raise SystemExit(f"--two-hosts: network namespaces cannot be made here: {why}")
    worlds = [
        Case(scenario=s, size=n, two_hosts=options.two_hosts)
        for s in options.scenarios
        for n in options.ranks
        if s != "ulysses_ring" or n == 4
    ]
    clean = _clean_runs(supervisor, worlds, options.jobs)
    cases: list[Case] = [
        case for world in worlds for case in faults_of(world, clean[world.scenario, world.size]) if case.fault.kind in options.kinds
    ]
    if options.covering:
        cases = covering(cases)
    if options.runs is not None:
        first = options.part * options.runs
        cases = random.Random(options.seed).sample(cases, len(cases))[first : first + options.runs]
    return _run(supervisor, cases, clean, options)


def _clean_runs(supervisor: Supervisor, worlds: list[Case], jobs: int) -> Clean:
    clean = {}
    for case, reports, _, hung in supervisor.run(worlds, jobs):
        errors = [(rank, *result[::2]) for rank, report in enumerate(reports) for result in report.results if result[1] == "error"]
        if errors or hung or any(report.exit_status for report in reports):
            raise SystemExit(f"{case}: a run without a fault failed: {errors}, hung {hung}, {[r.exit_status for r in reports]}")
        clean[case.scenario, case.size] = reports
    return clean


def faults_of(world: Case, clean: list[Report]) -> Iterator[Case]:
    """Every fault of a scenario: kinds at each point of one rank (ranks in turn), then skips, exchanges and different arguments."""
    scenario, size = world.scenario, world.size
    for at in range(max(len(report.points) for report in clean)):
        for i, kind in enumerate(CABLE_KINDS if world.two_hosts else POINT_KINDS):
            victim = next(r for shift in range(size) if at < len(clean[r := (at + i + shift) % size].points))
            yield replace(world, fault=Fault(kind=kind, victim=victim, at=at, name=clean[victim].points[at]))
    if world.two_hosts:
        return
    calls = [call for call, *_ in clean[0].results]
    collective = [any(point.startswith(f"{call}: ") for point in clean[0].points) for call in calls]
    for at, name in enumerate(calls[:-1]):
        if collective[at]:
            yield replace(world, fault=Fault(kind=SKIP, victim=at % size, at=at, name=name))
        if collective[at] and collective[at + 1]:
            yield replace(world, fault=Fault(kind=REORDER, victim=(at + 1) % size, at=at, name=name))
    for i, name in enumerate(DIVERGING.get(scenario, ())):
        yield replace(world, fault=Fault(kind=DIVERGE, victim=i % size, name=name))
    for i, name in enumerate(DIVERGING_LATER.get(scenario, ())):  # the last call repeats one on which all ranks agreed
        yield replace(world, fault=Fault(kind=DIVERGE, victim=i % size, at=len(calls) - 1, name=name))


def covering(cases: list[Case]) -> list[Case]:
    """One case per kind, with scenarios in turn, in the middle of the scenario's cases of that kind."""
    by_kind: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_kind[case.fault.kind].append(case)
    chosen = []
    for i, of_kind in enumerate(by_kind.values()):
        scenarios = list(dict.fromkeys(case.scenario for case in of_kind))
        mine = [case for case in of_kind if case.scenario == scenarios[i % len(scenarios)]]
        chosen.append(mine[len(mine) // 2])
    return chosen


def _run(supervisor: Supervisor, cases: list[Case], clean: Clean, options: argparse.Namespace) -> int:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    bad, seconds, started = [], 0.0, time.monotonic()
    for case, reports, struck, hung in supervisor.run(cases, options.jobs):
        assert case.fault is not None
        counts[case.scenario][case.fault.kind] += 1
        seconds = max(seconds, slowest(reports, struck))
        wrong = verdict(case, reports, clean[case.scenario, case.size], struck, hung, options.timeout + options.grace)
        if wrong:
            bad.append(str(case))
        if wrong or options.verbose:
            print(f"{'WRONG ' if wrong else ''}{case}: {'; '.join(wrong) or 'as expected'}", flush=True)
            for rank, report in enumerate(reports):
                for call, kind, text, when in report.results:
                    if kind == "error":
                        print(f"    rank {rank}, {call}, {when - (struck or when):.2f} s: {text[:400]}", flush=True)
    _table(counts)
    total = sum(sum(c.values()) for c in counts.values())
    took = time.monotonic() - started
    print(f"{total} runs, {len(bad)} wrong, slowest report {seconds:.1f} s (timeout {options.timeout:g} s), in {took:.0f} s")
    if options.json:
        print(json.dumps({"runs": total, "wrong": bad, "slowest_s": round(seconds, 2), "counts": {k: dict(v) for k, v in counts.items()}}))
    return 1 if bad else 0


def _table(counts: dict[str, Counter[str]]) -> None:
    short = {kind: kind for kind in (*POINT_KINDS, *CABLE_KINDS, SKIP, REORDER, DIVERGE)} | {LATE: "late", CATCH: "catch"}
    print("".join([f"{'':14}", *(f"{name:>9}" for name in short.values())]))
    for scenario, by_kind in counts.items():
        print("".join([f"{scenario:14}", *(f"{by_kind[kind]:9}" for kind in short)]))


if __name__ == "__main__":
    try:
        code = main()
    except InRank as forked:
        code = forked.rank()
    sys.exit(code)
