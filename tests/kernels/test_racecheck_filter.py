"""The filter of racecheck's reports counts known kinds and fails at any other report."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kernels.racecheck_filter import SOURCE, classify_reports, known_lines

MESSAGES, STATES, ARGUMENTS, VOTES = known_lines()
SUMMARY = "========= RACECHECK SUMMARY: {} hazards displayed ({} errors, 0 warnings)"


def line_of(file: str, text: str) -> int:
    """The number of the first line of a file that contains a text."""
    return next(i for i, line in enumerate((SOURCE / file).read_text(encoding="utf-8").splitlines(), 1) if text in line)


def report(first: tuple[str, int], *others: tuple[str, int]) -> list[str]:
    return [
        f"========= Error: Race reported between Write access at forward_kernel+0xe120 in {first[0]}:{first[1]}",
        *(f"=========     and Read access at forward_kernel+0xae0 in {name}:{number} [20 hazards]" for name, number in others),
    ]


STORE = ("pipeline.py", line_of("pipeline.py", "ints.index(i).store("))
LOAD = ("pipeline.py", line_of("pipeline.py", "ints.index(i).load("))
KERNEL = ("backward_dkv.py", line_of("backward_dkv.py", "def dkv_kernel("))
CALL = ("backward_dkv.py", line_of("backward_dkv.py", "gl.warp_specialize("))
BRANCH = (
    "backward_dkv.py",
    next(n for n in range(CALL[1], 0, -1) if (SOURCE / "backward_dkv.py").read_text().splitlines()[n - 1] == "    if DQ:"),
)
VOTE = ("warp_votes.py", line_of("warp_votes.py", "votes.index(i).store("))
VOTE_ALIKE = ("warp_votes.py", line_of("warp_votes.py", "votes.index(i).store(gl.reshape(x,"))
STATE = ("state_mover.py", line_of("state_mover.py", "lse_s.index(group).store("))
MERGE = ("forward.py", line_of("forward.py", "lse_s.index(group).load("))
UNKNOWN = ("tile_io.py", line_of("tile_io.py", "gl.store("))


def test_known_kinds_are_counted() -> None:
    accesses = [(STORE, LOAD, LOAD), (VOTE, LOAD), (STATE, MERGE, MERGE), (KERNEL, CALL, BRANCH), (VOTE_ALIKE, KERNEL, LOAD)]
    lines = [*(line for one in accesses for line in report(*one)), "some case (64, 64)", SUMMARY.format(5, 5)]
    assert classify_reports(lines, known_lines()) == ({MESSAGES: 2, STATES: 1, ARGUMENTS: 1, VOTES: 1}, [])


@pytest.mark.parametrize("first", ["", f" in pipeline.py:{LOAD[1]}"], ids=["no line", "a known line"])
def test_a_report_without_a_line_of_the_source_is_a_problem(first: str) -> None:
    lines = [
        f"========= Error: Race reported between Write access at forward_kernel+0xe120{first}",
        "=========     and Read access at forward_kernel+0x20 [16 hazards]",
    ]
    counts, problems = classify_reports([*lines, SUMMARY.format(1, 1)], known_lines())
    assert not counts and "no line" in problems[0]


@pytest.mark.parametrize(
    "accesses",
    [(UNKNOWN, UNKNOWN), (STORE, UNKNOWN), (STORE, KERNEL), (KERNEL, LOAD), (STATE, LOAD), (VOTE, MERGE), (KERNEL, VOTE)],
    ids=str,
)
def test_reports_of_unknown_lines_or_of_two_kinds_are_problems(accesses: tuple[tuple[str, int], ...]) -> None:
    counts, problems = classify_reports([*report(*accesses), SUMMARY.format(1, 1)], known_lines())
    assert not counts and len(problems) == 1 and f"{accesses[-1][0]}:{accesses[-1][1]}" in problems[0]


@pytest.mark.parametrize("summary", ["", SUMMARY.format(1, 5), SUMMARY.format(2, 2)], ids=["missing", "truncated", "not all read"])
def test_truncated_lists_are_problems(summary: str) -> None:
    assert len(classify_reports([*report(STORE, LOAD), summary], known_lines())[1]) == 1


def test_no_reports_are_no_problem(tmp_path: Path) -> None:
    assert classify_reports([SUMMARY.format(0, 0)], known_lines()) == ({}, [])
    assert all(not first and not others for first, others in known_lines(tmp_path).values())
