"""A covering sample of `make test-faults`: every kind of fault, each in another scenario."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="forks, and looks for processes in /proc")
def test_a_sample_of_faults_ends_with_errors_in_time_and_no_wrong_number() -> None:
    # No timed test: the machine may be busy.
    command = [sys.executable, *"-m tests.faults --covering --ranks 3 --timeout 4 --grace 60 --json".split()]
    command += ["--scenarios", "ring", "exchange", "ulysses", "unshard", "drop_in", "checkpoint"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["src", ".", os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    counts = json.loads(run.stdout.splitlines()[-1])
    assert counts["wrong"] == [] and counts["runs"] == 9
