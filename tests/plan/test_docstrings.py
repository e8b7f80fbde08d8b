"""The examples in the docstrings of the public planning API."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest

MODULES = ("_planner.planning", "_planner.plan", "_planner.plan_set", "_plan.layout", "_plan.schedule")


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_run(module: str) -> None:
    results = doctest.testmod(import_module(f"longspan.{module}"))
    assert results.attempted > 0 and results.failed == 0
