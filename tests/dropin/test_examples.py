"""The examples, which check themselves, run over loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(("name", "said"), [("flex_attention_cp.py", "gradient of score_mod  matches"), ("sdpa_cp.py", "ulysses    loss")])
def test_an_example_prints_that_all_matches(name: str, said: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*torchrun, str(EXAMPLES / name)], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def test_the_example_of_many_devices_matches_for_a_short_sequence_too(capsys: Any, pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--whole-grid"):
        pytest.skip("starts processes for what other tests cover: run with --whole-grid")
    from examples.many_devices import main

    main([83, 21, 3, 57], ranks=2)
    assert "ulysses  " in (said := capsys.readouterr().out) and "all match" in said
