"""`longspan train`: the job of a command line, its usage errors, and what rank 0 prints and writes."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from longspan._training import checkpoints, launch
from longspan._training import job as training
from longspan._training.corpus import VOCAB
from longspan._training.decoder import DecoderConfig
from longspan._training.job import Job, StepResult
from longspan.cli import train
from longspan.cli.app import run


class Started:
    """Runs `longspan train` in tmp_path; records what would be started, which ends with exit code `code`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.calls: list[tuple[Any, int, Job, int]] = []
        self.code, self.out, self.text = 0, folder / "made" / "run", folder / "text"
        self.text.mkdir()
        (self.text / "a.py").write_text("import this\n" * 2000)
        for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 11)
        monkeypatch.setattr(launch, "run_ranks", self._run_ranks)

    def _run_ranks(self, fn: Any, processes: int, job: Job, *, threads: int) -> int:
        self.calls.append((fn, processes, job, threads))
        return self.code

    def __call__(self, *options: str) -> int:
        return run(["train", "--out", str(self.out), "--data", str(self.text), *options])


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    return Started(monkeypatch, tmp_path)


def test_a_job_has_the_defaults_of_the_options(started: Started, capsys: Any) -> None:
    assert started() == 0 and capsys.readouterr() == ("", "") and started.out.is_dir()
    model = DecoderConfig(vocab=VOCAB, width=128, layers=2, heads=4, kv_heads=2, head_dim=32, hidden=336, recompute=False)
    job = Job(
        out=str(started.out), model=model, data=str(started.text), steps=100, length=2048, batch=2, context=4, rate=3e-3, save_every=50,
        seed=0, half=False, strategy="auto", resume=False, from_step=None,
    )  # fmt: skip
    assert started.calls == [(train._rank, 4, job, 2)]


def test_a_job_has_the_options(started: Started) -> None:
    options = "--steps 7 --tokens 1k --batch 6 --cp 2 --processes 6 --width 12 --layers 3 --heads 6/3 --strategy ring --rate 0.5"
    assert started(*options.split(), "--save-every", "9", "--seed", "5", "--recompute") == 0
    model = DecoderConfig(vocab=VOCAB, width=12, layers=3, heads=6, kv_heads=3, head_dim=2, hidden=32, recompute=True)
    job = Job(
        out=str(started.out), model=model, data=str(started.text), steps=7, length=1024, batch=6, context=2, rate=0.5, save_every=9,
        seed=5, half=False, strategy="ring", resume=False, from_step=None,
    )  # fmt: skip
    assert started.calls == [(train._rank, 6, job, 1)]


@pytest.mark.parametrize(
    ("width", "heads", "hidden"), [(4, "2", 16), (6, "1", 16), (7, "1", 0), (22, "1", 48), (18, "3", 48), (18, "2", 0)]
)
def test_hidden_units_are_8_thirds_of_the_width_in_multiples_of_16(
    width: int, heads: str, hidden: int, started: Started, capsys: Any
) -> None:
    code = started("--width", str(width), "--heads", heads)
    assert [job.model.hidden for _, _, job, _ in started.calls] == ([hidden] if hidden else [])
    wrong = f"longspan train: --width: expected a multiple of twice the {heads} heads, got {width}\n"
    assert (code, capsys.readouterr().err) == ((0, "") if hidden else (2, wrong))


@pytest.mark.parametrize(("threads", "processes", "each"), [(11, 5, 2), (10, 5, 2), (9, 5, 1), (3, 4, 1), (0, 1, 1), (7, 1, 7)])
def test_threads_are_divided_among_the_processes(
    threads: int, processes: int, each: int, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert started("--processes", str(processes), "--cp", str(processes)) == 0
    assert [call[1::2] for call in started.calls] == [(processes, each)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--rate 0", "--rate: expected a number above 0 such as 3e-3, got 0.0"),
        ("--rate inf", "--rate: expected a number above 0 such as 3e-3, got inf"),
        ("--rate=-1", "--rate: expected a number above 0 such as 3e-3, got -1.0"),
        ("--from-step 3", "--from-step: expected together with --resume"),
        ("--from-step 0 --resume", "--from-step: expected a number of 1 or more such as 8192, 64k or 1M, got '0'"),
        ("--steps 0", "--steps: expected a number"),
        ("--tokens x", "--tokens: expected a number"),
        ("--batch 0", "--batch: expected a number"),
        ("--save-every 0", "--save-every: expected a number"),
        ("--layers 0", "--layers: expected a number"),
        ("--cp 0", "--cp: expected a number"),
        ("--width 0", "--width: expected a number"),
        ("--cp 3", "--cp: 4 processes cannot be divided into groups of 3"),
        ("--cp 1", "--batch: 2 sequences cannot be divided among 4 groups"),
        ("--strategy pigeon", "pigeon"),
        ("--tokens 3 --strategy ring", "--tokens: 3 tokens are too few for 4 processes"),
        ("--data missing", "--data: "),
        ("--resume", "--resume: "),
    ],
)
def test_wrong_options_start_no_process(options: str, message: str, started: Started, capsys: Any) -> None:
    code = started(*options.split())
    assert (code, started.calls) == (2, []) and not started.out.exists()
    assert (error := capsys.readouterr().err).startswith("longspan train: ") and message in error and error.count("\n") == 1


def test_a_folder_with_checkpoints_needs_resume(started: Started, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (started.out / "step-000003").mkdir(parents=True)
    asked: list[tuple[bool, int | None]] = []
    monkeypatch.setattr(training, "check_resume", lambda job, text: asked.append((job.resume, job.from_step)))
    assert started() == 2 and started.calls == []
    message = f"--out: {started.out} contains checkpoints; give --resume to continue from them, or another directory"
    assert capsys.readouterr().err == f"longspan train: {message}\n"
    assert started("--resume") == started("--resume", "--from-step", "1k") == 0
    assert asked[1:] == [(job.resume, job.from_step) for _, _, job, _ in started.calls] == [(True, None), (True, 1024)]


@pytest.mark.parametrize(
    ("restarts", "step", "expected"), [("1", 7, (True, 7)), ("2", None, (False, None)), ("0", 7, None), (None, 7, None)]
)
def test_a_restarted_job_continues_from_the_newest_intact_checkpoint(
    restarts: str | None, step: int | None, expected: Any, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    (started.out / "step-000007").mkdir(parents=True)
    monkeypatch.setattr(training, "check_resume", lambda job, text: None)
    monkeypatch.setattr(checkpoints, "newest_intact", lambda out: None if step is None else SimpleNamespace(step=step))
    if restarts is not None:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    code = started()
    got = [(job.resume, job.from_step) for _, _, job, _ in started.calls]
    assert (code, got) == ((2, []) if expected is None else (0, [expected]))


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_only_rank_0_prints_a_usage_error_but_every_rank_exits_with_2(
    rank: str, lines: int, started: Started, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    assert started("--rate", "nan") == 2 and capsys.readouterr().err.count("\n") == lines


@pytest.mark.parametrize(("code", "is_rank", "printed"), [(130, False, True), (130, True, False), (3, False, False)])
def test_an_interrupted_job_says_how_to_continue(
    code: int, is_rank: bool, printed: bool, started: Started, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started.code = code
    if is_rank:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
    assert started("--processes", "2") == code
    assert capsys.readouterr().err == (f"interrupted; continue with --resume --out {started.out}\n" if printed else "")
    assert started.calls[0][2].context == 2


def test_a_folder_that_cannot_be_used_is_a_usage_error(started: Started, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train.os, "access", lambda path, mode: (Path(path), mode) != (started.out, train.os.W_OK))
    assert started() == 2 and capsys.readouterr().err == f"longspan train: --out: no permission to write into {started.out}\n"
    started.out.rmdir()
    started.out.write_text("")
    assert started() == 2 and capsys.readouterr().err == f"longspan train: --out: {started.out} cannot be created: File exists\n"


def result(step: int, loss: float, **other: Any) -> StepResult:
    sizes = {"tokens_per_second": 12345.6, "seconds": 0.25, "memory_bytes": 3 << 29, "flops": 7.891e9, "mfu": None}
    return StepResult(step=step, loss=loss, **(sizes | other))


def job_of(folder: Path, steps: int) -> Any:
    return SimpleNamespace(out=str(folder), steps=steps, length=640, context=3)


@pytest.mark.parametrize(
    ("first", "steps", "shown"),
    [
        (0, 35, [1, 10, 20, 30, 35]),
        (4, 12, [5, 10, 12]),
        (0, 220, [1, *range(11, 221, 11)]),
        (0, 219, [1, *range(10, 219, 10), 219]),
    ],
)
def test_about_20_lines_are_printed_where_there_is_no_terminal(
    first: int, steps: int, shown: list[int], tmp_path: Path, capsys: Any
) -> None:
    progress = train._Progress(job_of(tmp_path, steps), "cpu")
    progress.bar = None
    for step in range(first, steps):
        progress(result(step, 2.5))
    text = "loss 2.5000  12,346 tokens/s  7.89 GFLOP/s  1.5 GiB"
    assert capsys.readouterr().out == "".join(f"step {n}/{steps}  {text}\n" for n in shown)


class Figure:
    """Records what would be drawn."""

    def __init__(self, **options: Any) -> None:
        self.options, self.drawn = options, []  # type: tuple[dict[str, Any], list[Any]]
        FIGURES.append(self)

    def subplots(self) -> Figure:
        return self

    def plot(self, x: Any, y: Any) -> None:
        self.drawn.append((x, y))

    def set(self, **labels: str) -> None:
        self.drawn.append(labels)

    def savefig(self, path: Path, *, dpi: int) -> None:
        width, height = self.options["figsize"]
        self.drawn.append((path, width * dpi, height * dpi))


FIGURES: list[Figure] = []


@pytest.mark.parametrize("installed", [True, False])
def test_losses_before_the_resumed_step_stay_in_the_file_and_in_the_curve(
    installed: bool, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", SimpleNamespace(Figure=Figure) if installed else None)
    FIGURES.clear()
    path = tmp_path / "losses.csv"
    path.write_text("step,loss,seconds\n" + "".join(f"{step},{9 - step}.5,0.5\n" for step in range(2, 6)))  # of an earlier version
    with train._Progress(job_of(tmp_path, 6), "cuda:0") as progress:
        progress(result(4, 3.25, mfu=0.4567))
        progress(result(5, 2.125, memory_bytes=0))
    rows = list(csv.reader(io.StringIO(path.read_text())))
    assert rows == [
        ["step", "loss", "tokens_per_second", "seconds", "memory_bytes", "flops", "mfu"],
        ["2", "7.5", "", "0.5", "", "", ""],
        ["3", "6.5", "", "0.5", "", "", ""],
        ["4", "3.25", "12345.6", "0.25", str(3 << 29), "7891000000.0", "0.4567"],
        ["5", "2.125", "12345.6", "0.25", "0", "7891000000.0", ""],
    ]
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "step 5/6  loss 3.2500  12,346 tokens/s  MFU 45.7%  1.5 GiB"
    assert out[1] == "step 6/6  loss 2.1250  12,346 tokens/s  7.89 GFLOP/s  0.0 GiB"
    assert out[2].split()[0] == "7.5" and out[-2].endswith("└──── loss, steps 3 to 6")
    files = "checkpoints, losses.csv and losses.png" if installed else "checkpoints and losses.csv"
    assert out[-1] == f"last loss 2.1250; {files} in {tmp_path}"
    labels = {"xlabel": "step", "ylabel": "loss per byte (nats)", "title": "640 tokens over 3 processes, cuda:0"}
    drawn = [figure.drawn for figure in FIGURES]
    assert drawn == ([[([3, 4, 5, 6], [7.5, 6.5, 3.25, 2.125]), labels, (tmp_path / "losses.png", 720, 420)]] if installed else [])


def test_a_job_without_a_step_prints_nothing(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with train._Progress(job_of(tmp_path, 6), "cpu"):
        pass
    assert capsys.readouterr().out == "" and not any(tmp_path.iterdir())


def test_a_terminal_shows_a_bar(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    class Bar:
        def __init__(self, *columns: Any, console: Any) -> None:
            assert len(columns) == 4 and console.stderr

        def add_task(self, text: str, total: int) -> int:
            done.append((text, total))
            return 17

        def start(self) -> None:
            done.append("start")

        def update(self, task: int, *, completed: int, description: str) -> None:
            done.append((task, completed, description.split("  ")[0]))

        def stop(self) -> None:
            done.append("stop")

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("rich.console.Console", lambda *, stderr: SimpleNamespace(is_terminal=True, stderr=stderr))
    monkeypatch.setattr("rich.progress.Progress", Bar)
    with train._Progress(job_of(tmp_path, 2), "cpu") as progress:
        progress(result(0, 4.0))
        progress(result(1, 3.5))
    assert done == [("", 2), "start", (17, 1, "loss 4.0000"), (17, 2, "loss 3.5000"), "stop"]
    assert not capsys.readouterr().out.startswith("step")


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_shows_progress(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    calls: list[Any] = []
    monkeypatch.setattr(training, "train", lambda *arguments: calls.append(arguments) or 5)
    job = job_of(tmp_path, 2)
    assert train._rank(torch.device("cpu"), job) == 5
    assert calls[0][:2] == (torch.device("cpu"), job) and [type(x) for x in calls[0][2:]] == [train._Progress][rank:]
