"""Examples of trainers: four processes train as one does. Each needs a package that may be missing, and `--whole-grid`."""

from __future__ import annotations

import importlib
import warnings

import pytest

pytest.importorskip("transformers")


pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("example", "package"),
    [
        ("trl_dpo", "trl"),
        ("lightning_cp", "lightning"),
        ("accelerate_cp", "accelerate"),
        ("torchtitan_cp", "torchtitan.trainer"),
        ("hybrid", "transformers"),
    ],
)
def test_twenty_steps_on_four_processes_equal_one_process(example: str, package: str, pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--whole-grid"):
        pytest.skip("starts four processes: run with --whole-grid")
    pytest.importorskip(package)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert importlib.import_module(f"examples.{example}").difference() < 1e-5
