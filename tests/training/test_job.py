"""A training job and the demo on one rank: what a step reports, when checkpoints are saved, the rate's schedule and peaks of GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import longspan as ls
from longspan._training import demo_ranks, job, launch
from longspan._training.corpus import corpus
from longspan._training.decoder import DecoderConfig, flops_per_token

CPU = torch.device("cpu")


@pytest.fixture
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def job_in(folder: Path, **options: Any) -> job.Job:
    model = DecoderConfig(width=16, layers=1, heads=4, kv_heads=2)
    settings: dict[str, Any] = {"steps": 5, "length": 90, "batch": 3, "warmup": 2, "save_every": 3, "strategy": "ring"}
    return job.Job(out=str(folder), model=model, **settings | options)


@pytest.mark.parametrize(("rank", "size", "started"), [("1", "6", True), ("1", None, False), (None, "6", False), (None, None, False)])
def test_a_process_is_a_rank_if_it_has_both_a_rank_and_a_size(
    rank: str | None, size: str | None, started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", size)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert launch.is_rank() is started and launch.world_size(3) == (6 if started else 3)


@pytest.mark.usefixtures("_one_rank")
def test_a_job_reports_every_step_and_saves_every_third_and_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "peak_flops", lambda device: 7e12)
    made: list[job.StepResult] = []
    first = job_in(tmp_path, steps=5, half=True)
    assert job.train(CPU, first, made.append) == 0
    assert [result.step for result in made] == [0, 1, 2, 3, 4]
    assert all(4.0 < result.loss < 7.0 for result in made)  # log(257) = 5.5
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000003", "step-000005"]
    pairs = sum(int((b["position_ids"] + 1).sum()) for b in job._batch(first, corpus(None, length=90, seed=0), 2)) / (3 * 90)
    assert 1 < pairs < 46
    for result in (made[2],):
        assert result.tokens_per_second == 3 * 90 / result.seconds and result.memory_bytes > 1e6
        assert result.flops == pytest.approx(3 * 90 * flops_per_token(first.model, pairs) / result.seconds)
        assert result.mfu == result.flops / 7e12

    again: list[job.StepResult] = []
    assert job.train(CPU, replace(first, resume=True, from_step=3, half=False), again.append) == 0
    assert [result.step for result in again] == [3, 4] and [result.mfu for result in again] == [None, None]
    assert again[0].loss == pytest.approx(made[3].loss, rel=0.02)  # bfloat16 and float32


def test_the_rate_warms_up_linearly_and_decays_by_a_cosine_to_a_tenth() -> None:
    settings = job_in(Path("unused"), steps=10, warmup=4)
    factors = [job._schedule(step, settings) for step in (0, 1, 3, 4, 7, 10, 13)]
    assert factors == pytest.approx([0.25, 0.5, 1.0, 1.0, 0.1 + 0.9 / 2, 0.1, 0.1])
    assert job._schedule(5, settings) == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 6)))
    assert job._schedule(4, job_in(Path("unused"), steps=2, warmup=3)) == pytest.approx(0.1)  # ends before the warm-up does


def test_the_first_name_that_a_gpu_contains_gives_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {
        "NVIDIA GB200": 2500e12,
        "NVIDIA B200": 2250e12,
        "NVIDIA H200 NVL": 835e12,
        "NVIDIA H200": 989e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
    }
    for name, peak in {**peaks, "NVIDIA H100 PCIe": 756e12, "NVIDIA H100 80GB HBM3": 989e12, "GeForce RTX 2080": None}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert job.peak_flops(torch.device("cuda", 0)) == peak
    assert job.peak_flops(CPU) is None


@pytest.mark.usefixtures("_one_rank")
def test_the_demo_compares_every_strategy_and_counts_float32() -> None:
    sizes = demo_ranks.DemoSizes(tokens=300, heads=6, kv_heads=2, dim=8)
    seconds, results = demo_ranks.on_rank(CPU, sizes)
    assert seconds > 0 and [r.strategy.split(":")[0] for r in results] == list(demo_ranks.STRATEGIES)
    assert sum(sizes.lengths()) == 300 and max(r.error for r in results) < 1e-6 and max(r.error_gradients for r in results) < 1e-5
    plan = ls.plan(sizes.mask(), 300, dist.group.WORLD, strategy="ring", heads=6, kv_heads=2, head_dim=8)
    ring = next(r for r in results if r.strategy == "ring")
    assert ring.memory == 2 * sum(plan.report().memory_parts.values()) and (ring.received, ring.balance) == (0, 1)
