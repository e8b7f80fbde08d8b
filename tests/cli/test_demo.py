"""`longspan demo` and `longspan warm`: what is started or compiled, and what is printed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

import longspan as ls
from longspan._training import demo_ranks, launch
from longspan._training.demo_ranks import DemoSizes, StrategyResult
from longspan.cli import demo, warm
from longspan.cli.app import run


@pytest.mark.parametrize(
    ("options", "gpus", "rank", "processes", "sizes"),
    [
        ("", 0, False, 4, (16384, 4, 2, 32)),
        ("--tokens 320 --processes 5 --heads 6/3 --dim 8", 0, False, 5, (320, 6, 3, 8)),
        ("--processes 5", 3, False, 3, (16384, 4, 2, 32)),
        ("--processes 2", 3, False, 2, (16384, 4, 2, 32)),
        ("--processes 5", 3, True, 5, (16384, 4, 2, 32)),
    ],
)
def test_a_demo_starts_at_most_a_process_per_gpu(
    options: str, gpus: int, rank: bool, processes: int, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(launch, "is_rank", lambda: rank)
    monkeypatch.setenv("WORLD_SIZE", "5")
    calls: list[Any] = []
    monkeypatch.setattr(launch, "run_ranks", lambda *arguments: calls.append(arguments) or 3)
    assert run(["demo", *options.split()]) == 3
    assert calls == [(demo._rank, processes, DemoSizes(**dict(zip(("tokens", "heads", "kv_heads", "dim"), sizes, strict=True))))]


def test_a_demo_needs_64_tokens_per_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--tokens", "319", "--processes", "5"]) == 2
    assert capsys.readouterr().err == "longspan demo: --tokens: expected at least 64 per process for 5 processes, got 319\n"


def result(error: float, gradients: float) -> StrategyResult:
    return StrategyResult(
        strategy="ring", layout="head_tail", error=error, error_gradients=gradients, balance=1.0625, received=1.5 * 2**20,
        memory=3.25 * 2**20, seconds=0.125,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rank", "errors", "code"),
    [(0, (9e-5, 2e-7), 0), (0, (2e-7, 9e-5), 0), (0, (1e-4, 0.0), 1), (0, (0.0, 2e-4), 1), (0, (float("nan"), 0.0), 1), (1, (1.0, 1.0), 0)],
)
def test_rank_0_prints_a_table_and_fails_if_a_strategy_differs(
    rank: int, errors: tuple[float, float], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 3)
    sizes, cpu = DemoSizes(tokens=2000, heads=6, kv_heads=3, dim=8), torch.device("cpu")
    made = {(cpu, sizes): (2.5, [] if rank else [result(1e-7, 1e-6), result(*errors)])}
    monkeypatch.setattr(demo_ranks, "on_rank", lambda *arguments: made[arguments])
    assert demo._rank(cpu, sizes) == code
    out = capsys.readouterr().out
    if rank:
        assert out == ""
        return
    lines = out.splitlines()
    assert lines[0].startswith("2,000 tokens in 9 packed documents of ") and lines[0].endswith(
        f" to {max(sizes.lengths()):,}, over 3 processes; 6 query heads over 3 KV heads of 8"
    )
    assert f"of {min(sizes.lengths()):,} to" in lines[0] and lines[1] == ""
    assert lines[2].split("  ")[0] == "strategy" and lines[2].split()[-1] == "seconds" and lines[3].split() == ["one", "process", "2.50"]
    row = ["ring", "head_tail", "1.0e-07", "1.0e-06", "1.062", "1.5", "MiB", "3.2", "MiB", "0.12"]
    assert lines[4].split() == row and len({len(line) for line in lines[2:6]}) == 1
    assert any(line.startswith("error: relative to one process.") and line.endswith(" that a rank receives in a") for line in lines)
    worst = "results differ from one process: relative error "
    assert lines[-1].startswith(worst) if code else lines[-1] == "every strategy matches one process, forward and backward"
    if code and errors[0] == errors[0]:
        assert lines[-1] == f"{worst}{max(errors):.1e}"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_demo_on_gpus_computes_in_full_float32(device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 3)
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=True))
    seen: list[bool] = []
    monkeypatch.setattr(demo_ranks, "on_rank", lambda *_: seen.append(torch.backends.cuda.matmul.allow_tf32) or (1.0, []))
    assert demo._rank(torch.device(device), DemoSizes(tokens=2000, heads=6, kv_heads=3, dim=8)) == 0
    assert seen == [device == "cpu"] and f"over 3 {'processes' if device == 'cpu' else 'GPUs'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "mask", "length", "given"),
    [
        ("", "causal", 8192, (32, 8, 128, 128, 1, torch.bfloat16, True, "auto")),
        (
            "--mask full --tokens 1k --heads 6/3 --dim 64/96 --batch 5 --dtype float16 --forward-only --kernel triton",
            "full", 1024, (6, 3, 64, 96, 5, torch.float16, False, "triton"),
        ),
    ],
)  # fmt: skip
def test_kernels_are_compiled_for_the_options(
    options: str, mask: str, length: int, given: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(warm, "time", SimpleNamespace(perf_counter=iter((10.0, 12.25)).__next__))
    calls: list[Any] = []
    monkeypatch.setattr(ls, "warm", lambda made, tokens, **sizes: calls.append((str(made), tokens, sizes)) or 7)
    assert run(["warm", *options.split()]) == 0
    names = ("heads", "kv_heads", "head_dim", "value_dim", "batch", "dtype", "backward", "kernel")
    assert calls == [(str(getattr(ls, mask)()), length, dict(zip(names, given, strict=True)))]
    assert capsys.readouterr().out == "7 kernels in 2.2 s, in Triton's cache\n"


def test_a_call_that_cannot_be_compiled_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*_: Any, **__: Any) -> int:
        raise ValueError("no such kernel")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ls, "warm", fails)
    assert run(["warm"]) == 2 and capsys.readouterr().err == "longspan warm: no such kernel\n"
    assert run(["warm", "--dtype", "int8"]) == 2
    assert capsys.readouterr().err == "longspan warm: --dtype: expected one of bfloat16, float16, float32, got 'int8'\n"
