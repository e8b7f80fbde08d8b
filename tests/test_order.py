"""The order of tests over workers: every test runs once; tests that start processes run first, on the first worker."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import pytest
from tests.conftest import in_order


class Item:
    def __init__(self, number: int, marker: str | None) -> None:
        self.number, self.marker = number, marker

    def get_closest_marker(self, name: str) -> bool | None:
        return self.marker == name or None


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize(("tests", "processes", "long"), [(100, 10, 7), (9, 6, 2), (3, 3, 0), (5, 0, 5), (1, 0, 0), (0, 0, 0)])
def test_every_test_has_one_place_and_the_first_worker_those_that_start_processes(
    tests: int, processes: int, long: int, workers: int
) -> None:
    markers = ["processes"] * processes + ["long"] * long + [None] * (tests - processes - long)
    items = [Item(number, markers[number * 7 % tests]) for number in range(tests)]  # 7 divides none of the counts: a permutation
    ordered = cast(Any, in_order(cast(list[pytest.Item], items), workers))
    assert sorted(item.number for item in ordered) == list(range(tests))
    assert all(item.marker == "processes" for item in ordered[:processes])
    assert all(a.number < b.number for a, b in pairwise(ordered[:processes]))
    if tests == 100 and workers > 1:
        share = tests // workers
        later = [ordered[worker * share : (worker + 1) * share] for worker in range(1, workers)]
        assert all(share[0].marker == "long" for share in later) and ordered[processes].marker is None
