"""Attention over random caches equals the oracle."""

from __future__ import annotations

import pytest
from tests.cache.cases import Case


@pytest.mark.parametrize("first", range(0, 30, 10))
def test_random_caches_match_the_oracle(first: int, request: pytest.FixtureRequest) -> None:
    """10 seeds each; 2,010 in all with --whole-grid. More: `python -m tests.cache.cases --seconds N`."""
    step = 67 if request.config.getoption("--whole-grid") else 1
    for seed in range(first * step, (first + 10) * step):
        Case(seed).run()
