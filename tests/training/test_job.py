"""A training job and the demo on one rank: what a step reports, when checkpoints are saved, the rate's schedule and peaks of GPUs."""

from __future__ import annotations

import itertools
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.testing._internal.distributed.fake_pg import FakeStore

import longspan as ls
from longspan._training import demo_ranks, job, launch
from longspan._training.checkpoints import Checkpoint
from longspan._training.corpus import Corpus, corpus
from longspan._training.decoder import Decoder, DecoderConfig, flops_per_token
from longspan.testing import oracle

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


def test_settings_of_a_job_have_defaults_and_an_identity_without_what_may_change() -> None:
    made = job.Job(out="x", model=DecoderConfig())
    assert (made.data, made.steps, made.length, made.batch, made.context, made.rate, made.warmup) == (None, 200, 2048, 2, 1, 3e-3, 10)
    assert (made.save_every, made.seed, made.half, made.strategy, made.resume, made.from_step) == (50, 0, False, "auto", False, None)
    text = Corpus(stream=torch.zeros(1), starts=torch.zeros(1), digest="abc")
    base = job_in(Path("x"), seed=4).identity(text)
    assert base["data"] == "abc" and "recompute" not in base
    assert {k: base[k] for k in ("width", "layers", "length", "batch", "seed")} == {
        "width": 16, "layers": 1, "length": 90, "batch": 3, "seed": 4,
    }  # fmt: skip
    assert job_in(Path("y"), seed=4, steps=99, context=7, rate=1.0, half=True, strategy="exchange").identity(text) == base


@pytest.mark.parametrize(
    ("ranks", "context", "batch", "message"),
    [
        (6, 3, 4, None),
        (6, 6, 5, None),
        (6, 1, 12, None),
        (6, 4, 4, "--cp: 6 processes cannot be divided into groups of 4 that share a sequence; use a divisor of 6"),
        (6, 3, 5, r"--batch: 5 sequences cannot be divided among 2 groups of processes \(6 processes, --cp 3\); use a multiple of 2"),
    ],
)
def test_ranks_divide_into_groups_and_sequences_among_groups(ranks: int, context: int, batch: int, message: str | None) -> None:
    settings = job_in(Path("unused"), context=context, batch=batch)
    if message is None:
        job.check_ranks(settings, ranks)
        return
    with pytest.raises(ValueError, match=message):
        job.check_ranks(settings, ranks)


def test_a_job_resumes_its_own_checkpoints_up_to_its_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Corpus(stream=torch.zeros(1), starts=torch.zeros(1), digest="abc")
    settings = job_in(tmp_path, resume=True, from_step=5)
    asked: list[Any] = []
    saved = Checkpoint(folder=tmp_path, step=5, identity=settings.identity(text), files={})
    monkeypatch.setattr(job, "pick", lambda out, step: asked.append((out, step)) or saved)
    assert job.check_resume(settings, text) is saved and asked == [(str(tmp_path), 5)]
    assert job.check_resume(replace(settings, resume=False), text) is None and len(asked) == 1
    with pytest.raises(ValueError, match="--resume: 5 steps are done, --steps asks for 4; give a larger --steps, or another --out"):
        job.check_resume(replace(settings, steps=4), text)
    with pytest.raises(ValueError, match=r"belongs to another model or job: batch 3 \(here 6\), seed 0 \(here 1\)$"):
        job.check_resume(replace(settings, batch=6, seed=1), text)


@pytest.mark.usefixtures("_one_rank")
def test_losses_are_those_of_adamw_with_clipped_gradients_and_the_schedule(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(chr(97 + i * i % 23) for i in range(700)))
    made: list[job.StepResult] = []
    settings = job_in(tmp_path / "out", data=str(tmp_path / "text.txt"), steps=6, rate=0.1, warmup=2, save_every=100, seed=3)
    assert job.train(CPU, settings, made.append) == 0

    text = corpus(tmp_path / "text.txt", length=90, seed=3)
    model = Decoder(settings.model).initialise(3)
    state = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()}
    want = []
    for step in range(6):
        rate = 0.1 * job._schedule(step, settings)
        sequences = [text.sequence(3 * step + row, 90) for row in range(3)]
        count = sum(int((s["shift_labels"] != -100).sum()) for s in sequences)
        model.zero_grad()
        total = torch.zeros(())
        for s in sequences:
            plan = ls.plan(ls.causal() & ls.documents(ids=s["document_ids"]), 90, ls.Mesh.abstract(1))
            logits = model(s["input_ids"], s["position_ids"], plan=plan)
            total = total + cross_entropy(logits[0], s["shift_labels"][0], reduction="sum") / count
        total.backward()
        want.append(float(total.detach()))
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in state if p.grad is not None))
        with torch.no_grad():
            for p, (first, second) in state.items():
                assert p.grad is not None
                grad = p.grad / max(1.0, norm + 1e-6)
                p.mul_(1 - 0.1 * rate)
                first.lerp_(grad, 0.1)
                second.lerp_(grad.square(), 0.05)
                p.sub_(rate * first / (1 - 0.9 ** (step + 1)) / ((second / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8))
    assert [result.loss for result in made] == pytest.approx(want, rel=2e-3)


@pytest.mark.usefixtures("_one_rank")
def test_an_interrupted_job_saves_the_step_it_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    saved: list[tuple[str, int]] = []

    def step(settings: Any, model: Any, optimizer: Any, text: Any, mesh: Any, number: int, sequences: range) -> float:
        steps.append(number)
        if number == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return 1.5

    monkeypatch.setattr(job, "_step", step)
    monkeypatch.setattr(job, "save", lambda out, number, *_: saved.append((out, number)))
    assert job.train(CPU, job_in(tmp_path, steps=9, save_every=4)) == launch.INTERRUPTED == 130
    assert (steps, saved) == ([0, 1], [(str(tmp_path), 2)])


@pytest.mark.parametrize(("rank", "sequences"), [(0, [0, 1]), (2, [0, 1]), (3, [2, 3]), (5, [2, 3])])
def test_groups_of_consecutive_ranks_share_sequences(
    rank: int, sequences: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    made: list[job.StepResult] = []

    def step(settings: Any, model: Any, optimizer: Any, text: Any, mesh: Any, number: int, mine: range) -> float:
        group = optimizer.param_groups[0]
        seen.append((mesh.mesh.tolist(), mesh.mesh_dim_names, list(mine), group["lr"], group["betas"], group["weight_decay"]))
        return 1.5

    monkeypatch.setattr(job, "_sharded", lambda model, device, half: model)
    monkeypatch.setattr(job, "_step", step)
    monkeypatch.setattr(job, "save", lambda *_: None)
    monkeypatch.setattr(job.time, "perf_counter", itertools.count(0.0, 0.5).__next__)
    settings = job_in(tmp_path, steps=1, batch=4, context=3, rate=0.25)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=6)
    try:
        job.train(CPU, settings, made.append)
    finally:
        dist.destroy_process_group()
    assert seen == [([[0, 1, 2], [3, 4, 5]], ("dp", "cp"), sequences, 0.25, (0.9, 0.95), 0.1)]
    pairs = sum(int((b["position_ids"] + 1).sum()) for b in job._batch(settings, corpus(None, length=90), 0)) / 360
    (result,) = made
    assert (result.seconds, result.tokens_per_second) == (0.5, 720)
    assert result.flops == pytest.approx(360 * flops_per_token(settings.model, pairs) / 0.5 / 6)


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("half", [False, True])
def test_every_block_and_the_model_are_sharded_and_gradients_are_summed(half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    sharded: list[Any] = []
    shard = job.fully_shard
    monkeypatch.setattr(job, "fully_shard", lambda part, **options: sharded.append((part, options)) or shard(part, **options))
    monkeypatch.setattr(job.FSDPModule, "set_gradient_divide_factor", lambda part, factor: calls.append((part, factor)))
    monkeypatch.setattr(job.FSDPModule, "set_force_sum_reduction_for_comms", lambda part, on: calls.append((part, on)))
    given = Decoder(DecoderConfig(width=16, layers=2)).eval()
    model = job._sharded(given, CPU, half)
    parts = [*model.blocks, model]
    assert model is given and model.training and [part for part, _ in sharded] == parts
    assert len(calls) == 6 and all((part, 1.0) in calls and (part, True) in calls for part in parts)
    for _, options in sharded:
        assert options["mesh"].mesh_dim_names == ("all",)
        policy = options.get("mp_policy")
        assert (policy is not None) is half
        assert policy is None or (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(("platform", "size"), [("darwin", 77), ("linux", 77 * 1024)])
def test_resident_memory_is_in_kib_except_on_macos(platform: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(job.sys, "platform", platform)
    monkeypatch.setattr(job.resource, "getrusage", lambda who: asked.append(who) or SimpleNamespace(ru_maxrss=77))
    assert job._peak_memory(CPU) == size and asked == [job.resource.RUSAGE_SELF]


def test_documents_of_the_demo_are_one_long_one_and_ever_shorter_ones() -> None:
    assert demo_ranks.DemoSizes() == demo_ranks.DemoSizes(tokens=16384, heads=4, kv_heads=2, dim=64)
    assert demo_ranks.DemoSizes(tokens=10000).lengths() == [3500, 3250, 975, 1365, 364, 109, 218, 65, 154]
    assert demo_ranks.DemoSizes(tokens=64).lengths() == [22, 21, 6, 9, 2, 1, 1, 1, 1]
    sizes = demo_ranks.DemoSizes(tokens=40)  # nothing is left after the last share
    assert sizes.lengths() == [14, 13, 3, 6, 1, 1, 1, 1]
    assert str(sizes.mask()) == str(ls.causal() & ls.documents(lengths=sizes.lengths()))


def test_inputs_of_the_demo_are_the_same_everywhere() -> None:
    q, k, v, grad_out = demo_ranks.inputs(demo_ranks.DemoSizes(tokens=5, heads=6, kv_heads=2, dim=3), CPU)
    assert [t.shape for t in (q, k, v, grad_out)] == [(1, 6, 5, 3), (1, 2, 5, 3), (1, 2, 5, 3), (1, 6, 5, 3)]
    drawn = torch.randn(1, 6, 5, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(q, drawn) and not torch.equal(k, v)
    assert {t.device.type for t in demo_ranks.inputs(demo_ranks.DemoSizes(tokens=5), torch.device("meta"))} == {"meta"}


def test_forward_and_backward_give_out_and_three_gradients() -> None:
    tensors = [t.double() for t in demo_ranks.inputs(demo_ranks.DemoSizes(tokens=9, heads=6, kv_heads=2, dim=3), CPU)]
    out, *gradients = demo_ranks.forward_backward(tensors, mask=ls.causal())
    q, k, v = (t.clone().requires_grad_() for t in tensors[:3])
    want = oracle(q, k, v, mask=ls.causal())
    torch.testing.assert_close(out, want.detach())
    for got, right in zip(gradients, torch.autograd.grad(want, (q, k, v), tensors[3]), strict=True):
        torch.testing.assert_close(got, right)
    assert not out.requires_grad and not any(t.requires_grad for t in tensors)


@pytest.mark.parametrize(("ranks", "ulysses"), [(2, True), (3, False)])
def test_other_ranks_of_the_demo_run_what_is_possible_and_return_nothing(
    ranks: int, ulysses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[str] = []
    plan = demo_ranks.plan
    monkeypatch.setattr(demo_ranks, "plan", lambda *args, **options: planned.append(options["strategy"]) or plan(*args, **options))
    monkeypatch.setattr(demo_ranks, "forward_backward", lambda tensors, **_: tensors[:1])
    monkeypatch.setattr(ls.Plan, "unshard", lambda self, x, dim: x)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=ranks)
    try:
        assert demo_ranks.on_rank(CPU, demo_ranks.DemoSizes(tokens=300, heads=4, kv_heads=2, dim=8)) == (0.0, [])
    finally:
        dist.destroy_process_group()
    assert planned == ["auto", "ring", "allgather", "exchange", *(["ulysses"] if ulysses else [])]


def test_a_model_is_moved_before_it_is_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    meshes: list[Any] = []
    monkeypatch.setattr(job.dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(job, "init_device_mesh", lambda *args, **options: meshes.append((args, options)))
    monkeypatch.setattr(job, "fully_shard", lambda part, **options: None)
    model = job._sharded(Decoder(DecoderConfig(width=16, layers=1)), torch.device("meta"), False)
    assert {p.device.type for p in model.parameters()} == {"meta"} and meshes == [(("meta", (3,)), {"mesh_dim_names": ("all",)})]
