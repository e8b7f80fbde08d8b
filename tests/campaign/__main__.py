"""`python -m tests.campaign --jobs 16 --seconds 300`: the random campaigns on a GPU, side by side, until each has reached its count.

Groups of seeds share kernels. New groups begin as long as there is time to reach the counts with further members of compiled groups: the
more time and cores, the more groups.

Prints counts while it runs and one line of JSON per campaign at the end, also when it is cut off. Every case is a line of OUT/cases.jsonl
as soon as it ends. A case that runs for 300 s without compiling is wrong: it hangs. `--replay "calls 1234"` checks one case;
`python -m tests.fuzz --device cuda --first 1234 --cases 1` minimises one of the calls.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.campaign.kinds import Campaign, campaigns

HANGS_S = 300.0
SLOW_CASE_S, SLOW_GROUP_S = 0.25, 60.0  # a case without compiling, and compiling a group, before one was measured
TAIL_S, CHUNK = 25.0, 10  # time for the last cases to end; members of a compiled group that a worker takes at once
COMMAND = [sys.executable, "-m", "tests.campaign.worker"]  # of a worker, before the device
ROOT = Path(__file__).parents[2]


class Worker:
    """A worker process that checks cases, and its state."""

    def __init__(self, device: str, log: Path) -> None:
        environment = {"OMP_NUM_THREADS": "1", "TRITON_DISABLE_LINE_INFO": "1", **os.environ}  # line info: a quarter of the compile time
        environment["PYTHONPATH"] = f"{ROOT / 'src'}:{ROOT}:{environment.get('PYTHONPATH', '')}"
        if device == "cpu":
            environment["TRITON_INTERPRET"] = "1"
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [*COMMAND, device], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment
            )  # fmt: skip
        assert self.process.stdout is not None and self.process.stdin is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self.text = b""
        self.name = ""
        self.seed: int | None = None  # of the case in flight
        self.done, self.last = -1, -1  # seeds: the last one that ended, the last one to check
        self.begun, self.ran_s, self.compiling = 0.0, 0.0, 0
        self._since = time.monotonic()
        self.groups: dict[str, set[int]] = defaultdict(set)  # by campaign, groups of which it has kernels

    def give(self, name: str, first: int, count: int) -> None:
        self.name, self.seed, self.done, self.last = name, None, first - 1, first + count - 1
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it died: `Run.receive` notices
            self.process.stdin.write((json.dumps([name, first, count]) + "\n").encode())
            self.process.stdin.flush()

    def kill(self) -> None:
        assert self.process.stdout is not None and self.process.stdin is not None
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def events(self) -> list[dict[str, Any]]:
        """Events that arrived."""
        assert self.process.stdout is not None
        self.text += self.process.stdout.read() or b""
        *lines, self.text = self.text.split(b"\n")
        return [json.loads(line) for line in lines]

    def note(self, event: dict[str, Any]) -> None:
        """Follow begin and compiling; time in which a kernel compiles does not count as running."""
        self.clock()
        if "begin" in event:
            self.seed, self.begun, self.ran_s = event["begin"], time.monotonic(), 0.0
        self.compiling = event.get("compiling", self.compiling)

    def clock(self) -> float:
        """Seconds that the present case ran without compiling."""
        now = time.monotonic()
        if self.seed is not None and not self.compiling:
            self.ran_s += now - self._since
        self._since = now
        return self.ran_s if self.seed is not None else 0.0

    def state(self) -> dict[str, Any]:
        """For the report: the case in flight."""
        kind = "compiling" if self.compiling else "running"
        return {"seed": self.seed, "state": kind, "seconds": round(time.monotonic() - self.begun, 1), "ran_s": round(self.clock(), 1)}


class Counts:
    """The counts of one campaign."""

    def __init__(self, name: str, campaign: Campaign, first: int) -> None:
        self.name, self.campaign = name, campaign
        self.first_group = first // campaign.members
        self.begun: list[int] = []  # members that were given to workers, by group
        self.rest: list[tuple[int, int]] = []  # (first seed, count) that a worker left
        self.groups: set[int] = set()
        self.families: dict[str, list[Any]] = defaultdict(lambda: [0, set()])
        self.wrong: list[dict[str, Any]] = []
        self.cases = self.refused = self.comparisons = 0
        self.seconds = 0.0
        self.warm = [SLOW_CASE_S]  # seconds of cases that compiled nothing
        self.compiled: dict[str, list[float]] = defaultdict(list)  # seconds of each kernel, by name

    @property
    def left(self) -> int:
        """Seeds to begin."""
        return self.campaign.target - sum(self.begun) + sum(count for _, count in self.rest)

    @property
    def left_s(self) -> float:
        """Seconds that the cases left take one process if they compile nothing."""
        return (self.campaign.target - self.cases) * sum(self.warm) / len(self.warm)

    @property
    def group_s(self) -> float:
        """Seconds of compiling a group, at most: kernels may compile side by side."""
        return sum(map(sum, self.compiled.values())) / len(self.groups) if self.compiled else SLOW_GROUP_S

    def new_group(self) -> tuple[int, int]:
        """(first seed, count) of a new group."""
        self.begun.append(0)
        return self.more(len(self.begun) - 1, self.campaign.first)

    def more(self, group: int, count: int) -> tuple[int, int]:
        """(first seed, count) of the next members of a group."""
        count = min(count, self.campaign.members - self.begun[group], self.campaign.target - sum(self.begun))
        seed = (self.first_group + group) * self.campaign.members + self.begun[group]
        self.begun[group] += count
        return seed, count

    def fullest(self, groups: set[int]) -> int | None:
        """Of these groups, the one that has most members left; None if none has any."""
        best = max(groups, key=lambda g: -self.begun[g], default=None)
        return None if best is None or self.begun[best] == self.campaign.members else best

    def add(self, event: dict[str, Any]) -> None:
        group = event["end"] // self.campaign.members
        self.groups.add(group)
        self.cases += 1
        self.comparisons += event.get("comparisons", 0)
        self.refused += event["outcome"] == "refused"
        self.seconds += event.get("seconds", 0.0)
        if "seconds" in event and not event["compiled"]:
            self.warm.append(event["seconds"])
        for name, seconds in event.get("compiled", ()):
            self.compiled[name].append(seconds)
        if event["outcome"] == "wrong":
            self.wrong.append({"seed": event["end"], "text": event["text"]})
        for family in event.get("families", ()):
            self.families[family][0] += 1
            self.families[family][1].add(group)

    def report(self, in_flight: list[dict[str, Any]]) -> dict[str, Any]:
        """One line of JSON. By name, families: [cases, groups]; kernels: [number, seconds of compiling]."""
        return {
            "campaign": self.name, "cases": self.cases, "groups": len(self.groups), "wrong": len(self.wrong), "refused": self.refused,
            "not_run": max(0, self.campaign.target - self.cases), "comparisons": self.comparisons,
            "seconds": round(self.seconds, 1), "kernels": {n: [len(s), round(sum(s), 1)] for n, s in sorted(self.compiled.items())},
            "first": self.first_group * self.campaign.members, "warm_s": round(sum(self.warm) / len(self.warm), 3),
            "wrong_cases": self.wrong,
            "in_flight": in_flight, "families": {name: [n, len(g)] for name, (n, g) in sorted(self.families.items())},
        }  # fmt: skip


class Run:
    """Workers and counts of a whole run."""

    def __init__(self, options: argparse.Namespace, counts: dict[str, Counts]) -> None:
        self.options, self.counts = options, counts
        self.selector = selectors.DefaultSelector()
        self.workers: list[Worker] = []
        self.log = (options.out / "cases.jsonl").open("a")
        self.begin = self.told = time.monotonic()
        self.failed_starts = 0

    def start(self) -> None:
        worker = Worker(self.options.device, self.options.out / "workers.err")
        self.workers.append(worker)
        self.selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]

    def stop(self, worker: Worker) -> None:
        self.selector.unregister(worker.process.stdout)  # type: ignore[arg-type]
        self.workers.remove(worker)
        worker.kill()

    def close(self) -> None:
        """End all processes."""
        for worker in list(self.workers):
            self.stop(worker)
        self.selector.close()
        self.log.close()

    def loop(self) -> None:
        """Until every campaign has its count or the time is over."""
        for _ in range(self.options.jobs):
            self.start()
        while self.workers and time.monotonic() - self.begin < self.options.seconds:
            for key, _ in self.selector.select(timeout=0.5):
                self.receive(key.data)
            for worker in list(self.workers):
                if worker.clock() > HANGS_S:
                    self.lost(worker, f"hangs: ran for {worker.ran_s:.0f} s without compiling")
            if time.monotonic() - self.told > 10:
                self.tell()

    def receive(self, worker: Worker) -> None:
        for event in worker.events():
            worker.note(event)
            if "end" in event:
                self.end(worker, event)
            if "idle" in event:
                self.next(worker)
        if worker in self.workers and worker.process.poll() is not None:
            self.lost(worker, f"died with exit code {worker.process.returncode}")

    def end(self, worker: Worker, event: dict[str, Any]) -> None:
        worker.seed, worker.done = None, event["end"]
        self.counts[worker.name].add(event)
        self.log.write(json.dumps({"campaign": worker.name, **event}) + "\n")
        self.log.flush()
        if event["outcome"] == "wrong":
            print(f"WRONG {worker.name} {event['end']}: {event['text'][:300]}", file=sys.stderr, flush=True)

    def next(self, worker: Worker) -> None:
        """Give the worker a new group, or members of a group that it has compiled if only these are in time."""
        candidates = [c for c in self.counts.values() if c.left > 0]
        if not candidates:
            self.stop(worker)
            return
        waiting = next((c for c in candidates if c.rest), None)
        if waiting is not None:
            worker.give(waiting.name, *waiting.rest.pop())
            return
        for one in sorted(candidates, key=lambda c: len(c.begun) / c.campaign.groups):
            if self.has_time(one):
                self.begin_group(worker, one)
                return
        chosen = max(candidates, key=lambda c: c.left / c.campaign.target)
        group = chosen.fullest(worker.groups[chosen.name])
        if group is None:  # others have compiled it: the kernels are on disk
            group = chosen.fullest(set(range(len(chosen.begun))))
        if group is None:
            self.begin_group(worker, chosen)
        else:
            worker.groups[chosen.name].add(group)
            worker.give(chosen.name, *chosen.more(group, CHUNK))

    def begin_group(self, worker: Worker, chosen: Counts) -> None:
        worker.groups[chosen.name].add(len(chosen.begun))
        worker.give(chosen.name, *chosen.new_group())

    def has_time(self, new: Counts) -> bool:
        """Whether a group of this campaign may be compiled, and all counts reached without compiling after it."""
        left = self.options.seconds - (time.monotonic() - self.begin) - TAIL_S - new.group_s
        return sum(c.left_s for c in self.counts.values()) / self.options.jobs < left

    def lost(self, worker: Worker, why: str) -> None:
        """Count the case of a process that died or hangs, and give the rest of its group to another one."""
        self.stop(worker)
        if not worker.name:
            self.failed_starts += 1
            if self.failed_starts > self.options.jobs:
                raise RuntimeError(f"workers end before their first case: {why}; see {self.options.out / 'workers.err'}")
        if worker.seed is not None:
            self.end(worker, {"end": worker.seed, "outcome": "wrong", "text": why})
        if worker.done < worker.last:
            self.counts[worker.name].rest.append((worker.done + 1, worker.last - worker.done))
        self.start()

    def tell(self) -> None:
        self.told = time.monotonic()
        parts = [f"{c.name} {c.cases} in {len(c.groups)}, {len(c.wrong)} wrong" for c in self.counts.values()]
        compiling = sum(w.compiling > 0 for w in self.workers)
        print(f"{self.told - self.begin:4.0f} s: {'; '.join(parts)}; {compiling} compiling", file=sys.stderr, flush=True)

    def reports(self) -> list[dict[str, Any]]:
        by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for worker in self.workers:
            if worker.seed is not None:
                by_name[worker.name].append(worker.state())
        return [c.report(by_name[c.name]) for c in self.counts.values()]


def main() -> int:
    every = campaigns()
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes: most of the time is compiling")
    parser.add_argument("--seconds", type=float, default=300.0, help="time for the whole run")
    parser.add_argument("--first", type=int, default=0, help="first seed, rounded down to a group")
    parser.add_argument("--share", type=float, default=1.0, help="of every campaign's count")
    parser.add_argument("--only", type=lambda names: names.split(","), default=list(every), help="names of campaigns, by commas")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("build/campaign"))
    parser.add_argument("--replay", help='such as "calls 1234": check this case alone')
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.replay:
        from tests.campaign.worker import check

        name, seed = options.replay.rsplit(" ", 1)
        outcome = check(name, int(seed), options.device)
        print(json.dumps(outcome))
        return int(outcome["outcome"] == "wrong")
    counts = {n: Counts(n, every[n]._replace(target=round(every[n].target * options.share)), options.first) for n in options.only}
    run = Run(options, counts)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        run.loop()
    finally:  # also when a `timeout` ends this process
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        reports = run.reports()
        run.close()
        for report in reports:
            print(json.dumps(report), flush=True)
        (options.out / "counts.json").write_text(json.dumps(reports, indent=1) + "\n")
    return int(any(c.wrong for c in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
