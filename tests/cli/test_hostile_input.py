"""Input that is no input: special files, too little memory. One line, and an exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from longspan.cli.app import run


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("kind", ["fifo", "directory", "missing"])
@pytest.mark.parametrize("option", ["--tokens 1000 --mask documents({})", "--tokens-per-gpu 500 --samples {}"])
def test_a_lengths_file_that_is_no_file_raises_without_opening_it(option: str, kind: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "lengths"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    assert run(["plan", "--gpus", "2", *option.format(path).split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and option.split()[2] in error and path.name in error


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_cluster_file_that_is_a_pipe_raises_without_opening_it(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "cluster.toml"
    os.mkfifo(path)
    assert run(["plan", "--tokens", "1000", "--gpus", "2", "--cluster", str(path)]) == 2
    assert "expected a regular file" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_too_little_memory_is_one_line() -> None:
    script = (
        "import resource, torch; resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
        "from longspan.cli.app import run\n"
        "raise SystemExit(run(['plan', '--tokens', '1G', '--gpus', '2', '--mask', 'documents([1073741824])']))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 1 and result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("longspan plan: out of memory; give fewer --tokens"), result.stderr
