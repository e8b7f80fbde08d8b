"""`python -m tests.faults.saves`: training jobs whose rank is killed while it saves a checkpoint, then resumed.

Every start must find the newest checkpoint intact, or none if the first save was struck. The losses must be those of a job that nobody
killed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from tests.faults.inject import KILL, Fault, Injector
from tests.faults.rank import prepare
from tests.faults.supervisor import Case, InRank, Report, Supervisor

from longspan._training import job as jobs
from longspan._training.checkpoints import checkpoints
from longspan._training.corpus import VOCAB
from longspan._training.decoder import DecoderConfig

RANKS, STEPS, SAVE_EVERY = 2, 6, 1
MODEL = DecoderConfig(vocab=VOCAB, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, hidden=32)
SPREAD = 0.01  # seconds: a kill comes up to this long after its point


@dataclass(frozen=True, kw_only=True)
class TrainCase(Case):
    """A job with checkpoints in `out`. `delay`: from the point of the fault to the kill."""

    out: str
    resume: bool = False
    delay: float = 0.0


def rank_main(case: TrainCase, rank: int, folder: str, timeout: float, report: Callable[..., None]) -> int:
    """Train on this rank; count points in saves only."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=case.size, timeout=timedelta(seconds=timeout)
    )
    fault = case.fault if case.fault is not None and case.fault.victim == rank else None
    injector = _Killer(fault=fault, timeout=timeout, report=report)
    injector.delay = case.delay
    injector.install()
    injector.install_checkpoint_points()
    save = jobs.save

    def counted(*args: Any) -> None:
        injector.call = "save"
        save(*args)
        injector.call = None

    jobs.save = counted
    text = os.path.join(os.path.dirname(case.out), "text.txt")
    job = jobs.Job(
        out=case.out, model=MODEL, data=text, steps=STEPS, length=48, batch=1, context=case.size, save_every=SAVE_EVERY, resume=case.resume,
        strategy="exchange",
    )  # fmt: skip
    try:
        jobs.train(torch.device("cpu"), job, lambda s: report("value", str(s.step), repr(s.loss)))
    except BaseException as error:
        report("error", "train", f"{type(error).__name__}: {error}")
    report("end", injector.points)
    return 0


class _Killer(Injector):
    """Kills at a point, or shortly after it."""

    delay = 0.0

    def _strike(self, kind: str) -> None:
        self.report("fault", self.points[-1])
        threading.Timer(self.delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if not self.delay:
            time.sleep(1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.saves", description=__doc__)
    parser.add_argument("--chains", type=int, default=20, help="jobs")
    parser.add_argument("--rounds", type=int, default=5, help="kills of each job")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=6, help="runs at a time")
    parser.add_argument("--timeout", type=float, default=3.0, help="timeout of the process groups, in seconds; more on a busy machine")
    options = parser.parse_args()
    prepare()
    supervisor = Supervisor(rank_main, timeout=options.timeout)
    root = tempfile.mkdtemp(prefix="longspan-saves-")
    try:
        return _kills(supervisor, Path(root), options)
    except InRank:
        raise
    finally:
        if os.getpid() == PARENT:
            shutil.rmtree(root, ignore_errors=True)


PARENT = os.getpid()


def _kills(supervisor: Supervisor, root: Path, options: argparse.Namespace) -> int:
    """Kill every job `options.rounds` times, each time resumed from what the kill left, then let it end."""
    (root / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    (_, clean, _, _), *_ = supervisor.run([TrainCase(scenario="train", size=RANKS, out=str(root / "clean"))], 1)
    expected = _losses(clean)
    assert len(expected) == STEPS, clean
    draw, wrong, killed, resumed = random.Random(options.seed), list[str](), 0, 0
    curves: dict[str, dict[int, float]] = {str(root / f"job{i}"): {} for i in range(options.chains)}
    for turn in range(options.rounds + 1):
        cases = []
        for i, out in enumerate(curves):
            fault, victim = None, draw.randrange(RANKS)
            if turn < options.rounds:
                at = draw.randrange(len(clean[victim].points) * 3 // (2 * STEPS))  # in the first save, or early in the second
                fault = Fault(kind=KILL, victim=victim, at=at, name=clean[victim].points[at])
            has = bool(checkpoints(out))
            resumed += has
            delay = draw.uniform(0, SPREAD) if i % 2 else 0.0
            cases.append(TrainCase(scenario="train", size=RANKS, out=out, fault=fault, delay=delay, resume=has))
        for case, reports, struck, hung in supervisor.run(cases, options.jobs):
            errors = [text for report in reports for _, kind, text, _ in report.results if kind == "error"]
            struck_now = struck is not None and reports[case.fault.victim if case.fault else 0].exit_status == -signal.SIGKILL
            killed += struck_now
            curves[case.out] |= _losses(reports)
            damaged = [text for text in errors if "damaged" in text or "CheckpointError" in text]
            if hung or damaged or (errors and not struck_now):
                wrong.append(f"{case}: hung {hung}, errors {errors[:2]}")
        print(f"round {turn}: {killed} kills during a save, {resumed} starts from a checkpoint, {len(wrong)} wrong", flush=True)
    gaps = {out: max(abs(curve.get(step, 1e9) - loss) for step, loss in expected.items()) for out, curve in curves.items()}
    left = [str(p) for out in curves for p in Path(out).iterdir() if not p.name.startswith("step-")]
    wrong += [f"{out}: loss differs by {gap:g}" for out, gap in gaps.items() if gap > 1e-6] + [f"left behind: {path}" for path in left]
    for line in wrong:
        print("WRONG", line)
    print(f"{killed} kills, {resumed} starts from a checkpoint, {len(wrong)} wrong, loss gap at most {max(gaps.values()):.1e}")
    return 1 if wrong else 0


def _losses(reports: list[Report]) -> dict[int, float]:
    return {int(call): float(text) for call, kind, text, _ in reports[0].results if kind == "value"}


if __name__ == "__main__":
    try:
        code = main()
    except InRank as forked:
        code = forked.rank()
    sys.exit(code)
