"""`longspan train`: train a small transformer on text, with sequences split over processes."""

from __future__ import annotations

import contextlib
import csv
import functools
import math
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from longspan.cli import parse
from longspan.cli.app import UsageError


def _printed_once(command: Callable[..., int]) -> Callable[..., int]:
    """The command, with usage errors under torchrun printed by rank 0 only; every rank exits with code 2."""

    @functools.wraps(command)
    def wrapped(**options: Any) -> int:
        try:
            return command(**options)
        except UsageError:
            if int(os.environ.get("RANK", 0)):
                return 2
            raise

    return wrapped


@_printed_once
def train(
    out: Annotated[Path, typer.Option(help="directory for checkpoints, losses and the curve")] = Path("longspan-run"),
    data: Annotated[
        Path | None, typer.Option(help="text file or directory of text files; default: the sources of Python's standard library")
    ] = None,
    steps: Annotated[str, typer.Option(help="optimizer steps")] = "100",
    tokens: Annotated[str, typer.Option(help="tokens of a sequence: 2048, 64k (k = 1024)")] = "2k",
    batch: Annotated[str, typer.Option(help="sequences per step")] = "2",
    cp: Annotated[str | None, typer.Option(help="processes per sequence; default: all")] = None,
    processes: Annotated[str | None, typer.Option(help="processes to start; under torchrun, its processes are used")] = None,
    width: Annotated[str, typer.Option(help="width of the model")] = "128",
    layers: Annotated[str, typer.Option(help="layers of the model")] = "2",
    heads: Annotated[str, typer.Option(help="query heads, or query/KV heads")] = "4/2",
    strategy: Annotated[str, typer.Option(help="how KV move between ranks: auto, ring, allgather, exchange, ulysses")] = "auto",
    rate: Annotated[float, typer.Option(help="learning rate")] = 3e-3,
    save_every: Annotated[str, typer.Option(help="steps between checkpoints")] = "50",
    seed: Annotated[int, typer.Option(help="seed of the weights and of the order of documents")] = 0,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="activation checkpointing: recompute layers in backward, for less memory")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="continue from the newest checkpoint in --out")] = False,
    from_step: Annotated[str | None, typer.Option(help="with --resume: the step whose checkpoint to continue from")] = None,
) -> int:
    """Train a small decoder on packed documents.

    The decoder has RoPE, GQA and SwiGLU; FSDP2 shards its weights, context parallelism the sequences. Uses CUDA and NCCL if available.
    Ctrl-C writes a checkpoint; --resume continues from it, on any number of processes. When torchrun restarts the job (--max-restarts), it
    continues from the newest intact checkpoint. A rank that waits for another for longer than LONGSPAN_TIMEOUT seconds (600) raises and
    names it.
    """
    q_heads, kv_heads = parse.heads(heads)
    wide = parse.count(width, "--width")
    if wide % q_heads or wide // q_heads % 2:
        raise UsageError(f"--width: expected a multiple of twice the {q_heads} heads, got {wide}")
    if not 0 < rate < math.inf:
        raise UsageError(f"--rate: expected a number above 0 such as 3e-3, got {rate}")
    parse.seed(seed)
    sizes = {"width": wide, "layers": parse.count(layers, "--layers"), "heads": q_heads, "kv_heads": kv_heads}
    counts = {"steps": parse.count(steps, "--steps"), "length": parse.count(tokens, "--tokens"), "batch": parse.count(batch, "--batch")}
    counts["save_every"] = parse.count(save_every, "--save-every")
    sequence_ranks = None if cp is None else parse.count(cp, "--cp")
    process_count = None if processes is None else parse.processes(processes)
    if from_step is not None and not resume:
        raise UsageError("--from-step: expected together with --resume")
    step = None if from_step is None else parse.count(from_step, "--from-step")

    import torch

    from longspan._training import launch
    from longspan._training.checkpoints import newest_intact
    from longspan._training.corpus import VOCAB, corpus
    from longspan._training.decoder import DecoderConfig
    from longspan._training.job import Job, check_ranks, check_resume

    started = process_count or launch.default_processes()
    ranks = launch.world_size(started)
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    if restarted and (checkpoint := newest_intact(out)) is not None:
        resume, step = True, checkpoint.step
    try:
        model = DecoderConfig(
            vocab=VOCAB, head_dim=wide // q_heads, hidden=-(-wide * 8 // 3) // 16 * 16 or 16, recompute=recompute, **sizes
        )
        job = Job(
            out=str(out), model=model, data=None if data is None else str(data), context=sequence_ranks or ranks, rate=rate, seed=seed,
            half=torch.cuda.is_available(), strategy=strategy, resume=resume, from_step=step, **counts,
        )  # fmt: skip
        check_ranks(job, ranks)
        check_strategy(job, ranks)
        text = _with_option("--data", corpus, job.data, length=job.length, seed=seed)
        check_resume(job, text)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if not resume and not restarted and any(out.glob("step-*")):
        raise UsageError(f"--out: {out} contains checkpoints; give --resume to continue from them, or another directory")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: {out} cannot be created: {error.strerror}") from None
    if not os.access(out, os.W_OK):
        raise UsageError(f"--out: no permission to write into {out}")
    code = launch.run_ranks(_rank, started, job, threads=max(1, (torch.get_num_threads() or 1) // started))
    if code == launch.INTERRUPTED and not launch.is_rank():
        print(f"interrupted; continue with --resume --out {out}", file=sys.stderr)
    return code


def check_strategy(job: Any, ranks: int) -> None:
    """Plan a sequence as rank 0 would, so that errors of the plan are raised before any process starts."""
    import longspan as ls

    sizes = {"heads": job.model.heads, "kv_heads": job.model.kv_heads}
    plan = ls.plan(ls.causal(), job.length, ls.Mesh.abstract(job.context), strategy=job.strategy, batch=1, **sizes)
    if min(plan.layout.local_len(r) for r in range(job.context)) == 0:
        raise ValueError(f"--tokens: {job.length} tokens are too few for {job.context} processes")


def _with_option(option: str, fn: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return fn(*args, **kwargs)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def _rank(device: Any, job: Any) -> int:
    import torch.distributed as dist

    from longspan._training.job import train as run

    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\..*")
    if dist.get_rank():
        return run(device, job)
    with _Progress(job, str(device)) as progress:
        return run(device, job, progress)


_COLUMNS = ("step", "loss", "tokens_per_second", "seconds", "memory_bytes", "flops", "mfu")  # of losses.csv: the fields of a StepResult


class _Progress:
    """Output of rank 0: a progress bar on a terminal, at most about 20 lines in a file; losses.csv and losses.png."""

    def __init__(self, job: Any, device: str) -> None:
        self.job, self.device = job, device
        self.path = Path(job.out) / "losses.csv"
        self.rows: list[dict[str, Any]] = []
        self.first = True

    def __enter__(self) -> _Progress:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self.bar = Progress(*columns, console=console) if console.is_terminal else None
        if self.bar is not None:
            self.task = self.bar.add_task("", total=self.job.steps)
            self.bar.start()
        return self

    def __call__(self, step: Any) -> None:
        if self.first:
            self._keep_earlier(step.step)
        self.rows.append(asdict(step))
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerow(asdict(step).values())
        speed = f"{step.flops / 1e9:.3g} GFLOP/s" if step.mfu is None else f"MFU {step.mfu:.1%}"
        text = f"loss {step.loss:.4f}  {step.tokens_per_second:,.0f} tokens/s  {speed}  {step.memory_bytes / 2**30:.1f} GiB"
        if self.bar is not None:
            self.bar.update(self.task, completed=step.step + 1, description=text)
        elif self.first or (step.step + 1) % max(10, self.job.steps // 20) == 0 or step.step + 1 == self.job.steps:
            print(f"step {step.step + 1}/{self.job.steps}  {text}", flush=True)
        self.first = False

    def _keep_earlier(self, step: int) -> None:
        """Keep the losses of the resumed run before `step`."""
        if self.path.exists():
            with self.path.open(newline="") as file:
                self.rows = [row for row in csv.DictReader(file) if int(row["step"]) < step]
        with self.path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(_COLUMNS)
            writer.writerows([row.get(name, "") for name in _COLUMNS] for row in self.rows)

    def __exit__(self, *_: Any) -> None:
        from longspan._report.terminal import curve

        if self.bar is not None:
            self.bar.stop()
        files = "checkpoints and losses.csv"
        with contextlib.suppress(ImportError):
            self._curve()
            files = "checkpoints, losses.csv and losses.png"
        if self.rows:
            print(curve([float(row["loss"]) for row in self.rows], label="loss", first=int(self.rows[0]["step"]) + 1))
            print(f"last loss {float(self.rows[-1]['loss']):.4f}; {files} in {self.job.out}", flush=True)

    def _curve(self) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 3.5), layout="constrained")
        axes = figure.subplots()
        axes.plot([int(r["step"]) + 1 for r in self.rows], [float(r["loss"]) for r in self.rows])
        axes.set(
            xlabel="step", ylabel="loss per byte (nats)", title=f"{self.job.length} tokens over {self.job.context} processes, {self.device}"
        )
        figure.savefig(self.path.with_suffix(".png"), dpi=120)
