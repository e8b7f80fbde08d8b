"""The sorting of racecheck's reports: known kinds are counted, anything else fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kernels.racecheck_filter import SOURCE, places, sort

NUMBERS, HANDED = places()
END = "========= RACECHECK SUMMARY: {} hazards displayed ({} errors, 0 warnings)"


def line_of(file: str, text: str) -> int:
    """The number of the first line of a file that contains this."""
    return next(i for i, line in enumerate((SOURCE / file).read_text(encoding="utf-8").splitlines(), 1) if text in line)


def report(first: tuple[str, int], *others: tuple[str, int]) -> list[str]:
    return [
        f"========= Error: Race reported between Write access at forward_kernel+0xe120 in {first[0]}:{first[1]}",
        *(f"=========     and Read access at forward_kernel+0xae0 in {name}:{number} [20 hazards]" for name, number in others),
    ]


WROTE = ("barriers.py", line_of("barriers.py", "numbers.index(i).store("))
READ = ("barriers.py", line_of("barriers.py", "numbers.index(i).load("))
KERNEL = ("backward_dkv.py", line_of("backward_dkv.py", "def keys_kernel("))
STARTS = ("backward_dkv.py", line_of("backward_dkv.py", "gl.warp_specialize(["))
BRANCH = (
    "backward_dkv.py",
    next(n for n in range(STARTS[1], 0, -1) if (SOURCE / "backward_dkv.py").read_text().splitlines()[n - 1] == "    if DQ:"),
)
OTHER = ("tile_io.py", line_of("tile_io.py", "gl.store("))


def test_both_known_kinds_are_counted() -> None:
    lines = [*report(WROTE, READ, READ), *report(KERNEL, STARTS, BRANCH), "some case (64, 64)", END.format(2, 2)]
    assert sort(lines, places()) == ({NUMBERS: 1, HANDED: 1}, [])


@pytest.mark.parametrize("places_", [(OTHER, OTHER), (WROTE, OTHER), (WROTE, KERNEL), (KERNEL, READ)], ids=str)
def test_a_report_of_another_place_or_of_two_kinds_is_wrong(places_: tuple[tuple[str, int], ...]) -> None:
    counts, wrong = sort([*report(*places_), END.format(1, 1)], places())
    assert not counts and len(wrong) == 1 and f"{places_[-1][0]}:{places_[-1][1]}" in wrong[0]


@pytest.mark.parametrize("end", ["", END.format(1, 5), END.format(2, 2)], ids=["no end", "cut off", "not read"])
def test_a_list_that_is_not_whole_is_wrong(end: str) -> None:
    assert len(sort([*report(WROTE, READ), end], places())[1]) == 1


def test_no_reports_are_right(tmp_path: Path) -> None:
    assert sort([END.format(0, 0)], places()) == ({}, [])
    assert all(not found for found in places(tmp_path).values())
