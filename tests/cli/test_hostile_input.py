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


def test_an_empty_file_of_samples_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lengths").write_text(" \n")
    assert run(["plan", "--tokens-per-gpu", "500", "--samples", str(tmp_path / "lengths")]) == 2
    assert f"--samples: {tmp_path}/lengths"[:80] in (error := capsys.readouterr().err) and "the file has none" in error


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
    assert result.stderr.startswith("longspan plan: out of memory; give a smaller --tokens"), result.stderr


NO_PLAN = {
    "--serve --context 262144G --gpus 16": "no plan for --context 281474976710656, --batch 1, --gpus 16: out of memory",
    "--samples 262144G --tokens-per-gpu 262144G": "no plan for --samples '262144G', --tokens-per-gpu 262144G: out of memory",
    "--samples 1k*3 --tokens-per-gpu 8k --heads 281474976710656 --dim 262144G": "--tokens-per-gpu 8k: OverflowError: int too big",
    "--tokens 262144G": "--tokens 262144G, --gpus 8: out of memory",
}


@pytest.mark.parametrize("options", NO_PLAN)
def test_sizes_out_of_range_name_the_options_that_were_given(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *options.split()]) == 2
    error = capsys.readouterr().err
    assert NO_PLAN[options] in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "advice"), [("--context 2k", "a smaller --context"), ("--context=2k", "a smaller --context"), ("", "smaller sizes")]
)
def test_out_of_memory_names_the_size_that_was_given(
    arguments: str, advice: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def exhausted(*_: Any, **__: Any) -> int:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("longspan._training.launch.world_size", exhausted)
    assert run(["generate", *arguments.split()]) == 1
    assert capsys.readouterr().err == f"longspan generate: out of memory; give {advice}, or more memory to this process\n"
