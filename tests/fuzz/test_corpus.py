"""Cases that were wrong once are right now. Each tile size runs in a process of its own: it needs other constants in longspan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.json"))
TILES = sorted({json.loads(path.read_text())["tile"] for path in CORPUS})


@pytest.mark.parametrize("tile", TILES)
def test_cases_that_were_wrong_once_equal_the_oracle(tile: int) -> None:
    cases = [str(path) for path in CORPUS if json.loads(path.read_text())["tile"] == tile]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root / 'src'}:{root}"}
    command = [sys.executable, "-m", "tests.fuzz", "--keep", "--replay", *cases]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1])["cases"] == len(cases)
