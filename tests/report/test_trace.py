"""Events of the predicted timeline: names of steps, ranks and threads, and times in microseconds."""

from __future__ import annotations

from typing import Any

import pytest

import longspan as ls
from longspan._report.trace import events


def reported(**options: Any) -> Any:
    return ls.plan(ls.causal(), 2048, ls.Mesh.abstract(3), layout="contiguous", heads=4, head_dim=64, **options).report()


def names_of(report: Any, prefix: str, rank: int) -> list[str]:
    """Names of a pass's compute events on a rank, in order."""
    made = [e for e in events(report) if e["ph"] == "X" and e["pid"] == rank and e["name"].startswith(prefix)]
    computed = [e for e in made if "compute" in e["name"] or "pack" in e["name"]]
    return [e["name"].removeprefix(prefix) for e in sorted(computed, key=lambda e: e["ts"])]


def test_the_last_compute_step_of_backward_is_the_second_part_of_local_kv() -> None:
    report = reported(strategy="ring")
    assert report.data.schedule.steps == (range(2),)  # both stages of so short a ring are one step
    assert names_of(report, "backward: ", 2) == ["compute step 0", "compute step 1", "compute local KV, second part"]
    assert names_of(report, "forward: ", 2) == ["compute step 0", "compute step 1"]


@pytest.mark.parametrize(("overlap", "first"), [(False, "pack local KV"), (True, "compute step 0")])
def test_local_kv_is_packed_where_nothing_overlaps(overlap: bool, first: str) -> None:
    assert names_of(reported(strategy="allgather", overlap=overlap), "forward: ", 2)[0] == first


def test_backward_begins_where_forward_ends() -> None:
    report = reported(strategy="ring")
    made = [e for e in events(report) if e["ph"] == "X"]
    ends = {p: max(e["ts"] + e["dur"] for e in made if e["name"].startswith(p)) for p in ("forward", "backward")}
    assert ends["forward"] == pytest.approx(1e6 * report.timeline.forward.seconds, abs=0.01)
    assert min(e["ts"] for e in made if e["name"].startswith("backward")) == pytest.approx(ends["forward"], abs=0.01)
    assert ends["backward"] == pytest.approx(1e6 * report.seconds, abs=0.01)
