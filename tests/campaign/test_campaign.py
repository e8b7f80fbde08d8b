"""The runner of campaigns counts every case once, whatever happens to its processes; groups of GPU cases share kernels."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.campaign import __main__ as runner
from tests.campaign.kinds import CALLS_MEMBERS, Campaign, Right
from tests.fuzz import mods
from tests.fuzz.__main__ import GPU_PART
from tests.fuzz.cases import draw, ulysses_fits
from tests.fuzz.groups import MEMBERS

# Checks a seed by its last digits: 3 dies, 5 is wrong, 7 never ends, 2 compiles for long; all others are right.
WORKER = """
import json, os, sys, time
say = lambda **event: print(json.dumps(event), flush=True)
say(idle=True)
for line in sys.stdin:
    name, first, count = json.loads(line)
    for seed in range(first, first + count):
        say(begin=seed)
        if seed % 20 == 3: os._exit(9)
        if seed % 20 == 7: time.sleep(60)
        if seed % 20 == 2:
            say(compiling=1)
            time.sleep(1.0)
            say(compiling=0)
        outcome = {"outcome": "wrong", "text": "value"} if seed % 20 == 5 else {"outcome": "right", "families": [f"parity {seed % 2}"]}
        say(end=seed, seconds=0.0, compiled=[], comparisons=1, **outcome)
    say(idle=True)
"""


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, target: int, seconds: float, first: int = 0) -> Any:
    """The report of a run of one campaign in groups of 4 with two processes."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    monkeypatch.setattr(runner, "COMMAND", [sys.executable, str(script)])
    monkeypatch.setattr(runner, "HANGS_S", 0.6)
    counts = runner.Counts("some", Campaign(target, 4, 4, 1, lambda seed, device: Right(set())), first)
    options = argparse.Namespace(device="cpu", jobs=2, seconds=seconds, out=tmp_path)
    it = runner.Run(options, {"some": counts})
    it.loop()
    report = it.reports()[0]
    it.close()
    return report


def test_cases_that_die_hang_or_are_wrong_are_counted_and_the_rest_of_their_groups_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    report = run(tmp_path, monkeypatch, target=14, seconds=60.0)
    assert (report["cases"], report["groups"], report["not_run"], report["in_flight"]) == (14, 4, 0, [])
    wrong = {case["seed"]: case["text"] for case in report["wrong_cases"]}
    assert set(wrong) == {3, 5, 7}
    assert "exit code 9" in wrong[3] and wrong[5] == "value" and "hangs" in wrong[7]
    assert report["families"] == {"parity 0": [7, 4], "parity 1": [4, 3]}
    assert len((tmp_path / "cases.jsonl").read_text().splitlines()) == 14


def test_a_run_that_is_cut_off_reports_what_ended_and_what_was_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run(tmp_path, monkeypatch, target=4, seconds=1.3, first=40)
    assert report["first"] == 40 and report["cases"] + report["not_run"] == 4
    assert all(one["state"] in ("compiling", "running") for one in report["in_flight"])


def test_a_run_whose_processes_do_not_start_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "COMMAND", [sys.executable, "-c", "raise SystemExit(5)"])
    counts = runner.Counts("some", Campaign(8, 4, 4, 1, lambda seed, device: Right(set())), 0)
    it = runner.Run(argparse.Namespace(device="cpu", jobs=2, seconds=60.0, out=tmp_path), {"some": counts})
    with pytest.raises(RuntimeError, match="before their first case: died with exit code 5"):
        it.loop()
    it.close()


def texts(spec: Any) -> list[str]:
    return [leaf.get("text", leaf["op"]) for leaf in mods.leaves(spec or {"op": "full"})]


@pytest.mark.parametrize("group", range(40, 60))
def test_members_of_a_group_share_programs_and_differ_in_sizes(group: int) -> None:
    cases = [draw(seed, 128, device="cuda") for seed in range(group * MEMBERS, group * MEMBERS + 20)]
    compiled = ("entry", "kernel", "dtype", "dim", "value_dim", "lse", "through", "needs", "invariant")
    assert len({tuple(case[name] for name in compiled) for case in cases}) == 1
    if cases[0].get("form") != "float":  # SDPA's float mask is a table of the call's sizes
        assert len({(*texts(case["mask"]), (case["score"] or {}).get("text")) for case in cases}) == 1
    assert len({(case["q_len"], case["kv_len"], case["batch"], case["heads"]) for case in cases}) > 10
    assert cases[3] == draw(group * MEMBERS + 3, 128, device="cuda")


@pytest.mark.parametrize("group", [91001216 // MEMBERS, *range(60, 90)])  # the first: strategy "auto" over axes named ulysses and ring
def test_heads_of_members_fit_a_ulysses_axis(group: int) -> None:
    for seed in range(group * MEMBERS, group * MEMBERS + 10):
        case = draw(seed, 128, device="cuda")
        mesh = case.get("mesh") or {"names": None, "strategy": ""}
        if "ulysses" in (mesh["names"] or ()) or mesh["strategy"].startswith("ulysses"):
            degree = mesh["shape"][(mesh["names"] or ["ulysses"]).index("ulysses")]
            assert ulysses_fits(degree, case["heads"], case["kv_heads"])


def test_runners_know_the_size_of_groups_of_calls() -> None:
    assert GPU_PART % MEMBERS == 0
    assert CALLS_MEMBERS == MEMBERS


def test_without_time_for_new_groups_the_count_is_reached_with_more_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "TAIL_S", 1000.0)
    counts = runner.Counts("some", Campaign(22, 16, 3, 1, lambda seed, device: Right(set())), 0)
    it = runner.Run(argparse.Namespace(device="cpu", jobs=2, seconds=60.0, out=tmp_path), {"some": counts})
    given: list[tuple[int, int]] = []

    class Taker:
        def __init__(self) -> None:
            self.groups: dict[str, set[int]] = {"some": set()}

        def give(self, name: str, first: int, count: int) -> None:
            given.append((first, count))

    stopped: list[Any] = []
    monkeypatch.setattr(it, "stop", stopped.append)
    first, second = Taker(), Taker()
    it.begin_group(first, counts)  # type: ignore[arg-type]
    for worker in (first, second, second, first):
        it.next(worker)  # type: ignore[arg-type]
    assert given == [(0, 3), (3, 10), (13, 3), (16, 3), (19, 3)]
    it.next(first)  # type: ignore[arg-type]
    assert stopped == [first]
    it.close()


def test_a_group_compiles_its_kernels_once() -> None:
    script = """
from tests.kernels_of_calls import pretend_gpu
kernels = pretend_gpu()
from tests.fuzz.cases import draw
from tests.fuzz.groups import MEMBERS
from tests.fuzz.harness import run

counts = []
for seed in range(208 * MEMBERS, 208 * MEMBERS + 8):
    run({**draw(seed, 128, device="cuda"), "device": "cpu"})
    counts.append(len(kernels))
print(counts[0], counts[-1])
"""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", script], cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    first, last = map(int, done.stdout.split())
    assert 1 <= first <= last <= first + 3
