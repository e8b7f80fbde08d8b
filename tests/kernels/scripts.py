"""Scripts of this folder that compile kernels, each in a process of its own without Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_script(name: str, config: pytest.Config) -> None:
    """Run a script; it fails if the script does. With --whole-grid, it compiles kernels that its record has, too."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(Path(__file__).with_name(name)), *["--anew"] * config.getoption("--whole-grid")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def run_hopper_script(name: str, config: pytest.Config) -> None:
    """`run_script` where this Triton can compile the Hopper kernels."""
    pytest.importorskip("triton.experimental.gluon")
    from longspan._kernels.hopper.kernel import unsupported_triton

    if (reason := unsupported_triton()) is not None:
        pytest.skip(reason)
    run_script(name, config)
