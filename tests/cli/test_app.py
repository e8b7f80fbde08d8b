"""Exit codes of commands, devices, and what `longspan generate` starts and prints."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

import typer

from longspan._training import launch
from longspan.cli import app, parse
from longspan.cli.app import UsageError, run
from longspan.cli.generate import _Output


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (typer.Exit(), 0, ""),
        (typer.Exit(3), 3, ""),
        (SystemExit(4), 4, ""),
        (SystemExit(None), 0, ""),
        (typer.Abort(), 130, "longspan plan: interrupted\n"),
        (KeyboardInterrupt(), 130, "longspan plan: interrupted\n"),
        (UsageError("two\n  lines"), 2, "longspan plan: two lines\n"),
        (typer.BadParameter("no such size"), 2, "longspan plan: Invalid value: no such size\n"),
    ],
)
def test_the_end_of_a_command_is_its_exit_code(
    raised: BaseException, code: int, said: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(arguments: list[str], *, standalone_mode: bool) -> Any:
        assert arguments == ["plan", "--gpus"] and not standalone_mode
        raise raised

    monkeypatch.setattr(app, "application", lambda commands: ends if commands == ["plan"] else None)
    assert run(["plan", "--gpus"]) == code
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: not enough memory"), RuntimeError("out of memory")])
@pytest.mark.parametrize(
    ("options", "advice"),
    [(["--tokens", "9"], "a smaller --tokens"), (["--gpus=2", "--context=9"], "a smaller --context"), (["--tokenss=9"], "smaller sizes")],
)
def test_too_little_memory_is_exit_code_1_with_advice(
    error: Exception, options: list[str], advice: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(app, "application", lambda commands: ends)
    assert run(["plan", *options]) == 1 and app.describe(error) == "out of memory"
    assert capsys.readouterr().err == f"longspan plan: out of memory; give {advice}, or more memory to this process\n"


def test_other_errors_of_a_command_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(app, "application", lambda commands: ends)
    with pytest.raises(RuntimeError, match="a mistake"):
        run(["plan"])
    texts = {
        RuntimeError("x"): "RuntimeError: x",
        KeyError(): "KeyError",
        ValueError("y"): "y",
        ValueError(): "ValueError",
        OSError("z"): "z",
    }
    assert {error: app.describe(error) for error in texts} == texts and app.describe(FileNotFoundError(2, "No such file")) == "No such file"


def test_without_a_command_the_help_is_printed_with_exit_code_2(capsys: Any) -> None:
    assert run([]) == 2
    out, err = capsys.readouterr()
    assert all(name in out + err for name in app.COMMANDS)


@pytest.mark.parametrize(("available", "expected"), [(True, "cuda:2"), (False, "cpu")])
def test_the_device_is_the_gpu_if_there_is_one(available: bool, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert parse.device("auto") == torch.device(expected) and parse.device("cpu") == torch.device("cpu")
    if available:
        assert parse.device("cuda") == torch.device("cuda", 2)
    else:
        with pytest.raises(UsageError, match="--device: torch finds no CUDA device here"):
            parse.device("cuda")


# ---------------------------------------------------------------------------------------------------------------------- generate

DEFAULTS = {
    "checkpoint": None, "prompt": None, "tokens": 256, "temperature": 0.0, "seed": 0, "new_tokens": 64, "chunk": 4096, "page_size": 64,
    "kv_dtype": None,
}  # fmt: skip


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `longspan generate` would start: (device, request) of one process, or the arguments of `run_ranks`."""
    calls: list[Any] = []
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(launch, "run_ranks", lambda *args, **options: calls.append((*args, options)) or 5)
    monkeypatch.setattr("longspan.cli.generate._generate", lambda *args: calls.append(args) or 0)
    return calls


def test_one_process_generates_on_the_current_gpu_or_the_cpu(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(["generate"]) == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    options = "--context 1k --new 7 --chunk 33 --temperature 0.5 --page-size 64k --kv-dtype fp8 --seed -3"
    assert run(["generate", *options.split()]) == 0
    given = {
        **DEFAULTS,
        "tokens": 1024,
        "new_tokens": 7,
        "chunk": 33,
        "temperature": 0.5,
        "page_size": 65536,
        "kv_dtype": torch.float8_e4m3fn,
        "seed": -3,
    }
    assert started == [(torch.device("cpu"), DEFAULTS), (torch.device("cuda", 2), given)]


@pytest.mark.parametrize(("threads", "processes", "each"), [(11, 5, 2), (10, 5, 2), (9, 5, 1), (3, 4, 1), (0, 2, 1)])
def test_processes_that_generate_divide_the_threads(
    threads: int, processes: int, each: int, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert run(["generate", "--processes", str(processes), "--prompt", "one two"]) == 5
    ((rank, count, request, options),) = started
    assert (count, request, options) == (processes, {**DEFAULTS, "prompt": "one two"}, {"threads": each}) and callable(rank)


@pytest.mark.parametrize("good", ["0", "0.01", "1", "1000"])
@pytest.mark.parametrize("bad", ["0.009", "1000.5", "-1", "nan", "inf"])
def test_temperatures_are_0_or_from_a_hundredth_to_1000(good: str, bad: str, started: list[Any], capsys: Any) -> None:
    assert run(["generate", f"--temperature={good}"]) == 0 and started[0][1]["temperature"] == float(good)
    assert run(["generate", f"--temperature={bad}"]) == 2 and len(started) == 1
    assert f"--temperature: expected 0, or a number from 0.01 to 1000, got {float(bad)}\n" in capsys.readouterr().err


class Stream(io.StringIO):
    """Text that is flushed is in `flushed`."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal, self.flushed = terminal, ""

    def isatty(self) -> bool:
        return self.terminal

    def flush(self) -> None:
        self.flushed = self.getvalue()


@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize("progress", [True, False])
@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_at_once_on_a_terminal(shown: bool, progress: bool, terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = Stream(terminal=terminal), Stream(terminal=progress)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    tokenizer = SimpleNamespace(decode=lambda tokens, skip_special_tokens: "".join(f"w{t} " for t in tokens) if skip_special_tokens else "")
    output = _Output(tokenizer, 9, 2, shown=shown)
    lines: list[str] = []

    def said() -> str:
        """What is new on stderr."""
        new = err.flushed[sum(map(len, lines)) :]
        lines.append(new)
        return new

    clear = "\r\x1b[K" if shown and progress else ""
    output.prefilled(3)
    assert said() == (f"{clear}prefill 3/9" if clear else "")
    output.decoded(5)
    assert out.flushed == ("w5 " if shown else "")
    beside = f"{clear}decode 1/2" if clear and not terminal else ""
    assert said() == clear + beside, "the line is cleared before text begins"
    output.decoded(6)
    assert said() == beside.replace("1/2", "2/2")
    output.end("4 tokens/s")
    assert out.flushed == ("w5 w6 \n" if shown else "") and said() == (f"{clear}4 tokens/s\n" if shown else "")
