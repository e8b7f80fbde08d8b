"""The cost model against published figures, and the page that lists every error."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.predictions import Case, cases, table

PAGE = Path(__file__).parents[2] / "docs" / "deep-dives" / "predictions.md"


@pytest.fixture(scope="module")
def compared() -> list[Case]:
    return cases()


def test_shares_of_ideal_and_causal_rates_are_within_15_percent(compared: list[Case]) -> None:
    tested = [c for c in compared if c.within is not None]
    assert len(tested) == 9
    assert not [(c.peer, c.scheme, c.hardware, f"{100 * c.off:+.1f} %") for c in tested if abs(c.off) > c.within]


@pytest.mark.parametrize("gpus", [8, 64])
def test_schemes_for_packed_documents_have_the_published_order(compared: list[Case], gpus: int) -> None:
    packed = [c for c in compared if c.within is None and c.gpus == gpus]
    by = [[c.scheme for c in sorted(packed, key=key)] for key in (lambda c: c.published, lambda c: c.predicted)]
    assert by[0] == by[1] == ["ring", "ulysses", "magi"]


def test_the_page_shows_every_case_with_its_current_prediction(compared: list[Case]) -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    shown = {tuple(row[:3]): float(row[5].rstrip(" %")) for row in rows[2:] if len(row) == 7}
    today = {(c.peer, c.scheme, c.hardware): 100 * c.off for c in compared}
    assert shown.keys() == today.keys() and len(table(compared).splitlines()) == len(compared) + 2
    assert {key for key in today if abs(shown[key] - today[key]) > 0.5} == set(), "run bench/predictions.py and put its table into the page"
