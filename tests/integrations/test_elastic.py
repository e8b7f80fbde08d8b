"""`longspan train` under torchrun: a killed rank leads to a restart from the newest intact checkpoint, with the same losses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

from tests.integrations.test_train import SMALL, children, command, losses, wait_for

pytestmark = pytest.mark.processes


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_killed_rank_restarts_from_the_newest_checkpoint_with_the_same_losses(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--whole-grid"):
        pytest.skip("starts processes twice: run with --whole-grid")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(whole, "--processes", "2"), check=True, timeout=280, capture_output=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        [*torchrun, "-m", "longspan.cli", "train", "--out", str(killed), *SMALL],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        wait_for(lambda: len(losses(killed)) >= 7 or job.poll() is not None, "seven steps")
        os.kill(children(job.pid)[-1], signal.SIGKILL)
        _, said = job.communicate(timeout=280)
    finally:
        job.kill()
    assert job.returncode == 0, said.decode()[-2000:]
    assert max(abs(a - b) for a, b in zip(losses(whole), losses(killed), strict=True)) < 1e-6
